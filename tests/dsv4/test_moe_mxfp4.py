"""moe_gemm in the op experts, MXFP4 weights and FP8 activations: weights kept exactly, refusals, equal bits by row."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from problems.common import fp8, load, nvfp4
from problems.dsv4_forward.torch_ops import experts
from problems.dsv4_forward.trace import CHECKS
from problems.dsv4_forward.weights import tree
from problems.dsv4_forward.weights.linear import Linear
from tests.dsv4 import in_model
from tests.dsv4.experts import GROUPED, MOE, SMALL, TASK, apart, calls, inputs, left, run
from tests.dsv4.models import same

DEVICE = "cuda"
NAME = "layers.0.ffn.experts"
BUDGET = CHECKS["experts"].budget  # of a row, as the check has it


def mxfp4(name: str, *shape: int, seed: int, top: int) -> Linear:
    """Random codes (E, n, k); scales of each matrix from 2^(top - 17) to 2^top, most within 2^5 of the largest."""
    gen = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, generator=gen)
    behind = torch.randint(0, 6, (*shape[:-1], shape[-1] // 32), generator=gen)
    far = torch.randint(0, 18, behind.shape, generator=gen)
    behind = torch.where(torch.rand(behind.shape, generator=gen) < 0.1, far, behind)
    behind[:, 0, 0], behind[:, 1, 0] = 0, 17
    codes[:, :2, :16] |= 0x11  # no zeros, so that both ends count
    codes[:, 2:4, :16] &= 0x88
    scale = (127 + top - behind).to(torch.uint8)
    scale[:, 2, 0], scale[:, 3, 0] = 254, 0  # of zeros, which may have any
    return Linear("mxfp4", codes, scale, name=name)


def call(tokens: int, size: int, topk: int, hidden: int, inner: int) -> tuple:
    """Arguments of the op experts but for its output. Groups of x differ in size by 2^20, and some are zeros."""
    gen = torch.Generator().manual_seed(tokens)
    w13 = mxfp4(f"{NAME}.w13", size, 2 * inner, hidden, seed=1, top=-2 - round(math.log2(hidden) / 2))
    w2 = mxfp4(f"{NAME}.w2", size, hidden, inner, seed=2, top=-4)
    x = torch.randn(tokens, hidden, generator=gen)
    x[:, :64] *= 2.0 ** -torch.randint(0, 24, (tokens, 64), generator=gen)
    x[1::3, 128:256] = 0
    x[::2, max(128, hidden // 256 * 128) :] *= 2.0**-14  # not a whole row, whose v could be all zeros
    ids = torch.stack([torch.randperm(size, generator=gen)[:topk] for _ in range(tokens)]).int()
    return x.bfloat16(), ids, torch.rand(tokens, topk, generator=gen) + 0.1, w13, w2, TASK.LIMIT


class Rounding:
    """A variant in torch that serves FP8 activations, one token-expert pair after the other."""

    __name__ = "problems.moe_gemm.variants.rounding"

    @staticmethod
    def prepare_fp8(weights):
        assert weights.activation == "bf16"
        return weights

    @staticmethod
    def custom_kernel(data):
        weights, (x, ids, gates), (out,) = data
        x = fp8.round_trip(x.float(), 128)
        for token, row in enumerate(ids.tolist()):
            total = torch.zeros(out.shape[1])
            for k, e in enumerate(row):
                first = nvfp4.dequantise(weights.w13[e], weights.s13[e]) * weights.g13[e]
                second = nvfp4.dequantise(weights.w2[e], weights.s2[e]) * weights.g2[e]
                v = experts.gated((first @ x[token])[None], TASK.LIMIT, gates[token, k][None], torch.bfloat16)
                total += second @ fp8.round_trip(v.float(), 128)[0]
            out[token] = total
        return out


def unquantised(w: Linear) -> Linear:
    return dataclasses.replace(w, quantise_input=False)


def scaled(w: Linear, expert: int, byte: int) -> Linear:
    """w with another scale byte in two of an expert's rows."""
    w.scale[expert, 5:7] = byte
    return w


def values(packed: torch.Tensor, scale: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """fp64 of one of the problem's two matrices."""
    return nvfp4.dequantise(packed, scale, torch.float64) * g.double()[:, None, None]


@pytest.mark.parametrize(("size", "largest"), [(1, None), (MOE.CONVERTED + 3, None), (2, 17), (2, 254)])
def test_the_models_weights_are_kept_exactly_and_as_they_are(size, largest):
    """Also at either end of the scales."""
    *_, w13, w2, _ = call(1, size, 1, 128, 64)
    if largest:
        moved = w13.scale.int() - w13.scale[:, 0, :1, None] + largest
        w13 = dataclasses.replace(w13, scale=moved.clamp(0, 254).byte())
    before = w13.scale.clone(), w2.weight.clone()
    made = MOE.prepare(Rounding, w13, w2)
    state = made.state[0]
    assert not made.reason and state.w13 is w13.weight
    for w, kept in ((w13, state[:3]), (w2, state[3:6])):
        units = torch.exp2(w.scale.double() - 127).repeat_interleave(32, -1)
        assert torch.equal(values(*kept), nvfp4.decode(w.weight).double() * units)
    assert torch.equal(before[0], w13.scale) and torch.equal(before[1], w2.weight)
    assert "are NaN or not within" in MOE.prepare(Rounding, scaled(w13, 0, 255), w2).reason, "of the first part too"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda a, b: (a, scaled(b, 1, int(b.scale[1].max()) - 18)), "experts.w2 are NaN or not within 2^17"),
        (lambda a, b: (scaled(a, 0, 255), b), "experts.w13 are NaN or not within"),
        (lambda a, b: tuple(unquantised(w) for w in (a, b)), "its inputs are not in FP8"),
    ],
)
def test_a_layer_that_nvfp4_cannot_hold_is_left_and_named(change, reason):
    _, ids, gates, w13, w2, limit = call(3, 2, 2, 64, 64)
    w2.scale.clamp_(min=110, max=127), w2.weight.bitwise_or_(0x11)
    pair = change(w13, w2)
    found = calls(pair, module=Rounding)
    assert reason in next(iter(found.layers.values())).reason
    assert left(found.experts, (inputs(3, pair[0].k), ids, gates, *pair, limit))


def test_a_variant_without_fp8_leaves_the_layer():
    *_, w13, w2, _ = call(1, 2, 1, 64, 64)
    assert MOE.prepare(GROUPED, w13, w2).reason == "it has no prepare_fp8"
    refuses = SimpleNamespace(prepare_fp8=lambda weights: int("H is too large"))
    with pytest.raises(ValueError, match=rf"{NAME}: .*H is too large"):
        MOE.prepare(refuses, w13, w2)


@pytest.mark.parametrize("sizes", [(1, 8, 6, 128, 256), (9, 5, 2, 192, 320)])
def test_experts_are_the_references(sizes):
    arguments = call(*sizes)
    found = calls(arguments[3:5], module=Rounding)
    assert float(apart(run(found.experts, arguments), run(experts.experts, arguments, torch.float32)).max()) <= BUDGET
    x, *rest = arguments
    assert left(found.experts, (x.float(), *rest))


def test_a_model_in_the_released_format_has_its_experts_from_the_variant():
    model = tree.random(SMALL, "released", seed=3)
    found = MOE.fit(Rounding(), model, ("experts", "all_experts"))
    count = len(list(model.blocks()))
    assert found.report[0].startswith(f"moe_gemm/rounding: {count} of {count} layers of routed experts, ")
    assert found.refused == {"all_experts": "no NVFP4 experts in released"}
    ffn, x = model.layers[1].ffn, inputs(2, SMALL.hidden_size)
    op = found.functions["experts"]
    arguments = x, torch.tensor([[0, 1], [3, 2]], dtype=torch.int32), torch.rand(2, 2), ffn.w13, ffn.w2, TASK.LIMIT
    assert float(apart(run(op, arguments), run(experts.experts, arguments, torch.float32)).max()) <= BUDGET


# Tokens, experts, experts of a token, hidden, inner. A last group of half the columns; ends of a copy within it; two
# tiles of tokens; one block of 2 x 16 units and more; rows of over 4096 columns.
MODEL_CASES = [(1, 3, 2, 192, 320), (3, 5, 2, 320, 192), (9, 2, 2, 64, 128), (3, 3, 1, 2112, 64), (2, 2, 1, 4224, 64)]


@pytest.mark.slow
@pytest.mark.parametrize("cases", [MODEL_CASES[:1], MODEL_CASES[1:]], ids=["short", "long"])
def test_the_kernel_is_right_in_the_model_of_the_gpu(cases):
    in_model.run(__name__, [("test_the_kernel_is_right", {"sizes": sizes}) for sizes in cases], processors=2)


# tiny-k's; Flash's; Pro's, whose rows do not end with a copy; more tokens than a launch takes.
FLASH = [(tokens, 8, 6, 4096, 2048) for tokens in (1, 8, 90)]
LARGE = [
    (9, 8, 2, 512, 256),
    (33, 64, 6, 4096, 2048),
    (5, 8, 6, 7168, 3072),
    (300, 8, 2, 512, 256),
    (3, 2, 1, 64, 4224),
]


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", MODEL_CASES + FLASH + LARGE, ids=lambda one: "x".join(map(str, one)))
def test_the_kernel_is_right(sizes):
    """Against the reference, within the check's budget, in which v must be quantised; a token alone and among others,
    and once more, has equal bits.
    """
    x, ids, gates, *pair, limit = call(*sizes)
    pair = [dataclasses.replace(w, weight=w.weight.to(DEVICE), scale=w.scale.to(DEVICE)) for w in pair]
    plain = [unquantised(w) for w in pair]
    tokens = [tensor.to(DEVICE) for tensor in (x, ids, gates)]
    op = calls(tuple(pair), module=load.variant("moe_gemm", "sm90_grouped")).experts

    def made(function: object, rows: slice, weights: list[Linear], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        x, ids, gates = (tensor[rows].clone() for tensor in tokens)
        out = torch.full(x.shape, math.nan, dtype=dtype, device=DEVICE)
        function(fp8.round_trip(x, 128) if weights is plain else x, ids, gates, *weights, limit, out)
        return out

    every = slice(None)
    got, want = made(op, every, pair), made(experts.experts, every, pair, torch.float32)
    without = made(experts.experts, every, plain)
    some = want.any(1)  # v of a small token is below what FP8 holds
    assert not bool(got[~some].any())
    assert float(apart(got[some], want[some]).max()) <= BUDGET < float(apart(without[some], want[some]).max())
    assert same(made(op, every, pair), got)
    for count in (1, 2, 5):  # more than 256 are multiplied in another order
        if count < len(x) <= 256:
            assert same(made(op, slice(1, 1 + count), pair), got[1 : 1 + count]), count
