"""torch_dequant: the matrix to fp32 in plain torch, then a matrix-vector product. The baseline of the ratios."""

import functools

import torch
from task import input_t, output_t, unpack

TARGETS = ("cpu", "sm90", "sm100")
ROWS = {"cpu": 256, "cuda": 8192}  # at a time: on a CPU 16 MiB of fp32, a fifth of the time of all at once
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes of codes 0 to 7; 8 to 15 are their negatives
# By device, once: a call on a GPU copies nothing from the host.
table = functools.cache(lambda device: torch.tensor(E2M1 + tuple(-value for value in E2M1), device=device))


def dequantise(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """packed: float4_e2m1fn_x2 (rows, k // 2), low nibble first; scales: e4m3 (rows, k // 16) -> fp32 (rows, k)."""
    raw = packed.view(torch.uint8)
    codes = torch.stack([raw & 15, raw >> 4], dim=-1).int()
    return (table(packed.device)[codes].view(*scales.shape, 16) * scales.float().unsqueeze(-1)).flatten(-2)


def custom_kernel(data: input_t) -> output_t:
    """Write A b into data.c and return it. ValueError as unpack says. Takes 14 bytes a weight of ROWS rows."""
    m, _, l = unpack(data)
    step = ROWS[data.a.device.type]
    for i in range(l):
        b = dequantise(data.b[:1, :, i], data.sfb[:1, :, i])
        for row in range(0, m, step):
            rows = slice(row, row + step)
            data.c[rows, 0, i] = dequantise(data.a[rows, :, i], data.sfa[rows, :, i]) @ b[0]
    return data.c
