"""sm90_cluster: keys straight to FP8 wgmma, scores in shared memory, a cluster a row finds its top k; one launch."""

from ctypes import c_int, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch
from task import Sizes, input_t, output_t, unpack

from problems.common import build

TARGETS = ("sm90",)
SOURCE = Path(__file__).with_suffix(".cu")
ROOM = (227 - 35) * 1024  # bytes of shared memory of a block, beside the source's Shared
RING = {"mxfp4": 4352, "fp8": 6336}  # of these, a warp's ring of keys
BLOCKS = 132  # of threads that run at once on an H200: one a multiprocessor
TILE = 64  # entries of a warpgroup's product
LARGEST = 16  # blocks of a cluster
LEAST = 256  # entries that are worth a block of a cluster: a tile for each of its warpgroups
GATHERED = 10240  # entries of a row up to which one block of its cluster chooses, faster than all together
FEW_ROWS = 2 * BLOCKS  # above, rows are many, and small blocks run two to a multiprocessor
SMALL = 4096  # entries whose scores leave room for that
JOINED_ROWS = 264  # of the source: rows up to which blocks without a cluster score and the last of a row chooses
LONG = 65536  # entries of a row above which a unit has 16 entries, not 8
# Entries that each multiprocessor scores less in two launches, from which on they are faster: 2.3 us at 4.2 cycles an
# entry, which the second launch and the way through L2 take.
WORTH = 1000
Pointers, Numbers, Choice = c_void_p * 6, c_int64 * 8, c_int * 6


@dataclass(frozen=True)
class Launch:
    """How a row's entries are shared out. See Plan of the source."""

    cluster: int  # blocks of a cluster; 0: none, `chunks` blocks a row of which the last to end chooses
    slice: int  # entries that each has, at most
    room: int  # scores that a block has room for
    chunk: int = 0  # two launches: entries that a block of the first scores
    chunks: int = 0  # and such blocks a row
    warpgroups: int = 4

    def words(self) -> int:
        """Return how many scores of a row the workspace has room for."""
        return (
            self.slice + (self.slice >> self.room)
            if not self.cluster
            else self.slice * self.cluster
            if self.chunk
            else 0
        )


def most_entries(per_page: int, rings: int) -> int:
    """Return how many entries a slice may have: a word for each in shared memory, and one for each of its pages."""
    return (ROOM - rings - 8) // 4 * per_page // (per_page + 1) // TILE * TILE


def launch_for(sizes: Sizes) -> Launch:
    """Choose by shape only. ValueError: more entries than the largest cluster has room for.

    Clusters as large as let all rows run at once and as a slice is worth a block; larger ones if slices would be too
    long. Two launches where clusters are few, or a slice leaves no room for rings of keys.
    """
    rows, entries = sizes.batch * sizes.queries, sizes.blocks * sizes.per_page
    beside, most = most_entries(sizes.per_page, 16 * RING[sizes.kind]), most_entries(sizes.per_page, 0)
    tiles = -(-entries // TILE)
    if entries > LARGEST * most:
        raise ValueError(f"table must have room for at most {LARGEST * most} entries, got {entries}")
    if rows <= JOINED_ROWS:
        return joined(tiles, max(1, min(BLOCKS // rows, -(-tiles * TILE // LEAST))))
    cluster = 1
    while cluster < LARGEST and 2 * cluster * rows <= BLOCKS and 2 * cluster * LEAST <= tiles * TILE:
        cluster *= 2
    while cluster < LARGEST and -(-tiles // cluster) * TILE > beside:
        cluster *= 2
    part = -(-tiles // cluster) * TILE
    if part > beside or part - -(-entries * rows // BLOCKS) > WORTH:
        chunk = -(-tiles * rows // BLOCKS) * TILE
        return Launch(cluster, part, part, min(chunk, beside), -(-tiles * TILE // min(chunk, beside)))
    room = cluster * part if cluster * part <= GATHERED else part
    return Launch(cluster, part, room, warpgroups=2 if rows > FEW_ROWS and part <= SMALL else 4)


def joined(tiles: int, parts: int) -> Launch:
    """Blocks without clusters, `parts` a row."""
    return Launch(0, tiles * TILE, 4 if tiles * TILE > LONG else 3, chunks=parts)


def compile_for(target: str) -> list[build.Artefact]:
    """Compile for `target`, without a GPU."""
    return [build.cuda(SOURCE, target)]


def custom_kernel(data: input_t) -> output_t:
    """Write the chosen places into data.out, int32 (B, S, k), in the order of the entries, and return it.

    ValueError as unpack says, or a table for more than about 740,000 entries; RuntimeError: the launch.
    """
    sizes = unpack(data)
    made = build.cuda(SOURCE, "sm90")
    shift = sizes.per_page.bit_length() - 1
    launch = launch_for(sizes)
    rows = sizes.batch * sizes.queries
    scores = torch.empty(rows * launch.words(), dtype=torch.int32, device=data.q.device)
    numbers = Numbers(
        sizes.queries, sizes.heads, sizes.topk, sizes.blocks, shift, rows, data.keys.shape[1], sizes.kind == "fp8"
    )
    choice = Choice(launch.cluster, launch.slice, launch.room, launch.chunk, launch.chunks, launch.warpgroups)
    pointers = Pointers(*[tensor.data_ptr() for tensor in data])
    run = made.function("launch", Pointers, Numbers, Choice, c_void_p)
    build.check(run(pointers, numbers, choice, scores.data_ptr()), "launch")
    return data.out
