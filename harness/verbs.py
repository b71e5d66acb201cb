"""What is done with a problem besides judging: verbs, modes and a device, each a run and a class of its name."""

from harness.invocation import NEEDS_GPU, Run
from harness.judge import console, verdict
from harness.judge.selection import rule_broken
from harness.judge.verdict import Result
from harness.lint import linter
from harness.problem.folders import UsageError
from harness.results import environment, record
from harness.tools import model_check, modes


class Lint(Run):
    """Test the problem's own check (harness/lint/linter.py)."""

    def _work(self) -> int:
        with self._held(timed=False):
            right = linter.run(self.problem, self.device, self.target, console.say)
        return self._noted("PASSED" if right else "INCORRECT", "lint")


class Sanitize(Run):
    """Run the small test cases under compute-sanitizer (harness/tools/modes.py)."""

    def _work(self) -> int:
        if self.device != "cuda":
            raise UsageError(f"sanitize {NEEDS_GPU}")
        if not (runnable := self._admitted()):
            self._print(self.judged)
            self._print_rest(self.judged)
            return verdict.exit_code([j.verdict for j in self.judged], self.args.all)
        results, cases = [j for j in runnable if not j.submission.baseline], self.tests()
        with self._held(), console.quiet(False), console.progress(self.events.step) as progress:
            faults = modes.sanitize(self.problem, results, cases, self.target, progress)
        return self._noted("RUNTIME_ERROR" if faults else "PASSED", "; ".join(faults))


class Invariance(Run):
    """See whether equal calls have equal bits (harness/judge/invariance.py)."""

    def _work(self) -> int:
        if runnable := self._admitted():
            self._judge(runnable, [], [])
        self._print(self.judged)
        self._tell(self.judged)
        return verdict.exit_code([j.verdict for j in self.judged], self.args.all)


class Check(Run):
    """Run the problem's end-to-end check (harness/tools/modes.py). The words are the check's arguments."""

    def _work(self) -> int:
        if {"-h", "--help"} & {*self.words}:  # it prints its arguments
            return modes.check(self.problem, self.device, ["--help"])[0]
        console.say(environment.line() + "\n")
        return self._check(self.words)


class Model(Run):
    """Check a GPU variant in the model of its GPU; unless the mode is test, compile it and record both. No times."""

    def _work(self) -> int:
        submission, args = self.submissions()[0], self.args
        target = model_check.target_of(submission)
        cases = [case for case in self.tests() if submission.serves(case)]
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
        self.lines = built + model_check.records(self.recorder, judged)
        with console.quiet(False):
            right = judged.verdict == "MODEL_CHECKED"
            console.say(f"{submission.name:20} {judged.verdict}  " + ("" if right else console.why(judged)))
        code = verdict.exit_code([judged.verdict], False)
        if args.mode == "leaderboard":
            self._begin([judged], cases, []).finish(self.lines, code)
            console.say(f"saved as run {self.recorder.run_id}")
        self._write_json()
        self._tell([judged])
        return code


class Profile(Run):
    """Profile one call of a submission on each case (harness/tools/modes.py)."""

    def _work(self) -> int:
        (submission,) = self.submissions()
        console.say(environment.line() + "\n")
        j = self._judged(submission)
        if not self.admit(j):
            console.say(f"{submission.name}: {j.status}: {j.reason}")
            return verdict.EXIT_CODES[j.status]
        _, cases = self.cases()
        for case in [case for case in cases if not submission.serves(case)]:
            cases.remove(case)
            console.say(f"{case}\nUNSUPPORTED: {submission.limits}")
        with self._held(), console.quiet(False):
            status = modes.profile(self.problem, self.device, self.target, submission, cases, self.args.timeout)
        return verdict.EXIT_CODES[status]
