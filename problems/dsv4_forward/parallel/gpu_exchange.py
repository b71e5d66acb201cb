"""The exchange between GPUs of one host (gpu_exchange.cu), over torch's symmetric memory.

Parts beyond CAPACITY, those of a prefill, go through NCCL: each GPU adds up a slice, in the order of ranks. The
kernel's waits are bounded, and the host asks for them: `see`. NCCL's are by the process group's time-out.
"""

import ctypes
from collections.abc import Sequence
from ctypes import c_int, c_uint, c_void_p
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric

from problems.common import build, load
from problems.dsv4_forward.kernels.arguments import fields
from problems.dsv4_forward.parallel.exchange import LIMIT_S, PeerLostError, own

SOURCE = Path(__file__).with_suffix(".cu")
MOST_RANKS, THREADS, BLOCKS, BOXES = 8, 256, 128, 3
CAPACITY = 2**21  # values of a part: 8 MiB in a box, 512 tokens of Flash


def compile_for(target: str) -> list[build.Artefact]:
    """Compile for `target`, without a GPU."""
    return [build.cuda(SOURCE, target)]


class _Progress(ctypes.Structure):
    _fields_ = fields("", "epoch finished words_0 words_1 words_2 lost")


class _Exchange(ctypes.Structure):
    _fields_ = [
        ("boxes", c_void_p * MOST_RANKS),
        *fields("progress lost part out", "rank ranks capacity count row bf16 place"),
        ("limit_us", c_uint),
    ]


class GpuExchange:
    """Rank `rank` of `ranks`, one process and one GPU each."""

    def __init__(self, rank: int, boxes: Sequence[int], capacity: int = CAPACITY, limit_s: float = LIMIT_S) -> None:
        """boxes: where each rank's lie in this process, fp32 (BOXES, ranks, capacity), full of -0."""
        self._launch = build.cuda(SOURCE, load.device_target("cuda")).function(
            "launch_exchange", c_void_p, c_int, c_int
        )
        self.rank, self.ranks, self.capacity, self.limit_s = rank, len(boxes), capacity, limit_s
        self._progress = torch.zeros(ctypes.sizeof(_Progress), dtype=torch.uint8, device="cuda")
        self._lost = torch.zeros(3, dtype=torch.int32, pin_memory=True)
        memory = (c_void_p * MOST_RANKS)(*boxes), self._progress.data_ptr(), self._lost.data_ptr(), None, None
        self._struct = _Exchange(*memory, rank, self.ranks, capacity, 0, 0, 0, 0, round(1e6 * limit_s))
        self._places: dict[str, int] = {}
        self._held: object = None

    @classmethod
    def of_group(cls, capacity: int = CAPACITY, limit_s: float = LIMIT_S) -> "GpuExchange":
        """Between the ranks of the process group, each of which calls this."""
        ranks = dist.get_world_size()
        here = torch.device("cuda", torch.cuda.current_device())
        memory = symmetric.empty(BOXES * ranks * capacity, dtype=torch.float32, device=here)
        memory.fill_(-0.0)
        handle = symmetric.rendezvous(memory, dist.group.WORLD)
        torch.cuda.synchronize()
        dist.barrier()  # nothing comes before all boxes are empty
        made = cls(dist.get_rank(), list(map(int, handle.buffer_ptrs)), capacity, limit_s)
        made._held = memory, handle
        return made

    def add(self, part: torch.Tensor, place: str) -> torch.Tensor:
        """part (N, d), fp32 or bf16 -> the sum of all ranks' parts, in fp32, of the part's dtype."""
        if part.numel() > self.capacity:
            flat = part.view(self.ranks, -1)  # slices of equally many values, whatever their rows
            return self.gather(self.scatter(flat, place), place).view(part.shape)
        out = torch.empty_like(part)
        self._exchange(part, out, 0, place)
        return out

    def join(self, part: torch.Tensor, place: str) -> torch.Tensor:
        """part fp32 (M, n) -> all ranks' parts, one behind the other, (M, ranks * n)."""
        rows, columns = part.shape
        out = part.new_empty(rows, self.ranks * columns)
        most = self.capacity // columns
        for first in range(0, rows, most):
            some = slice(first, first + most)
            self._exchange(part[some], out[some], columns, place)
        return out

    def own(self, tokens: int, width: int) -> slice | None:
        """As layers.Exchange has it: shared out is what goes through NCCL in any case."""
        return own(self.rank, self.ranks, tokens) if tokens * width > self.capacity else None

    def scatter(self, part: torch.Tensor, _: str) -> torch.Tensor:
        """part (N, d) -> of the sum this rank's own rows, (N / ranks, d)."""
        parts = part.view(self.ranks, -1)
        mine = torch.empty_like(parts)
        dist.all_to_all_single(mine, parts)
        total = mine[0].to(torch.float32, copy=True)
        for other in mine[1:]:
            total.add_(other)
        return total.to(part.dtype).view(-1, *part.shape[1:])

    def gather(self, rows: torch.Tensor, _: str) -> torch.Tensor:
        """rows (n, d) -> those of all ranks, (ranks * n, d)."""
        out = rows.new_empty(self.ranks * len(rows), *rows.shape[1:])
        dist.all_gather_into_tensor(out, rows.contiguous())
        return out

    def see(self) -> None:
        """Raise PeerLostError if a rank did not come in what the GPU has done so far."""
        found, place, rank = self._lost.tolist()
        if found:
            name = list(self._places)[place]
            raise PeerLostError(f"rank {self.rank} waited {self.limit_s:.1f} s for rank {rank} at {name}")

    def _exchange(self, part: torch.Tensor, out: torch.Tensor, row: int, place: str) -> None:
        """row: as gpu_exchange.cu's. ValueError: a part that it cannot take."""
        count, bf16 = part.numel(), part.dtype == torch.bfloat16
        if part.dtype != torch.float32 and (row or not bf16):
            raise ValueError(f"a part must be fp32, or where it is added bf16, got {part.dtype}")
        if not 0 < count <= self.capacity or part.shape[-1] % 4 or not part.is_contiguous():
            raise ValueError(
                f"a part must be contiguous, with rows of a multiple of 4 values, and 1 to {self.capacity} of them in "
                f"all, got {tuple(part.shape)}"
            )
        struct = self._struct
        struct.part, struct.out, struct.count, struct.row = part.data_ptr(), out.data_ptr(), count, row
        struct.bf16, struct.place = int(bf16), self._places.setdefault(place, len(self._places))
        blocks = min(BLOCKS, -(-count // (4 * THREADS)))
        build.check(self._launch(ctypes.byref(struct), blocks, 1), "exchange")
