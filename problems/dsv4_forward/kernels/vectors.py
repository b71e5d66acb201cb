"""Compute what surrounds an NVFP4 product in CUDA: activations to codes and scales, fp16 sums to activations.

In torch the first is a chain of 33 small operations; here each is one launch. Both surround the kernels of
nvfp4_gemv, in its in_model.py.
"""

from ctypes import c_int, c_longlong, c_void_p
from pathlib import Path
from typing import NamedTuple

import torch

from problems.common import build, nvfp4

TARGETS = ("sm90", "sm100")
SOURCE = Path(__file__).with_suffix(".cu")
ALIGNMENT = 16  # bytes, of x


class Rows(NamedTuple):
    """Where the vectors of N tokens go: uint8 (N, l, k // 2), e4m3 (N, l, k // 16) and (N, l, k // 64, 4).

    The last axis of each has stride 1, the third of `permuted` 512, as in the layout of nvfp4.permute_scales.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    permuted: torch.Tensor


class TorchVectors:
    """The two steps in torch, for any device: the reference of Vectors."""

    def encode(
        self, x: torch.Tensor, input_scale: torch.Tensor, low: torch.Tensor, high: torch.Tensor, rows: Rows
    ) -> None:
        """Write nvfp4.encode of x, clamped to low..high, to `rows`.

        x: fp32 or bf16 (N, l, k), no NaN; input_scale: fp32 (l,), positive; low, high: fp32 (l, 1).
        """
        codes, scales = nvfp4.encode(torch.clamp(x, low, high), input_scale)
        rows.codes.copy_(codes)
        rows.scales.copy_(scales)
        rows.permuted.copy_(scales.unflatten(-1, (-1, 4)))

    def scale(self, raw: torch.Tensor, factor: torch.Tensor, out: torch.Tensor) -> None:
        """Write out = raw * factor, in fp32, rounded once. raw: fp16 (N, l, m); factor: fp32 (l, 1); out:
        fp32 or bf16 (N, l, m).
        """
        torch.mul(raw, factor, out=out)


class Vectors:
    """The two steps in CUDA, one launch each, with the bits of TorchVectors. Interfaces as there."""

    def __init__(self, target: str) -> None:
        """Build and load the kernels. BuildError as build.cuda."""
        built, rows = build.cuda(SOURCE, target), [c_void_p, c_longlong, c_longlong] * 3
        self._encode = built.function("launch_encode", *[c_void_p] * 4, *rows, *[c_int] * 4)
        self._scale = built.function("launch_scale", *[c_void_p] * 3, *[c_int] * 4)

    def encode(
        self, x: torch.Tensor, input_scale: torch.Tensor, low: torch.Tensor, high: torch.Tensor, rows: Rows
    ) -> None:
        """Compute TorchVectors.encode. ValueError: x is neither bf16 nor fp32."""
        bf16, (tokens, groups, k) = _bf16("x", x), x.shape
        if not x.is_contiguous() or x.data_ptr() % ALIGNMENT:
            x = x.clone(memory_format=torch.contiguous_format)
        places = (part for to in rows for part in (to.data_ptr(), to.stride(0), to.stride(1)))  # elements are bytes
        code = self._encode(
            x.data_ptr(),
            input_scale.data_ptr(),
            low.data_ptr(),
            high.data_ptr(),
            *places,
            tokens,
            groups,
            k // nvfp4.BLOCK,
            bf16,
        )
        build.check(code, "encode")

    def scale(self, raw: torch.Tensor, factor: torch.Tensor, out: torch.Tensor) -> None:
        """Compute TorchVectors.scale; raw: contiguous. ValueError: out is neither bf16 nor fp32."""
        bf16 = _bf16("out", out)
        room = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        pointers = (tensor.data_ptr() for tensor in (raw, factor, room))
        build.check(self._scale(*pointers, *raw.shape, bf16), "scale")
        if room is not out:
            out.copy_(room)


def compile_for(target: str) -> list[build.Artefact]:
    """Compile for `target`, without a GPU."""
    return [build.cuda(SOURCE, target)]


def _bf16(name: str, tensor: torch.Tensor) -> int:
    """1 for bf16, 0 for fp32."""
    if tensor.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"{name} must be bf16 or fp32, got {tensor.dtype}")
    return int(tensor.dtype == torch.bfloat16)
