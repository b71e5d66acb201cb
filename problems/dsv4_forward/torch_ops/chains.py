"""Ops that span others: each function returns the chain of the ops that it is given, one after the other.

A kernel that computes several steps in one launch fills such an op. Without one the op is the chain of what fills its
parts, and its reference is the chain of their references. Values between the steps have the dtype that they would have
if each step were called by itself.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from problems.dsv4_forward.cache.pages import Pages
from problems.dsv4_forward.cache.plan import Plan
from problems.dsv4_forward.weights import formats
from problems.dsv4_forward.weights.config import Config
from problems.dsv4_forward.weights.linear import Linear


class Parts(Protocol):
    """The ops that chains are made of: ops.Ops has them, for one."""

    plan: Callable[..., None]
    embed: Callable[..., None]
    mhc_post: Callable[..., None]
    mhc_post_sum: Callable[..., None]
    linear: Callable[..., None]
    matmul: Callable[..., None]
    rms_norm: Callable[..., None]
    mhc_pre: Callable[..., None]
    rotate: Callable[..., None]
    compress: Callable[..., None]
    write: Callable[..., None]
    norm_rotate: Callable[..., None]
    write_key: Callable[..., None]
    write_entry: Callable[..., None]
    index_query: Callable[..., None]
    index_scores: Callable[..., None]
    select: Callable[..., None]
    locate: Callable[..., None]
    fmha: Callable[..., None]
    experts: Callable[..., None]
    shared: Callable[..., None]


def start(parts: Parts) -> Callable[..., None]:
    """Return the op that begins a pass: the index lists, then embeddings and angles."""

    def run(
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
        parts.plan(given, numbers, lists)
        parts.embed(tokens, weight, given.views(numbers, lists).position, freqs, copies, cos, sin)

    return run


def mhc_post_sum(parts: Parts) -> Callable[..., None]:
    """Return the op that writes a sublayer's output which comes as two addends."""

    def run(
        first: torch.Tensor,
        second: torch.Tensor,
        copies: torch.Tensor,
        post: torch.Tensor,
        comb: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Do as mhc_post with y = first + second, an fp32 sum that is rounded once, to the dtype of copies.

        first, second: fp32 or bf16 (N, d). ValueError as mhc_post.
        """
        y = torch.empty(first.shape, dtype=copies.dtype, device=copies.device)
        parts.mhc_post(torch.add(first.float(), second.float(), out=y), copies, post, comb, out)

    return run


def two_linears(parts: Parts) -> Callable[..., None]:
    """Return the op that multiplies one input by two matrices."""

    def run(x: torch.Tensor, first: Linear, second: Linear, first_out: torch.Tensor, second_out: torch.Tensor) -> None:
        """Do linear(x, first, first_out) and linear(x, second, second_out). ValueError as linear."""
        parts.linear(x, first, first_out)
        parts.linear(x, second, second_out)

    return run


def norm_linears(parts: Parts) -> Callable[..., None]:
    """Return the op that norms vectors and multiplies them by matrices."""

    def run(
        x: torch.Tensor, weight: torch.Tensor, eps: float, matrices: Sequence[Linear], outs: Sequence[torch.Tensor]
    ) -> None:
        """Do rms_norm(x, weight, eps, normed), of the dtype of x, and linear(normed, matrices[i], outs[i]) for each i.
        ValueError: another number of outs, or as these.
        """
        normed = torch.empty_like(x)
        parts.rms_norm(x, weight, eps, normed)
        for matrix, out in zip(matrices, outs, strict=True):
            parts.linear(normed, matrix, out)

    return run


def matmuls(parts: Parts) -> Callable[..., None]:
    """Return the op that multiplies the same tokens by several plain matrices."""

    def run(x: torch.Tensor, weights: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        """Write outs[i] = x @ weights[i]^T, each as matmul. ValueError: another number of outs, or as matmul."""
        for weight, out in zip(weights, outs, strict=True):
            parts.matmul(x, weight, out)

    return run


def mhc_site(parts: Parts) -> Callable[..., None]:
    """Return the op that lies between two sublayers: it writes one's output to the hc copies, and reads and norms the
    next one's input.
    """

    def run(
        y: torch.Tensor,
        second: torch.Tensor | None,
        copies: torch.Tensor,
        post: torch.Tensor,
        comb: torch.Tensor,
        fn: torch.Tensor,
        base: torch.Tensor,
        scale: torch.Tensor,
        weight: torch.Tensor,
        cfg: Config,
        new_copies: torch.Tensor,
        out: torch.Tensor,
        new_post: torch.Tensor,
        new_comb: torch.Tensor,
    ) -> None:
        """Write new_copies (N, n, d) as mhc_post of y, or where there is a second addend, as mhc_post_sum of both; then
        new_post and new_comb as mhc_pre of these, and out (N, d), what mhc_pre mixes, normed with weight (d,).
        """
        if second is None:
            parts.mhc_post(y, copies, post, comb, new_copies)
        else:
            parts.mhc_post_sum(y, second, copies, post, comb, new_copies)
        u = torch.empty_like(out)
        parts.mhc_pre(new_copies, fn, base, scale, cfg, u, new_post, new_comb)
        parts.rms_norm(u, weight, cfg.rms_norm_eps, out)

    return run


def norm_rotate(parts: Parts) -> Callable[..., None]:
    """Return the op that norms vectors and rotates them."""

    def run(
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        cos: torch.Tensor,
        sin: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Write x, normed and rotated, to out. x, out: (N, ..., D), of the dtypes that rms_norm and rotate take."""
        parts.rms_norm(x, weight, eps, out)
        parts.rotate(out, cos, sin, out)

    return run


def write_key(parts: Parts) -> Callable[..., None]:
    """Return the op that norms keys, rotates them and writes them to the pages."""

    def run(
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        cos: torch.Tensor,
        sin: torch.Tensor,
        pages: Pages,
        index: torch.Tensor,
    ) -> None:
        """Write row i of x (N, D), normed and rotated, to row index[i] of the pages. index: int64 (N,)."""
        key = torch.empty_like(x)
        parts.rms_norm(x, weight, eps, key)
        parts.rotate(key, cos, sin, key)
        parts.write(key, pages, index)

    return run


def write_entry(parts: Parts) -> Callable[..., None]:
    """Return the op that stores tokens in a compressor's ring, and writes the entries that they complete."""

    def run(
        projected: torch.Tensor,
        ape: torch.Tensor,
        norm_weight: torch.Tensor,
        position: torch.Tensor,
        sequence: torch.Tensor,
        tail: torch.Tensor,
        emit: torch.Tensor,
        ratio: int,
        overlap: bool,
        freqs: torch.Tensor,
        eps: float,
        dtype: torch.dtype,
        pages: Pages,
        index: torch.Tensor,
        hadamard: bool = False,
    ) -> None:
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


def index_query(parts: Parts) -> Callable[..., None]:
    """Return the op that makes the indexer's queries: rotated, and through Hadamard and FP4."""

    def run(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, quantise: bool, out: torch.Tensor) -> None:
        """Write x, rotated, to out; quantise: through Hadamard and as MXFP4 holds it, rounded to the dtype of x before.

        x, out: (N, heads, width), as rotate has them; out may be x.
        """
        turned = torch.empty_like(x)
        parts.rotate(x, cos, sin, turned)
        out.copy_(formats.round_trip_fp4(formats.hadamard(turned)) if quantise else turned)

    return run


def layer_rows(parts: Parts) -> Callable[..., None]:
    """Return the op that makes all rows of a layer behind its projections: queries, keys, the entries of every
    compressor, and the indexer's queries.
    """

    def run(queries: dict, key: dict, compressed: Sequence[dict], index: dict | None = None) -> None:
        """Do norm_rotate(**queries), write_key(**key), write_entry(**one) for each of compressed, and
        index_query(**index), in any order: no output of one is an input or output of another. ValueError as these.
        """
        parts.norm_rotate(**queries)
        parts.write_key(**key)
        for one in compressed:
            parts.write_entry(**one)
        if index is not None:
            parts.index_query(**index)

    return run


def choose(parts: Parts) -> Callable[..., None]:
    """Return the op that scores the entries that queries see, and finds the places of the best."""

    def run(
        q: torch.Tensor,
        weights: torch.Tensor,
        scale: float,
        keys: Pages,
        table: torch.Tensor,
        visible: torch.Tensor,
        entries: int,
        out: torch.Tensor,
    ) -> None:
        """Write the places of the k best of the first visible[b, s] entries, in any order, then -1 where fewer.

        q, weights, scale, keys, table, entries: as index_scores, scale above 0; visible: as select; out: int32
        (B, S, k). Attention's entries lie at the places of their keys.
        """
        scores = torch.empty(*out.shape[:2], entries, dtype=torch.float32, device=out.device)
        parts.index_scores(q, weights, scale, keys, table, entries, scores)
        ids = torch.empty_like(out)
        parts.select(scores, visible, ids)
        parts.locate(ids, table, keys.per_page, out)

    return run


def fmha_rotate(parts: Parts) -> Callable[..., None]:
    """Return the op that attends, and rotates back what it returns: keys, which are values too, are rotated."""

    def run(
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
        """Write out (N, S, H, D), rounded, then rotated back by angles cos, sin (N, r / 2), and lse. Else as fmha."""
        parts.fmha(q, window, window_index, cache, index, sink, scale, out, lse)
        parts.rotate(out, cos, sin, out, inverse=True)

    return run


def all_experts(parts: Parts) -> Callable[..., None]:
    """Return the op that adds up the routed experts and the one of every token."""

    def run(
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        w13: Linear,
        w2: Linear,
        shared_w13: Linear,
        shared_w2: Linear,
        limit: float,
        out: torch.Tensor,
    ) -> None:
        """Write the fp32 sum of what experts(x, ids, weights, w13, w2, limit, ...) and shared(x, shared_w13, shared_w2,
        limit, ...) write, rounded once, to out, fp32 or bf16 (N, d). ValueError as these.
        """
        routed, shared = (torch.empty(out.shape, dtype=torch.float32, device=out.device) for _ in range(2))
        parts.experts(x, ids, weights, w13, w2, limit, routed)
        parts.shared(x, shared_w13, shared_w2, limit, shared)
        out.copy_(routed.add_(shared))

    return run
