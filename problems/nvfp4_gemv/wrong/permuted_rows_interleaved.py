"""Takes row r of a permuted 128-row block at [r // 4, r % 4] in place of [r % 32, r // 32].

m = 1 hides it: row 0 is where it belongs.
"""

from task import input_t, output_t, unpack

from problems.common import nvfp4

TARGETS = ("cpu", "sm90", "sm100")
ROWS = 256  # rows dequantised at a time


def custom_kernel(data: input_t) -> output_t:
    """Write the wrong product into data.c and return it."""
    m, k, l = unpack(data)
    for i in range(l):
        x = nvfp4.dequantise(data.b[0, :, i], data.sfb[0, :, i])
        for row in range(0, m, ROWS):
            rows = slice(row, row + ROWS)
            tiles = data.sfa_permuted[..., i].permute(2, 0, 1, 4, 3)  # (rest_m, 32, 4, rest_k, 4)
            scales = tiles.reshape(-1, k // 16)
            data.c[rows, 0, i] = nvfp4.dequantise(data.a[rows, :, i], scales[rows][: m - row]) @ x
    return data.c
