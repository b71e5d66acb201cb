"""The bounds on a claimed time: what the datasheet and the empty call allow, and what the judge's clock saw."""

import random

import pytest

from harness.judge import readings
from harness.judge.outcome import Outcome
from harness.judge.readings import OUTSIDE, READY, CaseReadings, ReferenceReadings, Timing
from harness.problem.folders import Case
from harness.results.datasheet import RATES

US = {"bytes": 1.0, "flops": 1.0, "empty": 1.0}  # what each would take; one of them 100 times as long


def bound(gpu: str, bytes_us: float, flops_us: float | None, empty_us: float) -> float:
    """The bound where bytes and operations take so many us at the datasheet's rates. flops_us: None, not known."""
    rates = RATES[gpu]
    flops = None if flops_us is None else round(rates[1] * flops_us / 1e6)
    found = ReferenceReadings(1e6, "read 0", "read", empty_us, round(rates[0] * bytes_us / 1e6), [])
    return readings.sol_us(Case({"n": 1}, 1, flops=flops), found, f"NVIDIA {gpu} SXM")


@pytest.mark.parametrize("gpu", RATES)
@pytest.mark.parametrize("longest", US)
def test_bytes_operations_and_the_empty_call_each_bound_a_time(gpu, longest):
    assert bound(gpu, *(US | {longest: 100.0}).values()) == pytest.approx(95, rel=1e-6)
    assert bound(gpu, *(dict.fromkeys(US, 0.0) | {longest: 100.0}).values()) == pytest.approx(95, rel=1e-6)


@pytest.mark.parametrize("gpu", RATES)
def test_operations_that_nobody_states_bound_nothing(gpu):
    assert bound(gpu, 1.0, None, 10.0) == pytest.approx(9.5)


@pytest.mark.parametrize("gpu", [None, "an unknown GPU"])
def test_without_a_datasheet_there_is_no_bound(gpu):
    found = ReferenceReadings(1.0, "read 0", "read", 100.0, 10**12, [])
    assert readings.sol_us(Case({"n": 1}, 1, flops=10**15), found, gpu) == 0.0


def claimed(share: float, us: float, jitter_us: float, processes: int = 3, every: int = 1) -> tuple[Timing, dict]:
    """Calls that take `us` and claim that share of it, but for every `every`-th, which is honest (1: all claim it), as
    the judge's clock sees them, 80 us longer; and the judge's readings beside them.
    """
    rng = random.Random(0)
    case = Case({"n": 1}, 1)

    def call(number: int) -> Outcome:
        claim = us if every > 1 and number % every == 0 else share * us
        return Outcome("PASSED", us=claim, ready_us=50.0, outside_us=us + 80 + rng.expovariate(1 / jitter_us))

    timing = Timing(case, [[call(n) for n in range(12)] for _ in range(processes)])
    own = {"empty": [3.0] * 40, OUTSIDE: [83 + rng.expovariate(1 / jitter_us) for _ in range(40)], READY: [50.0] * 40}
    return timing, own | {"read 0": [10.0] * 40}


def judged(timing: Timing, own: dict) -> Timing:
    readings.reference(CaseReadings(timing.case, 1, own), [timing], "cuda", [])
    return timing


@pytest.mark.parametrize("us", [5.0, 100.0, 20_000.0])
def test_honest_calls_are_scored_on_a_quiet_and_on_a_busy_machine(us):
    for jitter_us in (1.0, 10.0, 100.0):
        timing = judged(*claimed(1.0, us, jitter_us))
        assert timing.failure is None
        assert len(timing.flat("us")) >= 30


@pytest.mark.parametrize("every", [1, 4])
def test_a_claim_that_is_too_short_by_more_than_the_clock_scatters_is_no_record(every):
    for us, share in ((1000.0, 0.5), (4000.0, 0.85), (20_000.0, 0.9)):
        failure = judged(*claimed(share, us, 5.0, every=every)).failure
        assert failure is not None and failure.status in ("INVALID_MEASUREMENT", "CHEAT_SUSPECTED"), (us, share)


def test_a_call_that_the_clock_contradicts_has_no_score_and_takes_its_pair_along():
    timing, own = claimed(1.0, 100.0, 5.0)
    late = timing.outcomes[1][4]
    late.us, late.outside_us = 20.0, 900.0
    other, _ = claimed(1.0, 200.0, 5.0)
    judged(timing, own)
    assert timing.failure is None
    assert 20.0 not in timing.flat("us") and len(timing.samples[1]) == 11
    assert [len(pairs) for pairs in readings.ratios(timing, other)] == [12, 11, 12]
    assert timing.outcomes[1][4].contradicted and not other.outcomes[1][4].contradicted


def test_honest_processes_excuse_no_other():
    timing, own = claimed(1.0, 1000.0, 5.0)
    timing.outcomes[2] = claimed(0.5, 1000.0, 5.0)[0].outcomes[2]
    failure = judged(timing, own).failure
    assert failure is not None and failure.status == "INVALID_MEASUREMENT" and "12 of 36 calls" in failure.reason


def test_a_machine_that_is_busy_throughout_contradicts_nobody():
    timing, own = claimed(1.0, 50.0, 400.0)
    assert judged(timing, own).failure is None


def test_fp4_on_both_sides_is_bound_by_its_own_rate():
    found = ReferenceReadings(1.0, "read 0", "read", 0.0, 0, [])
    for activation, us in (("nvfp4", 95.0), ("bf16", 380.0)):
        case = Case({"activation": activation}, 1, flops=9 * 10**11)
        assert readings.sol_us(case, found, "NVIDIA B200") == pytest.approx(us)
