"""Compute the steps between matrix products in CUDA: RMSNorm, rotation, and the mixing of the hc copies.

In torch each step is a chain of small operations, 80 launches for Sinkhorn only; here it is one or two launches. The
interfaces and formulas are those of torch_ops/norm.py, rope.py and mhc.py. Activations are all bf16 or all fp32,
contiguous, with 4 copies.
"""

from collections.abc import Callable
from ctypes import c_float, c_int, c_longlong, c_void_p
from pathlib import Path

import torch

from problems.common import build

TARGETS = ("sm90", "sm100")
OPS = ("rms_norm", "rotate", "mhc_post")
SOURCE = Path(__file__).with_suffix(".cu")
HC_MULT = 4


def compile_for(target: str) -> list[build.Artefact]:
    """Compile for `target`, without a GPU."""
    return [build.cuda(SOURCE, target)]


def ops(target: str) -> dict[str, Callable[..., None]]:
    """Build and load the kernels. -> by op. BuildError as build.cuda."""
    made = Fused(build.cuda(SOURCE, target))
    return {"rms_norm": made.rms_norm, "rotate": made.rotate, "mhc_post": made.mhc_post}


class Fused:
    """The ops on one build. ValueError, in each: mixed dtypes, or a tensor that is not contiguous."""

    def __init__(self, built: build.Artefact) -> None:
        pointers = [c_void_p] * 10
        self._norm = built.function("launch_rms_norm", *pointers[:3], c_int, c_int, c_float, c_int)
        self._rotate = built.function("launch_rotate", *pointers[:3], c_longlong, c_int, c_int, c_int, c_float, c_int)
        self._write = built.function("launch_write_copies", *pointers[:5], c_int, c_int, c_int)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor | None, eps: float, out: torch.Tensor) -> None:
        """Compute torch_ops norm.rms_norm; weight of the dtype of x."""
        bf16 = _bf16(x, out, *(() if weight is None else (weight,)))
        d = x.shape[-1]
        code = self._norm(
            x.data_ptr(), None if weight is None else weight.data_ptr(), out.data_ptr(), x.numel() // d, d, eps, bf16
        )
        build.check(code, "rms_norm")

    def rotate(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor, inverse: bool = False
    ) -> None:
        """Compute torch_ops rope.rotate."""
        bf16 = _bf16(x, out)
        if out is not x:
            out.copy_(x)
        d, half = x.shape[-1], cos.shape[-1]
        vectors = x.numel() // d
        code = self._rotate(
            out.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            vectors,
            max(1, vectors // max(1, len(x))),
            d,
            half,
            -1.0 if inverse else 1.0,
            bf16,
        )
        build.check(code, "rotate")

    def mhc_post(
        self, y: torch.Tensor, copies: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Compute torch_ops mhc.post."""
        bf16 = _bf16(y, copies, out)
        tokens, n, d = _shape(copies)
        pointers = (t.data_ptr() for t in (y, copies, post, comb, out))
        build.check(self._write(*pointers, tokens, d, bf16), "mhc_post")


def _shape(copies: torch.Tensor) -> torch.Size:
    if copies.dim() != 3 or copies.shape[1] != HC_MULT:
        raise ValueError(f"copies must be (N, {HC_MULT}, d), got {tuple(copies.shape)}")
    return copies.shape


def _bf16(*tensors: torch.Tensor) -> int:
    """1 if all are bf16, 0 if all are fp32. ValueError: neither, or one is not contiguous."""
    kinds = {tensor.dtype for tensor in tensors}
    if kinds not in ({torch.bfloat16}, {torch.float32}):
        raise ValueError(f"activations must all be bf16 or all fp32, got {sorted(map(str, kinds))}")
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError(f"activations must be contiguous, got strides {[tensor.stride() for tensor in tensors]}")
    return int(torch.bfloat16 in kinds)
