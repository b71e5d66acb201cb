"""A problem's end-to-end check: check.py in its folder, run before anything of the problem is judged, and by the verb
check.

check.py has `main(argv: list[str]) -> int`, which returns 0 only if all holds, 2 where it refuses its arguments. It is
a separate process of the problem's own code, with the arguments that are given behind the verb, and --device. What it
calls may end that: only a main that has returned 0 counts. $CHECK_REPORT: "" or a folder for JSON of what it found.
"""

import os
import sys
from collections.abc import Sequence

from harness.judge import console
from harness.problem.folders import Problem, UsageError
from harness.results import output
from harness.sandbox import process
from problems.common import load

FILE = "check.py"
RETURNED = 173  # exit status where main has returned 0: a kernel that calls exit(0) gives no verdict
MAIN = """import sys
from problems.{name} import check
code = check.main(sys.argv[1:])
sys.exit({returned} if repr(code) == "0" else code or 1)
"""
OUT = process.ROOT / "leaderboard" / "out" / "check"


def run(problem: Problem, device: str, words: Sequence[str]) -> tuple[int, str]:
    """Run the check in a separate process. Return its exit status, and why it does not pass; "" if it does, or has
    refused its arguments and said why: 2. UsageError: there is none. SandboxError: it could not be started.
    """
    found = problem.folder / FILE
    if not problem.ours or not found.is_file():
        raise UsageError(f"{problem.name} has no {FILE}")
    if problem.folder.parent != load.PROBLEMS:
        raise UsageError(f"{found} runs as problems.{problem.name}.check: its folder must stand in {load.PROBLEMS}")
    argv = [sys.executable, "-c", MAIN.format(name=problem.name, returned=RETURNED), *words, "--device", device]
    # Beside other work, pools that spin take three times as long.
    defaults = {"CHECK_REPORT": str(OUT / problem.name), "OMP_WAIT_POLICY": "PASSIVE"}
    extra = {name: os.environ.get(name, value) for name, value in defaults.items()}
    status = process.run(argv, {**extra, "PYTHONUNBUFFERED": "1"}, console.is_quiet())
    if status in (RETURNED, output.USAGE_EXIT):
        return status % RETURNED, ""
    if status < 0:
        return status, f"killed by signal {-status}"
    if not status:
        return 0, f"{FILE} ended with status 0 before its main returned: something that it calls ends the process"
    return status, f"exit status {status}"
