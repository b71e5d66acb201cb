"""torch_eager: gathers, decodes and attends in plain fp32 torch, all sequences at once. The baseline of the ratios."""

import torch
from task import NOPE, ROPE, SCALE, input_t, output_t, unpack

from problems.common import fp8, kv_pages

TARGETS = ("cpu", "sm90", "sm100")


def gather(
    pages: torch.Tensor, per_page: int, index: torch.Tensor, length: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One cache as in task.Data -> entries, fp32 (B, S, n, 512), 0 where none is named, and where one is: (B, S, n)."""
    counts = (index >= 0) & (torch.arange(index.shape[2], device=index.device) < length.view(-1, 1, 1))
    codes, scales, rope = kv_pages.read(pages, per_page, index.masked_fill(~counts, 0), NOPE, ROPE)
    entries = torch.cat([fp8.dequantise_groups(codes, scales, kv_pages.GROUP), rope.float()], -1)
    return entries.masked_fill_(~counts.unsqueeze(-1), 0), counts  # 0 times NaN would be NaN


def custom_kernel(data: input_t) -> output_t:
    """Write into data.out and data.lse and return them. ValueError as unpack says. Takes 8 KB of memory an entry."""
    sizes = unpack(data)
    entries, counts = gather(data.window, sizes.page_window, data.window_index, data.window_length)
    if sizes.compressed:
        more = gather(data.compressed, sizes.page_compressed, data.compressed_index, data.compressed_length)
        entries, counts = torch.cat([entries, more[0]], 2), torch.cat([counts, more[1]], 2)
    score = (SCALE * data.q.float()) @ entries.mT  # (B, S, H, n)
    score.masked_fill_(~counts.unsqueeze(2), -torch.inf)
    lse = score.logsumexp(-1)
    none = lse == -torch.inf
    weight = (score - torch.logaddexp(lse, data.sink).unsqueeze(-1)).exp_()
    weight.masked_fill_(none.unsqueeze(-1), 0)  # -inf - -inf is NaN
    data.out.copy_(weight @ entries)
    data.lse.copy_(lse.masked_fill_(none, torch.inf))
    return data.out, data.lse
