"""`Model`: the forward pass of DeepSeek-V4 over a batch of new tokens; its ops are an argument.

With the reference ops it is the oracle, with the problems' winners the submission. layers.py has the walk through one
layer. Shapes: N new tokens flattened over sequences, d hidden, n hc copies of the residual.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from problems.dsv4_forward import layers, ops
from problems.dsv4_forward.cache.state import Batch, LayerState, State
from problems.dsv4_forward.layers import Context, Pending, Rope
from problems.dsv4_forward.ops import Ops
from problems.dsv4_forward.torch_ops import rope
from problems.dsv4_forward.weights.config import PLAIN, SWA, Config
from problems.dsv4_forward.weights.tree import BlockWeights, ModelWeights, Site


class Probe(Protocol):
    """Receives the place of the pass: how a check knows for which layer an op is called."""

    def enter(self, layer: str, copies: torch.Tensor) -> None:
        """Called before a block ("layers.3", "mtp.0") and before "head"; copies (N, n, d)."""


@dataclass(frozen=True)
class Output:
    """logits fp32 (B, vocab) of each sequence's last new token, or (N, vocab) of all; copies (N, n, d) before the
    head, from which next-token prediction starts.
    """

    logits: torch.Tensor
    copies: torch.Tensor


class Model:
    """Weights, ops and what is derived from the configuration once. Holds no state of any sequence."""

    def __init__(
        self, weights: ModelWeights, table: Ops | None = None, dtype: torch.dtype | None = None,
        probe: Probe | None = None,
    ) -> None:  # fmt: skip
        """table: the reference if None. dtype of activations: fp32 for fp32 weights, else bf16, unless given."""
        self.weights, self.config = weights, weights.config
        self.ops = table or ops.REFERENCE
        self.dtype = dtype or (torch.float32 if weights.format == "fp32" else torch.bfloat16)
        self.probe = probe
        kinds = {SWA, *self.config.ratios}
        self._freqs = {kind: rope.frequencies(self.config, kind, weights.embed.device) for kind in kinds}

    def forward(self, batch: Batch, state: State, every: bool = False) -> Output:
        """Run one pass over the batch that `state` planned: write the tokens' state, return logits.

        state.commit(batch) makes the tokens part of their sequences; until then the same batch may be planned again.
        every: logits of all tokens, not only of each sequence's last. ValueError: the state or the batch is not this
        model's (check).
        """
        self.check(batch, state)
        ctx, tables = self.context(batch)
        residual: torch.Tensor | Pending = self._embed(batch.tokens)
        for number, (w, layer) in enumerate(zip(self.weights.layers, state.layers, strict=True)):
            residual = self.block(f"layers.{number}", residual, w, layer, tables[layer.ratio], ctx)
        copies = _copies(residual, ctx)
        self._enter("head", copies)
        final = copies if every else copies[batch.last]
        return Output(self.logits(final, self.weights.hc_head, self.weights.norm, ctx), copies)

    def check(self, batch: Batch, state: State) -> None:
        """Raise ValueError unless the state is of this model, in its format, on its device, and planned the batch."""
        layout, weights = state.layout, self.weights
        if layout.format != weights.format:
            raise ValueError(f"state must be in the weights' format, {weights.format}, got one in {layout.format}")
        if other := _difference(weights.config, layout.config):
            raise ValueError(f"state must be of the weights' configuration, got one with another {other}")
        if batch.planner is not state.planner:
            raise ValueError(f"batch of sequences {batch.sequences} must be planned by the given state, got another's")
        if batch.tokens.device != weights.embed.device:
            raise ValueError(f"state must be on the weights' device, {weights.embed.device}, got {batch.tokens.device}")

    def context(self, batch: Batch) -> tuple[Context, dict[int, Rope]]:
        """Return what a pass over `batch` shares, and the rotations at its positions by layer kind."""
        quantised = self.weights.format not in PLAIN
        ctx = Context(self.config, self.ops, batch, self.dtype, quantised)
        tables = {}
        for kind, freqs in self._freqs.items():
            # The two compressed kinds share their angles.
            same = next((t for k, t in tables.items() if k != SWA and kind != SWA), None)
            tables[kind] = same or Rope(freqs, *rope.angles(batch.position, freqs))
        return ctx, tables

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the tokens' embeddings in all copies, (N, n, d)."""
        rows = self.weights.embed[tokens].to(self.dtype)
        return rows.unsqueeze(1).expand(-1, self.config.hc_mult, -1).contiguous()

    def block(
        self, name: str, residual: torch.Tensor | Pending, w: BlockWeights, layer: LayerState, table: Rope, ctx: Context
    ) -> Pending:
        """Run the layer `name`. residual: copies (N, n, d), or what is still to be written to them, as what comes back
        is. A probe sees copies, so that where there is one they are written before the layer and not within it.
        """
        if self.probe:
            residual = _copies(residual, ctx)
            self._enter(name, residual)
        return layers.block(residual, w, layer, table, ctx)

    def logits(self, copies: torch.Tensor, site: Site, norm: torch.Tensor, ctx: Context) -> torch.Tensor:
        """Run the head: copies (M, n, d) -> fp32 (M, vocab)."""
        return layers.head(copies, site, norm, self.weights.head, ctx)

    def _enter(self, layer: str, copies: torch.Tensor) -> None:
        if self.probe:
            self.probe.enter(layer, copies)


def _copies(residual: torch.Tensor | Pending, ctx: Context) -> torch.Tensor:
    """The hc copies (N, n, d), with what is pending written to them."""
    return layers.write_copies(residual, ctx) if isinstance(residual, Pending) else residual


def _difference(mine: Config, other: Config) -> str:
    """The first field, but for the name, in which two configurations differ, with both values; "" if none does."""
    if mine is other:
        return ""
    pairs = ((name, value, vars(other)[name]) for name, value in vars(mine).items() if name != "name")
    return next((f"{name}: {got!r} instead of {want!r}" for name, want, got in pairs if want != got), "")


def forward(
    tokens: Mapping[int, Sequence[int] | torch.Tensor], weights: ModelWeights, state: State,
    table: Ops | None = None, dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """Feed new tokens to sequences of `state` (sequence -> tokens, any number of each), which become part of these.

    -> logits fp32 (B, vocab) after each sequence's last token, in the mapping's order. OutOfBlocks: nothing is written.
    """
    model = Model(weights, table, dtype)
    return feed(model, state, tokens)


def feed(
    model: Model, state: State, tokens: Mapping[int, Sequence[int] | torch.Tensor], after: object = None
) -> torch.Tensor:
    """Do as `forward`, in as many calls as the state's chunk needs. after(batch, output): called after each.

    ValueError: no sequence, or one without a token, or what State.checked refuses; then nothing is written.
    """
    tokens = state.checked(tokens)
    if empty := [sequence for sequence, part in tokens.items() if not len(part)]:
        raise ValueError(f"tokens of each sequence must be one or more, got none for {empty[0]}")
    state.reserve({sequence: len(part) for sequence, part in tokens.items()})
    done = dict.fromkeys(tokens, 0)
    logits: dict[int, torch.Tensor] = {}
    while left := [sequence for sequence in tokens if done[sequence] < len(tokens[sequence])]:
        parts = {sequence: tokens[sequence][done[sequence] : done[sequence] + state.chunk] for sequence in left}
        batch = state.plan(parts)
        out = model.forward(batch, state)
        state.commit(batch)
        if after:
            after(batch, out)
        for row, (_, count, sequence) in enumerate(batch.segments):
            done[sequence] += count
            logits[sequence] = out.logits[row]
    return torch.stack([logits[sequence] for sequence in tokens])
