"""What a run prints at its end: every figure can be read, whatever the cases are called."""

import dataclasses
import io
import json
import math
import re

import pytest

from harness.judge import compiling, console, verdict
from harness.judge.events import Step
from harness.judge.outcome import Outcome
from harness.judge.readings import ReferenceReadings, Timing
from harness.problem import folders, sources
from harness.problem.folders import Case
from harness.results import output, record, text
from tests.support.hostile import HOSTILE, brief

MOE = folders.find("moe_gemm")


def printed(monkeypatch, capsys, cases: list[Case], names: list[str], failing: str = "") -> str:
    """The table of times of variants of moe_gemm that took 1234.56 us in every case."""
    plain = console.Screen(width=console.PLAIN_WIDTH, highlight=False, soft_wrap=True)
    monkeypatch.setattr(console, "console", plain)
    readings = ReferenceReadings(800.25, "matmul at 795 TFLOP/s", "flops", 3.0, 10**9, ["1"])
    judged = []
    for name in names:
        judged.append(verdict.Result(MOE.variant(name), "cpu"))
        for case in cases:
            calls = [Outcome("PASSED", us=1234.56, host_us=210.0, error={"rel": 1.7e-3, "max": 1.0, "tol": 2.0})] * 3
            failure = Outcome("INCORRECT", "mismatch found!") if name == failing else None
            timing = Timing(case, [calls, calls], failure)
            judged[-1].times.append(verdict.aggregate(timing, readings))
    console.times(judged)
    return capsys.readouterr().out


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_no_figure_is_cut_off_by_long_names_of_cases(monkeypatch, capsys, device):
    cases = list(MOE.benchmarks[device])
    said = printed(monkeypatch, capsys, cases, ["cpu_avx512", "torch_grouped"])
    assert said.count("1234.56..1234.56") == said.count(" 1234.56 ") == 2 * len(cases)
    assert said.count("800.25 flops") == 2 * len(cases) and said.count(" 65% ") == 2 * len(cases)
    assert "cpu_avx512" in said and "torch_grouped" in said and "\u2026" not in said
    assert max(map(len, said.splitlines())) <= console.PLAIN_WIDTH


def test_what_all_cases_share_is_said_once(monkeypatch, capsys):
    said = printed(monkeypatch, capsys, list(MOE.benchmarks["cpu"]), ["cpu_avx512"])
    assert said.count("tokens=256") == 1 and said.count("hidden=1024") == said.count("content=plain") == 1
    assert said.splitlines()[-1].startswith("All cases have experts=8 topk=2 hidden=1024")


def test_a_case_alone_is_named_in_full(monkeypatch, capsys):
    case = MOE.benchmarks["cuda"][0]
    said = printed(monkeypatch, capsys, [case], ["cpu_avx512", "torch_grouped"], failing="torch_grouped")
    assert all(said.count(f"{key}={value}") == 2 for key, value in case.params.items())
    assert "All cases" not in said and all(word in said for word in ("INCORRECT:", "mismatch", "found!"))


def test_cases_without_parameters_have_a_name_too(monkeypatch, capsys):
    assert "(no parameters)" in printed(monkeypatch, capsys, [Case({}, 1)], ["cpu_avx512"])


# --- text of a submission is data


@pytest.fixture
def screen(monkeypatch):
    """Prints to a terminal of 160 columns that obeys markup, as far as rich lets it."""
    made = console.Screen(file=io.StringIO(), force_terminal=True, width=console.PLAIN_WIDTH, highlight=False)
    monkeypatch.setattr(console, "console", made)
    return made


@pytest.mark.parametrize("said", HOSTILE[::3], ids=brief)
def test_hostile_names_cases_and_reasons_are_printed_as_text(screen, said):
    """In every function that prints; rich's own codes for bold and the like aside, nothing but text comes out."""
    case, submission = Case({"m": said}, 1), dataclasses.replace(MOE.variant("cpu_avx512"), name=said, summary=said)
    readings = ReferenceReadings(800.25, said, said, 3.0, 10**9, ["1"])
    calls = [Outcome("PASSED", us=1234.56, host_us=210.0, error={"rel": 1.7e-3, "max": 1.0, "tol": 2.0})] * 3
    judged = [verdict.Result(submission, "cpu") for _ in range(3)]
    for j, failure in zip(judged, (None, Outcome("INCORRECT", said), None), strict=True):
        j.times.append(verdict.aggregate(Timing(case, [calls, calls], failure), readings))
        j.tests.append((case, Outcome("RUNTIME_ERROR" if failure else "PASSED", said)))
    judged[0].against = [{"variant": said, "ratio": 1.0, "ci95": [0.9, 1.1], "word": said}]
    judged[0].against_all = judged[0].against[0]
    judged[2].status, judged[2].reason = "RULE_BROKEN", said
    console.say(said)
    console.test_line(said, case, Outcome("INCORRECT", said))
    console.times(judged)
    console.readings(judged)
    console.against(judged[0])
    console.summary(judged, baseline=said)
    with console.progress() as progress:
        progress(Step("test", 1, 2, said))
    out = re.sub(r"\x1b\[[\d;]*[mAKGhl]|\x1b\[\?25[lh]|\r", "", screen.file.getvalue())
    assert all(char.isprintable() or char == "\n" for char in out), ascii(out)
    if said.isprintable() and len(said) < 100:
        assert out.count(said) >= 10


def test_a_terminal_has_a_bar_with_the_number_of_steps(screen):
    seen = []
    with console.progress(seen.append) as progress:
        for n in range(4):
            progress(Step("benchmark", n, 3, f"call {n}"))
    out = screen.file.getvalue()
    assert "benchmark" in out and "3/3" in out and "call 3" in out
    assert [step.n for step in seen] == [0, 1, 2, 3]


def test_elsewhere_and_in_quiet_there_is_none(monkeypatch, screen):
    plain = console.Screen(file=io.StringIO(), highlight=False)
    seen = []
    with console.quiet(True), console.progress(seen.append) as progress:
        progress(Step("test", 1, 2, "x"))
        console.say("not this")
        with console.quiet(False):
            console.say("this")
    assert screen.file.getvalue() == "this\n"
    monkeypatch.setattr(console, "console", plain)
    with console.progress(seen.append) as progress:
        progress(Step("test", 1, 2, "x"))
    assert plain.file.getvalue() == "" and len(seen) == 2


def test_the_case_of_a_summary_is_one_of_its_verdict(screen):
    judged = verdict.Result(MOE.variant("cpu_avx512"), "cpu")
    ended = [("PASSED", ""), ("INCORRECT", "wrong"), ("RUNTIME_ERROR", "it broke"), ("TIMEOUT", "late")]
    cases = [(Case({"m": m}, 1), Outcome(*said)) for m, said in enumerate(ended)]
    judged.tests += cases
    console.summary([judged])
    assert judged.verdict == "RUNTIME_ERROR"
    out = re.sub(r"\x1b\[[\d;]*m", "", screen.file.getvalue())
    assert "RUNTIME_ERROR  not timed: 3 of 4 cases failed, first m=2: RUNTIME_ERROR: it broke" in out


def test_the_end_of_a_reader_is_said_and_does_not_end_the_process(screen):
    class Closed(io.StringIO):
        def write(self, _):
            raise BrokenPipeError

    screen.file = Closed()
    with pytest.raises(output.ClosedError):
        console.say("x")


def test_records_hold_clean_text_and_finite_numbers():
    submission = dataclasses.replace(MOE.variant("cpu_avx512"), name=HOSTILE[1])
    judged = verdict.Result(submission, "cpu", "COMPILE_ERROR", "".join(HOSTILE))
    judged.tests.append((Case({"m": 1}, 1), Outcome("INCORRECT", "".join(HOSTILE), {"rel": math.nan, "max": math.inf})))
    judged.artefacts = [
        {"target": "sm90", "registers": math.inf, "name": HOSTILE[3], "deep": [[[[[[[[[[[[[1]]]]]]]]]]]]]}
    ]
    recorder = verdict.Recorder(MOE, "cpu")
    lines = recorder.lines(judged)
    said = "\n".join(json.dumps(line, allow_nan=False) for line in lines)
    records, complaints = record.parse(said, "f")
    assert complaints == [] and records == lines
    for line in records:
        assert text.clean(line["reason"], math.inf) == line["reason"] and "[link=http" in line["reason"]


def test_a_record_has_the_hashes_of_what_ran(monkeypatch, tmp_path):
    """Of a GPU's machine code as far as the compile step left any, looked at once."""
    submission, asked = MOE.variant("sm90_grouped"), []

    def hash_of(folder):
        asked.append(folder)
        return "c" * 16

    monkeypatch.setattr(compiling, "hash_of", hash_of)
    for built, target, code in ((tmp_path, "sm90", "c" * 16), (None, "sm90", None), (tmp_path, "cpu", None)):
        monkeypatch.setattr(compiling.workdir, "build_folder", lambda *_, built=built: built)
        judged = verdict.Result(submission, target, "RULE_BROKEN", "why")
        judged.tests += [(Case({"m": m}, 1), Outcome("PASSED")) for m in (1, 2)]
        lines = verdict.Recorder(MOE, "cuda").lines(judged)
        assert len(lines) == 3 and {line["code_hash"] for line in lines} == {code}
        assert {line["source_hash"] for line in lines} == {sources.source_hash(submission.file, MOE.folder)}
        assert {line["problem_hash"] for line in lines} == {sources.problem_hash(MOE.folder)}
    assert asked == [tmp_path]


@pytest.mark.parametrize(
    ("needed", "said"),
    [
        (80, "about --processes 80 would decide, 2.0 times as long"),
        (2000, "more than --processes 1000 would decide: try when the machine is idle"),
    ],
)
def test_the_number_of_processes_that_would_decide_is_named(needed, said):
    assert console.undecided({"needed": needed, "processes": 40}) == said
