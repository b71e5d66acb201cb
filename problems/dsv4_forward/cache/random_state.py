"""Give a state sequences with random contents and any lengths, without the passes that would compute them.

For measured steps: what a step reads is there and valid, and of the size that a model's own entries have; it is nothing
that a model would say. Each cache repeats ROWS random rows.
"""

from collections.abc import Sequence

import torch

from problems.dsv4_forward.cache.pages import Pages
from problems.dsv4_forward.cache.state import State

ROWS = 2048  # random rows of a cache; multiples of a page's
RMS = 1.5  # of entries and keys, which are normed: the mean of random_weights.py's norm weights


def fill(state: State, lengths: Sequence[int], seed: int) -> tuple[int, ...]:
    """Open a sequence for each of `lengths` (tokens), with contents drawn from the seed. -> their numbers.

    The contents of all other sequences are overwritten, and published prefixes forgotten. RuntimeError: sequences or
    blocks are too few; ValueError: a length is negative or above what the model takes.
    """
    sequences = tuple(state.open()[0] for _ in lengths)
    state.reserve(dict(zip(sequences, lengths, strict=True)))
    source = torch.Generator().manual_seed(seed)
    for layer in (*state.layers, *([state.mtp] if state.mtp else ())):
        for pages in (layer.window, layer.cache, layer.index_keys):
            if pages is not None:
                _fill_pages(pages, source)
        for tail in (layer.tail, layer.index_tail):
            if tail is not None:
                tail.copy_(torch.randn(tail.shape[1:], generator=source))
    for sequence, length in zip(sequences, lengths, strict=True):
        state.length[sequence].fill_(length)
    state.reload()
    return sequences


def _fill_pages(pages: Pages, source: torch.Generator) -> None:
    """Write the first rows, then copy their pages over all others."""
    drawn = min(len(pages.data), max(ROWS // pages.per_page, 1))
    rows = torch.randn(drawn * pages.per_page, pages.width, generator=source).mul_(RMS).to(pages.data.device)
    pages.write(torch.arange(len(rows), device=rows.device), rows)
    for start in range(drawn, len(pages.data), drawn):
        part = pages.data[start : start + drawn]
        part.copy_(pages.data[: len(part)])
