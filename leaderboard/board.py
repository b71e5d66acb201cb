"""From records to ranked tables. Pure: reads no file, imports no problem, prints nothing.

A board is one (machine, problem, target). Absolute times compare only within one run, so a board has a base run, which
`harness/results/ranking.py` chooses. A variant that is not in the base run is shown from its own newest run and not
ranked, unless it took the lead by the pairs of its confirmation. A board is of one clock: a row that another one timed
is not ranked. Nothing is left out silently: each variant with any record has a row, and a row without a rank says why.
A measurement that a confirmation superseded is told in a note.

A variant's state is that of its newest run: if that failed, in any test or benchmark case, so does its row, whatever an
older run said. A run in which it was UNSUPPORTED throughout is about the machine, so it counts only for a variant that
has neither run nor been compiled. Single UNSUPPORTED cases of a baseline (its ONLY) are gaps: it has no geomean without
all benchmark cases, and measures the others in the cases that it has. "NAME#2", the second side of a variant paired
with itself, is not a separate variant.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from harness.results import ranking, stats
from harness.results.ranking import case_label
from leaderboard import provenance
from leaderboard.modelled import Modelled
from leaderboard.provenance import PROBLEM_CHANGED, Provenance

OTHER_RUN = "not ranked: timed in a run of its own; rank it with --all"
KINDS = ("test", "benchmark", "compile", "model")
UNRUN = ("COMPILED", "MODEL_CHECKED")  # states of what no machine with this target has run

STANDING = [
    *("rank", "variant", "baseline", "geomean_us", "lo_us", "hi_us", "roofline_share", "baseline_ratio"),
    *("baseline_cases", "done", "wanted"),
    *("status", "source", "reason", "notes", "run_id", "base", "attempts", "registers", "spill_bytes", "kernels"),
]
TIMES = [
    *("variant", "case", "baseline", "run_id", "base", "status", "reason", "median_us", "lo_us", "hi_us", "n"),
    *("roofline_us", "roofline_kind", "roofline_share", "baseline_ratio", "bytes", "flops", "empty_call_us"),
    "host_us",
    "setup_us",
    *("rel_error", "max_error", "tolerance"),
]
PAIRS = ["variant", "against", "case", "ratio", "lo", "hi", "word", "run_id"]


@dataclass(frozen=True)
class Board:
    """What was measured for one target of one problem on one machine.

    standing  one row per variant, columns STANDING: ranked, baselines, other runs, failures, compiled; fastest first;
              source: a state of leaderboard/provenance.py
    times     one row per variant and case of the board, columns TIMES; times in us, NaN where there is none
    pairs     one row per case of each two variants' newest paired run, columns PAIRS; ratio < 1: variant is faster
    run       the base run's facts: run_id, time, commit, environment, clock; where nothing was timed, the newest run's
    timed     whether any variant was timed or tested here, rather than compiled alone
    metric    what is in geomean_us: "geomean" over the cases, or "mean" where the problem ranks by that
    """

    machine: str
    problem: str
    target: str
    cases: list[str]
    run: dict
    timed: bool
    metric: str
    standing: pd.DataFrame
    times: pd.DataFrame
    pairs: pd.DataFrame
    notes: list[str]


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


def build(
    records: Iterable[dict],
    machine: str,
    expected: Mapping[tuple[str, str], list[dict]],
    known: Provenance | None = None,
    modelled: Modelled | None = None,
    predictions: Mapping[tuple[str, str], str] = {},
) -> list[Board]:
    """The boards of one machine, sorted by problem and target.

    records: as harness/results/record.py reads them; those of kind latency are in leaderboard/model_board.py's tables.
    expected: for (problem, target) the cases that a complete variant must have; where absent, those of the base run.
    known: what a row's `source` comes from. modelled: what other machines' records say of what is compiled here; by
    default these records. predictions: a line for a board of (problem, target) without times.
    """
    records, known = list(records), known or Provenance()
    modelled = modelled or Modelled(records, known)
    rows = [
        {key: record[key] for key in ("run_id", "problem", "target", "kind", "variant", "status")}
        | {"time": record["time"], "case": case_label(record["case"]), "paired": bool(record.get("against"))}
        | {"record": record, "position": position}
        for position, record in enumerate(split for one in records if one["kind"] in KINDS for split in _by_target(one))
    ]
    if not rows:
        return []
    lines = pd.DataFrame(rows)
    lines["time"] = pd.to_datetime(lines["time"], utc=True, format="ISO8601")
    lines["newest"] = lines.groupby("run_id")["time"].transform("max")
    lines = lines.sort_values(["newest", "run_id", "position"], kind="stable")  # so the last line is the newest run's
    boards = []
    for _, part in lines.groupby(["problem", "target"], sort=True):
        problem, target = part.problem.iloc[0], part.target.iloc[0]
        one = _board(part, machine, problem, target, expected.get((problem, target)), known, modelled)
        if not one.timed and (line := predictions.get((problem, target))):
            one.notes.append(line)
        boards.append(one)
    return boards


def rows_of(table: pd.DataFrame) -> Iterator[Any]:
    """Return the rows of a table, with its columns as attributes."""
    return iter(table.itertuples())


def _board(
    lines: pd.DataFrame,
    machine: str,
    problem: str,
    target: str,
    expected: list[dict] | None,
    known: Provenance,
    modelled: Modelled,
) -> Board:
    superseded = lines.record.map(lambda record: bool(record.get("superseded"))).astype(bool)
    everything, lines, first_tries = lines, lines[~superseded], lines[superseded]
    repeat = lines.variant.map(ranking.is_repeat).astype(bool)
    timed = lines[(lines.kind == "benchmark") & ~repeat]
    wanted = None if expected is None else [case_label(case) for case in expected]
    base = ranking.base_run(lines.record, wanted)
    of_base = timed[timed.run_id == base]
    cases = wanted if wanted is not None else list(dict.fromkeys(of_base.case))
    ranking_by = (_text(of_base.record.iloc[-1].get("ranking_by")) if len(of_base) else "") or "geom"
    promoted = {one.variant: one for one in ranking.leaders(lines.record, cases, ranking_by) if one.over}
    clock, apart = ranking.board_clock(of_base.record), []
    standing, times, other = [], [], []
    for variant, part in lines[~repeat].groupby("variant", sort=True):
        row, its_times, shown = _row(variant, part, base, cases, ranking_by, promoted.get(variant), modelled)
        row["source"] = provenance.worst(map(known.state, shown))
        other.append(any(map(known.problem_changed, shown)))
        before = first_tries[(first_tries.variant == variant) & (first_tries.run_id == row["run_id"])]
        if len(before):
            row["notes"].append(f"confirmation; it supersedes a first measurement{_first(before, cases, ranking_by)}")
        row["attempts"] = ranking.attempt(everything.record, variant)
        by = {ranking.clock(record) for record in shown if record["kind"] == "benchmark"} - {clock}
        if by and row["base"]:
            row["notes"].append(f"not ranked, timed by another clock: {', '.join(sorted(by))}")
            apart.append(variant)
        standing.append(row)
        times += its_times
    if any(other) and not all(other):
        for row, is_other in zip(standing, other, strict=True):
            row["notes"] += [PROBLEM_CHANGED] * is_other
    standing, times = pd.DataFrame(standing, columns=STANDING), pd.DataFrame(times, columns=TIMES)
    _against_peers(standing, times)
    standing = _ranked(standing, list(promoted), apart)
    order = {name: place for place, name in enumerate(standing.variant)}
    times = times.sort_values("variant", key=lambda names: names.map(order), kind="stable", ignore_index=True)
    ran = lines[~lines.kind.isin(("compile", "model")) & (lines.status != "UNSUPPORTED")]
    told = of_base if len(of_base) else ran if len(ran) else lines
    notes = [f"All rows: {PROBLEM_CHANGED}."] if other and all(other) else []
    if strange := [case for case in dict.fromkeys(of_base.case) if case not in cases]:
        notes.append(f"timed in run {base}, but no case of this board: {'; '.join(strange)}")
    if len({json.dumps(_environment(record), sort_keys=True) for record in of_base.record}) > 1:
        notes.append(f"the environment changed within run {base}")
    run, ever_ran = _facts(told), not ran.empty
    pairs = _pairs(everything[everything.kind == "benchmark"])
    metric = ranking.name(ranking_by)
    return Board(machine, problem, target, cases, run, ever_ran, metric, standing, times, pairs, notes)


def _row(
    variant: str,
    lines: pd.DataFrame,
    base: str | None,
    cases: list[str],
    ranking_by: str,
    lead: ranking.Leader | None,
    modelled: Modelled,
) -> tuple[dict, list[dict], list[dict]]:
    """-> (row of standing, rows of times, records that they show) of one variant. The caller fills in rank, attempts,
    source and baseline_ratio.

    lead: how it took the lead after the base run, if it did.
    """
    row: dict[str, Any] = dict.fromkeys(STANDING) | {"variant": variant, "done": 0, "wanted": len(cases), "notes": []}
    row |= {"baseline": any(record.get("baseline") for record in lines.record), "base": False, "reason": ""}
    row |= _resources(lines)
    row |= dict.fromkeys(("geomean_us", "lo_us", "hi_us", "roofline_share", "baseline_ratio"), math.nan)
    ran = lines[~lines.kind.isin(("compile", "model"))]
    ran = ran[(ran.status != "UNSUPPORTED").groupby(ran.run_id).transform("any")]
    if ran.empty:
        compiled = lines[lines.kind == "compile"]
        last = (compiled if len(compiled) else lines).iloc[-1]
        row |= {"status": last.status, "run_id": last.run_id, "reason": _text(last.record.get("reason"))}
        if last.status in UNRUN or last.kind == "model":
            row["status"], row["reason"], note = modelled.said(last.record)
            row["notes"] = [note] * bool(note)
        return row, [], [last.record]
    # Single cases that a submission does not serve (ONLY) are gaps, no failures. Of the benchmarks only a baseline may.
    gaps = (ran.status == "UNSUPPORTED") & (ran.case != "") & (row["baseline"] | (ran.kind == "test"))
    ran, gaps = ran[~gaps], ran[gaps]
    run_id = _shown_run(ran, lead.run_id if lead else base)
    run = ran[ran.run_id == run_id].drop_duplicates(["kind", "case"], keep="last")  # an attempt replaces the one before
    gaps = gaps[gaps.run_id == run_id]
    row |= {"run_id": run_id, "base": run_id == base}
    if lead and lead.ratio:
        ratio, lo, hi = lead.ratio
        row["notes"].append(f"first by its pairs with {lead.over}: {ratio:.4f} ({lo:.4f} to {hi:.4f}) of its time")
    elif not row["base"] and base is not None:
        row["notes"].append(OTHER_RUN)
    newer = ran.iloc[-1]
    if newer.newest > run.newest.iloc[-1]:
        was, now = run.record.iloc[-1].get("source_hash"), newer.record.get("source_hash")
        of = " of another source" if was != now else ""
        row["notes"].append(f"also in a newer run{of}, not comparable, {newer.run_id}: {newer.status}")

    bench = {line.case: line.record for line in rows_of(pd.concat([gaps, run])) if line.kind == "benchmark"}
    times = [_time(variant, case, bench.get(case), run_id, row["base"], row["baseline"]) for case in cases]
    done = [time for time in times if time["status"] == "PASSED"]
    row["done"] = len(done)
    row["status"], row["reason"] = _state(run, times, lines)
    row["notes"] += dict.fromkeys(_text(record.get("reason")) for record in gaps.record)
    if row["status"] == "PASSED" and done and len(done) == len(cases):
        row["geomean_us"] = ranking.metric(ranking_by, [time["median_us"] for time in done])
        if all(time["roofline_share"] > 0 for time in done):
            row["roofline_share"] = stats.geomean([time["roofline_share"] for time in done])
        try:
            samples = [bench[case].get("samples_us") or [] for case in cases]
            row["lo_us"], row["hi_us"] = ranking.interval(ranking_by, samples)
        except (TypeError, ValueError) as error:
            row["notes"].append(f"no interval, hence no rank: samples_us: {error}")
    if left_out := [time["setup_us"] for time in done if time["setup_us"] > 0]:
        row["notes"].append(f"its set-up of {_span(left_out)} us a call is not in the time")
    row["notes"] += provenance.warnings(run[run.kind == "benchmark"].record)
    return row, times, list(run.record)


def _first(before: pd.DataFrame, cases: list[str], ranking_by: str) -> str:
    """As " of 22.10 us": the figure of superseded records, as far as they give one."""
    medians = {line.case: line.record.get("median_us") for line in rows_of(before)}
    try:
        return f" of {ranking.metric(ranking_by, [medians[case] for case in cases]):.2f} us"
    except (KeyError, TypeError, ValueError):
        return ""


def _shown_run(ran: pd.DataFrame, base: str | None) -> str:
    """The run that a variant's row shows: its newest if that failed, else the base run, else its newest timed one."""
    newest = ran[ran.run_id == ran.run_id.iloc[-1]].drop_duplicates(["kind", "case"], keep="last")
    if (newest.status != "PASSED").any():
        return newest.run_id.iloc[-1]
    if base is not None and (ran.run_id == base).any():
        return base
    timed = ran[ran.kind == "benchmark"]
    return (timed if len(timed) else ran).run_id.iloc[-1]


def _state(run: pd.DataFrame, times: list[dict], lines: pd.DataFrame) -> tuple[str, str]:
    """-> (status, reason) of a row: the run's first failed line, a later compile error, a bad or a missing time."""
    failed = run[run.status != "PASSED"]
    if len(failed):
        first = failed.iloc[0]
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        reason = _text(first.record.get("reason")) or "no reason given"
        where = f"{first.kind} {first.case}" if first.case else "all cases"  # a verdict on the whole submission
        return first.status, f"{where}{more}: {reason}"
    compiled = lines[(lines.kind == "compile") & (lines.newest >= run.newest.iloc[-1])]
    if len(compiled) and compiled.status.iloc[-1] not in ("COMPILED", "UNSUPPORTED"):
        return compiled.status.iloc[-1], _text(compiled.record.iloc[-1].get("reason"))
    bad = [time for time in times if time["status"] not in ("PASSED", "UNSUPPORTED")]  # a gap; a failure is above
    for time in bad:
        if time["status"] != "MISSING":
            return time["status"], f"{time['case']}: {time['reason']}"
    if len(bad) and len(bad) == len(times):
        return "MISSING", "tested, not timed" if (run.kind == "test").any() else "not timed"
    return ("MISSING", f"not timed: {'; '.join(time['case'] for time in bad)}") if bad else ("PASSED", "")


def _time(variant: str, case: str, record: dict | None, run_id: str, base: bool, baseline: bool) -> dict:
    """One variant's time in one case. A time that is no positive finite number is INVALID_MEASUREMENT, whatever the
    record says; a case without a record is MISSING."""
    time: dict[str, Any] = dict.fromkeys(TIMES, math.nan) | {"variant": variant, "case": case, "run_id": run_id}
    time |= {"base": base, "baseline": baseline, "status": "MISSING", "reason": "no record", "roofline_kind": ""}
    if record is None:
        return time
    time |= {"status": record["status"], "reason": _text(record.get("reason"))}
    numbers = ("n", "roofline_us", "bytes", "flops", "empty_call_us", "host_us", "setup_us")
    time |= {key: _number(record.get(key)) for key in numbers} | {"roofline_kind": _text(record.get("roofline_kind"))}
    error = record.get("error") or {}
    time |= {to: _number(error.get(key)) for to, key in zip(TIMES[-3:], ("rel", "max", "tol"), strict=True)}
    if time["status"] != "PASSED":
        return time
    median = _number(record.get("median_us"))
    if not (math.isfinite(median) and median > 0):
        return time | {"status": "INVALID_MEASUREMENT", "reason": f"median_us is no time: {record.get('median_us')!r}"}
    lo, hi = (_number(bound) for bound in record.get("ci95_us") or (math.nan, math.nan))
    return time | {"median_us": median, "lo_us": lo, "hi_us": hi, "roofline_share": time["roofline_us"] / median}


def _against_peers(standing: pd.DataFrame, times: pd.DataFrame) -> None:
    """Fill baseline_ratio for the base run: in times, by case, the fastest baseline's time / this time; in standing the
    geomean of these, over the baseline_cases that a baseline serves, of variants that have a time in every case.
    """
    standing["base"], times["base"] = standing["base"].astype(bool), times["base"].astype(bool)
    right = set(standing.loc[standing.base & (standing.status == "PASSED"), "variant"])
    baselines = times[times.base & times.baseline & times.variant.isin(right)].groupby("case")["median_us"].min()
    times["baseline_ratio"] = (times.case.map(baselines).astype(float) / times.median_us).where(times.base)
    logs = times.baseline_ratio[times.base].astype(float).map(math.log).groupby(times.variant)
    whole = standing.base & standing.geomean_us.notna()
    standing["baseline_ratio"] = standing.variant.map(logs.mean().map(math.exp)).astype(float).where(whole)
    standing["baseline_cases"] = standing.variant.map(logs.count()).fillna(0).astype(int).where(whole, 0)


def _ranked(standing: pd.DataFrame, promoted: list[str], apart: list[str]) -> pd.DataFrame:
    """`standing` in the board's order, with ranks (Int64, NA where unranked).

    promoted: who took the lead after the base run, the last being first now; apart: whom another clock timed.
    """
    passed = (standing.status == "PASSED") & standing.geomean_us.notna()
    ahead = passed & standing.variant.isin(promoted)
    eligible = passed & standing.base & ~standing.baseline.astype(bool) & standing.lo_us.notna() & ~ahead
    eligible &= ~standing.variant.isin(apart)
    section = pd.Series(3, index=standing.index)  # failures and gaps
    section[standing.status.isin(UNRUN)] = 4
    section[passed] = 2
    section[passed & standing.base & standing.baseline] = 1
    section[eligible] = 0
    for place, name in enumerate(promoted, 1):
        section[ahead & (standing.variant == name)] = -place
    order = standing.assign(section=section).sort_values(["section", "geomean_us", "variant"])
    first, chosen = order[order.section < 0], order[order.section == 0]
    order["rank"] = pd.Series(pd.NA, index=order.index, dtype="Int64")
    order.loc[first.index, "rank"] = range(1, len(first) + 1)
    behind = [len(first) + rank for rank in ranks(list(zip(chosen.lo_us, chosen.hi_us, strict=True)))]
    order.loc[chosen.index, "rank"] = behind
    return order.drop(columns="section").reset_index(drop=True)


def _pairs(timed: pd.DataFrame) -> pd.DataFrame:
    """The newest paired run of each (variant, other)."""
    rows = []
    for line in rows_of(timed[timed.paired & (timed.status == "PASSED")]):
        against = line.record["against"]
        lo, hi = (_number(bound) for bound in against.get("ci95") or (math.nan, math.nan))
        # Records of before there was a word are read by their 95 % interval. Before there was UNDECIDED, SAME was said
        # where neither of the others was.
        word = _text(against.get("word")) or ("FASTER" if hi < 1 else "SLOWER" if lo > 1 else "SAME")
        within = _number(against.get("same_within") or stats.SAME_WITHIN)
        if word == "SAME" and not 1 - within <= lo <= hi <= 1 + within:
            word = "UNDECIDED"
        row = (line.variant, _text(against.get("variant")), line.case, _number(against.get("ratio")), lo, hi, word)
        rows.append(dict(zip(PAIRS, (*row, line.run_id), strict=True)))
    pairs = pd.DataFrame(rows, columns=PAIRS)
    newest = pairs.groupby(["variant", "against"])["run_id"].transform("last")
    return pairs[pairs.run_id == newest].drop_duplicates(PAIRS[:3], keep="last").reset_index(drop=True)


def _by_target(record: dict) -> list[dict]:
    """A compile record as one record for each target that it holds machine code for; any other record as it is."""
    named = {item.get("target") or record["target"] for item in record.get("resources") or []}
    if record["kind"] != "compile" or named <= {record["target"]}:
        return [record]
    if record["status"] != "COMPILED":
        named.add(record["target"])  # the target that failed has left nothing
    its = {name: [] for name in sorted(named)}
    for item in record["resources"]:
        its[item.get("target") or record["target"]].append(item)
    return [record | {"target": name, "resources": resources} for name, resources in its.items()]


def _resources(lines: pd.DataFrame) -> dict:
    """Most registers of a kernel, bytes spilled by all, and the kernels' number, from the newest compile record."""
    compiled = lines[(lines.kind == "compile") & (lines.status == "COMPILED")]
    listed = (compiled.record.iloc[-1].get("resources") or []) if len(compiled) else []
    if not listed:
        return {"registers": math.nan, "spill_bytes": math.nan, "kernels": 0}
    numbers = pd.DataFrame([{key: _number(item.get(key)) for key in ("registers", "spill_bytes")} for item in listed])
    spilled = numbers.spill_bytes.sum(min_count=1)  # NaN, not 0, where no kernel says
    return {"registers": numbers.registers.max(), "spill_bytes": spilled, "kernels": len(listed)}


def _facts(lines: pd.DataFrame) -> dict:
    """run_id, first time, commit, dirty, environment and clock of the newest run among `lines`."""
    run = lines[lines.run_id == lines.run_id.iloc[-1]]
    record = run.record.iloc[-1]
    facts = {"run_id": record["run_id"], "time": run.time.min().strftime("%Y-%m-%d %H:%M:%S UTC")}
    facts |= {"commit": _text(record.get("commit")), "dirty": any(one.get("dirty") for one in run.record)}
    return facts | {"environment": _environment(record), "clock": record.get("clock") or {}}


def _environment(record: dict) -> dict:
    return record.get("environment") or {}


def _number(value: object) -> float:
    """A float; NaN for what is no number."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _span(values: list[float]) -> str:
    lo, hi = f"{min(values):.0f}", f"{max(values):.0f}"
    return lo if lo == hi else f"{lo} to {hi}"
