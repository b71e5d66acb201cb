"""Choose the entries that queries attend to in CUDA: scores in one launch, the best and their places in another.

In torch these are about 40 operations. The interface and formulas are those of torch_ops/indexer.py.
"""

from ctypes import POINTER, Structure, c_float
from pathlib import Path

import torch

from problems.common import build
from problems.dsv4_forward.cache.pages import Pages
from problems.dsv4_forward.kernels.arguments import Own, PagesStruct, expect, fields, is_bf16, pages_struct

MOST_CHOSEN = 2048  # entries that are sorted in shared memory
MOST_ENTRIES = 2**22 - 1  # of a sequence: a number has 22 bits
MOST_WIDTH = 256  # of a key, which the lanes of a warp hold


class _Call(Structure):
    _fields_ = [
        *fields("q weights table visible scores out", ""),
        ("keys", PagesStruct),
        ("scale", c_float),
        *fields("", "rows tokens heads blocks entries chosen q_bf16 weights_bf16"),
    ]


class Indexer(Own):
    """The op on one build."""

    SOURCE = Path(__file__).with_suffix(".cu")
    OPS = ("choose",)

    def __init__(self, built: build.Artefact) -> None:
        self._choose = built.function("launch_choose", POINTER(_Call))

    def choose(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        scale: float,
        keys: Pages,
        table: torch.Tensor,
        visible: torch.Tensor,
        entries: int,
        out: torch.Tensor,
    ) -> object:
        """Compute torch_ops indexer.choose, best first. ValueError: a tensor that is not contiguous, or of another
        dtype or shape.
        """
        (batch, tokens, heads, width), chosen, blocks = q.shape, out.shape[2], table.shape[1]
        if width % 32 or not 0 < width <= MOST_WIDTH or entries > MOST_ENTRIES or chosen > MOST_CHOSEN:
            return NotImplemented
        kinds = is_bf16("q", q), is_bf16("weights", weights)
        for name, tensor, dtype, shape in (
            ("q", q, q.dtype, (batch, tokens, heads, keys.width)),
            ("weights", weights, weights.dtype, (batch, tokens, heads)),
            ("table", table, torch.int32, (batch, blocks)),
            ("visible", visible, torch.int32, (batch, tokens)),
            ("out", out, torch.int32, (batch, tokens, chosen)),
        ):
            expect(name, tensor, dtype, shape)
        if blocks < -(-entries // keys.per_page):
            raise ValueError(f"table must have blocks of {keys.per_page} for {entries} entries, got {blocks}")
        if out.numel():
            scores = torch.empty(batch, tokens, entries, dtype=torch.float32, device=q.device)
            pointers = (tensor.data_ptr() for tensor in (q, weights, table, visible, scores, out))
            sizes = batch * tokens, tokens, heads, blocks, entries, chosen
            build.check(self._choose(_Call(*pointers, pages_struct(keys), scale, *sizes, *kinds)), "choose")
        return None
