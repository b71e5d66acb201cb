"""sm90_join: FP8 wgmma in blocks all over the GPU; the last block of a row finds its best runs, then entries."""

from ctypes import c_int, c_int64, c_void_p
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from task import Sizes, input_t, output_t, unpack

from problems.common import build, early

TARGETS = ("sm90",)
SOURCE = Path(__file__).with_suffix(".cu")
BLOCKS = 132  # of 512 threads that run at once on an H200: one a multiprocessor
TILE = 64  # entries of a warpgroup's product
LEAST = TILE  # entries that are worth a block
HELD = 4096  # entries of a row up to which a block that scores all of it keeps the scores in shared memory
SMALL = 2048  # entries of a row up to which half as large blocks are enough, two to a multiprocessor
FEW_ROWS = 2 * BLOCKS  # above, there are enough of them for that
RUN = 8  # scores that a thread loads together, and numbers of a level for one of the next
EACH = 512 * RUN  # scores of a search for each run of a thread
SPARE = 16  # of so many entries that a table has room for, rows are taken to see all but one
Pointers, Numbers, Choice = c_void_p * 6, c_int64 * 8, c_int * 5


@dataclass(frozen=True)
class Launch:
    """How rows are shared out. See Plan of the source."""

    parts: int  # blocks of a row
    entries: int  # that a row has, at most; whole tiles
    runs: int  # that a thread may hold, 1, 2 or 4
    held: bool  # one block a row, which keeps the scores in shared memory
    warpgroups: int = 4

    def words(self) -> int:
        """Return how many words of a row the workspace has."""
        return 0 if self.held else 2 * self.entries


def launch_for(sizes: Sizes) -> Launch:
    """Choose by shape only: as many blocks a row as let all rows run at once, and as there is work for."""
    rows, entries = sizes.batch * sizes.queries, -(-sizes.blocks * sizes.per_page // TILE) * TILE
    return shared_out(sizes, max(1, min(BLOCKS // rows, -(-entries // LEAST))))


def shared_out(sizes: Sizes, parts: int) -> Launch:
    """Share rows out to `parts` blocks each. ValueError: more places than a block can choose."""
    rows, entries = sizes.batch * sizes.queries, -(-sizes.blocks * sizes.per_page // TILE) * TILE
    held = parts == 1 and entries <= HELD
    warpgroups = 2 if held and rows > FEW_ROWS and entries <= SMALL else 4
    return Launch(parts, entries, runs_for(sizes.topk, entries), held, warpgroups)


def levels(entries: int, most: int) -> int:
    """Return how often a row is to be cut to an eighth until it has at most `most` numbers."""
    return 0 if entries <= most else 1 + levels(-(-entries // RUN), most)


def runs_for(topk: int, entries: int) -> int:
    """Return how many runs a thread holds: those with which most rows take the fewest searches, 4 only if there must
    be. Rows that see more than is guessed are right too. ValueError: more places than a block can choose.
    """
    can = [runs for runs in (1, 2, 4) if entries <= EACH * runs or topk * RUN <= EACH * runs]
    if not can:
        most, longer = EACH * 4 // RUN, EACH * 4
        raise ValueError(f"k must be at most {most} where a row has more than {longer} entries, got {topk}")
    likely = entries - entries // SPARE
    return min(can, key=lambda runs: (runs == 4, levels(likely, EACH * runs), runs))


def compile_for(target: str) -> list[build.Artefact]:
    """Compile for `target`, without a GPU."""
    return [build.cuda(SOURCE, target)]


def custom_kernel(data: input_t) -> output_t:
    """Write the chosen places into data.out, int32 (B, S, k), in the order of the entries, and return it.

    ValueError as unpack and shared_out say; RuntimeError: the launch.
    """
    sizes = unpack(data)
    _launch(data, sizes, launch_for(sizes))
    return data.out


def scores(data: input_t) -> torch.Tensor:
    """Do so, and return the scores, fp32 (B S, words of a row): those of the entries in order, then anything.

    Of entries that a query does not see, and of queries that see at most k, the scores are anything. Errors as of
    custom_kernel.
    """
    sizes = unpack(data)
    launch = replace(launch_for(sizes), held=False, warpgroups=4)
    return _launch(data, sizes, launch).view(torch.float32).view(-1, launch.words())


def _launch(data: input_t, sizes: Sizes, launch: Launch) -> torch.Tensor:
    """-> the workspace, int32."""
    made = build.cuda(SOURCE, "sm90")
    shift = sizes.per_page.bit_length() - 1
    rows = sizes.batch * sizes.queries
    workspace = torch.empty(rows * launch.words(), dtype=torch.int32, device=data.q.device)
    numbers = Numbers(
        sizes.queries, sizes.heads, sizes.topk, sizes.blocks, shift, rows, data.keys.shape[1], sizes.kind == "fp8"
    )
    choice = Choice(launch.parts, launch.entries, launch.held, launch.warpgroups, launch.runs)
    pointers = Pointers(*[tensor.data_ptr() for tensor in data])
    run = made.function("launch", Pointers, Numbers, Choice, c_void_p, c_int)
    build.check(run(pointers, numbers, choice, workspace.data_ptr(), early.allowed()), "launch")
    return workspace
