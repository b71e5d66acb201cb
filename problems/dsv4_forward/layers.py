"""Attention and mixture-of-experts sublayers of one block: which kernel gets what, in which order.

Everything is over N new tokens, flattened over sequences. Arithmetic is the kernels' own; here buffers are made, state
is written and slots are called. Source: sections 6 to 13 of DeepSeek's inference code as described in README.md.
"""

from dataclasses import dataclass

import torch

from problems.dsv4_forward.cache.state import Batch, LayerState
from problems.dsv4_forward.ops import Kernels
from problems.dsv4_forward.weights import formats
from problems.dsv4_forward.weights.config import CSA, HCA, Config
from problems.dsv4_forward.weights.linear import Linear
from problems.dsv4_forward.weights.tree import AttentionWeights, CompressorWeights, FfnWeights, IndexerWeights


@dataclass(frozen=True)
class Rope:
    """freqs fp32 (r / 2,) of a layer kind; cos, sin fp32 (N, r / 2) at the tokens' positions."""

    freqs: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True)
class Context:
    """What the sublayers of one call share. dtype: of activations, fp32 in the oracle, else bf16."""

    config: Config
    kernels: Kernels
    batch: Batch
    dtype: torch.dtype
    quantised_index: bool  # indexer queries and keys go through Hadamard and FP4

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.batch.tokens.device)

    def linear(self, x: torch.Tensor, w: Linear) -> torch.Tensor:
        """x (N, k) -> (N, n)."""
        out = self.empty(len(x), w.n)
        self.kernels.linear(x, w, out)
        return out

    def norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        out = torch.empty_like(x, dtype=self.dtype)
        self.kernels.rms_norm(x, weight, self.config.rms_norm_eps, out)
        return out


def attention(u: torch.Tensor, w: AttentionWeights, state: LayerState, rope: Rope, ctx: Context) -> torch.Tensor:
    """u: normed input (N, d) -> (N, d). Writes the tokens' keys and what they complete into `state`, then attends."""
    cfg, kernels, batch = ctx.config, ctx.kernels, ctx.batch
    n_tokens, heads, width = len(u), cfg.num_attention_heads, cfg.head_dim
    latent = ctx.norm(ctx.linear(u, w.wq_a), w.q_norm)
    query = ctx.norm(ctx.linear(latent, w.wq_b).view(n_tokens, heads, width), None)
    kernels.rotate(query, rope.cos, rope.sin, query)
    key = ctx.norm(ctx.linear(u, w.wkv), w.kv_norm)
    kernels.rotate(key, rope.cos, rope.sin, key)
    state.window.write(batch.window_slot, key)
    index = _compressed(u, latent, w, state, rope, ctx)
    out = ctx.empty(n_tokens, 1, heads, width)
    lse = ctx.empty(n_tokens, 1, heads, dtype=torch.float32)
    kernels.fmha(
        query.unsqueeze(1), state.window, batch.window_index.unsqueeze(1),
        None if index is None else state.cache, None if index is None else index.unsqueeze(1),
        w.sink, width**-0.5, out, lse,
    )  # fmt: skip
    out = out.squeeze(1)
    kernels.rotate(out, rope.cos, rope.sin, out, inverse=True)
    grouped = out.view(n_tokens, cfg.o_groups, heads // cfg.o_groups * width)
    low = ctx.empty(n_tokens, cfg.o_groups, cfg.o_lora_rank)
    kernels.grouped_linear(grouped, w.wo_a, low)
    return ctx.linear(low.view(n_tokens, -1), w.wo_b)


def moe(u: torch.Tensor, w: FfnWeights, ctx: Context) -> torch.Tensor:
    """u: normed input (N, d) -> routed experts plus the shared one, (N, d)."""
    cfg, kernels = ctx.config, ctx.kernels
    ids = ctx.empty(len(u), cfg.num_experts_per_tok, dtype=torch.int32)
    gates = ctx.empty(len(u), cfg.num_experts_per_tok, dtype=torch.float32)
    router = w.router
    kernels.route(u, router.weight, router.bias, router.table, ctx.batch.tokens, cfg, ids, gates)
    routed, shared = torch.empty_like(u), torch.empty_like(u)
    kernels.experts(u, ids, gates, w.w13, w.w2, cfg.swiglu_limit, routed)
    kernels.shared(u, w.shared_w13, w.shared_w2, cfg.swiglu_limit, shared)
    return routed.add_(shared)


def _compressed(
    u: torch.Tensor, latent: torch.Tensor, w: AttentionWeights, state: LayerState, rope: Rope, ctx: Context
) -> torch.Tensor | None:
    """Bring the layer's compressed entries up to date. -> int32 (N, n) entries to attend to, None if there are none."""
    ratio, batch = state.ratio, ctx.batch
    if not ratio:
        return None
    if ratio == CSA:
        keys = _compress(u, w.indexer.compressor, state.index_tail, ratio, ctx.config.index_head_dim, rope, ctx)
        if len(keys):
            state.index_keys.write(batch.target[ratio], formats.hadamard(keys) if ctx.quantised_index else keys)
    entries = _compress(u, w.compressor, state.tail, ratio, ctx.config.head_dim, rope, ctx)
    if len(entries):
        state.cache.write(batch.target[ratio], entries)
    if not batch.entries[ratio]:
        return None
    if ratio == HCA:
        return batch.hca_index
    return batch.locate(_select(u, latent, w.indexer, state, rope, ctx))


def _compress(
    u: torch.Tensor, w: CompressorWeights, tail: torch.Tensor, ratio: int, width: int, rope: Rope, ctx: Context
) -> torch.Tensor:
    """Write the tokens to the tail. -> the entries that they complete, (Em, width)."""
    batch, kernels = ctx.batch, ctx.kernels
    projected = ctx.empty(len(u), len(w.project), dtype=torch.float32)
    kernels.matmul(u, w.project, projected)
    out = ctx.empty(len(batch.emit[ratio]), width)
    kernels.compress(
        projected, w.ape, w.norm, batch.position, batch.sequence, tail, batch.emit[ratio], ratio, ratio == CSA,
        rope.freqs, ctx.config.rms_norm_eps, ctx.dtype, out,
    )  # fmt: skip
    return out


def _select(
    u: torch.Tensor, latent: torch.Tensor, w: IndexerWeights, state: LayerState, rope: Rope, ctx: Context
) -> torch.Tensor:
    """The indexer: int32 (N, k) entries by number, -1 where fewer are visible."""
    cfg, batch, kernels = ctx.config, ctx.batch, ctx.kernels
    n_tokens, entries, visible = len(u), batch.entries[CSA], batch.visible[CSA]
    if entries <= cfg.index_topk:  # every visible entry is selected: nothing to score
        every = torch.arange(entries, device=u.device, dtype=torch.int32)
        return torch.where(every < visible.unsqueeze(1), every, -1)
    heads, width = cfg.index_n_heads, cfg.index_head_dim
    query = ctx.linear(latent, w.wq_b).view(n_tokens, heads, width)
    kernels.rotate(query, rope.cos, rope.sin, query)
    if ctx.quantised_index:
        query = formats.round_trip_fp4(formats.hadamard(query), 32)
    weights = ctx.empty(n_tokens, heads)
    kernels.matmul(u, w.weights_proj, weights)
    weights = weights.float().mul_((width * heads) ** -0.5)
    chosen = ctx.empty(n_tokens, cfg.index_topk, dtype=torch.int32)
    scores = ctx.empty(n_tokens, entries, dtype=torch.float32)
    for start, stop, row, rows, count in _groups(batch):
        part = slice(start, stop)
        shape = (rows, count)
        scored = scores[part].view(*shape, entries)
        kernels.index_scores(
            query[part].view(*shape, heads, width), weights[part].view(*shape, heads), state.index_keys,
            batch.rows[row : row + rows], entries, scored,
        )  # fmt: skip
        kernels.select(scored, visible[part].view(shape), chosen[part].view(*shape, cfg.index_topk))
    return chosen


def _groups(batch: Batch) -> list[tuple[int, int, int, int, int]]:
    """Runs of sequences with equally many tokens: (first token, past the last, first sequence, sequences, tokens)."""
    found: list[tuple[int, int, int, int, int]] = []
    for row, (start, count, _) in enumerate(batch.segments):
        if found and found[-1][4] == count:
            first, _, first_row, rows, _ = found[-1]
            found[-1] = (first, start + count, first_row, rows + 1, count)
        else:
            found.append((start, start + count, row, 1, count))
    return found
