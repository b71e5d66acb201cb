"""Child processes that may crash, hang, eat memory or print for ever: each in a session of its own, and watched."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from harness import wire

ROOT = Path(__file__).resolve().parent.parent
OUTPUT_LIMIT = 16 * 2**20  # bytes that a child may print before it is killed
OUTPUT_KEPT = 4000  # bytes of its last output that are kept for the report
POLL_S = 0.05
MEMORY_SHARE = 0.6  # of the memory that is available when a child starts; beyond that it is killed
KEPT_ENVIRONMENT = ("PATH", "LANG", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "KERNEL_BUILD_DIR")
KEPT_PREFIXES = ("CUDA_", "OMP_", "TRITON_", "NVIDIA_")


class Died(RuntimeError):
    """A child ended, or was killed, before it answered. `status` is the verdict that this amounts to."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class Child:
    """`python -m MODULE FD` with a socket to it. `extra`: further environment variables."""

    def __init__(self, module: str, extra: dict[str, str] | None = None) -> None:
        self.sock, theirs = socket.socketpair()
        environment = {
            key: value
            for key, value in os.environ.items()
            if key in KEPT_ENVIRONMENT or key.startswith(KEPT_PREFIXES)
        }
        paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        environment |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", **(extra or {})}
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno())],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            pass_fds=(theirs.fileno(),), env=environment, cwd=ROOT, start_new_session=True,
        )  # fmt: skip
        theirs.close()
        self._memory_limit = int(MEMORY_SHARE * available_memory())
        self._printed = 0
        self._tail = b""
        self._drain = threading.Thread(target=self._read_output, daemon=True)
        self._drain.start()

    def send(self, message: dict, fds: tuple[int, ...] = ()) -> None:
        try:
            wire.send(self.sock, message, fds)
        except wire.WireError:
            raise self._died() from None

    def receive(self, timeout_s: float) -> tuple[dict, list[int]]:
        """The next message. Died: the child ended, printed or took too much, sent nonsense, or ran out of time."""
        deadline = time.monotonic() + timeout_s
        while True:
            # What a dead child had sent is still read first.
            if select.select([self.sock], [], [], POLL_S)[0]:
                try:
                    return wire.receive(self.sock, max(0.1, deadline - time.monotonic()))
                except TimeoutError:
                    pass
                except wire.WireError as error:
                    raise self._died(str(error)) from None
            if self._printed > OUTPUT_LIMIT:
                self.kill()
                raise Died("RUNTIME_ERROR", f"printed more than {OUTPUT_LIMIT // 2**20} MiB and was stopped")
            if (resident := _resident(self._process.pid)) > self._memory_limit:
                self.kill()
                raise Died(
                    "RUNTIME_ERROR",
                    f"out of memory: took {resident / 2**30:.1f} GiB of host memory, the limit is "
                    f"{self._memory_limit / 2**30:.1f} GiB",
                )
            if time.monotonic() > deadline:
                self.kill()
                raise Died("TIMEOUT", f"no answer within {timeout_s:g} s; its process group was killed")

    def request(self, message: dict, timeout_s: float, fds: tuple[int, ...] = ()) -> tuple[dict, list[int]]:
        self.send(message, fds)
        return self.receive(timeout_s)

    def close(self) -> None:
        """Ask it to end by closing the socket; kill what is left after a moment."""
        self.sock.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        self.kill()

    def kill(self) -> None:
        """End the whole process group, however the child is."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._drain.join(timeout=1)
        self.sock.close()

    @property
    def tail(self) -> str:
        """The end of what it printed."""
        return self._tail.decode(errors="replace").strip()

    def _died(self, what: str = "") -> Died:
        # The socket is closed; the exit status follows at once unless it closed the socket on purpose.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1)
        code = self._process.poll()
        self.kill()
        if code is None:
            how = f"broke its connection: {what}"
        elif code < 0:
            how = f"killed by {signal.Signals(-code).name}"
        else:
            how = f"exited with status {code} before the call was done"
        tail = f"; it printed: {self.tail[-600:]}" if self.tail else ""
        return Died("RUNTIME_ERROR", how + tail)

    def _read_output(self) -> None:
        with self._process.stdout as pipe:
            while part := pipe.read1(2**16):
                self._printed += len(part)
                self._tail = (self._tail + part)[-OUTPUT_KEPT:]


def available_memory() -> int:
    """Bytes of host memory that can be taken without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0
