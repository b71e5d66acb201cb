// fmha_decode with wgmma: warpgroups that gather and decode entries, score them, and sum values, side by side.
//
// A block of 640 threads has one query, 64 of its heads (rows of wgmma) and a share of its entries, tile by tile:
//   warpgroups 0 and 1  ask for entries, and decode BLOCK_N of them into a tile in shared memory as bf16
//                       (sm90_gather.cuh)
//   warpgroup 2         scores: S = Q K^T, softmax along the list with a running maximum, P as bf16 to shared memory
//   warpgroups 3 and 4  O += P V, dims 0 to 255 and 256 to 511, or what of these its slice has; V is the same tile as
//                       K, read by rows
// A tile has two parts with separate barriers, so that scores begin before all of it is decoded, and decoding of
// the tile after next before all of its values are added.
// The running maximum moves only if it grows by more than RESCALE_THRESHOLD, so O is hardly ever rescaled. Where blocks
// are few, a query's entries are split over several, and combine.cuh joins what these leave: a row in fp16 with a
// scale, and its denominator. Sums have a fixed order, so results repeat bit by bit.
//
// q, out  bf16 (B, S, H, 512)      lse  fp32 (B, S, H)      sink  fp32 (H,)
// caches  uint8 (pages, stride), lists  int32 (B, S, n), lengths  int32 (B,), as task.py describes them
#include "sm90_block.cuh"
#include "sm90_few_heads.cuh"  // launch_few_heads, for up to 16 heads
#include "sm90_products.cuh"

namespace fmha {

constexpr int NUM_THREADS = 640, NUM_PRODUCER_THREADS = 256;  // 128 that score come behind the producers
static_assert(PARTS == 2, "a part is half of what each warpgroup of values adds");

// Registers a thread of each warpgroup while it works.
constexpr int PRODUCER_REGISTERS = 48, SOFTMAX_REGISTERS = 64, VALUE_REGISTERS = 160, LAUNCH_REGISTERS = 96;
static_assert(2 * PRODUCER_REGISTERS + SOFTMAX_REGISTERS + 2 * VALUE_REGISTERS <= LAUNCH_REGISTERS * NUM_THREADS / 128);

// Shared memory in bytes from a multiple of 1024.
template <int BLOCK_N>
struct Layout {
    static constexpr uint32_t NUM_STAGES = Shape<BLOCK_N>::NUM_STAGES;
    static constexpr uint32_t Q_TILE = BLOCK_M * 128, TILE = BLOCK_N * 128;  // a sub-tile of 64 dims
    static constexpr uint32_t SMEM_Q = 0, SMEM_K = SMEM_Q + TILES * Q_TILE;
    static constexpr uint32_t SMEM_P = SMEM_K + NUM_STAGES * TILES * TILE, P_TILE = BLOCK_M * 128;
    static constexpr uint32_t SMEM_STAGING = SMEM_P + P_TILE;  // see Gathered
    // float [2][BLOCK_M]: factors of O
    static constexpr uint32_t ALPHA = SMEM_STAGING + NUM_STAGING_STAGES * Shape<BLOCK_N>::GROUPS * STAGED;
    static constexpr uint32_t FACTOR = ALPHA + 2 * BLOCK_M * 4;  // float [BLOCK_M]: 1 / denominator
    static constexpr uint32_t MASKS = FACTOR + BLOCK_M * 4;      // [4][8], see Gathered
    static constexpr uint32_t MOVED = MASKS + 32;  // int [2][4], of warps of rows: does any ALPHA differ from 1
    // Barriers, 8 bytes each: four kinds as Gathered has them, then P's.
    static constexpr uint32_t STAGING_FULL_BARRIERS = MOVED + 32,
                              STAGING_EMPTY_BARRIERS = STAGING_FULL_BARRIERS + 8 * NUM_STAGING_STAGES,
                              FULL_BARRIERS = STAGING_EMPTY_BARRIERS + 8 * NUM_STAGING_STAGES;
    static constexpr uint32_t EMPTY_BARRIERS = FULL_BARRIERS + 8 * NUM_STAGES * PARTS,
                              P_FULL_BARRIER = EMPTY_BARRIERS + 8 * NUM_STAGES * PARTS;
    static constexpr uint32_t P_EMPTY_BARRIER = P_FULL_BARRIER + 8, SCORED_BARRIER = P_EMPTY_BARRIER + 8,
                              DONE_BARRIER = SCORED_BARRIER + 8;
    static constexpr uint32_t BYTES = DONE_BARRIER + 8;
    static_assert(SMEM_K % 1024 == 0 && TILE % 1024 == 0 && SMEM_P % 1024 == 0, "a swizzle repeats every 1024 bytes");
    static_assert(MASKS % 16 == 0 && FULL_BARRIERS % 8 == 0, "vector loads, barriers");
    static_assert(BYTES + 1024 <= SHARED_LIMIT, "with room to align the start");
};

// ---- scores: warpgroup 2

template <int BLOCK_N, bool SPLIT>
__device__ __forceinline__ void softmax_consumer(const Problem& p, const Item& item, uint32_t smem) {
    using At = Layout<BLOCK_N>;
    load_queries(p, item, smem + At::SMEM_Q);
    int2 const length = lengths(p, item.batch);
    int const count = share<BLOCK_N, SPLIT>(length.x, length.y, item.split, p.splits).count;
    constexpr int COLUMNS = BLOCK_N / 4;  // of a row, a lane's
    PipelineState<At::NUM_STAGES> pipe;
    int const warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    // Row h of this lane is 16 warp + lane / 4 + 8 h. Scores are in powers of two from here on.
    float top[2] = {-INFINITY, -INFINITY};  // running maximum, up to RESCALE_THRESHOLD too small; -inf: no entry so far
    float sum[2] = {0, 0}, rounded[2] = {0, 0};  // of this lane's columns: of p, for lse; of p in bf16, which P V has
    uint64_t const query = make_smem_desc(smem + At::SMEM_Q);
    // Of the four matrices of a store: lanes 0-15 rows 0-15 of the left 8 columns, lanes 16-31 of the right ones.
    int const matrix_row = 16 * warp + lane % 16;
    cp_async_wait_all();
    fence_proxy_async_shared();
    named_barrier_sync<128>(2);

#pragma unroll 1
    for (int tile = 0; tile < count; ++tile, pipe.advance()) {
        uint32_t const parity = tile & 1, other = tile & 1;  // of P; which place of ALPHA
        uint64_t const key = make_smem_desc(smem + At::SMEM_K + pipe.index * (TILES * At::TILE));
        float s[BLOCK_N / 2];
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            int const t = i / 2 % 2 * 4 + i / 4 * 2 + i % 2;  // 0 1 4 5 2 3 6 7
            if (i % (TILES / PARTS) == 0) {
                wait(smem + At::FULL_BARRIERS + 8 * (PARTS * pipe.index + i / (TILES / PARTS)), pipe.phase);
                fence_proxy_async_shared();  // for the writers, who would wait for what they have asked for since
                warpgroup_arrive();
            }
#pragma unroll
            for (int k = 0; k < 4; ++k)  // 16 dims, 32 bytes
                wgmma(s, query + t * (At::Q_TILE / 16) + 2 * k, key + t * (At::TILE / 16) + 2 * k, i + k > 0);
        }
        warpgroup_commit_batch();
        uint2 const masks = load_shared8(smem + At::MASKS + 8 * (tile & 3));
        warpgroup_wait<0>();
        warpgroup_fence_operand(s);
        warp_arrive(smem + At::SCORED_BARRIER);

        // Column 8 i + j of the tile is row j of group i.
        constexpr uint32_t SECOND = BLOCK_N == 48 ? 0xFFFF : 0;
        if (masks.x != ~0u || (masks.y & SECOND) != SECOND) {
#pragma unroll
            for (int i = 0; i < BLOCK_N / 8; ++i) {
                uint32_t const mask = (i < 4 ? masks.x : masks.y) >> (8 * (i % 4) + 2 * (lane % 4));
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (!(mask >> e & 1)) s[4 * i + e] = s[4 * i + 2 + e] = -INFINITY;
            }
        }

        float largest[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            largest[h] = s[2 * h];
#pragma unroll
            for (int i = 0; i < BLOCK_N / 8; ++i)
                largest[h] = fmaxf(largest[h], fmaxf(s[4 * i + 2 * h], s[4 * i + 2 * h + 1]));
            largest[h] *= TO_LOG2;
        }
        bool moved =
            __any_sync(~0u, largest[0] > top[0] + RESCALE_THRESHOLD || largest[1] > top[1] + RESCALE_THRESHOLD);
        if (moved) {  // a warp does so for its first tile, and seldom again
            float alpha[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                largest[h] = fmaxf(largest[h], __shfl_xor_sync(~0u, largest[h], 1));
                largest[h] = fmaxf(largest[h], __shfl_xor_sync(~0u, largest[h], 2));
                bool const moves = largest[h] > top[h] + RESCALE_THRESHOLD;
                alpha[h] = moves ? exp2_fast(top[h] - largest[h]) : 1.f;
                top[h] = moves ? largest[h] : top[h];
                sum[h] *= alpha[h], rounded[h] *= alpha[h];
            }
            moved = tile > 0;  // O of the first tile is 0, whatever its factor
            // Lane 0, which arrives at the barrier, writes for all.
#pragma unroll 1
            for (int i = 0; i < 16 && moved; ++i) {
                float const factor = __shfl_sync(~0u, i < 8 ? alpha[0] : alpha[1], i % 8 * 4);
                uint32_t const to = smem + At::ALPHA + 4 * (BLOCK_M * other + 16 * warp + i);
                if (lane == 0) store_shared(to, __float_as_uint(factor));
            }
        }
        uint32_t pairs[2][COLUMNS / 2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float const zero = top[h] == -INFINITY ? 0.f : top[h];
            float exact = 0, as_bf16 = 0;
#pragma unroll
            for (int i = 0; i < BLOCK_N / 8; ++i) {
                float const a = exp2_fast(fmaf(s[4 * i + 2 * h], TO_LOG2, -zero));
                float const b = exp2_fast(fmaf(s[4 * i + 2 * h + 1], TO_LOG2, -zero));
                uint32_t const pair = pairs[h][i] = pack_bf16x2(a, b);
                exact += a + b;
                as_bf16 += __uint_as_float(pair << 16) + __uint_as_float(pair & 0xFFFF0000);
            }
            sum[h] += exact, rounded[h] += as_bf16;
        }

        wait(smem + At::P_EMPTY_BARRIER, parity ^ 1);
        uint32_t const probs = smem + At::SMEM_P;
#pragma unroll
        for (int i = 0; i < BLOCK_N / 8; i += 2)
            stmatrix_x4(probs + matrix_row * 128 + ((i + lane / 16) ^ matrix_row % 8) * 16, pairs[0][i], pairs[1][i],
                           pairs[0][i + 1], pairs[1][i + 1]);
        if (lane == 0) store_shared(smem + At::MOVED + 16 * other + 4 * warp, uint32_t(moved));
        warp_arrive(smem + At::P_FULL_BARRIER);
    }

#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int lanes = 1; lanes < 4; lanes *= 2) {
            sum[h] += __shfl_xor_sync(~0u, sum[h], lanes);
            rounded[h] += __shfl_xor_sync(~0u, rounded[h], lanes);
        }
        int const row = 16 * warp + lane / 4 + 8 * h;
        bool const any =
            top[h] > -INFINITY;  // then the largest p is at least 2^-RESCALE_THRESHOLD, and at least one is 1
        float const log2_sum = top[h] + log2f(sum[h]);
        float denominator = rounded[h];
        if (lane % 4 == 0 && row < item.heads) {
            int const head = item.head + row;
            int64_t const at = int64_t(item.query) * p.heads + head;
            if (SPLIT) {
                if (item.slice == 0) p.stats[int64_t(item.split) * p.rows + at].x = any ? log2_sum : -INFINITY;
            } else {
                p.lse[at] = any ? log2_sum / LOG2E : INFINITY;
                denominator += exp2_fast(__ldg(p.sink + head) * LOG2E - top[h]);  // infinite if it drowns all else
            }
        }
        if (lane % 4 == 0) store_shared(smem + At::FACTOR + 4 * row, __float_as_uint(any ? 1.f / denominator : 0.f));
    }
    arrive(smem + At::DONE_BARRIER);
}

// ---- values: warpgroups 3 and 4

// O += P V over the block's tiles, of this warpgroup's half of the dims, or with one chunk of its quarter.
template <int BLOCK_N, int CHUNKS>
__device__ __forceinline__ void add_tiles(float (&o)[CHUNKS][64], int half, int group, int count, uint32_t smem) {
    using At = Layout<BLOCK_N>;
    int const warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    PipelineState<At::NUM_STAGES> pipe;
#pragma unroll 1
    for (int tile = 0; tile < count; ++tile, pipe.advance()) {
        uint32_t const parity = tile & 1, other = tile & 1;  // of P; which place of ALPHA
        wait(smem + At::P_FULL_BARRIER, parity);
        fence_proxy_async_shared();
        if (load_shared(smem + At::MOVED + 16 * other + 4 * warp)) {
            uint32_t const at = smem + At::ALPHA + 4 * (BLOCK_M * other + 16 * warp + lane / 4);
            float const upper = __uint_as_float(load_shared(at)), lower = __uint_as_float(load_shared(at + 32));
#pragma unroll
            for (int i = 0; i < 64 * CHUNKS; ++i) o[i / 64][i % 64] *= i % 4 < 2 ? upper : lower;
        }
        uint64_t const probs = make_smem_desc(smem + At::SMEM_P);
        uint32_t const first = (TILES * pipe.index + TILES / 2 * half + (CHUNKS == 1 ? 2 * group : 0)) * At::TILE;
        uint64_t const values = make_smem_desc(smem + At::SMEM_K + first, At::TILE);
        for (auto& chunk : o) warpgroup_fence_operand(chunk);
#pragma unroll
        for (int h = 0; h < CHUNKS; ++h) {
            // The second half lets the next tile's scores go first: it is added while those are made to P. Not so with
            // one stage, where these scores wait for the place that this half frees.
            if (At::NUM_STAGES > 1 && h == 1 && tile + 1 < count) wait(smem + At::SCORED_BARRIER, tile + 1 & 1);
            warpgroup_arrive();
#pragma unroll
            for (int k = 0; k < BLOCK_N / 16; ++k)
                wgmma_rows(o[h], probs + 2 * k, values + (k * (16 * 128) + 2 * h * At::TILE) / 16, tile + k > 0);
            warpgroup_commit_batch();
            if (h + 1 < CHUNKS) {
                warpgroup_wait<0>();
                warp_arrive(smem + At::EMPTY_BARRIERS + 8 * (PARTS * pipe.index));
            }
        }
        warpgroup_wait<0>();
        for (auto& chunk : o) warpgroup_fence_operand(chunk);
        warp_arrive(smem + At::EMPTY_BARRIERS + 8 * (PARTS * pipe.index + (CHUNKS == 1 ? group : 1)));
        warp_arrive(smem + At::P_EMPTY_BARRIER);
    }
}

template <int BLOCK_N, bool SPLIT, int CHUNKS>
__device__ __forceinline__ void value_consumer(const Problem& p, const Item& item, uint32_t smem) {
    using At = Layout<BLOCK_N>;
    int const group = threadIdx.x / 128 - 3, half = CHUNKS == 2 ? group : item.slice / (gridDim.z / 2);
    float o[CHUNKS][64];  // 128 dims each: wgmma may name no more registers than a thread has at the launch
    for (auto& chunk : o) undefined(chunk);
    named_barrier_sync<NUM_THREADS>(1);
    int2 const length = lengths(p, item.batch);
    int const count = share<BLOCK_N, SPLIT>(length.x, length.y, item.split, p.splits).count;
    add_tiles<BLOCK_N>(o, half, group, count, smem);
    wait(smem + At::DONE_BARRIER, 0);  // and so all scores are done: the queries' place is free
    if (count) write_result<SPLIT>(p, item, o, half, group, smem + At::SMEM_Q, smem + At::FACTOR);
}

// ---- kernel

// Grid (B S tiles, splits, slices). The tiles of a query lie side by side: they read the same entries.
// With one chunk a block has a slice of the dims, a half or a quarter. All make the same scores. Each warpgroup of
// values adds 128 dims of a half, of which one stores none if slices are quarters: a half has one scale in any case.
template <int BLOCK_N, bool SPLIT, int CHUNKS>
__global__ void __launch_bounds__(NUM_THREADS, 1) attend(const __grid_constant__ Problem p) {
    using At = Layout<BLOCK_N>;
    extern __shared__ uint8_t dynamic[];
    uint32_t const smem = (smem_address(dynamic) + 1023) & ~1023u;
    Item const item(p);
    Lists const lists = {p.window, p.compressed, p.window_index + int64_t(item.query) * p.nw,
                         p.compressed_index + int64_t(item.query) * p.nc};
    if (SPLIT) programmatic::trigger();
    programmatic::wait();

    // Barrier 1: the mbarriers exist; barrier 2 is the scores' own, 3 that of both warpgroups of values.
    if (threadIdx.x < NUM_PRODUCER_THREADS) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        int const warp = __shfl_sync(~0u, threadIdx.x / 32, 0), group = warp - Shape<BLOCK_N>::LOAD_WARPS;
        Producer<BLOCK_N, SPLIT> const producer = {
            {smem + At::SMEM_K, smem + At::SMEM_STAGING, smem + At::MASKS, smem + At::STAGING_FULL_BARRIERS,
             smem + At::STAGING_EMPTY_BARRIERS, smem + At::FULL_BARRIERS, smem + At::EMPTY_BARRIERS},
            int(threadIdx.x % 32)};
        auto const begin = [] { named_barrier_sync<NUM_THREADS>(1); };
        auto const length = [&] { return lengths(p, item.batch); };
        if (group < 0) {
            producer.load(lists, length, p.nw, p.nc, item.split, p.splits, warp, begin);
        } else {
            begin();
            if (group >= Shape<BLOCK_N>::GROUPS) return;
            int2 const n = length();
            producer.decode(share<BLOCK_N, SPLIT>(n.x, n.y, item.split, p.splits).count, group);
        }
        return;
    }
    if (threadIdx.x < NUM_PRODUCER_THREADS + 128) {
        if (threadIdx.x == NUM_PRODUCER_THREADS) {
            for (int i = 0; i < PARTS * At::NUM_STAGES; ++i) {
                barrier_init(smem + At::FULL_BARRIERS + 8 * i, Shape<BLOCK_N>::GROUPS);  // warps that decode
                barrier_init(smem + At::EMPTY_BARRIERS + 8 * i, 4 * CHUNKS);  // warps that add its values
            }
            for (int i = 0; i < NUM_STAGING_STAGES; ++i) {
                barrier_init(smem + At::STAGING_FULL_BARRIERS + 8 * i,
                             Shape<BLOCK_N>::LOAD_WARPS * 33);  // threads, and once a warp
                barrier_init(smem + At::STAGING_EMPTY_BARRIERS + 8 * i, Shape<BLOCK_N>::GROUPS);
            }
            barrier_init(smem + At::P_FULL_BARRIER, 4);   // warps that score
            barrier_init(smem + At::SCORED_BARRIER, 4);
            barrier_init(smem + At::P_EMPTY_BARRIER, 8);  // warps that add values
            barrier_init(smem + At::DONE_BARRIER, 128);  // threads that score
            barrier_publish();
        }
        named_barrier_arrive<NUM_THREADS>(1);
        warpgroup_reg_dealloc<SOFTMAX_REGISTERS>();
        softmax_consumer<BLOCK_N, SPLIT>(p, item, smem);
    } else {
        warpgroup_reg_alloc<VALUE_REGISTERS>();
        value_consumer<BLOCK_N, SPLIT, CHUNKS>(p, item, smem);
    }
}

// ---- launcher

template <int BLOCK_N, bool SPLIT, int CHUNKS = 2>
cudaError_t run(const Problem& p, bool early, int slices = 1) {
    constexpr int SHARED = Layout<BLOCK_N>::BYTES + 1024;
    auto const kernel = attend<BLOCK_N, SPLIT, CHUNKS>;
    auto const error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED);
    if (error != cudaSuccess) return error;
    dim3 const grid(p.rows / p.heads * p.tiles.by, p.splits.by, slices);
    auto const started = programmatic::launch_early(kernel, grid, NUM_THREADS, SHARED, early, p);
    if (!SPLIT || started != cudaSuccess) return started;
    return join(p);
}

}  // namespace fmha

// Device pointers; page_*: log2 of the entries of a page, stride_*: its bytes; entries: of a tile, 48 or 32.
// Splits: up to 128, which are 32 for each of combine's four groups; above 1 partial is fp16 (splits, B S H, 512),
// stats fp32 (splits, B S H, 4), of any content; cosine, sine: as Turn has them; alike: whether sums are added in an
// order that empty splits at the end do not change; early: whether the first kernel may begin before the kernel ahead
// has ended; slices: 1, or above one split 2 or 4, blocks that share the dims of an item, with the same bits. -> a
// cudaError_t.
extern "C" int launch(const void* q, const uint8_t* window, const int* window_index, const int* window_length,
                      const uint8_t* compressed, const int* compressed_index, const int* compressed_length,
                      const float* sink, void* out, float* lse, const float* cosine, const float* sine, void* partial,
                      void* stats, int batch, int queries, int heads, int nw, int nc, int page_window,
                      int stride_window, int page_compressed, int stride_compressed, int splits, int entries,
                      int slices, int alike, int early) {
    fmha::Problem const p = {
        static_cast<const __nv_bfloat16*>(q),
        {window, uint32_t(stride_window), uint32_t(page_window)},
        {compressed, uint32_t(stride_compressed), uint32_t(page_compressed)},
        window_index, window_length, compressed_index, compressed_length, sink, {cosine, sine},
        static_cast<__nv_bfloat16*>(out), lse, static_cast<__half*>(partial), static_cast<float4*>(stats),
        batch * queries * heads, heads, nw, nc, fmha::Divisor(queries),
        fmha::Divisor((heads + fmha::BLOCK_M - 1) / fmha::BLOCK_M), fmha::Divisor(splits), alike != 0,
    };
    if (splits == 1) return fmha::run<48, false>(p, early);
    if (slices == 2 || slices == 4)
        return entries == 32 ? fmha::run<32, true, 1>(p, early, slices) : fmha::run<48, true, 1>(p, early, slices);
    if (slices != 1) return int(cudaErrorInvalidValue);
    return entries == 32 ? fmha::run<32, true>(p, early) : fmha::run<48, true>(p, early);
}
