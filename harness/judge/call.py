"""A judged call on a CPU: its request, its plan, and the function that makes it.

The judge believes nothing that the runner says: the checker's clock runs outside the runner, and the runner runs only
during a request. Calls on a GPU are recorded and replayed (harness/judge/replay.py).
"""

import math
from dataclasses import dataclass

from harness.judge import limits, outcome, replies
from harness.judge.handle import Content, RunnerHandle
from harness.judge.outcome import Findings
from harness.sandbox.process import Died

EMPTY = "empty"  # the judge's own call that works for a known time


@dataclass(frozen=True)
class CallRequest:
    """The request for one call.

    buffers: addresses that calls take in turn. judge_call: name of one of the judge's own, "" for a submission's.
    reads: plain readers of the judge by name, with their configuration. remaining_s: a limit besides those of the
    session, for a phase whose time runs out. measure: what the call leaves in memory counts towards what `prepare` may
    keep, if the problem has weights. stay: the process waits for the next call in native code, so that none of its code
    runs between the two calls, and does not say what came back.
    """

    buffers: int
    judge_call: str = ""
    reads: dict[str, int] | None = None
    remaining_s: float = math.inf
    measure: bool = False
    stay: bool = False


@dataclass(frozen=True)
class CallPlan:
    """A request, and what the session adds to it: the content, the buffer, the limit."""

    request: CallRequest
    content: Content
    buffer: int
    limit_s: float

    @property
    def prepared(self) -> tuple[str, ...]:
        """Names of the calls that a runner prepares together, one for each buffer."""
        together = (EMPTY, *(self.request.reads or ()))
        return together if self.request.judge_call in together else (self.request.judge_call,)

    @property
    def which(self) -> int:
        """Number of this call among those that the runner prepares."""
        return self.prepared.index(self.request.judge_call) * self.request.buffers + self.buffer


def cpu_call(handle: RunnerHandle, plan: CallPlan) -> Findings:
    """Make one call on a CPU, which the checker times. Return the findings. Died: the call failed."""
    process, checker, judges = handle.running, handle.running.checker, handle.submission is None
    nbytes = plan.content.moved if judges else 0
    address = {"runner": handle.runner, "buffer": plan.buffer}
    stays = plan.request.stay and not handle.baseline  # a baseline's setup is made for each call
    # The runner waits in native code for one of these calls. If it waits for others, it leaves those first.
    calls = (plan.prepared, nbytes)
    if process.series != calls:
        process.end_series()
    first = process.series is None
    # A baseline's setup sees the contents, and is no adversary. Other runners get them when they are stopped.
    if handle.baseline:
        checker.ask({"op": "fill", "key": None, **address})
    process.number += 1
    if first:
        message = {"op": "call", "number": process.number, "whats": plan.prepared}
        process.ask(replies.Ready, {**message, "baseline": handle.baseline, "bytes": nbytes}, plan.limit_s)
    # The checker stops the runner, fills the buffer, says "go", reads its clock, and stops the runner again.
    message = {
        "op": "time_call",
        "number": process.number,
        "which": plan.which,
        "first": first,
        "last": not stays,
        "fill": not handle.baseline,
        "judges": judges,
        "limit_s": plan.limit_s,
        "key": None,
        "baseline": handle.baseline,
        "bytes": nbytes,
        **address,
    }
    timed, _ = checker.request(message, limit_s=plan.limit_s + limits.CHECKER_LIMIT_S, watch=process.child)
    report = process.report_of(timed, plan.limit_s)
    # The runner says what came back, after its last call or, in a GPU MODE folder, beside each one.
    process.series, claims = calls, None
    if not stays or report.reading.raised:
        reply = process.last_reply()
        if report.reading.raised:
            raise Died("RUNTIME_ERROR", "its process said that the call had raised, and then that it was well")
        claims = reply.claims
    elif not plan.content.ours and not judges:
        claims = replies.noted(report.note)
    fault = outcome.written_later(report.reading.changed)
    if fault is None and not judges and process.strays & set(report.before):
        fault = handle.look()
    process.strays = frozenset(report.after)
    return Findings(outcome.of_cpu(report.reading), claims, after_done=fault)
