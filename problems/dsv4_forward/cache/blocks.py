"""`Blocks`: who holds which block of the paged caches, by reference counts; the published prefixes. Host data only.

A block stands for BLOCK_TOKENS tokens in every layer at once. A sequence holds one reference to each block of its
table, a published prefix one to each of its blocks; a block with none is free. A prefix also owns a snapshot: the place
in a pool of fixed size where the rings and tails at its end are kept (what the blocks do not hold). Prefixes are
dropped, least recently used first, when blocks or snapshots run out; blocks that a sequence holds never are.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from problems.dsv4_forward.weights.config import BLOCK_TOKENS


class OutOfBlocks(RuntimeError):
    """Blocks that are free or held by prefixes only are too few. `missing`: how many more are needed."""

    def __init__(self, wanted: int, available: int, total: int) -> None:
        self.missing = wanted - available
        super().__init__(f"{self.missing} blocks missing: {wanted} wanted, {available} of {total} available")


@dataclass(frozen=True)
class Prefix:
    """A published prefix: its tokens (a multiple of BLOCK_TOKENS), the blocks that hold them, its snapshot's index."""

    key: tuple[int, int]
    tokens: array
    blocks: tuple[int, ...]
    snapshot: int


def chain(tokens: array) -> Iterator[tuple[int, int]]:
    """(blocks, hash) of each whole-block prefix, shortest first; a hash covers the hash of the prefix before it."""
    value = 0
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        value = hash((value, tokens[end - BLOCK_TOKENS : end].tobytes()))
        yield end // BLOCK_TOKENS, value


class Blocks:
    """The blocks 0..total - 1 and up to `snapshots` published prefixes."""

    def __init__(self, total: int, snapshots: int) -> None:
        self.total, self.snapshots = total, snapshots
        self.references = [0] * total
        self._free = list(reversed(range(total)))  # the last one is taken first
        self._spare = list(reversed(range(snapshots)))
        self._prefixes: OrderedDict[tuple[int, int], Prefix] = OrderedDict()  # least recently used first

    @property
    def free(self) -> int:
        """How many blocks neither a sequence nor a prefix holds."""
        return len(self._free)

    @property
    def prefixes(self) -> tuple[Prefix, ...]:
        """What is published, least recently used first."""
        return tuple(self._prefixes.values())

    def held_by_prefixes(self) -> set[int]:
        """Blocks that prefixes hold and no sequence does."""
        counts: dict[int, int] = {}
        for prefix in self._prefixes.values():
            for block in prefix.blocks:
                counts[block] = counts.get(block, 0) + 1
        return {block for block, count in counts.items() if self.references[block] == count}

    def check(self, wanted: int) -> None:
        """Changes nothing. OutOfBlocks: `wanted` blocks can not be had, whatever prefixes are dropped."""
        if wanted > self.free and wanted > (available := self.free + len(self.held_by_prefixes())):
            raise OutOfBlocks(wanted, available, self.total)

    def take(self, wanted: int) -> list[int]:
        """`wanted` blocks with one reference each; prefixes are dropped as far as needed. OutOfBlocks, unchanged."""
        self.check(wanted)
        while self.free < wanted:
            self._drop_one()
        taken = [self._free.pop() for _ in range(wanted)]
        self.hold(taken)
        return taken

    def hold(self, blocks: Sequence[int]) -> None:
        """One more reference to each."""
        for block in blocks:
            self.references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each; a block without any is free. Later blocks are freed first."""
        for block in reversed(blocks):
            if not self.references[block]:
                raise RuntimeError(f"block {block} is free already")
            self.references[block] -= 1
            if not self.references[block]:
                self._free.append(block)

    def adopt(self, tables: Sequence[Sequence[int]]) -> None:
        """The blocks that sequences hold, where nothing is held yet."""
        for blocks in tables:
            self.hold(blocks)
        self._free = [block for block in reversed(range(self.total)) if not self.references[block]]

    def find(self, tokens: array) -> Prefix | None:
        """The longest published prefix of `tokens`, now the most recently used; the tokens themselves are compared."""
        longest = max((blocks for blocks, _ in self._prefixes), default=0)
        for key in reversed(list(chain(tokens[: longest * BLOCK_TOKENS]))):
            if (prefix := self._prefixes.get(key)) and prefix.tokens == tokens[: len(prefix.tokens)]:
                self._prefixes.move_to_end(key)
                return prefix
        return None

    def publish(self, tokens: array, blocks: Sequence[int]) -> Prefix | None:
        """The new prefix, whose snapshot is the caller's to fill; None if these tokens are published already.

        tokens: len(blocks) * BLOCK_TOKENS of them, one block or more. ValueError: there is no room for snapshots.
        """
        if not self.snapshots:
            raise ValueError("publishing needs snapshots: 1 or more, got 0")
        (*_, key) = chain(tokens)
        old = self._prefixes.get(key)
        if old and old.tokens == tokens:
            self._prefixes.move_to_end(key)
            return None
        if old:  # other tokens with the same hash
            self.withdraw(old)
        if not self._spare:
            self.withdraw(next(iter(self._prefixes.values())))
        self._prefixes[key] = Prefix(key, tokens, tuple(blocks), self._spare.pop())
        self.hold(blocks)
        return self._prefixes[key]

    def withdraw(self, prefix: Prefix) -> None:
        """No longer offered; its snapshot is spare."""
        del self._prefixes[prefix.key]
        self._spare.append(prefix.snapshot)
        self.release(prefix.blocks)

    def only_published(self, block: int) -> bool:
        """Whether one sequence holds the block, and prefixes do besides."""
        return self.references[block] - 1 == len(self._with(block)) > 0

    def withdraw_with(self, block: int) -> None:
        """Withdraw every prefix that holds the block."""
        for prefix in self._with(block):
            self.withdraw(prefix)

    def _with(self, block: int) -> list[Prefix]:
        return [prefix for prefix in self._prefixes.values() if block in prefix.blocks]

    def _drop_one(self) -> None:
        """Withdraws the least recently used of the prefixes that free a block, or of all if none does by itself."""
        for prefix in self._prefixes.values():
            if any(self.references[block] == 1 for block in prefix.blocks):
                return self.withdraw(prefix)
        return self.withdraw(next(iter(self._prefixes.values())))
