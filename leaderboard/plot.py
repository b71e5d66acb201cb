"""Pictures as dot plots, stacked bars, lines and strips: at most 1,600 px wide, with text that never overlaps.

Lengths are in px of a picture at its own size. Each picture has two forms, WIDE and NARROW, and the same text in both.
An axis is logarithmic where its values span a decade or more. leaderboard/pictures.py says what is drawn. A figure has
lines and text only, in px, y downwards, and no axes of matplotlib's: these would take ten times as long to draw.
"""

import contextlib
import functools
import io
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Affine2D

from harness.results import text

WIDE, NARROW = 760, 336
DPI = 72  # one unit of an SVG is one px
PNG_DPI = 144  # a WIDE picture has 1,520 pixels
SIZE, SMALL = 12, 11  # of text
PAD = 6
LABEL = 400  # characters of a label; it wraps
# Okabe and Ito's palette, which the common forms of colour blindness tell apart; shapes say it once more. The page
# replaces each colour by the theme's (site/page.css), so no two names may share one.
SERIES = ("#0072b2", "#d55e00", "#009e73", "#a3528a", "#8a6d00", "#2a8fc7", "#5a5f69", "#7f3b08")
COLOURS = {"ink": "#1f2328", "muted": "#59636e", "grid": "#dfe3e8", "paper": "#fefefe", "roofline": "#c0392b"}
COLOURS |= {f"s{number}": colour for number, colour in enumerate(SERIES)}
SHAPES = "oDs^vPX*"
MOST_SERIES = len(SHAPES)
MOST_POINTS = 400  # of a strip; more are thinned evenly
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "svg.fonttype": "none",
    "text.parse_math": False,
    "path.simplify": False,
    "axes.unicode_minus": False,
}
# Ticks of a logarithmic axis, at these multiples of powers of ten: the first choice that fits.
SUBS = (tuple(1 + i / 10 for i in range(0, 90, 2)), (1, 1.5, 2, 3, 4, 6, 8), (1, 2, 5), (1, 3), (1,))


@dataclass(frozen=True)
class Point:
    """A value with its interval, NaN where there is none. series: a position in the plot's names."""

    x: float
    lo: float = math.nan
    hi: float = math.nan
    series: int = 0


@dataclass(frozen=True)
class Dots:
    """A line of a dot plot. marks: positions of short lines, such as a measured roofline; said: text at the right."""

    label: str
    points: Sequence[Point]
    marks: Sequence[float] = ()
    said: str = ""


@dataclass(frozen=True)
class DotPlot:
    """names: of the series; baselines: which of them have hollow shapes; mark: what the short lines are; at: a value
    with a line through the whole plot.
    """

    lines: Sequence[Dots]
    names: Sequence[str]
    axis: str
    mark: str = ""
    baselines: frozenset[int] = frozenset()
    at: float | None = None


@dataclass(frozen=True)
class Bars:
    """Stacked bars. lines: (label, values of the series in order, positions of short lines, text at the right); names:
    of the series, at most MOST_SERIES.
    """

    lines: Sequence[tuple[str, Sequence[float], Sequence[float], str]]
    names: Sequence[str]
    axis: str
    mark: str = ""


@dataclass(frozen=True)
class Lines:
    """Series over positions 0, 1, ... x: a label of each position; series: (name, [(position, value), ...]); steps: a
    value holds until the next.
    """

    x: Sequence[str]
    series: Sequence[tuple[str, Sequence[tuple[int, float]]]]
    axis: str
    steps: bool = False
    baselines: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Strips:
    """Samples by line and process. lines: (label, processes, said)."""

    lines: Sequence[tuple[str, Sequence[Sequence[float]], str]]
    axis: str


Plot = DotPlot | Bars | Lines | Strips


def draw(plot: Plot, width: int) -> Figure:
    """Return the picture, `width` px wide and as high as it needs."""
    with matplotlib.rc_context(STYLE):
        if isinstance(plot, DotPlot):
            return _dot_plot(plot, width)
        if isinstance(plot, Bars):
            return _stacked(plot, width)
        return _lines(plot, width) if isinstance(plot, Lines) else _strips(plot, width)


def write(plot: Plot, folder: Path, stem: str) -> list[Path]:
    """Write STEM.svg and STEM.png, the wide form on paper, into `folder`. Return the files."""
    drawn, files = draw(plot, WIDE), [folder / f"{stem}.svg", folder / f"{stem}.png"]
    files[0].write_text(_svg(drawn, stem), encoding="utf-8")
    with matplotlib.rc_context(STYLE), _any_glyph():
        drawn.savefig(files[1], dpi=PNG_DPI, metadata={"Software": None})
    return files


def inline(plot: Plot, said: str, key: str) -> str:
    """Return both forms as SVG elements for a page, whose style sheet shows one of them, in the theme's colours.

    said: the text for who cannot see it; key: makes the ids, unique on the page.
    """
    forms = ((WIDE, "wide"), (NARROW, "narrow"))
    return "\n".join(
        _element(_svg(draw(plot, width), f"{key}-{name}"), said, f"{key}-{name}", name, width) for width, name in forms
    )


def _element(svg: str, said: str, key: str, name: str, width: int) -> str:
    view = re.search(r'viewBox="([^"]+)"', svg)
    body = svg[svg.index(">", svg.index("<svg")) + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<defs>\s*</defs>", "", body, flags=re.DOTALL)
    body = re.sub(r'(\sid="|href="#|url\(#)', rf"\g<1>{key}-", body)
    body = re.sub(r"font-family: [^;\"]+;? ?", "", body)
    for colour, value in COLOURS.items():
        body = body.replace(value, f"var(--p-{colour})")
    return (
        f'<svg class="plot {name}" role="img" aria-label="{escape(said)}" viewBox="{view[1] if view else ""}" '
        f'style="--w: {width}px" xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">{body}'
    )


def _svg(drawn: Figure, key: str) -> str:
    """Equal records give equal text: no date, no version, no random ids."""
    out = io.StringIO()
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": key}), _any_glyph():
        drawn.savefig(out, format="svg", dpi=DPI, metadata={"Date": None, "Creator": None})
    return out.getvalue()


@contextlib.contextmanager
def _any_glyph() -> Iterator[None]:
    """A name may have letters that matplotlib's font lacks: a browser has them, a PNG shows boxes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph \d+")
        yield


# --- the sheet


class _Sheet:
    """A figure whose coordinates are px, y downwards."""

    def __init__(self, width: int, height: float) -> None:
        self.width = width
        self.figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor=COLOURS["paper"])
        self.px = Affine2D().scale(1 / width, -1 / height).translate(0, 1) + self.figure.transFigure

    def say(self, x: float, y: float, said: str, ha: str = "left", size: int = SIZE, colour: str = "ink") -> None:
        """Text around (x, y), centred in y."""
        if said:
            how: dict[str, Any] = {"transform": self.px, "ha": ha, "va": "center_baseline", "color": COLOURS[colour]}
            self.figure.text(x, y, said, size=size, parse_math=False, **how)

    def line(self, x: Sequence[float], y: Sequence[float], colour: str, lw: float = 1, **how: Any) -> None:
        """A line through these points, with gaps at NaN."""
        self.figure.add_artist(Line2D(x, y, transform=self.px, color=COLOURS[colour], linewidth=lw, **how))

    def bars(self, x: Iterable[float], top: float, bottom: float, colour: str, lw: float = 1, **how: Any) -> None:
        """Vertical lines at these places, as one line with gaps: a tenth of the size of as many lines."""
        places = [part for value in x for part in (value, value, math.nan)]
        if places:
            self.line(places, [top, bottom, math.nan] * (len(places) // 3), colour, lw, **how)

    def shapes(self, x: Sequence[float], y: Sequence[float], series: int, hollow: bool) -> None:
        colour = f"s{series % MOST_SERIES}"
        how: dict[str, Any] = {"marker": SHAPES[series % MOST_SERIES], "markersize": 6.5, "markeredgewidth": 1.3}
        face = COLOURS["paper" if hollow else colour]
        self.line(x, y, colour, linestyle="none", markerfacecolor=face, **how)


@dataclass(frozen=True)
class _Scale:
    """From values within (lo, hi) to px within (start, end)."""

    lo: float
    hi: float
    log: bool
    start: float
    end: float

    def __call__(self, value: float) -> float:
        lo, hi, at = (math.log(x) if self.log else x for x in (self.lo, self.hi, value))
        return self.start + (self.end - self.start) * (at - lo) / (hi - lo)

    def ticks(self) -> list[float]:
        """The most ticks whose labels keep apart along x."""
        shown: list[float] = []
        for most in range(max(2, int((self.end - self.start) / 45)), 1, -1):
            shown = ticks(self.lo, self.hi, self.log, most)
            halves = [wide(said, SMALL) / 2 for said in labels(shown)]
            pairs = zip(shown, shown[1:], halves, halves[1:], strict=False)
            if all(self(b) - self(a) > half + other + 8 for a, b, half, other in pairs):
                return shown
        return shown[:1]


def scale(values: Iterable[float], start: float, end: float) -> _Scale:
    """A scale with some room around the values."""
    values = [value for value in values if math.isfinite(value)]
    log = is_log(values)
    lo, hi = min(values, default=1.0), max(values, default=1.0)
    if log:
        room = (hi / lo) ** 0.04
        return _Scale(lo / room, hi * room, True, start, end)
    room = 0.05 * (hi - lo) or 0.05 * abs(hi) or 1.0
    return _Scale(lo - room, hi + room, False, start, end)


@functools.lru_cache(maxsize=20_000)
def wide(said: str, size: int = SIZE) -> float:
    """px of a text on one line."""
    with _any_glyph():
        font = get_font(findfont(STYLE["font.family"]))
        font.set_size(size, DPI)
        font.set_text(said, 0)
        return font.get_width_height()[0] / 64 + 1


def wrapped(said: str, room: float, size: int = SIZE) -> list[str]:
    """The text in lines of at most `room` px, broken between words, and within a word that is longer."""
    lines = [""]
    for word in text.line(said, LABEL).split():
        while wide(word, size) > room:
            cut = max(1, int(len(word) * room / wide(word, size)))
            while cut > 1 and wide(word[:cut], size) > room:
                cut -= 1
            lines, word = [*lines, word[:cut]], word[cut:]
        joined = f"{lines[-1]} {word}".strip()
        lines = [*lines[:-1], joined] if wide(joined, size) <= room else [*lines, word]
    return [line for line in lines if line] or [""]


def legend(names: Sequence[str], mark: str, width: int) -> tuple[list[tuple[float, float, int, str]], float]:
    """-> ((x, y, series or -1 for the mark, text) of each item, height), flowed over lines."""
    items = [(number, name) for number, name in enumerate(names)] + ([(-1, mark)] if mark else [])
    placed, x, y = [], float(PAD), 10.0
    for series, name in items:
        for part, line in enumerate(wrapped(name, width - 2 * PAD - 18)):
            if x > PAD and (part or x + 18 + wide(line) > width - PAD):
                x, y = PAD, y + 18
            placed.append((x, y, series if not part else -2, line))
            x += 18 + wide(line) + 16
    return placed, y + 12 if items else 0.0


def _legend(sheet: _Sheet, placed: Iterable[tuple[float, float, int, str]], hollow: frozenset[int]) -> None:
    for x, y, series, name in placed:
        if series >= 0:
            sheet.shapes([x + 6], [y], series, series in hollow)
        elif series == -1:
            sheet.bars([x + 6], y - 6, y + 6, "roofline", 2)
        sheet.say(x + 18, y, name)


# --- axes


def is_log(values: Iterable[float]) -> bool:
    """Whether positive values span a decade or more."""
    values = [value for value in values if math.isfinite(value)]
    return bool(values) and min(values) > 0 and max(values) / min(values) >= 10


def ticks(lo: float, hi: float, log: bool, most: int) -> list[float]:
    """At most `most` round values within [lo, hi]."""
    most = max(most, 2)
    if log:
        for subs in SUBS:
            if len(found := _between(lo, hi, subs)) <= most:
                return found if len(found) >= 2 else _linear(lo, hi, most)
        found = _between(lo, hi, (1,))
        return found[:: math.ceil(len(found) / most)]
    return _linear(lo, hi, most)


def _linear(lo: float, hi: float, most: int) -> list[float]:
    found = [float(value) for value in MaxNLocator(nbins=most, steps=[1, 2, 5, 10]).tick_values(lo, hi)]
    return [value for value in found if lo <= value <= hi][:most]


def _between(lo: float, hi: float, subs: tuple[float, ...]) -> list[float]:
    """The values sub * 10^n within [lo, hi]."""
    decades = range(math.floor(math.log10(lo)), math.ceil(math.log10(hi)) + 1)
    return [value for n in decades for sub in subs if lo <= (value := float(f"{sub:g}e{n}")) <= hi]


def short(value: float, digits: int = 6) -> str:
    """A number in at most so many digits: 20, 1.5k, 3M."""
    for unit, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.{digits}g}{letter}"
    return f"{value:.{digits}g}"


def labels(values: Sequence[float]) -> list[str]:
    """The ticks' labels, with as many digits as tell them apart."""
    said: list[str] = []
    for digits in range(6, 17):
        said = [short(value, digits) for value in values]
        if len(set(said)) == len(said):
            break
    return said


def _axis(name: str, x: _Scale, width: int) -> list[str]:
    return wrapped(f"{name} (log axis)" if x.log else name, width - 2 * PAD, SMALL)


def _x_axis(sheet: _Sheet, axis: Sequence[str], x: _Scale, bottom: float) -> list[float]:
    """Write the ticks' labels and the axis's name below. -> px of the ticks."""
    shown = x.ticks()
    for value, said in zip(shown, labels(shown), strict=True):
        half = wide(said, SMALL) / 2 + PAD
        at = min(max(x(value), half), sheet.width - half)
        sheet.say(at, bottom + 12, said, "center", SMALL, "muted")
    for number, line in enumerate(axis):
        sheet.say(PAD, bottom + 30 + 16 * number, line, size=SMALL, colour="muted")
    return [x(value) for value in shown]


# --- the three kinds


@dataclass(frozen=True)
class _Bands:
    """The lines of a plot: their labels stand at the left of the data, or above it where they are long. heights: px."""

    above: bool
    left: float
    right: float
    labels: list[list[str]]
    band: float

    @property
    def heights(self) -> list[float]:
        return [(17 * len(label) + 2 if self.above else 0) + self.band for label in self.labels]

    def label(self, sheet: _Sheet, number: int, y: float, said: str) -> float:
        """Write the texts of a line whose top is at y. -> the middle of its data."""
        middle = y + self.heights[number] - self.band / 2
        for place, line in enumerate(self.labels[number]):
            sheet.say(PAD, y + 10 + 17 * place if self.above else middle, line)
        sheet.say(sheet.width - PAD, y + 10 if self.above else middle, said, "right", colour="muted")
        return middle


def _bands(labels: Sequence[str], said: Sequence[str], width: int, band: float) -> _Bands:
    right = max(map(wide, said), default=0.0)
    widest = max(map(wide, labels), default=0.0)
    if PAD + widest + 14 <= 0.34 * width:
        end = width - PAD - (right + 12 if right > 1 else 6)
        return _Bands(False, PAD + widest + 14, end, [[label] for label in labels], band)
    room = width - 2 * PAD - (right + 16 if right > 1 else 0)
    return _Bands(True, PAD + 8, width - PAD - 8, [wrapped(label, room) for label in labels], band)


def _dot_plot(plot: DotPlot, width: int) -> Figure:
    several = max(1, max((len({p.series for p in one.points}) for one in plot.lines), default=1))
    step = 9 if several > 1 else 0
    bands = _bands([x.label for x in plot.lines], [x.said for x in plot.lines], width, max(22, step * several + 8))
    mark = plot.mark if any(one.marks for one in plot.lines) else ""
    placed, top = legend(plot.names if len(plot.names) > 1 else (), mark, width)
    values = [v for one in plot.lines for p in one.points for v in (p.x, p.lo, p.hi)]
    values += [mark for one in plot.lines for mark in one.marks] + ([] if plot.at is None else [plot.at])
    x = scale(values, bands.left, bands.right)
    axis, bottom = _axis(plot.axis, x, width), top + sum(bands.heights) + 4
    sheet = _Sheet(width, bottom + 28 + 16 * len(axis))
    _legend(sheet, placed, plot.baselines)
    shown, y = _x_axis(sheet, axis, x, bottom), top
    for number, (one, height) in enumerate(zip(plot.lines, bands.heights, strict=True)):
        middle = bands.label(sheet, number, y, one.said)
        ends = (middle - bands.band / 2 + 2, middle + bands.band / 2 - 2)
        sheet.bars(shown, *ends, "grid")
        sheet.line([bands.left, bands.right], [middle if several == 1 else y + height - 0.5] * 2, "grid")
        sheet.bars([] if plot.at is None else [x(plot.at)], *ends, "muted")
        sheet.bars(map(x, one.marks), ends[0] + 1, ends[1] - 1, "roofline", 2)
        order = sorted({point.series for point in one.points})
        for point in one.points:
            at = middle + step * (order.index(point.series) - (len(order) - 1) / 2)
            if point.lo <= point.hi:
                sheet.line([x(point.lo), x(point.hi)], [at, at], f"s{point.series % MOST_SERIES}", 2)
            sheet.shapes([x(point.x)], [at], point.series, point.series in plot.baselines)
        y += height
    return sheet.figure


def _stacked(plot: Bars, width: int) -> Figure:
    bands = _bands([label for label, *_ in plot.lines], [said for *_, said in plot.lines], width, 24)
    placed, top = legend(plot.names, plot.mark if any(marks for _, _, marks, _ in plot.lines) else "", width)
    ends = [sum(values) for _, values, _, _ in plot.lines] + [at for _, _, marks, _ in plot.lines for at in marks]
    x = scale([0.0, *ends], bands.left, bands.right)
    axis, bottom = _axis(plot.axis, x, width), top + sum(bands.heights) + 4
    sheet = _Sheet(width, bottom + 28 + 16 * len(axis))
    _legend(sheet, placed, frozenset())
    shown, y = _x_axis(sheet, axis, x, bottom), top
    for number, ((_, values, marks, said), height) in enumerate(zip(plot.lines, bands.heights, strict=True)):
        middle = bands.label(sheet, number, y, said)
        sheet.bars(shown, middle - 10, middle + 10, "grid")
        start = 0.0
        for series, value in enumerate(values):
            if value > 0:
                places = [x(start), x(start + value)]
                sheet.line(places, [middle] * 2, f"s{series % MOST_SERIES}", 13, solid_capstyle="butt")
            start += max(value, 0.0)
        sheet.bars(map(x, marks), middle - 10, middle + 10, "roofline", 2)
        y += height
    return sheet.figure


def _strips(plot: Strips, width: int) -> Figure:
    bands = _bands([label for label, _, _ in plot.lines], [said for _, _, said in plot.lines], width, 30)
    x = scale((v for _, groups, _ in plot.lines for group in groups for v in group), bands.left, bands.right)
    axis, y = _axis(plot.axis, x, width), 4.0
    bottom = y + sum(bands.heights)
    sheet = _Sheet(width, bottom + 28 + 16 * len(axis))
    shown = _x_axis(sheet, axis, x, bottom)
    for number, ((_, groups, said), height) in enumerate(zip(plot.lines, bands.heights, strict=True)):
        middle = bands.label(sheet, number, y, said)
        sheet.bars(shown, middle - 13, middle + 13, "grid")
        sheet.line([bands.left, bands.right], [y + height - 0.5] * 2, "grid")
        every = max(1, math.ceil(sum(map(len, groups)) / MOST_POINTS))
        for place, group in enumerate(groups):
            at, half = middle + 22 * ((place + 0.5) / len(groups) - 0.5), max(1.5, 9 / len(groups))
            sheet.bars(map(x, group[::every]), at - half, at + half, f"s{place % 2}", 1.4, alpha=0.7)
        y += height
    return sheet.figure


def _lines(plot: Lines, width: int) -> Figure:
    placed, top = legend([name for name, _ in plot.series] if len(plot.series) > 1 else (), "", width)
    bottom = top + 220
    y = scale((value for _, points in plot.series for _, value in points), bottom, top)
    axis = _axis(plot.axis, y, width)
    y, title = _Scale(y.lo, y.hi, y.log, bottom + 16 * len(axis), top + 16 * len(axis) + 12), top + 8
    shown = ticks(y.lo, y.hi, y.log, 7)
    left = PAD + max((wide(said, SMALL) for said in labels(shown)), default=0) + 10
    sheet = _Sheet(width, y.start + 46)
    _legend(sheet, placed, plot.baselines)
    for number, line in enumerate(axis):
        sheet.say(PAD, title + 16 * number, line, size=SMALL, colour="muted")
    room = max(1, len(plot.x) - 1)
    x = _Scale(-0.03 * room, 1.03 * room, False, left, width - 14)
    for value, said in zip(shown, labels(shown), strict=True):
        sheet.line([x.start, x.end], [y(value)] * 2, "grid")
        sheet.say(left - 6, y(value), said, "right", SMALL, "muted")
    for series, (_, points) in enumerate(plot.series):
        at, us = [x(place) for place, _ in points], [y(value) for _, value in points]
        sheet.line(at, us, f"s{series % MOST_SERIES}", 1.6, drawstyle="steps-post" if plot.steps else "default")
        sheet.shapes(at, us, series, series in plot.baselines)
    _x_labels(sheet, plot.x, x, y.start)
    return sheet.figure


def _x_labels(sheet: _Sheet, labels: Sequence[str], x: _Scale, bottom: float) -> None:
    """As many as fit, the last among them; a label may have two lines."""
    taken = float(sheet.width)
    for number in reversed(range(len(labels))):
        lines = labels[number].split("\n")
        half = max(wide(line, SMALL) for line in lines) / 2
        at = min(max(x(number), half + PAD), sheet.width - half - PAD)
        if at + half > taken:
            continue
        for place, line in enumerate(lines):
            sheet.say(at, bottom + 14 + 16 * place, line, "center", SMALL, "muted")
        taken = at - half - 10
