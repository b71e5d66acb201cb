"""One checker and the runners it feeds: start, hand over one call, take the verdict. All limits live here.

The parent decides; a runner only says what happened in it. On a CPU it is believed in nothing: the checker's clock runs
outside it, and it runs only while it is asked something. On a GPU its time is believed as far as the parent's own clock
does not contradict.
"""

import contextlib
import math
import os
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from harness.judge import compiling, replies
from harness.judge import submission as of
from harness.judge.submission import FIRST_SPIN_US, Outcome, RunnerHandle
from harness.problem.folders import Case, Problem
from harness.runner import flush, gate
from harness.sandbox import freezer, policy, process, workdir
from harness.sandbox.process import Child, Died
from harness.sandbox.workdir import Workdir

IMPORT_LIMIT_S = 120  # importing torch and the submission
COMPILE_LIMIT_S = 120  # the first call of a process, which may compile; and compile checks, per artefact set
PREPARE_LIMIT_S = 60
CALL_LIMIT_S = 30
CHECKER_LIMIT_S = 600  # a reference is slow on purpose
CANARY_LIMIT_S = 60  # for the device to answer after a runner was lost; the kernel ends a hung one by then
CLOSED_AT_ONCE = 16  # processes
GIVE_UP_AFTER = 3  # processes that a submission may lose in one phase
SWITCHES_SHOWN = 4  # of those that a submission changed
SETTLE_S = 0.05  # between looks at processes that are about to end
SETTLES = 5  # such looks before a process counts as left behind
SPIN_MARGIN_US = 100  # events, the mark and the capture are enqueued under the spin as well
PREPARED_FACTOR, PREPARED_SLACK = 1.05, 64 * 2**20  # of the weights' bytes, and bytes: what prepare may keep
CODE_SLACK = {"cuda": 256 * 2**20, "cpu": 0}  # bytes more: libraries load kernels and workspaces as shapes ask for them
ARCH = {"sm90": "sm_90a", "sm100": "sm_100a"}


class ProblemError(RuntimeError):
    """The problem's own code failed: generator, reference or checker."""


class DeviceError(RuntimeError):
    """The device does not compute any more: nothing that it says can be believed."""


class Session:
    """A checker for `problem` on `device` ("cpu" or "cuda"), and runners as they are needed. A context manager."""

    def __init__(self, problem: Problem, device: str, timeout_s: float | None = None) -> None:
        self.problem, self.device = problem, device
        self.call_limit_s = timeout_s or CALL_LIMIT_S
        self.first_call_limit_s = timeout_s or COMPILE_LIMIT_S
        self.handles: list[RunnerHandle] = []
        self.clock_name = "" if device == "cuda" else freezer.clock_name()
        self.sandbox = policy.probe()
        self.notes: list[str] = []  # for the record
        self.say: Callable[[str], None] = lambda _: None  # how a note is told at once
        self._switched: set[str] = set()  # submissions that changed torch's switches
        self._breaks: dict[str, Outcome] = {}  # by submission, why no process of it is started any more
        self._records: bool | None = None  # whether the driver says what ran where; None: not known yet
        self._content: dict = {}
        self._case: Case | None = None
        self._split = False
        self._weights = 0  # number of the present weights
        self._weights_bytes = 0
        process.harden()
        # Threads of its pool that spin for long when their work is done would slow the calls that follow.
        self._checker = Child("harness.checker.checker", {"GOMP_SPINCOUNT": "1000"})
        if device == "cpu":
            self._checker.lend(flush.nbytes())
        utils = str(problem.utils) if problem.utils else None
        start = {"folder": str(problem.folder), "own": problem.own, "device": device, "utils": utils}
        self._ask(start | {"flush": flush.nbytes() if device == "cpu" else 0})

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            if handle.child:
                handle.child.close()
            self._remove(handle)
        self._checker.close()

    def weights(self, case: Case, seed: int | None = None) -> str | None:
        """Make new weights for `case`, where the problem has such. -> the seed as text; None where it has none."""
        seed = secrets.randbits(63) if seed is None else seed
        self._split = self._ask({"op": "new_weights", "case": case.params, "seed": seed})["split"]
        self._weights += 1
        return str(seed) if self._split else None

    def content(self, case: Case, seed: int | None = None) -> str:
        """Make fresh contents, from a secret seed if none is given. -> the seed as text."""
        seed = secrets.randbits(63) if seed is None else seed
        self._content = self._ask({"op": "content", "case": case.params, "seed": seed})
        self._case = case
        if self._content["device"] != self.device:
            raise ProblemError(
                f"{self.problem.name} makes its data on {self._content['device']}, the session runs on {self.device}: "
                f"use --device {self._content['device']}"
            )
        return str(seed)

    def start(self, *handles: RunnerHandle, compile_only: bool = False) -> None:
        """Start a process for each that has none, all at once. One that fails to start gets `last_loss`."""
        fresh = [handle for handle in handles if handle.child is None]
        if not compile_only:
            self.build(*fresh)
        for handle in fresh:
            handle.broken = handle.broken or self._breaks.get(handle.submission.name if handle.submission else "")
        fresh = [handle for handle in fresh if not handle.broken]
        for handle in fresh:
            arch = {"CUTE_DSL_ARCH": ARCH[handle.target]} if handle.target in ARCH else {}
            handle.opened, handle.last_loss, handle.calls, handle.within = None, None, 0, None
            handle.holds = handle.held_device = 0
            handle.spin_us, handle.host_base, handle.device_grown = FIRST_SPIN_US, None, 0
            submission = handle.submission
            if submission is None:
                # The judge's own calls.
                handle.child = Child("harness.runner.runner", arch, stoppable=self.device == "cpu")
                file, folder, utils = None, self.problem.folder, self.problem.utils
            else:
                built = workdir.build_folder(submission.file, self.problem, handle.target)
                box = handle.workdir = Workdir.make(submission.file, self.problem, built, self.device)
                stoppable = self.device == "cpu" and not compile_only
                handle.child = Child("harness.runner.runner", arch, box.jail, stoppable)
                file, folder, utils = str(box.file), box.folder, box.utils
            message = {
                "device": "cpu" if compile_only else self.device, "folder": str(folder), "file": file,
                "utils": str(utils) if utils else None, "compile": compile_only,
            }  # fmt: skip
            with contextlib.suppress(Died):  # a process that is gone already says so when it is waited for
                handle.child.send(message)
            if handle not in self.handles:
                self.handles.append(handle)
        deadline = time.monotonic() + IMPORT_LIMIT_S  # for all of them together
        for handle in fresh:
            try:
                left_s = max(0.1, deadline - time.monotonic())
                reply = replies.read(replies.Started, handle.child.receive(left_s)[0])
                handle.child.rest()
            except Died as died:
                self._break(handle, Outcome(died.status, f"on import: {self._own_paths(handle, died.reason)}"))
                continue
            if isinstance(reply, replies.Failed):
                self._break(handle, self._failure(handle, reply))
                continue
            self._note_switches(handle, reply.switches)
            if not handle.baseline and (found := of.tampering_in(reply.replaced)):
                self._lose(handle, found)
            elif self.device == "cuda" and not compile_only and reply.clock:
                self.clock_name = reply.clock

    def stop(self, *handles: RunnerHandle) -> None:
        living = [handle for handle in handles if handle.child]
        with ThreadPoolExecutor(CLOSED_AT_ONCE) as pool:  # each takes a fifth of a second to go, and no processor
            list(pool.map(lambda handle: handle.child.close(), living))
        for handle in living:
            handle.child = None
            self._ask({"op": "release", "runner": handle.name})
            if handle.keep and (why := compiling.keep(self.problem, handle)):
                self.notes.append(why)
        for handle in handles:
            self._remove(handle)

    def call(
        self, handle: RunnerHandle, buffers: int, what: str = "", reads: dict[str, int] | None = None,
        within_s: float = math.inf, audit: bool = False, measure: bool = False, stay: bool = False,
    ) -> Outcome:  # fmt: skip
        """One call of `submission` on the present content; `what` names one of the judge's own calls. UNSUPPORTED, and
        nothing is sent, where the content is of a case that a baseline says it does not serve.

        within_s: a limit beside those of the session, for a phase whose time is running out. audit: look at what ran
        on which queue of the GPU meanwhile; the time is then no score. measure: what the call leaves behind in memory
        counts towards what prepare may keep, where the problem has weights. stay: on a CPU its process waits where it
        is for the next call, so that nothing of it runs between the two, and does not say what came back.
        """
        if handle.submission and not handle.submission.serves(self._case):
            return Outcome("UNSUPPORTED", handle.submission.limits)
        if handle.broken:
            return handle.broken
        if handle.child is None:
            if handle.lost >= GIVE_UP_AFTER:
                lost = handle.last_loss
                return Outcome(lost.status, f"not run, {handle.lost} processes were lost before: {lost.reason}")
            self.start(handle)
            if handle.child is None:
                return handle.broken or handle.last_loss
        first = handle.calls == 0
        try:
            if fault := self._open(handle, buffers, reads) or self._hold(handle):
                return self._lose(handle, fault)
            size = self.measure(handle) if measure and handle.host_base is not None else None
            if handle.child is None:
                return handle.last_loss
            limit_s = min(self.first_call_limit_s if first else self.call_limit_s, within_s)
            handle.turn += 1
            handle.calls += 1
            buffer = (handle.turn - 1) % buffers
            if self.device == "cpu":
                whats = ("empty", *(reads or ()))
                whats = whats if what in whats else (what,)
                outcome, claims = self._cpu_call(
                    handle, buffer, whats.index(what) * buffers + buffer, whats, limit_s, stay
                )
                failed = outcome.us is None
            else:
                outcome, reply = self._gpu_call(handle, buffer, buffers, what, limit_s, audit)
                failed, claims = reply is None, reply and reply.claims
            if failed:
                return self._break(handle, outcome) if first else self._lose(handle, outcome)
        except Died as died:
            outcome = Outcome(died.status, self._own_paths(handle, died.reason))
            return self._break(handle, outcome) if first else self._lose(handle, outcome)
        outcome.bytes = self._content["bytes"]
        if handle.submission is None:
            return outcome
        if outcome.status == "PASSED":
            said = None if claims is None else [claim.model_dump() for claim in claims]
            verdict = self._ask(
                {"op": "judge", "runner": handle.name, "buffer": buffer, "claims": said, "baseline": handle.baseline}
            )
            outcome.status, outcome.reason, outcome.error = verdict["status"], verdict["reason"], verdict["error"]
        if self.device == "cuda":
            if found := self._tampered(handle):
                outcome.status, outcome.reason = found.status, found.reason
            elif audit and outcome.status == "PASSED":
                self._look(handle, reply, outcome)
        if size and outcome.status == "PASSED" and (fault := self._kept(handle, size)):
            outcome.status, outcome.reason = fault.status, fault.reason
        return outcome

    def _cpu_call(
        self, handle: RunnerHandle, buffer: int, which: int, whats: tuple[str, ...], limit_s: float, stay: bool
    ) -> tuple[Outcome, list[replies.Claim] | None]:
        """One call on a CPU: the runner waits, the checker does the rest. -> (outcome, without a time if it failed;
        what the runner says of the tensors that came back, None if it was not asked).

        which: of the calls that the runner prepares, one for each of `whats` and each buffer.
        """
        child, judges = handle.child, handle.submission is None
        stay = stay and not handle.baseline  # a baseline's setup is made for each call
        nbytes = self._bytes_of_call() if judges else 0
        within = (whats, nbytes)
        address = {"runner": handle.name, "buffer": buffer}
        if handle.within not in (None, within) and (failed := self._leave(handle)):
            return failed, None
        # A baseline's setup sees the contents, and is no adversary; for any other they come when it is stopped.
        if handle.baseline:
            self._ask({"op": "fill", "key": None, **address})
        handle.number += 1
        first = handle.within is None
        if first:
            message = {"op": "call", "number": handle.number, "buffer": buffer, "whats": whats, "bytes": nbytes}
            child.send(message | {"baseline": handle.baseline})
            ready = replies.read(replies.Ready, child.receive(limit_s)[0])
            if isinstance(ready, replies.Failed):
                return self._failure(handle, ready), None
        found = self._turn(handle, {
            "op": "turn", "number": handle.number, "which": which, "first": first, "last": not stay,
            "fill": not handle.baseline, "judges": judges, "limit_s": limit_s, "key": None,
            "baseline": handle.baseline, "bytes": nbytes, **address,
        })  # fmt: skip
        child.stopped()
        if not found.pop("waiting"):
            raise Died("RUNTIME_ERROR", 'its process said that it was ready and did not wait for the "go"')
        if found["code"] == freezer.RUNS_ON:
            raise Died("RUNTIME_ERROR", "its processes could not be stopped when its call was over")
        before, after, said = found.pop("before"), found.pop("after"), found.pop("said")
        reading = gate.Reading(**found)
        if reading.code == freezer.LATE:
            child.kill()
            raise Died("TIMEOUT", f"no answer within {limit_s:g} s; it and all it had started were killed")
        handle.within, claims = within, None
        if not stay or reading.raised:
            if isinstance(reply := self._left(handle), replies.Failed):
                return self._failure(handle, reply), None
            if reading.raised:
                raise Died("RUNTIME_ERROR", "its process said that the call had raised, and then that it was well")
            claims = reply.claims if first or not self.problem.own else None
        elif not self.problem.own and not judges:
            claims = replies.noted(said)
        outcome = of.of_cpu(reading)
        if reading.changed < 0:
            outcome.status, outcome.reason = "INCORRECT", "the memory of a tensor that was returned cannot be read"
        elif reading.changed:
            outcome.status = "CHEAT_SUSPECTED"
            outcome.reason = (
                f"outputs were written after the call had ended: of at most {gate.WORDS} words that were looked at, "
                f"{reading.changed} changed later"
            )
        elif not judges and not handle.baseline and handle.strays & set(before) and (left := self.look(handle)):
            outcome.status, outcome.reason = left.status, left.reason
        handle.strays = frozenset(after)
        return outcome, claims

    def _leave(self, handle: RunnerHandle) -> Outcome | None:
        """Have a runner on a CPU that waits for a further call reply to the last one. -> what went wrong in it."""
        if handle.within is None:
            return None
        self._ask({"op": "leave", "runner": handle.name, "number": handle.number})
        reply = self._left(handle)
        return self._failure(handle, reply) if isinstance(reply, replies.Failed) else None

    def _left(self, handle: RunnerHandle) -> replies.Called | replies.Failed:
        """The reply of a runner on a CPU that makes no further call."""
        handle.within = None
        handle.child.resume()
        reply = replies.read(replies.Called, handle.child.receive(self.call_limit_s)[0])
        handle.child.rest()
        if isinstance(reply, replies.Called):
            self._note_switches(handle, reply.switches)
        return reply

    def _turn(self, handle: RunnerHandle, message: dict) -> dict:
        """The checker's part of a call on a CPU. Died: the runner is gone, or took too much."""
        child = handle.child
        try:
            self._checker.send(message)
            found, _ = self._checker.receive(message["limit_s"] + CHECKER_LIMIT_S, watch=child)
        except Died as died:
            raise ProblemError(f"the checker of {self.problem.name} {died.reason}") from None
        if child.excess:
            raise Died("RUNTIME_ERROR", child.excess)
        if "failed" in found:
            raise ProblemError(f"{self.problem.name}'s own code failed:\n{found['text']}")
        if found["code"] == freezer.GONE:
            child.receive(CANARY_LIMIT_S)  # raises what became of it
            raise Died("RUNTIME_ERROR", "its process was gone when its call should have been over")
        return found

    def _gpu_call(
        self, handle: RunnerHandle, buffer: int, buffers: int, what: str, limit_s: float, audit: bool
    ) -> tuple[Outcome, replies.Timed | None]:
        """One call on a GPU, timed in the runner. -> (outcome, reply; None if it failed)."""
        address = {"runner": handle.name, "buffer": buffer}
        # What a runner may not read yet lies in its buffer masked: the key comes with the call.
        masked = self._content["sizes"]["device"] and what != "empty"
        key = secrets.token_hex(32) if masked else None
        if handle.submission is not None:
            self._ask({"op": "fill", "key": key, **address})
            # The checker's kernels have driven out the submission's code: it is called once on the buffer before, whose
            # call is closed.
            if masked and buffers > 1 and handle.turn > 1:
                request = {"op": "warm", "buffer": (handle.turn - 2) % buffers, "baseline": handle.baseline}
                warmed = replies.read(replies.Done, handle.child.request(request, limit_s)[0])
                if isinstance(warmed, replies.Failed):
                    return self._failure(handle, warmed), None
        message = {
            "op": "call", "buffer": buffer, "key": key, "spin_us": handle.spin_us, "what": what,
            "baseline": handle.baseline, "audit": audit, "bytes": 0 if handle.submission else self._bytes_of_call(),
        }  # fmt: skip
        said, ready_us, outside_us = self._timed(handle, message, limit_s)
        reply = replies.read(replies.Timed, said)
        if isinstance(reply, replies.Failed):
            # A CUDA context is not to be trusted after a failed call, nor is anything else in there.
            return self._failure(handle, reply), None
        outcome = of.of_gpu(reply, ready_us, outside_us - handle.spin_us)
        if not handle.baseline:
            outcome.setup_us = None  # only baselines have a setup that is not timed
        # A first call compiles; it must not make every later spin last for seconds.
        handle.spin_us = max(min(2 * outcome.host_us, FIRST_SPIN_US) + SPIN_MARGIN_US, 0.9 * handle.spin_us)
        if handle.submission is None:
            handle.audit.records += of.elsewhere_in(reply.activity)[0]
        return outcome, reply

    def _bytes_of_call(self) -> int:
        """Bytes that the judge's own readers read: what a call moves."""
        return self._content["bytes"] or self._case.bytes or self.default_bytes()

    def _note_switches(self, handle: RunnerHandle, changed: list[str]) -> None:
        """Say once of a submission that global settings of torch, which it had changed, were put back."""
        name = handle.submission.name if handle.submission else handle.name
        if changed and name not in self._switched:
            self._switched.add(name)
            self.notes.append(f"{name} changed torch's {'; '.join(changed[:SWITCHES_SHOWN])}: put back")
            self.say(self.notes[-1])

    def baseline(self, handle: RunnerHandle) -> None:
        """From here on what a submission keeps is counted: it was called before, so its code is loaded. One that is
        lost meanwhile is not run again: of its next process nothing would be counted.
        """
        if not self._split or not handle.submission or handle.baseline or handle.child is None:
            return
        if size := self.measure(handle):
            handle.host_base, handle.device_grown = size[1], 0
        else:
            self._break(handle, handle.last_loss)

    def look(self, handle: RunnerHandle) -> Outcome | None:
        """Whether a process that a submission started lives on, now that its call is over. It gets a moment to end."""
        if handle.child is None or handle.baseline:
            return None
        for _ in range(SETTLES):
            handle.child.rest()
            if not (left := handle.child.processes()):
                return None
            handle.child.resume()
            time.sleep(SETTLE_S)
        handle.child.rest()
        return Outcome(
            "CHEAT_SUSPECTED",
            f"still running after the call: child processes {left}; end all that a call starts before it returns "
            "(docs/rules.md, rule 4)",
        )

    def measure(self, handle: RunnerHandle) -> tuple[int, int] | None:
        """(bytes of device memory free, bytes of host memory and files that the submission takes); None if it is
        gone.
        """
        if handle.child is None or handle.workdir is None:
            return None
        try:
            if failed := self._leave(handle):
                self._lose(handle, failed)
                return None
            reply = replies.read(replies.Done, handle.child.request({"op": "trim"}, self.call_limit_s)[0])
        except Died as died:
            self._lose(handle, Outcome(died.status, died.reason))
            return None
        if isinstance(reply, replies.Failed):
            self._lose(handle, self._failure(handle, reply))
            return None
        free = self._ask({"op": "free_memory"})["free"] or 0
        return free, handle.child.private_bytes() + handle.workdir.bytes_written()

    def ask_runner(
        self, handle: RunnerHandle, message: dict, limit_s: float, buffers: int = 0
    ) -> replies.Compiled | replies.Profiled | Outcome:
        """A request beside calls ("compile", "profile"). -> the reply, or the failure."""
        wanted = {"compile": replies.Compiled, "profile": replies.Profiled}[message["op"]]
        if handle.child is None:
            self.start(handle, compile_only=message["op"] == "compile")
            if handle.child is None:
                return handle.broken or handle.last_loss
        try:
            if buffers:
                if fault := self._open(handle, buffers, None) or self._hold(handle):
                    return self._lose(handle, fault)
                key = secrets.token_hex(32) if self.device == "cuda" and self._content["sizes"]["device"] else None
                self._ask({"op": "fill", "runner": handle.name, "buffer": 0, "key": key})
                message = {**message, "key": key}
            reply = replies.read(wanted, handle.child.request(message, limit_s)[0])
        except Died as died:
            return self._lose(handle, Outcome(died.status, self._own_paths(handle, died.reason)))
        if isinstance(reply, replies.Failed):
            return self._lose(handle, self._failure(handle, reply))
        handle.keep = message["op"] == "compile"
        return reply

    def default_bytes(self) -> int:
        """Bytes of the present content, for a folder that does not say what a call must move."""
        return sum(self._content["sizes"].values())

    def build(self, *handles: RunnerHandle) -> None:
        """The compile step of those that had none (harness/judge/compiling.py). One that fails is `broken`."""
        todo = compiling.todo(self.problem, handles)
        self.start(*(helper for how, _, helper in todo if how == "compile_for"), compile_only=True)
        for how, handle, helper in todo:
            if how == "compile_for":
                message = {"op": "compile", "target": handle.target}
                result = self.ask_runner(helper, message, 2 * COMPILE_LIMIT_S)
                handle.broken = result if isinstance(result, Outcome) else None
            else:
                self._try_out(helper)
            self.stop(helper)

    def _try_out(self, helper: RunnerHandle) -> None:
        """Compile by calling, on every shape: for what compiles when it sees its arguments."""
        for case in filter(helper.submission.serves, (*self.problem.tests, *self.problem.benchmarks[self.device])):
            self.weights(case, case.seed)
            self.content(case, case.seed)
            self.call(helper, 1)
            if helper.lost:
                return  # its verdict is found in the run itself
        helper.keep = True

    def _timed(self, handle: RunnerHandle, message: dict, limit_s: float) -> tuple[dict, float, float]:
        """A call on a GPU. -> (reply, us until it was ready, us from "go" to the reply), on the parent's own clock."""
        deadline = time.monotonic() + limit_s
        child = handle.child
        start = time.perf_counter_ns()
        reply, _ = child.request(message, limit_s)
        ready = time.perf_counter_ns()
        if "ready" not in reply:
            return reply, math.nan, math.nan
        child.send({"go": True})
        reply, _ = child.receive(max(0.1, deadline - time.monotonic()))
        return reply, (ready - start) / 1e3, (time.perf_counter_ns() - ready) / 1e3

    def _tampered(self, handle: RunnerHandle) -> Outcome | None:
        """Peers are not looked at: the packages that they call may patch what they like."""
        if handle.baseline or self.device == "cpu":
            return None
        try:
            reply = replies.read(replies.Sealed, handle.child.request({"op": "sealed"}, self.call_limit_s)[0])
        except Died as died:
            return self._lose(handle, Outcome(died.status, self._own_paths(handle, died.reason)))
        if isinstance(reply, replies.Failed):
            return self._lose(handle, self._failure(handle, reply))
        self._note_switches(handle, reply.switches)
        return of.tampering_in(reply.replaced)

    def _look(self, handle: RunnerHandle, reply: replies.Timed, outcome: Outcome) -> None:
        """An audited call on a GPU: what ran elsewhere, and which processes still live."""
        handle.audit.calls += 1
        records, elsewhere = of.elsewhere_in(reply.activity)
        handle.audit.records += records
        if self.device == "cuda" and not records and not handle.baseline and self._records_are_given():
            outcome.status = "CHEAT_SUSPECTED"
            outcome.reason = "tampering: of its audited call the driver gave no record, of the judge's own it does"
            return
        if elsewhere and not handle.baseline:
            outcome.status = "RULE_BROKEN"
            outcome.reason = f"work ran on another queue than the default one: {elsewhere}"
            return
        if found := self.look(handle):
            outcome.status, outcome.reason = found.status, found.reason

    def _records_are_given(self) -> bool:
        """Whether the driver says what ran where, seen by an empty call of the judge in a process of its own."""
        if self._records is None:
            own = RunnerHandle("(judge) records", None, self.device)
            self.start(own)
            self.call(own, 1, "empty", audit=True)
            self.stop(own)
            self._records = own.audit.records > 0
            if not self._records:
                self.notes.append("the driver gives no records: on which queue work ran is not known")
        return self._records

    def _open(self, handle: RunnerHandle, buffers: int, reads: dict[str, int] | None) -> Outcome | None:
        """Give a submission buffers for the present content. -> what went wrong in its call before, which it
        leaves.
        """
        wanted = (self._content["sizes"], self._content["open"], buffers)
        if handle.opened == wanted:
            return None
        if failed := self._leave(handle):
            return failed
        request = {"op": "allocate", "runner": handle.name, "sizes": self._content["sizes"], "count": buffers}
        if self.device == "cpu":
            request |= handle.child.freezer.address()
        made, fds = self._checker.request(request, CHECKER_LIMIT_S)
        if "failed" in made:
            raise ProblemError(f"the checker could not allocate buffers:\n{made['text']}")
        message = {"op": "open", "buffers": made["buffers"], **self._content["open"]}
        if reads is not None:
            message["reads"] = reads
        self._hand_over(handle, message, fds, "map its buffers", replies.Done)
        handle.opened, handle.turn = wanted, 0
        return None

    def _hold(self, handle: RunnerHandle) -> Outcome | None:
        """Give a submission the present weights, to prepare if it likes. -> what is wrong with what it kept, if it
        is.
        """
        if not self._split or handle.submission is None or handle.holds == self._weights:
            return None
        if failed := self._leave(handle):
            return failed
        # Before the checker lets go of the weights before: their memory is free then, or when the runner unmaps it.
        size = self.measure(handle) if handle.host_base is not None else None
        if handle.child is None:
            return handle.last_loss
        made, fds = self._checker.request({"op": "hold", "runner": handle.name}, CHECKER_LIMIT_S)
        if "failed" in made:
            raise ProblemError(f"the checker could not allocate weights:\n{made['text']}")
        message = {"op": "hold", "buffer": made["buffer"], "spec": made["spec"]}
        before = time.perf_counter()
        try:
            reply = self._hand_over(handle, message, fds, "prepare the weights", replies.Prepared, PREPARE_LIMIT_S)
        except Died as died:
            raise Died(died.status, f"in prepare: {died.reason}") from None
        took_us = (time.perf_counter() - before) * 1e6
        if size:  # what would be free if nothing but the judge's own weights had changed
            size = size[0] + handle.held_device - made["buffer"]["sizes"]["device"], size[1]
        handle.holds, handle.held_device = self._weights, made["buffer"]["sizes"]["device"]
        self._weights_bytes = made["bytes"]
        if found := self._tampered(handle):
            return found
        if reply.prepared:
            handle.audit.prepare_us = took_us
        return self._kept(handle, size) if size else None

    def _kept(self, handle: RunnerHandle, before: tuple[int, int]) -> Outcome | None:
        """Add what a request left behind, measured `before` it; whether the submission now keeps more than it may."""
        after = self.measure(handle)
        if after is None:
            return handle.last_loss
        handle.device_grown += before[0] - after[0]
        grown = max(0, handle.device_grown) + max(0, after[1] - handle.host_base)
        handle.audit.kept_bytes = max(grown, handle.audit.kept_bytes or 0)
        slack = PREPARED_SLACK + CODE_SLACK[self.device]
        allowed = int(PREPARED_FACTOR * self._weights_bytes) + slack
        if grown <= allowed:
            return None
        return Outcome(
            "RULE_BROKEN",
            f"prepare: {grown / 2**20:.0f} MiB more are held than before, {allowed / 2**20:.0f} MiB are allowed "
            f"({PREPARED_FACTOR} x the weights and {slack // 2**20} MiB)",
        )

    def _hand_over(
        self, handle: RunnerHandle, message: dict, fds: list[int], what: str, wanted: type[replies.Wanted],
        limit_s: float = 0.0,
    ) -> replies.Wanted:  # fmt: skip
        """Send descriptors, which are taken. Died: it could not use them."""
        try:
            said, _ = handle.child.request(message, limit_s or self.call_limit_s + COMPILE_LIMIT_S, tuple(fds))
        finally:
            for fd in fds:
                os.close(fd)
        reply = replies.read(wanted, said)
        if isinstance(reply, replies.Failed):
            raise Died("RUNTIME_ERROR", f"could not {what}: {reply.text}")
        return reply

    def _break(self, handle: RunnerHandle, outcome: Outcome) -> Outcome:
        """As _lose; the submission is not started again in this run."""
        handle.broken = Outcome(outcome.status, f"not run again: {outcome.reason}")
        self._breaks[handle.submission.name if handle.submission else handle.name] = handle.broken
        return self._lose(handle, outcome)

    def _lose(self, handle: RunnerHandle, outcome: Outcome) -> Outcome:
        if handle.child is None:  # lost already, while it was measured
            return outcome
        handle.child.kill()
        handle.child, handle.last_loss = None, outcome
        handle.lost += 1
        self._remove(handle)
        self._ask({"op": "release", "runner": handle.name})
        if self.device == "cuda" and not self._answers():
            raise DeviceError(f"the device does not compute any more since {handle.name} was lost: {outcome.reason}")
        return outcome

    def _answers(self) -> bool:
        """Whether the device still computes, in the checker's context."""
        try:
            return self._checker.request({"op": "canary"}, CANARY_LIMIT_S)[0].get("well") is True
        except Died:
            return False

    def _remove(self, handle: RunnerHandle) -> None:
        if handle.workdir:
            handle.workdir.remove()
            handle.workdir = None

    def _ask(self, message: dict) -> dict:
        try:
            reply, _ = self._checker.request(message, CHECKER_LIMIT_S)
        except Died as died:
            raise ProblemError(f"the checker of {self.problem.name} {died.reason}") from None
        if "failed" in reply:
            raise ProblemError(f"{self.problem.name}'s own code failed:\n{reply['text']}")
        return reply

    def _failure(self, handle: RunnerHandle, reply: replies.Failed) -> Outcome:
        said = self._own_paths(handle, reply.text.strip())
        if reply.failed == "compile":
            return Outcome("COMPILE_ERROR", said)
        return Outcome("RUNTIME_ERROR", f"out of memory: {said}" if reply.memory else said)

    @staticmethod
    def _own_paths(handle: RunnerHandle, text: str) -> str:
        return handle.workdir.restore(text) if handle.workdir else text
