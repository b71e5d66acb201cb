"""How a warp's registers hold matrices, and the products of warps: mma.sync, ldmatrix, stmatrix."""

import re
from collections.abc import Callable

import numpy as np

from ptx_model import formats
from ptx_model.decode import Decoder, Execute, opcode
from ptx_model.faults import Fault
from ptx_model.machine import LANES, Mask, Warps
from ptx_model.memory import SHARED_WINDOW
from ptx_model.parse import Register
from ptx_model.spaces import shared_blocks

HALVES = {"bf16": formats.from_bf16, "f16": lambda bits: bits.view(np.float16).astype(np.float32)}
_TF32 = np.uint32(0xFFFFE000)  # the bits of fp32 that a product of tf32 looks at
# How the elements of a product lie in registers: type -> (unsigned integers of their size, these -> numbers).
ELEMENTS: dict[str, tuple[type, Callable[[np.ndarray], np.ndarray]]] = {
    **{name: (np.uint16, decode) for name, decode in HALVES.items()},
    "tf32": (np.uint32, lambda bits: (bits & _TF32).view(np.float32)),
    "e4m3": (np.uint8, lambda codes: formats.E4M3[codes]),
    "e5m2": (np.uint8, lambda codes: formats.E5M2[codes]),
    "s8": (np.uint8, lambda codes: codes.view(np.int8)),
    "u8": (np.uint8, lambda codes: codes),
}


def numbers(raw: np.ndarray, type_: str) -> np.ndarray:
    """Registers or bytes, contiguous along the last axis -> float64 of the elements in them."""
    unit, decode = ELEMENTS[type_]
    return decode(np.ascontiguousarray(raw).view(unit)).astype(np.float64)


def a_fragment(registers: np.ndarray, type_: str) -> np.ndarray:
    """uint32 (2 or 4, warps, 32) -> float64 (warps, 16 rows, k), A of mma.sync and of wgmma."""
    halves, warps = len(registers) // 2, registers.shape[1]
    values = numbers(registers, type_)
    # (k half, row half, warps, row, thread of 4, elements of a register)
    values = values.reshape(halves, 2, warps, 8, 4, -1).transpose(2, 1, 3, 0, 4, 5)
    return values.reshape(warps, 16, -1)


def b_fragment(registers: np.ndarray, type_: str) -> np.ndarray:
    """uint32 (1 or 2, warps, 32) -> float64 (warps, k, 8 columns), B of mma.sync."""
    halves, warps = registers.shape[:2]
    values = numbers(registers, type_).reshape(halves, warps, 8, 4, -1)
    return values.transpose(1, 0, 3, 4, 2).reshape(warps, -1, 8)


def sums(registers: np.ndarray) -> np.ndarray:
    """float32 (4 n, warps, 32) -> (warps, 16 rows, 8 n columns), accumulators."""
    n, warps = registers.shape[0] // 4, registers.shape[1]
    return registers.reshape(n, 2, 2, warps, 8, 4).transpose(3, 1, 4, 0, 5, 2).reshape(warps, 16, 8 * n)


def to_registers(matrix: np.ndarray) -> np.ndarray:
    """The inverse of `sums`."""
    warps, _, columns = matrix.shape
    parts = matrix.reshape(warps, 2, 8, columns // 8, 4, 2)
    return parts.transpose(3, 1, 5, 0, 2, 4).reshape(columns // 2, warps, LANES)


def _whole_warps(w: Warps, what: str) -> np.ndarray | None:
    """bool (warps,), or None for all of them. Fault("divergence"): only a part of a warp executes it."""
    if w.mask is None:
        return None
    some = w.whole(what)
    return None if some.all() else some


# Of one mma.sync: bytes along k of A's row -> registers of A.
_REGISTERS_OF_A = {32: 4, 16: 2}


@opcode("mma")
def warp_product(d: Decoder) -> Execute:
    d.drop("sync", "aligned")
    shape = re.fullmatch(r"m16n8k(\d+)", d.left.pop(0))
    layouts = (d.take("row"), d.take("col"))
    saturates = d.take("satfinite")
    types = tuple(d.left)
    d.left = []
    said = " ".join(types)
    if shape is None or layouts != ("row", "col") or len(types) != 4 or not {types[1], types[2]} <= {*ELEMENTS}:
        raise d.refuse(said)
    a_type, b_type = types[1:3]
    whole = a_type in ("s8", "u8")
    size = ELEMENTS[a_type][0]().itemsize
    count = _REGISTERS_OF_A.get(int(shape[1]) * size)
    left, right = ([d.lanes(item, "b32") for item in d.items(i)] for i in (1, 2))
    if size != ELEMENTS[b_type][0]().itemsize or whole != (b_type in ("s8", "u8")) or (size > 1 and a_type != b_type):
        raise d.refuse(said)
    if (len(left), len(right)) != (count, (count or 0) // 2) or saturates:
        raise d.refuse(f"m16n8k{shape[1]} {said}{' satfinite' if saturates else ''}")
    read, write = Sums(d, d.items(3), types[3]), Sums(d, d.items(0), types[0])
    if types[0] != types[3] or types[0] not in (("s32",) if whole else ("f32", "f16")):
        raise d.refuse(said)

    def execute(w: Warps, m: Mask) -> None:
        if m is not None:
            _whole_warps(w, "mma.sync")
        shape_ = (-1, len(w.ids), LANES)
        a = a_fragment(np.array([get(w) for get in left]).reshape(shape_), a_type)
        b = b_fragment(np.array([get(w) for get in right]).reshape(shape_), b_type)
        write.put(w, a @ b + read.get(w), m)

    return execute


class Sums:
    """The registers of sums, fp32, s32, or pairs of fp16: read and written as matrices."""

    def __init__(self, d: Decoder, items: tuple, type_: str) -> None:
        self.type = type_
        register = {"f32": "f32", "s32": "s32", "f16": "b32"}.get(type_)
        if register is None:
            raise d.refuse(f"sums in {type_}")
        constant = all(not isinstance(item, Register) for item in items)
        self.reads = [d.lanes(item, register) for item in items]
        self.puts = [] if constant else [d.put(item, register) for item in items]
        self.count = len(items) * (2 if type_ == "f16" else 1)  # numbers of a thread

    def get(self, w: Warps) -> np.ndarray:
        """float64 (warps, 16 rows, columns)."""
        raw = np.array([get(w) for get in self.reads]).reshape(len(self.reads), -1, LANES)
        if self.type == "f16":  # a register has two columns of a row
            raw = np.ascontiguousarray(raw).view(np.float16).reshape(*raw.shape, 2)
            raw = np.moveaxis(raw, -1, 1).reshape(self.count, -1, LANES)
        return sums(raw).astype(np.float64)

    def put(self, w: Warps, matrix: np.ndarray, m: Mask) -> None:
        """matrix: as of `get`; rounded once."""
        if self.type == "s32":
            matrix = matrix.astype(np.int64).astype(np.int32)  # exact: |sums| stay far below 2^53
        else:
            matrix = matrix.astype(np.float32 if self.type == "f32" else np.float16)
        values = to_registers(matrix).reshape(self.count, w.count)
        if self.type == "f16":
            values = np.ascontiguousarray(np.moveaxis(values.reshape(-1, 2, w.count), 1, -1)).view(np.uint32)[..., 0]
        for put, value in zip(self.puts, values, strict=True):
            put(w, value, m)


def _rows(w: Warps, m: Mask, address: np.ndarray, count: int) -> np.ndarray:
    """The addresses of the rows of `count` matrices: int64 (warps, count * 8)."""
    if m is not None:
        _whole_warps(w, "ldmatrix or stmatrix")
    rows = address.reshape(-1, LANES)[:, : 8 * count]
    return np.where(rows >= SHARED_WINDOW, rows - SHARED_WINDOW, rows)


def _matrix_form(d: Decoder) -> tuple[int, bool]:
    d.drop("sync", "aligned", "shared", "shared::cta", "b16")
    count = next((int(mod[1]) for mod in d.left if re.fullmatch(r"x[124]", mod)), 0)
    d.left = [mod for mod in d.left if not re.fullmatch(r"x[124]", mod)]
    if d.left[:1] != ["m8n8"]:
        raise d.refuse(" ".join(d.left))
    d.left.pop(0)
    return count, bool(d.take("trans"))


@opcode("ldmatrix")
def load_matrices(d: Decoder) -> Execute:
    count, transposed = _matrix_form(d)
    puts = [d.put(item, "b32") for item in d.items(0)]
    address = d.address(1, False)

    def execute(w: Warps, m: Mask) -> None:
        rows = _rows(w, m, address(w), count)
        some = np.ones(len(w.ids), bool) if m is None else m.reshape(-1, LANES).any(axis=1)
        matrices = np.zeros((len(w.ids), count, 8, 8), np.uint16)
        flat = rows[some].reshape(-1)
        agents = np.repeat(w.agents[some], 8 * count)
        for block, which, offset in shared_blocks(w, flat, True):
            if (offset % 16).any():
                raise Fault("bounds", "ldmatrix needs addresses that are multiples of 16")
            matrices[some] = block.shared.load(offset, 2, 8, agents[which]).reshape(-1, count, 8, 8)
        if transposed:
            matrices = matrices.swapaxes(2, 3)
        words = np.ascontiguousarray(matrices).view(np.uint32)  # (warps, count, 8 rows, 4)
        for i, put in enumerate(puts):
            put(w, np.ascontiguousarray(words[:, i]).reshape(-1), m)

    return execute


@opcode("stmatrix")
def store_matrices(d: Decoder) -> Execute:
    count, transposed = _matrix_form(d)
    reads = [d.lanes(item, "b32") for item in d.items(1)]
    address = d.address(0, False)

    def execute(w: Warps, m: Mask) -> None:
        rows = _rows(w, m, address(w), count)
        some = np.ones(len(w.ids), bool) if m is None else m.reshape(-1, LANES).any(axis=1)
        words = np.stack([get(w).reshape(-1, LANES) for get in reads], 1)  # (warps, count, 32)
        matrices = np.ascontiguousarray(words).view(np.uint16).reshape(len(w.ids), count, 8, 8)
        if transposed:
            matrices = matrices.swapaxes(2, 3)
        values = np.ascontiguousarray(matrices[some]).reshape(-1, 8)
        agents = np.repeat(w.agents[some], 8 * count)
        for block, which, offset in shared_blocks(w, rows[some].reshape(-1), True):
            if (offset % 16).any():
                raise Fault("bounds", "stmatrix needs addresses that are multiples of 16")
            block.shared.store(offset, values[which], agents[which])

    return execute
