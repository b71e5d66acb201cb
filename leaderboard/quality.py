"""How good the judge is: comparisons of a kernel with itself and with a slowed copy, bare loops, and the attacks.

Comparisons and loops are experiments in leaderboard/results/<machine>/judge/, where no board reads; each run that
paired a variant with itself counts too. docs/exploits.jsonl has what became of each attack
(tests/exploits/exploit_table.py). A line that is none of these is named and left out.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from harness.results import ranking, record, schema, stats
from leaderboard.board import Board, rows_of
from problems.common import load

ROOT = load.PROBLEMS.parent
EXPLOITS = ROOT / "docs" / "exploits.jsonl"
ATTACKS = ROOT / "tests" / "exploits" / "submissions"
FOLDER = "judge"
ALLOWED = 0.95  # what the lower end of an attack's ratio must be above


class _Line(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class _Ratio(_Line):
    ratio: float = Field(gt=0)
    ci95: schema.Interval
    word: str


class _Comparison(_Line):
    kind: Literal["comparison"]
    problem: str
    case: dict[str, Any]
    time: str
    commit: str | None = None
    plan: dict[str, Any] = {}
    slowed_by_cycles: int | None = None
    same: _Ratio | None = Field(None, alias="a/b")
    slowed: _Ratio | None = Field(None, alias="s/a")


class _Loop(_Line):
    case: dict[str, Any]
    judge_us: float = Field(gt=0)
    loop_us: float = Field(gt=0)
    ratio: float
    standard_error: float


class _Loops(_Line):
    kind: Literal["bare_loop"]
    problem: str
    variant: str
    time: str
    cases: list[_Loop]


class Attack(_Line):
    """One form of an attack, honest in `form` of four calls. ratio, low, high: of its times to the honest form's."""

    file: schema.Name
    form: int
    verdict: str
    reason: str = ""
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    processes: int = 0

    @property
    def broken(self) -> bool:
        """Whether it passed with a time that may be false."""
        return self.low is not None and self.low <= ALLOWED

    @property
    def outcome(self) -> str:
        """What the judge made of it."""
        if self.verdict != "PASSED":
            return "refused"
        if self.low is None:
            return "not timed"
        return "BELOW THE BOUND" if self.broken else "honest time"


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
            lines, said = record.parse_lines(file.read_bytes(), str(file.relative_to(results)), _experiment)
            found.complaints += said
            for line in lines:
                _take(found, machine, line)
    for board in boards:
        for pair in rows_of(board.pairs):
            if pair.against == f"{pair.variant}#2":
                where = (board.machine, f"{board.problem}, {pair.variant}", pair.case, "")
                found.comparisons.append(
                    Comparison(*where, pair.ratio, pair.lo, pair.hi, pair.word, "", pair.run_id, "")
                )
    data = EXPLOITS.read_bytes() if EXPLOITS.is_file() else b""
    lines, said = record.parse_lines(data, EXPLOITS.name, _attack)
    last = {(one["file"], one["form"]): Attack.model_validate(one) for one in lines}
    found.attacks, found.complaints = list(last.values()), found.complaints + said
    return found


def counts(comparisons: Iterable[Comparison]) -> dict[str, int]:
    """How often each verdict was given, the most frequent first."""
    found: dict[str, int] = {}
    for one in comparisons:
        found[one.word] = found.get(one.word, 0) + 1
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def by_plan(comparisons: Iterable[Comparison]) -> dict[tuple[str, str], dict[str, int]]:
    """The verdicts by (what was planted, processes): more processes find smaller differences."""
    found: dict[tuple[str, str], list[Comparison]] = {}
    for one in comparisons:
        found.setdefault((one.planted, one.processes), []).append(one)
    return {key: counts(of_plan) for key, of_plan in found.items()}


def summary(attack: Attack) -> str:
    """The first line of the attack's docstring; "" where its file is gone or cannot be read."""
    file = ATTACKS / f"{attack.file}.py"
    try:
        return load.summary(file) if file.is_file() else ""
    except (OSError, SyntaxError, ValueError):
        return ""


def _take(found: Quality, machine: str, line: dict) -> None:
    if line["kind"] == "comparison":
        one = _Comparison.model_validate(line)
        for planted, ratio in (("", one.same), (f"{one.slowed_by_cycles} cycles", one.slowed)):
            if ratio is not None:
                lo, hi = ratio.ci95
                # Before there was UNDECIDED, SAME was said where neither of the others was.
                near = 1 - stats.SAME_WITHIN <= lo <= hi <= 1 + stats.SAME_WITHIN
                word = "UNDECIDED" if ratio.word == "SAME" and not near else ratio.word
                numbers = (ratio.ratio, lo, hi, word, str(one.plan.get("processes", "")))
                label, commit = ranking.case_label(one.case), (one.commit or "")[:7]
                found.comparisons.append(Comparison(machine, one.problem, label, planted, *numbers, one.time, commit))
    elif line["kind"] == "bare_loop":
        loops = _Loops.model_validate(line)
        found.loops += [
            Loop(
                machine,
                loops.problem,
                loops.variant,
                ranking.case_label(one.case),
                one.judge_us,
                one.loop_us,
                one.ratio,
                one.standard_error,
            )
            for one in loops.cases
        ]


def _experiment(line: bytes) -> dict:
    """A line of an experiment; one of another kind as it is. ValueError: it is none."""
    found = record.loads(line)
    model = {"comparison": _Comparison, "bare_loop": _Loops}.get(str(found.get("kind")))
    if model:
        schema.check(found, model)
    return found if "kind" in found else found | {"kind": ""}


def _attack(line: bytes) -> dict:
    found = record.loads(line)
    schema.check(found, Attack)
    return found
