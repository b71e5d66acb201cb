"""Tables of the page: columns, and lines of cells with the value by which they sort. Text is escaped where it is shown.

`slug` makes a name a part of an address and of a file's name, whatever characters it has.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from harness.results import ranking, text
from leaderboard import latency, quality, tables, trend
from leaderboard.board import UNRUN, Board, rows_of
from leaderboard.checks import Check
from leaderboard.provenance import Provenance

LONGEST = 120  # characters of a slug; file systems take 255 bytes
REASON = 400  # characters of a reason in a table


@dataclass(frozen=True)
class Cell:
    """A text; sort: what it sorts by, if not its text; share: of a bar below it, 0 to 1; code: set as code."""

    said: str
    sort: float | str | None = None
    href: str = ""
    share: float = math.nan
    code: bool = False


@dataclass(frozen=True)
class Line:
    """anchor: its id on the page; kind: of the style sheet, "first", "baseline" or "failed"."""

    anchor: str
    cells: Sequence[Cell]
    kind: str = ""


@dataclass(frozen=True)
class Grid:
    """A table. key: its id; numbers: the columns that are numbers; caption: what it is, also for a screen reader."""

    key: str
    caption: str
    columns: Sequence[str]
    lines: Sequence[Line]
    numbers: frozenset[str] = frozenset()


def slug(name: str) -> str:
    """Letters, digits, dot, dash and underscore as they are, others as ~ and their number. Different for different
    names. A long one ends in a digest.
    """
    said = re.sub(r"[^A-Za-z0-9._-]", lambda found: f"~{ord(found[0]):x}~", name)
    said = f"~{said}" if said.startswith(".") else said
    return said if len(said) <= LONGEST else f"{said[:80]}~{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def key_of(board: Board) -> str:
    """The id of a board on a page."""
    return slug(f"{board.problem}-{board.target}-{board.machine}")


def number(value: float, said: str) -> Cell:
    return Cell(said, value if math.isfinite(value) else None)


def us(value: float) -> Cell:
    return number(value, tables.us(value))


def percent(value: float) -> Cell:
    return Cell(tables.percent(value), value if math.isfinite(value) else None, share=min(value, 1.0))


STANDING = (
    "rank",
    "variant",
    "time, us",
    "95 % interval",
    "% of roofline",
    "x baseline",
    "coverage",
    "error / tolerance",
    "attempts",
    "source",
    "state",
)


def standing(board: Board, key: str, href: Callable[[str], str]) -> Grid:
    """A line for each variant. href: the address of a variant's page."""
    numbers = frozenset({"rank", "time, us", "% of roofline", "x baseline", "coverage", "attempts"})
    ties = board.standing["rank"].value_counts()
    lines = []
    for place, one in enumerate(rows_of(board.standing)):
        cells = [
            _rank(one, ties, place),
            Cell(text.line(one.variant), href=href(one.variant), code=True),
            us(one.geomean_us),
            Cell(_interval(one.lo_us, one.hi_us), one.lo_us if math.isfinite(one.lo_us) else None),
            percent(one.roofline_share),
            number(one.baseline_ratio, tables.times_baseline(one)),
            Cell(f"{one.done}/{one.wanted} cases" if one.wanted else "", one.done / max(1, one.wanted)),
            Cell(tables.worst_error(board.times, one)),
            Cell(str(one.attempts or ""), one.attempts or None),
            Cell(one.source),
            Cell(_state(one)),
        ]
        lines.append(Line(f"{key}-{slug(one.variant)}", cells, _kind(one)))
    return Grid(
        key,
        f"{tables.title(board)}: {board.metric} over {text.counted(len(board.cases), 'case')}",
        STANDING,
        lines,
        numbers,
    )


def _rank(one: Any, ties: pd.Series, place: int) -> Cell:
    if pd.isna(one.rank):
        return Cell("baseline" if one.baseline else "not ranked", 1e6 + place)
    tie = ties.get(one.rank, 1) > 1
    return Cell(f"{one.rank} (tie)" if tie else str(one.rank), float(place))


def _kind(one: Any) -> str:
    if one.baseline:
        return "baseline"
    if one.status not in ("PASSED", *UNRUN):
        return "failed"
    return "first" if not pd.isna(one.rank) and one.rank == 1 else ""


def _state(one: Any) -> str:
    quiet = one.status in ("PASSED", *UNRUN)
    reason = " ".join(text.line(one.reason, REASON).split())
    said = [] if quiet else [": ".join(filter(None, [one.status, reason]))]
    return "; ".join([*said, *map(text.line, one.notes)]) or "ok"


def _interval(lo: float, hi: float) -> str:
    return f"{tables.us(lo)} to {tables.us(hi)}" if math.isfinite(lo) else ""


def by_case(board: Board, key: str) -> tuple[Grid, str]:
    """A line for each case: the time of each variant of the base run, the roofline and the empty call. -> also what all
    cases have in common.
    """
    own, shared = ranking.apart(board.cases) if board.cases else ({}, "")
    of_base = board.times[board.times.base]
    timed = set(of_base[of_base.median_us.notna()].variant)
    variants = [name for name in board.standing.variant if name in timed]
    cells = {(one.variant, one.case): one for one in rows_of(of_base)}
    lines = []
    for case in board.cases:
        its = of_base[of_base.case == case]
        of_case = [Cell(own[case], code=True), *(_time(cells.get((name, case))) for name in variants)]
        of_case += [us(float(its.roofline_us.median())), us(float(its.empty_call_us.median()))]
        lines.append(Line(f"{key}-{slug(case)}", of_case))
    names = [text.line(name) for name in variants]
    columns = ["case", *names, "measured roofline", "empty call"]
    return Grid(
        key, "Times by case, us, with the share of the roofline", columns, lines, frozenset(columns[1:])
    ), shared


def _time(one: Any) -> Cell:
    if one is None or one.status == "MISSING":
        return Cell("not timed")
    if one.status != "PASSED":
        return Cell(one.status)
    share = f" ({tables.percent(one.roofline_share)})" if one.roofline_share > 0 else ""
    return Cell(tables.us(one.median_us) + share, one.median_us)


def pairs(board: Board, key: str) -> Grid:
    """The newest paired run of each two variants, by case."""
    columns = ("variant", "against", "case", "time ratio", "95 % interval", "verdict", "run")
    lines = []
    for place, one in enumerate(rows_of(board.pairs)):
        cells = [Cell(text.line(one.variant), code=True), Cell(text.line(one.against), code=True)]
        cells += [Cell(one.case, code=True), number(one.ratio, f"{one.ratio:.4f}")]
        cells += [Cell(f"{one.lo:.4f} to {one.hi:.4f}", one.lo), Cell(one.word), Cell(one.run_id)]
        lines.append(Line(f"{key}-{place}", cells))
    said = "Interleaved pairs: time of the variant / time of the other; below 1 the variant is faster"
    return Grid(key, said, columns, lines, frozenset({"time ratio"}))


def milestones(broken: Sequence[trend.Timing], key: str, href: Callable[[str], str]) -> Grid:
    """Who was the fastest so far, from the first correct version on."""
    lines = [
        Line(
            f"{key}-{place}",
            [
                Cell(one.time[:16].replace("T", " ")),
                Cell(one.commit, code=True),
                Cell(text.line(one.variant), href=href(one.variant), code=True),
                us(one.us),
                number(ratio := broken[0].us / one.us, f"{ratio:.2f}x"),
                Cell(one.run_id),
            ],
        )
        for place, one in enumerate(broken)
    ]
    columns = ("time", "commit", "variant", "time, us", "speed-up", "run")
    return Grid(key, "The fastest so far", columns, lines, frozenset({"time, us", "speed-up"}))


def cases_of(found: Iterable[dict], key: str) -> Grid:
    """A line for each test and benchmark record of a variant."""
    columns = (
        "case",
        "kind",
        "verdict",
        "time, us",
        "95 % interval",
        "% of roofline",
        "samples",
        "error / tolerance",
        "reason",
    )
    lines = []
    for place, one in enumerate(found):
        median, (lo, hi) = latency.number(one.get("median_us")), one.get("ci95_us") or (math.nan, math.nan)
        roofline, error = latency.number(one.get("roofline_us")), one.get("error") or {}
        cells = [
            Cell(ranking.case_label(one["case"]) or "all cases", code=True),
            Cell(one["kind"]),
            Cell(one["status"]),
            us(median),
            Cell(_interval(lo, hi), lo if math.isfinite(lo) else None),
            percent(roofline / median if median > 0 else math.nan),
            number(latency.number(one.get("n")), str(one.get("n") or "")),
            Cell(_error(error, bool(one.get("baseline")))),
            Cell(text.line(one.get("reason") or "", REASON)),
        ]
        lines.append(Line(f"{key}-{place}", cells, "" if one["status"] in ("PASSED", *UNRUN) else "failed"))
    return Grid(key, "All cases of the run", columns, lines, frozenset({"time, us", "% of roofline", "samples"}))


def _error(error: dict, baseline: bool) -> str:
    found, allowed = error.get("rel" if baseline else "max"), error.get("tol")
    if not isinstance(found, int | float) or not isinstance(allowed, int | float):
        return ""
    return f"{found:.1e} / {allowed:.1e}"


def steps(records: Sequence[dict], known: Provenance, key: str) -> Grid:
    """A line for each case of a model's decode step. us a token: of a sequence, in a batch all get one at once."""
    names = list(dict.fromkeys(name for one in records for name in one["case"] or {}))
    columns = (
        *names,
        "eager, us",
        "graph, us",
        "us a token",
        "tokens a second",
        "speed of light, us",
        "% of speed of light",
        "launches",
        "bytes",
        "source",
        "state",
    )
    lines = []
    for place, one in enumerate(records):
        case, graph = one["case"] or {}, latency.graph_us(one)
        batch = case.get("batch")
        each = graph / batch if isinstance(batch, int | float) and batch > 0 else math.nan
        launches, rate = latency.launches(one), latency.tokens_a_second(one)
        cells = [Cell(text.line(case.get(name, ""), 60), code=True) for name in names]
        cells += [us(latency.number(one.get("eager_us"))), us(graph), us(each)]
        cells += [number(rate, f"{rate:,.0f}" if rate > 0 else "")]
        cells += [us(latency.number(one.get("sol_us"))), percent(latency.share(one))]
        cells += [number(float(launches or math.nan), launches)]
        size = latency.number(one.get("bytes"))
        cells += [number(size, f"{size / 1e6:,.1f} MB" if math.isfinite(size) else "")]
        cells += [Cell(known.state(one)), Cell(latency.state(one, known))]
        lines.append(Line(f"{key}-{place}", cells, "" if one["status"] == "PASSED" else "failed"))
    numbers = frozenset({*columns} - {*names, "source", "state"} | {"batch", "context"})
    return Grid(key, "Time of a decode step", columns, lines, numbers)


def of_model(title: str, table: tables.Table, key: str) -> Grid:
    """A table of latency.py as it is, with its numbers to sort by."""
    header, rows = table
    values = [[_value(said) for said in row] for row in rows]
    lines = [
        Line(
            f"{key}-{place}", [Cell(said) if math.isnan(x) else number(x, said) for said, x in zip(*both, strict=True)]
        )
        for place, both in enumerate(zip(rows, values, strict=True))
    ]
    counted = frozenset(
        name for place, name in enumerate(header) if any(not math.isnan(of_row[place]) for of_row in values)
    )
    return Grid(key, title, tuple(header), lines, counted)


def _value(said: str) -> float:
    try:
        return float(said.removesuffix(" %").replace(",", ""))
    except ValueError:
        return math.nan


def ops(records: Sequence[dict], key: str) -> Grid:
    """What fills each op of a model, in each of its cases that differ."""
    filled: dict[str, dict[str, None]] = {}
    for one in records:
        for op, what in (one.get("kernels") or {}).items():
            filled.setdefault(op, {})[text.line(what or "", 80)] = None
    lines = [Line(f"{key}-{slug(op)}", [Cell(op, code=True), Cell(", ".join(found))]) for op, found in filled.items()]
    return Grid(key, "What fills each op", ("op", "filled by"), lines)


def op_times(check: Check, key: str) -> Grid:
    """The ops of a decode step, the longest first, and what is no op."""
    longest = sorted(check.ops_us.items(), key=lambda item: -item[1])
    found = [*longest, ("between the ops", check.step_us - sum(check.ops_us.values()))]
    lines = [
        Line(
            f"{key}-{slug(op)}",
            [
                Cell(text.line(op), code=True),
                us(spent),
                percent(spent / check.step_us),
                Cell(text.line(check.kernels.get(op, ""))),
            ],
        )
        for op, spent in found
    ]
    columns = ("op", "time, us", "share of the step", "filled by")
    return Grid(key, "Time of each op in a decode step", columns, lines, frozenset(columns[1:3]))


def layers(check: Check, key: str) -> Grid:
    """The error of each layer with its budget."""
    columns = ("after", "by itself", "its budget", "free pass", "budget of the pass", "cosine")
    lines = []
    for place, one in enumerate(check.layers):
        numbers = (one.alone, one.alone_budget, one.drift, one.drift_budget)
        cells = [number(latency.number(x), "not finite" if x is None else f"{x:.2e}") for x in numbers]
        cells.append(number(latency.number(one.cosine), "" if one.cosine is None else f"{one.cosine:.6f}"))
        lines.append(Line(f"{key}-{place}", [Cell(text.line(one.after), code=True), *cells]))
    return Grid(key, "Error by layer", columns, lines, frozenset(columns[1:]))


def comparisons(found: Iterable[quality.Comparison], key: str) -> Grid:
    columns = ("machine", "problem", "case", "slowed by", "time ratio", "95 % interval", "verdict", "processes", "when")
    lines = []
    for place, one in enumerate(found):
        cells = [Cell(one.machine), Cell(text.line(one.problem)), Cell(one.case, code=True)]
        cells += [Cell(one.planted or "nothing"), number(one.ratio, f"{one.ratio:.4f}")]
        cells += [Cell(f"{one.lo:.4f} to {one.hi:.4f}", one.lo), Cell(one.word)]
        cells += [Cell(one.processes or "not recorded", float(one.processes) if one.processes.isdigit() else None)]
        lines.append(Line(f"{key}-{place}", [*cells, Cell(one.time[:16].replace("T", " "))]))
    return Grid(key, "Every comparison", columns, lines, frozenset({"time ratio", "processes"}))


def plans(found: Iterable[quality.Comparison], key: str) -> Grid:
    """The verdicts by what was planted and by the number of processes."""
    words = ("SAME", "UNDECIDED", "FASTER", "SLOWER")
    columns = ("slowed by", "processes", "comparisons", *words)
    lines = []
    for place, ((planted, processes), of_plan) in enumerate(quality.by_plan(found).items()):
        cells = [Cell(planted or "nothing"), Cell(processes or "not recorded")]
        cells += [number(float(n), str(n)) for n in (sum(of_plan.values()), *(of_plan.get(word, 0) for word in words))]
        lines.append(Line(f"{key}-{place}", cells))
    return Grid(key, "Verdicts by number of processes", columns, lines, frozenset(columns[1:]))


def loops(found: Iterable[quality.Loop], key: str) -> Grid:
    columns = ("machine", "problem", "variant", "case", "judge, us", "plain loop, us", "judge / loop", "standard error")
    lines = []
    for place, one in enumerate(found):
        cells = [Cell(one.machine), Cell(one.problem), Cell(one.variant, code=True), Cell(one.case, code=True)]
        cells += [us(one.judge_us), us(one.loop_us), number(one.ratio, f"{one.ratio:.3f}")]
        lines.append(Line(f"{key}-{place}", [*cells, number(one.standard_error, f"{one.standard_error:.3f}")]))
    return Grid(key, "The judge's time against a plain loop", columns, lines, frozenset(columns[4:]))


def attacks(found: Iterable[quality.Attack], key: str) -> Grid:
    columns = ("attack", "honest calls", "outcome", "verdict", "time / honest time", "95 % interval", "what it does")
    lines = []
    for one in found:
        ratio = math.nan if one.ratio is None else one.ratio
        interval = "" if one.low is None or one.high is None else f"{one.low:.3f} to {one.high:.3f}"
        cells = [Cell(text.line(one.file), code=True), Cell(f"{one.form} of 4", one.form), Cell(one.outcome)]
        cells += [Cell(text.line(one.verdict)), number(ratio, f"{ratio:.3f}" if one.ratio is not None else "")]
        cells += [Cell(interval, one.low), Cell(text.line(quality.summary(one)))]
        kind = "failed" if one.outcome == "BELOW THE BOUND" else ""
        lines.append(Line(f"{key}-{slug(one.file)}-{one.form}", cells, kind))
    return Grid(key, "Attacks on the judge's clock", columns, lines, frozenset({"time / honest time"}))


def boards(found: Iterable[Board], href: Callable[[Board], str], key: str) -> Grid:
    """A line for each board: its first, and how many variants it has."""
    columns = (
        "machine",
        "problem",
        "target",
        "first",
        "time, us",
        "95 % interval",
        "% of roofline",
        "x baseline",
        "coverage",
        "variants",
        "source",
        "last run",
    )
    lines = []
    for board in found:
        one = next((one for one in rows_of(board.standing) if not pd.isna(one.rank)), None)
        tied = int((board.standing["rank"] == 1).sum())
        cells = [Cell(board.machine), Cell(text.line(board.problem), href=href(board), code=True), Cell(board.target)]
        if one is None:
            cells += [Cell("none is ranked" if board.timed else "compiled, not run"), *[Cell("")] * 5]
        else:
            more = f" and {tied - 1} more (tie)" if tied > 1 else ""
            cells += [Cell(text.line(one.variant) + more, code=True), us(one.geomean_us)]
            cells += [Cell(_interval(one.lo_us, one.hi_us), one.lo_us), percent(one.roofline_share)]
            cells += [number(one.baseline_ratio, tables.times_baseline(one))]
            cells += [Cell(f"{one.done}/{one.wanted} cases", one.done / max(1, one.wanted))]
        cells += [number(float(len(board.standing)), str(len(board.standing))), Cell(one.source if one else "")]
        lines.append(Line(f"{key}-{key_of(board)}", [*cells, Cell(board.run["time"])]))
    numbers = frozenset({"time, us", "% of roofline", "x baseline", "coverage", "variants"})
    return Grid(key, "The first of each board", columns, lines, numbers)
