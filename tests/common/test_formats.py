"""What every block format must do, bit for bit, against the formats' definitions in exact arithmetic."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from problems.common import fp8
from tests.support.formats import ALL, LARGEST_FP32, NVFP4, NVFP4_ACTIVATIONS, Format, beside

each = pytest.mark.parametrize("form", ALL, ids=lambda form: form.name)
# Those that take any fp32 and show what is not finite; nvfp4.quantise refuses both (tests/common/test_nvfp4.py).
each_unchecked = pytest.mark.parametrize("form", [f for f in ALL if f is not NVFP4], ids=lambda form: form.name)
POWERS_OF_TWO = [form for form in ALL if form.nan == 0xFF]


def rows_of(form: Format, *values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """One row: the values, and zeros up to a whole group."""
    return torch.tensor([[*values, *[0.0] * (-len(values) % form.group)]], dtype=dtype)


@each
def test_every_code_and_scale_is_read_exactly(form: Format) -> None:
    """fp32 holds each value but the largest and those below its least subnormal; signs of zeros count."""
    for group in form.every_code():
        rows = [form.stored(group, byte) for byte in form.scale_values]
        codes, scales = (torch.cat(parts) for parts in zip(*rows, strict=True))
        wanted = torch.tensor(
            [[form.value(code, byte) for code in group] for byte in form.scale_values], dtype=torch.float64
        )
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            got = form.decode(codes, scales, dtype)
            assert got.dtype == dtype and torch.equal(got, wanted.float().to(dtype))
            assert torch.equal(torch.signbit(got), torch.signbit(wanted))
    codes, scales = form.stored(form.every_code()[0], form.nan)
    assert torch.isnan(form.decode(codes, scales)).all()


@each
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_tie_goes_to_the_even_code(form: Format, sign: float) -> None:
    """At each midpoint of two codes, and one fp32 step to either side of it, subnormals and 0 among them."""
    middles = [float(low + high) / 2 for low, high in itertools.pairwise(form.magnitudes)]
    largest = float(form.magnitudes[-1])
    for exponent in (0, 5) if form not in POWERS_OF_TWO else (-20, 0, 40):
        unit = 2.0**exponent
        values = [sign * v * unit for middle in middles for v in beside(middle)]
        for at in range(0, len(values), form.group - 1):  # each group's largest value fixes its scale
            x = rows_of(form, largest * unit, *values[at : at + form.group - 1])
            assert form.quantise(x) == form.wanted(x)


@each
def test_the_scale_at_its_ends_and_ties(form: Format) -> None:
    """Where the scale must change, one fp32 step to either side, and the codes, which are taken against that scale."""
    largest = form.magnitudes[-1]
    scales = [form.scale_values[byte] for byte in sorted(form.scale_values)]
    if form in POWERS_OF_TWO:
        edges = [float(largest * scale) for scale in scales[107:240:7]]
    else:
        edges = [float(largest * (low + high) / 2) for low, high in itertools.pairwise(scales)]
    quarters = [float(m) for m in form.magnitudes[-4:]]
    for amax in (v for edge in edges for v in beside(edge)):
        x = rows_of(form, amax, -amax / 3, *(amax * (0.7 + q / 1000) for q in quarters))
        assert form.quantise(x) == form.wanted(x), amax


@each
def test_groups_of_any_magnitude(form: Format) -> None:
    """Rows over many binades, several groups each, with zeros of both signs, denormals and values below any scale."""
    generator = torch.Generator().manual_seed(3)
    low, high = (-30, 8) if form not in POWERS_OF_TWO else (-149, 120)
    exponents = torch.linspace(low, high, 12).round()[:, None]
    x = torch.randn(12, 3 * form.group, generator=generator) * torch.exp2(exponents)
    x[1, : form.group] = torch.tensor([0.0, -0.0] * (form.group // 2))
    x[2, 3], x[2, 4], x[3, : form.group] = 1e-40, -1e-45, -1e-42
    assert form.quantise(x) == form.wanted(x)
    wide = torch.randn(3 * form.group, 2, generator=generator)
    assert form.quantise(wide.T) == form.wanted(wide.T.contiguous())  # not contiguous
    if form in POWERS_OF_TWO:  # these take bf16 as well
        assert form.quantise(x.bfloat16()) == form.wanted(x.bfloat16().float())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.floats(-2688, 2688, width=32), min_size=16, max_size=16), st.integers(-14, 0))
def test_any_group(block: list[float], exponent: int) -> None:
    for form in ALL:
        x = rows_of(form, *block) * 2.0**exponent
        assert form.quantise(x) == form.wanted(x)


@each_unchecked
def test_the_largest_values_stay_numbers(form: Format) -> None:
    x = rows_of(form, LARGEST_FP32, -LARGEST_FP32, 1.0)
    assert form.quantise(x) == form.wanted(x) and not torch.isnan(form.round_trip(x)).any()


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@each_unchecked
def test_what_is_not_finite_shows_in_its_group_only(form: Format, bad: float) -> None:
    if form is NVFP4_ACTIVATIONS and math.isinf(bad):
        return  # its largest value: test_encode_saturates
    x = torch.ones(2, 3 * form.group)
    x[1, form.group + 2] = bad
    for got in (form.decode(*form.encode(x)), form.round_trip(x)):
        assert torch.isnan(got[1, form.group : 2 * form.group]).all() and int(torch.isnan(got).sum()) == form.group


@each_unchecked
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_is_what_a_reader_gets(form: Format, dtype: torch.dtype) -> None:
    if form is NVFP4_ACTIVATIONS and dtype != torch.float32:
        return  # which it refuses
    x = torch.randn(2, 3, 4 * form.group, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[1, 2] = 0
    before = x.clone()
    got = form.round_trip(x)
    assert got.dtype == dtype and torch.equal(x, before)
    assert torch.equal(got, form.decode(*form.encode(x), dtype))
    assert torch.equal(form.round_trip(got), got)  # what is on the grid stays


@pytest.mark.parametrize("form", POWERS_OF_TWO, ids=lambda form: form.name)
def test_nothing_waits_for_a_device_and_scales_may_come_as_e8m0(form: Format) -> None:
    """Tensors without data: whatever reads a value on the host raises."""
    x = torch.empty(3, 2 * form.group, device="meta")
    assert form.decode(*form.encode(x)).shape == form.round_trip(x).shape == x.shape
    codes, scales = form.encode(torch.randn(2, 2 * form.group, generator=torch.Generator().manual_seed(4)))
    assert torch.equal(form.decode(codes, scales.view(torch.float8_e8m0fnu)), form.decode(codes, scales))


@pytest.mark.parametrize("k", [300, 7, 17])
def test_the_last_group_of_fp8_may_be_partial(k: int) -> None:
    x = torch.randn(3, k, generator=torch.Generator().manual_seed(k)) * torch.tensor([[1e-3], [1.0], [3e4]])
    codes, scales = fp8.quantise_groups(x, 64)
    assert codes.is_contiguous() and scales.shape == (3, -(-k // 64))
    whole = torch.nn.functional.pad(x, (0, -k % 64))
    all_codes, all_scales = fp8.quantise_groups(whole, 64)
    assert torch.equal(codes.view(torch.uint8), all_codes.view(torch.uint8)[:, :k]) and torch.equal(scales, all_scales)
    assert torch.equal(
        fp8.dequantise_groups(codes, scales, 64), fp8.dequantise_groups(all_codes, all_scales, 64)[:, :k]
    )
    assert torch.equal(fp8.round_trip(x, 64), fp8.round_trip(whole, 64)[:, :k])
