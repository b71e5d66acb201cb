"""What is known of the judge: read from experiments, pairs and attacks; what is none of these is named."""

import json

import pytest

from leaderboard import pages, quality, report
from leaderboard.quality import Attack

RATIO = {"ratio": 1.02, "ci95": [1.01, 1.03], "word": "SLOWER"}
EVEN = {"ratio": 1.0, "ci95": [0.995, 1.005], "word": "SAME"}
WIDE = {"ratio": 1.0, "ci95": [0.9, 1.1], "word": "SAME"}
COMPARED = {"kind": "comparison", "problem": "p", "case": {"n": 1}, "time": "2026-01-02T03:04:05Z"}
COMPARED |= {"plan": {"processes": 12}, "slowed_by_cycles": 535}


def read(tmp_path, lines: list[str]) -> quality.Quality:
    folder = tmp_path / "box" / quality.FOLDER
    folder.mkdir(parents=True)
    (folder / "x.jsonl").write_text("\n".join(lines))
    return quality.read(tmp_path, ["box"], [])


def test_read_takes_committed_experiments_and_attacks():
    shown = pages.read(report.RESULTS, ["nvidia-h200"], [])
    found = quality.read(report.RESULTS, ["nvidia-h200"], shown.boards)
    same = [one for one in found.comparisons if not one.planted]
    assert found.complaints == [] and len(same) >= 40 and len(found.loops) >= 3 and len(found.attacks) >= 180
    assert not {"FASTER", "SLOWER"} & set(quality.counts(same))
    assert any(one.time.startswith("20261121T060502") for one in same), "the run that paired a variant with itself"
    assert {one.outcome for one in found.attacks} == {"refused", "honest time"}
    assert all(quality.summary(quality.ATTACKS / f"{one.file}.py") for one in found.attacks)


def test_read_takes_old_words_for_what_they_mean_today(tmp_path):
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
def test_read_names_malformed_lines(tmp_path, bad):
    found = read(tmp_path, [bad, json.dumps(COMPARED | {"a/b": EVEN})])
    assert len(found.comparisons) == 1 and len(found.complaints) == 1
    assert found.complaints[0].startswith("box/judge/x.jsonl:1: ")


def test_outcome_of_an_attack():
    cases = [("INCORRECT", None), ("PASSED", None), ("PASSED", 0.96), ("PASSED", 0.95)]
    outcomes = [Attack(file="x", form=0, verdict=verdict, low=low).outcome for verdict, low in cases]
    assert outcomes == ["refused", "not timed", "honest time", "BELOW THE BOUND"]
