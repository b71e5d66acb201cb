"""Complete leaderboard/results/code.jsonl: which machine code the sources compile to that records are about.

    python leaderboard/code.py

For each source that a record names and the table lacks, it looks for the commit whose files have the recorded hash, by
default the record's own, and compiles them there with that commit's own build code. Then it compiles each variant of
this checkout whose source has changed since. Compiling needs nvcc or the CuTe DSL, and no GPU. Lines are appended only:
docs/records.md says what is in them, and leaderboard/provenance.py reads them.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a script, from anywhere

from harness.problem import scan, sources  # noqa: E402
from harness.results import environment, machine_code, output, record, schema, text  # noqa: E402
from leaderboard import provenance, report  # noqa: E402
from leaderboard.provenance import Provenance  # noqa: E402
from problems.common import build, load  # noqa: E402

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


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0, or 1 if there are sources whose machine code cannot be had."""
    parser = argparse.ArgumentParser(description="Complete the table of machine code, leaderboard/results/code.jsonl.")
    parser.add_argument("--results", type=Path, default=report.RESULTS, metavar="DIR", help="default: %(default)s")
    results = parser.parse_args(arguments).results
    machines = sorted(path.name for path in results.glob("*") if report.record_files(path))
    by_machine, complaints = report.records_of(results, machines, [])
    records = [one for found in by_machine.values() for one in found]
    lines, said = provenance.read(results)
    for complaint in complaints + said:
        output.complain(f"warning: {text.line(complaint)}")
    table = Table(results / provenance.FILE, lines)
    for source in wanted(records, table.lines):
        table.add(source)
    for source in changed(records, table.lines):
        table.add(source)
    return int(table.failed)


class Table:
    """The file of lines, and what is known by them. failed: a source was left out."""

    def __init__(self, path: Path, lines: list[dict]) -> None:
        self.path, self.lines, self.failed = path, lines, False

    def add(self, source: Source) -> None:
        """Append the line of a source. One whose machine code cannot be had is named and left out."""
        try:
            line = self._line(source)
        except UnknownSourceError as error:  # nothing can be done about it: such a row stays stale
            output.complain(f"note: {source}: {error}")
            return
        except (CodeError, OSError, ValueError, SyntaxError, subprocess.SubprocessError) as error:
            self.failed = True
            output.complain(f"{source}: {text.line(error, TAIL)}")
            return
        schema.check(line, schema.Code)
        with record.appending(self.path) as file:
            record.add_line(file, json.dumps(line).encode())
        self.lines.append(line)
        print(f"{source}: {line['code_hash'] or 'no cubin'}", flush=True)

    def _line(self, source: Source) -> dict:
        here = not source.commit
        commit = here_commit() if here else commit_of(source)
        with contextlib.ExitStack() as stack:
            root = ROOT if here else stack.enter_context(exported(commit))
            folder = root / "problems" / source.problem
            with rooted(root):
                whole, problem = scan.source_hash(root / source.file, folder), sources.problem_hash(folder)
            found = next((line for line in self.lines if _same(line, source, whole) and line["code_hash"]), None)
            code, compiler = (found["code_hash"], found["compiler"]) if found else compiled(source, root)
        return {
            "problem": source.problem, "variant": source.variant, "target": source.target,
            "recorded": source.hash or whole, "source_hash": whole, "problem_hash": problem, "code_hash": code,
            "compiler": compiler, "commit": commit,
        }  # fmt: skip


def wanted(records: Iterable[dict], lines: list[dict]) -> list[Source]:
    """The sources that records name and no line is about."""
    known = Provenance(lines)
    found: dict[Source, None] = {}
    for one in records:
        of = known.lines_of(one)
        hit = any(line["commit"].startswith(one.get("commit") or " ") or one.get("dirty") for line in of)
        if one.get("source_hash") and one.get("commit") and not hit and not one.get("code_hash") and _ours(one):
            found[_source(one, one["source_hash"], one["commit"])] = None
    return list(found)


def changed(records: Iterable[dict], lines: list[dict]) -> list[Source]:
    """The variants of this checkout that have records, all of them of other sources, and no line."""
    known = Provenance(lines, records := list(records))
    found: dict[Source, None] = {}
    for one in records:
        now = provenance.source_hash(one["problem"], one["variant"])
        has = now is None or known.has(one["problem"], one["variant"], one["target"], now)
        if one.get("source_hash") and not has and known.state(one) == provenance.STALE:
            found[_source(one, "", "")] = None
    return list(found)


def commit_of(source: Source) -> str:
    """The commit whose files have the recorded hash: the record's, or the newest that changed them. CodeError: none."""
    tried = [source.commit, *_git("log", "--format=%H", "--", f"{source.file[:-3]}*").decode().split()]
    for commit in tried:
        with exported(commit) as root:
            file, folder = root / source.file, root / "problems" / source.problem
            if file.is_file():
                with rooted(root):
                    files = scan.closure(file, folder)
                    files += sources.shared(files) if source.whole else []
                if record.source_hash(files) == source.hash:
                    return _git("rev-parse", commit).decode().strip()
    raise UnknownSourceError(f"no commit of this clone has files with the recorded hash {source.hash}")


@contextlib.contextmanager
def exported(commit: str) -> Iterator[Path]:
    """A temporary folder with the problems of a commit."""
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(_git("archive", commit, "problems"))) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder).resolve()


@contextlib.contextmanager
def rooted(root: Path) -> Iterator[None]:
    """Within: what is shared, and the problems that a composition names, are those of the tree `root`."""
    before = build.COMMON, load.PROBLEMS
    build.COMMON, load.PROBLEMS = root / "problems" / "common", root / "problems"
    try:
        yield
    finally:
        build.COMMON, load.PROBLEMS = before


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
            **os.environ, "PYTHONPATH": str(root), "KERNEL_BUILD_DIR": folder, "NVCC_APPEND_FLAGS": "--no-compress",
            "CUTE_DSL_ARCH": build.ARCH[source.target],
        }  # fmt: skip
        command = [sys.executable, "-c", COMPILE, source.problem, source.variant, source.target]
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=COMPILE_LIMIT_S)
        if done.returncode:
            raise CodeError(f"it does not compile: {done.stderr[-TAIL:]}")
        suffixes = {path.suffix for path in Path(folder).rglob("*")}
        code = machine_code.hash_of(Path(folder))
    return code, code and " and ".join([_nvcc()] * (".so" in suffixes) + [_dsl()] * (".cubin" in suffixes))


def here_commit() -> str:
    """The checkout's commit, and whether its files are changed."""
    commit, dirty = environment.commit()
    return f"{commit or 'unknown'}{' with changes' if dirty else ''}"


def _source(one: dict, source_hash: str, commit: str) -> Source:
    whole = provenance.has_whole_hash(one)
    return Source(one["problem"], one["variant"], one["target"], source_hash, commit, whole)


def _ours(one: dict) -> bool:
    return (load.PROBLEMS / one["problem"] / "task.py").is_file() and "#" not in one["variant"]


def _same(line: dict, source: Source, whole: str) -> bool:
    key = (source.problem, source.variant, source.target, whole)
    return (line["problem"], line["variant"], line["target"], line["source_hash"]) == key


def _git(*arguments: str) -> bytes:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True)
    if done.returncode:
        raise CodeError(f"git {' '.join(arguments)}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def _nvcc() -> str:
    said = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    return f"nvcc {re.search(r'V([0-9.]+)', said)[1]}"


def _dsl() -> str:
    return f"nvidia-cutlass-dsl {importlib.metadata.version('nvidia-cutlass-dsl')}"


if __name__ == "__main__":
    sys.exit(output.script(main))
