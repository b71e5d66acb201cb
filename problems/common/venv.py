"""The interpreter of a command: .venv's, which `make setup` makes, if the one that runs lacks a package.

A command calls `enter` before it imports anything outside the standard library. This file may meet Python 3.8.
"""

from __future__ import annotations

import importlib.util
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
VENV = os.path.join(ROOT, ".venv")
PYTHON = os.path.join(VENV, "bin", "python")
OLDEST = (3, 11)  # of Python
NEEDED = ("torch", "allpairspy", "rich", "yaml", "pydantic", "pandas", "matplotlib")  # nothing works without them


def enter(command: str) -> None:
    """Return if this interpreter has what is needed, else run the same command with .venv's. Where that is not
    possible, print one line that names `make setup`, and exit with code 2. command: its name in messages.
    """
    lack = lacks()
    if not lack:
        return
    here = os.path.realpath(os.path.dirname(sys.executable))
    if os.path.isfile(PYTHON) and here != os.path.realpath(os.path.dirname(PYTHON)):
        sys.stdout.flush()
        arguments = getattr(sys, "orig_argv", [sys.executable, *sys.argv])[1:]  # orig_argv came with Python 3.10
        try:
            os.execv(PYTHON, [PYTHON, *arguments])
        except OSError as error:
            lack = f"{PYTHON} cannot be started ({error.strerror})"
    print(f"{command}: run `make setup` first: {lack}", file=sys.stderr)
    sys.exit(2)


def lacks() -> str:
    """Return what this interpreter lacks, or ""."""
    here = f"{sys.executable or 'this python'} ({sys.version.split()[0]})"
    if sys.version_info < OLDEST:
        return f"{here} is older than Python {OLDEST[0]}.{OLDEST[1]}"
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    return f"{here} has no {', '.join(missing)}" if missing else ""
