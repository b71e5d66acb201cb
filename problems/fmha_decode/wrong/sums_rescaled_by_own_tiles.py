"""Rescales the denominator of even tiles of 48 entries where an even one moves the maximum, and of odd ones likewise.

Two groups of warps do so that take tiles in turn and forget each other's maxima.

One tile hides it, and a last tile without the largest score.
"""

import torch
from task import NOPE, ROPE, SCALE, input_t, output_t, unpack

from problems.common import fp8, kv_pages

TARGETS = ("cpu", "sm90", "sm100")


def gather(
    pages: torch.Tensor, per_page: int, index: torch.Tensor, length: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One cache as in task.Data -> entries, fp32 (B, S, n, 512), and which of them count, (B, S, n)."""
    counts = (index >= 0) & (torch.arange(index.shape[2], device=index.device) < length.view(-1, 1, 1))
    codes, scales, rope = kv_pages.read(pages, per_page, index.masked_fill(~counts, -1), NOPE, ROPE)
    entries = torch.cat([fp8.dequantise_groups(codes, scales, 64), rope.float()], -1)
    return entries.masked_fill(~counts.unsqueeze(3), 0), counts


def custom_kernel(data: input_t) -> output_t:
    """Write the wrong result into data.out and data.lse and return them."""
    sizes = unpack(data)
    window = gather(data.window, sizes.page_window, data.window_index, data.window_length)
    compressed = gather(data.compressed, sizes.page_compressed, data.compressed_index, data.compressed_length)
    c, counts = (torch.cat(parts, 2) for parts in zip(window, compressed, strict=True))
    a = (SCALE * (data.q.float() @ c.mT)).masked_fill(~counts.unsqueeze(2), -torch.inf)
    lse = a.logsumexp(3)
    n = a.shape[3]
    tops = a.cummax(3).values  # each denominator is of the maximum up to the end of its last tile
    ends = [min(48 * (tile + 1), n) - 1 for tile in range(-(-n // 48))][-2:]
    denominator = data.sink.exp()
    for parity, end in enumerate(reversed(ends)):
        those = torch.arange(n, device=a.device) // 48 % 2 == (end // 48) % 2
        lag = (tops[..., end] - tops[..., -1]).nan_to_num(0, 0, 0) if parity else 0
        denominator = denominator + (a[..., those].logsumexp(3) - lag).exp()
    p = (a - torch.logaddexp(lse, data.sink).unsqueeze(3)).exp().masked_fill(~counts.unsqueeze(2), 0)
    right = lse.exp() + data.sink.exp()
    data.out.copy_((p @ c) * (right / denominator).nan_to_num(0, 0, 0).unsqueeze(3))
    data.lse.copy_(lse.masked_fill(lse == -torch.inf, torch.inf))
    return data.out, data.lse
