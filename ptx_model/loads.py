"""ld, st, atom, red of global, shared, local and parameter memory; prefetches and hints."""

import re
from typing import Any

import numpy as np

from ptx_model import formats
from ptx_model.barrier import lanes_of
from ptx_model.decode import Decoder, Execute, opcode
from ptx_model.faults import Fault
from ptx_model.memory import LOCAL_WINDOW, PARAMETER_WINDOW, RANK_SHIFT, SHARED_WINDOW, UNSIGNED
from ptx_model.parse import LOCAL_START, PARAMETER_SPACE, SIZE, Address, Symbol
from ptx_model.warps import LOCAL, NUMPY, Mask, Warps

_SPACES = ("global", "shared", "shared::cta", "shared::cluster", "param", "param::entry", "const", "local")
_HINTS = (
    "nc",
    "ca",
    "cg",
    "cs",
    "lu",
    "wb",
    "wt",
    "weak",
    "L1::no_allocate",
    "L1::evict_first",
    "L1::evict_last",
    "L1::evict_normal",
    "L1::evict_unchanged",
    "L2::cache_hint",
    "L2::64B",
    "L2::128B",
    "L2::256B",
    "L2::evict_first",
    "L2::evict_last",
    "L2::evict_normal",
)
_SCOPES = ("cta", "cluster", "gpu", "sys")
_OFFSET = (1 << RANK_SHIFT) - 1


def _space(d: Decoder) -> str:
    space = d.take(*_SPACES)
    return "param" if space == "param::entry" else space


def _resolve(space: str, address: np.ndarray) -> str:
    """The space of generic addresses; "" if they are of several."""
    if space:
        return "global" if space == "const" else space
    shared = (address >= SHARED_WINDOW) & (address < PARAMETER_WINDOW)
    parameters = (address >= PARAMETER_WINDOW) & (address < LOCAL_WINDOW)
    for name, those in (("shared::cluster", shared), ("param", parameters), ("local", address >= LOCAL_WINDOW)):
        if those.all():
            return name
        if those.any():
            return ""
    return "global"


def _parts(address: np.ndarray) -> list[np.ndarray]:
    """Which generic addresses are of which space."""
    edges = np.array([SHARED_WINDOW, PARAMETER_WINDOW, LOCAL_WINDOW])
    space = np.searchsorted(edges, address, side="right")
    return [np.flatnonzero(space == n) for n in np.unique(space)]


def shared_blocks(w: Warps, address: np.ndarray, own: bool) -> list[tuple[Any, np.ndarray, np.ndarray]]:
    """-> (block, which of `address`, their offsets) for each block that shared addresses belong to. own: `address` may
    be of the warps' block only.
    """
    rank = address >> RANK_SHIFT
    found = []
    for r in np.unique(rank):
        blocks = w.block.cluster.blocks
        if not 0 <= r < len(blocks):
            raise Fault("bounds", f"a shared address {int(address[0]):#x} of no block of the cluster")
        block = blocks[r]
        if own and block is not w.block:
            raise Fault(
                "bounds", f"{w.block.name} uses {int(address[0]):#x}, of {block.name}, as an address within itself"
            )
        if block.ended:
            raise Fault("bounds", f"an access to the shared memory of {block.name}, which has ended")
        which = np.flatnonzero(rank == r)
        found.append((block, which, address[which] & _OFFSET))
    return found


def _local(w: Warps, address: np.ndarray, lanes: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """-> (bytes, threads) that index local memory. address: of `size` bytes, one of each of the threads `lanes`."""
    offset = address & (LOCAL_WINDOW - 1)
    if (offset & size - 1).any() or (offset < LOCAL_START).any() or (offset + size > len(w.files[LOCAL])).any():
        worst = int(offset[np.argmax((offset & size - 1 != 0) | (offset + size > len(w.files[LOCAL])))])
        raise Fault("bounds", f"an access of {size} bytes to local memory, byte {worst} of {len(w.files[LOCAL])}")
    return offset[:, None] + np.arange(size), lanes[:, None]


def read(
    w: Warps, space: str, address: np.ndarray, lanes: np.ndarray, unit: int, count: int, atomic: bool
) -> np.ndarray:
    """uint (n, count) of `unit` bytes each. lanes: int (n,), the threads that read."""
    if space == "param" and (address >= LOCAL_WINDOW).all():
        space = "local"  # a parameter of a call
    space, agents = _resolve(space, address), w.lane_agents[lanes]
    if not space:
        found = np.empty((len(address), count), UNSIGNED[unit])
        for part in _parts(address):
            found[part] = read(w, "", address[part], lanes[part], unit, count, atomic)
        return found
    if space == "local":
        return np.ascontiguousarray(w.files[LOCAL][_local(w, address, lanes, unit * count)]).view(UNSIGNED[unit])
    if space == "global":
        return w.block.launch.memory.load(address, unit, count)
    if space == "param":
        offset = address & (PARAMETER_WINDOW - 1)
        raw = np.frombuffer(w.block.launch.parameters.ljust(PARAMETER_SPACE, b"\0"), np.uint8)
        at = offset[:, None] + np.arange(unit * count)
        if at.max() >= len(w.block.launch.parameters):
            raise Fault("bounds", f"a read of parameters at byte {int(offset.max())}")
        return raw[at].view(UNSIGNED[unit])
    address = np.where(address >= SHARED_WINDOW, address - SHARED_WINDOW, address)
    out = np.empty((len(address), count), UNSIGNED[unit])
    for block, which, offset in shared_blocks(w, address, space != "shared::cluster"):
        out[which] = block.shared.load(offset, unit, count, agents[which], atomic)
    return out


def write(w: Warps, space: str, address: np.ndarray, lanes: np.ndarray, values: np.ndarray, atomic: bool) -> None:
    """values: uint (n, count). lanes: int (n,), the threads that write."""
    space, agents = _resolve(space, address), w.lane_agents[lanes]
    if not space:
        for part in _parts(address):
            write(w, "", address[part], lanes[part], values[part], atomic)
        return
    if space == "local":
        raw = np.ascontiguousarray(values).view(np.uint8)
        w.files[LOCAL][_local(w, address, lanes, raw.shape[1])] = raw
        return
    w.block.machine.events += 1
    if space == "global":
        w.block.launch.memory.store(address, values)
        return
    if space == "param":
        raise Fault("bounds", "a store to the parameters")
    address = np.where(address >= SHARED_WINDOW, address - SHARED_WINDOW, address)
    for block, which, offset in shared_blocks(w, address, space != "shared::cluster"):
        block.shared.store(offset, values[which], agents[which], atomic)


def _count(d: Decoder) -> int:
    mod = d.take("v2", "v4", "v8")
    return int(mod[1:]) if mod else 1


@opcode("ld", "ldu")
def load(d: Decoder) -> Execute:
    type_ = d.type()
    count = _count(d)
    space = _space(d)
    strong = bool(d.take("acquire", "relaxed", "volatile"))
    d.drop(*_HINTS, *_SCOPES)
    unit = SIZE[type_]
    puts = [d.put(item, type_) for item in d.items(0)]
    kind = NUMPY[type_]
    base = d.operands[1].base if isinstance(d.operands[1], Address) else None
    if space == "param" and isinstance(base, Symbol) and base.name in d.kernel.local:
        space = "local"  # a parameter of a call
    elif space == "param" and isinstance(base, Symbol):
        offset = d.kernel.parameters[base.name][0] + base.offset + d.operands[1].offset

        def load_parameter(w: Warps, m: Mask) -> None:
            values = np.frombuffer(w.block.launch.parameters, kind, count, offset)
            for put, value in zip(puts, values, strict=True):
                put(w, value, m)

        return load_parameter
    address = d.address(1, space in ("global", "", "const", "local"))
    polls = strong and space in ("global", "")

    def execute(w: Warps, m: Mask) -> None:
        at = address(w)
        if m is None:
            values = read(w, space, at, np.arange(w.count), unit, count, strong)
        else:
            values = np.zeros((w.count, count), UNSIGNED[unit])
            values[m] = read(w, space, at[m], lanes_of(w, m), unit, count, strong)
        for i, put in enumerate(puts):
            put(w, np.ascontiguousarray(values[:, i]).view(kind), m)
        w.stop_here = w.stop_here or polls

    return execute


@opcode("st")
def store(d: Decoder) -> Execute:
    if d.take("async"):
        from ptx_model.copies import store_async

        return store_async(d)
    type_ = d.type()
    count = _count(d)
    space = _space(d)
    strong = bool(d.take("release", "relaxed", "volatile"))
    d.drop(*_HINTS, *_SCOPES)
    base = d.operands[0].base if isinstance(d.operands[0], Address) else None
    if space == "param" and isinstance(base, Symbol) and base.name in d.kernel.local:
        space = "local"  # a parameter of a call
    bits = f"b{8 * SIZE[type_]}"
    reads = [d.get(item, bits) for item in d.items(1)]
    address = d.address(0, space in ("global", "", "local"))
    kind = NUMPY[bits]

    def execute(w: Warps, m: Mask) -> None:
        values = np.empty((w.count, count), kind)
        for i, get in enumerate(reads):
            values[:, i] = get(w)
        at, lanes = address(w), lanes_of(w, m)
        if m is not None:
            at, values = at[m], values[m]
        write(w, space, at, lanes, values, strong)

    return execute


def _operation(d: Decoder, op: str, type_: str) -> Any:
    """A function (old, operand) -> new, of numpy arrays of one element of `type_`."""
    if type_ in ("f16x2", "bf16x2", "f16", "bf16"):
        d.drop("noftz")
        wide = formats.from_bf16 if type_[0] == "b" else (lambda v: v.view(np.float16).astype(np.float32))
        narrow = formats.to_bf16 if type_[0] == "b" else formats.to_f16

        def add_halves(a: np.ndarray, b: np.ndarray) -> np.ndarray:
            total = wide(a.view(np.uint16)).astype(np.float64) + wide(b.view(np.uint16))
            return narrow(total.astype(np.float32)).view(a.dtype)

        return add_halves if op == "add" else None
    return {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "exch": lambda a, b: b,
        "inc": lambda a, b: np.where(a >= b, a * 0, a + 1).astype(a.dtype),
        "dec": lambda a, b: np.where((a == 0) | (a > b), b, a - 1).astype(a.dtype),
    }.get(op)


@opcode("atom", "red")
def atomic(d: Decoder) -> Execute:
    if d.take("async"):
        raise d.refuse("async")
    type_ = d.type()
    space = _space(d)
    count = _count(d)
    d.drop("relaxed", "acquire", "release", "acq_rel", *_SCOPES, *_HINTS)
    op = d.take("add", "min", "max", "and", "or", "xor", "exch", "inc", "dec", "cas")
    returns = d.instruction.op == "atom"
    first = 1 if returns else 0
    function: Any = None if op == "cas" else _operation(d, op, type_)
    if op != "cas" and function is None:
        raise d.refuse(op)
    unit = SIZE[type_]
    kind, bits = NUMPY[type_], f"b{8 * unit}"
    address = d.address(first, space in ("global", ""))
    operands = [d.lanes(item, type_) for item in d.items(first + 1)]
    other: Any = d.lanes(first + 2, type_) if op == "cas" else None
    puts = [d.put(item, bits) for item in d.items(0)] if returns else []

    def execute(w: Warps, m: Mask) -> None:
        at = address(w)
        values = np.stack([np.broadcast_to(o(w), (w.count,)) for o in operands], 1)
        swapped: Any = other(w) if other else None
        old = np.zeros((w.count, count), UNSIGNED[unit])
        for lane in lanes_of(w, m):
            one = np.array([lane])
            present = read(w, space, at[one], one, unit, count, True)
            old[lane] = present[0]
            before = present[0].view(kind)
            if op == "cas":
                after = np.where(before == values[lane], swapped[lane], before).astype(kind)
            else:
                after = np.asarray(function(before, values[lane].astype(kind)), kind)
            write(w, space, at[one], one, after.view(UNSIGNED[unit])[None], True)
        for i, put in enumerate(puts):
            put(w, np.ascontiguousarray(old[:, i]), m)
        w.stop_here = w.stop_here or op == "cas"

    return execute


@opcode("prefetch", "prefetchu", "applypriority", "discard", "griddepcontrol", "pragma")
def nothing(d: Decoder) -> Execute:
    """Changes no value."""
    if d.instruction.op == "discard":
        raise d.refuse("it spoils what it discards")
    d.left = []
    return lambda w, m: None


@opcode("call")
def call(d: Decoder) -> Execute:
    """Only of what has no body in the text: others are read in the place of the call."""
    name = re.sub(r"^.*?call\S*\s+(?:\([^)]*\)\s*,\s*)?", "", d.instruction.text).split(",")[0].strip()
    what = "a call by address" if name.startswith("%") else f"the function {name}, whose PTX is not in the module"
    d.left = []

    def execute(w: Warps, m: Mask) -> None:
        raise Fault("not modelled", what)

    return execute


@opcode("setmaxnreg")
def registers(d: Decoder) -> Execute:
    d.left = []
    return lambda w, m: None


@opcode("nanosleep")
def sleep(d: Decoder) -> Execute:
    d.left = []

    def execute(w: Warps, m: Mask) -> None:
        w.stop_here = True

    return execute


@opcode("trap", "brkpt")
def trap(d: Decoder) -> Execute:
    def execute(w: Warps, m: Mask) -> None:
        raise Fault("barrier", "the kernel trapped: it gave up by itself")

    return execute


@opcode("createpolicy")
def cache_policy(d: Decoder) -> Execute:
    d.left = []
    put = d.put(0, "b64")
    return lambda w, m: put(w, np.uint64(0), m)
