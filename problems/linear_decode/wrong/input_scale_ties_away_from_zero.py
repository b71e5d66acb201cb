"""Rounds the scales of nvfp4's input that are ties up.

Input scales that are no powers of two hide it: then there are no ties.
"""

import torch
from task import Matrix, input_t, input_values, output_t, parts, unpack

from problems.common import fp8, nvfp4

TARGETS = ("cpu", "sm90", "sm100")


def weights_of(fmt: str, matrix: Matrix) -> torch.Tensor:
    """fp32 (G, n, k), without nvfp4's factor."""
    if fmt == "bf16":
        return matrix.codes.float()
    if fmt == "fp8":
        return fp8.dequantise_blocks(matrix.codes, matrix.scales)
    values = nvfp4.decode(matrix.codes).unflatten(-1, (-1, nvfp4.BLOCK))
    return values.mul_(matrix.scales.float().unsqueeze(-1)).flatten(-2)


def custom_kernel(data: input_t) -> output_t:
    """Write the wrong products into data.outputs.out and return it."""
    sizes = unpack(data)
    out, v = data.outputs.out, data.inputs.x
    for link, given in zip(data.weights.links, parts(out, sizes), strict=True):
        for matrix, to in zip(link, given, strict=True):
            taken = input_values(sizes.format, matrix, v)
            if matrix.input_scale is not None:
                by = matrix.input_scale.view(-1, 1, 1)
                u = v.float().unflatten(1, (len(by), -1, 16)) / by
                wanted = (u.abs().amax(-1, keepdim=True) / nvfp4.E2M1_MAX).clamp(max=nvfp4.E4M3_MAX)
                step = (wanted.clamp(min=2.0**-6).log2().floor() - 3).exp2()
                scale = ((wanted / step + 0.5).floor() * step).clamp(max=nvfp4.E4M3_MAX)
                codes = nvfp4.nearest_e2m1(u / scale.where(scale > 0, torch.inf))
                taken = (codes * scale).flatten(-2).mul_(by.view(1, -1, 1)).flatten(1)
            taken = taken.unflatten(1, (len(matrix.codes), -1)).transpose(0, 1)
            got = torch.bmm(taken, weights_of(sizes.format, matrix).mT)
            if matrix.factor is not None:
                got.mul_(matrix.factor.view(-1, 1, 1))
            to.copy_(got.transpose(0, 1).flatten(1))
        v = given[0]
    return out
