#!/usr/bin/env python3
"""Judge submissions: .venv/bin/python harness/run.py PROBLEM. See --help; docs/measuring.md says what is measured.

Wrong options are refused without torch; harness/invocation.py does the rest. harness/__main__.py has the other verbs.
"""

from __future__ import annotations  # until `venv.enter`, Python 3.8 must do

import argparse
import contextlib
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

# The repository, not harness/, is where imports start.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from harness.judge import options  # noqa: E402
from harness.judge.options import Options  # noqa: E402
from harness.results import output  # noqa: E402
from problems.common import venv  # noqa: E402
from problems.common.terminal import Parser  # noqa: E402

if TYPE_CHECKING:
    from harness.invocation import Run
    from harness.judge.events import Events

NAME = "harness/run.py"
EXAMPLES = """examples:
  harness/run.py nvfp4_gemv                        check and time the winner
  harness/run.py nvfp4_gemv --submission a.py --submission b.py
  harness/run.py nvfp4_gemv --variant cpu_avx2 --against cpu_portable"""


def form(prog: str) -> argparse.HelpFormatter:
    """Return argparse's formatter with a narrow column for the options."""
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=24)


FORM: dict[str, Any] = {
    "usage": f"{NAME} PROBLEM [options]",
    "description": "Check, time and rank kernels of a problem.",
    "epilog": EXAMPLES,
    "formatter_class": form,
    "add_help": False,
}


def parser() -> Parser:
    return options.add(Parser(NAME, **FORM))


def main(argv: list[str] | None = None) -> int:
    """Run the command. Return the exit code, of which AGENTS.md has a table."""
    args = options.of(parser().parse_args(argv))
    venv.enter(NAME)
    return guarded(NAME, args, functools.partial(judging, args))


def judging(args: Options, stdout: TextIO, events: Events) -> Run:
    """Return the run that the options ask for, not begun. UsageError: they are wrong, which is seen without torch."""
    options.see(args)
    from harness import invocation

    mode = "model" if args.device == "model" else args.mode
    if mode in ("model", "profile"):
        from harness import verbs

        return getattr(verbs, mode.title())(args, stdout, events)
    return invocation.Run(args, stdout, events)


def guarded(name: str, args: Options, begin: Callable[[TextIO, Events], Run | int]) -> int:
    """Do `begin`, or the run that it returns. Return the exit code. Usage errors are one line; a bug raises."""
    from harness.judge.events import Events
    from harness.problem.folders import ProblemError, UsageError
    from harness.results import text

    run, events = None, Events(None)

    def stopped(why: str, resumable: bool = True) -> int:
        """Say on standard error why the run ended, and how to continue it. Return the exit code."""
        kept = run.kept if run and resumable else ""
        how = f"; go on with --resume {kept}" if kept else ""
        output.complain(f"{name}: {why}{how}")
        events.write("error", reason=f"{why}{how}")
        return output.USAGE_EXIT

    code, stdout = None, sys.stdout
    to_stderr = contextlib.redirect_stdout(sys.stderr) if args.json == "-" else contextlib.nullcontext()
    try:
        with to_stderr:
            events = Events(args.events)
            begun = begin(stdout, events)
            if isinstance(begun, int):
                code = begun
            else:
                run = begun
                code = run.main()
        output.flush()
    except ProblemError as error:
        code = stopped(f"nothing was judged: {text.clean(error)}", error.resumable)
    except UsageError as error:
        code = stopped(text.line(error), error.resumable)
    except output.ClosedError:
        output.abandon()
        if run and run.kept:
            stopped("standard output was closed")
        code = output.CLOSED_EXIT
    except KeyboardInterrupt:
        stopped("interrupted")
        code = output.INTERRUPTED_EXIT
    except Exception as error:
        from harness.judge import machine

        reason = machine.said_of(error)
        if reason is None:
            raise
        output.abandon()
        code = stopped(reason)
    finally:
        events.write("end", exit_code=code)
        events.close()
    return code


if __name__ == "__main__":
    sys.exit(output.script(main))
