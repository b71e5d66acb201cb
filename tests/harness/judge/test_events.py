"""What a run says besides its text: --events, --json, --quiet and --case, in runs on made-up sessions."""

import dataclasses
import json
import math
import os
import re
from pathlib import Path

import pytest

from harness.judge import phases
from harness.judge.events import Events
from harness.judge.phases import Counts
from harness.judge.session import Step
from harness.problem.folders import Case, has_words
from tests.harness.judge.test_phases import Counting, RunnerHandle, Submission
from tests.support import ROOT, json_lines, write_files
from tests.support.hostile import HOSTILE
from tests.support.recorded import Stop, judge, records, unfinished

# --- --events


@pytest.fixture
def file(tmp_path) -> Path:
    """Where events go."""
    return tmp_path / "events"


def test_a_run_is_told_line_by_line(world, folder, file, capsys):
    assert judge(folder, "--variant", "good", "--events", str(file)) == 0
    said = json_lines(file)
    assert [one["event"] for one in said] == ["start", "verdict", "next", "end"]
    assert all(isinstance(one["time"], float) for one in said)
    start, verdict, following, end = said
    assert "--mode profile" in following["command"] and following["why"] and end["exit_code"] == 0
    assert (start["problem"], start["device"], start["mode"]) == ("made_up", "cpu", "leaderboard")
    assert (verdict["variant"], verdict["status"], verdict["reason"]) == ("good", "PASSED", "")
    assert verdict["time_us"] == pytest.approx(10.0, rel=0.01) and len(verdict["ci95_us"]) == 2
    assert judge(folder, "--variant", "good", "--events", str(file)) == 0
    assert len(json_lines(file)) == 8, "lines are appended"


def test_the_first_mismatch_of_each_submission_is_told_with_its_element(world, folder, file, monkeypatch):
    inner = world.run_tests

    def tests(session, handles, cases, done, *more):
        def wrong(handle, case, outcome):
            if outcome.status == "INCORRECT":
                outcome.reason = f"mismatch found! 1 of 2\nERROR AT (0, 3): {'nan' if case.seed == 7 else 1} -2.5"
            done(handle, case, outcome)

        inner(session, handles, cases, wrong, *more)

    monkeypatch.setattr(phases, "run_tests", tests)
    world.wrong = {"other"}
    assert judge(folder, "--all", "--events", str(file)) == 1
    (said,) = [one for one in json_lines(file) if one["event"] == "mismatch"]
    assert (said["variant"], said["case"], said["status"]) == ("other", {"n": 1}, "INCORRECT")
    assert (said["index"], said["expected"], said["got"]) == ([0, 3], -2.5, "nan")


def test_verdict_of_undecided_pair_says_how_many_processes_to_try(world, folder, file, monkeypatch):
    inner, levels = world.calls, {"good": 0.0075, "other": 0.0}

    def calls(name, process):
        us = 10 * math.exp(levels[name] * (process - 1))
        return [dataclasses.replace(one, us=us) for one in inner(name, process)]

    monkeypatch.setattr(world, "calls", calls)
    words = ["--variant", "good", "--against", "other", "--mode", "benchmark", "--case", "n=1000"]
    assert judge(folder, *words, "--events", str(file)) == 0
    (found,) = [one for one in json_lines(file) if one["event"] == "verdict" and one["variant"] == "good"]
    assert found["against"]["word"] == "UNDECIDED" and "--processes 12" in found["reason"]


def test_a_run_that_stops_says_why_and_how_to_go_on(world, folder, file):
    assert judge(folder, "--resume", "x", "--events", str(file)) == 2
    error, end = json_lines(file)
    assert "no unfinished run x of made_up" in error["reason"] and end["exit_code"] == 2
    world.left = 9
    with pytest.raises(Stop):
        judge(folder, "--all", "--events", str(file))
    last = json_lines(file)[-1]
    assert last["event"] == "end" and last["exit_code"] is None and len(unfinished()) == 1


def test_the_fields_are_those_that_the_docs_name(world, folder, file):
    page = (ROOT / "docs" / "records.md").read_text().partition("## The lines of --events")[2]
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| (.*) \|$", page, re.MULTILINE)
    known = {event: set(re.findall(r"`(\w+)`", fields)) for event, fields in rows}
    world.wrong = {"other"}
    assert judge(folder, "--all", "--events", str(file)) == 1 and judge(folder, "--resume", "--events", str(file)) == 2
    made = Events(str(file))
    made.step(Step("test", 0, 1, "x"))
    made.close()
    said = json_lines(file)
    assert {one["event"] for one in said} == set(known)
    for one in said:
        assert one.keys() - {"event", "time"} <= known[one["event"]], one


def test_phases_have_a_first_and_a_last_line_and_few_between(file):
    made = Events(str(file))
    for phase in ("test", "benchmark"):
        for n in range(100):
            made.step(Step(phase, n, 99, "x"))
            made.step(Step(phase, n, 99, "y"))
    made.close()
    said = [(one["phase"], one["n"], one["total"]) for one in json_lines(file)]
    for phase in ("test", "benchmark"):
        of = [one for one in said if one[0] == phase]
        assert of[0] == (phase, 0, 99) and of[-1] == (phase, 99, 99) and 2 <= len(of) < 100


def test_hostile_text_is_one_line_of_json(file):
    made = Events(str(file))
    for said in HOSTILE:
        made.failed(said, {"x": said, "y": float("nan")}, "INCORRECT", f"{said}\nERROR AT (1,): inf 2")
        made.failed(said, {}, "INCORRECT", "")
    made.close()
    for one in json_lines(file):
        assert (one["index"], one["expected"], one["got"], one["case"]["y"]) == ([1], 2.0, "inf", None)


def test_what_cannot_be_written_is_known_before_and_a_full_disk_stops_no_run(world, folder, tmp_path, capsys):
    assert judge(folder, "--events", str(tmp_path)) == 2
    assert "--events: cannot write" in capsys.readouterr().err and world.tests == []
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    assert judge(folder, "--variant", "good", "--events", "/dev/full") == 0
    assert capsys.readouterr().err.count("nothing more is written") == 1 and len(records()) == 5


def test_no_step_is_beyond_the_total_on_a_busy_machine():
    """Calls beside which the machine was busy are made again: more than the plan has."""

    class Busy(Counting):
        def call(self, handle, request):
            outcome = super().call(handle, request)
            outcome.busy = True
            return outcome

    session = Busy()
    handles = [RunnerHandle(name, Submission(name, None, ("cpu",)), "cpu") for name in ("a", "b")]
    how = Counts(processes=2, samples=3, warmups=1, buffers=2, extra=2)
    cases = [Case({"n": n}, 1, bytes=1) for n in (1, 2)]
    phases.run_benchmarks(session, handles, cases, how)
    steps = session.steps
    assert {step.total for step in steps} == {2 * 2 * (1 + 3)}
    counts = [step.n for step in steps]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == 16
    said = " ".join(step.said for step in steps)
    assert "call 3/3" in said and "call 4/3" not in said and "call 5/3" not in said
    assert "again, the machine was busy" in said and "warm-up" in said


def test_records_on_standard_output_are_all_that_is_there(world, folder, capsys):
    assert judge(folder, "--variant", "good", "--json", "-") == 0
    out, err = capsys.readouterr()
    assert [json.loads(line) for line in out.splitlines()] == records() and len(records()) == 5
    assert "torch" in err and "PASSED" in err and "saved" in err


def test_records_go_to_what_a_link_leads_to_and_the_link_stays(world, folder, tmp_path):
    place = write_files(tmp_path / "elsewhere", {"old.json": "old"})
    for name, target in (("link", "elsewhere/old.json"), ("second", "link"), ("dangling", "elsewhere/new.json")):
        (tmp_path / name).symlink_to(target)
    for name, target in (("second", "old.json"), ("dangling", "new.json")):
        assert judge(folder, "--variant", "good", "--mode", "test", "--json", str(tmp_path / name)) == 0
        assert (tmp_path / name).is_symlink() and len(json_lines(place / target)) == 3
    assert (tmp_path / "link").is_symlink() and sorted(os.listdir(place)) == ["new.json", "old.json"]


def test_quiet_prints_the_verdicts_and_what_was_asked_for(world, folder, capsys):
    world.wrong = {"other"}
    assert judge(folder, "--all", "--quiet") == 1
    out, err = capsys.readouterr()
    good, other, last = out.splitlines()
    assert err == ""
    assert good.startswith("good ") and "geomean 10.0" in good
    assert other.startswith("other ") and " INCORRECT " in other and "saved" in last
    assert judge(folder, "--variant", "good") == 0 and "torch" in capsys.readouterr().out, "it is for one run"
    world.wrong = set()
    assert judge(folder, "--variant", "good", "--against", "other", "--quiet") == 0
    out = capsys.readouterr().out
    assert out.count("good / other = ") == 3 and "torch" not in out


def test_all_words_must_be_those_of_the_case():
    case = Case({"tokens": 4096, "router": "uniform", "k": 64, "k2": 640, "m": [1, 2]}, 1)
    held = ["tokens=4096 router=uniform", "router=uniform tokens=4096", "k=64", "  k=64 ", "", "unifo", "4096 k=64"]
    held += ["m=[1,", "2]"]
    others = ["k=6", "=64", "k=", "tokens=4096 k=65", "nothing", "okens=4096"]
    assert [words for words in held + others if has_words(str(case), words)] == held


def test_a_case_that_no_one_has_names_those_there_are(world, folder, capsys):
    assert judge(folder, "--variant", "good", "--case", "n=3", "--mode", "test") == 2
    assert "--case must match a test case of made_up (n=1; n=2; n=2), got 'n=3'" in capsys.readouterr().err
    assert judge(folder, "--variant", "good", "--case", "n=2") == 2
    said = capsys.readouterr().err
    assert "(n=1000; n=4000), got 'n=2'; test cases are chosen with --mode test" in said
