"""problems/common/fp8.py, bit for bit: scale bytes, blocks, and what only FP8 does. See also test_formats.py."""

import math
from fractions import Fraction

import pytest
import torch

from problems.common import fp8
from tests.support.formats import LARGEST_FP32, beside, least_power, minifloat


def e4m3_value(byte: int) -> float:
    """The value of an e4m3 byte; 0x7F and 0xFF are NaN."""
    return math.nan if byte & 0x7F == 0x7F else float(minifloat(byte, 4, 3))


def least_scale(amax: float, largest: float, floor: float) -> int:
    return least_power(int(largest), floor)(Fraction(amax))


def test_decode_ue8m0_every_byte() -> None:
    byte = torch.arange(256, dtype=torch.uint8)
    got = fp8.decode_ue8m0(byte)
    assert got.dtype == torch.float32
    assert [Fraction(v) for v in got[:255].tolist()] == [Fraction(2) ** (e - 127) for e in range(255)]
    assert math.isnan(got[255])
    assert torch.equal(fp8.decode_ue8m0(byte[:255].view(torch.float8_e8m0fnu)), got[:255])


@pytest.mark.parametrize("largest", [448.0, 6.0])
def test_ue8m0_scale_beside_every_power_of_two(largest: float) -> None:
    """largest * 2^e takes 2^e itself; one fp32 step above it takes the next, one below it does not. And anywhere."""
    floor, generator = largest * 2.0**-126, torch.Generator().manual_seed(3)
    amax = [v for e in range(-126, 120) for v in beside(largest * 2.0**e)]
    amax += (torch.rand(300, generator=generator) * torch.exp2(torch.arange(-150.0, 150)).clamp(max=2.0**126)).tolist()
    got = fp8.ue8m0_scale(torch.tensor(amax), largest, floor)
    assert got.dtype == torch.uint8
    assert got.tolist() == [least_scale(v, largest, floor) for v in amax]


def test_ue8m0_scale_at_the_ends() -> None:
    amax = torch.tensor([0.0, 1e-45, 1e-4, LARGEST_FP32, math.inf, math.nan, -math.nan])
    got = fp8.ue8m0_scale(amax, 448.0, 1e-4).tolist()
    assert got == [105, 105, 105, 247, 255, 255, 255]  # 2^-22 >= 1e-4 / 448, 2^120 >= 2^128 / 448
    assert fp8.ue8m0_scale(torch.zeros(1), 6.0, 6 * 2.0**-126).tolist() == [1]


def test_decode_e4m3_every_byte() -> None:
    got = fp8.decode_e4m3(torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(4, 64))
    assert got.shape == (4, 64) and got.dtype == torch.float32
    for byte, value in enumerate(got.flatten().tolist()):
        wanted = e4m3_value(byte)
        assert math.isnan(value) if math.isnan(wanted) else value == wanted
        assert math.isnan(value) or math.copysign(1, value) == (-1 if byte & 0x80 else 1)


def test_groups_of_the_largest_values() -> None:
    values = [LARGEST_FP32, -LARGEST_FP32, 1.0, 247.9 * 2.0**120]
    assert fp8.round_trip(torch.tensor(values), 4).tolist() == [math.inf, -math.inf, 0.0, 240 * 2.0**120]


CODES = torch.zeros(2, 300).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("function", "arguments", "said"),
    [
        (fp8.ue8m0_scale, (torch.ones(1).double(), 448.0, 1e-4), "amax must be float32"),
        (fp8.ue8m0_scale, (torch.ones(1), 448.0, 0.0), r"floor must be 448 \* 2\^-126 or more"),
        (fp8.dequantise_groups, (CODES, torch.zeros(2, 2).byte(), 128), r"scales must be \(2, 3\)"),
        (fp8.dequantise_groups, (CODES.float(), torch.zeros(2, 3).byte(), 128), "codes must be float8_e4m3fn"),
        (fp8.dequantise_blocks, (CODES[:1].expand(130, 300), torch.zeros(1, 3).byte()), "2 rows of blocks for 130"),
    ],
)
def test_other_forms_are_refused(function, arguments, said) -> None:
    with pytest.raises(ValueError, match=said):
        function(*arguments)


def test_round_trip_into_a_tensor() -> None:
    """A view of a wider one, of which the rest stays; or x itself."""
    x = torch.randn(2, 3, 300, generator=torch.Generator().manual_seed(1))
    wanted = fp8.round_trip(x, 128)
    codes, scales = fp8.quantise_groups(x, 128)
    assert torch.equal(fp8.dequantise_groups(codes.mT.contiguous().mT, scales, 128), wanted)  # not contiguous
    wider = torch.full((2, 3, 305), 9.0)
    assert fp8.round_trip(x, 128, out=wider[..., :300]).data_ptr() == wider.data_ptr()
    assert torch.equal(wider[..., :300], wanted) and (wider[..., 300:] == 9).all()
    fp8.round_trip(x, 128, out=x)
    assert torch.equal(x, wanted)


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
                assert torch.equal(codes[here].flatten().view(torch.uint8), want.view(torch.uint8))
                unit = 2.0 ** (scale.item() - 127)
                flat = codes[here].flatten()[:50].view(torch.uint8).tolist()
                assert values[here].flatten()[:50].tolist() == [e4m3_value(byte) * unit for byte in flat]
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


def test_blocks_take_e8m0_give_bf16_and_do_not_wait_for_a_device() -> None:
    """The last by tensors without data: whatever reads a value on the host raises."""
    w = torch.randn(130, 140, generator=torch.Generator().manual_seed(4))
    codes, scales = fp8.quantise_blocks(w)
    values = fp8.dequantise_blocks(codes, scales)
    assert torch.equal(fp8.dequantise_blocks(codes, scales.view(torch.float8_e8m0fnu)), values)
    assert torch.equal(fp8.dequantise_blocks(codes, scales, torch.bfloat16).float(), values)  # exact in bf16
    assert fp8.dequantise_blocks(*fp8.quantise_blocks(torch.empty(3, 300, device="meta"))).shape == (3, 300)
