"""ld, st, atom, red of global, shared, local and parameter memory; prefetches and hints."""

import re
from typing import Any

import numpy as np

from ptx_model import formats
from ptx_model.copies import store_async
from ptx_model.decode import Decoder, Execute, opcode
from ptx_model.faults import Fault
from ptx_model.formats import NUMPY
from ptx_model.machine import Mask, Warps
from ptx_model.memory import UNSIGNED
from ptx_model.parse import SIZE, Address, Symbol
from ptx_model.spaces import read, write

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


def _space(d: Decoder) -> str:
    space = d.take(*_SPACES)
    return "param" if space == "param::entry" else space


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
            values[m] = read(w, space, at[m], w.lanes(m), unit, count, strong)
        for i, put in enumerate(puts):
            put(w, np.ascontiguousarray(values[:, i]).view(kind), m)
        w.stop_here = w.stop_here or polls

    return execute


@opcode("st")
def store(d: Decoder) -> Execute:
    if d.take("async"):
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
        at, lanes = address(w), w.lanes(m)
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
        for lane in w.lanes(m):
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
