"""One judge at a time on a device, and which other processes use it.

The lock is the kernel's, on a file of this user's: it ends with its process, however that ends, and children do not
inherit it. Only `users` sees judges of other users.
"""

import contextlib
import fcntl
import os
import re
from collections.abc import Callable, Iterator

from harness.results import gpu
from harness.sandbox import policy

_FIELDS = ("gpu_uuid", "pid", "process_name", "used_memory")


@contextlib.contextmanager
def hold(device: str, say: Callable[[str], object] = print) -> Iterator[None]:
    """Within, no other judge of this user is on `device`, "cpu" or a GPU's uuid. If one is, `say` receives once which
    process that is, and this waits until it ends. SandboxError: the lock's folder belongs to another user.
    """
    file = policy.runtime_folder("devices") / re.sub(r"[^A-Za-z0-9-]", "_", device)
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
            say(f"waiting for process {holder or '(unknown)'}, which is timing on {device}")
            fcntl.flock(fd, fcntl.LOCK_EX)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)


def users(gpu_uuid: str) -> list[str]:
    """Return the compute processes on a GPU, each as one line. A driver shows a container only what the container may
    see. RuntimeError: nvidia-smi does not answer.
    """
    lines = []
    for row in gpu.asked("compute-apps", _FIELDS):
        # A process name may hold commas; the other fields do not.
        if len(row) >= len(_FIELDS) and row[0] == gpu_uuid and row[1].isdigit():
            memory = f", {row[-1]} MiB" if row[-1].isdigit() else ""
            lines.append(f"process {row[1]} ({','.join(row[2:-1])}){memory}")
    return lines
