"""Subtracts the maximum over the scores of 64 heads, not of each head.

Heads with like maxima hide it.
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
    top = torch.cat([part.amax((2, 3), keepdim=True).expand_as(part[..., :1]) for part in a.split(64, 2)], 2)
    e = (a - top.clamp(min=-1e30)).exp()
    total = e.sum(3, keepdim=True)
    p = e.bfloat16().float() / (total + (data.sink.unsqueeze(1) - top).exp())
    lse = torch.where(counts.any(2, keepdim=True), (total.log() + top).squeeze(3), torch.inf)
    data.out.copy_(p @ c)
    data.lse.copy_(lse)
    return data.out, data.lse
