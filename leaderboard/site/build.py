"""Write the page: a folder of HTML files without a script, that need no network, no server and no other file.

leaderboard/README.md says what is on which. What a submission has written is text: the templates escape all of it. Only
SVG from leaderboard/plot.py and highlighted source from pygments, which escape themselves, are put in as they are.
"""

import collections
import dataclasses
import functools
import hashlib
import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup
from pygments import highlight
from pygments.formatters.html import HtmlFormatter
from pygments.lexers.c_cpp import CppLexer
from pygments.lexers.c_like import CudaLexer
from pygments.lexers.python import PythonLexer

from harness.problem import sources
from harness.results import output, ranking, text
from harness.tools import modes
from leaderboard import model_board, pictures, plot, quality, tables
from leaderboard.board import Board, rows_of
from leaderboard.pages import Shown
from leaderboard.provenance import ERRORS
from problems.common import load

HERE = Path(__file__).resolve().parent
THEMES = (("light", "default"), ("dark", "github-dark"))  # pygments' styles
LONGEST = 120  # characters of a slug; file systems take 255 bytes
MARK = ".page"  # a file of every folder that holds a page

LEXERS = {".py": PythonLexer, ".cu": CudaLexer, ".cuh": CudaLexer}  # others: C++
DIGEST = ".txt"  # of a profile, to read; the other files are for a tool
FACTS = (  # of a record: where and how it ran
    *("run_id", "time", "commit", "dirty", "environment", "clock", "clocks_mhz", "throttle", "sandbox", "audit"),
    *("source_hash", "code_hash", "problem_hash", "harness_hash"),
)


def write(shown: Shown, folder: Path) -> int:
    """Write the page into `folder`. Return the number of HTML files. OSError: they cannot be written. ValueError: the
    folder holds files that are not those of a page.
    """
    if folder.is_dir() and not (folder / MARK).is_file() and (files := sorted(folder.iterdir())):
        wanted = "a new or empty folder, or one with an earlier page"
        raise ValueError(f"--html must name {wanted}: {folder} holds {files[0].name}")
    site = Site(shown, folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()
    site.static()
    todo: list[Callable[[], None]] = [functools.partial(site.problem, *item) for item in site.problems.items()]
    todo += [functools.partial(site.variant, *names) for names in site.variants]
    todo += [functools.partial(site.page, "model.html", "The composed model"), site.judge, site.index]
    for count, page in enumerate(todo, 1):
        if sys.stderr.isatty():
            output.complain(f"\x1b[1A\rpage {count} of {len(todo)}" if count > 1 else f"page 1 of {len(todo)}")
        page()
    return len(todo)


class Site:
    """All pages of what the records show. problems: the boards of each, best first."""

    def __init__(self, shown: Shown, folder: Path) -> None:
        self.shown, self.folder = shown, folder
        self.problems: dict[str, list[Board]] = {}
        for board in sorted(tables.best_first(shown.boards), key=lambda board: board.problem):
            self.problems.setdefault(board.problem, []).append(board)
        self.variants = sorted({(board.problem, name) for board in shown.boards for name in board.standing.variant})
        self.quality = quality.read()
        loader = jinja2.FileSystemLoader(HERE / "templates")
        self.environment: Any = jinja2.Environment(
            loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        self.environment.filters |= {"shell": shlex.quote, "line": text.line}
        modules = {"model_board": model_board, "pictures": pictures, "quality": quality, "tables": tables}
        pages = {"problem_page": problem_page, "variant_page": variant_page, "model_key": model_key, "key_of": key_of}
        values: dict[str, Any] = {"shown": shown, "picture": self.picture, "us": text.us}
        self.environment.globals |= modules | pages | values
        self.profiles = _profiles(self.variants)

    def static(self) -> None:
        """The style sheet and the CSV of all boards."""
        parts = [(HERE / "page.css").read_text(encoding="utf-8"), *map(_highlighting, THEMES)]
        output.write_whole(self.folder / "page.css", "\n".join(parts))
        output.write_whole(self.folder / "board.csv", tables.csv(self.shown.boards))
        (self.folder / "pictures").mkdir(exist_ok=True)

    def page(self, template: str, title: str, place: str = "", **values: Any) -> None:
        """Render a page. place: of its file, relative to the folder; by default as the template's."""
        file = self.folder / (place or template)
        file.parent.mkdir(parents=True, exist_ok=True)
        values |= {"root": "../" * place.count("/"), "title": title, "place": place or template}
        links = [("Boards", "index.html"), *((text.line(name, 40), problem_page(name)) for name in self.problems)]
        links += [("Model", "model.html"), ("Judge", "judge.html")]
        output.write_whole(file, self.environment.get_template(template).render(links=links, **values))

    def picture(self, chart: plot.Chart | None, key: str) -> Markup:
        """A chart, which pictures/KEY.svg gets too; empty where it shows no more than its numbers."""
        if chart is None or not plot.is_worth_drawing(chart):
            return Markup()
        return Markup(plot.inline(chart, pictures.said_of(chart), key, self.folder / "pictures" / f"{key}.svg"))

    def index(self) -> None:
        timed = [boards[0] for boards in self.problems.values() if tables.first_of(boards[0])]  # where it is fastest
        leaders, links = tables.leaders(timed), [f"{problem_page(board.problem)}#{key_of(board)}" for board in timed]
        for title, records in self.shown.steps.items():
            rows = model_board.leaders({title: records}, self.shown.known)
            leaders = dataclasses.replace(leaders, rows=[*leaders.rows, *rows])
            links += [f"model.html#{model_key(title)}"] * len(rows)
        complaints = self.shown.complaints + self.quality.complaints
        self.page("index.html", "Leaderboard", leaders=leaders, links_to=links, boards=timed, complaints=complaints)

    def problem(self, name: str, boards: list[Board]) -> None:
        """The page of a problem: a section for each of its boards."""
        task = load.PROBLEMS / name / "task.py"
        about = load.summary(task).removeprefix(f"{name}: ") if task.is_file() else ""
        self.page("problem.html", text.line(name), problem_page(name), about=about, ours=task.is_file(), boards=boards)

    def variant(self, problem: str, name: str) -> None:
        """The page of a variant: its times on each board beside its source, then all else."""
        place = variant_page(problem, name)
        boards = [item for item in self.problems[problem] if name in set(item.standing.variant)]
        sections = [_section(board, name, self.shown.records[board.machine]) for board in boards]
        (summary, source), profiles = _source(problem, name), self.profiles.get((problem, name), [])
        values = {"problem": problem, "sections": sections, "summary": summary, "source": source}
        values["downloads"] = _downloads(self.folder / place, sections, [*(file for file, *_ in source), *profiles])
        self.page("variant.html", text.line(name), place, digests=_digests(profiles), **values)

    def judge(self) -> None:
        outcomes = collections.Counter(attack.outcome for attack in self.quality.attacks)
        groups = self.quality.groups()
        self.page("judge.html", "How good the judge is", found=self.quality, outcomes=outcomes, groups=groups)


def _section(board: Board, name: str, records: Iterable[dict]) -> dict[str, Any]:
    """What is shown of a variant on a board. judged: the test and benchmark records of the run that its row shows;
    timed: of these the passed benchmarks; facts: (name, text) of where and how; resources: lines about its kernels.
    """
    row = next(entry for entry in rows_of(board.standing) if entry.variant == name)
    of_variant = [record for record in records if (record["problem"], record["variant"]) == (board.problem, name)]
    run = [record for record in of_variant if record["run_id"] == row.run_id and not record.get("superseded")]
    of_target = [record for record in run if record["target"] == board.target]
    last = {(rec["kind"], ranking.case_label(rec["case"])): rec for rec in of_target if rec["kind"] in ranking.JUDGED}
    judged = sorted(last.values(), key=lambda record: record["kind"] != "benchmark")
    timed = [record for record in judged if record["kind"] == "benchmark" and record["status"] == "PASSED"]
    compiled = [record for record in of_variant if record["kind"] == "compile" and record.get("resources")]
    kernels = compiled[-1]["resources"] if compiled else []
    kernels = [kernel for kernel in kernels if (kernel.get("target") or compiled[-1]["target"]) == board.target]
    last_one = (timed or judged or run or of_variant)[-1]
    facts = [(key.replace("_", " "), _words(last_one.get(key))) for key in FACTS]
    facts.append(("secret seeds", str(sum(len(record.get("seeds") or ()) for record in timed))))
    rank = "A baseline" if row.baseline else "Not ranked" if pd.isna(row.rank) else f"Rank {row.rank}"
    view = {"board": board, "row": row, "place": rank, "judged": judged, "timed": timed, "facts": facts}
    return view | {"resources": [_words({key: item[key] for key in item if item[key] is not None}) for item in kernels]}


def _words(value: object) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{key.replace('_', ' ')}: {_words(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_words, value)) or "none"
    return "not recorded" if value in (None, "") else text.line(value, 400)


def _source(problem: str, name: str) -> tuple[str, list[tuple[Path, int, Markup]]]:
    """-> (the first line of the docstring, (file, lines, highlighted) of each of the variant's files). Those of this
    checkout; none where it has no such variant.
    """
    file = load.PROBLEMS / problem / "variants" / f"{name}.py"
    if not file.is_file():
        return "", []
    try:
        files, summary = sources.files_of(file), load.summary(file)
    except ERRORS:
        files, summary = [file], ""
    shown = []
    for path in files:
        code, lexer = path.read_text(encoding="utf-8", errors="replace"), LEXERS.get(path.suffix, CppLexer)
        shown.append((path, code.count("\n"), Markup(highlight(code, lexer(), HtmlFormatter(nowrap=True)))))
    return text.line(summary), shown


def _profiles(variants: Sequence[tuple[str, str]]) -> dict[tuple[str, str], list[Path]]:
    """By variant the files that its profiles left in leaderboard/out/profile: PROBLEM-VARIANT-CASE.SUFFIX."""
    profiles: dict[tuple[str, str], list[Path]] = {}
    files = sorted(path for path in modes.OUT.glob("*") if path.is_file())
    longest = sorted(variants, key=lambda names: -len("-".join(names)))  # "a-b" before "a", whose files begin alike
    for file in files:
        variant = next((names for names in longest if file.name.startswith(f"{'-'.join(names)}-")), None)
        if variant:
            profiles.setdefault(variant, []).append(file)
    return profiles


def _digests(files: Iterable[Path]) -> list[tuple[str, str]]:
    """(name, text) of the profiles that are to be read; others are for a tool."""
    shown = [file for file in files if file.suffix == DIGEST]
    return [(file.name, text.clean(file.read_text(encoding="utf-8", errors="replace"))) for file in shown]


def _downloads(page: Path, sections: Sequence[dict], copied: Iterable[Path]) -> list[tuple[str, str]]:
    """Write the variant's records beside its page, and copy files there. Return (name, address) of each."""
    folder, stem, written = page.parent, page.stem, []
    folder.mkdir(parents=True, exist_ok=True)
    if records := [record for section in sections for record in section["judged"]]:
        output.write_whole(folder / f"{stem}.jsonl", "".join(json.dumps(record) + "\n" for record in records))
        written.append(("records with all samples, JSON lines", f"{stem}.jsonl"))
    for file in copied:
        (folder / f"{stem}.files").mkdir(exist_ok=True)
        shutil.copyfile(file, folder / f"{stem}.files" / file.name)
        written.append((file.name, f"{stem}.files/{file.name}"))
    return written


def slug(name: str) -> str:
    """Letters, digits, ".", "-", "_" as they are, others as ~ and a number. A long name ends in a digest."""
    safe = re.sub(r"[^A-Za-z0-9._-]", lambda match: f"~{ord(match[0]):x}~", name)
    safe = f"~{safe}" if safe.startswith(".") else safe
    return safe if len(safe) <= LONGEST else f"{safe[:80]}~{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def key_of(board: Board) -> str:
    """The id of a board on a page."""
    return slug(f"{board.problem}-{board.target}-{board.machine}")


def problem_page(name: str) -> str:
    return f"problems/{slug(name)}.html"


def variant_page(problem: str, name: str) -> str:
    return f"variants/{slug(problem)}/{slug(name)}.html"


def model_key(title: str) -> str:
    return slug(title.replace(", ", "-"))


def _highlighting(theme: tuple[str, str]) -> str:
    """Rules for source in one theme, where the system's setting is this theme."""
    name, style = theme
    rules = HtmlFormatter(style=style).get_style_defs(".code").splitlines()
    return f"@media (prefers-color-scheme: {name}) {{\n" + "\n".join(r for r in rules if ".code ." in r) + "\n}"
