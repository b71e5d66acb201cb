"""A session: one checker and its runners. It makes their compile steps, starts them, makes calls, and returns outcomes.

docs/architecture.md has the messages and the states of a runner. A compile step is a separate process, whose caches are
kept for the runners of the same closure. It is hostile code like a runner's. It runs in the same jail with a separate
budget, and sees only contents of public seeds. The judge never keeps what a runner writes.
"""

import contextlib
import hashlib
import re
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from harness.judge import outcome, replies
from harness.judge.handle import CheckerHandle, Content, Reported, RunnerHandle
from harness.judge.outcome import Outcome
from harness.judge.replies import Wanted
from harness.problem import sources
from harness.problem.folders import Case, Problem, ProblemError
from harness.sandbox import process, workdir
from harness.sandbox.process import Died
from problems.common import build, cubins, load

CLOSED_AT_ONCE = 16  # processes
LEAST_SEED_BITS = 16  # of a secret seed
STORABLE_BITS = 31  # with fewer, answers to all seeds can be stored
COMPILING = ("triton", "cutlass", "torch.compile", "torch.utils.cpp_extension", "problems.common.build", "numba")
_COMPILE = re.compile(r"torch\.compile\b")
EMPTY = "empty"  # the judge's own call that works for a known time


@dataclass(frozen=True)
class Step:
    """What a run is doing. n of total parts of the phase are done; said: the present part, in words."""

    phase: str
    n: int
    total: int
    said: str


Progress = Callable[[Step], None]


@dataclass(frozen=True)
class CallRequest:
    """The request for one call. buffers: addresses that calls take in turn. judge_call: name of one of the judge's own,
    "" for a submission's. reads: plain readers of the judge by name, with their configuration. measure: what the call
    leaves in memory counts towards what `prepare` may keep, if the problem has weights. stay: the process waits for the
    next call in native code, so that none of its code runs between the two calls, and does not say what came back.
    """

    buffers: int
    judge_call: str = ""
    reads: dict[str, int] | None = None
    measure: bool = False
    stay: bool = False

    @property
    def calls(self) -> tuple[str, ...]:
        """Names of the calls that a runner prepares together, one for each buffer."""
        together = (EMPTY, *(self.reads or ()))
        return together if self.judge_call in together else (self.judge_call,)


class Session:
    """A context manager: a checker, and runners as needed. notes: for the record. progress: of compiling."""

    def __init__(self, problem: Problem, device: str, timeout_s: float | None = None) -> None:
        self.problem, self.device = problem, device
        self.call_limit_s = timeout_s or replies.CALL_LIMIT_S
        self.first_call_limit_s = timeout_s or replies.COMPILE_LIMIT_S
        self.import_limit_s = max(timeout_s or 0, replies.IMPORT_LIMIT_S)
        self.handles: list[RunnerHandle] = []
        self.notes: list[str] = []
        self.progress: Progress = lambda _: None
        self._breaks: dict[str, Outcome] = {}  # by submission, why no process of it is started any more
        self.present: Content  # from the first `content` on
        self._seed_bits: int | None = None  # of secret seeds; None: not known yet
        self.remark = ""  # what the verdict PASSED does not show
        self._weights = 0  # number of the present weights
        self._split = False  # whether the problem has weights apart from inputs
        self.weights_bytes = 0  # of the present weights' memory on a GPU
        process.harden()
        self.checker = CheckerHandle(problem, device)

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            if handle.process:
                handle.process.child.close()
                handle.process.remove()
        self.checker.close()

    def weights(self, case: Case, seed: int | None = None) -> str | None:
        """Make new weights for `case`. Return the seed as text; None if the problem has no weights."""
        seed = secrets.randbits(63) if seed is None else seed
        reply = self.checker.ask({"op": "new_weights", "case": case.params, "seed": seed})
        self._split, self.weights_bytes = reply["split"], reply["bytes"]
        self._weights += 1
        return str(seed) if self._split else None

    def content(self, case: Case, seed: int | None = None) -> str:
        """Make fresh contents, from a secret seed unless one is given. Return the seed as text."""
        self.seed = seed = self.secret_seed(case) if seed is None else seed  # of the present contents
        reply = self.checker.ask({"op": "content", "case": case.params, "seed": seed, "rows": case.rows})
        before, device, name = vars(self).get("present"), reply["device"], self.problem.name
        self.present = Content(case, reply["host"], reply["parts"], reply["open"], reply["bytes"], reply["held"])
        if device != self.device:
            raise ProblemError(f"{name} makes its data on {device}, not on {self.device}: use --device {device}")
        if self.problem.ours and before and before.case == case and before.layout != self.present.layout:
            raise ProblemError(f"{name}: shapes in {case} differ from seed to seed; a recorded call has one")
        return str(seed)

    def secret_seed(self, case: Case) -> int:
        """Return a secret seed: of 63 bits; in a GPU MODE folder of as many as its contents, or case's seed, have."""
        if self._seed_bits is None:
            message = {"op": "seeds", "case": case.params, "seed": case.seed}
            most = 63 if self.problem.ours else self.checker.ask(message)["bits"]
            bits = self._seed_bits = most or max(LEAST_SEED_BITS, case.seed.bit_length())
            if bits < 63:
                self.notes.append(f"seeds of {bits} bits: with larger ones this folder's contents lose their variety")
            if bits < STORABLE_BITS:
                self.remark = f"contents have seeds of only {bits} bits, so answers to all of them can be stored"
        return secrets.randbits(self._seed_bits)

    def product_us(self, count: int) -> list[float]:
        """Return times of `count` of the judge's matrix products on a GPU."""
        return list(self.checker.ask({"op": "product", "count": count})["us"])

    def start(self, *handles: RunnerHandle, compile_only: bool = False) -> None:
        """Start a process for each handle that has none, all at once. One that fails to start gets `loss`."""
        fresh = [handle for handle in handles if handle.process is None]
        if not compile_only:
            self.build(*fresh)
        for handle in fresh:
            handle.broken = handle.broken or self._breaks.get(handle.name)
            if handle.broken:
                continue
            try:
                handle.start(self.checker, compile_only, self.call_limit_s)
            except Died as died:
                self._break(handle, Outcome(died.status, died.reason))
            if handle not in self.handles:
                self.handles.append(handle)
        deadline = time.monotonic() + self.import_limit_s  # for all of them together
        for handle in [handle for handle in fresh if handle.process]:
            try:
                handle.running.receive(replies.Ready, max(0.1, deadline - time.monotonic()))
                handle.running.child.pause()
            except Died as died:
                failure = handle.running.failure(died)
                if not isinstance(died, Reported):
                    failure.reason = f"on import: {failure.reason}"
                if died.status == "TIMEOUT":
                    failure.reason += f"; if it needs longer, try --timeout {2 * self.import_limit_s:g}"
                self._break(handle, failure)
                continue

    def stop(self, *handles: RunnerHandle) -> None:
        """End the processes of these handles, and keep what their compile steps made."""
        living = [(handle, handle.process) for handle in handles if handle.process]
        with ThreadPoolExecutor(CLOSED_AT_ONCE) as pool:  # each takes a fifth of a second to go, and no processor
            list(pool.map(lambda pair: pair[1].child.close(), living))
        for handle, ended in living:
            handle.process = None
            self.checker.ask({"op": "release", "runner": handle.runner})
            if handle.keep and handle.submission and ended.workdir:
                try:
                    ended.workdir.publish(workdir.key(handle.submission.file, self.problem, handle.target))
                except workdir.CacheError as error:  # its runners compile for themselves
                    self.notes.append(f"what {handle.runner} compiled is not kept: {error}")
            ended.remove()

    def call(self, handle: RunnerHandle, request: CallRequest) -> Outcome:
        """Make one call on a CPU, also of the judge's own. Return its outcome: UNSUPPORTED if ONLY lacks the case."""
        if refused := self._refused(handle):
            return refused
        process = handle.running
        first = process.calls == 0
        limit_s = self.first_call_limit_s if first else self.call_limit_s
        try:
            if fault := self._give(handle, request.buffers, request.reads):
                return handle.lose(fault)
            before = handle.measure() if request.measure and process.host_base is not None else None
            if handle.process is None:
                return handle.loss
            buffer = process.calls_on_buffers % request.buffers  # calls take them in turn
            process.calls += 1
            process.calls_on_buffers += 1
            outcome, claims = cpu_call(handle, request, self.present, buffer, limit_s)
        except Died as died:
            failure = process.failure(died)
            if failure.status == "TIMEOUT":
                failure.reason += f"; if it needs longer, try --timeout {2 * limit_s:g}"
            return self._break(handle, failure) if first else handle.lose(failure)
        outcome.bytes = self.present.bytes
        if handle.submission and outcome.status == "PASSED":
            outcome = outcome.judged(self.verdict(handle.runner, buffer, claims, handle.baseline))
        if before and outcome.status == "PASSED" and (fault := handle.kept(before)):
            outcome = outcome.judged(fault)
        return outcome

    def count_kept(self, handle: RunnerHandle, request: CallRequest) -> None:
        """Make a first call of a submission, which loads its code, and count from then on what it keeps. One that is
        lost meanwhile, or keeps too much in its first `prepare`, does not run again: it would not be counted.
        """
        counts = self._split and handle.submission and not handle.baseline
        if counts and not self._refused(handle):
            handle.running.host_start = handle.measure()
        self.call(handle, request)
        if counts and handle.process is not None and (fault := handle.count()):
            self._break(handle, fault)

    def ask_runner(
        self, handle: RunnerHandle, wanted: type[Wanted], message: dict, limit_s: float, buffers: int = 0
    ) -> Wanted | Outcome:
        """Make a request that is no call. Return the reply, or the failure. buffers: on a CPU; the first is filled."""
        compiles = message["op"] == "compile"
        if failure := self._started(handle, compiles):
            return failure
        process = handle.running
        try:
            if buffers:
                if fault := self._give(handle, buffers, None):
                    return handle.lose(fault)
                self.checker.ask({"op": "fill", "runner": handle.runner, "buffer": 0})
            reply = process.ask(wanted, message, limit_s)
        except Died as died:
            return handle.lose(process.failure(died))
        handle.keep = compiles
        return reply

    def build(self, *handles: RunnerHandle, try_out: Callable[[RunnerHandle, list[Case]], None] | None = None) -> None:
        """Make lacking compile steps; one that fails leaves `broken`. try_out: calls cases, a baseline's timed ones."""
        todo = []
        for handle in handles:
            submission, target = handle.submission, handle.target
            if handle.built or submission is None:
                continue
            handle.built = True
            how = kind(submission.file, submission.folder or self.problem.folder)
            if how and workdir.build_folder(submission.file, self.problem, target) is None:
                label = f"{handle.name} (compile step)"
                helper = RunnerHandle(handle.name, submission, target, built=True, printed=handle.printed, runner=label)
                todo.append((how, handle, helper))
        self.start(*(helper for how, _, helper in todo if how == "compile_for"), compile_only=True)
        for number, (how, handle, helper) in enumerate(todo):
            self.progress(Step("compile", number, len(todo), handle.name))
            if how == "compile_for":
                message = {"op": "compile", "target": handle.target}
                result = self.ask_runner(helper, replies.Compiled, message, 2 * replies.COMPILE_LIMIT_S)
                handle.broken = result if isinstance(result, Outcome) else None
            else:
                every = (*(() if helper.baseline else self.problem.tests), *self.problem.timed(helper.target))
                (try_out or self._try_out)(helper, [case for case in every if helper.serves(case)])
            self.stop(helper)

    def _try_out(self, helper: RunnerHandle, cases: list[Case]) -> None:
        """Call a submission on these cases, on a CPU."""
        for case in cases:
            self.weights(case, case.seed)
            self.content(case, case.seed)
            self.call(helper, CallRequest(1))
            if helper.lost:
                return  # its verdict is found in the run itself
        helper.keep = True

    def _refused(self, handle: RunnerHandle) -> Outcome | None:
        """Start the submission's process if it has none. Return why the present content is not sent to it, if so."""
        if handle.submission and not handle.serves(self.present.case):
            return Outcome("UNSUPPORTED", handle.submission.limits)
        if handle.broken:
            return handle.broken
        return (handle.process is None and handle.given_up) or self._started(handle)

    def _started(self, handle: RunnerHandle, compile_only: bool = False) -> Outcome | None:
        """Start the submission's process if it has none. Return the failure."""
        if handle.process is None:
            self.start(handle, compile_only=compile_only)
        return None if handle.process else handle.broken or handle.loss

    def _give(self, handle: RunnerHandle, buffers: int, reads: dict[str, int] | None) -> Outcome | None:
        """Give a runner buffers and the present weights, unless it has them. Return the fault of what it kept."""
        handle.running.open(self.present, buffers, reads)
        if not self._split or handle.submission is None or handle.running.holds == self._weights:
            return None
        return handle.hold(self._weights)

    def verdict(
        self, runner: str, buffer: int, claims: list[replies.Claim] | None, baseline: bool, fixed: bool = False
    ) -> Outcome:
        """Return the checker's verdict on a buffer, and on what came back. fixed: inputs and weights were read-only."""
        claimed = None if claims is None else [claim.model_dump() for claim in claims]
        message = {"op": "judge", "runner": runner, "buffer": buffer, "claims": claimed, "baseline": baseline}
        verdict = self.checker.ask({**message, "fixed": fixed})
        return Outcome(verdict["status"], verdict["reason"], verdict["error"])

    def _break(self, handle: RunnerHandle, failure: Outcome) -> Outcome:
        """End a submission's process, and start no other one in this run. Return `failure`."""
        handle.broken = self._breaks[handle.name] = failure
        return handle.lose(failure)


def cpu_call(
    handle: RunnerHandle, request: CallRequest, content: Content, buffer: int, limit_s: float
) -> tuple[Outcome, list[replies.Claim] | None]:
    """Make one call on a CPU. Return its times, with a fault, and what came back, None: not asked. Died: failed."""
    process, checker, judges = handle.running, handle.running.checker, handle.submission is None
    nbytes = content.moved if judges else 0
    address = {"runner": handle.runner, "buffer": buffer}
    stays = request.stay and not handle.baseline  # a baseline's setup is made for each call
    # The runner waits in native code for one of these calls. If it waits for others, it leaves those first.
    calls = (request.calls, nbytes)
    if process.series != calls:
        process.end_series()
    first = process.series is None
    # A baseline's setup sees the contents, and is no adversary. Other runners get them when they are stopped.
    if handle.baseline:
        checker.ask({"op": "fill", **address})
    process.number += 1
    about = {"number": process.number, "baseline": handle.baseline, "bytes": nbytes}
    if first:
        process.ask(replies.Ready, {"op": "call", "whats": request.calls, **about}, limit_s)
    # The checker stops the runner, fills the buffer, says "go", reads its clock, and stops the runner again.
    message = {
        "op": "time_call",
        "which": request.calls.index(request.judge_call) * request.buffers + buffer,
        "first": first,
        "last": not stays,
        "fill": not handle.baseline,
        "judges": judges,
        "limit_s": limit_s,
        **about,
        **address,
    }
    timed, _ = checker.request(message, limit_s=limit_s + replies.CHECKER_LIMIT_S, watch=process.child)
    reading, before, after, note = process.report_of(timed, limit_s)
    # The runner says what came back, after its last call or, in a GPU MODE folder, beside each one.
    process.series, claims = calls, None
    if not stays or reading.raised:
        claims = process.last_reply().claims
        if reading.raised:
            raise Died("RUNTIME_ERROR", "its process said that the call had raised, and then that it was well")
    if not content.layout["ours"] and not judges:  # as it was at "done": a reply comes later
        claims = replies.noted(note)
    fault = outcome.worked_on(reading)
    if fault is None and not judges and process.strays & set(before):
        fault = handle.look()
    process.strays = frozenset(after)
    times = outcome.of_cpu(reading)
    return times.judged(fault) if fault else times, claims


# --- compile steps


def kind(file: Path, folder: Path | None = None) -> str:
    """Return how `file` is compiled beforehand: by "compile_for", a "call", or ""."""
    if sources.defines(load.parse(file), "compile_for"):
        return "compile_for"
    files = [path for path in sources.closure(file, folder) if path.suffix == ".py"]
    imported = {name for path in files for _, name in sources.imported(path)}
    compiles = any(name.startswith(COMPILING) for name in imported) or any(_COMPILE.search(load.text(p)) for p in files)
    return "call" if compiles else ""


def code_hash(problem: Problem, file: Path, target: str) -> str | None:
    """Return the hash of the GPU code that the compile step of `file` has left, or None."""
    built = workdir.build_folder(file, problem, target) if target in build.ARCH else None
    return hash_of(built) if built else None


def hash_of(folder: Path) -> str | None:
    """Hash of the GPU code in builds below `folder`, whatever its kernels and files are called; None: no cubin."""
    hashes = set()
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            if path.suffix in (".so", ".cubin") and path.is_file() and path.stat().st_size <= cubins.FILE_LIMIT:
                for _, loaded in cubins.images(path.read_bytes()):
                    contents = sorted(hashlib.sha256(section).hexdigest() for section in loaded)
                    hashes.add(hashlib.sha256("".join(contents).encode()).hexdigest())
    return hashlib.sha256("".join(sorted(hashes)).encode()).hexdigest()[:16] if hashes else None
