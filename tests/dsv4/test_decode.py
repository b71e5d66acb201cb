"""adapters/decode.py: variants of linear_decode in the ops linear, grouped_linear and shared."""

import dataclasses
import math

import pytest
import torch

from problems.common import fp8, load
from problems.dsv4_forward import ops
from problems.dsv4_forward.adapters import decode
from problems.dsv4_forward.adapters.common import Fallback
from problems.dsv4_forward.torch_ops import experts, linear
from problems.dsv4_forward.weights import tree
from problems.dsv4_forward.weights.linear import Linear
from tests.dsv4.linears import SMALL, inputs, product

PORTABLE = load.variant(decode.PROBLEM, "cpu_portable")
TASK = load.module(load.PROBLEMS / decode.PROBLEM, "task")
ROUNDED = 2.0**-8 * 1.02  # of an output: one rounding to bf16, and sums in another order


def matrix(kind: str, *shape: int, quantise: bool = True, name: str = "layers.0.attn.w") -> Linear:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * shape[-1] ** -0.5
    if kind == "plain":
        return Linear(kind, values.bfloat16(), name=name)
    codes, scales = fp8.quantise_blocks(values)
    return Linear(kind, codes, scales, quantise_input=quantise, name=name)


def adapted(*matrices: Linear) -> decode.Linears:
    return decode._linears(PORTABLE, list(matrices), Fallback(ops.REFERENCE))


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    slack = want.abs().mean() * 1e-3
    assert bool(((got.float() - want).abs() <= want.abs() * ROUNDED + slack).all())


@pytest.mark.parametrize("tokens", [1, 3, 32])
@pytest.mark.parametrize(("kind", "quantise"), [("fp8", True), ("fp8", False), ("plain", True)])
def test_linear_is_the_references(kind, quantise, tokens):
    w, x = matrix(kind, 192, 320, quantise=quantise), inputs(tokens, 320, dtype=torch.bfloat16)
    close(product(x, w, adapted(w).linear, torch.bfloat16), product(x, w, linear.linear, torch.float32))


@pytest.mark.parametrize("kind", ["fp8", "plain"])
def test_grouped_linear_has_an_input_for_each_group(kind):
    w, x = matrix(kind, 3, 128, 192, quantise=False), inputs(5, 3, 400, dtype=torch.bfloat16)[..., 7:199]
    out = torch.full((5, 3, 130), math.nan, dtype=torch.bfloat16)
    adapted(w).grouped_linear(x, w, out[..., 1:129])
    close(out[..., 1:129], product(x, w, linear.grouped_linear, torch.float32))
    assert bool(out[..., 0].isnan().all()) and bool(out[..., 129].isnan().all())


@pytest.mark.parametrize("kind", ["fp8", "plain"])
def test_shared_is_the_references_but_for_what_it_rounds(kind):
    w13, w2, x = matrix(kind, 1, 256, 192), matrix(kind, 1, 192, 128), inputs(5, 192, dtype=torch.bfloat16)
    got, want = torch.full((5, 192), math.nan), torch.empty(5, 192)
    adapted(w13, w2).shared(x, w13, w2, 1.0, got)
    experts.shared(x, w13, w2, 1.0, want)
    # Gate, up and the result rounded; in fp8 a code of the value between falls on another side here and there.
    assert float((got - want).norm() / want.norm()) <= (2e-2 if kind == "fp8" else 6e-3)


def test_calls_that_it_does_not_serve_go_to_the_reference():
    w, odd, full = matrix("fp8", 64, 64), matrix("fp8", 40, 64), Linear("plain", torch.randn(64, 64))
    made = adapted(w, odd, full)
    many, few = inputs(33, 64, dtype=torch.bfloat16), inputs(3, 64, dtype=torch.bfloat16)
    for x, m in ((many, w), (few.float(), w), (few, odd), (few, full)):
        assert torch.equal(product(x, m, made.linear), product(x, m, linear.linear))
    assert product(few[:0], w, made.linear).shape == (0, 64)
    reasons = {matrix.name: matrix.reason for matrix in made.matrices.values() if matrix.linear is not w}
    assert reasons == {
        "layers.0.attn.w": "n and k must be multiples of 64, are 40 and 64",
        "": "its weights are torch.float32",
    }


def test_matrices_that_are_none_are_errors():
    w = matrix("fp8", 64, 64)
    made = adapted(w)
    x = inputs(3, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"w \(stranger\) must be one of the weights"):
        product(x, dataclasses.replace(w, name="stranger"), made.linear, torch.bfloat16)
    with pytest.raises(ValueError, match=r"x, out do not fit layers\.0\.attn\.w in linear: got \(3, 32\)"):
        product(x[:, :32], w, made.linear, torch.bfloat16)
    w.scale.fill_(255)
    with pytest.raises(ValueError, match=r"layers\.0\.attn\.w: scale bytes must be 1 to 254, got 255 to 255"):
        adapted(w)


@pytest.mark.parametrize("fmt", ["released", "bf16"])
def test_every_matrix_of_a_model_is_served(fmt):
    weights = tree.random(SMALL, fmt, seed=3)
    found = decode.adapt_linears(PORTABLE, weights, Fallback(ops.REFERENCE))
    assert len(found.served) == len(list(weights.linears()))
    assert found.report[0].startswith(f"linear_decode/cpu_portable, linears: {len(found.served)} of")
    both = decode.adapt_shared(PORTABLE, weights, Fallback(ops.REFERENCE))
    assert len(both.served) == 2 * len(list(weights.blocks())) and set(both.functions) == {"shared"}


def test_a_row_has_the_same_bits_alone_and_in_a_batch():
    w, x = matrix("fp8", 192, 320), inputs(7, 320, dtype=torch.bfloat16)
    made = adapted(w)
    together = product(x, w, made.linear, torch.bfloat16)
    alone = torch.cat([product(row, w, made.linear, torch.bfloat16) for row in x.split(1)])
    assert torch.equal(together, alone)
