"""The bound on what a submission keeps of prepared weights (docs/rules.md, rule 2). On a CPU the judge measures the
memory of the runner's processes and its files around each request that may add to it: counted after a first call, when
the code is loaded (`begin`), and with room for code since the process's start (`host_start`). On a GPU the memory that
counts is what a recorded call finds in use of its scratch memory.
"""

import time

from harness.judge import replies
from harness.judge.handle import RunnerHandle, remarked
from harness.judge.outcome import Outcome
from harness.sandbox.process import Died

PREPARED_FACTOR, PREPARED_SLACK = 1.05, 64 * 2**20  # of the weights' bytes, and bytes: what prepare may keep
WORK_SLACK = 256 * 2**20  # bytes more on a GPU, where scratch memory that a call uses again counts too
FIRST_SLACK = 128 * 2**20  # bytes more that the first prepare and call may take, for code, pools of threads, workspaces


def measure(handle: RunnerHandle, heap: bool = False) -> int | None:
    """Return the bytes of memory and files that a runner takes now; None: it is gone. heap: free malloc's too."""
    process = handle.process
    if process is None or process.workdir is None:
        return None
    try:
        process.end_series()
        process.ask(replies.Done, {"op": "trim", "heap": heap}, process.limit_s)
    except Died as died:
        handle.lose(process.failure(died))
        return None
    return process.child.private_bytes() + process.workdir.jail.taken()


def begin(handle: RunnerHandle) -> Outcome | None:
    """Count from now on what a runner keeps. Return the fault of what it has kept so far, or how it was lost."""
    size = measure(handle, heap=True)
    if size is None:
        return handle.loss
    process = handle.running
    process.host_base = size
    if process.host_start is None:
        return None
    return fault_of(size - process.host_start, process.weights_bytes, FIRST_SLACK)


def hold(handle: RunnerHandle, number: int) -> Outcome | None:
    """Give a runner the present weights, of this number, to prepare. Return the fault of what it kept, or its loss."""
    process = handle.running
    process.end_series()
    before = measure(handle) if process.host_base is not None else None
    if handle.process is None:
        return handle.loss
    failing = "the checker could not allocate weights"
    made, fds = process.checker.request({"op": "hold", "runner": handle.runner}, failing)
    message = {"op": "hold", "nbytes": made["nbytes"], "spec": made["spec"]}
    start = time.perf_counter()
    try:
        reply = process.hand_over(replies.Prepared, message, fds, "prepare the weights", replies.PREPARE_LIMIT_S)
    except Died as died:
        raise Died(died.status, remarked(died.reason, "in prepare")) from None
    took_us = (time.perf_counter() - start) * 1e6
    process.holds, process.weights_bytes = number, made["bytes"]
    if reply.prepared:
        handle.audit.prepare_us = took_us
    return kept(handle, before) if before else None


def kept(handle: RunnerHandle, before: int) -> Outcome | None:
    """Return the fault of holding more than is allowed, or the loss. before: as of `measure`, ahead of the request."""
    process = handle.running
    for heap in (False, True):  # to free what malloc keeps each time would cost the calls behind it
        size = measure(handle, heap)
        if size is None:
            return handle.loss
        grown = max(0, size - (process.host_base or before))
        if not (fault := fault_of(grown, process.weights_bytes)):
            break
    handle.audit.kept_bytes = max(grown, handle.audit.kept_bytes or 0)
    return fault


def fault_of(kept_bytes: int, weights_bytes: int, more: int = 0) -> Outcome | None:
    """Return the fault of what is kept of weights of so many bytes. more: bytes that are allowed besides."""
    slack = PREPARED_SLACK + more
    allowed = int(PREPARED_FACTOR * weights_bytes) + slack
    if kept_bytes <= allowed:
        return None
    said = f"prepare: {kept_bytes / 2**20:.0f} MiB more are held than before, {allowed / 2**20:.0f} MiB are allowed"
    return Outcome("RULE_BROKEN", f"{said} ({PREPARED_FACTOR} x the weights and {slack // 2**20} MiB)")
