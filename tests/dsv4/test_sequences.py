"""Batches of sequences in one state: none sees another, whatever joins, leaves, shares or is taken back."""

import gc

import pytest
import torch

from problems.dsv4_forward.cache.state import State
from problems.dsv4_forward.generate.mtp import Speculative
from problems.dsv4_forward.model import Model, feed
from problems.dsv4_forward.weights import tree
from problems.dsv4_forward.weights.config import TINY, TINY_K
from tests.dsv4 import oracle

TOLERANCE = 1e-5  # of logits with a standard deviation of about 1, for other shapes of the same sums


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(oracle.weights_of("tiny"))


def prompt(length: int, seed: int, vocab: int = TINY.vocab_size) -> list[int]:
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def solo(model: Model, tokens: list[int], steps: int) -> tuple[list[int], list[torch.Tensor]]:
    """Greedy tokens and the logits that they came from, a sequence by itself."""
    state = State(TINY, "fp32", sequences=1, blocks=8)
    sequence, _ = state.open()
    logits = [feed(model, state, {sequence: tokens})[0]]
    for _ in range(steps - 1):
        logits.append(feed(model, state, {sequence: [int(logits[-1].argmax())]})[0])
    return [int(row.argmax()) for row in logits], logits


def test_a_ragged_batch_with_joins_and_leaves(model):
    """Four sequences start and end at different steps; prompts and steps of others are in the same calls."""
    prompts = [prompt(length, seed) for seed, length in enumerate((5, 131, 64, 140))]
    joins, steps = (0, 3, 1, 8), (22, 14, 6, 10)
    wanted = [solo(model, tokens, count) for tokens, count in zip(prompts, steps, strict=True)]
    state = State(TINY, "fp32", sequences=3, blocks=12)  # fewer than the sequences: one waits for a place
    sequences: dict[int, int] = {}
    got: dict[int, list[torch.Tensor]] = {i: [] for i in range(4)}
    waiting, step = [0, 1, 2, 3], 0
    while waiting or sequences:
        new: dict[int, list[int]] = {}
        for i in [i for i in waiting if joins[i] <= step and len(sequences) < 3]:
            sequences[i], _ = state.open()
            waiting.remove(i)
            new[sequences[i]] = prompts[i]
        for i, sequence in sequences.items():
            if sequence not in new:
                new[sequence] = [int(got[i][-1].argmax())]
        if new:
            rows = feed(model, state, new)
            for i, sequence in sequences.items():
                got[i].append(rows[list(new).index(sequence)])
        for i in [i for i in sequences if len(got[i]) == steps[i]]:
            state.close(sequences.pop(i))
        step += 1
    for i in range(4):
        tokens, logits = wanted[i]
        assert [int(row.argmax()) for row in got[i]] == tokens
        assert float((torch.stack(got[i]) - torch.stack(logits)).abs().max()) <= TOLERANCE


def test_a_shared_prefix_gives_the_same(model):
    shared = prompt(300, 50)
    first, second = shared + prompt(20, 51), shared + prompt(33, 52)
    state = State(TINY, "fp32", sequences=2, blocks=12)
    a, matched = state.open(first)
    assert matched == 0
    feed(model, state, {a: first})
    state.publish(a, first)
    free = state.pool.free
    b, matched = state.open(second)
    assert matched == 256, "two whole blocks of 128"
    assert state.pool.free == free, "a shared block is not taken again"
    got = [feed(model, state, {b: second[matched:]})[0]]
    for _ in range(8):
        got.append(feed(model, state, {b: [int(got[-1].argmax())], a: [1]})[0])
    _, wanted = solo(model, second, 9)
    assert float((torch.stack(got) - torch.stack(wanted)).abs().max()) <= TOLERANCE


@pytest.mark.parametrize(("length", "back"), [(129, 2), (12, 9), (257, 128)])
def test_rewinding_gives_the_same(model, length, back):
    tokens, other = prompt(length, 60), prompt(back + 40, 61)
    state = State(TINY, "fp32", sequences=1, blocks=8)
    sequence, _ = state.open()
    feed(model, state, {sequence: tokens})
    state.rewind(sequence, length - back)
    got = feed(model, state, {sequence: other})[0]
    wanted = solo(model, tokens[: length - back] + other, 1)[1][0]
    assert float((got - wanted).abs().max()) <= TOLERANCE


def test_a_reused_place_shows_nothing_of_its_last_user(model):
    state = State(TINY, "fp32", sequences=1, blocks=8)
    for length, seed in ((140, 70), (3, 71), (131, 72)):
        tokens = prompt(length, seed)
        sequence, _ = state.open()
        got = feed(model, state, {sequence: tokens})[0]
        assert float((got - solo(model, tokens, 1)[1][0]).abs().max()) <= TOLERANCE
        state.close(sequence)


def decode_memory(model: Model, steps: int) -> tuple[int, int]:
    """Bytes of tensors that are alive a tenth into a decode of so many steps, and at its end."""
    state = State(TINY, "fp32", sequences=1, blocks=40)
    sequence, _ = state.open()
    seen = []
    token = 1
    for step in range(steps):
        token = int(feed(model, state, {sequence: [token]})[0].argmax())
        if step in (steps // 10, steps - 1):
            gc.collect()
            seen.append(sum(t.untyped_storage().nbytes() for t in gc.get_objects() if type(t) is torch.Tensor))
    return seen[0], seen[1]


@pytest.mark.parametrize("steps", [20, pytest.param(2000, marks=pytest.mark.slow)])
def test_memory_is_flat_over_a_decode(model, steps):
    early, late = decode_memory(model, steps)
    assert late <= early * 1.001, f"{early} bytes early, {late} at the end"


@pytest.fixture(scope="module")
def drafting() -> Model:
    """TINY with a prediction layer, in fp32, random weights."""
    import dataclasses

    cfg = dataclasses.replace(TINY, compress_ratios=(*TINY.ratios, 0), num_nextn_predict_layers=1)
    return Model(tree.random(cfg, "fp32", seed=5))


@pytest.mark.parametrize("seed", [1, *(pytest.param(i, marks=pytest.mark.slow) for i in (0, *range(2, 10)))])
def test_drafting_gives_the_tokens_of_greedy_decoding(drafting, seed):
    cfg, tokens = drafting.config, prompt(20 + 37 * seed, 80 + seed)
    state = State(cfg, "fp32", sequences=1, blocks=8)
    sequence, _ = state.open()
    wanted = [int(feed(drafting, state, {sequence: tokens})[0].argmax())]
    for _ in range(23):
        wanted.append(int(feed(drafting, state, {sequence: [wanted[-1]]})[0].argmax()))
    state = State(cfg, "fp32", sequences=1, blocks=8)
    sequence, _ = state.open()
    speculative = Speculative(drafting, state, sequence)
    got, steps = [speculative.prefill(tokens)], speculative.steps()
    while len(got) < 24:
        got += next(steps).tokens
    assert got[:24] == wanted


def test_a_right_guess_is_accepted(drafting):
    """With a prediction that always hits, each pass gives two tokens; with one that never does, one."""
    from problems.dsv4_forward.generate import mtp

    tokens = prompt(140, 99)
    cfg, state = drafting.config, State(drafting.config, "fp32", sequences=1, blocks=8)
    sequence, _ = state.open()
    wanted = [int(feed(drafting, state, {sequence: tokens})[0].argmax())]
    for _ in range(26):
        wanted.append(int(feed(drafting, state, {sequence: [wanted[-1]]})[0].argmax()))
    for shift, count in ((0, 2), (1, 1)):

        def oracle(self, batch, copies, following, row, shift=shift):
            known = wanted.index(following[row]) if wanted.count(following[row]) == 1 else None
            done = int(batch.position[row]) + 1 - len(tokens)
            self._guess = (wanted[done + 1] + shift) % cfg.vocab_size
            assert known is None or known == done

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mtp.Speculative, "_draft", oracle)
            state = State(cfg, "fp32", sequences=1, blocks=8)
            sequence, _ = state.open()
            speculative = Speculative(drafting, state, sequence)
            got, steps = [speculative.prefill(tokens)], speculative.steps()
            for _ in range(12):
                step = next(steps)
                assert len(step.tokens) == count and step.accepted == (count == 2)
                got += step.tokens
        assert got == wanted[: len(got)]


def test_tiny_k_has_a_prediction_layer():
    assert TINY_K.num_nextn_predict_layers == 1
