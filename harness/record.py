"""The truth: one JSON object a line, appended under a lock, never rewritten."""

import contextlib
import datetime
import fcntl
import hashlib
import json
import os
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

SCHEMA = 1
PARTIAL = ".partial.jsonl"  # how the file of an unfinished run ends
RESULTS = Path(__file__).resolve().parent.parent / "leaderboard" / "results"


def path_of(machine: str, problem: str, results: Path | None = None) -> Path:
    return (results or RESULTS) / machine / f"{problem}.jsonl"


def append(machine: str, problem: str, lines: Iterable[dict], results: Path | None = None) -> Path:
    """Append records to results/<machine>/<problem>.jsonl, each synced to disk before the next. -> the file.

    A last line that a killed writer left unfinished is closed first, so that nothing is glued to it. ValueError if a
    record holds what JSON cannot (NaN, infinity).
    """
    path = path_of(machine, problem, results)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        close_line(file)
        for line in lines:
            file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    return path


def read(machine: str, problem: str, results: Path | None = None) -> list[dict]:
    """The records of a problem on a machine, oldest first; a line that a killed writer tore is left out."""
    path, lines = path_of(machine, problem, results), []
    if path.is_file():
        for text in path.read_bytes().split(b"\n"):
            with contextlib.suppress(ValueError):
                if isinstance(line := json.loads(text), dict):
                    lines.append(line)
    return lines


def close_line(file: BinaryIO) -> None:
    """End the last line of `file`, open for reading and appending, where a killed writer did not."""
    file.seek(0, os.SEEK_END)
    if file.tell():
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
            file.flush()


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def new_run_id() -> str:
    return f"{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:8]}"


def source_hash(files: Iterable[Path]) -> str:
    """Hash of a submission's closure: names and contents."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]


def harness_hash() -> str:
    """Hash of the judge and of what problems share."""
    root = Path(__file__).resolve().parent
    patterns = [root.glob("*.[pc]*"), (root.parent / "problems" / "common").glob("*.[pc]*")]
    return source_hash(path for pattern in patterns for path in pattern if path.is_file())


def finite(value: float | None) -> float | None:
    """`value`, or None where it is NaN or infinite: JSON has neither."""
    return value if value is not None and abs(value) < float("inf") else None
