"""What a call runs on the GPU, by the driver's records: each kernel, copy and fill, its time and its op."""

import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

OP = "op "  # begins the name of a range, torch.profiler.record_function, that is an op's
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
BY_HOST = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True)
class Launch:
    """A kernel, copy or fill that a GPU has run. start_us: on its clock; op: the innermost range around its launch, or
    "".
    """

    name: str
    start_us: float
    us: float
    op: str = ""


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
    found = []
    for event in spans:
        if event.get("cat") in ON_GPU:
            at = launched.get(event["args"].get("correlation"))
            around = [one for one in ranges if at is not None and one[0] <= at <= one[1]]
            op = min(around, key=lambda one: one[1] - one[0])[2] if around else ""
            found.append(Launch(event["name"], event["ts"], event["dur"], op))
    return sorted(found, key=lambda launch: launch.start_us)


def breakdown(eager: Sequence[Launch], replays: Sequence[Sequence[Launch]]) -> dict:
    """Return where the time of a replayed graph goes, in us: {"ops": {op: {"us", "launches"}}, "kernels": the same by
    name, "span_us": from first start to last end, "gaps_us": of it, while nothing ran}. Times are medians over the
    replays. A graph's launches have the ops of the eager step's, one by one, or "" if the numbers differ.
    """
    most = max(replays, key=len)
    whole = [one for one in replays if len(one) == len(most)]
    times = [statistics.median(launch.us for launch in same) for same in zip(*whole, strict=True)]
    known = [launch.op for launch in eager] if len(eager) == len(most) else [""] * len(most)
    ops: dict[str, dict] = {}
    kernels: dict[str, dict] = {}
    for launch, us, op in zip(most, times, known, strict=True):
        for table, key in ((ops, op), (kernels, launch.name)):
            part = table.setdefault(key, {"us": 0.0, "launches": 0})
            part["us"] = round(part["us"] + us, 3)
            part["launches"] += 1
    spans = [(one[-1].start_us + one[-1].us - one[0].start_us, _idle(one)) for one in whole if one]
    span, gaps = (statistics.median(values) for values in zip(*spans, strict=True)) if spans else (0.0, 0.0)
    return {"ops": _longest(ops), "kernels": _longest(kernels), "span_us": round(span, 3), "gaps_us": round(gaps, 3)}


def _idle(launches: Sequence[Launch]) -> float:
    """Return for how many us nothing ran, from the first start on."""
    idle, end = 0.0, launches[0].start_us
    for launch in launches:
        idle += max(0.0, launch.start_us - end)
        end = max(end, launch.start_us + launch.us)
    return idle


def _longest(table: dict[str, dict]) -> dict[str, dict]:
    return dict(sorted(table.items(), key=lambda item: -item[1]["us"]))
