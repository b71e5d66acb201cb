"""Decodes the scale bytes as e5m2."""

import torch
from task import input_t, output_t, unpack

from problems.common import nvfp4

TARGETS = ("cpu", "sm90", "sm100")
ROWS = 256  # rows dequantised at a time


def custom_kernel(data: input_t) -> output_t:
    """Write the wrong product into data.c and return it."""
    m, _, l = unpack(data)
    for i in range(l):
        x = nvfp4.dequantise(data.b[0, :, i], data.sfb[0, :, i])
        for row in range(0, m, ROWS):
            rows = slice(row, row + ROWS)
            values = torch.tensor(nvfp4.E2M1, device=data.a.device)[nvfp4.unpack(data.a[rows, :, i]).int()]
            scales = data.sfa[rows, :, i].view(torch.float8_e5m2).float()
            data.c[rows, 0, i] = (values * scales.repeat_interleave(nvfp4.BLOCK, dim=1)) @ x
    return data.c
