"""Failures of the machine, such as a full disk, no compiler or no memory, as a message. No submission caused them.

An exception that this module does not know is a bug of the judge, and keeps its traceback.
"""

import contextlib
import errno
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from harness.judge.handle import DeviceError
from harness.results import record, text
from harness.sandbox.policy import SandboxError
from problems.common import build

# What only a bug of the judge brings. A missing file may be the user's, see below.
_BUGS = {errno.EBADF, errno.EFAULT, errno.EINVAL, errno.EISDIR, errno.ENOTEMPTY, errno.ENOENT, errno.EEXIST}
_SAID = 500  # characters
LEAST_FREE = 2**20  # bytes: a disk with less is full


def said_of(error: Exception) -> str | None:
    """Return one line that says what failed, where, and what to do; None if the machine did not fail."""
    if isinstance(error, record.StorageError | DeviceError | SandboxError):
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
        f"{what} to a folder that can be written"
        for folder, what in places.items()
        if path and (path.parent == folder or folder.is_relative_to(path))
    ]
    # A missing file is a bug of the judge, except in folders that the user chose, or where tempfile finds none.
    missing = error.errno in (errno.ENOENT, errno.EEXIST) and (helps or path is None)
    if error.errno in _BUGS and not missing:
        return None
    if error.errno == errno.ENOSPC and path is None:
        helps = [f"full: {folder}" for folder in (*places, record.RESULTS) if _is_full(folder)]
    return "; ".join([record.said_of(error), *helps[:1]])


def _is_full(folder: Path) -> bool:
    return folder.is_dir() and shutil.disk_usage(folder).free < LEAST_FREE
