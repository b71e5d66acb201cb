"""sm90_wgmma: entries staged once as bf16, then loading, scores and values in separate warpgroups."""

import ctypes
from ctypes import addressof, c_int, c_int64, c_void_p
from pathlib import Path

import torch
from task import HEAD_DIM, WINDOW, Data, Sizes, input_t, memory_order, output_t, unpack

from problems.common import build, early, tma

TARGETS = ("sm90",)
SOURCE = Path(__file__).with_suffix(".cu")
BOX = 64  # heads, rows and dims of a bulk tensor copy


class Call(ctypes.Structure):
    """What the launcher takes, in its order."""

    _fields_ = [
        *((name, c_void_p) for name in ("starts", "window_index", "compressed_index", "compressed_length")),
        *((name, c_void_p) for name in ("window", "compressed", "sink", "cosine", "sine", "out", "lse")),
        *((name, c_void_p) for name in ("rows", "seen")),
        *((name, c_int64) for name in ("token_stride", "head_stride", "window_stride", "compressed_stride")),
        *((name, c_int) for name in ("window_shift", "compressed_shift", "compressed_entries")),
        *((name, c_int) for name in ("tokens", "batch", "heads", "nw", "nc", "each", "compressed_count", "by_list")),
        *((name, c_int) for name in ("heads_outer", "early")),
    ]


def compile_for(target: str) -> list[build.Artefact]:
    """Compile for `target`, without a GPU."""
    return [build.cuda(SOURCE, target)]


def rows_to_stage(sizes: Sizes, pages: int) -> tuple[int, bool]:
    """Compressed entries to decode, and whether a row is a place of a list; else it is an entry of the pages.

    Which entries the tokens chose is not known without reading all lists, but that is more work than decoding all: 2048
    tokens behind 65536 have a million places and 17 thousand entries, 10 us. Pages of which the lists can name but a
    small part, of other sequences say, are not decoded: then each place of a list has its row.
    """
    entries = pages * sizes.page_compressed
    places = (sizes.tokens if sizes.each else sizes.batch) * sizes.compressed
    by_list = not sizes.each or places <= entries
    return (places if by_list else entries), by_list


def custom_kernel(data: input_t) -> output_t:
    """Write data.out, bf16 (T, H, 512), and data.lse, fp32 (T, H), and return them.

    ValueError as unpack says; RuntimeError: the launch.
    """
    in_model(data, None, None)
    return data.out, data.lse


def in_model(data: Data, cosine: torch.Tensor | None, sine: torch.Tensor | None) -> None:
    """Do so, and turn the last 64 dims of the outputs back, rounded before and after. cosine, sine: fp32 (T, 32)."""
    sizes = unpack(data)
    count, by_list = rows_to_stage(sizes, len(data.compressed))
    window_count = sizes.tokens + (WINDOW - 1) * sizes.batch
    rows = torch.empty((window_count + count, HEAD_DIM), dtype=torch.bfloat16, device=data.q.device)
    seen = torch.empty((sizes.tokens, 4), dtype=torch.int32, device=data.q.device)
    outer = memory_order(data.q) == "heads"
    strides = (HEAD_DIM, sizes.tokens * HEAD_DIM) if outer else (sizes.heads * HEAD_DIM, HEAD_DIM)
    call = Call(
        *(t.data_ptr() for t in (data.starts, data.window_index, data.compressed_index, data.compressed_length)),
        *(t.data_ptr() for t in (data.window, data.compressed, data.sink)),
        *(None if angles is None else angles.data_ptr() for angles in (cosine, sine)),
        *(t.data_ptr() for t in (data.out, data.lse)),
        rows.data_ptr(),
        seen.data_ptr(),
        *strides,
        data.window.shape[1],
        data.compressed.shape[1],
        sizes.page_window.bit_length() - 1,
        sizes.page_compressed.bit_length() - 1,
        len(data.compressed) * sizes.page_compressed,
        sizes.tokens,
        sizes.batch,
        sizes.heads,
        sizes.window,
        sizes.compressed,
        sizes.each,
        count,
        by_list,
        outer,
        early.allowed(),
    )
    queries = _queries_map(data, sizes, outer)
    run = build.cuda(SOURCE, "sm90").function("launch", c_void_p, c_void_p)
    build.check(run(addressof(call), addressof(queries)), "launch")


def _queries_map(data: Data, sizes: Sizes, outer: bool) -> tma.Fields:
    """q, its axes from the innermost in memory on; a box has heads of one token."""
    row, tokens, heads = 2 * HEAD_DIM, sizes.tokens, sizes.heads
    dims, box = ((HEAD_DIM, tokens, heads), (BOX, 1, BOX)) if outer else ((HEAD_DIM, heads, tokens), (BOX, BOX, 1))
    made = tma.check("bfloat16", dims, (row, row * dims[1]), box, swizzle="128B")
    return made.at(data.q.data_ptr(), row * tokens * heads).fields()
