"""The tables of the page, and the addresses of what is on it.

A Grid is text in rows; what a submission has written is in it as it is, and the templates escape it.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from harness.results import ranking, text
from leaderboard import model_board, pictures, tables
from leaderboard.board import UNRUN, Board, rows_of
from leaderboard.checks import Check
from leaderboard.provenance import CHANGED
from leaderboard.quality import ATTACKS, Attack, Group, Loop, summary

LONGEST = 120  # characters of a slug; file systems take 255 bytes
REASON = 400  # characters of a text in a table
CODE = {"variant", "against", "case", "op", "commit", "attack", "after", "problem"}  # columns that are set as code
SELF_TIMED = "self-timed"  # what the judge warns of a time that the submission's process took


@dataclass(frozen=True)
class Grid:
    """rows: of texts. words: the columns that are no numbers; narrow: those that a narrow screen keeps, () where rows
    wrap instead. kinds: of each row, "leader", "baseline", "failed" or ""; tags, refs: of each row, words and footnotes
    beside its name; notes: the footnotes.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Iterable[str] = ()
    narrow: Sequence[str] = ()
    kinds: Sequence[str] = ()
    tags: Sequence[Sequence[str]] = ()
    refs: Sequence[Sequence[int]] = ()
    notes: Sequence[str] = field(default_factory=list)


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


def best_first(boards: Iterable[Board]) -> list[Board]:
    """GPUs by their leader's time, then CPUs, then what was only compiled."""

    def place(board: Board) -> tuple[bool, bool, float]:
        leader = tables.first_of(board)
        return not board.timed, board.target == "cpu", math.inf if leader is None else leader.geomean_us

    return sorted(boards, key=place)


def provenance(board: Board) -> str:
    """Where, how and when a board was timed, what its time is, and how many rows are stale, in sentences."""
    run, environment = board.run, board.run["environment"]
    device = environment.get("cpu" if board.target == "cpu" else "gpu") or "a device that is not recorded"
    software = ", ".join(f"{key} {environment[key]}" for key in ("driver", "cuda", "torch") if environment.get(key))
    clock = board.run["clock"].get("name") or "a clock that is not recorded"
    how = f"Timed on {device} ({software}) by the clock “{clock}”" if board.timed else "Compiled"
    commit = (run["commit"][:12] or "unknown") + (" with uncommitted changes" if run["dirty"] else "")
    said = f"{how} in run {run['run_id']}, {run['time']}, commit {commit}."
    said += f" Time is the {board.metric} over {text.counted(len(board.cases), 'case')}." if board.timed else ""
    stale = int((board.standing.source == CHANGED).sum())
    return text.line(
        said + f" The source of {stale} of {len(board.standing)} rows has changed since." * bool(stale), 900
    )


def fields(labels: Sequence[str]) -> tuple[list[str], dict[str, list[str]], str]:
    """-> (the fields in which cases differ, by label their values, what all have in common)."""
    parsed = {label: dict(part.partition("=")[::2] for part in re.split(r" (?=\w+=)", label)) for label in labels}
    names = list(dict.fromkeys(name for of_case in parsed.values() for name in of_case))
    alike = [n for n in names if len(parsed) > 1 and len({of_case.get(n) for of_case in parsed.values()}) == 1]
    own = [name for name in names if name not in alike]
    common = " ".join(part for part in re.split(r" (?=\w+=)", next(iter(labels), "")) if part.split("=")[0] in alike)
    return own, {label: [of_case.get(name, "") for name in own] for label, of_case in parsed.items()}, common


def _footnotes(said: Sequence[Sequence[str]]) -> tuple[list[list[int]], list[str]]:
    """-> (of each row the numbers of its notes, the notes)."""
    numbers: dict[str, int] = {}
    refs = [[numbers.setdefault(note, len(numbers) + 1) for note in of_row] for of_row in said]
    return refs, list(numbers)


def standing(board: Board) -> Grid:
    """A row a variant; why it has no rank or no time, and what is odd about it, are footnotes."""
    found = list(rows_of(board.standing))
    said = [[*([f"{row.status}: {row.reason}"] if row.reason else []), *row.notes] for row in found]
    refs, notes = _footnotes([[text.line(note, REASON) for note in of_row] for of_row in said])
    tags = []
    for row in found:
        self_timed = any(SELF_TIMED in note for note in row.notes)
        named = {"baseline": row.baseline, SELF_TIMED: self_timed, CHANGED: row.source == CHANGED}
        tags.append([tag for tag, holds in named.items() if holds])
    if not board.timed:
        rows = [[row.variant, row.status, _count(row.registers), _count(row.spill_bytes)] for row in found]
        header, words = ["variant", "state", "registers", "spilled, B"], {"variant", "state"}
        return Grid(header, rows, words, header[:3], (), tags, refs, notes)
    narrow, rows = ["rank", "variant", "time, us", "% of roofline", "x baseline"], []
    header = [*narrow, "95 % interval", "cases", "error / tolerance", "attempts"]
    for row in found:
        time = tables.us(row.geomean_us) or ("" if row.status == "PASSED" else row.status)
        line = ["–" if pd.isna(row.rank) else str(row.rank), row.variant, time]
        line += [tables.percent(row.roofline_share), tables.times_baseline(row)]
        line += [tables.interval(row.lo_us, row.hi_us), f"{row.done}/{row.wanted}"]
        rows.append([*line, tables.worst_error(board.times, row), str(row.attempts or "")])
    return Grid(header, rows, {"variant"}, narrow, [*map(_kind, found)], tags, refs, notes)


def _count(value: float) -> str:
    return f"{value:.0f}" if math.isfinite(value) else ""


def _kind(row: Any) -> str:
    if row.baseline:
        return "baseline"
    if row.status not in ("PASSED", *UNRUN):
        return "failed"
    return "leader" if not pd.isna(row.rank) and row.rank == 1 else ""


def by_case(board: Board) -> tuple[Grid, str]:
    """-> (a row a case: the fields in which cases differ, the time of each drawn variant, how good the leader is there;
    what all cases have in common).
    """
    own, values, common = fields(board.cases)
    of_base, variants, leader = board.times[board.times.base], pictures.series(board), tables.first_of(board)
    cells = {(one.variant, one.case): one for one in rows_of(of_base)}
    rows = []
    for case in board.cases:
        times = [cells.get((name, case)) for name in variants]
        said = ["" if one is None else tables.us(one.median_us) or one.status for one in times]
        best = cells.get((leader.variant, case)) if leader else None
        share, ratio = (best.roofline_share, best.baseline_ratio) if best else (math.nan, math.nan)
        its = of_base[of_base.case == case]
        row = [*values[case], *said, tables.percent(share), f"{ratio:.2f}x" if ratio > 0 else ""]
        rows.append([*row, tables.us(its.roofline_us.median())])
    about = ["leader: % of roofline", "leader: x baseline", "roofline"]
    return Grid([*own, *variants, *about], rows), common


def times(timed: Sequence[dict]) -> Grid:
    """A row a benchmark of a variant: the case without what all share, the time, the share of the roofline."""
    own, _ = ranking.apart([ranking.case_label(one["case"]) for one in timed])
    rows = []
    for one in timed:
        us, roofline = (model_board.number(one.get(key)) for key in ("median_us", "roofline_us"))
        share = roofline / us if us > 0 else math.nan
        rows.append([own[ranking.case_label(one["case"])], tables.us(us), tables.percent(share)])
    header = ["case", "time, us", "% of roofline"]
    return Grid(header, rows, {"case"}, header)


def cases_of(judged: Sequence[dict]) -> Grid:
    """A row for each test and benchmark record of a variant. Reasons are footnotes."""
    own, values, _ = fields(list(dict.fromkeys(ranking.case_label(one["case"]) for one in judged)))
    rows = []
    for one in judged:
        median, (lo, hi) = model_board.number(one.get("median_us")), one.get("ci95_us") or (math.nan, math.nan)
        error = one.get("error") or {}
        off, allowed = error.get("rel" if one.get("baseline") else "max"), error.get("tol")
        known = isinstance(off, int | float) and isinstance(allowed, int | float)
        row = [one["kind"], *values[ranking.case_label(one["case"])], one["status"], tables.us(median)]
        row += [tables.interval(lo, hi), str(one.get("n") or "")]
        rows.append([*row, f"{off:.1e} / {allowed:.1e}" if known else ""])
    header = ["kind", *own, "verdict", "time, us", "95 % interval", "samples", "error / tolerance"]
    kinds = ["" if one["status"] in ("PASSED", *UNRUN) else "failed" for one in judged]
    refs, notes = _footnotes([[text.line(one["reason"], REASON)] if one.get("reason") else [] for one in judged])
    return Grid(header, rows, {"kind", "verdict"}, kinds=kinds, refs=refs, notes=notes)


def of_table(table: tables.Table, words: str = "state") -> Grid:
    """A table of leaderboard/tables.py; what its column `words` says beyond ok are footnotes."""
    if words not in table.header:
        return Grid(table.header, table.rows, table.words, kinds=table.kinds)
    place = table.header.index(words)
    refs, notes = _footnotes([[row[place]] if row[place] != "ok" else [] for row in table.rows])
    header, *rows = [[*line[:place], *line[place + 1 :]] for line in (table.header, *table.rows)]
    return Grid(header, rows, table.words, kinds=table.kinds, refs=refs, notes=notes)


def op_times(check: Check) -> Grid:
    """The ops of a decode step, the longest first, and what is no op."""
    longest = sorted(check.ops_us.items(), key=lambda item: -item[1])
    spent = [*longest, ("between the ops", check.step_us - sum(check.ops_us.values()))]
    rows = [[op, tables.us(us), tables.percent(us / check.step_us), check.kernels.get(op, "")] for op, us in spent]
    return Grid(["op", "time, us", "% of step", "filled by"], rows, {"op", "filled by"})


def layers(check: Check) -> Grid:
    """The error of each layer with its budget."""
    rows = []
    for one in check.layers:
        numbers = (one.alone, one.alone_budget, one.drift, one.drift_budget)
        errors = ["not finite" if x is None else f"{x:.2e}" for x in numbers]
        rows.append([one.after, *errors, "" if one.cosine is None else f"{one.cosine:.6f}"])
    return Grid(["after", "by itself", "its budget", "free pass", "budget of the pass", "cosine"], rows, {"after"})


def pairs(groups: Iterable[Group]) -> Grid:
    """What the judge says of pairs whose ratio is known."""
    rows = []
    for group in groups:
        counts = map(str, (len(group.pairs), *map(group.count, ("SAME", "SLOWER", "UNDECIDED", "FASTER", None))))
        ratios = f"{min(group.ratios):.4f} to {max(group.ratios):.4f}" if group.ratios else ""
        planted = tables.percent(group.planted) if group.planted else "nothing"
        rows.append([planted, group.pairs[0].problem, str(group.pairs[0].processes), *counts, ratios])
    header = ["planted", "problem", "processes", "pairs", "SAME", "SLOWER", "UNDECIDED", "FASTER", "failed", "ratios"]
    return Grid(header, rows, {"planted", "problem"})


def loops(found: Iterable[tuple[str, Loop]]) -> Grid:
    rows = []
    for machine, one in found:
        for case in one.cases:
            row = [machine, one.problem, one.variant, ranking.case_label(case.case), tables.us(case.judge_us)]
            rows.append([*row, tables.us(case.loop_us), f"{case.ratio:.3f} ± {case.standard_error:.3f}"])
    words = ["machine", "problem", "variant", "case"]
    return Grid([*words, "judge, us", "plain loop, us", "judge / loop"], rows, words)


def attacks(found: Iterable[Attack]) -> Grid:
    """A row a file, with the outcome of each of its forms."""
    files: dict[str, list[Attack]] = {}
    for one in found:
        files.setdefault(one.file, []).append(one)
    rows, kinds = [], []
    for file, forms in files.items():
        outcomes = [f"{one.outcome} ({one.form} of 4 calls honest)" for one in forms]
        alike = {one.outcome for one in forms}
        lows = [one.low for one in forms if one.low is not None]
        said = f"{alike.pop()} in all forms" if len(alike) == 1 else ", ".join(outcomes)
        rows.append([file, said, f"{min(lows):.3f}" if lows else "", summary(ATTACKS / f"{file}.py")])
        kinds.append("failed" if any(one.outcome == "BELOW THE BOUND" for one in forms) else "")
    header = ["attack", "outcome", "least time / honest time", "what it does"]
    return Grid(header, rows, {"attack", "outcome", "what it does"}, kinds=kinds)
