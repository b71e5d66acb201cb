"""nvfp4_gemv/in_model.py: scales that move, products in the linear ops, and what it leaves to others."""

import dataclasses
import math

import pytest
import torch

from problems.common import load, nvfp4
from problems.dsv4_forward.weights import tree
from problems.dsv4_forward.weights.linear import Linear
from tests.dsv4.linears import GEMV, SMALL, calls, exact, inputs, left, moved, product, published


@pytest.fixture(scope="module")
def model():
    return {fmt: tree.random(SMALL, fmt, seed=3) for fmt in ("bf16", "released", "nvfp4")}


def test_weights_move_as_far_as_is_exact():
    """448 is 7 * 2^6, and steps end at 2^-9; a scale of 0 holds nothing up."""
    beside_448 = ((2.0**-9, 0), (2.0**-8, 1), (2.0**-6, 3), (2.0**-6 * 1.125, 0))
    rows = [([448.0], 20, 15), ([256.0], 20, 17), ([448.0], 3, 3), ([0.0, 8.0, 9.0], 9, 9), ([0.0], 9, 9)]
    for scales, most, want in rows + [([448.0, scale], 9, want) for scale, want in beside_448]:
        assert GEMV.exact_shift(torch.tensor(scales).to(torch.float8_e4m3fn), most) == want


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda w: dataclasses.replace(w, quantise_input=False), "not quantised"),
        (lambda w: published(9, 80), "k must be a multiple of 64, is 80"),
        (lambda w: dataclasses.replace(w, weight=torch.cat([w.weight] * 2, 1)[:, : w.k // 2]), "not contiguous"),
        (lambda w: dataclasses.replace(w, weight=moved(w.weight, 1)), "multiple of 16 bytes"),
        (lambda w: wide_range(published(40, 640)), "2^0 from the weights, exactly, and 2^9 from the activations"),
    ],
)
def test_what_the_kernel_cannot_take_is_refused_with_the_reason(change, reason):
    w = change(published(9, 128))
    run = calls(w, published(40, 640, name="good"))
    assert reason in run.matrices[id(w)].reason and left(inputs(3, w.k), w, run.linear)


def wide_range(w: Linear) -> Linear:
    """Scales from 2^-9 to 448: no power of two leaves them exactly."""
    scale = torch.full(w.scale.shape, 448.0)
    scale[::3, 5] = 2.0**-9
    return dataclasses.replace(w, scale=scale.to(torch.float8_e4m3fn))


@pytest.mark.parametrize("byte", [0x7F, 0x80, 0xFF])
def test_scales_that_are_none_are_an_error_that_names_the_matrix(byte):
    w = published(9, 128, name="layers.0.attn.wkv")
    w.scale.view(torch.uint8)[3, 5] = byte
    with pytest.raises(ValueError, match=rf"layers\.0\.attn\.wkv: scale bytes .* 0x{byte:02X} at \(0, 3, 5\)"):
        GEMV.prepare(w)


@pytest.mark.parametrize("tokens", [0, 1, 3, GEMV.TOKENS])
@pytest.mark.parametrize(("n", "k"), [(7, 64), (517, 832)])
def test_linear_is_the_product_of_the_formats_values(n, k, tokens):
    w = published(n, k, seed=tokens)
    x, run = inputs(tokens, k, seed=tokens, dtype=torch.bfloat16), calls(w).linear
    got = product(x.float(), w, run)
    want, bound = exact(x, w)
    assert bool(((got.double() - want).abs() <= bound).all())
    assert not tokens or float(want.std()) > 0.1  # and the bound means something
    assert torch.equal(product(x, w, run, torch.bfloat16), got.bfloat16()), "rounded once"


def test_grouped_linear_has_a_group_for_each_l():
    """Slices of wider tensors go in and out."""
    w = published(70, 192, lead=(3,))
    assert len(set(w.scale_2.tolist())) == len(set(w.input_scale.tolist())) == 3
    x, out = inputs(5, 3, 400)[..., 7:199], torch.full((5, 3, 90), math.nan)
    calls(w, published(33, 64)).grouped_linear(x, w, out[..., 10:80])
    for group in range(3):
        want, bound = exact(x[:, group], w.select(group))
        assert bool(((out[:, group, 10:80].double() - want).abs() <= bound).all()), group
    assert bool(out[..., :10].isnan().all()) and bool(out[..., 80:].isnan().all())
    assert GEMV.prepare(w).state.a.shape == (70, 96, 3)


def test_every_matrix_of_the_model_is_prepared(model):
    fitted = GEMV.fit(load.variant("nvfp4_gemv", "cpu_portable"), model["nvfp4"], ("linear", "grouped_linear"))
    matrices = list(fitted.functions["linear"].__self__.matrices.values())
    assert fitted.report[0].startswith(f"nvfp4_gemv/cpu_portable: {len(matrices)} of {len(matrices)} NVFP4 matrices, ")
    assert GEMV.fit(None, model["released"], ("linear",)).refused == {"linear": "no NVFP4 linears in released"}


class Seen:
    """In the place of a variant, keeps what it was called with."""

    def __init__(self) -> None:
        self.calls = []

    def custom_kernel(self, data):
        self.calls.append(data)
        data.c.zero_()


@pytest.mark.parametrize("scale_of_input", [1.0, 3.0, 0.02])
def test_activations_are_encoded_as_without_a_shift(scale_of_input):
    """Beyond the calibrated range they saturate where the format does, and small blocks keep all bits of their scales
    as far as e4m3 has them: down to 2^-6 behind the shift.
    """
    w = published(64, 4096)
    shift = GEMV.measure(w.weight.unsqueeze(0), w.scale.unsqueeze(0))[1]
    assert 1 <= shift <= 3
    x = inputs(2, 4096) * scale_of_input * torch.logspace(-4, 0, 256).repeat_interleave(16)
    seen = Seen()
    product(x, w, dataclasses.replace(calls(w), variant=seen).linear)
    codes, scales = nvfp4.encode(x, w.input_scale)
    for token, data in enumerate(seen.calls):
        got = data.sfb[0, :, 0].double() * 2.0**shift
        whole = scales[token].double() >= 2.0 ** (shift - 6)
        assert bool(whole.any()) and torch.equal(got[whole], scales[token].double()[whole])
        bytes_ = data.b.view(torch.uint8)[0, :, 0].view(-1, 8)
        assert torch.equal(bytes_[whole], codes[token].view(-1, 8)[whole])
        assert bool(((got - scales[token].double()).abs() <= 2.0 ** (shift - 10)).all())
        assert float(data.sfb[0].float().max()) <= 448 * 2.0**-shift
    if scale_of_input == 3:
        assert float(scales.float().max()) == 448


def test_other_kinds_and_many_tokens_are_left(model):
    w = published(8, 64)
    run = calls(w)
    for fmt in ("bf16", "released"):
        attn = model[fmt].layers[0].attn
        assert left(inputs(2, attn.wq_a.k), attn.wq_a, run.linear)
        assert left(inputs(1, 3, attn.wo_a.k), attn.wo_a, run.grouped_linear)
    assert left(inputs(GEMV.TOKENS + 1, 64), w, run.linear) and left(inputs(2, 64).half(), w, run.linear)
    product(inputs(GEMV.TOKENS, 64), w, run.linear)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(1024, 4096), (517, 832)])
def test_linear_on_the_gpu_is_the_same_product_and_never_waits(n, k):
    w, x = published(n, k), inputs(3, k)
    want, bound = exact(x, w)
    there = dataclasses.replace(
        w, weight=w.weight.cuda(), scale=w.scale.cuda(), scale_2=w.scale_2.cuda(), input_scale=w.input_scale.cuda()
    )
    target = load.device_target("cuda")
    run = calls(there, variant=load.winner(load.PROBLEMS / "nvfp4_gemv", target))
    x, out = x.cuda(), torch.full((3, n), math.nan, device="cuda")
    run.linear(x, there, out)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run.linear(x, there, out.zero_())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(((out.cpu().double() - want).abs() <= bound).all())
