"""Recorded calls of submissions on a GPU: runners record them and are killed, then players make them on fresh contents.

A wave is as many cases as have room: the call of each submission on each of them is recorded in one runner. Contents of
calls that count come to exist when no runner of the wave lives any more. What cannot be recorded is UNSUPPORTED, but
for baselines and for folders in GPU MODE's format: their calls are then made and timed in their runner, which stays
(docs/rules.md).
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from harness.judge import limits, prepared, replies
from harness.judge.events import Step
from harness.judge.handle import Content, RunnerHandle, admitted, remarked
from harness.judge.outcome import Outcome
from harness.judge.player import Player
from harness.judge.session import Session
from harness.player import player
from harness.problem.folders import Case, ProblemError
from harness.sandbox.process import Died

SCRATCH_BYTES = 4 * 2**30  # of scratch memory, besides what a case's inputs, outputs and weights ask for
SCRATCH_FACTOR = 4  # times inputs and outputs: copies in another format
PREPARED = 1.25  # times the weights
RESERVE_BYTES = 6 * 2**30  # of the device, for the checker's reference and for what libraries load
READ_BYTES = 4 * 2**30  # that the judge's readers read at most; a case that moves more gets their time in proportion
FLUSH_BYTES = 256 * 2**20  # written ahead of a call that is timed in its runner


@dataclass
class Recording:
    """A submission's call on one case: its name in the checker, the layout of its contents, what its runner said that
    it returned. failure: why it cannot be made. self_timed: why it is made and timed in the runner, "" if it is not.
    """

    name: str
    number: int  # in its player
    content: Content
    message: dict = field(default_factory=dict)  # what its runner gets to map its memory
    fds: list[int] = field(default_factory=list)  # of that memory, while it is timed in the runner
    claims: list[replies.Claim] = field(default_factory=list)
    takes: list[dict] = field(default_factory=list)  # copies of a GPU MODE folder's answer, made behind the call
    failure: Outcome | None = None
    self_timed: str = ""

    def make(self, session: Session, made: Player, baseline: bool) -> None:
        """Make the memory of the call, with the present content in it."""
        sizes = {**self.content.parts, "weights": session.weights_bytes}
        self.message = {
            "address": player.place_of(self.number),
            "weights_address": player.place_of(self.number) + player.WEIGHTS,
            "sizes": sizes,
            "baseline": baseline,
            **self.content.layout,
        }
        fds = made.memory(self.number, sizes)
        pair = sum(1 for part in ("inputs", "outputs") if sizes[part])
        self.fds = [os.dup(fd) for fd in (*fds[:pair], *fds[player.COPIES * pair :])]
        self.message["weights"] = self.attach(session, fds)
        session.checker.ask({"op": "fill", "runner": self.name, "buffer": 0})

    def attach(self, session: Session, fds: list[int]) -> dict | None:
        """Have the checker map the call's memory. Return the specification of its weights, None without such. fds: of
        all of it, which are closed here.
        """
        message = {"op": "attach", "runner": self.name, "sizes": self.message["sizes"], "copies": player.COPIES}
        weights: dict | None = session.checker.request(message, fds=fds)[0]["weights"]
        return weights

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = []


@dataclass
class Played:
    """A submission in a wave: its player, and by the case's number its recorded calls."""

    handle: RunnerHandle
    player: Player | None = None
    recordings: dict[int, Recording] = field(default_factory=dict)

    def lacks(self, number: int) -> bool:
        """Return whether the call on this case is to be recorded, again or at last."""
        recording = self.recordings.get(number)
        return recording is None or (self.player is None and not recording.failure)

    @property
    def self_times(self) -> bool:
        return any(one.self_timed and not one.failure for one in self.recordings.values())


class Replays:
    """The recorded calls of some submissions on some cases. A context manager: it ends players and frees memory.

    seeds: by case, of the weights. compiles: this is a compile step, whose contents are public and whose caches are
    kept.
    """

    def __init__(
        self,
        session: Session,
        handles: list[RunnerHandle],
        cases: dict[int, Case],
        seeds: dict[int, int],
        compiles: bool = False,
    ) -> None:
        self.session, self.cases, self.seeds, self.compiles = session, cases, seeds, compiles
        self.played = {handle.name: Played(handle) for handle in handles}
        self._weighed: int | None = None  # the case whose weights the checker has
        self._mapped: dict[str, int] = {}  # by submission that is timed in its runner, the case whose memory it maps

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
        while todo and self.played:
            wave = self._record(list(self.played.values()), todo)
            for place, number in enumerate(wave):
                # A runner or player that was lost took the calls along that it had besides, or was still to record.
                self._record([one for one in self.played.values() if one.lacks(number)], wave[place:])
                self._weigh(number)
                yield number
            todo = todo[len(wave) :]
            for one in self.played.values():
                self._release(one)

    def _weigh(self, number: int) -> None:
        """Make the weights of a case, the same each time."""
        if self._weighed != number:
            self.session.weights(self.cases[number], self.seeds[number])
            self._weighed = number

    def _record(self, those: list[Played], numbers: list[int]) -> list[int]:
        """Record these submissions on these cases, in one runner each. Return the cases that had room."""
        session, done = self.session, list[int]()
        for one in those:
            self._release(one)
        session.stop(*(one.handle for one in those))  # which hold scratch memory
        self._start([one for one in those if not one.handle.broken])
        for number in numbers if those else ():
            self._weigh(number)
            # Others than those that are judged: what a call keeps of them must be of no use.
            session.content(self.cases[number], self.cases[number].seed if self.compiles else None)
            if (done and not self._has_room(len(those))) or len(done) == player.MOST_CALLS:
                break
            for place, one in enumerate(those, len(done) * len(those)):
                said = f"{self.cases[number]}  {one.handle.runner}"
                session.progress(Step("record", place, len(numbers) * len(those), said))
                if recording := self._recorded(one, number, len(done) + 1):
                    one.recordings[number] = recording
            done.append(number)
        for one in those:
            one.handle.keep = self.compiles and one.handle.process is not None
        session.stop(*(one.handle for one in those if not one.self_times))
        return done

    def _start(self, those: list[Played]) -> None:
        """Start a player for each, and a runner, which takes its memory from the player's. ProblemError: no player can
        be started.
        """
        for one in those:
            try:
                one.player = one.player or Player(one.handle.target)
            except Died as died:
                raise ProblemError(f"the player of {one.handle.name} failed: {died.reason}") from None
            try:
                one.handle.scratch = one.player.scratch(self._scratch_bytes())
            except Died as died:
                one.player, one.handle.broken = None, Outcome(died.status, f"its player failed: {died.reason}")
        self.session.start(*(one.handle for one in those if one.player))

    def _scratch_bytes(self) -> int:
        largest = max(
            PREPARED * case.weight_bytes + SCRATCH_FACTOR * max(0, (case.bytes or 0) - case.weight_bytes)
            for case in self.cases.values()
        )
        share = (self.session.checker.ask({"op": "memory"})["total"] - RESERVE_BYTES) // (2 * len(self.played))
        return min(SCRATCH_BYTES + int(largest), share)

    def _has_room(self, many: int) -> bool:
        """Return whether the present content has room for as many submissions, each with its memory and a copy of
        scratch, beside the judge's readers and other memory for a call that moves.
        """
        present, weights = self.session.present, self.session.weights_bytes
        parts = player.COPIES * (present.parts["inputs"] + present.parts["outputs"])
        spare = RESERVE_BYTES + player.COPIES * min(present.moved, READ_BYTES) + parts + weights
        free = self.session.checker.ask({"op": "memory"})["free"]
        return bool(free > spare + many * (parts + int((1 + 2 * PREPARED) * weights)))

    def _recorded(self, one: Played, case: int, number: int) -> Recording | None:
        """Record a submission's call on the present content, of this case, under this number. Return None if its runner
        was lost by another call, and it may get a further one.
        """
        handle = one.handle
        recording = Recording(f"{handle.name} {case}", number, self.session.present)
        if handle.submission and not handle.serves(self.cases[case]):
            recording.failure = Outcome("UNSUPPORTED", handle.submission.limits)
        elif handle.broken:
            recording.failure = handle.broken
        elif handle.process is None or one.player is None:
            if handle.lost < limits.GIVE_UP_AFTER:
                return None
            recording.failure = replace(
                handle.loss, reason=remarked(handle.loss.reason, f"not run: {handle.lost} processes were lost before")
            )
        else:
            try:
                self._fill_in(recording, handle, one.player)
                self._mapped[handle.name] = case
            except Died as died:
                recording.failure = handle.lose(handle.running.failure(died))
                one.player = None if one.player.lost else one.player
        return recording

    def _fill_in(self, recording: Recording, handle: RunnerHandle, made: Player) -> None:
        """Make the memory of a call, record it, and give it to the player. Died: that failed."""
        session, process = self.session, handle.running
        recording.make(session, made, handle.baseline)
        process.child.send({"op": "record", **recording.message}, tuple(recording.fds))
        limit_s = session.first_call_limit_s + limits.PREPARE_LIMIT_S
        reply, images = process.child.receive(limit_s, descriptors=True)
        try:
            recorded = admitted(replies.read(replies.Recorded, reply))
            self._take(recording, handle, recorded)
            # What the runner's own calls left: its fault has the better message.
            if not recording.failure and session.problem.ours:
                claims = None if recording.self_timed else recorded.claims
                verdict = session.verdict(recording.name, 0, claims, handle.baseline)
                recording.failure = verdict if verdict.status != "PASSED" else None
            if not recording.failure and not recording.self_timed:
                made.load(recording.number, recorded, images)
        finally:
            for fd in images:
                os.close(fd)
            if not recording.self_timed:
                recording.close()

    def _take(self, recording: Recording, handle: RunnerHandle, recorded: replies.Recorded) -> None:
        """Take over what a runner says of the call that it was to record. Died: it has no such call."""
        if (recorded.before and not handle.baseline) or (recorded.takes and self.session.problem.ours):
            raise Died("RUNTIME_ERROR", "its process sent a malformed reply: work ahead of its call, or behind it")
        if recorded.prepare_us is not None:
            handle.audit.prepare_us = recorded.prepare_us
            handle.audit.kept_bytes = max(handle.audit.kept_bytes or 0, sum(recorded.used[1::2]))
        recording.claims = recorded.claims
        recording.takes = [take.model_dump(by_alias=True) for take in recorded.takes]
        if self.session.weights_bytes and not handle.baseline:
            kept = sum(recorded.used[1::2])  # all that is not in these ranges is poisoned before each call
            recording.failure = prepared.fault_of(kept, self.session.weights_bytes, prepared.WORK_SLACK)
        if recorded.branches and not handle.baseline:
            recording.failure = Outcome("RULE_BROKEN", recorded.unrecorded)
        elif recorded.unrecorded and (handle.baseline or not self.session.problem.ours):
            recording.self_timed = recorded.unrecorded
        elif not self.session.problem.ours and self._layout_differs(recording):
            recording.self_timed = "the shapes, numbers or texts in its data differ from contents to contents"
        elif recorded.unrecorded:
            recording.failure = Outcome("UNSUPPORTED", recorded.unrecorded)

    def _layout_differs(self, recording: Recording) -> bool:
        """Return whether other contents of this case have another layout."""
        session = self.session
        session.content(recording.content.case)
        return session.present.layout != recording.content.layout

    def move(self, number: int) -> None:
        """Put the memory of a case's calls elsewhere, as a new process would."""
        for one in self.played.values():
            recording = one.recordings[number]
            if recording.failure or recording.self_timed or one.player is None:
                continue
            try:
                fds = one.player.move(recording.number)
            except Died as died:
                self._lose(one, recording, died)
                continue
            self.session.checker.ask({"op": "release", "runner": recording.name})
            recording.attach(self.session, fds)

    def play(self, handle: RunnerHandle, number: int, copy: int, remaining_s: float) -> Outcome:
        """Make a submission's call on the present content, which lies in memory `copy`, and judge what it wrote."""
        one, session = self.played[handle.name], self.session
        recording, limit_s = one.recordings[number], min(session.call_limit_s, remaining_s)
        if recording.failure:
            return recording.failure
        try:
            if recording.self_timed:
                return self._self_timed(handle, recording, number, limit_s)
            session.checker.ask({"op": "fill", "runner": recording.name, "buffer": copy})
            if one.player is None:
                raise Died("RUNTIME_ERROR", "its player was lost")
            us, host_us = one.player.play(recording.number, copy, limit_s, takes=recording.takes)
        except Died as died:
            return self._lose(one, recording, died)
        found = session.verdict(recording.name, copy, recording.claims, handle.baseline, fixed=True)
        found.us, found.host_us, found.bytes = us, host_us, session.present.bytes
        return found

    def _lose(self, one: Played, recording: Recording, died: Died) -> Outcome:
        """Note that a call failed, and with it its player, or the runner that timed it."""
        if one.player:
            one.player.close()
            one.player = None
        recording.failure = Outcome(died.status, died.reason)
        if recording.self_timed and one.handle.process:
            recording.failure = one.handle.lose(one.handle.running.failure(died))
        self.session.checker.see_device(one.handle.name, died.reason)
        return recording.failure

    def _self_timed(self, handle: RunnerHandle, recording: Recording, number: int, limit_s: float) -> Outcome:
        """Make a call in the runner, by its own clock. Died: that failed."""
        session, process = self.session, handle.running
        message = recording.message | session.present.layout
        if self._mapped.get(handle.name) != number or message != recording.message:
            fds, recording.message = [os.dup(fd) for fd in recording.fds], message
            process.hand_over(replies.Done, {"op": "map_call", **message}, fds, "map its memory", limit_s)
            self._mapped[handle.name] = number
        session.checker.ask({"op": "fill", "runner": recording.name, "buffer": 0})
        request = {"op": "time", "baseline": handle.baseline, "flush": FLUSH_BYTES}
        reply = process.ask(replies.SelfTimed, request, limit_s)
        found = session.verdict(recording.name, 0, reply.claims, handle.baseline)
        found.us, found.bytes, found.self_timed = reply.us, session.present.bytes, True
        return found

    def _release(self, one: Played) -> None:
        """Free what the checker and the player hold of a submission's calls."""
        for recording in one.recordings.values():
            recording.close()
            self.session.checker.ask({"op": "release", "runner": recording.name})
        one.recordings.clear()
