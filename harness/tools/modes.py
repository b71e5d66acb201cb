"""What is done with a problem besides judging submissions: its end-to-end check, before anything of it is judged and by
the verb check; compiling for other machines; profiles; runs under a sanitizer.

check.py in a problem's folder has `main(argv: list[str]) -> int`, which returns 0 only if all holds, 2 where it refuses
its arguments: those behind the verb, and --device. It is the problem's own code in a separate process, which a call may
end: only a main that has returned 0 counts. A profile is torch's table, and on a GPU Nsight Compute's page of a call.
"""

import datetime
import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.judge import console, replay, replies
from harness.judge.handle import RunnerHandle
from harness.judge.outcome import Outcome
from harness.judge.replies import COMPILE_LIMIT_S
from harness.judge.session import Progress, Session, Step
from harness.judge.verdict import Result
from harness.problem.folders import Case, Problem, Submission, UsageError
from harness.results import environment, output, text
from harness.sandbox import process
from harness.sandbox.process import ROOT
from harness.tools import single
from problems.common import build, cubins, load

SANITIZE_BYTES = 2**20  # bytes that a case may move to be run under a sanitizer
SANITIZE_TOOLS = ("memcheck", "racecheck")
OUT = ROOT / "leaderboard" / "out" / "profile"
TOOL_LIMIT_S = 540
FOUND_EXIT = 66  # of compute-sanitizer where it found errors, so that it is no exit status of the process itself
TAIL = 40  # lines of its output: a Python traceback and an error with its backtrace
NCU_SECTIONS = "SpeedOfLight MemoryWorkloadAnalysis Occupancy LaunchStats WarpStateStats SchedulerStats"

CHECK = "check.py"
RETURNED = 173  # exit status where main has returned 0: a kernel that calls exit(0) gives no verdict
MAIN = """import sys
from problems.{name} import check
code = check.main(sys.argv[1:])
sys.exit({returned} if repr(code) == "0" else code or 1)
"""


def check(problem: Problem, device: str, words: Sequence[str], quiet: bool = False) -> tuple[int, str]:
    """Run the check. Return its status, and why it fails, "": passed, or arguments refused. UsageError: none."""
    file = problem.folder / CHECK
    if not problem.ours or not file.is_file():
        raise UsageError(f"{problem.name} has no {CHECK}")
    if problem.folder.parent != load.PROBLEMS:
        raise UsageError(f"{file} runs as problems.{problem.name}.check: its folder must stand in {load.PROBLEMS}")
    argv = [sys.executable, "-c", MAIN.format(name=problem.name, returned=RETURNED), *words, "--device", device]
    # Beside other work, pools that spin take three times as long.
    policy = os.environ.get("OMP_WAIT_POLICY", "PASSIVE")
    status = process.run(argv, {"OMP_WAIT_POLICY": policy, "PYTHONUNBUFFERED": "1"}, quiet)
    if status in (RETURNED, output.USAGE_EXIT):
        return status % RETURNED, ""
    if status < 0:
        return status, f"killed by signal {-status}"
    if not status:
        return 0, f"{CHECK} ended with status 0 before its main returned: something that it calls ends the process"
    return status, f"exit status {status}"


def compile_only(problem: Problem, device: str, judged: list[Result], progress: Progress) -> None:
    """Compile submissions for their own targets, if their compiler is installed: COMPILED, or COMPILE_ERROR."""
    todo = [j for j in judged if j.target in build.ARCH and not j.submission.baseline]
    if not todo:
        return
    if not shutil.which("nvcc"):
        console.say("nvcc is not on PATH: variants for other targets are not compiled")
        return
    if not cubins.disassembler():
        console.say(f"note: {cubins.MISSING}")
    with Session(problem, device) as session:
        for number, j in enumerate(todo):
            progress(Step("compile for others", number, len(todo), j.submission.name))
            if all(importlib.util.find_spec(name) for name in j.submission.requires):
                _compile(session, j)
        progress(Step("compile for others", len(todo), len(todo), "done"))


def _compile(session: Session, j: Result) -> None:
    for target in (t for t in j.submission.targets if t in build.ARCH):
        handle = RunnerHandle(j.submission.name, j.submission, target, runner=f"{j.submission.name}@{target}")
        reply = session.ask_runner(handle, replies.Compiled, {"op": "compile", "target": target}, 2 * COMPILE_LIMIT_S)
        session.stop(handle)
        if isinstance(reply, Outcome):
            j.status, j.reason = "COMPILE_ERROR", reply.reason
            first, *report = console.readable(reply.reason)
            console.say("\n".join([f"{j.submission.name}: COMPILE_ERROR for {target}", *(report or [first])]))
            return
        # One row per kernel; only the size, if the compiler reports no resources.
        for a in reply.artefacts:
            kernels = [kernel.model_dump(exclude_none=True) for kernel in a.kernels] or [{}]
            j.artefacts += [{"target": target, "bytes": a.bytes, **kernel} for kernel in kernels]
        j.status, j.reason = "COMPILED", f"compiled for {', '.join(j.submission.targets)}, not run here"


def profile(
    problem: Problem, device: str, target: str, submission: Submission, cases: list[Case], timeout_s: float | None
) -> str:
    """Print and keep torch's profile of one call on each case, and on a GPU ncu's details. Return the verdict."""
    with Session(problem, device, timeout_s) as session:
        handle, kept = RunnerHandle(submission.name, submission, target, recorded=False), []
        for case in cases:
            session.weights(case)
            session.content(case)
            message = {"op": "profile", "baseline": submission.baseline}
            if device == "cuda":
                reply = replay.profile(session, handle, message, 2 * COMPILE_LIMIT_S)
            else:
                reply = session.ask_runner(handle, replies.Profiled, message, 2 * COMPILE_LIMIT_S, buffers=1)
            if isinstance(reply, Outcome):
                console.say(f"{submission.name}: {reply.status}: {reply.reason}")
                return reply.status
            console.say(f"{case}\n{reply.table}")
            kept.append((case, reply.table, reply.trace))
    analyses = device == "cuda"  # by ncu, where that works
    for case, table, trace in kept:
        reports = [table]
        try:
            if analyses:
                reports.append(ncu(problem, submission, case, target))
                console.say(f"{case}\n{reports[-1]}")
        except (RuntimeError, UsageError, subprocess.TimeoutExpired) as error:
            console.say(f"no ncu report: {error}")
            analyses = False
        console.say(keep(problem, submission, case, reports, trace))
    return "PASSED"


def place(problem: Problem, submission: Submission, case: Case, suffix: str) -> Path:
    """Return the file of this suffix that a profile of the case leaves in OUT. Its folder is there."""
    OUT.mkdir(parents=True, exist_ok=True)
    name = f"{problem.name}-{submission.name}-{'-'.join(map(str, case.params.values()))}"
    return OUT / f"{name.replace('/', '_')[:200]}{suffix}"


def keep(problem: Problem, submission: Submission, case: Case, reports: list[str], trace: str) -> str:
    """Write what a profile of the case said as .txt and its trace as .trace.json, for the page. Return what to say."""
    commit, dirty = environment.commit()
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    head = f"{problem.name} {submission.name}, {case}, {now}, commit {commit}{' with changes' if dirty else ''}"
    kept = [place(problem, submission, case, ".txt")]
    output.write_whole(kept[0], "\n".join([head, *reports]) + "\n")
    if trace:
        kept.append(place(problem, submission, case, ".trace.json"))
        output.write_whole(kept[1], trace)
    names = ", ".join(str(file.relative_to(ROOT) if file.is_relative_to(ROOT) else file) for file in kept)
    return f"kept: {names}" + ("" if len(kept) == 2 else " (no trace: it was too long)")


def ncu(problem: Problem, submission: Submission, case: Case, target: str) -> str:
    """Run one call under ncu, and keep the report. Return its page of details. RuntimeError, UsageError: none."""
    report = place(problem, submission, case, ".ncu-rep")
    options = "--clock-control none --profile-from-start off --target-processes application-only -f"
    options += f" --section {' --section '.join(NCU_SECTIONS.split())}"
    ncu, page = _tool("ncu"), ""
    recorded = [*options.split(), "-o", str(report), *_solo(problem, submission, [case])]
    for words in (recorded, ["--import", str(report), "--page", "details"]):
        code, page = _finished([ncu, *words], _dsl(target))
        if code:
            raise RuntimeError(f"ncu failed with status {code}:\n{page[-3000:]}")
    return f"{page}\nfull report: {report.relative_to(ROOT) if report.is_relative_to(ROOT) else report}"


def sanitize(problem: Problem, judged: list[Result], cases: list[Case], target: str, progress: Progress) -> list[str]:
    """Run small cases under compute-sanitizer. Return what is wrong. UsageError: no such tool, or no small case."""
    small, faults = [case for case in cases if (case.bytes or 0) <= SANITIZE_BYTES], []
    # A separate allocation for every tensor, with bytes of nobody behind it, so that the tool sees an access past one.
    # Compilers that the submission starts are not looked into: the tool would run them too, and count what they do.
    options = f"--error-exitcode {FOUND_EXIT} --launch-timeout 120 --target-processes application-only --padding 256"
    extra = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", **_dsl(target)}
    for n, (j, tool) in enumerate(itertools.product(judged, SANITIZE_TOOLS)):
        name = j.submission.name
        served = [case for case in small if j.submission.serves(case)]
        if not served:
            raise UsageError(f"sanitize: {name} has no test case of up to {SANITIZE_BYTES} bytes")
        progress(Step("sanitize", n, len(SANITIZE_TOOLS) * len(judged), f"{name} {tool}"))
        command = [_tool("compute-sanitizer"), "--tool", tool, *options.split()]
        try:
            code, printed = _finished([*command, *_solo(problem, j.submission, served)], extra)
        except subprocess.TimeoutExpired as error:
            console.say(_tail((error.output or b"").decode(errors="replace")))
            raise UsageError(f"sanitize: {tool} was not done after {TOOL_LIMIT_S} s") from None
        fault = _fault(code, printed)
        console.say(f"{name:<20} {tool:<10} {'ERRORS' if fault else 'clean'} on {text.counted(len(served), 'case')}")
        if fault:
            console.say(f"{_tail(printed)}\n{name} {tool}: {fault}")
            faults.append(f"{name} {tool}: {fault}")
    return faults


def _fault(code: int, printed: str) -> str:
    """Return what is wrong with a run under compute-sanitizer in a line, "" if nothing."""
    if code:
        return "the tool found errors" if code == FOUND_EXIT else f"exit status {code}"
    if not any(word in printed for word in ("ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards")):
        return "the tool printed no summary without errors"
    return "" if single.DONE in printed else "its process ended with status 0 before the last case was called"


def _tail(printed: str) -> str:
    return "\n".join(printed.strip().splitlines()[-TAIL:])


def _solo(problem: Problem, submission: Submission, cases: list[Case]) -> list[str]:
    specs = json.dumps([{**case.params, "seed": case.seed} for case in cases])
    return [sys.executable, "-m", "harness.tools.single", str(problem.folder), str(submission.file), "cuda", specs]


def _dsl(target: str) -> dict[str, str]:
    """Name the target to the CuTe DSL: a sanitizer counts its failing look-ups on the device as errors."""
    return {"CUTE_DSL_ARCH": build.ARCH[target]}


def _finished(command: list[str], extra: dict[str, str]) -> tuple[int, str]:
    """Run a tool; `extra`: of its environment. Return (exit status, output). TimeoutExpired: after TOOL_LIMIT_S."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), **extra}
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=pipe, stderr=both, timeout=TOOL_LIMIT_S)
    return done.returncode, done.stdout.decode(errors="replace")


def _tool(name: str) -> str:
    if path := shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/local/cuda/bin"):
        return path
    raise UsageError(f"{name} is not on PATH: install the CUDA toolkit's {name}")
