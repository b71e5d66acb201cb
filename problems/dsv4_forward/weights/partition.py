"""Split a model over several GPUs: which part of each tensor a GPU has, and the configuration of one GPU's part.

What                         | a GPU has                            | what the GPUs exchange
wq_b, sinks, q, attention    | its heads                            | -
wo_a, wo_b                   | its groups: rows, columns            | wo_b's sums, after attention
experts, the shared one too  | its part of the inner width          | w2's sums, after the experts
head                         | its rows of the vocabulary           | logits
all else, and every cache    | the whole (keys have one head)       | -

Tensors are cut along one axis into equal parts, so that the parts, one behind the other, are the tensor: exactly, in
every format, since no group of values that shares a scale is cut. Source: the measured design of the whole model.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from problems.dsv4_forward.weights import layout
from problems.dsv4_forward.weights.config import Config


@dataclass(frozen=True)
class Cut:
    """axis: counted from the end of a matrix (..., n, k). parts: of that axis, each cut by itself, as gate and up."""

    axis: int
    parts: int = 1


CUTS = {
    "attn.wq_b": Cut(-2),
    "attn.attn_sink": Cut(-1),
    "attn.wo_a": Cut(-3),
    "attn.wo_b": Cut(-1),
    "ffn.experts.w13": Cut(-2, parts=2),
    "ffn.experts.w2": Cut(-1),
    "ffn.shared_experts.w13": Cut(-2, parts=2),
    "ffn.shared_experts.w2": Cut(-1),
    "head": Cut(-2),
}
SCALARS = ("scale_2", "input_scale")  # of a matrix: they have its leading axes only


def local(cfg: Config, fmt: str, gpus: int) -> Config:
    """Return the configuration of one GPU's part. ValueError: so many GPUs cannot share the model, with the reason."""
    if gpus == 1:
        return cfg
    for name in ("o_groups", "num_attention_heads", "moe_intermediate_size", "vocab_size"):
        if gpus < 1 or vars(cfg)[name] % gpus:
            raise ValueError(f"gpus must divide {name} of {cfg.name}, {vars(cfg)[name]}, got {gpus}")
    for name, unit in layout.units(cfg, fmt).items():
        if not isinstance(unit, layout.LinearSpec) or (cut := _cut(name)) is None or unit.kind == "plain":
            continue
        sizes = {-1: unit.k, -2: unit.n}
        group = layout.FP8_BLOCK if unit.kind == "fp8" else {-1: layout.FP4_GROUP[unit.kind]}.get(cut.axis, 1)
        if cut.axis in sizes and sizes[cut.axis] % (gpus * cut.parts * group):
            raise ValueError(
                f"gpus must leave whole groups of {group} values of {name}, {sizes[cut.axis] // cut.parts} in {fmt}, "
                f"got {gpus}"
            )
    shared = {name: vars(cfg)[name] // gpus for name in ("o_groups", "num_attention_heads", "moe_intermediate_size")}
    return dataclasses.replace(cfg, name=f"{cfg.name}/{gpus}", vocab_parts=gpus, **shared)


def part(name: str, tensor: torch.Tensor, gpus: int, rank: int) -> torch.Tensor:
    """Return what GPU `rank` of `gpus` has of a tensor of layout.layout, contiguous; the tensor itself if all of it."""
    cut = _cut(name)
    axis = 0 if cut is None else cut.axis + 2 * name.endswith(SCALARS)
    if cut is None or axis >= 0 or gpus == 1:
        return tensor
    whole = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor  # not all of torch knows FP8
    rows = whole.unflatten(axis, (cut.parts, gpus, -1)).select(axis - 1, rank)
    return rows.flatten(axis - 1, axis).contiguous().view(tensor.dtype)


@contextmanager
def filling(
    name: str, unit: layout.Spec | layout.LinearSpec, tensors: dict[str, torch.Tensor], gpus: int, rank: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield `tensors` by name for the unit `name` of the whole model to be written to; where a GPU has a part of it,
    with whole ones in its place, from which the part is then copied: memory for one unit, as long as this lasts.
    """
    if gpus == 1 or _cut(name) is None:
        yield tensors
        return
    specs = layout.tensors_of(name, unit)
    device = next(iter(tensors.values())).device
    whole = layout.views(torch.empty(layout.nbytes(specs), dtype=torch.uint8, device=device), specs)
    yield tensors | whole
    for key, tensor in whole.items():
        tensors[key].copy_(part(key, tensor, gpus, rank))


def _cut(name: str) -> Cut | None:
    """How a tensor, or a linear layer, of this name is cut; None: each GPU has all of it."""
    section, _, rest = name.partition(".")
    within = rest.partition(".")[2] if section in ("layers", "mtp") else name
    return next((cut for start, cut in CUTS.items() if within == start or within.startswith(f"{start}.")), None)
