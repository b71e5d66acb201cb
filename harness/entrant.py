"""A submission in a session, what became of its calls, and how a runner's replies are read.

A reply is the word of the process that holds the submission: it is taken apart here, field by field.
"""

import math
from dataclasses import dataclass, field

from harness.private import Private
from harness.problem import Entry
from harness.process import Child, Died

NAMES = 500  # characters of a report
FIRST_SPIN_US = 1000  # before the call's own enqueue time is known, and at most


@dataclass
class Outcome:
    """What became of one call. us and the rest are None unless the call returned.

    On the parent's clock, ready_us: until it was ready to make the call; outside_us: from "go" to the reply, less the
    spin that was ordered. bytes: that a call on these contents must move, where the task says that for contents.
    """

    status: str
    reason: str = ""
    error: dict | None = None
    us: float | None = None
    host_us: float | None = None
    untimed_us: float | None = None
    host_bound: bool = False
    ready_us: float | None = None
    outside_us: float | None = None
    bytes: int | None = None


@dataclass
class Audit:
    """What was looked at beside the outputs. calls: audited ones; records: of the driver on what ran where, in them;
    threads: most that were alive; prepare_us and kept_bytes where weights are prepared.
    """

    calls: int = 0
    records: int = 0
    threads: int = 0
    prepare_us: float | None = None
    kept_bytes: int | None = None


@dataclass
class Entrant:
    """A submission that is judged, or (entry None) the judge's own calls."""

    name: str
    entry: Entry | None
    target: str
    child: Child | None = None
    private: Private | None = None
    lost: int = 0  # processes that died
    opened: tuple | None = None  # what its slots were allocated for
    holds: int = 0  # number of the weights that it has
    held_device: int = 0  # bytes of device memory that the judge keeps them in
    calls: int = 0  # of the present process
    turn: int = 0  # calls on the present slots
    spin_us: float = FIRST_SPIN_US
    last_loss: Outcome | None = None
    audit: Audit = field(default_factory=Audit)
    built: bool = False  # its compile step was made, or is not needed
    keep: bool = False  # what its process compiled is kept when it stops
    broken: Outcome | None = None  # its compile step failed: no process is started for it
    host_base: int | None = None  # bytes of host memory and files before weights that count were handed over
    device_grown: int = 0  # bytes of device memory that its own requests took since

    @property
    def peer(self) -> bool:
        return self.entry is not None and self.entry.peer


def outcome_of(reply: dict, ready_us: float, outside_us: float) -> Outcome:
    """The times that a runner claims for a call, beside those of the parent's own clock. Died: a malformed reply."""
    claims = reply.get("claims", [])
    try:
        times = [float(reply["us"]), float(reply["host_us"])]
        untimed = reply.get("untimed_us")
        outcome = Outcome(
            "PASSED", us=times[0], host_us=times[1], host_bound=bool(reply["host_bound"]),
            untimed_us=None if untimed is None else float(untimed), ready_us=ready_us, outside_us=outside_us,
        )  # fmt: skip
        if not all(math.isfinite(t) and t >= 0 for t in (*times, outcome.untimed_us or 0.0)):
            raise ValueError(f"times must be finite, got {times}")
        if not isinstance(claims, list) or not all(isinstance(claim, dict) for claim in claims):
            raise TypeError("claims must be a list of objects")
    except (KeyError, TypeError, ValueError) as error:
        raise Died("RUNTIME_ERROR", f"its process sent a malformed reply: {error!r}") from None
    return outcome


def tampering_in(reply: dict) -> Outcome | None:
    """What a runner says was replaced within it, as the verdict that this amounts to."""
    found = reply.get("tamper")
    if not found:
        return None
    names = ", ".join(map(str, found[:5])) if isinstance(found, list) else str(found)
    return Outcome("CHEAT_SUSPECTED", f"tampering, this was replaced in its process: {names[:NAMES]}")


def elsewhere_in(reply: dict) -> tuple[int, str]:
    """(records of the driver, work on other queues than the default one as text) of an audited call."""
    seen = reply.get("queues")
    if not isinstance(seen, dict) or not isinstance(seen.get("elsewhere"), dict):
        return 0, ""
    records = seen.get("records")
    records = records if isinstance(records, int) and records > 0 else 0
    return records, "; ".join(f"queue {queue}: {str(names)[:NAMES]}" for queue, names in seen["elsewhere"].items())
