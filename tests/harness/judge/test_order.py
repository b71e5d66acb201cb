"""Times that are shorter where another submission had the contents before are refused; honest ones never are."""

import dataclasses
import itertools
import random

import pytest
from pydantic import TypeAdapter

from harness.judge import order, phases
from harness.judge.call import CallRequest
from harness.judge.handle import RunnerHandle
from harness.judge.outcome import Outcome
from harness.judge.phases import Plan
from harness.judge.readings import Timing, ratios
from harness.problem.folders import Case, Submission
from tests.harness.judge.test_phases import Counting, case

GROUP = TypeAdapter(phases.Group)
NAMES = ("a", "b", "c", "d", "e")


def run(
    us=100.0, heard=None, hears=(), names=NAMES[:2], processes=6, samples=3, cases=1, noise=0.02, cheats=None, rng=None
):
    """The timings of a run. us: of a call; heard: of one of `hears` on contents that another of `hears` had before.
    cheats: the cases in which they do it, by default all.
    """
    rng = rng or random.Random(0)
    timings = {name: [Timing(Case({"n": n}, 1), []) for n in range(cases)] for name in names}
    for number, process in itertools.product(range(cases), range(processes)):
        level = rng.lognormvariate(0, noise)
        for name in names:
            timings[name][number].outcomes.append([])
        for sample in range(samples):
            turn = [names[place] for place in phases.turned(list(range(len(names))), sample + process * (samples | 1))]
            for place, name in enumerate(turn):
                before = turn[:place]
                told = name in hears and (cheats is None or number in cheats) and any(x in hears for x in before)
                took = (heard if told else us) * level * rng.lognormvariate(0, noise)
                timings[name][number].outcomes[-1].append(Outcome("PASSED", us=took, host_us=took, after=before))
    return timings


def submissions(count: int) -> list[RunnerHandle]:
    return [RunnerHandle(name, Submission(name, None, ("cpu",)), "cpu") for name in NAMES[:count]]


def refused(timings) -> dict[str, int]:
    """In how many cases the times of each are refused, where some are."""
    order.settle(timings)
    found = {name: [t.failure for t in of_cases if t.failure] for name, of_cases in timings.items()}
    assert all(one.status == "INVALID_MEASUREMENT" for failures in found.values() for one in failures)
    return {name: len(failures) for name, failures in found.items() if failures}


def test_one_that_hears_the_answers_is_refused_and_the_text_says_what_was_seen():
    timings = run(1825.0, 240.0, ("a", "b"), noise=0.0)
    assert refused(timings) == {"a": 1, "b": 1}
    said = timings["b"][0].failure.reason
    assert "contents that a had before take 240 us, the others 1825 us (9 and 9 calls)" in said


@pytest.mark.parametrize(("processes", "samples"), [(6, 3), (40, 24)])  # of a pair on a CPU and on a GPU
@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_a_pair_is_refused_in_the_cases_that_show_it(processes, samples, noise):
    timings = run(100.0, 60.0, ("a", "b"), processes=processes, samples=samples, noise=noise, cases=5, cheats=(1, 3))
    assert refused(timings) == {"a": 2, "b": 2}
    assert [bool(t.failure) for t in timings["a"]] == [False, True, False, True, False]


def test_two_or_three_of_many_are_refused():
    for hears in (("b", "d"), ("b", "c", "d")):
        timings = run(100.0, 30.0, hears, NAMES[:4], processes=6, samples=10, cases=3)
        assert refused(timings) == dict.fromkeys(hears, 3)


def test_many_cases_make_up_for_few_calls():
    """Nine calls of each case, as on a CPU without --against."""
    assert refused(run(100.0, 30.0, ("a", "b"), processes=3, cases=4)) == {"a": 4, "b": 4}


def test_of_few_calls_only_those_whose_contents_were_new_have_a_score():
    timings = run(100.0, 30.0, ("a", "b"), processes=3)
    assert refused(timings) == {}
    assert all(90 < timing.median_us < 110 for (timing,) in timings.values())
    assert ratios(*(timing for (timing,) in timings.values())) == [], "each is second in one half of the calls"


@pytest.mark.parametrize("noise", [0.005, 0.05, 0.3])
def test_no_honest_run_is_refused(noise):
    rng = random.Random(1)
    for _ in range(1000):
        assert refused(run(noise=noise, rng=rng)) == {}


def test_no_honest_run_of_many_is_refused():
    rng = random.Random(2)
    for _ in range(20):
        assert refused(run(names=NAMES[:4], processes=3, cases=4, noise=0.3, rng=rng)) == {}
        assert refused(run(names=NAMES[:4], processes=6, samples=10, noise=0.3, rng=rng)) == {}


def test_an_honest_difference_that_is_small_is_none_however_sure():
    assert refused(run(100.0, 85.0, ("a", "b"), processes=40, samples=24, noise=0.001)) == {}


def test_outcomes_that_do_not_know_their_order_say_nothing():
    timings = run(100.0, 30.0, ("a", "b"))
    for (timing,) in timings.values():
        for group in timing.outcomes:
            for outcome in group:
                outcome.after = None
    assert refused(timings) == {}


@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 3), (4, 4), (5, 2)])
def test_the_chance_is_the_share_of_all_orders(n, m):
    orders = [set(chosen) for chosen in itertools.combinations(range(n + m), n)]
    u = [sum(i > j for i in chosen for j in range(n + m) if j not in chosen) for chosen in orders]
    for chosen, mine in zip(orders, u, strict=True):
        found = order.Split([float(i) for i in chosen], [float(i) for i in range(n + m) if i not in chosen])
        assert order.chance([found]) == pytest.approx(sum(other <= mine for other in u) / len(u))


def test_the_chance_of_many_calls_is_that_of_the_normal_distribution(monkeypatch):
    rng = random.Random(3)
    found = [order.Split([rng.gauss(-0.5, 1) for _ in range(40)], [rng.gauss(0, 1) for _ in range(40)])]
    exact = order.chance(found)
    monkeypatch.setattr(order, "EXACT", 0)
    assert order.chance(found) == pytest.approx(exact, rel=0.1)


def test_equal_times_and_calls_of_one_kind_say_nothing():
    assert order.chance([order.Split([1.0] * 9, [1.0] * 9)]) > 0.5
    assert order.chance([order.Split([1.0] * 9, [])]) == order.chance([]) == 1.0


@pytest.mark.parametrize(("handles", "paired", "processes"), [(2, True, 6), (2, True, 2), (2, False, 4), (5, False, 4)])
def test_each_is_called_after_each_other_one_in_half_of_its_calls(handles, paired, processes):
    how = Plan(processes=processes, samples=3, warmups=1, buffers=2, audits=0, together=1)
    timings, _ = phases.run_benchmarks(
        Counting(), submissions(handles), [case(1), case(1)], lambda _: None, paired, how=how
    )
    for one, other in itertools.permutations(timings, 2):
        for timing in timings[one]:
            calls = [outcome for group in timing.outcomes for outcome in group]
            assert sum(other in (outcome.after or ()) for outcome in calls) * 2 == len(calls)


class Telling(Counting):
    """All submissions pass their answers to each other: a call on contents that another one had takes no time."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.device, self.seed, self.told = device, 0, ""

    def content(self, case: Case, seed: int | None = None) -> str:
        self.seed += 1
        return str(self.seed)

    def call(self, handle: RunnerHandle, request: CallRequest) -> Outcome:
        made = super().call(handle, request)
        if handle.name == phases.JUDGE:
            return made
        us, self.told = 1000.0 if self.told != str(self.seed) else 100.0, str(self.seed)
        return dataclasses.replace(made, us=us + random.random())


@pytest.mark.parametrize(("count", "paired"), [(2, True), (2, False), (3, False)])
@pytest.mark.parametrize("resumed", [False, True])
def test_no_run_gives_a_time_to_those_that_pass_answers_to_each_other(count, paired, resumed):
    """Nor one that takes groups from the file of its run, as JSON has them."""
    told, cases = {}, [case(1)] * 3

    def group(found: phases.Group) -> None:
        told[found.process, found.case, found.part] = GROUP.validate_json(GROUP.dump_json(found))

    found, _ = phases.run_benchmarks(Telling(), submissions(count), cases, lambda _: None, paired, group)
    if resumed:
        told.popitem()
        have = phases.Finished(groups=told)
        found, _ = phases.run_benchmarks(Telling(), submissions(count), cases, lambda _: None, paired, have=have)
    for name, timings in found.items():
        for timing in timings:
            if count == 2:
                assert timing.failure and "must not depend on who was called before it" in timing.failure.reason
            else:  # of nine calls three come first
                assert timing.failure or timing.median_us > 900, name
