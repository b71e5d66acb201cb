"""Compute the routed experts with plain bf16 weights in two launches, for calls of few tokens.

In torch they are a gather of every pair's weights, which are written and read again. A token's bits do not depend on
the others. Weights are read as they lie in memory: no launch just ahead may write them. On a GPU ids are not checked:
an expert that does not exist adds nothing. The interface and formulas are those of torch_ops/experts.py.
"""

from ctypes import POINTER, Structure, c_float
from pathlib import Path

import torch

from problems.common import build
from problems.dsv4_forward.kernels.arguments import KINDS, Own, addresses, fields
from problems.dsv4_forward.weights.linear import Linear

MOST_PAIRS = 256  # of a token and one of its experts, as in the source: 42 tokens of Flash


class _Experts(Structure):
    """experts.cu's Experts."""

    _fields_ = [
        *fields("x ids gates w13 w2 between out", "tokens chosen experts hidden inner bf16"),
        ("limit", c_float),
    ]


class Experts(Own):
    """The op on one build."""

    SOURCE = Path(__file__).with_suffix(".cu")
    OPS = ("experts",)

    def __init__(self, built: build.Artefact) -> None:
        self._experts = built.function("launch_experts", POINTER(_Experts))

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
        (tokens, chosen), experts = ids.shape, len(w13.weight)
        tensors = addresses(x=x, ids=ids, gates=weights, w13=w13.weight, w2=w2.weight, between=between, out=out)
        sizes = {"tokens": tokens, "chosen": chosen, "experts": experts, "hidden": w13.k, "inner": w2.k}
        call = _Experts(**tensors, **sizes, bf16=KINDS.index(out.dtype), limit=limit)
        build.check(self._experts(call), "experts")
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
