"""Takes pages to have 256 keys at most.

Smaller pages hide it.
"""

import torch
from task import input_t, output_t, read_keys, unpack

TARGETS = ("cpu", "sm90", "sm100")


def custom_kernel(data: input_t) -> output_t:
    """Write the wrong places into data.out and return it."""
    sizes = unpack(data)
    ids = torch.arange(sizes.blocks * sizes.per_page, device=data.q.device)
    for b in range(sizes.batch):
        block = ids // min(sizes.per_page, 256) % sizes.blocks
        place = data.table[b, block].long() * sizes.per_page + ids % sizes.per_page
        key = read_keys(data.keys, place)
        score = (data.q[b].float() @ key.T).relu()  # (S, H, n)
        score = (data.weights[b].unsqueeze(1) @ score).squeeze(1) + 0.0
        hidden = ids >= data.visible[b].unsqueeze(1)
        score = score.masked_fill(hidden, -torch.inf)
        best = score.sort(dim=1, descending=True, stable=True).indices[:, : sizes.topk]
        data.out[b] = -1
        data.out[b, :, : best.shape[1]] = place[best]
        data.out[b].masked_fill_(torch.arange(sizes.topk, device=ids.device) >= data.visible[b].unsqueeze(1), -1)
    return data.out
