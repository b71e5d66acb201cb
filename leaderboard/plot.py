"""The picture of a board: each variant's time against the measured roofline, case by case."""

import math
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from harness.results import text
from leaderboard import tables
from leaderboard.board import Board

# Okabe and Ito's palette, which the common forms of colour blindness tell apart; hatches say it once more.
RANKED, PEER, OTHER, INK = "#0072B2", "#E69F00", "#B5B5B5", "#222222"
STYLE: dict[Any, Any] = {"font.size": 9, "hatch.linewidth": 0.6, "hatch.color": "#FFFFFF", "axes.edgecolor": "#888888"}
DPI = 150
# Ticks at these multiples of powers of ten: the first choice that gives a panel three to six.
SUBS = ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 6, 8), tuple(1 + i / 10 for i in range(0, 90, 2)))
HEADING = 200  # characters
LABEL_ROOM = 0.62  # share of a panel's log span added on the right, for the figures behind the bars


def write(board: Board, folder: Path) -> Path | None:
    """Write MACHINE_PROBLEM_TARGET.png into `folder`; None, and no file, where the board has no time to show."""
    if not board.times.median_us.notna().any():
        return None
    path = folder / f"{board.machine}_{board.problem}_{board.target}.png"
    with matplotlib.rc_context(STYLE):
        figure = draw(board)
        # No version in the file: equal records give equal bytes with one matplotlib.
        figure.savefig(path, dpi=DPI, metadata={"Software": None})
    return path


def draw(board: Board) -> Figure:
    """One panel per case. A bar runs from the measured roofline, a line, to the time, so on the log axis its length is
    the factor between them; whiskers are 95 % intervals. Variants come in the board's order, fastest first."""
    shown = board.standing[board.standing.variant.isin(board.times.variant)]
    height = 0.34 * len(shown) + 2.0
    width = 2.1 + 3.3 * len(board.cases)
    figure = Figure(figsize=(width, height), facecolor="white")
    panels = figure.subplots(1, len(board.cases), sharey=True, squeeze=False)[0]
    for panel, case in zip(panels, board.cases, strict=True):
        _panel(panel, board, case, list(shown.variant))
    names = [text.picture(name) for name in shown.variant]
    panels[0].set_yticks(range(len(shown)), names)
    panels[0].set_ylim(len(shown) - 0.4, -0.6)  # the first on top
    # Inches to shares of the figure: the title and legend need the same room whatever the number of variants.
    figure.subplots_adjust(left=_margin(names) / width, right=1 - 0.15 / width, wspace=0.07)
    figure.subplots_adjust(top=1 - 0.98 / height, bottom=0.78 / height)
    run = board.run
    gpu = run["environment"].get("cpu" if board.target == "cpu" else "gpu") or board.machine
    left = 0.12 / width
    heading = text.picture(f"{board.problem}, {board.target}", HEADING) + ": time against the measured roofline"
    figure.text(left, 1 - 0.25 / height, heading, weight="bold", size=11)
    about = text.picture(f"{gpu}, run {run['run_id']}, {run['time']}", HEADING)
    figure.text(left, 1 - 0.45 / height, about, color="#555555", size=8)
    corner = (left, 0.02 / height)
    figure.legend(handles=_legend(), loc="lower left", bbox_to_anchor=corner, ncols=4, frameon=False, fontsize=8)
    return figure


def _panel(panel: Axes, board: Board, case: str, variants: list[str]) -> None:
    times = board.times[board.times.case == case].set_index("variant")
    rooflines = times.roofline_us.where(times.base).dropna()
    rooflines = rooflines if len(rooflines) else times.roofline_us.dropna()
    valid = times.median_us.dropna()
    lows = [*valid, *rooflines]
    if not lows:
        panel.set_title(f"{text.picture(case, HEADING)}\nno time", size=9)
        return
    roofline = float(rooflines.median()) if len(rooflines) else None
    lo, hi = min(lows), max(lows)
    start = roofline if roofline else lo / 1.1
    span = max(hi / lo, 1.3)
    left, right = min(lo, start) / span**0.06, lo * span ** (1 + LABEL_ROOM)
    panel.set_xscale("log")
    panel.set_xlim(left, right)
    for position, name in enumerate(variants):
        row = times.loc[name]
        if not row.median_us > 0:
            state = {"MISSING": "not timed"}.get(row.status, row.status)
            panel.text(start * span**0.03, position, state, va="center", size=8, color="#777777", style="italic")
            continue
        colour, hatch = (OTHER, "....") if not row.base else (PEER, "////") if row.baseline else (RANKED, None)
        ends = sorted((start, row.median_us))
        panel.barh(position, ends[1] - ends[0], left=ends[0], height=0.62, color=colour, hatch=hatch, linewidth=0)
        reach = row.median_us
        if row.lo_us > 0 and row.hi_us > 0:
            # The bounds need not straddle a median that another program computed, and errorbar wants lengths.
            whisker = [[max(0.0, row.median_us - row.lo_us)], [max(0.0, row.hi_us - row.median_us)]]
            panel.errorbar(row.median_us, position, xerr=whisker, ecolor=INK, elinewidth=1.1, capsize=2.5, fmt="none")
            reach = max(reach, row.hi_us)
        share = f"  {tables.percent(row.roofline_share)}" if row.roofline_share > 0 else ""
        figures = f"{tables.us(row.median_us)}{share}"
        panel.text(max(reach, start) * span**0.03, position, figures, va="center", size=8, color=INK)
    if roofline:
        panel.axvline(roofline, color=INK, linewidth=1.3, zorder=3)
    kind = text.picture("/".join(sorted(set(times.roofline_kind) - {""})))
    panel.set_title(
        f"{text.picture(case, HEADING)}\n"
        + (f"measured roofline ({kind}) {tables.us(roofline)} us" if roofline else "no measured roofline"),
        size=9,
    )
    _axis(panel)


def _axis(panel: Axes) -> None:
    panel.set_xlabel("us per call (log)")
    panel.tick_params(axis="y", length=0)
    lo, hi = panel.get_xlim()
    ticks = next(ticks for subs in SUBS if 3 <= len(ticks := _between(lo, hi, subs)) <= 6 or subs == SUBS[-1])
    panel.xaxis.set_major_locator(FixedLocator(ticks))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.grid(axis="x", which="major", color="#E4E4E4", linewidth=0.7)
    panel.set_axisbelow(True)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)


def _short(value: float) -> str:
    """A tick's label, short enough for six in a panel: 20, 1.5k, 3M."""
    for unit, letter in ((1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.3g}{letter}"
    return f"{value:.3g}"


def _between(lo: float, hi: float, subs: tuple[float, ...]) -> list[float]:
    """The values sub * 10^n within [lo, hi]."""
    decades = range(math.floor(math.log10(lo)), math.ceil(math.log10(hi)) + 1)
    return [sub * 10.0**n for n in decades for sub in subs if lo <= sub * 10.0**n <= hi]


def _legend() -> list[Patch]:
    reading = (
        "bar: from the measured roofline (line) to the median; whisker: 95 %; figures: us, share of measured roofline"
    )
    return [
        Patch(facecolor=RANKED, label="variant"),
        Patch(facecolor=PEER, hatch="////", label="baseline, unranked"),
        Patch(facecolor=OTHER, hatch="....", label="from another run: not comparable"),
        Patch(facecolor="white", label=reading),
    ]


def _margin(names: list[str]) -> float:
    """Inches left of the first panel: the longest name at 9 points."""
    return 0.25 + 0.078 * max(map(len, names))
