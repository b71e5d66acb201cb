"""Execute a launch: give groups of warps their turns, and step through their instructions."""

from collections import Counter
from typing import Any

import numpy as np

from ptx_model import barrier, decode
from ptx_model.faults import Fault
from ptx_model.launch import Launch
from ptx_model.machine import LANES, NEVER, Apart, Cluster, Machine, Missing, Warps
from ptx_model.policies import Policy

INSTRUCTIONS = 200_000_000  # executed by groups of warps, after which a run is taken to be endless
_JUMPS = ("bra", "brx", "ret", "exit")


class Scheduler:
    """Executes one launch under one policy. limit: of instructions of groups of warps."""

    def __init__(self, launch: Launch, policy: Policy, limit: int = INSTRUCTIONS) -> None:
        self.machine = Machine(launch, policy)
        self.launch, self.policy = launch, policy
        self._limit = limit
        self._steps: list[Any] = [None] * len(launch.kernel.code)

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
        machine = self.machine
        most = self.launch.resident(machine.layout.bytes)
        while waiting or resident:
            if not resident:
                resident.append(Cluster(machine, waiting.pop()))
            if self._round(resident):
                continue
            if machine.pending:
                machine.complete(self.policy.choose(machine.pending))
            elif waiting and len(resident) < most and any(_polls(g) for c in resident for g in c.groups):
                # Twice as many, as those that poll wait for all of them as a rule.
                for _ in range(min(len(resident), most - len(resident), len(waiting))):
                    resident.append(Cluster(machine, waiting.pop()))
            else:
                left = f", and {len(waiting)} clusters of blocks have not begun, as no more fit" if waiting else ""
                raise Fault("deadlock", f"every warp waits{left}", _state(resident))

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
                while work := self.policy.between(self.machine.pending):
                    self.machine.complete(work)
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
        return state[0] == "poll" and (state[1] != self.machine.events or not state[3])

    def _turn(self, cluster: Cluster, group: Warps) -> None:
        """Let one group execute until it waits, ends, splits, or has used its budget."""
        before = group.state
        group.rest()
        try:
            parts = self._execute(group, min(self.policy.budget(), self._limit - self.machine.executed + 1))
        except Fault as fault:
            if fault.where:
                raise
            raise Fault(fault.kind, fault.what, group.where()) from None
        if group.stop_here and group.state is None and parts is None:
            # Blocked at a place for the third time since something changed: a whole turn of its loop has found nothing,
            # and saw nothing from before the change.
            same = before is not None and before[0] == "poll" and before[1] == self.machine.events
            places: Counter[int] = Counter(before[2] if same else ())
            places[group.pc] += 1
            group.state = ("poll", self.machine.events, places, places[group.pc] > 2)
        if parts is not None:
            cluster.groups.remove(group)
            cluster.groups.extend(parts)
        elif group.ended():
            cluster.groups.remove(group)
            self._left(group)
        while self.machine.after_turn:
            self.machine.after_turn.pop()()

    def _left(self, group: Warps) -> None:
        """Warps have ended: barriers that count those that live need fewer."""
        self.machine.events += 1
        block = group.block
        gone = int(np.count_nonzero(group.threads < self.launch.threads))
        block.live_threads -= gone
        if not block.live_threads:
            block.ended = True
        barrier.after_exit(group)

    def _end(self, cluster: Cluster) -> None:
        """The cluster's warps have ended; nothing may be left over."""
        while self.machine.pending:
            self.machine.complete(self.machine.pending[0])
        for block in cluster.blocks:
            block.tensor.check_freed()
            for offset, mbarrier in block.barriers.items():
                if mbarrier.tx:
                    raise Fault(
                        "barrier",
                        f"the mbarrier at byte {offset:#x} of {block.name} ends with {mbarrier.tx} bytes expected",
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
            self.machine.executed += count
            if self.machine.executed > self._limit:
                raise Fault("limit", f"more than {self._limit} instructions", w.where())
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


def _state(resident: list[Cluster]) -> str:
    """What every group waits for, and where, a line each."""
    lines = []
    for cluster in resident[:4]:
        for group in cluster.groups:
            said = "polls memory that nothing changes"
            if group.state and group.state[0] == "mbarrier":
                said = "; ".join(f"waits for {b.said()}, parity {parity}" for b, _, parity in group.state[1])
            elif group.state and group.state[0] != "poll":
                said = group.state[3]
            lines.append(f"{said}: {group.where()}")
    return "\n  ".join(lines)


def _polls(group: Warps) -> bool:
    return group.state is not None and group.state[0] == "poll"
