"""Kernels that mhc_site's check must refuse, as edits of a right one (problems/wrong.py)."""

from problems.wrong import Mistake, mistake

SITE = """
import torch
from task import HC_EPS, ITERATIONS, NORM_EPS, input_t, output_t, summed, unpack

TARGETS = ("cpu", "sm90", "sm100")


def sinkhorn(a: torch.Tensor) -> torch.Tensor:
    m = torch.softmax(a, -1) + HC_EPS
    m = m / (m.sum(1, keepdim=True) + HC_EPS)
    for _ in range(ITERATIONS - 1):
        m = m / (m.sum(2, keepdim=True) + HC_EPS)
        m = m / (m.sum(1, keepdim=True) + HC_EPS)
    return m


def custom_kernel(data: input_t) -> output_t:
    unpack(data)
    y, copies = summed(data).float(), data.copies.float()
    added = data.post.unsqueeze(2) * y.unsqueeze(1)
    new = added.baddbmm(data.comb.mT, copies)
    data.new_copies.copy_(new)
    x, fn = data.new_copies.float(), data.fn
    v = x.flatten(1)
    z = v @ fn.T
    square = v.square().mean(1, keepdim=True)
    z = z * torch.rsqrt(square + NORM_EPS)
    scale = data.scale[[0] * 4 + [1] * 4 + [2] * 16]
    logits = z * scale + data.base
    pre, post, comb = logits.split((4, 4, 16), 1)
    pre = torch.sigmoid(pre) + HC_EPS
    u = torch.bmm(pre.unsqueeze(1), x).squeeze(1)
    mean = u.square().mean(1, keepdim=True)
    normed = u * torch.rsqrt(mean + NORM_EPS)
    out = normed * data.norm.float()
    data.out.copy_(out)
    data.new_post.copy_(2 * torch.sigmoid(post))
    data.new_comb.copy_(sinkhorn(comb.unflatten(1, (4, 4))))
    return data.new_copies, data.out, data.new_post, data.new_comb
"""


def wrong(says: str, case: str, *edits: tuple[str, str]) -> Mistake:
    """Return a Mistake in SITE."""
    return mistake(says, case, SITE, *edits)


NEW = "\n    "  # a line of the kernel
SUMMED, ADDED, NEW_COPIES = "summed(data).float()", "data.post.unsqueeze(2) * y.unsqueeze(1)", "copy_(new)"
V, Z, SQUARE = "v = x.flatten(1)", "z = v @ fn.T", "v.square().mean(1, keepdim=True)"
SCALE, LOGITS = "scale = data.scale[[0] * 4 + [1] * 4 + [2] * 16]", "z * scale + data.base"
PRE, U, MEAN = "torch.sigmoid(pre) + HC_EPS", "torch.bmm(pre.unsqueeze(1), x)", "u.square().mean(1, keepdim=True)"
OUT, POST, COMB = "data.out.copy_(out)", "2 * torch.sigmoid(post)", "comb.unflatten(1, (4, 4))"
SOFTMAX, ROUNDS = "torch.softmax(a, -1) + HC_EPS", "ITERATIONS - 1"

# Test cases.
SATURATED = "tokens=9 hidden=64 addends=bf16+fp32 content=saturated"
ZEROS = "tokens=2 hidden=64 addends=bf16 content=zeros"
TINY_PRE = "tokens=1 hidden=64 addends=bf16 content=tiny_pre"
MAGNITUDES = "tokens=15 hidden=128 addends=fp32+bf16 content=magnitudes"
WRONG = {
    "addends_rounded_apart": wrong(
        "Rounds each of two addends to bf16 before it adds them.",
        SATURATED,
        (SUMMED, "(data.y.bfloat16() + data.second.bfloat16() if len(data.second) else data.y).float()"),
    ),
    "adds_to_output": wrong("Adds to what out held, NaN from the judge.", SATURATED, (OUT, "data.out.add_(out)")),
    "comb_column_major": wrong("Takes the rows of the combination column by column.", SATURATED, (COMB, f"{COMB}.mT")),
    "comb_not_transposed": wrong(
        "Sums over the second index of comb: M x in the place of M^T x.", SATURATED, ("data.comb.mT", "data.comb")
    ),
    "copies_in_fp16": wrong(
        "Bounds the new copies by fp16's largest value.", MAGNITUDES, (NEW_COPIES, "copy_(new.clamp(-65504, 65504))")
    ),
    "copies_interleaved": wrong(
        "Takes the rows of fn as if the copies of a value were beside each other.",
        SATURATED,
        (V, "v = x.mT.flatten(1)"),
    ),
    "fn_in_bf16": wrong(
        "Multiplies fn in bf16, as tensor cores would take it.", SATURATED, (Z, "z = v @ fn.bfloat16().float().T")
    ),
    "fn_in_tf32": wrong(
        "Multiplies fn in TF32: 10 bits of its significand.",
        SATURATED,
        (Z, "z = v @ ((fn.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32).T"),
    ),
    "last_columns_lost": wrong(
        "Walks whole tiles of 128 columns of each copy when it multiplies by fn.",
        SATURATED,
        (
            Z,
            "z = v.unflatten(1, (4, -1)).clone()"
            + NEW
            + "z[..., z.shape[2] // 128 * 128 :] = 0"
            + NEW
            + "z = z.flatten(1) @ fn.T",
        ),
    ),
    "mix_of_the_old_copies": wrong(
        "Mixes the copies as they were ahead of the sublayer's output.", SATURATED, (V, "v = copies.flatten(1)")
    ),
    "mix_of_unrounded_copies": wrong(
        "Multiplies fn by x' in fp32, ahead of its rounding to bf16: the reader of new_copies gets another z.",
        SATURATED,
        (V, "v = new.flatten(1)"),
    ),
    "mix_without_epsilon": wrong(
        "Leaves the epsilon out of the root mean square of the copies.", ZEROS, ("square + NORM_EPS", "square")
    ),
    "norm_of_one_copy": wrong(
        "Divides z by the root mean square of the first copy.",
        SATURATED,
        (SQUARE, "x[:, 0].square().mean(1, keepdim=True)"),
    ),
    "norm_of_the_neighbour": wrong(
        "Divides z by the root mean square of the first token of each eight.",
        SATURATED,
        (SQUARE, f"{SQUARE}[torch.arange(len(v), device=v.device) // 8 * 8]"),
    ),
    "norm_of_the_sum": wrong(
        "Takes the sum of squares for their mean.", SATURATED, (SQUARE, "v.square().sum(1, keepdim=True)")
    ),
    "norm_weight_plus_one": wrong(
        "Multiplies by 1 + norm, as other models' weights are stored.",
        SATURATED,
        ("data.norm.float()", "(1 + data.norm.float())"),
    ),
    "norm_without_cross_products": wrong(
        "Makes |u|^2 of the squares of the copies only, without x_j x_k.",
        SATURATED,
        (MEAN, "(pre.square() * x.square().sum(2)).sum(1, keepdim=True) / u.shape[1]"),
    ),
    "norm_without_epsilon": wrong("Leaves the epsilon out of the norm of u.", ZEROS, ("mean + NORM_EPS", "mean")),
    "out_too_large": wrong(
        "Makes all of out too large by half a unit of bf16, as a norm that is taken too roughly does.",
        SATURATED,
        (OUT, "data.out.copy_(out * (1 + 2.0**-8))"),
    ),
    "out_truncated": wrong(
        "Cuts out off to bf16, instead of rounding it.",
        MAGNITUDES,
        (OUT, "data.out.copy_((out.view(torch.int32) & -65536).view(torch.float32))"),
    ),
    "post_not_doubled": wrong("Leaves the factor 2 out of post.", SATURATED, (POST, "torch.sigmoid(post)")),
    "post_of_the_first_copy": wrong(
        "Adds y to every copy with the first copy's weight.", SATURATED, (ADDED, ADDED.replace("post", "post[:, :1]"))
    ),
    "post_with_epsilon": wrong("Adds the epsilon of pre to post as well.", SATURATED, (POST, f"{POST} + HC_EPS")),
    "pre_overflows": wrong(
        "Makes the sigmoid of pre as exp(x) / (1 + exp(x)).", SATURATED, (PRE, "pre.exp() / (1 + pre.exp()) + HC_EPS")
    ),
    "pre_without_epsilon": wrong("Leaves the epsilon out of pre.", TINY_PRE, (PRE, "torch.sigmoid(pre)")),
    "pre_without_sigmoid": wrong(
        "Takes a softmax over the copies for the sigmoids of pre.", SATURATED, (PRE, "torch.softmax(pre, 1) + HC_EPS")
    ),
    "scale_after_base": wrong(
        "Scales the bases too: scale (z + base).", SATURATED, (LOGITS, "(z + data.base) * scale")
    ),
    "scale_of_pre_for_all": wrong(
        "Scales all rows of z with the scale of pre.", SATURATED, (SCALE, "scale = data.scale[0]")
    ),
    "second_left_out": wrong(
        "Writes the first of two addends to the copies, and leaves the second out.",
        SATURATED,
        (SUMMED, "data.y.bfloat16().float()"),
    ),
    "second_without_post": wrong(
        "Adds the second addend to every copy as it is, without the weight of post.",
        SATURATED,
        (SUMMED, "data.y.float()"),
        (ADDED, f"{ADDED} + (data.second.float().unsqueeze(1) if len(data.second) else 0)"),
    ),
    "sigmoid_overflows": wrong(
        "Makes the sigmoid of post as exp(x) / (1 + exp(x)).", SATURATED, (POST, "2 * post.exp() / (1 + post.exp())")
    ),
    "sinkhorn_19_rounds": wrong("Stops Sinkhorn a round early.", SATURATED, (ROUNDS, "ITERATIONS - 2")),
    "sinkhorn_ends_on_rows": wrong(
        "Normalises rows last.", SATURATED, ("return m", "return m / (m.sum(2, keepdim=True) + HC_EPS)")
    ),
    "sinkhorn_in_3_rounds": wrong("Stops Sinkhorn after three rounds.", SATURATED, (ROUNDS, "2")),
    "sinkhorn_without_epsilon": wrong(
        "Leaves the epsilon behind the softmax out.", SATURATED, (SOFTMAX, "torch.softmax(a, -1)")
    ),
    "softmax_over_columns": wrong(
        "Takes the softmax over the first index of the combination.",
        SATURATED,
        (SOFTMAX, "torch.softmax(a, 1) + HC_EPS"),
    ),
    "softmax_without_maximum": wrong(
        "Takes the softmax without subtracting the maximum.",
        SATURATED,
        (SOFTMAX, "a.exp() / a.exp().sum(-1, keepdim=True) + HC_EPS"),
    ),
    "sums_in_bf16": wrong(
        "Adds up the parts of z over 64 columns in bf16.",
        SATURATED,
        (
            Z,
            "z = torch.zeros(len(v), len(fn), dtype=torch.bfloat16, device=v.device)"
            + NEW
            + "for k in range(0, v.shape[1], 64):"
            + NEW
            + "    z += v[:, k : k + 64] @ fn[:, k : k + 64].T"
            + NEW
            + "z = z.float()",
        ),
    ),
    "tokens_beyond_a_tile_lost": wrong(
        "Computes whole tiles of 16 tokens, and of the rest copies without y.",
        SATURATED,
        (ADDED, f"{ADDED} * (torch.arange(len(y), device=y.device) < len(y) // 16 * 16).view(-1, 1, 1)"),
    ),
    "u_in_e4m3": wrong(
        "Rounds the normed u to e4m3 ahead of its weight, as an activation for an FP8 product.",
        SATURATED,
        ("out = normed", "out = normed.to(torch.float8_e4m3fn).float()"),
    ),
    "u_of_the_old_copies": wrong(
        "Makes u of the copies as they were ahead of the sublayer's output.", SATURATED, (U, U.replace("x)", "copies)"))
    ),
    "y_left_out": wrong("Writes the copies without the sublayer's output.", SATURATED, (SUMMED, f"{SUMMED} * 0")),
    "zeros": wrong(
        "Writes zeros, and a combination of quarters.",
        SATURATED,
        (
            "return data.new_copies, data.out, data.new_post, data.new_comb",
            "return data.new_copies.zero_(), data.out.zero_(), data.new_post.fill_(1), data.new_comb.fill_(0.25)",
        ),
    ),
}
