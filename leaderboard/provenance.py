"""Whether the sources that a record is about are those of this checkout. It needs neither a compiler nor a GPU.

Hashes of sources are computed here; hashes of machine code come from records and from leaderboard/results/code.jsonl,
which `.venv/bin/python leaderboard/code_table.py` completes. docs/records.md says what each hash covers.
"""

import functools
import os
from collections.abc import Iterable
from pathlib import Path

import yaml

from harness.problem import scan, sources
from harness.results import record, schema, text
from problems.common import load

MATCH, SAME_CODE, STALE = "match", "source changed, same code", "stale"
STATES = (STALE, SAME_CODE, MATCH)  # the worst first: a row of several records has the worst of theirs
PROBLEM_CHANGED = "the problem has changed since it ran"  # its cases, tolerances, task or reference
FILE = "code.jsonl"
# Of a file that cannot be read, by harness/problem/sources.py; a BuildError is a RuntimeError.
ERRORS = (ValueError, SyntaxError, OSError, RuntimeError, yaml.YAMLError)

Key = tuple[str, str, str]  # problem, variant, target


class Provenance:
    """What is known of sources and their machine code. lines: of code.jsonl; records: any, also of other boards."""

    def __init__(self, lines: Iterable[dict] = (), records: Iterable[dict] = ()) -> None:
        self._lines: dict[Key, list[dict]] = {}
        self._codes: dict[tuple[Key, str], set[str]] = {}
        for line in lines:
            self._lines.setdefault(_key(line), []).append(line)
            self._learn(line)
        for one in records:
            if has_whole_hash(one):
                self._learn(one)

    def _learn(self, one: dict) -> None:
        if one.get("code_hash"):
            self._codes.setdefault((_key(one), one["source_hash"]), set()).add(one["code_hash"])

    def state(self, one: dict) -> str:
        """MATCH, SAME_CODE or STALE. STALE too where the checkout has no such variant, or nothing is known of it."""
        key, now = _key(one), source_hash(one["problem"], one["variant"])
        ran = {one["source_hash"]} if has_whole_hash(one) else {line["source_hash"] for line in self.lines_of(one)}
        if now is None or not ran:
            return STALE
        if ran == {now}:
            return MATCH
        codes = self._codes.get((key, now), set())
        same = all(codes & self._codes.get((key, source), set()) for source in ran)
        return SAME_CODE if same else STALE

    def problem_changed(self, one: dict) -> bool:
        """Whether it is known that the problem was another one: by its cases, tolerances, task or reference."""
        was = {one["problem_hash"]} if one.get("problem_hash") else {x["problem_hash"] for x in self.lines_of(one)}
        now = problem_hash(one["problem"])
        return now is not None and bool(was) and was != {now}

    def lines_of(self, one: dict) -> list[dict]:
        """The lines of code.jsonl about the sources of a record, by its commit where they say that."""
        found = [line for line in self._lines.get(_key(one), ()) if line["recorded"] == one.get("source_hash")]
        commit = one.get("commit")
        return [line for line in found if commit and line["commit"].startswith(commit)] or found

    def has(self, problem: str, variant: str, target: str, source: str) -> bool:
        """Whether code.jsonl has a line about the sources with this hash."""
        return any(line["source_hash"] == source for line in self._lines.get((problem, variant, target), ()))


def worst(states: Iterable[str]) -> str:
    """The worst of the states of a row's records; "" where there are none."""
    return min(states, key=STATES.index, default="")


def has_whole_hash(one: dict) -> bool:
    """Whether a record's source_hash covers what is shared: in schema 1 and 2 it did not."""
    return bool(one.get("source_hash")) and one.get("schema", schema.SCHEMA) >= 3


def differ(one: dict, other: dict) -> bool:
    """Whether two records of a variant are known to be of different sources: by hashes that cover the same."""
    return one.get("source_hash") != other.get("source_hash") and has_whole_hash(one) == has_whole_hash(other)


def read(results: Path) -> tuple[list[dict], list[str]]:
    """-> (lines of RESULTS/code.jsonl, complaints about what is none)."""
    path = results / FILE
    if os.path.lexists(path) and (odd := record.what_instead(path)):
        return [], [f"{path.name}: {odd}, not a file: left out"]
    return record.parse_lines(path.read_bytes() if path.is_file() else b"", path.name, _line)


def _line(line: bytes) -> dict:
    found = record.loads(line)
    schema.check(found, schema.Code)
    return found


def source_hash(problem: str, variant: str) -> str | None:
    """Of a variant as it is in this checkout; None where there is none, or it cannot be read."""
    return _source_hash(load.PROBLEMS / problem, variant)


def problem_hash(problem: str) -> str | None:
    """Of a problem as it is in this checkout; None where it is no folder of ours, or cannot be read."""
    return _problem_hash(load.PROBLEMS / problem)


@functools.cache
def _source_hash(folder: Path, variant: str) -> str | None:
    file = folder / "variants" / f"{variant}.py"
    try:
        return scan.source_hash(file, folder) if file.is_file() else None
    except ERRORS:
        return None


@functools.cache
def _problem_hash(folder: Path) -> str | None:
    try:
        return sources.problem_hash(folder) if (folder / "task.py").is_file() else None
    except ERRORS:
        return None


def warnings(records: Iterable[dict]) -> list[str]:
    """What the clock warned of in a row's records: each warning once, with the number of cases that have it."""
    found: dict[str, list[str]] = {}
    records = list(records)
    for one in records:
        for said in dict.fromkeys(_warned(one)):
            found.setdefault("".join("#" if char.isdigit() else char for char in said), []).append(said)
    notes = []
    for said in found.values():
        where = f" in {len(said)} of {len(records)} cases" if len(said) < len(records) else ""
        where += ", the largest" if len(set(said)) > 1 else ""
        notes.append(f"warning{where}: {max(said, key=lambda one: (len(one), one))}")
    return notes


def _warned(one: dict) -> list[str]:
    clock, throttle = one.get("clock") or {}, one.get("throttle")
    said = clock.get("warnings") or []
    said = [text.line(word) for word in (said if isinstance(said, list) else [said])]
    reasons = throttle if isinstance(throttle, list) else [throttle] if throttle else []
    return said + ([f"clocks were throttled: {text.line(', '.join(map(str, reasons)))}"] if reasons else [])


def _key(one: dict) -> Key:
    return one["problem"], one["variant"], one["target"]
