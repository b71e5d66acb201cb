"""Select the winner for each target. WINNERS is a literal: the harness reads it without running this file."""

import functools
from pathlib import Path

from task import Weights, input_t, output_t

from problems.common import load

COMPOSES = ("nvfp4_gemv", "fmha_decode", "indexer", "moe_gemm", "linear_decode", "mhc_site")
# Variants by target, the first that the machine can run.
WINNERS = {"cpu": ("composed",), "sm90": ("composed",), "sm100": ("composed",)}


@functools.cache
def _name(target: str) -> str:
    return load.winner(Path(__file__).parent, target)


def prepare(weights: Weights) -> object:
    """What the winner for the device of the weights makes of them. ValueError: a device without a winner."""
    return load.variant("dsv4_forward", _name(load.device_target(weights.bytes.device))).prepare(weights)


def custom_kernel(data: input_t) -> output_t:
    """One call with the winner for the device of data.inputs; data.weights is what prepare returned."""
    return load.variant("dsv4_forward", _name(load.device_target(data.inputs.tokens.device))).custom_kernel(data)
