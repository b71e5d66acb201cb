"""How good the judge is: attacks on its clock, pairs of kernels whose ratio is known, and bare loops.

docs/exploits.jsonl has what became of each attack (tests/exploits/exploit_table.py), docs/honest_pairs.jsonl each pair
(tests/exploits/honest_pairs.py), leaderboard/results/<machine>/judge/ the loops. A line that is none of these is named
and left out.
"""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from harness.player.player import CLOCK
from harness.results import record, schema
from problems.common import load

ROOT = load.PROBLEMS.parent
EXPLOITS = ROOT / "docs" / "exploits.jsonl"
PAIRS = ROOT / "docs" / "honest_pairs.jsonl"
ATTACKS = ROOT / "tests" / "exploits" / "submissions"
FOLDER = "judge"
ALLOWED = 0.95  # what the lower end of an attack's ratio must be above
PLANTED_US = {"same": 0.0, "longer": 1.0, "slowed": 2.3}  # by the kind of a pair: us that its second kernel takes more


class _Line(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


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
    def outcome(self) -> str:
        """What the judge made of it: below the bound is what passed with a time that may be false."""
        if self.verdict != "PASSED":
            return "refused"
        if self.low is None:
            return "not timed"
        return "BELOW THE BOUND" if self.low <= ALLOWED else "honest time"


class Pair(_Line):
    """A comparison of a kernel with itself, or with a copy that takes longer. us: of the variant; word: the verdict."""

    kind: str
    problem: schema.Name
    gpu: str
    commit: str
    processes: int
    us: float | None = None
    ratio: float | None = None
    word: str | None = None
    clock: str | None = None


class LoopCase(_Line):
    """The judge's time of a kernel, and that of a plain loop over the same calls, in us."""

    case: dict
    judge_us: float
    loop_us: float
    ratio: float
    standard_error: float


class Loop(_Line):
    """The loops of a variant on a machine."""

    problem: str
    variant: str
    cases: list[LoopCase]


@dataclass
class Quality:
    """All that is known of the judge. loops: with their machine."""

    attacks: list[Attack] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    loops: list[tuple[str, Loop]] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def groups(self) -> list["Group"]:
        """The pairs of a kind, a problem and a number of processes, equal kernels first."""
        keys = sorted({(PLANTED_US[one.kind], one.kind, one.problem, one.processes) for one in self.pairs})
        return [Group([p for p in self.pairs if (p.kind, p.problem, p.processes) == key[1:]]) for key in keys]


@dataclass(frozen=True)
class Group:
    """Pairs that are alike."""

    pairs: list[Pair]

    @property
    def size(self) -> int:
        return len(self.pairs)

    @property
    def planted(self) -> float:
        """The share of the time by which the second kernel takes longer, by construction; 0 of equal ones."""
        more, times = PLANTED_US[self.pairs[0].kind], [one.us for one in self.pairs if one.us]
        return more / (statistics.median(times) - more) if more and times else 0.0

    @property
    def right(self) -> int:
        """How many pairs have the verdict that is right."""
        return self.count("SLOWER" if self.planted else "SAME")

    @property
    def wrong(self) -> int:
        """How many pairs have a verdict that is the wrong way round."""
        return self.count("FASTER") + (0 if self.planted else self.count("SLOWER"))

    def count(self, word: str | None) -> int:
        """How many pairs have a verdict; None is for those that failed."""
        return sum(one.word == word for one in self.pairs)

    @property
    def ratios(self) -> list[float]:
        """Of the pairs that were timed."""
        return [one.ratio for one in self.pairs if one.ratio is not None]


def read(results: Path, machines: Iterable[str], exploits: Path = EXPLOITS, pairs: Path = PAIRS) -> Quality:
    """What these files and the folders of these machines say. Of pairs those count that the present clock timed."""
    found = Quality()
    attacks = _lines(found, exploits, exploits.name, Attack)
    found.attacks = list({(one.file, one.form): one for one in attacks}.values())
    every = _lines(found, pairs, pairs.name, Pair)
    found.pairs = [one for one in every if one.clock == CLOCK and one.kind in PLANTED_US]
    for machine in machines:
        for file in sorted((results / machine / FOLDER).glob("bare_loop.jsonl")):
            loops = _lines(found, file, str(file.relative_to(results)), Loop)
            found.loops += [(machine, one) for one in loops]
    return found


def _lines(found: Quality, file: Path, name: str, kind: type[_Line]) -> list[Any]:
    """The lines of a file that are of a kind; about others `found` gets a complaint."""

    def read_line(line: bytes) -> _Line:
        said = record.loads(line)
        schema.check(said, kind)
        return kind.model_validate(said)

    lines, complaints = record.parse_lines(file.read_bytes() if file.is_file() else b"", name, read_line)
    found.complaints += complaints
    return lines


def summary(file: Path) -> str:
    """The first line of a file's docstring; "" where the file is gone or cannot be read."""
    try:
        return load.summary(file) if file.is_file() else ""
    except (OSError, SyntaxError, ValueError):
        return ""
