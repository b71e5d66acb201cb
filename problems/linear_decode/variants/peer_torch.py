"""peer_torch: cuBLAS bf16 products, W16A16; dequantising the weights to bf16 beforehand is left out of the time.

Timed are a kernel a link that rounds the input as fp8 wants it, a Triton one of ours, and torch's matrix products. fp8
weights are exact in bf16, nvfp4 ones but for a rounding after the factor. The call reads 2 bytes a weight.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from task import Matrix, Weights, input_t, output_t, parts, unpack_call, unpack_weights

from problems.common import fp8, nvfp4

TARGETS = ("sm90", "sm100")
REQUIRES = ("triton",)


class Prepared(NamedTuple):
    """What stands for the weights: bf16 (G, k, n) views of a matrix each, and whether a link's input is quantised."""

    format: str
    sizes: tuple[tuple[tuple[int, int, int], ...], ...]
    links: tuple[tuple[torch.Tensor, ...], ...]
    quantise: tuple[bool, ...]


@triton.jit
def _rounded(x, out, k, BLOCK: tl.constexpr):
    """out bf16 (T, k): x, bf16, through e4m3 in groups of BLOCK, as fp8.round_trip. Program (token, group)."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * k + column
    value = tl.load(x + at, mask=column < k, other=0.0).to(tl.float32)
    most = tl.full((1,), 1e-4, tl.float32)
    most = tl.div_rn(tl.maximum(tl.max(tl.abs(value), 0), most), tl.full((1,), 448.0, tl.float32))
    exponent = (most.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    code = (value * inverse).to(tl.float8e4nv)
    tl.store(out + at, (code.to(tl.float32) * scale).to(tl.bfloat16), mask=column < k)


def prepare(weights: Weights) -> Prepared:
    """Dequantised copies. ValueError as unpack_weights says."""
    fmt, sizes = unpack_weights(weights)
    links = tuple(tuple(_dequantised(fmt, matrix).mT for matrix in link) for link in weights.links)
    return Prepared(fmt, sizes, links, tuple(link[0].quantise for link in weights.links))


def setup(data: input_t) -> list[torch.Tensor | None]:
    """Room for each link's rounded input, None where it is not rounded. ValueError as unpack_call says."""
    prepared: Prepared = data.weights
    tokens = unpack_call(data.inputs, data.outputs, prepared.format, prepared.sizes).tokens
    inputs = [tokens * link[0].shape[0] * link[0].shape[1] for link in prepared.links]
    return [
        data.inputs.x.new_empty(count).view(tokens, -1) if quantise else None
        for count, quantise in zip(inputs, prepared.quantise, strict=True)
    ]


def custom_kernel(data: input_t, state: list[torch.Tensor | None]) -> output_t:
    """Write data.outputs.out and return it; `state` is what setup(data) gave."""
    prepared, (v,), (out,) = data
    sizes = unpack_call(data.inputs, data.outputs, prepared.format, prepared.sizes)
    for link, room, given in zip(prepared.links, state, parts(out, sizes), strict=True):
        if room is not None:
            tokens, k = v.shape
            _rounded[tokens, triton.cdiv(k, fp8.BLOCK)](v, room, k, BLOCK=fp8.BLOCK, num_warps=1)
            v = room
        for w, to in zip(link, given, strict=True):
            groups = len(w)
            if groups == 1:
                torch.mm(v, w[0], out=to)
            else:
                shape = (len(v), groups, -1)
                torch.bmm(v.view(shape).transpose(0, 1), w, out=to.view(shape).transpose(0, 1))
        v = given[0]
    return out


def _dequantised(fmt: str, matrix: Matrix) -> torch.Tensor:
    """bf16 (G, n, k)."""
    if fmt == "bf16":
        return matrix.codes.clone()
    if fmt == "fp8":
        return fp8.dequantise_blocks(matrix.codes, matrix.scales, torch.bfloat16)
    values = nvfp4.decode(matrix.codes).unflatten(-1, (-1, nvfp4.BLOCK))
    return values.mul_(matrix.scales.float().unsqueeze(-1)).flatten(-2).mul_(matrix.factor.view(-1, 1, 1)).bfloat16()
