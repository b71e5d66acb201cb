"""The judgement of one run: the test cases, the timed calls, and the confirmation of a new first place.

Of many runs of one variant the luckiest would lead. So a time that would lead only causes a second measurement: in
fresh processes, in interleaved pairs with the present leader if its file is in variants/. It alone ranks; the records
of the first one are kept as superseded. An empty board has no leader, and in a run of `--all` with the leader's present
source all are measured anew: these need no confirmation.
"""

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType

from harness.judge import console, invariance, machine, phases, verdict
from harness.judge.events import Events
from harness.judge.handle import RunnerHandle
from harness.judge.outcome import Outcome
from harness.judge.readings import NOTHING, Group, finished, of_group, of_outcome
from harness.judge.selection import Selection
from harness.judge.session import Session
from harness.judge.verdict import Recorder, Result
from harness.problem.folders import Case, Submission, UsageError
from harness.results import environment, ranking, record, text
from harness.results.ranking import Leader
from harness.results.run_file import RunFile

_SHARED = "device shared with "  # begins the one warning of it, whichever processes come and go


def phases_of(device: str) -> ModuleType:
    """Return the module whose run_tests and run_benchmarks serve a device."""
    if device != "cuda":
        return phases
    from harness.judge import replay  # and with it much that no run on a CPU needs

    return replay


def challenger(judged: list[Result], leader: Leader, everything: bool) -> Result | None:
    """Return who leads this run and would take the lead, its interval all below the leader's, unconfirmed; or None."""
    ranked = [j for j in judged if not j.submission.baseline and not ranking.is_repeat(j.submission.name)]
    timed = [(j.metric, j) for j in ranked if j.verdict == "PASSED" and j.metric]
    if not timed or (everything and any(_is_leader(j, leader) for _, j in timed)):
        return None
    metric, first = min(timed, key=lambda pair: pair[0][0])
    return None if first.confirms or _is_leader(first, leader) or not metric[2] < leader.lo else first


def _is_leader(j: Result, leader: Leader) -> bool:
    return (j.submission.name, j.source_hash) == (leader.variant, leader.source_hash)


@dataclass
class Judging:
    """Fills in results. file: of a recorded run; None: nothing is confirmed. enter: makes an opponent part of it."""

    selection: Selection
    recorder: Recorder
    file: RunFile | None
    enter: Callable[[Submission], Result | None]
    events: Events
    opponents: list[Result] = field(default_factory=list)  # leaders that took part in a confirmation only
    judged: list[Result] = field(default_factory=list)
    cases: list[Case] = field(default_factory=list)
    handles: dict[str, RunnerHandle] = field(default_factory=dict)
    failures: console.Failures = field(default_factory=console.Failures)

    def __post_init__(self) -> None:
        self.problem, self.device, self.args = self.selection.problem, self.selection.device, self.selection.args

    def run(self, judged: list[Result], tests: list[Case], cases: list[Case]) -> None:
        """Judge these on the test cases, and time those that pass, unless the mode is "test". Without any case, and in
        a recorded run, see whether equal calls have equal bits.
        """
        self.judged, self.cases = judged, cases
        with contextlib.ExitStack() as stack:
            self._note_others()
            stack.callback(self._note_others)
            session = stack.enter_context(Session(self.problem, self.device, self.args.timeout))
            session.progress = stack.enter_context(console.progress(self.events.step))
            asked = [{"op": "zeros", "case": case.params, "seed": case.seed} for case in (tests or cases)[:2]]
            if not self.problem.ours and any(session.checker.ask(request)["accepts"] for request in asked):
                self._warn("this folder's check accepts an answer of zeros")
            if tests:
                self._test(session, tests)
            if self.file or not (tests or cases):
                self._repeat(session)
            if self.args.mode != "test":
                counts = phases.COUNTS[self.device, bool(self.args.against)]
                counts = dataclasses.replace(counts, processes=self.args.processes or counts.processes)
                right = [j for j in judged if j.right]
                if right and (len(right) == 2 or not counts.paired):
                    self._time(session, right, counts, "benchmark")
                    if self.file and not self.args.shard:  # a part of the cases has no leader
                        self._confirm(session, self.file)
            for j in (*judged, *self.opponents):
                handle = self.handles.get(j.submission.name)
                j.audit = dataclasses.asdict(handle.audit) if handle else None
                calls = [o for _, o in j.tests] + [o for t in j.times for group in t.timing.outcomes for o in group]
                odd = [o.reason for o in calls if o.status == "PASSED" and o.reason and not self.problem.ours]
                j.remark = "; ".join(filter(None, [session.remark, *odd[:1]]))
            self.recorder.warnings += session.notes

    def _test(self, session: Session, cases: list[Case]) -> None:
        # In a recorded run a baseline is checked where it is timed: packages compile for seconds for each other shape.
        tested = [j for j in self.judged if not (self.file and self.cases and j.submission.baseline)]
        by_name = {j.submission.name: j for j in tested}
        have = finished(self.file.contents.work) if self.file else NOTHING
        handles = [self._handle(j) for j in tested]

        def done(handle: RunnerHandle, case: Case, outcome: Outcome) -> None:
            tests = by_name[handle.name].tests
            if self.file and have.test(handle.name, len(tests)) is None:
                self.file.write("outcome", submission=handle.name, case=len(tests), outcome=of_outcome(outcome))
            tests.append((case, outcome))
            if outcome.status not in ("PASSED", "UNSUPPORTED"):
                self.failures.add(handle.name, case, outcome)
                self.events.failed(handle.name, case.params, outcome.status, outcome.reason)

        twice: tuple[Case, ...] = ()
        if self.file and self.args.seed is None:  # judge on secret contents too, as what is timed is anyway
            timed = [case.params for case in self.problem.benchmarks.get(self.device, ())]
            twice = tuple(case for case in cases if case.params not in timed)
        phases_of(self.device).run_tests(session, handles, cases, done, have, twice)
        self.failures.close()
        for j in tested:
            count = Counter(o.status for _, o in j.tests)
            rest = f"; {count['UNSUPPORTED']} UNSUPPORTED: {j.submission.limits}" if count["UNSUPPORTED"] else ""
            rest += f"; {len(cases) - len(j.tests)} not called after this failure" if len(j.tests) < len(cases) else ""
            console.say(
                f"{j.submission.name}  {count['PASSED']} of {text.counted(len(cases), 'test case')} right{rest}"
            )

    def _repeat(self, session: Session) -> None:
        """See whether equal calls have equal bits. A fault is that of a test case; without any, what passes is too."""
        right = [j for j in self.judged if j.right]
        handles, each_call = [self._handle(j) for j in right], phases_of(self.device).each_call
        by_name = invariance.run(session, handles, self.selection.target, self.args.case or "", each_call)
        for j in (j for j in right if j.submission.name in by_name):
            bits = j.bits = by_name[j.submission.name]
            if bits.fault or not self.file:
                j.tests.append((bits.case, bits.fault or Outcome("PASSED")))
            if bits.fault:
                self.failures.add(j.submission.name, bits.case, bits.fault)
        console.bits(right)
        self.failures.close()

    def _time(self, session: Session, judged: list[Result], counts: phases.Counts, phase: str) -> None:
        """Time these, and pair the first with the second. Finished groups of `phase` come from the run's file."""
        done, have = None, NOTHING
        if file := self.file:
            have = finished(file.contents.work, phase)

            def done(group: Group) -> None:
                file.write("group", phase=phase, **of_group(group))

        handles = [self._handle(j) for j in judged]
        run, cases = phases_of(self.device).run_benchmarks, self.cases
        timings, all_readings = run(session, handles, cases, counts, done, have)
        for j in judged:
            for timing in timings[j.submission.name]:
                if (failure := timing.failure) and failure.status != "UNSUPPORTED":
                    self.failures.add(j.submission.name, timing.case, failure)
                    self.events.failed(j.submission.name, timing.case.params, failure.status, failure.reason)
            j.times = [verdict.aggregate(t, g) for t, g in zip(timings[j.submission.name], all_readings, strict=True)]
        self.failures.close()
        if counts.paired:
            verdict.pair(*judged)

    def _confirm(self, session: Session, file: RunFile) -> None:
        """Time the submission that would take the lead once more, until none would."""
        decided = file.lines("confirm")  # by the run that is resumed
        while decision := decided.pop(0) if decided else self._challenge(file):
            leader, name = decision["leader"], decision["challenger"]
            challenger = next(j for j in self.judged if j.submission.name == name)
            timed = [challenger]
            if decision["opponent"]:
                opponent = self._opponent(leader["variant"])
                if opponent is None or opponent.source_hash != decision["opponent"]:
                    raise UsageError(f"--resume: {leader['variant']} changed since run {self.recorder.run_id} began")
                timed.append(opponent)
            paired, us = len(timed) == 2, challenger.metric[0] if challenger.metric else math.nan
            present = f"{leader['variant']} {text.us(leader['value'])} us in run {leader['run_id']}"
            how = f"in fresh processes, {'paired with it' if paired else 'alone'}"
            console.say(f"{name} would lead: {text.us(us)} us, {present}. Confirming {how}")
            asked = [(j, j.against, j.against_all) for j in timed if j.against_all] if self.args.against else []
            for j in timed:
                if j.times:
                    j.before.append(dataclasses.replace(j, before=[]))
                j.times, j.against, j.against_all = [], [], None
            keys = ("variant", "run_id", "source_hash")
            challenger.confirms = {key: leader[key] for key in keys} | {"paired": paired}
            self._time(session, timed, phases.COUNTS[self.device, paired], f"confirm {name}")
            for j, each, whole in asked:  # what --against asked for stays, with the ratio of those pairs
                if (j.against_all or {}).get("variant") != whole["variant"]:
                    j.against, j.against_all = each, whole

    def leader(self) -> Leader | None:
        """Return who leads the board of the cases of this run, by the records that there are now; None: nobody."""
        wanted = [ranking.case_label(case.params) for case in self.cases]
        records = record.read(environment.machine(self.device), self.problem.name)
        of_board = [entry for entry in records if entry["target"] == self.selection.target]
        return (ranking.leaders(of_board, wanted, self.problem.ranking_by) or [None])[-1] if wanted else None

    def _challenge(self, file: RunFile) -> dict | None:
        """Return the next confirmation, and write it: challenger, leader, opponent (its source hash or None)."""
        leader = self.leader()
        if leader is None or (j := challenger(self.judged, leader, self.args.all)) is None:
            return None
        opponent = None if leader.variant == j.submission.name else self._opponent(leader.variant)
        source_hash = opponent.source_hash if opponent else None
        decision = {"challenger": j.submission.name, "leader": dataclasses.asdict(leader), "opponent": source_hash}
        file.write("confirm", **decision)
        return decision

    def _opponent(self, name: str) -> Result | None:
        """Return the leader of that name, from this run or from variants/; None if it cannot be timed here."""
        for j in (*self.judged, *self.opponents):
            if j.submission.name == name:
                return j if not j.status and all(o.status == "PASSED" for _, o in j.tests) else None
        if not (self.problem.folder / "variants" / f"{name}.py").is_file():
            return None
        j = self.enter(self.problem.variant(name))
        if j:
            self.opponents.append(j)
        return j

    def _handle(self, j: Result) -> RunnerHandle:
        name = j.submission.name
        if name not in self.handles:
            self.handles[name] = RunnerHandle(name, j.submission, self.selection.target)
        return self.handles[name]

    def _note_others(self) -> None:
        """Report and record other users of the GPU, while no process of this run uses it."""
        if self.device == "cpu":
            return
        try:
            users = machine.users(environment.gpu_uuid())
            if users and not any(warning.startswith(_SHARED) for warning in self.recorder.warnings):
                self._warn(f"{_SHARED}{'; '.join(users)}")
        except RuntimeError as error:
            self._warn(f"other users of the device unknown: {error}")

    def _warn(self, warning: str) -> None:
        """Print and record a warning, once."""
        if warning not in self.recorder.warnings:
            console.say(f"warning: {warning}")
            self.recorder.warnings.append(warning)
