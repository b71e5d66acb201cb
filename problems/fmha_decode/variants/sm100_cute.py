"""sm100_cute: CuTe DSL; tcgen05, both products transposed, one decoded tile for both; never run on a B200."""

import functools
from dataclasses import dataclass
from pathlib import Path

import cutlass
import torch
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.cutlass_dsl import T, dsl_user_op
from cutlass.utils import blackwell_helpers
from task import HEAD_DIM, NOPE, SCALE, input_t, output_t, unpack

from problems.common import build
from problems.common.cute_dsl import bits_to_float, check_target, cubin, mul_bf16x2, pack_bf16x2, pointers, prmt

TARGETS = ("sm100",)
REQUIRES = ("cutlass",)

HEADS = 64  # of a CTA: columns of both products
BLOCK_N = 128  # entries at a time: rows of S^T, one for each lane of tensor memory
CHUNKS = 4  # of 128 dims, in which a tile is filled, multiplied and freed
CHUNK_DIMS = HEAD_DIM // CHUNKS
STEPS = 8  # products of 16 along a chunk's dims for S^T, along a tile's entries for O^T
COLUMNS = 32  # of tensor memory that a thread holds in registers at a time
LOADS = 9  # of 16 bytes that each of 4 threads makes for an entry: 7 of e4m3, each with a separate scale, 2 of bf16
LOADS_OF_CHUNK = ((0, 1), (2, 3), (4, 5), (6, 7, 8))
PIECES = HEAD_DIM // 8  # of 16 bytes, in a row of bf16
PAYLOAD = NOPE + 2 * (HEAD_DIM - NOPE)  # bytes of an entry without its scales

# Warps by role.
SOFTMAX_THREADS = 128  # a thread has an entry of S^T
GATHER_THREADS = 256
MMA_WARP = (SOFTMAX_THREADS + GATHER_THREADS) // 32
NUM_THREADS = 512  # warps come in groups of four, which share out registers: three behind MMA_WARP have no work
SOFTMAX_REGISTERS, GATHER_REGISTERS, MMA_REGISTERS = 160, 144, 64  # of a thread; at launch 128
COMBINE_THREADS = HEAD_DIM // 4
COMBINE_BATCH = 8  # shares of which a thread has loads under way

# mbarriers of a CTA: (name, how many, arrivals). Waits for the n-th use of one have parity n % 2.
BARRIERS = (
    ("q_full", 1, 1),  # TMA: bytes of the queries
    ("k_full", CHUNKS, GATHER_THREADS // 32),  # a warp that has stored its part of a chunk
    ("k_free", CHUNKS, 1),  # the tensor core: values of the chunk are added
    ("s_full", 1, 1),  # the tensor core: scores of a tile; O^T and P^T of the tile before are done as well
    ("p_full", 1, SOFTMAX_THREADS // 32),  # a warp that has read its scores and stored its P^T
    ("o_done", 1, 1),  # the tensor core: everything, where there is a tile
)
PASSED, OUT_READY = 1, 2  # numbered barriers: of the threads of softmax; of these and those that gather

# Columns of tensor memory: O^T of each chunk, then S^T.
O_COLUMN, S_COLUMN = 0, CHUNKS * HEADS
TMEM_COLUMNS = 512  # a power of two

LOG2_E = 1.4426950408889634
EXPONENT = SCALE * LOG2_E  # exp(SCALE s) = 2^(EXPONENT s)
LOWEST = -1.0e37  # reference where there is no score yet: finite, so that no difference is NaN
SLACK = 8.0  # powers of two by which a score may pass the reference: weights stay below 2^8
CODES = 0x3120  # the order of a word's bytes in which codes are decoded
SIGNS, MAGNITUDES = -0x7F7F7F80, 0x07F007F0  # bit 7 of each byte; where a bf16 pair takes the bits 6:0 of two codes


def check_budgets() -> None:
    """ValueError, while tracing, unless the constants above fit a multiprocessor and the instructions."""
    registers = SOFTMAX_THREADS * SOFTMAX_REGISTERS + GATHER_THREADS * GATHER_REGISTERS + 128 * MMA_REGISTERS
    smem = 16 * (BLOCK_N * PIECES + HEADS * PIECES + BLOCK_N * 8) + 4 * HEADS * 6 + 1024
    for what, used, most in (
        ("registers", registers, 65536),
        ("bytes of shared memory", smem, 227 * 1024),
        ("columns of tensor memory", S_COLUMN + HEADS, TMEM_COLUMNS),
        ("rows of a product", BLOCK_N, 128),
    ):
        if used > most:
            raise ValueError(f"a CTA may have {most} {what}, got {used}")
    if HEADS % 16 or HEADS % COLUMNS or TMEM_COLUMNS & (TMEM_COLUMNS - 1):
        raise ValueError(
            f"wanted whole columns of 16 and {COLUMNS} heads and a power of two, got {HEADS} {TMEM_COLUMNS}"
        )


# ---- device helpers


@dsl_user_op
def load_if(
    wanted: cutlass.Boolean, address: Int64, words: int, other: int, offset: int = 0, *, loc=None, ip=None
) -> tuple[Int32, ...]:
    """`words` words (1, 2 or 4) in global memory, `offset` bytes behind `address`, if `wanted`; else `other`."""
    names = [f"${i}" for i in range(words)]
    vector, target = ("", names[0]) if words == 1 else (f".v{words}", "{" + ", ".join(names) + "}")
    text = (
        "{ .reg .pred wanted; "
        f"setp.ne.b32 wanted, ${words + 1}, 0; "
        + "".join(f"mov.b32 {name}, {other}; " for name in names)
        + f"@wanted ld.global.L1::no_allocate{vector}.b32 {target}, [${words} + {offset}]; }}"
    )
    values = [Int64(address).ir_value(loc=loc, ip=ip), Int32(wanted).ir_value(loc=loc, ip=ip)]
    result = T.i32() if words == 1 else llvm.StructType.get_literal([T.i32()] * words)
    constraints = ",".join(["=&r"] * words + ["l", "r"])
    got = llvm.inline_asm(result, values, text, constraints, has_side_effects=True, loc=loc, ip=ip)
    if words == 1:
        return (Int32(got),)
    return tuple(Int32(llvm.extractvalue(T.i32(), got, [i], loc=loc, ip=ip)) for i in range(words))


@dsl_user_op
def fma(a: Float32, b: Float32, c: Float32, *, loc=None, ip=None) -> Float32:
    """a b + c, rounded once."""
    values = [Float32(v).ir_value(loc=loc, ip=ip) for v in (a, b, c)]
    return Float32(llvm.inline_asm(T.f32(), values, "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", loc=loc, ip=ip))


@dsl_user_op
def fence_before_sync(*, loc=None, ip=None) -> None:
    """Order this thread's tcgen05 instructions before what it signals next."""
    text = "tcgen05.fence::before_thread_sync;"
    llvm.inline_asm(None, [], text, "", has_side_effects=True, loc=loc, ip=ip)


@dsl_user_op
def fence_after_sync(*, loc=None, ip=None) -> None:
    """Order this thread's next tcgen05 instructions after what it has waited for."""
    text = "tcgen05.fence::after_thread_sync;"
    llvm.inline_asm(None, [], text, "", has_side_effects=True, loc=loc, ip=ip)


def select(condition, a, b):
    """a where the condition holds, else b; both are computed."""
    return cutlass.select_(condition, a, b)


def exp2(x: Float32) -> Float32:
    """2^x, to 2 units in the last place; 0 for -infinity."""
    return cute.math.exp2(x, fastmath=True)


def log_sum(reference: Float32, total: Float32) -> Float32:
    """Natural log of total * 2^reference; infinity where total is 0."""
    value = (reference + cute.math.log2(total, fastmath=True)) * (1 / LOG2_E)
    return select(total > 0.0, value, Float32.inf)


def final_factor(reference: Float32, total: Float32, sink: Float32) -> Float32:
    """1 / (total + e^sink), the sink in units of 2^reference; 0 where total is 0."""
    whole = total + exp2(fma(sink, Float32(LOG2_E), -reference))
    return select(total > 0.0, cute.arch.rcp_approx(whole), Float32(0.0))


def decode(word: Int32, factor: Int32, codes: Int32) -> tuple[Int32, Int32]:
    """4 e4m3 values, in order, as bf16 times a power of two: exact, subnormals too.

    Bits 6:0 of a code go to bits 10:4 of a bf16, where they are exponent and mantissa, of the value times 2^-120;
    `factor` holds 2^(120 + the scale's exponent) twice. codes: CODES.
    """
    order = prmt(word, word, codes)
    signs = order & SIGNS
    first = ((order << 4) & MAGNITUDES) | ((signs << 8) & ~MAGNITUDES)
    second = ((order >> 4) & MAGNITUDES) | (signs & ~MAGNITUDES)
    return mul_bf16x2(first, factor), mul_bf16x2(second, factor)


def piece_at(group, row, piece):
    """Where piece `piece` (8 values of 2 bytes) of row `row` of a group lies, in pieces: groups are BLOCK_N rows of 64
    values, in which pieces are swizzled.
    """
    return (group * BLOCK_N + row) * 8 + (piece ^ (row % 8))


# ---- products

_K, _MN = OperandMajorMode.K, OperandMajorMode.MN
SCORE_TILE = VALUE_TILE = (BLOCK_N, HEADS, CHUNK_DIMS)  # entries, heads, dims; dims, heads, entries


def mma(a_major, b_major) -> cute.TiledMma:
    """128 x 64 x 16, both factors in shared memory."""
    op = tcgen05.MmaF16BF16Op(
        BFloat16, Float32, (128, HEADS, 16), tcgen05.CtaGroup.ONE, tcgen05.OperandSource.SMEM, a_major, b_major
    )
    return cute.make_tiled_mma(op)


def score_mma() -> cute.TiledMma:
    """S^T += K Q^T over 16 dims."""
    return mma(_K, _K)


def value_mma() -> cute.TiledMma:
    """O^T += V^T P^T over 16 entries, of 128 dims. Entries lie as for the scores, so it is not the summed index that is
    contiguous in them.
    """
    return mma(_MN, _MN)


def layout_of(name: str) -> cute.ComposedLayout:
    """The layout of shared memory as a factor: (of one instruction, 1, STEPS, chunks or 1).

    ValueError, while tracing, unless it is the one that `piece_at` writes: K and V^T are views of the same bytes.
    """
    of_a, of_b = blackwell_helpers.make_smem_layout_a, blackwell_helpers.make_smem_layout_b
    layout, wanted = {
        "k": (of_a(score_mma(), SCORE_TILE, BFloat16, CHUNKS), "((128,16),1,(4,2),4):((64,1),0,(16,8192),16384)"),
        "q": (of_b(score_mma(), SCORE_TILE, BFloat16, CHUNKS), "((64,16),1,(4,2),4):((64,1),0,(16,4096),8192)"),
        "v": (of_a(value_mma(), VALUE_TILE, BFloat16, CHUNKS), "(((64,2),16),1,8,4):(((1,8192),64),0,1024,16384)"),
        "p": (of_b(value_mma(), VALUE_TILE, BFloat16, 1), "((64,16),1,8,1):((1,64),0,1024,0)"),
    }[name]
    if str(layout.outer) != wanted or str(layout.inner) != "S<3,4,3>":
        raise ValueError(f"the layout of {name} must be S<3,4,3> o {wanted}, got {layout}")
    return layout


def viewed(memory: cute.Tensor, name: str) -> cute.Tensor:
    """Shared memory as bf16 in the layout of `layout_of`."""
    layout = layout_of(name)
    return cute.make_tensor(cute.recast_ptr(memory.iterator, layout.inner, dtype=BFloat16), layout.outer)


def tmem_view(tmem: cute.Pointer, first, columns: int) -> cute.Tensor:
    """Columns of tensor memory as fp32 (128 lanes, columns)."""
    return cute.make_tensor(tmem + first, cute.make_layout((128, columns), stride=(65536, 1)))


def _copy_of(op, view: cute.Tensor, thread: Int32):
    return tcgen05.make_tmem_copy(cute.make_copy_atom(op, Float32), view).get_slice(thread % 128)


def _parts(view: cute.Tensor, values: cute.Tensor, thread: Int32) -> tuple:
    """-> (load, store, the part of `view` that both move, `values` in its shape).

    ValueError, while tracing, unless a load and a store give value i of a thread the same place.
    """
    load = _copy_of(tcgen05.Ld32x32bOp(tcgen05.Repetition(COLUMNS)), view, thread)
    store = _copy_of(tcgen05.St32x32bOp(tcgen05.Repetition(COLUMNS)), view, thread)
    there, back = load.partition_S(view), store.partition_D(view)
    shape = load.partition_D(cute.make_identity_tensor(view.shape)).shape
    if str(there.layout) != str(back.layout) or cute.size(shape) != COLUMNS:
        raise ValueError(f"a load of {there.layout} for {shape} must be undone by the store, got {back.layout}")
    return load, store, there, cute.make_tensor(values.iterator, cute.make_layout(shape))


def load_columns(tmem: cute.Pointer, first, values: cute.Tensor, thread: Int32) -> None:
    """COLUMNS columns from `first` on of this thread's lane into `values`, fp32 (COLUMNS,), and wait for them."""
    load, _, there, target = _parts(tmem_view(tmem, first, COLUMNS), values, thread)
    cute.copy(load, there, target)
    cute.arch.fence_view_async_tmem_load()


def store_columns(tmem: cute.Pointer, first, values: cute.Tensor, thread: Int32) -> None:
    """`values`, fp32 (COLUMNS,), into COLUMNS columns from `first` on of this thread's lane, and wait for them."""
    _, store, there, source = _parts(tmem_view(tmem, first, COLUMNS), values, thread)
    cute.copy(store, source, there)
    cute.arch.fence_view_async_tmem_store()


# ---- what a CTA works on


@dataclass(frozen=True)
class Span:
    """The list that a CTA reads: the window's entries that count, then the compressed ones, and its share of it."""

    window_index: cute.Tensor  # int32 (nw, B S)
    compressed_index: cute.Tensor  # int32 (nc, B S)
    query: Int32
    in_window: Int32  # entries that the query sees in the window
    seen: Int32  # and in all
    first: Int32  # tile of this CTA
    last: Int32  # the tile behind its last one

    def index_at(self, tile: Int32, row: Int32) -> Int32:
        """The number of row `row` of a tile; -1 for holes, and behind the end of the list or of the share."""
        at = tile * BLOCK_N + row
        near = self.window_index.iterator.toint() + 4 * (Int64(self.query) * self.window_index.shape[0] + at)
        behind = Int64(self.query) * self.compressed_index.shape[0] + (at - self.in_window)
        far = self.compressed_index.iterator.toint() + 4 * behind
        wanted = (tile < self.last) & (at < self.seen)
        return load_if(wanted, select(at < self.in_window, near, far), 1, -1)[0]


@dataclass(frozen=True)
class Shared:
    """Shared memory, but for the queries. reference, factor: fp32 (HEADS,), of softmax in powers of two, of O^T."""

    tile: cute.Tensor  # int32 (4 words, BLOCK_N x PIECES): K
    probabilities: cute.Tensor  # int32 (4 words, BLOCK_N x 8): P^T, a row of 64 heads an entry
    reference: cute.Tensor
    factor: cute.Tensor
    partial: cute.Tensor  # fp32 (HEADS, 4 warps)
    moved: cute.Tensor  # int32 (4 warps, 2): whether a score is too large, of even and odd tiles
    codes: cute.Tensor  # int32 (1,): CODES
    barriers: cute.Pointer

    def barrier(self, name: str, i: int = 0) -> cute.Pointer:
        """mbarrier `i` of those called `name`."""
        first = 0
        for known, count, _ in BARRIERS:
            if known == name:
                return self.barriers + first + i
            first += count
        raise ValueError(f"no barrier is called {name!r}")


# ---- gathering


@dataclass(frozen=True)
class Gatherer:
    """A thread that fetches parts of two entries of each tile, `row` and `row` + 64.

    Four threads share an entry: load i of thread `quarter` is 16 of the 64 bytes that share scale i; the last two are
    of the position part, dealt so that the two entries of 8 threads fall into different banks.
    """

    window_pages: tuple  # address, log2 of the entries of a page, bytes of a page
    compressed_pages: tuple
    row: Int32
    quarter: Int32

    def position_piece(self, i: int) -> Int32:
        """Which 16 bytes of an entry's position part load i brings, 7 or 8."""
        return self.quarter + 4 * ((i - 7) ^ (self.row % 2))

    def locate(self, span: Span, index: cute.Tensor, tile: Int32, at: cute.Tensor) -> None:
        """at, int64 (2, 2 entries): of entries number `index` of a tile, this thread's first bytes, and the scales."""
        for e in range(2):
            near = tile * BLOCK_N + self.row + 64 * e < span.in_window
            both = zip(self.window_pages, self.compressed_pages, strict=True)
            base, shift, stride = (select(near, a, b) for a, b in both)
            number = cutlass.max(index[e], 0)
            page = number >> shift
            slot = Int64(number - (page << shift))
            start = base + Int64(page) * Int64(stride)
            at[0, e] = start + slot * PAYLOAD + Int64(16 * self.quarter)
            at[1, e] = start + (Int64(PAYLOAD) << Int64(shift)) + 8 * slot

    def fetch(self, chunk: int, index: cute.Tensor, at: cute.Tensor, raw: cute.Tensor) -> None:
        """Ask for this thread's part of a chunk, as stored, in raw, int32 (4 words, LOADS, 2 entries); zeros for -1."""
        for e in range(2):
            for i in LOADS_OF_CHUNK[chunk]:
                if i < 7:
                    words = load_if(index[e] >= 0, at[0, e], 4, 0, 64 * i)
                else:
                    behind = Int64(16 * (self.position_piece(i) - self.quarter))
                    words = load_if(index[e] >= 0, at[0, e] + behind, 4, 0, NOPE)
                for j in range(4):
                    raw[j, i, e] = words[j]

    def fetch_scales(self, index: cute.Tensor, at: cute.Tensor, scales: cute.Tensor) -> None:
        """Ask for the 8 scale bytes of each entry, in scales, int32 (2 words, 2 entries); zeros for -1."""
        for e in range(2):
            scales[0, e], scales[1, e] = load_if(index[e] >= 0, at[1, e], 2, 0)

    def store(self, chunk: int, raw: cute.Tensor, scales: cute.Tensor, shared: Shared) -> None:
        """Decode this thread's part of a chunk into the tile.

        CODES comes from shared memory because ptxas cannot move that ahead of the wait for the chunk. Else it decodes
        all chunks first, which waits for all of their loads and takes twice the registers.
        """
        codes, tile = shared.codes[0], shared.tile
        piece = cute.make_rmem_tensor((4,), Int32)
        for e in range(2):
            row = self.row + 64 * e
            for i in LOADS_OF_CHUNK[chunk]:
                if i >= 7:  # bf16: a piece stays one
                    cute.autovec_copy(raw[None, i, e], tile[None, piece_at(7, row, self.position_piece(i))])
                    continue
                factor = (((scales[i // 4, e] >> (8 * (i % 4))) & 255) + 120) * 0x00800080
                for half in range(2):
                    for j in range(2):
                        piece[2 * j], piece[2 * j + 1] = decode(raw[2 * half + j, i, e], factor, codes)
                    cute.autovec_copy(piece, tile[None, piece_at(i, row, 2 * self.quarter + half)])


@cute.jit
def gather(gatherer: Gatherer, span: Span, shared: Shared) -> None:
    """Fill the tile chunk by chunk. A chunk's registers are asked for again as soon as they are stored."""
    raw = cute.make_rmem_tensor((4, LOADS, 2), Int32)
    scales = cute.make_rmem_tensor((2, 2), Int32)
    next_scales = cute.make_rmem_tensor((2, 2), Int32)
    index = cute.make_rmem_tensor((2,), Int32)
    next_index = cute.make_rmem_tensor((2,), Int32)
    at = cute.make_rmem_tensor((2, 2), Int64)
    for e in cutlass.range_constexpr(2):
        index[e] = span.index_at(span.first, gatherer.row + 64 * e)
        next_index[e] = span.index_at(span.first + 1, gatherer.row + 64 * e)
    gatherer.locate(span, index, span.first, at)
    gatherer.fetch_scales(index, at, scales)
    for c in cutlass.range_constexpr(CHUNKS):
        gatherer.fetch(c, index, at, raw)
    for tile in cutlass.range(span.first, span.last, unroll=1):
        parity = (tile - span.first) & 1
        for e in cutlass.range_constexpr(2):
            index[e] = next_index[e]
            next_index[e] = span.index_at(tile + 2, gatherer.row + 64 * e)
        gatherer.locate(span, index, tile + 1, at)
        gatherer.fetch_scales(index, at, next_scales)
        for c in cutlass.range_constexpr(CHUNKS):
            cute.arch.mbarrier_wait(shared.barrier("k_free", c), parity ^ 1)
            gatherer.store(c, raw, scales, shared)
            # No proxy fence here, which would wait for what this thread has asked for: the MMA warp has one.
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                cute.arch.mbarrier_arrive(shared.barrier("k_full", c))
            gatherer.fetch(c, index, at, raw)
        for e in cutlass.range_constexpr(2):
            for j in cutlass.range_constexpr(2):
                scales[j, e] = next_scales[j, e]


# ---- products: one warp


@cute.jit
def multiply(span: Span, shared: Shared, queries: cute.Tensor, tmem: cute.Pointer) -> None:
    """Issue the products of all tiles: scores chunk by chunk as a tile is filled, values once P^T is there."""
    scores, values = score_mma(), value_mma()
    k_part = scores.make_fragment_A(viewed(shared.tile, "k"))
    q_part = scores.make_fragment_B(viewed(queries, "q"))
    v_part = values.make_fragment_A(viewed(shared.tile, "v"))
    p_part = values.make_fragment_B(viewed(shared.probabilities, "p"))
    s = cute.make_tensor(tmem + S_COLUMN, scores.make_fragment_C(scores.partition_shape_C((128, HEADS))).layout)
    o_layout = values.make_fragment_C(values.partition_shape_C((128, HEADS))).layout
    cute.arch.mbarrier_wait(shared.barrier("q_full"), 0)
    for tile in cutlass.range(span.first, span.last, unroll=1):
        parity = (tile - span.first) & 1
        for c in cutlass.range(CHUNKS, unroll=1):
            cute.arch.mbarrier_wait(shared.barrier("k_full", c), parity)
            cute.arch.fence_proxy("async.shared", space="cta")
            fence_after_sync()
            for k in cutlass.range_constexpr(STEPS):
                scores.set(tcgen05.Field.ACCUMULATE, c > 0 if k == 0 else True)
                cute.gemm(scores, s, k_part[None, None, k, c], q_part[None, None, k, c], s)
        with cute.arch.elect_one():
            tcgen05.commit(shared.barrier("s_full"))
        cute.arch.mbarrier_wait(shared.barrier("p_full"), parity)
        cute.arch.fence_proxy("async.shared", space="cta")
        fence_after_sync()
        for c in cutlass.range(CHUNKS, unroll=1):
            o = cute.make_tensor(tmem + O_COLUMN + HEADS * c, o_layout)
            for k in cutlass.range_constexpr(STEPS):
                values.set(tcgen05.Field.ACCUMULATE, tile > span.first if k == 0 else True)
                cute.gemm(values, o, v_part[None, None, k, c], p_part[None, None, k, 0], o)
            with cute.arch.elect_one():
                tcgen05.commit(shared.barrier("k_free", c))
    if span.last > span.first:
        with cute.arch.elect_one():
            tcgen05.commit(shared.barrier("o_done"))


# ---- softmax: one warpgroup, a thread an entry


@cute.jit
def rescale(shared: Shared, tmem: cute.Pointer, s: cute.Tensor, counts, sums: cute.Tensor, summed, thread) -> None:
    """Move the references to the largest scores, where these have passed them by SLACK, and scale what was summed.

    counts: whether this thread's entry counts; summed: whether O^T holds anything.
    """
    four = cute.make_rmem_tensor((4,), Float32)
    lane = thread % 32
    for half in cutlass.range_constexpr(HEADS // COLUMNS):
        load_columns(tmem, S_COLUMN + COLUMNS * half, s, thread)
        mine = Float32(LOWEST)
        for h in cutlass.range_constexpr(COLUMNS):
            top = cute.arch.warp_redux_sync(select(counts, s[h] * EXPONENT, Float32(LOWEST)), "fmax")
            mine = select(lane == h, top, mine)
        shared.partial[COLUMNS * half + lane, thread // 32] = mine
    cute.arch.barrier(barrier_id=PASSED, number_of_threads=SOFTMAX_THREADS)
    if thread < HEADS:
        top = Float32(LOWEST)
        for w in cutlass.range_constexpr(4):
            top = cute.arch.fmax(top, shared.partial[thread, w])
        old = shared.reference[thread]
        new = select(top > old + SLACK, top, old)
        shared.factor[thread] = exp2(old - new)
        shared.reference[thread] = new
    cute.arch.barrier(barrier_id=PASSED, number_of_threads=SOFTMAX_THREADS)
    for h in cutlass.range_constexpr(0, HEADS, 4):
        cute.autovec_copy(quad(shared.factor, h), four)
        for i in cutlass.range_constexpr(4):
            sums[h + i] *= four[i]
    if summed:
        for part in cutlass.range(CHUNKS * HEADS // COLUMNS, unroll=1):
            load_columns(tmem, O_COLUMN + COLUMNS * part, s, thread)
            for h in cutlass.range_constexpr(0, COLUMNS, 4):
                cute.autovec_copy(quad(shared.factor, (part & (HEADS // COLUMNS - 1)) * COLUMNS + h), four)
                for i in cutlass.range_constexpr(4):
                    s[h + i] *= four[i]
            store_columns(tmem, O_COLUMN + COLUMNS * part, s, thread)


def quad(values: cute.Tensor, first) -> cute.Tensor:
    """4 neighbouring floats of shared memory, from a multiple of 4 on."""
    return cute.local_tile(values, (4,), (first >> 2,))


def reduce_heads(values: list, lane: Int32) -> list:
    """The sums over the warp of values 2 lane and 2 lane + 1, of 64 that each lane has. A step halves what it has."""
    for step in (16, 8, 4, 2, 1):
        half = len(values) // 2
        upper = (lane & step) != 0
        keep = [select(upper, values[i + half], values[i]) for i in range(half)]
        give = [select(upper, values[i], values[i + half]) for i in range(half)]
        values = [k + cute.arch.shuffle_sync_bfly(g, step) for k, g in zip(keep, give, strict=True)]
    return values


@cute.jit
def softmax(span: Span, shared: Shared, tmem: cute.Pointer, thread: Int32) -> None:
    """P^T of each tile, then the sums of the heads into shared.partial, for `finish`."""
    lane = thread % 32
    s = cute.make_rmem_tensor((COLUMNS,), Float32)
    sums = cute.make_rmem_tensor((HEADS,), Float32)  # of the entries that this thread has had
    four = cute.make_rmem_tensor((4,), Float32)
    piece = cute.make_rmem_tensor((4,), Int32)
    sums.fill(0.0)
    index = span.index_at(span.first, thread)
    for tile in cutlass.range(span.first, span.last, unroll=1):
        parity = (tile - span.first) & 1
        counts = index >= 0
        index = span.index_at(tile + 1, thread)
        cute.arch.mbarrier_wait(shared.barrier("s_full"), parity)
        fence_after_sync()
        large = Float32(LOWEST)  # by how much a score passes its reference, at most
        for half in cutlass.range_constexpr(HEADS // COLUMNS):
            load_columns(tmem, S_COLUMN + COLUMNS * half, s, thread)
            for h in cutlass.range_constexpr(0, COLUMNS, 4):
                cute.autovec_copy(quad(shared.reference, COLUMNS * half + h), four)
                for i in cutlass.range_constexpr(4):
                    large = cute.arch.fmax(large, fma(s[h + i], Float32(EXPONENT), -four[i]))
        moved = cute.arch.vote_any_sync(counts & (large > SLACK))
        if lane == 0:
            shared.moved[thread // 32, parity] = Int32(moved)
        cute.arch.barrier(barrier_id=PASSED, number_of_threads=SOFTMAX_THREADS)
        any_moved = Int32(0)
        for w in cutlass.range_constexpr(4):
            any_moved = any_moved | shared.moved[w, parity]
        if any_moved != 0:
            rescale(shared, tmem, s, counts, sums, tile > span.first, thread)
        for half in cutlass.range_constexpr(HEADS // COLUMNS):
            load_columns(tmem, S_COLUMN + COLUMNS * half, s, thread)
            for h in cutlass.range_constexpr(0, COLUMNS, 4):
                cute.autovec_copy(quad(shared.reference, COLUMNS * half + h), four)
                for i in cutlass.range_constexpr(4):
                    power = select(counts, fma(s[h + i], Float32(EXPONENT), -four[i]), -Float32.inf)
                    s[h + i] = exp2(power)
                    sums[COLUMNS * half + h + i] += s[h + i]
            for j in cutlass.range_constexpr(COLUMNS // 8):
                for i in cutlass.range_constexpr(4):
                    piece[i] = pack_bf16x2(s[8 * j + 2 * i], s[8 * j + 2 * i + 1])
                cute.autovec_copy(piece, shared.probabilities[None, piece_at(0, thread, COLUMNS // 8 * half + j)])
        fence_before_sync()
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(shared.barrier("p_full"))
    # Whoever read `partial` in `rescale` has passed a barrier since.
    pair = reduce_heads([sums[h] for h in range(HEADS)], lane)
    for i in cutlass.range_constexpr(2):
        shared.partial[2 * lane + i, thread // 32] = pair[i]
    cute.arch.barrier(barrier_id=PASSED, number_of_threads=SOFTMAX_THREADS)


@cute.jit
def finish(
    shared: Shared,
    sink: cute.Tensor,
    lse: cute.Tensor,
    stats: cute.Tensor,
    head: Int32,
    query: Int32,
    share: Int32,
    thread: Int32,
    split: cutlass.Constexpr,
) -> None:
    """The factor of each head's O^T into shared.factor, and lse, or the share's stats."""
    if thread < HEADS:
        total = Float32(0.0)
        for w in cutlass.range_constexpr(4):
            total += shared.partial[thread, w]
        reference = shared.reference[thread]
        row = head + thread
        shared.factor[thread] = Float32(1.0)
        if cutlass.const_expr(split):
            if row < lse.shape[0]:
                stats[0, share, row, query] = reference
                stats[1, share, row, query] = total
        else:
            shared.factor[thread] = final_factor(reference, total, sink[cutlass.min(row, lse.shape[0] - 1)])
            if row < lse.shape[0]:
                lse[row, query] = log_sum(reference, total)


# ---- output: the threads that gathered


@cute.jit
def write_out(
    shared: Shared,
    tmem: cute.Pointer,
    out: cute.Tensor,
    partial: cute.Tensor,
    head: Int32,
    query: Int32,
    share: Int32,
    any_tile,
    thread: Int32,
    split: cutlass.Constexpr,
) -> None:
    """O^T of this thread's dims, one of each of two chunks, times the heads' factors, into out or partial.

    thread: 0 to 255. any_tile: whether there is an O^T; out is 0 without.
    """
    o = cute.make_rmem_tensor((COLUMNS,), Float32)
    four = cute.make_rmem_tensor((4,), Float32)
    odd = thread % 2
    heads = out.shape[1]
    for part in cutlass.range(4, unroll=1):
        chunk, half = (thread >> 7 << 1) + (part >> 1), part & 1
        dim = chunk * CHUNK_DIMS + thread % 128
        if any_tile:
            load_columns(tmem, O_COLUMN + HEADS * chunk + COLUMNS * half, o, thread)
        else:
            o.fill(0.0)
        for h in cutlass.range_constexpr(0, COLUMNS, 4):
            cute.autovec_copy(quad(shared.factor, COLUMNS * half + h), four)
            for i in cutlass.range_constexpr(4):
                o[h + i] *= four[i]
        for h in cutlass.range_constexpr(0, COLUMNS, 2):
            row = head + COLUMNS * half + h
            if cutlass.const_expr(split):
                for i in cutlass.range_constexpr(2):
                    if row + i < heads:
                        partial[dim, row + i, share, query] = o[h + i]
            else:
                # Of two heads and two dims the even thread takes the first head, the odd one the second.
                own = select(odd == 0, o[h], o[h + 1])
                other = cute.arch.shuffle_sync_bfly(select(odd == 0, o[h + 1], o[h]), 1)
                if row + odd < heads:
                    low, high = select(odd == 0, own, other), select(odd == 0, other, own)
                    out[dim >> 1, row + odd, query] = pack_bf16x2(low, high)


# ---- kernels


@cute.kernel
def attend(
    tma_q: cute.CopyAtom,
    q: cute.Tensor,
    window: cute.Pointer,
    window_index: cute.Tensor,
    window_length: cute.Tensor,
    compressed: cute.Pointer,
    compressed_index: cute.Tensor,
    compressed_length: cute.Tensor,
    sink: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    partial: cute.Tensor,
    stats: cute.Tensor,
    window_shift: Int32,
    window_stride: Int32,
    compressed_shift: Int32,
    compressed_stride: Int32,
    queries: Int32,
    split: cutlass.Constexpr,
):
    """One CTA: 64 heads of one query, over one of gridDim.y shares of the entries that it sees.

    q    bf16 (H, 512, B S), by TMA          out  int32 (256 pairs of dims, H, B S)
    *_index  int32 (n, B S)                  *_length  int32 (B,)
    sink fp32 (H,), lse fp32 (H, B S)        *_shift, *_stride: log2 of entries, bytes of a page
    split:     partial fp32 (512, H, shares, B S) gets sum_j 2^(EXPONENT s_j - reference) c_j of this share, stats fp32
               (2, shares, H, B S) its reference and sum_j 2^(EXPONENT s_j - reference).
    not split: gridDim.y is 1; out and lse are written.
    """
    thread, _, _ = cute.arch.thread_idx()
    head_tile, share, query = cute.arch.block_idx()
    _, shares, _ = cute.arch.grid_dim()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    head = head_tile * HEADS

    memory = cutlass.utils.SmemAllocator()
    smem_k = memory.allocate_tensor(Int32, cute.make_layout((4, BLOCK_N * PIECES)), byte_alignment=1024)
    smem_q = memory.allocate_tensor(Int32, cute.make_layout((4, HEADS * PIECES)), byte_alignment=1024)
    smem_p = memory.allocate_tensor(Int32, cute.make_layout((4, BLOCK_N * 8)), byte_alignment=1024)
    barriers = memory.allocate_array(Int64, sum(count for _, count, _ in BARRIERS))
    tmem_at = memory.allocate_array(Int32, 1)
    shared = Shared(
        smem_k,
        smem_p,
        memory.allocate_tensor(Float32, cute.make_layout(HEADS), byte_alignment=16),
        memory.allocate_tensor(Float32, cute.make_layout(HEADS), byte_alignment=16),
        memory.allocate_tensor(Float32, cute.make_layout((HEADS, 4)), byte_alignment=16),
        memory.allocate_tensor(Int32, cute.make_layout((4, 2)), byte_alignment=16),
        memory.allocate_tensor(Int32, cute.make_layout(1), byte_alignment=16),
        barriers,
    )

    batch = Uint32(query) // Uint32(queries)
    in_window = cutlass.min(cutlass.max(window_length[batch], 0), window_index.shape[0])
    seen = in_window + cutlass.min(cutlass.max(compressed_length[batch], 0), compressed_index.shape[0])
    tiles = cute.ceil_div(seen, BLOCK_N)
    first, last = (Int32(Uint32(i * tiles) // Uint32(shares)) for i in (share, share + 1))
    span = Span(window_index, compressed_index, query, in_window, seen, first, last)
    if cutlass.const_expr(split):
        cute.arch.griddepcontrol_launch_dependents()

    if warp == MMA_WARP:
        cpasync.prefetch_descriptor(tma_q)
        with cute.arch.elect_one():
            for name, count, arrivals in BARRIERS:
                for i in range(count):
                    cute.arch.mbarrier_init(shared.barrier(name, i), arrivals)
        cute.arch.mbarrier_init_fence()
        cute.arch.alloc_tmem(TMEM_COLUMNS, tmem_at)
        cute.arch.relinquish_tmem_alloc_permit()
    if thread < HEADS:
        shared.reference[thread] = Float32(LOWEST)
    if thread == 0:
        shared.codes[0] = Int32(CODES)
    fence_before_sync()
    cute.arch.sync_threads()
    fence_after_sync()
    tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, tmem_at)

    if warp >= MMA_WARP:
        cute.arch.setmaxregister_decrease(MMA_REGISTERS)
        if warp == MMA_WARP:
            load_queries(tma_q, q, smem_q, shared.barrier("q_full"), head_tile, query)
            multiply(span, shared, smem_q, tmem)
    elif thread < SOFTMAX_THREADS:
        cute.arch.setmaxregister_increase(SOFTMAX_REGISTERS)
        softmax(span, shared, tmem, thread)
        finish(shared, sink, lse, stats, head, query, share, thread, split)
        cute.arch.barrier_arrive(barrier_id=OUT_READY, number_of_threads=SOFTMAX_THREADS + GATHER_THREADS)
    else:
        cute.arch.setmaxregister_increase(GATHER_REGISTERS)
        gatherer = Gatherer(
            (window.toint(), window_shift, window_stride),
            (compressed.toint(), compressed_shift, compressed_stride),
            (thread - SOFTMAX_THREADS) // 4,
            thread % 4,
        )
        gather(gatherer, span, shared)
        cute.arch.barrier(barrier_id=OUT_READY, number_of_threads=SOFTMAX_THREADS + GATHER_THREADS)
        if last > first:
            cute.arch.mbarrier_wait(shared.barrier("o_done"), 0)
        fence_after_sync()
        write_out(shared, tmem, out, partial, head, query, share, last > first, thread - SOFTMAX_THREADS, split)
        fence_before_sync()
    cute.arch.sync_threads()
    if warp == MMA_WARP:
        fence_after_sync()
        cute.arch.dealloc_tmem(tmem, TMEM_COLUMNS)


def load_queries(
    tma_q: cute.CopyAtom, q: cute.Tensor, smem_q: cute.Tensor, barrier: cute.Pointer, head_tile: Int32, query: Int32
) -> None:
    """Ask for 64 rows of q, zeros past the last one. One warp."""
    tile = cute.local_tile(q, (HEADS, CHUNK_DIMS), (head_tile, None, query))
    source = score_mma().get_slice(0).partition_B(tile)
    to, of = cpasync.tma_partition(
        tma_q, 0, cute.make_layout(1), cute.group_modes(viewed(smem_q, "q"), 0, 3), cute.group_modes(source, 0, 3)
    )
    size = cute.size_in_bytes(BFloat16, layout_of("q"))
    if cute.size(to, mode=[1]) != CHUNKS or cute.size(of, mode=[1]) != CHUNKS or size != HEADS * HEAD_DIM * 2:
        raise ValueError(f"queries must come in {CHUNKS} chunks, got {to.layout} from {of.layout}, {size} bytes")
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
    for c in range(CHUNKS):
        cute.copy(tma_q, of[None, c], to[None, c], tma_bar_ptr=barrier)


@cute.kernel
def combine(partial: cute.Tensor, stats: cute.Tensor, sink: cute.Tensor, out: cute.Tensor, lse: cute.Tensor):
    """One CTA: out and lse of one head of one query, from its shares, in order. A thread has 4 columns.

    partial fp32 (4, 128, H, shares, B S) and stats as attend wrote them, out int32 (2 words, 128, H, B S).
    """
    thread, _, _ = cute.arch.thread_idx()
    head, query, _ = cute.arch.block_idx()
    lane = cute.arch.lane_idx()
    shares = partial.shape[3]
    cute.arch.griddepcontrol_wait()
    reference = Float32(LOWEST)
    for start in cutlass.range(0, shares, 32, unroll=1):
        if start + lane < shares:
            reference = cute.arch.fmax(reference, stats[0, start + lane, head, query])
    reference = cute.arch.warp_reduction_max(reference)
    total = Float32(0.0)
    sums = cute.make_rmem_tensor((4,), Float32)
    parts = cute.make_rmem_tensor((COMBINE_BATCH,), Float32)
    raw = cute.make_rmem_tensor((4, COMBINE_BATCH), Int32)
    sums.fill(0.0)
    for start in cutlass.range(0, shares, 32, unroll=1):
        factor = Float32(0.0)  # of share start + lane
        if start + lane < shares:
            share_total = stats[1, start + lane, head, query]
            if share_total > 0.0:
                factor = exp2(stats[0, start + lane, head, query] - reference)
            total += share_total * factor
        for batch in cutlass.range(0, cutlass.min(shares - start, 32), COMBINE_BATCH, unroll=1):
            for i in cutlass.range_constexpr(COMBINE_BATCH):
                parts[i] = cute.arch.shuffle_sync(factor, batch + i)
                source = partial[None, thread, head, start + batch + i, query].iterator.toint()
                words = load_if(parts[i] > 0.0, source, 4, 0)  # a share without weight adds nothing, nor does none
                for j in cutlass.range_constexpr(4):
                    raw[j, i] = words[j]
            for i in cutlass.range_constexpr(COMBINE_BATCH):
                for j in cutlass.range_constexpr(4):
                    sums[j] += parts[i] * bits_to_float(raw[j, i])
    total = cute.arch.warp_reduction_sum(total)
    whole = final_factor(reference, total, sink[head])
    result = cute.make_rmem_tensor((2,), Int32)
    for j in cutlass.range_constexpr(2):
        result[j] = pack_bf16x2(sums[2 * j] * whole, sums[2 * j + 1] * whole)
    cute.autovec_copy(result, out[None, thread, head, query])
    if thread == 0:
        lse[head, query] = log_sum(reference, total)


# ---- launcher


def rows_of(at: cute.Pointer, *shape) -> cute.Tensor:
    """A contiguous tensor, the first index fastest: (vector, count, ...), whose vectors are aligned as such."""
    strides, stride, vector = [], 1, shape[0]
    for i, extent in enumerate(shape):
        strides.append(stride if i < 2 else cute.assume(stride, divby=vector))
        stride = stride * extent if i == 0 else Int64(stride) * extent
    return cute.make_tensor(at, cute.make_layout(shape, stride=tuple(strides)))


@cute.jit
def launch(
    q: cute.Pointer,
    window: cute.Pointer,
    window_index: cute.Pointer,
    window_length: cute.Pointer,
    compressed: cute.Pointer,
    compressed_index: cute.Pointer,
    compressed_length: cute.Pointer,
    sink: cute.Pointer,
    out: cute.Pointer,
    lse: cute.Pointer,
    partial: cute.Pointer,
    stats: cute.Pointer,
    batch: Int32,
    queries: Int32,
    heads: Int32,
    listed_window: Int32,
    listed_compressed: Int32,
    window_shift: Int32,
    window_stride: Int32,
    compressed_shift: Int32,
    compressed_stride: Int32,
    shares: Int32,
    split: cutlass.Constexpr,
):
    """Views of the tensors of task.Data and of the workspace, and the launches."""
    check_budgets()
    rows = batch * queries
    window_list = cute.make_tensor(window_index, cute.make_layout((listed_window, rows)))
    compressed_list = cute.make_tensor(compressed_index, cute.make_layout((listed_compressed, rows)))
    window_lengths = cute.make_tensor(window_length, cute.make_layout(batch))
    compressed_lengths = cute.make_tensor(compressed_length, cute.make_layout(batch))
    sinks = cute.make_tensor(sink, cute.make_layout(heads))
    sums = cute.make_tensor(lse, cute.make_layout((heads, rows)))
    share_stats = rows_of(stats, 2, shares, heads, rows)
    query_rows = cute.make_tensor(
        q,
        cute.make_layout(
            (heads, HEAD_DIM, rows), stride=(HEAD_DIM, 1, cute.assume(HEAD_DIM * Int64(heads), divby=HEAD_DIM))
        ),
    )
    tma_q, tma_rows = cute.nvgpu.make_tiled_tma_atom_B(
        cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE),
        query_rows,
        cute.select(layout_of("q"), mode=[0, 1, 2]),
        SCORE_TILE,
        score_mma(),
    )
    attend(
        tma_q,
        tma_rows,
        window,
        window_list,
        window_lengths,
        compressed,
        compressed_list,
        compressed_lengths,
        sinks,
        rows_of(out, HEAD_DIM // 2, heads, rows),
        sums,
        rows_of(partial, HEAD_DIM, heads, shares, rows),
        share_stats,
        window_shift,
        window_stride,
        compressed_shift,
        compressed_stride,
        queries,
        split,
    ).launch(  # setmaxnreg counts only if a multiprocessor is known to have one CTA
        grid=(cute.ceil_div(heads, HEADS), shares, rows), block=(NUM_THREADS, 1, 1), min_blocks_per_mp=1
    )
    if cutlass.const_expr(split):
        combine(
            rows_of(partial, 4, HEAD_DIM // 4, heads, shares, rows),
            share_stats,
            sinks,
            rows_of(out, 2, COMBINE_THREADS, heads, rows),
            sums,
        ).launch(  # without the last argument ptxas spares registers and has two loads under way, not COMBINE_BATCH
            grid=(heads, rows, 1), block=(COMBINE_THREADS, 1, 1), use_pdl=True, min_blocks_per_mp=1
        )


# Of the pointer arguments of `launch`: dtype, alignment in bytes.
VIEWS = (
    (BFloat16, 16),
    (Uint8, 16),
    (Int32, 4),
    (Int32, 4),
    (Uint8, 16),
    (Int32, 4),
    (Int32, 4),
    (Float32, 4),
    (Int32, 16),
    (Float32, 4),
    (Float32, 16),
    (Float32, 8),
)


@functools.cache
def compiled(split: bool, options: str = ""):
    """The kernels, for any shape; called with the pointers, then the integers of `launch`."""
    return cute.compile(launch, *pointers(VIEWS, [0] * 12), *(Int32(1) for _ in range(10)), split, options=options)


@functools.cache
def shares_for(ctas: int, listed: int, multiprocessors: int) -> int:
    """Into how many shares `listed` entries are cut, for `ctas` CTAs a share: what is least in the time of a tile.

    A CTA costs about 2 tiles beside its tiles. Shares cost a second kernel, which reads them 8 at a time, and their
    sums' way through L2. Nothing of it was measured on a B200.
    """
    tiles = -(-listed // BLOCK_N)

    def cost(shares: int) -> float:
        turns = -(-ctas * shares // multiprocessors)
        join = 0.8 + 0.04 * shares + 0.015 * ctas * shares if shares > 1 else 0
        return turns * (-(-tiles // shares) + 2) + join

    return min(range(1, max(tiles, 1) + 1), key=cost)


def compile_for(target: str) -> list[build.Artefact]:
    """Compile for `target`, without a GPU: a cubin with and one without a split, ptxas' report as log.

    RuntimeError unless CUTE_DSL_ARCH, which the DSL reads when it is first imported, says the same architecture.
    """
    check_target(target, TARGETS)
    stem = f"{Path(__file__).stem}-{target}"
    return [
        cubin(functools.partial(compiled, split), f"{stem}-{'split' if split else 'whole'}", target)
        for split in (False, True)
    ]


def custom_kernel(data: input_t) -> output_t:
    """Write data.out, bf16 (B, S, H, 512), and data.lse, fp32 (B, S, H), and return them.

    ValueError as unpack says, or if data is not on a GPU.
    """
    sizes = unpack(data)
    if not data.q.is_cuda:
        raise ValueError(f"data must be on a GPU, got {data.q.device}")
    batch, queries, heads, window, compressed, window_page, compressed_page = sizes
    rows = batch * queries
    multiprocessors = torch.cuda.get_device_properties(data.q.device).multi_processor_count
    shares = shares_for(rows * -(-heads // HEADS), window + compressed, multiprocessors)
    summed = rows * shares * heads if shares > 1 else 0
    workspace = torch.empty(summed * (HEAD_DIM + 2), dtype=torch.float32, device=data.q.device)
    tensors = (
        data.q,
        data.window,
        data.window_index,
        data.window_length,
        data.compressed,
        data.compressed_index,
        data.compressed_length,
        data.sink,
        data.out,
        data.lse,
        workspace,
    )
    addresses = [t.data_ptr() for t in tensors]
    strides = data.window.shape[1], data.compressed.shape[1]
    compiled(shares > 1)(
        *pointers(VIEWS, [*addresses, addresses[-1] + 4 * HEAD_DIM * summed]),
        batch,
        queries,
        heads,
        window,
        compressed,
        window_page.bit_length() - 1,
        strides[0],
        compressed_page.bit_length() - 1,
        strides[1],
        shares,
    )
    return data.out, data.lse
