"""Which results of two submissions are compared."""

import pytest

from harness.judge import verdict
from harness.judge.outcome import Outcome
from harness.judge.readings import Timing
from harness.judge.verdict import CaseTime, Result
from harness.problem.folders import Case, Submission


def result(name: str, us: float, failures: list[Outcome | None]) -> Result:
    """A submission whose calls took `us` in each case that has no failure."""
    made = Result(Submission(name, None, ("cpu",)), "cpu", source_hash=name)
    for number, failure in enumerate(failures):
        case = Case({"n": number}, 1)
        calls = [[Outcome("PASSED", us=us * (1 + 0.001 * i)) for i in range(3)] for _ in range(3)]
        made.times.append(CaseTime(case, Timing(case, calls, failure), None, failure))
    return made


@pytest.mark.parametrize("failed", ["INCORRECT", "TIMEOUT", "CHEAT_SUSPECTED", "INVALID_MEASUREMENT"])
@pytest.mark.parametrize("at", [0, 1])
def test_who_failed_in_one_case_is_compared_in_none(failed, at):
    failures: list[Outcome | None] = [None, None]
    failures[at] = Outcome(failed, "in one case")
    for first, second in (
        (result("a", 10.0, failures), result("b", 20.0, [None, None])),
        (result("a", 10.0, [None, None]), result("b", 20.0, failures)),
    ):
        verdict.pair(first, second)
        assert (first.against, first.against_all) == ([], None) == (second.against, second.against_all)


def test_who_passed_in_all_is_compared_in_all():
    first, second = result("a", 10.0, [None, None]), result("b", 20.0, [None, None])
    verdict.pair(first, second)
    assert [round(found["ratio"], 3) for found in [*first.against, first.against_all]] == [0.5, 0.5, 0.5]
    assert (second.against, second.against_all) == ([], None)


def test_who_has_no_timed_case_did_not_pass():
    some, none = Outcome("PASSED"), Outcome("UNSUPPORTED", "not served")
    for tests, times, expected in (
        ([some, none], [None, none], "PASSED"),
        ([some], [none, none], "UNSUPPORTED"),
        ([some], [], "PASSED"),
        ([Outcome("INCORRECT", "wrong"), some], [none], "INCORRECT"),
    ):
        made = result("a", 10.0, times)
        made.tests = [(Case({"n": 1}, 1), outcome) for outcome in tests]
        assert made.verdict == expected
