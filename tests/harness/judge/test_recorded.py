"""A run that is recorded: what its journal saves it from doing again, and how a first place is confirmed.

The session is made up here, so that every time is known; tests/harness/judge/test_kill.py has the real one.
"""

import contextlib
import dataclasses
import json
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness import run
from harness.judge import confirm, judging, phases
from harness.judge.outcome import Outcome
from harness.judge.readings import ReferenceReadings, Timing
from harness.results import environment, ranking, record
from leaderboard import board
from tests.support import SUPPORT

GPU_MODE = SUPPORT / "gpu_mode" / "vectoradd"
SOURCE = '"""{name}"""\nTARGETS = ("cpu",)\n\n\ndef custom_kernel(data):\n    return data\n'
TASK = '''"""made_up: nothing is ever called."""
from dataclasses import dataclass

OUTPUTS = ("c",)


@dataclass(frozen=True)
class Case:
    n: int
    seed: int

    def bytes_moved(self):
        return self.n


TESTS = [Case(1, 7), Case(2, 7), Case(2, 8)]
BENCHMARKS = BENCHMARKS_CPU = [Case(1000, 1), Case(4000, 2)]
'''
# us of every call; a list: of one measurement after the other
US = {"good": 10.0, "better": 8.0, "other": 12.0, "submission": 9.0}


class Stop(Exception):
    """The process is killed here."""


class FakeSession(contextlib.AbstractContextManager):
    clock_name = "made-up clock"
    notes: tuple[str, ...] = ()

    def __init__(self, *_: object) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class World:
    """What the fake phases did, and how they are to behave."""

    def __init__(self) -> None:
        self.us: dict[str, float | list[float]] = dict(US)
        self.tests: list[tuple[str, int]] = []  # (submission, case) that were really called
        self.groups: list[tuple[str, int, int]] = []  # (submissions, process, case) that were really timed
        self.left = 10**9  # calls until the process is killed
        self.wrong: set[str] = set()
        self.measured: dict[str, int] = {}

    def tick(self) -> None:
        if self.left == 0:
            raise Stop
        self.left -= 1

    def run_tests(self, session, handles, cases, done, progress, have, limit_s):
        for number, case in enumerate(cases):
            for handle in handles:
                outcome = have.test(handle.name, number)
                if outcome is None:
                    self.tick()
                    self.tests.append((handle.name, number))
                    bad = handle.name in self.wrong
                    outcome = Outcome("INCORRECT" if bad else "PASSED", "mismatch" if bad else "", {"rel": 0.0})
                done(handle, case, outcome)

    def run_benchmarks(self, session, handles, cases, progress, paired, group, have, limit_s):
        timings = {handle.name: [Timing(case) for case in cases] for handle in handles}
        names = [handle.name for handle in handles]
        for name in names:
            self.measured[name] = self.measured.get(name, 0) + 1
        for process in range(3):
            for number in range(len(cases)):
                known = have.group(process, number)
                if known is None:
                    self.tick()
                    self.groups.append(("+".join(names), process, number))
                    outcomes = {name: self.calls(name, process) for name in names}
                    if group:
                        group(process, number, outcomes, {"empty": [1.0]}, [f"{process}{number}"], (None, None))
                else:
                    outcomes = known.outcomes
                for name in names:
                    timings[name][number].outcomes.append(outcomes[name])
        known = {
            "roofline_us": 5.0,
            "roofline_config": "read 0",
            "roofline_kind": "read",
            "empty_us": 1.0,
            "resolution_us": 0.0,
            "seeds": ["1"],
        }
        blank = dict.fromkeys(field.name for field in dataclasses.fields(ReferenceReadings)) | known
        return timings, [ReferenceReadings(**blank | {"bytes": case.bytes or 4}) for case in cases]

    def calls(self, name: str, process: int) -> list[Outcome]:
        us = self.us[name.removesuffix("#2")]
        us = us[min(self.measured[name], len(us)) - 1] if isinstance(us, list) else us
        return [Outcome("PASSED", us=us * (1 + 0.001 * (process + i)), host_us=1.0) for i in range(3)]


@pytest.fixture
def world(monkeypatch, tmp_path) -> World:
    made = World()
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(judging, "Session", FakeSession)
    monkeypatch.setattr(phases, "run_tests", made.run_tests)
    monkeypatch.setattr(phases, "run_benchmarks", made.run_benchmarks)
    return made


@pytest.fixture
def folder(tmp_path) -> Path:
    """A problem of our own kind with the variants good and other, and better.py outside."""
    place = tmp_path / "made_up"
    (place / "variants").mkdir(parents=True)
    (place / "task.py").write_text(TASK)
    (place / "reference.py").write_text("")
    for name in ("good", "other"):
        (place / "variants" / f"{name}.py").write_text(SOURCE.format(name=name))
    (tmp_path / "better.py").write_text(SOURCE.format(name="better"))
    return place


def judge(folder: Path, *arguments: str) -> int:
    return run.main([str(folder), "--device", "cpu", *arguments])


def records() -> list[dict]:
    return record.read(environment.machine("cpu"), "made_up")


def journals() -> list[Path]:
    return sorted((record.RESULTS / environment.machine("cpu")).glob("*.partial.jsonl"))


def first() -> tuple[str, str]:
    """(variant, run) that the board has on rank 1."""
    (found,) = board.build(records(), "box", {("made_up", "cpu"): [{"n": 1000}, {"n": 4000}]})
    top = found.standing.iloc[0]
    assert top["rank"] == 1
    return top.variant, top.run_id


# --- resume


def test_a_whole_run_leaves_records_and_no_journal(world, folder, capsys):
    assert judge(folder, "--all") == 0
    assert len(records()) == 2 * (3 + 2) and journals() == []
    assert {r["attempt"] for r in records() if r["kind"] == "benchmark"} == {1}
    assert {r["clock"]["name"] for r in records() if r["kind"] == "benchmark"} == {"made-up clock"}
    assert first()[0] == "good" and "attempt 1" in capsys.readouterr().out


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


def test_what_changed_since_stops_a_resume(world, folder, capsys):
    world.left = 9
    with pytest.raises(Stop):
        judge(folder, "--all")
    world.left = 10**9
    (folder / "variants" / "other.py").write_text(SOURCE.format(name="changed"))
    assert judge(folder, "--resume") == 2
    said = capsys.readouterr().err
    assert "since it began the submissions, other changed" in said and "Traceback" not in said
    assert judge(folder, "--resume", "--variant", "good") == 2
    assert "--variant was None, got 'good'" in capsys.readouterr().err
    assert len(journals()) == 1 and records() == []
    (folder / "variants" / "other.py").write_text(SOURCE.format(name="other"))
    assert judge(folder, "--resume") == 0


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
    assert judge(folder, "--variant", "good", "--case", "n=1") == 0
    assert judge(folder, "--variant", "good") == 0
    assert seen == [0, 0, 1] and len(records()) == 5


def test_a_run_killed_among_its_records_is_completed_by_the_next(world, folder, monkeypatch, capsys):
    append = record.append

    def cut(machine, name, lines):
        append(machine, name, list(lines)[:4])
        raise Stop

    monkeypatch.setattr(record, "append", cut)
    with pytest.raises(Stop):
        judge(folder, "--all")
    monkeypatch.setattr(record, "append", append)
    assert len(records()) == 4 and len(journals()) == 1
    saved = journals()[0].read_bytes()
    assert judge(folder, "--resume") == 0
    assert "its records" in capsys.readouterr().out and len(records()) == 10 and journals() == []
    journals_place = record.RESULTS / environment.machine("cpu") / "made_up.20260101T000000-00000000.partial.jsonl"
    journals_place.write_bytes(saved.replace(records()[0]["run_id"].encode(), b"20260101T000000-00000000"))
    assert judge(folder, "--variant", "good", "--mode", "test") == 0  # it records nothing, so it touches nothing
    assert len(records()) == 10
    assert judge(folder, "--variant", "good") == 0
    assert len(records()) == 25 and journals() == []


# --- confirmation


def confirmed() -> list[dict]:
    return [r for r in records() if r.get("confirms")]


def better(folder: Path) -> list[str]:
    return ["--submission", str(folder.parent / "better.py")]


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


@pytest.mark.parametrize(
    ("us", "why"), [(10.0, "as fast as the leader"), (9.999, "intervals overlap"), (11.0, "slower")]
)
def test_who_would_not_lead_needs_none(world, folder, us, why):
    judge(folder, "--all")
    world.us["better"] = us
    judge(folder, *better(folder))
    assert confirmed() == [] and world.measured["better"] == 1, why


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
    last = [r for r in records() if r["kind"] == "benchmark"][-8:]
    assert [(r["variant"], bool(r.get("superseded"))) for r in last] == [
        ("better", True), ("better", True), ("better", False), ("better", False),
        ("good", True), ("good", True), ("good", False), ("good", False),
    ]  # fmt: skip
    assert capsys.readouterr().out.count("FASTER") == 6  # two cases and the geomean, twice
    assert first()[0] == "better"


def test_peers_and_second_sides_are_not_confirmed(world, folder):
    judge(folder, "--all")
    shutil.copy(folder / "variants" / "good.py", folder / "variants" / "peer_p.py")
    world.us["peer_p"] = 1.0
    judge(folder, "--variant", "peer_p")
    world.us["other"] = 12.0
    judge(folder, "--variant", "other", "--against", "other")
    assert confirmed() == []


@pytest.mark.parametrize("groups", range(7))
def test_a_confirmation_is_resumed_as_it_was_decided(world, folder, groups, tmp_path):
    """Even if the board has changed meanwhile."""
    judge(folder, "--all")
    world.left = 3 + 6 + groups
    if groups < 6:
        with pytest.raises(Stop):
            judge(folder, *better(folder))
    else:
        assert judge(folder, *better(folder)) == 0
    world.left = 10**9
    if groups < 6:
        done = list(world.groups)
        machine = environment.machine("cpu")
        fast = [r | {"run_id": "later", "variant": v, "median_us": 1.0, "samples_us": [[1.0]] * 3, "time": record.now()}
                for r in records() if r["kind"] == "benchmark" for v in ("x", "y")]  # fmt: skip
        record.append(machine, "made_up", fast)
        assert judge(folder, "--resume") == 0
        assert len(world.groups) == len(done) + 6 - groups
        assert sum(group[0] == "better+good" for group in world.groups) == 6
    assert len(confirmed()) == 2 and {r["confirms"]["variant"] for r in confirmed()} == {"good"}
    assert all(len(r["samples_us"]) == 3 for r in confirmed())


# --- GPU MODE's limits


@pytest.mark.parametrize(("mode", "limits"), [("leaderboard", [60, 90]), ("benchmark", [180])])
def test_the_limits_of_task_yml_are_those_of_its_phases(world, monkeypatch, mode, limits):
    given = []
    for name in ("run_tests", "run_benchmarks"):
        inner = getattr(world, name)
        monkeypatch.setattr(phases, name, lambda *a, inner=inner: given.append(a[-1]) or inner(*a))
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
    timed = [r for r in record.read(environment.machine("cpu"), "vectoradd") if r["kind"] == "benchmark"]
    assert [(round(r["median_us"]), r["ranking_by"]) for r in timed] == [(36, "mean"), (9, "mean")]
    leader = confirm.present_leader(timed, "cpu", [ranking.case_label(r["case"]) for r in timed], "mean")
    assert leader.value == pytest.approx(22.545, abs=0.001) and leader.lo < leader.value < leader.hi


def test_the_calls_of_a_phase_share_its_limit():
    def call(budget: phases.Budget, handle: SimpleNamespace) -> str:
        if (outcome := budget.exhausted(handle)) is None:
            with budget.spending(handle) as left_s:
                within.append(left_s)
                time.sleep(0.06)
        return outcome.status if outcome else "PASSED"

    within, budget = [], phases.Budget(0.1)
    handles = {
        n: [SimpleNamespace(name=f"{n} {p}", submission=SimpleNamespace(name=n)) for p in range(3)] for n in "ab"
    }
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
