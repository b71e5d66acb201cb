"""kernels/experts.cu on a GPU, and in the model of one, against fp64."""

import functools

import pytest
import torch

from problems.dsv4_forward.kernels.experts import Experts
from problems.dsv4_forward.weights.linear import Linear
from tests.dsv4 import in_model

draw = functools.partial(in_model.draw, dtype=torch.bfloat16)
kernel = Experts  # for the fixture `ops`, and in_model
DEVICE = "cuda"
BF16, FP32 = torch.bfloat16, torch.float32
LIMIT = 2.0
# Tokens, experts, chosen, hidden, inner. Real sizes; ends inside of a block's rows and columns, an expert that all
# pairs have, in several groups of it, and as many pairs as there may be.
REAL = [*((tokens, 8, 6, 4096, 2048) for tokens in (1, 2, 8, 32)), (42, 256, 6, 4096, 256), (3, 5, 2, 7168, 3072)]
ENDS = [(1, 4, 1, 8, 8), (5, 7, 3, 72, 40), (33, 1, 1, 136, 24), (9, 2, 2, 2104, 1032)]
FULL = [(32, 16, 8, 64, 32), (64, 3, 4, 24, 16)]


def weights(size: int, hidden: int, inner: int) -> tuple[Linear, Linear]:
    made = draw(size, 2 * inner, hidden, seed=1) * (2 * hidden**-0.5), draw(size, hidden, inner, seed=2)
    return tuple(Linear("plain", one) for one in made)


def routed(tokens: int, size: int, chosen: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids, unlike ones in a row where there are enough, else repeated; gates."""
    gen = torch.Generator().manual_seed(tokens + size)
    ids = torch.rand(tokens, max(size, chosen), generator=gen).argsort(1)[:, :chosen] % size
    gates = torch.rand(tokens, chosen, generator=gen) + 0.1
    return ids.to(DEVICE, torch.int32), gates.to(DEVICE)


def near(got: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor, w13: Linear, w2: Linear) -> None:
    """fp32 sums in another order; a value of w2's input that falls on the other side of a rounding moves by a step. ids
    beyond the experts count as zeros.
    """
    size, inner = len(w13.weight), w2.k
    want, terms = (torch.zeros(got.shape, dtype=torch.float64, device=DEVICE) for _ in range(2))
    sums = torch.zeros_like(want)
    for expert in range(size):
        token, k = (ids == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        a, b = (x[token].double() @ w13.weight[expert].double().T).split(inner, 1)
        b = b.clamp(-LIMIT, LIMIT)
        value = torch.nn.functional.silu(a.clamp(max=LIMIT)) * b * gates[token, k].double().unsqueeze(1)
        rounded, w = value.to(BF16).double(), w2.weight[expert].double()
        want.index_add_(0, token, rounded @ w.T)
        sums.index_add_(0, token, rounded.abs() @ w.abs().T)
        terms.index_add_(0, token, (rounded * 2.0**-7).square() @ w.square().T)
    step = 2.0**-8 if got.dtype == BF16 else 0.0
    # `terms`: if all of w2's inputs moved by a step, independently; few of them do.
    error, bound = (got.double() - want).abs(), step * want.abs() + 2e-6 * sums + 0.3 * terms.sqrt()
    assert bool((error <= bound).all()), float((error / bound).max())


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", [FP32, BF16])
@pytest.mark.parametrize("shape", REAL + ENDS + FULL)
def test_experts(ops, shape, out_dtype, repeated=3):
    tokens, size, chosen, hidden, inner = shape
    x, (ids, gates), (w13, w2) = draw(tokens, hidden), routed(tokens, size, chosen), weights(size, hidden, inner)
    got = torch.full((tokens, hidden), float("nan"), dtype=out_dtype, device=DEVICE)
    assert ops["experts"](x, ids, gates, w13, w2, LIMIT, got) is None
    near(got, x, ids, gates, w13, w2)
    if not repeated:
        return
    again = torch.full_like(got, float("nan"))
    ops["experts"](x, ids, gates, w13, w2, LIMIT, again)
    assert torch.equal(got, again)
    for row in sorted({0, tokens // 2, tokens - 1})[-repeated:]:
        mine, one = slice(row, row + 1), torch.full((1, hidden), float("nan"), dtype=out_dtype, device=DEVICE)
        ops["experts"](x[mine].clone(), ids[mine].clone(), gates[mine].clone(), w13, w2, LIMIT, one)
        assert torch.equal(one, got[mine]), "a token by itself"


@pytest.mark.gpu
def test_an_expert_that_does_not_exist_adds_nothing(ops):
    x, (ids, gates), (w13, w2) = draw(4, 8), routed(4, 3, 2), weights(3, 8, 8)
    ids[0, 1], ids[1, 0], ids[2] = -1, 3, 2**31 - 1
    got = torch.full((4, 8), float("nan"), device=DEVICE)
    ops["experts"](x, ids, gates, w13, w2, LIMIT, got)
    near(got, x, ids, gates, w13, w2)
    assert not bool(got[2].any())


@pytest.mark.gpu
def test_not_a_number_stays(ops):
    x, (ids, gates), (w13, w2) = draw(2, 64), routed(2, 3, 2), weights(3, 64, 32)
    x[1, 5] = float("nan")
    got = torch.zeros(2, 64, device=DEVICE)
    ops["experts"](x, ids, gates, w13, w2, LIMIT, got)
    assert bool(got[0].isfinite().all()) and bool(got[1].isnan().all())


@pytest.mark.gpu
def test_what_it_does_not_serve(ops):
    """Nothing is written: other types, widths that are no whole 16 bytes, more pairs than fit, wrong arguments."""
    (ids, gates), (w13, w2), many = routed(3, 4, 2), weights(4, 32, 16), 129
    single = tuple(Linear("plain", one.weight.float()) for one in (w13, w2))
    for x, given, pair in (
        (draw(3, 32, dtype=FP32), (ids, gates), (w13, w2)),
        (draw(3, 32), (ids, gates), single),
        (draw(3, 36), (ids, gates), weights(4, 36, 20)),
        (draw(many, 32), routed(many, 4, 2), (w13, w2)),
        (draw(3, 40), (ids, gates), (w13, w2)),
        (draw(3, 32), (ids.long(), gates), (w13, w2)),
    ):
        got = torch.full(x.shape, float("nan"), device=DEVICE)
        assert ops["experts"](x, *given, *pair, LIMIT, got) is NotImplemented and bool(got.isnan().all())


MODEL = [
    ("test_experts", {"shape": (9, 2, 2, 8, 8), "out_dtype": FP32, "repeated": 1}),  # more pairs than a group has
    ("test_an_expert_that_does_not_exist_adds_nothing", {}),
    ("test_what_it_does_not_serve", {}),
]
# The last one: columns in two turns.
LONG = [
    ("test_not_a_number_stays", {}),
    *(("test_experts", {"shape": shape, "out_dtype": FP32}) for shape in ((2, 1, 3, 8, 8), (17, 1, 1, 8, 8))),
    ("test_experts", {"shape": (3, 4, 2, 24, 40), "out_dtype": BF16}),
    ("test_experts", {"shape": (17, 1, 1, 72, 8), "out_dtype": FP32}),
    ("test_experts", {"shape": (1, 2, 1, 2104, 8), "out_dtype": BF16, "repeated": 0}),
]

test_in_the_model_of_a_gpu = in_model.test_of(__name__, MODEL, LONG)
