"""`Batch`: every index that one forward pass needs, without padding; `Planner` makes it.

A batch says where each new token is written and which entries it sees. `Planner.planned` takes lengths and blocks from
the host, for any number of tokens a sequence. `Planner.recorded` takes them from the device, for one token a sequence,
so that a graph can replay it. Neither waits for the device. The lists themselves are one kernel's work (cache/plan.py).
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain

import torch

from problems.dsv4_forward.cache.plan import WINDOW, Lists, Plan
from problems.dsv4_forward.weights.config import CSA, HCA

__all__ = ["WINDOW", "Batch", "Chunk", "Planner"]
MANY, EACH = 256, 64  # tokens, in all and of a sequence, from which on they are a chunk


@dataclass(frozen=True)
class Chunk:
    """Many tokens of each of B sequences, for attention that reads once what their lists repeat.

    int32: starts (B + 1,), the first of the N tokens of each sequence, and N; first (B,), these tokens' positions;
    window_index (B, nw), the window's rows of positions first - 127 on, -1 before position 0 and behind the last token;
    visible (N,): a token sees so many entries of the list of its sequence's last token, or None: each has its own list.
    last: int64 (B,), the last tokens.
    """

    starts: torch.Tensor
    first: torch.Tensor
    window_index: torch.Tensor
    last: torch.Tensor
    visible: torch.Tensor | None


@dataclass(frozen=True)
class Batch:
    """N new tokens of B sequences, in order; all tensors on the state's device. Ratios are those of the model's layers.

    tokens: int64 (N,). sequences: their numbers in the state; segments: of each sequence (first of the N, count, number
    in the state); last: int64 (B,), the last of the N of each; advance: int64 (B,), what commit adds to the lengths;
    stamps: the sequences' when this was planned, None if it may be replayed. planner: what planned it, one a state.
    plan: what the lists follow from.
    """

    tokens: torch.Tensor
    segments: tuple[tuple[int, int, int], ...]
    last: torch.Tensor
    sequences: tuple[int, ...]
    advance: torch.Tensor
    stamps: tuple[int, ...] | None
    planner: object
    plan: Plan

    @cached_property
    def room(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the lists lie in, int64 and int32: the op `start` writes it, and then `written` says so."""
        return self.plan.room()

    def written(self) -> None:
        """Take the lists as they are in `room`."""
        vars(self)["lists"] = self.plan.views(*self.room)

    @cached_property
    def lists(self) -> Lists:
        """The lists. If no op has written them, they are computed now, in torch."""
        self.plan.write(*self.room)
        return self.plan.views(*self.room)

    def chunk(self, ratio: int | None) -> Chunk | None:
        """None: the tokens are too few. ratio: tokens see all entries of it before them, or None: chosen ones."""
        if self.stamps is None or len(self.tokens) < max(MANY, EACH * len(self.last)):
            return None
        return Chunk(*self._sequences, self.last, None if ratio is None else self.lists.visible[ratio])

    @cached_property
    def _sequences(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """starts, first and window_index of a chunk."""
        lists, own = self.lists, WINDOW - 1  # a token's own position is the last of its list
        starts = torch.cat([self.last.new_zeros(1), self.last + 1])
        place = torch.arange(own + max(count for _, count, _ in self.segments), device=starts.device)
        token = starts[:-1].unsqueeze(1) + (place - own).clamp(min=0)
        index = lists.window_index[token.clamp(max=len(self.tokens) - 1), place.clamp(max=own)]
        index.masked_fill_(place >= starts.diff().unsqueeze(1) + own, -1)
        return starts.int(), lists.position[starts[:-1]].int(), index


@dataclass(frozen=True)
class Members:
    """What of a batch stays the same from step to step: which of the N tokens are whose. Fields as in Batch."""

    sequences: tuple[int, ...]
    segments: tuple[tuple[int, int, int], ...]
    sequence_ids: torch.Tensor
    advance: torch.Tensor
    sequence: torch.Tensor
    owner: torch.Tensor
    last: torch.Tensor


class Planner:
    """Make batches over one state's `length` int64 (S,) and `table` int32 (S, blocks).

    Holds the Members last used, at most KEPT of them, so that memory stays flat. ring: tokens in a window; unread: the
    index of the page that is never read; topk: entries that an indexer chooses.
    """

    KEPT = 16

    def __init__(
        self, length: torch.Tensor, table: torch.Tensor, ring: int, ratios: Sequence[int], unread: int, topk: int
    ) -> None:
        self.length, self.table = length, table
        self.ring, self.unread, self.topk = ring, unread, topk
        self.ratios = tuple(ratio for ratio in (CSA, HCA) if ratio in ratios)
        self.device = length.device
        self._range = torch.arange(len(table), device=self.device)
        self._ones = torch.ones_like(length)
        self._kept: dict[tuple[tuple[int, ...], tuple[int, ...]], Members] = {}

    def put(self, values: Iterable[int]) -> torch.Tensor:
        """int64 on the device, without waiting for it; one value or more."""
        held = torch.frombuffer(array("q", values), dtype=torch.int64)
        return held if self.device.type == "cpu" else held.pin_memory().to(self.device, non_blocking=True)

    def planned(
        self,
        sequences: tuple[int, ...],
        tokens: torch.Tensor | array,
        counts: Sequence[int],
        lengths: Sequence[int],
        stamps: tuple[int, ...],
    ) -> Batch:
        """Plan counts[b] new tokens of sequences[b], which has lengths[b] already, and blocks for all of them.

        tokens: int64 (N,) on the device, or an array of the host, which is copied there with the indices.
        """
        who = self._members(sequences, tuple(counts))
        position = chain.from_iterable(range(n, n + count) for n, count in zip(lengths, counts, strict=True))
        bound = max(n + count for n, count in zip(lengths, counts, strict=True))
        lists = [array("q", position), array("q") if isinstance(tokens, torch.Tensor) else tokens]
        lists += [_ends(ratio, who.segments, lengths) for ratio in self.ratios]
        where, listed, *emit = self._put_all(lists)
        every = tokens if isinstance(tokens, torch.Tensor) else listed
        return self._batch(who, every, where, dict(zip(self.ratios, emit, strict=True)), bound, stamps)

    def recorded(self, sequences: tuple[int, ...], tokens: torch.Tensor, bound: int) -> Batch:
        """Plan one token of each sequence, tokens int64 (B,). Only `bound` depends on the host's lengths."""
        every = self._range[: len(sequences)]
        if sequences == tuple(range(sequences[0], sequences[0] + len(sequences))):
            sequence_ids = self._range[sequences[0] : sequences[0] + len(sequences)]
        else:  # no transfer: a graph would repeat it, from host memory that has other contents by then
            sequence_ids = torch.stack([self._range[s] for s in sequences])
        segments = tuple((row, 1, s) for row, s in enumerate(sequences))
        who = Members(sequences, segments, sequence_ids, self._ones[: len(sequences)], sequence_ids, every, every)
        return self._batch(who, tokens, None, dict.fromkeys(self.ratios, every), bound, None)

    def _batch(
        self,
        who: Members,
        tokens: torch.Tensor,
        position: torch.Tensor | None,
        emit: dict[int, torch.Tensor],
        bound: int,
        stamps: tuple[int, ...] | None,
    ) -> Batch:
        plan = Plan(
            self.length,
            self.table,
            who.sequence,
            who.owner,
            who.sequence_ids,
            position,
            emit,
            self.ring,
            self.unread,
            bound,
            self.topk,
        )
        return Batch(tokens, who.segments, who.last, who.sequences, who.advance, stamps, self, plan)

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
        on = self._put_all([sequences, counts, sequence, owner, [end - 1 for end in ends]])
        return Members(sequences, segments, *on)

    def _put_all(self, lists: Sequence[Sequence[int]]) -> tuple[torch.Tensor, ...]:
        """Each list on the device, in one transfer."""
        packed = self.put(sum((array("q", values) for values in lists), array("q")))
        return packed.split_with_sizes([len(values) for values in lists])


def _ends(ratio: int, segments: Sequence[tuple[int, int, int]], lengths: Sequence[int]) -> list[int]:
    """The tokens that end an entry."""
    return [
        first + (entry + 1) * ratio - 1 - length
        for (first, count, _), length in zip(segments, lengths, strict=True)
        for entry in range(length // ratio, (length + count) // ratio)
    ]
