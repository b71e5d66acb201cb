"""Adds up the parts of z over 64 columns in bf16.

A single part hides it, with 16 values of d.
"""

import torch
from task import HC_EPS, ITERATIONS, NORM_EPS, input_t, output_t, summed, unpack

TARGETS = ("cpu", "sm90", "sm100")


def chunked(v: torch.Tensor, fn: torch.Tensor) -> torch.Tensor:
    """v fn^T, fp32 (T, 24), from parts that are added up in bf16."""
    total = torch.zeros(len(v), len(fn), dtype=torch.bfloat16, device=v.device)
    for first in range(0, v.shape[1], 64):
        total += v[:, first : first + 64] @ fn[:, first : first + 64].T
    return total.float()


def sinkhorn(a: torch.Tensor) -> torch.Tensor:
    """a: fp32 (T, 4, 4), logits -> the balanced combination, likewise."""
    m = torch.softmax(a, -1) + HC_EPS
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
    z = chunked(v, data.fn) * torch.rsqrt(v.square().mean(1, keepdim=True) + NORM_EPS)
    parts = (z[:, :4] * data.scale[0], z[:, 4:8] * data.scale[1], z[:, 8:] * data.scale[2])
    pre, post, comb = (torch.cat(parts, 1) + data.base).split((4, 4, 16), 1)
    pre = torch.sigmoid(pre) + HC_EPS
    u = torch.bmm(pre.unsqueeze(1), x).squeeze(1)
    inverse = torch.rsqrt(u.square().mean(1, keepdim=True) + NORM_EPS)
    data.out.copy_(u * inverse * data.norm.float())
    data.new_post.copy_(2 * torch.sigmoid(post))
    data.new_comb.copy_(sinkhorn(comb.unflatten(1, (4, 4))))
    return data.new_copies, data.out, data.new_post, data.new_comb
