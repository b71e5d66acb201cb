"""RMSNorm, in torch and kernels/norm.cu, and rotary embedding, in torch, against fp64; frequencies as published."""

import dataclasses
import math

import pytest
import torch

from problems.dsv4_forward.kernels.norm import Norm as kernel
from problems.dsv4_forward.torch_ops import norm, rope
from problems.dsv4_forward.weights import config
from problems.dsv4_forward.weights.config import CSA, FLASH, HCA, PRO, TINY
from tests.dsv4 import in_model
from tests.dsv4.in_model import draw

DEVICE = "cuda"
BF16, FP32 = torch.bfloat16, torch.float32
EPS = 1e-6


def half_ulp(got: torch.Tensor, exact: torch.Tensor, noise: float = 1e-6) -> torch.Tensor:
    """Where bf16 `got` is the nearest to `exact`, but for fp32 noise of that share of the exact value."""
    exact = exact.double()
    ulp = torch.exp2(exact.abs().clamp(min=1e-30).log2().floor() - 7)
    return (got.double() - exact).abs() <= 0.5 * ulp + noise * exact.abs()


SHAPES = ((1, 256), (3, 192), (130, 4096), (2, 7168), (5, 250), (2, 8200))  # tokens, d: in blocks, in no whole ones


def rows(tokens: int, d: int, dtype: torch.dtype) -> torch.Tensor:
    """Sizes from where the epsilon rules to 1e4, and zeros."""
    x = draw(tokens, 3, d, dtype=dtype) * 7
    x *= torch.logspace(-3, 3, tokens, device=DEVICE).view(-1, 1, 1).to(dtype)
    x[0, 1:] = 0
    return x


def normed(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    inverse = (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt()
    return x.double() * inverse * (1.0 if weight is None else weight.double())


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("tokens", "d"), SHAPES)
def test_rms_norm(either, tokens, d, dtype):
    """One rounding of bf16, or fp32 sums in another order."""
    x, weight = rows(tokens, d, dtype), draw(d, dtype=dtype, seed=1)
    for w in (weight, None):
        got, want = torch.full_like(x, float("nan")), normed(x, w)
        either["rms_norm"](x=x, weight=w, eps=EPS, out=got)
        step, error = 2.0**-8 if dtype == BF16 else 2e-5, (got.double() - want).abs()
        assert bool((error <= step * (want.abs() + 0.05 * want.abs().amax(-1, keepdim=True))).all()), error.max()


def test_norm_rounds_once(on_a_cpu):
    for weight in (draw(300, seed=2, dtype=BF16), None):
        x = rows(20, 300, BF16)
        out, exact = torch.empty_like(x), normed(x, weight)
        norm.rms_norm(x, weight, EPS, out)
        assert half_ulp(out, exact).all()
        norm.rms_norm(x, weight, EPS, x)
        assert torch.equal(x, out), "it may write over its input"


def test_norm_names_wrong_arguments():
    x, weight = torch.zeros(2, 8), torch.zeros(8)
    some = ({"weight": torch.zeros(7)}, "weight must"), ({"out": torch.zeros(2, 7)}, "out must")
    own = {"x": x.half()}, {"x": torch.zeros(8, 2).t()}, {"out": x.bfloat16()}
    for op, wrong in (
        (norm.rms_norm, some),
        (kernel.__new__(kernel).rms_norm, (*some, *((change, f"{next(iter(change))} must") for change in own))),
    ):
        for change, named in wrong:
            with pytest.raises(ValueError, match=f"^{named}"):
                op(**{"x": x, "weight": weight, "eps": EPS, "out": x} | change)


# In parts, in no whole eights, and of more values than a block holds.
SIZES = ((3, 250, BF16), (1, 2104, BF16), (3, 300, FP32), (2, 2104, BF16), (1, 8200, BF16))
MODEL = [("test_rms_norm", {"tokens": tokens, "d": d, "dtype": dtype}) for tokens, d, dtype in SIZES]
test_in_the_model_of_a_gpu = in_model.test_of(__name__, MODEL[:2], MODEL[2:])


def plain(theta: float) -> list[float]:
    return [theta ** (-2 * i / 64) for i in range(32)]


@pytest.mark.parametrize("cfg", [FLASH, PRO, config.TINY_K], ids=lambda c: c.name)
@pytest.mark.parametrize("ratio", [CSA, HCA])
def test_yarn_as_published(cfg, ratio):
    """Raw borders 15.45 and 24.71, so 15 and 25."""
    assert rope.yarn_range(cfg, 160000.0) == (15, 25)
    freqs, base = rope.frequencies(cfg, ratio, "cpu").double(), plain(160000.0)
    want = []
    for i, f in enumerate(base):
        ramp = min(max((i - 15) / 10, 0), 1)
        want.append(f * (1 - ramp) + f / 16 * ramp)
    torch.testing.assert_close(freqs, torch.tensor(want).double(), rtol=2e-6, atol=0)
    assert want[:16] == base[:16] and want[25] == base[25] / 16 and want[16] != base[16]


def test_yarn_with_one_border_is_a_step():
    cfg = dataclasses.replace(TINY, rope_original=6)
    assert rope.yarn_range(cfg, 160000.0) == (0, 0.001)
    freqs, base = rope.frequencies(cfg, CSA, "cpu"), rope.frequencies(cfg, CSA, "cpu")[0]
    assert torch.isfinite(freqs).all() and base == 1 and freqs[1] == pytest.approx(plain(160000.0)[1] / 16, rel=1e-6)


def test_angles_are_the_fp32_product_far_out():
    """At a million tokens an fp32 angle is off by up to 0.03 rad, and that error is the model's."""
    position = torch.tensor([0, 1, 127, 99_991, 1_000_003, 1_048_575])
    freqs = rope.frequencies(FLASH, CSA, "cpu")
    cos, sin = rope.angles(position, freqs)
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == (6, 32)
    exact = position.double().unsqueeze(1) * freqs.double()
    angle = exact.float().double()  # one rounding, as of an fp32 product
    torch.testing.assert_close(cos.double(), angle.cos(), rtol=0, atol=2e-7)
    torch.testing.assert_close(sin.double(), angle.sin(), rtol=0, atol=2e-7)
    assert (cos - exact.cos()).abs().max() > 5e-3  # an exact product would be seen


def turned(x: torch.Tensor, position: torch.Tensor, freqs: torch.Tensor, sign: int = 1) -> torch.Tensor:
    """fp64: the last values, in pairs, as complex numbers. Angles are fp32 products."""
    angle = sign * (position.double().unsqueeze(1) * freqs.double()).float().double()
    turn = torch.polar(torch.ones_like(angle), angle).view(len(x), *[1] * (x.dim() - 2), -1)
    rest, pairs = x.double().split([x.shape[-1] - 2 * len(freqs), 2 * len(freqs)], -1)
    pairs = torch.view_as_complex(pairs.unflatten(-1, (-1, 2)).contiguous())
    return torch.cat([rest, torch.view_as_real(pairs * turn).flatten(-2)], -1)


POSITION = torch.tensor([3, 0, 70_001])
FREQS = torch.tensor([1.0, 0.3, 0.01])  # r = 6


def case(*shape: int, dtype: torch.dtype = torch.float32):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    return x, *rope.angles(POSITION, FREQS)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("shape", [(3, 10), (3, 5, 11)])
def test_rotate_is_the_formula(shape, inverse):
    """Also of part of a wider row, in place, at odd widths and offsets: complex views want them even."""
    x, cos, sin = case(*shape)
    kept, out, want = x.clone(), torch.full_like(x, math.nan), turned(x, POSITION, FREQS, -1 if inverse else 1)
    rope.rotate(x, cos, sin, out, inverse=inverse)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-6)
    assert torch.equal(out[..., :-6], x[..., :-6]) and torch.equal(x, kept)
    wide = torch.nn.functional.pad(x, (3, 5), value=7.0)
    rope.rotate(wide[..., 3:-5], cos, sin, wide[..., 3:-5], inverse=inverse)
    assert torch.equal(wide, torch.nn.functional.pad(out, (3, 5), value=7.0))


def test_rotate_rounds_once():
    x, cos, sin = case(3, 40, 70, dtype=torch.bfloat16)
    out = torch.empty_like(x)
    rope.rotate(x, cos, sin, out)
    exact = turned(x, POSITION, FREQS)
    near = half_ulp(out, exact) | ((out.double() - exact).abs() < 1e-6)  # a difference that cancels
    assert near.all() and torch.equal(out[..., :-6], x[..., :-6])
    rope.rotate(x, cos, sin, x)
    assert torch.equal(x, out)


def test_rotate_names_wrong_shapes():
    x, cos, sin = case(3, 5, 11)
    with pytest.raises(ValueError, match=r"^x and out must"):
        rope.rotate(x, cos, sin, x[:, :4])
    with pytest.raises(ValueError, match=r"^x and out must"):
        rope.rotate(x[..., :4], cos, sin, x[..., :4])
    with pytest.raises(ValueError, match=r"^cos and sin must"):
        rope.rotate(x, cos[:2], sin[:2], x)
