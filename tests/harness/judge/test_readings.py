"""The bounds on a time: what the datasheet and the empty call allow, and what the host's clock beside the events says;
and which measured roofline a case has.
"""

import dataclasses
import json
import math
import random

import pytest

from harness.checker import matmul
from harness.judge import readings
from harness.judge.outcome import Outcome
from harness.judge.readings import (
    HOST,
    CaseReadings,
    Group,
    ReferenceReadings,
    Timing,
    attempts,
    check,
    finished,
    of_group,
    of_outcome,
)
from harness.problem.folders import Case
from harness.results import record
from harness.results.environment import RATES, GpuState
from tests.support import write_files
from tests.support.hostile import brief
from tests.support.records import run_line

US = {"bytes": 1.0, "flops": 1.0, "empty": 1.0}  # what each would take; one of them 100 times as long


def bound(gpu: str, bytes_us: float, flops_us: float | None, empty_us: float) -> float:
    """The bound where bytes and operations take so many us at the datasheet's rates. flops_us: None, not known."""
    rates = RATES[gpu]
    flops = None if flops_us is None else round(rates[1] * flops_us / 1e6)
    found = ReferenceReadings(1e6, "read 0", "read", empty_us, round(rates[0] * bytes_us / 1e6), [])
    return readings.sol_us(Case({"n": 1}, 1, flops=flops), found, f"NVIDIA {gpu} SXM")


@pytest.mark.parametrize("gpu", RATES)
@pytest.mark.parametrize("longest", US)
def test_bytes_operations_and_the_empty_call_each_bound_a_time(gpu, longest):
    assert bound(gpu, *(US | {longest: 100.0}).values()) == pytest.approx(95, rel=1e-6)
    assert bound(gpu, *(dict.fromkeys(US, 0.0) | {longest: 100.0}).values()) == pytest.approx(95, rel=1e-6)
    assert bound(gpu, 1.0, None, 10.0) == pytest.approx(9.5), "operations that nobody states bound nothing"


@pytest.mark.parametrize("gpu", [None, "an unknown GPU"])
def test_without_a_datasheet_there_is_no_bound(gpu):
    found = ReferenceReadings(1.0, "read 0", "read", 100.0, 10**12, [])
    assert readings.sol_us(Case({"n": 1}, 1, flops=10**15), found, gpu) == 0.0


def call(us: float, host_us: float, **more) -> Outcome:
    """A call whose two clocks read so much, beside empty calls of 3 and 10 us."""
    return Outcome("PASSED", us=3 + us, host_us=10 + host_us, **more)


def judged(groups: list[list[Outcome]]) -> Timing:
    timing = Timing(Case({"n": 1}, 1), groups)
    own = {"empty": [3.0] * 3, HOST: [9.9, 10.0, 10.4], "read 0": [10.0]}
    readings.reference(CaseReadings(timing.case, 1, own), [timing], "cuda", [])
    return timing


@pytest.mark.parametrize("us", [0.5, 5.0, 100.0, 20_000.0])
@pytest.mark.parametrize("longer_us", [0.0, 0.9])
def test_clocks_that_agree_are_believed(us, longer_us):
    """The host's may read 1 us more, or 2 % of a long call."""
    rng = random.Random(1)
    apart = longer_us * max(1, 0.02 * us)
    groups = [[call(us, us + apart + rng.gauss(0, 0.02)) for _ in range(10)] for _ in range(6)]
    assert judged(groups).failure is None


def test_calls_that_load_delays_and_those_of_one_clock_are_believed():
    """The medians of a group count, and the median of the groups."""
    groups = [[call(50.0, 50.0 + 400 * (i % 3 == 0)) for i in range(10)] for _ in range(6)]
    assert judged(groups).failure is None
    for group in groups[:2]:
        group[:] = [call(50.0, 90.0)] * 10
    assert judged(groups).failure is None
    assert judged([[Outcome("PASSED", us=5.0, self_timed="it waits")] * 10] * 6).failure is None


@pytest.mark.parametrize(("us", "host_us"), [(0.5, 2.6), (50.0, 100.0), (9_700.0, 10_000.0)])
def test_events_that_are_too_short_in_all_groups_are_an_accusation(us, host_us):
    failure = judged([[call(us, host_us)] * 10] * 6).failure
    assert failure is not None and failure.status == "CHEAT_SUSPECTED"
    assert f"events say {us:.2f} us" in failure.reason and "in all 6 groups" in failure.reason


def test_events_that_are_too_short_in_most_groups_are_no_measurement():
    groups = [[call(50.0, 100.0)] * 10 for _ in range(6)]
    groups[4] = [call(50.0, 50.2)] * 10
    failure = judged(groups).failure
    assert failure is not None and failure.status == "INVALID_MEASUREMENT" and "run again" in failure.reason
    only = judged([[call(50.0, 100.0)] * 10]).failure
    assert only is not None and only.status == "INVALID_MEASUREMENT", "one group proves nothing"


def roofs(flops: list[int | None], matmul_us: list[float]) -> list[ReferenceReadings]:
    """What is read of cases with these operations, whose readers take 100 us."""
    own = {"empty": [3.0], HOST: [10.0], "read 0": [100.0], "read 1": [101.0]}
    cases = [Case({"n": i}, 1, flops=count) for i, count in enumerate(flops)]
    return [readings.reference(CaseReadings(case, 5, own), [], "cuda", matmul_us) for case in cases]


def test_the_roof_is_the_larger_of_bytes_and_operations_and_fp4_has_its_own():
    rate = matmul.FLOPS / 2000  # operations a microsecond
    found = roofs([round(50 * rate), round(300 * rate), None], [2000.0])
    assert [g.roofline_kind for g in found] == ["read", "flops", "read"]
    assert [g.roofline_us for g in found] == pytest.approx([100, 300, 100], rel=1e-6)
    assert [g.roofline_config for g in found] == ["read 0", f"matmul at {rate / 1e6:.0f} TFLOP/s", "read 0"]
    assert roofs([round(300 * rate)], [])[0].roofline_kind == "read", "no product was timed"
    found = ReferenceReadings(1.0, "read 0", "read", 0.0, 0, [])
    for activation, us in (("nvfp4", 95.0), ("bf16", 380.0)):
        case = Case({"activation": activation}, 1, flops=9 * 10**11)
        assert readings.sol_us(case, found, "NVIDIA B200") == pytest.approx(us)


def test_what_contents_move_counts_and_not_what_was_expected():
    timing = Timing(Case({"n": 1}, 1), [[call(5.0, 5.0, bytes=1000 + 2 * (i % 2)) for i in range(10)]])
    own = {"empty": [3.0], HOST: [10.0], "read 0": [100.0]}
    found = readings.reference(CaseReadings(timing.case, 5, own), [timing], "cuda", [])
    assert found.bytes == 1001 and found.stated
    assert roofs([None], [])[0].bytes == 5 and not roofs([None], [])[0].stated


# --- the finished work of a run comes back from its lines


RIGHT = Outcome("PASSED", "", {"rel": 1e-4, "max": 0.5, "tol": 1.0}, us=12.5, host_us=13.0)
WRONG = Outcome("INCORRECT", "mismatch found!\nERROR AT (0,): nan 1", {"rel": math.nan, "max": math.inf, "tol": 1.0})
GROUP = Group(0, 1, {"a": [RIGHT, WRONG], "b": []}, {"empty": [1.0, 1.1]}, ["7", "8"], GpuState({"sm": 1}, ["hot"]))


def lines() -> list[dict]:
    """Two tests, one group of a benchmark and one of a confirmation, as a file gives them back."""
    tests = [{"submission": "a", "case": n, "outcome": of_outcome(one)} for n, one in enumerate((RIGHT, WRONG))]
    found = [{"kind": "outcome", **one} for one in tests]
    found += [{"kind": "group", "phase": phase, **of_group(GROUP)} for phase in ("benchmark", "confirm a")]
    return [json.loads(json.dumps(line)) for line in found]


def test_work_comes_back_as_it_was():
    """Every field of an outcome, also a new one: it must be something that JSON brings back."""
    have, confirmed = finished(lines()), finished(lines(), "confirm a")
    assert have.test("a", 0) == RIGHT and have.test("b", 0) is None and have.test("a", 2) is None
    assert repr(have.test("a", 1)) == repr(WRONG) and repr(have.group(0, 1)) == repr(GROUP)
    assert have.group(0, 0) is None and have.group(1, 1) is None and have.group(0, 1, part=1) is None
    assert repr(confirmed.group(0, 1)) == repr(GROUP) and finished(lines(), "confirm b").groups == {}
    assert lines()[2]["state"] == [{"sm": 1}, ["hot"]], "as in the files of runs that are there"
    for line in lines():
        check(line)
    outcome = Outcome(**{field.name: 1.5 for field in dataclasses.fields(Outcome)})
    assert Outcome(**json.loads(json.dumps(of_outcome(outcome)))) == outcome
    assert of_outcome(Outcome("PASSED")) == {"status": "PASSED"}


@pytest.mark.parametrize(
    "broken",
    [
        {"kind": "outcome"},
        {"kind": "outcome", "submission": "a", "case": 0, "outcome": {"status": "FINE"}},
        {"kind": "outcome", "submission": "a", "case": 0, "outcome": {"status": "PASSED", "us": "x"}},
        {"kind": "outcome", "submission": "a", "case": 0, "outcome": {"status": "PASSED", "other": 1}},
        {"kind": "group", "outcomes": {"a": 5}},
        {"kind": "audit", "submissions": {"a": 5}},
        {"kind": "confirm"},
    ],
    ids=brief,
)
def test_a_malformed_line_is_work_that_is_done_again(tmp_path, broken):
    name = "box/p/20260101T000000-00000001.jsonl"
    write_files(tmp_path, {name: "".join(json.dumps(line) + "\n" for line in [run_line(), *lines(), broken])})
    (found,) = record.contents("box", "p", tmp_path, check)
    assert found.unfinished and attempts([found], "a") == {"r1"} and not attempts([found], "c")
    (complaint,) = found.complaints
    assert complaint.startswith(f"{name}:6: skipped: ") and len(complaint) < 400
    assert repr(finished(found.work)) == repr(finished(lines()))
