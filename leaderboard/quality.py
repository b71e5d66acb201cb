"""How good the judge is: comparisons of a kernel with itself and with a slowed copy, bare loops, and the attacks.

Comparisons and loops are experiments in leaderboard/results/<machine>/judge/, where no board reads; each run that
paired a variant with itself counts too. docs/exploits.jsonl has what became of each attack
(tests/exploits/exploit_table.py). A line that is none of these is named and left out.
"""

import collections
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from harness.results import ranking, record, schema, stats
from leaderboard.board import Board, rows_of
from problems.common import load

ROOT = load.PROBLEMS.parent
EXPLOITS = ROOT / "docs" / "exploits.jsonl"
ATTACKS = ROOT / "tests" / "exploits" / "submissions"
FOLDER = "judge"
ALLOWED = 0.95  # what the lower end of an attack's ratio must be above


class Attack(BaseModel):
    """One form of an attack, honest in `form` of four calls. ratio, low, high: of its times to the honest form's."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    file: schema.Name
    form: int
    verdict: str
    reason: str = ""
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    processes: int = 0

    @property
    def outcome(self) -> str:
        """What the judge made of it: below the bound is what passed with a time that may be false."""
        if self.verdict != "PASSED":
            return "refused"
        if self.low is None:
            return "not timed"
        return "BELOW THE BOUND" if self.low <= ALLOWED else "honest time"


@dataclass(frozen=True)
class Comparison:
    """planted: what the other side was slowed by; "" for a kernel with itself. ratio, lo, hi: 95 % interval."""

    machine: str
    problem: str
    case: str
    planted: str
    ratio: float
    lo: float
    hi: float
    word: str
    processes: str
    time: str
    commit: str


@dataclass(frozen=True)
class Loop:
    """The judge's time of a kernel, and that of a plain loop over the same calls, in us."""

    machine: str
    problem: str
    variant: str
    case: str
    judge_us: float
    loop_us: float
    ratio: float
    standard_error: float


@dataclass
class Quality:
    """All that is known of the judge."""

    comparisons: list[Comparison] = field(default_factory=list)
    loops: list[Loop] = field(default_factory=list)
    attacks: list[Attack] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


def read(results: Path, machines: Iterable[str], boards: Iterable[Board]) -> Quality:
    """What the folders of these machines, their boards' pairs and docs/exploits.jsonl say."""
    found = Quality()
    for machine in machines:
        for file in sorted(path for path in (results / machine / FOLDER).glob("*.jsonl") if path.is_file()):
            read_line = functools.partial(_experiment, machine)
            lines, said = record.parse_lines(file.read_bytes(), str(file.relative_to(results)), read_line)
            found.complaints += said
            found.comparisons += [one for line in lines for one in line.get("comparisons", ())]
            found.loops += [one for line in lines for one in line.get("loops", ())]
    for board in boards:
        for pair in rows_of(board.pairs):
            if pair.against == f"{pair.variant}#2":
                where = (board.machine, f"{board.problem}, {pair.variant}", pair.case, "")
                numbers = (pair.ratio, pair.lo, pair.hi, pair.word, "", pair.run_id, "")
                found.comparisons.append(Comparison(*where, *numbers))
    data = EXPLOITS.read_bytes() if EXPLOITS.is_file() else b""
    lines, said = record.parse_lines(data, EXPLOITS.name, _attack)
    last = {(one["file"], one["form"]): Attack.model_validate(one) for one in lines}
    found.attacks, found.complaints = list(last.values()), found.complaints + said
    return found


def counts(comparisons: Iterable[Comparison]) -> dict[str, int]:
    """How often each verdict was given, the most frequent first."""
    return dict(collections.Counter(one.word for one in comparisons).most_common())


def by_plan(comparisons: Iterable[Comparison]) -> dict[tuple[str, str], dict[str, int]]:
    """The verdicts by (what was planted, processes): more processes find smaller differences."""
    found: dict[tuple[str, str], list[Comparison]] = {}
    for one in comparisons:
        found.setdefault((one.planted, one.processes), []).append(one)
    return {key: counts(of_plan) for key, of_plan in found.items()}


def summary(file: Path) -> str:
    """The first line of a file's docstring; "" where the file is gone or cannot be read."""
    try:
        return load.summary(file) if file.is_file() else ""
    except (OSError, SyntaxError, ValueError):
        return ""


def _experiment(machine: str, line: bytes) -> dict[str, list]:
    """The comparisons or the loops of a line of an experiment; {} of another kind. ValueError: it is none."""
    one = record.loads(line)
    try:
        if one.get("kind") == "comparison":
            return {"comparisons": list(_comparisons(machine, one))}
        if one.get("kind") == "bare_loop":
            where = (machine, str(one["problem"]), str(one["variant"]))
            return {"loops": [_loop(where, case) for case in one["cases"]]}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"no experiment: {type(error).__name__}: {error}") from None
    return {}


def _comparisons(machine: str, one: dict) -> Iterator[Comparison]:
    if "a/b" not in one and "s/a" not in one:
        raise KeyError("a/b")
    for planted, key in (("", "a/b"), (f"{one.get('slowed_by_cycles')} cycles", "s/a")):
        if (pair := one.get(key)) is not None:
            ratio, lo, hi = map(float, (pair["ratio"], *pair["ci95"]))
            # Before there was UNDECIDED, SAME was said where neither of the others was.
            near = 1 - stats.SAME_WITHIN <= lo <= hi <= 1 + stats.SAME_WITHIN
            word = "UNDECIDED" if pair["word"] == "SAME" and not near else str(pair["word"])
            where = (machine, str(one["problem"]), ranking.case_label(one["case"]), planted)
            processes, commit = str((one.get("plan") or {}).get("processes", "")), str(one.get("commit") or "")[:7]
            yield Comparison(*where, ratio, lo, hi, word, processes, str(one["time"]), commit)


def _loop(where: tuple[str, str, str], case: dict) -> Loop:
    numbers = (float(case[key]) for key in ("judge_us", "loop_us", "ratio", "standard_error"))
    return Loop(*where, ranking.case_label(case["case"]), *numbers)


def _attack(line: bytes) -> dict:
    found = record.loads(line)
    schema.check(found, Attack)
    return found
