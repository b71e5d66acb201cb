"""Writes zeros."""

from task import input_t, output_t, unpack

TARGETS = ("cpu", "sm90", "sm100")


def custom_kernel(data: input_t) -> output_t:
    """Fill data.outputs.out with 0 and return it."""
    unpack(data)
    return data.outputs.out.zero_()
