"""Stop every process of a runner and continue them: by a cgroup's freezer, or by signals.

A cgroup v2 holds whatever its members start, and its freezer cannot be undone from within: a runner is no member of any
other cgroup that it could write to. Where the judge may make no cgroup, each process below the runner's reaper gets
SIGSTOP; the filter of system calls refuses SIGCONT and timers that could send it.
"""

import functools
import os
from dataclasses import dataclass
from pathlib import Path

from harness.runner import gate
from harness.sandbox import reaper

STOP_LIMIT_S = 2.0  # for all processes of a runner to stop; beside load a process needs a turn to do so
WELL, LATE, GONE, RUNS_ON = range(4)  # what harness/runner/gate.cpp answers
CGROUP = "the judge's clock; runners stopped by a cgroup's freezer"
SIGNALS = "the judge's clock; runners stopped by signals"


class StopError(RuntimeError):
    """The processes of a runner could not be stopped, or are gone."""


@dataclass
class Freezer:
    """Of the runner `pid` below its reaper. cgroup: the folder of its cgroup, None without one. Close it.

    StopError: the cgroup is gone, and with it the runner.
    """

    reaper: int
    pid: int
    cgroup: str | None

    def __post_init__(self) -> None:
        self._files = [-1, -1]
        if self.cgroup:
            flags = ((os.O_WRONLY, "cgroup.freeze"), (os.O_RDONLY, "cgroup.events"))
            try:
                self._files = [os.open(f"{self.cgroup}/{name}", flag | os.O_CLOEXEC) for flag, name in flags]
            except FileNotFoundError:
                raise StopError("the runner could not be stopped: its process is gone") from None

    @property
    def handle(self) -> tuple[int, ...]:
        """Reaper, pid and the cgroup's descriptors, as harness/runner/gate.cpp takes them."""
        return self.reaper, self.pid, *self._files

    def address(self) -> dict:
        """Return what another process of the judge needs to make its Freezer."""
        return {"reaper": self.reaper, "pid": self.pid, "cgroup": self.cgroup}

    def stop(self) -> None:
        """Return when nothing of the runner can run. StopError: it still runs, or its process is gone."""
        if code := gate.bindings().stop(*self.handle, STOP_LIMIT_S):
            why = "its process is gone" if code == GONE else f"processes still ran after {STOP_LIMIT_S:g} s"
            raise StopError(f"the runner could not be stopped: {why}")

    def resume(self) -> None:
        gate.bindings().resume(*self.handle)

    def processes(self) -> list[int]:
        """Return the pids of what the runner started and did not end: an exact list if it is stopped."""
        return [pid for pid in reaper.descendants(self.reaper) if pid != self.pid]

    def close(self) -> None:
        for fd in self._files:
            if fd >= 0:
                os.close(fd)
        self._files = [-1, -1]


@functools.cache
def place() -> Path | None:
    """Return the folder of this process's cgroup (version 2) if cgroups that freeze can be made in it, else None."""
    try:
        own = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        mounts = (line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines())
        # Fields: ..., 4 the root within the file system, 5 where it is mounted, ..., "-", type.
        found = next(fields for fields in mounts if fields[fields.index("-") + 1] == "cgroup2")
        top = Path(found[4]) / own[3:].removeprefix(found[3]).strip("/")
        trial = top / f"kernel-judge-trial-{os.getpid()}"
        trial.mkdir()
        try:
            return top if _freezes(trial) else None
        finally:
            trial.rmdir()
    except (OSError, StopIteration, ValueError):
        return None


def _freezes(folder: Path) -> bool:
    """Return whether a process can be put into a new cgroup, which has a freezer."""
    if not (folder / "cgroup.freeze").is_file():
        return False
    pid = os.fork()
    if pid == 0:
        try:
            (folder / "cgroup.procs").write_text("0")
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def new_cgroup() -> str | None:
    """Return a name for the cgroup of one runner, which its reaper makes and removes."""
    top = place()
    return str(top / f"kernel-judge-{os.getpid()}-{os.urandom(6).hex()}") if top else None


def clock_name() -> str:
    return CGROUP if place() else SIGNALS
