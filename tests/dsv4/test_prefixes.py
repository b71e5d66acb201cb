"""cache/blocks.py of dsv4_forward, and sharing in cache/state.py: who holds what, and that each keeps its content."""

from array import array

import pytest
import torch

from problems.dsv4_forward.cache import blocks
from problems.dsv4_forward.cache.blocks import Blocks, OutOfBlocks
from problems.dsv4_forward.cache.state import State
from tests.dsv4.states import check_counts, grow, make, unchanged


def numbers(count: int, first: int = 0) -> list[int]:
    """Tokens, all different."""
    return list(range(first, first + count))


def fed(state: State, tokens: list[int]) -> int:
    """A new sequence of these tokens."""
    sequence, matched = state.open(tokens)
    for start in range(matched, len(tokens), state.chunk):
        state.commit(state.plan({sequence: tokens[start : start + state.chunk]}))
    return sequence


def published(pool: Blocks, tokens: array) -> None:
    """By a sequence that has ended."""
    taken = pool.take(len(tokens) // 128)
    pool.publish(tokens, taken)
    pool.release(taken)


def test_what_is_free_cannot_be_released():
    """How many are held and free, and by whom, is in test_walk.py."""
    pool = Blocks(4, 2)
    taken = pool.take(3)
    pool.release(taken)
    with pytest.raises(RuntimeError, match="free already"):
        pool.release(taken)


def test_tokens_decide_where_hashes_are_equal(monkeypatch):
    """All hashes alike: a prefix of other tokens is never taken for another, and makes way for a new one."""
    monkeypatch.setattr(blocks, "chain", lambda tokens: ((n + 1, 0) for n in range(len(tokens) // 128)))
    pool = Blocks(8, 3)
    one, two = array("q", numbers(256)), array("q", numbers(256, 5))
    pool.publish(one, pool.take(2))
    assert pool.find(two) is None and pool.find(one) is pool.prefixes[0]
    later = pool.publish(two, pool.take(2))
    assert pool.prefixes == (later,) and pool.find(one) is None and pool.find(two) is later
    assert pool.free == 4 and sum(pool.references) == 2 + 2 + 2


def test_the_least_recently_used_prefix_makes_way():
    pool = Blocks(8, 2)
    parts = [array("q", numbers(128, 1000 * n)) for n in range(4)]
    for part in parts[:2]:
        published(pool, part)
    assert pool.find(parts[0]) is not None  # used: now the other is the oldest
    taken = pool.take(1)
    pool.publish(parts[2], taken)
    assert pool.find(parts[1]) is None and pool.find(parts[0]) and pool.find(parts[2])
    pool.publish(parts[0], taken)  # published already: used again, its blocks as they were
    pool.release(taken)
    pool.publish(parts[3], pool.take(1))
    assert pool.find(parts[2]) is None and pool.find(parts[0])
    assert sorted(prefix.snapshot for prefix in pool.prefixes) == [0, 1] and pool.free == 8 - 2


def test_prefixes_are_dropped_for_blocks_but_not_where_that_frees_none():
    pool = Blocks(6, 4)
    tokens = [array("q", numbers(256, 1000 * n)) for n in range(3)]
    used = pool.take(2)
    pool.publish(tokens[0], used)  # the oldest, but a sequence holds its blocks
    for part in tokens[1:]:
        published(pool, part)
    assert pool.free == 0 and len(pool.held_by_prefixes()) == 4
    got = pool.take(1)
    assert [prefix.tokens for prefix in pool.prefixes] == [tokens[0], tokens[2]] and pool.free == 1
    got += pool.take(3)
    assert [prefix.tokens for prefix in pool.prefixes] == [tokens[0]]
    assert not set(got) & set(used) and len(set(got)) == 4
    with pytest.raises(OutOfBlocks, match="1 wanted, 0 of 6"):
        pool.take(1)
    assert pool.prefixes, "nothing is dropped in vain"


@pytest.mark.parametrize(("count", "matched"), [(1, 0), (128, 0), (129, 128), (256, 128), (257, 256), (384, 256)])
def test_a_sequence_begins_as_the_longest_published_prefix_that_leaves_a_token(count, matched):
    state, tokens = make(), numbers(300)
    a = fed(state, tokens[:140])
    assert state.publish(a, tokens) == 128
    grow(state, a, 300)
    assert state.publish(a, torch.tensor(tokens)) == 256
    b, got = state.open(torch.tensor(numbers(count)))
    assert got == matched == state.lengths[b] == state.floor(b) and state.owned[b] == state.owned[a][: matched // 128]
    check_counts(state)


def test_publishing_needs_the_last_boundary():
    """4 tokens are pooled with the next, of a chunk and 8."""
    state, tokens = make(8), numbers(300)
    a = fed(state, tokens[:264])
    for length in range(264, 300):
        if length - 256 <= 8 + 4:
            assert state.publish(a, tokens) == 256
            state.pool.withdraw(state.pool.prefixes[0])
        else:
            unchanged(state, ValueError, "no longer holds what 256 tokens need", lambda: state.publish(a, tokens))
        grow(state, a, length + 1)
    unchanged(state, ValueError, "the 256 or more of sequence", lambda: state.publish(a, tokens[:255]))
    b = fed(state, tokens[:127])
    assert state.publish(b, tokens) == 0
    none = make(snapshots=0)
    c = fed(none, tokens)
    unchanged(none, ValueError, "1 or more, got 0", lambda: none.publish(c, tokens))


def test_without_room_for_a_copy_the_prefix_is_withdrawn():
    """A sequence alone in its block, but for prefixes: they go rather than that it stands still."""
    state, tokens = make(blocks=3, sequences=2), numbers(384)
    a = fed(state, tokens[:256])
    state.publish(a, tokens)
    grow(state, a, 290)
    state.rewind(a, 250)
    b = fed(state, numbers(100, 5000))
    assert state.pool.free == 0
    was = list(state.owned[a])
    state.commit(state.plan({a: [1, 2, 3]}))
    assert state.owned[a] == was and not state.pool.prefixes
    check_counts(state)
    state.close(b)
