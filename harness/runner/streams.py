"""Which queues of the GPU a call's work ran on, by the driver's activity records (CUPTI, through torch's profiler).

The judge's own kernels run on the default queue, so the queue of its `mark` tells which one that is. Whatever else was
recorded on another queue was put there by the submission, through Python, C++ or a library.
"""

from types import TracebackType

import torch

MARK = "::mark()"  # the judge's kernel between the start event and the call; see judge.cu
NAMES = 4  # work items named in a report
_TEXT = 120  # characters of a kernel's name that are kept


class Watch:
    """A context manager around one timed call."""

    def __init__(self) -> None:
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def __enter__(self) -> "Watch":
        self._profiler.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._profiler.__exit__(kind, error, trace)

    def seen(self) -> dict:
        """{"records": how many, "elsewhere": {queue: [names of work on it]}}. No records: nothing is known."""
        events = [
            event for event in self._profiler.profiler.kineto_results.events() if "CUDA" in str(event.device_type())
        ]
        marks = [event for event in events if MARK in event.name()]
        if not marks:
            return {"records": 0, "elsewhere": {}}
        default = marks[0].device_resource_id()
        elsewhere: dict[str, list[str]] = {}
        for event in events:
            if event.device_resource_id() != default:
                elsewhere.setdefault(str(event.device_resource_id()), []).append(event.name()[:_TEXT])
        return {"records": len(events), "elsewhere": {stream: names[:NAMES] for stream, names in elsewhere.items()}}
