"""Norm vectors by their RMS, with a weight or (query heads) without. Source: section 5 of README.md's account of
DeepSeek's model.py.
"""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, out: torch.Tensor) -> None:
    """Write out = weight * x / sqrt(mean(x^2) + eps) over the last axis, all in fp32, rounded once.

    x, out: fp32 or bf16 (..., d); out may be x. weight: fp32 or bf16 (d,); None: no weight. DeepSeek's code norms query
    heads in bf16; here they too are fp32 inside. ValueError: a shape is not that.
    """
    if out.shape != x.shape:
        raise ValueError(f"out must have the shape of x, {tuple(x.shape)}, got {tuple(out.shape)}")
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(f"weight must have shape {tuple(x.shape[-1:])}, got {tuple(weight.shape)}")
    wide = None if weight is None else weight.float()
    out.copy_(torch.nn.functional.rms_norm(x.float(), x.shape[-1:], wide, eps))
