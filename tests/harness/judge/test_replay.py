"""Waves of recorded calls on made-up sessions and players: who is alive when, and what a loss costs."""

import itertools
import os
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from harness.checker import matmul
from harness.judge import phases, recording, replay, replies
from harness.judge.handle import PREPARED_FACTOR, PREPARED_SLACK, Content, RunnerHandle, kept_too_much
from harness.judge.outcome import Outcome
from harness.judge.phases import Counts
from harness.judge.readings import PRODUCT
from harness.judge.recording import Replays
from harness.player import player
from harness.problem.folders import Case, Submission
from harness.results import environment
from harness.sandbox.process import Died

GIB = 2**30
RIGHT = {"nodes": [], "claims": [{"type": "Tensor", "same": True}]}
WAITS = {"unrecorded": "base.py:3: it waits"}
BRANCHES = {"unrecorded": "work ran on another stream than the default one", "branches": True}


class World:
    """What the fakes below did, and how they are to behave. replies: by submission and case, what its runner says of
    the call, RIGHT if nothing is said; timed: what it says of calls that it times; lost: (submission, case) whose
    recorded call loses its player, once; room: cases that have room at once; number: the case of the present content.
    """

    def __init__(self) -> None:
        self.events: list[str] = []
        self.replies: dict[tuple[str, int], dict | Died] = {}
        self.timed: list[dict | Died] = []
        self.lost: set[tuple[str, int]] = set()
        self.room = self.room_left = 100
        self.living: set[str] = set()
        self.layout: dict = {"ours": True}
        self.number = -1
        self.scratch: list[int] = []  # bytes of scratch memory that players were to make


def said(reply: dict | Died) -> dict:
    if isinstance(reply, Died):
        raise reply
    return reply


class FakeProcess:
    """A runner: it says of a recorded call what the world has it say."""

    def __init__(self, session: "FakeSession", name: str) -> None:
        self.world, self.checker, self.name, self.child = session.world, session, name, self
        session.world.living.add(name)

    def send(self, message: dict, fds: tuple[int, ...]) -> None:
        assert message["op"] == "record" and all(os.fstat(fd) for fd in fds)
        self.world.events.append(f"record {self.name} {self.world.number}")

    def receive(self, limit_s: float, descriptors: bool = False) -> tuple[dict, list[int]]:
        reply = said(self.world.replies.get((self.name, self.world.number), RIGHT))
        return reply, [opened()]

    def hand_over(self, wanted: type, message: dict, fds: list[int], task: str, limit_s: float) -> replies.Done:
        for fd in fds:
            os.close(fd)
        return replies.Done()

    def ask(self, wanted: type, message: dict, limit_s: float) -> replies.SelfTimed:
        return replies.read(replies.SelfTimed, said(self.world.timed.pop(0) if self.world.timed else {"us": 7.0}))

    def failure(self, died: Died) -> Outcome:
        return Outcome(died.status, died.reason)

    def kill(self) -> None:
        self.world.living.discard(self.name)

    remove = close = kill


class FakeSession:
    """A session, and its checker."""

    device, problem = "cuda", SimpleNamespace(ours=True, tests=())
    call_limit_s = first_call_limit_s = 1.0
    weights_bytes = 0
    build = computes = see_device = progress = Mock(return_value=True)

    def __init__(self, world: World) -> None:
        self.world, self.checker = world, self
        self.weighed: tuple[int, int | None] = (-1, None)
        self.present = Content(Case({}, 0), 0, {}, {}, None, 0)

    def ask(self, message: dict) -> "FakeSession":
        return self

    def __getitem__(self, kind: str) -> int:
        assert kind == "free"
        self.world.room_left -= 1
        return 80 * GIB * (self.world.room_left > 0)

    def request(self, message: dict, fds: list[int]) -> tuple[dict, list[int]]:
        assert message["op"] == "attach" and len(fds) == 2 * player.COPIES
        return {"weights": None}, []

    def secret_seed(self, case: Case) -> int:
        return 1000 + case.params["n"]

    def weights(self, case: Case, seed: int | None = None) -> None:
        self.weighed = case.params["n"], seed

    def content(self, case: Case, seed: int | None = None) -> str:
        self.world.number, self.seed = case.params["n"], seed
        self.world.events.append(f"content {self.world.number} {seed}")
        assert self.weighed[0] == self.world.number
        layout = {"turn": len(self.world.events)} if self.world.layout.get("differs") else {}
        self.present = Content(case, 0, {"inputs": 2 << 20, "outputs": 2 << 20}, self.world.layout | layout, 64, 64)
        return "1"

    def product_us(self, count: int) -> list[float]:
        return [5.0] * count

    def start(self, *handles: RunnerHandle) -> None:
        self.world.room_left = self.world.room
        for handle in handles:
            if handle.process is None:
                assert handle.scratch, "a runner gets its memory at the start"
                os.close(handle.scratch[1])
                handle.process, handle.scratch = FakeProcess(self, handle.name), None
                self.world.events.append(f"start {handle.name}")

    def stop(self, *handles: RunnerHandle) -> None:
        for handle in handles:
            if handle.process:
                handle.process.kill()
                handle.process = None

    def verdict(self, name: str, buffer: int, claims: list | None, baseline: bool, fixed: bool = False) -> Outcome:
        self.world.events.append(f"verdict {name} {buffer} {'played' if fixed else 'in the runner'}")
        return Outcome("PASSED")


class FakePlayer:
    """A player. Its calls take 5 us."""

    def __init__(self, world: World, target: str, gib: int = 80) -> None:
        self.world, self.target, self.has = world, target, set[str]()
        self.about = {"readers": 2, "device_bytes": gib * GIB}
        world.events.append(f"player {target}")

    def scratch(self, nbytes: int) -> tuple[dict, int]:
        self.has = {"scratch"}
        self.world.scratch.append(nbytes)
        return {"address": player.BASE, "nbytes": nbytes}, opened()

    def memory(self, number: int, sizes: dict[str, int]) -> list[int]:
        self.has -= {"call"}
        return [opened() for _ in range(player.COPIES * sum(1 for n in sizes.values() if n))]

    def snapshot(self, used: list[int]) -> list[int]:
        return [opened()]

    def load(self, recorded: replies.Recorded, images: list[int], kept: list[int]) -> None:
        assert "scratch" in self.has and all(os.fstat(fd) for fd in (*images, *kept)) and len(kept) == 1
        self.has.add("call")

    def play(self, copy: int, limit_s: float, what: int = 0, nbytes: int = 0, takes: object = ()) -> tuple:
        if what:
            return 3.0 if what == recording.EMPTY else 4.0, 10.0
        assert "call" in self.has
        if (self.target, self.world.number) in self.world.lost:
            self.world.lost.remove((self.target, self.world.number))
            raise Died("RUNTIME_ERROR", "CUDA_ERROR_ILLEGAL_ADDRESS")
        return 5.0, 12.0

    def close(self) -> None:
        self.has.clear()


@pytest.fixture
def world(monkeypatch) -> World:
    made = World()
    for module in (recording, replay):
        monkeypatch.setattr(module, "Player", lambda target: FakePlayer(made, target))
    monkeypatch.setattr(environment, "gpu_state", lambda: environment.UNKNOWN)
    return made


def submissions(*names: str, baseline: bool = False) -> list[RunnerHandle]:
    """Their targets are their names, by which their players know them."""
    return [RunnerHandle(name, Submission(name, None, ("sm90",), baseline=baseline), name) for name in names]


def cases(count: int, **more) -> list[Case]:
    return [Case({"n": n}, n, bytes=64, **more) for n in range(count)]


def opened() -> int:
    return os.open(os.devnull, os.O_RDONLY)


def outcomes(world: World, handles: list[RunnerHandle], count: int, ours: bool = True) -> dict[str, list[Outcome]]:
    """Return what they get in test cases."""
    session = FakeSession(world)
    session.problem = SimpleNamespace(ours=ours, tests=())
    return replay.run_tests(session, handles, cases(count), lambda *_: None)


def replayed(world: World, handles: list[RunnerHandle]) -> Replays:
    return Replays(FakeSession(world), handles, dict(enumerate(cases(3))), dict.fromkeys(range(3), 5))


def statuses(outcomes: list[Outcome]) -> list[str]:
    return [outcome.status for outcome in outcomes]


@pytest.mark.parametrize(("given", "gets"), [((0, 0), 1), ((512, 5 << 20), 5 << 20), ((512, 2**40), None)])
def test_players_get_no_more_scratch_memory_than_calls_were_given(world, given, gets):
    """Nor more than the runner had, whatever it says."""
    for n, nbytes in enumerate(given):
        world.replies["a", n] = RIGHT | {"scratch": nbytes}
    assert statuses(outcomes(world, submissions("a"), 2)["a"]) == ["PASSED"] * 2
    runners, players = world.scratch
    assert players == (gets or runners) and runners > 2**30


def test_no_runner_lives_when_a_case_is_judged(world):
    handles = submissions("a", "b")
    with replayed(world, handles) as replays:
        for wave in replays.waves():
            assert wave == [0, 1, 2] and not world.living and all(handle.process is None for handle in handles)
            assert sum(event.startswith("record ") for event in world.events) == 6, "all of a wave are recorded first"
    found = outcomes(world, handles, 3)
    assert {name: statuses(of) for name, of in found.items()} == {"a": ["PASSED"] * 3, "b": ["PASSED"] * 3}
    assert [(o.us, o.host_us, o.self_timed) for o in found["a"]] == [(5.0, 12.0, "")] * 3
    judged = [event for event in world.events if event.startswith("verdict a 0")]
    assert judged[-2:] == ["verdict a 0 0 in the runner", "verdict a 0 1 played"], "on other contents, in other memory"


def test_a_wave_has_as_many_cases_as_have_room(world):
    world.room = 2
    assert statuses(outcomes(world, submissions("a"), 5)["a"]) == ["PASSED"] * 5
    assert world.events.count("start a") == 3


def test_a_lost_player_costs_one_case(world):
    world.lost = {("a", 1)}
    found = outcomes(world, submissions("a", "b"), 4)
    assert statuses(found["a"]) == ["PASSED", "RUNTIME_ERROR", "PASSED", "PASSED"] and "ADDRESS" in found["a"][1].reason
    assert statuses(found["b"]) == ["PASSED"] * 4
    counts = [world.events.count(f"{what} {name}") for what in ("start", "player") for name in "ab"]
    assert counts == [1, 1, 3, 2], "nothing is recorded again"


def test_a_runner_that_is_lost_costs_its_case_and_after_some_the_rest(world):
    world.replies = {("a", n): Died("RUNTIME_ERROR", f"killed at {n}") for n in (1, 3, 4)}
    found = outcomes(world, submissions("a", "b"), 7)["a"]
    assert [o.reason for o in found] == ["", "killed at 1", "", "killed at 3", "killed at 4"], "and no more"
    assert statuses(found) == ["RUNTIME_ERROR" if o.reason else "PASSED" for o in found]
    assert world.events.count("start b") == 1


@pytest.mark.parametrize(
    ("reply", "status", "reason"),
    [
        (BRANCHES, "RULE_BROKEN", "another stream"),
        ({"unrecorded": "its call cannot be recorded: a.py:3: RuntimeError"}, "UNSUPPORTED", "a.py:3"),
        ({"nodes": [{"kind": "graph"}]}, "RUNTIME_ERROR", "malformed"),
        ({"failed": "record", "type": "E", "memory": False, "text": "a.py:3: E"}, "RUNTIME_ERROR", "a.py:3: E"),
    ],
)
def test_what_a_runner_says_of_its_call_is_its_verdict(world, reply, status, reason):
    world.replies = {("a", 0): reply}
    found = outcomes(world, submissions("a", "b"), 2)
    assert statuses(found["a"]) == [status, "PASSED"] and reason in found["a"][0].reason
    assert statuses(found["b"]) == ["PASSED"] * 2


def test_a_baseline_that_waits_is_timed_in_its_runner_which_stays(world):
    world.replies = {("base", 0): WAITS, ("base", 1): WAITS, ("base", 2): BRANCHES}
    handles = submissions("base", baseline=True) + submissions("a")
    with replayed(world, handles) as replays:
        for _ in replays.waves():
            assert world.living == {"base"}
    assert not world.living
    found = outcomes(world, handles, 3)
    assert [(o.us, o.host_us) for o in found["base"]] == [(7.0, None)] * 3 and world.events.count("start base") == 2
    assert [o.self_timed for o in found["base"]] == [said["unrecorded"] for said in (WAITS, WAITS, BRANCHES)]


def test_a_call_that_fails_in_its_runner_costs_one_case(world):
    world.replies = {("base", n): WAITS for n in range(3)}
    world.timed = [{"us": 7.0}, Died("TIMEOUT", "no answer"), {"us": 8.0}]
    found = outcomes(world, submissions("base", baseline=True), 3)["base"]
    assert statuses(found) == ["PASSED", "TIMEOUT", "PASSED"] and world.events.count("start base") == 2
    world.replies["base", 2] = Died("RUNTIME_ERROR", "out of memory")  # which ends the runner of the others, too
    assert statuses(outcomes(world, submissions("base", baseline=True), 3)["base"])[:2] == ["PASSED"] * 2


def test_a_folder_whose_layout_differs_from_contents_to_contents_is_timed_in_its_runner(world):
    for differs in (True, False):
        world.layout = {"ours": False, "differs": differs}
        assert {"differ" in o.self_timed for o in outcomes(world, submissions("a"), 2, ours=False)["a"]} == {differs}


def test_a_folder_whose_recorded_call_reads_what_no_player_has_is_timed_in_its_runner(world):
    """On the same contents, from that case on."""
    world.lost = {("a", 1)}
    found = outcomes(world, submissions("a", "b"), 3, ours=False)
    assert [(o.status, o.us, "not torch's" in o.self_timed) for o in found["a"]] == [
        ("PASSED", 5.0, False),
        ("PASSED", 7.0, True),
        ("PASSED", 7.0, True),
    ]
    assert statuses(found["b"]) == ["PASSED"] * 3
    of_case = [event for event in world.events if event.startswith("content 1 ")]
    assert of_case.count("content 1 1") == 2 and of_case[-1] == "content 1 1", "anew, since others come behind it"


def test_each_group_of_timed_calls_is_made_by_a_fresh_player(world):
    how, groups = Counts(processes=4, samples=3, warmups=1, buffers=2), []
    session, handles, timed = FakeSession(world), submissions("a", "b"), cases(2, flops=matmul.FLOPS)
    timings, readings = replay.run_benchmarks(session, handles, timed, how, groups.append)
    assert [[len(g) for t in timings[name] for g in t.outcomes] for name in "ab"] == [[3] * 8] * 2
    counts = [world.events.count(event) for event in ("start a", "player a", "player b")]
    assert counts == [1, 1 + 1 + 4, 1 + 4], "the judge's own, one to record with, and one for each group"
    assert [len(group.judge_us["empty"]) for group in groups] == [3] * 8
    assert [(group.process, group.case) for group in groups] == [*itertools.product(range(4), (0, 1))]
    assert [len(group.judge_us.get("read 1", [])) for group in groups] == [3, 3, *[0] * 6]
    assert [len(group.judge_us.get(PRODUCT, [])) for group in groups] == [3, *[0] * 7], "once a run"
    assert [(g.roofline_kind, g.roofline_us, g.empty_us) for g in readings] == [("flops", 5.0, 3.0)] * 2


@pytest.mark.parametrize(
    ("gib", "paired", "memory", "sizes"),
    [
        (0, False, 80, [5]),
        (1, False, 80, [5]),
        (14, False, 80, [1] * 5),
        (14, False, 140, [2, 2, 1]),
        (14, True, 80, [5]),
    ],
)
def test_submissions_are_timed_in_parts_whose_weights_have_room(world, gib, paired, memory, sizes):
    how = Counts(processes=1, samples=1, warmups=0, buffers=2, paired=paired)
    session, rest = FakeSession(world), (how, None, phases.NOTHING)
    bench = replay.ReplayBenchmark(session, submissions(*"abcde"), cases(1, weight_bytes=gib * GIB), *rest)
    bench.judges = FakePlayer(world, "judges", memory)
    assert [len(part) for part in bench._parts()] == sizes


@pytest.mark.parametrize("weights", [0, GIB, 14 * GIB])
def test_what_prepare_may_keep_is_a_copy_and_a_little(weights):
    allowed = int(PREPARED_FACTOR * weights) + PREPARED_SLACK
    assert kept_too_much(allowed, weights) is None and kept_too_much(allowed + 9, weights, 9) is None
    fault = kept_too_much(allowed + 10, weights, 9)
    assert fault is not None and fault.status == "RULE_BROKEN" and f"{allowed / 2**20:.0f} MiB are" in fault.reason


@pytest.mark.parametrize(
    ("failed", "text", "status", "reason", "ended"),
    [
        ("RefusedError", "a copy to memory", "RUNTIME_ERROR", "its recorded call is refused: a copy to memory", False),
        ("LostError", "TIMEOUT it took long", "TIMEOUT", "it took long", True),
        ("LostError", "the recorded call: no", "RUNTIME_ERROR", "the recorded call: no", True),
        ("LostError", "x: CUDA_ERROR_ILLEGAL_ADDRESS", "RUNTIME_ERROR", "scratch memory must come from torch", True),
    ],
)
def test_what_a_player_says_of_a_failure_is_a_verdict(failed, text, status, reason, ended):
    made, killed = recording.Player.__new__(recording.Player), []
    reply = {"failed": failed, "text": text}
    made.child = SimpleNamespace(request=lambda *_: (reply, []), kill=lambda: killed.append(True))
    made._about = {"readers": 2}
    with pytest.raises(Died) as caught:
        made.play(0, 2.0)
    assert (caught.value.status, bool(killed)) == (status, ended) and reason in caught.value.reason
