"""Attend with all heads to a window and to chosen compressed entries; each entry is key and value at once.

Source: section 10 of README.md's account of DeepSeek's kernel.py (sparse_attn), with FlashMLA's two caches.
"""

import torch

from problems.dsv4_forward.cache.batch import Chunk
from problems.dsv4_forward.cache.pages import Pages
from problems.dsv4_forward.torch_ops import rope

TILE = 2**26  # fp32 values of gathered entries held at once: 256 MB
MASKED = torch.finfo(torch.float32).min  # score of a hole. Finite, so that a row of only holes gives 0, not NaN


def fmha(
    q: torch.Tensor,
    window: Pages,
    window_index: torch.Tensor,
    cache: Pages | None,
    index: torch.Tensor | None,
    sink: torch.Tensor,
    scale: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    chunk: Chunk | None = None,
) -> None:
    """Attend, and rotate back what that returns: keys, which are values too, are rotated.

    out: (N, S, H, D), rounded, then rotated back by angles cos, sin (N, r / 2). chunk: the same lists once more, for
    those who read them by sequence. Else as attend.
    """
    attend(q, window, window_index, cache, index, sink, scale, out, lse)
    rope.rotate(out, cos, sin, out, inverse=True)


def attend(
    q: torch.Tensor,
    window: Pages,
    window_index: torch.Tensor,
    cache: Pages | None,
    index: torch.Tensor | None,
    sink: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Write out = sum_j p_j c_j with p_j = exp(a_j) / (sum_j exp(a_j) + exp(sink)), a_j = scale * q . c_j, for every
    head.

    q: (B, S, H, D) fp32 or bf16; the c_j of a query are the rows window_index (int32 (B, S, nw)) of `window` and the
    rows index (int32 (B, S, ne)) of `cache`, both None where there is none; -1 is skipped, anywhere, and what the pages
    hold elsewhere never counts. sink: fp32 (H,), -inf for none. out: (B, S, H, D), rounded once from fp32;
    lse: fp32 (B, S, H), natural logarithm of sum_j exp(a_j), without the sink. Without a single c_j, out is 0 and lse
    is +inf. Probabilities stay fp32. ValueError: a shape or dtype, or only one of cache and index.
    """
    batch, tokens, heads, width = q.shape
    rows = batch * tokens
    if (cache is None) != (index is None):
        raise ValueError("cache and index must both be given or both be None, got one alone")
    if out.shape != q.shape or lse.shape != q.shape[:3] or lse.dtype != torch.float32:
        raise ValueError(
            f"out must be {tuple(q.shape)} and lse fp32 {tuple(q.shape[:3])}, got {tuple(out.shape)} and "
            f"{lse.dtype} {tuple(lse.shape)}"
        )
    if sink.shape != (heads,) or sink.dtype != torch.float32:
        raise ValueError(f"sink must be fp32 ({heads},), got {sink.dtype} {tuple(sink.shape)}")
    parts = [(window, window_index.reshape(rows, -1))] if window_index.numel() else []
    if index is not None and index.numel():
        parts.append((cache, index.reshape(rows, -1)))
    query = (q.to(torch.float32) * scale).view(rows, heads, width)
    out, lse = out.view(rows, heads, width), lse.view(rows, heads)
    if not parts:
        out.zero_()
        lse.fill_(torch.inf)
        return
    step = max(1, TILE // (width * sum(ids.shape[1] for _, ids in parts)))  # queries a tile
    for first in range(0, rows, step):
        some = slice(first, first + step)
        _attend(query[some], [(pages, ids[some]) for pages, ids in parts], sink, out[some], lse[some])


def _attend(
    query: torch.Tensor,
    parts: list[tuple[Pages, torch.Tensor]],
    sink: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """query: fp32 (N, H, D), scaled; parts: pages and int32 (N, n); out: (N, H, D); lse: fp32 (N, H)."""
    entries, scores = [], []
    for pages, ids in parts:
        hole = ids < 0
        entry = pages.read(ids.to(torch.int64)).masked_fill_(hole.unsqueeze(2), 0.0)  # 0 * NaN would be NaN
        entries.append(entry)
        scores.append(torch.bmm(query, entry.transpose(1, 2)).masked_fill_(hole.unsqueeze(1), MASKED))
    score = scores[0] if len(scores) == 1 else torch.cat(scores, 2)
    top = score.amax(2, keepdim=True)
    weight = score.sub_(top).exp_()
    total = weight.sum(2, keepdim=True)
    first, *rest = torch.split(weight, [entry.shape[1] for entry in entries], 2)
    value = torch.bmm(first, entries[0])
    for part, entry in zip(rest, entries[1:], strict=True):
        value.baddbmm_(part, entry)
    # total >= 1, and a sink so far above that its term is infinite leaves the 0 that fp32 has for such weights.
    sinks = (sink.unsqueeze(1) - top).exp_()
    torch.div(value, sinks.add_(total), out=out)
    torch.add(total.log_(), top, out=lse.unsqueeze(2)).masked_fill_(top == MASKED, torch.inf)
