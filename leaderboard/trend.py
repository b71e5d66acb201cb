"""How a board's times changed from run to run: the points of its history, and who was first when. Pure.

Times of different runs are not paired, so a trend shows large changes only: the same kernel differs by some percent
between two machines of one name.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.results import ranking
from leaderboard.board import Board

SHORT = 7  # characters of a commit; records of old runs have no more


@dataclass(frozen=True)
class Timing:
    """A variant's metric over all cases of the board in one run. time: ISO 8601; us: in us."""

    variant: str
    run_id: str
    time: str
    commit: str
    us: float
    baseline: bool


def timings(board: Board, records: Iterable[dict]) -> list[Timing]:
    """Every run in which a variant was right and timed on all cases of the board, oldest first.

    records: of the board's machine. Measurements that a confirmation superseded do not count.
    """
    mine = [one for one in records if (one["problem"], one["target"]) == (board.problem, board.target)]
    judged = [one for one in mine if one["kind"] in ranking.JUDGED and not one.get("superseded")]
    wrong = {(one["run_id"], one["variant"]) for one in judged if one["status"] not in ("PASSED", "UNSUPPORTED")}
    found: dict[tuple[str, str], dict[str, dict]] = {}
    for one in ranking.timed(mine):
        if one["status"] == "PASSED":
            found.setdefault((one["run_id"], one["variant"]), {})[ranking.case_label(one["case"])] = one
    points = []
    for key, by_case in found.items():
        if key in wrong or not board.cases or not set(board.cases) <= set(by_case):
            continue
        of_board = [by_case[case] for case in board.cases]
        try:
            us = ranking.metric(board.metric, [one["median_us"] for one in of_board])
        except (KeyError, TypeError, ValueError):
            continue  # a time that is none: the board says so
        first = of_board[0]
        commit = (first.get("commit") or "unknown")[:SHORT]
        baseline = any(one.get("baseline") for one in of_board)
        points.append(Timing(first["variant"], first["run_id"], first["time"], commit, us, baseline))
    return points


def records_broken(points: Sequence[Timing]) -> list[Timing]:
    """The first correct version, then each that was faster than all before it; of one run only the fastest. The first
    correct version is, of the earliest run that has one, the slowest that is no baseline.
    """
    by_run: dict[str, list[Timing]] = {}
    for point in points:
        if not point.baseline:
            by_run.setdefault(point.run_id, []).append(point)
    found: list[Timing] = []
    for ours in by_run.values():
        found += [] if found else [max(ours, key=lambda point: point.us)]
        fastest = min(ours, key=lambda point: point.us)
        found += [fastest] if fastest.us < found[-1].us else []
    return found


def commits(points: Sequence[Timing]) -> dict[str, tuple[int, str]]:
    """By commit its position in time, and a label of two lines: the commit and the day of its first run."""
    found: dict[str, str] = {}
    for point in points:
        found.setdefault(point.commit, f"{point.commit}\n{point.time[:10]}")
    return {commit: (place, label) for place, (commit, label) in enumerate(found.items())}
