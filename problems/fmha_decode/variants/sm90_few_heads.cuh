// fmha_decode for few heads, such as tensor parallelism leaves: mma.sync with 16 heads as rows, nothing padded to 64.
//
// A block of WARPS warps has a query, 16 of its heads and a share of its entries; a cluster of blocks has all of them.
// Two warps share a group of 16 entries: the first has dims 0 to 255 of them, the second the others. A tile is a group
// for every two warps. Each warp
//   loads    its half of the group's bytes into registers as soon as those of the tile before are decoded; a lane just
//            the bytes that it decodes itself
//   decodes  them to bf16 in registers, where they are at once the B fragments of S = Q K^T (dims are permuted, and so
//            are those of Q, whose A fragments are in shared memory), and stores them to shared memory as values
//   scores   the group for all heads over its 256 dims, adds what the other warp has over the other ones, each of 8
//            entries, and leaves their maximum
//   waits    for the block, makes P of its 8 entries, leaves it as A fragments, and waits for the block again
//   sums     O += P V of its 512 / WARPS dims, over all entries of the tile
// The running maximum moves only if it grows by more than RESCALE_THRESHOLD. In the end each block of the cluster gets
// the sums of all others for a part of the outputs, as fp16 with a scale, and joins them. Sums have a fixed order, so
// results repeat bit by bit.
//
// q, out  bf16 (B, S, H, 512)      lse  fp32 (B, S, H)      sink  fp32 (H,)
// caches  uint8 (pages, stride), lists  int32 (B, S, n), lengths  int32 (B,), as task.py describes them
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "launch_clusters.cuh"
#include "ptx.cuh"
#include "sm90_gather.cuh"

namespace fmha::few {

constexpr int BLOCK_M = 16;  // heads of a block
constexpr int WARPS = 16;    // or 8: two blocks a multiprocessor, with tiles of half as many entries
constexpr int NUM_THREADS = 32 * WARPS;
constexpr int BLOCKS_PER_MULTIPROCESSOR = 16 / WARPS;
constexpr int ENTRIES = 8;                // whose scores a warp finishes, of a tile
constexpr int BLOCK_N = ENTRIES * WARPS;  // entries of a tile
constexpr int GROUP = 2 * ENTRIES;        // entries of two warps
constexpr int DIMS = HEAD_DIM / WARPS;    // of values, a warp's
constexpr int MOST_BLOCKS = 16;           // of a cluster; more than 8 are not portable
constexpr int UNITS = BLOCK_M * HEAD_DIM / 8;  // of 8 dims, 16 bytes of fp16: a block's sums
constexpr int FRAGMENT = 32 * 16;              // bytes of an A fragment of 16 columns, 16 of a lane
constexpr float LOG2E = 1.4426950408889634f;
constexpr float TO_LOG2 = 0.04419417382415922f * LOG2E;  // 512^-0.5, for scores in powers of two
// P may reach 2^8: sums stay far inside fp32, and bf16 is as fine there as below 1.
constexpr float RESCALE_THRESHOLD = 8.f;
static_assert(WARPS == 8 || WARPS == 16);

struct Problem {
    const __nv_bfloat16* q;
    Cache window, compressed;
    const int *window_index, *window_length, *compressed_index, *compressed_length;
    const float* sink;
    Turn turn;
    __nv_bfloat16* out;
    float* lse;
    int heads, nw, nc;
    Divisor queries, tiles, blocks;  // S; tiles of BLOCK_M heads; blocks of a cluster
    Divisor step;                    // entries of a tile: a multiple of GROUP, up to BLOCK_N, alike in all blocks
};

// Shared memory in bytes from a multiple of 128.
struct Layout {
    static constexpr uint32_t TILE = BLOCK_N * 128, VALUES = TILES * TILE;  // a sub-tile of 64 dims; all of them
    static constexpr uint32_t SMEM_VALUES = 0;
    static constexpr uint32_t SMEM_P = SMEM_VALUES + VALUES;  // A fragments, one a group
    static constexpr uint32_t SMEM_MAXIMA = SMEM_P + WARPS / 2 * FRAGMENT;          // float [BLOCK_M][WARPS]: of a tile
    static constexpr uint32_t SMEM_TOTALS = SMEM_MAXIMA + BLOCK_M * WARPS * 4;      // float2 [WARPS][BLOCK_M], see Left
    static constexpr uint32_t SMEM_SINKS = SMEM_TOTALS + WARPS * BLOCK_M * 8;  // float [BLOCK_M]
    static constexpr uint32_t RECEIVED_BARRIER = SMEM_SINKS + BLOCK_M * 4, FREE_BARRIER = RECEIVED_BARRIER + 8;
    static constexpr uint32_t REUSED = (FREE_BARRIER + 8 + 127) / 128 * 128;
    static constexpr uint32_t SMEM_Q = REUSED;  // A fragments, of steps of 16 dims
    static constexpr uint32_t SMEM_PARTIAL = SMEM_Q + HEAD_DIM / 16 * FRAGMENT;  // [WARPS][32] of 16 bytes
    static constexpr uint32_t SCORING_END = SMEM_PARTIAL + WARPS * 32 * 16;
    // In the end: the block's sums where values were, and what other blocks send where queries were.
    static constexpr uint32_t SUM_ROW = (HEAD_DIM + 8) * 2;  // of a head: fp16; 8 more, so that 8 rows take 32 banks
    static constexpr uint32_t SMEM_SUMS = SMEM_VALUES, SMEM_RECEIVED = REUSED;  // see Pieces
    // [MOST_BLOCKS][BLOCK_M] of 16 bytes: running maximum, sum of p, sum of p in bf16, nothing
    static constexpr uint32_t SMEM_STATS = SMEM_RECEIVED + (UNITS + MOST_BLOCKS) * 16;
    // float [MOST_BLOCKS][WARPS][BLOCK_M]
    static constexpr uint32_t SMEM_SCALES = SMEM_STATS + MOST_BLOCKS * BLOCK_M * 16;
    // float [BLOCK_M][MOST_BLOCKS]
    static constexpr uint32_t SMEM_WEIGHTS = SMEM_SCALES + MOST_BLOCKS * WARPS * BLOCK_M * 4;
    static constexpr uint32_t JOINING_END = SMEM_WEIGHTS + BLOCK_M * MOST_BLOCKS * 4;
    static constexpr uint32_t BYTES = SCORING_END > JOINING_END ? SCORING_END : JOINING_END;
    static_assert(BLOCK_M * SUM_ROW <= VALUES && SUM_ROW % 16 == 0 && RECEIVED_BARRIER % 8 == 0);
};
constexpr int SHARED = Layout::BYTES + 128;  // with room to align the start
static_assert(BLOCKS_PER_MULTIPROCESSOR * (SHARED + 1024) <= 228 * 1024, "of a multiprocessor; 1024 of each are taken");

// What a block works on.
struct Item {
    int query, head, heads, batch, rank;  // query: of B S; heads: of the block that exist, from `head` on
    __device__ __forceinline__ explicit Item(const Problem& p) : rank(cluster_rank()) {
        int const cluster = p.blocks(blockIdx.x);
        query = p.tiles(cluster), head = (cluster - query * p.tiles.by) * BLOCK_M;
        heads = min(BLOCK_M, p.heads - head), batch = p.queries(query);
    }
};

// The list positions that a block walks: from `first` to `last`, of which those below `window` are the window's.
struct Share {
    int window, first, last, step, count;  // step: entries of a tile; count: tiles
    __device__ __forceinline__ Share(const Problem& p, int window, int compressed, int rank)
        : window(window), step(p.step.by) {
        int const total = window + compressed, groups = (total + ENTRIES - 1) / ENTRIES;
        first = p.blocks(groups * rank) * ENTRIES, last = min(int(p.blocks(groups * (rank + 1))) * ENTRIES, total);
        count = p.step(max(last - first, 0) + step - 1);
    }
};

// ---- device helpers

__device__ __forceinline__ uint32_t load_global4(const void* from) {
    uint32_t v;
    asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(v) : "l"(from));
    return v;
}
// Without a branch, behind which the compiler would copy what was loaded, and wait for it.
__device__ __forceinline__ void load_global16_if(uint4& v, const void* from, bool really) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];\n}\n"
                 : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
                 : "l"(from), "r"(int(really)));
}
// d (16, 8) += a (16, 16) b (8, 16)^T. Lane l holds of d rows l / 4 and 8 on, columns 2 (l % 4) and one on.
__device__ __forceinline__ void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Four 8x8 matrices of 16-bit values, each transposed; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ uint4 ldmatrix_x4_trans(uint32_t from) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from)
                 : "memory");
    return v;
}
__device__ __forceinline__ void store_shared_if(uint32_t to, uint32_t v, bool really) {  // without a branch
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p st.shared.b32 [%0], %1;\n}\n" ::"r"(to), "r"(v),
                 "r"(int(really))
                 : "memory");
}
__device__ __forceinline__ void store_shared8(uint32_t to, uint32_t a, uint32_t b) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(a), "r"(b) : "memory");
}
// To another block's shared memory, at an address from in_block; its barrier counts the bytes. So no fence is needed,
// which would wait for all that the warp has under way, up to global memory.
__device__ __forceinline__ void send(uint32_t to, uint32_t v, uint32_t barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to), "r"(v),
                 "r"(barrier)
                 : "memory");
}
__device__ __forceinline__ void send16(uint32_t to, uint4 v, uint32_t barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
        "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier)
        : "memory");
}
// As arrive, at another block's barrier. For who wrote nothing that the other block reads: a release to the whole
// cluster would wait like a fence.
__device__ __forceinline__ void arrive_at(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// The two halves of a barrier of the cluster, behind barrier_publish.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ float4 load_stats(uint32_t from) {
    uint4 const v = load_shared16(from);
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), 0);
}

// ---- queries

// The block's queries come as they are to a place where values will be, and go from there to shared memory as A
// fragments, FRAGMENT bytes for each step of 16 dims. Of a sub-tile's 64 dims a lane has the 16 that it decodes of an
// entry: from 16 (lane % 4) on, and in the sub-tile of bf16 8 from 8 (lane % 4) and 8 from 32 later on. It takes four of
// them in each step, of row lane / 4 and of the one 8 below.
struct Queries {
    static constexpr int HALVES = 16 / WARPS;  // of rows, that a warp brings: 32 units of 8 dims, a lane one
    uint32_t brought;                          // this thread's units: of row warp % 8 and of the one 8 below

    __device__ __forceinline__ void ask(const Problem& p, const Item& item, int warp, uint32_t smem) {
        brought = smem + Layout::SMEM_VALUES + threadIdx.x * 16;
        const __nv_bfloat16* const q = p.q + (int64_t(item.query) * p.heads + item.head) * HEAD_DIM;
#pragma unroll
        for (int i = 0; i < 2 * HALVES; ++i) {
            int const row = warp % 8 + 8 * (i % 2), unit = (warp / 8 + i / 2) * 32 + threadIdx.x % 32;
            bool const exists = row < item.heads;
            cp_async16(brought + i * (NUM_THREADS * 16), q + (exists ? row : 0) * HEAD_DIM + unit * 8, exists);
        }
    }
    // The block's barrier must follow.
    __device__ __forceinline__ void arrange(int warp, uint32_t smem) const {
        cp_async_wait_all();
#pragma unroll
        for (int i = 0; i < HALVES; ++i) {
            int const unit = (warp / 8 + i) * 32 + threadIdx.x % 32, t = unit / 8, u = unit % 8;
            int const quarter = t < FP8_TILES ? u / 2 : u % 4, step = 4 * t + 2 * (t < FP8_TILES ? u % 2 : u / 4);
            uint32_t const to = smem + Layout::SMEM_Q + step * FRAGMENT + (warp % 8 * 4 + quarter) * 16;
            uint4 const a = load_shared16(brought + 2 * i * (NUM_THREADS * 16));
            uint4 const b = load_shared16(brought + (2 * i + 1) * (NUM_THREADS * 16));
            store_shared16(to, make_uint4(a.x, b.x, a.y, b.y));
            store_shared16(to + FRAGMENT, make_uint4(a.z, b.z, a.w, b.w));
        }
    }
};

// ---- entries

// A warp's half of its group: of sub-tiles 0 to 3, or of 4 to 7. A lane has of row lane / 4 and of the one 8 below
// 16 bytes of every 64, from 16 (lane % 4) on.
struct Raw {
    uint4 words[2][5];  // the last only in the second half, whose last sub-tile is bf16
    uint32_t scales[2];
    uint32_t live;  // bit i: of the 8 entries whose scores this warp finishes, i is one
};

struct Gather {
    Lists const& lists;
    Share share;
    int group, half;  // the warp's
    int next;         // of the group in the first tile that is not asked for yet, the index of entry lane % 16

    __device__ __forceinline__ int position(int tile) const {
        return share.first + tile * share.step + group * GROUP;
    }
    __device__ __forceinline__ void look(int tile) {
        int const at = position(tile) + threadIdx.x % GROUP;
        next = load_if(at < share.window ? lists.window_index + at : lists.compressed_index + (at - share.window),
                       at < share.last, -1);
    }
    // Whether the group has a place in the list.
    __device__ __forceinline__ bool any(int tile) const { return group * GROUP < share.step && position(tile) < share.last; }
    __device__ __forceinline__ void ask(int tile, Raw& raw) {
        int const row = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4;
        int const index[2] = {__shfl_sync(~0u, next, row), __shfl_sync(~0u, next, 8 + row)};
        raw.live = __ballot_sync(~0u, next >= 0) >> 8 * half;
        if (any(tile)) {
#pragma unroll
            for (int g = 0; g < 2; ++g) {
                const uint8_t *payload, *scale;
                lists.locate(index[g], position(tile) + 8 * g + row < share.window, payload, scale);
                if (index[g] < 0) payload = scale = reinterpret_cast<const uint8_t*>(zeros);
                payload += 256 * half + 16 * quarter;
                raw.scales[g] = load_global4(scale + 4 * half);
#pragma unroll
                for (int j = 0; j < 4; ++j) raw.words[g][j] = load_global16(payload + 64 * j);
                load_global16_if(raw.words[g][4], payload + 256, half);
            }
        }
        look(tile + 1);
    }
};

// ---- scores

// Decode the warp's half of its group to shared memory, and score it. Of the 8 entries that the warp finishes (the first
// warp the upper ones of the group) -> own; of the other 8, to shared memory, for the other warp.
__device__ __forceinline__ void score(const Gather& gather, const Raw& raw, uint32_t smem, float (&own)[4]) {
    int const lane = threadIdx.x % 32, row = lane / 4, quarter = lane % 4, half = gather.half;
    uint32_t const to = smem + Layout::SMEM_VALUES + 4 * half * Layout::TILE + (gather.group * GROUP + row) * 128;
    uint32_t const queries = smem + Layout::SMEM_Q + 16 * half * FRAGMENT + lane * 16;
    uint32_t left = to + (2 * quarter ^ row) * 16, right = left ^ 16;
    float sums[2][4] = {};
#pragma unroll
    for (int t = 0; t < 4; ++t) {
        if (t == 3 && half) left = to + (quarter ^ row) * 16, right = left ^ 64;
        uint4 q[4];  // ahead of stores, which they would wait for
#pragma unroll
        for (int i = 0; i < 4; ++i) q[i] = load_shared16(queries + (4 * t + i) * FRAGMENT);
#pragma unroll
        for (int g = 0; g < 2; ++g) {
            uint4 low, high;
            if (t < 3 || !half) {
                uint32_t const scale = scale_pair(raw.scales[g] >> 8 * t & 0xFF);
                low = decode8(raw.words[g][t].x, raw.words[g][t].y, scale);
                high = decode8(raw.words[g][t].z, raw.words[g][t].w, scale);
            } else {
                low = raw.words[g][3], high = raw.words[g][4];
            }
            uint32_t const k[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) mma(sums[g], q[i].x, q[i].y, q[i].z, q[i].w, k[2 * i], k[2 * i + 1]);
            store_shared16(left + t * Layout::TILE + g * (8 * 128), low);
            store_shared16(right + t * Layout::TILE + g * (8 * 128), high);
        }
    }
    float other[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) own[i] = half ? sums[1][i] : sums[0][i], other[i] = half ? sums[0][i] : sums[1][i];
    store_shared16(smem + Layout::SMEM_PARTIAL + (2 * gather.group + half) * (32 * 16) + lane * 16,
                   make_uint4(__float_as_uint(other[0]), __float_as_uint(other[1]), __float_as_uint(other[2]),
                              __float_as_uint(other[3])));
}

// Over all dims, with what the other warp has: of rows lane / 4 (s[0], s[1]) and 8 below, entries 2 (lane % 4) and one
// on; -inf of those that are none.
__device__ __forceinline__ void finish(const Gather& gather, uint32_t live, uint32_t smem, float (&s)[4]) {
    int const lane = threadIdx.x % 32, quarter = lane % 4;
    named_barrier_sync<64>(1 + gather.group);
    uint4 const more =
        load_shared16(smem + Layout::SMEM_PARTIAL + (2 * gather.group + 1 - gather.half) * (32 * 16) + lane * 16);
    bool const first = live >> 2 * quarter & 1, second = live >> (2 * quarter + 1) & 1;
    s[0] = first ? s[0] + __uint_as_float(more.x) : -INFINITY;
    s[1] = second ? s[1] + __uint_as_float(more.y) : -INFINITY;
    s[2] = first ? s[2] + __uint_as_float(more.z) : -INFINITY;
    s[3] = second ? s[3] + __uint_as_float(more.w) : -INFINITY;
}

// Leave the maxima of these scores.
__device__ __forceinline__ void leave_maxima(const float (&s)[4], int warp, uint32_t smem) {
    int const lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float largest = fmaxf(s[2 * h], s[2 * h + 1]);
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        store_shared_if(smem + Layout::SMEM_MAXIMA + ((lane / 4 + 8 * h) * WARPS + warp) * 4,
                        __float_as_uint(largest), lane % 4 == 0);
    }
}

// ---- values

// Of a lane's two rows, lane / 4 and 8 below. Every warp has the same maximum.
struct Softmax {
    float top[2] = {-INFINITY, -INFINITY};  // running maximum, up to RESCALE_THRESHOLD too small; -inf: no entry so far
    float sum[2] = {0, 0}, rounded[2] = {0, 0};  // of this lane's columns: of p, for lse; of p in bf16, which P V has
};

// P of the warp's 8 entries out of their scores, to the group's fragment; O is rescaled where a maximum moves.
__device__ __forceinline__ void probabilities(Softmax& softmax, float (&o)[DIMS / 8][4], const float (&s)[4],
                                              const Gather& gather, uint32_t smem) {
    int const lane = threadIdx.x % 32, quarter = lane % 4;
    float largest[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        uint32_t const from =
            smem + Layout::SMEM_MAXIMA + ((lane / 4 + 8 * h) * WARPS + quarter * (WARPS / 4)) * 4;
        float2 const two = load_shared_pair(from);
        largest[h] = fmaxf(two.x, two.y);
        if (WARPS == 16) {
            float2 const more = load_shared_pair(from + 8);
            largest[h] = fmaxf(largest[h], fmaxf(more.x, more.y));
        }
        largest[h] = fmaxf(largest[h], __shfl_xor_sync(~0u, largest[h], 1));
        largest[h] = fmaxf(largest[h], __shfl_xor_sync(~0u, largest[h], 2)) * TO_LOG2;
    }
    bool const moves[2] = {largest[0] > softmax.top[0] + RESCALE_THRESHOLD,
                           largest[1] > softmax.top[1] + RESCALE_THRESHOLD};
    if (__any_sync(~0u, moves[0] || moves[1])) {
        float alpha[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            alpha[h] = moves[h] ? exp2_fast(softmax.top[h] - largest[h]) : 1.f;
            softmax.top[h] = moves[h] ? largest[h] : softmax.top[h];
            softmax.sum[h] *= alpha[h], softmax.rounded[h] *= alpha[h];
        }
#pragma unroll
        for (int n = 0; n < DIMS / 8; ++n)
            o[n][0] *= alpha[0], o[n][1] *= alpha[0], o[n][2] *= alpha[1], o[n][3] *= alpha[1];
    }
    uint32_t pairs[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float const zero = softmax.top[h] == -INFINITY ? 0.f : softmax.top[h];
        float const a = exp2_fast(fmaf(s[2 * h], TO_LOG2, -zero));
        float const b = exp2_fast(fmaf(s[2 * h + 1], TO_LOG2, -zero));
        pairs[h] = pack_bf16x2(a, b);
        softmax.sum[h] += a + b;
        softmax.rounded[h] += __uint_as_float(pairs[h] << 16) + __uint_as_float(pairs[h] & 0xFFFF0000);
    }
    store_shared8(smem + Layout::SMEM_P + gather.group * FRAGMENT + lane * 16 + gather.half * 8, pairs[0], pairs[1]);
}

// O += P V of this warp's dims, over the groups of a tile.
__device__ __forceinline__ void add_values(float (&o)[DIMS / 8][4], int warp, int groups, uint32_t smem) {
    int const lane = threadIdx.x % 32;
    // Lanes 0-15 name entries 0-15 of the left 8 dims, lanes 16-31 of the right ones.
    uint32_t const tile = smem + Layout::SMEM_VALUES + warp * DIMS / 64 * Layout::TILE + lane % 16 * 128;
    int const chunk = warp * DIMS % 64 / 8 + lane / 16;
#pragma unroll 2
    for (int k = 0; k < groups; ++k) {
        uint4 const a = load_shared16(smem + Layout::SMEM_P + k * FRAGMENT + lane * 16);
#pragma unroll
        for (int n = 0; n < DIMS / 8; n += 2) {
            uint4 const v = ldmatrix_x4_trans(tile + k * (GROUP * 128) + ((chunk + n) ^ lane % 8) * 16);
            mma(o[n], a.x, a.y, a.z, a.w, v.x, v.y);
            mma(o[n + 1], a.x, a.y, a.z, a.w, v.z, v.w);
        }
    }
}

// ---- joining: what the blocks of a cluster have summed

// Which units of the sums each block joins: from `first` of it on, up to the next one's. It gets `most` of each block.
struct Pieces {
    Divisor blocks;
    uint32_t most;
    __device__ __forceinline__ explicit Pieces(Divisor blocks) : blocks(blocks), most(blocks(UNITS + blocks.by - 1)) {}
    // Bytes that a block receives, of all blocks with itself.
    __device__ __forceinline__ uint32_t bytes(uint32_t block) const {
        return blocks.by * ((first(block + 1) - first(block)) * 16 + BLOCK_M * 16 + WARPS * BLOCK_M * 4);
    }
    __device__ __forceinline__ uint32_t first(uint32_t block) const { return blocks(block * UNITS); }
    __device__ __forceinline__ uint32_t owner(uint32_t unit) const { return (blocks.by * (unit + 1) - 1) / UNITS; }
    // Where a block has its unit of the sums of block `from`.
    __device__ __forceinline__ uint32_t received(uint32_t from, uint32_t unit, uint32_t block) const {
        return Layout::SMEM_RECEIVED + (from * most + unit - first(block)) * 16;
    }
};

// What the sums of this lane's two rows have been divided by, powers of two.
struct Left {
    float scale[2];
};
// The block's O to its shared memory as fp16, of which 1 to 2 is the largest of a row in a warp's dims; the warp's sums
// of p, and of p in bf16, to SMEM_TOTALS.
__device__ __forceinline__ Left leave_sums(Softmax& softmax, const float (&o)[DIMS / 8][4], int warp, uint32_t smem) {
    int const lane = threadIdx.x % 32;
    Left left;
    float inverse[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float largest = 0;
#pragma unroll
        for (int n = 0; n < DIMS / 8; ++n)
            largest = fmaxf(largest, fmaxf(fabsf(o[n][2 * h]), fabsf(o[n][2 * h + 1])));
#pragma unroll
        for (int lanes = 1; lanes < 4; lanes *= 2) {
            softmax.sum[h] += __shfl_xor_sync(~0u, softmax.sum[h], lanes);
            softmax.rounded[h] += __shfl_xor_sync(~0u, softmax.rounded[h], lanes);
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
        }
        uint32_t const exponent = __float_as_uint(largest) & 0x7F800000;
        left.scale[h] = __uint_as_float(exponent), inverse[h] = __uint_as_float((254u << 23) - exponent);
        if (lane % 4 == 0)
            store_shared8(smem + Layout::SMEM_TOTALS + (warp * BLOCK_M + lane / 4 + 8 * h) * 8,
                          __float_as_uint(softmax.sum[h]), __float_as_uint(softmax.rounded[h]));
    }
    // Of the four matrices of a store: lanes 0-15 rows 0-15 of the left 8 dims, lanes 16-31 of the right ones.
    uint32_t const to = smem + Layout::SMEM_SUMS + lane % 16 * Layout::SUM_ROW + (warp * DIMS / 8 + lane / 16) * 16;
#pragma unroll
    for (int n = 0; n < DIMS / 8; n += 2)
        stmatrix_x4(to + n * 16, pack_f16x2(o[n][0] * inverse[0], o[n][1] * inverse[0]),
                    pack_f16x2(o[n][2] * inverse[1], o[n][3] * inverse[1]),
                    pack_f16x2(o[n + 1][0] * inverse[0], o[n + 1][1] * inverse[0]),
                    pack_f16x2(o[n + 1][2] * inverse[1], o[n + 1][3] * inverse[1]));
    return left;
}

// Each unit to the block that joins it; scales and stats to all blocks. A block without others writes them itself:
// compute-sanitizer takes no st.async where there is no cluster.
__device__ __forceinline__ void send_sums(const Left& left, const Softmax& softmax, Pieces const& pieces, int rank,
                                          int warp, uint32_t smem) {
    int const lane = threadIdx.x % 32;
    bool const alone = pieces.blocks.by == 1;
    uint4 units[UNITS / NUM_THREADS];
#pragma unroll
    for (int i = 0; i < UNITS / NUM_THREADS; ++i) {
        uint32_t const unit = threadIdx.x + i * NUM_THREADS;
        uint32_t const row = unit / (HEAD_DIM / 8), column = unit % (HEAD_DIM / 8);
        units[i] = load_shared16(smem + Layout::SMEM_SUMS + row * Layout::SUM_ROW + column * 16);
    }
#pragma unroll
    for (int i = 0; i < UNITS / NUM_THREADS; ++i) {
        uint32_t const unit = threadIdx.x + i * NUM_THREADS, owner = pieces.owner(unit);
        uint32_t const to = smem + pieces.received(rank, unit, owner);
        if (alone)
            store_shared16(to, units[i]);
        else
            send16(in_block(owner, to), units[i], in_block(owner, smem + Layout::RECEIVED_BARRIER));
    }
    // Of every four lanes, which have the same two rows, two send of the one row and two of the other, to every second
    // block each.
    int const h = lane % 2, row = lane / 4 + 8 * h;
    uint32_t const scale = __float_as_uint(h ? left.scale[1] : left.scale[0]);
    uint4 stats = make_uint4(__float_as_uint(h ? softmax.top[1] : softmax.top[0]), 0, 0, 0);
    if (warp == 0) {
        float sum = 0, rounded = 0;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) {
            float2 const v = load_shared_pair(smem + Layout::SMEM_TOTALS + (i * BLOCK_M + row) * 8);
            sum += v.x, rounded += v.y;
        }
        stats.y = __float_as_uint(sum), stats.z = __float_as_uint(rounded);
    }
#pragma unroll 1
    for (uint32_t block = lane / 2 % 2; block < pieces.blocks.by; block += 2) {
        uint32_t const to = smem + Layout::SMEM_SCALES + ((rank * WARPS + warp) * BLOCK_M + row) * 4;
        uint32_t const stats_to = smem + Layout::SMEM_STATS + (rank * BLOCK_M + row) * 16;
        if (alone) {
            store_shared(to, scale);
            if (warp == 0) store_shared16(stats_to, stats);
            continue;
        }
        uint32_t const barrier = in_block(block, smem + Layout::RECEIVED_BARRIER);
        send(in_block(block, to), scale, barrier);
        if (warp == 0) send16(in_block(block, stats_to), stats, barrier);
    }
}

// What the sums of each block are to be multiplied by, [BLOCK_M][MOST_BLOCKS] to shared memory; and lse.
__device__ __forceinline__ void weigh(const Problem& p, const Item& item, uint32_t smem) {
    constexpr int LANES = MOST_BLOCKS;  // of a head, one a block
    int const row = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    if (row >= BLOCK_M) return;
    float4 stats = make_float4(-INFINITY, 0, 0, 0);
    if (lane < p.blocks.by) stats = load_stats(smem + Layout::SMEM_STATS + (lane * BLOCK_M + row) * 16);
    float top = stats.x;
#pragma unroll
    for (int lanes = 1; lanes < LANES; lanes *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, lanes));
    bool const any = top > -INFINITY;
    float const weight = any ? exp2_fast(stats.x - top) : 0.f;
    float sum = weight * stats.y, rounded = weight * stats.z;
#pragma unroll
    for (int lanes = 1; lanes < LANES; lanes *= 2)
        sum += __shfl_xor_sync(~0u, sum, lanes), rounded += __shfl_xor_sync(~0u, rounded, lanes);
    int const head = item.head + min(row, item.heads - 1);
    // Infinite if the sink drowns all else; `any`: then the largest p is at least 2^-RESCALE_THRESHOLD.
    float const denominator = rounded + exp2_fast(__uint_as_float(load_shared(smem + Layout::SMEM_SINKS + row * 4)) * LOG2E - top);
    store_shared(smem + Layout::SMEM_WEIGHTS + (row * MOST_BLOCKS + lane) * 4,
                 __float_as_uint(any ? weight / denominator : 0.f));
    if (item.rank == 0 && lane == 0 && row < item.heads)
        p.lse[int64_t(item.query) * p.heads + head] = any ? (top + log2f(sum)) / LOG2E : INFINITY;
}

// This block's part of the outputs.
__device__ __forceinline__ void join(const Problem& p, const Item& item, Pieces const& pieces, uint32_t smem) {
    __nv_bfloat16* const out = p.out + (int64_t(item.query) * p.heads + item.head) * HEAD_DIM;
    uint32_t const end = min(pieces.first(item.rank + 1), uint32_t(item.heads * HEAD_DIM / 8));
#pragma unroll 1
    for (uint32_t unit = pieces.first(item.rank) + threadIdx.x; unit < end; unit += NUM_THREADS) {
        uint32_t const row = unit / (HEAD_DIM / 8), warp = unit % (HEAD_DIM / 8) / (DIMS / 8);
        Angles const angles(p.turn, item.query, unit % (HEAD_DIM / 8) * 8);
        uint32_t const weights = smem + Layout::SMEM_WEIGHTS + row * MOST_BLOCKS * 4;
        uint32_t const scales = smem + Layout::SMEM_SCALES + (warp * BLOCK_M + row) * 4;
        uint32_t const from = smem + pieces.received(0, unit, item.rank);
        float sum[8] = {};
#pragma unroll 4
        for (uint32_t block = 0; block < pieces.blocks.by; ++block) {
            float const weight = __uint_as_float(load_shared(weights + block * 4)) *
                                 __uint_as_float(load_shared(scales + block * (WARPS * BLOCK_M * 4)));
            uint4 const v = load_shared16(from + block * pieces.most * 16);
            uint32_t const pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float2 const pair = __half22float2(*reinterpret_cast<const __half2*>(&pairs[i]));
                sum[2 * i] = fmaf(weight, pair.x, sum[2 * i]), sum[2 * i + 1] = fmaf(weight, pair.y, sum[2 * i + 1]);
            }
        }
        uint32_t made[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) made[i] = pack_bf16x2(sum[2 * i], sum[2 * i + 1]);
        *reinterpret_cast<uint4*>(out + unit * 8) = angles(make_uint4(made[0], made[1], made[2], made[3]));
    }
}

// ---- kernel

// Grid (B S tiles of heads, times blocks of a cluster).
__global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_MULTIPROCESSOR) attend(const __grid_constant__ Problem p) {
    extern __shared__ uint8_t dynamic[];
    uint32_t const smem = (smem_address(dynamic) + 127) & ~127u;
    Item const item(p);
    Lists const lists = {p.window, p.compressed, p.window_index + int64_t(item.query) * p.nw,
                         p.compressed_index + int64_t(item.query) * p.nc};
    programmatic::wait();

    // Lists are nearly always full: their first indices are asked for together with the lengths, not after them, and
    // queries are under way before any of these is there.
    int2 const length = make_int2(__ldg(p.window_length + item.batch), __ldg(p.compressed_length + item.batch));
    int const warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    Gather gather = {lists, Share(p, p.nw, p.nc, item.rank), warp / 2, warp % 2};
    gather.look(0);
    Queries queries;
    queries.ask(p, item, warp, smem);
    if (threadIdx.x < BLOCK_M)  // at the end they would be waited for
        cp_async4(smem + Layout::SMEM_SINKS + 4 * threadIdx.x,
                  p.sink + item.head + min(int(threadIdx.x), item.heads - 1));
    // 0, which the compiler does not know: or else it waits for lengths or indices before all this is asked for.
    int const nothing = __syncthreads_or(p.nw < 0);
    int2 const counted = clamped(make_int2(length.x + nothing, length.y + nothing), p.nw, p.nc);
    if (counted.x != p.nw || counted.y != p.nc) {
        gather.share = Share(p, counted.x, counted.y, item.rank);
        gather.look(0);
    }
    auto const tell_free = [&] {  // behind the block's barrier: others may write where queries and scores were
        cluster_wait();           // all blocks have their barriers; this was long ago
        if (threadIdx.x < p.blocks.by) arrive_at(in_block(threadIdx.x, smem + Layout::FREE_BARRIER));
    };

    float o[DIMS / 8][4] = {}, s[4];
    Softmax softmax;
    Raw raw;
    int const count = gather.share.count;
    gather.ask(0, raw);
    if (threadIdx.x == NUM_THREADS - 32) {  // publishing takes long, but entries take longer
        barrier_init(smem + Layout::RECEIVED_BARRIER, 1);
        barrier_init(smem + Layout::FREE_BARRIER, p.blocks.by);
        barrier_publish();
        arrive_and_expect_tx(smem + Layout::RECEIVED_BARRIER, Pieces(p.blocks).bytes(item.rank));
    }
    queries.arrange(warp, smem);
    __syncthreads();
    cluster_arrive();
#pragma unroll 1
    for (int tile = 0; tile < count; ++tile) {
        bool const any = gather.any(tile);
        uint32_t const live = raw.live;
        if (any) score(gather, raw, smem, s);
        gather.ask(tile + 1, raw);  // on its way while this tile is finished
        if (any)
            finish(gather, live, smem, s);
        else
            s[0] = s[1] = s[2] = s[3] = -INFINITY;
        leave_maxima(s, warp, smem);
        __syncthreads();  // values and maxima are there
        if (tile + 1 == count) tell_free();
        probabilities(softmax, o, s, gather, smem);
        __syncthreads();  // P is there
        int const entries = gather.share.last - gather.share.first - tile * gather.share.step;
        add_values(o, warp, (min(gather.share.step, entries) + GROUP - 1) / GROUP, smem);
        __syncthreads();  // values are read
    }
    if (count == 0) tell_free();
    Pieces const pieces(p.blocks);
    Left const left = leave_sums(softmax, o, warp, smem);
    __syncthreads();
    wait(smem + Layout::FREE_BARRIER, 0);
    send_sums(left, softmax, pieces, item.rank, warp, smem);
    if (p.blocks.by == 1)
        __syncthreads();
    else
        wait(smem + Layout::RECEIVED_BARRIER, 0);
    weigh(p, item, smem);
    __syncthreads();
    join(p, item, pieces, smem);
}

// ---- launcher

inline cudaError_t prepare(int blocks) {
    auto const error = cudaFuncSetAttribute(attend, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED);
    if (error != cudaSuccess || blocks <= 8) return error;
    return cudaFuncSetAttribute(attend, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}

}  // namespace fmha::few

// Clusters of `blocks` blocks, 1 to 16, that this GPU has room for at once, into *fit. -> a cudaError_t.
extern "C" int clusters(int blocks, int* fit) {
    auto const error = fmha::few::prepare(blocks);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = blocks, attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks), config.blockDim = dim3(fmha::few::NUM_THREADS);
    config.dynamicSmemBytes = fmha::few::SHARED, config.attrs = &attribute, config.numAttrs = 1;
    return cudaOccupancyMaxActiveClusters(fit, fmha::few::attend, &config);
}

// Device pointers; page_*: log2 of the entries of a page, stride_*: its bytes; blocks: of a cluster, which has a query
// and 16 heads, 1 to 16; cosine, sine: as Turn has them; early: as launch has it. -> a cudaError_t.
extern "C" int launch_few_heads(const void* q, const uint8_t* window, const int* window_index, const int* window_length,
                      const uint8_t* compressed, const int* compressed_index, const int* compressed_length,
                      const float* sink, void* out, float* lse, const float* cosine, const float* sine, int batch,
                      int queries, int heads, int nw, int nc,
                      int page_window, int stride_window, int page_compressed, int stride_compressed, int blocks,
                      int early) {
    using namespace fmha::few;
    int const tiles = (heads + BLOCK_M - 1) / BLOCK_M;
    // A block's entries of full lists, in as few tiles as there can be, and these alike.
    int const most = ((nw + nc + ENTRIES - 1) / ENTRIES + blocks - 1) / blocks * ENTRIES;
    int const count = (most + BLOCK_N - 1) / BLOCK_N, step = ((most + count - 1) / count + GROUP - 1) / GROUP * GROUP;
    fmha::few::Problem const p = {
        static_cast<const __nv_bfloat16*>(q),
        {window, uint32_t(stride_window), uint32_t(page_window)},
        {compressed, uint32_t(stride_compressed), uint32_t(page_compressed)},
        window_index, window_length, compressed_index, compressed_length, sink, {cosine, sine},
        static_cast<__nv_bfloat16*>(out), lse, heads, nw, nc,
        fmha::Divisor(queries), fmha::Divisor(tiles), fmha::Divisor(blocks), fmha::Divisor(step),
    };
    auto const error = fmha::few::prepare(blocks);
    if (error != cudaSuccess) return error;
    return programmatic::launch_clusters(fmha::few::attend, dim3(batch * queries * tiles * blocks),
                                         dim3(fmha::few::NUM_THREADS), fmha::few::SHARED, blocks, early, p);
}
