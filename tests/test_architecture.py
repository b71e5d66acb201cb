"""docs/architecture.md names the functions of one judged call in the order in which they are called.

The judge is the real one, on a CPU. The checker's functions run in this process, so that they are seen too; a fake
runner answers (tests/support/fake_runner.py), so of the runner's own steps only the functions' existence is tested.
"""

import ast
import dataclasses
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import pytest

from harness.judge import phases
from harness.judge.handle import RunnerHandle
from harness.judge.session import Session
from harness.problem import folders
from tests.support import ROOT, fake_runner

PAGE = ROOT / "docs" / "architecture.md"
PROBLEM = ROOT / "tests" / "support" / "problems" / "vector_add"
PROCESSES = ("judge", "checker", "runner")
FIRST = "harness/judge/phases.py:run_tests"
LAST = "harness/checker/checker.py:Checker.turn"  # while it runs, so does the call
AT_MOST, AT_LEAST = 26, 15  # steps that can be read in one sitting


@dataclass(frozen=True)
class Step:
    """A row of the page's table. function: file:name, the file from the repository's root."""

    number: int
    process: str
    function: str

    def __str__(self) -> str:
        return f"step {self.number} ({self.process}, {self.function})"


def section() -> str:
    """The page's part about the call."""
    return PAGE.read_text().partition("\n## One judged call\n")[2].partition("\n## ")[0]


def walk() -> list[Step]:
    rows = re.findall(r"^\| (\d+) \| (\w+) \| `([\w./]+:[\w.]+)` \| .+ \|$", section(), re.MULTILINE)
    return [Step(int(number), process, function) for number, process, function in rows]


def stack() -> list[str]:
    """The functions that the page says are on the judge's stack during the call."""
    said = re.search(r"on the judge's stack: (.*?)\.\n", section(), re.DOTALL)[1]
    return re.findall(r"`([\w.]+)`", said)


class Called:
    """A profile function: what of the harness is called in this thread, and the judge's stack when LAST is."""

    def __init__(self) -> None:
        self.functions: list[str] = []
        self.stack: list[str] = []

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        function = named(frame)
        if event != "call" or not function.startswith("harness/"):
            return
        self.functions.append(function)
        if function == LAST:
            names = [named(one) for one in outwards(frame)]
            names = names[: names.index(FIRST) + 1]
            self.stack = [name.partition(":")[2] for name in reversed(names) if name.startswith("harness/judge/")]


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def named(frame: FrameType) -> str:
    file = Path(frame.f_code.co_filename)
    return f"{file.relative_to(ROOT) if file.is_relative_to(ROOT) else file}:{frame.f_code.co_qualname}"


@pytest.fixture(scope="module")
def called(tmp_path_factory) -> Called:
    """What is called when one submission is called on one test case."""
    file = tmp_path_factory.mktemp("submission") / "one.py"
    file.write_text("def custom_kernel(data):\n    pass\n")
    found = folders.find(str(PROBLEM))
    found = dataclasses.replace(found, tests=found.tests[:1])
    seen, outcomes, before = Called(), [], sys.getprofile()
    with pytest.MonkeyPatch.context() as patch, fake_runner.idle_process() as pid:
        fake_runner.install(patch, "cpu")
        patch.setattr(fake_runner.FakeChild, "guard_pid", pid)
        fake_runner.BROKE.clear()
        with Session(found, "cpu") as session:
            handle = RunnerHandle("one", folders.submission(found, file), "cpu")
            session.start(handle)
            sys.setprofile(seen)
            try:
                phases.run_tests(session, [handle], list(found.tests), lambda *a: outcomes.append(a[2]), lambda _: None)
            finally:
                sys.setprofile(before)
    assert not fake_runner.BROKE and [outcome.status for outcome in outcomes] == ["PASSED"], outcomes
    return seen


def test_the_walk_is_one_that_can_be_read():
    steps = walk()
    assert AT_LEAST <= len(steps) <= AT_MOST
    assert [step.number for step in steps] == list(range(1, len(steps) + 1)), "the steps are numbered in order"
    assert {step.process for step in steps} == set(PROCESSES)
    rows = [line for line in section().splitlines() if line.startswith("|")]
    assert len(steps) == len(rows) - 2, "below the two lines of its head, every row of the table is a step"


@pytest.mark.parametrize("step", walk(), ids=str)
def test_a_step_names_a_function_that_says_what_it_does(step):
    file, _, name = step.function.partition(":")
    assert (ROOT / file).is_file(), f"{step}: there is no file {file}"
    node: ast.AST = ast.parse((ROOT / file).read_text())
    for part in name.split("."):
        inner = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef | ast.ClassDef)}
        assert part in inner, f"{step}: {file} has no {name}"
        node = inner[part]
    assert ast.get_docstring(node), f"{step}: the function has no docstring"


def test_the_steps_are_called_in_the_order_of_the_page(called):
    at, before = 0, None
    for step in (step for step in walk() if step.process != "runner"):
        if step.function not in called.functions:
            pytest.fail(f"{step} is not called in a judged call: change docs/architecture.md")
        if step.function not in called.functions[at:]:
            pytest.fail(f"{step} is not called after {before}: change the order in docs/architecture.md")
        at, before = called.functions.index(step.function, at) + 1, step


def test_the_frames_between_a_phase_and_the_wire_are_those_of_the_page(called):
    assert called.stack == stack(), "docs/architecture.md, on the judge's stack"
