"""torch_ops/experts.py against fp64, a token-expert pair at a time, in every weight format."""

import dataclasses
import math

import pytest
import torch
from torch._subclasses import FakeTensorMode

from problems.dsv4_forward import layers
from problems.dsv4_forward.cache.state import State
from problems.dsv4_forward.model import Model
from problems.dsv4_forward.torch_ops import experts, linear, router
from problems.dsv4_forward.weights import tree
from problems.dsv4_forward.weights.config import TINY
from problems.dsv4_forward.weights.linear import Linear
from tests.dsv4.linears import random as rand
from tests.dsv4.linears import weight_of

N, D, E, K, I = 9, 160, 13, 3, 96  # D: a group of 128 and a part; I: neither a group nor a tile
WAYS = (None, experts.by_hit, experts.by_pair, experts.by_expert)
FORMATS = ("plain", "fp8", "mxfp4", "nvfp4")


def bank(kind: str, count: int = E) -> tuple[Linear, Linear]:
    """w13 and w2 with values of about 1 / sqrt(k), different scales by expert."""
    return weight_of(kind, count, 2 * I, D, size=D**-0.5), weight_of(kind, count, D, I, seed=2, size=I**-0.5)


def choice(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct experts a token, most of them chosen by somebody, one by nobody."""
    gen = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(E - 1, generator=gen)[:K] for _ in range(N)]).int()
    return ids, torch.rand(N, K, generator=gen) + 0.1


def fed(x: torch.Tensor, w: Linear, expert: int) -> torch.Tensor:
    """x: (k,) -> as the format feeds it to the product, fp64."""
    return linear.input_values(x.float().unsqueeze(0), w.select(expert))[0].double()


def exact_expert(x, gate: float, w13: Linear, w2: Linear, expert: int, limit: float) -> torch.Tensor:
    """One token through one expert: the routing weight acts before w2's input is quantised."""
    a, b = (w13.select(expert).dequantise().double() @ fed(x, w13, expert)).chunk(2)
    value = torch.nn.functional.silu(a.clamp(max=limit)) * b.clamp(-limit, limit) * gate
    return w2.select(expert).dequantise().double() @ fed(value.to(x.dtype), w2, expert)


def exact(x, ids, weights, w13, w2, limit) -> torch.Tensor:
    rows = []
    for token, chosen, gates in zip(x, ids.tolist(), weights.double().tolist(), strict=True):
        rows.append(sum(exact_expert(token, g, w13, w2, e, limit) for e, g in zip(chosen, gates, strict=True)))
    return torch.stack(rows)


def ours(x, ids, weights, w13, w2, limit, way=None, dtype=torch.float32) -> torch.Tensor:
    """By `experts`, or by one of its ways on its own."""
    out = torch.full((len(x), w2.n), math.nan, dtype=dtype)
    if way is None:
        experts.experts(x, ids, weights, w13, w2, limit, out)
        return out
    parts = torch.full((*ids.shape, w2.n), math.nan)
    way(x, ids, weights, experts.ExpertWeights(w13, w2, limit), parts)
    return out.copy_(parts.sum(1))


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The worst row: its largest error over its root mean square."""
    return float(((got.double() - want).abs().amax(1) / want.square().mean(1).sqrt()).max())


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("limit", [1.0, 10.0])
def test_experts_are_the_formula(kind, limit):
    x, (ids, weights), (w13, w2) = 2 * rand(N, D, seed=7), choice(), bank(kind)
    if kind == "plain":  # that a token has one twice shows where the sum of its weights is not quantised
        ids[1, 2] = ids[1, 0]
    want = exact(x, ids, weights, w13, w2, limit)
    for way in WAYS:
        assert error(ours(x, ids, weights, w13, w2, limit, way), want) < 5e-6
    other = exact(x, ids, weights, w13, w2, 11 - limit)
    assert error(want, other) > 0.05, "the clamp acts"


@pytest.mark.parametrize("kind", FORMATS)
def test_the_shared_expert(kind):
    x, (w13, w2) = 2 * rand(N, D, seed=7), bank(kind, count=1)
    out = torch.full((N, D), math.nan)
    experts.shared(x, w13, w2, 1.0, out)
    want = torch.stack([exact_expert(token, 1.0, w13, w2, 0, 1.0) for token in x])
    assert error(out, want) < 5e-6


def test_bf16_rounds_the_inner_value_and_the_sum():
    """bf16 x and plain bf16 weights: no rounding of gate and up, of an expert's output, or of partial sums."""
    x, (ids, weights) = (2 * rand(N, D, seed=7)).bfloat16(), choice()
    w13, w2 = (dataclasses.replace(w, weight=w.weight.bfloat16()) for w in bank("plain"))
    want = exact(x, ids, weights, w13, w2, 10.0)
    unrounded = exact(x.float(), ids, weights, w13, w2, 10.0)
    got = ours(x, ids, weights, w13, w2, 10.0)
    # A gate within fp32 noise of the middle between two bf16 values may fall either way: an ulp of one value in 96.
    assert error(got, want) < 2e-3 < error(got, unrounded)
    short = ours(x, ids, weights, w13, w2, 10.0, dtype=torch.bfloat16)
    assert torch.equal(short, got.bfloat16())


@pytest.mark.parametrize("fmt", ["bf16", "nvfp4"])
def test_a_layer_rounds_the_sum_of_routed_and_shared_experts_once(fmt):
    model, state = Model(tree.random(TINY, fmt, seed=3)), State(TINY, fmt, sequences=1, blocks=1)
    ctx, *_ = model.start(state.plan({state.open()[0]: list(range(50))}))
    ffn = model.weights.layers[3].ffn
    u = rand(50, TINY.hidden_size).bfloat16()
    ids, gates = torch.empty(50, 2, dtype=torch.int32), torch.empty(50, 2)
    router.route(u, ffn.router.weight, ffn.router.bias, ffn.router.table, ctx.batch.tokens, TINY, ids, gates)
    one, other = torch.empty(2, *u.shape)
    experts.experts(u, ids, gates, ffn.w13, ffn.w2, TINY.swiglu_limit, one)
    experts.shared(u, ffn.shared_w13, ffn.shared_w2, TINY.swiglu_limit, other)
    got, second = layers.moe(u, ffn, ctx)
    assert second is None and got.dtype == torch.bfloat16 and torch.equal(got, (one + other).bfloat16())
    thrice = one.bfloat16() + other.bfloat16()
    assert 0.1 < float((got != thrice).float().mean()) < 0.9, "rounding each of them first gives other sums"


@pytest.mark.parametrize("kind", FORMATS)
def test_a_token_does_not_depend_on_the_others(kind):
    x, (ids, weights), (w13, w2) = 2 * rand(N, D, seed=7), choice(), bank(kind)
    whole = ours(x, ids, weights, w13, w2, 1.0)
    other = torch.full_like(x, math.nan)
    for t in range(N):
        one = slice(t, t + 1)
        alone = ours(x[one], ids[one], weights[one], w13, w2, 1.0)
        assert error(whole[one], alone.double()) < 2e-6
        mixed = other.clone()
        mixed[t] = x[t]  # the others are NaN
        for way in WAYS[1:]:
            assert error(ours(mixed, ids, weights, w13, w2, 1.0, way)[one], alone.double()) < 2e-6


@pytest.mark.parametrize("kind", ["plain", "nvfp4"])
@pytest.mark.parametrize("way", [experts.by_pair, experts.by_expert])
def test_nothing_reads_a_tensor_on_the_host(way, kind):
    """Of the ways that a GPU takes; on the CPU, reading ids is free."""
    given, weights = (rand(N, D).bfloat16(), *choice()), bank(kind, count=3)
    with FakeTensorMode() as mode:  # raises where the host needs a value
        faked = experts.ExpertWeights(*(fake(mode, w) for w in weights), 1.0)
        way(*(mode.from_tensor(t) for t in given), faked, torch.empty(N, K, D))


def fake(mode: FakeTensorMode, w: Linear) -> Linear:
    tensors = {name: mode.from_tensor(t) for name, t in vars(w).items() if isinstance(t, torch.Tensor)}
    return dataclasses.replace(w, **tensors)


def test_wrong_shapes_and_dtypes_are_named():
    x, (ids, weights), (w13, w2) = rand(N, D), choice(), bank("plain")
    for given, named in (
        ((x, ids.long(), weights, w13), "ids must be torch.int32"),
        ((x, ids, weights[:, :2], w13), "weights must be of the shape"),
        ((x[:, :-1], ids, weights, w13), "x and out must be"),
        ((x, ids, weights, weight_of("plain", E, I, D)), "w13 must have twice"),
    ):
        with pytest.raises(ValueError, match=f"^{named}"):
            ours(*given, w2, 1.0)
    for bad in (-1, E):
        ids[4, 1] = bad
        with pytest.raises(ValueError, match=rf"^ids must be 0 \.\. 12, got .*{bad}"):
            ours(x, ids, weights, w13, w2, 1.0)
    with pytest.raises(ValueError, match=r"^w13 must hold one expert"):
        experts.shared(x, w13, w2, 1.0, torch.empty(N, D))
