"""Convert weights from one number format to another, one matrix at a time."""

import math

import torch

from problems.dsv4_forward.weights import formats, layout, packing, tree
from problems.dsv4_forward.weights.config import PLAIN, Config, check_format
from problems.dsv4_forward.weights.linear import Linear
from problems.dsv4_forward.weights.tree import ModelWeights

# Formats that each can become. NVFP4 linear layers need input scales that only a calibration knows.
TARGETS = {
    "fp32": (*PLAIN, "released"),
    "bf16": (*PLAIN, "released"),
    "released": (*PLAIN, "released", "nvfp4_experts"),
    "nvfp4_experts": (*PLAIN, "nvfp4_experts"),
    "nvfp4": (*PLAIN, "nvfp4"),
}


def check(source: str, fmt: str) -> None:
    """ValueError unless weights in `source` can become `fmt`."""
    if check_format(fmt) not in TARGETS[source]:
        raise ValueError(f"format must be one of {TARGETS[source]} for weights in {source}, got {fmt!r}")


def convert(source: ModelWeights, fmt: str) -> ModelWeights:
    """The weights in another format, on their device, in new memory.

    released -> nvfp4_experts keeps every value and takes input scales from input_bound(); to fp32 values are exact, to
    bf16 they are rounded once (those of released and nvfp4_experts are exact); fp32 and bf16 are quantised as random
    weights are. ValueError where the formats cannot become each other, or a matrix of MXFP4 scales is spread too far.
    """
    check(source.format, fmt)
    cfg = source.config
    tensors = tree.empty(cfg, fmt, source.embed.device)
    before, after = layout.units(cfg, source.format), layout.units(cfg, fmt)
    for name, unit in before.items():
        if isinstance(unit, layout.Spec):
            tensors[name].copy_(source.tensors[name])
            continue
        transfer(cfg, name, unit, after[name], _fields(name, unit, source.tensors), tensors)
    return tree.assemble(cfg, fmt, tensors)


def _fields(name: str, unit: layout.LinearSpec, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {field: tensors[f"{name}.{field}"] for field in unit.tensors()}


def transfer(
    cfg: Config,
    name: str,
    before: layout.LinearSpec,
    after: layout.LinearSpec,
    source: dict[str, torch.Tensor],
    tensors: dict[str, torch.Tensor],
) -> None:
    """Write the linear layer `name`, given by its fields `source` as `before` says, into `tensors` as `after` says."""
    fields = _fields(name, after, tensors)
    if before.kind == after.kind:
        for field, value in source.items():
            fields[field].copy_(value)
        return
    whole = Linear(kind=before.kind, **source, name=name)
    for index in range(math.prod(before.lead)):
        one = whole.select(index) if before.lead else whole
        for field, value in _cast(one, after).items():
            (fields[field][index] if before.lead else fields[field]).copy_(value)
    if "input_scale" in fields:
        fields["input_scale"].copy_(input_bound(cfg, name, tensors) / packing.NVFP4_LARGEST)


def _cast(one: Linear, after: layout.LinearSpec) -> dict[str, torch.Tensor]:
    """The fields of one matrix (n, k) in another kind."""
    if one.kind == "mxfp4" and after.kind == "nvfp4":
        try:
            return dict(zip(("weight", "scale", "scale_2"), formats.mxfp4_to_nvfp4(one.weight, one.scale), strict=True))
        except ValueError as error:
            raise ValueError(f"{one.name}: {error}") from error
    return packing.pack(one.dequantise(torch.float32), after.kind, after.dtype)


def input_bound(cfg: Config, name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """A magnitude that no input of a layer's routed experts exceeds, fp32 (): it replaces a calibrated amax.

    w13 reads a normed vector, at most max|weight| * sqrt(d); w2 reads a gated product, at most limit^2 times the
    routing weight. An e4m3 group scale has full precision down to 2^-15 of the largest, so that a loose bound costs
    nothing unless a group of 16 inputs is smaller than that.
    """
    block = name.partition(".ffn.")[0]
    if name.endswith("w2"):
        return torch.tensor(cfg.swiglu_limit**2 * cfg.routed_scaling_factor)
    return tensors[f"{block}.ffn_norm.weight"].float().abs().amax() * math.sqrt(cfg.hidden_size)
