"""sm90_wgmma: gathering, scores and values in separate warpgroups, split over list and dims where sequences are few.

Up to 16 heads are rows of mma.sync (sm90_few_heads.cuh), not padded to 64.
"""

import functools
from ctypes import byref, c_int, c_void_p
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from task import HEAD_DIM, Sizes, input_t, output_t, unpack

from problems.common import build, early

TARGETS = ("sm90",)
SOURCE = Path(__file__).with_suffix(".cu")
HEADS = 64  # of a block of threads
BLOCKS = 132  # of threads that run at once on an H200: one a multiprocessor
TURNED = 64  # dims that in_model turns back
MOST_SPLITS = 128  # that combine.cuh takes
ROWS = 16  # heads of a block of launch_few_heads
MOST_FEW_HEADS = 16  # that launch_few_heads is taken for: with 32 the blocks of 64 rows are faster
MOST_SLICES, MOST_SLICES_FEW = 2, 4  # of the dims, with more than ROWS heads and without
SHORT_LIST = 256  # entries up to which launch_few_heads is not given up for slices: not measured
ALIKE = 8  # queries of a call of in_model up to which the bits of one do not depend on the others
# Cycles of a block: a tile, measured alone on its multiprocessor and with another block; all else, estimated; each
# block to join.
FEW_TILE, FEW_TILE_SHARED, FEW_FIXED, FEW_JOIN = 2300, 3000, 8400, 60
MANY_TILE, MANY_FIXED = 3000, 15000  # of launch_for's, measured with 64 heads
CLUSTERS = (1, 2, 3, 4, 5, 6, 7, 8, 16)  # blocks of launch_few_heads that may share a list


@dataclass(frozen=True)
class Launch:
    """How a query's entries are shared out."""

    entries: int  # of a tile, 48 or 32
    splits: int  # of a query's entries
    slices: int = 1  # of the dims: a split has as many blocks of threads
    alike: bool = False  # sums of splits have the same order however many empty splits follow


def launch_for(sizes: Sizes) -> Launch:
    """Choose by shape only: the fewest tiles a block that one wave of blocks allows, then the fewest splits for that
    many; small tiles where even a tile a block does not fill the GPU, and slices where its half is idle then.
    """
    items = sizes.batch * sizes.queries * -(-sizes.heads // HEADS)
    most = max(1, min(BLOCKS // items, MOST_SPLITS))
    listed = sizes.window + sizes.compressed
    if 1 < -(-listed // 32) <= min(most, 32):
        return _sliced(sizes, Launch(32, -(-listed // 32)))
    tiles = -(-listed // 48)
    each = -(-tiles // most)
    return _sliced(sizes, Launch(48, -(-tiles // each)))


def _sliced(sizes: Sizes, launch: Launch) -> Launch:
    """Launch with as many slices as have a multiprocessor for each block; they change no bit."""
    room = BLOCKS // (sizes.batch * sizes.queries * -(-sizes.heads // HEADS) * launch.splits)
    most = MOST_SLICES_FEW if sizes.heads <= ROWS else MOST_SLICES
    slices = max(n for n in (1, 2, 4) if n <= max(1, min(room, most)))
    return replace(launch, slices=slices if launch.splits > 1 else 1)


@dataclass(frozen=True)
class FewHeads:
    """How a query's entries are shared out where heads are few."""

    blocks: int  # of a cluster, which has a query and 16 heads: one of CLUSTERS


def cluster_for(sizes: Sizes, fit: dict[int, int]) -> tuple[FewHeads, int]:
    """Choose by shape, and by how many clusters of each size the GPU has room for at once, what takes the fewest cycles
    by estimate. -> the launch, its cycles.
    """
    items = sizes.batch * sizes.queries * -(-sizes.heads // ROWS)
    groups = -(-(sizes.window + sizes.compressed) // 8)

    def cycles(blocks: int) -> int:
        waves = -(-items // fit[blocks])
        shared = min(items, fit[blocks]) * blocks > BLOCKS  # two blocks on a multiprocessor
        tiles = -(-groups // (4 * blocks))
        return waves * (FEW_FIXED + tiles * (FEW_TILE_SHARED if shared else FEW_TILE)) + blocks * FEW_JOIN

    blocks = min(fit, key=cycles)
    return FewHeads(blocks), cycles(blocks)


def few_heads_for(sizes: Sizes, fit: dict[int, int]) -> FewHeads | None:
    """What launch_few_heads gets. None: launch_for's launch takes fewer cycles, by estimate as where lists are long,
    or as measured where it has slices; or heads are more than MOST_FEW_HEADS.
    """
    many = launch_for(sizes)
    if sizes.heads > MOST_FEW_HEADS or (many.slices > 1 and sizes.window + sizes.compressed > SHORT_LIST):
        return None
    few, cycles = cluster_for(sizes, fit)
    tiles = -(-(sizes.window + sizes.compressed) // (many.entries * many.splits))
    blocks = sizes.batch * sizes.queries * -(-sizes.heads // HEADS) * many.splits
    waves = -(-blocks // BLOCKS)
    return few if cycles <= waves * (MANY_FIXED + tiles * MANY_TILE) else None


@functools.cache
def clusters_that_fit() -> dict[int, int]:
    """-> for those of CLUSTERS that the GPU has room for, how many at once.

    RuntimeError: CUDA refuses to say, or says that there is room for none.
    """
    ask, count = build.cuda(SOURCE, "sm90").function("clusters", c_int, c_void_p), c_int()
    fit = {}
    for blocks in CLUSTERS:
        build.check(ask(blocks, byref(count)), f"clusters of {blocks} blocks")
        if count.value:
            fit[blocks] = count.value
    if not fit:
        raise RuntimeError("sm90_few_heads.cuh: the GPU must have room for a block of it, CUDA says that it has none")
    return fit


def compile_for(target: str) -> list[build.Artefact]:
    """Compile for `target`, without a GPU."""
    return [build.cuda(SOURCE, target)]


def custom_kernel(data: input_t) -> output_t:
    """Write data.out, bf16 (B, S, H, 512), and data.lse, fp32 (B, S, H), and return them.

    ValueError as unpack says; RuntimeError: the launch.
    """
    sizes = unpack(data)
    few = few_heads_for(sizes, clusters_that_fit()) if sizes.heads <= MOST_FEW_HEADS else None
    return _attend_few_heads(data, sizes, few) if few else _attend(data, sizes, launch_for(sizes))


def in_model(data: input_t, cosine: torch.Tensor | None, sine: torch.Tensor | None) -> output_t:
    """Do as custom_kernel, then turn the last 64 dims of each query's outputs back by its angles, if they are given.

    A pair (a, b) of neighbours, of bf16, becomes (a cos + b sin, b cos - a sin). cosine, sine: fp32 (B S, 32),
    contiguous; no kernel just ahead may write them. ValueError: they are not that, or as custom_kernel.
    In calls of up to ALIKE queries, with lists of at most 48 MOST_SPLITS places, the bits of a query depend neither on
    the others nor on how many -1 end its list.
    """
    sizes, turn = unpack(data), (None, None)
    if cosine is not None or sine is not None:
        turn = _address("cosine", cosine, sizes), _address("sine", sine, sizes)
    if sizes.batch * sizes.queries <= ALIKE:
        return _attend(data, sizes, launch_alike(sizes), turn)
    few = few_heads_for(sizes, clusters_that_fit()) if sizes.heads <= MOST_FEW_HEADS else None
    return _attend_few_heads(data, sizes, few, turn) if few else _attend(data, sizes, launch_for(sizes), turn)


def launch_alike(sizes: Sizes) -> Launch:
    """Give each tile of 48 places a block, whatever the number of queries and of tiles behind it."""
    tiles = -(-(sizes.window + sizes.compressed) // 48)
    return _sliced(sizes, Launch(48, max(2, min(tiles, MOST_SPLITS)), alike=True))


def _address(name: str, angles: torch.Tensor | None, sizes: Sizes) -> int:
    shape = sizes.batch * sizes.queries, TURNED // 2
    fits = angles is not None and angles.dtype == torch.float32 and tuple(angles.shape) == shape
    if angles is None or not fits or not angles.is_contiguous():
        got = "None" if angles is None else f"{angles.dtype} {tuple(angles.shape)}"
        raise ValueError(f"{name} must be fp32 {shape}, contiguous, got {got}")
    return angles.data_ptr()


def _attend(
    data: input_t, sizes: Sizes, launch: Launch, turn: tuple[int | None, int | None] = (None, None)
) -> output_t:
    """custom_kernel by launch, which is right for any number of heads. turn: addresses of angles, or None."""
    rows = sizes.batch * sizes.queries * sizes.heads
    left = launch.splits if launch.splits > 1 else 0  # partial results, which need scratch memory
    partial = torch.empty((left, rows, HEAD_DIM), dtype=torch.float16, device=data.q.device)
    stats = torch.empty((left, rows, 4), dtype=torch.float32, device=data.q.device)
    run = build.cuda(SOURCE, "sm90").function("launch", *[c_void_p] * 14, *[c_int] * 14)
    code = run(
        *(t.data_ptr() for t in data),
        *turn,
        partial.data_ptr(),
        stats.data_ptr(),
        sizes.batch,
        sizes.queries,
        sizes.heads,
        sizes.window,
        sizes.compressed,
        sizes.page_window.bit_length() - 1,
        data.window.shape[1],
        sizes.page_compressed.bit_length() - 1,
        data.compressed.shape[1],
        launch.splits,
        launch.entries,
        launch.slices,
        launch.alike,
        early.allowed(),
    )
    build.check(code, "launch")
    return data.out, data.lse


def _attend_few_heads(
    data: input_t, sizes: Sizes, launch: FewHeads, turn: tuple[int | None, int | None] = (None, None)
) -> output_t:
    """custom_kernel by launch_few_heads, which is right for any number of heads. turn: addresses of angles, or None."""
    run = build.cuda(SOURCE, "sm90").function("launch_few_heads", *[c_void_p] * 12, *[c_int] * 11)
    code = run(
        *(t.data_ptr() for t in data),
        *turn,
        sizes.batch,
        sizes.queries,
        sizes.heads,
        sizes.window,
        sizes.compressed,
        sizes.page_window.bit_length() - 1,
        data.window.shape[1],
        sizes.page_compressed.bit_length() - 1,
        data.compressed.shape[1],
        launch.blocks,
        early.allowed(),
    )
    build.check(code, "launch")
    return data.out, data.lse
