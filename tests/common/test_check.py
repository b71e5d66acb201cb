"""problems/common/check.py: what passes, what fails, and what the report says."""

import pytest
import torch

from problems.common import check

F16, F64 = torch.float16, torch.float64


def tensor(*values: float, dtype: torch.dtype = F64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def judged(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> check.Result:
    return check.elementwise(got, want, torch.full_like(want, tolerance), got.dtype)


def test_the_tolerance_itself_passes_and_the_next_step_fails():
    assert judged(tensor(1.5, 2.0, dtype=F16), tensor(1.0, 2.5), 0.5).ok
    assert not judged(tensor(1.5, 2.0, dtype=F16), tensor(1.0, 2.5), 0.5 - 2**-40).ok


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_fail_under_any_tolerance(value):
    want, got = tensor(1.0, 2.0, 3.0), tensor(1.0, value, 3.0, dtype=F16)
    for result in (judged(got, want, 1e30), check.norm(got, want, 1e30, F16, batch=0)):
        assert not result.ok and f"ERROR AT (1): {value:g} 2" in result.message


def test_report_counts_all_and_shows_five_in_order_got_before_wanted():
    lines = judged(torch.arange(12, dtype=F16).view(3, 1, 4), torch.zeros(3, 1, 4, dtype=F64), 1.0).message.split("\n")
    assert lines[0].startswith("mismatch found!") and lines[0].endswith("mismatched elements: 10 of 12")
    places = ("(0, 0, 2): 2", "(0, 0, 3): 3", "(1, 0, 0): 4", "(1, 0, 1): 5", "(1, 0, 2): 6")
    assert lines[1:] == [f"ERROR AT {place} 0" for place in places]


def test_numbers_are_those_of_the_worst_element_relative_to_its_tolerance():
    want = tensor(100.0, 1.0)
    result = check.elementwise(tensor(103.0, 1.5, dtype=F16), want, tensor(10.0, 0.6), F16)
    assert result.ok and (result.worst_abs, result.worst_tol) == (0.5, 0.6)
    assert result.rel == pytest.approx((3**2 + 0.5**2) ** 0.5 / (100**2 + 1) ** 0.5)


def test_of_many_wrong_elements_the_worst_is_reported():
    result = judged(tensor(2.0, 9.0, 4.0, dtype=F16), tensor(1.0, 2.0, 3.0), 0.5)
    assert not result.ok and (result.worst_abs, result.worst_tol) == (7.0, 0.5)
    nan = judged(tensor(2.0, 9.0, float("nan"), dtype=F16), tensor(1.0, 2.0, 3.0), 0.5).worst_abs
    assert nan != nan


def test_a_tolerance_of_zero_wants_equality_and_a_reference_of_zeros_has_an_absolute_error():
    want = tensor(1.0, 2.0, 3.0)
    assert judged(tensor(1.0, 2.0, 3.0, dtype=F16), want, 0.0).ok
    result = judged(tensor(1.0, 2.5, 3.0, dtype=F16), want, 0.0)
    assert not result.ok and (result.worst_abs, result.worst_tol) == (0.5, 0.0)
    result = judged(tensor(0.25, 0.0, dtype=F16), tensor(0.0, 0.0), 1.0)
    assert result.ok and result.rel == 0.25


class Plain(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("got", "says"),
    [
        (None, "want a torch.Tensor, got NoneType"),
        ([1.0, 2.0], "want a torch.Tensor, got list"),
        (tensor(1.0, 2.0, dtype=F16).as_subclass(Plain), "want a torch.Tensor, got Plain"),
        (torch.nn.Parameter(tensor(1.0, 2.0, dtype=F16)), "want a torch.Tensor, got Parameter"),
        (tensor(1.0, 2.0), "want torch.float16 (2,), got torch.float64 (2,)"),
        (tensor(1.0, 2.0, 3.0, dtype=F16), "want torch.float16 (2,), got torch.float16 (3,)"),
        (tensor(1.0, 2.0, dtype=F16).view(2, 1), "want torch.float16 (2,), got torch.float16 (2, 1)"),
    ],
)
def test_other_forms_are_named_and_never_compared(got, says):
    want = tensor(1.0, 2.0)
    everything = torch.full_like(want, 1e9)
    for result in (check.elementwise(got, want, everything, F16), check.norm(got, want, 1e9, F16, batch=0)):
        assert not result.ok and result.message == f"mismatch found! {says}"
        assert result.rel != result.rel and result.worst_abs != result.worst_abs


def test_norm_is_judged_in_every_batch_alone_and_of_zeros_wants_zeros():
    want = torch.ones(2, 3, dtype=F64)
    want[1] *= 1000
    got = want.half()
    got[0, 1] = 1.25  # 14 % of its batch, 0.01 % of both together
    result = check.norm(got, want, 0.15, F16, batch=0)
    assert result.ok and result.rel == pytest.approx(0.25 / 3**0.5) and result.worst_abs == 0.25
    result = check.norm(got, want, 0.1, F16, batch=0)
    assert not result.ok and result.message.startswith("relative error 0.144 over 0.1; mismatch found!")
    assert "ERROR AT (0, 1): 1.25 1" in result.message
    want = torch.zeros(2, 2, dtype=F64)
    for value, ok in ((0, True), (2**-20, False)):
        got = want.half()
        got[0, 1] = value
        assert check.norm(got, want, 0.1, F16, batch=1).ok is ok
