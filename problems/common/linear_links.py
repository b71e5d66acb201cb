"""The arguments of the C++ launchers of linear_decode (variants/cpu_linear.h, Problem)."""

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import torch

ARGUMENTS = (ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int64))
FORMATS = ("fp8", "nvfp4", "bf16")  # in the order of the enumeration there


def arguments(
    weights: Any, sizes: Any, x: torch.Tensor, parts: Sequence[Sequence[torch.Tensor]], limit: float | None = None
) -> tuple[ctypes.Array, ctypes.Array]:
    """Return tensors and numbers for a launcher. weights, sizes: linear_decode's task.Weights and task.Sizes; parts:
    the outputs, as task.parts gives them. limit: None, or that of the SwiGLU of the first link's output, whose first
    half are the gates; parts then have the result.
    """
    tensors: list[torch.Tensor | None] = [x]
    gate = 0 if limit is None else struct.unpack("I", struct.pack("f", limit))[0]  # of fp32 the bits
    numbers = [FORMATS.index(sizes.format), sizes.tokens, len(sizes.links), *map(len, sizes.links)]
    for link, shapes, given in zip(weights.links, sizes.links, parts, strict=True):
        for matrix, shape, out in zip(link, shapes, given, strict=True):
            tensors += (matrix.codes, matrix.scales, matrix.factor, matrix.input_scale, out)
            numbers += (*shape, matrix.quantise, gate)
        gate = 0
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    return (ctypes.c_void_p * len(pointers))(*pointers), (ctypes.c_int64 * len(numbers))(*numbers)
