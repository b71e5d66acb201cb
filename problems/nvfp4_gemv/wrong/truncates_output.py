"""Rounds the fp32 sum to fp16 towards zero."""

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
            c = nvfp4.dequantise(data.a[rows, :, i], data.sfa[rows, :, i]) @ x
            half = c.half()
            away = half.float().abs() > c.abs()
            data.c[rows, 0, i] = torch.where(away, half.nextafter(torch.zeros_like(half)), half)
    return data.c
