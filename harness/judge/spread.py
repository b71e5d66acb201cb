"""--devices: the cases of one run over several GPUs of one kind, at most one process group on each at a time.

A part of the work is done by a process of harness/judge/part.py, which sees one GPU. All submissions are called on a
case by the same GPU, since two GPUs of one kind differ by more than two variants do. With fewer timed cases than GPUs,
the processes of a case are divided too. What a part does not deliver, because it was lost, the run itself does
afterwards on the first device, as --resume would.
"""

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from pydantic import TypeAdapter

from harness.judge import device_lock
from harness.judge.events import Progress, Step
from harness.judge.journal import Group
from harness.judge.outcome import Outcome
from harness.problem.folders import Case, Problem, Submission, UsageError
from harness.results import gpu, text
from harness.sandbox.process import ROOT

COMMAND = (sys.executable, "-m", "harness.judge.part")
_OUTCOME, _GROUP = TypeAdapter(Outcome), TypeAdapter(Group)


@dataclass(frozen=True)
class Place:
    """A device of this machine. name: for people, such as "cuda:1"; lock: what harness/judge/device_lock.py locks; env:
    what makes it the device of a process.
    """

    name: str
    lock: str
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Share:
    """A part of the work for one process. cases: numbers in the list of cases; processes: [first, end) of each
    submission, where they are timed.
    """

    cases: tuple[int, ...]
    processes: tuple[int, int] = (0, 0)


@dataclass
class Found:
    """What the parts report. audits: by submission the fields of its Audit, once for each part."""

    tests: dict[tuple[str, int], Outcome] = field(default_factory=dict)
    groups: dict[tuple[int, int, int], Group] = field(default_factory=dict)
    audits: list[dict[str, dict]] = field(default_factory=list)
    clock: str = ""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Work:
    """What all parts of a phase have in common. limit_s, timeout_s: as in harness/judge/phases.py and session.py;
    plan: the fields of phases.Plan, None for test cases. twice: of these, the cases that run_tests takes twice.
    """

    problem: Problem
    device: str
    target: str
    submissions: list[Submission]
    cases: list[Case]
    timeout_s: float | None
    limit_s: float | None
    plan: dict | None = None
    paired: bool = False
    twice: tuple[Case, ...] = ()

    def order(self, share: Share) -> dict:
        """The JSON that a part receives."""
        return {
            "problem": str(self.problem.folder),
            "device": self.device,
            "target": self.target,
            "submissions": [[one.name, str(one.file)] for one in self.submissions],
            "cases": [[number, dataclasses.asdict(self.cases[number])] for number in share.cases],
            "processes": share.processes,
            "timeout_s": self.timeout_s,
            "limit_s": self.limit_s,
            "plan": self.plan,
            "paired": self.paired,
            "twice": [number for number in share.cases if self.cases[number] in self.twice],
        }


def places(wanted: str) -> list[Place]:
    """The GPUs that --devices names: "all" visible ones, or numbers as in "0,2" or "cuda:0,cuda:2". UsageError: there
    is no such GPU, or they are of several kinds.
    """
    visible = gpu.visible()
    names = [f"cuda:{number}" for number in range(len(visible))]
    asked = names if wanted == "all" else [re.sub(r"^(?=\d+$)", "cuda:", word.strip()) for word in wanted.split(",")]
    if unknown := [name for name in asked if name not in names]:
        raise UsageError(
            f"--devices must be all, or a list of {', '.join(names) or 'GPUs, of which there is none'}, "
            f"got {unknown[0]!r}"
        )
    if len(set(asked)) < len(asked):
        raise UsageError(f"--devices names a GPU twice: {wanted}")
    chosen = [(name, visible[names.index(name)]) for name in asked]
    if len(kinds := sorted({f"{one.name} (driver {one.driver})" for _, one in chosen})) > 1:
        raise UsageError(f"--devices must be GPUs of one kind, whose times can be compared, got {', '.join(kinds)}")
    return [Place(name, one.uuid, {gpu.VARIABLE: one.uuid}) for name, one in chosen]


@contextlib.contextmanager
def held(devices: Sequence[Place], say: Callable[[str], object]) -> Iterator[None]:
    """Within, no other judge of this user is on any of the devices. The order is the same for all who wait."""
    with contextlib.ExitStack() as stack:
        for one in sorted(devices, key=lambda place: place.lock):
            stack.enter_context(device_lock.hold(one.lock, say))
        yield


def test_shares(missing: Sequence[int], devices: int) -> list[Share]:
    """Divide test cases, by their numbers, among so many devices."""
    dealt = [tuple(missing[i::devices]) for i in range(devices)]
    return [Share(cases) for cases in dealt if cases]


def timed_shares(missing: Sequence[int], processes: int, devices: int) -> list[Share]:
    """Divide timed cases, by their numbers, among so many devices, and the `processes` of each case if there are fewer
    cases than devices.
    """
    if len(missing) >= devices or processes < 2:
        return [dataclasses.replace(share, processes=(0, processes)) for share in test_shares(missing, devices)]
    ways = min(processes, devices // max(1, len(missing)))
    bounds = [processes * i // ways for i in range(ways + 1)]
    return [Share((case,), (bounds[i], bounds[i + 1])) for case in missing for i in range(ways)]


def run(
    work: Work, shares: Sequence[Share], devices: Sequence[Place], progress: Progress, say: Callable[[str], object]
) -> Found:
    """Do the shares, one at a time on a device. The caller holds the devices. say: receives a line for each part that
    was lost.
    """
    parts = _Parts(work, deque(shares), progress, say, devices[0].name)
    workers = [threading.Thread(target=parts.work_on, args=(place,)) for place in devices]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.join()
    finally:
        parts.stop()
        for worker in workers:
            worker.join()
    if parts.failure:
        raise parts.failure
    return parts.found


class _Parts:
    """The parts of a phase, as they run. One thread for each device calls `work_on`."""

    def __init__(
        self, work: Work, todo: deque[Share], progress: Progress, say: Callable[[str], object], rest: str
    ) -> None:
        self.work, self.todo, self.progress, self.say, self.rest = work, todo, progress, say, rest
        self.found = Found()
        self.running: dict[str, subprocess.Popen] = {}
        self.steps: dict[str, Step] = {}
        self.lock = threading.Lock()  # of all of these
        self.failure: Exception | None = None  # of what reads the parts; a thread's exception would be lost

    def stop(self) -> None:
        """Begin no further part, and end those that run, with all that they started."""
        with self.lock:
            self.todo.clear()
            for part in self.running.values():
                part.kill()

    def work_on(self, place: Place) -> None:
        """Do shares on one device until none is left."""
        try:
            while (part := self._begin(place)) is not None:
                with part:
                    self._hear(place, part)
        except Exception as error:
            self.failure = self.failure or error
            self.stop()

    def _begin(self, place: Place) -> subprocess.Popen | None:
        with self.lock:
            if not self.todo:
                return None
            pipe = subprocess.PIPE
            part = subprocess.Popen(
                COMMAND,
                cwd=ROOT,
                env={**os.environ, **place.env},
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                text=True,
                start_new_session=True,
            )
            self.running[place.name] = part
            order = self.work.order(self.todo.popleft())
        assert part.stdin
        with contextlib.suppress(BrokenPipeError):  # its exit code says why
            part.stdin.write(json.dumps(order))
            part.stdin.close()
        return part

    def _hear(self, place: Place, part: subprocess.Popen) -> None:
        """Take in what a part writes, until it ends."""
        complaint: list[str] = []
        reader = threading.Thread(target=lambda: complaint.extend(part.stderr or ()))
        reader.start()
        done = False
        for said in part.stdout or ():
            line = json.loads(said)
            done = done or line["kind"] == "done"
            with self.lock:
                self._take(place, line.pop("kind"), line)
        reader.join()
        if part.wait() or not done:
            last = text.line((complaint or [""])[-1], 300)
            why = f"a part ended with exit code {part.returncode}{f': {last}' if last else ''}"
            with self.lock:
                self.say(f"warning: {place.name}: {why}; what it had left is done on {self.rest} afterwards")

    def _take(self, place: Place, kind: str, line: dict) -> None:
        found = self.found
        if kind == "step":
            self.steps[place.name] = Step(**line)
            n, total = (sum(getattr(step, name) for step in self.steps.values()) for name in ("n", "total"))
            self.progress(Step(line["phase"], n, total, f"{place.name}  {line['said']}"))
        elif kind == "test":
            found.tests[line["submission"], line["case"]] = _OUTCOME.validate_python(line["outcome"])
        elif kind == "group":
            group = _GROUP.validate_python(line)
            found.groups[group.process, group.case, group.part] = group
        else:
            found.audits.append(line["audits"])
            found.clock = found.clock or line["clock"]
            found.notes += [note for note in line["notes"] if note not in found.notes]
