"""The forward pass of DeepSeek-V4 over a batch of new tokens, its kernels an argument.

With the reference table it is the oracle, with the winners' the entry. Shapes: N new tokens flattened over sequences,
d hidden, n residual copies ("lanes").
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from problems.dsv4_forward import layers, ops
from problems.dsv4_forward.cache.state import Batch, LayerState, State
from problems.dsv4_forward.layers import Context, Rope
from problems.dsv4_forward.ops import Kernels
from problems.dsv4_forward.torch_ops import rope
from problems.dsv4_forward.weights.config import PLAIN, SWA
from problems.dsv4_forward.weights.tree import BlockWeights, ModelWeights, Site


class Probe(Protocol):
    """Is told where the pass is: how a check knows which layer a kernel is called for."""

    def enter(self, layer: str, lanes: torch.Tensor) -> None:
        """Before a block ("layers.3", "mtp.0") and before "head"; lanes (N, n, d)."""


@dataclass(frozen=True)
class Output:
    """logits fp32 (B, vocab) of each sequence's last new token, or (N, vocab) of all; lanes (N, n, d) before the
    head, which is what next-token prediction starts from.
    """

    logits: torch.Tensor
    lanes: torch.Tensor


class Model:
    """Weights, kernels and what is derived from the configuration once. Holds no state of any sequence."""

    def __init__(
        self, weights: ModelWeights, table: Kernels | None = None, dtype: torch.dtype | None = None,
        probe: Probe | None = None,
    ) -> None:  # fmt: skip
        """table: the reference if None. dtype of activations: fp32 for fp32 weights, else bf16, unless given."""
        self.weights, self.config = weights, weights.config
        self.kernels = table or ops.REFERENCE
        self.dtype = dtype or (torch.float32 if weights.format == "fp32" else torch.bfloat16)
        self.probe = probe
        kinds = {SWA, *self.config.ratios}
        self._freqs = {kind: rope.frequencies(self.config, kind, weights.embed.device) for kind in kinds}

    def forward(self, batch: Batch, state: State, every: bool = False) -> Output:
        """One pass over the batch that `state` planned: writes the tokens' state, returns logits. state.commit(batch)
        makes the tokens part of their sequences; until then the same batch may be planned again.
        """
        ctx, tables = self.context(batch)
        lanes = self._embed(batch.tokens)
        for number, (w, layer) in enumerate(zip(self.weights.layers, state.layers, strict=True)):
            lanes = self.block(f"layers.{number}", lanes, w, layer, tables[layer.ratio], ctx)
        self._enter("head", lanes)
        final = lanes if every else lanes[batch.last]
        return Output(self.logits(final, self.weights.hc_head, self.weights.norm, ctx), lanes)

    def block(
        self, name: str, lanes: torch.Tensor, w: BlockWeights, layer: LayerState, table: Rope, ctx: Context
    ) -> torch.Tensor:
        """Attention and experts, each between the mixing of the lanes: (N, n, d) -> (N, n, d)."""
        self._enter(name, lanes)
        u, post, comb = self._mix(lanes, w.hc_attn, ctx)
        y = layers.attention(ctx.norm(u, w.attn_norm), w.attn, layer, table, ctx)
        lanes = self._spread(y, lanes, post, comb, ctx)
        u, post, comb = self._mix(lanes, w.hc_ffn, ctx)
        y = layers.moe(ctx.norm(u, w.ffn_norm), w.ffn, ctx)
        return self._spread(y, lanes, post, comb, ctx)

    def logits(self, lanes: torch.Tensor, site: Site, norm: torch.Tensor, ctx: Context) -> torch.Tensor:
        """lanes (M, n, d) -> fp32 (M, vocab)."""
        mixed = ctx.empty(len(lanes), self.config.hidden_size)
        ctx.kernels.mhc_head(lanes, site.fn, site.base, site.scale, self.config, mixed)
        out = ctx.empty(len(lanes), self.config.vocab_size, dtype=torch.float32)
        ctx.kernels.matmul(ctx.norm(mixed, norm), self.weights.head, out)
        return out

    def context(self, batch: Batch) -> tuple[Context, dict[int, Rope]]:
        """What a pass over `batch` shares, and the rotations at its positions by layer kind."""
        quantised = self.weights.format not in PLAIN
        ctx = Context(self.config, self.kernels, batch, self.dtype, quantised)
        tables = {}
        for kind, freqs in self._freqs.items():
            # The two compressed kinds share their angles.
            same = next((t for k, t in tables.items() if k != SWA and kind != SWA), None)
            tables[kind] = same or Rope(freqs, *rope.angles(batch.position, freqs))
        return ctx, tables

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = self.weights.embed[tokens].to(self.dtype)
        return rows.unsqueeze(1).expand(-1, self.config.hc_mult, -1).contiguous()

    def _mix(self, lanes: torch.Tensor, site: Site, ctx: Context) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        n = self.config.hc_mult
        u = ctx.empty(len(lanes), self.config.hidden_size)
        post = ctx.empty(len(lanes), n, dtype=torch.float32)
        comb = ctx.empty(len(lanes), n, n, dtype=torch.float32)
        ctx.kernels.mhc_pre(lanes, site.fn, site.base, site.scale, self.config, u, post, comb)
        return u, post, comb

    def _spread(
        self, y: torch.Tensor, lanes: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, ctx: Context
    ) -> torch.Tensor:
        out = torch.empty_like(lanes)
        ctx.kernels.mhc_post(y, lanes, post, comb, out)
        return out

    def _enter(self, layer: str, lanes: torch.Tensor) -> None:
        if self.probe:
            self.probe.enter(layer, lanes)


def forward(
    tokens: Mapping[int, Sequence[int] | torch.Tensor], weights: ModelWeights, state: State,
    table: Kernels | None = None, dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """Feed new tokens to sequences of `state` (slot -> tokens, any number of each) and make them part of these.
    -> logits fp32 (B, vocab) after each sequence's last token, in the mapping's order. OutOfBlocks: nothing is written.
    """
    model = Model(weights, table, dtype)
    return feed(model, state, tokens)


def feed(
    model: Model, state: State, tokens: Mapping[int, Sequence[int] | torch.Tensor], after: object = None
) -> torch.Tensor:
    """Like `forward`, in as many calls as the state's chunk needs. after(batch, output): called after each."""
    state.reserve({slot: len(part) for slot, part in tokens.items()})
    done = dict.fromkeys(tokens, 0)
    logits: dict[int, torch.Tensor] = {}
    while left := [slot for slot in tokens if done[slot] < len(tokens[slot])]:
        batch = state.plan({slot: tokens[slot][done[slot] : done[slot] + state.chunk] for slot in left})
        out = model.forward(batch, state)
        state.commit(batch)
        if after:
            after(batch, out)
        for row, (_, count, slot) in enumerate(batch.segments):
            done[slot] += count
            logits[slot] = out.logits[row]
    return torch.stack([logits[slot] for slot in tokens])
