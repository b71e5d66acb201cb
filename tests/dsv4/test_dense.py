"""kernels/dense.cu on a GPU, and in the model of one, against torch_ops/linear.py and experts.py in fp64."""

import dataclasses

import pytest
import torch

from problems.common import fp8, nvfp4
from problems.dsv4_forward.kernels.dense import Dense as kernel
from problems.dsv4_forward.torch_ops import experts, linear
from problems.dsv4_forward.weights.linear import Linear
from tests.dsv4 import in_model
from tests.dsv4.linears import random as draw

DEVICE = "cuda"
# kind, tokens, groups, n, k; not square, not multiples of a block of threads, a group of one
SHAPES = (("fp8", 37, 1, 384, 256), ("fp8", 5, 3, 128, 128), ("nvfp4", 130, 1, 100, 192), ("nvfp4", 33, 4, 36, 80))


def matrix(kind: str, groups: int, n: int, k: int, quantise: bool = True) -> Linear:
    """With rows of very different size, a block of zeros, and largest values."""
    w = draw(groups, n, k, seed=1) * torch.logspace(-3, 1, n).view(1, n, 1)
    w[:, : n // 4, :16] = 0
    if kind == "fp8":
        codes, scales = fp8.quantise_blocks(w)
        return Linear("fp8", codes.to(DEVICE), scales.to(DEVICE))
    scale_2 = torch.linspace(1, 3, groups) / 1000
    codes, scales = nvfp4.quantise((w / scale_2.view(-1, 1, 1)).clamp(-2600, 2600))
    given = [tensor.to(DEVICE) for tensor in (codes, scales, scale_2, torch.linspace(0.5, 2, groups) / 300)]
    return Linear("nvfp4", *given[:3], input_scale=given[3] if quantise else None, quantise_input=quantise)


def tokens(count: int, groups: int, k: int) -> torch.Tensor:
    """Beyond an input scale's range, next to nothing, and zeros."""
    x = draw(count, groups, k, seed=2) * torch.logspace(-6, 1.5, count).view(-1, 1, 1)
    x[1] = 0
    return x.bfloat16().to(DEVICE)


def exact(x: torch.Tensor, w: Linear) -> torch.Tensor:
    """fp64 (N, G, n), of the values that the format gives to x (N, G, k)."""
    return torch.einsum("tgk,gnk->tgn", linear.input_values(x, w).double(), w.dequantise().double())


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """One rounding to bf16, and fp32 sums in another order."""
    error, size = (got.double() - want).abs(), want.norm(dim=-1, keepdim=True)
    assert bool((error <= 2.0**-8 * want.abs() + 2e-6 * size + 1e-30).all()), float((error / size).max())


@pytest.mark.gpu
@pytest.mark.parametrize("quantise", [True, False])
@pytest.mark.parametrize(("kind", "count", "groups", "n", "k"), (*SHAPES, ("nvfp4", 1030, 3, 36, 80)))
def test_products(ops, kind, count, groups, n, k, quantise):
    if kind == "fp8" and not quantise:
        return
    w, x = matrix(kind, groups, n, k, quantise), tokens(count, groups, k)
    got = torch.full((count, groups, n), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    assert ops["grouped_linear"](x=x, w=w, out=got) is None
    close(got, exact(x, w))
    if groups == 1:
        alone = torch.full_like(got[:, 0], torch.nan)
        assert ops["linear"](x=x[:, 0], w=w.select(0), out=alone) is None and torch.equal(alone, got[:, 0])


@pytest.mark.gpu
@pytest.mark.parametrize("by", [1e-30, 1e-20, 1e-9, 1e9, 1e20])
def test_activations_far_from_their_input_scale(ops, by):
    """Where quotients overflow, are nothing, or need a slower division."""
    w = dataclasses.replace(matrix("nvfp4", 2, 8, 64), input_scale=torch.tensor([by, 1.0], device=DEVICE))
    x = (draw(9, 2, 64) * torch.logspace(-12, 30, 9).view(-1, 1, 1)).bfloat16().to(DEVICE)
    got = torch.full((9, 2, 8), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    ops["grouped_linear"](x=x, w=w, out=got)
    close(got, exact(x, w))


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "count", "inner", "k"), [("fp8", 37, 128, 256), ("nvfp4", 34, 48, 112)])
def test_the_shared_expert(ops, kind, count, inner, k):
    w13, w2, x = matrix(kind, 1, 2 * inner, k), matrix(kind, 1, k, inner), tokens(count, 1, k)[:, 0]
    got = torch.full((count, k), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    assert ops["shared"](x=x, w13=w13, w2=w2, limit=2.0, out=got) is None
    want = torch.empty(count, k, device=DEVICE)
    experts.shared(x, w13, w2, 2.0, want)
    assert float((got.float() - want).norm() / want.norm()) < 4e-3  # a value may round to another code of w2's input


@pytest.mark.gpu
def test_what_it_does_not_serve(ops):
    assert set(ops) == set(kernel.OPS)
    x, out = tokens(3, 1, 128)[:, 0], torch.zeros(3, 64, dtype=torch.bfloat16, device=DEVICE)
    plain = Linear("plain", torch.zeros(64, 128, dtype=torch.bfloat16, device=DEVICE))
    fp8, odd = matrix("fp8", 1, 64, 128).select(0), matrix("fp8", 1, 64, 96).select(0)
    for given, w, to in ((x, plain, out), (x.float(), fp8, out), (x[:, :96].clone(), odd, out), (x, fp8, out.float())):
        assert ops["linear"](x=given, w=w, out=to) is NotImplemented
    assert not bool(out.any())
    with pytest.raises(ValueError, match="out must be"):
        ops["linear"](x=x, w=matrix("nvfp4", 1, 60, 128).select(0), out=out)
    with pytest.raises(ValueError, match="twice as many rows"):
        ops["shared"](x=x, w13=matrix("nvfp4", 1, 64, 128), w2=matrix("nvfp4", 1, 64, 64), limit=1.0, out=out)


def test_only_equal_factors_are_one(on_a_cpu):
    alone, w = matrix("nvfp4", 1, 36, 80), matrix("fp8", 2, 128, 128)
    assert len(matrix("nvfp4", 4, 36, 80).host_factors) == 4 and w.host_factors == (1,)
    assert alone.host_factors == (float(alone.scale_2 * alone.input_scale),)


FP8, FEWER, _, GROUPED = ({"kind": kind, "count": t, "groups": g, "n": n, "k": k} for kind, t, g, n, k in SHAPES)
SHARED = ({"kind": "nvfp4", "count": 34, "inner": 48, "k": 112}, {"kind": "fp8", "count": 5, "inner": 128, "k": 128})
MODEL = [("test_products", one | {"quantise": True}) for one in (FEWER, GROUPED)]
MODEL += [("test_activations_far_from_their_input_scale", {"by": 1e-30}), ("test_the_shared_expert", SHARED[0])]
MODEL.append(("test_what_it_does_not_serve", {}))
LONG = [("test_products", FP8 | {"quantise": True}), ("test_products", GROUPED | {"quantise": False})]
LONG += [("test_activations_far_from_their_input_scale", {"by": by}) for by in (1e-9, 1e20)]
LONG.append(("test_the_shared_expert", SHARED[1]))
test_in_the_model_of_a_gpu = in_model.test_of(__name__, MODEL, LONG)
