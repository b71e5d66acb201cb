"""Pictures: no text overlaps in either form, whatever the names are; the width has a bound, and axes fit."""

import re
import warnings

import matplotlib
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from leaderboard import board, pages, pictures, plot, report, trend
from leaderboard.plot import DotPlot, Dots, Lines, Point, Strips
from tests.support.marks import first
from tests.support.records import CASES, bench, full

NAMES = ["a", "sm90_a_name_that_is_long_" * 8, "<script>alert(1)</script>", "$x^2$ and $y$", "漢字 الحرب", "v" * 200]
WIDTHS = (plot.WIDE, plot.NARROW)


def overlaps(drawn: Figure) -> list[tuple[str, str]]:
    """Pairs of texts that overlap, or (text, "") for one that leaves the picture, by matplotlib's own extents."""
    with matplotlib.rc_context(plot.STYLE), warnings.catch_warnings(action="ignore"):
        canvas = FigureCanvasAgg(drawn)
        canvas.draw()
        boxes = [(one.get_text(), one.get_window_extent(canvas.get_renderer())) for one in drawn.texts]
    whole = drawn.bbox
    bad = [(said, "") for said, box in boxes if box.x0 < whole.x0 - 1 or box.x1 > whole.x1 + 1]
    boxes.sort(key=lambda found: found[1].y0)
    for number, (one, box) in enumerate(boxes):
        for other, its in boxes[number + 1 :]:
            if its.y0 >= box.y1:
                break
            if min(box.x1, its.x1) - max(box.x0, its.x0) > 0.5 and min(box.y1, its.y1) - max(box.y0, its.y0) > 0.5:
                bad.append((one, other))
    return bad


def boards(names: list[str]) -> board.Board:
    records = [one for n, name in enumerate(names) for one in full(name, 1.1 + n)]
    (found,) = board.build(records, "box", {("nvfp4_gemv", "sm90"): CASES})
    return found


def committed() -> list[plot.Plot]:
    """Every picture of the committed records."""
    shown = pages.read(report.RESULTS, ["nvidia-h200"], [])
    found = []
    for one in shown.boards:
        points = trend.timings(one, shown.records["nvidia-h200"])
        found += [pictures.by_variant(one), pictures.by_case(one), pictures.history(one, points)]
        found.append(pictures.speed_up(points))
    for records in shown.steps.values():
        found += [pictures.steps(records), pictures.model_history(records), pictures.components(records)]
    return [one for one in found if one]


@pytest.mark.parametrize("width", first(reversed(WIDTHS)))
def test_pictures_of_committed_records_have_no_overlapping_text(width):
    found = committed()
    assert len(found) >= 10
    for one in found:
        assert overlaps(plot.draw(one, width)) == [], pictures.said_of(one)


@pytest.mark.parametrize("width", WIDTHS)
def test_pictures_of_odd_names_have_no_overlapping_text(width):
    one = boards(NAMES)
    cases = [f"{name}={name} n={n}" for n, name in enumerate(NAMES)]
    strips = Strips([(case, [[1.0, 1.1], [0.9]], "median 12.34 us") for case in cases], "time " * 30)
    lines = Lines([f"{n:07x}\n2026-01-02" for n in range(300)], [(name, [(0, 1.0), (299, 1e6)]) for name in NAMES], "y")
    for drawn in (pictures.by_variant(one), pictures.by_case(one), strips, lines):
        assert drawn and overlaps(plot.draw(drawn, width)) == []


@pytest.mark.parametrize("values", [[1.0, 1.0], [1e-12, 1e18], [3.0, 29.0], [0.5, 7.0], [1e6, 1.0000001e6]])
def test_axis_fits_its_values(values):
    drawn = plot.draw(DotPlot([Dots(f"line {n}", [Point(value)]) for n, value in enumerate(values)], ("x",), "us"), 336)
    said = [one.get_text() for one in drawn.texts]
    assert overlaps(drawn) == [] and any("(log axis)" in one for one in said) == (max(values) / min(values) >= 10)
    ticks = [one for one in said if re.fullmatch(r"[\d.e+-]+[kM]?", one)]
    assert len(ticks) >= 1 and len(set(ticks)) == len(ticks)


def test_equal_records_give_equal_files_and_shared_fields_are_dropped(tmp_path):
    times = [one for n in range(pictures.MOST_LINES + 3) for one in full(f"v{n}", 1 + n / 9)]
    (one,) = board.build([one | {"case": one["case"] | {"order": "random"}} for one in times], "box", {})
    drawn = pictures.by_case(one)
    assert [len(found.lines) for found in (pictures.by_variant(one), drawn)] == [pictures.MOST_LINES, 3]
    assert all("order" not in line.label for line in drawn.lines) and len(drawn.names) == plot.MOST_SERIES
    before = [file.read_bytes() for file in plot.write(drawn, tmp_path, "x")]
    assert [file.read_bytes() for file in plot.write(drawn, tmp_path, "x")] == before


def test_picture_on_a_page_is_themed_and_says_what_it_shows():
    shown = pictures.by_case(boards(["<script>", "b"]))
    svg = plot.inline(shown, pictures.said_of(shown), "key")
    assert "<script" not in svg and "&lt;script&gt;" in svg
    assert "#" not in re.sub(r"(href=\"|url\()#key-(wide|narrow)-", "", svg), "every colour is the theme's"
    assert svg.count('role="img"') == 2 and svg.count('aria-label="Dot plot, time of a call') == 2
    ids = re.findall(r'\sid="([^"]+)"', svg)
    assert len(ids) == len(set(ids)) and all(one.startswith("key-") for one in ids)


def test_samples_are_relative_to_the_median():
    one = bench("a", 0, 10.0) | {"samples_us": [[9.0, 10.0, 11.0]] * 200}
    assert pictures.samples([one]).lines[0][1][0] == [0.9, 1.0, 1.1]
    assert pictures.samples([one | {"samples_us": None}]) is None and pictures.samples([]) is None
