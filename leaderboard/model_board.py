"""Latency records (harness/tools/latency.py writes them): time per decode step, eager and as a replayed graph, what
of it each op takes, and the tokens of a prefill.

They are in a machine's files beside the others, of kind latency. The newest of each case counts.
"""

import math
from collections.abc import Iterable

from harness.results import text
from leaderboard import provenance, tables
from leaderboard.board import number
from leaderboard.provenance import Provenance
from leaderboard.tables import Section, Table

Steps = dict[str, list[dict]]  # by the table's title
GAPS, OUTSIDE = "gaps between kernels", "outside of ops"
WORDS = {"config", "format", "source", "state", "op", "filled by"}  # columns that are no numbers
NOTE = """Times are medians by the host's clock of a decode step of a batch of sequences, eager and as one replayed CUDA
graph; a case with new tokens is a prefill, without a graph. SOL is the least memory traffic, or the arithmetic, at the
datasheet's rates."""


def steps(records: Iterable[dict], machine: str) -> Steps:
    """The newest record of each case of a problem on a target, in the order in which cases first came."""
    found: dict[str, dict[str, dict]] = {}
    for one in records:
        if one["kind"] == "latency":
            found.setdefault(title(one, machine), {})[repr(one["case"])] = one
    return {name: list(newest.values()) for name, newest in found.items()}


def title(one: dict, machine: str) -> str:
    return f"{one['problem']}, {one['target']}, on {machine}" if one["kind"] == "latency" else ""


def section(title: str, records: list[dict], known: Provenance, cases: bool) -> Section:
    """All that is shown of a model on a machine. cases: also where the time of a step goes."""
    found = [("", table(records, known))]
    found += (
        [("Where the time of a step goes:", breakdown(records)), ("What fills each op:", ops(records))] if cases else []
    )
    commits = sorted({(one.get("commit") or "")[:12] or "unknown" for one in records})
    notes = [" ".join(NOTE.split()), f"Commits: {', '.join(commits)}."]
    return Section(f"{title}: time per decode step", [], [one for one in found if one[1].rows], notes)


def table(records: list[dict], known: Provenance) -> Table:
    """A row per case, times in us. % of SOL: the speed of light's time / the graph's, or a prefill's eager one."""
    said = [_remarks(one) for one in records]
    columns = {name: [_field(one, name) for one in records] for name in _fields(records)} | {
        "eager us": [text.us(number(one.get("eager_us"))) for one in records],
        "graph us": [text.us(graph_us(one)) for one in records],
        "in a row us": [text.us(number(one.get("row_us"))) for one in records],
        "tokens/s": [f"{rate:,.0f}" if (rate := tokens_a_second(one)) > 0 else "" for one in records],
        "SOL us": [text.us(number(one.get("sol_us"))) for one in records],
        "% of SOL": [tables.percent(share(one)) for one in records],
        "launches": [
            str(its.get("graph", its.get("eager", ""))) for its in (one.get("launches") or {} for one in records)
        ],
        "source": [known.state(one) for one in records],
        "state": ["; ".join(its) or "ok" for its in said],
    }
    below = [
        its + provenance.stale(one["problem"], one["variant"], source)
        for its, one, source in zip(said, records, columns["source"], strict=True)
    ]
    kinds = ["" if one["status"] == "PASSED" else "failed" for one in records]
    return Table(list(columns), list(map(list, zip(*columns.values(), strict=True))), WORDS, kinds, below)


def _remarks(one: dict) -> list[str]:
    failed = one["status"] != "PASSED"
    said = [f"{one['status']}: {text.line(one.get('reason') or '', tables.REASON)}"] if failed else []
    return said + provenance.warnings([one])


def _fields(records: Iterable[dict]) -> list[str]:
    return list(dict.fromkeys(name for one in records for name in one["case"] or {}))


def _field(one: dict, name: str) -> str:
    return text.line((one["case"] or {}).get(name, ""), tables.REASON)


def is_step(one: dict) -> bool:
    """Whether a record is of a decode step of one sequence, with the kernels that the model chooses."""
    case = one["case"] or {}
    return case.get("batch") == 1 and not {"new", "early", "kernels"} & set(case) and one["status"] != "UNSUPPORTED"


def leaders(steps: Steps, known: Provenance | None = None) -> list[list[str]]:
    """The rows of tables.leaders for a step of one sequence of each model, the first context that is recorded of it: no
    baseline is timed there. known: of their sources, which takes seconds to tell; without it that column is empty.
    """
    rows: dict[str, list[str]] = {}
    for title, records in steps.items():
        problem, _, machine = title.partition(", on ")
        for one in filter(is_step, records):
            what = ", ".join(str(value) for name, value in one["case"].items() if name not in ("batch", "context"))
            time, of_sol = f"{text.us(number(one.get('median_us')))} us", f"{tables.percent(share(one))} of SOL"
            if f"{title} {what}" not in rows:
                source = known.state(one) if known else ""
                line = [f"{problem}, {what}, a token", one["variant"], time, of_sol, "", machine, source]
                rows[f"{title} {what}"] = line
    return list(rows.values())


def graph_us(one: dict) -> float:
    """The time of a record's graph; NaN where it has none."""
    return number(one.get("median_us")) if "graph" in (one.get("launches") or {"graph": 0}) else math.nan


def tokens_a_second(one: dict) -> float:
    """Tokens of all sequences of a record's batch, that a second computes; NaN where that is not known."""
    case, us = one["case"] or {}, number(one.get("median_us"))
    return 1e6 * number(case.get("batch")) * case.get("new", 1) / us if us > 0 else math.nan


def components(one: dict) -> dict[str, float]:
    """us of a record's step by op, of what is in no op, and of the gaps. {} where the record does not say."""
    found = one.get("breakdown") or {}
    said = {name or OUTSIDE: number(part.get("us")) for name, part in (found.get("ops") or {}).items()}
    return said | {GAPS: number(found.get("gaps_us"))} if said else {}


def breakdown(records: list[dict]) -> Table:
    """A row per case and op: us, launches and share of the step, the longest first."""
    names, rows = _fields(records), []
    for one in records:
        found = one.get("breakdown") or {}
        span = number(found.get("span_us"))
        for op, part in (found.get("ops") or {}).items():
            us = number(part.get("us"))
            figures = [text.us(us), str(part.get("launches") or ""), tables.percent(us / span) if span > 0 else ""]
            named = text.line(op, tables.REASON) or OUTSIDE
            rows.append([*(_field(one, name) for name in names), named, *figures])
    return Table([*names, "op", "us", "launches", "% of step"], rows, WORDS)


def ops(records: list[dict]) -> Table:
    """What fills each op of a model, in each of its cases that differ."""
    filled: dict[str, dict[str, None]] = {}
    for one in records:
        for op, what in (one.get("kernels") or {}).items():
            filled.setdefault(op, {})[text.line(what or "", 80)] = None
    return Table(["op", "filled by"], [[op, ", ".join(found)] for op, found in filled.items()], WORDS)


def share(one: dict) -> float:
    """The share of the speed of light that a record's graph reaches; NaN where one of the two is not known."""
    graph = number(one.get("median_us"))
    return number(one.get("sol_us")) / graph if graph > 0 else math.nan
