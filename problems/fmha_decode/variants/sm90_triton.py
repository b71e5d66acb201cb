"""sm90_triton: the Triton kernel that one would write first: 16 heads a program, lists split over the SMs, combined.

A program gathers 32 entries at a time, decodes all 512 values of each in registers, and multiplies twice by them. It
keeps a running maximum. A second kernel combines the splits and brings in the sink. Blocks of heads gather the same
entries again, mostly from L2; with 64 heads a program the query takes 64 registers a thread, and much is spilled.
"""

from pathlib import Path

import triton
import triton.language as tl
from task import BENCHMARKS, HEAD_DIM, NOPE, ROPE, SCALE, Sizes, input_t, output_t, unpack
from triton.compiler import ASTSource

from problems.common import build, kv_pages
from problems.common.triton_dsl import cubin

TARGETS = ("sm90", "sm100")
REQUIRES = ("triton",)

HEADS = 16  # a program, the least that tl.dot takes
ENTRIES = 32  # a step
WARPS = 4
FULL = 528  # programs that keep an H200 busy: four for each of 132 SMs
LOG2E = tl.constexpr(1.4426950408889634)
# No kernel of its own for 1 and for multiples of 16: each takes 4 s to compile.
SIZES = ("S", "H", "NW", "NC", "SPLITS")


@triton.jit
def _values(pages, entry, counts, P: tl.constexpr, STRIDE: tl.constexpr):
    """entry: int32 (N,) where counts is, int1 (N,) -> bf16 (N, 512), zeros elsewhere."""
    column = tl.arange(0, 512)
    entry = tl.where(counts, entry, 0)
    page = (entry // P).to(tl.int64) * STRIDE
    slot = entry % P
    payload = pages + page + slot * 576
    nope = (column < 448)[None, :]
    some = counts[:, None]
    codes = tl.load(payload[:, None] + column[None, :], mask=some & nope, other=0)
    eight = tl.arange(0, 8)
    scales = pages + page + P * 576 + slot * 8
    byte = tl.load(scales[:, None] + eight[None, :], mask=some & (eight < 7)[None, :], other=127)
    scale = (byte.to(tl.int32) << 23).to(tl.float32, bitcast=True)  # 2^(byte - 127)
    scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (codes.shape[0], 8, 64)), (codes.shape[0], 512))
    value = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale
    pointer = payload[:, None] + 448 + 2 * (column[None, :] - 448)
    rope = tl.load(pointer.to(tl.pointer_type(tl.bfloat16)), mask=some & (column >= 448)[None, :], other=0.0)
    return tl.where(nope, value.to(tl.bfloat16), rope)


@triton.jit
def _attend(
    q,
    acc,
    top,
    total,
    pages,
    index,
    length,
    first,
    last,
    P: tl.constexpr,
    STRIDE: tl.constexpr,
    N: tl.constexpr,
    SCALE2: tl.constexpr,
):
    """Steps `first` to `last` over one list. top: (H,), maximum so far in base 2; total and acc: relative to it."""
    for step in range(first, last):
        place = step * N + tl.arange(0, N)
        entry = tl.load(index + place, mask=place < length, other=-1)
        counts = entry >= 0
        c = _values(pages, entry, counts, P, STRIDE)
        score = tl.dot(q, tl.trans(c)) * SCALE2
        score = tl.where(counts[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)  # no entry so far: -inf - -inf would be NaN
        p = tl.exp2(score - safe[:, None])
        less = tl.exp2(top - safe)
        total = total * less + tl.sum(p, 1)
        acc = tl.dot(p.to(tl.bfloat16), c, acc * less[:, None])
        top = higher
    return acc, top, total


@triton.jit(do_not_specialize=SIZES)
def _splits(
    q,
    window,
    window_index,
    window_length,
    compressed,
    compressed_index,
    compressed_length,
    accs,
    tops,
    totals,
    S,
    H,
    NW,
    NC,
    SPLITS,
    PW: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PC: tl.constexpr,
    STRIDE_C: tl.constexpr,
    HEADS: tl.constexpr,
    N: tl.constexpr,
    SCALE2: tl.constexpr,
):
    """Program (row, block of heads, split). accs: fp32 (rows, SPLITS, H, 512); tops, totals: fp32 (rows, SPLITS, H)."""
    row = tl.program_id(0)
    split = tl.program_id(2)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, 512)
    query = tl.load(
        q + (row.to(tl.int64) * H + head)[:, None] * 512 + column[None, :], mask=(head < H)[:, None], other=0.0
    )
    acc = tl.zeros((HEADS, 512), tl.float32)
    top = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    of_window = tl.cdiv(NW, N)
    steps = of_window + tl.cdiv(NC, N)
    first = split * steps // SPLITS
    last = (split + 1) * steps // SPLITS
    length = tl.load(window_length + row // S)
    last_w = tl.minimum(tl.minimum(last, of_window), tl.cdiv(length, N))
    acc, top, total = _attend(
        query, acc, top, total, window, window_index + row * NW, length, first, last_w, PW, STRIDE_W, N, SCALE2
    )
    length = tl.load(compressed_length + row // S)
    first_c = tl.maximum(first - of_window, 0)
    last_c = tl.minimum(last - of_window, tl.cdiv(length, N))
    acc, top, total = _attend(
        query,
        acc,
        top,
        total,
        compressed,
        compressed_index + row * NC,
        length,
        first_c,
        last_c,
        PC,
        STRIDE_C,
        N,
        SCALE2,
    )
    place = (row * SPLITS + split).to(tl.int64) * H + head
    tl.store(accs + place[:, None] * 512 + column[None, :], acc, mask=(head < H)[:, None])
    tl.store(tops + place, top, mask=head < H)
    tl.store(totals + place, total, mask=head < H)


@triton.jit(do_not_specialize=("H", "SPLITS"))
def _combine(accs, tops, totals, sink, out, lse, H, SPLITS, PADDED: tl.constexpr):
    """Program (row, head)."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.arange(0, PADDED)
    place = (row * SPLITS + split).to(tl.int64) * H + head
    tops_here = tl.load(tops + place, mask=split < SPLITS, other=float("-inf"))
    totals_here = tl.load(totals + place, mask=split < SPLITS, other=0.0)
    top = tl.max(tops_here, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(totals_here * tl.exp2(tops_here - safe), 0)
    result = (safe + tl.log2(total)) / LOG2E  # -inf without an entry
    drain = tl.load(sink + head)
    # The whole denominator's logarithm, from the larger of the two parts.
    larger = tl.maximum(result, drain)
    larger = tl.where(larger == float("-inf"), 0.0, larger)
    whole = larger + tl.log(tl.exp(result - larger) + tl.exp(drain - larger))
    column = tl.arange(0, 512)
    acc = tl.zeros((512,), tl.float32)
    for i in range(SPLITS):
        here = (row * SPLITS + i).to(tl.int64) * H + head
        weight = tl.exp2(tl.load(tops + here) - safe)
        acc += tl.load(accs + here * 512 + column) * weight
    acc = tl.where(total > 0, acc * tl.exp(safe / LOG2E - whole), 0.0)
    where = row.to(tl.int64) * H + head
    tl.store(out + where * 512 + column, acc.to(tl.bfloat16))
    tl.store(lse + where, tl.where(total > 0, result, float("inf")))


def plan(sizes: Sizes) -> tuple[int, dict, dict]:
    """Splits of a row's lists, and the compile-time arguments of the two kernels, by shapes only."""
    programs = sizes.batch * sizes.queries * triton.cdiv(sizes.heads, HEADS)
    steps = triton.cdiv(sizes.window, ENTRIES) + triton.cdiv(sizes.compressed, ENTRIES)
    splits = max(1, min(FULL // programs, steps))
    attend = {
        "PW": sizes.page_window,
        "STRIDE_W": kv_pages.page_bytes(sizes.page_window, NOPE, ROPE),
        "PC": sizes.page_compressed,
        "STRIDE_C": kv_pages.page_bytes(sizes.page_compressed, NOPE, ROPE),
        "HEADS": HEADS,
        "N": ENTRIES,
        "SCALE2": SCALE * LOG2E.value,
    }
    return splits, attend, {"PADDED": triton.next_power_of_2(splits)}


def custom_kernel(data: input_t) -> output_t:
    """Write data.out, bf16 (B, S, H, 512), and data.lse, fp32 (B, S, H), and return them. ValueError as unpack says."""
    sizes = unpack(data)
    splits, attend, combine = plan(sizes)
    rows, heads = sizes.batch * sizes.queries, sizes.heads
    accs = data.lse.new_empty(rows, splits, heads, HEAD_DIM)
    tops, totals = (data.lse.new_empty(rows, splits, heads) for _ in range(2))
    _splits[rows, triton.cdiv(heads, HEADS), splits](
        data.q,
        data.window,
        data.window_index,
        data.window_length,
        data.compressed,
        data.compressed_index,
        data.compressed_length,
        accs,
        tops,
        totals,
        sizes.queries,
        heads,
        sizes.window,
        sizes.compressed,
        splits,
        **attend,
        num_warps=WARPS,
    )
    _combine[rows, heads](accs, tops, totals, data.sink, data.out, data.lse, heads, splits, **combine, num_warps=WARPS)
    return data.out, data.lse


def compile_for(target: str) -> list[build.Artefact]:
    """Compile for `target`, without a GPU: both kernels for each shape of the benchmarks."""
    if target not in TARGETS:
        raise ValueError(f"target must be one of {TARGETS}, got {target!r}")
    made = {}
    for c in BENCHMARKS:
        sizes = Sizes(c.batch, c.queries, c.heads, c.window, c.compressed, c.page_window, c.page_compressed)
        for kernel, constant in zip((_splits, _combine), plan(sizes)[1:], strict=True):
            made[str(constant)] = (kernel, constant)
    return [_cubin(*what, target) for what in made.values()]


def _cubin(kernel: object, constant: dict, target: str) -> build.Artefact:
    """Compile one kernel with these constants."""
    types = {
        "q": "*bf16",
        "window": "*u8",
        "compressed": "*u8",
        "out": "*bf16",
        "window_index": "*i32",
        "window_length": "*i32",
        "compressed_index": "*i32",
        "compressed_length": "*i32",
        **dict.fromkeys(SIZES, "i32"),
        **dict.fromkeys(constant, "constexpr"),
    }
    signature = {name: types.get(name, "*fp32") for name in kernel.arg_names}
    constexprs = {(i,): constant[name] for i, name in enumerate(kernel.arg_names) if name in constant}
    pointers = [i for i, kind in enumerate(signature.values()) if kind.startswith("*")]
    source = ASTSource(kernel, signature, constexprs, {(i,): [["tt.divisibility", 16]] for i in pointers})
    return cubin(source, {"num_warps": WARPS}, Path(__file__).stem, target)
