"""The plan of a recorded run: what it was asked and what it depends on. A resumed run must find all of it unchanged."""

import argparse
from pathlib import Path

from harness.judge import outputs
from harness.judge.verdict import Result
from harness.problem import sources
from harness.problem.folders import Case, Problem, UsageError, reading
from harness.results import environment, record, schema

# Options that say what a run judges, and how. The others choose what is printed, or written besides the records
# (harness/judge/outputs.py), or are refused in a recorded run.
OPTIONS = (
    "mode",
    "variant",
    "submission",
    "against",
    "processes",
    "same_within",
    "fail_on_regression",
    "all",
    "seed",
    "timeout",
)
_WORDS = {
    "arguments": "its arguments",
    "submissions": "the submissions",
    "tests": "the test cases",
    "target": "the target",
    "benchmarks": "the benchmark cases",
    "problem_hash": "the problem's own files",
    "environment": "the environment",
    "harness_hash": "the judge",
    "schema": "the records' schema",
}


class ChangedError(UsageError):
    """What a run depends on has changed, so that it cannot be resumed."""

    resumable = False


def make(
    run_id: str,
    problem: Problem,
    target: str,
    arguments: argparse.Namespace,
    submissions: list[Result],
    tests: list[Case],
    benchmarks: list[Case],
) -> dict:
    """The plan as JSON: what a record names, and a hash of everything that an outcome depends on."""
    with reading(problem.name):
        problem_hash = sources.problem_hash(problem.folder, problem.others)
    return {
        "run_id": run_id,
        "schema": schema.SCHEMA,
        "target": target,
        "arguments": {name: _absolute(getattr(arguments, name)) for name in OPTIONS},
        "outputs": outputs.noted(arguments),
        "submissions": {one.submission.name: one.source_hash for one in submissions},
        "tests": [_case(case) for case in tests],
        "benchmarks": [_case(case) for case in benchmarks],
        "problem_hash": problem_hash,
        "harness_hash": record.harness_hash(),
        "environment": environment.describe(),
    }


def adopt(plan: dict, arguments: argparse.Namespace, defaults: argparse.Namespace) -> None:
    """Give `arguments` the plan's options. UsageError if one was given that the run did not have, or the plan is not as
    `make` makes it.
    """
    began_with = plan.get("arguments")
    if not isinstance(began_with, dict) or not set(OPTIONS) <= set(began_with):
        raise UsageError(f"--resume: the plan of run {plan['run_id']} does not say its options; start a new run")
    for name in OPTIONS:
        given, planned = _absolute(getattr(arguments, name)), began_with[name]
        if given != getattr(defaults, name) and given != planned:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"--resume goes on with the options of that run: {option} was {planned!r}, got {given!r}")
        setattr(arguments, name, planned)


def compare(was: dict, now: dict, path: Path) -> None:
    """ChangedError, saying what changed, unless the two plans are equal but for their run ids."""
    changed = [words for key, words in _WORDS.items() if was.get(key) != now[key]]
    noted = was.get("submissions")
    before = noted if isinstance(noted, dict) else {}
    changed += [name for name in {**before, **now["submissions"]} if before.get(name) != now["submissions"].get(name)]
    if changed:
        raise ChangedError(
            f"--resume: run {was['run_id']} cannot go on, because these changed since it began: {', '.join(changed)}. "
            f"Start a new run; to forget this one, remove {path}"
        )


def _absolute(value: object) -> object:
    """A path as one that means the same from any folder; the name of a variant, and any other value, as it is."""
    return str(Path(value).resolve()) if isinstance(value, str) and value.endswith(".py") else value


def _case(case: Case) -> dict:
    return {"params": case.params, "seed": case.seed, "bytes": case.bytes, "flops": case.flops}
