"""Rotate by position (RoPE): interleaved pairs (2i, 2i + 1) of the last r values of a vector.

Window-only layers use theta 10000; layers with compressed entries use theta 160000 with YaRN in everything they rotate,
at every position. Cosines and the softmax scale get no YaRN factor. Source: section 7 of README.md's account of
DeepSeek's model.py.
"""

import math

import torch

from problems.dsv4_forward.weights.config import SWA, Config


def frequencies(cfg: Config, ratio: int, device: torch.device | str) -> torch.Tensor:
    """Return radians a token, fp32 (r / 2,), of a layer of compression `ratio`.

    Computed on the CPU in fp32: near position 2^20 the last bit of a frequency is worth 0.06 rad, so that a second way
    of computing the same power would be seen.
    """
    r = cfg.qk_rope_head_dim
    theta = cfg.rope_theta if ratio == SWA else cfg.compress_rope_theta
    plain = 1.0 / theta ** (torch.arange(0, r, 2, dtype=torch.float32) / r)
    return (plain if ratio == SWA else _yarn(plain, theta, cfg)).to(device)


def _yarn(plain: torch.Tensor, theta: float, cfg: Config) -> torch.Tensor:
    """Frequencies that turn often within the original context stay, those that hardly turn are divided by the factor,
    with a linear ramp between. plain: fp32 (r / 2,).
    """
    low, high = yarn_range(cfg, theta)
    keep = 1 - ((torch.arange(len(plain), dtype=torch.float32) - low) / (high - low)).clamp_(0, 1)
    return plain / cfg.rope_factor * (1 - keep) + plain * keep


def yarn_range(cfg: Config, theta: float) -> tuple[float, float]:
    """The pair at which the ramp starts and the one at which it ends: those that turn rope_beta_fast and
    rope_beta_slow times in rope_original tokens, rounded outwards.
    """
    r = cfg.qk_rope_head_dim

    def pair(turns: float) -> float:
        return r * math.log(cfg.rope_original / (2 * math.pi * turns)) / (2 * math.log(theta))

    low, high = max(math.floor(pair(cfg.rope_beta_fast)), 0), min(math.ceil(pair(cfg.rope_beta_slow)), r - 1)
    return low, high + 0.001 if low == high else high


def angles(position: torch.Tensor, freqs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin, fp32 (N, r / 2), of the fp32 product position * frequency, as in DeepSeek's code: not of an
    exact one. position: int64 (N,), below 2^24; freqs: fp32 (r / 2,).
    """
    turned = position.to(torch.float32).unsqueeze(1) * freqs
    return turned.cos(), turned.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor, inverse: bool = False) -> None:
    """Rotate the last r values of every vector: (a, b) -> (a cos - b sin, a sin + b cos); copy the others.

    x, out: fp32 or bf16 (N, ..., D), D >= r; out may be x. cos, sin: fp32 (N, r / 2), one row for all axes between.
    fp32 inside, rounded once. inverse: by the negative angle. ValueError: a shape is not that.
    """
    r = 2 * cos.shape[-1]
    if out.shape != x.shape or x.shape[-1] < r:
        raise ValueError(f"x and out must be of one shape (N, ..., >= {r}), got {tuple(x.shape)}, {tuple(out.shape)}")
    if cos.shape != (len(x), r // 2) or sin.shape != cos.shape:
        raise ValueError(f"cos and sin must be ({len(x)}, r / 2), got {tuple(cos.shape)}, {tuple(sin.shape)}")
    if out is not x:
        out[..., :-r].copy_(x[..., :-r])
    pairs = torch.view_as_complex(x[..., -r:].float().contiguous().unflatten(-1, (-1, 2)))
    turn = torch.complex(cos, -sin if inverse else sin).view(len(x), *[1] * (x.dim() - 2), r // 2)
    out[..., -r:].copy_(torch.view_as_real(pairs * turn).flatten(-2))
