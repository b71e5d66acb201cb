"""Recorded calls on a GPU: runners record them and are killed, then players make them on fresh contents.

A wave is as many cases as have room: each submission's call on each of them is recorded in one runner. Contents of
calls that count come to exist when no runner of the wave lives any more. What cannot be recorded is UNSUPPORTED, but for
a baseline and for a folder in GPU MODE's format: their calls are then made, and timed, in their runner (docs/rules.md).
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from harness.judge import limits, prepared, replies
from harness.judge.handle import Content, RunnerHandle, admitted
from harness.judge.outcome import Outcome
from harness.judge.player import Player
from harness.judge.session import Session
from harness.player import player
from harness.problem.folders import Case
from harness.sandbox.process import Died

SCRATCH_BYTES = 2 * 2**30  # of scratch memory, besides what a case's inputs, outputs and weights ask for
SCRATCH_FACTOR = 3  # times these: prepared weights, and copies in another format
RESERVE_BYTES = 6 * 2**30  # of the device, for the checker's reference and for what libraries load


@dataclass
class Recording:
    """A submission's call on one case: its name in the checker, the layout of its contents, what its runner said that
    it returned. failure: why it cannot be made. self_timed: why it is made and timed in the runner, "" if it is not.
    """

    name: str
    content: Content
    claims: list[replies.Claim] = field(default_factory=list)
    takes: list[dict] = field(default_factory=list)  # copies of a GPU MODE folder's answer, made behind the call
    failure: Outcome | None = None
    self_timed: str = ""


@dataclass
class Played:
    """A submission in a wave: its player, and by the case's number its recorded calls."""

    handle: RunnerHandle
    player: Player | None = None
    recordings: dict[int, Recording] = field(default_factory=dict)

    @property
    def self_times(self) -> bool:
        return any(one.self_timed and not one.failure for one in self.recordings.values())


class Replays:
    """The recorded calls of some submissions on some cases. A context manager: it ends players and frees memory.

    seed: of the weights and of the contents that calls are recorded on. weights: the seeds of the weights, by case.
    """

    def __init__(
        self, session: Session, handles: list[RunnerHandle], cases: dict[int, Case], seed: Callable[[Case], int]
    ) -> None:
        self.session, self.cases, self.seed = session, cases, seed
        self.played = {handle.name: Played(handle) for handle in handles}
        self.weights: dict[int, str | None] = {}
        self._recorded_on: dict[int, int] = {}

    def __enter__(self) -> "Replays":
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.played.values():
            self._release(one)
            self.session.stop(one.handle)
            if one.player:
                one.player.close()

    def waves(self) -> Iterator[int]:
        """Yield the numbers of all cases, each when its calls are recorded and the checker has its weights."""
        todo = list(self.cases)
        while todo:
            wave = self._record([one for one in self.played.values()], todo)
            for place, number in enumerate(wave):
                # The player of a call that failed is gone, with the calls that it had besides.
                lost = [one for one in self.played.values() if one.player is None and one.recordings.get(number)]
                self._record([one for one in lost if not one.recordings[number].failure], wave[place:])
                self._weigh(number)
                yield number
            todo = todo[len(wave) :]
            for one in self.played.values():
                self._release(one)

    def _weigh(self, number: int) -> None:
        """Make the weights of a case, the same each time."""
        case = self.cases[number]
        seed = self._recorded_on.setdefault(number, self.seed(case))
        self.weights[number] = self.session.weights(case, seed)

    def _record(self, those: list[Played], numbers: list[int]) -> list[int]:
        """Record these submissions on these cases, in one runner each. Return the cases that had room."""
        session, done = self.session, list[int]()
        alive = [one for one in those if not one.handle.broken]
        self._start(alive)
        for number in numbers if those else ():
            self._weigh(number)
            session.content(self.cases[number], self._recorded_on[number])
            if done and not self._has_room(len(those)) or len(done) == player.MOST_CALLS:
                break
            for one in those:
                one.recordings[number] = self._recorded(one, number)
            done.append(number)
        session.stop(*(one.handle for one in those if not one.self_times))
        return done

    def _start(self, those: list[Played]) -> None:
        """Start a runner and a player for each, with scratch memory."""
        session = self.session
        session.start(*(one.handle for one in those))
        for one in those:
            if one.handle.process is None:
                continue
            try:
                one.player = one.player or Player(one.handle.target)
                scratch, fd = one.player.scratch(self._scratch_bytes())
                message = {"op": "scratch", **scratch}
                one.handle.running.hand_over(replies.Done, message, [fd], "map its memory", limits.COMPILE_LIMIT_S)
            except Died as died:
                one.handle.lose(one.handle.running.failure(died))

    def _scratch_bytes(self) -> int:
        largest = max(case.weight_bytes + (case.bytes or 0) for case in self.cases.values())
        share = (self.session.memory() - RESERVE_BYTES) // (4 * len(self.played))
        return min(SCRATCH_BYTES + SCRATCH_FACTOR * largest, share)

    def _has_room(self, many: int) -> bool:
        """Return whether the present content has room for as many submissions: its memory, and a copy of scratch."""
        parts, weights = self.session.present.parts, self.session.weights_bytes
        need = player.COPIES * (parts["inputs"] + parts["outputs"]) + (1 + SCRATCH_FACTOR) * weights
        free = self.session.checker.ask({"op": "free_memory"})["free"]
        return bool(free > RESERVE_BYTES + many * need)

    def _recorded(self, one: Played, number: int) -> Recording:
        """Record a submission's call on the present content."""
        handle = one.handle
        recording = Recording(f"{handle.name} {number}", self.session.present)
        if handle.submission and not handle.submission.serves(self.cases[number]):
            recording.failure = Outcome("UNSUPPORTED", handle.submission.limits)
        elif handle.process is None or one.player is None:
            recording.failure = handle.broken or handle.loss
        else:
            try:
                self._fill_in(recording, handle, one.player, number + 1)
            except Died as died:
                failure = handle.running.failure(died) if handle.process else Outcome(died.status, died.reason)
                recording.failure = handle.lose(failure)
        return recording

    def _fill_in(self, recording: Recording, handle: RunnerHandle, made: Player, number: int) -> None:
        """Make the memory of a call, record it, and give it to the player. Died: that failed."""
        session, process = self.session, handle.running
        sizes = {**recording.content.parts, "weights": session.weights_bytes}
        fds = made.memory(number, sizes)
        pair = sum(1 for part in ("inputs", "outputs") if sizes[part])
        attach = {"op": "attach", "runner": recording.name, "sizes": sizes, "copies": player.COPIES}
        message = {
            "op": "record",
            "address": player.place_of(number),
            "weights_address": player.place_of(number) + player.WEIGHTS,
            "sizes": sizes,
            "baseline": handle.baseline,
            **recording.content.layout,
        }
        try:
            attached, _ = session.checker.request(attach, fds=fds)
            session.checker.ask({"op": "fill", "runner": recording.name, "buffer": 0})
            process.child.send({**message, "weights": attached["weights"]}, (*fds[:pair], *fds[player.COPIES * pair :]))
        finally:
            for fd in fds:
                os.close(fd)
        said, images = process.child.receive(session.first_call_limit_s + limits.PREPARE_LIMIT_S)
        try:
            recorded = admitted(replies.read(replies.Recorded, said))
            handle.audit.note(recorded.prepare_us, recorded.prepared_bytes)
            recording.claims, recording.takes = recorded.claims, [take.model_dump(by_alias=True) for take in recorded.takes]
            recording.failure = prepared.fault_of(recorded.prepared_bytes, session.weights_bytes)
            if recorded.branches:
                recording.failure = Outcome("RULE_BROKEN", recorded.unrecorded)
            elif recorded.unrecorded and (handle.baseline or not session.problem.ours):
                recording.self_timed = recorded.unrecorded
            elif recorded.unrecorded:
                recording.failure = Outcome("UNSUPPORTED", recorded.unrecorded)
            if not recording.failure:
                verdict = session.verdict(recording.name, 0, recorded.claims, handle.baseline)
                recording.failure = verdict if verdict.status != "PASSED" else None
            if not recording.failure and not recording.self_timed:
                made.load(number, recorded, tuple(images))
        finally:
            for fd in images:
                os.close(fd)

    def play(self, handle: RunnerHandle, number: int, copy: int, limit_s: float) -> Outcome:
        """Make a submission's call on the present content, which lies in memory `copy`, and judge what it wrote."""
        one, session = self.played[handle.name], self.session
        recording = one.recordings[number]
        if recording.failure:
            return recording.failure
        copy = 0 if recording.self_timed else copy
        session.checker.ask({"op": "fill", "runner": recording.name, "buffer": copy})
        try:
            if recording.self_timed:
                return self._self_timed(one, recording, limit_s)
            if one.player is None:
                raise Died("RUNTIME_ERROR", "its player was lost")
            us, host_us = one.player.play(number + 1, copy, limit_s, takes=recording.takes)
        except Died as died:
            one.player = None
            recording.failure = Outcome(died.status, died.reason)
            session.see_device(handle.name, died.reason)
            return recording.failure
        found = session.verdict(recording.name, copy, recording.claims, handle.baseline, fixed=True)
        found.us, found.host_us, found.bytes = us, host_us, session.present.bytes
        return found

    def _self_timed(self, one: Played, recording: Recording, limit_s: float) -> Outcome:
        """Make a call in the runner, by its own clock."""
        raise NotImplementedError

    def _release(self, one: Played) -> None:
        """Free what the checker and the player hold of a submission's calls."""
        for recording in one.recordings.values():
            self.session.checker.ask({"op": "release", "runner": recording.name})
        one.recordings.clear()
