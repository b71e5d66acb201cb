"""The outcome of a call: its times, and the verdict of what was looked at, each of which is a fault or None."""

from dataclasses import dataclass, replace
from typing import ClassVar

from pydantic import ConfigDict

from harness.results.status import Status
from harness.runner import gate

# From a call's end until all of the runner has the order to stop, in which it could work on; a call that was stopped
# later does not count. An order takes 2 us for each thread, and a pool may have a hundred.
STOP_LIMIT_US = 500
# That processes may run while they are stopped: one that is on its way into the stop when it is seen as stopped is
# billed by the tick of a clock, 10 ms at most. Less is repeated, as a late stop is.
RAN_LIMIT_US = 20_000
# That a call's threads may wait for a processor beside tasks of others: the larger of so many us and this share of it.
BUSY_US = 100
BUSY_SHARE = 0.02


@dataclass
class Outcome:
    """The outcome of one call. us and the fields after it are None unless the call returned. us: the clock's reading,
    with its cost; host_us: on a GPU that of the player's host clock. self_timed: why it was timed in the submission's
    process, "" if it was not. On a CPU, late: the runner was told to stop too late, and could have worked on; busy: its
    threads waited for a processor beside others' tasks. bytes: that a call must move, if the task says it of contents.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")  # for what is read from a run's file

    status: Status
    reason: str = ""
    error: dict | None = None
    us: float | None = None
    host_us: float | None = None
    bytes: int | None = None
    self_timed: str = ""
    late: bool = False
    busy: bool = False

    def judged(self, verdict: "Outcome") -> "Outcome":
        """Return this call's times with a verdict on it. The error that was found before stays."""
        return replace(self, status=verdict.status, reason=verdict.reason, error=verdict.error or self.error)


def measured(value: float | None) -> float:
    """Return `value`, which every call that returned has. ValueError: it is None."""
    if value is None:
        raise ValueError("a call that returned must have its times")
    return value


@dataclass
class Audit:
    """What the judge looked at besides the outputs, if weights are prepared: the time that takes, and what is kept."""

    prepare_us: float | None = None
    kept_bytes: int | None = None


def of_cpu(reading: gate.Reading) -> Outcome:
    """Return the times of a call on a CPU, by the judge's clock."""
    busy = reading.delay_us > max(BUSY_US, BUSY_SHARE * reading.call_us) and reading.others > 0
    late = reading.stop_us > STOP_LIMIT_US or reading.ran_us > 0
    return Outcome("PASSED", us=reading.call_us, host_us=reading.call_us, late=late, busy=busy)


def worked_on(reading: gate.Reading) -> Outcome | None:
    """Return the fault of a call whose outputs changed after "done", or whose processes ran while they were stopped."""
    if reading.changed < 0:
        return Outcome("INCORRECT", "the memory of a tensor that was returned cannot be read")
    many = f"{reading.changed} of at most {gate.WORDS} sampled words changed later"
    if reading.changed:
        return Outcome("CHEAT_SUSPECTED", f"outputs were written after the call had ended: {many}")
    if reading.ran_us > RAN_LIMIT_US:
        return Outcome("CHEAT_SUSPECTED", "its processes ran while they were stopped, before the call or after it")
    return None
