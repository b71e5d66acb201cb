"""Kernels for DeepSeek-V4 inference on Hopper and Blackwell: torch.ops.dsv4.*, and others' signatures in compat.

In the wheel `dsv4_kernels.problems` is a copy of what they need of the kit that judges them; in a checkout, problems/.
"""

from dsv4_kernels import compat, layers  # noqa: F401
from dsv4_kernels.operators import (  # noqa: F401  for callers
    fmha_decode,
    fmha_prefill,
    hold_linear_decode,
    hold_moe_gemm,
    indexer,
    linear_decode,
    mhc_site,
    moe_gemm,
    nvfp4_gemv,
)

__version__ = "0.2.0"  # the distribution's
