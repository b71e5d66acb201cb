"""What a run writes besides its records, --json and --events: what is refused, and what a resumed run takes over."""

import argparse
import os
import re
from pathlib import Path

from harness.problem.folders import UsageError
from harness.results import output

NAMES = ("json", "events")
# A file that only the process itself knows by this name; /dev/stdout means something in another one too.
_DESCRIPTOR = re.compile(r"/dev/fd/\d+|/proc/[^/]+/fd/\d+")


def see(json: str | None, events: str | None) -> None:
    """Raise UsageError if the run could not write its records to `json`, or if the two are one file."""
    if json and json != "-":
        try:
            output.see_writable(Path(json))
        except (OSError, ValueError) as error:
            raise UsageError(f"--json: cannot write {json}: {why(error)}") from None
        if events and Path(events).resolve() == Path(json).resolve():
            raise UsageError(f"--json and --events must be two files, got {json} for both: --json replaces its own")
    out = Path("/dev/stdout")
    if json == "-" and events and out.exists() and Path(events).exists() and out.samefile(events):
        raise UsageError(f"--json - and --events must be two files, got standard output, {events}, for both")


def why(error: OSError | ValueError) -> object:
    return error.strerror if isinstance(error, OSError) else error


def noted(arguments: argparse.Namespace) -> dict[str, str | None]:
    """Return the options as the journal keeps them, by name: paths that mean the same from any folder."""
    given = {name: getattr(arguments, name) for name in NAMES}
    paths = {name: path if path in (None, "-") else os.path.abspath(path) for name, path in given.items()}
    return {name: None if path and _DESCRIPTOR.fullmatch(path) else path for name, path in paths.items()}


def adopt(kept: dict, arguments: argparse.Namespace) -> None:
    """Give `arguments` what the resumed run has noted, where the user gives nothing else. UsageError: it cannot be
    written any more.
    """
    taken = [name for name in NAMES if getattr(arguments, name) is None and isinstance(kept.get(name), str)]
    for name in taken:
        setattr(arguments, name, kept[name])
    try:
        see(arguments.json, arguments.events)
    except UsageError as error:
        if not taken:
            raise
        options = " and ".join(f"--{name}" for name in taken)
        raise UsageError(f"--resume goes on with {options} of that run: {error}: give another file") from None
