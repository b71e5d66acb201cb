"""Kernels that indexer's check must refuse, as edits of right ones (problems/wrong.py)."""

from functools import partial

from problems import wrong
from problems.wrong import Mistake, mistake

ZEROS = """
from task import input_t, output_t, unpack

TARGETS = ("cpu", "sm90", "sm100")


def custom_kernel(data: input_t) -> output_t:
    unpack(data)
    return data.out.zero_()
"""
RIGHT = """
import torch
from task import dequantise, input_t, output_t, unpack

from problems.common import index_pages

TARGETS = ("cpu", "sm90", "sm100")


def custom_kernel(data: input_t) -> output_t:
    sizes = unpack(data)
    ids = torch.arange(sizes.blocks * sizes.per_page, device=data.q.device)
    for b in range(sizes.batch):
        block, slot = ids // sizes.per_page, ids % sizes.per_page
        place = data.table[b, block].long() * sizes.per_page + slot
        codes, scales = index_pages.read(data.keys, place)
        key = dequantise(codes, scales)
        q = data.q[b].float()
        weights = data.weights[b]
        visible = data.visible[b].unsqueeze(1)
        dots = (q @ key.T).relu()  # (S, H, n)
        score = (weights.unsqueeze(1) @ dots).squeeze(1) + 0.0
        hidden = ids >= visible
        score = score.masked_fill(hidden, -torch.inf)
        best = score.sort(dim=1, descending=True, stable=True).indices[:, : sizes.topk]
        found = place[best]
        row = data.out[b].fill_(-1)
        row[:, : best.shape[1]] = found
        row.masked_fill_(torch.arange(sizes.topk, device=ids.device) >= visible, -1)
    return data.out
"""
# Lines of it that edits replace, or are put behind.
PLACE = "place = data.table[b, block].long() * sizes.per_page + slot"
READ = "codes, scales = index_pages.read(data.keys, place)"
KEY = "key = dequantise(codes, scales)"
SCORE = "score = (weights.unsqueeze(1) @ dots).squeeze(1) + 0.0"
MASK = "score = score.masked_fill(hidden, -torch.inf)"
BEST = "best = score.sort(dim=1, descending=True, stable=True).indices[:, : sizes.topk]"
HOLES = "row.masked_fill_(torch.arange(sizes.topk, device=ids.device) >= visible, -1)"


# Edits of lines of the loop.
instead, behind = partial(wrong.instead, depth=2), partial(wrong.behind, depth=2)

# Sizes, format and content as in task.py's rows. Most mistakes show in the first; the others have rows of fewer than k
# entries, equal scores, an odd k, outliers, large pages, more places than 16 bits name.
ROW = "batch={} queries={} heads={} entries={} topk={} kind={} per_page={} content={}"
SMALL = ROW.format(1, 2, 32, 131, 32, "mxfp4", 16, "magnitudes")
SHORT = ROW.format(3, 2, 32, 24, 96, "mxfp4", 32, "plain-ragged")
EQUAL = ROW.format(2, 1, 32, 257, 64, "mxfp4", 16, "zeros")
ODD = ROW.format(1, 2, 32, 611, 129, "fp8", 64, "falling")
OUTLIER = ROW.format(1, 2, 32, 131, 32, "mxfp4", 64, "outlier")
PAGES = ROW.format(1, 1, 64, 2600, 2048, "mxfp4", 512, "zeros")
RANGE = ROW.format(3, 1, 64, 777, 256, "mxfp4", 32, "magnitudes")
SPARSE = ROW.format(6, 1, 32, 611, 129, "mxfp4", 32, "sparse-neighbours")
NEAR = ROW.format(1, 1, 64, 4099, 1023, "mxfp4", 32, "near")
LARGE = ROW.format(1, 1, 32, 70001, 300, "mxfp4", 32, "exact")


def of(says: str, *edits: tuple[str, str], case: str = SMALL) -> Mistake:
    """Return the mistake of these edits of RIGHT."""
    return mistake(says, case, RIGHT, *edits)


WRONG = {
    "accumulator_in_bf16": of(
        "Adds up heads in bf16.",
        instead(
            SCORE,
            "score = torch.zeros_like(dots[:, 0], dtype=torch.bfloat16)",
            "for h in range(sizes.heads):",
            "    score += (weights[:, h, None] * dots[:, h]).bfloat16()",
            "score = score.float()",
        ),
        case=ODD,
    ),
    "best_of_each_half": of(
        "Chooses k / 2 of either half of the entries, as splits do that are not merged.",
        behind(
            BEST,
            "halves = [score.masked_fill(half, -torch.inf) for half in (ids < visible // 2, ids >= visible // 2)]",
            "order = [half.sort(dim=1, descending=True, stable=True).indices for half in halves]",
            "spread = torch.stack(order, 2).flatten(1)[:, : min(sizes.topk, len(ids))]",
            "best = torch.where(visible <= sizes.topk, best, spread)",
        ),
    ),
    "bin_not_refined": of(
        "Finds the histogram bin of the k-th score, of 4096, and fills up with the first entries of that bin.",
        behind(
            MASK,
            "low = score.masked_fill(hidden, torch.inf).amin(1, keepdim=True)",
            "step = (score.amax(1, keepdim=True) - low).clamp(min=1e-30) / 4096",
            "score = ((score - low) / step).floor().clamp(-1, 4095).nan_to_num(-1)",
        ),
        case=OUTLIER,
    ),
    "distant_groups_lost": of(
        "Drops groups that are more than 2^6 below the largest of their key, as a fold into one binade field does.",
        behind(
            KEY,
            "size = key.unflatten(1, (4, -1)).abs().amax(2, keepdim=True)",
            "near = size * 2**6 >= size.amax(1, keepdim=True)",
            "key = (key.unflatten(1, (4, -1)) * near).flatten(1)",
        ),
        case=SPARSE,
    ),
    "entries_beyond_65536_lost": of(
        "Scores 65,536 entries at most.", ("ids >= visible", "ids >= visible.clamp(max=65536)"), case=LARGE
    ),
    "first_entry_lost": of("Never chooses the first entry.", behind(MASK, "score[:, 0] = -torch.inf"), case=EQUAL),
    "first_twice": of(
        "Writes entry 0, where it is chosen, into the last place too.",
        behind(HOLES, "row[:, -1] = torch.where((row == place[0]).any(1), place[0], row[:, -1])"),
        case=RANGE,
    ),
    "heads_and_queries_mixed": of(
        "Takes q for (B, H, S, 128).",
        ("q[b].float()", "q[b].float().view(sizes.heads, sizes.queries, -1).transpose(0, 1)"),
    ),
    "heads_beyond_16_lost": of(
        "Computes the first 16 heads only.", ("weights[b]", "weights[b, :, :16]"), ("@ dots)", "@ dots[:, :16])")
    ),
    "hidden_entries_fill_up": of(
        "Fills rows of fewer than k entries with entries that are not visible.", (f"\n        {HOLES}", ""), case=SHORT
    ),
    "high_nibble_first": of(
        "Takes the high nibble of a byte for the even value.",
        behind(KEY, 'key = key.unflatten(1, (-1, 2)).flip(2).flatten(1) if sizes.kind == "mxfp4" else key'),
    ),
    "holes_are_place_zero": of(
        "Writes 0 and not -1 where there are fewer than k entries.", (">= visible, -1", ">= visible, 0"), case=SHORT
    ),
    "holes_beyond_the_table_not_written": of(
        "Writes as many places as the table has room for, and no hole behind them.",
        behind(HOLES, "row[:, len(ids) :] = 0"),
        case=SHORT,
    ),
    "holes_in_front": of("Writes the places behind the holes.", behind(HOLES, "row.copy_(row.flip(1))"), case=SHORT),
    "holes_not_written": of(
        "Leaves what was in the output where there are fewer than k entries.",
        ("data.out[b].fill_(-1)", "data.out[b]"),
        ("= found", "= torch.where(ids[: best.shape[1]] < visible, found, row[:, : best.shape[1]])"),
        (f"\n        {HOLES}", ""),
        case=SHORT,
    ),
    "implicit_one_in_subnormals": of(
        "Decodes the e2m1 code 1, which is 0.5, with an implicit leading one as 0.75.",
        behind(
            KEY,
            'if sizes.kind == "mxfp4":',
            "    size = torch.exp2(scales.float() - 127).repeat_interleave(32, 1)",
            "    key = torch.where(key.abs() == 0.5 * size, 1.5 * key, key)",
        ),
        case=EQUAL,
    ),
    "k_beyond_1024_lost": of("Chooses 1024 entries at most.", behind(HOLES, "row[:, 1024:] = -1"), case=PAGES),
    "keys_by_head": of(
        "Takes another key for every head, as if keys were not shared by the heads.",
        instead(
            "dots = (q @ key.T).relu()",
            "turned = torch.stack([key.roll(h, 0) for h in range(sizes.heads)])  # head h has the key h entries before",
            'dots = torch.einsum("shd,hnd->shn", q, turned).relu()',
        ),
    ),
    "keys_in_fp16": of("Rounds keys to fp16.", ("scales)\n        q", "scales).half().float()\n        q"), case=RANGE),
    "last_block_of_a_full_table_lost": of(
        "Leaves out the last block of the table.", behind(MASK, "score[:, -sizes.per_page :] = -torch.inf")
    ),
    "last_group_lost": of("Stops after 96 of the 128 values.", ("q @ key.T", "q[..., :96] @ key[:, :96].T")),
    "last_of_an_odd_k_lost": of(
        "Writes places in pairs: the last one of an odd k is missing.",
        behind(HOLES, "row[:, sizes.topk // 2 * 2 :] = -1"),
        case=ODD,
    ),
    "last_partial_page_lost": of(
        "Scores whole pages only.",
        behind(MASK, "score[:, int(visible.max()) // sizes.per_page * sizes.per_page :] = -torch.inf"),
    ),
    "last_partial_tile_lost": of(
        "Scores whole tiles of 64 entries only.", behind(MASK, "score[:, int(visible.max()) // 64 * 64 :] = -torch.inf")
    ),
    "lengths_of_the_first_sequence": of(
        "Takes the first sequence's lengths for all of them.", ("visible[b]", "visible[0]"), case=SHORT
    ),
    "lengths_of_the_last_query": of(
        "Lets every query see what the last of its sequence sees: the future, in prefill.",
        ("visible[b]", "visible[b, -1:]"),
        case=SHORT,
    ),
    "lowest_scores": of(
        "Chooses the lowest scores.",
        (BEST, "best = score.masked_fill(hidden, torch.inf).sort(dim=1, stable=True).indices[:, : sizes.topk]"),
    ),
    "negative_scores_lost": of(
        "Begins the search with scores of 0: entries below are never chosen.",
        behind(HOLES, "row[:, : best.shape[1]].masked_fill_(score.gather(1, best) < 0, -1)"),
        case=SHORT,
    ),
    "negative_scores_reversed": of(
        "Orders scores by their bits as integers: those below 0 come in the reverse order.",
        ("score.sort", "score.view(torch.int32).sort"),
        case=SHORT,
    ),
    "newest_entries": of(
        "Chooses the newest entries, whatever their scores.", ("score.masked_fill", "ids.float().masked_fill")
    ),
    "one_bin_too_few": of(
        "Stops one histogram bin, of 256, above that of the k-th score: what is missing stays -1.",
        behind(
            HOLES,
            "low = score.masked_fill(hidden, torch.inf).amin(1, keepdim=True)",
            "step = (score.amax(1, keepdim=True) - low).clamp(min=1e-30) / 256",
            "bins = ((score - low) / step).floor().nan_to_num(-1).gather(1, best)",
            "row[:, : best.shape[1]].masked_fill_((bins <= bins[:, -1:]) & (visible > sizes.topk), -1)",
        ),
    ),
    "one_scale_for_a_key": of(
        "Takes the first group's scale for all four.",
        behind(READ, 'scales = scales[:, :1].expand(-1, 4) if sizes.kind == "mxfp4" else scales'),
    ),
    "one_too_few": of("Chooses one entry fewer than k.", behind(HOLES, "row[:, -1] = -1")),
    "one_twice": of(
        "Writes the best entry into the last place too.",
        behind(HOLES, "row[:, -1] = torch.where(visible[:, 0] >= sizes.topk, row[:, 0], row[:, -1])"),
    ),
    "pages_beyond_256_keys": of(
        "Takes pages to have 256 keys at most.",
        ("ids // sizes.per_page,", "ids // min(sizes.per_page, 256) % sizes.blocks,"),
        case=PAGES,
    ),
    "pages_in_order": of(
        "Takes the pages of a sequence for consecutive ones.",
        (PLACE, "place = (data.table[b, 0].long() * sizes.per_page + ids) % (len(data.keys) * sizes.per_page)"),
    ),
    "places_are_entries": of(
        "Returns the numbers of the entries within their sequence, and not their places.", ("place[best]", "best.int()")
    ),
    "places_in_16_bits": of("Keeps 16 bits of a place.", behind(HOLES, "row[row >= 0] &= 0xFFFF"), case=LARGE),
    "products_in_bf16": of(
        "Rounds the product of a query and a key to bf16.",
        ("(q @ key.T)", "(q @ key.T).bfloat16().float()"),
        case=LARGE,
    ),
    "query_in_e5m2": of(
        "Rounds the query to 2 bits behind the leading one, as e5m2 has.",
        ("q[b].float()", "q[b].to(torch.float8_e5m2).float()"),
    ),
    "query_in_fp16": of("Rounds queries to fp16.", ("q[b].float()", "q[b].half().float()")),
    "relu_after_the_sum": of(
        "Applies the ReLU to the sum over heads, and not to each head's product.",
        ("(q @ key.T).relu()", "q @ key.T"),
        ("squeeze(1) + 0.0", "squeeze(1).relu()"),
    ),
    "scales_left_out": of(
        "Multiplies by the codes only.",
        behind(
            READ,
            "one = torch.ones(len(ids), 1, device=ids.device).view(torch.uint8)",
            'scales = one if sizes.kind == "fp8" else torch.full_like(scales, 127)',
        ),
    ),
    "scales_of_the_next_key": of(
        "Reads the scales of the key behind each.",
        behind(READ, "scales = index_pages.read(data.keys, place - slot + (slot + 1) % sizes.per_page)[1]"),
    ),
    "scores_in_bf16": of(
        "Rounds scores to bf16 before it compares them.",
        ("hidden, -torch.inf)", "hidden, -torch.inf).bfloat16().float()"),
        case=ODD,
    ),
    "scores_in_fp16": of(
        "Rounds scores to fp16 before it compares them.", ("hidden, -torch.inf)", "hidden, -torch.inf).half().float()")
    ),
    "table_of_the_first_sequence": of(
        "Looks every sequence up in the first row of the table.", ("table[b, block]", "table[0, block]"), case=SHORT
    ),
    "ties_by_place": of(
        "Prefers the lower place in memory of equal scores, not the lower entry.",
        instead(
            BEST,
            "order = place.argsort()",
            "best = order[score[:, order].sort(dim=1, descending=True, stable=True).indices[:, : sizes.topk]]",
        ),
        case=EQUAL,
    ),
    "ties_to_the_newest": of(
        "Prefers the higher entry of equal scores.",
        ("score.sort", "score.flip(1).sort"),
        ("place[best]", "place[len(ids) - 1 - best]"),
        case=EQUAL,
    ),
    "weights_in_bf16": of("Rounds the weights to bf16.", ("weights[b]", "weights[b].bfloat16().float()"), case=NEAR),
    "weights_in_fp16": of("Rounds weights to fp16.", ("weights[b]", "weights[b].half().float()"), case=RANGE),
    "weights_left_out": of(
        "Adds up the heads without their weights.", ("(weights.unsqueeze(1) @ dots).squeeze(1)", "dots.sum(1)")
    ),
    "weights_of_the_first_query": of(
        "Takes the first query's weights for all queries of a sequence.",
        ("weights[b]", "weights[b, :1].expand(sizes.queries, -1)"),
    ),
    "weights_without_sign": of("Takes the magnitude of the weights.", ("weights[b]", "weights[b].abs()")),
    "without_relu": of("Leaves the ReLU out.", ("(q @ key.T).relu()", "q @ key.T")),
    "zeros": mistake("Writes zeros.", SMALL, ZEROS),
}
