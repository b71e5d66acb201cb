"""Standard output whose reader may go away, and files that are written whole or not at all.

This file may meet Python 3.8: a command imports it before problems/common/venv.py chooses the interpreter.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from problems.common import terminal

USAGE_EXIT = terminal.USAGE_EXIT  # bad use, the problem's own code, or the machine: nothing about the submission
CRASH_EXIT = 70  # a bug of ours, EX_SOFTWARE of sysexits.h
INTERRUPTED_EXIT = 130  # as shells say of a program that was stopped at the keyboard
CLOSED_EXIT = 141  # as shells say of a program that ends when the reader of its pipe does
Parser, Value = terminal.Parser, terminal.Value  # for the leaderboard, which imports little of problems/common


class ClosedError(RuntimeError):
    """The reader of standard output has gone."""


def say(text: str, file: TextIO | None = None, end: str = "\n") -> None:
    """Print lines, to standard output unless a file is named. ClosedError: its reader has gone."""
    try:
        print(text.removesuffix("\n"), file=file, flush=True, end=end)
    except BrokenPipeError:
        raise ClosedError("the reader of standard output has gone") from None


def flush() -> None:
    """Write out what standard output has buffered. ClosedError: its reader has gone. OSError: it takes no more."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise ClosedError("the reader of standard output has gone") from None


def abandon() -> None:
    """Drop what standard output cannot take, so that the end of the process does not fail of it."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        return
    with contextlib.suppress(OSError, ValueError):
        terminal.lead_nowhere(sys.stdout.fileno())


def script(main: Callable[[], int]) -> int:
    """Return the exit code of `main` as a program: also where what it printed can no longer be delivered."""
    for stream in (sys.stdout, sys.stderr):
        terminal.escape(stream)
    try:
        code = main()
    except SystemExit as stop:  # argparse: it has printed its help, or what is wrong
        code = int(stop.code or 0)
    except Exception:  # a bug, whose exit code is no verdict's
        complain(traceback.format_exc().rstrip())
        code = CRASH_EXIT
    try:
        flush()
    except (ClosedError, OSError) as error:
        abandon()
        return CLOSED_EXIT if isinstance(error, ClosedError) else code or 1
    return code


def complain(text: str) -> None:
    """Write a line to standard error, where somebody reads that."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def see_writable(path: Path) -> None:
    """Raise OSError if write_whole could not write the file `path` now."""
    path = _target(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if _special(path):
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        return
    tempfile.TemporaryFile(dir=path.parent).close()


def see_place(folder: Path) -> None:
    """Raise OSError if no file could be written into `folder` now. It may be new."""
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    tempfile.TemporaryFile(dir=folder).close()


def write_whole(path: Path, text: str) -> None:
    """Write the file `path`, a link's target, a device or pipe. OSError, which names it: it stays as it was."""
    try:
        target = _target(path)
        if _special(target):
            target.write_text(text, encoding="utf-8", newline="\n")
            return
        part = target.with_name(f"{target.name}.part")
        try:
            part.write_text(text, encoding="utf-8", newline="\n")
            os.replace(part, target)
        finally:
            with contextlib.suppress(OSError):  # as a rule it is the file now
                part.unlink()
    except OSError as error:
        error.filename = str(path)  # not of the file beside it that would have taken its place
        raise


def deliver(place: str, text: str, stdout: TextIO) -> None:
    """Write what --json asks for: as the file `place`, or to standard output for "-"."""
    say(text, stdout) if place == "-" else write_whole(Path(place), text)


def spliced(text: str, marks: tuple[str, str], inner: str, name: str) -> str:
    """Return `text`, of the file `name`, with `inner` between two marks. ValueError: it lacks one or has one twice."""
    begin, end = marks
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"{name} must hold the lines {begin} and {end} once each, in this order")
    return f"{text.partition(begin)[0]}{begin}\n\n{inner}\n{end}{text.partition(end)[2]}"


def splice(path: Path, marks: tuple[str, str], inner: str) -> None:
    """Write `inner` between the two marks of the file `path`. ValueError as in `spliced`: it stays as it was."""
    write_whole(path, spliced(path.read_text(encoding="utf-8"), marks, inner, path.name))


def _target(path: Path) -> Path:
    """The file that is meant, however many symbolic links lead to it. OSError: they lead in a circle."""
    if _special(path):  # the links of /dev/stdout lead nowhere
        return path
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return target


def _special(path: Path) -> bool:
    return path.exists() and not path.is_file()
