"""Batches on a GPU: what a call takes at least, by the judge's own clock (docs/measuring.md).

The event pair is read in the submission's process. Here that process only enqueues: calls on masked contents that no
other call has, behind a gate. The checker unmasks the contents, opens the gate, and reads its clock until the digest of
all outputs is there.
"""

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.judge import limits, replies
from harness.judge.handle import Content, RunnerHandle
from harness.judge.outcome import Batch, Outcome
from harness.judge.session import Session
from harness.problem.folders import Case
from harness.results import stats
from harness.sandbox.process import Died

CALLS = 16  # of a batch
READINGS = 4  # of batches of one call, where a call waits for the device, and where memory has room for fewer contents
LONG_US = 1e6  # of a batch: one reading is enough, since what else it holds is milliseconds
EMPTY_BATCHES = 5  # readings of batches of empty calls
MEMORY_SHARE = 0.5  # of what is free, for the contents, the answers and two sets of buffers
COPIES = 5  # of a buffer's bytes that one call of a batch takes: content, answer, the reference's work, two buffers
ENQUEUE_S, ENQUEUE_FACTOR = 0.5, 4  # that the calls may take to be enqueued: seconds, and times what they took before


@dataclass
class Contents:
    """Contents of one case that the checker keeps. seeds: theirs; used: of all that it has kept so far; empty: readings
    of empty calls, by (calls, alone).
    """

    content: Content
    seeds: list[str]
    used: list[str]
    empty: dict[tuple[int, bool], list[float]] = field(default_factory=dict)


def make(session: Session, case: Case) -> Contents | None:
    """Make the contents of a batch. Return None if a case has no form that a batch needs: outputs on the GPU, and equal
    layouts of all contents.
    """
    seeds = [session.content(case)]
    content = session.present
    captures = content.layout["captures"]
    if any(spec["space"] != "device" for spec in captures):
        return None
    session.checker.ask({"op": "keep"})
    free = session.checker.ask({"op": "free_memory"})["free"]
    for _ in range(min(CALLS, int(MEMORY_SHARE * free / (COPIES * content.sizes["device"]))) - 1):
        seeds.append(session.content(case))
        session.checker.ask({"op": "keep"})
        if session.present.layout != content.layout:
            drop(session)
            return None
    return Contents(content, seeds, list(seeds))


def drop(session: Session) -> None:
    """Let the checker forget the contents."""
    session.checker.ask({"op": "drop"})


def read(
    session: Session, handle: RunnerHandle, judge: RunnerHandle, contents: Contents, claimed_us: float, most: int
) -> Batch | Outcome:
    """Return what a submission's calls take in a batch, or how they failed there. Of `most` batches, each on new
    contents, the shortest counts: a busy machine makes a reading longer. There is no further one when calls that took
    claimed_us could have been in one.
    """
    found = _read(session, handle, judge, contents)
    for _ in range(most - 1):
        if isinstance(found, Outcome) or found.least_us <= claimed_us or not _renew(session, contents):
            break
        again = _read(session, handle, judge, contents)
        if isinstance(again, Outcome) or again.least_us < found.least_us:
            found = again
    return found


def _read(session: Session, handle: RunnerHandle, judge: RunnerHandle, contents: Contents) -> Batch | Outcome:
    """Return one batch, of these contents first."""
    process, calls = handle.running, len(contents.seeds)
    try:
        found = [_reading(session, handle, contents, list(range(calls)), False)]
        if alone := found == [None]:  # a call waited for the device: the gate opens while it is enqueued
            many, calls, found = min(READINGS, calls), 1, []
            while len(found) < many and not _is_long(found):
                found.append(_reading(session, handle, contents, [len(found)], True))
        # The first call with outputs that are large waits for memory, which the next ones have.
        while len(found) < READINGS > len(contents.seeds) and not _is_long(found) and _renew(session, contents):
            found.append(_reading(session, handle, contents, list(range(calls)), alone))
    except Died as died:
        return handle.lose(process.failure(died))
    if failed := next((one for one in found if isinstance(one, Outcome)), None):
        return failed
    us = min(one for one in found if isinstance(one, float))
    return _beside_empty(session, judge, contents, calls, us, alone)


def _is_long(found: Sequence[float | Outcome | None]) -> bool:
    return any(isinstance(one, float) and one > LONG_US for one in found)


def _renew(session: Session, contents: Contents) -> bool:
    """Put as many new contents in the place of those that the checker keeps. Return False, and keep the old ones, where
    the new ones would have another layout.
    """
    seeds = [session.content(contents.content.case)]
    if session.present.layout != contents.content.layout:
        return False
    drop(session)
    session.checker.ask({"op": "keep"})
    while len(seeds) < len(contents.seeds):
        seeds.append(session.content(contents.content.case))
        session.checker.ask({"op": "keep"})
    contents.seeds = seeds
    contents.used += seeds
    return True


def _beside_empty(
    session: Session, judge: RunnerHandle, contents: Contents, calls: int, us: float, alone: bool
) -> Batch:
    """Return a reading beside those of as many empty calls."""
    empty = contents.empty.setdefault((calls, alone), [])
    while len(empty) < EMPTY_BATCHES:
        read = _reading(session, judge, contents, list(range(calls)), alone)
        if not isinstance(read, float):
            raise RuntimeError(f"the judge's own batch of {calls} empty calls failed: {read}")
        empty.append(read)
    return Batch(calls, us, stats.median(empty), max(empty) - min(empty), alone)


def _reading(
    session: Session, handle: RunnerHandle, contents: Contents, numbers: list[int], at_once: bool
) -> float | Outcome | None:
    """Make calls on the contents of these numbers behind one gate. Return the reading in us; None if one waited for the
    device before it was open; the fault of an output. at_once: the gate opens while the calls are enqueued.
    """
    process, checker, limit_s = handle.running, session.checker, session.call_limit_s
    process.open(contents.content, len(numbers), None)
    process.opened = None  # the next call has other buffers
    keys = [secrets.token_hex(32) for _ in numbers]
    for place, number in enumerate(numbers if handle.submission else ()):
        checker.ask({"op": "recall", "number": number})
        checker.ask({"op": "fill", "key": keys[place], "runner": handle.runner, "buffer": place})
    _, fds = checker.request({"op": "gate_page", "runner": handle.runner})
    try:
        process.child.send({"op": "batch", "at_once": at_once}, tuple(fds))
    finally:
        for fd in fds:
            os.close(fd)
    remaining_s = ENQUEUE_S + ENQUEUE_FACTOR * len(numbers) * process.host_us / 1e6
    enqueued = process.child.answers(remaining_s)
    if enqueued:
        process.receive(replies.Ready, limit_s)
        if not at_once:
            checker.ask({"op": "wake"})
    # A scored call that takes long to enqueue is not charged for what it enqueues under the spin ahead of it.
    ahead_us = process.spin_us if at_once and handle.submission else 0.0
    opened = {"op": "open_gate", "runner": handle.runner, "keys": keys, "ahead_us": ahead_us}
    opened["limit_s"] = limit_s if enqueued else 0.0
    us: float = checker.request(opened, limit_s=limit_s + limits.CHECKER_LIMIT_S, watch=process.child)[0]["us"]
    if not enqueued:
        process.receive(replies.Ready, limit_s)
    reply = process.receive(replies.Batched, limit_s)
    whole = checker.ask({"op": "close_gate", "runner": handle.runner})["whole"]
    if not enqueued:
        return None
    if not us:
        raise Died("TIMEOUT", f"{len(numbers)} calls together took more than {limit_s:g} s")
    if handle.submission is None:
        return us
    if not whole:
        return Outcome("CHEAT_SUSPECTED", "the word that ended a batch was not the digest of its outputs")
    return _fault(session, handle, numbers, reply.calls) or us


def _fault(
    session: Session, handle: RunnerHandle, numbers: list[int], claims: list[list[replies.Claim]]
) -> Outcome | None:
    """Return the first fault of a batch's outputs."""
    if len(claims) != len(numbers):
        raise Died("RUNTIME_ERROR", f"its process sent a malformed reply: claims of {len(claims)} calls")
    for place, number in enumerate(numbers):
        session.checker.ask({"op": "recall", "number": number})
        found = session.verdict(handle, place, claims[place])
        if found.status != "PASSED":
            return Outcome(found.status, f"in a batch of {len(numbers)} calls: {found.reason}", found.error)
    return None
