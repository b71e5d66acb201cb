"""wgmma: products of a warpgroup, asynchronous; sums stay in registers, each warp has 16 of the 64 rows."""

import re

import numpy as np

from ptx_model import descriptors
from ptx_model.copies import groups_of, wait_groups
from ptx_model.decode import Decoder, Execute, opcode
from ptx_model.faults import Fault
from ptx_model.fragments import ELEMENTS, HALVES, Sums, a_fragment, numbers
from ptx_model.machine import LANES, Mask, Warps
from ptx_model.parse import Immediate, Vector
from ptx_model.races import Past

_GROUP = 4  # warps of a warpgroup
_BYTES = 32  # along k of one instruction, in every type


@opcode("wgmma")
def warpgroup(d: Decoder) -> Execute:
    what = d.left.pop(0)
    d.drop("sync", "aligned")
    if what == "fence":
        return lambda w, m: None
    if what == "commit_group":

        def commit(w: Warps, m: Mask) -> None:
            for warp in w.ids[w.whole("wgmma.commit_group")]:
                groups_of(w, "wgmma", warp).commit()

        return commit
    if what == "wait_group":
        left = int(d.operands[0].value)

        def wait(w: Warps, m: Mask) -> None:
            wait_groups(w, "wgmma", left, w.ids[w.whole("wgmma.wait_group")])
            w.pending = [work for work in w.pending if not work.done]

        return wait
    if what != "mma_async":
        raise d.refuse(what)
    return _product(d)


def _product(d: Decoder) -> Execute:
    shape = re.fullmatch(r"m64n(\d+)k(\d+)", d.left.pop(0))
    types, d.left = d.left, []
    if shape is None or len(types) != 3 or not {types[1], types[2]} <= {*ELEMENTS}:
        raise d.refuse(" ".join(types))
    columns, a_type, b_type = int(shape[1]), *types[1:]
    size = ELEMENTS[a_type][0]().itemsize
    whole = a_type in ("s8", "u8")
    if int(shape[2]) * size != _BYTES or size != ELEMENTS[b_type][0]().itemsize or (size > 1 and a_type != b_type):
        raise d.refuse(f"{shape[0]} {' '.join(types)}")
    if whole != (b_type in ("s8", "u8")) or types[0] not in (("s32",) if whole else ("f32", "f16")):
        raise d.refuse(" ".join(types))
    accumulated = Sums(d, d.items(0), types[0])
    if accumulated.count != columns // 2:
        raise d.refuse(f"{accumulated.count} sums for {columns} columns")
    from_registers = isinstance(d.operands[1], Vector)
    left = [d.lanes(item, "b32") for item in d.items(1)] if from_registers else [d.lanes(1, "b64")]
    right = d.lanes(2, "b64")
    further = d.operands[3:]
    adds = d.lanes(further[0], "pred")
    settings = [int(o.value) for o in further[1:] if isinstance(o, Immediate)]
    signs, transposed = ([1, 1], settings) if whole else (settings[:2], settings[2:])
    majors = 0 if a_type not in HALVES else 1 if from_registers else 2
    if len(settings) != len(further) - 1 or len(transposed) != majors or not {*signs} <= {1, -1}:
        raise d.refuse("its constants")
    sign = signs[0] * signs[1]
    a_k_major, b_k_major = from_registers or not any(transposed[:1]), not any(transposed[-1:])

    def execute(w: Warps, m: Mask) -> None:
        some = w.whole("wgmma")
        if not some.all() and w.mask is None:
            raise Fault("divergence", "wgmma by a part of a group")
        block, clocks = w.block, w.block.cluster.clocks
        pasts: dict[int, Past] = {}
        for number in np.unique(w.ids[some] // _GROUP):
            agent = block.agent(("wgmma", int(number)), f"wgmma of warpgroup {number}")
            pasts[int(number)] = clocks.start(agent, w.agents[some & (w.ids // _GROUP == number)])
        b_names = _uniform(right(w), some)
        a_names = None if from_registers else _uniform(left[0](w), some)
        adding = np.broadcast_to(adds(w), (w.count,)).reshape(-1, LANES)[:, 0].copy()
        mask = None if some.all() else np.repeat(some, LANES)

        def run() -> None:
            total = np.zeros((len(w.ids), 16, columns))
            for warp, b_name in enumerate(b_names):
                first = next(i for i, name in enumerate(b_names) if name == b_name and _same(w, i, warp))
                if not some[warp] or first != warp:
                    continue
                past = pasts[int(w.ids[warp]) // _GROUP]
                b = sign * _operand(block, b_name, columns, b_k_major, b_type, past)
                those = [i for i, name in enumerate(b_names) if some[i] and name == b_name and _same(w, i, warp)]
                if from_registers:
                    packed = np.array([get(w) for get in left]).reshape(4, -1, LANES)
                    total[those] = a_fragment(packed, a_type)[those] @ b.T
                else:
                    _from_shared(w, those, a_names, a_k_major, a_type, block, past, b, total)
            accumulated.put(w, total + np.where(adding[:, None, None], accumulated.get(w), 0.0), mask)

        work = w.issue("wgmma", ("wgmma", id(w)), run)
        if not work.done:
            w.pending.append(work)
        for warp in w.ids[some]:
            groups_of(w, "wgmma", warp).open.append((work, pasts[int(warp) // _GROUP]))

    return execute


def _same(w: Warps, one: int, other: int) -> bool:
    """Whether two warps are of one warpgroup."""
    return w.ids[one] // _GROUP == w.ids[other] // _GROUP


def _uniform(values: np.ndarray, some: np.ndarray) -> list[int]:
    """A descriptor for each warp. Fault("descriptor"): the threads of a warp disagree."""
    rows = values.reshape(-1, LANES)
    if (rows[some] != rows[some][:, :1]).any():
        raise Fault("descriptor", "the threads of a warp give wgmma different descriptors")
    return [int(v) for v in rows[:, 0]]


def _operand(block, descriptor: int, rows: int, k_major: bool, type_: str, past: Past) -> np.ndarray:
    """float64 (rows, k)."""
    size = ELEMENTS[type_][0]().itemsize
    index = descriptors.wgmma(descriptor).index(rows, _BYTES // size, size, k_major)
    return numbers(block.shared.read_bytes(index, past, False), type_)


def _from_shared(w, those, names, k_major, type_, block, past, b, total) -> None:
    for name in {names[i] for i in those}:
        a = _operand(block, name, 64, k_major, type_, past)
        for i in those:
            if names[i] == name:
                first = 16 * (int(w.ids[i]) % _GROUP)
                total[i] = a[first : first + 16] @ b.T
