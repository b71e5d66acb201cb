"""Which run a board compares, by what metric, and who leads: one rule for the board and for the judge.

Pure: works on records, newest run last or not, and reads nothing. A board is one problem and target on one machine.
Absolute times compare only within one run, so a board has a base run: the newest that timed at least two variants on
every case, else the newest that timed one on every case, else the newest; a failed case was not timed. (So neither a
paired run of two displaces one of the whole field, nor a failed submission anything.) Records that a confirmation
superseded count nowhere. A board is of one clock, that of most of its base run. A variant that is not in the base run
can still take the lead, by its confirmation: it was timed once more, in fresh processes, in interleaved pairs with the
leader, and was FASTER.
"""

import collections
import dataclasses
import datetime
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.results import stats
from harness.results.text import label as case_label

JUDGED = ("test", "benchmark")  # kinds of record that say whether a variant is right
CLOCKS = {"cuda": "event pair behind a spin", "cpu": "the judge's clock"}  # of records that name none, by their device


@dataclass(frozen=True)
class Leader:
    """Who is, or was, first. value, lo, hi: the metric and its 95 % interval, in us, from run `run_id`. over, ratio: of
    one confirmed in pairs, from whom it took the lead, and (ratio, lo, hi) with the 99 % interval, all below 1.
    """

    variant: str
    source_hash: str | None
    run_id: str
    value: float
    lo: float
    hi: float
    over: str = ""
    ratio: tuple[float, float, float] | None = None


def apart(labels: Sequence[str]) -> tuple[dict[str, str], str]:
    """-> (by label what a case has for itself, what all have in common). A case alone has all for itself."""
    fields = {label: re.split(r" (?=\w+=)", label) for label in labels}
    first = next(iter(fields.values()), [])
    common = [field for field in first if len(fields) > 1 and all(field in other for other in fields.values())]
    distinct = {label: " ".join(f for f in own if f not in common) or label for label, own in fields.items()}
    return distinct, " ".join(common)


def is_repeat(variant: str) -> bool:
    """Whether this is no separate variant: "NAME#2", the second of two files of one name, or of one file twice."""
    return variant.endswith("#2")


def name(ranking_by: str) -> str:
    """What a problem's metric is called. GPU MODE's `last` ranks by one case, of which any mean is its time."""
    return "mean" if ranking_by == "mean" else "geomean"


def metric(ranking_by: str, medians: Sequence[float]) -> float:
    """The metric over the medians of all cases, in us. ValueError as stats.geomean says."""
    geomean = stats.geomean(medians)  # also looks at every value
    return sum(medians) / len(medians) if name(ranking_by) == "mean" else geomean


def interval(ranking_by: str, cases: Sequence[stats.Groups]) -> tuple[float, float]:
    """The metric's 95 % interval. cases: of each case the samples by process. ValueError as stats says."""
    return (stats.mean_interval if name(ranking_by) == "mean" else stats.geomean_interval)(cases)


def ranks(intervals: list[tuple[float, float]]) -> list[int]:
    """Rank of each (lo, hi), which come sorted by their geomean.

    The first leads a group. A variant whose interval overlaps the leader's shares the leader's rank; the first that
    does not leads the next group, and its rank is its position from 1. So ranks read 1, 1, 3. Overlap is not
    transitive: with A ~ B and B ~ C but A apart from C, C is third, since only the group's leader counts. That keeps a
    chain of neighbours from making the whole field one tie.
    """
    result: list[int] = []
    leader, rank = None, 0
    for position, (lo, hi) in enumerate(intervals, 1):
        if leader is None or lo > leader[1] or hi < leader[0]:
            leader, rank = (lo, hi), position
        result.append(rank)
    return result


def timed(records: Iterable[dict]) -> list[dict]:
    """The benchmark records that count, sorted by run, newest last."""
    kept = [r for r in records if r["kind"] == "benchmark" and not r.get("superseded") and not is_repeat(r["variant"])]
    return _by_run(kept)


def clock(record: Mapping) -> str:
    """Return the name of the clock that timed a record."""
    return (record.get("clock") or {}).get("name") or CLOCKS.get(record.get("device") or "", "")


def board_clock(of_base: Iterable[dict]) -> str:
    """Return the clock of a board: that of most records of its base run, baselines aside where there are others."""
    of_base = list(of_base)
    ours = [record for record in of_base if not record.get("baseline")] or of_base
    return collections.Counter(map(clock, ours)).most_common(1)[0][0] if ours else ""


def base_run(records: Iterable[dict], wanted: Sequence[str] | None) -> str | None:
    """The newest run with two complete variants, else with one. wanted: labels of its cases; None: the run's own."""
    best, best_grade = None, -1
    for run_id, run in _runs(timed(records)).items():
        cases: dict[str, set[str]] = {}
        for record in run:
            of_variant = cases.setdefault(record["variant"], set())
            served = record["status"] == "PASSED" or (record.get("baseline") and record["status"] == "UNSUPPORTED")
            of_variant |= {case_label(record["case"])} if served else set()
        labels = {case_label(record["case"]) for record in run} if wanted is None else set(wanted)
        complete = sum(labels <= its for its in cases.values())
        of_two = any(record.get("against") for record in run) and len(cases) <= 2
        grade = 2 if complete >= 2 and not of_two else int(complete >= 1)
        if grade >= best_grade:
            best, best_grade = run_id, grade
    return best


def leaders(records: Iterable[dict], wanted: Sequence[str], ranking_by: str = "geom") -> list[Leader]:
    """Who has led the board of these records, which are all of one problem and target: the first of the base run, then
    who took the lead from whom; the last leads now. Empty where nobody does. wanted: the labels of the board's cases.
    """
    records = list(records)
    base, runs = base_run(records, wanted), _runs(timed(records))
    if base is None:
        return []
    by = board_clock(runs[base])
    records = [record for record in records if record["kind"] != "benchmark" or clock(record) == by]
    of_base = dict.fromkeys(record["variant"] for record in runs[base])
    standings = [_standing(records, v, base, wanted, ranking_by) for v in of_base if not _failed(records, v)]
    chain = sorted((leader for leader in standings if leader), key=lambda leader: (leader.value, leader.variant))[:1]
    for run_id in list(runs)[list(runs).index(base) + 1 :]:
        for variant in dict.fromkeys(record["variant"] for record in runs[run_id] if record.get("confirms")):
            own = {case_label(r["case"]): r for r in runs[run_id] if r["variant"] == variant}
            over = {r["confirms"]["variant"] for r in own.values() if (r.get("confirms") or {}).get("paired")}
            if not chain or over != {chain[-1].variant} or variant in over or _failed(records, variant):
                continue
            theirs = {case_label(r["case"]): r for r in runs[run_id] if r["variant"] == chain[-1].variant}
            standing, ratio = _standing(records, variant, run_id, wanted, ranking_by), _pair(own, theirs)
            if standing and ratio and ratio[2] < 1:
                chain.append(dataclasses.replace(standing, over=chain[-1].variant, ratio=ratio))
    return chain


def attempts(records: Iterable[dict], variant: str) -> set[str]:
    """The runs that timed a variant of this name, whatever came of it."""
    return {r["run_id"] for r in records if r["kind"] == "benchmark" and r["variant"] == variant}


def attempt(records: Iterable[dict], variant: str) -> int:
    """How many runs timed it: those on record, or what a record says, which also counts runs that were given up."""
    counts = [r.get("attempt") or 0 for r in records if r["kind"] == "benchmark" and r["variant"] == variant]
    return max([len(attempts(records, variant)), *counts])


def _standing(records: list[dict], variant: str, run_id: str, wanted: Sequence[str], ranking_by: str) -> Leader | None:
    """The metric of a variant in a run; None for a baseline, or where a case is missing, failed or no time."""
    cases = {case_label(r["case"]): r for r in timed(records) if (r["variant"], r["run_id"]) == (variant, run_id)}
    if not set(wanted) <= set(cases) or any(r.get("baseline") or r["status"] != "PASSED" for r in cases.values()):
        return None
    of_board = [cases[label] for label in wanted]
    try:
        value = metric(ranking_by, [record["median_us"] for record in of_board])
        lo, hi = interval(ranking_by, [record["samples_us"] for record in of_board])
    except (KeyError, TypeError, ValueError):
        return None
    return Leader(variant, of_board[0].get("source_hash"), run_id, value, lo, hi)


def _failed(records: Iterable[dict], variant: str) -> bool:
    """Whether the variant's newest run, of those that were about it and not about the machine, failed anywhere."""
    judged = [r for r in records if r["variant"] == variant and r["kind"] in JUDGED and not r.get("superseded")]
    runs = [run for run in _runs(_by_run(judged)).values() if any(r["status"] != "UNSUPPORTED" for r in run)]
    if not runs:
        return True
    last = {(r["kind"], case_label(r["case"])): r["status"] for r in runs[-1]}
    gap = ("test", "UNSUPPORTED")  # a case that it does not serve, as task.py allows
    return any(status != "PASSED" and (kind, status) != gap for (kind, _), status in last.items())


def _pair(own: Mapping[str, dict], theirs: Mapping[str, dict]) -> tuple[float, float, float] | None:
    """Ratio own / theirs over the cases with its 99 % interval, by which it is FASTER, from samples taken in pairs."""
    if not own or set(own) != set(theirs):
        return None
    try:
        pairs = [
            [list(zip(a, b, strict=True)) for a, b in zip(r["samples_us"], theirs[c]["samples_us"], strict=True)]
            for c, r in own.items()
        ]
        ratio = stats.compare(pairs)
    except (KeyError, TypeError, ValueError):
        return None
    return (ratio.ratio, *ratio.ci99) if math.isfinite(ratio.ratio) else None


def _by_run(records: list[dict]) -> list[dict]:
    """Sorted by the time at which their runs ended, as the board's; the order within a run is kept."""
    newest: dict[str, datetime.datetime] = {}
    for record in records:
        at = datetime.datetime.fromisoformat(record["time"])
        at = at if at.tzinfo else at.replace(tzinfo=datetime.UTC)
        newest[record["run_id"]] = max(at, newest.get(record["run_id"], at))
    return sorted(records, key=lambda record: (newest[record["run_id"]], record["run_id"]))


def _runs(records: list[dict]) -> dict[str, list[dict]]:
    runs: dict[str, list[dict]] = {}
    for record in records:
        runs.setdefault(record["run_id"], []).append(record)
    return runs
