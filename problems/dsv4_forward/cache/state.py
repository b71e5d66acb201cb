"""`State`: all that a running model remembers of its sequences, allocated once: windows, tails and paged caches.

Each sequence has a part of fixed size (a ring of the last tokens' window entries, and rings of the tokens that its
compressors have yet to pool) and a row of the block table. The row names the blocks of its compressed entries in every
layer. Positions decide what is read: nothing is cleared when a sequence ends, goes back or begins. Source: section 3.5
of the technical report (the two caches) and vLLM's state cache (rings addressed by position, so going back is free).
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence

import torch

from problems.dsv4_forward.cache.batch import WINDOW, Batch, Planner
from problems.dsv4_forward.cache.blocks import Blocks, OutOfBlocks, Prefix
from problems.dsv4_forward.cache.state_layout import (
    CACHES,
    PAGE_TOKENS,
    SAVED_ROWS,
    WINDOW_PAGES,
    LayerState,
    StateLayout,
)
from problems.dsv4_forward.cache.token_ids import Tokens, check_tensor, checked
from problems.dsv4_forward.weights.config import BLOCK_TOKENS, CSA, HCA, Config

__all__ = ["Batch", "LayerState", "OutOfBlocks", "State"]


class State:
    """State of up to `sequences` sequences over `blocks` blocks of BLOCK_TOKENS tokens, in one buffer of bytes.

    A sequence is known by its number, 0 to sequences - 1. Between plan() or step() and commit() a model reads and
    writes `layers` (and `mtp`).
    chunk: most new tokens of a sequence in a plan, and how far one may go back at least. snapshots: how many published
    prefixes are kept at once. length: int64 (S,), table: int32 (S, blocks a sequence), both on the device; lengths: the
    host's; ring: tokens in a window; capacity: tokens that a sequence may have; planner: of its batches.
    """

    def __init__(
        self,
        cfg: Config,
        fmt: str,
        sequences: int,
        blocks: int,
        chunk: int = 128,
        device: torch.device | str = "cpu",
        buffer: torch.Tensor | None = None,
        snapshots: int = 4,
    ) -> None:
        """buffer: uint8 (nbytes(...),), whose contents do not matter; one of zeros on `device` if None."""
        layout = StateLayout(cfg, fmt, sequences, blocks, chunk, snapshots)
        if buffer is None:
            buffer = torch.zeros(layout.nbytes(), dtype=torch.uint8, device=device)
        self.layout, self.buffer = layout, buffer
        self.chunk, self.ring, self.capacity, self.blocks = chunk, layout.ring, layout.capacity, blocks
        self._regions = layout.views(buffer)
        self.length, self._active, self.table = (self._regions[name] for name in ("length", "active", "table"))
        layers = layout.layers(self._regions)
        self.layers = layers[: cfg.num_hidden_layers]
        self.mtp = layers[-1] if cfg.num_nextn_predict_layers else None
        self.planner = Planner(self.length, self.table, self.ring, cfg.ratios, unread=blocks, topk=cfg.index_topk)
        self._blank()
        self.length.zero_()
        self._active.zero_()
        self.table.fill_(blocks)

    @staticmethod
    def nbytes(cfg: Config, fmt: str, sequences: int, blocks: int, chunk: int = 128, snapshots: int = 4) -> int:
        """Size of the buffer, in bytes."""
        return StateLayout(cfg, fmt, sequences, blocks, chunk, snapshots).nbytes()

    # Sequences.

    def open(self, tokens: Tokens | None = None) -> tuple[int, int]:
        """Open a sequence. -> (its number, matched). RuntimeError: all are open; ValueError: no token ids.

        With tokens, the sequence begins as the longest published prefix of them that is shorter than they are: it holds
        the first `matched` of them (a multiple of BLOCK_TOKENS) already.
        """
        if all(self._open):
            raise RuntimeError(f"all {len(self._open)} sequences are open: close one first")
        sequence = self._open.index(False)
        prefix = None if tokens is None else self.pool.find(self._host("tokens", tokens)[:-1])
        self._open[sequence] = True
        self._active[sequence].fill_(1)
        self._set_length(sequence, 0)
        self.anchor[sequence] = self.written[sequence] = 0
        if prefix:
            self._resume(sequence, prefix)
        return sequence, self.lengths[sequence]

    def close(self, sequence: int) -> None:
        """End the sequence and free its blocks. ValueError: it is not open."""
        self._require(sequence)
        self._truncate(sequence, 0)
        self._set_length(sequence, 0)
        self._active[sequence].fill_(0)
        self._open[sequence] = False

    def rewind(self, sequence: int, length: int) -> None:
        """Forget all but the first `length` tokens (0, or what the rings still hold), and the blocks after them.

        ValueError, naming the shortest length that one may go back to, or that it is not one.
        """
        self._require(sequence)
        if not 0 <= length <= self.lengths[sequence]:
            raise ValueError(f"length must be 0 to {self.lengths[sequence]} (sequence {sequence}), got {length}")
        if not self._holds(sequence, length):
            least = self.floor(sequence)
            raise ValueError(f"sequence {sequence} can go back to {least} or more tokens, or 0, got {length}")
        self._truncate(sequence, length)
        self._set_length(sequence, length)
        if not length:
            self.anchor[sequence] = self.written[sequence] = 0

    def floor(self, sequence: int) -> int:
        """The shortest length, but for 0, from which on the sequence may be rewound to any."""
        length = self.lengths[sequence]
        while length and self._holds(sequence, length - 1):
            length -= 1
        return length

    def publish(self, sequence: int, tokens: Tokens) -> int:
        """Offer the sequence's whole blocks for reuse; tokens: the sequence's. -> how many tokens are on offer.

        ValueError: tokens are too few or no token ids, or the end of the last whole block is no longer in the rings.
        """
        self._require(sequence)
        count = self.lengths[sequence] // BLOCK_TOKENS
        end = count * BLOCK_TOKENS
        if len(tokens) < end:
            raise ValueError(f"tokens must be the {end} or more of sequence {sequence}, got {len(tokens)}")
        if not count:
            return 0
        if not self._holds(sequence, end):
            least = self.floor(sequence)
            raise ValueError(f"sequence {sequence} no longer holds what {end} tokens need, only {least} or more")
        if prefix := self.pool.publish(self._host("tokens", tokens[:end]), self.owned[sequence][:count]):
            for live, saved in self._saved(sequence, prefix):
                saved.copy_(live)
        return end

    # One forward pass.

    def plan(self, tokens: Mapping[int, Tokens]) -> Batch:
        """Plan a call with 1 to chunk new tokens for each of some sequences (sequence -> tokens).

        Reserves their blocks; lengths stay until commit(). OutOfBlocks, ValueError: nothing was changed.
        """
        tokens = self.checked(tokens)
        counts = {sequence: len(part) for sequence, part in tokens.items()}
        for sequence, count in counts.items():
            if not 1 <= count <= self.chunk:
                raise ValueError(f"a plan takes 1 to {self.chunk} tokens of a sequence, got {count} for {sequence}")
        return self._plan(tuple(counts), list(counts.values()), self._join(list(tokens.values())))

    def checked(self, tokens: Mapping[int, Tokens]) -> dict[int, torch.Tensor | array]:
        """Return the tokens of some sequences (sequence -> tokens) as plan() takes them, lists as arrays of int64.

        ValueError: no sequence or a closed one; ids that are not of the vocabulary (token_ids.checked).
        """
        if not tokens:
            raise ValueError("tokens must name a sequence or more, got none")
        for sequence in tokens:
            self._require(sequence)
        vocab = self.layout.config.vocab_size
        return {sequence: checked(f"tokens of sequence {sequence}", part, vocab) for sequence, part in tokens.items()}

    def step(
        self, sequences: Sequence[int], tokens: torch.Tensor, static: bool = False, bound: int | None = None
    ) -> Batch:
        """Plan a call with one new token of each sequence, as plan() does, in fewer operations.

        tokens: int64 (B,) on the device. static: nothing depends on the host's lengths. A graph that records the call
        can then be replayed, each time after reserve() and before commit(); closed sequences may be among them, and
        stay empty. bound: of the replays' positions + 1, capacity if None. Keep the batch as long as its graph.
        OutOfBlocks; ValueError: sequences or tokens are not that, or static, and nothing is reserved for the token.
        """
        sequences = tuple(sequences)
        if len(set(sequences)) != len(sequences) or not sequences or not set(sequences) <= set(range(len(self._open))):
            raise ValueError(f"sequences must be distinct, from 0 to {len(self._open) - 1}, got {sequences}")
        check_tensor("tokens", tokens, self.layout.config.vocab_size, len(sequences))
        if tokens.device != self.length.device:
            raise ValueError(f"tokens must be on the state's device, {self.length.device}, got {tokens.device}")
        if static:
            bound = self.capacity if bound is None else bound
            self._require_reserved({sequence: 1 for sequence in sequences if self._open[sequence]}, bound)
            return self.planner.recorded(sequences, tokens, bound)
        return self._plan(sequences, [1] * len(sequences), tokens)

    def reserve(self, counts: Mapping[int, int]) -> None:
        """Reserve blocks for that many more tokens of each sequence; copy a shared block that would be written.

        OutOfBlocks: too few are free; ValueError: a sequence is closed, or would outgrow the model, or a count is
        negative. Nothing was changed.
        """
        wanted, copied = 0, []
        for sequence, count in counts.items():
            self._require(sequence)
            if count < 0:
                raise ValueError(f"counts must be 0 or more, got {count} for sequence {sequence}")
            if (after := self.lengths[sequence] + count) > (most := self.layout.config.max_position_embeddings):
                raise ValueError(f"sequence {sequence} would have {after} tokens, more than the model's {most}")
            wanted += max(0, -(-after // BLOCK_TOKENS) - len(self.owned[sequence]))
            if self._shared_end(sequence):
                copied.append(sequence)
        if wanted or copied:
            self._make_room(wanted, copied)
            for sequence in copied:
                if self._shared_end(sequence):
                    self._copy_end(sequence)
            for sequence, count in counts.items():
                self._extend(sequence, -(-(self.lengths[sequence] + count) // BLOCK_TOKENS))
        for sequence, count in counts.items():
            self._reserved[sequence] = max(self._reserved[sequence], self.lengths[sequence] + count)

    def commit(self, batch: Batch, sequences: Sequence[int] | None = None) -> None:
        """Make the batch's tokens part of their sequences: of those in `sequences` only, of all open ones if None.

        ValueError: the batch is of another state, or was committed already; a sequence has changed since the plan, is
        closed or not in the batch; a replayed step was not reserved.
        """
        if batch.planner is not self.planner:
            raise ValueError(f"batch of sequences {batch.sequences} must be planned by this state, got another's")
        if batch.stamps is not None and batch.stamps != self._stamped(batch.sequences):
            raise ValueError(
                f"batch of sequences {batch.sequences} is stale: it was committed, or they were changed, after it was "
                "planned; plan it again"
            )
        for sequence in sequences or ():
            self._require(sequence)
            if sequence not in batch.sequences:
                raise ValueError(f"sequences must be of the batch, {batch.sequences}, got {sequence}")
        chosen = {number for number, is_open in enumerate(self._open) if is_open} if sequences is None else sequences
        kept = {sequence: count for _, count, sequence in batch.segments if sequence in chosen}
        if batch.stamps is None:
            self._require_reserved(kept, batch.plan.bound)
        _ = batch.lists  # of before: if no model has run, they are computed now
        if len(kept) == len(batch.sequences):
            self.length.index_add_(0, batch.plan.sequence_ids, batch.advance)
        elif kept:
            self.length.index_add_(0, *self.planner.counted(tuple(kept), tuple(kept.values())))
        for sequence, count in kept.items():
            self.lengths[sequence] += count
            self.written[sequence] = max(self.written[sequence], self.lengths[sequence])
            self._stamps[sequence] += 1

    def reload(self) -> None:
        """Take the host's side from the buffer, after other contents were copied into it. Waits for the device.

        Published prefixes are forgotten, and a sequence can not go back beyond where it is.
        """
        lengths, active, table = self.length.tolist(), self._active.tolist(), self.table.tolist()
        stamps = [stamp + 1 for stamp in self._stamps]
        self._blank()
        self._stamps = stamps  # batches of before are stale
        for sequence, is_open in enumerate(active):
            self._open[sequence] = bool(is_open)
            self.owned[sequence] = [block for block in table[sequence] if block != self.blocks]
            self.lengths[sequence] = self.written[sequence] = self.anchor[sequence] = lengths[sequence]
            self._reserved[sequence] = lengths[sequence]
        self.pool.adopt(self.owned)

    # The host's side.

    def _blank(self) -> None:
        sequences = len(self.length)
        self.pool = Blocks(self.blocks, self.layout.snapshots)
        self.lengths = [0] * sequences
        self.owned: list[list[int]] = [[] for _ in range(sequences)]  # blocks, by sequence
        self.written = [0] * sequences  # 1 + the highest position that the rings hold
        self.anchor = [0] * sequences  # the length at which they were restored
        self._open = [False] * sequences
        self._stamps = [0] * sequences  # counts changes
        self._reserved = [0] * sequences  # tokens that the blocks are reserved for

    def _require(self, sequence: int) -> None:
        if not (isinstance(sequence, int) and 0 <= sequence < len(self._open) and self._open[sequence]):
            raise ValueError(f"sequence must be the number of an open sequence, got {sequence}")

    def _require_reserved(self, counts: Mapping[int, int], bound: int) -> None:
        """ValueError unless that many more tokens of each sequence are reserved, and end before `bound`."""
        for sequence, count in counts.items():
            after = self.lengths[sequence] + count
            if after > self._reserved[sequence]:
                raise ValueError(
                    f"sequence {sequence} has {self._reserved[sequence]} tokens reserved and would have {after}: call "
                    "reserve() before each static step or replay, and commit() once after it"
                )
        after = max((self.lengths[sequence] + count for sequence, count in counts.items()), default=1)
        if not after <= bound <= self.capacity:
            raise ValueError(f"bound must be {after} to {self.capacity} tokens, got {bound}")

    def _host(self, what: str, tokens: Tokens) -> array:
        """The token ids as a host array; waits for the device if they are there. ValueError: they are none."""
        listed = tokens.cpu() if isinstance(tokens, torch.Tensor) else tokens
        return array("q", checked(what, listed, self.layout.config.vocab_size))

    def _stamped(self, sequences: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self._stamps[sequence] for sequence in sequences)

    def _set_length(self, sequence: int, length: int) -> None:
        self.lengths[sequence] = self._reserved[sequence] = length
        self.length[sequence].fill_(length)
        self._stamps[sequence] += 1

    def _holds(self, sequence: int, length: int) -> bool:
        """Whether the rings hold all that a token after the first `length` ones reads."""
        if not length:
            return True
        # The oldest position that the next token's window, and the entries that end later, need; its ring's size.
        rows, ratios = self.layout.tail_rows, self.layout.config.ratios
        needs = [(length - WINDOW + 1, self.ring)]
        if CSA in ratios:
            needs.append((length - length % CSA - CSA, rows[CSA]))
        if HCA in ratios:
            needs.append((length - length % HCA, rows[HCA]))
        written = self.written[sequence]
        return length >= self.anchor[sequence] and all(max(0, first) >= written - size for first, size in needs)

    def _plan(self, sequences: tuple[int, ...], counts: list[int], tokens: torch.Tensor | array) -> Batch:
        wanted = dict(zip(sequences, counts, strict=True))
        self.reserve(wanted)
        lengths = [self.lengths[sequence] for sequence in sequences]
        for sequence, count in wanted.items():
            self.written[sequence] = max(self.written[sequence], self.lengths[sequence] + count)
        return self.planner.planned(sequences, tokens, counts, lengths, self._stamped(sequences))

    def _join(self, parts: list[torch.Tensor | array]) -> torch.Tensor | array:
        """An array if all are of the host, else int64 (N,) on the device."""
        if not any(isinstance(part, torch.Tensor) for part in parts):
            return sum(parts, array("q"))
        tensors = [part if isinstance(part, torch.Tensor) else torch.tensor(part) for part in parts]
        return torch.cat([part.to(self.length.device, non_blocking=True) for part in tensors])

    # Blocks.

    def _shared_end(self, sequence: int) -> bool:
        """Whether the sequence's next token goes into a block that another sequence or a prefix holds too."""
        length = self.lengths[sequence]
        return length % BLOCK_TOKENS > 0 and self.pool.references[self.owned[sequence][length // BLOCK_TOKENS]] > 1

    def _make_room(self, wanted: int, copied: Sequence[int]) -> None:
        """Room for `wanted` blocks and copies of these sequences' end blocks. OutOfBlocks, and nothing was changed.

        Where there is none for copies, prefixes that hold such a block are withdrawn: then it need not be copied.
        """
        try:
            self.pool.check(wanted + len(copied))
        except OutOfBlocks:
            ends = [self.owned[sequence][self.lengths[sequence] // BLOCK_TOKENS] for sequence in copied]
            lone = [block for block in ends if self.pool.only_published(block)]
            self.pool.check(wanted + len(ends) - len(lone))
            for block in lone:
                self.pool.withdraw_with(block)

    def _copy_end(self, sequence: int) -> None:
        """A copy of the sequence's end block in place of it, for it is shared."""
        number = self.lengths[sequence] // BLOCK_TOKENS
        old = self.owned[sequence][number]
        (new,) = self.pool.take(1)
        for name in CACHES:
            if name in self._regions:
                self._regions[name][:, new].copy_(self._regions[name][:, old])
        self.owned[sequence][number] = new
        self.pool.release([old])
        self.table[sequence, number].fill_(new)

    def _extend(self, sequence: int, blocks: int) -> None:
        """Take new blocks up to that many."""
        owned = self.owned[sequence]
        if blocks > len(owned):
            new, start = self.pool.take(blocks - len(owned)), len(owned)
            owned += new
            self._write_row(sequence, start, new)

    def _truncate(self, sequence: int, length: int) -> None:
        """Free the blocks after the first `length` tokens; the table then names the page that is never read."""
        kept = -(-length // BLOCK_TOKENS)
        dropped = self.owned[sequence][kept:]
        if dropped:
            self.pool.release(dropped)
            del self.owned[sequence][kept:]
            self.table[sequence, kept : kept + len(dropped)].fill_(self.blocks)

    def _write_row(self, sequence: int, start: int, blocks: list[int]) -> None:
        if len(blocks) == 1:
            self.table[sequence, start].fill_(blocks[0])
        else:
            self.table[sequence, start : start + len(blocks)].copy_(self.planner.put(blocks))

    # Published prefixes.

    def _resume(self, sequence: int, prefix: Prefix) -> None:
        """Begin the sequence, which is empty, as the prefix."""
        self.owned[sequence] = list(prefix.blocks)
        self.pool.hold(prefix.blocks)
        self._write_row(sequence, 0, self.owned[sequence])
        self._set_length(sequence, len(prefix.tokens))
        self.anchor[sequence] = self.written[sequence] = len(prefix.tokens)
        for live, saved in self._saved(sequence, prefix):
            live.copy_(saved)

    def _saved(self, sequence: int, prefix: Prefix) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What a snapshot at the prefix's end consists of, in all layers: views of the rings, and where it is kept."""
        end, regions, number = len(prefix.tokens), self._regions, prefix.snapshot
        pages = self.ring // PAGE_TOKENS
        for page in range(WINDOW_PAGES):
            place = sequence * pages + (end // PAGE_TOKENS - WINDOW_PAGES + page) % pages
            yield regions["window"][:, place], regions["saved_window"][:, number * WINDOW_PAGES + page]
        for name in ("csa_tail", "index_tail") if "csa_tail" in regions else ():
            for row in range(SAVED_ROWS):
                token = (end - SAVED_ROWS + row) % self.layout.tail_rows[CSA]
                yield regions[name][:, sequence, token], regions[f"saved_{name}"][:, number, row]
