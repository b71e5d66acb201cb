"""Folders in GPU MODE's format whose answers are numbers, texts and None in tuples, lists, dicts and classes."""

from pathlib import Path

import pytest

from harness.lint import trivial
from tests.support.affine import surveyed

TASK = """files:
  - {"name": "submission.py", "source": "@SUBMISSION@"}
  - {"name": "reference.py", "source": "reference.py"}
lang: "py"
tests: [{"n": 64, "seed": 1}, {"n": 99, "seed": 2}]
benchmarks: [{"n": 200, "seed": 3}]
"""
REFERENCE = '''
import dataclasses
import math
from typing import NamedTuple

import numpy
import torch


class Pair(NamedTuple):
    y: torch.Tensor
    n: int


@dataclasses.dataclass
class Held:
    y: torch.Tensor
    loss: float
    done: bool


def generate_input(n, seed):
    return (torch.randn(n, generator=torch.Generator().manual_seed(seed)),)


def ref_kernel(data):
    x = data[0]
    y = x.sort().values
    return {answer}


def same(got, want):
    """Deep, strict about classes, with a tolerance for floating-point numbers."""
    if type(got) is not type(want):
        return False
    if isinstance(want, torch.Tensor | numpy.ndarray):
        got, want = torch.as_tensor(got), torch.as_tensor(want)
        return got.shape == want.shape and torch.allclose(got, want, rtol=1e-6, atol=0)
    if isinstance(want, tuple | list):
        return len(got) == len(want) and all(map(same, got, want))
    if isinstance(want, dict):
        return set(got) == set(want) and all(same(got[key], want[key]) for key in want)
    if dataclasses.is_dataclass(want):
        return same(vars(got), vars(want))
    return math.isclose(got, want, rel_tol=1e-6) if isinstance(want, float) else got == want


def check_implementation(data, output):
    right = {check}
    return {said}
'''
DEEP = "same(output, ref_kernel(data))"
SAID = {
    "pair": "(right, '' if right else 'differs')",
    "text": "'' if right else 'differs'",
    "list": "[] if right else ['differs']",
    "bool": "right",
}


def folder(path: Path, answer: str, check: str = DEEP, said: str = "pair") -> Path:
    path.mkdir()
    (path / "task.yml").write_text(TASK)
    source = REFERENCE
    for name, text in {"answer": answer, "check": check, "said": SAID[said]}.items():
        source = source.replace(f"{{{name}}}", text)
    (path / "reference.py").write_text(source)
    return path


@pytest.mark.parametrize(
    "answer",
    [
        "(y, len(x))",
        "[y, float(x.sum()), None]",
        "{'sorted': y, 'n': len(x), 'how': 'ascending', 'warnings': ''}",
        "{'a': [y, {'b': (int(x.argmax()), bool(x.sum() > 0))}], 'none': None, 'empty': []}",
        "Pair(y, 0)",
        "Held(y, 0.0, True)",
        "(Held(y.double(), float(x.double().sum()), False), [Pair(x > 0, -1)])",
        "float(x.double().sum())",
        "(y.numpy(), float(y.numpy()[0]), 2**70, -1.0)",
        "(y, float('inf'), f'{float(x[0]):.3f}')",
        "{0: y, 1: torch.tensor(len(x)), 'zero': torch.zeros(3)}",
        "[2 * x[:3], *([1] if x[0] > 0 else [])]",
        "(y.expand(3, -1), y.view(1, -1).repeat(2, 1)[:, 5])",
    ],
)
def test_an_honest_check_has_no_hole(tmp_path, answer):
    rows, holes = surveyed(folder(tmp_path / "forms", answer))
    assert holes == [], [rows[name] for name in holes if name in rows]
    assert rows["exact"].formed == 3 and not rows["exact"].refused
    assert any(row.refused == 3 for row in rows.values())


def test_expanded_inputs_are_changed_where_they_are_in_memory(tmp_path):
    made = folder(tmp_path / "forms", "(x.sum(0), y[0])")
    file = made / "reference.py"
    drawn = "torch.randn(n, generator=torch.Generator().manual_seed(seed))"
    file.write_text(file.read_text().replace(f"({drawn},)", f"({drawn}.expand(3, n),)"))
    rows, holes = surveyed(made)
    assert holes == [] and any("zero" in name and row.refused for name, row in rows.items())


def test_an_input_that_gives_an_answer_of_another_shape_without_it_is_no_hole(tmp_path):
    """That zeros could not be tried shows nothing of what the cases need."""
    rows, holes = surveyed(folder(tmp_path / "forms", "x[x > 0]"))
    assert holes == []
    assert rows["0 zero"].note().startswith("not applicable: the answer to such inputs has another shape; a wrong file")


@pytest.mark.parametrize("said", SAID)
def test_every_way_in_which_a_check_answers_is_understood(tmp_path, said):
    assert surveyed(folder(tmp_path / "forms", "{'y': y, 'n': len(x)}", said=said))[1] == []


@pytest.mark.parametrize(
    ("answer", "check", "found"),
    [
        ("(y, len(x))", "same(output[0], ref_kernel(data)[0])", {"zeros [1]", "copy of 0 [1]"}),
        ("(y, len(x))", "output[1] == len(data[0])", {"zeros [0]", "previous answer [0]", "one NaN [0]"}),
        ("{'y': y, 'how': 'up'}", "same(output['y'], ref_kernel(data)['y'])", {"empty text [how]"}),
        (
            "Held(y, float(x.sum()), True)",
            "same(output.y, ref_kernel(data).y) and output.done",
            {"zeros [loss]", "one NaN [loss]", "previous answer [loss]"},
        ),
        (
            "[{'loss': float(x.sum())}, y]",
            "abs(output[0]['loss'] - float(data[0].sum())) < 1 and same(output[1], ref_kernel(data)[1])",
            {"answer in less precision [0.loss]"},
        ),
        ("len(x)", DEEP, {"previous answer"}),
        ("(torch.zeros(4), 0)", DEEP, {"zeros, all parts", "previous answer, all parts"}),
    ],
)
def test_a_part_that_a_check_does_not_see_is_named(tmp_path, answer, check, found):
    holes = surveyed(folder(tmp_path / "forms", answer, check))[1]
    assert found <= set(holes)
    parts = {name.partition(" [")[2] for name in found}
    assert all(name.partition(" [")[2] in parts or name.endswith(trivial.ALL_PARTS) for name in holes), holes
