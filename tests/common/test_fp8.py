"""problems/common/fp8.py, bit for bit, against the formats' definitions in exact arithmetic."""

import bisect
import itertools
import math
from fractions import Fraction

import pytest
import torch

from problems.common import fp8

LARGEST_FP32 = torch.finfo(torch.float32).max


def e4m3_value(byte: int) -> float:
    """The value of an e4m3 byte by its bits: sign, 4 of exponent (bias 7), 3 of mantissa; 0x7F and 0xFF are NaN."""
    if byte & 0x7F == 0x7F:
        return math.nan
    exponent, mantissa = byte >> 3 & 15, byte & 7
    magnitude = math.ldexp(8 + mantissa if exponent else mantissa, max(exponent, 1) - 10)
    return -magnitude if byte & 0x80 else magnitude


MAGNITUDES = [Fraction(e4m3_value(byte)) for byte in range(0x7F)]


def nearest_e4m3(value: Fraction) -> int:
    """The magnitude byte nearest to `value` >= 0, the even one of two equally near."""
    above = bisect.bisect_left(MAGNITUDES, value)
    beside = range(max(above - 1, 0), min(above + 1, 0x7F))
    return min(beside, key=lambda byte: (abs(MAGNITUDES[byte] - value), byte % 2))


def least_scale(amax: float, largest: float, floor: float) -> int:
    """The least byte whose power of two times `largest` holds amax and the floor, by search."""
    wanted = max(amax, floor)  # both products below are exact in fp64
    return next(byte for byte in range(255) if 2.0 ** (byte - 127) * largest >= wanted)


def quantise(values: list[float], floor: float) -> tuple[list[int], int]:
    """One group by the definition: (bytes of its codes, scale byte)."""
    scale = least_scale(max(map(abs, values)), 448.0, floor)
    unit = Fraction(2) ** (scale - 127)
    return [nearest_e4m3(abs(Fraction(v)) / unit) | 0x80 * (math.copysign(1, v) < 0) for v in values], scale


def as_bytes(tensor: torch.Tensor) -> list:
    return tensor.view(torch.uint8).tolist()


def neighbours(value: float) -> list[float]:
    """`value`, an fp32, between the fp32 below and the one above it."""
    x = torch.tensor(value)
    return [float(x.nextafter(torch.tensor(-math.inf))), value, float(x.nextafter(torch.tensor(math.inf)))]


# ---- scale bytes ----


def test_decode_ue8m0_every_byte() -> None:
    byte = torch.arange(256, dtype=torch.uint8)
    got = fp8.decode_ue8m0(byte)
    assert got.dtype == torch.float32
    assert [Fraction(v) for v in got[:255].tolist()] == [Fraction(2) ** (e - 127) for e in range(255)]
    assert math.isnan(got[255])
    assert torch.equal(fp8.decode_ue8m0(byte[:255].view(torch.float8_e8m0fnu)), got[:255])


@pytest.mark.parametrize("largest", [448.0, 6.0])
def test_ue8m0_scale_beside_every_power_of_two(largest: float) -> None:
    """largest * 2^e takes 2^e itself; one fp32 step above it takes the next, one below it does not."""
    floor = largest * 2.0**-126
    amax = [v for e in range(-126, 120) for v in neighbours(largest * 2.0**e)]
    got = fp8.ue8m0_scale(torch.tensor(amax), largest, floor)
    assert got.dtype == torch.uint8
    assert got.tolist() == [least_scale(v, largest, floor) for v in amax]


def test_ue8m0_scale_anywhere() -> None:
    generator = torch.Generator().manual_seed(3)
    amax = torch.rand(300, generator=generator) * torch.exp2(torch.randint(-140, 127, (300,), generator=generator))
    wanted = [least_scale(v, 448.0, 1e-4) for v in amax.tolist()]
    assert fp8.ue8m0_scale(amax.view(3, 100), 448.0, 1e-4).flatten().tolist() == wanted


def test_ue8m0_scale_at_the_ends() -> None:
    amax = torch.tensor([0.0, 1e-45, 1e-4, LARGEST_FP32, math.inf, math.nan, -math.nan])
    got = fp8.ue8m0_scale(amax, 448.0, 1e-4).tolist()
    assert got == [105, 105, 105, 247, 255, 255, 255]  # 2^-22 >= 1e-4 / 448, 2^120 >= 2^128 / 448
    assert fp8.ue8m0_scale(torch.zeros(1), 6.0, 6 * 2.0**-126).tolist() == [1]


def test_ue8m0_scale_refuses() -> None:
    with pytest.raises(ValueError, match="amax must be float32"):
        fp8.ue8m0_scale(torch.ones(1, dtype=torch.float64), 448.0, 1e-4)
    with pytest.raises(ValueError, match=r"floor must be 448 \* 2\^-126 or more"):
        fp8.ue8m0_scale(torch.ones(1), 448.0, 0.0)


# ---- codes ----


def test_decode_e4m3_every_byte() -> None:
    got = fp8.decode_e4m3(torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(4, 64))
    assert got.shape == (4, 64) and got.dtype == torch.float32
    for byte, value in enumerate(got.flatten().tolist()):
        wanted = e4m3_value(byte)
        assert math.isnan(value) if math.isnan(wanted) else value == wanted
        assert math.isnan(value) or math.copysign(1, value) == (-1 if byte & 0x80 else 1)


@pytest.mark.parametrize("exponent", [-20, 0, 40])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_codes_at_every_midpoint(exponent: int, sign: float) -> None:
    """Ties go to the even code, one fp32 step to either side of them to the nearer; subnormals and 0 among them."""
    unit = 2.0**exponent
    middles = [float(low + high) / 2 for low, high in itertools.pairwise(MAGNITUDES)]
    values = [sign * v * unit for middle in middles for v in neighbours(middle)]
    group = [448.0 * unit, -0.0, *values]
    codes, scale = fp8.quantise_groups(torch.tensor(group), len(group), floor=2.0**-100)
    assert scale.tolist() == [127 + exponent]
    assert as_bytes(codes) == quantise(group, 2.0**-100)[0]


def test_codes_of_codes_are_themselves() -> None:
    """Every finite code, subnormals too, under the scale that its group of all codes gets."""
    codes = torch.cat([torch.arange(0x7F), torch.arange(0x80, 0xFF)]).to(torch.uint8).view(torch.float8_e4m3fn)
    for byte in (106, 127, 200):
        scales = torch.tensor([byte], dtype=torch.uint8)
        again, got = fp8.quantise_groups(fp8.dequantise_groups(codes, scales, 254), 254)
        assert as_bytes(again) == as_bytes(codes) and got.tolist() == [byte]


@pytest.mark.parametrize("group, k", [(128, 300), (64, 300), (64, 448), (128, 7), (16, 17)])
def test_groups_by_the_definition(group: int, k: int) -> None:
    """Rows of different magnitude, last groups partial; bf16 and fp32 of the same values give the same bits."""
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(3, k, generator=generator) * torch.tensor([[1e-3], [1.0], [3e4]])
    x = x.bfloat16()
    codes, scales = fp8.quantise_groups(x, group)
    assert codes.shape == x.shape and codes.dtype == torch.float8_e4m3fn and codes.is_contiguous()
    assert scales.shape == (3, -(-k // group)) and scales.dtype == torch.uint8
    for row, row_codes, row_scales in zip(x.tolist(), as_bytes(codes), scales.tolist(), strict=True):
        for j, scale in enumerate(row_scales):
            part = slice(j * group, (j + 1) * group)
            assert (row_codes[part], scale) == quantise(row[part], 1e-4)
    again, more = fp8.quantise_groups(x.float(), group)
    assert as_bytes(again) == as_bytes(codes) and torch.equal(more, scales)


@pytest.mark.parametrize("at", [0, 127, 128, 255, 256, 299])
def test_a_large_value_moves_the_scale_of_its_group_alone(at: int) -> None:
    x = torch.ones(300)
    plain = fp8.quantise_groups(x, 128)[1]
    x[at] = 1e6
    got = fp8.quantise_groups(x, 128)[1]
    assert [j for j in range(3) if got[j] != plain[j]] == [at // 128]


def test_groups_of_nearly_nothing() -> None:
    """Zeros, one denormal, all below the floor: finite, with the floor's scale; signs of zeros are kept."""
    for values in ([0.0, -0.0], [1e-45, 0.0], [-1e-40, 1e-30], [1e-4, -1e-4], [1e-5, -3e-8]):
        codes, scales = fp8.quantise_groups(torch.tensor(values), 2)
        assert (as_bytes(codes), scales.item()) == quantise(values, 1e-4)
        assert scales.item() == 105
        assert torch.isfinite(fp8.dequantise_groups(codes, scales, 2)).all()


def test_groups_of_the_largest_values() -> None:
    values = [LARGEST_FP32, -LARGEST_FP32, 1.0, 247.9 * 2.0**120]
    codes, scales = fp8.quantise_groups(torch.tensor(values), 4)
    assert (as_bytes(codes), scales.item()) == quantise(values, 1e-4)
    assert fp8.round_trip(torch.tensor(values), 4).tolist() == [math.inf, -math.inf, 0.0, 240 * 2.0**120]


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows_in_its_group_alone(bad: float) -> None:
    x = torch.ones(2, 256)
    x[1, 130] = bad
    codes, scales = fp8.quantise_groups(x, 128)
    assert scales.tolist() == [[119, 119], [119, 255]]
    values = fp8.dequantise_groups(codes, scales, 128)
    assert torch.isnan(values[1, 128:]).all() and torch.equal(values[1, :128], x[1, :128])
    assert torch.equal(torch.isnan(fp8.round_trip(x, 128)), torch.isnan(values))


def test_dequantise_every_code_and_scale() -> None:
    """Exactly in fp32, also where scale or value is subnormal; one rounding elsewhere."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).repeat(255, 1)
    scales = torch.arange(255, dtype=torch.uint8).view(255, 1)
    unit = torch.tensor([[2.0 ** (s - 127)] for s in range(255)], dtype=torch.float64)
    wanted = torch.tensor([e4m3_value(b) for b in range(256)], dtype=torch.float64) * unit
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        got = fp8.dequantise_groups(codes, scales, 256, dtype)
        assert got.dtype == dtype
        assert torch.equal(got.nan_to_num(7, 8, 9), wanted.float().to(dtype).nan_to_num(7, 8, 9))
        assert torch.equal(torch.signbit(got[:, :127]), torch.signbit(wanted[:, :127]))


def test_dequantise_refuses() -> None:
    codes = torch.zeros(2, 300, dtype=torch.uint8).view(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"scales must be \(2, 3\) for codes \(2, 300\), got \(2, 2\)"):
        fp8.dequantise_groups(codes, torch.zeros(2, 2, dtype=torch.uint8), 128)
    with pytest.raises(ValueError, match="codes must be float8_e4m3fn"):
        fp8.dequantise_groups(codes.float(), torch.zeros(2, 3, dtype=torch.uint8), 128)
    with pytest.raises(ValueError, match="2 rows of blocks for 130 rows"):
        fp8.dequantise_blocks(codes[:1].expand(130, 300), torch.zeros(1, 3, dtype=torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group, k", [(64, 448), (128, 300)])
def test_round_trip_is_what_a_reader_gets(dtype: torch.dtype, group: int, k: int) -> None:
    x = (torch.randn(2, 3, k, generator=torch.Generator().manual_seed(1)) * 1e-3).to(dtype)
    x[1, 2] = 0
    wanted = fp8.dequantise_groups(*fp8.quantise_groups(x, group), group, dtype)
    before = x.clone()
    got = fp8.round_trip(x, group)
    assert got.dtype == dtype and torch.equal(got, wanted) and torch.equal(x, before)
    wider = torch.full((2, 3, k + 5), 9.0, dtype=dtype)
    assert fp8.round_trip(x, group, out=wider[..., :k]).data_ptr() == wider.data_ptr()
    assert torch.equal(wider[..., :k], wanted) and (wider[..., k:] == 9).all()
    fp8.round_trip(x, group, out=x)
    assert torch.equal(x, wanted)
    assert torch.equal(fp8.round_trip(x, group), wanted)  # what is on the grid stays


def test_inputs_that_are_not_contiguous() -> None:
    x = torch.randn(300, 4, generator=torch.Generator().manual_seed(2))
    for t in (x.T, torch.randn(4, 600)[:, ::2]):
        codes, scales = fp8.quantise_groups(t, 128)
        again, more = fp8.quantise_groups(t.contiguous(), 128)
        assert as_bytes(codes) == as_bytes(again) and torch.equal(scales, more)
        assert torch.equal(fp8.dequantise_groups(codes.mT.contiguous().mT, scales, 128), fp8.round_trip(t, 128))


# ---- 128x128 blocks ----


@pytest.mark.parametrize("n, k", [(200, 300), (128, 384), (5, 130), (257, 128)])
def test_blocks_by_the_definition(n: int, k: int) -> None:
    """Two matrices, blocks of different magnitude; a whole block as one group must give the same."""
    w = torch.randn(2, n, k, generator=torch.Generator().manual_seed(n)) * torch.tensor([1e-6, 30.0])[:, None, None]
    w[0, :128, :128] *= 1000
    w[1, -1, -1] = 0.0
    codes, scales = fp8.quantise_blocks(w)
    assert codes.shape == w.shape and codes.is_contiguous() and codes.dtype == torch.float8_e4m3fn
    assert scales.shape == (2, -(-n // 128), -(-k // 128)) and scales.dtype == torch.uint8
    values = fp8.dequantise_blocks(codes, scales)
    for m in range(2):
        for i in range(0, n, 128):
            for j in range(0, k, 128):
                here = (m, slice(i, i + 128), slice(j, j + 128))
                block = w[here].flatten()
                want, scale = fp8.quantise_groups(block, len(block), fp8.BLOCK_FLOOR)
                assert scale.item() == scales[m, i // 128, j // 128]
                assert scale.item() == least_scale(float(block.abs().max()), 448.0, fp8.BLOCK_FLOOR)
                assert as_bytes(codes[here].flatten()) == as_bytes(want)
                unit = 2.0 ** (scale.item() - 127)
                flat = codes[here].flatten()[:50]
                assert values[here].flatten()[:50].tolist() == [e4m3_value(b) * unit for b in as_bytes(flat)]
                error = (values[here] - w[here]).abs()
                assert (error <= torch.maximum(w[here].abs() * 2.0**-4, torch.tensor(unit * 2.0**-10))).all()


def test_blocks_of_zeros_and_denormals() -> None:
    w = torch.zeros(256, 256)
    w[130, 3] = 1e-45
    w[200, 200] = -(2.0**-130)
    codes, scales = fp8.quantise_blocks(w)
    assert scales.tolist() == [[1, 1], [1, 1]]
    got = fp8.dequantise_blocks(codes, scales)
    assert torch.equal(got, torch.where(w == -(2.0**-130), w, 0.0))  # 2^-130 is 2^-4 under 2^-126; 1e-45 is 2^-149


def test_blocks_take_e8m0_and_give_bf16() -> None:
    w = torch.randn(130, 140, generator=torch.Generator().manual_seed(4))
    codes, scales = fp8.quantise_blocks(w)
    values = fp8.dequantise_blocks(codes, scales)
    assert torch.equal(fp8.dequantise_blocks(codes, scales.view(torch.float8_e8m0fnu)), values)
    assert torch.equal(fp8.dequantise_blocks(codes, scales, torch.bfloat16).float(), values)  # exact in bf16


def test_nothing_waits_for_a_device() -> None:
    """Tensors without data: whatever reads a value on the host raises."""
    x = torch.empty(3, 300, device="meta")
    codes, scales = fp8.quantise_groups(x, 128)
    assert fp8.dequantise_groups(codes, scales, 128).shape == fp8.round_trip(x, 128).shape == (3, 300)
    assert fp8.dequantise_blocks(*fp8.quantise_blocks(x)).shape == (3, 300)
