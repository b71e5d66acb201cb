"""Folders with the traits of other people's problems: a right and a wrong submission of each are told apart."""

import pytest

from harness.judge import phases
from harness.judge.handle import RunnerHandle
from harness.judge.session import Session
from harness.judge.verdict import Result, aggregate
from harness.problem import folders
from tests.support import SUPPORT

SET = SUPPORT / "gpu_mode"
FOLDERS = sorted(path.parent.name for path in SET.glob("*/task.yml") if (path.parent / "solutions").is_dir())
NEEDS_GPU, NEEDS_CPU = ("triton_kernel",), ("vectoradd",)
COMPILED = ("load_inline", "torch_compile")  # with torch's own headers, for half a minute and more
HOW = {
    "cpu": phases.Plan(processes=1, samples=2, warmups=1, buffers=2, audits=0, extra=6),
    # The nearest of all calls decides whether a claim is believed: on a busy machine both of two can be late.
    "cuda": phases.Plan(processes=1, samples=12, warmups=1, buffers=2, audits=0),
}


def judged(name: str, device: str) -> dict[str, Result]:
    """What submission.py and solutions/wrong.py of a folder get, in tests and in a short benchmark."""
    found = folders.find(str(SET / name))
    target = {"cpu": "cpu", "cuda": "sm90"}[device]
    files = {"right": found.folder / "submission.py", "wrong": found.folder / "solutions" / "wrong.py"}
    handles = [RunnerHandle(what, folders.submission(found, file), target) for what, file in files.items()]
    results = {handle.name: Result(handle.submission, target) for handle in handles}
    with Session(found, device) as session:
        phases.run_tests(
            session, handles, list(found.tests), lambda h, *a: results[h.name].tests.append(a), lambda _: None
        )
        right = [handle for handle in handles if handle.name == "right"]
        cases = list(found.benchmarks[device])
        times, readings = phases.run_benchmarks(session, right, cases, lambda _: None, how=HOW[device])
        results["right"].times = [aggregate(t, g) for t, g in zip(times["right"], readings, strict=True)]
    return results


def check(name: str, device: str) -> None:
    results = judged(name, device)
    right, wrong = results["right"], results["wrong"]
    said = [outcome.reason for _, outcome in right.tests] + [t.failure.reason for t in right.times if t.failure]
    assert right.verdict == "PASSED", "\n".join(filter(None, said))
    scored = [len(t.timing.flat("us")) for t in right.times]
    # A call on a GPU whose reply is late has no score; a case that loses more than half of them would not pass.
    samples = HOW[device].samples
    assert scored and all(samples // (2 if device == "cuda" else 1) <= n <= samples for n in scored)
    assert wrong.verdict == "INCORRECT", [outcome.reason for _, outcome in wrong.tests]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in COMPILED else ())
        for name in FOLDERS
        if name not in NEEDS_GPU
    ],
)
def test_on_a_cpu(name):
    check(name, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in FOLDERS if name not in NEEDS_CPU])
def test_on_a_gpu(name):
    check(name, "cuda")


def test_seeds_are_of_a_size_that_the_contents_bear(monkeypatch):
    """With 63 bits all values would be equal, and a sort that copies would be right."""
    found = folders.find(str(SET / "seed_in_data"))
    wrong = RunnerHandle("wrong", folders.submission(found, found.folder / "solutions" / "wrong.py"), "cpu")
    with Session(found, "cpu") as session:
        times, readings = phases.run_benchmarks(
            session, [wrong], list(found.benchmarks["cpu"]), lambda _: None, how=HOW["cpu"]
        )
    assert [time.failure.status for time in times["wrong"]] == ["INCORRECT"]
    assert any("lose their variety" in note for note in session.notes)
    assert all(0 <= int(seed) < 2**17 for group in readings for seed in group.seeds)
