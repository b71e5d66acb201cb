"""Small states for tests, and slow checks of what a state and its batches say."""

import dataclasses
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from problems.dsv4_forward.cache.plan import locate
from problems.dsv4_forward.cache.state import Batch, State
from problems.dsv4_forward.weights.config import CSA, HCA, SWA, TINY, Config

MOST = 1000  # tokens of a sequence; not a multiple of 128
SMALL = dataclasses.replace(
    TINY,
    name="small",
    compress_ratios=(CSA, SWA, HCA, CSA, SWA),
    num_nextn_predict_layers=1,
    max_position_embeddings=MOST,
    vocab_size=2**24,
)


def make(chunk: int = 128, sequences: int = 3, blocks: int = 24, cfg: Config = SMALL, **more: object) -> State:
    return State(cfg, "fp32", sequences, blocks, chunk, **more)


def grow(state: State, sequence: int, length: int) -> None:
    """Bring a sequence to that length; nothing is written but the bookkeeping."""
    while count := min(length - state.lengths[sequence], state.chunk):
        state.commit(state.plan({sequence: [7] * count}))


def opened(state: State, *lengths: int) -> list[int]:
    """New sequences of these lengths, opened so that sequences are not in order of use."""
    sequences = [state.open()[0] for _ in lengths][::-1]
    for sequence, length in zip(sequences, lengths, strict=True):
        grow(state, sequence, length)
    return sequences


def host(state: State) -> object:
    """All that the host knows, comparable."""
    return (
        list(state.lengths),
        [list(blocks) for blocks in state.owned],
        list(state.written),
        list(state.anchor),
        list(state._open),
        list(state._stamps),
        list(state.pool.references),
        state.pool.free,
        state.pool.prefixes,
    )


def check_counts(state: State) -> None:
    """References are those of sequences and prefixes; what nobody holds is free; the device has the same tables."""
    held = Counter(block for blocks in state.owned for block in blocks)
    held.update(block for prefix in state.pool.prefixes for block in prefix.blocks)
    assert state.pool.references == [held[block] for block in range(state.blocks)]
    assert sorted(state.pool._free) == [block for block in range(state.blocks) if not held[block]]
    table = state.table.tolist()
    for sequence, blocks in enumerate(state.owned):
        assert table[sequence] == blocks + [state.blocks] * (len(table[sequence]) - len(blocks))
    assert state.length.tolist() == state.lengths
    snapshots = [prefix.snapshot for prefix in state.pool.prefixes]
    assert sorted(snapshots + state.pool._spare) == list(range(state.pool.snapshots))


def unchanged(state: State, error: type[Exception], match: str, act: Callable) -> None:
    """`act` fails, and neither the host's side nor a byte of the buffer is another."""
    known, data = host(state), state.buffer.clone()
    with pytest.raises(error, match=match):
        act()
    assert host(state) == known and torch.equal(state.buffer, data)


def check_indices(state: State, batch: Batch, ring: int) -> None:
    """Every field of a planned batch, a token at a time."""
    n, plan, lists = 0, batch.plan, batch.lists
    bound = max(state.lengths[sequence] + count for _, count, sequence in batch.segments)
    assert plan.bound == bound and plan.entries == {4: bound // 4, 128: bound // 128}
    assert lists.rows.shape == (len(batch.sequences), -(-bound // 128)) and lists.rows.dtype == torch.int32
    emit, target = {4: [], 128: []}, {4: [], 128: []}
    assert lists.window_index.dtype == lists.hca_index.dtype == torch.int32 and lists.hca_index.is_contiguous()
    assert {field.dtype for field in lists.visible.values()} == {torch.int32}
    fields = (plan.sequence, plan.owner, lists.position, lists.window_target, batch.last)
    assert {field.dtype for field in (*fields, *plan.emit.values(), *lists.target.values())} == {torch.int64}
    ids = torch.arange(-1, bound // 4, dtype=torch.int32).repeat(len(lists.position), 1)
    located = locate(lists.rows, plan.owner, ids, 32).tolist()
    for row, (first, count, sequence) in enumerate(batch.segments):
        assert first == n and batch.sequences[row] == sequence and batch.last[row] == n + count - 1
        owned = state.owned[sequence]
        assert lists.rows[row].tolist()[: len(owned)] == owned[: lists.rows.shape[1]]
        for position in range(state.lengths[sequence], state.lengths[sequence] + count):
            assert (int(plan.sequence[n]), int(plan.owner[n]), int(lists.position[n])) == (sequence, row, position)
            assert int(lists.window_target[n]) == sequence * ring + position % ring
            seen = [sequence * ring + p % ring if p >= 0 else -1 for p in range(position - 127, position + 1)]
            assert lists.window_index[n].tolist() == seen
            for ratio in (4, 128):
                assert int(lists.visible[ratio][n]) == (position + 1) // ratio
                if (position + 1) % ratio == 0:
                    entry, per_page = position // ratio, 128 // ratio
                    emit[ratio].append(n)
                    target[ratio].append(owned[entry // per_page] * per_page + entry % per_page)
            if bound // 4 <= state.planner.topk:
                places = located[n][1 : 1 + (position + 1) // 4]
                assert lists.csa_index[n].tolist() == places + [-1] * (bound // 4 - len(places))
            else:
                assert lists.csa_index is None
            seen = owned[: (position + 1) // 128]
            assert lists.hca_index[n].tolist() == seen + [-1] * (bound // 128 - len(seen))
            seen = [owned[entry // 32] * 32 + entry % 32 for entry in range((position + 1) // 4)]
            assert located[n][: 1 + len(seen)] == [-1, *seen]
            n += 1
    assert {ratio: part.tolist() for ratio, part in plan.emit.items()} == emit
    assert {ratio: part.tolist() for ratio, part in lists.target.items()} == target
