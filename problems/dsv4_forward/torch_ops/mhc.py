"""Manifold-constrained hyper-connections (mHC): read, write and collapse the n hc copies of the residual.

Sizes: N tokens, n = hc_mult copies, d hidden. Everything is fp32 inside; the copies are fp32 or bf16 and each output is
rounded once. Source: section 4 of README.md's account of DeepSeek's inference code (model.py, hc_pre and hc_post).
"""

import torch

from problems.dsv4_forward.torch_ops import norm
from problems.dsv4_forward.weights.config import Config


def pre(
    copies: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    cfg: Config,
    out: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
) -> None:
    """Mix the copies to the input of a sublayer, and compute with which weights `post` writes its output.

    copies: fp32 or bf16 (N, n, d). fn: fp32 ((2 + n) n, n d), base: fp32 ((2 + n) n,), scale: fp32 (3,); their rows are
    n of pre, n of post, then the n x n combination, row-major.
    out (N, d): sum_j pre_j copies_j, pre = sigmoid + hc_eps. post: fp32 (N, n), 2 sigmoid, no epsilon. comb: fp32
    (N, n, n), balanced: columns (over its first index) sum to 1 / (1 + hc_eps), rows nearly.
    ValueError: a shape or dtype is not that.
    """
    n = cfg.hc_mult
    _check(copies, fn, base, scale, cfg)
    _expect("post", post, (len(copies), n), torch.float32)
    _expect("comb", comb, (len(copies), n, n), torch.float32)
    values, mixed = _mix(copies, fn, cfg.rms_norm_eps)
    _collapse(values, _sigmoid(mixed[:, :n], base[:n], scale[0]).add_(cfg.hc_eps), out)
    post.copy_(_sigmoid(mixed[:, n : 2 * n], base[n : 2 * n], scale[1]).mul_(2))
    logits = torch.addcmul(base[2 * n :], mixed[:, 2 * n :], scale[2]).view(-1, n, n)
    _sinkhorn(torch.softmax(logits, -1).add_(cfg.hc_eps), cfg.hc_sinkhorn_iters, cfg.hc_eps, comb)


def post(
    y: torch.Tensor,
    copies: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    out: torch.Tensor,
    second: torch.Tensor | None = None,
) -> None:
    """Write a sublayer's output: out_k = post_k y + sum_j comb_jk copies_j.

    The sum is over the FIRST index of comb, as in M^T X.

    y: (N, d), what the sublayer returned; second: None, or the same, to be added to y in fp32 and rounded once, to the
    dtype of copies. copies, out: (N, n, d); out must not share memory with copies. post: fp32 (N, n), comb: fp32 (N, n,
    n), from `pre`. y, second, copies and out are fp32 or bf16. ValueError: a shape or dtype is not that.
    """
    if second is not None:
        _expect("second", second, tuple(y.shape))
        y = y.float().add(second.float()).to(copies.dtype)
    tokens, n, d = copies.shape
    _expect("y", y, (tokens, d))
    _expect("post", post, (tokens, n), torch.float32)
    _expect("comb", comb, (tokens, n, n), torch.float32)
    _expect("out", out, (tokens, n, d))
    written = post.unsqueeze(2) * y.float().unsqueeze(1)
    out.copy_(written.baddbmm_(comb.transpose(1, 2), copies.float()))


def site(
    y: torch.Tensor,
    second: torch.Tensor | None,
    copies: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    cfg: Config,
    new_copies: torch.Tensor,
    out: torch.Tensor,
    new_post: torch.Tensor,
    new_comb: torch.Tensor,
) -> None:
    """Do what lies between two sublayers: write new_copies (N, n, d) as `post` of y and second; then new_post and
    new_comb as `pre` of these, and out (N, d), what `pre` mixes, normed with weight (d,).
    """
    _post(y, copies, post, comb, new_copies, second)
    u = torch.empty_like(out)
    pre(new_copies, fn, base, scale, cfg, u, new_post, new_comb)
    norm.rms_norm(u, weight, cfg.rms_norm_eps, out)


_post = post  # `site` has an argument of that name


def _mix(copies: torch.Tensor, fn: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """-> copies in fp32 (N, n, d), and fn @ copies / rms(copies), fp32 (N, rows): the norm is over all n d values."""
    values = copies.float()
    flat = values.flatten(1)
    inverse = flat.square().mean(1, keepdim=True).add_(eps).rsqrt_()
    return values, torch.mm(flat, fn.t()).mul_(inverse)


def _sigmoid(mixed: torch.Tensor, base: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.addcmul(base, mixed, scale).sigmoid_()


def _collapse(values: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """out (N, d) = sum_j weight_j values_j. values: fp32 (N, n, d), weight: fp32 (N, n)."""
    _expect("out", out, (len(values), values.shape[2]))
    out.copy_(torch.bmm(weight.unsqueeze(1), values).squeeze(1))


def _sinkhorn(m: torch.Tensor, iterations: int, eps: float, out: torch.Tensor) -> None:
    """out (N, n, n) = m after `iterations` of: rows divided by (their sum + eps), then columns. The first iteration
    has no row step, since a softmax has just done it. m: fp32 (N, n, n), positive; overwritten.

    m stays as it is until the end, and its rows and columns get divisors a and b: out_jk = m_jk / (a_j b_k). Dividing
    row j by sum_k m_jk / (a_j b_k) + eps then means a_j <- sum_k m_jk / b_k + eps a_j: two operations on n values
    instead of three on n x n, which halves the time of a decode step's many small calls.
    """
    turned = m.transpose(1, 2)
    ones = torch.ones(len(m), m.shape[1], 1, dtype=m.dtype, device=m.device)
    row, column = ones, ones.clone()
    column.baddbmm_(turned, ones, beta=eps)
    by_row, by_column = ones.clone(), column.reciprocal()
    for _ in range(iterations - 1):
        row.baddbmm_(m, by_column, beta=eps)
        torch.reciprocal(row, out=by_row)
        column.baddbmm_(turned, by_row, beta=eps)
        torch.reciprocal(column, out=by_column)
    torch.mul(m.mul_(by_row), by_column.transpose(1, 2), out=out)


def _check(copies: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, cfg: Config) -> None:
    width = cfg.hc_mult * cfg.hidden_size
    _expect("copies", copies, (len(copies), cfg.hc_mult, cfg.hidden_size))
    _expect("fn", fn, (cfg.hc_rows, width), torch.float32)
    _expect("base", base, (cfg.hc_rows,), torch.float32)
    _expect("scale", scale, (3,), torch.float32)


def _expect(name: str, x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
    if x.shape != shape or (dtype and x.dtype != dtype):
        raise ValueError(f"{name} must be {dtype or 'of shape'} {shape}, got {x.dtype} {tuple(x.shape)}")
