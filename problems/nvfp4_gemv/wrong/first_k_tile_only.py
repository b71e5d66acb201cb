"""Reads the first tile of 512 columns only.

k up to 512 hides it; k = 832 and every larger one show it.
"""

from task import input_t, output_t, unpack

from problems.common import nvfp4

TARGETS = ("cpu", "sm90", "sm100")
ROWS = 256  # rows dequantised at a time
TILE = 512  # columns of A a step


def custom_kernel(data: input_t) -> output_t:
    """Write the wrong product into data.c and return it."""
    m, _, l = unpack(data)
    for i in range(l):
        x = nvfp4.dequantise(data.b[0, :, i], data.sfb[0, :, i])
        for row in range(0, m, ROWS):
            rows = slice(row, row + ROWS)
            head = nvfp4.dequantise(data.a[rows, : TILE // 2, i], data.sfa[rows, : TILE // 16, i])
            data.c[rows, 0, i] = head @ x[:TILE]
    return data.c
