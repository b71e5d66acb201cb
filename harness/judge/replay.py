"""The two phases of a judgement on a GPU, of recorded calls (harness/judge/recording.py)."""

import contextlib
import functools
import os
from collections.abc import Callable

from harness.judge import phases, recording, replies
from harness.judge.handle import RunnerHandle
from harness.judge.outcome import Outcome
from harness.judge.phases import Benchmark
from harness.judge.readings import HOST, NOTHING, PRODUCT, Finished
from harness.judge.recording import EMPTY, PREPARED, READ_BYTES, READER, RESERVE_BYTES, SCRATCH_BYTES, Player, Replays
from harness.judge.session import Session, Step
from harness.player import player
from harness.problem.folders import Case
from harness.results import environment
from harness.sandbox.process import Died


def _try_out(session: Session, helper: RunnerHandle, cases: list[Case]) -> None:
    """Record a submission's calls in its compile step, so that what they compile is kept."""
    todo = dict(enumerate(cases))
    with Replays(session, [helper], todo, {n: case.seed for n, case in todo.items()}, compiles=True) as replays:
        list(replays.waves())


def profile(session: Session, handle: RunnerHandle, message: dict, limit_s: float) -> replies.Profiled | Outcome:
    """Have a submission's runner, which records nothing, profile a call on the present content."""
    session.start(handle)
    if handle.process is None:
        return handle.broken or handle.loss
    its_player, process = Player(handle.target), handle.running
    call = recording.Recording(handle.runner, 1, session.present)
    try:
        fds = call.make(session, its_player, handle.baseline)
        session.checker.ask({"op": "fill", "runner": call.name, "buffer": 0})
        process.hand_over(replies.Done, {"op": "map_call", **call.message}, fds, "map its memory", limit_s)
        return process.ask(replies.Profiled, message, limit_s)
    except Died as died:
        return handle.lose(process.failure(died))
    finally:
        its_player.close()


def run_tests(
    session: Session,
    handles: list[RunnerHandle],
    cases: list[Case],
    done: Callable[[RunnerHandle, Case, Outcome], None],
    have: Finished = NOTHING,
    twice: tuple[Case, ...] = (),
) -> dict[str, list[Outcome]]:
    """As phases.run_tests. Cases in `twice` are recorded and called on secret weights and contents only."""
    results: dict[str, list[Outcome]] = {handle.name: [] for handle in handles}
    total = len(cases) * len(handles)
    todo = {n: case for n, case in enumerate(cases) if any(have.test(e.name, n) is None for e in handles)}
    seeds = {n: session.secret_seed(case) if case in twice else case.seed for n, case in todo.items()}
    session.build(*handles, try_out=functools.partial(_try_out, session))
    with Replays(session, handles, todo, seeds) as replays:
        waves, wave = replays.waves(), list[int]()
        for number, case in enumerate(cases):
            if number in todo:
                if number not in wave:
                    wave = next(waves)
                    replays.renew()
                replays.place(number)
                session.content(case, session.secret_seed(case) if case in twice else case.seed)
            for place, handle in enumerate(handles):
                outcome = have.test(handle.name, number)
                if outcome is None and phases.over(handle, results[handle.name]):
                    continue
                if outcome is None:
                    session.progress(Step("test", number * len(handles) + place, total, f"{case}  {handle.name}"))
                    outcome = replays.play(handle, number, 1)
                results[handle.name].append(outcome)
                done(handle, case, outcome)
            if number in todo:
                replays.free(number)
    session.progress(Step("test", total, total, "done"))
    return results


def each_call(session: Session, handles: list[RunnerHandle], calls: list[Case]) -> phases.Calls:
    """As phases.each_call, those of as many rows one after another: their calls are recorded once."""
    parts = [[call for call in calls if len(call.rows or ()) == n] for n in {len(call.rows or ()): 0 for call in calls}]
    session.build(*handles, try_out=functools.partial(_try_out, session))
    first = {number: part[0] for number, part in enumerate(parts)}
    with Replays(session, handles, first, dict.fromkeys(first, calls[0].seed)) as replays:
        for wave in replays.waves():
            replays.renew()
            for number in wave:
                replays.place(number)
                for copy, call in enumerate(parts[number]):
                    session.content(call, call.seed)
                    yield call, functools.partial(replays.play, number=number, copy=copy % player.COPIES)
                replays.free(number)


class ReplayBenchmark(Benchmark):
    """The timed calls of submissions on cases, recorded ones. Each group of calls is made by another process."""

    replays: Replays
    judges: Player  # makes the judge's own calls
    bytes = 0  # that its readers read
    rated = False  # whether the matrix product was timed

    def run(self) -> None:
        self.total = len(self.cases) * self.counts.processes * self.rounds
        with contextlib.ExitStack() as stack:
            if self.handles:
                self.judges = Player(self.handles[0].target)
                stack.callback(self.judges.close)
                self.reads = {f"read {i}": i for i in range(self.judges.about["readers"])}
            for part, handles in enumerate(self._parts()):
                self._run_part(part, handles)
        self.session.progress(Step("benchmark", self.total, self.total, "done"))

    def _run_part(self, part: int, handles: list[RunnerHandle]) -> None:
        """Make all calls of these submissions."""
        self.session.build(*handles, try_out=functools.partial(_try_out, self.session))
        todo = {}
        for number, case in enumerate(self.cases):
            finished = [self.have.group(process, number, part) for process in range(self.counts.processes)]
            for group in filter(None, finished):
                self._take(group)
            if not all(finished):
                todo[number] = case
        seeds = {number: self.session.secret_seed(case) for number, case in todo.items()}
        with Replays(self.session, handles, todo, seeds) as self.replays:
            for wave in self.replays.waves():
                for process in range(self.counts.processes):
                    self.replays.renew()
                    for number in wave:
                        if not self.have.group(process, number, part):
                            self._replay(process, number, part, handles)

    def _parts(self) -> list[list[RunnerHandle]]:
        """Return the submissions in parts whose prepared weights have room together."""
        largest = max((case.weight_bytes for case in self.cases), default=0)
        spare = RESERVE_BYTES + player.COPIES * min(largest, READ_BYTES) + largest
        if self.counts.paired or not self.handles:
            return [self.handles]
        room = self.judges.about["device_bytes"] - spare
        size = max(1, int(room // ((1 + 2 * PREPARED) * largest + SCRATCH_BYTES))) if largest else len(self.handles)
        return [self.handles[i : i + size] for i in range(0, len(self.handles), size)]

    def _replay(self, process: int, number: int, part: int, handles: list[RunnerHandle]) -> None:
        """Make the calls of one group."""
        case = self.cases[number]
        self.replays.place(number)
        self.bytes = 0
        if process == 0:
            self.session.content(case)
            self.bytes = min(self.session.present.moved, READ_BYTES) // 16 * 16
        nbytes = max(1, -(-self.bytes // player.PAGE)) * player.PAGE
        for fd in self.judges.memory(1, {"inputs": nbytes, "outputs": 0, "weights": 0}):
            os.close(fd)
        self._open(process, number, part, handles)
        if case.weight_bytes:
            self.group.seeds.append(f"weights {self.replays.seeds[number]}")
        for sample in range(-self.counts.warmups, self.counts.samples):
            self._show(case, sample)
            self._round(case, sample)
            for name in self.reads if process == 0 else ():
                self._judge_call(name, sample)
        for handle in handles:
            self._complete(handle.name)
        if case.flops and not self.rated:
            self.group.judge_us[PRODUCT], self.rated = self.session.product_us(self.counts.samples), True
        self.group.state = environment.gpu_state()
        self._close()
        self.rounds_done += self.rounds
        self.replays.free(number)

    def _call(self, handle: RunnerHandle, sample: int, measure: bool) -> Outcome:
        return self.replays.play(handle, self.group.case, sample % player.COPIES)

    def _judge_call(self, name: str, sample: int) -> None:
        """Make one of the judge's own calls, in a player without a submission."""
        kind = EMPTY if name == "empty" else READER + self.reads[name]
        us, host_us = self.judges.play(sample % player.COPIES, self.session.call_limit_s, kind, self.bytes)
        if sample >= 0:
            scale = 1.0 if name == "empty" else max(1.0, self.session.present.moved / READ_BYTES)
            self.group.judge_us.setdefault(name, []).append(us * scale)
            if name == "empty":
                self.group.judge_us.setdefault(HOST, []).append(host_us)


run_benchmarks = functools.partial(phases.run_benchmarks, kind=ReplayBenchmark)
