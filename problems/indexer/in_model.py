"""Compute the model's choose: scores and the best k, straight from the model's pages of keys.

Keys lie at the places of their attention entries: both caches have pages of one size and share the blocks.
"""

from collections.abc import Sequence
from types import ModuleType

import torch
from task import DIM, HEADS, Data

from problems.dsv4_forward.cache.pages import Pages
from problems.dsv4_forward.prepared import Fitted
from problems.dsv4_forward.weights.config import PLAIN
from problems.dsv4_forward.weights.tree import ModelWeights


def fit(variant: ModuleType, weights: ModelWeights, wanted: Sequence[str]) -> Fitted:
    """Fit a variant as prepared.py says."""
    heads, width = weights.config.index_n_heads, weights.config.index_head_dim
    if weights.format in PLAIN:
        return Fitted(refused=dict.fromkeys(wanted, f"no MXFP4 keys in {weights.format}"))
    if heads not in HEADS or width != DIM:
        known = " or ".join(map(str, HEADS))
        return Fitted(refused=dict.fromkeys(wanted, f"index heads must be {known} of {DIM}, are {heads} of {width}"))

    def choose(
        q: torch.Tensor,
        weights: torch.Tensor,
        scale: float,
        keys: Pages,
        table: torch.Tensor,
        visible: torch.Tensor,
        entries: int,
        out: torch.Tensor,
    ) -> object:
        """Serve bf16 queries, fp32 weights, and pages of MXFP4 keys. ValueError as the problem's task.unpack.

        A scale above 0 changes no choice: the kernel gets none.
        """
        if (q.dtype, weights.dtype, keys.kind) != (torch.bfloat16, torch.float32, "index"):
            return NotImplemented
        variant.custom_kernel(Data(q, weights, keys.data, table, visible, out))
        return None

    return Fitted({"choose": choose})
