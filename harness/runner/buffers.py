"""Buffers: memory with one call's data, which the checker and a runner share. Nothing is copied through a pipe.

On a CPU it is a memory file that the checker owns and a runner maps; on a GPU the player's, in both (recorder.Mapped).
"""

import fcntl
import mmap
import os

import torch

from harness.runner import gate, recorder


class Buffer:
    """`nbytes` of memory, flat uint8, that the checker makes, or a runner maps by `fd`, which is taken."""

    def __init__(self, nbytes: int, fd: int = -1) -> None:
        self.nbytes, self.memory, self._fd = nbytes, torch.empty(0, dtype=torch.uint8), -1
        if nbytes:
            descriptor = _sealed_file(nbytes) if fd < 0 else fd
            # Populated now, so that no timed call pays for page faults.
            pages = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            self.memory = torch.frombuffer(pages, dtype=torch.uint8)
            if fd < 0:
                self._fd = descriptor
            else:
                os.close(fd)

    def fds(self) -> list[int]:
        """Return copies of the descriptors that another process maps it by."""
        return [os.dup(self._fd)] if self._fd >= 0 else []

    def close(self) -> None:
        """Give it up. It is unmapped with the last tensor over it."""
        del self.memory
        if self._fd >= 0:
            os.close(self._fd)


Shared = Buffer | recorder.Mapped


class Page(Buffer):
    """The page that hands over calls on a CPU (gate.cpp). The checker makes it, a runner maps `fd`, which is taken."""

    def __init__(self, fd: int = -1) -> None:
        super().__init__(gate.bindings().page_bytes, fd)
        self.address = self.memory.data_ptr()


def _sealed_file(nbytes: int) -> int:
    """A memory file whose size is fixed: a runner that shrank it would have the checker killed at its next look."""
    fd = os.memfd_create("buffer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd
