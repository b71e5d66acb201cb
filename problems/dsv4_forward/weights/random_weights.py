"""Fill a model with random weights under which every part of it matters, and nothing overflows.

Activations stay near 1 through the layers and logits have a standard deviation of about 1. Nothing is constant: a
sink, bias or table left at zero would leave its code untested. A seed gives the same real-valued matrices in every
format of one device, each rounded once; NVFP4 input scales are drawn apart.
"""

import math

import torch

from problems.dsv4_forward.weights import layout, packing
from problems.dsv4_forward.weights.config import Config

# Each matrix has entries of gain / sqrt(k): an input of rms 1 gives an output of rms gain.
# Keys are also values. Their norm's mean of 1.5 sets attention scores to a deviation of 1.5, so that a query attends to
# about a dozen of 128 tokens and the output has rms 0.4; wo_a takes it back to about 1.
_KEY_NORM, _NORM_SPREAD = 1.5, 0.2
_WO_A_GAIN = 2.0
_ROUTER_GAIN, _ROUTER_BIAS = 1.5, 0.2  # scores that spread, a bias that changes some selections
_SINK_MEAN, _SINK_SPREAD = 3.0, 2.0  # a sink competes with the sum over a window, exp(1.1) * 128 = exp(6)
_MIX_SPREAD = 1.5  # hc copies of unlike weight that mix little, so that they still differ at the head
_RESIDUAL = 4.0  # variance that all sublayers together add to the embedding's 1
# log2; without it all FP8 blocks of a matrix would have amax / 448 in one octave, and one and the same scale.
_BLOCK_SPREAD = 1.0
# Largest magnitude an NVFP4 layer's input is calibrated for: about six deviations, and heads that copy one key.
_NORMED_AMAX, _HEAD_AMAX, _LOW_AMAX = 8.0, 12.0, 16.0
AMAX_SPREAD = 0.2  # relative, so that no two layers or experts share an input scale


def fill(cfg: Config, fmt: str, seed: int, tensors: dict[str, torch.Tensor]) -> None:
    """Write every tensor of layout.layout(cfg, fmt). One matrix at a time: extra memory is a few times one matrix."""
    device = tensors["embed.weight"].device
    source, scales = (torch.Generator(device).manual_seed(seed + part) for part in (0, 2**32))
    for name, unit in layout.units(cfg, fmt).items():
        if isinstance(unit, layout.Spec):
            tensors[name].copy_(tensor(cfg, name, unit.shape, source))
            continue
        fields = {part: tensors[f"{name}.{part}"] for part in unit.tensors()}
        _linear(unit, gain(cfg, name), fields, source)
        if "input_scale" in fields:
            jitter = 1 + AMAX_SPREAD * torch.rand(unit.lead, generator=scales, device=device)
            fields["input_scale"].copy_(jitter.mul_(input_amax(cfg, name) / packing.NVFP4_LARGEST))


def _linear(unit: layout.LinearSpec, scale: float, fields: dict[str, torch.Tensor], source: torch.Generator) -> None:
    """Draw and store the matrices of one linear layer, by leading index."""
    for index in range(math.prod(unit.lead)):
        matrix = _matrix(unit.n, unit.k, source).mul_(scale / math.sqrt(unit.k))
        for part, value in packing.pack(matrix, unit.kind, unit.dtype).items():
            (fields[part][index] if unit.lead else fields[part]).copy_(value)


def _matrix(n: int, k: int, source: torch.Generator) -> torch.Tensor:
    """fp32 (n, k), normal, rms 1; its blocks differ by up to 2^(2 * _BLOCK_SPREAD), no two of them equal in size."""
    rows, columns = -(-n // layout.FP8_BLOCK), -(-k // layout.FP8_BLOCK)
    order = torch.randperm(rows * columns, generator=source, device=source.device)
    size = torch.exp2((order / max(rows * columns - 1, 1)).mul_(2).sub_(1).mul_(_BLOCK_SPREAD))
    size = (size / size.square().mean().sqrt()).view(rows, columns)
    size = size.repeat_interleave(layout.FP8_BLOCK, 0)[:n].repeat_interleave(layout.FP8_BLOCK, 1)[:, :k]
    return _normal((n, k), source).mul_(size)


def _normal(shape: tuple[int, ...], source: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=source, device=source.device)


def tensor(cfg: Config, name: str, shape: tuple[int, ...], source: torch.Generator) -> torch.Tensor:
    """What is not a linear layer: fp32 or int64, `shape`."""
    if name.endswith("tid2eid"):  # distinct experts a token
        chance = torch.rand(shape[0], cfg.n_routed_experts, generator=source, device=source.device)
        return chance.topk(shape[1]).indices
    if name.endswith("scale"):
        return torch.rand(shape, generator=source, device=source.device).mul_(0.5).add_(0.3)
    mean, spread = moments(name, shape)
    return _normal(shape, source).mul_(spread).add_(mean)


def moments(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and standard deviation of a tensor's entries."""
    if name.endswith(("kv_norm.weight", "compressor.norm.weight")):
        return _KEY_NORM, _NORM_SPREAD
    if name.endswith("norm.weight"):
        return 1.0, _NORM_SPREAD
    if name.endswith("attn_sink"):
        return _SINK_MEAN, _SINK_SPREAD
    if name.endswith("_base"):
        return 0.0, _MIX_SPREAD
    if name.endswith("ape"):
        return 0.0, 0.5
    if name.endswith("gate.bias"):
        return 0.0, _ROUTER_BIAS
    if name == "embed.weight":
        return 0.0, 1.0
    return 0.0, (_ROUTER_GAIN if name.endswith("gate.weight") else 1.0) / math.sqrt(shape[-1])


def _gate_gain(cfg: Config) -> float:
    """Of w1 and w3: the clamp acts on what lies four deviations out, or nearer."""
    return max(1.0, cfg.swiglu_limit / 4)


def _swiglu_rms(cfg: Config) -> float:
    """rms of silu(min(a, L)) * clip(b, -L, L) for a, b normal with a deviation of _gate_gain."""
    middles = (torch.arange(999, dtype=torch.float64) + 0.5) / 999  # quantiles of 999 equal shares
    normal = torch.erfinv(2 * middles - 1) * math.sqrt(2) * _gate_gain(cfg)
    gate = torch.nn.functional.silu(normal.clamp(max=cfg.swiglu_limit))
    up = normal.clamp(-cfg.swiglu_limit, cfg.swiglu_limit)
    return float((gate.square().mean() * up.square().mean()).sqrt())


def gain(cfg: Config, name: str) -> float:
    """Of the linear layer `name`: output rms for an input of rms 1, or of the SwiGLU's rms for w2."""
    sublayers = 2 * (cfg.num_hidden_layers + cfg.num_nextn_predict_layers)
    residual = math.sqrt(_RESIDUAL / sublayers)
    last = name.rpartition(".")[2]
    if last == "w2":  # routing weights sum to routed_scaling_factor; with the shared expert's 1
        routed = cfg.routed_scaling_factor**2 / cfg.num_experts_per_tok
        return residual / (_swiglu_rms(cfg) * math.sqrt(1 + routed))
    gains = {"wo_a": _WO_A_GAIN, "wo_b": residual, "w13": _gate_gain(cfg), "e_proj": 0.5**0.5, "h_proj": 0.5**0.5}
    return gains.get(last, 1.0)


def input_amax(cfg: Config, name: str) -> float:
    """Largest magnitude that the input of the linear layer `name` is expected to have."""
    last = name.rpartition(".")[2]
    if last == "w2":
        largest = min(cfg.swiglu_limit, 6 * _gate_gain(cfg)) ** 2
        return largest * (1.0 if "shared" in name else cfg.routed_scaling_factor)
    return {"wo_a": _HEAD_AMAX, "wo_b": _LOW_AMAX}.get(last, _NORMED_AMAX)
