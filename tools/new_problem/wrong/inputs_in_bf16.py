"""Rounds W and x to bf16 before the product."""

from task import input_t, output_t, unpack

TARGETS = ("cpu", "sm90", "sm100")


def custom_kernel(data: input_t) -> output_t:
    """Write the wrong answer into data.y and return it."""
    m, k = unpack(data)
    data.y[:] = data.w.bfloat16().float() @ data.x.bfloat16().float()
    return data.y
