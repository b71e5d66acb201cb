"""How many processes of a benchmark are alive at once where each prepares weights; and which measured roofline a case
has.
"""

import dataclasses
from types import SimpleNamespace

import pytest

from harness.judge import phases
from harness.judge.call import CallRequest
from harness.judge.handle import RunnerHandle
from harness.judge.outcome import Outcome
from harness.judge.phases import JUDGE, Counts
from harness.problem import folders
from harness.problem.folders import Case, Submission, UsageError
from harness.runner import matmul
from problems.common import load
from tests.support import SUPPORT

LINEAR = SUPPORT / "problems" / "linear"
ROOM = 1000  # bytes that all processes alive at once may have prepared, here
MEMORY = 2**32  # of the session below
H100, H200 = (85_017_000_000, 150_120_000_000)  # bytes of memory, as the driver says


class Counting:
    """A session in which nothing runs: it knows who is alive, and answers each call at once."""

    device = "cpu"
    problem = SimpleNamespace(tests=(), ours=True)

    def __init__(self, memory: int = MEMORY) -> None:
        self.memory = lambda: memory
        self.alive: set[str] = set()
        self.waves: list[int] = []  # processes of submissions that were started together
        self.called: dict[str, int] = {}

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
        return Outcome("PASSED", us=1.0, host_us=1.0, ready_us=1.0, outside_us=1.0)


def waves(cases: list[Case], handles: int, how: Counts, memory: int = MEMORY) -> list[int]:
    """How many processes of submissions a benchmark has alive, wave by wave; each is called as often as `how` says."""
    session = Counting(memory)
    made = [RunnerHandle(f"submission{i}", Submission(f"submission{i}", None, ("cpu",)), "cpu") for i in range(handles)]
    phases.run_benchmarks(session, made, cases, lambda _: None, how)
    assert session.alive == set()
    session.called.pop(JUDGE)
    names = {f"{handle.name} {process}" for handle in made for process in range(how.processes)}
    unscored = 2  # rounds on a CPU: after other weights, and where memory is measured
    assert session.called == dict.fromkeys(names, len(cases) * (how.warmups + how.samples + unscored))
    return session.waves


def case(weight_bytes: int) -> Case:
    return Case({"n": 1}, 1, bytes=1, weight_bytes=weight_bytes)


@pytest.mark.parametrize(
    ("weights", "handles", "wanted"),
    [
        ([250], 1, [4, 4, 2]),
        ([300], 1, [3, 3, 3, 1]),
        ([500], 1, [2] * 5),
        ([501], 1, [1] * 10),
        # Each submission's processes prepare, and they live through all cases: the one with the most counts.
        ([250], 2, [4] * 5),
        ([100], 3, [9, 9, 9, 3]),
        ([100, 400, 0], 1, [2] * 5),
        # Never fewer than one: then submissions take part after part, as many at once as there is room for.
        ([5000], 1, [1] * 10),
        ([501], 2, [1] * 20),
        ([400], 5, [2, 2, 1] * 10),
        ([334], 3, [2, 1] * 10),
        ([333], 3, [3] * 10),
        # Nor more than the plan has, and as many as that where no case says what its weights take.
        ([1], 1, [8, 2]),
        ([0], 1, [8, 2]),
        ([0, 0], 5, [40, 10]),
    ],
)
def test_no_more_are_alive_than_their_weights_leave_room_for(monkeypatch, weights, handles, wanted):
    monkeypatch.setattr(phases, "PREPARED_SHARE", ROOM / MEMORY)
    how = Counts(processes=10, samples=1, warmups=1, buffers=2, audits=0, together=8)
    assert waves([case(n) for n in weights], handles, how) == wanted


def test_the_two_of_a_pair_are_never_parted(monkeypatch):
    monkeypatch.setattr(phases, "PREPARED_SHARE", ROOM / MEMORY)
    how = Counts(processes=10, samples=1, warmups=1, buffers=2, audits=0, together=8, paired=True)
    assert waves([case(500)], 2, how) == [2] * 10
    assert waves([case(250)], 2, how) == [4] * 5
    with pytest.raises(UsageError, match="leave it out with --case"):
        waves([case(501)], 2, how)


def test_parts_of_the_submissions_are_resumed_each_by_itself(monkeypatch):
    """What was told of a run goes into the next, but for one group of the second part: that part alone runs again."""
    monkeypatch.setattr(phases, "PREPARED_SHARE", ROOM / MEMORY)
    how = Counts(processes=2, samples=3, warmups=1, buffers=2, audits=0, together=8)
    cases, told = [case(400), case(10)], {}

    def handles() -> list[RunnerHandle]:
        return [RunnerHandle(f"submission{i}", Submission(f"submission{i}", None, ("cpu",)), "cpu") for i in range(3)]

    def group(found: phases.Group) -> None:
        told[found.process, found.case, found.part] = found

    session = Counting()
    whole = phases.run_benchmarks(session, handles(), cases, lambda _: None, how, group)
    assert session.waves == [2, 1, 2, 1] and set(told) == {(p, n, k) for p in (0, 1) for n in (0, 1) for k in (0, 1)}
    assert [set(told[0, 0, k].outcomes) for k in (0, 1)] == [{"submission0", "submission1"}, {"submission2"}]
    missing = {at: found for at, found in told.items() if at != (1, 0, 1)}
    again = Counting()
    timings, all_readings = phases.run_benchmarks(
        again, handles(), cases, lambda _: None, how, have=phases.Finished(groups=missing)
    )
    assert again.waves == [1] and {name for name in again.called if name != JUDGE} == {"submission2 1"}
    for name, of_cases in whole[0].items():
        assert [[len(calls) for calls in timing.outcomes] for timing in of_cases] == [[3, 3], [3, 3]], name
        assert [timing.outcomes for timing in timings[name]] == [timing.outcomes for timing in of_cases], name
    assert all_readings == whole[1]


def test_a_resumed_run_knows_who_failed_in_a_group_that_was_finished():
    """It is not called again on that case, in no process; on others it is, and the other submission on all."""
    how = Counts(processes=2, samples=3, warmups=1, buffers=2, audits=0)
    handles = [RunnerHandle(name, Submission(name, None, ("cpu",)), "cpu") for name in ("bad", "good")]
    right, wrong = Outcome("PASSED", us=1.0, host_us=1.0), Outcome("INCORRECT", "mismatch")
    finished = phases.Group(0, 0, {"bad": [right, wrong], "good": [right] * 3}, {"empty": [1.0]}, ["1"])
    session = Counting()
    timings, _ = phases.run_benchmarks(
        session,
        handles,
        [case(1), case(2)],
        lambda _: None,
        how,
        have=phases.Finished(groups={(0, 0, 0): finished}),
    )
    assert [timing.failure for timing in timings["bad"]] == [wrong, None]
    assert [timing.failure for timing in timings["good"]] == [None, None]
    assert [[len(calls) for calls in timing.outcomes] for timing in timings["bad"]] == [[1, 0], [3, 3]]
    of_case = session.called["bad 0"]  # calls of one case
    assert (session.called["good 0"], session.called["bad 1"], session.called["good 1"]) == (
        of_case,
        of_case,
        2 * of_case,
    )


@pytest.mark.parametrize(
    ("handles", "paired", "memory", "wanted"),
    [(1, False, H200, 2), (3, False, H200, 2), (2, True, H200, 2), (1, False, H100, 1), (3, False, H100, 1)],
)
def test_weights_of_v4_pro_are_prepared_by_few_at_once(handles, paired, memory, wanted):
    """14.3 GB each, and the judge has several times as much. Without a word, all."""
    how = dataclasses.replace(phases.COUNTS["cuda", paired], samples=1, warmups=1, audits=0)
    cases = list(folders.find("moe_gemm").benchmarks["cuda"])
    prepared = max(c.params["experts"] * c.params["hidden"] * c.params["inner"] for c in cases) * 3 * 9 / 16
    assert prepared > 14e9
    assert max(waves(cases, handles, how, memory)) == wanted
    assert max(waves([case(0)], handles, how)) == how.together * handles


def test_a_case_takes_over_what_its_task_says():
    found = folders.find("moe_gemm")
    task, reference = (load.module(found.folder, name) for name in ("task", "reference"))
    assert [c.weight_bytes for c in found.tests] == [spec.weight_bytes() for spec in task.TESTS]
    for spec in (spec for spec in task.TESTS if spec.experts < 100):
        tensors = reference.generate_weights(**vars(spec), device="cpu")[:-1]  # without the name of the activation
        held = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        assert held == spec.weight_bytes() + 4 * 4 * spec.experts, "and four fp32 an expert, which are not counted"


class Readings(Counting):
    """Of a GPU on which every reader takes 100 us and the matrix product 2000; contents move 1000 bytes, then 1002."""

    device = "cuda"

    def __init__(self) -> None:
        super().__init__()
        self.matmuls = self.turn = 0

    def call(self, handle: RunnerHandle, request: CallRequest) -> Outcome:
        self.matmuls += request.judge_call == matmul.NAME
        self.turn += handle.name != JUDGE
        us = {matmul.NAME: 2000.0, "empty": 3.0}.get(request.judge_call, 100.0)
        return Outcome("PASSED", us=us, host_us=1.0, ready_us=1.0, outside_us=us, bytes=1000 + 2 * (self.turn % 2))


def all_readings(monkeypatch, flops: list[int | None], how: Counts, have: phases.Finished = phases.NOTHING) -> tuple:
    """-> (what the judge measured of cases with these operations, the session, the groups it was told of)."""
    monkeypatch.setattr(phases.native, "read_configs", lambda _: 2)
    monkeypatch.setattr(phases.environment, "gpu_state", phases.environment.GpuState)
    session, told = Readings(), {}

    def group(found: phases.Group) -> None:
        told[found.process, found.case, found.part] = found

    cases = [Case({"n": i}, 1, bytes=5, flops=count) for i, count in enumerate(flops)]
    handle = RunnerHandle("submission0", Submission("submission0", None, ("sm90",)), "sm90")
    _, found = phases.run_benchmarks(session, [handle], cases, lambda _: None, how, group, have)
    return found, session, told


HOW = Counts(processes=4, samples=2, warmups=1, buffers=2, audits=0, together=2)


def test_the_roof_is_the_larger_of_bytes_and_operations(monkeypatch):
    rate = matmul.flops("cuda") / 2000  # operations a microsecond
    found, session, _ = all_readings(monkeypatch, [round(50 * rate), round(300 * rate), None], HOW)
    assert [g.roofline_kind for g in found] == ["read", "flops", "read"]
    assert [g.roofline_us for g in found] == pytest.approx([100, 300, 100], rel=1e-6)
    assert found[1].roofline_config == f"matmul at {rate / 1e6:.0f} TFLOP/s"
    assert session.matmuls == 2 * 3, "in each wave, beside its first case"


def test_what_contents_move_counts_and_not_what_was_expected(monkeypatch):
    found, _, _ = all_readings(monkeypatch, [None], HOW)
    assert found[0].bytes == 1001


def test_no_product_is_timed_where_nobody_says_what_is_computed(monkeypatch):
    assert all_readings(monkeypatch, [None, None], HOW)[1].matmuls == 0


def test_a_resumed_run_has_the_rate_of_the_run_before(monkeypatch):
    flops = [1, matmul.flops("cuda")]
    whole, _, told = all_readings(monkeypatch, flops, HOW)
    again, session, _ = all_readings(monkeypatch, flops, HOW, phases.Finished(groups=told))
    assert (again, session.matmuls) == (whole, 0)
    # One group of the second wave is missing: that wave reads its own.
    part = {at: group for at, group in told.items() if at != (3, 1, 0)}
    assert all_readings(monkeypatch, flops, HOW, phases.Finished(groups=part))[1].matmuls == 3


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
    made = [
        RunnerHandle(f"submission{i}", Submission(f"submission{i}", None, ("cpu",)), "cpu") for i in range(1 + paired)
    ]
    how = Counts(processes=2, samples=10, warmups=0, buffers=2, audits=0, together=2, extra=20, paired=paired)
    timings, _ = phases.run_benchmarks(Late(late), made, [case(0)], lambda _: None, how)
    for (timing,) in timings.values():
        if late == 3:
            assert (
                timing.failure.status == "INVALID_MEASUREMENT"
                and "over 500 us after their end" in timing.failure.reason
            )
        else:
            assert not timing.failure and [len(outcomes) for outcomes in timing.outcomes] == [10, 10]
            assert len(set(timing.flat("us"))) == 1, "no late call is among them"


def test_order_of_calls_puts_each_before_each_other_in_half_of_the_rounds():
    called: list[list[str]] = [[]]

    class Told(Counting):
        def content(self, case: Case) -> str:
            called.append([])
            return "1"

        def call(self, handle: RunnerHandle, request: CallRequest) -> Outcome:
            called[-1] += [handle.name[0]] if handle.name != JUDGE else []
            return super().call(handle, request)

    made = [RunnerHandle(name, Submission(name, None, ("cpu",)), "cpu") for name in "abc"]
    how = Counts(processes=4, samples=3, warmups=0, buffers=2, audits=0)
    session = Told()
    session.weights = lambda case: ""
    phases.run_benchmarks(session, made, [Case({"n": 1}, 1, bytes=1)], lambda _: None, how)
    rounds = ["".join(names) for names in called if len(names) == 3]
    assert len(rounds) == 12 and rounds[:2] == ["abc", "cba"]
    for one, other in ("ab", "ac", "bc"):
        assert sum(names.index(one) < names.index(other) for names in rounds) == 6, rounds
