"""How many processes of a benchmark are alive at once where each prepares weights: the bound, and what cases say."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness import phases, problem
from harness.phases import JUDGE, Plan
from harness.problem import Case, Entry
from harness.session import Entrant, Outcome
from problems.common import load

LINEAR = Path(__file__).resolve().parent / "fixtures" / "problems" / "linear"
ROOM = 1000  # bytes that all processes alive at once may have prepared, here


class Counting:
    """A session in which nothing runs: it knows who is alive, and answers each call at once."""

    device = "cpu"
    problem = SimpleNamespace(tests=())

    def __init__(self) -> None:
        self.alive: set[str] = set()
        self.waves: list[int] = []  # processes of entrants that were started together
        self.called: dict[str, int] = {}

    def build(self, *entrants: Entrant) -> None:
        pass

    def start(self, *entrants: Entrant) -> None:
        assert not self.alive, "the processes before are stopped first"
        self.alive = {entrant.name for entrant in entrants}
        self.waves.append(len(self.alive - {JUDGE}))

    def stop(self, *entrants: Entrant) -> None:
        self.alive -= {entrant.name for entrant in entrants}

    def weights(self, case: Case) -> str:
        return "1"

    content = weights

    def call(self, entrant: Entrant, *_: object, **__: object) -> Outcome:
        assert entrant.name in self.alive
        self.called[entrant.name] = self.called.get(entrant.name, 0) + 1
        return Outcome("PASSED", us=1.0, host_us=1.0, ready_us=1.0, outside_us=1.0)

    def look(self, entrant: Entrant) -> None:
        pass


def waves(cases: list[Case], entrants: int, how: Plan) -> list[int]:
    """How many processes of entrants a benchmark has alive, wave by wave; each is called as often as `how` says."""
    session = Counting()
    made = [Entrant(f"entrant{i}", Entry(f"entrant{i}", None, ("cpu",)), "cpu") for i in range(entrants)]
    phases.run_benchmarks(session, made, cases, lambda _: None, how=how)
    assert session.alive == set()
    session.called.pop(JUDGE)
    names = {f"{entrant.name} {process}" for entrant in made for process in range(how.processes)}
    assert session.called == dict.fromkeys(names, len(cases) * (how.warmups + how.samples))
    return session.waves


def case(weight_bytes: int) -> Case:
    return Case({"n": 1}, 1, bytes=1, weight_bytes=weight_bytes)


@pytest.mark.parametrize(
    ("weights", "entrants", "wanted"),
    [
        ([250], 1, [4, 4, 2]), ([300], 1, [3, 3, 3, 1]), ([500], 1, [2] * 5), ([501], 1, [1] * 10),
        # Each entrant's processes prepare, and they live through all cases: the one with the most counts.
        ([250], 2, [4] * 5), ([100], 3, [9, 9, 9, 3]), ([100, 400, 0], 1, [2] * 5),
        # Never fewer than one of each.
        ([5000], 1, [1] * 10), ([501], 2, [2] * 10),
        # Nor more than the plan has, and as many as that where no case says what its weights take.
        ([1], 1, [8, 2]), ([0], 1, [8, 2]), ([0, 0], 5, [40, 10]),
    ],
)  # fmt: skip
def test_no_more_are_alive_than_their_weights_leave_room_for(monkeypatch, weights, entrants, wanted):
    monkeypatch.setattr(phases, "PREPARED_BYTES", ROOM)
    how = Plan(processes=10, samples=1, warmups=1, slots=2, audits=0, together=8)
    assert waves([case(n) for n in weights], entrants, how) == wanted


@pytest.mark.parametrize(("entrants", "paired"), [(1, False), (3, False), (2, True)])
def test_weights_of_v4_pro_are_prepared_by_few_at_once(entrants, paired):
    """14.3 GB each: three of them in the 40 GiB there are, one of each of two entrants. Without a word, all."""
    how = dataclasses.replace(phases.plan("cuda", paired), samples=1, warmups=1, audits=0)
    cases = list(problem.find("moe_gemm").benchmarks["cuda"])
    prepared = max(c.params["experts"] * c.params["hidden"] * c.params["inner"] for c in cases) * 3 * 9 / 16
    assert prepared > 14e9
    alive = max(waves(cases, entrants, how))
    assert alive == {(1, False): 3, (3, False): 3, (2, True): 2}[entrants, paired]
    assert alive * prepared <= phases.PREPARED_BYTES == 40 * 2**30
    assert max(waves([case(0)], entrants, how)) == how.together * entrants


def test_a_case_takes_over_what_its_task_says():
    found = problem.find("moe_gemm")
    task, reference = (load.module(found.folder, name) for name in ("task", "reference"))
    assert [c.weight_bytes for c in found.tests] == [spec.weight_bytes() for spec in task.TESTS]
    for spec in (spec for spec in task.TESTS if spec.experts < 100):
        tensors = reference.generate_weights(**vars(spec), device="cpu")[:-1]  # without the name of the activation
        held = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        assert held == spec.weight_bytes() + 4 * 4 * spec.experts, "and four fp32 an expert, which are not counted"


def test_a_case_that_says_nothing_has_no_weight_bytes():
    assert {c.weight_bytes for c in problem.find(str(LINEAR)).tests} == {0}
