"""What the records of all machines say of a variant: whether the sources that a record is about are those of this
checkout, and whether it was right in the model of a GPU (harness/run.py --device model). Nothing is compiled for it.

docs/records.md says what the hashes of sources and of machine code cover.
"""

import functools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import yaml

from harness.problem import sources
from harness.results import ranking, text
from problems.common import load

MATCH, SAME_CODE, PROBLEM_CHANGED, CHANGED = "match", "same code", "problem changed", "changed since"
# The worst first: a row of several records has the worst of theirs.
STATES = (CHANGED, PROBLEM_CHANGED, SAME_CODE, MATCH)
STALE, ELSEWHERE = "stale: the code has changed since", "its source is not in this checkout"
OTHER_PROBLEM = "problem changed: its code is the same, the cases, tolerances, task or reference are not"
# Of a file that cannot be read, by harness/problem/sources.py; a BuildError is a RuntimeError.
ERRORS = (ValueError, SyntaxError, OSError, RuntimeError, yaml.YAMLError)

Key = tuple[str, str, str]  # problem, variant, target


class Provenance:
    """What `records` say of variants: machine code of sources, what ran on a GPU, what the model found."""

    def __init__(self, records: Iterable[dict] = ()) -> None:
        self._codes: dict[tuple[Key, str], set[str]] = {}
        self._ran: set[Key] = set()
        self._checks: dict[tuple[Key, str], dict[str, dict]] = {}
        for record in sorted(records, key=lambda record: record["time"]):
            key, source = _key(record), record.get("source_hash") or ""
            if record.get("code_hash") and source:
                self._codes.setdefault((key, source), set()).add(record["code_hash"])
            if record["kind"] in ranking.JUDGED and record["status"] != "UNSUPPORTED":
                self._ran.add(key)
            if record["kind"] == "model":
                self._checks.setdefault((key, source), {})[ranking.case_label(record["case"])] = record

    def state(self, rec: dict) -> str:
        """Return MATCH or SAME_CODE where the code that ran is the checkout's, by source or machine code; of these
        PROBLEM_CHANGED where the problem is known to have been another one. Else CHANGED, which also stands where the
        checkout has no such variant, or where the machine code of its sources is not known.
        """
        folder, ran = load.PROBLEMS / rec["problem"], rec.get("source_hash")
        now = source_hash(folder, rec["variant"])
        if now is None or not ran or (ran != now and rec.get("code_hash") not in self._codes.get((_key(rec), now), ())):
            return CHANGED
        if None not in (problem := {rec.get("problem_hash"), problem_hash(folder)}) and len(problem) > 1:
            return PROBLEM_CHANGED
        return MATCH if ran == now else SAME_CODE

    def modelled(self, record: dict) -> tuple[str, str, str]:
        """-> (status, reason, note) of a compiled variant: COMPILED, MODEL_CHECKED, or how it failed in the model.

        record: its newest compile record, or a record of the model where there is none.
        """
        key, its_sources = _key(record), [record.get("source_hash") or ""]
        if self.state(record) != CHANGED:  # what it was compiled to is what the checkout's source gives
            its_sources.insert(0, source_hash(load.PROBLEMS / record["problem"], record["variant"]) or "")
        checks = next((self._checks[key, source] for source in its_sources if (key, source) in self._checks), {})
        for case, its in checks.items():
            if its["status"] != "MODEL_CHECKED":
                return its["status"], f"in the model, {case}: {its.get('reason') or 'no reason given'}", ""
        if not checks:
            return "COMPILED", "", "compiled, not run"
        checked = f"model-checked ({text.counted(len(checks), 'test case')})"
        remarks = [checked, "not run here" if key in self._ran else "never run"]
        return "MODEL_CHECKED", "", ", ".join(["compiled", *remarks] if record["kind"] == "compile" else remarks)


def stale(problem: str, variant: str, state: str) -> list[str]:
    """What to say of a row in this state: [] where all is as in the checkout, or the problem is no folder of ours."""
    if state == PROBLEM_CHANGED:
        return [OTHER_PROBLEM]
    if state != CHANGED or not (load.PROBLEMS / problem).is_dir():
        return []
    return [STALE if source_hash(load.PROBLEMS / problem, variant) else ELSEWHERE]


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
def problem_hash(folder: Path) -> str | None:
    """Of a problem as it is in this checkout; None where it is no folder of ours, or cannot be read."""
    try:
        return sources.problem_hash(folder) if (folder / "task.py").is_file() else None
    except ERRORS:
        return None


def warnings(records: Sequence[dict]) -> list[str]:
    """What the clock warned of in a row's records: each warning once, with the number of cases that have it."""
    by_form: dict[str, list[str]] = {}
    for record in records:
        messages, reasons = (record.get("clock") or {}).get("warnings") or [], record.get("throttle") or []
        messages, reasons = (its if isinstance(its, list) else [its] for its in (messages, reasons))
        throttled = [f"the GPU's clocks were throttled ({', '.join(map(str, reasons))})"] if reasons else []
        for word in dict.fromkeys(text.line(word) for word in [*messages, *throttled]):
            by_form.setdefault(re.sub(r"\d+", "#", word), []).append(word)
    notes = []
    for its in by_form.values():
        where = f" (in {len(its)} of {len(records)} cases)" if len(its) < len(records) else ""
        warning = max(its, key=lambda note: (len(note), note))
        if counts := [int(word.split()[0]) for word in its if re.match(r"\d+ ", word)]:  # of calls, in each case
            warning = f"{sum(counts)} {warning.partition(' ')[2]}"
        notes.append(warning + where)
    return notes


def _key(record: dict) -> Key:
    return record["problem"], record["variant"], record["target"]
