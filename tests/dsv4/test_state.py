"""cache/state.py, state_layout.py and batch.py: memory, what an error leaves, going back, steps that are replayed.

What the indices of a batch lead to is in test_walk.py.
"""

import dataclasses
import itertools

import pytest
import torch

from problems.dsv4_forward.cache.batch import Planner
from problems.dsv4_forward.cache.pages import Pages
from problems.dsv4_forward.cache.state import OutOfBlocks, State
from problems.dsv4_forward.weights.config import CSA, FORMATS, HCA, SWA, TINY
from tests.dsv4.states import MOST, SMALL, check_counts, grow, make, opened, unchanged

# Memory.


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("ratios", [SMALL.compress_ratios, (*TINY.ratios, 0), (SWA, SWA), (HCA, 0), (CSA, 0)])
def test_views_cover_the_buffer_once(ratios, fmt):
    cfg = dataclasses.replace(SMALL, compress_ratios=ratios)
    sizes = {"sequences": 3, "blocks": 5, "chunk": 9, "snapshots": 2}
    size = State.nbytes(cfg, fmt, **sizes)
    buffer = torch.full((size,), 255, dtype=torch.uint8)
    state = State(cfg, fmt, **sizes, buffer=buffer)
    assert state.buffer is buffer and state.lengths == state.length.tolist() == [0, 0, 0]
    assert bool((state.table == 5).all())
    buffer.zero_()
    total = 0
    for view in state._regions.values():
        view.view(torch.uint8).add_(1)
        total += view.numel() * view.itemsize
        assert (view.data_ptr() - buffer.data_ptr()) % 256 == 0
    assert int(buffer.max()) == 1 and int(buffer.sum()) == total
    assert size - total < 256 * len(state._regions), "padding only"
    buffer.zero_()
    for layer in (*state.layers, *([state.mtp] if state.mtp else [])):
        for part in (layer.window, layer.cache, layer.index_keys, layer.tail, layer.index_tail):
            if part is not None:
                data = part.data if isinstance(part, Pages) else part
                assert data.is_contiguous()
                data.view(torch.uint8).add_(1)
    assert int(buffer.max()) == 1
    rest = [view for name, view in state._regions.items() if name in ("length", "active", "table") or "saved" in name]
    assert int(buffer.sum()) == total - sum(view.numel() * view.itemsize for view in rest)


def test_pages_of_each_format():
    """How many, and how long rings and tails are, is told by what they hold."""
    csa, _, hca = State(SMALL, "released", sequences=3, blocks=5, chunk=70).layers[:3]
    assert (csa.cache.kind, csa.index_keys.kind, csa.window.kind) == ("entry", "index", "entry")
    assert (csa.window.per_page, csa.cache.per_page, csa.index_keys.per_page, hca.cache.per_page) == (64, 32, 32, 1)
    for fmt, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        plain = State(SMALL, fmt, 1, 1).layers[0]
        assert {part.data.dtype for part in (plain.cache, plain.index_keys, plain.window)} == {dtype}


@pytest.mark.parametrize("name", ["sequences", "blocks", "chunk", "snapshots"])
def test_sizes_are_checked(name):
    sizes = {"sequences": 1, "blocks": 1, "chunk": 1, "snapshots": 0}
    State(SMALL, "fp32", **sizes)
    with pytest.raises(ValueError, match=f"{name} must be {sizes[name]} or more, got {sizes[name] - 1}"):
        State(SMALL, "fp32", **{**sizes, name: sizes[name] - 1})
    size = State.nbytes(SMALL, "fp32", 1, 1)
    for wrong in (torch.zeros(size - 1, dtype=torch.uint8), torch.zeros(size, dtype=torch.int8)):
        with pytest.raises(ValueError, match=f"contiguous uint8 \\({size},\\)"):
            State(SMALL, "fp32", 1, 1, buffer=wrong)
    with pytest.raises(ValueError, match="sliding_window must be 128"):
        State(dataclasses.replace(SMALL, sliding_window=64), "fp32", 1, 1)


def test_running_out_of_blocks_changes_nothing():
    state = make(200, blocks=4)
    state.buffer.view(-1)[1000:].random_(generator=torch.Generator().manual_seed(1))
    state = make(200, blocks=4, buffer=state.buffer)
    a, b = opened(state, 127, 130)
    both = {a: [1] * 5, b: [1] * 127}
    unchanged(state, OutOfBlocks, "^1 blocks missing: 2 wanted, 1 of 4 available", lambda: state.plan(both))
    unchanged(state, OutOfBlocks, "^4 blocks missing: 5 wanted, 1 of 4 available", lambda: state.reserve({a: 600}))
    state.reserve({a: 100})
    grow(state, b, 256)
    unchanged(state, OutOfBlocks, "^1 blocks missing: 1 ", lambda: state.step((a, b), torch.tensor([1, 2])))
    with pytest.raises(OutOfBlocks) as caught:
        state.plan({b: [1] * 130})
    assert caught.value.missing == 2
    state.plan({a: [1] * 5})
    state.close(a)
    state.plan({b: [1] * 130})
    check_counts(state)


def test_arguments_are_checked_before_anything_is_written():
    state = make(8, blocks=9)
    (a,) = opened(state, 5)
    closed = 1 - a
    cases = [
        (lambda: state.plan({}), "name a sequence or more"),
        (lambda: state.plan({a: []}), f"1 to 8 tokens of a sequence, got 0 for {a}"),
        (lambda: state.plan({a: [1] * 9}), f"1 to 8 tokens of a sequence, got 9 for {a}"),
        (lambda: state.plan({a: [1], closed: [1]}), f"open sequence, got {closed}"),
        (lambda: state.reserve({a: MOST - 4}), f"would have {MOST + 1} tokens, more than the model's {MOST}"),
        (lambda: state.step((a, a), torch.tensor([1, 2])), "sequences must be distinct"),
        (lambda: state.step((), torch.tensor([])), "sequences must be distinct"),
        (lambda: state.step((a, 3), torch.tensor([1, 2]), static=True), "from 0 to 2"),
        (lambda: state.step((a,), torch.tensor([1, 2])), r"int64 \(1,\)"),
        (lambda: state.step((a,), torch.tensor([1], dtype=torch.int32)), r"int64 \(1,\)"),
        (lambda: state.step((closed,), torch.tensor([1])), f"open sequence, got {closed}"),
        (lambda: state.rewind(a, 6), "length must be 0 to 5"),
        (lambda: state.rewind(a, -1), "length must be 0 to 5"),
        (lambda: state.rewind(-1, 0), "open sequence, got -1"),
        (lambda: state.close(closed), f"open sequence, got {closed}"),
        (lambda: state.publish(closed, []), f"open sequence, got {closed}"),
    ]
    for act, match in cases:
        unchanged(state, ValueError, match, act)


def test_a_stale_batch_is_refused():
    state = make()
    a, b = opened(state, 5, 6)
    for change in (
        state.commit,
        lambda _: state.rewind(b, 3),
        lambda _: (state.close(b), state.open()),
        lambda _: state.commit(state.plan({b: [1]})),
    ):
        batch = state.plan({a: [1, 2], b: [1]})
        change(batch)
        with pytest.raises(ValueError, match="stale"):
            state.commit(batch)
    check_counts(state)


def test_the_host_side_is_found_in_a_restored_buffer():
    state = make(64, blocks=9)
    sequences = opened(state, 300, 5)
    state.publish(sequences[0], [7] * 300)
    saved, lengths, owned = state.buffer.clone(), list(state.lengths), [list(blocks) for blocks in state.owned]
    for sequence in sequences:
        state.commit(state.plan({sequence: [1] * 64}))
    other, old = make(64, blocks=9, buffer=saved.clone()), state.plan({sequences[0]: [1]})
    for each in (state, other):
        each.buffer.copy_(saved)
        each.reload()
        assert each.lengths == lengths and each.owned == owned and not each.pool.prefixes
        check_counts(each)
        each.plan({sequence: [1] * 9 for sequence in sequences})
        with pytest.raises(ValueError, match="can go back to 300 or more"):
            each.rewind(sequences[0], 299)
    with pytest.raises(ValueError, match="stale"):
        state.commit(old)


class Rings:
    """Which position each place of a sequence's rings holds, and what the next token reads: a slow model."""

    def __init__(self, chunk: int, ratios: tuple[int, ...] = (CSA, HCA)) -> None:
        window = (128 + chunk + 63) // 64 * 64
        tails = {"csa": chunk + 8} if CSA in ratios else {}
        self.sizes = {"window": window} | tails | ({"hca": chunk + 128} if HCA in ratios else {})
        self.held: dict[str, dict[int, int]] = {name: {} for name in self.sizes}

    def write(self, first: int, count: int) -> None:
        for name, size in self.sizes.items():
            self.held[name] |= {position % size: position for position in range(first, first + count)}

    def forget(self) -> None:
        self.held = {name: {} for name in self.held}

    def holds(self, length: int) -> bool:
        needs = {"window": length - 127, "csa": length // 4 * 4 - 4, "hca": length // 128 * 128}
        return all(
            self.held[name].get(position % self.sizes[name]) == position
            for name, first in needs.items()
            if name in self.sizes
            for position in range(max(first, 0), length)
        )


@pytest.mark.parametrize(
    ("chunk", "ratios"),
    [(chunk, (CSA, SWA, HCA)) for chunk in (1, 61, 64, 200)] + [(60, (ratio,)) for ratio in (SWA, CSA, HCA)],
)
def test_how_far_one_may_go_back(chunk, ratios):
    """Exactly as far as every ring holds what is read, and the error says how far."""
    gen = torch.Generator().manual_seed(chunk)
    cfg = dataclasses.replace(SMALL, compress_ratios=(*ratios, 0))
    state, rings = make(chunk, cfg=cfg), Rings(chunk, ratios)
    (sequence,) = opened(state, 0)
    for _ in range(25):
        length = state.lengths[sequence]
        count = min(int(torch.randint(1, chunk + 1, (), generator=gen)), MOST - length)
        while count and state.lengths[sequence] < MOST and int(torch.randint(4, (), generator=gen)):
            batch = state.plan({sequence: [1] * count})
            rings.write(state.lengths[sequence], count)
            if int(torch.randint(5, (), generator=gen)):  # else it is given up, though written
                state.commit(batch)
            count = min(count, MOST - state.lengths[sequence])
        length = state.lengths[sequence]
        can = [back for back in range(length + 1) if rings.holds(back)]
        assert [back for back in range(length + 1) if state._holds(sequence, back)] == can and length in can
        floor = next((n for n in range(length, 0, -1) if n - 1 not in can), 0)
        assert state.floor(sequence) == floor
        if bad := [back for back in range(length) if back not in can]:
            unchanged(
                state,
                ValueError,
                f"go back to {floor} or more tokens, or 0, got {bad[-1]}",
                lambda bad=bad: state.rewind(sequence, bad[-1]),
            )
        back = can[int(torch.randint(len(can), (), generator=gen))]
        state.rewind(sequence, back)
        if not back:
            rings.forget()
        check_counts(state)


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
