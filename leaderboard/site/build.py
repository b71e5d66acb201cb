"""Write the page: a folder of HTML files without a script, that need no network, no server and no other file.

    index.html                      how fast the leader of each problem is, on each machine
    problems/PROBLEM.html           its boards, the best machine first, with charts: by variant, by case, over commits
    variants/PROBLEM/VARIANT.html   times beside the source, samples, all cases, environment, profile, files
    model.html, judge.html          the composed model; how good the judge is
    pictures/, board.csv            charts as SVG; all boards as CSV

What a submission has written is text: the templates escape all of it. Only SVG from leaderboard/plot.py and highlighted
source from pygments, which escape themselves, are put in as they are.
"""

import collections
import dataclasses
import functools
import hashlib
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from pygments.formatters.html import HtmlFormatter

from harness.results import output, text
from leaderboard import model_board, pictures, plot, provenance, quality, tables
from leaderboard.board import Board, number
from leaderboard.pages import Shown
from leaderboard.site import variant
from problems.common import load

HERE = Path(__file__).resolve().parent
THEMES = (("light", "default"), ("dark", "github-dark"))  # pygments' styles
LONGEST = 120  # characters of a slug; file systems take 255 bytes
MARK = ".page"  # a file of every folder that holds a page
HISTORY = "Over the commits. Runs are not paired: one machine differs from another of its name by some percent."


def write(shown: Shown, folder: Path) -> int:
    """Write the page into `folder`. Return the number of HTML files. OSError: they cannot be written. ValueError: the
    folder holds files that are not those of a page.
    """
    if folder.is_dir() and not (folder / MARK).is_file() and (found := sorted(folder.iterdir())):
        raise ValueError(
            f"--html must name a new or empty folder, or one with an earlier page: {folder} holds {found[0].name}"
        )
    site = Site(shown, folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()
    site.static()
    todo: list[Callable[[], None]] = [functools.partial(site.problem, *item) for item in site.problems.items()]
    todo += [functools.partial(site.variant, *names) for names in site.variants]
    todo += [site.model, site.judge, site.index]
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
        self.variants = sorted({(board.problem, one) for board in shown.boards for one in board.standing.variant})
        self.quality = quality.read()
        loader = jinja2.FileSystemLoader(HERE / "templates")
        self.environment: Any = jinja2.Environment(
            loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        self.environment.filters |= {"shell": shlex.quote, "line": text.line}
        given: dict[str, Any] = {"quality": quality, "model_board": model_board, "tables": tables, "known": shown.known}
        given |= {"problem_page": problem_page, "variant_page": variant_page, "key_of": key_of, "number": number}
        given |= {"model_key": model_key, "stale": provenance.stale, "us": text.us}
        self.environment.globals |= given
        self.profiles = variant.profiles(self.variants)

    def static(self) -> None:
        """The style sheet and the CSV of all boards."""
        parts = [(HERE / "page.css").read_text(encoding="utf-8"), *map(_highlighting, THEMES)]
        output.write_whole(self.folder / "page.css", "\n".join(parts))
        output.write_whole(self.folder / "board.csv", tables.csv(self.shown.boards))
        (self.folder / "pictures").mkdir(exist_ok=True)

    def page(self, place: str, template: str, title: str, **given: Any) -> None:
        """Render a page. place: of its file, relative to the folder."""
        file = self.folder / place
        file.parent.mkdir(parents=True, exist_ok=True)
        root = "../" * (len(Path(place).parts) - 1)
        links = [("Boards", "index.html"), *((text.line(name, 40), problem_page(name)) for name in self.problems)]
        links += [("Model", "model.html"), ("Judge", "judge.html")]
        found = self.environment.get_template(template)
        output.write_whole(file, found.render(root=root, title=title, links=links, place=place, **given))

    def picture(self, chart: plot.Chart | None, key: str, caption: str, root: str, file: bool = False) -> Any:
        """What parts.html draws; None where a chart shows no more than its numbers. file: also as a file, SVG."""
        if chart is None or not plot.is_worth_drawing(chart):
            return None
        place = f"pictures/{key}.svg" if file else ""
        svg = plot.inline(chart, pictures.said_of(chart), key, self.folder / place if file else None)
        return {"svg": Markup(svg), "caption": caption, "href": root + place if file else ""}

    # --- pages

    def index(self) -> None:
        boards = [board for boards in self.problems.values() for board in boards]
        timed, steps = [board for board in boards if tables.first_of(board)], self.shown.steps
        leaders, links = tables.leaders(timed), [f"{problem_page(one.problem)}#{key_of(one)}" for one in timed]
        for title, records in steps.items():
            rows = model_board.leaders({title: records}, self.shown.known)
            leaders = dataclasses.replace(leaders, rows=[*leaders.rows, *rows])
            links += [f"model.html#{model_key(title)}"] * len(rows)
        records = [one for found in self.shown.records.values() for one in found]
        self.page(
            "index.html",
            "index.html",
            "Leaderboard",
            leaders=leaders,
            links_to=links,
            unrun=[board for board in boards if not board.timed],
            chart=self.picture(pictures.leaders(timed), "leaders", "The leader of each problem.", "", file=True),
            records=len(records),
            runs=len({one["run_id"] for one in records}),
            complaints=[text.line(one) for one in self.shown.complaints + self.quality.complaints],
        )

    def _about(self, name: str) -> str:
        return quality.summary(load.PROBLEMS / name / "task.py").removeprefix(f"{name}: ")

    def problem(self, name: str, boards: list[Board]) -> None:
        """The page of a problem: a section for each of its boards."""
        given = {"about": self._about(name), "ours": (load.PROBLEMS / name / "task.py").is_file()}
        sections = [self._section(board) for board in boards]
        self.page(problem_page(name), "problem.html", text.line(name), sections=sections, **given)

    def _section(self, board: Board) -> dict[str, Any]:
        root, key = "../", key_of(board)
        history = pictures.history(board, self.shown.records[board.machine])
        return {
            "board": board,
            "key": key,
            "leader": tables.first_of(board),
            "by_variant": self.picture(pictures.by_variant(board), f"{key}-variant", "By variant.", root, file=True),
            "by_case": self.picture(pictures.by_case(board), f"{key}-case", "By case.", root, file=True),
            "history": self.picture(history, f"{key}-history", HISTORY, root),
        }

    def variant(self, problem: str, name: str) -> None:
        """The page of a variant: its times on each board beside its source, then all else."""
        place = variant_page(problem, name)
        folder, stem, root = (self.folder / place).parent, Path(place).stem, "../../"
        folder.mkdir(parents=True, exist_ok=True)
        boards = [one for one in self.problems[problem] if name in set(one.standing.variant)]
        found = [variant.section(board, name, self.shown.records[board.machine]) for board in boards]
        (summary, source), profiles = variant.source(problem, name), self.profiles.get((problem, name), [])
        copied = [*(file for file, *_ in source), *profiles]
        said = "Every scored time, by case and process; thinned where a case has many."
        self.page(
            place,
            "variant.html",
            text.line(name),
            problem=problem,
            sections=found,
            samples=[
                self.picture(pictures.samples(one.timed), f"{key_of(one.board)}-samples", said, root) for one in found
            ],
            downloads=variant.downloads(folder, stem, found, copied),
            digests=variant.digests(profiles),
            summary=summary,
            source=source,
        )

    def model(self) -> None:
        sections = [self._model(title, records) for title, records in self.shown.steps.items()]
        self.page("model.html", "model.html", "The composed model", sections=sections)

    def _model(self, title: str, records: list[dict]) -> dict[str, Any]:
        key, machine = model_key(title), title.partition(", on ")[2]
        every = [one for one in self.shown.records[machine] if model_board.title(one, machine) == title]
        steps, parts, history = pictures.steps(records), pictures.components(records), pictures.model_history(every)
        return {
            "title": title,
            "key": key,
            "records": records,
            "picture": self.picture(steps, f"{key}-step", "One decode step.", "", file=True),
            "parts": self.picture(parts, f"{key}-parts", "Where a step's time goes.", "", file=True),
            "history": self.picture(history, f"{key}-history", HISTORY, ""),
        }

    def judge(self) -> None:
        found, groups = self.quality, self.quality.groups()
        self.page(
            "judge.html",
            "judge.html",
            "How good the judge is",
            found=found,
            outcomes=collections.Counter(attack.outcome for attack in found.attacks),
            allowed=quality.ALLOWED,
            groups=groups,
            equal=[group for group in groups if not group.planted],
            planted=[group for group in groups if group.planted],
        )


def slug(name: str) -> str:
    """Letters, digits, dot, dash and underscore as they are, others as ~ and their number. Different for different
    names. A long one ends in a digest.
    """
    said = re.sub(r"[^A-Za-z0-9._-]", lambda found: f"~{ord(found[0]):x}~", name)
    said = f"~{said}" if said.startswith(".") else said
    return said if len(said) <= LONGEST else f"{said[:80]}~{hashlib.sha256(name.encode()).hexdigest()[:16]}"


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
