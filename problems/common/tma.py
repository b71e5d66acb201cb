"""Check tensor-map descriptors of the bulk tensor copy engine (TMA) on the host, before any driver call.

Everything is INNERMOST FIRST, as cuTensorMapEncodeTiled wants it: dims[0] is the contiguous dimension, its stride is
implied, and strides[i] is the distance in bytes between neighbours along dims[i + 1]. The driver answers a broken
rule with one error code and some mistakes with none (the load then brings other elements), so each rule is checked
here by name. Rules: CUDA driver API 13.0, cuTensorMapEncodeTiled, for maps that are not interleaved, step by 1 and
fill with zeros. No GPU and no CUDA library is needed.
Stricter than the driver 580 of an H200, which takes these in silence: strides that overlap or do not increase (the
manual's formula has them increase), a null address, maps past the memory.
"""

import ctypes
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

MAX_RANK = 5
MAX_DIM = 2**32  # elements, inclusive
MAX_STRIDE = 2**40  # bytes, exclusive
MAX_BOX = 256  # elements a dimension, inclusive
UNIT = 16  # bytes, of addresses, strides and the innermost extent of a box
SHARED_LIMIT = 227 * 1024  # bytes; the most that a block may have on sm_90 and sm_100

# name: (value of CUtensorMapDataType, bytes of an element)
DTYPES = {
    "uint8": (0, 1),
    "uint16": (1, 2),
    "uint32": (2, 4),
    "uint64": (4, 8),
    "float16": (6, 2),
    "float32": (7, 4),
    "bfloat16": (9, 2),
}
SWIZZLES = {"none": (0, None), "32B": (1, 32), "64B": (2, 64), "128B": (3, 128)}  # CUtensorMapSwizzle, span in bytes
L2_PROMOTIONS = {"none": 0, "64B": 1, "128B": 2, "256B": 3}


class Fields(ctypes.Structure):
    """A descriptor in C's layout, tma.cuh's Tensor, for a launcher that encodes it; unused entries are 0."""

    _fields_ = [
        ("address", ctypes.c_uint64),
        ("dims", ctypes.c_uint64 * MAX_RANK),
        ("strides", ctypes.c_uint64 * (MAX_RANK - 1)),
        ("box", ctypes.c_uint32 * MAX_RANK),
        *((name, ctypes.c_uint32) for name in ("dtype", "rank", "swizzle", "l2_promotion")),
    ]


@dataclass(frozen=True)
class Descriptor:
    """The arguments of one tensor map. It cannot be made broken: ValueError names the rule. See `check`."""

    dtype: str
    dims: tuple[int, ...]  # elements, innermost first
    strides: tuple[int, ...]  # bytes, rank - 1 of them
    box: tuple[int, ...]  # elements
    swizzle: str = "none"
    address: int | None = None  # None: shapes are known, memory is not yet
    l2_promotion: str = "none"

    def __post_init__(self) -> None:
        _check_names(self)
        _check_dims(self)
        _check_strides(self)
        _check_box(self)
        _check_address(self)

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def element_bytes(self) -> int:
        return DTYPES[self.dtype][1]

    @property
    def transaction_bytes(self) -> int:
        """Bytes that one load of the box writes to shared memory and counts on its mbarrier. Elements outside the
        tensor are filled and counted too, so this holds for every coordinate.
        """
        return math.prod(self.box) * self.element_bytes

    @property
    def extent_bytes(self) -> int:
        """Bytes from the address to the end of the last element."""
        row = self.dims[0] * self.element_bytes
        return row + sum((n - 1) * s for n, s in zip(self.dims[1:], self.strides, strict=True))

    def at(self, address: int, storage: int | None = None) -> "Descriptor":
        """The same map over memory at `address`, of which `storage` bytes belong to the tensor (None: not checked)."""
        _check_storage(self, storage)
        return dataclasses.replace(self, address=address)

    def fields(self) -> Fields:
        """For the launcher. ValueError if the address is not known yet."""
        if self.address is None:
            raise ValueError("address must be set before the map is encoded, got None: use at(address)")
        kinds = (DTYPES[self.dtype][0], self.rank, SWIZZLES[self.swizzle][0], L2_PROMOTIONS[self.l2_promotion])
        return Fields(self.address, self.dims, self.strides, self.box, *kinds)


def check(
    dtype: str,
    dims: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    swizzle: str = "none",
    address: int | None = None,
    *,
    l2_promotion: str = "none",
    storage: int | None = None,
) -> Descriptor:
    """The checked descriptor of a tiled tensor map, all sequences innermost first.

    dims: elements. strides: bytes, rank - 1 entries. box: elements of one load. address: of element 0; None where only
    shapes are known (add it with `at`). storage: bytes of the tensor's memory from there; it finds maps that reach past
    the end, as dims given outermost first do.

    ValueError: the name of the argument, what was wanted, what came. Dims given outermost first are found where they
    make rows overlap or leave the storage; a square tensor given that way is a legal map.
    """
    made = Descriptor(dtype, tuple(dims), tuple(strides), tuple(box), swizzle, address, l2_promotion)
    _check_storage(made, storage)
    return made


def _check_names(d: Descriptor) -> None:
    known = {"dtype": DTYPES, "swizzle": SWIZZLES, "l2_promotion": L2_PROMOTIONS}
    for name, names in known.items():
        if getattr(d, name) not in names:
            raise ValueError(f"{name} must be one of {', '.join(names)}, got {getattr(d, name)!r}")


def _check_dims(d: Descriptor) -> None:
    if not 1 <= d.rank <= MAX_RANK:
        raise ValueError(f"rank must be 1 to {MAX_RANK}, got {d.rank}: {d.dims}")
    _check_range("dims", d.dims, 1, MAX_DIM)


def _check_strides(d: Descriptor) -> None:
    if len(d.strides) != d.rank - 1:
        hint = " (leave out the innermost one)" if len(d.strides) == d.rank else ""
        raise ValueError(
            f"strides must have rank - 1 = {d.rank - 1} entries, the innermost ({d.element_bytes} bytes) is "
            f"implied, got {len(d.strides)}: {d.strides}{hint}"
        )
    _check_range("strides", d.strides, 0, MAX_STRIDE - 1)
    for i, stride in enumerate(d.strides):
        if stride % UNIT:
            raise ValueError(f"strides[{i}] must be a multiple of {UNIT} bytes, got {stride}")
    if i := _overlap(d.dims, d.strides, d.element_bytes):
        turned = any(not _overlap(d.dims[::-1], s, d.element_bytes) for s in (d.strides, d.strides[::-1]))
        hint = "; are they outermost first?" if turned else ""
        raise ValueError(
            f"strides[{i - 1}] must be at least the bytes of one step along dims[{i}], or neighbours overlap, got "
            f"strides {d.strides} for dims {d.dims} of {d.element_bytes} bytes{hint}"
        )


def _overlap(dims: tuple[int, ...], strides: tuple[int, ...], element_bytes: int) -> int:
    """The first dimension whose stride is shorter than all that lies inside it, or 0. Extent 1 never steps."""
    span = dims[0] * element_bytes
    for i, (extent, stride) in enumerate(zip(dims[1:], strides, strict=True), start=1):
        if extent > 1:
            if stride < span:
                return i
            span = stride * extent
    return 0


def _check_box(d: Descriptor) -> None:
    if len(d.box) != d.rank:
        raise ValueError(f"box must have rank = {d.rank} entries, got {len(d.box)}: {d.box}")
    _check_range("box", d.box, 1, MAX_BOX)
    span, inner = SWIZZLES[d.swizzle][1], d.box[0] * d.element_bytes
    got = f"got {d.box[0]} of {d.dtype} = {inner} bytes"
    if inner % UNIT:
        raise ValueError(f"box[0] must be a multiple of {UNIT} bytes, {got}")
    if span is not None and inner > span:
        raise ValueError(f"box[0] must be at most {span} bytes with swizzle {d.swizzle}, {got}")
    if d.transaction_bytes > SHARED_LIMIT:
        raise ValueError(f"box {d.box} must fit {SHARED_LIMIT} bytes of shared memory, got {d.transaction_bytes}")


def _check_address(d: Descriptor) -> None:
    wrong = d.address is not None and (type(d.address) is not int or not 0 < d.address < 2**64 or d.address % UNIT)
    if wrong:
        raise ValueError(f"address must be nonzero and a multiple of {UNIT}, got {d.address!r}")


def _check_storage(d: Descriptor, storage: int | None) -> None:
    if storage is not None and d.extent_bytes > storage:
        raise ValueError(
            f"storage must hold the whole map, {d.extent_bytes} bytes for dims {d.dims} and strides {d.strides}, got "
            f"{storage}; are the dims outermost first?"
        )


def _check_range(name: str, values: tuple[int, ...], least: int, most: int) -> None:
    for i, value in enumerate(values):
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"{name}[{i}] must be an integer from {least} to {most}, got {value!r}: {values}")
