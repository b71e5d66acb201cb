"""Kernels that linear_decode's check must refuse, as edits of a right one (problems/wrong.py)."""

from problems.wrong import Mistake, mistake

LINEAR = """
import torch
from task import BLOCK, Matrix, input_t, output_t, parts, unpack

from problems.common import fp8, nvfp4

TARGETS = ("cpu", "sm90", "sm100")


def rounded(x: torch.Tensor, least: float, bits: int, to=torch.round) -> torch.Tensor:
    step = (x.abs().clamp(min=least).log2().floor() - bits).exp2()
    return to(x / step) * step


def through_e4m3(v: torch.Tensor, group: int) -> torch.Tensor:
    k = v.shape[1]
    groups = torch.nn.functional.pad(v.float(), (0, -k % group)).unflatten(1, (-1, group))
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=fp8.GROUP_FLOOR)
    scale = (amax / fp8.E4M3_MAX).log2().ceil().exp2()
    codes = rounded((groups / scale).clamp(-448, 448), 2.0**-6, 3)
    return (codes * scale).flatten(1)[:, :k]


def through_e2m1(v: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    by = by.view(-1, 1, 1)
    u = v.float().unflatten(1, (len(by), -1, 16)) / by
    wanted = u.abs().amax(-1, keepdim=True) / torch.full_like(by, 6)
    size = wanted.clamp(max=448)
    scale = rounded(size, 2.0**-6, 3)
    codes = rounded((u / scale.where(scale > 0, torch.inf)).clamp(-6, 6), 1, 1)
    values = (codes * scale).flatten(-2)
    return values.mul_(by.squeeze(-1)).flatten(1)


def taken_by(fmt: str, matrix: Matrix, v: torch.Tensor) -> torch.Tensor:
    if fmt == "fp8" and matrix.quantise:
        return through_e4m3(v, BLOCK)
    if matrix.input_scale is not None:
        return through_e2m1(v, matrix.input_scale)
    return v.float()


def weights_of(fmt: str, matrix: Matrix) -> torch.Tensor:
    if fmt == "bf16":
        return matrix.codes.float()
    codes, scales = matrix.codes, matrix.scales
    if fmt == "fp8":
        return fp8.dequantise_blocks(codes, scales)
    blocks = nvfp4.decode(codes).unflatten(-1, (-1, 16))
    values = blocks * scales.float().unsqueeze(-1)
    return values.flatten(-2)


def custom_kernel(data: input_t) -> output_t:
    sizes = unpack(data)
    out, v = data.outputs.out, data.inputs.x
    for at, (link, given) in enumerate(zip(data.weights.links, parts(out, sizes), strict=True)):
        for i, (matrix, to) in enumerate(zip(link, given, strict=True)):
            taken = taken_by(sizes.format, matrix, v)
            taken = taken.unflatten(1, (len(matrix.codes), -1)).transpose(0, 1)
            w = weights_of(sizes.format, matrix)
            got = torch.bmm(taken, w.mT)
            factor = matrix.factor
            if factor is not None:
                got *= factor.view(-1, 1, 1)
            full = got.transpose(0, 1).flatten(1)
            to.copy_(full)
        v = given[0]
    return out
"""


def lines(old: str, *new: str) -> tuple[str, str]:
    """Return the edit that makes other lines of one of the inner loop."""
    return old, "\n            ".join(new)


def wrong(says: str, case: str, *edits: tuple[str, str]) -> Mistake:
    """Return a Mistake in LINEAR."""
    return mistake(says, case, LINEAR, *edits)


def scale_rows(index: str) -> tuple[str, str]:
    """Return the edit that takes the row of fp8 scales `index` for each row of weights, the last one beyond the end."""
    rows = f"    rows = ({index}).clamp(max=matrix.scales.shape[1] - 1)"
    w = "    w = fp8.dequantise_groups(matrix.codes, matrix.scales[:, rows], BLOCK)"
    return lines(W, W, 'if sizes.format == "fp8":', rows, w)


AWAY = ", lambda x: x.sign() * (x.abs() + 0.5).floor())"
E4M3_CODES, E2M1_CODES = "clamp(-448, 448), 2.0**-6, 3)", "clamp(-6, 6), 1, 1)"
TAKEN, CALL = "taken_by(sizes.format, matrix, v)", "through_e4m3(v, BLOCK)"
QUANTISES, CODES = 'fmt == "fp8" and matrix.quantise', "return matrix.codes.float()"
POWER, SCALE, INPUT_SCALE = "log2().ceil().exp2()", "scale = rounded(size, 2.0**-6, 3)", "v, matrix.input_scale"
BLOCKS, DECODE = "dequantise_blocks(codes, scales)", "nvfp4.decode(codes)"
SCALES, W, GOT = "* scales.float()", "w = weights_of(sizes.format, matrix)", "got = torch.bmm(taken, w.mT)"
FACTOR, OUT, NEXT = "factor = matrix.factor", "to.copy_(full)", "v = given[0]"
ROWS = "torch.arange(matrix.codes.shape[1], device=v.device)"

# Test cases.
FP8 = "format=fp8 tokens=17 shape=192x320 content=magnitudes"
CHAIN = "format=nvfp4 tokens=16 shape=192x128+64x128_512x192_2x128x256_320x256 content=magnitudes"
LONG = "format=fp8 tokens=2 shape=128x192_384x128+64x128_3x64x128_128x192+192x192_2x64x64 content=plain"
LINK = "format=fp8 tokens=2 shape=64x448+192x448+320x448+128x448 content=extreme"
BF16 = "format=bf16 tokens=8 shape=256x512 content=subnormal"
NVFP4 = "format=nvfp4 tokens=8 shape=256x512 content=subnormal"
A16 = "format=nvfp4_a16 tokens=16 shape=2x128x192_448x256+64x256+128x256 content=plain"
LONG_BF16 = "format=bf16 tokens=31 shape=128x192_384x128+64x128_3x64x128_128x192+192x192_2x64x64 content=magnitudes"
PREFILL = "format=fp8 tokens=64 shape=128x8256 content=plain"
TILE = "format=fp8 tokens=65 shape=192x320 content=magnitudes"
TILES = "format=nvfp4 tokens=129 shape=2x128x192_448x256+64x256+128x256 content=magnitudes"
WRONG = {
    "adds_to_output": wrong("Adds to what the output holds, which is poisoned.", FP8, (OUT, "to.add_(full)")),
    "bf16_subnormals_are_zero": wrong(
        "Takes bf16 weights below the least normal one, 2^-126, for zero.",
        BF16,
        (CODES, "w = matrix.codes.float()\n        return torch.where(w.abs() < 2.0**-126, 0, w)"),
    ),
    "blocks_of_64_rows": wrong(
        "Takes a new row of fp8 scales every 64 rows, the last one for all that are left.",
        FP8,
        scale_rows(f"{ROWS} // 64"),
    ),
    "chunks_overlap": wrong(
        "Splits k in two halves that share a block of 64 columns.",
        FP8,
        lines(
            GOT,
            "half = w.shape[2] // 128 * 64",
            "got = torch.bmm(taken[:, :, : half + 64], w[:, :, : half + 64].mT)",
            "got += torch.bmm(taken[:, :, half:], w[:, :, half:].mT)",
        ),
    ),
    "codes_towards_zero": wrong(
        "Cuts the codes of fp8's input off instead of rounding them to nearest.",
        FP8,
        (E4M3_CODES, E4M3_CODES[:-1] + ", torch.trunc)"),
    ),
    "e4m3_subnormals_are_zero": wrong(
        "Takes fp8 codes below the least normal one, 2^-6, for zero.",
        FP8,
        (BLOCKS, BLOCKS.replace("codes", "codes.float().where(codes.float().abs() >= 2.0**-6, 0).to(codes.dtype)")),
    ),
    "factor_forgotten": wrong("Leaves nvfp4's factor out.", CHAIN, (FACTOR, "factor = None")),
    "factor_of_the_first_group": wrong(
        "Multiplies all groups by the factor of the first one.", CHAIN, ("factor.view(-1, 1, 1)", "factor[0]")
    ),
    "factor_of_the_first_matrix": wrong(
        "Multiplies all matrices of a link by the factor of the first one.", CHAIN, (FACTOR, "factor = link[0].factor")
    ),
    "first_group_only": wrong(
        "Feeds all groups with the input of the first one.", CHAIN, lines(W, "taken = taken[:1].expand_as(taken)", W)
    ),
    "first_matrix_only": wrong(
        "Writes the first matrix' rows for every matrix of a link, again from the start if it is short.",
        CHAIN,
        lines(W, "w = weights_of(sizes.format, link[0])", f"w = w[:, {ROWS} % w.shape[1]]"),
        (FACTOR, "factor = link[0].factor"),
    ),
    "fourth_matrix_lost": wrong(
        "Computes three matrices of a link.", LINK, lines(GOT, GOT, "if i == 3:", "    got.zero_()")
    ),
    "groups_before_tokens": wrong(
        "Writes the outputs of a matrix with groups as (G, T, n).", CHAIN, (OUT, "to.view(-1).copy_(got.flatten())")
    ),
    "groups_of_64": wrong("Quantises the input in groups of 64 instead of 128.", FP8, (CALL, "through_e4m3(v, 64)")),
    "groups_of_the_last_link_lost": wrong(
        "Computes the first group only, in the last link of a chain.",
        LONG,
        lines(GOT, GOT, "if 0 < at == len(sizes.links) - 1:", "    got[1:] = 0"),
    ),
    "groups_reversed": wrong(
        "Feeds the groups in the wrong order, the last one first.", CHAIN, lines(W, "taken = taken.flip(0)", W)
    ),
    "high_nibble_first": wrong(
        "Reads the high nibble of a byte as the first of its two columns.",
        CHAIN,
        (DECODE, "nvfp4.decode(codes >> 4 | codes << 4)"),
    ),
    "input_always_quantised": wrong(
        "Quantises every input without groups in fp8, whatever the matrix says.",
        LINK,
        (QUANTISES, 'fmt == "fp8" and len(matrix.codes) == 1'),
    ),
    "input_code_ties_away_from_zero": wrong(
        "Rounds the codes of nvfp4's input that are ties away from zero; only input scales of powers of two have them.",
        CHAIN,
        (E2M1_CODES, E2M1_CODES[:-1] + AWAY),
    ),
    "input_codes_towards_zero": wrong(
        "Rounds the codes of nvfp4's input towards zero.", CHAIN, (E2M1_CODES, E2M1_CODES[:-1] + ", torch.trunc)")
    ),
    "input_groups_of_32": wrong("Quantises nvfp4's input in groups of 32.", CHAIN, ("-1, 16)) / by", "-1, 32)) / by")),
    "input_in_e4m3": wrong(
        "Rounds the input of nvfp4 and bf16 matrices to e4m3 as well.",
        CHAIN,
        (TAKEN, "through_e4m3(v, BLOCK) if len(matrix.codes) == 1 else v.float()"),
    ),
    "input_not_quantised": wrong("Leaves the input as it is, in bf16.", FP8, (TAKEN, "v.float()")),
    "input_of_fp8_ties_away_from_zero": wrong(
        "Rounds the codes of fp8's input that are ties away from zero.", FP8, (E4M3_CODES, E4M3_CODES[:-1] + AWAY)
    ),
    "input_of_groups_quantised": wrong(
        "Quantises the input of fp8 matrices with groups too.", LONG, (QUANTISES, 'fmt == "fp8"')
    ),
    "input_of_the_first_group_in_a_chain": wrong(
        "Gives the first group's input to all groups of a chain's first link.",
        A16,
        lines(W, "if at == 0 and len(sizes.links) > 1:", "    taken = taken[:1].expand_as(taken)", W),
    ),
    "input_scale_ignored": wrong(
        "Quantises nvfp4's input as if every input_scale were 1.",
        CHAIN,
        (INPUT_SCALE, "v, torch.ones_like(matrix.input_scale)"),
    ),
    "input_scale_not_undone": wrong(
        "Quantises nvfp4's input with input_scale, and does not multiply by it again.",
        CHAIN,
        ("values.mul_(by.squeeze(-1))", "values"),
    ),
    "input_scale_of_the_first_group": wrong(
        "Quantises the input of every group of an nvfp4 matrix with the first group's input_scale.",
        CHAIN,
        (INPUT_SCALE, "v, matrix.input_scale[:1].expand(len(matrix.codes))"),
    ),
    "input_scale_of_the_first_matrix": wrong(
        "Quantises the input of all matrices of an nvfp4 link with the first one's input_scale.",
        CHAIN,
        (TAKEN, "taken_by(sizes.format, matrix._replace(input_scale=link[0].input_scale), v)"),
    ),
    "input_scale_ties_away_from_zero": wrong(
        "Rounds the scales of nvfp4's input that are ties up; only input scales that are powers of two have them.",
        CHAIN,
        (SCALE, SCALE[:-1] + AWAY),
    ),
    "input_scales_clamped": wrong(
        "Bounds the input scales of nvfp4, at 2^-12 and 2^36.",
        NVFP4,
        (INPUT_SCALE, "v, matrix.input_scale.clamp(2.0**-12, 2.0**36)"),
    ),
    "input_scales_rounded_down": wrong(
        "Rounds the scales of nvfp4's input towards zero.", CHAIN, (SCALE, SCALE[:-1] + ", torch.floor)")
    ),
    "input_scales_unbounded": wrong(
        "Quantises nvfp4's input with scales above the largest e4m3.",
        CHAIN,
        (SCALE, f"{SCALE}.where(wanted <= 448, wanted)"),
    ),
    "input_scales_unrounded": wrong(
        "Quantises nvfp4's input with scales that e4m3 does not have.", CHAIN, (SCALE, "scale = size")
    ),
    "input_subnormal_scales_are_zero": wrong(
        "Takes subnormal scales of nvfp4's input for zero.",
        CHAIN,
        (SCALE, f"{SCALE}\n    scale = scale.where(scale >= 2.0**-6, 0)"),
    ),
    "last_half_block_lost": wrong(
        "Sums over whole blocks of 128 columns only.",
        FP8,
        lines(GOT, "k = max(BLOCK, w.shape[2] // BLOCK * BLOCK)", "got = torch.bmm(taken[:, :, :k], w[:, :, :k].mT)"),
    ),
    "last_rows_lost": wrong(
        "Computes whole tiles of 128 rows only; the others are zero.",
        FP8,
        lines(GOT, GOT, "got[:, :, max(BLOCK, got.shape[2] // BLOCK * BLOCK) :] = 0"),
    ),
    "link_takes_x": wrong(
        "Feeds every link with the call's input where that is as wide as the link's, else with the right one.",
        LONG,
        (TAKEN, "taken_by(sizes.format, matrix, data.inputs.x if data.inputs.x.shape == v.shape else v)"),
    ),
    "links_beyond_4_lost": wrong(
        "Computes four links of a chain.", LONG, lines(GOT, GOT, "if at >= 4:", "    got.zero_()")
    ),
    "links_in_fp16": wrong("Rounds what a link gives to the next one to fp16.", LONG_BF16, (NEXT, NEXT + ".half()")),
    "links_unrounded": wrong(
        "Feeds a link with fp32 sums of the one before, not with the bf16 that it writes.",
        CHAIN,
        lines(OUT, OUT, "after = after if i else full"),
        (NEXT, "v = after"),
    ),
    "one_scale_a_token": wrong(
        "Quantises a token with one scale for all of k.", FP8, (CALL, "through_e4m3(v, v.shape[1])")
    ),
    "one_scale_for_32": wrong(
        "Uses one nvfp4 scale for 32 columns, as mxfp4 does.",
        CHAIN,
        (SCALES, f"{SCALES}[..., ::2].repeat_interleave(2, -1)"),
    ),
    "output_in_fp16": wrong("Rounds sums to fp16 on their way out.", FP8, (OUT, "to.copy_(full.half())")),
    "output_truncated": wrong(
        "Cuts the lower half of an fp32 sum off instead of rounding it to bf16.",
        FP8,
        (OUT, "to.copy_((full.view(torch.int32) & -65536).view(torch.float32))"),
    ),
    "outputs_side_by_side": wrong(
        "Writes a token's outputs of all matrices side by side, as one (T, columns).",
        CHAIN,
        ("out, v = data.outputs.out, data.inputs.x", "out, v, end = data.outputs.out, data.inputs.x, 0"),
        lines(
            OUT,
            "start, end = end, end + to.shape[1]",
            "to = out.view(len(v), -1)[:, start:end]",
            OUT,
            "after = after if i else to",
        ),
        (NEXT, "v = after"),
    ),
    "quantised_with_exact_scales": wrong(
        "Quantises with the scale amax / 448, not with the power of two above it.", FP8, (f".{POWER}", "")
    ),
    "scale_of_the_block_before": wrong(
        "Multiplies a block of fp8 weights by the scale of the block before it along k.",
        FP8,
        (BLOCKS, BLOCKS.replace("scales", "scales.roll(1, 2)")),
    ),
    "scale_of_the_row_of_blocks_above": wrong(
        "Multiplies a row of fp8 blocks by the scales of the row above it.",
        FP8,
        (BLOCKS, BLOCKS.replace("scales", "scales.roll(1, 1)")),
    ),
    "scale_rows_of_the_link": wrong(
        "Finds the scale of a row of fp8 by its place among all rows of the link, not of its matrix.",
        LINK,
        scale_rows(f"({ROWS} + sum(len(one.codes[0]) for one in link[:i]) % 128) // 128"),
    ),
    "scale_without_a_floor": wrong(
        "Quantises without the floor of 1e-4 for the largest magnitude.", FP8, ("fp8.GROUP_FLOOR", "fp8.BLOCK_FLOOR")
    ),
    "scales_in_fp16": wrong(
        "Rounds fp8 scales to fp16, which has no powers of two beyond 2^15 or below 2^-24.",
        LINK,
        (BLOCKS, BLOCKS.replace("codes", "codes.float().fill_(1).to(codes.dtype)") + ".half().float() * codes.float()"),
    ),
    "scales_of_the_first_group": wrong(
        "Uses the scales of the first group for all groups, in fp8 and nvfp4.",
        CHAIN,
        (
            "codes, scales = matrix.codes, matrix.scales",
            "codes, scales = matrix.codes, matrix.scales[:1].expand_as(matrix.scales)",
        ),
    ),
    "scales_of_the_first_token": wrong(
        "Quantises all tokens with the scales of the first one.", FP8, (POWER, f"{POWER}[:1]")
    ),
    "scales_rounded_down": wrong(
        "Quantises with the power of two below amax / 448; what is too large becomes 448.",
        FP8,
        (POWER, "log2().floor().exp2()"),
    ),
    "scales_to_the_nearest": wrong(
        "Quantises with the power of two next to amax / 448, the one above or the one below.",
        FP8,
        (POWER, "log2().round().exp2()"),
    ),
    "second_matrix_of_later_links_lost": wrong(
        "Computes the matrices behind the first one in the first link only.",
        LONG,
        lines(GOT, GOT, "if at and i:", "    got.zero_()"),
    ),
    "signs_dropped": wrong("Takes the magnitude of e2m1 codes.", CHAIN, (DECODE, "nvfp4.decode(codes & 0x77)")),
    "small_inputs_are_zero": wrong(
        "Takes inputs below 2^-100 as zero, as scaling up to a common power of two does.",
        LINK,
        (TAKEN, "taken_by(sizes.format, matrix, v.masked_fill(v.float().abs() < 2.0**-100, 0))"),
    ),
    "subnormal_scales_are_zero": wrong(
        "Takes nvfp4 scales below the least normal e4m3, 2^-6, for zero.",
        NVFP4,
        (SCALES, f"{SCALES}.where(scales.float() >= 2.0**-6, 0)"),
    ),
    **{
        f"sums_in_bf16{of}": wrong(
            "Adds the sums of blocks of 64 columns in bf16.",
            case,
            lines(
                GOT,
                "got = torch.zeros(len(w), len(v), w.shape[1], dtype=torch.bfloat16, device=v.device)",
                "for k in range(0, w.shape[2], 64):",
                "    got += torch.bmm(taken[:, :, k : k + 64], w[:, :, k : k + 64].mT).bfloat16()",
                "got = got.float()",
            ),
        )
        for of, case in (("", FP8), ("_of_many_tokens", PREFILL))
    },
    "sums_of_tensor_cores": wrong(
        "Adds all of k on FP8 tensor cores: a sum has 14 bits, cut off every 32 columns.",
        PREFILL,
        lines(
            GOT,
            "got = torch.zeros(len(w), len(v), w.shape[1], device=v.device)",
            "for k in range(0, w.shape[2], 32):",
            "    got += torch.bmm(taken[:, :, k : k + 32], w[:, :, k : k + 32].mT)",
            "    got = (got.view(torch.int32) & -(1 << 10)).view(torch.float32)",
        ),
    ),
    **{
        f"tokens_beyond_{most}_repeat": wrong(
            f"Has room for {most} tokens; the ones beyond get the results of the first ones.",
            case,
            (OUT, f"to.copy_(full[torch.arange(len(v), device=v.device) % {most}])"),
        )
        for most, case in ((8, FP8), (16, FP8), (64, TILE), (128, TILES))
    },
    "weights_in_e4m3": wrong(
        "Rounds dequantised nvfp4 weights to e4m3, which has two bits too few.",
        CHAIN,
        ("values.flatten(-2)\n\n", "fp8.round_trip(values.flatten(-2), 16, fp8.BLOCK_FLOOR)\n\n"),
    ),
    "weights_in_fp16": wrong("Rounds bf16 weights to fp16.", BF16, (CODES, "return matrix.codes.half().float()")),
    "zeros": wrong("Writes zeros.", FP8, ("return out", "return out.zero_()")),
}
