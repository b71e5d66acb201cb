"""Uses the scale of the block before, as a scale index that starts one too early does."""

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
            scales = data.sfa[rows, :, i].view(torch.uint8).roll(1, dims=1).view(torch.float8_e4m3fn)
            data.c[rows, 0, i] = nvfp4.dequantise(data.a[rows, :, i], scales) @ x
    return data.c
