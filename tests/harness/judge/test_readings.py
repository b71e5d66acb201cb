"""The bound on a claimed time: what the datasheet and the empty call allow."""

import pytest

from harness.judge import readings
from harness.judge.readings import ReferenceReadings
from harness.problem.folders import Case
from harness.results.datasheet import RATES

US = {"bytes": 1.0, "flops": 1.0, "empty": 1.0}  # what each would take; one of them 100 times as long


def bound(gpu: str, bytes_us: float, flops_us: float | None, empty_us: float) -> float:
    """The bound where bytes and operations take so many us at the datasheet's rates. flops_us: None, not known."""
    rates = RATES[gpu]
    flops = None if flops_us is None else round(rates[1] * flops_us / 1e6)
    found = ReferenceReadings(1e6, "read 0", "read", empty_us, round(rates[0] * bytes_us / 1e6), [], None, None)
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
    found = ReferenceReadings(1.0, "read 0", "read", 100.0, 10**12, [], None, None)
    assert readings.sol_us(Case({"n": 1}, 1, flops=10**15), found, gpu) == 0.0


def test_fp4_on_both_sides_is_bound_by_its_own_rate():
    found = ReferenceReadings(1.0, "read 0", "read", 0.0, 0, [], None, None)
    for activation, us in (("nvfp4", 95.0), ("bf16", 380.0)):
        case = Case({"activation": activation}, 1, flops=9 * 10**11)
        assert readings.sol_us(case, found, "NVIDIA B200") == pytest.approx(us)
