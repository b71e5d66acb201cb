"""A problem's end-to-end check: check.py in its folder, run before anything of the problem is judged.

check.py has `main(argv: list[str]) -> int`, which returns 0 only if all holds and 2 where it refuses its arguments, as
argparse's SystemExit(2) may. check_launcher.py calls it as problems.<name>.check.main in a separate process, with the
arguments that harness/run.py does not know and --device cpu or cuda. What it calls may end the process: only a main
that has returned 0 counts. $CHECK_REPORT is "" or a folder for JSON files of what it found, which the page shows
(leaderboard/checks.py). It is the problem's own code: no submission of others runs in it.
"""

import os
import shlex
import sys
from pathlib import Path

from harness.judge import console
from harness.judge.options import Options
from harness.problem.folders import Problem, UsageError
from harness.results import output
from harness.sandbox import process
from harness.tools import check_launcher
from problems.common import load

FILE = "check.py"
OUT = process.ROOT / "leaderboard" / "out" / "check"
MODES = ("test", "leaderboard")  # of harness/run.py: these say that a result is right, or rank it


def wanted(problem: Problem, arguments: Options, words: list[str]) -> bool:
    """Return whether the check runs. arguments: harness/run.py's; words: what it does not know. UsageError: there is no
    check that takes the words, or the check was asked for and there is none, or it does not run with these arguments.
    """
    check, skipped = _file(problem), _skipped(arguments)
    if words and not check:
        raise UsageError(output.unrecognized(words))
    if arguments.check_only and not check:
        raise UsageError(f"--check-only: {problem.name} has no {FILE}")
    if words and skipped:  # which --check-only is refused with
        raise UsageError(
            f"{shlex.join(words)} is for {FILE}, which is not run with {skipped}: leave one of the two out"
        )
    if check and skipped == "--submission":
        console.say(f"note: {FILE} says nothing of files from elsewhere, so it is not run")
    return check is not None and not skipped


def run(problem: Problem, device: str, words: list[str]) -> tuple[int, str]:
    """Run the check in a separate process. Return its exit status, and why it does not pass; "" if it does, or has
    refused its arguments and said why: 2. SandboxError: it could not be started.
    """
    module = f"problems.{problem.name}.check"
    argv = [sys.executable, check_launcher.__file__, module, *words, "--device", device]
    # Beside other work, pools that spin take three times as long.
    defaults = {"CHECK_REPORT": str(OUT / problem.name), "OMP_WAIT_POLICY": "PASSIVE"}
    extra = {name: os.environ.get(name, value) for name, value in defaults.items()}
    status = process.run(argv, {**extra, "PYTHONUNBUFFERED": "1"}, console.console.quiet)
    returned = {there: said for said, there in check_launcher.RETURNED.items()}
    if status in returned:
        return returned[status], ""
    if status < 0:
        return status, f"killed by signal {-status}"
    if not status:
        return 0, f"{FILE} ended with status 0 before its main returned: something that it calls ends the process"
    return status, f"exit status {status}{' before its main returned' * (status == output.USAGE_EXIT)}"


def _file(problem: Problem) -> Path | None:
    """Return the problem's check, if any. UsageError: it cannot run, since the folder is not in problems/."""
    found = problem.folder / FILE
    if not problem.ours or not found.is_file():
        return None
    if problem.folder.parent != load.PROBLEMS:
        raise UsageError(f"{found} runs as problems.{problem.name}.check: its folder must stand in {load.PROBLEMS}")
    return found


def _skipped(arguments: Options) -> str:
    """Return the argument of harness/run.py that switches the check off, or ""."""
    if arguments.lint or arguments.sanitize:
        return "--lint" if arguments.lint else "--sanitize"
    if arguments.mode not in MODES:
        return f"--mode {arguments.mode}"
    if arguments.resume is not None:
        return "--resume"  # the run began with its check, and all that it depends on is unchanged
    # The check judges the folder's own kernels, and a file from elsewhere must not run outside the jail.
    return "--submission" if arguments.submission else ""
