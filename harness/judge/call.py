"""A judged call on a CPU: its request, and the function that makes it.

The judge believes nothing that the runner says: the checker's clock runs outside the runner, and the runner runs only
during a request. Calls on a GPU are recorded and replayed (harness/judge/recording.py).
"""

from dataclasses import dataclass

from harness.judge import limits, outcome, replies
from harness.judge.handle import Content, RunnerHandle
from harness.judge.outcome import Outcome
from harness.sandbox.process import Died

EMPTY = "empty"  # the judge's own call that works for a known time


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


def cpu_call(
    handle: RunnerHandle, request: CallRequest, content: Content, buffer: int, limit_s: float
) -> tuple[Outcome, list[replies.Claim] | None]:
    """Make one call on a CPU, which the checker times. Return its times, with the fault of what went on after it, and
    what the runner says of the tensors that came back, None if it was not asked. Died: the call failed.
    """
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
    timed, _ = checker.request(message, limit_s=limit_s + limits.CHECKER_LIMIT_S, watch=process.child)
    reading, before, after, note = process.report_of(timed, limit_s)
    # The runner says what came back, after its last call or, in a GPU MODE folder, beside each one.
    process.series, claims = calls, None
    if not stays or reading.raised:
        reply = process.last_reply()
        if reading.raised:
            raise Died("RUNTIME_ERROR", "its process said that the call had raised, and then that it was well")
        claims = reply.claims
    if not content.layout["ours"] and not judges:  # as it was at "done": a reply comes later
        claims = replies.noted(note)
    fault = outcome.worked_on(reading)
    if fault is None and not judges and process.strays & set(before):
        fault = handle.look()
    process.strays = frozenset(after)
    times = outcome.of_cpu(reading)
    return times.judged(fault) if fault else times, claims
