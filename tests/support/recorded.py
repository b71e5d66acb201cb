"""Recorded runs of a made-up problem on made-up sessions, so that every time is known."""

import contextlib
from pathlib import Path
from types import SimpleNamespace

from harness import run
from harness.judge import phases, readings
from harness.judge.outcome import Outcome
from harness.judge.readings import Group, ReferenceReadings, Timing
from harness.results import environment, record
from leaderboard import board

SOURCE = '"""{name}"""\nTARGETS = ("cpu",)\n\n\ndef custom_kernel(data):\n    return data\n'
TASK = '''"""made_up: nothing is ever called."""
from dataclasses import dataclass

OUTPUTS = ("c",)

@dataclass(frozen=True)
class Case:
    n: int
    seed: int

    def bytes_moved(self):
        return self.n

TESTS = [Case(1, 7), Case(2, 7), Case(2, 8)]
BENCHMARKS = BENCHMARKS_CPU = [Case(1000, 1), Case(4000, 2)]
'''
# us of every call; a list: of one measurement after the other
US = {"good": 10.0, "better": 8.0, "other": 12.0, "submission": 9.0}


class Stop(Exception):
    """The process is killed here."""


class FakeSession(contextlib.AbstractContextManager):
    notes: tuple[str, ...] = ()
    remark = ""
    checker = SimpleNamespace(ask=lambda _: {"accepts": False})

    def __init__(self, *_: object) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class World:
    """What the fake phases did, and how they are to behave."""

    def __init__(self) -> None:
        self.us: dict[str, float | list[float]] = dict(US)
        self.tests: list[tuple[str, int]] = []  # (submission, case) that were really called
        self.groups: list[tuple[str, int, int]] = []  # (submissions, process, case) that were really timed
        self.left = 10**9  # calls until the process is killed
        self.wrong: set[str] = set()
        self.measured: dict[str, int] = {}

    def tick(self) -> None:
        if self.left == 0:
            raise Stop
        self.left -= 1

    def run_tests(self, session, handles, cases, done, have, twice=()):
        for number, case in enumerate(cases):
            for handle in handles:
                outcome = have.test(handle.name, number)
                if outcome is None:
                    self.tick()
                    self.tests.append((handle.name, number))
                    bad = handle.name in self.wrong
                    outcome = Outcome("INCORRECT" if bad else "PASSED", "mismatch" if bad else "", {"rel": 0.0})
                done(handle, case, outcome)

    def run_benchmarks(self, session, handles, cases, counts, done, have):
        timings = {handle.name: [Timing(case) for case in cases] for handle in handles}
        names = [handle.name for handle in handles]
        for name in names:
            self.measured[name] = self.measured.get(name, 0) + 1
        for process in range(3 if counts in phases.COUNTS.values() else counts.processes):
            for number in range(len(cases)):
                known = have.group(process, number)
                if known is None:
                    self.tick()
                    self.groups.append(("+".join(names), process, number))
                    outcomes = {name: self.calls(name, process) for name in names}
                    if done:
                        done(Group(process, number, outcomes, {"empty": [1.0]}, [f"{process}{number}"]))
                else:
                    outcomes = known.outcomes
                for name in names:
                    timings[name][number].outcomes.append(outcomes[name])
        return timings, [ReferenceReadings(5.0, "read 0", "read", 1.0, case.bytes or 4, ["1"]) for case in cases]

    def calls(self, name: str, process: int) -> list[Outcome]:
        us = self.us.get(name, self.us[name.removesuffix("#2")])
        us = us[min(self.measured[name], len(us)) - 1] if isinstance(us, list) else us
        return [Outcome("PASSED", us=us * (1 + 0.001 * (process + i)), host_us=1.0) for i in range(3)]


def judge(folder: Path, *arguments: str) -> int:
    return run.main([str(folder), "--device", "cpu", *arguments])


def records() -> list[dict]:
    return record.read(environment.machine("cpu"), "made_up")


def files() -> list[record.Contents]:
    """What the files of all runs hold, oldest first."""
    return record.contents(environment.machine("cpu"), "made_up", check=readings.check)


def unfinished() -> list[Path]:
    return [one.path for one in files() if one.unfinished]


def first() -> tuple[str, str]:
    """(variant, run) that the board has on rank 1."""
    (found,) = board.build(records(), "box", {("made_up", "cpu"): [{"n": 1000}, {"n": 4000}]})
    top = found.standing.iloc[0]
    assert top["rank"] == 1
    return top.variant, top.run_id


def better(folder: Path) -> list[str]:
    return ["--submission", str(folder.parent / "better.py")]
