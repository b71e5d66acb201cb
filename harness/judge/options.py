"""The options of harness/run.py. It imports this before the packages are there, so this file may meet Python 3.8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Options:
    """What the command line gave; the defaults are those of the options. Each is described by `--help`."""

    problem: str | Any = None
    mode: str = "leaderboard"
    variant: str | None = None
    submission: str | None = None
    against: str | None = None
    processes: int | None = None
    fail_on_regression: float | None = None
    all: bool = False
    device: str | None = None
    case: str | None = None
    seed: int | None = None
    timeout: float | None = None
    json: str | None = None
    events: str | None = None
    quiet: bool = False
    resume: str | None = None
    on: str | Any = None
    shard: str | None = None
    ray: str | Any = None
    check_only: bool = False
    lint: bool = False
    sanitize: bool = False
    new: str | Any = None
    new_variant: str | Any = None
    list: bool = False
    print_completion: str | None = None


def given(options: Options) -> list[str]:
    """Return the names of the options that are not at their defaults."""
    return [name for name, value in vars(options).items() if value != getattr(Options, name)]
