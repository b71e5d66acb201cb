"""Decodes the e2m1 code 1, which is 0.5, with an implicit leading one as 0.75.

Pages in fp8 hide it.
"""

import torch
from task import dequantise, input_t, output_t, unpack

from problems.common import index_pages

TARGETS = ("cpu", "sm90", "sm100")


def custom_kernel(data: input_t) -> output_t:
    """Write the wrong places into data.out and return it."""
    sizes = unpack(data)
    ids = torch.arange(sizes.blocks * sizes.per_page, device=data.q.device)
    for b in range(sizes.batch):
        place = data.table[b, ids // sizes.per_page].long() * sizes.per_page + ids % sizes.per_page
        codes, scales = index_pages.views(data.keys)
        at = place.clamp(0, len(data.keys) * sizes.per_page - 1)
        codes, scales = (part[at // sizes.per_page, at % sizes.per_page] for part in (codes, scales))
        key = dequantise(codes, scales)
        if sizes.kind == "mxfp4":
            size = torch.exp2(scales.float() - 127).repeat_interleave(32, 1)
            key = torch.where(key.abs() == 0.5 * size, 1.5 * key, key)
        score = (data.q[b].float() @ key.T).relu()  # (S, H, n)
        score = (data.weights[b].unsqueeze(1) @ score).squeeze(1) + 0.0
        hidden = ids >= data.visible[b].unsqueeze(1)
        score = score.masked_fill(hidden, -torch.inf)
        best = score.sort(dim=1, descending=True, stable=True).indices[:, : sizes.topk]
        data.out[b] = -1
        data.out[b, :, : best.shape[1]] = place[best]
        data.out[b].masked_fill_(torch.arange(sizes.topk, device=ids.device) >= data.visible[b].unsqueeze(1), -1)
    return data.out
