"""The console of rich, as the judge and the board use it."""

from rich.console import Console

from harness.results.output import ClosedError


class Screen(Console):
    """A console that raises ClosedError when its reader has gone; rich would end the process with exit code 1."""

    def on_broken_pipe(self) -> None:
        raise ClosedError("the reader of standard output has gone")
