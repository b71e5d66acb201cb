#!/usr/bin/env python3
"""Judge submissions: .venv/bin/python harness/run.py PROBLEM. See --help; docs/measuring.md says what is measured.

This file has the options, lists, and refuses what cannot be, all without torch; harness/invocation.py does the rest.
"""

from __future__ import annotations  # until `venv.enter`, Python 3.8 must do

import argparse
import contextlib
import dataclasses
import math
import re
import sys
from pathlib import Path
from typing import TextIO

# The repository, not harness/, is where imports start.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from harness.judge.options import Options, given, spelled  # noqa: E402
from harness.results import output  # noqa: E402
from problems.common import venv  # noqa: E402

NAME = "harness/run.py"
SHARD = re.compile(r"(\d{1,4})/(\d{1,4})")
# The options that have an effect in a run of each kind, besides ALWAYS; others are refused. The first kind whose option
# is given counts, else that of the mode.
ALWAYS = "problem device events quiet on ray"
CHOSEN = "variant submission all case"
EFFECTIVE = {
    "--print-completion": "print_completion",
    "--list": "list problem events",
    "--device model": f"mode variant submission case seed timeout json {ALWAYS}",
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
    p = output.Parser(NAME, description="Check and time kernels of a problem.", epilog=CHECK_HELP)
    for field in dataclasses.fields(Options):
        p.add_argument("problem" if field.name == "problem" else spelled(field.name), **field.metadata)
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
        code = output.INTERRUPTED_EXIT
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
            raise UsageError(f"{spelled(name)} must not be empty, got ''")
    if args.print_completion:
        _see_effect(args)
        return _print_completion(args.print_completion, folders.problem_names())
    if args.new is not None or args.new_variant is not None:
        from harness.tools import scaffold

        return scaffold.run(args, further)
    if args.list or not args.problem:
        if further:
            raise UsageError(output.unrecognized(further))
        if args.list:
            _see_effect(args)
        elif others := [spelled(name) for name in given(args)]:
            known = ", ".join(folders.problem_names())
            raise UsageError(f"{', '.join(others)}: give PROBLEM too, one of {known}, or a folder; --list only lists")
        return _list(args.problem)
    for problem in args.problem.split(",") if args.ray else [args.problem]:
        _see_problem(args, further, folders.place(problem))
    if args.device and not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?|model", args.device):
        raise UsageError(f"--device must be cpu, cuda, cuda:N or model, got {args.device!r}")
    if args.device == "model" and args.mode not in ("test", "leaderboard"):
        raise UsageError(f"--device model takes no times: give it --mode test, or no --mode to record, got {args.mode}")
    if args.timeout is not None and not 0 < args.timeout < math.inf:
        raise UsageError(f"--timeout must be positive and finite, in seconds, got {args.timeout}")
    if args.processes is not None and not 2 <= args.processes <= limits.MOST_PROCESSES:
        raise UsageError(f"--processes must be 2 to {limits.MOST_PROCESSES}, got {args.processes}")
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
    kind = next((spelled(name) for name in stops if getattr(args, name)), f"--mode {args.mode}")
    kind = "--device model" if args.device == "model" and not args.list else kind
    # Of --json - all else than records goes to standard error, whatever there is; a list has nothing else.
    passing = () if args.list or args.print_completion else ("json", "-")
    effective = EFFECTIVE[kind].split()
    odd = [name for name in given(args) if name not in effective and (name, getattr(args, name)) != passing]
    if odd:
        words = [f"--mode {args.mode}" if name == "mode" else spelled(name) for name in odd]
        raise UsageError(output.apart(kind, words))


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
