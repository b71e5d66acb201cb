"""The block formats in exact arithmetic: what each bit pattern is worth, and what a quantiser must choose.

A `Format` puts one of the project's formats behind one interface, so that tests/common/test_formats.py asks all of them
the same. Nothing here uses the project's arithmetic but to call what is tested.
"""

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch

from problems.common import fp8, nvfp4
from problems.dsv4_forward.weights import formats

LARGEST_FP32 = torch.finfo(torch.float32).max
TINY = 2.0**-126  # the least normal fp32


def minifloat(code: int, exponent_bits: int, mantissa_bits: int) -> Fraction:
    """Value of a sign, exponent, mantissa code without infinities; the sign of zero is lost. Bias 2^(e - 1) - 1."""
    mantissa = code & (1 << mantissa_bits) - 1
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    bias = (1 << exponent_bits - 1) - 1
    significand = mantissa + (1 << mantissa_bits if exponent else 0)
    value = Fraction(significand, 1 << mantissa_bits) * Fraction(2) ** (max(exponent, 1) - bias)
    return -value if code >> exponent_bits + mantissa_bits else value


E2M1 = tuple(minifloat(code, 2, 1) for code in range(8))  # magnitudes, in the order of their codes
E4M3 = tuple(minifloat(byte, 4, 3) for byte in range(0x7F))


def nearest(value: Fraction, magnitudes: tuple[Fraction, ...]) -> int:
    """The code nearest to `value` >= 0, the even one of two equally near, the last one for all that is larger."""
    above = bisect.bisect_left(magnitudes, value)
    beside = range(max(above - 1, 0), min(above + 1, len(magnitudes)))
    return min(beside, key=lambda code: (abs(magnitudes[code] - value), code % 2))


def beside(value: float) -> list[float]:
    """`value`, an fp32, between the fp32 below and the one above it."""
    x = torch.tensor(value)
    return [float(x.nextafter(torch.tensor(-math.inf))), float(x), float(x.nextafter(torch.tensor(math.inf)))]


def power_of_two(byte: int) -> Fraction:
    """The value of a ue8m0 byte."""
    return Fraction(2) ** (byte - 127)


def e4m3_scale(amax: Fraction) -> int:
    """NVFP4's scale: amax / 6 to the nearest e4m3."""
    return nearest(amax / 6, E4M3)


def least_power(largest: int, floor: float) -> Callable[[Fraction], int]:
    """-> the scale of MX formats: the least byte whose power of two times `largest` holds amax and the floor."""

    def scale(amax: Fraction) -> int:
        wanted = max(amax, Fraction(floor))
        return next(byte for byte in range(255) if power_of_two(byte) * largest >= wanted)

    return scale


@dataclass(frozen=True)
class Format:
    """One format, of rows of groups; codes and scale bytes are integers here."""

    name: str
    group: int  # values that share a scale
    magnitudes: tuple[Fraction, ...]  # of the codes without their sign, which is the next bit
    scale_values: dict[int, Fraction]  # of every byte that a quantiser may choose
    scale_of: Callable[[Fraction], int]  # a group's amax -> its scale byte
    nan: int  # a scale byte that is NaN
    encode: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    decode: Callable[..., torch.Tensor]  # (codes as stored, scales as stored, dtype) -> values
    round_trip: Callable[[torch.Tensor], torch.Tensor] | None = None
    packed: bool = True  # two codes a byte
    scale_dtype: torch.dtype = torch.float8_e4m3fn

    @property
    def sign(self) -> int:
        return 8 if self.packed else 0x80

    def quantise(self, x: torch.Tensor) -> list[tuple[list[int], int]]:
        """(codes, scale byte) of each group, as the project's quantiser chooses them."""
        stored, scales = self.encode(x)
        codes = stored.view(torch.uint8).flatten().tolist()
        if self.packed:
            codes = [code for byte in codes for code in (byte & 15, byte >> 4)]
        parts = [codes[at : at + self.group] for at in range(0, len(codes), self.group)]
        return list(zip(parts, scales.view(torch.uint8).flatten().tolist(), strict=True))

    def wanted(self, x: torch.Tensor) -> list[tuple[list[int], int]]:
        """The same by the definition. A group whose scale is 0 has codes of 0."""
        values = x.flatten().tolist()
        return [self._group(values[at : at + self.group]) for at in range(0, len(values), self.group)]

    def _group(self, values: list[float]) -> tuple[list[int], int]:
        exact = [Fraction(value) for value in values]
        byte = self.scale_of(max(map(abs, exact)))
        scale = self.scale_values[byte]
        codes = [nearest(abs(value) / scale, self.magnitudes) if scale else 0 for value in exact]
        signs = [self.sign * (math.copysign(1, value) < 0) for value in values]
        return [code | sign for code, sign in zip(codes, signs, strict=True)], byte

    def stored(self, codes: list[int], byte: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A row of one group with these codes and this scale, in the dtypes that `decode` takes."""
        raw = codes if not self.packed else [a | b << 4 for a, b in zip(codes[0::2], codes[1::2], strict=True)]
        row = torch.tensor([raw], dtype=torch.uint8)
        scale = torch.tensor([[byte]], dtype=torch.uint8).view(self.scale_dtype)
        return (row if self.packed else row.view(torch.float8_e4m3fn)), scale

    def value(self, code: int, byte: int) -> float:
        """What a reader gets, exactly in fp64; a zero has its code's sign."""
        size = float(self.magnitudes[code & self.sign - 1] * self.scale_values[byte])
        return -size if code & self.sign else size

    def every_code(self) -> list[list[int]]:
        """Groups that hold every code that is a number, both signs, filled up with the last one."""
        codes = [code | sign for sign in (0, self.sign) for code in range(len(self.magnitudes))]
        codes += codes[-1:] * (-len(codes) % self.group)
        return [codes[at : at + self.group] for at in range(0, len(codes), self.group)]


E4M3_SCALES = dict(enumerate(E4M3))
POWERS = {byte: power_of_two(byte) for byte in range(255)}
ONE = torch.tensor(1.0)
OF_NVFP4 = (16, E2M1, E4M3_SCALES, e4m3_scale, 0x7F)
NVFP4 = Format("nvfp4", *OF_NVFP4, lambda x: nvfp4.quantise(x.double()), nvfp4.dequantise)
NVFP4_ACTIVATIONS = Format(
    *("nvfp4 activations", *OF_NVFP4, lambda x: nvfp4.encode(x, ONE), nvfp4.dequantise),
    lambda x: nvfp4.round_trip(x, ONE),
)
MXFP4 = Format(
    *("mxfp4", 32, E2M1, POWERS, least_power(6, 6 * TINY), 0xFF),
    *(formats.quantise_mxfp4, formats.dequantise_mxfp4, formats.round_trip_fp4),
    scale_dtype=torch.uint8,
)


def fp8_groups(group: int) -> Format:
    """FP8 in groups of `group` values, with the floor of the released model."""
    return Format(
        *(f"fp8 in {group}s", group, E4M3, POWERS, least_power(448, 1e-4), 0xFF),
        lambda x: fp8.quantise_groups(x, group),
        lambda codes, scales, dtype=torch.float32: fp8.dequantise_groups(codes, scales, group, dtype),
        lambda x: fp8.round_trip(x, group),
        packed=False,
        scale_dtype=torch.uint8,
    )


ALL = (NVFP4, NVFP4_ACTIVATIONS, MXFP4, fp8_groups(64), fp8_groups(128))
