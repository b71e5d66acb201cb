"""Charts, drawn with matplotlib: rows of dots or stacked bars, and lines over commits.

leaderboard/pictures.py makes charts from records. A page has them as SVG in the theme's colours. One unit of an SVG and
of the axes' y is a px. A value axis is logarithmic where its values span a decade or more. Names are cut to the room
that they have.
"""

import functools
import io
import math
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from harness.results import text

WIDTH = 920  # px
DPI = 72
SIZE = 12  # of text
LOW = 44  # px below the rows, for the axis
LEAST = 3  # points of a chart that a page shows
# Okabe and Ito's palette, which the common forms of colour blindness tell apart; shapes say it once more. The page
# replaces each colour by the theme's (site/page.css), so no two names may share one.
SERIES = ("#0072b2", "#d55e00", "#009e73", "#a3528a", "#8a6d00", "#2a8fc7", "#5a5f69", "#7f3b08")
COLOURS = {"ink": "#1f2328", "muted": "#59636e", "grid": "#dfe3e8", "paper": "#fefefe", "roofline": "#c0392b"}
COLOURS |= {f"s{number}": colour for number, colour in enumerate(SERIES)}
SHAPES = "oDs^vPX*"
MOST_SERIES = len(SHAPES)
STYLE: dict[Any, Any] = {"font.family": "DejaVu Sans", "font.size": SIZE, "svg.fonttype": "none"}
STYLE |= {"text.parse_math": False, "axes.unicode_minus": False}
MUTED: dict[str, Any] = {"color": COLOURS["muted"], "va": "bottom"}


@dataclass(frozen=True)
class Point:
    """A value with its interval, NaN where there is none. series: a position in the chart's names."""

    x: float
    lo: float = math.nan
    hi: float = math.nan
    series: int = 0


@dataclass(frozen=True)
class Row:
    """marks: positions of short lines, such as a measured roofline; said: text at the right."""

    label: str
    points: Sequence[Point]
    marks: Sequence[float] = ()
    said: str = ""


@dataclass(frozen=True)
class Rows:
    """stacked: bars in the order of the points in place of dots; names: of the series; mark: what the short lines are;
    at: a value with a line through all rows.
    """

    rows: Sequence[Row]
    names: Sequence[str]
    axis: str
    stacked: bool = False
    mark: str = ""
    at: float | None = None


@dataclass(frozen=True)
class Lines:
    """Series over positions 0, 1, ... x: a label of each position; series: (name, [(position, value), ...])."""

    x: Sequence[str]
    series: Sequence[tuple[str, Sequence[tuple[int, float]]]]
    axis: str


Chart = Rows | Lines


def is_worth_drawing(chart: Chart | None) -> bool:
    """Whether a chart has enough points to show more than its numbers do."""
    if isinstance(chart, Lines):
        return len(chart.x) >= LEAST
    return chart is not None and sum(len(row.points) for row in chart.rows) >= LEAST


def inline(chart: Chart, label: str, key: str, file: Path) -> str:
    """Write the picture to `file` as SVG. Return it as an element for a page, in the theme's colours. Equal charts give
    equal text. label: the text for who cannot see it; key: makes the ids, unique on the page.
    """
    out = io.StringIO()
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": key}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph \d+")  # a browser has letters that matplotlib's font lacks
        draw(chart).savefig(out, format="svg", dpi=DPI, metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    file.write_text(svg, encoding="utf-8")
    view = re.search(r'viewBox="([^"]+)"', svg)
    body = svg[svg.index(">", svg.index("<svg")) + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<defs>\s*</defs>", "", body, flags=re.DOTALL)
    body = re.sub(r'(\sid="|href="#|url\(#)', rf"\g<1>{key}-", body)
    body = re.sub(r"font: 12px 'DejaVu Sans';? ?", "", body)
    for colour, value in COLOURS.items():
        body = body.replace(value, f"var(--p-{colour})")
    return (
        f'<svg class="plot" role="img" aria-label="{escape(label)}" viewBox="{view[1] if view else ""}" '
        f'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">{body}'
    )


def draw(chart: Chart) -> Figure:
    """Return the picture, WIDTH px wide and as high as it needs."""
    with matplotlib.rc_context(STYLE):
        return _lines(chart) if isinstance(chart, Lines) else _rows(chart)


@functools.lru_cache(maxsize=20_000)
def wide(line: str) -> float:
    """px of a text on one line."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph \d+")
        font = get_font(findfont(STYLE["font.family"]))
        font.set_size(SIZE, DPI)
        font.set_text(line, 0)
        return 1.02 * font.get_width_height()[0] / 64 + 1


def fit(line: str, room: float) -> str:
    """A text on one line of at most `room` px, cut with an ellipsis where it is longer."""
    line = text.line(line, 200)
    whole = line
    while line and wide(shown := line if line == whole else line + "…") > room:
        line = line[: min(len(line) - 1, int(len(line) * room / wide(shown)))]
    return line if line == whole else line + "…"


def _figure(height: float, left: float, right: float, top: float, bottom: float) -> tuple[Figure, Axes]:
    """A figure with axes within these margins, in px, whose grid lies behind."""
    figure = Figure(figsize=(WIDTH / DPI, height / DPI), dpi=DPI, facecolor=COLOURS["paper"])
    place = (left / WIDTH, bottom / height, (WIDTH - left - right) / WIDTH, (height - top - bottom) / height)
    axes = figure.add_axes(place, facecolor="none")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelcolor=COLOURS["muted"], pad=6)
    axes.set_axisbelow(True)
    return figure, axes


def _legend(names: Sequence[str], mark: str = "", square: bool = False) -> tuple[Any, float]:
    """-> (what draws the legend into a figure, its height in px)."""
    labels = [*(names if len(names) > 1 else ()), *[mark] * bool(mark)]
    room = max((min(wide(label), WIDTH - 50) for label in labels), default=1)
    columns = max(1, int(WIDTH / (room + 42)))
    how: dict[str, Any] = {"ncols": columns, "frameon": False, "labelcolor": COLOURS["ink"], "handletextpad": 0.3}
    how |= {"borderaxespad": 0, "borderpad": 0.2, "columnspacing": 1.2, "handlelength": 1.4, "labelspacing": 0.4}
    how |= {"loc": "upper left", "bbox_to_anchor": (0.003, 1)}

    def draw_into(figure: Figure) -> None:
        items = [Line2D([], [], **_shape(n, square)) for n in range(len(labels) - bool(mark))]
        line: dict[str, Any] = {"marker": "|", "markersize": 12, "markeredgewidth": 2, "color": COLOURS["roofline"]}
        items += [Line2D([], [], linestyle="none", **line)] * bool(mark)
        figure.legend(items, [fit(label, room) for label in labels], **how)

    return draw_into, 19 * math.ceil(len(labels) / columns) + 10 if labels else 4


def _shape(series: int, square: bool = False) -> dict[str, Any]:
    colour = COLOURS[f"s{series % MOST_SERIES}"]
    how: dict[str, Any] = {"marker": "s" if square else SHAPES[series % MOST_SERIES], "markersize": 7, "color": colour}
    return how | {"markeredgewidth": 1.4, "linestyle": "none"}


def _value_axis(axes: Axes, along: Literal["x", "y"], values: Iterable[float], px: float) -> None:
    """Set limits and ticks of the axis of values, px long."""
    values = [value for value in values if math.isfinite(value)] or [1.0]
    lo, hi, log = min(values), max(values), is_log(values)
    axis = axes.xaxis if along == "x" else axes.yaxis
    axes.set(**{f"{along}scale": "log" if log else "linear"})
    most = max(2, int(px / (70 if along == "x" else 35)))
    if log:
        room, decades = (hi / lo) ** 0.04, math.log10(hi / lo)
        subs = (1, 2, 5) if 3 * decades <= most else (1, 3) if 2 * decades <= most else (1,)
        axis.set_major_locator(LogLocator(subs=subs, numticks=most))
    else:
        room = 0.05 * (hi - lo) or 0.05 * abs(hi) or 1.0
        axis.set_major_locator(MaxNLocator(nbins=most, steps=[1, 2, 5, 10]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.set(**{f"{along}lim": (lo / room, hi * room) if log else (lo - room, hi + room)})
    axes.grid(axis=along, color=COLOURS["grid"], linewidth=1)


def _rows(chart: Rows) -> Figure:
    lanes = max((len({point.series for point in row.points}) for row in chart.rows), default=1)
    band = 26 if chart.stacked else max(22, 9 * lanes + 10)
    widest = max((wide(text.line(row.label, 200)) for row in chart.rows), default=0) + 20
    above = widest > 0.45 * WIDTH  # then a row's texts stand above its data
    left, right, head = (20, 20, 18) if above else (widest, max(wide(row.said) for row in chart.rows) + 18, 0)
    mark = chart.mark if any(row.marks for row in chart.rows) else ""
    legend, top = _legend(chart.names, mark, chart.stacked)
    high = len(chart.rows) * (band + head)
    values = [v for row in chart.rows for v in _extent(row, chart.stacked)] + ([] if chart.at is None else [chart.at])
    figure, axes = _figure(top + high + LOW, left, right, top, LOW)
    legend(figure)
    _value_axis(axes, "x", values, WIDTH - left - right)
    axes.set_ylim(high, 0)
    axes.yaxis.set_major_locator(NullLocator())
    figure.text(8 / WIDTH, 6 / (top + high + LOW), chart.axis + " (log axis)" * is_log(values), **MUTED)
    if chart.at is not None:
        axes.axvline(chart.at, color=COLOURS["muted"], linewidth=1)
    place: dict[str, Any] = {"transform": figure.dpi_scale_trans, "va": "center_baseline"}
    if above:  # the grid must not cross a label
        place["bbox"] = {"facecolor": COLOURS["paper"], "edgecolor": "none", "pad": 1}
    starts = [number * (band + head) for number in range(len(chart.rows))]
    across = axes.get_yaxis_transform()
    axes.hlines(starts[1:], 0, 1, color=COLOURS["grid"], linewidth=1, transform=across)
    for row, start in zip(chart.rows, starts, strict=True):
        y = (LOW + high - start - (13 if above else band / 2)) / DPI
        room = WIDTH - 16 - (wide(row.said) + 12 if row.said else 0) if above else left
        figure.text(8 / DPI, y, fit(row.label, room), color=COLOURS["ink"], **place)
        if row.said:
            figure.text((WIDTH - 8) / DPI, y, row.said, ha="right", color=COLOURS["muted"], **place)
    _data(axes, chart, [start + head + band / 2 for start in starts], band)
    return figure


def is_log(values: Iterable[float]) -> bool:
    """Whether positive values span a decade or more."""
    values = [value for value in values if math.isfinite(value)]
    return bool(values) and min(values) > 0 and max(values) / min(values) >= 10


def _extent(row: Row, stacked: bool) -> list[float]:
    """The values that a row's axis has to show."""
    if stacked:
        return [0.0, sum(point.x for point in row.points), *row.marks]
    return [v for point in row.points for v in (point.x, point.lo, point.hi)] + list(row.marks)


def _data(axes: Axes, chart: Rows, middles: Sequence[float], band: float) -> None:
    """Draw the points and marks of the rows, around y = their middles: an artist a series, which is fast to draw."""
    marks = [(x, middle) for row, middle in zip(chart.rows, middles, strict=True) for x in row.marks]
    by_series: dict[int, list[tuple[Point, float, float]]] = {}  # with y, and where a bar starts
    for row, middle in zip(chart.rows, middles, strict=True):
        order, start = sorted({point.series for point in row.points}), 0.0
        for point in sorted(row.points, key=lambda point: point.series):
            lane = 0 if chart.stacked else order.index(point.series) - (len(order) - 1) / 2
            by_series.setdefault(point.series, []).append((point, middle + 9 * lane, start))
            start += point.x
    for series, placed in by_series.items():
        points, y, starts = zip(*placed, strict=True)
        x, colour = [point.x for point in points], COLOURS[f"s{series % MOST_SERIES}"]
        if chart.stacked:
            axes.barh(y, x, left=starts, height=14, color=colour)
        else:
            axes.hlines(y, [p.lo for p in points], [p.hi for p in points], color=colour, linewidth=2)
            axes.plot(x, y, clip_on=False, **_shape(series))
    low, high = ([y + sign * (band / 2 - 3) for _, y in marks] for sign in (-1, 1))
    axes.vlines([x for x, _ in marks], low, high, color=COLOURS["roofline"], linewidth=2)


def _lines(chart: Lines) -> Figure:
    legend, top = _legend([name for name, _ in chart.series])
    values = [value for _, points in chart.series for _, value in points]
    figure, axes = _figure(top + 280, 56, 40, top + 26, 50)
    legend(figure)
    _value_axis(axes, "y", values, 200)
    figure.text(8 / WIDTH, 263 / (top + 280), chart.axis + " (log axis)" * is_log(values), **MUTED)
    for number, (_, points) in enumerate(chart.series):
        shape: dict[str, Any] = _shape(number) | {"linestyle": "-", "linewidth": 1.6}
        axes.plot([place for place, _ in points], [value for _, value in points], clip_on=False, **shape)
    last = max(1, len(chart.x) - 1)
    axes.set_xlim(-0.02 * last, 1.02 * last)
    axes.tick_params(axis="x", pad=12)
    room = max((wide(line) for label in chart.x for line in label.split("\n")), default=1) + 14
    every = math.ceil(len(chart.x) * room / (WIDTH - 96))
    shown = range(len(chart.x) - 1, -1, -every)
    axes.set_xticks(list(shown), [chart.x[place] for place in shown])
    return figure
