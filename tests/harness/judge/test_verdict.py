"""Which results of two submissions are compared, what became slower, and the exit code."""

from types import SimpleNamespace

import pytest

from harness.judge import verdict
from harness.judge.outcome import Outcome, of_cpu
from harness.judge.readings import Timing
from harness.judge.verdict import CaseTime, Result
from harness.problem.folders import Case, Submission
from harness.results import ranking
from harness.runner import gate
from tests.support import json_lines
from tests.support.recorded import SOURCE, judge


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


@pytest.mark.parametrize(
    ("words", "code"),
    [(["PASSED", "UNSUPPORTED", "COMPILED"], 0), (["UNSUPPORTED"], 7), (["PASSED", "UNSUPPORTED", "TIMEOUT"], 5)],
)
def test_the_gravest_verdict_is_the_exit_code(words, code):
    assert verdict.exit_code(words, everything=True) == code


def test_what_became_slower_is_a_regression_against_the_file_as_it_was(world, folder, tmp_path, capsys):
    now, before, json_file = folder / "variants" / "good.py", tmp_path / "before" / "good.py", tmp_path / "json"
    before.parent.mkdir()
    before.write_text(SOURCE.format(name="as it was"))
    world.us["good#2"] = 8.0
    words = ["--variant", "good", "--against", str(before), "--json", str(json_file), "--fail-on-regression"]
    assert judge(folder, *words, "2") == verdict.REGRESSION_EXIT
    out = capsys.readouterr().out
    assert f"good is {now}, good#2 is {before}" in out and "SLOWER" in out
    assert "regression of more than 2 %: all cases together: " in out
    lines = json_lines(json_file)
    assert {line["variant"] for line in lines} == {"good", "good#2"} and len({x["source_hash"] for x in lines}) == 2
    assert {line["variant"] for line in ranking.timed(lines)} == {"good"}, "the second is on no board"
    assert {round(line["against"]["ratio"], 2) for line in lines if line.get("against")} == {1.25}
    assert judge(folder, *words, "30") == 0


def paired(*ratios: tuple[float, float, float]) -> SimpleNamespace:
    """What a comparison leaves: (ratio, and its 99 % interval) of each case, and of all together."""
    found = [{"variant": "w", "ratio": r, "ci95": [lo, hi], "ci99": [lo, hi], "processes": 3} for r, lo, hi in ratios]
    times = [SimpleNamespace(case=f"m={i}") for i in range(len(ratios) - 1)]
    return SimpleNamespace(times=times, against=found[:-1], against_all=found[-1])


def test_a_regression_is_an_interval_wholly_over_the_share():
    slow, maybe, fast = (1.06, 1.04, 1.08), (1.06, 0.99, 1.2), (0.9, 0.8, 0.95)
    assert verdict.regressions(paired(fast, maybe, fast), 0) == []
    (said,) = verdict.regressions(paired(fast, slow, maybe), 3)
    assert said == "m=1: 1.0600 of the time of w (99 %: 1.0400..1.0800)", "a single case is enough"
    (said,) = verdict.regressions(paired(maybe, slow), 3)
    assert said.startswith("all cases together: ")
    assert verdict.regressions(paired(slow, slow), 4) == []
    assert verdict.regressions(SimpleNamespace(times=[], against=[], against_all=None), 0) == []
    assert verdict.REGRESSION_EXIT not in verdict.EXIT_CODES.values()


@pytest.mark.parametrize(("call_us", "delay_us", "busy"), [(9, 99, 0), (9, 101, 1), (9e3, 179, 0), (9e3, 181, 1)])
def test_a_call_is_busy_that_waited_beyond_the_larger_allowance(call_us, delay_us, busy):
    assert of_cpu(gate.Reading(0, call_us, 0, delay_us, 0, 1, 0, 0)).busy == busy
