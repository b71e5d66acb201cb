"""sm90_triton: the Triton kernels that one would write first: bf16 scores to memory, four rounds of a radix search.

Three launches: programs decode 64 entries, multiply them by all heads, and write their scores as integers of the same
order; a program a row finds the k-th, 8 bits at a time, each by a histogram over the row; another writes the places of
the chosen entries, in their order.
"""

from pathlib import Path

import triton
import triton.language as tl
from task import BENCHMARKS, Sizes, input_t, output_t, unpack
from triton.compiler import ASTSource

from problems.common import build, index_pages
from problems.common.triton_dsl import cubin

TARGETS = ("sm90", "sm100")
REQUIRES = ("triton",)

ENTRIES = 64  # of a program that scores
CHUNK = 1024  # of a step of the search
WARPS = 4


@triton.jit
def _score(
    q,
    weights,
    keys,
    table,
    visible,
    scores,
    S,
    H,
    BLOCKS,
    N,
    P: tl.constexpr,
    STRIDE: tl.constexpr,
    FP8: tl.constexpr,
    HEADS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Program (block of entries, row). scores: int32 (rows, N), ordered as unsigned numbers."""
    row = tl.program_id(1).to(tl.int64)
    seen = tl.load(visible + row)
    first = tl.program_id(0) * ENTRIES
    if first < seen:
        entry = first + tl.arange(0, ENTRIES)
        inside = entry < seen
        page = tl.load(table + row // S * BLOCKS + entry // P, mask=inside, other=0)
        base = keys + page.to(tl.int64) * STRIDE
        slot = entry % P
        dim = tl.arange(0, 128)
        if FP8:
            codes = tl.load((base + slot * 128)[:, None] + dim[None, :], mask=inside[:, None], other=0)
            key = codes.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
            scale = tl.load((base + P * 128 + slot * 4).to(tl.pointer_type(tl.float32)), mask=inside, other=0.0)
        else:
            codes = tl.load((base + slot * 64)[:, None] + (dim // 2)[None, :], mask=inside[:, None], other=0)
            code = (codes.to(tl.int32) >> ((dim % 2) * 4)[None, :]) & 15
            # A code is an e4m3 with three bits of exponent too few and two of mantissa, so 2^-6 of its value.
            small = (((code & 8) << 4) | ((code & 7) << 2)).to(tl.uint8)
            byte = tl.load(
                (base + P * 64 + slot * 4)[:, None] + (dim // 32)[None, :], mask=inside[:, None], other=127
            ).to(tl.int32)
            most = tl.max(byte, 1)
            # Groups are at most 2^14 apart: exact in bf16, 2^(byte - most) with the 2^6 that the code lacks.
            part = tl.maximum(byte - most[:, None] + 127 + 6, 0)
            key = small.to(tl.float8e4nv, bitcast=True).to(tl.float32) * (part << 23).to(tl.float32, bitcast=True)
            key = key.to(tl.bfloat16)
            scale = (most << 23).to(tl.float32, bitcast=True)
        head = tl.arange(0, HEADS)
        some = head < H
        query = tl.load(q + (row * H + head)[None, :] * 128 + dim[:, None], mask=some[None, :], other=0.0)
        weight = tl.load(weights + row * H + head, mask=some, other=0.0)
        score = tl.sum(tl.maximum(tl.dot(key, query), 0.0) * weight[None, :], 1) * scale + 0.0
        bits = score.to(tl.int32, bitcast=True)
        tl.store(scores + row * N + entry, bits ^ ((bits >> 31) | -(2**31)), mask=inside)


@triton.jit
def _search(scores, visible, last, quota, N, K, CHUNK: tl.constexpr):
    """Program row: the k-th score, and how many equal to it are chosen."""
    row = tl.program_id(0).to(tl.int64)
    seen = tl.load(visible + row)
    prefix = tl.zeros((), tl.uint32)
    left = K
    if seen > K:
        digit = tl.arange(0, 256)
        for step in tl.static_range(4):
            shift = 24 - 8 * step
            count = tl.zeros((256,), tl.int32)
            for first in range(0, seen, CHUNK):
                entry = first + tl.arange(0, CHUNK)
                key = tl.load(scores + row * N + entry, mask=entry < seen, other=0).to(tl.uint32, bitcast=True)
                same = entry < seen
                if step > 0:
                    same = same & ((key >> (shift + 8)) == (prefix >> (shift + 8)))
                count += tl.histogram(((key >> shift) & 255).to(tl.int32), 256, mask=same)
            above = tl.sum(count, 0) - tl.cumsum(count, 0)  # with a higher digit
            here = (above < left) & (above + count >= left)
            found = tl.sum(tl.where(here, digit, 0), 0)
            left -= tl.sum(tl.where(here, above, 0), 0)
            prefix |= found.to(tl.uint32) << shift
    tl.store(last + row, prefix.to(tl.int32, bitcast=True))
    tl.store(quota + row, left)


@triton.jit
def _write(scores, visible, table, last, quota, out, S, BLOCKS, N, K, P: tl.constexpr, CHUNK: tl.constexpr):
    """Program row: the places of the chosen entries, in their order."""
    row = tl.program_id(0).to(tl.int64)
    seen = tl.load(visible + row)
    threshold = tl.load(last + row).to(tl.uint32, bitcast=True)
    equals = tl.load(quota + row)
    to = tl.zeros((), tl.int32)
    used = tl.zeros((), tl.int32)
    for first in range(0, seen, CHUNK):
        entry = first + tl.arange(0, CHUNK)
        inside = entry < seen
        key = tl.load(scores + row * N + entry, mask=inside & (seen > K), other=0).to(tl.uint32, bitcast=True)
        same = (inside & (key == threshold)).to(tl.int32)
        number = used + tl.cumsum(same, 0) - same
        chosen = inside & ((key > threshold) | ((same > 0) & (number < equals)) | (seen <= K))
        place = to + tl.cumsum(chosen.to(tl.int32), 0) - 1
        page = tl.load(table + row // S * BLOCKS + entry // P, mask=chosen, other=0)
        tl.store(out + row * K + place, page * P + entry % P, mask=chosen)
        to += tl.sum(chosen.to(tl.int32), 0)
        used += tl.sum(same, 0)
    for first in range(to, K, CHUNK):
        hole = first + tl.arange(0, CHUNK)
        tl.store(out + row * K + hole, -1, mask=hole < K)


def _constants(sizes: Sizes) -> tuple[dict, dict, dict]:
    """Compile-time arguments of the three kernels."""
    stride = index_pages.page_bytes(sizes.per_page, sizes.kind)
    score = {
        "P": sizes.per_page,
        "STRIDE": stride,
        "FP8": sizes.kind == "fp8",
        "HEADS": sizes.heads,
        "ENTRIES": ENTRIES,
    }
    return score, {"CHUNK": CHUNK}, {"P": sizes.per_page, "CHUNK": CHUNK}


def custom_kernel(data: input_t) -> output_t:
    """Write the chosen places into data.out, int32 (B, S, k), and return it. ValueError as unpack says."""
    sizes = unpack(data)
    rows, n = sizes.batch * sizes.queries, sizes.blocks * sizes.per_page
    score, search, write = _constants(sizes)
    scores = data.out.new_empty(rows, n)
    last, quota = data.out.new_empty(rows), data.out.new_empty(rows)
    _score[triton.cdiv(n, ENTRIES), rows](
        data.q,
        data.weights,
        data.keys,
        data.table,
        data.visible,
        scores,
        sizes.queries,
        sizes.heads,
        sizes.blocks,
        n,
        **score,
        num_warps=WARPS,
    )
    _search[(rows,)](scores, data.visible, last, quota, n, sizes.topk, **search, num_warps=WARPS)
    _write[(rows,)](
        scores,
        data.visible,
        data.table,
        last,
        quota,
        data.out,
        sizes.queries,
        sizes.blocks,
        n,
        sizes.topk,
        **write,
        num_warps=WARPS,
    )
    return data.out


def compile_for(target: str) -> list[build.Artefact]:
    """Compile for `target`, without a GPU: the three kernels for each format of the benchmarks."""
    if target not in TARGETS:
        raise ValueError(f"target must be one of {TARGETS}, got {target!r}")
    made = {}
    for case in BENCHMARKS:
        sizes = Sizes(case.batch, case.queries, case.heads, case.topk, 1, case.per_page, case.kind)
        for kernel, constant in zip((_score, _search, _write), _constants(sizes), strict=True):
            made[kernel.__name__, str(constant)] = (kernel, constant)
    return [_cubin(*what, target) for what in made.values()]


def _cubin(kernel: object, constant: dict, target: str) -> build.Artefact:
    """Compile one kernel with these constants."""
    types = {
        "q": "*bf16",
        "weights": "*fp32",
        "keys": "*u8",
        **dict.fromkeys(("S", "H", "BLOCKS", "N", "K"), "i32"),
        **dict.fromkeys(constant, "constexpr"),
    }
    signature = {name: types.get(name, "*i32") for name in kernel.arg_names}
    constexprs = {(i,): constant[name] for i, name in enumerate(kernel.arg_names) if name in constant}
    pointers = [i for i, kind in enumerate(signature.values()) if kind.startswith("*")]
    source = ASTSource(kernel, signature, constexprs, {(i,): [["tt.divisibility", 16]] for i in pointers})
    return cubin(source, {"num_warps": WARPS}, Path(__file__).stem, target)
