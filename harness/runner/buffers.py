"""Buffers: memory that the checker owns and a runner maps, with one call's data in each.

The device part is one cudaMalloc shared by CUDA IPC; the host part is an anonymous memory file. Nothing is copied
through a pipe. Contents that a runner must not read yet are masked (harness/runner/native.py).
"""

import base64
import ctypes
import fcntl
import mmap
import os

import torch

from harness.runner import gate, native, recorder


class _Placed:
    """Memory with places."""

    memory: dict[str, torch.Tensor]
    _device: native.DeviceBuffer | None

    def address(self, leaf: dict) -> int:
        """Return where a tensor of a specification lies, without a tensor that a submission could have changed."""
        if leaf["space"] == "host":
            return self.memory["host"].data_ptr() + leaf["offset"]
        return (self._device.address if self._device else 0) + leaf["offset"]


class Buffer(_Placed):
    """Buffers of given sizes in bytes, {"device": n, "host": n}; 0 means none. `memory`: flat uint8 tensors."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = sizes
        self.memory: dict[str, torch.Tensor] = {}
        self._device = native.DeviceBuffer(sizes["device"]) if sizes["device"] else None
        self._fd = -1
        if self._device:
            self.memory["device"] = self._device.bytes
        if sizes["host"]:
            self._fd = sealed_file("buffer", sizes["host"])
            self.memory["host"] = _map(self._fd, sizes["host"])

    def message(self) -> tuple[dict, tuple[int, ...]]:
        """Return what MappedBuffer needs: sizes and the handle of the device part; and the descriptors to send."""
        handle = base64.b64encode(self._device.handle).decode() if self._device else None
        return {"sizes": self.sizes, "handle": handle}, ((self._fd,) if self._fd >= 0 else ())

    def close(self) -> None:
        self.memory.clear()
        if self._device:
            self._device.close()
        if self._fd >= 0:
            os.close(self._fd)


class MappedBuffer(_Placed):
    """A buffer as its runner sees it. The host part is mapped from the first of `fds`, which is taken."""

    def __init__(self, message: dict, fds: list[int]) -> None:
        sizes = message["sizes"]
        self.memory: dict[str, torch.Tensor] = {}
        self._device: native.DeviceBuffer | None = None
        if sizes["host"]:
            fd = fds.pop(0)
            self.memory["host"] = _map(fd, sizes["host"])
            os.close(fd)
        if sizes["device"]:
            self._device = native.DeviceBuffer(sizes["device"], base64.b64decode(message["handle"]))
            self.memory["device"] = self._device.bytes

    def close(self) -> None:
        """Unmap the device part. The host part is unmapped with the last tensor over it."""
        self.memory.clear()
        if self._device:
            self._device.close()
            self._device = None


class Shared(_Placed):
    """The memory of a recorded call, which is the player's, as the checker sees it. parts: as of recorder.Mapped."""

    def __init__(self, parts: list[tuple[int, int]]) -> None:
        self._mapped = recorder.Mapped(parts)
        self.memory = {"device": self._mapped.bytes}

    def close(self) -> None:
        self.memory.clear()
        self._mapped.close()


class Page:
    """The page that hands over calls on a CPU (harness/runner/gate.cpp). The checker makes it, a
    runner maps `fd`, which is taken.
    """

    def __init__(self, fd: int | None = None) -> None:
        nbytes = -(-gate.bindings().page_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.fd = sealed_file("gate", nbytes) if fd is None else fd
        self._pages = mmap.mmap(self.fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        """Close the checker's descriptor. The memory is unmapped with this object."""
        os.close(self.fd)


def sealed_file(name: str, nbytes: int) -> int:
    """A memory file whose size is fixed: a runner that shrank it would have the checker killed at its next look."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def _map(fd: int, nbytes: int) -> torch.Tensor:
    # Populated now, so that no timed call pays for page faults.
    return torch.frombuffer(mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), dtype=torch.uint8)
