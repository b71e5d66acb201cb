"""How a warp's registers hold matrices, and the products of warps: mma.sync, ldmatrix, stmatrix."""

import re

import numpy as np

from problems.common.ptx_model import formats
from problems.common.ptx_model.decode import Decoder, Execute, opcode
from problems.common.ptx_model.faults import Fault
from problems.common.ptx_model.loads import shared_blocks
from problems.common.ptx_model.memory import SHARED_WINDOW
from problems.common.ptx_model.warps import LANES, Mask, Warps

HALVES = {"bf16": formats.from_bf16, "f16": lambda bits: bits.view(np.float16).astype(np.float32)}


def a_fragment(registers: np.ndarray, type_: str) -> np.ndarray:
    """uint32 (4, warps, 32) -> float64 (warps, 16 rows, 16 k), A of m16n8k16 and of wgmma."""
    warps = registers.shape[1]
    if type_ == "e4m3":
        values = formats.E4M3[np.ascontiguousarray(registers).view(np.uint8)]
        values = values.reshape(2, 2, warps, 8, 4, 4).transpose(2, 1, 3, 0, 4, 5)
        return values.reshape(warps, 16, 32).astype(np.float64)
    values = HALVES[type_](np.ascontiguousarray(registers).view(np.uint16))
    # (k half, row half, warps, row, thread of 4, pair)
    values = values.reshape(2, 2, warps, 8, 4, 2).transpose(2, 1, 3, 0, 4, 5)
    return values.reshape(warps, 16, 16).astype(np.float64)


def b_fragment(registers: np.ndarray, type_: str) -> np.ndarray:
    """uint32 (2, warps, 32) -> float64 (warps, 16 k, 8 columns), B of m16n8k16."""
    warps = registers.shape[1]
    values = HALVES[type_](np.ascontiguousarray(registers).view(np.uint16)).reshape(2, warps, 8, 4, 2)
    return values.transpose(1, 0, 3, 4, 2).reshape(warps, 16, 8).astype(np.float64)


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


@opcode("mma")
def warp_product(d: Decoder) -> Execute:
    d.drop("sync", "aligned")
    shape = d.left.pop(0)
    layouts = (d.take("row"), d.take("col"))
    types = tuple(d.left)
    d.left = []
    if shape != "m16n8k16" or layouts != ("row", "col") or types[1] != types[2] or types[1] not in HALVES:
        raise d.refuse(f"{shape} {' '.join(types)}")
    if types[0] != "f32" or types[3] != "f32":
        raise d.refuse(f"sums in {types[0]}")
    type_ = types[1]
    puts = [d.put(item, "f32") for item in d.items(0)]
    left, right = ([d.lanes(item, "b32") for item in d.items(i)] for i in (1, 2))
    before = [d.lanes(item, "f32") for item in d.items(3)]

    def execute(w: Warps, m: Mask) -> None:
        if m is not None:
            _whole_warps(w, "mma.sync")
        shape_ = (-1, len(w.ids), LANES)
        a = a_fragment(np.array([get(w) for get in left]).reshape(shape_), type_)
        b = b_fragment(np.array([get(w) for get in right]).reshape(shape_), type_)
        c = sums(np.array([get(w) for get in before]).reshape(shape_))
        result = to_registers((a @ b + c).astype(np.float32)).reshape(4, w.count)
        for put, value in zip(puts, result, strict=True):
            put(w, value, m)

    return execute


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
