"""The two phases of a judgement: every test case once, then fixed numbers of timed calls on the benchmark cases.

All entrants get equal contents, one after the other in a random order, so what drifts falls on all of them. Each
timed call is checked; its seed is drawn after the call before it was closed.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from harness import environment, native, stats
from harness.problem import Case
from harness.session import Entrant, Outcome, Session

PROCESSES = 3
SAMPLES = {"cuda": 20, "cpu": 3}  # timed calls a process: 60 and 9 in all
PAIRS = {"cuda": 40, "cpu": 3}  # the same for a paired run
SLOTS = {"cuda": 3, "cpu": 2}  # addresses that calls rotate over
# Calls that compile, show the enqueue time and touch every slot once; checked like all others.
WARMUPS = {"cuda": 3, "cpu": 1}
# Bytes a second and flops a second of the datasheet (dense; bf16), by what a GPU's name contains.
DATASHEET = {"H200": (4.8e12, 989e12), "B200": (8.0e12, 2250e12), "H100": (3.35e12, 989e12)}
UNKNOWN_DEVICE = 1.1  # times the best rate measured in the run, where there is no datasheet rate
FLOOR_SHARE = 0.95  # of the physical bound: a time below it is no measurement
JUDGE = "(judge)"

Progress = Callable[[str], None]


@dataclass
class Timing:
    """One entrant's timed calls on one case; the lists hold one list per process."""

    case: Case
    outcomes: list[list[Outcome]] = field(default_factory=list)
    failure: Outcome | None = None

    @property
    def samples(self) -> list[list[float]]:
        return [[o.us for o in group] for group in self.outcomes if group]

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
class Ground:
    """What the judge measured beside the entrants on one case, under the same clock, in us."""

    roof_us: float
    roof_config: str
    empty_us: float
    bytes: int
    seeds: list[str]
    clocks_mhz: dict | None
    throttle: list[str] | None


def run_tests(
    session: Session, entrants: list[Entrant], cases: list[Case], done: Callable[[Entrant, Case, Outcome], None],
    progress: Progress,
) -> dict[str, list[Outcome]]:  # fmt: skip
    """Every entrant on every case, once. -> outcomes by entrant, in the order of the cases."""
    results: dict[str, list[Outcome]] = {entrant.name: [] for entrant in entrants}
    session.start(*entrants)
    for number, case in enumerate(cases, 1):
        session.content(case, case.seed)
        for entrant in entrants:
            progress(f"test {number}/{len(cases)}  {case}  {entrant.name}")
            outcome = session.call(entrant, 1)
            results[entrant.name].append(outcome)
            done(entrant, case, outcome)
    session.stop(*entrants)
    return results


def run_benchmarks(
    session: Session, entrants: list[Entrant], cases: list[Case], progress: Progress, paired: bool = False
) -> tuple[dict[str, list[Timing]], list[Ground]]:
    """Timed calls of every entrant on every case. -> (timings by entrant, the judge's own readings by case)."""
    device = session.device
    samples = (PAIRS if paired else SAMPLES)[device]
    judge = Entrant(JUDGE, None, device)
    reads = {f"read {i}": i for i in range(native.read_configs(device))}
    timings = {entrant.name: [Timing(case) for case in cases] for entrant in entrants}
    own: list[dict[str, list[float]]] = [{} for _ in cases]
    seeds: list[list[str]] = [[] for _ in cases]
    states: list[tuple] = [(None, None)] * len(cases)
    for entrant in entrants:
        entrant.lost = 0
    for process in range(PROCESSES):
        session.start(judge, *entrants)
        for number, case in enumerate(cases):
            for entrant in entrants:
                timings[entrant.name][number].outcomes.append([])
            for sample in range(-WARMUPS[device], samples):
                progress(f"process {process + 1}/{PROCESSES}  {case}  call {max(sample + 1, 0)}/{samples}")
                seeds[number].append(session.content(case))
                for entrant in _order(entrants, sample, paired):
                    timing = timings[entrant.name][number]
                    if timing.failure:
                        continue
                    outcome = session.call(entrant, SLOTS[device])
                    if outcome.status != "PASSED":
                        timing.failure = outcome
                    elif sample >= 0:
                        timing.outcomes[-1].append(outcome)
                for what in ("empty", *reads):
                    outcome = session.call(judge, SLOTS[device], what, reads)
                    if outcome.status != "PASSED":
                        raise RuntimeError(f"the judge's own call {what!r} failed: {outcome.reason}")
                    if sample >= 0:
                        own[number].setdefault(what, []).append(outcome.us)
            if device == "cuda":
                states[number] = environment.clocks()
        session.stop(judge, *entrants)
    grounds = []
    for number, case in enumerate(cases):
        medians = {what: stats.median(times) for what, times in own[number].items()}
        empty = medians.pop("empty")
        best = min(medians, key=medians.get)
        nbytes = case.bytes or session.default_bytes()
        grounds.append(Ground(medians[best], best, empty, nbytes, seeds[number], *states[number]))
    return timings, grounds


def floor_us(case: Case, ground: Ground, gpu: str | None) -> float:
    """What no call can undercut, in us: bytes or flops at the datasheet's rate, or the empty call; of that, 95 %."""
    known = next((rates for name, rates in DATASHEET.items() if gpu and name in gpu), None)
    if known is None:
        return FLOOR_SHARE * max(ground.roof_us / UNKNOWN_DEVICE, ground.empty_us)
    flops_us = (case.flops or 0) / known[1] * 1e6
    return FLOOR_SHARE * max(ground.bytes / known[0] * 1e6, flops_us, ground.empty_us)


def ratios(one: Timing, other: Timing) -> list[list[tuple[float, float]]]:
    """Pairs of times on equal contents, by process."""
    return [
        [(a.us, b.us) for a, b in zip(mine, theirs, strict=True)]
        for mine, theirs in zip(one.outcomes, other.outcomes, strict=True)
    ]


def _order(entrants: list[Entrant], sample: int, paired: bool) -> list[Entrant]:
    if paired:
        return entrants if sample % 2 == 0 else entrants[::-1]  # A B B A
    return random.sample(entrants, len(entrants))
