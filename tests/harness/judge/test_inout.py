"""Inputs that a call may overwrite (task.py: INOUT): they may change, others may not, and each call gets them fresh."""

import os
from pathlib import Path

import pytest
import torch

from harness.checker.checker import Checker
from harness.checker.memory import WORD, same
from harness.judge import phases, replies
from harness.judge.handle import RunnerHandle
from harness.judge.outcome import Outcome
from harness.judge.session import Session
from harness.problem import folders
from harness.problem.folders import UsageError
from harness.runner import tree

# y = x + sums, and afterwards sums = y and the count is one more. A full state has a count that is not 0.
TASK = '''"""running: y = x + sums."""
from dataclasses import dataclass
from typing import NamedTuple

import torch


class State(NamedTuple):
    sums: torch.Tensor
    count: torch.Tensor


{classes}

OUTPUTS = ("y",)
INOUT = ("state",)


@dataclass(frozen=True)
class Case:
    n: int
    seed: int

    def bytes_moved(self) -> int:
        return 12 * self.n


TESTS = [Case(64, 1), Case(129, 2)]
BENCHMARKS = BENCHMARKS_CPU = [Case(50_000, 3)]
'''
FLAT = """class Data(NamedTuple):
    x: torch.Tensor
    state: State
    y: torch.Tensor
"""
SPLIT = """class Weights(NamedTuple):
    ones: torch.Tensor


class Inputs(NamedTuple):
    x: torch.Tensor
    state: State


class Outputs(NamedTuple):
    y: torch.Tensor


class Data(NamedTuple):
    weights: Weights
    inputs: Inputs
    outputs: Outputs
"""
REFERENCE = '''"""Inputs, oracle and checker for running."""
import torch
import task

from problems.common import check


def parts(data):
    return data if hasattr(data, "x") else data.inputs


{generators}


def made(n, seed, device):
    gen = torch.Generator(device).manual_seed(seed)
    x, sums = torch.randn(2, n, generator=gen, device=device).unbind()
    state = task.State(sums.clone(), torch.zeros(1, dtype=torch.int64, device=device))
    return x.clone(), state, torch.full_like(x, float("nan"))


def ref_kernel(data):
    x, state = parts(data)[:2]
    state.sums.add_(x)  # as a kernel does: the judge hands it a copy
    state.count.add_(1)
    return state.sums.double()


def check_implementation(data, output):
    result = compare(data, ref_kernel(data), output)
    return result.ok, result.message


def compare(data, want, output, baseline=False):
    assert int(parts(data).state.count) == 0, "the state as it was before the call"
    return check.elementwise(output, want, 2**-22 * want.abs() + 2**-40, torch.float32)
'''
GENERATORS = {
    FLAT: "def generate_input(n, seed, device):\n    return task.Data(*made(n, seed, device))\n",
    SPLIT: "def generate_weights(n, seed, device):\n    return task.Weights(torch.ones(n, device=device))\n\n\n"
    "def generate_input(n, seed, device):\n    x, state, y = made(n, seed, device)\n"
    "    return task.Inputs(x, state), task.Outputs(y)\n",
}
KERNEL = '''"""{name}."""
import torch


def custom_kernel(data):
    x, state = (data if hasattr(data, "x") else data.inputs)[:2]
    y = data.y if hasattr(data, "y") else data.outputs.y
    if int(state.count):
        raise ValueError("the state is full")
    torch.add(x, state.sums, out=y)
    {then}
    return y
'''
CHANGED = "was changed by the call"
# name -> (what it does after y is written, verdict, piece of the reason); some where there are weights alone
SUBMISSIONS = {
    "advances": ("state.sums.copy_(y), state.count.add_(1)", "PASSED", ""),
    "scribbles": ("state.sums.fill_(float('nan')), state.count.fill_(7)", "PASSED", ""),
    "leaves_it": ("pass", "PASSED", ""),
    "changes_x": ("state.sums.copy_(y), x.add_(1)", "INCORRECT", f"input x {CHANGED}"),
}
SPLIT_ONLY = {"changes_weights": ("data.weights.ones.zero_()", "INCORRECT", "the weights were changed")}
ONE_PROCESS = phases.Counts(processes=1, samples=4, warmups=1, buffers=2, extra=12)


def folder(path: Path, classes: str, *changes: tuple[str, str]) -> Path:
    """The problem in `path`, with (text, replacement) pairs applied to task.py."""
    path.mkdir()
    text = TASK.format(classes=classes)
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (path / "task.py").write_text(text)
    (path / "reference.py").write_text(REFERENCE.format(generators=GENERATORS[classes]))
    return path


def checker(path: Path) -> Checker:
    return Checker({"folder": str(path), "ours": True, "device": "cpu", "files": {}})


def content(made: Checker, n: int = 64) -> dict:
    made.new_weights({"case": {"n": n}, "seed": 5}, [])
    return made.content({"case": {"n": n}, "seed": 5}, [])


@pytest.mark.parametrize("classes", [SPLIT, pytest.param(FLAT, marks=pytest.mark.slow)], ids=["split", "flat"])
def test_what_inout_names_may_change_and_nothing_else(tmp_path, classes):
    """On test cases and in calls of one process: each call finds the state as it was made."""
    found = folders.find(str(folder(tmp_path / "running", classes)))
    submissions = SUBMISSIONS | (SPLIT_ONLY if classes == SPLIT else {})
    handles = []
    for name, (then, *_) in submissions.items():
        file = tmp_path / f"{name}.py"
        file.write_text(KERNEL.format(name=name, then=then))
        handles.append(RunnerHandle(name, folders.submission(found, file), "cpu"))
    with Session(found, "cpu") as session:
        results = phases.run_tests(session, handles, list(found.tests), lambda *_: None)
        for name, (_, status, reason) in submissions.items():
            for outcome in results[name]:
                assert (outcome.status, reason in outcome.reason) == (status, True), (name, outcome)
        cases = list(found.benchmarks["cpu"])
        timings, _ = phases.run_benchmarks(session, handles[:1], cases, ONE_PROCESS)
        (timing,) = timings["advances"]
        assert timing.failure is None and len(timing.flat("us")) == ONE_PROCESS.samples, timing.failure
        session.start(handles[0])
        session.weights(cases[0], 1)
        session.content(cases[0], 1)
        reply = session.ask_runner(handles[0], replies.Profiled, {"op": "profile", "baseline": False}, 60, buffers=1)
        assert not isinstance(reply, Outcome) and "add" in reply.table, reply


@pytest.mark.parametrize("classes", [FLAT, SPLIT], ids=["flat", "split"])
def test_after_a_call_the_buffer_holds_them_as_before(tmp_path, classes):
    """A buffer that was looked at has no state that is full."""
    made = checker(folder(tmp_path / "running", classes))
    said = content(made)
    assert len(said["open"]["inout"]) == 2
    own = {"reaper": os.getpid(), "pid": os.getpid()}
    made.allocate({"op": "allocate", "runner": "r", "bytes": said["host"], "count": 1, **own}, [])
    made.fill({"runner": "r", "buffer": 0}, [])
    (buffer,) = made.buffers["r"]
    leaves = tree.leaves(made.spec)
    regions = [tree.tensor(leaves[i], buffer.memory) for i in said["open"]["inout"]]
    before = [region.clone() for region in regions]
    for region in regions:
        region.fill_(3)
    assert made._changed("r", buffer) == ""
    assert all(torch.equal(*pair) for pair in zip(regions, before, strict=True))
    made.release({"op": "release", "runner": "r"}, [])


@pytest.mark.parametrize("classes", [FLAT, SPLIT], ids=["flat", "split"])
@pytest.mark.parametrize("names", ['("stat",)', '("y",)', '("state", "ones")'])
def test_a_name_that_is_no_input_is_named(tmp_path, classes, names):
    """An output, the weights' fields, a slip of the pen."""
    path = folder(tmp_path / "running", classes, ('INOUT = ("state",)', f"INOUT = {names}"))
    with pytest.raises(ValueError, match=r"INOUT must name fields .* \['x', 'state'\], got \["):
        content(checker(path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('INOUT = "state"', r"task\.py: INOUT must be a tuple of names, got 'state'"),
        ("INOUT = (1,)", "must be a tuple of names"),
        ("INOUT = tuple(['state'])", "INOUT must be a literal"),
    ],
)
def test_a_literal_of_another_form_is_bad_use(tmp_path, line, message):
    path = folder(tmp_path / "running", FLAT, ('INOUT = ("state",)', line))
    with pytest.raises(UsageError, match=message):
        folders.find(str(path))


def test_leaves_are_found_by_field_and_key():
    value = {"a": [torch.ones(1), torch.ones(2)], "b": torch.ones(3), "c": (torch.ones(4), 5)}
    spec = tree.describe(value, tree.Layout())
    assert tree.within(spec, ("a", "c")) == [0, 1, 3] and tree.within(spec, ()) == []
    assert tree.within(tree.describe((torch.ones(1),), tree.Layout()), ("a",)) == []


@pytest.mark.parametrize("first", [0, 1, WORD], ids=lambda n: f"from byte {n}")
@pytest.mark.parametrize("size", [0, 1, WORD - 1, WORD, 3 * WORD, 3 * WORD + 5])
def test_every_byte_is_compared(size, first):
    """In whole words and behind them, and where a tensor does not begin at one."""
    here = torch.full((64,), 0xFF, dtype=torch.uint8)[first : first + size]  # of any floating-point type, NaN
    there = here.clone()
    assert same(here, there) and not same(here, torch.cat([there, there[:1]]) if size else torch.zeros(1))
    for i in range(size):
        there[i] ^= 1
        assert not same(here, there) and not same(there, here), i
        there[i] ^= 1
