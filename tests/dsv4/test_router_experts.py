"""Router and experts against fp64, a token-expert pair at a time, in every weight format."""

import dataclasses
import math
import operator

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

N, D, E, K, I, V = 9, 160, 13, 3, 96, 29  # D: a group of 128 and a part; I: neither a group nor a tile
CFG = dataclasses.replace(TINY, n_routed_experts=E, num_experts_per_tok=K, routed_scaling_factor=2.5)
FORMATS = ("plain", "fp8", "mxfp4", "nvfp4")


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# Router


def exact_scores(u: torch.Tensor, weight: torch.Tensor) -> list[list[float]]:
    matrix = weight.double().tolist()
    logits = [[sum(map(operator.mul, x, w)) for w in matrix] for x in u.double().tolist()]
    return [[math.sqrt(v if v > 20 else math.log1p(math.exp(v))) for v in row] for row in logits]


def exact_route(u, weight, bias, table, tokens) -> tuple[list[list[int]], list[list[float]]]:
    ids, gates = [], []
    for row, token in zip(exact_scores(u, weight), tokens.tolist(), strict=True):
        if table is None:
            order = sorted(range(E), key=lambda e: -(row[e] + float(bias[e])))
            chosen = order[:K]
        else:
            chosen = table[token].tolist()
        total = sum(row[e] for e in chosen)
        ids.append(chosen)
        gates.append([row[e] / total * CFG.routed_scaling_factor for e in chosen])
    return ids, gates


def routed(u, weight, bias, table, tokens):
    ids, gates = torch.full((len(u), K), -7, dtype=torch.int32), torch.full((len(u), K), math.nan)
    router.route(u, weight, bias, table, tokens, CFG, ids, gates)
    return ids, gates


def routing(dtype: torch.dtype = torch.float32):
    """Logits of about 3 standard deviations; a bias as large as the scores."""
    u, weight = rand(N, D).to(dtype), (rand(E, D, seed=1) * 3 / D**0.5).to(dtype)
    tokens = torch.randint(V, (N,), generator=torch.Generator().manual_seed(2))
    return u, weight, 2 * rand(E, seed=3), tokens


def hashes() -> torch.Tensor:
    gen = torch.Generator().manual_seed(4)
    return torch.stack([torch.randperm(E, generator=gen)[:K] for _ in range(V)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hashed", [False, True])
def test_route_is_the_formula(hashed, dtype):
    u, weight, bias, tokens = routing(dtype)
    given = (None, hashes()) if hashed else (bias, None)
    ids, gates = routed(u, weight, *given, tokens)
    want_ids, want = exact_route(u, weight, *given, tokens)
    assert ids.tolist() == want_ids
    torch.testing.assert_close(gates.double(), torch.tensor(want).double(), rtol=2e-6, atol=0)
    torch.testing.assert_close(gates.sum(1), torch.full((N,), 2.5), rtol=1e-6, atol=0)


def test_bias_selects_and_does_not_weigh():
    u, weight, bias, tokens = routing()
    ids, gates = routed(u, weight, bias, None, tokens)
    assert ids.tolist() != routed(u, weight, 0 * bias, None, tokens)[0].tolist()
    score = router.scores(u, weight)
    biased = (score + bias).gather(1, ids.long())
    assert (gates - 2.5 * biased / biased.sum(1, keepdim=True)).abs().max() > 0.1
    same = routed(u, weight, bias + 100, None, tokens)
    assert torch.equal(ids, same[0]) and torch.equal(gates, same[1])


def test_hash_layers_weigh_by_score_and_choose_by_token():
    u, weight, _, tokens = routing()
    table = hashes()
    ids, gates = routed(u, weight, None, table, tokens)
    assert torch.equal(ids.long(), table[tokens])
    assert not torch.equal(gates, routed(u.flip(0), weight, None, table, tokens)[1])
    flipped = routed(u, weight, None, table, tokens.flip(0))[0]
    assert torch.equal(flipped, ids.flip(0)) and not torch.equal(flipped, ids)


def test_an_id_that_the_table_has_not_takes_the_nearest_row():
    u, weight, _, tokens = routing()
    tokens[0], tokens[4] = V, -1
    got, want = (routed(u, weight, None, hashes(), ids) for ids in (tokens, tokens.clamp(0, V - 1)))
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_scores_of_bf16_are_fp32_products():
    u, weight, _, _ = routing(torch.bfloat16)
    exact = torch.tensor(exact_scores(u, weight), dtype=torch.float64)
    got = router.scores(u, weight)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), exact, rtol=3e-6, atol=1e-7)
    rounded = torch.nn.functional.softplus((u @ weight.T).float()).sqrt()
    assert ((rounded - exact).abs() / exact).max() > 1e-4


def test_scores_of_large_logits():
    u = torch.tensor([[1.0]])
    logits = torch.tensor([-80.0, -20, -1, 0, 1, 19.99, 20.01, 500])
    got = router.scores(u, logits.unsqueeze(1))[0].tolist()
    want = [math.sqrt(math.log1p(math.exp(v)) if v < 20 else v) for v in logits.tolist()]
    assert got == pytest.approx(want, rel=1e-6)


def test_route_needs_one_of_bias_and_table():
    u, weight, bias, tokens = routing()
    with pytest.raises(ValueError, match="neither"):
        routed(u, weight, None, None, tokens)
    with pytest.raises(ValueError, match="both"):
        routed(u, weight, bias, hashes(), tokens)
    with pytest.raises(ValueError, match=r"^table must name 3"):
        routed(u, weight, None, hashes()[:, :2], tokens)
    with pytest.raises(ValueError, match=r"^out_ids must be torch.int32"):
        router.route(u, weight, bias, None, tokens, CFG, torch.empty(N, K).long(), torch.empty(N, K))


# Experts


def bank(kind: str, count: int = E, seed: int = 0) -> tuple[Linear, Linear]:
    """w13 and w2 with values of about 1 / sqrt(k), different scales by expert."""
    return matrix(kind, count, 2 * I, D, seed), matrix(kind, count, D, I, seed + 50)


def matrix(kind: str, count: int, n: int, k: int, seed: int) -> Linear:
    gen = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, (count, *shape), generator=gen).to(torch.uint8)

    values = torch.randn(count, n, k, generator=gen) * k**-0.5
    if kind == "plain":
        return Linear("plain", values)
    if kind == "fp8":
        scale = integers(121, 124, -(-n // 128), -(-k // 128))
        return Linear("fp8", (values * 32).to(torch.float8_e4m3fn), scale)
    codes = integers(0, 256, n, k // 2)
    if kind == "mxfp4":
        return Linear("mxfp4", codes, integers(121, 124, n, k // 32))
    scale = (torch.rand(count, n, k // 16, generator=gen) * 3 + 0.5).to(torch.float8_e4m3fn)
    scale_2 = 0.02 * (1 + torch.rand(count, generator=gen))
    return Linear("nvfp4", codes, scale, scale_2, 2e-3 * (1 + torch.rand(count, generator=gen)))


def choice(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct experts a token, most of them chosen by somebody, one by nobody."""
    gen = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(E - 1, generator=gen)[:K] for _ in range(N)]).int()
    return ids, torch.rand(N, K, generator=gen) + 0.1


def fed(x: torch.Tensor, w: Linear, expert: int) -> torch.Tensor:
    """x: (k,) -> as the format feeds it to the product, fp64."""
    return linear.input_values(x.float().unsqueeze(0), w.select(expert))[0].double()


def exact_expert(x, gate: float, w13: Linear, w2: Linear, expert: int, limit: float, late: bool = False):
    """One token through one expert. late: the routing weight after w2, which is wrong."""
    mixed = w13.select(expert).dequantise().double() @ fed(x, w13, expert)
    inner = []
    for a, b in zip(mixed[:I].tolist(), mixed[I:].tolist(), strict=True):
        a, b = min(a, limit), max(-limit, min(b, limit))
        inner.append(a / (1 + math.exp(-a)) * b * (1 if late else gate))
    values = torch.tensor(inner, dtype=torch.float64).to(x.dtype)
    return w2.select(expert).dequantise().double() @ fed(values, w2, expert) * (gate if late else 1)


def exact(x, ids, weights, w13, w2, limit, late=False) -> torch.Tensor:
    rows = []
    for token, chosen, gates in zip(x, ids.tolist(), weights.double().tolist(), strict=True):
        pairs = zip(chosen, gates, strict=True)
        rows.append(sum(exact_expert(token, g, w13, w2, e, limit, late) for e, g in pairs))
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
@pytest.mark.parametrize("way", [None, experts.by_hit, experts.by_pair, experts.by_expert])
def test_experts_are_the_formula(way, kind):
    x, (ids, weights), (w13, w2) = 2 * rand(N, D, seed=7), choice(), bank(kind)
    got = ours(x, ids, weights, w13, w2, 1.0, way)
    assert error(got, exact(x, ids, weights, w13, w2, 1.0)) < 5e-6
    assert error(got, exact(x, ids, weights, w13, w2, 10.0)) > 0.05  # the clamp acts


@pytest.mark.parametrize("kind", ["fp8", "mxfp4", "nvfp4"])
def test_the_routing_weight_acts_before_the_second_product_is_quantised(kind):
    x, (ids, weights), (w13, w2) = 2 * rand(N, D, seed=7), choice(), bank(kind)
    got = ours(x, ids, weights, w13, w2, 10.0)
    assert error(got, exact(x, ids, weights, w13, w2, 10.0)) < 5e-6
    assert error(got, exact(x, ids, weights, w13, w2, 10.0, late=True)) > 1e-2


def test_both_inputs_are_quantised():
    x, (ids, weights), (w13, w2) = 2 * rand(N, D, seed=7), choice(), bank("fp8")
    got = ours(x, ids, weights, w13, w2, 10.0)
    for part in (0, 1):
        given = [w13, w2]
        given[part] = dataclasses.replace(given[part], quantise_input=False)
        assert error(got, exact(x, ids, weights, *given, 10.0)) > 1e-2


@pytest.mark.parametrize(
    ("a", "b", "want"),
    [
        (5.0, 0.5, (1.0, 0.5)),  # the gate from above
        (-5.0, 0.5, (-5.0, 0.5)),  # and not from below
        (0.5, 5.0, (0.5, 1.0)),
        (0.5, -5.0, (0.5, -1.0)),
    ],
)
def test_clamp_sides(a, b, want):
    """One value: w13 makes gate a, up b of x = 1; w2 passes on what they give."""
    w13, w2 = Linear("plain", torch.tensor([[[a], [b]]])), Linear("plain", torch.ones(1, 1, 1))
    out = torch.full((1, 1), math.nan)
    silu = want[0] / (1 + math.exp(-want[0]))
    experts.shared(torch.ones(1, 1), w13, w2, 1.0, out)
    assert float(out) == pytest.approx(silu * want[1], rel=1e-6)
    ids, weights = torch.zeros(1, 1, dtype=torch.int32), torch.full((1, 1), 0.3)
    experts.experts(torch.ones(1, 1), ids, weights, w13, w2, 1.0, out)
    assert float(out) == pytest.approx(0.3 * silu * want[1], rel=1e-6)


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


def test_an_expert_that_a_token_has_twice_counts_twice():
    x, (ids, weights), (w13, w2) = rand(N, D, seed=7), choice(), bank("plain")
    ids[:, 2] = ids[:, 0]
    want = exact(x, ids, weights, w13, w2, 10.0)
    for way in (experts.by_hit, experts.by_pair, experts.by_expert):
        assert error(ours(x, ids, weights, w13, w2, 10.0, way), want) < 5e-6


def test_each_pair_holds_the_output_of_its_expert():
    x, (ids, weights), (w13, w2) = rand(N, D, seed=7), choice(), bank("plain")
    for way in (experts.by_hit, experts.by_pair, experts.by_expert):
        parts = torch.full((N, K, D), math.nan)
        way(x, ids, weights, experts.ExpertWeights(w13, w2, 10.0), parts)
        for k in range(K):
            assert error(parts[:, k], exact(x, ids[:, k : k + 1], weights[:, k : k + 1], w13, w2, 10.0)) < 5e-6


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
        for way in (experts.by_hit, experts.by_pair, experts.by_expert):
            assert error(ours(mixed, ids, weights, w13, w2, 1.0, way)[one], alone.double()) < 2e-6


def test_no_tokens_are_fine():
    w13, w2 = bank("plain")
    none = torch.empty(0, D)
    for way in (None, experts.by_hit, experts.by_pair, experts.by_expert):
        assert ours(none, torch.empty(0, K).int(), torch.empty(0, K), w13, w2, 1.0, way).shape == (0, D)


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


def test_routing_reads_nothing_on_the_host():
    u, weight, bias, tokens = routing(torch.bfloat16)
    table = hashes()
    with FakeTensorMode() as mode:
        u, weight, bias, tokens, table = (mode.from_tensor(t) for t in (u, weight, bias, tokens, table))
        ids, gates = torch.empty(N, K, dtype=torch.int32), torch.empty(N, K)
        router.route(u, weight, bias, None, tokens, CFG, ids, gates)
        router.route(u, weight, None, table, tokens, CFG, ids, gates)


@pytest.mark.parametrize("bad", [-1, E])
def test_an_expert_that_there_is_not_is_named(bad):
    x, (ids, weights), (w13, w2) = rand(N, D), choice(), bank("plain")
    ids[4, 1] = bad
    with pytest.raises(ValueError, match=rf"^ids must be 0 \.\. 12, got .*{bad}"):
        ours(x, ids, weights, w13, w2, 1.0)


def test_wrong_shapes_and_dtypes_are_named():
    x, (ids, weights), (w13, w2) = rand(N, D), choice(), bank("plain")
    with pytest.raises(ValueError, match=r"^ids must be torch.int32"):
        ours(x, ids.long(), weights, w13, w2, 1.0)
    with pytest.raises(ValueError, match=r"^weights must be of the shape"):
        ours(x, ids, weights[:, :2], w13, w2, 1.0)
    with pytest.raises(ValueError, match=r"^x and out must be"):
        ours(x[:, :-1], ids, weights, w13, w2, 1.0)
    with pytest.raises(ValueError, match=r"^w13 must have twice"):
        ours(x, ids, weights, matrix("plain", E, I, D, 0), w2, 1.0)
    with pytest.raises(ValueError, match=r"^w13 must hold one expert"):
        experts.shared(x, w13, w2, 1.0, torch.empty(N, D))
