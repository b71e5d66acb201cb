"""The streams of the GPU that a call's work ran on, by the driver's activity records (CUPTI, through torch's profiler).

The judge's kernels run on the default stream, so the stream of its `mark` is the default one. The submission put
whatever was recorded on another stream there, through Python, C++ or a library.
"""

import torch

MARK = "::mark()"  # the judge's kernel between the start event and the call; see judge.cu
NAMES = 4  # work items named in a report
_TEXT = 120  # characters of a kernel's name that are kept


def watch() -> torch.profiler.profile:
    """Return a context manager around one timed call, for `seen`."""
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])


def seen(watched: torch.profiler.profile) -> dict:
    """Return {"records": how many, "elsewhere": {stream: [names of work on it]}}. No records: nothing is known."""
    results = watched.profiler.kineto_results if watched.profiler else None
    events = [event for event in results.events() if "CUDA" in str(event.device_type())] if results else []
    marks = [event for event in events if MARK in event.name()]
    if not marks:
        return {"records": 0, "elsewhere": {}}
    default = marks[0].device_resource_id()
    elsewhere: dict[str, list[str]] = {}
    for event in events:
        if event.device_resource_id() != default:
            elsewhere.setdefault(str(event.device_resource_id()), []).append(event.name()[:_TEXT])
    return {"records": len(events), "elsewhere": {stream: names[:NAMES] for stream, names in elsewhere.items()}}
