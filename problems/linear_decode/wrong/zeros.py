"""Writes zeros."""

from task import input_t, output_t

TARGETS = ("cpu", "sm90", "sm100")


def custom_kernel(data: input_t) -> output_t:
    """Write zeros into data.outputs.out and return it."""
    return data.outputs.out.zero_()
