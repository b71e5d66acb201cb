"""How the leaderboard's commands begin and end. This file may meet Python 3.8."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from harness.results import output
from problems.common import venv


def run(name: str, action: Callable[[], int]) -> int:
    """Return the exit code of `action`, which runs with .venv's interpreter; 2 for bad use, and for files that cannot
    be read or written, which one line on standard error says.
    """
    venv.enter(name)
    from harness.problem import folders
    from harness.results import record, text

    try:
        code = action()
        output.flush()
        return code
    except (BrokenPipeError, output.ClosedError):
        output.abandon()
        return output.CLOSED_EXIT
    except (ValueError, OSError, SyntaxError, MemoryError, folders.ProblemError, record.StorageError) as error:
        output.abandon()
        message = record.said_of(error) if isinstance(error, OSError) else error
        output.complain(f"{name}: {text.line(message) or type(error).__name__}")
        return output.USAGE_EXIT


def see_option(option: str, path: Path, see: Callable[[Path], None]) -> None:
    """Raise ValueError, which names the option that gave `path`, if `see`, see_writable or see_place, refuses it."""
    try:
        see(path)
    except OSError as error:
        raise ValueError(f"{option}: cannot write {path}: {error.strerror or error}") from None
