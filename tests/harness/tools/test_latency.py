"""Models on a GPU, and `--mode latency`: what is recorded of a decode step, and which ops are left out of its graph."""

import contextlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from harness import run
from harness.invocation import Run
from harness.judge.events import Events
from harness.judge.handle import ProblemError
from harness.judge.options import Options
from harness.judge.verdict import Recorder, Result
from harness.problem import folders
from harness.problem.folders import UsageError
from harness.results import record, schema
from harness.results.run_file import RunFile
from harness.tools import latency
from harness.tools.latency import Launch, breakdown, read
from problems.dsv4_forward.timed_steps import Decode as Steps
from problems.dsv4_forward.timed_steps import prepare
from tests.support import VECTOR_ADD, json_lines

MODEL = folders.find("dsv4_forward")
MEASURED = {
    "case": {"config": "tiny-k", "format": "bf16", "batch": 1, "context": 512},
    "status": "PASSED",
    "reason": "",
    "bytes": 4_800_000_000,
    "flops": 1_978_000_000_000,
    "median_us": 3800.0,
    "samples_us": [[3700.0, 3800.0, 3900.0]],
    "n": 3,
    "eager_us": 25000.0,
    "kernels": {"fmha": "reference"},
    "launches": {"eager": 9, "graph": 9},
    "checks": {"replay_equals_eager": True},
}


@pytest.fixture(scope="module")
def judged() -> Result:
    """The model's winner: what it is made of, which its hash is of, is read once."""
    return Result(MODEL.variant("composed"), "sm90")


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    return Recorder(MODEL, "cuda")


def test_what_is_measured_becomes_a_record(monkeypatch, tmp_path, judged, recorder):
    monkeypatch.setattr(latency.environment, "describe", lambda: {"gpu": "NVIDIA H200"})
    found = latency.line_of(recorder, judged, MEASURED)
    assert found["kind"] == "latency" and found["variant"] == "composed" and found["sol_us"] == 2000.0
    assert latency.line_of(recorder, judged, MEASURED | {"flops": 1.0})["sol_us"] == 1000.0
    assert found["source_hash"] == judged.source_hash and found["schema"] == schema.SCHEMA
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    RunFile.begin(recorder.run("box", "sm90", {}, [judged], [], [])).finish([found], 0)
    assert record.read("box", "dsv4_forward") == [found]
    monkeypatch.setattr(latency.environment, "describe", lambda: {"gpu": "an unknown one"})
    assert latency.line_of(recorder, judged, MEASURED)["sol_us"] is None


def test_cases_are_the_problems_and_chosen_by_their_words():
    assert len(latency.cases(MODEL, None)) == 40
    assert [one["format"] for one in latency.cases(MODEL, "new=2048")] == ["nvfp4", "nvfp4_experts", "released"]
    assert len(latency.cases(MODEL, "kernels=choose=reference")) == 6
    (one,) = latency.cases(MODEL, "config=tiny-k format=nvfp4 batch=8")
    assert one == {"config": "tiny-k", "format": "nvfp4", "batch": 8, "context": 512}
    with pytest.raises(UsageError, match="--case must match a latency case"):
        latency.cases(MODEL, "batch=3")
    with pytest.raises(UsageError, match="is for whole models, and vector_add is none"):
        latency.cases(folders.find(str(VECTOR_ADD)), None)


@pytest.mark.parametrize(("more", "said"), [([], "--mode latency needs a GPU"), (["--all"], "own steps")])
def test_it_needs_a_gpu_and_times_the_winners(capsys, more, said):
    assert run.main(["dsv4_forward", "--mode", "latency", "--device", "cpu", *more]) == 2
    assert said in capsys.readouterr().err


@pytest.fixture
def without_gpu(monkeypatch):
    """What is asked of a GPU, done on the CPU: a graph's replay is the step itself. As if the first op launched two
    kernels of 2 us each, and nothing else any.
    """
    ranges: list[str] = []

    def launches(call) -> list[Launch]:
        ranges.clear()
        call()
        op = ranges[0].removeprefix(latency.OP) if ranges else ""
        return [Launch("k", 0.0, 2.0, op), Launch("Memcpy DtoD", 3.0, 2.0, op)]

    def range_of(name: str) -> contextlib.AbstractContextManager:
        ranges.append(name)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.profiler, "record_function", range_of)
    for name in ("stream", "ExternalStream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(latency, "_capture", lambda step: SimpleNamespace(replay=step))
    monkeypatch.setattr(latency, "_waits", lambda step: step() or "")
    monkeypatch.setattr(latency, "launches", launches)
    for name, value in (("WARMUPS", 1), ("TRACED", 2), ("ROW", 2), ("STEPS", 3)):
        monkeypatch.setattr(latency, name, value)


@torch.inference_mode()
def test_what_is_found_of_a_step(without_gpu, monkeypatch, judged, recorder):
    case = {"config": "tiny", "format": "bf16", "batch": 1, "context": 8}
    found = latency.measure(Steps(case, 20, "cpu"))
    assert (found["status"], found["reason"], found["n"]) == ("PASSED", "", 3)
    assert found["median_us"] == sorted(found["samples_us"][0])[1] > 0 and found["eager_us"] > 0 < found["row_us"]
    assert found["launches"] == {"eager": 2, "graph": 2} and set(found["kernels"]) >= {"fmha", "linear"}
    assert found["breakdown"]["ops"] == {"start": {"us": 4.0, "launches": 2}}
    assert (found["breakdown"]["span_us"], found["breakdown"]["gaps_us"]) == (5.0, 1.0)
    assert record.checked(latency.line_of(recorder, judged, {"case": case, **found}))

    monkeypatch.setattr(latency, "_waits", lambda step: step() or step() or "a copy to the host")
    found = latency.measure(Steps(case, 20, "cpu"))
    assert found["status"] == "INVALID_MEASUREMENT"
    assert found["reason"] == "host_synchronisations; replay_equals_eager"
    assert found["checks"]["host_synchronisations"] == "a copy to the host"


def test_kernels_of_a_case_go_over_the_winners(without_gpu):
    case = {"config": "tiny-k", "format": "nvfp4", "batch": 1, "context": 8}
    assert Steps(case, 20, "cpu").choose().names["choose"].startswith("indexer/")
    named = Steps(case | {"kernels": "choose=reference"}, 20, "cpu").choose().names
    assert (named["choose"], named["fmha"].partition("/")[0]) == ("reference", "fmha_prefill")


@pytest.mark.slow
@torch.inference_mode()
def test_a_prefill_is_timed_without_a_graph(without_gpu, judged, recorder):
    case = {"config": "tiny", "format": "bf16", "batch": 1, "context": 0, "new": 20}
    found = latency.measure(prepare(case, 3, "cpu"))
    assert (found["status"], found["n"], found["launches"]) == ("PASSED", 3, {"eager": 2})
    assert found["median_us"] == found["eager_us"] > 0 and found["flops"] > found["bytes"]
    assert record.checked(latency.line_of(recorder, judged, {"case": case, **found}))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_process_that_fails_is_a_failure_of_the_problem(capfd, judged, recorder):
    (case,) = latency.cases(MODEL, "tiny-k format=bf16 batch=1")
    lines = []
    assert latency.run(MODEL, recorder, judged, [case], lines) == "dsv4_forward/timed_steps.py ended with status 1"
    assert lines == []
    assert "CUDA" in capfd.readouterr().err


def test_a_process_that_ends_before_its_last_case_is_a_failure(monkeypatch, judged, recorder):
    """As one does that calls exit(0): what it had measured is kept."""

    def guarded(argv, *_) -> Mock:
        Path(argv[-1]).write_text(json.dumps(MEASURED) + "\n")
        return Mock(pid=1, process=Mock(wait=Mock(return_value=0)))

    monkeypatch.setattr(latency.process, "Guarded", guarded)
    lines = []
    assert latency.run(MODEL, recorder, judged, [MEASURED["case"]], lines) == ""
    said = latency.run(MODEL, recorder, judged, [MEASURED["case"]] * 3, lines)
    assert "ended with status 0 after 1 of 3 cases: something that it calls ends the process" in said
    assert len(lines) == 2


@pytest.mark.parametrize("mode", ["latency", "leaderboard", "test", "benchmark"])
def test_a_model_on_a_gpu_is_checked_and_its_steps_are_timed(monkeypatch, judged, recorder, mode):
    """What was measured before a failure is recorded too."""
    line, check, recorded = latency.line_of(recorder, judged, MEASURED), Mock(return_value=0), []

    def run(*given) -> str:
        given[-1].append(line)
        if mode == "latency":
            raise KeyboardInterrupt
        return "it ended with status 1"

    monkeypatch.setattr(latency, "run", run)
    begun = SimpleNamespace(finish=lambda lines, code: recorded.extend(lines))
    monkeypatch.setattr(record, "see_writable", lambda machine: None)
    made = Run(Options(problem="dsv4_forward", mode=mode), sys.stdout, Events(None))
    vars(made).update(device="cuda", target="sm90", problem=MODEL, recorder=recorder, machine="box")
    monkeypatch.setattr(made, "submissions", lambda: [judged.submission])
    fakes = {"_begin": lambda *_: begun, "_judged": lambda _: judged, "_held": contextlib.nullcontext, "_check": check}
    for name, fake in fakes.items():
        monkeypatch.setattr(made, name, fake)
    if mode == "test":
        assert made._work() == 0
    else:
        with pytest.raises((KeyboardInterrupt, ProblemError)):
            made._work()
    assert check.called == (mode in ("leaderboard", "test"))
    assert recorded == [line] * (mode in ("latency", "leaderboard"))


def test_a_case_without_room_is_unsupported_and_the_others_go_on(judged, recorder):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.26 GiB\nmore")
    found = latency.measured(SimpleNamespace(prepare=Mock(side_effect=error)), MEASURED["case"])
    assert found["status"] == "UNSUPPORTED" and found["reason"].endswith("Tried to allocate 2.26 GiB")
    line = latency.line_of(recorder, judged, {"case": MEASURED["case"], **found})
    assert record.checked(line) and line["sol_us"] is None


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["latency", "benchmark"])
def test_a_decode_step_is_timed_on_a_gpu(tmp_path, mode):
    found = tmp_path / "found.jsonl"
    chosen = ["--case", "config=tiny-k format=bf16 batch=1", "--json", str(found)]
    assert run.main(["dsv4_forward", "--mode", mode, *chosen]) == 0
    (one,) = json_lines(found)
    assert record.checked(one) and one["status"] == "PASSED" and 0 < one["sol_us"] < one["median_us"] < one["eager_us"]


# --- launches of a profiler's trace, and where the time of a replayed graph goes


def span(cat: str, name: str, ts: float, dur: float, **args) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def test_a_launch_belongs_to_the_innermost_op_that_the_host_was_in():
    events = [
        span("user_annotation", "op experts", 0.0, 10.0),
        span("user_annotation", "op linear", 4.0, 2.0),
        span("user_annotation", "something else", 0.0, 50.0),
        span("cuda_runtime", "cudaLaunchKernel", 1.0, 1.0, correlation=7),
        span("cuda_driver", "cuLaunchKernelEx", 5.0, 1.0, correlation=8),
        span("cuda_runtime", "cudaMemcpyAsync", 20.0, 1.0, correlation=9),
        span("kernel", "second", 140.0, 3.0, correlation=8),
        span("kernel", "first", 100.0, 30.0, correlation=7),
        span("gpu_memcpy", "Memcpy DtoD", 150.0, 2.0, correlation=9),
        span("kernel", "orphan", 160.0, 1.0),
        {"ph": "i", "name": "a mark"},
        span("gpu_user_annotation", "op experts", 100.0, 52.0),
    ]
    assert read(events) == [
        Launch("first", 100.0, 30.0, "experts"),
        Launch("second", 140.0, 3.0, "linear"),
        Launch("Memcpy DtoD", 150.0, 2.0, ""),
        Launch("orphan", 160.0, 1.0, ""),
    ]


def test_the_time_of_a_graph_goes_to_the_ops_of_the_eager_step():
    """One of another length has no ops."""
    eager = [Launch("a", 0, 9, "x"), Launch("b", 20, 9, "y"), Launch("a", 40, 9, "x"), Launch("c", 60, 9)]

    def replay(us: float) -> list[Launch]:
        return [Launch("a", 0, us), Launch("b", us - 1, 5), Launch("a", 10, 2), Launch("c", 13, 1)]

    found = breakdown(eager, [replay(4), replay(6), replay(3), replay(50)[:2]])
    assert found == {
        "ops": {"x": {"us": 6.0, "launches": 2}, "y": {"us": 4.0, "launches": 1}, "": {"us": 1.0, "launches": 1}},
        "kernels": {"a": {"us": 6.0, "launches": 2}, "b": {"us": 4.0, "launches": 1}, "c": {"us": 1.0, "launches": 1}},
        "span_us": 14.0,
        "gaps_us": 3.0,
    }
    found = breakdown([Launch("a", 0, 1, "x")], [[Launch("a", 0, 1), Launch("b", 1, 1)]])
    assert found["ops"] == {"": {"us": 2.0, "launches": 2}} and found["gaps_us"] == 0
