"""Judging from Python: `from harness.api import judge`."""

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

from harness import run
from harness.judge import options
from harness.judge.events import Events
from harness.judge.options import Options
from harness.problem.folders import ProblemError, UsageError
from problems.common.terminal import nearest

__all__ = ["ProblemError", "UsageError", "judge"]

File = str | os.PathLike[str]


def judge(
    problem: File,
    submission: File | Sequence[File] | None = None,
    mode: str = "leaderboard",
    device: str | None = None,
    case: str | None = None,
    *,
    show: bool = False,
    **more: Any,
) -> list[dict]:
    """Judge as `harness/run.py` does, with the same options, and return the records (docs/records.md): a dict for each
    submission and case.

    problem: a name in problems/, or a folder. submission: a file, or several to rank; None: the winner, or what
    variant=NAME or all=True says. more: other options of the command by name, such as against, timeout (s) or seed.
    show: print what the command prints; else nothing is printed.
    UsageError: bad use. ProblemError: the problem's own code failed. Verdicts are no exceptions: see `status`. Its main
    thread judges one at a time; a device that another process uses is waited for.
    """
    if unknown := set(more) - set(options.ALL):
        raise UsageError(f"judge has no option {min(unknown)!r}{nearest(min(unknown), options.ALL)}")
    files = [submission] if isinstance(submission, str | os.PathLike) else list(submission or ())
    paths = [os.fspath(file) for file in files]
    args = Options(os.fspath(problem), submission=paths or None, mode=mode, device=device, case=case, **more)
    if mode not in options.MODES:
        raise UsageError(f"mode got {mode!r}{nearest(mode, options.MODES)}")
    args.quiet = args.quiet or not show
    with contextlib.ExitStack() as stack:
        if not show:
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        events = Events(args.events)
        stack.callback(events.close)
        asked = run.judging(args, sys.stdout, events)
        asked.main()
        return asked.records
