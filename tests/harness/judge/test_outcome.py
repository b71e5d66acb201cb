"""The finished work of a run comes back from its lines as it was, or is done again."""

import dataclasses
import json
import math

import pytest

from harness.judge.outcome import Outcome
from harness.judge.readings import Group, attempts, check, finished, of_group, of_outcome
from harness.results import record
from harness.results.environment import GpuState
from tests.support.hostile import brief
from tests.support.records import run_line

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
    have, confirmed = finished(lines()), finished(lines(), "confirm a")
    assert have.test("a", 0) == RIGHT and have.test("b", 0) is None and have.test("a", 2) is None
    assert repr(have.test("a", 1)) == repr(WRONG) and repr(have.group(0, 1)) == repr(GROUP)
    assert have.group(0, 0) is None and have.group(1, 1) is None and have.group(0, 1, part=1) is None
    assert repr(confirmed.group(0, 1)) == repr(GROUP) and finished(lines(), "confirm b").groups == {}
    assert lines()[2]["state"] == [{"sm": 1}, ["hot"]], "as in the files of runs that are there"
    for line in lines():
        check(line)


def test_every_field_of_an_outcome_comes_back():
    """Also a new one: it must be something that JSON brings back."""
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
    folder = tmp_path / "box" / "p"
    folder.mkdir(parents=True)
    (folder / "20260101T000000-00000001.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in [run_line(), *lines(), broken])
    )
    (found,) = record.contents("box", "p", tmp_path, check)
    assert found.unfinished and attempts([found], "a") == {"r1"} and not attempts([found], "c")
    (complaint,) = found.complaints
    assert complaint.startswith("box/p/20260101T000000-00000001.jsonl:6: skipped: ") and len(complaint) < 400
    assert repr(finished(found.work)) == repr(finished(lines()))
