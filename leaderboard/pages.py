"""The boards that the records give, as text in a terminal, Markdown, CSV and pictures: what leaderboard/report.py does.

Nothing here is measured, and no date but the records' own appears: equal records give equal text. A line that is no
record is left out with a warning, and what is shown of a record is text, never markup.
"""

import argparse
import dataclasses
import difflib
import gc
import sys
from collections.abc import Iterable
from pathlib import Path

from harness.problem import sources
from harness.results import output, record, text
from leaderboard import board, model_board, tables, terminal
from leaderboard.provenance import Provenance
from problems.common import load

BOARDS = Path("leaderboard", "README.md")  # beside the README that has the leaders
MARKS = BEGIN, END = "<!-- board:begin -->", "<!-- board:end -->"
DIFF_LINES = 20  # of a stale table, shown by --check


@dataclasses.dataclass
class Shown:
    """What the records give. steps: of whole models' decode steps by title; complaints: lines left out."""

    known: Provenance
    boards: list[board.Board] = dataclasses.field(default_factory=list)
    steps: model_board.Steps = dataclasses.field(default_factory=dict)
    complaints: list[str] = dataclasses.field(default_factory=list)
    records: dict[str, list[dict]] = dataclasses.field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.boards or self.steps)


def problem_of(path: Path, folder: Path) -> str:
    """Return the problem of a file of records in a machine's folder."""
    return path.relative_to(folder).parts[0].removesuffix(".jsonl")


def read(
    results: Path, machines: list[str], problems: list[str], others: Iterable[str] = (), brief: bool = False
) -> Shown:
    """The boards of these machines. problems: the names wanted; empty means all. others: machines whose records say
    what is known of variants that these have only compiled. brief: as of board.build.

    ValueError: a problem's task.py cannot be loaded, or `results` is no folder. Lines left out are warned of.
    """
    if not results.is_dir():
        raise ValueError(f"--results: {'not a folder:' if results.exists() else 'no folder'} {results}")
    by_machine, complaints = records_of(results, machines, problems)
    elsewhere, _ = records_of(results, [machine for machine in others if machine not in by_machine], problems)
    for complaint in complaints:
        output.complain(f"warning: {text.line(complaint)}")
    known = Provenance(entry for records in (by_machine | elsewhere).values() for entry in records)
    shown = Shown(known, complaints=complaints, records=by_machine)
    every = (entry for records in by_machine.values() for entry in records if entry["kind"] in board.KINDS)
    cases = expected({(entry["problem"], entry["target"]) for entry in every})
    for machine, records in by_machine.items():
        shown.boards += board.build(records, machine, cases, known, brief)
        shown.steps |= model_board.steps(records, machine)
    return shown


def records_of(results: Path, machines: list[str], problems: list[str]) -> tuple[dict[str, list[dict]], list[str]]:
    """-> (by machine its records, complaints about lines and files that are none)."""
    by_machine: dict[str, list[dict]] = {}
    complaints = []
    gc.disable()  # there are a million objects, all of which stay: to look for garbage takes as long as to read them
    for machine in machines:
        named = [path for name in problems for path in record.files(results / machine, name)]
        files = [record.contents_of(path, results) for path in named or record.files(results / machine)]
        complaints += [complaint for file in files for complaint in file.complaints]
        records = record.records_of(files)
        wanted = [rec for rec in records if not problems or rec["problem"] in problems]
        by_machine[machine] = wanted
    gc.enable()
    return by_machine, complaints


def expected(kinds: Iterable[tuple[str, str]]) -> dict[tuple[str, str], list[dict]]:
    """The cases that a complete variant has, by (problem, target): of our problems, not of those from elsewhere.

    ValueError: a task.py fails.
    """
    return {kind: _cases(*kind) for kind in kinds if (load.PROBLEMS / kind[0] / "task.py").is_file()}


def _cases(problem: str, target: str) -> list[dict]:
    try:
        task = load.module(load.PROBLEMS / problem, "task")
        cases = vars(task).get(f"BENCHMARKS_{target.upper()}")
        return [dataclasses.asdict(case) for case in cases or task.BENCHMARKS]
    except Exception as error:
        raise ValueError(f"{problem}/task.py cannot be loaded: {error!r}") from None


def committed(machines: Path) -> list[str]:
    """The slugs in machines.txt: one a line, # begins a comment."""
    lines = (line.partition("#")[0].strip() for line in _text_of("--machines", machines).splitlines())
    return [line for line in lines if line]


def markdown(shown: Shown) -> str:
    """Boards, then the latencies of whole models."""
    parts = [tables.markdown(tables.section(item)) for item in shown.boards]
    parts += [f"Warning: {tables.escape(line)}" for line in shown.complaints]
    parts += [
        tables.markdown(model_board.section(title, records, shown.known, cases=False))
        for title, records in shown.steps.items()
    ]
    return "\n\n".join(parts) + "\n"


def _problem(words: str, results: Path) -> str:
    """Return the name that the records of a problem have. words: its name or folder. ValueError: there is none."""
    if not words.strip():
        raise ValueError(f"PROBLEM must be a name or a folder, got {words!r}")
    folder = Path(words).resolve()
    recorded = {problem_of(file, machine) for machine in results.glob("*") for file in record.files(machine)}
    if (name := sources.qualified(folder)) in recorded:  # of a folder from elsewhere
        return name
    if (load.PROBLEMS / folder.name / "task.py").is_file() or folder.name in recorded:
        return folder.name
    others = sorted(name for name in recorded if name.startswith(f"{folder.name}@"))
    hint = f": there are records of {', '.join(others)}" if others else ""
    raise ValueError(f"no problem {folder.name}: neither a folder of problems/ nor a file of records{hint}")


def report(options: argparse.Namespace) -> int:
    names, options.problems = options.problems, [_problem(words, options.results) for words in options.problems]
    folders = sorted(path.name for path in options.results.glob("*") if path.is_dir())
    if options.machine is not None and options.machine not in folders:
        there = ", ".join(folders) or "none"
        raise ValueError(f"--machine: no folder {options.machine} in {options.results} (there are: {there})")
    machines = folders if options.machine is None else [options.machine]
    if options.here:
        machines = [machine for machine in folders if machine in terminal.here()]
    whole = options.all or bool(options.machine and options.problems)
    brief = options.format == "terminal" and not (options.html or options.here or options.problems or whole)
    shown = read(options.results, machines, options.problems, folders, brief)
    if not shown and not options.here:
        of = f" of {', '.join(options.problems)}" if options.problems else ""
        where = "" if options.machine is None else f" on {options.machine}"
        out = sys.stdout if options.format == "terminal" else sys.stderr
        print(f"no records{of}{where}: run `.venv/bin/python harness/run.py PROBLEM` first", file=out)
    if options.html:
        from leaderboard.site import build  # matplotlib, jinja2 and pygments take most of a second to import

        count = build.write(shown, options.html)
        output.complain(f"wrote {count} pages in {options.html}: open {options.html / 'index.html'}")
    elif options.format == "csv":
        print(tables.csv(shown.boards), end="")
    elif options.format == "markdown" and shown:
        print(markdown(shown), end="")
    elif options.here:
        terminal.brief(shown.boards, shown.steps, shown.known, names[0])
    elif shown:
        terminal.show(shown.boards, shown.steps, shown.known, options.problems, whole, options.cases)
    return 0


def _text_of(option: str, file: Path) -> str:
    """ValueError, which names the option: it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{option}: cannot read {file}: {getattr(error, 'strerror', '') or error}") from None


def readme(options: argparse.Namespace) -> int:
    """Write, or with --check compare, the two tables. ValueError: a listed machine has no records."""
    top, machines = options.readme, committed(options.machines)
    if none := [slug for slug in machines if not record.files(options.results / slug)]:
        raise ValueError(f"{options.machines.name} lists {none[0]}, which has no records in {options.results}")
    shown = read(options.results, machines, [])
    leaders = boards = "No machine's records are committed yet.\n"
    if shown:
        first = tables.leaders(shown.boards)
        rows = [*first.rows, *model_board.leaders(shown.steps, shown.known)]
        leaders, boards = tables.grid(dataclasses.replace(first, rows=rows)), markdown(shown)
    pages = {top: leaders, top.parent / BOARDS: boards}
    names = {file: str(file.relative_to(top.parent)) for file in pages}
    old = {file: _text_of("--readme", file) for file in pages}
    new = {file: output.spliced(old[file], MARKS, table, names[file]) for file, table in pages.items()}
    for file, name in names.items():
        if old[file] == new[file]:
            print(f"{name}: the table is current")
        elif not options.check:
            output.write_whole(file, new[file])  # a README cut short by a kill would lose its text
            print(f"{name}: the table is rewritten")
        else:
            print(f"{name}: the table is stale; run `.venv/bin/python leaderboard/report.py --readme {top.name}`")
            sides = (old[file].splitlines(), new[file].splitlines(), "as it stands", "from the records")
            print("\n".join(list(difflib.unified_diff(*sides, lineterm="", n=0))[:DIFF_LINES]))
    return int(options.check and old != new)
