"""A submission in a session, and what became of its calls."""

from dataclasses import dataclass, field

from harness.judge import replies
from harness.problem.folders import Submission
from harness.results import text
from harness.runner.gate import Reading
from harness.sandbox.process import Child
from harness.sandbox.workdir import Workdir

# From a call's end until its runner was told to stop: what it may still write then is bounded. To tell a thread takes a
# moment, so honest pools get more; not without limit, since idle threads cost nothing.
STOP_LIMIT_US, STOP_THREAD_US, STOP_THREADS = 250, 2, 256
# That a call's threads may wait for a processor beside tasks of others: the larger of so many us and this share of it.
BUSY_US = 100
BUSY_SHARE = 0.02
NAMES = 500  # characters of a report
FIRST_SPIN_US = 1000  # before the call's own enqueue time is known, and at most


@dataclass
class Outcome:
    """What became of one call. us and the rest are None unless the call returned.

    us: the clock's reading, what the clock itself costs included. On a GPU, by the parent's clock, ready_us: until the
    runner was ready to make the call; outside_us: from "go" to the reply, less the spin that was ordered. On a CPU,
    stop_us: from "done" until all of the runner had been told to stop; late: that was too long for a score; busy: its
    threads waited for a processor, which tasks of other processes wanted too. bytes: that a call on these contents must
    move, where the task says that for contents.
    """

    status: str
    reason: str = ""
    error: dict | None = None
    us: float | None = None
    host_us: float | None = None
    setup_us: float | None = None
    host_bound: bool = False
    ready_us: float | None = None
    outside_us: float | None = None
    bytes: int | None = None
    stop_us: float | None = None
    late: bool = False
    busy: bool = False


@dataclass
class Audit:
    """What was looked at beside the outputs. calls: audited ones; records: of the driver on what ran where, in them;
    prepare_us and kept_bytes where weights are prepared.
    """

    calls: int = 0
    records: int = 0
    prepare_us: float | None = None
    kept_bytes: int | None = None


@dataclass
class RunnerHandle:
    """A submission that is judged, or (submission None) the judge's own calls."""

    name: str
    submission: Submission | None
    target: str
    child: Child | None = None
    workdir: Workdir | None = None
    number: int = 0  # of its last call on a CPU
    within: tuple | None = None  # which calls its process on a CPU is waiting to make a further one of
    lost: int = 0  # processes that died
    opened: tuple | None = None  # what its buffers were allocated for
    holds: int = 0  # number of the weights that it has
    held_device: int = 0  # bytes of device memory that the judge keeps them in
    calls: int = 0  # of the present process
    turn: int = 0  # calls on the present buffers
    spin_us: float = FIRST_SPIN_US
    last_loss: Outcome | None = None
    audit: Audit = field(default_factory=Audit)
    built: bool = False  # its compile step was made, or is not needed
    keep: bool = False  # what its process compiled is kept when it stops
    # Its compile step, an import or a first call failed: no further process is started for it.
    broken: Outcome | None = None
    strays: frozenset[int] = frozenset()  # processes that were there when its last call was over
    host_base: int | None = None  # bytes of host memory and files before weights that count were handed over
    device_grown: int = 0  # bytes of device memory that its own requests took since

    @property
    def baseline(self) -> bool:
        return self.submission is not None and self.submission.baseline


def of_gpu(reply: replies.Timed, ready_us: float, outside_us: float) -> Outcome:
    """A call on a GPU: the times that a runner claims, beside those of the parent's own clock."""
    return Outcome(
        "PASSED", us=reply.us, host_us=reply.host_us, host_bound=reply.host_bound, setup_us=reply.setup_us,
        ready_us=ready_us, outside_us=outside_us,
    )  # fmt: skip


def of_cpu(reading: Reading) -> Outcome:
    """A call on a CPU, by the judge's clock."""
    busy = reading.delay_us > max(BUSY_US, BUSY_SHARE * reading.call_us) and reading.others > 0
    late = reading.stop_us > STOP_LIMIT_US + STOP_THREAD_US * min(reading.threads, STOP_THREADS)
    us, stop_us = reading.call_us, reading.stop_us
    return Outcome("PASSED", us=us, host_us=us, stop_us=stop_us, late=late, busy=busy)


def tampering_in(names: list[str]) -> Outcome | None:
    """What a runner says was replaced within it, as the verdict that this amounts to."""
    if not names:
        return None
    return Outcome("CHEAT_SUSPECTED", f"tampering, this was replaced in its process: {', '.join(names[:5])}")


def elsewhere_in(seen: replies.Seen | None) -> tuple[int, str]:
    """(records of the driver, work on other streams than the default one as text) of an audited call."""
    if seen is None:
        return 0, ""
    found = (f"queue {stream}: {', '.join(names)}" for stream, names in seen.elsewhere.items())
    return seen.records, text.line("; ".join(found), NAMES)
