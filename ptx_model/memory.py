"""Global and shared memory: addresses, bounds, and what has been written."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from ptx_model.faults import Fault
from ptx_model.races import ATOMIC, CELL, Clocks, Past, Shadow

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SHARED_WINDOW = 1 << 52  # generic addresses of shared memory begin here, far from any address of the host
PARAMETER_WINDOW = 1 << 53
LOCAL_WINDOW = 1 << 54  # of a thread's local memory
SHARED_START = 1024  # the hardware keeps the first bytes of a block's shared memory for itself
RANK_SHIFT = 24  # of a shared address: the bits above are the rank of the block in its cluster
POISON = 0xFF  # a byte of it is NaN or part of one in every float format of 8 bits and more
LARGEST_SHARED = 232_448  # bytes of a block


class _Everything:
    """All memory of this process as one array; GlobalMemory looks before it touches any of it."""

    def __init__(self, size: int) -> None:
        self.__array_interface__ = {
            "data": (4096, False),
            "shape": ((1 << 47) // size,),
            "typestr": f"<u{size}",
            "version": 3,
        }


_WORDS = {size: np.asarray(_Everything(size)) for size in UNSIGNED}


class GlobalMemory:
    """The memory of the host, as far as it belongs to `regions`: (first byte, bytes)."""

    def __init__(self, regions: Iterable[tuple[int, int]]) -> None:
        merged: list[list[int]] = []
        for start, size in sorted(r for r in regions if r[1]):
            if merged and start < merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], start + size)
            else:
                merged.append([start, start + size])
        self._starts = np.array([r[0] for r in merged] or [0], np.int64)
        self._ends = np.array([r[1] for r in merged] or [0], np.int64)

    def check(self, address: np.ndarray, size: int) -> None:
        """Fault("bounds") unless each access of `size` bytes lies in one region, aligned to `size`. address: int64."""
        if size & size - 1 == 0 and (address & size - 1).any():
            wrong = int(address[np.argmax(address & size - 1 != 0)])
            raise Fault("bounds", f"an access of {size} bytes to global memory at {wrong:#x} is misaligned")
        self.within(address, size)

    def within(self, address: np.ndarray, size: int) -> None:
        """Fault("bounds") unless each access of `size` bytes lies in one region."""
        region = np.searchsorted(self._starts, address, side="right") - 1
        bad = (region < 0) | (address + size > self._ends[region])
        if bad.any():
            wrong = int(address[np.argmax(bad)])
            raise Fault("bounds", f"an access of {size} bytes to global memory at {wrong:#x}{self._nearest(wrong)}")

    def _nearest(self, address: int) -> str:
        near = int(np.argmin(np.minimum(np.abs(self._starts - address), np.abs(self._ends - address))))
        start, end = int(self._starts[near]), int(self._ends[near])
        if address >= end:
            return f" is {address - end} bytes behind the end of an array of {end - start} bytes"
        if address < start:
            return f" is {start - address} bytes ahead of an array of {end - start} bytes"
        return f" leaves an array of {end - start} bytes at its end"

    def load(self, address: np.ndarray, unit: int, count: int) -> np.ndarray:
        """Return uint (n, count) of `unit` bytes each. address: int64 (n,)."""
        self.check(address, unit * count)
        first = (address - 4096) // unit
        return _WORDS[unit][first[:, None] + np.arange(count)]

    def store(self, address: np.ndarray, values: np.ndarray) -> None:
        """Write values, uint (n, count). Of lanes that write the same place the highest wins."""
        unit = values.dtype.itemsize
        self.check(address, unit * values.shape[1])
        first = (address - 4096) // unit
        _WORDS[unit][first[:, None] + np.arange(values.shape[1])] = values

    def bytes_at(self, address: int, size: int) -> np.ndarray:
        """Return a view of `size` bytes. Fault("bounds"): they are not all of one region."""
        self.within(np.array([address]), size)
        return _WORDS[1][address - 4096 : address - 4096 + size]


class SharedMemory:
    """One block's shared memory. size: bytes, the reserved ones at the start included. poison: see Launch."""

    def __init__(self, size: int, clocks: Clocks | None, name: str, poison: int | None = None) -> None:
        size = -(-size // 16) * 16
        self._strict = poison is None
        self.size, self._what = size, f"shared memory of {name},"
        self.data = np.full(size, POISON if poison is None else poison, np.uint8)
        self.written = np.zeros(size, np.uint8)
        self._words = {unit: self.data.view(kind) for unit, kind in UNSIGNED.items()}
        self._marks = {unit: self.written.view(kind) for unit, kind in UNSIGNED.items()}
        self.shadow: Any = Shadow(clocks, size // CELL, self._what) if clocks else None

    def check(self, offset: np.ndarray, size: int) -> None:
        """Fault("bounds") unless the accesses of `size` bytes lie in the memory and are aligned to `size`."""
        if size & size - 1 == 0 and (offset & size - 1).any():
            wrong = int(offset[np.argmax(offset & size - 1 != 0)])
            raise Fault("bounds", f"an access of {size} bytes to {self._what} byte {wrong:#x} is misaligned")
        bad = (offset < SHARED_START) | (offset + size > self.size)
        if bad.any():
            wrong = int(offset[np.argmax(bad)])
            raise Fault("bounds", f"an access of {size} bytes to {self._what} byte {wrong:#x} of {self.size:#x}")

    def load(self, offset: np.ndarray, unit: int, count: int, agents: np.ndarray, atomic: bool = False) -> np.ndarray:
        """Return uint (n, count) of `unit` bytes each. offset: int64 (n,)."""
        self.check(offset, unit * count)
        at = (offset // unit)[:, None] + np.arange(count)
        marks = self._marks[unit][at]
        if self._strict and (marks != np.iinfo(marks.dtype).max).any():
            wrong = int(offset[np.argmax((marks != np.iinfo(marks.dtype).max).any(axis=1))])
            raise Fault("unwritten", f"a read of {unit * count} bytes at {self._what} byte {wrong:#x}: never written")
        if self.shadow:
            self._note(offset, unit, count, agents, False, atomic)
        return self._words[unit][at]

    def store(self, offset: np.ndarray, values: np.ndarray, agents: np.ndarray, atomic: bool = False) -> None:
        """Write values, uint (n, count)."""
        unit, count = values.dtype.itemsize, values.shape[1]
        self.check(offset, unit * count)
        at = (offset // unit)[:, None] + np.arange(count)
        if self.shadow:
            self._note(offset, unit, count, agents, True, atomic)
        self._words[unit][at] = values
        self._marks[unit][at] = np.iinfo(values.dtype).max

    def _note(self, offset: np.ndarray, unit: int, count: int, agents: np.ndarray, write: bool, atomic: bool) -> None:
        cells, flag = offset // CELL, ATOMIC if atomic else 0
        if unit * count < CELL:
            mask = np.left_shift((1 << unit * count) - 1, offset % CELL) | flag
            self.shadow.access(cells, mask.astype(np.uint8), agents, write)
            return
        each = unit * count // CELL
        if each > 1:
            cells = (cells[:, None] + np.arange(each)).reshape(-1)
            agents = np.repeat(agents, each)
        self.shadow.access(cells, 15 | flag, agents, write)

    def read_bytes(self, index: np.ndarray, past: Past | None, strict: bool) -> np.ndarray:
        """Return uint8 of index' shape, read by asynchronous work, which takes whole cells. Bytes that were never
        written: Fault("unwritten") if `strict`, else POISON.
        """
        flat = index.reshape(-1)
        if len(flat) and (int(flat.min()) < SHARED_START or int(flat.max()) >= self.size):
            raise Fault("bounds", f"bytes {int(flat.min()):#x} to {int(flat.max()):#x} of {self._what} {self.size:#x}")
        if strict and self._strict and not self.written[flat].all():
            wrong = int(flat[np.argmin(self.written[flat])])
            raise Fault("unwritten", f"asynchronous work reads {self._what} byte {wrong:#x}: never written")
        if self.shadow and past:
            self.shadow.asynchronous(_cells(flat), past, False)
        return self.data[index]

    def write_bytes(self, index: np.ndarray, values: np.ndarray, past: Past | None) -> None:
        """Write bytes by asynchronous work."""
        flat = index.reshape(-1)
        if len(flat) and (int(flat.min()) < SHARED_START or int(flat.max()) >= self.size):
            raise Fault("bounds", f"bytes {int(flat.min()):#x} to {int(flat.max()):#x} of {self._what} {self.size:#x}")
        if self.shadow and past:
            self.shadow.asynchronous(_cells(flat), past, True)
        self.data[flat] = values.reshape(-1)
        self.written[flat] = 0xFF


def _cells(index: np.ndarray) -> np.ndarray:
    """The cells of these bytes, each once where four neighbours stand together, which is how copies name them."""
    if len(index) % CELL == 0 and len(index) and (index[::CELL] % CELL == 0).all():
        return index[::CELL] // CELL
    return np.unique(index // CELL)
