"""Next-token prediction of depth 1 (MTP), and decoding with it: one token is guessed, the next pass verifies it.

The lanes of the main model at position t go in with token t + 1, and out comes a guess of token t + 2. The block keeps
a window of its own, at the main model's positions. Guesses are accepted only where they equal what the main model
says, so the tokens are those of plain greedy decoding. Source: DeepSeek-V3's practice and vLLM's, as README.md says.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from problems.dsv4_forward.cache.state import Batch, State
from problems.dsv4_forward.model import Model
from problems.dsv4_forward.weights.config import SWA


def draft(model: Model, batch: Batch, state: State, lanes: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """lanes (N, n, d): the main model's at the batch's tokens; following int64 (N,): the token after each.
    -> logits fp32 (N, vocab) of the token after that. Writes the block's own window. ValueError: no such block.
    """
    w = model.weights.mtp
    if w is None:
        raise ValueError(f"{model.config.name} has no prediction layer (num_nextn_predict_layers is 0)")
    ctx, tables = model.context(batch)
    # Position 0 gets no embedding, as where the model was trained to.
    embedding = model.weights.embed[following].to(model.dtype)
    embedding = torch.where(batch.position.unsqueeze(1) == 0, 0, embedding)
    token = ctx.linear(ctx.norm(embedding, w.enorm), w.e_proj)
    count, n, d = lanes.shape
    before = ctx.linear(ctx.norm(lanes, w.hnorm).view(count * n, d), w.h_proj).view(count, n, d)
    mixed = model.block("mtp.0", before + token.unsqueeze(1), w.block, state.mtp, tables[SWA], ctx)
    return model.logits(mixed, w.hc_head, w.norm, ctx)


@dataclass(frozen=True)
class Step:
    """What one verified pass gave. tokens: one or two; accepted: whether the guess was right."""

    tokens: tuple[int, ...]
    accepted: bool


class Speculative:
    """Greedy decoding of one sequence, a guess ahead. Host synchronisation: once a pass, to compare the guess."""

    def __init__(self, model: Model, state: State, slot: int) -> None:
        self.model, self.state, self.slot = model, state, slot
        self._token = self._guess = 0

    def prefill(self, tokens: Sequence[int]) -> int:
        """Feed the prompt. -> the first token. ValueError if it is empty."""
        if not len(tokens):
            raise ValueError("tokens must hold a token or more, got none")
        step = self.state.chunk
        for start in range(0, len(tokens), step):
            part = tokens[start : start + step]
            batch = self.state.plan({self.slot: part})
            out = self.model.forward(batch, self.state)
            self._token = int(out.logits[0].argmax())
            following = [*tokens[start + 1 : start + step + 1]]
            following += [self._token] * (len(part) - len(following))
            self._draft(batch, out.lanes, following, len(part) - 1)
            self.state.commit(batch)
        return self._token

    def steps(self) -> Iterator[Step]:
        """Passes without end. Each feeds the last token and the guess of the next."""
        while True:
            length = self.state.lengths[self.slot]
            batch = self.state.plan({self.slot: [self._token, self._guess]})
            out = self.model.forward(batch, self.state, every=True)
            first, second = out.logits.argmax(-1).tolist()
            accepted = first == self._guess
            tokens = (first, second) if accepted else (first,)
            self._draft(batch, out.lanes, [first, second], int(accepted))
            self.state.commit(batch)
            if not accepted:  # what was written for the wrong guess is written again before it is read
                self.state.rewind(self.slot, length + 1)
            self._token = tokens[-1]
            yield Step(tokens, accepted)

    def _draft(self, batch: Batch, lanes: torch.Tensor, following: Sequence[int], row: int) -> None:
        after = torch.tensor(following, dtype=torch.int64, device=lanes.device)
        self._guess = int(draft(self.model, batch, self.state, lanes, after)[row].argmax())
