"""Reads row 1 of b, which is padding, where row 0 is the vector."""

from task import input_t, output_t, unpack

from problems.common import nvfp4

TARGETS = ("cpu", "sm90", "sm100")
ROWS = 256  # rows dequantised at a time


def custom_kernel(data: input_t) -> output_t:
    """Write the wrong product into data.c and return it."""
    m, _, l = unpack(data)
    for i in range(l):
        x = nvfp4.dequantise(data.b[1, :, i], data.sfb[1, :, i])
        for row in range(0, m, ROWS):
            rows = slice(row, row + ROWS)
            data.c[rows, 0, i] = nvfp4.dequantise(data.a[rows, :, i], data.sfa[rows, :, i]) @ x
    return data.c
