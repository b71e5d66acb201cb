"""Rounds the codes of fp8's input that are ties away from zero."""

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
            if sizes.format == "fp8" and matrix.quantise:
                blocks = torch.nn.functional.pad(v.float(), (0, -v.shape[1] % 128)).unflatten(1, (-1, 128))
                most = blocks.abs().amax(-1, keepdim=True)
                scale = fp8.decode_ue8m0(fp8.ue8m0_scale(most, fp8.E4M3_MAX, fp8.GROUP_FLOOR))
                exact = blocks / scale
                step = (exact.abs().clamp(min=2.0**-6).log2().floor() - 3).exp2()
                codes = torch.copysign((exact.abs() / step + 0.5).floor() * step, exact)
                taken = (codes * scale).flatten(1)[:, : v.shape[1]]
            taken = taken.unflatten(1, (len(matrix.codes), -1)).transpose(0, 1)
            got = torch.bmm(taken, weights_of(sizes.format, matrix).mT)
            if matrix.factor is not None:
                got.mul_(matrix.factor.view(-1, 1, 1))
            to.copy_(got.transpose(0, 1).flatten(1))
        v = given[0]
    return out
