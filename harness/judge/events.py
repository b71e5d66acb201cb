"""Progress of a run, for the terminal's bar and for --events, JSON lines that an agent can follow (docs/records.md)."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from harness.problem.folders import UsageError
from harness.results import output, text

if TYPE_CHECKING:
    from harness.judge.session import Step

PHASE_S = 5.0  # seconds between two lines of one phase, besides its first and its last
MISMATCH = re.compile(r"ERROR AT \(([\d, ]*)\): (\S+) (\S+)")  # how checks report an element: got, then expected


class Events:
    """The lines of one run, appended to the file at `path` unless it is None. UsageError: it cannot be written."""

    def __init__(self, path: str | None) -> None:
        self._fd: int | None = None
        self._phase, self._n, self._written_s = "", -1, -math.inf
        self._failed: set[str] = set()  # submissions whose first mismatch was written
        if path is None:
            return
        if path == "-":
            raise UsageError("--events must be a file, to which lines are added, got '-': only --json writes there")
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        except (OSError, ValueError) as error:
            raise UsageError(f"--events: cannot write {path}: {getattr(error, 'strerror', error)}") from None

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def write(self, event: str, **fields: object) -> None:
        """Append one line. Its texts and numbers are as `text.plain` makes them."""
        if self._fd is not None:
            line = text.plain({"event": event, "time": round(time.time(), 3), **fields})
            try:
                os.write(self._fd, json.dumps(line, allow_nan=False).encode() + b"\n")
            except OSError as error:  # a full disk, or a named pipe without a reader: the run goes on
                output.complain(f"warning: --events: {error.strerror}: nothing more is written")
                self.close()

    def step(self, step: Step) -> None:
        """Write the step if it begins or ends a phase, or some seconds have passed since the last one."""
        begins, ends = step.phase != self._phase, step.n >= step.total > self._n
        if begins or ends or time.monotonic() - self._written_s >= PHASE_S:
            self._written_s = time.monotonic()
            self.write("phase", **dataclasses.asdict(step))
        self._phase, self._n = step.phase, step.n

    def failed(self, variant: str, case: dict, status: str, reason: str) -> None:
        """Write a submission's first failure. index, expected, got: of the first mismatch that the reason has."""
        if variant in self._failed:
            return
        self._failed.add(variant)
        element: dict = dict.fromkeys(("index", "expected", "got"))
        if match := MISMATCH.search(reason):
            index = [int(i) for i in match[1].split(",") if i.strip()]
            element = {"index": index, "expected": _number(match[3]), "got": _number(match[2])}
        self.write("mismatch", variant=variant, case=case, status=status, **element, reason=reason)


def see_outputs(json: str | None, events: str | None) -> None:
    """Raise UsageError if the run could not write its records to `json`, or if the two are one file."""
    if json and json != "-":
        try:
            output.see_writable(Path(json))
        except (OSError, ValueError) as error:
            raise UsageError(f"--json: cannot write {json}: {getattr(error, 'strerror', error)}") from None
        if events and Path(events).resolve() == Path(json).resolve():
            raise UsageError(f"--json and --events must be two files, got {json} for both: --json replaces its own")


def _number(figure: str) -> float | str:
    """Return a number; as text what JSON has no number for, such as "nan"."""
    try:
        value = float(figure)
    except ValueError:
        return figure
    return value if math.isfinite(value) else figure
