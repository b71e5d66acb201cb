"""Latency records (problems/dsv4_forward/latency.py writes them): time per decode token, eager and as a replayed graph.

They lie in RESULTS/<machine>/<problem>/latency.jsonl, one line a measurement. The newest of each configuration counts.
"""

from pathlib import Path

from harness.results import record, text
from leaderboard.tables import Table

FILE = "latency.jsonl"
SHOWN = ("config", "format", "batch", "context")  # what a measurement is of


def read(results: Path, machines: list[str], problems: list[str]) -> tuple[dict[str, list[dict]], list[str]]:
    """-> (records by "problem on machine", complaints). problems: the names wanted; empty means all.

    Within a problem: each configuration's newest record, in the order in which configurations first came.
    """
    found, complaints = {}, []
    for machine in machines:
        for file in sorted((results / machine).glob(f"*/{FILE}")):
            if problems and file.parent.name not in problems:
                continue
            newest: dict[tuple, dict] = {}
            for number, line in enumerate(file.read_bytes().split(b"\n"), 1):
                try:
                    if line.strip():
                        found_here = record.loads(line)
                        record.check_latency(found_here)
                        newest[tuple(found_here[key] for key in SHOWN)] = found_here
                except ValueError as error:
                    where = f"{machine}/{file.parent.name}/{FILE}:{number}"
                    complaints.append(f"{where}: not a latency record ({text.line(error, 200)}): left out")
            if newest:
                found[f"{file.parent.name} on {machine}"] = list(newest.values())
    return found, complaints


def table(records: list[dict]) -> Table:
    """Header and rows, times in ms. The share is the floor's, of the graph's time."""
    header = ["config", "format", "B", "context", "eager ms", "graph ms", "floor ms", "of floor", "launches", "state"]
    rows = [
        [
            *(str(record[key]) for key in SHOWN),
            *(f"{record[key]:.3g}" for key in ("eager_ms", "graph_ms", "floor_ms")),
            f"{record['floor_ms'] / record['graph_ms']:.1%}".replace("%", " %"),
            str(record["graph_launches"]),
            _state(record),
        ]
        for record in records
    ]
    return header, rows


def notes(records: list[dict]) -> list[str]:
    commits = sorted({record["commit"][:12] or "unknown" for record in records})
    filled = sorted({name for record in records for name in record["kernels"].values() if name != "reference"})
    return [
        "Time per decode step of B sequences, median; eager on the host's clock, and one replayed graph a step. The "
        "floor is the least memory traffic at the datasheet's bandwidth. A state other than ok names the check that "
        f"failed. Kernels in buffers: {', '.join(filled) or 'none'}; commit {', '.join(commits)}."
    ]


def _state(record: dict) -> str:
    """ok, or the checks that say something: False, or what was wrong."""
    said = [name for name, found in record["checks"].items() if found is False or (found is not True and found)]
    return "ok" if record["ok"] else "; ".join(said)
