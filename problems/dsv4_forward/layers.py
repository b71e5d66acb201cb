"""Run one layer: `block`, then what it calls, in the order in which a token passes it.

    block -> site -> attention -> site -> moe; a site writes the sublayer ahead of it to the copies, reads them, norms
    attention -> query, key -> window -> compressed entries -> indexer -> fmha -> output projections
    moe -> route -> experts + shared

Everything is over N new tokens, flattened over sequences; d is the hidden size, n the number of hc copies. The
functions here make buffers, write the state and call ops; the ops do the arithmetic. Where no kernel does several
steps at once, `ops.mhc_site` and three others return NotImplemented, and the steps are called one by one. Source:
sections 4 and 6 to 13 of README.md's account of DeepSeek's inference code.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from problems.dsv4_forward.cache.state import Batch, LayerState
from problems.dsv4_forward.ops import Ops
from problems.dsv4_forward.weights.config import CSA, HCA, Config
from problems.dsv4_forward.weights.linear import Linear
from problems.dsv4_forward.weights.tree import AttentionWeights, BlockWeights, FfnWeights, Site


@dataclass(frozen=True)
class Rope:
    """freqs fp32 (r / 2,) of a layer kind; cos, sin fp32 (N, r / 2) at the tokens' positions."""

    freqs: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


class Exchange(Protocol):
    """With the other GPUs of a model whose weights are one's part of it (parallel/). place: for messages."""

    def add(self, part: torch.Tensor, place: str) -> torch.Tensor:
        """part (N, d) -> the sum of all GPUs' parts, with equal bits on each."""

    def join(self, part: torch.Tensor, place: str) -> torch.Tensor:
        """part (M, n) -> all GPUs' parts, one behind the other, (M, GPUs * n)."""

    def own(self, tokens: int, width: int) -> slice | None:
        """Whose sites this GPU computes in a pass of so many tokens; None: those of all, since an exchange is short."""

    def scatter(self, part: torch.Tensor, place: str) -> torch.Tensor:
        """part (N, d) -> the sum of all GPUs' parts, of the tokens that are this one's own."""

    def gather(self, rows: torch.Tensor, place: str) -> torch.Tensor:
        """rows (n, d) of this GPU's own tokens -> those of all, (N, d)."""

    def see(self) -> None:
        """Raise PeerLostError if a GPU did not come in what has been computed so far."""


@dataclass(frozen=True)
class Context:
    """What the layers of one call share. dtype: of activations, fp32 in the oracle, else bf16."""

    config: Config
    ops: Ops
    batch: Batch
    dtype: torch.dtype
    quantised_index: bool  # indexer queries and keys go through Hadamard and FP4
    exchange: Exchange | None = None
    own: slice | None = None  # the tokens of which this GPU has copies and computes sites; None: all

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Make an unwritten tensor on the batch's device, of activations unless `dtype` says otherwise."""
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.batch.tokens.device)

    def linear(self, x: torch.Tensor, w: Linear) -> torch.Tensor:
        """Return x w^T: x (N, k) -> (N, n)."""
        out = self.empty(len(x), w.n)
        self.ops.linear(x=x, w=w, out=out)
        return out

    def two_linears(self, x: torch.Tensor, first: Linear, second: Linear) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x first^T and x second^T, one behind the other in memory where their sizes are multiples of 64."""
        sizes = [len(x) * w.n for w in (first, second)]
        apart = -(-sizes[0] // 64) * 64
        room = self.empty(apart + sizes[1])
        outs = room[: sizes[0]].view(len(x), first.n), room[apart:].view(len(x), second.n)
        both = {"first": first, "second": second, "first_out": outs[0], "second_out": outs[1]}
        if self.ops.two_linears(x=x, **both) is NotImplemented:
            self.ops.linear(x=x, w=first, out=outs[0])
            self.ops.linear(x=x, w=second, out=outs[1])
        return outs

    def norm_linears(self, x: torch.Tensor, weight: torch.Tensor, matrices: list[Linear]) -> list[torch.Tensor]:
        """Return the products of x, normed with `weight`, with each of the matrices."""
        outs, norm = [self.empty(len(x), w.n) for w in matrices], {"weight": weight, "eps": self.config.rms_norm_eps}
        if self.ops.norm_linears(x=x, **norm, matrices=matrices, outs=outs) is NotImplemented:
            normed = self.norm(x, weight)
            for w, out in zip(matrices, outs, strict=True):
                self.ops.linear(x=normed, w=w, out=out)
        return outs

    def norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Return x, normed over its last axis."""
        out = torch.empty_like(x, dtype=self.dtype)
        self.ops.rms_norm(x=x, weight=weight, eps=self.config.rms_norm_eps, out=out)
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

    def rows(self, index: torch.Tensor | slice) -> "Pending":
        """What is pending for some tokens, int64 (M,) or a slice."""
        second = None if self.second is None else self.second[index]
        return Pending(self.y[index], second, self.copies[index], self.post[index], self.comb[index])


def block(
    name: str, residual: torch.Tensor | Pending, w: BlockWeights, state: LayerState, rope: Rope, ctx: Context
) -> Pending:
    """Run the layer `name`: attention, then experts; each reads the hc copies (N, n, d) behind the sublayer ahead.

    residual: the copies, or what is still to be written to them. -> what the experts returned, still to be written.
    """
    u, *mixing = _site(residual, w.hc_attn, w.attn_norm, ctx)
    u = ctx.exchange.gather(u, f"{name}.attention") if ctx.exchange and ctx.own else u
    middle = _pending(f"{name}.attention", attention(u, w.attn, state, rope, ctx), None, mixing, ctx)
    u, *mixing = _site(middle, w.hc_ffn, w.ffn_norm, ctx)
    u = ctx.exchange.gather(u, f"{name}.experts") if ctx.exchange and ctx.own else u
    return _pending(f"{name}.experts", *moe(u, w.ffn, ctx), mixing, ctx)


def _pending(place: str, y: torch.Tensor, second: torch.Tensor | None, mixing: list, ctx: Context) -> Pending:
    """Return what a sublayer returned, of all GPUs where several share the model."""
    if ctx.exchange:
        summed = ctx.exchange.scatter if ctx.own else ctx.exchange.add
        y, second = summed(y if second is None else y + second, place), None
    return Pending(y, second, *mixing)


def gathered(residual: torch.Tensor | Pending, place: str, ctx: Context) -> torch.Tensor | Pending:
    """Return of all tokens what there is of this GPU's own."""
    if not (ctx.exchange and ctx.own):
        return residual
    given = vars(residual).values() if isinstance(residual, Pending) else (residual,)
    found = [
        one if one is None else ctx.exchange.gather(one.flatten(1), place).view(-1, *one.shape[1:]) for one in given
    ]
    return Pending(*found) if isinstance(residual, Pending) else found[0]


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
    weights = {"fn": site.fn, "base": site.base, "scale": site.scale, "cfg": ctx.config}
    if isinstance(residual, Pending):
        copies = torch.empty_like(copies)
        written = {"new_copies": copies, "out": u, "new_post": post, "new_comb": comb}
        if ctx.ops.mhc_site(**vars(residual), **weights, weight=norm, **written) is not NotImplemented:
            return u, copies, post, comb
        ctx.ops.mhc_post(**vars(residual), out=copies)
    mixed = torch.empty_like(u)
    ctx.ops.mhc_pre(copies=copies, **weights, out=mixed, post=post, comb=comb)
    ctx.ops.rms_norm(x=mixed, weight=norm, eps=ctx.config.rms_norm_eps, out=u)
    return u, copies, post, comb


def attention(u: torch.Tensor, w: AttentionWeights, state: LayerState, rope: Rope, ctx: Context) -> torch.Tensor:
    """Write the tokens' keys and the entries that they complete, then attend. u: normed (N, d) -> (N, d)."""
    cfg, ops, batch = ctx.config, ctx.ops, ctx.batch
    n_tokens, heads, width = len(u), cfg.num_attention_heads, cfg.head_dim
    lowered, key = ctx.two_linears(u, w.wq_a, w.wkv)
    query = ctx.empty(n_tokens, heads, width)
    entries, gates = _entries(u, w, state, rope, ctx)
    matrices = [w.wq_b] if gates is None else [w.wq_b, w.indexer.wq_b]
    raised, *rest = ctx.norm_linears(lowered, w.q_norm, matrices)
    raised = raised.view(n_tokens, heads, width)
    scoring = rest[0].view(n_tokens, cfg.index_n_heads, cfg.index_head_dim) if rest else None
    angles = {"cos": rope.cos, "sin": rope.sin}
    norm = {"eps": cfg.rms_norm_eps, **angles}
    ops.layer_rows(
        queries={"x": raised, "weight": None, **norm, "out": query},
        key={"x": key, "weight": w.kv_norm, **norm, "pages": state.window, "index": batch.lists.window_target},
        compressed=entries,
        index=None if scoring is None else {"x": scoring, **angles, "quantise": ctx.quantised_index, "out": scoring},
    )
    index = _visible(scoring, gates, state, ctx)
    out = ctx.empty(n_tokens, 1, heads, width)
    lse = ctx.empty(n_tokens, 1, heads, dtype=torch.float32)
    ops.fmha(
        q=query.unsqueeze(1),
        window=state.window,
        window_index=batch.lists.window_index.unsqueeze(1),
        cache=None if index is None else state.cache,
        index=None if index is None else index.unsqueeze(1),
        sink=w.sink,
        scale=width**-0.5,
        **angles,
        out=out,
        lse=lse,
        chunk=batch.chunk(state.ratio if index is not None and gates is None else None),
    )
    grouped = out.view(n_tokens, cfg.o_groups, heads // cfg.o_groups * width)
    low = ctx.empty(n_tokens, cfg.o_groups, cfg.o_lora_rank)
    ops.grouped_linear(x=grouped, w=w.wo_a, out=low)
    return ctx.linear(low.view(n_tokens, -1), w.wo_b)


def _entries(
    u: torch.Tensor, w: AttentionWeights, state: LayerState, rope: Rope, ctx: Context
) -> tuple[list[dict], torch.Tensor | None]:
    """Multiply by the matrices of the compressors, and by the index weights where entries are scored.

    -> the arguments of write_entry for each compressor, which is still to be called; fp32 (N, index heads), or None.
    """
    if not state.ratio:
        return [], None
    compressors = [(w.compressor, state.tail, state.cache, False)]
    if w.indexer is not None:
        index = w.indexer.compressor, state.index_tail, state.index_keys, ctx.quantised_index
        compressors = [index, *compressors]
    matrices = [one.project for one, *_ in compressors]
    projected = [ctx.empty(len(u), len(matrix), dtype=torch.float32) for matrix in matrices]
    gates = None
    if _scores(state, ctx):
        gates = ctx.empty(len(u), ctx.config.index_n_heads, dtype=torch.float32)
        matrices.append(w.indexer.weights_proj)
    ctx.ops.matmuls(x=u, weights=matrices, outs=projected if gates is None else [*projected, gates])
    batch, ratio = ctx.batch, state.ratio
    return [
        {
            "projected": part,
            "ape": one.ape,
            "norm_weight": one.norm,
            "position": batch.lists.position,
            "sequence": batch.plan.sequence,
            "tail": tail,
            "emit": batch.plan.emit[ratio],
            "ratio": ratio,
            "overlap": ratio == CSA,
            "freqs": rope.freqs,
            "eps": ctx.config.rms_norm_eps,
            "dtype": ctx.dtype,
            "pages": pages,
            "index": batch.lists.target[ratio],
            "hadamard": hadamard,
        }
        for part, (one, tail, pages, hadamard) in zip(projected, compressors, strict=True)
    ], gates


def _scores(state: LayerState, ctx: Context) -> bool:
    """Whether the layer scores entries; else all visible ones are selected, or it has none."""
    return bool(state.ratio == CSA and ctx.batch.plan.entries[CSA] and ctx.batch.lists.csa_index is None)


def _visible(
    scoring: torch.Tensor | None, gates: torch.Tensor | None, state: LayerState, ctx: Context
) -> torch.Tensor | None:
    """Return int32 (N, entries), rows of the cache to attend to, when the entries are written.

    None: the layer has no compressed entries, or there are none yet. scoring, gates: None, or as _select takes them.
    """
    if not state.ratio or not ctx.batch.plan.entries[state.ratio]:
        return None
    if state.ratio == HCA:
        return ctx.batch.lists.hca_index
    return ctx.batch.lists.csa_index if gates is None else _select(scoring, gates, state, ctx)


def _select(query: torch.Tensor, weights: torch.Tensor, state: LayerState, ctx: Context) -> torch.Tensor:
    """Choose entries. query (N, heads, width): the indexer's; weights (N, heads): of the heads.

    -> int32 (N, index_topk) rows of the cache, -1 where fewer entries are visible.
    """
    cfg, batch, ops = ctx.config, ctx.batch, ctx.ops
    (n_tokens, heads, width), k = query.shape, cfg.index_topk
    places = ctx.empty(n_tokens, k, dtype=torch.int32)
    for start, stop, row, rows, count in _groups(batch):
        part, shape = slice(start, stop), (rows, count)
        ops.choose(
            q=query[part].view(*shape, heads, width),
            weights=weights[part].view(*shape, heads),
            scale=(width * heads) ** -0.5,
            keys=state.index_keys,
            table=batch.lists.rows[row : row + rows],
            visible=batch.lists.visible[CSA][part].view(shape),
            entries=batch.plan.entries[CSA],
            out=places[part].view(*shape, k),
        )
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


def write_copies(pending: Pending, ops: Ops) -> torch.Tensor:
    """Return the copies (N, n, d) with what is pending written to them."""
    out = torch.empty_like(pending.copies)
    ops.mhc_post(**vars(pending), out=out)
    return out


def moe(u: torch.Tensor, w: FfnWeights, ctx: Context) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the routed experts' sum and the shared expert, to be added up; or their sum and None. u: normed (N, d) ->
    (N, d) each, of its dtype.
    """
    cfg, ops = ctx.config, ctx.ops
    ids = ctx.empty(len(u), cfg.num_experts_per_tok, dtype=torch.int32)
    gates = ctx.empty(len(u), cfg.num_experts_per_tok, dtype=torch.float32)
    router = w.router
    ops.route(
        u=u,
        weight=router.weight,
        bias=router.bias,
        table=router.table,
        tokens=ctx.batch.tokens,
        cfg=cfg,
        out_ids=ids,
        out_weights=gates,
    )
    chosen = {"x": u, "ids": ids, "weights": gates, "w13": w.w13, "w2": w.w2, "limit": cfg.swiglu_limit}
    routed = torch.empty_like(u)
    shared_weights = {"shared_w13": w.shared_w13, "shared_w2": w.shared_w2}
    if ops.all_experts(**chosen, **shared_weights, out=routed) is not NotImplemented:
        return routed, None
    shared = torch.empty_like(u)
    ops.experts(**chosen, out=routed)
    ops.shared(x=u, w13=w.shared_w13, w2=w.shared_w2, limit=cfg.swiglu_limit, out=shared)
    return routed, shared


def whole_site(head: Site, config: Config) -> Site:
    """Return the head's mix as one of a sublayer, whose other rows and scales are zero: what they give is not read."""
    rows, scales = config.hc_rows - len(head.fn), 3 - len(head.scale)
    wide = ((0, 0, 0, rows), (0, rows), (0, scales))
    parts = zip((head.fn, head.base, head.scale), wide, strict=True)
    return Site(*(torch.nn.functional.pad(tensor, by) for tensor, by in parts))


def head(
    residual: torch.Tensor | Pending, site: Site, norm: torch.Tensor, weight: torch.Tensor, ctx: Context
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mix the copies behind the last layer, norm them, multiply by the head.

    residual: the copies (M, n, d), or what is still to be written to them; site: as whole_site returned it. -> logits
    fp32 (M, vocab); the copies.
    """
    u, copies, *_ = _site(residual, site, norm, ctx)
    out = ctx.empty(len(u), len(weight), dtype=torch.float32)
    ctx.ops.matmuls(x=u, weights=[weight], outs=[out])
    return ctx.exchange.join(out, "head") if ctx.exchange else out, copies
