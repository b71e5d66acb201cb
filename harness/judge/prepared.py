"""The bound on what a submission keeps of prepared weights (docs/rules.md, rule 2).

The judge measures the memory of the device, of the runner's processes and of its files around each request that may add
to it. Counting begins (`begin`) after a first call, when the submission's code is loaded. What a process holds beyond
that must not exceed the bound. On a CPU what it has held since its start (`start`) must not either, with room for code.
"""

import time
from dataclasses import dataclass

from harness.judge import limits, replies
from harness.judge.handle import RunnerHandle, RunnerProcess, remarked
from harness.judge.outcome import Outcome
from harness.sandbox.process import Died

PREPARED_FACTOR, PREPARED_SLACK = 1.05, 64 * 2**20  # of the weights' bytes, and bytes: what prepare may keep
CODE_SLACK = {"cuda": 256 * 2**20, "cpu": 0}  # bytes more: libraries load kernels and workspaces as shapes ask for them
FIRST_SLACK = 128 * 2**20  # bytes more that the first prepare and call may take, for code, pools of threads, workspaces


@dataclass(frozen=True)
class Size:
    """Bytes at one moment. device_free: device memory that no process holds; host: memory and files of the runner."""

    device_free: int
    host: int


def measure(handle: RunnerHandle, heap: bool = False) -> Size | None:
    """Return what a runner takes now, after it freed what no tensor holds, and with `heap` what malloc keeps of freed
    memory; None if it is gone, or was lost here.
    """
    process = handle.process
    if process is None or process.workdir is None:
        return None
    try:
        process.end_series()
        process.ask(replies.Done, {"op": "trim", "heap": heap}, process.limit_s)
    except Died as died:
        handle.lose(process.failure(died))
        return None
    free = process.checker.ask({"op": "free_memory"})["free"] or 0
    return Size(free, process.child.private_bytes() + process.workdir.bytes_written())


def measure_counted(handle: RunnerHandle) -> Size | None:
    """Return what a runner takes now if that counts; None if it does not, and as in `measure`."""
    return measure(handle) if handle.running.host_base is not None else None


def start(handle: RunnerHandle) -> None:
    """Note what a runner on a CPU takes before it has any weights. On a GPU a first call makes drivers and libraries
    take more than any bound on copies would allow.
    """
    if handle.running.checker.device == "cpu" and (size := measure(handle)):
        handle.running.host_start = size.host


def begin(handle: RunnerHandle) -> Outcome | None:
    """Count from now on what a runner keeps. Return the fault of what it has kept since its start, or how it was
    lost.
    """
    size = measure(handle, heap=True)
    if size is None:
        return handle.loss
    process = handle.running
    process.host_base, process.device_grown = size.host, 0
    return None if process.host_start is None else _fault(process, size.host - process.host_start, FIRST_SLACK)


def hold(handle: RunnerHandle, number: int) -> Outcome | None:
    """Give a runner the present weights, which have this number, to prepare if it likes. Return the fault of what it
    kept, or of how it was lost.
    """
    process = handle.running
    process.end_series()
    # Before the checker lets go of the weights before: their memory is free then, or when the runner unmaps it.
    before = measure_counted(handle)
    if handle.process is None:
        return handle.loss
    failing = "the checker could not allocate weights"
    made, fds = process.checker.request({"op": "hold", "runner": handle.runner}, failing)
    nbytes = made["buffer"]["sizes"]["device"]
    message = {"op": "hold", "buffer": made["buffer"], "spec": made["spec"]}
    start = time.perf_counter()
    try:
        reply = process.hand_over(replies.Prepared, message, fds, "prepare the weights", limits.PREPARE_LIMIT_S)
    except Died as died:
        raise Died(died.status, remarked(died.reason, "in prepare")) from None
    took_us = (time.perf_counter() - start) * 1e6
    if before:  # what would be free if nothing but the judge's own weights had changed
        before = Size(before.device_free + process.held_device - nbytes, before.host)
    process.holds, process.held_device, process.weights_bytes = number, nbytes, made["bytes"]
    if found := handle.tampering():
        return found
    if reply.prepared:
        handle.audit.prepare_us = took_us
    return kept(handle, before) if before else None


def kept(handle: RunnerHandle, before: Size) -> Outcome | None:
    """Add what a request left behind, measured `before` it. Return the fault if the runner holds more than is allowed,
    or was lost meanwhile.
    """
    after = measure(handle)
    if after is None:
        return handle.loss
    process = handle.running
    process.device_grown += before.device_free - after.device_free
    grown = _grown(process, after)
    if _fault(process, grown):  # which may be what malloc keeps; to free that each time would cost the calls behind it
        after = measure(handle, heap=True)
        if after is None:
            return handle.loss
        grown = _grown(process, after)
    handle.audit.kept_bytes = max(grown, handle.audit.kept_bytes or 0)
    return _fault(process, grown)


def _grown(process: RunnerProcess, now: Size) -> int:
    """Bytes of the device and of the host that a process holds beyond those at `begin`."""
    return max(0, process.device_grown) + max(0, now.host - (process.host_base or 0))


def _fault(process: RunnerProcess, grown: int, more: int = 0) -> Outcome | None:
    slack = PREPARED_SLACK + CODE_SLACK[process.checker.device] + more
    allowed = int(PREPARED_FACTOR * process.weights_bytes) + slack
    if grown <= allowed:
        return None
    return Outcome(
        "RULE_BROKEN",
        f"prepare: {grown / 2**20:.0f} MiB more are held than before, {allowed / 2**20:.0f} MiB are allowed "
        f"({PREPARED_FACTOR} x the weights and {slack // 2**20} MiB)",
    )
