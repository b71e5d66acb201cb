"""What is known of the judge: read from attacks and pairs; what is neither is named."""

import json

import pytest

from leaderboard import quality
from leaderboard.quality import CLOCK, Attack

PAIR = {"kind": "same", "problem": "p", "gpu": "g", "commit": "c", "processes": 8, "us": 101.0, "ratio": 1.0}
PAIR |= {"word": "SAME", "clock": CLOCK}


def read(tmp_path, *lines: object) -> quality.Quality:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in lines))
    return quality.read(tmp_path / "none", pairs)


def test_read_takes_committed_attacks_and_pairs():
    found = quality.read()
    assert found.complaints == [] and len(found.attacks) >= 180 and {one.clock for one in found.pairs} == {CLOCK}
    assert {one.outcome for one in found.attacks} == {"refused", "honest time"}
    assert all(row[-1] for row in quality.attacks_table(found.attacks).rows)
    assert 50 * sum(group["wrong"] for group in found.groups()) <= len(found.pairs)  # of intervals of 99 %


def test_pairs_are_grouped_by_what_was_planted(tmp_path):
    longer = PAIR | {"kind": "longer", "word": "SLOWER", "ratio": 1.01}
    other = PAIR | {"kind": "slowed_in_one_process"}
    lines = [longer, longer | {"word": "FASTER"}, longer | {"word": None, "ratio": None, "us": None}, other]
    found = read(tmp_path, *lines, PAIR, PAIR | {"clock": "an old one"}, PAIR | {"word": "SLOWER"})
    equal, planted = found.groups()
    assert [[one[name] for name in ("planted", "pairs", "right", "wrong", "failed")] for one in (equal, planted)] == [
        [0, 2, 1, 1, 0],
        [pytest.approx(0.01), 3, 1, 1, 1],
    ]
    assert planted["ratios"] == "1.0100 to 1.0100" and found.complaints == []


@pytest.mark.parametrize("bad", ["[", "3", PAIR | {"ratio": "x"}, {"kind": "same"}])
def test_read_names_malformed_lines(tmp_path, bad):
    found = read(tmp_path, bad, PAIR)
    assert len(found.pairs) == 1 and len(found.complaints) == 1
    assert found.complaints[0].startswith("pairs.jsonl:1: ")


def test_outcome_of_an_attack():
    cases = [("INCORRECT", None), ("PASSED", None), ("PASSED", 0.96), ("PASSED", 0.95)]
    outcomes = [Attack(file="x", form=0, verdict=verdict, low=low).outcome for verdict, low in cases]
    assert outcomes == ["refused", "not timed", "honest time", "BELOW THE BOUND"]
