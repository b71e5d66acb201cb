"""What the processes of one model tell each other within a pass: parts of a sum, and of logits.

Each rank sends its part to all others and adds up all parts in the order of ranks, so that all have equal bits. A wait
is bounded: PeerLostError says who was waited for, and where in the pass.
"""

import os
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

SETUP_S = 60.0  # until all ranks are there
LIMIT_S = 2.0  # that a rank waits for another within a pass
LEAST_OWN = 1024  # tokens of a pass whose sites are shared out


class PeerLostError(RuntimeError):
    """Another rank did not send its part: it died, or hangs."""


def own(rank: int, ranks: int, tokens: int) -> slice | None:
    """The tokens that are a rank's own, of equally many each; None where they cannot be."""
    each, left = divmod(tokens, ranks)
    return None if left else slice(rank * each, (rank + 1) * each)


class HostExchange:
    """Rank `rank` of `ranks`, one process each. Between processes of a CPU, by gloo."""

    def __init__(self, rank: int, ranks: int, limit_s: float = LIMIT_S) -> None:
        self.rank, self.ranks, self.limit_s = rank, ranks, limit_s

    @classmethod
    def of_environment(cls, limit_s: float = LIMIT_S) -> "HostExchange":
        """Meet the others that torchrun started. RuntimeError: not all of them came within SETUP_S."""
        dist.init_process_group("gloo", timeout=timedelta(seconds=SETUP_S))
        return cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), limit_s)

    def add(self, part: torch.Tensor, place: str) -> torch.Tensor:
        """part (N, d) -> the sum of all ranks' parts, in fp32, of the part's dtype. PeerLostError."""
        first, *rest = self._all(part, place)
        total = first.to(torch.float32, copy=True)
        for other in rest:
            total.add_(other)
        return total.to(part.dtype)

    def join(self, part: torch.Tensor, place: str) -> torch.Tensor:
        """part (M, n) -> all ranks' parts, one behind the other, (M, ranks * n). PeerLostError."""
        return torch.cat(self._all(part, place), dim=-1)

    def own(self, tokens: int, width: int) -> slice | None:
        """As layers.Exchange has it."""
        return own(self.rank, self.ranks, tokens) if tokens >= LEAST_OWN else None

    def scatter(self, part: torch.Tensor, place: str) -> torch.Tensor:
        """part (N, d) -> of the sum this rank's own rows. PeerLostError."""
        return self.add(part, place)[own(self.rank, self.ranks, len(part))]

    def gather(self, rows: torch.Tensor, place: str) -> torch.Tensor:
        """rows (n, d) -> those of all ranks, (N, d). PeerLostError."""
        return torch.cat(self._all(rows, place))

    def see(self) -> None:
        """Do nothing: who does not come is named where it is waited for."""

    def _all(self, part: torch.Tensor, place: str) -> list[torch.Tensor]:
        """Every rank's part, in the order of ranks."""
        mine = part.contiguous()
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        parts = {self.rank: mine, **{rank: torch.empty_like(mine) for rank in others}}
        start = time.monotonic()
        sent = [(rank, self._started(dist.isend, mine, rank, place)) for rank in others]
        for rank, work in [(rank, self._started(dist.irecv, parts[rank], rank, place)) for rank in others] + sent:
            left = max(0.001, self.limit_s - (time.monotonic() - start))
            try:
                work.wait(timedelta(seconds=left))
            except RuntimeError as error:
                raise self._lost(rank, start, place) from error
        return [parts[rank] for rank in range(self.ranks)]

    def _started(self, way: Callable, tensor: torch.Tensor, rank: int, place: str) -> dist.Work:
        try:
            return way(tensor.view(-1).view(torch.uint8), rank)
        except RuntimeError as error:
            raise self._lost(rank, time.monotonic(), place) from error

    def _lost(self, rank: int, start: float, place: str) -> PeerLostError:
        waited = time.monotonic() - start
        return PeerLostError(f"rank {self.rank} waited {waited:.1f} s for rank {rank} at {place}")
