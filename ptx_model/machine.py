"""What executes a launch: the machine, its clusters and blocks, and warps that go together.

A `Warps` holds one warp or several of one block that are at the same instruction. An instruction is one numpy operation
over all of their threads. Where warps part, the group splits; where they meet at a barrier, groups join again. Threads
of one warp part and meet inside of it: of the places where they stand, the first in the text goes first. But those that
wait at an instruction for the rest of their warp (elect.sync) let it come, from wherever it stands.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from ptx_model.faults import Fault
from ptx_model.formats import NUMPY
from ptx_model.launch import Launch, layout
from ptx_model.memory import POISON, RANK_SHIFT, SharedMemory
from ptx_model.policies import Policy, Work
from ptx_model.races import Clocks
from ptx_model.tensor_memory import TensorMemory

LANES = 32
LOCAL = 0  # among the register files: local memory
NEVER = 1 << 60  # an instruction behind all others
Mask = np.ndarray | None  # bool (threads,); None: all of them


class Apart(Exception):
    """Warps that went together are to go apart before this instruction: those for which `some` is true, and others."""

    def __init__(self, some: np.ndarray) -> None:
        super().__init__()
        self.some = some


class Missing(Exception):
    """Threads of a warp are not at this instruction, which has to wait for them. fault: if they never come."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault


class Machine:
    """One launch under way under one policy. Fault("bounds"): the driver would refuse the launch."""

    def __init__(self, launch: Launch, policy: Policy) -> None:
        launch.check()
        self.launch, self.policy = launch, policy
        self.layout = layout(launch)
        self.pending: list[Work] = []
        self.events = 0  # grows with whatever another warp could have waited for
        self.executed = 0  # instructions of groups of warps
        self.after_turn: list[Callable[[], None]] = []  # what an instruction wants done when its group's turn is over

    def tick(self) -> int:
        """A clock: the instructions so far."""
        return self.executed

    def issue(self, work: Work) -> None:
        """Let `work` be done now or later."""
        self.pending.append(work)
        if self.policy.at_once(work):
            self.complete(work)

    def complete(self, work: Work) -> None:
        """Do `work`, and before it what its lane has asked for earlier."""
        while not work.done:
            first = next(w for w in self.pending if w.lane == work.lane)
            self.pending.remove(first)
            first.done = True
            self.events += 1
            try:
                first.run()
            except Fault as fault:
                raise Fault(fault.kind, fault.what, fault.where or f"{first.where}, asynchronously") from None


class Cluster:
    """Blocks that share their memory. first: the index of the first block."""

    def __init__(self, machine: Machine, first: tuple[int, int, int]) -> None:
        launch = machine.launch
        x, y, z = launch.cluster
        count = -(-launch.threads // LANES)
        self.machine = machine
        self.clocks = Clocks(x * y * z * (count + 16))
        self.arrivals: dict[int, int] = {}  # warp's agent -> phase of the cluster's barrier that it arrived for
        self.phase = 0  # of that barrier
        self.passed: dict[int, int] = {}  # warp's agent -> phases that it has waited for
        self.fenced: dict[int, Any] = {}  # warp's agent -> what it knew at its last fence
        self.past: Any = None
        self.released: Any = None
        self.waiting: list[Warps] = []
        self.blocks: list[Block] = []
        self.groups: list[Warps] = []  # all that have not ended
        for rank in range(x * y * z):
            place = (rank % x, rank // x % y, rank // (x * y))
            index: Any = tuple(f + p for f, p in zip(first, place, strict=True))
            block = Block(machine, self, index, place, rank)
            self.blocks.append(block)
            for warp in range(count):
                agent = self.clocks.add(f"warp {warp} of {block.name}", True)
                if warp == 0:
                    block.first_agent = agent
        for block in self.blocks:
            live = np.arange(count * LANES) < launch.threads
            parts = [np.arange(count)] if machine.policy.lockstep else [np.array([n]) for n in range(count)]
            for ids in parts:
                lanes = (ids[:, None] * LANES + np.arange(LANES)).reshape(-1)
                self.groups.append(Warps.fresh(block, ids, live[lanes]))

    def replace(self, old: list["Warps"], new: "Warps") -> None:
        """`new` takes the place of groups that were joined."""
        for group in old:
            self.groups.remove(group)
        self.groups.append(new)


class Block:
    """One CTA. index: in the grid; place: in the cluster."""

    def __init__(
        self,
        machine: Machine,
        cluster: Cluster,
        index: tuple[int, int, int],
        place: tuple[int, int, int],
        rank: int,
    ) -> None:
        self.machine, self.cluster, self.launch = machine, cluster, machine.launch
        self.kernel = self.launch.kernel
        self.index, self.place, self.rank = index, place, rank
        grid = self.launch.grid
        self.number = index[0] + grid[0] * (index[1] + grid[1] * index[2])
        self.layout = machine.layout
        self.name = f"block {index}"
        clocks = cluster.clocks if self.launch.races else None
        self.shared = SharedMemory(self.layout.end, clocks, self.name, self.launch.poison)
        self.tensor = TensorMemory(clocks, self.name)
        self.barriers: dict[int, Any] = {}
        self.named: dict[int, Any] = {}
        self.first_agent = 0
        self.ended = False
        self.live_threads = self.launch.threads
        self.groups: dict[tuple[str, int], Any] = {}  # (kind, warp) -> its groups of asynchronous work
        self._agents: dict[object, int] = {}

    def symbol(self, name: str) -> int:
        """The address of a variable."""
        if name in self.layout.symbols:
            return (self.rank << RANK_SHIFT) + self.layout.symbols[name]
        if name in self.launch.globals and not self.kernel.globals[name].unreadable:
            return self.launch.globals[name]
        raise Fault("not modelled", f"the symbol {name}")

    def agent(self, key: object, name: str, generic: bool = False) -> int:
        """The agent of one line of asynchronous work of this block, for the race detector. generic: it writes as plain
        stores do, so that a tensor core sees it only behind a fence.
        """
        if key not in self._agents:
            self._agents[key] = self.cluster.clocks.add(f"{name} of {self.name}", generic)
        return self._agents[key]


class Warps:
    """ids: int (warps,), in their block. Registers are arrays (registers, threads) by size in bytes; `by_type` views
    them by PTX type. Under LOCAL there is local memory, uint8 (bytes, threads).
    """

    def __init__(self, block: Block, ids: np.ndarray, files: dict[int, np.ndarray], predicates: np.ndarray) -> None:
        self.block, self.ids = block, ids
        self.files, self.predicates = files, predicates
        self.by_type = {t: files[kind().itemsize].view(kind) for t, kind in NUMPY.items()}
        self.count = len(ids) * LANES
        self.agents = block.first_agent + ids
        self.lane_agents = np.repeat(self.agents, LANES)
        self.threads = (ids[:, None] * LANES + np.arange(LANES)).reshape(-1)
        self.specials: dict[str, Any] = {}
        self.pc = 0
        self.mask: Mask = None
        self.alive: Mask = None  # None: no thread has ended
        self.others: list[tuple[int, np.ndarray]] = []  # places where further threads stand
        self.waiting: set[int] = set()  # those of them where threads wait for the rest of their warp
        self.state: Any = None  # what they wait for; None: nothing
        self.pending: list[Work] = []  # what will write their registers
        self.stop_here: bool = False  # set by an instruction after which another group should have its turn

    @classmethod
    def fresh(cls, block: Block, ids: np.ndarray, live: np.ndarray) -> "Warps":
        """Warps at the start of the kernel. live: bool (threads,), False where the block has no such thread."""
        kernel = block.kernel
        count = len(ids) * LANES
        files = {size: np.zeros((max(n, 1), count), f"u{size}") for size, n in kernel.registers.items() if size < 16}
        poison = POISON if block.launch.poison is None else block.launch.poison
        files[LOCAL] = np.full((kernel.local_bytes, count), poison, np.uint8)
        warps = cls(block, ids, files, np.zeros((max(kernel.predicates, 1), count), bool))
        if not live.all():
            warps.alive = warps.mask = live
        return warps

    def active(self) -> Any:
        """bool (threads,): those that execute the present instruction."""
        return np.ones(self.count, bool) if self.mask is None else self.mask

    def ended(self) -> bool:
        return self.alive is not None and not self.alive.any()

    def rest(self) -> None:
        """They wait for nothing: what an instruction says next counts."""
        self.state, self.stop_here = None, False

    def issue(self, kind: str, lane: object, run: Callable[[], None]) -> Work:
        """Ask for asynchronous work, done now or later. `lane`: see Work."""
        work = Work(kind, lane, run, self.where())
        self.block.machine.issue(work)
        return work

    def lanes(self, mask: Mask) -> np.ndarray:
        """The numbers of the threads of `mask`."""
        return np.arange(self.count) if mask is None else np.flatnonzero(mask)

    def where(self) -> str:
        """The place of the present instruction, for people."""
        code = self.block.kernel.code
        if self.pc >= len(code):
            return "the end of the kernel"
        instruction = code[self.pc]
        warps = f"warp {self.ids[0]}" if len(self.ids) == 1 else f"warps {', '.join(map(str, self.ids))}"
        place = f", {instruction.source}" if instruction.source else ""
        return f"PTX line {instruction.line}{place}, {self.block.name}, {warps}: {instruction.text[:160]}"

    # ---- where the threads stand

    def limit(self) -> int:
        """The first place where other threads stand that wait for none."""
        return min((pc for pc, _ in self.others if pc not in self.waiting), default=NEVER)

    def go(self, pc: int, mask: np.ndarray) -> None:
        """Leave the threads of `mask` at `pc`."""
        for i, (place, there) in enumerate(self.others):
            if place == pc:
                self.others[i] = (pc, there | mask)
                return
        self.others.append((pc, mask.copy()))  # it may be a predicate itself, which the next turn of a loop overwrites

    def take_first(self) -> None:
        """Go on with the threads that stand first in the text, and that wait for none if there are such; those that run
        now have been left with `go`.
        """
        i = min(range(len(self.others)), key=lambda n: (self.others[n][0] in self.waiting, self.others[n][0]))
        self.pc, mask = self.others.pop(i)
        self.waiting.discard(self.pc)
        self.mask = None if not self.others and mask.all() else mask

    def settle(self) -> None:
        """After a jump or at a meeting place: join threads at the same place, and run those that stand first."""
        if self.others and self.pc >= self.limit():
            self.go(self.pc, self.active())
            self.take_first()

    def wait(self, fault: Fault) -> None:
        """Leave those that run now here until the rest of their warps comes, and go on with that. fault: of no rest."""
        came = any(pc == self.pc for pc, _ in self.others)
        free = any(pc != self.pc and pc not in self.waiting for pc, _ in self.others)
        if not came and not free:
            raise fault
        pc = self.pc
        self.go(pc, self.active())
        self.waiting = self.waiting | {pc} if free else {other for other, _ in self.others} - {pc}
        self.take_first()

    def end(self, mask: np.ndarray) -> None:
        """The threads of `mask` have ended. Fault("divergence"): others of their warps wait for them."""
        for pc, there in self.others:
            if pc in self.waiting and (there.reshape(-1, LANES).any(1) & mask.reshape(-1, LANES).any(1)).any():
                raise Fault("divergence", "a thread ended, and others of its warp wait for it")
        alive = np.ones(self.count, bool) if self.alive is None else self.alive
        self.alive = alive & ~mask
        left = self.active() & ~mask
        self.pc += 1
        if left.any():
            self.mask = left
        elif self.others:
            self.take_first()
        else:
            self.mask = left

    # ---- splitting and joining

    def _part(self, chosen: np.ndarray) -> "Warps":
        lanes = np.repeat(chosen, LANES)
        files = {size: np.ascontiguousarray(array[:, lanes]) for size, array in self.files.items()}
        part = Warps(self.block, self.ids[chosen], files, np.ascontiguousarray(self.predicates[:, lanes]))
        part.pc = self.pc
        mask = None if self.mask is None else self.mask[lanes]
        part.alive = None if self.alive is None or self.alive[lanes].all() else self.alive[lanes]
        part.others = [(pc, there[lanes]) for pc, there in self.others if there[lanes].any()]
        part.waiting = {pc for pc, _ in part.others} & self.waiting
        part.mask = None if mask is None or (mask.all() and not part.others) else mask
        if mask is not None and not mask.any() and part.others:
            part.take_first()
        return part

    def split(self, groups: list[np.ndarray]) -> list["Warps"]:
        """Return one group of warps for each of `groups`, bool (warps,). Work that will write registers is done."""
        self.finish_pending()
        return [self._part(chosen) for chosen in groups]

    def finish_pending(self) -> None:
        """Do the asynchronous work that writes registers of these warps: it knows this object, not its parts."""
        for work in self.pending:
            self.block.machine.complete(work)
        self.pending = []

    def whole(self, what: str) -> Any:
        """bool (warps,): which warps execute the present instruction. Fault("divergence"): only a part of a warp."""
        if self.mask is None:
            return np.ones(len(self.ids), bool)
        active = self.mask.reshape(-1, LANES)
        alive = np.ones_like(active) if self.alive is None else self.alive.reshape(-1, LANES)
        some = active.any(axis=1)
        if (active[some] != alive[some]).any():
            raise Fault("divergence", f"{what}: not all threads of a warp execute it together")
        return some


def join(groups: list[Warps]) -> Warps:
    """Return one group of what stands at the same instruction, every thread of each."""
    if len(groups) == 1:
        return groups[0]
    for group in groups:
        group.finish_pending()
    order = np.argsort(np.concatenate([g.ids for g in groups]))
    lanes = (order[:, None] * LANES + np.arange(LANES)).reshape(-1)
    ids = np.concatenate([g.ids for g in groups])[order]
    first = groups[0]
    files = {
        size: np.ascontiguousarray(np.concatenate([g.files[size] for g in groups], 1)[:, lanes]) for size in first.files
    }
    predicates = np.ascontiguousarray(np.concatenate([g.predicates for g in groups], 1)[:, lanes])
    joined = Warps(first.block, ids, files, predicates)
    joined.pc = first.pc
    if any(g.alive is not None for g in groups):
        parts = [np.ones(g.count, bool) if g.alive is None else g.alive for g in groups]
        joined.alive = joined.mask = np.concatenate(parts)[lanes]
    return joined


def joinable(group: Warps) -> bool:
    """Whether all of its threads that live stand at one place."""
    return not group.others and (group.mask is None or (group.alive is not None and (group.mask == group.alive).all()))
