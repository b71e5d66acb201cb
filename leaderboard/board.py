"""From records to ranked tables. Pure: reads no file, imports no problem, prints nothing.

A board is one (machine, problem, target), with a base run and a clock (`harness/results/ranking.py`). A variant that is
not in the base run is shown from its own newest run and not ranked, unless it took the lead by the pairs of its
confirmation. Each variant with any record has a row, and a row without a rank says why.

A variant's state is that of its newest run: if that failed, in any test or benchmark case, so does its row, whatever an
older run said. A run in which it was UNSUPPORTED throughout is about the machine, so it counts only for a variant that
has neither run nor been compiled. Single UNSUPPORTED cases of a baseline (its ONLY) are gaps: it has no geomean without
all benchmark cases, and measures the others in the cases that it has. "NAME#2", the second side of a variant paired
with itself, is not a separate variant.
"""

import datetime
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from harness.results import ranking, stats, text
from harness.results.ranking import JUDGED, case_label, ranks
from leaderboard import provenance
from leaderboard.provenance import Provenance

OTHER_RUN = "not ranked: timed in a separate run; rank it with --all"
KINDS = ("test", "benchmark", "compile", "model")
UNRUN = ("COMPILED", "MODEL_CHECKED")  # states of what no machine with this target has run
STANDING = [
    *("rank", "variant", "baseline", "geomean_us", "lo_us", "hi_us", "roofline_share", "baseline_ratio"),
    *("baseline_cases", "done", "wanted"),
    *("status", "source", "reason", "notes", "run_id", "base", "attempts", "bits", "registers", "spill_bytes"),
]
NUMBERS = ("n", "roofline_us", "bytes", "flops", "empty_call_us", "host_us", "setup_us")  # of a benchmark record
ERRORS = {"rel_error": "rel", "max_error": "max", "tolerance": "tol"}  # by column, of its error
TIMES = [
    *("variant", "case", "baseline", "run_id", "base", "status", "reason", "median_us", "lo_us", "hi_us"),
    *("roofline_kind", "roofline_share", "baseline_ratio", *NUMBERS, *ERRORS),
]
PAIRS = ["variant", "against", "case", "ratio", "lo", "hi", "word", "run_id"]


@dataclass(frozen=True)
class Board:
    """What was measured for one target of one problem on one machine.

    standing  one row per variant, columns STANDING: ranked, baselines, other runs, failures, compiled; fastest first;
              source: a state of leaderboard/provenance.py; bits: what equal bits were found whatever it is
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


def rows_of(table: pd.DataFrame) -> Iterator[Any]:
    """Return the rows of a table, with its columns as attributes."""
    return iter(table.itertuples())


def build(
    records: Iterable[dict],
    machine: str,
    expected: Mapping[tuple[str, str], list[dict]],
    known: Provenance | None = None,
    brief: bool = False,
) -> list[Board]:
    """The boards of one machine, sorted by problem and target.

    records: as harness/results/record.py reads them; those of kind latency are in leaderboard/model_board.py's tables.
    expected: for (problem, target) the cases that a complete variant must have; where absent, those of the base run.
    known: what the records of all machines say of variants and sources; by default, what these say.
    brief: only who leads, and how fast: without sources and intervals, which take longer than all else.
    """
    records = list(records)
    known = None if brief else known or Provenance(records)
    boards: dict[tuple[str, str], list[dict]] = {}
    for entry in _by_run(split for record in records if record["kind"] in KINDS for split in _by_target(record)):
        boards.setdefault((entry["problem"], entry["target"]), []).append(entry)
    return [_board(its, machine, key, expected.get(key), known) for key, its in sorted(boards.items())]


def _board(
    records: list[dict], machine: str, key: tuple[str, str], expected: list[dict] | None, known: Provenance | None
) -> Board:
    counted = [record for record in records if not record.get("superseded")]
    superseded = {(record["variant"], record["run_id"]) for record in records if record.get("superseded")}
    wanted = None if expected is None else [case_label(case) for case in expected]
    base = ranking.base_run(counted, wanted)
    of_base = [record for record in ranking.timed(counted) if record["run_id"] == base]
    of_base_cases = list(dict.fromkeys(case_label(record["case"]) for record in of_base))
    cases = of_base_cases if wanted is None else wanted
    ranking_by = (of_base[-1].get("ranking_by") if of_base else None) or "geom"
    later = counted[[record["run_id"] for record in counted].index(base) :] if base else []
    confirmed = any(record.get("confirms") and record["run_id"] != base for record in later)
    chain = ranking.leaders(counted, cases, ranking_by) if confirmed else []
    promoted = {leader.variant: leader for leader in chain if leader.over}
    clock = ranking.board_clock(of_base)
    by_variant: dict[str, list[dict]] = {}
    for record in counted:
        if not ranking.is_repeat(record["variant"]):
            by_variant.setdefault(record["variant"], []).append(record)
    rows, times, other_clock = [], [], set[tuple[str, str]]()
    for variant, its in by_variant.items():
        row, its_times, shown = _row(its, base, cases, ranking_by, promoted.get(variant), known)
        row["attempts"] = ranking.attempt(records, variant)
        row["source"] = provenance.worst(map(known.state, shown)) if known else ""
        if (variant, row["run_id"]) in superseded:
            row["notes"].append("timed twice, the second time to confirm it; only that counts")
        others = [record for record in shown if record["kind"] == "benchmark" and ranking.clock(record) != clock]
        by, other_clock = (
            set(map(ranking.clock, others)),
            other_clock | {(variant, case_label(record["case"])) for record in others},
        )
        if by and row["base"]:
            row["notes"].append(f"not ranked, timed by another clock: {', '.join(sorted(by))}")
        row["place"] = _place(row, list(promoted), apart=bool(by))
        rows.append(row)
        times += its_times
    notes = []
    if strange := [case for case in of_base_cases if case not in cases]:
        notes.append(f"timed in run {base}, but no case of this board: {'; '.join(strange)}")
    if len({json.dumps(record.get("environment"), sort_keys=True) for record in of_base}) > 1:
        notes.append(f"the environment changed within run {base}")
    rows.sort(key=lambda row: (*row["place"], row["variant"]))
    ahead, field = [row for row in rows if row["place"][0] < 0], [row for row in rows if row["place"][0] == 0]
    behind = [len(ahead) + rank for rank in ranks([(row["lo_us"], row["hi_us"]) for row in field])]
    for row, rank in zip([*ahead, *field], [*range(1, len(ahead) + 1), *behind], strict=True):
        row["rank"] = rank
    standing, table = pd.DataFrame(rows, columns=STANDING), pd.DataFrame(times, columns=TIMES)
    standing["rank"] = standing["rank"].astype("Int64")
    _against_baselines(standing, table, other_clock)
    order = {name: place for place, name in enumerate(standing.variant)}
    table = table.sort_values("variant", key=lambda names: names.map(order), kind="stable", ignore_index=True)
    ran = [record for record in counted if record["kind"] in JUDGED and record["status"] != "UNSUPPORTED"]
    run, metric = _facts(of_base or ran or counted or records), ranking.name(ranking_by)
    return Board(machine, *key, cases, run, bool(ran), metric, standing, table, _pairs(records), notes)


def _row(
    records: list[dict],
    base: str | None,
    cases: list[str],
    ranking_by: str,
    lead: ranking.Leader | None,
    known: Provenance | None,
) -> tuple[dict, list[dict], list[dict]]:
    """-> (row of standing, rows of times, records that they show) of the variant that all records are of. The caller
    fills in rank, attempts, source and baseline_ratio. lead: how it took the lead after the base run, if it did.
    """
    row: dict[str, Any] = dict.fromkeys(STANDING) | {"variant": records[0]["variant"], "done": 0, "wanted": len(cases)}
    row |= {
        "baseline": any(record.get("baseline") for record in records),
        "base": False,
        "reason": "",
        "notes": [],
        "bits": "",
    }
    row |= dict.fromkeys(("geomean_us", "lo_us", "hi_us", "roofline_share"), math.nan) | _resources(records)
    ran = [record for record in records if record["kind"] in JUDGED]
    about_it = {record["run_id"] for record in ran if record["status"] != "UNSUPPORTED"}
    ran = [record for record in ran if record["run_id"] in about_it]
    if not ran:
        last = ([record for record in records if record["kind"] == "compile"] or records)[-1]
        row |= {"status": last["status"], "run_id": last["run_id"], "reason": last.get("reason") or ""}
        if known and (last["status"] in UNRUN or last["kind"] == "model"):
            row["status"], row["reason"], note = known.modelled(last)
            row["notes"] += [note] * bool(note)
        return row, [], [last]
    # Single cases that a submission does not serve (ONLY) are gaps, no failures. Of the benchmarks only a baseline may.
    may = JUDGED if row["baseline"] else ("test",)
    gaps = [record for record in ran if record["status"] == "UNSUPPORTED" and record["case"] and record["kind"] in may]
    ran = [record for record in ran if record not in gaps]
    run_id = _shown_run(ran, lead.run_id if lead else base)
    run = list(_last(record for record in ran if record["run_id"] == run_id).values())
    row |= {"run_id": run_id, "base": run_id == base}
    if lead and lead.ratio:
        ratio, lo, hi = lead.ratio
        row["notes"].append(f"leads by its pairs with {lead.over}: {ratio:.4f} ({lo:.4f} to {hi:.4f}) of its time")
    elif not row["base"] and base is not None:
        row["notes"].append(OTHER_RUN)
    newer = ran[-1]
    if newer["run_id"] != run_id:
        of = " of another source" if run[-1].get("source_hash") != newer.get("source_hash") else ""
        row["notes"].append(f"also in a newer run{of}, not comparable, {newer['run_id']}: {newer['status']}")
    gaps = [record for record in gaps if record["run_id"] == run_id]
    bench = {case_label(record["case"]): record for record in [*gaps, *run] if record["kind"] == "benchmark"}
    times = [_time(row, case, bench.get(case)) for case in cases]
    done = [time for time in times if time["status"] == "PASSED"]
    row["status"], row["reason"] = _state(run, times, records)
    row["notes"] += dict.fromkeys(record.get("reason") or "" for record in gaps)
    for bits in (record["bits"] for record in run if record.get("bits")):
        row["bits"] = ", ".join(kind for kind in ("call", "batch") if bits.get(kind) is True) or "-"
    row["done"] = len(done)
    if row["status"] == "PASSED" and done and len(done) == len(cases):
        row["geomean_us"] = ranking.metric(ranking_by, [time["median_us"] for time in done])
        if all(time["roofline_share"] > 0 for time in done):
            row["roofline_share"] = stats.geomean([time["roofline_share"] for time in done])
        try:
            samples = [bench[case].get("samples_us") or [] for case in cases]
            if known:
                row["lo_us"], row["hi_us"] = ranking.interval(ranking_by, samples)
            else:  # what is no time is found out
                means = [stats.geomean([stats.geomean(group) for group in groups]) for groups in samples]
                row["lo_us"] = row["hi_us"] = stats.geomean(means)
        except (TypeError, ValueError) as error:
            row["notes"].append(f"no interval, hence no rank: samples_us: {error}")
    if setup := sorted(time["setup_us"] for time in done if time["setup_us"] > 0):
        span = " to ".join(dict.fromkeys(text.us(us) for us in (setup[0], setup[-1])))
        row["notes"].append(f"its set-up of {span} us a call is not in the time")
    row["notes"] += provenance.warnings([record for record in run if record["kind"] == "benchmark"])
    return row, times, run


def _place(row: dict, promoted: list[str], apart: bool) -> tuple[int, float]:
    """By what a row is sorted: below 0 who took the lead, 0 the field, then baselines, other times, failures, compiled.

    promoted: who took the lead after the base run, the last being first now; apart: another clock timed it.
    """
    us = math.inf if math.isnan(row["geomean_us"]) else row["geomean_us"]
    if row["status"] != "PASSED" or us == math.inf:
        return (4 if row["status"] in UNRUN else 3), us
    if row["variant"] in promoted:
        return -1 - promoted.index(row["variant"]), us
    if row["base"] and row["baseline"]:
        return 1, us
    return (0 if row["base"] and not apart and not math.isnan(row["lo_us"]) else 2), us


def _last(records: Iterable[dict]) -> dict[tuple[str, str], dict]:
    """By kind and case the last record: an attempt replaces the one before."""
    return {(record["kind"], case_label(record["case"])): record for record in records}


def _shown_run(ran: list[dict], base: str | None) -> str:
    """The run that a variant's row shows: its newest if that failed, else the base run, else its newest timed one."""
    newest = ran[-1]["run_id"]
    if any(rec["status"] != "PASSED" for rec in _last(rec for rec in ran if rec["run_id"] == newest).values()):
        return newest
    if base is not None and any(record["run_id"] == base for record in ran):
        return base
    return ([record for record in ran if record["kind"] == "benchmark"] or ran)[-1]["run_id"]


def _state(run: list[dict], times: list[dict], records: list[dict]) -> tuple[str, str]:
    """-> (status, reason) of a row: the run's first failed line, a later compile error, a bad or a missing time."""
    if failed := [record for record in run if record["status"] != "PASSED"]:
        first = failed[0]
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        where = f"{first['kind']} {case_label(first['case'])}" if first["case"] else "all cases"
        return first["status"], f"{where}{more}: {first.get('reason') or 'no reason given'}"
    since = next(place for place, record in enumerate(records) if record["run_id"] == run[0]["run_id"])
    compiled = [record for record in records[since:] if record["kind"] == "compile"]
    if compiled and compiled[-1]["status"] not in ("COMPILED", "UNSUPPORTED"):
        return compiled[-1]["status"], compiled[-1].get("reason") or ""
    bad = [time for time in times if time["status"] not in ("PASSED", "UNSUPPORTED")]  # a gap; a failure is above
    for time in bad:
        if time["status"] != "MISSING":
            return time["status"], f"{time['case']}: {time['reason']}"
    if bad and len(bad) == len(times):
        return "MISSING", "tested, not timed" if any(record["kind"] == "test" for record in run) else "not timed"
    return ("MISSING", f"not timed: {'; '.join(time['case'] for time in bad)}") if bad else ("PASSED", "")


def _time(row: dict, case: str, record: dict | None) -> dict:
    """A row's time in one case: INVALID_MEASUREMENT if no positive finite number; without a record MISSING."""
    time: dict[str, Any] = dict.fromkeys(TIMES, math.nan) | {"case": case, "roofline_kind": ""}
    time |= {key: row[key] for key in ("variant", "run_id", "base", "baseline")}
    if record is None:
        return time | {"status": "MISSING", "reason": "no record"}
    time |= {"status": record["status"], "reason": record.get("reason") or ""}
    time |= {key: number(record.get(key)) for key in NUMBERS} | {"roofline_kind": record.get("roofline_kind") or ""}
    time |= {to: number((record.get("error") or {}).get(key)) for to, key in ERRORS.items()}
    if time["status"] != "PASSED":
        return time
    median = number(record.get("median_us"))
    if not (math.isfinite(median) and median > 0):
        return time | {"status": "INVALID_MEASUREMENT", "reason": f"median_us is no time: {record.get('median_us')!r}"}
    lo, hi = map(number, record.get("ci95_us") or (None, None))
    return time | {"median_us": median, "lo_us": lo, "hi_us": hi, "roofline_share": time["roofline_us"] / median}


def _against_baselines(standing: pd.DataFrame, times: pd.DataFrame, other_clock: set[tuple[str, str]]) -> None:
    """Fill baseline_ratio for the base run: in times, by case, the fastest baseline's time / this time; in standing the
    geomean of these, over the baseline_cases that a baseline serves, of variants that have a time in every case. Times
    of baselines count that the board's clock took: not those of (variant, case) in other_clock. Where a baseline of the
    run failed, none counts: it may be the fastest.
    """
    standing["base"], times["base"] = standing["base"].astype(bool), times["base"].astype(bool)
    failed = (standing.base & standing.baseline & ~standing.status.isin(["PASSED", *UNRUN])).any()
    right = standing.loc[standing.base & (standing.status == "PASSED") & (not failed), "variant"]
    same_clock = ~pd.MultiIndex.from_frame(times[["variant", "case"]]).isin(other_clock)
    counted = times[times.base & times.baseline & times.variant.isin(right) & same_clock]
    baselines = counted.groupby("case")["median_us"].min()
    times["baseline_ratio"] = (times.case.map(baselines).astype(float) / times.median_us).where(times.base)
    logs = times.baseline_ratio[times.base].astype(float).map(math.log).groupby(times.variant)
    whole = standing.base & standing.geomean_us.notna()
    standing["baseline_ratio"] = standing.variant.map(logs.mean().map(math.exp)).astype(float).where(whole)
    standing["baseline_cases"] = standing.variant.map(logs.count()).fillna(0).astype(int).where(whole, 0)


def _pairs(records: list[dict]) -> pd.DataFrame:
    """The newest paired run of each (variant, other)."""
    rows = []
    for rec in records:
        if rec["kind"] == "benchmark" and rec["status"] == "PASSED" and (against := rec.get("against")):
            lo, hi = map(number, against.get("ci95") or (None, None))
            # Old records have no word: their 95 % interval says it.
            same = "SAME" if 1 - stats.SAME_WITHIN <= lo <= hi <= 1 + stats.SAME_WITHIN else "UNDECIDED"
            word = against.get("word") or ("FASTER" if hi < 1 else "SLOWER" if lo > 1 else same)
            row = (rec["variant"], str(against.get("variant")), case_label(rec["case"]), number(against.get("ratio")))
            rows.append((*row, lo, hi, word, rec["run_id"]))
    pairs = pd.DataFrame(rows, columns=PAIRS)
    newest = pairs.groupby(["variant", "against"])["run_id"].transform("last")
    return pairs[pairs.run_id == newest].drop_duplicates(PAIRS[:3], keep="last").reset_index(drop=True)


def _by_target(record: dict) -> list[dict]:
    """A compile record as one record for each target that it holds machine code for; any other record as it is."""
    by_target: dict[str, list[dict]] = {}
    for item in record.get("resources") or []:
        by_target.setdefault(item.get("target") or record["target"], []).append(item)
    if record["kind"] != "compile" or by_target.keys() <= {record["target"]}:
        return [record]
    if record["status"] != "COMPILED":
        by_target.setdefault(record["target"], [])  # the target that failed has left nothing
    return [record | {"target": name, "resources": resources} for name, resources in sorted(by_target.items())]


def _resources(records: list[dict]) -> dict[str, float]:
    """Most registers of a kernel, and bytes spilled by all, from the newest compile record; NaN where none says."""
    compiled = [record for record in records if record["kind"] == "compile" and record["status"] == "COMPILED"]
    listed = (compiled[-1].get("resources") or []) if compiled else []
    registers, spilled = ([item[key] for item in listed if item.get(key) is not None] for key in STANDING[-2:])
    return {"registers": max(registers, default=math.nan), "spill_bytes": sum(spilled) if spilled else math.nan}


def _facts(records: list[dict]) -> dict:
    """run_id, first time, commit, dirty, environment and clock of the newest run among the records."""
    last = records[-1]
    run = [record for record in records if record["run_id"] == last["run_id"]]
    facts = {"run_id": last["run_id"], "time": min(map(_time_of, run)).strftime("%Y-%m-%d %H:%M:%S UTC")}
    facts |= {"commit": str(last.get("commit") or ""), "dirty": any(record.get("dirty") for record in run)}
    return facts | {"environment": last.get("environment") or {}, "clock": last.get("clock") or {}}


def _time_of(record: dict) -> datetime.datetime:
    at = datetime.datetime.fromisoformat(record["time"])
    return at if at.tzinfo else at.replace(tzinfo=datetime.UTC)


def _by_run(records: Iterable[dict]) -> list[dict]:
    """Sorted by the time at which their runs ended; the order within a run is kept."""
    records = list(records)
    ended = {record["run_id"]: _time_of(record) for record in sorted(records, key=_time_of)}
    return sorted(records, key=lambda record: (ended[record["run_id"]], record["run_id"]))


def number(value: object) -> float:
    """A float; NaN for what is no number."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
