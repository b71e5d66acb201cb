"""Predict the token after the next (MTP of depth 1), and decode with it: a pass verifies the guess of the one before.

`draft` takes the hc copies of the main model at position t and token t + 1, and guesses token t + 2. Its block has a
separate window, at the main model's positions. A guess is accepted only where it equals what the main model says, so
the tokens are those of plain greedy decoding wherever a pass of two tokens rounds as two of one do (README.md says
where). Source: DeepSeek-V3's practice and vLLM's, as README.md says.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from problems.dsv4_forward.cache.state import Batch, OutOfBlocks, State
from problems.dsv4_forward.cache.token_ids import check_tensor
from problems.dsv4_forward.generate.decoding import NOT_FINITE
from problems.dsv4_forward.model import Model
from problems.dsv4_forward.weights.config import SWA
from problems.dsv4_forward.weights.tree import MtpWeights


def draft(model: Model, batch: Batch, state: State, copies: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Guess the token after the next. -> logits fp32 (N, vocab). Writes the window of the prediction layer's block.

    copies (N, n, d): the main model's at the batch's tokens; following int64 (N,): the token after each. ValueError:
    the model has no prediction layer; copies or following are not that; what Model.check refuses.
    """
    w, cfg = _prediction(model), model.config
    model.check(batch, state)
    wanted = (len(batch.tokens), cfg.hc_mult, cfg.hidden_size)
    if tuple(copies.shape) != wanted:
        raise ValueError(f"copies must be {wanted}, got {tuple(copies.shape)}")
    check_tensor("following", following, cfg.vocab_size, wanted[0])
    ctx, tables, embedding = model.embed(batch, following)
    # Position 0 gets no embedding, as where the model was trained to.
    embedding = torch.where(batch.lists.position.unsqueeze(1) == 0, 0, embedding.squeeze(1))
    token = ctx.linear(ctx.norm(embedding, w.enorm), w.e_proj)
    count, n, d = copies.shape
    before = ctx.linear(ctx.norm(copies, w.hnorm).view(count * n, d), w.h_proj).view(count, n, d)
    pending = model.block("mtp.0", before + token.unsqueeze(1), w.block, state.mtp, tables[SWA], ctx)
    return model.logits(pending, model.draft_head, w.norm, ctx)[0]


def _prediction(model: Model) -> MtpWeights:
    """The prediction layer. ValueError: there is none."""
    if model.weights.mtp is None:
        why = "num_nextn_predict_layers is 0, or config.json has layer_types, with which none is loaded"
        raise ValueError(f"{model.config.name} has no prediction layer ({why})")
    return model.weights.mtp


@dataclass(frozen=True)
class Step:
    """What one verified pass gave. tokens: one or two; accepted: whether the guess was right."""

    tokens: tuple[int, ...]
    accepted: bool


class Speculative:
    """Greedy decoding of one sequence, a guess ahead. Host synchronisation: once a pass, to compare the guess."""

    def __init__(self, model: Model, state: State, sequence: int) -> None:
        """ValueError: the model has no prediction layer, or the state takes only one token of a sequence in a pass."""
        _prediction(model)
        if state.chunk < 2:
            raise ValueError(f"chunk must be 2 or more, for a token and the guess of the next, got {state.chunk}")
        self.model, self.state, self.sequence = model, state, sequence
        self._token = self._guess = -1  # none yet

    def prefill(self, tokens: Sequence[int]) -> int:
        """Feed the prompt. -> the first token. ValueError: it is empty, or State.checked or State.reserve refuses it;
        OutOfBlocks. Then nothing is written. ValueError too if the prompt's logits are not finite.
        """
        tokens = self.state.checked({self.sequence: tokens})[self.sequence]
        if not len(tokens):
            raise ValueError("tokens must hold a token or more, got none")
        self.state.reserve({self.sequence: len(tokens)})
        step = self.state.chunk
        for start in range(0, len(tokens), step):
            part = tokens[start : start + step]
            batch = self.state.plan({self.sequence: part})
            out = self.model.forward(batch, self.state)
            self._token = int(out.logits[0].argmax())
            if start + step >= len(tokens) and not bool(out.logits.isfinite().all()):
                raise ValueError(NOT_FINITE.format("the prompt"))
            following = [*tokens[start + 1 : start + step + 1]]
            following += [self._token] * (len(part) - len(following))
            self._draft(batch, out.copies, following, len(part) - 1)
            self.state.commit(batch)
        return self._token

    def steps(self) -> Iterator[Step]:
        """Passes until the sequence has as many tokens as it may have (State.capacity). Each feeds the last token and
        the guess of the next, the last one only the token if there is room for no more.

        ValueError: no prompt yet; OutOfBlocks.
        """
        if self._token < 0:
            raise ValueError("prefill() must come before steps(): there is no token to begin with")
        while room := self.state.capacity - self.state.lengths[self.sequence]:
            length = self.state.lengths[self.sequence]
            fed = [self._token, self._guess][:room]
            try:
                batch = self.state.plan({self.sequence: fed})
            except OutOfBlocks:  # if it is the guess that has no block
                fed = fed[:1]
                batch = self.state.plan({self.sequence: fed})
            out = self.model.forward(batch, self.state, every=True)
            found = out.logits.argmax(-1).tolist()
            accepted = len(fed) == 2 and found[0] == self._guess
            tokens = tuple(found if accepted else found[:1])
            self._draft(batch, out.copies, found, int(accepted))
            self.state.commit(batch)
            if len(fed) == 2 and not accepted:  # what the wrong guess wrote is written again before it is read
                self.state.rewind(self.sequence, length + 1)
            self._token = tokens[-1]
            yield Step(tokens, accepted)

    def _draft(self, batch: Batch, copies: torch.Tensor, following: Sequence[int], row: int) -> None:
        after = torch.tensor(following, dtype=torch.int64, device=copies.device)
        self._guess = int(draft(self.model, batch, self.state, copies, after)[row].argmax())
