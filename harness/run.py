"""Judge submissions: .venv/bin/python harness/run.py PROBLEM. See --help; docs/measuring.md says what is measured."""

import argparse
import contextlib
import functools
import json
import math
import re
import sys
from pathlib import Path

# The repository, not harness/, is where imports start.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from harness.judge import console, device_lock, journal, machine, plan, verdict  # noqa: E402
from harness.judge.handle import ProblemError  # noqa: E402
from harness.judge.journal import Journal  # noqa: E402
from harness.judge.judging import Judging  # noqa: E402
from harness.judge.selection import Selection  # noqa: E402
from harness.judge.verdict import Recorder, Result  # noqa: E402
from harness.problem import folders  # noqa: E402
from harness.problem.folders import Problem, Submission, UsageError, reading  # noqa: E402
from harness.results import environment, gpu, output, ranking, record, text  # noqa: E402
from harness.sandbox import process  # noqa: E402
from harness.tools import endtoend, latency, modes  # noqa: E402
from problems.common import load  # noqa: E402

MODES = ("test", "benchmark", "leaderboard", "profile", "latency")
INTERRUPTED_EXIT = 130  # as shells say it
BASELINE = "torch_dequant"  # shown as a ratio where it takes part


def parser() -> argparse.ArgumentParser:
    about = "Check and time kernels of a problem."
    p = argparse.ArgumentParser("harness/run.py", description=about, epilog=endtoend.HELP)
    p.add_argument("problem", nargs="?", metavar="PROBLEM", help="a name in problems/, or a folder (GPU MODE's too)")
    p.add_argument(
        "--mode",
        choices=MODES,
        default="leaderboard",
        help="leaderboard: test, benchmark, record; latency: a model's decode step",
    )
    p.add_argument("--variant", metavar="NAME", help="a file of variants/ instead of the winner")
    p.add_argument("--submission", metavar="FILE", help="a file of your own")
    p.add_argument("--against", metavar="VARIANT_OR_FILE", help="interleaved pairs; ratio with its 95 %% interval")
    p.add_argument(
        "--all", action="store_true", help="every variant that this machine can run, baselines too, in one run"
    )
    p.add_argument(
        "--device", metavar="{cpu,cuda,cuda:N}", help="default: cuda, the first visible GPU, where there is one"
    )
    p.add_argument("--case", metavar="TEXT", help="only cases whose text holds this, such as k=64 or 'm=7168 k=2048'")
    p.add_argument("--seed", type=int, help="seed of the test cases (timed calls have secret seeds)")
    p.add_argument("--timeout", type=float, metavar="S", help="seconds a call may take (default 30, the first 120)")
    p.add_argument("--json", metavar="FILE", help="write the records of this run to FILE as well")
    p.add_argument(
        "--resume", nargs="?", const="", metavar="RUN_ID",
        help="go on with a run that was killed, by default the newest unfinished one, with its options",
    )  # fmt: skip
    p.add_argument("--check-only", action="store_true", help="the problem's own end-to-end check (check.py), then stop")
    p.add_argument("--lint", action="store_true", help="check the problem itself: what must fail fails, then stop")
    p.add_argument("--sanitize", action="store_true", help="run small cases under compute-sanitizer, then stop")
    p.add_argument("--new", metavar="NAME", help="write problems/NAME/, a new problem that works, then stop")
    p.add_argument("--new-variant", metavar="NAME", help="write a new variant of PROBLEM that works, then stop")
    p.add_argument("--list", action="store_true", help="list problems, or the variants of PROBLEM")
    return p


def main(argv: list[str] | None = None) -> int:
    """Run the command. Return the exit code. What no submission caused is one line on standard error; a bug raises."""
    run = Run(*parser().parse_known_args(argv))
    try:
        code = run.main()
        output.flush()
        return code
    except ProblemError as error:
        return run.stopped(f"the problem itself failed, nothing was judged: {text.clean(error)}")
    except UsageError as error:
        return run.stopped(text.line(error), resumable=not isinstance(error, plan.ChangedError))
    except output.ClosedError:
        output.abandon()
        if run.resumable:
            run.stopped("standard output was closed")
        return output.CLOSED_EXIT
    except KeyboardInterrupt:
        run.stopped("interrupted" if run.resumable else "interrupted; a run that is recorded goes on with --resume")
        return INTERRUPTED_EXIT
    except Exception as error:
        said = machine.said_of(error)
        if said is None:
            raise
        output.abandon()
        return run.stopped(said)


class Run:
    """One invocation. further: arguments that harness/run.py does not know. The properties that follow from the
    arguments raise UsageError where these are wrong.
    """

    def __init__(self, arguments: argparse.Namespace, further: list[str]) -> None:
        self.args, self.further = arguments, further
        self.lines: list[dict] = []
        self.journal: Journal | None = None
        self.opponents: list[Result] = []  # leaders that took part in a confirmation only

    @functools.cached_property
    def problem(self) -> Problem:
        """The named problem. UsageError: there is none, or its folder is malformed."""
        name = self.args.problem
        with reading(name):
            found = folders.find(name)
            for case in (*found.tests, *(case for cases in found.benchmarks.values() for case in cases)):
                try:
                    json.dumps(case.params, allow_nan=False)
                except (TypeError, ValueError, RecursionError) as error:
                    raise UsageError(f"{name}: the values of a case must be JSON, in {case}: {error}") from None
        if not record.can_name(found.name):
            raise UsageError(f"a problem's folder must have a plain name, got {found.name!r}: rename it")
        return found

    @functools.cached_property
    def device(self) -> str:
        """The kind of device. Of several GPUs, the named one becomes the only visible one."""
        wanted = self.args.device or ("cuda" if gpu.visible() else "cpu")
        if wanted == "cpu":
            return "cpu"
        if not (named := re.fullmatch(r"cuda(?::([0-9]{1,3}))?", wanted)):
            raise UsageError(f"--device must be cpu, cuda or cuda:N, got {wanted!r}")
        if not gpu.present():
            raise UsageError(f"--device {wanted} needs an NVIDIA GPU and its driver, found none")
        try:
            gpu.select(int(named[1] or 0))
        except LookupError as error:
            raise UsageError(f"--device {wanted}: {error}") from None
        return "cuda"

    @functools.cached_property
    def machine(self) -> str:
        return environment.machine(self.device)

    @functools.cached_property
    def target(self) -> str:
        """The GPU's architecture, or "cpu". UsageError: a GPU of another one."""
        if self.device == "cpu":
            return "cpu"
        found = gpu.current()
        capability = found.capability if found else "(no GPU answers)"
        major = capability.partition(".")[0]
        if not major.isdigit() or int(major) not in load.TARGETS:
            raise UsageError(f"the GPU must be of sm_90 or sm_100, got compute capability {capability!r}")
        return load.TARGETS[int(major)]

    @functools.cached_property
    def selection(self) -> Selection:
        return Selection(self.problem, self.args, self.device, self.target)

    @functools.cached_property
    def recorder(self) -> Recorder:
        """The maker of the records. Its run id is the resumed run's, or new."""
        return Recorder(self.problem, self.device, self.journal.run_id if self.journal else None)

    @property
    def recorded(self) -> bool:
        """Whether this run appends to the records: only a whole run in --mode leaderboard does."""
        return self.args.mode == "leaderboard" and not self.args.case and not self.args.sanitize

    @property
    def resumable(self) -> bool:
        """Whether what this run has found is kept for --resume."""
        return self.journal is not None and self.journal.resumable

    def stopped(self, why: str, resumable: bool = True) -> int:
        """Say on standard error why the run ended, and how to continue it. Return the exit code."""
        how = f"; go on with --resume {self.journal.run_id}" if resumable and self.journal and self.resumable else ""
        output.complain(f"harness/run.py: {why}{how}")
        return verdict.USAGE_EXIT

    def main(self) -> int:
        args = self.args
        if args.new is not None or args.new_variant is not None:
            from harness.tools import scaffold

            return scaffold.run(args, vars(parser().parse_args([])), self.further)
        if args.list or not args.problem:
            if self.further:
                raise UsageError(f"unrecognized arguments: {' '.join(self.further)}")
            ignored = [name for name, value in vars(args).items() if value != parser().get_default(name)]
            if not args.list and (ignored := [f"--{name.replace('_', '-')}" for name in ignored if name != "problem"]):
                known = ", ".join(folders.problem_names())
                raise UsageError(
                    f"{', '.join(ignored)}: give PROBLEM too, one of {known}, or a folder; --list only lists"
                )
            return self._list()
        name = self.problem.name
        if args.timeout is not None and not 0 < args.timeout < math.inf:
            raise UsageError(f"--timeout must be positive and finite, in seconds, got {args.timeout}")
        if args.seed is not None and not 0 <= args.seed < 2**63:
            raise UsageError(f"--seed must be 0 to 2^63 - 1, got {args.seed}")
        self._see_json()
        machine = self.machine  # and with it the device: --lint and the check use it too
        checked = endtoend.wanted(self.problem, args, self.further)
        if args.lint:
            return self._lint()
        if args.check_only:
            console.say(environment.block() + "\n")
            return self._check()
        if (completed := self._settle()) is not None:
            return completed
        with contextlib.ExitStack() as stack:
            if args.resume is not None:
                self.journal = Journal.resume(machine, name, args.resume or None)
                stack.callback(self.journal.close)
                for complaint in self.journal.complaints:
                    console.say(f"warning: {complaint}")
                plan.adopt(self.journal.plan, args, parser().parse_args([]))
            return self._run(stack, checked)

    def _check(self) -> int:
        """Run the problem's end-to-end check. Return the exit code."""
        with self._held(timed=False):
            status = endtoend.run(self.problem, self.device, self.further)
        if status == verdict.USAGE_EXIT:
            return verdict.USAGE_EXIT
        how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
        said = f"INCORRECT ({how}); nothing else is judged" if status else "PASSED"
        console.say(f"{self.problem.name}, end to end: {said}")
        console.say()
        return verdict.EXIT_CODES["INCORRECT" if status else "PASSED"]

    def _run(self, stack: contextlib.ExitStack, checked: bool) -> int:
        args = self.args
        chosen = self.selection.submissions()
        console.say(environment.block() + "\n")
        if checked and (code := self._check()):
            return code
        if args.mode == "profile" and not args.sanitize:
            return self._profile(chosen[0])
        if args.mode == "latency" and not args.sanitize:
            return self._latency(chosen[0])
        judged = [self._judged(submission) for submission in chosen]
        runnable = [j for j in judged if self.selection.admit(j)]
        if args.sanitize:
            return self._sanitize([j for j in runnable if not j.submission.baseline])
        if args.against and (missing := [j for j in judged if j.status == "UNSUPPORTED"]):
            said = f"{missing[-1].submission.name}: {missing[-1].reason}"
            output.complain(f"harness/run.py: --against: nothing was compared, {said}")
            return verdict.EXIT_CODES["UNSUPPORTED"]
        if self.recorded:
            stack.callback(self._plan(judged).close)
        if runnable:
            self._judge(runnable)
        self._compile([j for j in judged if j.status == "UNSUPPORTED" and self.target not in j.submission.targets])
        self._see_unchanged(judged)
        self._record(judged)
        try:
            self._write_json(judged)
        finally:
            self._print(judged)
        return verdict.exit_code(judged, args.all)

    def _settle(self) -> int | None:
        """Complete the records of killed runs, and say which are unfinished. Return the exit code if nothing else is
        left for --resume to do.
        """
        args, name = self.args, self.problem.name
        if args.mode != "leaderboard" or args.case or args.sanitize:
            if args.resume is not None:
                raise UsageError("--resume goes with no --case, --sanitize or other --mode: these record nothing")
            return None
        record.see_writable(self.machine)
        completed, unfinished = journal.settle(self.machine, name)
        for complaint in record.reading(self.machine, name)[1]:
            console.say(f"warning: {complaint}")
        for run_id in completed:
            console.say(f"run {run_id} had ended while it wrote its records: they are complete now")
        if args.resume is None:
            for run_id in unfinished:
                console.say(f"note: run {run_id} is unfinished; --resume {run_id} goes on with it")
        elif completed and (args.resume in completed or not (args.resume or unfinished)):
            run_id = args.resume or completed[-1]
            records = [r for r in record.read(self.machine, name) if r.get("run_id") == run_id]
            return verdict.code_of([r["status"] for r in records if not r.get("superseded")], everything=True)
        return None

    def _plan(self, judged: list[Result]) -> Journal:
        """Begin the journal, or see that what the resumed run depends on is unchanged. Return the journal."""
        tests, benchmarks = self.selection.tests(), list(self.problem.benchmarks[self.device])
        now = plan.make(self.recorder.run_id, self.problem, self.target, self.args, judged, tests, benchmarks)
        if self.journal is None:
            self.journal = Journal.create(self.machine, self.problem.name, now)
            return self.journal
        plan.compare(self.journal.plan, now, self.journal.path)
        times = self.journal.resumptions
        self.recorder.warnings.append(f"interrupted and resumed {times} time{'s' if times > 1 else ''}")
        console.say(f"run {self.journal.run_id} goes on: {self.journal.summary()}")
        return self.journal

    def _lint(self) -> int:
        from harness.lint import linter

        with self._held(timed=False):
            right = linter.run(self.problem, self.device, self.target, console.say)
        return 0 if right else verdict.EXIT_CODES["INCORRECT"]

    def _see_json(self) -> None:
        """Raise UsageError before anything is judged if --json names a file that cannot be written."""
        if self.args.json:
            try:
                output.see_writable(Path(self.args.json))
            except (OSError, ValueError) as error:
                said = error.strerror if isinstance(error, OSError) else error
                raise UsageError(f"--json: cannot write {self.args.json}: {said}") from None

    def _list(self) -> int:
        if not self.args.problem:
            for name in folders.problem_names():
                with reading(name):
                    about = load.summary(folders.find(name).folder / "task.py")
                console.say(f"{name:<20} {text.line(about)}")
            return 0
        for submission in self.problem.submissions():
            console.say(text.line(f"{submission.name:<24} {','.join(submission.targets):<12} {submission.summary}"))
        return 0

    def _held(self, timed: bool = True) -> contextlib.AbstractContextManager:
        """Return the lock on the device: for every use of a GPU, and on a CPU for what is timed."""
        if self.device == "cuda":
            return device_lock.hold(environment.gpu_uuid(), console.say)
        return device_lock.hold("cpu", console.say) if timed else contextlib.nullcontext()

    def _judged(self, submission: Submission) -> Result:
        run_id = self.recorder.run_id
        with reading(submission.file.name):
            judged = Result(submission, self.selection.target_of(submission), ranking_by=self.problem.ranking_by)
        if self.recorded:
            name = self.problem.name
            runs = ranking.attempts(record.read(self.machine, name), submission.name)
            runs |= journal.attempts(self.machine, name, submission.name)
            judged.attempt = len(runs | {run_id})
        return judged

    def _judge(self, judged: list[Result]) -> None:
        args, (tests, cases) = self.args, self.selection.cases()
        judging = Judging(self.problem, self.device, self.target, args, self.recorder, self.journal, self._enter)
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
        with console.progress() as progress:
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

    def _record(self, judged: list[Result]) -> None:
        """Write all records of the run at once. Only a recorded run has any."""
        if not self.journal:
            return
        for j in (*judged, *self.opponents):
            # A file for another machine has no result on this one.
            if self.target in j.submission.targets or j.status != "UNSUPPORTED" or not self.args.all:
                self.lines += self.recorder.lines(j)
        self.journal.finish(self.lines)

    def _print(self, judged: list[Result]) -> None:
        args = self.args
        console.say()
        timed = [j for j in (*judged, *self.opponents) if j.times]
        if timed:
            console.times(timed)
            console.readings(timed)
        for one in (j for j in judged if j.against_all):
            console.say()
            console.against(one)
        console.say()
        console.summary([*judged, *self.opponents], BASELINE)
        if self.lines:
            console.say(f"run {self.recorder.run_id}: {len(self.lines)} records of {self.machine}")
        elif args.mode == "leaderboard":
            console.say("selected cases only: nothing recorded")

    def _write_json(self, judged: list[Result]) -> None:
        if self.args.json:
            lines = self.lines or [line for j in judged for line in self.recorder.lines(j)]
            said = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
            output.write_whole(Path(self.args.json), said)

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
        with self._held():
            said = modes.profile(self.problem, self.device, self.target, submission, cases, self.args.timeout)
        return verdict.EXIT_CODES[said]

    def _latency(self, submission: Submission) -> int:
        """The latency of the problem's own model, recorded unless --case chose some of its cases."""
        args = self.args
        if args.variant or args.submission or args.against or args.all:
            raise UsageError("--mode latency times the winners: no --variant, --submission, --against, --all")
        if self.device != "cuda":
            raise UsageError("--mode latency needs a GPU, the run is on a CPU")
        judged, cases = self._judged(submission), latency.cases(self.problem, args.case)
        record.see_writable(self.machine)
        with self._held():
            self.lines = latency.run(self.problem, self.recorder, judged, cases)
        if not args.case:
            record.append(self.machine, self.problem.name, self.lines)
            console.say(f"run {self.recorder.run_id}: {len(self.lines)} records of {self.machine}")
        self._write_json([])
        return verdict.code_of([line["status"] for line in self.lines], everything=True)

    def _sanitize(self, judged: list[Result]) -> int:
        if self.device != "cuda":
            raise UsageError("--sanitize needs a GPU")
        cases, _ = self.selection.cases()
        with self._held():
            clean = modes.sanitize(self.problem, judged, cases, self.target)
        return 0 if clean else verdict.EXIT_CODES["RUNTIME_ERROR"]


if __name__ == "__main__":
    process.harden()
    sys.exit(output.script(main))
