"""Integer instructions that few kernels have: sums of differences, dot products of halves, fields, carries, spaces."""

from typing import Any

import numpy as np

from ptx_model.decode import Decoder, Execute, opcode, simple
from ptx_model.formats import NUMPY
from ptx_model.machine import Mask, Warps
from ptx_model.memory import LOCAL_WINDOW, PARAMETER_WINDOW, SHARED_WINDOW
from ptx_model.parse import SIZE

_UNSIGNED = {4: np.uint32, 8: np.uint64}


@opcode("sad")
def difference(d: Decoder) -> Execute:
    """|a - b| + c."""
    type_ = d.type()
    return simple(d, type_, lambda a, b, c: np.where(a > b, a - b, b - a) + c)


@opcode("slct")
def select_by_sign(d: Decoder) -> Execute:
    """a where c is not negative, else b."""
    d.drop("ftz")
    sign = d.type()
    type_ = d.type()
    yes, no, which, put = d.get(1, type_), d.get(2, type_), d.get(3, sign), d.put(0, type_)
    return lambda w, m: put(w, np.where(which(w) >= 0, yes(w), no(w)), m)


@opcode("dp2a")
def half_dot(d: Decoder) -> Execute:
    """Two 16-bit values of a by two bytes of b, the lower or the upper ones."""
    right_type = d.type()
    left_type = d.type()
    first = 0 if d.take("lo", "hi") == "lo" else 2
    halves, bytes_ = ({"s": np.int16, "u": np.uint16}[left_type[0]], {"s": np.int8, "u": np.uint8}[right_type[0]])
    total = "s32" if "s32" in (left_type, right_type) else "u32"
    a, b, c, put = d.lanes(1, "u32"), d.lanes(2, "u32"), d.get(3, total), d.put(0, total)

    def execute(w: Warps, m: Mask) -> None:
        left = np.ascontiguousarray(a(w)).view(halves).reshape(-1, 2).astype(np.int64)
        right = np.ascontiguousarray(b(w)).view(bytes_).reshape(-1, 4)[:, first : first + 2]
        put(w, (left * right).sum(axis=1).astype(NUMPY[total]) + c(w), m)

    return execute


@opcode("vabsdiff4")
def byte_differences(d: Decoder) -> Execute:
    """|a - b| of four bytes; with .add their sum is added to c."""
    adds = d.take("add")
    result, right_type, left_type = d.type(), d.type(), d.type()
    if d.take("sat") or result not in ("u32", "s32"):
        raise d.refuse("saturated differences")
    kinds = [np.int8 if t == "s32" else np.uint8 for t in (left_type, right_type)]
    a, b, c, put = d.lanes(1, "u32"), d.lanes(2, "u32"), d.lanes(3, "u32"), d.put(0, "u32")

    def execute(w: Warps, m: Mask) -> None:
        left, right = (
            np.ascontiguousarray(get(w)).view(kind).reshape(-1, 4).astype(np.int32)
            for get, kind in zip((a, b), kinds, strict=True)
        )
        apart = np.abs(left - right)
        if adds:
            put(w, (apart.sum(axis=1) + c(w).astype(np.int64)).astype(np.uint32), m)
        else:
            put(w, np.ascontiguousarray(apart.astype(np.uint8)).view(np.uint32)[:, 0], m)

    return execute


@opcode("bmsk")
def bit_mask(d: Decoder) -> Execute:
    """Ones from bit a on, b of them."""
    mode = d.take("clamp", "wrap")
    d.type()
    start, width, put = d.get(1, "u32"), d.get(2, "u32"), d.put(0, "u32")

    def execute(w: Warps, m: Mask) -> None:
        first, count = (np.asarray(get(w)).astype(np.int64) for get in (start, width))
        first, count = (first & 31, count & 31) if mode == "wrap" else (np.minimum(first, 32), np.minimum(count, 32))
        put(w, ((((1 << count) - 1) << first) & 0xFFFFFFFF).astype(np.uint32), m)

    return execute


@opcode("szext")
def extend(d: Decoder) -> Execute:
    """The low b bits of a, extended by their sign or by zeros."""
    mode, type_ = d.take("clamp", "wrap"), d.type()
    value, width, put = d.get(1, "u32"), d.get(2, "u32"), d.put(0, type_)

    def execute(w: Warps, m: Mask) -> None:
        count = np.asarray(width(w)).astype(np.int64)
        count = count & 31 if mode == "wrap" else np.minimum(count, 32)
        low = np.asarray(value(w)).astype(np.int64) & ((1 << count) - 1)
        negative = (count > 0) & (low >> np.maximum(count - 1, 0) & 1 == 1) & (type_ == "s32")
        put(w, (np.where(negative, low - (1 << count), low) & 0xFFFFFFFF).astype(np.uint32).view(NUMPY[type_]), m)

    return execute


@opcode("fns")
def nth_set_bit(d: Decoder) -> Execute:
    """The place of the n-th set bit, from `base` on upwards, or downwards for a negative n; all ones: none."""
    d.type()
    value, base, offset, put = d.lanes(1, "u32"), d.lanes(2, "u32"), d.lanes(3, "s32"), d.put(0, "u32")

    def find(mask: int, start: int, n: int) -> int:
        if not n:
            return start if mask >> start & 1 else 0xFFFFFFFF
        places = range(start, 32) if n > 0 else range(start, -1, -1)
        found = [i for i in places if mask >> i & 1]
        return found[abs(n) - 1] if len(found) >= abs(n) else 0xFFFFFFFF

    def execute(w: Warps, m: Mask) -> None:
        each = zip(value(w), base(w), offset(w), strict=True)
        put(w, np.array([find(int(v), int(b) & 31, int(n)) for v, b, n in each], np.uint32), m)

    return execute


@opcode("isspacep")
def in_space(d: Decoder) -> Execute:
    space = d.take("global", "shared", "shared::cta", "shared::cluster", "local", "const", "param", "param::entry")
    if space in ("", "const"):
        raise d.refuse("constant memory, which is global memory here")
    read, put = d.get(1, "u64"), d.put(0, "pred")
    low, high = {
        "g": (0, SHARED_WINDOW),
        "s": (SHARED_WINDOW, PARAMETER_WINDOW),
        "p": (PARAMETER_WINDOW, LOCAL_WINDOW),
        "l": (LOCAL_WINDOW, 1 << 63),
    }[space[0]]

    def execute(w: Warps, m: Mask) -> None:
        at = np.asarray(read(w))
        inside = (at >= np.uint64(low)) & (at < np.uint64(high))
        if space in ("shared", "shared::cta"):
            inside &= (at.astype(np.int64) - SHARED_WINDOW) >> 24 == w.block.rank
        put(w, inside, m)

    return execute


# ---- carries


def _carry(w: Warps) -> Any:
    return w.specials.get("carry", np.zeros(w.count, np.uint64))


@opcode("addc", "subc", "madc")
def with_carry(d: Decoder) -> Execute:
    return carried(d, d.instruction.op[:-1], True)


def carried(d: Decoder, op: str, carry_in: bool) -> Execute:
    """add, sub and mad of 32 or 64 bits that read a carry, or with .cc leave one (of `sub` a borrow)."""
    type_ = d.type()
    out = bool(d.take("cc"))
    high = d.take("lo", "hi") == "hi"
    size = SIZE[type_]
    if high and type_[0] == "s":
        raise d.refuse("a carry of signed high products")
    unsigned, bits = f"u{8 * size}", 8 * size
    reads = [d.lanes(i, unsigned) for i in range(1, len(d.operands))]
    put = d.put(0, unsigned)

    def execute(w: Warps, m: Mask) -> None:
        values = [get(w).astype(object) for get in reads]
        carry = _carry(w).astype(object) if carry_in else 0
        if op == "mad":
            product = values[0] * values[1]
            total = (product >> bits if high else product & 2**bits - 1) + values[2] + carry
        else:
            total = values[0] + values[1] + carry if op == "add" else values[0] - values[1] - carry
        if out:
            left = np.array([int(t < 0 or t >> bits > 0) for t in total], np.uint64)
            before = _carry(w)
            w.specials["carry"] = left if m is None else np.where(m, left, before)
        put(w, np.array([t & 2**bits - 1 for t in total], _UNSIGNED[size]), m)

    return execute
