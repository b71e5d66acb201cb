"""Write rows to the pages of a cache, in torch. The formats are those of cache/pages.py."""

import torch

from problems.dsv4_forward.cache.pages import Pages
from problems.dsv4_forward.weights import formats


def write(rows: torch.Tensor, pages: Pages, index: torch.Tensor, hadamard: bool = False) -> None:
    """Write row i of `rows` to row index[i] of the pages, rounded as their kind says.

    rows: fp32 or bf16 (E, D); index: int64 (E,), >= 0; hadamard: multiply by the Hadamard matrix first, rounded to the
    dtype of rows. Of two rows with one index either may win. ValueError: a shape is not that.
    """
    pages.write(index, formats.hadamard(rows) if hadamard else rows)
