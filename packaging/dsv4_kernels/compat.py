"""FlashMLA's and DeepGEMM's functions by their names, arguments and page layouts, computed by the problems' winners.

What these functions do not serve is a ValueError, before anything is computed. Tensors that are not contiguous, or do
not begin at a multiple of 256 bytes, are copied; caches are taken as they lie. Signatures: flash_mla_interface.py of
FlashMLA (deepseek-ai, 9241ae3), with vLLM's argument `out` besides; csrc/apis/attention.hpp of DeepGEMM (54e2261).
They ask where tensors lie, which torch.compile does not trace: there, call torch.ops.dsv4.*.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import torch

from dsv4_kernels import operators
from problems.common import fp8, index_pages, kv_pages

_decode, _index = operators.task("fmha_decode"), operators.task("indexer")
HEAD_DIM, NOPE, ROPE = _decode.HEAD_DIM, _decode.NOPE, _decode.ROPE
ENTRY, SCALE = _decode.ENTRY, _decode.SCALE
WINDOW = operators.task("fmha_prefill").WINDOW  # positions
BASE = 256  # bytes; tensors begin at multiples of it
PAGE = 64  # keys of a page of DeepGEMM's, and entries of one that flash_mla_sparse_fwd makes
LEAST, MOST = 3, 134  # scale bytes that the kernels take
KEY = index_pages.page_bytes(1, "fp8")  # bytes

# Their names of the winners' tensors, for errors.
NAMES_OF_ROWS = {"compressed_index": "indices", "compressed_length": "topk_length", "sink": "attn_sink"}
NAMES = {"window": "k_cache", "window_index": "indices", "window_length": "topk_length", "sink": "attn_sink"}
NAMES |= {"compressed": "extra_k_cache", "compressed_index": "extra_indices_in_kvcache"}
NAMES |= {"compressed_length": "extra_topk_length"}
NAMES_OF_KEYS = {"keys": "kv_cache", "table": "block_table", "visible": "context_lens"}


class SchedMeta:
    """What FlashMLA keeps of a schedule. The winners need none: this is empty."""


def get_mla_metadata(*args: object, **kwargs: object) -> tuple[SchedMeta, None]:
    """Return what flash_mla_with_kvcache takes as tile_scheduler_metadata. Any arguments; none is read."""
    return SchedMeta(), None


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: object,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute DeepSeek-V4's sparse attention of new tokens to one or two paged FP8 caches, by fmha_decode's winner.

    q                          bf16 (B, S, H, 512), any number of heads H
    k_cache, extra_k_cache     (pages, P, 1, 584) of one byte, with strides (page, 584, 584, 1): a view of pages as
                               problems/common/kv_pages.py describes them. P is a power of two, a page 37440 bytes for
                               P = 64: the next multiple of 576. The last page has its padding too.
    indices, extra_indices...  int32 (B, S, n): page * P + slot, -1 to skip; any n of at least 1
    topk_length, extra_...     int32 (B,), entries of the lists that count; None: all
    attn_sink                  fp32 (H,); None: none
    out                        bf16 (B, S, H, 512), contiguous: where the result goes; None: a new tensor
    Not read, as in FlashMLA where there are indices: block_table, cache_seqlens; nor tile_scheduler_metadata.

    -> out, bf16 (B, S, H, 512), and the logarithm of the denominator without the sink, fp32 (B, H, S): natural, +inf
    where a query has no entry. ValueError: attention without indices (dense), head_dim 576 or pages of 656-byte entries
    (DeepSeek-V3.2), a causal mask, another scale than 512^-0.5, or a tensor that is not as above.
    """
    _demand("indices", "given: dense attention is not served", indices is not None, indices)
    _demand("is_fp8_kvcache", "True: bf16 caches are not served", is_fp8_kvcache, is_fp8_kvcache)
    _demand("causal", "False, as the lists say what a query sees", not causal, causal)
    _demand("num_splits", "None, as in FlashMLA", num_splits is None, num_splits)
    _demand("head_dim_v", HEAD_DIM, head_dim_v == HEAD_DIM, head_dim_v)
    _demand_scale("softmax_scale", softmax_scale)
    _demand("q", "(B, S, H, 512)", q is not None and q.shape[3:] == (HEAD_DIM,), _form(q))
    given = [part is not None for part in (extra_k_cache, extra_indices_in_kvcache)]
    _demand("extra_k_cache", "given where its indices are, and only there", given[0] == given[1], given)
    assert indices is not None
    batch, queries, heads, _ = q.shape
    _demand_lists("indices", "(batch, s_q, topk)", indices, batch, queries)
    window = _pages("k_cache", k_cache)
    extra, extra_indices = window, indices[..., :0]
    if extra_k_cache is not None and extra_indices_in_kvcache is not None:
        extra, extra_indices = _pages("extra_k_cache", extra_k_cache), extra_indices_in_kvcache
        _demand_lists("extra_indices_in_kvcache", "(batch, s_q, extra_topk)", extra_indices, batch, queries)
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(batch, queries, heads, dtype=torch.float32, device=q.device)
    first = window, _based(indices), _lengths(topk_length, batch, indices)
    second = extra, _based(extra_indices), _lengths(extra_topk_length, batch, extra_indices)
    sink = _sink(attn_sink, heads, q.device)
    _call(operators.fmha_decode, NAMES, _based(q), *first, *second, sink, out, lse)
    return out, lse.transpose(1, 2)


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """Compute sparse attention of many tokens to rows that come from FP8 caches, by fmha_prefill's winner.

    q            bf16 (T, H, 512), any number of heads H
    kv           bf16 (N, 1, 512). The winner reads FP8 pages, so of rows that are named the first 448 values must be
                 e4m3 times a power of two for each 64, as what is read from DeepSeek-V4's caches is: rows are put into
                 pages again, without a rounding. Whether they fit is waited for, so no CUDA graph can record the call.
    indices      int32 (T, 1, n): rows; below 0 and from N on: skip
    topk_length  int32 (T,), places that count; None: all
    attn_sink    fp32 (H,); None: none
    out          bf16 (T, H, 512), contiguous: where the result goes; None: a new tensor
    -> out, None where FlashMLA has the largest scores, which the winner does not keep, and the logarithm of the
    denominator without the sink, fp32 (T, H). ValueError: rows that are no FP8 values, d_qk of 576 (DeepSeek-V3.2),
    another scale than 512^-0.5, or a tensor that is not as above. Who has FP8 pages calls torch.ops.dsv4.fmha_prefill
    and saves both passes.
    """
    _demand("d_v", HEAD_DIM, d_v == HEAD_DIM, d_v)
    _demand_scale("sm_scale", sm_scale)
    _demand("q", "(T, H, 512), T from 1", q is not None and q.shape[2:] == (HEAD_DIM,) and len(q) > 0, _form(q))
    _demand("kv", "bf16 (N, 1, 512)", kv.shape[1:] == (1, HEAD_DIM) and kv.dtype == torch.bfloat16, _form(kv))
    tokens, heads, _ = q.shape
    _demand_lists("indices", "(s_q, h_kv, topk)", indices, tokens, 1)
    rows = indices[:, 0].masked_fill(indices[:, 0] >= len(kv), -1)
    length = _lengths(topk_length, tokens, rows)
    _demand("topk_length", f"({tokens},)", length.shape == (tokens,), tuple(length.shape))
    counts = (torch.arange(rows.shape[1], device=q.device) < length.unsqueeze(1)) & (rows >= 0)
    pages = _paged(kv[:, 0], rows[counts])
    numbers = torch.tensor([0, tokens, 0], dtype=torch.int32).to(q.device)
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    none = torch.full((1, WINDOW - 1 + tokens), -1, dtype=torch.int32, device=q.device)  # all are in the other list
    sink = _sink(attn_sink, heads, q.device)
    lists = pages, none, pages, rows, length
    _call(operators.fmha_prefill, NAMES_OF_ROWS, _based(q), numbers[:2], numbers[2:].clone(), *lists, sink, out, lse)
    return out, None, lse


def fp8_paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: object,
    max_context_len: int,
    clean_logits: bool = False,
    indices: None = None,
) -> torch.Tensor:
    """Compute the lightning indexer's scores of paged FP8 keys: on a GPU by indexer's winner, on a CPU by torch.

    q              e4m3 (B, S, H, 128), H 32 or 64
    kv_cache       uint8 (pages, 64, 1, 132): a view of pages of 8448 bytes, 64 x 128 e4m3 and then 64 fp32 scales
    weights        fp32 (B S, H), with the queries' scales in them
    context_lens   int32 (B, S), or (B,) for S = 1: keys that a query sees
    block_table    int32 (B, blocks), pages; blocks * 64 is at least max_context_len
    schedule_meta  not read: the winner needs no schedule
    -> fp32 (B S, max_context_len), rows apart by more: sum_h weight_h * max(0, q_h . key) * scale. From a row's
    context_lens on it is anything, with clean_logits -inf. ValueError: indices (queries of varying number), a GPU that
    is not of sm_90, or a tensor that is not as above.
    """
    _demand("indices", "None: one number of queries for all sequences is served", indices is None, "a tensor")
    fits = q is not None and q.dtype == torch.float8_e4m3fn and q.shape[2:] in ((32, _index.DIM), (64, _index.DIM))
    _demand("q", "float8_e4m3fn (B, S, 32 or 64, 128)", fits, _form(q))
    batch, queries, heads, _ = q.shape
    _demand("weights", f"({batch * queries}, {heads})", weights.shape == (batch * queries, heads), _form(weights))
    if queries == 1 and context_lens.dim() == 1:
        context_lens = context_lens.unsqueeze(1)
    _demand("context_lens", f"({batch}, {queries})", context_lens.shape == (batch, queries), _form(context_lens))
    fits = kv_cache.dtype == torch.uint8 and kv_cache.shape[1:] == (PAGE, 1, KEY) and _is_based(kv_cache)
    _demand("kv_cache", f"uint8 (pages, 64, 1, 132), contiguous, from a multiple of {BASE} on", fits, _form(kv_cache))
    _demand("max_context_len", "at least 1", max_context_len > 0, max_context_len)
    blocks = -(-max_context_len // PAGE)
    fits = block_table.dim() == 2 and block_table.shape[1] >= blocks
    _demand("block_table", f"(B, {blocks} or more) for max_context_len {max_context_len}", fits, _form(block_table))
    keys = kv_cache.view(len(kv_cache), PAGE * KEY)
    table = _based(block_table[:, :blocks])
    weights = _based(weights.view(batch, queries, heads))
    scores = _call(indexer_scores, NAMES_OF_KEYS, q.to(torch.bfloat16), weights, keys, table, _based(context_lens))
    logits = scores[:, :max_context_len]
    if clean_logits:
        logits.masked_fill_(torch.arange(max_context_len, device=q.device) >= context_lens.view(-1, 1), -math.inf)
    return logits


@torch.library.custom_op("dsv4::indexer_scores", mutates_args=())
def indexer_scores(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, table: torch.Tensor, visible: torch.Tensor
) -> torch.Tensor:
    """q, weights, keys, table, visible: as in indexer's task.Data, in pages of 64 or more keys.

    -> fp32 (B S, entries of a row of the table), rows twice as far apart; of what a query does not see anything.
    ValueError as unpack says, or a device for which no winner gives scores.
    """
    # The winner does not score a row that sees no more than k entries, here 1. A page always has a second entry.
    data = _index_data(q, weights, keys, table, visible + (visible == 1))
    sizes = _index.unpack(data)
    operators.check_addresses(zip(data._fields, data, strict=True))
    entries = sizes.blocks * sizes.per_page
    if q.device.type == "cpu":
        seen = table[torch.arange(sizes.blocks) * sizes.per_page < visible.amax(1, keepdim=True)]
        bad = seen[(seen < 0) | (seen >= len(keys))]
        _demand("table", f"of pages 0 to {len(keys) - 1}, where a query sees them", not len(bad), bad[:4].tolist())
        return _scores(data, entries, sizes.per_page)
    variant = operators.winner("indexer", q.device)
    if not hasattr(variant, "scores"):
        raise ValueError(f"q must be on a CPU or on a GPU of sm_90, of which scores are had, got {q.device}")
    with operators.queue_of_winners(q.device):
        return variant.scores(data)[:, :entries]


@indexer_scores.register_fake
def _(*inputs: torch.Tensor) -> torch.Tensor:
    sizes = _index.unpack(_index_data(*inputs))
    return _rows(inputs[0], sizes.blocks * sizes.per_page)


def _index_data(*inputs: torch.Tensor) -> Any:
    batch, queries = inputs[0].shape[:2]
    return _index.Data(*inputs, inputs[3].new_empty(batch, queries, 1))


def _rows(q: torch.Tensor, entries: int) -> torch.Tensor:
    return q.new_empty(q.shape[0] * q.shape[1], 2 * entries, dtype=torch.float32)[:, :entries]


def _scores(data: Any, entries: int, per_page: int) -> torch.Tensor:
    entry = torch.arange(entries)
    place = data.table[:, entry // per_page].long() * per_page + entry % per_page
    keys = _index.read_keys(data.keys, place)
    products = data.q.float() @ keys.unsqueeze(1).mT
    return _rows(data.q, entries).copy_((data.weights.unsqueeze(2) @ products.relu_()).flatten(0, 2))


def _call(operator: Callable[..., Any], names: dict[str, str], *given: torch.Tensor) -> Any:
    """operator(*given). A ValueError that says what a tensor must be has the name that the caller knows."""
    try:
        return operator(*given)
    except ValueError as error:
        raise ValueError(re.sub(r"\w+(?=.* must )", lambda word: names.get(word[0], word[0]), str(error))) from None


def _demand(name: str, wanted: object, fits: bool, got: object) -> None:
    if not fits:
        raise ValueError(f"{name} must be {wanted}, got {got}")


def _demand_lists(name: str, form: str, given: torch.Tensor, *shape: int) -> None:
    fits = given.dim() == 3 and given.shape[:2] == shape and given.dtype == torch.int32
    _demand(name, f"int32 {form}, here ({shape[0]}, {shape[1]}, any)", fits, _form(given))


def _demand_scale(name: str, scale: float | None) -> None:
    fits = scale is None or math.isclose(scale, SCALE, rel_tol=1e-5)
    _demand(name, f"512^-0.5 = {SCALE:.6g}, which is in the kernels", fits, scale)


def _form(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}"


def _is_based(tensor: torch.Tensor) -> bool:
    """Whether it is contiguous and begins at a multiple of BASE bytes, as what torch allocates does."""
    return tensor.is_contiguous() and tensor.storage_offset() * tensor.element_size() % BASE == 0


def _based(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy that is based."""
    return tensor if _is_based(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def _lengths(given: torch.Tensor | None, rows: int, index: torch.Tensor) -> torch.Tensor:
    if given is None:
        return torch.full((rows,), index.shape[-1], dtype=torch.int32, device=index.device)
    return _based(given)


def _sink(given: torch.Tensor | None, heads: int, device: torch.device) -> torch.Tensor:
    return torch.full((heads,), -math.inf, device=device) if given is None else _based(given)


def _pages(name: str, cache: torch.Tensor) -> torch.Tensor:
    """The bytes of FlashMLA's view of pages: uint8 (pages, bytes of a page)."""
    if cache.dim() != 4 or cache.shape[2:] != (1, ENTRY) or cache.element_size() != 1:
        raise ValueError(f"{name} must be of bytes, (pages, P, 1, {ENTRY}), got {_form(cache)}")
    pages, per_page = cache.shape[:2]
    _demand(f"{name}: P", "a power of two", per_page & (per_page - 1) == 0, per_page)
    stride = kv_pages.page_bytes(per_page, NOPE, ROPE)
    fits = cache.stride(1) == ENTRY and cache.stride(3) == 1 and (pages <= 1 or cache.stride(0) == stride)
    padded = f"pages padded to a multiple of {kv_pages.payload_bytes(NOPE, ROPE)} bytes"
    _demand(name, f"of strides ({stride}, {ENTRY}, {ENTRY}, 1), {padded}", fits, cache.stride())
    offset = cache.storage_offset()
    _demand(f"{name}: offset", f"a multiple of {BASE} bytes", offset % BASE == 0, offset)
    try:
        return cache.view(torch.uint8).as_strided((pages, stride), (stride, 1))
    except RuntimeError as error:
        raise ValueError(f"{name} must have the padding of its last page too, {stride} bytes a page: {error}") from None


def _paged(rows: torch.Tensor, named: torch.Tensor) -> torch.Tensor:
    """Pages of PAGE entries, uint8, with rows, bf16 (N, 512), as entries 0 to N - 1. named: int32, those that matter.

    ValueError: the first 448 values of one that is named are not e4m3 times a scale for each 64.
    """
    values = rows[:, :NOPE].float()
    codes, scales = fp8.quantise_groups(values, kv_pages.GROUP, fp8.E4M3_MAX * 2.0 ** (LEAST - 127))
    good = (fp8.dequantise_groups(codes, scales, kv_pages.GROUP) == values).all(1) & (scales <= MOST).all(1)
    wanted = "of values of FP8 caches, e4m3 times a power of two for each 64 of the first 448, where indices name a row"
    _demand("kv", wanted, bool(good[named.long()].all()), "others: they would be rounded, and bf16 rows are not served")
    stride = kv_pages.page_bytes(PAGE, NOPE, ROPE)
    pages = torch.empty(max(1, -(-len(rows) // PAGE)), stride, dtype=torch.uint8, device=rows.device)
    index = torch.arange(len(rows), device=rows.device)
    kv_pages.write(pages, PAGE, index, codes, scales, rows[:, NOPE:])
    return pages
