"""The options of a run, each once: its type, its default, what --help says of it; and which of them exclude others.

harness/run.py imports this before the packages are there, so this file may meet Python 3.8.
"""
# ruff: noqa: RUF009  (`_option` and `_flag` make fields)

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

from problems.common.terminal import Parser, Value

GROUPS = {  # of --help
    "what is judged": ("problem", "variant", "submission", "all", "case", "shard"),
    "what is measured": ("mode", "device", "against", "fail_on_regression", "processes", "seed", "timeout"),
    "output": ("json", "events", "quiet"),
    "continuing": ("resume",),
}
MODES = ("test", "benchmark", "leaderboard", "profile", "latency")
MOST_PROCESSES = 1000  # of each of two that are compared
TIMED = ("benchmark", "leaderboard")  # modes whose times may be compared


def _option(help: str, metavar: str | None = None, default: object = None, **more: object) -> Any:
    """Return the field of an option. more: further arguments of argparse's add_argument."""
    return dataclasses.field(default=default, metadata={"help": help, "metavar": metavar, **more})


def _value(help: str, metavar: str, kind: type, wanted: str, holds: Callable[[Any], bool]) -> Any:
    """Return the field of an option whose value must be as `wanted` says in words, and `holds` tells."""
    return _option(help, metavar, type=Value(kind, wanted), holds=holds)


def _is_part(text: str) -> bool:
    part = re.fullmatch(r"(\d{1,4})/(\d{1,4})", text)
    return part is not None and 1 <= int(part[1]) <= int(part[2])


_MANY = f"2 to {MOST_PROCESSES}"
_MODES_SAID = "test, benchmark, profile, latency (a model's step), or leaderboard, the default: test, time, record"
_RESUMED = "continue a run that was killed, by default the newest, with its options"


@dataclasses.dataclass
class Options:
    """What the command line gave."""

    problem: str | Any = _option("a name in problems/, or a folder (GPU MODE's too)", "PROBLEM", nargs="?")
    variant: str | None = _option("a file of variants/ instead of the winner", "NAME")
    submission: list[str] | None = _option("a file of your own; repeat it to rank several", "FILE", action="append")
    all: bool = _option("every variant that this machine can run, ranked", default=False, action="store_true")
    case: str | None = _option("only cases with all these words, such as 'k=64 l=1'", "TEXT")
    shard: str | None = _value(
        "part I of N of the cases, for several devices", "I/N", str, "I/N, with I from 1 to N", _is_part
    )
    mode: str = _option(_MODES_SAID, "MODE", default="leaderboard", choices=MODES)
    device: str | None = _value(
        "cpu, cuda, cuda:N, or of a run model: a GPU variant's PTX is executed on the CPU",
        "DEVICE",
        str,
        "cpu, cuda, cuda:N or model",
        lambda name: re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?|model", name) is not None,
    )
    against: str | None = _option("interleaved pairs with a variant or a file", "OTHER")
    fail_on_regression: float | None = _value(
        "with --against: exit code 8 if surely slower by more",
        "PERCENT",
        float,
        "0 or more",
        lambda x: 0 <= x < math.inf,
    )
    processes: int | None = _value(
        f"{_MANY}: more give a narrower interval", "N", int, _MANY, lambda n: 2 <= n <= MOST_PROCESSES
    )
    seed: int | None = _value("seed of the test cases", "N", int, "0 to 2^63 - 1", lambda n: 0 <= n < 2**63)
    timeout: float | None = _value(
        "seconds a call may take (default 30, the first 120)", "S", float, "positive", lambda s: 0 < s < math.inf
    )
    json: str | None = _option("write the records to FILE too; -: standard output", "FILE")
    events: str | None = _option("append a JSON line for each phase and verdict", "FILE")
    quiet: bool = _option("print the verdicts only", default=False, action="store_true")
    resume: str | None = _option(_RESUMED, "RUN_ID", nargs="?", const="")


FIELDS = {field.name: field for field in dataclasses.fields(Options)}
ALL = tuple(FIELDS)


def add(parser: Parser, names: Iterable[str] = ALL) -> Parser:
    """Give a parser, made with add_help=False, the options of these names, in groups, and --help. Return it."""
    for title, members in GROUPS.items():
        group = parser.add_argument_group(title)  # not shown where it is empty
        for name in (name for name in members if name in names):
            more = {key: value for key, value in FIELDS[name].metadata.items() if key not in ("holds",)}
            if more.get("action") == "store_true":
                del more["metavar"]
            group.add_argument("problem" if name == "problem" else spelled(name), default=FIELDS[name].default, **more)
        if title == "output":
            group.add_argument("-h", "--help", action="help", help="print this")
    return parser


def of(namespace: argparse.Namespace) -> Options:
    """Return the options among what a parser has read."""
    return Options(**{name: value for name, value in vars(namespace).items() if name in FIELDS})


def spelled(name: str) -> str:
    """Return an option as the user writes it."""
    return "PROBLEM" if name == "problem" else f"--{name.replace('_', '-')}"


def see(args: Options) -> None:
    """Raise UsageError for what is wrong whatever the problem's cases are. torch is not imported."""
    from harness.judge.events import see_outputs
    from harness.problem import folders
    from harness.problem.folders import UsageError

    for name, field in FIELDS.items():
        value, holds = getattr(args, name), field.metadata.get("holds")
        if value == "" and name != "resume":
            raise UsageError(f"{spelled(name)} must not be empty, got ''")
        if holds and value is not None and not holds(value):
            raise UsageError(f"{spelled(name)} must be {field.metadata['type'].wanted}, got {value!r}")
    if not args.problem:
        raise UsageError(f"PROBLEM is missing: one of {', '.join(folders.problem_names())}, or a folder")
    folder = folders.place(args.problem)
    if args.variant:
        folders.variant_file(folder, args.variant, "--variant")
    if args.against and not args.against.endswith(".py"):
        folders.variant_file(folder, args.against, "--against")
    _see_together(args)
    see_outputs(args.json, args.events)


def _see_together(args: Options) -> None:
    """Raise UsageError for options that exclude each other, or say nothing in this mode."""
    from harness.problem.folders import UsageError

    mode, several = args.mode, args.all or len(args.submission or ()) > 1
    kind = "--device model" if args.device == "model" else f"--mode {mode}"
    if kind == "--device model" and mode not in ("test", "leaderboard"):
        raise UsageError(f"--device model takes no times: give it --mode test, or no --mode to record, got {mode}")
    if sum(map(bool, (args.variant, args.submission, args.all))) > 1:
        raise UsageError("give one of --variant, --submission and --all")
    if several and (args.against or mode == "profile" or args.device == "model"):
        raise UsageError(f"{'--against' if args.against else kind} takes one submission: leave --all or the others out")
    for name in ("against", "processes", "fail_on_regression"):
        if getattr(args, name) is not None and (mode not in TIMED or args.device == "model"):
            raise UsageError(f"{spelled(name)} is about times that are compared, {kind} takes none: leave one out")
    if args.fail_on_regression is not None and not args.against and args.resume is None:
        raise UsageError("--fail-on-regression goes with --against: give the variant or file to compare with")
    if args.resume is not None and (mode != "leaderboard" or args.case or args.device == "model"):
        raise UsageError("--resume continues a recorded run: leave --mode, --case and --device model out")
    if args.seed is not None and mode not in ("test", "leaderboard"):
        raise UsageError(f"--seed is of test cases, --mode {mode} has none: leave one of the two out")
    if mode == "profile" and args.json:
        raise UsageError("--mode profile makes no records: leave --json out")
