"""The choices that the arguments of a run make, and whether a submission may run here."""

import dataclasses
import functools
import importlib.util
import json
import shutil
from pathlib import Path

from harness.judge import console
from harness.judge.options import Options
from harness.judge.outcome import Outcome
from harness.judge.verdict import Result
from harness.problem import folders, scan, sources
from harness.problem.folders import Case, Problem, Submission, UsageError, has_words, reading
from harness.results import environment, gpu, text
from problems.common import load


class Selection:
    """What the arguments of harness/run.py choose: a problem, a device and its target, submissions, cases."""

    def __init__(self, arguments: Options) -> None:
        self.args = arguments

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
        if not text.can_name(problem.name):
            raise UsageError(f"PROBLEM: the folder must have a plain name, got {problem.name!r}: rename it")
        return problem

    @property
    def times_steps(self) -> bool:
        """Whether steps are timed on a GPU, not calls; those of a model are planned on the host, none is recorded."""
        return self.args.mode == "latency" or (self.problem.ours and (self.problem.folder / "timed_steps.py").is_file())

    @functools.cached_property
    def device(self) -> str:
        """The kind of device. Of several GPUs, the named one becomes the only visible one."""
        wanted = self.args.device or ("cuda" if gpu.visible() else "cpu")
        if wanted in ("cpu", "model"):  # the model executes on the CPU
            return "cpu"
        if not gpu.present():
            raise UsageError(f"--device {wanted} needs an NVIDIA GPU and its driver, found none")
        try:
            if ":" in wanted or not self.times_steps:  # GPUs may share a model
                gpu.select(int(wanted.partition(":")[2] or 0))
        except LookupError as error:
            raise UsageError(f"--device {wanted}: {error}") from None
        return "cuda"

    @functools.cached_property
    def machine(self) -> str:
        return "model" if self.args.device == "model" else environment.machine(self.device)

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

    def submissions(self) -> list[Submission]:
        """Return the submissions that this run judges. UsageError: options exclude each other, or a file is none."""
        chosen = self._named()
        first = "--all" if self.args.all else "--submission" if self.args.submission else "--variant"
        for number, submission in enumerate(chosen):
            if not text.can_name(submission.name):
                option = "--against" if number and self.args.against else first
                raise UsageError(f"{option}: the file must have a plain name, got {submission.name!r}: rename it")
        return chosen

    def _named(self) -> list[Submission]:
        args = self.args
        if args.all:
            submissions = self.problem.submissions()
            if not submissions:
                raise UsageError(f"--all: {self.problem.name} has no variants/: put the submissions there to rank them")
            return submissions
        if args.submission:
            named = [self._from_elsewhere(Path(path)) for path in args.submission]
            names = [submission.name for submission in named]
            if twice := next((name for name in names if names.count(name) > 1), ""):
                raise UsageError(f"--submission: several files have the name {twice}, and a name is a row: rename one")
        elif args.variant:
            named = [self.problem.variant(args.variant)]
        else:
            named = [self.problem.winner(self.target)]
        return [*named, self._opponent(named[0])] if args.against else named

    def _from_elsewhere(self, path: Path) -> Submission:
        """Return the submission in a file of the user's."""
        submission = folders.submission(self.problem, path)
        variant = self.problem.folder / "variants" / submission.file.name
        if variant.is_file() and variant.resolve() != submission.file:
            row = f"a variant {submission.name}, whose row on the board this file would take"
            raise UsageError(f"--submission: {self.problem.name} has {row}: rename it")
        return submission

    def _opponent(self, first: Submission) -> Submission:
        """Return what --against names."""
        against = self.args.against or ""
        if against.endswith(".py"):
            second = folders.submission(self.problem, Path(against), "--against")
        else:
            second = self.problem.variant(against, "--against")
        if second.name == first.name:
            second = dataclasses.replace(second, name=f"{second.name}#2")
            console.say(f"{first.name} is {_shown(first.file)}, {second.name} is {_shown(second.file)}")
        return second

    def admit(self, j: Result) -> bool:
        """Return whether a submission may and can run here. Set its verdict if not."""
        refused = refusal(j.submission, self.device, self.target)
        if not refused and j.submission.only and not any(j.submission.serves(c) for part in self.cases() for c in part):
            refused = Outcome("UNSUPPORTED", f"{j.submission.limits}, and no case of this run is such")
        if refused:
            j.status, j.reason = refused.status, refused.reason
            if self.target not in j.submission.targets and not self.args.all and j.status == "UNSUPPORTED":
                variants = self.problem.submissions()
                able = [variant.name for variant in variants if not refusal(variant, self.device, self.target)]
                j.reason += f", where {self.problem.name} has {', '.join(able) or 'no variant'}"
                if console.modelled(j.submission):
                    j.reason += f"; {console.MODEL} executes it on the CPU"
        if j.status == "RULE_BROKEN":
            console.say(f"{j.submission.name}: RULE_BROKEN\n{j.reason}")
        if not refused and not j.submission.ours:
            for finding in scan.findings(sources.closure(j.submission.file), ours=False):
                console.say(f"warning: {finding}")
        return not refused

    def cases(self) -> tuple[list[Case], list[Case]]:
        """Return the test cases and the benchmark cases of this run, without those that the mode leaves out."""
        mode, timed = self.args.mode, self.problem.timed(self.target)
        tests = self.tests() if mode in ("test", "leaderboard") else []
        return tests, self._part(self._matching(timed, "benchmark")) if mode != "test" else []

    def _part(self, cases: list[Case]) -> list[Case]:
        """Return those of --shard. UsageError: there are fewer cases than parts."""
        if not self.args.shard:
            return cases
        number, of = map(int, self.args.shard.split("/"))
        if of > len(cases):
            raise UsageError(f"--shard must have at most as many parts as there are cases, {len(cases)}, got {of}")
        return cases[number - 1 :: of]

    def tests(self) -> list[Case]:
        args = self.args
        only_tests = args.mode == "test" or args.device == "model"
        tests = self._matching(self.problem.tests, "test") if only_tests else list(self.problem.tests)
        if args.case and not only_tests:
            tests = [c for c in tests if has_words(str(c), args.case)] or tests
        tests = self._part(tests)
        return tests if args.seed is None else [dataclasses.replace(case, seed=args.seed) for case in tests]

    def note(self) -> str:
        """Return that all test cases run, although none has the words of --case, "" if that is not so."""
        args, many = self.args, len(self.problem.tests)
        times = args.mode == "leaderboard" and args.device != "model"
        if not args.case or not times or any(has_words(str(case), args.case) for case in self.problem.tests):
            return ""
        return f"note: no test case has the words {args.case!r}, so all {text.counted(many, 'test case')} run"

    def _matching(self, cases: tuple[Case, ...], kind: str) -> list[Case]:
        name, words = self.problem.name, self.args.case or ""
        chosen = [case for case in cases if has_words(str(case), words)]
        hint = "; test cases are chosen with --mode test" if kind == "benchmark" and self.problem.tests else ""
        if not cases:
            raise UsageError(f"{name} names no {kind} cases{hint}")
        if not chosen:
            known = "; ".join([*map(str, cases[:6]), *["..."] * (len(cases) > 6)])
            raise UsageError(f"--case must match a {kind} case of {name} ({known}), got {self.args.case!r}{hint}")
        return chosen


def _shown(file: Path) -> str:
    """Return the path of a file, from the present folder if it is below that."""
    return str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file)


def rule_broken(submission: Submission) -> Outcome | None:
    """Return where the submission's text breaks rule 1, before any of it runs."""
    with reading(submission.file.name):
        files = sources.closure(submission.file, submission.folder)
        findings = [finding for finding in scan.findings(files, submission.ours) if not finding.warns]
    return Outcome("RULE_BROKEN", "\n".join(map(str, findings))) if findings else None


def refusal(submission: Submission, device: str, target: str) -> Outcome | None:
    """Return why a submission may not, or cannot, run on a CPU or a GPU of type `target`. UsageError: no nvcc."""
    if broken := rule_broken(submission):
        return broken
    with reading(submission.file.name):
        missing = [name for name in submission.requires if importlib.util.find_spec(name) is None]
        flags = load.missing_cpu_flags(submission.file)
    if target not in submission.targets:
        return Outcome("UNSUPPORTED", f"made for {', '.join(submission.targets)}, this run is on {target}")
    if missing:
        return Outcome("UNSUPPORTED", f"needs the Python package {', '.join(missing)}, which is not installed")
    if flags:
        return Outcome("UNSUPPORTED", f"needs a CPU with {', '.join(flags)}")
    if device == "cuda" and not shutil.which("nvcc"):
        raise UsageError("nvcc is not on PATH: the judge's own kernels need the CUDA toolkit")
    return None
