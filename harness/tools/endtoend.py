"""A problem's end-to-end check: check.py in its folder, run before anything of the problem is judged.

check.py has `main(argv: list[str]) -> int`, which returns 0 only if all holds and 2 where it refuses its arguments. It
runs as `python -m problems.<name>.check` with the arguments that harness/run.py does not know, and with --device cpu or
cuda. CHECK_REPORT in its environment is "" or a folder, which need not exist, for JSON files of what it found: the page
of the leaderboard shows them (leaderboard/checks.py has their fields). It is the problem's own code, like its
reference: no submission of others runs in it.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from harness.judge import console
from harness.problem.folders import Problem, UsageError
from harness.results import output
from harness.sandbox import process
from problems.common import load

FILE = "check.py"
OUT = process.ROOT / "leaderboard" / "out" / "check"
MODES = ("test", "leaderboard")  # of harness/run.py: these say that a result is right, or rank it


def wanted(problem: Problem, arguments: argparse.Namespace, words: list[str]) -> bool:
    """Return whether the check runs. arguments: harness/run.py's; words: what it does not know. UsageError: there is no
    check that takes the words, or the check was asked for and there is none, or it does not run with these arguments.
    """
    check, skipped = _file(problem), _skipped(arguments)
    if words and not check:
        raise UsageError(output.unrecognized(words))
    if arguments.check_only and not check:
        raise UsageError(f"--check-only: {problem.name} has no {FILE}")
    if (arguments.check_only or words) and skipped:
        raise UsageError(f"{'--check-only' if arguments.check_only else ' '.join(words)} goes with no {skipped}")
    if check and skipped == "--submission":
        console.say(f"note: {FILE} says nothing of files from elsewhere, so it is not run")
    return check is not None and not skipped


def run(problem: Problem, device: str, words: list[str]) -> int:
    """Run the check in a separate process. Return its exit status, or minus the number of a signal."""
    argv = [sys.executable, "-m", f"problems.{problem.name}.check", *words, "--device", device]
    paths = [str(process.ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    environment.setdefault("CHECK_REPORT", str(OUT / problem.name))
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # beside other work, pools that spin take three times as long
    sys.stdout.flush()
    stdout = subprocess.DEVNULL if console.console.quiet else sys.stderr.fileno() if sys.stdout is sys.stderr else None
    guarded = process.Guarded(argv, environment, (), None, stdout)
    try:
        guarded.pid  # noqa: B018  SandboxError if it could not be started
        return guarded.process.wait()
    finally:
        guarded.end()


def _file(problem: Problem) -> Path | None:
    """Return the problem's check, if any. UsageError: it cannot run, since the folder is not in problems/."""
    found = problem.folder / FILE
    if not problem.own or not found.is_file():
        return None
    if problem.folder.parent != load.PROBLEMS:
        raise UsageError(f"{found} runs as problems.{problem.name}.check: its folder must stand in {load.PROBLEMS}")
    return found


def _skipped(arguments: argparse.Namespace) -> str:
    """Return the argument of harness/run.py that switches the check off, or ""."""
    if arguments.lint or arguments.sanitize:
        return "--lint" if arguments.lint else "--sanitize"
    if arguments.mode not in MODES:
        return f"--mode {arguments.mode}"
    if arguments.resume is not None:
        return "--resume"  # the run began with its check, and all that it depends on is unchanged
    # The check judges the folder's own kernels, and a file from elsewhere must not run outside the jail.
    return "--submission" if arguments.submission else ""
