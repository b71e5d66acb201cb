"""Pictures: no text overlaps in either form, whatever the names are; the width has a bound, and axes fit."""

import math
import re

import pytest
from matplotlib import image

from leaderboard import board, pages, pictures, plot, report, trend
from leaderboard.plot import DotPlot, Dots, Lines, Point, Strips
from tests.support.marks import first
from tests.support.records import CASES, bench, full

LONG = "sm90_a_name_that_is_long_" * 8
NAMES = ["a", LONG, "<script>alert(1)</script>", "$x^2$ and $y$", "漢字 الحرب", "v" * 200, " ".join("word" * 9)]
WIDTHS = (plot.WIDE, plot.NARROW)


def boards(names: list[str], **more: object) -> board.Board:
    records = [one for n, name in enumerate(names) for one in full(name, 1.1 + n, **more)]
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
        found += [pictures.steps(records), pictures.model_history(records)]
    return [one for one in found if one]


@pytest.mark.parametrize("width", first(reversed(WIDTHS)))
def test_no_text_overlaps_in_pictures_of_the_committed_records(width):
    found = committed()
    assert len(found) >= 10
    for one in found:
        assert plot.overlaps(plot.draw(one, width)) == [], pictures.said_of(one)


@pytest.mark.parametrize("width", WIDTHS)
def test_no_text_overlaps_whatever_the_names_are(width):
    one = boards(NAMES)
    for drawn in (pictures.by_variant(one), pictures.by_case(one)):
        assert drawn and plot.overlaps(plot.draw(drawn, width)) == []
    cases = [f"{name}={name} n={n}" for n, name in enumerate(NAMES)]
    strips = Strips([(case, [[1.0, 1.1], [0.9]], "median 12.34 us") for case in cases], "time " * 30)
    lines = Lines([f"{n:07x}\n2026-01-02" for n in range(300)], [(name, [(0, 1.0), (299, 1e6)]) for name in NAMES], "y")
    for drawn in (strips, lines):
        assert plot.overlaps(plot.draw(drawn, width)) == []


@pytest.mark.parametrize("values", [[1.0], [1.0, 1.0], [1e-12, 1e18], [3.0, 29.0], [0.5, 7.0], [1e6, 1.0000001e6]])
def test_axes_fit_their_values(values):
    lines = [Dots(f"line {n}", [Point(value)]) for n, value in enumerate(values)]
    for width in WIDTHS:
        drawn = plot.draw(DotPlot(lines, ("x",), "us"), width)
        assert plot.overlaps(drawn) == []
        said = [one.get_text() for one in drawn.texts]
        assert any("(log axis)" in one for one in said) == (max(values) / min(values) >= 10)
        ticks = [one for one in said if re.fullmatch(r"[\d.e+-]+[kM]?", one)]
        assert len(ticks) >= 1 and len(set(ticks)) == len(ticks)


def test_an_overlap_and_a_text_outside_are_found():
    drawn = plot.draw(DotPlot([Dots("a line", [Point(1.0)])], ("x",), "us"), plot.WIDE)
    assert plot.overlaps(drawn) == []
    first = drawn.texts[0]
    drawn.text(*first.get_position(), "on top", transform=first.get_transform())
    drawn.text(0.99, 0.5, "beyond the edge")
    found = plot.overlaps(drawn)
    assert any("on top" in pair for pair in found) and ("beyond the edge", "") in found


def test_fields_that_all_cases_share_are_dropped_and_a_board_of_many_variants_is_narrow(tmp_path):
    times = [one for n in range(pictures.MOST_LINES + 3) for one in full(f"v{n}", 1 + n / 9)]
    records = [one | {"case": one["case"] | {"order": "random"}} for one in times]
    (one,) = board.build(records, "box", {})
    drawn = [pictures.by_variant(one), pictures.by_case(one)]
    assert [len(found.lines) for found in drawn] == [pictures.MOST_LINES, 3]
    assert all("order" not in line.label for line in drawn[1].lines) and len(drawn[1].names) == plot.MOST_SERIES
    for number, found in enumerate(drawn):
        _, png = plot.write(found, tmp_path, str(number))
        assert image.imread(png).shape[1] <= 1600


def test_equal_records_give_equal_files(tmp_path):
    files = [plot.write(pictures.by_case(boards(["a", "b"])), tmp_path, "x") for _ in range(2)]
    first = [file.read_bytes() for file in files[0]]
    plot.write(pictures.by_case(boards(["a", "b"])), tmp_path, "x")
    assert [file.read_bytes() for file in files[0]] == first
    assert b"<script" not in first[0]


def test_a_picture_on_a_page_is_themed_and_says_what_it_shows():
    shown = pictures.by_case(boards(["<script>", "b"], baseline=False))
    svg = plot.inline(shown, pictures.said_of(shown), "key")
    assert "<script" not in svg and "&lt;script&gt;" in svg
    assert "#" not in re.sub(r"(href=\"|url\()#key-(wide|narrow)-", "", svg), "every colour is the theme's"
    assert svg.count('role="img"') == 2 and svg.count('aria-label="Dot plot, time of a call') == 2
    ids = re.findall(r'\sid="([^"]+)"', svg)
    assert len(ids) == len(set(ids)) and all(one.startswith("key-") for one in ids)


def test_samples_are_thinned_and_relative():
    one = bench("a", 0, 10.0) | {"samples_us": [[9.0, 10.0, 11.0]] * 200}
    shown = pictures.samples([one])
    assert shown and [value for group in shown.lines[0][1] for value in group][:3] == [0.9, 1.0, 1.1]
    assert sum(len(group[:: math.ceil(600 / plot.MOST_POINTS)]) for group in shown.lines[0][1]) <= plot.MOST_POINTS
    assert pictures.samples([one | {"samples_us": None}]) is None and pictures.samples([]) is None
