"""Compute the routed experts with plain bf16 weights in two launches, for calls of few tokens.

In torch they are a gather of every pair's weights, which are written and read again. A token's bits do not depend on
the others. Weights are read as they lie in memory: no launch just ahead may write them. On a GPU ids are not checked:
an expert that does not exist adds nothing. The interface and formulas are those of torch_ops/experts.py.
"""

from ctypes import c_float, c_int, c_void_p
from pathlib import Path

import torch

from problems.common import build
from problems.dsv4_forward.kernels.arguments import KINDS, Own
from problems.dsv4_forward.weights.linear import Linear

MOST_PAIRS = 256  # of a token and one of its experts, as in the source: 42 tokens of Flash


class Experts(Own):
    """The op on one build."""

    SOURCE = Path(__file__).with_suffix(".cu")
    OPS = ("experts",)

    def __init__(self, built: build.Artefact) -> None:
        self._experts = built.function("launch_experts", *[c_void_p] * 7, *[c_int] * 6, c_float)

    def experts(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        w13: Linear,
        w2: Linear,
        limit: float,
        out: torch.Tensor,
    ) -> object:
        """Compute torch_ops experts.experts."""
        if not serves(x, ids, weights, w13, w2, out):
            return NotImplemented
        between = torch.empty(ids.numel(), w2.k, dtype=x.dtype, device=x.device)
        given = (tensor.data_ptr() for tensor in (x, ids, weights, w13.weight, w2.weight, between, out))
        sizes = *ids.shape, len(w13.weight), w13.k, w2.k, KINDS.index(out.dtype)
        build.check(self._experts(*given, *sizes, limit), "experts")
        return None


def serves(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w13: Linear, w2: Linear, out: torch.Tensor
) -> bool:
    """Whether the kernels compute the call."""
    if not w13.kind == w2.kind == "plain" or ids.dim() != 2 or not 1 <= ids.numel() <= MOST_PAIRS:
        return False
    size, inner, hidden = len(w13.weight), w2.k, w13.k
    shapes = {
        x: (len(ids), hidden),
        weights: ids.shape,
        out: (len(ids), hidden),
        w13.weight: (size, 2 * inner, hidden),
        w2.weight: (size, hidden, inner),
    }
    fitting = all(tuple(tensor.shape) == tuple(shape) for tensor, shape in shapes.items())
    bf16 = all(tensor.dtype == torch.bfloat16 for tensor in (x, w13.weight, w2.weight))
    routed = ids.dtype == torch.int32 and weights.dtype == torch.float32
    whole = hidden % 8 == inner % 8 == 0 and all(t.data_ptr() % 16 == 0 for t in (x, w13.weight, w2.weight))
    contiguous = all(tensor.is_contiguous() for tensor in (*shapes, ids))
    return fitting and bf16 and routed and whole and contiguous and out.dtype in KINDS
