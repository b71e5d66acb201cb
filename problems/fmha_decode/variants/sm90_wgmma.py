"""sm90_wgmma: gathering, scores and values in separate warpgroups, split over the list where sequences are few."""

from ctypes import c_int, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch
from task import HEAD_DIM, Sizes, input_t, output_t, unpack

from problems.common import build

TARGETS = ("sm90",)
SOURCE = Path(__file__).with_suffix(".cu")
HEADS = 64  # of a block of threads
BLOCKS = 132  # of threads that run at once on an H200: one a multiprocessor
MOST_SPLITS = 128  # that combine.cuh takes


@dataclass(frozen=True)
class Launch:
    """How a query's entries are shared out."""

    entries: int  # of a tile, 48 or 32
    splits: int  # blocks of threads for a query's entries


def launch_for(sizes: Sizes) -> Launch:
    """Choose by shape only: the fewest tiles a block that one wave of blocks allows, then the fewest splits for that
    many; small tiles where even a tile a block does not fill the GPU.
    """
    items = sizes.batch * sizes.queries * -(-sizes.heads // HEADS)
    most = max(1, min(BLOCKS // items, MOST_SPLITS))
    listed = sizes.window + sizes.compressed
    if 1 < -(-listed // 32) <= min(most, 32):
        return Launch(32, -(-listed // 32))
    tiles = -(-listed // 48)
    each = -(-tiles // most)
    return Launch(48, -(-tiles // each))


def compile_for(target: str) -> list[build.Artefact]:
    """Compile for `target`, without a GPU."""
    return [build.cuda(SOURCE, target)]


def custom_kernel(data: input_t) -> output_t:
    """Write data.out, bf16 (B, S, H, 512), and data.lse, fp32 (B, S, H), and return them.

    ValueError as unpack says; RuntimeError: the launch.
    """
    sizes = unpack(data)
    launch = launch_for(sizes)
    rows = sizes.batch * sizes.queries * sizes.heads
    left = launch.splits if launch.splits > 1 else 0  # partial results, which need scratch memory
    partial = torch.empty((left, rows, HEAD_DIM), dtype=torch.float16, device=data.q.device)
    stats = torch.empty((left, rows, 4), dtype=torch.float32, device=data.q.device)
    run = build.cuda(SOURCE, "sm90").function("launch", *[c_void_p] * 12, *[c_int] * 11)
    code = run(
        *(t.data_ptr() for t in data), partial.data_ptr(), stats.data_ptr(),
        sizes.batch, sizes.queries, sizes.heads, sizes.window, sizes.compressed,
        sizes.page_window.bit_length() - 1, data.window.shape[1],
        sizes.page_compressed.bit_length() - 1, data.compressed.shape[1],
        launch.splits, launch.entries,
    )  # fmt: skip
    build.check(code, "launch")
    return data.out, data.lse
