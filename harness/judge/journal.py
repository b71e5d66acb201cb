"""The journal of an unfinished run: what it has found so far, on disk. --resume continues a run that was killed.

results/<machine>/<problem>.<run_id>.partial.jsonl has one JSON object a line, each synced before the next: the plan,
each test outcome, each group of timed calls (one process, one case, all submissions), decisions, and at the end the
final records. These are appended to <problem>.jsonl, and the journal is removed. The process that writes it holds a
flock.

A torn line, or one that is not as _LINES says, is ignored, and its work is done again. If a run was killed while it
appended its records, the next run completes them (`settle`). StorageError (harness/results/record.py): a journal cannot
be read or written, say because the disk is full. What was written before stays.
"""

import contextlib
import dataclasses
import fcntl
import glob
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from pydantic import AfterValidator, TypeAdapter, ValidationError

from harness.judge.outcome import Batch, Outcome
from harness.problem.folders import UsageError
from harness.results import record, schema, text

_LEFT_OUT = ": left out"  # ends a complaint about a line
_RUN_ID = re.compile(r"\d{8}T\d{6}-[0-9a-f]{8}")


@dataclass(frozen=True)
class Group:
    """The calls of one process of each submission, or of those of one part, on one benchmark case.

    outcomes: by submission name its scored calls, in order; where it failed in this group, warm-ups included, what
    failed it comes last. A submission that failed before has no submission. own: by judge's call its times in us.
    seeds: of every content, warm-ups too. state: (clocks in MHz, throttle reasons), each None where unknown. part:
    which part of the submissions these are, where not all can be alive at once. batches: by submission name.
    """

    process: int
    case: int
    outcomes: dict[str, list[Outcome]]
    own: dict[str, list[float]]
    seeds: list[str]
    state: tuple[Any, Any] = (None, None)
    part: int = 0
    batches: dict[str, list[Batch]] = field(default_factory=dict)


GroupDone = Callable[[Group], None]


@dataclass(frozen=True)
class Have:
    """The finished work of one phase."""

    tests: dict[tuple[str, int], Outcome] = field(default_factory=dict)
    groups: dict[tuple[int, int, int], Group] = field(default_factory=dict)  # by process, case, part

    def test(self, submission: str, case: int) -> Outcome | None:
        """Return the outcome of `submission` (its name) on test case number `case`."""
        return self.tests.get((submission, case))

    def group(self, process: int, case: int, part: int = 0) -> Group | None:
        return self.groups.get((process, case, part))


NOTHING = Have()


class Journal:
    """The journal of one run, held by this process until `finish` or `close`."""

    def __init__(
        self, path: Path, file: BinaryIO, lines: list[dict], complaints: Sequence[str] = (), mine: bool = False
    ) -> None:
        self.path, self._file = path, file
        self._mine = mine  # begun by this process
        self.problem, self.run_id = _split(path)
        self.lines, self.complaints = lines, list(complaints)  # about lines that are left out

    @classmethod
    def create(cls, machine: str, problem: str, plan: dict) -> "Journal":
        """Begin a journal. plan: JSON; its run_id names the file, the rest is compared when the run is resumed."""
        path = record.RESULTS / machine / f"{problem}.{plan['run_id']}{record.PARTIAL}"
        fresh = path.with_name(f"new.{path.name}")  # `settle` of another process sees no journal before it has its plan
        try:
            with record.storing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                journal = cls(path, _locked(fresh, os.O_CREAT), [], mine=True)
            journal._write({"kind": "plan", **plan})
            with record.storing(path):
                os.rename(fresh, path)
                _sync_folder(path.parent)
        except record.StorageError:
            with contextlib.suppress(OSError):
                fresh.unlink()
            raise
        return journal

    @classmethod
    def resume(cls, machine: str, problem: str, run_id: str | None = None) -> "Journal":
        """Return the journal of run `run_id`, by default of the problem's newest unfinished run that no process holds.
        The file stays as it is until `go_on`, because the run may still be refused.

        UsageError: there is none, its plan is damaged, or a process that still lives holds it.
        """
        found = unfinished(machine, problem)
        if run_id is not None:
            found = [path for path in found if _split(path)[1] == run_id]
        held, spoilt = [], []
        for path in reversed(found):
            try:
                file = _hold(path)
            except BlockingIOError:
                held.append(_split(path)[1])
                continue
            except FileNotFoundError:
                continue  # its process has just finished
            journal = cls(path, file, *_parse(file.read(), path))
            if not journal.begun:
                file.close()
                spoilt.append(_damage(journal))
                continue
            journal.complaints += spoilt
            return journal
        which = f"run {run_id}" if run_id else "unfinished run"
        if held:
            raise UsageError(f"--resume: {', '.join(held)} of {problem} is being run by another process")
        if spoilt:
            raise UsageError(f"--resume: {'; '.join(spoilt)}")
        known = ", ".join(_split(path)[1] for path in unfinished(machine, problem)) or "none"
        raise UsageError(f"--resume: no {which} of {problem} on {machine} (unfinished: {known})")

    def go_on(self, **facts: object) -> int:
        """Record that the run is resumed, with facts that count instead of the plan's. Return how often it was."""
        self._write({"kind": "resumed", **facts})
        return len(self.noted("resumed"))

    @property
    def begun(self) -> bool:
        """Return whether there is a plan; without one the other lines are of no use."""
        return bool(self.lines) and self.lines[0]["kind"] == "plan"

    @property
    def plan(self) -> dict:
        return self.lines[0]

    @property
    def resumable(self) -> bool:
        """Return whether --resume can continue the run after `close`."""
        return self.path.exists() and self._stays()

    def summary(self) -> str:
        return f"{len(self.noted('test'))} test outcomes and {len(self.noted('group'))} groups of timed calls are known"

    def have(self, phase: str = "benchmark") -> Have:
        """Return the finished work: every test, and the groups of `phase`."""
        tests = {(at["submission"], at["case"]): Outcome(**at["outcome"]) for at in self.noted("test")}
        groups = [_GROUP.validate_python(at) for at in self.noted("group") if at.get("phase") == phase]
        return Have(tests, {(group.process, group.case, group.part): group for group in groups})

    def test(self, submission: str, case: int, outcome: Outcome) -> None:
        self._write({"kind": "test", "submission": submission, "case": case, "outcome": dataclasses.asdict(outcome)})

    def group(self, phase: str = "benchmark") -> GroupDone:
        """Return the function that records a finished group of `phase`."""
        return lambda group: self._write({"kind": "group", "phase": phase, **dataclasses.asdict(group)})

    def note(self, kind: str, **facts: object) -> None:
        """Record another decision, such as the leader of a confirmation."""
        self._write({"kind": kind, **facts})

    def noted(self, kind: str) -> list[dict]:
        return [line for line in self.lines if line["kind"] == kind]

    def finish(self, records: list[dict]) -> None:
        """Append the final records to the problem's file, each exactly once even after a kill, and remove the journal.

        ValueError if one is no record; then nothing is written.
        """
        for one in records:
            record.checked(one)
        self._write({"kind": "final", "records": records})
        self._settle()

    def close(self) -> None:
        """Release the journal. It stays for --resume, unless this process began it and it has only a plan."""
        if not self._file.closed and not self._stays():
            with contextlib.suppress(OSError):  # what holds nothing but a plan does no harm
                self.path.unlink()
        self._file.close()

    def _stays(self) -> bool:
        return not self._mine or any(line["kind"] != "plan" for line in self.lines)

    def _settle(self) -> None:
        # One process writes the records of a run, in order: what is there is a prefix of what is due.
        (machine, problem), due = (self.path.parent.name, self.problem), self.noted("final")[-1]["records"]
        record.append(machine, problem, due[record.written(machine, problem, self.run_id) :])
        with record.storing(self.path):
            self.path.unlink()
            _sync_folder(self.path.parent)
        self._file.close()

    def _write(self, line: dict) -> None:
        # NaN and infinity pass: a hostile claim is kept as it came, and Python reads them back. From one line's time to
        # the next is how long each step took.
        said = json.dumps({"time": record.now(), **line})
        with record.storing(self.path):
            record.close_line(self._file)
            record.add_line(self._file, said.encode())
        self.lines.append(json.loads(said))


def unfinished(machine: str, problem: str) -> list[Path]:
    """Return the journals of `problem` on `machine`, oldest first, those that a process holds too."""
    return sorted(
        path
        for path in (record.RESULTS / machine).glob(f"{glob.escape(problem)}.*{record.PARTIAL}")
        if _split(path)[0] == problem and _RUN_ID.fullmatch(_split(path)[1])
    )


def settle(machine: str, problem: str) -> tuple[list[str], list[str]]:
    """Complete what killed runs had left to append, and remove journals that hold nothing.
    Return (run ids whose records were completed, run ids that --resume can continue), without those of living
    processes.
    """
    completed, open_ones = [], []
    for path in unfinished(machine, problem):
        try:
            file = _hold(path)
        except (BlockingIOError, FileNotFoundError):
            continue
        with file:
            data = file.read()
            journal = Journal(path, file, *_parse(data, path))
            if journal.noted("final"):
                journal._settle()
                completed.append(journal.run_id)
            elif journal.begun:
                open_ones.append(journal.run_id)
            elif not data:  # a journal has its name only once its plan is written: anything else is kept for a person
                with record.storing(path):
                    path.unlink()
    return completed, open_ones


def damaged(machine: str, problem: str) -> list[str]:
    """Return what is wrong with each journal that has no plan, and what to do about it."""
    found = []
    for path in unfinished(machine, problem):
        with contextlib.suppress(FileNotFoundError), _telling(path), path.open("rb") as file:
            journal = Journal(path, file, *_parse(file.read(), path))
            found += [] if journal.begun else [_damage(journal)]
    return found


def _damage(journal: Journal) -> str:
    """Return what is wrong with a journal that has no plan, and what to do about it."""
    where = f"{journal.path.parent.name}/{journal.path.name}"
    first = journal.complaints[0].removesuffix(_LEFT_OUT) if journal.complaints else f"{where}: no line is its plan"
    return (
        f"{first}. A run cannot go on without its plan, the first line: mend that line of "
        f"{journal.path}, or move the file away"
    )


def outputs(machine: str, problem: str, run_id: str | None = None) -> dict:
    """Return what the run that --resume goes on with, or whose records it completes, has noted last as its outputs; {}
    if there is none. It is to be read before `settle`, which removes journals.
    """
    found = []
    for path in reversed(unfinished(machine, problem)):
        if run_id not in (None, _split(path)[1]):
            continue
        try:
            with _hold(path) as file:
                lines, _ = _parse(file.read(), path)
        except (BlockingIOError, FileNotFoundError):
            continue
        if lines and lines[0]["kind"] == "plan":
            found.append(lines)
    chosen = next((lines for lines in found if lines[-1]["kind"] != "final"), found[0] if found else [])
    noted = [line["outputs"] for line in chosen if isinstance(line.get("outputs"), dict)]
    return noted[-1] if noted else {}


def attempts(machine: str, problem: str, variant: str) -> set[str]:
    """Return the unfinished runs that have timed a variant of this name: they count as attempts too."""
    found = set()
    for path in unfinished(machine, problem):
        with contextlib.suppress(FileNotFoundError):
            lines, _ = _parse(path.read_bytes(), path)
            if any(variant in line["outcomes"] for line in lines if line["kind"] == "group"):
                found.add(_split(path)[1])
    return found


def _hold(path: Path) -> BinaryIO:
    """Open and lock `path`, for reading from its start and for appending.

    BlockingIOError: another process holds it. FileNotFoundError: it is gone. StorageError: any other trouble with it.
    """
    with _telling(path):
        file = _locked(path, fcntl.LOCK_NB)
        try:
            os.stat(path)  # it may have been removed between opening and locking
            file.seek(0)
        except BaseException:
            file.close()
            raise
        return file


def _locked(path: Path, how: int) -> BinaryIO:
    """Open and lock `path`, for reading and appending. how: O_CREAT for a new file, LOCK_NB for an old one."""
    file = os.fdopen(
        os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | how & os.O_CREAT, 0o644), "ab+", buffering=0
    )
    try:
        fcntl.flock(file, fcntl.LOCK_EX | how & fcntl.LOCK_NB)
    except BaseException:
        file.close()
        raise
    return file


@contextlib.contextmanager
def _telling(path: Path) -> Iterator[None]:
    """As record.storing, but let the errors of a missing file, and of one that another process holds, pass."""
    try:
        with record.storing(path):
            yield
    except record.StorageError as error:
        if isinstance(error.__cause__, BlockingIOError | FileNotFoundError):
            raise error.__cause__ from None
        raise


def _parse(data: bytes, path: Path) -> tuple[list[dict], list[str]]:
    """Return (the usable lines, complaints about the others)."""
    lines, complaints, source = [], [], f"{path.parent.name}/{path.name}"
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            found = record.loads(line, math.inf)
            _check(found)
            lines.append(found)
        except ValueError as error:
            complaints.append(f"{source}:{number}: {text.line(error, 200)}{_LEFT_OUT}")
    return lines, record.shortened(complaints, source)


def _check(line: dict) -> None:
    """Raise ValueError unless a line of a journal is as those that read it rely on."""
    if not isinstance(kind := line.get("kind"), str):
        raise ValueError("it must have a kind")
    try:
        if kind in _LINES:
            _LINES[kind].validate_python(line)
    except ValidationError as error:
        raise ValueError(schema.said_of(error)) from None


_GROUP = TypeAdapter(Group)
# By kind the fields that are read of such a line. Lines of other kinds are kept, and no code reads them.
_FIELDS: dict[str, dict[str, Any]] = {
    "plan": {"run_id": str},
    "test": {"submission": str, "case": int, "outcome": Outcome},
    "clock": {"name": str},
    "audit": {"submissions": dict[str, dict]},
    "confirm": {"challenger": str, "leader": dict, "opponent": str | None},
    "final": {"records": list[Annotated[dict, AfterValidator(record.checked)]]},
}
_LINES: dict[str, TypeAdapter] = {"group": _GROUP} | {
    kind: TypeAdapter(dataclasses.make_dataclass(kind, fields.items())) for kind, fields in _FIELDS.items()
}


def _split(path: Path) -> tuple[str, str]:
    """Return (problem, run id) of a journal's path."""
    problem, _, run_id = path.name.removesuffix(record.PARTIAL).rpartition(".")
    return problem, run_id


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
