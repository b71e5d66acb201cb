"""What the charts show: leaders, a board by variant and by case, its history, the model.

Each function returns a chart for leaderboard/plot.py, or None where there is nothing to draw. `said_of` says the same
for who cannot see it.
"""

import collections
from collections.abc import Iterable, Mapping, Sequence

import pandas as pd

from harness.results import ranking, text
from leaderboard import model_board, plot, tables
from leaderboard.board import Board, number, rows_of
from leaderboard.plot import Lines, Point, Row, Rows

MOST_ROWS = 60  # variants in one picture; the table has all
SHORT = 7  # characters of a commit; records of old runs have no more


def leaders(boards: Iterable[Board]) -> Rows | None:
    """The share of the roofline of each board's leader, and of the fastest baseline."""
    rows = []
    for board in boards:
        first = tables.first_of(board)
        if first is None or not first.roofline_share > 0:
            continue
        points, ratio = [Point(100 * first.roofline_share)], first.baseline_ratio
        points += [Point(100 * first.roofline_share / ratio, series=1)] if ratio > 0 else []
        label = f"{ratio:.2f}x baseline" if ratio > 0 else ""
        rows.append(Row(f"{board.problem}, {board.machine}", points, said=label))
    names = ("leader", "fastest baseline, of the cases that it serves")
    axis = "% of the measured roofline, geomean over the cases"
    return Rows(rows, names, axis, at=0.0) if rows else None


def by_variant(board: Board) -> Rows | None:
    """Each variant's metric with its interval, and its roofline; the fastest on top."""
    shown = list(rows_of(board.standing[board.standing.geomean_us.notna()]))[:MOST_ROWS]
    rows, kinds = [], [1 if row.baseline else 0 if not pd.isna(row.rank) else 2 for row in shown]
    for row, kind in zip(shown, kinds, strict=True):
        label = row.variant if pd.isna(row.rank) else f"{row.rank}. {row.variant}"
        rooflines = [row.geomean_us * row.roofline_share] if row.roofline_share > 0 else []
        point = Point(row.geomean_us, row.lo_us, row.hi_us, kind)
        rows.append(Row(label, [point], rooflines, f"{text.us(row.geomean_us)} us"))
    names = ("ranked", "baseline, not ranked", "from another run, not ranked")[: max(kinds, default=0) + 1]
    cases = text.counted(len(board.cases), "case")
    axis = f"{board.metric} of the times of a call over {cases}, us, with 95 % interval"
    return Rows(rows, names, axis, mark="measured roofline") if rows else None


def by_case(board: Board) -> Rows | None:
    """A row a case, with the time of each of the first variants, its interval and the measured roofline."""
    shown = series(board)
    own, _ = ranking.apart(board.cases)
    cells = {(cell.variant, cell.case): cell for cell in rows_of(board.times[board.times.base])}
    rows = []
    for case in board.cases:
        its = [(number, cells[variant, case]) for number, variant in enumerate(shown) if (variant, case) in cells]
        points = [Point(cell.median_us, cell.lo_us, cell.hi_us, number) for number, cell in its if cell.median_us > 0]
        rooflines = sorted(cell.roofline_us for _, cell in its if cell.roofline_us > 0)
        rows.append(Row(own[case], points, rooflines[len(rooflines) // 2 :][:1]))
    axis = "time of a call, us, median with 95 % interval"
    return Rows(rows, shown, axis, mark="measured roofline") if any(row.points for row in rows) else None


def series(board: Board) -> list[str]:
    """The variants of the base run that are drawn by case: the first of the board."""
    timed = set(board.times[board.times.base & board.times.median_us.notna()].variant)
    return [variant for variant in board.standing.variant if variant in timed][: plot.MOST_SERIES]


def history(board: Board, records: Iterable[dict]) -> Lines | None:
    """The metric of the drawn variants in each run in which one was right and timed on all cases of the board, over
    the commits. records: of the board's machine.
    """
    of_board = [record for record in records if (record["problem"], record["target"]) == (board.problem, board.target)]
    judged = [record for record in of_board if record["kind"] in ranking.JUDGED and not record.get("superseded")]
    wrong = {(rec["variant"], rec["run_id"]) for rec in judged if rec["status"] not in ("PASSED", "UNSUPPORTED")}
    runs: dict[tuple[str, str], dict[str, dict]] = {}
    for record in ranking.timed(of_board):
        key = record["variant"], record["run_id"]
        if record["status"] == "PASSED" and (record.get("median_us") or 0) > 0 and key not in wrong:
            runs.setdefault(key, {})[ranking.case_label(record["case"])] = record
    points = []
    for (variant, _), by_label in runs.items():
        if board.cases and set(board.cases) <= set(by_label):
            us = ranking.metric(board.metric, [by_label[case]["median_us"] for case in board.cases])
            points.append((variant, by_label[board.cases[0]], us))
    return _over_commits(points, series(board), f"{board.metric} of the times, us, by commit")


def _over_commits(points: Iterable[tuple[str, dict, float]], names: Iterable[str], axis: str) -> Lines | None:
    """A line for each of the series `names`. points: of each its series, a record of it and us, the oldest first. A
    commit has the day of its first run. Times of different runs are not paired, so large changes show only.
    """
    commits: dict[str, str] = {}
    lines: dict[str, list[tuple[int, float]]] = {name: [] for name in names}
    for name, record, us in points:
        commit = (record.get("commit") or "unknown")[:SHORT]
        commits.setdefault(commit, f"{commit}\n{record['time'][:10]}")
        if name in lines:
            lines[name].append((list(commits).index(commit), us))
    shown = [(name, line) for name, line in lines.items() if line]
    return Lines(list(commits.values()), shown, axis) if shown else None


def components(records: Sequence[dict]) -> Rows | None:
    """Where the time of a decode step of each case goes: the ops that take most in the records together, and the rest.
    A prefill takes so much longer that it has no room beside them.
    """
    own, records = _own(records), [record for record in records if "new" not in record["case"]]
    by_label = {own[ranking.case_label(record["case"])]: (model_board.components(record), record) for record in records}
    by_label = {label: (parts, record) for label, (parts, record) in by_label.items() if parts}
    rest = (model_board.OUTSIDE, model_board.GAPS)
    names = {name for parts, _ in by_label.values() for name in parts if name not in rest}
    share = {name: max(parts.get(name, 0.0) / sum(parts.values()) for parts, _ in by_label.values()) for name in names}
    longest = sorted(names, key=lambda name: -share[name])[: plot.MOST_SERIES - len(rest) - 1]
    rows = []
    for label, (parts, record) in by_label.items():
        others = sum(parts.get(name, 0.0) for name in names.difference(longest))
        values = [*(parts.get(name, 0.0) for name in longest), others, *(parts.get(name, 0.0) for name in rest)]
        sol, points = number(record.get("sol_us")), [Point(us, series=n) for n, us in enumerate(values)]
        rows.append(Row(label, points, [sol] if sol > 0 else [], f"{text.us(sum(values))} us"))
    axis = "time of a decode step on the GPU by op, us, by the driver's records"
    return Rows(rows, [*longest, "other ops", *rest], axis, True, "speed of light") if rows else None


def _own(records: Sequence[dict]) -> dict[str, str]:
    """By case what it has for itself among the records."""
    return ranking.apart(list(dict.fromkeys(ranking.case_label(record["case"]) for record in records)))[0]


def model_history(title: str, records: Mapping[str, Iterable[dict]]) -> Lines | None:
    """The step's time as a graph over the commits, of a model's cases timed most often. records: by machine."""
    machine = title.partition(", on ")[2]
    of_model = (record for record in records[machine] if model_board.title(record, machine) == title)
    timed = [rec for rec in sorted(of_model, key=lambda rec: rec["time"]) if number(rec.get("median_us")) > 0]
    own = _own(timed)
    points = [(own[ranking.case_label(record["case"])], record, record["median_us"]) for record in timed]
    most = [name for name, _ in collections.Counter(name for name, *_ in points).most_common(plot.MOST_SERIES)]
    return _over_commits(points, most, "time of a decode step as a CUDA graph, us, by commit")


def said_of(chart: plot.Chart) -> str:
    """The chart in words: what it shows, and its values."""
    if isinstance(chart, Lines):
        lines = [f"{name}: {', '.join(f'{y:.5g}' for _, y in points)}" for name, points in chart.series]
    else:
        named = [[f"{chart.names[point.series]} {point.x:.4g}" for point in row.points] for row in chart.rows]
        lines = [f"{row.label}: {', '.join(points)}" for row, points in zip(chart.rows, named, strict=True)]
    return text.clean(f"Chart of {chart.axis}. {'; '.join(lines)}")
