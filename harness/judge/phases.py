"""The two phases of a judgement: one call on every test case, then fixed numbers of timed calls on benchmark cases.

All submissions get equal contents, one after the other, so that drift affects all of them. The order is turned round;
of a pair it is A B B A. The judge checks each timed call, and draws its seed after the previous call was closed.
"""

import dataclasses
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from harness.judge import batch, readings
from harness.judge.call import CallRequest
from harness.judge.events import Progress, Step
from harness.judge.handle import RunnerHandle
from harness.judge.outcome import STOP_LIMIT_US, Outcome, measured
from harness.judge.readings import OUTSIDE, READY, CaseReadings, ReferenceReadings, Timing
from harness.judge.room import Room, choose
from harness.judge.session import Session
from harness.judge.work import NOTHING, Finished, Group, GroupDone
from harness.problem.folders import Case, ProblemError, UsageError
from harness.results import environment
from harness.runner import gate, matmul, native

# Of all memory, for weights that all processes alive at once may have prepared. The judge has as much again for each,
# its own copy, and for a moment two more, and reads zeros of as many bytes as a call must move. V4-Pro's weights have
# 14.3 GB: three times them ran out of an H200's memory, and twice them of an H100's 80 GB.
PREPARED_SHARE = 0.23
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
    """The counts of a benchmark. processes: fresh ones of each submission, `together` of them alive at once, taking
    turns, so that starting them costs less. Of a process on a case, warmups: calls that compile, show the enqueue time
    and touch every buffer once, checked like all others; samples: timed calls; audits: unscored ones at random places,
    with a look at the driver's records; extra: rounds more at most, in place of calls beside which other processes took
    the machine. buffers: addresses that calls rotate over. paired: two submissions are compared, both alive at once.
    """

    processes: int
    samples: int
    warmups: int
    buffers: int
    audits: int
    together: int = 1
    extra: int = 0
    paired: bool = False


# By device and whether the run is paired. No submission can change them. Each process has a different level, which only
# more of them average out. With three, a 99 % interval is 5.7 times as wide as they scatter, and on a busy CPU a ratio
# of 13 was UNDECIDED; with six it is 1.6. On a CPU every call is looked at, so that none is audited.
COUNTS = {
    ("cuda", False): Counts(processes=6, together=3, samples=10, warmups=3, buffers=3, audits=3),
    ("cuda", True): Counts(processes=40, together=8, samples=24, warmups=3, buffers=3, audits=3, paired=True),
    ("cpu", False): Counts(processes=3, samples=3, warmups=1, buffers=2, audits=0, extra=6),
    ("cpu", True): Counts(processes=6, samples=3, warmups=1, buffers=2, audits=0, extra=6, paired=True),
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
    audited = {handle.name: random.randrange(len(cases)) for handle in handles} if cases else {}
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
                outcome = budget.call(session, handle, CallRequest(1))
                # Libraries set themselves up in their first call, with separate streams: the second is audited.
                if session.device == "cuda" and audited[handle.name] == number and outcome.status == "PASSED":
                    outcome = budget.call(session, handle, CallRequest(1, audit=True))
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
class _OpenGroup:
    """A group whose calls are being made by these handles. audits: by submission, the samples at which one is due.
    spare: calls beside which other processes took the machine, used where there are no others. late: how many calls
    were stopped too late, and do not count.
    """

    record: Group
    handles: list[RunnerHandle]
    audits: dict[str, list[int]]
    spare: dict[str, list[Outcome]] = field(default_factory=lambda: defaultdict(list))
    late: Counter[str] = field(default_factory=Counter)


@dataclass(eq=False)
class Benchmark:
    """The timed calls of submissions on cases, and what came of them so far. done: receives each finished group.

    timings: by submission and case. readings: the judge's own, by case. watched: by submission, the process in which
    some calls are audited.
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
        device, count = self.session.device, self.counts.processes
        self.judge = RunnerHandle(JUDGE, None, device)
        self.reads = {f"read {i}": i for i in range(native.read_configs(device))}
        self.timings = {e.name: [Timing(case, [[] for _ in range(count)]) for case in self.cases] for e in self.handles}
        self.readings = [CaseReadings(case, case.bytes) for case in self.cases]
        self.computes = device in matmul.DEVICES and any(case.flops for case in self.cases)
        self.watched = {handle.name: random.randrange(count) for handle in self.handles}

    @property
    def rounds(self) -> int:
        """Of a case in one group of processes, but for those that replace calls on a busy machine."""
        return self.counts.warmups + self.counts.samples

    def run(self) -> None:
        """Time all processes, as many at once as have room; where not all submissions have, one part after another."""
        room, processes = self._room(), self.counts.processes
        self.counts = dataclasses.replace(self.counts, buffers=room.buffers)
        size = max(1, room.handles)
        parts = [self.handles[i : i + size] for i in range(0, len(self.handles), size)]
        waves = [range(i, min(i + room.together, processes)) for i in range(0, processes, room.together)]
        self.total = len(waves) * len(parts) * len(self.cases) * self.rounds
        for wave in waves:
            for part, handles in enumerate(parts):
                self._wave(wave, part, handles)
        self.progress(Step("benchmark", self.total, self.total, "done"))

    def _room(self) -> Room:
        """Return how many submissions, and processes of each, are alive at once, and the buffers of each process."""
        most = Room(len(self.handles), self.counts.together, self.counts.buffers)
        if not self.handles:
            return most
        if self.session.problem.ours:
            return self._beside_weights(most)
        return choose([self.session.footprint(case) for case in self.cases], most, self.counts.paired)

    def _beside_weights(self, most: Room) -> Room:
        """Return how many submissions and processes may be alive, so that all prepared weights have room. UsageError: a
        pair, which is alive together, has none.
        """
        largest = max((case.weight_bytes for case in self.cases), default=0)
        if not largest:
            return most
        total = self.session.memory()
        fitting = int(PREPARED_SHARE * total / largest)
        if self.counts.paired and fitting < most.handles:
            raise UsageError(
                f"a case has {largest / 1e9:.1f} GB of weights, and beside the judge's copies two processes that "
                f"prepare them have no room in {total / 1e9:.0f} GB: leave it out with --case, time each without "
                "--against, or use a machine with more memory"
            )
        handles = most.handles if self.counts.paired else min(most.handles, max(1, fitting))
        return Room(handles, max(1, min(most.together, fitting // handles)), most.buffers)

    def _wave(self, processes: range, part: int, handles: list[RunnerHandle]) -> None:
        """Time some processes of each of these, which live at the same time and take turns."""
        todo = [p for p in processes if any(self.have.group(p, n, part) is None for n in range(len(self.cases)))]
        self.session.build(*handles)
        living = {p: [handle.replica(p) for handle in handles] for p in todo}
        everybody = [handle for replicas in living.values() for handle in replicas]
        if todo:
            self.session.start(self.judge, *everybody)
            self._shake_down(everybody)
        rated = not self.computes
        for number in range(len(self.cases)):
            groups = []
            for process in processes:
                if finished := self.have.group(process, number, part):
                    self._take(finished)
                else:
                    groups.append(self._open(process, number, part, living[process]))
            if groups:
                self._case(number, groups, rated)
                rated = True
            self.rounds_done += self.rounds
        self.session.stop(self.judge, *everybody)

    def _take(self, group: Group) -> None:
        """Take over a group that an interrupted run finished."""
        for name, outcomes in group.outcomes.items():
            timing = self.timings[name][group.case]
            timing.outcomes[group.process] += [o for o in outcomes if o.status == "PASSED"]
            timing.failure = timing.failure or next((o for o in outcomes if o.status != "PASSED"), None)
            timing.batches += group.batches.get(name, [])
        self.readings[group.case].add(group)

    def _open(self, process: int, number: int, part: int, handles: list[RunnerHandle]) -> _OpenGroup:
        """Return an empty group with the places of its audited calls."""
        names = [handle.name for handle in handles if not self.timings[handle.name][number].failure]
        audits = {
            name: [random.randrange(self.counts.samples) for _ in range(self.counts.audits)]
            for name in names
            if self.watched[name] == process
        }
        outcomes = {name: [] for name in names}
        record = Group(process=process, case=number, part=part, outcomes=outcomes, judge_us={}, seeds=[])
        return _OpenGroup(record, handles, audits)

    def _timing(self, group: _OpenGroup, name: str) -> Timing:
        return self.timings[name][group.record.case]

    def _add(self, group: _OpenGroup, name: str, outcome: Outcome) -> None:
        """Add a scored call of a submission, or what failed it."""
        if outcome.status == "PASSED":
            self._timing(group, name).outcomes[group.record.process].append(outcome)
        else:
            self._timing(group, name).failure = outcome
        group.record.outcomes[name].append(outcome)

    def _case(self, number: int, groups: list[_OpenGroup], rated: bool) -> None:
        """Make the calls of one case in the processes that are alive. rated: these have timed the matrix product."""
        session, case, device, samples = self.session, self.cases[number], self.session.device, self.counts.samples
        first, seed = groups[0].record, session.weights(case)
        weights = [f"weights {seed}"] if seed else []
        for sample in range(-self.counts.warmups, samples + self.counts.extra):
            if sample == 0 and weights:  # others, for which every answer and everything prepared is new
                weights.append(f"weights {session.weights(case)}")
                self._unscored(groups)
            for group in groups:
                if sample < samples or self._lacking(group):
                    self._show(case, group, sample)
                    self._round(group, sample, measure=sample < 0 or (device == "cuda" and sample == samples - 1))
            if sample < samples:
                self._judge_calls(first, sample)
        if weights:
            self._unscored(groups, measure=True)
        if device == "cuda":
            self._batches(number, groups)
        if not rated:
            for sample in range(-self.counts.warmups, samples):
                self._judge_call(first, matmul.NAME, sample)
        first.seeds += weights
        state = environment.gpu_state() if device == "cuda" else environment.UNKNOWN
        beside = self.readings[number]
        beside.bytes = beside.bytes or session.present.held
        for group in groups:
            for handle in group.handles:
                self._complete(group, handle.name)
                if not self._timing(group, handle.name).failure and (fault := handle.look()):
                    self._add(group, handle.name, fault)
            group.record.state = state
            beside.add(group.record)
            if self.done:
                self.done(group.record)

    def _batches(self, number: int, groups: list[_OpenGroup]) -> None:
        """Read a batch of each submission that had none, in one process; and where the times are shorter than it
        allows, one in each further process.
        """
        contents, tried, noted = None, False, 0
        for group in groups:
            for handle in group.handles:
                timing = self._timing(group, handle.name)
                if handle.baseline or not timing.flat("us") or timing.failure or not handle.process:
                    continue  # a baseline is no adversary, and may prepare for the contents that it sees
                if timing.batches and not timing.undercuts:
                    continue
                if not tried:
                    contents, tried = batch.make(self.session, self.cases[number]), True
                if contents is None:
                    continue
                most = max(1, batch.READINGS // self.counts.processes)
                reading = batch.read(self.session, handle, self.judge, contents, timing.median_us, most)
                group.record.seeds += [f"batch {seed}" for seed in contents.used[noted:]]
                noted = len(contents.used)
                if isinstance(reading, Outcome):
                    self._add(group, handle.name, reading)
                else:
                    timing.batches.append(reading)
                    group.record.batches.setdefault(handle.name, []).append(reading)
        if contents:
            batch.drop(self.session)

    def _show(self, case: Case, group: _OpenGroup, sample: int) -> None:
        """Report progress: the call of a sample is about to be made."""
        of = self.counts.samples
        call = "warm-up" if sample < 0 else f"call {sample + 1}/{of}" if sample < of else "again, the machine was busy"
        n = self.rounds_done + min(sample + self.counts.warmups, self.rounds)
        process = f"process {group.record.process + 1}/{self.counts.processes}"
        self.progress(Step("benchmark", n, self.total, f"{process}  {case}  {call}"))

    def _lacking(self, group: _OpenGroup) -> list[str]:
        """Return the submissions that have not failed and have too few calls."""
        timings = {handle.name: self._timing(group, handle.name) for handle in group.handles}
        process, samples = group.record.process, self.counts.samples
        return [name for name, t in timings.items() if not t.failure and len(t.outcomes[process]) < samples]

    def _unscored(self, groups: list[_OpenGroup], measure: bool = False) -> None:
        """On a CPU, make a round that is not scored: a process that prepares weights, or whose memory is measured, runs
        before its call, and could do work for it.
        """
        for group in groups if self.session.device == "cpu" else ():
            self._round(group, -1, measure)

    def _round(self, group: _OpenGroup, sample: int, measure: bool) -> None:
        """Make one call of each submission on the same new contents; of a pair both count or none, unless one of them
        does not serve the case. A negative sample is not scored. measure: what it leaves behind in memory counts.
        """
        record, paired = group.record, self.counts.paired
        record.seeds.append(self.session.content(self.cases[record.case]))
        lacking = self._lacking(group)
        outcomes: dict[str, Outcome] = {}
        everybody = self._order(group, sample)
        if self.session.device == "cpu":  # the judge's empty call, whose reading is taken off, is made among the others
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

    def _order(self, group: _OpenGroup, sample: int) -> list[RunnerHandle]:
        """Return the handles of a group in the order of their calls in a round: rotated by 0, 2, 4, ..., each followed
        by the same backwards. So each comes before each other one in half of the rounds.
        """
        # Odd, since what has a period of two in all processes, as buffers on a CPU have, must not go with the order.
        number = group.record.process * (self.counts.samples | 1) + sample
        shift = number // 2 * 2 % max(1, len(group.handles))
        rotated = group.handles[shift:] + group.handles[:shift]
        return rotated if number % 2 == 0 else rotated[::-1]

    def _failures(self, group: _OpenGroup) -> dict[str, Outcome]:
        """Return the failures in a case by submission, but for one that does not serve it: that says nothing of the
        other one, which is timed without it.
        """
        failures = {handle.name: self._timing(group, handle.name).failure for handle in group.handles}
        return {name: failure for name, failure in failures.items() if failure and failure.status != "UNSUPPORTED"}

    def _complete(self, group: _OpenGroup, name: str) -> None:
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

    def _call(self, group: _OpenGroup, handle: RunnerHandle, sample: int, measure: bool) -> Outcome | None:
        """Make one call of a submission, and before it the audited ones that are due. Return None if it failed."""
        case, seeds = self.cases[group.record.case], group.record.seeds
        if self._timing(group, handle.name).failure:
            return None
        request = CallRequest(self.counts.buffers, measure=measure, stay=sample != self.counts.samples - 1)
        for _ in range(group.audits.get(handle.name, []).count(sample)):  # each on contents that no other call has
            seed = seeds[-1]
            seeds.insert(-1, self.session.content(case))
            outcome = handle.look() or self.budget.call(self.session, handle, dataclasses.replace(request, audit=True))
            self.session.content(case, int(seed))
            if outcome.status != "PASSED":
                break
        else:
            outcome = self.budget.call(self.session, handle, request)
        if outcome.status == "PASSED":
            return outcome
        self._add(group, handle.name, outcome)
        return None

    def _judge_calls(self, record: Group, sample: int) -> None:
        """Make the judge's own calls beside a process of each submission: the readers, and on a GPU the empty call."""
        for name in ("empty", *self.reads) if self.session.device == "cuda" else self.reads:
            outcome = self._judge_call(record, name, sample)
            if sample >= 0 and self.session.device == "cuda":
                key, us = (OUTSIDE, outcome.outside_us) if name == "empty" else (READY, outcome.ready_us)
                record.judge_us.setdefault(key, []).append(measured(us))

    def _judge_call(self, record: Group, name: str, sample: int) -> Outcome:
        """Make one of the judge's own calls. RuntimeError if it fails."""
        outcome = self.session.call(self.judge, CallRequest(self.counts.buffers, name, self.reads, stay=True))
        if outcome.status != "PASSED":
            content, reason = self.session.present, outcome.reason.partition("\n")[0]
            if "memory" in reason and content.moved > sum(content.sizes.values()):
                raise ProblemError(
                    f"bytes_moved() of {content.case} says {content.moved} bytes, and the judge has no room to read as "
                    f"many: {reason}"
                )
            raise RuntimeError(f"the judge's own call {name!r} failed: {outcome.reason}")
        if sample >= 0:
            spun_us = gate.EMPTY_US if name == "empty" and self.session.device == "cpu" else 0.0
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
            # Where calls are going to be audited, the profiler's memory is there before anything is counted.
            audit = handle.runner == f"{handle.name} {self.watched[handle.name]}"
            self.session.count_kept(handle, CallRequest(self.counts.buffers, audit=audit))

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

    def call(self, session: Session, handle: RunnerHandle, request: CallRequest) -> Outcome:
        """Make a call within the time that is left. TIMEOUT, without a call: none is left."""
        spent_s = self.spent_s.get(handle.name, 0.0)
        if spent_s >= self.limit_s:
            return Outcome("TIMEOUT", f"its calls of this phase took the {self.limit_s:g} s that the problem gives it")
        before = time.monotonic()
        outcome = session.call(handle, dataclasses.replace(request, remaining_s=self.limit_s - spent_s))
        self.spent_s[handle.name] = spent_s + time.monotonic() - before
        return outcome


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
            second = budget.call(session, handle, CallRequest(1))
            if second.status != "PASSED":
                second.reason = f"right with the case's seed, and with another one (--seed {seed}): {second.reason}"
            yield handle, first if second.status == "PASSED" else second
