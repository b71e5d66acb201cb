"""Compute in CUDA what a token leaves in the cache, and its queries, in one launch each.

In torch a write of a key is 22 small operations behind the norm and the rotation, and a compressor about 40 with its
write. The interfaces and formulas are those of torch_ops/chains.py, writes.py and compressor.py. Activations are all
bf16 or all fp32; pages are of every kind.
"""

from collections.abc import Callable, Sequence
from ctypes import Array, c_float, c_int, c_longlong, c_void_p, create_string_buffer
from pathlib import Path

import torch

from problems.common import build
from problems.dsv4_forward.cache.pages import Pages

TARGETS = ("sm90", "sm100")
OPS = ("norm_rotate", "write", "write_key", "compress", "write_entry", "index_query", "layer_rows")
SOURCE = Path(__file__).with_suffix(".cu")
KINDS = {
    ("plain", torch.float32): 0,
    ("plain", torch.bfloat16): 1,
    ("entry", torch.uint8): 2,
    ("index", torch.uint8): 3,
}
MOST_POOLED = 128  # tokens that an entry pools
MOST_WIDTH = 8192  # values of a row: what 48 KB of shared memory hold beside the sources of an entry, rounded down


KEY_GROUP = 32  # values that share a scale in the indexer
STEP_BYTES = 1024  # room for what one launch of layer_rows is given


def compile_for(target: str) -> list[build.Artefact]:
    """Compile for `target`, without a GPU."""
    return [build.cuda(SOURCE, target)]


def ops(target: str) -> dict[str, Callable[..., None]]:
    """Build and load the kernels. -> by op. BuildError as build.cuda."""
    made = Entries(build.cuda(SOURCE, target))
    return {
        "norm_rotate": made.norm_rotate,
        "write": made.write,
        "write_key": made.write_key,
        "compress": made.compress,
        "write_entry": made.write_entry,
        "index_query": made.index_query,
        "layer_rows": made.layer_rows,
    }


class Entries:
    """The ops on one build. ValueError, in each: mixed dtypes, a tensor that is not contiguous, sizes beyond those of
    the kernels.
    """

    def __init__(self, built: build.Artefact) -> None:
        p, i, f = c_void_p, c_int, c_float
        self._norm_rotate = built.function("launch_norm_rotate", *[p] * 5, i, i, i, i, f, i, p)
        self._write = built.function("launch_write", *[p] * 5, c_longlong, i, i, i, i, p, i, i, i, f, i, p)
        self._compress = built.function(
            "launch_compress", *[p] * 7, *[i] * 7, f, p, p, p, c_longlong, i, i, i, p, i, i, p
        )
        self._index_query = built.function("launch_index_query", *[p] * 4, *[i] * 6, p)
        self._layer_rows = built.function("launch_layer_rows", p)

    def norm_rotate(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        cos: torch.Tensor,
        sin: torch.Tensor,
        out: torch.Tensor,
        into: Array | None = None,
    ) -> None:
        """Compute chains.norm_rotate; weight of the dtype of x. into: of layer_rows."""
        bf16 = _bf16(x, out, *(() if weight is None else (weight,)))
        d, half = _width(x.shape[-1]), _half(cos, sin, len(x), x.shape[-1])
        vectors = x.numel() // d
        if vectors:
            code = self._norm_rotate(
                x.data_ptr(),
                _pointer(weight),
                cos.data_ptr(),
                sin.data_ptr(),
                out.data_ptr(),
                vectors,
                vectors // len(x),
                d,
                half,
                eps,
                bf16,
                into,
            )
            build.check(code, "norm_rotate")

    def write(self, rows: torch.Tensor, pages: Pages, index: torch.Tensor, hadamard: bool = False) -> None:
        """Compute writes.write."""
        self._write_rows(rows, None, 0.0, None, None, pages, index, hadamard, None)

    def write_key(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        cos: torch.Tensor,
        sin: torch.Tensor,
        pages: Pages,
        index: torch.Tensor,
        into: Array | None = None,
    ) -> None:
        """Compute chains.write_key; weight of the dtype of x. into: of layer_rows."""
        self._write_rows(x, weight, eps, cos, sin, pages, index, False, into)

    def compress(
        self,
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
        out: torch.Tensor,
    ) -> None:
        """Compute compressor.compress; the tokens of a sequence lie one behind the other, as a batch has them."""
        _bf16(out, norm_weight)
        given = projected, ape, norm_weight, position, sequence, tail, emit, ratio, overlap, freqs, eps, dtype
        self._pool(*given, out.shape[1], out.data_ptr(), None, None, False, None)

    def write_entry(
        self,
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
        into: Array | None = None,
    ) -> None:
        """Compute chains.write_entry, tokens as in compress. A token of `emit` that ends no window writes nothing.
        into: of layer_rows.
        """
        given = projected, ape, norm_weight, position, sequence, tail, emit, ratio, overlap, freqs, eps, dtype
        self._pool(*given, pages.width, None, pages, index, hadamard, into)

    def index_query(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        quantise: bool,
        out: torch.Tensor,
        into: Array | None = None,
    ) -> None:
        """Compute chains.index_query; out of the shape and dtype of x. into: of layer_rows."""
        (tokens, heads, width), bf16 = x.shape, _bf16(x, out)
        half = _half(cos, sin, tokens, _width(width))
        if out.shape != x.shape:
            raise ValueError(f"out must be {tuple(x.shape)}, got {tuple(out.shape)}")
        if quantise and (width & width - 1 or width < KEY_GROUP):
            raise ValueError(f"x must have a power of two from {KEY_GROUP} on as its width, got {width}")
        if x.numel():
            pointers = (tensor.data_ptr() for tensor in (x, cos, sin, out))
            code = self._index_query(*pointers, tokens * heads, heads, width, half, quantise, bf16, into)
            build.check(code, "index_query")

    def layer_rows(self, queries: dict, key: dict, compressed: Sequence[dict], index: dict | None = None) -> None:
        """Compute chains.layer_rows, in one launch; what layer_rows.cuh does not take, in one each before it."""
        into = create_string_buffer(STEP_BYTES)
        self.norm_rotate(**queries, into=into)
        self.write_key(**key, into=into)
        for one in compressed:
            self.write_entry(**one, into=into)
        if index is not None:
            self.index_query(**index, into=into)
        build.check(self._layer_rows(into), "layer_rows")

    def _write_rows(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        pages: Pages,
        index: torch.Tensor,
        hadamard: bool,
        into: Array | None,
    ) -> None:
        bf16 = _bf16(x, *(() if weight is None else (weight,)))
        if tuple(x.shape) != (len(index), _width(pages.width)):
            raise ValueError(f"rows must be {(len(index), pages.width)}, got {tuple(x.shape)}")
        _turned(hadamard, pages.width)
        half = 0 if cos is None else _half(cos, sin, len(x), pages.width)
        if len(x):
            code = self._write(
                x.data_ptr(),
                _pointer(weight),
                _pointer(cos),
                _pointer(sin),
                *_pages(pages),
                _long("index", index),
                len(x),
                half,
                hadamard,
                eps,
                bf16,
                into,
            )
            build.check(code, "write")

    def _pool(
        self,
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
        width: int,
        out: int | None,
        pages: Pages | None,
        index: torch.Tensor | None,
        hadamard: bool,
        into: Array | None,
    ) -> None:
        halves = 2 if overlap else 1
        wide, pooled = halves * width, halves * ratio
        _plain(projected=(projected, (len(projected), 2 * wide)), ape=(ape, (ratio, wide)), freqs=(freqs, freqs.shape))
        _plain(tail=(tail, (*tail.shape[:2], 2, wide)))
        _width(width)
        _turned(hadamard, width)
        if pooled > MOST_POOLED or tail.shape[1] < pooled or 2 * len(freqs) > width:
            raise ValueError(
                f"an entry must pool at most {MOST_POOLED} tokens, and the ring hold them; got {pooled} and "
                f"{tail.shape[1]}, {len(freqs)} pairs of {width}"
            )
        if norm_weight.dtype != dtype or _bf16(norm_weight) not in (0, 1):
            raise ValueError(f"norm_weight must be of the model's {dtype}, got {norm_weight.dtype}")
        if not len(projected):
            return
        where = (None, 0, 0, 1, 0) if pages is None else _without_width(pages)
        code = self._compress(
            projected.data_ptr(),
            ape.data_ptr(),
            freqs.data_ptr(),
            _long("position", position),
            _long("sequence", sequence),
            _long("emit", emit),
            tail.data_ptr(),
            len(projected),
            len(emit),
            tail.shape[1],
            ratio,
            halves,
            width,
            len(freqs),
            eps,
            norm_weight.data_ptr(),
            out,
            *where,
            None if index is None else _long("index", index),
            hadamard,
            int(dtype == torch.bfloat16),
            into,
        )
        build.check(code, "compress")


def _pages(pages: Pages) -> tuple[int, int, int, int, int, int]:
    """Address, bytes of a page, kind, rows of a page, width, rope."""
    kind = KINDS[pages.kind, pages.data.dtype]
    size = pages.data[0].numel() * pages.data.element_size()
    return pages.data.data_ptr(), size, kind, pages.per_page, pages.width, pages.rope


def _without_width(pages: Pages) -> tuple[int, int, int, int, int]:
    data, size, kind, per_page, _, rope = _pages(pages)
    return data, size, kind, per_page, rope


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _long(name: str, tensor: torch.Tensor) -> int:
    """The address of an int64 vector."""
    if tensor.dtype != torch.int64 or not tensor.is_contiguous():
        raise ValueError(f"{name} must be int64, contiguous, got {tensor.dtype} with strides {tensor.stride()}")
    return tensor.data_ptr()


def _plain(**wanted: tuple[torch.Tensor, tuple[int, ...]]) -> None:
    for name, (tensor, shape) in wanted.items():
        if tensor.dtype != torch.float32 or tuple(tensor.shape) != tuple(shape) or not tensor.is_contiguous():
            came = f"{tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}"
            raise ValueError(f"{name} must be fp32 {tuple(shape)}, contiguous, got {came}")


def _half(cos: torch.Tensor, sin: torch.Tensor, tokens: int, width: int) -> int:
    half = cos.shape[-1]
    _plain(cos=(cos, (tokens, half)), sin=(sin, (tokens, half)))
    if 2 * half > width:
        raise ValueError(f"cos and sin must have at most {width // 2} pairs, got {half}")
    return half


def _width(width: int) -> int:
    if not 0 < width <= MOST_WIDTH:
        raise ValueError(f"rows must have 1 to {MOST_WIDTH} values, got {width}")
    return width


def _turned(hadamard: bool, width: int) -> None:
    if hadamard and width & width - 1:
        raise ValueError(f"rows must have a power of two as their width for Hadamard, got {width}")


def _bf16(*tensors: torch.Tensor) -> int:
    """1 if all are bf16, 0 if all are fp32. ValueError: neither, or one is not contiguous."""
    kinds = {tensor.dtype for tensor in tensors}
    if kinds not in ({torch.bfloat16}, {torch.float32}):
        raise ValueError(f"activations must all be bf16 or all fp32, got {sorted(map(str, kinds))}")
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError(f"activations must be contiguous, got strides {[tensor.stride() for tensor in tensors]}")
    return int(torch.bfloat16 in kinds)
