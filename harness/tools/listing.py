"""What there is: problems, variants of one, and words that a shell completes."""

import argparse

from harness.problem import folders
from harness.problem.folders import UsageError
from harness.results import output, text
from problems.common import load


def run(problem: str | None) -> int:
    """Print the problems, or the variants of one. Nothing of a problem is run. Return the exit code."""
    if problem is None:
        for name in folders.problem_names():
            with folders.reading(name):
                about = load.summary(load.PROBLEMS / name / "task.py")
            output.say(f"{name:<20} {text.line(about)}")
        return 0
    folder = folders.place(problem)
    with folders.reading(problem):
        folders.is_own(folder)
    listed = list(folders.listing(folder))
    if not listed:
        output.say(text.line(f"{folder} has no variants/*.py: judge a file with --submission FILE"))
    for name, targets, summary in listed:
        output.say(text.line(f"{name:<24} {','.join(targets):<12} {summary}"))
    return 0


def completion(parsers: list[argparse.ArgumentParser], shell: str) -> int:
    """Print a script that completes the words of commands, each a parser by the name that the shell knows."""
    try:
        import shtab
    except ImportError:
        raise UsageError("completion needs the Python package shtab: run `make setup`") from None

    def fill(parser: argparse.ArgumentParser) -> None:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for below in action.choices.values():
                    fill(below)
            elif action.dest == "problem":
                action.choices = folders.problem_names()
            elif action.metavar in ("FILE", "OTHER"):
                vars(action)["complete"] = shtab.FILE

    for parser in parsers:
        fill(parser)
        output.say(shtab.complete(parser, shell))
    return 0
