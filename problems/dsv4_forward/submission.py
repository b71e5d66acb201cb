"""Select the winner for each target. WINNERS is a literal: the harness reads it without running this file."""

from problems.common.winner import Winner

COMPOSES = ("nvfp4_gemv", "fmha_decode", "fmha_prefill", "indexer", "moe_gemm", "linear_decode", "mhc_site")
# Variants by target, the first that the machine can run.
WINNERS = {"cpu": ("composed",), "sm90": ("composed",), "sm100": ("composed",)}

winner = Winner(__file__)
prepare = winner.prepare
custom_kernel = winner.custom_kernel
