"""Write the page: a folder of HTML files that need no network, no server and no other file.

    index.html                      the first of each board, then every board
    problems/PROBLEM.html           its boards with pictures: by variant, by case, over the commits
    variants/PROBLEM/VARIANT.html   source, cases, samples, environment, profile, downloads
    model.html, judge.html          the composed model; how good the judge is
    pictures/, board.csv            the pictures as SVG and PNG; all boards as CSV

What a submission has written is text: the templates escape all of it. Only SVG from leaderboard/plot.py and highlighted
source from pygments, which escape themselves, are put in as they are.
"""

import collections
import functools
import shlex
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from pygments.formatters.html import HtmlFormatter

from harness.results import output, ranking, stats, text
from harness.results.screen import track
from leaderboard import checks, model_board, pictures, plot, quality, tables, trend
from leaderboard.board import Board
from leaderboard.pages import Shown
from leaderboard.site import grids, variant
from problems.common import load

HERE = Path(__file__).resolve().parent
THEMES = (("light", "default"), ("dark", "github-dark"))  # pygments' styles
MOST_LINKS = 8  # problems in the bar at the top; more are reached from the first page
MARK = ".page"  # a file of every folder that holds a page
RATIOS = {"same": "time of a kernel / time of the same kernel", "planted": "time of a slowed copy / time of the kernel"}
HISTORY = "Over the commits. Runs are not paired: one machine differs from another of its name by some percent."
SPEED_UP = "The fastest so far. The first correct version is the slowest of the earliest run that has one."


@dataclass(frozen=True)
class Picture:
    """svg: both forms for the page; caption: below it; files: (name, address) of its downloads."""

    svg: Markup
    caption: str
    files: list[tuple[str, str]] = field(default_factory=list)


def write(shown: Shown, results: Path, folder: Path) -> int:
    """Write the page into `folder`. Return the number of HTML files. OSError: they cannot be written. ValueError: the
    folder holds files that are not those of a page.
    """
    _see_free(folder)
    site = Site(shown, results, folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()
    site.static()
    todo: list[Callable[[], None]] = [functools.partial(site.problem, name) for name in site.problems()]
    todo += [functools.partial(site.variant, *names) for names in site.variants()]
    todo += [site.model, site.judge, site.index]
    for page in track(todo, "pages"):
        page()
    return len(todo)


def _see_free(folder: Path) -> None:
    """Raise ValueError for a folder whose files a page would replace."""
    if folder.is_dir() and not (folder / MARK).is_file() and (found := sorted(folder.iterdir())):
        raise ValueError(
            f"--html must name a new or empty folder, or one with an earlier page: {folder} holds {found[0].name}"
        )


class Site:
    """All pages of what the records show."""

    def __init__(self, shown: Shown, results: Path, folder: Path) -> None:
        self.shown, self.folder = shown, folder
        self.quality = quality.read(results, shown.records, shown.boards)
        self.checks, said = checks.read()
        self.quality.complaints += said
        loader = jinja2.FileSystemLoader(HERE / "templates")
        self.environment: Any = jinja2.Environment(
            loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        self.environment.filters |= {"shell": shlex.quote, "line": text.line, "value": grids.value, "slug": grids.slug}
        given: dict[str, Any] = {"grids": grids, "model_board": model_board, "quality": quality, "tables": tables}
        given |= {"problem_page": problem_page, "variant_page": variant_page, "key_of": grids.key_of}
        self.environment.globals |= given | {"known": shown.known}
        self.rows = tables.frame(shown.boards)
        self.profiles = variant.profiles(self.variants())

    def problems(self) -> list[str]:
        return sorted({board.problem for board in self.shown.boards})

    def variants(self) -> list[tuple[str, str]]:
        found = {(board.problem, one) for board in self.shown.boards for one in board.standing.variant}
        return sorted(found)

    # --- files

    def static(self) -> None:
        """The style sheet, the script and the CSV of all boards."""
        parts = [(HERE / "page.css").read_text(encoding="utf-8"), *map(_highlighting, THEMES)]
        output.write_whole(self.folder / "page.css", "\n".join(parts))
        shutil.copyfile(HERE / "page.js", self.folder / "page.js")
        output.write_whole(self.folder / "board.csv", tables.as_csv(self.rows))
        (self.folder / "pictures").mkdir(exist_ok=True)

    def page(self, place: str, template: str, title: str, **given: Any) -> None:
        """Render a page. place: of its file, relative to the folder."""
        file = self.folder / place
        file.parent.mkdir(parents=True, exist_ok=True)
        root = "../" * (len(Path(place).parts) - 1)
        links = [("Boards", "index.html")]
        if len(self.problems()) <= MOST_LINKS:
            links += [(name, problem_page(name)) for name in self.problems()]
        links += [("Model", "model.html"), ("Judge", "judge.html")]
        found = self.environment.get_template(template)
        output.write_whole(file, found.render(root=root, title=title, links=links, place=place, **given))

    def picture(self, shown: plot.Plot | None, key: str, caption: str, root: str, files: bool = False) -> Any:
        """A picture for a page; None where there is nothing to draw. files: also write it as SVG and PNG."""
        if shown is None:
            return None
        written = plot.write(shown, self.folder / "pictures", key) if files else []
        links = [(file.suffix[1:].upper(), f"{root}pictures/{file.name}") for file in written]
        return Picture(Markup(plot.inline(shown, pictures.said_of(shown), key)), caption, links)

    # --- pages

    def index(self) -> None:
        machines: dict[str, list[Board]] = {}
        for board in self.shown.boards:
            machines.setdefault(board.machine, []).append(board)
        records = [one for found in self.shown.records.values() for one in found]
        runs = {"records": len(records), "runs": len({one["run_id"] for one in records})}
        complaints = [text.line(one) for one in self.shown.complaints + self.quality.complaints]
        given = {"boards": self.shown.boards, "machines": machines, "runs": runs, "complaints": complaints}
        self.page("index.html", "index.html", "Leaderboard", **given)

    def problem(self, name: str) -> None:
        """The page of a problem: a section for each of its boards."""
        sections = [self._section(board) for board in self.shown.boards if board.problem == name]
        about = quality.summary(load.PROBLEMS / name / "task.py")
        self.page(problem_page(name), "problem.html", text.line(name), sections=sections, about=about)

    def _section(self, board: Board) -> dict[str, Any]:
        root, key, points = "../", grids.key_of(board), trend.timings(board, self.shown.records[board.machine])
        shared = ranking.apart(board.cases)[1] if board.cases else ""
        drawn, total = pictures.by_variant(board), int(board.standing.geomean_us.notna().sum())
        left = f"; the first {len(drawn.lines)} of {total} variants" if drawn and len(drawn.lines) < total else ""
        series, timed = pictures.series(board), len(pictures.timed(board))
        more = f"; {len(series)} of the {timed} variants of the run, the table below has all"
        by_case = f"By case{more if timed > len(series) else ''}{f'; all cases have {shared}' if shared else ''}."
        output.write_whole(self.folder / "pictures" / f"{key}.csv", tables.csv([board]))
        return {
            "board": board,
            "key": key,
            "shared": shared,
            "broken": trend.records_broken(points),
            "by_variant": self.picture(drawn, f"{key}-variant", f"By variant{left}.", root, files=True),
            "by_case": self.picture(pictures.by_case(board), f"{key}-case", by_case, root, files=True),
            "history": self.picture(pictures.history(board, points), f"{key}-history", HISTORY, root),
            "speed_up": self.picture(pictures.speed_up(points), f"{key}-speed", SPEED_UP, root),
        }

    def variant(self, problem: str, name: str) -> None:
        """The page of a variant: what it is, then a section for each of its boards."""
        place = variant_page(problem, name)
        folder, stem, root = (self.folder / place).parent, Path(place).stem, "../../"
        folder.mkdir(parents=True, exist_ok=True)
        boards = [one for one in self.shown.boards if one.problem == problem and name in set(one.standing.variant)]
        found = [variant.section(board, name, self.shown.records[board.machine]) for board in boards]
        rows = self.rows[(self.rows.problem == problem) & (self.rows.variant == name)]
        self.page(
            place,
            "variant.html",
            text.line(name),
            problem=problem,
            sections=found,
            samples=[
                self.picture(
                    pictures.samples(one.timed), f"{grids.key_of(one.board)}-samples", _thinned(one.timed), root
                )
                for one in found
            ],
            downloads=variant.downloads(folder, stem, rows, found),
            profiles=[variant.profile(file, folder, stem) for file in self.profiles.get((problem, name), ())],
            source=variant.source(problem, name),
        )

    def model(self) -> None:
        sections = [self._model(title, records) for title, records in self.shown.steps.items()]
        checked = [self._check(one) for one in self.checks]
        self.page("model.html", "model.html", "The composed model", sections=sections, checks=checked)

    def _model(self, title: str, records: list[dict]) -> dict[str, Any]:
        key, machine = grids.slug(title.replace(", ", "-")), title.partition(", on ")[2]
        every = [one for one in self.shown.records[machine] if model_board.title(one, machine) == title]
        parts = pictures.components(records)
        return {
            "title": title,
            "key": key,
            "records": records,
            "picture": self.picture(pictures.steps(records), f"{key}-step", "One decode step.", "", files=True),
            "parts": self.picture(parts, f"{key}-parts", "Where a step's time goes.", "", files=True),
            "history": self.picture(pictures.model_history(every), f"{key}-history", "Over the commits.", ""),
        }

    def _check(self, one: checks.Check) -> dict[str, Any]:
        key = grids.slug(f"{one.problem}-{one.config}-{one.format}")
        said = "A short line is a budget: 1.5 times what the reference kernels are off."
        return {
            "check": one,
            "key": key,
            "times": self.picture(pictures.op_times(one), f"{key}-ops", "The ops of one step.", ""),
            "errors": self.picture(pictures.layer_errors(one), f"{key}-errors", said, ""),
        }

    def judge(self) -> None:
        found = self.quality
        outcomes = collections.Counter(attack.outcome for attack in found.attacks)
        compared = {
            "same": self._compared("same", [one for one in found.comparisons if not one.planted]),
            "planted": self._compared("planted", [one for one in found.comparisons if one.planted]),
        }
        within = tables.percent(stats.SAME_WITHIN)
        given = {"loops": found.loops, "attacks": found.attacks, "outcomes": outcomes, "within": within}
        self.page("judge.html", "judge.html", "How good the judge is", **compared, **given)

    def _compared(self, key: str, found: list[quality.Comparison]) -> dict[str, Any]:
        """What is shown of comparisons of one kind."""
        found = sorted(found, key=lambda one: one.ratio)
        named = [(f"{one.processes or '?'} processes", one.ratio, one.lo, one.hi) for one in found]
        said = f"{len(found)} comparisons with their 95 % intervals, by ratio."
        return {"found": found, "picture": self.picture(pictures.ratios(named, RATIOS[key]), key, said, "")}


def problem_page(name: str) -> str:
    return f"problems/{grids.slug(name)}.html"


def variant_page(problem: str, name: str) -> str:
    return f"variants/{grids.slug(problem)}/{grids.slug(name)}.html"


def _thinned(timed: Iterable[dict]) -> str:
    """The caption of a strip plot."""
    most = max((sum(map(len, one.get("samples_us") or [])) for one in timed), default=0)
    if most <= plot.MOST_POINTS:
        return "Every scored time, by case and process."
    return f"Scored times by case and process, of {most} a case at most every {-(-most // plot.MOST_POINTS)}th."


def _highlighting(theme: tuple[str, str]) -> str:
    """Rules for source in one theme, for who chose it, and for who has it by the system's setting."""
    name, style = theme
    chosen = f':root[data-theme="{name}"] .code'
    system = ":root:not([data-theme]) .code"
    rules = [
        "\n".join(line for line in HtmlFormatter(style=style).get_style_defs(prefix).splitlines() if ".code ." in line)
        for prefix in (chosen, system)
    ]
    return f"{rules[0]}\n@media (prefers-color-scheme: {name}) {{\n{rules[1]}\n}}"
