"""Ops that span others: each function returns the chain of the ops that it is given, one after the other.

A kernel that computes several steps in one launch fills such an op. Without one the op is the chain of what fills its
parts, and its reference is the chain of their references. Values between the steps have the dtype that they would have
if each step were called by itself.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from problems.dsv4_forward.cache.pages import Pages


class Parts(Protocol):
    """The ops that chains are made of: ops.Ops has them, for one."""

    rms_norm: Callable[..., None]
    rotate: Callable[..., None]
    compress: Callable[..., None]
    write: Callable[..., None]
    index_scores: Callable[..., None]
    select: Callable[..., None]


def norm_rotate(parts: Parts) -> Callable[..., None]:
    """Return the op that norms vectors and rotates them."""

    def run(
        x: torch.Tensor, weight: torch.Tensor | None, eps: float, cos: torch.Tensor, sin: torch.Tensor,
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        """Write x, normed and rotated, to out. x, out: (N, ..., D), of the dtypes that rms_norm and rotate take."""
        parts.rms_norm(x, weight, eps, out)
        parts.rotate(out, cos, sin, out)

    return run


def write_key(parts: Parts) -> Callable[..., None]:
    """Return the op that norms keys, rotates them and writes them to the pages."""

    def run(
        x: torch.Tensor, weight: torch.Tensor, eps: float, cos: torch.Tensor, sin: torch.Tensor, pages: Pages,
        index: torch.Tensor,
    ) -> None:  # fmt: skip
        """Write row i of x (N, D), normed and rotated, to row index[i] of the pages. index: int64 (N,)."""
        key = torch.empty_like(x)
        parts.rms_norm(x, weight, eps, key)
        parts.rotate(key, cos, sin, key)
        parts.write(key, pages, index)

    return run


def write_entry(parts: Parts) -> Callable[..., None]:
    """Return the op that stores tokens in a compressor's ring, and writes the entries that they complete."""

    def run(
        projected: torch.Tensor, ape: torch.Tensor, norm_weight: torch.Tensor, position: torch.Tensor,
        sequence: torch.Tensor, tail: torch.Tensor, emit: torch.Tensor, ratio: int, overlap: bool, freqs: torch.Tensor,
        eps: float, dtype: torch.dtype, pages: Pages, index: torch.Tensor, hadamard: bool = False,
    ) -> None:  # fmt: skip
        """Write the entry that ends at token emit[i] to row index[i] of the pages. index: int64 (Em,); hadamard: as
        write; the others as compress. A token of `emit` that ends no window may write to its row, or not.
        """
        pooled = torch.empty(len(emit), pages.width, dtype=dtype, device=projected.device)
        parts.compress(
            projected, ape, norm_weight, position, sequence, tail, emit, ratio, overlap, freqs, eps, dtype, pooled
        )
        if len(emit):
            parts.write(pooled, pages, index, hadamard)

    return run


def choose(parts: Parts) -> Callable[..., None]:
    """Return the op that scores the entries that queries see, and finds the rows of the best."""

    def run(
        q: torch.Tensor, weights: torch.Tensor, keys: Pages, table: torch.Tensor, visible: torch.Tensor, entries: int,
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        """Write the rows of the pages that hold the k best of the first visible[b, s] entries, then -1 where fewer.

        q, weights, keys, table, entries: as index_scores; visible: int64 (B, S), at most entries; out: int32 (B, S, k),
        in any order. Attention's entries lie in the rows of their keys.
        """
        scores = torch.empty(*out.shape[:2], entries, dtype=torch.float32, device=out.device)
        parts.index_scores(q, weights, keys, table, entries, scores)
        ids = torch.empty_like(out)
        parts.select(scores, visible, ids)
        out.copy_(rows_of(ids, table, keys.per_page))

    return run


def rows_of(ids: torch.Tensor, table: torch.Tensor, per_page: int) -> torch.Tensor:
    """ids: int32 (B, S, k), entries by number within their sequence, -1 for none; table: int32 (B, blocks) -> int32
    (B, S, k), rows of the pages; -1 stays.
    """
    owner = torch.arange(len(ids), device=ids.device).view(-1, 1, 1)
    # Block -1, of entry -1, is the last of the row: read, and masked in the end.
    page = table[owner, ids.div(per_page, rounding_mode="floor").long()]
    return torch.where(ids < 0, -1, page * per_page + ids % per_page)
