"""Begin a pass: the index lists of its tokens, their embeddings in all hc copies, and the angles at their positions.

Source: section 3 of README.md's account of DeepSeek's inference code; cache/plan.py has the formulas of the lists.
"""

import torch

from problems.dsv4_forward.cache.plan import Plan
from problems.dsv4_forward.torch_ops import rope


def plan(given: Plan, numbers: torch.Tensor, lists: torch.Tensor) -> None:
    """Write the index lists of a batch. numbers: int64 (words,), lists: int32 (words,), as given.room() makes them;
    what lies between the lists stays.
    """
    given.write(numbers, lists)


def embed(
    tokens: torch.Tensor,
    weight: torch.Tensor,
    position: torch.Tensor,
    freqs: torch.Tensor,
    copies: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> None:
    """Write the tokens' embeddings to all copies, and the cosines and sines of their angles in each kind of layer.

    tokens, position: int64 (N,); weight: fp32 or bf16 (V, d); copies: fp32 or bf16 (N, n, d), NaN where the vocabulary
    has no such token. freqs: fp32 (kinds, r / 2), radians a token; cos, sin: fp32 (kinds, N, r / 2), of the fp32
    products position * frequency. ValueError: a shape is not that.
    """
    kinds, half = freqs.shape
    if len(copies) != len(tokens) or copies.shape[2:] != weight.shape[1:]:
        raise ValueError(f"copies must be ({len(tokens)}, n, {weight.shape[1]}), got {tuple(copies.shape)}")
    for name, tensor in (("cos", cos), ("sin", sin)):
        if tuple(tensor.shape) != (kinds, len(position), half) or tensor.dtype != torch.float32:
            wanted = kinds, len(position), half
            raise ValueError(f"{name} must be fp32 {wanted}, got {tensor.dtype} {tuple(tensor.shape)}")
    near = tokens.clamp(0, len(weight) - 1)
    rows = weight[near].masked_fill_((near != tokens).unsqueeze(1), torch.nan)
    copies.copy_(rows.unsqueeze(1).expand(copies.shape))
    for kind in range(kinds):
        for out, values in zip((cos, sin), rope.angles(position, freqs[kind]), strict=True):
            out[kind].copy_(values)


def start(
    given: Plan,
    numbers: torch.Tensor,
    lists: torch.Tensor,
    tokens: torch.Tensor,
    weight: torch.Tensor,
    freqs: torch.Tensor,
    copies: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> None:
    """Write all outputs of plan(given, numbers, lists) and of embed, at the positions that the first writes."""
    plan(given, numbers, lists)
    embed(tokens, weight, given.views(numbers, lists).position, freqs, copies, cos, sin)
