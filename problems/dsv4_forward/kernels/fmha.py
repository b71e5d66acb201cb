"""Compute attention to plain pages in two launches, for calls of few queries; outputs are rotated back in the second.

A query's bits do not depend on the others. Activations and pages are bf16 or fp32. The interface and formulas are those
of torch_ops/fmha.py.
"""

from ctypes import POINTER, Structure, c_float, c_int
from pathlib import Path

import torch

from problems.common import build
from problems.dsv4_forward.cache.batch import Chunk
from problems.dsv4_forward.cache.pages import Pages
from problems.dsv4_forward.kernels.arguments import KINDS, Own, addresses, fields

MOST_TOKENS = 32
MOST_WIDTH, ENTRIES = 512, 32  # as in the source
ROOM = 2**24  # floats that chunks leave for their join: 64 MB; calls with more are done a few queries at a time


class _List(Structure):
    _fields_ = fields("data index", "length")


class _Attention(Structure):
    _fields_ = [
        *fields("q", ""),
        ("window", _List),
        ("cache", _List),
        *fields("sink cosine sine parts totals out lse", "heads width half windows chunks"),
        ("scale", c_float),
    ]


class Attention(Own):
    """The op on one build."""

    SOURCE = Path(__file__).with_suffix(".cu")
    OPS = ("fmha",)

    def __init__(self, built: build.Artefact) -> None:
        self._fmha = built.function("launch_fmha", POINTER(_Attention), c_int, c_int, c_int)

    def fmha(
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
        """Compute torch_ops fmha.fmha."""
        if not serves(q, window, window_index, cache, index, sink, cos, sin, out, lse):
            return NotImplemented
        queries, _, heads, width = q.shape
        lengths = window_index.shape[2], 0 if index is None else index.shape[2]
        floats = heads * sum(-(-length // ENTRIES) for length in lengths) * (width + 2)
        step = min(queries, max(1, ROOM // max(1, floats)))
        parts = torch.empty(step * floats, dtype=torch.float32, device=q.device)
        kinds = KINDS.index(q.dtype), KINDS.index(window.data.dtype)
        for first in range(0, queries, step):
            rows = {"q": q, "cosine": cos, "sine": sin, "out": out, "lse": lse}
            tensors = addresses(**{name: tensor[first:] for name, tensor in rows.items()}, sink=sink, parts=parts)
            given = _Attention(**tensors, heads=heads, width=width, half=cos.shape[1], scale=scale)
            given.window = _List(window.data.data_ptr(), window_index[first:].data_ptr(), lengths[0])
            if cache is not None and index is not None:
                given.cache = _List(cache.data.data_ptr(), index[first:].data_ptr(), lengths[1])
            build.check(self._fmha(given, min(step, queries - first), *kinds), "fmha")
        return None


def serves(
    q: torch.Tensor,
    window: Pages,
    window_index: torch.Tensor,
    cache: Pages | None,
    index: torch.Tensor | None,
    sink: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> bool:
    """Whether the kernels compute the call."""
    if q.dim() != 4 or (cache is None) != (index is None) or q.shape[1] != 1 or not 1 <= len(q) <= MOST_TOKENS:
        return False
    pages, lists = [window], [window_index]
    if cache is not None and index is not None:
        pages, lists = [window, cache], [window_index, index]
    heads, width = q.shape[2:]
    paged = all(p.kind == "plain" and p.width == width and p.data.dtype == window.data.dtype for p in pages)
    listed = all(ids.dim() == 3 and ids.shape[:2] == q.shape[:2] and ids.dtype == torch.int32 for ids in lists)
    kinds = q.dtype in KINDS and out.dtype == q.dtype and all(t.dtype == torch.float32 for t in (lse, sink, cos, sin))
    shapes = out.shape == q.shape and lse.shape == q.shape[:3] and sink.shape == (heads,)
    turns = cos.dim() == 2 and cos.shape == sin.shape and len(cos) == len(q) and 0 < 2 * cos.shape[1] <= width
    whole = width % 4 == 0 and width <= MOST_WIDTH and all(p.data.data_ptr() % 16 == 0 for p in pages)
    contiguous = all(tensor.is_contiguous() for tensor in (q, *lists, sink, cos, sin, out, lse))
    return heads > 0 and paged and listed and kinds and shapes and turns and whole and contiguous
