"""Swaps rows r and r + 8 of each 16-row tile at write-back, as a wrong accumulator layout does.

m = 1 hides it: a case with a whole tile of 16 rows, m = 16 being the smallest, shows it.
"""

from task import input_t, output_t, unpack

from problems.common import nvfp4

TARGETS = ("cpu", "sm90", "sm100")
ROWS = 256  # rows dequantised at a time
TILE = 16  # rows


def custom_kernel(data: input_t) -> output_t:
    """Write the wrong product into data.c and return it."""
    m, _, l = unpack(data)
    for i in range(l):
        x = nvfp4.dequantise(data.b[0, :, i], data.sfb[0, :, i])
        for row in range(0, m, ROWS):
            rows = slice(row, row + ROWS)
            c = nvfp4.dequantise(data.a[rows, :, i], data.sfa[rows, :, i]) @ x
            whole = len(c) // TILE * TILE
            c[:whole] = c[:whole].view(-1, 2, TILE // 2).flip(1).flatten()
            data.c[rows, 0, i] = c
    return data.c
