"""Compare records that were taken in different runs: .venv/bin/python leaderboard/compare.py A B

A and B are each a file of records (JSON lines, as harness/run.py --json writes them), a selection of the committed ones
("variant=sm90_dp4a machine=nvidia-h200"), or both in one argument. A is what is looked at, B what it is compared with.
The runs are not interleaved, so the ratio holds what differs between them too; for pairs use harness/run.py --against.
"""

from __future__ import annotations  # until `venv.enter`, Python 3.8 must do

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a script, from anywhere

from harness.results import output  # noqa: E402
from leaderboard import command  # noqa: E402

if TYPE_CHECKING:
    from harness.results.stats import Ratio

NAME = "leaderboard/compare.py"
KEYS = ("problem", "variant", "target", "machine", "run", "commit")
HELP = """A and B: a file of records, or words that choose records: problem=, variant=, target=, machine=, run=, commit=
(its first digits), as in "old.jsonl variant=cpu_avx2". Without a file they choose from leaderboard/results."""
# Of the runs' records and their environment, what is told where it differs.
TOLD = [
    *("commit", "source_hash", "problem_hash", "harness_hash"),
    *("gpu", "cpu", "driver", "cuda", "torch", "triton", "cute_dsl"),
]
Key = tuple[str, ...]  # problem, target, variant
Run = dict[str, dict]  # a variant's newest run in a selection: its benchmark records by the case's label


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0; 2 for bad use, unreadable files or nothing to compare; with --fail-on-regression 8 for one, and
    that of harness/run.py for a run of A that failed.
    """
    parser = output.Parser(NAME, description="Compare records of different runs, unpaired.", epilog=HELP)
    parser.add_argument("a", metavar="A", help="what is looked at")
    parser.add_argument("b", metavar="B", help="what it is compared with")
    parser.add_argument(
        "--fail-on-regression",
        type=output.Value(float, "0 or more, in percent"),
        metavar="PERCENT",
        help="exit code 8 if the 99 %% interval of a case, or of all together, is over 1 + PERCENT %%",
    )
    parser.add_argument("--results", type=Path, default=ROOT / "leaderboard" / "results", metavar="DIR")
    options = parser.parse_args(arguments)
    percent = options.fail_on_regression
    if percent is not None and not 0 <= percent < math.inf:
        parser.error(f"--fail-on-regression must be 0 or more, in percent, got {percent}")
    return command.run(NAME, lambda: _compare(options, percent))


def _compare(options: argparse.Namespace, percent: float | None) -> int:
    """ValueError: there is nothing to compare."""
    from harness.judge import verdict
    from harness.results import stats

    chosen = [_choose(name, words, options.results) for name, words in (("A", options.a), ("B", options.b))]
    slower, failed = [], []
    for (problem, target), a, b in _pairs(*chosen):
        failed += [record["status"] for record in a.values() if record["status"] != "PASSED"]
        both = {case: (_samples(a, case), _samples(b, case)) for case in a if _samples(a, case) and _samples(b, case)}
        ratios = {case: stats.compare_unpaired([samples]) for case, samples in both.items()}
        whole = stats.compare_unpaired(list(both.values())) if both else None
        output.say(f"{problem}, {target}: time of A / time of B; below 1 A is faster")
        output.say("\n".join(_lines(a, b, ratios, whole)) + "\n\n")
        about = f"{problem}, {next(iter(a.values()))['variant']}"
        missing = [case for case in b if _samples(b, case) and case not in ratios]
        slower += [f"{about}, {case}: B was timed on it, A was not" for case in missing]
        for case, ratio in {**ratios, **({"all cases together": whole} if whole else {})}.items():
            if ratio.regressed(percent or 0):
                slower.append(f"{about}, {case}: {ratio.ratio:.4f} (99 %: {ratio.ci99[0]:.4f}..{ratio.ci99[1]:.4f})")
    if percent is None:
        return 0
    for regression in slower:
        output.say(f"regression of more than {percent:g} %: {regression}")
    if not slower:
        output.say(f"no regression of more than {percent:g} % is shown")
    return (verdict.exit_code(failed, everything=True) if failed else 0) or (verdict.REGRESSION_EXIT if slower else 0)


def _choose(name: str, words: str, results: Path) -> dict[Key, Run]:
    """Return by problem, target and variant the newest run of the records that `words` name, the argument `name`.
    ValueError: they name none, or a word is neither a file nor KEY=VALUE. StorageError: a file cannot be read.
    """
    from harness.results import ranking, record

    chosen = [words] if Path(words).is_file() else words.split()
    files = [Path(word) for word in chosen if Path(word).is_file()]
    wanted = dict(word.partition("=")[::2] for word in chosen if not Path(word).is_file())
    if not chosen or not wanted.keys() <= set(KEYS):
        odd = next((word for word in chosen if word.partition("=")[0] in wanted.keys() - set(KEYS)), words)
        keys = ", ".join(f"{key}=" for key in KEYS)
        raise ValueError(f"{name} must be a file of records, or words {keys}, got {odd!r}")
    by_machine = {"": [record.contents_of(file, file.parent) for file in files]}
    for folder in [] if files else sorted(results.glob(wanted.get("machine", "*"))):
        by_machine[folder.name] = [record.contents_of(file, results) for file in record.files(folder)]
    complaints = [complaint for its in by_machine.values() for contents in its for complaint in contents.complaints]
    for complaint in complaints:
        output.complain(f"{NAME}: {complaint}")

    def fits(entry: dict, machine: str) -> bool:
        values = {**entry, "run": entry["run_id"], "machine": machine or wanted.get("machine")}
        values["commit"] = str(entry.get("commit") or "")[: len(wanted.get("commit", ""))]
        return all(values.get(key) == value for key, value in wanted.items())

    records = [entry for at, its in by_machine.items() for entry in record.records_of(its) if fits(entry, at)]
    runs: dict[Key, Run] = {}
    for entry in ranking.timed(records):  # the newest last
        run = runs.setdefault((entry["problem"], entry["target"], entry["variant"]), {})
        if any(other["run_id"] != entry["run_id"] for other in run.values()):
            run.clear()
        run[ranking.case_label(entry["case"])] = entry
    if not runs:
        where = "; ".join([f" in {results}" if not files else "", *complaints[:1]])
        raise ValueError(f"{name}: no timed benchmark record matches {words!r}{where}")
    return runs


def _pairs(a: dict[Key, Run], b: dict[Key, Run]) -> list[tuple[Key, Run, Run]]:
    """Return what both have: variants with themselves, or the only one of each of a target. ValueError: nothing."""
    matched = []
    for board in dict.fromkeys(key[:2] for key in a):
        ones, others = ({key[2]: run for key, run in side.items() if key[:2] == board} for side in (a, b))
        pairs = [(ones[name], others[name]) for name in ones if name in others]
        if not pairs and len(ones) == len(others) == 1:
            pairs = [(*ones.values(), *others.values())]
        for run_a, other in pairs:
            if any(_samples(other, case) or run["status"] != "PASSED" for case, run in run_a.items()):
                matched.append((board, run_a, other))
    if not matched:
        has = [", ".join(" ".join(key) for key in sorted(side)) for side in (a, b)]
        wanted = "give each one variant of a problem, timed on the same cases"
        raise ValueError(f"A and B have nothing in common: {wanted}. A has {has[0]}; B has {has[1]}")
    return matched


def _samples(run: Run, case: str) -> list[list[float]]:
    """The times of a case by process in us; [] where it was not timed, or failed."""
    record = run.get(case) or {}
    return (record.get("samples_us") or []) if record.get("status") == "PASSED" else []


def _lines(a: Run, b: Run, ratios: dict[str, Ratio], whole: Ratio | None) -> list[str]:
    """What A and B are and what is known to differ; then a line a case with both times in us and their ratio."""
    from harness.results import text
    from leaderboard import terminal

    def time(run: Run, case: str) -> str:
        record = run.get(case) or {"status": "-"}
        return text.us(record["median_us"]) if _samples(run, case) else record["status"]

    firsts, lines = [next(iter(run.values())) for run in (a, b)], []
    sides = [{**(record.get("environment") or {}), **record} for record in firsts]
    for name, side in zip("AB", sides, strict=True):
        machine = side.get("cpu" if side["target"] == "cpu" else "gpu") or "an unknown machine"
        commit = str(side.get("commit") or "of no known commit")[:12] + (" with changes" if side.get("dirty") else "")
        run = f"{side['variant']}, run {side['run_id']} of {side['time'][:16]} on {machine}, commit {commit}"
        lines.append(text.line(f"  {name}: {run}"))
    differ = [key for key in TOLD if all(side.get(key) for side in sides) and sides[0][key] != sides[1][key]]
    if sides[0]["variant"] != sides[1]["variant"]:
        differ = [key for key in differ if key != "source_hash"]
    same = sides[0]["run_id"] == sides[1]["run_id"]
    when = "one run, but not its pairs" if same else ", ".join(["runs at other times", *differ])
    lines.append(f"  UNPAIRED: {when}. The intervals (95 %) have the scatter within each run, not what differs")
    every = list({**a, **b})
    some = f" of {len(ratios)} of {len(every)} cases" if len(ratios) < len(every) else ""
    rows = [("case", "A us", "B us", "A / B")]
    rows += [(case, time(a, case), time(b, case), _shown(ratios.get(case))) for case in every]
    rows += [(f"geomean{some}", "", "", _shown(whole))] if whole else []
    return lines + [f"  {line.rstrip()}" for line in terminal.aligned(rows, ("case", "A / B"))]


def _shown(ratio: Ratio | None) -> str:
    return f"{ratio.ratio:.4f} ({ratio.ci95[0]:.4f}..{ratio.ci95[1]:.4f})" if ratio else ""


if __name__ == "__main__":
    sys.exit(output.script(main))
