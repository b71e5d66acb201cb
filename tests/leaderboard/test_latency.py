"""The share of the speed of light in latency records: that of the replayed graph."""

import math

import pytest

from leaderboard import latency, pictures, plot
from leaderboard.provenance import Provenance
from tests.support.records import line

CASE = {"config": "small", "format": "bf16", "batch": 1, "context": 512}


def of(**more) -> dict:
    """A latency record of a step: eager it took 8000 us, as a graph 4000, and least 1000."""
    known = {"case": CASE, "eager_us": 8000.0, "median_us": 4000.0, "sol_us": 1000.0, "launches": {"graph": 7}}
    return line("latency", "composed", problem="model") | known | more


@pytest.mark.parametrize(
    ("more", "share"),
    [
        ({}, 0.25),
        ({"median_us": 2000.0}, 0.5),
        ({"eager_us": 1.0}, 0.25),
        ({"eager_us": None}, 0.25),
        ({"sol_us": 3000.0}, 0.75),
    ],
)
def test_the_share_is_of_the_graphs_time(more, share):
    assert latency.share(of(**more)) == share
    header, rows = latency.table([of(**more)], Provenance())
    shown = f"{100 * share:.0f} %"
    assert rows[0][header.index("% of SOL")] == shown
    (row,) = latency.winners({"model, sm90, on box": [of(**more)]}, Provenance())
    assert row[3] == f"{shown} of SOL"


@pytest.mark.parametrize("more", [{"median_us": None}, {"median_us": 0.0}, {"sol_us": None}])
def test_without_the_graphs_time_or_the_least_there_is_no_share(more):
    assert math.isnan(latency.share(of(**more)))


def test_a_step_without_room_is_in_the_table_and_among_no_winners():
    one = of(status="UNSUPPORTED", reason="no memory", median_us=None, eager_us=None, sol_us=None, launches=None)
    header, rows = latency.table([one], Provenance())
    assert rows[0][header.index("state")] == "UNSUPPORTED: no memory"
    assert not latency.winners({"model, sm90, on box": [one]}, Provenance())


def test_a_model_is_among_the_winners_once_by_its_first_context_and_its_own_kernels():
    cases = [CASE, CASE | {"context": 4096}, CASE | {"kernels": "choose=reference"}, CASE | {"format": "nvfp4"}]
    records = [of(case=case, median_us=2000.0 + i) for i, case in enumerate(cases)]
    rows = latency.winners({"model, sm90, on box": records}, Provenance())
    assert [(row[0], row[2]) for row in rows] == [
        ("model, sm90, small, bf16, a token", "2,000 us"),
        ("model, sm90, small, nvfp4, a token", "2,003 us"),
    ]


def test_a_layer_takes_the_difference_of_two_models():
    records = [
        of(case=CASE | {"config": f"flash-{n}l256e", "batch": batch}, median_us=200.0 + n * 50 * batch, sol_us=n * 40.0)
        for n in (4, 8)
        for batch in (1, 2)
    ]
    records += [of(), of(case=CASE | {"config": "flash-4l32e"})]
    header, rows = latency.layers(records)
    found = [dict(zip(header, row, strict=True)) for row in rows]
    assert [(row["config"], row["batch"], row["layers"]) for row in found] == [
        ("flash, 256 experts", "1", "4 and 8"),
        ("flash, 256 experts", "2", "4 and 8"),
    ]
    assert [float(row["us a layer"]) for row in found] == [50.0, 100.0] and found[0]["% of SOL"] == "80 %"


def test_a_prefill_has_tokens_a_second_and_no_graph():
    one = of(case=CASE | {"context": 0, "new": 2048}, median_us=4096.0, launches={"eager": 9})
    header, rows = latency.table([one, of()], Provenance())
    found = [dict(zip(header, row, strict=True)) for row in rows]
    assert [row["tokens/s"] for row in found] == ["500,000", "250"]
    assert found[0]["launches"] == "9" and math.isnan(latency.graph_us(one)) and latency.graph_us(of()) == 4000.0
    assert not latency.winners({"model, sm90, on box": [one]}, Provenance())


def test_where_the_time_goes_is_shown_by_op():
    parts = {f"op{n}": {"us": 100.0 - n, "launches": 2} for n in range(9)} | {"": {"us": 5.0, "launches": 1}}
    one = of(breakdown={"ops": parts, "kernels": {}, "span_us": 1000.0, "gaps_us": 31.0})
    header, rows = latency.breakdown([one, of()])
    assert len(rows) == 10 and dict(zip(header, rows[0], strict=True))["% of step"] == "10 %"
    assert rows[-1][header.index("op")] == latency.OUTSIDE
    shown = pictures.components([one, of(case=CASE | {"batch": 8})])
    assert shown.names == ["op0", "op1", "op2", "op3", "op4", "other ops", latency.OUTSIDE, latency.GAPS]
    ((_, values, marks, _),) = shown.lines
    assert values == [100.0, 99.0, 98.0, 97.0, 96.0, 95.0 + 94 + 93 + 92, 5.0, 31.0] and marks == [1000.0]
    assert "op0 100" in pictures.said_of(shown) and pictures.components([of()]) is None
    for width in (plot.WIDE, plot.NARROW):
        assert not plot.overlaps(plot.draw(shown, width))
