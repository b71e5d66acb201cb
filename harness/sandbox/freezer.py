"""Stop every process of a runner and continue them, by signals.

Each process below a runner's reaper gets SIGSTOP; the filter of system calls refuses SIGCONT and all that brings it.
"""

from typing import NamedTuple

from harness.runner import gate
from harness.sandbox import reaper

WELL, LATE, GONE, RUNS_ON = range(4)  # what harness/runner/gate.cpp answers
CLOCK = "the judge's clock; runners stopped by signals"


class StopError(RuntimeError):
    """The processes of a runner could not be stopped, or are gone."""


class Freezer(NamedTuple):
    """Of the runner `pid` below its reaper; harness/runner/gate.cpp takes both."""

    reaper: int
    pid: int

    def stop(self) -> None:
        """Return when nothing of the runner can run. StopError: it still runs, or its process is gone."""
        if code := gate.bindings().stop(*self):
            why = "its process is gone" if code == GONE else f"processes still ran after {gate.STOP_LIMIT_S:g} s"
            raise StopError(f"the runner could not be stopped: {why}")

    def resume(self) -> None:
        gate.bindings().resume(*self)

    def processes(self) -> list[int]:
        """Return the pids of what the runner started and did not end: an exact list if it is stopped."""
        return [pid for pid in reaper.descendants(self.reaper) if pid != self.pid]
