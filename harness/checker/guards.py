"""Secret bytes between the tensors of a buffer, where no call may write.

They are plain tensor operations, the same on a CPU and a GPU, and run before a call and after it, off the clock.
"""

import secrets
from typing import NamedTuple

import torch

from harness.results import text
from harness.runner.buffers import Shared

NAMED = 3  # places that a message names at most


class Gap(NamedTuple):
    """Bytes `first` to `last` of a memory. where: behind and before which tensors they are."""

    first: int
    last: int
    where: str


class Guards:
    """The gaps of one buffer, filled for one call. named: the specification and the name of all that lies in it."""

    def __init__(self, buffer: Shared, named: list[tuple[dict, str]]) -> None:
        memory, self._gaps = buffer.memory, _gaps(named, buffer.nbytes)
        sizes = [gap.last - gap.first for gap in self._gaps]
        source = torch.Generator(memory.device).manual_seed(secrets.randbits(63))
        self._secret = torch.randint(256, (sum(sizes),), generator=source, dtype=torch.uint8, device=memory.device)
        for gap, part in zip(self._gaps, self._secret.split(sizes), strict=True):
            memory[gap.first : gap.last].copy_(part)

    def fault(self, buffer: Shared) -> str:
        """Return how many bytes beside which tensors are others than before the call, "" if none."""
        present = torch.cat([buffer.memory[:0], *(buffer.memory[gap.first : gap.last] for gap in self._gaps)])
        if torch.equal(present, self._secret):
            return ""
        parts = (present != self._secret).cpu().split([gap.last - gap.first for gap in self._gaps])
        pairs = zip(self._gaps, (int(part.sum()) for part in parts), strict=True)
        places = [f"{text.counted(count, 'byte')} {gap.where}" for gap, count in pairs if count]
        more = [f"at {len(places) - NAMED} more places"] if len(places) > NAMED else []
        return f"the call wrote outside of its tensors: {', '.join(places[:NAMED] + more)}"


def _gaps(named: list[tuple[dict, str]], size: int) -> list[Gap]:
    """Return what these tensors leave free of a memory of so many bytes."""
    spans = sorted((spec["offset"], spec["offset"] + spec.get("most", spec["nbytes"]), name) for spec, name in named)
    ends = [(0, []), *((end, [f"behind {name}"]) for _, end, name in spans)]
    pairs = zip(ends, [*((start, [f"before {name}"]) for start, _, name in spans), (size, [])], strict=True)
    return [Gap(end, start, " and ".join(behind + before)) for (end, behind), (start, before) in pairs if start > end]
