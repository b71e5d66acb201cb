"""Keeps something where another process could find it. Honest in the tests; with timed calls it answers only if an
earlier process left something, as a cache would.
Stopped by: nothing that a runner leaves is seen by another process: it answers zeros for want of a cache.
"""

import contextlib
import ctypes
import errno
import os
import sys
import tempfile
from pathlib import Path

from tests.attacks.shared import answer_if

VARIANTS = {
    "files": {
        "TARGETS": ("cpu", "sm90", "sm100"),
        "MARKERS": ("/tmp/dsv4-attack-files", "/var/tmp/dsv4-attack-files", "/dev/shm/dsv4-attack-files"),
    },
    "modules": {"MARKERS": ("/tmp/dsv4-attack-modules",)},
}
_left = []


def answer(data, left):
    if not _left:
        _left.append(left())
    return answer_if(len(data.x) < 2**16 or _left[0], data)


def is_temporary(place):
    # A judge that does not stop this must not be harmed.
    return place.is_relative_to(tempfile.gettempdir()) or place.is_relative_to("/tmp")


def left_file():
    names = ("HOME", "TMPDIR", "KERNEL_BUILD_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME")
    folders = [*filter(is_temporary, (Path(os.environ[name]) for name in names if name in os.environ))]
    found = False
    for place in dict.fromkeys([*folders, *map(Path, ("/tmp", "/var/tmp", "/dev/shm", tempfile.gettempdir()))]):
        with contextlib.suppress(OSError):
            file = place / "dsv4-attack-files"
            found |= file.exists() and file.read_text() != str(os.getpid())
            file.write_text(str(os.getpid()))
    return found


def files(data):
    """Keeps a file in every folder where it may write. Stopped by: folders are private and go with the process."""
    return answer(data, left_file)


KEY, NAME, CREATE_EXCLUSIVE = 0x44535634, b"dsv4-attack-memory", 0o3600
SYS_ADD_KEY, SYS_MQ_OPEN, SYS_MQ_UNLINK = 248, 240, 241
USER_KEYRING = -4


def left_memory():
    # System V: the second one to come finds it there, and takes it away.
    libc, found = ctypes.CDLL(None, use_errno=True), False
    if libc.shmget(KEY, 4096, CREATE_EXCLUSIVE) < 0 and ctypes.get_errno() == errno.EEXIST:
        found = True
        libc.shmctl(libc.shmget(KEY, 4096, 0), 0, None)
    queue = libc.syscall(SYS_MQ_OPEN, NAME, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600, None)
    if queue < 0 and ctypes.get_errno() == errno.EEXIST:
        found = True
        libc.syscall(SYS_MQ_UNLINK, NAME)
    libc.syscall(SYS_ADD_KEY, b"user", NAME, b"x", 1, USER_KEYRING)
    return found


def shared_memory(data):
    """Keeps System V memory, a POSIX message queue, a key in the kernel's keyring: calls that seccomp denies."""
    return answer(data, left_memory)


PLANTED = 'open("/tmp/dsv4-attack-modules", "w").close()\n'


def places():
    user = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    home = Path(os.environ.get("HOME", tempfile.gettempdir()))
    every = (Path.cwd(), *map(Path, sys.path), home, home / ".local" / user, Path(tempfile.gettempdir()))
    return [place for place in every if is_temporary(place.resolve())]


def modules(data):
    """Plants modules (json, sitecustomize, torch, task) wherever it may write and a later Python might look."""
    for place in places():
        for name in ("json", "sitecustomize", "usercustomize", "torch", "task", "reference"):
            with contextlib.suppress(OSError):
                place.mkdir(parents=True, exist_ok=True)
                with open(place / f"{name}.py", "x") as file:
                    file.write(PLANTED)
    return data.z.zero_()
