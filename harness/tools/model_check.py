"""`--device model`: a separate process executes GPU variants on the CPU, by ptx_model/tools/check.py."""

import importlib.util
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from harness.judge.outcome import Outcome
from harness.judge.verdict import Recorder, Result
from harness.problem import sources
from harness.problem.folders import Case, Problem, Submission, UsageError
from harness.results import schema, text
from harness.sandbox import process

TARGETS = ("sm90", "sm100")  # a variant for both is checked as what it names first


def target_of(submission: Submission) -> str:
    """Return the target that the model stands for. UsageError: `submission` is nothing that the model can execute."""
    name, wanted = submission.name, " or ".join(TARGETS)
    targets = [target for target in submission.targets if target in TARGETS]
    missing = [package for package in submission.requires if importlib.util.find_spec(package) is None]
    for refused, why in (
        (not submission.ours, "is for problems of this checkout"),
        (not targets, f"needs a variant for {wanted}, this one is for {', '.join(submission.targets)}: give --variant"),
        (submission.folder and sources.is_composition(submission.folder), "checks one kernel, and no whole model"),
        ("triton" in submission.requires, "executes CUDA C++ and CuTe DSL, and no Triton"),
        (missing, f"needs what is not installed: {', '.join(missing)}"),
    ):
        if refused:
            raise UsageError(f"--device model {why}, got {name}")
    return targets[0]


def run(
    problem: Problem, submission: Submission, cases: list[Case], say: Callable[[str], None], timeout_s: float | None
) -> list[tuple[Case, Outcome]]:
    """Check `submission` on `cases`. Return the outcome of each that was reached. timeout_s: of a case and order."""
    place = str(problem.folder), str(submission.file), target_of(submission)
    asked = json.dumps([{**case.params, "seed": case.seed} for case in cases])
    argv = [sys.executable, "-m", "ptx_model.tools.check", *place, asked]
    environment = {**os.environ, "PYTHONPATH": str(process.ROOT), "PYTHONUNBUFFERED": "1"}
    outcomes: dict[int, Outcome] = {}
    reached = 0
    with tempfile.TemporaryFile("w+") as errors:
        pipe, none = subprocess.PIPE, subprocess.DEVNULL
        child = subprocess.Popen(argv, bufsize=0, env=environment, stdin=none, stdout=pipe, stderr=errors)
        try:
            for line in _lines(child.stdout, timeout_s):
                reached = line["case"]
                status, order, message = (line[key] for key in ("status", "order", "said"))
                say(f"{submission.name:20} {place[-1]} model  {cases[reached]}  {order:16}  {status}  {message}")
                outcomes[reached] = Outcome(status, f"{order}: {message}")  # a fault is the last word of its case
                reached += line["last"]
            status = child.wait()
        except TimeoutError:
            more = f"give it longer: --timeout {2 * (timeout_s or 0):g}"
            outcomes[reached] = Outcome("TIMEOUT", f"not over after {timeout_s:g} s under one order; {more}")
            status = 0
        finally:
            child.kill()
            child.wait()
        if not status and reached < len(cases) and all(res.status == "MODEL_CHECKED" for res in outcomes.values()):
            outcomes[reached] = Outcome("RUNTIME_ERROR", "its process ended with status 0 before the call was done")
        if status:
            errors.seek(0)
            last = errors.read().strip().splitlines()[-1:] or [f"exit status {status}"]
            outcomes[min(reached, len(cases) - 1)] = Outcome("RUNTIME_ERROR", last[0])
    return [
        (cases[n], Outcome(outcome.status, "" if outcome.status == "MODEL_CHECKED" else outcome.reason))
        for n, outcome in sorted(outcomes.items())
    ]


def _lines(out: Any, timeout_s: float | None) -> Iterator[dict]:
    """What comes from a pipe without a buffer, line by line. TimeoutError: a line took longer than the limit."""
    while select.select([out], [], [], timeout_s)[0]:
        if not (line := out.readline()):
            return
        yield json.loads(line)
    raise TimeoutError


def records(recorder: Recorder, judged: Result) -> list[dict]:
    """The records of a checked submission: one for each case."""
    from ptx_model.tools.check import ORDERS

    more = {"orders": [order.policy for order in ORDERS], "sandbox": None}
    lines = [recorder.of_call(judged, "model", case, outcome) | more for case, outcome in judged.tests]
    return [text.plain(schema.known(line)) for line in lines]
