"""What the problems' in_model.py share: `Fitted`, and checks of what a variant can take.

A problem whose winner serves the model has an in_model.py with one function:

    fit(variant, weights, wanted) -> Fitted
        variant: a module of its variants/; weights: the model's; wanted: names of ops. Reads the weights and prepares
        them, for these ops only. ValueError, naming the matrix or layer: weights that are none.

Each op's function takes the op's arguments by keyword. It returns NotImplemented for a call that it does not serve, and
has then written nothing.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType

import torch

from problems.common import nvfp4
from problems.dsv4_forward.weights.linear import Linear
from problems.dsv4_forward.weights.tree import ModelWeights

UNIT = 64  # H, I, n and k are multiples of it
ALIGNMENT = {"cpu": 64, "cuda": 256}  # bytes; what moe_gemm promises, on a CPU what torch's tensors have


@dataclass(frozen=True)
class Fitted:
    """A variant, fitted to the model's weights. functions: by op; refused: by each other op that was wanted, why it has
    no function; report: lines on what it keeps beside the weights, and which matrices it leaves to others, and why.
    """

    functions: dict[str, Callable[..., object]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    report: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prepared:
    """Matrices of one call, kept alive. state: what a variant made of them; reason: why it made nothing, or ""."""

    matrices: tuple[Linear, ...]
    reason: str = ""
    state: object = None

    @property
    def name(self) -> str:
        """In the checkpoint."""
        return " with ".join(w.name for w in self.matrices)


def by_first(made: Iterable[Prepared]) -> dict[int, Prepared]:
    """Return them by id() of the first of their matrices."""
    return {id(one.matrices[0]): one for one in made}


def find(known: Mapping[int, Prepared], *matrices: Linear) -> Prepared | None:
    """Return what was made of these matrices, None where that has a reason. known: as by_first returns it.

    ValueError: they are not of the weights that were prepared.
    """
    held = known.get(id(matrices[0]))
    if held is None or any(one is not w for one, w in zip(held.matrices, matrices, strict=True)):
        raise ValueError(f"{Prepared(matrices).name} must be of the weights that the kernels were chosen for")
    return None if held.reason else held


def label(variant: ModuleType) -> str:
    """Return the name of a variant, as reports say it: "moe_gemm/sm90_grouped"."""
    _, problem, *_, name = variant.__name__.split(".")
    return f"{problem}/{name}"


def report(what: str, unit: str, made: Sequence[Prepared], weights: ModelWeights) -> tuple[str, ...]:
    """Say how many are served and what was laid out anew for them; then name each of the others, and why."""
    left = [one for one in made if one.reason]
    size = kept([one.state for one in made], weights.tensors.values()) / 2**20
    return (
        f"{what}: {len(made) - len(left)} of {len(made)} {unit}, {size:.1f} MiB kept beside the weights",
        *(f"{one.name}: not served ({one.reason})" for one in left),
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


def room_for(out: torch.Tensor, alignment: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return `out` if a kernel that writes `dtype` can write it where it is, else room of its shape."""
    mine = out.dtype == dtype and fits(out, alignment)
    return out if mine else torch.empty(out.shape, dtype=dtype, device=out.device)
