"""Secret bytes between the tensors of a buffer, where no call may write.

They are plain tensor operations, the same on a CPU and a GPU, and run before a call and after it, off the clock.
"""

import itertools
import secrets
from dataclasses import dataclass

import torch

from harness.runner.buffers import Shared

NAMED = 3  # places that a message names at most


@dataclass(frozen=True)
class Gap:
    """Bytes `first` to `last` of a memory. behind, before: the names of the tensors there, "" at an end of it."""

    first: int
    last: int
    behind: str
    before: str


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
        found = torch.cat([buffer.memory[:0], *(buffer.memory[gap.first : gap.last] for gap in self._gaps)])
        if torch.equal(found, self._secret):
            return ""
        said = _places(self._gaps, (found != self._secret).cpu())
        more = [f"at {len(said) - NAMED} more places"] if len(said) > NAMED else []
        return f"the call wrote outside of its tensors: {', '.join(said[:NAMED] + more)}"


def _gaps(named: list[tuple[dict, str]], size: int) -> list[Gap]:
    """Return what these tensors leave free of a memory of so many bytes."""
    spans = sorted((spec["offset"], spec["offset"] + spec.get("most", spec["nbytes"]), name) for spec, name in named)
    edges = [(0, 0, ""), *spans, (size, size, "")]
    pairs = itertools.pairwise(edges)
    return [Gap(end, start, behind, before) for (_, end, behind), (start, _, before) in pairs if start > end]


def _places(gaps: list[Gap], changed: torch.Tensor) -> list[str]:
    """Return where bytes of the gaps have changed, in words; each belongs to the tensor that is nearer."""
    found = []
    for gap, part in zip(gaps, changed.split([gap.last - gap.first for gap in gaps]), strict=True):
        middle = len(part) // 2 if gap.behind and gap.before else len(part) if gap.behind else 0
        for count, where, name in (
            (int(part[:middle].sum()), "behind", gap.behind),
            (int(part[middle:].sum()), "before", gap.before),
        ):
            if count:
                found.append(f"{count} byte{'s' if count > 1 else ''} {where} {name}")
    return found
