"""Mix the hc copies in CUDA, in two launches, and write to them what a sublayer returned, in one.

The mixing matrix is read once for a block of tokens, and before the kernel ahead has ended: no launch just ahead may
write it. The interfaces and formulas are those of torch_ops/mhc.py.
"""

from ctypes import c_float, c_int, c_void_p
from pathlib import Path

import torch

from problems.common import build
from problems.dsv4_forward.kernels.arguments import Own, expect, is_bf16, pointer
from problems.dsv4_forward.weights.config import Config

HC_MULT = 4
PART = 512  # columns that a block sums over, as in the source
FP32 = torch.float32


class Copies(Own):
    """The ops on one build, for 4 copies. ValueError, in each: a tensor that is not contiguous, or of another dtype or
    shape.
    """

    SOURCE = Path(__file__).with_suffix(".cu")
    OPS = ("mhc_pre", "mhc_post")

    def __init__(self, built: build.Artefact) -> None:
        self._mix = built.function("launch_mix_copies", *[c_void_p] * 8, c_int, c_int, c_float, c_float, c_int, c_int)
        self._spread = built.function("launch_spread", *[c_void_p] * 6, *[c_int] * 5)

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
            pointers = (tensor.data_ptr() for tensor in (copies, fn, base, scale, sums, out, post, comb))
            code = self._mix(*pointers, tokens, d, cfg.rms_norm_eps, cfg.hc_eps, cfg.hc_sinkhorn_iters, bf16)
            build.check(code, "mhc_pre")
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
        addends = is_bf16("y", y), 0 if second is None else is_bf16("second", second)
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
            pointers = (pointer(tensor) for tensor in (y, second, copies, post, comb, out))
            build.check(self._spread(*pointers, tokens, d, *addends, bf16), "mhc_post")
        return None
