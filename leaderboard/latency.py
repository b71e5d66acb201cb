"""Latency records (harness/tools/latency.py writes them): time per decode step, eager and as a replayed graph.

They are in a machine's files beside the others, of kind latency. The newest of each case counts.
"""

import math
from collections.abc import Iterable

from harness.results import text
from leaderboard import provenance, tables
from leaderboard.provenance import PROBLEM_CHANGED, Provenance
from leaderboard.tables import Table

Steps = dict[str, list[dict]]  # by the table's title


def steps(records: Iterable[dict], machine: str) -> Steps:
    """The newest record of each case of a problem on a target, in the order in which cases first came."""
    found: dict[str, dict[str, dict]] = {}
    for one in records:
        if one["kind"] == "latency":
            of_title = found.setdefault(f"{one['problem']}, {one['target']}, on {machine}", {})
            of_title[repr(one["case"])] = one
    return {title: list(newest.values()) for title, newest in found.items()}


def table(records: list[dict], known: Provenance) -> Table:
    """Header and rows, times in us. % of SOL: the speed of light's time / the graph's."""
    names = list(dict.fromkeys(name for one in records for name in one["case"] or {}))
    header = [*names, "eager us", "graph us", "SOL us", "% of SOL", "launches", "source", "state"]
    rows = []
    for one in records:
        case = one["case"] or {}
        row = [text.line(case.get(name, ""), tables.REASON) for name in names]
        row += [tables.us(number(one.get(name))) for name in ("eager_us", "median_us", "sol_us")]
        row += [tables.percent(share(one)), str((one.get("launches") or {}).get("graph", "")), known.state(one)]
        rows.append([*row, state(one, known)])
    return header, rows


def winners(steps: Steps, known: Provenance) -> list[list[str]]:
    """The rows of tables.winners for a step of one sequence of each model: no baseline is timed there."""
    rows = []
    for title, records in steps.items():
        problem, _, machine = title.partition(", on ")
        for one in records:
            case = one["case"] or {}
            if case.get("batch") == 1:
                what = ", ".join(str(value) for name, value in case.items() if name not in ("batch", "context"))
                time = f"{tables.us(number(one.get('median_us')))} us"
                rows.append(
                    [f"{problem}, {what}, a token", one["variant"], time, f"{tables.percent(share(one))} of SOL", "",
                     machine, known.state(one)]
                )  # fmt: skip
    return rows


def share(one: dict) -> float:
    """The share of the speed of light that a record's graph reaches; NaN where one of the two is not known."""
    graph = number(one.get("median_us"))
    return number(one.get("sol_us")) / graph if graph > 0 else math.nan


def number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def notes(records: list[dict]) -> list[str]:
    commits = sorted({(one.get("commit") or "")[:12] or "unknown" for one in records})
    used = sorted({name for one in records for name in (one.get("kernels") or {}).values() if name != "reference"})
    return [
        "Time per decode step of a batch of sequences, median in us by the host's clock: eager, and one replayed CUDA "
        "graph a step. SOL is the least memory traffic at the datasheet's bandwidth. A state other than ok names the "
        f"check that failed. Kernels in use: {', '.join(map(str, used)) or 'none'}; commits: {', '.join(commits)}."
    ]


def state(one: dict, known: Provenance) -> str:
    said = (
        [] if one["status"] == "PASSED" else [f"{one['status']}: {text.line(one.get('reason') or '', tables.REASON)}"]
    )
    said += [PROBLEM_CHANGED] if known.problem_changed(one) else []
    return "; ".join([*said, *provenance.warnings([one])]) or "ok"
