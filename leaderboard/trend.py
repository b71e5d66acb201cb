"""How a board's times changed from run to run: the points of its history. Pure.

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


def timings(board: Board, records: Iterable[dict]) -> list[Timing]:
    """Every run in which a variant was right and timed on all cases of the board, oldest first.

    records: of the board's machine. Measurements that a confirmation superseded do not count.
    """
    mine = [one for one in records if (one["problem"], one["target"]) == (board.problem, board.target)]
    judged = [one for one in mine if one["kind"] in ranking.JUDGED and not one.get("superseded")]
    wrong = {(one["run_id"], one["variant"]) for one in judged if one["status"] not in ("PASSED", "UNSUPPORTED")}
    found: dict[tuple[str, str], dict[str, dict]] = {}
    for one in ranking.timed(mine):
        key = one["run_id"], one["variant"]
        if one["status"] == "PASSED" and (one.get("median_us") or 0) > 0 and key not in wrong:
            found.setdefault(key, {})[ranking.case_label(one["case"])] = one
    points = []
    for (run_id, variant), by_case in found.items():
        if board.cases and set(board.cases) <= set(by_case):
            of_board = [by_case[case] for case in board.cases]
            us = ranking.metric(board.metric, [one["median_us"] for one in of_board])
            commit = (of_board[0].get("commit") or "unknown")[:SHORT]
            points.append(Timing(variant, run_id, of_board[0]["time"], commit, us))
    return points


def commits(points: Sequence[Timing]) -> dict[str, tuple[int, str]]:
    """By commit its position in time, and a label of two lines: the commit and the day of its first run."""
    first = {point.commit: point.time[:10] for point in reversed(points)}
    order = dict.fromkeys(point.commit for point in points)
    return {commit: (place, f"{commit}\n{first[commit]}") for place, commit in enumerate(order)}
