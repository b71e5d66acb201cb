"""Compute the op choose with a variant of indexer: scores and the best k, straight from the model's pages of keys.

Keys lie at the places of their attention entries: both caches have pages of one size and share the blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch

from problems.common import load
from problems.dsv4_forward.adapters.common import Adapted, Fallback
from problems.dsv4_forward.cache.pages import Pages
from problems.dsv4_forward.weights.tree import ModelWeights

PROBLEM = "indexer"


@dataclass(frozen=True)
class Chooser:
    """The op. task: the problem's; kernel: a custom_kernel of it; fallback: the op choose that computes the calls that
    the kernel does not serve: queries that are not bf16, weights that are not fp32, pages of another kind.
    """

    task: ModuleType
    kernel: Callable[..., object]
    fallback: Callable[..., None]

    def __call__(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        scale: float,
        keys: Pages,
        table: torch.Tensor,
        visible: torch.Tensor,
        entries: int,
        out: torch.Tensor,
    ) -> None:
        """As chains.choose. ValueError as the problem's task.unpack.

        A scale above 0 changes no choice: the kernel gets none.
        """
        if (q.dtype, weights.dtype, keys.kind) != (torch.bfloat16, torch.float32, "index"):
            self.fallback(q, weights, scale, keys, table, visible, entries, out)
            return
        self.kernel(self.task.Data(q, weights, keys.data, table, visible, out))


def heads() -> tuple[int, ...]:
    """Return the numbers of index heads that the problem has."""
    return load.module(load.PROBLEMS / PROBLEM, "task").HEADS


def width() -> int:
    """Return the values of a key."""
    return load.module(load.PROBLEMS / PROBLEM, "task").DIM


def adapt(module: ModuleType, weights: ModelWeights, fallback: Fallback) -> Adapted:
    """Put `module`, a variant of the problem, into the op. -> the op choose, and no lines."""
    task = load.module(load.PROBLEMS / PROBLEM, "task")
    return Adapted({"choose": Chooser(task, module.custom_kernel, fallback.ops.choose)}, ())
