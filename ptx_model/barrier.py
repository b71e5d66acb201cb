"""Barriers: mbarriers in shared memory, the numbered barriers of a block, the barrier of a cluster; and fences."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ptx_model.decode import Decoder, Execute, opcode
from ptx_model.faults import Fault
from ptx_model.machine import LANES, Apart, Block, Mask, Warps, join, joinable
from ptx_model.memory import RANK_SHIFT, SHARED_WINDOW
from ptx_model.parse import Register, Sink
from ptx_model.races import joined

MOST_TX = 2**20 - 1  # bytes that one phase may expect
MOST_ARRIVALS = 2**20 - 1
NO_RANK = 255  # of a block that no cluster has
_SCOPES = ("relaxed", "acquire", "release", "cta", "cluster", "gpu", "sys")


class MBarrier:
    """An mbarrier. completed: phases that are over, so that its parity is completed % 2."""

    def __init__(self, block: Block, offset: int, count: int, agent: int) -> None:
        self.block, self.offset, self.count = block, offset, count
        self.pending, self.tx, self.completed = count, 0, 0
        self.past: Any = None  # what its arrivals of this phase know
        self.released: Any = None  # what who has waited for the last phase knows
        self.made = (agent, int(block.cluster.clocks.known[agent, agent]))
        self.published: int | None = None  # by a fence: to who has passed this phase of the cluster's barrier

    def said(self) -> str:
        missing = [f"{self.pending} of {self.count} arrivals"] if self.pending else []
        missing += [f"{self.tx} bytes"] if self.tx else []
        what = " and ".join(missing) or "nothing"
        return f"the mbarrier at byte {self.offset:#x} of {self.block.name}, phase {self.completed}, missing {what}"

    def arrive(self, count: int, past: tuple | None) -> None:
        """`count` arrivals; what they know is released."""
        if past is not None:
            self.past = joined(self.past, past)
        while count:
            if not self.pending:
                raise Fault("barrier", f"more arrivals than the {self.count} of {self.said()}")
            now = min(count, self.pending)
            self.pending -= now
            count -= now
            self._advance()
        self.block.machine.events += 1

    def expect(self, size: int) -> None:
        """The phase needs `size` bytes more."""
        self.tx += size
        if self.tx > MOST_TX:
            raise Fault("barrier", f"{self.tx} bytes expected by {self.said()}, more than {MOST_TX}")
        self._advance()

    def complete_bytes(self, size: int, past: tuple | None) -> None:
        """A copy has written `size` bytes."""
        if past is not None:
            self.past = joined(self.past, past)
        self.tx -= size
        if self.tx < -MOST_TX:
            raise Fault("barrier", f"{-self.tx} bytes more than expected at {self.said()}")
        self._advance()
        self.block.machine.events += 1

    def _advance(self) -> None:
        if not self.pending and not self.tx:
            self.completed += 1
            self.pending = self.count
            self.released = self.past


def find(block: Block, address: int) -> MBarrier:
    """The mbarrier at a shared address of a block's cluster. Fault("barrier"): there is none."""
    owner = block.cluster.blocks[address >> RANK_SHIFT] if address >> RANK_SHIFT < len(block.cluster.blocks) else None
    offset = address & (1 << RANK_SHIFT) - 1
    if owner is None:
        raise Fault("bounds", f"no block of rank {address >> RANK_SHIFT} in the cluster")
    if owner.ended:
        raise Fault("barrier", f"the mbarrier at byte {offset:#x} of {owner.name}, which has ended")
    if offset not in owner.barriers:
        raise Fault("barrier", f"the mbarrier at byte {offset:#x} of {owner.name} was never initialised")
    return owner.barriers[offset]


def used_by(w: Warps, barrier: MBarrier, users: np.ndarray) -> None:
    """Fault("race") where a warp uses a barrier whose initialisation nothing has made known to it. users: the agents of
    the warps that use it.
    """
    agent, clock = barrier.made
    cluster = w.block.cluster
    unknown = cluster.clocks.known[users, agent] < clock
    if barrier.block.shared.shadow and unknown.any():
        passed = [cluster.passed.get(int(a), 0) for a in users[unknown]]
        if barrier.published is not None and min(passed) > barrier.published:
            return
        raise Fault("race", f"the mbarrier at byte {barrier.offset:#x} is used, but its init is not ordered before")


def _space(d: Decoder) -> None:
    d.drop("b64", "shared", "shared::cta", "shared::cluster", *_SCOPES)


def _addresses(d: Decoder, operand: int):
    """As Decoder.address, of shared memory, given as such or as a generic address."""
    read = d.address(operand, False)

    def addresses(w: Warps) -> np.ndarray:
        found = read(w)
        return np.where(found >= SHARED_WINDOW, found - SHARED_WINDOW, found)

    return addresses


@opcode("mbarrier")
def mbarrier(d: Decoder) -> Execute:
    what = d.left.pop(0)
    decoder = {
        "init": _init,
        "inval": _inval,
        "arrive": _arrive,
        "arrive_drop": _arrive,
        "expect_tx": _expect,
        "complete_tx": _complete,
        "try_wait": _wait,
        "test_wait": _wait,
    }.get(what)
    if decoder is None:
        raise d.refuse(what)
    return decoder(d, what)


def _init(d: Decoder, what: str) -> Execute:
    _space(d)
    address, count = _addresses(d, 0), d.lanes(1, "u32")

    def execute(w: Warps, m: Mask) -> None:
        at, counts = address(w), count(w)
        for lane in w.lanes(m):
            block, offset, n = w.block, int(at[lane]) & (1 << RANK_SHIFT) - 1, int(counts[lane])
            if int(at[lane]) >> RANK_SHIFT != block.rank or offset % 8 or offset + 8 > block.shared.size:
                raise Fault("bounds", f"an mbarrier at {int(at[lane]):#x}")
            if not 1 <= n <= MOST_ARRIVALS:
                raise Fault("barrier", f"an mbarrier for {n} arrivals")
            block.barriers[offset] = MBarrier(block, offset, n, int(w.lane_agents[lane]))
        clocks = w.block.cluster.clocks
        clocks.known[w.agents, w.agents] += 1

    return execute


def _inval(d: Decoder, what: str) -> Execute:
    _space(d)
    address = _addresses(d, 0)

    def execute(w: Warps, m: Mask) -> None:
        at = address(w)
        for lane in w.lanes(m):
            w.block.barriers.pop(find(w.block, int(at[lane])).offset)

    return execute


def _grouped(
    w: Warps, m: Mask, at: np.ndarray, amount: np.ndarray | None
) -> list[tuple[MBarrier, int, int, np.ndarray]]:
    """-> (barrier, threads, sum of their amounts, their warps' agents) for each barrier that the threads name."""
    lanes = w.lanes(m)
    found = []
    for address in np.unique(at[lanes]):
        those = lanes[at[lanes] == address]
        total = len(those) if amount is None else int(amount[those].astype(np.int64).sum())
        barrier = find(w.block, int(address))
        agents = np.unique(w.lane_agents[those])
        used_by(w, barrier, agents)
        found.append((barrier, len(those), total, agents))
    return found


def _arrive(d: Decoder, what: str) -> Execute:
    expects, drops = d.take("expect_tx"), what == "arrive_drop"
    early = bool(d.take("noComplete"))  # such an arrival may not end the phase
    _space(d)
    has_state = isinstance(d.operands[0], (Register, Sink))
    first = 1 if has_state else 0
    address = _addresses(d, first)
    amount = d.lanes(first + 1, "u32") if len(d.operands) > first + 1 else None
    put = None if not has_state or isinstance(d.operands[0], Sink) else d.put(0, "b64")

    def execute(w: Warps, m: Mask) -> None:
        clocks = w.block.cluster.clocks
        at = address(w)
        if put is not None:
            phases = (
                [find(w.block, int(a)).completed for a in at]
                if m is None
                else [find(w.block, int(a)).completed if on else 0 for a, on in zip(at, m, strict=True)]
            )
            put(w, np.array(phases, np.uint64), m)
        for barrier, threads, total, agents in _grouped(w, m, at, amount(w) if amount else None):
            if expects:
                barrier.tx += total  # together with the arrival: no phase may end between
                if barrier.tx > MOST_TX:
                    raise Fault("barrier", f"{barrier.tx} bytes expected by {barrier.said()}, more than {MOST_TX}")
            arrivals, phase = threads if expects else total, barrier.completed
            if drops:
                barrier.count -= arrivals  # of the phases that follow
            barrier.arrive(arrivals, clocks.release(agents))
            if early and barrier.completed != phase:
                raise Fault("barrier", f"an arrival with .noComplete ends a phase of {barrier.said()}")

    return execute


def _expect(d: Decoder, what: str) -> Execute:
    _space(d)
    address, amount = _addresses(d, 0), d.lanes(1, "u32")

    def execute(w: Warps, m: Mask) -> None:
        for barrier, _, total, _ in _grouped(w, m, address(w), amount(w)):
            barrier.expect(total)

    return execute


def _complete(d: Decoder, what: str) -> Execute:
    _space(d)
    address, amount = _addresses(d, 0), d.lanes(1, "u32")

    def execute(w: Warps, m: Mask) -> None:
        for barrier, _, total, agents in _grouped(w, m, address(w), amount(w)):
            barrier.complete_bytes(total, w.block.cluster.clocks.release(agents))

    return execute


def _wait(d: Decoder, what: str) -> Execute:
    parity = d.take("parity")
    _space(d)
    put, address = d.put(0, "pred"), _addresses(d, 1)
    phase = d.lanes(2, "u32" if parity else "u64")

    def execute(w: Warps, m: Mask) -> None:
        at, phases = address(w), phase(w)
        lanes = w.lanes(m)
        over = np.zeros(w.count, bool)
        clocks = w.block.cluster.clocks
        missed = []
        pairs = {(int(at[lane]), int(phases[lane])) for lane in lanes}
        for where, wanted in pairs:
            barrier = find(w.block, where)
            if barrier.block is not w.block:
                raise Fault("barrier", f"a wait for {barrier.said()}, which is another block's")
            those = lanes[(at[lanes] == where) & (phases[lanes] == wanted)]
            used_by(w, barrier, np.unique(w.lane_agents[those]))
            done = barrier.completed % 2 != wanted & 1 if parity else barrier.completed > wanted
            if done:
                over[those] = True
                if barrier.released is not None:
                    clocks.acquire(np.unique(w.lane_agents[those]), barrier.released)
            else:
                missed.append((barrier, barrier.completed, wanted & 1))
        put(w, over, m)
        if missed and not over.any():
            w.state = ("mbarrier", missed)

    return execute


# ---- numbered barriers of a block


class Named:
    """A numbered barrier of a block. phase: how often it was passed."""

    def __init__(self) -> None:
        self.phase, self.arrived, self.expected = 0, 0, 0
        self.past: Any = None
        self.waiting: list[Warps] = []
        self.all_threads = False
        self.votes: list[tuple[int, int]] = []  # of bar.red: (threads with a true predicate, threads)
        self.answers: list[Callable[[int, int], None]] = []  # hand (true ones, threads) to those who voted


@opcode("bar", "barrier")
def block_barrier(d: Decoder) -> Execute:
    d.drop("cta") if d.left[0] == "cta" else None
    what = d.left.pop(0)
    if what == "cluster":
        return _cluster_barrier(d)
    if what == "warp":
        d.drop("sync")
        return lambda w, m: None  # the threads of a warp go in one order here, and meet by themselves
    d.drop("aligned")
    if what not in ("sync", "arrive", "red"):
        raise d.refuse(what)
    vote = _vote(d) if what == "red" else None
    first = 1 if vote else 0
    number = d.lanes(first, "u32")
    count = d.lanes(first + 1, "u32") if len(d.operands) > 2 * first + 1 else None

    def execute(w: Warps, m: Mask) -> None:
        all_numbers = np.broadcast_to(number(w), (w.count,)).reshape(-1, LANES)
        of_warps, numbers = all_numbers[:, 0], np.unique(all_numbers)
        if (all_numbers != all_numbers[:, :1]).any() or not 0 <= of_warps.min() <= of_warps.max() < 16:
            raise Fault("barrier", f"barrier numbers {list(map(int, numbers))} of the threads of a warp, or beyond 15")
        if len(numbers) > 1:
            raise Apart(of_warps == of_warps[0])
        counts = None if count is None else np.unique(count(w))
        if counts is not None and (len(counts) != 1 or counts[0] % LANES or not counts[0]):
            raise Fault("barrier", f"a barrier for {list(map(int, counts))} threads")
        if vote:
            vote(w, w.block.named.setdefault(int(numbers[0]), Named()), m)
        _at_named(w, int(numbers[0]), None if counts is None else int(counts[0]), what != "arrive")

    return execute


def _vote(d: Decoder) -> Callable[[Warps, Named, Mask], None]:
    """bar.red: a predicate of each thread; all get how many were true, or whether all or any were."""
    op, type_ = d.take("popc", "and", "or"), d.type()
    put, value = d.put(0, type_), d.get(len(d.operands) - 1, "pred")

    def vote(w: Warps, named: Named, m: Mask) -> None:
        active = w.active() if m is None else m
        named.votes.append((int((np.broadcast_to(value(w), (w.count,)) & active).sum()), int(active.sum())))

        def answer(yes: int, threads: int) -> None:
            put(w, {"popc": np.uint32(yes), "and": yes == threads, "or": yes > 0}[op], m)

        named.answers.append(answer)

    return vote


def _at_named(w: Warps, number: int, count: int | None, waits: bool) -> None:
    named = w.block.named.setdefault(number, Named())
    whole = -(-w.block.live_threads // LANES) * LANES
    expected = whole if count is None else count
    if named.arrived and named.expected != expected and not named.all_threads:
        raise Fault("barrier", f"barrier {number} for {expected} threads, of which others expect {named.expected}")
    named.expected, named.all_threads = expected, count is None
    named.arrived += len(w.ids) * LANES
    if named.arrived > expected:
        raise Fault("barrier", f"{named.arrived} threads at barrier {number}, which is for {expected}")
    clocks = w.block.cluster.clocks
    named.past = joined(named.past, clocks.release(w.agents))
    if waits:
        named.waiting.append(w)
        what = f"waits at barrier {number} of {w.block.name} for {expected} threads"
        w.state = ("named", named, named.phase, what)
    if named.arrived == expected:
        if waits:
            w.block.machine.after_turn.append(lambda: _pass(w.block, named))
        else:
            _pass(w.block, named)


def _pass(block: Block, named: Named) -> None:
    """All have arrived: those that wait go on, together where they stand at the same place."""
    waiting, past = named.waiting, named.past
    yes, threads = (sum(vote[i] for vote in named.votes) for i in (0, 1))
    for answer in named.answers:
        answer(yes, threads)
    named.votes, named.answers = [], []
    named.phase += 1
    named.arrived, named.past, named.waiting = 0, None, []
    block.machine.events += 1
    places: dict[int, list[Warps]] = {}
    for group in waiting:
        block.cluster.clocks.acquire(group.agents, past)
        group.state = None
        if block.machine.policy.lockstep and joinable(group):
            places.setdefault(group.pc, []).append(group)
    for together in places.values():
        if len(together) > 1:
            block.cluster.replace(together, join(together))


def after_exit(w: Warps) -> None:
    """Warps have ended: what waits for all threads that live may have all of them now."""
    for named in w.block.named.values():
        if named.arrived and named.all_threads:
            named.expected = -(-w.block.live_threads // LANES) * LANES
            if named.arrived >= named.expected > 0:
                _pass(w.block, named)
    _settle_cluster(w)


# ---- the barrier of a cluster


def _cluster_barrier(d: Decoder) -> Execute:
    what = d.left.pop(0)
    relaxed = d.take("relaxed")
    d.drop("aligned", "acquire", "release")
    if what not in ("arrive", "wait"):
        raise d.refuse(what)

    def arrive(w: Warps, m: Mask) -> None:
        cluster = w.block.cluster
        if any(cluster.arrivals.get(int(a), -1) >= cluster.phase for a in w.agents):
            raise Fault("barrier", "a warp arrives twice at the barrier of the cluster without a wait between")
        cluster.arrivals.update(dict.fromkeys(map(int, w.agents), cluster.phase))
        past = cluster.clocks.release(w.agents)
        if not relaxed:
            cluster.past = joined(cluster.past, past)
        for agent in map(int, w.agents):  # what a fence has put ahead of a relaxed arrival
            if agent in cluster.fenced:
                cluster.past = joined(cluster.past, cluster.fenced.pop(agent))
        _settle_cluster(w)

    def wait(w: Warps, m: Mask) -> None:
        cluster = w.block.cluster
        phases = {cluster.arrivals.get(int(a), -1) for a in w.agents}
        if -1 in phases:
            raise Fault("barrier", "a warp waits at the barrier of the cluster without having arrived")
        if len(phases) > 1:
            raise Fault("barrier", "warps wait for different phases of the barrier of the cluster")
        if cluster.phase > phases.pop():
            _acquire_cluster(w)
        else:
            cluster.waiting.append(w)
            w.state = ("cluster", cluster, cluster.phase, "waits at the barrier of the cluster")

    return arrive if what == "arrive" else wait


def _acquire_cluster(w: Warps) -> None:
    w.block.cluster.passed.update(dict.fromkeys(map(int, w.agents), w.block.cluster.phase))
    if w.block.cluster.released is not None:
        w.block.cluster.clocks.acquire(w.agents, w.block.cluster.released)


def _settle_cluster(w: Warps) -> None:
    """Pass the cluster's barrier if every warp that lives has arrived."""
    cluster = w.block.cluster
    alive = {int(a) for group in cluster.groups if not group.ended() for a in group.agents}
    arrived = {a for a, phase in cluster.arrivals.items() if phase == cluster.phase}
    if not arrived or not alive <= arrived:
        return
    cluster.released, cluster.past = cluster.past, None
    cluster.phase += 1
    w.block.machine.events += 1
    for group in cluster.waiting:
        _acquire_cluster(group)
        group.state = None
    cluster.waiting = []


@opcode("fence", "membar")
def fence(d: Decoder) -> Execute:
    proxy = [m for m in d.left if m.startswith("proxy")]
    asynchronous = proxy and any(m.startswith("async") for m in d.left)
    if proxy and not asynchronous and "tensormap::generic" not in d.left and "alias" not in d.left:
        raise d.refuse(" ".join(d.left))
    if "tensormap::generic" in d.left:
        d.left = [m for m in d.left if m != "tensormap::generic"]
    d.drop("proxy", "async", "async::generic", "async.global", "global", "shared::cta", "shared::cluster", "alias")
    d.drop("mbarrier_init", "acq_rel", "sc", "cta", "cluster", "gpu", "sys", "gl", "release", "acquire", "relaxed")
    d.drop("sync_restrict::shared::cta", "sync_restrict::shared::cluster")
    if asynchronous:
        return lambda w, m: w.block.cluster.clocks.fence(w.agents)
    return _publish if "mbarrier_init" in d.instruction.mods else _fence_all


def _publish(w: Warps, m: Mask) -> None:
    """fence.mbarrier_init: the next arrival at the cluster's barrier, a relaxed one too, makes the inits known."""
    cluster = w.block.cluster
    for barrier in w.block.barriers.values():
        maker = barrier.made[0]
        if maker in w.agents and barrier.published is None:
            barrier.published = cluster.phase + (cluster.arrivals.get(maker, -1) >= cluster.phase)


def _fence_all(w: Warps, m: Mask) -> None:
    """A fence of memory: what comes before it is known to who sees a relaxed arrival behind it."""
    cluster = w.block.cluster
    if len(cluster.blocks) > 1:
        past = cluster.clocks.release(w.agents)
        cluster.fenced.update(dict.fromkeys(map(int, w.agents), past))


@opcode("mapa")
def map_address(d: Decoder) -> Execute:
    type_ = d.type()
    shared = d.take("shared::cluster", "shared")
    address, rank, put = d.get(1, type_), d.get(2, "u32"), d.put(0, type_)
    window = 0 if shared else SHARED_WINDOW

    def execute(w: Warps, m: Mask) -> None:
        ranks = np.minimum(np.asarray(rank(w)).astype(np.int64), NO_RANK)  # what uses the address of none is refused
        offset = np.asarray(address(w)).astype(np.int64) & (1 << RANK_SHIFT) - 1
        put(w, ((ranks << RANK_SHIFT) + offset + window).astype(f"u{8 if type_ == 'u64' else 4}"), m)

    return execute
