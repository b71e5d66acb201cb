"""--devices: the cases of one run over several GPUs of one kind, at most one process group on each at a time.

A part of the work is done by a process of harness/judge/part.py, which sees one GPU. All submissions are called on a
case by the same GPU, since two GPUs of one kind differ by more than two variants do; with fewer timed cases than GPUs, the
processes of a case are divided too. What a part does not deliver, because it was lost, the run itself does afterwards on
the first device, as --resume would.
"""

import dataclasses
import json
import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
    plan: the fields of phases.Plan, None for test cases.
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

    def order(self, share: Share) -> dict:
        """The JSON that a part receives."""
        return {
            "problem": str(self.problem.folder), "device": self.device, "target": self.target,
            "submissions": [[one.name, str(one.file)] for one in self.submissions],
            "cases": [[number, dataclasses.asdict(self.cases[number])] for number in share.cases],
            "processes": share.processes, "timeout_s": self.timeout_s, "limit_s": self.limit_s, "plan": self.plan,
            "paired": self.paired,
        }  # fmt: skip


def places(wanted: str) -> list[Place]:
    """The GPUs that --devices names: "all" visible ones, or numbers as in "0,2" or "cuda:0,cuda:2". UsageError: there is
    no such GPU, or they are of several kinds.
    """
    visible = gpu.visible()
    names = [f"cuda:{number}" for number in range(len(visible))]
    asked = names if wanted == "all" else [re.sub(r"^(?=\d+$)", "cuda:", word.strip()) for word in wanted.split(",")]
    if unknown := [name for name in asked if name not in names]:
        raise UsageError(f"--devices must be all, or a list of {', '.join(names) or 'GPUs, of which there is none'}, "
                         f"got {unknown[0]!r}")  # fmt: skip
    if len(set(asked)) < len(asked):
        raise UsageError(f"--devices names a GPU twice: {wanted}")
    chosen = [(name, visible[names.index(name)]) for name in asked]
    if len(kinds := sorted({f"{one.name} (driver {one.driver})" for _, one in chosen})) > 1:
        raise UsageError(f"--devices must be GPUs of one kind, whose times can be compared, got {', '.join(kinds)}")
    return [Place(name, one.uuid, {gpu.VARIABLE: one.uuid}) for name, one in chosen]


@contextmanager
def held(devices: Sequence[Place], say: Callable[[str], object]) -> Iterator[None]:
    """Within, no other judge of this user is on any of the devices. The order is the same for all who wait."""
    with ExitStack() as stack:
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
    found, todo, heard = Found(), queue.SimpleQueue(), queue.SimpleQueue()
    for share in shares:
        todo.put(share)
    running: dict[str, subprocess.Popen] = {}
    workers = [threading.Thread(target=_worker, args=(work, place, todo, heard, running)) for place in devices]
    for worker in workers:
        worker.start()
    steps: dict[str, Step] = {}
    try:
        left = len(workers)
        while left:
            place, line = heard.get()
            kind = line.pop("kind")
            if kind == "idle":
                left -= 1
            elif kind == "lost":
                say(f"warning: {place.name}: {line['why']}; what it had left is done on {devices[0].name} afterwards")
            elif kind == "step":
                steps[place.name] = Step(**line)
                n, total = (sum(getattr(step, name) for step in steps.values()) for name in ("n", "total"))
                progress(Step(line["phase"], n, total, f"{place.name}  {line['said']}"))
            else:
                _take(found, kind, line)
    finally:
        while not todo.empty():
            todo.get()
        for part in list(running.values()):
            part.kill()  # and with it all that it started
        for worker in workers:
            worker.join()
    return found


def _take(found: Found, kind: str, line: dict) -> None:
    if kind == "test":
        found.tests[line["submission"], line["case"]] = _OUTCOME.validate_python(line["outcome"])
    elif kind == "group":
        group = _GROUP.validate_python(line)
        found.groups[group.process, group.case, group.part] = group
    elif kind == "done":
        found.audits.append(line["audits"])
        found.clock = found.clock or line["clock"]
        found.notes += [note for note in line["notes"] if note not in found.notes]


def _worker(
    work: Work, place: Place, todo: queue.SimpleQueue, heard: queue.SimpleQueue, running: dict[str, subprocess.Popen]
) -> None:
    """Do shares on one device until none is left."""
    try:
        while True:
            try:
                share = todo.get_nowait()
            except queue.Empty:
                return
            if why := _part(work, place, share, heard, running):
                heard.put((place, {"kind": "lost", "why": why}))
    except Exception as error:  # a thread's exception would be lost
        heard.put((place, {"kind": "lost", "why": f"{type(error).__name__}: {error}"}))
    finally:
        heard.put((place, {"kind": "idle"}))


def _part(
    work: Work, place: Place, share: Share, heard: queue.SimpleQueue, running: dict[str, subprocess.Popen]
) -> str:
    """Do a share in a process on a device. Return why it was lost, or ""."""
    with subprocess.Popen(
        COMMAND, cwd=ROOT, env={**os.environ, **place.env}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as part:  # fmt: skip
        running[place.name] = part
        assert part.stdin and part.stdout and part.stderr
        complaint: list[str] = []
        reader = threading.Thread(target=lambda: complaint.extend(part.stderr or ()))
        reader.start()
        try:
            part.stdin.write(json.dumps(work.order(share)))
            part.stdin.close()
        except BrokenPipeError:
            pass  # its exit code says why
        ended = False
        for said in part.stdout:
            line = json.loads(said)
            ended = ended or line["kind"] == "done"
            heard.put((place, line))
        reader.join()
    if part.returncode or not ended:
        last = text.line((complaint or [""])[-1], 300)
        return f"a part ended with exit code {part.returncode}{f': {last}' if last else ''}"
    return ""
