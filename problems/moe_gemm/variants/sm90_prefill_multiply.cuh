// sm90_prefill's products: a warp decodes its rows of a chunk into registers, and multiplies by the chunk's slots.
#pragma once

#include "sm90_prefill_form.cuh"
#include "sm90_wgmma.cuh"

namespace prefill {

// From lane 0, so that the compiler knows it to be the same for all, and keeps it where one instruction serves a warp.
// In the PTX model lanes have parted by here, unless the text is edited as tests/problems/test_moe_prefill.py does.
__device__ __forceinline__ uint32_t same(uint32_t v) {
    asm volatile("shfl.sync.idx.b32 %0, %0, 0, 0x1f, 0xffffffff;" : "+r"(v));
    return v;
}

// What a lane has of a unit: a whole block of each of two rows, for each part.
template <int PARTS>
struct Words {
    uint4 part[PARTS];
    uint32_t scales;
};

// words, scales: where this lane's begin, for the parts that its warp has.
template <int PARTS>
__device__ __forceinline__ Words<PARTS> load_unit(uint32_t words, uint32_t scales) {
    if constexpr (PARTS == 2)
        return {{load_shared16(words), load_shared16(words + 512)}, load_shared(scales)};
    else
        return {{load_shared16(words)}, load_shared2(scales)};
}

// a[step][part]: fragments of the unit's four steps of 16 columns.
template <int PARTS>
__device__ __forceinline__ void decode(const Words<PARTS>& words, uint32_t (&a)[4][PARTS][4]) {
#pragma unroll
    for (int q = 0; q < PARTS; ++q) {
        const uint32_t scale[2] = {q ? units::scale<2>(words.scales) : units::scale<0>(words.scales),
                                   q ? units::scale<3>(words.scales) : units::scale<1>(words.scales)};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t upper[4], lower[4];
            units::decode(half ? words.part[q].z : words.part[q].x, scale[0], upper);
            units::decode(half ? words.part[q].w : words.part[q].y, scale[1], lower);
#pragma unroll
            for (int step = 0; step < 2; ++step) {
                uint32_t (&to)[4] = a[2 * half + step][q];
                to[0] = upper[2 * step], to[1] = lower[2 * step];
                to[2] = upper[2 * step + 1], to[3] = lower[2 * step + 1];
            }
        }
    }
}

template <int N, int PARTS, int SUMS>
__device__ __forceinline__ void mma_rows(float (&d)[PARTS][SUMS], const uint32_t (&a)[4][PARTS][4],
                                              uint32_t rows) {
    warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
        for (int q = 0; q < PARTS; ++q)
            wgmma<N>(d[q], a[step][q], smem_desc_of(rows + 2 * step));  // 16 columns are 32 bytes
    warpgroup_commit_batch();
}

// For 8 (eights + 1) rows, by the bits of `eights` from SPAN / 2 down. A switch around each loop would be the obvious
// thing; but ptxas wants registers for the fragments of all loops at once, and gives up. A switch here costs a table.
template <int SPAN, int LEAST, int PARTS, int SUMS>
__device__ __forceinline__ void mma_chunk(float (&d)[PARTS][SUMS], const uint32_t (&a)[4][PARTS][4],
                                               uint32_t rows, unsigned eights) {
    if constexpr (SPAN == 1) {
        mma_rows<8 * (LEAST + 1)>(d, a, rows);
    } else if constexpr (8 * LEAST + 4 * SPAN >= 2 * SUMS) {  // there is no upper half
        mma_chunk<SPAN / 2, LEAST>(d, a, rows, eights);
    } else if (eights & SPAN / 2) {
        mma_chunk<SPAN / 2, LEAST + SPAN / 2>(d, a, rows, eights);
    } else {
        mma_chunk<SPAN / 2, LEAST>(d, a, rows, eights);
    }
}

// d[q] += part q of this warp's, times 8 (eights + 1) rows, over all chunks of a tile. words, scales: the lane's of the
// first stage.
template <class F>
__device__ __forceinline__ void mma_tile(float (&d)[F::PARTS][F::SUMS], uint32_t smem,
                                         PipelineState<F::NUM_STAGES>& stage, int chunks, uint32_t words_at,
                                         uint32_t scales_at, unsigned eights) {
    constexpr int SPAN = F::EIGHTS <= 8 ? 8 : 16;
    static_assert(F::EIGHTS <= 16, "wgmma has up to 128 columns here: sm90_wgmma.cuh");
    uint32_t a[4][F::PARTS][4];
    const bool frees = threadIdx.x % 32 == 0;
    keep_in_register(words_at), keep_in_register(scales_at);
    const auto full = [&] { return smem + F::FULL_BARRIERS + 8 * stage.index(); };
    const auto load = [&] {
        return load_unit<F::PARTS>(words_at + stage.index() * F::STAGE_BYTES,
                                   scales_at + stage.index() * F::STAGE_BYTES);
    };
    wait(full(), stage.phase());
    Words<F::PARTS> words = load();
#pragma unroll 1
    for (int left = chunks; left > 0; --left) {
        const uint32_t rows = same(smem_desc_low(smem + F::SMEM_B) + stage.index() * (F::STAGE_BYTES / 16));
        const uint32_t empty = smem + F::EMPTY_BARRIERS + 8 * stage.index();
        decode(words, a);
        stage.advance();
        if (left > 1) {  // the next unit's words come while the products are issued
            wait(full(), stage.phase());
            words = load();
        }
        mma_chunk<SPAN, 0>(d, a, rows, eights);
        warpgroup_wait<0>();
#pragma unroll
        for (int i = 0; i < 4 * F::PARTS; ++i) hold(a[i / F::PARTS][i % F::PARTS]);
        __syncwarp();
        if (frees) arrive(empty);
    }
#pragma unroll
    for (int q = 0; q < F::PARTS; ++q) warpgroup_fence_operand(d[q]);
}

}  // namespace prefill
