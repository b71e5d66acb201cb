"""Reads codes 1 and 9, the e2m1 subnormals +-0.5, as zero."""

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
            codes = nvfp4.unpack(data.a[rows, :, i])
            codes[(codes & 7) == 1] = 0
            data.c[rows, 0, i] = nvfp4.dequantise(nvfp4.pack(codes), data.sfa[rows, :, i]) @ x
    return data.c
