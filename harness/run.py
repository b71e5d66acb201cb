"""Judge submissions: python harness/run.py PROBLEM. See --help, and docs/measuring.md for what is measured and how."""

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

# The repository, not harness/, is where imports start.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from harness import console, environment, phases, problem, profiling, scan, stats, verdict  # noqa: E402
from harness.problem import Case, Entry, Problem, UsageError  # noqa: E402
from harness.session import ARCH, COMPILE_LIMIT_S, Entrant, Outcome, ProblemError, Session  # noqa: E402
from harness.verdict import Judged, Recorder  # noqa: E402
from problems.common import load  # noqa: E402

MODES = ("test", "benchmark", "leaderboard", "profile")
BASELINE = "torch_dequant"  # shown as a ratio where it takes part
SANITIZE_WEIGHTS = 2**20  # bytes that a case may move to be run under a sanitizer
SANITIZE_TOOLS = ("memcheck", "racecheck")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser("harness/run.py", description="Check and time kernels of a problem.")
    p.add_argument("problem", nargs="?", metavar="PROBLEM", help="a name in problems/, or a folder (GPU MODE's too)")
    p.add_argument("--mode", choices=MODES, default="leaderboard", help="leaderboard: test, benchmark, record")
    p.add_argument("--variant", metavar="NAME", help="a file of variants/ instead of the winner")
    p.add_argument("--submission", metavar="FILE", help="a file of your own")
    p.add_argument("--against", metavar="VARIANT_OR_FILE", help="interleaved pairs; ratio with its 95 %% interval")
    p.add_argument("--all", action="store_true", help="every variant that this machine can run, peers too, in one run")
    p.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    p.add_argument("--case", metavar="TEXT", help="only cases whose text holds this, such as k=64 or 'm=7168 k=2048'")
    p.add_argument("--seed", type=int, help="seed of the test cases (timed calls have secret seeds)")
    p.add_argument("--timeout", type=float, metavar="S", help="seconds a call may take (default 30, the first 120)")
    p.add_argument("--json", metavar="FILE", help="write the records of this run to FILE as well")
    p.add_argument("--sanitize", action="store_true", help="run small cases under compute-sanitizer, then stop")
    p.add_argument("--list", action="store_true", help="list problems, or the variants of PROBLEM")
    return p


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        return Run(arguments).main()
    except UsageError as error:
        print(f"harness/run.py: {error}", file=sys.stderr)
        return verdict.USAGE_EXIT
    except ProblemError as error:
        print(f"harness/run.py: the problem itself failed, nothing was judged: {error}", file=sys.stderr)
        return verdict.USAGE_EXIT


class Run:
    """One invocation."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.args = arguments
        self.lines: list[dict] = []

    def main(self) -> int:
        args = self.args
        if args.list or not args.problem:
            return self._list()
        self.problem: Problem = problem.find(args.problem)
        if args.timeout is not None and args.timeout <= 0:
            raise UsageError(f"--timeout must be positive, got {args.timeout}")
        self.device = self._device()
        self.target = self._target()
        chosen = self._chosen()
        console.say(environment.block())
        console.say()
        if args.mode == "profile" and not args.sanitize:
            return self._profile(chosen[0])
        self.recorder = Recorder(self.problem, self.device)
        judged = [Judged(entry, self._target_of(entry)) for entry in chosen]
        runnable = [j for j in judged if self._admit(j)]
        if args.sanitize:
            return self._sanitize([j for j in runnable if not j.entry.peer])
        if runnable:
            self._judge(runnable)
        self._compile([j for j in judged if j.status == "UNSUPPORTED" and self.target not in j.entry.targets])
        for j in judged:
            # That a file is made for another machine is no result of this one.
            if self.target in j.entry.targets or j.status != "UNSUPPORTED" or not args.all:
                self._record(j)
        self._print(judged)
        return verdict.exit_code(judged, args.all)

    def _list(self) -> int:
        if not self.args.problem:
            for name in problem.problem_names():
                console.say(f"{name:<20} {load.summary(problem.find(name).folder / 'task.py')}")
            return 0
        for entry in problem.find(self.args.problem).entries():
            console.say(f"{entry.name:<24} {','.join(entry.targets):<12} {entry.summary}")
        return 0

    def _device(self) -> str:
        has_gpu = bool(environment.describe()["gpu"])
        if self.args.device == "cuda" and not has_gpu:
            raise UsageError("--device cuda needs an NVIDIA GPU and its driver, found none")
        if self.args.device:
            return self.args.device
        if not self.problem.own and not has_gpu:
            return "cpu"
        return "cuda" if has_gpu else "cpu"

    def _target(self) -> str:
        if self.device == "cpu":
            return "cpu"
        result = subprocess.run(
            ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader", "--id=0"], capture_output=True, text=True
        )
        major = result.stdout.partition(".")[0].strip()
        if not major.isdigit() or int(major) not in load.TARGETS:
            raise UsageError(f"the GPU must be of sm_90 or sm_100, got compute capability {result.stdout.strip()!r}")
        return load.TARGETS[int(major)]

    def _chosen(self) -> list[Entry]:
        args = self.args
        if sum(map(bool, (args.variant, args.submission, args.all))) > 1:
            raise UsageError("give one of --variant, --submission and --all")
        if args.all and (args.against or args.mode == "profile"):
            raise UsageError("--all goes with neither --against nor --mode profile")
        if args.all:
            entries = self.problem.entries()
            if not entries:
                raise UsageError(f"{self.problem.name} has no variants/")
            return entries
        if args.variant:
            first = self.problem.variant(args.variant)
        elif args.submission:
            first = problem.entry(self.problem, Path(args.submission))
        else:
            first = self.problem.winner(self.target)
        for key, value in first.directives:
            if key == "leaderboard" and value != self.problem.name:
                console.say(f"note: {first.file.name} is headed for leaderboard {value}, judged on {self.problem.name}")
        if not args.against:
            return [first]
        path = Path(args.against)
        second = problem.entry(self.problem, path) if path.suffix == ".py" else self.problem.variant(args.against)
        if second.name == first.name:
            second = dataclasses.replace(second, name=f"{second.name}#2")
        return [first, second]

    def _target_of(self, entry: Entry) -> str:
        return self.target if self.target in entry.targets else entry.targets[0]

    def _admit(self, j: Judged) -> bool:
        """Whether an entry may and can run here; else its verdict is set."""
        findings = scan.findings(scan.closure(j.entry.file), j.entry.peer)
        missing = [name for name in j.entry.requires if importlib.util.find_spec(name) is None]
        flags = load.missing_cpu_flags(j.entry.file)
        if findings:
            j.status, j.reason = "RULE_BROKEN", "\n".join(map(str, findings))
            console.say(f"{j.entry.name}: RULE_BROKEN\n{j.reason}")
        elif self.target not in j.entry.targets:
            j.status, j.reason = "UNSUPPORTED", f"made for {', '.join(j.entry.targets)}, this run is on {self.target}"
        elif missing:
            j.status, j.reason = "UNSUPPORTED", f"needs the Python package {', '.join(missing)}, which is not installed"
        elif flags:
            j.status, j.reason = "UNSUPPORTED", f"needs a CPU with {', '.join(flags)}"
        elif self.device == "cuda" and not shutil.which("nvcc"):
            raise UsageError("nvcc is not on PATH: the judge's own kernels need the CUDA toolkit")
        return not j.status

    def _cases(self, cases: tuple[Case, ...], what: str) -> list[Case]:
        chosen = [case for case in cases if not self.args.case or self.args.case in str(case)]
        if not chosen:
            known = "; ".join(map(str, cases)) or "none"
            name = self.problem.name
            raise UsageError(f"--case must match a {what} case of {name} ({known}), got {self.args.case!r}")
        return chosen

    def _judge(self, judged: list[Judged]) -> None:
        args, paired = self.args, bool(self.args.against)
        by_name = {j.entry.name: j for j in judged}
        entrants = {name: Entrant(name, j.entry, self.target) for name, j in by_name.items()}
        with Session(self.problem, self.device, args.timeout) as session, console.progress() as progress:
            if args.mode != "benchmark":
                tests = self._cases(self.problem.tests, "test") if args.mode == "test" else list(self.problem.tests)
                if args.case and args.mode == "leaderboard":
                    tests = [c for c in tests if args.case in str(c)] or tests
                if args.seed is not None:
                    tests = [dataclasses.replace(case, seed=args.seed) for case in tests]

                def done(entrant: Entrant, case: Case, outcome: Outcome) -> None:
                    by_name[entrant.name].tests.append((case, outcome))
                    if len(judged) == 1 or outcome.status != "PASSED":
                        console.test_line(entrant.name, case, outcome)

                phases.run_tests(session, list(entrants.values()), tests, done, progress)
                if len(judged) > 1:
                    for j in judged:
                        passed = sum(o.status == "PASSED" for _, o in j.tests)
                        console.say(f"{j.entry.name:<20} {passed}/{len(j.tests)} test cases right")
            if args.mode != "test":
                cases = self._cases(self.problem.benchmarks[self.device], "benchmark")
                right = [entrants[n] for n, j in by_name.items() if all(o.status == "PASSED" for _, o in j.tests)]
                if right and (len(right) == 2 or not paired):
                    timings, grounds = phases.run_benchmarks(session, right, cases, progress, paired)
                    for name, of_cases in timings.items():
                        by_name[name].times = [
                            verdict.weigh(t, g) for t, g in zip(of_cases, grounds, strict=True)
                        ]
                    if paired:
                        self._pair(judged)
            self.recorder.clock_name = session.clock_name

    @staticmethod
    def _pair(judged: list[Judged]) -> None:
        """The ratio of the first entry's times to the second's, on equal contents."""
        first, second = judged
        if any(t.failure for j in judged for t in j.times):
            return
        logs = []
        for mine, theirs in zip(first.times, second.times, strict=True):
            pairs = phases.ratios(mine.timing, theirs.timing)
            ratio, lo, hi = stats.ratio_interval(pairs)
            first.against.append({"variant": second.entry.name, "ratio": ratio, "ci95": [lo, hi]})
            logs.append([[a / b for a, b in group] for group in pairs])
        mean = stats.geomean([pair["ratio"] for pair in first.against])
        first.against_all = {
            "variant": second.entry.name, "ratio": mean, "ci95": list(stats.geomean_interval(logs)),
        }  # fmt: skip

    def _compile(self, judged: list[Judged]) -> None:
        """Entries for other targets are compiled here, without their device, where their compiler is installed."""
        todo = [j for j in judged if j.target in ARCH and not j.entry.peer]
        if not todo or self.args.mode != "leaderboard":
            return
        if not shutil.which("nvcc"):
            console.say("nvcc is not on PATH: variants for other targets are not compiled")
            return
        with Session(self.problem, self.device) as session, console.progress() as progress:
            for j in todo:
                if any(importlib.util.find_spec(name) is None for name in j.entry.requires):
                    continue
                for target in (t for t in j.entry.targets if t in ARCH):
                    progress(f"compile {j.entry.name} for {target}")
                    entrant = Entrant(f"{j.entry.name}@{target}", j.entry, target)
                    message = {"op": "compile", "target": target}
                    reply = session.ask_runner(entrant, message, 2 * COMPILE_LIMIT_S)
                    session.stop(entrant)
                    if isinstance(reply, Outcome):
                        j.status, j.reason = "COMPILE_ERROR", reply.reason
                        console.say(f"{j.entry.name}: COMPILE_ERROR for {target}\n{reply.reason}")
                        break
                    # One row a kernel; a compiler that reports no resources leaves the size alone.
                    j.artefacts += [
                        {"target": target, "bytes": a["bytes"], **kernel}
                        for a in reply["artefacts"]
                        for kernel in a["kernels"] or [{}]
                    ]
                    j.status, j.reason = "COMPILED", f"compiled for {', '.join(j.entry.targets)}, not run here"

    def _record(self, j: Judged) -> None:
        # A run of selected cases is no result of the problem; --mode leaderboard alone records.
        lines = self.recorder.write(j) if self.args.mode == "leaderboard" and not self.args.case else []
        self.lines += lines

    def _print(self, judged: list[Judged]) -> None:
        args = self.args
        console.say()
        timed = [j for j in judged if j.times]
        if timed:
            console.times(timed)
            console.ground(timed)
        if judged[0].against_all:
            console.say()
            console.against(judged[0])
        console.say()
        console.summary(judged, BASELINE)
        if self.lines:
            console.say(f"run {self.recorder.run_id}: {len(self.lines)} records of {environment.machine(self.device)}")
        elif args.mode == "leaderboard":
            console.say("selected cases only: nothing recorded")
        if args.json:
            lines = self.lines or [line for j in judged for line in self.recorder.lines(j)]
            with contextlib.suppress(FileNotFoundError):
                Path(args.json).unlink()
            Path(args.json).write_text("".join(json.dumps(line) + "\n" for line in lines))

    def _profile(self, entry: Entry) -> int:
        j = Judged(entry, self._target_of(entry))
        if not self._admit(j):
            console.say(f"{entry.name}: {j.status}: {j.reason}")
            return verdict.EXIT_CODES[j.status]
        cases = self._cases(self.problem.benchmarks[self.device], "benchmark")
        with Session(self.problem, self.device, self.args.timeout) as session:
            entrant = Entrant(entry.name, entry, self.target)
            for case in cases:
                session.content(case)
                reply = session.ask_runner(entrant, {"op": "profile", "peer": entry.peer}, 2 * COMPILE_LIMIT_S, slots=1)
                if isinstance(reply, Outcome):
                    console.say(f"{entry.name}: {reply.status}: {reply.reason}")
                    return verdict.EXIT_CODES[reply.status]
                console.say(f"{case}\n{reply['table']}")
        if self.device == "cuda":
            for case in cases:
                try:
                    console.say(f"{case}\n{profiling.ncu(self.problem, entry, case, self.target)}")
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    console.say(f"no ncu report: {error}")
                    break
        return 0

    def _sanitize(self, judged: list[Judged]) -> int:
        if self.device != "cuda":
            raise UsageError("--sanitize needs a GPU")
        cases = [c for c in self._cases(self.problem.tests, "test") if (c.bytes or 0) <= SANITIZE_WEIGHTS]
        clean = True
        for j in judged:
            for tool in SANITIZE_TOOLS:
                try:
                    ok, tail = profiling.sanitize(self.problem, j.entry, cases, tool, self.target)
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    raise UsageError(f"--sanitize: {error}") from None
                clean &= ok
                console.say(f"{j.entry.name:<20} {tool:<10} {'clean' if ok else 'ERRORS'} on {len(cases)} cases")
                if not ok:
                    console.say(tail)
        return 0 if clean else verdict.EXIT_CODES["RUNTIME_ERROR"]


if __name__ == "__main__":
    sys.exit(main())
