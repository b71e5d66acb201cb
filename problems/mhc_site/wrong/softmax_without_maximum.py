"""Takes the softmax without subtracting the maximum.

Logits below 88 hide it.
"""

import torch
from task import HC_EPS, ITERATIONS, NORM_EPS, input_t, output_t, summed, unpack

TARGETS = ("cpu", "sm90", "sm100")


def sinkhorn(a: torch.Tensor) -> torch.Tensor:
    """a: fp32 (T, 4, 4), logits -> the balanced combination, likewise."""
    m = a.exp() / a.exp().sum(-1, keepdim=True) + HC_EPS
    m = m / (m.sum(1, keepdim=True) + HC_EPS)
    for _ in range(ITERATIONS - 1):
        m = m / (m.sum(2, keepdim=True) + HC_EPS)
        m = m / (m.sum(1, keepdim=True) + HC_EPS)
    return m


def custom_kernel(data: input_t) -> output_t:
    """Write the wrong result into the outputs and return them."""
    unpack(data)
    new = data.post.unsqueeze(2) * summed(data).float().unsqueeze(1)
    new = new.baddbmm(data.comb.mT, data.copies.float())
    data.new_copies.copy_(new)
    x = data.new_copies.float()
    v = x.flatten(1)
    z = (v @ data.fn.T) * torch.rsqrt(v.square().mean(1, keepdim=True) + NORM_EPS)
    parts = (z[:, :4] * data.scale[0], z[:, 4:8] * data.scale[1], z[:, 8:] * data.scale[2])
    pre, post, comb = (torch.cat(parts, 1) + data.base).split((4, 4, 16), 1)
    pre = torch.sigmoid(pre) + HC_EPS
    u = torch.bmm(pre.unsqueeze(1), x).squeeze(1)
    inverse = torch.rsqrt(u.square().mean(1, keepdim=True) + NORM_EPS)
    data.out.copy_(u * inverse * data.norm.float())
    data.new_post.copy_(2 * torch.sigmoid(post))
    data.new_comb.copy_(sinkhorn(comb.unflatten(1, (4, 4))))
    return data.new_copies, data.out, data.new_post, data.new_comb
