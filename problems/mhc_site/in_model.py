"""Compute the model's mhc_site, straight on its tensors."""

from collections.abc import Sequence
from types import ModuleType

import torch
from task import COPIES, HC_EPS, ITERATIONS, NORM_EPS, Data

from problems.dsv4_forward.prepared import ALIGNMENT, UNIT, Fitted, placed, room_for
from problems.dsv4_forward.weights.config import Config
from problems.dsv4_forward.weights.tree import ModelWeights


def fit(variant: ModuleType, weights: ModelWeights, wanted: Sequence[str]) -> Fitted:
    """Fit a variant as prepared.py says."""
    reason = "no bf16 activations in fp32" if weights.format == "fp32" else unserved(weights.config)
    if reason:
        return Fitted(refused=dict.fromkeys(wanted, reason))

    def mhc_site(
        y: torch.Tensor,
        second: torch.Tensor | None,
        copies: torch.Tensor,
        post: torch.Tensor,
        comb: torch.Tensor,
        fn: torch.Tensor,
        base: torch.Tensor,
        scale: torch.Tensor,
        weight: torch.Tensor,
        cfg: Config,
        new_copies: torch.Tensor,
        out: torch.Tensor,
        new_post: torch.Tensor,
        new_comb: torch.Tensor,
    ) -> object:
        """Serve bf16 activations, but for two addends. ValueError as the problem's task.unpack."""
        narrow = (copies, weight, new_copies, out) if second is not None else (y, copies, weight, new_copies, out)
        if any(tensor.dtype != torch.bfloat16 for tensor in narrow):
            return NotImplemented
        if not len(y):
            return None
        alignment = ALIGNMENT[y.device.type]
        second = y[:0] if second is None else second
        inputs = [placed(tensor, alignment) for tensor in (y, second, copies, post, comb, fn, base, scale, weight)]
        outputs = new_copies, out, new_post, new_comb
        rooms = [room_for(tensor, alignment, tensor.dtype) for tensor in outputs]
        variant.custom_kernel(Data(*inputs, *rooms))
        for output, room in zip(outputs, rooms, strict=True):
            if room is not output:
                output.copy_(room)
        return None

    return Fitted({"mhc_site": mhc_site})


def unserved(cfg: Config) -> str:
    """Return why the problem has no such model, "" if it has."""
    for name, wanted in (
        ("hc_mult", COPIES),
        ("hc_sinkhorn_iters", ITERATIONS),
        ("hc_eps", HC_EPS),
        ("rms_norm_eps", NORM_EPS),
    ):
        if getattr(cfg, name) != wanted:
            return f"{name} must be {wanted:g}, is {getattr(cfg, name):g}"
    return "" if cfg.hidden_size % UNIT == 0 else f"hidden_size must be a multiple of {UNIT}, is {cfg.hidden_size}"
