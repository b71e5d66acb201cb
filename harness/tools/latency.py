"""Time a whole model's decode step on a GPU: eager, and as one replayed CUDA graph. No submission may capture a graph.

The problem's timed_steps.py has CASES, a list of case parameters, and `prepare(case, steps)`, which returns what has
`choose()`, `step(chosen, without, named)`, `reset()`, `bytes`, `flops` and `graph`: whether a step can be recorded;
else it is timed eager only. It is the problem's own code and runs in a separate process: `python -m
harness.tools.latency FOLDER CASES FILE`, CASES a JSON list, FILE for what it measures. It checks that a step does not
wait for the GPU, and that a replay gives the eager logits, bit for bit.
"""

import contextlib
import gc
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness.judge.verdict import Recorder, Result
from harness.problem.folders import Problem, UsageError, has_words
from harness.results import environment, schema, text
from harness.sandbox import process
from problems.common import load

MODULE = "timed_steps"
FILE = f"{MODULE}.py"
WARMUPS, STEPS = 5, 50
ROWS, ROW = 5, 20  # rows of steps that the host does not wait between, and steps of each
TRACED = 5  # replays whose kernels are timed
PER_THREAD = 2  # cudaStreamPerThread: the default one of code that problems.common.build makes
OP = "op "  # begins the name of a range, torch.profiler.record_function, that is an op's
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
BY_HOST = ("cuda_runtime", "cuda_driver")
CLOCK = {
    "name": "host clock, from the launch of a step until the GPU has done it",
    "cold": "no: each step follows another",
    "delivery": "in place",
    "warnings": [],
}


# --- in the judge


def cases(problem: Problem, words: str | None) -> list[dict]:
    """The problem's cases whose words hold `words`. UsageError: none, or it has no timed_steps.py."""
    if not problem.ours or not (problem.folder / FILE).is_file():
        none = f"{problem.name} is none (it has no {FILE})"
        raise UsageError(f"--mode latency is for whole models, and {none}: time it with --mode benchmark")
    hook, here = load.module(problem.folder, MODULE), torch.cuda.device_count() or 1
    known = [case for case in hook.CASES if case.get("gpus", 1) <= here]
    chosen = [case for case in known if has_words(text.label(case), words or "")]
    if not chosen:
        labels = "; ".join(map(text.label, known))
        raise UsageError(f"--case must match a latency case of {problem.name} ({labels}), got {words!r}")
    return chosen


def run(problem: Problem, recorder: Recorder, judged: Result, chosen: list[dict], lines: list[dict]) -> str:
    """Measure cases; append records to `lines`, also if interrupted. Return what stopped the problem's code, or ""."""
    for gpus, group in itertools.groupby(chosen, lambda case: case.get("gpus", 1)):
        several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"] if gpus > 1 else []
        with tempfile.TemporaryDirectory() as scratch:
            file, together = Path(scratch, "measured"), list(group)
            given = ["-m", "harness.tools.latency", str(problem.folder), json.dumps(together), str(file)]
            try:
                status = process.run([sys.executable, *several, *given], {"PYTHONUNBUFFERED": "1"})
            finally:
                whole = file.read_text().rpartition("\n")[0].splitlines() if file.is_file() else []
                lines += [line_of(recorder, judged, json.loads(line)) for line in whole]
        if status or len(whole) < len(together):
            early = f"after {len(whole)} of {len(together)} cases: something that it calls ends the process"
            return f"{problem.name}/{FILE} ended with status {status}{'' if status else f' {early}'}"
    return ""


def line_of(recorder: Recorder, judged: Result, measured: dict) -> dict:
    """The record of a case and what `measure` returned of it."""
    gpu = environment.describe()["gpu"] or ""
    rates = next((rates for name, rates in environment.RATES.items() if name in gpu and "bytes" in measured), None)
    least = 1e6 * max(measured["bytes"] / rates[0], measured["flops"] / rates[1]) if rates else None
    line = recorder.base(judged, "latency", measured["case"]) | measured
    line |= {"sandbox": None, "device": "cuda", "clock": CLOCK, "sol_us": least}
    return text.plain(schema.known(line))


# --- in the process of the problem's code


def main() -> None:
    hook, chosen = load.module(Path(sys.argv[1]), MODULE), json.loads(sys.argv[2])
    first = os.environ.get("RANK", "0") == "0"
    say = print if first else str  # which says nothing
    say(f"{'':<52}{'eager us':>10}{'graph us':>10}{'in a row':>10}{'launches':>10}")
    with open(sys.argv[3] if first else os.devnull, "w") as file, torch.inference_mode():
        for case in chosen:
            fields = measured(hook, case)
            print(json.dumps({"case": case, **fields}), file=file, flush=True)
            counts = fields.get("launches", {})
            graph_us = fields["median_us"] if "graph" in counts else None
            shown = (fields.get("eager_us"), graph_us, fields.get("row_us"), counts.get("graph", counts.get("eager")))
            columns = "".join(f"{'-' if number is None else f'{number:.0f}':>10}" for number in shown)
            state = "UNSUPPORTED: " if fields["status"] == "UNSUPPORTED" else ""
            say(f"{text.label(case):<52}{columns}  {state}{fields['reason'] or 'ok'}")


def measured(hook: Any, case: dict) -> dict:
    """Return the fields of a record of one case. What has no room on this GPU is UNSUPPORTED: the others go on."""
    try:
        return measure(hook.prepare(case, WARMUPS + STEPS))
    except torch.OutOfMemoryError as error:
        reason = f"it needs more memory than this GPU has: {error}".partition("\n")[0]
    gc.collect()
    torch.cuda.empty_cache()
    return {"status": "UNSUPPORTED", "reason": reason}


@dataclass(frozen=True)
class Launch:
    """A kernel, copy or fill that a GPU has run. start_us: on its clock; op: the innermost range around it, or ""."""

    name: str
    start_us: float
    us: float
    op: str = ""


@dataclass(frozen=True)
class Graph:
    """Readings of a recorded step. logits: of the first replay; replays: launches of each; row_us: of one in a row."""

    logits: torch.Tensor
    replays: list[list[Launch]]
    samples: list[float]
    row_us: float


def replayed(decode: Any) -> Graph:
    """Record a step and replay it. When this returns, its weights, prepared for the graph, are no longer held."""
    with torch.cuda.stream(torch.cuda.ExternalStream(PER_THREAD)):
        step = decode.step(decode.choose())
        graph = _capture(step)
        decode.reset()
        graph.replay()
        torch.cuda.synchronize()
        logits = step.logits.clone()
        replays = [launches(graph.replay) for _ in range(TRACED)]
        samples = _times_us(graph.replay, WARMUPS + STEPS)[WARMUPS:]
        return Graph(logits, replays, samples, statistics.median(_times_us(graph.replay, ROWS, ROW)))


def measure(decode: Any) -> dict:
    """Return the fields of a record of one case, times in us. decode: what the problem prepared."""
    graph = replayed(decode) if decode.graph else None
    gc.collect()  # weights that are prepared for the eager step need the room of those for the graph
    chosen = decode.choose()
    step = decode.step(chosen)
    decode.reset()
    torch.cuda.synchronize()
    wait = _waits(step) if graph else ""
    same = not graph or torch.equal(step.logits, graph.logits)
    eager_us = _times_us(step, WARMUPS + STEPS)[WARMUPS:]
    named = decode.step(chosen, named=True)
    traces = [launches(named) for _ in range(1 if graph else TRACED)]
    eager, samples = max(traces, key=len), graph.samples if graph else eager_us
    fields = {
        "status": "PASSED",
        "reason": "",
        "bytes": decode.bytes,
        "flops": decode.flops,
        "median_us": statistics.median(samples),
        "samples_us": [samples],
        "n": len(samples),
        "eager_us": statistics.median(eager_us),
        "gpus": decode.gpus(statistics.median(samples)),
        "kernels": chosen.names,
        "launches": {"eager": len(eager)},
        "breakdown": breakdown(eager, graph.replays if graph else traces),
        "checks": {},
    }
    return fields | _compared(graph, eager, wait, same) if graph else fields


def _compared(graph: Graph, eager: list[Launch], wait: str, same: bool) -> dict:
    """Return the fields that compare a graph with the eager step. wait: what made that wait; same: logits are."""
    failed = ["host_synchronisations"] * bool(wait) + ["replay_equals_eager"] * (not same)
    return {
        "status": "INVALID_MEASUREMENT" if failed else "PASSED",
        "reason": "; ".join(failed),
        "row_us": graph.row_us,
        "launches": {"eager": len(eager), "graph": max(map(len, graph.replays))},
        "checks": {"host_synchronisations": wait, "replay_equals_eager": same},
    }


def _capture(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    for _ in range(3):  # compile, load, and let the allocator find its sizes
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        step()
    return graph


def _waits(step: Callable[[], None]) -> str:
    """What made a step wait for the GPU, "" if nothing did."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def _times_us(call: Callable[[], None], rows: int, calls: int = 1) -> list[float]:
    """Host times of a call in us, in rows of calls. The host waits for the GPU behind each row only."""
    taken = []
    for _ in range(rows):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        taken.append(round(1e6 * (time.perf_counter() - start) / calls, 3))
    return taken


# --- what a call runs on the GPU, by the driver's records: each kernel, copy and fill, its time and its op


def launches(call: Callable[[], object]) -> list[Launch]:
    """Return what one call runs on the GPU, in the order in which it began."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    for _ in range(2):  # the first profile of a process may miss records
        torch.cuda.synchronize()
        with contextlib.redirect_stdout(sys.stderr), torch.profiler.profile(activities=activities) as profile:
            call()
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profile.export_chrome_trace(str(file))
        return read(json.loads(file.read_text())["traceEvents"])


def read(events: Sequence[dict]) -> list[Launch]:
    """Return the launches among the events of a Chrome trace that torch.profiler made."""
    spans = [event for event in events if event.get("ph") == "X"]
    ranges = [
        (event["ts"], event["ts"] + event["dur"], event["name"].removeprefix(OP))
        for event in spans
        if event.get("cat") == "user_annotation" and event["name"].startswith(OP)
    ]
    launched = {event["args"]["correlation"]: event["ts"] for event in spans if event.get("cat") in BY_HOST}
    on_gpu = []
    for event in spans:
        if event.get("cat") in ON_GPU:
            at = launched.get(event["args"].get("correlation"))
            around = [span for span in ranges if at is not None and span[0] <= at <= span[1]]
            op = min(around, key=lambda span: span[1] - span[0])[2] if around else ""
            on_gpu.append(Launch(event["name"], event["ts"], event["dur"], op))
    return sorted(on_gpu, key=lambda launch: launch.start_us)


def breakdown(eager: Sequence[Launch], replays: Sequence[Sequence[Launch]]) -> dict:
    """Return where the time of a replayed graph goes, longest first: medians in us; what launches share is of the one
    ahead. A graph's launches have the ops of the eager step's, one by one, or "" if the numbers differ.
    """
    most = max(replays, key=len)
    whole = [replay for replay in replays if len(replay) == len(most)]
    times = [statistics.median(same) for same in zip(*map(_own, whole), strict=True)]
    known = [launch.op for launch in eager] if len(eager) == len(most) else [""] * len(most)
    ops: dict[str, dict] = {}
    kernels: dict[str, dict] = {}
    for launch, us, op in zip(most, times, known, strict=True):
        for table, key in ((ops, op), (kernels, launch.name)):
            part = table.setdefault(key, {"us": 0.0, "launches": 0})
            part["us"] = round(part["us"] + us, 3)
            part["launches"] += 1
    spans = [(max(x.start_us + x.us for x in run) - run[0].start_us, sum(_own(run))) for run in whole if run]
    span, busy = (statistics.median(values) for values in zip(*spans, strict=True)) if spans else (0.0, 0.0)
    tables = {"ops": ops, "kernels": kernels}
    parts = {name: dict(sorted(table.items(), key=lambda item: -item[1]["us"])) for name, table in tables.items()}
    return parts | {"span_us": round(span, 3), "gaps_us": round(span - busy, 3)}


def _own(launches: Sequence[Launch]) -> list[float]:
    """Return for how many us each was the only one, or the first of those that ran: an early start waits for others."""
    ends = itertools.accumulate((x.start_us + x.us for x in launches), max, initial=float("-inf"))
    return [max(0.0, x.start_us + x.us - max(x.start_us, end)) for x, end in zip(launches, ends, strict=False)]


if __name__ == "__main__":
    main()
