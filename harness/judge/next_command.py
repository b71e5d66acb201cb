"""The command to try after a run, for --events: what its gravest verdict asks for."""

import argparse
import re
import shlex

from harness.judge import console, limits, options, verdict
from harness.judge.verdict import Result
from harness.problem.folders import Case
from harness.results import schema, stats

PYTHON = ".venv/bin/python"
PAIRED = ("against", *options.PAIRED, "processes")  # what the user says of a comparison
_HELP = re.compile(r"--timeout [0-9.e+]+")  # how a time-out names the limit to try


def after(args: argparse.Namespace, name: str, winner: str, judged: list[Result], usual: int = 0) -> tuple[str, str]:
    """Return (the command, why). name: the problem's; winner: of this machine, "" if there is none; usual: as for
    console.undecided.
    """
    results = [j for j in judged if j.verdict != "UNSUPPORTED"] or judged
    j = min(results, key=lambda one: schema.STATUSES.index(one.verdict))
    variant = ["--variant", j.submission.name.partition("#")[0]]
    chosen = ["--submission", args.submission] if args.submission else variant
    base = [PYTHON, "harness/run.py", args.problem, *chosen, *_given(args, "device", "shard", "timeout")]
    report = [PYTHON, "leaderboard/report.py", name]
    if j.verdict == "PASSED":
        asked = judged[0].against_all if args.against else None  # a confirmation compares too
        percent = args.fail_on_regression
        if percent is not None and any(verdict.regressions(one, percent) for one in judged):
            words, why = [*base, *_given(args, "mode", "case", *PAIRED)], "it is slower: make it faster, then compare"
        elif asked and asked["word"] == "UNDECIDED":
            words, why = _undecided(args, base, asked, usual)
        else:
            words, why = _passed(args, base, report, "" if winner == j.submission.name else winner)
    elif j.verdict == "MODEL_CHECKED":
        recorded = "it is recorded; see the board", "it is right in the model; without --mode it is recorded"
        words, why = (report, recorded[0]) if args.mode == "leaderboard" else (base, recorded[1])
    elif j.verdict == "COMPILED":
        words, why = base, f"it compiles; run it on a machine with {' or '.join(j.submission.targets)}"
    elif j.verdict == "UNSUPPORTED":
        words, why = [PYTHON, "harness/run.py", args.problem, "--list"], "choose a variant that this machine can run"
    elif j.verdict == "INVALID_MEASUREMENT":
        words, why = (
            [*base, "--mode", args.mode, *_given(args, "case", *PAIRED)],
            "nothing is known to be wrong: measure again on an idle machine",
        )
    else:
        words, why = _failed(args, base, j)
    return shlex.join(words), why


def _given(args: argparse.Namespace, *names: str) -> list[str]:
    """Return those of these options that the user gave, as words."""
    usual = {"mode": "leaderboard"}
    found = [(name, getattr(args, name)) for name in names]
    return [
        word
        for name, value in found
        if value is not None and value != usual.get(name)
        for word in (f"--{name.replace('_', '-')}", f"{value:g}" if isinstance(value, float) else str(value))
    ]


def _undecided(args: argparse.Namespace, base: list[str], found: dict, usual: int) -> tuple[list[str], str]:
    """After a comparison that did not decide, the same one with as many processes as would; where their number cannot
    be told, with four times as many, which halve the interval, or with the usual number after one with fewer.
    """
    kept = _given(args, "mode", "case", *(name for name in PAIRED if name != "processes"))
    (least, most), limit, count = found["needed_range"], limits.MOST_PROCESSES, found["processes"]
    untold = most > stats.WIDE * least and least <= limit
    if count < usual and (untold or found["needed"] > limit):
        count, why = usual, console.undecided(found, usual)
    elif untold:
        count, why = min(4 * count, limit), console.undecided(found)
    elif found["needed"] <= limit:
        count, why = found["needed"], "about so many processes of each would decide"
    else:
        why = f"{limit} processes are too few: try when the machine is idle"
    return [*base, *kept, "--processes", str(count)], f"UNDECIDED: {why}"


def _passed(args: argparse.Namespace, base: list[str], report: list[str], winner: str) -> tuple[list[str], str]:
    if args.case:
        return [*base, "--mode", args.mode, *_given(args, *PAIRED)], "these cases are right; now all"
    if args.mode != "leaderboard":
        return [*base, *_given(args, *PAIRED)], "it is right; time it and record it"
    if winner and not args.against and not args.all:
        return [*base, "--against", winner], "it is recorded; compare it with the winner in pairs"
    return report, "it is recorded; see the board"


def _failed(args: argparse.Namespace, base: list[str], j: Result) -> tuple[list[str], str]:
    """After a change of the source, the shortest run that shows whether it helped."""
    found = failure(j)
    if found is None:
        return [*base, "--mode", "test"], "change what the reason names, then test"
    case, reason, timed = found
    words = [*base, "--mode", "benchmark" if timed else "test", "--case", str(case)]
    if longer := _HELP.search(reason):  # the last --timeout counts
        return words + longer[0].split(), "make it faster, or give it longer"
    return words, "change what the reason names, then call this case"


def failure(j: Result) -> tuple[Case, str, bool] | None:
    """Return the first case that failed with the verdict of `j`, the reason, and whether it was a timed call."""
    found = [(case, one, False) for case, one in j.tests] + [(t.case, t.failure, True) for t in j.times if t.failure]
    return next(((case, one.reason, timed) for case, one, timed in found if one.status == j.verdict), None)
