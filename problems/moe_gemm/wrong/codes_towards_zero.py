"""Rounds the codes of x towards zero, not to nearest."""

import torch
from task import LIMIT, input_t, output_t, unpack

from problems.common import nvfp4

TARGETS = ("cpu", "sm90", "sm100")


def round_trip(x: torch.Tensor, in_scale: torch.Tensor) -> torch.Tensor:
    """As nvfp4.round_trip, but for the rounding. x: fp32 (n, m), in_scale: fp32 ()."""
    blocks = (x / in_scale).unflatten(1, (-1, nvfp4.BLOCK))
    scales = (blocks.abs().amax(2, keepdim=True) / nvfp4.E2M1_MAX).clamp(max=nvfp4.E4M3_MAX)
    scales = scales.to(torch.float8_e4m3fn).float()
    size = (blocks / scales.masked_fill(scales == 0, torch.inf)).abs()
    levels = torch.tensor(nvfp4.E2M1[:8], device=x.device)
    codes = levels[torch.bucketize(size, levels[1:], right=True)].copysign(blocks)
    return (codes * scales).flatten(1) * in_scale


def custom_kernel(data: input_t) -> output_t:
    """Write the wrong sum into data.outputs.out and return it."""
    sizes = unpack(data)
    w, (x, ids, routing), (out,) = data
    total = torch.zeros(x.shape, device=x.device)
    for e in ids[ids >= 0].unique().tolist():
        rows, slots = (ids == e).nonzero(as_tuple=True)
        y = x[rows].float()
        if sizes.activation == "nvfp4":
            y = round_trip(y, w.in_scale13[e])
        gate, up = (y @ nvfp4.dequantise(w.w13[e], w.s13[e]).T * w.g13[e]).chunk(2, 1)
        v = torch.nn.functional.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT)
        v = (v * routing[rows, slots].unsqueeze(1)).bfloat16().float()
        if sizes.activation == "nvfp4":
            v = nvfp4.round_trip(v, w.in_scale2[e].expand(len(v)))
        total.index_add_(0, rows, v @ nvfp4.dequantise(w.w2[e], w.s2[e]).T * w.g2[e])
    return out.copy_(total)
