"""Whether the sources that a record is about are those of this checkout. Nothing is compiled for it.

docs/records.md says what the hashes of sources and of machine code cover.
"""

import functools
import re
from collections.abc import Iterable
from pathlib import Path

import yaml

from harness.problem import sources
from harness.results import text
from problems.common import build, load

MATCH, SAME_CODE, CHANGED = "match", "same code", "changed since"
STATES = (CHANGED, SAME_CODE, MATCH)  # the worst first: a row of several records has the worst of theirs
PROBLEM_CHANGED = "the problem has changed since it ran"  # its cases, tolerances, task or reference
THROTTLED = "the GPU's clocks were throttled"
UNSCORED = r"(\d+) calls have no score: the judge's clock"
# Of a file that cannot be read, by harness/problem/sources.py; a BuildError is a RuntimeError.
ERRORS = (ValueError, SyntaxError, OSError, RuntimeError, yaml.YAMLError)

Key = tuple[str, str, str]  # problem, variant, target


class Provenance:
    """What is known of the sources of records. records: any, also of other boards: they tell what machine code the
    sources of this checkout compile to. builds: whether the builds of this checkout tell that too; what is committed
    must not depend on them.
    """

    def __init__(self, records: Iterable[dict] = (), builds: bool = True) -> None:
        self._builds = builds
        self._codes: dict[tuple[Key, str], set[str]] = {}
        for one in records:
            if one.get("code_hash") and one.get("source_hash"):
                self._codes.setdefault((_key(one), one["source_hash"]), set()).add(one["code_hash"])

    def state(self, one: dict) -> str:
        """Return MATCH, SAME_CODE or CHANGED, which also stands where the checkout has no such variant, or where the
        machine code of its sources is not known.
        """
        folder = load.PROBLEMS / one["problem"]
        now = source_hash(folder, one["variant"])
        if now is None or not one.get("source_hash"):
            return CHANGED
        if one["source_hash"] == now:
            return MATCH
        code = one.get("code_hash")
        if code and code in self._codes.get((_key(one), now), ()):
            return SAME_CODE
        return SAME_CODE if code and self._builds and code == code_hash(folder, *_key(one)[1:]) else CHANGED

    def problem_changed(self, one: dict) -> bool:
        """Return whether it is known that the problem was another one: by its cases, tolerances, task or reference."""
        now = problem_hash(load.PROBLEMS / one["problem"])
        return now is not None and bool(one.get("problem_hash")) and one["problem_hash"] != now


def worst(states: Iterable[str]) -> str:
    """The worst of the states of a row's records; "" where there are none."""
    return min(states, key=STATES.index, default="")


@functools.cache
def source_hash(folder: Path, variant: str) -> str | None:
    """Of a variant of the problem in `folder`; None where there is none, or it cannot be read."""
    file = folder / "variants" / f"{variant}.py"
    try:
        return sources.source_hash(file, folder) if file.is_file() else None
    except ERRORS:
        return None


@functools.cache
def code_hash(folder: Path, variant: str, target: str) -> str | None:
    """Of the same, by the build that an earlier run has left; None where it left none."""
    file = folder / "variants" / f"{variant}.py"
    if not file.is_file() or not (build.directory() / "closures").is_dir():  # no run has left a build
        return None
    from harness.judge import compiling  # imports torch, which takes a second
    from harness.problem import folders

    try:
        return compiling.code_hash(folders.find(str(folder)), file, target)
    except ERRORS:
        return None


@functools.cache
def problem_hash(folder: Path) -> str | None:
    """Of a problem as it is in this checkout; None where it is no folder of ours, or cannot be read."""
    try:
        return sources.problem_hash(folder) if (folder / "task.py").is_file() else None
    except ERRORS:
        return None


def warnings(records: Iterable[dict]) -> list[str]:
    """What the clock warned of in a row's records: each warning once, with the number of cases that have it."""
    records, by_form, left_out = list(records), {}, 0
    for one in records:
        for said in dict.fromkeys(_warned(one)):
            if not (count := re.match(UNSCORED, said)):
                by_form.setdefault(re.sub(r"\d+", "#", said), []).append(said)
            else:
                left_out += int(count[1])
    calls = left_out + sum(one.get("n") or 0 for one in records)
    notes = [f"{left_out} of {calls} calls left out: the judge's clock disagreed with the GPU's"] if left_out else []
    for its in by_form.values():
        where = f" (in {len(its)} of {len(records)} cases)" if len(its) < len(records) else ""
        notes.append(max(its, key=lambda said: (len(said), said)) + where)
    return notes


def _warned(one: dict) -> list[str]:
    said, throttle = (one.get("clock") or {}).get("warnings") or [], one.get("throttle") or []
    said, reasons = (its if isinstance(its, list) else [its] for its in (said, throttle))
    return [text.line(word) for word in said] + [f"{THROTTLED} ({text.line(', '.join(map(str, reasons)))})"] * bool(
        reasons
    )


def _key(one: dict) -> Key:
    return one["problem"], one["variant"], one["target"]
