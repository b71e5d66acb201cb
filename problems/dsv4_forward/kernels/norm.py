"""Norm vectors by their RMS in CUDA, in one launch. The interface and formula are those of torch_ops/norm.py."""

from collections.abc import Callable
from ctypes import c_float, c_int, c_void_p
from pathlib import Path

import torch

from problems.common import build
from problems.dsv4_forward.kernels.arguments import expect, is_bf16, pointer

TARGETS = ("sm90", "sm100")
OPS = ("rms_norm",)
SOURCE = Path(__file__).with_suffix(".cu")


def compile_for(target: str) -> list[build.Artefact]:
    """Compile for `target`, without a GPU."""
    return [build.cuda(SOURCE, target)]


def ops(target: str) -> dict[str, Callable[..., object]]:
    """Build and load the kernels. -> by op. BuildError as build.cuda."""
    return {"rms_norm": Norm(build.cuda(SOURCE, target)).rms_norm}


class Norm:
    """The op on one build."""

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
