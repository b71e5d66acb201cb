"""Small states for tests, and slow checks of what a state says."""

import dataclasses
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from problems.dsv4_forward.cache.state import State
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
    lists = [list(getattr(state, name)) for name in ("lengths", "written", "anchor", "_open", "_stamps")]
    blocks = [list(owned) for owned in (*state.owned, state.pool.references)]
    return lists, blocks, state.pool.free, state.pool.prefixes


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
