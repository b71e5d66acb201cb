"""The history of a board: which runs are points."""

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
    assert trend.commits(points) == {"0123456": (0, "0123456\n2026-01-02")}
