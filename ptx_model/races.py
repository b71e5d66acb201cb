"""Find accesses that nothing orders, with vector clocks: whatever order the model runs them in, it sees the race.

An agent is a warp, or a line of asynchronous work: the copies that one barrier counts, the tensor core of a block, the
copies of one warp. Each has a clock; `known[a, b]` is how much of b's past agent a has waited for. An access of b at
its time t is ordered before a's next if known[a, b] >= t. Waits of every kind join clocks.

A second matrix, `fenced`, is what a proxy fence has made known: what a thread wrote by a plain store is visible to
copies and tensor cores only if a fence.proxy.async lies between.
"""

import numpy as np

from ptx_model.faults import Fault

CELL = 4  # bytes that share one note of who wrote and read them; parts of it are told apart by a mask of bytes
ATOMIC = 16  # in a mask: an atomic access, which races with plain ones only


class Clocks:
    """The clocks of the agents of a cluster. count: how many there may be."""

    def __init__(self, count: int) -> None:
        self.known = np.zeros((count, count), np.int32)
        self.fenced = np.zeros((count, count), np.int32)
        self.generic = np.zeros(count, bool)  # a warp: its stores need a fence before asynchronous reads
        self.names: list[str] = []
        self.known[np.arange(count), np.arange(count)] = 1

    def add(self, name: str, generic: bool) -> int:
        """Return a new agent."""
        self.names.append(name)
        agent = len(self.names) - 1
        if agent >= len(self.generic):
            self._grow()
        self.generic[agent] = generic
        return agent

    def _grow(self) -> None:
        more = len(self.generic) + 64
        for name in ("known", "fenced"):
            old = getattr(self, name)
            new = np.zeros((more, more), np.int32)
            new[: len(old), : len(old)] = old
            setattr(self, name, new)
        rest = np.arange(len(self.generic), more)
        self.known[rest, rest] = 1
        self.generic = np.append(self.generic, np.zeros(len(rest), bool))

    def release(self, agents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return what `agents` know together, for whoever waits for them; their clocks go on."""
        past = self.known[agents].max(axis=0), self.fenced[agents].max(axis=0)
        self.known[agents, agents] += 1
        return past

    def acquire(self, agents: np.ndarray, past: tuple[np.ndarray, np.ndarray]) -> None:
        """From now on `agents` know `past`."""
        size = len(past[0])
        self.known[agents, :size] = np.maximum(self.known[agents, :size], past[0])
        self.fenced[agents, :size] = np.maximum(self.fenced[agents, :size], past[1])

    def fence(self, agents: np.ndarray) -> None:
        """A fence.proxy.async of `agents`."""
        self.fenced[agents] = np.maximum(self.fenced[agents], self.known[agents])

    def start(self, agent: int, issuers: np.ndarray) -> "Past":
        """Begin one piece of asynchronous work of `agent`, that `issuers` asked for."""
        self.known[agent] = np.maximum(self.known[agent], self.known[issuers].max(axis=0))
        self.fenced[agent] = np.maximum(self.fenced[agent], self.fenced[issuers].max(axis=0))
        self.known[agent, agent] += 1
        self.fenced[agent, agent] = self.known[agent, agent]
        self.known[issuers, issuers] += 1  # what they do from now on is not ordered before the work
        return Past(agent, self.known[agent].copy(), self.fenced[agent].copy())

    def finish(self, past: "Past") -> tuple[np.ndarray, np.ndarray]:
        """What whoever waits for that work knows then."""
        return past.known, past.fenced


def joined(a: tuple[np.ndarray, np.ndarray] | None, b: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Both together."""
    if a is None:
        return b
    if len(a[0]) < len(b[0]):
        a, b = b, a
    known, fenced = a[0].copy(), a[1].copy()
    np.maximum(known[: len(b[0])], b[0], out=known[: len(b[0])])
    np.maximum(fenced[: len(b[1])], b[1], out=fenced[: len(b[1])])
    return known, fenced


def _clash(one: np.ndarray, other: np.ndarray | int) -> np.ndarray:
    """Whether accesses with these masks share a byte and are not both atomic."""
    both = one & np.asarray(other, np.uint8)
    return (both & 15 != 0) & (both & ATOMIC == 0)


class Past:
    """The clocks of one piece of asynchronous work, as they are when it is issued."""

    def __init__(self, agent: int, known: np.ndarray, fenced: np.ndarray) -> None:
        self.agent, self.known, self.fenced = agent, known, fenced

    def of(self, agents: int) -> "Past":
        """The same with so many agents: of those that came later it knows nothing."""
        more = agents - len(self.known)
        return Past(self.agent, np.pad(self.known, (0, more)), np.pad(self.fenced, (0, more))) if more else self


class Shadow:
    """Who wrote and read each cell of a memory last. what: its name in faults; byte: cell -> the address to name."""

    def __init__(self, clocks: Clocks, cells: int, what: str, name=None) -> None:
        self._clocks, self._what = clocks, what
        self._name = name or (lambda cell: f"byte {cell * CELL:#x}")
        self._writer = np.full(cells, -1, np.int16)
        self._write_clock = np.zeros(cells, np.int32)
        self._write_mask = np.zeros(cells, np.uint8)
        self._reads = np.zeros((cells, len(clocks.generic)), np.int32)
        self._read_mask: np.ndarray | None = None  # made at the first read of less than a cell

    def _room(self) -> None:
        missing = len(self._clocks.generic) - self._reads.shape[1]
        if missing > 0:
            self._reads = np.concatenate([self._reads, np.zeros((len(self._reads), missing), np.int32)], 1)
            if self._read_mask is not None:
                self._read_mask = np.concatenate(
                    [self._read_mask, np.full((len(self._reads), missing), 15, np.uint8)], 1
                )

    def access(self, cells: np.ndarray, masks: np.ndarray | int, agents: np.ndarray, write: bool) -> None:
        """An access by warps. cells: int (n,); masks: the bytes of each cell, 15 for all, and ATOMIC; agents: (n,)."""
        known = self._clocks.known
        writer = self._writer[cells]
        bad = (self._write_clock[cells] > known[agents, writer]) & (writer >= 0) & (writer != agents)
        if bad.any():
            bad &= _clash(self._write_mask[cells], masks)
            if bad.any():
                self._race(cells, bad, writer, agents, "write", write)
        clock = known[agents, agents]
        self._room()
        if write:
            self._after_reads(cells, masks, known[agents], agents)
            self._writer[cells], self._write_clock[cells], self._write_mask[cells] = agents, clock, masks
            last = self._writer[cells]
            if (last != agents).any():
                bad = (last != agents) & _clash(self._write_mask[cells], masks)
                if bad.any():
                    self._race(cells, bad, last, agents, "write", True)
        elif not np.any(np.bitwise_and(masks, ATOMIC)):
            self._note_reads(cells, masks, agents, clock)

    def asynchronous(self, cells: np.ndarray, past: Past, write: bool) -> None:
        """An access of whole cells by asynchronous work."""
        writer = self._writer[cells]
        clock = self._write_clock[cells]
        past = past.of(len(self._clocks.generic))
        seen = past.known if write else np.where(self._clocks.generic, past.fenced, past.known)
        agents = np.full(len(cells), past.agent)
        bad = (clock > seen[writer]) & (writer >= 0) & (writer != past.agent)
        if bad.any():
            unfenced = not write and (clock[bad] <= past.known[writer[bad]]).all()
            self._race(cells, bad, writer, agents, "write", write, " without fence.proxy.async" if unfenced else "")
        self._room()
        if write:
            self._after_reads(cells, 15, past.known[None], agents)
            self._writer[cells], self._write_clock[cells] = past.agent, past.known[past.agent]
            self._write_mask[cells] = 15
        else:
            self._note_reads(cells, 15, agents, past.known[past.agent])

    def _note_reads(self, cells: np.ndarray, masks: np.ndarray | int, agents: np.ndarray, clock) -> None:
        if self._read_mask is None and not np.all(np.equal(masks, 15)):
            self._read_mask = np.full(self._reads.shape, 15, np.uint8)
        if self._read_mask is not None:
            fresh = self._reads[cells, agents] < clock
            self._read_mask[cells[fresh], agents[fresh]] = 0
            np.bitwise_or.at(self._read_mask, (cells, agents), np.broadcast_to(masks, cells.shape).astype(np.uint8))
        self._reads[cells, agents] = clock

    def _after_reads(self, cells: np.ndarray, masks: np.ndarray | int, known: np.ndarray, agents: np.ndarray) -> None:
        reads = self._reads[cells]
        late = reads > known[:, : reads.shape[1]]
        if late.any():
            late[np.arange(len(cells)), agents] = False
            if self._read_mask is not None:
                late &= (self._read_mask[cells] & np.broadcast_to(masks, cells.shape)[:, None].astype(np.uint8)) != 0
            bad = late.any(axis=1)
            if bad.any():
                self._race(cells, bad, late.argmax(axis=1), agents, "read", True)

    def _race(self, cells, bad, others, agents, kind: str, write: bool, why: str = "") -> None:
        at = int(np.argmax(bad))
        names = self._clocks.names
        raise Fault(
            "race",
            f"{self._what} {self._name(int(cells[at]))}: {'write' if write else 'read'} by {names[int(agents[at])]} "
            f"after a {kind} by {names[int(others[at])]}{why}: nothing orders them",
        )
