"""What the pictures show: a board by variant and by case, its history, a variant's samples, the model, the judge.

Each function returns a plot for leaderboard/plot.py, or None where there is nothing to draw, and a text says the same
for who cannot see it.
"""

import math
from collections.abc import Iterable, Sequence

import pandas as pd

from harness.results import ranking, text
from leaderboard import model_board, plot, tables, trend
from leaderboard.board import Board, rows_of
from leaderboard.checks import Check
from leaderboard.plot import Bars, DotPlot, Dots, Lines, Point, Strips

MOST_LINES = 60  # variants in one picture; the table has all
BASELINES = 2  # series kept for baselines, where there are more variants than series
NAME = 60  # characters of a name


def name(said: object) -> str:
    return text.line(said, NAME)


def by_variant(board: Board) -> DotPlot | None:
    """Each variant's metric with its interval, and its roofline; the fastest on top."""
    found = list(rows_of(board.standing[board.standing.geomean_us.notna()]))
    kinds = [1 if one.baseline else 0 if not pd.isna(one.rank) else 2 for one in found]  # positions in `names`
    lines = []
    for one, kind in zip(found[:MOST_LINES], kinds, strict=False):
        label = name(one.variant) if pd.isna(one.rank) else f"{one.rank}. {name(one.variant)}"
        rooflines = [one.geomean_us * one.roofline_share] if one.roofline_share > 0 else []
        said = f"{tables.us(one.geomean_us)} us"
        said += f", {tables.percent(one.roofline_share)} of roofline" if rooflines else ""
        lines.append(Dots(label, [Point(one.geomean_us, one.lo_us, one.hi_us, kind)], rooflines, said))
    if not lines:
        return None
    names = ("ranked", "baseline, not ranked", "from another run, not ranked")[: max(kinds) + 1]  # one needs no legend
    cases = text.counted(len(board.cases), "case")
    about = f"{board.metric} of the times of a call over {cases}, us, with 95 % interval"
    return DotPlot(lines, names, about, "measured roofline", frozenset({1}))


def by_case(board: Board) -> DotPlot | None:
    """A line a case, with the time of each of the first variants, its interval and the measured roofline."""
    shown = series(board)
    own, _ = ranking.apart(board.cases)
    cells = {(one.variant, one.case): one for one in rows_of(board.times[board.times.base])}
    lines = []
    for case in board.cases:
        its = [(number, cells[variant, case]) for number, variant in enumerate(shown) if (variant, case) in cells]
        points = [Point(one.median_us, one.lo_us, one.hi_us, number) for number, one in its if one.median_us > 0]
        rooflines = sorted(one.roofline_us for _, one in its if one.roofline_us > 0)
        lines.append(Dots(own[case], points, rooflines[len(rooflines) // 2 :][:1]))
    if not any(line.points for line in lines):
        return None
    names, axis = [name(variant) for variant in shown], "time of a call, us, median with 95 % interval"
    return DotPlot(lines, names, axis, "measured roofline", _baselines(board, shown))


def _baselines(board: Board, shown: Sequence[str]) -> frozenset[int]:
    known = set(board.standing[board.standing.baseline.astype(bool)].variant)
    return frozenset(number for number, variant in enumerate(shown) if variant in known)


def timed(board: Board) -> set[str]:
    """The variants with a time in the base run."""
    return set(board.times[board.times.base & board.times.median_us.notna()].variant)


def series(board: Board) -> list[str]:
    """The variants of the base run that are drawn by case: the first of the board, and the first baselines."""
    shown = board.standing[board.standing.variant.isin(timed(board))]
    baselines = list(shown[shown.baseline.astype(bool)].variant)[:BASELINES]
    others = list(shown[~shown.baseline.astype(bool)].variant)[: plot.MOST_SERIES - len(baselines)]
    return [variant for variant in shown.variant if variant in {*others, *baselines}]


def history(board: Board, points: Sequence[trend.Timing]) -> Lines | None:
    """The metric of the drawn variants over the commits at which they were timed."""
    places = trend.commits(points)
    shown = [variant for variant in series(board) if any(point.variant == variant for point in points)]
    found = [(name(one), [(places[p.commit][0], p.us) for p in points if p.variant == one]) for one in shown]
    labels, axis = [label for _, label in places.values()], f"{board.metric} of the times, us, by commit"
    return Lines(labels, found, axis, baselines=_baselines(board, shown)) if found else None


def speed_up(points: Sequence[trend.Timing]) -> Lines | None:
    """The fastest so far against the first correct version, over the commits."""
    broken, places = trend.records_broken(points), trend.commits(points)
    if not broken:
        return None
    best = [(places[one.commit][0], broken[0].us / one.us) for one in broken]
    last = len(places) - 1
    best += [(last, best[-1][1])] if best[-1][0] < last else []
    labels = [label for _, label in places.values()]
    return Lines(labels, [("fastest so far", best)], "speed-up over the first correct version, by commit", steps=True)


def samples(records: Iterable[dict]) -> Strips | None:
    """Every scored time of a variant, by case and process, relative to the case's median."""
    found = [one for one in records if one.get("samples_us") and (one.get("median_us") or 0) > 0]
    own, _ = _apart(found)
    lines = []
    for one in found:
        groups = [[us / one["median_us"] for us in group if us > 0] for group in one["samples_us"]]
        label, median = own[ranking.case_label(one["case"])], f"median {tables.us(one['median_us'])} us"
        lines.append((label, [group for group in groups if group], median))
    axis = "time of a call / the case's median; a row of ticks is a process, in turns of two colours"
    return Strips(lines, axis) if any(groups for _, groups, _ in lines) else None


def steps(records: Sequence[dict]) -> DotPlot | None:
    """Time of a decode step of each case: as a graph, eager, and at the speed of light."""
    own, _ = _apart(records)
    lines = []
    for one in records:
        times = [model_board.number(one.get(key)) for key in ("median_us", "eager_us")]
        sol = model_board.number(one.get("sol_us"))
        points = [Point(us, series=number) for number, us in enumerate(times) if us > 0]
        said = f"{tables.us(times[0])} us" if times[0] > 0 else ""
        lines.append(Dots(own[ranking.case_label(one["case"])], points, [sol] if sol > 0 else [], said))
    axis = "time of a decode step, us, median by the host's clock; at the right: as a CUDA graph"
    return DotPlot(lines, ("CUDA graph", "eager"), axis, "speed of light") if any(x.points for x in lines) else None


def components(records: Sequence[dict]) -> Bars | None:
    """Where the time of a step of each case goes: the ops that take most in the records together, and the rest."""
    own, _ = _apart(records)
    found = {own[ranking.case_label(one["case"])]: (model_board.components(one), one) for one in records}
    found = {label: (parts, one) for label, (parts, one) in found.items() if parts}
    rest = (model_board.OUTSIDE, model_board.GAPS)
    names = {name for parts, _ in found.values() for name in parts if name not in rest}
    share = {name: max(parts.get(name, 0.0) / sum(parts.values()) for parts, _ in found.values()) for name in names}
    longest = sorted(names, key=lambda name: -share[name])[: plot.MOST_SERIES - len(rest) - 1]
    lines = []
    for label, (parts, one) in found.items():
        others = sum(parts.get(name, 0.0) for name in names.difference(longest))
        values = [*(parts.get(name, 0.0) for name in longest), others, *(parts.get(name, 0.0) for name in rest)]
        sol = model_board.number(one.get("sol_us"))
        lines.append((label, values, [sol] if sol > 0 else [], f"{tables.us(sum(values))} us"))
    axis = "time of a decode step on the GPU by op, us, by the driver's records"
    return Bars(lines, [*longest, "other ops", *rest], axis, "speed of light") if lines else None


def op_times(check: Check) -> DotPlot | None:
    """The time of each op in a decode step, the longest on top."""
    longest = sorted(check.ops_us.items(), key=lambda item: -item[1])
    lines = [Dots(name(op), [Point(us)], said=f"{tables.us(us)} us") for op, us in longest if us > 0]
    return DotPlot(lines, ("time",), "time of an op's calls in one decode step, us") if lines else None


def layer_errors(check: Check) -> DotPlot | None:
    """The error of each layer by itself and of a free pass, with their budgets; a layer without an error has no dot."""
    lines = []
    for layer in check.layers:
        found = [(n, x) for n, x in enumerate((layer.alone, layer.drift)) if x is not None and x > 0]
        budgets = [x for x in (layer.alone_budget, layer.drift_budget) if x is not None and x > 0]
        if found:
            lines.append(Dots(f"after {name(layer.after)}", [Point(x, series=n) for n, x in found], budgets))
    names = ("the layer by itself", "a free pass")
    return DotPlot(lines, names, "relative error of the hc copies", "budgets of the two") if lines else None


def _apart(records: Sequence[dict]) -> tuple[dict[str, str], str]:
    """ranking.apart of the records' cases."""
    return ranking.apart(list(dict.fromkeys(ranking.case_label(one["case"]) for one in records)))


def model_history(records: Iterable[dict]) -> Lines | None:
    """The time of a step as a graph over the commits, for each case of a model on one machine."""
    found: dict[str, list[tuple[str, float]]] = {}
    labels: dict[str, str] = {}
    for one in sorted(records, key=lambda one: one["time"]):
        us = model_board.number(one.get("median_us"))
        if us > 0:
            commit = (one.get("commit") or "unknown")[: trend.SHORT]
            labels.setdefault(commit, f"{commit}\n{one['time'][:10]}")
            found.setdefault(ranking.case_label(one["case"]), []).append((commit, us))
    places = {commit: place for place, commit in enumerate(labels)}
    own = ranking.apart(list(found))[0] if found else {}
    lines = [(own[case], [(places[commit], us) for commit, us in points]) for case, points in found.items()]
    axis = "time of a decode step as a CUDA graph, us, by commit"
    return Lines(list(labels.values()), lines[: plot.MOST_SERIES], axis) if lines else None


def ratios(found: Sequence[tuple[str, float, float, float]], axis: str) -> DotPlot | None:
    """Ratios with their intervals around 1. found: (label, ratio, low, high)."""
    lines = [Dots(label, [Point(ratio, lo, hi)], said=f"{ratio:.3f}") for label, ratio, lo, hi in found if ratio > 0]
    return DotPlot(lines, ("ratio",), axis, at=1.0) if lines else None


def said_of(shown: plot.Plot) -> str:
    """The picture in words: what kind it is, and its values."""
    if isinstance(shown, DotPlot):
        said = [f"{one.label}: {', '.join(_point(shown, p) for p in one.points) or 'no time'}" for one in shown.lines]
        return f"Dot plot, {shown.axis}. " + "; ".join(said)
    if isinstance(shown, Bars):
        said = []
        for label, values, *_ in shown.lines:
            parts = zip(shown.names, values, strict=True)
            said.append(f"{label}: " + ", ".join(f"{what} {plot.short(round(us, 1))}" for what, us in parts if us > 0))
        return f"Stacked bars, {shown.axis}. " + "; ".join(said)
    if isinstance(shown, Lines):
        said = [f"{what}: {', '.join(plot.short(round(y, 4)) for _, y in points)}" for what, points in shown.series]
        return f"Line chart, {shown.axis}, {len(shown.x)} commits. " + "; ".join(said)
    said = [f"{label}: {sum(map(len, groups))} samples, {about}" for label, groups, about in shown.lines]
    return f"Strip plot, {shown.axis}. " + "; ".join(said)


def _point(shown: DotPlot, point: Point) -> str:
    what = f"{shown.names[point.series]} " if len(shown.names) > 1 else ""
    interval = f" ({point.lo:.4g} to {point.hi:.4g})" if math.isfinite(point.lo) else ""
    return f"{what}{point.x:.4g}{interval}"
