"""Tensor maps: what cuTensorMapEncodeTiled makes, as this model encodes it, and the boxes that a copy moves."""

import struct
from dataclasses import dataclass

import numpy as np

from problems.common.ptx_model.faults import Fault
from problems.common.ptx_model.memory import GlobalMemory

BYTES = 128  # of an encoded map, which the kernel sees as an opaque block
_MAGIC = b"ptxmodelmap1"
_DIMS, _STRIDES, _BOX = 24, 44, 76  # where they begin; ahead of them address, rank, bits, swizzle, fill
SWIZZLES = {"none": 0, "32B": 32, "64B": 64, "128B": 128}
# The 16 words in which CuTe DSL's host code writes a map itself, found by comparing what it writes for many tensors:
# 0 and 1 address; 2 flags (below); 3 to 6 strides of dims[1:] / 16 without their bits from 32 on, which are nibbles of
# 7; 8 to 12 dims - 1; 13 bits 0 to 14 element strides - 1, bits 24 to 31 box[0] - 1; 14 bytes box[1:] - 1; 15 is 0.
_NATIVE_WORDS = 16
_NATIVE_TILED, _NATIVE_HINTS = 2, 1 << 17 | 1 << 18 | 1 << 21  # of flags: bits 0 to 3; those that change no value
_NATIVE_BITS = (8, 16, 32, 32, 64, 64, 16, 32, 32, 64, 16, 4)  # of an element, by bits 7 to 10 of flags


@dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory and the box that one copy moves.

    address: of element 0; bits: of an element; dims: elements, innermost first; strides: bytes, of dims[1:];
    box: elements; swizzle: bytes of a row, 0, 32, 64 or 128; nan_fill: what lies outside is NaN, else zero.
    """

    address: int
    bits: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    nan_fill: bool = False
    element_strides: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Fault("descriptor"): a rule of the hardware is broken."""
        rank = len(self.dims)
        if not 1 <= rank <= 5 or len(self.box) != rank or len(self.strides) != rank - 1:
            raise Fault("descriptor", f"a tensor map of rank {rank} with {len(self.box)} box sizes")
        if any(s != 1 for s in self.element_strides):
            raise Fault("not modelled", f"element strides {self.element_strides} of a tensor map")
        inner = self.box[0] * self.bits
        if self.address % 16 or any(s % 16 for s in self.strides) or inner % 128:
            raise Fault("descriptor", f"a tensor map whose address, strides or box rows are no multiple of 16: {self}")
        if any(not 1 <= b <= 256 for b in self.box):
            raise Fault("descriptor", f"a box of {self.box} elements: each must be 1 to 256")
        if self.swizzle and inner // 8 > self.swizzle:
            raise Fault("descriptor", f"rows of {inner // 8} bytes with a swizzle of {self.swizzle}")

    def encode(self) -> bytes:
        """The map as 128 bytes; only `decode` reads them."""
        rank = len(self.dims)
        raw = bytearray(BYTES)
        raw[:12] = _MAGIC
        struct.pack_into("<QBBBB", raw, 12, self.address, rank, self.bits, self.swizzle, self.nan_fill)
        struct.pack_into(f"<{rank}I", raw, _DIMS, *self.dims)
        struct.pack_into(f"<{rank - 1}Q", raw, _STRIDES, *self.strides)
        struct.pack_into(f"<{rank}H", raw, _BOX, *self.box)
        return bytes(raw)

    @staticmethod
    def decode(raw: bytes) -> "TensorMap":
        """The map in these 128 bytes, as `encode` or CuTe DSL writes it. Fault("descriptor"): there is none."""
        if not raw.startswith(_MAGIC):
            return _native(struct.unpack_from(f"<{_NATIVE_WORDS}I", raw))
        address, rank, bits, swizzle, fill = struct.unpack_from("<QBBBB", raw, 12)
        dims = struct.unpack_from(f"<{rank}I", raw, _DIMS)
        strides = struct.unpack_from(f"<{rank - 1}Q", raw, _STRIDES)
        box = struct.unpack_from(f"<{rank}H", raw, _BOX)
        return TensorMap(address, bits, dims, strides, box, swizzle, bool(fill))

    def box_bytes(self) -> int:
        """Bytes that one box has in shared memory, and that its barrier counts."""
        return int(np.prod(self.box)) * self.bits // 8

    def rows(self, coordinates: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """-> (address of each row of the box, whether it lies inside of the tensor); rows in order of shared memory."""
        if len(coordinates) != len(self.dims):
            raise Fault("descriptor", f"{len(coordinates)} coordinates for a tensor map of rank {len(self.dims)}")
        address, inside = np.array([self.address], np.int64), np.array([True])
        for size, stride, count, first in zip(self.dims[1:], self.strides, self.box[1:], coordinates[1:], strict=True):
            place = first + np.arange(count, dtype=np.int64)
            address = (address[None, :] + (place * stride)[:, None]).reshape(-1)
            inside = (inside[None, :] & ((place >= 0) & (place < size))[:, None]).reshape(-1)
        return address, inside

    def inner(self, first: int) -> tuple[int, int, int]:
        """-> (bytes of a row of the box, first and end byte of what lies inside the tensor)."""
        if first * self.bits % 8:
            raise Fault("descriptor", f"a box that begins at element {first} of {self.bits} bits")
        low, high = max(0, -first), min(self.box[0], self.dims[0] - first)
        return self.box[0] * self.bits // 8, low * self.bits // 8, max(low, high) * self.bits // 8

    def load(self, memory: GlobalMemory, coordinates: tuple[int, ...], rows: tuple[int, ...] = ()) -> np.ndarray:
        """The bytes of a box, uint8. rows: of a gather, in place of the second coordinate."""
        address, inside = self._lines(coordinates, rows)
        size, low, high = self.inner(coordinates[0])
        out = np.full((len(address), size), 0xFF if self.nan_fill else 0, np.uint8)
        start = coordinates[0] * self.bits // 8
        for line in np.flatnonzero(inside) if high > low else ():
            out[line, low:high] = memory.bytes_at(int(address[line]) + start + low, high - low)
        return out.reshape(-1)

    def store(self, memory: GlobalMemory, coordinates: tuple[int, ...], data: np.ndarray) -> None:
        """Write the part of a box that lies inside the tensor."""
        address, inside = self._lines(coordinates, ())
        size, low, high = self.inner(coordinates[0])
        lines = data.reshape(len(address), size)
        start = coordinates[0] * self.bits // 8
        for line in np.flatnonzero(inside) if high > low else ():
            memory.bytes_at(int(address[line]) + start + low, high - low)[:] = lines[line, low:high]

    def _lines(self, coordinates: tuple[int, ...], rows: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        if not rows:
            return self.rows(coordinates)
        if len(self.dims) != 2 or self.box[1] != 1:
            raise Fault("descriptor", f"a gather of rows needs a map of rank 2 with boxes of one row, got {self.box}")
        place = np.array(rows, np.int64)
        return self.address + place * self.strides[0], (place >= 0) & (place < self.dims[1])


def _native(words: tuple[int, ...]) -> TensorMap:
    """The map in the hardware's own form. Fault("descriptor"): it is none; Fault("not modelled"): a flag is set."""
    flags, rank = words[2], (words[2] >> 4 & 7) + 1
    kind, swizzle = flags >> 7 & 15, (0, 32, 64, 128)[flags >> 13 & 3]
    if flags & 15 != _NATIVE_TILED or rank > 5 or words[15] or kind >= len(_NATIVE_BITS):
        raise Fault("descriptor", "a copy names a tensor map where there is none")
    steps = words[13] & 0xFFFFFF
    if flags >> 15 & ~(_NATIVE_HINTS >> 15) or flags >> 11 & 3 or steps:
        raise Fault("not modelled", f"a tensor map with the flags {flags:#x} and element strides {steps:#x}")
    strides = ((words[3 + i] | (words[7] >> 4 * i & 15) << 32) * 16 for i in range(rank - 1))
    box = (words[13] >> 24, *(words[14] >> 8 * i & 255 for i in range(rank - 1)))
    return TensorMap(
        words[1] << 32 | words[0], _NATIVE_BITS[kind], tuple(words[8 + i] + 1 for i in range(rank)), tuple(strides),
        tuple(size + 1 for size in box), swizzle,
    )  # fmt: skip


def swizzled(offset: np.ndarray, span: int) -> np.ndarray:
    """Where a copy or a tensor core finds a byte in shared memory whose rows of `span` bytes are swizzled."""
    if not span:
        return offset
    return offset ^ ((offset >> 7) & (span // 16 - 1)) << 4
