"""The page of a batch: calls on a GPU that wait behind a gate, until the checker opens it together with their contents.

A runner enqueues its calls while the contents of their buffers are masked, and behind them the digest of their outputs.
The checker reads its clock, unmasks the buffers on its stream, opens the gate, and waits for the digest, which no
process can know before it has all outputs. Nothing that the runner does shortens the unmasking: it has no key, and the
device works for one process at a time.
"""

import ctypes
import mmap
import os

from harness.runner import native, tree
from harness.runner.buffers import Buffer, MappedBuffer, sealed_file

# Of work before a batch: on an H100 whose device had been idle, memory was 16 % slower for 17 to 29 ms of work.
WAKE_S = 0.05


class GatePage:
    """One page of memory, which the device sees. The checker makes it, a runner maps `fd`, which is taken."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = sealed_file("batch", mmap.PAGESIZE) if fd is None else fd
        self._pages = mmap.mmap(self.fd, mmap.PAGESIZE, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        if fd is not None:
            os.close(fd)
            self.fd = -1
        self.seen = native.show(self.address, mmap.PAGESIZE)  # its address on the device

    @property
    def done(self) -> int:
        """The word that ended the batch; 0: it has not ended."""
        return native.done_word(self.address)

    def close(self) -> None:
        """Take the page from the device. No work on it may be enqueued. The memory is unmapped with this object."""
        native.hide(self.address)
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def written(opened: dict, buffer: Buffer | MappedBuffer) -> list[tuple[int, int]]:
    """Return (address, bytes) of what a call on a buffer leaves: its outputs, or in a folder whose calls return new
    tensors the copies of these. opened: the layout of the buffer's content.
    """
    leaves = tree.leaves(opened["data"])
    specs = [leaves[i] for i in opened["outputs"]] if opened["ours"] else opened["captures"]
    return [(buffer.address(spec), spec.get("most", spec["nbytes"])) for spec in specs if spec["space"] == "device"]
