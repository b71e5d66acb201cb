"""The boards in a terminal: a line each, or one of them as a table. No figure is cut, however narrow the terminal is.

Below WIDE columns a table has its most important columns only. What is to be said of a row stands below the table, as
a footnote.
"""

import itertools
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterable, Sequence

from harness.results import environment, gpu, output, text
from leaderboard import model_board, tables
from leaderboard.board import Board
from leaderboard.provenance import Provenance
from leaderboard.tables import Section, Table
from problems.common import load

WIDE = 140  # columns from which on a table has all of its columns
PLAIN_WIDTH = 250  # columns, where the output is no terminal
MOST = 15  # lines of `brief`
MOST_LINES = 95  # of `overview`
BOLD, DIM = 1, 2
STYLES = {"leader": 32, "baseline": 33}  # green, yellow
REPORT, RUN = ".venv/bin/python leaderboard/report.py", ".venv/bin/python harness/run.py"


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
    `named`; and a line for each other. cases: also the times by case of a board, by op of a model.
    """
    machines, width = here(), shutil.get_terminal_size((PLAIN_WIDTH, 0)).columns
    best = tables.best_first(boards, machines)
    of = ([board for board in best if board.problem == name] for name in named)
    firsts = ([board for board in its if board.machine in machines] or its[:1] for its in of)
    every = sorted(boards, key=lambda board: board.machine not in machines)
    full = every if whole else list(itertools.chain.from_iterable(firsts))
    sections = [tables.section(board, cases) for board in full]
    if whole or named:
        sections += [model_board.section(title, records, known, cases) for title, records in steps.items()]
        steps = {}
    lines = [line for part in sections for line in [*section(part, width), _line("")]]
    if (rest := [board for board in best if board not in full]) or steps:
        lines += overview(rest, steps)
    output.say("\n".join(lines))


def brief(boards: Iterable[Board], steps: model_board.Steps, known: Provenance, problem: str) -> None:
    """Print this machine's newest board of a problem, or of a model its steps, and the command to try next, in at most
    MOST lines. problem: as the commands name it.
    """
    title, table = f"No board of {problem} on this machine yet.", None
    following = f"{RUN} {problem}{' --mode latency' if steps else ' --all'}"
    for name, records in steps.items():
        title, table = name, model_board.table(records, known)
    for board in sorted((item for item in boards if item.timed), key=lambda item: item.run["time"])[-1:]:
        title, table, following = tables.title(board), tables.standing(board), next_command(board, problem)
    lines = [_line(title, BOLD), *(_table(table, shutil.get_terminal_size((PLAIN_WIDTH, 0)).columns) if table else [])]
    if len(lines) > MOST - 1:
        more = f"... {len(lines) - MOST + 2} more lines: {REPORT} {problem}"
        lines[MOST - 2 :] = [_line(more, DIM)]
    output.say("\n".join([*lines, _line(f"next: {following}")]))


def next_command(board: Board, problem: str) -> str:
    """The command to try after a look at a board: rank what has no rank yet, write a variant, or compare yours."""
    variants = load.PROBLEMS / board.problem / "variants"
    if not variants.is_dir():  # a folder in GPU MODE's format
        return f"{RUN} {problem} --submission FILE"
    ranked = board.standing["rank"].notna()
    apart = board.standing[(board.standing.status == "PASSED") & ~board.standing.base & ~ranked].variant
    if len(apart) or ranked.sum() < 2:
        return f"{RUN} {problem} --all" + (f"   (ranks {', '.join(apart)} too)" if len(apart) else "")
    draft, leader = f"{board.target}_mine", tables.first_of(board).variant
    if not (variants / f"{draft}.py").is_file():
        return f".venv/bin/python -m harness new {problem} {draft}"
    return f"{RUN} {problem} --variant {draft}" + (f" --against {leader}" if leader != draft else "")


def overview(boards: Iterable[Board], steps: model_board.Steps) -> list[str]:
    """A line for each board and model, below its machine's name."""
    best = [(tables.title(board), tables.leaders([board]).rows, board.run["time"]) for board in boards]
    for title, records in steps.items():
        best.append((title, model_board.leaders({title: records})[-1:], records[-1]["time"]))
    order = [title.partition(", on ")[2] for title, *_ in best]
    best.sort(key=lambda row: (order.index(row[0].partition(", on ")[2]), row[0]))
    rows, machines = [["problem", "leader", "time", "roofline", "x baseline", "date"]], []
    for title, leaders, time in best:
        problem, _, machine = title.partition(", on ")
        _, variant, us, share, ratio, *_ = leaders[0] if leaders else ["", "(none ranked)", "", "", ""]
        figures = [us, share.removesuffix(" of SOL"), ratio.partition(" in ")[0]]
        rows.append([problem.replace(",", ""), variant, *figures, time[:10]])
        machines.append(machine)
    header, *lines = aligned(rows, {"problem", "leader", "date"})
    printed = [_line(header, BOLD)]
    for machine, its in itertools.groupby(zip(machines, lines, strict=True), lambda at: at[0]):
        printed += [_line(machine, BOLD), *(_line(line) for _, line in its)]
    if len(printed) > MOST_LINES:
        printed[MOST_LINES:] = [_line(f"... {len(printed) - MOST_LINES} more lines: name a PROBLEM or a --machine")]
    return [*printed, _line(f"A whole board: {REPORT} PROBLEM", DIM)]


def section(shown: Section, width: int) -> list[str]:
    """A board, or a model's steps, with its tables."""
    lines = [_line(shown.title, BOLD), *(_line(fact, DIM) for fact in shown.facts)]
    for above, table in shown.tables:
        lines += [_line(above)] * bool(above) + _table(table, width)
    return [*lines, *(_line(line, DIM) for note in shown.notes for line in textwrap.wrap(text.line(note), width))]


def _table(table: Table, width: int) -> list[str]:
    """The rows of a table, its remarks as footnotes. One too wide without any has a paragraph for each row."""
    refs, notes = table.footnotes()
    shown = table.beside_footnotes(narrow=width < WIDE)
    header, rows = shown.header, [list(map(text.line, row)) for row in shown.rows]
    place = header.index("variant") if "variant" in header else 0
    for row, its in zip(rows, refs, strict=True):
        row[place] += f" [{','.join(map(str, sorted(its)))}]" if its else ""
    lines = aligned([header, *rows], table.words)
    if max(map(len, lines)) > width and not table.remarks:
        return [line for row in rows for line in _paragraph(header, row, width)]
    styles = [BOLD, *(STYLES.get(kind, 0) for kind in table.kinds or [""] * len(rows))]
    printed = [_line(line, style) for line, style in zip(lines, styles, strict=True)]
    for number, note in enumerate(notes, 1):
        wrapped = textwrap.wrap(text.line(f"[{number}] {note}"), width, subsequent_indent="    ")
        printed += [_line(part, DIM) for part in wrapped]
    return printed


def _paragraph(header: Sequence[str], row: Sequence[str], width: int) -> list[str]:
    cells = "; ".join(f"{name} {cell}" for name, cell in zip(header[1:], row[1:], strict=True) if cell)
    return [_line(row[0]), *map(_line, textwrap.wrap(cells, width, initial_indent="    ", subsequent_indent="    "))]


def aligned(rows: Sequence[Sequence[str]], words: Collection[str]) -> list[str]:
    """The rows, of which the first is the header, in columns: the names in `words` at the left, others at the right."""
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.ljust if name in words else str.rjust for name in rows[0]]
    return ["  ".join(map(lambda to, cell, size: to(cell, size), sides, row, sizes)) for row in rows]


def _line(words: str, style: int = 0) -> str:
    """A line of output, clean, since a submission may have written it; on a terminal that wants colours in a style."""
    line = text.line(words, math.inf).rstrip()
    coloured = style and line and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return f"\x1b[{style}m{line}\x1b[0m" if coloured else line
