"""What a run prints: each failure once, a table that fits, and text of submissions as data."""

import dataclasses
import json
import math
import shutil
from unittest.mock import Mock

import pytest

from harness.judge import console, session, verdict
from harness.judge.options import Options
from harness.judge.outcome import Outcome
from harness.judge.readings import ReferenceReadings, Timing
from harness.judge.session import Step
from harness.problem import folders, sources
from harness.problem.folders import Case
from harness.results import output, record, text
from harness.results.ranking import Leader
from tests.support.hostile import HOSTILE, brief

MOE = folders.find("moe_gemm")
CASES = list(MOE.benchmarks["cpu"])
ROOFLINE = ReferenceReadings(800.25, "matmul at 795 TFLOP/s", "flops", 3.0, 10**9, ["1"])


def result(name: str, us: float = 1234.56, cases=CASES, failure=None, busy=0, readings=ROOFLINE) -> verdict.Result:
    """A variant of moe_gemm that took so long in every case; of six calls so many waited for a processor."""
    made = verdict.Result(MOE.variant(name), "cpu")
    for case in cases:
        calls = [
            Outcome("PASSED", us=us, error={"rel": 1.7e-3, "max": 1.0, "tol": 2.0}, busy=i < busy) for i in range(6)
        ]
        made.times.append(verdict.aggregate(Timing(case, [calls[:3], calls[3:]], failure), readings))
    return made


@pytest.fixture
def shown(capsys, monkeypatch):
    """The lines of the table of times in a terminal of so many columns."""

    def lines(*judged: verdict.Result, columns: int = 160) -> list[str]:
        monkeypatch.setattr(console, "width", lambda: columns)
        console.times(judged, console.places(judged), verdict.Recorder(MOE, "cpu").warnings_of)
        return capsys.readouterr().out.splitlines()

    return lines


@pytest.mark.parametrize("count", [80, 120, 160])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_no_number_is_cut_and_every_row_fits(shown, device, count):
    cases = list(MOE.benchmarks[device])
    lines = shown(result("cpu_avx512", cases=cases), result("torch_grouped", 2469.12, cases), columns=count)
    said = "\n".join(lines)
    assert said.count("1,235..1,235") == said.count(" 1,235 ") == (1 if count == 80 else 1 + len(cases))
    assert said.count("65%") == said.count(" 1,235 ") and "2 (2.00x)" in said and "\u2026" not in said
    assert ("800.2 flops" in said) == (count > 80)
    assert max(len(line.partition("  tokens=")[0]) for line in lines) <= count


def test_every_case_is_named(shown):
    """Of one variant in a narrow terminal too; what all cases share once; a case alone above, also without a name."""
    said = "\n".join(shown(result("cpu_avx512"), columns=80))
    assert all(f"  tokens={case.params['tokens']}" in said for case in CASES) and said.count("hidden=1024") == 1
    failed = result("torch_grouped", cases=CASES[:1], failure=Outcome("INCORRECT", "mismatch found!"))
    lines = shown(result("cpu_avx512", cases=CASES[:1]), failed)
    assert [line for line in lines if line.startswith("Case: ") and str(CASES[0]) in line]
    assert [line for line in lines if line.startswith("torch_grouped ") and "INCORRECT" in line]
    assert "Case: (no parameters)" in shown(result("cpu_avx512", cases=[Case({}, 1)]))


@pytest.mark.parametrize(
    ("us", "busy", "readings", "share", "notes"),
    [
        (1234.56, 4, {"roofline_us": 20.0, "resolution_us": 20.0}, "", ["busy: 4 of 6", "roofline below"]),
        (700.0, 0, {"stated": True}, "114%", ["stays in a cache"]),
        (700.0, 0, {"stated": False}, "114%", ["all inputs and outputs"]),
    ],
)
def test_warnings_are_footnotes(shown, us, busy, readings, share, notes):
    """And an unresolved roofline has no share."""
    lines = shown(result("cpu_avx512", us, CASES[:1], busy=busy, readings=dataclasses.replace(ROOFLINE, **readings)))
    row = next(line for line in lines if line.startswith("cpu_avx512"))
    assert row.endswith("[1][2]" if len(notes) == 2 else " [1]") and share in row and bool(share) == ("%" in row)
    for number, note in enumerate(notes, 1):
        assert note in next(line for line in lines if line.startswith(f"[{number}] "))


def test_times_of_a_busy_machine_are_busy_and_no_success(capsys):
    for busy, word, code in ((3, "PASSED", 0), (4, "BUSY", 6)):
        judged = result("cpu_avx512", busy=busy)
        console.verdicts([judged], {}, brief=True)
        assert judged.verdict == "PASSED" and verdict.exit_code([judged.word], everything=False) == code
        assert capsys.readouterr().out.startswith(f"cpu_avx512  {word}  geomean 1,235 us")


def test_each_failure_is_printed_once_and_counted(capsys):
    failures = console.Failures()
    for m, line in [*((m, 3) for m in range(5)), (9, 4)]:
        outcome = Outcome("RUNTIME_ERROR", f"mine.py:{line}: KeyError: {m}\nTraceback\n  deep")
        failures.add("mine", Case({"m": m}, 1), outcome)
    failures.close()
    out = capsys.readouterr().out
    assert out.count("Traceback") == 2 and out.count("mine.py:3") == 2 and "mine  and 4 more cases" in out


def test_a_compilers_report_is_printed_once(capsys):
    outcome = Outcome("COMPILE_ERROR", "mine.cu:7: error: no such\nnvcc mine.cu\nmine.cu(7): error: no such\n  7 | x")
    failures, judged = console.Failures(), result("cpu_avx512", cases=CASES[:2], failure=outcome)
    for case in CASES[:2]:
        failures.add("mine", case, outcome)
    failures.close()
    console.verdicts([judged], {}, brief=False)
    out = capsys.readouterr().out
    assert out.count("no such") == 1 and "mine  and 1 more case: COMPILE_ERROR\n" in out
    assert "mine.cu:7, see above" in out
    console.verdicts([judged], {}, brief=True)
    assert "mine.cu:7: error: no such" in capsys.readouterr().out


def test_a_wrong_answer_has_a_line_for_each_case_and_its_elements_once(capsys):
    failures = console.Failures()
    count = "mismatch found! custom implementation doesn't match reference: Number of mismatched elements: "
    for m in (16, 32):
        elements = "\n".join(f"ERROR AT ({i}, 0): nan -762.508" for i in range(3))
        unwritten = f"never written: {m} elements hold the NaN that was there before the call"
        failures.add("mine", Case({"m": m}, 1), Outcome("INCORRECT", f"{count}{m} of 64\n{elements}\n{unwritten}"))
    failures.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("mine")] == [
        f"mine  m={m}  INCORRECT: {m} of 64 elements differ" for m in (16, 32)
    ]
    assert lines[1].split() == ["element", "got", "wanted"]
    assert [line.split()[-3:] for line in lines[2:5]] == [["never", "written", "-762.508"]] * 3


def test_the_case_of_a_verdict_is_one_of_its_verdict(capsys):
    judged = verdict.Result(MOE.variant("cpu_avx512"), "cpu")
    ended = [("PASSED", ""), ("INCORRECT", "wrong"), ("RUNTIME_ERROR", "it broke; it printed: x"), ("TIMEOUT", "late")]
    judged.tests += [(Case({"m": m}, 1), Outcome(*said)) for m, said in enumerate(ended)]
    console.verdicts([judged], {}, brief=False)
    assert capsys.readouterr().out == "cpu_avx512  RUNTIME_ERROR  3 of 4 cases, first m=2: it broke\n"


def test_what_a_submission_printed_ends_with_how_much_more_there_is(capsys):
    console.printed("mine", ["a\x1b[2J", "b"], 5)
    assert capsys.readouterr().out.splitlines() == ["mine printed:", "    a", "    b", "    ... 3 more lines"]


@pytest.mark.parametrize(
    ("name", "change", "arguments", "wanted"),
    [
        ("cpu_avx512", {}, {}, "--against cpu_plain"),
        ("cpu_avx512", {"us": 2000.0}, {}, "--mode profile"),
        ("cpu_avx512", {"busy": 6}, {"mode": "benchmark"}, "--mode benchmark"),
        ("cpu_avx512", {"cases": []}, {"mode": "test"}, "cpu_avx512"),
        ("sm90_grouped", {"status": "UNSUPPORTED"}, {}, "--device model --mode test"),
        ("cpu_avx512", {"status": "COMPILE_ERROR"}, {}, "--mode test"),
    ],
)
def test_a_run_ends_with_a_command_that_helps(name, change, arguments, wanted):
    status = change.pop("status", "")
    judged = result(name, **change) if not status else verdict.Result(MOE.variant(name), "cpu", status, "why")
    judged.tests += [(CASES[0], Outcome("PASSED"))] if change.get("cases") == [] else []
    leader = Leader("cpu_plain", "a", "run", 1200.0, 1190.0, 1210.0)
    command, why = console.following(Options(problem="moe_gemm", **arguments), MOE, [judged], leader)
    assert command.endswith(wanted) and f"--variant {name}" in command and why
    assert "1.03x the time of cpu_plain" in console.unranked(result("cpu_avx512"), leader)


@pytest.mark.parametrize("said", HOSTILE[::3], ids=brief)
def test_hostile_names_cases_and_reasons_are_printed_as_text(capsys, said):
    """In every function that prints nothing but text comes out."""
    case, submission = Case({"m": said}, 1), dataclasses.replace(MOE.variant("cpu_avx512"), name=said, summary=said)
    readings = dataclasses.replace(ROOFLINE, roofline_config=said, roofline_kind=said)
    judged = [verdict.Result(submission, "cpu") for _ in range(3)]
    for j, failure in zip(judged, (None, Outcome("INCORRECT", said), None), strict=True):
        j.times = result("cpu_avx512", cases=[case], failure=failure, readings=readings).times
        j.tests.append((case, Outcome("RUNTIME_ERROR" if failure else "PASSED", said)))
    pair = {"variant": said, "ratio": 1.0, "ci95": [0.9, 1.1], "word": said, "processes": 6}
    judged[0].against, judged[0].against_all = [pair], pair
    judged[2].status, judged[2].reason = "RULE_BROKEN", said
    console.say(said)
    console.Failures().add(said, case, Outcome("INCORRECT", said))
    console.printed(said, [said], 2)
    console.times(judged, {}, lambda _: [said])
    console.against(judged[0])
    console.verdicts(judged, {said: "1"}, brief=True)
    with console.progress() as progress:
        progress(Step("test", 1, 2, said))
    out = capsys.readouterr().out
    assert all(char.isprintable() or char == "\n" for char in out), ascii(out)
    if said.isprintable() and len(said) < 40:
        assert out.count(said) >= 10


def test_a_terminal_has_a_bar_and_others_have_lines(monkeypatch, capsys):
    monkeypatch.setattr(console, "BAR_S", 0.02)
    monkeypatch.setattr(console, "EVERY_S", 0.02)
    for terminal in (True, False):
        monkeypatch.setattr(console, "is_terminal", lambda terminal=terminal: terminal)
        seen = []
        with console.progress(seen.append) as progress:
            progress(Step("benchmark", 2, 3, "call 2"))
            said = ""
            while "call 2" not in said:  # one step that takes long
                said += capsys.readouterr().out
        assert "benchmark 2/3" in said and ("\x1b[2K" in said) == ("\u2501" in said) == terminal
        assert [step.n for step in seen] == [2]
        capsys.readouterr()


def test_quiet_and_no_color_mean_what_they_say(monkeypatch, capsys):
    seen = []
    with console.quiet(True), console.progress(seen.append) as progress:
        progress(Step("test", 1, 2, "x"))
        console.say("not this")
        with console.quiet(False):
            console.say("this")
    assert capsys.readouterr().out == "this\n" and len(seen) == 1
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: (80, 24))
    monkeypatch.setenv("NO_COLOR", "1")
    console.say("plain")
    assert capsys.readouterr().out == "plain\n"


def test_the_end_of_a_reader_is_said_and_does_not_end_the_process(monkeypatch):
    monkeypatch.setattr("sys.stdout.write", Mock(side_effect=BrokenPipeError))
    with pytest.raises(output.ClosedError):
        console.say("x")


def test_records_hold_clean_text_and_finite_numbers():
    submission = dataclasses.replace(MOE.variant("cpu_avx512"), name=HOSTILE[1])
    judged = verdict.Result(submission, "cpu", "COMPILE_ERROR", "".join(HOSTILE))
    judged.tests.append((Case({"m": 1}, 1), Outcome("INCORRECT", "".join(HOSTILE), {"rel": math.nan, "max": math.inf})))
    deep = [[[[[[[[[[[[[1]]]]]]]]]]]]]
    judged.artefacts = [{"target": "sm90", "registers": math.inf, "name": HOSTILE[3], "deep": deep}]
    lines = verdict.Recorder(MOE, "cpu").lines(judged)
    said = "\n".join(json.dumps(line, allow_nan=False) for line in lines)
    records, complaints = record.parse(said, "f")
    assert complaints == [] and records == lines
    for line in records:
        assert text.clean(line["reason"], math.inf) == line["reason"] and "[link=http" in line["reason"]


def test_a_record_has_the_hashes_of_what_ran(monkeypatch, tmp_path):
    """Of a GPU's machine code as far as the compile step left any, looked at once."""
    submission, hash_of = MOE.variant("sm90_grouped"), Mock(return_value="c" * 16)
    monkeypatch.setattr(session, "hash_of", hash_of)
    for built, target, code in ((tmp_path, "sm90", "c" * 16), (None, "sm90", None), (tmp_path, "cpu", None)):
        monkeypatch.setattr(session.workdir, "build_folder", lambda *_, built=built: built)
        judged = verdict.Result(submission, target, "RULE_BROKEN", "why")
        judged.tests += [(Case({"m": m}, 1), Outcome("PASSED")) for m in (1, 2)]
        lines = verdict.Recorder(MOE, "cuda").lines(judged)
        assert len(lines) == 3 and {line["code_hash"] for line in lines} == {code}
        assert {line["source_hash"] for line in lines} == {sources.source_hash(submission.file, MOE.folder)}
        assert {line["problem_hash"] for line in lines} == {sources.problem_hash(MOE.folder)}
    hash_of.assert_called_once_with(tmp_path)
