"""The two phases of a judgement: one call on every test case, then fixed numbers of timed calls on benchmark cases.

All submissions get equal contents, one after the other, so that drift affects all of them. The order is turned round;
of a pair it is A B B A. The judge checks each timed call, and draws its seed after the previous call was closed.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from harness.judge import readings
from harness.judge.handle import RunnerHandle
from harness.judge.outcome import STOP_LIMIT_US, Outcome, measured
from harness.judge.readings import NOTHING, CaseReadings, Finished, Group, GroupDone, ReferenceReadings, Timing
from harness.judge.session import CallRequest, Session, Step
from harness.problem.folders import Case, ProblemError
from harness.runner import gate

# Calls of a process on a case whose runner was told too late to stop, which are repeated. More are no measurement: else
# a submission could spoil the calls that it would rather not have.
MOST_LATE = 2
STOPPED_LATE = (
    f"more than {MOST_LATE} calls of a process were stopped over {STOP_LIMIT_US} us after their end, and could have "
    "worked on, or ran when stopped: run again when the machine is idle, or end threads before a call returns"
)
JUDGE = "(judge)"
Calls = Iterator[tuple[Case, Callable[[RunnerHandle], Outcome]]]


@dataclass(frozen=True)
class Counts:
    """Of a benchmark. processes: on a CPU fresh ones of each submission; on a GPU groups of calls by fresh players. Of
    each on a case, warmups: calls not scored; samples: timed calls; extra: more rounds at most, in place of calls
    beside which others took the machine. buffers: that calls take in turn. paired: two are compared.
    """

    processes: int
    samples: int
    warmups: int
    buffers: int = 2
    extra: int = 0
    paired: bool = False


# By device and whether the run is paired. No submission can change them. Each process, and each placement in memory,
# has a different level, which only more of them average out. With three, a 99 % interval is 5.7 times as wide as they
# scatter, and on a busy CPU a ratio of 13 was UNDECIDED; with six it is 1.6.
COUNTS = {
    ("cuda", False): Counts(processes=6, samples=10, warmups=1),
    ("cuda", True): Counts(processes=12, samples=6, warmups=1, paired=True),
    ("cpu", False): Counts(processes=3, samples=3, warmups=1, extra=6),
    ("cpu", True): Counts(processes=6, samples=3, warmups=1, extra=6, paired=True),
}


def run_tests(
    session: Session,
    handles: list[RunnerHandle],
    cases: list[Case],
    done: Callable[[RunnerHandle, Case, Outcome], None],
    have: Finished = NOTHING,
    twice: tuple[Case, ...] = (),
) -> dict[str, list[Outcome]]:
    """Call every submission once on every case. Return the outcomes by submission, in the order of the cases; `done`
    receives each. One that cannot be started any more has none for the cases that are left. What is in `have` is not
    measured again. twice: cases to call once more, where right, on contents of a secret seed.
    """
    results: dict[str, list[Outcome]] = {handle.name: [] for handle in handles}
    total = len(cases) * len(handles)
    missing = [[e for e in handles if have.test(e.name, number) is None] for number in range(len(cases))]

    def add(handle: RunnerHandle, outcome: Outcome) -> None:
        results[handle.name].append(outcome)
        done(handle, case, outcome)

    session.start(*(e for e in handles if any(e in part for part in missing)))
    for number, case in enumerate(cases):
        if not all(over(handle, results[handle.name]) for handle in missing[number]):
            session.weights(case, case.seed)
            session.content(case, case.seed)
        passed: list[tuple[RunnerHandle, Outcome]] = []
        for place, handle in enumerate(handles):
            outcome = have.test(handle.name, number)
            if outcome is None and over(handle, results[handle.name]):
                continue
            if outcome is None:
                session.progress(Step("test", number * len(handles) + place, total, f"{case}  {handle.name}"))
                outcome = session.call(handle, CallRequest(1))
                if outcome.status == "PASSED" and number == len(cases) - 1:
                    outcome = handle.look() or outcome
                if outcome.status == "PASSED" and case in twice:
                    passed.append((handle, outcome))
                    continue
            add(handle, outcome)
        if passed:
            seed = session.secret_seed(case)  # one for all: --seed gives one
            session.weights(case, seed)
            session.content(case, seed)
            for handle, outcome in passed:
                second = session.call(handle, CallRequest(1))
                second.reason = f"right with the case's seed, and with another one (--seed {seed}): {second.reason}"
                add(handle, outcome if second.status == "PASSED" else second)
    session.progress(Step("test", total, total, "done"))
    session.stop(*handles)
    return results


def each_call(session: Session, handles: list[RunnerHandle], calls: list[Case]) -> Calls:
    """Make the contents of these calls the present one in turn, with equal weights. Yield each, and what calls it."""
    session.start(*handles)
    session.weights(calls[0], calls[0].seed)
    for before, call in zip([None, *calls], calls, strict=False):
        if call != before:
            session.content(call, call.seed)
        yield call, lambda handle: session.call(handle, CallRequest(1))
    session.stop(*handles)


def over(handle: RunnerHandle, outcomes: list[Outcome]) -> bool:
    """Whether a submission failed so that it is not started again, and the last of its outcomes says it."""
    return bool(outcomes) and outcomes[-1] == handle.given_up


def run_benchmarks(
    session: Session,
    handles: list[RunnerHandle],
    cases: list[Case],
    counts: Counts,
    done: GroupDone | None = None,
    have: Finished = NOTHING,
    kind: "type[Benchmark] | None" = None,
) -> tuple[dict[str, list[Timing]], list[ReferenceReadings]]:
    """Time all. Return (timings by submission, readings by case). done: gets finished groups; have: not made again."""
    benchmark = (kind or Benchmark)(session, handles, cases, counts, done, have)
    for handle in handles:
        handle.lost = 0
    benchmark.run()
    return benchmark.timings, [benchmark.reference(number) for number in range(len(cases))]


@dataclass(eq=False)
class Benchmark:
    """The timed calls of submissions on cases. done: receives each finished group. timings: by submission and case.
    readings: the judge's, by case. group: whose calls are being made, by `living`. spare: its calls beside which others
    took the machine, used where there are no others. late: how many were stopped too late, and do not count.
    """

    session: Session
    handles: list[RunnerHandle]
    cases: list[Case]
    counts: Counts
    done: GroupDone | None
    have: Finished
    rounds_done: int = 0  # of `total`, for the progress
    total: int = 0

    def __post_init__(self) -> None:
        count = self.counts.processes
        self.judge = RunnerHandle(JUDGE, None, self.session.device)
        self.reads = {f"read {i}": i for i in range(gate.read_configs())}
        self.timings = {e.name: [Timing(case, [[] for _ in range(count)]) for case in self.cases] for e in self.handles}
        self.readings = [CaseReadings(case, case.bytes) for case in self.cases]
        self.group: Group
        self.living: list[RunnerHandle] = []
        self.spare: dict[str, list[Outcome]] = defaultdict(list)
        self.late: Counter[str] = Counter()

    @property
    def rounds(self) -> int:
        """Of a case in one group of processes, but for those that replace calls on a busy machine."""
        return self.counts.warmups + self.counts.samples

    def run(self) -> None:
        """Time all processes, one after another."""
        self.total = self.counts.processes * len(self.cases) * self.rounds
        for process in range(self.counts.processes):
            self._process(process)
        self.session.progress(Step("benchmark", self.total, self.total, "done"))

    def _process(self, process: int) -> None:
        """Time one process of each submission, which live at the same time and take turns."""
        self.session.build(*self.handles)
        missing = any(self.have.group(process, number) is None for number in range(len(self.cases)))
        living = [replace(e, runner=f"{e.name} {process}", process=None) for e in self.handles if missing]
        if missing:
            self.session.start(self.judge, *living)
            self._shake_down(living)
        for number in range(len(self.cases)):
            if finished := self.have.group(process, number):
                self._take(finished)
            else:
                self._open(process, number, 0, living)
                self._case(self.cases[number])
            self.rounds_done += self.rounds
        self.session.stop(self.judge, *living)

    def _take(self, group: Group) -> None:
        """Take over a group that an interrupted run finished."""
        for name, outcomes in group.outcomes.items():
            timing = self.timings[name][group.case]
            timing.outcomes[group.process] += [o for o in outcomes if o.status == "PASSED"]
            timing.failure = timing.failure or next((o for o in outcomes if o.status != "PASSED"), None)
        self.readings[group.case].add(group)

    def _open(self, process: int, number: int, part: int, handles: list[RunnerHandle]) -> None:
        """Begin a group."""
        outcomes = {e.name: [] for e in handles if not self.timings[e.name][number].failure}
        self.group = Group(process, number, outcomes, judge_us={}, seeds=[], part=part)
        self.living = handles
        self.spare.clear()
        self.late.clear()

    def _timing(self, name: str) -> Timing:
        return self.timings[name][self.group.case]

    def _add(self, name: str, outcome: Outcome) -> None:
        """Add a scored call of a submission, or what failed it."""
        if outcome.status == "PASSED":
            self._timing(name).outcomes[self.group.process].append(outcome)
        else:
            self._timing(name).failure = outcome
        self.group.outcomes[name].append(outcome)

    def _case(self, case: Case) -> None:
        """Make the calls of one case in the processes that are alive."""
        samples, seed = self.counts.samples, self.session.weights(case)
        weights = [f"weights {seed}"] if seed else []
        for sample in range(-self.counts.warmups, samples + self.counts.extra):
            if sample == 0 and weights:  # others, for which every answer and everything prepared is new
                weights.append(f"weights {self.session.weights(case)}")
                # Not scored: a process that prepares weights runs before its call, and could do work for it.
                self._round(case, -1)
            if sample < samples or self._lacking():
                self._show(case, sample)
                self._round(case, sample, measure=sample < 0)
            if sample < samples:
                for name in self.reads:
                    self._judge_call(name, sample)
        if weights:
            self._round(case, -1, measure=True)
        self.group.seeds += weights
        for handle in self.living:
            self._complete(handle.name)
            if not self._timing(handle.name).failure and (fault := handle.look()):
                self._add(handle.name, fault)
        self._close()

    def _close(self) -> None:
        """Hand on a finished group."""
        beside = self.readings[self.group.case]
        beside.bytes = beside.bytes or self.session.present.held
        beside.add(self.group)
        if self.done:
            self.done(self.group)

    def _show(self, case: Case, sample: int) -> None:
        """Report progress: the call of a sample is about to be made."""
        of = self.counts.samples
        call = "warm-up" if sample < 0 else f"call {sample + 1}/{of}" if sample < of else "again, the machine was busy"
        n = self.rounds_done + min(sample + self.counts.warmups, self.rounds)
        process = f"process {self.group.process + 1}/{self.counts.processes}"
        self.session.progress(Step("benchmark", n, self.total, f"{process}  {case}  {call}"))

    def _lacking(self) -> list[str]:
        """Return the submissions that have not failed and have too few calls."""
        timings = {handle.name: self._timing(handle.name) for handle in self.living}
        process, samples = self.group.process, self.counts.samples
        return [name for name, t in timings.items() if not t.failure and len(t.outcomes[process]) < samples]

    def _round(self, case: Case, sample: int, measure: bool = False) -> None:
        """Call each submission on the same contents. sample < 0: not scored. measure: what stays in memory counts."""
        self.group.seeds.append(self.session.content(case))
        paired, outcomes = self.counts.paired, dict[str, Outcome]()
        called = [e.name for e in self.living] if sample < 0 or paired else self._lacking()
        everybody = self._order(sample)
        # The judge's empty call, whose reading is taken off on a CPU, is made among the others.
        everybody.insert(random.randint(0, len(everybody)), self.judge)
        for handle in everybody:
            if handle is self.judge:
                self._judge_call("empty", sample)
            elif handle.name in called and not self._timing(handle.name).failure:
                outcome = self._call(handle, sample, measure)
                if outcome.status == "PASSED":
                    outcomes[handle.name] = outcome
                else:
                    self._add(handle.name, outcome)
        if sample < 0 or (paired and self._failures()):
            return
        late = {name for name, outcome in outcomes.items() if outcome.late}
        self.late.update(late)
        for name in late:
            if self.late[name] > MOST_LATE:
                self._add(name, Outcome("INVALID_MEASUREMENT", STOPPED_LATE))
        any_busy = paired and any(outcome.busy for outcome in outcomes.values())
        for name, outcome in outcomes.items():
            if late if paired else name in late:
                continue
            if outcome.busy or any_busy:
                self.spare[name].append(outcome)
            else:
                self._add(name, outcome)

    def _order(self, sample: int) -> list[RunnerHandle]:
        """Return handles in the order of a round: rotated by 0, 2, 4, ..., each followed by the same backwards."""
        # Odd, since what has a period of two in all processes, as buffers on a CPU have, must not go with the order.
        number = self.group.process * (self.counts.samples | 1) + sample
        shift = number // 2 * 2 % max(1, len(self.living))
        rotated = self.living[shift:] + self.living[:shift]
        return rotated if number % 2 == 0 else rotated[::-1]

    def _failures(self) -> dict[str, Outcome]:
        """Return the failures in a case by submission, but for one that does not serve it: the other one is timed."""
        failures = {handle.name: self._timing(handle.name).failure for handle in self.living}
        return {name: failure for name, failure in failures.items() if failure and failure.status != "UNSUPPORTED"}

    def _complete(self, name: str) -> None:
        """Give a submission with too few quiet calls the busy ones too."""
        timing = self._timing(name)
        missing = self.counts.samples - len(timing.outcomes[self.group.process])
        if timing.failure or missing <= 0:
            return
        spare = self.spare[name][:missing]
        for outcome in spare:
            self._add(name, outcome)
        if len(spare) == missing:
            return
        reason = STOPPED_LATE
        for other, failed in self._failures().items():
            reason = f"not timed: {other} is {failed.status}, and of a pair both count or none: leave out --against"
        self._add(name, Outcome("INVALID_MEASUREMENT", reason))

    def _call(self, handle: RunnerHandle, sample: int, measure: bool) -> Outcome:
        """Make a call of a submission, by its replica in this group."""
        stay = sample != self.counts.samples - 1
        return self.session.call(handle, CallRequest(self.counts.buffers, measure=measure, stay=stay))

    def _judge_call(self, name: str, sample: int) -> None:
        """Make one of the judge's own calls. RuntimeError if it fails."""
        outcome = self.session.call(self.judge, CallRequest(self.counts.buffers, name, self.reads, stay=True))
        if outcome.status != "PASSED":
            content, reason = self.session.present, outcome.reason.partition("\n")[0]
            if "memory" in reason and content.moved > content.host:
                claim = f"bytes_moved() of {content.case} says {content.moved} bytes"
                raise ProblemError(f"{claim}, and the judge has no room to read as many: {reason}")
            raise RuntimeError(f"the judge's own call {name!r} failed: {outcome.reason}")
        if sample >= 0:
            spun_us = gate.EMPTY_US if name == "empty" else 0.0
            self.group.judge_us.setdefault(name, []).append(measured(outcome.us) - spun_us)

    def _shake_down(self, everybody: list[RunnerHandle]) -> None:
        """Call each process once on the first test case if weights are prepared: what it keeps counts from then."""
        tests = self.session.problem.tests
        if not tests or self.session.weights(tests[0]) is None:
            return
        self.session.content(tests[0])
        for handle in everybody:
            self.session.count_kept(handle, CallRequest(self.counts.buffers))

    def reference(self, number: int) -> ReferenceReadings:
        """Return the reference readings of a case, and settle its timings by them."""
        timings = [of_cases[number] for of_cases in self.timings.values()]
        # One reading serves all cases, and a resumed run has that of the run before.
        matmul_us = [us for case in self.readings for us in case.judge_us.get(readings.PRODUCT, [])]
        beside = self.readings[number]
        if beside.bytes is None:  # a folder that does not say, and no group was run now
            self.session.content(self.cases[number])
            beside.bytes = self.session.present.held
        return readings.reference(beside, timings, self.session.device, matmul_us)
