"""Compute attention to plain pages in two launches, for calls of few queries; outputs are rotated back in the second.

A query's bits do not depend on the others. Activations and pages are bf16 or fp32. Calls that it does not serve are
torch's. The interfaces and formulas are those of torch_ops/fmha.py and chains.py.
"""

from collections.abc import Callable
from ctypes import c_float, c_int, c_void_p
from pathlib import Path

import torch

from problems.common import build
from problems.dsv4_forward.cache.pages import Pages
from problems.dsv4_forward.torch_ops import fmha
from problems.dsv4_forward.weights.config import PLAIN

TARGETS = ("sm90", "sm100")
OPS = ("fmha", "fmha_rotate")
FORMATS = PLAIN
SOURCE = Path(__file__).with_suffix(".cu")
MOST_TOKENS = 32
MOST_WIDTH, ENTRIES = 512, 32  # as in the source
ROOM = 2**24  # floats that chunks leave for their join: 64 MB; calls with more are done a few queries at a time
KINDS = (torch.float32, torch.bfloat16)


def compile_for(target: str) -> list[build.Artefact]:
    """Compile for `target`, without a GPU."""
    return [build.cuda(SOURCE, target)]


def ops(target: str) -> dict[str, Callable[..., None]]:
    """Build and load the kernels. -> by op. BuildError as build.cuda."""
    made = Attention(build.cuda(SOURCE, target))
    return {"fmha": made.fmha, "fmha_rotate": made.fmha_rotate}


class Attention:
    """The ops on one build."""

    def __init__(self, built: build.Artefact) -> None:
        self._fmha = built.function("launch_fmha", *[c_void_p] * 11, *[c_int] * 8, c_float)

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
        """Compute torch_ops fmha.fmha. ValueError as there."""
        if serves(q, window, window_index, cache, index, sink, scale, out, lse):
            self._run(q, window, window_index, cache, index, sink, scale, None, None, out, lse)
        else:
            fmha.fmha(q, window, window_index, cache, index, sink, scale, out, lse)

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
        """Compute chains.fmha_rotate, of a call that rotates() has."""
        self._run(q, window, window_index, cache, index, sink, scale, cos, sin, out, lse)

    def _run(
        self,
        q: torch.Tensor,
        window: Pages,
        window_index: torch.Tensor,
        cache: Pages | None,
        index: torch.Tensor | None,
        sink: torch.Tensor,
        scale: float,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        heads, width = q.shape[2:]
        queries = q.shape[0] * q.shape[1]
        per_query = [
            t if t is None else t.view(queries, t.numel() // queries)
            for t in (q, window_index, index, cos, sin, out, lse)
        ]
        lengths = window_index.shape[2], 0 if index is None else index.shape[2]
        floats = heads * sum(-(-length // ENTRIES) for length in lengths) * (width + 2)
        step = min(queries, max(1, ROOM // max(1, floats)))
        parts = torch.empty(step * floats, dtype=torch.float32, device=q.device)
        kinds = KINDS.index(q.dtype), KINDS.index(window.data.dtype)
        for first in range(0, queries, step):
            some = (_pointer(t if t is None else t[first : first + step]) for t in per_query)
            query, window_at, at, cosine, sine, to, sums = some
            code = self._fmha(
                query,
                window.data.data_ptr(),
                window_at,
                None if cache is None else cache.data.data_ptr(),
                at,
                sink.data_ptr(),
                cosine,
                sine,
                parts.data_ptr(),
                to,
                sums,
                min(step, queries - first),
                heads,
                width,
                0 if cos is None else cos.shape[1],
                *lengths,
                *kinds,
                scale,
            )
            build.check(code, "fmha")


def serves(
    q: torch.Tensor,
    window: Pages,
    window_index: torch.Tensor,
    cache: Pages | None,
    index: torch.Tensor | None,
    sink: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> bool:
    """Whether the kernels compute the call."""
    if q.dim() != 4 or (cache is None) != (index is None) or not 1 <= q.shape[0] * q.shape[1] <= MOST_TOKENS:
        return False
    batch, tokens, heads, width = q.shape
    pages, lists = [window], [window_index]
    if cache is not None and index is not None:
        pages, lists = [window, cache], [window_index, index]
    paged = all(p.kind == "plain" and p.width == width and p.data.dtype == window.data.dtype for p in pages)
    listed = all(ids.dim() == 3 and ids.shape[:2] == q.shape[:2] and ids.dtype == torch.int32 for ids in lists)
    kinds = q.dtype in KINDS and out.dtype == q.dtype and lse.dtype == sink.dtype == torch.float32
    shapes = out.shape == q.shape and lse.shape == q.shape[:3] and sink.shape == (heads,)
    whole = width % 4 == 0 and width <= MOST_WIDTH and all(p.data.data_ptr() % 16 == 0 for p in pages)
    contiguous = all(tensor.is_contiguous() for tensor in (q, *lists, sink, out, lse))
    return heads > 0 and paged and listed and kinds and shapes and whole and contiguous


def rotates(
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
) -> bool:
    """Whether the kernels compute the call, and rotate its outputs."""
    if not serves(q, window, window_index, cache, index, sink, scale, out, lse) or q.shape[1] != 1:
        return False
    turns = cos.dtype == sin.dtype == torch.float32 and cos.is_contiguous() and sin.is_contiguous()
    shapes = cos.dim() == 2 and cos.shape == sin.shape and len(cos) == len(q)
    return turns and shapes and 0 < 2 * cos.shape[1] <= q.shape[3]


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


SERVES = {"fmha_rotate": rotates}  # by op that serves some calls only: the others are the chain of its parts
