"""The files of records: one JSON object a line, appended under a lock, never rewritten.

Whoever reads the records gets whole ones only, as harness/results/schema.py says. A line that is none stays in its
file, is left out, and is named in a complaint.
"""

import collections
import contextlib
import datetime
import errno
import fcntl
import hashlib
import json
import math
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from harness.results import schema, text

PARTIAL = ".partial.jsonl"  # how the file of an unfinished run ends
RESULTS = Path(__file__).resolve().parents[2] / "leaderboard" / "results"
LINE_BYTES = 8 * 2**20  # of a record; the longest so far has 6000
MOST = 5  # complaints about lines of one file
LEFT_OUT = "left out; it stays there (append a corrected line if you need it)"
DEPTH = 12  # lists and objects within each other
INTEGERS = 2**63  # what every reader can hold
_HELP = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some of the quota",
    errno.EFBIG: "raise `ulimit -f`",
    errno.EROFS: "make it writable",
    errno.EACCES: "make it writable",
    errno.EPERM: "make it writable",
    errno.ENOTDIR: "a folder is wanted where a file is",
    errno.EEXIST: "a folder is wanted where a file is",
}


class StorageError(RuntimeError):
    """The folder of results cannot be read or written. The message names the file, the reason and what to do."""


@contextlib.contextmanager
def storing(path: Path) -> Iterator[None]:
    """Within: an OSError about the file of results `path` becomes a StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError(said_of(error, path)) from error


def said_of(error: OSError, path: object = None) -> str:
    """Return the reason of an OSError, where it happened, and what to do about it, on one line."""
    where = path or error.filename
    help_ = f" ({_HELP[error.errno]})" if error.errno in _HELP else ""
    return text.line(f"{error.strerror or error}{f': {where}' if where else ''}{help_}")


def path_of(machine: str, problem: str, results: Path | None = None) -> Path:
    return (results or RESULTS) / machine / f"{problem}.jsonl"


def see_writable(machine: str, results: Path | None = None) -> None:
    """Raise StorageError if it is clear beforehand that no record of the machine can be written."""
    folder = (results or RESULTS) / machine
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    with storing(folder):
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if os.statvfs(folder).f_flag & os.ST_RDONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def append(machine: str, problem: str, lines: Iterable[dict], results: Path | None = None) -> Path:
    """Append records to results/<machine>/<problem>.jsonl, each synced to disk before the next. -> the file.

    A last line that a killed writer left unfinished is closed first, so that nothing is glued to it. ValueError, and
    nothing is written, if one is no record (harness/results/schema.py). StorageError: it cannot be written; the records
    before it are there.
    """
    path, lines = path_of(machine, problem, results), list(lines)
    for line in lines:
        checked(line)
    with appending(path) as file:
        for line in lines:
            add_line(file, json.dumps(line, allow_nan=False).encode())
    return path


@contextlib.contextmanager
def appending(path: Path) -> Iterator[BinaryIO]:
    """The file `path`, locked, for `add_line`; made if it is missing. An OSError within becomes a StorageError."""
    with storing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab+", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            close_line(file)
            yield file


def read(machine: str, problem: str, results: Path | None = None) -> list[dict]:
    """The records of a problem on a machine, oldest first; a line that is no record is left out."""
    return reading(machine, problem, results)[0]


def reading(machine: str, problem: str, results: Path | None = None) -> tuple[list[dict], list[str]]:
    """-> (records of a problem on a machine, oldest first; complaints about lines that are none).

    StorageError: the file is there and cannot be read.
    """
    return parse(_bytes_of(path := path_of(machine, problem, results)), f"{path.parent.name}/{path.name}")


def written(machine: str, problem: str, run_id: str) -> int:
    """How many lines of the run are in the file of records, whether or not a reader would take them."""
    count = 0
    for line in _bytes_of(path_of(machine, problem)).split(b"\n"):
        with contextlib.suppress(ValueError):
            count += loads(line).get("run_id") == run_id
    return count


def parse(data: bytes | str, source: str) -> tuple[list[dict], list[str]]:
    """-> (records, complaints).  data: JSON lines; source: their file's name in complaints.

    Keys that are not known here are kept. A lone surrogate in a text becomes U+FFFD, so that all can be written.
    """
    return parse_lines(data, source, lambda line: checked(schema.adopted(loads(line))))


def parse_lines(data: bytes | str, source: str, read_line: Callable[[bytes], dict]) -> tuple[list[dict], list[str]]:
    """-> (what `read_line` makes of each line, complaints about those where it raises ValueError)."""
    lines = (data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data).split(b"\n")
    found, complaints = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(read_line(line))
        except ValueError as error:
            complaints.append(f"{source}:{number}: not a record ({text.line(error, 200)}): {LEFT_OUT}")
    return found, shortened(complaints, source)


def shortened(complaints: list[str], source: str) -> list[str]:
    """The first complaints about a file, and how many more there are."""
    more = len(complaints) - MOST
    return [*complaints[:MOST], f"... and {more} more in {source}"] if more > 0 else complaints


def what_instead(path: Path) -> str:
    """What stands where a file of records is wanted, in words; "" for a file."""
    if path.is_file():
        return ""
    if path.is_dir():
        return "a folder"
    if path.is_symlink() and not path.exists():
        return "a dangling link"
    return "a FIFO" if path.is_fifo() else "no file"


def loads(line: bytes, limit: float = LINE_BYTES) -> dict:
    """The JSON object of a line. ValueError: it has more than `limit` bytes, or is none.

    NaN and infinity pass, since Python writes them into journals; `parse` refuses them.
    """
    if len(line) > limit:
        raise ValueError(f"{len(line)} bytes, at most {limit} are read")
    try:
        found = json.loads(line.decode(), object_pairs_hook=_object)
    except UnicodeDecodeError:
        raise ValueError("broken line, not UTF-8") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"broken line, no JSON: {error}") from None
    except ValueError as error:
        raise ValueError(f"broken line, {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"a JSON object is wanted, got {text.line(repr(found), 60)}")
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. ValueError: a key is there twice, and readers would differ about its value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = collections.Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {text.line(repr(twice), 60)} is there twice")
    return found


def checked(record: dict) -> dict:
    """`record`, with text that can be encoded. ValueError: it is none, or has a number that JSON has not."""
    found: Any = _sound(record)
    schema.check(found)
    return found


def plain(value: Any, depth: int = DEPTH - 2) -> Any:
    """`value` as JSON that every reader takes: a number that is not finite is None, text is clean, an integer too large
    is text, and so is what lies too deep or is of another type.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < INTEGERS else f"about 2**{value.bit_length()}"
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict) and depth:
        return {text.line(key): plain(one, depth - 1) for key, one in value.items()}
    if isinstance(value, list | tuple) and depth:
        return [plain(one, depth - 1) for one in value]
    return text.clean(value) if isinstance(value, str) else text.line(f"({type(value).__name__})")


def add_line(file: BinaryIO, line: bytes) -> None:
    """Append `line` and a newline to `file`, open without a buffer and locked, and sync it to disk.

    OSError: nothing of the line stays, or, where not even that can be had, what stays is closed by the next writer.
    """
    data, end = memoryview(line + b"\n"), os.fstat(file.fileno()).st_size
    try:
        while data:
            data = data[os.write(file.fileno(), data) :]
        os.fsync(file.fileno())
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(file.fileno(), end)
        raise


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
    """Hash of sources: names and contents."""
    return content_hash((file.name, file.read_bytes()) for file in sorted(files))


def content_hash(contents: Iterable[tuple[str, bytes]]) -> str:
    """Hash of (name, content) in this order."""
    digest = hashlib.sha256()
    for name, content in contents:
        digest.update(os.fsencode(name) + b"\0" + hashlib.sha256(content).digest())
    return digest.hexdigest()[:16]


def harness_hash() -> str:
    """Hash of the judge, of what problems share, and of the model of a GPU, without the model's tools and tests."""
    root = Path(__file__).resolve().parents[2]
    found = [path for part in ("harness", "problems/common") for path in (root / part).rglob("*.[pc]*")]
    found += (root / "ptx_model").glob("*.[pc]*")
    return source_hash(path for path in found if path.is_file() and path.parent.name != "__pycache__")


def can_name(name: str) -> bool:
    """Whether a submission or a problem may have this name: it is shown as it is, and is part of files' names."""
    try:
        return schema.name(name) == text.line(name)
    except ValueError:
        return False


def finite(value: float | None) -> float | None:
    """`value`, or None where it is NaN or infinite: JSON has neither."""
    return value if value is not None and abs(value) < float("inf") else None


def _bytes_of(path: Path) -> bytes:
    with storing(path):
        try:
            return path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return b""


def _sound(value: object, depth: int = DEPTH) -> object:
    """`value` with text that can be encoded. ValueError: nested too deeply, or a number that no reader can hold."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"a number must be finite, got {value}")
    if isinstance(value, int) and abs(value) >= INTEGERS:
        raise ValueError("an integer must be below 2**63")
    if isinstance(value, dict | list) and not depth:
        raise ValueError("nested too deeply")
    if isinstance(value, list) and all(type(one) is float for one in value) and math.isfinite(sum(value)):
        return value  # most of a record's numbers are samples, and a board reads all records
    if isinstance(value, dict):
        return {_sound(key): _sound(one, depth - 1) for key, one in value.items()}
    return [_sound(one, depth - 1) for one in value] if isinstance(value, list) else value
