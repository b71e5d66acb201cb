"""What to do next: the last line of a run, and the event `next` of --events."""

import shlex
from pathlib import Path

from harness.judge import limits
from harness.judge.options import Options
from harness.judge.verdict import Result
from harness.problem.folders import Problem, Submission
from harness.results import text
from harness.results.ranking import Leader
from harness.sandbox.process import ROOT

MODEL = "--device model --mode test"
NEAR = 1.1  # times the leader's time: what only pairs can tell apart


def modelled(submission: Submission) -> bool:
    """Whether `--device model` can execute it: a variant for GPUs in CUDA C++ or CuTe DSL."""
    return submission.ours and "cpu" not in submission.targets and "triton" not in submission.requires


def place(j: Result, leader: Leader | None) -> str:
    """Return the line about the rank of a submission that was timed in a run of its own."""
    said = "rank: none yet, timed in a run of its own; "
    if leader and j.metric:
        said += f"{j.metric[0] / leader.value:.2f}x the time of {leader.variant} (from the records); "
    return f"{said}rank it with --all, a file beside others with a --submission for each"


def following(args: Options, problem: Problem, judged: list[Result], leader: Leader | None) -> tuple[str, str]:
    """Return the command that helps most behind a run with these results, and what for. leader: of the board."""
    here = "" if Path().samefile(ROOT) else f"{shlex.quote(str(ROOT))}/"  # so that the command can be pasted
    python = f"{here}.venv/bin/python {here}"
    failing = [j for j in judged if j.verdict not in ("PASSED", "COMPILED", "MODEL_CHECKED", "UNSUPPORTED")]
    j = failing[0] if failing else judged[0]
    is_variant = j.submission.file.parent.name == "variants"
    name = ["--variant", j.submission.name] if is_variant else ["--submission", str(j.submission.file)]
    there = args.device not in (None, "model") and j.verdict not in ("UNSUPPORTED", "COMPILED")
    device = ["--device", str(args.device)] if there else []

    def run(why: str, *words: str, chosen: list[str] = name) -> tuple[str, str]:
        return f"{python}harness/run.py {shlex.join([args.problem, *chosen, *device, *words])}", why

    case = ["--case", args.case] if args.case else []
    if failing and j.verdict != "INVALID_MEASUREMENT":
        bad = next((c for c, o in j.tests if o.status == j.verdict), None)
        first = [] if j.verdict in ("COMPILE_ERROR", "RULE_BROKEN") or not bad else ["--case", text.label(bad.params)]
        return run("when it is mended", "--mode", "test", *(first or case))
    if failing or any(j.word == "BUSY" for j in judged):
        chosen = ["--all"] if args.all else name
        mode = ["--mode", args.mode] if args.mode != "leaderboard" else []
        other = ["--against", str(args.against)] if args.against else []
        return run("when the machine is idle", *mode, *other, *case, chosen=chosen)
    if j.verdict in ("UNSUPPORTED", "COMPILED") and not args.all:
        if modelled(j.submission):
            return run("executes its PTX on the CPU", *MODEL.split())
        return f"{python}harness list {problem.name}", "which variants are for what"
    if args.mode == "test" or args.device == "model":
        return run("all test cases", "--mode", "test") if case else run("its times")
    if len(judged) > 1 and not args.against:
        chosen = [word for file in args.submission or () for word in ("--submission", file)] or ["--all"]
        return (
            run("all cases", chosen=chosen) if case else (f"{python}leaderboard/report.py {problem.name}", "the board")
        )
    pair = j.against_all or {}
    if pair.get("word") == "UNDECIDED":
        count = str(min(4 * pair["processes"], limits.MOST_PROCESSES))
        return run("narrows the interval", "--against", str(args.against), "--processes", count, *case)
    if not pair and leader and j.metric and j.metric[0] < NEAR * leader.value and leader.variant != j.submission.name:
        return run("which of the two is faster", "--against", leader.variant, *case)
    return run("where the time goes", "--mode", "profile", *case)
