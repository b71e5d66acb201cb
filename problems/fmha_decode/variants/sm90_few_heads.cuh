// fmha_decode for few heads, such as tensor parallelism leaves: mma.sync with 16 heads as rows, nothing padded to 64.
//
// A block of WARPS warps has a query, 16 of its heads and a share of its entries; a cluster of blocks has all of them.
// A tile has 8 entries a warp. Each warp
//   asks     for its own entries by cp.async, NUM_STAGES tiles ahead; a lane for just the bytes that it decodes itself
//   decodes  them to bf16 in registers, where they are at once the B fragments of S = Q K^T (dims are permuted, and so
//            are those of Q, all of which a warp keeps in registers), and stores them to shared memory as values
//   scores   its 8 entries for all heads, and leaves them there in fp32
//   waits    for the block: the one barrier of a tile, since values and scores have two places
//   sums     O += P V of its 512 / WARPS dims. Every warp makes P out of the scores itself, so that none waits for
//            another one's maximum; all of them get the same bits.
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

constexpr int BLOCK_M = 16;               // heads of a block
constexpr int WARPS = 4;                  // 8 would have all of a multiprocessor's registers; of 4, two blocks fit
constexpr int NUM_THREADS = 32 * WARPS;
constexpr int BLOCKS_PER_MULTIPROCESSOR = 8 / WARPS;
constexpr int ENTRIES = 8;                // of a tile, a warp's
constexpr int BLOCK_N = ENTRIES * WARPS;  // entries of a tile
constexpr int DIMS = HEAD_DIM / WARPS;    // of values, a warp's
constexpr int NUM_STAGES = 2;             // tiles asked for ahead
constexpr int MOST_BLOCKS = 16;           // of a cluster; more than 8 are not portable
constexpr int UNITS = BLOCK_M * HEAD_DIM / 8;  // of 8 dims, 16 bytes of fp16: a block's sums
constexpr float LOG2E = 1.4426950408889634f;
constexpr float TO_LOG2 = 0.04419417382415922f * LOG2E;  // 512^-0.5, for scores in powers of two
// P may reach 2^8: sums stay far inside fp32, and bf16 is as fine there as below 1.
constexpr float RESCALE_THRESHOLD = 8.f;

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
};

// Shared memory in bytes from a multiple of 128.
struct Layout {
    static constexpr uint32_t TILE = BLOCK_N * 128, VALUES = TILES * TILE;  // a sub-tile of 64 dims; all of them
    static constexpr uint32_t SCORE_ROW = (BLOCK_N + 8) * 4;  // of a head; 8 more, so that 4 rows take 32 banks
    static constexpr uint32_t SCORES = BLOCK_M * SCORE_ROW;
    static constexpr uint32_t STAGED_SCALES = ENTRIES * PAYLOAD;       // then 8 bytes of scales for each lane
    static constexpr uint32_t STAGED_GROUP = STAGED_SCALES + 32 * 8;  // of a warp, a tile
    static constexpr uint32_t SMEM_VALUES = 0, SMEM_SCORES = SMEM_VALUES + 2 * VALUES;
    static constexpr uint32_t SMEM_STAGING = SMEM_SCORES + 2 * SCORES;
    static constexpr uint32_t SMEM_QUERIES = SMEM_STAGING + NUM_STAGES * WARPS * STAGED_GROUP;  // see Queries
    static constexpr uint32_t RECEIVED_BARRIER = SMEM_QUERIES + 4 * 32 * 16, FREE_BARRIER = RECEIVED_BARRIER + 8;
    static constexpr uint32_t BYTES = FREE_BARRIER + 8;
    // In the end, where values were. What other blocks send is in the first place, which the last tile does not have.
    static constexpr uint32_t SUM_ROW = (HEAD_DIM + 8) * 2;  // of a head: fp16; 8 more, so that 8 rows take 32 banks
    static constexpr uint32_t SMEM_SUMS = VALUES, SMEM_RECEIVED = 0;  // see Pieces
    // [MOST_BLOCKS][BLOCK_M] of 16 bytes: running maximum, sum of p, sum of p in bf16, nothing
    static constexpr uint32_t SMEM_STATS = SMEM_RECEIVED + (UNITS + MOST_BLOCKS) * 16;
    // float [MOST_BLOCKS][WARPS][BLOCK_M]
    static constexpr uint32_t SMEM_SCALES = SMEM_STATS + MOST_BLOCKS * BLOCK_M * 16;
    // float [BLOCK_M][MOST_BLOCKS]
    static constexpr uint32_t SMEM_WEIGHTS = SMEM_SCALES + MOST_BLOCKS * WARPS * BLOCK_M * 4;
    static_assert(SMEM_WEIGHTS + BLOCK_M * MOST_BLOCKS * 4 <= VALUES && BLOCK_M * SUM_ROW <= VALUES, "room");
    static_assert(SMEM_STAGING % 16 == 0 && STAGED_GROUP % 16 == 0 && SUM_ROW % 16 == 0, "vector accesses");
    static_assert(RECEIVED_BARRIER % 8 == 0);
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
    int window, first, last, count;  // count: tiles
    __device__ __forceinline__ Share(int window, int compressed, int rank, Divisor blocks) : window(window) {
        int const total = window + compressed, groups = (total + ENTRIES - 1) / ENTRIES;
        first = blocks(groups * rank) * ENTRIES, last = min(int(blocks(groups * (rank + 1))) * ENTRIES, total);
        count = (max(last - first, 0) + BLOCK_N - 1) / BLOCK_N;
    }
};

// ---- device helpers

// Four 8x8 matrices of 16-bit values, each transposed; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ uint4 ldmatrix_x4_trans(uint32_t from) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from)
                 : "memory");
    return v;
}
__device__ __forceinline__ void store_shared_pair(uint32_t to, float a, float b) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(a), "f"(b) : "memory");
}
// As arrive, at another block's barrier. For who wrote nothing that the other block reads: a release to the whole
// cluster would wait like a fence.
__device__ __forceinline__ void arrive_at(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ float4 load_stats(uint32_t from) {
    uint4 const v = load_shared16(from);
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), 0);
}

// ---- queries

// A warp's A fragments of all 512 dims: of sub-tile t, step s of 16 dims. Of its 64 dims a lane has the 16 that it
// decodes of an entry: from 16 (lane % 4) on, and in the sub-tile of bf16 8 from 8 (lane % 4) and 8 from 32 later on.
// That last sub-tile's fragments are in shared memory, [4 steps][32 lanes] of 16 bytes, for want of registers.
struct Queries {
    uint32_t words[2][FP8_TILES][8];  // of row lane / 4 and of the one 8 below: pairs of dims, in order
    uint32_t last;                    // this lane's words of the last sub-tile

    // The block's barrier must follow.
    __device__ __forceinline__ void load(const Problem& p, const Item& item, uint32_t smem) {
        last = smem + threadIdx.x % 32 * 16;
        int const lane = threadIdx.x % 32, quarter = lane % 4;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int const row = lane / 4 + 8 * h;
            bool const exists = row < item.heads;
            const __nv_bfloat16* const q =
                p.q + (int64_t(item.query) * p.heads + item.head + (exists ? row : 0)) * HEAD_DIM;
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                int const at = 64 * t + (t < FP8_TILES ? 16 : 8) * quarter;
                if (t == FP8_TILES && threadIdx.x >= 32) continue;  // one warp brings these for all
                uint4 low = load_global16(q + at), high = load_global16(q + at + (t < FP8_TILES ? 8 : 32));
                if (!exists) low = high = make_uint4(0, 0, 0, 0);
                uint32_t const eight[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    if (t < FP8_TILES)
                        words[h][t][i] = eight[i];
                    else
                        store_shared(last + i / 2 * 512 + i % 2 * 8 + h * 4, eight[i]);
                }
            }
        }
    }
    // sums (heads, this warp's 8 entries) += this sub-tile of Q times `low` and `high`, a lane's 16 dims of an entry.
    // Four sums, since the next mma of one waits for the last.
    __device__ __forceinline__ void multiply(float (&sums)[4][4], int t, uint4 low, uint4 high) const {
        uint32_t const k[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int s = 0; s < 4; ++s) {
            if (t < FP8_TILES) {
                auto const &upper = words[0][t], &lower = words[1][t];
                mma_bf16(sums[s], upper[2 * s], lower[2 * s], upper[2 * s + 1], lower[2 * s + 1], k[2 * s],
                         k[2 * s + 1]);
            } else {
                uint4 const a = load_shared16(last + s * 512);
                mma_bf16(sums[s], a.x, a.y, a.z, a.w, k[2 * s], k[2 * s + 1]);
            }
        }
    }
};

// ---- gathering: a warp's 8 entries of each tile

struct Gather {
    Lists const& lists;
    Share share;
    uint32_t staging;             // this warp's stages are WARPS groups apart
    uint32_t live[NUM_STAGES];    // of the tiles that are asked for, the next one first: bit 4 i: entry i is one
    int next;                     // index of this lane's entry in the first tile that is not asked for yet

    __device__ __forceinline__ int position(int tile) const {
        return share.first + tile * BLOCK_N + threadIdx.x / 32 * ENTRIES + threadIdx.x % 32 / 4;
    }
    __device__ __forceinline__ int index(int tile) const {
        int const at = position(tile);
        return load_if(at < share.window ? lists.window_index + at : lists.compressed_index + (at - share.window),
                       at < share.last, -1);
    }
    __device__ __forceinline__ uint32_t staged(int tile) const {
        return staging + tile % NUM_STAGES * (WARPS * Layout::STAGED_GROUP);
    }
    // Ask for a tile, of which this lane's entry has this index. Returns which of the warp's entries there are.
    __device__ __forceinline__ uint32_t ask(int tile, int index) const {
        int const lane = threadIdx.x % 32;
        bool const entry = index >= 0;
        const uint8_t *payload, *scale;
        lists.locate(index, position(tile) < share.window, payload, scale);
        if (!entry) payload = scale = lists.window.pages;  // not read: zeros come
        uint32_t const to = staged(tile), at = to + lane / 4 * PAYLOAD + lane % 4 * 16;
#pragma unroll
        for (int j = 0; j < PAYLOAD / 64; ++j) cp_async16(at + 64 * j, payload + lane % 4 * 16 + 64 * j, entry);
        cp_async8(to + Layout::STAGED_SCALES + 8 * lane, scale, entry);
        cp_async_commit();
        return __ballot_sync(~0u, entry);
    }
    __device__ __forceinline__ void begin(const int (&first)[NUM_STAGES + 1]) {
#pragma unroll
        for (int i = 0; i < NUM_STAGES; ++i) live[i] = ask(i, first[i]);
        next = first[NUM_STAGES];
    }
    // Behind the decoding of `tile`.
    __device__ __forceinline__ void advance(int tile) {
#pragma unroll
        for (int i = 0; i + 1 < NUM_STAGES; ++i) live[i] = live[i + 1];
        live[NUM_STAGES - 1] = ask(tile + NUM_STAGES, next);
        next = index(tile + NUM_STAGES + 1);
    }
};

// ---- scores

// Decode this warp's entries of a tile to `values`, and leave their scores at `scores`.
__device__ __forceinline__ void score(const Queries& queries, uint32_t staged, uint32_t live, uint32_t values,
                                      uint32_t scores) {
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quarter = lane % 4;
    uint32_t const from = staged + row * PAYLOAD + quarter * 16;
    uint32_t const to = values + (warp * ENTRIES + row) * 128, low_chunk = (2 * quarter ^ row) * 16;
    uint2 const scales = load_shared8(staged + Layout::STAGED_SCALES + 8 * lane);
    float sums[4][4] = {};
    uint4 next = load_shared16(from);
#pragma unroll
    for (int t = 0; t < FP8_TILES; ++t) {
        uint4 const codes = next;
        uint32_t const scale = scale_pair((t < 4 ? scales.x : scales.y) >> 8 * (t % 4) & 0xFF);
        uint4 const low = decode8(codes.x, codes.y, scale), high = decode8(codes.z, codes.w, scale);
        next = load_shared16(from + 64 * (t + 1));  // ahead of stores, which it would wait for
        queries.multiply(sums, t, low, high);
        store_shared16(to + t * Layout::TILE + low_chunk, low);
        store_shared16(to + t * Layout::TILE + (low_chunk ^ 16), high);
    }
    uint4 const low = next, high = load_shared16(from + NOPE + 64);
    queries.multiply(sums, FP8_TILES, low, high);
    store_shared16(to + FP8_TILES * Layout::TILE + (quarter ^ row) * 16, low);
    store_shared16(to + FP8_TILES * Layout::TILE + ((4 + quarter) ^ row) * 16, high);
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[0][i] = (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
    bool const left = live >> 8 * quarter & 1, right = live >> (8 * quarter + 4) & 1;
#pragma unroll
    for (int h = 0; h < 2; ++h)
        store_shared_pair(scores + (row + 8 * h) * Layout::SCORE_ROW + (warp * ENTRIES + 2 * quarter) * 4,
                          left ? sums[0][2 * h] : -INFINITY, right ? sums[0][2 * h + 1] : -INFINITY);
}

// ---- values

// Of a lane's two rows, lane / 4 and 8 below. Every warp of the block has the same.
struct Softmax {
    float top[2] = {-INFINITY, -INFINITY};  // running maximum, up to RESCALE_THRESHOLD too small; -inf: no entry so far
    float sum[2] = {0, 0}, rounded[2] = {0, 0};  // of this lane's columns: of p, for lse; of p in bf16, which P V has
};

// The A fragments of a tile's P out of its scores; O is rescaled where a maximum moves.
__device__ __forceinline__ void probabilities(Softmax& softmax, float (&o)[DIMS / 8][4], uint32_t scores,
                                              uint32_t (&pairs)[BLOCK_N / 16][4]) {
    int const lane = threadIdx.x % 32;
    float s[2][BLOCK_N / 4];
    float largest[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        uint32_t const from = scores + (lane / 4 + 8 * h) * Layout::SCORE_ROW + lane % 4 * 8;
        largest[h] = -INFINITY;
#pragma unroll
        for (int i = 0; i < BLOCK_N / 8; ++i) {
            float2 const two = load_shared_pair(from + 32 * i);
            s[h][2 * i] = two.x, s[h][2 * i + 1] = two.y;
            largest[h] = fmaxf(largest[h], fmaxf(two.x, two.y));
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
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float const zero = softmax.top[h] == -INFINITY ? 0.f : softmax.top[h];
        float exact = 0, as_bf16 = 0;
#pragma unroll
        for (int i = 0; i < BLOCK_N / 8; ++i) {
            float const a = exp2_fast(fmaf(s[h][2 * i], TO_LOG2, -zero));
            float const b = exp2_fast(fmaf(s[h][2 * i + 1], TO_LOG2, -zero));
            uint32_t const pair = pairs[i / 2][i % 2 * 2 + h] = pack_bf16x2(a, b);
            exact += a + b;
            as_bf16 += __uint_as_float(pair << 16) + __uint_as_float(pair & 0xFFFF0000);
        }
        softmax.sum[h] += exact, softmax.rounded[h] += as_bf16;
    }
}

// O += P V of this warp's dims.
__device__ __forceinline__ void add_values(float (&o)[DIMS / 8][4], const uint32_t (&pairs)[BLOCK_N / 16][4],
                                           uint32_t values) {
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < BLOCK_N / 16; ++k) {
        // Lanes 0-15 name entries 0-15 of the left 8 dims, lanes 16-31 of the right ones.
        uint32_t const row = values + (16 * k + lane % 16) * 128 + warp * (DIMS / 64) * Layout::TILE;
#pragma unroll
        for (int n = 0; n < DIMS / 8; n += 2) {
            uint4 const v =
                ldmatrix_x4_trans(row + n / 8 * Layout::TILE + ((n % 8 + lane / 16) ^ lane % 8) * 16);
            mma_bf16(o[n], pairs[k][0], pairs[k][1], pairs[k][2], pairs[k][3], v.x, v.y);
            mma_bf16(o[n + 1], pairs[k][0], pairs[k][1], pairs[k][2], pairs[k][3], v.z, v.w);
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

// What the sums of this lane's two rows have been divided by, powers of two, and their stats.
struct Left {
    float scale[2];
    float4 stats[2];
};
// The block's O to its shared memory as fp16, of which 1 to 2 is the largest of a row in a warp's dims.
__device__ __forceinline__ Left leave_sums(Softmax& softmax, const float (&o)[DIMS / 8][4], uint32_t smem) {
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
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
        left.stats[h] = make_float4(softmax.top[h], softmax.sum[h], softmax.rounded[h], 0);
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

// Each unit to the block that joins it; scales and stats to all blocks. A block alone stores, and its own barrier is
// enough: memcheck refuses st.async there.
__device__ __forceinline__ void send_sums(const Left& left, Pieces const& pieces, int rank, uint32_t smem) {
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    auto const give = [&](uint32_t block, uint32_t to, uint32_t v) {
        if (pieces.blocks.by == 1)
            store_shared(smem + to, v);
        else
            st_async(in_block(block, smem + to), v, in_block(block, smem + Layout::RECEIVED_BARRIER));
    };
    auto const give16 = [&](uint32_t block, uint32_t to, uint4 v) {
        if (pieces.blocks.by == 1)
            store_shared16(smem + to, v);
        else
            st_async16(in_block(block, smem + to), v, in_block(block, smem + Layout::RECEIVED_BARRIER));
    };
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
        give16(owner, pieces.received(rank, unit, owner), units[i]);
    }
    if (lane % 4) return;
#pragma unroll 1
    for (uint32_t block = 0; block < pieces.blocks.by; ++block) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int const row = lane / 4 + 8 * h;
            give(block, Layout::SMEM_SCALES + ((rank * WARPS + warp) * BLOCK_M + row) * 4,
                 __float_as_uint(left.scale[h]));
            if (warp == h)
                give16(block, Layout::SMEM_STATS + (rank * BLOCK_M + row) * 16,
                       make_uint4(__float_as_uint(left.stats[h].x), __float_as_uint(left.stats[h].y),
                                  __float_as_uint(left.stats[h].z), 0));
        }
    }
}

// What the sums of each block are to be multiplied by, [BLOCK_M][MOST_BLOCKS] to shared memory; and lse.
__device__ __forceinline__ void weigh(const Problem& p, const Item& item, uint32_t smem) {
    constexpr int LANES = NUM_THREADS / BLOCK_M, EACH = MOST_BLOCKS / LANES;  // lanes of a head, blocks of a lane
    int const row = threadIdx.x / LANES, lane = threadIdx.x % LANES, blocks = p.blocks.by;
    float4 stats[EACH];
    float top = -INFINITY;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        int const block = lane + i * LANES;
        stats[i] = make_float4(-INFINITY, 0, 0, 0);
        if (block < blocks) stats[i] = load_stats(smem + Layout::SMEM_STATS + (block * BLOCK_M + row) * 16);
        top = fmaxf(top, stats[i].x);
    }
#pragma unroll
    for (int lanes = 1; lanes < LANES; lanes *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, lanes));
    bool const any = top > -INFINITY;
    float weights[EACH], sum = 0, rounded = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        weights[i] = any ? exp2_fast(stats[i].x - top) : 0.f;
        sum = fmaf(weights[i], stats[i].y, sum), rounded = fmaf(weights[i], stats[i].z, rounded);
    }
#pragma unroll
    for (int lanes = 1; lanes < LANES; lanes *= 2)
        sum += __shfl_xor_sync(~0u, sum, lanes), rounded += __shfl_xor_sync(~0u, rounded, lanes);
    int const head = item.head + min(row, item.heads - 1);
    // Infinite if the sink drowns all else; `any`: then the largest p is at least 2^-RESCALE_THRESHOLD.
    float const denominator = rounded + exp2_fast(__ldg(p.sink + head) * LOG2E - top);
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        store_shared(smem + Layout::SMEM_WEIGHTS + (row * MOST_BLOCKS + lane + i * LANES) * 4,
                     __float_as_uint(any ? weights[i] / denominator : 0.f));
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

    // Lists are nearly always full: their first indices are asked for together with the lengths, not after them.
    int const window = min(max(__ldg(p.window_length + item.batch), 0), p.nw);
    int const compressed = min(max(__ldg(p.compressed_length + item.batch), 0), p.nc);
    uint32_t const staging = smem + Layout::SMEM_STAGING + threadIdx.x / 32 * Layout::STAGED_GROUP;
    Gather gather = {lists, Share(p.nw, p.nc, item.rank, p.blocks), staging};
    int first[NUM_STAGES + 1];
#pragma unroll
    for (int i = 0; i <= NUM_STAGES; ++i) first[i] = gather.index(i);
    if (window != p.nw || compressed != p.nc) {
        gather.share = Share(window, compressed, item.rank, p.blocks);
#pragma unroll
        for (int i = 0; i <= NUM_STAGES; ++i) first[i] = gather.index(i);
    }
    gather.begin(first);
    Queries queries;  // behind the entries, which take longer
    queries.load(p, item, smem + Layout::SMEM_QUERIES);
    Pieces const pieces(p.blocks);
    if (threadIdx.x == NUM_THREADS - 32) {  // publishing takes long, but entries take longer
        barrier_init(smem + Layout::RECEIVED_BARRIER, 1);
        barrier_init(smem + Layout::FREE_BARRIER, p.blocks.by);
        barrier_publish();
        if (p.blocks.by > 1) arrive_and_expect_tx(smem + Layout::RECEIVED_BARRIER, pieces.bytes(item.rank));
    }
    __syncthreads();
    cluster_arrive_relaxed();
    auto const tell_free = [&] {  // behind the block's barrier: others may write to the first place of values
        cluster_wait();           // all blocks have their barriers; this was long ago
        if (threadIdx.x < p.blocks.by) arrive_at(in_block(threadIdx.x, smem + Layout::FREE_BARRIER));
    };
    if (gather.share.count == 0) tell_free();

    float o[DIMS / 8][4] = {};
    Softmax softmax;
#pragma unroll 1
    for (int tile = 0; tile < gather.share.count; ++tile) {
        bool const last = tile + 1 == gather.share.count;
        uint32_t const place = (gather.share.count - tile) % 2;  // 1 of the last tile
        uint32_t const values = smem + Layout::SMEM_VALUES + place * Layout::VALUES;
        uint32_t const scores = smem + Layout::SMEM_SCORES + tile % 2 * Layout::SCORES;
        cp_async_wait<NUM_STAGES - 1>();
        score(queries, gather.staged(tile), gather.live[0], values, scores);
        gather.advance(tile);
        __syncthreads();
        if (last) tell_free();
        uint32_t pairs[BLOCK_N / 16][4];
        probabilities(softmax, o, scores, pairs);
        add_values(o, pairs, values);
    }
    cp_async_wait<0>();  // none may land after the block has ended
    __syncthreads();     // and the last values are read
    Left const left = leave_sums(softmax, o, smem);
    __syncthreads();
    wait(smem + Layout::FREE_BARRIER, 0);
    send_sums(left, pieces, item.rank, smem);
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
    int const tiles = (heads + fmha::few::BLOCK_M - 1) / fmha::few::BLOCK_M;
    fmha::few::Problem const p = {
        static_cast<const __nv_bfloat16*>(q),
        {window, uint32_t(stride_window), uint32_t(page_window)},
        {compressed, uint32_t(stride_compressed), uint32_t(page_compressed)},
        window_index, window_length, compressed_index, compressed_length, sink, {cosine, sine},
        static_cast<__nv_bfloat16*>(out), lse, heads, nw, nc,
        fmha::Divisor(queries), fmha::Divisor(tiles), fmha::Divisor(blocks),
    };
    auto const error = fmha::few::prepare(blocks);
    if (error != cudaSuccess) return error;
    return programmatic::launch_clusters(fmha::few::attend, dim3(batch * queries * tiles * blocks),
                                         dim3(fmha::few::NUM_THREADS), fmha::few::SHARED, blocks, early, p);
}
