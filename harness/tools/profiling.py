"""Profile and sanitize: the torch profiler's table, one call under Nsight Compute with a digest, compute-sanitizer.

Each tool runs in a separate pass. RuntimeError names a missing tool.
"""

import csv
import datetime
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from harness.problem.folders import Case, Problem, Submission
from harness.results import environment, output
from harness.sandbox.process import ROOT
from harness.tools import single
from problems.common import build

OUT = ROOT / "leaderboard" / "out" / "profile"
TOOL_LIMIT_S = 540
FOUND_EXIT = 66  # of compute-sanitizer where it found errors, so that it is no exit status of the process itself
TAIL = 40  # lines of its output: a Python traceback and an error with its backtrace
_RAISED = re.compile(r"[\w.]*(Error|Exception|Exit|Interrupt)\b(: |$)")  # the last line of a traceback
NCU_SECTIONS = "SpeedOfLight MemoryWorkloadAnalysis Occupancy LaunchStats WarpStateStats SchedulerStats"
_STALL = "smsp__average_warps_issue_stalled_"
_DIGEST = (  # what it is called, ncu's metric, the unit that is shown, and what ncu's base unit (ns, byte/s) is of it
    ("duration", "gpu__time_duration.sum", "us", 1e-3),
    ("DRAM read", "dram__bytes_read.sum.per_second", "TB/s", 1e-12),
    ("DRAM of peak", "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", "%", 1),
    ("SM of peak", "sm__throughput.avg.pct_of_peak_sustained_elapsed", "%", 1),
    ("occupancy", "sm__warps_active.avg.pct_of_peak_sustained_active", "%", 1),
    ("registers", "launch__registers_per_thread", "a thread", 1),
    ("grid", "launch__grid_size", "CTAs", 1),
    ("block", "launch__block_size", "threads", 1),
    ("waves", "launch__waves_per_multiprocessor", "a SM", 1),
)


def place(problem: Problem, submission: Submission, case: Case, suffix: str) -> Path:
    """Return the file of this suffix that a profile of the case leaves in OUT. Its folder is there."""
    OUT.mkdir(parents=True, exist_ok=True)
    name = f"{problem.name}-{submission.name}-{'-'.join(map(str, case.params.values()))}"
    return OUT / f"{name.replace('/', '_')[:200]}{suffix}"


def keep(problem: Problem, submission: Submission, case: Case, said: list[str], trace: str) -> str:
    """Write what a profile of the case said as .txt and its trace as .trace.json, for the page. Return what to say."""
    commit, dirty = environment.commit()
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    head = f"{problem.name} {submission.name}, {case}, {now}, commit {commit}{' with changes' if dirty else ''}"
    kept = [place(problem, submission, case, ".txt")]
    output.write_whole(kept[0], "\n".join([head, *said]) + "\n")
    if _is_trace(trace):
        kept.append(place(problem, submission, case, ".trace.json"))
        output.write_whole(kept[1], trace)
    names = ", ".join(str(file.relative_to(ROOT) if file.is_relative_to(ROOT) else file) for file in kept)
    return f"kept: {names}" + ("" if len(kept) == 2 else " (no trace: it was too long, or is no JSON)")


def _is_trace(said: str) -> bool:
    """Whether a text from a runner is what a viewer of traces reads: a JSON object with events."""
    try:
        found = json.loads(said)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and isinstance(found.get("traceEvents"), list)


def ncu(problem: Problem, submission: Submission, case: Case, target: str) -> str:
    """Run one call of `case` under ncu, and keep the report. Return the digest. RuntimeError: ncu missing or failed."""
    report = place(problem, submission, case, ".ncu-rep")
    options = "--clock-control none --profile-from-start off --target-processes application-only -f"
    options += " --metrics dram__bytes_read.sum.per_second" + "".join(
        f" --section {name}" for name in NCU_SECTIONS.split()
    )
    ncu, solo = _tool("ncu"), _solo(problem, submission, [case])
    _run([ncu, *options.split(), "-o", str(report), *solo], "ncu", _dsl(target))
    shown_as = ["--page", "raw", "--csv", "--print-units", "base"]
    page = _run([ncu, "--import", str(report), *shown_as], "ncu --import", {})
    shown = report.relative_to(ROOT) if report.is_relative_to(ROOT) else report
    return f"{digest(page)}\nfull report: {shown}"


def digest(page: str) -> str:
    """Return what a kernel engineer reads first, from ncu's raw CSV page: a block of lines for each kernel."""
    lines = [line for line in page.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(io.StringIO("\n".join(lines))))
    if len(rows) < 2:
        raise RuntimeError("ncu saw no kernel in the call")
    text = []
    for kernel in rows[1:]:  # behind the row of units
        text.append(kernel["Kernel Name"])
        for label, metric, unit, scale in _DIGEST:
            if kernel.get(metric):
                value = float(kernel[metric].replace(",", "")) * scale
                text.append(f"  {label:<14}{value:>10.2f} {unit}")
        stalls = [
            (float(kernel[name].replace(",", "")), name.removeprefix(_STALL).partition("_per_issue")[0])
            for name in kernel
            if name and name.startswith(_STALL) and "_per_issue" in name and "not_issued" not in name and kernel[name]
        ]
        for cycles, name in sorted(stalls, reverse=True)[:4]:
            text.append(f"  stall {name:<20}{cycles:>6.2f} warps an issue")
    return "\n".join(text)


def sanitize(problem: Problem, submission: Submission, cases: list[Case], tool: str, target: str) -> tuple[str, str]:
    """Run cases under a tool. Return (what is wrong or "", its last lines). RuntimeError: missing, or too slow."""
    # A separate allocation for every tensor, so that the tool sees an access past one. Compilers that the submission
    # starts are not looked into: the tool would run them too, and count what they do.
    options = f"--tool {tool} --error-exitcode {FOUND_EXIT} --launch-timeout 120 --target-processes application-only"
    command = [_tool("compute-sanitizer"), *options.split(), *_solo(problem, submission, cases)]
    try:
        code, said = _finished(command, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", **_dsl(target)})
    except subprocess.TimeoutExpired as error:
        tail = _tail((error.output or b"").decode(errors="replace"))
        raise RuntimeError(f"{tool} was not done after {TOOL_LIMIT_S} s\n{tail}") from None
    return _fault(code, said), _tail(said)


def _fault(code: int, said: str) -> str:
    """Return what is wrong with a run under compute-sanitizer in a line, "" if nothing."""
    clean = any(word in said for word in ("ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards"))
    if code == 0 and clean and single.DONE in said:
        return ""
    if code == 0 and clean:
        return "its process ended with status 0 before the last case was called"
    lines = [line.strip("= ") for line in said.splitlines()]
    found = [
        "the tool found errors" if code == FOUND_EXIT else f"exit status {code}",
        next((line for line in reversed(lines) if " SUMMARY: " in line), "the tool printed no summary"),
        next((line for line in reversed(lines) if _RAISED.match(line)), ""),
        # Of the tool itself, such as "Error: Target application terminated before first instrumented API call".
        next((line for line in lines if line.startswith(("Error: ", "Internal Sanitizer Error"))), ""),
    ]
    return "; ".join(filter(None, found))


def _tail(said: str) -> str:
    return "\n".join(said.strip().splitlines()[-TAIL:])


def _solo(problem: Problem, submission: Submission, cases: list[Case]) -> list[str]:
    specs = json.dumps([{**case.params, "seed": case.seed} for case in cases])
    return [sys.executable, "-m", "harness.tools.single", str(problem.folder), str(submission.file), "cuda", specs]


def _dsl(target: str) -> dict[str, str]:
    """Name the target to the CuTe DSL: a sanitizer counts its failing look-ups on the device as errors."""
    return {"CUTE_DSL_ARCH": build.ARCH[target]}


def _run(command: list[str], what: str, extra: dict[str, str]) -> str:
    code, said = _finished(command, extra)
    if code:
        raise RuntimeError(f"{what} failed with status {code}:\n{said[-3000:]}")
    return said


def _finished(command: list[str], extra: dict[str, str]) -> tuple[int, str]:
    """Run a tool; `extra`: of its environment. Return (exit status, output). TimeoutExpired: after TOOL_LIMIT_S."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), **extra}
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=pipe, stderr=both, timeout=TOOL_LIMIT_S)
    return done.returncode, done.stdout.decode(errors="replace")


def _tool(name: str) -> str:
    if path := shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/local/cuda/bin"):
        return path
    raise RuntimeError(f"{name} is not on PATH: install the CUDA toolkit's {name}")
