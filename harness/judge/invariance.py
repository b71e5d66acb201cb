"""Whether equal calls have equal bits: 64 calls of one process, on one case of a problem.

"call": the same call again, also behind others. "batch": its rows in another order, one alone, some of them. BATCH of
task.py, a field of Case, counts rows, and `rows(data, index)` of reference.py takes those that `index` names. All
answers are checked, so what goes wrong from some call on shows. INVARIANT of task.py says which of the two a submission
must be; a baseline need not. On a GPU scratch memory is as recorded ahead of each call, so only chance differs there.
"""

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from harness.judge.handle import RunnerHandle
from harness.judge.outcome import Outcome
from harness.judge.session import Session, Step
from harness.problem.folders import Case, has_words
from harness.results import text
from problems.common import load

CALLS, TURN = 64, 8
FEWEST, MOST = 3, 8  # rows of the case, where the problem has such a one
BYTES = {"cpu": 3 * 2**20, "cuda": 2**30}  # that it moves at most


@dataclass
class Bits:
    """What calls showed. kinds: looked at; differ: by kind and row, in words; fault: of answers, or of bits."""

    case: Case
    kinds: tuple[str, ...]
    differ: dict[str, dict[int, str]] = field(default_factory=dict)
    fault: Outcome | None = None

    def said(self, kind: str) -> str:
        """Return in words whether bits are equal, and where not; "" of a kind that was not looked at."""
        rows = self.differ.get(kind, {})
        first = f"differ in {text.counted(len(rows), 'row')}, first in {next(iter(rows.values()), '')}"
        return (first if rows else "equal") if kind in self.kinds else ""

    def record(self) -> dict:
        """Return `bits` of a record."""
        equal = {kind: kind not in self.differ if kind in self.kinds else None for kind in ("call", "batch")}
        return {**equal, "calls": CALLS, "case": str(self.case)}


def run(session: Session, handles: list[RunnerHandle], target: str, words: str, each_call: Callable) -> dict[str, Bits]:
    """Make the calls of all that serve a case with these words. Return by name what they showed."""
    task = load.module(session.problem.folder, "task") if session.problem.ours else None
    both = session.problem.timed(target), session.problem.tests
    by_name: dict[str, Bits] = {}
    groups: dict[str, tuple[Case, int, list[RunnerHandle]]] = {}
    for handle in handles:
        timed, tests = ([case for case in part if handle.serves(case) and has_words(str(case), words)] for part in both)
        if timed or tests:
            case, rows = _chosen(timed, tests, getattr(task, "BATCH", ""), BYTES[session.device])
            groups.setdefault(str(case), (case, rows, []))[2].append(handle)
            by_name[handle.name] = Bits(case, ("call", "batch") if rows else ("call",))
    for case, rows, group in groups.values():
        calls = _plan(session, case, rows)
        for number, (call, play) in enumerate(each_call(session, group, calls), 1):
            session.progress(Step("equal bits", number, len(calls), str(case)))
            kind = "call" if call.rows == calls[0].rows else "batch"
            for handle in (member for member in group if not by_name[member.name].fault):
                bits, outcome = by_name[handle.name], play(handle)
                if outcome.status != "PASSED":
                    reason = f"call {number} of {len(calls)} in a process (seed {call.seed}): {outcome.reason}"
                    bits.kinds, bits.fault = (), dataclasses.replace(outcome, reason=reason)
                    continue
                for row, elements in session.checker.ask({"op": "bits", "name": handle.name})["differ"]:
                    difference = (
                        f"row {row}: {text.counted(elements, 'element')} in call {number}, rows {list(call.rows or ())}"
                    )
                    bits.differ.setdefault(kind, {}).setdefault(row, difference)
        for handle in (member for member in group if not member.baseline and not by_name[member.name].fault):
            bits = by_name[handle.name]
            for kind in [promised for promised in getattr(task, "INVARIANT", ()) if promised in bits.differ][:1]:
                must = "the same call again must have" if kind == "call" else "a row must have in any batch"
                bits.fault = Outcome(
                    "INCORRECT", f"{must} the same bits (INVARIANT of task.py): they {bits.said(kind)}"
                )
    return by_name


def _chosen(timed: list[Case], tests: list[Case], axis: str, most: int) -> tuple[Case, int]:
    """Return a case that moves at most so many bytes and has some rows, and how many; else the smallest one, and 0."""
    for case in [*sorted(timed, key=_bytes), *sorted(tests, key=_bytes, reverse=True)]:
        if FEWEST <= case.params.get(axis, 0) <= MOST and _bytes(case) <= most:
            return case, case.params[axis]
    return min(tests or timed, key=_bytes), 0


def _bytes(case: Case) -> int:
    return case.bytes or 0


def _plan(session: Session, case: Case, rows: int) -> list[Case]:
    """Return the calls, in turns: all rows of one content twice, then of that and of others some, in another order."""
    whole, seed, calls = tuple(range(rows)), session.secret_seed(case), list[Case]()
    for turn in range(CALLS // TURN):
        some, other = tuple(random.Random(turn).sample(whole, rows)), session.secret_seed(case)
        of_both = [(at, some[:many]) for many in (1, rows // 2) for at in (other, seed)]
        parts = [(seed, whole), (seed, whole), (seed, some), *of_both, (seed, some[1:])]
        calls += [dataclasses.replace(case, seed=at, rows=part) for at, part in parts]
    return calls
