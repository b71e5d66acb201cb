"""Share code between adapters: `Fallback`, and checks of what a variant of moe_gemm can take."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple, Protocol

import torch

from problems.common import nvfp4
from problems.dsv4_forward.weights.linear import Linear
from problems.dsv4_forward.weights.tree import ModelWeights

UNIT = 64  # H, I, n and k are multiples of it
ALIGNMENT = {"cpu": 64, "cuda": 256}  # bytes; what moe_gemm promises, on a CPU what torch's tensors have


class Linears(Protocol):
    """The ops for weight matrices: ops.Ops has them, for one."""

    linear: Callable[..., None]
    grouped_linear: Callable[..., None]


class AllOps(Linears, Protocol):
    """The ops that have adapters: ops.Ops has them, for one."""

    mhc_site: Callable[..., None]
    rotate: Callable[..., None]
    fmha: Callable[..., None]
    fmha_rotate: Callable[..., None]
    choose: Callable[..., None]
    experts: Callable[..., None]
    shared: Callable[..., None]
    all_experts: Callable[..., None]


@dataclass(frozen=True)
class Fallback:
    """What computes the calls that an adapter does not serve. name: of what computes the linears, for reports; served:
    id() of each Linear that a kernel multiplies by, and not the reference, for any number of tokens.
    """

    ops: AllOps
    name: str = "reference"
    served: frozenset[int] = frozenset()


class Adapted(NamedTuple):
    """A variant fitted to the weights: a function by op, lines to report, and id() of each Linear that it serves."""

    functions: dict[str, Callable[..., None]]
    report: tuple[str, ...]
    served: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Rounding:
    """An op for experts that rounds its sums itself, for some weights. function: the op; written: (w13, dtype of x) ->
    the dtype that it writes without a copy. It writes every other one too.
    """

    function: Callable[..., None]
    written: Callable[[Linear, torch.dtype], torch.dtype]

    def __call__(self, *arguments: object, **named: object) -> None:
        self.function(*arguments, **named)


@dataclass(frozen=True)
class Joined:
    """The op all_experts, where a kernel fills it. serves: (w13, x) -> whether it has this call: a layer makes the
    others with the ops experts and shared.
    """

    function: Callable[..., None]
    serves: Callable[[Linear, torch.Tensor], bool]

    def __call__(self, *arguments: object, **named: object) -> None:
        self.function(*arguments, **named)


@dataclass(frozen=True)
class Partial:
    """An op that spans others, of which a kernel serves some calls. serves: (the op's arguments) -> whether it serves
    this one. The others are the chain of what fills the op's parts, which ops.choose puts behind it.
    """

    function: Callable[..., None]
    serves: Callable[..., bool]

    def before(self, rest: Callable[..., None]) -> Callable[..., None]:
        """Return the op, with `rest` for the calls that the kernel does not serve."""

        def run(*arguments: object, **named: object) -> None:
            (self.function if self.serves(*arguments, **named) else rest)(*arguments, **named)

        return run


def joined(op: Callable[..., None], w13: Linear, x: torch.Tensor) -> bool:
    """Return whether all experts of x come as one sum."""
    return isinstance(op, Joined) and op.serves(w13, x)


def rewrapped(
    op: Callable[..., None], wrap: Callable[[Callable[..., None]], Callable[..., None]]
) -> Callable[..., None]:
    """Return the op with its function wrapped, and what it says of itself as it was."""
    return dataclasses.replace(op, function=wrap(op.function)) if isinstance(op, Rounding | Joined) else wrap(op)


def sum_dtype(op: Callable[..., None], w13: Linear, x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which to take the sums of an op for experts: fp32, unless it rounds them itself."""
    return op.written(w13, x.dtype) if isinstance(op, Rounding) else torch.float32


class Prepared(Protocol):
    """Weights that a variant may have prepared. reason: why it has not, "" if it has."""

    reason: str
    state: object

    @property
    def name(self) -> str:
        """In the checkpoint."""


def label(module: ModuleType) -> str:
    """Return the name of a variant of moe_gemm, as reports say it."""
    return f"moe_gemm/{module.__name__.rpartition('.')[2]}"


def report(
    what: str, unit: str, made: Sequence[Prepared], weights: ModelWeights, other: str = "reference"
) -> tuple[str, ...]:
    """Say how many are served and what was laid out anew for them; then name each that `other` computes, and why."""
    left = [one for one in made if one.reason]
    size = kept([one.state for one in made], weights.tensors.values()) / 2**20
    return (
        f"{what}: {len(made) - len(left)} of {len(made)} {unit}, {size:.1f} MiB kept beside the weights",
        *(f"{one.name}: {other} ({one.reason})" for one in left),
    )


def kept(states: object, known: Iterable[torch.Tensor]) -> int:
    """Return how many bytes the tensors in `states` (tuples, lists, dicts, dataclasses, nested) take.

    Memory that the tensors in `known` have does not count.
    """
    before = {tensor.untyped_storage().data_ptr() for tensor in known}
    sizes: dict[int, int] = {}
    todo = [states]
    while todo:
        one = todo.pop()
        if isinstance(one, torch.Tensor):
            storage = one.untyped_storage()
            if storage.data_ptr() not in before:
                sizes[storage.data_ptr()] = storage.nbytes()
        elif isinstance(one, dict):
            todo += one.values()
        elif isinstance(one, tuple | list):
            todo += one
        elif dataclasses.is_dataclass(one) and not isinstance(one, type):
            todo += vars(one).values()
    return sum(sizes.values())


def uneven(**sizes: int) -> str:
    """Return which sizes are no multiples of UNIT, "" if all are."""
    names, values = " and ".join(sizes), " and ".join(map(str, sizes.values()))
    return f"{names} must be multiples of {UNIT}, are {values}" if any(s % UNIT for s in sizes.values()) else ""


def unplaced(w: Linear) -> str:
    """Return why the memory of `w` is not as moe_gemm wants it, "" if it is."""
    alignment = ALIGNMENT[w.weight.device.type]
    if not (w.weight.is_contiguous() and w.scale.is_contiguous()):
        return f"codes or scales of {w.name} are not contiguous"
    if w.weight.data_ptr() % alignment or w.scale.data_ptr() % alignment:
        return f"codes or scales of {w.name} do not start at a multiple of {alignment} bytes"
    return ""


def check_values(w: Linear) -> None:
    """Raise ValueError for a scale that is NaN or negative, or an input scale that is not positive."""
    try:
        nvfp4.check_scales(w.scale)
    except ValueError as error:
        raise ValueError(f"{w.name}: {error}") from error
    if w.quantise_input:
        bad = ~((w.input_scale > 0) & w.input_scale.isfinite())
        if bool(bad.any()):
            raise ValueError(f"{w.name}: input_scale must be positive and finite, got {float(w.input_scale[bad][0])}")


def fits(tensor: torch.Tensor, alignment: int) -> bool:
    """Return whether a kernel can take the tensor where it is."""
    return tensor.is_contiguous() and tensor.data_ptr() % alignment == 0


def placed(tensor: torch.Tensor, alignment: int) -> torch.Tensor:
    """Return `tensor` if a kernel can take it where it is, else a copy that it can take."""
    return tensor if fits(tensor, alignment) else tensor.clone(memory_format=torch.contiguous_format)
