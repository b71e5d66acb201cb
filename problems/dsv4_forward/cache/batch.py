"""`Batch`: every index that one forward pass needs, without padding; `Planner` makes it.

A batch says where each new token is written and which entries it sees. `Planner.planned` computes it on the host, for
any number of tokens a sequence, with few operations on the device. `Planner.recorded` computes it from the device's
lengths, for one token a sequence, so that a graph can replay it. Neither waits for the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch

from problems.dsv4_forward.weights.config import BLOCK_TOKENS, CSA, HCA

WINDOW = 128  # tokens that a query sees of the window, itself among them
NEVER = -(2**30)  # added to any place in a ring it stays negative


@dataclass(frozen=True)
class Batch:
    """N new tokens of B sequences, in order; all tensors on the state's device. Ratios are those of the model's layers.

    By token, int64 (N,): tokens; sequence, the number of its sequence in the state; owner, that of its sequence in this
    batch, below B; position; window_target, the row of the window's pages that its key is written to. window_index:
    int32 (N, 128), the window's rows at position - 127..position, -1 before token 0.
    By sequence: sequences, their numbers in the state, and sequence_ids, the same as int64 (B,); segments: (first of
    the N, count, number in the state); last: int64 (B,), the last of the N; rows: int32 (B, blocks), the rows of the
    table, as far as `bound`; advance: int64 (B,), what commit adds to the lengths; stamps: the sequences' when this was
    planned, None if it may be replayed. bound: the host's upper bound of position + 1. planner: what planned it, one a
    state.
    By ratio: emit: int64 (Em,), those of the N that may end an entry; target: int64 (Em,), the row of the cache that
    the entry is written to (of the last page, which is never read, if the token ends none); visible: int64 (N,),
    entries that the token sees; entries: int, the host's bound of that. hca_index: int32 (N, entries[HCA]), -1 beyond
    `visible`.
    """

    tokens: torch.Tensor
    sequence: torch.Tensor
    owner: torch.Tensor
    position: torch.Tensor
    segments: tuple[tuple[int, int, int], ...]
    last: torch.Tensor
    sequences: tuple[int, ...]
    bound: int
    window_target: torch.Tensor
    window_index: torch.Tensor
    emit: dict[int, torch.Tensor]
    target: dict[int, torch.Tensor]
    visible: dict[int, torch.Tensor]
    entries: dict[int, int]
    hca_index: torch.Tensor | None
    rows: torch.Tensor
    sequence_ids: torch.Tensor
    advance: torch.Tensor
    stamps: tuple[int, ...] | None
    planner: object

    def locate(self, ids: torch.Tensor) -> torch.Tensor:
        """CSA entries by number within their sequence, int32 (N, k), -> by place in the cache; -1 stays."""
        per_page = BLOCK_TOKENS // CSA
        # Block -1, of entry -1, is the last of the row: read, and masked in the end.
        page = self.rows[self.owner.unsqueeze(1), ids >> per_page.bit_length() - 1]
        return page.mul_(per_page).add_(ids & per_page - 1).masked_fill_(ids < 0, -1)


@dataclass(frozen=True)
class Members:
    """What of a batch stays the same from step to step: which of the N tokens are whose. Fields as in Batch.

    base: int32 (N, 1), where the window of the token's sequence begins.
    """

    sequences: tuple[int, ...]
    segments: tuple[tuple[int, int, int], ...]
    sequence_ids: torch.Tensor
    advance: torch.Tensor
    sequence: torch.Tensor
    owner: torch.Tensor
    last: torch.Tensor
    base: torch.Tensor


class Planner:
    """Make batches over one state's `length` int64 (S,) and `table` int32 (S, blocks).

    Holds constants, and the Members last used, at most KEPT of them, so that memory stays flat.
    ring: tokens in a window; unread: the index of the page that is never read.
    """

    KEPT = 16

    def __init__(
        self, length: torch.Tensor, table: torch.Tensor, ring: int, ratios: Sequence[int], unread: int
    ) -> None:  # fmt: skip
        self.length, self.table = length, table
        self.ring, self.unread = ring, unread
        self.ratios = tuple(ratio for ratio in (CSA, HCA) if ratio in ratios)
        self.device = length.device
        self._index = _ring_index(ring).to(self.device)
        self._range = torch.arange(max(table.shape), device=self.device)
        self._ones = torch.ones_like(length)
        self._kept: dict[tuple[tuple[int, ...], tuple[int, ...]], Members] = {}

    def put(self, values: list[int]) -> torch.Tensor:
        """int64 on the device, without waiting for it."""
        if self.device.type == "cpu":
            return torch.tensor(values, dtype=torch.int64)
        pinned = torch.tensor(values, dtype=torch.int64, pin_memory=True)
        return pinned.to(self.device, non_blocking=True)

    def planned(
        self, sequences: tuple[int, ...], tokens: torch.Tensor | list[int], counts: Sequence[int],
        lengths: Sequence[int], blocks: Sequence[Sequence[int]], stamps: tuple[int, ...],
    ) -> Batch:  # fmt: skip
        """Plan counts[b] new tokens of sequences[b], which has lengths[b] already, and blocks[b] for all of them.

        tokens: int64 (N,) on the device, or a list, which is copied there with the indices.
        """
        who = self._members(sequences, tuple(counts))
        position = [p for n, count in zip(lengths, counts, strict=True) for p in range(n, n + count)]
        bound = max(n + count for n, count in zip(lengths, counts, strict=True))
        lists: list[list[int]] = [position, [p if p < self.ring else self.ring + p % self.ring for p in position]]
        lists.append([] if isinstance(tokens, torch.Tensor) else tokens)
        for ratio in self.ratios:
            lists += [[(p + 1) // ratio for p in position], *_ends(ratio, who.segments, lengths, blocks)]
        fields = iter(self._put_all(lists))
        where, index, listed = next(fields), next(fields), next(fields)
        visible, emit, target = {}, {}, {}
        for ratio in self.ratios:
            visible[ratio], emit[ratio], target[ratio] = next(fields), next(fields), next(fields)
        alike = len(position) == len(sequences) and min(position) // HCA == bound // HCA
        return self._batch(
            who, tokens if isinstance(tokens, torch.Tensor) else listed, where, index, visible, emit, target, bound,
            stamps, alike,
        )  # fmt: skip

    def recorded(self, sequences: tuple[int, ...], tokens: torch.Tensor, bound: int) -> Batch:
        """Plan one token of each sequence, tokens int64 (B,). Only `bound` depends on the host's lengths."""
        every = self._range[: len(sequences)]
        if sequences == tuple(range(sequences[0], sequences[0] + len(sequences))):
            sequence_ids = self._range[sequences[0] : sequences[0] + len(sequences)]
        else:  # no transfer: a graph would repeat it, from host memory that has other contents by then
            sequence_ids = torch.stack([self._range[s] for s in sequences])
        position = self.length.index_select(0, sequence_ids)
        after = position + 1
        visible, emit, target = {}, {}, {}
        for ratio in self.ratios:
            per_page, entry = BLOCK_TOKENS // ratio, position // ratio
            place = self.table[sequence_ids, entry // per_page] * per_page + entry % per_page
            visible[ratio], emit[ratio] = after // ratio, every
            target[ratio] = torch.where(after % ratio == 0, place, self.unread * per_page)
        segments = tuple((row, 1, s) for row, s in enumerate(sequences))
        base = (sequence_ids * self.ring).to(torch.int32).unsqueeze(1)
        who = Members(sequences, segments, sequence_ids, self._ones[: len(sequences)], sequence_ids, every, every, base)
        index = torch.minimum(position, position % self.ring + self.ring)
        return self._batch(who, tokens, position, index, visible, emit, target, bound, None)

    def _batch(
        self, who: Members, tokens: torch.Tensor, position: torch.Tensor, index: torch.Tensor,
        visible: dict[int, torch.Tensor], emit: dict[int, torch.Tensor], target: dict[int, torch.Tensor], bound: int,
        stamps: tuple[int, ...] | None, alike: bool = False,
    ) -> Batch:  # fmt: skip
        """index: int64 (N,), rows of _ring_index; alike: each sequence has one token, and all see as many blocks."""
        rows = self._rows(who, bound)
        hca = rows[:, : bound // HCA].contiguous() if HCA in visible else None
        if HCA in visible and not alike:
            hca = self._hca_index(hca, who.owner, visible[HCA])
        window = self._index.index_select(0, index).add_(who.base).clamp_(min=-1)
        return Batch(
            tokens=tokens, sequence=who.sequence, owner=who.owner, position=position, segments=who.segments,
            last=who.last, sequences=who.sequences, bound=bound, window_target=window[:, -1].to(torch.int64),
            window_index=window, emit=emit, target=target, visible=visible,
            entries={ratio: bound // ratio for ratio in self.ratios}, hca_index=hca, rows=rows,
            sequence_ids=who.sequence_ids, advance=who.advance, stamps=stamps, planner=self,
        )  # fmt: skip

    def _rows(self, who: Members, bound: int) -> torch.Tensor:
        blocks = -(-bound // BLOCK_TOKENS)
        if len(who.sequences) == 1:
            return self.table[who.sequences[0] : who.sequences[0] + 1, :blocks]
        return self.table[:, :blocks].index_select(0, who.sequence_ids)

    def _hca_index(self, rows: torch.Tensor, owner: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        """rows: int32 (B, entries), one entry a block, so the table itself. -> (N, entries), -1 beyond what is seen."""
        index = rows if len(rows) in (1, len(owner)) else rows[owner]
        return torch.where(self._range[: rows.shape[1]] < visible.unsqueeze(1), index, -1)

    def counted(self, sequences: tuple[int, ...], counts: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sequences and counts on the device, int64 (B,)."""
        who = self._members(sequences, counts)
        return who.sequence_ids, who.advance

    def _members(self, sequences: tuple[int, ...], counts: tuple[int, ...]) -> Members:
        if (found := self._kept.get((sequences, counts))) is None:
            if len(self._kept) == self.KEPT:
                del self._kept[next(iter(self._kept))]
            found = self._kept[sequences, counts] = self._new_members(sequences, counts)
        return found

    def _new_members(self, sequences: tuple[int, ...], counts: tuple[int, ...]) -> Members:
        ends = list(accumulate(counts))
        segments = tuple((end - n, n, number) for end, n, number in zip(ends, counts, sequences, strict=True))
        owner = [row for row, count in enumerate(counts) for _ in range(count)]
        sequence = [sequences[row] for row in owner]
        last, base = [end - 1 for end in ends], [number * self.ring for number in sequence]
        on = self._put_all([list(sequences), list(counts), sequence, owner, last, base])
        return Members(sequences, segments, *on[:-1], on[-1].to(torch.int32).unsqueeze(1))

    def _put_all(self, lists: list[list[int]]) -> tuple[torch.Tensor, ...]:
        """Each list on the device, in one transfer."""
        packed = self.put(list(chain.from_iterable(lists)))
        return packed.split_with_sizes([len(values) for values in lists])


def _ends(
    ratio: int, segments: Sequence[tuple[int, int, int]], lengths: Sequence[int], blocks: Sequence[Sequence[int]]
) -> tuple[list[int], list[int]]:
    """The entries that the tokens complete: which token ends each, and its place in the cache."""
    emit, target, per_page = [], [], BLOCK_TOKENS // ratio
    for (first, count, _), length, owned in zip(segments, lengths, blocks, strict=True):
        for entry in range(length // ratio, (length + count) // ratio):
            emit.append(first + (entry + 1) * ratio - 1 - length)
            target.append(owned[entry // per_page] * per_page + entry % per_page)
    return emit, target


def _ring_index(ring: int) -> torch.Tensor:
    """int32 (2 * ring, 128): places in the ring of the tokens p - 127..p; row p for p < ring, ring + p % ring after.

    Tokens before token 0 are NEVER.
    """
    token = torch.arange(2 * ring).unsqueeze(1) + torch.arange(1 - WINDOW, 1)
    return torch.where(token < 0, NEVER, token % ring).to(torch.int32)
