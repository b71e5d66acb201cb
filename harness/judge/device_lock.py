"""One judge at a time on a device, and which other processes use it.

The lock is the kernel's, on a file of this user's: it ends with its process, however that ends, and children do not
inherit it. Only `users` sees judges of other users.
"""

import contextlib
import csv
import fcntl
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator

from harness.sandbox import policy

SMI_LIMIT_S = 30
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


def users(gpu: str) -> list[str]:
    """Return the compute processes on the GPU of uuid `gpu`, each as one line. A driver shows a container only what the
    container may see. RuntimeError: nvidia-smi does not answer.
    """
    if not shutil.which("nvidia-smi"):
        raise RuntimeError("there is no nvidia-smi to ask which processes use the GPU")
    command = ["nvidia-smi", f"--query-compute-apps={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=SMI_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"nvidia-smi gave no answer within {SMI_LIMIT_S} s") from None
    if result.returncode:
        raise RuntimeError(f"nvidia-smi failed with {result.returncode}: {(result.stderr or result.stdout).strip()}")
    return [
        f"process {pid} ({name})" + (f", {nbytes / 2**20:.0f} MiB" if nbytes else "")
        for pid, name, nbytes in parse_smi(result.stdout, gpu)
    ]


def parse_smi(text: str, gpu: str) -> list[tuple[int, str, int | None]]:
    """Return (pid, name, bytes or None) of the lines about `gpu` in nvidia-smi's table of compute processes."""
    found = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        # A process name may hold commas; the other fields do not.
        if len(row) >= len(_FIELDS) and row[0].strip() == gpu and row[1].strip().isdigit():
            memory = row[-1].strip()
            nbytes = int(memory) * 2**20 if memory.isdigit() else None
            found.append((int(row[1]), ",".join(row[2:-1]).strip(), nbytes))
    return found
