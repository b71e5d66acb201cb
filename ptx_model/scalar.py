"""Integer and float arithmetic, logic, comparisons, selections and moves: one thread's registers only."""

import ctypes
import ctypes.util
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from ptx_model import formats
from ptx_model.decode import Decoder, Execute, opcode, simple
from ptx_model.faults import Fault
from ptx_model.formats import NUMPY
from ptx_model.integers import carried
from ptx_model.machine import Mask, Warps
from ptx_model.parse import SIZE, Immediate, Predicate, Vector

_WIDER = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}
_PAIRS = {"f16x2": 1, "bf16x2": 1}


def _halves(function: Callable, type_: str) -> Callable:
    """Apply a function of float64 arrays to both halves of packed pairs, rounding each once."""
    if type_.startswith("bf16"):
        wide, narrow = formats.from_bf16, formats.to_bf16
    else:
        wide, narrow = lambda b: b.view(np.float16), formats.to_f16

    def apply(*packed: Any) -> np.ndarray:
        parts = [wide(np.atleast_1d(np.asarray(p)).view(np.uint16)).astype(np.float64) for p in packed]
        size = max(len(p) for p in parts)
        parts = [p if len(p) == size else np.tile(p, size // len(p)) for p in parts]
        bits = np.ascontiguousarray(narrow(function(*parts)))
        return bits.view(np.uint32) if type_ in _PAIRS else bits

    return apply


def _float(d: Decoder, type_: str, function: Callable) -> Callable:
    """`function` of one float type, with what .ftz and .sat ask for."""
    if type_ in ("f16", "bf16", "f16x2", "bf16x2"):
        return _halves(function, type_)
    ftz, sat = d.take("ftz"), d.take("sat")
    if not ftz and not sat:
        return function

    def with_modifiers(*values: Any) -> Any:
        if ftz:
            values = tuple(formats.flushed(v) for v in values)
        result = function(*values)
        if ftz:
            result = formats.flushed(result)
        return np.fmin(np.fmax(result, np.float32(0)), np.float32(1)) if sat else result

    return with_modifiers


def _is_float(type_: str) -> bool:
    return type_.startswith(("f", "bf"))


def _packed_f32(d: Decoder, function: Callable) -> Callable:
    function = _float(d, "f32", function)

    def apply(*packed: Any) -> np.ndarray:
        parts = [np.atleast_1d(np.asarray(p)).view(np.float32) for p in packed]
        size = max(len(p) for p in parts)
        parts = [p if len(p) == size else np.tile(p, size // len(p)) for p in parts]
        return np.ascontiguousarray(function(*parts)).view(np.uint64)

    return apply


def _rounded(op: str, type_: str, mode: str) -> Callable | None:
    """An arithmetic function with a rounding that numpy does not have; None: numpy's is right."""
    if mode == "rn":
        # numpy rounds to fp32 and fp64; sums of halves are exact in fp64 but for their last bit.
        return (
            None
            if type_[:2] in ("f3", "f6") or op == "mul"
            else {
                "add": formats.sum_to_odd,
                "sub": lambda a, b: formats.sum_to_odd(a, -b),
            }[op]
        )
    if type_ == "f64":
        return _double(op, mode)
    if type_ not in ("f32", "f32x2"):
        raise Fault("not modelled", f"{op}.{mode} of {type_}")
    return {
        "add": lambda a, b: formats.added(a, b, mode),
        "sub": lambda a, b: formats.added(a, -b, mode),
        "mul": lambda a, b: formats.to_f32(np.multiply(a, b, dtype=np.float64), mode),
    }[op]


def _double(op: str, mode: str) -> Callable:
    """fp64 with a directed rounding, by exact fractions."""
    towards = {"rz": lambda x: -math.inf if x > 0 else math.inf, "rm": lambda x: -math.inf, "rp": lambda x: math.inf}

    def one(a: float, b: float, c: float) -> float:
        near = _FMA(a, b, c)
        if not math.isfinite(near):
            return near
        error = Fraction(near) - (Fraction(a) * Fraction(b) + Fraction(c))
        way = towards[mode](near)
        return math.nextafter(near, way) if error and (error > 0) == (way < 0) else near

    every = np.vectorize(one, otypes=[np.float64])
    return {
        "add": lambda a, b: every(a, 1.0, b),
        "sub": lambda a, b: every(a, 1.0, -np.asarray(b)),
        "mul": lambda a, b: every(a, b, 0.0),
        "fma": every,
    }[op]


@opcode("add", "sub", "min", "max", "mul")
def arithmetic(d: Decoder) -> Execute:
    if "cc" in d.left:
        return carried(d, d.instruction.op, False)
    type_, op = d.type(), d.instruction.op
    if _is_float(type_):
        function = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.fmin, "max": np.fmax}[op]
        if op in ("add", "sub", "mul"):
            function = _rounded(op, type_, d.take("rn", "rz", "rm", "rp") or "rn") or function
        if type_ == "f32x2":
            return simple(d, "b64", _packed_f32(d, function))
        if d.take("NaN"):
            function = {"min": np.minimum, "max": np.maximum}[op]
        if op in ("min", "max") and d.take("xorsign"):
            d.take("abs")
            function = _of_magnitudes(function)
        if len(d.operands) == 4 and op in ("min", "max"):
            two = function
            function = lambda a, b, c: two(two(a, b), c)  # noqa: E731
        return simple(d, type_, _float(d, type_, function))
    if op == "mul":
        return _product(d, type_)
    function = {"add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum}[op]
    if d.take("sat"):
        raise d.refuse("saturating integers")
    return simple(d, type_, function)


def _of_magnitudes(function: Callable) -> Callable:
    """`function` of both magnitudes, with the product of the signs."""

    def apply(a: Any, b: Any) -> np.ndarray:
        return np.copysign(function(np.abs(a), np.abs(b)), np.where(np.signbit(a) ^ np.signbit(b), -1.0, 1.0))

    return apply


def _high(type_: str) -> Callable:
    if SIZE[type_] == 4:
        wide = NUMPY[_WIDER[type_]]
        return lambda a, b: (np.multiply(a, b, dtype=wide) >> wide(32)).astype(NUMPY[type_])

    def slow(a: Any, b: Any) -> np.ndarray:
        products = np.multiply(np.atleast_1d(a).astype(object), np.atleast_1d(b).astype(object))
        return np.array([(int(p) >> 64) & (2**64 - 1) for p in products], np.uint64).view(NUMPY[type_])

    return slow


def _product(d: Decoder, type_: str) -> Execute:
    if d.take("wide"):
        wide = NUMPY[_WIDER[type_]]
        return simple(d, type_, lambda a, b: np.multiply(a, b, dtype=wide), _WIDER[type_])
    if d.take("hi"):
        return simple(d, type_, _high(type_))
    d.drop("lo")
    return simple(d, type_, np.multiply)


@opcode("mul24", "mad24")
def short_product(d: Decoder) -> Execute:
    """Products of the low 24 bits: .lo the low 32 of the 48 bits, .hi the high ones."""
    type_ = d.type()
    shift = 16 if d.take("lo", "hi") == "hi" else 0
    signed = type_ == "s32"

    def low24(a: Any) -> np.ndarray:
        wide = np.asarray(a).astype(np.int64) & 0xFFFFFF
        return np.where(signed & (wide >> 23 == 1), wide - (1 << 24), wide)

    def product(a: Any, b: Any, c: Any = 0) -> np.ndarray:
        return ((low24(a) * low24(b) >> shift & 0xFFFFFFFF).astype(np.uint32).view(NUMPY[type_]) + c).astype(
            NUMPY[type_]
        )

    return simple(d, type_, product)


def _fused(d: Decoder, type_: str, mode: str) -> Execute:
    """fma of floats: rounded once."""
    if type_ in ("f32", "f32x2"):
        function = (lambda a, b, c: formats.fused(a, b, c, mode)) if mode != "rn" else formats.fused
        if type_ == "f32x2":
            return simple(d, "b64", _packed_f32(d, function))
        return simple(d, type_, _float(d, type_, function))
    if mode != "rn" and type_ == "f64":
        return simple(d, type_, _double("fma", mode))
    if mode != "rn":
        raise d.refuse(f"{mode} of {type_}")
    if type_ == "f64":
        return simple(d, type_, np.vectorize(_FMA, otypes=[np.float64]))
    relu = d.take("relu")

    def halves(a: Any, b: Any, c: Any) -> Any:
        total = formats.sum_to_odd(a * b, c)
        return np.fmax(total, 0.0) if relu else total

    return simple(d, type_, _float(d, type_, halves))


_FMA = ctypes.CDLL(ctypes.util.find_library("m") or "libm.so.6").fma  # rounds once; Python has it from 3.13 on
_FMA.restype, _FMA.argtypes = ctypes.c_double, [ctypes.c_double] * 3


@opcode("mad", "fma")
def multiply_add(d: Decoder) -> Execute:
    if "cc" in d.left:
        return carried(d, "mad", False)
    type_ = d.type()
    if _is_float(type_):
        return _fused(d, type_, d.take("rn", "rz", "rm", "rp") or "rn")
    if d.take("wide"):
        wide = _WIDER[type_]
        a, b, c, put = d.get(1, type_), d.get(2, type_), d.get(3, wide), d.put(0, wide)
        return lambda w, m: put(w, np.multiply(a(w), b(w), dtype=NUMPY[wide]) + c(w), m)
    if d.take("hi"):
        high = _high(type_)
        return simple(d, type_, lambda a, b, c: high(a, b) + c)
    d.drop("lo")
    return simple(d, type_, lambda a, b, c: a * b + c)


@opcode("div", "rem")
def division(d: Decoder) -> Execute:
    type_ = d.type()
    if _is_float(type_):
        d.drop("full", "approx")  # the approximate forms are taken as exact ones
        mode = d.take("rn", "rz", "rm", "rp") or "rn"
        return simple(d, type_, _float(d, type_, np.divide if mode == "rn" else _directed(d, type_, np.divide, mode)))

    def divided(a: Any, b: Any) -> Any:
        return np.where(b == 0, NUMPY[type_](-1 if type_[0] == "s" else np.iinfo(NUMPY[type_]).max), _quotient(a, b))

    if d.instruction.op == "div":
        return simple(d, type_, divided)
    return simple(d, type_, lambda a, b: np.where(b == 0, a, a - _quotient(a, b) * b))


def _directed(d: Decoder, type_: str, function: Callable, mode: str) -> Callable:
    """A quotient or root of fp32 with another rounding than to nearest: that of fp64 differs from the exact value by
    less than what separates it from any fp32 that it is not equal to.
    """
    if type_ != "f32":
        raise d.refuse(f"{mode} of {type_}")
    return lambda *values: formats.to_f32(function(*(np.asarray(v, np.float64) for v in values)), mode)


def _quotient(a: Any, b: Any) -> Any:
    """Integer division towards zero."""
    safe = np.where(b == 0, np.ones_like(b), b)
    whole = a // safe
    return whole + ((whole * safe != a) & ((a < 0) != (safe < 0))).astype(np.asarray(a).dtype)


@opcode("neg", "abs")
def sign(d: Decoder) -> Execute:
    type_ = d.type()
    function = np.negative if d.instruction.op == "neg" else np.abs
    return simple(d, type_, _float(d, type_, function) if _is_float(type_) else function)


@opcode("and", "or", "xor", "not", "cnot")
def logic(d: Decoder) -> Execute:
    type_ = d.type()
    return simple(d, type_, _LOGIC[d.instruction.op])


_LOGIC: dict[str, Any] = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "cnot": lambda a: (a == 0).astype(np.asarray(a).dtype),
}


@opcode("shl", "shr")
def shift(d: Decoder) -> Execute:
    type_ = d.type()
    bits = 8 * SIZE[type_]
    value, amount, put = d.get(1, type_), d.get(2, "u32"), d.put(0, type_)
    kind = NUMPY[type_]
    function = np.left_shift if d.instruction.op == "shl" else np.right_shift
    if isinstance(d.operands[2], Immediate) and int(d.operands[2].value) < bits:
        by = kind(int(d.operands[2].value))
        return lambda w, m: put(w, function(value(w), by), m)
    signed = type_[0] == "s" and d.instruction.op == "shr"

    def execute(w: Warps, m: Mask) -> None:
        by = amount(w)
        shifted = function(value(w), np.minimum(by, bits - 1).astype(kind))
        put(w, shifted if signed else np.where(by >= bits, kind(0), shifted), m)

    return execute


@opcode("shf")
def funnel(d: Decoder) -> Execute:
    side, mode = d.take("l", "r"), d.take("wrap", "clamp")
    d.type()
    low, high, amount, put = d.get(1, "u32"), d.get(2, "u32"), d.get(3, "u32"), d.put(0, "u32")

    def execute(w: Warps, m: Mask) -> None:
        by = amount(w)
        by = (by & np.uint32(31) if mode == "wrap" else np.minimum(by, np.uint32(32))).astype(np.uint64)
        both = low(w).astype(np.uint64) | high(w).astype(np.uint64) << np.uint64(32)
        moved = both >> by if side == "r" else (both << by) >> np.uint64(32)
        put(w, moved.astype(np.uint32), m)

    return execute


@opcode("bfe")
def extract(d: Decoder) -> Execute:
    type_ = d.type()
    bits = 8 * SIZE[type_]
    value, start, length, put = d.get(1, type_), d.get(2, "u32"), d.get(3, "u32"), d.put(0, type_)

    def execute(w: Warps, m: Mask) -> None:
        first = (start(w) & np.uint32(255)).astype(np.int64)
        count = (length(w) & np.uint32(255)).astype(np.int64)
        whole = np.asarray(value(w)).astype(np.int64 if type_[0] == "s" else np.uint64)
        field = np.where(first >= bits, 0, whole >> np.minimum(first, bits - 1).astype(whole.dtype))
        keep = np.minimum(count, 63).astype(np.uint64)
        field = field.astype(np.uint64) & ((np.uint64(1) << keep) - np.uint64(1))
        if type_[0] == "s":
            last = np.minimum(first + count - 1, bits - 1)
            negative = (whole >> np.maximum(last, 0)) & 1
            field = field.astype(np.int64) | np.where((negative != 0) & (count > 0), -1 << np.minimum(count, 62), 0)
        put(w, np.where(count == 0, 0, field).astype(NUMPY[type_]), m)

    return execute


@opcode("bfi")
def insert(d: Decoder) -> Execute:
    type_ = d.type()
    bits = 8 * SIZE[type_]
    field, base, start, length = d.get(1, type_), d.get(2, type_), d.get(3, "u32"), d.get(4, "u32")
    put = d.put(0, type_)

    def execute(w: Warps, m: Mask) -> None:
        first = np.minimum(start(w) & np.uint32(255), 63).astype(np.uint64)
        count = np.minimum(length(w) & np.uint32(255), 63).astype(np.uint64)
        mask = ((np.uint64(1) << count) - np.uint64(1)) << first & np.uint64(2**bits - 1)
        result = base(w).astype(np.uint64) & ~mask | field(w).astype(np.uint64) << first & mask
        put(w, result.astype(NUMPY[type_]), m)

    return execute


@opcode("bfind")
def find_bit(d: Decoder) -> Execute:
    shiftamt = d.take("shiftamt")
    type_ = d.type()
    bits = np.uint32(8 * SIZE[type_] - 1)

    def highest(a: Any) -> np.ndarray:
        place = _highest(np.where(a < 0, ~a, a) if type_[0] == "s" else a)
        return np.where(place == NONE, NONE, bits - place if shiftamt else place)

    return simple(d, type_, highest, "u32")


NONE = np.uint32(0xFFFFFFFF)


def _highest(a: Any) -> np.ndarray:
    """The place of the highest set bit, uint32; NONE where there is none."""
    left, place = np.asarray(a).astype(np.uint64), np.full(np.shape(a), NONE, np.uint32)
    for step in (32, 16, 8, 4, 2, 1):
        more = left >> np.uint64(step) > 0
        place = np.where(more, np.where(place == NONE, 0, place) + np.uint32(step), place).astype(np.uint32)
        left = np.where(more, left >> np.uint64(step), left)
    return np.where(left == 0, NONE, np.where(place == NONE, 0, place)).astype(np.uint32)


@opcode("brev", "popc", "clz")
def bit_counts(d: Decoder) -> Execute:
    type_ = d.type()
    bits = 8 * SIZE[type_]
    if d.instruction.op == "popc":
        return simple(d, type_, lambda a: np.bitwise_count(a).astype(np.uint32), "u32")
    if d.instruction.op == "clz":
        return simple(d, type_, lambda a: np.uint32(bits - 1) - _highest(a), "u32")

    def reversed_bits(a: Any) -> np.ndarray:
        a = np.atleast_1d(np.asarray(a))
        lowest_first = np.unpackbits(np.ascontiguousarray(a).view(np.uint8), bitorder="little").reshape(-1, bits)
        return np.packbits(lowest_first, 1).view(f">u{bits // 8}")[:, 0].astype(NUMPY[type_])

    return simple(d, type_, reversed_bits)


@opcode("prmt")
def permute(d: Decoder) -> Execute:
    d.type()
    low, high, selector, put = d.get(1, "u32"), d.get(2, "u32"), d.get(3, "u32"), d.put(0, "u32")
    shifts = 4 * np.arange(4, dtype=np.uint32)
    constant = isinstance(d.operands[3], Immediate)
    signs = not constant or int(d.operands[3].value) & 0x8888

    def execute(w: Warps, m: Mask) -> None:
        n = w.count
        bytes_ = np.empty((n, 2), np.uint32)
        bytes_[:, 0], bytes_[:, 1] = low(w), high(w)
        nibbles = np.broadcast_to(np.asarray(selector(w))[..., None] >> shifts, (n, 4)) & np.uint32(15)
        picked = np.take_along_axis(bytes_.view(np.uint8), (nibbles & np.uint32(7)).astype(np.intp), 1)
        if signs:
            picked = np.where(nibbles & np.uint32(8), np.where(picked & 128, np.uint8(255), np.uint8(0)), picked)
        put(w, np.ascontiguousarray(picked).view(np.uint32)[:, 0], m)

    return execute


@opcode("lop3")
def three_way(d: Decoder) -> Execute:
    d.type()
    table = int(d.operands[4].value)
    a, b, c, put = d.get(1, "u32"), d.get(2, "u32"), d.get(3, "u32"), d.put(0, "u32")

    def execute(w: Warps, m: Mask) -> None:
        x, y, z = a(w), b(w), c(w)
        total: Any = np.uint32(0)
        for k in range(8):
            if table >> k & 1:
                total = total | (x if k & 4 else ~x) & (y if k & 2 else ~y) & (z if k & 1 else ~z)
        put(w, total, m)

    return execute


@opcode("dp4a")
def byte_dot(d: Decoder) -> Execute:
    right_type = d.type()
    left_type = d.type()
    kinds = [np.int8 if t == "s32" else np.uint8 for t in (left_type, right_type)]
    total_type = "s32" if "s32" in (left_type, right_type) else "u32"
    a, b, c, put = d.lanes(1, "u32"), d.lanes(2, "u32"), d.get(3, total_type), d.put(0, total_type)

    def execute(w: Warps, m: Mask) -> None:
        left = np.ascontiguousarray(a(w)).view(kinds[0]).reshape(-1, 4).astype(np.int32)
        right = np.ascontiguousarray(b(w)).view(kinds[1]).reshape(-1, 4).astype(np.int32)
        put(w, (left * right).sum(axis=1, dtype=np.int32).astype(NUMPY[total_type]) + c(w), m)

    return execute


_COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
_UNORDERED = {
    "equ": lambda a, b: ~((a < b) | (a > b)),
    "neu": np.not_equal,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}


def _ordered_ne(a: Any, b: Any) -> Any:
    return (a < b) | (a > b)


@opcode("setp", "set")
def compare(d: Decoder) -> Execute:
    if d.instruction.op == "set":
        return _set(d)
    type_ = d.type()
    name = d.left.pop(0)
    combine = d.take("and", "or", "xor")
    function = (_UNORDERED if _is_float(type_) and name in _UNORDERED else _COMPARE)[name]
    if _is_float(type_) and name == "ne":
        function = _ordered_ne
    if type_ == "f32":
        function = _ftz_inputs(d, function)
    elif _is_float(type_) and type_ != "f64":
        function = _half_inputs(type_, function)
    left, right = d.get(1, type_), d.get(2, type_)
    further = d.get(3, "pred") if combine else None
    targets = [d.put(item, "pred") for item in d.items(0)]
    join: Any = _LOGIC.get(combine)

    def execute(w: Warps, m: Mask) -> None:
        result = function(left(w), right(w))
        other = ~result
        if further is not None:
            extra = further(w)
            result, other = join(result, extra), join(other, extra)
        targets[0](w, result, m)
        if len(targets) > 1:
            targets[1](w, other, m)

    return execute


def _set(d: Decoder) -> Execute:
    """As setp, but what is written is a number: 1.0 for floats, all ones for integers; or 0."""
    type_, result = d.type(), d.type()
    name = d.left.pop(0)
    if d.take("and", "or", "xor"):
        raise d.refuse("a further predicate")
    function = (_UNORDERED if _is_float(type_) and name in _UNORDERED else _COMPARE)[name]
    function = _ordered_ne if _is_float(type_) and name == "ne" else function
    packed = type_ in _PAIRS
    each = type_.removesuffix("x2")
    if type_ == "f32":
        function = _ftz_inputs(d, function)
    elif _is_float(type_) and type_ != "f64":
        d.drop("ftz")
        function = _half_inputs(each, function)
    size = SIZE[result] // (2 if packed else 1)
    bits = {"f32": 0x3F800000, "f16": 0x3C00, "bf16": 0x3F80}.get(result.removesuffix("x2"), 2 ** (8 * size) - 1)
    yes = np.array([bits], f"u{size}").view(np.float32 if result == "f32" else f"u{size}")[0]
    if packed != (result in _PAIRS):
        raise d.refuse(f"{type_} to {result}")
    left, right, put = d.lanes(1, type_), d.lanes(2, type_), d.put(0, result)
    if not packed:
        return lambda w, m: put(w, np.where(function(left(w), right(w)), yes, yes * 0).astype(NUMPY[result]), m)

    def execute(w: Warps, m: Mask) -> None:
        a, b = (np.ascontiguousarray(get(w)).view(np.uint16) for get in (left, right))
        put(w, np.where(function(a, b), yes, yes * 0).astype(np.uint16).view(np.uint32), m)

    return execute


def _ftz_inputs(d: Decoder, function: Callable) -> Callable:
    return (lambda a, b: function(formats.flushed(a), formats.flushed(b))) if d.take("ftz") else function


def _half_inputs(type_: str, function: Callable) -> Callable:
    if type_ == "f16":
        return lambda a, b: function(np.asarray(a).view(np.float16), np.asarray(b).view(np.float16))
    if type_ == "bf16":
        return lambda a, b: function(formats.from_bf16(np.asarray(a)), formats.from_bf16(np.asarray(b)))
    raise ValueError(type_)


@opcode("selp")
def select(d: Decoder) -> Execute:
    type_ = d.type()
    yes, no, which, put = d.get(1, type_), d.get(2, type_), d.get(3, "pred"), d.put(0, type_)
    return lambda w, m: put(w, np.where(which(w), yes(w), no(w)), m)


@opcode("mov")
def move(d: Decoder) -> Execute:
    type_ = d.type()
    target, source = d.operands
    if type_ == "pred":
        put, get = d.put(0, "pred"), d.get(1, "pred")
        return lambda w, m: put(w, get(w), m)
    if isinstance(target, Vector):
        return _unpack(d, type_)
    if isinstance(source, Vector):
        return _pack(d, type_)
    if isinstance(source, Predicate):
        raise d.refuse("a predicate")
    return simple(d, type_, lambda a: a)


def _unpack(d: Decoder, type_: str) -> Execute:
    items = d.items(0)
    each = SIZE[type_] // len(items)
    part = f"b{8 * each}"
    read = d.lanes(1, f"b{8 * SIZE[type_]}")
    puts = [d.put(item, part) for item in items]

    def execute(w: Warps, m: Mask) -> None:
        parts = np.ascontiguousarray(read(w)).view(NUMPY[part]).reshape(w.count, -1)
        values = [parts[:, i].copy() for i in range(len(puts))]
        for put, value in zip(puts, values, strict=True):
            put(w, value, m)

    return execute


def _pack(d: Decoder, type_: str) -> Execute:
    items = d.items(1)
    part = f"b{8 * SIZE[type_] // len(items)}"
    reads = [d.get(item, part) for item in items]
    put = d.put(0, f"b{8 * SIZE[type_]}")

    def execute(w: Warps, m: Mask) -> None:
        parts = np.empty((w.count, len(reads)), NUMPY[part])
        for i, read in enumerate(reads):
            parts[:, i] = read(w)
        put(w, parts.view(NUMPY[f"b{8 * SIZE[type_]}"])[:, 0], m)

    return execute


def _approximate(function: Callable) -> Callable:
    """An approximate instruction, taken as the exact function, rounded once to fp32: within its documented error, which
    is at least half of the last bit, but not the hardware's bits.
    """
    return lambda a: function(np.asarray(a, np.float64)).astype(np.float32)


def _coarse(a: Any) -> np.ndarray:
    """fp64 without its low 32 bits."""
    return (np.ascontiguousarray(a, np.float64).view(np.uint64) & np.uint64(0xFFFFFFFF << 32)).view(np.float64)


_FUNCTIONS = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda a: 1 / a,
    "sqrt": np.sqrt,
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


@opcode(*_FUNCTIONS)
def functions(d: Decoder) -> Execute:
    op, type_ = d.instruction.op, d.type()
    approximate = d.take("approx")
    mode = "" if approximate else d.take("rn", "rz", "rm", "rp")
    if not approximate and (not mode or op not in ("rcp", "sqrt")):
        raise d.refuse("neither approx nor a rounding")
    if mode not in ("", "rn"):
        return simple(d, type_, _float(d, type_, _directed(d, type_, _FUNCTIONS[op], mode)))
    halves = type_ in ("f16", "bf16", "f16x2", "bf16x2") and op in ("ex2", "tanh")
    if type_ == "f64" and not approximate:
        return simple(d, type_, _FUNCTIONS[op])  # IEEE says how these two are rounded
    if type_ == "f64" and op in ("rcp", "rsqrt"):
        d.drop("ftz")
        return simple(d, type_, lambda a: _coarse(_FUNCTIONS[op](_coarse(a))))
    if type_ != "f32" and not halves:
        raise d.refuse(type_)
    if halves and type_.startswith("bf16") and op == "ex2" and d.take("ftz"):
        return simple(d, type_, _float(d, type_, lambda a: formats.flushed(np.exp2(a))))
    return simple(d, type_, _float(d, type_, _FUNCTIONS[op] if halves else _approximate(_FUNCTIONS[op])))


@opcode("copysign")
def copy_sign(d: Decoder) -> Execute:
    type_ = d.type()
    return simple(d, type_, lambda a, b: np.copysign(b, a))


@opcode("testp")
def test_property(d: Decoder) -> Execute:
    type_ = d.type()
    name = d.take("finite", "infinite", "notanumber", "number")
    function = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "notanumber": np.isnan,
        "number": lambda a: ~np.isnan(a),
    }[name]
    read, put = d.get(1, type_), d.put(0, "pred")
    return lambda w, m: put(w, function(read(w)), m)
