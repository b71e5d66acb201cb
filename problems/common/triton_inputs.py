"""Round inputs of linear_decode in Triton, for variants and baselines that quantise in front of a product."""

from typing import Any

import torch
import triton
import triton.language as tl

GROUP = 128  # values that share a scale in fp8
COLUMNS = 512  # of a program of rounded_nvfp4


@triton.jit
def rounded_fp8(x, out, k, BLOCK: tl.constexpr):
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


@triton.jit
def rounded_nvfp4(x, input_scale, out, columns, k, WIDTH: tl.constexpr):
    """out bf16 (T, columns): code * scale of x, bf16, as nvfp4.encode; input_scale: fp32 (columns / k,). Program
    (token, WIDTH columns).
    """
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    at = tl.program_id(0).to(tl.int64) * columns + column
    value = tl.load(x + at, mask=column < columns, other=0.0).to(tl.float32)
    value = tl.div_rn(value, tl.load(input_scale + column // k, mask=column < columns, other=1.0))
    value = tl.reshape(value, (WIDTH // 16, 16))
    most = tl.max(tl.abs(value), 1)
    wanted = tl.minimum(tl.div_rn(most, tl.full((WIDTH // 16,), 6.0, tl.float32)), 448.0)
    scale = tl.broadcast_to(wanted.to(tl.float8e4nv).to(tl.float32)[:, None], (WIDTH // 16, 16))
    code = tl.div_rn(value, tl.where(scale > 0, scale, float("inf")))
    code = tl.minimum(tl.maximum(code, -6.0), 6.0)
    # Codes are half of the power of two at or below them apart; the sum with 1.5 * 2^23 of these halves is rounded.
    power = (tl.maximum(tl.abs(code), 1.0).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    far = power * 6291456.0
    code = (code + far) - far
    tl.store(out + at, tl.reshape(code * scale, (WIDTH,)).to(tl.bfloat16), mask=column < columns)


def round_input(fmt: str, matrix: Any, v: torch.Tensor, out: torch.Tensor) -> None:
    """Write v, bf16 (T, G k), rounded as a task.Matrix that quantises wants it, to out, of the same shape: what meets
    its weights, in nvfp4 without the input scale.
    """
    tokens, columns = v.shape
    if fmt == "fp8":
        rounded_fp8[tokens, triton.cdiv(columns, GROUP)](v, out, columns, BLOCK=GROUP, num_warps=1)
    else:
        k = columns // len(matrix.input_scale)
        grid = (tokens, triton.cdiv(columns, COLUMNS))
        rounded_nvfp4[grid](v, matrix.input_scale, out, columns, k, WIDTH=COLUMNS, num_warps=4)
