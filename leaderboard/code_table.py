"""Complete leaderboard/results/code.jsonl: which machine code the sources compile to that records are about.

    .venv/bin/python leaderboard/code_table.py

For each source that a record names and the table lacks, it looks for the commit whose files have the recorded hash, by
default the record's own, and compiles them there with that commit's own build code. Then it compiles each variant of
this checkout whose source has changed since. Compiling needs nvcc or the CuTe DSL, and no GPU. Lines are appended only:
docs/records.md says what is in them, and leaderboard/provenance.py reads them.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a script, from anywhere

from problems.common import venv  # noqa: E402

if __name__ == "__main__":
    venv.enter("leaderboard/code_table.py")

from harness.results import environment, output, record, schema, text  # noqa: E402
from harness.results.screen import track  # noqa: E402
from harness.tools import history  # noqa: E402
from harness.tools.history import CodeError, Source, UnknownSourceError  # noqa: E402
from leaderboard import pages, provenance, report  # noqa: E402
from leaderboard.provenance import Provenance  # noqa: E402
from problems.common import load  # noqa: E402

TAIL = 1000  # characters of a compiler's output that are shown


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0, 1 if there are sources whose machine code cannot be had, 2 if there is no folder of results."""
    parser = output.Parser(description="Complete the table of machine code, leaderboard/results/code.jsonl.")
    told = "all machines of DIR; default: those of leaderboard/results that leaderboard/machines.txt lists"
    parser.add_argument("--results", type=Path, metavar="DIR", help=told)
    chosen = parser.parse_args(arguments).results
    results = chosen or report.RESULTS
    try:
        pages.see_folder(results)
    except ValueError as error:
        output.complain(f"code_table.py: {text.line(error)}")
        return 2
    # The table is committed: other machines' records stay local, and must not change it.
    machines = sorted(path.name for path in results.glob("*")) if chosen else pages.committed(report.MACHINES)
    by_machine, complaints = pages.records_of(results, machines, [])
    records = [one for found in by_machine.values() for one in found]
    lines, said = provenance.read(results)
    for complaint in complaints + said:
        output.complain(f"warning: {text.line(complaint)}")
    table = Table(results / provenance.FILE, lines)
    for source in track(wanted(records, table.lines), "sources of records"):
        table.add(source)
    for source in track(changed(records, table.lines), "sources of this checkout"):
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
        commit = here_commit() if here else history.commit_of(source)
        with contextlib.ExitStack() as stack:
            root = ROOT if here else stack.enter_context(history.exported(commit))
            whole, problem = history.hashes(source, root)
            found = next((line for line in self.lines if _same(line, source, whole) and line["code_hash"]), None)
            code, compiler = (found["code_hash"], found["compiler"]) if found else history.compiled(source, root)
        return {
            "problem": source.problem,
            "variant": source.variant,
            "target": source.target,
            "recorded": source.hash or whole,
            "source_hash": whole,
            "problem_hash": problem,
            "code_hash": code,
            "compiler": compiler,
            "commit": commit,
        }


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
    """The variants of this checkout that have a record of other sources, and no line."""
    known = Provenance(lines, records := list(records))
    found: dict[Source, None] = {}
    for one in records:
        now = provenance.source_hash(one["problem"], one["variant"])
        has = now is None or known.has(one["problem"], one["variant"], one["target"], now)
        if one.get("source_hash") and not has and known.state(one) == provenance.STALE:
            found[_source(one, "", "")] = None
    return list(found)


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


if __name__ == "__main__":
    sys.exit(output.script(main))
