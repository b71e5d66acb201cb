"""The console of rich, as the board uses it."""

import os
from collections.abc import Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress

from harness.results.output import ClosedError

Item = TypeVar("Item")


class Screen(Console):
    """A console that raises ClosedError when its reader has gone; rich would end the process with exit code 1. With
    NO_COLOR in the environment it writes no escape at all, as to a file.
    """

    @property
    def is_terminal(self) -> bool:
        return super().is_terminal and not os.environ.get("NO_COLOR")

    def on_broken_pipe(self) -> None:
        raise ClosedError("the reader of standard output has gone")


def track(items: Sequence[Item], said: str) -> Iterator[Item]:
    """Yield the items. On a terminal, standard error shows a bar with their number and the time left meanwhile."""
    screen = Screen(stderr=True)
    with Progress(console=screen, transient=True, disable=not screen.is_terminal, redirect_stdout=False) as bar:
        yield from bar.track(items, description=said)
