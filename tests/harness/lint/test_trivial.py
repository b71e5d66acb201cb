"""Each way in which a check can be too lax is found and named by a trivial answer, and a sound check is left alone."""

import shutil

import pytest
import torch

from harness.checker import values
from harness.judge.handle import CheckerLost
from harness.lint import linter, trivial
from harness.lint.trivial import Trivial
from harness.problem import folders
from tests.support import SUPPORT
from tests.support.affine import asked, folder, surveyed


def test_a_sound_problem_is_left_alone(tmp_path):
    rows, holes = surveyed(folder(tmp_path / "affine"))
    assert holes == []
    floats = ("one NaN", "one infinity", "answer in less precision", "largest element moved")
    integers = {f"{name} [top]" for name in floats}
    unmoved = {f"{name} [top]" for name in ("bias zero", "bias shifted", "inputs in less precision")}
    unmoved |= {"answer to inputs x8 [top]", "answer to inputs x8 [top], as a baseline"}
    for name, row in rows.items():
        if name in integers:
            assert not row.formed and row.note() == "not applicable: not of a floating-point type", row
            continue
        # In both test cases and one benchmark case, each output for itself.
        assert row.formed == 3 and not row.absent, row
        if name in unmoved:
            assert row.right and row.refused + len(row.right) == 3, row
        else:
            assert row.refused == (0 if row.kind == trivial.EXACT else 3), row
    assert len([name for name in rows if name.endswith(trivial.AS_BASELINE)]) == 2 * (3 + 3 + 1)
    assert {"copy of w [y]", "x shifted [top]", "bias zero [y]"} <= set(rows)


Y = "    size = (data.w.abs()"
LAX = {
    # Small values under an absolute tolerance.
    "absolute tolerance": ([("ATOL = 2**-11 * (1 + 2**-10), 2**-20", "ATOL = 1e-3, 1e9")], {"zeros [y]"}),
    "a share may be wrong": (
        [
            (
                Y,
                "    if ((y.double() - want).abs() <= 2**-10 * want.abs()).double().mean() >= 0.9:\n"
                "        return check.Result(True)\n" + Y,
            )
        ],
        {"one NaN [y]", "one infinity [y]", "largest element zero [y]"},
    ),
    "NaN passes": (
        [
            (
                Y,
                "    if not ((y.double() - want).abs() > 2**-10 * want.abs()).any():\n"
                "        return check.Result(True)\n" + Y,
            )
        ],
        {"one NaN [y]"},
    ),
    "only finite elements count": (
        [
            (
                Y,
                "    wrong = (y.double() - want).abs() > 2**-10 * want.abs()\n"
                "    if y.isfinite().all() and wrong.sum() <= 1:\n        return check.Result(True)\n" + Y,
            )
        ],
        {"largest element zero [y]"},
    ),
    "the tolerance grows with the output": (
        [
            (
                Y,
                "    size = torch.maximum(want.abs(), y.double().abs())\n"
                "    if ((y.double() - want).abs() <= 2**-10 * size).all():\n        return check.Result(True)\n" + Y,
            )
        ],
        {"one infinity [y]"},
    ),
    "the seed does nothing": ([("manual_seed(seed)", "manual_seed(5)")], {"previous answer [y]"}),
    "only directions count": (
        [
            ("bias = torch.randn(m,", "bias = 1e-3 * torch.randn(m,"),
            (
                Y,
                "    if torch.cosine_similarity(y.double(), want, 0) > 0.999:\n        return check.Result(True)\n" + Y,
            ),
        ],
        {"answer to inputs x8 [y]", "answer in less precision [y]", "bias zero [y]"},
    ),
    "only the mean counts": (
        [(Y, "    if (y.double().mean() - want.mean()).abs() <= 1e-3:\n        return check.Result(True)\n" + Y)],
        {"mean of the answer [y]"},
    ),
    "less precision passes": ([("RTOL, ATOL = 2**-11", "RTOL, ATOL = 2**-7")], {"answer in less precision [y]"}),
    "types are not looked at": (
        [
            (Y, "    if y.dtype == torch.float32:\n        y = y.half()\n" + Y),
            ("want[1].shape, torch.int32", "want[1].shape, output[1].dtype"),
        ],
        {"wrong type of elements [y]"},
    ),
    "shapes are broadcast": (
        [
            ("compare_y(output[0], want", "compare_y(output[0].squeeze(), want"),
            ("form_error(output[1], want[1].shape", "form_error(output[1], output[1].shape"),
            ("torch.equal(output[1], want[1])", "bool((output[1] == want[1]).all())"),
        ],
        {"one more axis [y]"},
    ),
    "an output is not looked at": (
        [("if torch.equal(output[1], want[1]) else", "if len(output) == 2 else")],
        {"zeros [top]", "previous answer [top]", "largest element zero [top]"},
    ),
    "an input is nearly nothing": (
        [("RTOL, ATOL = 2**-11", "RTOL, ATOL = 2**-8"), ("bias = torch.randn(m,", "bias = 2**-14 * torch.randn(m,")],
        {"bias zero [y]"},
    ),
    "an input is an answer": (
        [
            ("w = torch.randn(m, k, generator=gen, device=device)", "w = torch.eye(m, k, device=device)"),
            ("bias = torch.randn(m,", "bias = 0 * torch.randn(m,"),
            ("(64, 32, 1)", "(64, 64, 1)"),
            ("(100, 7, 2)", "(99, 99, 2)"),
            ("(40, 48, 3)", "(40, 41, 3)"),
            ("terms.argmax(1).int()\n", "data.x[:len(terms)].to(torch.int32)\n"),
        ],
        {"copy of x [y]"},
    ),
    "the tolerance is below a rounding": ([("RTOL, ATOL = 2**-11", "RTOL, ATOL = 2**-13")], {"exact"}),
    "check_implementation is another check": (
        [("    return result.ok, result.message", '    return True, ""')],
        {"zeros [y], by check_implementation"},
    ),
    "a baseline may answer anything": (
        [("PEER_TOL = 1e-2", "PEER_TOL = 1e9")],
        {"zeros [y], as a baseline", "answer to inputs x8 [y], as a baseline"},
    ),
}


@pytest.mark.parametrize("name", LAX)
def test_each_weakness_is_found(tmp_path, name):
    changes, wanted = LAX[name]
    rows, holes = surveyed(folder(tmp_path / "affine", *changes))
    assert wanted <= set(holes), holes
    for candidate in wanted:
        assert "HOLE" in rows[candidate].note()


def test_a_narrow_weakness_is_told_from_the_others(tmp_path):
    """What still is refused is not reported."""
    _, holes = surveyed(folder(tmp_path / "precision", ("RTOL, ATOL = 2**-11", "RTOL, ATOL = 2**-8")), baselines=False)
    assert holes == ["answer in less precision [y]"]
    _, holes = surveyed(folder(tmp_path / "seed", ("manual_seed(seed)", "manual_seed(5)")), baselines=False)
    assert holes == ["previous answer [y]", "previous answer [top]"]


def test_an_input_that_is_always_zero_may_be_left_out(tmp_path):
    for size in ("0", "1e-7"):  # below a rounding is nothing, too
        _, holes = surveyed(folder(tmp_path / size, ("bias = torch.randn(m,", f"bias = {size} * torch.randn(m,")))
        assert len(holes) == 1
        assert holes[0].startswith("bias [y]: the answer depends on it, but not on whether it is left out")


def test_an_output_that_is_always_empty_is_not_spoilt(tmp_path):
    rows, holes = surveyed(
        folder(
            tmp_path / "affine",
            ("y = torch.full((m,)", "y = torch.full((0,)"),
            ("return terms.sum(1) + data.bias.double(), terms", "return terms[:0].sum(1), terms"),
            (
                "compare_y(output[0], want[0], data, baseline)",
                "check.Result(not check.form_error(output[0], want[0].shape, torch.float16))",
            ),
        ),
        baselines=False,
    )
    assert holes == []
    assert rows["answer in less precision [y]"].note() == "not applicable: it is empty"


def test_an_input_that_nobody_reads_is_named_and_no_hole(tmp_path):
    rows, holes = surveyed(folder(tmp_path / "affine", ("+ data.bias.double(), terms", "+ 0, terms")))
    assert holes == []
    assert rows["bias zero [y]"].note() == "leaves the answer as it is in every case"


def test_one_seed_gives_one_content(tmp_path):
    _, holes = surveyed(folder(tmp_path / "affine", ("x = torch.randn(k, generator=gen,", "x = torch.randn(k,")))
    assert any("two contents from one seed differ in x" in hole for hole in holes)


def test_a_declared_precision_moves_the_bar(tmp_path):
    """bf16 may be computed in: an answer in bf16 is right, one in e4m3 is not."""
    coarse = ("RTOL, ATOL = 2**-11", "RTOL, ATOL = 2**-8")
    _, holes = surveyed(folder(tmp_path / "declared", coarse, ("OUTPUTS =", 'PRECISION = "bf16"\nOUTPUTS =')))
    assert holes == []
    with pytest.raises(ValueError, match=r"PRECISION must be one of fp64, .* got 'int3'"):
        surveyed(folder(tmp_path / "unknown", ("OUTPUTS =", 'PRECISION = "int3"\nOUTPUTS =')))


def test_what_is_right_or_has_no_meaning_is_named(tmp_path):
    """Rows of one term have it at column 0; one element is its own mean."""
    cases = "Case(100, 7, 2), Case(50, 1, 4), Case(1, 7, 4)]"
    rows, holes = surveyed(folder(tmp_path / "affine", ("Case(100, 7, 2)]", cases)))
    assert holes == []
    assert rows["zeros [top]"].note() == "is the answer in m=50 k=1"
    assert rows["mean of the answer [y]"].refused == rows["mean of the answer [y]"].formed == 4
    assert rows["mean of the answer [y]"].note() == "not applicable in m=1 k=7: one element is its own mean"


def test_luck_is_told_from_a_hole_by_other_seeds():
    """Accepted with the case's seed: a hole if half of the other seeds agree, else luck."""
    case = folders.Case({"m": 1}, 0)

    def ask(message):
        if message["op"] == "case":
            ask.seed = message["seed"]
            return {"candidates": {"seldom": trivial.NEAR, "often": trivial.NEAR}, "fault": ""}
        accepted = ask.seed == 0 or ask.seed % (2 if message["candidate"] == "often" else 5) == 0
        return {"status": "accepted" if accepted else "refused", "text": ""}

    rows = {row.name: row for row in linter.survey(ask, [("m=1", case), ("m=1 again", folders.Case({}, 1))], False)[0]}
    assert rows["seldom"].luck == ["m=1 (1 of 8 other seeds)"] and not rows["seldom"].hole()
    assert rows["often"].missed == ["m=1 (4 of 8 other seeds)"]
    assert rows["often"].hole() == "accepted in 1 case, first m=1 (4 of 8 other seeds)"


def test_a_lost_process_costs_one_candidate(tmp_path):
    """Inputs that make a reference crash are said, and the next candidate has its data again."""
    found = folders.find(str(folder(tmp_path / "affine")))
    inner, lost = asked(found), []

    def ask(message):
        if message.get("candidate") == "x zero [y]" and message["op"] == "attempt":
            lost.append(message)
            inner(
                {"op": "case", "case": {"m": 1, "k": 1}, "seed": 9, "baselines": False}
            )  # what is there now is no longer the case's
            raise CheckerLost("killed by SIGABRT")
        return inner(message)

    rows = {row.name: row for row in linter.survey(ask, linter.chosen(found, "cpu"), False)[0]}
    assert len(lost) == 3 and rows["x zero [y]"].formed == 0
    assert rows["x zero [y]"].absent.keys() == {"the reference's process was lost: killed by SIGABRT"}
    assert rows["x shifted [y]"].refused == rows["one more axis [top]"].refused == 3


def test_a_reference_of_another_shape_is_said(tmp_path):
    with pytest.raises(ValueError, match=r"ref_kernel must return a tensor of the output's shape for each output"):
        surveyed(folder(tmp_path / "affine", ("terms.sum(1) +", "terms.sum() +"), ("data.bias.double(),", "0,")))


def test_split_weights_are_another_source_of_answers():
    """The answer to other weights is what a kernel returns that keeps what it made of the first."""
    rows, holes = surveyed(SUPPORT / "problems" / "linear")
    assert holes == []
    assert rows["answer to other weights"].refused == rows["answer to other weights"].formed > 0
    assert {"weights.w zero", "inputs.x shifted", "copy of inputs.x"} <= set(rows)


def test_a_copy_takes_no_more_of_an_input_than_it_needs():
    """As fp64 a buffer of bytes is 8 times as large."""
    content = torch.arange(1, 1001, dtype=torch.uint8).view(10, 100)
    form, made = torch.zeros(7), object.__new__(Trivial)
    made.exact, made.pristine = [form], (content,)
    with pytest.MonkeyPatch.context() as patch:
        taken = []
        numbers = values.numbers
        patch.setattr(values, "numbers", lambda tensor: taken.append(tensor.numel()) or numbers(tensor))
        assert made._copy(0, 0).tolist() == [1, 2, 3, 4, 5, 6, 7]
        assert taken == [7]


@pytest.mark.slow
def test_a_sound_gpu_mode_folder_is_left_alone():
    assert surveyed(SUPPORT / "gpu_mode" / "vectoradd")[1] == []


def test_a_gpu_mode_folder_is_linted_too(tmp_path):
    lax = tmp_path / "gpu_mode"
    shutil.copytree(SUPPORT / "gpu_mode", lax)
    file = lax / "vectoradd" / "reference.py"
    file.write_text(file.read_text().replace("atol=1e-6", "atol=100"))
    cases = lax / "vectoradd" / "task.yml"
    cases.write_text(cases.read_text().replace("[100000, 300000]", "[1000, 3000]"))
    _, holes = surveyed(lax / "vectoradd")
    assert {"zeros", "previous answer", "copy of 0.0", "largest element zero"} <= set(holes)
    # Forms are the judge's to check there.
    assert not {"one more axis", "wrong type of elements", "one NaN"} & set(holes)
