"""Select the winner for each target. WINNERS is a literal: the harness reads it without running this file."""

import functools
from pathlib import Path

from task import input_t, output_t

from problems.common import load

# Variants by target, the first that the machine can run.
WINNERS = {
    "cpu": ("cpu_avx512", "cpu_portable"),
    "sm90": ("sm90_join",),
    "sm100": ("sm90_triton",),
}


@functools.cache
def _name(target: str) -> str:
    return load.winner(Path(__file__).parent, target)


def custom_kernel(data: input_t) -> output_t:
    """Write the chosen places into data.out, with the winner for the device of data.q, and return it.

    ValueError: a device without a winner, or data that the variant refuses. Nothing replaces a missing winner.
    """
    return load.variant("indexer", _name(load.device_target(data.q.device))).custom_kernel(data)
