"""Mix the hc copies in CUDA, in two launches, and write to them what a sublayer returned as two addends, in one.

The mixing matrix is read once for a block of tokens, and before the kernel ahead has ended: no launch just ahead may
write it. The interfaces and formulas are those of torch_ops/chains.py and mhc.py.
"""

from collections.abc import Callable
from ctypes import c_float, c_int, c_void_p
from pathlib import Path

import torch

from problems.common import build
from problems.dsv4_forward.kernels.arguments import expect
from problems.dsv4_forward.weights.config import Config

TARGETS = ("sm90", "sm100")
OPS = ("mhc_pre", "mhc_post_sum")
SOURCE = Path(__file__).with_suffix(".cu")
HC_MULT = 4
PART = 512  # columns that a block sums over, as in the source
KINDS = (torch.float32, torch.bfloat16)


def compile_for(target: str) -> list[build.Artefact]:
    """Compile for `target`, without a GPU."""
    return [build.cuda(SOURCE, target)]


def ops(target: str) -> dict[str, Callable[..., None]]:
    """Build and load the kernels. -> by op. BuildError as build.cuda."""
    made = Copies(build.cuda(SOURCE, target))
    return {"mhc_pre": made.mhc_pre, "mhc_post_sum": made.mhc_post_sum}


class Copies:
    """The ops on one build. ValueError, in each: a tensor that is not contiguous, or of another dtype or shape."""

    def __init__(self, built: build.Artefact) -> None:
        self._mix = built.function("launch_mix_copies", *[c_void_p] * 8, c_int, c_int, c_float, c_float, c_int, c_int)
        self._spread_sum = built.function("launch_spread_sum", *[c_void_p] * 6, *[c_int] * 5)

    def mhc_pre(
        self,
        copies: torch.Tensor,
        fn: torch.Tensor,
        base: torch.Tensor,
        scale: torch.Tensor,
        cfg: Config,
        out: torch.Tensor,
        post: torch.Tensor,
        comb: torch.Tensor,
    ) -> None:
        """Compute torch_ops mhc.pre; 4 copies, out of their dtype."""
        tokens, n, d = _copies(copies)
        for name, tensor, dtype, shape in (
            ("post", post, torch.float32, (tokens, n)),
            ("comb", comb, torch.float32, (tokens, n, n)),
            ("copies", copies, copies.dtype, (tokens, n, d)),
            ("out", out, copies.dtype, (tokens, d)),
            ("fn", fn, torch.float32, (cfg.hc_rows, n * d)),
            ("base", base, torch.float32, (cfg.hc_rows,)),
            ("scale", scale, torch.float32, (3,)),
        ):
            expect(name, tensor, dtype, shape)
        if tokens:
            parts = -(-n * d // PART)
            sums = torch.empty(tokens, parts, cfg.hc_rows + 1, dtype=torch.float32, device=copies.device)
            pointers = (tensor.data_ptr() for tensor in (copies, fn, base, scale, sums, out, post, comb))
            code = self._mix(
                *pointers, tokens, d, cfg.rms_norm_eps, cfg.hc_eps, cfg.hc_sinkhorn_iters, KINDS.index(copies.dtype)
            )
            build.check(code, "mhc_pre")

    def mhc_post_sum(
        self,
        first: torch.Tensor,
        second: torch.Tensor,
        copies: torch.Tensor,
        post: torch.Tensor,
        comb: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Compute chains.mhc_post_sum; 4 copies."""
        (tokens, n, d), fp32 = _copies(copies), torch.float32
        for name, tensor in (("first", first), ("second", second)):
            if tensor.dtype not in KINDS:
                raise ValueError(f"{name} must be fp32 or bf16, got {tensor.dtype}")
        for name, tensor, dtype, shape in (
            ("first", first, first.dtype, (tokens, d)),
            ("second", second, second.dtype, (tokens, d)),
            ("copies", copies, copies.dtype, (tokens, n, d)),
            ("out", out, copies.dtype, (tokens, n, d)),
            ("post", post, fp32, (tokens, n)),
            ("comb", comb, fp32, (tokens, n, n)),
        ):
            expect(name, tensor, dtype, shape)
        if tokens:
            pointers = (tensor.data_ptr() for tensor in (first, second, copies, post, comb, out))
            kinds = (KINDS.index(tensor.dtype) for tensor in (first, second, copies))
            build.check(self._spread_sum(*pointers, tokens, d, *kinds), "mhc_post_sum")


def _copies(copies: torch.Tensor) -> torch.Size:
    """The shape (N, 4, d). ValueError: it is another, or the dtype is."""
    if copies.dim() != 3 or copies.shape[1] != HC_MULT:
        raise ValueError(f"copies must be (N, {HC_MULT}, d), got {tuple(copies.shape)}")
    if copies.dtype not in KINDS:
        raise ValueError(f"copies must be fp32 or bf16, got {copies.dtype}")
    return copies.shape
