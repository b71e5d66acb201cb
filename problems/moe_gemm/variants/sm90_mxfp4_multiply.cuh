// sm90_mxfp4's products: a warp decodes its rows of a chunk into registers, multiplies by the chunk's slots, 64 at a
// time, and adds what comes out, times the slots' scales, to its sums: tensor cores keep 14 bits of theirs.
#pragma once

#include "sm90_mxfp4_form.cuh"
#include "sm90_prefill_multiply.cuh"
#include "sm90_wgmma.cuh"

namespace mxfp4 {

// What a lane has of a unit: a block of each of two rows, for each part; word[2 q + r]. The parts' scales are bytes.
template <int PARTS>
struct Words {
    uint4 word[2 * PARTS];
    uint32_t scales;
};

template <int PARTS>
__device__ __forceinline__ Words<PARTS> load_unit(uint32_t words, uint32_t scales) {
    Words<PARTS> unit;
#pragma unroll
    for (int part = 0; part < 2 * PARTS; ++part) unit.word[part] = load_shared16(words + 512 * part);
    unit.scales = PARTS == 2 ? load_shared(scales) : load_shared2(scales);
    return unit;
}

// a[q][step]: fragments of the unit's four steps of 32 columns. tables: of e4m3, in shared memory.
template <int PARTS>
__device__ __forceinline__ void decode(const Words<PARTS>& unit, uint32_t tables, uint32_t (&a)[PARTS][4][4]) {
#pragma unroll
    for (int part = 0; part < 2 * PARTS; ++part) {
        const uint2 table = load_shared8(tables + __byte_perm(unit.scales, 0, 0x4440 | part));
        const uint32_t words[4] = {unit.word[part].x, unit.word[part].y, unit.word[part].z, unit.word[part].w};
#pragma unroll
        for (int step = 0; step < 4; ++step)
            decode(words[step], table, a[part / 2][step][part % 2], a[part / 2][step][part % 2 + 2]);
    }
}

// d[q] += part q of this warp's, times N rows, from the sum FIRST_SUM on. scales: of this lane's slots.
template <int FIRST_SUM, int N, int PARTS, int SUMS>
__device__ __forceinline__ void add_rows(float (&d)[PARTS][SUMS], const uint32_t (&a)[PARTS][4][4], uint32_t rows,
                                         uint32_t scales) {
    float t[PARTS][N / 2];
    warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
        for (int q = 0; q < PARTS; ++q)
            if (step == 0)
                wgmma_e4m3_first<N>(t[q], a[q][step], smem_desc_of(rows));
            else
                wgmma_e4m3<N>(t[q], a[q][step], smem_desc_of(rows + 2 * step));  // 32 columns are 32 bytes
    warpgroup_commit_batch();
    warpgroup_wait<0>();
#pragma unroll
    for (int q = 0; q < PARTS; ++q) warpgroup_fence_operand(t[q]);
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
        const float2 scale = load_shared_pair(scales + 32 * i);
#pragma unroll
        for (int q = 0; q < PARTS; ++q)
#pragma unroll
            for (int j = 0; j < 4; ++j)
                d[q][FIRST_SUM + 4 * i + j] += t[q][4 * i + j] * (j % 2 ? scale.y : scale.x);
    }
}

// For 8 (eights + 1) rows of up to SIZE, as prefill::mma_chunk finds them. The additions are in each case: where cases
// meet behind the products, ptxas finds no registers for those.
template <int FIRST_SUM, int SIZE, int SPAN, int LEAST, int PARTS, int SUMS>
__device__ __forceinline__ void add_chunk(float (&d)[PARTS][SUMS], const uint32_t (&a)[PARTS][4][4], uint32_t rows,
                                          uint32_t scales, unsigned eights) {
    if constexpr (SPAN == 1)
        add_rows<FIRST_SUM, 8 * (LEAST + 1)>(d, a, rows, scales);
    else if constexpr (8 * LEAST + 4 * SPAN >= SIZE)  // there is no upper half
        add_chunk<FIRST_SUM, SIZE, SPAN / 2, LEAST>(d, a, rows, scales, eights);
    else if (eights & SPAN / 2)
        add_chunk<FIRST_SUM, SIZE, SPAN / 2, LEAST + SPAN / 2>(d, a, rows, scales, eights);
    else
        add_chunk<FIRST_SUM, SIZE, SPAN / 2, LEAST>(d, a, rows, scales, eights);
}

// A branch would part the warp's lanes at the loop's end.
__device__ __forceinline__ void arrive_if(uint32_t really, uint32_t barrier) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u32 p, %0, 0;\n@p mbarrier.arrive.shared::cta.b64 _, [%1];\n}\n" ::"r"(really),
        "r"(barrier)
        : "memory");
}

// d[q] += part q of this warp's, times `count` rows, over all chunks of a tile. words, scales: the lane's of the first
// stage, and where its slots' scales begin there.
template <class F>
__device__ __forceinline__ void mma_tile(float (&d)[F::PARTS][F::SUMS], uint32_t smem,
                                         PipelineState<F::NUM_STAGES>& stage, int chunks, uint32_t words,
                                         uint32_t scales, uint32_t slot_scales, int count) {
    uint32_t a[F::PARTS][4][4];
    const uint32_t frees = threadIdx.x % 32 == 0;
#pragma unroll 1
    for (int left = chunks; left > 0; --left, stage.advance()) {
        const uint32_t at = stage.index() * F::STAGE_BYTES;
        const uint32_t rows = prefill::same(smem_desc_low(smem + F::SMEM_B) + at / 16);
        wait(smem + F::FULL_BARRIERS + 8 * stage.index(), stage.phase());
        decode(load_unit<F::PARTS>(words + at, scales + at), smem + F::TABLE, a);
        add_chunk<0, HALF, HALF / 8, 0>(d, a, rows, slot_scales + at, unsigned(min(count, HALF) - 1) / 8);
        if constexpr (F::BLOCK_N > HALF)
            if (count > HALF)
                add_chunk<HALF / 2, F::BLOCK_N - HALF, HALF / 8, 0>(d, a, rows + HALF * 128 / 16,
                                                                    slot_scales + at + HALF * 4,
                                                                    unsigned(count - HALF - 1) / 8);
#pragma unroll
        for (int i = 0; i < 4 * F::PARTS; ++i) hold(a[i / 4][i % 4]);
        __syncwarp();
        arrive_if(frees, smem + F::EMPTY_BARRIERS + 8 * stage.index());
    }
}

}  // namespace mxfp4
