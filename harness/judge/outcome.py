"""The outcomes of calls: of one its times, and the verdict of what was looked at, each of which is a fault or None; of
many, as groups of timed calls and as lines of a run's file, of which a resumed run takes over what is there and does
the rest (docs/records.md says when each line is written).
"""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from harness.results import schema
from harness.results.environment import UNKNOWN, GpuState
from harness.results.record import Contents
from harness.results.status import Status
from harness.runner import gate

# From a call's end until all of the runner has the order to stop, in which it could work on; a call that was stopped
# later does not count. An order takes 2 us for each thread, and a pool may have a hundred.
STOP_LIMIT_US = 500
# That processes may run while they are stopped: one that is on its way into the stop when it is seen as stopped is
# billed by the tick of a clock, 10 ms at most. Less is repeated, as a late stop is.
RAN_LIMIT_US = 20_000
# That a call's threads may wait for a processor beside tasks of others: the larger of so many us and this share of it.
BUSY_US = 100
BUSY_SHARE = 0.02


@dataclass
class Outcome:
    """The outcome of one call. us and the fields after it are None unless the call returned. us: the clock's reading,
    with its cost; host_us: on a GPU that of the player's host clock. self_timed: timed in the submission's process. On
    a CPU, late: the runner was told to stop too late, and could have worked on; busy: its threads waited for a
    processor beside tasks of others. bytes: what a call must move, if the task says that of contents.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")  # for what is read from a run's file

    status: Status
    reason: str = ""
    error: dict | None = None
    us: float | None = None
    host_us: float | None = None
    bytes: int | None = None
    self_timed: bool = False
    late: bool = False
    busy: bool = False

    def judged(self, verdict: "Outcome") -> "Outcome":
        """Return this call's times with a verdict on it. The error that was found before stays."""
        return replace(self, status=verdict.status, reason=verdict.reason, error=verdict.error or self.error)


def measured(value: float | None) -> float:
    """Return `value`, which every call that returned has. ValueError: it is None."""
    if value is None:
        raise ValueError("a call that returned must have its times")
    return value


@dataclass
class Audit:
    """What the judge looked at besides the outputs, if weights are prepared: the time that takes, and what is kept."""

    prepare_us: float | None = None
    kept_bytes: int | None = None


def of_cpu(reading: gate.Reading) -> Outcome:
    """Return the times of a call on a CPU, by the judge's clock."""
    busy = reading.delay_us > max(BUSY_US, BUSY_SHARE * reading.call_us) and reading.others > 0
    late = reading.stop_us > STOP_LIMIT_US or reading.ran_us > 0
    return Outcome("PASSED", us=reading.call_us, host_us=reading.call_us, late=late, busy=busy)


def worked_on(reading: gate.Reading) -> Outcome | None:
    """Return the fault of a call whose outputs changed after "done", or whose processes ran while they were stopped."""
    if reading.changed < 0:
        return Outcome("INCORRECT", "the memory of a tensor that was returned cannot be read")
    many = f"{reading.changed} of at most {gate.WORDS} sampled words changed later"
    if reading.changed:
        return Outcome("CHEAT_SUSPECTED", f"outputs were written after the call had ended: {many}")
    if reading.ran_us > RAN_LIMIT_US:
        return Outcome("CHEAT_SUSPECTED", "its processes ran while they were stopped, before the call or after it")
    return None


# --- many of them


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
