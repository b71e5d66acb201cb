"""The finished work of a run, as lines of its file: outcomes of test cases, groups of timed calls, and decisions.

A resumed run takes over what is here and does the rest. docs/records.md says when each line is written.
"""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from harness.judge.outcome import Audit, Outcome
from harness.results import schema
from harness.results.environment import UNKNOWN, GpuState
from harness.results.record import Contents


@dataclass
class Group:
    """The calls of one process of each submission, or of those of one part, on one benchmark case. outcomes: by
    submission its scored calls, in order, and last what failed it here, warm-ups included; one that failed before has
    none. judge_us: by judge's call its times in us. seeds: of every content. state: of the GPU behind the calls. part:
    of the submissions, where not all can be alive at once.
    """

    process: int
    case: int
    outcomes: dict[str, list[Outcome]]
    judge_us: dict[str, list[float]]
    seeds: list[str]
    state: GpuState = UNKNOWN
    part: int = 0


GroupDone = Callable[[Group], None]


@dataclass(frozen=True)
class Finished:
    """The finished work of one phase."""

    tests: dict[tuple[str, int], Outcome] = field(default_factory=dict)
    groups: dict[tuple[int, int, int], Group] = field(default_factory=dict)  # by process, case, part

    def test(self, submission: str, case: int) -> Outcome | None:
        """Return the outcome of `submission` (its name) on test case number `case`."""
        return self.tests.get((submission, case))

    def group(self, process: int, case: int, part: int = 0) -> Group | None:
        return self.groups.get((process, case, part))


NOTHING = Finished()


def finished(lines: list[dict], phase: str = "benchmark") -> Finished:
    """Return the work that these lines tell of: every test, and the groups of `phase`."""
    tests = {(at["submission"], at["case"]): Outcome(**at["outcome"]) for at in lines if at["kind"] == "outcome"}
    groups = [_GROUP.validate_python(at) for at in lines if at["kind"] == "group" and at.get("phase") == phase]
    return Finished(tests, {(group.process, group.case, group.part): group for group in groups})


def of_outcome(outcome: Outcome) -> dict:
    """Return the fields of an outcome that are not at their defaults."""
    return dict(_OUTCOME.dump_python(outcome, exclude_defaults=True))


def of_group(group: Group) -> dict:
    """Return the fields of a group's line."""
    outcomes = {name: [of_outcome(call) for call in calls] for name, calls in group.outcomes.items()}
    return dataclasses.asdict(group) | {"outcomes": outcomes}


def attempts(files: Iterable[Contents], variant: str) -> set[str]:
    """Return the unfinished runs that have timed a variant of this name: they count as attempts too."""
    groups = ((file.run_id, line) for file in files if file.unfinished for line in file.work if line["kind"] == "group")
    return {run_id for run_id, line in groups if variant in line["outcomes"]}


def check(line: dict) -> None:
    """Raise ValueError unless a line of work is as those that read it rely on."""
    try:
        _LINES[line["kind"]].validate_python(line)
    except ValidationError as error:
        raise ValueError(schema.said_of(error)) from None


_OUTCOME, _GROUP = TypeAdapter(Outcome), TypeAdapter(Group)
# By kind the fields that are read of such a line.
_FIELDS: dict[str, dict[str, Any]] = {
    "outcome": {"submission": str, "case": int, "outcome": Outcome},
    "audit": {"submissions": dict[str, Audit]},
    "confirm": {"challenger": str, "leader": dict, "opponent": str | None},
    "resumed": {},
}
_LINES: dict[str, TypeAdapter] = {"group": _GROUP} | {
    kind: TypeAdapter(dataclasses.make_dataclass(kind, fields.items())) for kind, fields in _FIELDS.items()
}
