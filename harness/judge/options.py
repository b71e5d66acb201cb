"""The options of harness/run.py, each once: its type, its default, and what --help says of it.

harness/run.py imports this before the packages are there, so this file may meet Python 3.8.
"""
# ruff: noqa: RUF009  (`_option` and `_flag` make fields)

from __future__ import annotations

import dataclasses
from typing import Any

from harness.results.output import Value


def _option(help: str, metavar: str | None = None, default: object = None, **more: object) -> Any:
    """Return the field of an option. more: further arguments of argparse's add_argument."""
    return dataclasses.field(default=default, metadata={"help": help, "metavar": metavar, **more})


def _flag(help: str) -> Any:
    return dataclasses.field(default=False, metadata={"help": help, "action": "store_true"})


@dataclasses.dataclass
class Options:
    """What the command line gave."""

    problem: str | Any = _option("a name in problems/, or a folder (GPU MODE's too)", "PROBLEM", nargs="?")
    mode: str = _option(
        "leaderboard: test, benchmark, record; latency: a model's decode step",
        default="leaderboard",
        choices=("test", "benchmark", "leaderboard", "profile", "latency"),
    )
    variant: str | None = _option("a file of variants/ instead of the winner", "NAME")
    submission: str | None = _option("a file of your own", "FILE")
    against: str | None = _option(
        "interleaved pairs; ratio with its 95 %% interval; REV:VARIANT is the variant as it was at a commit",
        "VARIANT_OR_FILE",
    )
    processes: int | None = _option("2 to 1000 of each: more tell more", "N", type=Value(int, "2 to 1000"))
    fail_on_regression: float | None = _option(
        "with --against: exit code 8 if the 99 %% interval of a case, or of all together, is over 1 + PERCENT %%",
        "PERCENT",
        type=Value(float, "0 or more, in percent"),
    )
    all: bool = _flag("every variant that this machine can run, baselines too, in one run")
    device: str | None = _option(
        "default: cuda, the first visible GPU, where there is one; model executes a GPU variant's PTX on the CPU",
        "{cpu,cuda,cuda:N,model}",
    )
    case: str | None = _option("only cases with all these words, such as k=64 or 'tokens=4096 router=uniform'", "TEXT")
    seed: int | None = _option("seed of test cases (timed calls have secret seeds)", type=Value(int, "0 to 2^63 - 1"))
    timeout: float | None = _option(
        "seconds a call may take (default 30, the first 120)", "S", type=Value(float, "positive and finite, in seconds")
    )
    json: str | None = _option(
        "write the records of this run to FILE as well, in place of what it holds; -: to standard output, and all "
        "else to standard error",
        "FILE",
    )
    events: str | None = _option("append a JSON line to FILE for each phase, verdict and mismatch", "FILE")
    quiet: bool = _flag("print the verdicts only")
    resume: str | None = _option(
        "go on with a run that was killed, by default the newest unfinished one, with its options; --json and "
        "--events may be given again",
        "RUN_ID",
        nargs="?",
        const="",
    )
    on: str | Any = _option("judge on another machine, over ssh and rsync (docs/remote.md)", "HOST")
    shard: str | None = _option("part I of N of the cases, as 2/4: a run on each of several devices", "I/N")
    ray: str | Any = _option("a job for each problem (commas between) and variant on a Ray cluster", "ADDRESS")
    check_only: bool = _flag("the problem's own end-to-end check (check.py), then stop")
    lint: bool = _flag("check the problem itself: what must fail fails, then stop")
    sanitize: bool = _flag("run small cases under compute-sanitizer, then stop")
    new: str | Any = _option("write problems/NAME/, a new problem that works, then stop", "NAME")
    new_variant: str | Any = _option("write a new variant of PROBLEM that works, then stop", "NAME")
    list: bool = _flag("list problems, or the variants of PROBLEM")
    print_completion: str | None = _option("print a script that completes words, then stop", choices=("bash", "zsh"))


def given(options: Options) -> list[str]:
    """Return the names of the options that are not at their defaults."""
    return [name for name, value in vars(options).items() if value != getattr(Options, name)]


def spelled(name: str) -> str:
    """Return an option as the user writes it."""
    return "PROBLEM" if name == "problem" else f"--{name.replace('_', '-')}"
