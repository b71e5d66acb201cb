"""The tables of the page, and the addresses of what is on it.

A Grid is text in rows; what a submission has written is in it as it is, and the templates escape it.
"""

import collections
import dataclasses
import hashlib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.results import ranking, text
from leaderboard import model_board, pictures, tables
from leaderboard.board import UNRUN, Board, rows_of
from leaderboard.quality import ATTACKS, Attack, Group, summary

LONGEST = 120  # characters of a slug; file systems take 255 bytes
REASON = 400  # characters of a text in a table
CODE = {"variant", "against", "case", "op", "commit", "attack", "after", "problem"}  # columns that are set as code
TAGS = ("self-timed", "stale")  # words of remarks that stand beside a variant's name too


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
    notes: Sequence[str] = ()


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
    """Where, how and when a board was timed, in sentences."""
    return text.line(" ".join(f"{one.removesuffix('.')}." for one in tables.facts(board)), 900)


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
    table = tables.standing(board)
    narrow = ["rank", "variant", f"{board.metric} us", "% of roofline", "x baseline"] if board.timed else ()
    tags = [[tag for tag in TAGS if any(tag in remark for remark in said)] for said in table.remarks]
    return dataclasses.replace(of_table(table), narrow=narrow, tags=tags)


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
        said = ["" if one is None else text.us(one.median_us) or one.status for one in times]
        best = cells.get((leader.variant, case)) if leader else None
        share, ratio = (best.roofline_share, best.baseline_ratio) if best else (math.nan, math.nan)
        its = of_base[of_base.case == case]
        row = [*values[case], *said, tables.percent(share), f"{ratio:.2f}x" if ratio > 0 else ""]
        rows.append([*row, text.us(its.roofline_us.median())])
    about = ["leader: % of roofline", "leader: x baseline", "roofline"]
    return Grid([*own, *variants, *about], rows), common


def times(timed: Sequence[dict]) -> Grid:
    """A row a benchmark of a variant: the case without what all share, the time, the share of the roofline."""
    own, _ = ranking.apart([ranking.case_label(one["case"]) for one in timed])
    rows = []
    for one in timed:
        us, roofline = (model_board.number(one.get(key)) for key in ("median_us", "roofline_us"))
        share = roofline / us if us > 0 else math.nan
        rows.append([own[ranking.case_label(one["case"])], text.us(us), tables.percent(share)])
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
        row = [one["kind"], *values[ranking.case_label(one["case"])], one["status"], text.us(median)]
        row += [tables.interval(lo, hi), str(one.get("n") or "")]
        rows.append([*row, f"{off:.1e} / {allowed:.1e}" if known else ""])
    header = ["kind", *own, "verdict", "time, us", "95 % interval", "samples", "error / tolerance"]
    kinds = ["" if one["status"] in ("PASSED", *UNRUN) else "failed" for one in judged]
    refs, notes = _footnotes([[text.line(one["reason"], REASON)] if one.get("reason") else [] for one in judged])
    return Grid(header, rows, {"kind", "verdict"}, kinds=kinds, refs=refs, notes=notes)


def of_table(table: tables.Table) -> Grid:
    """A table of leaderboard/tables.py. Of one with remarks these are footnotes, in place of source and state."""
    hidden = ("source", "state") if table.remarks else ()
    shown = [place for place, name in enumerate(table.header) if name not in hidden]
    header, *rows = [[line[place] for place in shown] for line in (table.header, *table.rows)]
    refs, notes = _footnotes(table.remarks)
    return Grid(header, rows, table.words, kinds=table.kinds, refs=refs, notes=notes)


def planted(group: Group) -> str:
    return tables.percent(group.planted) if group.planted else "nothing"


def pairs(groups: Iterable[Group]) -> Grid:
    """What the judge says of pairs whose ratio is known."""
    rows = []
    for group in groups:
        counts = map(str, (len(group.pairs), *map(group.count, ("SAME", "SLOWER", "UNDECIDED", "FASTER", None))))
        ratios = f"{min(group.ratios):.4f} to {max(group.ratios):.4f}" if group.ratios else ""
        rows.append([planted(group), group.pairs[0].problem, str(group.pairs[0].processes), *counts, ratios])
    header = ["planted", "problem", "processes", "pairs", "SAME", "SLOWER", "UNDECIDED", "FASTER", "failed", "ratios"]
    return Grid(header, rows, {"planted", "problem"})


def attacks(found: Sequence[Attack]) -> Grid:
    """A row a file, with the outcomes of its forms."""
    rows = []
    for file in dict.fromkeys(one.file for one in found):
        forms = [one for one in found if one.file == file]
        outcomes = collections.Counter(one.outcome for one in forms)
        said = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
        lows = [one.low for one in forms if one.low is not None]
        rows.append([file, said, f"{min(lows):.3f}" if lows else "", summary(ATTACKS / f"{file}.py")])
    header = ["attack", "outcome of its forms", "least time / honest time", "what it does"]
    return Grid(header, rows, {*header} - {header[2]})
