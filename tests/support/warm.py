"""Start the judge's child processes from one that has torch loaded: by fork, which takes 20 ms where exec takes 2 s.

`installed()` replaces Guarded._start_reaper. The server is this module as a program. For each child it forks a reaper,
which is the real one but for exec: it forks the child, confines it, and the child then runs its module in the process
that it is. Tests of the sandbox, and slow ones of attacks, start their processes as the judge does.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import marshal
import os
import random
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Others, and programs, get their exec.
MODULES = ("harness.runner.runner", "harness.checker.checker", "harness.tools.latency", "problems.dsv4_forward.check")
HIGH = 300  # descriptors of the server's own are at least this
POLL_S = 0.005
WAITING = {"GOMP_SPINCOUNT": "1000", "OMP_WAIT_POLICY": "PASSIVE"}  # torch's idle threads need no processor
_SUBREAPER, _DUMPABLE = 36, 4  # prctl


class Process:
    """What the judge uses of subprocess.Popen, of a child that the server forked for this process."""

    def __init__(self, pid: int, stdout: int | None) -> None:
        self.pid = pid
        self.stdout = None if stdout is None else os.fdopen(stdout, "rb")
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                done, status = os.waitpid(self.pid, os.WNOHANG)
                if done:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("reaper", timeout)
            time.sleep(POLL_S)
        return self.returncode


class Server:
    """The process with torch loaded. It ends with this one. forked: of this process, which has torch loaded itself."""

    def __init__(self, forked: bool = False) -> None:
        self._sock, theirs = socket.socketpair()
        if not forked:
            command = [sys.executable, "-m", "tests.support.warm", str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), cwd=ROOT, env=os.environ | WAITING)
            self.pid = self._process.pid
        elif (pid := os.fork()) == 0:
            self._sock.close()
            be_server(theirs)
        else:
            self.pid = pid
        theirs.close()
        self._lock = threading.Lock()

    def start_reaper(self, control: int, status: int, keep: tuple[int, ...], stdout: int | None) -> Process:
        """stdout: None for this process's output, PIPE for a pipe that its errors come through too."""
        ours = None
        if stdout is None:
            output = [os.dup(1), os.dup(2)]
        else:
            ours, theirs = os.pipe()
            output = [theirs, os.dup(theirs)]
        numbers = [control, status, *keep]
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)  # what the server's forks leave behind becomes ours
        with self._lock:
            socket.send_fds(self._sock, [marshal.dumps(numbers)], [*numbers, *output])
            for fd in output:
                os.close(fd)
            return Process(int(self._sock.recv(64)), ours)


_server: Server | None = None


def pid() -> int | None:
    """That of the server; None: there is none yet."""
    return _server and _server.pid


def fork_server() -> None:
    """Make the server of this process: a fork of what it is now, with torch and none of the judge's modules."""
    global _server
    import torch  # noqa: F401

    _server = Server(forked=True)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Within: the judge's children are forked from the server, which stays until this process ends."""
    from harness.sandbox.process import Guarded

    cold = Guarded._start_reaper

    def start(control: int, status: int, keep: tuple[int, ...], stdout: int | None) -> "Process | subprocess.Popen":
        global _server
        if stdout not in (None, subprocess.PIPE):
            return cold(control, status, keep, stdout)
        _server = _server or Server()
        return _server.start_reaper(control, status, keep, stdout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Guarded, "_start_reaper", staticmethod(start))
        yield


# --- the server


def be_server(connection: socket.socket) -> None:
    """Serve, to the end of the other process and of this one."""
    try:
        sys.path.insert(0, str(ROOT / "harness" / "sandbox"))
        import reaper  # noqa: F401

        gc.freeze()
        high = fcntl.fcntl(connection.fileno(), fcntl.F_DUPFD_CLOEXEC, HIGH)
        connection.close()
        serve(socket.socket(fileno=high))
    finally:
        os._exit(0)


def serve(sock: socket.socket) -> None:
    while True:
        data, fds, _, _ = socket.recv_fds(sock, 65536, 64)
        if not data:
            return
        held = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH) for fd in fds]
        for fd in fds:
            os.close(fd)
        told, tell = os.pipe()
        if (between := os.fork()) == 0:
            # Its child is handed to the process with the tests when this one ends.
            if pid := os.fork():
                os.write(tell, str(pid).encode())
                os._exit(0)
            sock.close()
            os.close(told)
            os.close(tell)
            _be_reaper(marshal.loads(data), held)
        os.close(tell)
        os.waitpid(between, 0)
        for fd in held:
            os.close(fd)
        sock.send(os.read(told, 64))
        os.close(told)


def _be_reaper(numbers: list[int], held: list[int]) -> None:
    """Run the reaper with the descriptors `held` as `numbers`, control and status first; the last two are its output
    and its errors.
    """
    try:
        os.setsid()
        for fd, number in zip(held, [*numbers, 1, 2], strict=True):
            os.dup2(fd, number)
            os.close(fd)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.execve = run
        sys.argv = ["reaper.py", *map(str, numbers[:2])]
        sys.modules["reaper"].main()
    finally:
        os._exit(1)


def run(program: str, argv: list[str], environment: dict[str, str], execve=os.execve) -> None:
    """What exec of `argv` would do, in this process where it is Python with one of MODULES."""
    if argv[1:2] != ["-m"] or argv[2] not in MODULES:
        execve(program, argv, environment)
    for fd in range(3, 2 * HIGH):
        with contextlib.suppress(OSError):  # it is not open
            if not os.get_inheritable(fd):
                os.close(fd)
    ctypes.CDLL(None).prctl(_DUMPABLE, 1, 0, 0, 0)
    os.environ.clear()
    os.environ.update(environment)
    given = [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), os.getcwd()]
    sys.path[:] = given + [p for p in sys.path if p not in ("", str(ROOT))]
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in environment
    for name in [name for name in sys.modules if name.partition(".")[0] in ("harness", "tests", "reaper", "confine")]:
        del sys.modules[name]
    random.seed()
    end_with(argv[2:], lambda: runpy.run_module(argv[2], run_name="__main__", alter_sys=True))


def end_with(argv: list[str], program: Callable[[], object]) -> NoReturn:
    """Be a program to the end, on the descriptors 0 to 2, and leave as Python would."""
    sys.argv = argv
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    code = 0
    try:
        program()
    except SystemExit as ended:
        code = ended.code
        if not isinstance(code, int | None):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    import torch  # noqa: F401

    be_server(socket.socket(fileno=int(sys.argv[1])))
