"""torch_eager: decodes keys, multiplies and sorts in plain fp32 torch, a sequence at a time. The baseline of ratios."""

import torch
from task import input_t, output_t, read_keys, unpack

TARGETS = ("cpu", "sm90", "sm100")
TILE = 2**26  # products of heads and entries held at a time: 256 MB


def custom_kernel(data: input_t) -> output_t:
    """Write the chosen places into data.out, int32 (B, S, k), and return it. ValueError as unpack says.

    Scores all that the table has room for, and masks: what is visible is not read on the host.
    """
    sizes = unpack(data)
    n, k = sizes.blocks * sizes.per_page, sizes.topk
    ids = torch.arange(max(n, k), device=data.q.device)
    step = max(1, TILE // (sizes.heads * n))
    for b in range(sizes.batch):
        place = data.table[b, ids[:n] // sizes.per_page].long() * sizes.per_page + ids[:n] % sizes.per_page
        key = read_keys(data.keys, place)
        for first in range(0, sizes.queries, step):
            some = slice(first, first + step)
            hidden = ids >= data.visible[b, some].unsqueeze(1)
            dot = data.q[b, some].float() @ key.T  # (s, H, n)
            score = (data.weights[b, some].unsqueeze(1) @ dot.relu_()).squeeze(1)
            score.masked_fill_(hidden[:, :n], -torch.inf).add_(0.0)  # -0 becomes 0
            best = score.sort(dim=1, descending=True, stable=True).indices[:, :k]
            chosen = data.out[b, some]
            chosen[:, : best.shape[1]] = place[best]
            chosen.masked_fill_(hidden[:, :k], -1)
    return data.out
