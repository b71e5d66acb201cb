"""Select the winner for each target. WINNERS is a literal: the harness reads it without running this file."""

from problems.common.winner import Winner

# Variants by target, the first that the machine can run.
WINNERS = {
    "cpu": ("cpu_avx512", "cpu_avx2", "cpu_portable"),
    "sm90": ("sm90_dp4a",),
    "sm100": ("sm100_native",),
}

custom_kernel = Winner(__file__).custom_kernel
