"""Time a whole model's decode step on a GPU: eager, and as one replayed CUDA graph. No submission may capture a graph.

The problem's folder has latency.py with CASES, a list of case parameters, and `prepare(case, steps)`. What that returns
has `choose()`, `step(chosen, without, named)`, `reset()`, `bytes`, `flops` and `graph`: whether a step can be recorded;
if not, as a prefill cannot, it is timed eager only (problems/dsv4_forward/latency.py). It is the problem's own code and
runs in a separate process: `python -m harness.tools.latency FOLDER CASES FILE`, CASES a JSON list, FILE for what it
finds.

Before it times, it checks: a step does not wait for the GPU; the graph holds the kernels that an eager step launches;
a replay gives the logits of the eager step, bit for bit. Ops that cannot be captured are named, and hold the reference
in the graph. Where the time goes, by op and by kernel, is read from the driver's records of a few replays.
"""

import collections
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness.judge.verdict import Recorder, Result
from harness.problem.folders import Problem, UsageError, has_words, label
from harness.results import environment, record, schema
from harness.results.datasheet import RATES
from harness.sandbox import process
from harness.tools import device_trace
from harness.tools.device_trace import Launch
from problems.common import build, load

FILE = "latency.py"
WARMUPS, STEPS = 5, 50
ROWS, ROW = 5, 20  # rows of steps that the host does not wait between, and steps of each
TRACED = 5  # replays whose kernels are timed
PER_THREAD = 2  # cudaStreamPerThread: the default one of code that build.capturable() made
CLOCK = {
    "name": "host clock, from the launch of a step until the GPU has done it",
    "cold": "no: each step follows another",
    "delivery": "in place",
    "warnings": [],
}


# --- in the judge


def cases(problem: Problem, text: str | None) -> list[dict]:
    """The problem's cases whose words hold `text`. UsageError: none, or it has no latency.py."""
    see_model(problem)
    known = load.module(problem.folder, "latency").CASES
    found = [case for case in known if has_words(label(case), text or "")]
    if not found:
        said = "; ".join(map(label, known))
        raise UsageError(f"--case must match a latency case of {problem.name} ({said}), got {text!r}")
    return found


def see_model(problem: Problem) -> None:
    """Raise UsageError if the problem has no latency.py: it is the problem of one kernel."""
    if not problem.ours or not (problem.folder / FILE).is_file():
        raise UsageError(
            f"--mode latency is for whole models, and {problem.name} is none (it has no {FILE}): time it with "
            "--mode benchmark"
        )


def run(problem: Problem, recorder: Recorder, judged: Result, chosen: list[dict], lines: list[dict]) -> str:
    """Measure these cases, and append the record of each that was measured to `lines`, also where this is interrupted.
    Return what stopped the problem's code before the others, "" if nothing did.
    """
    with tempfile.TemporaryDirectory() as scratch:
        found = Path(scratch, "found")
        argv = [sys.executable, "-m", "harness.tools.latency", str(problem.folder), json.dumps(chosen), str(found)]
        sys.stdout.flush()
        stdout = sys.stderr.fileno() if sys.stdout is sys.stderr else None
        guarded = process.Guarded(argv, {**os.environ, "PYTHONUNBUFFERED": "1"}, (), None, stdout)
        try:
            guarded.pid  # noqa: B018  SandboxError if it could not be started
            status = guarded.process.wait()
        finally:
            guarded.end()
            ended = found.read_text().rpartition("\n")[0].splitlines() if found.is_file() else []
            lines += [line_of(recorder, judged, json.loads(line)) for line in ended]
    if not status and len(ended) < len(chosen):
        many = f"{len(ended)} of {len(chosen)} cases"
        return f"{problem.name}/{FILE} ended with status 0 after {many}: something that it calls ends the process"
    return f"{problem.name}/{FILE} ended with status {status}" if status else ""


def line_of(recorder: Recorder, judged: Result, measured: dict) -> dict:
    """The record of what `measure` found."""
    gpu = environment.describe()["gpu"] or ""
    rates = next((rates for name, rates in RATES.items() if name in gpu), None)
    least = None
    if rates and "bytes" in measured:
        least = 1e6 * max(measured["bytes"] / rates[0], measured["flops"] / rates[1])
    line = recorder.base(judged, "latency", measured["case"]) | measured
    line |= {"sandbox": None, "device": "cuda", "clock": CLOCK, "sol_us": least}
    schema.see_known(line)
    return record.plain(line)


# --- in the process of the problem's code


def main() -> None:
    folder, chosen, found = Path(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3])
    hook = load.module(folder, "latency")
    print(f"{'':<52}{'eager us':>10}{'graph us':>10}{'in a row':>10}{'launches':>10}")
    with open(found, "w") as file, torch.inference_mode():
        for case in chosen:
            one = measured(hook, case)
            file.write(json.dumps({"case": case, **one}) + "\n")
            file.flush()
            if one["status"] == "UNSUPPORTED":
                print(f"{label(case):<52}{'-':>10}{'-':>10}{'-':>10}{'-':>10}  UNSUPPORTED: {one['reason']}")
                continue
            said, launches = one["reason"] or "ok", one["launches"]
            graph = f"{one['median_us']:.0f}" if "graph" in launches else "-"
            row = f"{one['row_us']:.0f}" if "row_us" in one else "-"
            count = launches.get("graph", launches["eager"])
            print(f"{label(case):<52}{one['eager_us']:>10.0f}{graph:>10}{row:>10}{count:>10}  {said}")


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
class Graph:
    """What was found of a recorded step. logits: of its first replay; replays: the launches of each traced one; row_us:
    of a step among many in a row.
    """

    logits: torch.Tensor
    replays: list[list[Launch]]
    samples: list[float]
    row_us: float
    left_out: list[str]


def replayed(decode: Any) -> Graph:
    """Record a step and replay it. When this returns, its weights, prepared for the graph, are no longer held."""
    with build.capturable(), torch.cuda.stream(torch.cuda.ExternalStream(PER_THREAD)):
        step, graph, left_out = recorded(decode, decode.choose(), _capture)
        decode.reset()
        graph.replay()
        torch.cuda.synchronize()
        logits = step.logits.clone()
        replays = [device_trace.launches(graph.replay) for _ in range(TRACED)]
        return Graph(logits, replays, _times_us(graph.replay), _row_us(graph.replay), left_out)


def measure(decode: Any) -> dict:
    """Return the fields of a record of one case, times in us. decode: what the problem prepared."""
    if not decode.graph:
        return _eager(decode, decode.choose())
    found = replayed(decode)
    gc.collect()  # weights that are prepared for the eager step need the room of those for the graph
    eager_ops = decode.choose()
    step = decode.step(eager_ops)
    decode.reset()
    torch.cuda.synchronize()
    wait = _waits(step)
    same = torch.equal(step.logits, found.logits)
    traced = device_trace.launches(decode.step(eager_ops, named=True))
    in_eager, in_graph = _names(traced), _names(max(found.replays, key=len))
    missing, further = apart(in_eager, in_graph)
    failed = {
        "host_synchronisations": bool(wait),
        "replay_equals_eager": not same,
        "not_captured": bool(found.left_out),
        "missing_in_graph": not holds(missing, in_eager, in_graph),
    }
    reason = "; ".join(name for name, bad in failed.items() if bad)
    return {
        "status": "INVALID_MEASUREMENT" if reason else "PASSED",
        "reason": reason,
        "bytes": decode.bytes,
        "flops": decode.flops,
        "median_us": statistics.median(found.samples),
        "samples_us": [found.samples],
        "n": len(found.samples),
        "row_us": found.row_us,
        "eager_us": statistics.median(_times_us(step)),
        "kernels": eager_ops.names,
        "launches": {"eager": len(in_eager), "graph": len(in_graph)},
        "breakdown": device_trace.breakdown(traced, found.replays),
        "checks": {
            "host_synchronisations": wait,
            "replay_equals_eager": same,
            "missing_in_graph": missing,
            "only_in_graph": further,
            "not_captured": found.left_out,
        },
    }


def _eager(decode: Any, chosen: Any) -> dict:
    """Return the fields of a record of a case without a graph."""
    step = decode.step(chosen)
    samples = _times_us(step)
    named = decode.step(chosen, named=True)
    traced = [device_trace.launches(named) for _ in range(TRACED)]
    return {
        "status": "PASSED",
        "reason": "",
        "bytes": decode.bytes,
        "flops": decode.flops,
        "median_us": statistics.median(samples),
        "samples_us": [samples],
        "n": len(samples),
        "eager_us": statistics.median(samples),
        "kernels": chosen.names,
        "launches": {"eager": len(max(traced, key=len))},
        "breakdown": device_trace.breakdown(max(traced, key=len), traced),
        "checks": {},
    }


def _names(launches: list[Launch]) -> list[str]:
    return [launch.name for launch in launches]


def recorded(decode: Any, chosen: Any, capture: Callable) -> tuple[Any, Any, list[str]]:
    """(a step, its graph, the ops that hold the reference in it, since they cannot be captured, with the reason)."""
    step = decode.step(chosen)
    try:
        return step, capture(step), []
    except RuntimeError as whole:
        filled = [op for op, name in chosen.names.items() if name != "reference"]
        left_out = {}
        for op in filled:
            try:
                capture(decode.step(chosen, [other for other in filled if other != op]))
            except RuntimeError as error:
                left_out[op] = f"{op}: {error}".partition("\n")[0]
        if not left_out:
            raise whole
    step = decode.step(chosen, left_out)
    return step, capture(step), list(left_out.values())


def apart(eager: list[str], graph: list[str]) -> tuple[dict[str, int], dict[str, int]]:
    """How often each name is in the one only, and in the other only."""
    one, other = collections.Counter(eager), collections.Counter(graph)
    return dict(one - other), dict(other - one)


def holds(missing: dict[str, int], eager: list[str], graph: list[str]) -> bool:
    """Whether the graph does all that an eager step does: every kernel by name, and as many operations in all. Copies
    and fills are only counted: as nodes of a graph they may be done, and named, otherwise.
    """
    return len(eager) == len(graph) and all(name.startswith(("Memcpy", "Memset")) for name in missing)


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


def _times_us(call: Callable[[], None]) -> list[float]:
    """Times of STEPS calls until the GPU has done each, on the host's clock, in us."""
    taken = []
    for _ in range(WARMUPS + STEPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        taken.append(round(1e6 * (time.perf_counter() - start), 3))
    return taken[WARMUPS:]


def _row_us(call: Callable[[], None]) -> float:
    """Median time of a call, in us, in rows of ROW that the host waits behind only, as text is generated."""
    taken = []
    for _ in range(ROWS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(ROW):
            call()
        torch.cuda.synchronize()
        taken.append(1e6 * (time.perf_counter() - start) / ROW)
    return round(statistics.median(taken), 3)


if __name__ == "__main__":
    main()
