"""Beside busy processes no honest submission is accused, and no attack gets a false time.

A run here is what one benchmark case gives a submission: a warm-up, three timed calls and at most six more where others
took the machine, all checked. Several submissions share a session and several runs a process, since a process with
torch in it takes 3 s of a processor to start. Caches are not made cold, which takes half a second on some machines.
"""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.judge import limits, phases
from harness.judge.handle import RunnerHandle
from harness.judge.outcome import Outcome
from harness.judge.phases import Plan
from harness.judge.session import Session
from harness.judge.verdict import CaseTime, aggregate
from harness.problem import folders, scan
from harness.problem.folders import Case, Problem
from harness.results import stats
from harness.runner import flush
from harness.sandbox import process
from problems.common import load
from tests.fixtures.busy import COUNT, Busy

FOLDER = Path(__file__).parent / "exploits"
PROBLEMS = Path(__file__).parent / "fixtures" / "problems"
CASES = {"vector_add": {"n": 2**18}, "linear": {"m": 257, "k": 1031}}
HOW = Plan(processes=1, samples=3, warmups=1, buffers=2, audits=0, extra=6)
RUNS = {"vector_add": 88, "linear": 12}  # idle, and as many beside load
SHORT = ("control_honest", "control_scratch")
SHORT_RUNS = 4
MOST_S = 25  # of the short form
IDLE_SHARE, LOAD_SHARE = 0.95, 0.80  # that must be PASSED
ACCUSATIONS = {"CHEAT_SUSPECTED", "RULE_BROKEN"}

# Of each of these rows of the taxonomy the first file that runs on a CPU and is no matter of its text, if there is one
# that may be PASSED, with an honest time, that one: they write late, leave work behind, keep answers, work before the
# clock, patch it, answer early, sleep in the warm-up, forge a time, load the machine.
ROWS = (4, 5, 9, 11, 13, 14, 16, 39, 40, 53)
ATTACK_HOW = Plan(processes=2, samples=5, warmups=1, buffers=2, audits=0, extra=10)
CAUGHT = {"CHEAT_SUSPECTED", "INVALID_MEASUREMENT", "INCORRECT", "RUNTIME_ERROR", "TIMEOUT", "RULE_BROKEN"}
NOT_FASTER = 0.95  # times the honest control's median
LIMIT_S = 20  # for a call


def constant(file: Path, name: str) -> object:
    return load.constants(file, "ROW", "PROBLEM", "DEVICES", "VERDICT").get(name)


def controls(name: str) -> list[Path]:
    """The honest submissions to a problem that must be PASSED on a CPU."""
    return [
        file
        for file in sorted(FOLDER.glob("control_*.py"))
        if constant(file, "VERDICT") == "PASSED" and constant(file, "PROBLEM") == name
        and "cpu" in constant(file, "DEVICES")
    ]  # fmt: skip


def attacks() -> list[Path]:
    files = [
        file
        for file in sorted(FOLDER.glob("row*.py"))
        if constant(file, "PROBLEM") == "vector_add" and "cpu" in constant(file, "DEVICES")
        and not scan.findings(scan.closure(file))
    ]  # fmt: skip
    rows = [[file for file in files if constant(file, "ROW") == row] for row in ROWS]
    return [min(row, key=lambda file: "PASSED" not in constant(file, "VERDICT")) for row in rows]


@pytest.fixture(autouse=True)
def warm_caches(monkeypatch):
    monkeypatch.setattr(flush, "nbytes", lambda: 2**25)


@pytest.fixture
def busy() -> Iterator[Busy]:
    """Load that the test starts; it has surely stopped afterwards."""
    with Busy() as made:
        yield made


@contextlib.contextmanager
def judging(name: str, files: list[Path]) -> Iterator[tuple[Session, Problem, list[RunnerHandle]]]:
    found = folders.find(str(PROBLEMS / name))
    handles = [RunnerHandle(file.stem, folders.submission(found, file), "cpu") for file in files]
    with Session(found, "cpu", LIMIT_S) as running:
        yield running, found, handles


def timed(
    running: Session, found: Problem, handles: list[RunnerHandle], runs: int, busy: Busy | None, how: Plan = HOW
) -> dict[str, list[CaseTime]]:
    """So many runs of each submission, by name. The load begins when all processes are there."""
    params = CASES[found.name]
    cases = [Case(params, 1, bytes=found.benchmarks["cpu"][0].bytes)] * runs
    progress = busy.start if busy else lambda _: None
    timings, all_readings = phases.run_benchmarks(running, handles, cases, progress, how=how)
    return {name: [aggregate(t, g) for t, g in zip(of, all_readings, strict=True)] for name, of in timings.items()}


def on_tests(
    running: Session, found: Problem, handles: list[RunnerHandle], busy: Busy | None
) -> dict[str, list[Outcome]]:
    progress = busy.start if busy else lambda _: None
    return phases.run_tests(running, handles, list(found.tests[:3]), lambda *_: None, progress)


def failures(times: list[CaseTime]) -> list[Outcome]:
    return [time.failure for time in times if time.failure]


def judged(name: str, files: list[Path], runs: int, busy: Busy | None, test: bool = True) -> list[Outcome]:
    """What each of the runs came to, and what failed of the test cases."""
    with judging(name, files) as (running, found, handles):
        outcomes = on_tests(running, found, handles, busy) if test else {}
        times = timed(running, found, handles, runs, busy)
    wrong = [outcome for of in outcomes.values() for outcome in of if outcome.status != "PASSED"]
    return wrong + [time.failure or Outcome("PASSED") for of in times.values() for time in of]


def assert_no_alarm(outcomes: list[Outcome], share: float) -> None:
    """None is accused, enough pass, and the rest say that the machine was busy."""
    others = [outcome for outcome in outcomes if outcome.status != "PASSED"]
    assert not [outcome for outcome in others if outcome.status in ACCUSATIONS]
    for outcome in others:
        assert outcome.status == "INVALID_MEASUREMENT" and "busy" in outcome.reason, outcome
    assert len(outcomes) - len(others) >= share * len(outcomes), Counter(map(str, others))


def report(what: str, outcomes: list[Outcome], since: float) -> None:
    counts = dict(Counter(outcome.status for outcome in outcomes))
    load_now = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors"
    print(f"{what}: {len(outcomes)} runs, {counts}, {time.monotonic() - since:.0f} s, {load_now}")


def test_honest_controls_beside_load(busy):
    before = time.monotonic()
    files = [FOLDER / f"{name}.py" for name in SHORT]
    outcomes = judged("vector_add", files, SHORT_RUNS // len(files), busy, test=False)
    report("beside load", outcomes, before)
    assert len(outcomes) == SHORT_RUNS and len(busy.processes) == COUNT
    assert_no_alarm(outcomes, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("loaded", [False, True], ids=["idle", "beside load"])
def test_a_hundred_honest_runs(loaded, busy):
    outcomes = []
    for name, wanted in RUNS.items():
        before, files = time.monotonic(), controls(name)
        found = judged(name, files, -(-wanted // len(files)), busy if loaded else None)
        report(f"{name} {'beside load' if loaded else 'idle'}", found, before)
        outcomes += found
    assert len(outcomes) >= 100
    assert_no_alarm(outcomes, LOAD_SHARE if loaded else IDLE_SHARE)


# Attacks.


def forged(attack: list[list[float]], honest: list[list[float]]) -> bool:
    """Whether times, by process, are surely below 0.95 of the honest ones: the 95 % intervals of the medians, drawn
    over processes and then calls, are apart by that much. Load makes medians of ten calls differ by a third and more.
    """
    return stats.bootstrap_interval(attack)[1] < NOT_FASTER * stats.bootstrap_interval(honest)[0]


def gained(files: list[Path], busy: Busy) -> list[str]:
    """Names of the attacks that were PASSED with a time that the honest control, called beside them on the same
    contents, surely does not reach.
    """
    honest = FOLDER / "control_honest.py"
    with judging("vector_add", [honest, *files]) as (running, found, handles):
        outcomes = on_tests(running, found, handles, busy)
        statuses = {name: {o.status for o in of if o.status != "PASSED"} for name, of in outcomes.items()}
        right = [handle for handle in handles if not statuses[handle.name]]
        times = timed(running, found, right, 1, busy, ATTACK_HOW)
    assert not statuses[honest.stem], "the honest control is right beside all of them"
    (control,) = times.pop(honest.stem)
    assert not control.failure or "busy" in control.failure.reason, control.failure
    statuses |= {name: {o.status for o in failures(of)} for name, of in times.items()}
    for name, found_ in statuses.items():
        assert found_ <= CAUGHT, (name, found_)
    medians = {name: round(of[0].median) for name, of in times.items() if not failures(of)}
    print(f"caught: {statuses}; passed, us: {medians}; honest: {control.failure or round(control.median)}")
    passed = [name for name, of in times.items() if not failures(of)]
    if control.failure:  # nothing to compare with
        return passed
    return [name for name in passed if forged(times[name][0].timing.samples, control.timing.samples)]


@pytest.mark.slow
def test_no_attack_gets_a_false_time_beside_load(busy, monkeypatch):
    """One that seems to is measured again, in fresh processes: of forty intervals one is too narrow."""
    monkeypatch.setattr(limits, "GIVE_UP_AFTER", 2)
    monkeypatch.setattr(process, "MEMORY_SHARE", 1.5 * 2**30 / process.available_memory())
    files = attacks()
    assert len(files) == 10
    for _ in range(3):
        names = gained(files, busy)
        files = [file for file in files if file.stem in names]
        if not files:
            return
    raise AssertionError(f"three times faster than the honest control: {[file.stem for file in files]}")


def test_a_forged_time_would_be_seen():
    """Of times that scatter as they do beside load."""
    honest = [[100, 140, 90, 300, 120], [110, 95, 180, 130, 105]]
    assert forged([[us / 4 for us in group] for group in honest], honest)
    assert not forged(honest, honest)
    assert not forged([[0.8 * us for us in group] for group in honest], honest), "load alone does that"


# The load.


def test_load_ends_with_the_process_that_made_it():
    code = """
        import time
        from tests.fixtures.busy import Busy
        busy = Busy(2)
        busy.start()
        print(*(process.pid for process in busy.processes), flush=True)
        time.sleep(60)
    """
    environment = {**os.environ, "PYTHONPATH": str(process.ROOT)}
    maker = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, env=environment
    )
    with maker.stdout:
        pids = [int(pid) for pid in maker.stdout.readline().split()]
    assert len(pids) == 2 and all(map(alive, pids))
    maker.send_signal(signal.SIGKILL)
    maker.wait()
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(alive, pids))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
