"""docs/architecture.md names the functions and the ops of one decode step in the order in which they are called."""

import ast
import dataclasses
import re
import sys
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pytest

from problems.common import load
from problems.dsv4_forward import judged_call
from problems.dsv4_forward.ops import NAMES, Ops
from problems.dsv4_forward.weights.config import CSA, TINY
from tests.support import ROOT

PAGE = ROOT / "docs" / "architecture.md"
FOLDER = load.PROBLEMS / "dsv4_forward"
TASK, REFERENCE = load.module(FOLDER, "task"), load.module(FOLDER, "reference")
CONTEXT = 384  # tokens: the second sequence's new one completes an entry in every layer; more entries than are kept
PARTS = ("once", "call", "layer", "head")
BLOCK, HEAD = "layers.py:block", "model.py:Model.logits"


@dataclass(frozen=True)
class Step:
    """A row of the page's table. function: file:name, the file from the problem's folder; ops: called after it."""

    part: str
    function: str
    ops: tuple[str, ...]

    @property
    def events(self) -> list[str]:
        return [self.function, *(f"op {op}" for op in self.ops)]


def walk() -> list[Step]:
    section = PAGE.read_text().partition("\n## One decode step\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\w+) \| `([\w./]+:[\w.]+)` \| ([\w` ]*?) ?\| .+ \|$", section, re.MULTILINE)
    assert len(rows) == sum(line.startswith("|") for line in section.splitlines()) - 2, "every row is a step"
    return [Step(part, function, tuple(re.findall(r"`(\w+)`", ops))) for part, function, ops in rows]


def part(name: str) -> list[str]:
    """The functions and ops of a part of the page, in order."""
    return [event for step in walk() if step.part == name for event in step.events]


@pytest.fixture(scope="module")
def events() -> list[str]:
    """The functions of this folder and the ops that prepare and one call go through."""
    case = dataclasses.asdict(TASK.Case("tiny", "nvfp4", 2, CONTEXT, "decode", 1, seed=1))
    weights = REFERENCE.generate_weights(**case, device="cpu")
    data = TASK.Data(weights, *REFERENCE.generate_input(**case, device="cpu"))
    found: list[str] = []

    def seen(frame, event, _):
        file = Path(frame.f_code.co_filename)
        if event == "call" and FOLDER in file.parents:
            found.append(f"{file.relative_to(FOLDER)}:{frame.f_code.co_qualname}")

    def noted(name, op):
        def call(*arguments, **options):
            found.append(f"op {name}")
            op(*arguments, **options)

        return call

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        prepared = judged_call.prepare(weights, "winners")
        prepared.model.ops = Ops(**{name: noted(name, getattr(prepared.model.ops, name)) for name in NAMES})
        judged_call.run(data._replace(weights=prepared))
    finally:
        sys.setprofile(before)
    return found


def after(wanted: list[str], events: list[str]) -> None:
    """Fail unless `wanted` are among `events` in this order."""
    rest, last = iter(events), None
    for one in wanted:
        assert one in rest, f"{one} is not called after {last}: change docs/architecture.md"
        last = one


def ops(events: list[str]) -> list[str]:
    return [event for event in events if event.startswith("op ")]


def test_the_parts_are_in_order_and_few_enough_to_read():
    assert tuple(name for name, _ in groupby(step.part for step in walk())) == PARTS
    assert 20 <= len(walk()) <= 32


@pytest.mark.parametrize("step", walk(), ids=lambda step: step.function)
def test_a_step_names_a_function_that_says_what_it_does(step):
    file, _, name = step.function.partition(":")
    node: ast.AST = ast.parse((FOLDER / file).read_text())
    for inner in name.split("."):
        node = next(n for n in node.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == inner)
    assert ast.get_docstring(node), f"{step.function} has no docstring"


def test_before_the_layers(events):
    at = events.index(BLOCK)
    assert ops(events[:at]) == ops(part("call"))
    after(part("once") + part("call"), events[:at])


def test_a_layer_calls_these_functions_and_exactly_these_ops(events):
    starts = [i for i, event in enumerate(events) if event == BLOCK]
    assert len(starts) == TINY.num_hidden_layers
    ends = [*starts[1:], events.index(HEAD)]
    layers = [events[a:b] for a, b in zip(starts, ends, strict=True)]
    indexed = [layer for layer, ratio in zip(layers, TINY.ratios, strict=True) if ratio == CSA]
    assert len(indexed) == 2
    for layer in indexed:
        after(part("layer"), layer)
        assert ops(layer) == ops(part("layer"))


def test_behind_the_layers(events):
    rest = events[events.index(HEAD) :]
    after(part("head"), rest)
    assert ops(rest) == ops(part("head"))
