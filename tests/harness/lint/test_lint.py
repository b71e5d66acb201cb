"""The linter of problems: each way in which a check can be too lax is found and named, a sound check is left alone."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from harness.checker import values
from harness.lint import linter, trivial
from harness.lint.trivial import Trivial
from harness.problem import folders
from harness.sandbox.process import Died
from tests.support import SUPPORT

# A sound problem, of which each test below spoils a line: y = W x + bias and, beside it, where the largest term stands.
TASK = '''"""affine: y = W x + bias, and the column of the largest term of each row."""
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Data(NamedTuple):
    """w: fp32 (m, k); x: fp32 (k,); bias: fp32 (m,); y: fp16 (m,) and top: int32 (m,) are written in place."""

    w: torch.Tensor
    x: torch.Tensor
    bias: torch.Tensor
    y: torch.Tensor
    top: torch.Tensor


input_t = Data
OUTPUTS = ("y", "top")
PEER_TOL = 1e-2
RTOL, ATOL = 2**-11 * (1 + 2**-10), 2**-20


@dataclass(frozen=True)
class Case:
    m: int
    k: int
    seed: int

    def bytes_moved(self) -> int:
        return 4 * self.m * self.k


TESTS = [Case(64, 32, 1), Case(100, 7, 2)]
BENCHMARKS = [Case(40, 48, 3)]
BENCHMARKS_CPU = BENCHMARKS
'''
REFERENCE = '''"""Inputs, oracle and checker for affine."""
import torch
from task import ATOL, PEER_TOL, RTOL, Data

from problems.common import check


def generate_input(m, k, seed, device):
    gen = torch.Generator(device).manual_seed(seed)
    w = torch.randn(m, k, generator=gen, device=device)
    x = torch.randn(k, generator=gen, device=device)
    bias = torch.randn(m, generator=gen, device=device)
    y = torch.full((m,), float("nan"), dtype=torch.float16, device=device)
    return Data(w, x, bias, y, torch.zeros(m, dtype=torch.int32, device=device))


def ref_kernel(data):
    terms = data.w.double() * data.x.double()
    return terms.sum(1) + data.bias.double(), terms.argmax(1).int()


def compare_y(y, want, data, baseline):
    if baseline:
        return check.norm(y.unsqueeze(0), want.unsqueeze(0), PEER_TOL, torch.float16, batch=0)
    size = (data.w.abs().double() @ data.x.abs().double())
    return check.elementwise(y, want, RTOL * want.abs() + 2**-20 * size + ATOL, torch.float16)


def compare(data, want, output, baseline=False):
    if not isinstance(output, tuple) or len(output) != 2:
        return check.Result(False, "mismatch found! want two tensors")
    result = compare_y(output[0], want[0], data, baseline)
    if not result.ok:
        return result
    if problem := check.form_error(output[1], want[1].shape, torch.int32):
        return check.Result(False, problem)
    return result if torch.equal(output[1], want[1]) else check.Result(False, "mismatch found! top")


def check_implementation(data, output):
    result = compare(data, ref_kernel(data), output)
    return result.ok, result.message
'''
KERNEL = '''"""{first}"""
import torch
from task import input_t


def custom_kernel(data: input_t):
    terms = data.w.double() * data.x.double()
    data.y.copy_({y})
    data.top.copy_(terms.argmax(1))
    return data.y, data.top
'''
SUM = "terms.sum(1) + data.bias"


def folder(path: Path, *changes: tuple[str, str]) -> Path:
    """The sound problem in `path` with (text, replacement) pairs applied to its two files; each text occurs once."""
    path.mkdir()
    files = {"task.py": TASK, "reference.py": REFERENCE}
    for old, new in changes:
        assert sum(text.count(old) for text in files.values()) == 1, old
        files = {name: text.replace(old, new) for name, text in files.items()}
    for name, text in files.items():
        (path / name).write_text(text)
    return path


def asked(found: folders.Problem) -> linter.Ask:
    """The linter's helper within this process."""
    utils = str(found.utils) if found.utils else None
    helper = Trivial({"folder": str(found.folder), "own": found.own, "device": "cpu", "utils": utils})
    return lambda message: getattr(helper, message["op"])(message, [])


def surveyed(path: Path, baselines: bool = True, short: bool = False) -> tuple[dict[str, linter.Row], list[str]]:
    """-> (rows by name, holes: names of candidates, and in full what else was found)."""
    found = folders.find(str(path))
    rows, faults = linter.survey(asked(found), linter.chosen(found, "cpu", short), baselines and found.own)
    holes = [row.name for row in rows if row.hole()] + linter.left_out(rows) + faults
    return {row.name: row for row in rows}, holes


def test_a_sound_problem_is_left_alone(tmp_path):
    rows, holes = surveyed(folder(tmp_path / "affine"))
    assert holes == []
    integers = {f"{name} [top]" for name in ("NaN everywhere", "infinity everywhere", "one NaN", "one infinity")}
    integers.add("answer in less precision [top]")
    unmoved = {f"{name} [top]" for name in ("bias zero", "bias shifted", "inputs in less precision")}
    unmoved |= {"answer to inputs x10 [top]"}
    for name, row in rows.items():
        if name in integers:
            assert not row.formed and linter._note(row) == "not applicable: not of a floating-point type", row
            continue
        # In both test cases and one benchmark case, each output for itself.
        assert row.formed == 3 and not row.absent, row
        if name in unmoved:
            assert row.right and row.refused + len(row.right) == 3, row
        else:
            assert row.refused == (0 if row.kind == trivial.EXACT else 3), row
    baselines = [row for name, row in rows.items() if row.kind == trivial.BLIND and row.baseline_formed]
    assert {row.baseline_refused for row in baselines} == {3} and len(baselines) > 15
    assert {"copy of w [y]", "x shifted [top]", "bias zero [y]", "one output fewer"} <= set(rows)


Y = "    size = (data.w.abs()"
LAX = {
    # Small values under an absolute tolerance.
    "absolute tolerance": ([("ATOL = 2**-11 * (1 + 2**-10), 2**-20", "ATOL = 1e-3, 1e9")], {"zeros [y]", "ones [y]"}),
    "a share may be wrong": (
        [(Y, "    if ((y.double() - want).abs() <= 2**-10 * want.abs()).double().mean() >= 0.9:\n"
             "        return check.Result(True)\n" + Y)],
        {"1 in 20 unwritten [y]", "1 in 20 zero [y]", "one NaN [y]", "one infinity [y]", "largest element zero [y]"},
    ),
    "NaN passes": (
        [(Y, "    if not ((y.double() - want).abs() > 2**-10 * want.abs()).any():\n"
             "        return check.Result(True)\n" + Y)],
        {"NaN everywhere [y]", "one NaN [y]", "1 in 20 unwritten [y]"},
    ),
    "the seed does nothing": ([("manual_seed(seed)", "manual_seed(5)")], {"previous answer [y]"}),
    "only directions count": (
        [("bias = torch.randn(m,", "bias = 1e-3 * torch.randn(m,"),
         (Y, "    if torch.cosine_similarity(y.double(), want, 0) > 0.999:\n        return check.Result(True)\n" + Y)],
        {"answer to inputs x10 [y]", "answer in less precision [y]", "bias zero [y]"},
    ),
    "only the mean counts": (
        [(Y, "    if (y.double().mean() - want.mean()).abs() <= 1e-3:\n        return check.Result(True)\n" + Y)],
        {"mean of the answer [y]"},
    ),
    "less precision passes": ([("RTOL, ATOL = 2**-11", "RTOL, ATOL = 2**-7")], {"answer in less precision [y]"}),
    "types are not looked at": (
        [(Y, "    if y.dtype == torch.float32:\n        y = y.half()\n" + Y),
         ("want[1].shape, torch.int32", "want[1].shape, output[1].dtype")],
        {"wrong type of elements [y]"},
    ),
    "shapes are broadcast": (
        [("compare_y(output[0], want", "compare_y(output[0].squeeze(), want"),
         ("form_error(output[1], want[1].shape", "form_error(output[1], output[1].shape"),
         ("torch.equal(output[1], want[1])", "bool((output[1] == want[1]).all())")],
        {"one more axis [y]"},
    ),
    "an output is not looked at": (
        [("if torch.equal(output[1], want[1]) else", "if len(output) == 2 else")],
        {"zeros [top]", "previous answer [top]", "1 in 20 zero [top]"},
    ),
    "an input is nearly nothing": (
        [("RTOL, ATOL = 2**-11", "RTOL, ATOL = 2**-8"), ("bias = torch.randn(m,", "bias = 2**-14 * torch.randn(m,")],
        {"bias zero [y]"},
    ),
    "an input is an answer": (
        [("w = torch.randn(m, k, generator=gen, device=device)", "w = torch.eye(m, k, device=device)"),
         ("bias = torch.randn(m,", "bias = 0 * torch.randn(m,"), ("(64, 32, 1)", "(64, 64, 1)"),
         ("(100, 7, 2)", "(99, 99, 2)"), ("(40, 48, 3)", "(40, 41, 3)"),
         ("terms.argmax(1).int()\n", "data.x[:len(terms)].to(torch.int32)\n")],
        {"copy of x [y]"},
    ),
    "the tolerance is below a rounding": ([("RTOL, ATOL = 2**-11", "RTOL, ATOL = 2**-13")], {"exact"}),
    "check_implementation is another check": (
        [("    return result.ok, result.message", '    return True, ""')], {"zeros, by check_implementation [y]"},
    ),
    "a baseline may answer anything": (
        [("PEER_TOL = 1e-2", "PEER_TOL = 1e9")], {"zeros [y]", "answer to inputs x10 [y]"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAX)
def test_each_weakness_is_found(tmp_path, name):
    changes, wanted = LAX[name]
    rows, holes = surveyed(folder(tmp_path / "affine", *changes))
    assert wanted <= set(holes), holes
    for candidate in wanted:
        assert "HOLE" in linter._note(rows[candidate])


def test_a_narrow_weakness_is_told_from_the_others(tmp_path):
    """What still is refused is not reported."""
    _, holes = surveyed(folder(tmp_path / "precision", ("RTOL, ATOL = 2**-11", "RTOL, ATOL = 2**-8")), baselines=False)
    assert holes == ["answer in less precision [y]"]
    _, holes = surveyed(folder(tmp_path / "seed", ("manual_seed(seed)", "manual_seed(5)")))
    assert holes == ["previous answer [y]", "previous answer [top]"]


def test_an_input_that_is_always_zero_may_be_left_out(tmp_path):
    for size in ("0", "1e-7"):  # below a rounding is nothing, too
        _, holes = surveyed(folder(tmp_path / size, ("bias = torch.randn(m,", f"bias = {size} * torch.randn(m,")))
        assert len(holes) == 1
        assert holes[0].startswith("bias [y]: the answer depends on it, but not on whether it is left out")


def test_an_input_that_nobody_reads_is_named_and_no_hole(tmp_path):
    rows, holes = surveyed(folder(tmp_path / "affine", ("+ data.bias.double(), terms", "+ 0, terms")))
    assert holes == []
    assert linter._note(rows["bias zero [y]"]) == "leaves the answer as it is in every case"


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
    assert linter._note(rows["zeros [top]"]) == "is the answer in m=50 k=1"
    assert rows["mean of the answer [y]"].refused == rows["mean of the answer [y]"].formed == 4
    assert linter._note(rows["mean of the answer [y]"]) == "not applicable in m=1 k=7: one element is its own mean"


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
    assert rows["often"].hole() == "accepted in 1 cases, first m=1 (4 of 8 other seeds)"


def test_a_lost_process_costs_one_candidate(tmp_path):
    """Inputs that make a reference crash are said, and the next candidate has its data again."""
    found = folders.find(str(folder(tmp_path / "affine")))
    inner, lost = asked(found), []

    def ask(message):
        if message.get("candidate") == "x zero [y]" and message["op"] == "attempt":
            lost.append(message)
            inner({"op": "case", "case": {"m": 1, "k": 1}, "seed": 9})  # what is there now is no longer the case's
            raise Died("RUNTIME_ERROR", "killed by SIGABRT")
        return inner(message)

    rows = {row.name: row for row in linter.survey(ask, linter.chosen(found, "cpu", False), False)[0]}
    assert len(lost) == 3 and rows["x zero [y]"].formed == 0
    assert rows["x zero [y]"].absent.keys() == {"the reference's process was lost: killed by SIGABRT"}
    assert rows["x shifted [y]"].refused == rows["a list of numbers [top]"].refused == 3


def test_a_reference_of_another_shape_is_said(tmp_path):
    with pytest.raises(ValueError, match=r"ref_kernel must return a tensor of the output's shape for each output"):
        surveyed(folder(tmp_path / "affine", ("terms.sum(1) +", "terms.sum() +"), ("data.bias.double(),", "0,")))


def test_split_weights_are_another_source_of_answers():
    """The answer to other weights is what a kernel returns that keeps what it made of the first."""
    rows, holes = surveyed(SUPPORT / "problems" / "linear", short=True)
    assert holes == []
    assert rows["answer to other weights"].refused == rows["answer to other weights"].formed > 0
    assert {"weights.w zero", "inputs.x shifted", "copy of inputs.x"} <= set(rows)


QUANTISER = (
    '''"""quantise: fp32 (n,) to NVFP4 codes, scales and the number of codes that are not zero."""
from typing import NamedTuple
import torch
from dataclasses import dataclass


class Data(NamedTuple):
    """x: fp32 (n,); codes: uint8 (n // 2,), scales: e4m3 (n // 16,), count: int64 (1,) are written in place."""

    x: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor
    count: torch.Tensor


OUTPUTS = ("codes", "scales", "count")


@dataclass(frozen=True)
class Case:
    n: int
    seed: int

    def bytes_moved(self) -> int:
        return 5 * self.n


TESTS = [Case(64, 1), Case(4096, 2)]
BENCHMARKS = BENCHMARKS_CPU = []
''',
    '''"""Inputs, oracle and checker for quantise: bits must be equal."""
import torch
from task import Data

from problems.common import check, nvfp4


def generate_input(n, seed, device):
    gen = torch.Generator(device).manual_seed(seed)
    x = torch.randn(n, generator=gen, device=device) * torch.rand(n, generator=gen, device=device).mul(8).exp2()
    bytes, scales = (torch.zeros(k, dtype=torch.uint8, device=device) for k in (n // 2, n // 16))
    return Data(x, bytes, scales.view(torch.float8_e4m3fn), torch.zeros(1, dtype=torch.int64, device=device))


def ref_kernel(data):
    codes, scales = nvfp4.quantise(data.x.double())
    return codes, scales, (nvfp4.unpack(codes) & 7).count_nonzero().reshape(1)


def check_implementation(data, output):
    result = compare(data, ref_kernel(data), output)
    return result.ok, result.message


def compare(data, want, output, baseline=False):
    if not isinstance(output, tuple) or len(output) != len(want):
        return check.Result(False, f"mismatch found! want {len(want)} tensors")
    for got, right in zip(output, want):
        if problem := check.form_error(got, right.shape, right.dtype):
            return check.Result(False, problem)
        if not torch.equal(got.view(torch.uint8), right.view(torch.uint8)):
            return check.Result(False, "mismatch found! bits differ")
    return check.Result(True)
''',
)


def test_bytes_fp8_and_integers_are_linted_like_floats(tmp_path):
    path = tmp_path / "quantise"
    path.mkdir()
    for name, text in zip(("task.py", "reference.py"), QUANTISER, strict=True):
        (path / name).write_text(text)
    rows, holes = surveyed(path)
    assert holes == []
    for output in ("codes", "scales", "count"):
        for name in ("zeros", "ones", "previous answer", "copy of x", "1 in 20 zero", "1 in 20 unwritten"):
            assert rows[f"{name} [{output}]"].refused == 2, (name, output)
    assert rows["answer in less precision [scales]"].refused == 2
    assert rows["NaN everywhere [scales]"].refused == 2
    assert "one element" in linter._note(rows["mean of the answer [count]"])
    # A value of 2^8 and more, tenfold, is past the largest scale: what the reference says of it is said here.
    assert "the reference refuses such inputs: ValueError: x needs a block scale" in linter._note(
        rows["answer to inputs x10 [codes]"]
    )


# Token ids look rows up in packed codes, and a byte buffer with a head of its own is added; nothing is of a
# floating-point type.
BAG = (
    '''"""bag: the sum of the rows of e2m1 codes that the tokens name, and a value from the state."""
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Data(NamedTuple):
    """tokens: int64 (n,), below 32; codes: uint8 (32, k // 2); state: uint8 (8 + 4 k,); y: fp32 (k,)."""

    tokens: torch.Tensor
    codes: torch.Tensor
    state: torch.Tensor
    y: torch.Tensor


OUTPUTS = ("y",)
INOUT = ("state",)
OPAQUE = ("state",)


@dataclass(frozen=True)
class Case:
    n: int
    k: int
    seed: int

    def bytes_moved(self) -> int:
        return self.n * self.k


TESTS = [Case(3, 16, 1), Case(50, 64, 2)]
BENCHMARKS = BENCHMARKS_CPU = []
''',
    '''"""Inputs, oracle and checker for bag."""
import torch
from task import Data

from problems.common import check, nvfp4

HEAD = 0x5AFE


def generate_input(n, k, seed, device):
    gen = torch.Generator(device).manual_seed(seed)
    tokens = torch.randint(0, 32, (n,), generator=gen, device=device)
    codes = torch.randint(0, 256, (32, k // 2), dtype=torch.uint8, generator=gen, device=device)
    state = torch.empty(8 + 4 * k, dtype=torch.uint8, device=device)
    state[:8].view(torch.int64).fill_(HEAD)
    state[8:].view(torch.float32).copy_(torch.randn(k, generator=gen, device=device))
    return Data(tokens, codes, state, torch.full((k,), float("nan"), device=device))


def ref_kernel(data):
    if int(data.state[:8].view(torch.int64)) != HEAD:
        raise ValueError("this is no state")
    table = torch.tensor(nvfp4.E2M1, dtype=torch.float64, device=data.y.device)
    rows = table[nvfp4.unpack(data.codes).int()][data.tokens]
    weights = 0.5 ** torch.arange(len(rows), dtype=torch.float64, device=data.y.device)
    sums = data.state[8:].view(torch.float32)
    sums += (weights @ rows).float()
    return sums.double()


def check_implementation(data, output):
    result = compare(data, ref_kernel(data), output)
    return result.ok, result.message


def compare(data, want, output, baseline=False):
    return check.elementwise(output, want, 2**-21 * want.abs() + 2**-22, torch.float32)
''',
)
SCALED = "no input is of a floating-point type, and no others are scaled or rounded"


def bag(path: Path, *changes: tuple[str, str]) -> Path:
    path.mkdir()
    for name, text in zip(("task.py", "reference.py"), BAG, strict=True):
        for old, new in changes:
            text = text.replace(old, new)
        (path / name).write_text(text)
    return path


def test_token_ids_and_byte_buffers_are_linted_and_what_does_not_apply_is_said(tmp_path):
    rows, holes = surveyed(bag(tmp_path / "bag"))
    assert holes == []
    not_applicable = {
        "answer to inputs x10": SCALED, "inputs in less precision": SCALED,
        "state zero": "task.py says that state is OPAQUE", "state shifted": "task.py says that state is OPAQUE",
    }  # fmt: skip
    for name, row in rows.items():
        if name in not_applicable:
            assert not row.formed and linter._note(row) == f"not applicable: {not_applicable[name]}", row
        else:
            assert row.formed == 2 and not row.absent, row
            assert row.refused == (0 if row.kind == trivial.EXACT else 2), row
    # Other tokens are tokens, and the reference takes the state that stayed as it is.
    assert {"tokens zero", "tokens shifted", "codes shifted", "answer to inputs shifted", "copy of state"} <= set(rows)


def test_bytes_that_are_not_called_opaque_are_changed(tmp_path):
    rows, _ = surveyed(bag(tmp_path / "bag", ('OPAQUE = ("state",)\n', "")))
    assert linter._note(rows["state zero"]) == (
        "not applicable: the reference refuses such inputs: ValueError: this is no state"
    )


def test_ordinary_inputs_are_not_skipped(tmp_path):
    """Whatever is of a floating-point type is scaled, shifted and zeroed, alone and with the others."""
    rows, _ = surveyed(folder(tmp_path / "affine"))
    derived = [row for row in rows.values() if row.kind in (trivial.DERIVED, trivial.COARSE, trivial.ALONE)]
    assert len(derived) == 2 * (2 + 1 + 2 * 3)  # outputs; x10 and shifted, less precision, three inputs alone
    assert all(row.formed == 3 and not row.absent for row in derived)
    assert not [row for row in rows.values() for reason in row.absent if "OPAQUE" in reason or reason == SCALED]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ('("w",)', "OPAQUE is for integers and bytes, but w is of torch.float32"),
        ('("y",)', r"OPAQUE must name fields of weights or inputs, \['w', 'x', 'bias'\], got \['y'\]"),
        ('("wide",)', r"OPAQUE must name fields .*, got \['wide'\]"),
    ],
)  # fmt: skip
def test_opaque_cannot_hide_an_ordinary_input(tmp_path, names, message):
    with pytest.raises(ValueError, match=message):
        surveyed(folder(tmp_path / "affine", ("OUTPUTS =", f"OPAQUE = {names}\nOUTPUTS =")))


def test_opaque_of_another_form_is_bad_use(tmp_path):
    with pytest.raises(folders.UsageError, match=r"task\.py: OPAQUE must be a tuple of fields' names, got 'state'"):
        folders.find(str(bag(tmp_path / "bag", ('OPAQUE = ("state",)', 'OPAQUE = "state"'))))


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


def test_a_gpu_mode_folder_is_linted_too(tmp_path):
    assert surveyed(SUPPORT / "gpu_mode" / "vectoradd", short=True)[1] == []
    lax = tmp_path / "gpu_mode"
    shutil.copytree(SUPPORT / "gpu_mode", lax)
    file = lax / "vectoradd" / "reference.py"
    file.write_text(file.read_text().replace("atol=1e-6", "atol=100"))
    _, holes = surveyed(lax / "vectoradd", short=True)
    assert {"zeros", "previous answer", "copy of 0.0", "1 in 20 zero"} <= set(holes)
    # Forms are the judge's to check there.
    assert not {"one more axis", "wrong type of elements", "NaN everywhere"} & set(holes)


def test_the_whole_linter_says_what_is_wrong(tmp_path):
    """A wrong file that passes and a variant that does not are holes, in a report through processes of their own."""
    path = folder(tmp_path / "affine", ("bias = torch.randn(m,", "bias = 0 * torch.randn(m,"))
    for place, y in {
        "wrong/no_bias": "terms.sum(1)", "wrong/doubled": "2 * terms.sum(1)", "variants/good": SUM,
        "variants/off": SUM + " + 1",
    }.items():  # fmt: skip
        file = path / f"{place}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(KERNEL.format(first=f"{place}.", y=y))
    said: list[str] = []
    assert not linter.run(folders.find(str(path)), "cpu", said.append)
    holes = [line for line in said if line.startswith("HOLE")]
    assert [hole.partition(":")[0] for hole in holes] == ["HOLE bias [y]", "HOLE wrong/no_bias.py", "HOLE off"], said
    assert "passes all 2 cases" in holes[1] and "INCORRECT" in holes[2]
    assert any(line.startswith("doubled") and "INCORRECT" in line for line in said)
    assert any(line.startswith("good") and "2/2 cases right" in line for line in said)
    assert said[-1] == "affine: 3 holes found by the linter"


# One of them every day; the others' own tests judge the same files.
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name == "nvfp4_gemv" else pytest.mark.slow)
    for name in folders.problem_names()
])  # fmt: skip
def test_every_problem_passes_in_short(name, monkeypatch):
    """In a third of its small cases, the last among them, which says more than the first. What all files of wrong/ and
    all variants get in all cases is shown by the problem's own tests, and by the next one with a judge.
    """
    monkeypatch.setattr(linter, "FEW_FILES", 2)
    found, said = folders.find(name), []
    found = dataclasses.replace(found, tests=tuple(linter.small(found)[::-3]))
    assert linter.run(found, "cpu", said.append, short=True), "\n".join(said)


@pytest.mark.slow
@pytest.mark.parametrize("name", folders.problem_names())
def test_every_problem_passes(name):
    said: list[str] = []
    assert linter.run(folders.find(name), "cpu", said.append), "\n".join(said)


# ---------------------------------------------------------------- formats


FORMATS = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


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
    given = torch.cat([torch.randn(2000, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
                        torch.tensor([1 + 2.0**-(bits + 1), 1 + 3 * 2.0**-(bits + 1), float("inf")])])  # fmt: skip
    given = given[given.abs() > 0.1]  # within the normal numbers of each
    finite = torch.isfinite(given)
    assert torch.equal(values.rounded(given, bits)[finite], given[finite].to(dtype).double())
    assert torch.equal(values.rounded(given, bits)[~finite], given[~finite])


def test_casting_saturates_and_wraps_nothing():
    given = torch.tensor([1e30, -1e30, float("nan"), 2.5], dtype=torch.float64)
    assert values.cast(given, torch.float8_e4m3fn)[:2].double().tolist() == [448, -448]
    assert values.cast(given, torch.float16)[:2].tolist() == [65504, -65504]
    assert values.cast(given, torch.uint8).tolist() == [255, 0, 0, 2]
    assert values.cast(given, torch.int32).tolist() == [2**31 - 1, -(2**31), 0, 2]
    assert values.cast(given, torch.bool).tolist() == [True] * 4
    packed = values.cast(given, values.FP4)
    assert packed.dtype == values.FP4 and packed.view(torch.uint8).tolist() == [255, 0, 0, 2]


def test_packed_values_are_read_low_nibble_first():
    packed = torch.tensor([[0x21, 0xF7]], dtype=torch.uint8).view(values.FP4)
    assert values.numbers(packed).tolist() == [0.5, 1.0, 6.0, -6.0]
    shifted = values.shifted(packed.view(torch.uint8))
    assert shifted.tolist() == [[0xF7, 0x21]]


def test_inputs_take_the_outputs_form():
    given = torch.arange(6, dtype=torch.float64)
    assert values.fitted(given.view(2, 3), torch.Size([2, 3])).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert values.fitted(given[:3], torch.Size([2, 3])).tolist() == [[0, 1, 2], [0, 1, 2]]
    assert values.fitted(given, torch.Size([4])).tolist() == [0, 1, 2, 3]
    assert values.fitted(given[:2], torch.Size([5])).tolist() == [0, 1, 0, 1, 0]


def test_layouts_are_kept():
    form = torch.zeros(3, 1, 2, dtype=torch.float16).permute(1, 0, 2)[:, :, :]
    given = torch.arange(6).view(1, 3, 2).half()
    made = values.like(form, given)
    assert made.stride() == form.stride() and torch.equal(made, given)
    assert made.untyped_storage().data_ptr() != form.untyped_storage().data_ptr()
