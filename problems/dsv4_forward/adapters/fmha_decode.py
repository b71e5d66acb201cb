"""Compute the op fmha with a variant of fmha_decode: attention to 584-byte entries, straight from the model's pages.

The kernel sees each token as a separate sequence. Holes in a list say what does not count, so lengths are full ones.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType

import torch

from problems.common import load
from problems.dsv4_forward.adapters.common import Adapted, Fallback
from problems.dsv4_forward.cache.pages import Pages
from problems.dsv4_forward.weights.tree import ModelWeights

PROBLEM = "fmha_decode"


@dataclass(frozen=True)
class Attention:
    """The op. task: the problem's; kernel: a custom_kernel of it; fallback: the op fmha that computes the calls that
    the kernel does not serve: activations that are not bf16, pages of another kind, no window. full: by device, tokens
    and length, the lengths of full lists. They are kept, since graphs may read them: 512 bytes for each that occurs.
    """

    task: ModuleType
    kernel: Callable[..., object]
    fallback: Callable[..., None]
    full: dict[tuple[torch.device, int, int], torch.Tensor] = field(default_factory=dict)

    def __call__(
        self, q: torch.Tensor, window: Pages, window_index: torch.Tensor, cache: Pages | None,
        index: torch.Tensor | None, sink: torch.Tensor, scale: float, out: torch.Tensor, lse: torch.Tensor,
    ) -> None:  # fmt: skip
        """As fmha.fmha. ValueError as the problem's task.unpack, or another scale than the problem's."""
        if q.dtype != torch.bfloat16 or not self._serves(window, window_index) or (cache and cache.kind != "entry"):
            self.fallback(q, window, window_index, cache, index, sink, scale, out, lse)
            return
        if scale != self.task.SCALE:
            raise ValueError(f"scale must be {self.task.SCALE}, got {scale}")
        if index is None:  # the window replaces a cache of which nothing is named
            cache, index = window, window_index.new_empty((*window_index.shape[:2], 0))
        nw, nc = (self._lengths(ids) for ids in (window_index, index))
        q, window_index, index = q.contiguous(), window_index.contiguous(), index.contiguous()
        data = self.task.Data(q, window.data, window_index, nw, cache.data, index, nc, sink, out, lse)
        self.kernel(data)

    def _lengths(self, ids: torch.Tensor) -> torch.Tensor:
        """int32 (B,), the length of each list of ids (B, S, n), n: filled in the first call only."""
        key = ids.device, len(ids), ids.shape[2]
        if key not in self.full:
            with torch.inference_mode(False):
                self.full[key] = torch.full(key[1:2], key[2], dtype=torch.int32, device=ids.device)
        return self.full[key]

    def _serves(self, window: Pages, window_index: torch.Tensor) -> bool:
        return window.kind == "entry" and window_index.numel() > 0


def adapt(module: ModuleType, weights: ModelWeights, fallback: Fallback) -> Adapted:
    """Put `module`, a variant of the problem, into the op. -> the op fmha, and no lines."""
    task = load.module(load.PROBLEMS / PROBLEM, "task")
    return Adapted({"fmha": Attention(task, module.custom_kernel, fallback.ops.fmha)}, ())
