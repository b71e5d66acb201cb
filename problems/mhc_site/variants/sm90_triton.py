"""sm90_triton: two launches: x' with the sums of a part of the columns, then a program a token for all that follows."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from task import BENCHMARKS, HC_EPS, ITERATIONS, NORM_EPS, ROWS, input_t, output_t, unpack
from triton.compiler import ASTSource

from problems.common import build
from problems.common.triton_dsl import cubin

TARGETS = ("sm90",)
REQUIRES = ("triton",)

TOKENS = 16  # of a program of the first launch: the rows of a product on the tensor cores
COLUMNS = 32  # of a step, so that nothing spills; d is a multiple of it
SUMS = 32  # of a token and a part: 24 rows of fn, the sum of squares, and nothing
WARPS = 8  # of a program of the first launch
BUSY = 264  # programs that occupy an H200's 132 SMs twice


class Plan(NamedTuple):
    """steps: of COLUMNS columns that a program of the first launch walks; parts: programs that share a token; warps: of
    a program of the second launch.
    """

    steps: int
    parts: int
    warps: int


@triton.jit
def _spread(
    y,
    second,
    copies,
    post,
    comb,
    fn,
    new_copies,
    sums,
    T,
    D,
    PARTS,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    ADDENDS: tl.constexpr,
):
    """Tensors of task.Data; sums fp32 (T, PARTS, SUMS). Program (tokens, part): x' and the sums over its columns."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    part = tl.program_id(1)
    real = token < T
    row = tl.arange(0, SUMS)
    dots = tl.zeros((TOKENS, SUMS), tl.float32)
    square = tl.zeros((TOKENS,), tl.float32)
    for step in range(STEPS):
        column = (part * STEPS + step) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < D
        mask = real[:, None] & inside[None, :]
        value = tl.load(y + token[:, None] * D + column[None, :], mask=mask, other=0.0).to(tl.float32)
        if ADDENDS == 2:
            value += tl.load(second + token[:, None] * D + column[None, :], mask=mask, other=0.0).to(tl.float32)
        value = value.to(tl.bfloat16).to(tl.float32)
        # A step has its own sums: tensor cores cut off what they add, which shows in a chain of hundreds.
        part_dots = tl.zeros((TOKENS, SUMS), tl.float32)
        at = token[:, None] * 4 * D + column[None, :]
        x0 = tl.load(copies + at, mask=mask, other=0.0).to(tl.float32)
        x1 = tl.load(copies + at + D, mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(copies + at + 2 * D, mask=mask, other=0.0).to(tl.float32)
        x3 = tl.load(copies + at + 3 * D, mask=mask, other=0.0).to(tl.float32)
        for k in tl.static_range(4):
            made = tl.load(post + token * 4 + k, mask=real, other=0.0)[:, None] * value
            made += tl.load(comb + token * 16 + k, mask=real, other=0.0)[:, None] * x0
            made += tl.load(comb + token * 16 + 4 + k, mask=real, other=0.0)[:, None] * x1
            made += tl.load(comb + token * 16 + 8 + k, mask=real, other=0.0)[:, None] * x2
            made += tl.load(comb + token * 16 + 12 + k, mask=real, other=0.0)[:, None] * x3
            rounded = made.to(tl.bfloat16)
            tl.store(new_copies + at + k * D, rounded, mask=mask)
            wide = rounded.to(tl.float32)
            square += tl.sum(wide * wide, 1)
            # fn as two bf16, the second of what the first leaves: the rows are the columns of the product.
            weight = tl.load(
                fn + row[None, :] * 4 * D + k * D + column[:, None],
                mask=(row < ROWS)[None, :] & inside[:, None],
                other=0.0,
            )
            high = weight.to(tl.bfloat16)
            low = (weight - high.to(tl.float32)).to(tl.bfloat16)
            part_dots = tl.dot(rounded, low, part_dots)
            part_dots = tl.dot(rounded, high, part_dots)
        dots += part_dots
    found = tl.where((row == ROWS)[None, :], square[:, None], dots)
    tl.store(sums + (token[:, None] * PARTS + part) * SUMS + row[None, :], found, mask=real[:, None])


@triton.jit
def _read(
    new_copies,
    sums,
    base,
    scale,
    norm,
    out,
    new_post,
    new_comb,
    D,
    PARTS,
    HC_EPS,
    NORM_EPS,
    WIDTH: tl.constexpr,
    ALL_PARTS: tl.constexpr,
    SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    ITERATIONS: tl.constexpr,
):
    """Tensors of task.Data; sums as _spread writes them. Program (token): the mixing weights, u and its norm. WIDTH and
    ALL_PARTS: powers of two from D and PARTS on.
    """
    token = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, ALL_PARTS)
    one, sixteen = tl.arange(0, 4), tl.arange(0, 16)
    from_part = sums + (token * PARTS + part) * SUMS
    there = part < PARTS
    square = tl.sum(tl.load(from_part + ROWS, mask=there, other=0.0), 0)
    inverse = 1.0 / tl.sqrt(square / (4 * D) + NORM_EPS)
    z_pre = tl.sum(tl.load(from_part[:, None] + one[None, :], mask=there[:, None], other=0.0), 0) * inverse
    z_post = tl.sum(tl.load(from_part[:, None] + 4 + one[None, :], mask=there[:, None], other=0.0), 0) * inverse
    z_comb = tl.sum(tl.load(from_part[:, None] + 8 + sixteen[None, :], mask=there[:, None], other=0.0), 0) * inverse
    pre = 1.0 / (1.0 + tl.exp(-(z_pre * tl.load(scale) + tl.load(base + one)))) + HC_EPS
    post = 2.0 / (1.0 + tl.exp(-(z_post * tl.load(scale + 1) + tl.load(base + 4 + one))))
    tl.store(new_post + token * 4 + one, post)

    m = tl.reshape(z_comb * tl.load(scale + 2) + tl.load(base + 8 + sixteen), (4, 4))
    m = tl.exp(m - tl.max(m, 1)[:, None])
    m = m / tl.sum(m, 1)[:, None] + HC_EPS
    m = m / (tl.sum(m, 0)[None, :] + HC_EPS)
    for _ in range(ITERATIONS - 1):
        m = m / (tl.sum(m, 1)[:, None] + HC_EPS)
        m = m / (tl.sum(m, 0)[None, :] + HC_EPS)
    tl.store(new_comb + token * 16 + one[:, None] * 4 + one[None, :], m)

    column = tl.arange(0, WIDTH)
    inside = column < D
    x = tl.load(new_copies + (token * 4 + one[:, None]) * D + column[None, :], mask=inside[None, :], other=0.0).to(
        tl.float32
    )
    u = tl.sum(x * pre[:, None], 0)
    rms = 1.0 / tl.sqrt(tl.sum(u * u, 0) / D + NORM_EPS)
    weight = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * D + column, (u * rms * weight).to(tl.bfloat16), mask=inside)


def plan(tokens: int, hidden: int) -> Plan:
    """Return how a call is cut: as few parts as keep the device busy."""
    steps = 2
    while triton.cdiv(tokens, TOKENS) * triton.cdiv(hidden, 2 * steps * COLUMNS) >= BUSY and steps < 32:
        steps *= 2
    return Plan(steps, triton.cdiv(hidden, steps * COLUMNS), 16 if hidden > 4096 else 8)


def _constants(how: Plan, hidden: int, addends: int) -> tuple[dict[str, int], dict[str, int]]:
    """-> the constants of both kernels."""
    first = {"TOKENS": TOKENS, "COLUMNS": COLUMNS, "SUMS": SUMS, "ROWS": ROWS, "STEPS": how.steps, "ADDENDS": addends}
    widths = {"WIDTH": triton.next_power_of_2(hidden), "ALL_PARTS": triton.next_power_of_2(how.parts)}
    return first, {**widths, "SUMS": SUMS, "ROWS": ROWS, "ITERATIONS": ITERATIONS}


def custom_kernel(data: input_t) -> output_t:
    """Write the four outputs and return them. ValueError as unpack says."""
    tokens, hidden = unpack(data)
    how = plan(tokens, hidden)
    first, second = _constants(how, hidden, 2 if len(data.second) else 1)
    sums = torch.empty(tokens, how.parts, SUMS, dtype=torch.float32, device=data.y.device)
    _spread[triton.cdiv(tokens, TOKENS), how.parts](
        data.y,
        data.second,
        data.copies,
        data.post,
        data.comb,
        data.fn,
        data.new_copies,
        sums,
        tokens,
        hidden,
        how.parts,
        **first,
        num_warps=WARPS,
    )
    _read[tokens,](
        data.new_copies,
        sums,
        data.base,
        data.scale,
        data.norm,
        data.out,
        data.new_post,
        data.new_comb,
        hidden,
        how.parts,
        HC_EPS,
        NORM_EPS,
        **second,
        num_warps=how.warps,
    )
    return data.new_copies, data.out, data.new_post, data.new_comb


def compile_for(target: str) -> list[build.Artefact]:
    """Compile for `target`, without a GPU: both kernels for each shape of the benchmarks."""
    if target not in TARGETS:
        raise ValueError(f"target must be one of {TARGETS}, got {target!r}")
    bf16, fp32, i32 = "*bf16", "*fp32", "i32"
    made = {}
    for case in BENCHMARKS:
        how = plan(case.tokens, case.hidden)
        kinds = case.addends.split("+")
        first, second = _constants(how, case.hidden, len(kinds))
        addends = tuple(f"*{kind}" for kind in (kinds * 2)[:2])
        kernels = (
            (_spread, (*addends, bf16, fp32, fp32, fp32, bf16, fp32, i32, i32, i32), first, WARPS),
            (_read, (bf16, fp32, fp32, fp32, bf16, bf16, fp32, fp32, i32, i32, "fp32", "fp32"), second, how.warps),
        )
        for kernel, types, constants, warps in kernels:
            names = kernel.arg_names
            signature = dict(zip(names, types, strict=False)) | dict.fromkeys(constants, "constexpr")
            values = {(names.index(name),): value for name, value in constants.items()}
            # Every tensor is based at a multiple of 256 bytes, and d is a multiple of 64.
            aligned = (i for i, kind in enumerate(types) if kind.startswith("*") or names[i] == "D")
            source = ASTSource(kernel, signature, values, {(i,): [["tt.divisibility", 16]] for i in aligned})
            key = kernel.__name__, *types, *constants.values(), warps
            made[key] = made.get(key) or cubin(source, {"num_warps": warps}, "sm90_triton", target)
    return list(made.values())
