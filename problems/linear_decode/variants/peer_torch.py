"""peer_torch: cuBLAS bf16 products, W16A16; dequantising the weights to bf16 beforehand is left out of the time.

Timed are a kernel a link that rounds the input as fp8 and nvfp4 want it, a Triton one of ours (in nvfp4 one a matrix),
and torch's matrix products. fp8 weights are exact in bf16, nvfp4 ones but for a rounding after the factor, with which
the input scale goes. The call reads 2 bytes a weight.
"""

from typing import NamedTuple

import torch
from task import Matrix, Weights, input_t, output_t, parts, unpack_call, unpack_weights

from problems.common import fp8, nvfp4, triton_inputs

TARGETS = ("sm90", "sm100")
REQUIRES = ("triton",)


class Prepared(NamedTuple):
    """What replaces the weights: the matrices, and bf16 (G, k, n) views for each."""

    weights: Weights
    sizes: tuple[tuple[tuple[int, int, int], ...], ...]
    links: tuple[tuple[torch.Tensor, ...], ...]

    @property
    def format(self) -> str:
        """Of the weights."""
        return self.weights.format


def prepare(weights: Weights) -> Prepared:
    """Dequantised copies. ValueError as unpack_weights says."""
    fmt, sizes = unpack_weights(weights)
    links = tuple(tuple(_dequantised(fmt, matrix).mT for matrix in link) for link in weights.links)
    return Prepared(weights, sizes, links)


def setup(data: input_t) -> list[torch.Tensor | None]:
    """Room for each link's rounded input, None where it is not rounded. ValueError as unpack_call says."""
    prepared: Prepared = data.weights
    tokens = unpack_call(data.inputs, data.outputs, prepared.format, prepared.sizes).tokens
    inputs = [tokens * link[0].shape[0] * link[0].shape[1] for link in prepared.links]
    return [
        data.inputs.x.new_empty(count).view(tokens, -1) if quantise else None
        for count, quantise in zip(inputs, (link[0].quantise for link in prepared.weights.links), strict=True)
    ]


def custom_kernel(data: input_t, state: list[torch.Tensor | None]) -> output_t:
    """Write data.outputs.out and return it; `state` is what setup(data) gave."""
    prepared, (v,), (out,) = data
    sizes = unpack_call(data.inputs, data.outputs, prepared.format, prepared.sizes)
    for matrices, link, room, given in zip(
        prepared.weights.links, prepared.links, state, parts(out, sizes), strict=True
    ):
        taken = v if room is None else room
        for number, (matrix, w, to) in enumerate(zip(matrices, link, given, strict=True)):
            if matrix.quantise and (number == 0 or matrix.input_scale is not None):
                triton_inputs.round_input(prepared.format, matrix, v, room)
            groups = len(w)
            if groups == 1:
                torch.mm(taken, w[0], out=to)
            else:
                shape = (len(v), groups, -1)
                torch.bmm(taken.view(shape).transpose(0, 1), w, out=to.view(shape).transpose(0, 1))
        v = given[0]
    return out


def _dequantised(fmt: str, matrix: Matrix) -> torch.Tensor:
    """bf16 (G, n, k)."""
    if fmt == "bf16":
        return matrix.codes.clone()
    if fmt == "fp8":
        return fp8.dequantise_blocks(matrix.codes, matrix.scales, torch.bfloat16)
    values = nvfp4.decode(matrix.codes).unflatten(-1, (-1, nvfp4.BLOCK))
    factor = matrix.factor if matrix.input_scale is None else matrix.factor * matrix.input_scale
    return values.mul_(matrix.scales.float().unsqueeze(-1)).flatten(-2).mul_(factor.view(-1, 1, 1)).bfloat16()
