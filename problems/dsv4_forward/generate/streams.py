"""Prepare the standard streams of a command for what they cannot take, and for Ctrl-C while it imports.

A command calls `prepare` before it imports anything that needs packages. This file may meet Python 3.8.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys

from problems.common import terminal

INTERRUPTED_EXIT = 130  # as shells say it


class Notes(io.TextIOWrapper):
    """Standard error whose text is dropped where it cannot be written: what is said there is not the result."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError:
            self._abandon()
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:
            self._abandon()

    def _abandon(self) -> None:
        """Lead to nowhere what is buffered and what comes, so that the end of the process does not fail of it."""
        with contextlib.suppress(OSError):
            terminal.lead_nowhere(self.fileno())


def prepare() -> None:
    """Make standard output show a character that it cannot encode as its number, and standard error drop what it cannot
    take. A stream that is closed leads to nowhere. Until `catch_interrupts`, Ctrl-C ends the process at once.
    """
    terminal.escape(sys.stdout)
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr = Notes(sys.stderr.buffer, sys.stderr.encoding, sys.stderr.errors, line_buffering=True)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  as long as the process lives
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED_EXIT))


def catch_interrupts() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
