"""Kernels that moe_gemm's check must refuse, as edits of right ones (problems/wrong.py)."""

from problems.wrong import mistake

ZERO = """
from task import input_t, output_t, unpack

TARGETS = ("cpu", "sm90", "sm100")


def custom_kernel(data: input_t) -> output_t:
    unpack(data)
    return data.outputs.out.zero_()
"""
HEAD = """
import torch
from task import LIMIT, input_t, output_t, unpack

from problems.common import nvfp4

TARGETS = ("cpu", "sm90", "sm100")
"""
# nvfp4.round_trip with its steps on separate lines, for some mistakes.
OWN = """

def round_trip(x: torch.Tensor, in_scale: torch.Tensor) -> torch.Tensor:
    blocks = (x / in_scale.unsqueeze(1)).unflatten(1, (-1, nvfp4.BLOCK))
    wanted = blocks.abs().amax(2, keepdim=True) / nvfp4.E2M1_MAX
    scales = wanted.clamp(max=nvfp4.E4M3_MAX).to(torch.float8_e4m3fn).float()
    sizes = blocks / scales.masked_fill(scales == 0, torch.inf)
    codes = nvfp4.nearest_e2m1(sizes)
    return (codes * scales).flatten(1) * in_scale.unsqueeze(1)
"""
EXPERTS = """

def custom_kernel(data: input_t) -> output_t:
    sizes = unpack(data)
    w, (x, ids, routing), (out,) = data
    quantised = sizes.activation == "nvfp4"
    total = torch.zeros(x.shape, device=x.device)
    for e in ids[ids >= 0].unique().tolist():
        rows, slots = (ids == e).nonzero(as_tuple=True)
        y = x[rows].float()
        if quantised:
            y = nvfp4.round_trip(y, w.in_scale13[e].expand(len(y)))
        w13 = nvfp4.dequantise(w.w13[e], w.s13[e])
        gate, up = (y @ w13.T * w.g13[e]).chunk(2, 1)
        v = torch.nn.functional.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT)
        v = v * routing[rows, slots].unsqueeze(1)
        v = v.bfloat16().float()
        if quantised:
            v = nvfp4.round_trip(v, w.in_scale2[e].expand(len(v)))
        w2 = nvfp4.dequantise(w.w2[e], w.s2[e])
        part = v @ w2.T * w.g2[e]
        total.index_add_(0, rows, part)
    return out.copy_(total)
"""
RIGHT, BY_STEPS = HEAD + EXPERTS, HEAD + OWN + EXPERTS
# Of cases in MXFP4 and FP8; right in the others.
OF_FP8 = """
from problems.common import fp8


def matrix(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    if scales.dtype == torch.float8_e4m3fn:
        return nvfp4.dequantise(packed, scales)
    value = nvfp4.decode(packed).unflatten(-1, (-1, 32)) * fp8.decode_ue8m0(scales).unsqueeze(-1)
    return value.flatten(-2)


def quantised_as_fp8(x: torch.Tensor) -> torch.Tensor:
    codes, scales = fp8.quantise_groups(x, 128)
    return fp8.dequantise_groups(codes, scales, 128)
"""
IF_FP8 = 'quantised_as_fp8({0}.float()) if sizes.activation == "fp8" else {0}.float()'
TAKEN, V_TAKEN = f"y = {IF_FP8.format('x[rows]')}", f"v = {IF_FP8.format('v.bfloat16()')}"
FP8 = HEAD + OF_FP8 + EXPERTS.replace("nvfp4.dequantise", "matrix").replace("y = x[rows].float()", TAKEN)
FP8 = FP8.replace("v = v.bfloat16().float()", V_TAKEN)
NEW = "\n        "  # a line of the loop over the experts
LOOP, X = "ids[ids >= 0].unique().tolist()", "y = x[rows].float()"
ROWS = "rows, slots = (ids == e).nonzero(as_tuple=True)"
SPLIT, BOTH = "gate, up = (y @ w13.T * w.g13[e]).chunk(2, 1)", "y @ w13.T * w.g13[e]"
SILU = "torch.nn.functional.silu(gate.clamp(max=LIMIT))"
WEIGHTED, ROUND = "v = v * routing[rows, slots].unsqueeze(1)", "v = v.bfloat16().float()"
W13, W2 = "w13 = nvfp4.dequantise(w.w13[e], w.s13[e])", "w2 = nvfp4.dequantise(w.w2[e], w.s2[e])"
ADD = "total.index_add_(0, rows, part)"
OWN_X, OWN_V = ("y = nvfp4.round_trip", "y = round_trip"), ("v = nvfp4.round_trip", "v = round_trip")
BYTES, E4M3 = "view(torch.uint8)", "view(torch.float8_e4m3fn)"

# Cases of both experts for all tokens, of values beyond fp16, and of slots without an expert.
_2 = "tokens=129 experts=2 topk=2 hidden=128 inner=320 activation=nvfp4 router=uniform content=subnormal"
_BIG = "tokens=7 experts=8 topk=6 hidden=64 inner=320 activation=bf16 router=uniform content=extreme"
_PART = "tokens=129 experts=8 topk=6 hidden=192 inner=64 activation=bf16 router=part content=clamped"
_FP8 = "tokens=64 experts=8 topk=2 hidden=320 inner=704 activation=fp8 router=zipf content=plain"
_SPREAD = "tokens=129 experts=2 topk=2 hidden=1088 inner=320 activation=fp8 router=one content=magnitudes"
WRONG = {
    "activations_not_quantised": mistake(
        "Leaves activations in bf16 where the task says nvfp4.", _2, RIGHT, ('sizes.activation == "nvfp4"', "False")
    ),
    "adds_to_output": mistake(
        "Adds to what stands in the output, which is not zero before the call.", _2, RIGHT, ("copy_", "add_")
    ),
    "codes_towards_zero": mistake(
        "Rounds the codes of x towards zero, not to nearest.",
        _2,
        BY_STEPS,
        OWN_X,
        (
            "nvfp4.nearest_e2m1(sizes)",
            "torch.tensor(nvfp4.E2M1[:8], device=x.device)\n"
            "    codes = codes[torch.bucketize(sizes.abs(), codes[1:], right=True)].copysign(blocks)",
        ),
    ),
    "experts_of_the_first_token": mistake(
        "Sends all tokens to the experts of the first.",
        _2,
        RIGHT,
        (f"for e in {LOOP}", f"ids = ids[:1].expand_as(ids)\n    for e in {LOOP}"),
    ),
    "first_token_of_an_expert_only": mistake(
        "Gives each expert its first token alone.", _2, RIGHT, (ROWS, f"{ROWS}{NEW}rows, slots = rows[:1], slots[:1]")
    ),
    "gate_and_up_interleaved": mistake(
        "Takes the even rows of w13 for gate and the odd ones for up.",
        _2,
        RIGHT,
        (SPLIT, f"both = {BOTH}{NEW}gate, up = both[:, 0::2], both[:, 1::2]"),
    ),
    "gate_and_up_swapped": mistake(
        "Takes the first half of w13 for up and the second for gate.", _2, RIGHT, ("gate, up =", "up, gate =")
    ),
    "gate_clamped_below": mistake(
        "Clamps gate at -LIMIT, from below, which changes nothing, and not from above.",
        _2,
        RIGHT,
        ("max=LIMIT", "min=-LIMIT"),
    ),
    "global_scale_forgotten": mistake("Leaves g13 out.", _2, RIGHT, (" * w.g13[e]", "")),
    "global_scale_of_the_first_expert": mistake(
        "Gives all experts the g2 of the first.", _PART, RIGHT, ("g2[e]", "g2[0]")
    ),
    "global_scale_of_w13_for_both": mistake("Uses g13 in the second product too.", _2, RIGHT, ("w.g2[e]", "w.g13[e]")),
    "high_nibble_first": mistake(
        "Takes the high nibble of each byte of w2 as the even element.",
        _2,
        RIGHT,
        ("(w.w2[e]", "(w.w2[e] >> 4 | w.w2[e] << 4"),
    ),
    "high_nibble_first_in_w13": mistake(
        "Takes the high nibble of each byte of w13 as the even element.",
        _2,
        RIGHT,
        ("(w.w13[e]", "(w.w13[e] >> 4 | w.w13[e] << 4"),
    ),
    "implicit_one_in_subnormals": mistake(
        "Gives scales of w2 with an exponent field of 0 an implicit leading one.",
        _2,
        RIGHT,
        (
            W2,
            f"raw = w.s2[e].{BYTES}.float(){NEW}scales = (1 + raw % 8 / 8) * torch.exp2((raw / 8).floor() - 7)"
            f"{NEW}w2 = nvfp4.decode(w.w2[e]) * scales.repeat_interleave(nvfp4.BLOCK, 1)",
        ),
    ),
    "input_scale_forgotten": mistake(
        "Quantises x as if in_scale13 were 1: scales underflow, or saturate.",
        _2,
        RIGHT,
        ("w.in_scale13[e]", "torch.ones_like(w.in_scale13[e])"),
    ),
    "input_scale_of_the_first_expert": mistake(
        "Quantises v for all experts with the in_scale2 of the first.", _2, RIGHT, ("in_scale2[e]", "in_scale2[0]")
    ),
    "input_scale_of_w13_for_both": mistake(
        "Quantises v with in_scale13.", _2, RIGHT, ("in_scale2[e]", "in_scale13[e]")
    ),
    "intermediate_in_e4m3": mistake(
        "Rounds v to e4m3 in place of bf16.", _2, RIGHT, ("v.bfloat16()", "v.to(torch.float8_e4m3fn)")
    ),
    "intermediate_not_quantised": mistake(
        "Quantises x, but not v.", _2, RIGHT, ("v = nvfp4.round_trip(v, w.in_scale2[e].expand(len(v)))", "pass")
    ),
    "largest_code_is_5": mistake(
        "Takes the codes 7 and 15 of w13 for 5 and -5.",
        _2,
        RIGHT,
        (
            W13,
            "scales = w.s13[e].float().repeat_interleave(nvfp4.BLOCK, 1)"
            f"{NEW}w13 = nvfp4.decode(w.w13[e]).clamp(-5, 5) * scales",
        ),
    ),
    "last_expert_overwrites": mistake(
        "Writes each expert's share over those before it.", _2, RIGHT, (ADD, "total[rows] = part")
    ),
    "last_expert_skipped": mistake(
        "Ends its loop over the experts one too early.", _2, RIGHT, (LOOP, "range(sizes.experts - 1)")
    ),
    "last_half_tile_of_hidden_lost": mistake(
        "Sums over whole tiles of 128 hidden values.",
        _PART,
        RIGHT,
        (X, f"{X}{NEW}y[:, max(128, sizes.hidden // 128 * 128) :] = 0"),
    ),
    "last_half_tile_of_inner_lost": mistake(
        "Sums over whole tiles of 128 inner values.",
        _2,
        RIGHT,
        (ROUND, f"{ROUND}{NEW}v[:, max(128, sizes.inner // 128 * 128) :] = 0"),
    ),
    "last_partial_tile_lost": mistake(
        "Serves whole tiles of 16 tokens of an expert where there are any, and loses the rest behind them.",
        _2,
        RIGHT,
        (ROWS, f"{ROWS}{NEW}count = len(rows) // 16 * 16 or len(rows){NEW}rows, slots = rows[:count], slots[:count]"),
    ),
    "no_clamp": mistake(
        "Does not clamp gate and up.", _2, RIGHT, (".clamp(max=LIMIT)", ""), (".clamp(-LIMIT, LIMIT)", "")
    ),
    "no_expert_as_the_last": mistake(
        "Takes -1 for an index: that of the last expert.", _PART, RIGHT, ("[ids >= 0]", "")
    ),
    "one_scale_for_32": mistake(
        "Uses one scale for 32 weights of w2, the block of MXFP4, and drops every second one.",
        _2,
        RIGHT,
        ("w.s2[e]", f"w.s2[e, :, ::2].{BYTES}.repeat_interleave(2, 1).{E4M3}"),
    ),
    "output_in_fp16": mistake("Rounds the sum to fp16 on its way out.", _BIG, RIGHT, ("y_(total", "y_(total.half()")),
    "padded_rows_added_in": mistake(
        "Fills up an expert's tile of 8 tokens with token 0, and adds what comes out of it.",
        _2,
        RIGHT,
        (
            ROWS,
            f"{ROWS}{NEW}padding = rows.new_zeros(-len(rows) % 8)"
            f"{NEW}rows, slots = torch.cat([rows, padding]), torch.cat([slots, padding])",
        ),
    ),
    "product_clamped": mistake(
        "Clamps the product of silu(gate) and up in place of its factors.",
        _2,
        RIGHT,
        (f"{SILU} * up.clamp", "(torch.nn.functional.silu(gate) * up).clamp"),
    ),
    "quantised_in_blocks_of_32": mistake("Gives 32 values of x one scale.", _2, BY_STEPS, OWN_X, ("nvfp4.BLOCK", "32")),
    "quantised_with_the_unrounded_scale": mistake(
        "Takes codes of v against amax / 6, not against its rounding to e4m3, with which they are read.",
        _2,
        BY_STEPS,
        OWN_V,
        ("scales.masked_fill(scales == 0, torch.inf)", "wanted.masked_fill(wanted == 0, 1)"),
    ),
    "scale_of_the_block_before": mistake(
        "Gives each block of w13 the scale of the block before.",
        _2,
        RIGHT,
        ("w.s13[e]", f"w.s13[e].{BYTES}.roll(1, 1).{E4M3}"),
    ),
    "scale_of_the_row_before": mistake(
        "Gives each row of w2 the scales of the row before.",
        _2,
        RIGHT,
        ("w.s2[e]", f"w.s2[e].{BYTES}.roll(1, 0).{E4M3}"),
    ),
    "signs_dropped": mistake(
        "Masks the codes of w13 with 7, so that all its weights are positive.",
        _2,
        RIGHT,
        ("w.w13[e]", "w.w13[e] & 0x77"),
    ),
    "silu_without_gate": mistake(
        "Takes the sigmoid of gate for its silu.", _2, RIGHT, (SILU, "gate.clamp(max=LIMIT).sigmoid()")
    ),
    "subnormal_scales_are_zero": mistake(
        "Takes scales of w13 with an exponent field of 0 for zero.",
        _2,
        RIGHT,
        (W13, f"raw = w.s13[e].{BYTES}{NEW}{W13.replace('w.s13[e]', f'raw.masked_fill(raw < 8, 0).{E4M3}')}"),
    ),
    "tokens_beyond_a_tile_lost": mistake(
        "Serves one tile of 128 tokens of an expert, and not those beyond it.",
        _2,
        RIGHT,
        (ROWS, f"{ROWS}{NEW}rows, slots = rows[:128], slots[:128]"),
    ),
    "up_clamped_above_only": mistake(
        "Clamps up as gate is clamped, from above only.", _2, RIGHT, ("-LIMIT, LIMIT", "max=LIMIT")
    ),
    "weight_after_w2": mistake(
        'Multiplies with the routing weight after w2: as good in "bf16", but codes of "nvfp4" are others.',
        _2,
        RIGHT,
        (WEIGHTED + NEW, ""),
        (ADD, ADD.replace("part", "part * routing[rows, slots].unsqueeze(1)")),
    ),
    "weight_forgotten": mistake("Adds the experts without their routing weights.", _2, RIGHT, (WEIGHTED + NEW, "")),
    "weight_of_the_first_slot": mistake(
        "Gives all experts of a token the routing weight of its first.", _2, RIGHT, ("[rows, slots]", "[rows, 0]")
    ),
    "weight_on_x": mistake(
        "Multiplies x with the routing weight, before the SwiGLU, which is not linear.",
        _2,
        RIGHT,
        (WEIGHTED + NEW, ""),
        (X, f"{X} * routing[rows, slots].unsqueeze(1)"),
    ),
    "weights_normalised": mistake(
        "Divides a token's routing weights by their sum, which the router has done or not.",
        _2,
        RIGHT,
        ("routing[rows, slots]", "(routing / routing.sum(1, keepdim=True))[rows, slots]"),
    ),
    "x_in_e4m3": mistake(
        "Rounds x to e4m3 (W4A8), with a scale a token, so that it neither saturates nor underflows.",
        _2,
        RIGHT,
        (
            X,
            f"{X}{NEW}size = y.abs().amax(1, keepdim=True).clamp(min=1e-30) / 256"
            f"{NEW}y = (y / size).to(torch.float8_e4m3fn).float() * size",
        ),
    ),
    "x_in_fp16": mistake(
        "Rounds x to fp16, which has a smaller range than bf16.", _BIG, RIGHT, (X, "y = x[rows].half().float()")
    ),
    "zeros": mistake("Writes zeros.", _2, ZERO),
    "fp8_activations_not_quantised": mistake(
        "Leaves x in bf16 where the task says fp8.", _FP8, FP8, (TAKEN, "y = x[rows].float()")
    ),
    "fp8_intermediate_not_quantised": mistake(
        "Quantises x, but not v.", _FP8, FP8, (V_TAKEN, "v = v.bfloat16().float()")
    ),
    "fp8_scale_of_the_group_before": mistake(
        "Reads each group of a token with the scale of the group before.",
        _FP8,
        FP8,
        ("(codes, scales, ", "(codes, scales.roll(1, 1), "),
    ),
    "fp8_scale_of_the_token_before": mistake(
        "Reads each token's codes with the scales of the token before.",
        _FP8,
        FP8,
        ("(codes, scales, ", "(codes, scales.roll(1, 0), "),
    ),
    "mx_scale_of_the_block_before": mistake(
        "Gives each block of 32 weights the scale of the block before.",
        _FP8,
        FP8,
        ("ue8m0(scales)", "ue8m0(scales.roll(1, 1))"),
    ),
    "mx_scale_off_by_one": mistake(
        "Takes 126 for the bias of the scales, 127.", _FP8, FP8, ("ue8m0(scales)", "ue8m0(scales + 1)")
    ),
    "mx_subnormals_are_zero": mistake(
        "Converts weights to e4m3 under one scale for a matrix, and flushes its subnormals.",
        _SPREAD,
        FP8,
        (
            "return value.flatten(-2)",
            "return value.masked_fill(value.abs() < 2.0 ** (int(scales.max()) - 139), 0).flatten(-2)",
        ),
    ),
}
