"""Writes the file of a run, leaderboard/results/<machine>/<problem>/<run id>.jsonl, which record.py beside it reads.

Only the process of the run writes it, holding a flock, and only appends: the line of the run, each finished piece of
work, synced before the next begins, then at once the results and the end. There is no file before the first work or
result. Whatever kills the process, what was written stays, and --resume continues behind the last whole line.
StorageError (harness/results/record.py): the file cannot be read or written.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable
from pathlib import Path

from harness.results import record
from harness.results.record import Check, Contents


class RunFile:
    """The file of a run, open for writing. contents: what it holds."""

    def __init__(self, contents: Contents, descriptor: int = -1, size: int = 0) -> None:
        self.contents, self._descriptor, self._size = contents, descriptor, size  # size: bytes of whole lines

    @classmethod
    def begin(cls, run: dict) -> "RunFile":
        """Return the file of a new run, of which nothing is on disk yet. run: its first line."""
        return cls(Contents(record.RESULTS / run["machine"] / run["problem"] / f"{run['run_id']}.jsonl", run))

    @classmethod
    def reopen(cls, path: Path, check: Check) -> "RunFile":
        """Return the file of a killed run. check: as of record.contents_of. BlockingIOError: a process holds it."""
        descriptor = _open(path, os.O_RDWR, fcntl.LOCK_NB)
        with record.storing(path):
            data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        return cls(record.parsed(whole, path, str(path.relative_to(record.RESULTS)), check), descriptor, len(whole))

    @property
    def resumable(self) -> bool:
        """Return whether --resume can continue the run."""
        return self._size > 0 and not self.contents.ended

    def lines(self, kind: str) -> list[dict]:
        """Return the lines of work of one kind, oldest first."""
        return [line for line in self.contents.work if line["kind"] == kind]

    def write(self, kind: str, **facts: object) -> None:
        """Append a line of work. A number that is not finite is written as Python's json does."""
        line = json.dumps({"kind": kind, "time": record.now(), **facts})
        self._append(line)
        self.contents.work.append(json.loads(line))

    def finish(self, records: Iterable[dict], exit_code: int) -> None:
        """Append the results and the end. ValueError, and nothing is written: one of `records` is none."""
        lines = [record.apart(self.contents.run, record.checked(entry)) for entry in records]
        lines.append({"kind": "end", "time": record.now(), "exit_code": exit_code})
        self._append(*(json.dumps(line, allow_nan=False) for line in lines))
        self.contents.ended = True
        self.close()

    def close(self) -> None:
        """Release the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _append(self, *lines: str) -> None:
        """Append lines and sync them. StorageError: nothing of them stays, nor of a file that was to begin."""
        path = self.contents.path
        if not self._size:
            with record.storing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = _open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0)
            lines = (json.dumps(self.contents.run), *lines)
        data = "".join(f"{line}\n" for line in lines).encode()
        with record.storing(path):
            try:
                os.ftruncate(self._descriptor, self._size)  # of what a killed writer left of a line
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
                os.fsync(self._descriptor)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, self._size)
                if not self._size:
                    path.unlink()
                raise
        self._size += len(data)


def _open(path: Path, flags: int, wait: int) -> int:
    """Open and lock a file, for appending; return its descriptor. wait: LOCK_NB for BlockingIOError if one holds it."""
    with record.storing(path):
        descriptor = os.open(path, flags | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | wait)
        except OSError:
            os.close(descriptor)
            if flags & os.O_EXCL:
                path.unlink()
            raise
    return descriptor
