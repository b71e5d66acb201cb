"""Make a layer's rows behind its projections, in torch: queries, keys, entries, the indexer's queries.

Formats are those of cache/pages.py; formulas those of norm.py, rope.py and compressor.py. Values between the steps have
the dtype that they would have if each step were called by itself.
"""

from collections.abc import Sequence

import torch

from problems.dsv4_forward.cache.pages import Pages
from problems.dsv4_forward.torch_ops import compressor, norm, rope
from problems.dsv4_forward.weights import formats


def layer_rows(queries: dict, key: dict, compressed: Sequence[dict], index: dict | None = None) -> None:
    """Do norm_rotate(**queries), write_key(**key), write_entry(**one) for each of compressed, and index_query(**index),
    in any order: no output of one is an input or output of another. ValueError as these.
    """
    norm_rotate(**queries)
    write_key(**key)
    for one in compressed:
        write_entry(**one)
    if index is not None:
        index_query(**index)


def norm_rotate(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor
) -> None:
    """Write x, normed and rotated, to out. x, out: (N, ..., D), of the dtypes that rms_norm and rotate take."""
    norm.rms_norm(x, weight, eps, out)
    rope.rotate(out, cos, sin, out)


def write_key(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pages: Pages,
    index: torch.Tensor,
) -> None:
    """Write row i of x (N, D), normed and rotated, to row index[i] of the pages. index: int64 (N,)."""
    key = torch.empty_like(x)
    norm_rotate(x, weight, eps, cos, sin, key)
    write(key, pages, index)


def write_entry(
    projected: torch.Tensor,
    ape: torch.Tensor,
    norm_weight: torch.Tensor,
    position: torch.Tensor,
    sequence: torch.Tensor,
    tail: torch.Tensor,
    emit: torch.Tensor,
    ratio: int,
    overlap: bool,
    freqs: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    pages: Pages,
    index: torch.Tensor,
    hadamard: bool = False,
) -> None:
    """Store tokens in a compressor's ring; write the entry that ends at token emit[i] to row index[i] of the pages.

    index: int64 (Em,); hadamard: as write; the others as compress. A token of `emit` that ends no window may write to
    its row, or not.
    """
    pooled = torch.empty(len(emit), pages.width, dtype=dtype, device=projected.device)
    given = projected, ape, norm_weight, position, sequence, tail, emit, ratio, overlap, freqs, eps, dtype
    compressor.compress(*given, pooled)
    if len(emit):
        write(pooled, pages, index, hadamard)


def index_query(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, quantise: bool, out: torch.Tensor) -> None:
    """Write the indexer's queries x, rotated, to out; quantise: through Hadamard and as MXFP4 holds it, rounded to the
    dtype of x before. x, out: (N, heads, width), as rotate has them; out may be x.
    """
    turned = torch.empty_like(x)
    rope.rotate(x, cos, sin, turned)
    out.copy_(formats.round_trip_fp4(formats.hadamard(turned)) if quantise else turned)


def write(rows: torch.Tensor, pages: Pages, index: torch.Tensor, hadamard: bool = False) -> None:
    """Write row i of `rows` to row index[i] of the pages, rounded as their kind says.

    rows: fp32 or bf16 (E, D); index: int64 (E,), >= 0; hadamard: multiply by the Hadamard matrix first, rounded to the
    dtype of rows. Of two rows with one index either may win. ValueError: a shape is not that.
    """
    pages.write(index, formats.hadamard(rows) if hadamard else rows)
