"""What a call leaves out of its outputs is wrong, in every dtype: outputs are poisoned before it."""

import pytest
import torch

from harness.checker import memory
from harness.runner import tree

SIZES = (8, 24)
FIXED = [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.int64]
SECRET = [torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.float4_e2m1fn_x2]


def made(dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(SIZES, dtype=torch.uint8 if dtype == torch.float4_e2m1fn_x2 else dtype).view(dtype)


@pytest.mark.parametrize("dtype", [*FIXED, *SECRET, torch.complex64], ids=str)
def test_no_one_value_is_right_everywhere(dtype):
    one, other = made(dtype), made(dtype)
    memory.poison([one, other, made(dtype)], [0, 1])
    bits = [tree.raw(tensor).clone() for tensor in (one, other)]
    assert torch.equal(*bits) == (dtype not in SECRET)
    if dtype in SECRET:
        assert len(bits[0].unique()) > 1 and bits[0].max() <= (1 if dtype == torch.bool else 255)
    elif dtype.is_floating_point or dtype.is_complex:
        assert one.to(torch.complex128 if dtype.is_complex else torch.float64).isnan().all()
    else:
        assert (one == torch.iinfo(dtype).min).all()


def test_an_element_of_e8m0_is_nan_or_the_largest_value():
    """So that a check by bits finds the ones that are left out where NaN is the answer, and where it is not."""
    one, other = made(torch.float8_e8m0fnu), made(torch.float8_e8m0fnu)
    memory.poison([one, other], [0, 1])
    assert one.view(torch.uint8).unique().tolist() == [254, 255]
    assert not torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float8_e8m0fnu], ids=str)
def test_only_the_elements_of_a_view_are_filled(dtype):
    whole = torch.zeros(64, 9, dtype=dtype)
    memory.poison([whole[:, ::2], whole[:0], torch.zeros((), dtype=dtype)], [0, 1, 2])
    bits = whole.view(torch.uint8)
    assert bits[:, ::2].any() and not bits[:, 1::2].any()
