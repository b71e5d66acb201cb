"""moe_gemm/in_model.py: its plain product in the ops linear and grouped_linear."""

import dataclasses
import math

import pytest
import torch

from problems.dsv4_forward.torch_ops import linear
from problems.dsv4_forward.weights.linear import Linear
from tests.dsv4.experts import GROUPED, MOE, ROUNDED, Raises, apart, inputs, left, linears, matrix, product


@pytest.mark.parametrize("tokens", [1, 17, 130])
@pytest.mark.parametrize("quantised", [True, False])
def test_linear_is_the_references(tokens, quantised):
    w = matrix(192, 320, quantise_input=quantised)
    x = inputs(tokens, 320)
    error = apart(product(x, w, linears(w).linear), product(x, w, linear.linear, torch.float32))
    assert float(error.max()) <= ROUNDED


def test_grouped_linear_has_a_matrix_for_each_group():
    w, x = matrix(3, 64, 192, input_scale=torch.tensor([1.0, 2.0, 3.0]) * 6 / 2688), inputs(33, 3, 400)[..., 7:199]
    out = torch.full((33, 3, 70), math.nan, dtype=torch.bfloat16)
    linears(w).grouped_linear(x, w, out[..., 4:68])
    want = product(x, w, linear.grouped_linear, torch.float32)
    assert float(apart(out[..., 4:68], want).max()) <= ROUNDED
    assert bool(out[..., :4].isnan().all()) and bool(out[..., 68:].isnan().all())
    assert len({float(w.scale_2[g]) for g in range(3)}) == 3


def test_linears_that_it_does_not_serve_are_left():
    w, odd, wide = matrix(64, 64), matrix(40, 64), matrix(64, 128)
    made, x = linears(w, odd, wide, module=Raises), inputs(3, 64)
    assert left(made.linear, (x.float(), w)) and left(made.linear, (x, w), torch.float32)
    for m in (Linear("plain", w.dequantise()), odd, wide):
        assert left(made.linear, (x, m))
    with pytest.raises(AssertionError, match="called"):
        product(x, w, made.linear)
    reasons = [one.reason for one in made.matrices.values() if one.reason]
    assert reasons == ["n and k must be multiples of 64, are 40 and 64", "k must be at most 64"]
    assert product(x[:0], w, made.linear).shape == (0, 64)


def test_linears_that_are_none_are_errors():
    w, groups = matrix(64, 64), matrix(2, 64, 64)
    adapted = linears(w, groups)
    with pytest.raises(ValueError, match=r"stranger must be of the weights"):
        product(inputs(3, 64), dataclasses.replace(w, name="stranger"), adapted.linear)
    with pytest.raises(ValueError, match=r"x, out do not fit layers\.0\.attn\.w: got \(3, 32\)"):
        product(inputs(3, 32), w, adapted.linear)
    with pytest.raises(ValueError, match=r"x, out do not fit layers\.0\.attn\.w: got \(3, 1, 64\)"):
        product(inputs(3, 1, 64), groups, adapted.grouped_linear)
    w.scale.view(torch.uint8)[1, 2] = 0xFF
    with pytest.raises(ValueError, match=r"layers\.0\.attn\.w: scale bytes must be .*0xFF at \(1, 2\)"):
        MOE.prepare_linear(GROUPED, w)
    with pytest.raises(ValueError, match="in_scale must be"):
        GROUPED.prepare_linear(matrix(64, 64).weight, matrix(64, 64).scale, torch.ones(()), torch.ones(1))
