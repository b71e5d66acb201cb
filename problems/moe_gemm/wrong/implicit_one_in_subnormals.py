"""Gives scales with an exponent field of 0 an implicit leading one.

The contents "subnormal" and "zeros" show it.
"""

import torch
from task import LIMIT, input_t, output_t, unpack

from problems.common import nvfp4

TARGETS = ("cpu", "sm90", "sm100")


def values(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """As nvfp4.dequantise, but for a scale of (1 + mantissa / 8) * 2^(exponent - 7) in all cases."""
    raw = scales.view(torch.uint8).float()
    scale = (1 + raw % 8 / 8) * torch.exp2((raw / 8).floor() - 7)
    return nvfp4.decode(packed) * scale.repeat_interleave(nvfp4.BLOCK, 1)


def custom_kernel(data: input_t) -> output_t:
    """Write the wrong sum into data.outputs.out and return it."""
    sizes = unpack(data)
    w, (x, ids, routing), (out,) = data
    total = torch.zeros(x.shape, device=x.device)
    for e in ids[ids >= 0].unique().tolist():
        rows, slots = (ids == e).nonzero(as_tuple=True)
        y = x[rows].float()
        if sizes.activation == "nvfp4":
            y = nvfp4.round_trip(y, w.in_scale13[e].expand(len(y)))
        gate, up = (y @ nvfp4.dequantise(w.w13[e], w.s13[e]).T * w.g13[e]).chunk(2, 1)
        v = torch.nn.functional.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT)
        v = (v * routing[rows, slots].unsqueeze(1)).bfloat16().float()
        if sizes.activation == "nvfp4":
            v = nvfp4.round_trip(v, w.in_scale2[e].expand(len(v)))
        total.index_add_(0, rows, v @ values(w.w2[e], w.s2[e]).T * w.g2[e])
    return out.copy_(total)
