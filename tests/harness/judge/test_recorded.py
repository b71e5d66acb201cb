"""A run that is recorded: what its file saves it from doing again, and what a resumed run needs unchanged.

The session is made up here, so that every time is known; tests/harness/judge/test_kill.py has the real one.
"""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import pytest

from harness import run
from harness.judge import judging, machine, phases, resume
from harness.judge.options import Options
from harness.problem import sources
from harness.problem.folders import UsageError
from harness.results import environment, ranking, record
from harness.results.run_file import RunFile
from harness.sandbox import process
from harness.tools import modes
from tests.support import SUPPORT
from tests.support.recorded import SOURCE, FakeSession, Stop, files, first, judge, records, unfinished
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
    for line in file.path.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


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
        source = (folder / "variants" / "good.py").read_text().replace('("cpu",)', '("sm90",)')
        (folder / "variants" / f"{name}.py").write_text(source)

    def compile_only(_problem, _device, judged, _progress):
        assert "rank 1" in capsys.readouterr().out, "the ranks are printed"
        for j in judged:
            j.status, j.reason = (
                ("COMPILED", "") if j.submission.name == "sm90_good" else ("COMPILE_ERROR", "x.cu:1: no")
            )

    monkeypatch.setattr(modes, "compile_only", compile_only)
    assert judge(folder, "--all") == 4
    out = capsys.readouterr().out
    assert out.startswith(
        "2 variants for other targets, 1 of them compiled\nsm90_bad  COMPILE_ERROR  x.cu:1, see above\n"
    )
    assert "sm90_good" not in out and {r["variant"] for r in records()} >= {"good", "sm90_good", "sm90_bad"}


def test_a_run_killed_among_its_results_writes_each_once(world, folder, tmp_path, capsys):
    assert judge(folder, "--all") == 0
    (file,), made = files(), records()
    whole = file.path.read_bytes().splitlines(keepends=True)
    assert len(whole) == 1 + 12 + 10 + 1
    for cut in (13, 19, 23):
        file.path.write_bytes(b"".join(whole[:cut]) + whole[cut][:9])
        assert records() == []
        assert judge(folder, "--resume", "--json", str(tmp_path / "json")) == 0
        assert [(r["variant"], r["case"], r.get("median_us")) for r in records()] == [
            (r["variant"], r["case"], r.get("median_us")) for r in made
        ]
        assert [json.loads(line) for line in (tmp_path / "json").read_text().splitlines()] == records()
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


def test_a_resumed_run_writes_all_records_where_it_is_told(world, folder, tmp_path):
    killed(world, folder, 9)
    assert judge(folder, "--resume", "--json", str(tmp_path / "made"), "--events", str(tmp_path / "events")) == 0
    assert [json.loads(line) for line in (tmp_path / "made").read_text().splitlines()] == records()
    written = (tmp_path / "events").read_text().splitlines()
    assert [json.loads(line)["event"] for line in written].count("verdict") == 2


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
    place = tmp_path / "vectoradd"
    shutil.copytree(GPU_MODE, place)
    shutil.copy(GPU_MODE.parent / "utils.py", tmp_path)
    text = (place / "task.yml").read_text().replace('ranking_by: "geom"', "ranking_by: mean")
    text = text.replace("benchmarks:\n", 'benchmarks:\n  - {"sizes": [8], "scale": 1, "seed": 1}\n')
    (place / "task.yml").write_text(text)
    inner = world.calls
    world.calls = lambda name, process: [
        dataclasses.replace(o, us=o.us * (4 if len(world.groups) % 2 else 1)) for o in inner(name, process)
    ]
    assert run.main([str(place), "--device", "cpu"]) == 0
    assert "mean 22.5" in capsys.readouterr().out  # of 9.018 and 36.072; their geomean would be 18.04
    timed = [
        r
        for r in record.read(environment.machine("cpu"), sources.qualified(place.resolve()))
        if r["kind"] == "benchmark"
    ]
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
