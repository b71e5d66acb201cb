"""Store one matrix in a number format: what random weights and conversions share."""

import torch

from problems.common import fp8, nvfp4
from problems.dsv4_forward.weights import formats

NVFP4_LARGEST = nvfp4.E2M1_MAX * nvfp4.E4M3_MAX  # 2688: the largest value under a second scale of 1
_SMALLEST = 2.0**-126  # keeps the second scale of a matrix of zeros off 0


def pack(matrix: torch.Tensor, kind: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """matrix: fp32 (n, k) -> the fields of Linear that hold it, but input_scale. dtype: of a plain weight.

    nvfp4 takes the whole matrix under one second scale, amax / 2688. ValueError: no such kind.
    """
    if kind == "plain":
        return {"weight": matrix.to(dtype)}
    if kind == "fp8":
        return dict(zip(("weight", "scale"), fp8.quantise_blocks(matrix), strict=True))
    if kind == "mxfp4":
        return dict(zip(("weight", "scale"), formats.quantise_mxfp4(matrix), strict=True))
    if kind != "nvfp4":
        raise ValueError(f"kind must be plain, fp8, mxfp4 or nvfp4, got {kind!r}")
    scale_2 = (matrix.abs().amax() / NVFP4_LARGEST).clamp(min=_SMALLEST)
    weight, scale = nvfp4.quantise(matrix / scale_2)
    return {"weight": weight, "scale": scale, "scale_2": scale_2}
