"""One run of harness/run.py, from its arguments to its records and exit code."""

import contextlib
import functools
import json
import shlex
import sys
from typing import TextIO

from harness.judge import console, device_lock, resume, verdict, work
from harness.judge.events import Events
from harness.judge.judging import Judging
from harness.judge.options import Options
from harness.judge.selection import Selection, rule_broken
from harness.judge.verdict import Recorder, Result
from harness.problem import folders
from harness.problem.folders import Case, Problem, ProblemError, Submission, UsageError, reading
from harness.results import environment, gpu, output, ranking, record, text
from harness.results.record import Contents
from harness.results.run_file import RunFile
from harness.sandbox import process
from harness.tools import endtoend, latency, model_check, modes
from problems.common import load

BASELINE = "torch_dequant"  # shown as a ratio where it takes part
NEEDS_GPU = "needs a GPU, the run is on a CPU: leave it out, or judge where there is a GPU (--on HOST)"


class Run:
    """One invocation. further: arguments that harness/run.py does not know; stdout: where --json - writes."""

    def __init__(self, arguments: Options, further: list[str], stdout: TextIO, events: Events) -> None:
        self.args, self.further = arguments, further
        self.stdout, self.events = stdout, events
        self.stack = contextlib.ExitStack()
        self.lines: list[dict] = []
        self.file: RunFile | None = None  # of a recorded run
        self.opponents: list[Result] = []  # leaders that took part in a confirmation only

    @functools.cached_property
    def problem(self) -> Problem:
        """The named problem. UsageError: there is none, or its folder is malformed."""
        name = self.args.problem
        with reading(name):
            problem = folders.find(name)
            for case in (*problem.tests, *(case for cases in problem.benchmarks.values() for case in cases)):
                try:
                    json.dumps(case.params, allow_nan=False)
                except (TypeError, ValueError, RecursionError) as error:
                    raise UsageError(f"{name}: the values of a case must be JSON, in {case}: {error}") from None
        if not record.can_name(problem.name):
            raise UsageError(f"PROBLEM: the folder must have a plain name, got {problem.name!r}: rename it")
        return problem

    @functools.cached_property
    def device(self) -> str:
        """The kind of device. Of several GPUs, the named one becomes the only visible one."""
        wanted = self.args.device or ("cuda" if gpu.visible() else "cpu")
        if wanted in ("cpu", "model"):  # the model executes on the CPU
            return "cpu"
        if not gpu.present():
            raise UsageError(f"--device {wanted} needs an NVIDIA GPU and its driver, found none")
        try:
            gpu.select(int(wanted.partition(":")[2] or 0))
        except LookupError as error:
            raise UsageError(f"--device {wanted}: {error}") from None
        return "cuda"

    @functools.cached_property
    def machine(self) -> str:
        return model_check.MACHINE if self.args.device == "model" else environment.machine(self.device)

    @functools.cached_property
    def target(self) -> str:
        """The GPU's architecture, or "cpu". UsageError: a GPU of another one."""
        if self.device == "cpu":
            return "cpu"
        used = gpu.current()
        capability = used.capability if used else "(no GPU answers)"
        major = capability.partition(".")[0]
        if not major.isdigit() or int(major) not in load.TARGETS:
            raise UsageError(f"the GPU must be of sm_90 or sm_100, got compute capability {capability!r}")
        return load.TARGETS[int(major)]

    @functools.cached_property
    def selection(self) -> Selection:
        return Selection(self.problem, self.args, self.device, self.target, self.stack)

    @functools.cached_property
    def recorder(self) -> Recorder:
        """The maker of the records. Its run id is the resumed run's, or new."""
        return Recorder(self.problem, self.device, self.file.contents.run_id if self.file else None)

    @property
    def recorded(self) -> bool:
        """Whether this run has a file of its own: only a whole run in --mode leaderboard does."""
        return self.args.mode == "leaderboard" and not self.args.case and not self.args.sanitize

    @property
    def kept(self) -> str:
        """The id of this run if what it has found is kept for --resume, else ""."""
        return self.file.contents.run_id if self.file and self.file.resumable else ""

    @functools.cached_property
    def files(self) -> list[Contents]:
        """What the files of earlier runs of the problem on this machine hold, oldest first."""
        return record.contents(self.machine, self.problem.name, check=work.check)

    def main(self) -> int:
        """Make the run. Return the exit code."""
        args = self.args
        with console.quiet(args.quiet), self.stack:
            name = self.problem.name
            process.harden()
            machine = self.machine  # and with it the device: --lint and the check use it too
            if args.resume is not None:
                self._resume()
            self.events.write("start", problem=name, device=self.device, machine=machine, mode=args.mode)
            checked = endtoend.wanted(self.problem, args, self.further)
            if checked and {"-h", "--help"} & {*self.further}:  # behind `--`: it prints its arguments
                with console.quiet(False):
                    return endtoend.run(self.problem, self.device, ["--help"])[0]
            if args.lint:
                return self._lint()
            if args.device == "model":
                return self._model()
            if args.check_only:
                console.say(environment.block() + "\n")
                return self._check()
            if self.recorded:
                record.see_writable(self.machine)
                self._tell_files()
            return self._run(checked)

    def _resume(self) -> None:
        """Reopen the file of the run that goes on, and adopt its options."""
        args, json_before, events_before = self.args, self.args.json, self.args.events
        if args.case:
            raise UsageError("--resume does not go with --case, since such a run records nothing: leave one out")
        where = f"{self.problem.name} on {self.machine}"
        self.file = resume.chosen(self.files, args.resume or "", where)
        self.stack.callback(self.file.close)
        resume.adopt(self.file, args)
        if args.json == "-" != json_before:
            self.stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        if args.events and not events_before:
            self.events.open(args.events)

    def _tell_files(self) -> None:
        """Say which lines of earlier runs are malformed, and which runs --resume can continue."""
        for file in self.files:
            for complaint in file.complaints:
                console.say(f"warning: {complaint}")
        for run_id in resume.left(self.files) if self.file is None else ():
            console.say(f"note: run {run_id} is unfinished; --resume {run_id} goes on with it")

    def _model(self) -> int:
        """Check a GPU variant in the model of its GPU, and unless the mode is test, compile it and record both. Return
        the exit code. Nothing is timed.
        """
        submission, args = self.selection.submissions()[0], self.args
        target = model_check.target_of(submission)
        cases = [case for case in self.selection.tests() if submission.serves(case)]
        if not cases:
            raise UsageError(f"--case must match a test case of {submission.name}, which {submission.limits}")
        judged, compiled = Result(submission, target), Result(submission, target)
        if args.mode == "leaderboard":
            record.see_writable(self.machine)
        if broken := rule_broken(submission):
            compiled.status, compiled.reason = broken.status, broken.reason
        else:
            self._compile([compiled])
        if compiled.status in ("COMPILE_ERROR", "RULE_BROKEN", "RUNTIME_ERROR", "TIMEOUT"):
            judged = compiled
        else:
            judged.tests = model_check.run(self.problem, submission, cases, console.say, args.timeout)
        self._see_unchanged([judged])
        built = self.recorder.lines(compiled) if compiled.artefacts or compiled.status else []
        lines = self.lines = built + model_check.records(self.recorder, judged)
        with console.quiet(False):
            right = judged.verdict == "MODEL_CHECKED"
            console.say(f"{submission.name:20} {judged.verdict}  " + ("" if right else console.why(judged)))
        if args.mode == "leaderboard":
            self._begin([judged], cases, []).finish(lines, verdict.exit_code([judged.verdict], False))
            self._say_recorded()
        self._write_json([judged])
        self._tell([judged])
        return verdict.exit_code([judged.verdict], False)

    def _check(self) -> int:
        """Run the problem's end-to-end check. Return the exit code."""
        with self._held(timed=False):
            status, fault = endtoend.run(self.problem, self.device, self.further)
        if status == output.USAGE_EXIT and not fault:
            return output.USAGE_EXIT
        result = f"INCORRECT ({fault}); nothing else is judged" if fault else "PASSED"
        with console.quiet(False):
            console.say(f"{self.problem.name}, end to end: {result}\n")
        return self._noted("INCORRECT" if fault else "PASSED", f"end to end: {result}")

    def _noted(self, status: str, reason: str) -> int:
        """Note a verdict that is about no submission. Return its exit code."""
        self.events.write("verdict", variant=None, status=status, reason=reason)
        return verdict.EXIT_CODES[status]

    def _run(self, checked: bool) -> int:
        """What is wrong with the chosen cases and submissions is said before the check, which takes long."""
        args = self.args
        chosen = self.selection.submissions()
        if checked:
            self.selection.cases()
        console.say(environment.block() + "\n")
        if args.mode == "profile" and not args.sanitize:
            return self._profile(chosen[0])
        if args.mode == "latency" and not args.sanitize:
            return self._latency(chosen[0])
        judged = [self._judged(submission) for submission in chosen]
        runnable = [j for j in judged if self.selection.admit(j)]
        if args.sanitize:
            if not runnable:
                self._print(judged)
                return verdict.exit_code([j.verdict for j in judged], args.all)
            return self._sanitize([j for j in runnable if not j.submission.baseline])
        if args.against and (missing := [j for j in judged if j.status == "UNSUPPORTED"]):
            reason = f"{missing[-1].submission.name}: {missing[-1].reason}"
            output.complain(f"harness/run.py: --against: nothing was compared, {reason}")
            return self._noted("UNSUPPORTED", reason)
        if checked and (code := self._check()):
            return code
        if checked and self.further:
            words = shlex.join(self.further)
            console.note(f"note: {words} is for {endtoend.FILE} only; what follows is judged as the folder has it")
        if self.recorded:
            self._begin(judged, *(self.selection.cases() if runnable else ([], [])))
        if runnable:
            self._judge(runnable)
        self._compile([j for j in judged if j.status == "UNSUPPORTED" and self.target not in j.submission.targets])
        self._see_unchanged(judged)
        percent = args.fail_on_regression
        slower = [] if percent is None else [where for j in judged for where in verdict.regressions(j, percent)]
        code = verdict.exit_code([j.verdict for j in judged], args.all) or (verdict.REGRESSION_EXIT if slower else 0)
        self._record(judged, code)
        try:
            self._write_json(judged)
        finally:
            self._print(judged)
        with console.quiet(False):
            for where in slower:
                console.say(f"regression of more than {percent:g} %: {where}")
            if percent is not None and not slower:
                console.say(f"no regression of more than {percent:g} % is shown")
        self._tell(judged)
        return code

    def _begin(self, judged: list[Result], tests: list[Case], benchmarks: list[Case]) -> RunFile:
        """Begin the run's file, or see that what a resumed run depends on is unchanged. Return the file."""
        run = self.recorder.run(self.machine, self.target, resume.options(self.args), judged, tests, benchmarks)
        if self.file is None:
            self.file = RunFile.begin(run)
            self.stack.callback(self.file.close)
            return self.file
        resume.see_unchanged(self.file, run)
        self.file.write("resumed", **resume.outputs(self.args))
        times = len(self.file.lines("resumed"))
        self.recorder.warnings.append(f"interrupted and resumed {times} time{'s' if times > 1 else ''}")
        outcomes, groups = (len(self.file.lines(kind)) for kind in ("outcome", "group"))
        known = f"{outcomes} test outcomes and {groups} groups of calls are known"
        console.say(f"run {self.recorder.run_id} goes on: {known}")
        return self.file

    def _lint(self) -> int:
        from harness.lint import linter

        with self._held(timed=False):
            right = linter.run(self.problem, self.device, self.target, console.say)
        return self._noted("PASSED" if right else "INCORRECT", "lint")

    def _held(self, timed: bool = True) -> contextlib.AbstractContextManager:
        """Return the lock on the device: for every use of a GPU, and on a CPU for what is timed."""
        if self.device == "cuda":
            return device_lock.hold(environment.gpu_uuid(), console.note)
        return device_lock.hold("cpu", console.note) if timed else contextlib.nullcontext()

    def _judged(self, submission: Submission) -> Result:
        with reading(submission.file.name):
            judged = Result(submission, self.selection.target_of(submission), ranking_by=self.problem.ranking_by)
        if self.recorded:
            runs = ranking.attempts(record.records_of(self.files), submission.name)
            judged.attempt = len(runs | work.attempts(self.files, submission.name) | {self.recorder.run_id})
        return judged

    def _judge(self, judged: list[Result]) -> None:
        args, (tests, cases) = self.args, self.selection.cases()
        judging = Judging(self.selection, self.recorder, self.file, self._enter, self.events)
        if note := self.selection.note():
            console.say(note)
        with self._held(args.mode != "test"):
            judging.run(judged, tests, cases)
        self.opponents = judging.opponents

    def _enter(self, submission: Submission) -> Result | None:
        """Return a submission that the arguments do not name; None if it may not, or cannot, run here."""
        judged = self._judged(submission)
        return judged if self.selection.admit(judged) else None

    def _compile(self, judged: list[Result]) -> None:
        """Compile submissions for other targets, without their device, if their compiler is installed."""
        if self.args.mode != "leaderboard":
            return
        with console.progress(self.events.step) as progress:
            modes.compile_only(self.problem, self.device, judged, progress)

    def _see_unchanged(self, judged: list[Result]) -> None:
        """Fail submissions whose files changed during the run: each process took a copy when it started."""
        for j in (*judged, *self.opponents):
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
        for j in (*judged, *self.opponents):
            # A file for another machine has no result on this one.
            if self.target in j.submission.targets or j.status != "UNSUPPORTED" or not self.args.all:
                self.lines += self.recorder.lines(j)
        self.file.finish(self.lines, code)

    def _say_recorded(self) -> None:
        console.say(f"run {self.recorder.run_id}: {text.counted(len(self.lines), 'record')} of {self.machine}")

    def _print(self, judged: list[Result]) -> None:
        args = self.args
        console.say()
        timed = [j for j in (*judged, *self.opponents) if j.times]
        if timed:
            console.times(timed)
            console.readings(timed)
        with console.quiet(False):
            for j in judged:
                if j.against_all and not args.quiet:
                    console.say()
                if j.against_all:
                    console.against(j)
            if not args.quiet:
                console.say()
            console.summary([*judged, *self.opponents], BASELINE)
            if self.lines:
                self._say_recorded()
            elif args.mode == "leaderboard":
                console.say("selected cases only: nothing recorded")

    def _tell(self, judged: list[Result]) -> None:
        """Write the verdicts to --events."""
        for j in (*judged, *self.opponents):
            us, lo, hi = j.metric or (None, None, None)
            reason = "" if j.verdict in ("PASSED", "MODEL_CHECKED") else console.why(j)
            if j.against_all and j.against_all["word"] == "UNDECIDED":
                reason = console.undecided(j.against_all)
            times = {"time_us": us, "ci95_us": [lo, hi] if us else None, "against": j.against_all}
            self.events.write("verdict", variant=j.submission.name, status=j.verdict, reason=reason, **times)

    def _write_json(self, judged: list[Result]) -> None:
        if not self.args.json:
            return
        lines = self.lines or [line for j in judged for line in self.recorder.lines(j)]
        written = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
        output.deliver(self.args.json, written, self.stdout)

    def _profile(self, submission: Submission) -> int:
        j = Result(submission, self.selection.target_of(submission))
        if not self.selection.admit(j):
            console.say(f"{submission.name}: {j.status}: {j.reason}")
            return verdict.EXIT_CODES[j.status]
        _, cases = self.selection.cases()
        for case in cases:
            if not submission.serves(case):
                console.say(f"{case}\nUNSUPPORTED: {submission.limits}")
        cases = [case for case in cases if submission.serves(case)]
        with self._held(), console.quiet(False):
            status = modes.profile(self.problem, self.device, self.target, submission, cases, self.args.timeout)
        return verdict.EXIT_CODES[status]

    def _latency(self, submission: Submission) -> int:
        """The latency of the problem's own model, recorded unless --case chose some of its cases."""
        args = self.args
        cases = latency.cases(self.problem, args.case)
        if self.device != "cuda":
            raise UsageError(f"--mode latency {NEEDS_GPU}")
        judged = self._judged(submission)
        record.see_writable(self.machine)
        try:
            with self._held():
                fault = latency.run(self.problem, self.recorder, judged, cases, self.lines)
        finally:  # interrupted too: each case counts by itself
            if self.lines and not args.case:
                code = verdict.exit_code([line["status"] for line in self.lines], everything=True)
                self._begin([judged], [], []).finish(self.lines, code)
                self._say_recorded()
        self._write_json([])
        if fault:
            raise ProblemError(fault)
        return verdict.exit_code([line["status"] for line in self.lines], everything=True)

    def _sanitize(self, judged: list[Result]) -> int:
        if self.device != "cuda":
            raise UsageError(f"--sanitize {NEEDS_GPU}")
        cases, _ = self.selection.cases()
        with self._held(), console.quiet(False), console.progress(self.events.step) as progress:
            faults = modes.sanitize(self.problem, judged, cases, self.target, progress)
        return self._noted("RUNTIME_ERROR" if faults else "PASSED", "; ".join(faults))
