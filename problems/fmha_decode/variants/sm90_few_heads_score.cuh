// sm90_few_heads' scores: a block's queries, the entries that a warp gathers and decodes, and S = Q K^T.
#pragma once

#include "sm90_few_heads_block.cuh"

namespace fmha::few {

// ---- queries

// A warp's A fragments of all 512 dims: of sub-tile t, step s of 16 dims. Of its 64 dims a lane has the 16 that it
// decodes of an entry: from 16 (lane % 4) on, and in the sub-tile of bf16 8 from 8 (lane % 4) and 8 from 32 later on.
// That last sub-tile's fragments are in shared memory, [4 steps][32 lanes] of 16 bytes, for want of registers.
struct Queries {
    static constexpr uint32_t LANE = 16, STEP = 32 * LANE, PAIR = 8, ROW = 4;  // bytes, of the last sub-tile's
    uint32_t words[2][FP8_TILES][8];  // of row lane / 4 and of the one 8 below: pairs of dims, in order
    uint32_t last;                    // this lane's words of the last sub-tile

    // at: of the last sub-tile's, in shared memory. The block's barrier must follow.
    __device__ __forceinline__ void load(const Problem& p, const Item& item, uint32_t at) {
        last = at + threadIdx.x % 32 * LANE;
        int const lane = threadIdx.x % 32, quarter = lane % 4;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int const row = lane / 4 + 8 * h;
            bool const exists = row < item.heads;
            const __nv_bfloat16* const q =
                p.q + (int64_t(item.query) * p.heads + item.head + (exists ? row : 0)) * HEAD_DIM;
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                int const dim = 64 * t + (t < FP8_TILES ? 16 : 8) * quarter;
                if (t == FP8_TILES && threadIdx.x >= 32) continue;  // one warp brings these for all
                uint4 low = load_global16(q + dim), high = load_global16(q + dim + (t < FP8_TILES ? 8 : 32));
                if (!exists) low = high = make_uint4(0, 0, 0, 0);
                uint32_t const eight[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    if (t < FP8_TILES)
                        words[h][t][i] = eight[i];
                    else
                        store_shared(last + i / 2 * STEP + i % 2 * PAIR + h * ROW, eight[i]);
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
                uint4 const a = load_shared16(last + s * STEP);
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
    uint32_t live[NUM_STAGES];    // of the tiles that are asked for, the next one first: see is_live
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
        return staging + tile % NUM_STAGES * (WARPS * STAGED_GROUP);
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
        cp_async8(to + STAGED_SCALES + 8 * lane, scale, entry);
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

__device__ __forceinline__ void store_shared_pair(uint32_t to, float a, float b) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(a), "f"(b) : "memory");
}
__device__ __forceinline__ uint32_t byte_of(uint32_t word, int i) { return word >> 8 * i & 0xFF; }
// Whether the warp's entry i of a tile is one, see Gather.
__device__ __forceinline__ bool is_live(uint32_t live, int i) { return live >> 4 * i & 1; }

// Decode this warp's entries of a tile to `values`, and leave their scores at `scores`.
__device__ __forceinline__ void score(const Queries& queries, uint32_t staged, uint32_t live, uint32_t values,
                                      uint32_t scores) {
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quarter = lane % 4;
    uint32_t const from = staged + row * PAYLOAD + quarter * 16;
    uint32_t const to = values + (warp * ENTRIES + row) * 128, low_chunk = (2 * quarter ^ row) * 16;
    uint2 const scales = load_shared8(staged + STAGED_SCALES + 8 * lane);
    float sums[4][4] = {};
    uint4 next = load_shared16(from);
#pragma unroll
    for (int t = 0; t < FP8_TILES; ++t) {
        uint4 const codes = next;
        uint32_t const scale = scale_pair(byte_of(t < 4 ? scales.x : scales.y, t % 4));
        uint4 const low = decode8(codes.x, codes.y, scale), high = decode8(codes.z, codes.w, scale);
        next = load_shared16(from + 64 * (t + 1));  // ahead of stores, which it would wait for
        queries.multiply(sums, t, low, high);
        store_shared16(to + t * TILE + low_chunk, low);
        store_shared16(to + t * TILE + (low_chunk ^ 16), high);
    }
    uint4 const low = next, high = load_shared16(from + NOPE + 64);
    queries.multiply(sums, FP8_TILES, low, high);
    store_shared16(to + FP8_TILES * TILE + (quarter ^ row) * 16, low);
    store_shared16(to + FP8_TILES * TILE + ((4 + quarter) ^ row) * 16, high);
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[0][i] = (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
    bool const left = is_live(live, 2 * quarter), right = is_live(live, 2 * quarter + 1);
#pragma unroll
    for (int h = 0; h < 2; ++h)
        store_shared_pair(scores + (row + 8 * h) * SCORE_ROW + (warp * ENTRIES + 2 * quarter) * 4,
                          left ? sums[0][2 * h] : -INFINITY, right ? sums[0][2 * h + 1] : -INFINITY);
}

}  // namespace fmha::few
