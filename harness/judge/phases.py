"""The two phases of a judgement: one call on every test case, then fixed numbers of timed calls on benchmark cases.

All submissions get equal contents, one after the other, so that drift affects all of them. The order is turned round;
of a pair it is A B B A. The judge checks each timed call, and draws its seed after the previous call was closed.
"""

import dataclasses
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from harness.judge import batch, readings
from harness.judge.call import CallRequest
from harness.judge.events import Progress, Step
from harness.judge.handle import RunnerHandle
from harness.judge.outcome import STOP_LIMIT_US, Batch, Outcome, measured
from harness.judge.readings import OUTSIDE, READY, CaseReadings, ReferenceReadings, Timing
from harness.judge.room import Room, choose
from harness.judge.session import Session
from harness.judge.work import NOTHING, Finished, Group, GroupDone
from harness.problem.folders import Case, ProblemError, UsageError
from harness.results import environment
from harness.runner import gate, matmul, native

# Processes of each submission, and in a paired run: each process has a different level, which only more of them average
# out. With three, a 99 % interval is 5.7 times as wide as they scatter, and on a busy CPU a ratio of 13 was UNDECIDED;
# with six it is 1.6.
PROCESSES = {"cuda": 6, "cpu": 3}
PAIRED_PROCESSES = {"cuda": 40, "cpu": 6}
TOGETHER = {"cuda": 3, "cpu": 1}  # of them alive at once, taking turns, so that starting them costs less
PAIRED_TOGETHER = {"cuda": 8, "cpu": 1}
# Of all memory, for weights that all processes alive at once may have prepared. The judge has as much again for each,
# its own copy, and for a moment two more, and reads zeros of as many bytes as a call must move. V4-Pro's weights have
# 14.3 GB: three times them ran out of an H200's memory, and twice them of an H100's 80 GB.
PREPARED_SHARE = 0.23
SAMPLES = {"cuda": 10, "cpu": 3}  # timed calls a process and case: 60 and 9 in all
PAIRS = {"cuda": 24, "cpu": 3}  # the same for a paired run
BUFFERS = {"cuda": 3, "cpu": 2}  # addresses that calls rotate over
# Calls that compile, show the enqueue time and touch every buffer once; checked like all others.
WARMUPS = {"cuda": 3, "cpu": 1}
# Unscored calls of a case in one process, at random places, with a look at the driver's records. On a CPU every call is
# looked at.
AUDITS = {"cuda": 3, "cpu": 0}
# Times the samples of a process: rounds more at most, in place of calls beside which other processes took the machine.
EXTRA_ROUNDS = {"cuda": 0, "cpu": 2}
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
    """The counts of a benchmark. processes: fresh ones of each submission, `together` of them at once; samples,
    warmups, audits: calls per process and case; extra: further rounds at most, if the machine was busy.
    """

    processes: int
    samples: int
    warmups: int
    buffers: int
    audits: int
    together: int = 1
    extra: int = 0


def default_counts(device: str, paired: bool = False) -> Counts:
    """Return the counts of a run on `device`. No submission can change them."""
    count, together, samples = (PAIRED_PROCESSES, PAIRED_TOGETHER, PAIRS) if paired else (PROCESSES, TOGETHER, SAMPLES)
    extra = EXTRA_ROUNDS[device] * samples[device]
    return Counts(
        count[device], samples[device], WARMUPS[device], BUFFERS[device], AUDITS[device], together[device], extra
    )


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
    paired: bool = False,
    group: GroupDone | None = None,
    have: Finished = NOTHING,
    limit_s: float | None = None,
    counts: Counts | None = None,
) -> tuple[dict[str, list[Timing]], list[ReferenceReadings]]:
    """Time every submission on every case. Return (timings by submission, the judge's own readings by case). group:
    receives each finished group of calls (one process, one case). Groups in `have` are not measured again. limit_s: for
    all calls of a submission together.
    """
    counts = counts or default_counts(session.device, paired)
    made = Benchmark(
        session=session,
        handles=handles,
        cases=cases,
        progress=progress,
        paired=paired,
        done=group,
        have=have,
        budget=Budget(limit_s),
        counts=counts,
    )
    for handle in handles:
        handle.lost = 0
    made.run(range(counts.processes))
    return made.timings, [made.reference(number) for number in range(len(cases))]


@dataclass
class _Group:
    """The calls of one process of each submission, of one part of them, on one case, as they come in. audits: samples
    at which one is due. spare: calls beside which other processes took the machine, used where there are no others.
    late: how many calls were stopped too late, and do not count.
    """

    process: int
    part: int
    handles: list[RunnerHandle]
    outcomes: dict[str, list[Outcome]]
    audits: dict[str, list[int]]
    seeds: list[str] = field(default_factory=list)
    judge_us: dict[str, list[float]] = field(default_factory=dict)
    spare: dict[str, list[Outcome]] = field(default_factory=dict)
    late: dict[str, int] = field(default_factory=dict)
    batches: dict[str, list[Batch]] = field(default_factory=dict)


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
    paired: bool
    done: GroupDone | None
    have: Finished
    budget: "Budget"
    counts: Counts
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

    def run(self, processes: range) -> None:
        """Time the processes of these numbers, as many at once as have room."""
        parts, together = self.parts()
        self.total = -(-len(processes) // together) * len(parts) * len(self.cases) * self.rounds
        for first in range(processes.start, processes.stop, together):
            for part, members in enumerate(parts):
                self.process_group(range(first, min(first + together, processes.stop)), part, members)
        self.progress(Step("benchmark", self.total, self.total, "done"))

    def parts(self) -> tuple[list[list[RunnerHandle]], int]:
        """Return the submissions in parts that are alive at once, and how many processes of each; set the buffers of
        each process. There is one part, unless all of it has no room.
        """
        room = Room(len(self.handles), self.counts.together, self.counts.buffers)
        if self.session.problem.ours:
            room = self._beside_weights(room)
        elif self.handles:
            room = choose([self.session.footprint(case) for case in self.cases], room, self.paired)
        self.counts = dataclasses.replace(self.counts, buffers=room.buffers)
        size = max(1, room.handles)
        return [self.handles[i : i + size] for i in range(0, len(self.handles), size)], room.together

    def _beside_weights(self, most: Room) -> Room:
        """Return how many submissions and processes may be alive, so that all prepared weights have room. UsageError: a
        pair, which is alive together, has none.
        """
        largest = max((case.weight_bytes for case in self.cases), default=0)
        room = self.counts.together * len(self.handles)
        if largest:
            total = self.session.memory()
            room = int(PREPARED_SHARE * total / largest)
            if self.paired and room < len(self.handles):
                raise UsageError(
                    f"a case has {largest / 1e9:.1f} GB of weights, and beside the judge's copies two processes that "
                    f"prepare them have no room in {total / 1e9:.0f} GB: leave it out with --case, time each without "
                    "--against, or use a machine with more memory"
                )
        size = len(self.handles) if self.paired else min(len(self.handles), max(1, room))
        return Room(size, max(1, min(self.counts.together, room // size)), most.buffers) if size else most

    def process_group(self, processes: range, part: int, handles: list[RunnerHandle]) -> None:
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
                if known := self.have.group(process, number, part):
                    self._take(known)
                else:
                    groups.append(self._group(process, part, number, living[process]))
            if groups:
                self._case(number, groups, rated)
                rated = True
            self.rounds_done += self.rounds
        self.session.stop(self.judge, *everybody)

    def _take(self, known: Group) -> None:
        """Take over a group that an interrupted run finished."""
        for name, outcomes in known.outcomes.items():
            timing = self.timings[name][known.case]
            timing.outcomes[known.process] += [o for o in outcomes if o.status == "PASSED"]
            timing.failure = timing.failure or next((o for o in outcomes if o.status != "PASSED"), None)
            timing.batches += known.batches.get(name, [])
        self.readings[known.case].add(known.judge_us, known.seeds)
        self.readings[known.case].state = known.state

    def _group(self, process: int, part: int, number: int, handles: list[RunnerHandle]) -> _Group:
        """Return an empty group with the places of its audited calls."""
        names = [handle.timed_as for handle in handles]
        audits = {
            name: [random.randrange(self.counts.samples) for _ in range(self.counts.audits)]
            for name in names
            if self.watched[name] == process
        }
        return _Group(process, part, handles, {n: [] for n in names if not self.timings[n][number].failure}, audits)

    def _case(self, number: int, groups: list[_Group], rated: bool) -> None:
        """Make the calls of one case in the processes that are alive. rated: these have timed the matrix product."""
        session, case, device = self.session, self.cases[number], self.session.device
        of_weights = [session.weights(case)]
        for sample in range(-self.counts.warmups, self.counts.samples + self.counts.extra):
            if sample == 0 and of_weights[0]:  # others, for which every answer and everything prepared is new
                of_weights.append(session.weights(case))
                self._unscored(number, groups)
            for group in groups:
                if sample < self.counts.samples or self._lacking(number, group):
                    self._show(case, group, sample)
                    scored = sample >= 0
                    measure = not scored or (device == "cuda" and sample == self.counts.samples - 1)
                    self._round(number, group, sample, scored, measure)
            if sample < self.counts.samples:
                self._own_calls(groups[0], sample)
        if of_weights[0]:
            self._unscored(number, groups, measure=True)
        if device == "cuda":
            self._batches(number, groups)
        if not rated:
            for sample in range(-self.counts.warmups, self.counts.samples):
                self._own_call(groups[0], matmul.NAME, sample)
        groups[0].seeds += [f"weights {seed}" for seed in of_weights if seed]
        found = self.readings[number]
        if device == "cuda":
            found.state = environment.clocks()
        found.bytes = found.bytes or session.default_bytes()
        for group in groups:
            for handle in group.handles:
                timing = self.timings[handle.timed_as][number]
                self._complete(number, group, handle.timed_as)
                if not timing.failure and (fault := handle.look()):
                    timing.failure = fault
                    group.outcomes[handle.timed_as].append(fault)
            found.add(group.judge_us, group.seeds)
            if self.done:
                self.done(
                    Group(
                        group.process,
                        number,
                        group.outcomes,
                        group.judge_us,
                        group.seeds,
                        found.state,
                        group.part,
                        group.batches,
                    )
                )

    def _batches(self, number: int, groups: list[_Group]) -> None:
        """Read a batch of each submission that had none, in one process; and where the times are shorter than it
        allows, one in each further process.
        """
        contents, tried, noted = None, False, 0
        for group in groups:
            for handle in group.handles:
                timing = self.timings[handle.timed_as][number]
                if handle.baseline or not timing.flat("us") or timing.failure or not handle.process:
                    continue  # a baseline is no adversary, and may prepare for the contents that it sees
                if timing.batches and not timing.undercuts:
                    continue
                if not tried:
                    contents, tried = batch.make(self.session, self.cases[number]), True
                if contents is None:
                    continue
                most = max(1, batch.READINGS // self.counts.processes)
                found = batch.read(self.session, handle, self.judge, contents, timing.median_us, most)
                group.seeds += [f"batch {seed}" for seed in contents.used[noted:]]
                noted = len(contents.used)
                if isinstance(found, Outcome):
                    timing.failure = found
                    group.outcomes[handle.timed_as].append(found)
                else:
                    timing.batches.append(found)
                    group.batches.setdefault(handle.timed_as, []).append(found)
        if contents:
            batch.drop(self.session)

    def _show(self, case: Case, group: _Group, sample: int) -> None:
        """Report progress: the call of a sample is about to be made."""
        of = self.counts.samples
        call = "warm-up" if sample < 0 else f"call {sample + 1}/{of}" if sample < of else "again, the machine was busy"
        n = self.rounds_done + min(sample + self.counts.warmups, self.rounds)
        said = f"process {group.process + 1}/{self.counts.processes}  {case}  {call}"
        self.progress(Step("benchmark", n, self.total, said))

    def _lacking(self, number: int, group: _Group) -> list[str]:
        timings = {handle.timed_as: self.timings[handle.timed_as][number] for handle in group.handles}
        return [n for n, t in timings.items() if not t.failure and len(t.outcomes[group.process]) < self.counts.samples]

    def _unscored(self, number: int, groups: list[_Group], measure: bool = False) -> None:
        """On a CPU, make a round that is not scored: a process that prepares weights, or whose memory is measured, runs
        before its call, and could do work for it.
        """
        for group in groups if self.session.device == "cpu" else ():
            self._round(number, group, 0, False, measure)

    def _round(self, number: int, group: _Group, sample: int, scored: bool, measure: bool) -> None:
        """Make one call of each submission on the same new contents; of a pair both count or none, unless one of them
        does not serve the case. measure: what it leaves behind in memory counts.
        """
        group.seeds.append(self.session.content(self.cases[number]))
        lacking = self._lacking(number, group)
        outcomes = {}
        everybody = self._order(group, sample)
        if self.session.device == "cpu":  # the judge's empty call, whose reading is taken off, is made among the others
            everybody.insert(random.randint(0, len(everybody)), self.judge)
        for handle in everybody:
            if handle is self.judge:
                self._own_call(group, "empty", sample if scored else -1)
            elif not scored or self.paired or handle.timed_as in lacking:
                outcomes[handle.timed_as] = self._call(number, group, handle, sample, measure)
        if not scored or (self.paired and self._failures(number, group)):
            return
        outcomes = {name: outcome for name, outcome in outcomes.items() if outcome}
        late = {name for name, outcome in outcomes.items() if outcome.late}
        for name in late:
            group.late[name] = group.late.get(name, 0) + 1
            if group.late[name] > MOST_LATE:
                self._fail(number, group, name, STOPPED_LATE)
        # Of a pair both count or none.
        any_busy = self.paired and any(outcome.busy for outcome in outcomes.values())
        for name, outcome in outcomes.items():
            if late if self.paired else name in late:
                continue
            if outcome.busy or any_busy:
                group.spare.setdefault(name, []).append(outcome)
            else:
                self.timings[name][number].outcomes[group.process].append(outcome)
                group.outcomes[name].append(outcome)

    def _order(self, group: _Group, sample: int) -> list[RunnerHandle]:
        """Return the handles of a group in the order of their calls in a round: rotated by 0, 2, 4, ..., each followed
        by the same backwards. So each comes before each other one in half of the rounds.
        """
        # Odd, since what has a period of two in all processes, as buffers on a CPU have, must not go with the order.
        number = group.process * (self.counts.samples | 1) + sample
        shift = number // 2 * 2 % max(1, len(group.handles))
        rotated = group.handles[shift:] + group.handles[:shift]
        return rotated if number % 2 == 0 else rotated[::-1]

    def _failures(self, number: int, group: _Group) -> dict[str, Outcome]:
        """Return the failures in a case by submission, but for one that does not serve it: that says nothing of the
        other one, which is timed without it.
        """
        found = {handle.timed_as: self.timings[handle.timed_as][number].failure for handle in group.handles}
        return {name: failure for name, failure in found.items() if failure and failure.status != "UNSUPPORTED"}

    def _complete(self, number: int, group: _Group, name: str) -> None:
        """Give a submission with too few quiet calls the busy ones too."""
        timing = self.timings[name][number]
        missing = self.counts.samples - len(timing.outcomes[group.process])
        if timing.failure or missing <= 0:
            return
        spare = group.spare.get(name, [])[:missing]
        timing.outcomes[group.process] += spare
        group.outcomes[name] += spare
        if len(spare) == missing:
            return
        reason = STOPPED_LATE
        for other, failed in self._failures(number, group).items():
            reason = (
                f"not timed: {other} is {failed.status}, and of a pair both count or none; time it without --against"
            )
        self._fail(number, group, name, reason)

    def _fail(self, number: int, group: _Group, name: str, reason: str) -> None:
        failure = self.timings[name][number].failure = Outcome("INVALID_MEASUREMENT", reason)
        group.outcomes[name].append(failure)

    def _call(self, number: int, group: _Group, handle: RunnerHandle, sample: int, measure: bool) -> Outcome | None:
        """Make one call of a submission, and before it the audited ones that are due. Return None if it failed."""
        name, case = handle.timed_as, self.cases[number]
        timing = self.timings[name][number]
        if timing.failure:
            return None
        request = CallRequest(self.counts.buffers, measure=measure, stay=sample != self.counts.samples - 1)
        for _ in range(group.audits.get(name, []).count(sample)):  # each on contents that no other call has
            seed = group.seeds[-1]
            group.seeds.insert(-1, self.session.content(case))
            outcome = handle.look() or self.budget.call(self.session, handle, dataclasses.replace(request, audit=True))
            self.session.content(case, int(seed))
            if outcome.status != "PASSED":
                break
        else:
            outcome = self.budget.call(self.session, handle, request)
        if outcome.status == "PASSED":
            return outcome
        timing.failure = outcome
        group.outcomes.setdefault(name, []).append(outcome)
        return None

    def _own_calls(self, group: _Group, sample: int) -> None:
        """Make the judge's own calls beside a process of each submission: the readers, and on a GPU the empty call."""
        for what in ("empty", *self.reads) if self.session.device == "cuda" else self.reads:
            outcome = self._own_call(group, what, sample)
            if sample >= 0 and self.session.device == "cuda":
                key, us = (OUTSIDE, outcome.outside_us) if what == "empty" else (READY, outcome.ready_us)
                group.judge_us.setdefault(key, []).append(measured(us))

    def _own_call(self, group: _Group, what: str, sample: int) -> Outcome:
        """Make one of the judge's own calls. RuntimeError if it fails."""
        outcome = self.session.call(self.judge, CallRequest(self.counts.buffers, what, self.reads, stay=True))
        if outcome.status != "PASSED":
            content, said = self.session.present, outcome.reason.partition("\n")[0]
            if "memory" in said and content.moved > sum(content.sizes.values()):
                raise ProblemError(
                    f"bytes_moved() of {content.case} says {content.moved} bytes, and the judge has no room to read as "
                    f"many: {said}"
                )
            raise RuntimeError(f"the judge's own call {what!r} failed: {outcome.reason}")
        if sample >= 0:
            spun_us = gate.EMPTY_US if what == "empty" and self.session.device == "cpu" else 0.0
            group.judge_us.setdefault(what, []).append(measured(outcome.us) - spun_us)
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
            audit = handle.name == f"{handle.timed_as} {self.watched[handle.timed_as]}"
            self.session.count_kept(handle, CallRequest(self.counts.buffers, audit=audit))

    def reference(self, number: int) -> ReferenceReadings:
        """Return the reference readings of a case, and settle its timings by them."""
        timings = [of_cases[number] for of_cases in self.timings.values()]
        # Processes that live together share a reading, and a resumed run has those of the run before, beside their
        # first case.
        matmul_us = [us for one in self.readings for us in one.judge_us.get(matmul.NAME, [])]
        found = self.readings[number]
        if found.bytes is None:  # a folder that does not say, and no group was run now
            self.session.content(self.cases[number])
            found.bytes = self.session.default_bytes()
        return readings.reference(found, timings, self.session.device, list(self.reads), matmul_us)


class Budget:
    """The seconds that the calls of each submission may take together in one phase, None for no such limit.

    GPU MODE's test_timeout, benchmark_timeout and ranked_timeout. Every call has its own limit besides.
    """

    def __init__(self, limit_s: float | None) -> None:
        self.limit_s = math.inf if limit_s is None else limit_s
        self.spent_s: dict[str, float] = {}  # by submission, over all its processes

    def call(self, session: Session, handle: RunnerHandle, request: CallRequest) -> Outcome:
        """Make a call within the time that is left. TIMEOUT, without a call: none is left."""
        spent_s = self.spent_s.get(handle.owner, 0.0)
        if spent_s >= self.limit_s:
            return Outcome("TIMEOUT", f"its calls of this phase took the {self.limit_s:g} s that the problem gives it")
        before = time.monotonic()
        outcome = session.call(handle, dataclasses.replace(request, remaining_s=self.limit_s - spent_s))
        self.spent_s[handle.owner] = spent_s + time.monotonic() - before
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
