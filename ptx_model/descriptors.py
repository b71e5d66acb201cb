"""Matrices in shared memory as wgmma and tcgen05 name them: 64-bit descriptors, swizzles, the two majors."""

from dataclasses import dataclass

import numpy as np

from ptx_model.faults import Fault
from ptx_model.tensor_map import swizzled

_CHUNK = 16  # bytes


@dataclass(frozen=True)
class Matrix:
    """start, leading, stride: bytes; swizzle: bytes of a row, or 0."""

    start: int
    leading: int
    stride: int
    swizzle: int

    def index(self, rows: int, k: int, size: int, k_major: bool) -> np.ndarray:
        """The byte offset in shared memory of each byte of rows x k elements of `size` bytes: int (rows, k * size).

        K-major: 8 rows lie a row's pitch apart (the swizzle's span, or 16 bytes), `stride` bytes on are 8 rows more.
        MN-major: a line has 64 (32, 16, 8) rows for one k; 8 k lie one line apart; `stride` bytes on are 8 k more, and
        `leading` bytes on the next rows; without a swizzle these two change places.
        """
        if k_major:
            row, at = np.arange(rows)[:, None], np.arange(k * size)[None, :]
            if self.swizzle:
                if k * size > self.swizzle:
                    raise Fault("descriptor", f"{k * size} bytes along k in rows of {self.swizzle}")
                offset = row // 8 * self.stride + row % 8 * self.swizzle + at
            else:
                offset = row // 8 * self.stride + at // _CHUNK * self.leading + row % 8 * _CHUNK + at % _CHUNK
            return swizzled(self.start + offset, self.swizzle)
        line = (self.swizzle or _CHUNK) // size  # rows of one line
        row, depth = np.arange(rows)[:, None], np.arange(k)[None, :]
        group, next_k = (self.leading, self.stride) if self.swizzle else (self.stride, self.leading)
        offset = row // line * group + row % line * size + depth // 8 * next_k + depth % 8 * line * size
        first = swizzled(self.start + offset, self.swizzle)
        return (first[:, :, None] + np.arange(size)).reshape(rows, k * size)


def wgmma(descriptor: int) -> Matrix:
    """The matrix of a wgmma descriptor. Fault("descriptor"): a field out of range."""
    swizzle = {0: 0, 1: 128, 2: 64, 3: 32}[descriptor >> 62]
    if descriptor >> 49 & 7:
        raise Fault("not modelled", f"the base offset of the descriptor {descriptor:#x}")
    if descriptor & 0x3FFF_C000_C000_C000 & ~(7 << 49):
        raise Fault("descriptor", f"the descriptor {descriptor:#x} has bits set that mean nothing")
    return _fields(descriptor, swizzle)


def tcgen05(descriptor: int) -> Matrix:
    """The matrix of a tcgen05 descriptor."""
    if descriptor >> 46 & 7 != 1:
        raise Fault("descriptor", f"the descriptor {descriptor:#x}: bits 46 to 48 must be 1")
    swizzle = {0: 0, 2: 128, 4: 64, 6: 32}.get(descriptor >> 61)
    if swizzle is None or descriptor >> 49 & 15:
        raise Fault("not modelled", f"the layout or base offset of the descriptor {descriptor:#x}")
    return _fields(descriptor, swizzle)


def _fields(descriptor: int, swizzle: int) -> Matrix:
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    return Matrix(start, leading, stride, swizzle)
