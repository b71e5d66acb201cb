"""Pool windows of `ratio` tokens into compressed entries, by a softmax over the tokens in each channel.

CSA (ratio 4) overlaps: an entry pools the first D channels of the window before it and the last D of its window, 8 rows
in all. HCA (ratio 128) pools the 128 rows of its window. Uncompressed rows wait in a ring, addressed by position, so
that chunks may begin and end anywhere and going back is a change of position only. Source: sections 8 and 16 of
README.md's account of DeepSeek's model.py; the ring is that of vLLM's sliding-window state cache.
"""

import torch

from problems.dsv4_forward.torch_ops import norm, rope


def compress(
    projected: torch.Tensor,
    ape: torch.Tensor,
    norm_weight: torch.Tensor,
    position: torch.Tensor,
    sequence: torch.Tensor,
    tail: torch.Tensor,
    emit: torch.Tensor,
    ratio: int,
    overlap: bool,
    freqs: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    out: torch.Tensor,
) -> None:
    """Write N tokens to the ring `tail`, then the entries of the windows that end at the tokens `emit` to `out`.

    projected: fp32 (N, 2 * coff * D), kv then gate, coff = 2 with overlap else 1; ape: fp32 (ratio, coff * D), added to
    the gate; norm_weight: (D,); position, sequence: int64 (N,); tail: fp32 (S, T, 2, coff * D) contiguous, row t % T of
    its sequence holds token t, [0] kv, [1] gate + ape; emit: int64 (Em,), indices into N; freqs: fp32 (r / 2,);
    dtype: of the model, to which the pooled value, its norm and its rotation are rounded; out: dtype (Em, D).
    T must hold the tokens of a sequence in this call and coff * ratio - 1 before them. ValueError: a shape or dtype.

    A token of `emit` that ends no window gets the pool of the coff * ratio tokens up to it: defined, but no entry.
    Rows of the ring other than those tokens' are never read, whatever they hold.
    """
    _check(projected, ape, tail, ratio, overlap, dtype, out)
    _store(projected, ape, position, sequence, tail)
    if not emit.shape[0]:
        return
    last = position[emit].unsqueeze(1)
    pooled = _pool(tail, sequence[emit].unsqueeze(1), last, ratio, out.shape[1])
    norm.rms_norm(pooled.to(dtype), norm_weight, eps, out)
    cos, sin = rope.angles(last.squeeze(1) - (ratio - 1), freqs)  # of the first token of the entry's window
    rope.rotate(out, cos, sin, out)


def _store(
    projected: torch.Tensor, ape: torch.Tensor, position: torch.Tensor, sequence: torch.Tensor, tail: torch.Tensor
) -> None:
    """Rows of N tokens into the ring; ape depends on the absolute position, not on the chunk."""
    size, width = tail.shape[1], tail.shape[3]
    place = torch.add(position % size, sequence, alpha=size)
    rows = tail.view(-1, 2, width)
    rows[:, 0].index_copy_(0, place, projected[:, :width])
    rows[:, 1].index_copy_(0, place, projected[:, width:] + ape[position % len(ape)])


def _pool(tail: torch.Tensor, sequence: torch.Tensor, last: torch.Tensor, ratio: int, width: int) -> torch.Tensor:
    """Pool the windows that end at tokens `last`. sequence, last: int64 (Em, 1). -> fp32 (Em, width)."""
    size, halves = tail.shape[1], tail.shape[3] // width
    cells = tail.view(-1, width)  # of one token: kv by half, then gate by half
    row = torch.arange(halves * ratio, device=tail.device)
    token = last - (halves * ratio - 1) + row
    # Before token 0 there is nothing: weight 0. The row of token 0 is used: it is the sequence's, and finite.
    absent = (token < 0).unsqueeze(2)
    place = torch.add(token.clamp_(min=0).remainder_(size), sequence, alpha=size)
    cell = torch.add(row // ratio, place, alpha=2 * halves)  # the window before: first half; the entry's: second
    weight = cells[cell + halves].masked_fill_(absent, -torch.inf).softmax(1)
    return cells[cell].mul_(weight).sum(1)


def _check(
    projected: torch.Tensor,
    ape: torch.Tensor,
    tail: torch.Tensor,
    ratio: int,
    overlap: bool,
    dtype: torch.dtype,
    out: torch.Tensor,
) -> None:
    halves = 2 if overlap else 1
    wide = halves * out.shape[1]
    if projected.shape[1:] != (2 * wide,) or projected.dtype != torch.float32:
        raise ValueError(f"projected must be fp32 (N, {2 * wide}), got {projected.dtype} {tuple(projected.shape)}")
    if ape.shape != (ratio, wide) or ape.dtype != torch.float32:
        raise ValueError(f"ape must be fp32 {ratio, wide}, got {ape.dtype} {tuple(ape.shape)}")
    if tail.shape[2:] != (2, wide) or tail.dtype != torch.float32:
        raise ValueError(f"tail must be fp32 (S, T, 2, {wide}), got {tail.dtype} {tuple(tail.shape)}")
    if tail.shape[1] < halves * ratio:
        raise ValueError(f"tail must hold {halves * ratio} tokens a sequence, got {tail.shape[1]}")
    if out.dtype != dtype:
        raise ValueError(f"out must be of the model's {dtype}, got {out.dtype}")
