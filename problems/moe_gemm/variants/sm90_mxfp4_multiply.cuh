// sm90_mxfp4's products: a warp decodes its rows of a chunk into registers, multiplies by the chunk's slots, and adds what
// comes out, times the slots' scales, to its sums: tensor cores keep 14 bits of theirs.
#pragma once

#include "sm90_mxfp4_form.cuh"
#include "sm90_prefill_multiply.cuh"
#include "sm90_wgmma.cuh"

namespace mxfp4 {

// Where a lane's share of a chunk lies in shared memory: words of its first part, four bytes of scales, by which there is
// a table of e4m3, and what its slots' scales are. rows: of activations, as a descriptor has them.
struct Chunk {
    uint32_t words, scales, tables, slot_scales, rows;
};

// a[step]: fragments of part q of the unit, in four steps of 32 columns.
__device__ __forceinline__ void decode_part(const Chunk& chunk, uint32_t scales, int q, uint32_t (&a)[4][4]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const uint4 v = load_shared16(chunk.words + 512 * (2 * q + r));
        const uint2 table = load_shared8(chunk.tables + __byte_perm(scales, 0, 0x4440 | 2 * q + r));
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int step = 0; step < 4; ++step) decode(words[step], table, a[step][r], a[step][r + 2]);
    }
}

// Start t = a part, times N rows.
template <int N>
__device__ __forceinline__ void start(float (&t)[N / 2], const uint32_t (&a)[4][4], uint32_t rows) {
    warpgroup_arrive();
    wgmma_e4m3<N, false>(t, a[0], smem_desc_of(rows));
#pragma unroll
    for (int step = 1; step < 4; ++step)
        wgmma_e4m3<N, true>(t, a[step], smem_desc_of(rows + 2 * step));  // 32 columns are 32 bytes
    warpgroup_commit_batch();
}

// d from FIRST_SUM on += t times scales of N slots, once all but the last LEFT products are there. scales: this lane's of
// each sixteen: of slots 2 c, 2 c + 1, and 8 on.
template <int FIRST_SUM, int LEFT, int N, int SUMS>
__device__ __forceinline__ void add(float (&d)[SUMS], float (&t)[N / 2], uint32_t scales) {
    warpgroup_wait<LEFT>();
    warpgroup_fence_operand(t);
#pragma unroll
    for (int i = 0; i < N / 8; i += 2) {
        const uint4 scale = load_shared16(scales + 32 * i);
#pragma unroll
        for (int j = 0; j < 8 && 4 * i + j < N / 2; ++j) {
            const uint32_t of = j < 4 ? (j % 2 ? scale.y : scale.x) : (j % 2 ? scale.w : scale.z);
            d[FIRST_SUM + 4 * i + j] += t[4 * i + j] * __uint_as_float(of);
        }
    }
}

// d += a chunk's products with N slots. a: fragments of part 0. With two parts the other is decoded, and sums are added,
// while products run.
template <int N, int PARTS, int SUMS>
__device__ __forceinline__ void add_products(float (&d)[PARTS][SUMS], const Chunk& chunk, const uint32_t (&a)[4][4],
                                             uint32_t scales) {
    constexpr int LOWER = N < HALF ? N : HALF, UPPER = N - LOWER;
    float lower[LOWER / 2];
    start<LOWER>(lower, a, chunk.rows);
    if constexpr (PARTS == 1) {
        add<0, 0, LOWER>(d[0], lower, chunk.slot_scales);
    } else {
        uint32_t b[4][4];
        if constexpr (UPPER == 0) {
            float next[LOWER / 2];
            decode_part(chunk, scales, 1, b);
            start<LOWER>(next, b, chunk.rows);
            add<0, 1, LOWER>(d[0], lower, chunk.slot_scales);
            add<0, 0, LOWER>(d[1], next, chunk.slot_scales);
        } else {
            constexpr int AT = HALF / 2;  // of their sums
            const uint32_t rows = chunk.rows + HALF * 128 / 16, slot_scales = chunk.slot_scales + HALF * 4;
            float upper[UPPER / 2];
            start<UPPER>(upper, a, rows);
            decode_part(chunk, scales, 1, b);
            add<0, 1, LOWER>(d[0], lower, chunk.slot_scales);
            start<LOWER>(lower, b, chunk.rows);
            add<AT, 1, UPPER>(d[0], upper, slot_scales);
            start<UPPER>(upper, b, rows);
            add<0, 1, LOWER>(d[1], lower, chunk.slot_scales);
            add<AT, 0, UPPER>(d[1], upper, slot_scales);
        }
#pragma unroll
        for (int step = 0; step < 4; ++step) hold(b[step]);
    }
#pragma unroll
    for (int step = 0; step < 4; ++step) hold(a[step]);
}

// For 8 (eights + 1) slots, as prefill::mma_chunk finds them. The sums are in each case: where cases meet behind products,
// ptxas finds no registers for these.
template <int SPAN, int LEAST, int PARTS, int SUMS>
__device__ __forceinline__ void add_chunk(float (&d)[PARTS][SUMS], const Chunk& chunk, const uint32_t (&a)[4][4],
                                          uint32_t scales, unsigned eights) {
    if constexpr (SPAN == 1)
        add_products<8 * (LEAST + 1)>(d, chunk, a, scales);
    else if constexpr (8 * LEAST + 4 * SPAN >= 2 * SUMS)  // there is no upper half
        add_chunk<SPAN / 2, LEAST>(d, chunk, a, scales, eights);
    else if (eights & SPAN / 2)
        add_chunk<SPAN / 2, LEAST + SPAN / 2>(d, chunk, a, scales, eights);
    else
        add_chunk<SPAN / 2, LEAST>(d, chunk, a, scales, eights);
}

// d[q] += part q of this warp's, times `count` slots, over all chunks of a tile. first: of the first stage, without rows.
template <class F>
__device__ __forceinline__ void mma_tile(float (&d)[F::PARTS][F::SUMS], uint32_t smem,
                                         PipelineState<F::NUM_STAGES>& stage, int chunks, const Chunk& first, int count) {
#pragma unroll 1
    for (int left = chunks; left > 0; --left, stage.advance()) {
        const uint32_t at = stage.index() * F::STAGE_BYTES;
        const Chunk chunk{first.words + at, first.scales + at, first.tables, first.slot_scales + at,
                          prefill::same(smem_desc_low(smem + F::SMEM_B) + at / 16)};
        wait(smem + F::FULL_BARRIERS + 8 * stage.index(), stage.phase());
        const uint32_t scales = F::PARTS == 2 ? load_shared(chunk.scales) : load_shared2(chunk.scales);
        uint32_t a[4][4];
        decode_part(chunk, scales, 0, a);
        add_chunk<F::EIGHTS <= 8 ? 8 : 16, 0>(d, chunk, a, scales, unsigned(count - 1) / 8);
        warp_arrive(smem + F::EMPTY_BARRIERS + 8 * stage.index());
    }
}

}  // namespace mxfp4
