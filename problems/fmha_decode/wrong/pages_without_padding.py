"""Takes 584 bytes an entry for the distance between pages, without their padding to a multiple of 576.

Pages with an index of 0 hide it.
"""

import torch
from task import ENTRY, NOPE, PAYLOAD, SCALE, input_t, output_t, unpack

from problems.common import fp8

TARGETS = ("cpu", "sm90", "sm100")


def gather(
    pages: torch.Tensor, per_page: int, index: torch.Tensor, length: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One cache as in task.Data -> entries, fp32 (B, S, n, 512), and which of them count, (B, S, n)."""
    counts = (index >= 0) & (torch.arange(index.shape[2], device=index.device) < length.view(-1, 1, 1))
    index = index.masked_fill(~counts, 0).long()
    page, slot = index // per_page, index % per_page
    start = page * per_page * ENTRY
    payload = pages.view(-1)[(start + slot * PAYLOAD).unsqueeze(3) + torch.arange(PAYLOAD, device=index.device)]
    scales = (start + per_page * PAYLOAD + slot * 8).unsqueeze(3) + torch.arange(7, device=index.device)
    codes, rope = payload[..., :NOPE].view(torch.float8_e4m3fn), payload[..., NOPE:].contiguous().view(torch.bfloat16)
    scales = pages.view(-1)[scales]
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
    p = (a - torch.logaddexp(lse, data.sink).unsqueeze(3)).exp().masked_fill(~counts.unsqueeze(2), 0)
    data.out.copy_(p @ c)
    data.lse.copy_(lse.masked_fill(lse == -torch.inf, torch.inf))
    return data.out, data.lse
