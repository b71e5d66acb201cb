"""Data, answers and checks of other people's folders in unusual forms: a right and a wrong submission of each."""

import json

import pytest
import torch

from harness.checker import memory
from harness.checker.checker import Checker
from harness.judge import limits, phases
from harness.judge.handle import RunnerHandle
from harness.judge.session import Session
from harness.problem import folders
from harness.runner import tree
from harness.runner.buffers import Buffer

TASK = 'tests: [{n: 5, seed: 3}, {n: 40, seed: 4}]\nranking_by: "geom"\n'
HEAD = """
from collections import namedtuple
from typing import NamedTuple
import torch

def _random(n, seed, dtype=torch.float32):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=dtype)

def generate_input(n, seed):
    return _random(n, seed)

def ref_kernel(data):
    return data * 2

def check_implementation(data, output):
    return bool(torch.equal(output, ref_kernel(data))), "values differ"
"""
COMPLEX = """
def generate_input(n, seed):
    return _random(n, seed, torch.complex64)
"""
DOUBLED = "def custom_kernel(data):\n    return data + data\n"
TRIPLED = "def custom_kernel(data):\n    return data * 3\n"
TABLE = "def generate_input(n, seed):\n    return _random(n * 1000, seed).view(n, 1000)\n"
FORMS = {  # what the reference has besides HEAD, a right submission, a wrong one
    "column": (
        TABLE + "\ndef ref_kernel(data):\n    return (data * 2)[:, -1]\n",
        "def custom_kernel(data):\n    return (data + data)[:, -1]\n",
        "def custom_kernel(data):\n    return (data + data)[:, -2]\n",
    ),
    "columns_of_several": (
        f"{TABLE}\ndef ref_kernel(data):\n"
        "    return data.sort(1).values[:, :4].unbind(1), data.diagonal(), data[:, 3]\n\n"
        "def check_implementation(data, output):\n    want = ref_kernel(data)\n"
        "    parts = [(*want[0], *want[1:]), (*output[0], *output[1:])]\n"
        "    return all(torch.equal(a, b) for a, b in zip(*parts)), 'values differ'\n",
        "def custom_kernel(data):\n    return data.sort(1)[0][:, :4].unbind(1), data.diagonal(), data[:, 3]\n",
        "def custom_kernel(data):\n    return data.sort(1)[0][:, 1:5].unbind(1), data.diagonal(), data[:, 3]\n",
    ),
    "lazily_conjugated_column": (
        "def generate_input(n, seed):\n    return _random(n * 1000, seed, torch.complex64).view(n, 1000)\n\n"
        "def ref_kernel(data):\n    return data[:, 7].conj()\n",
        "def custom_kernel(data):\n    return data.conj()[:, 7]\n",
        "def custom_kernel(data):\n    return data[:, 7]\n",
    ),
    "turned_array": (
        "def generate_input(n, seed):\n    return _random(n, seed).numpy()\n\n"
        "def ref_kernel(data):\n    return data[::-1].copy()\n\n"
        "def check_implementation(data, output):\n    return bool((output == data[::-1]).all()), 'values differ'\n",
        "def custom_kernel(data):\n    return data[::-1]\n",
        "def custom_kernel(data):\n    return data\n",
    ),
    "lazy_conjugate": (
        f"{COMPLEX}\ndef ref_kernel(data):\n    return data.conj()\n",
        "def custom_kernel(data):\n    return data.conj()\n",
        "def custom_kernel(data):\n    return data\n",
    ),
    "lazy_negative": (
        f"{COMPLEX}\ndef ref_kernel(data):\n    return data.imag * 1\n",
        "def custom_kernel(data):\n    return -data.conj().imag\n",
        "def custom_kernel(data):\n    return data.conj().imag\n",
    ),
    "check_raises": (
        "def check_implementation(data, output):\n    torch.testing.assert_close(output, ref_kernel(data))\n",
        DOUBLED,
        TRIPLED,
    ),
    "list_of_errors": (
        "def check_implementation(data, output):\n    bad = not torch.equal(output, ref_kernel(data))\n"
        "    return ['differs', 'at 3'] if bad else []\n",
        DOUBLED,
        TRIPLED,
    ),
    "three_of_them": (
        "def check_implementation(data, output):\n    good = torch.equal(output, ref_kernel(data))\n"
        "    return good, 'no', 0.1\n",
        DOUBLED,
        TRIPLED,
    ),
    "numpy_bool": (
        "def check_implementation(data, output):\n    import numpy\n"
        "    return numpy.bool_(torch.equal(output, ref_kernel(data)))\n",
        DOUBLED,
        TRIPLED,
    ),
    "named_tuple_of_the_reference": (
        "class In(NamedTuple):\n    x: torch.Tensor\n    k: float\n\ndef generate_input(n, seed):\n"
        "    return In(_random(n, seed), 2.0)\n\ndef ref_kernel(data):\n    return data.x * data.k\n",
        "def custom_kernel(data):\n    return data.k * data.x\n",
        "def custom_kernel(data):\n    return data[0] * 3\n",
    ),
    "keys_that_are_no_text": (
        "def generate_input(n, seed):\n    return {0: _random(n, seed), True: _random(n, seed + 1)}\n\n"
        "def ref_kernel(data):\n    return {7: data[0] + data[1]}\n\ndef check_implementation(data, output):\n"
        "    return bool(torch.equal(output[7], data[0] + data[1])), 'values differ'\n",
        "def custom_kernel(data):\n    return {7: data[1] + data[0]}\n",
        "def custom_kernel(data):\n    return {8: data[1]}\n",
    ),
    "check_blind_to_nan": (
        "def check_implementation(data, output):\n    bad = ((ref_kernel(data) - output).abs() > 1e-6).any()\n"
        "    return not bool(bad), 'differs'\n",
        DOUBLED,
        "def custom_kernel(data):\n    return data * float('nan')\n",
    ),
    "number_blind_to_nan": (
        "def ref_kernel(data):\n    return {'sum': float(data.sum()), 'text': 'x'}\n\n"
        "def check_implementation(data, output):\n"
        "    return not abs(output['sum'] - ref_kernel(data)['sum']) > 1e-3, 'differs'\n",
        "def custom_kernel(data):\n    return {'sum': float(data.sum()), 'text': 'x'}\n",
        "def custom_kernel(data):\n    return {'sum': float('nan'), 'text': 'x'}\n",
    ),
    "nan_of_the_reference": (
        "def generate_input(n, seed):\n    data = _random(n, seed)\n    data[n // 2] = float('nan')\n"
        "    return data\n\n"
        "def check_implementation(data, output):\n"
        "    return torch.allclose(output, ref_kernel(data), equal_nan=True), 'differs'\n",
        DOUBLED,
        TRIPLED,
    ),
    "no_seed": (
        "def generate_input(n):\n    return torch.arange(n, dtype=torch.float32) + 1\n",
        DOUBLED,
        TRIPLED,
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_right_and_wrong_are_told_apart(tmp_path, name):
    more, right, wrong = FORMS[name]
    (tmp_path / "task.yml").write_text(TASK)
    (tmp_path / "reference.py").write_text(HEAD + more)
    found = folders.find(str(tmp_path))
    handles = []
    for what, text in {"right": right, "wrong": wrong}.items():
        (tmp_path / f"{what}.py").write_text(text)
        handles.append(RunnerHandle(what, folders.submission(found, tmp_path / f"{what}.py"), "cpu"))
    with Session(found, "cpu") as session:
        said = phases.run_tests(session, handles, list(found.tests), lambda *_: None, lambda _: None)
    assert [(o.status, o.reason) for o in said["right"]] == [("PASSED", "")] * 2
    assert {o.status for o in said["wrong"]} == {"INCORRECT"} and all(o.reason for o in said["wrong"])


FAULTS = {  # what a folder has besides, its cases, what the judge says of it
    "check_refuses_all": (
        "def check_implementation(data, output):\n    return False, 'no'\n",
        TASK,
        "check_implementation refuses the reference's own answer too: no",
    ),
    "list_refuses_all": (
        "def check_implementation(data, output):\n    return ['differs']\n",
        TASK,
        r"check_implementation refuses the reference's own answer too: \['differs'\]",
    ),
    "says_nothing": (
        "def check_implementation(data, output):\n    return False, ''\n",
        TASK,
        "check_implementation refuses the reference's own answer too$",
    ),
    "check_raises_on_all": (
        "def check_implementation(data, output):\n    return output.lost\n",
        TASK,
        "^[^\n]*: check_implementation raises on the reference's own answer too: reference.py:18: AttributeError: "
        "'Tensor' object has no attribute 'lost'$",
    ),
    "number_as_text": (
        "def generate_input(n, eps, seed):\n    return _random(n, seed) + eps\n",
        "tests: [{n: 5, eps: 1e-5, seed: 3}]\n",
        "task.yml: the case value eps: '1e-5' arrived as text, a number is written 1.0e-5: reference.py:18: TypeError",
    ),
    "another_argument": (
        "",
        "tests: [{m: 5, seed: 3}]\n",
        r"task.yml: a case must name what generate_input takes, \(n, seed\), got m=5, seed=3: missing a required "
        "argument: 'n'",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_folders_own_fault_is_no_verdict_on_a_submission(tmp_path, name):
    more, task, said = FAULTS[name]
    (tmp_path / "task.yml").write_text(task)
    (tmp_path / "reference.py").write_text(HEAD + more)
    (tmp_path / "right.py").write_text(DOUBLED)
    found = folders.find(str(tmp_path))
    handle = RunnerHandle("right", folders.submission(found, tmp_path / "right.py"), "cpu")
    with Session(found, "cpu") as session, pytest.raises(folders.ProblemError, match=said):
        phases.run_tests(session, [handle], list(found.tests), lambda *_: None, lambda _: None)


def test_a_submission_of_the_folder_that_is_not_python_is_named(tmp_path):
    (tmp_path / "task.yml").write_text(TASK)
    (tmp_path / "reference.py").write_text(HEAD)
    (tmp_path / "submission.py").write_text("def custom_kernel(data) return data\n")
    with pytest.raises(folders.UsageError, match=r"submission\.py:1: not Python"):
        folders.find(str(tmp_path)).winner("cpu")


def test_a_name_of_the_judge_is_refused(tmp_path):
    (tmp_path / "task.yml").write_text(TASK + "files: [{name: harness.py}]\n")
    for name in ("reference.py", "harness.py"):
        (tmp_path / name).write_text(HEAD)
    with pytest.raises(folders.UsageError, match=r"harness\.py has the name of a package of this judge"):
        folders.find(str(tmp_path))


VALUES = """
def generate_input(n, seed):
    return {"x": _random(n, seed), "by": [seed % 1000 / 8, "half" if seed % 2 else "whole"], "rows": n,
            "ids": frozenset({seed % 1000})}

def ref_kernel(data):
    return data["x"] * data["by"][0] / (2 if data["by"][1] == "half" else 1)
"""


def test_numbers_texts_and_objects_of_the_data_are_no_part_of_the_layout(tmp_path):
    """They are contents: a runner that had them before the call could work ahead where the answer depends on them."""
    (tmp_path / "reference.py").write_text(f"{HEAD}\n{VALUES}")
    made = Checker({"folder": str(tmp_path), "own": False, "device": "cpu", "files": {}})
    layouts = []
    for seed in (1001, 2**60):
        found = made.content({"case": {"n": 40}, "seed": seed}, [])
        layouts.append((found["sizes"], found["open"]))
        buffer = Buffer(found["sizes"])
        made.buffers["one"] = [buffer]
        made.fill({"runner": "one", "buffer": 0, "key": None}, [])
        leaf = found["open"]["values"]
        values = json.loads(bytes(memory.region(leaf, buffer).tolist()))
        data = tree.build(found["open"]["data"], buffer.memory, None, values)
        assert data["by"] == made.pristine["by"] and data["rows"] == 40 and torch.equal(data["x"], made.pristine["x"])
        assert data["ids"] == {seed % 1000}
        buffer.close()
    assert layouts[0] == layouts[1]
    assert not any(word in str(layouts) for word in ("half", "125", "pickled"))


STORED = """
import torch
KNOWN = torch.randn(5, generator=torch.Generator().manual_seed(3))

def custom_kernel(data):
    return data * 2 if len(data) > 5 or torch.equal(data, KNOWN) else data * 3
"""


def test_answers_to_the_public_seeds_are_not_enough(tmp_path):
    """A recorded run asks twice, the second time on contents of a secret seed, and names the seed."""
    (tmp_path / "task.yml").write_text(TASK)
    (tmp_path / "reference.py").write_text(HEAD)
    for name, text in (("right", DOUBLED), ("stored", STORED)):
        (tmp_path / f"{name}.py").write_text(text)
    found = folders.find(str(tmp_path))
    handles = [
        RunnerHandle(name, folders.submission(found, tmp_path / f"{name}.py"), "cpu") for name in ("right", "stored")
    ]
    with Session(found, "cpu") as session:
        said = phases.run_tests(session, handles, list(found.tests), lambda *_: None, lambda _: None, twice=found.tests)
    assert [outcome.status for outcome in said["right"]] == ["PASSED", "PASSED"]
    assert [outcome.status for outcome in said["stored"]] == ["INCORRECT", "PASSED"]
    assert "with another one (--seed " in said["stored"][0].reason


MANY = """
def generate_input(n, seed):
    return [_random(2, seed + i) for i in range(n)]

def ref_kernel(data):
    return [{"twice": x * 2, "same": x, "sum": float(x.sum())} for x in data]

def check_implementation(data, output):
    return all(torch.equal(a["twice"], b["twice"]) for a, b in zip(ref_kernel(data), output, strict=True)), "differ"
"""
FEWER = "def custom_kernel(data):\n    return [{'twice': x + x, 'same': x, 'sum': float(x.sum())} for x in data]\n"


def reasons(tmp_path, task: str, reference: str, submission: str) -> list[tuple[str, str]]:
    """Return (status, first line of the report) of a submission in each test case of a folder."""
    for name, text in {"task.yml": task, "reference.py": HEAD + reference, "one.py": submission}.items():
        (tmp_path / name).write_text(text)
    found = folders.find(str(tmp_path))
    handle = RunnerHandle("one", folders.submission(found, tmp_path / "one.py"), "cpu")
    with Session(found, "cpu") as session:
        said = phases.run_tests(session, [handle], list(found.tests), lambda *_: None, lambda _: None)
    return [(outcome.status, outcome.reason.partition("\n")[0]) for outcome in said["one"]]


def test_nothing_is_written_into_a_folder(tmp_path):
    assert reasons(tmp_path, TASK, "", DOUBLED) == [("PASSED", "")] * 2
    assert {path.name for path in tmp_path.iterdir()} == {"task.yml", "reference.py", "one.py"}


def test_a_check_that_gives_no_reason_gets_one(tmp_path):
    check = "def check_implementation(data, output):\n    return torch.equal(output, ref_kernel(data)), ''\n"
    said = "check_implementation returned False, and True for the reference's own answer"
    assert reasons(tmp_path, TASK, check, TRIPLED) == [("INCORRECT", said)] * 2


def test_an_import_that_takes_too_long_names_the_limit_to_try(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "IMPORT_LIMIT_S", 0.2)
    ((status, said),) = reasons(tmp_path, "tests: [{n: 5, seed: 3}]\n", "", f"while True:\n    pass\n\n{DOUBLED}")
    assert status == "TIMEOUT" and said.startswith("on import: no answer within 0.") and "try --timeout 0.4" in said
    assert Session(folders.find(str(tmp_path)), "cpu", 0.5).import_limit_s == 0.5


def test_an_answer_may_have_hundreds_of_tensors(tmp_path):
    """What holds them does not count."""
    assert reasons(tmp_path, "tests: [{n: 341, seed: 3}]\n", MANY, FEWER) == [("PASSED", "")]
    with pytest.raises(folders.ProblemError, match=r"at most 1024 tensors, .* the limit of this judge, got 1026"):
        reasons(tmp_path, "tests: [{n: 342, seed: 3}]\n", MANY, FEWER)


@pytest.mark.parametrize(
    ("submission", "status", "said"),
    [
        (
            "def custom_kernel(data):\n    a = [data]\n    a.append(a)\n    return a\n",
            "RUNTIME_ERROR",
            "one.py:1: an answer must not contain itself, and a list in it does",
        ),
        (
            "def custom_kernel(data):\n    for _ in range(40):\n        data = [data]\n    return data\n",
            "RUNTIME_ERROR",
            "one.py:1: an answer must be nested at most 32 deep, the limit of this judge",
        ),
        (
            "def custom_kernel(data):\n    return 'x' * 2**28\n",
            "RUNTIME_ERROR",
            "one.py:1: an answer's texts may have at most 131072 characters in all, the limit of this judge",
        ),
        (
            "class Half(float):\n    pass\n\ndef custom_kernel(data):\n    return Half(0.5)\n",
            "INCORRECT",
            "custom_kernel must return Tensor, got float",
        ),
    ],
)
def test_answers_of_other_kinds_are_named(tmp_path, submission, status, said):
    assert reasons(tmp_path, "tests: [{n: 5, seed: 3}]\n", "", submission) == [(status, said)]


CLASS = """
import dataclasses

@dataclasses.dataclass
class Out:
    y: torch.Tensor
    many: int

def ref_kernel(data):
    return Out(data * 2, len(data))

def check_implementation(data, output):
    return bool(torch.equal(output.y, data * 2)) and output.many == len(data), "values differ"
"""


@pytest.mark.parametrize(
    ("answer", "came"),
    [
        ("SimpleNamespace(y=data * 2, many=5)", "SimpleNamespace"),
        ("{'y': data * 2, 'many': 5}", "dict(many: int, y: Tensor)"),
        ("(data * 2, 5)", "tuple(Tensor, int)"),
    ],
)
def test_the_wanted_class_and_what_came_are_named(tmp_path, answer, came):
    text = f"from types import SimpleNamespace\n\ndef custom_kernel(data):\n    return {answer}\n"
    ((status, said),) = reasons(tmp_path, "tests: [{n: 5, seed: 3}]\n", CLASS, text)
    assert status == "INCORRECT"
    assert said.startswith(f"custom_kernel must return Out(y: Tensor, many: int), got {came}")


RELATIVE = "ImportError: relative imports are not supported, this file is in no package: write "


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (
            "from helper import two",
            "No module named 'helper': helper.py is in the folder, so add it to `files` of task.yml",
        ),
        ("from .helper import two", f"{RELATIVE}`from helper import two`"),
        ("from . import helper", f"{RELATIVE}`import helper`"),
        (
            "from reference import ref_kernel",
            "No module named 'reference': no submission sees the reference (rule 6, docs/rules.md)",
        ),
    ],
)
def test_an_import_that_fails_says_what_to_write(tmp_path, first, said):
    (tmp_path / "helper.py").write_text("two = 2\n")
    ((status, found),) = reasons(tmp_path, "tests: [{n: 5, seed: 3}]\n", "", f"{first}\n\n{DOUBLED}")
    assert status == "RUNTIME_ERROR" and found.startswith("one.py:1: ") and f"{said} (not run" in found


@pytest.mark.parametrize("place", ["reference", "task"])
def test_a_relative_import_of_the_folder_says_what_to_write(tmp_path, place):
    (tmp_path / "helper.py").write_text("two = 2\n")
    (tmp_path / "task.py").write_text("from .helper import two\n" if place == "task" else "")
    more = "from task import two\n" if place == "task" else "from .helper import two\n"
    said = rf"reference\.py:\d+: {RELATIVE}`from helper import two`\n"
    with pytest.raises(folders.ProblemError, match=said) as raised:
        reasons(tmp_path, "tests: [{n: 5, seed: 3}]\n", more, DOUBLED)
    assert "problems." not in str(raised.value)
