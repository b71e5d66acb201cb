"""Leaves the last column of W out, as a loop over k in steps does without its rest."""

from task import input_t, output_t, unpack

TARGETS = ("cpu", "sm90", "sm100")


def custom_kernel(data: input_t) -> output_t:
    """Write the wrong answer into data.y and return it."""
    m, k = unpack(data)
    data.y[:] = data.w[:, : k - 1] @ data.x[: k - 1]
    return data.y
