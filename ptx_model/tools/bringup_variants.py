"""The variants for sm100, as bringup_sm100.py takes them: compiled, run on their smallest test case, and judged.

Each step of a variant is a process of its own with a time limit, so that one that hangs or dies costs no other.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from harness.problem import folders
from problems.common import build

ROOT = Path(__file__).resolve().parents[2]
TARGET = "sm100"
# Limits in seconds: nvcc takes two minutes for the largest; a call has limits of its own, of harness/run.py.
COMPILE_S, TEST_S, JUDGE_S = 600, 300, 1800
SHOWN = 300  # characters of a message
ENVIRONMENT = {**os.environ, "CUTE_DSL_ARCH": build.ARCH[TARGET]}  # without a GPU CuTe DSL asks for it
# What a status of a record says of a variant that was run. Any other status stands for itself.
WORDS = {
    "PASSED": "runs",
    "MODEL_CHECKED": "runs in the model",
    "INCORRECT": "wrong",
    "COMPILE_ERROR": "not compiled",
    "RUNTIME_ERROR": "crashed",
    "TIMEOUT": "hung",
}
RIGHT = WORDS["PASSED"], WORDS["MODEL_CHECKED"]
COMPILE = """
import sys
from problems.common import load
variant = load.variant(*sys.argv[1:3])
if hasattr(variant, "compile_for"):
    variant.compile_for(sys.argv[3])
"""


def variants() -> list[dict]:
    """All variants for sm100 but for baselines and the composed model: problem, variant, requires, the packages that
    it imports, and case, its smallest test case in words. Those written for sm100 come first, those of torch last.
    """
    found = []
    for problem in map(folders.find, folders.problem_names()):
        for one in () if problem.composition else problem.submissions():
            if TARGET in one.targets and not one.baseline:
                case = min(filter(one.serves, problem.tests), key=lambda case: case.bytes or 0)
                row = {"problem": problem.name, "variant": one.name, "requires": one.requires, "case": str(case)}
                found.append(row)
    ahead = ("sm100", "sm90", "torch")
    return sorted(found, key=lambda row: ahead.index(row["variant"].partition("_")[0]))


def take(rows: list[dict], device: str | None, judge: bool, keep: Callable[[], None]) -> None:
    """Add to each of `variants` its steps, each {"word", "said", "log"}: "compiled", and with a device of
    harness/run.py "test" and, if that is right and it is to `judge`, "judged". keep() is called after each step.
    """
    for row in rows:
        missing = [package for package in row["requires"] if importlib.util.find_spec(package) is None]
        needs = {"word": f"needs {', '.join(missing)}", "said": "", "log": ""}
        row["compiled"] = needs if missing else compiled(row["problem"], row["variant"])
        print(f"{row['problem']} {row['variant']}: compiled: {row['compiled']['word']}", flush=True)
        keep()
    for row in rows:
        if device is not None and row["compiled"]["word"] == "yes":
            named = [row["problem"], "--variant", row["variant"], "--device", device]
            row["test"] = judged([*named, "--mode", "test", "--case", row["case"]], TEST_S)
            print(f"{row['problem']} {row['variant']}: {row['test']['word']}  {row['test']['said']}", flush=True)
            keep()
    for row in rows:
        if judge and row.get("test", {}).get("word") == WORDS["PASSED"]:
            row["judged"] = judged([row["problem"], "--variant", row["variant"], "--device", str(device)], JUDGE_S)
            print(f"{row['problem']} {row['variant']}: judged: {row['judged']['said']}", flush=True)
            keep()


def compiled(problem: str, variant: str) -> dict:
    """Compile for sm100, which needs no GPU."""
    code, _, log = _process([sys.executable, "-c", COMPILE, problem, variant, TARGET], COMPILE_S)
    return {"word": {0: "yes", None: "hung"}.get(code, "no"), "said": _last(log), "log": log}


def judged(words: list[str], limit_s: float) -> dict:
    """Run harness/run.py with these words: its verdict, or how it ended without one."""
    code, out, log = _process([sys.executable, "harness/run.py", *words, "--quiet", "--json", "-"], limit_s)
    records = [json.loads(line) for line in out.splitlines()]
    if code is None or not records:
        return {"word": "hung" if code is None else f"exit code {code}", "said": _last(log), "log": log}
    fault = next((record for record in records if record["status"] not in ("PASSED", "COMPILED")), None)
    status, said = (fault["status"], " ".join(fault["reason"].split())) if fault else ("PASSED", _last(log))
    return {"word": WORDS.get(status, status), "said": said[:SHOWN], "log": log}


def _last(log: str) -> str:
    return (log.strip().splitlines() or [""])[-1][:SHOWN]


def _process(command: list[str], limit_s: float) -> tuple[int | None, str, str]:
    """Run a command. Return its exit code, None where it was killed at its limit, its output, and its log's end."""
    try:
        ran = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return None, "", f"killed after {limit_s:g} s"
    return ran.returncode, ran.stdout, ran.stderr[-4000:]


def is_fault(step: dict) -> bool:
    """Whether a step went wrong. Where a package is missing, nothing was tried."""
    return step["word"] not in ("yes", "not run", *RIGHT) and not step["word"].startswith("needs ")


def table(rows: list[dict]) -> str:
    """One line for each variant, and what went wrong below it."""
    lines = [("problem", "variant", "compiled", "smallest test", "judged")]
    for row in rows:
        steps = [row.get(step, {"word": "not run", "said": ""}) for step in ("compiled", "test", "judged")]
        *words, last = (step["word"] for step in steps)
        lines.append((row["problem"], row["variant"], *words, steps[2]["said"] if last == "runs" else last))
        lines += [("", "  " + step["said"], "", "", "") for step in steps if is_fault(step)]
    widths = [max(len(line[n]) for line in lines if line[0]) for n in range(4)]
    padded = [[f"{cell:{width}}" for cell, width in zip(line, [*widths, 0], strict=True)] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in padded)
