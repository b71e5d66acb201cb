"""mHC against loops over fp64 scalars, and against what others got wrong: order, orientation, epsilons, iterations."""

import dataclasses
import math

import pytest
import torch
from torch._subclasses import FakeTensorMode

from problems.dsv4_forward import layers
from problems.dsv4_forward.torch_ops import mhc
from problems.dsv4_forward.weights import config
from problems.dsv4_forward.weights.tree import Site

CFG = dataclasses.replace(config.TINY, hidden_size=40)  # d is no multiple of n squared, n d none of a vector's width
N, D = 4, CFG.hidden_size
EPS = 1e-6


def weights(seed: int = 0, rows: int = 24, scales: int = 3, strength: float = 1.0):
    gen = torch.Generator().manual_seed(seed)
    fn = torch.randn(rows, N * D, generator=gen) / math.sqrt(N * D)
    base = torch.randn(rows, generator=gen) * strength
    scale = strength * torch.tensor([0.7, 1.9, 3.1])[:scales]
    return fn, base, scale


def copies(tokens: int = 5, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of very different sizes, down to where the epsilon of the norm acts."""
    gen = torch.Generator().manual_seed(seed)
    size = torch.tensor([1.0, 1e-3, 100.0, 0.1, 7.0])[:tokens].view(-1, 1, 1)
    return (torch.randn(tokens, N, D, generator=gen) * size).to(dtype)


def ours(x: torch.Tensor, fn, base, scale, cfg: config.Config = CFG, dtype: torch.dtype = torch.float32):
    """u, post, comb, out of poisoned buffers."""
    u = torch.full((len(x), D), math.nan, dtype=dtype)
    post, comb = torch.full((len(x), N), math.nan), torch.full((len(x), N, N), math.nan)
    mhc.pre(x, fn, base, scale, cfg, u, post, comb)
    return u, post, comb


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))


def mixed(x: torch.Tensor, fn: torch.Tensor) -> list[float]:
    """x: one token (n, d). fn @ vec(x) / rms(vec(x))."""
    flat = x.double().flatten()
    inverse = 1 / math.sqrt(float(sum(v * v for v in flat)) / len(flat) + EPS)
    return [float(sum(a * b for a, b in zip(row, flat, strict=True))) * inverse for row in fn.double()]


def balanced(logits: list[list[float]], iterations: int = 20, rows_first: bool = False) -> list[list[float]]:
    """Softmax over k, then `iterations` of a row and a column step of which the first is the column step alone."""
    m = []
    for row in logits:
        powers = [math.exp(a - max(row)) for a in row]
        m.append([p / sum(powers) + EPS for p in powers])

    def rows(m):
        return [[v / (sum(row) + EPS) for v in row] for row in m]

    def columns(m):
        sums = [sum(row[k] for row in m) + EPS for k in range(N)]
        return [[v / sums[k] for k, v in enumerate(row)] for row in m]

    first, second = (rows, columns) if rows_first else (columns, rows)
    m = first(m)
    for _ in range(iterations - 1):
        m = first(second(m))
    return m


def oracle(x: torch.Tensor, fn, base, scale, **wrong):
    """u, post, comb in fp64, a token at a time."""
    b, s = base.double().tolist(), scale.double().tolist()
    us, posts, combs = [], [], []
    for token in x:
        z = mixed(token, fn)
        pre = [sigmoid(z[j] * s[0] + b[j]) + EPS for j in range(N)]
        posts.append([2 * sigmoid(z[N + k] * s[1] + b[N + k]) for k in range(N)])
        at = 2 * N
        logits = [[z[at + N * j + k] * s[2] + b[at + N * j + k] for k in range(N)] for j in range(N)]
        combs.append(balanced(logits, **wrong))
        us.append(sum(pre[j] * token[j].double() for j in range(N)))
    return torch.stack(us), torch.tensor(posts).double(), torch.tensor(combs, dtype=torch.float64)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest error of a row, over the row's largest value."""
    scale = want.abs().flatten(1).amax(1).clamp(min=1e-30)
    return float(((got.double() - want).abs().flatten(1).amax(1) / scale).max())


@pytest.mark.parametrize("strength", [1.0, 8.0])
def test_pre_is_the_formula(strength):
    given = weights(strength=strength)
    got, want = ours(copies(), *given), oracle(copies(), *given)
    for name, mine, exact in zip(("u", "post", "comb"), got, want, strict=True):
        assert relative(mine, exact) < 3e-6 * max(1, strength), name


@pytest.mark.parametrize("wrong", [{"rows_first": True}, {"iterations": 19}, {"iterations": 21}], ids=str)
def test_another_order_or_number_of_sinkhorn_steps_would_be_seen(wrong):
    given = weights(seed=3, strength=8.0)  # far from doubly stochastic, so that 20 iterations have not converged
    comb = ours(copies(), *given)[2]
    assert relative(comb, oracle(copies(), *given)[2]) < 3e-6
    assert relative(comb, oracle(copies(), *given, **wrong)[2]) > 1e-4


def test_the_last_step_is_on_columns():
    comb = ours(copies(), *weights(seed=3, strength=8.0))[2].double()
    assert (comb.sum(1) - 1).abs().max() < 3e-6  # over the first index
    assert (comb.sum(2) - 1).abs().max() > 1e-3  # a row step would have ended here


def test_the_number_of_iterations_is_the_configurations():
    assert CFG.hc_sinkhorn_iters == 20
    given, three = weights(strength=8.0), dataclasses.replace(CFG, hc_sinkhorn_iters=3)
    comb = ours(copies(), *given, cfg=three)[2]
    assert relative(comb, oracle(copies(), *given, iterations=3)[2]) < 3e-6


def test_pre_has_an_epsilon_and_post_has_none():
    fn, base, scale = weights()
    base[: 2 * N] = -30  # a sigmoid of 1e-13
    x = copies()
    u, post, _ = ours(x, fn, base, scale)
    want_u, want_post, _ = oracle(x, fn, base, scale)
    assert relative(u, want_u) < 3e-6 and relative(u, 1e-6 * x.double().sum(1)) < 1e-4
    assert post.max() < 1e-9 and relative(post, want_post) < 1e-5
    base[: 2 * N] = 30
    u, post, _ = ours(x, fn, base, scale)
    assert float(post.max()) == 2 and relative(u, (1 + 1e-6) * x.double().sum(1)) < 1e-6


def test_the_combination_is_row_major():
    fn, base, scale = weights()
    base[2 * N :] = 0
    base[2 * N + 4 * 1 + 3] = 12.0  # logit (1, 3)
    comb = ours(copies(), fn, base, 0 * scale)[2]
    assert (comb[:, 1, 3] > 0.9).all() and (comb[:, 3, 1] < 0.4).all()


def test_a_column_of_almost_nothing_stays_finite():
    fn, base, scale = weights()
    base[2 * N :] = torch.tensor([200.0, -200, -200, -200]).repeat(N)
    given = fn, base, scale
    assert relative(ours(copies(), *given)[2], oracle(copies(), *given)[2]) < 1e-5


def test_post_sums_over_the_first_index():
    gen = torch.Generator().manual_seed(5)
    x, y = copies(), torch.randn(5, D, generator=gen)
    post, comb = torch.rand(5, N, generator=gen), torch.rand(5, N, N, generator=gen)
    out = torch.full_like(x, math.nan)
    mhc.post(y, x, post, comb, out)
    want = torch.zeros(5, N, D, dtype=torch.float64)
    turned = want.clone()
    for t in range(5):
        for k in range(N):
            want[t, k] = post[t, k].double() * y[t].double()
            turned[t, k] = want[t, k]
            for j in range(N):
                want[t, k] += comb[t, j, k].double() * x[t, j].double()
                turned[t, k] += comb[t, k, j].double() * x[t, j].double()
    assert relative(out, want) < 1e-6
    assert relative(out, turned) > 1e-2


def test_two_addends_are_rounded_once_to_the_dtype_of_the_copies():
    gen, x = torch.Generator().manual_seed(5), copies().bfloat16()
    first, second = torch.randn(2, 5, D, generator=gen)
    post, comb = torch.rand(5, N, generator=gen), torch.rand(5, N, N, generator=gen)
    out, want = (torch.full_like(x, math.nan) for _ in range(2))
    mhc.post(first, x, post, comb, out, second)
    mhc.post((first + second).bfloat16(), x, post, comb, want)
    assert torch.equal(out, want)


def test_one_entry_of_the_combination_moves_one_lane():
    x, comb = copies(), torch.zeros(5, N, N)
    comb[:, 1, 3] = 1
    out = torch.full_like(x, math.nan)
    mhc.post(torch.ones(5, D), x, torch.zeros(5, N), comb, out)
    assert torch.equal(out[:, 3], x[:, 1]) and not out[:, :3].any()


def test_head_is_the_formula():
    fn, base, scale = weights(rows=N, scales=1)
    x, whole = copies(), layers.whole_site(Site(fn, base, scale), CFG)
    out, *_ = ours(x, whole.fn, whole.base, whole.scale)
    rows = []
    for token in x:
        z = mixed(token, fn)
        pre = [sigmoid(z[j] * float(scale) + float(base[j])) + EPS for j in range(N)]
        rows.append(sum(pre[j] * token[j].double() for j in range(N)))
    assert relative(out, torch.stack(rows)) < 3e-6


def rounded_once(got: torch.Tensor, exact: torch.Tensor) -> bool:
    """Half a bf16 ulp at most, but for fp32 noise."""
    exact = exact.double()
    ulp = torch.exp2(exact.abs().clamp(min=1e-30).log2().floor() - 7)
    return bool(((got.double() - exact).abs() <= ulp * 0.5 + exact.abs().amax(-1, keepdim=True) * 1e-6).all())


def test_bf16_lanes_are_rounded_once():
    given, x = weights(), copies(dtype=torch.bfloat16)
    u, post, comb = ours(x, *given, dtype=torch.bfloat16)
    want_u, want_post, want_comb = oracle(x, *given)
    assert rounded_once(u, want_u)
    assert relative(post, want_post) < 3e-6 and relative(comb, want_comb) < 3e-6
    y, out = torch.randn(5, D).bfloat16(), torch.empty_like(x)
    mhc.post(y, x, post, comb, out)
    exact = post.double().unsqueeze(2) * y.double().unsqueeze(1)
    assert rounded_once(out, exact + torch.einsum("tjk,tjd->tkd", comb.double(), x.double()))


def test_a_token_does_not_depend_on_the_others():
    given, x = weights(strength=3.0), copies()
    whole = ours(x, *given)
    for t in range(len(x)):
        for mine, alone in zip(whole, ours(x[t : t + 1], *given), strict=True):
            assert relative(mine[t : t + 1], alone.double()) < 1e-6


def test_no_tokens_are_fine():
    u, post, comb = ours(copies()[:0], *weights())
    assert u.shape == (0, D) and comb.shape == (0, N, N)
    mhc.post(u, copies()[:0], post, comb, torch.empty(0, N, D))


def test_inputs_are_left_alone():
    given, x = weights(), copies()
    before = [t.clone() for t in (*given, x)]
    u, post, comb = ours(x, *given)
    kept = post.clone(), comb.clone()
    mhc.post(u, x, post, comb, torch.empty_like(x))
    assert all(torch.equal(a, b) for a, b in zip((*given, x, post, comb), (*before, *kept), strict=True))


def test_nothing_reads_a_tensor_on_the_host():
    with FakeTensorMode() as mode:  # raises where the host needs a value
        x, *given = (mode.from_tensor(t) for t in (copies(dtype=torch.bfloat16), *weights()))
        u, post, comb = (torch.empty(s) for s in ((5, D), (5, N), (5, N, N)))
        mhc.pre(x, *given, CFG, u, post, comb)
        mhc.post(u, x, post, comb, torch.empty(5, N, D))


@pytest.mark.parametrize(
    ("name", "change"),
    [("fn", lambda a: a[:23]), ("base", lambda a: a.double()), ("scale", lambda a: a[:1]), ("fn", lambda a: a[:, :-1])],
)
def test_a_wrong_shape_or_dtype_is_named(name, change):
    given = dict(zip(("fn", "base", "scale"), weights(), strict=True))
    given[name] = change(given[name])
    with pytest.raises(ValueError, match=f"^{name} must be"):
        ours(copies(), **given)


def test_wrong_outputs_are_named():
    x, post, comb = copies(), torch.empty(5, N), torch.empty(5, N, N)
    with pytest.raises(ValueError, match=r"^comb must be"):
        mhc.pre(x, *weights(), CFG, torch.empty(5, D), post, comb.half())
    with pytest.raises(ValueError, match=r"^out must be"):
        mhc.pre(x, *weights(), CFG, torch.empty(5, D + 1), post, comb)
    with pytest.raises(ValueError, match=r"^y must be"):
        mhc.post(torch.empty(5, 1), x, post, comb, torch.empty_like(x))
