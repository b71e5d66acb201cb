"""Compute the model's fmha: attention to 584-byte entries, straight from the model's pages.

The kernel sees each token as a separate sequence. Holes in a list say what does not count, so lengths are full ones.
A variant may define a function more: `in_model(data, cosine, sine)`, which does as custom_kernel, then turns the last
64 dims of the outputs back, rounded to bf16 before and after. In a step of few tokens it gives a token the same bits
whatever others are in it. Without it custom_kernel and torch do both.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
    """The op, for bf16 queries, pages of such entries and a window. full: by device, tokens and length, the lengths of
    full lists. They are kept, since graphs may read them: 512 bytes for each that occurs.
    """

    kernel: Callable[[Data, torch.Tensor, torch.Tensor], object]
    full: dict[tuple[torch.device, int, int], torch.Tensor] = field(default_factory=dict)

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
        """ValueError as the problem's task.unpack, another scale than the problem's, or of angles, as the variant."""
        paged = window.kind == "entry" and (cache is None or cache.kind == "entry")
        if q.dtype != torch.bfloat16 or not paged or not window_index.numel():
            return NotImplemented
        if scale != SCALE:
            raise ValueError(f"scale must be {SCALE}, got {scale}")
        if index is None:  # the window replaces a cache of which nothing is named
            cache, index = window, window_index.new_empty((*window_index.shape[:2], 0))
        nw, nc = (self._lengths(ids) for ids in (window_index, index))
        q, window_index, index = q.contiguous(), window_index.contiguous(), index.contiguous()
        data = Data(q, window.data, window_index, nw, cache.data, index, nc, sink, out, lse)
        self.kernel(data, cos.contiguous(), sin.contiguous())
        return None

    def _lengths(self, ids: torch.Tensor) -> torch.Tensor:
        """int32 (B,), the length of each list of ids (B, S, n), n: filled in the first call only."""
        key = ids.device, len(ids), ids.shape[2]
        if key not in self.full:
            with torch.inference_mode(False):
                self.full[key] = torch.full(key[1:2], key[2], dtype=torch.int32, device=ids.device)
        return self.full[key]
