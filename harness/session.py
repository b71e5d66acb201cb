"""One checker and the runners it feeds: start, hand over one call, take the verdict. All limits live here.

The parent decides; a runner only says what happened in it, and is believed in nothing but its time.
"""

import contextlib
import os
import secrets
from dataclasses import dataclass, field

from harness.problem import Case, Entry, Problem
from harness.process import Child, Died

IMPORT_LIMIT_S = 120  # importing torch and the submission
COMPILE_LIMIT_S = 120  # the first call of a process, which may compile; and compile checks, per artefact set
CALL_LIMIT_S = 30
CHECKER_LIMIT_S = 600  # a reference is slow on purpose
GIVE_UP_AFTER = 3  # processes that an entrant may lose in one phase
ARCH = {"sm90": "sm_90a", "sm100": "sm_100a"}


class ProblemError(RuntimeError):
    """The problem's own code failed: generator, reference or checker."""


@dataclass
class Outcome:
    """What became of one call. us and the rest are None unless the call returned."""

    status: str
    reason: str = ""
    error: dict | None = None
    us: float | None = None
    host_us: float | None = None
    untimed_us: float | None = None
    host_bound: bool = False


@dataclass
class Entrant:
    """A submission in this session, or (entry None) the judge's own calls."""

    name: str
    entry: Entry | None
    target: str
    child: Child | None = None
    lost: int = 0  # processes that died
    opened: tuple | None = None  # what its slots were allocated for
    calls: int = 0  # of the present process
    turn: int = 0  # calls on the present slots
    handles: list = field(default_factory=list)  # of the slots' device parts, given out call by call
    last_loss: Outcome | None = None
    notes: set[str] = field(default_factory=set)

    @property
    def peer(self) -> bool:
        return self.entry is not None and self.entry.peer


class Session:
    """A checker for `problem` on `device` ("cpu" or "cuda"), and runners as they are needed. A context manager."""

    def __init__(self, problem: Problem, device: str, timeout_s: float | None = None) -> None:
        self.problem, self.device = problem, device
        self.call_limit_s = timeout_s or CALL_LIMIT_S
        self.first_call_limit_s = timeout_s or COMPILE_LIMIT_S
        self.entrants: list[Entrant] = []
        self.clock_name = ""
        self._content: dict = {}
        self._case: Case | None = None
        self._checker = Child("harness.checker")
        utils = str(problem.utils) if problem.utils else None
        self._ask({"folder": str(problem.folder), "own": problem.own, "device": device, "utils": utils})

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(*self.entrants)
        self._checker.close()

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
        for entrant in fresh:
            arch = {"CUTE_DSL_ARCH": ARCH[entrant.target]} if entrant.target in ARCH else {}
            entrant.child, entrant.calls = Child("harness.runner", arch), 0
            entrant.opened = entrant.last_loss = None
            file = str(entrant.entry.file) if entrant.entry else None
            utils = str(self.problem.utils) if self.problem.utils else None
            message = {
                "device": "cpu" if compile_only else self.device, "folder": str(self.problem.folder), "file": file,
                "utils": utils, "compile": compile_only,
            }  # fmt: skip
            with contextlib.suppress(Died):  # a process that is gone already says so when it is waited for
                entrant.child.send(message)
            if entrant not in self.entrants:
                self.entrants.append(entrant)
        for entrant in fresh:
            try:
                reply, _ = entrant.child.receive(IMPORT_LIMIT_S)
            except Died as died:
                self._lose(entrant, Outcome(died.status, f"on import: {died.reason}"))
                continue
            if "failed" in reply:
                self._lose(entrant, _failure(reply))
            else:
                self.clock_name = reply["clock"]

    def stop(self, *entrants: Entrant) -> None:
        for entrant in entrants:
            if entrant.child:
                entrant.child.close()
                entrant.child = None
                self._ask({"op": "release", "runner": entrant.name})

    def call(self, entrant: Entrant, slots: int, what: str = "", reads: dict[str, int] | None = None) -> Outcome:
        """One call of `entrant` on the present content; `what` names one of the judge's own calls."""
        if entrant.child is None:
            if entrant.lost >= GIVE_UP_AFTER:
                lost = entrant.last_loss
                return Outcome(lost.status, f"not run, {entrant.lost} processes were lost before: {lost.reason}")
            self.start(entrant)
            if entrant.child is None:
                return entrant.last_loss
        try:
            self._open(entrant, slots, reads)
            slot = entrant.turn % slots
            address = {"runner": entrant.name, "slot": slot}
            # With several slots on a GPU, the runner calls once more on the slot before, whose call is closed: the
            # checker's kernels have driven out the submission's code. The new contents are out of its reach until
            # their handle comes, with the call.
            warm = self.device == "cuda" and slots > 1 and entrant.entry is not None and entrant.turn > 0
            entrant.turn += 1
            self._ask({"op": "fill", **address})
            limit = self.call_limit_s if entrant.calls else self.first_call_limit_s
            entrant.calls += 1
            reply: dict = {}
            if warm:
                reply, _ = entrant.child.request({"op": "warm", "peer": entrant.peer}, limit)
            if "failed" not in reply:
                handle = entrant.handles[slot]
                message = {"op": "call", "slot": slot, "handle": handle, "what": what, "peer": entrant.peer}
                reply, _ = entrant.child.request(message, limit)
        except Died as died:
            return self._lose(entrant, Outcome(died.status, died.reason))
        if "failed" in reply:
            # A CUDA context is not to be trusted after a failed call, nor is anything else in there.
            return self._lose(entrant, _failure(reply))
        try:
            outcome = Outcome(
                "PASSED", us=float(reply["us"]), host_us=float(reply["host_us"]), host_bound=bool(reply["host_bound"])
            )
            if entrant.entry is None:
                return outcome
            outcome.untimed_us = None if reply["untimed_us"] is None else float(reply["untimed_us"])
            claims = list(reply["claims"])
        except (KeyError, TypeError, ValueError) as error:
            return self._lose(entrant, Outcome("RUNTIME_ERROR", f"its process sent a malformed reply: {error!r}"))
        verdict = self._ask({"op": "judge", **address, "claims": claims, "peer": entrant.peer})
        outcome.status, outcome.reason, outcome.error = verdict["status"], verdict["reason"], verdict["error"]
        return outcome

    def ask_runner(self, entrant: Entrant, message: dict, limit_s: float, slots: int = 0) -> dict | Outcome:
        """A request beside calls ("compile", "profile"). -> the reply, or the failure."""
        if entrant.child is None:
            self.start(entrant, compile_only=message["op"] == "compile")
            if entrant.child is None:
                return entrant.last_loss
        try:
            if slots:
                self._open(entrant, slots, None)
                self._ask({"op": "fill", "runner": entrant.name, "slot": 0})
                message = {**message, "handle": entrant.handles[0]}
            reply, _ = entrant.child.request(message, limit_s)
        except Died as died:
            return self._lose(entrant, Outcome(died.status, died.reason))
        return self._lose(entrant, _failure(reply)) if "failed" in reply else reply

    def default_bytes(self) -> int:
        """Bytes of the present content, for a folder that does not say what a call must move."""
        return sum(self._content["sizes"].values())

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
            message |= {"reads": reads, "bytes": self._case.bytes or self.default_bytes()}
        try:
            reply, _ = entrant.child.request(message, self.call_limit_s + COMPILE_LIMIT_S, tuple(fds))
        finally:
            for fd in fds:
                os.close(fd)
        if "failed" in reply:
            raise Died("RUNTIME_ERROR", f"could not map its slots: {reply['text']}")
        entrant.opened, entrant.turn, entrant.handles = wanted, 0, made["handles"]

    def _lose(self, entrant: Entrant, outcome: Outcome) -> Outcome:
        entrant.child.kill()
        entrant.child, entrant.last_loss = None, outcome
        entrant.lost += 1
        self._ask({"op": "release", "runner": entrant.name})
        return outcome

    def _ask(self, message: dict) -> dict:
        try:
            reply, _ = self._checker.request(message, CHECKER_LIMIT_S)
        except Died as died:
            raise ProblemError(f"the checker of {self.problem.name} {died.reason}") from None
        if "failed" in reply:
            raise ProblemError(f"{self.problem.name}'s own code failed:\n{reply['text']}")
        return reply


def _failure(reply: dict) -> Outcome:
    text = str(reply.get("text", "")).strip()
    if reply["failed"] == "compile":
        return Outcome("COMPILE_ERROR", text)
    if reply.get("memory"):
        return Outcome("RUNTIME_ERROR", f"out of memory: {text}")
    return Outcome("RUNTIME_ERROR", text)
