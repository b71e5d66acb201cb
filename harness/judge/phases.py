"""The two phases of a judgement: one call on every test case, then fixed numbers of timed calls on benchmark cases.

All submissions get equal contents, one after the other, so that drift affects all of them. The order is turned round;
of a pair it is A B B A. The judge checks each timed call, and draws its seed after the previous call was closed.
"""

import dataclasses
import functools
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from harness.judge import readings
from harness.judge.call import CallRequest
from harness.judge.events import Progress, Step
from harness.judge.handle import RunnerHandle
from harness.judge.outcome import STOP_LIMIT_US, Outcome, measured
from harness.judge.readings import CaseReadings, ReferenceReadings, Timing
from harness.judge.room import Room, choose
from harness.judge.session import Session
from harness.judge.work import NOTHING, Finished, Group, GroupDone
from harness.player import player
from harness.problem.folders import Case, ProblemError
from harness.runner import gate, matmul, native

# Calls of a process on a case whose runner was told too late to stop, which are repeated. More are no measurement: else
# a submission could spoil the calls that it would rather not have.
MOST_LATE = 2
STOPPED_LATE = (
    f"more than {MOST_LATE} calls of a process were stopped over {STOP_LIMIT_US} us after their end, and could "
    "have worked on meanwhile: run again when the machine is idle, or end threads before a call returns"
)
JUDGE = "(judge)"


@dataclass(frozen=True)
class Counts:
    """The counts of a benchmark. processes: on a CPU fresh ones of each submission, one after another; on a GPU groups
    of calls on other physical memory. Of each of them on a case, warmups: calls that are not scored, checked like all
    others; samples: timed calls; extra: rounds more at most, in place of calls beside which other processes took the
    machine. buffers: memory that calls take in turn. paired: two submissions are compared.
    """

    processes: int
    samples: int
    warmups: int
    buffers: int
    extra: int = 0
    paired: bool = False


# By device and whether the run is paired. No submission can change them. Each process, and each placement in memory,
# has a different level, which only more of them average out. With three, a 99 % interval is 5.7 times as wide as they
# scatter, and on a busy CPU a ratio of 13 was UNDECIDED; with six it is 1.6.
COUNTS = {
    ("cuda", False): Counts(processes=6, samples=10, warmups=1, buffers=player.COPIES),
    ("cuda", True): Counts(processes=12, samples=10, warmups=1, buffers=player.COPIES, paired=True),
    ("cpu", False): Counts(processes=3, samples=3, warmups=1, buffers=2, extra=6),
    ("cpu", True): Counts(processes=6, samples=3, warmups=1, buffers=2, extra=6, paired=True),
}


def run_tests(
    session: Session,
    handles: list[RunnerHandle],
    cases: list[Case],
    done: Callable[[RunnerHandle, Case, Outcome], None],
    progress: Progress,
    have: Finished = NOTHING,
    limit_s: float | None = None,
    twice: tuple[Case, ...] = (),
) -> dict[str, list[Outcome]]:
    """Call every submission once on every case. Return the outcomes by submission, in the order of the cases. `done`
    receives each one. Outcomes in `have` are not measured again. limit_s: for all calls of a submission together.
    twice: cases on which those that pass are called once more, on contents of a secret seed, since a submission can
    hold the answers to the public ones.
    """
    results: dict[str, list[Outcome]] = {handle.name: [] for handle in handles}
    budget, second_budget = Budget(limit_s), Budget(limit_s)
    missing = [[e for e in handles if have.test(e.name, number) is None] for number in range(len(cases))]
    session.start(*(e for e in handles if any(e in part for part in missing)))
    for number, case in enumerate(cases):
        if missing[number]:
            session.weights(case, case.seed)
            session.content(case, case.seed)
        passed: list[tuple[RunnerHandle, Outcome]] = []
        for handle in handles:
            outcome = have.test(handle.name, number)
            if outcome is None:
                done_before = number * len(handles) + handles.index(handle)
                progress(Step("test", done_before, len(cases) * len(handles), f"{case}  {handle.name}"))
                outcome = budget.call(handle, functools.partial(_call_once, session, handle))
                if outcome.status == "PASSED" and number == len(cases) - 1:
                    outcome = handle.look() or outcome
                if outcome.status == "PASSED" and case in twice:
                    passed.append((handle, outcome))
                    continue
            results[handle.name].append(outcome)
            done(handle, case, outcome)
        for handle, outcome in _unseen(session, second_budget, case, passed):
            results[handle.name].append(outcome)
            done(handle, case, outcome)
    progress(Step("test", len(cases) * len(handles), len(cases) * len(handles), "done"))
    session.stop(*handles)
    return results


def run_benchmarks(
    session: Session,
    handles: list[RunnerHandle],
    cases: list[Case],
    progress: Progress,
    counts: Counts,
    done: GroupDone | None = None,
    have: Finished = NOTHING,
    limit_s: float | None = None,
) -> tuple[dict[str, list[Timing]], list[ReferenceReadings]]:
    """Time every submission on every case. Return (timings by submission, the judge's own readings by case). done:
    receives each finished group of calls (one process, one case). Groups in `have` are not measured again. limit_s: for
    all calls of a submission together.
    """
    benchmark = Benchmark(
        session=session,
        handles=handles,
        cases=cases,
        progress=progress,
        counts=counts,
        done=done,
        have=have,
        budget=Budget(limit_s),
    )
    for handle in handles:
        handle.lost = 0
    benchmark.run()
    return benchmark.timings, [benchmark.reference(number) for number in range(len(cases))]


@dataclass
class OpenGroup:
    """A group whose calls are being made by these handles. spare: calls beside which other processes took the machine,
    used where there are no others. late: how many calls were stopped too late, and do not count.
    """

    record: Group
    handles: list[RunnerHandle]
    spare: dict[str, list[Outcome]] = field(default_factory=lambda: defaultdict(list))
    late: Counter[str] = field(default_factory=Counter)


@dataclass(eq=False)
class Benchmark:
    """The timed calls of submissions on cases, and what came of them so far. done: receives each finished group.

    timings: by submission and case. readings: the judge's own, by case.
    """

    session: Session
    handles: list[RunnerHandle]
    cases: list[Case]
    progress: Progress
    counts: Counts
    done: GroupDone | None
    have: Finished
    budget: "Budget"
    rounds_done: int = 0  # of `total`, for the progress
    total: int = 0

    def __post_init__(self) -> None:
        count = self.counts.processes
        self.judge = RunnerHandle(JUDGE, None, self.session.device)
        self.reads = {f"read {i}": i for i in range(native.read_configs())}
        self.timings = {e.name: [Timing(case, [[] for _ in range(count)]) for case in self.cases] for e in self.handles}
        self.readings = [CaseReadings(case, case.bytes) for case in self.cases]

    @property
    def rounds(self) -> int:
        """Of a case in one group of processes, but for those that replace calls on a busy machine."""
        return self.counts.warmups + self.counts.samples

    def run(self) -> None:
        """Time all processes, one after another; where not all submissions have room, one part after another."""
        if not self.session.problem.ours and self.handles:
            most = Room(len(self.handles), self.counts.buffers)
            room = choose([self.session.footprint(case) for case in self.cases], most, self.counts.paired)
            self.counts = dataclasses.replace(self.counts, buffers=room.buffers)
            size = max(1, room.handles)
            parts = [self.handles[i : i + size] for i in range(0, len(self.handles), size)]
        else:
            parts = [self.handles]
        self.total = self.counts.processes * len(parts) * len(self.cases) * self.rounds
        for process in range(self.counts.processes):
            for part, handles in enumerate(parts):
                self._process(process, part, handles)
        self.progress(Step("benchmark", self.total, self.total, "done"))

    def _process(self, process: int, part: int, handles: list[RunnerHandle]) -> None:
        """Time one process of each of these, which live at the same time and take turns."""
        self.session.build(*handles)
        missing = any(self.have.group(process, number, part) is None for number in range(len(self.cases)))
        living = [handle.replica(process) for handle in handles] if missing else []
        if missing:
            self.session.start(self.judge, *living)
            self._shake_down(living)
        for number in range(len(self.cases)):
            if finished := self.have.group(process, number, part):
                self._take(finished)
            else:
                self._case(self._open(process, number, part, living))
            self.rounds_done += self.rounds
        self.session.stop(self.judge, *living)

    def _take(self, group: Group) -> None:
        """Take over a group that an interrupted run finished."""
        for name, outcomes in group.outcomes.items():
            timing = self.timings[name][group.case]
            timing.outcomes[group.process] += [o for o in outcomes if o.status == "PASSED"]
            timing.failure = timing.failure or next((o for o in outcomes if o.status != "PASSED"), None)
        self.readings[group.case].add(group)

    def _open(self, process: int, number: int, part: int, handles: list[RunnerHandle]) -> OpenGroup:
        """Return an empty group."""
        outcomes = {e.name: [] for e in handles if not self.timings[e.name][number].failure}
        return OpenGroup(Group(process, number, outcomes, judge_us={}, seeds=[], part=part), handles)

    def _timing(self, group: OpenGroup, name: str) -> Timing:
        return self.timings[name][group.record.case]

    def _add(self, group: OpenGroup, name: str, outcome: Outcome) -> None:
        """Add a scored call of a submission, or what failed it."""
        if outcome.status == "PASSED":
            self._timing(group, name).outcomes[group.record.process].append(outcome)
        else:
            self._timing(group, name).failure = outcome
        group.record.outcomes[name].append(outcome)

    def _case(self, group: OpenGroup) -> None:
        """Make the calls of one case in the processes that are alive."""
        session, record, samples = self.session, group.record, self.counts.samples
        case = self.cases[record.case]
        seed = session.weights(case)
        weights = [f"weights {seed}"] if seed else []
        for sample in range(-self.counts.warmups, samples + self.counts.extra):
            if sample == 0 and weights:  # others, for which every answer and everything prepared is new
                weights.append(f"weights {session.weights(case)}")
                # Not scored: a process that prepares weights runs before its call, and could do work for it.
                self._round(group, -1, measure=False)
            if sample < samples or self._lacking(group):
                self._show(case, group, sample)
                self._round(group, sample, measure=sample < 0)
            if sample < samples:
                for name in self.reads:
                    self._judge_call(record, name, sample)
        if weights:
            self._round(group, -1, measure=True)
        record.seeds += weights
        for handle in group.handles:
            self._complete(group, handle.name)
            if not self._timing(group, handle.name).failure and (fault := handle.look()):
                self._add(group, handle.name, fault)
        self._close(group)

    def _close(self, group: OpenGroup) -> None:
        """Hand on a finished group."""
        beside = self.readings[group.record.case]
        beside.bytes = beside.bytes or self.session.present.held
        beside.add(group.record)
        if self.done:
            self.done(group.record)

    def _show(self, case: Case, group: OpenGroup, sample: int) -> None:
        """Report progress: the call of a sample is about to be made."""
        of = self.counts.samples
        call = "warm-up" if sample < 0 else f"call {sample + 1}/{of}" if sample < of else "again, the machine was busy"
        n = self.rounds_done + min(sample + self.counts.warmups, self.rounds)
        process = f"process {group.record.process + 1}/{self.counts.processes}"
        self.progress(Step("benchmark", n, self.total, f"{process}  {case}  {call}"))

    def _lacking(self, group: OpenGroup) -> list[str]:
        """Return the submissions that have not failed and have too few calls."""
        timings = {handle.name: self._timing(group, handle.name) for handle in group.handles}
        process, samples = group.record.process, self.counts.samples
        return [name for name, t in timings.items() if not t.failure and len(t.outcomes[process]) < samples]

    def _round(self, group: OpenGroup, sample: int, measure: bool) -> None:
        """Make one call of each submission on the same new contents; of a pair both count or none, unless one of them
        does not serve the case. A negative sample is not scored. measure: what it leaves behind in memory counts.
        """
        record, paired = group.record, self.counts.paired
        record.seeds.append(self.session.content(self.cases[record.case]))
        lacking = self._lacking(group)
        outcomes: dict[str, Outcome] = {}
        everybody = self._order(group, sample)
        # The judge's empty call, whose reading is taken off on a CPU, is made among the others.
        everybody.insert(random.randint(0, len(everybody)), self.judge)
        for handle in everybody:
            if handle is self.judge:
                self._judge_call(record, "empty", sample)
            elif (sample < 0 or paired or handle.name in lacking) and (
                outcome := self._call(group, handle, sample, measure)
            ):
                outcomes[handle.name] = outcome
        if sample < 0 or (paired and self._failures(group)):
            return
        late = {name for name, outcome in outcomes.items() if outcome.late}
        group.late.update(late)
        for name in late:
            if group.late[name] > MOST_LATE:
                self._add(group, name, Outcome("INVALID_MEASUREMENT", STOPPED_LATE))
        any_busy = paired and any(outcome.busy for outcome in outcomes.values())
        for name, outcome in outcomes.items():
            if late if paired else name in late:
                continue
            if outcome.busy or any_busy:
                group.spare[name].append(outcome)
            else:
                self._add(group, name, outcome)

    def _order(self, group: OpenGroup, sample: int) -> list[RunnerHandle]:
        """Return the handles of a group in the order of their calls in a round: rotated by 0, 2, 4, ..., each followed
        by the same backwards. So each comes before each other one in half of the rounds.
        """
        # Odd, since what has a period of two in all processes, as buffers on a CPU have, must not go with the order.
        number = group.record.process * (self.counts.samples | 1) + sample
        shift = number // 2 * 2 % max(1, len(group.handles))
        rotated = group.handles[shift:] + group.handles[:shift]
        return rotated if number % 2 == 0 else rotated[::-1]

    def _failures(self, group: OpenGroup) -> dict[str, Outcome]:
        """Return the failures in a case by submission, but for one that does not serve it: that says nothing of the
        other one, which is timed without it.
        """
        failures = {handle.name: self._timing(group, handle.name).failure for handle in group.handles}
        return {name: failure for name, failure in failures.items() if failure and failure.status != "UNSUPPORTED"}

    def _complete(self, group: OpenGroup, name: str) -> None:
        """Give a submission with too few quiet calls the busy ones too."""
        timing = self._timing(group, name)
        missing = self.counts.samples - len(timing.outcomes[group.record.process])
        if timing.failure or missing <= 0:
            return
        spare = group.spare[name][:missing]
        for outcome in spare:
            self._add(group, name, outcome)
        if len(spare) == missing:
            return
        reason = STOPPED_LATE
        for other, failed in self._failures(group).items():
            reason = (
                f"not timed: {other} is {failed.status}, and of a pair both count or none; time it without --against"
            )
        self._add(group, name, Outcome("INVALID_MEASUREMENT", reason))

    def _call(self, group: OpenGroup, handle: RunnerHandle, sample: int, measure: bool) -> Outcome | None:
        """Make one call of a submission. Return None if it failed."""
        if self._timing(group, handle.name).failure:
            return None
        outcome = self.budget.call(handle, lambda limit_s: self._made(group, handle, sample, measure, limit_s))
        if outcome.status == "PASSED":
            return outcome
        self._add(group, handle.name, outcome)
        return None

    def _made(self, group: OpenGroup, handle: RunnerHandle, sample: int, measure: bool, remaining_s: float) -> Outcome:
        """Make a call of a submission, by its replica in this group."""
        stay = sample != self.counts.samples - 1
        return self.session.call(handle, CallRequest(self.counts.buffers, "", None, remaining_s, measure, stay))

    def _judge_call(self, record: Group, name: str, sample: int) -> Outcome:
        """Make one of the judge's own calls. RuntimeError if it fails."""
        outcome = self.session.call(self.judge, CallRequest(self.counts.buffers, name, self.reads, stay=True))
        if outcome.status != "PASSED":
            content, reason = self.session.present, outcome.reason.partition("\n")[0]
            if "memory" in reason and content.moved > content.host:
                raise ProblemError(
                    f"bytes_moved() of {content.case} says {content.moved} bytes, and the judge has no room to read as "
                    f"many: {reason}"
                )
            raise RuntimeError(f"the judge's own call {name!r} failed: {outcome.reason}")
        if sample >= 0:
            spun_us = gate.EMPTY_US if name == "empty" else 0.0
            record.judge_us.setdefault(name, []).append(measured(outcome.us) - spun_us)
        return outcome

    def _shake_down(self, everybody: list[RunnerHandle]) -> None:
        """Call each process once on the first test case if weights are prepared. What it keeps is counted from then on,
        when its code is loaded. run_tests has judged the outcome.
        """
        tests = self.session.problem.tests
        if not tests or self.session.weights(tests[0]) is None:
            return
        self.session.content(tests[0])
        for handle in everybody:
            self.session.count_kept(handle, CallRequest(self.counts.buffers))

    def reference(self, number: int) -> ReferenceReadings:
        """Return the reference readings of a case, and settle its timings by them."""
        timings = [of_cases[number] for of_cases in self.timings.values()]
        # Processes that live together share a reading, and a resumed run has those of the run before, beside their
        # first case.
        matmul_us = [us for case in self.readings for us in case.judge_us.get(matmul.NAME, [])]
        beside = self.readings[number]
        if beside.bytes is None:  # a folder that does not say, and no group was run now
            self.session.content(self.cases[number])
            beside.bytes = self.session.present.held
        return readings.reference(beside, timings, self.session.device, matmul_us)


class Budget:
    """The seconds that the calls of each submission may take together in one phase, None for no such limit.

    GPU MODE's test_timeout, benchmark_timeout and ranked_timeout. Every call has its own limit besides.
    """

    def __init__(self, limit_s: float | None) -> None:
        self.limit_s = math.inf if limit_s is None else limit_s
        self.spent_s: dict[str, float] = {}  # by submission, over all its processes

    def call(self, handle: RunnerHandle, make: Callable[[float], Outcome]) -> Outcome:
        """Make a call within the time that is left, which `make` gets, in seconds. TIMEOUT, without a call: none is
        left.
        """
        spent_s = self.spent_s.get(handle.name, 0.0)
        if spent_s >= self.limit_s:
            return Outcome("TIMEOUT", f"its calls of this phase took the {self.limit_s:g} s that the problem gives it")
        before = time.monotonic()
        outcome = make(self.limit_s - spent_s)
        self.spent_s[handle.name] = spent_s + time.monotonic() - before
        return outcome


def _call_once(session: Session, handle: RunnerHandle, remaining_s: float) -> Outcome:
    return session.call(handle, CallRequest(1, remaining_s=remaining_s))


def _unseen(
    session: Session, budget: Budget, case: Case, passed: list[tuple[RunnerHandle, Outcome]]
) -> Iterator[tuple[RunnerHandle, Outcome]]:
    """Call these again on contents of `case` that are in no file. Yield the first outcome, or the second if it failed,
    with the seed that gives the contents again.
    """
    if passed:
        seed = session.secret_seed(case)  # one for both: --seed gives one
        session.weights(case, seed)
        session.content(case, seed)
        for handle, first in passed:
            second = budget.call(handle, functools.partial(_call_once, session, handle))
            if second.status != "PASSED":
                second.reason = f"right with the case's seed, and with another one (--seed {seed}): {second.reason}"
            yield handle, first if second.status == "PASSED" else second
