"""Sequences of a model: memory, drafting, bad ids, states of others. That none sees another is in test_walk.py."""

import dataclasses
import gc
from array import array

import pytest
import torch

from problems.dsv4_forward.cache.state import OutOfBlocks, State
from problems.dsv4_forward.generate.mtp import Speculative, draft
from problems.dsv4_forward.model import Model, feed
from problems.dsv4_forward.weights import tree
from problems.dsv4_forward.weights.config import TINY
from tests.dsv4 import oracle
from tests.dsv4.models import decoded, greedy, opened
from tests.dsv4.states import unchanged

TOLERANCE = 1e-5  # of logits with a standard deviation of about 1, for other shapes of the same sums


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(oracle.weights_of("tiny"))


def prompt(length: int, seed: int, vocab: int = TINY.vocab_size) -> list[int]:
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def decode_memory(model: Model, steps: int) -> tuple[int, int]:
    """Bytes of tensors that are alive a tenth into a decode of so many steps, and at its end."""
    (state, sequence), seen, token = opened(model, blocks=40), [], 1
    for step in range(steps):
        token = int(feed(model, state, {sequence: [token]})[0].argmax())
        if step in (steps // 10, steps - 1):
            gc.collect()
            tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.layout is torch.strided]
            seen.append(sum(t.untyped_storage().nbytes() for t in tensors))
    return seen[0], seen[1]


@pytest.mark.parametrize("steps", [20, pytest.param(400, marks=pytest.mark.slow)])
def test_memory_is_flat_over_a_decode(model, steps):
    early, late = decode_memory(model, steps)
    assert late <= early * 1.001, f"{early} bytes early, {late} at the end"


@pytest.fixture(scope="module")
def drafting() -> Model:
    """TINY with a prediction layer, in fp32, random weights."""
    cfg = dataclasses.replace(TINY, compress_ratios=(*TINY.ratios, 0), num_nextn_predict_layers=1)
    return Model(tree.random(cfg, "fp32", seed=5))


@pytest.mark.parametrize("guesses", ["right", "wrong", "its own"])
def test_drafting_ends_where_greedy_decoding_ends(drafting, guesses, monkeypatch):
    """At the model's last position, whether one or two tokens are left for the last pass. With guesses that always hit,
    each pass gives two tokens; with those that never do, one.
    """
    short = dataclasses.replace(drafting.config, max_position_embeddings=30)
    model = Model(tree.assemble(short, "fp32", drafting.weights.tensors))
    for length in (23, 24, 29, 30):
        tokens = prompt(length, length)
        wanted = greedy(model, tokens, 99)
        assert len(wanted) == 31 - length

        def guess(self, batch, copies, following, row, wanted=wanted, length=length):
            place = int(batch.lists.position[row]) + 2 - length
            assert place < 1 or following[row] == wanted[place - 1], "the token behind which it guesses"
            place = min(place, len(wanted) - 1)
            self._guess = (wanted[place] + (guesses == "wrong")) % short.vocab_size

        with monkeypatch.context() as patch:
            if guesses != "its own":
                patch.setattr(Speculative, "_draft", guess)
            state, sequence = opened(model, blocks=1)
            speculative = Speculative(model, state, sequence)
            got, steps = [speculative.prefill(tokens)], list(speculative.steps())
        got += [token for step in steps for token in step.tokens]
        assert got == wanted and state.lengths == [30]
        assert all(step.accepted == (len(step.tokens) == 2) for step in steps)
        if guesses == "right":
            assert [len(step.tokens) for step in steps] == [2] * ((30 - length) // 2) + [1] * ((30 - length) % 2)
        elif guesses == "wrong":
            assert {len(step.tokens) for step in steps} <= {1}


def test_drafting_needs_a_prompt_a_prediction_layer_and_room_for_a_guess(drafting, model):
    state = State(drafting.config, "fp32", sequences=2, blocks=2)
    with pytest.raises(ValueError, match=r"prefill\(\) must come before steps"):
        next(Speculative(drafting, state, state.open()[0]).steps())
    with pytest.raises(ValueError, match="tiny has no prediction layer"):
        Speculative(model, State(TINY, "fp32", sequences=1, blocks=1), 0)
    with pytest.raises(ValueError, match="chunk must be 2 or more"):
        Speculative(drafting, State(drafting.config, "fp32", 1, 1, chunk=1), 0)
    tokens = prompt(128, 3)  # the last of its block: the guess has none, since another sequence has the second
    other, _ = state.open()
    feed(drafting, state, {other: [1]})
    alone, wanted = State(drafting.config, "fp32", sequences=1, blocks=2), []
    for each, sequence in ((alone, alone.open()[0]), (state, 0)):
        speculative = Speculative(drafting, each, sequence)
        first = speculative.prefill(tokens[:127])
        wanted.append((first, next(speculative.steps()).tokens[0]))
    assert wanted[0] == wanted[1] and state.lengths[0] == 128
    with pytest.raises(OutOfBlocks):
        next(speculative.steps())


BAD_IDS = [[-1], [1, 2, -3], [512], [3, 10**20], [1.5], [1, None], ["1"], "12", [[1]], 7]
BAD_IDS += [torch.tensor(ids) for ids in ([-1], [512], [1.5], [[1]])] + [torch.tensor([1], dtype=torch.int32)]


@pytest.mark.parametrize("bad", BAD_IDS, ids=repr)
def test_ids_that_are_no_tokens_are_refused_before_anything_runs(drafting, bad):
    """At every entry, also where they come behind a whole chunk of right ones."""

    class Untouched:
        def __getattr__(self, name):
            raise AssertionError(f"{name} ran")

    state = State(drafting.config, "fp32", sequences=2, blocks=4, chunk=8)
    sequence, untouched = state.open()[0], Model(drafting.weights, Untouched())
    late = [1] * 20 + list(bad) if isinstance(bad, list) else bad
    entries = [
        lambda: feed(Model(drafting.weights, Untouched()), state, {sequence: bad}),
        lambda: feed(untouched, state, {sequence: late}),
        lambda: state.plan({sequence: bad}),
        lambda: state.open(bad),
        lambda: Speculative(untouched, state, sequence).prefill(late),
    ]
    if isinstance(bad, torch.Tensor):
        batch = state.plan({sequence: [1]})
        copies = torch.zeros(1, 4, TINY.hidden_size)
        state.reserve({sequence: 1})
        entries += [
            lambda: state.step((sequence,), bad),
            lambda: state.step((sequence,), bad, static=True),
            lambda: draft(untouched, batch, state, copies, bad),
        ]
    for entry in entries:
        unchanged(state, ValueError, "(tokens.*|following) must be (integers from 0 to 511|int64)", entry)


def test_every_form_of_right_ids_gives_the_same(model):
    tokens, found = prompt(20, 5), []
    arrays = torch.tensor(tokens).numpy()
    for given in (tokens, tuple(tokens), torch.tensor(tokens), arrays, list(arrays), array("q", tokens)):
        state = State(TINY, "fp32", sequences=1, blocks=1, chunk=8)
        found.append(feed(model, state, {state.open()[0]: given}))
    assert all(torch.equal(found[0], logits) for logits in found)


def test_a_pass_over_nothing_is_refused(model):
    state = State(TINY, "fp32", sequences=2, blocks=1)
    sequence, _ = state.open()
    for act, match in (
        (lambda: feed(model, state, {sequence: []}), f"one or more, got none for {sequence}"),
        (lambda: feed(model, state, {0.0: [1]}), "open sequence, got 0"),
        (lambda: state.reserve({sequence: -3}), "counts must be 0 or more, got -3"),
    ):
        unchanged(state, ValueError, match, act)


def test_states_and_batches_of_others_are_refused(model):
    state, other = (State(TINY, "fp32", sequences=1, blocks=1) for _ in range(2))
    batch, its = (each.plan({each.open()[0]: [1, 2]}) for each in (state, other))
    for entry in (lambda: model.forward(its, state), lambda: state.commit(its)):
        unchanged(state, ValueError, r"batch of sequences \(0,\) must be planned by th", entry)
    odd = dataclasses.replace(TINY, index_topk=17)
    for cfg, fmt, match in ((TINY, "bf16", "format, fp32, got one in bf16"), (odd, "fp32", "index_topk: 17 instead")):
        wrong = State(cfg, fmt, sequences=1, blocks=1)
        planned = wrong.plan({wrong.open()[0]: [1]})
        unchanged(wrong, ValueError, match, lambda wrong=wrong, planned=planned: model.forward(planned, wrong))
    state.commit(batch)
    unchanged(state, ValueError, "stale: it was committed", lambda: state.commit(batch))
    two = State(TINY, "fp32", sequences=2, blocks=2)
    one, _ = (two.open()[0] for _ in range(2))
    planned = two.plan({one: [1]})
    unchanged(two, ValueError, r"sequences must be of the batch, \(0,\), got 1", lambda: two.commit(planned, [1]))
    renamed = State(dataclasses.replace(TINY, name="another name"), "fp32", sequences=1, blocks=1)
    assert torch.equal(feed(model, renamed, {renamed.open()[0]: [1]}), feed(model, other, {0: [1]}))


def test_an_error_in_an_op_leaves_a_state_that_goes_on(model):
    tokens = prompt(20, 8)
    (wanted,) = decoded(model, tokens, 1)

    def fail(*args, **named):
        raise RuntimeError("no")

    state = State(TINY, "fp32", sequences=1, blocks=1, chunk=8)
    sequence, _ = state.open()
    feed(model, state, {sequence: tokens[:5]})
    broken = Model(model.weights, dataclasses.replace(model.ops, all_experts=fail))
    with pytest.raises(RuntimeError, match="no"):
        feed(broken, state, {sequence: tokens[5:]})
    assert state.lengths == [5] == state.length.tolist()
    assert float((feed(model, state, {sequence: tokens[5:]})[0] - wanted).abs().max()) <= TOLERANCE
