"""Random walks over all that a state does: what is read is what was written, whatever happened before."""

import dataclasses

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from problems.dsv4_forward.cache.plan import locate
from problems.dsv4_forward.cache.state import Batch, LayerState, OutOfBlocks, State
from problems.dsv4_forward.weights.config import CSA, HCA, SWA
from tests.dsv4.states import SMALL, check_counts, unchanged

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
        sequence, matched = self.state.open(tokens)
        assert matched == want and sequence not in self.history
        self.history[sequence] = tokens[:matched]

    @precondition(lambda self: self.history)
    @rule(data=st.data(), times=st.integers(1, 4))
    def feed(self, data: st.DataObject, times: int) -> None:
        sequences = data.draw(st.permutations(sorted(self.history)))[: data.draw(st.integers(1, 3))]
        for _ in range(times):
            most = {sequence: min(self.state.chunk, 700 - len(self.history[sequence])) for sequence in sequences}
            counts = {sequence: data.draw(st.integers(1, n) | st.just(n)) for sequence, n in most.items() if n}
            if counts:
                new = {sequence: self.fresh(count) for sequence, count in counts.items()}
                self.forward(new, data.draw(st.integers(0, 7)))

    @precondition(lambda self: self.history)
    @rule(data=st.data(), length=st.sampled_from([128, 130, 256, 260, 384, 390, 515, 660]), back=st.sampled_from(BACK))
    def grow(self, data: st.DataObject, length: int, back: int) -> None:
        """Past a boundary, which is published, and back, maybe to before it."""
        sequence = self.pick(data)
        while count := min(self.state.chunk, max(0, length - len(self.history[sequence]))):
            if not self.forward({sequence: self.fresh(count)}, 1):
                return
        self.offer(sequence)
        self.go_back(sequence, back)

    @precondition(lambda self: self.history)
    @rule(data=st.data(), times=st.integers(1, 5), static=st.booleans())
    def decode(self, data: st.DataObject, times: int, static: bool) -> None:
        sequences = data.draw(st.permutations(sorted(self.history)))[: data.draw(st.integers(1, 3))]
        for _ in range(times):
            new = {sequence: self.fresh(1) for sequence in sequences if len(self.history[sequence]) < 700}
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
        after = {sequence: self.history[sequence] + part for sequence, part in new.items()}
        self.write_and_read(batch, after)
        if kept:
            state.commit(batch)
            self.history |= after
        return True

    @precondition(lambda self: self.history)
    @rule(data=st.data(), back=st.sampled_from(BACK))
    def rewind(self, data: st.DataObject, back: int) -> None:
        self.go_back(self.pick(data), back)

    def go_back(self, sequence: int, back: int) -> None:
        length = len(self.history[sequence])
        length = 0 if back == ALL else min(length, max(self.state.floor(sequence), length - back))
        self.seen = (self.seen + [self.history[sequence]])[-6:]
        self.state.rewind(sequence, length)
        self.history[sequence] = self.history[sequence][:length]

    def offer(self, sequence: int) -> None:
        end = len(self.history[sequence]) // 128 * 128
        if end and not self.state._holds(sequence, end):
            with pytest.raises(ValueError, match="no longer holds"):
                self.state.publish(sequence, self.history[sequence])
            return
        assert self.state.publish(sequence, self.history[sequence]) == end
        self.seen = (self.seen + [self.history[sequence]])[-6:]

    @precondition(lambda self: self.history)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        self.seen = (self.seen + [self.history.pop(sequence)])[-6:]
        self.state.close(sequence)

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "state"):
            check_counts(self.state)
            for sequence, tokens in self.history.items():
                assert self.state.lengths[sequence] == len(tokens)

    # A model that only moves numbers.

    def write_and_read(self, batch: Batch, after: dict[int, list[int]]) -> None:
        state, last = self.state, {int(batch.last[row]): sequence for row, sequence in enumerate(batch.sequences)}
        for number, layer in enumerate((*state.layers, state.mtp)):
            extra = number * LAYER
            values = batch.tokens.float() + extra
            layer.window.write(batch.lists.window_target, values[:, None].expand(-1, 128))
            for tail in (layer.tail, layer.index_tail):
                if tail is not None:
                    tail[batch.plan.sequence, batch.lists.position % tail.shape[1]] = values[:, None, None]
            if layer.ratio:
                self.write_entries(batch, layer, after, extra)
            for n, sequence in last.items():
                tokens = torch.tensor(after[sequence]) + extra
                index = batch.lists.window_index[n].long()
                assert index[: max(0, 128 - len(tokens))].eq(-1).all()
                assert torch.equal(layer.window.read(index[-len(tokens) :])[:, 5], tokens[-128:])
                if layer.ratio:
                    self.read_entries(batch, layer, n, tokens)

    def write_entries(self, batch: Batch, layer: LayerState, after: dict[int, list[int]], extra: float) -> None:
        """An entry is its last token; the tail must hold all that it pools."""
        ratio, emit = layer.ratio, batch.plan.emit[layer.ratio]
        pooled = 8 if ratio == CSA else HCA
        for n in emit.tolist():
            sequence, position = int(batch.plan.sequence[n]), int(batch.lists.position[n])
            if (position + 1) % ratio == 0:
                first = max(0, position + 1 - pooled)
                rows = [p % layer.tail.shape[1] for p in range(first, position + 1)]
                want = torch.tensor(after[sequence][first : position + 1]) + extra
                for tail in (layer.tail, layer.index_tail):
                    assert tail is None or torch.equal(tail[sequence, rows, 1, 3], want)
        entries = batch.tokens[emit].float() + extra
        layer.cache.write(batch.lists.target[ratio], entries[:, None].expand(-1, 128))
        if ratio == CSA:
            layer.index_keys.write(batch.lists.target[ratio], entries[:, None].expand(-1, 128) + 0.5)

    def read_entries(self, batch: Batch, layer: LayerState, n: int, tokens: torch.Tensor) -> None:
        """Every entry that token n sees is the sequence's own."""
        want = tokens[layer.ratio - 1 :: layer.ratio].float()
        assert int(batch.lists.visible[layer.ratio][n]) == len(want) <= batch.plan.entries[layer.ratio]
        if layer.ratio == HCA:
            index = batch.lists.hca_index[n]
            assert index[len(want) :].eq(-1).all()
        else:
            ids = torch.full((len(batch.tokens), len(want) + 1), -1, dtype=torch.int32)
            ids[n, : len(want)] = torch.arange(len(want))
            index = locate(batch.lists.rows, batch.plan.owner, ids, 32)[n]
            assert int(index[-1]) == -1
            listed = batch.lists.csa_index
            assert (listed is None) == (batch.plan.entries[CSA] > TWO.index_topk)
            if listed is not None:
                assert torch.equal(listed[n, : len(want)], index[:-1]) and listed[n, len(want) :].eq(-1).all()
            assert torch.equal(layer.index_keys.read(index[: len(want)].long())[:, 7], want + 0.5)
        assert torch.equal(layer.cache.read(index[: len(want)].long())[:, 9], want)


Content.TestCase.settings = settings(max_examples=10, stateful_step_count=30, deadline=None)
TestContent = Content.TestCase
