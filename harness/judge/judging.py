"""The judgement of one run: the test cases, the timed calls, and the confirmation of a new first place."""

import argparse
import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence

from harness.judge import confirm, console, device_lock, journal, phases, spread, verdict
from harness.judge.events import Events, Progress
from harness.judge.handle import RunnerHandle
from harness.judge.journal import Have, Journal
from harness.judge.outcome import Audit, Outcome
from harness.judge.session import Session
from harness.judge.spread import Place, Share, Work
from harness.judge.verdict import Recorder, Result
from harness.problem.folders import Case, Problem, Submission, UsageError
from harness.results import environment, ranking, record, stats


class Judging:
    """Fills in the results of the submissions. The caller holds the device, and records.

    journal: of a recorded run, whose finished work is taken from it; None: the run is not recorded, and nothing is
    confirmed. enter: makes a submission part of the run, or returns None if it cannot be. devices: those that cases are
    spread over, the session's own first; fewer than two are none.
    """

    def __init__(
        self,
        problem: Problem,
        device: str,
        target: str,
        args: argparse.Namespace,
        recorder: Recorder,
        journal: Journal | None,
        enter: Callable[[Submission], Result | None],
        events: Events,
        devices: Sequence[Place] = (),
    ) -> None:
        self.devices = devices
        self.problem, self.device, self.target, self.args = problem, device, target, args
        self.recorder, self.journal, self.enter, self.events = recorder, journal, enter, events
        self.opponents: list[Result] = []  # leaders that took part in a confirmation only
        self.judged: list[Result] = []
        self.cases: list[Case] = []
        self.handles: dict[str, RunnerHandle] = {}

    def run(self, judged: list[Result], tests: list[Case], cases: list[Case]) -> None:
        """Judge these on the test cases, unless the mode is "benchmark", and time those that pass, unless "test"."""
        self.judged, self.cases = judged, cases
        with contextlib.ExitStack() as stack:
            self._note_others()
            stack.callback(self._note_others)
            if len(self.devices) > 1:
                names = ", ".join(place.name for place in self.devices)
                self.recorder.warnings.append(f"cases spread over {names}, which worked at the same time")
            session = stack.enter_context(Session(self.problem, self.device, self.args.timeout))
            session.say = console.say
            session.progress = progress = stack.enter_context(console.progress(self.events.step))
            if self.args.mode != "benchmark":
                self._test(session, tests, progress)
            if self.args.mode != "test":
                paired = bool(self.args.against)
                right = [j for j in judged if j.right]
                if right and (len(right) == 2 or not paired):
                    self._time(session, right, paired, progress, "benchmark")
                    if self.journal:
                        self._confirm(session, progress, self.journal)
            for j in (*judged, *self.opponents):
                handle = self.handles.get(j.submission.name)
                j.audit = dataclasses.asdict(handle.audit) if handle else self._noted_audit(j.submission.name)
            self.recorder.warnings += session.notes
            # Where a resumed run had nothing left to call, its journal knows the clock.
            noted = self.journal.noted("clock") if self.journal else []
            self.recorder.clock_name = session.clock_name or (noted[-1]["name"] if noted else "")

    def _test(self, session: Session, cases: list[Case], progress: Progress) -> None:
        by_name = {j.submission.name: j for j in self.judged}
        have = self.journal.have() if self.journal else journal.NOTHING
        handles, limit_s = [self._handle(j) for j in self.judged], self.problem.timeouts_s.get("test")
        if len(self.devices) > 1:
            missing = [n for n in range(len(cases)) if any(have.test(name, n) is None for name in by_name)]
            work = dataclasses.replace(self._work(session, self.judged, cases, limit_s), twice=self._twice(cases))
            have = self._spread(session, work, spread.test_shares(missing, len(self.devices)), have, "", progress)

        def done(handle: RunnerHandle, case: Case, outcome: Outcome) -> None:
            tests = by_name[handle.name].tests
            if self.journal and self.journal.have().test(handle.name, len(tests)) is None:
                self.journal.test(handle.name, len(tests), outcome)
            tests.append((case, outcome))
            first = len(tests) == 1  # of many submissions, only this case shows at once that each works
            if len(by_name) == 1 or first or outcome.status not in ("PASSED", "UNSUPPORTED"):
                console.test_line(handle.name, case, outcome)
            if outcome.status not in ("PASSED", "UNSUPPORTED"):
                self.events.failed(handle.name, case.params, outcome.status, outcome.reason)

        phases.run_tests(session, handles, cases, done, progress, have, limit_s, self._twice(cases))
        self._note_audits()
        if len(self.judged) > 1:
            for j in self.judged:
                count = Counter(o.status for _, o in j.tests)
                rest = f"; {count['UNSUPPORTED']} UNSUPPORTED: {j.submission.limits}" if count["UNSUPPORTED"] else ""
                console.say(f"{j.submission.name:<20} {count['PASSED']}/{len(j.tests)} test cases right{rest}")

    def _twice(self, cases: list[Case]) -> tuple[Case, ...]:
        """Return the test cases that a recorded run also judges on secret contents: all but those that it times, whose
        contents are secret anyway.
        """
        if not self.journal or self.args.seed is not None:
            return ()
        timed = [case.params for case in self.problem.benchmarks.get(self.device, ())]
        return tuple(case for case in cases if case.params not in timed)

    def _time(self, session: Session, judged: list[Result], paired: bool, progress: Progress, phase: str) -> None:
        """Time these, and pair the first with the second. Finished groups of `phase` come from the journal."""
        group, have = None, journal.NOTHING
        if self.journal:
            kept, write, have = self.journal, self.journal.group(phase), self.journal.have(phase)

            def group(found: journal.Group) -> None:
                if not kept.noted("clock"):
                    kept.note("clock", name=session.clock_name)
                self._note_audits()
                write(found)

        handles = [self._handle(j) for j in judged]
        limit_s = self.problem.timeouts_s.get("benchmark" if self.args.mode == "benchmark" else "leaderboard")
        how = self._how(paired) if phase == "benchmark" else None  # a confirmation has the judge's own
        if len(self.devices) > 1 and phase == "benchmark":  # a confirmation is a measurement on one device
            how = how or phases.plan(self.device, paired)
            numbers = range(len(self.cases))
            missing = [n for n in numbers if any(have.group(p, n) is None for p in range(how.processes))]
            work = self._work(session, judged, self.cases, limit_s, how, paired)
            shares = spread.timed_shares(missing, how.processes, len(self.devices))
            have = self._spread(session, work, shares, have, phase, progress)
        timings, all_readings = phases.run_benchmarks(
            session,
            handles,
            self.cases,
            progress,
            paired,
            group,
            have,
            limit_s,
            how,
        )
        for j in judged:
            for timing in timings[j.submission.name]:
                if timing.failure and timing.failure.status != "UNSUPPORTED":
                    bad = timing.failure
                    self.events.failed(j.submission.name, timing.case.params, bad.status, bad.reason)
            j.times = [verdict.aggregate(t, g) for t, g in zip(timings[j.submission.name], all_readings, strict=True)]
        if paired:
            percent = self.args.same_within
            verdict.pair(*judged, stats.SAME_WITHIN if percent is None else percent / 100)

    def _work(
        self,
        session: Session,
        judged: list[Result],
        cases: list[Case],
        limit_s: float | None,
        how: phases.Plan | None = None,
        paired: bool = False,
    ) -> Work:
        """Return what the parts of a phase have in common, and compile the submissions once for all of them."""
        session.build(*(self._handle(j) for j in judged))
        plan = dataclasses.asdict(how) if how else None
        return Work(
            self.problem,
            self.device,
            self.target,
            [j.submission for j in judged],
            cases,
            self.args.timeout,
            limit_s,
            plan,
            paired,
        )

    def _spread(
        self, session: Session, work: Work, shares: list[Share], have: Have, phase: str, progress: Progress
    ) -> Have:
        """Do the shares on the devices, and note what they found. Return `have` with it; what was there before stays.
        phase: "" for test cases.
        """
        found = spread.run(work, shares, self.devices, progress, console.say)
        for audits in found.audits:
            for name, audit in audits.items():
                self.handles[name].audit.add(Audit(**audit))
        session.clock_name = session.clock_name or found.clock
        session.notes += [note for note in found.notes if note not in session.notes]
        tests = {key: outcome for key, outcome in found.tests.items() if key not in have.tests}
        groups = {key: group for key, group in found.groups.items() if key not in have.groups}
        if self.journal:
            if session.clock_name and not self.journal.noted("clock"):
                self.journal.note("clock", name=session.clock_name)
            self._note_audits()
            for (name, number), outcome in tests.items():
                self.journal.test(name, number, outcome)
            for group in groups.values():
                self.journal.group(phase)(group)
        return Have({**tests, **have.tests}, {**groups, **have.groups})

    def _how(self, paired: bool) -> phases.Plan | None:
        """Return the counts with as many processes as were asked for; None: the judge's own."""
        if not self.args.processes:
            return None
        return dataclasses.replace(phases.plan(self.device, paired), processes=self.args.processes)

    def _confirm(self, session: Session, progress: Progress, kept: Journal) -> None:
        """Time the submission that would take the lead once more (harness/judge/confirm.py), until none would."""
        settled = kept.noted("confirm")  # by the run that is resumed
        while said := settled.pop(0) if settled else self._challenge(kept):
            leader, name = said["leader"], said["challenger"]
            two = [next(j for j in self.judged if j.submission.name == name)]
            if said["opponent"]:
                opponent = self._opponent(leader["variant"])
                if opponent is None or opponent.source_hash != said["opponent"]:
                    raise UsageError(f"--resume: {leader['variant']} changed since run {self.recorder.run_id} began")
                two.append(opponent)
            us = two[0].metric[0] if two[0].metric else math.nan
            console.say(
                f"{name} would lead: {us:.2f} us, {leader['variant']} {leader['value']:.2f} us in run "
                f"{leader['run_id']}. Confirming in fresh processes, {'paired with it' if two[1:] else 'alone'}"
            )
            asked = [(j, j.against, j.against_all) for j in two if j.against_all] if self.args.against else []
            for j in two:
                if j.times:
                    j.before.append(dataclasses.replace(j, before=[]))
                j.times, j.against, j.against_all = [], [], None
            keys = ("variant", "run_id", "source_hash")
            two[0].confirms = {key: leader[key] for key in keys} | {"paired": len(two) == 2}
            self._time(session, two, len(two) == 2, progress, f"confirm {name}")
            for j, each, whole in asked:  # what --against asked for stays, with the ratio of those pairs
                if (j.against_all or {}).get("variant") != whole["variant"]:
                    j.against, j.against_all = each, whole

    def _challenge(self, kept: Journal) -> dict | None:
        """Return the next confirmation, and note it: challenger, leader, opponent (its source hash or None)."""
        wanted = [ranking.case_label(case.params) for case in self.cases]
        records = record.read(environment.machine(self.device), self.problem.name)
        leader = confirm.present_leader(records, self.target, wanted, self.problem.ranking_by)
        j = confirm.challenger(self.judged, leader, self.args.all)
        if j is None or leader is None:
            return None
        opponent = None if leader.variant == j.submission.name else self._opponent(leader.variant)
        other = opponent.source_hash if opponent else None
        said = {"challenger": j.submission.name, "leader": dataclasses.asdict(leader), "opponent": other}
        kept.note("confirm", **said)
        return said

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
            audit = Audit(**(self._noted_audit(name) or {}))
            self.handles[name] = RunnerHandle(name, j.submission, self.target, audit=audit)
        return self.handles[name]

    def _note_audits(self) -> None:
        if self.journal:
            audits = {name: dataclasses.asdict(handle.audit) for name, handle in self.handles.items()}
            self.journal.note("audit", submissions=audits)

    def _noted_audit(self, name: str) -> dict | None:
        lines = self.journal.noted("audit") if self.journal else []
        return next((line["submissions"][name] for line in reversed(lines) if name in line["submissions"]), None)

    def _note_others(self) -> None:
        """Report and record other users of the GPU, while no process of this run uses it."""
        if self.device == "cpu":
            return
        found = []
        for place in self.devices or [None]:
            try:
                gpu = place.lock if place else environment.gpu_uuid()
                found += [f"device shared with {user}" for user in device_lock.users(gpu)]
            except RuntimeError as error:
                found.append(f"other users of the device unknown: {error}")
        for text in found:
            if text not in self.recorder.warnings:
                console.say(f"warning: {text}")
                self.recorder.warnings.append(text)
