"""Two sets of records, and the unpaired ratios of what they have in common. leaderboard/compare.py prints them."""

from dataclasses import dataclass, field
from pathlib import Path

from harness.results import ranking, record, stats, text
from harness.results.stats import Ratio

KEYS = ("problem", "variant", "target", "machine", "run", "commit")
Key = tuple[str, str, str]  # problem, target, variant
# Of a run: the field of its records, what it is called where the two differ.
DIFFERENCES = {
    "machine": "other machines",
    "commit": "other commits",
    "source_hash": "other sources of the variant",
    "problem_hash": "another problem (cases, tolerances, task or reference)",
    "harness_hash": "another judge",
    "software": "other versions of driver or packages",
}
_SOFTWARE = ("driver", "cuda", "torch", "triton", "cute_dsl")


@dataclass(frozen=True)
class Run:
    """The newest run of a variant in a selection. cases: its benchmark records by the case's label."""

    variant: str
    cases: dict[str, dict]

    @property
    def first(self) -> dict:
        return next(iter(self.cases.values()))

    @property
    def facts(self) -> dict[str, object]:
        """By the keys of DIFFERENCES, what of it may differ from another run's. None: not known."""
        environment = self.first.get("environment") or {}
        software = {key: environment[key] for key in _SOFTWARE if environment.get(key)}
        machine = environment.get("gpu") if self.first["target"] != "cpu" else environment.get("cpu")
        return {**{key: self.first.get(key) for key in DIFFERENCES}, "machine": machine, "software": software or None}

    def __str__(self) -> str:
        facts, commit = self.facts, str(self.first.get("commit") or "of no known commit")[:12]
        dirty = " with changes" if self.first.get("dirty") else ""
        return text.line(
            f"{self.variant}, run {self.first['run_id']} of {self.first['time'][:16]} on "
            f"{facts['machine'] or 'an unknown machine'}, commit {commit}{dirty}"
        )

    def samples(self, label: str) -> list[list[float]]:
        """The times of a case by process in us; [] where it was not timed, or failed."""
        one = self.cases.get(label) or {}
        return (one.get("samples_us") or []) if one.get("status") == "PASSED" else []

    def time(self, label: str) -> str:
        """The time of a case in us as text, or what there is instead."""
        one = self.cases.get(label)
        if one is None:
            return "-"
        return f"{one['median_us']:.2f}" if one["status"] == "PASSED" and one.get("median_us") else one["status"]


@dataclass(frozen=True)
class Chosen:
    """What an argument chose. words: as given."""

    words: str
    runs: dict[Key, Run]
    complaints: list[str] = field(default_factory=list)

    def named(self) -> str:
        return ", ".join(" ".join(key) for key in sorted(self.runs))


@dataclass(frozen=True)
class Pair:
    """Two runs of a problem for a target, and their cases."""

    problem: str
    target: str
    a: Run
    b: Run

    @property
    def common(self) -> list[str]:
        """The labels of the cases that both were timed on."""
        return [label for label in self.a.cases if self.a.samples(label) and self.b.samples(label)]

    @property
    def failed(self) -> list[str]:
        """The verdicts on A that are not PASSED."""
        return [one["status"] for one in self.a.cases.values() if one["status"] != "PASSED"]

    def ratio(self, labels: list[str]) -> Ratio:
        return stats.compare_unpaired([(self.a.samples(label), self.b.samples(label)) for label in labels])

    def differ(self) -> list[str]:
        """What is known to differ between the runs, in words."""
        a, b = self.a.facts, self.b.facts
        found = {key: words for key, words in DIFFERENCES.items() if a[key] and b[key] and a[key] != b[key]}
        if self.a.variant != self.b.variant:
            found.pop("source_hash", None)
        commits = str(a["commit"]), str(b["commit"])
        if commits[0].startswith(commits[1]) or commits[1].startswith(commits[0]):
            found.pop("commit", None)
        return list(found.values())

    def lines(self) -> list[str]:
        """The comparison as text."""
        same = self.a.first["run_id"] == self.b.first["run_id"]
        when = "one run, but not its pairs" if same else ", ".join(["runs at other times", *self.differ()])
        common, every = self.common, list({**self.a.cases, **self.b.cases})
        rows = [("case", "A us", "B us", "A / B")]
        for label in every:
            ratio = _shown(self.ratio([label])) if label in common else ""
            rows.append((label, self.a.time(label), self.b.time(label), ratio))
        if common:
            count = "" if len(common) == len(every) else f" of {len(common)} of {len(every)} cases"
            rows.append((f"geomean{count}", "", "", _shown(self.ratio(common))))
        wide = [max(len(row[i]) for row in rows) for i in range(3)]
        return [
            f"{self.problem}, {self.target}: time of A / time of B; below 1 A is faster",
            f"  A: {self.a}",
            f"  B: {self.b}",
            f"  UNPAIRED: {when}. The intervals (95 %) have the scatter within each run, not what differs",
            *(f"  {label:<{wide[0]}}  {a:>{wide[1]}}  {b:>{wide[2]}}  {ratio}" for label, a, b, ratio in rows),
        ]

    def regressions(self, percent: float) -> list[str]:
        """Where A is slower by more than `percent` %, in words: single cases, and all of them together; and the cases
        that only B was timed on.
        """
        about, common = f"{self.problem}, {self.a.variant}", self.common
        lost = [label for label in self.b.cases if self.b.samples(label) and not self.a.samples(label)]
        found = [f"{about}, {label}: B was timed on it, A was not" for label in lost]
        ratios = {label: self.ratio([label]) for label in common}
        ratios |= {"all cases together": self.ratio(common)} if common else {}
        for what, ratio in ratios.items():
            if ratio.regressed(percent):
                lo, hi = ratio.ci99
                found.append(f"{about}, {what}: {ratio.ratio:.4f} (99 %: {lo:.4f}..{hi:.4f})")
        return found


def choose(name: str, words: str, results: Path) -> Chosen:
    """Return the newest runs of the records that `words` name, the argument `name`. ValueError: they name none, or a
    word is neither a file nor KEY=VALUE. StorageError: a file cannot be read.
    """
    given = [words] if Path(words).is_file() else words.split()
    wanted = dict(word.split("=", 1) for word in given if not Path(word).is_file() and "=" in word)
    files = [Path(word) for word in given if Path(word).is_file()]
    odd = [word for word in given if not Path(word).is_file() and word.partition("=")[0] not in KEYS]
    if odd or not given:
        raise ValueError(
            f"{name} must be a file of records, or words {', '.join(f'{key}=' for key in KEYS)}, got "
            f"{odd[0] if odd else words!r}"
        )
    records, complaints = [], []
    for file in files:
        with record.storing(file):
            found, said = record.parse(file.read_bytes(), file.name)
        records += [one for one in found if _fits(one, wanted, "")]
        complaints += said
    folders = [] if files else [one for one in sorted(results.glob("*")) if wanted.get("machine", one.name) == one.name]
    for folder in folders:
        held = [record.contents_of(file, results) for file in record.files(folder)]
        records += [one for one in record.records_of(held) if _fits(one, wanted, folder.name)]
        complaints += [said for one in held for said in one.complaints]
    chosen = Chosen(words, _newest(records), complaints)
    if not chosen.runs:
        where = f" in {results}" if not files else ""
        unread = f"; {complaints[0]}" if complaints else ""
        raise ValueError(f"{name}: no timed benchmark record matches {words!r}{where}{unread}")
    return chosen


def _fits(one: dict, wanted: dict[str, str], machine: str) -> bool:
    said = {**one, "run": one["run_id"], "machine": machine or wanted.get("machine", "")}
    return all(
        str(said.get(key) or "").startswith(value) if key == "commit" else said.get(key) == value
        for key, value in wanted.items()
    )


def _newest(records: list[dict]) -> dict[Key, Run]:
    groups: dict[Key, list[dict]] = {}
    for one in ranking.timed(records):
        groups.setdefault((one["problem"], one["target"], one["variant"]), []).append(one)
    found = {}
    for key, its in groups.items():
        last = [one for one in its if one["run_id"] == its[-1]["run_id"]]
        found[key] = Run(key[2], {ranking.case_label(one["case"]): one for one in last})
    return found


def pairs(a: Chosen, b: Chosen) -> list[Pair]:
    """Return what both have: each variant with itself, or, of a problem and target where each has one, these two.
    ValueError: nothing.
    """
    found = []
    for problem, target in dict.fromkeys(key[:2] for key in a.runs):
        ones, others = (_variants(chosen, problem, target) for chosen in (a, b))
        both = [name for name in ones if name in others]
        if both:
            found += [Pair(problem, target, ones[name], others[name]) for name in both]
        elif len(ones) == len(others) == 1:
            found.append(Pair(problem, target, *ones.values(), *others.values()))
    found = [pair for pair in found if pair.common or pair.failed]
    if not found:
        raise ValueError(
            f"A and B have nothing in common: give each one variant of a problem, timed on the same cases. "
            f"A has {a.named()}; B has {b.named()}"
        )
    return found


def _variants(chosen: Chosen, problem: str, target: str) -> dict[str, Run]:
    return {key[2]: run for key, run in chosen.runs.items() if key[:2] == (problem, target)}


def _shown(ratio: Ratio) -> str:
    return f"{ratio.ratio:.4f} ({ratio.ci95[0]:.4f}..{ratio.ci95[1]:.4f})"
