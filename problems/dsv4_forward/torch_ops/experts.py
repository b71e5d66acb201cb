"""Compute the feed-forward part of a block: the K routed experts of each token, and the expert that all share.

A token-expert pair is one token and one of its K experts. Sizes: N tokens, d hidden, E experts, K of them a token, I
width of an expert. Source: section 13 of README.md's account of DeepSeek's model.py. The gate's rows of w13 come first,
then those of the up projection.
"""

from dataclasses import dataclass

import torch

from problems.dsv4_forward.torch_ops import linear
from problems.dsv4_forward.weights.linear import Linear

GATHERED = 8  # tokens whose experts' weights are held at once, dequantised: 0.8 GB in fp32 for Flash


@dataclass(frozen=True)
class ExpertWeights:
    """Experts' weights, w13: (E, 2 I, d), w2: (E, d, I), and the clamp between them."""

    w13: Linear
    w2: Linear
    limit: float

    @property
    def size(self) -> int:
        """E."""
        return len(self.w13.weight)

    def one(self, expert: int, x: torch.Tensor, gate: torch.Tensor | None, out: torch.Tensor) -> None:
        """out: fp32 (M, d), of one expert on all rows of x (M, d). gate: fp32 (M,), None: no routing weight."""
        mixed = torch.empty(len(x), self.w13.n, dtype=torch.float32, device=x.device)
        linear.linear(x, self.w13.select(expert), mixed)
        linear.linear(gated(mixed, self.limit, gate, x.dtype), self.w2.select(expert), out)

    def each(self, chosen: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """-> fp32 (M, d), row i of x (M, d) by expert chosen[i]. chosen: int64 (M,), gate: fp32 (M,)."""
        mixed = _gathered(x, self.w13.select(chosen))
        return _gathered(gated(mixed, self.limit, gate, x.dtype), self.w2.select(chosen))


def experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w13: Linear, w2: Linear, limit: float, out: torch.Tensor
) -> None:
    """Add up each token's experts: out = sum over k of w2_e (weights_k * silu(min(gate, limit)) * clip(up, -limit,
    limit)), with e = ids_k.

    x: fp32 or bf16 (N, d). ids: int32 (N, K), weights: fp32 (N, K), from the router. w13: (E, 2 I, d), w2: (E, d, I).
    out: fp32 or bf16 (N, d). The routing weight acts before w2, and before what w2's format does to its input. Products
    and the sum over k = 0 .. K - 1, in that order, are fp32; the input of w2 is rounded to x's dtype, `out` once.
    On CUDA nothing waits for the device, so that ids are not checked there.
    ValueError: a shape or dtype is not that, or on the CPU an id.
    """
    _check(x, w13, w2, out)
    for name, given, dtype in (("ids", ids, torch.int32), ("weights", weights, torch.float32)):
        if given.dim() != 2 or len(given) != len(x) or given.dtype != dtype:
            raise ValueError(f"{name} must be {dtype} ({len(x)}, K), got {given.dtype} {tuple(given.shape)}")
    if weights.shape != ids.shape:
        raise ValueError(f"weights must be of the shape of ids, {tuple(ids.shape)}, got {tuple(weights.shape)}")
    held = ExpertWeights(w13, w2, limit)
    if x.device.type == "cpu":
        way = by_hit
    else:
        way = by_pair if ids.numel() < held.size else by_expert
    parts = torch.empty(*ids.shape, w2.n, dtype=torch.float32, device=x.device)
    way(x, ids, weights, held, parts)
    total = parts[:, 0]
    for k in range(1, ids.shape[1]):
        total.add_(parts[:, k])
    out.copy_(total)


def shared(x: torch.Tensor, w13: Linear, w2: Linear, limit: float, out: torch.Tensor) -> None:
    """Compute the expert of every token: out = w2 (silu(min(gate, limit)) * clip(up, -limit, limit)), no routing
    weight.

    x: fp32 or bf16 (N, d). w13: (1, 2 I, d), w2: (1, d, I). out: fp32 or bf16 (N, d). Rounding as in `experts`.
    ValueError: a shape is not that.
    """
    _check(x, w13, w2, out)
    held = ExpertWeights(w13, w2, limit)
    if held.size != 1:
        raise ValueError(f"w13 must hold one expert, got {held.size}")
    total = torch.empty(out.shape, dtype=torch.float32, device=x.device)
    held.one(0, x, None, total)
    out.copy_(total)


def all_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: Linear,
    w2: Linear,
    shared_w13: Linear,
    shared_w2: Linear,
    limit: float,
    out: torch.Tensor,
) -> None:
    """Write the fp32 sum of what experts(x, ids, weights, w13, w2, limit, ...) and shared(x, shared_w13, shared_w2,
    limit, ...) write, rounded once, to out, fp32 or bf16 (N, d). ValueError as these.
    """
    routed, one = (torch.empty(out.shape, dtype=torch.float32, device=out.device) for _ in range(2))
    experts(x, ids, weights, w13, w2, limit, routed)
    shared(x, shared_w13, shared_w2, limit, one)
    out.copy_(routed.add_(one))


def by_hit(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, held: ExpertWeights, parts: torch.Tensor) -> None:
    """Fill parts, fp32 (N, K, d), with each pair's output: a loop over the experts that some token has. Reads ids on
    the host, which is free on the CPU only.
    """
    per_token = ids.shape[1]
    pairs: dict[int, list[int]] = {}
    for pair, expert in enumerate(ids.flatten().tolist()):
        pairs.setdefault(expert, []).append(pair)
    if pairs and not 0 <= min(pairs) <= max(pairs) < held.size:
        raise ValueError(f"ids must be 0 .. {held.size - 1}, got {min(pairs)} .. {max(pairs)}")
    flat = parts.view(-1, parts.shape[2])
    for expert, mine in pairs.items():
        rows = torch.tensor(mine)
        got = torch.empty(len(mine), flat.shape[1], dtype=torch.float32)
        held.one(expert, x[rows // per_token], weights.flatten()[rows], got)
        flat[rows] = got


def by_pair(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, held: ExpertWeights, parts: torch.Tensor
) -> None:
    """Fill parts, fp32 (N, K, d), gathering the weights of each pair's expert: for fewer pairs than experts."""
    for start in range(0, len(x), GATHERED):
        some = slice(start, start + GATHERED)
        for k in range(ids.shape[1]):
            parts[some, k] = held.each(ids[some, k].long(), x[some], weights[some, k])


def by_expert(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, held: ExpertWeights, parts: torch.Tensor
) -> None:
    """Fill parts, fp32 (N, K, d): every expert takes every token, with weight 0 (hence output 0) where it is not
    chosen. For many tokens, of which every expert gets some. An expert that a token has twice counts in the first pair,
    with both weights.
    """
    every = torch.arange(held.size, device=ids.device)
    hit = ids.unsqueeze(1) == every.unsqueeze(1)  # (N, E, K)
    gates = (hit * weights.unsqueeze(1)).sum(2)
    first = hit.int().argmax(2)  # k = 0 where there is none: the 0 output is added there
    got = torch.empty(len(x), parts.shape[2], dtype=torch.float32, device=x.device)
    parts.zero_()
    for expert in range(held.size):
        held.one(expert, x, gates[:, expert], got)
        where = first[:, expert].view(-1, 1, 1).expand(-1, 1, parts.shape[2])
        parts.scatter_add_(1, where, got.unsqueeze(1))


def gated(mixed: torch.Tensor, limit: float, gate: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """mixed: fp32 (M, 2 I), overwritten -> gate * silu(min(a, limit)) * clip(b, -limit, limit), `dtype` (M, I)."""
    a, b = mixed.chunk(2, 1)
    value = torch.nn.functional.silu(a.clamp_(max=limit)).mul_(b.clamp_(-limit, limit))
    return (value if gate is None else value.mul_(gate.unsqueeze(1))).to(dtype)


def _gathered(x: torch.Tensor, w: Linear) -> torch.Tensor:
    """x: (M, k), w: (M, n, k), a matrix a row -> fp32 (M, n)."""
    out = torch.empty(len(x), w.n, dtype=torch.float32, device=x.device)
    linear.grouped_linear(x.unsqueeze(0), w, out.unsqueeze(0))
    return out


def _check(x: torch.Tensor, w13: Linear, w2: Linear, out: torch.Tensor) -> None:
    if x.dim() != 2 or x.shape[1] != w13.k or out.shape != (len(x), w2.n):
        raise ValueError(f"x and out must be (N, {w13.k}) and (N, {w2.n}), got {tuple(x.shape)} and {tuple(out.shape)}")
    if w13.n != 2 * w2.k or len(w13.weight) != len(w2.weight):
        raise ValueError(
            f"w13 must have twice as many rows as w2 has columns, for as many experts, got ({len(w13.weight)}, "
            f"{w13.n}, {w13.k}) and ({len(w2.weight)}, {w2.n}, {w2.k})"
        )
