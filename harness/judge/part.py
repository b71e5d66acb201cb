"""A part of a run with --devices: python -m harness.judge.part, a process that sees one device.

It reads an order (harness/judge/spread.py: Work.order) from standard input, and writes JSON lines: each step, each test
outcome and each group of timed calls as a journal has them, and "done" with what the record needs of the session.
"""

import dataclasses
import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from harness.judge import machine, phases
from harness.judge.events import Step
from harness.judge.handle import RunnerHandle
from harness.judge.journal import Group
from harness.judge.outcome import Outcome
from harness.judge.session import Session
from harness.problem import folders
from harness.problem.folders import Case, ProblemError, UsageError
from harness.results import output, text
from harness.sandbox import confine, process


class Part:
    """The work of one order. wire: where the lines are written."""

    def __init__(self, order: dict, wire: IO[str]) -> None:
        self.order, self.wire = order, wire
        self.problem = folders.find(order["problem"])
        self.numbers = [number for number, _ in order["cases"]]
        self.cases = [Case(**case) for _, case in order["cases"]]
        named = ((name, folders.submission(self.problem, Path(file))) for name, file in order["submissions"])
        self.handles = [RunnerHandle(name, dataclasses.replace(one, name=name), order["target"]) for name, one in named]

    def run(self) -> None:
        """Do the work, and say that it is done."""
        with Session(self.problem, self.order["device"], self.order["timeout_s"]) as session:
            session.progress = self._step
            if self.order["plan"] is None:
                twice = tuple(case for number, case in self._numbered() if number in self.order["twice"])
                phases.run_tests(
                    session,
                    self.handles,
                    self.cases,
                    self._tested,
                    self._step,
                    limit_s=self.order["limit_s"],
                    twice=twice,
                )
            else:
                self._time(session)
            audits = {handle.name: dataclasses.asdict(handle.audit) for handle in self.handles}
            self._write("done", audits=audits, clock=session.clock_name, notes=session.notes)

    def _numbered(self) -> Iterator[tuple[int, Case]]:
        return zip(self.numbers, self.cases, strict=True)

    def _time(self, session: Session) -> None:
        first, end = self.order["processes"]
        made = phases.Benchmark(
            session=session,
            handles=self.handles,
            cases=self.cases,
            progress=self._step,
            paired=self.order["paired"],
            done=self._timed,
            have=phases.NOTHING,
            budget=phases.Budget(self.order["limit_s"]),
            how=phases.Plan(**self.order["plan"]),
        )
        made.watched = {handle.name: random.randrange(first, end) for handle in self.handles}
        made.run(range(first, end))

    def _step(self, step: Step) -> None:
        self._write("step", **dataclasses.asdict(step))

    def _tested(self, handle: RunnerHandle, case: Case, outcome: Outcome) -> None:
        number = self.numbers[self.cases.index(case)]
        self._write("test", submission=handle.name, case=number, outcome=dataclasses.asdict(outcome))

    def _timed(self, group: Group) -> None:
        self._write("group", **dataclasses.asdict(group) | {"case": self.numbers[group.case]})

    def _write(self, kind: str, **facts: object) -> None:
        self.wire.write(json.dumps({"kind": kind, **facts}) + "\n")
        self.wire.flush()


def main() -> int:
    """Do the order on standard input. Return the exit code; what went wrong is the last line of standard error."""
    confine.prctl("pdeathsig", 9)  # a part without its run has no reader
    wire = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed must not get between the lines
    process.harden()
    try:
        Part(json.load(sys.stdin), wire).run()
    except (ProblemError, UsageError) as error:
        output.complain(text.line(error, 500))
        return output.USAGE_EXIT
    except Exception as error:
        said = machine.said_of(error)
        if said is None:
            raise
        output.complain(said)
        return output.USAGE_EXIT
    return 0


if __name__ == "__main__":
    sys.exit(main())
