"""A board as tables of text: for the terminal, Markdown and the page; and one long table for CSV.

What a submission has written, say a reason, is in the rows and lines as it is. It is made safe where it is rendered.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from harness.results import ranking, text
from leaderboard.board import UNRUN, Board, rows_of

WIDE = 6  # cases that stand in columns beside each other; more get a table of their own, a row each
REASON = 110  # characters of a reason that a table shows; the CSV has all of it
CSV = [
    *("machine", "problem", "target", "rank", "variant", "baseline", "case", "run_id", "base", "status", "source"),
    *("reason", "done", "wanted", "time_us", "lo_us", "hi_us", "n", "roofline_us", "roofline_kind", "roofline_share"),
    *("baseline_ratio", "bytes", "flops", "empty_call_us", "host_us", "setup_us", "rel_error", "max_error"),
    *("tolerance", "attempts", "registers", "spill_bytes"),
]


@dataclass(frozen=True)
class Table:
    """rows: of texts. words: the columns that are no numbers. kinds: of each row, "first", "baseline", "failed" or "";
    [] where all are alike.
    """

    header: list[str]
    rows: list[list[str]]
    words: set[str] = field(default_factory=set)
    kinds: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Section:
    """A heading with what is below it. tables: each with the line above it, "" for none."""

    title: str
    facts: list[str]
    tables: list[tuple[str, Table]]
    notes: list[str]


def section(board: Board) -> Section:
    """All that is shown of a board."""
    tables = [("", standing(board, with_cases=True))]
    if board.timed and len(board.cases) > WIDE:
        _, common = ranking.apart(board.cases)
        tables.append((f"By case, us. All have {common}." if common else "By case, us.", by_case(board)))
    if len(board.pairs):
        tables.append(("Interleaved pairs, variant / other:", pairs(board)))
    return Section(title(board), facts(board), tables, notes(board))


def title(board: Board) -> str:
    return f"{board.problem}, {board.target}, on {board.machine}"


def facts(board: Board) -> list[str]:
    """Where, how and when the board's times were taken: one line each."""
    run, environment, clock = board.run, dict(board.run["environment"]), board.run["clock"]
    shown = ["cpu"] if board.target == "cpu" else ["gpu", "driver", "cuda"]
    named = {"gpu": "", "cpu": "", "cuda": "CUDA "}
    parts = [
        f"{named.get(key, key + ' ')}{environment[key]}"
        for key in (*shown, "torch", "python", "cutlass_dsl")
        if environment.get(key)
    ]
    lines = ["Machine: " + (", ".join(parts) or "not recorded")]
    if board.timed:
        about = [f"{key} {_words(clock[key])}" for key in ("cold", "delivery") if clock.get(key) is not None]
        lines.append("Clock: " + ", ".join([_words(clock.get("name")) or "not recorded", *about]))
    commit = (run["commit"][:12] or "unknown") + (" with uncommitted changes" if run["dirty"] else "")
    return lines + [f"Run: {run['run_id']}, {run['time']}, commit {commit}"]


def standing(board: Board, with_cases: bool = False) -> Table:
    """With times: a row per variant. with_cases: also up to WIDE cases as columns, for which the measured roofline and
    the empty call have rows. Without times: what was compiled.
    """
    found = list(rows_of(board.standing))
    if not board.timed:
        rows = [[row.variant, row.source, _state(row, resources=False), *_compiled(row)] for row in found]
        return Table(["variant", "source", "state", "registers", "spilled"], rows, {"variant", "source", "state"})
    with_run = not board.standing.base.all()
    with_baseline = bool(board.standing.baseline_ratio.notna().any())
    header = ["rank", "variant", f"{board.metric} us", "95 % interval", "% of roofline"]
    header += ["baseline / this"] * with_baseline
    shown = board.cases if with_cases and len(board.cases) <= WIDE else []
    header += [*shown, "cases", "error / tolerance", "attempts"] + ["run"] * with_run + ["source", "state"]
    cells = {(row.variant, row.case): row for row in rows_of(board.times)}
    rows = []
    for row in found:
        rank = "baseline" if row.baseline else "-" if pd.isna(row.rank) else str(row.rank)
        line = [rank, row.variant, us(row.geomean_us), interval(row.lo_us, row.hi_us), percent(row.roofline_share)]
        line += [times_baseline(row)] * with_baseline
        line += [_cell(cells.get((row.variant, case))) for case in shown]
        line += [f"{row.done}/{row.wanted}", worst_error(board.times, row), str(row.attempts or "")]
        rows.append(line + ["" if row.base else row.run_id] * with_run + [row.source, _state(row)])
    of_base = board.times[board.times.base]
    for name, column in (("roofline", "roofline_us"), ("empty call", "empty_call_us")) if shown else ():
        spans = [_span(of_base.loc[of_base.case == case, column]) for case in shown]
        kinds = "/".join(sorted(set(of_base.roofline_kind) - {""})) if name == "roofline" else ""
        line = ["", f"{name} ({kinds})" if kinds else name, "", "", ""] + [""] * with_baseline + spans
        rows.append(line + [""] * (len(header) - len(line)))
    return Table(header, rows, {"variant", "run", "source", "state"}, [*map(_kind, found)])


def _kind(row: Any) -> str:
    if row.baseline:
        return "baseline"
    if row.status not in ("PASSED", *UNRUN):
        return "failed"
    return "first" if not pd.isna(row.rank) and row.rank == 1 else ""


def first_of(board: Board) -> Any:
    """The row of standing that ranks first; None where none is ranked."""
    return next((row for row in rows_of(board.standing) if not pd.isna(row.rank)), None)


def winners(boards: list[Board]) -> Table:
    """The first of each board. x baseline: see times_baseline."""
    header = ["problem", "winner", "time", "% of roofline", "x baseline", "machine", "source"]
    rows = []
    for board in boards:
        if first := first_of(board):
            name, time = f"{board.problem}, {board.target}", f"{us(first.geomean_us)} us"
            line = [name, first.variant, time, percent(first.roofline_share), times_baseline(first)]
            rows.append([*line, board.machine, first.source])
    return Table(header, rows, {"problem", "winner", "machine", "source"})


def times_baseline(row: Any) -> str:
    """Of a variant: the time of each case's fastest baseline over its own, as a geomean over the cases that one serves,
    with their number where they are not all.
    """
    if not row.baseline_ratio > 0:
        return ""
    some = f" in {row.baseline_cases} of {row.wanted}" if row.baseline_cases < row.wanted else ""
    return f"{row.baseline_ratio:.2f}x{some}"


def by_case(board: Board) -> Table:
    """A row per case, with the time, share of the measured roofline and rate of each variant of the base run. The
    case is without the fields that all cases share.
    """
    own, _ = ranking.apart(board.cases) if board.cases else ({}, "")
    of_base = board.times[board.times.base]
    timed = set(of_base[of_base.median_us.notna()].variant)
    variants = [name for name in board.standing.variant if name in timed]
    cells = {(row.variant, row.case): row for row in rows_of(of_base)}
    best = board.standing[board.standing["rank"] == 1].variant
    with_baseline = bool(len(best)) and bool(board.standing.baseline_ratio.notna().any())
    rows = []
    for case in board.cases:
        line = [own[case], *(_cell(cells.get((name, case)), rate=True) for name in variants)]
        if with_baseline:
            ratio = getattr(cells.get((best.iloc[0], case)), "baseline_ratio", math.nan)
            line.append(f"{ratio:.2f}x" if ratio > 0 else "")
        its = of_base[of_base.case == case]
        rows.append([*line, _span(its.roofline_us), _span(its.empty_call_us)])
    header = ["case", *variants, *["baseline / first"] * with_baseline, "measured roofline", "empty call"]
    return Table(header, rows, {"case"})


def pairs(board: Board) -> Table:
    """The newest paired run of each two variants, by case."""
    rows = [
        [row.variant, row.against, row.case, f"{row.ratio:.4f}", f"{row.lo:.4f} to {row.hi:.4f}", row.word, row.run_id]
        for row in rows_of(board.pairs)
    ]
    header = ["variant", "against", "case", "time ratio", "95 % interval", "verdict", "run"]
    return Table(header, rows, {"variant", "against", "case", "verdict"})


def notes(board: Board) -> list[str]:
    """How to read the table, as far as this board needs it, and what is odd about its run."""
    if not board.timed:
        return board.notes
    lines = [
        "Times are medians in us of calls with cold caches. % of roofline is the measured roofline / time: the least "
        "time for the same bytes (read) or operations (flops) under the same clock in the same run.",
        f"The {board.metric} is over all cases of the board; overlapping 95 % intervals share a rank (with the group's "
        "first). Attempts: the runs that timed a variant of this name here.",
        "Error: the largest, and what was admitted at that element; for baselines relative (Frobenius) and its limit.",
    ]
    if board.standing.baseline.any():
        lines.append(
            "Baselines are public kernels, unranked; baseline / this is the time of each case's fastest baseline over "
            "this one's, of the same run: the geomean over the cases that a baseline serves."
        )
    return lines + board.notes


def markdown(shown: Section) -> str:
    """A section as GitHub Markdown."""
    parts = [f"### {escape(shown.title)}", "\n".join(f"- {escape(line)}" for line in shown.facts)]
    for above, table in shown.tables:
        parts += [escape(above), grid(table)]
    return "\n\n".join([*filter(None, parts), *map(escape, shown.notes)])


def frame(boards: list[Board]) -> pd.DataFrame:
    """All boards in one long table, columns CSV: per variant one row for its figure (case "geomean", or "mean" where
    the problem ranks by that), then one per case."""
    tables = []
    for board in boards:
        place = {"machine": board.machine, "problem": board.problem, "target": board.target}
        total = board.standing.rename(columns={"geomean_us": "time_us"}).assign(case=board.metric, **place)
        total["reason"] = ["; ".join(filter(None, [r, *n])) for r, n in zip(total.reason, total.notes, strict=True)]
        cases = board.times.rename(columns={"median_us": "time_us"}).assign(**place)
        tables += [table.reindex(columns=CSV).astype(object) for table in (total, cases) if len(table)]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=CSV)


def csv(boards: list[Board]) -> str:
    return as_csv(frame(boards))


def as_csv(rows: pd.DataFrame) -> str:
    """Rows of `frame` as CSV."""

    def cell(value: object) -> object:
        if isinstance(value, float) and math.isfinite(value):
            return f"{value:.6g}"
        if isinstance(value, str):
            return text.clean(value)
        return str(value) if isinstance(value, int) else value  # or a column with gaps would be one of floats

    return rows.map(cell).to_csv(index=False, lineterminator="\n")


def us(value: float) -> str:
    """Microseconds with about four digits, "" for NaN."""
    if not math.isfinite(value):
        return ""
    return f"{value:.2f}" if value < 100 else f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def percent(share: float) -> str:
    """A share as a percentage, "" for NaN."""
    if not math.isfinite(share):
        return ""
    return f"{100 * share:.1f} %" if share < 0.1 else f"{100 * share:.0f} %"


escape = text.markdown


def grid(table: Table) -> str:
    """A table as GitHub Markdown."""
    rule = ["---" if name in table.words else "---:" for name in table.header]
    lines = [map(escape, table.header), rule, *(map(escape, row) for row in table.rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def interval(lo: float, hi: float) -> str:
    return f"{us(lo)} to {us(hi)}" if math.isfinite(lo) else ""


def _cell(time: Any, rate: bool = False) -> str:
    """A case's time with its share of the measured roofline, and with its `rate`, or what there is instead of a
    time.
    """
    if time is None or time.status == "MISSING":
        return "-"
    if time.status != "PASSED":
        return time.status
    about = [percent(time.roofline_share)] if time.roofline_share > 0 else []
    about += [f"{time.flops / time.median_us / 1e6:.3g} TFLOP/s"] if rate and time.flops > 0 else []
    return us(time.median_us) + (f" ({', '.join(about)})" if about else "")


def worst_error(times: pd.DataFrame, row: Any) -> str:
    """The error of the case that used most of its tolerance."""
    measure = "rel_error" if row.baseline else "max_error"
    its = times[(times.variant == row.variant) & times[measure].notna() & (times.tolerance > 0)]
    if its.empty:
        return ""
    worst = its.loc[(its[measure] / its.tolerance).idxmax()]
    return f"{worst[measure]:.1e} / {worst.tolerance:.1e}"


def _state(row: Any, resources: bool = True) -> str:
    """Status, why, the notes, and if wanted the registers and spills of a row, on one line."""
    reason = " ".join(text.line(row.reason).split())
    reason = reason if len(reason) <= REASON else reason[: REASON - 3] + "..."
    quiet = row.status in ("PASSED", *UNRUN)  # the notes say it, or it goes without saying
    parts = [] if quiet else [": ".join(filter(None, [row.status, reason]))]
    parts += row.notes
    if resources and row.status in UNRUN and math.isfinite(row.registers):
        parts.append(f"{row.registers:.0f} registers")
    if resources and (row.spill_bytes > 0 or (row.status in UNRUN and row.spill_bytes == 0)):
        parts.append(f"spills {row.spill_bytes:.0f} B")
    return "; ".join(parts) or "ok"


def _compiled(row: Any) -> list[str]:
    return [
        f"{row.registers:.0f}" if math.isfinite(row.registers) else "",
        f"{row.spill_bytes:.0f} B" if math.isfinite(row.spill_bytes) else "",
    ]


def _span(values: pd.Series) -> str:
    """As "18.30", or as "18.30 to 18.52" where the run's variants had different ones."""
    values = values.dropna()
    if values.empty:
        return "-"
    lo, hi = us(values.min()), us(values.max())
    return lo if lo == hi else f"{lo} to {hi}"


def _words(value: object) -> str:
    """A clock's submission as words: a list is joined, a truth value says yes or no."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(_words, value))
    return "" if value is None else str(value)
