"""Copy records that were made elsewhere into the files of records here, each exactly once.

`.venv/bin/python -m harness.results.merge FOLDER` merges FOLDER/<machine>/<problem>.jsonl. A record is the same one if
its JSON is the same. A second merge, also one at the same time, adds nothing; a line that is no record stays where it
is and is named.
"""

import collections
import contextlib
import json
import sys
from pathlib import Path

from problems.common import venv

if __name__ == "__main__":
    venv.enter("harness.results.merge")

from harness.results import output, record, schema

NAME = "harness.results.merge"
CODE = "code.jsonl"  # lies beside the machines' folders, and is no record


def merge(source: Path, results: Path | None = None) -> tuple[int, list[str]]:
    """Merge the files of records below `source`. Return (number of records that were new, complaints about lines).

    results: where to, by default leaderboard/results/. StorageError: a file cannot be read or written; the records
    before it are there, and merging again adds the others. A last line without its end is left for the next time.
    """
    added, complaints = 0, []
    for file in sorted(source.glob("*/*.jsonl")):
        if file.is_file() and not file.name.endswith(record.PARTIAL):
            with record.storing(file):
                data = file.read_bytes()
            new, said = add(file.parent.name, file.name.removesuffix(".jsonl"), data, results, str(file))
            added, complaints = added + new, complaints + said
    return added, complaints


def add(
    machine: str, problem: str, data: bytes, results: Path | None = None, source: str = "records"
) -> tuple[int, list[str]]:
    """Append those lines of `data` (JSON lines) to the records of a problem on a machine that are not there. Return as
    `merge`. source: the name of `data` in complaints. StorageError: as `merge`.
    """
    whole = data[: data.rfind(b"\n") + 1]
    lines, complaints = record.parse_lines(whole, source, _read)
    if not lines:
        return 0, complaints
    with record.appending(record.path_of(machine, problem, results)) as file:
        file.seek(0)
        there = collections.Counter(_keys(file.read()))
        new = 0
        for line in lines:
            key = _key(line)
            if there[key]:
                there[key] -= 1
            else:
                record.add_line(file, json.dumps(line, allow_nan=False).encode())
                new += 1
    return new, complaints


def _read(line: bytes) -> dict:
    """The JSON object of a line, as it is. ValueError: it is no record."""
    found = record.loads(line)
    record.checked(schema.adopted(found))
    return found


def _key(found: dict) -> str:
    return json.dumps(found, sort_keys=True)


def _keys(data: bytes) -> list[str]:
    keys = []
    for line in data.split(b"\n"):
        with contextlib.suppress(ValueError):
            keys.append(_key(record.loads(line)))
    return keys


def main(arguments: list[str]) -> int:
    """Merge the folder that is named. Return the exit code."""
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        output.complain(f"{NAME}: FOLDER must be a folder with <machine>/<problem>.jsonl, got {' '.join(arguments)!r}")
        return output.USAGE_EXIT
    try:
        added, complaints = merge(Path(arguments[0]))
    except record.StorageError as error:
        output.complain(f"{NAME}: {error}")
        return output.USAGE_EXIT
    for complaint in complaints:
        output.complain(f"warning: {complaint}")
    output.say(f"{added} new records")
    return 0


if __name__ == "__main__":
    sys.exit(output.script(lambda: main(sys.argv[1:])))
