"""The machine: a launch, its clusters and blocks, and the loop that gives groups of warps their turns."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ptx_model import decode
from ptx_model.faults import Fault
from ptx_model.memory import LARGEST_SHARED, RANK_SHIFT, SHARED_START, GlobalMemory, SharedMemory
from ptx_model.parse import Address, Kernel, Symbol, Vector
from ptx_model.policies import Policy
from ptx_model.races import Clocks
from ptx_model.tensor_memory import TensorMemory
from ptx_model.warps import LANES, NEVER, Apart, Missing, Warps

INSTRUCTIONS = 200_000_000  # executed by groups of warps, after which a run is taken to be endless
_JUMPS = ("bra", "brx", "ret", "exit")
# Of one multiprocessor; a grid whose blocks wait for each other must fit on all of them. Registers, which may allow
# fewer, are chosen by ptxas, whose choice the model does not see.
MOST_BLOCKS, MOST_THREADS, SHARED_OF_BLOCKS, SHARED_RESERVED = 32, 2048, 228 * 1024, 1024


@dataclass
class Launch:
    """One kernel launch. grid, block, cluster: x, y, z. shared_bytes: dynamic. parameters: the bytes of all of them.

    poison: None, and a read of shared memory that nothing has written is a fault; or the byte that such a read gets.
    Right kernels do read such bytes, of rows past the end, and drop what comes of them: runs with different bytes must
    then agree.
    """

    kernel: Kernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    parameters: bytes
    memory: GlobalMemory
    shared_bytes: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)
    globals: dict[str, int] = field(default_factory=dict)  # variables in global memory -> address
    multiprocessors: int = 132
    races: bool = True
    poison: int | None = None
    meeting: int = 0  # address of what a cooperative grid counts at; 0: the launch is not cooperative

    @property
    def threads(self) -> int:
        return math.prod(self.block)

    def resident(self, shared: int) -> int:
        """Return how many clusters may be under way together, at least one. shared: bytes of a block, all in all."""
        each = min(MOST_BLOCKS, MOST_THREADS // self.threads, SHARED_OF_BLOCKS // (shared + SHARED_RESERVED))
        return max(1, self.multiprocessors * max(each, 1) // math.prod(self.cluster))

    def check(self) -> None:
        """Fault("bounds"): a launch that the driver would refuse."""
        if any(g % c for g, c in zip(self.grid, self.cluster, strict=True)):
            raise Fault("bounds", f"the grid {self.grid} is no multiple of the cluster {self.cluster}")
        if not 1 <= self.threads <= 1024 or min(self.grid) < 1:
            raise Fault("bounds", f"a grid of {self.grid} blocks of {self.threads} threads cannot be launched")
        limit = self.kernel.threads
        if limit and (self.threads != limit if self.kernel.exact_threads else self.threads > limit):
            raise Fault("bounds", f"{self.threads} threads a block, but the kernel is made for {limit}")
        if len(self.parameters) < self.kernel.parameter_bytes:
            raise Fault("bounds", f"{len(self.parameters)} bytes of parameters for {self.kernel.parameter_bytes}")


@dataclass(eq=False)
class Work:
    """Asynchronous work that an instruction asked for. lane: work of one lane is done in the order of the requests."""

    kind: str  # "tma", "cp.async", "tcgen05", "wgmma"
    lane: object
    run: Callable[[], None]
    machine: "Machine"
    where: str
    done: bool = False

    def complete(self) -> None:
        self.machine.complete(self)


class Block:
    """One CTA. index: in the grid; place: in the cluster."""

    def __init__(
        self,
        machine: "Machine",
        cluster: "Cluster",
        index: tuple[int, int, int],
        place: tuple[int, int, int],
        rank: int,
    ) -> None:
        self.machine, self.cluster, self.launch = machine, cluster, machine.launch
        self.kernel = self.launch.kernel
        self.index, self.place, self.rank = index, place, rank
        grid = self.launch.grid
        self.number = index[0] + grid[0] * (index[1] + grid[1] * index[2])
        self._symbols, size, self.static_bytes = machine.layout
        self.name = f"block {index}"
        self.shared = SharedMemory(size, cluster.clocks if self.launch.races else None, self.name, self.launch.poison)
        self.tensor = TensorMemory(cluster.clocks if self.launch.races else None, self.name)
        self.barriers: dict[int, Any] = {}
        self.named: dict[int, Any] = {}
        self.first_agent = 0
        self.ended = False
        self.live_threads = self.launch.threads
        self.groups: dict[tuple[str, int], Any] = {}  # (kind, warp) -> its groups of asynchronous work
        self._agents: dict[object, int] = {}

    def symbol(self, name: str) -> int:
        """The address of a variable."""
        if name in self._symbols:
            return (self.rank << RANK_SHIFT) + self._symbols[name]
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


class Cluster:
    """Blocks that share their memory. first: the index of the first block."""

    def __init__(self, machine: "Machine", first: tuple[int, int, int]) -> None:
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
        self.groups: list[Warps] = []
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


class Machine:
    """Executes one launch under one policy."""

    def __init__(self, launch: Launch, policy: Policy, limit: int = INSTRUCTIONS) -> None:
        launch.check()
        self.launch, self.policy = launch, policy
        self.layout = layout(launch)
        self.pending: list[Work] = []
        self.events = 0  # grows with whatever another warp could have waited for
        self.executed = 0
        self._limit = limit
        self._steps: list[Any] = [None] * len(launch.kernel.code)
        self._here: Warps | None = None
        self.after_turn: list[Callable[[], None]] = []  # what an instruction wants done when its group's turn is over

    def tick(self) -> int:
        """A clock: the instructions so far."""
        return self.executed

    # ---- asynchronous work

    def issue(self, kind: str, lane: object, run: Callable[[], None]) -> Work:
        """Asynchronous work, done now or later. `lane`: see Work."""
        work = Work(kind, lane, run, self, self.where(self._here))
        self.pending.append(work)
        if self.policy.at_once(work):
            self.complete(work)
        return work

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

    # ---- the loop

    def run(self) -> None:
        """Execute the launch. Fault: what went wrong, and where."""
        with np.errstate(all="ignore"):
            self._run()

    def _run(self) -> None:
        grid, cluster = self.launch.grid, self.launch.cluster
        waiting = [
            (x, y, z)
            for z in range(0, grid[2], cluster[2])
            for y in range(0, grid[1], cluster[1])
            for x in range(0, grid[0], cluster[0])
        ]
        waiting.reverse()
        resident: list[Cluster] = []
        most = self.launch.resident(self.layout[1] - SHARED_START)
        while waiting or resident:
            if not resident:
                resident.append(Cluster(self, waiting.pop()))
            if self._round(resident):
                continue
            if self.pending:
                self.complete(self.policy.choose(self.pending))
            elif waiting and len(resident) < most and any(_polls(g) for c in resident for g in c.groups):
                # Twice as many, as those that poll wait for all of them as a rule.
                for _ in range(min(len(resident), most - len(resident), len(waiting))):
                    resident.append(Cluster(self, waiting.pop()))
            else:
                left = f", and {len(waiting)} clusters of blocks have not begun, as no more fit" if waiting else ""
                raise Fault("deadlock", f"every warp waits{left}", self._state(resident))

    def _round(self, resident: list[Cluster]) -> bool:
        """Give every group that can go on a turn. Return whether one could."""
        progress = False
        for cluster in list(resident):
            for group in self.policy.order(list(cluster.groups)):
                # An earlier group of this round may have split this one, or joined it to others.
                if not any(group is g for g in cluster.groups) or not self._ready(group):
                    continue
                progress = True
                self._turn(cluster, group)
                self.policy.between(self)
            if not cluster.groups:
                self._end(cluster)
                resident.remove(cluster)
        return progress

    def _ready(self, group: Warps) -> bool:
        state = group.state
        if state is None:
            return True
        if state[0] == "mbarrier":
            return any(barrier.completed != seen for barrier, seen, *_ in state[1])
        # Another barrier wakes its warps itself.
        return state[0] == "poll" and (state[1] != self.events or not state[3])

    def _turn(self, cluster: Cluster, group: Warps) -> None:
        """Let one group execute until it waits, ends, splits, or has used its budget."""
        before = group.state
        group.rest()
        self._here = group
        try:
            parts = self._execute(group, min(self.policy.budget(), self._limit - self.executed + 1))
        except Fault as fault:
            if fault.where:
                raise
            raise Fault(fault.kind, fault.what, self.where(group)) from None
        if group.stop_here and group.state is None and parts is None:
            # Blocked at a place for the third time since something changed: a whole turn of its loop has found nothing,
            # and saw nothing from before the change.
            same = before is not None and before[0] == "poll" and before[1] == self.events
            places: Counter[int] = Counter(before[2] if same else ())
            places[group.pc] += 1
            group.state = ("poll", self.events, places, places[group.pc] > 2)
        if parts is not None:
            cluster.groups.remove(group)
            cluster.groups.extend(parts)
        elif group.ended():
            cluster.groups.remove(group)
            self._left(group)
        while self.after_turn:
            self.after_turn.pop()()

    def replace(self, old: list[Warps], new: Warps) -> None:
        """`new` takes the place of groups that were joined."""
        groups = new.block.cluster.groups
        for group in old:
            groups.remove(group)
        groups.append(new)

    def _left(self, group: Warps) -> None:
        """Warps have ended: barriers that count those that live need fewer."""
        from ptx_model import barrier

        self.events += 1
        block = group.block
        gone = int(np.count_nonzero(group.threads < self.launch.threads))
        block.live_threads -= gone
        if not block.live_threads:
            block.ended = True
        barrier.after_exit(self, group)

    def _end(self, cluster: Cluster) -> None:
        """The cluster's warps have ended; nothing may be left over."""
        while self.pending:
            self.complete(self.pending[0])
        for block in cluster.blocks:
            block.tensor.check_freed()
            for offset, barrier in block.barriers.items():
                if barrier.tx:
                    raise Fault(
                        "barrier",
                        f"the mbarrier at byte {offset:#x} of {block.name} ends with {barrier.tx} bytes expected",
                    )

    # ---- execution

    def _step(self, pc: int) -> tuple:
        """(function, predicate's index or -1, negated, whether it steers) of the instruction."""
        code = self.launch.kernel.code
        if pc >= len(code):
            raise Fault("not modelled", "the end of the kernel without ret")
        instruction = code[pc]
        steers = instruction.op in (*_JUMPS, "bar", "barrier") and instruction.mods[:1] != ("warp",)
        if instruction.op in _JUMPS:
            for mod in instruction.mods:
                if mod not in ("uni", "idx"):
                    raise Fault("not modelled", f"{instruction.op} .{mod}")
            run = instruction.op
        else:
            run = decode.decode(instruction, self.launch.kernel)
        guard = instruction.predicate
        step = (run, guard.index if guard else -1, guard.negated if guard else False, steers)
        self._steps[pc] = step
        return step

    def _execute(self, w: Warps, budget: int) -> list[Warps] | None:
        """Execute instructions of `w`. Return its parts if it split, else None."""
        steps, count = self._steps, 0
        try:
            while count < budget and not w.ended():
                limit = w.limit() if w.others else NEVER
                while w.pc < limit:
                    run, guard, negated, steers = (
                        steps[w.pc] if w.pc < len(steps) and steps[w.pc] is not None else self._step(w.pc)
                    )
                    m = w.mask
                    if guard >= 0:
                        taken = w.predicates[guard]
                        if negated:
                            taken = ~taken
                        if m is not None:
                            taken = taken & m
                        chosen = taken if m is not None or not taken.all() else None
                    else:
                        taken: Any = m
                        chosen = m
                    count += 1
                    if steers:
                        parts = self._steer(w, run, chosen)
                        if parts is not None:
                            return parts
                        break
                    if chosen is None or guard < 0 or taken.any():
                        try:
                            run(w, chosen)
                        except Missing as missing:
                            w.wait(missing.fault)
                            break
                    w.pc += 1
                    if w.state is not None or w.stop_here or count >= budget:
                        break
                w.settle()
                if w.state is not None or w.stop_here:
                    break
        finally:
            self.executed += count
            if self.executed > self._limit:
                raise Fault("limit", f"more than {self._limit} instructions", self.where(w))
        return None

    def _steer(self, w: Warps, run: Any, chosen: Any) -> list[Warps] | None:
        """A branch, an end, or a barrier of the block."""
        if run in ("ret", "exit"):
            if chosen is None or chosen.any():
                w.finish_pending()
                w.end(w.active() if chosen is None else chosen)
            else:
                w.pc += 1
            return None
        if run == "brx":
            return self._table(w, chosen)
        if run == "bra":
            target = self.launch.kernel.code[w.pc].operands[-1].target
            return self._branch(w, target, chosen)
        return self._barrier(w, run, chosen)

    def _branch(self, w: Warps, target: int, chosen: Any) -> list[Warps] | None:
        if chosen is None or (w.mask is not None and (chosen == w.mask).all()):
            w.pc = target
            return None
        if not chosen.any():
            w.pc += 1
            return None
        if len(w.ids) > 1:
            active = w.active().reshape(-1, LANES)
            jump = chosen.reshape(-1, LANES)
            every = (jump == active).all(axis=1) & active.any(axis=1)
            none = ~jump.any(axis=1)
            mixed = ~(every | none)
            groups = [g for g in (every, none, mixed) if g.any()]
            if len(groups) > 1:
                return w.split(groups)
        w.go(w.pc + 1, w.active() & ~chosen)
        w.go(target, chosen.copy())
        w.take_first()
        return None

    def _table(self, w: Warps, chosen: Any) -> None:
        """brx.idx: each thread goes to the label that its number names."""
        number, labels = self.launch.kernel.code[w.pc].operands
        index = w.files[number.size][number.index]
        active = w.active()
        jump = active if chosen is None else chosen
        if (index[jump] >= len(labels.items)).any():
            raise Fault("bounds", f"brx.idx: label {int(index[jump].max())} of {len(labels.items)}")
        if (active & ~jump).any():
            w.go(w.pc + 1, active & ~jump)
        for n in np.unique(index[jump]):
            w.go(labels.items[int(n)].target, jump & (index == n))
        w.take_first()

    def _barrier(self, w: Warps, run: Any, chosen: Any) -> list[Warps] | None:
        """bar and barrier need whole warps, all at this place."""
        if chosen is not None and not (w.mask is not None and (chosen == w.mask).all()):
            if not chosen.any():
                w.pc += 1
                return None
            if len(w.ids) > 1:
                some = chosen.reshape(-1, LANES).any(axis=1)
                if not some.all():
                    return w.split([some, ~some])
            if (chosen != w.active()).any():
                raise Fault("divergence", "a barrier that not all threads of a warp reach together")
        some = w.whole("a barrier of the block")
        if not some.all():
            return w.split([some, ~some])
        try:
            run(w, w.mask)
        except Apart as apart:
            return w.split([apart.some, ~apart.some])
        w.pc += 1
        return None

    # ---- words for faults

    def where(self, w: Warps | None) -> str:
        """The place of an instruction, for people."""
        if w is None:
            return ""
        code = self.launch.kernel.code
        if w.pc >= len(code):
            return "the end of the kernel"
        instruction = code[w.pc]
        warps_ = f"warp {w.ids[0]}" if len(w.ids) == 1 else f"warps {', '.join(map(str, w.ids))}"
        place = f", {instruction.source}" if instruction.source else ""
        return f"PTX line {instruction.line}{place}, {w.block.name}, {warps_}: {instruction.text[:160]}"

    def _state(self, resident: list[Cluster]) -> str:
        lines = []
        for cluster in resident[:4]:
            for group in cluster.groups:
                said = "polls memory that nothing changes"
                if group.state and group.state[0] == "mbarrier":
                    said = "; ".join(f"waits for {b.said()}, parity {parity}" for b, _, parity in group.state[1])
                elif group.state and group.state[0] != "poll":
                    said = group.state[3]
                lines.append(f"{said}: {self.where(group)}")
        return "\n  ".join(lines)


def _polls(group: Warps) -> bool:
    return group.state is not None and group.state[0] == "poll"


def layout(launch: Launch) -> tuple[dict[str, int], int, int]:
    """-> (address of each shared variable, end of the block's shared memory, bytes of static variables)."""
    used = set()
    for instruction in launch.kernel.code:
        used.update(_symbols(instruction.operands))
    symbols: dict[str, int] = {}
    at = SHARED_START
    for variable in launch.kernel.shared:
        if variable.size and variable.name in used:
            at = -(-at // variable.align) * variable.align
            symbols[variable.name] = at
            at += variable.size
    static = at - SHARED_START
    dynamic = [v for v in launch.kernel.shared if not v.size and v.name in used]
    align = max((v.align for v in dynamic), default=1)
    at = -(-at // max(align, 16)) * max(align, 16)
    for variable in dynamic:
        symbols[variable.name] = at
    size = at + launch.shared_bytes
    if size - SHARED_START > LARGEST_SHARED:
        raise Fault("bounds", f"{size - SHARED_START} bytes of shared memory, but a block has {LARGEST_SHARED}")
    return symbols, size, static


def _symbols(operands: tuple) -> set[str]:
    found = set()
    for operand in operands:
        if isinstance(operand, Symbol):
            found.add(operand.name)
        elif isinstance(operand, Address):
            found |= _symbols((operand.base, *operand.more))
        elif isinstance(operand, Vector):
            found |= _symbols(operand.items)
    return found
