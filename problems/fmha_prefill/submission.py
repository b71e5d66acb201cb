"""Select the winner for each target. WINNERS is a literal: the harness reads it without running this file."""

from problems.common.winner import Winner

# Variants by target, the first that the machine can run.
WINNERS = {
    "cpu": ("cpu_portable",),
    "sm90": ("sm90_wgmma", "torch_eager"),
    "sm100": ("torch_eager",),
}

custom_kernel = Winner(__file__).custom_kernel
