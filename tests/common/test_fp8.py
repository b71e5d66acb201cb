"""problems/common/fp8.py: blocks, and what only FP8 does. Its groups are in test_formats.py, bit for bit."""

import pytest
import torch

from problems.common import fp8

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


def test_scales_at_the_ends() -> None:
    amax = torch.tensor([0.0, 1e-45, 1e-4, torch.finfo(torch.float32).max, torch.inf, torch.nan, -torch.nan])
    # 2^-22 >= 1e-4 / 448, 2^120 >= 2^128 / 448
    assert fp8.ue8m0_scale(amax, 448.0, 1e-4).tolist() == [105, 105, 105, 247, 255, 255, 255]


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
                assert torch.equal(codes[here].flatten().view(torch.uint8), want.view(torch.uint8))
                assert torch.equal(values[here].flatten(), fp8.dequantise_groups(want, scale, len(block)))


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
