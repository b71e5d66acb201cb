"""Select the winner for each target. WINNERS is a literal: the harness reads it without running this file."""

import functools
from pathlib import Path

from task import Weights, input_t, output_t

from problems.common import load

# Variants by target, the first that the machine can run.
WINNERS = {
    "cpu": ("cpu_avx512", "cpu_avx2", "cpu_portable"),
    "sm90": ("sm90_mma",),
    "sm100": ("sm90_mma",),
}


@functools.cache
def _name(target: str) -> str:
    return load.winner(Path(__file__).parent, target)


def prepare(weights: Weights) -> object:
    """What the winner for the weights' device makes of them; they themselves if it prepares nothing. ValueError: a
    device without a winner.
    """
    variant = load.variant("linear_decode", _name(load.device_target(weights.links[0][0].codes.device)))
    return variant.prepare(weights) if hasattr(variant, "prepare") else weights


def custom_kernel(data: input_t) -> output_t:
    """Write the products into data.outputs.out, with the winner for its device, and return it.

    ValueError: a device without a winner, or data that the variant refuses. Nothing replaces a missing winner.
    """
    return load.variant("linear_decode", _name(load.device_target(data.inputs.x.device))).custom_kernel(data)
