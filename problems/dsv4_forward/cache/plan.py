"""`Plan`: what the index lists of a batch follow from, and where they lie in two buffers.

An entry's place is its page, which the block table names, times the entries of a page, plus its row there. A sequence's
window is a ring of `ring` tokens: token p is at place p % ring of it. The lists are what the op `start` writes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch

from problems.dsv4_forward.weights.config import BLOCK_TOKENS, CSA, HCA

WINDOW = 128  # tokens that a query sees of the window, itself among them
ALIGN = 256  # bytes; each list begins at a multiple, as the kernels that read them want it
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Lists:
    """Views of the lists of N tokens of B sequences, as Plan.views makes them.

    int64: position (N,); window_target (N,), the row of the window's pages that the token's key is written to; target,
    by ratio (Em,): the row of the cache that the entry of the token emit[i] is written to, of the last page, which is
    never read, if the token ends no entry.
    int32: visible, by ratio (N,): entries that the token sees; window_index (N, 128), the window's rows at
    position - 127..position, -1 before token 0; rows (B, blocks), those of the block table, as far as `bound`;
    csa_index (N, entries), hca_index (N, entries): places of all entries, -1 beyond `visible`. csa_index None: there
    are more entries than index_topk, so that an indexer chooses; each None: no layer has the ratio.
    """

    position: torch.Tensor
    window_target: torch.Tensor
    window_index: torch.Tensor
    rows: torch.Tensor
    visible: dict[int, torch.Tensor]
    target: dict[int, torch.Tensor]
    csa_index: torch.Tensor | None
    hca_index: torch.Tensor | None


@dataclass(frozen=True)
class Plan:
    """N tokens of B sequences: all that their lists follow from. Tensors are on one device.

    length: int64 (S,), table: int32 (S, blocks a sequence), contiguous: the state's; sequence: int64 (N,), the number
    in the state of each token's sequence; owner: int64 (N,), its number in the batch; sequence_ids: int64 (B,), the
    batch's numbers in the state; position: int64 (N,), or None: each sequence has one token, behind its `length`; emit:
    by ratio int64 (Em,), tokens that may end an entry. ring: tokens in a window; unread: the page that is never read;
    bound: the host's upper bound of position + 1; topk: entries that an indexer chooses.
    """

    length: torch.Tensor
    table: torch.Tensor
    sequence: torch.Tensor
    owner: torch.Tensor
    sequence_ids: torch.Tensor
    position: torch.Tensor | None
    emit: Mapping[int, torch.Tensor]
    ring: int
    unread: int
    bound: int
    topk: int

    @property
    def entries(self) -> dict[int, int]:
        """The host's bound of `visible`, by ratio."""
        return {ratio: self.bound // ratio for ratio in self.emit}

    def number_shapes(self) -> Shapes:
        """Shapes of the int64 lists, in the order in which they lie."""
        tokens = (len(self.sequence),)
        shapes: Shapes = {"position": tokens, "window_target": tokens}
        for ratio, emit in self.emit.items():
            shapes[f"target{ratio}"] = (len(emit),)
        return shapes

    def list_shapes(self) -> Shapes:
        """Shapes of the int32 lists, in the order in which they lie."""
        tokens, blocks = len(self.sequence), -(-self.bound // BLOCK_TOKENS)
        shapes: Shapes = {"window_index": (tokens, WINDOW), "rows": (len(self.sequence_ids), blocks)}
        shapes |= {f"visible{ratio}": (tokens,) for ratio in self.emit}
        if CSA in self.emit and self.entries[CSA] <= self.topk:
            shapes["csa_index"] = tokens, self.entries[CSA]
        if HCA in self.emit:
            shapes["hca_index"] = tokens, self.entries[HCA]
        return shapes

    def room(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Make unwritten buffers for the lists: int64 (words,) and int32 (words,)."""
        kinds = (self.number_shapes(), torch.int64), (self.list_shapes(), torch.int32)
        numbers, lists = (
            torch.empty(sum(_words(shape, dtype) for shape in shapes.values()), dtype=dtype, device=self.table.device)
            for shapes, dtype in kinds
        )
        return numbers, lists

    def views(self, numbers: torch.Tensor, lists: torch.Tensor) -> Lists:
        """The lists in such buffers."""
        found = dict(_views(self.number_shapes(), numbers)) | dict(_views(self.list_shapes(), lists))
        by_ratio = {kind: {ratio: found[f"{kind}{ratio}"] for ratio in self.emit} for kind in ("visible", "target")}
        return Lists(
            *(found[name] for name in ("position", "window_target", "window_index", "rows")),
            **by_ratio,
            csa_index=found.get("csa_index"),
            hca_index=found.get("hca_index"),
        )

    def write(self, numbers: torch.Tensor, lists: torch.Tensor) -> None:
        """Compute the lists in torch; the reference of the op `start` does."""
        out = self.views(numbers, lists)
        given = self.length.index_select(0, self.sequence) if self.position is None else self.position
        position = out.position.copy_(given)
        base = self.sequence * self.ring
        torch.add(position % self.ring, base, out=out.window_target)
        token = position.unsqueeze(1) + torch.arange(1 - WINDOW, 1, device=position.device)
        out.window_index.copy_(torch.where(token < 0, -1, token % self.ring + base.unsqueeze(1)))
        out.rows.copy_(self.table.index_select(0, self.sequence_ids)[:, : out.rows.shape[1]])
        for ratio, emit in self.emit.items():
            torch.div(position + 1, ratio, rounding_mode="floor", out=out.visible[ratio])
            out.target[ratio].copy_(self._target(position[emit], self.sequence[emit], ratio))
        for ratio, index in ((CSA, out.csa_index), (HCA, out.hca_index)):
            if index is not None and index.numel():
                entry = torch.arange(index.shape[1], device=index.device, dtype=torch.int32)
                place = locate(out.rows, self.owner, entry.expand(len(index), -1), BLOCK_TOKENS // ratio)
                index.copy_(torch.where(entry < out.visible[ratio].unsqueeze(1), place, -1))

    def _target(self, position: torch.Tensor, sequence: torch.Tensor, ratio: int) -> torch.Tensor:
        """position, sequence: int64 (Em,). Behind the table nothing is written either."""
        per_page, block = BLOCK_TOKENS // ratio, position // BLOCK_TOKENS
        page = self.table[sequence, block.clamp(max=self.table.shape[1] - 1)]
        ends = ((position + 1) % ratio == 0) & (block < self.table.shape[1])
        return torch.where(ends, page * per_page + position // ratio % per_page, self.unread * per_page)


def locate(rows: torch.Tensor, owner: torch.Tensor, ids: torch.Tensor, per_page: int) -> torch.Tensor:
    """Return the places of entries, int32 (N, k), by number within their sequence, int32 ids (N, k); -1 stays -1.

    rows: int32 (B, blocks); owner: int64 (N,), the row of each; per_page: entries of a page, a power of two.
    """
    # Block -1, of entry -1, is the last of the row: read, and masked in the end.
    page = rows[owner.unsqueeze(1), ids >> per_page.bit_length() - 1]
    return page.mul_(per_page).add_(ids & per_page - 1).masked_fill_(ids < 0, -1)


def _words(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    unit = ALIGN // dtype.itemsize
    return -(-prod(shape) // unit) * unit


def _views(shapes: Shapes, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    start = 0
    for name, shape in shapes.items():
        yield name, buffer[start : start + prod(shape)].view(shape)
        start += _words(shape, buffer.dtype)
