"""The sources of an earlier commit: their hashes, and the machine code that they compile to. No GPU is needed."""

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.problem import commits, scan, sources
from harness.results import machine_code, record
from problems.common import build, load

ROOT = Path(__file__).resolve().parents[2]
COMPILE = """
import sys
from problems.common import load
load.variant(sys.argv[1], sys.argv[2]).compile_for(sys.argv[3])
"""
COMPILE_LIMIT_S = 1200
TAIL = 1000  # characters of a compiler's output that are shown


class CodeError(RuntimeError):
    """The machine code of a source cannot be had. The message says why."""


class UnknownSourceError(CodeError):
    """No commit has the sources: a run of a checkout with changes that were never committed."""


@dataclass(frozen=True)
class Source:
    """What a record says of its source. whole: its hash covers what is shared."""

    problem: str
    variant: str
    target: str
    hash: str
    commit: str
    whole: bool

    @property
    def file(self) -> str:
        """The variant's file, from the repository's root."""
        return f"problems/{self.problem}/variants/{self.variant}.py"

    def __str__(self) -> str:
        return f"{self.problem}/{self.variant} for {self.target} at {self.commit[:12] or 'the checkout'}"


def commit_of(source: Source) -> str:
    """The commit whose files have the recorded hash: the record's, or the newest that changed them. CodeError: none."""
    tried = [source.commit, *_git("log", "--format=%H", "--", f"{source.file[:-3]}*").decode().split()]
    for commit in tried:
        with exported(commit) as root:
            file, folder = root / source.file, root / "problems" / source.problem
            if file.is_file():
                with sources.rooted(root):
                    files = scan.closure(file, folder)
                    files += sources.shared(files) if source.whole else []
                if record.source_hash(files) == source.hash:
                    return _git("rev-parse", commit).decode().strip()
    raise UnknownSourceError(f"no commit of this clone has files with the recorded hash {source.hash}")


@contextlib.contextmanager
def exported(commit: str) -> Iterator[Path]:
    """A temporary folder with the problems of a commit."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve()
        try:
            commits.export(ROOT, commit, root, "problems")
        except commits.GitError as error:
            raise CodeError(str(error)) from None
        yield root


def compiled(source: Source, root: Path) -> tuple[str | None, str | None]:
    """(hash of the machine code of a variant in the tree `root`, its compiler); None where there is no cubin.

    CodeError: it does not compile.
    """
    constants = load.constants(root / source.file, "REQUIRES")
    missing = [name for name in constants.get("REQUIRES", ()) if not importlib.util.find_spec(name)]
    if source.target not in build.ARCH or missing or "def compile_for" not in load.text(root / source.file):
        return None, None
    with tempfile.TemporaryDirectory() as folder:
        env = {
            **os.environ,
            "PYTHONPATH": str(root),
            "KERNEL_BUILD_DIR": folder,
            "NVCC_APPEND_FLAGS": "--no-compress",
            "CUTE_DSL_ARCH": build.ARCH[source.target],
        }
        command = [sys.executable, "-c", COMPILE, source.problem, source.variant, source.target]
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=COMPILE_LIMIT_S)
        if done.returncode:
            raise CodeError(f"it does not compile: {done.stderr[-TAIL:]}")
        suffixes = {path.suffix for path in Path(folder).rglob("*")}
        code = machine_code.hash_of(Path(folder))
    return code, code and " and ".join([_nvcc()] * (".so" in suffixes) + [_dsl()] * (".cubin" in suffixes))


def hashes(source: Source, root: Path) -> tuple[str, str]:
    """(source_hash, problem_hash) of a variant in the tree `root`, as they are defined today."""
    folder = root / "problems" / source.problem
    with sources.rooted(root):
        return scan.source_hash(root / source.file, folder), sources.problem_hash(folder)


def _git(*arguments: str) -> bytes:
    try:
        return commits.git(ROOT, *arguments)
    except commits.GitError as error:
        raise CodeError(str(error)) from None


def _nvcc() -> str:
    said = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    return "nvcc " + "".join(re.findall(r"V([0-9.]+)", said)[:1])


def _dsl() -> str:
    return f"nvidia-cutlass-dsl {importlib.metadata.version('nvidia-cutlass-dsl')}"
