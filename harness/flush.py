"""What the CPU clock reads to make caches cold: one memory file for all runners of a judge.

Some machines report a last-level cache of half a gigabyte. Memory of its own for each of ten processes, several times
as large, would be most of what such a machine has; shared, it is there once. Nobody can write to it.
"""

import fcntl
import functools
import mmap
import os
import warnings
from pathlib import Path

import torch

FLUSH_FACTOR = 3  # times the last-level cache
_SEALED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


def last_level_cache() -> int:
    """Bytes of the largest cache that the kernel reports for CPU 0; 32 MiB where it reports none."""
    sizes = [32 * 2**20]
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = index.read_text().strip()
        sizes.append(int(text[:-1]) * {"K": 2**10, "M": 2**20, "G": 2**30}[text[-1]])
    return max(sizes)


@functools.cache
def file() -> int:
    """Its descriptor, in the judge's own process. Pages come as they are first read."""
    fd = os.memfd_create("flush", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, FLUSH_FACTOR * last_level_cache())
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALED)
    return fd


def nbytes() -> int:
    """Of the file."""
    return os.fstat(file()).st_size


def mapped(fd: int) -> torch.Tensor:
    """The whole file, uint8, only to be read. The descriptor is taken."""
    # Populated now, so that no flush pays for page faults. Private: a shared mapping counts as one that may write.
    pages = mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
    os.close(fd)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(pages, dtype=torch.uint8)
