"""What commands do to standard output and standard error. This file may meet Python 3.8."""

from __future__ import annotations

import io
import os


def escape(file: object) -> None:
    """Make a text file show a character that it cannot encode as its number; nothing if it is no such file."""
    if isinstance(file, io.TextIOWrapper):
        file.reconfigure(errors="backslashreplace")


def visible(text: str) -> str:
    """Return text of unknown origin for a terminal: control characters but newline and tab become their escapes."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def lead_nowhere(descriptor: int) -> None:
    """Lead what is written to an open file's descriptor to nowhere. OSError: it is not open."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
