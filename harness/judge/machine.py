"""The machine that a run is on: one judge at a time on a device, which other processes use it, and failures that no
submission caused, such as a full disk, no compiler or no memory, as a message.

The lock is the kernel's, on a file of this user's: it ends with its process, and children do not inherit it. Only
`users` sees judges of other users. What `said_of` does not know is a bug of the judge, and keeps its traceback.
"""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from harness.judge.handle import DeviceError
from harness.results import gpu, record, text
from harness.sandbox import policy
from problems.common import build

# What only a bug of the judge brings. A missing file may be the user's, see below.
_BUGS = {errno.EBADF, errno.EFAULT, errno.EINVAL, errno.EISDIR, errno.ENOTEMPTY, errno.ENOENT, errno.EEXIST}
_SAID = 500  # characters
LEAST_FREE = 2**20  # bytes: a disk with less is full
_FIELDS = ("gpu_uuid", "pid", "process_name", "used_memory")


@contextlib.contextmanager
def hold(device: str, say: Callable[[str], object] = print) -> Iterator[None]:
    """Hold `device`, "cpu" or a GPU's uuid, from this user's judges; `say` gets whom it waits for. SandboxError."""
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
    """The processes on a GPU, each a line, as far as a container may see. RuntimeError: no answer of nvidia-smi."""
    lines = []
    for row in gpu.asked("compute-apps", _FIELDS):
        # A process name may hold commas; the other fields do not.
        if len(row) >= len(_FIELDS) and row[0] == gpu_uuid and row[1].isdigit():
            memory = f", {row[-1]} MiB" if row[-1].isdigit() else ""
            lines.append(f"process {row[1]} ({','.join(row[2:-1])}){memory}")
    return lines


def said_of(error: Exception) -> str | None:
    """Return one line that says what failed, where, and what to do; None if the machine did not fail."""
    if isinstance(error, record.StorageError | DeviceError | policy.SandboxError):
        return text.line(error, _SAID)
    if isinstance(error, build.BuildError):
        return f"the judge's own code, or a submission's header, could not be compiled: {text.line(error, _SAID)}"
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return f"out of memory in the judge: free some and run again ({text.first_line(error, _SAID) or 'no details'})"
    if isinstance(error, subprocess.SubprocessError):
        return text.line(error, _SAID)
    return _of_system(error) if isinstance(error, OSError) else None


def _of_system(error: OSError) -> str | None:
    places = {build.directory(): "set KERNEL_BUILD_DIR"}
    with contextlib.suppress(OSError):
        places[Path(tempfile.gettempdir())] = "set TMPDIR"
    path = Path(error.filename) if isinstance(error.filename, str) else None
    helps = [
        f"{advice} to a folder that can be written"
        for folder, advice in places.items()
        if path and (path.parent == folder or folder.is_relative_to(path))
    ]
    # A missing file is a bug of the judge, except in folders that the user chose, or where tempfile finds none.
    if error.errno in _BUGS and not (error.errno in (errno.ENOENT, errno.EEXIST) and (helps or path is None)):
        return None
    if error.errno == errno.ENOSPC and path is None:
        there = [folder for folder in (*places, record.RESULTS) if folder.is_dir()]
        helps = [f"full: {folder}" for folder in there if shutil.disk_usage(folder).free < LEAST_FREE]
    return "; ".join([record.said_of(error), *helps[:1]])
