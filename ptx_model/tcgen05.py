"""tcgen05: allocation, copies, products, commits, and the loads and stores of tensor memory.

What is asynchronous is one line of work for each block that issues it, done in the order of issue.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptx_model import descriptors, formats
from ptx_model.barrier import find, used_by
from ptx_model.decode import Decoder, Execute, opcode
from ptx_model.faults import Fault
from ptx_model.machine import LANES, Mask, Warps
from ptx_model.memory import RANK_SHIFT, SHARED_WINDOW
from ptx_model.parse import Address, Immediate, Predicate, Register, Vector
from ptx_model.races import Past
from ptx_model.tensor_map import swizzled

_QUARTER = 32


def _pair(d: Decoder) -> bool:
    group = d.take("cta_group::1", "cta_group::2")
    if not group:
        raise d.refuse("no cta_group")
    return group == "cta_group::2"


@opcode("tcgen05")
def tensor_core(d: Decoder) -> Execute:
    what = d.left.pop(0)
    decoders = {
        "alloc": _alloc,
        "dealloc": _dealloc,
        "relinquish_alloc_permit": _relinquish,
        "cp": _copy,
        "commit": _commit,
        "mma": _mma,
        "ld": _load,
        "st": _store,
    }
    if what in ("fence::before_thread_sync", "fence::after_thread_sync"):
        return lambda w, m: None
    if what in ("wait::ld", "wait::st"):
        d.drop("sync", "aligned")
        return lambda w, m: None
    if what not in decoders:
        raise d.refuse(what)
    return decoders[what](d)


# ---- allocation


def _whole(w: Warps, m: Mask, what: str) -> np.ndarray:
    """The numbers, in `w`, of the warps that execute; each must do so with all of its threads."""
    active = (w.active() if m is None else m).reshape(-1, LANES)
    alive = np.ones_like(active) if w.alive is None else w.alive.reshape(-1, LANES)
    some = active.any(axis=1)
    if (active[some] != alive[some]).any():
        raise Fault("divergence", f"{what}: not all threads of a warp execute it together")
    return np.flatnonzero(some)


def _alloc(d: Decoder) -> Execute:
    _pair(d)
    d.drop("sync", "aligned", "shared::cta", "b32")
    to, columns = d.address(0, False), d.lanes(1, "u32")

    def execute(w: Warps, m: Mask) -> None:
        for warp in _whole(w, m, "tcgen05.alloc"):
            lane = warp * LANES
            first = w.block.tensor.allocate(int(columns(w)[lane]))
            at = int(to(w)[lane])
            at = at - SHARED_WINDOW if at >= SHARED_WINDOW else at
            offset = np.array([at & (1 << RANK_SHIFT) - 1])
            w.block.shared.store(offset, np.array([[first]], np.uint32), w.agents[warp : warp + 1])

    return execute


def _dealloc(d: Decoder) -> Execute:
    _pair(d)
    d.drop("sync", "aligned", "b32")
    address, columns = d.lanes(0, "u32"), d.lanes(1, "u32")

    def execute(w: Warps, m: Mask) -> None:
        for warp in _whole(w, m, "tcgen05.dealloc"):
            lane = warp * LANES
            w.block.tensor.free(int(address(w)[lane]) & 0xFFFF, int(columns(w)[lane]))

    return execute


def _relinquish(d: Decoder) -> Execute:
    _pair(d)
    d.drop("sync", "aligned")

    def execute(w: Warps, m: Mask) -> None:
        _whole(w, m, "tcgen05.relinquish_alloc_permit")
        w.block.tensor.relinquish()

    return execute


# ---- asynchronous work


def _start(w: Warps, lane: int) -> Past:
    agent = w.block.agent("tcgen05", "the tensor core")
    return w.block.cluster.clocks.start(agent, w.lane_agents[lane : lane + 1])


def _issue(w: Warps, run: Callable[[], None]) -> None:
    w.issue("tcgen05", ("tcgen05", id(w.block)), run)


def _peers(w: Warps, pair: bool) -> list:
    """The blocks that take part: this one, or both of the pair, the even one first."""
    if not pair:
        return [w.block]
    blocks, first = w.block.cluster.blocks, w.block.rank & ~1
    if len(blocks) < 2:
        raise Fault("divergence", "cta_group::2 in a cluster of one block")
    return [blocks[first], blocks[first + 1]]


def _commit(d: Decoder) -> Execute:
    _pair(d)
    d.drop("mbarrier::arrive::one", "shared::cluster", "b64")
    multicast = d.take("multicast::cluster")
    address = d.address(0, False)
    mask = d.lanes(1, "u16") if multicast else None

    def execute(w: Warps, m: Mask) -> None:
        for lane in w.lanes(m):
            at, past = int(address(w)[lane]), _start(w, lane)
            at = at - SHARED_WINDOW if at >= SHARED_WINDOW else at
            ranks = [at >> RANK_SHIFT]
            if mask is not None:
                bits = int(mask(w)[lane])
                ranks = [r for r in range(16) if bits >> r & 1]
            places = [r << RANK_SHIFT | at & (1 << RANK_SHIFT) - 1 for r in ranks]
            for place in places:
                used_by(w, find(w.block, place), w.lane_agents[lane : lane + 1])

            def run(places=places, past=past) -> None:
                for place in places:
                    find(w.block, place).arrive(1, w.block.cluster.clocks.finish(past))

            _issue(w, run)

    return execute


def _copy(d: Decoder) -> Execute:
    """tcgen05.cp: from shared to tensor memory, in core matrices of 8 rows of 16 bytes."""
    pair = _pair(d)
    if not d.take("32x128b") or not d.take("warpx4"):
        raise d.refuse("a shape other than 32x128b.warpx4")  # of which no kernel has shown where the rows go
    rows, bits = 32, 128
    to, source = d.address(0, False), d.lanes(1, "b64")

    def execute(w: Warps, m: Mask) -> None:
        for lane in w.lanes(m):
            target, name, past = int(to(w)[lane]), int(source(w)[lane]), _start(w, lane)
            blocks = _peers(w, pair)

            def run(target=target, name=name, past=past, blocks=blocks) -> None:
                matrix = descriptors.tcgen05(name)
                row, at = np.arange(rows)[:, None], np.arange(bits // 8)[None, :]
                pitch = matrix.swizzle or 16
                offset = row // 8 * matrix.stride + row % 8 * pitch
                offset = offset + (at if matrix.swizzle else at // 16 * matrix.leading + at % 16)
                index = swizzled(matrix.start + offset, matrix.swizzle)
                columns = (target & 0xFFFF) + np.arange(bits // 32)
                if target >> 16:
                    raise Fault("tensor memory", f"tcgen05.cp to lane {target >> 16}")
                for block in blocks:
                    words = np.ascontiguousarray(block.shared.read_bytes(index, past, True)).view(np.uint32)
                    block.tensor.write(np.arange(128), columns, np.tile(words, (4, 1)), past)

            _issue(w, run)

    return execute


# ---- products


@dataclass(frozen=True)
class Form:
    """What an instruction descriptor says. rows, columns: of the product; k: elements; size: of a code, in bits."""

    rows: int
    columns: int
    a_k_major: bool
    b_k_major: bool
    a_type: str
    b_type: str
    scale_type: str = ""
    a_scales: int = 0
    b_scales: int = 0


_HALF_TYPES = {0: "f16", 1: "bf16"}
_BYTE_TYPES = {0: "e4m3", 1: "e5m2"}


def _form(word: int, kind: str, pair: bool) -> Form:
    """Read an instruction descriptor. Fault("descriptor"): a field out of range."""
    columns, rows = (word >> 17 & 63) * 8, (word >> 24 & 31) * 16
    if word >> 13 & 3 or word >> 2 & 1:
        raise Fault("not modelled", f"negated or sparse operands of {word:#x}")
    wanted = (128, 256) if pair else (64, 128)
    if rows not in wanted or not columns or columns > 256 or columns % (16 if rows >= 128 else 8):
        raise Fault("descriptor", f"a product of {rows} x {columns} of the instruction descriptor {word:#x}")
    a, b = word >> 7 & 7, word >> 10 & 7
    majors = (not word >> 15 & 1, not word >> 16 & 1)
    if kind == "mxf4nvf4":
        if (a, b) != (1, 1) or majors != (True, True):
            raise Fault("descriptor", f"formats {a} and {b}, majors {majors} of {word:#x}: mxf4nvf4 takes K-major e2m1")
        scale = "ue8m0" if word >> 23 & 1 else "e4m3"
        return Form(rows, columns, True, True, "e2m1", "e2m1", scale, word >> 29 & 3, word >> 4 & 3)
    types = _HALF_TYPES if kind == "f16" else _BYTE_TYPES
    if a not in types or b not in types:
        raise Fault("descriptor", f"formats {a} and {b} of {word:#x} for kind::{kind}")
    if word >> 4 & 3 != 1:
        raise Fault("not modelled", f"sums in anything but fp32: {word:#x}")
    return Form(rows, columns, *majors, types[a], types[b])


def _values(raw: np.ndarray, type_: str) -> np.ndarray:
    """uint8 (rows, bytes) -> float64 (rows, elements)."""
    raw = np.ascontiguousarray(raw)
    if type_ == "e2m1":
        codes = np.stack([raw & 15, raw >> 4], -1).reshape(len(raw), -1)
        return formats.E2M1[codes].astype(np.float64)
    if type_ == "f16":
        return raw.view(np.float16).astype(np.float64)
    if type_ == "bf16":
        return formats.from_bf16(raw.view(np.uint16)).astype(np.float64)
    return {"e4m3": formats.E4M3, "e5m2": formats.E5M2}[type_][raw].astype(np.float64)


_BYTES = 32  # along k of one instruction, in every kind


def _smem_operand(block, name: int, rows: int, k_major: bool, type_: str, past: Past) -> np.ndarray:
    """float64 (rows, k). What was never written is NaN."""
    matrix = descriptors.tcgen05(name)
    if type_ == "e2m1":
        index = matrix.index(rows, _BYTES, 1, True)
    else:
        size = 2 if type_ in ("f16", "bf16") else 1
        index = matrix.index(rows, _BYTES // size, size, k_major)
    raw = block.shared.read_bytes(index, past, False)
    values = _values(raw, type_)
    unwritten = block.shared.written[index] == 0
    if unwritten.any():
        values[np.repeat(unwritten, values.shape[1] // _BYTES, 1) if type_ == "e2m1" else _cells(unwritten, values)] = (
            np.nan
        )
    return values


def _cells(unwritten: np.ndarray, values: np.ndarray) -> Any:
    return unwritten.reshape(*values.shape, -1).any(axis=-1)


def _scales(block, address: int, rows: int, blocks: int, form: Form, which: int, past: Past) -> np.ndarray:
    """float64 (rows, blocks): row r has its bytes in lane r % 32 of column r // 32, the same in every quarter."""
    column = address & 0xFFFF
    if address >> 16:
        raise Fault("tensor memory", f"scales at lane {address >> 16}")
    row = np.arange(rows)
    columns = column + np.arange(-(-rows // 32))
    words = block.tensor.read(np.arange(128), columns, past, "the tensor core")
    if (words.reshape(4, 32, -1) != words[:32]).any():
        raise Fault("tensor memory", f"the scales at column {column} differ between the quarters of tensor memory")
    chosen = np.ascontiguousarray(words[row % 32, row // 32]).view(np.uint8).reshape(rows, 4)
    if which + blocks > 4 or (blocks == 4 and which):
        raise Fault("descriptor", f"scale id {which} with {blocks} scales a row")
    chosen = chosen[:, which : which + blocks]
    return (formats.E4M3[chosen] if form.scale_type == "e4m3" else formats.UE8M0[chosen]).astype(np.float64)


def _lanes(rows: int, first: int) -> Any:
    """The lanes of tensor memory that hold the rows of a product."""
    row = np.arange(rows)
    if rows == 64:
        return first + row // 16 * _QUARTER + row % 16
    if first:
        raise Fault("tensor memory", f"a product of {rows} rows at lane {first}")
    return row


def _mma(d: Decoder) -> Execute:
    pair = _pair(d)
    kind = next((m for m in d.left if m.startswith("kind::")), "")
    d.drop(kind, "collector::a::discard", "collector::a::lastuse", "collector::a::fill", "collector::a::use")
    kind = kind[6:]
    scaled = bool(d.take("block_scale"))
    vector = d.take("scale_vec::4X", "block16")
    if kind not in ("f16", "f8f6f4", "mxf4nvf4") or scaled != (kind == "mxf4nvf4"):
        raise d.refuse(kind)
    if scaled and not vector:
        raise d.refuse("scales of 32 values")
    blocks = 4
    operands = d.operands
    from_tensor = isinstance(operands[1], Address)
    to = d.address(0, False)
    a = d.address(1, False) if from_tensor else d.lanes(1, "b64")
    b, word = d.lanes(2, "b64"), d.lanes(3, "u32")
    rest = list(operands[4:])
    scales = [d.address(rest.pop(0), False) for _ in range(2)] if scaled else []
    if rest and isinstance(rest[0], Vector):
        disabled = [d.lanes(item, "u32") for item in rest.pop(0).items]
    else:
        disabled = []
    if len(rest) != 1 or not isinstance(rest[0], (Predicate, Immediate, Register)):
        raise d.refuse("its operands")
    adds = d.lanes(rest[0], "pred")

    def execute(w: Warps, m: Mask) -> None:
        lanes = w.lanes(m)
        if len(lanes) != 1:
            raise Fault("divergence", f"tcgen05.mma issued by {len(lanes)} threads, which makes as many products")
        lane = lanes[0]
        if any(int(get(w)[lane]) for get in disabled):
            raise Fault("not modelled", "disabled output lanes")
        past = _start(w, lane)
        form = _form(int(word(w)[lane]), kind, pair)
        members = _peers(w, pair)
        if pair and w.block is not members[0]:
            raise Fault("divergence", "tcgen05.mma.cta_group::2 issued by the odd block of the pair")
        at = [int(get(w)[lane]) for get in (to, a, b, *scales)]
        adding = bool(adds(w)[lane])
        _issue(w, lambda: _product(form, members, at, adding, from_tensor, blocks if scaled else 0, past))

    return execute


def _product(
    form: Form, members: list, at: list[int], adding: bool, from_tensor: bool, blocks: int, past: Past
) -> None:
    """D (+)= A B^T. Of a pair each block has half of the rows, and gives half of the columns of B."""
    to, a_at, b_at = at[:3]
    rows = form.rows // len(members)
    if rows == 64 and len(members) == 2:
        raise Fault("not modelled", "a pair's product of 128 rows")
    columns = form.columns // len(members)
    right = np.concatenate([_smem_operand(m, b_at, columns, form.b_k_major, form.b_type, past) for m in members])
    for member in members:
        lanes = _lanes(rows, to >> 16)
        if from_tensor:
            if form.a_type not in ("f16", "bf16"):
                raise Fault("not modelled", f"{form.a_type} from tensor memory")
            words = member.tensor.read(
                _lanes(rows, a_at >> 16), (a_at & 0xFFFF) + np.arange(_BYTES // 4), past, "the tensor core"
            )
            left = _values(np.ascontiguousarray(words).view(np.uint8), form.a_type)
        else:
            left = _smem_operand(member, a_at, rows, form.a_k_major, form.a_type, past)
        second = right
        if blocks:
            each = left.shape[1] // blocks
            left = left * np.repeat(_scales(member, at[3], rows, blocks, form, form.a_scales, past), each, 1)
            second = right * np.repeat(_scales(member, at[4], form.columns, blocks, form, form.b_scales, past), each, 1)
        place = (to & 0xFFFF) + np.arange(form.columns)
        total = left @ second.T
        if adding:
            total = total + member.tensor.read(lanes, place, past, "the tensor core").view(np.float32)
        member.tensor.write(lanes, place, total.astype(np.float32).view(np.uint32), past)


# ---- loads and stores


def _access(d: Decoder, registers: tuple) -> Callable[[int, int, int], list[tuple[np.ndarray, np.ndarray]]]:
    """Return a function (first lane, first column, quarter) -> for each register the lane and column of each thread."""
    d.drop("sync", "aligned", "b32")
    shape = d.take("32x32b", "16x128b", "16x256b")
    times = next((int(mod[1:]) for mod in d.left if re.fullmatch(r"x\d+", mod)), 0)
    d.left = [mod for mod in d.left if not re.fullmatch(r"x\d+", mod)]
    each = {"32x32b": 1, "16x128b": 2, "16x256b": 4}.get(shape)
    if not each or not times or len(registers) != each * times:
        raise d.refuse(f"{' '.join(d.left)} with {len(registers)} registers")
    thread = np.arange(LANES)

    def places(lane: int, column: int, quarter: int) -> list[tuple[np.ndarray, np.ndarray]]:
        first = _QUARTER * quarter
        if shape == "32x32b":
            if lane != first:
                raise Fault("tensor memory", f"a warp that may touch lanes {first} to {first + 31} names lane {lane}")
            return [(lane + thread, np.full(LANES, column + i)) for i in range(times)]
        if lane not in (first, first + 16):
            raise Fault("tensor memory", f"a warp that may touch lanes {first} to {first + 31} names lane {lane}")
        if shape == "16x128b":
            return [(lane + thread // 4 + 8 * (i % 2), column + 4 * (i // 2) + thread % 4) for i in range(2 * times)]
        return [
            (lane + thread // 4 + 8 * (i // 2 % 2), column + 8 * (i // 4) + thread % 4 * 2 + i % 2)
            for i in range(4 * times)
        ]

    return places


def _load(d: Decoder) -> Execute:
    items = d.items(0)
    places = _access(d, items)
    puts, address = [d.put(item, "b32") for item in items], d.address(1, False)

    def execute(w: Warps, m: Mask) -> None:
        words = np.zeros((len(puts), w.count), np.uint32)
        for warp in _whole(w, m, "tcgen05.ld"):
            lanes, columns, grid = _window(w, warp, int(address(w)[warp * LANES]), places)
            there = w.block.tensor.read(lanes, columns, int(w.agents[warp]), "tcgen05.ld")
            for i, (lane, column) in enumerate(grid):
                words[i, warp * LANES : (warp + 1) * LANES] = there[lane - lanes[0], column - columns[0]]
        for put, value in zip(puts, words, strict=True):
            put(w, value, m)

    return execute


def _window(w: Warps, warp: int, at: int, places) -> tuple[np.ndarray, np.ndarray, list]:
    grid = places(at >> 16, at & 0xFFFF, int(w.ids[warp]) % 4)
    low, high = min(lane.min() for lane, _ in grid), max(lane.max() for lane, _ in grid)
    first, last = min(c.min() for _, c in grid), max(c.max() for _, c in grid)
    return np.arange(low, high + 1), np.arange(first, last + 1), grid


def _store(d: Decoder) -> Execute:
    items = d.items(1)
    places = _access(d, items)
    reads, address = [d.lanes(item, "b32") for item in items], d.address(0, False)

    def execute(w: Warps, m: Mask) -> None:
        for warp in _whole(w, m, "tcgen05.st"):
            lanes, columns, grid = _window(w, warp, int(address(w)[warp * LANES]), places)
            words = np.zeros((len(lanes), len(columns)), np.uint32)
            for get, (lane, column) in zip(reads, grid, strict=True):
                words[lane - lanes[0], column - columns[0]] = get(w)[warp * LANES : (warp + 1) * LANES]
            w.block.tensor.write(lanes, columns, words, int(w.agents[warp]))

    return execute
