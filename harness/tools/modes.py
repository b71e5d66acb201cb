"""The modes of a run that judge nothing: compile for other machines, profile, and run under a sanitizer."""

import importlib.util
import shutil
import subprocess

from harness.judge import console, replay, replies
from harness.judge.events import Progress, Step
from harness.judge.handle import RunnerHandle
from harness.judge.limits import COMPILE_LIMIT_S
from harness.judge.outcome import Outcome
from harness.judge.session import Session
from harness.judge.verdict import Result
from harness.problem.folders import Case, Problem, Submission, UsageError
from harness.results import text
from harness.tools import profiling
from problems.common import build, cubins

SANITIZE_BYTES = 2**20  # bytes that a case may move to be run under a sanitizer
SANITIZE_TOOLS = ("memcheck", "racecheck")


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
            console.say(f"{j.submission.name}: COMPILE_ERROR for {target}\n{reply.reason}")
            return
        # One row per kernel; only the size, if the compiler reports no resources.
        for a in reply.artefacts:
            kernels = [kernel.model_dump(exclude_none=True) for kernel in a.kernels] or [{}]
            j.artefacts += [{"target": target, "bytes": a.bytes, **kernel} for kernel in kernels]
        j.status, j.reason = "COMPILED", f"compiled for {', '.join(j.submission.targets)}, not run here"


def profile(
    problem: Problem, device: str, target: str, submission: Submission, cases: list[Case], timeout_s: float | None
) -> str:
    """Print and keep torch's profile of one call on each case, and on a GPU ncu's digest. Return the verdict."""
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
        said = [table]
        try:
            if analyses:
                said.append(profiling.ncu(problem, submission, case, target))
                console.say(f"{case}\n{said[-1]}")
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            console.say(f"no ncu report: {error}")
            analyses = False
        console.say(profiling.keep(problem, submission, case, said, trace))
    return "PASSED"


def sanitize(problem: Problem, judged: list[Result], cases: list[Case], target: str, progress: Progress) -> list[str]:
    """Run small cases under compute-sanitizer. Return what is wrong. UsageError: no such tool, or no small case."""
    small, faults = [case for case in cases if (case.bytes or 0) <= SANITIZE_BYTES], []
    for i, j in enumerate(judged):
        served = [case for case in small if j.submission.serves(case)]
        if not served:
            raise UsageError(f"--sanitize: {j.submission.name} has no test case of up to {SANITIZE_BYTES} bytes")
        for k, tool in enumerate(SANITIZE_TOOLS):
            n, total = len(SANITIZE_TOOLS) * i + k, len(SANITIZE_TOOLS) * len(judged)
            progress(Step("sanitize", n, total, f"{j.submission.name} {tool}"))
            try:
                fault, tail = profiling.sanitize(problem, j.submission, served, tool, target)
            except RuntimeError as error:
                first, _, tail = str(error).partition("\n")
                if tail:
                    console.say(tail)
                raise UsageError(f"--sanitize: {first}") from None
            many = text.counted(len(served), "case")
            console.say(f"{j.submission.name:<20} {tool:<10} {'ERRORS' if fault else 'clean'} on {many}")
            if fault:
                console.say(f"{tail}\n{j.submission.name} {tool}: {fault}")
                faults.append(f"{j.submission.name} {tool}: {fault}")
    return faults
