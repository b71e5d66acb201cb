"""A judged call: its request, its plan, and the two functions that make it on a CPU and on a GPU.

On a CPU the judge believes nothing that the runner says: the checker's clock runs outside the runner, and the runner
runs only during a request. On a GPU the judge believes a time that the judge's own clock does not contradict.
"""

import math
import secrets
import time
from dataclasses import dataclass

from harness.judge import limits, outcome, replies
from harness.judge.handle import FIRST_SPIN_US, Content, RunnerHandle, admitted
from harness.judge.outcome import Findings
from harness.sandbox.process import Died

EMPTY = "empty"  # the judge's own call that does nothing, or on a CPU works for a known time
SPIN_MARGIN_US = 100  # events, the mark and the capture are enqueued under the spin as well
SPIN_DECAY = 0.9  # that a spin keeps of the one before: a first call compiles, and not every later one may last as long


@dataclass(frozen=True)
class CallRequest:
    """The request for one call.

    buffers: addresses that calls take in turn. judge_call: name of one of the judge's own, "" for a submission's.
    reads: plain readers of the judge by name, with their configuration. remaining_s: a limit besides those of the
    session, for a phase whose time runs out. audit: on a GPU, record what ran on which stream: it has no score.
    measure: what the call leaves in memory counts towards what `prepare` may keep, if the problem has weights. stay: on
    a CPU the process waits for the next call in native code, so that none of its code runs between the two calls, and
    does not say what came back.
    """

    buffers: int
    judge_call: str = ""
    reads: dict[str, int] | None = None
    remaining_s: float = math.inf
    audit: bool = False
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
    def masked(self) -> bool:
        """Whether the buffer on a GPU holds contents that the runner may not read yet."""
        return bool(self.content.sizes["device"]) and self.request.judge_call != EMPTY

    @property
    def prepared(self) -> tuple[str, ...]:
        """Names of the calls that a runner on a CPU prepares together, one for each buffer."""
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


def gpu_call(handle: RunnerHandle, plan: CallPlan) -> Findings:
    """Make one call on a GPU, timed in the runner and from outside. Return the findings. Died: the call failed, and
    nothing in its process can be trusted any more.
    """
    process, request = handle.running, plan.request
    address = {"buffer": plan.buffer, "baseline": handle.baseline}
    key = secrets.token_hex(32) if plan.masked else None
    if handle.submission is not None:
        process.checker.ask({"op": "fill", "key": key, "runner": handle.runner, "buffer": plan.buffer})
        # The checker's kernels have evicted the submission's code: call it once on the previous buffer, whose call is
        # closed.
        if plan.masked and request.buffers > 1 and process.calls_on_buffers > 1:
            before = {**address, "op": "warm", "buffer": (process.calls_on_buffers - 2) % request.buffers}
            process.ask(replies.Done, before, plan.limit_s)
    message = {
        "op": "call",
        "key": key,
        "spin_us": process.spin_us,
        "what": request.judge_call,
        "audit": request.audit,
        "bytes": 0 if handle.submission else plan.content.moved,
        **address,
    }
    # The parent's own clock: until the runner is ready, and from "go" to its reply.
    child, ready_us, outside_us = process.child, math.nan, math.nan
    deadline = time.monotonic() + plan.limit_s
    start = time.perf_counter_ns()
    answer, _ = child.request(message, plan.limit_s)
    ready = time.perf_counter_ns()
    if "ready" in answer:
        child.send({"go": True})
        answer, _ = child.receive(max(0.1, deadline - time.monotonic()))
        ready_us, outside_us = (ready - start) / 1e3, (time.perf_counter_ns() - ready) / 1e3
    reply = admitted(replies.read(replies.Timed, answer))
    times = outcome.of_gpu(reply, ready_us, outside_us - process.spin_us, handle.baseline)
    process.host_us = reply.host_us
    process.spin_us = max(min(2 * reply.host_us, FIRST_SPIN_US) + SPIN_MARGIN_US, SPIN_DECAY * process.spin_us)
    return Findings(times, reply.claims, reply.activity)
