"""adapters/linear.py: the plain product of moe_gemm behind nvfp4_gemv in the linear ops."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from problems.common import load
from problems.dsv4_forward.adapters import common, gemv
from problems.dsv4_forward.adapters import linear as moe_linear
from problems.dsv4_forward.adapters.common import Fallback
from problems.dsv4_forward.torch_ops import linear
from problems.dsv4_forward.weights import tree
from problems.dsv4_forward.weights.linear import Linear
from tests.dsv4.experts import GROUPED, ROUNDED, SMALL, Raises, apart, inputs, linears, matrix, product


@pytest.fixture(scope="module")
def model():
    return tree.random(SMALL, "nvfp4", seed=3)


# ---------------------------------------------------------------- linears


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


def test_linears_that_it_does_not_serve_go_to_the_reference(model):
    w, odd, wide = matrix(64, 64), matrix(40, 64), matrix(64, 128)
    adapted = linears(w, odd, wide, module=Raises)
    plain = Linear("plain", w.dequantise())
    x = inputs(3, 64)
    for given, m, dtype in (
        (x.float(), w, torch.bfloat16),
        (x, w, torch.float32),
        (x, plain, torch.bfloat16),
        (x, odd, torch.bfloat16),
        (inputs(3, 128), wide, torch.bfloat16),
    ):
        assert torch.equal(product(given, m, adapted.linear, dtype), product(given, m, linear.linear, dtype))
    with pytest.raises(AssertionError, match="called"):
        product(x, w, adapted.linear)
    _, *left = common.report("what", "matrices", list(adapted.matrices.values()), model)
    assert left == [
        "layers.0.attn.w: reference (n and k must be multiples of 64, are 40 and 64)",
        "layers.0.attn.w: reference (k must be at most 64)",
    ]
    assert product(x[:0], w, adapted.linear).shape == (0, 64)


def test_linears_that_are_none_are_errors():
    w, groups = matrix(64, 64), matrix(2, 64, 64)
    adapted = linears(w, groups)
    with pytest.raises(ValueError, match=r"w \(stranger\) must be one of the weights"):
        product(inputs(3, 64), dataclasses.replace(w, name="stranger"), adapted.linear)
    with pytest.raises(ValueError, match=r"x, out do not fit layers\.0\.attn\.w: got \(3, 32\)"):
        product(inputs(3, 32), w, adapted.linear)
    with pytest.raises(ValueError, match=r"x, out do not fit layers\.0\.attn\.w: got \(3, 1, 64\)"):
        product(inputs(3, 1, 64), groups, adapted.grouped_linear)
    w.scale.view(torch.uint8)[1, 2] = 0xFF
    with pytest.raises(ValueError, match=r"layers\.0\.attn\.w: scale bytes must be .*0xFF at \(1, 2\)"):
        moe_linear.make_matrix(GROUPED, w)
    with pytest.raises(ValueError, match="in_scale must be"):
        GROUPED.prepare_linear(matrix(64, 64).weight, matrix(64, 64).scale, torch.ones(()), torch.ones(1))


def test_behind_the_gemv_it_takes_more_tokens_and_matrices_that_overflow_fp16():
    """The dense NVFP4 linear for any number of tokens: who multiplies, and that all agree."""
    w, wide = matrix(64, 640), matrix(64, 640, seed=1, name="layers.0.attn.wide")
    wide.scale.copy_(torch.where(torch.arange(40) == 5, 2.0**-9, 448.0))  # no power of two leaves these exactly
    wide.scale_2.mul_(2.0**-9)
    seen = []

    def counted(state, x, out):
        seen.append(len(x))
        return GROUPED.linear(state, x, out)

    behind = linears(w, wide, module=SimpleNamespace(prepare_linear=GROUPED.prepare_linear, linear=counted))
    data = load.module(load.PROBLEMS / gemv.PROBLEM, "task").Data
    few = load.variant(gemv.PROBLEM, "cpu_portable").custom_kernel
    matrices = [gemv.make_matrix(m, data) for m in (w, wide)]
    both = gemv.Gemv(few, {id(m.linear): m for m in matrices}, Fallback(behind, "moe", frozenset(map(id, (w, wide)))))
    for m in (w, wide):
        for tokens in (1, 2, gemv.TOKENS, gemv.TOKENS + 1):
            x = inputs(tokens, 640)
            want = product(x, m, linear.linear, torch.float32)
            assert float(apart(product(x, m, both.linear), want).max()) <= 1.3 * ROUNDED  # the gemv rounds to fp16 too
    assert seen == [2, 16, 17, 1, 2, 16, 17]
    x = inputs(3, 640).float()  # the plain product takes bf16 only
    product(x, w, both.linear, torch.float32)
    assert seen == [2, 16, 17, 1, 2, 16, 17]
    first, most, left = gemv.report(matrices, both.fallback)
    assert first.startswith("nvfp4_gemv: 1 of 2 NVFP4 matrices")
    assert most == "nvfp4_gemv: calls of at most 1 token of 1 matrix; moe has the others"
    assert left.startswith("layers.0.attn.wide: moe (6 standard deviations of")


def test_the_gemv_keeps_calls_of_a_grouped_matrix_that_have_fewer_tokens_than_groups():
    w, seen = matrix(3, 64, 640, input_scale=torch.tensor([1.0, 2.0, 3.0]) * 6 / 2688), []
    behind = linears(w)
    data = load.module(load.PROBLEMS / gemv.PROBLEM, "task").Data
    few = load.variant(gemv.PROBLEM, "cpu_portable").custom_kernel

    def counted(given):
        seen.append(given)
        return few(given)

    prepared = gemv.make_matrix(w, data)
    both = gemv.Gemv(counted, {id(w): prepared}, Fallback(behind, "moe", frozenset({id(w)})))
    for tokens, calls in ((1, 1), (2, 2), (3, 0), (5, 0)):
        seen.clear()
        x = inputs(tokens, 3, 640)
        got, want = (torch.empty(tokens, 3, 64, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
        both.grouped_linear(x, w, got)
        linear.grouped_linear(x, w, want)
        assert float(apart(got, want).max()) <= 1.3 * ROUNDED and len(seen) == calls
