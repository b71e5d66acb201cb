"""Each way in which a check can be too lax is found by a trivial answer, and a sound check is left alone."""

import pytest
import torch

from harness.lint import trivial
from tests.support import SUPPORT
from tests.support.lax import foreign, own, surveyed

HALVES = "y.double()[: len(y) // 2], want_y[: len(y) // 2]"
SEVENTHS = "*(t.double().flatten()[torch.arange(t.numel()) % 7 != 5] for t in (y, want_y))"
LAX = {  # candidate -> a check of y that it gets through, or what else is lax
    "zeros [y]": {"check": "(error <= 1e3).all()"},
    "previous answer [y]": {"SEED": "5"},
    "mean of the answer [y]": {"check": "(y.double().mean() - want_y.mean()).abs() <= 1e-3 and y.isfinite().all()"},
    "second half zero [y]": {"check": f"near({HALVES})"},
    "one NaN [y]": {"check": "not (error > 2**-10 * want_y.abs() + 2**-20).any()"},
    "one infinity [y]": {"check": "(error <= 2**-10 * torch.maximum(want_y.abs(), y.double().abs())).all()"},
    "largest element zero [y]": {"check": "y.isfinite().all() and (error > 2**-10 * want_y.abs() + 2**-20).sum() <= 1"},
    "answer doubled [y]": {"check": "torch.cosine_similarity(y.double().flatten(), want_y.flatten(), 0) > 0.9999"},
    "answer negated [y]": {"check": "near(y.abs(), want_y.abs())"},
    "answer in less precision [y]": {"check": "near(y, want_y, 2**-7)"},
    "inputs in less precision [y]": {"check": "(error <= 0.1).all()"},
    "elements rolled by one [y]": {"check": "near(y.flatten().sort().values, want_y.flatten().sort().values)"},
    "copy of bias [y]": {"W": "0"},
    "bias zero [y]": {"check": "(error <= 2**-10.9 * want_y.abs() + 1e-3).all()", "BIAS": "2**-13"},
    "zeros [top]": {"top": "True"},
    "exact": {"check": "near(y, want_y, 2**-13)"},
}
ASKED = {  # candidate -> a check that may be what the problem wants
    "axis 0 rolled by one [y]": "all(near(row, want_y, 2**-9) for row in y[:0]) and set(map(tuple, y.tolist())) == "
    "set(map(tuple, want_y.half().tolist()))",
    "one element changed [y]": f"near({SEVENTHS})",
}


@pytest.mark.parametrize("name", LAX)
def test_each_weakness_is_found(tmp_path, name):
    rows, holes = surveyed(own(tmp_path / "lax", **LAX[name]))
    assert name in holes, holes
    assert rows[name].note().startswith("HOLE")


@pytest.mark.parametrize("name", ASKED)
def test_what_a_problem_may_admit_is_asked_about(tmp_path, name):
    rows, holes = surveyed(own(tmp_path / "lax", ASKED[name]))
    assert holes == [] and [row.name for row in rows.values() if row.question()] == [name]
    assert "the check must compare it" in rows[name].question()


def test_a_sound_problem_is_left_alone(tmp_path):
    rows, holes = surveyed(own(tmp_path / "lax"))
    assert holes == []
    for name, row in rows.items():
        refused, right, absent = (len(row.cases(status)) for status in ("refused", "right", "absent"))
        assert refused + right + absent == (0 if row.kind == trivial.EXACT else 2) and not row.question(), name
        assert not right or row.kind == trivial.PART, name
    assert {"copy of bias [y]", "x shifted [top]", "answer in less precision [y]"} <= set(rows)
    assert rows["answer in less precision [top]"].note() == "not applicable: not of a floating-point type"


def test_a_narrow_weakness_is_told_from_the_others(tmp_path):
    """What still is refused is not reported; a declared precision moves the bar."""
    for named, wanted in {"": ["answer in less precision [y]"], "bf16": [], "int3": None}.items():
        path = own(tmp_path / f"lax{named}", "near(y, want_y, 2**-8)")
        task = path / "task.py"
        task.write_text(task.read_text() + (f'PRECISION = "{named}"\n' if named else ""))
        if wanted is None:
            with pytest.raises(ValueError, match=r"PRECISION must be one of fp64, .* got 'int3'"):
                surveyed(path)
        else:
            rows, holes = surveyed(path)
            assert holes == wanted and all("PRECISION of task.py" in rows[hole].hole() for hole in holes)


def test_an_input_that_no_case_needs_and_contents_without_the_seed_are_found(tmp_path):
    _, holes = surveyed(own(tmp_path / "zero", BIAS="0"))
    assert holes[0].startswith("bias [y]: the answer depends on it, but not on whether it is left out")
    path = own(tmp_path / "unseeded")
    file = path / "reference.py"
    file.write_text(file.read_text().replace("generator=gen, ", ""))
    assert any("two contents from one seed differ in w" in hole for hole in surveyed(path)[1])


@pytest.mark.parametrize(
    ("names", "said"), [('("index",)', ""), ('("w",)', r"OPAQUE must name inputs of .*, \['index'\], got \['w'\]")]
)
def test_an_opaque_input_is_not_changed(tmp_path, names, said):
    """A reference that looks into a table of places cannot take others."""
    path = own(tmp_path / "lax")
    task, reference = path / "task.py", path / "reference.py"
    fields = task.read_text().replace("    y: torch", "    index: torch.Tensor\n    y: torch")
    task.write_text(fields.replace("OUTPUTS =", f"OPAQUE = {names}\nOUTPUTS ="))
    index = "bias * 1, torch.arange(m, device=device),"
    looked = "data.bias.double()[data.index.where(data.index.sort().values == data.index, -(2**40))]"
    reference.write_text(
        reference.read_text().replace("bias * 1,", index).replace("data.bias.double()", looked.replace("\n", ""))
    )
    if said:
        with pytest.raises(ValueError, match=said):
            surveyed(path)
        return
    rows, holes = surveyed(path)
    assert holes == [] and rows["index shifted [y]"].note() == f"not applicable: {trivial.UNCHANGED}"


def test_split_weights_are_another_source_of_answers():
    """The answer to other weights is what a kernel returns that keeps what it made of the first."""
    rows, holes = surveyed(SUPPORT / "problems" / "linear")
    assert holes == [] and {"weights.w zero", "inputs.x shifted", "copy of inputs.x"} <= set(rows)
    assert len(rows["answer to other weights"].cases("refused")) == rows["answer to other weights"].formed > 0


@pytest.mark.parametrize(
    "answer",
    [
        "(y, len(x))",
        "{'a': [y, {'b': (int(x.argmax()), bool(x.sum() > 0))}], 'none': None, 'empty': [], 'how': 'up'}",
        "(Held(y.double(), float(x.double().sum())), [Pair(x > 0, -1)], 2**70)",
        "float(x.double().sum())",
        "x[x > 0]",  # of another shape where x is zero
        "bool(x.sum() > 0)",  # met by chance
        "(y.expand(3, -1), y.view(1, -1).repeat(2, 1)[:, 5])",
    ],
)
def test_a_sound_folder_of_others_is_left_alone(tmp_path, answer):
    rows, holes = surveyed(foreign(tmp_path / "set", answer))
    assert holes == [] and any(row.cases("refused") for row in rows.values() if row.kind != trivial.EXACT)


@pytest.mark.parametrize(
    ("answer", "check", "found"),
    [
        ("(y, len(x))", "same(output[0], ref_kernel(data)[0])", {"zeros [1]", "answer doubled [1]"}),
        ("(y, len(x))", "output[1] == len(data[0])", {"zeros [0]", "previous answer [0]"}),
        ("{'y': y, 'how': 'up'}", "same(output['y'], ref_kernel(data)['y'])", {"zeros [how]"}),
        ("Held(y, float(x.sum()))", "same(output.y, ref_kernel(data).y)", {"zeros [loss]", "previous answer [loss]"}),
        ("len(x)", "same(output, ref_kernel(data))", {"previous answer"}),
    ],
)
def test_a_part_that_a_check_does_not_see_is_named(tmp_path, answer, check, found):
    holes = surveyed(foreign(tmp_path / "set", answer, check))[1]
    assert found <= set(holes)
    parts = {name.partition(" [")[2] for name in found}
    assert all(name.partition(" [")[2] in parts for name in holes), holes


def test_an_input_that_is_the_answer_is_no_hole_and_expanded_inputs_are_changed(tmp_path):
    assert surveyed(foreign(tmp_path / "copies", "x.clone()"))[1] == []
    given = "torch.randn(n, generator=torch.Generator().manual_seed(seed)).expand(3, n)"
    rows, holes = surveyed(foreign(tmp_path / "rows", "(x.sum(0), y[0])", given=given))
    assert holes == [] and rows["0 zero [0]"].cases("refused")


def test_what_may_be_right_or_cannot_be_made_is_absent():
    for exact in (torch.zeros(5), torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)):
        for make in (trivial.largest_zero, lambda exact: trivial.one_changed(exact, 1)):
            with pytest.raises(trivial.AbsentError):
                make(exact)
    with pytest.raises(trivial.AbsentError, match="no element is finite"):
        trivial.special(torch.tensor([float("inf")]), 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.int8, torch.bool])
def test_spoilt_answers_keep_their_form(dtype):
    exact = torch.randint(1, 9, (5, 1, 6), generator=torch.Generator().manual_seed(3)).to(dtype).transpose(0, 2)
    before = exact.double().clone()
    spoilt = [make(exact) for make in (trivial.largest_zero, trivial.half_zero, trivial.rolled)]
    for made in (*spoilt, *trivial.one_changed(exact, 1)):
        assert (made.dtype, made.shape, made.stride()) == (dtype, exact.shape, exact.stride())
    assert (trivial.largest_zero(exact).double() != before).sum() == 1 and (exact.double() == before).all()
    assert trivial.half_zero(exact).double().count_nonzero() == 15
    assert trivial.rolled(exact, 0).double().equal(before.roll(1, 0))
