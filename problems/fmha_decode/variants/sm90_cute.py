"""sm90_cute: CuTe DSL; wgmma on bf16 tiles that are gathered through registers and decoded once for K and V."""

import functools
from dataclasses import dataclass
from pathlib import Path

import cutlass
import torch
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cutlass_dsl import T, dsl_user_op
from task import HEAD_DIM, NOPE, SCALE, input_t, output_t, unpack

from problems.common import build
from problems.common.cute_dsl import bits_to_float, check_target, cubin, mul_bf16x2, pack_bf16x2, pointers, prmt

TARGETS = ("sm90",)
REQUIRES = ("cutlass",)

BLOCK_M = 64  # of a CTA: M of a wgmma
BLOCK_N = 64  # entries at a time
NUM_THREADS = 256  # two warpgroups: each makes the scores of half the entries, then the sums of half the columns
GROUPS = NOPE // 64  # scales of an entry
PAYLOAD = NOPE + 2 * (HEAD_DIM - NOPE)  # bytes of an entry without its scales
CHUNKS = HEAD_DIM // 8  # 16-byte pieces of a bf16 row
LOADS = PAYLOAD // 64  # 16-byte loads of each of the 4 threads that fetch an entry: GROUPS of e4m3, then 2 of bf16
COMBINE_THREADS = HEAD_DIM // 4
MULTIPROCESSORS = 132  # of an H200
LOG2_E = 1.4426950408889634
EXPONENT = SCALE * LOG2_E  # exp(SCALE s) = 2^(EXPONENT s)
LOWEST = -3.0e38  # reference where there is no score yet: finite, so that no difference is NaN
SLACK = 8 / EXPONENT  # the largest score may pass the reference by this much: weights stay below 2^8
SIGNS, LOW_THREE, HIGH_NIBBLES = -0x7F7F7F80, 0x07070707, -0x0F0F0F10  # 0x80, 0x07 and 0xF0 in each byte


@dsl_user_op
def load_if(wanted: cutlass.Boolean, address: Int64, words: int, other: int, *, loc=None, ip=None) -> tuple[Int32, ...]:
    """`words` words (1, 2 or 4) at `address` in global memory if `wanted`, else `other` in each; no branch."""
    names = [f"${i}" for i in range(words)]
    vector, target = ("", names[0]) if words == 1 else (f".v{words}", "{" + ", ".join(names) + "}")
    text = (
        "{ .reg .pred wanted; "
        f"setp.ne.b32 wanted, ${words + 1}, 0; "
        + "".join(f"mov.b32 {name}, {other}; " for name in names)
        + f"@wanted ld.global{vector}.b32 {target}, [${words}]; }}"
    )
    values = [Int64(address).ir_value(loc=loc, ip=ip), Int32(wanted).ir_value(loc=loc, ip=ip)]
    result = T.i32() if words == 1 else llvm.StructType.get_literal([T.i32()] * words)
    constraints = ",".join(["=&r"] * words + ["l", "r"])
    got = llvm.inline_asm(result, values, text, constraints, has_side_effects=True, loc=loc, ip=ip)
    if words == 1:
        return (Int32(got),)
    return tuple(Int32(llvm.extractvalue(T.i32(), got, [i], loc=loc, ip=ip)) for i in range(words))


def select(condition, a, b):
    """a where the condition holds, else b; both are computed."""
    return cutlass.select_(condition, a, b)


def exp2(x: Float32) -> Float32:
    """2^x, to 2 units in the last place; 0 for -infinity."""
    return cute.math.exp2(x, fastmath=True)


def log_sum(reference: Float32, total: Float32) -> Float32:
    """Natural log of total * 2^(EXPONENT reference); infinity where total is 0."""
    value = reference * SCALE + cute.math.log2(total, fastmath=True) * (1 / LOG2_E)
    return select(total > 0.0, value, Float32.inf)


def final_factor(reference: Float32, total: Float32, sink: Float32) -> Float32:
    """1 / (total + e^sink), the sink in units of 2^(EXPONENT reference); 0 where total is 0."""
    whole = total + exp2((sink - reference * SCALE) * LOG2_E)
    return select(total > 0.0, cute.arch.rcp_approx(whole), Float32(0.0))


def decode(word: Int32, factor: Int32) -> tuple[Int32, Int32]:
    """4 e4m3 values, in order, as bf16 times a power of two: exact, subnormals too.

    The code's bits stand where bf16's sign, low exponent and high mantissa bits are, which is the value times 2^-120;
    `factor` holds 2^(120 + the scale's exponent) twice. Planes of high and of low bytes are made, then merged.
    """
    high = (word & SIGNS) | ((word >> 4) & LOW_THREE)
    low = (word << 4) & HIGH_NIBBLES
    return mul_bf16x2(prmt(low, high, 0x5140), factor), mul_bf16x2(prmt(low, high, 0x7362), factor)


def chunk_at(row, chunk):
    """Where chunk `chunk` (8 columns) of row `row` lies in a tile of 64 rows, in chunks: wgmma's 128-byte swizzle, 64
    columns after 64 columns. Eight neighbouring rows, or eight neighbouring chunks, are in different banks.
    """
    return (chunk // 8 * 64 + row) * 8 + ((chunk % 8) ^ (row % 8))


def swizzled(memory: cute.Tensor, *shape: int) -> cute.Tensor:
    """Shared memory as a bf16 tensor (rows, columns) or (rows, columns, stages) in the layout of chunk_at."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
    layout = cute.tile_to_shape(atom, shape, tuple(range(len(shape))))
    return cute.make_tensor(cute.recast_ptr(memory.iterator, layout.inner, dtype=BFloat16), layout.outer)


def score_mma() -> cute.TiledMma:
    """64 heads x 64 entries x 16 columns, half of the entries a warpgroup."""
    op = warpgroup.MmaF16BF16Op(
        BFloat16,
        Float32,
        (BLOCK_M, BLOCK_N // 2, 16),
        warpgroup.OperandSource.SMEM,
        OperandMajorMode.K,
        OperandMajorMode.K,
    )
    return cute.make_tiled_mma(cute.make_mma_atom(op), (1, 2, 1))


def value_mma() -> cute.TiledMma:
    """64 heads x 512 columns x 16 entries, half of the columns a warpgroup. The entries lie as for the scores, so it is
    not the summed index that is contiguous in them.
    """
    op = warpgroup.MmaF16BF16Op(
        BFloat16,
        Float32,
        (BLOCK_M, HEAD_DIM // 2, 16),
        warpgroup.OperandSource.SMEM,
        OperandMajorMode.K,
        OperandMajorMode.MN,
    )
    return cute.make_tiled_mma(cute.make_mma_atom(op), (1, 2, 1))


def accumulators(mma: cute.TiledMma, columns: int) -> cute.Tensor:
    """Registers for 64 x `columns`. Register r of a thread is row 8 (r / 2 % 2) more than its first row, and column
    8 (r / 4) + r % 2 more than its first column: the kernel counts on it. ValueError, while tracing, if not so.
    """
    tensor = cute.make_rmem_tensor(mma.partition_shape_C((BLOCK_M, columns)), Float32)
    wanted = f"((2,2,{columns // 16}),1,1):((1,2,4),0,0)"
    if str(tensor.layout) != wanted:
        raise ValueError(f"accumulators must be {wanted}, got {tensor.layout}")
    return tensor


def multiply(mma: cute.TiledMma, result: cute.Tensor, a: cute.Tensor, b: cute.Tensor, fresh: bool) -> None:
    """Issue result = a b if `fresh`, else result += a b, over all steps of the fragments. Nothing waits for it."""
    warpgroup.fence()
    for k in range(cute.size(a, mode=[2])):
        mma.set(warpgroup.Field.ACCUMULATE, not fresh or k > 0)
        cute.gemm(mma, result, a[None, None, k], b[None, None, k], result)
    warpgroup.commit_group()


@dataclass(frozen=True)
class Reader:
    """What a thread knows of the list that its CTA reads: the window's entries that count, then the compressed ones.

    Four threads fetch an entry of a tile: load i of thread `quarter` is 16 of the 64 bytes that share scale i; the last
    two are of the position part, dealt so that the two entries of 8 threads fall into different banks.
    """

    window_index: cute.Tensor  # int32 (nw, B S)
    compressed_index: cute.Tensor  # int32 (nc, B S)
    window_pages: tuple  # address, log2 of the entries of a page, bytes of a page
    compressed_pages: tuple
    query: Int32
    in_window: Int32  # entries that the query sees in the window
    seen: Int32  # and in all
    last: Int32  # the tile behind this CTA's last one
    entry: Int32  # of this thread in a tile
    quarter: Int32

    def place_of(self, i: int) -> Int32:
        """Where load i lies in the payload, in 16-byte units."""
        if i < GROUPS:
            return 4 * i + self.quarter
        return 4 * GROUPS + self.quarter + 4 * ((i - GROUPS) ^ (self.entry % 2))

    def index_at(self, tile: Int32) -> Int32:
        """The number of this thread's entry of a tile; -1 for holes, and behind the end of the list or of the share."""
        at = tile * BLOCK_N + self.entry
        near = self.window_index.iterator.toint() + 4 * (Int64(self.query) * self.window_index.shape[0] + at)
        behind = Int64(self.query) * self.compressed_index.shape[0] + (at - self.in_window)
        far = self.compressed_index.iterator.toint() + 4 * behind
        wanted = (tile < self.last) & (at < self.seen)
        return load_if(wanted, select(at < self.in_window, near, far), 1, -1)[0]

    def fetch(self, raw: cute.Tensor, scales: cute.Tensor, index: Int32, tile: Int32) -> None:
        """This thread's part of entry number `index`, as stored; zeros for -1, whatever the pages hold.

        raw int32 (4 words, LOADS), scales int32 (2,): the entry's 8 scale bytes.
        """
        near = tile * BLOCK_N + self.entry < self.in_window
        both = zip(self.window_pages, self.compressed_pages, strict=True)
        base, shift, stride = (select(near, a, b) for a, b in both)
        number = cutlass.max(index, 0)
        page = number >> shift
        slot = Int64(number - (page << shift))
        start = base + Int64(page) * Int64(stride)
        for i in range(LOADS):
            words = load_if(index >= 0, start + slot * PAYLOAD + Int64(16 * self.place_of(i)), 4, 0)
            for j in range(4):
                raw[j, i] = words[j]
        scales[0], scales[1] = load_if(index >= 0, start + (Int64(PAYLOAD) << Int64(shift)) + 8 * slot, 2, 0)

    def store(self, raw: cute.Tensor, scales: cute.Tensor, index: Int32, tile: cute.Tensor, bias: cute.Tensor) -> None:
        """Decodes what `fetch` brought into a tile, int32 (4 words, 64 rows x 64 chunks), and says in bias, fp32
        (2, 32 pairs), whether the entry counts: 0, or -infinity to be added to its scores.
        """
        piece = cute.make_rmem_tensor((4,), Int32)
        for i in range(GROUPS):
            factor = (((scales[i // 4] >> (8 * (i % 4))) & 255) + 120) * 0x00800080
            for half in range(2):
                for j in range(2):
                    piece[2 * j], piece[2 * j + 1] = decode(raw[2 * half + j, i], factor)
                cute.autovec_copy(piece, tile[None, chunk_at(self.entry, 8 * i + 2 * self.quarter + half)])
        for i in range(GROUPS, LOADS):
            at = self.place_of(i) + 4 * GROUPS  # a chunk of e4m3 becomes two
            cute.autovec_copy(raw[None, i], tile[None, chunk_at(self.entry, at)])
        bias[self.entry % 2, self.entry // 2] = select(index >= 0, Float32(0.0), -Float32.inf)


@dataclass(frozen=True)
class Place:
    """Where a thread's accumulators stand: rows `row` and `row` + 8, columns 8 apart from 2 * `pair`, by warpgroup."""

    group: Int32
    row: Int32
    pair: Int32

    def chunk(self, columns: int, j: int) -> Int32:
        """The 8 columns that registers 4 j to 4 j + 3 are in, of accumulators of 64 x `columns`."""
        return self.group * (columns // 16) + j

    @cute.jit
    def leave(self, values: cute.Tensor, shared: cute.Tensor) -> None:
        """One value for each of the two rows, the same in the 4 threads of a row, into shared fp32 (2, 64)."""
        for h in cutlass.range_constexpr(2):
            if self.pair == 0:
                shared[self.group, self.row + 8 * h] = values[h]


def load_queries(q: cute.Tensor, tile: cute.Tensor, head: Int32, query: Int32, thread: Int32) -> None:
    """64 rows from `head` on into a tile of shared memory, int32 (4 words, 64 rows x 64 chunks); zeros past the last
    one.
    """
    words = cute.make_rmem_tensor((4, 8), Int32)
    chunk = thread % CHUNKS
    for turn in range(BLOCK_M * CHUNKS // NUM_THREADS // 8):  # 8 loads in flight
        rows = [thread // CHUNKS + NUM_THREADS // CHUNKS * (8 * turn + i) for i in range(8)]
        for i, row in enumerate(rows):
            source = q[None, chunk, cutlass.min(head + row, q.shape[2] - 1), query].iterator.toint()
            for j, word in enumerate(load_if(head + row < q.shape[2], source, 4, 0)):
                words[j, i] = word
        for i, row in enumerate(rows):
            cute.autovec_copy(words[None, i], tile[None, chunk_at(row, chunk)])


def row_tops(place: Place, s: cute.Tensor, bias: cute.Tensor, tops: cute.Tensor) -> None:
    """Masks the scores and finds the largest of each row, among those of the warpgroup; LOWEST if all are masked."""
    pair = cute.make_rmem_tensor((2,), Float32)
    for j in range(BLOCK_N // 16):
        cute.autovec_copy(bias[None, 4 * place.chunk(BLOCK_N, j) + place.pair], pair)
        for r in range(4):
            s[4 * j + r] += pair[r % 2]
    for h in range(2):
        top = Float32(LOWEST)
        for j in range(BLOCK_N // 16):
            for b in range(2):
                top = cute.arch.fmax(top, s[4 * j + 2 * h + b])
        tops[h] = cute.arch.warp_reduction_max(top, threads_in_group=4)


def softmax(
    place: Place,
    s: cute.Tensor,
    shared_tops: cute.Tensor,
    reference: cute.Tensor,
    total: cute.Tensor,
    shrink: cute.Tensor,
    smem_p: cute.Tensor,
) -> None:
    """Writes 2^(EXPONENT (s - reference)) as bf16 into the tile smem_p and adds it to `total`.

    The reference moves to the row's largest score only when that has passed it by SLACK: then `shrink` is what
    everything summed so far has to be multiplied with, else 1.
    """
    pair = cute.make_rmem_tensor((2,), Float32)
    for h in range(2):
        row = place.row + 8 * h
        cute.autovec_copy(shared_tops[None, row], pair)
        top = cute.arch.fmax(pair[0], pair[1])
        new = select(top > reference[h] + SLACK, top, reference[h])
        shrink[h] = exp2((reference[h] - new) * EXPONENT)
        reference[h] = new
        sum_of_row = total[h] * shrink[h]
        for j in range(BLOCK_N // 16):
            low, high = (exp2((s[4 * j + 2 * h + b] - new) * EXPONENT) for b in range(2))
            sum_of_row += low + high
            smem_p[4 * chunk_at(row, place.chunk(BLOCK_N, j)) + place.pair] = pack_bf16x2(low, high)
        total[h] = sum_of_row


def scale_rows(o: cute.Tensor, factors: cute.Tensor) -> None:
    """Multiplies the accumulators of each of the two rows with its factor."""
    for r in range(cute.size(o)):
        o[r] *= factors[r // 2 % 2]


def write_share(place: Place, o: cute.Tensor, h: int, partial: cute.Tensor) -> None:
    """Row h of the accumulators into partial, fp32 (2, 256 pairs)."""
    pair = cute.make_rmem_tensor((2,), Float32)
    for j in range(HEAD_DIM // 16):
        pair[0], pair[1] = o[4 * j + 2 * h], o[4 * j + 2 * h + 1]
        cute.autovec_copy(pair, partial[None, 4 * place.chunk(HEAD_DIM, j) + place.pair])


def round_rows(place: Place, o: cute.Tensor, words: cute.Tensor) -> None:
    """The accumulators as bf16 into a tile of shared memory, int32 (64 rows x 64 chunks x 4)."""
    for h in range(2):
        for j in range(HEAD_DIM // 16):
            at = chunk_at(place.row + 8 * h, place.chunk(HEAD_DIM, j))
            words[4 * at + place.pair] = pack_bf16x2(o[4 * j + 2 * h], o[4 * j + 2 * h + 1])


@cute.jit
def write_rows(tile: cute.Tensor, out: cute.Tensor, head: Int32, query: Int32, thread: Int32) -> None:
    """What load_queries does, backwards."""
    piece = cute.make_rmem_tensor((4,), Int32)
    chunk = thread % CHUNKS
    for i in cutlass.range_constexpr(BLOCK_M * CHUNKS // NUM_THREADS):
        row = thread // CHUNKS + NUM_THREADS // CHUNKS * i
        if head + row < out.shape[2]:
            cute.autovec_copy(tile[None, chunk_at(row, chunk)], piece)
            cute.autovec_copy(piece, out[None, chunk, head + row, query])


@cute.kernel
def attend(
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

    q, out     int32 (4 words, 64 chunks, H, B S)    *_index  int32 (n, B S)      *_length  int32 (B,)
    sink fp32 (H,), lse fp32 (H, B S)                *_shift, *_stride: log2 of entries, bytes of a page
    split:     partial fp32 (2, 256 pairs, H, shares, B S) gets sum_j 2^(EXPONENT (s_j - reference)) c_j of this share,
               stats fp32 (2, shares, H, B S) its reference and sum_j 2^(EXPONENT (s_j - reference)). Where that sum is
               0, partial is not written.
    not split: gridDim.y is 1; out and lse are written.
    """
    thread, _, _ = cute.arch.thread_idx()
    head_tile, share, query = cute.arch.block_idx()
    _, shares, _ = cute.arch.grid_dim()
    group = cute.arch.make_warp_uniform(thread // 128)
    head = head_tile * BLOCK_M
    place = Place(group, thread // 32 % 4 * 16 + thread % 32 // 4, thread % 4)

    memory = cutlass.memory.SmemAllocator()
    smem_q = memory.allocate_tensor(Int32, cute.make_layout((4, BLOCK_M * CHUNKS)), byte_alignment=1024)
    smem_kv = memory.allocate_tensor(Int32, cute.make_layout((4, BLOCK_N * CHUNKS, 2)), byte_alignment=1024)
    smem_p = memory.allocate_tensor(Int32, cute.make_layout(BLOCK_M * BLOCK_N // 2), byte_alignment=1024)
    bias = memory.allocate_tensor(Float32, cute.make_layout((2, BLOCK_N // 2, 2)), byte_alignment=16)
    shared_tops = memory.allocate_tensor(Float32, cute.make_layout((2, BLOCK_M)), byte_alignment=16)
    shared_totals = memory.allocate_tensor(Float32, cute.make_layout((2, BLOCK_M)), byte_alignment=16)

    keys = swizzled(smem_kv, BLOCK_N, HEAD_DIM, 2)
    values = cute.composition(keys, cute.make_ordered_layout((HEAD_DIM, BLOCK_N, 2), order=(1, 0, 2)))
    scoring, summing = score_mma().get_slice(group * 128), value_mma().get_slice(group * 128)
    q_part = scoring.make_fragment_A(scoring.partition_A(swizzled(smem_q, BLOCK_M, HEAD_DIM)))
    k_part = scoring.make_fragment_B(scoring.partition_B(keys))
    p_part = summing.make_fragment_A(summing.partition_A(swizzled(smem_p, BLOCK_M, BLOCK_N)))
    v_part = summing.make_fragment_B(summing.partition_B(values))
    s, o = accumulators(score_mma(), BLOCK_N), accumulators(value_mma(), HEAD_DIM)

    batch = Uint32(query) // Uint32(queries)
    in_window = cutlass.min(cutlass.max(window_length[batch], 0), window_index.shape[0])
    seen = in_window + cutlass.min(cutlass.max(compressed_length[batch], 0), compressed_index.shape[0])
    tiles = cute.ceil_div(seen, BLOCK_N)
    first, last = (Int32(Uint32(i * tiles) // Uint32(shares)) for i in (share, share + 1))
    reader = Reader(
        window_index,
        compressed_index,
        (window.toint(), window_shift, window_stride),
        (compressed.toint(), compressed_shift, compressed_stride),
        query,
        in_window,
        seen,
        last,
        thread // 4,
        thread % 4,
    )

    # The first tile goes to stage 0, the second waits in registers, of the third the indices are on their way.
    raw = cute.make_rmem_tensor((4, LOADS), Int32)
    scales = cute.make_rmem_tensor((2,), Int32)
    index = reader.index_at(first)
    reader.fetch(raw, scales, index, first)
    next_index = reader.index_at(first + 1)
    load_queries(q, smem_q, head, query, thread)
    reader.store(raw, scales, index, smem_kv[None, None, 0], bias[None, None, 0])
    cute.arch.fence_proxy("async.shared", space="cta")
    index = next_index
    reader.fetch(raw, scales, index, first + 1)
    next_index = reader.index_at(first + 2)
    if cutlass.const_expr(split):
        cute.arch.griddepcontrol_launch_dependents()
    cute.arch.sync_threads()

    reference = cute.make_rmem_tensor((2,), Float32)
    total = cute.make_rmem_tensor((2,), Float32)  # of the columns that this thread has
    tops = cute.make_rmem_tensor((2,), Float32)
    factors = cute.make_rmem_tensor((2,), Float32)
    reference.fill(LOWEST)
    total.fill(0.0)
    o.fill(0.0)
    for tile in cutlass.range(first, last, unroll=1):
        stage = (tile - first) & 1
        multiply(score_mma(), s, q_part, k_part[None, None, None, stage], fresh=True)
        warpgroup.wait_group(0)
        row_tops(place, s, bias[None, None, stage], tops)
        place.leave(tops, shared_tops)
        cute.arch.sync_threads()
        softmax(place, s, shared_tops, reference, total, factors, smem_p)
        if cute.arch.vote_any_sync((factors[0] != 1.0) | (factors[1] != 1.0)):
            scale_rows(o, factors)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        multiply(value_mma(), o, p_part, v_part[None, None, None, stage], fresh=False)
        if tile + 1 < last:
            reader.store(raw, scales, index, smem_kv[None, None, 1 - stage], bias[None, None, 1 - stage])
        cute.arch.fence_proxy("async.shared", space="cta")
        # Behind the fence, which may wait for loads, and before the barrier, which the compiler moves none across:
        # their latency passes while the next scores are made.
        index = next_index
        reader.fetch(raw, scales, index, tile + 2)
        next_index = reader.index_at(tile + 3)
        warpgroup.wait_group(0)
        cute.arch.sync_threads()

    for h in cutlass.range_constexpr(2):
        total[h] = cute.arch.warp_reduction_sum(total[h], threads_in_group=4)
    place.leave(total, shared_totals)
    cute.arch.sync_threads()
    for h in cutlass.range_constexpr(2):
        row = head + place.row + 8 * h
        total[h] = shared_totals[0, place.row + 8 * h] + shared_totals[1, place.row + 8 * h]
        if cutlass.const_expr(split):
            if row < q.shape[2]:
                if group == 0 and place.pair == 0:
                    stats[0, share, row, query] = reference[h]
                    stats[1, share, row, query] = total[h]
                if total[h] > 0.0:
                    write_share(place, o, h, partial[None, None, row, share, query])
        else:
            factors[h] = final_factor(reference[h], total[h], sink[cutlass.min(row, q.shape[2] - 1)])
            if row < q.shape[2] and group == 0 and place.pair == 0:
                lse[row, query] = log_sum(reference[h], total[h])
    if cutlass.const_expr(not split):
        # The output takes the queries' place in shared memory, so that rows leave in 16-byte pieces.
        scale_rows(o, factors)
        round_rows(place, o, cute.make_tensor(smem_q.iterator, cute.make_layout(BLOCK_M * CHUNKS * 4)))
        cute.arch.sync_threads()
        write_rows(smem_q, out, head, query, thread)


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
    sums.fill(0.0)
    for start in cutlass.range(0, shares, 32, unroll=1):
        factor = Float32(0.0)  # of share start + lane
        if start + lane < shares:
            share_total = stats[1, start + lane, head, query]
            if share_total > 0.0:
                factor = exp2((stats[0, start + lane, head, query] - reference) * EXPONENT)
            total += share_total * factor
        for i in cutlass.range(cutlass.min(shares - start, 32), unroll=4):
            part = cute.arch.shuffle_sync(factor, i)
            source = partial[None, thread, head, start + i, query].iterator.toint()
            words = load_if(part > 0.0, source, 4, 0)  # what has no weight may not have been written
            for j in cutlass.range_constexpr(4):
                sums[j] += part * bits_to_float(words[j])
    total = cute.arch.warp_reduction_sum(total)
    whole = final_factor(reference, total, sink[head])
    result = cute.make_rmem_tensor((2,), Int32)
    for j in cutlass.range_constexpr(2):
        result[j] = pack_bf16x2(sums[2 * j] * whole, sums[2 * j + 1] * whole)
    cute.autovec_copy(result, out[None, thread, head, query])
    if thread == 0:
        lse[head, query] = log_sum(reference, total)


def row_tensor(at: cute.Pointer, vector: int, count: int, heads: Int32, rows: Int32) -> cute.Tensor:
    """q or out: rows of `count` vectors of `vector` words, (vector, count, H, B S)."""
    stride = (1, vector, vector * count, cute.assume(vector * count * Int64(heads), divby=vector))
    return cute.make_tensor(at, cute.make_layout((vector, count, heads, rows), stride=stride))


def share_tensor(at: cute.Pointer, vector: int, heads: Int32, shares: Int32, rows: Int32) -> cute.Tensor:
    """The shares' sums: (vector, 512 / vector, H, shares, B S)."""
    wide = Int64(HEAD_DIM) * heads
    stride = (1, vector, HEAD_DIM, *(cute.assume(s, divby=HEAD_DIM) for s in (wide, wide * shares)))
    return cute.make_tensor(at, cute.make_layout((vector, HEAD_DIM // vector, heads, shares, rows), stride=stride))


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
    rows = batch * queries
    window_list = cute.make_tensor(window_index, cute.make_layout((listed_window, rows)))
    compressed_list = cute.make_tensor(compressed_index, cute.make_layout((listed_compressed, rows)))
    window_lengths = cute.make_tensor(window_length, cute.make_layout(batch))
    compressed_lengths = cute.make_tensor(compressed_length, cute.make_layout(batch))
    sinks = cute.make_tensor(sink, cute.make_layout(heads))
    sums = cute.make_tensor(lse, cute.make_layout((heads, rows)))
    of_share = (1, 2, 2 * shares, 2 * shares * Int64(heads))
    share_stats = cute.make_tensor(stats, cute.make_layout((2, shares, heads, rows), stride=of_share))
    attend(
        row_tensor(q, 4, CHUNKS, heads, rows),
        window,
        window_list,
        window_lengths,
        compressed,
        compressed_list,
        compressed_lengths,
        sinks,
        row_tensor(out, 4, CHUNKS, heads, rows),
        sums,
        share_tensor(partial, 2, heads, shares, rows),
        share_stats,
        window_shift,
        window_stride,
        compressed_shift,
        compressed_stride,
        queries,
        split,
    ).launch(grid=(cute.ceil_div(heads, BLOCK_M), shares, rows), block=(NUM_THREADS, 1, 1))
    if cutlass.const_expr(split):
        combine(
            share_tensor(partial, 4, heads, shares, rows),
            share_stats,
            sinks,
            row_tensor(out, 2, COMBINE_THREADS, heads, rows),
            sums,
        ).launch(grid=(heads, rows, 1), block=(COMBINE_THREADS, 1, 1), use_pdl=True)


# Of the pointer arguments of `launch`: dtype, alignment in bytes.
VIEWS = (
    (Int32, 16),
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
def shares_for(ctas: int, listed: int) -> int:
    """Into how many shares `listed` entries are cut, for `ctas` CTAs a share: what is least in the time of a tile.

    A CTA costs about 2 tiles beside its tiles; shares cost a second kernel, and their sums' way through L2.
    """
    tiles = -(-listed // BLOCK_N)

    def cost(shares: int) -> float:
        waves = -(-ctas * shares // MULTIPROCESSORS)
        return waves * (-(-tiles // shares) + 2) + (0.8 + 0.015 * ctas * shares if shares > 1 else 0)

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
    shares = shares_for(rows * -(-heads // BLOCK_M), window + compressed)
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
