"""`python -m harness VERB ...`, and the console command dsv4-judge: judging, and what goes with it."""

from __future__ import annotations  # until `venv.enter`, Python 3.8 must do

import argparse
import dataclasses
import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

# The repository, not the present folder, is where imports start.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from harness import run  # noqa: E402
from harness.judge import options  # noqa: E402
from harness.judge.options import ALL, Options  # noqa: E402
from harness.results import output  # noqa: E402
from problems.common import venv  # noqa: E402
from problems.common.terminal import Parser  # noqa: E402

if TYPE_CHECKING:
    from harness.invocation import Run
    from harness.judge.events import Events

NAME = "python -m harness"
RESULTS = ("problem", "device", "events", "quiet")
CLUSTER = tuple(name for name in ALL if name not in ("resume", "shard", "events"))
CHOICE = ("variant", "submission", "all", "case")
# Verb -> what it does, and the options that it has of a run.
VERBS = {
    "run": ("check, time and rank kernels; the same as harness/run.py", ALL),
    "list": ("list the problems, or the variants of one", ("problem",)),
    "new": ("write a problem, or a variant of one, that works as it is", ("problem",)),
    "wrong": ("write out the kernels that the check of a problem must refuse", ("problem",)),
    "lint": ("test the check of a problem: wrong kernels must be rejected", RESULTS),
    "sanitize": ("run the small test cases under compute-sanitizer, on a GPU", (*RESULTS, *CHOICE)),
    "invariance": ("see whether equal calls have equal bits, in any batch", (*RESULTS, *CHOICE)),
    "check": ("check a whole model end to end; further options: python -m problems.dsv4_forward.check --help", RESULTS),
    "remote": ("do on another machine what the words behind HOST do here", ()),
    "cluster": ("judge on a Ray cluster: a job for each problem and variant", CLUSTER),
    "completion": ('complete words in a shell: eval "$(dsv4-judge completion bash)"', ()),
}
THERE = ("run", "lint", "sanitize", "invariance", "check")  # verbs behind `remote HOST`


def parsers() -> tuple[Parser, dict[str, Parser]]:
    """Return the parser of the command, and those of its verbs."""
    whole = Parser(NAME, description="Judge GPU kernels. VERB --help says more of each.")
    below, by_verb = whole.add_subparsers(metavar="VERB", dest="verb", required=True), {}
    for verb, (about, names) in VERBS.items():
        more = run.FORM if verb == "run" else {**run.FORM, "usage": None, "description": about, "epilog": None}
        p = by_verb[verb] = below.add_parser(verb, help=about, **more)
        if verb == "remote":
            p.add_argument("host", metavar="HOST", help="as ssh knows it")
            about = f"[{'|'.join(THERE)}] PROBLEM ..., or --stop"
            p.add_argument("words", metavar="...", nargs=argparse.REMAINDER, help=about)
        elif verb == "cluster":
            p.add_argument("address", metavar="ADDRESS", help="auto, or local to start one; PROBLEM may be A,B")
        elif verb == "completion":
            p.add_argument("shell", metavar="SHELL", choices=("bash", "zsh"), help="bash or zsh")
        options.add(p, names)
        if verb in ("new", "wrong"):
            name, about = ("VARIANT", "cpu_*, sm90_* or sm100_*") if verb == "new" else ("NAME", "one of them")
            p.add_argument("variant", metavar=name, nargs="?", help=about)
    return whole, by_verb


def main(argv: list[str] | None = None) -> int:
    """Run the command. Return the exit code, as harness/run.py does."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["run"]:
        return run.main(words[1:])
    whole, below = parsers()
    if not words:
        listed = "\n".join(f"  {verb:11} {about}" for verb, (about, _) in VERBS.items())
        output.complain(f"usage: {NAME} VERB ...   (VERB --help says more of each)\n{listed}")
        return output.USAGE_EXIT
    parsed, further = whole.parse_known_args(words)
    verb, args, prog = parsed.verb, options.of(parsed), below[parsed.verb].prog
    if verb == "remote" and parsed.words != ["--stop"]:
        verb, *words = parsed.words if {*parsed.words[:1]} & {*THERE} else ["run", *parsed.words]
        inner, further = below[verb].parse_known_args(words)
        args = options.of(inner)
    if further and verb != "check":
        below[verb].refuse(further)
    if verb in THERE[1:]:
        args.mode = "test"
        if args.device == "model":
            below[verb].error("--device model is of harness/run.py: give cpu, cuda or cuda:N")
    venv.enter(prog)
    # Where a run on another machine writes its events is no file of this command.
    local_args = dataclasses.replace(args, events=None) if parsed.verb == "remote" else args
    return run.guarded(prog, local_args, functools.partial(_begin, parsed, verb, args, further))


def _begin(
    parsed: argparse.Namespace, verb: str, args: Options, further: list[str], stdout: TextIO, events: Events
) -> Run | int:
    """Return what `run.guarded` wants of the verb. Each imports what it needs itself. verb: that behind `remote`."""
    if parsed.verb in ("list", "completion", "new", "wrong"):
        from harness.tools import scaffold

        if parsed.verb == "list":
            return scaffold.listed(args.problem)
        if parsed.verb in ("new", "wrong"):
            return (scaffold.run if parsed.verb == "new" else scaffold.wrong_kernels)(args.problem or "", args.variant)
        whole, of_run = parsers()[0], run.parser()
        whole.prog, of_run.prog = "dsv4-judge", Path(run.NAME).name  # by which shells know a command
        return scaffold.completion([whole, of_run], parsed.shell)
    if parsed.verb == "cluster":
        from harness.tools import cluster

        return cluster.run(parsed.address, args, stdout)
    if parsed.verb == "remote":
        from harness.tools import remote

        return remote.run(parsed.host, "" if verb == "remote" else verb, args, further, stdout)
    options.see(args)
    from harness import verbs

    return getattr(verbs, parsed.verb.title())(args, stdout, events, further)


def command() -> int:
    """The console command. Return the exit code."""
    if Path(sys.argv[0]).suffix != ".py":  # its script, which .venv's interpreter may be unable to run
        sys.orig_argv = [sys.executable, __file__, *sys.argv[1:]]
    return output.script(main)


if __name__ == "__main__":
    sys.exit(command())
