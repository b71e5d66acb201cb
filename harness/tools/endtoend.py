"""A problem's own end-to-end check: check.py in its folder, run before anything of the problem is judged.

check.py has `main(argv: list[str]) -> int`, which gives 0 only if all holds and 2 where it refuses its arguments, and
runs as `python -m problems.<name>.check`. Its literal OPTIONS names the options that harness/run.py passes on; it takes
--device cpu or cuda beside them. It is the problem's own code, like its reference: no submission of others runs in it.
"""

import argparse
import os
import sys
from pathlib import Path

from harness.judge import console
from harness.problem.folders import Problem, UsageError
from harness.sandbox import process
from problems.common import load

FILE = "check.py"
MODES = ("test", "leaderboard")  # of harness/run.py: what is said to be right, or ranked, has passed; quick looks go on
HELP = """A problem that is a whole model has an end-to-end check, check.py. It runs first with --mode test and
leaderboard, and only where it passes is the submission judged (else the exit code is 1). It does not run with --mode
benchmark or profile, --resume, --sanitize and --lint, nor with --submission, of which it says nothing. Options that
check.py declares are passed on to it; PROBLEM comes before them."""


def wanted(problem: Problem, arguments: argparse.Namespace, words: list[str], own: set[str]) -> bool:
    """Whether the check runs. arguments: harness/run.py's, which has the options `own`; words: what it does not know.

    UsageError: no words of the check either, or asked for a check that there is not, or that does not run so.
    """
    check, skipped = _file(problem), _skipped(arguments)
    _see_options(problem, check, words, own)
    if arguments.check_only and not check:
        raise UsageError(f"--check-only: {problem.name} has no {FILE}")
    if (arguments.check_only or words) and skipped:
        raise UsageError(f"{'--check-only' if arguments.check_only else ' '.join(words)} goes with no {skipped}")
    if check and skipped == "--submission":
        console.say(f"note: {FILE} says nothing of files from elsewhere, so it is not run")
    return check is not None and not skipped


def run(problem: Problem, device: str, words: list[str]) -> int:
    """The check in a process of its own, its output on ours. -> its exit status; the negative number of a signal."""
    argv = [sys.executable, "-m", f"problems.{problem.name}.check", *words, "--device", device]
    paths = [str(process.ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    sys.stdout.flush()
    guarded = process.Guarded(argv, environment, (), None, None)
    try:
        guarded.pid  # noqa: B018  SandboxError if it could not be started
        return guarded.process.wait()
    finally:
        guarded.end()


def _file(problem: Problem) -> Path | None:
    """The problem's check. UsageError: it has one that cannot be run, since the folder is not in problems/."""
    found = problem.folder / FILE
    if not problem.own or not found.is_file():
        return None
    if problem.folder.parent != load.PROBLEMS:
        raise UsageError(f"{found} runs as problems.{problem.name}.check: its folder must stand in {load.PROBLEMS}")
    return found


def _skipped(arguments: argparse.Namespace) -> str:
    """What of harness/run.py's arguments means that no check is run, or ""."""
    if arguments.lint or arguments.sanitize:
        return "--lint" if arguments.lint else "--sanitize"
    if arguments.mode not in MODES:
        return f"--mode {arguments.mode}"
    if arguments.resume is not None:
        return "--resume"  # the run began with its check, and all that it depends on is unchanged
    # Another's file is not what the check is about, and is not to run outside the jail.
    return "--submission" if arguments.submission else ""


def _see_options(problem: Problem, check: Path | None, words: list[str], own: set[str]) -> None:
    """UsageError unless `words` are options of the check, with values; or OPTIONS is not as it must be."""
    options = _options(check, own) if check else ()
    unknown = [word for word in words if word.startswith("--") and word.partition("=")[0] not in options]
    if words and not words[0].startswith("--"):  # a later one is the value of the option before it
        unknown.insert(0, words[0])
    if unknown:
        takes = f"; {problem.name}/{FILE} takes {', '.join(options)}" if options else ""
        raise UsageError(f"unrecognized arguments: {' '.join(unknown)}{takes}")


def _options(check: Path, own: set[str]) -> tuple[str, ...]:
    named = f"{check.parent.name}/{FILE}"
    try:
        options = load.constants(check, "OPTIONS").get("OPTIONS", ())
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{named}: {error}") from None
    if not isinstance(options, tuple) or not all(isinstance(o, str) and o.startswith("--") for o in options):
        raise UsageError(f"{named}: OPTIONS must be a tuple of options such as --kernels, got {options!r}")
    # argparse takes the beginning of an option for the whole.
    if taken := [option for option in options if any(mine.startswith(option) for mine in own)]:
        raise UsageError(f"{named}: OPTIONS must not be harness/run.py's own, got {', '.join(taken)}")
    return options
