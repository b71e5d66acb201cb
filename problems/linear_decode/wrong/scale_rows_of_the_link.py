"""Finds the scale of a row of fp8 by its place among all rows of the link, not of its matrix.

Matrices that begin at a multiple of 128 hide it, and short ones.
"""

import torch
from task import Matrix, input_t, input_values, output_t, parts, unpack

from problems.common import fp8, nvfp4

TARGETS = ("cpu", "sm90", "sm100")


def weights_of(fmt: str, matrix: Matrix, before: int) -> torch.Tensor:
    """fp32 (G, n, k), without nvfp4's factor. before: rows of the link ahead of the matrix."""
    if fmt == "bf16":
        return matrix.codes.float()
    if fmt == "fp8":
        row = torch.arange(before, before + matrix.codes.shape[1], device=matrix.codes.device)
        block = (row // 128 - before // 128).clamp(max=matrix.scales.shape[1] - 1)
        return fp8.dequantise_groups(matrix.codes, matrix.scales[:, block], 128)
    values = nvfp4.decode(matrix.codes).unflatten(-1, (-1, nvfp4.BLOCK))
    return values.mul_(matrix.scales.float().unsqueeze(-1)).flatten(-2)


def custom_kernel(data: input_t) -> output_t:
    """Write the wrong products into data.outputs.out and return it."""
    sizes = unpack(data)
    out, v = data.outputs.out, data.inputs.x
    for link, given in zip(data.weights.links, parts(out, sizes), strict=True):
        before = 0
        for matrix, to in zip(link, given, strict=True):
            taken = input_values(sizes.format, matrix, v)
            taken = taken.unflatten(1, (len(matrix.codes), -1)).transpose(0, 1)
            got = torch.bmm(taken, weights_of(sizes.format, matrix, before).mT)
            if matrix.factor is not None:
                got.mul_(matrix.factor.view(-1, 1, 1))
            to.copy_(got.transpose(0, 1).flatten(1))
            before += matrix.codes.shape[1]
        v = given[0]
    return out
