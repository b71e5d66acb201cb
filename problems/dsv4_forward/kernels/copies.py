"""Mix the hc copies in CUDA, in two launches, and write to them what a sublayer returned, in one.

The mixing matrix is read once for a block of tokens, and before the kernel ahead has ended: no launch just ahead may
write it. The interfaces and formulas are those of torch_ops/mhc.py.
"""

from ctypes import POINTER, Structure, c_float
from pathlib import Path

import torch

from problems.common import build
from problems.dsv4_forward.kernels.arguments import Own, addresses, expect, fields, is_bf16
from problems.dsv4_forward.weights.config import Config

HC_MULT = 4
PART = 512  # columns that a block sums over, as in the source
FP32 = torch.float32


class _Call(Structure):
    """copies.cu's Call."""

    _fields_ = [
        *fields(
            "copies first second fn base scale sums post comb out", "tokens d bf16 first_bf16 second_bf16 iterations"
        ),
        *((name, c_float) for name in ("norm_eps", "eps")),
    ]


class Copies(Own):
    """The ops on one build, for 4 copies. ValueError, in each: a tensor that is not contiguous, or of another dtype or
    shape.
    """

    SOURCE = Path(__file__).with_suffix(".cu")
    OPS = ("mhc_pre", "mhc_post")

    def __init__(self, built: build.Artefact) -> None:
        self._mix, self._spread = (
            built.function(name, POINTER(_Call)) for name in ("launch_mix_copies", "launch_spread")
        )

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
    ) -> object:
        """Compute torch_ops mhc.pre; out of the dtype of the copies."""
        bf16, (tokens, n, d) = is_bf16("copies", copies), copies.shape
        if n != HC_MULT:
            return NotImplemented
        for name, tensor, dtype, shape in (
            ("post", post, FP32, (tokens, n)),
            ("comb", comb, FP32, (tokens, n, n)),
            ("copies", copies, copies.dtype, (tokens, n, d)),
            ("out", out, copies.dtype, (tokens, d)),
            ("fn", fn, FP32, (cfg.hc_rows, n * d)),
            ("base", base, FP32, (cfg.hc_rows,)),
            ("scale", scale, FP32, (3,)),
        ):
            expect(name, tensor, dtype, shape)
        if tokens:
            sums = torch.empty(tokens, -(-n * d // PART), cfg.hc_rows + 1, dtype=FP32, device=copies.device)
            given = {"copies": copies, "fn": fn, "base": base, "scale": scale, "sums": sums}
            sizes = {"tokens": tokens, "d": d, "bf16": bf16, "iterations": cfg.hc_sinkhorn_iters}
            tensors = addresses(**given, post=post, comb=comb, out=out)
            call = _Call(**tensors, **sizes, norm_eps=cfg.rms_norm_eps, eps=cfg.hc_eps)
            build.check(self._mix(call), "mhc_pre")
        return None

    def mhc_post(
        self,
        y: torch.Tensor,
        copies: torch.Tensor,
        post: torch.Tensor,
        comb: torch.Tensor,
        out: torch.Tensor,
        second: torch.Tensor | None = None,
    ) -> object:
        """Compute torch_ops mhc.post; out of the dtype of the copies."""
        bf16, (tokens, n, d) = is_bf16("copies", copies), copies.shape
        if n != HC_MULT:
            return NotImplemented
        first_bf16, second_bf16 = is_bf16("y", y), 0 if second is None else is_bf16("second", second)
        for name, tensor, dtype, shape in (
            ("y", y, y.dtype, (tokens, d)),
            *([] if second is None else [("second", second, second.dtype, (tokens, d))]),
            ("copies", copies, copies.dtype, (tokens, n, d)),
            ("out", out, copies.dtype, (tokens, n, d)),
            ("post", post, FP32, (tokens, n)),
            ("comb", comb, FP32, (tokens, n, n)),
        ):
            expect(name, tensor, dtype, shape)
        if tokens:
            tensors = addresses(copies=copies, first=y, second=second, post=post, comb=comb, out=out)
            sizes = {"tokens": tokens, "d": d, "bf16": bf16}
            call = _Call(**tensors, **sizes, first_bf16=first_bf16, second_bf16=second_bf16)
            build.check(self._spread(call), "mhc_post")
        return None
