"""Charts: no text overlaps whatever the names are, and equal charts give equal files."""

import re
import warnings

import matplotlib
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from leaderboard import board, pictures, plot
from leaderboard.plot import Lines, Point, Row, Rows
from tests.support.records import CASES, full, line

NAMES = ["a", "sm90_a_name_that_is_long_" * 8, "<script>alert(1)</script>", "$x^2$ and $y$", "漢字 الحرب", "v" * 200]


def overlaps(drawn: Figure) -> list[tuple[str, str]]:
    """Pairs of texts that overlap, or (text, "") for one that leaves the picture, by matplotlib's own extents."""
    with matplotlib.rc_context(plot.STYLE), warnings.catch_warnings(action="ignore"):
        canvas = FigureCanvasAgg(drawn)
        canvas.draw()
        (axes,) = drawn.axes
        texts = list(drawn.texts)
        for axis, place in ((axes.xaxis, 0), (axes.yaxis, 1)):
            lo, hi = sorted(axis.get_view_interval())
            texts += [one for one in axis.get_ticklabels() if lo <= one.get_position()[place] <= hi]
        texts += [said for legend in drawn.legends for said in legend.get_texts()]
        boxes = [(one.get_text(), one.get_window_extent(canvas.get_renderer())) for one in texts if one.get_text()]
    whole = drawn.bbox
    bad = [(said, "") for said, box in boxes if box.x0 < whole.x0 - 1 or box.x1 > whole.x1 + 1]
    for number, (one, box) in enumerate(boxes):
        for other, its in boxes[number + 1 :]:
            wide, high = min(box.x1, its.x1) - max(box.x0, its.x0), min(box.y1, its.y1) - max(box.y0, its.y0)
            bad += [(one, other)] if min(wide, high) > 0.5 else []
    return bad


def boards(names: list[str]) -> board.Board:
    records = [one for n, name in enumerate(names) for one in full(name, 1.1 + n)]
    (found,) = board.build(records, "box", {("nvfp4_gemv", "sm90"): CASES})
    return found


def test_charts_of_odd_names_have_no_overlapping_text():
    one = boards(NAMES)
    cases = [f"{name}={name} n={n}" for n, name in enumerate(NAMES)]
    rows = [Row(case, [Point(1.0), Point(0.9, series=1)], said="median 12.34 us") for case in cases]
    over = Lines([f"{n:07x}\n2026-01-02" for n in range(300)], [(name, [(0, 1.0), (299, 1e6)]) for name in NAMES], "y")
    for drawn in (pictures.by_variant(one), pictures.by_case(one), Rows(rows, ("a", "b"), "time " * 20), over):
        assert drawn and overlaps(plot.draw(drawn)) == []


@pytest.mark.parametrize("values", [[1.0, 1.0], [1e-12, 1e18], [3.0, 29.0], [0.5, 7.0]])
def test_axis_fits_its_values(values):
    drawn = plot.draw(Rows([Row(f"row {n}", [Point(value)]) for n, value in enumerate(values)], ("x",), "us"))
    (axes,) = drawn.axes
    assert axes.get_xscale() == ("log" if max(values) / min(values) >= 10 else "linear")
    assert overlaps(drawn) == [] and axes.get_xlim()[0] < min(values) <= max(values) < axes.get_xlim()[1]


def test_equal_charts_give_equal_files_and_few_points_none(tmp_path):
    times = [one for n in range(pictures.MOST_ROWS + 3) for one in full(f"v{n}", 1 + n / 9)]
    (one,) = board.build([one | {"case": one["case"] | {"order": "random"}} for one in times], "box", {})
    drawn = pictures.by_case(one)
    assert [len(found.rows) for found in (pictures.by_variant(one), drawn)] == [pictures.MOST_ROWS, 3]
    assert all("order" not in row.label for row in drawn.rows) and len(drawn.names) == plot.MOST_SERIES
    assert plot.inline(drawn, "", "x", tmp_path / "a.svg") == plot.inline(drawn, "", "x", tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    two, three = (Rows([Row("a", [Point(1.0)] * count)], ("x",), "us") for count in (2, 3))
    assert [plot.is_worth_drawing(one) for one in (None, two, three)] == [False, False, True]
    points = [("a", [(0, 1.0), (1, 2.0)])]
    assert [plot.is_worth_drawing(Lines(x, points, "us")) for x in (["1", "2"], ["1", "2", "3"])] == [False, True]


def test_chart_on_a_page_is_themed_and_says_what_it_shows(tmp_path):
    shown = pictures.by_case(boards(["<script>", "b"]))
    svg = plot.inline(shown, pictures.said_of(shown), "key", tmp_path / "a.svg")
    assert "<script" not in svg and "&lt;script&gt;" in svg
    assert not re.search(r"#(?!key-)", svg), "every colour is the theme's"
    assert svg.count('role="img"') == 1 and "time of a call, us, median with 95 % interval. m=7168" in svg
    ids = re.findall(r'\sid="([^"]+)"', svg)
    assert len(ids) == len(set(ids)) and all(one.startswith("key-") for one in ids)


def test_only_whole_right_runs_are_points_of_a_history():
    later = {"run": "r2", "minute": 2}
    failed = [*full("wrong", 0.5, **later), line("test", "wrong", status="INCORRECT", **later)]
    again = [one | {"superseded": True} for one in full("a", 0.1, **later)]
    records = [*full("a", 1.0), *failed, *full("half", 0.5, **later)[:2], *again, *full("a#2", 0.1, **later)]
    records += full("a", 0.9, **later, commit="f" * 40)
    (found,) = board.build(records, "box", {("nvfp4_gemv", "sm90"): CASES})
    drawn = pictures.history(found, records)
    ((name, points),) = drawn.series
    assert name == "a" and drawn.x == ["0123456\n2026-01-02", "fffffff\n2026-01-02"]
    assert [place for place, _ in points] == [0, 1] and points[1][1] == pytest.approx(points[0][1] * 0.9)
