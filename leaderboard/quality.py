"""How good the judge is: attacks on its clock, and pairs of kernels whose ratio is known.

docs/exploits.jsonl has what became of each attack (tests/attacks/clock_table.py), docs/honest_pairs.jsonl each pair
(tests/attacks/honest_pairs.py). A line that is neither is named and left out.
"""

import collections
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from harness.player.player import CLOCK
from harness.results import record, schema
from leaderboard import tables
from leaderboard.tables import Table
from problems.common import load

ROOT = load.PROBLEMS.parent
EXPLOITS = ROOT / "docs" / "exploits.jsonl"
PAIRS = ROOT / "docs" / "honest_pairs.jsonl"
ALLOWED = 0.95  # what the lower end of an attack's ratio must be above
WORDS = ("SAME", "SLOWER", "UNDECIDED", "FASTER", "failed")
PLANTED_US = {"same": 0.0, "longer": 1.0, "slowed": 2.3}  # by the kind of a pair: us that its second kernel takes more


class _Line(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class Attack(_Line):
    """One form of an attack, honest in `form` of four calls. ratio, low, high: of its times to the honest form's."""

    file: schema.Name
    about: str = ""
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


@dataclass
class Quality:
    """All that is known of the judge."""

    attacks: list[Attack]
    pairs: list[Pair]
    complaints: list[str]

    def groups(self) -> list[dict[str, Any]]:
        """A row for each kind, problem and number of processes of pairs, equal kernels first. planted: the share of the
        time by which the second kernel takes longer, by construction; pairs, and by verdict: how many; right, wrong:
        how many have the right verdict, or the wrong way round; ratios: of those timed.
        """
        alike: dict[tuple[float, str, str, int], list[Pair]] = {}
        for pair in self.pairs:
            alike.setdefault((PLANTED_US[pair.kind], pair.kind, pair.problem, pair.processes), []).append(pair)
        rows = []
        for (more, _, problem, processes), its in sorted(alike.items(), key=lambda item: item[0]):
            times, ratios = [pair.us for pair in its if pair.us], [pair.ratio for pair in its if pair.ratio is not None]
            planted = more / (statistics.median(times) - more) if more and times else 0.0
            words = collections.Counter(pair.word or "failed" for pair in its)
            wrong = words["FASTER"] + (0 if planted else words["SLOWER"])
            row = {"planted": planted, "problem": problem, "processes": processes, "pairs": len(its)}
            row |= {word: words[word] for word in WORDS}
            row |= {"right": words["SLOWER" if planted else "SAME"], "wrong": wrong}
            rows.append(row | {"ratios": f"{min(ratios):.4f} to {max(ratios):.4f}" if ratios else ""})
        return rows


def read(exploits: Path = EXPLOITS, pairs: Path = PAIRS) -> Quality:
    """What these files say. Of pairs those count that the present clock timed."""
    attacks, complaints = _lines(exploits, Attack)
    every, more = _lines(pairs, Pair)
    counted = [pair for pair in every if pair.clock == CLOCK and pair.kind in PLANTED_US]
    return Quality(list({(form.file, form.form): form for form in attacks}.values()), counted, complaints + more)


def _lines(file: Path, kind: type[_Line]) -> tuple[list[Any], list[str]]:
    def read_line(line: bytes) -> _Line:
        values = record.loads(line)
        schema.check(values, kind)
        return kind.model_validate(values)

    return record.parse_lines(file.read_bytes() if file.is_file() else b"", file.name, read_line)


def pairs_table(groups: Sequence[dict[str, Any]]) -> Table:
    """What the judge says of pairs whose ratio is known."""
    header = ["planted", "problem", "processes", "pairs", *WORDS, "ratios"]
    rows = [[str(row[name]) for name in header] for row in groups]
    for cells, row in zip(rows, groups, strict=True):
        cells[0] = tables.percent(row["planted"]) if row["planted"] else "nothing"
    return Table(header, rows, {"planted", "problem"})


def attacks_table(attacks: Sequence[Attack]) -> Table:
    """A row a file, with the outcomes of its forms."""
    rows = []
    for file in dict.fromkeys(attack.file for attack in attacks):
        forms = [attack for attack in attacks if attack.file == file]
        outcomes = collections.Counter(attack.outcome for attack in forms)
        text = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
        lows = [attack.low for attack in forms if attack.low is not None]
        rows.append([file, text, f"{min(lows):.3f}" if lows else "", forms[-1].about])
    header = ["attack", "outcome of its forms", "least time / honest time", "what it does"]
    return Table(header, rows, {*header} - {header[2]})
