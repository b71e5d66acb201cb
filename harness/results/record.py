"""Reads the files of records, of runs and of the older flat kind. harness/results/run_file.py writes them.

A run's file is the line of the run, lines of its work, the results, and the end; docs/records.md has the form. The
results are complete records only with the first line (`joined`), and count once the run has ended. A flat file, of
schemas 2 and 3 or by --json, has a complete record on each line. Malformed lines are skipped, each with a complaint.
"""

import collections
import contextlib
import datetime
import errno
import glob
import json
import math
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.results import output, schema, text

RESULTS = Path(__file__).resolve().parents[2] / "leaderboard" / "results"
RUN_FILE = "[0-9]*T*-*.jsonl"  # the name of a run's file: its run id
LINE_BYTES = 8 * 2**20  # of a line; the longest so far has 50,000
MOST = 5  # complaints about lines of one file
Check = Callable[[dict], None]  # of a line of work
UNCHECKED: Check = lambda _: None  # noqa: E731  for readers that do not use such lines
_HELP = {errno.ENOSPC: "free some space", errno.EDQUOT: "free some of the quota", errno.EFBIG: "raise `ulimit -f`"}
_HELP |= dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "make it writable")
_HELP |= dict.fromkeys((errno.ENOTDIR, errno.EEXIST), "a folder is wanted where a file is")


class StorageError(RuntimeError):
    """The folder of results cannot be read or written. The message names the file, the reason and what to do."""


@contextlib.contextmanager
def storing(path: Path) -> Iterator[None]:
    """Within: an OSError about the file of results `path` becomes a StorageError, but one of a file that is locked."""
    try:
        yield
    except BlockingIOError:
        raise
    except OSError as error:
        raise StorageError(said_of(error, path)) from error


def said_of(error: OSError, path: object = None) -> str:
    """Return the reason of an OSError, where it happened, and what to do about it, on one line."""
    where = path or error.filename
    help_ = f" ({_HELP[error.errno]})" if error.errno in _HELP else ""
    return text.line(f"{error.strerror or error}{f': {where}' if where else ''}{help_}")


def see_writable(machine: str) -> None:
    """Raise StorageError if no record of the machine can be written now."""
    folder = RESULTS / machine
    with storing(folder):
        output.see_place(folder)


@dataclass
class Contents:
    """What a file of records holds. run: the line of the run, {} in a flat file; work: the lines of what it did, in
    order; results: complete records, of a run that has not ended too; complaints: about lines that were skipped.
    """

    path: Path
    run: dict = field(default_factory=dict)
    work: list[dict] = field(default_factory=list)
    results: list[dict] = field(default_factory=list)
    ended: bool = False
    complaints: list[str] = field(default_factory=list)

    @property
    def run_id(self) -> str:
        return self.run.get("run_id", "")

    @property
    def unfinished(self) -> bool:
        return bool(self.run) and not self.ended

    @property
    def records(self) -> list[dict]:
        return [] if self.unfinished else self.results

    def take(self, line: dict, check: Check) -> None:
        """Take in the next line. ValueError: it is malformed."""
        kind = line.get("kind")
        if kind == "run" and not (self.run or self.results):
            schema.check(line, schema.RunLine)
            self.run = line
        elif self.run and kind == "end":
            self.ended = True
        elif self.run and kind in schema.WORK:
            check(line)
            self.work.append(line)
            self.results.clear()  # of a process that was killed while it wrote them
        else:
            self.results.append(checked(joined(self.run, line) if self.run else line))


def joined(run: dict, line: dict) -> dict:
    """Return the record of a result: what it says, else what its variant or the run says; of `clock` by parts."""
    of_variant = next((sub for sub in run.get("submissions", ()) if sub.get("variant") == line.get("variant")), {})
    record = {key: run[key] for key in schema.SHARED if key in run} | of_variant | line
    if isinstance(line.get("clock"), dict):
        record["clock"] = (run.get("clock") or {}) | line["clock"]
    return record


def apart(run: dict, record: dict) -> dict:
    """Return the result of a record: what `joined` cannot take from the first line."""
    shared = joined(run, {"variant": record["variant"]})
    line = {key: record[key] for key in ("kind", "variant")}
    line |= {key: value for key, value in record.items() if shared.get(key, ...) != value}
    if isinstance(record.get("clock"), dict):
        clock = run.get("clock") or {}
        line["clock"] = {key: value for key, value in record["clock"].items() if clock.get(key, ...) != value}
    return line


def files(folder: Path, problem: str = "") -> list[Path]:
    """Return a machine's files of records, the oldest kind first, runs by their begin. problem: its name; "": all."""
    name = glob.escape(problem) or "*"
    patterns = (f"{name}/latency.jsonl", f"{name}.jsonl", f"{name}/{RUN_FILE}")
    return [path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file()]


def contents(machine: str, problem: str, results: Path | None = None, check: Check = UNCHECKED) -> list[Contents]:
    """Return what the files of a problem on a machine hold. check, StorageError: as of `contents_of`."""
    folder = (results or RESULTS) / machine
    return [contents_of(path, folder.parent, check) for path in files(folder, problem)]


def contents_of(path: Path, results: Path, check: Check = UNCHECKED) -> Contents:
    """Return what a file holds. check: of lines of work; results: where complaints begin. StorageError: unreadable."""
    with storing(path):
        data = path.read_bytes()
    return parsed(data, path, str(path.relative_to(results)), check)


def parsed(data: bytes | str, path: Path, source: str, check: Check = UNCHECKED) -> Contents:
    """What the lines hold. source: named in complaints. Unknown keys stay; a lone surrogate becomes U+FFFD."""
    content = Contents(path)
    _, content.complaints = parse_lines(data, source, lambda line: content.take(loads(line), check))
    return content


def records_of(all_contents: Iterable[Contents]) -> list[dict]:
    """Return the records of files. Parts of one run (--shard), up to a part that comes again, share a run id."""
    records: list[dict] = []
    sets: dict[str, tuple[str, set[int]]] = {}
    for content in all_contents:
        if not (shard := content.run.get("shard")) or content.unfinished:
            records += content.records
            continue
        run_id, parts = sets.get(shard["set"], ("", {shard["part"]}))
        if shard["part"] in parts:
            run_id, parts = sets[shard["set"]] = (content.run_id, set())
        parts.add(shard["part"])
        records += [record | {"run_id": run_id} for record in content.records]
    return records


def read(machine: str, problem: str, results: Path | None = None) -> list[dict]:
    """Return a problem's records on a machine, oldest first, less malformed lines. StorageError: unreadable file."""
    return records_of(contents(machine, problem, results))


def parse(data: bytes | str, source: str) -> tuple[list[dict], list[str]]:
    """Return (the records of a file, complaints). data: JSON lines; source: the file's name in complaints."""
    content = parsed(data, Path(source), source)
    return content.records, content.complaints


def parse_lines(data: bytes | str, source: str, read_line: Callable[[bytes], Any]) -> tuple[list, list[str]]:
    """Return (what `read_line` makes of each line, complaints about those where it raises ValueError)."""
    *lines, last = (data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data).split(b"\n")
    with contextlib.suppress(ValueError, RecursionError):  # else a writer was killed within it
        json.loads(last)
        lines.append(last)
    values, complaints = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            values.append(read_line(line))
        except ValueError as error:
            complaints.append(f"{source}:{number}: skipped: {text.line(error, 200)}")
    more = len(complaints) - MOST
    return values, [*complaints[:MOST], f"... and {more} more in {source}"] if more > 0 else complaints


def loads(line: bytes) -> dict:
    """The JSON object of a line. ValueError: too long, or none. NaN and infinity are left for `checked`."""
    if len(line) > LINE_BYTES:
        raise ValueError(f"{len(line)} bytes, at most {LINE_BYTES} are read")
    try:
        loaded = json.loads(line, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(loaded, dict):
        raise ValueError(f"a JSON object is wanted, got {text.line(repr(loaded), 60)}")
    return loaded


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. ValueError: a key is there twice, and readers would differ about its value."""
    members = dict(pairs)
    if len(members) < len(pairs):
        ((twice, _),) = collections.Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {text.line(repr(twice), 60)} is there twice")
    return members


def checked(record: dict) -> dict:
    """`record`, with text that can be encoded. ValueError: it is none, or has a number that JSON has not."""
    sound: Any = _sound(record)
    schema.check(sound)
    return sound


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def new_run_id() -> str:
    """Return the id of a new run. Ids sort as the runs began, to the microsecond."""
    time = datetime.datetime.now(datetime.UTC)
    return f"{time:%Y%m%dT%H%M%S}-{time.microsecond:05x}{uuid.uuid4().hex[:3]}"


def _sound(value: object, depth: int = text.DEPTH) -> object:
    """`value` with text that can be encoded. ValueError: nested too deeply, or a number that no reader can hold."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"a number must be finite, got {value}")
    if isinstance(value, int) and abs(value) >= text.INTEGERS:
        raise ValueError("an integer must be below 2**63")
    if isinstance(value, dict | list) and not depth:
        raise ValueError("nested too deeply")
    if isinstance(value, list) and all(type(item) is float for item in value) and math.isfinite(sum(value)):
        return value  # most of a record's numbers are samples, and a board reads all records
    if isinstance(value, dict):
        return {_sound(key): _sound(item, depth - 1) for key, item in value.items()}
    return [_sound(item, depth - 1) for item in value] if isinstance(value, list) else value
