"""problems/dsv4_forward/cache/batch.py: every index against slow loops, and replayable steps against planned ones."""

import itertools

import pytest
import torch

from problems.dsv4_forward.cache.batch import Planner
from problems.dsv4_forward.cache.plan import locate
from tests.dsv4.states import MOST, check_counts, check_indices, grow, make, opened, unchanged

EDGES = (0, 1, 2, 3, 4, 5, 126, 127, 128, 129, 131, 191, 192, 193, 255, 256, 257, 319, 320, 321, 383, 384, 500)


@pytest.mark.parametrize(("chunk", "ring"), [(1, 192), (64, 192), (65, 256), (200, 384)])
def test_indices_of_ragged_batches(chunk, ring):
    state = make(chunk)
    assert state.ring == ring
    counts = [count for count in (1, 2, 3, 4, 5, 127, 128, 129, 200) if count <= chunk]
    opened(state, 0, 0, 0)
    for number, edge in enumerate(EDGES if chunk > 1 else EDGES[::4]):
        lengths = (edge, EDGES[(3 * number + 5) % len(EDGES)], EDGES[(7 * number + 2) % len(EDGES)])
        for sequence, length in zip((2, 0, 1), lengths, strict=True):
            state.rewind(sequence, 0)
            grow(state, sequence, length)
        for each in range(2):
            some = [counts[(number + each * 4 + k) % len(counts)] for k in range(3)]
            batch = state.plan({sequence: [9] * count for sequence, count in zip((2, 0, 1), some, strict=True)})
            check_indices(state, batch, ring)
        check_indices(state, state.plan({1: torch.arange(counts[number % len(counts)])}), ring)
        check_indices(state, state.step((1,), torch.tensor([3])), ring)
        check_indices(state, state.step((1, 2, 0), torch.tensor([3, 4, 5])), ring)
    check_counts(state)


def test_batches_of_equal_sums_are_told_apart():
    state = make(64)
    a, b = opened(state, 0, 0)
    for n in (3, 5):
        check_indices(state, state.plan({a: [1] * n, b: [1] * (8 - n)}), state.ring)


def test_a_sequence_can_go_back_as_far_after_replayed_steps_as_after_planned_ones():
    floors = []
    for static in (True, False):
        state = make(1)
        (a,) = opened(state, 128)
        for _ in range(200):
            state.reserve({a: 1})
            state.commit(state.step((a,), torch.tensor([1]), static=static))
        floors.append(state.floor(a))
    assert floors[0] == floors[1] > 128 + 1


def test_tokens_arrive_in_order_whatever_they_come_in():
    state = make()
    a, b = opened(state, 3, 130)
    want = [1, 2, 3, 9, 8]
    assert state.plan({b: [1, 2, 3], a: [9, 8]}).tokens.tolist() == want
    assert state.plan({b: torch.tensor([1, 2, 3]), a: torch.tensor([9, 8])}).tokens.tolist() == want
    assert state.plan({b: (1, 2, 3), a: torch.tensor([9, 8])}).tokens.tolist() == want
    tokens = torch.tensor([5, 6])
    assert state.step((b, a), tokens).tokens is tokens


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2), (2, 0), (1,)])
def test_a_replayable_step_agrees_with_a_planned_one(order):
    state = make(64, blocks=30)
    sequences = opened(state, 0, 0, 0)
    for number in range(0, 300, 7):
        for sequence in sequences:
            grow(state, sequence, (0, 125, 250)[sequence] + number)
        tokens = torch.arange(len(order))
        planned = state.step(order, tokens)
        replayed = state.step(order, tokens, static=True)
        assert replayed.plan.bound == state.capacity == MOST and replayed.stamps is None
        same = {"": ("tokens", "last", "advance"), "plan": ("sequence", "owner", "sequence_ids")}
        same["lists"] = ("position", "window_target", "window_index")
        for of, names in same.items():
            both = [getattr(batch, of) if of else batch for batch in (planned, replayed)]
            for one, other in ([getattr(each, name) for each in both] for name in names):
                assert torch.equal(one, other) and one.dtype == other.dtype, names
        assert planned.segments == replayed.segments and planned.sequences == replayed.sequences
        assert torch.equal(replayed.lists.rows[:, : planned.lists.rows.shape[1]], planned.lists.rows)
        assert replayed.lists.rows.shape[1] == 8
        seen, hca = planned.plan.entries[128], replayed.lists.hca_index
        assert torch.equal(hca[:, :seen], planned.lists.hca_index)
        assert hca.shape[1] == MOST // 128 and bool((hca[:, seen:] == -1).all())
        ids = torch.arange(-1, planned.plan.entries[4], dtype=torch.int32).repeat(len(order), 1)
        for row, sequence in enumerate(order):
            count = 1 + (state.lengths[sequence] + 1) // 4
            places = [locate(batch.lists.rows, batch.plan.owner, ids, 32)[row, :count] for batch in (replayed, planned)]
            assert torch.equal(*places)
        for ratio in (4, 128):
            assert torch.equal(planned.lists.visible[ratio], replayed.lists.visible[ratio])
            assert replayed.plan.emit[ratio].tolist() == list(range(len(order)))
            want = [state.blocks * (128 // ratio)] * len(order)
            for n, place in zip(planned.plan.emit[ratio].tolist(), planned.lists.target[ratio].tolist(), strict=True):
                want[n] = place
            assert replayed.lists.target[ratio].tolist() == want


def test_closed_sequences_in_a_replay_stay_empty():
    state = make(64)
    a, b, c = opened(state, 200, 130, 131)
    state.reserve({a: 2, b: 1, c: 2})
    batch = state.step((a, b, c), torch.tensor([1, 2, 3]), static=True)
    state.close(b)
    state.commit(batch)
    assert (state.lengths[a], state.lengths[b], state.lengths[c]) == (201, 0, 132)
    later = state.step((a, b, c), torch.tensor([1, 2, 3]), static=True)
    assert later.lists.position.tolist() == [201, 0, 132]
    assert [later.lists.target[ratio][1] for ratio in (4, 128)] == [24 * 32, 24], "the page that nobody reads"
    state.commit(later, sequences=[c])
    assert (state.lengths[a], state.lengths[b], state.lengths[c]) == (201, 0, 133)
    with pytest.raises(ValueError, match=f"open sequence, got {b}"):
        state.commit(later, sequences=[b])
    check_counts(state)


def test_a_static_step_is_reserved_first_and_committed_once():
    state = make(64, blocks=4)
    a, b = opened(state, 128, 5)
    tokens = torch.tensor([1, 2])
    message = f"sequence {a} has 128 tokens reserved and would have 129: call reserve\\(\\) before each static step"
    unchanged(state, ValueError, message, lambda: state.step((a, b), tokens, static=True))
    state.reserve({a: 1, b: 1})
    for bound in (0, 128, MOST):
        with pytest.raises(ValueError, match=f"bound must be 129 to 512 tokens, got {bound}"):
            state.step((a, b), tokens, static=True, bound=bound)
    batch = state.step((a, b), tokens, static=True, bound=129)
    state.commit(batch)
    unchanged(state, ValueError, "has 129 tokens reserved and would have 130", lambda: state.commit(batch))
    state.reserve({a: 1, b: 1})
    with pytest.raises(ValueError, match="bound must be 130 to 512 tokens, got 129"):
        state.commit(batch)
    state.rewind(a, 100)
    with pytest.raises(ValueError, match=f"sequence {a} has 100 tokens reserved and would have 101"):
        state.step((a, b), tokens, static=True)
    check_counts(state)


def test_forms_of_batches_are_kept_but_not_without_end():
    state = make(8, sequences=5)
    sequences = opened(state, 1, 2, 3, 4, 5)
    for order in itertools.permutations(sequences, 3):
        state.step(order, torch.tensor([1, 2, 3]))
    assert len(state.planner._kept) == Planner.KEPT
    assert state.step(sequences, torch.arange(5)).plan.sequence.tolist() == sequences
