"""Asynchronous copies: cp.async, cp.async.bulk with and without tensor maps, st.async; their groups and barriers."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ptx_model import formats
from ptx_model.barrier import find, used_by
from ptx_model.decode import Decoder, Execute, opcode
from ptx_model.faults import Fault
from ptx_model.formats import NUMPY
from ptx_model.machine import Block, Mask, Warps
from ptx_model.memory import PARAMETER_WINDOW, RANK_SHIFT, SHARED_WINDOW
from ptx_model.parse import SIZE, Address, Vector
from ptx_model.policies import Work
from ptx_model.races import Past, joined
from ptx_model.spaces import shared_blocks
from ptx_model.tensor_map import BYTES, TensorMap, swizzled

_OFFSET = (1 << RANK_SHIFT) - 1
_TENSOR_ALIGN = 128  # bytes, of a box in shared memory


class Groups:
    """The asynchronous work of one warp: `open` is not committed, `closed` are groups, oldest first."""

    def __init__(self) -> None:
        self.open: list[tuple[Work, Past]] = []
        self.closed: list[list[tuple[Work, Past]]] = []

    def commit(self) -> None:
        self.closed.append(self.open)
        self.open = []

    def take(self, left: int) -> list[tuple[Work, Past]]:
        """Return the work of all groups but the last `left`, which are no longer waited for."""
        count = max(0, len(self.closed) - left)
        taken, self.closed = self.closed[:count], self.closed[count:]
        return [item for group in taken for item in group]


def groups_of(w: Warps, kind: str, warp: int) -> Groups:
    """The groups of one warp of `w`. warp: its number in the block."""
    return w.block.groups.setdefault((kind, int(warp)), Groups())


def wait_groups(w: Warps, kind: str, left: int, ids: np.ndarray) -> None:
    """Wait for all but `left` groups of these warps."""
    clocks = w.block.cluster.clocks
    for warp in ids:
        done = groups_of(w, kind, warp).take(left)
        for work, _ in done:
            w.block.machine.complete(work)
        for _, past in done:
            clocks.acquire(np.array([w.block.first_agent + warp]), clocks.finish(past))


def _active_ids(w: Warps, m: Mask) -> np.ndarray:
    return w.ids if m is None else w.ids[m.reshape(-1, 32).any(axis=1)]


@opcode("cp")
def copy(d: Decoder) -> Execute:
    reduces = d.take("reduce")
    if not d.take("async"):
        raise d.refuse("a copy that is not asynchronous")
    if d.take("bulk"):
        if d.take("prefetch"):
            d.left = []
            return lambda w, m: None
        if d.take("commit_group"):
            return _commit("bulk")
        if d.take("wait_group"):
            d.drop("read")
            return _wait("bulk", int(d.operands[0].value))
        return _bulk_tensor(d, reduces) if d.take("tensor") else _bulk(d, reduces)
    if d.take("commit_group"):
        return _commit("cp.async")
    if d.take("wait_group"):
        return _wait("cp.async", int(d.operands[0].value))
    if d.take("wait_all"):
        return _wait_all
    if d.take("mbarrier"):
        return _copies_arrive(d)
    return _small(d)


def _commit(kind: str) -> Execute:
    def execute(w: Warps, m: Mask) -> None:
        for warp in _active_ids(w, m):
            groups_of(w, kind, warp).commit()

    return execute


def _wait(kind: str, left: int) -> Execute:
    return lambda w, m: wait_groups(w, kind, left, _active_ids(w, m))


def _wait_all(w: Warps, m: Mask) -> None:
    _commit("cp.async")(w, m)
    wait_groups(w, "cp.async", 0, _active_ids(w, m))


# ---- cp.async: 4, 8 or 16 bytes a thread


def _small(d: Decoder) -> Execute:
    d.drop("ca", "cg", "shared", "shared::cta", "global", "L2::cache_hint", "L2::64B", "L2::128B", "L2::256B")
    to, source = d.address(0, False), d.address(1, True)
    size = int(d.operands[2].value)
    hint = "L2::cache_hint" in d.instruction.mods
    count = len(d.operands) - hint
    read = d.lanes(3, "u32") if count > 3 else None
    if size not in (4, 8, 16):
        raise d.refuse(f"{size} bytes")

    def execute(w: Warps, m: Mask) -> None:
        lanes = w.lanes(m)
        at, start = to(w)[lanes], source(w)[lanes]
        at = np.where(at >= SHARED_WINDOW, at - SHARED_WINDOW, at)
        taken = np.full(len(lanes), size) if read is None else read(w)[lanes].astype(np.int64)
        block, memory, clocks = w.block, w.block.launch.memory, w.block.cluster.clocks
        ids = w.ids[np.unique(lanes // 32)]
        warp_of = w.threads[lanes] // 32
        offsets = at & _OFFSET
        if (at >> RANK_SHIFT != block.rank).any():
            raise Fault("bounds", "cp.async into the shared memory of another block")
        block.shared.check(offsets, size)
        agents = {int(i): block.agent(("cp.async", int(i)), f"cp.async of warp {i}", True) for i in ids}
        pasts = {i: clocks.start(agent, np.array([block.first_agent + i])) for i, agent in agents.items()}

        def run() -> None:
            data = np.zeros((len(lanes), size), np.uint8)
            whole = taken == size
            if whole.any():
                data[whole] = (
                    memory.load(start[whole], min(size, 8), max(1, size // 8)).view(np.uint8).reshape(-1, size)
                )
            for i in np.flatnonzero(~whole & (taken > 0)):
                data[i, : taken[i]] = memory.bytes_at(int(start[i]), int(taken[i]))
            for warp, past in pasts.items():
                those = warp_of == warp
                block.shared.write_bytes(offsets[those][:, None] + np.arange(size), data[those], past)

        work = w.issue("cp.async", object(), run)
        for warp, past in pasts.items():
            groups_of(w, "cp.async", warp).open.append((work, past))

    return execute


def _copies_arrive(d: Decoder) -> Execute:
    """The barrier counts each thread once its copies are done; without .noinc it expects one arrival more for each."""
    d.drop("arrive", "shared", "shared::cta", "b64")
    noinc = d.take("noinc")
    address = d.address(0, False)

    def execute(w: Warps, m: Mask) -> None:
        lanes, at = w.lanes(m), address(w)
        clocks = w.block.cluster.clocks
        for where in np.unique(at[lanes]):
            those = lanes[at[lanes] == where]
            barrier = find(w.block, int(where))
            ids = w.ids[np.unique(those // 32)]
            if not noinc:
                barrier.pending += len(those)
            before = []
            for warp in ids:
                groups = groups_of(w, "cp.async", warp)
                before += [item for group in groups.closed for item in group] + groups.open
            agents = w.block.first_agent + ids
            past = clocks.release(agents)

            count = len(those)

            def run(barrier=barrier, before=before, past=past, count=count) -> None:
                for work, own in before:
                    w.block.machine.complete(work)
                    past = joined(past, clocks.finish(own))
                barrier.arrive(count, past)

            w.issue("cp.async", object(), run)

    return execute


# ---- bulk copies


def _targets(w: Warps, to: int, barrier: int, mask: int | None, pair: bool) -> list[tuple[Block, int, int]]:
    """-> (block, offset, address of its barrier) for each block that a load writes to."""
    blocks = w.block.cluster.blocks
    if mask is None:
        block, _, offset = shared_blocks(w, np.array([to]), False)[0]
        if barrier >> RANK_SHIFT != block.rank and not pair:
            raise Fault("barrier", f"a copy to {block.name} that tells a barrier of another block")
        return [(block, int(offset[0]), barrier)]
    if not mask or mask >> len(blocks):
        raise Fault("bounds", f"a multicast to the blocks {mask:#b} of a cluster of {len(blocks)}")
    found = []
    for rank in range(len(blocks)):
        if mask >> rank & 1:
            told = (rank & ~1) | (barrier >> RANK_SHIFT & 1) if pair else rank
            found.append((blocks[rank], to & _OFFSET, told << RANK_SHIFT | barrier & _OFFSET))
    return found


def _load(
    w: Warps, targets: list, data: Callable[[], np.ndarray], swizzle: int, size: int, lane: int, align: int
) -> None:
    """Issue a load of `size` bytes into each target."""
    block, clocks = w.block, w.block.cluster.clocks
    issuer = w.lane_agents[lane : lane + 1]
    work = []
    for target, offset, told in targets:
        if offset % align:
            raise Fault("bounds", f"a copy to byte {offset:#x} of shared memory, which must be a multiple of {align}")
        if target.ended:
            raise Fault("bounds", f"a copy to {target.name}, which has ended")
        barrier = find(block, told)
        used_by(w, barrier, issuer)
        agent = barrier.block.agent(
            ("copies", barrier.offset), f"copies that the mbarrier at {barrier.offset:#x} counts"
        )
        work.append((target, offset, barrier, clocks.start(agent, issuer)))

    def run() -> None:
        content = data()
        for target, offset, barrier, past in work:
            target.shared.write_bytes(swizzled(offset + np.arange(size), swizzle), content, past)
            barrier.complete_bytes(size, clocks.finish(past))

    w.issue("tma", object(), run)


def _store(w: Warps, source: int, size: int, swizzle: int, put: Callable[[np.ndarray], None], lane: int) -> None:
    """Issue a store of `size` bytes of shared memory."""
    block, clocks = w.block, w.block.cluster.clocks
    if source >> RANK_SHIFT != block.rank:
        raise Fault("bounds", "a bulk store from the shared memory of another block")
    offset = source & _OFFSET
    warp = int(w.ids[lane // 32])
    agent = block.agent(("bulk", warp), f"bulk stores of warp {warp}")
    past = clocks.start(agent, w.lane_agents[lane : lane + 1])

    def run() -> None:
        put(block.shared.read_bytes(swizzled(offset + np.arange(size), swizzle), past, True))

    work = w.issue("tma", object(), run)
    groups_of(w, "bulk", warp).open.append((work, past))


def _reduction(d: Decoder, reduces: str) -> Callable | None:
    """old, new bytes -> bytes, for cp.reduce."""
    if not reduces:
        return None
    op, type_ = d.take("add", "min", "max"), d.type()
    d.drop("noftz")
    if op != "add" or type_ not in ("f32", "u32", "s32", "bf16", "f16"):
        raise d.refuse(f"{op} of {type_}")
    if type_ in ("bf16", "f16"):
        wide = formats.from_bf16 if type_ == "bf16" else (lambda v: v.view(np.float16).astype(np.float32))
        narrow = formats.to_bf16 if type_ == "bf16" else formats.to_f16
        return lambda a, b: narrow(wide(_as(a, np.uint16)) + wide(_as(b, np.uint16))).view(np.uint8)
    kind = NUMPY[type_]
    return lambda a, b: (_as(a, kind) + _as(b, kind)).view(np.uint8)


def _as(raw: np.ndarray, kind: type) -> np.ndarray:
    return np.ascontiguousarray(raw).view(kind)


def _bulk(d: Decoder, reduces: str) -> Execute:
    """cp.async.bulk without a tensor map: contiguous bytes."""
    add = _reduction(d, reduces)
    spaces = [m for m in d.left if m in ("global", "shared::cta", "shared::cluster")]
    d.drop(*spaces, "mbarrier::complete_tx::bytes", "bulk_group", "L2::cache_hint")
    multicast = d.take("multicast::cluster")
    loads = spaces == ["shared::cluster", "global"] or spaces == ["shared::cta", "global"]
    across = spaces == ["shared::cluster", "shared::cta"]
    stores = spaces == ["global", "shared::cta"]
    if not (loads or across or stores) or (add and not stores):
        raise d.refuse(" to ".join(spaces[::-1]))
    to = d.address(0, stores)
    source = d.address(1, loads)
    size = d.lanes(2, "u32")
    barrier: Any = None if stores else d.address(3, False)
    mask = d.lanes(4, "u16") if multicast else None

    def execute(w: Warps, m: Mask) -> None:
        to_all, from_all, sizes = to(w), source(w), size(w)
        memory = w.block.launch.memory
        for lane in w.lanes(m):
            n, start, at = int(sizes[lane]), int(from_all[lane]), int(to_all[lane])
            if n % 16 or (start if loads else at) % 16:
                raise Fault("bounds", f"a bulk copy of {n} bytes, from or to {start:#x}: both must be multiples of 16")
            if stores:
                _store(w, start, n, 0, lambda data, at=at, n=n: _write(memory, at, n, data, add), lane)
                continue
            told = int(barrier(w)[lane])
            targets = _targets(w, at, told, int(mask(w)[lane]) if mask else None, False)
            if loads:
                _load(w, targets, lambda start=start, n=n: memory.bytes_at(start, n).copy(), 0, n, lane, 16)
            else:
                owner, offset = w.block, start & _OFFSET
                index = offset + np.arange(n)
                _load(
                    w,
                    targets,
                    lambda owner=owner, index=index: owner.shared.read_bytes(index, None, True),
                    0,
                    n,
                    lane,
                    16,
                )

    return execute


def _write(memory, at: int, size: int, data: np.ndarray, add: Callable | None) -> None:
    there = memory.bytes_at(at, size)
    there[:] = add(there, data) if add else data


def tensor_map_at(w: Warps, address: int) -> TensorMap:
    """The map at a generic address: a parameter, or global memory."""
    if address % 64:
        raise Fault("descriptor", f"a tensor map at {address:#x}, which must be a multiple of 64")
    if address >= PARAMETER_WINDOW:
        offset = address - PARAMETER_WINDOW
        return TensorMap.decode(w.block.launch.parameters[offset : offset + BYTES])
    return TensorMap.decode(w.block.launch.memory.bytes_at(address, BYTES).tobytes())


def _bulk_tensor(d: Decoder, reduces: str) -> Execute:
    """cp.async.bulk.tensor: a box of a tensor map."""
    if reduces:
        raise d.refuse("a reduction through a tensor map")
    rank = int(d.left.pop(0)[0])
    spaces = [m for m in d.left if m in ("global", "shared::cta", "shared::cluster")]
    d.drop(*spaces, "mbarrier::complete_tx::bytes", "bulk_group", "tile", "L2::cache_hint", "cta_group::1")
    gather = d.take("tile::gather4")
    multicast = d.take("multicast::cluster")
    pair = bool(d.take("cta_group::2"))
    loads = spaces in (["shared::cluster", "global"], ["shared::cta", "global"])
    if not loads and spaces != ["global", "shared::cta"]:
        raise d.refuse(" to ".join(spaces[::-1]))
    place = d.operands[1 if loads else 0]
    if not isinstance(place, Address) or len(place.more) != 1 or not isinstance(place.more[0], Vector):
        raise d.refuse("no coordinates")
    where = d.address(Address(place.base, place.offset), True)
    coordinates = [d.lanes(item, "s32") for item in place.more[0].items]
    if len(coordinates) != (5 if gather else rank):
        raise d.refuse(f"{len(coordinates)} coordinates")
    smem = d.address(0 if loads else 1, False)
    barrier: Any = d.address(2, False) if loads else None
    mask = d.lanes(3, "u16") if multicast else None

    def execute(w: Warps, m: Mask) -> None:
        maps, places = where(w), smem(w)
        at = [c(w) for c in coordinates]
        memory = w.block.launch.memory
        for lane in w.lanes(m):
            tensor = tensor_map_at(w, int(maps[lane]))
            corner = tuple(int(c[lane]) for c in at)
            to = int(places[lane])
            if not loads:
                tensor.rows(corner)
                _store(
                    w,
                    to,
                    tensor.box_bytes(),
                    tensor.swizzle,
                    lambda data, t=tensor, c=corner: t.store(memory, c, data),
                    lane,
                )
                continue
            rows = corner[1:] if gather else ()
            size = tensor.box_bytes() * (4 if gather else 1)
            if not gather and len(tensor.dims) != rank:
                raise Fault("descriptor", f"a copy of rank {rank} with a tensor map of rank {len(tensor.dims)}")
            targets = _targets(w, to, int(barrier(w)[lane]), int(mask(w)[lane]) if mask else None, pair)
            _load(
                w,
                targets,
                lambda t=tensor, c=corner, r=rows: t.load(memory, c[:2] if r else c, r),
                tensor.swizzle,
                size,
                lane,
                _TENSOR_ALIGN,
            )

    return execute


# ---- st.async


def store_async(d: Decoder) -> Execute:
    """st.async: registers into the shared memory of a block of the cluster; its barrier counts the bytes."""
    type_ = d.type()
    mod = d.take("v2", "v4")
    count = int(mod[1:]) if mod else 1
    d.drop("weak", "shared::cluster", "mbarrier::complete_tx::bytes")
    size = SIZE[type_] * count
    bits = f"b{8 * SIZE[type_]}"
    address, told = d.address(0, False), d.address(2, False)
    reads = [d.get(item, bits) for item in d.items(1)]

    def execute(w: Warps, m: Mask) -> None:
        lanes = w.lanes(m)
        values = np.empty((w.count, count), NUMPY[bits])
        for i, get in enumerate(reads):
            values[:, i] = get(w)
        data = values[lanes].view(np.uint8).reshape(len(lanes), size)
        at, barriers = address(w)[lanes], told(w)[lanes]
        clocks = w.block.cluster.clocks
        for where in np.unique(barriers):
            those = barriers == where
            block, _, offsets = shared_blocks(w, at[those], False)[0]
            barrier = find(w.block, int(where))
            used_by(w, barrier, np.unique(w.lane_agents[lanes[those]]))
            if barrier.block is not block or len(offsets) != int(those.sum()):
                raise Fault("barrier", "st.async to a block that tells a barrier of another block")
            block.shared.check(offsets, size)
            agent = block.agent(("copies", barrier.offset), f"copies that the mbarrier at {barrier.offset:#x} counts")
            past = clocks.start(agent, np.unique(w.lane_agents[lanes[those]]))
            index, content = offsets[:, None] + np.arange(size), data[those]

            def run(block=block, index=index, content=content, barrier=barrier, past=past) -> None:
                block.shared.write_bytes(index, content, past)
                barrier.complete_bytes(content.size, clocks.finish(past))

            w.issue("tma", object(), run)

    return execute
