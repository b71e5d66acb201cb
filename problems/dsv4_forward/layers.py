"""Run one layer: `block`, then what it calls, in the order in which a token passes it.

    block -> site -> attention -> site -> moe; a site writes the sublayer ahead of it to the copies, reads them, norms
    attention -> query, key -> window -> compressed entries -> indexer -> fmha -> output projections
    moe -> route -> experts + shared

Everything is over N new tokens, flattened over sequences; d is the hidden size, n the number of hc copies. The
functions here make buffers, write the state and call ops; the ops do the arithmetic. Source: sections 4 and 6 to 13 of
README.md's account of DeepSeek's inference code.
"""

from dataclasses import dataclass

import torch

from problems.dsv4_forward.adapters.common import joined, sum_dtype
from problems.dsv4_forward.cache.pages import Pages
from problems.dsv4_forward.cache.state import Batch, LayerState
from problems.dsv4_forward.ops import Ops
from problems.dsv4_forward.weights.config import CSA, HCA, Config
from problems.dsv4_forward.weights.linear import Linear
from problems.dsv4_forward.weights.tree import (
    AttentionWeights,
    BlockWeights,
    CompressorWeights,
    FfnWeights,
    IndexerWeights,
    Site,
)


@dataclass(frozen=True)
class Rope:
    """freqs fp32 (r / 2,) of a layer kind; cos, sin fp32 (N, r / 2) at the tokens' positions."""

    freqs: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True)
class Context:
    """What the layers of one call share. dtype: of activations, fp32 in the oracle, else bf16."""

    config: Config
    ops: Ops
    batch: Batch
    dtype: torch.dtype
    quantised_index: bool  # indexer queries and keys go through Hadamard and FP4

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Make an unwritten tensor on the batch's device, of activations unless `dtype` says otherwise."""
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.batch.tokens.device)

    def linear(self, x: torch.Tensor, w: Linear) -> torch.Tensor:
        """Return x w^T: x (N, k) -> (N, n)."""
        out = self.empty(len(x), w.n)
        self.ops.linear(x, w, out)
        return out

    def two_linears(self, x: torch.Tensor, first: Linear, second: Linear) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x first^T and x second^T, one behind the other in memory where their sizes are multiples of 64."""
        sizes = [len(x) * w.n for w in (first, second)]
        apart = -(-sizes[0] // 64) * 64
        room = self.empty(apart + sizes[1])
        outs = room[: sizes[0]].view(len(x), first.n), room[apart:].view(len(x), second.n)
        self.ops.two_linears(x, first, second, *outs)
        return outs

    def norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Return x, normed over its last axis."""
        out = torch.empty_like(x, dtype=self.dtype)
        self.ops.rms_norm(x, weight, self.config.rms_norm_eps, out)
        return out


@dataclass(frozen=True)
class Pending:
    """What a sublayer returned, y (N, d), or y and second (N, d), to be added up; and the hc copies (N, n, d) to which
    it is still to be written, with which weights: post fp32 (N, n), comb fp32 (N, n, n).
    """

    y: torch.Tensor
    second: torch.Tensor | None
    copies: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor


def block(
    residual: torch.Tensor | Pending, w: BlockWeights, state: LayerState, rope: Rope, ctx: Context
) -> Pending:  # fmt: skip
    """Run one layer: attention, then experts; each reads the hc copies (N, n, d) behind the sublayer ahead of it.

    residual: the copies, or what is still to be written to them. -> what the experts returned, still to be written.
    """
    u, *mixing = _site(residual, w.hc_attn, w.attn_norm, ctx)
    middle = Pending(attention(u, w.attn, state, rope, ctx), None, *mixing)
    u, *mixing = _site(middle, w.hc_ffn, w.ffn_norm, ctx)
    return Pending(*moe(u, w.ffn, ctx), *mixing)


def _site(
    residual: torch.Tensor | Pending, site: Site, norm: torch.Tensor, ctx: Context
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Write what is pending to the copies, and mix them to the input of a sublayer.

    -> u, normed (N, d); the copies (N, n, d); post fp32 (N, n) and comb fp32 (N, n, n), with which the sublayer's
    output is written to them.
    """
    copies = residual.copies if isinstance(residual, Pending) else residual
    count, n, d = copies.shape
    u, post, comb = ctx.empty(count, d), *(ctx.empty(count, *shape, dtype=torch.float32) for shape in ((n,), (n, n)))
    weights = site.fn, site.base, site.scale
    if not isinstance(residual, Pending):
        mixed = torch.empty_like(u)
        ctx.ops.mhc_pre(copies, *weights, ctx.config, mixed, post, comb)
        ctx.ops.rms_norm(mixed, norm, ctx.config.rms_norm_eps, u)
        return u, copies, post, comb
    new = torch.empty_like(copies)
    given = residual.y, residual.second, copies, residual.post, residual.comb
    ctx.ops.mhc_site(*given, *weights, norm, ctx.config, new, u, post, comb)
    return u, new, post, comb


def attention(u: torch.Tensor, w: AttentionWeights, state: LayerState, rope: Rope, ctx: Context) -> torch.Tensor:
    """Write the tokens' keys and the entries that they complete, then attend. u: normed (N, d) -> (N, d)."""
    cfg, ops, batch = ctx.config, ctx.ops, ctx.batch
    n_tokens, heads, width = len(u), cfg.num_attention_heads, cfg.head_dim
    lowered, key = ctx.two_linears(u, w.wq_a, w.wkv)
    latent = ctx.norm(lowered, w.q_norm)
    query = ctx.empty(n_tokens, heads, width)
    raised = ctx.linear(latent, w.wq_b).view(n_tokens, heads, width)
    ops.norm_rotate(raised, None, cfg.rms_norm_eps, rope.cos, rope.sin, query)
    ops.write_key(key, w.kv_norm, cfg.rms_norm_eps, rope.cos, rope.sin, state.window, batch.window_target)
    index = _compressed(u, latent, w, state, rope, ctx)
    out = ctx.empty(n_tokens, 1, heads, width)
    lse = ctx.empty(n_tokens, 1, heads, dtype=torch.float32)
    ops.fmha(
        query.unsqueeze(1), state.window, batch.window_index.unsqueeze(1),
        None if index is None else state.cache, None if index is None else index.unsqueeze(1),
        w.sink, width**-0.5, out, lse,
    )  # fmt: skip
    out = out.squeeze(1)
    ops.rotate(out, rope.cos, rope.sin, out, inverse=True)
    grouped = out.view(n_tokens, cfg.o_groups, heads // cfg.o_groups * width)
    low = ctx.empty(n_tokens, cfg.o_groups, cfg.o_lora_rank)
    ops.grouped_linear(grouped, w.wo_a, low)
    return ctx.linear(low.view(n_tokens, -1), w.wo_b)


def _compressed(
    u: torch.Tensor, latent: torch.Tensor, w: AttentionWeights, state: LayerState, rope: Rope, ctx: Context
) -> torch.Tensor | None:
    """Write the compressed entries that the tokens complete. -> int32 (N, entries) rows of the cache to attend to.

    None: the layer has no compressed entries, or there are none yet.
    """
    ratio, batch = state.ratio, ctx.batch
    if not ratio:
        return None
    compressors = [w.compressor] if w.indexer is None else [w.indexer.compressor, w.compressor]
    matrices = [one.project for one in compressors]
    projected = [ctx.empty(len(u), len(matrix), dtype=torch.float32) for matrix in matrices]
    scores = ratio == CSA and batch.entries[ratio] and batch.csa_index is None  # else all visible entries are selected
    if scores:
        matrices.append(w.indexer.weights_proj)
        projected.append(ctx.empty(len(u), ctx.config.index_n_heads, dtype=torch.float32))
    ctx.ops.matmuls(u, matrices, projected)
    if w.indexer is not None:
        index, keys = w.indexer.compressor, state.index_keys
        _compress(projected[0], index, state.index_tail, keys, ctx.quantised_index, ratio, rope, ctx)
    _compress(projected[len(compressors) - 1], w.compressor, state.tail, state.cache, False, ratio, rope, ctx)
    if not batch.entries[ratio]:
        return None
    if ratio == HCA:
        return batch.hca_index
    return _select(latent, projected[-1], w.indexer, state, rope, ctx) if scores else batch.csa_index


def _compress(
    projected: torch.Tensor, w: CompressorWeights, tail: torch.Tensor, pages: Pages, hadamard: bool, ratio: int,
    rope: Rope, ctx: Context,
) -> None:  # fmt: skip
    """Write the tokens to the tail, and the entries that they complete to the pages, through Hadamard if so. projected:
    fp32, the tokens' products with w.project.
    """
    batch = ctx.batch
    ctx.ops.write_entry(
        projected, w.ape, w.norm, batch.position, batch.sequence, tail, batch.emit[ratio], ratio, ratio == CSA,
        rope.freqs, ctx.config.rms_norm_eps, ctx.dtype, pages, batch.target[ratio], hadamard,
    )  # fmt: skip


def _select(
    latent: torch.Tensor, weights: torch.Tensor, w: IndexerWeights, state: LayerState, rope: Rope, ctx: Context
) -> torch.Tensor:
    """Run the indexer. weights (N, heads): of the heads. -> int32 (N, index_topk) rows of the cache, -1 where fewer
    entries are visible.
    """
    cfg, batch, ops = ctx.config, ctx.batch, ctx.ops
    n_tokens, k, heads, width = len(latent), cfg.index_topk, cfg.index_n_heads, cfg.index_head_dim
    query = ctx.linear(latent, w.wq_b).view(n_tokens, heads, width)
    ops.index_query(query, rope.cos, rope.sin, ctx.quantised_index, query)
    places = ctx.empty(n_tokens, k, dtype=torch.int32)
    for start, stop, row, rows, count in _groups(batch):
        part, shape = slice(start, stop), (rows, count)
        ops.choose(
            query[part].view(*shape, heads, width), weights[part].view(*shape, heads), (width * heads) ** -0.5,
            state.index_keys, batch.rows[row : row + rows], batch.visible[CSA][part].view(shape), batch.entries[CSA],
            places[part].view(*shape, k),
        )  # fmt: skip
    return places


def _groups(batch: Batch) -> list[tuple[int, int, int, int, int]]:
    """Return runs of sequences with equally many tokens: (first token, past the last, first sequence, sequences, tokens
    of each).
    """
    found: list[tuple[int, int, int, int, int]] = []
    for row, (start, count, _) in enumerate(batch.segments):
        if found and found[-1][4] == count:
            first, _, first_row, rows, _ = found[-1]
            found[-1] = (first, start + count, first_row, rows + 1, count)
        else:
            found.append((start, start + count, row, 1, count))
    return found


def write_copies(pending: Pending, ctx: Context) -> torch.Tensor:
    """Return the copies (N, n, d) with what is pending written to them."""
    out = torch.empty_like(pending.copies)
    rest = pending.copies, pending.post, pending.comb, out
    if pending.second is None:
        ctx.ops.mhc_post(pending.y, *rest)
    else:
        ctx.ops.mhc_post_sum(pending.y, pending.second, *rest)
    return out


def moe(u: torch.Tensor, w: FfnWeights, ctx: Context) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the routed experts' sum and the shared expert, to be added up; or their sum and None. u: normed (N, d) ->
    (N, d) each, fp32 but where a kernel has rounded it to bf16.
    """
    cfg, ops = ctx.config, ctx.ops
    ids = ctx.empty(len(u), cfg.num_experts_per_tok, dtype=torch.int32)
    gates = ctx.empty(len(u), cfg.num_experts_per_tok, dtype=torch.float32)
    router = w.router
    ops.route(u, router.weight, router.bias, router.table, ctx.batch.tokens, cfg, ids, gates)
    if joined(ops.all_experts, w.w13, u):
        outs = (ctx.empty(*u.shape, dtype=u.dtype),)
    else:
        dtypes = sum_dtype(ops.experts, w.w13, u), sum_dtype(ops.shared, w.shared_w13, u)
        outs = tuple(ctx.empty(*u.shape, dtype=dtype) for dtype in dtypes)
    weights = w.w13, w.w2, w.shared_w13, w.shared_w2
    ops.all_experts(u, ids, gates, *weights, cfg.swiglu_limit, outs=outs)
    return outs[0], outs[1] if len(outs) == 2 else None


def head(copies: torch.Tensor, site: Site, norm: torch.Tensor, weight: torch.Tensor, ctx: Context) -> torch.Tensor:
    """Mix the copies behind the last layer, norm them, multiply by the head. (M, n, d) -> logits fp32 (M, vocab)."""
    mixed = ctx.empty(len(copies), ctx.config.hidden_size)
    ctx.ops.mhc_head(copies, site.fn, site.base, site.scale, ctx.config, mixed)
    out = ctx.empty(len(copies), ctx.config.vocab_size, dtype=torch.float32)
    ctx.ops.matmul(ctx.norm(mixed, norm), weight, out)
    return out
