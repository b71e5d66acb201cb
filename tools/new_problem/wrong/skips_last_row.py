"""Leaves the last row as it finds it."""

from task import input_t, output_t, unpack

TARGETS = ("cpu", "sm90", "sm100")


def custom_kernel(data: input_t) -> output_t:
    """Write the wrong answer into data.y and return it."""
    m, k = unpack(data)
    data.y[: m - 1] = data.w[: m - 1] @ data.x
    return data.y
