"""What another machine gets of this checkout to judge as here: files, arguments, and the commit that they are of.

In a folder there, root/ mirrors this machine's file system as far as files are sent, so that every path from the
checkout to another file is the same; job/ is for what a run writes besides its records.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.judge.options import Options, spelled
from harness.problem import folders, sources
from harness.problem.folders import UsageError
from harness.results import environment
from problems.common import load

ROOT = Path(__file__).resolve().parents[2]
TREE = f"root{ROOT}"  # where the checkout lies in the folder there
RUNS = "leaderboard/results/*/*/*.jsonl"  # the files of runs


@dataclass(frozen=True)
class Request:
    """arguments: of a verb there; files: those that the arguments name, also outside the checkout."""

    arguments: list[str]
    files: list[Path]


def request(args: Options, further: Iterable[str] = ()) -> Request:
    """Translate options, and arguments of a problem's own check. UsageError: a file that they name is missing."""
    files: list[Path] = []

    def sent(name: str, path: str) -> str:
        file = Path(path).resolve()
        if not file.is_file():
            raise UsageError(f"--{name} must be a Python file, found none at {path}")
        with folders.reading(file.name):
            files.extend(sources.files_of(file))
        return os.path.relpath(file, ROOT)

    values = dict(vars(args))
    if args.submission:
        values["submission"] = [sent("submission", path) for path in args.submission]
    if args.against and args.against.endswith(".py"):
        values["against"] = sent("against", args.against)
    folder = folders.place(args.problem)
    if folder.parent != load.PROBLEMS:
        files += [*folder.rglob("*"), *([] if folders.is_own(folder) else folders.find(args.problem).files.values())]
    values["problem"] = folder.name if folder.parent == load.PROBLEMS else os.path.relpath(folder, ROOT)
    values |= {name: os.path.relpath(f"/job/{name}", f"/{TREE}") for name in ("json", "events") if values[name]}
    arguments = [values.pop("problem"), *further]
    for name, value in values.items():
        if value in (True, ""):
            arguments.append(spelled(name))
        elif value != getattr(Options, name):
            several = value if isinstance(value, list) else [value]
            arguments += [f"{spelled(name)}={one}" for one in several]
    return Request(arguments, files)


def commit() -> dict[str, str]:
    """The environment that says there which commit the files are of (harness/results/environment.py)."""
    name, dirty = environment.commit()
    return {"GIT_COMMIT": name or "", "GIT_DIRTY": "" if dirty is None else str(int(dirty))}


@contextlib.contextmanager
def copied(files: Iterable[Path]) -> Iterator[Path]:
    """A temporary folder with root/: what git does not ignore, runs' files, `files`. UsageError: no git checkout."""
    listed = subprocess.run(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, capture_output=True)
    if listed.returncode:
        raise UsageError(f"{ROOT} must be a git checkout, since git says which files are sent")
    known = [ROOT / name for name in os.fsdecode(listed.stdout).split("\0")]
    with tempfile.TemporaryDirectory() as folder:
        for path in {*known, *ROOT.glob(RUNS), *files}:
            if path.is_file() and "__pycache__" not in path.parts:
                target = Path(f"{folder}/root{path}")
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)
        yield Path(folder)
