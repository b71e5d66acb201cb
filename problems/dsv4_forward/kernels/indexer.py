"""Compute the lightning indexer in CUDA: scores, the selection, places; one launch each.

In torch these are about 40 operations. The interfaces and formulas are those of torch_ops/indexer.py and chains.py.
"""

from collections.abc import Callable
from ctypes import c_float, c_int, c_longlong, c_void_p
from pathlib import Path

import torch

from problems.common import build
from problems.dsv4_forward.cache.pages import Pages
from problems.dsv4_forward.kernels.arguments import expect
from problems.dsv4_forward.kernels.cache_rows import KINDS as PAGE_KINDS

TARGETS = ("sm90", "sm100")
OPS = ("index_scores", "select", "locate", "choose")
SOURCE = Path(__file__).with_suffix(".cu")
KINDS = (torch.float32, torch.bfloat16)
MOST_CHOSEN = 2048  # entries that are sorted in shared memory
MOST_ENTRIES = 2**22 - 1  # of a sequence: a number has 22 bits
MOST_WIDTH = 256  # of a key, which the lanes of a warp hold


def compile_for(target: str) -> list[build.Artefact]:
    """Compile for `target`, without a GPU."""
    return [build.cuda(SOURCE, target)]


def ops(target: str) -> dict[str, Callable[..., None]]:
    """Build and load the kernels. -> by op. BuildError as build.cuda."""
    made = Indexer(build.cuda(SOURCE, target))
    return {
        "index_scores": made.index_scores,
        "select": made.select,
        "locate": made.locate,
        "choose": made.choose,
    }


class Indexer:
    """The ops on one build. ValueError, in each: a tensor that is not contiguous, or of another dtype or shape, sizes
    beyond those of the kernels.
    """

    def __init__(self, built: build.Artefact) -> None:
        p, i = c_void_p, c_int
        self._scores = built.function("launch_index_scores", p, p, p, c_longlong, i, i, i, p, p, c_float, *[i] * 7)
        self._chosen = built.function("launch_select", *[p] * 4, *[i] * 6)
        self._places = built.function("launch_locate", p, p, p, c_longlong, i, i, i, i)

    def index_scores(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        scale: float,
        keys: Pages,
        table: torch.Tensor,
        entries: int,
        out: torch.Tensor,
    ) -> None:
        """Compute torch_ops indexer.index_scores."""
        batch, tokens, heads, width = q.shape
        for name, tensor, shape in (("q", q, (batch, tokens, heads, keys.width)), ("weights", weights, q.shape[:3])):
            _kind(name, tensor)
            expect(name, tensor, tensor.dtype, tuple(shape))
        blocks = _blocks(table, batch, entries, keys.per_page)
        expect("out", out, torch.float32, (batch, tokens, entries))
        if width % 32 or not 0 < width <= MOST_WIDTH:
            raise ValueError(f"keys must have a multiple of 32, at most {MOST_WIDTH}, as their width, got {width}")
        if out.numel():
            size = keys.data[0].numel() * keys.data.element_size()
            code = self._scores(
                q.data_ptr(),
                weights.data_ptr(),
                keys.data.data_ptr(),
                size,
                PAGE_KINDS[keys.kind, keys.data.dtype],
                keys.per_page,
                width,
                table.data_ptr(),
                out.data_ptr(),
                scale,
                batch,
                tokens,
                heads,
                blocks,
                entries,
                KINDS.index(q.dtype),
                KINDS.index(weights.dtype),
            )
            build.check(code, "index_scores")

    def select(self, scores: torch.Tensor, visible: torch.Tensor, out: torch.Tensor) -> None:
        """Compute torch_ops indexer.select."""
        self._select(scores, visible, None, 1, out)

    def locate(self, ids: torch.Tensor, table: torch.Tensor, per_page: int, out: torch.Tensor) -> None:
        """Compute torch_ops indexer.locate."""
        batch, tokens, chosen = ids.shape
        blocks = _blocks(table, batch, 0, per_page)
        for name, tensor in (("ids", ids), ("out", out)):
            expect(name, tensor, torch.int32, (batch, tokens, chosen))
        if ids.numel():
            code = self._places(
                ids.data_ptr(), table.data_ptr(), out.data_ptr(), ids.numel(), chosen, tokens, blocks, per_page
            )
            build.check(code, "locate")

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
    ) -> None:
        """Compute chains.choose, in two launches."""
        scores = torch.empty(*q.shape[:2], entries, dtype=torch.float32, device=q.device)
        self.index_scores(q, weights, scale, keys, table, entries, scores)
        self._select(scores, visible, table, keys.per_page, out)

    def _select(
        self, scores: torch.Tensor, visible: torch.Tensor, table: torch.Tensor | None, per_page: int, out: torch.Tensor
    ) -> None:
        (batch, tokens, entries), chosen = scores.shape, out.shape[2]
        expect("scores", scores, torch.float32, (batch, tokens, entries))
        expect("visible", visible, torch.int32, (batch, tokens))
        expect("out", out, torch.int32, (batch, tokens, chosen))
        if entries > MOST_ENTRIES or chosen > MOST_CHOSEN:
            most = f"scores must be of at most {MOST_ENTRIES} entries, and out of {MOST_CHOSEN}"
            raise ValueError(f"{most}, got {entries} and {chosen}")
        blocks = 0 if table is None else _blocks(table, batch, entries, per_page)
        if out.numel():
            code = self._chosen(
                scores.data_ptr(),
                visible.data_ptr(),
                None if table is None else table.data_ptr(),
                out.data_ptr(),
                batch * tokens,
                entries,
                chosen,
                tokens,
                blocks,
                per_page,
            )
            build.check(code, "select")


def _blocks(table: torch.Tensor, batch: int, entries: int, per_page: int) -> int:
    """How many blocks a row of the table has. ValueError: too few, or it is no table."""
    blocks = table.shape[1]
    expect("table", table, torch.int32, (batch, blocks))
    if blocks < -(-entries // per_page):
        wanted = batch, -(-entries // per_page)
        raise ValueError(f"table must be {wanted} or wider for {entries} entries, got {tuple(table.shape)}")
    return blocks


def _kind(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in KINDS:
        raise ValueError(f"{name} must be fp32 or bf16, got {tensor.dtype}")
