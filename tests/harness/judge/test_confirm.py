"""How a first place is confirmed, on made-up sessions."""

import json
import shutil

import pytest

from harness.judge import judging, phases
from harness.judge.outcome import Outcome
from harness.judge.verdict import Result
from harness.problem.folders import Case, Submission
from harness.results import environment, record
from harness.results.ranking import Leader
from tests.support.recorded import SOURCE, Stop, better, first, judge, records


def confirmed() -> list[dict]:
    return [r for r in records() if r.get("confirms")]


def test_the_first_entry_needs_no_confirmation(world, folder):
    assert judge(folder, "--variant", "good") == 0
    assert confirmed() == [] and world.measured == {"good": 1} and first()[0] == "good"


def test_a_new_first_place_is_measured_again_in_pairs_with_the_old_one(world, folder, capsys):
    judge(folder, "--all")
    world.us["better"] = [8.0, 9.0]  # a lucky first measurement
    assert judge(folder, *better(folder)) == 0
    out = capsys.readouterr().out
    assert "better would lead: 8.02 us, good 10.02 us in run " in out and "paired with it" in out
    assert "better / good = 0.9000" in out and "FASTER" in out
    mine = [r for r in records() if r["variant"] == "better" and r["kind"] == "benchmark"]
    assert [(r.get("superseded"), round(r["median_us"])) for r in mine] == [(True, 8)] * 2 + [(None, 9)] * 2
    assert all(r["confirms"]["variant"] == "good" and r["confirms"]["paired"] for r in mine[2:])
    assert all(r["against"]["variant"] == "good" and r["against"]["ratio"] == pytest.approx(0.9) for r in mine[2:])
    assert not any(r.get("confirms") for r in mine[:2])
    pair = [r for r in records() if r["run_id"] == mine[0]["run_id"] and r["variant"] == "good"]
    assert len(pair) == 2 and not any(r.get("superseded") for r in pair)
    assert first() == ("better", mine[0]["run_id"])


def test_what_the_second_measurement_does_not_bear_out_does_not_lead(world, folder):
    judge(folder, "--all")
    world.us["better"] = [8.0, 11.0]
    assert judge(folder, *better(folder)) == 0
    assert len(confirmed()) == 2 and first()[0] == "good"


def test_a_confirmation_that_fails_is_the_verdict(world, folder, monkeypatch):
    judge(folder, "--all")
    inner = world.run_benchmarks

    def fail(*arguments):
        timings, all_readings = inner(*arguments)
        if world.measured.get("better") == 2:
            timings["better"][1].failure = Outcome("INCORRECT", "wrong this time")
        return timings, all_readings

    monkeypatch.setattr(phases, "run_benchmarks", fail)
    assert judge(folder, *better(folder)) == 1
    assert [r["status"] for r in confirmed()] == ["PASSED", "INCORRECT"] and first()[0] == "good"


@pytest.mark.parametrize("us", [9.999, 11.0])
def test_who_would_not_lead_needs_none(world, folder, us):
    judge(folder, "--all")
    world.us["better"] = us
    judge(folder, *better(folder))
    assert confirmed() == [] and world.measured["better"] == 1


@pytest.mark.parametrize(("high", "leads"), [(9.9, True), (10.0, False), (11.0, False)])
def test_the_whole_interval_must_be_below_the_leaders(monkeypatch, high, leads):
    """A value below the leader's interval is not enough."""
    monkeypatch.setattr(Result, "metric", (9.0, 8.5, high))
    passed = [(Case({"n": 1}, 1), Outcome("PASSED"))]
    made = Result(Submission("better", None, ("cpu",)), "cpu", tests=passed, source_hash="new")
    leader = Leader("good", "old", "r1", 10.5, 10.0, 11.0)
    assert judging.challenger([made], leader, False) is (made if leads else None)


def test_a_run_of_all_with_the_leader_in_it_needs_none(world, folder):
    judge(folder, "--all")
    (folder / "variants" / "better.py").write_text(SOURCE.format(name="better"))
    assert judge(folder, "--all") == 0
    assert confirmed() == [] and first()[0] == "better"


def test_the_leader_measured_again_needs_none_but_another_source_of_it_does(world, folder):
    judge(folder, "--all")
    world.us["good"] = 7.0
    judge(folder, "--variant", "good")
    assert confirmed() == []
    (folder / "variants" / "good.py").write_text(SOURCE.format(name="rewritten"))
    judge(folder, "--variant", "good")
    assert len(confirmed()) == 2 and not any(r["confirms"]["paired"] for r in confirmed())


def test_without_its_file_the_leader_cannot_be_paired_with(world, folder, capsys):
    judge(folder, "--all")
    (folder / "variants" / "good.py").unlink()
    judge(folder, *better(folder))
    assert "Confirming in fresh processes, alone" in capsys.readouterr().out
    assert not any(r["confirms"]["paired"] or "against" in r for r in confirmed()) and len(confirmed()) == 2


def test_against_the_leader_itself_both_are_measured_again(world, folder, capsys):
    judge(folder, "--all")
    assert judge(folder, *better(folder), "--against", "good") == 0
    assert world.measured == {"good": 3, "other": 1, "better": 2}
    last = [(r["variant"], bool(r.get("superseded"))) for r in records() if r["kind"] == "benchmark"][-8:]
    assert last == [(name, old) for name in ("better", "good") for old in (True, True, False, False)]
    assert capsys.readouterr().out.count("FASTER") == 3  # two cases and the geomean
    assert first()[0] == "better"


def test_what_against_asked_for_stays_where_another_leads(world, folder, capsys):
    judge(folder, "--all")
    assert judge(folder, *better(folder), "--against", "other") == 0
    mine = [r for r in records() if r["variant"] == "better" and r["kind"] == "benchmark"]
    assert [bool(r.get("superseded")) for r in mine] == [True, True, False, False]
    assert all(r["confirms"]["variant"] == "good" for r in mine[2:])
    assert {r["against"]["variant"] for r in mine} == {"other"}
    assert "better / other = " in capsys.readouterr().out


def test_peers_and_second_sides_are_not_confirmed(world, folder):
    judge(folder, "--all")
    shutil.copy(folder / "variants" / "good.py", folder / "variants" / "peer_p.py")
    world.us["peer_p"] = 1.0
    judge(folder, "--variant", "peer_p")
    world.us["other"] = 12.0
    judge(folder, "--variant", "other", "--against", "other")
    assert confirmed() == []


@pytest.mark.parametrize("groups", [0, 3, 5])
def test_a_confirmation_is_resumed_as_it_was_decided(world, folder, groups):
    """Even if the board has changed meanwhile."""
    judge(folder, "--all")
    world.left = 3 + 6 + groups
    with pytest.raises(Stop):
        judge(folder, *better(folder))
    world.left, done = 10**9, list(world.groups)
    fast = [
        r | {"run_id": "later", "variant": v, "median_us": 1.0, "samples_us": [[1.0]] * 3, "time": record.now()}
        for r in records()
        if r["kind"] == "benchmark"
        for v in ("x", "y")
    ]
    later = record.RESULTS / environment.machine("cpu") / "made_up.jsonl"
    later.write_text("".join(json.dumps(r) + "\n" for r in fast))
    assert judge(folder, "--resume") == 0
    assert len(world.groups) == len(done) + 6 - groups
    assert sum(group[0] == "better+good" for group in world.groups) == 6
    assert len(confirmed()) == 2 and {r["confirms"]["variant"] for r in confirmed()} == {"good"}
    assert all(len(r["samples_us"]) == 3 for r in confirmed())
