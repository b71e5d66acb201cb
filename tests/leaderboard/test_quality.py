"""What is known of the judge: read from experiments, pairs and attacks; what is none of these is named."""

import json

import pytest

from leaderboard import pages, quality, report
from leaderboard.quality import Attack

RATIO = {"ratio": 1.02, "ci95": [1.01, 1.03], "word": "SLOWER"}
EVEN = {"ratio": 1.0, "ci95": [0.995, 1.005], "word": "SAME"}
WIDE = {"ratio": 1.0, "ci95": [0.9, 1.1], "word": "SAME"}
COMPARED = {
    "kind": "comparison",
    "problem": "p",
    "case": {"n": 1},
    "time": "2026-01-02T03:04:05Z",
    "plan": {"processes": 12},
    "slowed_by_cycles": 535,
}


def read(tmp_path, lines: list[str]) -> quality.Quality:
    folder = tmp_path / "box" / quality.FOLDER
    folder.mkdir(parents=True)
    (folder / "x.jsonl").write_text("\n".join(lines))
    return quality.read(tmp_path, ["box"], [])


def test_the_committed_experiments_and_attacks_are_read():
    shown = pages.read(report.RESULTS, ["nvidia-h200"], [])
    found = quality.read(report.RESULTS, ["nvidia-h200"], shown.boards)
    same = [one for one in found.comparisons if not one.planted]
    assert found.complaints == [] and len(same) >= 40 and len(found.loops) >= 3 and len(found.attacks) >= 200
    assert not {"FASTER", "SLOWER"} & set(quality.counts(same))
    assert any(one.time.startswith("20261121T060502") for one in same), "the run that paired a variant with itself"
    assert {one.outcome for one in found.attacks} == {"refused", "honest time"}
    assert all(quality.summary(one) for one in found.attacks)


def test_old_words_mean_what_they_mean_today(tmp_path):
    lines = [COMPARED | {"a/b": EVEN, "s/a": RATIO}, COMPARED | {"a/b": WIDE}, {"kind": "other"}]
    found = read(tmp_path, list(map(json.dumps, lines)))
    assert [(one.planted, one.word) for one in found.comparisons] == [
        ("", "SAME"),
        ("535 cycles", "SLOWER"),
        ("", "UNDECIDED"),
    ]
    assert quality.by_plan(found.comparisons)["", "12"] == {"SAME": 1, "UNDECIDED": 1}


@pytest.mark.parametrize(
    "bad", ["[", "3", json.dumps({"kind": "comparison"}), json.dumps(COMPARED | {"a/b": EVEN | {"ratio": "x"}})]
)
def test_a_line_that_is_none_is_named_and_left_out(tmp_path, bad):
    found = read(tmp_path, [bad, json.dumps(COMPARED | {"a/b": EVEN})])
    assert len(found.comparisons) == 1 and len(found.complaints) == 1
    assert found.complaints[0].startswith("box/judge/x.jsonl:1: ")


@pytest.mark.parametrize(
    ("verdict", "low", "outcome"),
    [
        ("INCORRECT", None, "refused"),
        ("PASSED", None, "not timed"),
        ("PASSED", 0.96, "honest time"),
        ("PASSED", 0.95, "BELOW THE BOUND"),
    ],
)
def test_what_became_of_an_attack(verdict, low, outcome):
    assert Attack(file="x", form=0, verdict=verdict, low=low).outcome == outcome
