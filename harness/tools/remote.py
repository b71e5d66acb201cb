#!/usr/bin/env python3
"""Judge on another machine, over the user's own ssh and rsync: harness/tools/remote.py HOST PROBLEM ...

It is `harness/run.py --on HOST PROBLEM ...`. The run goes on there whatever becomes of this process and of the
connection; --attach, --status and --stop are for later. docs/remote.md has the details; harness/tools/on_host.py is
what runs on the host.
"""

import argparse
import codecs
import contextlib
import fcntl
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO, TypeVar, cast

NAME = "harness/tools/remote.py"
ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from problems.common import load, venv  # noqa: E402

if __name__ == "__main__":
    venv.enter(NAME)

from harness.problem import folders, sources  # noqa: E402
from harness.problem.folders import UsageError  # noqa: E402
from harness.results import output, record, text  # noqa: E402
from harness.tools import on_host  # noqa: E402

OUT = ROOT / "leaderboard" / "out" / "remote"  # /HOST/JOB/: what came back of a job, but for its records
SSH_VARIABLE, FOLDER_VARIABLE = "KERNEL_SSH", "KERNEL_REMOTE_FOLDER"
# A dead connection is noticed after 45 s.
SSH_OPTIONS = ("-T", "-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3")
LOGIN = "sh -lc 'exec python3 -'"  # the same words for every shell, and a login shell's PATH
AGAIN_S = (1, 2, 4, 8, 15, 30, 30, 30, 30, 30)  # pauses between attempts to reach the host again: three minutes
RESULTS = "leaderboard/results/"
INTERRUPTED_EXIT = 130
_HINTS = {
    "resolve hostname": "no such host: `ssh HOST` must work first",
    "connection refused": "no ssh server answers there",
    "permission denied": "the host does not accept your key: `ssh HOST` must work first",
    "host key verification": "`ssh HOST` once, and accept its key",
    "timed out": "the host does not answer",
}
_Answer = TypeVar("_Answer")


class LostError(UsageError):
    """The host cannot be reached, or the connection broke."""


class Host:
    """A host as ssh knows it, and the folder there that belongs to this checkout. UsageError: no such name."""

    def __init__(self, name: str, option: str = "HOST") -> None:
        if not name or name.startswith("-") or ":" in name or not name.isprintable() or " " in name:
            raise UsageError(f"{option} must be a name that ssh knows, such as user@machine or an alias, got {name!r}")
        for program in ("ssh", "rsync"):
            if not shutil.which(program):
                raise UsageError(f"{option} needs {program}, which is not installed here (Debian: `make setup-system`)")
        self.name = name
        self.ssh = [*shlex.split(os.environ.get(SSH_VARIABLE, "ssh")), *SSH_OPTIONS]
        mine = hashlib.sha256(f"{socket.gethostname()}:{ROOT}".encode()).hexdigest()[:8]
        self.folder = os.environ.get(FOLDER_VARIABLE) or f".cache/dsv4-kernels/{ROOT.name}-{mine}"
        self.kept = OUT / re.sub(r"[^\w.@-]", "_", name)
        self.base = ""  # the folder's absolute path there, once it is known

    def ask(self, command: str, **arguments: object) -> Any:
        """Return the answer to a command of harness/tools/on_host.py. UsageError: it was refused. LostError."""
        with tempfile.TemporaryFile() as errors:
            done = subprocess.run(
                [*self.ssh, self.name, LOGIN],
                input=self._program(command, arguments),
                stdout=subprocess.PIPE,
                stderr=errors,
            )
            said = done.stdout.decode(errors="replace")
            if on_host.REPLY not in said:
                self._failed(done.returncode, errors, said)
        return self._answer(said.rpartition(on_host.REPLY)[2])

    def follow(self, job: str, offset: int, show: Callable[[bytes], None]) -> None:
        """Pass the log of a job from byte `offset` on to `show`, until the job has ended. Raise as `ask`."""
        command = [*self.ssh, self.name, LOGIN]
        with tempfile.TemporaryFile() as errors:
            pipe = subprocess.PIPE
            reader = subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe, stderr=errors)
            assert reader.stdin and reader.stdout
            log = io.BufferedReader(cast(io.RawIOBase, reader.stdout))
            try:
                with contextlib.suppress(BrokenPipeError):  # the exit code says why
                    reader.stdin.write(self._program("follow", {"job": job, "offset": offset}))
                    reader.stdin.close()
                while (line := log.readline()) and on_host.REPLY.encode() not in line:
                    pass
                if refused := line.decode(errors="replace").partition(on_host.REPLY)[2].strip():
                    self._answer(refused)
                while part := log.read1(65536):
                    show(part)
                if reader.wait() or not line:
                    self._failed(reader.returncode or 1, errors, "")
            finally:
                reader.kill()
                reader.wait()
                log.close()

    def send(self, source: Path, files: Iterable[str], part: str) -> None:
        """Copy files, named from the folder `source`, into a part of the folder there. Raise as `ask`."""
        if listed := "\0".join(files):
            self._rsync("--from0", "--files-from=-", f"{source}/", f"{self.name}:{self.base}/{part}/", listed=listed)

    def fetch(self, part: str, target: Path, *options: str) -> None:
        """Copy a part of the folder there into the folder `target`, in which nothing is removed. Raise as `ask`."""
        target.mkdir(parents=True, exist_ok=True)
        self._rsync("-r", *options, f"{self.name}:{self.base}/{part}/", f"{target}/")

    def _rsync(self, *arguments: str, listed: str = "") -> None:
        # --secluded-args, by its old name: the paths pass no shell.
        command = ["rsync", "-lptz", "--protect-args", "-e", shlex.join(self.ssh), *arguments]
        done = subprocess.run(command, input=listed.encode("utf-8", "surrogateescape"), capture_output=True)
        if done.returncode:
            said = done.stderr.decode(errors="replace")
            if done.returncode == 255 or "Connection" in said or "connection unexpectedly closed" in said:
                raise LostError(self._unreached(said))
            full = "; the disk is full: free some space" if "No space left" in said else ""
            raise UsageError(f"rsync with {self.name} failed ({done.returncode}){full}: {_lines(said, 3)}")

    def _program(self, command: str, arguments: dict) -> bytes:
        call = {"command": command, "folder": self.folder, **arguments}
        return f"{Path(on_host.__file__).read_text()}\nmain(**json.loads({json.dumps(call)!r}))\n".encode()

    def _answer(self, said: str) -> Any:
        answer = json.loads(said)
        if "error" in answer:
            raise UsageError(f"{self.name}: {answer['error']}")
        return answer["ok"]

    def _failed(self, code: int, errors: Any, said: str) -> None:
        """Raise what a failure of ssh means."""
        errors.seek(0)
        complaint = errors.read().decode(errors="replace")
        if code == 255:
            raise LostError(self._unreached(complaint))
        if "python3" in complaint and code in (126, 127):
            raise UsageError(f"{self.name} has no python3: install Python 3.11 or later there first")
        raise LostError(f"{self.name} gave no answer (exit code {code}): {_lines(complaint or said, 3)}")

    def _unreached(self, complaint: str) -> str:
        hint = next((hint for words, hint in _HINTS.items() if words in complaint.lower()), "the connection broke")
        said = _lines(complaint, 1)
        return f"{self.name} cannot be reached{f': {said}' if said else ''} ({hint.replace('HOST', self.name)})"


def start(args: argparse.Namespace, further: list[str], defaults: argparse.Namespace, stdout: TextIO) -> int:
    """Judge on args.on as harness/run.py would here. Return the exit code of the run there.

    args, further, defaults: of harness/run.py; stdout: where --json - writes. UsageError: a file is missing, the host
    cannot be reached, or refuses.
    """
    host = Host(args.on, "--on")
    known = known_files()
    words, outside = words_of(args, further, defaults, set(known))
    job = record.new_run_id()
    host.ask("place")  # a host that cannot be reached leaves nothing here
    with _alone(host):
        host.base = host.ask("prepare")["base"]
        output.say(f"sending {len(known)} files to {host.name}:{host.base}")
        host.send(ROOT, known, "tree")
        host.send(Path("/"), [str(path)[1:] for path in outside], "sent")
        host.send(record.RESULTS, records(), f"tree/{RESULTS}")
        begin = {"job": job, "words": words, "env": commit(), "files": known}
        _patiently(host, lambda: host.ask("start", **begin))
    output.say(f"job {job} has begun on {host.name}; it goes on there if this command ends")
    code = _finish(host, job)
    kept = host.kept / job
    if args.json and (kept / "json").is_file():
        said = (kept / "json").read_text(encoding="utf-8")
        if args.json == "-":
            output.say(said, stdout)
        else:
            output.write_whole(Path(args.json), said)
    if args.events and (kept / "events").is_file():
        with open(args.events, "ab") as file:
            file.write((kept / "events").read_bytes())
    return code


def known_files() -> list[str]:
    """The files of the checkout that git knows or does not ignore, from its root, but for records. UsageError: it is no
    checkout.
    """
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True)
    if done.returncode:
        said = _lines(done.stderr, 1)
        raise UsageError(f"{ROOT} must be a git checkout, since git says which files are sent: {said}")
    names = [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]
    kept = (name for name in names if not name.startswith((RESULTS, ".venv/")) and name != ".venv")
    return sorted({name for name in kept if (ROOT / name).is_file() or (ROOT / name).is_symlink()})


def words_of(
    args: argparse.Namespace, further: list[str], defaults: argparse.Namespace, known: set[str]
) -> tuple[list[str], list[Path]]:
    """Return (arguments of harness/run.py on the host, further files to send). known: the files that are sent anyway.

    Files outside the checkout, and ignored ones, get to sent/ under their absolute path, so that what they include lies
    where it did. UsageError: one of them is missing.
    """
    values, outside = dict(vars(args)), []
    for name in ("submission", "against"):
        if str(values[name] or "").endswith(".py") or (name == "submission" and values[name]):
            file = Path(values[name])
            if not file.is_file():
                raise UsageError(f"--{name} must be a Python file, found none at {file}")
            with folders.reading(file.name):
                values[name], more = _placed(file.resolve(), sources.own(file), known)
            outside += more
    folder = folders.place(args.problem)
    if folder.parent == load.PROBLEMS:
        values["problem"] = folder.name
    else:
        files = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        if not folders.is_own(folder):
            files += folders.find(args.problem).others
        values["problem"], more = _placed(folder, files, known)
        outside += more
    words = [values.pop("problem"), *further]
    for name, value in values.items():
        if name in ("on", "json", "events") or value == getattr(defaults, name):
            continue
        option = f"--{name.replace('_', '-')}"
        words.append(option if value is True or value == "" else f"{option}={value}")
    return words, outside


def _placed(path: Path, files: Iterable[Path], known: set[str]) -> tuple[str, list[Path]]:
    """Return (what `path` is called there, the files to send for it)."""
    files = [*files]
    if all(file.is_relative_to(ROOT) and str(file.relative_to(ROOT)) in known for file in files):
        return str(path.relative_to(ROOT)), []
    return f"../sent{path}", files


def records() -> list[str]:
    """The files of records, from the folder of results: attempts and the present leader are counted by them."""
    found = [file for machine in record.RESULTS.glob("*") for file in record.files(machine)]
    return sorted(str(file.relative_to(record.RESULTS)) for file in found)


def bring(name: str, data: bytes) -> int:
    """Write a run's file into the folder of results, if it is not there. Return how many were written."""
    target = record.RESULTS / name
    if target.exists():
        return 0
    with record.storing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        output.write_whole(target, data.decode())
    return 1


def commit() -> dict[str, str]:
    """The environment that says on another machine which commit the files are of (harness/results/environment.py)."""
    head, status = (
        subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--", ".", ":(exclude)leaderboard/results"))
    )
    if head.returncode or status.returncode:
        return {}
    return {"GIT_COMMIT": head.stdout.strip(), "GIT_DIRTY": str(int(bool(status.stdout.strip())))}


def _finish(host: Host, job: str) -> int:
    """Follow a job to its end and bring back what it made. Return its exit code; that of an interrupted program if the
    keyboard ends this one, and the run goes on.
    """
    try:
        _follow(host, job)
        return _collect(host, job)
    except KeyboardInterrupt:
        output.complain(f"{NAME}: job {job} goes on on {host.name}; {_later(host, job)}")
        return INTERRUPTED_EXIT
    except LostError as error:
        raise UsageError(f"{error}; job {job} goes on there: {_later(host, job)}") from None


def _later(host: Host, job: str) -> str:
    return f"`{NAME} {host.name} --attach {job}` follows it and fetches its records, --stop {job} ends it"


def _follow(host: Host, job: str) -> None:
    seen, decoder = 0, codecs.getincrementaldecoder("utf-8")("replace")

    def show(part: bytes) -> None:
        nonlocal seen
        seen += len(part)
        try:
            sys.stdout.write(decoder.decode(part))
            sys.stdout.flush()
        except BrokenPipeError:
            raise output.ClosedError("the reader of standard output has gone") from None

    _patiently(host, lambda: host.follow(job, seen, show))


def _patiently(host: Host, action: Callable[[], _Answer]) -> _Answer:
    """Do what may be done twice, again and again while the host cannot be reached. LostError: it stays away."""
    for pause in (*AGAIN_S, None):
        try:
            return action()
        except LostError as error:
            if pause is None:
                raise
            output.complain(f"{NAME}: {error}; the run goes on there; trying again in {pause} s")
            time.sleep(pause)
    raise AssertionError


def _collect(host: Host, job: str) -> int:
    """Bring back what a job has made, and every record that is in its folder. Return its exit code. Done twice, or by
    two processes, it adds nothing.
    """
    (ended,) = [one for one in _patiently(host, lambda: host.ask("status")) if one["job"] == job]
    host.base = host.base or _patiently(host, lambda: host.ask("place"))["base"]
    kept = host.kept / job
    _patiently(host, lambda: host.fetch(f"jobs/{job}", kept, "--exclude=alive", "--exclude=*.part"))
    there = host.kept / "results"
    only = ("--include=/*/", "--include=/*/*/", f"--include=/*/*/{record.RUN_FILE}", "--exclude=*")
    _patiently(host, lambda: host.fetch(f"tree/{RESULTS}", there, *only))
    added = sum(bring(str(file.relative_to(there)), file.read_bytes()) for file in there.glob(f"*/*/{record.RUN_FILE}"))
    profiles = sorted((kept / "profile").glob("*"))
    for path in profiles:
        output.say(f"profile: {path.relative_to(ROOT)}")
    log = (kept / "log").relative_to(ROOT)
    output.say(f"{host.name}: job {job} {ended['state']}, {added} new runs here; log: {log}")
    if ended["why"]:
        output.complain(f"{NAME}: {host.name}: {ended['state']}: {ended['why']}")
    for line in ended.get("tail", ()):
        output.complain(f"    {text.line(line)}")
    return ended["code"]


@contextlib.contextmanager
def _alone(host: Host) -> Iterator[None]:
    """Within, no other process of this checkout sends files to the host."""
    host.kept.mkdir(parents=True, exist_ok=True)
    with open(host.kept / "sending", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _lines(said: str | bytes, count: int) -> str:
    """The last lines of an error message, on one line."""
    said = said.decode(errors="replace") if isinstance(said, bytes) else said
    return text.line("; ".join(line.strip() for line in said.strip().splitlines()[-count:]), 400)


def _status(host: Host) -> int:
    jobs = host.ask("status")
    for one in jobs:
        began = time.strftime("%Y-%m-%d %H:%M", time.localtime(one["began"]))
        code = "" if one["code"] is None else f"exit code {one['code']}"
        words = text.line(shlex.join(one["words"]))
        output.say(f"{one['job']}  {began}  {one['state']:<14} {code:<14} {words}  {text.line(one['why'])}".rstrip())
    if not jobs:
        output.say(f"no job of this checkout on {host.name}")
    return 0


def control(args: argparse.Namespace) -> int:
    """Do what --status, --attach or --stop says. Return the exit code: for --attach the run's."""
    host = Host(args.host)
    if args.status:
        return _status(host)
    jobs = host.ask("status")
    job = args.attach or args.stop or next((one["job"] for one in reversed(jobs)), "")
    if job not in [one["job"] for one in jobs]:
        known = ", ".join(one["job"] for one in jobs[-5:]) or "none"
        raise UsageError(f"{host.name} has no job {job or 'of this checkout'} (the last ones: {known})")
    if args.stop is None:
        return _finish(host, job)
    ended = _patiently(host, lambda: host.ask("stop", job=job))
    _collect(host, job)
    return 0 if ended["state"] in ("stopped", "ended") else ended["code"]


def parser() -> argparse.ArgumentParser:
    p = output.Parser(
        NAME,
        description="Judge on another machine, over your own ssh and rsync.",
        usage=f"{NAME} HOST PROBLEM ... | HOST --attach [JOB] | HOST --status | HOST --stop [JOB]",
        epilog="PROBLEM ...: arguments of harness/run.py, of which this is --on HOST.",
    )
    p.add_argument("host", metavar="HOST", help="as ssh knows it")
    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument("--attach", nargs="?", const="", metavar="JOB", help="follow a run, fetch what it made")
    what.add_argument("--status", action="store_true", help="list the runs of this checkout there")
    what.add_argument("--stop", nargs="?", const="", metavar="JOB", help="end a run with all that it started")
    return p


def main(argv: list[str] | None = None) -> int:
    """Run the command. Return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    controls = ("--attach", "--status", "--stop", "-h", "--help")
    if len(words) >= 2 and not any(word.partition("=")[0] in controls for word in words[:2]):
        run = str(ROOT / "harness" / "run.py")
        os.execv(sys.executable, [sys.executable, run, "--on", words[0], *words[1:]])
    args = parser().parse_args(words)
    try:
        return control(args)
    except (UsageError, record.StorageError, OSError) as error:
        output.complain(f"{NAME}: {text.line(error, 1000)}")
        return output.USAGE_EXIT
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT


if __name__ == "__main__":
    sys.exit(output.script(main))
