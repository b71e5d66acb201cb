"""Norm vectors by their RMS in CUDA, in one launch. The interface and formula are those of torch_ops/norm.py."""

from ctypes import c_float, c_int, c_void_p
from pathlib import Path

import torch

from problems.common import build
from problems.dsv4_forward.kernels.arguments import Own, expect, is_bf16, pointer


class Norm(Own):
    """The op on one build."""

    SOURCE = Path(__file__).with_suffix(".cu")
    OPS = ("rms_norm",)

    def __init__(self, built: build.Artefact) -> None:
        self._norm = built.function("launch_rms_norm", *[c_void_p] * 3, c_int, c_int, c_float, c_int)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor | None, eps: float, out: torch.Tensor) -> None:
        """Compute torch_ops norm.rms_norm. ValueError: mixed dtypes, another shape, or not contiguous."""
        d, bf16 = x.shape[-1], is_bf16("x", x)
        for name, tensor in (("x", x), ("out", out)):
            expect(name, tensor, x.dtype, x.shape)
        if weight is not None:
            expect("weight", weight, x.dtype, (d,))
        if x.numel():
            code = self._norm(x.data_ptr(), pointer(weight), out.data_ptr(), x.numel() // d, d, eps, bf16)
            build.check(code, "rms_norm")
