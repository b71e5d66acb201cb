"""Walks whole tiles of 256 columns and drops the rest of k.

k a multiple of 256 hides it; k = 64, 192, 320, 832 and 1088 show it.
"""

from task import input_t, output_t, unpack

from problems.common import nvfp4

TARGETS = ("cpu", "sm90", "sm100")
ROWS = 256  # rows dequantised at a time
TILE = 256  # columns of A a step


def custom_kernel(data: input_t) -> output_t:
    """Write the wrong product into data.c and return it."""
    m, k, l = unpack(data)
    for i in range(l):
        x = nvfp4.dequantise(data.b[0, :, i], data.sfb[0, :, i])
        for row in range(0, m, ROWS):
            rows = slice(row, row + ROWS)
            whole = k // TILE * TILE
            a = nvfp4.dequantise(data.a[rows, : whole // 2, i], data.sfa[rows, : whole // 16, i])
            data.c[rows, 0, i] = a @ x[:whole]
    return data.c
