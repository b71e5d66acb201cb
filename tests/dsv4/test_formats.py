"""weights/formats.py: conversions bit for bit, Hadamard. What every format does is in tests/common/test_formats.py."""

import dataclasses
import math

import pytest
import torch

from problems.common import fp8, nvfp4
from problems.dsv4_forward.weights import formats, packing
from tests.support.formats import LARGEST_FP32, MXFP4


def random_mxfp4(*shape: int, low: int, high: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes and scale bytes low..high of matrices (..., n, k)."""
    generator = torch.Generator().manual_seed(seed)
    *lead, k = shape
    packed = torch.randint(0, 256, (*lead, k // 2), dtype=torch.uint8, generator=generator)
    return packed, torch.randint(low, high + 1, (*lead, k // 32), generator=generator).to(torch.uint8)


def test_partial_groups_are_refused() -> None:
    packed = torch.zeros(3, 32, dtype=torch.uint8)
    for scales in (torch.zeros(3, 3), torch.zeros(2, 2), torch.zeros(6)):
        with pytest.raises(ValueError, match=r"scales must be one a 16 bytes of packed \(3, 32\)"):
            formats.dequantise_mxfp4(packed, scales.to(torch.uint8))
    with pytest.raises(ValueError, match="one a 16 bytes"):
        formats.dequantise_mxfp4(packed[:, :24], torch.zeros(3, 1, dtype=torch.uint8))
    for function in (formats.quantise_mxfp4, formats.round_trip_fp4):
        with pytest.raises(ValueError, match=r"last axis in 32s, got \(2, 48\)"):
            function(torch.ones(2, 48))


def test_values_beyond_fp32_become_infinite() -> None:
    assert formats.round_trip_fp4(torch.full((32,), LARGEST_FP32)).tolist() == [math.inf] * 32  # 4 * 2^126
    assert formats.round_trip_fp4(torch.full((32,), 3.4 * 2.0**126)).tolist() == [3 * 2.0**126] * 32


def test_round_trip_with_one_scale_for_128() -> None:
    x = torch.randn(12, 128, generator=torch.Generator().manual_seed(2))
    whole = dataclasses.replace(MXFP4, group=128)
    wanted = [[whole.value(code, byte) for code in codes] for codes, byte in whole.wanted(x)]
    assert formats.round_trip_fp4(x, 128).tolist() == wanted


def as_nvfp4(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """fp64 values of what it is converted to."""
    got, scale, scale_2 = formats.mxfp4_to_nvfp4(packed, scales)
    return nvfp4.dequantise(got, scale, torch.float64) * scale_2.double()[..., None, None]


def units_of(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """fp64 values of MXFP4, at any scale."""
    return nvfp4.decode(packed).double() * torch.exp2(scales.double() - 127).repeat_interleave(32, -1)


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
    assert torch.equal(as_nvfp4(packed, scales), formats.dequantise_mxfp4(packed, scales, torch.float64))
    assert (scale_2 == torch.exp2(scales.flatten(-2).amax(-1).float() - 127 - 8)).all()
    assert scale.float().max() == 256 and scale.float().min() == 2.0**-9


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
    wanted, converted = units_of(packed, scales), fp8.dequantise_blocks(*formats.mxfp4_to_fp8(packed, scales)).double()
    for values in (as_nvfp4(packed, scales), converted):
        assert torch.equal(values, wanted) and torch.equal(torch.signbit(values), torch.signbit(wanted))
    assert formats.mxfp4_to_nvfp4(packed, scales)[2] == 2.0 ** (int(scales[0].max()) - 135)


def test_a_matrix_of_zeros() -> None:
    packed, scales = torch.zeros(2, 130, 80, dtype=torch.uint8), torch.ones(2, 130, 5, dtype=torch.uint8)
    _, scale, scale_2 = formats.mxfp4_to_nvfp4(packed, scales)
    assert (scale.float() == 256).all() and (scale_2 == 2.0**-8).all()
    codes, blocks = formats.mxfp4_to_fp8(packed, scales)
    assert not codes.view(torch.uint8).any() and blocks.tolist() == [[[127, 127]] * 2] * 2
    made = packing.pack(torch.zeros(4, 32), "nvfp4", torch.bfloat16)
    assert float(made["scale_2"]) > 0 and not bool(nvfp4.decode(made["weight"]).any())


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
    assert torch.equal(fp8.dequantise_blocks(codes, blocks), values) and float(codes.float().abs().max()) <= 384
    top = scales[..., :128, :4].flatten(-2).amax(-1)
    assert torch.equal(blocks[..., 0, 0], top - 6)


@pytest.mark.parametrize("low, high", [(0, 3), (0, 14), (2, 9), (240, 254)])
def test_mxfp4_to_fp8_at_either_end_of_the_scales(low: int, high: int) -> None:
    packed, scales = random_mxfp4(6, 64, low=low, high=high, seed=6)
    if high == 254:
        packed &= 0x33  # magnitudes up to 1.5: values that fp32 holds
    assert torch.equal(fp8.dequantise_blocks(*formats.mxfp4_to_fp8(packed, scales)), units_of(packed, scales).float())


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


def test_hadamard_rounds_once() -> None:
    """bf16 in and out; whole numbers whose sums fp32 holds, so the only rounding is the last."""
    x = torch.randint(-64, 64, (7, 64), generator=torch.Generator().manual_seed(9)).bfloat16()
    wanted = (x.double() @ torch.tensor(sylvester(64), dtype=torch.float64) / 8).bfloat16()
    got = formats.hadamard(x)
    assert got.dtype == torch.bfloat16 and torch.equal(got, wanted)


def test_hadamard_refuses_and_waits_for_no_device() -> None:
    for d in (0, 3, 96):
        with pytest.raises(ValueError, match="power of two"):
            formats.hadamard(torch.ones(2, d))
    assert formats.hadamard(torch.empty(3, 128, device="meta")).shape == (3, 128)  # without data
