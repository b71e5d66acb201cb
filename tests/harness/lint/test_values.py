"""Tensors of every element type as numbers and as bits (harness/checker/values.py)."""

from types import SimpleNamespace

import pytest
import torch

from harness.checker import inputs, values
from harness.runner.failure import RefusedError

FORMATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_neighbours_are_one_value_apart(dtype):
    """Against every pair of the format's values near zero, one, its largest one and its sign changes."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    largest = torch.tensor([torch.finfo(dtype).max], dtype=dtype).view(width)
    steps = torch.arange(3).to(width)
    bits = [steps, torch.ones(1, dtype=dtype).view(width) + steps - 1, largest - 2 + steps]
    up = torch.cat(bits).view(dtype)
    given = torch.cat([-up.double(), up.double()]).to(dtype)
    ordered = given.double().unique().tolist()
    # zero, 2 below and 2 above it; 1 and its two neighbours; the three largest: those groups are consecutive values
    chains = [ordered[:3], ordered[3:6], ordered[6:11], ordered[11:14], ordered[14:]]
    place = {value: (chain, i) for chain, given in enumerate(chains) for i, value in enumerate(given)}
    for one in ordered:
        for two in ordered:
            wanted = place[one][0] == place[two][0] and abs(place[one][1] - place[two][1]) <= 1
            pair = [torch.tensor([value], dtype=torch.float64).to(dtype) for value in (one, two)]
            assert values.neighbours(*pair) == wanted, (one, two)


def test_neighbours_of_what_is_not_finite_and_of_integers():
    inf, nan, top = float("inf"), float("nan"), torch.finfo(torch.float16).max

    def near(one, two, dtype=torch.float16):
        return values.neighbours(torch.tensor([one], dtype=dtype), torch.tensor([two], dtype=dtype))

    assert near(inf, inf) and near(nan, nan) and near(0.0, -0.0)
    assert not near(inf, top) and not near(nan, inf) and not near(inf, -inf)
    assert near(3, 3, torch.int32) and not near(3, 4, torch.int32)


@pytest.mark.parametrize(
    ("bits", "dtype"), [(7, torch.bfloat16), (10, torch.float16), (3, torch.float8_e4m3fn), (23, torch.float32)]
)
def test_rounding_keeps_the_bits_of_the_format(bits, dtype):
    random = torch.randn(2000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    given = torch.cat([random, torch.tensor([1 + 2.0 ** -(bits + 1), 1 + 3 * 2.0 ** -(bits + 1), float("inf")])])
    given = given[given.abs() > 0.1]  # within the normal numbers of each
    finite = torch.isfinite(given)
    assert torch.equal(values.rounded(given, bits)[finite], given[finite].to(dtype).double())
    assert torch.equal(values.rounded(given, bits)[~finite], given[~finite])


def test_casting_saturates_and_packed_values_are_read_low_nibble_first():
    given = torch.tensor([1e30, -1e30, float("nan"), 2.5], dtype=torch.float64)
    assert values.cast(given, torch.float8_e4m3fn)[:2].double().tolist() == [448, -448]
    assert values.cast(given, torch.float16)[:2].tolist() == [65504, -65504]
    assert values.cast(given, torch.uint8).tolist() == [255, 0, 0, 2]
    assert values.cast(given, torch.int32).tolist() == [2**31 - 1, -(2**31), 0, 2]
    assert values.cast(given, torch.bool).tolist() == [True] * 4
    packed = values.cast(given, values.FP4)
    assert packed.dtype == values.FP4 and packed.view(torch.uint8).tolist() == [255, 0, 0, 2]
    packed = torch.tensor([[0x21, 0xF7]], dtype=torch.uint8).view(values.FP4)
    assert values.numbers(packed).tolist() == [0.5, 1.0, 6.0, -6.0]
    assert values.shifted(packed.view(torch.uint8)).tolist() == [[0xF7, 0x21]]


def test_layouts_are_kept_and_an_expanded_form_gets_memory_for_every_element():
    form = torch.zeros(3, 1, 2, dtype=torch.float16).permute(1, 0, 2)[:, :, :]
    given = torch.arange(6).view(1, 3, 2).half()
    made = values.like(form, given)
    assert made.stride() == form.stride() and torch.equal(made, given)
    assert made.untyped_storage().data_ptr() != form.untyped_storage().data_ptr()
    form, given = torch.zeros(3, 1, 2).expand(3, 4, 2), torch.arange(24.0).view(3, 4, 2)
    assert values.held(form).shape == (3, 1, 2) and values.held(given) is given
    assert torch.equal(values.like(form, given), given)


def test_complex_values_and_a_reference_without_a_result_are_refused_in_one_line():
    for asked in (lambda: values.cast(torch.ones(2), torch.complex64), lambda: values.bits(torch.ones(2) * 1j)):
        with pytest.raises(RefusedError, match="takes no complex tensors"):
            asked()
    with pytest.raises(RefusedError, match=r"must return a problems\.common\.check\.Result, got bool"):
        inputs.compared(SimpleNamespace(compare=lambda *_: True), None, None, None, False)
