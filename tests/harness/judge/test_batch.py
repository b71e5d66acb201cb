"""Batches on a GPU: what becomes of readings, of calls that wait for the device, and of a word that is no digest.

The GPU's part runs in tests/harness/judge/test_gpu_judge.py. Here checker and runner are played.
"""

import dataclasses
import os
from types import SimpleNamespace

import pytest

from harness.judge import batch, outcome, readings, replies
from harness.judge.handle import Content
from harness.judge.outcome import Batch, Outcome
from harness.problem.folders import Case
from harness.runner import native
from harness.sandbox.process import Died

CASE = Case({"n": 1}, 1)
LAYOUT = {"captures": [{"space": "device"}], "ours": True}


class Checker:
    """Its gate takes `us` for each call, FIXED_US for a batch, and ASLEEP_US more where the device was idle before: in
    its last request but this one, and while a runner enqueues calls that do not wait for it. free: bytes of its memory.
    """

    FIXED_US, ASLEEP_US = 100.0, 1000.0

    def __init__(self, free: int = 2**40) -> None:
        self.free, self.kept, self.asked, self.awake = free, 0, [], False
        self.runners: dict[str, Runner] = {}

    def ask(self, message: dict) -> dict:
        self.asked.append(message["op"])
        self.kept += message["op"] == "keep"
        self.kept *= message["op"] != "drop"
        self.awake = message["op"] == "wake"
        runner = self.runners.get(message.get("runner", ""))
        return {"free": self.free, "whole": bool(runner and runner.whole)}

    def request(self, message: dict, limit_s: float = 0, watch: object = None) -> tuple[dict, list[int]]:
        self.asked.append(message["op"])
        runner = self.runners[message["runner"]]
        if message["op"] == "gate_page":
            return {}, [os.open(os.devnull, os.O_RDONLY)]
        assert len(set(message["keys"])) == len(message["keys"]) == runner.buffers
        late_us = max(0.0, runner.late_us - message["ahead_us"])  # of enqueuing, when the gate opens
        first_us, runner.first_us = runner.first_us, 0.0
        fixed_us = self.FIXED_US + late_us + first_us + (0 if self.awake or not message["limit_s"] else self.ASLEEP_US)
        return {"us": (fixed_us + runner.us * runner.buffers) if message["limit_s"] else 0.0}, []


class Runner:
    """A process. waits: its calls wait for the device, so that they are not all enqueued behind a gate. late_us: after
    it says that it begins one, it takes that long to enqueue it. first_us: what its first batch takes longer.
    """

    def __init__(
        self,
        us: float,
        waits: bool = False,
        whole: bool = True,
        claims: int = 0,
        late_us: float = 0.0,
        first_us: float = 0.0,
    ) -> None:
        self.us, self.waits, self.whole, self.host_us, self.opened = us, waits, whole, 5.0, None
        self.late_us, self.spin_us, self.first_us = late_us, 1100.0, first_us
        self.buffers, self.at_once, self.claims = 0, False, claims
        self.child = self

    def open(self, content: Content, buffers: int, reads: None) -> None:
        self.buffers = buffers

    def send(self, message: dict, fds: tuple) -> None:
        self.at_once = message["at_once"]
        self.checker.awake = self.at_once  # it keeps the device busy itself

    def answers(self, within_s: float) -> bool:
        return self.at_once or not self.waits

    def receive(self, wanted: type, limit_s: float) -> replies.Reply:
        if wanted is replies.Ready:
            return replies.Ready(ready=True)
        return replies.Batched(calls=[[]] * (self.claims or self.buffers))

    def failure(self, died: Died) -> Outcome:
        return Outcome(died.status, died.reason)


class Session:
    """A case whose contents have these layouts in turn."""

    call_limit_s = 30.0

    def __init__(self, verdicts: tuple = (), layouts: tuple = (), free: int = 2**40) -> None:
        self.checker, self.made, self.layouts, self.verdicts = Checker(free), 0, layouts, list(verdicts)

    def content(self, case: Case) -> str:
        layout = self.layouts[self.made] if self.made < len(self.layouts) else LAYOUT
        self.present = Content(case, {"device": 2**20, "host": 0}, layout, None, 0)
        self.made += 1
        return str(self.made)

    def verdict(self, handle: object, buffer: int, claims: list) -> Outcome:
        return self.verdicts.pop(0) if self.verdicts else Outcome("PASSED")

    def handle(self, name: str, runner: Runner) -> SimpleNamespace:
        self.checker.runners[name], runner.checker = runner, self.checker
        judges = name == "judge"
        return SimpleNamespace(
            runner=name, running=runner, submission=None if judges else "a submission", lose=lambda failure: failure
        )


def found(session: Session, runner: Runner, claimed_us: float = 1000.0, most: int = 1) -> Batch | Outcome:
    contents = batch.make(session, CASE)
    assert contents is not None
    mine, judge = session.handle("my", runner), session.handle("judge", Runner(2.0))
    return batch.read(session, mine, judge, contents, claimed_us, most)


def test_a_batch_has_as_many_calls_as_memory_allows_each_on_new_contents():
    session = Session()
    assert found(session, Runner(20.0)) == Batch(16, 100.0 + 16 * 20, 100.0 + 16 * 2, 0.0)
    assert session.made == session.checker.kept == 16 and session.checker.asked.count("fill") == 16
    free = 4 * batch.COPIES * 2**20
    assert len(batch.make(Session(free=free), CASE).seeds) == 2
    assert len(batch.make(Session(free=1), CASE).seeds) == 1


@pytest.mark.parametrize(
    "layouts",
    [({"captures": [{"space": "host"}]},), (LAYOUT, {**LAYOUT, "ours": False})],
    ids=["host", "changes"],
)
def test_outputs_on_the_host_and_layouts_that_change_have_no_batch(layouts):
    session = Session(layouts=layouts)
    assert batch.make(session, CASE) is None and session.checker.kept == 0


def test_calls_that_wait_for_the_device_have_batches_of_one():
    session = Session()
    assert found(session, Runner(20.0, waits=True)) == Batch(1, 120.0, 102.0, 0.0, alone=True)
    assert session.checker.asked.count("open_gate") == 1 + batch.READINGS + batch.EMPTY_BATCHES


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(("room", "kept"), [(1, 1), (4, 2)])
def test_where_few_contents_have_room_the_shortest_of_four_readings_on_new_ones_counts(room, kept, waits):
    """The first call waits for memory for its outputs, the others have it."""
    session = Session(free=room * batch.COPIES * 2**20)
    contents = batch.make(session, CASE)
    runner = Runner(20.0, waits=waits, first_us=800.0)
    read = batch.read(session, session.handle("my", runner), session.handle("judge", Runner(2.0)), contents, 1000.0, 1)
    calls = 1 if waits else kept
    assert read == Batch(calls, 100.0 + 20 * calls, 100.0 + 2 * calls, 0.0, alone=waits)
    assert session.checker.kept == len(contents.seeds) == kept
    taken = (batch.READINGS - (kept if waits else 1)) * kept  # new contents
    assert contents.used == [str(i + 1) for i in range(kept + taken)] and session.made == kept + taken


@pytest.mark.parametrize(("claimed_us", "most", "read"), [(20.0, 4, 2), (20.0, 1, 1), (70.0, 4, 1), (10.0, 4, 4)])
def test_a_batch_that_contradicts_the_times_is_read_again_on_new_contents(claimed_us, most, read):
    """The first one is late by 800 us. Calls of 20 us cannot be of 10."""
    session = Session()
    late_us = 800.0 if read == 1 else 0.0
    batch_found = found(session, Runner(20.0, first_us=800.0), claimed_us, most)
    assert batch_found == Batch(16, 100.0 + 16 * 20 + late_us, 100.0 + 16 * 2, 0.0)
    assert session.made == read * batch.CALLS and session.checker.kept == batch.CALLS


def test_contents_of_another_layout_do_not_take_the_place_of_those_that_are_kept():
    session = Session(layouts=(LAYOUT, {**LAYOUT, "ours": False}), free=1)
    contents = batch.make(session, CASE)
    mine, judge = session.handle("my", Runner(20.0)), session.handle("judge", Runner(2.0))
    read = batch.read(session, mine, judge, contents, 1000.0, 1)
    assert read == Batch(1, 120.0, 102.0, 0.0) and contents.seeds == contents.used == ["1"]
    assert session.checker.kept == 1


def test_a_call_alone_is_charged_for_what_it_enqueues_behind_the_spin_of_a_scored_call():
    session = Session()
    assert found(session, Runner(20.0, waits=True, late_us=1500.0)) == Batch(1, 520.0, 102.0, 0.0, alone=True)
    assert found(session, Runner(20.0, waits=True, late_us=900.0)) == Batch(1, 120.0, 102.0, 0.0, alone=True)


def test_a_word_that_is_no_digest_is_no_end():
    assert found(Session(), Runner(20.0, whole=False)).status == "CHEAT_SUSPECTED"


def test_every_output_is_checked():
    wrong = Outcome("INCORRECT", "element 0")
    said = found(Session([Outcome("PASSED")] * 15 + [wrong]), Runner(20.0))
    assert said.status == "INCORRECT" and said.reason == "in a batch of 16 calls: element 0"


def test_claims_of_fewer_calls_are_a_malformed_reply():
    said = found(Session(), Runner(20.0, claims=3))
    assert said.status == "RUNTIME_ERROR" and "claims of 3 calls" in said.reason


def test_a_batch_that_never_ends_is_a_timeout():
    runner = Runner(20.0)
    runner.us = -Checker.FIXED_US / 16  # the reading 0: no word came
    assert found(Session(), runner).status == "TIMEOUT"


def timing(us: float, *batches: Batch) -> readings.Timing:
    return readings.Timing(CASE, [[Outcome("PASSED", us=us)] * 3], batches=list(batches))


HONEST = Batch(16, 100 + 16 * 20.0, 100.0, 5.0)


@pytest.mark.parametrize(
    ("us", "batches", "status"),
    [
        (20.0, [HONEST], None),
        (18.1, [HONEST], None),
        (10.0, [HONEST], "INVALID_MEASUREMENT"),
        (10.0, [HONEST, HONEST], "CHEAT_SUSPECTED"),
        # The device may have waited for the host, whatever the number of readings.
        (10.0, [dataclasses.replace(HONEST, alone=True)] * 2, "INVALID_MEASUREMENT"),
        # A busy machine made one reading longer: the other excuses the claim.
        (20.0, [dataclasses.replace(HONEST, us=5000.0), HONEST], None),
        (10.0, [], None),
    ],
)
def test_a_claim_below_what_batches_allow_needs_two_of_them_to_be_a_cheat(us, batches, status):
    fault = readings._undercut(timing(us, *batches))
    assert (fault and fault.status) == status
    assert not fault or f"at least {HONEST.least_us:.2f} us" in fault.reason


def test_what_a_call_takes_at_least():
    assert HONEST.least_us == pytest.approx((outcome.BATCH_SHARE * 320 - 5) / 16)
    assert Batch(1, 100.0, 120.0, 1.0).least_us == 0


def test_a_batch_has_no_more_buffers_than_one_launch_touches():
    assert batch.CALLS <= native.TOUCHED
