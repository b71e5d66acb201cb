#!/usr/bin/env python3
"""Judge submissions: .venv/bin/python harness/run.py PROBLEM. See --help; docs/measuring.md says what is measured.

This file has the options, lists, and refuses what cannot be, all without torch; harness/invocation.py does the rest.
"""

from __future__ import annotations  # until `venv.enter`, Python 3.8 must do

import argparse
import contextlib
import math
import re
import sys
from pathlib import Path
from typing import TextIO

# The repository, not harness/, is where imports start.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from harness.judge.options import Options, given  # noqa: E402
from harness.results import output  # noqa: E402
from problems.common import venv  # noqa: E402

NAME = "harness/run.py"
MODES = ("test", "benchmark", "leaderboard", "profile", "latency")
# The options that --device model refuses.
NOT_MODELLED = ("all", "against", "resume", "shard", "check_only", "lint", "sanitize")
INTERRUPTED_EXIT = 130  # as shells say it
SHARD = re.compile(r"(\d{1,4})/(\d{1,4})")
# The options that have an effect in a run of each kind, besides ALWAYS; others are refused. The first kind whose option
# is given counts, else that of the mode.
ALWAYS = "problem device events quiet on ray"
CHOSEN = "variant submission all case"
EFFECTIVE = {
    "--print-completion": "print_completion",
    "--list": "list problem events",
    "--lint": f"lint {ALWAYS}",
    "--check-only": f"check_only {ALWAYS}",
    "--sanitize": f"sanitize {CHOSEN} {ALWAYS}",
    "--mode test": f"mode {CHOSEN} seed timeout shard json {ALWAYS}",
    "--mode benchmark": f"mode {CHOSEN} timeout shard json against processes fail_on_regression {ALWAYS}",
    "--mode leaderboard": f"mode {CHOSEN} seed timeout shard json against processes fail_on_regression resume {ALWAYS}",
    "--mode profile": f"mode variant submission case timeout {ALWAYS}",
    "--mode latency": f"mode case json {ALWAYS}",
}
CHECK_HELP = """A problem that is a whole model has an end-to-end check, check.py. It runs first with --mode test and
leaderboard, and only where it passes is the submission judged (else the exit code is 1). It does not run with --mode
benchmark or profile, --resume, --sanitize and --lint, nor with --submission, of which it says nothing. It receives the
options that are not listed here; PROBLEM comes before them."""


def parser() -> argparse.ArgumentParser:
    about = "Check and time kernels of a problem."
    p = output.Parser(NAME, description=about, epilog=CHECK_HELP)
    p.add_argument("problem", nargs="?", metavar="PROBLEM", help="a name in problems/, or a folder (GPU MODE's too)")
    p.add_argument(
        "--mode",
        choices=MODES,
        help="leaderboard: test, benchmark, record; latency: a model's decode step",
    )
    p.add_argument("--variant", metavar="NAME", help="a file of variants/ instead of the winner")
    p.add_argument("--submission", metavar="FILE", help="a file of your own")
    p.add_argument(
        "--against",
        metavar="VARIANT_OR_FILE",
        help="interleaved pairs; ratio with its 95 %% interval; REV:VARIANT is the variant as it was at a commit",
    )
    p.add_argument(
        "--processes", type=output.Value(int, "2 to 1000"), metavar="N", help="2 to 1000 of each: more tell more"
    )
    p.add_argument(
        "--fail-on-regression",
        type=output.Value(float, "0 or more, in percent"),
        metavar="PERCENT",
        help="with --against: exit code 8 if the 99 %% interval of a case, or of all together, is over 1 + PERCENT %%",
    )
    p.add_argument(
        "--all", action="store_true", help="every variant that this machine can run, baselines too, in one run"
    )
    p.add_argument(
        "--device",
        metavar="{cpu,cuda,cuda:N,model}",
        help="default: cuda, the first visible GPU, where there is one; model executes a GPU variant's PTX on the CPU",
    )
    p.add_argument(
        "--case", metavar="TEXT", help="only cases with all these words, such as k=64 or 'tokens=4096 router=uniform'"
    )
    p.add_argument(
        "--seed", type=output.Value(int, "0 to 2^63 - 1"), help="seed of the test cases (timed calls have secret seeds)"
    )
    p.add_argument(
        "--timeout",
        type=output.Value(float, "positive and finite, in seconds"),
        metavar="S",
        help="seconds a call may take (default 30, the first 120)",
    )
    p.add_argument(
        "--json",
        metavar="FILE",
        help="write the records of this run to FILE as well, in place of what it holds; -: to standard output, and all "
        "else to standard error",
    )
    p.add_argument("--events", metavar="FILE", help="append a JSON line to FILE for each phase, verdict and mismatch")
    p.add_argument("--quiet", action="store_true", help="print the verdicts only")
    p.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="RUN_ID",
        help="go on with a run that was killed, by default the newest unfinished one, with its options; --json and "
        "--events may be given again",
    )
    p.add_argument("--on", metavar="HOST", help="judge on another machine, over ssh and rsync (docs/remote.md)")
    p.add_argument("--shard", metavar="I/N", help="part I of N of the cases, as 2/4: a run on each of several devices")
    p.add_argument(
        "--ray", metavar="ADDRESS", help="a job for each problem (commas between) and variant on a Ray cluster"
    )
    p.add_argument("--check-only", action="store_true", help="the problem's own end-to-end check (check.py), then stop")
    p.add_argument("--lint", action="store_true", help="check the problem itself: what must fail fails, then stop")
    p.add_argument("--sanitize", action="store_true", help="run small cases under compute-sanitizer, then stop")
    p.add_argument("--new", metavar="NAME", help="write problems/NAME/, a new problem that works, then stop")
    p.add_argument("--new-variant", metavar="NAME", help="write a new variant of PROBLEM that works, then stop")
    p.add_argument("--list", action="store_true", help="list problems, or the variants of PROBLEM")
    p.add_argument("--print-completion", choices=("bash", "zsh"), help="print a script that completes words, then stop")
    return p


def main(argv: list[str] | None = None) -> int:
    """Run the command. Return the exit code. What no submission caused is one line on standard error; a bug raises."""
    args, further = parser().parse_known_args(argv, namespace=Options())
    venv.enter(NAME)
    stdout = sys.stdout
    with contextlib.redirect_stdout(sys.stderr) if args.json == "-" else contextlib.nullcontext():
        return _guarded(args, further, stdout)


def _guarded(args: Options, further: list[str], stdout: TextIO) -> int:
    from harness.judge.events import Events
    from harness.problem.folders import ProblemError, UsageError
    from harness.results import text

    run, events = None, Events(None)

    def stopped(why: str, resumable: bool = True) -> int:
        """Say on standard error why the run ended, and how to continue it. Return the exit code."""
        kept = run.kept if run and resumable else ""
        how = f"; go on with --resume {kept}" if kept else ""
        output.complain(f"{NAME}: {why}{how}")
        events.write("error", reason=f"{why}{how}")
        return output.USAGE_EXIT

    code = None
    try:
        events = Events(None if args.on else args.events)
        code = _without_torch(args, further)
        if code is None and (args.on or args.ray):
            from harness.tools import cluster, remote

            elsewhere = cluster.run if args.ray else remote.start
            code = elsewhere(args, further, stdout)
        elif code is None:
            from harness.invocation import Run

            run = Run(args, further, stdout, events)
            code = run.main()
        output.flush()
    except ProblemError as error:
        code = stopped(f"nothing was judged: {text.clean(error)}", error.resumable)
    except UsageError as error:
        code = stopped(text.line(error), error.resumable)
    except output.ClosedError:
        output.abandon()
        if run and run.kept:
            stopped("standard output was closed")
        code = output.CLOSED_EXIT
    except KeyboardInterrupt:
        stopped("interrupted")
        code = INTERRUPTED_EXIT
    except Exception as error:
        from harness.judge import machine

        said = machine.said_of(error)
        if said is None:
            raise
        output.abandon()
        code = stopped(said)
    finally:
        events.write("end", exit_code=code)
        events.close()
    return code


def _without_torch(args: Options, further: list[str]) -> int | None:
    """List, or raise UsageError for what is wrong whatever the problem's cases are, before torch is imported. Return
    the exit code; None: the run begins.
    """
    from harness.judge import limits
    from harness.judge.events import see_outputs
    from harness.problem import folders
    from harness.problem.folders import UsageError

    for name in ("variant", "submission", "against", "case", "json", "device", "shard", "on", "ray", "problem"):
        if getattr(args, name) == "":
            raise UsageError(f"{'PROBLEM' if name == 'problem' else f'--{name}'} must not be empty, got ''")
    if args.print_completion:
        _see_effect(args)
        return _print_completion(args.print_completion, folders.problem_names())
    if args.new is not None or args.new_variant is not None:
        from harness.tools import scaffold

        return scaffold.run(args, further)
    if args.list or not args.problem:
        _see_only_listed(args, further)
        if args.list:
            _see_effect(args)
        return _list(args.problem)
    for problem in args.problem.split(",") if args.ray else [args.problem]:
        _see_problem(args, further, folders.place(problem))
    if args.device and not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?|model", args.device):
        raise UsageError(f"--device must be cpu, cuda, cuda:N or model, got {args.device!r}")
    if args.device == "model" and args.mode not in ("test", "leaderboard"):
        raise UsageError(f"--device model takes no times: give it --mode test, or no --mode to record, got {args.mode}")
    refused = [f"--{name.replace('_', '-')}" for name in NOT_MODELLED if getattr(args, name) not in (None, False)]
    if args.device == "model" and refused:
        raise UsageError(f"--device model checks one variant, without {', '.join(refused)}")
    if args.timeout is not None and not 0 < args.timeout < math.inf:
        raise UsageError(f"--timeout must be positive and finite, in seconds, got {args.timeout}")
    if args.processes is not None and not 2 <= args.processes <= limits.MOST_PROCESSES:
        raise UsageError(f"--processes must be 2 to {limits.MOST_PROCESSES}, got {args.processes}")
    if args.against and (other := _takes_no_times(args)):
        raise UsageError(f"--against compares times, and {other} takes none: leave one of the two out")
    _see_effect(args)
    if args.fail_on_regression is not None and not args.against and args.resume is None:
        raise UsageError("--fail-on-regression goes with --against: give the variant or file to compare with")
    if args.fail_on_regression is not None and not 0 <= args.fail_on_regression < math.inf:
        raise UsageError(f"--fail-on-regression must be 0 or more, in percent, got {args.fail_on_regression}")
    if args.seed is not None and not 0 <= args.seed < 2**63:
        raise UsageError(f"--seed must be 0 to 2^63 - 1, got {args.seed}")
    if args.shard and not ((part := SHARD.fullmatch(args.shard)) and 1 <= int(part[1]) <= int(part[2])):
        raise UsageError(f"--shard must be I/N, a part of N parts, with I from 1 to N, got {args.shard!r}")
    see_outputs(args.json, args.events)
    return None


def _see_effect(args: Options) -> None:
    """Raise UsageError for options that have no effect in a run of this kind."""
    from harness.problem.folders import UsageError

    stops = ("print_completion", "list", "lint", "check_only", "sanitize")
    kind = next((_option(args, name) for name in stops if getattr(args, name)), f"--mode {args.mode}")
    # Of --json - all else than records goes to standard error, whatever there is; a list has nothing else.
    passing = () if args.list or args.print_completion else ("json", "-")
    effective = EFFECTIVE[kind].split()
    odd = [name for name in given(args) if name not in effective and (name, getattr(args, name)) != passing]
    if odd:
        raise UsageError(output.apart(kind, [_option(args, name) for name in odd]))


def _option(args: Options, name: str) -> str:
    """Return an option as the user writes it, --mode with its value."""
    if name == "problem":
        return "PROBLEM"
    return f"--mode {args.mode}" if name == "mode" else f"--{name.replace('_', '-')}"


def _takes_no_times(args: Options) -> str:
    """Return the option for which a run takes no times that could be compared, "" if there is none."""
    stops = [_option(args, name) for name in ("lint", "check_only", "sanitize") if getattr(args, name)]
    return stops[0] if stops else f"--mode {args.mode}" if args.mode not in ("benchmark", "leaderboard") else ""


def _see_problem(args: Options, further: list[str], folder: Path) -> None:
    """Raise UsageError for a variant that the problem in `folder` lacks, or options that its check does not take."""
    from harness.problem import commits, folders

    if args.variant and not args.submission and not args.all:
        folders.variant_file(folder, args.variant, "--variant")
    if args.against and not args.all and not args.against.endswith(".py"):
        if other := commits.split(args.against):
            commits.find(folder, *other)
        else:
            folders.variant_file(folder, args.against, "--against")
    if further and not (folder / "check.py").is_file():
        raise folders.UsageError(output.unrecognized(further))


def _see_only_listed(args: Options, further: list[str]) -> None:
    """Raise UsageError if there are options that no list takes."""
    from harness.problem import folders

    if further:
        raise folders.UsageError(output.unrecognized(further))
    others = [name for name in given(args) if name != "problem"]
    if others and not args.list:
        known, words = ", ".join(folders.problem_names()), [f"--{name.replace('_', '-')}" for name in others]
        raise folders.UsageError(
            f"{', '.join(words)}: give PROBLEM too, one of {known}, or a folder; --list only lists"
        )


def _list(problem: str | None) -> int:
    """Print the problems, or the variants of one. Nothing of a problem is run."""
    from harness.problem import folders
    from harness.results import text
    from problems.common import load

    if problem is None:
        for name in folders.problem_names():
            with folders.reading(name):
                about = load.summary(load.PROBLEMS / name / "task.py")
            output.say(f"{name:<20} {text.line(about)}")
        return 0
    folder = folders.place(problem)
    with folders.reading(problem):
        folders.is_own(folder)
    listed = list(folders.listing(folder))
    if not listed:
        output.say(text.line(f"{folder} has no variants/*.py: judge a file with --submission FILE"))
    for name, targets, summary in listed:
        output.say(text.line(f"{name:<24} {','.join(targets):<12} {summary}"))
    return 0


def _print_completion(shell: str, problems: list[str]) -> int:
    from harness.problem.folders import UsageError

    try:
        import shtab
    except ImportError:
        raise UsageError("--print-completion needs the Python package shtab: run `make setup`") from None
    p = parser()
    p.prog = Path(NAME).name  # by which shells know a command, in whatever folder
    for action in p._actions:
        if action.dest == "problem":
            action.choices = problems
        if action.metavar in ("FILE", "VARIANT_OR_FILE"):
            vars(action)["complete"] = shtab.FILE
    output.say(shtab.complete(p, shell))
    return 0


if __name__ == "__main__":
    sys.exit(output.script(main))
