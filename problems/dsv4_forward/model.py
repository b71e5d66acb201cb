"""`Model`: the forward pass of DeepSeek-V4 over a batch of new tokens; its ops are an argument.

With the reference ops it is the oracle, with the problems' winners the submission. layers.py has the walk through one
layer. Shapes: N new tokens flattened over sequences, d hidden, n hc copies of the residual.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from problems.common.early import behind_kernels
from problems.dsv4_forward import layers, ops
from problems.dsv4_forward.cache.state import Batch, LayerState, State
from problems.dsv4_forward.layers import Context, Exchange, Pending, Rope
from problems.dsv4_forward.ops import Ops
from problems.dsv4_forward.torch_ops import rope
from problems.dsv4_forward.weights.config import PLAIN, SWA, Config
from problems.dsv4_forward.weights.tree import BlockWeights, ModelWeights, Site


class Probe(Protocol):
    """Receives the place of the pass: how a check knows for which layer an op is called."""

    def enter(self, layer: str, residual: torch.Tensor | Pending) -> None:
        """Called before a block ("layers.3", "mtp.0") and before "head", with what that is about to get: the hc copies
        (N, n, d), or what is still to be written to them.
        """


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
        self,
        weights: ModelWeights,
        table: Ops | None = None,
        dtype: torch.dtype | None = None,
        probe: Probe | None = None,
        early: bool = True,
        exchange: Exchange | None = None,
    ) -> None:
        """table: the reference if None. dtype of activations: fp32 for fp32 weights, else bf16, unless given. early:
        whether kernels of other problems may begin before the one ahead has ended, as this folder's do. exchange: with
        the GPUs that share the model, where the weights are one's part of it (weights/partition.py).
        """
        self.weights, self.config = weights, weights.config
        self.ops = table or ops.REFERENCE
        self.dtype = dtype or (torch.float32 if weights.format == "fp32" else torch.bfloat16)
        self.probe = probe
        self.early, self.exchange = early, exchange
        # The two compressed kinds share their angles.
        self._kinds = {ratio: int(ratio != SWA) for ratio in (SWA, *self.config.ratios)}
        kinds = {kind: ratio for ratio, kind in self._kinds.items()}
        rows = [rope.frequencies(self.config, kinds[kind], weights.embed.device) for kind in sorted(kinds)]
        self._freqs = torch.stack(rows)  # fp32 (kinds, r / 2)
        self._head = layers.whole_site(weights.hc_head, self.config)
        self.draft_head = layers.whole_site(weights.mtp.hc_head, self.config) if weights.mtp else None

    def forward(self, batch: Batch, state: State, every: bool = False) -> Output:
        """Run one pass over the batch that `state` planned: write the tokens' state, return logits.

        state.commit(batch) makes the tokens part of their sequences; until then the same batch may be planned again.
        every: logits of all tokens, not only of each sequence's last. ValueError: the state or the batch is not this
        model's (check).
        """
        self.check(batch, state)
        with behind_kernels(self.early):
            return self._forward(batch, state, every)

    def _forward(self, batch: Batch, state: State, every: bool) -> Output:
        ctx, tables, embedded = self.start(batch)
        residual: torch.Tensor | Pending = embedded
        if self.exchange and (own := self.exchange.own(len(embedded), embedded.shape[-1])):
            ctx, residual = dataclasses.replace(ctx, own=own), embedded[own]
        for number, (w, layer) in enumerate(zip(self.weights.layers, state.layers, strict=True)):
            residual = self.block(f"layers.{number}", residual, w, layer, tables[layer.ratio], ctx)
        residual = layers.gathered(residual, "head", ctx)
        if self.probe:
            self.probe.enter("head", residual)
        if every or len(batch.tokens) == len(batch.sequences):
            return Output(*self.logits(residual, self._head, self.weights.norm, ctx))
        last = residual.rows(batch.last) if isinstance(residual, Pending) else residual[batch.last]
        return Output(self.logits(last, self._head, self.weights.norm, ctx)[0], _copies(residual, ctx))

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

    def start(self, batch: Batch) -> tuple[Context, dict[int, Rope], torch.Tensor]:
        """Write the batch's lists. -> what the pass shares, the rotations at its positions by layer kind, and the
        tokens' embeddings in all copies, (N, n, d).
        """
        outputs = self._outputs(len(batch.tokens), self.config.hc_mult)
        numbers, lists = batch.room
        plan = {"given": batch.plan, "numbers": numbers, "lists": lists}
        self.ops.start(**plan, tokens=batch.tokens, weight=self.weights.embed, freqs=self._freqs, **outputs)
        batch.written()
        return self._context(batch), self._tables(outputs["cos"], outputs["sin"]), outputs["copies"]

    def embed(self, batch: Batch, tokens: torch.Tensor) -> tuple[Context, dict[int, Rope], torch.Tensor]:
        """Do as `start` for a batch whose lists are written, with other tokens, int64 (N,), and one copy."""
        outputs = self._outputs(len(tokens), 1)
        given = {"weight": self.weights.embed, "position": batch.lists.position, "freqs": self._freqs}
        self.ops.embed(tokens=tokens, **given, **outputs)
        return self._context(batch), self._tables(outputs["cos"], outputs["sin"]), outputs["copies"]

    def _context(self, batch: Batch) -> Context:
        quantised = self.weights.format not in PLAIN
        return Context(self.config, self.ops, batch, self.dtype, quantised, self.exchange)

    def _outputs(self, tokens: int, n: int) -> dict[str, torch.Tensor]:
        """Copies, cosines and sines, unwritten."""
        device, (kinds, half) = self.weights.embed.device, self._freqs.shape
        copies = torch.empty(tokens, n, self.config.hidden_size, dtype=self.dtype, device=device)
        cos, sin = (torch.empty(kinds, tokens, half, dtype=torch.float32, device=device) for _ in range(2))
        return {"copies": copies, "cos": cos, "sin": sin}

    def _tables(self, cos: torch.Tensor, sin: torch.Tensor) -> dict[int, Rope]:
        return {ratio: Rope(self._freqs[kind], cos[kind], sin[kind]) for ratio, kind in self._kinds.items()}

    def block(
        self, name: str, residual: torch.Tensor | Pending, w: BlockWeights, layer: LayerState, table: Rope, ctx: Context
    ) -> Pending:
        """Run the layer `name`. residual: copies (N, n, d), or what is still to be written to them, as what comes back
        is.
        """
        if self.probe:
            residual = layers.gathered(residual, name, ctx)
            self.probe.enter(name, residual)
            if ctx.own:
                residual = residual.rows(ctx.own) if isinstance(residual, Pending) else residual[ctx.own]
        return layers.block(name, residual, w, layer, table, ctx)

    def logits(
        self, residual: torch.Tensor | Pending, site: Site, norm: torch.Tensor, ctx: Context
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the head on copies (M, n, d), or what is still to be written to them. -> fp32 (M, vocab), the copies."""
        return layers.head(residual, site, norm, self.weights.head, ctx)


def _copies(residual: torch.Tensor | Pending, ctx: Context) -> torch.Tensor:
    """The hc copies (N, n, d), with what is pending written to them."""
    return layers.write_copies(residual, ctx.ops) if isinstance(residual, Pending) else residual


def no_memory(error: BaseException) -> bool:
    """Return whether memory did not suffice, of a GPU or, where torch has no type for it, of the host."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


def _difference(mine: Config, other: Config) -> str:
    """The first field, but for the name, in which two configurations differ, with both values; "" if none does."""
    if mine is other:
        return ""
    pairs = ((name, value, vars(other)[name]) for name, value in vars(mine).items() if name != "name")
    return next((f"{name}: {got!r} instead of {want!r}" for name, want, got in pairs if want != got), "")


def feed(
    model: Model, state: State, tokens: Mapping[int, Sequence[int] | torch.Tensor], after: object = None
) -> torch.Tensor:
    """Feed new tokens to sequences of `state` (sequence -> tokens, any number of each), which become part of these, in
    as many calls as the state's chunk needs. after(batch, output): called after each.

    -> logits fp32 (B, vocab) after each sequence's last token, in the mapping's order. OutOfBlocks, or ValueError: no
    sequence, or one without a token, or what State.checked refuses; then nothing is written.
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
