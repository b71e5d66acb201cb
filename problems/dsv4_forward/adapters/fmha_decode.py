"""Compute the ops fmha and fmha_rotate with a variant of fmha_decode: attention to 584-byte entries, straight from the
model's pages.

The kernel sees each token as a separate sequence. Holes in a list say what does not count, so lengths are full ones.
A variant may define a function more: `in_model(data, cosine, sine)`, which does as custom_kernel, then turns the last
64 dims of the outputs back, rounded to bf16 before and after, unless the angles are None. In a step of few tokens it
gives a token the same bits whatever others are in it. Without it custom_kernel and the fallback's op rotate do both.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType

import torch

from problems.common import load
from problems.dsv4_forward.adapters.common import Adapted, AllOps, Fallback
from problems.dsv4_forward.cache.pages import Pages
from problems.dsv4_forward.weights.tree import ModelWeights

PROBLEM = "fmha_decode"


@dataclass(frozen=True)
class Attention:
    """The ops. task: the problem's; kernel: an in_model of it; fallback: computes the calls that the kernel does not
    serve: activations that are not bf16, pages of another kind, no window. full: by device, tokens and length, the
    lengths of full lists. They are kept, since graphs may read them: 512 bytes for each that occurs.
    """

    task: ModuleType
    kernel: Callable[..., object]
    fallback: AllOps
    full: dict[tuple[torch.device, int, int], torch.Tensor] = field(default_factory=dict)

    def fmha(
        self,
        q: torch.Tensor,
        window: Pages,
        window_index: torch.Tensor,
        cache: Pages | None,
        index: torch.Tensor | None,
        sink: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """As fmha.fmha. ValueError as the problem's task.unpack, or another scale than the problem's."""
        if self._serves(q, window, window_index, cache):
            self.kernel(self._data(q, window, window_index, cache, index, sink, scale, out, lse), None, None)
        else:
            self.fallback.fmha(q, window, window_index, cache, index, sink, scale, out, lse)

    def fmha_rotate(
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
    ) -> None:
        """As chains.fmha_rotate. ValueError as fmha, or of angles, as the variant says."""
        if self._serves(q, window, window_index, cache):
            data = self._data(q, window, window_index, cache, index, sink, scale, out, lse)
            self.kernel(data, cos.contiguous(), sin.contiguous())
        else:
            self.fallback.fmha_rotate(q, window, window_index, cache, index, sink, scale, cos, sin, out, lse)

    def _data(
        self,
        q: torch.Tensor,
        window: Pages,
        window_index: torch.Tensor,
        cache: Pages | None,
        index: torch.Tensor | None,
        sink: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> tuple:
        """The problem's Data of a call."""
        if scale != self.task.SCALE:
            raise ValueError(f"scale must be {self.task.SCALE}, got {scale}")
        if index is None:  # the window replaces a cache of which nothing is named
            cache, index = window, window_index.new_empty((*window_index.shape[:2], 0))
        nw, nc = (self._lengths(ids) for ids in (window_index, index))
        q, window_index, index = q.contiguous(), window_index.contiguous(), index.contiguous()
        return self.task.Data(q, window.data, window_index, nw, cache.data, index, nc, sink, out, lse)

    def _lengths(self, ids: torch.Tensor) -> torch.Tensor:
        """int32 (B,), the length of each list of ids (B, S, n), n: filled in the first call only."""
        key = ids.device, len(ids), ids.shape[2]
        if key not in self.full:
            with torch.inference_mode(False):
                self.full[key] = torch.full(key[1:2], key[2], dtype=torch.int32, device=ids.device)
        return self.full[key]

    def _serves(self, q: torch.Tensor, window: Pages, window_index: torch.Tensor, cache: Pages | None) -> bool:
        paged = window.kind == "entry" and (cache is None or cache.kind == "entry")
        return q.dtype == torch.bfloat16 and paged and window_index.numel() > 0


def adapt(module: ModuleType, weights: ModelWeights, fallback: Fallback) -> Adapted:
    """Put `module`, a variant of the problem, into the ops. -> fmha and fmha_rotate, and no lines."""
    task = load.module(load.PROBLEMS / PROBLEM, "task")

    def two_steps(data: tuple, cosine: torch.Tensor | None, sine: torch.Tensor | None) -> None:
        module.custom_kernel(data)
        if cosine is not None:
            fallback.ops.rotate(data.out, cosine, sine, data.out, inverse=True)

    made = Attention(task, getattr(module, "in_model", two_steps), fallback.ops)
    return Adapted({"fmha": made.fmha, "fmha_rotate": made.fmha_rotate}, ())
