// fmha_decode for few heads: all entries of a block under way at once, 16 warps, values decoded out of what came.
//
// A block of 16 warps has a query, 16 of its heads and a share of its entries; a cluster of blocks has all of them, or
// parts are left for join_parts. Up to NUM_STAGES tiles of TILE entries are asked for before the first one is looked at,
// which for a few hundred entries is all of them. They stay as they came, e4m3 with scales. In a tile each warp
//   scores  8 entries over a quarter of the dims: it decodes them to bf16 in registers, where they are at once the B
//           fragments of S = Q K^T (dims are permuted, and so are those of Q, which a warp keeps in registers). It reads
//           what its lanes have asked for themselves, so nothing is waited for but the copies
//   makes P of one head, from the four quarters' sums
//   sums    O^T += V^T P^T of 32 dims: it decodes them again, from two entries at a time, since these pairs are then the
//           A fragments. So nothing is stored decoded, which takes more of a multiprocessor than decoding twice.
// The running maximum moves only if it grows by more than RESCALE_THRESHOLD. Sums have a fixed order, so results repeat
// bit by bit.
//
// q, out  bf16 (B, S, H, 512)      lse  fp32 (B, S, H)      sink  fp32 (H,)
// caches  uint8 (pages, stride), lists  int32 (B, S, n), lengths  int32 (B,), as task.py describes them
#pragma once

#include <cuda_bf16.h>

#include "launch_clusters.cuh"
#include "ptx.cuh"
#include "sm90_gather.cuh"

namespace fmha::once {

#ifndef ONCE_TILE
#define ONCE_TILE 32
#endif

constexpr int BLOCK_M = 16;    // heads of a block: rows of S, and one a warp for P
constexpr int QUARTERS = 4;    // of the dims, for scores
constexpr int GROUP = 8;       // entries that a warp scores at once
constexpr int WARPS = 16, NUM_THREADS = 32 * WARPS;
constexpr int TILE = ONCE_TILE;
constexpr int ROUNDS = TILE * QUARTERS / (GROUP * WARPS);  // groups of a warp in a tile
constexpr int NUM_STAGES = 320 / TILE;                     // tiles under way: 190 KB
constexpr int DIMS = HEAD_DIM / WARPS;                     // of values, a warp's
constexpr int MOST_BLOCKS = 16;                            // that share a list
constexpr float LOG2E = 1.4426950408889634f;
constexpr float TO_LOG2 = 0.04419417382415922f * LOG2E;  // 512^-0.5, for scores in powers of two
// P may reach 2^8: sums stay far inside fp32, and bf16 is as fine there as below 1.
constexpr float RESCALE_THRESHOLD = 8.f;
static_assert(TILE % 32 == 0 && NUM_STAGES >= 2 && NUM_STAGES * ROUNDS <= 12, "see Gather");

struct Problem {
    const __nv_bfloat16* q;
    Cache window, compressed;
    const int *window_index, *window_length, *compressed_index, *compressed_length;
    const float* sink;
    __nv_bfloat16* out;
    float* lse;
    float* parts;   // fp32 (blocks, rows, 512), sums; null: a cluster joins them
    float4* stats;  // (blocks, rows): running maximum, sum of p, sum of p in bf16, nothing
    int rows;       // B S H
    int heads, nw, nc;
    Divisor queries, tiles, blocks;  // S; tiles of BLOCK_M heads; blocks that share a list
};

// Shared memory in bytes from a multiple of 128. An entry's row is 576 bytes as in its page, and its scales: one word for
// each warp that scores a quarter of it. So a warp finds eight entries, or two pieces of four, in 32 different banks.
struct Layout {
    static constexpr uint32_t ROW = PAYLOAD + 16, STAGE = TILE * ROW;
    static constexpr uint32_t SCORE_ROW = (TILE + 4) * 4, SCORES = BLOCK_M * SCORE_ROW;  // of a head, a quarter: fp32
    static constexpr uint32_t PROB_ROW = (TILE + 8) * 2;                                 // of a head: bf16
    static constexpr uint32_t SMEM_STAGING = 0;
    static constexpr uint32_t SMEM_SCORES = SMEM_STAGING + NUM_STAGES * STAGE;  // [QUARTERS][BLOCK_M]
    static constexpr uint32_t SMEM_PROBS = SMEM_SCORES + QUARTERS * SCORES;     // [BLOCK_M]
    static constexpr uint32_t SMEM_ALPHA = SMEM_PROBS + BLOCK_M * PROB_ROW;     // float [BLOCK_M]: factors of O
    static constexpr uint32_t SMEM_SCALES = SMEM_ALPHA + BLOCK_M * 4;           // bf16 [2][FP8_TILES][TILE]
    static constexpr uint32_t SMEM_LIVE = SMEM_SCALES + 2 * FP8_TILES * TILE * 2;  // [NUM_STAGES][TILE]: is it an entry
    static constexpr uint32_t BYTES = SMEM_LIVE + NUM_STAGES * TILE * 4;
    // In the end, where entries were.
    static constexpr uint32_t SUM_ROW = (HEAD_DIM + 4) * 4;  // of a head: fp32
    static constexpr uint32_t SMEM_SUMS = 0, SMEM_STATS = BLOCK_M * SUM_ROW;  // [BLOCK_M] of 16 bytes, as Problem::stats
    static constexpr uint32_t SMEM_WEIGHTS = SMEM_STATS + BLOCK_M * 16;       // float [BLOCK_M][MOST_BLOCKS]
    static_assert(SMEM_WEIGHTS + BLOCK_M * MOST_BLOCKS * 4 <= SMEM_SCORES, "room");
    static_assert(SMEM_SCORES % 16 == 0 && SMEM_PROBS % 16 == 0 && SMEM_ALPHA % 16 == 0 && SMEM_SCALES % 16 == 0);
};
constexpr int SHARED = Layout::BYTES + 128;  // with room to align the start
static_assert(SHARED <= 227 * 1024);

// What a block works on.
struct Item {
    int query, head, heads, batch, rank;  // query: of B S; heads: of the block that exist, from `head` on
    __device__ __forceinline__ explicit Item(const Problem& p) {
        int const group = p.blocks(blockIdx.x);
        rank = blockIdx.x - group * p.blocks.by;  // in a cluster its number there, too
        query = p.tiles(group), head = (group - query * p.tiles.by) * BLOCK_M;
        heads = min(BLOCK_M, p.heads - head), batch = p.queries(query);
    }
};

// The list positions that a block walks: from `first` to `last`, of which those below `window` are the window's.
struct Share {
    int window, first, last, count;  // count: tiles
    __device__ __forceinline__ Share(int window, int compressed, int rank, Divisor blocks) : window(window) {
        int const total = window + compressed, groups = (total + GROUP - 1) / GROUP;
        first = blocks(groups * rank) * GROUP, last = min(int(blocks(groups * (rank + 1))) * GROUP, total);
        count = (max(last - first, 0) + TILE - 1) / TILE;
    }
};

#ifdef STAMPS
__device__ long long stamps[4096][16];
__device__ __forceinline__ void stamp(int at) {
    if (threadIdx.x == 0) stamps[blockIdx.x][at] = clock64();
}
__device__ __forceinline__ void stamp_start() {
    long long now;
    unsigned sm;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    if (threadIdx.x == 0) stamps[blockIdx.x][0] = now, stamps[blockIdx.x][15] = sm;
}
__device__ __forceinline__ void stamp_end() {
    long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    if (threadIdx.x == 0) stamps[blockIdx.x][14] = now;
}
#else
__device__ __forceinline__ void stamp(int) {}
__device__ __forceinline__ void stamp_start() {}
__device__ __forceinline__ void stamp_end() {}
#endif

// ---- device helpers

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all but the last COUNT groups that this thread has committed are there.
template <int COUNT>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(COUNT) : "memory");
}
__device__ __forceinline__ void cp_async4(uint32_t to, const void* from, bool really) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(really ? 4 : 0) : "memory");
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
// Four 8x8 matrices of 16-bit values; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ uint4 ldmatrix_x4(uint32_t from) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from)
                 : "memory");
    return v;
}
__device__ __forceinline__ void store_shared2(uint32_t to, uint32_t v) {
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(to), "h"(uint16_t(v)) : "memory");
}
__device__ __forceinline__ float4 load_cluster16(uint32_t from) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(from)
                 : "memory");
    return v;
}
__device__ __forceinline__ uint4 load_global16(const void* from) {
    uint4 v;
    asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
}
// Of codes w x y z, lowest byte first: the bf16 pairs (w, y) and (x, z), each times its half of the scale pair. As
// decode4 of sm90_gather.cuh, for codes that are in order already.
__device__ __forceinline__ uint2 decode_pairs(uint32_t codes, uint32_t scale) {
    constexpr uint32_t MAGNITUDES = 0x07F007F0;
    uint32_t signs;
    asm("and.b32 %0, %1, 0x80808080;" : "=r"(signs) : "r"(codes));
    uint32_t const first = either<MAGNITUDES>(codes << 4, signs << 8);
    uint32_t const second = either<MAGNITUDES>(codes >> 4, signs);
    return make_uint2(mul_bf16x2(first, scale), mul_bf16x2(second, scale));
}

// ---- a warp's place

// For scores: its group of entries in a round, its quarter of the dims; a lane's entry of the group, its 16 of 64 dims.
// Entries n and n + 4 are neighbours among lanes: they are half a round of banks apart.
struct Place {
    int warp, lane, group, quarter, entry, part;
    __device__ __forceinline__ Place() {
        warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        group = warp / QUARTERS, quarter = warp % QUARTERS;
        entry = lane / 4 % 2 * 4 + lane / 8, part = lane % 4;
    }
};

// ---- queries

// A warp's A fragments of its quarter: two sub-tiles of 64 dims, 4 steps of 16 each. Of 64 dims a lane has the 16 that it
// decodes of an entry: from 16 part on, and in the last sub-tile, of bf16, 8 from 8 part and 8 from 32 later on.
struct Queries {
    uint32_t words[2][2][8];  // of row lane / 4 and of the one 8 below; of both sub-tiles: pairs of dims, in order

    __device__ __forceinline__ void load(const Problem& p, const Item& item, const Place& me) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int const row = me.lane / 4 + 8 * h;
            bool const exists = row < item.heads;
            const __nv_bfloat16* const q =
                p.q + (int64_t(item.query) * p.heads + item.head + (exists ? row : 0)) * HEAD_DIM + 128 * me.quarter;
#pragma unroll
            for (int t = 0; t < 2; ++t) {
                bool const rope = t == 1 && me.quarter == QUARTERS - 1;
                const __nv_bfloat16* const at = q + 64 * t + (rope ? 8 : 16) * me.part;
                uint4 low = load_global16(at), high = load_global16(at + (rope ? 32 : 8));
                if (!exists) low = high = make_uint4(0, 0, 0, 0);
                uint32_t const eight[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
                for (int i = 0; i < 8; ++i) words[h][t][i] = eight[i];
            }
        }
    }
    // sums (heads, 8 entries) += this sub-tile of Q times `low` and `high`, a lane's 16 dims of an entry.
    __device__ __forceinline__ void multiply(float (&sums)[4][4], int t, uint4 low, uint4 high) const {
        uint32_t const k[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int s = 0; s < 4; ++s)
            mma(sums[s], words[0][t][2 * s], words[1][t][2 * s], words[0][t][2 * s + 1], words[1][t][2 * s + 1],
                k[2 * s], k[2 * s + 1]);
    }
};

// ---- gathering

struct Gather {
    Lists const& lists;
    Share share;
    Place const& me;
    uint32_t smem;

    __device__ __forceinline__ int position(int tile, int round) const {
        return share.first + tile * TILE + (round * WARPS / QUARTERS + me.group) * GROUP + me.entry;
    }
    __device__ __forceinline__ int index(int tile, int round) const {
        int const at = position(tile, round);
        return load_if(at < share.window ? lists.window_index + at : lists.compressed_index + (at - share.window),
                       at < share.last, -1);
    }
    // Ask for this warp's quarter of a group, of which this lane's entry has this index.
    __device__ __forceinline__ void ask(int tile, int round, int index) const {
        bool const entry = index >= 0;
        const uint8_t *payload, *scale;
        lists.locate(index, position(tile, round) < share.window, payload, scale);
        if (!entry) payload = scale = lists.window.pages;  // not read: zeros come
        int const row = (round * WARPS / QUARTERS + me.group) * GROUP + me.entry;
        uint32_t const to = smem + Layout::SMEM_STAGING + tile % NUM_STAGES * Layout::STAGE + row * Layout::ROW;
        int const at = 128 * me.quarter + 16 * me.part;
        cp_async16(to + at, payload + at, entry), cp_async16(to + at + 64, payload + at + 64, entry);
        if (me.quarter == QUARTERS - 1) cp_async16(to + at + 128, payload + at + 128, entry);
        if (me.part == 0) {
            cp_async4(to + PAYLOAD + 4 * me.quarter, scale + me.quarter / 2 * 4, entry);
            if (me.quarter == 0)
                store_shared(smem + Layout::SMEM_LIVE + (tile % NUM_STAGES * TILE + row) * 4, uint32_t(entry));
        }
    }
    // The first NUM_STAGES tiles. A lane looks up every fourth tile's entry, and others have it from there.
    static constexpr int LOOKS = (NUM_STAGES * ROUNDS + 3) / 4;
    __device__ __forceinline__ void look(int (&found)[LOOKS]) const {
#pragma unroll
        for (int i = 0; i < LOOKS; ++i) {
            int const at = 4 * i + me.part;
            found[i] = index(at / ROUNDS, at % ROUNDS);
        }
    }
    __device__ __forceinline__ void begin(const int (&found)[LOOKS]) const {
#pragma unroll 1
        for (int tile = 0; tile < NUM_STAGES; ++tile) {
            if (tile < share.count) {
#pragma unroll
                for (int round = 0; round < ROUNDS; ++round) {
                    int const at = tile * ROUNDS + round;
                    int mine = 0;
#pragma unroll
                    for (int i = 0; i < LOOKS; ++i) {
                        int const other = __shfl_sync(~0u, found[i], me.lane / 4 * 4 + at % 4);
                        mine = at / 4 == i ? other : mine;
                    }
                    ask(tile, round, mine);
                }
            }
            cp_async_commit();
        }
    }
};

// ---- scores

// This warp's quarter of the scores of a group in a round; its scales, as bf16, for who sums values.
__device__ __forceinline__ void score(const Queries& queries, const Place& me, int tile, int round, uint32_t smem) {
    int const first = (round * WARPS / QUARTERS + me.group) * GROUP, row = first + me.entry;
    uint32_t const base = smem + Layout::SMEM_STAGING + tile % NUM_STAGES * Layout::STAGE + row * Layout::ROW;
    uint32_t const from = base + 128 * me.quarter + 16 * me.part;
    uint32_t const scales = load_shared(base + PAYLOAD + 4 * me.quarter) >> me.quarter % 2 * 16;
    uint32_t const one = scale_pair(scales & 0xFF), two = scale_pair(scales >> 8 & 0xFF);
    uint4 const codes = load_shared16(from), next = load_shared16(from + 64);
    float sums[4][4] = {};
    queries.multiply(sums, 0, decode8(codes.x, codes.y, one), decode8(codes.z, codes.w, one));
    bool const rope = me.quarter == QUARTERS - 1;
    if (rope)
        queries.multiply(sums, 1, next, load_shared16(from + 128));
    else
        queries.multiply(sums, 1, decode8(next.x, next.y, two), decode8(next.z, next.w, two));
    if (me.part == 0) {
        uint32_t const to = smem + Layout::SMEM_SCALES + ((tile % 2 * FP8_TILES + 2 * me.quarter) * TILE + row) * 2;
        store_shared2(to, one);
        if (!rope) store_shared2(to + TILE * 2, two);
    }
    // Columns 2 part and 2 part + 1 are entries part and part + 4.
    uint32_t const to = smem + Layout::SMEM_SCORES + me.quarter * Layout::SCORES + me.lane / 4 * Layout::SCORE_ROW +
                        (first + me.part) * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        store_shared(to + i / 2 * 8 * Layout::SCORE_ROW + i % 2 * 16,
                     __float_as_uint((sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i])));
}

// ---- probabilities: of a head, one a warp

struct Softmax {
    float top = -INFINITY;        // running maximum, up to RESCALE_THRESHOLD too small; -inf: no entry so far
    float sum = 0, rounded = 0;   // of this lane's columns: of p, for lse; of p in bf16, which P V has

    __device__ __forceinline__ void step(const Place& me, int tile, uint32_t smem) {
        float s[TILE / 32], largest = -INFINITY;
#pragma unroll
        for (int i = 0; i < TILE / 32; ++i) {
            int const entry = me.lane + 32 * i;
            uint32_t const from = smem + Layout::SMEM_SCORES + me.warp * Layout::SCORE_ROW + entry * 4;
            float part[QUARTERS];
#pragma unroll
            for (int q = 0; q < QUARTERS; ++q) part[q] = __uint_as_float(load_shared(from + q * Layout::SCORES));
            uint32_t const live = load_shared(smem + Layout::SMEM_LIVE + (tile % NUM_STAGES * TILE + entry) * 4);
            s[i] = live ? ((part[0] + part[1]) + (part[2] + part[3])) * TO_LOG2 : -INFINITY;
            largest = fmaxf(largest, s[i]);
        }
#pragma unroll
        for (int lanes = 1; lanes < 32; lanes *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
        float alpha = 1.f;
        if (largest > top + RESCALE_THRESHOLD) {
            alpha = exp2_fast(top - largest), top = largest;
            sum *= alpha, rounded *= alpha;
        }
        float const zero = top == -INFINITY ? 0.f : top;
#pragma unroll
        for (int i = 0; i < TILE / 32; ++i) {
            float const p = exp2_fast(s[i] - zero);
            uint32_t const bits = pack_bf16x2(p, 0.f);
            store_shared2(smem + Layout::SMEM_PROBS + me.warp * Layout::PROB_ROW + (me.lane + 32 * i) * 2, bits);
            sum += p, rounded += __uint_as_float(bits << 16);
        }
        if (me.lane == 0) store_shared(smem + Layout::SMEM_ALPHA + me.warp * 4, __float_as_uint(alpha));
    }
};

// ---- values: O^T of 32 dims a warp; a lane has dims 4 (lane / 4) to 3 on

// Pairs of two entries of each dim -> the A fragments of dims 0 and 1, and of dims 2 and 3.
struct Values {
    uint32_t a[2][4];
};
__device__ __forceinline__ Values values_of(const Place& me, uint32_t rows, uint32_t scales) {
    Values v;
    int const r = me.lane / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {  // entries 2 part and one on; 8 on
        uint32_t const from = rows + h * 8 * Layout::ROW;
        if (me.warp < 2 * FP8_TILES) {
            uint32_t const at = from + DIMS * me.warp + 4 * r;
            uint32_t const one = load_shared(at), two = load_shared(at + Layout::ROW), scale = load_shared(scales + 16 * h);
            uint2 const low = decode_pairs(__byte_perm(one, two, 0x5410), scale);
            uint2 const high = decode_pairs(__byte_perm(one, two, 0x7632), scale);
            v.a[0][2 * h] = low.x, v.a[0][2 * h + 1] = low.y, v.a[1][2 * h] = high.x, v.a[1][2 * h + 1] = high.y;
        } else {
            uint32_t const at = from + NOPE + 2 * DIMS * (me.warp - 2 * FP8_TILES) + 8 * r;
            uint2 const one = load_shared8(at), two = load_shared8(at + Layout::ROW);
            v.a[0][2 * h] = __byte_perm(one.x, two.x, 0x5410), v.a[0][2 * h + 1] = __byte_perm(one.x, two.x, 0x7632);
            v.a[1][2 * h] = __byte_perm(one.y, two.y, 0x5410), v.a[1][2 * h + 1] = __byte_perm(one.y, two.y, 0x7632);
        }
    }
    return v;
}

// o[m][n]: dims 2 m and 2 m + 1 of the lane's four, heads 8 n + 2 part and one on.
__device__ __forceinline__ void add_values(float (&o)[2][2][4], const Place& me, int tile, uint32_t smem) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        float2 const alpha = load_shared_pair(smem + Layout::SMEM_ALPHA + (8 * n + 2 * me.part) * 4);
#pragma unroll
        for (int m = 0; m < 2; ++m)
            o[m][n][0] *= alpha.x, o[m][n][1] *= alpha.y, o[m][n][2] *= alpha.x, o[m][n][3] *= alpha.y;
    }
    uint32_t const rows =
        smem + Layout::SMEM_STAGING + tile % NUM_STAGES * Layout::STAGE + 2 * me.part * Layout::ROW;
    uint32_t const scales =
        smem + Layout::SMEM_SCALES + ((tile % 2 * FP8_TILES + me.warp / 2) * TILE + 2 * me.part) * 2;
    uint32_t const probs = smem + Layout::SMEM_PROBS + (me.lane / 16 * 8 + me.lane % 8) * Layout::PROB_ROW +
                           me.lane / 8 % 2 * 16;
#pragma unroll
    for (int k = 0; k < TILE / 16; ++k) {
        uint4 const p = ldmatrix_x4(probs + 32 * k);
        Values const v = values_of(me, rows + 16 * k * Layout::ROW, scales + 32 * k);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            mma(o[m][0], v.a[m][0], v.a[m][1], v.a[m][2], v.a[m][3], p.x, p.y);
            mma(o[m][1], v.a[m][0], v.a[m][1], v.a[m][2], v.a[m][3], p.z, p.w);
        }
    }
}

// ---- joining

__device__ __forceinline__ float4 of_head(const float (&o)[2][2][4], int n, int j) {
    return make_float4(o[0][n][j], o[0][n][2 + j], o[1][n][j], o[1][n][2 + j]);
}

// A head's factors of the parts of its blocks, of which lane b has the stats of block b (none: -inf, 0, 0); and lse.
struct Weights {
    float weight, lse;
    __device__ __forceinline__ Weights(float4 stat, float sink) {
        float top = stat.x;
#pragma unroll
        for (int lanes = 1; lanes < MOST_BLOCKS; lanes *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, lanes));
        bool const any = top > -INFINITY;
        weight = any ? exp2_fast(stat.x - top) : 0.f;
        float sum = weight * stat.y, rounded = weight * stat.z;
#pragma unroll
        for (int lanes = 1; lanes < MOST_BLOCKS; lanes *= 2)
            sum += __shfl_xor_sync(~0u, sum, lanes), rounded += __shfl_xor_sync(~0u, rounded, lanes);
        // Infinite if the sink drowns all else; `any`: then the largest p is at least 2^-RESCALE_THRESHOLD.
        weight = any ? weight / (rounded + exp2_fast(sink * LOG2E - top)) : 0.f;
        lse = any ? (top + log2f(sum)) / LOG2E : INFINITY;
    }
};

// The block's O in fp32, and of each head the stats, to its shared memory, or to global memory.
template <bool CLUSTERED>
__device__ __forceinline__ void leave_sums(const Problem& p, const Item& item, const Place& me, Softmax& softmax,
                                           const float (&o)[2][2][4], uint32_t smem) {
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        softmax.sum += __shfl_xor_sync(~0u, softmax.sum, lanes);
        softmax.rounded += __shfl_xor_sync(~0u, softmax.rounded, lanes);
    }
    int64_t const row = int64_t(item.rank) * p.rows + int64_t(item.query) * p.heads + item.head;
    int const dim = me.warp * DIMS + me.lane / 4 * 4;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            int const head = 8 * n + 2 * me.part + j;
            float4 const v = of_head(o, n, j);
            if (CLUSTERED)
                store_shared16(smem + Layout::SMEM_SUMS + head * Layout::SUM_ROW + dim * 4,
                               make_uint4(__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z),
                                          __float_as_uint(v.w)));
            else if (head < item.heads)
                *reinterpret_cast<float4*>(p.parts + (row + head) * HEAD_DIM + dim) = v;
        }
    }
    if (me.lane) return;
    if (CLUSTERED)
        store_shared16(smem + Layout::SMEM_STATS + me.warp * 16,
                       make_uint4(__float_as_uint(softmax.top), __float_as_uint(softmax.sum),
                                  __float_as_uint(softmax.rounded), 0));
    else if (me.warp < item.heads)
        p.stats[row + me.warp] = make_float4(softmax.top, softmax.sum, softmax.rounded, 0);
}

// What the sums of each block are to be multiplied by, [BLOCK_M][MOST_BLOCKS] to shared memory; and lse.
__device__ __forceinline__ void weigh(const Problem& p, const Item& item, const Place& me, uint32_t smem) {
    float4 stat = make_float4(-INFINITY, 0, 0, 0);
    int const block = me.lane % MOST_BLOCKS, head = item.head + min(me.warp, item.heads - 1);
    float const sink = __ldg(p.sink + head);
    if (block < p.blocks.by) stat = load_cluster16(in_block(block, smem + Layout::SMEM_STATS + me.warp * 16));
    Weights const w(stat, sink);
    if (me.lane < MOST_BLOCKS)
        store_shared(smem + Layout::SMEM_WEIGHTS + (me.warp * MOST_BLOCKS + me.lane) * 4, __float_as_uint(w.weight));
    if (item.rank == 0 && me.lane == 0 && me.warp < item.heads) p.lse[int64_t(item.query) * p.heads + head] = w.lse;
}

__device__ __forceinline__ void add_part(float (&sum)[4], float weight, float4 v) {
    sum[0] = fmaf(weight, v.x, sum[0]), sum[1] = fmaf(weight, v.y, sum[1]);
    sum[2] = fmaf(weight, v.z, sum[2]), sum[3] = fmaf(weight, v.w, sum[3]);
}

// This block's part of the outputs: every p.blocks.by-th piece of NUM_THREADS times 4 dims.
__device__ __forceinline__ void join(const Problem& p, const Item& item, uint32_t smem) {
    constexpr int BATCH = 4;  // blocks that a thread reads at once
    __nv_bfloat16* const out = p.out + (int64_t(item.query) * p.heads + item.head) * HEAD_DIM;
    int const blocks = p.blocks.by;
#pragma unroll 1
    for (int at = (item.rank * NUM_THREADS + threadIdx.x) * 4; at < item.heads * HEAD_DIM;
         at += blocks * NUM_THREADS * 4) {
        int const row = at / HEAD_DIM;
        uint32_t const from = smem + Layout::SMEM_SUMS + row * Layout::SUM_ROW + at % HEAD_DIM * 4;
        uint32_t const weights = smem + Layout::SMEM_WEIGHTS + row * MOST_BLOCKS * 4;
        float sum[4] = {};
#pragma unroll 1
        for (int first = 0; first < blocks; first += BATCH) {
            float4 v[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i)  // past the last block the last one again, whose weight there is 0
                v[i] = load_cluster16(in_block(min(first + i, blocks - 1), from));
            uint4 const four = load_shared16(weights + first * 4);
            float const weight[4] = {__uint_as_float(four.x), __uint_as_float(four.y), __uint_as_float(four.z),
                                     __uint_as_float(four.w)};
#pragma unroll
            for (int i = 0; i < BATCH; ++i) add_part(sum, weight[i], v[i]);
        }
        *reinterpret_cast<uint2*>(out + at) = make_uint2(pack_bf16x2(sum[0], sum[1]), pack_bf16x2(sum[2], sum[3]));
    }
}

// ---- kernels

// Grid (B S tiles of heads, times blocks that share a list). CLUSTERED: these are a cluster.
template <bool CLUSTERED>
__global__ void __launch_bounds__(NUM_THREADS, 1) attend(const __grid_constant__ Problem p) {
    extern __shared__ uint8_t dynamic[];
    stamp_start(), stamp(1);
    uint32_t const smem = (smem_address(dynamic) + 127) & ~127u;
    Item const item(p);
    Place const me;
    if (!CLUSTERED) programmatic::trigger();
    Lists const lists = {p.window, p.compressed, p.window_index + int64_t(item.query) * p.nw,
                         p.compressed_index + int64_t(item.query) * p.nc};

    // Lists are nearly always full: their first indices are asked for together with the lengths, not after them.
    int const window = min(max(__ldg(p.window_length + item.batch), 0), p.nw);
    int const compressed = min(max(__ldg(p.compressed_length + item.batch), 0), p.nc);
    Gather gather = {lists, Share(p.nw, p.nc, item.rank, p.blocks), me, smem};
    int found[Gather::LOOKS];
    gather.look(found);
    Queries queries;
    queries.load(p, item, me);
    if (window != p.nw || compressed != p.nc) {
        gather.share = Share(window, compressed, item.rank, p.blocks);
        gather.look(found);
    }
    stamp(2);
    gather.begin(found);
    int next[ROUNDS];  // indices of the first tile that is not asked for yet
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) next[round] = gather.index(NUM_STAGES, round);
    stamp(3);

    float o[2][2][4] = {};
    Softmax softmax;
#pragma unroll 1
    for (int tile = 0; tile < gather.share.count; ++tile) {
        if (tile == 0)
            cp_async_wait<NUM_STAGES - 1>();
        else
            cp_async_wait<NUM_STAGES - 2>();
        __syncwarp();  // a lane has asked for the scale of four
        if (tile == 0) stamp(4);
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) score(queries, me, tile, round, smem);
        __syncthreads();  // scores and the tile are there; values of the tile ahead are added
        if (tile == 0) stamp(5);
        if (tile > 0) {
            int const ahead = tile - 1 + NUM_STAGES;
            if (ahead < gather.share.count) {
#pragma unroll
                for (int round = 0; round < ROUNDS; ++round) gather.ask(ahead, round, next[round]);
#pragma unroll
                for (int round = 0; round < ROUNDS; ++round) next[round] = gather.index(ahead + 1, round);
            }
            cp_async_commit();
        }
        softmax.step(me, tile, smem);
        __syncthreads();
        if (tile == 0) stamp(6);
        add_values(o, me, tile, smem);
        if (tile == 0) stamp(7);
    }
    stamp(8);
    cp_async_wait<0>();
    if (CLUSTERED) __syncthreads();  // the last values are read
    leave_sums<CLUSTERED>(p, item, me, softmax, o, smem);
    stamp(9);
    if constexpr (CLUSTERED) {
        cluster_sync();
        stamp(10);
        weigh(p, item, me, smem);
        __syncthreads();
        join(p, item, smem);
        stamp(11);
        cluster_sync();  // the others may still read this block's
    }
    stamp(12), stamp_end();
}

// A block a row of B S H, 128 threads: the parts that blocks without a cluster have left.
__global__ void __launch_bounds__(128) join_parts(const __grid_constant__ Problem p) {
    int const row = blockIdx.x, lane = threadIdx.x % 32, block = lane % MOST_BLOCKS;
    float const sink = __ldg(p.sink + row % p.heads);
    programmatic::wait();
    float4 stat = make_float4(-INFINITY, 0, 0, 0), v[4];
    const float4* const from = reinterpret_cast<const float4*>(p.parts + int64_t(row) * HEAD_DIM) + threadIdx.x;
    int64_t const step = int64_t(p.rows) * (HEAD_DIM / 4);
    int const blocks = p.blocks.by;
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = __ldcg(from + min(i, blocks - 1) * step);
    if (block < blocks) stat = __ldcg(p.stats + int64_t(block) * p.rows + row);
    Weights const w(stat, sink);
    float sum[4] = {};
#pragma unroll 1
    for (int first = 0; first < blocks; first += 4) {
        if (first) {
#pragma unroll
            for (int i = 0; i < 4; ++i) v[i] = __ldcg(from + min(first + i, blocks - 1) * step);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) add_part(sum, __shfl_sync(~0u, w.weight, (first + i) % MOST_BLOCKS), v[i]);
    }
    reinterpret_cast<uint2*>(p.out + int64_t(row) * HEAD_DIM)[threadIdx.x] =
        make_uint2(pack_bf16x2(sum[0], sum[1]), pack_bf16x2(sum[2], sum[3]));
    if (threadIdx.x == 0) p.lse[row] = w.lse;
}

// ---- launcher

inline cudaError_t prepare(int blocks) {
    auto const clustered = attend<true>, parted = attend<false>;
    auto error = cudaFuncSetAttribute(clustered, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED);
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute(parted, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED);
    if (error != cudaSuccess || blocks <= 8) return error;
    return cudaFuncSetAttribute(clustered, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}

}  // namespace fmha::once

// Clusters of `blocks` blocks, 1 to 16, that this GPU has room for at once, into *fit. -> a cudaError_t.
extern "C" int clusters_at_once(int blocks, int* fit) {
    using namespace fmha::once;
    auto const error = prepare(blocks);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = blocks, attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks), config.blockDim = dim3(NUM_THREADS);
    config.dynamicSmemBytes = SHARED, config.attrs = &attribute, config.numAttrs = 1;
    return cudaOccupancyMaxActiveClusters(fit, attend<true>, &config);
}

// Device pointers. parts: fp32 (blocks, B S H, 512), stats: fp32 (blocks, B S H, 4), scratch, or null: then blocks are
// clusters. page_*: log2 of the entries of a page, stride_*: its bytes; blocks: that share a list, 1 to 16, each with 16
// heads of a query. -> a cudaError_t.
extern "C" int launch_at_once(const void* q, const uint8_t* window, const int* window_index, const int* window_length,
                              const uint8_t* compressed, const int* compressed_index, const int* compressed_length,
                              const float* sink, void* out, float* lse, float* parts, float* stats, int batch,
                              int queries, int heads, int nw, int nc, int page_window, int stride_window,
                              int page_compressed, int stride_compressed, int blocks) {
    using namespace fmha::once;
    int const tiles = (heads + BLOCK_M - 1) / BLOCK_M;
    Problem const p = {
        static_cast<const __nv_bfloat16*>(q),
        {window, uint32_t(stride_window), uint32_t(page_window)},
        {compressed, uint32_t(stride_compressed), uint32_t(page_compressed)},
        window_index, window_length, compressed_index, compressed_length, sink,
        static_cast<__nv_bfloat16*>(out), lse, parts, reinterpret_cast<float4*>(stats), batch * queries * heads,
        heads, nw, nc, fmha::Divisor(queries), fmha::Divisor(tiles), fmha::Divisor(blocks),
    };
    auto const error = prepare(blocks);
    if (error != cudaSuccess) return error;
    dim3 const grid(batch * queries * tiles * blocks), block(NUM_THREADS);
    if (!parts) return programmatic::launch_clusters(attend<true>, grid, block, SHARED, blocks, false, p);
    attend<false><<<grid, block, SHARED>>>(p);
    if (auto const launched = cudaGetLastError(); launched != cudaSuccess) return launched;
    return programmatic::launch(join_parts, dim3(p.rows), dim3(128), 0, p);
}

#ifdef STAMPS
extern "C" int read_stamps(long long* to, int blocks) {
    return cudaMemcpyFromSymbol(to, fmha::once::stamps, sizeof(long long) * 16 * blocks);
}
#endif
