"""The winner for each target. WINNERS is a literal: the harness reads it without running this file."""

from task import input_t, output_t

from problems.common import load

WINNERS = {"cpu": "cpu_avx2", "sm90": "sm90_dp4a", "sm100": "sm100_native"}  # target: variant


def custom_kernel(data: input_t) -> output_t:
    """Write A b into data.c, fp16 (m, 1, l), with the winner for the device of data.a, and return data.c.

    ValueError: a device without a winner, or data that the variant refuses. Nothing stands in for a missing winner.
    """
    target = load.device_target(data.a.device)
    if target not in WINNERS:
        raise ValueError(f"data must be on a device of {sorted(WINNERS)}, got {data.a.device} ({target})")
    return load.variant("nvfp4_gemv", WINNERS[target]).custom_kernel(data)
