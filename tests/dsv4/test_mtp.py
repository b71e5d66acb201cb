"""MTP's arithmetic: what its block begins with, against README.md's formulas; the block, against the main model's."""

import dataclasses

import pytest
import torch

from problems.dsv4_forward import ops
from problems.dsv4_forward.cache.state import State
from problems.dsv4_forward.generate import mtp
from problems.dsv4_forward.model import Model
from problems.dsv4_forward.weights import tree
from problems.dsv4_forward.weights.config import TINY

# One layer and a prediction layer.
SMALL = dataclasses.replace(TINY, name="small", compress_ratios=(0, 0), num_nextn_predict_layers=1, num_hash_layers=0)
LENGTH = 150  # tokens: past the window of 128, in three calls of at most 64
RTOL = 1e-4  # of all logits, in the norm: fp32 sums, and angles that are fp32 products


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(tree.random(SMALL, "fp32", seed=11))


@pytest.fixture(scope="module")
def given() -> tuple[torch.Tensor, torch.Tensor]:
    """The main model's hc copies, fp32 (LENGTH, n, d), no two of them alike; the token after each, int64 (LENGTH,)."""
    gen = torch.Generator().manual_seed(12)
    size = torch.tensor([0.5, 1.0, 1.5, 2.0])[: SMALL.hc_mult, None]
    copies = torch.randn(LENGTH, SMALL.hc_mult, SMALL.hidden_size, generator=gen) * size
    return copies, torch.randint(SMALL.vocab_size, (LENGTH,), generator=gen)


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight.double() * x / (x.square().mean(-1, keepdim=True) + SMALL.rms_norm_eps).sqrt()


@torch.inference_mode()
def expected(weights: tree.ModelWeights, copies: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Logits (T, vocab) of a model whose only layer is the prediction layer's block: of T tokens from position 0, in
    one call. What goes into the block is by README.md's formulas, in fp64.
    """
    w = weights.mtp
    embedding = weights.embed[following].double()
    embedding[0] = 0  # position 0
    token = normed(embedding, w.enorm) @ w.e_proj.weight.double().T
    begun = normed(copies.double(), w.hnorm) @ w.h_proj.weight.double().T + token[:, None]

    def start(**given: object) -> None:
        ops.REFERENCE.start(**given)
        given["copies"].copy_(begun)

    alone = dataclasses.replace(weights, layers=(w.block,), hc_head=w.hc_head, norm=w.norm)
    state = State(SMALL, "fp32", sequences=1, blocks=2, chunk=len(copies))
    batch = state.plan({state.open()[0]: [0] * len(copies)})
    return Model(alone, dataclasses.replace(ops.REFERENCE, start=start)).forward(batch, state, every=True).logits


@torch.inference_mode()
def drafted(model: Model, copies: torch.Tensor, following: torch.Tensor, chunk: int = 64) -> torch.Tensor:
    """Logits of all tokens, in calls of at most `chunk` tokens."""
    state = State(SMALL, "fp32", sequences=2, blocks=4, chunk=chunk)
    state.open()
    sequence, _ = state.open()
    found = []
    for part in torch.arange(len(copies)).split(chunk):
        batch = state.plan({sequence: [0] * len(part)})  # the batch's tokens play no part, only the following ones
        found.append(mtp.draft(model, batch, state, copies[part], following[part]))
        state.commit(batch)
    return torch.cat(found)


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def test_every_logit_is_that_of_the_formulas(model, given):
    want, got = expected(model.weights, *given), drafted(model, *given)
    assert want.std() > 0.5 and got.dtype == torch.float32 and apart(got, want) < RTOL
    assert max(apart(row, target) for row, target in zip(got, want, strict=True)) < 10 * RTOL


@torch.inference_mode()
def test_each_position_is_paired_with_the_token_after_it(model, monkeypatch):
    """A prompt in two calls, then verified passes: the copies are the main model's, the tokens those that follow."""
    seen = []

    def record(model, batch, state, copies, following):
        seen.append((batch.lists.position.tolist(), batch.tokens.tolist(), following.tolist()))
        return real(model, batch, state, copies, following)

    real = mtp.draft
    monkeypatch.setattr(mtp, "draft", record)
    prompt = torch.randint(SMALL.vocab_size, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    state = State(SMALL, "fp32", sequences=1, blocks=2, chunk=32)
    speculative = mtp.Speculative(model, state, state.open()[0])
    told, steps = [*prompt, speculative.prefill(prompt)], speculative.steps()
    for _ in range(4):
        told += next(steps).tokens
    told = dict(enumerate(told))
    for positions, tokens, following in seen:
        for position, token, after in zip(positions, tokens, following, strict=True):
            if told.get(position) == token and position + 1 in told:  # not behind a wrong guess
                assert after == told[position + 1]
    assert [p for positions, _, _ in seen[:2] for p in positions] == list(range(40))
