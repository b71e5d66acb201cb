"""Run one layer: `block`, then what it calls, in the order in which a token passes it.

    block -> read copies -> norm -> attention -> write copies -> read copies -> norm -> moe -> write copies
    attention -> query, key -> window -> compressed entries -> indexer -> fmha -> output projections
    moe -> route -> experts + shared

Everything is over N new tokens, flattened over sequences; d is the hidden size, n the number of hc copies. The
functions here make buffers, write the state and call ops; the ops do the arithmetic. Source: sections 4 and 6 to 13 of
README.md's account of DeepSeek's inference code.
"""

from dataclasses import dataclass

import torch

from problems.dsv4_forward.adapters.common import sum_dtype
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

    def norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Return x, normed over its last axis."""
        out = torch.empty_like(x, dtype=self.dtype)
        self.ops.rms_norm(x, weight, self.config.rms_norm_eps, out)
        return out


def block(copies: torch.Tensor, w: BlockWeights, state: LayerState, rope: Rope, ctx: Context) -> torch.Tensor:
    """Run one layer: attention, then experts; each reads the hc copies and writes them. (N, n, d) -> (N, n, d)."""
    u, post, comb = _read_copies(copies, w.hc_attn, ctx)
    y = attention(ctx.norm(u, w.attn_norm), w.attn, state, rope, ctx)
    copies = _write_copies(y, copies, post, comb, ctx)
    u, post, comb = _read_copies(copies, w.hc_ffn, ctx)
    routed, shared = moe(ctx.norm(u, w.ffn_norm), w.ffn, ctx)
    out = torch.empty_like(copies)
    ctx.ops.mhc_post_sum(routed, shared, copies, post, comb, out)
    return out


def _read_copies(copies: torch.Tensor, site: Site, ctx: Context) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mix the copies (N, n, d) to the input of a sublayer, u (N, d).

    -> u; post fp32 (N, n) and comb fp32 (N, n, n), with which _write_copies writes the sublayer's output.
    """
    n = ctx.config.hc_mult
    u = ctx.empty(len(copies), ctx.config.hidden_size)
    post = ctx.empty(len(copies), n, dtype=torch.float32)
    comb = ctx.empty(len(copies), n, n, dtype=torch.float32)
    ctx.ops.mhc_pre(copies, site.fn, site.base, site.scale, ctx.config, u, post, comb)
    return u, post, comb


def attention(u: torch.Tensor, w: AttentionWeights, state: LayerState, rope: Rope, ctx: Context) -> torch.Tensor:
    """Write the tokens' keys and the entries that they complete, then attend. u: normed (N, d) -> (N, d)."""
    cfg, ops, batch = ctx.config, ctx.ops, ctx.batch
    n_tokens, heads, width = len(u), cfg.num_attention_heads, cfg.head_dim
    latent = ctx.norm(ctx.linear(u, w.wq_a), w.q_norm)
    query = ctx.empty(n_tokens, heads, width)
    raised = ctx.linear(latent, w.wq_b).view(n_tokens, heads, width)
    ops.norm_rotate(raised, None, cfg.rms_norm_eps, rope.cos, rope.sin, query)
    key = ctx.linear(u, w.wkv)
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
        projected.append(ctx.empty(len(u), ctx.config.index_n_heads))
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
    n_tokens, entries, k = len(latent), batch.entries[CSA], cfg.index_topk
    heads, width = cfg.index_n_heads, cfg.index_head_dim
    query = ctx.linear(latent, w.wq_b).view(n_tokens, heads, width)
    ops.index_query(query, rope.cos, rope.sin, ctx.quantised_index, query)
    scores = ctx.empty(n_tokens, entries, dtype=torch.float32)
    chosen, places = (ctx.empty(n_tokens, k, dtype=torch.int32) for _ in range(2))
    for start, stop, row, rows, count in _groups(batch):
        part, shape, table = slice(start, stop), (rows, count), batch.rows[row : row + rows]
        scored = scores[part].view(*shape, entries)
        ops.index_scores(
            query[part].view(*shape, heads, width), weights[part].view(*shape, heads), (width * heads) ** -0.5,
            state.index_keys, table, entries, scored,
        )  # fmt: skip
        ops.select_places(
            scored, batch.visible[CSA][part].view(shape), table, state.cache.per_page, chosen[part].view(*shape, k),
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


def _write_copies(
    y: torch.Tensor, copies: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, ctx: Context
) -> torch.Tensor:
    """Return the copies (N, n, d) after a sublayer that returned y (N, d); post, comb: from _read_copies."""
    out = torch.empty_like(copies)
    ctx.ops.mhc_post(y, copies, post, comb, out)
    return out


def moe(u: torch.Tensor, w: FfnWeights, ctx: Context) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the routed experts' sum and the shared expert, to be added up. u: normed (N, d) -> (N, d) each, fp32 but
    where a kernel has rounded it to bf16.
    """
    cfg, ops = ctx.config, ctx.ops
    ids = ctx.empty(len(u), cfg.num_experts_per_tok, dtype=torch.int32)
    gates = ctx.empty(len(u), cfg.num_experts_per_tok, dtype=torch.float32)
    router = w.router
    ops.route(u, router.weight, router.bias, router.table, ctx.batch.tokens, cfg, ids, gates)
    routed = ctx.empty(*u.shape, dtype=sum_dtype(ops.experts, w.w13, u))
    shared = ctx.empty(*u.shape, dtype=sum_dtype(ops.shared, w.shared_w13, u))
    ops.experts(u, ids, gates, w.w13, w.w2, cfg.swiglu_limit, routed)
    ops.shared(u, w.shared_w13, w.shared_w2, cfg.swiglu_limit, shared)
    return routed, shared


def head(copies: torch.Tensor, site: Site, norm: torch.Tensor, weight: torch.Tensor, ctx: Context) -> torch.Tensor:
    """Mix the copies behind the last layer, norm them, multiply by the head. (M, n, d) -> logits fp32 (M, vocab)."""
    mixed = ctx.empty(len(copies), ctx.config.hidden_size)
    ctx.ops.mhc_head(copies, site.fn, site.base, site.scale, ctx.config, mixed)
    out = ctx.empty(len(copies), ctx.config.vocab_size, dtype=torch.float32)
    ctx.ops.matmul(ctx.norm(mixed, norm), weight, out)
    return out
