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
import http.server
import shlex
import shutil
import webbrowser
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup
from pygments.formatters.html import HtmlFormatter

from harness.results import output, stats, text
from harness.results.screen import track
from leaderboard import checks, latency, pictures, plot, quality, tables, trend
from leaderboard.board import Board
from leaderboard.pages import Shown
from leaderboard.site import grids, variant
from problems.common import load

HERE = Path(__file__).resolve().parent
THEMES = (("light", "default"), ("dark", "github-dark"))  # pygments' styles
MOST_LINKS = 8  # problems in the bar at the top; more are reached from the first page
MARK = ".page"  # a file of every folder that holds a page


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


def serve(folder: Path) -> None:
    """Serve `folder` to this machine only, and open it in a browser, until Ctrl-C."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        address = f"http://127.0.0.1:{server.server_address[1]}/"
        output.say(f"serving {folder} at {address} (Ctrl-C ends it)")
        webbrowser.open(address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            output.complain("")


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of a request."""


class Site:
    """All pages of what the records show."""

    def __init__(self, shown: Shown, results: Path, folder: Path) -> None:
        self.shown, self.folder = shown, folder
        self.quality = quality.read(results, shown.records, shown.boards)
        self.checks, said = checks.read()
        self.quality.complaints += said
        loader = jinja2.FileSystemLoader(HERE / "templates")
        self.environment = jinja2.Environment(
            loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        self.environment.filters["shell"] = shlex.quote
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
        rendered = self.environment.get_template(template).render(
            root=root, title=title, links=links, place=place, slug=grids.slug, **given
        )
        output.write_whole(file, rendered)

    def picture(self, shown: plot.Plot | None, key: str, caption: str, root: str, files: bool = False) -> Any:
        """A picture for a page; None where there is nothing to draw. files: also write it as SVG and PNG."""
        if shown is None:
            return None
        written = plot.write(shown, self.folder / "pictures", key) if files else []
        links = [(file.suffix[1:].upper(), f"{root}pictures/{file.name}") for file in written]
        return Picture(Markup(plot.inline(shown, pictures.said_of(shown), key)), caption, links)

    # --- pages

    def index(self) -> None:
        by_machine: dict[str, list[tuple[Board, grids.Grid]]] = {}
        for board in self.shown.boards:
            table = grids.standing(board, grids.key_of(board), lambda name, of=board: variant_page(of.problem, name))
            by_machine.setdefault(board.machine, []).append((board, table))
        first = grids.boards(self.shown.boards, lambda b: f"{problem_page(b.problem)}#{grids.key_of(b)}", "first")
        said = [text.line(one) for one in self.shown.complaints + self.quality.complaints]
        self.page(
            "index.html",
            "index.html",
            "Leaderboard",
            first=first,
            machines=by_machine,
            complaints=said,
            facts=tables.facts,
            problem_page=problem_page,
            runs=_runs(self.shown.records.values()),
        )

    def problem(self, name: str) -> None:
        """The page of a problem: a section for each of its boards."""
        root = "../"
        sections = [self._section(board, root) for board in self.shown.boards if board.problem == name]
        self.page(problem_page(name), "problem.html", text.line(name), sections=sections, about=_about(name))

    def _section(self, board: Board, root: str) -> dict[str, Any]:
        key, points = grids.key_of(board), trend.timings(board, self.shown.records[board.machine])

        def href(name: str) -> str:
            return variant_page(board.problem, name)

        cases, shared = grids.by_case(board, f"{key}-cases")
        drawn, total = pictures.by_variant(board), int(board.standing.geomean_us.notna().sum())
        left = f"; the first {len(drawn.lines)} of {total} variants" if drawn and len(drawn.lines) < total else ""
        timed = len(set(board.times[board.times.base & board.times.median_us.notna()].variant))
        series = pictures.series(board)
        more = (
            f"; {len(series)} of the {timed} variants of the run, the table below has all"
            if timed > len(series)
            else ""
        )
        in_common = f"; all cases have {shared}" if shared else ""
        csv = f"{key}.csv"
        output.write_whole(self.folder / "pictures" / csv, tables.csv([board]))
        broken = trend.records_broken(points)
        return {
            "board": board,
            "key": key,
            "title": f"{board.target} on {board.machine}",
            "facts": tables.facts(board),
            "standing": grids.standing(board, f"{key}-variants", href),
            "csv": f"{root}pictures/{csv}",
            "by_variant": self.picture(drawn, f"{key}-variant", f"By variant{left}.", root, files=True),
            "by_case": self.picture(
                pictures.by_case(board), f"{key}-case", f"By case{more}{in_common}.", root, files=True
            ),
            "cases": cases,
            "shared": shared,
            "pairs": grids.pairs(board, f"{key}-pairs"),
            "history": self.picture(
                pictures.history(board, points),
                f"{key}-history",
                "Over the commits. Runs are not paired: one machine differs from another of its name by some percent.",
                root,
            ),
            "speed_up": self.picture(
                pictures.speed_up(points),
                f"{key}-speed",
                "The fastest so far. The first correct version is the slowest of the earliest run that has one.",
                root,
            ),
            "milestones": grids.milestones(broken, f"{key}-fastest", href),
            "notes": tables.notes(board),
        }

    def variant(self, problem: str, name: str) -> None:
        """The page of a variant: what it is, then a section for each of its boards."""
        place = variant_page(problem, name)
        folder, root = (self.folder / place).parent, "../../"
        folder.mkdir(parents=True, exist_ok=True)
        found = []
        for board in self.shown.boards:
            if board.problem == problem and name in set(board.standing.variant):
                found.append(variant.section(board, name, self.shown.records[board.machine]))
        sections = [
            {
                "key": (key := grids.key_of(one.board)),
                "board": one.board,
                "row": one.row,
                "rank": "" if pd.isna(one.row.rank) else str(one.row.rank),
                "title": f"{one.board.target} on {one.board.machine}",
                "facts": one.facts,
                "back": f"{root}{problem_page(problem)}#{key}",
                "cases": grids.cases_of(one.judged, f"{key}-cases"),
                "samples": self.picture(
                    pictures.samples(one.timed),
                    f"{key}-samples",
                    _thinned(one.timed),
                    root,
                ),
                "resources": one.resources,
            }
            for one in found
        ]
        stem = Path(place).stem
        rows = self.rows[(self.rows.problem == problem) & (self.rows.variant == name)]
        downloads = variant.downloads(folder, stem, rows, found)
        profiles = [variant.profile(file, folder, stem) for file in self.profiles.get((problem, name), ())]
        self.page(
            place,
            "variant.html",
            text.line(name),
            problem=problem,
            sections=sections,
            downloads=downloads,
            profiles=profiles,
            source=variant.source(problem, name),
            problem_href=root + problem_page(problem),
        )

    def model(self) -> None:
        sections = []
        for title, records in self.shown.steps.items():
            key = grids.slug(title.replace(", ", "-"))
            problem, _, rest = title.partition(", ")
            machine = rest.partition(", on ")[2]
            every = [
                one
                for one in self.shown.records[machine]
                if one["kind"] == "latency" and one["problem"] == problem and rest.startswith(one["target"])
            ]
            sections.append(
                {
                    "title": title,
                    "key": key,
                    "steps": grids.steps(records, self.shown.known, f"{key}-steps"),
                    "picture": self.picture(pictures.steps(records), f"{key}-step", "One decode step.", "", files=True),
                    "parts": self.picture(
                        pictures.components(records), f"{key}-parts", "Where a step's time goes.", "", files=True
                    ),
                    "history": self.picture(pictures.model_history(every), f"{key}-history", "Over the commits.", ""),
                    "layers": grids.of_model("Time of a layer", latency.layers(records), f"{key}-layers"),
                    "breakdown": grids.of_model(
                        "Where a step's time goes", latency.breakdown(records), f"{key}-breakdown"
                    ),
                    "ops": grids.ops(records, f"{key}-ops"),
                }
            )
        found = [self._check(one) for one in self.checks]
        self.page("model.html", "model.html", "The composed model", sections=sections, checks=found)

    def _check(self, one: checks.Check) -> dict[str, Any]:
        key = grids.slug(f"{one.problem}-{one.config}-{one.format}")
        said = "A short line is a budget: 1.5 times what the reference kernels are off."
        return {
            "check": one,
            "key": key,
            "ops": grids.op_times(one, f"{key}-op"),
            "times": self.picture(pictures.op_times(one), f"{key}-ops", "The ops of one step.", ""),
            "errors": self.picture(pictures.layer_errors(one), f"{key}-errors", said, ""),
            "layers": grids.layers(one, f"{key}-layer"),
        }

    def judge(self) -> None:
        found, outcomes = self.quality, collections.Counter(attack.outcome for attack in self.quality.attacks)
        self.page(
            "judge.html",
            "judge.html",
            "How good the judge is",
            outcomes=outcomes,
            allowed=quality.ALLOWED,
            within=tables.percent(stats.SAME_WITHIN),
            same=self._compared("same", [one for one in found.comparisons if not one.planted]),
            planted=self._compared("planted", [one for one in found.comparisons if one.planted]),
            loops=grids.loops(found.loops, "loops"),
            attacks=grids.attacks(found.attacks, "attacks"),
        )

    def _compared(self, key: str, found: list[quality.Comparison]) -> dict[str, Any]:
        """What is shown of comparisons of one kind."""
        found = sorted(found, key=lambda one: one.ratio)
        what = "a slowed copy / time of the kernel" if key == "planted" else "a kernel / time of the same kernel"
        drawn = pictures.ratios(
            [(f"{one.processes or '?'} processes", one.ratio, one.lo, one.hi) for one in found], f"time of {what}"
        )
        return {
            "counts": quality.counts(found),
            "plans": grids.plans(found, f"{key}-plans"),
            "picture": self.picture(drawn, key, f"{len(found)} comparisons with their 95 % intervals, by ratio.", ""),
            "all": grids.comparisons(found, f"{key}-all"),
        }


def problem_page(name: str) -> str:
    return f"problems/{grids.slug(name)}.html"


def variant_page(problem: str, name: str) -> str:
    return f"variants/{grids.slug(problem)}/{grids.slug(name)}.html"


def _about(name: str) -> str:
    """The first line of a problem's docstring; "" where the checkout has no such problem."""
    task = load.PROBLEMS / name / "task.py"
    try:
        return load.summary(task) if task.is_file() else ""
    except (OSError, SyntaxError, ValueError):
        return ""


def _thinned(timed: Iterable[dict]) -> str:
    """The caption of a strip plot."""
    most = max((sum(map(len, one.get("samples_us") or [])) for one in timed), default=0)
    if most <= plot.MOST_POINTS:
        return "Every scored time, by case and process."
    return f"Scored times by case and process, of {most} a case at most every {-(-most // plot.MOST_POINTS)}th."


def _runs(by_machine: Iterable[Iterable[dict]]) -> dict[str, int]:
    """How many records and runs there are."""
    records = [one for found in by_machine for one in found]
    return {"records": len(records), "runs": len({one["run_id"] for one in records})}


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
