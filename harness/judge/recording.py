"""Recorded calls of submissions on a GPU: runners record them and are killed, then players make them on fresh contents.

A wave is as many cases as have room: the call of each submission on each of them is recorded in one runner. Contents of
calls that count come to exist when no runner of the wave lives any more. Each group of them has fresh players, since
each process has its level of times. What cannot be recorded is UNSUPPORTED, but for baselines and for folders in GPU
MODE's format: their calls are then made and timed in their runner, which stays (docs/rules.md).
"""

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from harness.judge import replies
from harness.judge.handle import WORK_SLACK, Content, RunnerHandle, admitted, kept_too_much
from harness.judge.outcome import Outcome
from harness.judge.session import CLOSED_AT_ONCE, Session, Step
from harness.player import player
from harness.problem.folders import Case, ProblemError
from harness.sandbox.process import Child, Died

SCRATCH_BYTES = 4 * 2**30  # of scratch memory, besides what a case's inputs, outputs and weights ask for
SCRATCH_FACTOR, UNSAID_BYTES = 4, 2 * 2**30  # times inputs and outputs, or what counts where a case does not say them
PREPARED, PREPARING = 1.25, 2  # times the weights: what is kept, and room for copies while it is made
RESERVE_BYTES = 6 * 2**30  # of the device, for the checker's reference and for what libraries load
READ_BYTES = 4 * 2**30  # that the judge's readers read at most; a case that moves more gets their time in proportion
FLUSH_BYTES = 256 * 2**20  # written ahead of a call that is timed in its runner
EMPTY, READER = 1, 2  # what a player does in place of a call: nothing; reader READER + n
MEMORY = "CUDA_ERROR_ILLEGAL_ADDRESS"
MEMORY_HINT = (
    "in a timed call inputs and weights are read-only, and scratch memory must come from torch (torch.empty in the "
    "call, or before): memory of its own, or the address of a module's variable in a parameter, is not there"
)


class Player:
    """A player's process. Died from any request: it is gone, or failed and is ended. ProblemError: it cannot start."""

    def __init__(self, target: str) -> None:
        self.child = Child("harness.player.player")
        self._images: dict[int, int] = {}  # by descriptor, the number of code that the process has loaded
        self._about: dict | None = None  # its first reply, which takes a second; None: that is still to come
        with contextlib.suppress(Died):  # as the first request says
            self.child.send({"library": str(player.artefact(target).path)})

    @property
    def about(self) -> dict[str, int]:
        """How many plain "readers" it has, and of how many "device_bytes" the device is."""
        if self._about is None:
            try:
                self._about = self._taken(self.child.receive(replies.CHECKER_LIMIT_S))[0]
            except Died as died:
                raise ProblemError(f"no player can be started: {died.reason}") from None
        return self._about

    def _request(
        self, message: dict, fds: tuple[int, ...] = (), limit_s: float = replies.CHECKER_LIMIT_S
    ) -> tuple[dict, list[int]]:
        self.about  # noqa: B018  it has started
        return self._taken(self.child.request(message, limit_s, fds))

    def _taken(self, answer: tuple[dict, list[int]]) -> tuple[dict, list[int]]:
        """Return a reply and its descriptors. Died: it says that the player failed."""
        reply, fds = answer
        if "failed" not in reply:
            return reply, fds
        text = reply["text"]
        if reply["failed"] == player.RefusedError.__name__:
            raise Died("RUNTIME_ERROR", f"its recorded call is refused: {text}")
        self.child.kill()
        if text.startswith("TIMEOUT "):
            raise Died("TIMEOUT", text.removeprefix("TIMEOUT "))
        raise Died("RUNTIME_ERROR", f"{text}; {MEMORY_HINT}" if MEMORY in text else text)

    def scratch(self, nbytes: int) -> tuple[dict, int]:
        """Forget the call, make scratch memory for those of a runner. Return what it needs, with the descriptor."""
        nbytes = -(-nbytes // player.PAGE) * player.PAGE
        reply, (fd,) = self._request({"op": "scratch", "bytes": nbytes})
        return {"address": reply["address"], "nbytes": nbytes}, fd

    def memory(self, number: int, sizes: dict[str, int]) -> list[int]:
        """Forget the call, and make memory for another: bytes of "inputs", "outputs", "weights". Return descriptors."""
        return self._request({"op": "memory", "number": number, **sizes})[1]

    def snapshot(self, used: list[int]) -> list[int]:
        """Copy ranges of scratch memory, each an offset and a size. Return the copy's descriptor, if there are any."""
        return self._request({"op": "snapshot", "used": used})[1]

    def load(self, recorded: replies.Recorded, images: list[int], kept: list[int]) -> None:
        """Take a recorded call. images, kept: descriptors of its code, which stay open, and of its scratch memory."""
        parts = recorded.model_dump(by_alias=True, include={"before", "nodes", "variables", "used"})
        fresh = [fd for fd in dict.fromkeys(images) if fd not in self._images]
        for fd in fresh:
            self._images[fd] = len(self._images)
        numbers = [self._images[fd] for fd in images]
        self._request({"op": "load", **parts, "images": numbers, "kept": bool(kept)}, (*fresh, *kept))

    def play(
        self, copy: int, limit_s: float, kind: int = 0, nbytes: int = 0, takes: list[dict] | None = None
    ) -> tuple[float, float]:
        """Make the call on the contents of one of its copies. Return (us of the event pair, us of the host's clock)."""
        message = {"op": "play", "copy": copy, "what": kind, "bytes": nbytes, "limit_s": limit_s, "takes": takes or []}
        reply, _ = self._request(message, limit_s=3 * limit_s + replies.CHECKER_LIMIT_S)
        return reply["us"], reply["host_us"]

    def close(self) -> None:
        self.child.close()


@dataclass
class Recording:
    """A submission's call on one case: its name in the checker, the layout of its contents, what its runner said that
    it returned. failure: why it cannot be made. self_timed: why it is made and timed in the runner, "" if it is not.
    """

    name: str
    number: int  # in its runner
    content: Content
    message: dict = field(default_factory=dict)  # what its runner gets to map its memory
    fds: list[int] = field(default_factory=list)  # of that memory, while it is timed in the runner
    claims: list[replies.Claim] = field(default_factory=list)
    takes: list[dict] = field(default_factory=list)  # copies of a GPU MODE folder's answer, made behind the call
    failure: Outcome | None = None
    self_timed: str = ""
    recorded: replies.Recorded | None = None  # what players get
    images: list[int] = field(default_factory=list)  # descriptors of its code, which the submission's calls share
    kept: list[int] = field(default_factory=list)  # of the scratch memory that it uses, as it was then: none or one

    def make(self, session: Session, its_player: Player, baseline: bool) -> list[int]:
        """Make the memory of the call, with its weights, which the checker maps. Return descriptors for its runner."""
        sizes = {**self.content.parts, "weights": session.weights_bytes}
        fds = its_player.memory(self.number, sizes)
        pair = sum(1 for part in ("inputs", "outputs") if sizes[part])
        for_runner = [os.dup(fd) for fd in (*fds[:pair], *fds[player.COPIES * pair :])]
        message = {"op": "attach", "runner": self.name, "sizes": sizes, "copies": player.COPIES}
        weights: dict | None = session.checker.request(message, fds=fds)[0]["weights"]
        self.message = {
            "address": player.place_of(self.number),
            "weights_address": player.place_of(self.number) + player.WEIGHTS,
            "sizes": sizes,
            "weights": weights,
            "baseline": baseline,
            **self.content.layout,
        }
        return for_runner

    def close(self) -> None:
        _close(self.fds, self.kept)


def _close(*those: list[int]) -> None:
    for fds in those:
        for fd in fds:
            os.close(fd)
        fds.clear()


@dataclass
class Played:
    """A submission in a wave: its player, scratch memory that this has and a runner gets, and recordings by case."""

    handle: RunnerHandle
    player: Player | None = None
    has_scratch: bool = False
    scratch_bytes: int = 0
    recordings: dict[int, Recording] = field(default_factory=dict)

    @property
    def extent(self) -> int:
        """Bytes of scratch memory that its calls were given: a player has no more of it, which it poisons each time."""
        sizes = [recording.recorded.scratch for recording in self.recordings.values() if recording.recorded]
        return max(1, min(self.scratch_bytes, max(sizes, default=0)))

    def end_player(self) -> None:
        if self.player:
            self.player.close()
        self.player, self.has_scratch = None, False


class Replays:
    """The recorded calls of some submissions on some cases. A context manager: it ends players and frees memory.

    seeds: by case, of the weights. compiles: a compile step, whose contents are public and whose caches are kept.
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
        self._images: dict[tuple[str, int, int], int] = {}  # by submission, which may write to it, and inode: its code
        self._wave: list[int] = []

    def __enter__(self) -> "Replays":
        return self

    def __exit__(self, *_: object) -> None:
        for played in self.played.values():
            self._forget(played)
            self.session.stop(played.handle)
            played.end_player()
        for fd in self._images.values():
            os.close(fd)

    def waves(self) -> Iterator[list[int]]:
        """Yield the numbers of all cases in waves, each when its calls are recorded."""
        todo = list(self.cases)
        while todo and self.played:
            self._wave = self._record(list(self.played.values()), todo)
            for place, number in enumerate(self._wave):
                # A runner that was lost left calls behind that were still to be recorded.
                lacking = [played for played in self.played.values() if number not in played.recordings]
                self._record(lacking, self._wave[place:])
            yield self._wave
            todo = todo[len(self._wave) :]
            for played in self.played.values():
                self._forget(played)

    def renew(self) -> None:
        """Have other processes make the calls from now on."""
        with ThreadPoolExecutor(CLOSED_AT_ONCE) as pool:
            list(pool.map(Played.end_player, self.played.values()))
        for played in self.played.values():
            if any(recording.recorded and not recording.failure for recording in played.recordings.values()):
                played.player = Player(played.handle.target)  # all of them start at the same time

    def place(self, number: int) -> None:
        """Give players their calls on a case, with its weights."""
        for played in self.played.values():
            recording = played.recordings.get(number)
            lost = recording and recording.self_timed and not recording.failure and played.handle.process is None
            if lost:  # its runner was, by another call: a new one maps what others are recorded of
                self._record([played], [number])
            elif recording is None:
                self._record([played], self._wave[self._wave.index(number) :])
        self._weigh(number)
        for played in self.played.values():
            recording = played.recordings[number]
            if recording.recorded is None or recording.failure:
                continue
            try:
                played.player = played.player or Player(played.handle.target)
                if not played.has_scratch:
                    os.close(played.player.scratch(played.extent)[1])
                    played.has_scratch = True
                _close(recording.make(self.session, played.player, played.handle.baseline))
                played.player.load(recording.recorded, recording.images, recording.kept)
            except Died as died:
                self._lose(played, recording, died)

    def free(self, number: int) -> None:
        """Free what the checker holds of the players' calls on a case."""
        for played in self.played.values():
            if played.recordings[number].recorded:
                self._release(played.recordings[number])

    def _weigh(self, number: int) -> None:
        """Make the weights of a case, the same each time."""
        if self._weighed != number:
            self.session.weights(self.cases[number], self.seeds[number])
            self._weighed = number

    def _record(self, those: list[Played], numbers: list[int]) -> list[int]:
        """Record these submissions on these cases, in one runner each. Return the cases that had room."""
        session, done = self.session, list[int]()
        session.stop(*(played.handle for played in those))  # which hold scratch memory
        self._start([played for played in those if not played.handle.broken])
        for number in numbers if those else ():
            self._weigh(number)
            # Others than those that are judged: what a call keeps of them must be of no use.
            session.content(self.cases[number], self.cases[number].seed if self.compiles else None)
            if (done and not self._has_room(len(those))) or len(done) == player.MOST_CALLS:
                break
            for place, played in enumerate(those, len(done) * len(those)):
                label = f"{self.cases[number]}  {played.handle.runner}"
                session.progress(Step("record", place, len(numbers) * len(those), label))
                self._forget(played, number)
                if recording := self._recorded(played, number, len(done) + 1):
                    played.recordings[number] = recording
            done.append(number)
        for played in those:
            played.handle.keep = self.compiles and played.handle.process is not None
        timed = {p.handle.name for p in those if any(r.self_timed and not r.failure for r in p.recordings.values())}
        session.stop(*(played.handle for played in those if played.handle.name not in timed))
        return done

    def _start(self, those: list[Played]) -> None:
        """Start a player for each, and a runner, which takes its memory from the player's."""
        for played in those:
            played.end_player()
        for played, its_player in [(played, Player(played.handle.target)) for played in those]:
            self._mapped.pop(played.handle.name, None)
            played.player, played.scratch_bytes = its_player, self._scratch_bytes(its_player.about["device_bytes"])
            try:
                played.handle.scratch, played.has_scratch = its_player.scratch(played.scratch_bytes), True
            except Died as died:
                played.handle.broken = Outcome(died.status, f"its player failed: {died.reason}")
                played.end_player()
        self.session.start(*(played.handle for played in those if played.player))
        for handle in (played.handle for played in those):
            if handle.scratch:  # it was not started
                os.close(handle.scratch[1])
                handle.scratch = None

    def _scratch_bytes(self, device_bytes: int) -> int:
        largest = max(
            PREPARING * case.weight_bytes + SCRATCH_FACTOR * max(0, (case.bytes or UNSAID_BYTES) - case.weight_bytes)
            for case in self.cases.values()
        )
        return min(SCRATCH_BYTES + int(largest), (device_bytes - RESERVE_BYTES) // (2 * len(self.played)))

    def _has_room(self, many: int) -> bool:
        """Whether so many submissions have room, each with a copy of scratch memory, beside the judge's readers."""
        present, weights = self.session.present, self.session.weights_bytes
        need = player.COPIES * (present.parts["inputs"] + present.parts["outputs"]) + int((1 + PREPARED) * weights)
        spare = RESERVE_BYTES + player.COPIES * min(present.moved, READ_BYTES)
        return bool(self.session.checker.ask({"op": "memory"})["free"] > spare + many * need)

    def _recorded(self, played: Played, case: int, number: int) -> Recording | None:
        """Record a call on the present content. None: another call lost its runner, and it may get a further one."""
        handle = played.handle
        recording = Recording(f"{handle.name} {case}", number, self.session.present)
        if handle.submission and not handle.serves(self.cases[case]):
            recording.failure = Outcome("UNSUPPORTED", handle.submission.limits)
        elif handle.broken:
            recording.failure = handle.broken
        elif handle.process is None or played.player is None:
            if handle.lost < replies.GIVE_UP_AFTER:
                return None
            recording.failure = handle.loss
        else:
            try:
                self._fill_in(recording, handle, played.player)
                self._mapped[handle.name] = case
            except Died as died:
                recording.failure = handle.lose(handle.running.failure(died))
        return recording

    def _fill_in(self, recording: Recording, handle: RunnerHandle, its_player: Player) -> None:
        """Make the memory of a call, and record it. Died: that failed."""
        session, process = self.session, handle.running
        recording.fds = recording.make(session, its_player, handle.baseline)
        session.checker.ask({"op": "fill", "runner": recording.name, "buffer": 0})
        process.child.send({"op": "record", **recording.message}, tuple(recording.fds))
        limit_s = (1 + self.compiles) * session.first_call_limit_s + replies.PREPARE_LIMIT_S
        reply, images = process.child.receive(limit_s, descriptors=True)
        recording.images = [self._image(handle.name, fd) for fd in images]
        recorded = admitted(replies.read(replies.Recorded, reply))
        self._take(recording, handle, recorded)
        # What the runner's own calls left: its fault has the better message.
        if not recording.failure and session.problem.ours:
            claims = None if recording.self_timed else recorded.claims
            verdict = session.verdict(recording.name, 0, claims, handle.baseline)
            recording.failure = verdict if verdict.status != "PASSED" else None
        if recording.self_timed:
            return
        if not recording.failure and not self.compiles:
            recording.kept, recording.recorded = its_player.snapshot(recorded.used), recorded
        self._release(recording)
        _close(recording.fds)

    def _image(self, name: str, fd: int) -> int:
        """Return a descriptor of the same file, which is kept: one for all calls of a runner that have it."""
        kept = self._images.setdefault((name, os.fstat(fd).st_dev, os.fstat(fd).st_ino), fd)
        if kept != fd:
            os.close(fd)
        return kept

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
            recording.failure = kept_too_much(kept, self.session.weights_bytes, WORK_SLACK)
        if recorded.branches and not handle.baseline:
            recording.failure = Outcome("RULE_BROKEN", recorded.unrecorded)
        elif recorded.unrecorded and (handle.baseline or not self.session.problem.ours):
            recording.self_timed = recorded.unrecorded
        elif not self.session.problem.ours and (handle.unplayable or self._layout_differs(recording)):
            recording.self_timed = handle.unplayable or "its data's shapes, numbers or texts differ between contents"
        elif recorded.unrecorded:
            recording.failure = Outcome("UNSUPPORTED", recorded.unrecorded)

    def _layout_differs(self, recording: Recording) -> bool:
        """Return whether other contents of this case have another layout."""
        session = self.session
        session.content(recording.content.case)
        return session.present.layout != recording.content.layout

    def play(self, handle: RunnerHandle, number: int, copy: int) -> Outcome:
        """Make a submission's call on the present content, which lies in memory `copy`, and judge what it wrote."""
        played, session = self.played[handle.name], self.session
        recording, limit_s = played.recordings[number], session.call_limit_s
        if recording.failure:
            return recording.failure
        try:
            if recording.self_timed:
                return self._self_timed(handle, recording, number, limit_s)
            session.checker.ask({"op": "fill", "runner": recording.name, "buffer": copy})
            if played.player is None:
                raise Died("RUNTIME_ERROR", "its player was lost")
            us, host_us = played.player.play(copy, limit_s, takes=recording.takes)
        except Died as died:
            final = session.problem.ours or recording.self_timed or MEMORY not in died.reason
            return self._lose(played, recording, died) if final else self._in_its_runner(played, number)
        outcome = session.verdict(recording.name, copy, recording.claims, handle.baseline, fixed=True)
        outcome.us, outcome.host_us, outcome.bytes = us, host_us, session.present.bytes
        return outcome

    def _in_its_runner(self, played: Played, number: int) -> Outcome:
        """Make a folder's call, and all that follow, in the runner: memory of a library's own is in no player."""
        case, seed = self.session.present.case, self.session.seed
        played.handle.unplayable = "its recorded call reads memory that is not torch's, or writes to its inputs"
        self._forget(played)
        self._record([played], self._wave[self._wave.index(number) :])
        self._weigh(number)
        self.session.content(case, seed)
        return self.play(played.handle, number, 0)

    def _lose(self, played: Played, recording: Recording, died: Died) -> Outcome:
        """Note that a call failed, and with it its player, or the runner that timed it."""
        played.end_player()
        recording.failure = Outcome(died.status, died.reason)
        if recording.self_timed and played.handle.process:
            recording.failure = played.handle.lose(played.handle.running.failure(died))
        self.session.checker.see_device(played.handle.name, died.reason)
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
        outcome = session.verdict(recording.name, 0, reply.claims, handle.baseline)
        outcome.us, outcome.bytes, outcome.self_timed = reply.us, session.present.bytes, recording.self_timed
        return outcome

    def _release(self, recording: Recording) -> None:
        """Free what the checker holds of a call's memory."""
        self.session.checker.ask({"op": "release", "runner": recording.name})

    def _forget(self, played: Played, *numbers: int) -> None:
        """Free what is held of a submission's calls on these cases, of all without any."""
        for number in numbers or list(played.recordings):
            if recording := played.recordings.pop(number, None):
                recording.close()
                self._release(recording)
