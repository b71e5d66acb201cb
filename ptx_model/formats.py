"""Number formats that numpy does not have, as arrays: e2m1, e4m3, e5m2, ue8m0, bf16; and exact roundings to them."""

import numpy as np

# PTX type -> that of its bits or values in numpy.
NUMPY = {
    "b8": np.uint8,
    "u8": np.uint8,
    "s8": np.int8,
    "b16": np.uint16,
    "u16": np.uint16,
    "s16": np.int16,
    "b32": np.uint32,
    "u32": np.uint32,
    "s32": np.int32,
    "f32": np.float32,
    "b64": np.uint64,
    "u64": np.uint64,
    "s64": np.int64,
    "f64": np.float64,
    "f16": np.uint16,
    "bf16": np.uint16,
    "f16x2": np.uint32,
    "bf16x2": np.uint32,
    "f32x2": np.uint64,
}

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)  # by code


def _e4m3() -> np.ndarray:
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    return np.where(code & 127 == 127, np.nan, np.where(code & 128, -size, size)).astype(np.float32)


E4M3 = _e4m3()  # by code; 0x7F and 0xFF are NaN
E5M2 = np.arange(256, dtype=np.uint16).__lshift__(8).view(np.float16).astype(np.float32)  # by code
UE8M0 = np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan)  # by code, float64


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """uint16 -> float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(value: np.ndarray) -> np.ndarray:
    """float32 or float64 -> uint16, to nearest even, rounded once; NaN is 0x7FFF, as the hardware makes it."""
    value = np.asarray(value)
    if value.dtype == np.float64:
        value = _to_odd_f32(value)
    bits = np.ascontiguousarray(value, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(value), 0x7FFF, rounded).astype(np.uint16)


def _to_odd_f32(value: np.ndarray) -> np.ndarray:
    """float64 -> float32, where inexact the neighbour whose last bit is 1: a later rounding to fewer bits is right."""
    near = value.astype(np.float32)
    if (near == value).all():
        return near
    even = np.ascontiguousarray(near).view(np.uint32) & np.uint32(1) == 0
    other = np.nextafter(near, np.where(value > near, np.float32(np.inf), np.float32(-np.inf)))
    return np.where((near != value) & even & np.isfinite(near), other, near)


def sum_to_odd(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a + b of float64 arrays, where inexact the neighbour whose last bit is 1: see `_to_odd_f32`."""
    total = np.asarray(a + b, np.float64)
    other = total - a
    error = (a - (total - other)) + (b - other)
    even = np.ascontiguousarray(total).view(np.uint64) & np.uint64(1) == 0
    moved = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where((error != 0) & even & np.isfinite(total), moved, total)


def to_f32(value: np.ndarray, mode: str) -> np.ndarray:
    """float64 -> float32. mode: "rn" to nearest even, "rz" to zero, "rm" down, "rp" up."""
    near = value.astype(np.float32)
    if mode == "rn":
        return near
    zero, least, most = np.zeros_like(near), np.float32(-np.inf), np.float32(np.inf)
    towards = {"rz": zero, "rm": least, "rp": most}[mode]
    # Only a result on the wrong side of the value is moved.
    wrong = {"rz": np.abs(near.astype(np.float64)) > np.abs(value), "rm": near > value, "rp": near < value}[mode]
    return np.where(wrong, np.nextafter(near, towards), near)


def to_f16(value: np.ndarray) -> np.ndarray:
    """Floats -> uint16, the bits of fp16, to nearest even; NaN is 0x7FFF, as the hardware makes it."""
    value = np.asarray(value)
    return np.where(np.isnan(value), np.uint16(0x7FFF), value.astype(np.float16).view(np.uint16))


def nearest(value: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Return the codes whose values in `table` (positive, rising, by code) are nearest to |value|, ties to the even
    code; above the largest the largest; with bit log2(len(table)) set where `value` is negative. NaN: the largest.
    """
    size = np.abs(value.astype(np.float64))
    middle = (table[1:].astype(np.float64) + table[:-1]) / 2
    low = np.searchsorted(middle, size, side="left")
    tie = (low < len(middle)) & (size == middle[np.minimum(low, len(middle) - 1)])
    code = np.where(np.isnan(size), len(table) - 1, low + (tie & (low % 2 == 1)))
    width = int(len(table) - 1).bit_length()
    return (code | np.where(np.signbit(value) & ~np.isnan(value), 1 << width, 0)).astype(np.uint8)


def to_e2m1(value: np.ndarray) -> np.ndarray:
    """float32 -> codes, to nearest even, saturating (satfinite)."""
    return nearest(value, E2M1[:8])


def to_e4m3(value: np.ndarray) -> np.ndarray:
    """float32 -> codes, to nearest even, saturating at 448 (satfinite); NaN is 0x7F."""
    codes = nearest(value, E4M3[:127])
    return np.where(np.isnan(value), np.uint8(0x7F), codes)


def to_e5m2(value: np.ndarray) -> np.ndarray:
    """float32 -> codes, to nearest even, saturating at 57344 (satfinite); NaN is 0x7F."""
    return np.where(np.isnan(value), np.uint8(0x7F), nearest(value, E5M2[:124]))


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray, mode: str = "rn") -> np.ndarray:
    """a * b + c of float32 arrays, rounded once. The product is exact in fp64. Where the sum lands on a tie of fp32
    after its own rounding, the error of that rounding decides. mode: see `to_f32`.
    """
    product = np.multiply(a, b, dtype=np.float64)
    if mode != "rn":
        return _signed_zero(to_f32(sum_to_odd(product, np.asarray(c, np.float64)), mode), product, c, mode)
    total = product + c
    tie = total.view(np.uint64) & np.uint64(0x1FFFFFFF) == np.uint64(0x10000000)
    if tie.any():
        other = total - product
        error = (product - (total - other)) + (c - other)
        moved = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
        total = np.where(tie & (error != 0) & np.isfinite(total), moved, total)
    return total.astype(np.float32)


def added(a: np.ndarray, b: np.ndarray, mode: str) -> np.ndarray:
    """a + b of float32 arrays. mode: see `to_f32`."""
    left, right = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return _signed_zero(to_f32(sum_to_odd(left, right), mode), left, right, mode)


def _signed_zero(total: np.ndarray, a: np.ndarray, b: np.ndarray, mode: str) -> np.ndarray:
    """A sum of opposite numbers is -0 where it is rounded down."""
    opposite = (a == -b) & (np.signbit(a) != np.signbit(b))
    return np.where(opposite, np.float32(-0.0), total) if mode == "rm" else total


def flushed(value: np.ndarray) -> np.ndarray:
    """Floats with subnormals of fp32 as zeros of their sign (.ftz)."""
    return np.where(np.abs(value) < np.float32(2.0**-126), np.copysign(np.float32(0), value), value)
