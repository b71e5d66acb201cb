"""A new first place is measured twice: who would take it, and from whom.

Of many runs of one variant the luckiest would lead, so a time that would lead counts for nothing but to call for a
second measurement: in fresh processes, in interleaved pairs with the present leader where its file is in variants/.
Only the second one's records rank; the first ones are kept, marked as superseded, and so is the number of attempts.

Two cases need none. On an empty board there is nobody to beat, so nothing was selected. In a run of `--all` in which
the leader's present source takes part, all are measured anew in that one run, which then is the board, leader and all:
no old time stands against a new one.
"""

from collections.abc import Iterable, Sequence

from harness.judge.verdict import Result
from harness.results import ranking
from harness.results.ranking import Leader


def present_leader(records: Iterable[dict], target: str, wanted: Sequence[str], ranking_by: str) -> Leader | None:
    """Who leads the board of `target` by these records of one problem on one machine."""
    found = ranking.leaders([r for r in records if r["target"] == target], wanted, ranking_by)
    return found[-1] if found else None


def challenger(judged: list[Result], leader: Leader | None, everything: bool) -> Result | None:
    """Which of the run's submissions would take the lead and has not been confirmed yet; None: none has to be.

    It leads its own run, and the whole of its interval is below the leader's. everything: this is a run of --all.
    """
    if leader is None:
        return None
    eligible = [
        j for j in judged
        if j.verdict == "PASSED" and not j.submission.baseline and not ranking.is_repeat(j.submission.name)
    ]  # fmt: skip
    timed = [(j.metric, j) for j in eligible if j.metric]
    if not timed or (everything and any(is_leader(j, leader) for _, j in timed)):
        return None
    metric, first = min(timed, key=lambda pair: pair[0][0])
    return None if first.confirms or is_leader(first, leader) or not metric[2] < leader.lo else first


def is_leader(j: Result, leader: Leader) -> bool:
    """Whether it is the very code that leads."""
    return (j.submission.name, j.source_hash) == (leader.variant, leader.source_hash)
