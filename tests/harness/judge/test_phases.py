"""Which processes of a benchmark are alive at once, how often each is called and in which order, and what a resumed run
does again.
"""

import dataclasses
from types import SimpleNamespace

import pytest

from harness.judge import phases
from harness.judge.handle import RunnerHandle
from harness.judge.outcome import Outcome
from harness.judge.phases import JUDGE, Counts
from harness.judge.session import CallRequest, Step
from harness.problem import folders
from harness.problem.folders import Case, Submission
from problems.common import load


class Counting:
    """A session in which nothing runs: it knows who is alive, and answers each call at once."""

    device = "cpu"

    def __init__(self, ours: bool = True) -> None:
        self.problem = SimpleNamespace(tests=(), ours=ours)
        self.alive: set[str] = set()
        self.waves: list[int] = []  # processes of submissions that were started together
        self.called: dict[str, int] = {}
        self.steps: list[Step] = []
        self.progress = self.steps.append

    def build(self, *handles: RunnerHandle) -> None:
        pass

    def start(self, *handles: RunnerHandle) -> None:
        assert not self.alive, "the processes before are stopped first"
        self.alive = {handle.runner for handle in handles}
        self.waves.append(len(self.alive - {JUDGE}))

    def stop(self, *handles: RunnerHandle) -> None:
        self.alive -= {handle.runner for handle in handles}

    def weights(self, case: Case) -> str:
        return "1"

    content = weights

    def call(self, handle: RunnerHandle, request: CallRequest) -> Outcome:
        assert handle.runner in self.alive
        self.called[handle.runner] = self.called.get(handle.runner, 0) + 1
        return Outcome("PASSED", us=1.0, host_us=1.0)


def submissions(*names: str) -> list[RunnerHandle]:
    return [RunnerHandle(name, Submission(name, None, ("cpu",)), "cpu") for name in names]


@pytest.mark.parametrize("paired", [False, True])
def test_one_process_of_each_is_alive_and_each_is_called_as_often_as_planned(paired):
    session, made = Counting(), submissions("a", "b")
    how = Counts(processes=3, samples=4, warmups=1, buffers=2, paired=paired)
    phases.run_benchmarks(session, made, [case(250), case(1)], how)
    assert session.alive == set() and session.waves == [2] * 3
    session.called.pop(JUDGE)
    names = {f"{handle.name} {process}" for handle in made for process in range(how.processes)}
    unscored = 2  # rounds: after other weights, and where memory is measured
    assert session.called == dict.fromkeys(names, 2 * (how.warmups + how.samples + unscored))


def case(weight_bytes: int) -> Case:
    return Case({"n": 1}, 1, bytes=1, weight_bytes=weight_bytes)


def test_a_resumed_run_knows_who_failed_in_a_group_that_was_finished():
    """It is not called again on that case, in no process; on others it is, and the other submission on all."""
    how = Counts(processes=2, samples=3, warmups=1, buffers=2)
    handles = submissions("bad", "good")
    right, wrong = Outcome("PASSED", us=1.0, host_us=1.0), Outcome("INCORRECT", "mismatch")
    finished = phases.Group(0, 0, {"bad": [right, wrong], "good": [right] * 3}, {"empty": [1.0]}, ["1"])
    session = Counting()
    have = phases.Finished(groups={(0, 0, 0): finished})
    timings, _ = phases.run_benchmarks(session, handles, [case(1), case(2)], how, have=have)
    assert [timing.failure for timing in timings["bad"]] == [wrong, None]
    assert [timing.failure for timing in timings["good"]] == [None, None]
    assert [[len(calls) for calls in timing.outcomes] for timing in timings["bad"]] == [[1, 0], [3, 3]]
    of_case = session.called["bad 0"]  # calls of one case
    assert [session.called[name] for name in ("good 0", "bad 1", "good 1")] == [of_case, of_case, 2 * of_case]


def test_a_case_takes_over_what_its_task_says():
    found = folders.find("moe_gemm")
    task, reference = (load.module(found.folder, name) for name in ("task", "reference"))
    assert [c.weight_bytes for c in found.tests] == [spec.weight_bytes() for spec in task.TESTS]
    for spec in (spec for spec in task.TESTS if spec.experts < 100):
        tensors = reference.generate_weights(**vars(spec), device="cpu")[:-1]  # without the name of the activation
        held = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        assert held == spec.weight_bytes() + 4 * 4 * spec.experts, "and four fp32 an expert, which are not counted"


class Late(Counting):
    """Of each process so many calls are ones after which it was told too late to stop."""

    def __init__(self, late: int) -> None:
        super().__init__()
        self.late = late

    def call(self, handle: RunnerHandle, request: CallRequest) -> Outcome:
        made = super().call(handle, request)
        late = handle.name != JUDGE and 1 < self.called[handle.runner] <= 1 + self.late  # the first one is not scored
        return dataclasses.replace(made, us=100.0, late=True) if late else made


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("late", [2, 3])
def test_calls_stopped_late_are_repeated_twice_then_invalid(paired, late):
    made = submissions(*(f"submission{i}" for i in range(1 + paired)))
    how = Counts(processes=2, samples=10, warmups=0, buffers=2, extra=20, paired=paired)
    timings, _ = phases.run_benchmarks(Late(late), made, [case(0)], how)
    for (timing,) in timings.values():
        if late == 3:
            assert timing.failure.status == "INVALID_MEASUREMENT"
            assert "over 500 us after their end" in timing.failure.reason
        else:
            assert not timing.failure and [len(outcomes) for outcomes in timing.outcomes] == [10, 10]
            assert len(set(timing.flat("us"))) == 1, "no late call is among them"


def test_busy_calls_fill_up_their_own_case_alone():
    session, us = Counting(), iter(range(99))
    session.call = lambda *_: Outcome("PASSED", us=1.0, host_us=next(us), busy=True)
    how = Counts(processes=1, samples=3, warmups=0, buffers=2, extra=4)
    first, second = phases.run_benchmarks(session, submissions("a"), [case(0), case(1)], how)[0]["a"]
    assert max(first.flat("host_us")) < min(second.flat("host_us"))


def test_order_of_calls_puts_each_before_each_other_in_half_of_the_rounds():
    called: list[list[str]] = [[]]

    class Told(Counting):
        def content(self, case: Case) -> str:
            called.append([])
            return "1"

        def call(self, handle: RunnerHandle, request: CallRequest) -> Outcome:
            called[-1] += [handle.name[0]] if handle.name != JUDGE else []
            return super().call(handle, request)

    made = submissions(*"abc")
    how = Counts(processes=4, samples=3, warmups=0, buffers=2)
    session = Told()
    session.weights = lambda case: ""
    phases.run_benchmarks(session, made, [Case({"n": 1}, 1, bytes=1)], how)
    rounds = ["".join(names) for names in called if len(names) == 3]
    assert len(rounds) == 12 and rounds[:2] == ["abc", "cba"]
    for one, other in ("ab", "ac", "bc"):
        assert sum(names.index(one) < names.index(other) for names in rounds) == 6, rounds
