"""The boards in a terminal: a line each, or one of them as a table. No figure is cut, however narrow the terminal is.

Below WIDE columns a table has its most important columns only. What is to be said of a row stands below the table, as
a footnote.
"""

import itertools
import math
import os
import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from harness.results import environment, gpu, stats, text
from harness.results.screen import Screen
from leaderboard import model_board, tables
from leaderboard.board import Board
from leaderboard.provenance import Provenance
from leaderboard.tables import Section, Table
from problems.common import load

WIDE = 140  # columns from which on a table has all of its columns
PLAIN_WIDTH = 250  # columns, where the output is no terminal
NARROW = {
    *("rank", "variant", "geomean us", "mean us", "% of roofline", "x baseline"),
    *("config", "format", "batch", "context", "new", "graph us", "tokens/s", "% of SOL"),
}
MOST = 15  # lines of `brief`
MOST_BOARDS = 95  # lines of `overview`
STYLES = {"first": "bold green", "baseline": "yellow"}
REPORT, RUN = ".venv/bin/python leaderboard/report.py", ".venv/bin/python harness/run.py"


class Line(NamedTuple):
    """A line of output. style: of rich."""

    said: str
    style: str = ""


def here() -> list[str]:
    """The names under which this machine's records are kept: of its GPU, if it has one, and of its processor."""
    return [environment.machine(device) for device in (["cuda"] if gpu.current() else []) + ["cpu"]]


def show(
    boards: Sequence[Board],
    steps: model_board.Steps,
    known: Provenance,
    named: Sequence[str] = (),
    whole: bool = False,
    cases: bool = False,
) -> None:
    """Print the boards: all of them `whole`; or this machine's, else the best machine's, of the problems that were
    `named`; and a line for each other. cases: also the times by case of a board, by layer and op of a model.
    """
    console, mine = screen(), here()
    boards = ordered(boards, mine)
    of = {name: [one for one in boards if one.problem == name] for name in named}
    firsts = ([one for one in its if one.machine in mine] or its[:1] for its in of.values())
    full = boards if whole else list(itertools.chain.from_iterable(firsts))
    sections = [tables.section(one, cases) for one in full]
    if whole or named:
        sections += [model_board.section(title, records, known, cases) for title, records in steps.items()]
        steps = {}
    for one in sections:
        _print(console, [*section(one, console.width), Line("")])
    if (rest := [one for one in boards if one not in full]) or steps:
        _print(console, overview(rest, steps, console.width))


def brief(boards: Iterable[Board], problem: str) -> None:
    """Print this machine's newest board of a problem, and the command to try next, in at most MOST lines."""
    console = screen()
    boards = sorted((one for one in boards if one.timed), key=lambda one: one.run["time"])
    if not boards:
        _print(console, [Line(f"No board of {problem} on this machine yet."), Line(f"next: {RUN} {problem} --all")])
        return
    board = boards[-1]
    lines = [Line(tables.title(board), "bold"), *_table(tables.standing(board), console.width)]
    if len(lines) > MOST - 1:
        more = f"... {len(lines) - MOST + 2} more lines: {REPORT} {problem} --machine {board.machine}"
        lines = [*lines[: MOST - 2], Line(more, "dim")]
    _print(console, [*lines, Line(f"next: {following(board)}")])


def following(board: Board) -> str:
    """The command to try after a look at a board: rank what has no rank yet, write a variant, or compare yours."""
    apart = board.standing[(board.standing.status == "PASSED") & ~board.standing.base & board.standing["rank"].isna()]
    if len(apart):
        return f"{RUN} {board.problem} --all   (ranks {', '.join(map(text.line, apart.variant))} too)"
    mine = f"{board.target}_mine"
    if not (load.PROBLEMS / board.problem / "variants" / f"{mine}.py").is_file():
        return f"{RUN} {board.problem} --new-variant {mine}   (writes a variant for you to change)"
    leader = tables.first_of(board)
    against = f" --against {text.line(leader.variant)}" if leader and leader.variant != mine else ""
    return f"{RUN} {board.problem} --variant {mine}{against}"


def ordered(boards: Iterable[Board], mine: Sequence[str]) -> list[Board]:
    """This machine's boards first, then those of the machine whose leaders are the fastest; without times last."""
    boards = list(boards)
    us = {id(one): leader.geomean_us for one in boards if (leader := tables.first_of(one))}
    best: dict[str, float] = {}
    for one in boards:
        best[one.problem] = min(best.get(one.problem, math.inf), us.get(id(one), math.inf))
    ratios: dict[str, list[float]] = {}
    for one in boards:
        if id(one) in us:
            ratios.setdefault(one.machine, []).append(us[id(one)] / best[one.problem])
    place = {name: stats.geomean(its) for name, its in ratios.items()}
    return sorted(
        boards, key=lambda one: (one.machine not in mine, place.get(one.machine, math.inf), one.machine, not one.timed)
    )


def overview(boards: Sequence[Board], steps: model_board.Steps, width: int) -> list[Line]:
    """A line for each board, below its machine's name."""
    header = ["problem", "leader", "us", "roofline", "x baseline", "date"]
    rows: dict[str, list[list[str]]] = {}
    for one in boards:
        row = [text.line(f"{one.problem} {one.target}"), "(none timed)", "", "", "", ""]
        if one.timed:
            row[1:] = ["(none ranked)", "", "", "", one.run["time"][:10]]
        if leader := tables.first_of(one):
            ratio = f"{leader.baseline_ratio:.2f}x" if leader.baseline_ratio > 0 else ""
            figures = [tables.us(leader.geomean_us), tables.percent(leader.roofline_share), ratio]
            row[1:5] = [text.line(leader.variant), *figures]
        rows.setdefault(one.machine, []).append(row)
    for title, records in steps.items():
        problem, _, machine = title.partition(", on ")
        by_config: dict[str, dict] = {}
        for one in filter(model_board.is_step, records):
            by_config.setdefault(str(one["case"].get("config")), one)
        for config, one in list(by_config.items())[-1:]:
            share = tables.percent(model_board.share(one))
            named = text.line(f"{one['variant']} [{config}]")
            row = [problem.replace(",", ""), named, tables.us(model_board.number(one.get("median_us"))), share, ""]
            rows.setdefault(machine, []).append([*row, one["time"][:10]])
    kept = list(rows.items())
    flat = [header, *(row for _, its in kept for row in its)]
    lines = _aligned(flat, {"problem", "leader", "date"})
    if max(map(len, lines)) > width:  # whole figures without the date, rather than a line that breaks
        lines = _aligned([row[:-1] for row in flat], {"problem", "leader"})
    found, at = [Line(lines[0], "bold")], 1
    for machine, its in kept:
        found += [Line(text.line(machine), "bold"), *map(Line, lines[at : at + len(its)])]
        at += len(its)
    if len(found) > MOST_BOARDS:
        found[MOST_BOARDS:] = [Line(f"... {len(found) - MOST_BOARDS} more lines: name a PROBLEM or a --machine")]
    return [*found, Line(f"A whole board: {REPORT} PROBLEM", "dim")]


def section(shown: Section, width: int) -> list[Line]:
    """A board, or a model's steps, with its tables."""
    lines = [Line(text.line(shown.title), "bold"), *(Line(text.line(fact), "dim") for fact in shown.facts)]
    for above, table in shown.tables:
        lines += [Line(text.line(above))] if above else []
        lines += _table(table, width)
    hidden = set() if width >= WIDE else {name for _, table in shown.tables for name in table.header} - NARROW
    told = [text.line(note) for note in shown.notes if note.partition(":")[0] not in hidden]
    return [*lines, *(Line(one, "dim") for note in told for one in textwrap.wrap(note, width))]


def _table(table: Table, width: int) -> list[Line]:
    """The rows of a table, then its remarks as footnotes. A table that is too wide without any has a paragraph for
    each row.
    """
    header, rows, notes = list(table.header), [list(map(text.line, row)) for row in table.rows], {}
    if table.remarks:
        place = header.index("variant") if "variant" in header else len(header) - 1
        for row, remarks in zip(rows, table.remarks, strict=True):
            marks = [str(notes.setdefault(said, len(notes) + 1)) for said in dict.fromkeys(map(text.line, remarks))]
            row[place] += f" [{','.join(marks)}]" if marks else ""
        left_out = {"source", "state"} | (set() if width >= WIDE else {*header} - NARROW)
        kept = [place for place, name in enumerate(header) if name not in left_out]
        header, rows = [header[i] for i in kept], [[row[i] for i in kept] for row in rows]
    lines = _aligned([header, *rows], table.words)
    if max(map(len, lines)) > width and not table.remarks:
        return [Line(one) for row in rows for one in _paragraph(header, row, width)]
    kinds = itertools.chain(table.kinds, itertools.repeat(""))
    found = [
        Line(lines[0], "bold"),
        *(Line(one, STYLES.get(kind, "")) for one, kind in zip(lines[1:], kinds, strict=False)),
    ]
    for said, number in notes.items():
        found += [Line(one, "dim") for one in textwrap.wrap(f"[{number}] {said}", width, subsequent_indent="    ")]
    return found


def _paragraph(header: Sequence[str], row: Sequence[str], width: int) -> list[str]:
    cells = (f"{name} {cell}" for name, cell in zip(header[1:], row[1:], strict=True) if cell)
    return [row[0], *textwrap.wrap("; ".join(cells), width, initial_indent="    ", subsequent_indent="    ")]


def _aligned(rows: Sequence[Sequence[str]], words: set[str]) -> list[str]:
    """The rows, of which the first is the header, in columns: the names in `words` at the left, others at the right."""
    wide = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    left = [name in words for name in rows[0]]
    return [
        "  ".join(
            cell.ljust(size) if at_left else cell.rjust(size)
            for cell, size, at_left in zip(row, wide, left, strict=True)
        )
        for row in rows
    ]


def screen() -> Screen:
    found = Screen(highlight=False)
    known = found.is_terminal or "COLUMNS" in os.environ
    return found if known else Screen(highlight=False, width=PLAIN_WIDTH)


def _print(console: Console, lines: Iterable[Line]) -> None:
    for line in lines:
        console.print(Text(text.line(line.said, math.inf).rstrip(), style=line.style), soft_wrap=True)
