"""Warps that execute together: registers, predicates, and where each thread stands.

A `Warps` holds one warp or several of one block that are at the same instruction. An instruction is one numpy operation
over all of their threads. Where warps part, the group splits; where they meet at a barrier, groups join again. Threads
of one warp part and meet inside of it: of the places where they stand, the first in the text goes first. But those that
wait at an instruction for the rest of their warp (elect.sync) let it come, from wherever it stands.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from ptx_model.faults import Fault
from ptx_model.memory import POISON

if TYPE_CHECKING:
    from ptx_model.machine import Block

LANES = 32
NUMPY = {
    "b8": np.uint8,
    "u8": np.uint8,
    "s8": np.int8,
    "b16": np.uint16,
    "u16": np.uint16,
    "s16": np.int16,
    "b32": np.uint32,
    "u32": np.uint32,
    "s32": np.int32,
    "f32": np.float32,
    "b64": np.uint64,
    "u64": np.uint64,
    "s64": np.int64,
    "f64": np.float64,
    "f16": np.uint16,
    "bf16": np.uint16,
    "f16x2": np.uint32,
    "bf16x2": np.uint32,
    "f32x2": np.uint64,
}
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


class Warps:
    """ids: int (warps,), in their block. Registers are arrays (registers, threads) by size in bytes; `by_type` views
    them by PTX type. Under LOCAL there is local memory, uint8 (bytes, threads).
    """

    def __init__(self, block: "Block", ids: np.ndarray, files: dict[int, np.ndarray], predicates: np.ndarray) -> None:
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
        self.pending: list = []  # asynchronous work that will write their registers
        self.stop_here: bool = False  # set by an instruction after which another group should have its turn

    @classmethod
    def fresh(cls, block: "Block", ids: np.ndarray, live: np.ndarray) -> "Warps":
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
            work.complete()
        self.pending = []

    def whole(self, what: str) -> Any:
        """bool (warps,): which warps execute the present instruction. Fault("divergence"): only a part of a warp."""
        from ptx_model.faults import Fault

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
