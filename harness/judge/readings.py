"""What was measured: groups of timed calls, the judge's own readings beside them, the bounds on a claimed time, the
cost of the clock; and all of it as lines of a run's file, of which a resumed run takes over what is there and does the
rest (docs/records.md says when each line is written).
"""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from harness.judge.outcome import Audit, Outcome, measured
from harness.problem.folders import Case
from harness.results import environment, schema, stats
from harness.results.environment import UNKNOWN, GpuState
from harness.results.record import Contents

# By how much the host's clock may read longer than the event pair, each less its empty call: the larger of the two.
CLOCKS_APART_US, CLOCKS_APART_SHARE = 1.0, 0.02
# On a CPU, however the empty calls scatter: what is taken off a reading at most, and what the resolution is at most.
COST_LIMIT_US, RESOLUTION_LIMIT_US = 500, 20
SOL_SHARE = 0.95  # of the physical bound: a time below it is no measurement

PRODUCT = "matmul"  # among the judge's times, those of its matrix product on a GPU
HOST = "empty, host"  # among the judge's times, those of its empty calls by the host's clock


@dataclass
class Group:
    """The calls of one process of each submission, or of those of one part, on one benchmark case. outcomes: by
    submission its scored calls, in order, and last what failed it here, warm-ups included; one that failed before has
    none. judge_us: by judge's call its times in us. seeds: of every content. state: of the GPU behind the calls. part:
    of the submissions, where not all can be alive at once.
    """

    process: int
    case: int
    outcomes: dict[str, list[Outcome]]
    judge_us: dict[str, list[float]]
    seeds: list[str]
    state: GpuState = UNKNOWN
    part: int = 0


GroupDone = Callable[[Group], None]


@dataclass(frozen=True)
class Finished:
    """The finished work of one phase."""

    tests: dict[tuple[str, int], Outcome] = field(default_factory=dict)
    groups: dict[tuple[int, int, int], Group] = field(default_factory=dict)  # by process, case, part

    def test(self, submission: str, case: int) -> Outcome | None:
        """Return the outcome of `submission` (its name) on test case number `case`."""
        return self.tests.get((submission, case))

    def group(self, process: int, case: int, part: int = 0) -> Group | None:
        return self.groups.get((process, case, part))


NOTHING = Finished()


@dataclass
class Timing:
    """The timed calls of one submission on one case, with one list per process."""

    case: Case
    outcomes: list[list[Outcome]] = field(default_factory=list)
    failure: Outcome | None = None

    @property
    def self_timed(self) -> str:
        return next((o.self_timed for group in self.outcomes for o in group if o.self_timed), "")

    @property
    def samples(self) -> list[list[float]]:
        return [[measured(o.us) for o in group] for group in self.outcomes if group]

    def flat(self, name: str) -> list[float]:
        return [getattr(o, name) for group in self.outcomes for o in group if getattr(o, name) is not None]

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

    @property
    def unresolved(self) -> bool:
        """Whether the roofline is too short for the clock, so that its reading is the resolution."""
        return self.roofline_us <= self.resolution_us


@dataclass
class CaseReadings:
    """What the judge has read on a case. bytes: a call must move, None: unknown; judge_us: us by the judge's call."""

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
    """Return a case's readings. Take the clock's cost off its timings; on a GPU fail what the host contradicts."""
    judge_us, resolution = beside.judge_us, 0.0
    reads = [name for name in judge_us if name not in ("empty", HOST, PRODUCT)]
    if device == "cpu":
        empty, resolution = _take_off_cost(judge_us, timings, reads)
    else:
        empty, empty_host = stats.median(judge_us["empty"]), stats.median(judge_us[HOST])
        for timing in timings:
            timing.failure = timing.failure or _clocks_apart(timing, empty, empty_host)
    counted = [o.bytes for timing in timings for group in timing.outcomes for o in group if o.bytes]
    medians = {name: stats.median(judge_us[name]) for name in reads}
    best = min(medians, key=lambda name: medians[name])
    roofline_us, config, kind = medians[best], best, "read"
    if matmul_us and beside.case.flops:
        from harness.checker import matmul  # no run on a CPU needs it

        rate = matmul.FLOPS / stats.median(matmul_us)  # a microsecond
        if (least := beside.case.flops / rate) > roofline_us:
            roofline_us, config, kind = least, f"{PRODUCT} at {rate / 1e6:.0f} TFLOP/s", "flops"
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
    """Take the clock's cost off a case's times on a CPU. Return (that cost, the resolution), in us."""
    empty = judge_us["empty"]
    cost = min(stats.median(empty), COST_LIMIT_US)
    low, high = np.percentile(empty, (25, 75))
    resolution = min(max(float(high - low), 1.0), RESOLUTION_LIMIT_US)
    for timing in timings:
        for group in timing.outcomes:
            group[:] = [dataclasses.replace(o, us=max(measured(o.us) - cost, resolution)) for o in group]
    for name in reads:
        judge_us[name] = [max(us - cost, resolution) for us in judge_us[name]]
    return cost, resolution


def sol_us(case: Case, readings: ReferenceReadings, gpu: str | None) -> float:
    """What no call undercuts, in us: 95 % of the datasheet's time, or of the empty call; 0 without a datasheet."""
    named = next((name for name in environment.RATES if gpu and name in gpu), None)
    if named is None:
        return 0.0
    bytes_rate, flops_rate = environment.RATES[named]
    if case.params.get("activation") == "nvfp4":
        flops_rate = environment.FP4.get(named, flops_rate)
    flops_us = (case.flops or 0) / flops_rate * 1e6
    return SOL_SHARE * max(readings.stated * readings.bytes / bytes_rate * 1e6, flops_us, readings.empty_us)


def ratios(first: Timing, second: Timing) -> list[list[tuple[float, float]]]:
    """Return pairs of times on equal contents, by process."""
    return [
        [(measured(a.us), measured(b.us)) for a, b in zip(*groups, strict=True)]
        for groups in zip(first.outcomes, second.outcomes, strict=True)
    ]


def _clocks_apart(timing: Timing, empty_us: float, empty_host_us: float) -> Outcome | None:
    """Return the fault of event times that are shorter than the host's clock allows. A kernel can rewrite the time
    stamps of events, which lie in memory that it can reach. empty_us, empty_host_us: what both read of an empty call.
    """
    apart = []
    for group in timing.outcomes:
        pairs = [(measured(o.us) - empty_us, measured(o.host_us) - empty_host_us) for o in group if not o.self_timed]
        if pairs:
            us, host_us = (stats.median([pair[i] for pair in pairs]) for i in (0, 1))
            apart.append((host_us - us - max(CLOCKS_APART_US, CLOCKS_APART_SHARE * host_us), us, host_us))
    if not apart or stats.median([excess for excess, _, _ in apart]) <= 0:
        return None
    least, us, host_us = min(apart)
    clocks = f"events say {us:.2f} us and the host's clock {host_us:.2f} us, each less its empty call"
    if least > 0 and len(apart) > 1:
        return Outcome("CHEAT_SUSPECTED", f"{clocks}, or further apart, in all {len(apart)} groups of calls")
    return Outcome("INVALID_MEASUREMENT", f"{clocks}: run again when the machine is idle")


# --- the lines of a run's file


def finished(lines: list[dict], phase: str = "benchmark") -> Finished:
    """Return the work that these lines tell of: every test, and the groups of `phase`."""
    tests = {(at["submission"], at["case"]): Outcome(**at["outcome"]) for at in lines if at["kind"] == "outcome"}
    groups = [_GROUP.validate_python(at) for at in lines if at["kind"] == "group" and at.get("phase") == phase]
    return Finished(tests, {(group.process, group.case, group.part): group for group in groups})


def of_outcome(outcome: Outcome) -> dict:
    """Return the fields of an outcome that are not at their defaults."""
    return dict(_OUTCOME.dump_python(outcome, exclude_defaults=True))


def of_group(group: Group) -> dict:
    """Return the fields of a group's line."""
    outcomes = {name: [of_outcome(call) for call in calls] for name, calls in group.outcomes.items()}
    return dataclasses.asdict(group) | {"outcomes": outcomes}


def attempts(files: Iterable[Contents], variant: str) -> set[str]:
    """Return the unfinished runs that have timed a variant of this name: they count as attempts too."""
    groups = ((file.run_id, line) for file in files if file.unfinished for line in file.work if line["kind"] == "group")
    return {run_id for run_id, line in groups if variant in line["outcomes"]}


def check(line: dict) -> None:
    """Raise ValueError unless a line of work is as those that read it rely on."""
    try:
        _LINES[line["kind"]].validate_python(line)
    except ValidationError as error:
        raise ValueError(schema.said_of(error)) from None


_OUTCOME, _GROUP = TypeAdapter(Outcome), TypeAdapter(Group)
# By kind the fields that are read of such a line.
_FIELDS: dict[str, dict[str, Any]] = {
    "outcome": {"submission": str, "case": int, "outcome": Outcome},
    "audit": {"submissions": dict[str, Audit]},
    "confirm": {"challenger": str, "leader": dict, "opponent": str | None},
    "resumed": {},
}
_LINES: dict[str, TypeAdapter] = {"group": _GROUP} | {
    kind: TypeAdapter(dataclasses.make_dataclass(kind, fields.items())) for kind, fields in _FIELDS.items()
}
