"""A run that is recorded: what its journal saves it from doing again.

The session is made up here, so that every time is known; tests/harness/judge/test_kill.py has the real one.
"""

import contextlib
import dataclasses
import json
import shutil
import time
from types import SimpleNamespace

import pytest

from harness import run
from harness.judge import confirm, device_lock, phases
from harness.judge.call import CallRequest
from harness.judge.journal import Journal
from harness.judge.outcome import Outcome
from harness.problem import sources
from harness.results import environment, ranking, record
from tests.support import SUPPORT
from tests.support.recorded import SOURCE, Stop, better, first, journals, judge, records

GPU_MODE = SUPPORT / "gpu_mode" / "vectoradd"


def test_a_whole_run_leaves_records_and_no_journal(world, folder, capsys):
    assert judge(folder, "--all") == 0
    assert len(records()) == 2 * (3 + 2) and journals() == []
    assert {r["attempt"] for r in records() if r["kind"] == "benchmark"} == {1}
    assert {r["clock"]["name"] for r in records() if r["kind"] == "benchmark"} == {"made-up clock"}
    assert first()[0] == "good" and "attempt 1" in capsys.readouterr().out


@pytest.mark.parametrize("quiet", [[], ["--quiet"]])
def test_what_a_run_waits_for_is_said_of_a_quiet_one_too(world, folder, monkeypatch, capsys, quiet):
    said = "waiting for process 1, which is timing on cpu\n"

    def hold(device, say) -> contextlib.AbstractContextManager:
        say(said.removesuffix("\n"))
        return contextlib.nullcontext()

    monkeypatch.setattr(device_lock, "hold", hold)
    assert judge(folder, "--variant", "good", "--mode", "benchmark", *quiet) == 0
    out, err = capsys.readouterr()
    assert said in (err if quiet else out) and said not in (out if quiet else err)
    if quiet:
        assert len(out.splitlines()) == 1  # the verdict


def test_of_many_the_first_case_is_shown_at_once(world, folder, capsys):
    assert judge(folder, "--all", "--mode", "test") == 0
    lines = [line.split()[:3] for line in capsys.readouterr().out.splitlines() if " test   " in line]
    assert lines == [["good", "test", "n=1"], ["other", "test", "n=1"]]


def test_a_run_has_as_many_processes_as_were_asked_for_also_when_it_is_resumed(world, folder):
    world.left = 8
    with pytest.raises(Stop):
        judge(folder, "--all", "--processes", "2")
    world.left = 10**9
    assert judge(folder, "--resume") == 0
    assert len(world.groups) == 4
    timed = [r for r in records() if r["kind"] == "benchmark"]
    assert timed and all(len(r["samples_us"]) == 2 and r["n"] == 6 for r in timed)


@pytest.mark.parametrize("calls", range(13))
def test_killed_after_any_call_it_goes_on_from_there(world, folder, calls, capsys):
    """6 calls of tests and 6 groups: those done before are not done again, and the records are those of one run."""
    world.left = calls
    if calls < 12:
        with pytest.raises(Stop):
            judge(folder, "--all")
    else:
        assert judge(folder, "--all") == 0
    # An interruption that Python sees discards what holds no result; a kill would leave the plan.
    assert len(journals()) == (0 < calls < 12) and (records() == []) == (calls < 12)
    world.left = 10**9
    if 0 < calls < 12:
        assert judge(folder, "--resume") == 0
        assert f"{min(calls, 6)} test outcomes and {max(calls - 6, 0)} groups" in capsys.readouterr().out
        assert len(world.tests) == len(set(world.tests)) == 6 and len(world.groups) == len(set(world.groups)) == 6
        timed = [r for r in records() if r["kind"] == "benchmark"]
        assert len(records()) == 10 and len({r["run_id"] for r in records()}) == 1
        assert all(len(r["samples_us"]) == 3 and r["n"] == 9 for r in timed)
        assert all("interrupted and resumed 1 time" in r["clock"]["warnings"] for r in timed)
        assert all(r["clock"]["name"] == "made-up clock" and r["attempt"] == 1 for r in timed)
    assert journals() == []


def test_a_run_that_is_given_up_is_named_and_counts_as_an_attempt(world, folder, capsys):
    world.left = 9
    with pytest.raises(Stop):
        judge(folder, "--all")
    world.left = 10**9
    (left,) = journals()
    capsys.readouterr()
    assert judge(folder, "--variant", "good") == 0
    run_id = left.name.split(".")[1]
    assert f"run {run_id} is unfinished; --resume {run_id}" in capsys.readouterr().out
    assert {r["attempt"] for r in records() if r["kind"] == "benchmark"} == {2}
    assert judge(folder, "--resume", run_id) == 0
    assert len({r["run_id"] for r in records()}) == 2 and journals() == []


def killed(world, folder, calls: int, *words: str) -> None:
    """A run of all variants that is killed after so many calls."""
    world.left = calls
    with pytest.raises(Stop):
        judge(folder, "--all", *words)
    world.left = 10**9


def events(file) -> list[str]:
    return [json.loads(line)["event"] for line in file.read_text().splitlines()]


def test_a_resumed_run_writes_what_the_first_was_to_write(world, folder, tmp_path, monkeypatch):
    """Their names mean what they meant in the folder of the first command."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    killed(world, folder, 9, "--json", "made.json", "--events", "made.jsonl")
    begun = events(tmp_path / "made.jsonl")
    assert not (tmp_path / "made.json").exists() and begun[-1] == "end"
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert judge(folder, "--resume") == 0
    assert [json.loads(line) for line in (tmp_path / "made.json").read_text().splitlines()] == records()
    added = events(tmp_path / "made.jsonl")[len(begun) :]
    assert added[0] == "start" and added[-1] == "end" and added.count("verdict") == 2
    assert not list((tmp_path / "elsewhere").iterdir())


def test_files_that_are_given_with_resume_count(world, folder, tmp_path):
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    killed(world, folder, 4, "--json", str(first))
    world.left = 4
    with pytest.raises(Stop):  # and from then on
        judge(folder, "--resume", "--json", str(second), "--events", str(third))
    world.left = 10**9
    lines = len(events(third))
    assert judge(folder, "--resume") == 0
    assert not first.exists() and len(second.read_text().splitlines()) == len(records())
    assert events(third)[lines] == "start" and events(third)[-1] == "end"


def test_records_for_standard_output_go_there_when_resumed(world, folder, capsys):
    killed(world, folder, 9, "--json", "-")
    capsys.readouterr()
    assert judge(folder, "--resume") == 0
    out, err = capsys.readouterr()
    assert [json.loads(line) for line in out.splitlines()] == records() and "goes on" in err


def test_a_file_that_cannot_be_written_any_more_is_said_before_anything_is_judged(world, folder, tmp_path, capsys):
    (tmp_path / "gone").mkdir()
    given = ["--json", str(tmp_path / "gone" / "json"), "--events", str(tmp_path / "gone" / "events")]
    killed(world, folder, 9, *given)
    shutil.rmtree(tmp_path / "gone")
    (left,) = journals()
    kept = left.read_bytes()
    there = tmp_path / "there"
    for words, option in (([], "--json"), (["--json", str(there)], "--events"), (["--events", str(there)], "--json")):
        assert judge(folder, "--resume", *words) == 2
        said = capsys.readouterr().err
        assert "--resume goes on with " in said and f"{option}" in said and "give another file" in said
        assert "cannot write" in said and said.count("\n") == 1
    assert left.read_bytes() == kept
    assert judge(folder, "--resume", "--json", str(there), "--events", str(there)) == 2
    assert judge(folder, "--resume", "--json", str(there), "--events", str(tmp_path / "e")) == 0 and there.exists()


def test_a_descriptor_of_the_first_process_is_nothing_to_the_resumed_one(world, folder, tmp_path):
    with open(tmp_path / "events", "wb") as file:
        killed(world, folder, 9, "--events", f"/dev/fd/{file.fileno()}")
    begun = events(tmp_path / "events")
    assert begun and judge(folder, "--resume") == 0 and events(tmp_path / "events") == begun


def test_a_journal_that_names_no_files_is_resumed(world, folder):
    killed(world, folder, 9)
    (left,) = journals()
    plan, _, rest = left.read_text().partition("\n")
    made = json.loads(plan)
    del made["outputs"]  # as journals were
    left.write_text(f"{json.dumps(made)}\n{rest}")
    assert judge(folder, "--resume") == 0


def test_what_changed_since_stops_a_resume(world, folder, capsys):
    world.left = 9
    with pytest.raises(Stop):
        judge(folder, "--all")
    world.left = 10**9
    (folder / "variants" / "other.py").write_text(SOURCE.format(name="changed"))
    assert judge(folder, "--resume") == 2
    said = capsys.readouterr().err
    assert "changed since it began: the submissions, other" in said and "go on with" not in said
    assert judge(folder, "--resume", "--variant", "good") == 2
    assert "--variant was None, got 'good'" in capsys.readouterr().err
    assert len(journals()) == 1 and records() == []
    (folder / "variants" / "other.py").write_text(SOURCE.format(name="other"))
    assert judge(folder, "--resume") == 0


@pytest.mark.parametrize("calls", [0, 4])
def test_a_resume_that_is_refused_changes_nothing(world, folder, calls, monkeypatch, capsys):
    """calls: 0: it was killed just after its journal had begun."""
    world.left = calls
    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(Journal, "close", lambda journal: journal._file.close())  # as a kill leaves it
        judge(folder, "--all", "--processes", "2")
    world.left = 10**9
    (left,) = journals()
    kept = left.read_bytes()
    for words in (["--processes", "3"], [left.name.split(".")[1], "--timeout", "7"]):
        assert judge(folder, "--resume", *words) == 2
        assert f"; go on with --resume {left.name.split('.')[1]}\n" in capsys.readouterr().err
        assert left.read_bytes() == kept
    (folder / "variants" / "other.py").write_text(SOURCE.format(name="changed"))
    assert judge(folder, "--resume") == 2 and left.read_bytes() == kept
    (folder / "variants" / "other.py").write_text(SOURCE.format(name="other"))
    assert judge(folder, "--resume") == 0 and journals() == []
    timed = [r for r in records() if r["kind"] == "benchmark"]
    assert timed and all("interrupted and resumed 1 time" in r["clock"]["warnings"] for r in timed)


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


def test_a_run_that_is_not_recorded_has_no_journal(world, folder):
    seen = []
    inner = world.run_benchmarks

    def look(*arguments):
        seen.append(len(journals()))
        return inner(*arguments)

    phases.run_benchmarks = look
    assert judge(folder, "--variant", "good", "--mode", "benchmark") == 0
    assert judge(folder, "--variant", "good", "--case", "n=1000") == 0
    assert judge(folder, "--variant", "good") == 0
    assert seen == [0, 0, 1] and len(records()) == 5


def test_a_run_killed_among_its_records_is_completed_by_the_next(world, folder, tmp_path, monkeypatch, capsys):
    append = record.append

    def cut(machine, name, lines):
        append(machine, name, list(lines)[:4])
        raise Stop

    monkeypatch.setattr(record, "append", cut)
    with pytest.raises(Stop):
        judge(folder, "--all", "--json", str(tmp_path / "json"))
    monkeypatch.setattr(record, "append", append)
    assert len(records()) == 4 and len(journals()) == 1
    saved = journals()[0].read_bytes()
    assert judge(folder, "--resume") == 0
    assert "its records" in capsys.readouterr().out and len(records()) == 10 and journals() == []
    assert [json.loads(line) for line in (tmp_path / "json").read_text().splitlines()] == records()
    journals_place = record.RESULTS / environment.machine("cpu") / "made_up.20260101T000000-00000000.partial.jsonl"
    journals_place.write_bytes(saved.replace(records()[0]["run_id"].encode(), b"20260101T000000-00000000"))
    assert judge(folder, "--variant", "good", "--mode", "test") == 0  # it records nothing, so it touches nothing
    assert len(records()) == 10
    assert judge(folder, "--variant", "good") == 0
    assert len(records()) == 25 and journals() == []


@pytest.mark.parametrize(("mode", "limits"), [("leaderboard", [60, 90]), ("benchmark", [180])])
def test_the_limits_of_task_yml_are_those_of_its_phases(world, monkeypatch, mode, limits):
    given = []
    for name, place in (("run_tests", 6), ("run_benchmarks", 7)):
        inner = getattr(world, name)
        monkeypatch.setattr(phases, name, lambda *a, inner=inner, place=place: given.append(a[place]) or inner(*a))
    assert run.main([str(GPU_MODE), "--device", "cpu", "--mode", mode]) == 0
    assert given == limits


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
    leader = confirm.present_leader(timed, "cpu", [ranking.case_label(r["case"]) for r in timed], "mean")
    assert leader.value == pytest.approx(22.545, abs=0.001) and leader.lo < leader.value < leader.hi


def test_the_calls_of_a_phase_share_its_limit():
    class Sleeper:
        def call(self, handle: SimpleNamespace, request: CallRequest) -> Outcome:
            within.append(request.within_s)
            time.sleep(0.06)
            return Outcome("PASSED")

    def call(budget: phases.Budget, handle: SimpleNamespace) -> str:
        return budget.call(Sleeper(), handle, CallRequest(1)).status

    within, budget = [], phases.Budget(0.1)
    handles = {n: [SimpleNamespace(name=f"{n} {p}", owner=n) for p in range(3)] for n in "ab"}
    said = [[call(budget, process) for process in handles[name]] for name in "ab"]
    assert said == [["PASSED", "PASSED", "TIMEOUT"]] * 2  # all processes of a submission together
    assert within[0] == 0.1 and 0 < within[1] < 0.05 and len(within) == 4
    unlimited = phases.Budget(None)
    assert [call(unlimited, handles["a"][0]) for _ in range(3)] == ["PASSED"] * 3


def test_every_record_is_strict_json(world, folder):
    judge(folder, "--all")
    judge(folder, *better(folder))
    for line in record.path_of(environment.machine("cpu"), "made_up").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)
