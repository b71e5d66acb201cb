"""What harness/tools/remote.py does on a host: one command of JSON, answered by a line of JSON.

The text of this file, with a call of `main` behind it, is the standard input of `python3 -` there, so no argument
passes a shell. Nothing needs to be installed: the standard library only, Python 3.8 or later.

    FOLDER/lock               held by the process that supervises a run: one run at a time in a folder
    FOLDER/tree/              the files of the checkout, its .venv, builds and records
    FOLDER/sent/              other files that arguments name, by their absolute path on the client
    FOLDER/jobs/ID/           job.json (what to run), state.json, alive (locked by its supervisor), log, records.jsonl,
                              events.jsonl and profile/, which the run made
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time

REPLY = "dsv4-kernels-reply:"  # before an answer, since a shell's start-up files may print something
KEPT = (".venv", ".build", "leaderboard/out", "leaderboard/results")  # of the tree, what no client sends
NEEDED = ("python3", "rsync", "make")
POLL_S = 0.2
GRACE_S = 10  # between SIGINT and SIGKILL of a run that is stopped
STOP_S = 60  # how long `stop` waits for a run to be gone
TAIL = 12  # lines of a failed set-up that are shown again
OLDEST = (3, 11)  # of Python, what `make setup` needs
FAILED = 2  # exit code, as for any failure that is not the submission's
JOB_VARIABLE = "KERNEL_JOB"  # in the environment of whatever a job starts: its folder
_SUBREAPER, _DIES_WITH_PARENT = 36, 1  # of prctl


class Refused(Exception):
    """What was asked cannot be done. The message says why and what to do."""


def main(command: str, folder: str, **arguments) -> None:
    """Do a command and print its answer, {"ok": ...} or {"error": why}; `follow` prints the log instead."""
    try:
        base = os.path.join(os.path.expanduser("~"), folder)
        answer = {"ok": COMMANDS[command](base, **arguments)}
    except Refused as error:
        answer = {"error": str(error)}
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        answer = {"error": f"{error}{': the disk is full, free some space there' if full else ''}"}
    if command != "follow" or "error" in answer:
        print(REPLY + json.dumps(answer), flush=True)


def prepare(base: str) -> dict:
    """Make the folders that files are sent to. Return {"base": its absolute path}. Refused: a program is missing, or a
    run is in progress.
    """
    lacking = [name for name in NEEDED if not shutil.which(name)]
    if lacking:
        raise Refused(f"it has no {', '.join(lacking)}: install {'them' if lacking[1:] else 'it'} there first")
    if sys.version_info < OLDEST:
        raise Refused(f"its python3 is {sys.version.split()[0]}, {OLDEST[0]}.{OLDEST[1]} or later is needed")
    _see_idle(base)
    for part in ("tree/leaderboard/results", "sent", "jobs"):
        os.makedirs(os.path.join(base, part), mode=0o700, exist_ok=True)
    return {"base": os.path.realpath(base)}


def place(base: str) -> dict:
    """Return {"base": the folder's absolute path}."""
    return {"base": os.path.realpath(base)}


def start(base: str, job: str, words: list, env: dict, files: list) -> dict:
    """Begin job `job`, unless it has begun, and return at once. words: arguments of harness/run.py; env: more of its
    environment; files: what the tree consists of, others are removed. Refused: another run is in progress.
    """
    place = os.path.join(base, "jobs", job)
    if os.path.exists(os.path.join(place, "state.json")):
        return {"job": job}  # the answer to the first request was lost
    lock = _lock(os.path.join(base, "lock"))
    if lock is None:
        _see_idle(base)
        raise Refused("another run has just begun in this folder: --status says which")
    _end_marked(os.path.join(base, "jobs"))  # of jobs whose supervisor was killed
    _remove_others(os.path.join(base, "tree"), set(files))
    os.makedirs(place, exist_ok=True)
    alive = _lock(os.path.join(place, "alive"))
    if alive is None:
        raise Refused(f"job {job} is being started by another process")
    _write(os.path.join(place, "job.json"), {"words": words, "env": env, "began": time.time()})
    _write(os.path.join(place, "state.json"), {"state": "set-up", "pid": 0})
    sys.stdout.flush()
    if os.fork() == 0:
        try:
            _supervise(base, job, [lock, alive])
        finally:
            os._exit(1)
    return {"job": job}


def follow(base: str, job: str, offset: int) -> None:
    """Print the log of a job from byte `offset` on, until the job has ended or its reader is gone."""
    place = _place(base, job)
    sys.stdout.write(REPLY + "\n")
    sys.stdout.flush()
    reader = select.poll()
    reader.register(1, 0)  # errors only: the connection is gone
    with open(os.path.join(place, "log"), "ab+") as log:
        log.seek(offset)
        while True:
            alive = _alive(place)
            while True:
                part = log.read(65536)
                if not part:
                    break
                while part:
                    part = part[os.write(1, part) :]
            if not alive or reader.poll(0):
                return
            time.sleep(POLL_S)


def status(base: str) -> list:
    """Return every job, oldest first: {"job", "state", "code", "words", "began", "why"}."""
    jobs = os.path.join(base, "jobs")
    names = sorted(os.listdir(jobs)) if os.path.isdir(jobs) else []
    return [_said(base, name) for name in names if os.path.exists(os.path.join(jobs, name, "state.json"))]


def stop(base: str, job: str) -> dict:
    """End a job with everything that it started, and return what `status` says of it then. One that has ended stays as
    it is. Refused: it does not end.
    """
    place = _place(base, job)
    deadline = time.monotonic() + STOP_S
    while _alive(place):
        pid = _read(os.path.join(place, "state.json")).get("pid")
        if pid:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, signal.SIGTERM)
        if time.monotonic() > deadline:
            raise Refused(f"process {pid} does not end {STOP_S} s after SIGTERM; look there with `ps`")
        time.sleep(POLL_S)
    _end_marked(place)  # where its supervisor was killed
    return _said(base, job)


COMMANDS = {"prepare": prepare, "place": place, "start": start, "follow": follow, "status": status, "stop": stop}


# The process that supervises a run.


def _supervise(base: str, job: str, locks: list) -> None:
    """Set up, run, and write how it ended. Does not return. locks: descriptors, held until the end."""
    place, tree = os.path.join(base, "jobs", job), os.path.join(base, "tree")
    os.setsid()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    log = os.open(os.path.join(place, "log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)  # what the run leaves behind becomes a child of this process
    supervisor = _Supervisor(place, tree)
    signal.signal(signal.SIGTERM, supervisor.stop)
    try:
        ended = supervisor.run(base)
    except Exception as error:
        ended = {"state": "failed", "code": FAILED, "why": str(error)}
    left = _end_all()
    if left:
        ended["why"] = f"processes {left} could not be ended. {ended.get('why', '')}"
    supervisor.write(ended)
    os._exit(0)


class _Supervisor:
    """The steps of a job, one child at a time."""

    def __init__(self, place: str, tree: str) -> None:
        self.place, self.tree = place, tree
        self._asked = False

    def write(self, state: dict) -> None:
        _write(os.path.join(self.place, "state.json"), {"pid": os.getpid(), "ended": time.time(), **state})

    def stopping(self) -> bool:
        """Whether this process was asked to stop."""
        return self._asked

    def stop(self, *_) -> None:
        self._asked = True

    def run(self, base: str) -> dict:
        """Do the steps. Return the last state."""
        job = _read(os.path.join(self.place, "job.json"))
        self.write({"state": "set-up"})
        begin = os.path.getsize(os.path.join(self.place, "log"))
        code = self._step(["make", "--no-print-directory", "setup"], {})
        if code and not self.stopping():
            with open(os.path.join(self.place, "log"), errors="replace") as log:
                log.seek(begin)
                tail = log.read().splitlines()[-TAIL:]
            return {"state": "set-up failed", "code": FAILED, "why": f"make setup: exit code {code}", "tail": tail}
        python = os.path.join(self.tree, ".venv", "bin", "python")
        if self.stopping():
            return {"state": "stopped", "code": 130}
        self.write({"state": "running"})
        profiles = _profiles(self.tree)
        made = [f"--{name}={os.path.join(self.place, name)}" for name in ("json", "events")]
        # Where nvcc is on the PATH of a terminal only.
        cuda = {"PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/local/cuda/bin"}
        code = self._step([python, "harness/run.py", *job["words"], *made], {**cuda, **job["env"]})
        for name, changed in _profiles(self.tree).items():
            if profiles.get(name) != changed:
                os.makedirs(os.path.join(self.place, "profile"), exist_ok=True)
                shutil.copy2(name, os.path.join(self.place, "profile"))
        return {"state": "stopped" if self.stopping() else "ended", "code": 130 if self.stopping() else code}

    def _step(self, command: list, env: dict, quiet: bool = False) -> int:
        """Run a command in the tree, as a child that dies with this process. Return its exit code."""

        def begin() -> None:
            ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
            for number in (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)

        said = subprocess.DEVNULL if quiet else None
        child = subprocess.Popen(
            command,
            cwd=self.tree,
            env={**os.environ, **env, JOB_VARIABLE: os.path.join(self.place, "")},
            preexec_fn=begin,
            stdout=said,
            start_new_session=True,
        )
        asked_s = None
        while child.poll() is None:
            if self.stopping() and asked_s is None:
                asked_s = time.monotonic()
                os.killpg(child.pid, signal.SIGINT)  # a recorded run then says how to go on with it
            if asked_s is not None and time.monotonic() - asked_s > GRACE_S:
                _end_all()
            time.sleep(POLL_S)
        return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _end_all() -> list:
    """End every descendant of this process. Return the pids of those that would not end within GRACE_S."""
    deadline = time.monotonic() + GRACE_S
    while True:
        below = _descendants()
        if not below or time.monotonic() > deadline:
            return below
        for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, so that none forks on
            for pid in below:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return []
        time.sleep(0.02)


def _descendants() -> list:
    """The living processes below this one."""
    children = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as stat:
                    fields = stat.read().rpartition(")")[2].split()
            except OSError:
                continue
            if fields and fields[0] not in ("Z", "X"):
                children.setdefault(int(fields[1]), []).append(int(name))
    found, todo = [], [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _end_marked(place: str) -> None:
    """End the processes that jobs in the folder `place`, or the job of that folder, have left behind."""
    mark = f"\0{JOB_VARIABLE}={os.path.join(place, '')}".encode()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/environ", "rb") as environ:
                    marked = mark in b"\0" + environ.read()
                if marked:
                    os.kill(int(name), signal.SIGKILL)
            except OSError:
                continue  # it has ended, or is another user's


# Files.


def _profiles(tree: str) -> dict:
    """The reports of --mode profile: {path: (size, time of its last change)}."""
    folder = os.path.join(tree, "leaderboard", "out", "profile")
    names = [os.path.join(folder, name) for name in os.listdir(folder)] if os.path.isdir(folder) else []
    return {name: (os.path.getsize(name), os.stat(name).st_mtime_ns) for name in names if os.path.isfile(name)}


def _remove_others(tree: str, files: set) -> None:
    """Remove what an earlier run was sent and this one is not: a deleted variant must not run."""
    for folder, folders, names in os.walk(tree):
        inside = os.path.relpath(folder, tree)
        folders[:] = [name for name in folders if os.path.normpath(os.path.join(inside, name)) not in KEPT]
        for name in [*names, *(one for one in folders if os.path.islink(os.path.join(folder, one)))]:
            path = os.path.normpath(os.path.join(inside, name))
            if path not in files and path not in KEPT and "__pycache__" not in folder:
                os.unlink(os.path.join(folder, name))


def _lock(path: str):
    """Lock a file for as long as this process, or a fork of it, lives. None: another process has it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def _alive(place: str) -> bool:
    """Whether the supervisor of a job lives."""
    fd = os.open(os.path.join(place, "alive"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


def _see_idle(base: str) -> None:
    running = [one["job"] for one in status(base) if one["alive"]]
    if running:
        raise Refused(f"job {running[-1]} is running in this folder: --attach follows it, --stop ends it")


def _place(base: str, job: str) -> str:
    place = os.path.join(base, "jobs", job)
    if os.path.basename(place) != job or not os.path.exists(os.path.join(place, "state.json")):
        known = ", ".join(one["job"] for one in status(base)[-5:]) or "none"
        raise Refused(f"there is no job {job!r} (the last ones: {known})")
    return place


def _said(base: str, job: str) -> dict:
    place = os.path.join(base, "jobs", job)
    alive = _alive(place)
    state, asked = _read(os.path.join(place, "state.json")), _read(os.path.join(place, "job.json"))
    if not alive and state["state"] in ("set-up", "running"):
        state = {"state": "lost", "code": FAILED, "why": "its supervisor was killed, or the host was restarted"}
    return {"code": None, "why": "", **asked, **state, "job": job, "alive": alive}


def _read(path: str) -> dict:
    with open(path) as file:
        return json.load(file)


def _write(path: str, content: dict) -> None:
    """Replace a file of JSON as a whole."""
    with open(path + ".part", "w") as file:
        json.dump(content, file)
    os.replace(path + ".part", path)
