"""Judge every attack that counts honest calls, in all its forms, and render docs/exploits.md from docs/exploits.jsonl.

python -m tests.attacks.clock_table [--processes N] [--pairs N] [--only NAME ...] [--render]

A form is honest in 0, 1 or 2 of four calls (HONEST_OF_FOUR). One that PASSED is timed in pairs with the honest form of
the same file, which is honest in all four. The rule: the lower end of the 95 % interval of the ratio of the times is
above 0.95. Each result is a line; a form that has one is not judged again. --render renders the page alone.
"""

import argparse
import dataclasses
import re
import shutil
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from harness.judge import phases, readings, replies
from harness.judge.handle import RunnerHandle
from harness.judge.outcome import Outcome
from harness.judge.session import Session
from harness.problem import folders, sources
from harness.results import environment, stats
from harness.runner import gate
from leaderboard.quality import ALLOWED, Attack
from leaderboard.tables import escape as markdown
from problems.common import load
from tests.attacks import test_attacks as suite
from tests.attacks import variants
from tests.support import ROOT

FORMS = (0, 1, 2)  # honest calls of four
HONEST = 4
WIDE = 0.02  # while an interval that is below the bound reaches so far below its ratio, as many processes come to it
BELOW = "BELOW THE BOUND"  # what an attack comes to that passed with a time that may be false
AGAIN = 4  # such times at most
DOC = ROOT / "docs" / "exploits.md"
OUT = DOC.with_suffix(".jsonl")
SHORT = phases.Counts(processes=1, samples=4, warmups=1, buffers=2, extra=12)
DEVICE = "cpu"


def files() -> list[Path]:
    return [file for file in suite.FILES if suite.read(file).forms and DEVICE in suite.read(file).devices]


def form(file: Path, honest: int, place: Path) -> Path:
    """A copy of `file`, with the sources that it needs, that is honest in so many calls of four."""
    folder = place / f"{file.stem}_{honest}"
    folder.mkdir()
    for source in sources.files_of(file):
        shutil.copy(source, folder)
    copy = folder / file.name
    text, count = re.subn(r"^HONEST_OF_FOUR = 0\b", f"HONEST_OF_FOUR = {honest}", copy.read_text(), flags=re.MULTILINE)
    if count != 1:
        raise ValueError(f"{file.name} must say HONEST_OF_FOUR = 0 in one line")
    copy.write_text(text)
    return copy


class Bench:
    """Judges forms of files of one problem, in one session."""

    def __init__(self, running: Session, place: Path, processes: int, pairs: int) -> None:
        self.running, self.place, self.processes, self.pairs = running, place, processes, pairs

    def judge(self, file: Path) -> list[Attack]:
        """What becomes of a file's forms, judged side by side; those that pass are timed beside the honest one."""
        left = {number: self._handle(file, number) for number in FORMS}
        honest, wrong = self._handle(file, HONEST), suite.not_passed(self.running, list(left.values()))
        found = {n: _attack(file, n, wrong[one.name][0]) for n, one in left.items() if wrong[one.name]}
        left = {n: one for n, one in left.items() if n not in found}
        found |= _failed(file, left, self._timed(list(left.values()), SHORT) if left else {})
        left = {n: one for n, one in left.items() if n not in found}
        found |= self._paired(file, left, honest) if left else {}
        return [found[number] for number in FORMS]

    def _paired(self, file: Path, handles: dict[int, RunnerHandle], honest: RunnerHandle) -> dict[int, Attack]:
        found, count = {}, 0
        pairs = {number: [] for number in handles}  # by case, by process
        for _ in range(1 + AGAIN):
            more = count or self.processes
            how = dataclasses.replace(SHORT, processes=more, samples=self.pairs, extra=3 * self.pairs, paired=True)
            timings = self._timed([*handles.values(), honest], how)
            count += more
            ended = _failed(file, handles, timings)
            if failure := _failure(timings[honest.name]):
                said = Outcome("PASSED", f"the honest form: {failure.status}: {failure.reason}")
                ended = {number: _attack(file, number, said) for number in handles} | ended
            found |= ended
            handles = {number: handle for number, handle in handles.items() if number not in ended}
            for number, handle in handles.items():
                both = zip(timings[handle.name], timings[honest.name], strict=True)
                new = [readings.ratios(*one) for one in both]
                pairs[number] = [a + b for a, b in zip(pairs[number] or [[] for _ in new], new, strict=True)]
                ratio = stats.compare(pairs[number])
                numbers = {"ratio": ratio.ratio, "low": ratio.ci95[0], "high": ratio.ci95[1], "processes": count}
                found[number] = _attack(file, number, Outcome("PASSED"), **numbers)
            if not any(one.outcome == BELOW and one.ratio - one.low >= WIDE for one in found.values()):
                break
        return found

    def _timed(self, handles: list[RunnerHandle], how: phases.Counts) -> dict[str, list[readings.Timing]]:
        cases = list(self.running.problem.benchmarks[DEVICE])
        return phases.run_benchmarks(self.running, handles, cases, how)[0]

    def _handle(self, file: Path, number: int) -> RunnerHandle:
        name = f"{file.stem}_{number}"
        submission = folders.submission(self.running.problem, form(file, number, self.place))
        return RunnerHandle(name, dataclasses.replace(submission, name=name), DEVICE)


def _failure(timings: list[readings.Timing]) -> Outcome | None:
    return next((timing.failure for timing in timings if timing.failure), None)


def _failed(file: Path, handles: dict[int, RunnerHandle], timings: dict[str, list]) -> dict[int, Attack]:
    failures = {number: _failure(timings[handle.name]) for number, handle in handles.items()}
    return {number: _attack(file, number, failure) for number, failure in failures.items() if failure}


def _attack(file: Path, number: int, said: Outcome, **more: object) -> Attack:
    about = load.summary(file)
    return Attack(file=file.stem, about=about, form=number, verdict=said.status, reason=said.reason, **more)


def read(out: Path) -> list[Attack]:
    lines = out.read_text().splitlines() if out.exists() else []
    return [Attack.model_validate_json(line) for line in lines]


def run(out: Path, chosen: list[Path], processes: int, pairs: int) -> None:
    """Append what is missing to `out`."""
    have = {(found.file, found.form) for found in read(out)}
    todo = [file for file in chosen if any((file.stem, number) not in have for number in FORMS)]
    out.parent.mkdir(parents=True, exist_ok=True)
    replies.GIVE_UP_AFTER = suite.GIVE_UP_AFTER
    gate.flush_bytes = lambda: suite.FLUSH_BYTES
    for name in dict.fromkeys(suite.read(file).problem for file in todo):
        folder = folders.find(str(suite.FIELDS[name].folder))
        with tempfile.TemporaryDirectory() as place, Session(folder, DEVICE, suite.LIMIT_S) as running:
            bench = Bench(running, Path(place), processes, pairs)
            for file in (file for file in todo if suite.read(file).problem == name):
                for found in bench.judge(file):
                    with out.open("a") as lines:
                        lines.write(found.model_dump_json() + "\n")
                    print(_line(found), flush=True)


def _line(found: Attack) -> str:
    ratio = "" if found.ratio is None else f"  {found.ratio:.3f} ({found.low:.3f} to {found.high:.3f})"
    mark = "  BELOW THE BOUND" if found.outcome == BELOW else ""
    return f"{found.file:40} {found.form} of 4 honest  {found.verdict}{ratio}{mark}"


def render(all_found: list[Attack]) -> str:
    """The page, as Markdown."""
    last = {(found.file, found.form): found for found in all_found}
    commit, dirty = environment.commit()
    rows = []
    for file in files():
        for found in (last[file.stem, number] for number in FORMS if (file.stem, number) in last):
            ratio = "" if found.ratio is None else f"{found.ratio:.3f} ({found.low:.3f} to {found.high:.3f})"
            first = found.form == FORMS[0]
            topic, name = variants.topic_of(file), file.stem.partition("_")[2]
            cells = (topic, f"`{name}`", markdown(load.summary(file))) if first else ("", "", "")
            rows.append(f"| {' | '.join(cells)} | {found.form} of 4 | {found.verdict} | {ratio} |")
    below = sorted({found.file for found in last.values() if found.outcome == BELOW})
    outcome = f"Below the bound: {', '.join(below)}." if below else "No form that passes is below the bound."
    missing = [file.stem for file in files() if not any((file.stem, number) in last for number in FORMS)]
    if missing:
        outcome += f" Not judged since they changed: {', '.join(missing)}."
    return f"""# Attacks on the judge's clock

Each submission of `tests/attacks` below tries to get a better time than its work takes: it forges a time, defers
work past the end of a call, works ahead of its beginning, or watches memory. A form is honest in so many of four calls,
since an attack in a few calls only may hide in a median. The judge must refuse a form, or give it an honest time: its
times are compared in pairs with those of the same file when it is honest in all calls, and the lower end of the 95 %
interval of their ratio must be above {ALLOWED}.

    .venv/bin/python -m tests.attacks.clock_table

judges what has no line in `exploits.jsonl` yet, a file's forms side by side, and renders this page from it.

{outcome} Measured on idle cores of several machines; rendered on
{datetime.now(UTC):%Y-%m-%d} at commit {commit[:9]}{" with changes" if dirty else ""}.

| topic | submission | what it does | honest | verdict | time to that of its honest form |
|---|---|---|---|---|---|
{chr(10).join(rows)}
"""


def main(argv: list[str]) -> int:
    """0, or 1 if a form passed with a time below the bound."""
    parser = argparse.ArgumentParser("clock_table.py", allow_abbrev=False)
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--render", action="store_true")
    said = parser.parse_args(argv)
    if not said.render:
        run(OUT, [f for f in files() if not said.only or f.stem in said.only], said.processes, said.pairs)
    found = read(OUT)
    DOC.write_text(render(found))
    return int(any(one.outcome == BELOW for one in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
