"""The processes that a session talks to: the checker, and the runner of each submission.

CheckerHandle sends requests to the checker, whose failures are the problem's. RunnerHandle is a submission over all its
processes, RunnerProcess the present one. A fault of a runner is raised as Died and becomes its submission's Outcome.

What a submission keeps of prepared weights has a bound (docs/rules.md, rule 2). On a CPU the judge measures the memory
of the runner's processes and its files around each request that may add to it: counted after a first call, when the
code is loaded (`count`), and with room for code since the process's start (`host_start`). On a GPU the memory that
counts is what a recorded call finds in use of its scratch memory.
"""

import contextlib
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.judge import replies
from harness.judge.outcome import Audit, Outcome
from harness.problem import sources
from harness.problem.folders import Case, Problem, ProblemError, Submission
from harness.runner import failure, gate
from harness.sandbox import process, workdir
from harness.sandbox.process import Child, Died
from harness.sandbox.workdir import Workdir
from problems.common import build

LINES = 20  # that are kept of what a submission printed
PREPARED_FACTOR, PREPARED_SLACK = 1.05, 64 * 2**20  # of the weights' bytes, and bytes: what prepare may keep
WORK_SLACK = 256 * 2**20  # bytes more on a GPU, where scratch memory that a call uses again counts too
FIRST_SLACK = 128 * 2**20  # bytes more that the first prepare and call may take, for code, pools of threads, workspaces

_IMPORTS_REFERENCE = re.compile(rb"^\s*(from|import)\s+reference\b", re.MULTILINE)


class CheckerLost(ProblemError):
    """The checker ended, or was killed, before it answered."""

    resumable = True  # say for want of memory


class DeviceError(RuntimeError):
    """The device does not compute any more, so none of its results can be believed."""


class Reported(Died):
    """A runner reported an exception. Its text has the paths of the copied files."""

    def __init__(self, reply: replies.Failed) -> None:
        compiling = reply.failed == "compile"
        report = reply.text.strip()
        report = remarked(report, "out of memory") if reply.memory and not compiling else report
        super().__init__("COMPILE_ERROR" if compiling else "RUNTIME_ERROR", report)


@dataclass(frozen=True)
class Content:
    """The inputs and outputs of one call. host: bytes of a CPU's buffer; parts: bytes of "inputs" and "outputs" on a
    GPU; layout: for a runner to map it; bytes: that a call must move, if the task says it; held: of inputs and outputs.
    """

    case: Case
    host: int
    parts: dict[str, int]
    layout: dict
    bytes: int | None
    held: int

    @property
    def moved(self) -> int:
        """Bytes that a call moves; the judge's own readers read as many."""
        return self.bytes or self.case.bytes or self.held


class CheckerHandle:
    """The checker. ProblemError from any request: the problem's code failed; CheckerLost: it is gone."""

    def __init__(self, problem: Problem, device: str, module: str = "harness.checker.checker") -> None:
        self.problem, self.device = problem, device
        # Threads of its pool that spin for long when their work is done would slow the calls that follow.
        self.child = Child(module, {"GOMP_SPINCOUNT": "1000"})
        flush_bytes = gate.flush_bytes() if device == "cpu" else 0
        self.child.memory_limit += flush_bytes  # for the judge's own work
        files = {name: str(path) for name, path in problem.files.items()}
        start = {"folder": str(problem.folder), "ours": problem.ours, "device": device, "files": files}
        with contextlib.suppress(Died):  # as its first reply says, which the first request waits for
            self.child.send(start | {"flush": flush_bytes})
        self._started: dict | None = None

    def ask(self, message: dict) -> dict:
        return self.request(message)[0]

    def request(
        self,
        message: dict,
        failing: str = "",
        limit_s: float = 0.0,
        watch: Child | None = None,
        fds: Sequence[int] = (),
    ) -> tuple[dict, list[int]]:
        """Return reply, descriptors. failing: begins errors. fds: closed. watch: a runner; Died: it took too much."""
        try:
            reply, descriptors = self._answer(message, limit_s or replies.CHECKER_LIMIT_S, watch, fds)
        except Died as died:
            raise CheckerLost(f"the checker of {self.problem.name} {died.reason}") from None
        finally:
            for fd in fds:
                os.close(fd)
        if watch and watch.excess:
            raise Died("RUNTIME_ERROR", watch.excess)
        if "failed" in reply:
            ours = reply["failed"] == failure.RefusedError.__name__  # a limit of the judge
            failed = failing or (self.problem.name if ours else f"{self.problem.name}'s own code failed")
            raise ProblemError(f"{failed}: {reply['text']}")
        return reply, descriptors

    def _answer(self, message: dict, limit_s: float, watch: Child | None, fds: Sequence[int]) -> tuple[dict, list[int]]:
        """Return the reply to a message; what failed at the start stays the reply to all. Died: the checker is gone."""
        if self._started is None:
            self._started = self.child.receive(replies.CHECKER_LIMIT_S)[0]
        if "failed" in self._started:
            return self._started, []
        self.child.send(message, tuple(fds))
        return self.child.receive(limit_s, watch=watch)

    def definitions(self, submission: Submission) -> dict:
        """Return what `import reference` finds in a process of the submission: the classes of a folder's data."""
        case = next(iter((*self.problem.tests, *self.problem.benchmarks["cpu"])), None)
        files = () if self.problem.ours else (submission.file, *self.problem.files.values())
        if case is None or not any(_IMPORTS_REFERENCE.search(file.read_bytes()) for file in files):
            return {}
        return self.ask({"op": "definitions", "case": case.params, "seed": case.seed})

    def see_device(self, lost: str, reason: str) -> None:
        """Raise DeviceError if a GPU does not compute any more, in the checker's context, since `lost` was lost."""
        well = self.device == "cpu"
        with contextlib.suppress(Died):
            well = well or self._answer({"op": "canary"}, replies.CANARY_LIMIT_S, None, ())[0].get("well") is True
        if not well:
            raise DeviceError(f"the device does not compute any more since {lost} was lost: {reason}")

    def close(self) -> None:
        self.child.close()


@dataclass
class Printed:
    """What the processes of a submission printed, one after the other: the first lines, and how many there are."""

    lines: list[str] = field(default_factory=list)
    count: int = 0

    def add(self, child: Child) -> None:
        """Add what a process printed that has ended."""
        lines, count = child.printed
        self.lines, self.count = (self.lines + lines)[:LINES], self.count + count


@dataclass(eq=False)
class RunnerProcess:
    """One process of a submission, and what it has received. limit_s: of a request that is no call."""

    name: str
    child: Child
    workdir: Workdir | None
    checker: CheckerHandle
    limit_s: float
    printed: Printed = field(default_factory=Printed)
    opened: tuple | None = None  # what its buffers were allocated for
    calls: int = 0
    calls_on_buffers: int = 0  # calls on the present buffers
    number: int = 0  # of its last call on a CPU
    series: tuple | None = None  # which calls it is waiting in on a CPU, to make a further one of them
    strays: frozenset[int] = frozenset()  # processes that were there when its last call was over
    holds: int = 0  # number of the weights that it has
    weights_bytes: int = 0  # of the weights' tensors
    host_start: int | None = None  # bytes of host memory and files before it had any weights; None: not measured
    host_base: int | None = None  # bytes of host memory and files before weights that count came; None: not counted

    def ask(self, wanted: type[replies.Wanted], message: dict, limit_s: float) -> replies.Wanted:
        """Return the reply to a request. Died: there was none, or none of this form; Reported: an exception came."""
        self.child.send(message)
        return self.receive(wanted, limit_s)

    def receive(self, wanted: type[replies.Wanted], limit_s: float) -> replies.Wanted:
        """Return the next reply. Died, Reported: as in `ask`."""
        reply = replies.read(wanted, self.child.receive(limit_s)[0])
        if isinstance(reply, replies.Failed):
            reply = reply.model_copy(update={"text": _hinted(reply, self.checker.problem, self.workdir)})
        return admitted(reply)

    def open(self, content: Content, buffers: int, reads: dict[str, int] | None) -> None:
        """Give the runner buffers of this layout, unless it has them. The checker allocates, the runner maps them."""
        wanted = (content.host, content.layout, buffers)
        if self.opened == wanted:
            return
        self.end_series()
        request = {"op": "allocate", "runner": self.name, "bytes": content.host, "count": buffers}
        request |= self.child.freezer._asdict()
        _, fds = self.checker.request(request, "the checker could not allocate buffers")
        message = {"op": "open", "bytes": content.host, "count": buffers, **content.layout}
        if reads is not None:
            message["reads"] = reads
        self.hand_over(replies.Done, message, fds, "map its buffers", self.limit_s + replies.COMPILE_LIMIT_S)
        self.opened, self.calls_on_buffers = wanted, 0

    def hand_over(
        self, wanted: type[replies.Wanted], message: dict, fds: list[int], task: str, limit_s: float
    ) -> replies.Wanted:
        """Send descriptors, which are closed here, and return the reply. Died: the runner could not do this task."""
        try:
            answer, _ = self.child.request(message, limit_s, tuple(fds))
        finally:
            for fd in fds:
                os.close(fd)
        reply = replies.read(wanted, answer)
        if isinstance(reply, replies.Failed):
            raise Died("RUNTIME_ERROR", remarked(reply.text, f"could not {task}"))
        return reply

    def end_series(self) -> None:
        """Let a runner on a CPU that waits for a further call reply to the last one."""
        if self.series is not None:
            self.checker.ask({"op": "leave", "runner": self.name, "number": self.number})
            self.last_reply()

    def last_reply(self) -> replies.Called:
        """Return the reply of a runner on a CPU that makes no further call, and stop it again."""
        self.series = None
        self.child.resume()
        reply = self.receive(replies.Called, self.limit_s)
        self.child.pause()
        return reply

    def report_of(self, timed: dict, limit_s: float) -> tuple[gate.Reading, list[int], list[int], str]:
        """Return (reading, pids ahead of the call, behind it, what it noted). Died: gone, late, or not to stop."""
        if timed["code"] == process.GONE:
            self.child.receive(replies.CANARY_LIMIT_S)  # raises what became of it
            raise Died("RUNTIME_ERROR", "its process was gone when its call should have been over")
        self.child.stopped()
        if not timed.pop("waiting"):
            raise Died("RUNTIME_ERROR", 'its process said that it was ready and did not wait for the "go"')
        if timed["code"] == process.RUNS_ON:
            raise Died("RUNTIME_ERROR", "its processes could not be stopped when its call was over")
        before, after, note = timed.pop("before"), timed.pop("after"), timed.pop("said")
        if timed["code"] == process.LATE:
            self.child.kill()
            raise Died("TIMEOUT", f"no answer within {limit_s:g} s; it and all it had started were killed")
        return gate.Reading(**timed), before, after, note

    def failure(self, died: Died) -> Outcome:
        """Return the failure, with the submission's own paths in place of those of its folder here."""
        return Outcome(died.status, self.workdir.restore(died.reason) if self.workdir else died.reason)

    def remove(self) -> None:
        """Keep what the ended process printed, and remove its folder."""
        self.printed.add(self.child)
        if self.workdir:
            with contextlib.suppress(OSError):  # what cannot be removed now goes with the judge's own folder
                self.workdir.remove()
            self.workdir = None


@dataclass(eq=False)
class RunnerHandle:
    """A submission (None: the judge's calls), and its process. name: for times and limits; runner: its process's."""

    name: str
    submission: Submission | None
    target: str
    built: bool = False  # its compile step was made, or is not needed
    audit: Audit = field(default_factory=Audit)
    printed: Printed = field(default_factory=Printed)  # of all its processes
    process: RunnerProcess | None = None
    lost: int = 0  # processes that died
    # What became of the last one.
    loss: Outcome = field(default_factory=lambda: Outcome("RUNTIME_ERROR", "no process was lost"))
    # Its compile step, an import or a first call failed: no further process is started for it.
    broken: Outcome | None = None
    keep: bool = False  # what its process compiled is kept when it stops
    runner: str = ""
    scratch: tuple[dict, int] | None = None  # the memory that its next process on a GPU hands out, with the descriptor
    recorded: bool = True  # its calls on a GPU are recorded; a profiler needs what records them for itself
    unplayable: str = ""  # why calls of it are made in its runner, though they can be recorded

    def __post_init__(self) -> None:
        self.runner = self.runner or self.name

    @property
    def running(self) -> RunnerProcess:
        """Its process. RuntimeError: it has none."""
        if self.process is None:
            raise RuntimeError(f"{self.runner} has no process")
        return self.process

    @property
    def baseline(self) -> bool:
        return self.submission is not None and self.submission.baseline

    @property
    def given_up(self) -> Outcome | None:
        """Why no process of it is started any more in this phase."""
        return self.broken or (self.loss if self.lost >= replies.GIVE_UP_AFTER else None)

    def serves(self, case: Case) -> bool:
        return self.submission is None or self.submission.serves(case)

    def start(self, checker: CheckerHandle, compile_only: bool, limit_s: float) -> None:
        """Start its process, and send what to import. `receive` has the answer. Died: its files cannot be laid out."""
        problem, device = checker.problem, "cpu" if compile_only else checker.device
        arch = {"CUTE_DSL_ARCH": build.ARCH[self.target]} if self.target in build.ARCH else {}
        box, file, folder, files = None, None, problem.folder, {}
        if self.submission:
            built = workdir.build_folder(self.submission.file, problem, self.target)
            box = Workdir.make(self.submission.file, problem, built, checker.device)
            file, folder, files = str(box.file), box.folder, None if problem.ours else box.files
        stoppable = checker.device == "cpu" and not compile_only
        child = Child("harness.runner.runner", arch, box.jail if box else None, stoppable)
        self.process = RunnerProcess(self.runner, child, box, checker, limit_s, self.printed)
        message = {
            "device": device,
            "folder": str(folder),
            "file": file,
            "files": files,
            "definitions": checker.definitions(self.submission) if self.submission else {},
            "compile": compile_only,
            "records": self.target if device == "cuda" and self.recorded else "",
        }
        fds = ()
        if device == "cuda" and self.scratch:
            message["scratch"], *fds = self.scratch
            self.scratch = None
        with contextlib.suppress(Died):  # a process that is gone already says so when it is waited for
            child.send(message, tuple(fds))
        for fd in fds:
            os.close(fd)

    def lose(self, failure: Outcome) -> Outcome:
        """End its process because of `failure`, and return it. DeviceError: the device does not compute since then."""
        process = self.process
        if process is None:  # lost already, while it was measured
            return failure
        process.child.kill()
        self.process, self.loss = None, failure
        self.lost += 1
        process.remove()
        process.checker.ask({"op": "release", "runner": self.runner})
        process.checker.see_device(self.runner, failure.reason)
        return failure

    def measure(self, heap: bool = False) -> int | None:
        """Return the bytes of memory and files that its process takes now; None: gone. heap: free malloc's too."""
        process = self.process
        if process is None or process.workdir is None:
            return None
        try:
            process.end_series()
            process.ask(replies.Done, {"op": "trim", "heap": heap}, process.limit_s)
        except Died as died:
            self.lose(process.failure(died))
            return None
        return process.child.private_bytes() + process.workdir.jail.taken()

    def count(self) -> Outcome | None:
        """Count from now on what it keeps. Return the fault of what it has kept so far, or how it was lost."""
        size = self.measure(heap=True)
        if size is None:
            return self.loss
        process = self.running
        process.host_base = size
        if process.host_start is None:
            return None
        return kept_too_much(size - process.host_start, process.weights_bytes, FIRST_SLACK)

    def hold(self, number: int) -> Outcome | None:
        """Give it the present weights, of this number, to prepare. Return the fault of what it kept, or its loss."""
        process = self.running
        process.end_series()
        before = self.measure() if process.host_base is not None else None
        if self.process is None:
            return self.loss
        failing = "the checker could not allocate weights"
        weights, fds = process.checker.request({"op": "hold", "runner": self.runner}, failing)
        message = {"op": "hold", "nbytes": weights["nbytes"], "spec": weights["spec"]}
        start = time.perf_counter()
        try:
            reply = process.hand_over(replies.Prepared, message, fds, "prepare the weights", replies.PREPARE_LIMIT_S)
        except Died as died:
            raise Died(died.status, remarked(died.reason, "in prepare")) from None
        took_us = (time.perf_counter() - start) * 1e6
        process.holds, process.weights_bytes = number, weights["bytes"]
        if reply.prepared:
            self.audit.prepare_us = took_us
        return self.kept(before) if before else None

    def kept(self, before: int) -> Outcome | None:
        """Return the fault of holding more than is allowed, or the loss. before: `measure`'s, before the request."""
        process = self.running
        for heap in (False, True):  # to free what malloc keeps each time would cost the calls behind it
            size = self.measure(heap)
            if size is None:
                return self.loss
            grown = max(0, size - (process.host_base or before))
            if not (fault := kept_too_much(grown, process.weights_bytes)):
                break
        self.audit.kept_bytes = max(grown, self.audit.kept_bytes or 0)
        return fault

    def look(self) -> Outcome | None:
        """Return the fault of processes that live after the submission's call, once they have had time to end."""
        if self.process is None or self.baseline:
            return None
        self.process.end_series()  # it runs meanwhile, which it must not between two calls of a series
        child = self.process.child
        for _ in range(replies.SETTLES):
            child.pause()
            if not (pids := child.processes()):
                return None
            child.resume()
            time.sleep(replies.SETTLE_S)
        child.pause()
        advice = "end all that a call starts before it returns (docs/rules.md, rule 4)"
        return Outcome("CHEAT_SUSPECTED", f"still running after the call: child processes {pids}; {advice}")


def kept_too_much(kept_bytes: int, weights_bytes: int, more: int = 0) -> Outcome | None:
    """Return the fault of what is kept of weights of so many bytes. more: bytes that are allowed besides."""
    slack = PREPARED_SLACK + more
    allowed = int(PREPARED_FACTOR * weights_bytes) + slack
    if kept_bytes <= allowed:
        return None
    fault = f"prepare: {kept_bytes / 2**20:.0f} MiB more are held than before, {allowed / 2**20:.0f} MiB are allowed"
    return Outcome("RULE_BROKEN", f"{fault} ({PREPARED_FACTOR} x the weights and {slack // 2**20} MiB)")


def remarked(report: str, remark: str) -> str:
    """Return a report with a remark on its first line, which stays the first: it names the submission's own line."""
    first, newline, rest = report.partition("\n")
    return f"{first} ({remark}){newline}{rest}"


def _hinted(reply: replies.Failed, problem: Problem, box: Workdir | None) -> str:
    """Return the text of a failure, whose first line says what to do where a module or a file was not found."""
    first, newline, rest = reply.text.partition("\n")
    missing = re.search(r"ModuleNotFoundError: No module named '(\w+)|cannot import name .* from '(reference)'", first)
    absent = re.search(r"FileNotFoundError: .*: '(.+)'", first)
    hint = ""
    if missing and not problem.ours:
        hint = "a module of the folder must be in `files` of task.yml"
        if "reference" in missing.groups():
            hint = "no submission sees the reference but for classes of its data (rule 6, docs/rules.md)"
    elif absent and box and Path(box.restore(str(box.file.parent)), box.restore(absent[1])).is_file():
        endings = ", ".join(sorted(sources.SUFFIXES))
        hint = (
            f"beside a submission go sources ({endings}) of its stem or whose names are texts in it, and the headers "
        )
        hint += "that these include: open one from the folder of __file__"
    return f"{first}: {hint}{newline}{rest}" if hint else reply.text


def admitted(reply: replies.Wanted | replies.Failed) -> replies.Wanted:
    """Return `reply`. Raise Reported if it reports an exception."""
    if isinstance(reply, replies.Failed):
        raise Reported(reply)
    return reply
