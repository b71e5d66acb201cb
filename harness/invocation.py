"""One run of harness/run.py, from its options to its records and exit code. harness/verbs.py has other uses of it."""

import contextlib
import functools
import json
from collections.abc import Sequence
from typing import TextIO

from harness.judge import console, machine, readings, resume, verdict
from harness.judge.events import Events
from harness.judge.judging import Judging
from harness.judge.options import Options
from harness.judge.selection import Selection
from harness.judge.verdict import Recorder, Result
from harness.problem.folders import Case, ProblemError, Submission, UsageError, reading
from harness.results import environment, gpu, output, ranking, record, text
from harness.results.ranking import Leader
from harness.results.record import Contents
from harness.results.run_file import RunFile
from harness.sandbox import process

NEEDS_GPU = "needs a GPU, the run is on a CPU; elsewhere: python -m harness remote HOST ..."


class Run(Selection):
    """One invocation. stdout: where --json - writes; words: further arguments of a verb."""

    def __init__(self, arguments: Options, stdout: TextIO, events: Events, words: Sequence[str] = ()) -> None:
        super().__init__(arguments)
        self.stdout, self.events, self.words = stdout, events, words
        self.stack = contextlib.ExitStack()
        self.judged: list[Result] = []
        self.lines: list[dict] = []
        self.file: RunFile | None = None  # of a recorded run

    @functools.cached_property
    def recorder(self) -> Recorder:
        """The maker of the records. Its run id is the resumed run's, or new."""
        return Recorder(self.problem, self.device, self.file.contents.run_id if self.file else None)

    @functools.cached_property
    def judging(self) -> Judging:
        return Judging(self, self.recorder, self.file, self._enter, self.events)

    @property
    def recorded(self) -> bool:
        """Whether this run has a file of its own: only a whole run in --mode leaderboard does."""
        return self.args.mode == "leaderboard" and not self.args.case

    def cases(self) -> tuple[list[Case], list[Case]]:
        """As Selection's; a recorded run has some more test cases, which its id draws."""
        tests, timed = super().cases()
        whole = self.recorded and self.args.seed is None and not self.args.shard
        seed = int(self.recorder.run_id.rpartition("-")[2], 16) if whole else 0
        return [*tests, *(self.problem.drawn(seed, self.target) if whole else ())], timed

    @property
    def kept(self) -> str:
        """The id of this run if what it has found is kept for --resume, else ""."""
        return self.file.contents.run_id if self.file and self.file.resumable else ""

    @functools.cached_property
    def files(self) -> list[Contents]:
        """What the files of earlier runs of the problem on this machine hold, oldest first."""
        return record.contents(self.machine, self.problem.name, check=readings.check)

    @functools.cached_property
    def records(self) -> list[dict]:
        """The records of this run: those in its file, or where it has none those that it would have."""
        return self.lines or [line for j in self.judged for line in self.recorder.lines(j)]

    def main(self) -> int:
        """Make the run. Return the exit code."""
        args = self.args
        with console.quiet(args.quiet), self.stack:
            name = self.problem.name
            process.harden()
            machine = self.machine  # and with it the device
            if args.resume is not None:
                self._resume()
            self.events.write("start", problem=name, device=self.device, machine=machine, mode=args.mode)
            return self._work()

    def _resume(self) -> None:
        """Reopen the file of the run that goes on, and adopt its options."""
        self.file = resume.chosen(self.files, self.args.resume or "", f"{self.problem.name} on {self.machine}")
        self.stack.callback(self.file.close)
        resume.adopt(self.file, self.args)

    def _tell_files(self) -> None:
        """Say which lines of earlier runs are malformed, and which runs --resume can continue."""
        for file in self.files:
            for complaint in file.complaints:
                console.say(f"warning: {complaint}")
        for run_id in resume.left(self.files) if self.file is None else ():
            console.say(f"note: run {run_id} is unfinished; --resume {run_id} goes on with it")

    def _noted(self, status: str, reason: str) -> int:
        """Note a verdict that is about no submission. Return its exit code."""
        self.events.write("verdict", variant=None, status=status, reason=reason)
        return verdict.EXIT_CODES[status]

    def _work(self) -> int:
        """Judge. What is wrong with the chosen cases and submissions is said before the check, which takes long."""
        args = self.args
        if args.mode == "latency" or (self.times_steps and self.device == "cuda"):
            return self._time_steps()
        if self.recorded:
            record.see_writable(self.machine)
            self._tell_files()
        chosen, checked = self.submissions(), self._has_check()
        if checked:
            self.cases()
        console.say(environment.line() + "\n")
        runnable, judged = self._admitted(chosen), self.judged
        if args.against and (missing := [j for j in judged if j.status == "UNSUPPORTED"]):
            reason = f"{missing[-1].submission.name}: {missing[-1].reason}"
            output.complain(f"harness/run.py: --against: nothing was compared, {reason}")
            return self._noted("UNSUPPORTED", reason)
        if checked and (code := self._check([])):
            return code
        if self.recorded:
            self._begin(judged, *(self.cases() if runnable else ([], [])))
        if runnable:
            self._judge(runnable, *self.cases())
        self._see_unchanged(judged)
        others = [j for j in judged if j.status == "UNSUPPORTED" and self.target not in j.submission.targets]
        if args.all:  # the ranks come before what takes minutes and has none
            self._print([j for j in judged if not any(j is other for other in others)])
        self._compile(others)
        percent = args.fail_on_regression
        slower = [] if percent is None else [where for j in judged for where in verdict.regressions(j, percent)]
        code = verdict.exit_code([j.word for j in judged], args.all) or (verdict.REGRESSION_EXIT if slower else 0)
        self._record(judged, code)
        try:
            self._write_json()
        finally:
            if not args.all:
                self._print(judged)
            self._print_rest(judged)
        with console.quiet(False):
            for where in slower:
                console.say(f"regression of more than {percent:g} %: {where}")
            if percent is not None and not slower:
                console.say(f"no regression of more than {percent:g} % is shown")
        self._tell(judged)
        return code

    def _time_steps(self) -> int:
        """Check the problem's own model and time its steps; --mode latency omits the check, test the times."""
        from harness.tools import latency

        args = self.args
        if args.variant or args.submission or args.all or args.against:
            raise UsageError("a model's own steps are timed: leave --variant, --submission, --all and --against out")
        cases = [] if args.mode == "test" else latency.cases(self.problem, args.case)
        if self.device != "cuda":
            raise UsageError(f"--mode latency {NEEDS_GPU}")
        console.say(environment.line() + "\n")
        code = self._check([]) if args.mode != "latency" and self._has_check() else 0
        if code or args.mode == "test":
            return code
        judged = self._judged(*self.submissions())
        record.see_writable(self.machine)
        try:
            with self._held():
                fault = latency.run(self.problem, self.recorder, judged, cases, self.lines)
        finally:  # interrupted too: each case counts by itself
            code = verdict.exit_code([line["status"] for line in self.lines], everything=True)
            if self.lines and not args.case and args.mode != "benchmark":
                self._begin([judged], [], []).finish(self.lines, code)
                console.say(f"saved as run {self.recorder.run_id}")
        self._write_json()
        if fault:
            raise ProblemError(fault)
        return code

    def _has_check(self) -> bool:
        """Whether the problem's end-to-end check comes first. A resumed run began with it."""
        if self.args.mode == "benchmark" or self.args.resume is not None or not self.problem.ours:
            return False
        there = (self.problem.folder / "check.py").is_file()
        if there and self.args.submission:  # a file from elsewhere must not run outside the jail
            console.say("note: check.py says nothing of files from elsewhere, so it is not run")
        return there and not self.args.submission

    def _check(self, words: Sequence[str]) -> int:
        """Run the problem's end-to-end check, with further arguments. Return the exit code."""
        from harness.tools import modes

        with self._held(timed=False):
            status, fault = modes.check(self.problem, self.device, words, self.args.quiet)
        if status == output.USAGE_EXIT and not fault:
            return output.USAGE_EXIT
        result = f"INCORRECT ({fault}); nothing else is judged" if fault else "PASSED"
        with console.quiet(False):
            console.say(f"{self.problem.name}, end to end: {result}\n")
        return self._noted("INCORRECT" if fault else "PASSED", f"end to end: {result}")

    def _begin(self, judged: list[Result], tests: list[Case], benchmarks: list[Case]) -> RunFile:
        """Begin the run's file, or see that what a resumed run depends on is unchanged. Return the file."""
        run = self.recorder.run(self.machine, self.target, resume.options(self.args), judged, tests, benchmarks)
        if self.file is None:
            self.file = RunFile.begin(run)
            self.stack.callback(self.file.close)
            return self.file
        resume.see_unchanged(self.file, run)
        self.file.write("resumed")
        times = len(self.file.lines("resumed"))
        self.recorder.warnings.append(f"interrupted and resumed {times} time{'s' if times > 1 else ''}")
        outcomes, groups = (len(self.file.lines(kind)) for kind in ("outcome", "group"))
        known = f"{outcomes} test outcomes and {groups} groups of calls are known"
        console.say(f"run {self.recorder.run_id} goes on: {known}")
        return self.file

    def _held(self, timed: bool = True) -> contextlib.AbstractContextManager:
        """Return the lock on the device: for every use of a GPU, and on a CPU for what is timed."""
        held = contextlib.ExitStack()
        for name in [used.uuid for used in gpu.visible()] if self.device == "cuda" else ["cpu"] * timed:
            held.enter_context(machine.hold(name, console.note))
        return held

    def _judged(self, submission: Submission) -> Result:
        with reading(submission.file.name):
            target = self.target if self.target in submission.targets else submission.targets[0]
            judged = Result(submission, target, ranking_by=self.problem.ranking_by)
        if self.recorded:
            runs = ranking.attempts(record.records_of(self.files), submission.name)
            judged.attempt = len(runs | readings.attempts(self.files, submission.name) | {self.recorder.run_id})
        return judged

    def _admitted(self, chosen: Sequence[Submission] = ()) -> list[Result]:
        """Make the chosen submissions those of the run. Return the results of those that may run here."""
        self.judged = [self._judged(submission) for submission in chosen or self.submissions()]
        return [j for j in self.judged if self.admit(j)]

    def _judge(self, judged: list[Result], tests: list[Case], cases: list[Case]) -> None:
        if note := self.note():
            console.say(note)
        with self._held(self.args.mode != "test"):
            self.judging.run(judged, tests, cases)

    def _enter(self, submission: Submission) -> Result | None:
        """Return a submission that the arguments do not name; None if it may not, or cannot, run here."""
        return judged if self.admit(judged := self._judged(submission)) else None

    def _compile(self, judged: list[Result]) -> None:
        """Compile submissions for other targets, without their device, if their compiler is installed."""
        if self.args.mode == "leaderboard" and judged:
            from harness.tools import modes

            with console.progress(self.events.step) as progress:
                modes.compile_only(self.problem, self.device, judged, progress)
        if self.args.all and judged:
            compiled = sum(j.status == "COMPILED" for j in judged)
            with console.quiet(False):
                console.say(f"{text.counted(len(judged), 'variant')} for other targets, {compiled} of them compiled")
                console.verdicts([j for j in judged if j.status == "COMPILE_ERROR"], {}, self.args.quiet)

    def _see_unchanged(self, judged: list[Result]) -> None:
        """Fail submissions whose files changed during the run: each process took a copy when it started."""
        for j in (*judged, *self.judging.opponents):
            if not (j.tests or j.times):
                continue
            try:
                with reading(j.submission.file.name):
                    changed = verdict.source_hash(j.submission) != j.source_hash
            except UsageError:
                changed = True  # or removed
            if changed:
                j.status, j.reason = "INVALID_MEASUREMENT", "its files were changed during the run"

    def _record(self, judged: list[Result], code: int) -> None:
        """Write all records of the run at once. Only a recorded run has any."""
        if not self.file:
            return
        for j in (*judged, *self.judging.opponents):
            # A file for another machine has no result on this one.
            if self.target in j.submission.targets or j.status != "UNSUPPORTED" or not self.args.all:
                self.lines += self.recorder.lines(j)
        self.file.finish(self.lines, code)

    def _print(self, judged: list[Result]) -> None:
        args, everybody = self.args, [*judged, *self.judging.opponents]
        places = {} if args.against else console.places(everybody)
        for handle in self.judging.handles.values():
            console.printed(handle.name, handle.printed.lines, handle.printed.count)
        if timed := [j for j in everybody if j.times]:
            console.say()
            console.times(timed, places, self.recorder.warnings_of)
        with console.quiet(False):
            if not args.quiet:
                console.say()
            for j in judged:
                console.against(j)
            console.verdicts(everybody, places, args.quiet)
            if len(judged) == 1 and judged[0].metric and self._leader and not args.against:
                console.say(console.unranked(judged[0], self._leader))

    def _print_rest(self, judged: list[Result]) -> None:
        """Print what a run ends with: where it was saved, and what to do next."""
        with console.quiet(False):
            if self.lines:
                console.say(f"saved as run {self.recorder.run_id}")
            elif self.args.mode == "leaderboard":
                console.say("selected cases only: nothing recorded")
        if judged:
            console.say("next: {}   # {}".format(*console.following(self.args, self.problem, judged, self._leader)))

    @functools.cached_property
    def _leader(self) -> Leader | None:
        """Who leads the board of this run's cases, by other runs."""
        leader = self.judging.leader()
        return leader if leader and leader.run_id != self.recorder.run_id else None

    def _tell(self, judged: list[Result]) -> None:
        """Write the verdicts to --events, and the command to try next."""
        for j in (*judged, *self.judging.opponents):
            us, lo, hi = j.metric or (None, None, None)
            reason = j.busy if j.verdict in ("PASSED", "MODEL_CHECKED") else console.why(j)
            if j.against_all and j.against_all["word"] == "UNDECIDED":
                reason = console.undecided(j.against_all)
            times = {"time_us": us, "ci95_us": [lo, hi] if us else None, "against": j.against_all}
            self.events.write("verdict", variant=j.submission.name, status=j.word, reason=reason, **times)
        command, why = console.following(self.args, self.problem, judged, self._leader)
        self.events.write("next", command=command, why=why)

    def _write_json(self) -> None:
        written = "".join(json.dumps(line, allow_nan=False) + "\n" for line in self.records)
        if self.args.json:
            output.deliver(self.args.json, written, self.stdout)
