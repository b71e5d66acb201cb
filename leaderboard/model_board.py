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
datasheet's rates; of several GPUs that of the busiest, and the time is the first one's."""


def steps(records: Iterable[dict], machine: str) -> Steps:
    """The newest record of each case of a problem on a target, in the order in which cases first came."""
    cases: dict[str, dict[str, dict]] = {}
    for record in records:
        if record["kind"] == "latency":
            cases.setdefault(title(record, machine), {})[repr(record["case"])] = record
    return {name: list(newest.values()) for name, newest in cases.items()}


def title(record: dict, machine: str) -> str:
    """The section that a record is in; a model that several GPUs share has one of its own."""
    several = ", the whole model" if "gpus" in (record["case"] or {}) else ""
    return f"{record['problem']}, {record['target']}{several}, on {machine}" if record["kind"] == "latency" else ""


def section(title: str, records: list[dict], known: Provenance, cases: bool) -> Section:
    """All that is shown of a model on a machine. cases: also where the time of a step goes."""
    titled = [("", table(records, known))]
    titled += (
        [("Where the time of a step goes:", breakdown(records)), ("What fills each op:", ops(records))] if cases else []
    )
    commits = sorted({(record.get("commit") or "")[:12] or "unknown" for record in records})
    notes = [" ".join(NOTE.split()), f"Commits: {', '.join(commits)}."]
    return Section(f"{title}: time per decode step", [], [part for part in titled if part[1].rows], notes)


def table(records: list[dict], known: Provenance) -> Table:
    """A row per case, times in us. % of SOL: the speed of light's time / the graph's, or a prefill's eager one."""
    remarks = [_remarks(record) for record in records]
    columns = {name: [_field(record, name) for record in records] for name in _fields(records)} | {
        "eager us": [text.us(number(record.get("eager_us"))) for record in records],
        "graph us": [text.us(graph_us(record)) for record in records],
        "in a row us": [text.us(number(record.get("row_us"))) for record in records],
        "each GPU us": [_each_gpu(record) for record in records],
        "tokens/s": [f"{rate:,.0f}" if (rate := tokens_a_second(record)) > 0 else "" for record in records],
        "SOL us": [text.us(number(record.get("sol_us"))) for record in records],
        "% of SOL": [tables.percent(share(record)) for record in records],
        "launches": [
            str(its.get("graph", its.get("eager", ""))) for its in (record.get("launches") or {} for record in records)
        ],
        "source": [known.state(record) for record in records],
        "state": ["; ".join(its) or "ok" for its in remarks],
    }
    if not any(columns["each GPU us"]):
        del columns["each GPU us"]
    below = [
        its + provenance.stale(record["problem"], record["variant"], source)
        for its, record, source in zip(remarks, records, columns["source"], strict=True)
    ]
    kinds = ["" if record["status"] == "PASSED" else "failed" for record in records]
    return Table(list(columns), list(map(list, zip(*columns.values(), strict=True))), WORDS, kinds, below)


def _each_gpu(record: dict) -> str:
    return " / ".join(map(text.us, (record.get("gpus") or {}).get("median_us", [])))


def _remarks(record: dict) -> list[str]:
    failed = record["status"] != "PASSED"
    remarks = [f"{record['status']}: {text.line(record.get('reason') or '', tables.REASON)}"] if failed else []
    return remarks + provenance.warnings([record])


def _fields(records: Iterable[dict]) -> list[str]:
    return list(dict.fromkeys(name for record in records for name in record["case"] or {}))


def _field(record: dict, name: str) -> str:
    return text.line((record["case"] or {}).get(name, ""), tables.REASON)


def is_step(record: dict) -> bool:
    """Whether a record is of a decode step of one sequence, with the kernels that the model chooses."""
    case = record["case"] or {}
    return case.get("batch") == 1 and not {"new", "early", "kernels"} & set(case) and record["status"] != "UNSUPPORTED"


def leaders(steps: Steps, known: Provenance | None = None) -> list[list[str]]:
    """The rows of tables.leaders for a step of one sequence of each model, the first context that is recorded of it: no
    baseline is timed there. known: of their sources, which takes seconds to tell; without it that column is empty.
    """
    rows: dict[str, list[str]] = {}
    for title, records in steps.items():
        problem, _, machine = title.partition(", on ")
        for record in filter(is_step, records):
            named = {name: f"{value} GPUs" if name == "gpus" else value for name, value in record["case"].items()}
            config = ", ".join(str(value) for name, value in named.items() if name not in ("batch", "context"))
            time, of_sol = f"{text.us(number(record.get('median_us')))} us", f"{tables.percent(share(record))} of SOL"
            if f"{title} {config}" not in rows:
                source = known.state(record) if known else ""
                line = [f"{problem}, {config}, a token", record["variant"], time, of_sol, "", machine, source]
                rows[f"{title} {config}"] = line
    return list(rows.values())


def graph_us(record: dict) -> float:
    """The time of a record's graph; NaN where it has none."""
    return number(record.get("median_us")) if "graph" in (record.get("launches") or {"graph": 0}) else math.nan


def tokens_a_second(record: dict) -> float:
    """Tokens of all sequences of a record's batch, that a second computes; NaN where that is not known."""
    case, us = record["case"] or {}, number(record.get("median_us"))
    return 1e6 * number(case.get("batch")) * case.get("new", 1) / us if us > 0 else math.nan


def components(record: dict) -> dict[str, float]:
    """us of a record's step by op, of what is in no op, and of the gaps. {} where the record does not say."""
    measured = record.get("breakdown") or {}
    us = {name or OUTSIDE: number(part.get("us")) for name, part in (measured.get("ops") or {}).items()}
    return us | {GAPS: number(measured.get("gaps_us"))} if us else {}


def breakdown(records: list[dict]) -> Table:
    """A row per case and op: us, launches and share of the step, the longest first."""
    names, rows = _fields(records), []
    for record in records:
        measured = record.get("breakdown") or {}
        span = number(measured.get("span_us"))
        for op, part in (measured.get("ops") or {}).items():
            us = number(part.get("us"))
            figures = [text.us(us), str(part.get("launches") or ""), tables.percent(us / span) if span > 0 else ""]
            named = text.line(op, tables.REASON) or OUTSIDE
            rows.append([*(_field(record, name) for name in names), named, *figures])
    return Table([*names, "op", "us", "launches", "% of step"], rows, WORDS)


def ops(records: list[dict]) -> Table:
    """What fills each op of a model, in each of its cases that differ."""
    filled: dict[str, dict[str, None]] = {}
    for record in records:
        for op, kernel in (record.get("kernels") or {}).items():
            filled.setdefault(op, {})[text.line(kernel or "", 80)] = None
    return Table(["op", "filled by"], [[op, ", ".join(kernels)] for op, kernels in filled.items()], WORDS)


def share(record: dict) -> float:
    """The share of the speed of light that a record's graph reaches; NaN where one of the two is not known."""
    graph = number(record.get("median_us"))
    return number(record.get("sol_us")) / graph if graph > 0 else math.nan
