"""The share of the speed of light in latency records: that of the replayed graph."""

import math

import pytest

from leaderboard import latency
from leaderboard.provenance import Provenance
from tests.support.records import line

CASE = {"config": "small", "format": "bf16", "batch": 1, "context": 512}


def of(**more) -> dict:
    """A latency record of a step: eager it took 8000 us, as a graph 4000, and least 1000."""
    known = {"case": CASE, "eager_us": 8000.0, "median_us": 4000.0, "sol_us": 1000.0, "launches": {"graph": 7}}
    return line("latency", "composed", problem="model") | known | more


@pytest.mark.parametrize(
    ("more", "share"),
    [({}, 0.25), ({"median_us": 2000.0}, 0.5), ({"eager_us": 1.0}, 0.25), ({"eager_us": None}, 0.25),
     ({"sol_us": 3000.0}, 0.75)],
)  # fmt: skip
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
