"""Give a state sequences with random contents and any lengths, without the passes that would compute them.

What a step reads is there and valid, and of the size that a model's own entries have; it is nothing that a model would
say. For measured steps (`fill`) each cache repeats ROWS random rows; for checked ones (`fill_exactly`) what no token
wrote is NaN.
"""

from collections.abc import Sequence

import torch

from problems.dsv4_forward.cache import plan
from problems.dsv4_forward.cache.pages import Pages
from problems.dsv4_forward.cache.plan import WINDOW
from problems.dsv4_forward.cache.state import State
from problems.dsv4_forward.weights.config import BLOCK_TOKENS, CSA

ROWS = 2048  # random rows of a cache; multiples of a page's
RMS = 1.5  # of entries and keys, which are normed: the mean of random_weights.py's norm weights
ALIKE = 3  # index keys in a row that are equal, so that scores tie
UNWRITTEN = 0xFF  # of bytes that no token wrote: NaN in every format


def fill(state: State, lengths: Sequence[int], seed: int) -> tuple[int, ...]:
    """Open a sequence for each of `lengths` (tokens), with contents drawn from the seed. -> their numbers.

    The contents of all other sequences are overwritten, and published prefixes forgotten. RuntimeError: sequences or
    blocks are too few; ValueError: a length is negative or above what the model takes.
    """
    sequences = _opened(state, lengths)
    source = torch.Generator().manual_seed(seed)
    for layer in (*state.layers, *([state.mtp] if state.mtp else ())):
        for pages in (layer.window, layer.cache, layer.index_keys):
            if pages is not None:
                _fill_pages(pages, source)
        for tail in (layer.tail, layer.index_tail):
            if tail is not None:
                tail.copy_(torch.randn(tail.shape[1:], generator=source))
    _begin(state, sequences, lengths)
    return sequences


def fill_exactly(state: State, lengths: Sequence[int], seed: int) -> tuple[int, ...]:
    """Do as `fill`, but what the next tokens cannot need is NaN: places that no token wrote or that are too old, in
    pages that are a sequence's too. ALIKE index keys in a row are equal.
    """
    sequences = _opened(state, lengths)
    source = torch.Generator().manual_seed(seed)
    window = torch.cat([_places(s, n, WINDOW - 1, state.ring) for s, n in zip(sequences, lengths, strict=True)])
    for layer in (*state.layers, *([state.mtp] if state.mtp else ())):
        _write(layer.window, window, 1, source)
        if not layer.ratio:
            continue
        counts = [length // layer.ratio for length in lengths]
        places = torch.cat([_entries(state, s, n, layer.ratio) for s, n in zip(sequences, counts, strict=True)])
        _write(layer.cache, places, 1, source)
        if layer.index_keys is not None:
            _write(layer.index_keys, places, ALIKE, source)
        pooled = (2 if layer.ratio == CSA else 1) * layer.ratio - 1
        for tail in (layer.tail, layer.index_tail):
            if tail is None:
                continue
            tail.view(torch.uint8).fill_(UNWRITTEN)
            rows = tail.flatten(0, 1)
            kept = [_places(s, n, pooled, tail.shape[1]) for s, n in zip(sequences, lengths, strict=True)]
            index = torch.cat(kept)
            rows[index.to(rows.device)] = torch.randn(len(index), *rows.shape[1:], generator=source).to(rows.device)
    _begin(state, sequences, lengths)
    return sequences


def _opened(state: State, lengths: Sequence[int]) -> tuple[int, ...]:
    sequences = tuple(state.open()[0] for _ in lengths)
    state.reserve(dict(zip(sequences, lengths, strict=True)))
    return sequences


def _begin(state: State, sequences: Sequence[int], lengths: Sequence[int]) -> None:
    for sequence, length in zip(sequences, lengths, strict=True):
        state.length[sequence].fill_(length)
    state.reload()


def _places(sequence: int, length: int, last: int, ring: int) -> torch.Tensor:
    """int64: the rows of a sequence's `last` tokens in rings of so many tokens, one sequence's behind another's."""
    return sequence * ring + torch.arange(max(0, length - last), length) % ring


def _entries(state: State, sequence: int, count: int, ratio: int) -> torch.Tensor:
    """int64: the rows of a sequence's first `count` entries in the cache of a ratio."""
    row, owner = state.table[sequence : sequence + 1].cpu(), torch.zeros(1, dtype=torch.int64)
    return plan.locate(row, owner, torch.arange(count).view(1, -1), BLOCK_TOKENS // ratio)[0].long()


def _write(pages: Pages, index: torch.Tensor, alike: int, source: torch.Generator) -> None:
    """Random rows at `index`, so many in a row of one content; all else UNWRITTEN."""
    pages.data.view(torch.uint8).fill_(UNWRITTEN)
    drawn = torch.randn(-(-len(index) // alike), pages.width, generator=source).mul_(RMS)
    rows = drawn.repeat_interleave(alike, 0)[: len(index)]
    pages.write(index.to(pages.data.device), rows.to(pages.data.device))


def _fill_pages(pages: Pages, source: torch.Generator) -> None:
    """Write the first rows, then copy their pages over all others."""
    drawn = min(len(pages.data), max(ROWS // pages.per_page, 1))
    rows = torch.randn(drawn * pages.per_page, pages.width, generator=source).mul_(RMS).to(pages.data.device)
    pages.write(torch.arange(len(rows), device=rows.device), rows)
    for start in range(drawn, len(pages.data), drawn):
        part = pages.data[start : start + drawn]
        part.copy_(pages.data[: len(part)])
