"""What the page adds to the tables of leaderboard/tables.py: addresses of rows, the values by which they sort, and
tables that only the page has.

`slug` makes a name a part of an address and of a file's name, whatever characters it has.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Sequence

from harness.results import ranking
from leaderboard import model_board, quality, tables, trend
from leaderboard.board import UNRUN, Board
from leaderboard.checks import Check
from leaderboard.tables import Table

LONGEST = 120  # characters of a slug; file systems take 255 bytes
REASON = 400  # characters of a text in a table
CODE = {"variant", "against", "case", "op", "commit", "attack", "after", "problem"}  # columns that are set as code
NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?")


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


def anchors(table: Table, key: str) -> list[str]:
    """The id of each row: by its variant, case or first cell, where no other row has that; else by its place."""
    name = next((table.header.index(column) for column in ("variant", "case") if column in table.header), 0)
    names = [row[name] for row in table.rows]
    return [f"{key}-{slug(one) if names.count(one) == 1 else place}" for place, one in enumerate(names)]


def value(said: str) -> float | str:
    """The number that a text begins with, by which it sorts; "" where it begins with none."""
    found = NUMBER.match(said)
    return float(found[0].replace(",", "")) if found else ""


def milestones(broken: Sequence[trend.Timing]) -> Table:
    """Who was the fastest so far, from the first correct version on."""
    rows = [
        [_minute(one.time), one.commit, one.variant, tables.us(one.us), f"{broken[0].us / one.us:.2f}x", one.run_id]
        for one in broken
    ]
    words = {"time", "commit", "variant", "run"}
    return Table(["time", "commit", "variant", "time, us", "speed-up", "run"], rows, words)


def cases_of(found: Sequence[dict]) -> Table:
    """A row for each test and benchmark record of a variant."""
    header = ["case", "kind", "verdict", "time, us", "95 % interval", "% of roofline", "samples", "error / tolerance"]
    rows = []
    for one in found:
        median, (lo, hi) = model_board.number(one.get("median_us")), one.get("ci95_us") or (math.nan, math.nan)
        roofline, error = model_board.number(one.get("roofline_us")), one.get("error") or {}
        off, allowed = error.get("rel" if one.get("baseline") else "max"), error.get("tol")
        known = isinstance(off, int | float) and isinstance(allowed, int | float)
        row = [ranking.case_label(one["case"]) or "all cases", one["kind"], one["status"], tables.us(median)]
        row += [tables.interval(lo, hi), tables.percent(roofline / median if median > 0 else math.nan)]
        row += [str(one.get("n") or ""), f"{off:.1e} / {allowed:.1e}" if known else "", one.get("reason") or ""]
        rows.append(row)
    kinds = ["" if one["status"] in ("PASSED", *UNRUN) else "failed" for one in found]
    return Table([*header, "reason"], rows, {"case", "kind", "verdict", "reason"}, kinds)


def op_times(check: Check) -> Table:
    """The ops of a decode step, the longest first, and what is no op."""
    longest = sorted(check.ops_us.items(), key=lambda item: -item[1])
    spent = [*longest, ("between the ops", check.step_us - sum(check.ops_us.values()))]
    rows = [[op, tables.us(us), tables.percent(us / check.step_us), check.kernels.get(op, "")] for op, us in spent]
    return Table(["op", "time, us", "% of step", "filled by"], rows, {"op", "filled by"})


def layers(check: Check) -> Table:
    """The error of each layer with its budget."""
    rows = []
    for one in check.layers:
        numbers = (one.alone, one.alone_budget, one.drift, one.drift_budget)
        errors = ["not finite" if x is None else f"{x:.2e}" for x in numbers]
        rows.append([one.after, *errors, "" if one.cosine is None else f"{one.cosine:.6f}"])
    header = ["after", "by itself", "its budget", "free pass", "budget of the pass", "cosine"]
    return Table(header, rows, {"after"})


def comparisons(found: Iterable[quality.Comparison]) -> Table:
    header = ["machine", "problem", "case", "slowed by", "time ratio", "95 % interval", "verdict", "processes", "when"]
    rows = []
    for one in found:
        row = [one.machine, one.problem, one.case, one.planted or "nothing", f"{one.ratio:.4f}"]
        row += [f"{one.lo:.4f} to {one.hi:.4f}", one.word, one.processes or "not recorded", _minute(one.time)]
        rows.append(row)
    return Table(header, rows, {*header} - {"time ratio", "95 % interval", "processes"})


def plans(found: Iterable[quality.Comparison]) -> Table:
    """The verdicts by what was planted and by the number of processes."""
    words = ("SAME", "UNDECIDED", "FASTER", "SLOWER")
    rows = []
    for (planted, processes), of_plan in quality.by_plan(found).items():
        counts = (sum(of_plan.values()), *(of_plan.get(word, 0) for word in words))
        rows.append([planted or "nothing", processes or "not recorded", *map(str, counts)])
    return Table(["slowed by", "processes", "comparisons", *words], rows, {"slowed by"})


def loops(found: Iterable[quality.Loop]) -> Table:
    header = ["machine", "problem", "variant", "case", "judge, us", "plain loop, us", "judge / loop", "standard error"]
    rows = []
    for one in found:
        times = [tables.us(one.judge_us), tables.us(one.loop_us), f"{one.ratio:.3f}", f"{one.standard_error:.3f}"]
        rows.append([one.machine, one.problem, one.variant, one.case, *times])
    return Table(header, rows, {*header[:4]})


def attacks(found: Iterable[quality.Attack]) -> Table:
    header = ["attack", "honest calls", "outcome", "verdict", "time / honest time", "95 % interval", "what it does"]
    rows, kinds = [], []
    for one in found:
        ratio = "" if one.ratio is None else f"{one.ratio:.3f}"
        interval = "" if one.low is None or one.high is None else f"{one.low:.3f} to {one.high:.3f}"
        calls = [one.file, f"{one.form} of 4", one.outcome, one.verdict]
        rows.append([*calls, ratio, interval, quality.summary(quality.ATTACKS / f"{one.file}.py")])
        kinds.append("failed" if one.outcome == "BELOW THE BOUND" else "")
    return Table(header, rows, {"attack", "outcome", "verdict", "what it does"}, kinds)


def _minute(time: str) -> str:
    return time[:16].replace("T", " ")
