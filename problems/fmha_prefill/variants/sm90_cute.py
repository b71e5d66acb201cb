"""sm90_cute: CuTe DSL; entries staged once as bf16, then a CTA a query: scores of a tile beside values of the last."""

import functools
from dataclasses import dataclass
from pathlib import Path

import cutlass
import torch
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, Uint8, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from task import HEAD_DIM, NOPE, PAYLOAD, SCALE, WINDOW, input_t, memory_order, output_t, unpack

from problems.common import build
from problems.common.cute_dsl import bits_to_float, check_target, cubin, pack_bf16x2, pointers

TARGETS = ("sm90",)
REQUIRES = ("cutlass",)

HEADS = 64  # of a CTA: rows of both products
TILE = 48  # entries at a time; three such tiles and the queries fill shared memory
BUFFERS = 3  # one for scores, the one before for values, the next under way
PIECES = HEAD_DIM // 8  # of 16 bytes, in a row of bf16
NUM_THREADS = 384  # three groups of 128: scores, and values of 256 dims each
LOADERS = 8  # warps that fetch, those of groups 1 and 2
FETCHES = TILE // LOADERS  # rows of a tile that one of them fetches
DIMS = HEAD_DIM // 2  # of a group that adds values
STAGE_THREADS, STAGE_ROWS = 256, 256 // PIECES

LOG2_E = 1.4426950408889634
LOWEST = -1.0e37  # reference where there is no score yet: finite, so that no difference is NaN
SLACK = 8.0  # powers of two by which a score may pass the reference: weights stay below 2^8

exp2 = functools.partial(cute.math.exp2, fastmath=True)  # to 2 units in the last place; 0 for -infinity
log2 = functools.partial(cute.math.log2, fastmath=True)

# ---- staging


@cute.kernel
def stage(window: tuple, compressed: tuple, rows: cute.Tensor):
    """Decode every entry of both caches, the window's first. A thread has 8 values; behind the last row is one of 0.

    window, compressed: address, log2 of a page's entries, bytes of a page, entries; rows: int32 (4, PIECES, rows).
    """
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    cute.arch.griddepcontrol_launch_dependents()
    row, piece = block * STAGE_ROWS + thread // PIECES, thread % PIECES
    near = row < window[3]
    base, shift, stride = (cutlass.select_(near, a, b) for a, b in zip(window[:3], compressed[:3], strict=True))
    entry = cutlass.select_(near, row, row - window[3])
    values = cute.make_rmem_tensor((8,), BFloat16)
    values.fill(0.0)
    if row < window[3] + compressed[3]:
        page = entry >> shift
        slot = Int64(entry - (page << shift))
        start = base + Int64(page) * Int64(stride)
        if piece < NOPE // 8:
            codes = at_address(Float8E4M3FN, start + slot * PAYLOAD + 8 * piece, 8).load().to(Float32)
            scale_at = start + (Int64(PAYLOAD) << Int64(shift)) + 8 * slot + piece // 8
            scale = Int32(at_address(Uint8, scale_at, 1)[0]) & 255  # CuTe loads it as if it had a sign
            values.store((codes * bits_to_float(scale << 23)).to(BFloat16))
        else:
            values.store(at_address(BFloat16, start + slot * PAYLOAD + 16 * piece - NOPE, 8).load())
    if row < rows.shape[2]:
        cute.autovec_copy(cute.recast_tensor(values, Int32), rows[None, piece, row])


def at_address(dtype: type, address: Int64, count: int) -> cute.Tensor:
    """`count` neighbouring values in global memory, aligned to all of them."""
    align = count * dtype.width // 8
    return cute.make_tensor(cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align), count)


# ---- attention


def product(columns: int, of_b: OperandMajorMode) -> cute.TiledMma:
    """64 rows, 16 terms of a sum, both factors in shared memory; the summed index is contiguous in the first."""
    shape, source = (HEADS, columns, 16), warpgroup.OperandSource.SMEM
    return cute.make_tiled_mma(warpgroup.MmaF16BF16Op(BFloat16, Float32, shape, source, OperandMajorMode.K, of_b))


def place(rows: int, row, piece):
    """Where a piece of a row lies, in pieces: groups of 64 values are `rows` rows, in which pieces are swizzled."""
    return (piece // 8 * rows + row) * 8 + (piece % 8 ^ row % 8)


def viewed(memory: cute.Tensor, by_rows: bool, shape: tuple, order: tuple) -> cute.Tensor:
    """Shared memory as bf16 of `shape`, as `place` lays it out. by_rows: the second index is contiguous."""
    kind = warpgroup.SmemLayoutAtomKind.K_SW128 if by_rows else warpgroup.SmemLayoutAtomKind.MN_SW128
    layout = cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, BFloat16), shape, order)
    return cute.make_tensor(cute.recast_ptr(memory.iterator, layout.inner, dtype=BFloat16), layout.outer)


def accumulators(mma: cute.TiledMma, columns: int) -> tuple[cute.Tensor, cute.Tensor]:
    """-> registers of a product, and the same as (2 columns, 2 rows, columns / 8): of thread 32 w + l the columns
    8 j + 2 (l % 4) and the next, and the rows 16 w + l / 4 and 8 more.
    """
    acc = cute.make_rmem_tensor(mma.partition_shape_C((HEADS, columns)), Float32)
    acc.fill(0.0)
    if cute.size(acc) * 2 != columns:
        raise ValueError(f"a thread must have {columns // 2} sums, got {acc.layout}")
    return acc, cute.make_tensor(acc.iterator, cute.make_layout((2, 2, columns // 8)))


@dataclass(frozen=True)
class Shared:
    """Shared memory. What is double is for even and odd tiles; entries and bias are triple, for the next one too."""

    queries: cute.Tensor  # int32 (4, HEADS x PIECES)
    entries: cute.Tensor  # int32 (4, TILE x PIECES, BUFFERS): keys, and values
    bias: cute.Tensor  # fp32 (TILE, BUFFERS): -infinity for holes
    weights: cute.Tensor  # int32 (4, HEADS x 8, 2): P
    factor: cute.Tensor  # fp32 (HEADS, 2), of O ahead of a tile
    whole: cute.Tensor  # fp32 (HEADS,), what O is multiplied by at last


@dataclass(frozen=True)
class Fetcher:
    """A warp of groups 1 and 2, of LOADERS that share the rows of a tile; lane i < FETCHES looks up the i-th."""

    shared: Shared
    rows: cute.Tensor  # int32 (4, PIECES, rows), staged; the last one of 0
    near: Int64  # address of the token's list of the window
    far: Int64  # and of its compressed list, less WINDOW places, as that follows the window's
    seen: Int32  # places of both together
    first_far: Int32  # the first compressed row
    warp: Int32
    lane: Int32


@cute.jit
def look_up(fetcher: Fetcher, tile: Int32) -> Int32:
    """What the list says for this lane's row of a tile: an entry or -1."""
    entry, at = Int32(-1), tile * TILE + fetcher.lane * LOADERS + fetcher.warp
    if fetcher.lane < FETCHES and at < fetcher.seen:
        entry = at_address(Int32, cutlass.select_(at < WINDOW, fetcher.near, fetcher.far) + 4 * Int64(at), 1)[0]
    return entry


@cute.jit
def copy_row(source: cute.Tensor, target: cute.Tensor, rows: cutlass.Constexpr, row: Int32, lane: Int32):
    """Ask for a row of `rows`. source: int32 (4, PIECES); target: int32 (4, rows x PIECES). One warp."""
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(cpasync.LoadCacheMode.GLOBAL), Int32, num_bits_per_copy=128)
    for half in cutlass.range_constexpr(2):
        piece = 32 * half + lane
        cute.copy(atom, source[None, piece], target[None, place(rows, row, piece)])


@cute.jit
def fetch(fetcher: Fetcher, tile: Int32, entry: Int32) -> Int32:
    """Ask for a tile, if there is one, of which `entry` was looked up. -> the next tile's, which nothing waits for."""
    if tile * TILE < fetcher.seen:
        own, none = fetcher.lane * LOADERS + fetcher.warp, entry < 0
        row = entry + cutlass.select_(tile * TILE + own < WINDOW, Int32(0), fetcher.first_far)
        row = Int32(cutlass.select_(none, fetcher.rows.shape[2] - 1, row))
        buffer = fetcher.shared.entries[None, None, tile % BUFFERS]
        for i in cutlass.range_constexpr(FETCHES):
            source = fetcher.rows[None, None, cute.arch.shuffle_sync(row, i)]
            copy_row(source, buffer, TILE, i * LOADERS + fetcher.warp, fetcher.lane)
        if fetcher.lane < FETCHES:
            fetcher.shared.bias[own, tile % BUFFERS] = cutlass.select_(none, -Float32.inf, Float32(0.0))
        entry = look_up(fetcher, tile + 1)
    cute.arch.cp_async_commit_group()
    return entry


@cute.jit
def meet():
    """Let tensor cores see what this thread has written to shared memory, and wait for all threads of the CTA."""
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()


@cute.jit
def score(shared: Shared, count: Int32, sink, lse, heads: Int32, first_row: Int32, lane: Int32):
    """Group 0: weights 2^(SCALE LOG2_E s - reference) of each tile, and factors of O; then lse and the last factors.

    A reference moves only where a score passes it by SLACK. sink, lse: fp32 (heads,), the CTA's.
    """
    mma = product(TILE, OperandMajorMode.K)
    part = mma.get_slice(0)
    q = mma.make_fragment_A(part.partition_A(viewed(shared.queries, True, (HEADS, HEAD_DIM), (0, 1))))
    k = mma.make_fragment_B(part.partition_B(viewed(shared.entries, True, (TILE, HEAD_DIM, BUFFERS), (0, 1, 2))))
    acc, s = accumulators(mma, TILE)
    reference, total = cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((2,), Float32)
    reference.fill(LOWEST)
    total.fill(0.0)
    for tile in cutlass.range(count, unroll=1):
        meet()
        warpgroup.fence()
        for step in cutlass.range_constexpr(HEAD_DIM // 16):
            mma.set(warpgroup.Field.ACCUMULATE, step > 0)
            cute.gemm(mma, acc, q[None, None, step], k[None, None, step, tile % BUFFERS], acc)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        for r in cutlass.range_constexpr(2):
            row, old, top = first_row + 8 * r, reference[r], Float32(LOWEST)
            for j in cutlass.range_constexpr(TILE // 8):
                for c in cutlass.range_constexpr(2):
                    bias = shared.bias[8 * j + 2 * (lane % 4) + c, tile % BUFFERS]
                    s[c, r, j] = s[c, r, j] * (SCALE * LOG2_E) + bias
                    top = cute.arch.fmax(top, s[c, r, j])
            top = cute.arch.warp_reduction_max(top, threads_in_group=4)
            reference[r] = cutlass.select_(top > old + SLACK, top, old)
            factor = exp2(old - reference[r])
            total[r] *= factor
            if lane % 4 == 0:
                shared.factor[row, tile % 2] = factor
            for j in cutlass.range_constexpr(TILE // 8):
                for c in cutlass.range_constexpr(2):
                    s[c, r, j] = exp2(s[c, r, j] - reference[r])
                    total[r] += s[c, r, j]
                shared.weights[lane % 4, place(HEADS, row, j), tile % 2] = pack_bf16x2(s[0, r, j], s[1, r, j])
    meet()
    for r in cutlass.range_constexpr(2):
        row = first_row + 8 * r
        sums = cute.arch.warp_reduction_sum(total[r], threads_in_group=4)
        with_sink = sums + exp2(sink[cutlass.min(row, heads - 1)] * LOG2_E - reference[r])
        shared.whole[row] = cutlass.select_(sums > 0.0, cute.arch.rcp_approx(with_sink), Float32(0.0))
        log = (reference[r] + log2(sums)) * (1 / LOG2_E)
        if lane % 4 == 0 and row < heads:
            lse[row] = cutlass.select_(sums > 0.0, log, Float32.inf)
    cute.arch.sync_threads()


@cute.jit
def next_tile(fetcher: Fetcher, tile: Int32, entry: Int32) -> Int32:
    """Hand a tile over, and fetch the next one to where everybody is done. entry: as `fetch` has it."""
    cute.arch.cp_async_wait_group(0)
    meet()
    return fetch(fetcher, tile + 1, entry)


@cute.jit
def add_values(fetcher: Fetcher, count: Int32, entry: Int32, out, heads: Int32, half: Int32, first_row: Int32):
    """Groups 1 and 2: fetch a tile and, while the last one is scored, O += P V of the one before, for half of the dims.

    The output goes through the queries' place, so that rows are written whole. out: int32 (4, PIECES, heads).
    """
    shared, lane, mma = fetcher.shared, fetcher.lane, product(DIMS, OperandMajorMode.MN)
    part = mma.get_slice(0)
    p = mma.make_fragment_A(part.partition_A(viewed(shared.weights, True, (HEADS, 64, 2), (0, 1, 2))))
    values = viewed(shared.entries, False, (HEAD_DIM, TILE, BUFFERS), (1, 0, 2))
    v = mma.make_fragment_B(part.partition_B(cute.local_tile(values, (DIMS, TILE, BUFFERS), (half, 0, 0))))
    acc, o = accumulators(mma, DIMS)
    entry = next_tile(fetcher, Int32(0), entry)
    for tile in cutlass.range(count, unroll=1):
        entry = next_tile(fetcher, tile + 1, entry)
        factor = [shared.factor[first_row + 8 * r, tile % 2] for r in range(2)]
        if cute.arch.vote_any_sync((factor[0] != 1.0) | (factor[1] != 1.0)):
            for i in cutlass.range_constexpr(DIMS // 2):
                acc[i] *= factor[i // 2 % 2]
        warpgroup.fence()
        for step in cutlass.range_constexpr(TILE // 16):
            mma.set(warpgroup.Field.ACCUMULATE, True)
            cute.gemm(mma, acc, p[None, None, step, tile % 2], v[None, None, step, tile % BUFFERS], acc)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
    cute.arch.sync_threads()
    for r in cutlass.range_constexpr(2):
        row = first_row + 8 * r
        whole = shared.whole[row]
        for j in cutlass.range_constexpr(DIMS // 8):
            pair = pack_bf16x2(o[0, r, j] * whole, o[1, r, j] * whole)
            shared.queries[lane % 4, place(HEADS, row, DIMS // 8 * half + j)] = pair
    cute.arch.sync_warp()  # a warp has 16 rows
    for i in cutlass.range(16, unroll=4):
        row, piece = first_row // 16 * 16 + i, DIMS // 8 * half + lane
        if row < heads:
            cute.autovec_copy(shared.queries[None, place(HEADS, row, piece)], out[None, piece, row])


@cute.kernel
def attend(q, rows, starts, window_index, compressed_index, compressed_length, sink, out, lse, first_far, each):
    """One CTA: 64 heads of one token. Values of a tile are added while the next is scored and one more is fetched.

    q, out      int32 (4, PIECES, H, T)     rows      int32 (4, PIECES, rows), the last of 0, for holes
    *_index     int32 (n, lists)            starts    int32 (B + 1,)
    sink, lse   fp32 (H,), (H, T)           first_far, each: Int32, the first compressed row, whether tokens have lists
    """
    block, head_tile, _ = cute.arch.block_idx()
    lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
    token = q.shape[3] - 1 - block  # the longest lists come first
    head, heads = head_tile * HEADS, cutlass.min(q.shape[2] - head_tile * HEADS, HEADS)
    q, out = (cute.domain_offset((0, 0, head), part[None, None, None, token]) for part in (q, out))
    sink, lse = (cute.domain_offset(head, part) for part in (sink, lse[None, token]))

    memory = cutlass.utils.SmemAllocator()
    shared = Shared(
        memory.allocate_tensor(Int32, cute.make_layout((4, HEADS * PIECES)), byte_alignment=1024),
        memory.allocate_tensor(Int32, cute.make_layout((4, TILE * PIECES, BUFFERS)), byte_alignment=1024),
        memory.allocate_tensor(Float32, cute.make_layout((TILE, BUFFERS)), byte_alignment=16),
        memory.allocate_tensor(Int32, cute.make_layout((4, HEADS * 8, 2)), byte_alignment=1024),
        memory.allocate_tensor(Float32, cute.make_layout((HEADS, 2)), byte_alignment=16),
        memory.allocate_tensor(Float32, cute.make_layout(HEADS), byte_alignment=16),
    )
    seen = WINDOW + cutlass.min(compressed_length[token], compressed_index.shape[0])
    count = cute.ceil_div(seen, TILE)
    first_row = warp % 4 * 16 + lane // 4  # and 8 more: rows of a product that this thread has
    if warp < 4:
        score(shared, count, sink, lse, heads, first_row, lane)
    else:
        for i in cutlass.range_constexpr(HEADS // LOADERS):
            row = i * LOADERS + warp - 4  # past the last head it is that one again
            copy_row(q[None, None, cutlass.min(row, heads - 1)], shared.queries, HEADS, row, lane)
        # Sequences that start at the token or ahead of it; those without tokens start where the next one does.
        sequence = Int32(-1)
        for first in cutlass.range(0, cute.size(starts) - 1, 32, unroll=1):
            ahead = False
            if first + lane < cute.size(starts) - 1:
                ahead = starts[first + lane] <= token
            sequence += cute.arch.popc(cute.arch.vote_ballot_sync(ahead))
        near = window_index[None, sequence].iterator + (token - starts[sequence])
        far = compressed_index[None, cutlass.select_(each != 0, token, sequence)].iterator - WINDOW
        fetcher = Fetcher(shared, rows, near.toint(), far.toint(), seen, first_far, warp - 4, lane)
        entry = look_up(fetcher, Int32(0))
        cute.arch.griddepcontrol_wait()  # for staged rows
        entry = fetch(fetcher, Int32(0), entry)
        add_values(fetcher, count, entry, out, heads, warp // 4 - 1, first_row)


# ---- launcher


@cute.jit
def launch(tensors: tuple, sizes: tuple, near: tuple, far: tuple):
    """Views of the tensors of task.Data and of the staged rows, and both launches. near, far: caches, as stage's are
    but for the address.
    """
    q, starts, _, window, window_index, compressed, compressed_index, compressed_length, sink, out, lse, rows = tensors
    tokens, batch, heads, nw, nc, each, heads_outer = sizes
    count = near[2] + far[2] + 1
    row = cute.assume(Int64(4 * PIECES), divby=4 * PIECES)  # 64 bits: 2^23 rows and more
    staged = cute.make_tensor(rows, cute.make_layout((4, PIECES, count), stride=(1, 4, row)))
    stage((window.toint(), *near), (compressed.toint(), *far), staged).launch(
        grid=(cute.ceil_div(count, STAGE_ROWS), 1, 1), block=(STAGE_THREADS, 1, 1)
    )
    by_token = Int64(cutlass.select_(heads_outer != 0, Int32(1), heads))  # strides, in rows
    by_head = Int64(cutlass.select_(heads_outer != 0, tokens, Int32(1)))
    by_head, by_token = (cute.assume(4 * PIECES * n, divby=4 * PIECES) for n in (by_head, by_token))
    layout = cute.make_layout((4, PIECES, heads, tokens), stride=(1, 4, by_head, by_token))
    attend(
        cute.make_tensor(q, layout),
        staged,
        cute.make_tensor(starts, cute.make_layout(batch + 1)),
        cute.make_tensor(window_index, cute.make_layout((nw, batch), stride=(1, Int64(nw)))),
        cute.make_tensor(
            compressed_index, cute.make_layout((nc, cutlass.select_(each != 0, tokens, batch)), stride=(1, Int64(nc)))
        ),
        cute.make_tensor(compressed_length, cute.make_layout(tokens)),
        cute.make_tensor(sink, cute.make_layout(heads)),
        cute.make_tensor(out, layout),
        cute.make_tensor(lse, cute.make_layout((heads, tokens))),
        near[2],
        each,
    ).launch(
        grid=(tokens, cute.ceil_div(heads, HEADS), 1), block=(NUM_THREADS, 1, 1), use_pdl=True, min_blocks_per_mp=1
    )


# Of task.Data's tensors, then the staged rows: dtype, alignment in bytes.
VIEWS = tuple((dtype, 16) for dtype in (*[Int32] * 8, Float32, Int32, Float32, Int32))


@functools.cache
def compiled(options: str = ""):
    """Both kernels, for any shape; called as `launch` is."""
    sizes, cache = tuple(Int32(1) for _ in range(7)), tuple(Int32(1) for _ in range(3))
    return cute.compile(launch, tuple(pointers(VIEWS, [0] * 12)), sizes, cache, cache, options=options)


def compile_for(target: str) -> list[build.Artefact]:
    """Compile for `target`, without a GPU: a cubin, ptxas' report as log. Errors as `check_target` says."""
    check_target(target, TARGETS)
    return [cubin(compiled, f"{Path(__file__).stem}-{target}", target)]


def custom_kernel(data: input_t) -> output_t:
    """Write data.out, bf16 (T, H, 512), and data.lse, fp32 (T, H), and return them.

    All entries of the pages are staged, which suits pages of which tokens see most. ValueError as unpack says, or if
    data is not on a GPU.
    """
    sizes = unpack(data)
    if not data.q.is_cuda:
        raise ValueError(f"data must be on a GPU, got {data.q.device}")
    near, far = (
        (per_page.bit_length() - 1, pages.shape[1], len(pages) * per_page)
        for pages, per_page in ((data.window, sizes.page_window), (data.compressed, sizes.page_compressed))
    )
    rows = torch.empty((near[2] + far[2] + 1, HEAD_DIM), dtype=torch.bfloat16, device=data.q.device)
    tensors = tuple(pointers(VIEWS, [t.data_ptr() for t in (*data, rows)]))
    compiled()(tensors, (*sizes[:5], int(sizes.each), int(memory_order(data.q) == "heads")), near, far)
    return data.out, data.lse
