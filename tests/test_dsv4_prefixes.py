"""problems/dsv4_forward/blocks.py, and sharing in state.py: who holds what, and that content is everybody's own."""

import dataclasses
from array import array

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from problems.dsv4_forward import blocks
from problems.dsv4_forward.blocks import Blocks, OutOfBlocks
from problems.dsv4_forward.config import CSA, HCA, SWA
from problems.dsv4_forward.state import State
from tests.test_dsv4_state import SMALL, check_counts, grow, make, unchanged


def numbers(count: int, first: int = 0) -> list[int]:
    """Tokens, all different."""
    return list(range(first, first + count))


def fed(state: State, tokens: list[int]) -> int:
    """A new sequence of these tokens."""
    slot, matched = state.open(tokens)
    for start in range(matched, len(tokens), state.chunk):
        state.commit(state.plan({slot: tokens[start : start + state.chunk]}))
    return slot


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


def test_the_hash_of_a_prefix_covers_what_is_before():
    one, two = array("q", numbers(384)), array("q", [9] + numbers(383, 1))
    first, second = list(blocks.chain(one)), list(blocks.chain(two))
    assert [count for count, _ in first] == [1, 2, 3]
    assert all(a != b for a, b in zip(first, second, strict=True)), "the later blocks are the same"
    assert list(blocks.chain(one[:383])) == first[:2] and list(blocks.chain(one[:127])) == []


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
    assert got == matched == state.lengths[b]
    assert state.owned[b] == state.owned[a][: matched // 128]
    check_counts(state)


def test_each_prefix_has_its_own_rings():
    """Two prefixes from other places in the rings; what is written there later is not in what they saved."""
    state, gen = make(64, blocks=12, sequences=4), torch.Generator().manual_seed(3)
    live = {name: state._regions[name] for name in ("window", "csa_tail", "index_tail")}
    pages, rows = state.ring // 64, state.slab.tail_rows[CSA]
    wanted = {}
    for number, length in enumerate((130, 260, 384)):
        tokens = numbers(length, 1000 * number)
        slot, end = fed(state, tokens), length // 128 * 128
        for data in live.values():
            data.copy_(torch.rand(data.shape, generator=gen))
        assert state.publish(slot, tokens) == end
        last = [slot * pages + page % pages for page in (end // 64 - 2, end // 64 - 1)]
        tail = [token % rows for token in range(end - 4, end)]
        wanted[number] = live["window"][:, last], live["csa_tail"][:, slot, tail], live["index_tail"][:, slot, tail]
        state.close(slot)
    for number in (1, 0, 2):
        for data in live.values():
            data.fill_(-1)
        slot, end = state.open(numbers(500, 1000 * number))
        assert end == (128, 256, 384)[number]
        last = [slot * pages + page % pages for page in (end // 64 - 2, end // 64 - 1)]
        tail = [token % rows for token in range(end - 4, end)]
        got = live["window"][:, last], live["csa_tail"][:, slot, tail], live["index_tail"][:, slot, tail]
        assert all(torch.equal(one, other) for one, other in zip(got, wanted[number], strict=True))
        assert int((live["window"] != -1).sum()) == wanted[number][0].numel(), "nobody else's window is touched"


def test_shared_blocks_outlive_their_first_sequence():
    state, tokens = make(blocks=8), numbers(300)
    a = fed(state, tokens)
    state.publish(a, tokens)
    b, c = fed(state, tokens + [1]), fed(state, tokens[:257])
    shared = state.owned[a][:2]
    assert state.pool.free == 8 - 2 - 3 and [state.pool.references[block] for block in shared] == [4, 4]
    for slot in (a, c, b):
        state.close(slot)
        check_counts(state)
    assert state.pool.free == 6 and [state.pool.references[block] for block in shared] == [1, 1]
    d = fed(state, tokens)
    assert state.owned[d][:2] == shared


def test_published_blocks_give_way_to_sequences():
    state, tokens = make(blocks=4, sequences=2), numbers(300)
    a = fed(state, tokens)
    state.publish(a, tokens)
    state.close(a)
    assert state.pool.free == 2
    b, _ = state.open()
    grow(state, b, 3 * 128)
    assert not state.pool.prefixes and state.pool.free == 1
    check_counts(state)


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
    assert old * 32 not in batch.target[4] // 32 * 32 and int(batch.target[128][0]) == new
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


# What is read is what was written, whatever happened before.

TWO = dataclasses.replace(SMALL, compress_ratios=(CSA, SWA, HCA, CSA, SWA), max_position_embeddings=700)
ALL = 1000
BACK = (0, 1, 2, 3, 5, 9, 30, 60, 130, ALL)  # tokens to go back by, as far as that is possible
LAYER = 2.0**18  # added to a token for each layer, so that no layer has another's content; sums stay exact in fp32


class Content(RuleBasedStateMachine):
    """A model whose entries are token numbers: a walk over all that a state can do, beside plain lists of tokens.

    Tokens are new numbers each time they are fed, so content that is another's, or old, is never what is expected.
    """

    @initialize(sequences=st.integers(2, 3), total=st.integers(4, 9), chunk=st.sampled_from([33, 64, 150]))
    def begin(self, sequences: int, total: int, chunk: int) -> None:
        self.state = State(TWO, "fp32", sequences, total, chunk, snapshots=2)
        self.state.buffer[self.state._regions["window"].data_ptr() - self.state.buffer.data_ptr() :] = 255  # NaN
        self.history: dict[int, list[int]] = {}
        self.seen: list[list[int]] = [[]]  # what prompts are made of
        self.next_token = 1
        self.history[self.state.open()[0]] = []

    def fresh(self, count: int) -> list[int]:
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.history)))

    # What may happen.

    @precondition(lambda self: len(self.history) < len(self.state.lengths))
    @rule(data=st.data())
    def open(self, data: st.DataObject) -> None:
        offers = [p.tokens.tolist() for p in self.state.pool.prefixes]
        base = data.draw(st.sampled_from(offers * 3 + self.seen))
        tokens = base[: data.draw(st.sampled_from([len(base)] * 3 + [len(base) // 2, 128]))] + self.fresh(1)
        want = max((len(p) for p in offers if len(p) < len(tokens) and p == tokens[: len(p)]), default=0)
        slot, matched = self.state.open(tokens)
        assert matched == want and slot not in self.history
        self.history[slot] = tokens[:matched]

    @precondition(lambda self: self.history)
    @rule(data=st.data(), times=st.integers(1, 4))
    def feed(self, data: st.DataObject, times: int) -> None:
        slots = data.draw(st.permutations(sorted(self.history)))[: data.draw(st.integers(1, 3))]
        for _ in range(times):
            most = {slot: min(self.state.chunk, 700 - len(self.history[slot])) for slot in slots}
            counts = {slot: data.draw(st.integers(1, n) | st.just(n)) for slot, n in most.items() if n}
            if counts:
                self.forward({slot: self.fresh(count) for slot, count in counts.items()}, data.draw(st.integers(0, 7)))

    @precondition(lambda self: self.history)
    @rule(data=st.data(), length=st.sampled_from([128, 130, 256, 260, 384, 390, 515, 660]), back=st.sampled_from(BACK))
    def grow(self, data: st.DataObject, length: int, back: int) -> None:
        """Past a boundary, which is published, and back, maybe to before it."""
        slot = self.pick(data)
        while count := min(self.state.chunk, max(0, length - len(self.history[slot]))):
            if not self.forward({slot: self.fresh(count)}, 1):
                return
        self.offer(slot)
        self.go_back(slot, back)

    @precondition(lambda self: self.history)
    @rule(data=st.data(), times=st.integers(1, 5), static=st.booleans())
    def decode(self, data: st.DataObject, times: int, static: bool) -> None:
        slots = data.draw(st.permutations(sorted(self.history)))[: data.draw(st.integers(1, 3))]
        for _ in range(times):
            new = {slot: self.fresh(1) for slot in slots if len(self.history[slot]) < 700}
            if new:
                self.forward(new, 1, single=True, static=static)

    def forward(self, new: dict[int, list[int]], kept: int, single: bool = False, static: bool = False) -> bool:
        """kept 0: the batch is given up after it was written. -> whether there were blocks for it."""
        state = self.state
        tokens = torch.tensor([token for part in new.values() for token in part])
        try:
            if static:
                state.reserve(dict.fromkeys(new, 1))
            batch = state.step(tuple(new), tokens, static) if single else state.plan(new)
        except OutOfBlocks:
            unchanged(state, OutOfBlocks, "missing", lambda: state.reserve({s: len(part) for s, part in new.items()}))
            return False
        after = {slot: self.history[slot] + part for slot, part in new.items()}
        self.write_and_read(batch, after)
        if kept:
            state.commit(batch)
            self.history |= after
        return True

    @precondition(lambda self: self.history)
    @rule(data=st.data(), back=st.sampled_from(BACK))
    def rewind(self, data: st.DataObject, back: int) -> None:
        self.go_back(self.pick(data), back)

    def go_back(self, slot: int, back: int) -> None:
        length = len(self.history[slot])
        length = 0 if back == ALL else min(length, max(self.state.floor(slot), length - back))
        self.seen = (self.seen + [self.history[slot]])[-6:]
        self.state.rewind(slot, length)
        self.history[slot] = self.history[slot][:length]

    def offer(self, slot: int) -> None:
        end = len(self.history[slot]) // 128 * 128
        if end and not self.state._holds(slot, end):
            with pytest.raises(ValueError, match="no longer holds"):
                self.state.publish(slot, self.history[slot])
            return
        assert self.state.publish(slot, self.history[slot]) == end
        self.seen = (self.seen + [self.history[slot]])[-6:]

    @precondition(lambda self: self.history)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        slot = self.pick(data)
        self.seen = (self.seen + [self.history.pop(slot)])[-6:]
        self.state.close(slot)

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "state"):
            check_counts(self.state)
            for slot, tokens in self.history.items():
                assert self.state.lengths[slot] == len(tokens)

    # A model that only moves numbers.

    def write_and_read(self, batch, after: dict[int, list[int]]) -> None:
        state, last = self.state, {int(batch.last[row]): slot for row, slot in enumerate(batch.slots)}
        for number, layer in enumerate((*state.layers, state.mtp)):
            extra = number * LAYER
            values = batch.tokens.float() + extra
            layer.window.write(batch.window_slot, values[:, None].expand(-1, 128))
            for tail in (layer.tail, layer.index_tail):
                if tail is not None:
                    tail[batch.sequence, batch.position % tail.shape[1]] = values[:, None, None]
            if layer.ratio:
                self.write_entries(batch, layer, after, extra)
            for n, slot in last.items():
                tokens = torch.tensor(after[slot]) + extra
                index = batch.window_index[n].long()
                assert index[: max(0, 128 - len(tokens))].eq(-1).all()
                assert torch.equal(layer.window.read(index[-len(tokens) :])[:, 5], tokens[-128:])
                if layer.ratio:
                    self.read_entries(batch, layer, n, tokens)

    def write_entries(self, batch, layer, after: dict[int, list[int]], extra: float) -> None:
        """An entry is its last token; the tail must hold all that it pools."""
        ratio, emit = layer.ratio, batch.emit[layer.ratio]
        pooled = 8 if ratio == CSA else HCA
        for n in emit.tolist():
            slot, position = int(batch.sequence[n]), int(batch.position[n])
            if (position + 1) % ratio == 0:
                first = max(0, position + 1 - pooled)
                rows = [p % layer.tail.shape[1] for p in range(first, position + 1)]
                want = torch.tensor(after[slot][first : position + 1]) + extra
                for tail in (layer.tail, layer.index_tail):
                    assert tail is None or torch.equal(tail[slot, rows, 1, 3], want)
        entries = batch.tokens[emit].float() + extra
        layer.cache.write(batch.target[ratio], entries[:, None].expand(-1, 128))
        if ratio == CSA:
            layer.index_keys.write(batch.target[ratio], entries[:, None].expand(-1, 128) + 0.5)

    def read_entries(self, batch, layer, n: int, tokens: torch.Tensor) -> None:
        """Every entry that token n sees is the sequence's own."""
        want = tokens[layer.ratio - 1 :: layer.ratio].float()
        assert int(batch.visible[layer.ratio][n]) == len(want) <= batch.entries[layer.ratio]
        if layer.ratio == HCA:
            index = batch.hca_index[n]
            assert index[len(want) :].eq(-1).all()
        else:
            ids = torch.full((len(batch.tokens), len(want) + 1), -1, dtype=torch.int32)
            ids[n, : len(want)] = torch.arange(len(want))
            index = batch.locate(ids)[n]
            assert int(index[-1]) == -1
            assert torch.equal(layer.index_keys.read(index[: len(want)].long())[:, 7], want + 0.5)
        assert torch.equal(layer.cache.read(index[: len(want)].long())[:, 9], want)


Content.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestContent = Content.TestCase
