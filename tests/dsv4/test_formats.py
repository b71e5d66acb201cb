"""problems/dsv4_forward/weights/formats.py, bit for bit, against the formats' definitions in exact arithmetic."""

import itertools
import math
from fractions import Fraction

import pytest
import torch

from problems.common import fp8, nvfp4
from problems.dsv4_forward.weights import formats

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MIDDLES = [(a + b) / 2 for a, b in itertools.pairwise(MAGNITUDES)]
FLOOR = 6 * 2.0**-126
LARGEST_FP32 = torch.finfo(torch.float32).max


def nearest(value: Fraction) -> int:
    """The magnitude code nearest to `value` >= 0, the even one of two equally near."""
    return min(range(8), key=lambda code: (abs(Fraction(MAGNITUDES[code]) - value), code % 2))


def quantise(values: list[float]) -> tuple[list[int], int]:
    """One group by the definition: (codes, scale byte)."""
    amax = max(max(map(abs, values)), FLOOR)
    byte = next(b for b in range(255) if 2.0 ** (b - 127) * 6 >= amax)
    unit = Fraction(2) ** (byte - 127)
    return [nearest(abs(Fraction(v)) / unit) | 8 * (math.copysign(1, v) < 0) for v in values], byte


def groups_of(packed: torch.Tensor, scales: torch.Tensor) -> list[tuple[list[int], int]]:
    """(codes, scale byte) of each group, from the bytes."""
    nibbles = [n for byte in packed.flatten().tolist() for n in (byte & 15, byte >> 4)]
    parts = [nibbles[i : i + 32] for i in range(0, len(nibbles), 32)]
    return list(zip(parts, scales.flatten().tolist(), strict=True))


def random_mxfp4(*shape: int, low: int, high: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes and scale bytes low..high of matrices (..., n, k)."""
    generator = torch.Generator().manual_seed(seed)
    *lead, k = shape
    packed = torch.randint(0, 256, (*lead, k // 2), dtype=torch.uint8, generator=generator)
    return packed, torch.randint(low, high + 1, (*lead, k // 32), generator=generator).to(torch.uint8)


# ---- MXFP4 ----


def test_dequantise_every_code_and_scale() -> None:
    """The even element is in the low nibble; exact in fp32 for every scale, signs of zeros included."""
    packed = torch.tensor([0x10 * (2 * j + 1) + 2 * j for j in range(8)] * 2, dtype=torch.uint8).repeat(255, 1)
    scales = torch.arange(255, dtype=torch.uint8).view(255, 1)
    got = formats.dequantise_mxfp4(packed, scales)
    values = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)] * 2, dtype=torch.float64)
    wanted = values * torch.tensor([[2.0 ** (s - 127)] for s in range(255)], dtype=torch.float64)
    assert torch.equal(got, wanted.float()) and torch.equal(got.double()[:253], wanted[:253])
    assert torch.equal(torch.signbit(got), torch.signbit(wanted))
    assert torch.isnan(formats.dequantise_mxfp4(packed[0], torch.tensor([255], dtype=torch.uint8))).all()
    assert torch.equal(formats.dequantise_mxfp4(packed, scales.view(torch.float8_e8m0fnu)), got)
    half = formats.dequantise_mxfp4(packed[5:], scales[5:], torch.bfloat16)
    assert half.dtype == torch.bfloat16 and torch.equal(half.float(), got[5:])


def test_dequantise_refuses() -> None:
    packed = torch.zeros(3, 32, dtype=torch.uint8)
    for scales in (torch.zeros(3, 3), torch.zeros(2, 2), torch.zeros(6)):
        with pytest.raises(ValueError, match=r"scales must be one a 16 bytes of packed \(3, 32\)"):
            formats.dequantise_mxfp4(packed, scales.to(torch.uint8))
    with pytest.raises(ValueError, match="one a 16 bytes"):
        formats.dequantise_mxfp4(packed[:, :24], torch.zeros(3, 1, dtype=torch.uint8))


def test_quantise_inverts_dequantise() -> None:
    """All codes under every scale but those whose 6 is no fp32; a scale of 2^-127 is below the floor."""
    packed = torch.tensor([0x10 * (2 * j + 1) + 2 * j for j in range(8)] * 2, dtype=torch.uint8).repeat(252, 1)
    scales = torch.arange(1, 253, dtype=torch.uint8).view(252, 1)
    again, more = formats.quantise_mxfp4(formats.dequantise_mxfp4(packed, scales))
    assert torch.equal(again, packed) and torch.equal(more, scales)


@pytest.mark.parametrize("exponent", [-126, -20, 0, 40])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_quantise_at_every_midpoint(exponent: int, sign: float) -> None:
    """Ties to the even code, one fp32 step beside them to the nearer; the group's amax is 6, so the scale is known."""
    unit = 2.0**exponent
    middles = torch.tensor(MIDDLES) * unit
    below, above = (middles.nextafter(torch.tensor(end)) for end in (-math.inf, math.inf))
    group = [6 * unit, -0.0] + [sign * v for v in torch.cat([below, middles, above]).tolist()]
    group += [0.0] * (32 - len(group))
    got = groups_of(*formats.quantise_mxfp4(torch.tensor([group])))
    assert got == [quantise(group)] and got[0][1] == 127 + exponent
    ties = [code & 7 for code in got[0][0][9:16]]
    assert ties == [0, 2, 2, 4, 4, 6, 6]


@pytest.mark.parametrize("amax, byte", [(6.0, 127), (5.9999995, 127), (6.0000005, 128), (3.0, 126), (3.01, 127)])
def test_scales_round_up(amax: float, byte: int) -> None:
    group = [amax, -amax / 3] + [0.1 * i for i in range(30)]
    [(codes, scale)] = groups_of(*formats.quantise_mxfp4(torch.tensor([group])))
    group = torch.tensor(group).tolist()
    assert (codes, scale) == quantise(group) and scale == byte


def test_groups_by_the_definition() -> None:
    """Rows of different magnitude, several groups; bf16 and fp32 of the same values give the same bits."""
    x = torch.randn(2, 3, 160, generator=torch.Generator().manual_seed(1)) * torch.tensor([[1e-6], [1.0], [1e20]])
    x = x.bfloat16()
    packed, scales = formats.quantise_mxfp4(x)
    assert packed.shape == (2, 3, 80) and scales.shape == (2, 3, 5) and packed.dtype == scales.dtype == torch.uint8
    values = x.flatten().tolist()
    assert groups_of(packed, scales) == [quantise(values[i : i + 32]) for i in range(0, len(values), 32)]
    again, more = formats.quantise_mxfp4(x.float())
    assert torch.equal(again, packed) and torch.equal(more, scales)


def test_groups_of_nearly_nothing_and_of_the_largest() -> None:
    for value, other in ((0.0, -0.0), (1e-45, 0.0), (-1e-40, 2e-39), (2.0**-126, -(2.0**-127)), (LARGEST_FP32, -1.0)):
        group = [value, other] * 16
        packed, scales = formats.quantise_mxfp4(torch.tensor([group]))
        group = torch.tensor(group).tolist()
        assert groups_of(packed, scales) == [quantise(group)]
        assert not torch.isnan(formats.dequantise_mxfp4(packed, scales)).any()
    assert formats.round_trip_fp4(torch.full((32,), LARGEST_FP32)).tolist() == [math.inf] * 32  # 4 * 2^126
    assert formats.round_trip_fp4(torch.full((32,), 3.4 * 2.0**126)).tolist() == [3 * 2.0**126] * 32


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows_in_its_group_alone(bad: float) -> None:
    x = torch.ones(2, 96)
    x[1, 40] = bad
    for got in (formats.dequantise_mxfp4(*formats.quantise_mxfp4(x)), formats.round_trip_fp4(x)):
        assert torch.isnan(got[1, 32:64]).all() and int(torch.isnan(got).sum()) == 32


@pytest.mark.parametrize("at", [0, 31, 32, 63, 64, 95])
def test_a_large_value_moves_the_scale_of_its_group_alone(at: int) -> None:
    x = torch.ones(96)
    plain = formats.quantise_mxfp4(x)[1]
    x[at] = 100.0
    assert [j for j in range(3) if formats.quantise_mxfp4(x)[1][j] != plain[j]] == [at // 32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_is_what_a_reader_gets(dtype: torch.dtype) -> None:
    x = torch.randn(4, 3, 128, generator=torch.Generator().manual_seed(2)).to(dtype)
    before = x.clone()
    got = formats.round_trip_fp4(x)
    assert got.dtype == dtype and torch.equal(x, before)
    assert torch.equal(got, formats.dequantise_mxfp4(*formats.quantise_mxfp4(x), dtype))
    whole = formats.round_trip_fp4(x, 128)  # one scale for all 128
    for row, got in zip(x.flatten(0, 1).tolist(), whole.flatten(0, 1).tolist(), strict=True):
        codes, byte = quantise(row)
        assert got == [(-1) ** (code >> 3) * MAGNITUDES[code & 7] * 2.0 ** (byte - 127) for code in codes]


def test_quantise_refuses_a_partial_group() -> None:
    for function in (formats.quantise_mxfp4, formats.round_trip_fp4):
        with pytest.raises(ValueError, match=r"last axis in 32s, got \(2, 48\)"):
            function(torch.ones(2, 48))


# ---- conversions: the same values, or a refusal ----


@pytest.mark.parametrize("shape", [(5, 96), (2, 130, 160), (2, 3, 7, 64)])
def test_mxfp4_to_nvfp4_keeps_every_value(shape: tuple[int, ...]) -> None:
    """Scales over the whole range that fits, 17 powers of two, different in each matrix."""
    packed, scales = random_mxfp4(*shape, low=100, high=117, seed=3)
    scales.view(-1)[:2] = torch.tensor([100, 117])  # both ends in one matrix
    if scales.dim() > 2:
        scales[-1] += 20
    got, scale, scale_2 = formats.mxfp4_to_nvfp4(packed, scales)
    assert got is packed and scale.dtype == torch.float8_e4m3fn and scale_2.dtype == torch.float32
    assert scale.shape == (*shape[:-1], shape[-1] // 16) and scale_2.shape == shape[:-2]
    nvfp4.check_scales(scale)
    values = nvfp4.dequantise(got, scale, torch.float64) * scale_2.double()[..., None, None]
    assert torch.equal(values, formats.dequantise_mxfp4(packed, scales, torch.float64))
    assert (scale_2 == torch.exp2(scales.flatten(-2).amax(-1).float() - 127 - 8)).all()
    assert scale.float().max() == 256 and scale.float().min() == 2.0**-9


@pytest.mark.parametrize("largest", [0, 3, 17, 100, 254])
def test_mxfp4_to_nvfp4_at_either_end_of_the_scales(largest: int) -> None:
    packed, scales = random_mxfp4(4, 64, low=max(largest - 17, 0), high=largest, seed=4)
    got, scale, scale_2 = formats.mxfp4_to_nvfp4(packed, scales)
    values = nvfp4.dequantise(got, scale, torch.float64) * scale_2.double()
    units = torch.exp2(scales.double() - 127).repeat_interleave(32, -1)
    assert torch.equal(values, nvfp4.decode(packed).double() * units)


def test_mxfp4_to_nvfp4_refuses_a_wider_spread() -> None:
    packed = torch.full((2, 40, 32), 0x21, dtype=torch.uint8)
    scales = torch.full((2, 40, 2), 117, dtype=torch.uint8)
    scales[1, 3, 1], scales[1, 20, 0] = 99, 50
    with pytest.raises(ValueError, match=r"within 2\^17 of its largest; broken in matrix \(1,\), 2 rows: 3, 20$"):
        formats.mxfp4_to_nvfp4(packed, scales)
    scales[1] = 99
    scales[1, 39, 1] = 117
    with pytest.raises(ValueError, match=r"40 rows: 0, 1, 2, 3, 4, 5, 6, 7, \.\.\.$"):
        formats.mxfp4_to_nvfp4(packed, scales)
    formats.mxfp4_to_nvfp4(packed[:1], scales[:1])


def test_conversions_refuse_nan_scales() -> None:
    scales = torch.tensor([[100, 255]], dtype=torch.uint8)
    for convert in (formats.mxfp4_to_nvfp4, formats.mxfp4_to_fp8):
        with pytest.raises(ValueError, match=r"must not be NaN \(byte 255\); broken in matrix \(\), 1 rows: 0"):
            convert(torch.zeros(1, 32, dtype=torch.uint8), scales)


def test_groups_of_zeros_do_not_count() -> None:
    """Their scale may be anything (a quantiser's floor, say): +0 and -0 stay as they are, all else exactly."""
    packed, scales = random_mxfp4(3, 128, low=110, high=114, seed=5)
    packed[1, 16:32], packed[2, :16] = 0x80, 0x08
    scales[1, 1], scales[2, 0] = 1, 254
    wanted = nvfp4.decode(packed).double() * torch.exp2(scales.double() - 127).repeat_interleave(32, -1)
    got, scale, scale_2 = formats.mxfp4_to_nvfp4(packed, scales)
    values = nvfp4.dequantise(got, scale, torch.float64) * scale_2.double()
    assert torch.equal(values, wanted) and torch.equal(torch.signbit(values), torch.signbit(wanted))
    assert scale_2 == 2.0 ** (int(scales[0].max()) - 135)
    values = fp8.dequantise_blocks(*formats.mxfp4_to_fp8(packed, scales)).double()
    assert torch.equal(values, wanted) and torch.equal(torch.signbit(values), torch.signbit(wanted))


def test_a_matrix_of_zeros() -> None:
    packed, scales = torch.zeros(2, 130, 80, dtype=torch.uint8), torch.ones(2, 130, 5, dtype=torch.uint8)
    _, scale, scale_2 = formats.mxfp4_to_nvfp4(packed, scales)
    assert (scale.float() == 256).all() and (scale_2 == 2.0**-8).all()
    codes, blocks = formats.mxfp4_to_fp8(packed, scales)
    assert not codes.view(torch.uint8).any() and blocks.tolist() == [[[127, 127]] * 2] * 2


@pytest.mark.parametrize("spread", [0, 6, 14])
@pytest.mark.parametrize("shape", [(200, 320), (2, 5, 160), (1, 128, 128)])
def test_mxfp4_to_fp8_keeps_every_value(spread: int, shape: tuple[int, ...]) -> None:
    """Every code at every scale of the spread, blocks of different magnitude, last blocks partial."""
    packed, scales = random_mxfp4(*shape, low=100, high=100 + spread, seed=spread)
    scales[..., 4:] += 30
    codes, blocks = formats.mxfp4_to_fp8(packed, scales)
    assert codes.shape == shape and codes.dtype == torch.float8_e4m3fn and blocks.dtype == torch.uint8
    assert blocks.shape == (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    values = formats.dequantise_mxfp4(packed, scales)
    assert torch.equal(fp8.dequantise_blocks(codes, blocks), values)
    assert float(codes.float().abs().max()) <= 384
    top = scales[..., :128, :4].flatten(-2).amax(-1)
    assert torch.equal(blocks[..., 0, 0], top - 6)


@pytest.mark.parametrize("low, high", [(0, 3), (0, 14), (2, 9), (240, 254)])
def test_mxfp4_to_fp8_at_either_end_of_the_scales(low: int, high: int) -> None:
    packed, scales = random_mxfp4(6, 64, low=low, high=high, seed=6)
    if high == 254:
        packed &= 0x33  # magnitudes up to 1.5: values that fp32 holds
    codes, blocks = formats.mxfp4_to_fp8(packed, scales)
    assert torch.equal(fp8.dequantise_blocks(codes, blocks), formats.dequantise_mxfp4(packed, scales))


def test_mxfp4_to_fp8_refuses_what_would_change() -> None:
    """Fifteen powers of two below, 0.5, 1.5 and so on have no e4m3; 1 and 2 still have one."""
    packed = torch.full((2, 140, 80), 0x77, dtype=torch.uint8)
    scales = torch.full((2, 140, 5), 120, dtype=torch.uint8)
    packed[1, 135, :16], scales[1, 135, 0] = 0x42, 105  # 1.0 and 2.0
    codes, blocks = formats.mxfp4_to_fp8(packed, scales)
    assert torch.equal(fp8.dequantise_blocks(codes, blocks), formats.dequantise_mxfp4(packed, scales))
    packed[1, 135, 3] = 0x32  # 1.0 and 1.5
    with pytest.raises(ValueError, match=r"128x128 block .*; broken in matrix \(1,\), 1 rows: 135$"):
        formats.mxfp4_to_fp8(packed, scales)
    packed[1, 135, :16], scales[1, 135, 0] = 0x11, 105
    scales[1, 130, 4] = 50  # another block, whose other rows are far larger
    with pytest.raises(ValueError, match=r"2 rows: 130, 135$"):
        formats.mxfp4_to_fp8(packed, scales)


def test_released_experts_survive_quantising_and_converting() -> None:
    """Weights as a checkpoint would hold them: Gaussian, quantised to MXFP4, convert both ways without loss."""
    w = torch.randn(2, 192, 256, generator=torch.Generator().manual_seed(7)) * 0.02
    packed, scales = formats.quantise_mxfp4(w)
    values = formats.dequantise_mxfp4(packed, scales)
    assert float((values - w).norm() / w.norm()) < 0.15
    assert torch.equal(fp8.dequantise_blocks(*formats.mxfp4_to_fp8(packed, scales)), values)
    got, scale, scale_2 = formats.mxfp4_to_nvfp4(packed, scales.view(torch.float8_e8m0fnu))
    assert torch.equal(nvfp4.dequantise(got, scale) * scale_2[:, None, None], values)


# ---- Hadamard ----


def sylvester(d: int) -> list[list[int]]:
    if d == 1:
        return [[1]]
    half = sylvester(d // 2)
    return [row + row for row in half] + [row + [-v for v in row] for row in half]


@pytest.mark.parametrize("d", [1, 2, 8, 128])
def test_hadamard_is_sylvesters(d: int) -> None:
    matrix = torch.tensor(sylvester(d), dtype=torch.float64) / math.sqrt(d)
    got = formats.hadamard(torch.eye(d))
    assert torch.allclose(got.double(), matrix, rtol=2.0**-23, atol=0)
    x = torch.randn(3, 5, d, generator=torch.Generator().manual_seed(8))
    wanted = x.double() @ matrix
    assert float((formats.hadamard(x).double() - wanted).abs().max()) < 1e-5
    assert torch.allclose(formats.hadamard(formats.hadamard(x)), x, atol=1e-5)


def test_hadamard_rounds_once() -> None:
    """bf16 in and out; whole numbers whose sums fp32 holds, so the only rounding is the last."""
    x = torch.randint(-64, 64, (7, 64), generator=torch.Generator().manual_seed(9)).bfloat16()
    wanted = (x.double() @ torch.tensor(sylvester(64), dtype=torch.float64) / 8).bfloat16()
    got = formats.hadamard(x)
    assert got.dtype == torch.bfloat16 and torch.equal(got, wanted)


@pytest.mark.parametrize("d", [0, 3, 96])
def test_hadamard_refuses(d: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        formats.hadamard(torch.ones(2, d))


def test_nothing_waits_for_a_device() -> None:
    """Tensors without data: whatever reads a value on the host raises."""
    x = torch.empty(3, 128, device="meta")
    assert formats.dequantise_mxfp4(*formats.quantise_mxfp4(x)).shape == (3, 128)
    assert formats.round_trip_fp4(formats.hadamard(x)).shape == (3, 128)
