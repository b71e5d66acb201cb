"""A board as tables of text: for the terminal, Markdown and the page; and one long table for CSV.

What a submission has written, say a reason, is in the rows and lines as it is. It is made safe where it is rendered.
"""

import dataclasses
import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from harness.results import ranking, text
from leaderboard import provenance
from leaderboard.board import STANDING, TIMES, UNRUN, Board, number, rows_of

_MARKUP = re.compile(r"[\\`*|<>\[\]~$&]|(?<![A-Za-z0-9_])_+|_+(?![A-Za-z0-9_])|^#")
_AUTOLINKS = re.compile(r"://|@|\bwww\.", re.IGNORECASE)
IN_REMARKS = {"source", "state"}
NARROW = {
    *("rank", "variant", "geomean us", "mean us", "% of roofline", "x baseline"),
    *("config", "format", "batch", "context", "new", "graph us", "tokens/s", "% of SOL"),
}
REASON = 110  # characters of a reason that a table shows; the CSV has all of it
PLACE = ["machine", "problem", "target", "rank", "variant", "case", "time_us"]
CSV = list(dict.fromkeys([*PLACE, *STANDING, *TIMES]))
CSV = [name for name in CSV if name not in ("notes", "geomean_us", "median_us", "baseline_cases")]


@dataclass(frozen=True)
class Table:
    """rows: of texts. words: the columns that are no numbers. kinds: of each row, "leader", "baseline", "failed" or "";
    () where all are alike. remarks: of each row, what a terminal and the page have as footnotes in place of the columns
    IN_REMARKS, and where there is little room of all but NARROW; () where they show all columns.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Collection[str] = ()
    kinds: Sequence[str] = ()
    remarks: Sequence[Sequence[str]] = ()

    def only(self, names: Collection[str]) -> "Table":
        """The table with these of its columns."""
        places = [place for place, name in enumerate(self.header) if name in names]
        header, *rows = [[line[place] for place in places] for line in (self.header, *self.rows)]
        return dataclasses.replace(self, header=header, rows=rows)

    def beside_footnotes(self, narrow: bool = False) -> "Table":
        """The table with the columns that a terminal or a page shows."""
        if not self.remarks:
            return self
        return self.only([name for name in self.header if name not in IN_REMARKS and (name in NARROW or not narrow)])

    def spread(self) -> "Table":
        """The table with a column for each field of its cases, where all of them have the same ones."""
        cases = [dict(word.partition("=")[::2] for word in row[0].split()) for row in self.rows]
        if self.header[0] != "case" or len({tuple(case) for case in cases}) != 1:
            return self
        rows = [[*case.values(), *row[1:]] for case, row in zip(cases, self.rows, strict=True)]
        return dataclasses.replace(self, header=[*cases[0], *self.header[1:]], rows=rows)

    def footnotes(self) -> tuple[list[list[int]], list[str]]:
        """-> (of each row the numbers of its footnotes, the footnotes)."""
        numbers: dict[str, int] = {}
        refs = [[numbers.setdefault(remark, len(numbers) + 1) for remark in its] for its in self.remarks]
        return refs or [[] for _ in self.rows], list(numbers)


@dataclass(frozen=True)
class Section:
    """A heading with what is below it. tables: each with the line above it, "" for none."""

    title: str
    facts: list[str]
    tables: list[tuple[str, Table]]
    notes: list[str]


def section(board: Board, cases: bool = True) -> Section:
    """What is shown of a board. cases: also the times by case, and the interleaved pairs."""
    tables = [("", standing(board))]
    if cases and board.timed:
        _, common = ranking.apart(board.cases)
        tables.append((f"By case, us. All have {common}." if common else "By case, us.", by_case(board)))
    if cases and len(board.pairs):
        tables.append(("Interleaved pairs, variant / other:", pairs(board)))
    return Section(title(board), facts(board), tables, notes(board))


def title(board: Board) -> str:
    return f"{board.problem}, {board.target}, on {board.machine}"


def facts(board: Board) -> list[str]:
    """Where, how and when the board's times were taken: one line each."""
    run, environment = board.run, board.run["environment"]
    names = {"cpu": "cpu "} if board.target == "cpu" else {"gpu": "", "driver": "driver ", "cuda": "CUDA "}
    names |= {key: f"{key} " for key in ("torch", "python", "cutlass_dsl")}
    parts = [f"{name}{environment[key]}" for key, name in names.items() if environment.get(key)]
    lines = ["Machine: " + (", ".join(parts) or "not recorded")]
    if board.timed:
        own = "submission" in str(run["clock"].get("name"))
        by = "in the submission's own process" if own else "by the judge"
        lines.append(f"Timed {by}, from cold caches (how: docs/measuring.md).")
    commit = (run["commit"][:12] or "unknown") + (" with uncommitted changes" if run["dirty"] else "")
    return lines + [f"Run: {run['run_id']}, {run['time']}, commit {commit}"]


def standing(board: Board) -> Table:
    """A row per variant; on a board without times what was compiled, and what of it was right in the model."""
    entries = list(rows_of(board.standing))
    columns = {
        "rank": ["baseline" if row.baseline else "-" if pd.isna(row.rank) else str(row.rank) for row in entries],
        "variant": [row.variant for row in entries],
        f"{board.metric} us": [text.us(row.geomean_us) for row in entries],
        "95 % interval": [interval(row.lo_us, row.hi_us) for row in entries],
        "% of roofline": [percent(row.roofline_share) for row in entries],
        "x baseline": [times_baseline(row) for row in entries],
        "cases": [f"{row.done}/{row.wanted}" for row in entries],
        "error / tolerance": [worst_error(board.times, row) for row in entries],
        "attempts": [str(row.attempts or "") for row in entries],
        "bits": [row.bits for row in entries],
        "source": [row.source for row in entries],
        "state": ["; ".join(remarks(row)) or "ok" for row in entries],
    }
    below = [remarks(row) + provenance.stale(board.problem, row.variant, row.source) for row in entries]
    if not board.timed:
        columns, below = {name: columns[name] for name in ("variant", "source", "state")}, []
    elif board.standing.baseline_ratio.isna().all():
        del columns["x baseline"]
    columns = {name: cells for name, cells in columns.items() if name != "bits" or any(cells)}
    rows = list(map(list, zip(*columns.values(), strict=True)))
    return Table(list(columns), rows, {"variant", "bits", "source", "state"}, [*map(_kind, entries)], below)


def remarks(row: Any) -> list[str]:
    """What is to be said of a row of a board: why it has no rank, what went wrong, what is odd about its times."""
    reason = " ".join(text.line(row.reason).split())
    reason = reason if len(reason) <= REASON else reason[: REASON - 3] + "..."
    quiet = row.status in ("PASSED", *UNRUN)  # the notes say it, or it goes without saying
    lines = [*([] if quiet else [": ".join(filter(None, [row.status, reason]))]), *row.notes]
    if row.status in UNRUN and math.isfinite(row.registers):
        lines.append(f"{row.registers:.0f} registers")
    spills = row.spill_bytes > 0 or (row.status in UNRUN and row.spill_bytes == 0)
    return lines + [f"spills {row.spill_bytes:.0f} B"] * spills


def _kind(row: Any) -> str:
    if row.baseline:
        return "baseline"
    if row.status not in ("PASSED", *UNRUN):
        return "failed"
    return "leader" if not pd.isna(row.rank) and row.rank == 1 else ""


def first_of(board: Board) -> Any:
    """The leader's row of standing; None where none is ranked."""
    return next((row for row in rows_of(board.standing) if not pd.isna(row.rank)), None)


def best_first(boards: Iterable[Board], machines: Collection[str] = ()) -> list[Board]:
    """Boards of these machines, then GPUs, CPUs, and what was only compiled; the fastest leader first."""

    def place(board: Board) -> tuple[bool, bool, bool, float]:
        leader = first_of(board)
        us = math.inf if leader is None else leader.geomean_us
        return board.machine not in machines, not board.timed, board.target == "cpu", us

    return sorted(boards, key=place)


def leaders(boards: list[Board]) -> Table:
    """The leader of each board."""
    header = ["problem", "leader", "time", "% of roofline", "x baseline", "machine", "source"]
    rows = []
    for board in boards:
        if first := first_of(board):
            name, time = f"{board.problem}, {board.target}", f"{text.us(first.geomean_us)} us"
            line = [name, first.variant, time, percent(first.roofline_share), times_baseline(first)]
            rows.append([*line, board.machine, first.source])
    return Table(header, rows, {"problem", "leader", "machine", "source"})


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
    first = [row.variant for row in [first_of(board)] if row and board.standing.baseline_ratio.notna().any()]
    rows = []
    for case in board.cases:
        line = [own[case], *(_cell(cells.get((name, case))) for name in variants)]
        for leader in first:
            ratio = getattr(cells.get((leader, case)), "baseline_ratio", math.nan)
            line.append(f"{ratio:.2f}x" if ratio > 0 else "")
        its = of_base[of_base.case == case]
        rows.append([*line, _span(its.roofline_us), _span(its.empty_call_us)])
    header = ["case", *variants, *["leader x baseline"] * len(first), "measured roofline", "empty call"]
    return Table(header, rows, {"case"})


def of_records(judged: Sequence[dict]) -> Table:
    """A row for each test or benchmark record of a variant."""
    own = ranking.apart(list(dict.fromkeys(ranking.case_label(record["case"]) for record in judged)))[0]
    rows = []
    for rec in judged:
        us, roofline = (number(rec.get(key)) for key in ("median_us", "roofline_us"))
        error = rec.get("error") or {}
        off, allowed = number(error.get("rel" if rec.get("baseline") else "max")), number(error.get("tol"))
        row = [rec["kind"], own[ranking.case_label(rec["case"])], rec["status"], text.us(us)]
        row += [interval(*rec.get("ci95_us") or (math.nan, math.nan)), percent(roofline / us if us > 0 else math.nan)]
        rows.append([*row, str(rec.get("n") or ""), f"{off:.1e} / {allowed:.1e}" if off + allowed >= 0 else ""])
    header = ["kind", "case", "verdict", "us", "95 % interval", "% of roofline", "samples", "error / tolerance"]
    kinds = ["" if record["status"] in ("PASSED", *UNRUN) else "failed" for record in judged]
    reasons = [[text.line(record["reason"], 400)] if record.get("reason") else [] for record in judged]
    return Table(header, rows, {"kind", "case", "verdict"}, kinds, reasons)


def pairs(board: Board) -> Table:
    """The newest paired run of each two variants, by case."""
    rows = [
        [row.variant, row.against, row.case, f"{row.ratio:.4f}", f"{row.lo:.4f} to {row.hi:.4f}", row.word, row.run_id]
        for row in rows_of(board.pairs)
    ]
    header = ["variant", "against", "case", "time ratio", "95 % interval", "verdict", "run"]
    return Table(header, rows, {"variant", "against", "case", "verdict", "run"})


def notes(board: Board) -> list[str]:
    """How to read the table, as far as this board needs it, and what is odd about its run."""
    if not board.timed:
        return board.notes
    lines = [
        f"Times are in us, the {board.metric} over all cases of each case's median. % of roofline: the time of reading "
        "the same bytes (or of the same arithmetic) on this machine, measured in the same run, over this time.",
        "Variants whose 95 % intervals overlap the leader's of their group get the same rank.",
        "attempts: the runs that timed a variant of this name here.",
        "error / tolerance: the worst element's error and the error allowed there. Baselines: relative error of the "
        "whole.",
    ]
    if board.standing.baseline.any():
        lines.append("Baselines are public kernels, not ranked. x baseline: how many times faster than the fastest.")
    return lines + board.notes


def markdown(shown: Section) -> str:
    """A section as GitHub Markdown."""
    parts = [f"### {escape(shown.title)}", "\n".join(f"- {escape(line)}" for line in shown.facts)]
    for above, table in shown.tables:
        parts += [escape(above), grid(table)]
    return "\n\n".join([*filter(None, parts), *map(escape, shown.notes)])


def grid(table: Table) -> str:
    """A table as GitHub Markdown."""
    rule = ["---" if name in table.words else "---:" for name in table.header]
    lines = [map(escape, table.header), rule, *(map(escape, row) for row in table.rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


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
    """The boards' `frame` as CSV."""

    def cell(value: object) -> object:
        if isinstance(value, float) and math.isfinite(value):
            return f"{value:.6g}"
        if isinstance(value, str):
            return text.clean(value)
        return str(value) if isinstance(value, int) else value  # or a column with gaps would be one of floats

    return frame(boards).map(cell).to_csv(index=False, lineterminator="\n")


def percent(share: float) -> str:
    """A share as a percentage, "" for NaN."""
    if not math.isfinite(share):
        return ""
    return f"{100 * share:.1f} %" if share < 0.1 else f"{100 * share:.0f} %"


def interval(lo: float, hi: float) -> str:
    return f"{text.us(lo)} to {text.us(hi)}" if math.isfinite(lo) else ""


def escape(value: object) -> str:
    """Return a text on one line for running text or a table cell of GitHub's Markdown, where it shows as it is: no
    markup, entity, formula, cell or link comes of it. An empty comment parts what would be an address.
    """
    plain = " ".join(text.line(value).split())
    plain = _MARKUP.sub(lambda match: "".join(f"\\{char}" for char in match[0]), plain)
    return _AUTOLINKS.sub(lambda match: f"{match[0][:-1]}<!-- -->{match[0][-1]}", plain)


def _cell(time: Any) -> str:
    """A case's time with its share of the measured roofline and its rate, or what there is instead of a time."""
    if time is None or time.status == "MISSING":
        return "-"
    if time.status != "PASSED":
        return time.status
    about = [percent(time.roofline_share)] if time.roofline_share > 0 else []
    about += [f"{time.flops / time.median_us / 1e6:.3g} TFLOP/s"] if time.flops > 0 else []
    return text.us(time.median_us) + (f" ({', '.join(about)})" if about else "")


def worst_error(times: pd.DataFrame, row: Any) -> str:
    """The error of the case that used most of its tolerance."""
    measure = "rel_error" if row.baseline else "max_error"
    its = times[(times.variant == row.variant) & times[measure].notna() & (times.tolerance > 0)]
    if its.empty:
        return ""
    worst = its.loc[(its[measure] / its.tolerance).idxmax()]
    return f"{worst[measure]:.1e} / {worst.tolerance:.1e}"


def _span(values: pd.Series) -> str:
    """As "18.30", or as "18.30 to 18.52" where the run's variants had different ones."""
    return " to ".join(dict.fromkeys(text.us(value) for value in (values.min(), values.max()) if value > 0)) or "-"
