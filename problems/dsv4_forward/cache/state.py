"""Everything a running model remembers of its sequences, allocated once: windows, tails and paged caches.

A sequence has a fixed-size part of its own (a ring of the last tokens' window entries, and rings of the tokens that its
compressors have yet to pool) and a row of the block table, which names the blocks of its compressed entries in every
layer. Positions decide what is read: nothing is cleared when a sequence ends, goes back or begins. Source: section 3.5
of the technical report (the two caches) and vLLM's state cache (rings addressed by position, so going back is free).
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence

import torch

from problems.dsv4_forward.cache.batch import WINDOW, Batch, Planner
from problems.dsv4_forward.cache.blocks import Blocks, OutOfBlocks, Prefix
from problems.dsv4_forward.cache.state_layout import CACHES, PAGE_TOKENS, SAVED_ROWS, WINDOW_PAGES, LayerState, Slab
from problems.dsv4_forward.weights.config import BLOCK_TOKENS, CSA, HCA, Config

__all__ = ["Batch", "LayerState", "OutOfBlocks", "State"]
Tokens = Sequence[int] | torch.Tensor


class State:
    """State of up to `sequences` sequences over `blocks` blocks of BLOCK_TOKENS tokens, in one buffer of bytes.

    A slot is a sequence's number. Between plan() or step() and commit() a model reads and writes `layers` (and `mtp`).
    chunk: most new tokens of a sequence in a plan, and how far one may go back at least. snapshots: how many published
    prefixes are kept at once. length: int64 (S,), table: int32 (S, blocks a sequence), both on the device; lengths: the
    host's; ring: tokens in a window; capacity: tokens that a sequence may have.
    """

    def __init__(
        self, cfg: Config, fmt: str, sequences: int, blocks: int, chunk: int = 128,
        device: torch.device | str = "cpu", buffer: torch.Tensor | None = None, snapshots: int = 4,
    ) -> None:  # fmt: skip
        """buffer: uint8 (nbytes(...),), whose contents do not matter; one of zeros on `device` if None."""
        slab = Slab(cfg, fmt, sequences, blocks, chunk, snapshots)
        if buffer is None:
            buffer = torch.zeros(slab.nbytes(), dtype=torch.uint8, device=device)
        self.slab, self.buffer = slab, buffer
        self.chunk, self.ring, self.capacity, self.blocks = chunk, slab.ring, slab.capacity, blocks
        self._regions = slab.views(buffer)
        self.length, self._active, self.table = (self._regions[name] for name in ("length", "active", "table"))
        layers = slab.layers(self._regions)
        self.layers = layers[: cfg.num_hidden_layers]
        self.mtp = layers[-1] if cfg.num_nextn_predict_layers else None
        self._planner = Planner(self.length, self.table, self.ring, cfg.ratios, unread=blocks)
        self._blank()
        self.length.zero_()
        self._active.zero_()
        self.table.fill_(blocks)

    @staticmethod
    def nbytes(cfg: Config, fmt: str, sequences: int, blocks: int, chunk: int = 128, snapshots: int = 4) -> int:
        """Size of the buffer, in bytes."""
        return Slab(cfg, fmt, sequences, blocks, chunk, snapshots).nbytes()

    # Sequences.

    def open(self, tokens: Tokens | None = None) -> tuple[int, int]:
        """-> (slot, matched). With tokens, the sequence begins as the longest published prefix of them, less than all:
        `matched` of them (a multiple of BLOCK_TOKENS) are in it already. RuntimeError: no slot is free.
        """
        if all(self._open):
            raise RuntimeError(f"all {len(self._open)} sequences are open: close one first")
        slot = self._open.index(False)
        prefix = None if tokens is None else self.pool.find(_host(tokens)[:-1])
        self._open[slot] = True
        self._active[slot].fill_(1)
        self._set_length(slot, 0)
        self.anchor[slot] = self.written[slot] = 0
        if prefix:
            self._resume(slot, prefix)
        return slot, self.lengths[slot]

    def close(self, slot: int) -> None:
        """Give back the slot and its blocks. ValueError: it is not open."""
        self._require(slot)
        self._truncate(slot, 0)
        self._set_length(slot, 0)
        self._active[slot].fill_(0)
        self._open[slot] = False

    def rewind(self, slot: int, length: int) -> None:
        """Forget all but the first `length` tokens (0, or what the rings still hold), and the blocks after them.

        ValueError, naming the shortest length that one may go back to, or that it is not one.
        """
        self._require(slot)
        if not 0 <= length <= self.lengths[slot]:
            raise ValueError(f"length must be 0 to {self.lengths[slot]} (sequence {slot}), got {length}")
        if not self._holds(slot, length):
            raise ValueError(f"sequence {slot} can go back to {self.floor(slot)} or more tokens, or 0, got {length}")
        self._truncate(slot, length)
        self._set_length(slot, length)
        if not length:
            self.anchor[slot] = self.written[slot] = 0

    def floor(self, slot: int) -> int:
        """The shortest length, but for 0, from which on the sequence may be rewound to any."""
        length = self.lengths[slot]
        while length and self._holds(slot, length - 1):
            length -= 1
        return length

    def publish(self, slot: int, tokens: Tokens) -> int:
        """Offer the sequence's whole blocks for reuse; tokens: the sequence's. -> how many tokens are on offer.

        ValueError: tokens are too few, or the end of the last whole block is no longer in the rings.
        """
        self._require(slot)
        count = self.lengths[slot] // BLOCK_TOKENS
        end = count * BLOCK_TOKENS
        if len(tokens) < end:
            raise ValueError(f"tokens must be the {end} or more of sequence {slot}, got {len(tokens)}")
        if not count:
            return 0
        if not self._holds(slot, end):
            raise ValueError(f"sequence {slot} no longer holds what {end} tokens need, only {self.floor(slot)} or more")
        if prefix := self.pool.publish(_host(tokens[:end]), self.owned[slot][:count]):
            for live, saved in self._saved(slot, prefix):
                saved.copy_(live)
        return end

    # One forward pass.

    def plan(self, tokens: Mapping[int, Tokens]) -> Batch:
        """Any number of new tokens, 1 to chunk, for each of some sequences (slot -> tokens). Reserves their blocks;
        lengths stay until commit(). OutOfBlocks, ValueError: nothing was changed.
        """
        counts = {slot: len(part) for slot, part in tokens.items()}
        if not counts:
            raise ValueError("tokens must name a sequence or more, got none")
        for slot, count in counts.items():
            if not 1 <= count <= self.chunk:
                raise ValueError(f"a plan takes 1 to {self.chunk} tokens of a sequence, got {count} for {slot}")
        return self._plan(tuple(counts), list(counts.values()), self._join(list(tokens.values())))

    def step(self, slots: Sequence[int], tokens: torch.Tensor, static: bool = False, bound: int | None = None) -> Batch:
        """One new token of each slot: tokens int64 (B,) on the device. Like plan(), in fewer operations.

        static: nothing depends on the host's lengths, so that a graph that this is recorded into can be replayed, each
        time after reserve() and followed by commit() before anything else; closed slots may be among them, and stay
        empty. bound: of the replays' positions + 1, capacity if None. Keep the batch as long as its graph.
        """
        slots = tuple(slots)
        if len(set(slots)) != len(slots) or not slots or not set(slots) <= set(range(len(self._open))):
            raise ValueError(f"slots must be distinct, from 0 to {len(self._open) - 1}, got {slots}")
        if tokens.shape != (len(slots),) or tokens.dtype != torch.int64:
            raise ValueError(f"tokens must be int64 ({len(slots)},), got {tokens.dtype} {tuple(tokens.shape)}")
        if static:
            return self._planner.recorded(slots, tokens, bound or self.capacity)
        return self._plan(slots, [1] * len(slots), tokens)

    def reserve(self, counts: Mapping[int, int]) -> None:
        """Blocks for that many more tokens of each slot; a block that is shared and would be written is copied first.

        OutOfBlocks: too few are free; ValueError: a slot is closed, or would outgrow the model. Nothing was changed.
        """
        wanted, copied = 0, []
        for slot, count in counts.items():
            self._require(slot)
            if (after := self.lengths[slot] + count) > (most := self.slab.config.max_position_embeddings):
                raise ValueError(f"sequence {slot} would have {after} tokens, more than the model's {most}")
            wanted += max(0, -(-after // BLOCK_TOKENS) - len(self.owned[slot]))
            if self._shared_end(slot):
                copied.append(slot)
        if not wanted and not copied:
            return
        self._make_room(wanted, copied)
        for slot in copied:
            if self._shared_end(slot):
                self._copy_end(slot)
        for slot, count in counts.items():
            self._extend(slot, -(-(self.lengths[slot] + count) // BLOCK_TOKENS))

    def commit(self, batch: Batch, slots: Sequence[int] | None = None) -> None:
        """The batch's tokens become part of their sequences: of those in `slots` only, of all open ones if None.

        ValueError: a sequence has changed since the plan, or is closed.
        """
        if batch.stamps is not None and batch.stamps != self._stamped(batch.slots):
            raise ValueError(f"batch of sequences {batch.slots} is stale: they were changed after it was planned")
        for slot in slots or ():
            self._require(slot)
        kept = {
            slot: count for _, count, slot in batch.segments if (self._open[slot] if slots is None else slot in slots)
        }
        if len(kept) == len(batch.slots):
            self.length.index_add_(0, batch.slot, batch.advance)
        elif kept:
            self.length.index_add_(0, *self._planner.counted(tuple(kept), tuple(kept.values())))
        for slot, count in kept.items():
            self.lengths[slot] += count
            self.written[slot] = max(self.written[slot], self.lengths[slot])
            self._stamps[slot] += 1

    def reload(self) -> None:
        """Take the host's side from the buffer, after other contents were copied into it. Waits for the device.

        Published prefixes are forgotten, and a sequence can not go back beyond where it stands.
        """
        lengths, active, table = self.length.tolist(), self._active.tolist(), self.table.tolist()
        stamps = [stamp + 1 for stamp in self._stamps]
        self._blank()
        self._stamps = stamps  # batches of before are stale
        for slot, is_open in enumerate(active):
            self._open[slot] = bool(is_open)
            self.owned[slot] = [block for block in table[slot] if block != self.blocks]
            self.lengths[slot] = self.written[slot] = self.anchor[slot] = lengths[slot]
        self.pool.adopt(self.owned)

    # The host's side.

    def _blank(self) -> None:
        sequences = len(self.length)
        self.pool = Blocks(self.blocks, self.slab.snapshots)
        self.lengths = [0] * sequences
        self.owned: list[list[int]] = [[] for _ in range(sequences)]  # blocks, by sequence
        self.written = [0] * sequences  # 1 + the highest position that the rings hold
        self.anchor = [0] * sequences  # the length at which they were restored
        self._open = [False] * sequences
        self._stamps = [0] * sequences  # counts changes

    def _require(self, slot: int) -> None:
        if not (0 <= slot < len(self._open) and self._open[slot]):
            raise ValueError(f"slot must be of an open sequence, got {slot}")

    def _stamped(self, slots: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self._stamps[slot] for slot in slots)

    def _set_length(self, slot: int, length: int) -> None:
        self.lengths[slot] = length
        self.length[slot].fill_(length)
        self._stamps[slot] += 1

    def _holds(self, slot: int, length: int) -> bool:
        """Whether the rings hold all that a token after the first `length` ones reads."""
        if not length:
            return True
        # The oldest position that the next token's window, and the entries that end later, need; its ring's size.
        rows, ratios = self.slab.tail_rows, self.slab.config.ratios
        needs = [(length - WINDOW + 1, self.ring)]
        if CSA in ratios:
            needs.append((length - length % CSA - CSA, rows[CSA]))
        if HCA in ratios:
            needs.append((length - length % HCA, rows[HCA]))
        return length >= self.anchor[slot] and all(max(0, first) >= self.written[slot] - size for first, size in needs)

    def _plan(self, slots: tuple[int, ...], counts: list[int], tokens: torch.Tensor | list[int]) -> Batch:
        wanted = dict(zip(slots, counts, strict=True))
        self.reserve(wanted)
        lengths = [self.lengths[slot] for slot in slots]
        for slot, count in wanted.items():
            self.written[slot] = max(self.written[slot], self.lengths[slot] + count)
        blocks = [self.owned[slot] for slot in slots]
        return self._planner.planned(slots, tokens, counts, lengths, blocks, self._stamped(slots))

    def _join(self, parts: list[Tokens]) -> torch.Tensor | list[int]:
        """A list if all are of the host, else int64 (N,) on the device."""
        if not any(isinstance(part, torch.Tensor) for part in parts):
            return [token for part in parts for token in part]
        tensors = [part if isinstance(part, torch.Tensor) else torch.tensor(part) for part in parts]
        for part in tensors:
            if part.dtype != torch.int64 or part.dim() != 1:
                raise ValueError(f"tokens must be int64 and 1-D, got {part.dtype} {tuple(part.shape)}")
        return torch.cat([part.to(self.length.device, non_blocking=True) for part in tensors])

    # Blocks.

    def _shared_end(self, slot: int) -> bool:
        """Whether the sequence's next token goes into a block that somebody else holds too."""
        length = self.lengths[slot]
        return length % BLOCK_TOKENS > 0 and self.pool.references[self.owned[slot][length // BLOCK_TOKENS]] > 1

    def _make_room(self, wanted: int, copied: Sequence[int]) -> None:
        """Room for `wanted` blocks and copies of these sequences' end blocks. OutOfBlocks, and nothing was changed.

        Where there is none for copies, prefixes that hold such a block are withdrawn: then it need not be copied.
        """
        try:
            self.pool.check(wanted + len(copied))
        except OutOfBlocks:
            ends = [self.owned[slot][self.lengths[slot] // BLOCK_TOKENS] for slot in copied]
            lone = [block for block in ends if self.pool.only_published(block)]
            self.pool.check(wanted + len(ends) - len(lone))
            for block in lone:
                self.pool.withdraw_with(block)

    def _copy_end(self, slot: int) -> None:
        """A copy of the sequence's end block in place of it, for it is shared."""
        number = self.lengths[slot] // BLOCK_TOKENS
        old = self.owned[slot][number]
        (new,) = self.pool.take(1)
        for name in CACHES:
            if name in self._regions:
                self._regions[name][:, new].copy_(self._regions[name][:, old])
        self.owned[slot][number] = new
        self.pool.release([old])
        self.table[slot, number].fill_(new)

    def _extend(self, slot: int, blocks: int) -> None:
        """Take new blocks up to that many."""
        owned = self.owned[slot]
        if blocks > len(owned):
            new, start = self.pool.take(blocks - len(owned)), len(owned)
            owned += new
            self._write_row(slot, start, new)

    def _truncate(self, slot: int, length: int) -> None:
        """Give back the blocks after the first `length` tokens; rows of the table then name the page nobody reads."""
        kept = -(-length // BLOCK_TOKENS)
        dropped = self.owned[slot][kept:]
        if dropped:
            self.pool.release(dropped)
            del self.owned[slot][kept:]
            self.table[slot, kept : kept + len(dropped)].fill_(self.blocks)

    def _write_row(self, slot: int, start: int, blocks: list[int]) -> None:
        if len(blocks) == 1:
            self.table[slot, start].fill_(blocks[0])
        else:
            self.table[slot, start : start + len(blocks)].copy_(self._planner.put(blocks))

    # Published prefixes.

    def _resume(self, slot: int, prefix: Prefix) -> None:
        """Begin the sequence, which is empty, as the prefix."""
        self.owned[slot] = list(prefix.blocks)
        self.pool.hold(prefix.blocks)
        self._write_row(slot, 0, self.owned[slot])
        self._set_length(slot, len(prefix.tokens))
        self.anchor[slot] = self.written[slot] = len(prefix.tokens)
        for live, saved in self._saved(slot, prefix):
            live.copy_(saved)

    def _saved(self, slot: int, prefix: Prefix) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What a snapshot at the prefix's end consists of, in all layers: views of the rings, and where it is kept."""
        end, regions, number = len(prefix.tokens), self._regions, prefix.snapshot
        pages = self.ring // PAGE_TOKENS
        for page in range(WINDOW_PAGES):
            place = slot * pages + (end // PAGE_TOKENS - WINDOW_PAGES + page) % pages
            yield regions["window"][:, place], regions["saved_window"][:, number * WINDOW_PAGES + page]
        for name in ("csa_tail", "index_tail") if "csa_tail" in regions else ():
            for row in range(SAVED_ROWS):
                token = (end - SAVED_ROWS + row) % self.slab.tail_rows[CSA]
                yield regions[name][:, slot, token], regions[f"saved_{name}"][:, number, row]


def _host(tokens: Tokens) -> array:
    """The tokens as a host array; waits for the device if they are there."""
    return array("q", tokens.tolist() if isinstance(tokens, torch.Tensor) else tokens)
