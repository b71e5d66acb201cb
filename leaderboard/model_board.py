"""Latency records (harness/tools/latency.py writes them): time per decode step, eager and as a replayed graph, what
of it each op takes, what a layer takes, and the tokens of a prefill.

They are in a machine's files beside the others, of kind latency. The newest of each case counts.
"""

import math
import re
from collections.abc import Iterable

from harness.results import text
from leaderboard import provenance, tables
from leaderboard.provenance import PROBLEM_CHANGED, Provenance
from leaderboard.tables import Table

Steps = dict[str, list[dict]]  # by the table's title
GAPS, OUTSIDE = "gaps between kernels", "outside of ops"
WORDS = {"config", "format", "source", "state"}  # columns that are no numbers


def steps(records: Iterable[dict], machine: str) -> Steps:
    """The newest record of each case of a problem on a target, in the order in which cases first came."""
    found: dict[str, dict[str, dict]] = {}
    for one in records:
        if one["kind"] == "latency":
            found.setdefault(title(one, machine), {})[repr(one["case"])] = one
    return {name: list(newest.values()) for name, newest in found.items()}


def title(one: dict, machine: str) -> str:
    return f"{one['problem']}, {one['target']}, on {machine}" if one["kind"] == "latency" else ""


def table(records: list[dict], known: Provenance) -> Table:
    """A row per case, times in us. % of SOL: the speed of light's time / the graph's, or a prefill's eager one."""
    names = _fields(records)
    header = [*names, "eager us", "graph us", "in a row us", "tokens/s", "SOL us", "% of SOL", "launches"]
    rows = []
    for one in records:
        row = _case(one, names)
        row += [tables.us(us) for us in (number(one.get("eager_us")), graph_us(one), number(one.get("row_us")))]
        row += [f"{rate:,.0f}" if (rate := tokens_a_second(one)) > 0 else "", tables.us(number(one.get("sol_us")))]
        row += [tables.percent(share(one)), launches(one), known.state(one), state(one, known)]
        rows.append(row)
    kinds = ["" if one["status"] == "PASSED" else "failed" for one in records]
    return Table([*header, "source", "state"], rows, WORDS, kinds)


def _fields(records: Iterable[dict]) -> list[str]:
    return list(dict.fromkeys(name for one in records for name in one["case"] or {}))


def _case(one: dict, names: list[str]) -> list[str]:
    return [text.line((one["case"] or {}).get(name, ""), tables.REASON) for name in names]


def winners(steps: Steps, known: Provenance) -> list[list[str]]:
    """The rows of tables.winners for a step of one sequence of each model, the first context that is recorded of it: no
    baseline is timed there.
    """
    rows: dict[str, list[str]] = {}
    for title, records in steps.items():
        problem, _, machine = title.partition(", on ")
        for one in records:
            case = one["case"] or {}
            other = {"new", "early", "kernels"} & set(case)
            if case.get("batch") == 1 and not other and one["status"] != "UNSUPPORTED":
                what = ", ".join(str(value) for name, value in case.items() if name not in ("batch", "context"))
                time, of_sol = f"{tables.us(number(one.get('median_us')))} us", f"{tables.percent(share(one))} of SOL"
                name = f"{problem}, {what}, a token"
                rows.setdefault(f"{title} {what}", [name, one["variant"], time, of_sol, "", machine, known.state(one)])
    return list(rows.values())


def graph_us(one: dict) -> float:
    """The time of a record's graph; NaN where it has none."""
    return number(one.get("median_us")) if "graph" in (one.get("launches") or {"graph": 0}) else math.nan


def launches(one: dict) -> str:
    """Kernels, copies and fills of the graph, or of the eager call where there is none."""
    found = one.get("launches") or {}
    return str(found.get("graph", found.get("eager", "")))


def tokens_a_second(one: dict) -> float:
    """Tokens of all sequences of a record's batch, that a second computes; NaN where that is not known."""
    case, us = one["case"] or {}, number(one.get("median_us"))
    count = number(case.get("batch")) * case.get("new", 1)
    return 1e6 * count / us if us > 0 else math.nan


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
            named, of_step = text.line(op, tables.REASON) or OUTSIDE, tables.percent(us / span) if span > 0 else ""
            rows.append([*_case(one, names), named, tables.us(us), str(part.get("launches") or ""), of_step])
    return Table([*names, "op", "us", "launches", "% of step"], rows, WORDS | {"op"})


def layers(records: list[dict]) -> Table:
    """us a layer, from two cases that differ in their number of layers only (flash-4l256e and flash-8l256e): the
    difference of their times, and of their SOL, by that of their layers.
    """
    found: dict[tuple, dict[int, dict]] = {}
    for one in records:
        case = one["case"] or {}
        if (parts := re.fullmatch(r"(.+)-(\d+)l(\d+e)", str(case.get("config")))) and graph_us(one) > 0:
            rest = {name: value for name, value in case.items() if name != "config"}
            key = (f"{parts[1]}, {parts[3].removesuffix('e')} experts", *rest.items())
            found.setdefault(key, {})[int(parts[2])] = one
    names = list(dict.fromkeys(name for _, *rest in found for name, _ in rest))
    header, rows = ["config", *names, "layers", "us a layer", "in a row", "SOL us a layer", "% of SOL"], []
    for (config, *rest), by_count in found.items():
        if len(by_count) < 2:
            continue
        fewest, most = min(by_count), max(by_count)
        us, row, sol = (
            (number(by_count[most].get(name)) - number(by_count[fewest].get(name))) / (most - fewest)
            for name in ("median_us", "row_us", "sol_us")
        )
        values = [text.line(dict(rest).get(name, ""), tables.REASON) for name in names]
        times = [*map(tables.us, (us, row, sol)), tables.percent(sol / us) if us > 0 else ""]
        rows.append([config, *values, f"{fewest} and {most}", *times])
    return Table(header, rows, WORDS)


def ops(records: list[dict]) -> Table:
    """What fills each op of a model, in each of its cases that differ."""
    filled: dict[str, dict[str, None]] = {}
    for one in records:
        for op, what in (one.get("kernels") or {}).items():
            filled.setdefault(op, {})[text.line(what or "", 80)] = None
    return Table(["op", "filled by"], [[op, ", ".join(found)] for op, found in filled.items()], {"op", "filled by"})


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
        "graph a step; a case with new tokens is a prefill, without a graph. SOL is the least memory traffic, or the "
        "arithmetic, at the datasheet's rates. A state other than ok names the check that failed. Kernels in use: "
        f" {', '.join(map(str, used)) or 'none'}; commits: {', '.join(commits)}."
    ]


def state(one: dict, known: Provenance) -> str:
    failed = one["status"] != "PASSED"
    said = [f"{one['status']}: {text.line(one.get('reason') or '', tables.REASON)}"] if failed else []
    said += [PROBLEM_CHANGED] if known.problem_changed(one) else []
    return "; ".join([*said, *provenance.warnings([one])]) or "ok"
