"""Kernels that fmha_prefill's check must refuse, as edits of right ones (problems/wrong.py)."""

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
from task import NOPE, ROPE, SCALE, WINDOW, input_t, output_t, sequence_of, unpack

from problems.common import fp8, kv_pages

TARGETS = ("cpu", "sm90", "sm100")
TILE = 64


def gather(pages: torch.Tensor, per_page: int, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # Pages, and index (T, n) with -1 for none -> entries, fp32 (T, n, 512), and which of them count, (T, n)
    counts = index >= 0
    codes, scales, rope = kv_pages.read(pages, per_page, index, NOPE, ROPE)
    entries = torch.cat([fp8.dequantise_groups(codes, scales, 64), rope.float()], -1)
    return entries.masked_fill(~counts.unsqueeze(2), 0), counts


def custom_kernel(data: input_t) -> output_t:
    sizes, b, q, out = unpack(data), sequence_of(data), data.q, data.out
    t = torch.arange(sizes.tokens, device=q.device)
    starts, first, length = data.starts[b], data.first[b], data.compressed_length
    places = torch.arange(WINDOW, device=t.device)
    place = (t - starts).unsqueeze(1) + places
    there = place >= WINDOW - 1 - first.unsqueeze(1)
    window = data.window_index[b.unsqueeze(1), place.clamp(0, sizes.window - 1)]
    window = window.masked_fill(~there, -1)
    own = t if sizes.each else b
    chosen = data.compressed_index[own]
    behind = torch.arange(sizes.compressed, device=t.device) >= length.unsqueeze(1)
    chosen = chosen.masked_fill(behind, -1)
    parts = gather(data.window, sizes.page_window, window), gather(data.compressed, sizes.page_compressed, chosen)
    c, counts = (torch.cat(part, 1) for part in zip(*parts, strict=True))
    a = SCALE * (q.float() @ c.mT)
    a = a.masked_fill(~counts.unsqueeze(1), -torch.inf)
    lse = a.logsumexp(2)
    total = torch.logaddexp(lse, data.sink)
    p = (a - total.unsqueeze(2)).exp().masked_fill(~counts.unsqueeze(1), 0)
    out.copy_(p @ c)
    data.lse.copy_(lse.masked_fill(lse == -torch.inf, torch.inf))
    return data.out, data.lse
"""
# Lines of it that edits replace, or are put behind.
PLACES = "places = torch.arange(WINDOW, device=t.device)"
THERE = "there = place >= WINDOW - 1 - first.unsqueeze(1)"
OWN = "own = t if sizes.each else b"
CHOSEN = "chosen = data.compressed_index[own]"
START = "starts, first, length = data.starts[b], data.first[b], data.compressed_length"
BOTH = "c, counts = (torch.cat(part, 1) for part in zip(*parts, strict=True))"
P = "p = (a - total.unsqueeze(2)).exp().masked_fill(~counts.unsqueeze(1), 0)"
OUT = "out.copy_(p @ c)"
LSE = "lse.masked_fill(lse == -torch.inf, torch.inf)"

# Sizes, order and content as in task.py's rows.
ROW = (
    "tokens={} batch={} heads={} position={} lists={} compressed={} ratio={} page_window={} page_compressed={} "
    "order={} content={}"
)
PLAIN = ROW.format(300, 2, 2, 0, "chosen", 64, 4, 64, 64, "tokens", "plain")
CHUNK = ROW.format(3, 3, 16, 127, "all", 33, 4, 64, 2, "heads", "plain")
RAGGED = ROW.format(40, 3, 64, 0, "chosen", 64, 4, 64, 64, "heads", "ragged")
EMPTY = ROW.format(20, 4, 16, 2500, "chosen", 512, 4, 64, 64, "tokens", "empty")
LONG = ROW.format(9, 1, 128, 4200, "chosen", 1024, 4, 64, 64, "tokens", "plain")


def of(says: str, *edits: tuple[str, str], case: str = RAGGED) -> Mistake:
    """Return the mistake of these edits of RIGHT."""
    return mistake(says, case, RIGHT, *edits)


WRONG = {
    "chunk_alone": of(
        "The window begins at the chunk's first token.", (THERE, "there = place >= WINDOW - 1"), case=CHUNK
    ),
    "compressed_of_the_chunks_end": of(
        "Every token sees the compressed entries that the last of its sequence sees.",
        behind(START, "length = length[data.starts[b + 1] - 1]"),
        case=PLAIN,
    ),
    "empty_row_has_lse_minus_infinity": of(
        "Writes log(0) as the lse of a row without entries.", (LSE, "lse"), case=EMPTY
    ),
    "empty_row_is_nan": of(
        "Divides 0 by 0 where a row has no entry.",
        instead(
            P,
            "top = a.amax(2, keepdim=True)",
            "p = (a - top).exp()",
            "p = p / (p.sum(2) + (data.sink - top.squeeze(2)).exp()).unsqueeze(2)",
        ),
        case=EMPTY,
    ),
    "every_list_is_the_sequences": of(
        "All tokens of a sequence read the list of its first.", (OWN, "own = starts if sizes.each else b"), case=PLAIN
    ),
    "first_of_the_first_sequence": of(
        "Takes the first sequence's position for all: places before it are taken for those below position 0.",
        ("data.first[b], ", "data.first[:1], "),
    ),
    "heads_beyond_64_lost": of(
        "Computes the first 64 heads only, and writes zeros for the others.", behind(OUT, "out[:, 64:] = 0"), case=LONG
    ),
    "hole_is_entry_zero": of(
        "Takes -1 for entry 0, which counts like any other.",
        behind(CHOSEN, "chosen = chosen.clamp(min=0)"),
    ),
    "holes_count_with_score_0": of(
        "Reads a hole as an entry of zeros, but leaves its score of 0 in the denominator.",
        (", 0), counts", ", 0), torch.ones_like(counts)"),
    ),
    "last_partial_tile_lost": of(
        "Walks whole tiles of 64 entries of the two lists together: up to 63 entries at the end are lost.",
        behind(BOTH, "counts[:, counts.shape[1] // TILE * TILE :] = False"),
        case=CHUNK,
    ),
    "length_of_the_first_token": of(
        "Takes the compressed length of a sequence's first token for all of its tokens.",
        behind(START, "length = length[starts]"),
        case=PLAIN,
    ),
    "lengths_ignored": of(
        "Reads every index of the lists, wherever it points to (here: into the pool).",
        behind(
            CHOSEN, "chosen = torch.where(chosen == -1, -1, chosen % (len(data.compressed) * sizes.page_compressed))"
        ),
        (">= length.unsqueeze(1)", "< 0"),
    ),
    "list_of_the_neighbour": of(
        "Reads the compressed list of the next token.",
        behind(OWN, "own = (own + 1) % len(data.compressed_index)"),
        case=PLAIN,
    ),
    "lse_transposed": of(
        "Writes the lse as (H, T) into memory that is (T, H).", (LSE, f"{LSE}.T.reshape(lse.shape)"), case=PLAIN
    ),
    "order_of_out_ignored": of(
        "Writes the output in the memory order (T, H, 512), whatever its strides are.",
        (OUT, "out.as_strided(out.shape, (sizes.heads * 512, 512, 1)).copy_(p @ c)"),
    ),
    "order_of_queries_ignored": of(
        "Reads queries in the memory order (T, H, 512), whatever their strides are.",
        ("(q.float() @", "(q.as_strided(q.shape, (sizes.heads * 512, 512, 1)).float() @"),
    ),
    "scale_of_block_6_for_all": of(
        "Scales a whole entry by the scale of its last 64 codes.",
        ("(codes, scales, 64)", "(codes, scales[..., [6] * 7], 64)"),
    ),
    "sink_in_lse": of("Writes the lse with the sink's part.", (LSE, f"total{LSE[3:]}")),
    "sink_left_out": of("Divides by the sum without the sink's part.", ("torch.logaddexp(lse, data.sink)", "lse")),
    "starts_ignored": of(
        "Counts places of the window from the call's first token, not from the sequence's.",
        ("(t - starts).unsqueeze", "t.unsqueeze"),
    ),
    "tile_of_two_sequences": of(
        "Gives a tile of 8 tokens the window list and the places of the sequence of its first token.",
        behind(START, "b = b[t // 8 * 8]", "starts = data.starts[b]"),
    ),
    "token_not_seen_by_itself": of(
        "Causal off by one: sees the positions before its own, and 128 of them.",
        (PLACES, "places = torch.arange(-1, WINDOW - 1, device=t.device)"),
        (THERE, f"{THERE} & (place >= 0)"),
        case=PLAIN,
    ),
    "token_sees_the_next": of(
        "Causal off by one: sees the position behind its own, the last token's list permitting.",
        (PLACES, "places = torch.arange(1, WINDOW + 1, device=t.device)"),
        case=PLAIN,
    ),
    "window_of_127": of(
        "Sees 127 positions.",
        (PLACES, "places = torch.arange(1, WINDOW, device=t.device)"),
        case=CHUNK,
    ),
    "window_of_129": of(
        "Sees 129 positions, from a chunk's second token on, whose list has one place more.",
        (PLACES, "places = torch.arange(-1, WINDOW, device=t.device)"),
        (THERE, f"{THERE} & (place >= 0)"),
        case=PLAIN,
    ),
    "window_of_the_chunks_end": of(
        "Every token sees the window's positions up to its sequence's last token.",
        (PLACES, "places = torch.arange(WINDOW + TILE, device=t.device)"),
        (THERE, f"{THERE} & (place < sizes.window)"),
        case=PLAIN,
    ),
    "window_of_the_neighbour": of(
        "Reads the window's list of the next sequence.", ("[b.unsqueeze(1), ", "[(b + 1).unsqueeze(1) % sizes.batch, ")
    ),
    "zeros": mistake("Writes zeros, and the lse of no entries.", RAGGED, ZEROS),
}
