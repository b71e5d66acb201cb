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
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.judge import phases, replies
from harness.judge.handle import RunnerHandle
from harness.judge.outcome import Outcome
from harness.judge.phases import Counts
from harness.judge.session import Session
from harness.judge.verdict import CaseTime
from harness.problem import folders
from harness.problem.folders import Case
from harness.results import stats
from harness.runner import gate
from harness.sandbox import process
from tests.attacks import test_attacks as suite
from tests.support import warm
from tests.support.busy import COUNT, Busy
from tests.support.jails import alive, gone

CASES = {"vector_add": {"n": 2**18}, "linear": {"m": 257, "k": 1031}}
HOW = Counts(processes=1, samples=3, warmups=1, buffers=2, extra=6)
RUNS = {"vector_add": 88, "linear": 12}  # idle, and as many beside load
HONEST = "honest_answer_vector_add"
SHORT = (HONEST, "honest_answer_scratch")
SHORT_RUNS = 4
IDLE_SHARE, LOAD_SHARE = 0.95, 0.80  # that must be PASSED
ACCUSATIONS = {"CHEAT_SUSPECTED", "RULE_BROKEN"}
ATTACKS = (
    *("late_thread_sleeps", "late_takeover", "early_does_not_wait_ready", "host_daemons_holds_the_answer"),
    *("caching_answers_by_fingerprint", "caching_answers_by_count", "clock_patched", "clock_sleeps_in_warmup"),
    *("replies_malformed_zero_time", "host_load_thread"),
)
ATTACK_HOW = Counts(processes=2, samples=5, warmups=1, buffers=2, extra=10)
CAUGHT = {"CHEAT_SUSPECTED", "INVALID_MEASUREMENT", "INCORRECT", "RUNTIME_ERROR", "TIMEOUT", "RULE_BROKEN"}
NOT_FASTER = 0.95  # times the honest control's median


@pytest.fixture(autouse=True)
def warm_caches(monkeypatch):
    monkeypatch.setattr(gate, "flush_bytes", lambda: 2**25)


@pytest.fixture
def busy() -> Iterator[Busy]:
    """Load that the test starts; it has surely stopped afterwards."""
    with Busy() as made:
        yield made


@contextlib.contextmanager
def session_of(name: str, busy: Busy | None) -> Iterator[Session]:
    """One that judges submissions to a problem. busy: load that begins when all processes are there."""
    with Session(folders.find(str(suite.FIELDS[name].folder)), "cpu", suite.LIMIT_S) as session:
        session.progress = lambda step: busy.start(step) if busy and step.phase != "compile" else None
        yield session


def timed(session: Session, handles: list[RunnerHandle], runs: int, how: Counts = HOW) -> dict[str, list[CaseTime]]:
    """So many runs of each submission, by name."""
    case = Case(CASES[session.problem.name], 1, bytes=session.problem.benchmarks["cpu"][0].bytes)
    timings, all_readings = phases.run_benchmarks(session, handles, [case] * runs, how)
    return suite.aggregated(timings, all_readings)


def judged(name: str, files: list[Path], runs: int, busy: Busy | None, test: bool = True) -> list[Outcome]:
    """What each of the runs came to, and what failed of the test cases."""
    with session_of(name, busy) as session:
        handles = [suite.handle(session.problem, file) for file in files]
        wrong = [one for of in suite.not_passed(session, handles).values() for one in of] if test else []
        times = timed(session, handles, runs)
    return wrong + [time.failure or Outcome("PASSED") for of in times.values() for time in of]


def assert_no_alarm(outcomes: list[Outcome], share: float) -> None:
    """None is accused, enough pass, and the rest say that the machine was busy."""
    others = [outcome for outcome in outcomes if outcome.status != "PASSED"]
    assert not [outcome for outcome in others if outcome.status in ACCUSATIONS]
    for outcome in others:
        assert outcome.status == "INVALID_MEASUREMENT" and "busy" in outcome.reason, outcome
    assert len(outcomes) - len(others) >= share * len(outcomes), Counter(map(str, others))


@pytest.mark.slow
def test_honest_controls_beside_load(busy):
    files = [suite.BY_NAME[name] for name in SHORT]
    with warm.installed():
        outcomes = judged("vector_add", files, SHORT_RUNS // len(files), busy, test=False)
    assert len(outcomes) == SHORT_RUNS and len(busy.processes) == COUNT
    assert_no_alarm(outcomes, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("loaded", [False, True], ids=["idle", "beside load"])
def test_a_hundred_honest_runs(loaded, busy):
    outcomes = []
    for name, wanted in RUNS.items():
        own = [file for file in suite.CONTROLS if suite.read(file).problem == name]
        files = [file for file in own if suite.read(file).verdicts.get("cpu") == ("PASSED",)]
        outcomes += judged(name, files, -(-wanted // len(files)), busy if loaded else None)
    assert len(outcomes) >= 100
    assert_no_alarm(outcomes, LOAD_SHARE if loaded else IDLE_SHARE)


def forged(attack: list[list[float]], honest: list[list[float]]) -> bool:
    """Whether times, by process, are surely below 0.95 of the honest ones: the 95 % intervals of the medians, drawn
    over processes and then calls, are apart by that much. Load makes medians of ten calls differ by a third and more.
    """
    return stats.mean_interval([attack])[1] < NOT_FASTER * stats.mean_interval([honest])[0]


def gained(names: list[str], busy: Busy) -> list[str]:
    """Names of the attacks that were PASSED with a time that the honest control, called beside them on the same
    contents, surely does not reach.
    """
    with session_of("vector_add", busy) as session:
        handles = [suite.handle(session.problem, suite.BY_NAME[name]) for name in (HONEST, *names)]
        wrong = suite.not_passed(session, handles)
        times = timed(session, [handle for handle in handles if not wrong[handle.name]], 1, ATTACK_HOW)
    assert not wrong[HONEST], "the honest control is right beside all of them"
    (control,) = times.pop(HONEST)
    assert not control.failure or "busy" in control.failure.reason, control.failure
    failed = wrong | {name: [of[0].failure] if of[0].failure else [] for name, of in times.items()}
    for name, outcomes in failed.items():
        assert {one.status for one in outcomes} <= CAUGHT, (name, outcomes)
    passed = [name for name in times if not failed[name]]
    if control.failure:  # nothing to compare with
        return passed
    return [name for name in passed if forged(times[name][0].timing.samples, control.timing.samples)]


@pytest.mark.slow
def test_no_attack_gets_a_false_time_beside_load(busy, monkeypatch):
    """One that seems to is measured again, in fresh processes: of forty intervals one is too narrow."""
    monkeypatch.setattr(replies, "GIVE_UP_AFTER", 2)
    monkeypatch.setattr(process, "MEMORY_SHARE", suite.MEMORY / process.available_memory())
    names = list(ATTACKS)
    for _ in range(3):
        names = gained(names, busy)
        if not names:
            return
    pytest.fail(f"three times faster than the honest control: {names}")


def test_a_forged_time_would_be_seen():
    """Of times that scatter as they do beside load."""
    honest = [[100, 140, 90, 300, 120], [110, 95, 180, 130, 105]]
    assert forged([[us / 4 for us in group] for group in honest], honest)
    assert not forged(honest, honest)
    assert not forged([[0.8 * us for us in group] for group in honest], honest), "load alone does that"


def test_load_ends_with_the_process_that_made_it():
    code = "import time; from tests.support.busy import Busy; busy = Busy(2); busy.start();"
    code += "print(*(process.pid for process in busy.processes), flush=True); time.sleep(60)"
    command, environment = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": str(process.ROOT)}
    maker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    with maker.stdout:
        pids = [int(pid) for pid in maker.stdout.readline().split()]
    assert len(pids) == 2 and all(map(alive, pids))
    maker.send_signal(signal.SIGKILL)
    maker.wait()
    assert gone(pids, limit_s=60)
