"""Check tensor-map descriptors of the bulk tensor copy engine (TMA) on the host, before any driver call.

Everything is INNERMOST FIRST, as cuTensorMapEncodeTiled wants it: dims[0] is the contiguous dimension, its stride is
implied, and strides[i] is the distance in bytes between neighbours along dims[i + 1]. The driver answers a broken
rule with one error code and some mistakes with none (the load then brings other elements), so each rule is checked
here by name. Rules: CUDA driver API 13.0, cuTensorMapEncodeTiled. No GPU and no CUDA library is needed.
Stricter than the driver 580 of an H200, which takes these in silence: strides that overlap or do not increase (the
manual's formula has them increase), a null address, another swizzle with 32-byte interleave, maps past the memory.
"""

import ctypes
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

MAX_RANK = 5
MAX_DIM = 2**32  # elements, inclusive
MAX_STRIDE = 2**40  # bytes, exclusive
MAX_BOX = 256  # elements a dimension, inclusive
MAX_ELEMENT_STRIDE = 8
SHARED_LIMIT = 227 * 1024  # bytes; the most that a block may have on sm_90 and sm_100
TARGETS = ("sm90", "sm100")
SM100_ONLY = ("16u4_align8b", "128B_atom_32B", "128B_atom_32B_flip_8B", "128B_atom_64B")  # sm_90's driver refuses them

# name: (value of CUtensorMapDataType, bits of an element, floating point). The two 4 and 6 bit types that leave gaps
# in shared memory (16U4_ALIGN16B, 16U6_ALIGN16B) are not served: their footprint is not their size.
DTYPES = {
    "uint8": (0, 8, False),
    "uint16": (1, 16, False),
    "uint32": (2, 32, False),
    "int32": (3, 32, False),
    "uint64": (4, 64, False),
    "int64": (5, 64, False),
    "float16": (6, 16, True),
    "float32": (7, 32, True),
    "float64": (8, 64, True),
    "bfloat16": (9, 16, True),
    "float32_ftz": (10, 32, True),
    "tfloat32": (11, 32, True),
    "tfloat32_ftz": (12, 32, True),
    "16u4_align8b": (13, 4, False),  # dims and box count 4-bit values, 16 of them in 8 bytes without gaps
}
INTERLEAVES = {"none": 0, "16B": 1, "32B": 2}
# name: (value of CUtensorMapSwizzle, span in bytes, bytes after which the pattern repeats)
SWIZZLES = {
    "none": (0, None, 128),
    "32B": (1, 32, 256),
    "64B": (2, 64, 512),
    "128B": (3, 128, 1024),
    "128B_atom_32B": (4, 128, 1024),
    "128B_atom_32B_flip_8B": (5, 128, 1024),
    "128B_atom_64B": (6, 128, 1024),
}
L2_PROMOTIONS = {"none": 0, "64B": 1, "128B": 2, "256B": 3}
OOB_FILLS = {"zero": 0, "nan": 1}


class Fields(ctypes.Structure):
    """A descriptor in C's layout, 144 bytes, for a launcher that encodes it; unused entries are 0.

    struct { uint64_t address, dims[5], strides[4];
             uint32_t box[5], element_strides[5], dtype, rank, interleave, swizzle, l2_promotion, oob_fill; };
    """

    _fields_ = [
        ("address", ctypes.c_uint64),
        ("dims", ctypes.c_uint64 * MAX_RANK),
        ("strides", ctypes.c_uint64 * (MAX_RANK - 1)),
        ("box", ctypes.c_uint32 * MAX_RANK),
        ("element_strides", ctypes.c_uint32 * MAX_RANK),
        ("dtype", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("interleave", ctypes.c_uint32),
        ("swizzle", ctypes.c_uint32),
        ("l2_promotion", ctypes.c_uint32),
        ("oob_fill", ctypes.c_uint32),
    ]


@dataclass(frozen=True)
class Descriptor:
    """The arguments of one tensor map. It cannot be made broken: ValueError names the rule. See `check`."""

    dtype: str
    dims: tuple[int, ...]  # elements, innermost first
    strides: tuple[int, ...]  # bytes, rank - 1 of them
    box: tuple[int, ...]  # elements
    element_strides: tuple[int, ...]
    interleave: str = "none"
    swizzle: str = "none"
    address: int | None = None  # None: shapes are known, memory is not yet
    l2_promotion: str = "none"
    oob_fill: str = "zero"
    target: str = "sm90"

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
    def element_bits(self) -> int:
        return DTYPES[self.dtype][1]

    @property
    def loaded(self) -> tuple[int, ...]:
        """Elements that one load brings along each dimension; the innermost element stride counts if interleaved."""
        steps = (1, *self.element_strides[1:]) if self.interleave == "none" else self.element_strides
        return tuple(-(-extent // step) for extent, step in zip(self.box, steps, strict=True))

    @property
    def transaction_bytes(self) -> int:
        """Bytes that one load of the box writes to shared memory and counts on its mbarrier. Elements outside the
        tensor are filled and counted too, so this holds for every coordinate.
        """
        elements = 1
        for extent in self.loaded:
            elements *= extent
        return elements * self.element_bits // 8

    @property
    def shared_alignment(self) -> int:
        """Bytes to which the box must be aligned in shared memory for its swizzle pattern to start at row 0."""
        return SWIZZLES[self.swizzle][2]

    @property
    def extent_bytes(self) -> int:
        """Bytes from the address to the end of the last element."""
        return _row_bytes(self) + sum((n - 1) * s for n, s in zip(self.dims[1:], self.strides, strict=True))

    def at(self, address: int, storage: int | None = None) -> "Descriptor":
        """The same map over memory at `address`, of which `storage` bytes belong to the tensor (None: not checked)."""
        _check_storage(self, storage)
        return dataclasses.replace(self, address=address)

    def fields(self) -> Fields:
        """For the launcher. ValueError if the address is not known yet."""
        if self.address is None:
            raise ValueError("address must be set before the map is encoded, got None: use at(address)")
        pad = [
            (*values, *([0] * (size - len(values))))
            for values, size in (
                (self.dims, MAX_RANK),
                (self.strides, MAX_RANK - 1),
                (self.box, MAX_RANK),
                (self.element_strides, MAX_RANK),
            )
        ]
        dims, strides, box, element_strides = pad
        return Fields(
            self.address,
            dims,
            strides,
            box,
            element_strides,
            DTYPES[self.dtype][0],
            self.rank,
            INTERLEAVES[self.interleave],
            SWIZZLES[self.swizzle][0],
            L2_PROMOTIONS[self.l2_promotion],
            OOB_FILLS[self.oob_fill],
        )


def check(
    dtype: str,
    dims: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    element_strides: Sequence[int] | None = None,
    interleave: str = "none",
    swizzle: str = "none",
    address: int | None = None,
    *,
    l2_promotion: str = "none",
    oob_fill: str = "zero",
    target: str = "sm90",
    storage: int | None = None,
    shared_limit: int = SHARED_LIMIT,
) -> Descriptor:
    """The checked descriptor of a tiled tensor map, all sequences innermost first.

    dims: elements. strides: bytes, rank - 1 entries. box: elements of one load. element_strides: default 1 everywhere.
    address: of element 0; None where only shapes are known (add it with `at`). storage: bytes of the tensor's memory
    from there; it finds maps that reach past the end, as dims given outermost first do. shared_limit: bytes of shared
    memory that the box may take.

    ValueError: the name of the argument, what was wanted, what came. Dims given outermost first are found where they
    make rows overlap or leave the storage; a square tensor given that way is a legal map.
    """
    dims, strides, box = tuple(dims), tuple(strides), tuple(box)
    element_strides = (1,) * len(dims) if element_strides is None else tuple(element_strides)
    made = Descriptor(
        dtype, dims, strides, box, element_strides, interleave, swizzle, address, l2_promotion, oob_fill, target
    )
    _check_storage(made, storage)
    if made.transaction_bytes > shared_limit:
        raise ValueError(
            f"box {box} of {dtype} must fit {shared_limit} bytes of shared memory, got {made.transaction_bytes}"
        )
    return made


def _check_names(d: Descriptor) -> None:
    for name, value, known in (
        ("dtype", d.dtype, DTYPES),
        ("interleave", d.interleave, INTERLEAVES),
        ("swizzle", d.swizzle, SWIZZLES),
        ("l2_promotion", d.l2_promotion, L2_PROMOTIONS),
        ("oob_fill", d.oob_fill, OOB_FILLS),
        ("target", d.target, TARGETS),
    ):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    for name, value in (("dtype", d.dtype), ("swizzle", d.swizzle)):
        if d.target != "sm100" and value in SM100_ONLY:
            raise ValueError(f"{name} {value} needs target sm100, got {d.target}")
    if d.interleave == "32B" and d.swizzle != "32B":
        raise ValueError(f"swizzle must be 32B with interleave 32B, got {d.swizzle}")
    if d.oob_fill == "nan" and not DTYPES[d.dtype][2]:
        raise ValueError(f"oob_fill nan needs a floating-point dtype, got {d.dtype}")


def _check_dims(d: Descriptor) -> None:
    least = 1 if d.interleave == "none" else 3
    if not least <= d.rank <= MAX_RANK:
        raise ValueError(f"rank must be {least} to {MAX_RANK} with interleave {d.interleave}, got {d.rank}: {d.dims}")
    _check_range("dims", d.dims, 1, MAX_DIM)
    if d.dims[0] * d.element_bits % 8:
        raise ValueError(f"dims[0] must be a multiple of 2 for {d.dtype}, got {d.dims[0]}")


def _check_strides(d: Descriptor) -> None:
    if len(d.strides) != d.rank - 1:
        hint = " (leave out the innermost one)" if len(d.strides) == d.rank else ""
        raise ValueError(
            f"strides must have rank - 1 = {d.rank - 1} entries, the innermost ({d.element_bits / 8:g} bytes) is "
            f"implied, got {len(d.strides)}: {d.strides}{hint}"
        )
    _check_range("strides", d.strides, 0, MAX_STRIDE - 1)
    unit = 32 if d.interleave == "32B" else 16
    for i, stride in enumerate(d.strides):
        if stride % unit:
            raise ValueError(f"strides[{i}] must be a multiple of {unit} bytes, got {stride}")
    if i := _overlap(d.dims, d.strides, d.element_bits):
        turned = any(not _overlap(d.dims[::-1], s, d.element_bits) for s in (d.strides, d.strides[::-1]))
        hint = "; are they outermost first?" if turned else ""
        raise ValueError(
            f"strides[{i - 1}] must be at least the bytes of one step along dims[{i}], or neighbours overlap, got "
            f"strides {d.strides} for dims {d.dims} of {d.element_bits / 8:g} bytes{hint}"
        )


def _overlap(dims: tuple[int, ...], strides: tuple[int, ...], bits: int) -> int:
    """The first dimension whose stride is shorter than all that lies inside it, or 0. Extent 1 never steps."""
    span = dims[0] * bits // 8
    for i, (extent, stride) in enumerate(zip(dims[1:], strides, strict=True), start=1):
        if extent > 1:
            if stride < span:
                return i
            span = stride * extent
    return 0


def _check_box(d: Descriptor) -> None:
    for name, values, most in (("box", d.box, MAX_BOX), ("element_strides", d.element_strides, MAX_ELEMENT_STRIDE)):
        if len(values) != d.rank:
            raise ValueError(f"{name} must have rank = {d.rank} entries, got {len(values)}: {values}")
        _check_range(name, values, 1, most)
    inner_bits = d.box[0] * d.element_bits
    if inner_bits % 128:  # the manual asks for this without interleave only, the driver always
        raise ValueError(
            f"box[0] must be a multiple of 16 bytes, got {d.box[0]} of {d.dtype} = {inner_bits / 8:g} bytes"
        )
    if d.interleave == "none":
        span = SWIZZLES[d.swizzle][1]
        if span is not None and inner_bits > 8 * span:
            raise ValueError(
                f"box[0] must be at most {span} bytes with swizzle {d.swizzle}, "
                f"got {d.box[0]} of {d.dtype} = {inner_bits // 8} bytes"
            )


def _check_address(d: Descriptor) -> None:
    if d.address is None:
        return
    unit = 32 if d.interleave == "32B" else 16
    if type(d.address) is not int or not 0 < d.address < 2**64 or d.address % unit:
        raise ValueError(f"address must be nonzero and a multiple of {unit}, got {d.address!r}")


def _check_storage(d: Descriptor, storage: int | None) -> None:
    if storage is not None and d.extent_bytes > storage:
        raise ValueError(
            f"storage must hold the whole map, {d.extent_bytes} bytes for dims {d.dims} and strides {d.strides}, got "
            f"{storage}; are the dims outermost first?"
        )


def _row_bytes(d: Descriptor) -> int:
    return d.dims[0] * d.element_bits // 8


def _check_range(name: str, values: tuple[int, ...], least: int, most: int) -> None:
    for i, value in enumerate(values):
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"{name}[{i}] must be an integer from {least} to {most}, got {value!r}: {values}")
