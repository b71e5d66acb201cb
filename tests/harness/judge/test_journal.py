"""The journal of an unfinished run: what was written stays, nothing is recorded twice, one process holds it."""

import argparse
import dataclasses
import errno
import fcntl
import json
import math
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from harness import run
from harness.judge import journal, plan
from harness.judge.journal import Group, Journal
from harness.judge.outcome import Outcome
from harness.judge.verdict import Result
from harness.problem import folders
from harness.problem.folders import UsageError
from harness.results import record
from tests.support import ROOT
from tests.support.hostile import brief
from tests.support.records import full

RIGHT = Outcome("PASSED", "", {"rel": 1e-4, "max": 0.5, "tol": 1.0}, us=12.5, host_us=3.0, setup_us=None)
WRONG = Outcome("INCORRECT", "mismatch found!\nERROR AT (0,): nan 1", {"rel": math.nan, "max": math.inf, "tol": 1.0})
OWN = {"empty": [1.0, 1.1], "read 0": [9.0, 9.1]}
RUN_IDS = [f"2026010{day}T000000-0000000{day}" for day in (1, 2, 3)]


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    return tmp_path


def begun(run_id: str = RUN_IDS[0], **plan_items: object) -> Journal:
    return Journal.create("box", "p", {"run_id": run_id, **plan_items})


def filled() -> Journal:
    """With two tests, one group of a benchmark, one of a confirmation."""
    found = begun(arguments={"mode": "leaderboard"})
    found.test("a", 0, RIGHT)
    found.test("a", 1, WRONG)
    found.group()(Group(0, 1, {"a": [RIGHT, WRONG], "b": []}, OWN, ["7", "8"], ({"sm": 1}, ["hot"])))
    found.group("confirm a")(Group(0, 1, {"a": [RIGHT]}, OWN, ["9"]))
    return found


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- what comes back


def test_what_was_written_comes_back():
    filled().close()
    again = Journal.resume("box", "p")
    have = again.have()
    assert have.test("a", 0) == RIGHT and have.test("b", 0) is None and have.test("a", 2) is None
    wrong = have.test("a", 1)
    assert (wrong.status, wrong.reason, wrong.error["max"]) == ("INCORRECT", WRONG.reason, math.inf)
    assert math.isnan(wrong.error["rel"])
    group = have.group(0, 1)
    assert group.outcomes["a"][0] == RIGHT and group.outcomes["a"][1].status == "INCORRECT"
    assert group.outcomes["b"] == [] and "c" not in group.outcomes
    assert (group.own, group.seeds, group.state) == (OWN, ["7", "8"], ({"sm": 1}, ["hot"]))
    assert have.group(0, 0) is None and have.group(1, 1) is None
    assert again.have("confirm a").group(0, 1) == Group(0, 1, {"a": [RIGHT]}, OWN, ["9"])
    assert again.have("confirm b").groups == {}
    assert again.plan["arguments"] == {"mode": "leaderboard"} and again.run_id == RUN_IDS[0]
    assert again.go_on() == 1 and again.go_on() == 2


def test_every_field_of_an_outcome_survives():
    """Whatever fields an outcome has: a new one must be something that JSON brings back."""
    outcome = Outcome(**{field.name: 1.5 for field in dataclasses.fields(Outcome)})
    begun().test("a", 0, outcome)
    (path,) = journal.unfinished("box", "p")
    (line,) = [line for line in lines(path) if line["kind"] == "test"]
    assert set(line["outcome"]) == {field.name for field in dataclasses.fields(Outcome)}
    assert Outcome(**line["outcome"]) == outcome


def test_it_can_be_cut_anywhere_and_goes_on():
    """Whatever a kill leaves of the file: whole lines are kept, the torn one is done again, new ones are not glued."""
    source = filled()
    source.close()
    whole, path = source.path.read_bytes(), source.path
    plan_end = whole.index(b"\n") + 1
    for cut in [*range(plan_end, len(whole), 7), len(whole)]:
        path.write_bytes(whole[:cut])
        again = Journal.resume("box", "p")
        again.go_on()
        again.test("late", 0, RIGHT)
        again.close()
        (kept, _), (before, _) = journal._parse(path.read_bytes(), path), journal._parse(whole[:cut], path)
        count = whole[:cut].count(b"\n")
        assert kept[:count] == before[:count]
        assert [line["kind"] for line in kept[-2:]] == ["resumed", "test"], cut
        assert path.read_bytes().startswith(whole[:cut])


@pytest.mark.parametrize("end", [b"", b'{"kind": "te'])
def test_a_resume_that_is_refused_changes_nothing(end):
    """Also where the run was killed before it had a result, or within a line."""
    path = begun().path
    for held in (path.read_bytes() + end, filled().path.read_bytes() + end):
        path.write_bytes(held)
        for _ in range(2):
            again = Journal.resume("box", "p")
            assert again.resumable
            again.close()
            assert journal.settle("box", "p") == ([], [RUN_IDS[0]]) and path.read_bytes() == held
    again = Journal.resume("box", "p")
    assert again.go_on() == 1
    again.close()
    assert [line["kind"] for line in journal._parse(path.read_bytes(), path)[0]][-1] == "resumed"


def test_an_empty_journal_is_removed_and_one_of_garbage_is_kept_and_named(results):
    (results / "box").mkdir()
    path = results / "box" / f"p.{RUN_IDS[0]}.partial.jsonl"
    path.write_bytes(b"")
    assert journal.settle("box", "p") == ([], []) and not path.exists()
    for garbage in (b'{"kind": "pla', b"\0" * 99, b"\n\n"):
        path.write_bytes(garbage)
        assert journal.settle("box", "p") == ([], []) and path.read_bytes() == garbage
        (said,) = journal.damaged("box", "p")
        assert f"box/{path.name}:" in said and f"mend that line of {path}, or move the file away" in said


def test_an_older_run_goes_on_and_the_damaged_newer_one_is_named():
    filled().close()
    newer = begun(RUN_IDS[1])
    newer.path.write_bytes(b"{\n")
    newer._file.close()
    again = Journal.resume("box", "p")
    assert again.run_id == RUN_IDS[0] and f"{RUN_IDS[1]}.partial.jsonl:1: broken line" in again.complaints[0]


# --- who holds it


def test_the_newest_that_nobody_holds_is_resumed():
    held = [begun(run_id) for run_id in RUN_IDS]
    held[0].close(), held[1].note("x")
    held[1].close()
    again = Journal.resume("box", "p")
    assert again.run_id == RUN_IDS[1]  # the first had nothing but its plan, the last is being written
    with pytest.raises(UsageError, match=f"{RUN_IDS[1]} of p is being run"):
        Journal.resume("box", "p", RUN_IDS[1])
    with pytest.raises(UsageError, match="no run x of p on box"):
        Journal.resume("box", "p", "x")


def test_the_lock_ends_with_its_process():
    script = (
        "import sys\nfrom pathlib import Path\nfrom harness.results import record\n"
        "from harness.judge.journal import Journal\n"
        f"record.RESULTS = Path(sys.argv[1])\nheld = Journal.create('box', 'p', {{'run_id': {RUN_IDS[0]!r}}})\n"
        "print('ready', flush=True)\nsys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script, str(record.RESULTS)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    assert other.stdout.readline() == b"ready\n"
    with pytest.raises(UsageError, match="being run by another process"):
        Journal.resume("box", "p")
    assert journal.settle("box", "p") == ([], [])
    other.kill()
    other.communicate()
    assert Journal.resume("box", "p").run_id == RUN_IDS[0]


def test_settling_takes_no_journal_from_one_who_begins():
    """Another process may look at a journal that has no plan yet; it is made again until it is held."""
    stop = threading.Event()

    def settle():
        while not stop.is_set():
            journal.settle("box", "p")

    thread = threading.Thread(target=settle)
    thread.start()
    try:
        for number in range(150):
            made = begun(f"20260101T000000-{number:08x}")
            assert lines(made.path)[0]["kind"] == "plan"
            made.close()
            assert not made.path.exists()
    finally:
        stop.set()
        thread.join()


# --- the end


def test_the_records_replace_the_journal(results):
    record.append("box", "p", full("old", 2.0))
    found = filled()
    found.finish(full("a", 1.0, run=found.run_id))
    assert [r["variant"] for r in record.read("box", "p")] == ["old"] * 3 + ["a"] * 3
    assert not found.path.exists() and journal.unfinished("box", "p") == []


def test_a_record_that_json_cannot_hold_writes_nothing():
    found = filled()
    with pytest.raises(ValueError, match="finite"):
        found.finish([{"run_id": found.run_id, "median_us": math.nan}])
    assert record.read("box", "p") == [] and not found.noted("final")


@pytest.mark.parametrize("wrong", [{"median_us": "soon"}, {"status": "FINE"}, {"n": math.nan}])
def test_a_record_that_is_none_is_not_copied_from_a_journal(results, wrong):
    """It stays in the journal, which is named; the run's work is all there, and it goes on."""
    found = filled()
    found.note("final", records=[*full("a", 1.0)[:2], full("a", 1.0)[2] | wrong])
    found._file.close()
    kept = found.path.read_bytes()
    assert journal.settle("box", "p") == ([], [RUN_IDS[0]])
    assert found.path.read_bytes() == kept and record.read("box", "p") == []
    again = Journal.resume("box", "p")
    (complaint,) = again.complaints
    assert complaint.startswith(f"box/{found.path.name}:6: records.2: ") and complaint.endswith(": left out")
    assert repr(again.have()) == repr(found.have())
    again.finish(full("a", 1.0))
    assert record.read("box", "p") == full("a", 1.0)


def test_a_kill_while_the_records_are_written_loses_none_and_doubles_none(results):
    """Cut the file of records anywhere in what the run appended, with the journal still there."""
    before, mine = full("old", 2.0), full("a", 1.0, run=RUN_IDS[0])
    truth = record.append("box", "p", before)
    start = truth.read_bytes()
    appended = b"".join(json.dumps(line).encode() + b"\n" for line in mine)
    found = filled()
    found._write({"kind": "final", "records": mine})
    found.close()
    kept = found.path.read_bytes()
    for cut in [*range(0, len(appended), 101), len(appended) - 1, len(appended)]:
        found.path.write_bytes(kept)
        truth.write_bytes(start + appended[:cut])
        assert journal.settle("box", "p") == ([RUN_IDS[0]], [])
        assert truth.read_bytes().startswith(start + appended[:cut]), "nothing that stood was rewritten"
        assert record.read("box", "p") == before + mine, cut
        assert not found.path.exists()


def test_unfinished_runs_count_as_attempts():
    filled()
    assert journal.attempts("box", "p", "a") == {RUN_IDS[0]} == journal.attempts("box", "p", "b")
    assert journal.attempts("box", "p", "c") == set() == journal.attempts("box", "q", "a")


def test_another_problems_journal_is_not_mine():
    Journal.create("box", "p.more", {"run_id": RUN_IDS[0]}).note("x")
    assert journal.unfinished("box", "p") == [] and len(journal.unfinished("box", "p.more")) == 1


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_git_ignores_it_even_on_a_listed_machine(tmp_path):
    shutil.copy(ROOT / ".gitignore", tmp_path)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    folder = tmp_path / "leaderboard" / "results" / "nvidia-h200"
    folder.mkdir(parents=True)
    for name in ("p.jsonl", f"p.{RUN_IDS[0]}.partial.jsonl"):
        (folder / name).touch()
    seen = ["git", "ls-files", "--others", "--exclude-standard", "leaderboard"]
    said = subprocess.run(seen, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.split()
    assert said == ["leaderboard/results/nvidia-h200/p.jsonl"]


# --- the plan


def planned(**changes: object) -> dict:
    gemv = folders.find("nvfp4_gemv")
    arguments = run.parser().parse_args(["nvfp4_gemv", "--variant", "cpu_avx2"])
    tests, benchmarks = gemv.tests[:2], gemv.benchmarks["cpu"]
    made = plan.make(RUN_IDS[0], gemv, "cpu", arguments, [Result(gemv.variant("cpu_avx2"), "cpu")], tests, benchmarks)
    return {**json.loads(json.dumps(made)), **changes}


def test_a_plan_holds_against_itself():
    plan.compare(planned(), planned(run_id="another", time="later"), Path("x"))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("harness_hash", "0", "the judge"),
        ("problem_hash", "0", "the problem's own files"),
        ("tests", [], "the test cases"),
        ("benchmarks", [], "the benchmark cases"),
        ("target", "sm90", "the target"),
        ("submissions", {"cpu_avx2": "0"}, "the submissions, cpu_avx2"),
        ("environment", {}, "the environment"),
        ("submissions", {}, "the submissions, cpu_avx2"),
        ("schema", 0, "the records' schema"),
    ],
)
def test_what_changed_is_said(key, value, said):
    with pytest.raises(UsageError, match=f"changed since it began: .*{said}"):
        plan.compare(planned(**{key: value}), planned(), Path("x"))


def test_a_resumed_run_has_the_options_it_began_with():
    defaults = run.parser().parse_args([])
    begun_with = planned()
    arguments = run.parser().parse_args(["nvfp4_gemv", "--resume"])
    plan.adopt(begun_with, arguments, defaults)
    assert arguments.variant == "cpu_avx2" and arguments.mode == "leaderboard"
    plan.adopt(begun_with, run.parser().parse_args(["nvfp4_gemv", "--resume", "--variant", "cpu_avx2"]), defaults)
    with pytest.raises(UsageError, match="--variant was 'cpu_avx2', got 'other'"):
        plan.adopt(begun_with, argparse.Namespace(**{**vars(defaults), "variant": "other"}), defaults)


def test_a_submission_means_the_same_from_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("")
    gemv = folders.find("nvfp4_gemv")
    arguments = run.parser().parse_args(["nvfp4_gemv", "--submission", "mine.py", "--against", "cpu_avx2"])
    made = plan.make(RUN_IDS[0], gemv, "cpu", arguments, [Result(gemv.variant("cpu_avx2"), "cpu")], gemv.tests, ())
    assert made["arguments"]["submission"] == str(tmp_path / "mine.py")
    assert made["arguments"]["against"] == "cpu_avx2"


# --- trouble with the disk, and lines that are not as they must be


def test_what_cannot_be_written_stays_out_and_the_run_goes_on(monkeypatch):
    found = filled()
    before = found.path.read_bytes()
    with monkeypatch.context() as patch:
        real = os.write
        patch.setattr(
            os, "write", lambda fd, data: real(fd, bytes(data)[:30]) if len(data) > 30 else fail(errno.ENOSPC)
        )
        with pytest.raises(record.StorageError, match=f"{found.path.name} .free some space"):
            found.test("b", 0, RIGHT)
        patch.setattr(os, "write", real)
        patch.setattr(os, "fsync", lambda fd: fail(errno.EIO))
        with pytest.raises(record.StorageError, match="Input/output error"):
            found.test("b", 0, RIGHT)
        with pytest.raises(record.StorageError):
            found.finish(full("a", 1.0, run=found.run_id))
        assert found.path.read_bytes() == before and found.resumable
        found.close()
    again = Journal.resume("box", "p")
    assert again.complaints == [] and again.have().test("b", 0) is None and again.have().test("a", 0) == RIGHT
    again.finish(full("a", 1.0, run=again.run_id))
    assert record.read("box", "p") == full("a", 1.0, run=again.run_id) and not again.path.exists()


def fail(error: int) -> None:
    raise OSError(error, os.strerror(error))


def test_a_full_disk_at_the_end_leaves_the_records_due(monkeypatch):
    found, mine = filled(), full("a", 1.0, run=RUN_IDS[0])
    with monkeypatch.context() as patch:
        real, truth = record.add_line, []

        def add(file, line):
            if file is not found._file:
                truth.append(line)
                if len(truth) == 2:
                    fail(errno.ENOSPC)
            real(file, line)

        patch.setattr(record, "add_line", add)
        with pytest.raises(record.StorageError, match=r"p\.jsonl"):
            found.finish(mine)
        found.close()
    assert record.read("box", "p") == mine[:1] and found.path.exists()
    assert journal.settle("box", "p") == ([RUN_IDS[0]], []) and record.read("box", "p") == mine


def test_a_journal_that_cannot_begin_leaves_nothing(monkeypatch, results):
    with monkeypatch.context() as patch:
        patch.setattr(record, "add_line", lambda file, line: fail(errno.ENOSPC))
        with pytest.raises(record.StorageError):
            begun()
    assert list(results.rglob("*.jsonl")) == [] and begun().resumable is False


def test_a_file_system_without_locks_is_an_error_and_no_endless_loop(monkeypatch):
    monkeypatch.setattr(fcntl, "flock", lambda *_: fail(errno.ENOLCK))
    with pytest.raises(record.StorageError, match="No locks available"):
        begun()


@pytest.mark.parametrize(
    "broken",
    [
        "[" * 100_000,
        '{"kind": "test", "a": ' + "[" * 100_000,
        b"\xff\xfe{",
        '{"kind": ' + "1" * 10_000 + "}",
        "17",
        "null",
        '{"kind": 5}',
        '{"kind": "test"}',
        '{"kind": "test", "submission": "a", "case": 0, "outcome": {"status": "FINE"}}',
        '{"kind": "test", "submission": "a", "case": 0, "outcome": {"status": "PASSED", "us": "x"}}',
        '{"kind": "test", "submission": "a", "case": 0, "outcome": {"status": "PASSED", "other": 1}}',
        '{"kind": "group", "outcomes": {"a": 5}}',
        '{"kind": "final", "records": [5]}',
        '{"kind": "final"}',
        '{"kind": "clock"}',
        '{"kind": "audit", "submissions": {"a": 5}}',
        '{"kind": "confirm"}',
        '{"kind": "plan"}',
        "x" * 2**20,
    ],
    ids=brief,
)
def test_a_broken_line_of_a_journal_is_work_that_is_done_again(broken):
    path = filled().path
    with path.open("ab") as file:
        file.write((broken if isinstance(broken, bytes) else broken.encode()) + b"\n")
    data = path.read_bytes()
    assert journal.settle("box", "p")[0] == [] and journal.attempts("box", "p", "a")
    again = Journal.resume("box", "p")
    (complaint,) = again.complaints
    assert complaint.startswith(f"box/{path.name}:6: ") and complaint.endswith(": left out") and len(complaint) < 400
    assert again.have().test("a", 0) == RIGHT and again.have().group(0, 1) and again.have("confirm a").group(0, 1)
    again.close()
    assert path.read_bytes().startswith(data)


def test_numbers_beyond_json_come_back():
    """A claim is kept as it came."""
    path = filled().path
    with path.open("a") as file:
        file.write('{"kind": "test", "submission": "b", "case": 0, "outcome": ')
        file.write('{"status": "PASSED", "us": 1e999, "host_us": NaN}}\n')
    assert Journal.resume("box", "p").have().test("b", 0).us == math.inf


def test_a_journal_whose_plan_is_broken_is_kept_for_a_person():
    source = filled()
    source.close()
    lines = source.path.read_bytes().split(b"\n")
    for plan_ in (b"{", b'{"kind": "plan"}', b'{"kind": "plan", "run_id": 5}'):
        source.path.write_bytes(b"\n".join([plan_, *lines[1:]]))
        assert journal.settle("box", "p") == ([], []) and source.path.exists()
        for run_id in (None, RUN_IDS[0]):
            with pytest.raises(UsageError, match=rf"--resume: box/p\.{RUN_IDS[0]}\.partial\.jsonl:1: .*mend that line"):
                Journal.resume("box", "p", run_id)


def test_a_problems_name_is_no_pattern():
    found = Journal.create("box", "p[a]*", {"run_id": RUN_IDS[0]})
    found.note("x")
    found.close()
    assert journal.unfinished("box", "p[a]*") == [found.path] and journal.unfinished("box", "pa*") == []


def test_a_plan_without_options_is_bad_use():
    defaults = run.parser().parse_args([])
    for arguments in (5, {}, {"mode": "test"}):
        with pytest.raises(UsageError, match="does not say its options"):
            plan.adopt(planned(arguments=arguments), run.parser().parse_args([]), defaults)
    with pytest.raises(UsageError, match="the submissions, cpu_avx2"):
        plan.compare(planned(submissions=[5]), planned(), Path("x"))
