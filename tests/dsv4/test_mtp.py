"""MTP's arithmetic against an independent computation in fp64: plain torch operations, from README.md's formulas."""

import dataclasses
import math

import pytest
import torch

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


# The computation: T tokens of one sequence from position 0; w: the prediction layer's tensors by name, fp64.


def normed(x: torch.Tensor, weight: torch.Tensor | float = 1.0) -> torch.Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + SMALL.rms_norm_eps).sqrt()


def expected(weights: tree.ModelWeights, copies: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """copies (T, n, d), following (T,) -> logits fp64 (T, vocab)."""
    every = {name: t.double() for name, t in weights.tensors.items() if t.is_floating_point()}
    w = {name.removeprefix("mtp.0."): t for name, t in every.items() if name.startswith("mtp.0.")}
    embedding = every["embed.weight"][following]
    embedding[0] = 0  # position 0
    token = normed(embedding, w["enorm.weight"]) @ w["e_proj.weight"].T
    before = normed(copies.double(), w["hnorm.weight"]) @ w["h_proj.weight"].T
    x = before + token[:, None]
    for site, sublayer in (("attn", attention), ("ffn", experts)):
        read, post, comb = mixes(x, w, f"hc_{site}")
        u = torch.einsum("tj,tjd->td", read, x)
        y = sublayer(normed(u, w[f"{site}_norm.weight"]), w)
        x = torch.einsum("tk,td->tkd", post, y) + torch.einsum("tjk,tjd->tkd", comb, x)
    read = projected(x, w, "hc_head", slice(None), 0).sigmoid() + SMALL.hc_eps
    final = torch.einsum("tj,tjd->td", read, x)
    return normed(final, w["norm.weight"]) @ every["head.weight"].T


def projected(x: torch.Tensor, w: dict, site: str, rows: slice, part: int) -> torch.Tensor:
    """fn v / rms(v), scaled and shifted; v is all n d values of a token."""
    z = normed(x.flatten(1)) @ w[f"{site}_fn"][rows].T
    return z * w[f"{site}_scale"][part] + w[f"{site}_base"][rows]


def mixes(x: torch.Tensor, w: dict, site: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n, eps = SMALL.hc_mult, SMALL.hc_eps
    read = projected(x, w, site, slice(0, n), 0).sigmoid() + eps
    post = 2 * projected(x, w, site, slice(n, 2 * n), 1).sigmoid()
    comb = projected(x, w, site, slice(2 * n, None), 2).view(-1, n, n).softmax(2) + eps
    comb = comb / (comb.sum(1, keepdim=True) + eps)
    for _ in range(SMALL.hc_sinkhorn_iters - 1):
        comb = comb / (comb.sum(2, keepdim=True) + eps)
        comb = comb / (comb.sum(1, keepdim=True) + eps)
    return read, post, comb


def rotated(x: torch.Tensor, sign: int = 1) -> torch.Tensor:
    """x (T, ..., D): pairs of its last values turned by position * theta^(-2i / r)."""
    r = SMALL.qk_rope_head_dim
    angle = torch.arange(len(x), dtype=torch.float64).view(-1, *[1] * (x.dim() - 1))
    angle = sign * angle * SMALL.rope_theta ** (-torch.arange(0, r, 2, dtype=torch.float64) / r)
    a, b = x[..., -r::2], x[..., -r + 1 :: 2]
    pairs = torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)
    return torch.cat([x[..., :-r], pairs.flatten(-2)], -1)


def attention(u: torch.Tensor, w: dict) -> torch.Tensor:
    count, heads, width = len(u), SMALL.num_attention_heads, SMALL.head_dim
    latent = normed(u @ w["attn.wq_a.weight"].T, w["attn.q_norm.weight"])
    query = rotated(normed((latent @ w["attn.wq_b.weight"].T).view(count, heads, width)))
    key = rotated(normed(u @ w["attn.wkv.weight"].T, w["attn.kv_norm.weight"]))
    score = torch.einsum("qhd,kd->qhk", query, key) / math.sqrt(width)
    back = torch.arange(count)[:, None] - torch.arange(count)
    seen = (back >= 0) & (back < SMALL.sliding_window)
    weight = score.exp() * seen[:, None]
    weight = weight / (weight.sum(2, keepdim=True) + w["attn.attn_sink"].exp()[:, None])
    out = rotated(torch.einsum("qhk,kd->qhd", weight, key), -1).view(count, SMALL.o_groups, -1)
    low = torch.einsum("tgk,gnk->tgn", out, w["attn.wo_a.weight"])
    return low.flatten(1) @ w["attn.wo_b.weight"].T


def gated(u: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    gate, up = (u @ w13.T).chunk(2, -1)
    limit = SMALL.swiglu_limit
    return torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit) @ w2.T


def experts(u: torch.Tensor, w: dict) -> torch.Tensor:
    score = (1 + (u @ w["ffn.gate.weight"].T).exp()).log().sqrt()
    total = gated(u, w["ffn.shared_experts.w13.weight"][0], w["ffn.shared_experts.w2.weight"][0])
    for token, row in enumerate(score):
        chosen = (row + w["ffn.gate.bias"]).sort(descending=True).indices[: SMALL.num_experts_per_tok].tolist()
        for e in chosen:
            share = SMALL.routed_scaling_factor * row[e] / row[chosen].sum()
            total[token] += share * gated(u[token], w["ffn.experts.w13.weight"][e], w["ffn.experts.w2.weight"][e])
    return total


# The comparison.


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
    assert want.std() > 0.5 and got.dtype == torch.float32
    assert apart(got, want) < RTOL
    assert max(apart(row, target) for row, target in zip(got, want, strict=True)) < 10 * RTOL


@torch.inference_mode()
def test_only_the_window_of_the_prediction_layer_is_written(model, given):
    copies, following = given
    state = State(SMALL, "fp32", sequences=1, blocks=1, chunk=8)
    batch = state.plan({state.open()[0]: [0] * 8})
    before = state.layers[0].window.data.clone()
    mtp.draft(model, batch, state, copies[:8], following[:8])
    assert torch.equal(state.layers[0].window.data, before)
    assert int(state.mtp.window.data.any(-1).sum()) == 8


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
