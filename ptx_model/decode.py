"""Turn an instruction into a function that executes it for a group of warps.

Each file of operations registers decoders by the first word of the instruction. A decoder must take every modifier of
the instruction: one that is left is an error, so that no meaning is guessed.
"""

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from ptx_model import parse
from ptx_model.faults import Fault
from ptx_model.formats import NUMPY
from ptx_model.machine import LANES, Mask, Warps
from ptx_model.memory import LOCAL_WINDOW, PARAMETER_WINDOW, RANK_SHIFT
from ptx_model.parse import SIZE, Address, Immediate, Predicate, Register, Sink, Special, Symbol, Vector

Execute = Callable[[Warps, Mask], None]
Get = Callable[[Warps], Any]
_DECODERS: dict[str, Callable[["Decoder"], Execute]] = {}


def opcode(*names: str) -> Callable:
    """Register a decoder of the instructions that begin with one of these words."""

    def register(decoder: Callable[["Decoder"], Execute]) -> Callable[["Decoder"], Execute]:
        _DECODERS.update(dict.fromkeys(names, decoder))
        return decoder

    return register


def decode(instruction: parse.Instruction, kernel: parse.Kernel) -> Execute:
    """Return the function that executes `instruction`. Fault("not modelled"): the model does not have it."""
    if instruction.op not in _DECODERS:
        raise Fault("not modelled", f"the instruction {instruction.op}")
    decoder = Decoder(instruction, kernel)
    execute = _DECODERS[instruction.op](decoder)
    if execute is None or decoder.left:
        raise Fault("not modelled", f"this form of {instruction.op}" + "".join(f" .{m}" for m in decoder.left))
    return execute


class Decoder:
    """One instruction while it is decoded. left: modifiers that nothing has taken yet."""

    def __init__(self, instruction: parse.Instruction, kernel: parse.Kernel) -> None:
        self.instruction, self.kernel = instruction, kernel
        self.operands: tuple[Any, ...] = instruction.operands
        self.left = list(instruction.mods)

    def take(self, *names: str) -> str:
        """Return the first modifier that is one of `names`, and take it; "" if there is none."""
        for mod in self.left:
            if mod in names:
                self.left.remove(mod)
                return mod
        return ""

    def drop(self, *names: str) -> None:
        """Take modifiers that change nothing in the model."""
        self.left = [mod for mod in self.left if mod not in names]

    def type(self) -> str:
        """Take the last modifier, which must be a type."""
        if not self.left or self.left[-1] not in (*SIZE, "pred"):
            raise Fault("not modelled", f"this form of {self.instruction.op}: no type at its end")
        return self.left.pop()

    def refuse(self, why: str) -> Fault:
        return Fault("not modelled", f"this form of {self.instruction.op}: {why}")

    # ---- operands

    def get(self, operand: int | parse.Operand, type_: str) -> Get:
        """Return a function that reads an operand as `type_`: an array (threads,), or a numpy scalar for a constant."""
        if isinstance(operand, int):
            operand = self.operands[operand]
        if type_ == "pred":
            return self._get_predicate(operand)
        kind = NUMPY[type_]
        if isinstance(operand, Register):
            index, size = operand.index, SIZE[type_]
            if operand.size == size:
                return lambda w: w.by_type[type_][index]
            if operand.size > size:
                whole = f"u{8 * operand.size}"
                unsigned = NUMPY[f"u{8 * size}"]
                return lambda w: w.by_type[whole][index].astype(unsigned).view(kind)
            narrow = f"{'s' if type_[0] == 's' else 'u'}{8 * operand.size}"
            return lambda w: w.by_type[narrow][index].astype(kind)
        if isinstance(operand, Immediate):
            constant = _constant(operand, type_)
            return lambda w: constant
        if isinstance(operand, Special):
            name = operand.name
            return lambda w: special(w, name, kind)
        if isinstance(operand, Symbol):
            return self._symbol(operand, kind)
        if isinstance(operand, Address) and not operand.more:
            base, offset = self.get(operand.base, type_), operand.offset
            return lambda w: (base(w) + kind(offset & (2 ** (8 * SIZE[type_]) - 1))).astype(kind)
        raise self.refuse(f"the operand {operand}")

    def _get_predicate(self, operand: parse.Operand) -> Get:
        if isinstance(operand, Predicate):
            index = operand.index
            if operand.negated:
                return lambda w: ~w.predicates[index]
            return lambda w: w.predicates[index]
        if isinstance(operand, Immediate):
            constant = np.bool_(operand.value != 0)
            return lambda w: constant
        raise self.refuse(f"{operand} is no predicate")

    def _symbol(self, operand: Symbol, kind: Any) -> Get:
        name, offset = operand
        if name in self.kernel.parameters:
            at = self.kernel.parameters[name][0] + offset
            window = PARAMETER_WINDOW if kind().itemsize == 8 else 0
            return lambda w: kind(window + at)
        if name in self.kernel.local:
            # That of a call's parameter is generic from the start: it is in no space that its instructions name.
            window = LOCAL_WINDOW if name in self.kernel.passed and kind().itemsize == 8 else 0
            place = kind(window + self.kernel.local[name] + offset)
            return lambda w: place
        return lambda w: kind(w.block.symbol(name) + offset)

    def lanes(self, operand: int | parse.Operand, type_: str) -> Get:
        """As `get`, but always an array (threads,)."""
        read, kind = self.get(operand, type_), NUMPY.get(type_, bool)

        def full(w: Warps) -> np.ndarray:
            value = read(w)
            return value if np.ndim(value) else np.full(w.count, value, kind)

        return full

    def put(self, operand: int | parse.Operand, type_: str) -> Callable[[Warps, Any, Mask], None]:
        """Return a function that writes values of `type_` to an operand where the mask is set."""
        if isinstance(operand, int):
            operand = self.operands[operand]
        if isinstance(operand, Sink):
            return lambda w, value, m: None
        if isinstance(operand, Predicate):
            index = operand.index

            def put_predicate(w: Warps, value: Any, m: Mask) -> None:
                if m is None:
                    w.predicates[index] = value
                else:
                    np.copyto(w.predicates[index], value, where=m)

            return put_predicate
        if not isinstance(operand, Register):
            raise self.refuse(f"{operand} is no register")
        index, size = operand.index, SIZE[type_]
        if operand.size < size:
            raise self.refuse(f"a register of {operand.size} bytes for {type_}")
        view = type_ if operand.size == size else f"{'s' if type_[0] == 's' else 'u'}{8 * operand.size}"
        same = operand.size == size
        unsigned = NUMPY[f"u{8 * size}"] if type_[0] not in "su" else NUMPY[type_]

        def put_register(w: Warps, value: Any, m: Mask) -> None:
            if not same:
                value = np.asarray(value).astype(NUMPY[type_], copy=False).view(unsigned)
            if m is None:
                w.by_type[view][index] = value
            else:
                np.copyto(w.by_type[view][index], value, where=m, casting="unsafe")

        return put_register

    def address(self, operand: int | parse.Operand, wide: bool) -> Get:
        """Return a function that reads [base + offset] as int64 (threads,). wide: 64-bit, else a shared address."""
        if isinstance(operand, int):
            operand = self.operands[operand]
        if not isinstance(operand, Address):
            raise self.refuse(f"{operand} is no address")
        offset = operand.offset
        if isinstance(operand.base, Symbol) and operand.base.name not in self.kernel.parameters:
            wide = operand.base.name in self.kernel.globals
        type_ = "u64" if wide or (isinstance(operand.base, Register) and operand.base.size == 8) else "u32"
        base = self.lanes(operand.base, type_)
        if offset:
            return lambda w: base(w).astype(np.int64) + offset
        return lambda w: base(w).astype(np.int64)

    def items(self, operand: int | parse.Operand) -> tuple[parse.Operand, ...]:
        """The registers of a vector, or the one operand."""
        if isinstance(operand, int):
            operand = self.operands[operand]
        return operand.items if isinstance(operand, Vector) else (operand,)


def simple(d: Decoder, type_: str, function: Callable, result: str = "", first: int = 1) -> Execute:
    """The destination gets `function` of the operands behind it, all read as `type_`."""
    reads = [d.get(i, type_) for i in range(first, len(d.operands))]
    put = d.put(0, result or type_)
    if len(reads) == 1:
        one = reads[0]
        return lambda w, m: put(w, function(one(w)), m)
    if len(reads) == 2:
        left, right = reads
        return lambda w, m: put(w, function(left(w), right(w)), m)
    return lambda w, m: put(w, function(*(read(w) for read in reads)), m)


def _constant(operand: Immediate, type_: str) -> Any:
    kind = NUMPY[type_]
    if type_ in ("f32", "f64"):
        return kind(operand.value)
    if operand.floating:
        if SIZE[type_] == 8:
            return np.frombuffer(struct.pack("<d", operand.value), kind)[0]
        return np.frombuffer(struct.pack("<f", operand.value), kind)[0]
    bits = int(operand.value) & (2 ** (8 * SIZE[type_]) - 1)
    return np.frombuffer(bits.to_bytes(SIZE[type_], "little"), kind)[0]


def special(w: Warps, name: str, kind: type) -> Any:
    """Return a special register as `kind`: (threads,), or a scalar."""
    value = w.specials.get(name)
    if value is None:
        value = w.specials[name] = _special(w, name)
    if callable(value):
        value = value()
    return value.astype(kind) if isinstance(value, np.ndarray) else kind(value)


def _special(w: Warps, name: str) -> Any:
    block = w.block
    x, y, _ = block.launch.block
    head, _, axis = name.rpartition(".")
    n = "xyz".find(axis)
    if head == "%tid":
        return (w.threads % x, w.threads // x % y, w.threads // (x * y))[n]
    by_axis = {
        "%ntid": block.launch.block,
        "%ctaid": block.index,
        "%nctaid": block.launch.grid,
        "%cluster_ctaid": block.place,
        "%cluster_nctaid": block.launch.cluster,
        "%clusterid": tuple(i // c for i, c in zip(block.index, block.launch.cluster, strict=True)),
        "%nclusterid": tuple(i // c for i, c in zip(block.launch.grid, block.launch.cluster, strict=True)),
    }
    if head in by_axis:
        return by_axis[head][n]
    plain = {
        "%laneid": np.tile(np.arange(LANES), len(w.ids)),
        "%warpid": np.repeat(w.ids, LANES),
        "%nwarpid": -(-block.launch.threads // LANES),
        "%cluster_ctarank": block.rank,
        "%cluster_nctarank": len(block.cluster.blocks),
        "%is_explicit_cluster": int(len(block.cluster.blocks) > 1),
        "%smid": block.number,
        "%nsmid": block.launch.multiprocessors,
        "%dynamic_smem_size": block.launch.shared_bytes,
        "%total_smem_size": block.launch.shared_bytes + block.layout.static_bytes,
        "%clock": block.machine.tick,
        "%clock64": block.machine.tick,
        "%globaltimer": block.machine.tick,
    }
    if head == "" and name.startswith("%lanemask_"):
        bit = np.uint64(1) << np.arange(LANES, dtype=np.uint64)
        every, below = np.uint64(0xFFFFFFFF), bit - np.uint64(1)
        masks = {"lt": below, "le": below | bit, "eq": bit, "ge": every & ~below, "gt": every & ~below & ~bit}
        return np.tile(masks[name[10:]], len(w.ids))
    if name in ("%envreg1", "%envreg2"):  # the address that a grid which meets as a whole counts at
        return block.launch.meeting >> (32 if name == "%envreg1" else 0) & 0xFFFFFFFF
    if name not in plain:
        raise Fault("not modelled", f"the special register {name}")
    return plain[name]


def shared_rank(address: np.ndarray) -> np.ndarray:
    """The rank, in the cluster, of the block that a shared address belongs to."""
    return address >> RANK_SHIFT
