"""cache/blocks.py of dsv4_forward, and sharing in cache/state.py: who holds what, and that each keeps its content."""

from array import array

import pytest
import torch

from problems.dsv4_forward.cache import blocks
from problems.dsv4_forward.cache.blocks import Blocks, OutOfBlocks
from problems.dsv4_forward.cache.state import State
from problems.dsv4_forward.weights.config import CSA
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


# The pool.


def test_the_pool_counts():
    pool = Blocks(4, 2)
    first, second = pool.take(3), pool.take(1)
    assert sorted(first + second) == [0, 1, 2, 3] and pool.free == 0
    pool.hold(second)
    pool.release(second)
    assert pool.free == 0
    pool.release(second)
    pool.release(first[1:])
    assert pool.free == 3 and pool.references[first[0]] == 1
    with pytest.raises(RuntimeError, match="free already"):
        pool.release(second)
    with pytest.raises(OutOfBlocks, match="2 blocks missing: 5 wanted, 3 of 4 available") as caught:
        pool.take(5)
    assert caught.value.missing == 2 and pool.free == 3


def test_a_prefix_is_found_by_its_tokens_and_the_longest_wins():
    pool = Blocks(8, 3)
    tokens = array("q", numbers(1000))
    held = pool.take(3)
    short = pool.publish(tokens[:128], held[:1])
    long = pool.publish(tokens[:384], held)
    assert pool.publish(tokens[:128], held[:1]) is None, "published already"
    assert pool.find(tokens) is long and pool.find(tokens[:384]) is long
    assert pool.find(tokens[:383]) is short, "256 tokens are not on offer"
    assert pool.find(tokens[:127]) is None and pool.find(tokens[1:]) is None
    other = tokens[:]
    other[300] += 1
    assert pool.find(other) is short
    other[127] += 1
    assert pool.find(other) is None
    assert [pool.references[block] for block in held] == [3, 2, 2]
    assert {short.snapshot, long.snapshot} < {0, 1, 2}


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
        taken = pool.take(1)
        pool.publish(part, taken)
        pool.release(taken)
    assert pool.find(parts[0]) is not None  # used: now the other is the oldest
    taken = pool.take(1)
    pool.publish(parts[2], taken)
    assert pool.find(parts[1]) is None and pool.find(parts[0]) and pool.find(parts[2])
    pool.publish(parts[0], taken)  # published already: used again, its blocks as they were
    pool.release(taken)
    taken = pool.take(1)
    pool.publish(parts[3], taken)
    assert pool.find(parts[2]) is None and pool.find(parts[0])
    assert sorted(prefix.snapshot for prefix in pool.prefixes) == [0, 1]
    assert pool.free == 8 - 2


def test_prefixes_are_dropped_for_blocks_but_not_where_that_frees_none():
    pool = Blocks(6, 4)
    tokens = [array("q", numbers(256, 1000 * n)) for n in range(3)]
    used = pool.take(2)
    pool.publish(tokens[0], used)  # the oldest, but a sequence holds its blocks
    for part in tokens[1:]:
        taken = pool.take(2)
        pool.publish(part, taken)
        pool.release(taken)
    assert pool.free == 0 and len(pool.held_by_prefixes()) == 4
    got = pool.take(1)
    assert [prefix.tokens for prefix in pool.prefixes] == [tokens[0], tokens[2]] and pool.free == 1
    got += pool.take(3)
    assert [prefix.tokens for prefix in pool.prefixes] == [tokens[0]]
    assert not set(got) & set(used) and len(set(got)) == 4
    with pytest.raises(OutOfBlocks, match="1 wanted, 0 of 6"):
        pool.take(1)
    assert pool.prefixes, "nothing is dropped in vain"


def test_nested_prefixes_are_dropped_until_a_block_is_free():
    pool = Blocks(3, 4)
    tokens, taken = array("q", numbers(384)), pool.take(3)
    for count in (1, 2, 3):
        pool.publish(tokens[: 128 * count], taken[:count])
    pool.release(taken)
    assert pool.free == 0 and pool.held_by_prefixes() == set(taken)
    assert pool.take(1) == [taken[2]] and [len(p.blocks) for p in pool.prefixes] == [1, 2]
    pool.take(2)
    assert not pool.prefixes


# Sharing between sequences.


@pytest.mark.parametrize(("count", "matched"), [(1, 0), (128, 0), (129, 128), (256, 128), (257, 256), (384, 256)])
def test_a_sequence_begins_as_the_longest_published_prefix_that_leaves_a_token(count, matched):
    state, tokens = make(), numbers(300)
    a = fed(state, tokens[:140])
    assert state.publish(a, tokens) == 128
    grow(state, a, 300)
    assert state.publish(a, torch.tensor(tokens)) == 256
    b, got = state.open(torch.tensor(numbers(count)))
    assert got == matched == state.lengths[b] == state.floor(b)
    assert state.owned[b] == state.owned[a][: matched // 128]
    check_counts(state)


def test_each_prefix_has_its_own_rings():
    """Two prefixes from other places in the rings; what is written there later is not in what they saved."""
    state, gen = make(64, blocks=12, sequences=4), torch.Generator().manual_seed(3)
    live = {name: state._regions[name] for name in ("window", "csa_tail", "index_tail")}
    pages, rows = state.ring // 64, state.layout.tail_rows[CSA]
    wanted = {}
    for number, length in enumerate((130, 260, 384)):
        tokens = numbers(length, 1000 * number)
        sequence, end = fed(state, tokens), length // 128 * 128
        for data in live.values():
            data.copy_(torch.rand(data.shape, generator=gen))
        assert state.publish(sequence, tokens) == end
        last = [sequence * pages + page % pages for page in (end // 64 - 2, end // 64 - 1)]
        tail = [token % rows for token in range(end - 4, end)]
        tails = (live[name][:, sequence, tail] for name in ("csa_tail", "index_tail"))
        wanted[number] = live["window"][:, last], *tails
        state.close(sequence)
    for number in (1, 0, 2):
        for data in live.values():
            data.fill_(-1)
        sequence, end = state.open(numbers(500, 1000 * number))
        assert end == (128, 256, 384)[number]
        last = [sequence * pages + page % pages for page in (end // 64 - 2, end // 64 - 1)]
        tail = [token % rows for token in range(end - 4, end)]
        got = live["window"][:, last], live["csa_tail"][:, sequence, tail], live["index_tail"][:, sequence, tail]
        assert all(torch.equal(one, other) for one, other in zip(got, wanted[number], strict=True))
        assert int((live["window"] != -1).sum()) == wanted[number][0].numel(), "nobody else's window is touched"


def test_publishing_needs_the_last_boundary():
    state, tokens = make(8), numbers(300)
    a = fed(state, tokens[:264])
    assert state.publish(a, tokens) == 256
    state.pool.withdraw(state.pool.prefixes[0])
    for length in range(264, 300):
        held = state._holds(a, 256)
        assert held == (length - 256 <= 8 + 4), "4 tokens are pooled with the next, of a chunk and 8"
        if held:
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


def test_a_shared_block_is_copied_before_it_is_written():
    state, tokens = make(blocks=6), numbers(300)
    a = fed(state, tokens)
    state.publish(a, tokens)
    b = fed(state, tokens[:257])
    for name in ("csa_cache", "index_keys", "hca_cache"):
        state._regions[name].copy_(torch.rand(state._regions[name].shape, generator=torch.Generator().manual_seed(2)))
    state.rewind(a, 250)
    old = state.owned[a][1]
    assert state.owned[b][1] == old and state.pool.free == 3
    before = {name: state._regions[name].clone() for name in ("csa_cache", "index_keys", "hca_cache")}
    batch = state.plan({a: numbers(20, 900)})
    new = state.owned[a][1]
    assert new != old and state.owned[b][1] == old and state.pool.free == 3 - 2
    for name, was in before.items():
        assert torch.equal(state._regions[name][:, new], was[:, old])
        rest = [block for block in range(7) if block != new]
        assert torch.equal(state._regions[name][:, rest], was[:, rest])
    assert old * 32 not in batch.lists.target[4] // 32 * 32 and int(batch.lists.target[128][0]) == new
    check_counts(state)
    assert fed(state, tokens[:257]) is not None and state.owned[a][1] == new


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


@pytest.mark.parametrize("blocks", [3, 4])
def test_without_room_for_a_copy_beside_another_sequence_nothing_happens(blocks):
    """With four blocks there is room for the copy, but not for what another sequence of the same call needs."""
    state, tokens = make(blocks=blocks, sequences=3), numbers(384)
    a = fed(state, tokens[:256])
    state.publish(a, tokens)
    grow(state, a, 256 + 100)
    b, matched = state.open(tokens)
    assert matched == 256
    state.rewind(a, 250)
    c = fed(state, numbers(100, 5000))
    assert state.pool.free == blocks - 3
    more = {a: [1, 2, 3], c: [4] * (29 if blocks == 4 else 1)}
    match = f"^1 blocks missing: {blocks - 2} wanted, {blocks - 3} of {blocks}"
    unchanged(state, OutOfBlocks, match, lambda: state.plan(more))
    state.close(b)
    state.plan({a: [1, 2, 3]})
    check_counts(state)
