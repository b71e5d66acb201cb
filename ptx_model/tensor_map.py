"""Tensor maps: what cuTensorMapEncodeTiled makes, as this model encodes it, and the boxes that a copy moves."""

import struct
from dataclasses import dataclass

import numpy as np

from ptx_model.faults import Fault
from ptx_model.memory import GlobalMemory

BYTES = 128  # of an encoded map, which the kernel sees as an opaque block
_MAGIC = b"ptxmodelmap1"
_DIMS, _STRIDES, _BOX = 24, 44, 76  # where they begin; ahead of them address, rank, bits, swizzle, fill
SWIZZLES = {"none": 0, "32B": 32, "64B": 64, "128B": 128}


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
        """The map in these 128 bytes. Fault("descriptor"): there is none."""
        if not raw.startswith(_MAGIC):
            return _encoded_by_the_dsl(raw)
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


# How CuTe DSL writes a tensor map itself, without the driver. Found by compiling maps of every type, rank, swizzle, box
# and stride with version 4.8.1; 64 bytes: address, flags, strides / 16 (low words, then a nibble each), dims - 1,
# element strides - 1, box - 1. A flag that no such map had is refused.
_DSL = struct.Struct("<QI4II5I3x5B4x")
_DSL_ALWAYS = 0x40002  # bits that every one of them has
_DSL_HINTS = 0x210000  # how much L2 fetches at once; that fp32 is rounded to TF32, which products do by themselves
_DSL_BITS = {0: 8, 1: 16, 2: 32, 4: 64, 6: 16, 7: 32, 9: 64, 10: 16, 11: 4}


def _encoded_by_the_dsl(raw: bytes) -> TensorMap:
    """Fault("descriptor"): these bytes are none."""
    address, flags, *rest = _DSL.unpack_from(raw)
    low, high, sizes, boxes = rest[:4], rest[4], rest[5:10], rest[10:]
    rank, kind, swizzle = (flags >> 4 & 7) + 1, flags >> 7 & 15, flags >> 13 & 3
    known = _DSL_ALWAYS | _DSL_HINTS | 7 << 4 | 15 << 7 | 3 << 13
    if flags & _DSL_ALWAYS != _DSL_ALWAYS or flags & ~known or kind not in _DSL_BITS or rank > 5 or any(raw[52:55]):
        raise Fault("descriptor", f"a copy names a tensor map where there is none that the model reads ({flags:#x})")
    strides = tuple((n | (high >> 4 * i & 15) << 32) * 16 for i, n in enumerate(low[: rank - 1]))
    dims, box = (tuple(n + 1 for n in numbers[:rank]) for numbers in (sizes, boxes))
    return TensorMap(address, _DSL_BITS[kind], dims, strides, box, (0, 32, 64, 128)[swizzle])


def swizzled(offset: np.ndarray, span: int) -> np.ndarray:
    """Where a copy or a tensor core finds a byte in shared memory whose rows of `span` bytes are swizzled."""
    if not span:
        return offset
    return offset ^ ((offset >> 7) & (span // 16 - 1)) << 4
