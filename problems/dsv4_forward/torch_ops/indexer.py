"""Score every compressed entry of a sequence for every query, and keep the best k: the lightning indexer.

One key an entry is shared by all index heads. Source: section 9 of README.md's account of DeepSeek's
model.py.
"""

import torch

from problems.dsv4_forward.cache import plan
from problems.dsv4_forward.cache.pages import Pages

TILE = 2**26  # fp32 products of heads and entries held at once: 256 MB, so that a million tokens fit
LOWEST = -(2**63)


def choose(
    q: torch.Tensor,
    weights: torch.Tensor,
    scale: float,
    keys: Pages,
    table: torch.Tensor,
    visible: torch.Tensor,
    entries: int,
    out: torch.Tensor,
) -> None:
    """Write the places of the k best of the first visible[b, s] entries, in any order, then -1 where fewer.

    q, weights, scale, keys, table, entries: as index_scores, scale above 0; visible: as select; out: int32 (B, S, k).
    Attention's entries lie at the places of their keys.
    """
    scores = torch.empty(*out.shape[:2], entries, dtype=torch.float32, device=out.device)
    index_scores(q, weights, scale, keys, table, entries, scores)
    ids = torch.empty_like(out)
    select(scores, visible, ids)
    locate(ids, table, keys.per_page, out)


def index_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    scale: float,
    keys: Pages,
    table: torch.Tensor,
    entries: int,
    out: torch.Tensor,
) -> None:
    """Write out[b, s, i] = sum_h scale * weights[b, s, h] * relu(q[b, s, h] . key_i of row b), for i < entries.

    Products and sums are fp32.
    q: (B, S, h, 128) fp32 or bf16; weights: the same (B, S, h), of either sign; table: int32 (B, blocks), the page of
    each block of keys.per_page entries: entry i is row table[b, i // per_page] * per_page + i % per_page of `keys`;
    out: fp32 (B, S, entries). Entries that a query may not see yet are scored too: select() leaves them out.
    ValueError: a shape or dtype.
    """
    batch, tokens, heads, width = q.shape
    page, blocks = keys.per_page, -(-entries // keys.per_page)
    if weights.shape != (batch, tokens, heads):
        raise ValueError(f"weights must be {batch, tokens, heads}, got {tuple(weights.shape)}")
    if table.shape[0] != batch or table.shape[1] < blocks:
        raise ValueError(f"table must be ({batch}, {blocks} or more) for {entries} entries, got {tuple(table.shape)}")
    if out.shape != (batch, tokens, entries) or out.dtype != torch.float32:
        raise ValueError(f"out must be fp32 {batch, tokens, entries}, got {out.dtype} {tuple(out.shape)}")
    query = q.to(torch.float32).reshape(batch, tokens * heads, width)
    mix = weights.float().mul(scale).reshape(batch * tokens, 1, heads)
    within = torch.arange(page, device=q.device)
    step = max(1, TILE // max(1, batch * tokens * heads * page))  # blocks a tile
    for block in range(0, blocks, step):
        first, last = block * page, min((block + step) * page, entries)
        pages = table[:, block : min(block + step, blocks)].unsqueeze(2)
        key = keys.read(torch.add(within, pages, alpha=page).flatten(1)[:, : last - first])
        product = torch.bmm(query, key.transpose(1, 2)).relu_().view(batch * tokens, heads, last - first)
        out[:, :, first:last] = torch.bmm(mix, product).view(batch, tokens, last - first)


def select(scores: torch.Tensor, visible: torch.Tensor, out: torch.Tensor) -> None:
    """Write out[b, s]: the k entries of the highest scores among the first visible[b, s], best first, -1 where fewer.

    scores: fp32 (B, S, entries); visible: int32 (B, S), at most entries; out: int32 (B, S, k). Of equal scores the
    lower id wins (0 and -0 are equal), on every device: torch.topk does not promise it. ValueError: a dtype.
    """
    if scores.dtype != torch.float32 or out.dtype != torch.int32:
        raise ValueError(f"scores must be fp32 and out int32, got {scores.dtype} and {out.dtype}")
    entries, k = scores.shape[2], out.shape[2]
    kept, seen = min(k, entries), visible.unsqueeze(2)
    ids = torch.arange(max(k, entries), device=scores.device)
    if kept:
        order = _ordered(scores, ids[:entries]).masked_fill_(ids[:entries] >= seen, LOWEST)
        out[:, :, :kept] = order.topk(kept).indices
    out.masked_fill_(ids[:k] >= seen, -1)


def locate(ids: torch.Tensor, table: torch.Tensor, per_page: int, out: torch.Tensor) -> None:
    """Write the places in the cache of entries by number within their sequence; -1 stays -1.

    ids, out: int32 (B, S, k); table: int32 (B, blocks), the page of each block of per_page entries, a power of two.
    ValueError: a shape or dtype.
    """
    if out.shape != ids.shape or out.dtype != torch.int32 or ids.dtype != torch.int32 or len(table) != len(ids):
        wanted = f"out must be int32 as ids, of {len(table)} sequences"
        raise ValueError(f"{wanted}, got {out.dtype} {tuple(out.shape)} and {ids.dtype} {tuple(ids.shape)}")
    owner = torch.arange(len(table), device=table.device)
    out.copy_(plan.locate(table, owner, ids.flatten(1), per_page).view(ids.shape))


def _ordered(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64 keys, all different, that order by score and then by falling id."""
    bits = (scores + 0.0).view(torch.int32)  # + 0.0 makes -0 a +0
    # Negative floats rise in magnitude as integers: flipping all but the sign makes integers order as the floats do.
    bits = (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)
    return bits.to(torch.int64).bitwise_left_shift_(32).sub_(ids)
