"""torch_eager: decodes the pages once, then gathers and attends in fp32 torch, some tokens at a time. The baseline."""

import torch
from task import NOPE, ROPE, SCALE, WINDOW, input_t, output_t, sequence_of, unpack

from problems.common import fp8, kv_pages

TARGETS = ("cpu", "sm90", "sm100")
GATHERED = 2**26  # values of entries at a time: 256 MiB


def decode(pages: torch.Tensor, per_page: int) -> torch.Tensor:
    """One cache as in task.Data -> all its entries, fp32 (pages * P, 512)."""
    every = torch.arange(len(pages) * per_page, device=pages.device)
    codes, scales, rope = kv_pages.read(pages, per_page, every, NOPE, ROPE)
    return torch.cat([fp8.dequantise_groups(codes, scales, kv_pages.GROUP), rope.float()], 1)


def custom_kernel(data: input_t) -> output_t:
    """Write into data.out and data.lse and return them. ValueError as unpack says. Takes 2 KB of memory an entry."""
    sizes, sequence = unpack(data), sequence_of(data)
    window, compressed = decode(data.window, sizes.page_window), decode(data.compressed, sizes.page_compressed)
    entries = torch.cat([window, compressed])
    device, tokens = data.q.device, torch.arange(sizes.tokens, device=data.q.device)
    places = (tokens - data.starts[sequence]).unsqueeze(1) + torch.arange(WINDOW, device=device)
    seen = data.window_index[sequence.unsqueeze(1), places]
    chosen = data.compressed_index[tokens if sizes.each else sequence]
    counts = (torch.arange(sizes.compressed, device=device) < data.compressed_length.unsqueeze(1)) & (chosen >= 0)
    index = torch.cat([seen, torch.where(counts, chosen + len(window), -1)], 1)
    for some in tokens.split(max(1, GATHERED // (index.shape[1] * data.q.shape[2]))):
        none = index[some] < 0
        c = entries[index[some].clamp(min=0)].masked_fill_(none.unsqueeze(2), 0)  # 0 times NaN would be NaN
        score = (SCALE * data.q[some].float()) @ c.mT  # (n, H, 128 + nc)
        score.masked_fill_(none.unsqueeze(1), -torch.inf)
        lse = score.logsumexp(2)
        weight = (score - torch.logaddexp(lse, data.sink).unsqueeze(2)).exp_()
        weight.masked_fill_(none.unsqueeze(1), 0)  # -inf - -inf is NaN
        data.out[some] = (weight @ c).bfloat16()
        data.lse[some] = lse.masked_fill_(lse == -torch.inf, torch.inf)
    return data.out, data.lse
