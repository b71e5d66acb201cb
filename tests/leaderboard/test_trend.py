"""The history of a board: which runs are points, and who was the fastest when."""

import pytest

from leaderboard import board, trend
from tests.support.records import CASES, full, line


def trended(records: list[dict]) -> list[trend.Timing]:
    (found,) = board.build(records, "box", {("nvfp4_gemv", "sm90"): CASES})
    return trend.timings(found, records)


def test_only_whole_right_runs_are_points():
    failed = [*full("wrong", 0.5, run="r2", minute=2), line("test", "wrong", run="r2", minute=2, status="INCORRECT")]
    half = full("half", 0.5, run="r2", minute=2)[:2]
    again = [one | {"superseded": True} for one in full("a", 0.1, run="r2", minute=2)]
    twice = full("a#2", 0.1, run="r2", minute=2)
    records = [*full("a", 1.0), *failed, *half, *again, *twice, *full("a", 0.9, run="r2", minute=2)]
    points = trended(records)
    assert [(one.variant, one.run_id) for one in points] == [("a", "r1"), ("a", "r2")]
    assert points[1].us == pytest.approx(points[0].us * 0.9) and points[0].commit == "0123456"


def test_first_correct_version_is_the_slowest_of_the_earliest_run_and_no_baseline():
    first = [*full("torch", 9.0), *full("fast", 3.0), *full("peer", 1.0, baseline=True)]
    later = [*full("slow", 20.0, run="r2", minute=2), *full("best", 1.5, run="r3", minute=3, commit="feedface")]
    points = trended([*later, *first])
    assert [one.variant for one in trend.records_broken(points)] == ["torch", "fast", "best"]
    assert list(trend.commits(points).values()) == [(0, "0123456\n2026-01-02"), (1, "feedfac\n2026-01-02")]
    assert trend.records_broken(trended(full("peer", 1.0, baseline=True))) == [], "of baselines alone there is none"
