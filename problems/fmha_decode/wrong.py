"""Kernels that fmha_decode's check must refuse, as edits of right ones (problems/wrong.py)."""

from problems.wrong import Mistake, behind, instead, mistake

ZEROS = """
import torch
from task import input_t, output_t, unpack

TARGETS = ("cpu", "sm90", "sm100")


def custom_kernel(data: input_t) -> output_t:
    unpack(data)
    return data.out.zero_(), data.lse.fill_(torch.inf)
"""
RIGHT = """
import torch
from task import NOPE, ROPE, SCALE, input_t, output_t, unpack
from torch.nn.functional import pad

from problems.common import fp8, kv_pages

TARGETS = ("cpu", "sm90", "sm100")
TILE = 64


def gather(
    pages: torch.Tensor, per_page: int, index: torch.Tensor, length: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    # One cache as in task.Data -> entries, fp32 (B, S, n, 512), and which of them count, (B, S, n)
    counts = torch.arange(index.shape[2], device=index.device) < length.view(-1, 1, 1)
    counts = counts & (index >= 0)
    codes, scales, rope = kv_pages.read(pages, per_page, index.masked_fill(~counts, -1), NOPE, ROPE)
    rest = fp8.dequantise_groups(codes, scales, 64)
    entries = torch.cat([rest, rope.float()], -1)
    return entries.masked_fill(~counts.unsqueeze(3), 0), counts


def custom_kernel(data: input_t) -> output_t:
    sizes = unpack(data)
    window = gather(data.window, sizes.page_window, data.window_index, data.window_length)
    compressed = gather(data.compressed, sizes.page_compressed, data.compressed_index, data.compressed_length)
    c, counts = (torch.cat(parts, 2) for parts in zip(window, compressed, strict=True))
    a = SCALE * (data.q.float() @ c.mT)
    a = a.masked_fill(~counts.unsqueeze(2), -torch.inf)
    lse = a.logsumexp(3)
    total = torch.logaddexp(lse, data.sink)
    p = (a - total.unsqueeze(3)).exp().masked_fill(~counts.unsqueeze(2), 0)
    data.out.copy_(p @ c)
    data.lse.copy_(lse.masked_fill(lse == -torch.inf, torch.inf))
    return data.out, data.lse
"""
# Lines of it that edits replace, or are put behind.
COUNTS = "counts = counts & (index >= 0)"
READ = "codes, scales, rope = kv_pages.read(pages, per_page, index.masked_fill(~counts, -1), NOPE, ROPE)"
REST = "rest = fp8.dequantise_groups(codes, scales, 64)"
WINDOW = "window = gather(data.window, sizes.page_window, data.window_index, data.window_length)"
BOTH = "c, counts = (torch.cat(parts, 2) for parts in zip(window, compressed, strict=True))"
P = "p = (a - total.unsqueeze(3)).exp().masked_fill(~counts.unsqueeze(2), 0)"
OUT = "data.out.copy_(p @ c)"
LSE = "lse.masked_fill(lse == -torch.inf, torch.inf)"


MATH = ("import torch\n", "import math\n\nimport torch\n")
ENTRY = ("import NOPE, ROPE", "import ENTRY, NOPE, PAYLOAD, ROPE")
ANYWHERE = behind(COUNTS, "index = index.clamp(max=len(pages) * per_page - 1)  # behind a length it may be any")

# Sizes, order and content as in task.py's rows. Most mistakes show in the first, which has holes, and lists without any
# entry; the others have more heads than 64, more tiles of entries, equal entries, maxima far apart.
ROW = (
    "batch={} queries={} heads={} window={} compressed={} page_window={} page_compressed={} pool={} order={} content={}"
)
EMPTY = ROW.format(3, 2, 16, 1, 33, 128, 1, 80, "sequential", "magnitudes-empty")
HEADS = ROW.format(1, 1, 128, 128, 128, 64, 64, 128, "random", "cancelling")
LONG = ROW.format(1, 1, 64, 128, 512, 64, 64, 1024, "random", "plain")
TILES = ROW.format(1, 3, 4, 65, 1, 128, 32, 4, "sequential", "sinks")
MAXIMA = ROW.format(1, 3, 16, 1, 1, 64, 64, 4, "sequential", "maxima-ragged")
DOUBLE = ROW.format(1, 3, 16, 1, 65, 64, 2, 66, "sequential", "duplicates")


def of(says: str, *edits: tuple[str, str], case: str = EMPTY) -> Mistake:
    """Return the mistake of these edits of RIGHT."""
    return mistake(says, case, RIGHT, *edits)


WRONG = {
    "accumulator_in_bf16": of(
        "Keeps the sum over tiles of 64 entries in bf16.",
        instead(
            OUT,
            "data.out.zero_()",
            "for weight, values in zip(p.split(TILE, 3), c.split(TILE, 2), strict=True):",
            "    data.out.add_(weight @ values)",
        ),
        case=LONG,
    ),
    "adds_to_output": of(
        "Adds to what stands in the output, which is not zero before the call.", ("out.copy_", "out.add_")
    ),
    "compressed_alone": of(
        "Attends to the compressed entries alone, but where there is no such list.",
        (BOTH, "c, counts = compressed if sizes.compressed else window"),
    ),
    "duplicates_dropped": of(
        "Counts an entry once, however often a list names it.",
        behind(
            COUNTS,
            "same = (index.unsqueeze(3) == index.unsqueeze(2)) & counts.unsqueeze(2)",
            "counts &= ~same.tril(-1).any(3)",
        ),
        case=DOUBLE,
    ),
    "empty_row_has_lse_minus_infinity": of("Writes log(0) as the lse of a row without entries.", (LSE, "lse")),
    "empty_row_is_nan": of(
        "Divides 0 by 0 where a row has neither an entry nor a sink of its own maximum.",
        instead(
            P,
            "top = a.amax(3, keepdim=True)",
            "p = (a - top).exp()",
            "p = p / (p.sum(3) + (data.sink - top.squeeze(3)).exp()).unsqueeze(3)",
        ),
    ),
    "empty_row_keeps_the_last_one": of(
        "Returns early where a query has no entries: what stood in the output stays.",
        instead(OUT, "some = counts.any(2)", "data.out[some] = (p @ c)[some].bfloat16()"),
    ),
    "empty_split_is_nan": of(
        "Combines a part for each cache by exp(lse - maximum), and divides 0 by 0 where a part has no entry at all.",
        instead(
            OUT,
            "parts = [slice(sizes.window), slice(sizes.window, None)][: 1 + (sizes.compressed > 0)]",
            "sums = [p[..., part].sum(3, keepdim=True) for part in parts]",
            "each = [s * (p[..., part] @ c[:, :, part] / s) for part, s in zip(parts, sums, strict=True)]",
            "data.out.copy_(sum(each))",
        ),
    ),
    "every_tile_is_the_first": of(
        "Reads the first tile of 64 entries of a list again for each tile: the tile's coordinate is pinned to 0.",
        behind(
            COUNTS,
            "first = torch.arange(index.shape[2], device=index.device) % TILE",
            "index, counts = index[..., first], counts & counts[..., first]",
        ),
        case=HEADS,
    ),
    "heads_and_queries_mixed": of(
        "Takes q for (B, H, S, 512): the distance between heads where that between queries belongs.",
        ("q.float()", "q.float().view(sizes.batch, sizes.heads, sizes.queries, -1).transpose(1, 2)"),
    ),
    "heads_beyond_16_lost": of(
        "Computes the first 16 heads only, the rows of one mma.sync, and writes zeros for the others.",
        behind(OUT, "data.out[:, :, 16:] = 0"),
        case=HEADS,
    ),
    "heads_beyond_64_lost": of(
        "Computes the first 64 heads only, and writes zeros for the others.",
        behind(OUT, "data.out[:, :, 64:] = 0"),
        case=HEADS,
    ),
    "hole_ends_the_list": of("Stops at the first hole.", ("(index >= 0)", "(index >= 0).cumprod(2).bool()")),
    "hole_is_entry_zero": of(
        "Takes -1 for entry 0, which counts like any other.",
        (COUNTS, "counts, index = counts.expand_as(index), index.clamp(min=0)"),
    ),
    "holes_count_with_score_0": of(
        "Reads a hole as an entry of zeros, but leaves its score of 0 in the denominator.",
        ("0), counts", "0), torch.ones_like(counts)"),
    ),
    "implicit_one_in_subnormals": of(
        "Reads e4m3 codes below 2^-6 as if they had a leading 1: 2^-7 * (1 + m / 8).",
        behind(
            REST,
            "raw = codes.view(torch.uint8)",
            "one = (1 - 2.0 * (raw >= 128)) * (1 + (raw & 7) / 8) * 2**-7",
            "one = one * fp8.decode_ue8m0(scales).repeat_interleave(64, -1)",
            "rest = torch.where(raw & 0x78 == 0, one, rest)",
        ),
    ),
    "last_partial_tile_lost": of(
        "Walks whole tiles of 64 entries of the two lists together: up to 63 entries at the end are lost.",
        behind(BOTH, "counts[..., counts.shape[2] // TILE * TILE :] = False"),
    ),
    "lengths_ignored": of(
        "Reads every index of the lists, also those behind the length, wherever they point to (here: into the pool).",
        (COUNTS, "counts, index = index != -1, index % (len(pages) * per_page)"),
    ),
    "lengths_of_the_first_sequence": of(
        "Takes the first sequence's lengths for all of them.", ("length.view(-1, 1, 1)", "length[0]"), ANYWHERE
    ),
    "lists_of_the_first_query": of(
        "Every query of a sequence reads the entries of the sequence's first.",
        behind(BOTH, "c, counts = c[:, :1].expand_as(c), counts[:, :1].expand_as(counts)"),
    ),
    "lse_in_base_2": of("Writes the lse to base 2.", MATH, (LSE, f"(lse / math.log(2)){LSE[3:]}")),
    "lse_of_the_last_split": of(
        "Writes the lse of the last list instead of that of both.",
        behind(OUT, "lse = a[..., sizes.window if sizes.compressed else 0 :].logsumexp(3)"),
    ),
    "lse_transposed": of(
        "Writes the lse as (B, H, S) into memory that is (B, S, H).", (LSE, f"{LSE}.transpose(1, 2).reshape(lse.shape)")
    ),
    "maximum_of_all_heads": of(
        "Subtracts the maximum over the scores of 64 heads, not of each head.",
        instead(
            P,
            "top = torch.cat([x.amax((2, 3), keepdim=True).expand_as(x[..., :1]) for x in a.split(64, 2)], 2)",
            "e = (a - top.clamp(min=-1e30)).exp()",
            "total = e.sum(3, keepdim=True)",
            "p = e.bfloat16().float() / (total + (data.sink.unsqueeze(1) - top).exp())",
            "lse = torch.where(counts.any(2, keepdim=True), (total.log() + top).squeeze(3), torch.inf)",
        ),
        (LSE, "lse"),
        case=MAXIMA,
    ),
    "not_rescaled": of(
        "Sums tiles of 64 entries, each with the maximum until then, without scaling the sum before down.",
        behind(
            P,
            "top = torch.stack([x.amax(3) for x in a.split(TILE, 3)], 3).cummax(3).values.clamp(min=-1e30)",
            "late = top[..., -1:] - top.repeat_interleave(TILE, 3)[..., : a.shape[3]]",
            "p = p * late.clamp(max=80).exp()",
        ),
        case=HEADS,
    ),
    "one_column_group_of_scores": of(
        "Scores by one group of 16 columns in each 512.",
        ("data.q.float() @ c.mT", "data.q[..., :16].float() @ c[..., :16].mT"),
    ),
    "one_column_group_of_values": of(
        "Reads one group of 16 columns of the values, and writes it to all 32 of them.",
        ("(p @ c)", "((p @ c[..., :16]).repeat(1, 1, 1, 32))"),
    ),
    "one_length_for_both_lists": of(
        "Cuts the compressed list at the window's length.", ("data.compressed_length", "data.window_length"), ANYWHERE
    ),
    "one_scale_for_an_entry": of(
        "Scales a whole entry by the largest of its seven scales.",
        ("(codes, scales, 64)", "(codes, scales.amax(-1, keepdim=True).expand_as(scales), 64)"),
    ),
    "padding_counts": of(
        "Rounds the lists up to tiles of 64 and lets the zeros behind their end count as entries with a score of 0.",
        behind(
            BOTH,
            "short = -c.shape[2] % TILE",
            "c, counts = pad(c, (0, 0, 0, short)), pad(counts, (0, short), value=True)",
        ),
    ),
    "page_size_of_the_other_cache": of(
        "Finds compressed entries by the number of entries of the window's pages.",
        behind(
            WINDOW,
            "index, size = data.compressed_index, sizes.page_compressed",
            "page, slot = index // sizes.page_window, index % sizes.page_window",
            "at = (page * size + slot % size).clamp(0, len(data.compressed) * size - 1)  # as far as there are any",
        ),
        ("data.compressed_index, data", "torch.where(index < 0, -1, at), data"),
    ),
    "pages_without_padding": of(
        "Takes 584 bytes an entry for the distance between pages, without their padding to a multiple of 576.",
        ENTRY,
        instead(
            READ,
            "index = index.masked_fill(~counts, 0).long()",
            "start, slot = index // per_page * per_page * ENTRY, index % per_page",
            "payload = (start + slot * PAYLOAD).unsqueeze(3) + torch.arange(PAYLOAD, device=index.device)",
            "scales = (start + per_page * PAYLOAD + slot * 8).unsqueeze(3) + torch.arange(7, device=index.device)",
            "codes, rope = pages.view(-1)[payload].split([NOPE, 2 * ROPE], -1)",
            "codes, rope = codes.view(torch.float8_e4m3fn), rope.contiguous().view(torch.bfloat16)",
            "scales = pages.view(-1)[scales]",
        ),
    ),
    "probabilities_in_e4m3": of(
        "Rounds probabilities to e4m3, as a kernel with FP8 products would, without their sum.",
        behind(
            P,
            "top = p.amax(3, keepdim=True).clamp(min=1e-30) / 448",
            "p = (p / top).to(torch.float8_e4m3fn).float() * top",
        ),
    ),
    "query_in_e4m3": of(
        "Rounds the query to e4m3 for FP8 products.", ("q.float()", "q.to(torch.float8_e4m3fn).float()")
    ),
    "rope_before_the_rest": of(
        "Takes the rope part for the first 64 dims of an entry, not for the last.",
        ("[rest, rope.float()]", "[rope.float(), rest]"),
    ),
    "rope_left_out_of_scores": of(
        "Scores by the 448 dims without position alone.",
        ("data.q.float() @ c.mT", "data.q[..., :NOPE].float() @ c[..., :NOPE].mT"),
    ),
    "rope_left_out_of_values": of(
        "Writes 0 into the last 64 dims: the entries' rope part is taken for key alone.",
        behind(OUT, "data.out[..., NOPE:] = 0"),
    ),
    "rope_queries_in_the_order_of_codes": of(
        "Multiplies dims of entries by other dims of queries in the bf16 part, where a lane has 8 and 8 dims, not 16.",
        behind(
            BOTH,
            "last = [8 * quarter + i % 8 + 32 * (i // 8) for quarter in range(4) for i in range(16)]",
            "order = [*range(NOPE), *(NOPE + dim for dim in last)]",
        ),
        ("c.mT", "c[..., order].mT"),
    ),
    "scale_group_off_by_one": of(
        "Takes the scale of the group before, of the first group its own.",
        ("(codes, scales, 64)", "(codes, scales[..., [0, 0, 1, 2, 3, 4, 5]], 64)"),
    ),
    "scale_groups_of_128": of(
        "Uses one scale for 128 codes, the first of two.",
        ("(codes, scales, 64)", "(codes, scales[..., [0, 0, 2, 2, 4, 4, 6]], 64)"),
    ),
    "scale_of_576_dims": of(
        "Scales scores by 576^-0.5, the width that entries have without latent position, as in DeepSeek-V3.",
        ("SCALE * (", "576**-0.5 * ("),
    ),
    "scales_beside_payloads": of(
        "Reads an entry as 584 consecutive bytes, its scales behind its own payload, not behind those of the page.",
        ENTRY,
        behind(
            READ,
            "index = index.masked_fill(~counts, 0).long()",
            "where = index // per_page * pages.shape[1] + index % per_page * ENTRY + PAYLOAD",
            "scales = pages.view(-1)[where.unsqueeze(3) + torch.arange(7, device=index.device)]",
        ),
    ),
    "scales_clamped_to_1": of(
        "Holds scales as e4m3 does, so that one of more than 448 or of less than 2^-9 is not what it was.",
        ("(codes, scales, 64)", "(codes, scales.clamp(118, 135), 64)"),
    ),
    "scales_of_the_next_entry": of(
        "Scales an entry's codes by the scales of the next slot of its page.",
        behind(
            READ,
            "index = index - index % per_page + (index % per_page + 1) % per_page",
            "scales = kv_pages.read(pages, per_page, index.masked_fill(~counts, -1), NOPE, ROPE)[1]",
        ),
    ),
    "second_half_of_heads_is_the_first": of(
        "Writes into heads 32 to 63 of each 64 what belongs to heads 0 to 31: an offset that warps 2 and 3 lack.",
        ("(p @ c)", "((p @ c)[:, :, [head - 32 * (head % 64 >= 32) for head in range(sizes.heads)]])"),
        case=HEADS,
    ),
    "sink_for_each_split": of(
        "Adds the sink to the denominator of each of two parts, which are then combined by their lse.",
        MATH,
        ("data.sink)", "data.sink + math.log(1 + (sizes.compressed > 0)))"),
    ),
    "sink_has_a_value": of(
        "Adds the sink's probability to every element of the result, as if it had a value of ones.",
        ("(p @ c)", "(p @ c + (data.sink - total).exp().unsqueeze(3))"),
    ),
    "sink_in_base_2": of(
        "Takes the sink for a logarithm to base 2, like the scores inside the kernel.",
        MATH,
        ("data.sink)", "data.sink * math.log(2))"),
    ),
    "sink_in_lse": of("Writes the lse with the sink's part.", (LSE, f"total{LSE[3:]}")),
    "sink_is_scaled": of("Scales the sink like a score.", ("data.sink)", "SCALE * data.sink)")),
    "sink_left_out": of(
        "Divides by the sum of the exponentials without the sink's.", ("torch.logaddexp(lse, data.sink)", "lse")
    ),
    "sink_of_the_first_head": of("Uses the first head's sink for all heads.", ("data.sink)", "data.sink[0])")),
    "splits_averaged": of(
        "Attends to the two caches apart and averages, instead of weighting by the sums of their exponentials.",
        instead(
            OUT,
            "parts = [slice(sizes.window), slice(sizes.window, None)][: 1 + (sizes.compressed > 0)]",
            "each = [a[..., part].softmax(3).nan_to_num(0) @ c[:, :, part] for part in parts]",
            "data.out.copy_(sum(each) / len(parts) * p.sum(3, keepdim=True))",
        ),
    ),
    "subnormal_codes_flushed": of(
        "Reads e4m3 codes below 2^-6 as 0.",
        behind(
            READ,
            "raw = codes.view(torch.uint8)",
            "codes = raw.masked_fill(raw & 0x78 == 0, 0).view(torch.float8_e4m3fn)",
        ),
    ),
    "sums_rescaled_by_own_tiles": of(
        "Rescales the denominator of even tiles of 48 only where an even one moves the maximum, of odd ones likewise.",
        instead(
            OUT,
            "n, denominator = a.shape[3], data.sink.exp()",
            "tops = a.cummax(3).values  # each denominator is of the maximum up to the end of its last tile",
            "ends = [min(48 * (tile + 1), n) - 1 for tile in range(-(-n // 48))][-2:]",
            "for parity, end in enumerate(reversed(ends)):",
            "    those = torch.arange(n, device=a.device) // 48 % 2 == (end // 48) % 2",
            "    lag = (tops[..., end] - tops[..., -1]).nan_to_num(0, 0, 0) if parity else 0",
            "    denominator = denominator + (a[..., those].logsumexp(3) - lag).exp()",
            "right = lse.exp() + data.sink.exp()",
            "data.out.copy_((p @ c) * (right / denominator).nan_to_num(0, 0, 0).unsqueeze(3))",
        ),
        case=TILES,
    ),
    "value_core_matrices_swapped": of(
        "Swaps row and column groups among the 8 x 8 core matrices of each 64 x 64 tile of the values.",
        instead(
            OUT,
            "short = -c.shape[2] % TILE",
            "cores = pad(c, (0, 0, 0, short)).unflatten(3, (-1, 8, 8)).unflatten(2, (-1, 8, 8))",
            "values = cores.transpose(3, 6).flatten(5, 7).flatten(2, 4)",
            "data.out.copy_(pad(p, (0, short)) @ values)",
        ),
    ),
    "values_transposed": of(
        "Multiplies by the transpose of each 64 x 64 tile of the values.",
        instead(
            OUT,
            "short = -c.shape[2] % TILE",
            "tiles = pad(c, (0, 0, 0, short)).unflatten(2, (-1, TILE)).unflatten(4, (-1, TILE))",
            "data.out.copy_(pad(p, (0, short)) @ tiles.transpose(3, 5).flatten(4, 5).flatten(2, 3))",
        ),
    ),
    "window_alone": of("Attends to the window alone.", (BOTH, "c, counts = window")),
    "zeros": mistake("Writes zeros, and the lse of no entries.", EMPTY, ZEROS),
}
