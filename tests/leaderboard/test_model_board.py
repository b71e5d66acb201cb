"""The share of the speed of light in records of kind latency: that of the replayed graph."""

import math

import pytest

from leaderboard import model_board, pictures
from leaderboard.provenance import Provenance
from leaderboard.tables import Table
from tests.support.records import line

CASE = {"config": "small", "format": "bf16", "batch": 1, "context": 512}


def of(**more) -> dict:
    """A latency record of a step: eager it took 8000 us, as a graph 4000, and least 1000."""
    known = {"case": CASE, "eager_us": 8000.0, "median_us": 4000.0, "sol_us": 1000.0, "launches": {"graph": 7}}
    return line("latency", "composed", problem="model") | known | more


def rows(table: Table) -> list[dict[str, str]]:
    return [dict(zip(table.header, row, strict=True)) for row in table.rows]


@pytest.mark.parametrize(("more", "share"), [({}, 0.25), ({"eager_us": None}, 0.25), ({"sol_us": 3000.0}, 0.75)])
def test_share_is_of_the_graphs_time(more, share):
    assert model_board.share(of(**more)) == share
    assert rows(model_board.table([of(**more)], Provenance()))[0]["% of SOL"] == f"{100 * share:.0f} %"
    (row,) = model_board.leaders({"model, sm90, on box": [of(**more)]}, Provenance())
    assert row[3] == f"{100 * share:.0f} % of SOL"
    for missing in ({"median_us": None}, {"median_us": 0.0}, {"sol_us": None}):
        assert math.isnan(model_board.share(of(**missing)))


def test_leaders_have_a_model_once_and_no_step_that_failed():
    none = {"median_us": None, "eager_us": None, "sol_us": None, "launches": None}
    one = of(case=CASE | {"config": "x"}, status="UNSUPPORTED", reason="no memory", **none)
    assert rows(model_board.table([one], Provenance()))[0]["state"] == "UNSUPPORTED: no memory"
    cases = [CASE, CASE | {"context": 4096}, CASE | {"kernels": "choose=reference"}, CASE | {"format": "nvfp4"}]
    records = [one, *(of(case=case, median_us=2000.0 + i) for i, case in enumerate(cases))]
    found = model_board.leaders({"model, sm90, on box": records}, Provenance())
    assert [(row[0], row[2]) for row in found] == [
        ("model, sm90, small, bf16, a token", "2,000 us"),
        ("model, sm90, small, nvfp4, a token", "2,003 us"),
    ]


def test_a_model_that_gpus_share_has_a_section_with_the_time_of_each():
    one = of(case=CASE | {"gpus": 2}, gpus={"median_us": [4000.0, 4100.0]})
    alone, shared = model_board.steps([of(), one], "box").items()
    assert shared == (alone[0].replace(", on box", ", the whole model, on box"), [one])
    assert rows(model_board.table([one], Provenance()))[0]["each GPU us"] == "4,000 / 4,100"


def test_prefill_has_tokens_a_second_and_no_graph():
    one = of(case=CASE | {"context": 0, "new": 2048}, median_us=4096.0, launches={"eager": 9})
    found = rows(model_board.table([one, of()], Provenance()))
    assert [row["tokens/s"] for row in found] == ["500,000", "250"]
    assert found[0]["launches"] == "9"
    assert math.isnan(model_board.graph_us(one)) and model_board.graph_us(of()) == 4000.0
    assert not model_board.leaders({"model, sm90, on box": [one]}, Provenance())


def test_breakdown_shows_time_by_op():
    parts = {f"op{n}": {"us": 100.0 - n, "launches": 2} for n in range(9)} | {"": {"us": 5.0, "launches": 1}}
    one = of(breakdown={"ops": parts, "kernels": {}, "span_us": 1000.0, "gaps_us": 231.0})
    found = rows(model_board.breakdown([one, of()]))
    assert len(found) == 10 and found[0]["% of step"] == "10 %" and found[-1]["op"] == model_board.OUTSIDE
    shown = pictures.components([one, of(case=CASE | {"batch": 8})])
    assert shown.names == ["op0", "op1", "op2", "op3", "op4", "other ops", model_board.OUTSIDE, model_board.GAPS]
    (row,) = shown.rows
    assert [point.x for point in row.points] == [100.0, 99.0, 98.0, 97.0, 96.0, 95.0 + 94 + 93 + 92, 5.0, 231.0]
    assert row.marks == [1000.0]
    assert "op0 100" in pictures.said_of(shown) and pictures.components([of()]) is None
