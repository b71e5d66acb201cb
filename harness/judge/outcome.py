"""The outcome of a call: its times, the finding of each source, and the verdict that follows.

A source (the clock, the checker, the audit, the memory) returns an Outcome for a fault and None otherwise. `decide`
makes the verdict of them.
"""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from pydantic import AfterValidator, ConfigDict

from harness.judge import replies
from harness.results import schema, text
from harness.runner import gate

# From a call's end until all of the runner has the order to stop, in which it could work on; a call that was stopped
# later does not count. An order takes 2 us for each thread, and a pool may have a hundred.
STOP_LIMIT_US = 500
# That a call's threads may wait for a processor beside tasks of others: the larger of so many us and this share of it.
BUSY_US = 100
BUSY_SHARE = 0.02
BATCH_SHARE = 0.9  # of what a call takes in a batch, that a scored one takes at least
NAMES = 500  # characters of a report
NAMED = 5  # replaced objects in a report


def _listed(status: str) -> str:
    if status not in schema.STATUSES:
        raise ValueError(f"a verdict must be one of {', '.join(schema.STATUSES)}, got {status!r}")
    return status


@dataclass
class Outcome:
    """The outcome of one call. us and the fields after it are None unless the call returned.

    us: the clock's reading, with the cost of the clock. On a GPU, by the judge's clock, ready_us: until the runner was
    ready to make the call; outside_us: from "go" to the reply, less the ordered spin; contradicted: that is too long
    for a score of `us`. On a CPU, late: the runner was told to stop too late, and could have worked on; busy: its
    threads waited for a processor, which tasks of other processes wanted too. bytes: what a call on these contents must
    move, if the task says that of contents.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")  # for what is read from a run's file

    status: Annotated[str, AfterValidator(_listed)]
    reason: str = ""
    error: dict | None = None
    us: float | None = None
    host_us: float | None = None
    setup_us: float | None = None
    host_bound: bool = False
    ready_us: float | None = None
    outside_us: float | None = None
    bytes: int | None = None
    late: bool = False
    busy: bool = False
    contradicted: bool = False

    @property
    def scored(self) -> bool:
        return not self.contradicted


@dataclass(frozen=True)
class Batch:
    """What the judge's own clock says of calls on a GPU that waited behind its gate, times in us. us: from before it
    opened until the digest of all their outputs; empty_us: the same of as many empty calls, without a submission;
    noise_us: how far readings of these lie apart. alone: each call had a separate batch, since it waits for the device,
    and this is the shortest.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    calls: int
    us: float
    empty_us: float
    noise_us: float
    alone: bool = False

    @property
    def least_us(self) -> float:
        """What a call takes at least; caches are warm here, so that a scored call takes longer."""
        return max(0.0, (BATCH_SHARE * (self.us - self.empty_us) - self.noise_us) / self.calls)


def measured(value: float | None) -> float:
    """Return `value`, which every call that returned has. ValueError: it is None."""
    if value is None:
        raise ValueError("a call that returned must have its times")
    return value


@dataclass
class Audit:
    """What the judge looked at besides the outputs. calls: audited calls; records: the driver's records of them;
    prepare_us and kept_bytes if weights are prepared.
    """

    calls: int = 0
    records: int = 0
    prepare_us: float | None = None
    kept_bytes: int | None = None


@dataclass
class Findings:
    """What each source found of a call that returned. None: the source found no fault, or was not asked.

    times: a passed Outcome that holds the times. claims: what the runner says of the tensors that came back; None if it
    was not asked. activity: the driver's records of an audited call.
    """

    times: Outcome
    claims: list[replies.Claim] | None = None
    activity: replies.Seen | None = None
    after_done: Outcome | None = None  # outputs that were written, or processes that lived on, after "done"
    checked: Outcome | None = None  # the checker's verdict on inputs, outputs and claims
    tampering: Outcome | None = None  # what was replaced in the runner's process, or how it was lost when it was asked
    audit: Outcome | None = None  # where its work ran, and which processes live on
    memory: Outcome | None = None  # what is held beyond the bound on `prepare`


def decide(found: Findings) -> Outcome:
    """Return the outcome of a call: its times, and the first fault of its sources as the verdict."""
    faults = (found.tampering, found.after_done, found.checked, found.audit, found.memory)
    passed = found.checked or found.times
    verdict = next((fault for fault in faults if fault and fault.status != "PASSED"), passed)
    error = found.checked.error if found.checked else None
    return replace(found.times, status=verdict.status, reason=verdict.reason, error=error)


def of_cpu(reading: gate.Reading) -> Outcome:
    """Return the times of a call on a CPU, by the judge's clock."""
    busy = reading.delay_us > max(BUSY_US, BUSY_SHARE * reading.call_us) and reading.others > 0
    late = reading.stop_us > STOP_LIMIT_US
    return Outcome("PASSED", us=reading.call_us, host_us=reading.call_us, late=late, busy=busy)


def of_gpu(reply: replies.Timed, ready_us: float, outside_us: float, baseline: bool) -> Outcome:
    """Return the times of a call on a GPU: those that the runner claims, and those of the parent's own clock."""
    # Only baselines have a setup whose time does not count.
    setup_us = reply.setup_us if baseline else None
    return Outcome(
        "PASSED",
        us=reply.us,
        host_us=reply.host_us,
        host_bound=reply.host_bound,
        setup_us=setup_us,
        ready_us=ready_us,
        outside_us=outside_us,
    )


def written_later(changed: int) -> Outcome | None:
    """Return the fault of outputs of which so many words changed after "done"; -1: they cannot be read."""
    if changed < 0:
        return Outcome("INCORRECT", "the memory of a tensor that was returned cannot be read")
    if not changed:
        return None
    return Outcome(
        "CHEAT_SUSPECTED",
        f"outputs were written after the call had ended: {changed} of at most {gate.WORDS} sampled words changed later",
    )


def left_behind(pids: list[int]) -> Outcome:
    """Return the fault of processes that a call started and did not end."""
    return Outcome(
        "CHEAT_SUSPECTED",
        f"still running after the call: child processes {pids}; end all that a call starts before it returns "
        "(docs/rules.md, rule 4)",
    )


def tampering_in(names: list[str]) -> Outcome | None:
    """Return the fault of objects that a runner says were replaced within it."""
    if not names:
        return None
    return Outcome("CHEAT_SUSPECTED", f"tampering, this was replaced in its process: {', '.join(names[:NAMED])}")


def ran_elsewhere(activity: replies.Seen | None) -> Outcome | None:
    """Return the fault of an audited call whose work ran on other streams than the default one."""
    if activity is None or not activity.elsewhere:
        return None
    named = (f"stream {stream}: {', '.join(names)}" for stream, names in activity.elsewhere.items())
    said = text.line("; ".join(named), NAMES)
    return Outcome("RULE_BROKEN", f"work ran on another stream than the default one: {said}")
