"""Compute experts, norms and decode attention of transformers' deepseek_v4 by this package, after `register()`.

Experts and attention are entries of transformers' own registries, attention with the mask of "eager". Norms have none
that serves: their decorator is for the package `kernels`, which takes layers from repositories of its own format, and
monkey_patching.register_patch_mapping imports every image processor, so that no model can be made without torchvision.
Hence `replace_norms`, for one model. README.md says what is served; other calls go to transformers' own functions, with
one warning a reason. Source: models/deepseek_v4 and integrations/moe.py of transformers 5.17.0.

Attention is torch's products, no kernel of ours: fmha_decode reads FP8 caches, which would round keys, and to make
lists of transformers' dense mask takes as many launches as a kernel for bf16 keys would save.
"""

import functools
import itertools
import logging
import weakref
from typing import Any

import torch

try:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs
except ImportError as error:
    raise ImportError(f"{__name__} needs transformers 5.17: {error}") from error

from dsv4_kernels import operators
from problems.common import load, nvfp4
from problems.dsv4_forward.kernels import experts as gpu_experts
from problems.dsv4_forward.kernels import norm as gpu_norm
from problems.dsv4_forward.torch_ops import experts as cpu_experts
from problems.dsv4_forward.torch_ops import norm as cpu_norm
from problems.dsv4_forward.weights.linear import Linear

NAME = "dsv4_kernels"  # in transformers' registries
KINDS = ("bf16", "nvfp4")  # of experts
_moe = operators.task("moe_gemm")


def register(experts: str = "bf16") -> None:
    """Enter "dsv4_kernels" into transformers' registries; again, with other experts, for all models.

    experts: "bf16", weights as they are; "nvfp4", rounded to NVFP4 at the first call, and held beside the model's until
    the parameter dies, is replaced or is written to. Writes through `.data` are not seen. ValueError: others.
    """
    if experts not in KINDS:
        raise ValueError(f"experts must be one of {KINDS}, got {experts!r}")
    ALL_EXPERTS_FUNCTIONS.register(NAME, functools.partial(compute_experts, kind=experts))
    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["eager"])


def replace_norms(model: torch.nn.Module, back: bool = False) -> None:
    """Make the norms of a deepseek_v4 model this module's, which compute in one launch; back: transformers' again.

    Only the modules' class changes: parameters, hooks and names stay. ValueError: the model has no such norm.
    """
    classes = {mine: own for own, mine in NORMS.items()} if back else NORMS
    found = [module for module in model.modules() if type(module) in {*NORMS, *NORMS.values()}]
    if not found:
        raise ValueError(f"model must have norms of transformers' deepseek_v4, got {type(model).__name__}")
    for module in found:
        module.__class__ = classes.get(type(module), type(module))


def compute_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, kind: str = "bf16"
) -> torch.Tensor:
    """Compute DeepseekV4Experts.forward, as an entry of ExpertsInterface.

    hidden_states (T, H); top_k_index: integers (T, k), 0 to E - 1, and on a GPU E for an expert of another rank;
    top_k_weights (T, k). For "nvfp4" the experts of a token are all different, as a router's are.
    -> (T, H), of hidden_states' dtype. ValueError: another module, or on a CPU an index of no expert.
    """
    if not isinstance(module, theirs.DeepseekV4Experts):
        raise ValueError(f"module must be transformers' DeepseekV4Experts, got {type(module).__name__}")
    w13, w2, limit = module.gate_up_proj, module.down_proj, float(module.limit)
    refused = _refused("experts", hidden_states, w13, w2)
    if module.config.hidden_act != "silu":
        refused = f"experts with hidden_act {module.config.hidden_act}"
    if not refused:
        x, gates = hidden_states.contiguous(), top_k_weights.to(torch.float32).contiguous()
        ids, out = top_k_index.to(torch.int32).contiguous(), torch.empty_like(x)
        if kind == "bf16":
            with operators.queue_of_winners(x.device):
                made = _ops(x.device)["experts"](x, ids, gates, Linear("plain", w13), Linear("plain", w2), limit, out)
            if made is not NotImplemented:
                return out
            refused = f"experts not in bf16 with widths in multiples of 8 and up to {gpu_experts.MOST_PAIRS} pairs"
        elif x.dtype != torch.bfloat16 or any(n % 64 for n in w2.shape[1:]) or limit != _moe.LIMIT or not len(x):
            refused = f"nvfp4 experts not for bf16 with widths in multiples of 64 and a limit of {_moe.LIMIT:g}"
        else:
            x, gates = (part if part.data_ptr() % operators.ALIGNED == 0 else part.clone() for part in (x, gates))
            operators.moe_gemm(_held_as(w13, w2), x, torch.where(ids < len(w2), ids, -1), gates, out)
            return out
    _warn_once(refused)
    return ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden_states, top_k_index, top_k_weights)


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute eager_attention_forward, as an entry of AttentionInterface: for T = 1 without copies of keys and values
    for each head, and with scores rounded once.

    query (B, H, T, D); key and value (B, 1, S, D); attention_mask: floats (B, 1, T, S) to add to scores, or None.
    -> (B, T, H, D), and probabilities (B, H, T, S). ValueError: module is no DeepseekV4Attention.
    """
    if not isinstance(module, theirs.DeepseekV4Attention):
        raise ValueError(f"module must be transformers' DeepseekV4Attention, got {type(module).__name__}")
    added = query.new_zeros(1, 1, 1, 1) if attention_mask is None else attention_mask
    if query.shape[2] != 1 or key.shape[1] != 1 or dropout or added.dim() != 4 or not added.is_floating_point():
        return theirs.eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout, **kwargs)
    scores = torch.baddbmm(added[:, :, 0].to(query.dtype), query[:, :, 0], key[:, 0].mT, alpha=scaling)
    sinks = module.sinks.view(1, -1, 1).expand(len(query), -1, 1)
    chances = torch.cat([scores, sinks], 2).softmax(2)[..., :-1].to(value.dtype)
    return torch.bmm(chances, value[:, 0]).unsqueeze(1), chances.unsqueeze(2)


class RMSNorm(theirs.DeepseekV4RMSNorm):
    """weight * x / sqrt(mean(x^2) + eps), x (..., d), of the same shape and dtype, rounded once."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        out = _normed(hidden_states, self.weight, self.variance_epsilon)
        return super().forward(hidden_states) if out is None else out


class UnweightedRMSNorm(theirs.DeepseekV4UnweightedRMSNorm):
    """The same without a weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = _normed(x, None, self.eps)
        return super().forward(x) if out is None else out


NORMS: dict[type, type] = {theirs.DeepseekV4RMSNorm: RMSNorm, theirs.DeepseekV4UnweightedRMSNorm: UnweightedRMSNorm}


def _normed(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor | None:
    refused = _refused("norms", x, x if weight is None else weight)
    if refused:
        _warn_once(refused)
        return None
    x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    with operators.queue_of_winners(x.device):
        _ops(x.device)["rms_norm"](x, weight, eps, out)
    return out


def _refused(what: str, *tensors: torch.Tensor) -> str:
    """Why no kernel serves these tensors, "" where one may."""
    if torch.compiler.is_compiling():
        return f"{what} that torch.compile traces"
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return f"{what} with gradients, which torch.no_grad() turns off"
    dtypes, devices = {tensor.dtype for tensor in tensors}, {tensor.device for tensor in tensors}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.bfloat16}:
        return f"{what} in {' and '.join(sorted(map(str, dtypes)))}"
    return "" if len(devices) == 1 and _ops(*devices) else f"{what} on {' and '.join(sorted(map(str, devices)))}"


@functools.cache
def _ops(device: torch.device) -> Any:
    """Functions by op; None for what is no CPU and no GPU of sm_90 or sm_100."""
    try:
        target = load.device_target(device)
    except ValueError:
        return None
    if target == "cpu":
        return {"experts": cpu_experts.experts, "rms_norm": cpu_norm.rms_norm}
    return gpu_experts.Experts.ops(target) | gpu_norm.Norm.ops(target)


_numbers = itertools.count()
_held: dict[int, tuple[str, list, weakref.finalize]] = {}  # by id of w13: a name, its weights, what drops them


def _held_as(w13: torch.Tensor, w2: torch.Tensor) -> str:
    """The name by which moe_gemm has these weights. They are rounded and held if they are not yet."""
    now = [(weakref.ref(t), t.data_ptr(), 0 if t.is_inference() else t._version) for t in (w13, w2)]
    if id(w13) in _held:
        name, then, drop = _held[id(w13)]
        if all(a[0]() is b[0]() and a[1:] == b[1:] for a, b in zip(then, now, strict=True)):
            return name
        drop()
    name = f"transformers {next(_numbers)}"
    operators.hold_moe_gemm(name, _rounded(w13, w2))
    _held[id(w13)] = name, now, weakref.finalize(w13, _drop, id(w13), name)
    return name


def _drop(key: int, name: str) -> None:
    del _held[key]
    operators.hold_moe_gemm(name, None)


@torch.inference_mode(False)
@torch.no_grad()
def _rounded(*weights: torch.Tensor) -> Any:
    """moe_gemm's task.Weights: a factor of each matrix, by which its largest value is 6 * 448, and a scale a 16."""
    made: list[Any] = []
    for matrices in weights:
        factors = matrices.abs().amax((1, 2)).float().clamp_(min=1e-30) / (nvfp4.E2M1_MAX * nvfp4.E4M3_MAX)
        each = [nvfp4.encode(m.float(), factor.expand(len(m))) for m, factor in zip(matrices, factors, strict=True)]
        codes, scales = (torch.stack([part.view(torch.uint8) for part in parts]) for parts in zip(*each, strict=True))
        made += [codes, scales.view(torch.float8_e4m3fn), factors]
    return _moe.Weights(*made, torch.ones_like(made[2]), torch.ones_like(made[2]), "bf16")


@functools.cache
def _warn_once(refused: str) -> None:
    logging.getLogger(__name__).warning("dsv4-kernels: transformers' own functions compute %s", refused)
