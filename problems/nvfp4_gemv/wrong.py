"""Kernels that nvfp4_gemv's check must refuse, as edits of right ones (problems/wrong.py)."""

from problems.wrong import mistake

FILL = """
from task import input_t, output_t, unpack

TARGETS = ("cpu", "sm90", "sm100")


def custom_kernel(data: input_t) -> output_t:
    unpack(data)
    return data.c.copy_(WHAT)
"""
PRODUCT = """
import torch
from task import input_t, output_t, unpack

from problems.common import nvfp4

TARGETS = ("cpu", "sm90", "sm100")
ROWS = 256  # rows dequantised at a time


def custom_kernel(data: input_t) -> output_t:
    m, k, l = unpack(data)
    for i in range(l):
        b, sfb = data.b[0, :, i], data.sfb[0, :, i]
        x = nvfp4.dequantise(b, sfb)
        for row in range(0, m, ROWS):
            rows = slice(row, row + ROWS)
            codes, scales = data.a[rows, :, i], data.sfa[rows, :, i]
            a = nvfp4.dequantise(codes, scales)
            data.c[rows, 0, i] = a @ x
    return data.c
"""
A, C, SCALES = "a = nvfp4.dequantise(codes, scales)", "data.c[rows, 0, i] = a @ x", "data.sfa[rows, :, i]"
E2M1 = "torch.tensor(nvfp4.E2M1, device=data.a.device)[nvfp4.unpack({}).int()]"
SPREAD = ".repeat_interleave(nvfp4.BLOCK, dim=1)"
FLUSH = "torch.where({0}.view(torch.uint8) < 8, 0, {0}.view(torch.uint8)).view(torch.float8_e4m3fn)"
NEW = "\n            "  # a line of the innermost loop

# Cases of one block, of several batches, of several tiles.
_1, _33, _ALL = "m=16 k=64 l=1", "m=33 k=64 l=3", "m=129 k=320 l=3"
WRONG = {
    "adds_to_output": mistake("Adds to what c holds, NaN from the judge.", _1, PRODUCT, (C, C.replace("=", "+="))),
    "b_row_from_padding": mistake(
        "Reads row 1 of b, which is padding.",
        _1,
        PRODUCT,
        ("data.b[0, :, i], data.sfb[0, ", "data.b[1, :, i], data.sfb[1, "),
    ),
    "b_without_padded_stride": mistake(
        "Steps from batch to batch of b by one row, not 128.",
        _33,
        PRODUCT,
        ("data.b[0, :, i], data.sfb[0, :, i]", "data.b[i, :, 0], data.sfb[i, :, 0]"),
    ),
    "batch_zero_only": mistake(
        "Every batch gets matrix and vector of batch 0.",
        _33,
        PRODUCT,
        ("data.b[0, :, i], data.sfb[0, :, i]", "data.b[0, :, 0], data.sfb[0, :, 0]"),
        ("data.a[rows, :, i], data.sfa[rows, :, i]", "data.a[rows, :, 0], data.sfa[rows, :, 0]"),
    ),
    "clamps_large_scales": mistake(
        "Clamps scales at 240, the largest of e4m3fnuz.",
        _1,
        PRODUCT,
        (SCALES, f"{SCALES}.float().clamp(max=240).to(torch.float8_e4m3fn)"),
    ),
    "constant": mistake("Writes one constant everywhere.", _1, FILL, ("c.copy_(WHAT)", "c.fill_(620.0)")),
    "copy_of_input": mistake("Writes the first scale of each row.", _1, FILL, ("WHAT", "data.sfa[:, :1]")),
    "drops_k_tail": mistake(
        "Drops what is behind whole tiles of 256 columns.",
        _1,
        PRODUCT,
        (C, "whole = k // 256 * 256" + NEW + "data.c[rows, 0, i] = a[:, :whole] @ x[:whole]"),
    ),
    "first_k_tile_only": mistake(
        "Reads the first tile of 512 columns only.", "m=2 k=1088 l=1", PRODUCT, ("a @ x", "a[:, :512] @ x[:512]")
    ),
    "flushes_code_subnormal": mistake(
        "Reads codes 1 and 9, which are +-0.5, as zero.",
        _1,
        PRODUCT,
        (
            A,
            "codes = nvfp4.unpack(codes)"
            + NEW
            + "codes[(codes & 7) == 1] = 0"
            + NEW
            + A.replace("codes", "nvfp4.pack(codes)"),
        ),
    ),
    "flushes_scale_subnormals_a": mistake(
        "Decodes the e4m3 subnormals of sfa as zero.", _ALL, PRODUCT, (SCALES, FLUSH.format(SCALES))
    ),
    "flushes_scale_subnormals_b": mistake(
        "Decodes the e4m3 subnormals of sfb as zero.",
        _ALL,
        PRODUCT,
        ("data.sfb[0, :, i]", FLUSH.format("data.sfb[0, :, i]")),
    ),
    "fp16_accumulate": mistake(
        "Adds the block sums in fp16, each of them rounded to fp16 first.",
        _1,
        PRODUCT,
        (
            C,
            "total, blocks = 0, (a * x).view(len(a), k // 16, 16).sum(-1).half()"
            + NEW
            + "for j in range(k // 16):"
            + NEW
            + "    total = total + blocks[:, j]"
            + NEW
            + "data.c[rows, 0, i] = total",
        ),
    ),
    "high_nibble_first": mistake(
        "Takes the high nibble of each byte of A as the even element.",
        _1,
        PRODUCT,
        (A, "raw = codes.view(torch.uint8)" + NEW + A.replace("codes", "raw >> 4 | raw << 4")),
    ),
    "ignores_sfb": mistake(
        "Leaves the scales of b out.", _1, PRODUCT, ("x = nvfp4.dequantise(b, sfb)", "x = " + E2M1.format("b"))
    ),
    "ignores_sign": mistake(
        "Masks each code of A with 7.", _1, PRODUCT, (A, A.replace("codes", "codes.view(torch.uint8) & 0x77"))
    ),
    "implicit_one_in_scale_zero": mistake(
        "Gives a scale with exponent 0 an implicit leading one: byte 0 is 2^-7, not 0.",
        _ALL,
        PRODUCT,
        (
            A,
            "raw = scales.view(torch.uint8).float()"
            + NEW
            + "scales = (1 + raw % 8 / 8) * torch.exp2((raw / 8).floor() - 7)"
            + NEW
            + f"a = {E2M1.format('codes')} * scales{SPREAD}",
        ),
    ),
    "linear_codes": mistake(
        "Takes e2m1 for fixed point: 0, 0.5, ... 3.5 with a sign.",
        _1,
        PRODUCT,
        (
            A,
            "codes = nvfp4.unpack(codes)"
            + NEW
            + "a = (codes & 7).float() / 2 * (1 - 2 * (codes >> 3).float())"
            + f" * scales.float(){SPREAD}",
        ),
    ),
    "one_scale_per_32": mistake(
        "Uses one scale for 32 elements, as MXFP4 has, and drops every second one.",
        _1,
        PRODUCT,
        (SCALES, f"{SCALES}[:, ::2].view(torch.uint8).repeat_interleave(2, dim=1).view(torch.float8_e4m3fn)"),
    ),
    "output_through_bf16": mistake("Rounds the sum to bf16 before fp16.", _1, PRODUCT, ("a @ x", "(a @ x).bfloat16()")),
    "permuted_rows_interleaved": mistake(
        "Takes row r of a permuted block at [r // 4, r % 4] in place of [r % 32, r // 32].",
        _33,
        PRODUCT,
        (
            SCALES,
            "data.sfa_permuted[..., i].permute(2, 0, 1, 4, 3).reshape(-1, k // 16)[rows][: m - row]",
        ),
    ),
    "permuted_scales_as_plain": mistake(
        "Reads the permuted copy of sfa as if it were row after row.",
        _33,
        PRODUCT,
        (
            SCALES,
            "data.sfa_permuted.permute(5, 2, 4, 0, 1, 3)[i].flatten()[: m * k // 16].view(m, k // 16)[rows]",
        ),
    ),
    "scale_off_by_one_block": mistake(
        "Uses the scale of the block before.",
        _1,
        PRODUCT,
        (SCALES, f"{SCALES}.view(torch.uint8).roll(1, dims=1).view(torch.float8_e4m3fn)"),
    ),
    "scales_as_e5m2": mistake(
        "Decodes the scale bytes as e5m2.",
        _1,
        PRODUCT,
        (A, f"a = {E2M1.format('codes')} * scales.view(torch.float8_e5m2).float(){SPREAD}"),
    ),
    "scales_of_first_row_tile": mistake(
        "Indexes the scales of A with the row inside its tile of 128.",
        _ALL,
        PRODUCT,
        (SCALES, "data.sfa[:, :, i].view(torch.uint8)[torch.arange(m)[rows] % 128].view(torch.float8_e4m3fn)"),
    ),
    "skips_last_rows": mistake(
        "Rounds the grid down to whole tiles of 64 rows.",
        _1,
        PRODUCT,
        ("range(0, m, ROWS)", "range(0, m // 64 * 64, ROWS)"),
        ("row + ROWS", "row + 64"),
    ),
    "split_k_overlaps": mistake(
        "Cuts k into 4 parts rounded up to 64 columns: the overlap counts twice.",
        _1,
        PRODUCT,
        (
            C,
            "parts = [slice(p * k // 4, p * k // 4 + -(-k // 256) * 64) for p in range(4)]"
            + NEW
            + "data.c[rows, 0, i] = sum(a[:, part] @ x[part] for part in parts)",
        ),
    ),
    "truncates_output": mistake(
        "Rounds the fp32 sum to fp16 towards zero.",
        _ALL,
        PRODUCT,
        (
            C,
            "c, half = a @ x, (a @ x).half()"
            + NEW
            + "away = half.float().abs() > c.abs()"
            + NEW
            + "data.c[rows, 0, i] = torch.where(away, half.nextafter(torch.zeros_like(half)), half)",
        ),
    ),
    "vector_in_fp8": mistake(
        "Rounds the dequantised vector to e4m3.", _1, PRODUCT, ("(b, sfb)", "(b, sfb).to(torch.float8_e4m3fn).float()")
    ),
    "write_back_to_swapped_row": mistake(
        "Swaps rows r and r + 8 of each tile of 16 rows.",
        _33,
        PRODUCT,
        (
            C,
            "c, whole = a @ x, len(a) // 16 * 16"
            + NEW
            + "c[:whole] = c[:whole].view(-1, 2, 8).flip(1).flatten()"
            + NEW
            + "data.c[rows, 0, i] = c",
        ),
    ),
    "zeros": mistake("Writes zeros.", _1, FILL, ("c.copy_(WHAT)", "c.zero_()")),
}
