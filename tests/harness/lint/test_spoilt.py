"""Checks that ignore sign, order or all but sums are found; what a problem may admit is asked, or left alone."""

import contextlib

import pytest
import torch

from harness.lint import linter, spoilt, trivial
from harness.problem import folders
from tests.harness.lint.test_answer_forms import folder
from tests.support.affine import asked, surveyed
from tests.support.affine import folder as affine

SIGN, SWAP, MOVE = "largest element negated", "two elements swapped", "largest element moved"
# An answer of 64 to 200 rows of 8, and checks of it that see less than its elements.
ROWS = "x.repeat(8).view(8, -1).T.roll(1, 0) * torch.arange(1, 9)"
LAX = {
    "abs": ("torch.allclose(output.abs(), ref_kernel(data).abs())", {SIGN}, {trivial.ALL_NEGATED}),
    "sorted values": (
        "torch.allclose(output.flatten().sort().values, ref_kernel(data).flatten().sort().values)",
        {SWAP},
        {"two places of axis 0 swapped", "two places of axis 1 swapped"},
    ),
    "sums of rows": (
        "torch.allclose(output.sum(1), ref_kernel(data).sum(1), atol=1e-4)",
        {MOVE},
        {"two places of axis 1 swapped"},
    ),
    "sums of columns": (
        "torch.allclose(output.sum(0), ref_kernel(data).sum(0), atol=1e-4)",
        {MOVE},
        {"two places of axis 0 swapped"},
    ),
    "rows as a set": (
        "all((output - row).abs().amax(1).min() < 1e-6 for row in ref_kernel(data)) and output.isfinite().all()",
        set(),
        {"two places of axis 0 swapped"},
    ),
    "either sign of a column": (
        "torch.allclose(*((y * y[y.abs().argmax(0), range(8)].sign()) for y in (output, ref_kernel(data))))",
        set(),
        {trivial.ALL_NEGATED},
    ),
    "all but one element in seven": (
        "torch.allclose(*(y.flatten()[torch.arange(y.numel()) % 7 != 5] for y in (output, ref_kernel(data))))",
        set(),
        {trivial.ONE_CHANGED},
    ),
}


@pytest.mark.parametrize("name", LAX)
def test_a_check_that_sees_less_than_the_elements_is_found(tmp_path, name):
    check, holes, questions = LAX[name]
    rows, found = surveyed(folder(tmp_path / "lax", ROWS, check))
    assert set(found) == holes, [rows[hole].note() for hole in found]
    assert {row.name for row in rows.values() if row.question()} == questions
    for question in questions:
        assert "the check must compare" in rows[question].note()


def test_an_output_of_one_axis_whose_order_is_not_compared_is_asked_about(tmp_path):
    sort = ("compare_y(output[0], want[0]", "compare_y(output[0].sort().values, want[0].sort().values")
    tolerance = ("RTOL * want.abs() + 2**-20 * size + ATOL", "RTOL * want.abs() + 1e-3")
    rows, holes = surveyed(affine(tmp_path / "affine", sort, tolerance), baselines=False)
    assert not {SIGN, MOVE} & {hole.partition(" [")[0] for hole in holes}
    assert (
        rows["two places of axis 0 swapped [y]"].question().startswith("accepted in 3 cases, first m=64 k=32 (8 of 8")
    )
    assert not rows["two places of axis 0 swapped [top]"].question()


def test_the_whole_linter_asks_and_passes(tmp_path, monkeypatch):
    found, said = folders.find(str(folder(tmp_path / "set", ROWS, LAX["rows as a set"][0]))), []
    helper = asked(found)
    vars(helper)["close"] = lambda: None
    monkeypatch.setattr(linter, "Helper", lambda *_: helper)
    monkeypatch.setattr(linter, "Session", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(linter, "wrong_files", lambda *_: [])
    monkeypatch.setattr(linter, "variants", lambda *_: [])
    assert linter.run(found, "cpu", "cpu", said.append)
    assert [line for line in said if line.startswith("QUESTION two places of axis 0 swapped: accepted in 3 cases")]
    assert said[-1].endswith(": no hole found by the linter")


def test_what_may_be_right_is_not_made():
    """The sign of a line of one element, another order, packed values."""
    for exact in (torch.eye(4), torch.tensor([3.0]), torch.tensor(3.0), torch.zeros(5), torch.empty(0)):
        with pytest.raises(spoilt.AbsentError):
            spoilt.negated(exact)
    for change in (spoilt.negated, spoilt.moved, spoilt.swapped, spoilt.all_negated):
        with pytest.raises(spoilt.AbsentError):
            change(torch.zeros(4, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))
    with pytest.raises(spoilt.AbsentError, match="in another order"):
        spoilt.moved(torch.eye(2))
    with pytest.raises(spoilt.AbsentError, match="far enough apart"):
        spoilt.swapped(torch.tensor([[1.0, 1.1], [1.2, 1.3]]))
    with pytest.raises(spoilt.AbsentError, match="no second element"):
        spoilt.moved(torch.tensor([0.0, 0.0, 3.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.int8, torch.int64, torch.bool])
def test_few_elements_change_and_sums_stay(dtype):
    gen = torch.Generator().manual_seed(3)
    exact = (torch.randint(-8, 9, (5, 1, 6, 4), generator=gen)).to(dtype).transpose(0, 2)
    before = exact.double().clone()
    made = spoilt.swapped(exact)
    assert made.dtype == dtype and made.stride() == exact.stride()
    assert (made.double() != before).sum() == 2 and (exact.double() == before).all()
    assert made.double().flatten().sort().values.equal(before.flatten().sort().values)
    if dtype != torch.bool:
        assert (spoilt.negated(exact).double() + before != 2 * before).sum() == 1
        assert spoilt.all_negated(exact).double().equal(-before)
    if dtype.is_floating_point:
        made = spoilt.moved(exact).double()
        assert (made != before).sum() == 8
        assert all(made.sum(axis).equal(before.sum(axis)) for axis in (0, 2, 3))


BOOL = "bool(x.sum() > 0)"


def test_a_truth_value_that_is_met_by_chance_is_no_hole(tmp_path):
    rows, holes = surveyed(folder(tmp_path / "fair", BOOL))
    assert holes == [] and any(row.chance for row in rows.values())
    _, holes = surveyed(folder(tmp_path / "constant", "bool(x.sum() > -1e9)"))
    assert {"previous answer", "copy of 0"} <= set(holes)


def test_a_hole_of_precision_names_the_format_and_the_setting(tmp_path):
    coarse = ("RTOL, ATOL = 2**-11", "RTOL, ATOL = 2**-7")
    rows, _ = surveyed(affine(tmp_path / "unset", coarse), baselines=False)
    said = rows["answer in less precision [y]"].hole()
    assert (
        "the answer rounded to the 7 bits after the leading one that bf16 has; PRECISION of task.py is not set" in said
    )
    coarse = ("RTOL, ATOL = 2**-11", "RTOL, ATOL = 2**-3")
    rows, _ = surveyed(
        affine(tmp_path / "set", coarse, ("OUTPUTS =", 'PRECISION = "bf16"\nOUTPUTS =')), baselines=False
    )
    said = rows["answer in less precision [y]"].hole()
    assert "to the 3 bits after the leading one that e4m3 has; PRECISION of task.py is 'bf16'" in said
