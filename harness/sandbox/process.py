"""Child processes that may crash, hang, eat memory or print for ever: each under a reaper, in a session, and watched.

The reaper (harness/sandbox/reaper.py) ends a child with all it ever started when it ends, or the judge says so or dies.
"""

import contextlib
import marshal
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple, Self

from harness.results import text
from harness.runner import gate, wire
from harness.sandbox import confine, reaper
from harness.sandbox.policy import Jail, SandboxError

ROOT = Path(__file__).resolve().parents[2]
OUTPUT_LIMIT = 16 * 2**20  # bytes that a child may print before it is killed
OUTPUT_KEPT = 4000  # bytes of its first and of its last output that are kept for the report
PRINTED = "; it printed: "  # in a reason, ahead of the end of what it printed
WATCH_S = 0.25  # between looks at what a child takes while a call is timed: each takes a processor for a moment
TREE_S = 0.5  # how often a child's own processes are looked up, which takes longer than to read their memory
WELL, LATE, GONE, RUNS_ON = range(4)  # what harness/runner/gate.cpp answers
CLOCK = "the judge's clock; runners stopped by signals"
REAPER_LIMIT_S = 30  # until the reaper has started the child; and beyond its own limit until it has ended
SEND_LIMIT_S = 30  # for a child to take a message off its socket; reading has limits of its own
CLOSE_S = 0.1  # for a child to end by itself; what a torch process does beyond that is of no use to anybody
MEMORY_SHARE = 0.6  # of the memory that is available when a child starts; beyond that it is killed
# What the files of a jailed child may take, or half of what is free when it starts.
FILES_LIMIT = {"-B1": 4 * 2**30, "--inodes": 200_000}


class Died(RuntimeError):
    """A child ended, or was killed, before it answered. `status` is the verdict that this amounts to."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class StopError(RuntimeError):
    """The processes of a runner could not be stopped, or are gone."""


class Freezer(NamedTuple):
    """Stops every process below the reaper of the runner `pid`, and continues them (harness/runner/gate.cpp). It does
    so by signals: the filter of system calls refuses SIGCONT and all that brings it.
    """

    reaper: int
    pid: int

    def stop(self) -> None:
        """Return when nothing of the runner can run. StopError: it still runs, or its process is gone."""
        if code := gate.bindings().stop(*self):
            why = "its process is gone" if code == GONE else f"processes still ran after {gate.STOP_LIMIT_S:g} s"
            raise StopError(f"the runner could not be stopped: {why}")

    def resume(self) -> None:
        gate.bindings().resume(*self)

    def processes(self) -> list[int]:
        """Return the pids of what the runner started and did not end: an exact list if it is stopped."""
        return [pid for pid in reaper.descendants(self.reaper) if pid != self.pid]


def harden() -> None:
    """Nobody of the same user may read or trace this process from now on, and it leaves no core. Not for runners."""
    confine.prctl(confine.DUMPABLE, 0)


class Guarded:
    """`argv` under a reaper. `keep`: descriptors that the process inherits under the same numbers."""

    def __init__(
        self, argv: list[str], env: dict[str, str], keep: tuple[int, ...], jail: Jail | None, stdout: int | None
    ) -> None:
        control, self._control = os.pipe()
        self._status, status = os.pipe()
        try:
            self.process = self._start_reaper(control, status, keep, stdout)
        finally:
            os.close(control)
            os.close(status)
        orders = jail.orders(self.process.pid) if jail else None
        config = {"argv": argv, "env": env, "cwd": str(ROOT), "keep": list(keep), "jail": orders}
        # What became of the reaper is seen when it is asked for the pid.
        with contextlib.suppress(BrokenPipeError), open(self._control, "wb", closefd=False) as pipe:
            marshal.dump(config, pipe)
        self._pid: int | None = None
        self._program, self._uid = argv[0], jail.uid if jail else None

    @staticmethod
    def _start_reaper(control: int, status: int, keep: tuple[int, ...], stdout: int | None) -> subprocess.Popen:
        kept = {k: v for k, v in os.environ.items() if k in ("PATH", "LANG", "LD_LIBRARY_PATH")}
        return subprocess.Popen(
            [sys.executable, "-I", "-S", reaper.__file__, str(control), str(status)],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.STDOUT if stdout else None,
            pass_fds=(control, status, *keep),
            env=kept,
            cwd=ROOT,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Of the process itself. SandboxError: it could not be started as asked."""
        if self._pid is None:
            ready = select.select([self._status], [], [], REAPER_LIMIT_S)[0]
            line = os.read(self._status, 4096) if ready else b""  # the reaper writes it at once
            word, _, rest = line.decode(errors="replace").strip().partition(" ")
            if word != "pid":
                if "PermissionError" in rest and self._program in rest:
                    user = "the judge's user" if self._uid is None else f"user {self._uid}, as which a submission runs"
                    rest += f". Make it, and each folder on the way to it, readable and executable for {user}"
                raise SandboxError(f"a child process could not be started: {rest or 'its reaper said nothing'}")
            self._pid = int(rest)
        return self._pid

    def end(self) -> None:
        """End it and everything below it, however it is; nothing if that was done."""
        if self._control < 0:
            return
        os.close(self._control)
        self._control = -1
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=reaper.GIVE_UP_S + REAPER_LIMIT_S)
        os.close(self._status)

    def __del__(self) -> None:
        # Without this the pipe of a forgotten child would stay open, and the child with it.
        with contextlib.suppress(AttributeError):
            self.end()


def run(argv: list[str], extra: dict[str, str], quiet: bool = False) -> int:
    """Run code of a problem under a reaper, and end what it leaves. Return its exit status, or minus the number of the
    signal that ended it. SandboxError: it could not be started. extra: further environment variables. It prints where
    this process prints, and nowhere if quiet.
    """
    sys.stdout.flush()
    stdout = subprocess.DEVNULL if quiet else sys.stderr.fileno() if sys.stdout is sys.stderr else None
    guarded = Guarded(argv, _environment(extra), (), None, stdout)
    try:
        guarded.pid  # noqa: B018  SandboxError
        return guarded.process.wait()
    finally:
        guarded.end()


class Child:
    """`python -m MODULE FD` with a socket to it. `extra`: further environment variables; `jail`: its bounds, if any.
    stoppable: it runs only between `send` and the next `pause`.
    """

    def __init__(
        self, module: str, extra: dict[str, str] | None = None, jail: Jail | None = None, stoppable: bool = False
    ) -> None:
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(SEND_LIMIT_S)
        environment = jail.environment(extra) if jail else _environment(extra)
        argv = [sys.executable, "-m", module, str(theirs.fileno())]
        try:
            self._guarded = Guarded(argv, environment, (theirs.fileno(),), jail, subprocess.PIPE)
        finally:
            theirs.close()
        self._stoppable, self._resting = stoppable, False
        self._process = self._guarded.process
        self._jail = jail
        self._room = _free(jail)  # on disk: what was free when its files were last counted, and these
        self._most = {option: min(most, self._room[option] // 2) or most for option, most in FILES_LIMIT.items()}
        self.memory_limit = int(MEMORY_SHARE * available_memory())
        self.excess = ""  # why it was killed while another child was waited for
        self._given: set[tuple[int, int]] = set()  # (device, inode) of what came with messages
        self._below: list[int] = []
        self._looked = -TREE_S
        self._printed = 0
        self._head, self._tail, self._lines = b"", b"", 0
        self._drain = threading.Thread(target=self._read_output, daemon=True)
        self._drain.start()

    @property
    def pid(self) -> int:
        """Of the child itself, not of its reaper. SandboxError: it could not be started as asked."""
        return self._guarded.pid

    @property
    def freezer(self) -> Freezer:
        """What knows its processes, and stops a stoppable child. SandboxError: it could not be started as asked."""
        return Freezer(self._process.pid, self.pid)

    def pause(self) -> None:
        """Stop all processes of a stoppable child until the next `send`. Died: they would not, or it is gone."""
        if not self._stoppable or self._resting:
            return
        try:
            self.freezer.stop()
        except StopError as error:
            if self._process.poll() is not None:
                raise self._died() from None
            self.kill()
            raise Died("RUNTIME_ERROR", str(error)) from None
        self._resting = True

    def resume(self) -> None:
        """Let a stopped child run."""
        if self._resting:
            self.freezer.resume()
            self._resting = False

    def stopped(self) -> None:
        """Another process of the judge has stopped this child."""
        self._resting = True

    def send(self, message: dict, fds: tuple[int, ...] = ()) -> None:
        self.resume()
        for status in map(os.fstat, fds):
            self._given.add((status.st_dev, status.st_ino))
        try:
            wire.send(self.sock, message, fds)
        except wire.WireError as error:
            raise self._died(str(error)) from None

    def receive(self, timeout_s: float, watch: Self | None = None, descriptors: bool = False) -> tuple[dict, list[int]]:
        """The next message. Died: the child ended, printed or took too much, sent nonsense, or ran out of time. watch:
        a child that works meanwhile, and is killed where it prints or takes too much. descriptors: a jailed child may
        send some too, which the caller closes; else they would fill up this process.
        """
        every_s = WATCH_S if watch else wire.LOOK_S
        try:
            message, fds = wire.receive(self.sock, timeout_s, lambda: self._look(watch), every_s)
        except TimeoutError:
            self.kill()
            raise Died("TIMEOUT", f"no answer within {timeout_s:g} s; it and all it had started were killed") from None
        except (wire.WireError, OSError) as error:  # a reset is one: it died with a message unread
            raise self._died(str(error)) from None
        if self._jail and fds and not descriptors:
            for fd in fds:
                os.close(fd)
            self.kill()
            raise Died("RUNTIME_ERROR", f"its process sent {len(fds)} descriptors with a message")
        return message, fds

    def _look(self, watch: Self | None) -> None:
        """Kill `watch`, or this child if that is None, where it printed or took too much. Died: it is this one."""
        child = watch or self
        if excess := child._excess():
            child.kill()
            if watch is None:
                raise Died("RUNTIME_ERROR", excess)
            watch.excess = excess  # the message that tells of its end is still to come

    def _excess(self) -> str:
        """What it printed or took too much, in words."""
        if self.excess:
            return ""
        if self._printed > OUTPUT_LIMIT:
            return f"printed more than {OUTPUT_LIMIT // 2**20} MiB and was stopped"
        if (resident := self._resident()) > self.memory_limit:
            took, limit = resident / 2**30, self.memory_limit / 2**30
            return f"out of memory: took {took:.1f} GiB of host memory, the limit is {limit:.1f} GiB"
        return self._overfilled(self._jail) if self._jail else ""

    def _overfilled(self, jail: Jail) -> str:
        """What its files take too much, in words. They are counted only where so much less is free than before."""
        for option, free in _free(jail).items():
            if self._room[option] - free > self._most[option]:
                taken = jail.taken(option) + (self._held()[1] if option == "-B1" else 0)
                if taken > self._most[option]:
                    unit = "bytes of files" if option == "-B1" else "files"
                    return f"out of disk: has {taken:,} {unit}, the limit is {self._most[option]:,}"
                self._room[option] = free + taken
        return ""

    def request(self, message: dict, timeout_s: float, fds: tuple[int, ...] = ()) -> tuple[dict, list[int]]:
        self.send(message, fds)
        return self.receive(timeout_s)

    def processes(self) -> list[int]:
        """pids of what the child started, also of what has left its session, and what has not ended."""
        return self.freezer.processes()

    def private_bytes(self) -> int:
        """Bytes of host memory that only the child and what it started hold, with files that have no name any more.
        What came with messages (its buffers) and maps of named files do not count; what a driver pins cannot be seen.
        """
        return sum(self._held())

    def _held(self) -> tuple[int, int]:
        """-> (bytes of memory, bytes of files that have no name any more) as of `private_bytes`."""
        total, nameless = 0, {}
        for pid in (self.pid, *reaper.descendants(self.pid)):
            own, files = _private(pid)
            total += own
            nameless |= {key: max(size, nameless.get(key, 0)) for key, size in files.items()}
        return total, sum(size for key, size in nameless.items() if key not in self._given)

    def close(self) -> None:
        """Ask it to end by closing the socket; kill what is left after a moment."""
        self.resume()
        self.sock.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=CLOSE_S)
        self.kill()

    def kill(self) -> None:
        """End it and everything it started, however it is."""
        self._guarded.end()
        self._drain.join(timeout=1)
        self.sock.close()

    @property
    def printed(self) -> tuple[list[str], int]:
        """-> (the first lines of what it printed, clean; how many there are in all)."""
        lines = text.clean(self._head.decode(errors="replace")).strip("\n").split("\n")
        return (lines, max(self._lines, len(lines))) if self._head.strip() else ([], 0)

    def _died(self, cause: str = "") -> Died:
        self._guarded.pid  # noqa: B018  SandboxError here if it never ran: then nothing is its fault
        # The socket is closed; the exit status follows at once unless it closed the socket on purpose.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1)
        code = self._process.poll()
        self.kill()
        if code is None:
            how = f"broke its connection: {cause}"
        elif code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            how = f"killed by {name}"
        else:
            how = f"exited with status {code} before the call was done"
        tail = text.clean(self._tail.decode(errors="replace")).strip()[-600:]
        return Died("RUNTIME_ERROR", how + (PRINTED + tail if tail else ""))

    def _resident(self) -> int:
        """Bytes of memory of the child and all it has started; shared pages count once, as the child's."""
        if time.monotonic() - self._looked > TREE_S:
            self._below = self.processes()
            self._looked = time.monotonic()
        return _resident(self.pid) + sum(_resident(pid, private=True) for pid in self._below)

    def _read_output(self) -> None:
        pipe = self._process.stdout
        if pipe is None:
            return
        with pipe:
            while part := os.read(pipe.fileno(), 2**16):
                self._printed += len(part)
                self._lines += part.count(b"\n")
                self._head = (self._head + part)[:OUTPUT_KEPT] if len(self._head) < OUTPUT_KEPT else self._head
                self._tail = (self._tail + part)[-OUTPUT_KEPT:]


def available_memory() -> int:
    """Bytes of host memory that can be taken without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")


def _free(jail: Jail | None) -> dict[str, int]:
    """What is free where a jailed child writes, by option of FILES_LIMIT: bytes, and how many files."""
    space = os.statvfs(jail.tmp if jail else "/")
    return {"-B1": space.f_bavail * space.f_frsize, "--inodes": space.f_ffree}


def _environment(extra: dict[str, str] | None) -> dict[str, str]:
    """Of a child that is not jailed: the judge's own code."""
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", **(extra or {})}


def _resident(pid: int, private: bool = False) -> int:
    try:
        _, resident, shared = map(int, Path(f"/proc/{pid}/statm").read_text().split()[:3])
    except (OSError, ValueError):
        return 0
    return (resident - shared if private else resident) * os.sysconf("SC_PAGE_SIZE")


def _private(pid: int) -> tuple[int, dict[tuple[int, int], int]]:
    """-> (bytes of anonymous memory, swapped or not; bytes by (device, inode) of nameless files, open or shared).
    Memory files and shared anonymous memory are such files.
    """
    total, key, files = 0, None, Counter[tuple[int, int]]()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps").read_text(errors="replace").splitlines():
            fields = line.split(maxsplit=5)
            if not fields[0].endswith(":"):  # a mapping: range, rights, offset, device, inode, name
                major, minor = (int(part, 16) for part in fields[3].split(":"))
                nameless = fields[1].endswith("s") and line.endswith("(deleted)")
                key = (os.makedev(major, minor), int(fields[4])) if nameless else None
            elif fields[0] in ("Anonymous:", "Swap:"):
                total += int(fields[1]) * 1024
            elif fields[0] == "Rss:" and key:
                files[key] += int(fields[1]) * 1024
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                status = descriptor.stat()
                if stat.S_ISREG(status.st_mode) and not status.st_nlink:
                    key = status.st_dev, status.st_ino
                    files[key] = max(files[key], 512 * status.st_blocks)
    return total, files
