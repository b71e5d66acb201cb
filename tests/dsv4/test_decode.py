"""adapters/decode.py: variants of linear_decode in the ops linear, grouped_linear and shared."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from problems.common import fp8, load
from problems.dsv4_forward import ops
from problems.dsv4_forward.adapters import decode
from problems.dsv4_forward.adapters.common import Fallback, Partial
from problems.dsv4_forward.torch_ops import chains, experts, linear, norm
from problems.dsv4_forward.weights import tree
from problems.dsv4_forward.weights.linear import Linear
from tests.dsv4.linears import SMALL, inputs, product, published

PORTABLE = load.variant(decode.PROBLEM, "cpu_portable")
KINDS = tuple(decode.KINDS)
TASK = load.module(load.PROBLEMS / decode.PROBLEM, "task")
ROUNDED = 2.0**-8 * 1.02  # of an output: one rounding to bf16, and sums in another order


def matrix(kind: str, *shape: int, quantise: bool = True, name: str = "layers.0.attn.w") -> Linear:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * shape[-1] ** -0.5
    if kind == "plain":
        return Linear(kind, values.bfloat16(), name=name)
    if kind == "nvfp4":
        w = published(*shape[-2:], seed=sum(shape), lead=shape[:-2], name=name)
        return dataclasses.replace(w, quantise_input=quantise)
    codes, scales = fp8.quantise_blocks(values)
    return Linear(kind, codes, scales, quantise_input=quantise, name=name)


def adapted(*matrices: Linear) -> decode.Linears:
    return decode._linears(PORTABLE, list(matrices), Fallback(ops.REFERENCE))


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    slack = want.abs().mean() * 1e-3
    assert bool(((got.float() - want).abs() <= want.abs() * ROUNDED + slack).all())


@pytest.mark.parametrize("tokens", [1, 3, 32])
@pytest.mark.parametrize(("kind", "quantise"), [(kind, quantise) for kind in KINDS for quantise in (True, False)])
def test_linear_is_the_references(kind, quantise, tokens):
    w, x = matrix(kind, 192, 320, quantise=quantise), inputs(tokens, 320, dtype=torch.bfloat16)
    close(product(x, w, adapted(w).linear, torch.bfloat16), product(x, w, linear.linear, torch.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_grouped_linear_has_an_input_for_each_group(kind):
    w, x = matrix(kind, 3, 128, 192, quantise=kind == "nvfp4"), inputs(5, 3, 400, dtype=torch.bfloat16)[..., 7:199]
    out = torch.full((5, 3, 130), math.nan, dtype=torch.bfloat16)
    adapted(w).grouped_linear(x, w, out[..., 1:129])
    close(out[..., 1:129], product(x, w, linear.grouped_linear, torch.float32))
    assert bool(out[..., 0].isnan().all()) and bool(out[..., 129].isnan().all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("apart", [0, 64])
def test_two_linears_are_the_references_wherever_the_outputs_are(apart, kind):
    """nvfp4's two have two input scales."""
    first, second = matrix(kind, 128, 192, name="first"), matrix(kind, 64, 192, name="second")
    x, made = inputs(5, 192, dtype=torch.bfloat16), adapted(first, second)
    pair = decode.make_pair(PORTABLE, made, first, second)
    made = dataclasses.replace(made, pairs={(id(first), id(second)): pair})
    room = torch.full((5 * 192 + apart,), math.nan, dtype=torch.bfloat16)
    outs = room[: 5 * 128].view(5, 128), room[5 * 128 + apart :].view(5, 64)
    made.two_linears(x, first, second, *outs)
    for out, w in zip(outs, (first, second), strict=True):
        close(out, product(x, w, linear.linear, torch.float32))
        assert torch.equal(out, product(x, w, made.linear, torch.bfloat16))
    with pytest.raises(ValueError, match="first with second in two_linears: got"):
        made.two_linears(x, first, second, *outs[::-1])


@pytest.mark.parametrize(("tokens", "kind", "served"), [(3, "fp8", 2), (9, "fp8", 0), (3, "plain", 2), (3, "odd", 0)])
def test_the_variant_norms_the_inputs_that_it_takes(tokens, kind, served):
    """The other calls are the chain of what fills both ops."""
    first, second = matrix("fp8" if kind == "odd" else kind, 128, 192), matrix("fp8", 40 if kind == "odd" else 64, 192)
    weight, x, seen = inputs(192).bfloat16(), inputs(tokens, 192, dtype=torch.bfloat16), []

    def with_norm(data: object, weight: torch.Tensor, eps: float) -> None:
        normed = torch.empty_like(data.inputs.x)
        norm.rms_norm(data.inputs.x, weight, eps, normed)
        seen.append(len(normed))
        PORTABLE.custom_kernel(data._replace(inputs=TASK.Inputs(normed)))

    made = adapted(first, second)
    chain = chains.norm_linears(SimpleNamespace(rms_norm=norm.rms_norm, linear=made.linear))
    variant = SimpleNamespace(with_norm=with_norm, norms=lambda state, count: count <= 8)
    made = dataclasses.replace(made, with_norm=variant.with_norm, takes_norm=variant.norms)
    found = []
    for op in (Partial(made.norm_linears, made.norms).before(chain), chain):
        outs = [torch.full((tokens, w.n), math.nan, dtype=torch.bfloat16) for w in (first, second)]
        op(x=x, weight=weight, eps=1e-6, matrices=[first, second], outs=outs)
        found.append(outs)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert seen == [tokens] * served


def test_pairs_that_are_none_are_two_calls():
    first, second, odd = matrix("fp8", 128, 192), matrix("plain", 64, 192), matrix("fp8", 40, 192)
    made = adapted(first, second, odd)
    assert decode.make_pair(PORTABLE, made, first, second).reason == "one is fp8, the other plain"
    assert "multiples of 64" in decode.make_pair(PORTABLE, made, first, odd).reason
    x, outs = inputs(2, 192, dtype=torch.bfloat16), [torch.empty(2, n, dtype=torch.bfloat16) for n in (128, 64)]
    made.two_linears(x, first, second, *outs)
    assert torch.equal(outs[1], product(x, second, made.linear, torch.bfloat16))


@pytest.mark.parametrize("fmt", ["released", "nvfp4", "bf16"])
def test_shared_in_one_call_is_the_references(fmt):
    weights = tree.random(SMALL, fmt, seed=3)
    found = decode.adapt_shared(PORTABLE, weights, Fallback(ops.REFERENCE))
    assert len(found.served) == 2 * len(list(weights.blocks()))
    ffn = next(weights.blocks()).ffn
    x, run = inputs(5, SMALL.hidden_size, dtype=torch.bfloat16), found.functions["shared"]
    assert run.written(ffn.shared_w13, torch.bfloat16) == torch.bfloat16
    for dtype in (torch.bfloat16, torch.float32):
        got, want = torch.full(x.shape, math.nan, dtype=dtype), torch.empty(x.shape)
        run(x, ffn.shared_w13, ffn.shared_w2, 1.0, got)
        experts.shared(x, ffn.shared_w13, ffn.shared_w2, 1.0, want)
        assert float((got.float() - want).norm() / want.norm()) <= 4e-3
    many = inputs(33, SMALL.hidden_size, dtype=torch.bfloat16)
    got, want = (torch.empty(many.shape, dtype=torch.bfloat16) for _ in range(2))
    run(many, ffn.shared_w13, ffn.shared_w2, 1.0, got)
    experts.shared(many, ffn.shared_w13, ffn.shared_w2, 1.0, want)
    assert torch.equal(got, want)
    with pytest.raises(ValueError, match="must be of the weights that the kernels were chosen for"):
        run(x, dataclasses.replace(ffn.shared_w13), ffn.shared_w2, 1.0, got[:5])
    with pytest.raises(ValueError, match=r"x, out do not fit .* in shared"):
        run(x, ffn.shared_w13, ffn.shared_w2, 1.0, got[:4])


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


def test_input_scales_that_the_problem_has_not_are_left_or_errors():
    w = matrix("nvfp4", 64, 64)
    w.input_scale.fill_(2.0**65)
    reason = next(iter(adapted(w).matrices.values())).reason
    assert reason == "its input scales must be 2^-64 to 2^64, are 3.68935e+19 to 3.68935e+19"
    w.input_scale.fill_(0)
    with pytest.raises(ValueError, match=r"layers\.0\.attn\.w: input_scale must be positive"):
        adapted(w)


@pytest.mark.parametrize("fmt", ["released", "nvfp4", "bf16"])
def test_every_matrix_of_a_model_is_served(fmt):
    weights = tree.random(SMALL, fmt, seed=3)
    found = decode.adapt_linears(PORTABLE, weights, Fallback(ops.REFERENCE))
    assert len(found.served) == len(list(weights.linears()))
    assert found.report[0].startswith(f"linear_decode/cpu_portable, linears: {len(found.served)} of")
    none = load.variant(decode.PROBLEM, "torch_dequant")
    left = decode.adapt_shared(none, weights, Fallback(ops.REFERENCE))
    assert not left.served and "the variant has no prepare_expert and expert" in left.report[1]


def test_a_row_has_the_same_bits_alone_and_in_a_batch():
    w, x = matrix("fp8", 192, 320), inputs(7, 320, dtype=torch.bfloat16)
    made = adapted(w)
    together = product(x, w, made.linear, torch.bfloat16)
    alone = torch.cat([product(row, w, made.linear, torch.bfloat16) for row in x.split(1)])
    assert torch.equal(together, alone)
