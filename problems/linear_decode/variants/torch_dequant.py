"""torch_dequant: weights dequantised to fp32 in each call, products in plain torch. The baseline of the ratios."""

import torch
from task import Matrix, input_t, input_values, output_t, parts, unpack

from problems.common import fp8, nvfp4

TARGETS = ("cpu", "sm90", "sm100")


def decoded(fmt: str, matrix: Matrix) -> torch.Tensor:
    """fp32 (G, n, k), exactly, but for nvfp4's factor."""
    if fmt == "bf16":
        return matrix.codes.float()
    if fmt == "fp8":
        return fp8.dequantise_blocks(matrix.codes, matrix.scales)
    values = nvfp4.decode(matrix.codes).unflatten(-1, (-1, nvfp4.BLOCK))
    return values.mul_(matrix.scales.float().unsqueeze(-1)).flatten(-2)


def custom_kernel(data: input_t) -> output_t:
    """Write into data.outputs.out and return it. ValueError as unpack says."""
    sizes = unpack(data)
    out, v = data.outputs.out, data.inputs.x
    for link, given in zip(data.weights.links, parts(out, sizes), strict=True):
        for matrix, to in zip(link, given, strict=True):
            groups = len(matrix.codes)
            taken = input_values(sizes.format, matrix, v)
            taken = taken.unflatten(1, (groups, -1)).transpose(0, 1)
            got = torch.bmm(taken, decoded(sizes.format, matrix).mT)
            if matrix.factor is not None:
                got.mul_(matrix.factor.view(-1, 1, 1))
            to.view(sizes.tokens, groups, -1).copy_(got.transpose(0, 1))
        v = given[0]
    return out
