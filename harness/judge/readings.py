"""The judge's own readings beside the times, the bounds on a claimed time, and the cost of the clock."""

import dataclasses
from dataclasses import dataclass, field

from harness.judge.outcome import Batch, Outcome, measured
from harness.judge.work import Group
from harness.problem.folders import Case
from harness.results import datasheet, stats
from harness.results.environment import UNKNOWN, GpuState
from harness.runner import matmul

# The judge's clock against claimed times. An accusation: every call is longer than OUTSIDE_FACTOR times its claim and
# so many us more than the judge's empty call.
OUTSIDE_FACTOR = 1.25
OUTSIDE_SLACK_US = 300
# No score: a call is late by this share of its claim, and by so many us more than all of the judge's empty calls; or
# the middle of all calls is, by so many us more than so many of a hundred of these.
LATE_SHARE = 0.05
LATE_US = 250
MIDDLE_OF_HUNDRED = 95
# On a CPU, however the empty calls scatter: what is taken off a reading at most, and what the resolution is at most.
COST_LIMIT_US, RESOLUTION_LIMIT_US = 500, 20
SOL_SHARE = 0.95  # of the physical bound: a time below it is no measurement

# Keys of what the parent's clock reads of the judge's own calls, among their times: the empty ones from "go" to the
# reply, and the readers until they are ready.
OUTSIDE, READY = "outside", "ready"


@dataclass
class Timing:
    """The timed calls of one submission on one case, with one list per process."""

    case: Case
    outcomes: list[list[Outcome]] = field(default_factory=list)
    failure: Outcome | None = None
    batches: list[Batch] = field(default_factory=list)  # on a GPU

    @property
    def least_us(self) -> float:
        """What a call takes at least, by the batches. A busy machine makes a reading longer, so the shortest counts."""
        return min((batch.least_us for batch in self.batches), default=0.0)

    @property
    def undercuts(self) -> bool:
        """Whether the claimed times are shorter than the batches allow."""
        return self.median_us < self.least_us

    @property
    def scored(self) -> list[list[Outcome]]:
        return [kept for group in self.outcomes if (kept := [o for o in group if o.scored])]

    @property
    def samples(self) -> list[list[float]]:
        return [[measured(o.us) for o in group] for group in self.scored]

    def flat(self, name: str) -> list[float]:
        return [getattr(o, name) for group in self.scored for o in group if getattr(o, name) is not None]

    @property
    def median_us(self) -> float:
        return stats.median(self.flat("us"))

    @property
    def worst_error(self) -> dict | None:
        errors = [o.error for group in self.outcomes for o in group if o.error]
        return max(errors, key=lambda e: e["rel"]) if errors else None


@dataclass
class ReferenceReadings:
    """What the judge measured on one case besides the submissions, under the same clock, in us."""

    roofline_us: float
    roofline_config: str
    roofline_kind: str  # of what: "read", the bytes, or "flops", the operations
    empty_us: float
    bytes: int
    seeds: list[str]
    state: GpuState = UNKNOWN
    stated: bool = True  # whether the problem says `bytes`; else they are all inputs and outputs, and bound no time
    resolution_us: float = 0.0  # on a CPU, what a reading is at least: how far readings of the empty call lie apart


@dataclass
class CaseReadings:
    """What the judge has read so far on one case besides the submissions. bytes: that a call must move, None while it
    is unknown; judge_us: by the judge's call its times in us; state: of the GPU behind the last group.
    """

    case: Case
    bytes: int | None
    judge_us: dict[str, list[float]] = field(default_factory=dict)
    seeds: list[str] = field(default_factory=list)
    state: GpuState = UNKNOWN

    def add(self, group: Group) -> None:
        for name, times in group.judge_us.items():
            self.judge_us.setdefault(name, []).extend(times)
        self.seeds += group.seeds
        self.state = group.state


def reference(beside: CaseReadings, timings: list[Timing], device: str, matmul_us: list[float]) -> ReferenceReadings:
    """Return the reference readings of a case. On a CPU, take the clock's cost off its timings; on a GPU, fail those
    that the parent's clock contradicts. matmul_us: of all cases of the run, since processes that live together share
    one.
    """
    judge_us, resolution = beside.judge_us, 0.0
    reads = [name for name in judge_us if name not in ("empty", OUTSIDE, READY, matmul.NAME)]
    if device == "cpu":
        empty, resolution = _take_off_cost(judge_us, timings, reads)
    else:
        empty, outside, ready = (stats.median(judge_us[name]) for name in ("empty", OUTSIDE, READY))
        late = [seen - us for seen, us in zip(judge_us[OUTSIDE], judge_us["empty"], strict=True)]
        for timing in timings:
            timing.failure = timing.failure or _contradicted(timing, outside, ready)
            timing.failure = timing.failure or _take_out_late(timing, late) or _undercut(timing)
    counted = [o.bytes for timing in timings for group in timing.outcomes for o in group if o.bytes]
    medians = {name: stats.median(judge_us[name]) for name in reads}
    best = min(medians, key=lambda name: medians[name])
    roofline_us, config, kind = medians[best], best, "read"
    if matmul_us and beside.case.flops:
        rate = matmul.flops(device) / stats.median(matmul_us)  # a microsecond
        if (least := beside.case.flops / rate) > roofline_us:
            roofline_us, config, kind = least, f"{matmul.NAME} at {rate / 1e6:.0f} TFLOP/s", "flops"
    return ReferenceReadings(
        roofline_us=roofline_us,
        roofline_config=config,
        roofline_kind=kind,
        empty_us=empty,
        bytes=round(sum(counted) / len(counted)) if counted else beside.bytes or 0,
        seeds=beside.seeds,
        state=beside.state,
        stated=bool(counted) or beside.case.bytes is not None,
        resolution_us=resolution,
    )


def _take_off_cost(judge_us: dict[str, list[float]], timings: list[Timing], reads: list[str]) -> tuple[float, float]:
    """Take what the clock itself costs off all times of a case on a CPU. Return (that cost, the resolution), in us.

    Both are of the judge's empty calls, in a runner without a submission.
    """
    empty = judge_us["empty"]
    cost = min(stats.median(empty), COST_LIMIT_US)
    resolution = min(max(stats.spread(empty), 1.0), RESOLUTION_LIMIT_US)
    for timing in timings:
        for group in timing.outcomes:
            group[:] = [dataclasses.replace(o, us=max(measured(o.us) - cost, resolution)) for o in group]
    for name in reads:
        judge_us[name] = [max(us - cost, resolution) for us in judge_us[name]]
    return cost, resolution


def sol_us(case: Case, readings: ReferenceReadings, gpu: str | None) -> float:
    """Return what no call can undercut, in us: 95 % of the bytes or flops at the datasheet's rate, or of the empty
    call. Return 0 for a device without a datasheet here: a rate that was measured is no bound, and the judge's clock
    runs outside.
    """
    named = next((name for name in datasheet.RATES if gpu and name in gpu), None)
    if named is None:
        return 0.0
    flops_us = (case.flops or 0) / datasheet.flops_rate(named, case.params.get("activation")) * 1e6
    bytes_us = readings.stated * readings.bytes / datasheet.RATES[named][0] * 1e6
    return SOL_SHARE * max(bytes_us, flops_us, readings.empty_us)


def ratios(first: Timing, second: Timing) -> list[list[tuple[float, float]]]:
    """Return pairs of times on equal contents, by process."""
    return [
        [(measured(a.us), measured(b.us)) for a, b in zip(*groups, strict=True) if a.scored and b.scored]
        for groups in zip(first.outcomes, second.outcomes, strict=True)
    ]


def _take_out_late(timing: Timing, late: list[float]) -> Outcome | None:
    """Mark the calls that the judge's clock contradicts one by one: they have no score. Return the fault of times of
    which too few are left, or whose middle it contradicts. late: by how many us the clock saw the judge's empty calls
    take longer than their event pairs did, in a runner without a submission.

    A busy machine does that to honest calls too, and to the judge's: it is no proof of anything.
    """
    calls = [
        [(measured(o.outside_us) - measured(o.us), measured(o.us)) for o in group] for group in timing.outcomes if group
    ]
    if not calls:
        return None
    most, many = max(late) + LATE_US, stats.percentile(late, MIDDLE_OF_HUNDRED) + LATE_US
    marks = [[excess > most + LATE_SHARE * us for excess, us in group] for group in calls]
    pairs = [pair for of, group in zip(marks, calls, strict=True) for pair in zip(of, group, strict=True)]
    if any(2 * sum(of) > len(of) for of in marks):
        counted = f"{sum(mark for mark, _ in pairs)} of {len(pairs)} calls"
        return Outcome(
            "INVALID_MEASUREMENT",
            f"the judge's clock saw {counted} take over {most:.0f} us longer than they claim, more than any empty "
            f"call did: run again when the machine is idle",
        )
    typical = stats.median([excess for mark, (excess, _) in pairs if not mark])
    allowed = many + LATE_SHARE * timing.median_us
    if typical > allowed:
        return Outcome(
            "INVALID_MEASUREMENT",
            f"by the judge's clock calls take {typical:.0f} us longer than they claim, and over {allowed:.0f} us, "
            f"longer than {MIDDLE_OF_HUNDRED} of a hundred empty calls, the times are no record: run again when "
            f"the machine is idle",
        )
    for group, of in zip([group for group in timing.outcomes if group], marks, strict=True):
        group[:] = [dataclasses.replace(o, contradicted=mark) for o, mark in zip(group, of, strict=True)]
    return None


def _undercut(timing: Timing) -> Outcome | None:
    """Return the fault of claimed times that are shorter than the judge's readings of whole batches allow."""
    if not timing.flat("us") or not timing.undercuts:
        return None
    batch = min(timing.batches, key=lambda batch: batch.least_us)
    reason = (
        f"{timing.median_us:.2f} us are claimed, and {batch.calls} calls together took {batch.us:.0f} us by the "
        f"judge's own clock, where as many empty ones take {batch.empty_us:.0f} us: a call takes at least "
        f"{batch.least_us:.2f} us"
    )
    if batch.alone:  # the device may have waited for the host, which is slower at times: no proof
        return Outcome(
            "INVALID_MEASUREMENT", f"{reason}; a call waits for the device: run again when the machine is idle"
        )
    if len(timing.batches) > 1:
        return Outcome("CHEAT_SUSPECTED", f"{reason}, in each of {len(timing.batches)} batches")
    return Outcome("INVALID_MEASUREMENT", f"{reason}; read in one process only: run again when the machine is idle")


def _contradicted(timing: Timing, empty_us: float, ready_us: float) -> Outcome | None:
    """Return the fault of claimed times that the parent's own clock contradicts: on it an empty call takes `empty_us`,
    and the judge's own readers are ready after `ready_us`.
    """
    calls = [o for group in timing.outcomes for o in group]
    if not calls:
        return None
    # A busy machine makes some calls look longer from outside; a false claim does that to every one of them.
    slack = OUTSIDE_SLACK_US
    pairs = [(measured(o.outside_us), measured(o.us)) for o in calls]
    outside_us, us = min(pairs, key=lambda pair: pair[0] - OUTSIDE_FACTOR * pair[1])
    allowed = OUTSIDE_FACTOR * us + slack + empty_us
    if outside_us > allowed:
        return Outcome(
            "CHEAT_SUSPECTED",
            f"the outside clock saw {outside_us:.0f} us where {us:.2f} us are claimed and allows "
            f"{allowed:.0f} us; no call of {len(calls)} is nearer to its claim",
        )
    earliest = min(o.ready_us for o in calls if o.ready_us is not None)
    allowed = OUTSIDE_FACTOR * ready_us + slack
    if earliest > allowed and not timing.flat("setup_us"):
        return Outcome(
            "CHEAT_SUSPECTED",
            f"the outside clock saw {earliest:.0f} us before any of {len(calls)} calls was ready, and allows "
            f"{allowed:.0f} us: the judge's own are ready after {ready_us:.0f} us",
        )
    return None
