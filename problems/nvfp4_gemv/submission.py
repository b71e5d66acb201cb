"""Select the winner for each target. WINNERS is a literal: the harness reads it without running this file."""

import functools
from pathlib import Path

from task import input_t, output_t

from problems.common import load

# Variants by target, the first that the machine can run.
WINNERS = {
    "cpu": ("cpu_avx512", "cpu_avx2", "cpu_portable"),
    "sm90": ("sm90_dp4a",),
    "sm100": ("sm100_native",),
}


@functools.cache
def _name(target: str) -> str:
    return load.winner(Path(__file__).parent, target)


def custom_kernel(data: input_t) -> output_t:
    """Write A b into data.c, fp16 (m, 1, l), with the winner for the device of data.a, and return data.c.

    ValueError: a device without a winner, or data that the variant refuses. Nothing replaces a missing winner.
    """
    return load.variant("nvfp4_gemv", _name(load.device_target(data.a.device))).custom_kernel(data)
