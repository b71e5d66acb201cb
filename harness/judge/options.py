"""The options of a run, each once: its type, its default, what --help says of it; and which of them exclude others.

harness/run.py imports this before the packages are there, so this file may meet Python 3.8.
"""
# ruff: noqa: RUF009  (`_option` and `_flag` make fields)

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Iterable
from typing import Any

from problems.common.terminal import Parser, Value

JUDGED, MEASURED, OUTPUT, CONTINUING = "what is judged", "what is measured", "output", "continuing"  # groups of --help
SHARD = re.compile(r"(\d{1,4})/(\d{1,4})")
MODES = ("test", "benchmark", "leaderboard", "profile", "latency")
TIMED = ("benchmark", "leaderboard")  # modes whose times may be compared


def _option(group: str, help: str, metavar: str | None = None, default: object = None, **more: object) -> Any:
    """Return the field of an option. more: further arguments of argparse's add_argument."""
    metadata = {"group": group, "help": help, "metavar": metavar, **more}
    return dataclasses.field(default=default, metadata=metadata)


def _flag(group: str, help: str) -> Any:
    return dataclasses.field(default=False, metadata={"group": group, "help": help, "action": "store_true"})


@dataclasses.dataclass
class Options:
    """What the command line gave."""

    problem: str | Any = _option(JUDGED, "a name in problems/, or a folder (GPU MODE's too)", "PROBLEM", nargs="?")
    variant: str | None = _option(JUDGED, "a file of variants/ instead of the winner", "NAME")
    submission: list[str] | None = _option(
        JUDGED, "a file of your own; repeat it to rank several", "FILE", action="append"
    )
    all: bool = _flag(JUDGED, "every variant that this machine can run, ranked")
    case: str | None = _option(JUDGED, "only cases with all these words, such as 'k=64 l=1'", "TEXT")
    shard: str | None = _option(JUDGED, "part I of N of the cases, for several devices", "I/N")
    mode: str = _option(
        MEASURED,
        "test, benchmark, profile, latency (a model's step), or leaderboard, the default: test, time, record",
        "MODE",
        default="leaderboard",
        choices=MODES,
    )
    device: str | None = _option(
        MEASURED, "cpu, cuda, cuda:N, or model: a GPU variant's PTX is executed on the CPU", "DEVICE"
    )
    against: str | None = _option(
        MEASURED, "interleaved pairs with a variant, a file, or REV:VARIANT, a variant at a commit", "OTHER"
    )
    fail_on_regression: float | None = _option(
        MEASURED,
        "with --against: exit code 8 if surely slower by more",
        "PERCENT",
        type=Value(float, "0 or more, in percent"),
    )
    processes: int | None = _option(
        MEASURED, "2 to 1000: more give a narrower interval", "N", type=Value(int, "2 to 1000")
    )
    seed: int | None = _option(MEASURED, "seed of the test cases", "N", type=Value(int, "0 to 2^63 - 1"))
    timeout: float | None = _option(
        MEASURED,
        "seconds a call may take (default 30, the first 120)",
        "S",
        type=Value(float, "positive and finite, in seconds"),
    )
    json: str | None = _option(OUTPUT, "write the records to FILE too; -: standard output", "FILE")
    events: str | None = _option(OUTPUT, "append a JSON line for each phase and verdict", "FILE")
    quiet: bool = _flag(OUTPUT, "print the verdicts only")
    resume: str | None = _option(
        CONTINUING,
        "continue a run that was killed, by default the newest, with its options",
        "RUN_ID",
        nargs="?",
        const="",
    )


ALL = tuple(field.name for field in dataclasses.fields(Options))


def add(parser: Parser, names: Iterable[str] = ALL) -> Parser:
    """Give a parser, made with add_help=False, the options of these names, in groups, and --help. Return it."""
    groups: dict[str, Any] = {}
    for field in dataclasses.fields(Options):
        if field.name in names:
            more = dict(field.metadata)
            title = more.pop("group")
            group = groups[title] = groups.get(title) or parser.add_argument_group(title)
            name = field.name if field.name == "problem" else spelled(field.name)
            group.add_argument(name, default=field.default, **more)
    last = groups.get(OUTPUT, parser)
    last.add_argument("-h", "--help", action="help", help="print this")
    return parser


def of(namespace: argparse.Namespace) -> Options:
    """Return the options among what a parser has read."""
    return Options(**{name: value for name, value in vars(namespace).items() if name in ALL})


def spelled(name: str) -> str:
    """Return an option as the user writes it."""
    return "PROBLEM" if name == "problem" else f"--{name.replace('_', '-')}"


def see(args: Options) -> None:
    """Raise UsageError for what is wrong whatever the problem's cases are. torch is not imported."""
    from harness.judge import limits
    from harness.judge.events import see_outputs
    from harness.problem import folders
    from harness.problem.folders import UsageError

    for name, value in vars(args).items():
        if value == "" and name != "resume":
            raise UsageError(f"{spelled(name)} must not be empty, got ''")
    if not args.problem:
        raise UsageError(f"PROBLEM is missing: one of {', '.join(folders.problem_names())}, or a folder")
    folder = folders.place(args.problem)
    if args.variant:
        folders.variant_file(folder, args.variant, "--variant")
    if args.against and not args.against.endswith(".py"):
        from harness.problem import commits

        if other := commits.split(args.against):
            commits.find(folder, *other)
        else:
            folders.variant_file(folder, args.against, "--against")
    if args.device and not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?|model", args.device):
        raise UsageError(f"--device must be cpu, cuda, cuda:N or model, got {args.device!r}")
    if args.timeout is not None and not 0 < args.timeout < math.inf:
        raise UsageError(f"--timeout must be positive and finite, in seconds, got {args.timeout}")
    if args.processes is not None and not 2 <= args.processes <= limits.MOST_PROCESSES:
        raise UsageError(f"--processes must be 2 to {limits.MOST_PROCESSES}, got {args.processes}")
    if args.fail_on_regression is not None and not 0 <= args.fail_on_regression < math.inf:
        raise UsageError(f"--fail-on-regression must be 0 or more, in percent, got {args.fail_on_regression}")
    if args.seed is not None and not 0 <= args.seed < 2**63:
        raise UsageError(f"--seed must be 0 to 2^63 - 1, got {args.seed}")
    if args.shard and not ((part := SHARD.fullmatch(args.shard)) and 1 <= int(part[1]) <= int(part[2])):
        raise UsageError(f"--shard must be I/N, a part of N parts, with I from 1 to N, got {args.shard!r}")
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
    if mode == "latency" and (args.variant or args.submission or args.all):
        raise UsageError("--mode latency times the problem's own model: leave --variant, --submission and --all out")
    if mode == "profile" and args.json:
        raise UsageError("--mode profile makes no records: leave --json out")
