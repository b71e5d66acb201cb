"""The confirmation of a new first place: which submission would take it, and from which leader.

Of many runs of one variant the luckiest would lead. So a time that would lead only causes a second measurement: in
fresh processes, in interleaved pairs with the present leader if its file is in variants/. Only the second measurement
ranks. The records of the first one are kept as superseded.

Two cases need no confirmation. An empty board has no leader. In a run of `--all` with the leader's present source, all
variants are measured anew, so no old time is compared with a new one.
"""

from collections.abc import Iterable, Sequence

from harness.judge.verdict import Result
from harness.results import ranking
from harness.results.ranking import Leader


def present_leader(records: Iterable[dict], target: str, wanted: Sequence[str], ranking_by: str) -> Leader | None:
    """Return the leader of the board of `target` by these records of one problem on one machine."""
    found = ranking.leaders([r for r in records if r["target"] == target], wanted, ranking_by)
    return found[-1] if found else None


def challenger(judged: list[Result], leader: Leader | None, everything: bool) -> Result | None:
    """Return the submission of this run that would take the lead and is not confirmed yet; None if there is none. It
    leads the run, and its whole interval is below the leader's. everything: this is a run of --all.
    """
    if leader is None:
        return None
    eligible = [
        j
        for j in judged
        if j.verdict == "PASSED" and not j.submission.baseline and not ranking.is_repeat(j.submission.name)
    ]
    timed = [(j.metric, j) for j in eligible if j.metric]
    if not timed or (everything and any(is_leader(j, leader) for _, j in timed)):
        return None
    metric, first = min(timed, key=lambda pair: pair[0][0])
    return None if first.confirms or is_leader(first, leader) or not metric[2] < leader.lo else first


def is_leader(j: Result, leader: Leader) -> bool:
    return (j.submission.name, j.source_hash) == (leader.variant, leader.source_hash)
