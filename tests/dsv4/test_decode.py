"""linear_decode/in_model.py: variants in the ops linear, grouped_linear, two_linears, norm_linears and shared."""

import dataclasses
import math
import re
from types import SimpleNamespace

import pytest
import torch

from problems.common import load
from problems.dsv4_forward.prepared import by_first
from problems.dsv4_forward.torch_ops import experts, linear, norm
from problems.dsv4_forward.weights import tree
from problems.dsv4_forward.weights.linear import Linear
from tests.dsv4.linears import SMALL, inputs, left, product, published, weight_of

FOLDER = load.PROBLEMS / "linear_decode"
TASK, DECODE = load.module(FOLDER, "task"), load.module(FOLDER, "in_model")
PORTABLE = load.variant("linear_decode", "cpu_portable")
KINDS = tuple(DECODE.KINDS)
ROUNDED = 2.0**-8 * 1.02  # of an output: one rounding to bf16, and sums in another order


def matrix(kind: str, *shape: int, quantise: bool = True, name: str = "layers.0.attn.w") -> Linear:
    if kind == "nvfp4":
        w = published(*shape[-2:], seed=sum(shape), lead=shape[:-2])
    else:
        w = weight_of(kind, *shape, seed=sum(shape), dtype=torch.bfloat16, size=shape[-1] ** -0.5)
    return dataclasses.replace(w, quantise_input=quantise or kind == "plain", name=name)


def calls(*matrices: Linear, pairs: tuple = (), variant: object = PORTABLE) -> object:
    made = ([DECODE.prepare(PORTABLE, *one) for one in some] for some in ([(w,) for w in matrices], pairs))
    return DECODE.Calls(variant, *map(by_first, made), {})


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    slack = want.abs().mean() * 1e-3
    assert bool(((got.float() - want).abs() <= want.abs() * ROUNDED + slack).all())


@pytest.mark.parametrize("tokens", [1, 3, 32])
@pytest.mark.parametrize(("kind", "quantise"), [(kind, quantise) for kind in KINDS for quantise in (True, False)])
def test_linear_is_the_references(kind, quantise, tokens):
    w, x = matrix(kind, 192, 320, quantise=quantise), inputs(tokens, 320, dtype=torch.bfloat16)
    made = calls(w)
    got = product(x, w, made.linear, torch.bfloat16)
    close(got, product(x, w, linear.linear, torch.float32))
    assert torch.equal(got[-1:], product(x[-1:], w, made.linear, torch.bfloat16)), "a row by itself"


@pytest.mark.parametrize("kind", KINDS)
def test_grouped_linear_has_an_input_for_each_group(kind):
    w, x = matrix(kind, 3, 128, 192, quantise=kind == "nvfp4"), inputs(5, 3, 400, dtype=torch.bfloat16)[..., 7:199]
    out = torch.full((5, 3, 130), math.nan, dtype=torch.bfloat16)
    calls(w).grouped_linear(x, w, out[..., 1:129])
    close(out[..., 1:129], product(x, w, linear.grouped_linear, torch.float32))
    assert bool(out[..., 0].isnan().all()) and bool(out[..., 129].isnan().all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("apart", [0, 64])
def test_two_linears_are_the_references_wherever_the_outputs_are(apart, kind):
    """nvfp4's two have two input scales."""
    first, second = matrix(kind, 128, 192, name="first"), matrix(kind, 64, 192, name="second")
    x, made = inputs(5, 192, dtype=torch.bfloat16), calls(first, second, pairs=((first, second),))
    room = torch.full((5 * 192 + apart,), math.nan, dtype=torch.bfloat16)
    outs = room[: 5 * 128].view(5, 128), room[5 * 128 + apart :].view(5, 64)
    made.two_linears(x, first, second, *outs)
    for out, w in zip(outs, (first, second), strict=True):
        close(out, product(x, w, linear.linear, torch.float32))
        assert torch.equal(out, product(x, w, made.linear, torch.bfloat16))
    with pytest.raises(ValueError, match="first with second in two_linears: got"):
        made.two_linears(x, first, second, *outs[::-1])


@pytest.mark.parametrize(
    ("tokens", "kind", "served"), [(3, "fp8", True), (9, "fp8", False), (3, "plain", True), (3, "odd", False)]
)
def test_the_variant_norms_the_inputs_that_it_takes(tokens, kind, served):
    first, second = matrix("fp8" if kind == "odd" else kind, 128, 192), matrix("fp8", 40 if kind == "odd" else 64, 192)
    weight, x = inputs(192).bfloat16(), inputs(tokens, 192, dtype=torch.bfloat16)

    def with_norm(data: object, weight: torch.Tensor, eps: float) -> None:
        normed = torch.empty_like(data.inputs.x)
        norm.rms_norm(data.inputs.x, weight, eps, normed)
        PORTABLE.custom_kernel(data._replace(inputs=TASK.Inputs(normed)))

    made = calls(first, second, variant=SimpleNamespace(with_norm=with_norm, norms=lambda _, count: count <= 8))
    outs = [torch.full((tokens, w.n), math.nan, dtype=torch.bfloat16) for w in (first, second)]
    given = {"x": x, "weight": weight, "eps": 1e-6, "matrices": [first, second], "outs": outs}
    assert (made.norm_linears(**given) is not NotImplemented) == served
    if not served:
        assert all(bool(out.isnan().all()) for out in outs)
        return
    normed = torch.empty_like(x)
    norm.rms_norm(x, weight, 1e-6, normed)
    for out, w in zip(outs, (first, second), strict=True):
        assert torch.equal(out, product(normed, w, calls(w).linear, torch.bfloat16))
    assert made.norm_linears(**{**given, "weight": weight.float()}) is NotImplemented


def test_pairs_that_are_none_are_left():
    first, second, odd = matrix("fp8", 128, 192), matrix("plain", 64, 192), matrix("fp8", 40, 192)
    assert DECODE.prepare(PORTABLE, first, second).reason == "one is fp8, the other plain"
    assert "multiples of 64" in DECODE.prepare(PORTABLE, first, odd).reason
    outs = [torch.full((2, n), math.nan, dtype=torch.bfloat16) for n in (128, 64)]
    given = inputs(2, 192, dtype=torch.bfloat16), first, second, *outs
    assert calls(pairs=((first, second),)).two_linears(*given) is NotImplemented
    assert all(bool(out.isnan().all()) for out in outs)


@pytest.mark.parametrize("fmt", ["released", "nvfp4", "bf16"])
def test_shared_in_one_call_is_the_references(fmt):
    weights = tree.random(SMALL, fmt, seed=3)
    found = DECODE.fit(PORTABLE, weights, ("shared",))
    count = len(list(weights.blocks()))
    assert found.report == (
        f"linear_decode/cpu_portable: {count} of {count} shared experts, 0.0 MiB kept beside the weights",
    )
    ffn = next(weights.blocks()).ffn
    x, run = inputs(5, SMALL.hidden_size, dtype=torch.bfloat16), found.functions["shared"]
    for dtype in (torch.bfloat16, torch.float32):
        got, want = torch.full(x.shape, math.nan, dtype=dtype), torch.empty(x.shape)
        run(x, ffn.shared_w13, ffn.shared_w2, 1.0, got)
        experts.shared(x, ffn.shared_w13, ffn.shared_w2, 1.0, want)
        assert float((got.float() - want).norm() / want.norm()) <= 4e-3
    many = inputs(33, SMALL.hidden_size, dtype=torch.bfloat16)
    got = torch.full(many.shape, math.nan, dtype=torch.bfloat16)
    assert run(many, ffn.shared_w13, ffn.shared_w2, 1.0, got) is NotImplemented and bool(got.isnan().all())
    with pytest.raises(ValueError, match="must be of the weights that the kernels were chosen for"):
        run(x, dataclasses.replace(ffn.shared_w13), ffn.shared_w2, 1.0, got[:5])
    with pytest.raises(ValueError, match=r"x, out do not fit .* in shared"):
        run(x, ffn.shared_w13, ffn.shared_w2, 1.0, got[:4])


def test_calls_that_it_does_not_serve_are_left():
    w, odd, full = matrix("fp8", 64, 64), matrix("fp8", 40, 64), Linear("plain", torch.randn(64, 64))
    made = calls(w, odd, full)
    many, few = inputs(33, 64, dtype=torch.bfloat16), inputs(3, 64, dtype=torch.bfloat16)
    for x, m in ((many, w), (few.float(), w), (few, odd), (few, full)):
        assert left(x, m, made.linear)
    assert left(few[:0], w, made.linear)
    reasons = {one.name: one.reason for one in made.matrices.values() if one.reason}
    assert reasons == {
        "layers.0.attn.w": "n and k must be multiples of 64, are 40 and 64",
        "": "its weights are plain, torch.float32",
    }


def test_a_variant_that_says_so_multiplies_many_tokens():
    w, x = matrix("fp8", 64, 128), inputs(513, 128, dtype=torch.bfloat16)
    takes = SimpleNamespace(custom_kernel=PORTABLE.custom_kernel, many=lambda _, count: count == DECODE.MANY)
    made = calls(w, variant=takes)
    close(product(x[:512], w, made.linear, torch.bfloat16), product(x[:512], w, linear.linear, torch.float32))
    assert left(x, w, made.linear) and left(x[:511], w, made.linear) and left(x, w, calls(w).linear)


def test_matrices_that_are_none_are_errors():
    w, x = matrix("fp8", 64, 64), inputs(3, 32, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"x, out do not fit layers\.0\.attn\.w in linear: got \(3, 32\)"):
        product(x, w, calls(w).linear, torch.bfloat16)


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        ("fp8", 0, "its scale bytes must be 1 or more, some are 0"),
        ("fp8", 255, "ValueError layers.0.attn.w: scale bytes must be 0 to 254, got 255 to 255"),
        ("nvfp4", 3.7e19, "its input scales must be 2^-64 to 2^64, are 3.7e+19 to 3.7e+19"),
        ("nvfp4", 0, "ValueError layers.0.attn.w: input_scale must be positive"),
    ],
)
def test_scales_that_the_problem_has_not_are_left_or_errors(kind, value, said):
    w = matrix(kind, 64, 64)
    (w.scale if kind == "fp8" else w.input_scale).fill_(value)
    if said.startswith("ValueError"):
        with pytest.raises(ValueError, match=re.escape(said.removeprefix("ValueError "))):
            calls(w)
    else:
        assert DECODE.prepare(PORTABLE, w).reason == said


@pytest.mark.parametrize("fmt", ["released", "nvfp4", "bf16"])
def test_every_matrix_of_a_model_is_served(fmt):
    weights = tree.random(SMALL, fmt, seed=3)
    wanted = ("linear", "grouped_linear", "two_linears", "norm_linears")
    found = DECODE.fit(PORTABLE, weights, wanted)
    assert set(found.functions) == {*wanted[:3]} and found.refused == {"norm_linears": "it has no norms and with_norm"}
    counts = {"matrices": len(list(weights.linears())), "pairs of one input": len(list(weights.blocks()))}
    for line, (unit, count) in zip(found.report, counts.items(), strict=True):
        assert line.startswith(f"linear_decode/cpu_portable: {count} of {count} {unit}, ")
    none = DECODE.fit(load.variant("linear_decode", "torch_dequant"), weights, ("shared",))
    assert none == DECODE.Fitted(refused={"shared": "it has no prepare_expert and expert"})
