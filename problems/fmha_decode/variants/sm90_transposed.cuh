// fmha_decode for 64 heads and more, with scores made by the warps that decode: S^T = K Q^T out of registers.
//
// A block of 384 threads has one query, 64 of its heads and a share of its entries, in tiles of 64.
//   warpgroup 0         loads entries into registers, a tile ahead, a lane what it decodes itself; what a warp has
//   (184 registers)     decoded of its 16 entries is wgmma's factor A as it is, once dims are permuted, and those of Q
//                       likewise; the same registers are stored as values. Softmax; P^T to shared memory as P.
//   warpgroups 1 and 2  O += P V, dims 0 to 255 and 256 to 511
// So keys are never read from shared memory, nothing is staged there, and queries are read once for 64 entries, not for
// 48: 34 cycles of the shared-memory port an entry, where sm90_wgmma's other kernel takes 48. As there, the running
// maximum moves only if it grows by more than RESCALE_THRESHOLD, and combine.cuh joins splits.
#pragma once

#include "sm90_block.cuh"
#include "sm90_products.cuh"

namespace fmha::transposed {

constexpr int BLOCK_N = 64, NUM_STAGES = 2;
constexpr int NUM_THREADS = 384, NUM_PRODUCER_THREADS = 128, NUM_VALUE_THREADS = 256;

// Registers a thread of each warpgroup while it works.
constexpr int PRODUCER_REGISTERS = 184, VALUE_REGISTERS = 160, LAUNCH_REGISTERS = 168;
static_assert(PRODUCER_REGISTERS + 2 * VALUE_REGISTERS <= 3 * LAUNCH_REGISTERS);

// Shared memory in bytes from a multiple of 1024.
struct Layout {
    static constexpr uint32_t TILE = BLOCK_M * 128;  // a sub-tile of 64 dims, of queries and of entries
    static constexpr uint32_t SMEM_Q = 0, SMEM_V = SMEM_Q + TILES * TILE;
    static constexpr uint32_t SMEM_P = SMEM_V + NUM_STAGES * TILES * TILE, P_TILE = BLOCK_M * 128;
    static constexpr uint32_t ALPHA = SMEM_P + NUM_STAGES * P_TILE;    // float [NUM_STAGES][BLOCK_M]: factors of O
    static constexpr uint32_t TOPS = ALPHA + NUM_STAGES * BLOCK_M * 4;  // float [4][BLOCK_M]: warps' running maxima
    static constexpr uint32_t MAXIMA = TOPS + 4 * BLOCK_M * 4;  // float [4][BLOCK_M]: of a tile; in the end sums of p
    static constexpr uint32_t FACTOR = MAXIMA + 4 * BLOCK_M * 4;    // float [BLOCK_M]: 1 / denominator
    static constexpr uint32_t ABOVE = FACTOR + BLOCK_M * 4;         // int [NUM_STAGES][4]: has a warp found a maximum
    static constexpr uint32_t MOVED = ABOVE + NUM_STAGES * 16;      // int [NUM_STAGES]: does any ALPHA differ from 1
    static constexpr uint32_t FULL_BARRIERS = MOVED + NUM_STAGES * 4, EMPTY_BARRIERS = FULL_BARRIERS + 8 * NUM_STAGES;
    static constexpr uint32_t DONE_BARRIER = EMPTY_BARRIERS + 8 * NUM_STAGES, BYTES = DONE_BARRIER + 8;
    static_assert(ABOVE % 16 == 0 && FULL_BARRIERS % 8 == 0, "vector loads, barriers");
    static_assert(BYTES + 1024 <= SHARED_LIMIT, "with room to align the start");
};

// What is loaded for an entry that does not exist.
__device__ uint4 const zeros[PAYLOAD / 16] = {};

// ---- device helpers

__device__ __forceinline__ uint2 load_global8(const void* from) {
    uint2 v;
    asm volatile("ld.global.nc.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from));
    return v;
}

#define FOUR(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SIXTEEN(d, i) FOUR(d, i), FOUR(d, i + 4), FOUR(d, i + 8), FOUR(d, i + 12)

// d (64, 64) = a (64, 16) b (64, 16)^T + (add ? d : 0). Of a, lane l of warp w gives rows 16 w + l / 4 (a0, a2) and 8
// on (a1, a3), columns 2 (l % 4) and one on (a0, a1) and 8 on (a2, a3).
__device__ __forceinline__ void wgmma(float (&d)[32], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b,
                                      bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}\n"
        : SIXTEEN(d, 0), SIXTEEN(d, 16)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(int(add)));
}

#undef SIXTEEN
#undef FOUR

// The block's queries into shared memory, zeros for heads that do not exist, by the threads of values. A lane that
// decodes has 16 dims in a row of each 64 (of the bf16 ones 8 and 8): step s of 16 takes its pairs 2 s and 2 s + 1, as
// columns 2 (l % 4) and 8 on. So pair w of lane q's dims is at chunk w, word q.
__device__ __forceinline__ void load_queries(const Problem& p, const Item& item, uint32_t to) {
    const __nv_bfloat16* const q = p.q + (int64_t(item.query) * p.heads + item.head) * HEAD_DIM;
    int const thread = threadIdx.x - NUM_PRODUCER_THREADS, from = thread % 8;  // a chunk of 8 dims
#pragma unroll 8
    for (int i = 0; i < BLOCK_M * HEAD_DIM / 8 / NUM_VALUE_THREADS; ++i) {
        int const at = thread + i * NUM_VALUE_THREADS, row = at / 8 % BLOCK_M, t = at / 8 / BLOCK_M;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (row < item.heads) v = load_global16(q + row * HEAD_DIM + t * 64 + from * 8);
        int const chunk = 4 * (t < FP8_TILES ? from % 2 : from / 4), word = t < FP8_TILES ? from / 2 : from % 4;
        uint32_t const pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int j = 0; j < 4; ++j)
            store_shared(to + t * Layout::TILE + row * 128 + ((chunk + j) ^ row % 8) * 16 + word * 4, pairs[j]);
    }
}

// ---- entries and scores: warpgroup 0

// A lane's part of an entry: 16 bytes of every 64, from 16 (lane % 4) on.
struct Raw {
    uint4 words[PAYLOAD / 64];
    uint2 scales;
};

template <bool SPLIT>
__device__ __forceinline__ void producer(const Problem& p, const Item& item, Lists const& lists, uint32_t smem) {
    using At = Layout;
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quarter = lane % 4;
    // Lists are nearly always full: their first indices are asked for together with the lengths, not after them.
    int2 const length = lengths(p, item.batch);
    int2 guess = make_int2(p.nw, p.nc);
    Span span{};
    int next[2];  // indices of this lane's two entries, rows 16 warp + lane / 4 and 8 on
    auto const position = [&](int tile, int r) { return (span.first + tile) * BLOCK_N + 16 * warp + 8 * r + row; };
    auto const look = [&](int tile) {
#pragma unroll
        for (int r = 0; r < 2; ++r) next[r] = lists.index(span, tile, position(tile, r));
    };
#pragma unroll 1
    while (true) {
        span = share<BLOCK_N, SPLIT>(guess.x, guess.y, item.split, p.splits);
        look(0);
        if (guess.x == length.x && guess.y == length.y) break;
        guess = length;
    }

    Raw raw[2];
    const uint8_t* payload[2];
    uint2 scales[2];  // of the tile that comes next
    bool live[2];
    auto const locate = [&](int tile) {  // what `next` names, and look for what follows
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const uint8_t* scale;
            lists.locate(next[r], position(tile, r) < span.window, payload[r], scale);
            if (next[r] < 0) payload[r] = scale = reinterpret_cast<const uint8_t*>(zeros);
            payload[r] += 16 * quarter;
            scales[r] = load_global8(scale);
        }
    };
    locate(0);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        raw[r].scales = scales[r], live[r] = next[r] >= 0;
#pragma unroll
        for (int j = 0; j < PAYLOAD / 64; ++j) raw[r].words[j] = load_global16(payload[r] + 64 * j);
    }
    look(1);

    float sum[16] = {};  // of p: this lane's rows of head 8 i + 2 quarter + e at 2 i + e
    uint32_t const my_tops = smem + At::TOPS + (warp * BLOCK_M + 2 * quarter) * 4;
    if (row == 0)
#pragma unroll
        for (int i = 0; i < 8; ++i)
            store_shared(my_tops + 32 * i, 0xFF800000), store_shared(my_tops + 32 * i + 4, 0xFF800000);  // -inf
    __syncwarp();
    uint64_t const query = make_smem_desc(smem + At::SMEM_Q);
    named_barrier_sync<NUM_THREADS>(1);  // queries are there
    fence_proxy_async_shared();

    PipelineState<NUM_STAGES> pipe;
#pragma unroll 1
    for (int tile = 0; tile < span.count; ++tile, pipe.advance()) {
        bool const next_live[2] = {next[0] >= 0, next[1] >= 0};
        locate(tile + 1);
        look(tile + 2);
        wait(smem + At::EMPTY_BARRIERS + 8 * pipe.index, pipe.phase ^ 1);
        uint32_t const values = smem + At::SMEM_V + pipe.index * (TILES * At::TILE) + (16 * warp + row) * 128;
        float s[32];
        uint32_t pairs[2][2][8];  // of every second sub-tile, of row r: factor A
        undefined(s);
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            if (t > 1) warpgroup_wait<1>();  // has read the pairs of t - 2
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                uint4 low = raw[r].words[t], high;
                raw[r].words[t] = load_global16(payload[r] + 64 * t);
                uint32_t const to = values + 8 * r * 128 + t * At::TILE;
                if (t < FP8_TILES) {
                    uint32_t const scale =
                        scale_pair((t < 4 ? raw[r].scales.x : raw[r].scales.y) >> 8 * (t % 4) & 0xFF);
                    uint4 const codes = low;
                    low = decode8(codes.x, codes.y, scale), high = decode8(codes.z, codes.w, scale);
                    uint32_t const chunk = (2 * quarter ^ row) * 16;
                    store_shared16(to + chunk, low), store_shared16(to + (chunk ^ 16), high);
                } else {
                    high = raw[r].words[t + 1];
                    raw[r].words[t + 1] = load_global16(payload[r] + 64 * (t + 1));
                    store_shared16(to + (quarter ^ row) * 16, low);
                    store_shared16(to + ((4 + quarter) ^ row) * 16, high);
                }
                uint32_t const eight[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
                for (int i = 0; i < 8; ++i) pairs[t % 2][r][i] = eight[i];
            }
            warpgroup_arrive();
#pragma unroll
            for (int k = 0; k < 4; ++k)
                wgmma(s, pairs[t % 2][0][2 * k], pairs[t % 2][1][2 * k], pairs[t % 2][0][2 * k + 1],
                      pairs[t % 2][1][2 * k + 1], query + t * (At::TILE / 16) + 2 * k, t + k > 0);
            warpgroup_commit_batch();
        }
        warpgroup_wait<0>();
        warpgroup_fence_operand(s);

        if (__any_sync(~0u, !live[0] || !live[1])) {
#pragma unroll
            for (int i = 0; i < 32; ++i)
                if (!live[i / 2 % 2]) s[i] = -INFINITY;
        }
        // Scores are in powers of two from here on. s[4 i + 2 r + e] is row r, head 8 i + 2 quarter + e.
        bool above = false;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float2 const top = load_shared_pair(my_tops + 32 * i);
            above |= fmaxf(s[4 * i], s[4 * i + 2]) * TO_LOG2 > top.x + RESCALE_THRESHOLD;
            above |= fmaxf(s[4 * i + 1], s[4 * i + 3]) * TO_LOG2 > top.y + RESCALE_THRESHOLD;
        }
        above = __any_sync(~0u, above);
        if (lane == 0) store_shared(smem + At::ABOVE + 16 * pipe.index + 4 * warp, above);
        named_barrier_sync<NUM_PRODUCER_THREADS>(2);
        uint4 const found = load_shared16(smem + At::ABOVE + 16 * pipe.index);
        bool const moved = found.x | found.y | found.z | found.w;
        if (moved) {  // for the first tile, and seldom again
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                float largest = fmaxf(s[i / 2 * 4 + i % 2], s[i / 2 * 4 + 2 + i % 2]);
#pragma unroll
                for (int lanes = 4; lanes < 32; lanes *= 2)
                    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
                uint32_t const head = 8 * (i / 2) + 2 * quarter + i % 2;
                if (row == 0) store_shared(smem + At::MAXIMA + (warp * BLOCK_M + head) * 4, __float_as_uint(largest));
            }
            named_barrier_sync<NUM_PRODUCER_THREADS>(2);
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                uint32_t const head = 8 * (i / 2) + 2 * quarter + i % 2, at = my_tops + 32 * (i / 2) + 4 * (i % 2);
                float largest = -INFINITY;
#pragma unroll
                for (int w = 0; w < 4; ++w)
                    largest = fmaxf(largest,
                                    __uint_as_float(load_shared(smem + At::MAXIMA + (w * BLOCK_M + head) * 4)));
                largest *= TO_LOG2;
                float const top = __uint_as_float(load_shared(at));
                bool const moves = largest > top + RESCALE_THRESHOLD;
                float const alpha = moves ? exp2_fast(top - largest) : 1.f;
                sum[i] *= alpha;
                __syncwarp();  // all have read it
                if (row == 0 && moves) store_shared(at, __float_as_uint(largest));
                if (row == 0 && warp == 0)
                    store_shared(smem + At::ALPHA + (pipe.index * BLOCK_M + head) * 4, __float_as_uint(alpha));
            }
            __syncwarp();
        }

        // Row 8 i + j of P is j of matrix i, transposed; lanes 0-7 and 16-23 name columns of this warp's upper entries.
        uint32_t const probs = smem + At::SMEM_P + pipe.index * At::P_TILE + (lane / 16 * 8 + lane % 8) * 128 +
                               ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16;
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            uint32_t made[4];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float2 top = load_shared_pair(my_tops + 32 * (i + j));
                top.x = top.x == -INFINITY ? 0.f : top.x, top.y = top.y == -INFINITY ? 0.f : top.y;
                float const* const from = s + 4 * (i + j);
                float const a = exp2_fast(fmaf(from[0], TO_LOG2, -top.x));
                float const b = exp2_fast(fmaf(from[1], TO_LOG2, -top.y));
                float const c = exp2_fast(fmaf(from[2], TO_LOG2, -top.x));
                float const d = exp2_fast(fmaf(from[3], TO_LOG2, -top.y));
                sum[2 * (i + j)] += a + c, sum[2 * (i + j) + 1] += b + d;
                made[2 * j] = pack_bf16x2(a, b), made[2 * j + 1] = pack_bf16x2(c, d);
            }
            stmatrix_x4_trans(probs + 8 * i * 128, made[0], made[1], made[2], made[3]);
        }
        if (threadIdx.x == 0) store_shared(smem + At::MOVED + 4 * pipe.index, moved && tile > 0);
        warp_arrive(smem + At::FULL_BARRIERS + 8 * pipe.index);
#pragma unroll
        for (int r = 0; r < 2; ++r) raw[r].scales = scales[r], live[r] = next_live[r];
    }

    named_barrier_sync<NUM_PRODUCER_THREADS>(2);  // maxima are read
#pragma unroll
    for (int i = 0; i < 16; ++i) {
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) sum[i] += __shfl_xor_sync(~0u, sum[i], lanes);
        uint32_t const head = 8 * (i / 2) + 2 * quarter + i % 2;
        if (row == 0) store_shared(smem + At::MAXIMA + (warp * BLOCK_M + head) * 4, __float_as_uint(sum[i]));
    }
    named_barrier_sync<NUM_PRODUCER_THREADS>(2);
    if (threadIdx.x < BLOCK_M) {
        int const h = threadIdx.x;
        float total = 0;
#pragma unroll
        for (int w = 0; w < 4; ++w)
            total += __uint_as_float(load_shared(smem + At::MAXIMA + (w * BLOCK_M + h) * 4));
        float const top = __uint_as_float(load_shared(smem + At::TOPS + (warp * BLOCK_M + h) * 4));
        bool const any = top > -INFINITY;  // then the largest p is at least 2^-RESCALE_THRESHOLD, and at least one is 1
        float const log2_sum = top + log2f(total);
        if (h < item.heads) {
            int const head = item.head + h;
            int64_t const at = int64_t(item.query) * p.heads + head;
            if (SPLIT) {
                p.stats[int64_t(item.split) * p.rows + at].x = any ? log2_sum : -INFINITY;
            } else {
                p.lse[at] = any ? log2_sum / LOG2E : INFINITY;
                total += exp2_fast(__ldg(p.sink + head) * LOG2E - top);  // infinite if it drowns all else
            }
        }
        store_shared(smem + At::FACTOR + 4 * h, __float_as_uint(any ? 1.f / total : 0.f));
    }
    arrive(smem + At::DONE_BARRIER);
}

// ---- values: warpgroups 1 and 2

template <bool SPLIT>
__device__ __forceinline__ void value_consumer(const Problem& p, const Item& item, uint32_t smem) {
    using At = Layout;
    int const half = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    load_queries(p, item, smem + At::SMEM_Q);
    fence_proxy_async_shared();
    named_barrier_arrive<NUM_THREADS>(1);
    float o[2][64];
    undefined(o[0]), undefined(o[1]);
    int2 const length = lengths(p, item.batch);
    int const count = share<BLOCK_N, SPLIT>(length.x, length.y, item.split, p.splits).count;
    PipelineState<NUM_STAGES> pipe;
#pragma unroll 1
    for (int tile = 0; tile < count; ++tile, pipe.advance()) {
        wait(smem + At::FULL_BARRIERS + 8 * pipe.index, pipe.phase);
        fence_proxy_async_shared();
        if (load_shared(smem + At::MOVED + 4 * pipe.index)) {
            uint32_t const at = smem + At::ALPHA + 4 * (BLOCK_M * pipe.index + 16 * warp + lane / 4);
            float const upper = __uint_as_float(load_shared(at)), lower = __uint_as_float(load_shared(at + 32));
#pragma unroll
            for (int i = 0; i < 128; ++i) o[i / 64][i % 64] *= i % 4 < 2 ? upper : lower;
        }
        uint64_t const probs = make_smem_desc(smem + At::SMEM_P + pipe.index * At::P_TILE);
        uint32_t const first = (TILES * pipe.index + TILES / 2 * half) * At::TILE;
        uint64_t const values = make_smem_desc(smem + At::SMEM_V + first, At::TILE);
        warpgroup_fence_operand(o[0]), warpgroup_fence_operand(o[1]);
        warpgroup_arrive();
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int k = 0; k < BLOCK_N / 16; ++k)
                wgmma_rows(o[h], probs + 2 * k, values + (k * (16 * 128) + 2 * h * At::TILE) / 16, tile + k > 0);
        warpgroup_commit_batch();
        warpgroup_wait<0>();
        warpgroup_fence_operand(o[0]), warpgroup_fence_operand(o[1]);
        warp_arrive(smem + At::EMPTY_BARRIERS + 8 * pipe.index);
    }
    wait(smem + At::DONE_BARRIER, 0);  // and so all scores are done: the queries' place is free
    if (count) write_result<SPLIT>(p, item, o, half, smem + At::SMEM_Q, smem + At::FACTOR);
}

// ---- kernel

// Grid (B S tiles, splits), as the other kernel has it.
template <bool SPLIT>
__global__ void __launch_bounds__(NUM_THREADS, 1) attend(const __grid_constant__ Problem p) {
    using At = Layout;
    extern __shared__ uint8_t dynamic[];
    uint32_t const smem = (smem_address(dynamic) + 1023) & ~1023u;
    Item const item(p);
    Lists const lists = {p.window, p.compressed, p.window_index + int64_t(item.query) * p.nw,
                         p.compressed_index + int64_t(item.query) * p.nc};
    if (SPLIT) programmatic::trigger();
    if (threadIdx.x == 0) {
        for (int i = 0; i < NUM_STAGES; ++i) {
            barrier_init(smem + At::FULL_BARRIERS + 8 * i, 4);   // warps that score
            barrier_init(smem + At::EMPTY_BARRIERS + 8 * i, 8);  // warps that add values
        }
        barrier_init(smem + At::DONE_BARRIER, NUM_PRODUCER_THREADS);
        barrier_publish();
    }
    __syncthreads();
    programmatic::wait();
    if (threadIdx.x < NUM_PRODUCER_THREADS) {
        warpgroup_reg_alloc<PRODUCER_REGISTERS>();
        producer<SPLIT>(p, item, lists, smem);
    } else {
        warpgroup_reg_dealloc<VALUE_REGISTERS>();
        value_consumer<SPLIT>(p, item, smem);
    }
}

// ---- launcher

template <bool SPLIT>
cudaError_t run(const Problem& p, bool early) {
    constexpr int SHARED = Layout::BYTES + 1024;
    auto const error = cudaFuncSetAttribute(attend<SPLIT>, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED);
    if (error != cudaSuccess) return error;
    dim3 const grid(p.rows / p.heads * p.tiles.by, p.splits.by);
    auto const started = programmatic::launch_early(attend<SPLIT>, grid, NUM_THREADS, SHARED, early, p);
    return !SPLIT || started != cudaSuccess ? started : join(p);
}

}  // namespace fmha::transposed
