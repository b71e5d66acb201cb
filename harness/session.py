"""One checker and the runners it feeds: start, hand over one call, take the verdict. All limits live here.

The parent decides; a runner only says what happened in it, and is believed in nothing but its time, and in that only
as far as the parent's own clock and what /proc says of its process do not contradict.
"""

import contextlib
import math
import os
import secrets
import time
from concurrent.futures import ThreadPoolExecutor

from harness import compiling, flush, private, process, sandbox
from harness.entrant import FIRST_SPIN_US, Entrant, Outcome, elsewhere_in, outcome_of, tampering_in
from harness.private import Private
from harness.problem import Case, Problem
from harness.process import Child, Died

IMPORT_LIMIT_S = 120  # importing torch and the submission
COMPILE_LIMIT_S = 120  # the first call of a process, which may compile; and compile checks, per artefact set
PREPARE_LIMIT_S = 60
CALL_LIMIT_S = 30
CHECKER_LIMIT_S = 600  # a reference is slow on purpose
CANARY_LIMIT_S = 60  # for the device to answer after a runner was lost; the kernel ends a hung one by then
CLOSED_AT_ONCE = 16  # processes
GIVE_UP_AFTER = 3  # processes that an entrant may lose in one phase
SETTLE_S = 0.02  # threads that still run so long after a call are at work
SETTLES = 4  # more such looks before a thread counts as at work
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
        self.entrants: list[Entrant] = []
        self.clock_name = ""
        self.sandbox = sandbox.probe()
        self.notes: list[str] = []  # for the record
        self._records: bool | None = None  # whether the driver says what ran where; None: not known yet
        self._content: dict = {}
        self._case: Case | None = None
        self._split = False
        self._weights = 0  # number of the present weights
        self._weights_bytes = 0
        process.harden()
        self._checker = Child("harness.checker")
        utils = str(problem.utils) if problem.utils else None
        self._ask({"folder": str(problem.folder), "own": problem.own, "device": device, "utils": utils})

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        for entrant in self.entrants:
            if entrant.child:
                entrant.child.close()
            self._remove(entrant)
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

    def start(self, *entrants: Entrant, compile_only: bool = False) -> None:
        """Start a process for each that has none, all at once. One that fails to start gets `last_loss`."""
        fresh = [entrant for entrant in entrants if entrant.child is None]
        if not compile_only:
            self.build(*fresh)
            fresh = [entrant for entrant in fresh if not entrant.broken]
        for entrant in fresh:
            arch = {"CUTE_DSL_ARCH": ARCH[entrant.target]} if entrant.target in ARCH else {}
            entrant.opened, entrant.last_loss, entrant.calls = None, None, 0
            entrant.holds = entrant.held_device = 0
            entrant.spin_us, entrant.host_base, entrant.device_grown = FIRST_SPIN_US, None, 0
            entry = entrant.entry
            if entry is None:
                entrant.child = Child("harness.runner", arch)  # the judge's own calls
                file, folder, utils = None, self.problem.folder, self.problem.utils
            else:
                built = private.build_folder(entry.file, self.problem, entrant.target)
                box = entrant.private = Private.make(entry.file, self.problem, built, self.device)
                entrant.child = Child("harness.runner", arch, box.jail)
                file, folder, utils = str(box.file), box.folder, box.utils
            message = {
                "device": "cpu" if compile_only else self.device, "folder": str(folder), "file": file,
                "utils": str(utils) if utils else None, "compile": compile_only,
            }  # fmt: skip
            fds = () if compile_only or self.device == "cuda" else (flush.file(),)
            if fds:
                entrant.child.lend(flush.nbytes())
            with contextlib.suppress(Died):  # a process that is gone already says so when it is waited for
                entrant.child.send(message, fds)
            if entrant not in self.entrants:
                self.entrants.append(entrant)
        for entrant in fresh:
            try:
                reply, _ = entrant.child.receive(IMPORT_LIMIT_S)
            except Died as died:
                self._lose(entrant, Outcome(died.status, f"on import: {died.reason}"))
                continue
            if "failed" in reply:
                self._lose(entrant, self._failure(entrant, reply))
            elif not entrant.peer and (found := tampering_in(reply)):
                self._lose(entrant, found)
            elif not compile_only:
                self.clock_name = str(reply.get("clock"))

    def stop(self, *entrants: Entrant) -> None:
        living = [entrant for entrant in entrants if entrant.child]
        with ThreadPoolExecutor(CLOSED_AT_ONCE) as pool:  # each takes a fifth of a second to go, and no processor
            list(pool.map(lambda entrant: entrant.child.close(), living))
        for entrant in living:
            entrant.child = None
            self._ask({"op": "release", "runner": entrant.name})
            if entrant.keep and (why := compiling.keep(self.problem, entrant)):
                self.notes.append(why)
        for entrant in entrants:
            self._remove(entrant)

    def call(
        self, entrant: Entrant, slots: int, what: str = "", reads: dict[str, int] | None = None,
        within_s: float = math.inf, audit: bool = False, measure: bool = False,
    ) -> Outcome:  # fmt: skip
        """One call of `entrant` on the present content; `what` names one of the judge's own calls. UNSUPPORTED, and
        nothing is sent, where the content is of a case that a peer says it does not serve.

        within_s: a limit beside those of the session, for a phase whose time is running out. audit: look at what ran
        on which queue of the GPU meanwhile, and at what still runs afterwards; the time is then no score. measure:
        what the call leaves behind in memory counts towards what prepare may keep, where the problem has weights.
        """
        if entrant.entry and not entrant.entry.serves(self._case):
            return Outcome("UNSUPPORTED", entrant.entry.limits)
        if entrant.broken:
            return entrant.broken
        if entrant.child is None:
            if entrant.lost >= GIVE_UP_AFTER:
                lost = entrant.last_loss
                return Outcome(lost.status, f"not run, {entrant.lost} processes were lost before: {lost.reason}")
            self.start(entrant)
            if entrant.child is None:
                return entrant.last_loss
        try:
            self._open(entrant, slots, reads)
            if fault := self._hold(entrant):
                return self._lose(entrant, fault)
            size = self.measure(entrant) if measure and entrant.host_base is not None else None
            if entrant.child is None:
                return entrant.last_loss
            slot, before = entrant.turn % slots, (entrant.turn - 1) % slots
            address = {"runner": entrant.name, "slot": slot}
            # What a runner may not read yet lies in its slot masked: the key comes with the call. On a CPU nothing of
            # the submission runs between the filling and the call, which the look at its threads holds it to.
            masked = self.device == "cuda" and self._content["sizes"]["device"] and what != "empty"
            key = secrets.token_hex(32) if masked else None
            limit = min(self.call_limit_s if entrant.calls else self.first_call_limit_s, within_s)
            if entrant.entry is not None:
                self._ask({"op": "fill", "key": key, **address})
                # The checker's kernels have driven out the submission's code: it is called once on the slot before,
                # whose call is closed.
                if masked and slots > 1 and entrant.turn > 0:
                    reply, _ = entrant.child.request({"op": "warm", "slot": before, "peer": entrant.peer}, limit)
                    if "failed" in reply:
                        return self._lose(entrant, self._failure(entrant, reply))
            entrant.turn += 1
            entrant.calls += 1
            spin_us = entrant.spin_us if self.device == "cuda" else 0.0
            message = {
                "op": "call", "slot": slot, "key": key, "spin_us": spin_us, "what": what, "peer": entrant.peer,
                "audit": audit,
            }  # fmt: skip
            if entrant.entry is None:
                message["bytes"] = self._content["bytes"] or self._case.bytes or self.default_bytes()
            reply, ready_us, outside_us = self._timed(entrant, message, limit)
            if "failed" in reply:
                # A CUDA context is not to be trusted after a failed call, nor is anything else in there.
                return self._lose(entrant, self._failure(entrant, reply))
            outcome = outcome_of(reply, ready_us, outside_us - spin_us)
            outcome.bytes = self._content["bytes"]
        except Died as died:
            return self._lose(entrant, Outcome(died.status, self._own_paths(entrant, died.reason)))
        # A first call compiles; it must not make every later spin last for seconds.
        entrant.spin_us = max(min(2 * outcome.host_us, FIRST_SPIN_US) + SPIN_MARGIN_US, 0.9 * entrant.spin_us)
        if entrant.entry is None:
            entrant.audit.records += elsewhere_in(reply)[0]
            return outcome
        verdict = self._ask({"op": "judge", **address, "claims": list(reply["claims"]), "peer": entrant.peer})
        outcome.status, outcome.reason, outcome.error = verdict["status"], verdict["reason"], verdict["error"]
        if found := self._tampered(entrant):
            outcome.status, outcome.reason = found.status, found.reason
        elif audit and outcome.status == "PASSED":
            self._look(entrant, reply, outcome)
        if size and outcome.status == "PASSED" and (fault := self._kept(entrant, size)):
            outcome.status, outcome.reason = fault.status, fault.reason
        return outcome

    def baseline(self, entrant: Entrant) -> None:
        """From here on what an entrant keeps is counted: it was called before, so its code is loaded."""
        if self._split and entrant.entry and not entrant.peer and (size := self.measure(entrant)):
            entrant.host_base, entrant.device_grown = size[1], 0

    def look(self, entrant: Entrant) -> Outcome | None:
        """Whether anything of an entrant still runs, or lives, that should not, now that its call is over."""
        if entrant.child is None or entrant.peer:
            return None
        seen = entrant.child.audit(SETTLE_S)
        for _ in range(SETTLES):
            if not (seen.running or seen.main_running):
                break
            # On a busy machine a pool's thread may learn only now that the work is done; one at work stays at work.
            seen = entrant.child.audit(SETTLE_S)
        entrant.audit.threads = max(entrant.audit.threads, seen.threads)
        if seen.running or seen.main_running:
            count = len(seen.running) + seen.main_running
            return Outcome("CHEAT_SUSPECTED", f"{count} of its threads still running after the call")
        if seen.processes:
            return Outcome("CHEAT_SUSPECTED", f"still running after the call: child processes {list(seen.processes)}")
        return None

    def measure(self, entrant: Entrant) -> tuple[int, int] | None:
        """(bytes of device memory free, bytes of host memory and files that the entrant takes); None if it is gone."""
        if entrant.child is None or entrant.private is None:
            return None
        try:
            entrant.child.request({"op": "trim"}, self.call_limit_s)
        except Died as died:
            self._lose(entrant, Outcome(died.status, died.reason))
            return None
        free = self._ask({"op": "free_memory"})["free"] or 0
        return free, entrant.child.private_bytes() + entrant.private.bytes_written()

    def ask_runner(self, entrant: Entrant, message: dict, limit_s: float, slots: int = 0) -> dict | Outcome:
        """A request beside calls ("compile", "profile"). -> the reply, or the failure."""
        if entrant.child is None:
            self.start(entrant, compile_only=message["op"] == "compile")
            if entrant.child is None:
                return entrant.last_loss
        try:
            if slots:
                self._open(entrant, slots, None)
                if fault := self._hold(entrant):
                    return self._lose(entrant, fault)
                key = secrets.token_hex(32) if self.device == "cuda" and self._content["sizes"]["device"] else None
                self._ask({"op": "fill", "runner": entrant.name, "slot": 0, "key": key})
                message = {**message, "key": key}
            reply, _ = entrant.child.request(message, limit_s)
        except Died as died:
            return self._lose(entrant, Outcome(died.status, self._own_paths(entrant, died.reason)))
        if "failed" in reply:
            return self._lose(entrant, self._failure(entrant, reply))
        entrant.keep = message["op"] == "compile"
        return reply

    def default_bytes(self) -> int:
        """Bytes of the present content, for a folder that does not say what a call must move."""
        return sum(self._content["sizes"].values())

    def build(self, *entrants: Entrant) -> None:
        """The compile step of those that had none (harness/compiling.py). One that fails is `broken`."""
        todo = compiling.todo(self.problem, entrants)
        self.start(*(helper for how, _, helper in todo if how == "compile_for"), compile_only=True)
        for how, entrant, helper in todo:
            if how == "compile_for":
                message = {"op": "compile", "target": entrant.target}
                result = self.ask_runner(helper, message, 2 * COMPILE_LIMIT_S)
                entrant.broken = result if isinstance(result, Outcome) else None
            else:
                self._try_out(helper)
            self.stop(helper)

    def _try_out(self, helper: Entrant) -> None:
        """Compile by calling, on every shape: for what compiles when it sees its arguments."""
        for case in filter(helper.entry.serves, (*self.problem.tests, *self.problem.benchmarks[self.device])):
            self.weights(case, case.seed)
            self.content(case, case.seed)
            self.call(helper, 1)
            if helper.lost:
                return  # its verdict is found in the run itself
        helper.keep = True

    def _timed(self, entrant: Entrant, message: dict, limit_s: float) -> tuple[dict, float, float]:
        """A call. -> (reply, us until it was ready, us from "go" to the reply), on the parent's own clock."""
        deadline = time.monotonic() + limit_s
        child = entrant.child
        start = time.perf_counter_ns()
        reply, _ = child.request(message, limit_s)
        ready = time.perf_counter_ns()
        if "ready" not in reply:
            return reply, math.nan, math.nan
        child.send({"go": True})
        reply, _ = child.receive(max(0.1, deadline - time.monotonic()))
        return reply, (ready - start) / 1e3, (time.perf_counter_ns() - ready) / 1e3

    def _tampered(self, entrant: Entrant) -> Outcome | None:
        """Peers are not looked at: the packages that they call may patch what they like."""
        if entrant.peer:
            return None
        try:
            return tampering_in(entrant.child.request({"op": "sealed"}, self.call_limit_s)[0])
        except Died as died:
            return self._lose(entrant, Outcome(died.status, self._own_paths(entrant, died.reason)))

    def _look(self, entrant: Entrant, reply: dict, outcome: Outcome) -> None:
        """An audited call: what ran elsewhere, and what still runs."""
        entrant.audit.calls += 1
        records, elsewhere = elsewhere_in(reply)
        entrant.audit.records += records
        if self.device == "cuda" and not records and not entrant.peer and self._records_are_given():
            outcome.status = "CHEAT_SUSPECTED"
            outcome.reason = "tampering: of its audited call the driver gave no record, of the judge's own it does"
            return
        if elsewhere and not entrant.peer:
            outcome.status = "RULE_BROKEN"
            outcome.reason = f"work ran on another queue than the default one: {elsewhere}"
            return
        if found := self.look(entrant):
            outcome.status, outcome.reason = found.status, found.reason

    def _records_are_given(self) -> bool:
        """Whether the driver says what ran where, seen by an empty call of the judge in a process of its own."""
        if self._records is None:
            own = Entrant("(judge) records", None, self.device)
            self.start(own)
            self.call(own, 1, "empty", audit=True)
            self.stop(own)
            self._records = own.audit.records > 0
            if not self._records:
                self.notes.append("the driver gives no records: on which queue work ran is not known")
        return self._records

    def _open(self, entrant: Entrant, slots: int, reads: dict[str, int] | None) -> None:
        wanted = (self._content["sizes"], self._content["open"], slots)
        if entrant.opened == wanted:
            return
        made, fds = self._checker.request(
            {"op": "allocate", "runner": entrant.name, "sizes": self._content["sizes"], "count": slots}, CHECKER_LIMIT_S
        )
        if "failed" in made:
            raise ProblemError(f"the checker could not allocate slots:\n{made['text']}")
        message = {"op": "open", "slots": made["slots"], **self._content["open"]}
        if reads is not None:
            message["reads"] = reads
        self._hand_over(entrant, message, fds, "map its slots")
        entrant.opened, entrant.turn = wanted, 0

    def _hold(self, entrant: Entrant) -> Outcome | None:
        """Give an entrant the present weights, to prepare if it likes. -> what is wrong with what it kept, if it is."""
        if not self._split or entrant.entry is None or entrant.holds == self._weights:
            return None
        # Before the checker lets go of the weights before: their memory is free then, or when the runner unmaps it.
        size = self.measure(entrant) if entrant.host_base is not None else None
        if entrant.child is None:
            return entrant.last_loss
        made, fds = self._checker.request({"op": "hold", "runner": entrant.name}, CHECKER_LIMIT_S)
        if "failed" in made:
            raise ProblemError(f"the checker could not allocate weights:\n{made['text']}")
        message = {"op": "hold", "slot": made["slot"], "spec": made["spec"]}
        try:
            reply = self._hand_over(entrant, message, fds, "prepare the weights", PREPARE_LIMIT_S)
        except Died as died:
            raise Died(died.status, f"in prepare: {died.reason}") from None
        if size:  # what would be free if nothing but the judge's own weights had changed
            size = size[0] + entrant.held_device - made["slot"]["sizes"]["device"], size[1]
        entrant.holds, entrant.held_device = self._weights, made["slot"]["sizes"]["device"]
        self._weights_bytes = made["bytes"]
        if found := self._tampered(entrant):
            return found
        if reply.get("prepare_us") is not None:
            entrant.audit.prepare_us = float(reply["prepare_us"])
        return self._kept(entrant, size) if size else None

    def _kept(self, entrant: Entrant, before: tuple[int, int]) -> Outcome | None:
        """Add what a request left behind, measured `before` it; whether the entrant now keeps more than it may."""
        after = self.measure(entrant)
        if after is None:
            return entrant.last_loss
        entrant.device_grown += before[0] - after[0]
        grown = max(0, entrant.device_grown) + max(0, after[1] - entrant.host_base)
        entrant.audit.kept_bytes = max(grown, entrant.audit.kept_bytes or 0)
        slack = PREPARED_SLACK + CODE_SLACK[self.device]
        allowed = int(PREPARED_FACTOR * self._weights_bytes) + slack
        if grown <= allowed:
            return None
        return Outcome(
            "RULE_BROKEN",
            f"prepare: {grown / 2**20:.0f} MiB more are held than before, {allowed / 2**20:.0f} MiB are allowed "
            f"({PREPARED_FACTOR} x the weights and {slack // 2**20} MiB)",
        )

    def _hand_over(self, entrant: Entrant, message: dict, fds: list[int], what: str, limit_s: float = 0.0) -> dict:
        try:
            reply, _ = entrant.child.request(message, limit_s or self.call_limit_s + COMPILE_LIMIT_S, tuple(fds))
        finally:
            for fd in fds:
                os.close(fd)
        if "failed" in reply:
            raise Died("RUNTIME_ERROR", f"could not {what}: {reply.get('text')}")
        return reply

    def _lose(self, entrant: Entrant, outcome: Outcome) -> Outcome:
        if entrant.child is None:  # lost already, while it was measured
            return outcome
        entrant.child.kill()
        entrant.child, entrant.last_loss = None, outcome
        entrant.lost += 1
        self._remove(entrant)
        self._ask({"op": "release", "runner": entrant.name})
        if self.device == "cuda" and not self._answers():
            raise DeviceError(f"the device does not compute any more since {entrant.name} was lost: {outcome.reason}")
        return outcome

    def _answers(self) -> bool:
        """Whether the device still computes, in the checker's context."""
        try:
            return self._checker.request({"op": "canary"}, CANARY_LIMIT_S)[0].get("well") is True
        except Died:
            return False

    def _remove(self, entrant: Entrant) -> None:
        if entrant.private:
            entrant.private.remove()
            entrant.private = None

    def _ask(self, message: dict) -> dict:
        try:
            reply, _ = self._checker.request(message, CHECKER_LIMIT_S)
        except Died as died:
            raise ProblemError(f"the checker of {self.problem.name} {died.reason}") from None
        if "failed" in reply:
            raise ProblemError(f"{self.problem.name}'s own code failed:\n{reply['text']}")
        return reply

    def _failure(self, entrant: Entrant, reply: dict) -> Outcome:
        text = self._own_paths(entrant, str(reply.get("text", "")).strip())
        if reply["failed"] == "compile":
            return Outcome("COMPILE_ERROR", text)
        if reply.get("memory"):
            return Outcome("RUNTIME_ERROR", f"out of memory: {text}")
        return Outcome("RUNTIME_ERROR", text)

    @staticmethod
    def _own_paths(entrant: Entrant, text: str) -> str:
        return entrant.private.restore(text) if entrant.private else text
