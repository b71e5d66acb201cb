"""cvt: conversions between number types; cvta: between address spaces."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ptx_model import formats
from ptx_model.decode import Decoder, Execute, opcode, simple
from ptx_model.formats import NUMPY
from ptx_model.machine import Mask, Warps
from ptx_model.memory import LOCAL_WINDOW, PARAMETER_WINDOW, SHARED_WINDOW
from ptx_model.parse import SIZE

_PACKED = ("e2m1x2", "e4m3x2", "e5m2x2", "ue8m0x2", "e2m1x4", "e4m3x4")
_ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@opcode("cvt")
def convert(d: Decoder) -> Execute:
    source = d.left.pop()
    target = d.left.pop()
    if source in _PACKED:
        return _unpacked(d, target, source)
    if target in _PACKED:
        return _packed(d, target, source)
    if target in ("f16x2", "bf16x2"):
        return _pair(d, target, source)
    function = _one(d, target, source)
    return simple(d, source, function, target)


def _one(d: Decoder, target: str, source: str) -> Callable:
    """A conversion of one value."""
    floats = ("f16", "bf16", "f32", "f64")
    if source not in floats and target not in floats:
        if d.take("sat"):
            low, high = np.iinfo(NUMPY[target]).min, np.iinfo(NUMPY[target]).max
            return lambda a: np.clip(np.asarray(a).astype(object), low, high).astype(NUMPY[target])
        return lambda a: np.asarray(a).astype(NUMPY[target])
    read = _float_in(d, source)
    whole = next((_ROUND[r] for r in _ROUND if d.take(r)), None)
    if target not in floats:
        whole = whole or np.trunc
        limits = np.iinfo(NUMPY[target])

        def to_integer(a: Any) -> np.ndarray:
            value = whole(np.asarray(read(a), np.float64))
            value = np.where(np.isnan(value), 0, value)
            over = value >= float(limits.max)
            inside = np.where(over, 0, np.maximum(value, float(limits.min)))
            return np.where(over, limits.max, inside.astype(NUMPY[target])).astype(NUMPY[target])

        return to_integer
    mode = d.take("rn", "rz", "rm", "rp") or "rn"
    ftz, sat, relu = d.take("ftz"), d.take("sat"), d.take("relu")
    if mode != "rn" and (target != "f32" or (SIZE[source] == 8 and source != "f64")):
        return _exactly(d, target, source, mode, read)

    def to_float(a: Any) -> np.ndarray:
        value = np.asarray(read(a))
        if ftz and value.dtype == np.float32:
            value = formats.flushed(value)
        if whole is not None:
            value = whole(value)
        if sat:
            value = np.fmin(np.fmax(value, 0), 1)
        if relu:
            value = np.fmax(value, 0)
        if target == "bf16":
            return formats.to_bf16(value.astype(np.float32))
        if target == "f32" and mode != "rn":
            return formats.to_f32(value.astype(np.float64), mode)
        return formats.to_f16(value) if target == "f16" else value.astype(NUMPY[target])

    return to_float


def _exactly(d: Decoder, target: str, source: str, mode: str, read: Callable) -> Callable:
    """Conversions with a directed rounding that fp64 does not decide: each value by its neighbours in the target."""
    kind: Any = {"f32": np.float32, "f64": np.float64, "f16": np.float16}.get(target)
    if kind is None:
        raise d.refuse(f"{mode} to {target}")

    def one(value: Any) -> Any:
        exact = int(value) if source not in ("f16", "bf16", "f32", "f64") else float(value)
        near = kind(exact)
        if not np.isfinite(near) or not np.isfinite(np.float64(exact)):
            return near
        back = int(near) if isinstance(exact, int) else float(near)
        over, way = back > exact, {"rz": -kind(near) * kind(np.inf), "rm": -kind(np.inf), "rp": kind(np.inf)}[mode]
        return np.nextafter(near, way) if back != exact and over == (way < 0) else near

    def convert(a: Any) -> np.ndarray:
        found = np.array([one(v) for v in np.atleast_1d(np.asarray(read(a)))], kind)
        return found.view(np.uint16) if target == "f16" else found

    return convert


def _float_in(d: Decoder, source: str) -> Callable:
    if source == "f16":
        return lambda a: np.asarray(a).view(np.float16).astype(np.float32)
    if source == "bf16":
        return lambda a: formats.from_bf16(np.asarray(a))
    return lambda a: a


def _pair(d: Decoder, target: str, source: str) -> Execute:
    """cvt.rn.f16x2.f32 d, high, low."""
    if source != "f32":
        raise d.refuse(f"{source} to {target}")
    d.drop("rn")
    relu, satfinite = d.take("relu"), d.take("satfinite")
    narrow = formats.to_bf16 if target[0] == "b" else formats.to_f16
    largest = np.float32(3.3895313892515355e38 if target[0] == "b" else 65504)
    high, low, put = d.get(1, "f32"), d.get(2, "f32"), d.put(0, "b32")

    def half(value: Any) -> np.ndarray:
        value = np.fmax(value, np.float32(0)) if relu else value
        if satfinite:
            value = np.where(np.isnan(value), value, np.clip(value, -largest, largest))
        return narrow(value).astype(np.uint32)

    return lambda w, m: put(w, half(high(w)) << np.uint32(16) | half(low(w)), m)


def _codes(packed: np.ndarray, source: str) -> list[np.ndarray]:
    """The values of a pair of codes, low first."""
    if source == "e2m1x2":
        return [formats.E2M1[packed & 15], formats.E2M1[packed >> 4 & 15]]
    table = {"e4m3x2": formats.E4M3, "e5m2x2": formats.E5M2, "ue8m0x2": formats.UE8M0}[source]
    return [table[packed & 255], table[packed >> 8 & 255]]


def _unpacked(d: Decoder, target: str, source: str) -> Execute:
    if source not in ("e2m1x2", "e4m3x2", "e5m2x2", "ue8m0x2") or target not in ("f16x2", "bf16x2"):
        raise d.refuse(f"{source} to {target}")
    if (target == "bf16x2") != (source == "ue8m0x2"):
        raise d.refuse(f"{source} to {target}")
    d.drop("rn")
    narrow = (lambda v: formats.to_bf16(v.astype(np.float32))) if target[0] == "b" else formats.to_f16
    read, put = d.get(1, "b8" if source == "e2m1x2" else "b16"), d.put(0, "b32")

    def execute(w: Warps, m: Mask) -> None:
        low, high = (narrow(v).astype(np.uint32) for v in _codes(np.asarray(read(w)), source))
        put(w, high << np.uint32(16) | low, m)

    return execute


def _packed(d: Decoder, target: str, source: str) -> Execute:
    """cvt.rn.satfinite.e4m3x2.f32 d, high, low."""
    d.drop("rn")
    if not d.take("satfinite") or source not in _SOURCES or target not in ("e2m1x2", "e4m3x2", "e5m2x2"):
        raise d.refuse(f"{source} to {target}")
    relu = d.take("relu")
    if source != "f32":
        return _packed_halves(d, target, source, bool(relu))
    high, low = d.get(1, "f32"), d.get(2, "f32")
    put = d.put(0, "b8" if target == "e2m1x2" else "b16")
    one = _NARROW[target]
    shift = 4 if target == "e2m1x2" else 8

    def code(value: Any) -> np.ndarray:
        return one(np.atleast_1d(np.fmax(value, np.float32(0)) if relu else value)).astype(np.uint16)

    return lambda w, m: put(w, (code(high(w)) << np.uint16(shift) | code(low(w))).astype(f"u{shift // 4}"), m)


_SOURCES = ("f32", "f16x2", "bf16x2")
_NARROW = {"e2m1x2": formats.to_e2m1, "e4m3x2": formats.to_e4m3, "e5m2x2": formats.to_e5m2}


def _packed_halves(d: Decoder, target: str, source: str, relu: bool) -> Execute:
    """cvt.rn.satfinite.e4m3x2.f16x2 d, pair."""
    if target == "e2m1x2":
        raise d.refuse(f"{source} to {target}")
    read, put = d.lanes(1, "b32"), d.put(0, "b16")

    def execute(w: Warps, m: Mask) -> None:
        halves = np.ascontiguousarray(read(w)).view(np.uint16)
        values = halves.view(np.float16).astype(np.float32) if source == "f16x2" else formats.from_bf16(halves)
        put(w, _NARROW[target](np.fmax(values, np.float32(0)) if relu else values).view(np.uint16), m)

    return execute


@opcode("cvta")
def convert_address(d: Decoder) -> Execute:
    type_ = d.type()
    to = d.take("to")
    space = d.take("global", "shared", "shared::cta", "shared::cluster", "param", "param::entry", "local")
    if SIZE[type_] != 8 or not space:
        raise d.refuse("only 64-bit addresses of global, shared, local and parameter memory")
    window = {"s": SHARED_WINDOW, "l": LOCAL_WINDOW}.get(space[0], 0)
    offset = np.uint64(window)
    if space.startswith("param"):
        # A parameter's address is generic from the start here, so that tensor maps in it can be named.
        return simple(d, "u64", lambda a: np.asarray(a) | np.uint64(PARAMETER_WINDOW))
    return simple(d, "u64", (lambda a: a - offset) if to else (lambda a: a + offset))
