"""Instructions in which the threads of a warp exchange values: shfl, vote, match, redux, elect, activemask."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ptx_model.decode import Decoder, Execute, opcode
from ptx_model.faults import Fault
from ptx_model.formats import NUMPY
from ptx_model.machine import LANES, Mask, Missing, Warps

_LANE = np.arange(LANES)
_BITS = np.uint64(1) << np.arange(LANES, dtype=np.uint64)


def _by_warp(values: np.ndarray) -> np.ndarray:
    return values.reshape(-1, LANES)


def _see_members(w: Warps, m: Mask, members: np.ndarray, what: str) -> np.ndarray:
    """bool (warps, 32): who takes part. Fault("divergence"): a thread that is named does not execute it."""
    active: Any = _by_warp(w.active() if m is None else m)
    wanted = (_by_warp(members)[..., None].astype(np.uint64) & _BITS) != 0  # (warps, 32 threads, 32 named)
    for warp, some in enumerate(active.any(axis=1)):
        if not some:
            continue
        named = wanted[warp][active[warp]]
        alive = np.ones(LANES, bool) if w.alive is None else _by_warp(w.alive)[warp]
        if (named.any(axis=0) & alive & ~active[warp]).any():
            raise Fault("divergence", f"{what}: a thread that its mask names is elsewhere")
    return active


@opcode("shfl")
def shuffle(d: Decoder) -> Execute:
    d.drop("sync")
    mode = d.take("idx", "bfly", "up", "down")
    d.type()
    outputs = d.items(0)
    put = d.put(outputs[0], "b32")
    put_inside = d.put(outputs[1], "pred") if len(outputs) > 1 else None
    value, by, clamp, members = d.lanes(1, "u32"), d.lanes(2, "u32"), d.lanes(3, "u32"), d.lanes(4, "u32")

    def execute(w: Warps, m: Mask) -> None:
        active = _see_members(w, m, members(w), "shfl") if m is not None else None
        step = _by_warp(by(w)).astype(np.int64) & 31
        c = _by_warp(clamp(w)).astype(np.int64)
        segment, limit = c >> 8 & 31, c & 31
        lowest = _LANE & segment
        highest = lowest | limit & ~segment
        source = {
            "idx": lambda: lowest | step & ~segment,
            "bfly": lambda: _LANE ^ step,
            "up": lambda: _LANE - step,
            "down": lambda: _LANE + step,
        }[mode]()
        inside = source >= highest if mode == "up" else source <= highest
        source = np.where(inside, source, _LANE)
        taken = np.take_along_axis(_by_warp(value(w)), source, 1)
        if active is not None and not (np.take_along_axis(active, source, 1) | ~active).all():
            raise Fault("divergence", "shfl reads from a thread that does not execute it")
        put(w, taken.reshape(-1), m)
        if put_inside:
            put_inside(w, inside.reshape(-1), m)

    return execute


@opcode("vote")
def vote(d: Decoder) -> Execute:
    d.drop("sync")
    mode = d.take("ballot", "any", "all", "uni")
    type_ = d.type()
    put, value = d.put(0, type_), d.lanes(1, "pred")
    members = d.lanes(2, "u32")

    def execute(w: Warps, m: Mask) -> None:
        active = _see_members(w, m, members(w), "vote")
        said = _by_warp(np.broadcast_to(value(w), (w.count,))) & active
        if mode == "ballot":
            result = (said * _BITS).sum(axis=1).astype(np.uint32)
        elif mode == "any":
            result = said.any(axis=1)
        else:
            every = (said | ~active).all(axis=1)
            result = every if mode == "all" else every | ~said.any(axis=1)
        put(w, np.repeat(result, LANES), m)

    return execute


@opcode("match")
def match(d: Decoder) -> Execute:
    d.drop("sync")
    mode = d.take("any", "all")
    type_ = d.type()
    outputs = d.items(0)
    put, value, members = d.put(outputs[0], "b32"), d.lanes(1, type_), d.lanes(2, "u32")
    put_same = d.put(outputs[1], "pred") if len(outputs) > 1 else None

    def execute(w: Warps, m: Mask) -> None:
        active = _see_members(w, m, members(w), "match")
        values = _by_warp(value(w))
        same = (values[:, :, None] == values[:, None, :]) & active[:, None, :]
        found = (same * _BITS).sum(axis=2)
        if mode == "all":
            every = (same | ~active[:, None, :]).all(axis=2)
            found = np.where(every, found, 0)
            if put_same:
                put_same(w, every.reshape(-1), m)
        put(w, found.astype(np.uint32).reshape(-1), m)

    return execute


def _reduction(op: str, type_: str, nan: bool) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    function = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }[op]
    if type_ == "f32" and not nan:
        function = {"min": np.fmin, "max": np.fmax}[op]

    def reduce(values: np.ndarray, active: np.ndarray) -> np.ndarray:
        return np.array(
            [function.reduce(row[on]) if on.any() else 0 for row, on in zip(values, active, strict=True)], values.dtype
        )

    return reduce


@opcode("redux")
def reduce_warp(d: Decoder) -> Execute:
    d.drop("sync")
    type_ = d.type()
    op = d.take("add", "min", "max", "and", "or", "xor")
    absolute = d.take("abs")
    function = _reduction(op, type_, bool(d.take("NaN")))
    put, value, members = d.put(0, type_), d.lanes(1, type_), d.lanes(2, "u32")

    def execute(w: Warps, m: Mask) -> None:
        active = _see_members(w, m, members(w), "redux")
        values = _by_warp(np.abs(value(w)) if absolute else value(w))
        put(w, np.repeat(function(values, active), LANES).astype(NUMPY[type_]), m)

    return execute


@opcode("elect")
def elect(d: Decoder) -> Execute:
    d.drop("sync")
    outputs = d.items(0)
    put, put_chosen = d.put(outputs[0], "b32"), d.put(outputs[1], "pred")
    members = d.lanes(1, "u32")

    def execute(w: Warps, m: Mask) -> None:
        try:
            active = _see_members(w, m, members(w), "elect")
        except Fault as fault:
            raise Missing(fault) from None  # a compiler may lay out code so that threads meet here
        leader = active.argmax(axis=1)
        put(w, np.repeat(leader, LANES).astype(np.uint32), m)
        put_chosen(w, (leader[:, None] == _LANE).reshape(-1), m)

    return execute


@opcode("activemask")
def active_mask(d: Decoder) -> Execute:
    d.type()
    put = d.put(0, "b32")

    def execute(w: Warps, m: Mask) -> None:
        active = _by_warp(w.active() if m is None else m)
        put(w, np.repeat((active * _BITS).sum(axis=1).astype(np.uint32), LANES), m)

    return execute
