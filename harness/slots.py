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

    def message(self) -> tuple[dict, str | None, tuple[int, ...]]:
        """What `MappedSlot` needs: its sizes, the handle of the device part, and descriptors to send beside them."""
        handle = base64.b64encode(self._device.handle).decode() if self._device else None
        return {"sizes": self.sizes}, handle, ((self._fd,) if self._fd >= 0 else ())

    def close(self) -> None:
        self.buffers.clear()
        if self._device:
            self._device.close()
        if self._fd >= 0:
            os.close(self._fd)


class MappedSlot:
    """A slot as its runner sees it. The host part is mapped from the first of `fds`, which is taken; the device part
    comes and goes with `attach` and `detach`, so that its contents are out of reach until their call.
    """

    def __init__(self, message: dict, fds: list[int]) -> None:
        self.sizes: dict[str, int] = message["sizes"]
        self.buffers: dict[str, torch.Tensor] = {}
        self._device: native.DeviceBuffer | None = None
        if self.sizes["host"]:
            fd = fds.pop(0)
            self.buffers["host"] = _map(fd, self.sizes["host"])
            os.close(fd)

    def attach(self, handle: str | None) -> None:
        """Map the device part, if there is one and it is not mapped."""
        if handle is not None and self._device is None:
            self._device = native.DeviceBuffer(self.sizes["device"], base64.b64decode(handle))
            self.buffers["device"] = self._device.bytes

    def detach(self) -> None:
        """Unmap the device part."""
        if self._device:
            self.buffers.pop("device")
            self._device.close()
            self._device = None


def _map(fd: int, nbytes: int) -> torch.Tensor:
    # Populated now, so that no timed call pays for page faults.
    return torch.frombuffer(mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), dtype=torch.uint8)
