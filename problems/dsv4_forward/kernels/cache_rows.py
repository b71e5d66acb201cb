"""Make a layer's rows behind its projections in CUDA, in one launch: queries, keys, entries, the indexer's queries.

In torch a write of a key is 22 small operations behind the norm and the rotation, and a compressor about 40 with its
write. The interface and formulas are those of torch_ops/rows.py. Activations are all bf16 or all fp32; pages are of
every kind.
"""

from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int
from pathlib import Path

import torch

from problems.common import build
from problems.dsv4_forward.cache.pages import Pages
from problems.dsv4_forward.kernels.arguments import Own, PagesStruct, expect, fields, is_bf16, pages_struct, pointer

MOST_COMPRESSORS, MOST_POOLED = 2, 128  # of a layer; tokens that an entry pools: as in the source
MOST_WIDTH = 8192  # values of a row: what 48 KB of shared memory hold beside the sources of an entry, rounded down
KEY_GROUP = 32  # values that share a scale in the indexer
LONG, FP32 = torch.int64, torch.float32


class _Queries(Structure):
    _fields_ = fields("x weight out", "count each width")


class _Keys(Structure):
    _fields_ = [*fields("x weight", ""), ("pages", PagesStruct), *fields("index", "count")]


class _Entries(Structure):
    _fields_ = [
        *fields("projected ape freqs position sequence emit tail", "tokens emitted size ratio halves width half"),
        ("eps", c_float),
        *fields("weight", ""),
        ("pages", PagesStruct),
        *fields("index", "turned end"),
    ]


class _IndexQueries(Structure):
    _fields_ = fields("x out cosine sine", "count each width half quantise")


class _Step(Structure):
    _fields_ = [
        ("queries", _Queries),
        ("keys", _Keys),
        *fields("cosine sine", "half"),
        ("eps", c_float),
        ("entries", _Entries * MOST_COMPRESSORS),
        ("compressors", c_int),
        ("index", _IndexQueries),
    ]


class LayerRows(Own):
    """The op on one build."""

    SOURCE = Path(__file__).with_suffix(".cu")
    OPS = ("layer_rows",)

    def __init__(self, built: build.Artefact) -> None:
        self._launch = built.function("launch_layer_rows", POINTER(_Step), c_int)

    def layer_rows(self, queries: dict, key: dict, compressed: Sequence[dict], index: dict | None = None) -> object:
        """Compute torch_ops rows.layer_rows; the tokens of a sequence lie one behind the other, as a batch has them. A
        token of `emit` that ends no window writes nothing to the pages. ValueError: mixed dtypes, a tensor that is not
        contiguous, or of another dtype or shape.
        """
        if not serves(queries, key, compressed, index):
            return NotImplemented
        x, cos, sin = queries["x"], queries["cos"], queries["sin"]
        bf16 = is_bf16("x", x)
        for one in compressed:
            if one["dtype"] != x.dtype:
                raise ValueError(f"dtype must be that of the queries, {x.dtype}, got {one['dtype']}")
        step = _Step(
            queries=_queries(**queries),
            keys=_keys(**key, dtype=x.dtype),
            cosine=cos.data_ptr(),
            sine=sin.data_ptr(),
            half=cos.shape[1],
            eps=queries["eps"],
            entries=tuple(_entries(**one) for one in compressed),
            compressors=len(compressed),
            index=_IndexQueries() if index is None else _index_queries(**index, dtype=x.dtype),
        )
        build.check(self._launch(step, bf16), "layer_rows")
        return None


def serves(queries: dict, key: dict, compressed: Sequence[dict], index: dict | None) -> bool:
    """Whether the kernels compute the call, if its shapes and dtypes are right."""
    same = all(key[name] is queries[name] for name in ("cos", "sin")) and key["eps"] == queries["eps"]
    widths = [queries["x"].shape[-1], *(one["pages"].width for one in (key, *compressed))]
    turned = [one["pages"].width for one in compressed if one.get("hadamard")]
    if index is not None:
        widths.append(index["x"].shape[-1])
        turned += [width for width in widths[-1:] if index["quantise"]]
    fitting = all(0 < width <= MOST_WIDTH for width in widths) and len(compressed) <= MOST_COMPRESSORS
    whole = all(width % KEY_GROUP == 0 and not width & width - 1 for width in turned)  # a power of two
    return (
        same and fitting and whole and all(_pooled(one["ratio"], one["overlap"]) <= MOST_POOLED for one in compressed)
    )


def _pooled(ratio: int, overlap: bool) -> int:
    """Tokens of an entry."""
    return 2 * ratio if overlap else ratio


def _queries(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor
) -> _Queries:
    width = x.shape[-1]
    _angles(cos, sin, len(x), width)
    for name, tensor in (("x", x), ("out", out)):
        expect(name, tensor, x.dtype, x.shape)
    if weight is not None:
        expect("weight", weight, x.dtype, (width,))
    vectors = x.numel() // width
    return _Queries(x.data_ptr(), pointer(weight), out.data_ptr(), vectors, vectors // max(1, len(x)), width)


def _keys(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pages: Pages,
    index: torch.Tensor,
    dtype: torch.dtype,
) -> _Keys:
    _angles(cos, sin, len(index), pages.width)
    expect("key", x, dtype, (len(index), pages.width))
    expect("weight", weight, dtype, (pages.width,))
    expect("index", index, LONG, (len(index),))
    return _Keys(x.data_ptr(), weight.data_ptr(), pages_struct(pages), index.data_ptr(), len(index))


def _entries(
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
) -> _Entries:
    tokens, emitted, size, half = len(projected), len(emit), tail.shape[1], len(freqs)
    halves, pooled = 2 if overlap else 1, _pooled(ratio, overlap)
    wide = halves * pages.width
    for name, tensor, kind, shape in (
        ("projected", projected, FP32, (tokens, 2 * wide)),
        ("ape", ape, FP32, (ratio, wide)),
        ("norm_weight", norm_weight, dtype, (pages.width,)),
        ("position", position, LONG, (tokens,)),
        ("sequence", sequence, LONG, (tokens,)),
        ("tail", tail, FP32, (len(tail), size, 2, wide)),
        ("emit", emit, LONG, (emitted,)),
        ("freqs", freqs, FP32, (half,)),
        ("index", index, LONG, (emitted,)),
    ):
        expect(name, tensor, kind, shape)
    if size < pooled or 2 * half > pages.width:
        raise ValueError(
            f"the ring must hold the {pooled} tokens of an entry, and an entry {half} pairs; got {size} "
            f"tokens and {pages.width} values"
        )
    read = (tensor.data_ptr() for tensor in (projected, ape, freqs, position, sequence, emit, tail))
    sizes = tokens, emitted, size, ratio, halves, pages.width, half, eps
    return _Entries(*read, *sizes, norm_weight.data_ptr(), pages_struct(pages), index.data_ptr(), hadamard)


def _index_queries(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, quantise: bool, out: torch.Tensor, dtype: torch.dtype
) -> _IndexQueries:
    tokens, heads, width = x.shape
    _angles(cos, sin, tokens, width)
    for name, tensor in (("index x", x), ("index out", out)):
        expect(name, tensor, dtype, x.shape)
    pointers = (tensor.data_ptr() for tensor in (x, out, cos, sin))
    return _IndexQueries(*pointers, tokens * heads, heads, width, cos.shape[1], quantise)


def _angles(cos: torch.Tensor, sin: torch.Tensor, tokens: int, width: int) -> None:
    for name, tensor in (("cos", cos), ("sin", sin)):
        expect(name, tensor, FP32, (tokens, cos.shape[-1]))
    if 2 * cos.shape[1] > width:
        raise ValueError(f"cos and sin must have at most {width // 2} pairs, got {cos.shape[1]}")
