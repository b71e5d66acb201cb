"""What commands do with their arguments, standard output and standard error. This file may meet Python 3.8."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn

USAGE_EXIT = 2


class Parser(argparse.ArgumentParser):
    """A parser that says what is wrong with its arguments on one line, and takes no shortened options: a word that it
    does not know may be meant for another program. hint: where all of them are listed.
    """

    hint = "see --help"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        with contextlib.suppress(OSError, ValueError):  # where no process reads standard error
            print(f"{self.prog}: {self._plain(message)} ({self.hint})", file=sys.stderr, flush=True)
        raise SystemExit(USAGE_EXIT)

    def _plain(self, message: str) -> str:
        """What argparse says, with the option as the subject, and what its value must be where none came."""
        found = re.match(r"argument ([^ :]+): (.*)", message, re.DOTALL)
        if not found:
            return message
        name, said = found.groups()
        option = name.split("/")[-1]
        kind = getattr(self._option_string_actions.get(option), "type", None)
        if said == "expected one argument" and isinstance(kind, Value):
            said = f"must be {kind.wanted}, got nothing"
        return f"{option} {said}" if said.startswith("must be ") else message


class Value:
    """The type of an argument. read: what makes its value of a text, or raises ValueError; wanted: what it must be, in
    words.
    """

    def __init__(self, read: Callable[[str], object], wanted: str) -> None:
        self.read, self.wanted = read, wanted

    def __call__(self, given: str) -> object:
        try:
            return self.read(given)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {self.wanted}, got {given!r}") from None


def of_option(error: ValueError, *options: str) -> ValueError:
    """Return an error about a parameter, top_k say, as one about the option that gives it, --top-k; of the first of
    `options` where it begins with none of their parameters.
    """
    said = str(error)
    for option in options:
        parameter = option.lstrip("-").replace("-", "_")
        if said.startswith(f"{parameter} "):
            return ValueError(option + said[len(parameter) :])
    return ValueError(f"{options[0]}: {said}")


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
