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


def steps(records: Iterable[dict], machine: str) -> Steps:
    """The newest record of each case of a problem on a target, in the order in which cases first came."""
    found: dict[str, dict[str, dict]] = {}
    for one in records:
        if one["kind"] == "latency":
            of_title = found.setdefault(f"{one['problem']}, {one['target']}, on {machine}", {})
            of_title[repr(one["case"])] = one
    return {title: list(newest.values()) for title, newest in found.items()}


def table(records: list[dict], known: Provenance) -> Table:
    """Header and rows, times in us. % of SOL: the speed of light's time / the graph's, or a prefill's eager one."""
    names = list(dict.fromkeys(name for one in records for name in one["case"] or {}))
    header = [
        *names,
        "eager us",
        "graph us",
        "in a row us",
        "tokens/s",
        "SOL us",
        "% of SOL",
        "launches",
        "source",
        "state",
    ]
    rows = []
    for one in records:
        case = one["case"] or {}
        row = [text.line(case.get(name, ""), tables.REASON) for name in names]
        row += [tables.us(us) for us in (number(one.get("eager_us")), graph_us(one), number(one.get("row_us")))]
        row += [f"{rate:,.0f}" if (rate := tokens_a_second(one)) > 0 else "", tables.us(number(one.get("sol_us")))]
        row += [tables.percent(share(one)), launches(one), known.state(one)]
        rows.append([*row, state(one, known)])
    return header, rows


def winners(steps: Steps, known: Provenance) -> list[list[str]]:
    """The rows of tables.winners for a step of one sequence of each model, the first context that is recorded of it: no
    baseline is timed there.
    """
    rows = []
    for title, records in steps.items():
        problem, _, machine = title.partition(", on ")
        seen = set()
        for one in records:
            case = one["case"] or {}
            other = {"new", "early", "kernels"} & set(case)
            if case.get("batch") == 1 and not other and one["status"] != "UNSUPPORTED":
                what = ", ".join(str(value) for name, value in case.items() if name not in ("batch", "context"))
                if what in seen:
                    continue
                seen.add(what)
                time = f"{tables.us(number(one.get('median_us')))} us"
                rows.append(
                    [
                        f"{problem}, {what}, a token",
                        one["variant"],
                        time,
                        f"{tables.percent(share(one))} of SOL",
                        "",
                        machine,
                        known.state(one),
                    ]
                )
    return rows


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
    """Header and rows: of each case us, launches and share of every op, the longest first."""
    names = list(dict.fromkeys(name for one in records for name in one["case"] or {}))
    header, rows = [*names, "op", "us", "launches", "% of step"], []
    for one in records:
        found = one.get("breakdown") or {}
        span = number(found.get("span_us"))
        case = [text.line((one["case"] or {}).get(name, ""), tables.REASON) for name in names]
        for op, part in (found.get("ops") or {}).items():
            us = number(part.get("us"))
            rows.append(
                [
                    *case,
                    text.line(op, tables.REASON) or OUTSIDE,
                    tables.us(us),
                    str(part.get("launches") or ""),
                    tables.percent(us / span) if span > 0 else "",
                ]
            )
    return header, rows


def layers(records: list[dict]) -> Table:
    """Header and rows: us a layer, from two cases that differ in their number of layers only (flash-4l256e and
    flash-8l256e): the difference of their times, and of their SOL, by that of their layers.
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
        rows.append(
            [
                config,
                *values,
                f"{fewest} and {most}",
                tables.us(us),
                tables.us(row),
                tables.us(sol),
                tables.percent(sol / us) if us > 0 else "",
            ]
        )
    return header, rows


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
    said = (
        [] if one["status"] == "PASSED" else [f"{one['status']}: {text.line(one.get('reason') or '', tables.REASON)}"]
    )
    said += [PROBLEM_CHANGED] if known.problem_changed(one) else []
    return "; ".join([*said, *provenance.warnings([one])]) or "ok"
