"""RMSNorm and rotary embedding against fp64 loops, with the frequencies' published numbers."""

import dataclasses
import math

import pytest
import torch
from torch._subclasses import FakeTensorMode

from problems.dsv4_forward.torch_ops import norm, rope
from problems.dsv4_forward.weights import config
from problems.dsv4_forward.weights.config import CSA, FLASH, HCA, PRO, SWA, TINY

EPS = 1e-6


def half_ulp(got: torch.Tensor, exact: torch.Tensor, noise: float = 1e-6) -> torch.Tensor:
    """Where bf16 `got` is the nearest to `exact`, but for fp32 noise of that share of the exact value."""
    exact = exact.double()
    ulp = torch.exp2(exact.abs().clamp(min=1e-30).log2().floor() - 7)
    return (got.double() - exact).abs() <= 0.5 * ulp + noise * exact.abs()


# RMSNorm


def normed(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """fp64, a value at a time."""
    rows = []
    for row in x.double().reshape(-1, x.shape[-1]).tolist():
        inverse = 1 / math.sqrt(sum(v * v for v in row) / len(row) + EPS)
        gain = [1.0] * len(row) if weight is None else weight.double().tolist()
        rows.append([g * v * inverse for g, v in zip(gain, row, strict=True)])
    return torch.tensor(rows, dtype=torch.float64).view(x.shape)


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Sizes from where the epsilon rules to 1e3, a row each."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    size = torch.tensor([1e-5, 1e-3, 1.0, 1e3, 0.0])
    return (x * size[torch.arange(x[..., 0].numel()) % 5].view(*shape[:-1], 1)).to(dtype)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("shape", [(5, 129), (2, 1, 3, 7)])
def test_norm_is_the_formula(shape, weighted):
    x = rows(*shape)
    weight = torch.randn(shape[-1], generator=torch.Generator().manual_seed(2)) + 1 if weighted else None
    out = torch.full_like(x, math.nan)
    norm.rms_norm(x, weight, EPS, out)
    torch.testing.assert_close(out.double(), normed(x, weight), rtol=1e-6, atol=1e-30)


def test_norm_of_zeros_is_zero():
    out = torch.full((2, 8), math.nan)
    norm.rms_norm(torch.zeros(2, 8), torch.ones(8), EPS, out)
    assert not out.any()


def test_norm_rounds_once():
    x = rows(20, 300, dtype=torch.bfloat16)
    weight = (torch.randn(300, generator=torch.Generator().manual_seed(2)) + 1).bfloat16()
    out = torch.empty_like(x)
    norm.rms_norm(x, weight, EPS, out)
    exact = normed(x, weight)
    assert half_ulp(out, exact).all()
    twice = normed(x, None).bfloat16() * weight  # rounded before the weight, as elsewhere
    assert not half_ulp(twice, exact).all()


def test_norm_may_write_over_its_input():
    x = rows(4, 3, 40)
    want, weight = torch.empty_like(x), torch.rand(40)
    norm.rms_norm(x, weight, EPS, want)
    norm.rms_norm(x, weight, EPS, x)
    assert torch.equal(x, want)


def test_norm_names_a_wrong_shape():
    x = torch.ones(3, 8)
    with pytest.raises(ValueError, match=r"^weight must have shape \(8,\)"):
        norm.rms_norm(x, torch.ones(7), EPS, x)
    with pytest.raises(ValueError, match=r"^out must"):
        norm.rms_norm(x, None, EPS, torch.ones(3, 7))


# Frequencies


def plain(theta: float) -> list[float]:
    return [theta ** (-2 * i / 64) for i in range(32)]


def test_window_layers_use_ten_thousand_without_yarn():
    for cfg in config.CONFIGS.values():
        freqs = rope.frequencies(cfg, SWA, "cpu")
        assert freqs.dtype == torch.float32 and freqs.shape == (32,)
        torch.testing.assert_close(freqs.double(), torch.tensor(plain(1e4)).double(), rtol=2e-6, atol=0)


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


def test_yarn_borders_are_rounded_outwards_and_clamped():
    raw = [64 * math.log(256 / (2 * math.pi * turns)) / (2 * math.log(160000)) for turns in (32, 1)]
    assert raw[0] == pytest.approx(0.645, abs=0.01) and raw[1] == pytest.approx(9.9, abs=0.02)
    assert rope.yarn_range(TINY, 160000.0) == (0, 10)
    freqs = rope.frequencies(TINY, CSA, "cpu").double()
    base = torch.tensor(plain(160000.0)).double()
    torch.testing.assert_close(freqs[5] / base[5], torch.tensor(0.5 + 0.5 / 16).double(), rtol=1e-6, atol=0)


def test_yarn_with_one_border_is_a_step():
    cfg = dataclasses.replace(TINY, rope_original=6)
    assert rope.yarn_range(cfg, 160000.0) == (0, 0.001)
    freqs, base = rope.frequencies(cfg, CSA, "cpu"), rope.frequencies(cfg, CSA, "cpu")[0]
    assert torch.isfinite(freqs).all() and base == 1
    assert freqs[1] == pytest.approx(plain(160000.0)[1] / 16, rel=1e-6)


# Angles


def test_angles_are_the_fp32_product_far_out():
    """At a million tokens an fp32 angle is off by up to 0.03 rad, and that error is the model's."""
    position = torch.tensor([0, 1, 127, 99_991, 1_000_003, 1_048_575])
    freqs = rope.frequencies(FLASH, CSA, "cpu")
    cos, sin = rope.angles(position, freqs)
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == (6, 32)
    worst = 0.0
    for n, t in enumerate(position.tolist()):
        for i, f in enumerate(freqs.double().tolist()):
            exact = t * f
            angle = torch.tensor(exact, dtype=torch.float64).float().item()  # one rounding, as of an fp32 product
            assert cos[n, i] == pytest.approx(math.cos(angle), abs=2e-7)
            assert sin[n, i] == pytest.approx(math.sin(angle), abs=2e-7)
            worst = max(worst, abs(cos[n, i].item() - math.cos(exact)))
    assert worst > 5e-3  # an exact product would be seen


def test_the_first_position_is_not_turned():
    cos, sin = rope.angles(torch.tensor([0]), rope.frequencies(TINY, SWA, "cpu"))
    assert (cos == 1).all() and not sin.any()


# Rotation


def turned(x: torch.Tensor, position: torch.Tensor, freqs: torch.Tensor, sign: int = 1, halves: bool = False):
    """fp64, a pair at a time. halves: pairs (i, i + r / 2), which is wrong here."""
    out, r = x.double().clone(), 2 * len(freqs)
    start = x.shape[-1] - r
    for n, t in enumerate(position.tolist()):
        flat = out[n].view(-1, x.shape[-1])
        for row in flat:
            for i, f in enumerate(freqs.double().tolist()):
                a, b = (start + i, start + i + r // 2) if halves else (start + 2 * i, start + 2 * i + 1)
                angle = sign * torch.tensor(t * f, dtype=torch.float64).float().item()
                first, second = row[a].item(), row[b].item()
                row[a] = first * math.cos(angle) - second * math.sin(angle)
                row[b] = first * math.sin(angle) + second * math.cos(angle)
    return out


POSITION = torch.tensor([3, 0, 70_001])
FREQS = torch.tensor([1.0, 0.3, 0.01])  # r = 6


def case(*shape: int, dtype: torch.dtype = torch.float32):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    return x, *rope.angles(POSITION, FREQS)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("shape", [(3, 10), (3, 5, 11)])
def test_rotate_is_the_formula(shape, inverse):
    x, cos, sin = case(*shape)
    kept, out = x.clone(), torch.full_like(x, math.nan)
    rope.rotate(x, cos, sin, out, inverse=inverse)
    torch.testing.assert_close(out.double(), turned(x, POSITION, FREQS, -1 if inverse else 1), rtol=0, atol=1e-6)
    assert torch.equal(out[..., :-6], x[..., :-6]) and torch.equal(x, kept)
    assert (out.double() - turned(x, POSITION, FREQS, 1 if inverse else -1)).abs().max() > 0.1
    assert (out.double() - turned(x, POSITION, FREQS, -1 if inverse else 1, halves=True)).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotate_in_place_is_the_same(dtype):
    x, cos, sin = case(3, 5, 11, dtype=dtype)
    out = torch.empty_like(x)
    rope.rotate(x, cos, sin, out)
    rope.rotate(x, cos, sin, x)
    assert torch.equal(x, out)


def test_the_inverse_undoes_it():
    x, cos, sin = case(3, 5, 11)
    out = torch.empty_like(x)
    rope.rotate(x, cos, sin, out)
    rope.rotate(out, cos, sin, out, inverse=True)
    torch.testing.assert_close(out, x, rtol=0, atol=1e-6)


def test_rotate_rounds_once():
    x, cos, sin = case(3, 40, 70, dtype=torch.bfloat16)
    out = torch.empty_like(x)
    rope.rotate(x, cos, sin, out)
    exact = turned(x, POSITION, FREQS)
    near = half_ulp(out, exact) | ((out.double() - exact).abs() < 1e-6)  # a difference that cancels
    assert near.all() and torch.equal(out[..., :-6], x[..., :-6])


def test_rotate_takes_views():
    """Part of a wider row, odd widths and offsets: complex views want them even."""
    wide = torch.randn(3, 5, 25, generator=torch.Generator().manual_seed(5))
    cos, sin = rope.angles(POSITION, FREQS)
    part = wide[:, 1:4, 3:14]
    want = turned(part.contiguous(), POSITION, FREQS)
    kept = wide.clone()
    rope.rotate(part, cos, sin, part)
    torch.testing.assert_close(part.double(), want, rtol=0, atol=1e-6)
    wide[:, 1:4, 3:14] = kept[:, 1:4, 3:14]
    assert torch.equal(wide, kept)


def test_products_depend_on_the_distance_alone():
    gen = torch.Generator().manual_seed(6)
    q, k = torch.randn(64, generator=gen), torch.randn(64, generator=gen)
    freqs = rope.frequencies(FLASH, HCA, "cpu")
    dots = []
    for start in (0, 5, 900):
        cos, sin = rope.angles(torch.tensor([start + 37, start]), freqs)
        out = torch.stack([q, k])
        rope.rotate(out, cos, sin, out)
        dots.append(float(out[0].double() @ out[1].double()))
    assert max(dots) - min(dots) < 1e-3 and abs(dots[0] - float(q @ k)) > 0.1


def test_no_tokens_are_fine():
    cos, sin = rope.angles(POSITION[:0], FREQS)
    rope.rotate(torch.ones(0, 2, 8), cos, sin, torch.ones(0, 2, 8))


def test_nothing_reads_a_tensor_on_the_host():
    with FakeTensorMode() as mode:  # raises where the host needs a value
        x, position, freqs = (mode.from_tensor(t) for t in (torch.ones(3, 5, 11), POSITION, FREQS))
        cos, sin = rope.angles(position, freqs)
        rope.rotate(x, cos, sin, x, inverse=True)
        norm.rms_norm(x, None, EPS, x)


def test_rotate_names_wrong_shapes():
    x, cos, sin = case(3, 5, 11)
    with pytest.raises(ValueError, match=r"^x and out must"):
        rope.rotate(x, cos, sin, x[:, :4])
    with pytest.raises(ValueError, match=r"^x and out must"):
        rope.rotate(x[..., :4], cos, sin, x[..., :4])
    with pytest.raises(ValueError, match=r"^cos and sin must"):
        rope.rotate(x, cos[:2], sin[:2], x)
