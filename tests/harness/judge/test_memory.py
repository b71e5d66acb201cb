"""What a call may write: inputs that task.py names (INOUT), nothing between tensors, and all of its outputs."""

import os
from pathlib import Path

import pytest
import torch

from harness.checker import memory
from harness.checker.checker import Checker
from harness.checker.guards import Guards
from harness.checker.memory import WORD, same
from harness.judge import phases, replies
from harness.judge.handle import RunnerHandle
from harness.judge.outcome import Outcome
from harness.judge.session import Session
from harness.problem import folders
from harness.problem.folders import ProblemError, UsageError
from harness.runner import tree
from harness.runner.buffers import Buffer
from tests.support import write_files

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
# name -> (what it does after y is written, verdict, piece of the reason)
SUBMISSIONS = {
    "advances": ("state.sums.copy_(y), state.count.add_(1)", "PASSED", ""),
    "scribbles": ("state.sums.fill_(float('nan')), state.count.fill_(7)", "PASSED", ""),
    "leaves_it": ("pass", "PASSED", ""),
    "changes_x": ("state.sums.copy_(y), x.add_(1)", "INCORRECT", "input x was changed by the call"),
    "changes_weights": ("data.weights.ones.zero_()", "INCORRECT", "the weights were changed"),
}
INOUT = 'INOUT = ("state",)'
ONE_PROCESS = phases.Counts(processes=1, samples=4, warmups=1, buffers=2, extra=12)


def folder(path: Path, classes: str, line: str = INOUT) -> Path:
    """The problem in `path`, with this line in its task.py."""
    text = TASK.format(classes=classes).replace(INOUT, line)
    return write_files(path, {"task.py": text, "reference.py": REFERENCE.format(generators=GENERATORS[classes])})


def checker(path: Path) -> Checker:
    return Checker({"folder": str(path), "ours": True, "device": "cpu", "files": {}})


def content(made: Checker, n: int = 64) -> dict:
    made.new_weights({"case": {"n": n}, "seed": 5}, [])
    return made.content({"case": {"n": n}, "seed": 5}, [])


@pytest.mark.parametrize("classes", [SPLIT, pytest.param(FLAT, marks=pytest.mark.slow)], ids=["split", "flat"])
def test_what_inout_names_may_change_and_nothing_else(tmp_path, classes):
    """On test cases and in calls of one process: each call finds the state as it was made."""
    found = folders.find(str(folder(tmp_path / "running", classes)))
    handles = []
    for name, (then, *_) in SUBMISSIONS.items():
        if name == "changes_weights" and classes == FLAT:
            continue
        file = tmp_path / f"{name}.py"
        file.write_text(KERNEL.format(name=name, then=then))
        handles.append(RunnerHandle(name, folders.submission(found, file), "cpu"))
    with Session(found, "cpu") as session:
        results = phases.run_tests(session, handles, list(found.tests), lambda *_: None)
        for name, outcomes in results.items():
            for outcome in outcomes:
                assert (outcome.status, SUBMISSIONS[name][2] in outcome.reason) == (SUBMISSIONS[name][1], True), outcome
        cases = list(found.benchmarks["cpu"])
        timings, _ = phases.run_benchmarks(session, handles[:1], cases, ONE_PROCESS)
        (timing,) = timings["advances"]
        assert timing.failure is None and len(timing.flat("us")) == ONE_PROCESS.samples, timing.failure
        session.start(handles[0])
        session.weights(cases[0], 1)
        session.content(cases[0], 1)
        reply = session.ask_runner(handles[0], replies.Profiled, {"op": "profile", "baseline": False}, 60, buffers=1)
        assert not isinstance(reply, Outcome) and "add" in reply.table, reply
        session.present.layout["other"] = []  # as if the seed before had made other shapes
        with pytest.raises(ProblemError, match=r"shapes in n=\d+ differ from seed to seed"):
            session.content(cases[0], 2)


@pytest.mark.parametrize("classes", [FLAT, SPLIT], ids=["flat", "split"])
def test_after_a_call_the_buffer_holds_them_as_before(tmp_path, classes):
    """A buffer that was looked at has no state that is full."""
    made = checker(folder(tmp_path / "running", classes))
    said = content(made)
    assert len(said["open"]["inout"]) == 2
    made.allocate({"op": "allocate", "runner": "r", "bytes": said["host"], "count": 1, **OWN}, [])
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
    path = folder(tmp_path / "running", classes, f"INOUT = {names}")
    with pytest.raises(ValueError, match=r"INOUT must name fields .* \['x', 'state'\], got \["):
        content(checker(path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('INOUT = "state"', r"task\.py: INOUT must be a tuple of names, got 'state'"),
        ("INOUT = tuple(['state'])", "INOUT must be a literal"),
    ],
)
def test_a_literal_of_another_form_is_bad_use(tmp_path, line, message):
    with pytest.raises(UsageError, match=message):
        folders.find(str(folder(tmp_path / "running", FLAT, line)))


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


# --- what a call writes between the tensors of a buffer is found, byte by byte, and named by the tensor beside it


OWN = {"reaper": os.getpid(), "pid": os.getpid()}
STRIDED = torch.zeros(7, 9)[:, 1:6:2]  # whose holes are its own


def guarded(*tensors: torch.Tensor) -> tuple[Guards, Buffer, list[dict]]:
    layout = tree.Layout()
    leaves = tree.leaves(tree.describe(tensors, layout))
    buffer = Buffer(layout.used)
    return Guards(buffer, [(leaf, f"input {i}") for i, leaf in enumerate(leaves)]), buffer, leaves


@pytest.mark.parametrize(
    "tensors",
    [(torch.zeros(1),), (torch.zeros(128), torch.zeros(0), torch.zeros(5, dtype=torch.bool)), (STRIDED, STRIDED.t())],
    ids=["one", "full, empty, odd", "strided"],
)
def test_each_byte_outside_of_the_tensors_is_guarded_and_none_inside(tensors):
    guards, buffer, leaves = guarded(*tensors)
    memory = buffer.memory
    inside = {at for leaf in leaves for at in range(leaf["offset"], leaf["offset"] + leaf["nbytes"])}
    for at in range(len(memory)):
        memory[at] ^= 1
        assert bool(guards.fault(buffer)) == (at not in inside), at
        memory[at] ^= at not in inside  # back, where it matters
    buffer.close()


def test_what_lies_between_tensors_is_wide_secret_and_new_in_each_call():
    _, buffer, leaves = guarded(*(torch.zeros(n, dtype=torch.uint8) for n in (1, 255, 256, 257, 512, 0, 3)))
    edges = [0, *(edge for leaf in leaves for edge in (leaf["offset"], leaf["offset"] + leaf["nbytes"]))]
    assert all(leaf["offset"] % tree.ALIGN == 0 for leaf in leaves)
    starts, ends = [*edges[1::2], buffer.nbytes], edges[::2]
    assert all(start - end >= tree.GUARD for start, end in zip(starts, ends, strict=True))
    buffer.close()
    guards, buffer, _ = guarded(torch.zeros(3))
    before = buffer.memory.clone()
    other = Guards(buffer, [])
    assert guards.fault(buffer) and not other.fault(buffer) and len(before.unique()) > 64
    buffer.close()


def test_bytes_are_named_by_the_tensors_beside_them():
    guards, buffer, leaves = guarded(torch.zeros(3), torch.zeros(2), torch.zeros(4))
    memory = buffer.memory
    ends = [leaf["offset"] + leaf["nbytes"] for leaf in leaves]
    for first, last in ((ends[0], ends[0] + 4), (leaves[1]["offset"] - 1, leaves[1]["offset"])):
        memory[first:last] ^= 0x55
    between = "5 bytes behind input 0 and before input 1"
    assert guards.fault(buffer).endswith(f": {between}")
    memory[: leaves[0]["offset"]] ^= 0x55
    memory[ends[2] :] ^= 0x55
    behind = f"{buffer.nbytes - ends[2]} bytes behind input 2"
    assert guards.fault(buffer).endswith(f": 512 bytes before input 0, {between}, {behind}")
    buffer.close()


def test_the_whole_place_of_a_copy_is_the_judges():
    """A folder's answer may come in a wider type than the reference's: the copy has room for it."""
    leaf = {"offset": tree.ALIGN, "nbytes": 4, "most": 8}
    buffer = Buffer(2 * tree.ALIGN)
    guards = Guards(buffer, [(leaf, "the judge's copy")])
    for at, fault in ((0, False), (7, False), (8, True), (-1, True)):
        buffer.memory[tree.ALIGN + at] ^= 1
        assert bool(guards.fault(buffer)) == fault, at
        buffer.memory[tree.ALIGN + at] ^= 1
    buffer.close()


@pytest.mark.parametrize("classes", [FLAT, SPLIT], ids=["flat", "split"])
def test_the_checker_looks_at_a_call_and_at_its_weights(tmp_path, classes):
    made = checker(folder(tmp_path / "running", classes))
    made.allocate({"op": "allocate", "runner": "r", "bytes": content(made)["host"], "count": 1, **OWN}, [])
    memories = [made.buffers["r"][0]]
    if classes == SPLIT:
        made.hold({"runner": "r"}, [])
        memories.append(made.held["r"])
    named = [*(f"output {name}" for name in made.outputs_named), "weights ones"]
    for buffer, name in zip(memories, named, strict=False):
        made.fill({"runner": "r", "buffer": 0}, [])
        assert made._changed("r", made.buffers["r"][0]) == ""
        buffer.memory[-1] ^= 1
        assert made._changed("r", made.buffers["r"][0]).endswith(f"1 byte behind {name}")
    made.release({"op": "release", "runner": "r"}, [])


# --- what a call leaves out of its outputs is wrong, in every dtype: outputs are poisoned before it


SIZES = (8, 24)
FIXED = [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.int64]
SECRET = [torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.float4_e2m1fn_x2]


def made(dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(SIZES, dtype=torch.uint8 if dtype == torch.float4_e2m1fn_x2 else dtype).view(dtype)


@pytest.mark.parametrize("dtype", [*FIXED, *SECRET, torch.complex64], ids=str)
def test_no_one_value_is_right_everywhere(dtype):
    one, other = made(dtype), made(dtype)
    memory.poison([one, other, made(dtype)], [0, 1])
    bits = [tree.raw(tensor).clone() for tensor in (one, other)]
    assert torch.equal(*bits) == (dtype not in SECRET)
    if dtype in SECRET:
        assert len(bits[0].unique()) > 1 and bits[0].max() <= (1 if dtype == torch.bool else 255)
    elif dtype.is_floating_point or dtype.is_complex:
        assert one.to(torch.complex128 if dtype.is_complex else torch.float64).isnan().all()
    else:
        assert (one == torch.iinfo(dtype).min).all()


def test_an_element_of_e8m0_is_nan_or_the_largest_value():
    """So that a check by bits finds the ones that are left out where NaN is the answer, and where it is not."""
    one, other = made(torch.float8_e8m0fnu), made(torch.float8_e8m0fnu)
    memory.poison([one, other], [0, 1])
    assert one.view(torch.uint8).unique().tolist() == [254, 255]
    assert not torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float8_e8m0fnu], ids=str)
def test_only_the_elements_of_a_view_are_filled(dtype):
    whole = torch.zeros(64, 9, dtype=dtype)
    memory.poison([whole[:, ::2], whole[:0], torch.zeros((), dtype=dtype)], [0, 1, 2])
    bits = whole.view(torch.uint8)
    assert bits[:, ::2].any() and not bits[:, 1::2].any()
