"""A run that is recorded: what its file saves it from doing again, and what a resumed run needs unchanged.

The session is made up here, so that every time is known; tests/harness/judge/test_kill.py has the real one.
"""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness import run
from harness.judge import judging, machine, phases, resume
from harness.judge.options import Options
from harness.judge.outcome import Outcome
from harness.judge.verdict import Result
from harness.problem import sources
from harness.problem.folders import Case, Submission, UsageError
from harness.results import environment, ranking, record
from harness.results.ranking import Leader
from harness.results.run_file import RunFile
from harness.sandbox import process
from harness.tools import modes
from tests.support import SUPPORT, copy_of, json_lines
from tests.support.recorded import SOURCE, FakeSession, Stop, better, files, first, judge, records, unfinished
from tests.support.records import run_line

GPU_MODE = SUPPORT / "gpu_mode" / "vectoradd"


def killed(world, folder, calls: int, *words: str) -> None:
    """A run of all variants that is killed after so many calls."""
    world.left = calls
    with pytest.raises(Stop):
        judge(folder, "--all", *words)
    world.left = 10**9


def test_a_whole_run_is_one_file(world, folder, monkeypatch, capsys):
    monkeypatch.setattr(FakeSession, "remark", "can be stored")
    assert judge(folder, "--all") == 0
    (file,) = files()
    assert file.ended and file.records == records() and len(records()) == 2 * (3 + 2)
    assert [line["kind"] for line in file.work] == ["outcome"] * 6 + ["group"] * 6
    assert {r["attempt"] for r in records() if r["kind"] == "benchmark"} == {1}
    assert {r["clock"]["name"] for r in records() if r["kind"] == "benchmark"} == {process.CLOCK}
    assert {"mode", "variant", "shard"} <= set(file.run["arguments"]) and len(file.run["tests"]) == 3
    assert [one["variant"] for one in file.run["submissions"]] == ["good", "other"]
    assert {r["reason"] for r in records()} == {"can be stored"}
    assert first()[0] == "good" and "can be stored" in capsys.readouterr().out
    assert not {"NaN", "Infinity"} & set(re.findall(r"\w+", file.path.read_text()))


@pytest.mark.parametrize("calls", range(13))
def test_killed_after_any_call_it_goes_on_from_there(world, folder, calls, capsys):
    """6 calls of tests and 6 groups: those done before are not done again, and the records are those of one run."""
    if calls < 12:
        killed(world, folder, calls)
    else:
        assert judge(folder, "--all") == 0
    assert len(unfinished()) == (0 < calls < 12) and (records() == []) == (calls < 12)
    if 0 < calls < 12:
        assert judge(folder, "--resume") == 0
        assert f"{min(calls, 6)} test outcomes and {max(calls - 6, 0)} groups" in capsys.readouterr().out
        assert len(world.tests) == len(set(world.tests)) == 6 and len(world.groups) == len(set(world.groups)) == 6
        timed = [r for r in records() if r["kind"] == "benchmark"]
        assert len(records()) == 10 and len({r["run_id"] for r in records()}) == 1
        assert all(len(r["samples_us"]) == 3 and r["n"] == 9 for r in timed)
        assert all("interrupted and resumed 1 time" in r["clock"]["warnings"] for r in timed)
        assert all(r["clock"]["name"] == process.CLOCK and r["attempt"] == 1 for r in timed)
    assert unfinished() == []


def test_variants_of_other_targets_are_compiled_behind_the_ranks_and_counted(world, folder, monkeypatch, capsys):
    for name in ("sm90_good", "sm90_bad"):
        (folder / "variants" / f"{name}.py").write_text(SOURCE.format(name=name).replace("cpu", "sm90"))

    def compile_only(_problem, _device, judged, _progress):
        assert "rank 1" in capsys.readouterr().out, "the ranks are printed"
        ends = {"sm90_good": ("COMPILED", ""), "sm90_bad": ("COMPILE_ERROR", "x.cu:1: no")}
        for j in judged:
            j.status, j.reason = ends[j.submission.name]

    monkeypatch.setattr(modes, "compile_only", compile_only)
    assert judge(folder, "--all") == 4
    out = capsys.readouterr().out
    said = "2 variants for other targets, 1 of them compiled\nsm90_bad  COMPILE_ERROR  x.cu:1, see above\n"
    assert out.startswith(said)
    assert "sm90_good" not in out and {r["variant"] for r in records()} >= {"good", "sm90_good", "sm90_bad"}


def test_a_run_killed_among_its_results_writes_each_once(world, folder, tmp_path, capsys):
    assert judge(folder, "--all") == 0
    (file,), made = files(), records()
    whole = file.path.read_bytes().splitlines(keepends=True)
    assert len(whole) == 1 + 12 + 10 + 1
    for cut in (13, 19, 23):
        file.path.write_bytes(b"".join(whole[:cut]) + whole[cut][:9])
        assert records() == []
        assert judge(folder, "--resume", "--json", str(tmp_path / "json"), "--events", str(tmp_path / f"{cut}")) == 0
        parts = ("variant", "case", "median_us")
        assert [[r.get(part) for part in parts] for r in records()] == [[r.get(part) for part in parts] for r in made]
        assert json_lines(tmp_path / "json") == records()
        assert [one["event"] for one in json_lines(tmp_path / f"{cut}")].count("verdict") == 2
    assert len(world.tests) == len(world.groups) == 6, "nothing was called again"


def test_a_run_that_is_given_up_is_named_and_counts_as_an_attempt(world, folder, capsys):
    killed(world, folder, 9, "--processes", "2")
    (left,) = unfinished()
    capsys.readouterr()
    assert judge(folder, "--variant", "good") == 0
    assert f"run {left.stem} is unfinished; --resume {left.stem}" in capsys.readouterr().out
    assert {r["attempt"] for r in records() if r["kind"] == "benchmark"} == {2}
    assert judge(folder, "--resume", left.stem) == 0
    mine = [r for r in records() if r["run_id"] == left.stem and r["kind"] == "benchmark"]
    assert all(len(r["samples_us"]) == 2 for r in mine) and unfinished() == []


def test_the_newest_run_that_nobody_holds_is_resumed(world, folder, capsys):
    for _ in range(3):
        killed(world, folder, 4)
    _, middle, last = files()
    held = RunFile.reopen(last.path, lambda line: None)
    assert judge(folder, "--resume", last.run_id) == 2
    assert f"{last.run_id} of made_up on " in (said := capsys.readouterr().err) and "another process" in said
    assert judge(folder, "--resume") == 0
    assert {r["run_id"] for r in records()} == {middle.run_id} and len(unfinished()) == 2
    held.close()
    for wrong in (middle.run_id, "x"):
        assert judge(folder, "--resume", wrong) == 2
        assert f"no unfinished run {wrong} of made_up on " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--variant", "good"], "--variant was None, got 'good'"),
        (["--processes", "3"], "--processes was 2, got 3"),
        (["--shard", "1/2"], "--shard was None, got '1/2'"),
    ],
)
def test_a_resume_with_other_options_is_refused_and_changes_nothing(world, folder, capsys, words, said):
    killed(world, folder, 4, "--processes", "2")
    (left,) = unfinished()
    kept = left.read_bytes()
    assert judge(folder, "--resume", *words) == 2
    assert said in (err := capsys.readouterr().err) and err.endswith(f"; go on with --resume {left.stem}\n")
    assert left.read_bytes() == kept
    assert judge(folder, "--resume", "--processes", "2") == 0


def test_what_changed_since_stops_a_resume(world, folder, capsys):
    killed(world, folder, 9)
    (left,) = unfinished()
    kept = left.read_bytes()
    (folder / "variants" / "other.py").write_text(SOURCE.format(name="changed"))
    assert judge(folder, "--resume") == 2 and left.read_bytes() == kept
    said = capsys.readouterr().err
    assert "changed since it began: other. " in said and "go on with" not in said
    (folder / "variants" / "other.py").write_text(SOURCE.format(name="other"))
    assert judge(folder, "--resume") == 0


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("harness_hash", "0", "the judge"),
        ("problem_hash", "0", "the problem's own files"),
        ("tests", [], "the test cases"),
        ("benchmarks", [], "the benchmark cases"),
        ("target", "sm90", "the target"),
        ("environment", {}, "the environment"),
        ("schema", 0, "the records' schema"),
        ("submissions", [], "a"),
    ],
)
def test_what_changed_is_said(key, value, said):
    now = run_line() | {"tests": [1], "benchmarks": [1], "problem_hash": "1", "harness_hash": "1", "target": "cpu"}
    resume.see_unchanged(RunFile.begin(now), now | {"time": "later"})
    with pytest.raises(UsageError, match=f"changed since it began: {said}"):
        resume.see_unchanged(RunFile.begin(now | {key: value}), now)


def test_a_run_whose_options_are_not_known_cannot_go_on():
    for arguments in (None, {}, {"mode": "test"}):
        file = RunFile.begin(run_line(arguments=arguments))
        with pytest.raises(UsageError, match="start a new run"):
            resume.adopt(file, Options())


def test_parts_of_a_run_are_one_row_of_the_board(world, folder, capsys):
    """Each has its own file; nothing is confirmed in them, since none has all cases."""
    for part in ("2/2", "1/2"):
        assert judge(folder, "--all", "--shard", part) == 0
    one, other = (file.run["shard"] for file in files())
    assert one["set"] == other["set"] and {one["part"], other["part"]} == {1, 2}
    assert sorted(world.tests) == [("good", 0), ("good", 0), ("good", 1), ("other", 0), ("other", 0), ("other", 1)]
    assert {r["run_id"] for r in records()} == {files()[0].run_id} and len(records()) == 10
    assert first() == ("good", files()[0].run_id)
    assert not any(line["kind"] == "confirm" for file in files() for line in file.work)
    for wrong in ("0/2", "3/2", "x", "1/3"):
        assert judge(folder, "--all", "--shard", wrong) == 2
        assert "--shard must " in capsys.readouterr().err


def test_a_submission_that_changes_during_the_run_has_no_result(world, folder, monkeypatch):
    inner = world.run_tests

    def edit(*arguments):
        inner(*arguments)
        (folder / "variants" / "other.py").write_text(SOURCE.format(name="edited meanwhile"))

    monkeypatch.setattr(phases, "run_tests", edit)
    assert judge(folder, "--all") == 6
    whole = [r for r in records() if not r["case"]]
    assert [(r["variant"], r["status"]) for r in whole] == [("other", "INVALID_MEASUREMENT")]
    assert len({r["source_hash"] for r in records() if r["variant"] == "other"}) == 1 and first()[0] == "good"


def test_only_a_whole_run_has_a_file(world, folder):
    assert judge(folder, "--variant", "good", "--mode", "benchmark") == 0
    assert judge(folder, "--variant", "good", "--case", "n=1000") == 0
    assert files() == []
    assert judge(folder, "--variant", "good") == 0
    assert len(files()) == 1


def test_a_problem_may_rank_by_the_mean(world, tmp_path, capsys):
    """And so it is printed, recorded, and used to see who leads."""
    place = copy_of(GPU_MODE.parent, tmp_path / "set") / "vectoradd"
    text = (place / "task.yml").read_text().replace('ranking_by: "geom"', "ranking_by: mean")
    text = text.replace("benchmarks:\n", 'benchmarks:\n  - {"sizes": [8], "scale": 1, "seed": 1}\n')
    (place / "task.yml").write_text(text)
    inner = world.calls
    world.calls = lambda name, process: [
        dataclasses.replace(o, us=o.us * (4 if len(world.groups) % 2 else 1)) for o in inner(name, process)
    ]
    assert run.main([str(place), "--device", "cpu"]) == 0
    assert "mean 22.5" in capsys.readouterr().out  # of 9.018 and 36.072; their geomean would be 18.04
    known = record.read(environment.machine("cpu"), sources.qualified(place.resolve()))
    timed = [r for r in known if r["kind"] == "benchmark"]
    assert [(round(r["median_us"]), r["ranking_by"]) for r in timed] == [(36, "mean"), (9, "mean")]
    leader = ranking.leaders(timed, [ranking.case_label(r["case"]) for r in timed], "mean")[-1]
    assert leader.value == pytest.approx(22.545, abs=0.001) and leader.lo < leader.value < leader.hi


def test_other_users_of_a_gpu_are_one_warning_in_a_run(monkeypatch, capsys):
    """However many there are, and whichever come meanwhile."""
    present = ["process 1 (a)", "process 2 (b)"]
    monkeypatch.setattr(machine, "users", lambda _: present)
    monkeypatch.setattr(environment, "gpu_uuid", lambda: "GPU-1")
    noting = object.__new__(judging.Judging)
    noting.device, noting.recorder = "cuda", SimpleNamespace(warnings=[])
    noting._note_others()
    present.append("process 3 (c)")
    noting._note_others()
    assert noting.recorder.warnings == ["device shared with process 1 (a); process 2 (b)"]
    assert capsys.readouterr().out == "warning: device shared with process 1 (a); process 2 (b)\n"


# --- how a first place is confirmed


def confirmed() -> list[dict]:
    return [r for r in records() if r.get("confirms")]


@pytest.fixture
def ranked(world, folder) -> Path:
    """The folder, with good on rank 1 and other behind it."""
    judge(folder, "--all")
    return folder


def test_who_has_no_leader_beside_it_needs_no_confirmation(world, folder):
    assert judge(folder, "--variant", "good") == 0
    assert confirmed() == [] and world.measured == {"good": 1} and first()[0] == "good"
    judge(folder, "--all")
    (folder / "variants" / "better.py").write_text(SOURCE.format(name="better"))
    assert judge(folder, "--all") == 0
    assert confirmed() == [] and first()[0] == "better"


def test_a_new_first_place_is_measured_again_in_pairs_with_the_old_one(world, ranked, capsys):
    world.us["better"] = [8.0, 9.0]  # a lucky first measurement
    assert judge(ranked, *better(ranked)) == 0
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


def test_a_confirmation_that_fails_is_the_verdict(world, ranked, monkeypatch):
    inner = world.run_benchmarks

    def fail(*arguments):
        timings, all_readings = inner(*arguments)
        if world.measured.get("better") == 2:
            timings["better"][1].failure = Outcome("INCORRECT", "wrong this time")
        return timings, all_readings

    monkeypatch.setattr(phases, "run_benchmarks", fail)
    assert judge(ranked, *better(ranked)) == 1
    assert [r["status"] for r in confirmed()] == ["PASSED", "INCORRECT"] and first()[0] == "good"


@pytest.mark.parametrize(("high", "leads"), [(9.9, True), (10.0, False), (11.0, False)])
def test_the_whole_interval_must_be_below_the_leaders(monkeypatch, high, leads):
    """A value below the leader's interval is not enough."""
    monkeypatch.setattr(Result, "metric", (9.0, 8.5, high))
    passed = [(Case({"n": 1}, 1), Outcome("PASSED"))]
    made = Result(Submission("better", None, ("cpu",)), "cpu", tests=passed, source_hash="new")
    leader = Leader("good", "old", "r1", 10.5, 10.0, 11.0)
    assert judging.challenger([made], leader, False) is (made if leads else None)


def test_the_leader_measured_again_needs_none_but_another_source_of_it_does(world, ranked):
    world.us["good"] = 7.0
    judge(ranked, "--variant", "good")
    assert confirmed() == []
    (ranked / "variants" / "good.py").write_text(SOURCE.format(name="rewritten"))
    judge(ranked, "--variant", "good")
    assert len(confirmed()) == 2 and not any(r["confirms"]["paired"] for r in confirmed())


def test_without_its_file_the_leader_cannot_be_paired_with(world, ranked, capsys):
    (ranked / "variants" / "good.py").unlink()
    judge(ranked, *better(ranked))
    assert "Confirming in fresh processes, alone" in capsys.readouterr().out
    assert not any(r["confirms"]["paired"] or "against" in r for r in confirmed()) and len(confirmed()) == 2


def test_against_the_leader_itself_both_are_measured_again(world, ranked, capsys):
    assert judge(ranked, *better(ranked), "--against", "good") == 0
    assert world.measured == {"good": 3, "other": 1, "better": 2}
    last = [(r["variant"], bool(r.get("superseded"))) for r in records() if r["kind"] == "benchmark"][-8:]
    assert last == [(name, old) for name in ("better", "good") for old in (True, True, False, False)]
    assert capsys.readouterr().out.count("FASTER") == 3  # two cases and the geomean
    assert first()[0] == "better"


def test_what_against_asked_for_stays_where_another_leads(world, ranked, capsys):
    assert judge(ranked, *better(ranked), "--against", "other") == 0
    mine = [r for r in records() if r["variant"] == "better" and r["kind"] == "benchmark"]
    assert [bool(r.get("superseded")) for r in mine] == [True, True, False, False]
    assert all(r["confirms"]["variant"] == "good" for r in mine[2:])
    assert {r["against"]["variant"] for r in mine} == {"other"}
    assert "better / other = " in capsys.readouterr().out


def test_peers_and_second_sides_are_not_confirmed(world, ranked):
    shutil.copy(ranked / "variants" / "good.py", ranked / "variants" / "peer_p.py")
    world.us["peer_p"] = 1.0
    judge(ranked, "--variant", "peer_p")
    world.us["other"] = 12.0
    judge(ranked, "--variant", "other", "--against", "other")
    assert confirmed() == []


@pytest.mark.parametrize("groups", [0, 3, 5])
def test_a_confirmation_is_resumed_as_it_was_decided(world, ranked, groups):
    """Even if the board has changed meanwhile."""
    world.left = 3 + 6 + groups
    with pytest.raises(Stop):
        judge(ranked, *better(ranked))
    world.left, done = 10**9, list(world.groups)
    quick = {"run_id": "later", "median_us": 1.0, "samples_us": [[1.0]] * 3, "time": record.now()}
    timed = [r | quick for r in records() if r["kind"] == "benchmark"]
    fast = [r | {"variant": name} for r in timed for name in ("x", "y")]
    later = record.RESULTS / environment.machine("cpu") / "made_up.jsonl"
    later.write_text("".join(json.dumps(r) + "\n" for r in fast))
    assert judge(ranked, "--resume") == 0
    assert len(world.groups) == len(done) + 6 - groups
    assert sum(group[0] == "better+good" for group in world.groups) == 6
    assert len(confirmed()) == 2 and {r["confirms"]["variant"] for r in confirmed()} == {"good"}
    assert all(len(r["samples_us"]) == 3 for r in confirmed())
