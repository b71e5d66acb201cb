"""Compute the model's fmha where many tokens of a sequence come at once, straight from the model's pages.

A variant may define a function more: `in_model(data, cosine, sine)`, which does as custom_kernel, then turns the last
64 dims of the outputs back, rounded to bf16 before and after. Without it custom_kernel and torch do both.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from task import HEAD_DIM, SCALE, Data

from problems.dsv4_forward.cache.batch import Chunk
from problems.dsv4_forward.cache.pages import Pages
from problems.dsv4_forward.prepared import Fitted
from problems.dsv4_forward.torch_ops import rope
from problems.dsv4_forward.weights.config import PLAIN
from problems.dsv4_forward.weights.tree import ModelWeights


def fit(variant: ModuleType, weights: ModelWeights, wanted: Sequence[str]) -> Fitted:
    """Fit a variant as prepared.py says."""
    if weights.format in PLAIN:
        return Fitted(refused=dict.fromkeys(wanted, f"no 584-byte cache entries in {weights.format}"))
    if weights.config.head_dim != HEAD_DIM:
        return Fitted(refused=dict.fromkeys(wanted, f"head_dim must be {HEAD_DIM}, is {weights.config.head_dim}"))

    def two_steps(data: Data, cosine: torch.Tensor, sine: torch.Tensor) -> None:
        variant.custom_kernel(data)
        rope.rotate(data.out, cosine, sine, data.out, inverse=True)

    return Fitted({"fmha": Attention(getattr(variant, "in_model", two_steps))})


@dataclass(frozen=True)
class Attention:
    """The op, for bf16 queries of a chunk and pages of such entries."""

    kernel: Callable[[Data, torch.Tensor, torch.Tensor], object]

    def __call__(
        self,
        q: torch.Tensor,
        window: Pages,
        window_index: torch.Tensor,
        cache: Pages | None,
        index: torch.Tensor | None,
        sink: torch.Tensor,
        scale: float,
        cos: torch.Tensor,
        sin: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        chunk: Chunk | None = None,
    ) -> object:
        """ValueError as the problem's task.unpack, or another scale than the problem's."""
        paged = window.kind == "entry" and (cache is None or cache.kind == "entry")
        if chunk is None or q.dtype != torch.bfloat16 or not paged:
            return NotImplemented
        if scale != SCALE:
            raise ValueError(f"scale must be {SCALE}, got {scale}")
        if cache is None or index is None:  # the window replaces a cache of which nothing is named
            cache, lists = window, window_index.new_empty((len(chunk.first), 0))
            length = torch.zeros_like(window_index[:, 0, 0])
        elif chunk.visible is not None:
            lists, length = index[chunk.last, 0], chunk.visible
        else:
            lists = index.squeeze(1).contiguous()
            length = torch.full_like(window_index[:, 0, 0], lists.shape[1])
        tables = (chunk.starts, chunk.first, window.data, chunk.window_index, cache.data, lists, length)
        call = Data(q.squeeze(1).contiguous(), *tables, sink, out.squeeze(1), lse.squeeze(1))
        self.kernel(call, cos.contiguous(), sin.contiguous())
        return None
