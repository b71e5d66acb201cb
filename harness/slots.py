"""Slots: memory that the checker owns and a runner maps, one call's data in each.

The device part is one cudaMalloc shared by CUDA IPC; the host part is an anonymous memory file. Nothing is copied
through a pipe.
"""

import base64
import mmap
import os

import torch

from harness import native


class Slot:
    """Buffers of given sizes in bytes, {"device": n, "host": n}; 0 means none. `buffers`: flat uint8 tensors."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = sizes
        self.buffers: dict[str, torch.Tensor] = {}
        self._device = native.DeviceBuffer(sizes["device"]) if sizes["device"] else None
        self._fd = -1
        if self._device:
            self.buffers["device"] = self._device.bytes
        if sizes["host"]:
            self._fd = os.memfd_create("slot", os.MFD_CLOEXEC)
            os.ftruncate(self._fd, sizes["host"])
            self.buffers["host"] = _map(self._fd, sizes["host"])

    def message(self) -> tuple[dict, tuple[int, ...]]:
        """What `MappedSlot` needs: JSON, and descriptors to send beside it."""
        handle = base64.b64encode(self._device.handle).decode() if self._device else None
        return {"sizes": self.sizes, "device": handle}, ((self._fd,) if self._fd >= 0 else ())

    def close(self) -> None:
        self.buffers.clear()
        if self._device:
            self._device.close()
        if self._fd >= 0:
            os.close(self._fd)


class MappedSlot:
    """A slot as its runner sees it. `fds` holds the descriptors still to be taken."""

    def __init__(self, message: dict, fds: list[int]) -> None:
        self.buffers: dict[str, torch.Tensor] = {}
        self._device = None
        if message["device"]:
            handle = base64.b64decode(message["device"])
            self._device = native.DeviceBuffer(message["sizes"]["device"], handle)
            self.buffers["device"] = self._device.bytes
        if message["sizes"]["host"]:
            fd = fds.pop(0)
            self.buffers["host"] = _map(fd, message["sizes"]["host"])
            os.close(fd)

    def close(self) -> None:
        self.buffers.clear()
        if self._device:
            self._device.close()


def _map(fd: int, nbytes: int) -> torch.Tensor:
    # Populated now, so that no timed call pays for page faults.
    return torch.frombuffer(mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), dtype=torch.uint8)
