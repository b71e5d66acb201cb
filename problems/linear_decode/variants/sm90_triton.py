"""sm90_triton: the Triton kernels that one would write first: weights decoded to bf16 in tl.dot's operand, k split.

Three kernels a matrix: one rounds the input where it is quantised, one multiplies, a program having some rows, up to 64
tokens and a part of k, and one adds the parts up in their order. All formats' weights, with fp8's
scales, are exact in bf16, so the products of one bf16 tl.dot are exact.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import triton
import triton.language as tl
from task import BENCHMARKS, BLOCK, Matrix, input_t, links_of, output_t, parts, unpack
from triton.compiler import ASTSource

from problems.common import build, triton_inputs
from problems.common.triton_dsl import cubin

TARGETS = ("sm90",)
REQUIRES = ("triton",)

BUSY = 528  # programs that occupy an H200's 132 SMs four times
ROWS = 32
COLUMNS = 1024  # of a program that adds up

# A code's sign, exponent and mantissa in the places of a bf16 stand for 2^-126 of its value, and the scale brings back
# 2^118: 2^126 would not fit a scale of 448. The rest is left to the factor of the whole sum, in fp32.
SCALE_UP = tl.constexpr(2.0**118)
REST = 2.0**8


@dataclass(frozen=True)
class Plan:
    """tokens: columns of tl.dot; step: of k; splits: parts of k."""

    tokens: int
    step: int
    splits: int


@triton.jit
def _weights(codes, scales, row, column, n, k, FORMAT: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr):
    """bf16 (ROWS, STEP) of the rows `row` and the columns from `column` on; codes, scales: of the group. nvfp4: divided
    by REST.
    """
    if FORMAT == "bf16":
        at = row[:, None].to(tl.int64) * k + (column + tl.arange(0, STEP))[None, :]
        return tl.load(codes + at)
    elif FORMAT == "fp8":
        at = row[:, None].to(tl.int64) * k + (column + tl.arange(0, STEP))[None, :]
        value = tl.load(codes + at).to(tl.float32)
        byte = tl.load(scales + row // 128 * tl.cdiv(k, 128) + column // 128).to(tl.int32)
        scale = (byte << 23).to(tl.float32, bitcast=True)
        return (value * scale[:, None]).to(tl.bfloat16)
    else:
        at = row[:, None].to(tl.int64) * (k // 2) + (column // 2 + tl.arange(0, STEP // 2))[None, :]
        two = tl.load(codes + at).to(tl.uint16)
        low = ((two & 0x07) << 6) | ((two & 0x08) << 12)
        high = ((two & 0x70) << 2) | ((two & 0x80) << 8)
        value = tl.join(low, high).to(tl.bfloat16, bitcast=True)
        at = row[:, None].to(tl.int64) * (k // 16) + (column // 16 + tl.arange(0, STEP // 16))[None, :]
        scale = (tl.load(scales + at).to(tl.float8e4nv, bitcast=True).to(tl.float32) * SCALE_UP).to(tl.bfloat16)
        return tl.reshape(tl.reshape(value, (ROWS, STEP // 16, 16)) * scale[:, :, None], (ROWS, STEP))


@triton.jit
def _product(
    x,
    codes,
    scales,
    sums,
    T,
    n,
    k,
    scale_n,
    groups,
    FORMAT: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """sums fp32 (SPLITS, T, groups n). x: bf16 (T, groups k). scale_n: scales of a group. Program (rows, group, tokens
    and part of k).
    """
    group = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(2) % SPLITS
    token = tl.program_id(2) // SPLITS * TOKENS + tl.arange(0, TOKENS)
    steps = k // STEP
    first = part * steps // SPLITS
    last = (part + 1) * steps // SPLITS
    codes += group.to(tl.int64) * n * (k // 2 if FORMAT == "nvfp4" else k)
    scales += group.to(tl.int64) * scale_n
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    for step in range(first, last):
        column = step * STEP
        w = _weights(codes, scales, row, column, n, k, FORMAT, ROWS, STEP)
        at = token[None, :] * (groups * k) + group * k + column + tl.arange(0, STEP)[:, None]
        taken = tl.load(x + at, mask=token[None, :] < T, other=0.0)
        total = tl.dot(w, taken, total)
    to = (part * T + token[None, :]) * (groups * n) + group * n + row[:, None]
    tl.store(sums + to, total, mask=token[None, :] < T)


@triton.jit
def _add(
    sums,
    factor,
    input_scale,
    out,
    columns,
    n,
    FORMAT: tl.constexpr,
    SCALED: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out bf16 (T, columns): the SPLITS parts of sums, fp32 (SPLITS, T, columns), in their order, times factor[group],
    and if SCALED input_scale[group]. Program (token, columns).
    """
    token, tokens = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.load(sums + token * columns + column, mask=column < columns, other=0.0)
    for j in tl.static_range(1, SPLITS):
        total += tl.load(sums + (j * tokens + token) * columns + column, mask=column < columns, other=0.0)
    if FORMAT == "nvfp4":
        total *= tl.load(factor + column // n, mask=column < columns, other=0.0) * 256.0
    if SCALED:
        total *= tl.load(input_scale + column // n, mask=column < columns, other=0.0)
    tl.store(out + token * columns + column, total.to(tl.bfloat16), mask=column < columns)


def plan(tokens: int, groups: int, n: int, k: int) -> Plan:
    """Choose by shapes only: parts of k such that there are about BUSY programs; a step stays in a block of scales."""
    step = 128 if k % 128 == 0 else 64
    columns, splits = next(count for count in (16, 32, 64) if count >= min(tokens, 64)), 1
    programs = triton.cdiv(tokens, columns) * groups * n // ROWS
    while splits < k // step // 2 and programs * splits < BUSY and splits < 16:
        splits *= 2
    return Plan(columns, step, splits)


def custom_kernel(data: input_t) -> output_t:
    """Write data.outputs.out and return it. ValueError as unpack says."""
    sizes = unpack(data)
    v, out = data.inputs.x, data.outputs.out
    for link, given in zip(data.weights.links, parts(out, sizes), strict=True):
        room = torch.empty_like(v) if link[0].quantise else v
        for number, (matrix, to) in enumerate(zip(link, given, strict=True)):
            if matrix.quantise and (number == 0 or matrix.input_scale is not None):
                triton_inputs.round_input(sizes.format, matrix, v, room)
            _multiply(sizes.format, matrix, room, to)
        v = given[0]
    return out


def _multiply(fmt: str, matrix: Matrix, v: torch.Tensor, out: torch.Tensor) -> None:
    groups, n = matrix.codes.shape[:2]
    tokens, k = len(v), v.shape[1] // groups
    how = plan(tokens, groups, n, k)
    sums = torch.empty(how.splits, *out.shape, dtype=torch.float32, device=v.device)
    scales = matrix.codes if matrix.scales is None else matrix.scales.view(torch.uint8)  # bf16 has none, reads none
    factor = sums if matrix.factor is None else matrix.factor
    scaled = matrix.input_scale is not None
    constants = product_constants(fmt, how)
    _product[n // ROWS, groups, how.splits * triton.cdiv(tokens, how.tokens)](
        v, matrix.codes, scales, sums, tokens, n, k, scales[0].numel(), groups, **constants, num_warps=4, num_stages=4
    )
    grid = (tokens, triton.cdiv(groups * n, COLUMNS))
    _add[grid](
        sums,
        factor,
        matrix.input_scale if scaled else factor,
        out,
        groups * n,
        n,
        FORMAT=fmt,
        SCALED=scaled,
        SPLITS=how.splits,
        COLUMNS=COLUMNS,
    )


def product_constants(fmt: str, how: Plan) -> dict:
    return {"FORMAT": fmt, "TOKENS": how.tokens, "ROWS": ROWS, "STEP": how.step, "SPLITS": how.splits}


def compile_for(target: str) -> list[build.Artefact]:
    """Compile for `target`, without a GPU: all kernels for each shape of the benchmarks."""
    if target not in TARGETS:
        raise ValueError(f"target must be one of {TARGETS}, got {target!r}")
    made = {}
    for case in BENCHMARKS:
        for groups, n, k in (matrix for link in links_of(case.shape) for matrix in link):
            how = plan(case.tokens, groups, n, k)
            fmt = case.weight_format
            add = {"FORMAT": fmt, "SCALED": case.format == "nvfp4", "SPLITS": how.splits, "COLUMNS": COLUMNS}
            for kernel, constants, warps, stages in (
                (triton_inputs.rounded_fp8, {"BLOCK": BLOCK}, 1, 3),
                (triton_inputs.rounded_nvfp4, {"WIDTH": triton_inputs.COLUMNS}, 4, 3),
                (_product, product_constants(fmt, how), 4, 4),
                (_add, add, 4, 3),
            ):
                made[f"{kernel.__name__} {constants}"] = kernel, constants, fmt, warps, stages
    return [_cubin(*what, target) for what in made.values()]


_CODES = {"fp8": "*fp8e4nv", "nvfp4": "*u8", "bf16": "*bf16"}
_TYPES = {**dict.fromkeys(("x", "out"), "*bf16"), **dict.fromkeys(("sums", "factor", "input_scale"), "*fp32")}


def _cubin(kernel: object, constants: dict, fmt: str, warps: int, stages: int, target: str) -> build.Artefact:
    """Compile one kernel with these constants."""
    names = kernel.arg_names
    types = {**_TYPES, "codes": _CODES[fmt], "scales": "*bf16" if fmt == "bf16" else "*u8"}
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    constexprs = {(i,): constants[n] for i, n in enumerate(names) if n in constants}
    aligned = {n for n, kind in signature.items() if kind.startswith("*")} | {"n", "k", "columns"} & signature.keys()
    hints = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in aligned}
    source = ASTSource(kernel, signature, constexprs, hints)
    return cubin(source, {"num_warps": warps, "num_stages": stages}, Path(__file__).stem, target)
