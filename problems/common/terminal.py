"""What commands do with their arguments, standard output and standard error. This file may meet Python 3.8."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import os
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

USAGE_EXIT = 2


def nearest(given: str, known: Iterable[str], listing: str = "") -> str:
    """Say of an unknown name which of `known` is nearest, and all of them where these are few, else `listing`."""
    names = {name.lstrip("-"): name for name in known}
    near = difflib.get_close_matches(given.lower().lstrip("-"), names, 1)
    every = f"one of {', '.join(names.values())}" if 0 < len(names) <= (5 if near else 9) else listing
    said = f"; did you mean {names[near[0]]}?" if near else ""
    return f"{said} ({every})" if every else said


class Parser(argparse.ArgumentParser):
    """A parser that says what is wrong with its arguments on one line, and takes no shortened options: a word that it
    does not know may be meant for another program. hint: where all of them are listed.
    """

    hint = "see --help"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        said = re.sub(r"argument (\S+/)?(\S+): (?=must be |got )", r"\2 ", message)  # the option as the subject
        with contextlib.suppress(OSError, ValueError):  # where no process reads standard error
            print(f"{self.prog}: {said} ({self.hint})", file=sys.stderr, flush=True)
        raise SystemExit(USAGE_EXIT)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, but it names the option that is nearest to an unknown one."""
        found, words = self.parse_known_args(args, namespace)
        return self.refuse(words) if words else found

    def refuse(self, words: list[str]) -> NoReturn:
        """End the command because of words that are not known."""
        option = next((word.partition("=")[0] for word in words if word.startswith("-")), "")
        said = f"unknown option {option}{nearest(option, self._option_string_actions)}"
        self.error(said if option else f"unexpected argument {words[0]}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, f"got {value!r}{nearest(str(value), map(str, action.choices))}")


class Value:
    """The type of an argument. read: makes its value of a text, or raises ValueError; wanted: what it must be."""

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
