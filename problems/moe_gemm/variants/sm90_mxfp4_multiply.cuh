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

// A lane's words of a part, in rows 8 apart, and the tables of their scales.
struct Words {
    uint4 words[2];
    uint2 tables[2];
};

// Of part q of the unit.
__device__ __forceinline__ Words load_part(const Chunk& chunk, uint32_t scales, int q) {
    const auto table = [&](int r) { return load_shared8(chunk.tables + __byte_perm(scales, 0, 0x4440 | 2 * q + r)); };
    return {{load_shared16(chunk.words + 1024 * q), load_shared16(chunk.words + 1024 * q + 512)}, {table(0), table(1)}};
}

// a[step]: fragments of a part, in four steps of 32 columns.
__device__ __forceinline__ void decode_part(const Words& part, uint32_t (&a)[4][4]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const uint4 v = part.words[r];
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int step = 0; step < 4; ++step) decode(words[step], part.tables[r], a[step][r], a[step][r + 2]);
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

// This lane's scales of N slots: of each sixteen those of 2 c, 2 c + 1, and 8 on.
template <int N>
__device__ __forceinline__ void load_scales(float (&s)[(N + 15) / 16 * 4], uint32_t from) {
#pragma unroll
    for (int i = 0; i < N; i += 16) {
        const uint4 v = load_shared16(from + 4 * i);
        s[i / 4] = __uint_as_float(v.x), s[i / 4 + 1] = __uint_as_float(v.y);
        s[i / 4 + 2] = __uint_as_float(v.z), s[i / 4 + 3] = __uint_as_float(v.w);
    }
}

// Wait for a part's products.
template <int N>
__device__ __forceinline__ void finish(float (&t)[N / 2], const uint32_t (&a)[4][4]) {
    warpgroup_wait<0>();
    warpgroup_fence_operand(t);
#pragma unroll
    for (int step = 0; step < 4; ++step) hold(a[step]);
}

// d += t times scales of N slots.
template <int N, int SUMS>
__device__ __forceinline__ void add(float (&d)[SUMS], const float (&t)[N / 2], const float (&s)[(N + 15) / 16 * 4]) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) d[i] += t[i] * s[i / 4 * 2 + i % 2];
}

// Where a stage has this lane's share. first: of the first one, without rows.
template <class F>
__device__ __forceinline__ Chunk chunk_of(const Chunk& first, uint32_t smem, uint32_t stage) {
    const uint32_t at = stage * F::STAGE_BYTES;
    return {first.words + at, first.scales + at, first.tables, first.slot_scales + at,
            prefill::same(smem_desc_low(smem + F::SMEM_B) + at / 16)};
}

// d[0] += a part times N slots, over all chunks of a tile. The next chunk's words come while products run, if there are
// registers for them; what other warps do meanwhile hides the rest.
template <class F, int N>
__device__ __forceinline__ void mma_chunks(float (&d)[1][F::SUMS], uint32_t smem, PipelineState<F::NUM_STAGES>& stage,
                                           int chunks, const Chunk& first) {
    constexpr bool AHEAD = N <= 48;
    Chunk chunk = first;
    Words words;
    const auto load = [&] {
        wait(smem + F::FULL_BARRIERS + 8 * stage.index(), stage.phase());
        chunk = chunk_of<F>(first, smem, stage.index());
        words = load_part(chunk, load_shared2(chunk.scales), 0);
    };
    if (AHEAD) load();
#pragma unroll 1
    for (int left = chunks; left > 0; --left) {
        if (!AHEAD) load();
        uint32_t a[4][4];
        float t[N / 2];
        decode_part(words, a);
        start<N>(t, a, chunk.rows);
        const uint32_t slot_scales = chunk.slot_scales, empty = smem + F::EMPTY_BARRIERS + 8 * stage.index();
        stage.advance();
        if (AHEAD && left > 1) load();
        float s[(N + 15) / 16 * 4];
        finish<N>(t, a);
        load_scales<N>(s, slot_scales);
        add<N>(d[0], t, s);
        warp_arrive(empty);
    }
}

// The same for two parts. One is decoded, of the next chunk too, while the other's products run, and while its sums are
// added those of the other warpgroup run. What is decoded or added then, and scales, are loaded a step before where
// there are registers.
template <class F, int N>
__device__ __forceinline__ void mma_chunks(float (&d)[2][F::SUMS], uint32_t smem, PipelineState<F::NUM_STAGES>& stage,
                                           int chunks, const Chunk& first) {
    constexpr bool KEEPS = N <= 104;  // scales from one part to the other, if there are registers: shared memory is busy
    constexpr bool EARLY = N <= 96;   // words, likewise
    uint32_t a[4][4], b[4][4];
    float t[N / 2], s[(N + 15) / 16 * 4];
    wait(smem + F::FULL_BARRIERS + 8 * stage.index(), stage.phase());
    Chunk chunk = chunk_of<F>(first, smem, stage.index());
    uint32_t scales = load_shared(chunk.scales);
    decode_part(load_part(chunk, scales, 0), a);
    Words words;
    if (EARLY) words = load_part(chunk, scales, 1);
#pragma unroll 1
    for (int left = chunks; left > 0; --left) {
        start<N>(t, a, chunk.rows);
        if (!EARLY) words = load_part(chunk, scales, 1);
        decode_part(words, b);
        if (KEEPS) load_scales<N>(s, chunk.slot_scales);
        finish<N>(t, a);
        const uint32_t rows = chunk.rows, slot_scales = chunk.slot_scales;
        const uint32_t empty = smem + F::EMPTY_BARRIERS + 8 * stage.index();
        if (!KEEPS) load_scales<N>(s, slot_scales);
        stage.advance();
        if (left > 1) {
            wait(smem + F::FULL_BARRIERS + 8 * stage.index(), stage.phase());
            chunk = chunk_of<F>(first, smem, stage.index());
            scales = load_shared(chunk.scales);
            if (EARLY) words = load_part(chunk, scales, 0);
        }
        add<N>(d[0], t, s);
        start<N>(t, b, rows);
        if (!EARLY) words = load_part(chunk, scales, 0);
        decode_part(words, a);
        finish<N>(t, b);
        if (!KEEPS) load_scales<N>(s, slot_scales);
        if (EARLY) words = load_part(chunk, scales, 1);
        add<N>(d[1], t, s);
        warp_arrive(empty);
    }
}

// d[q] += part q of this warp's, times `count` slots, over all chunks of a tile. Each number of eights that an item of
// the form can have, from LEAST on, has a separate loop.
template <class F, int LEAST = F::LEAST_EIGHTS>
__device__ __forceinline__ void mma_tile(float (&d)[F::PARTS][F::SUMS], uint32_t smem,
                                         PipelineState<F::NUM_STAGES>& stage, int chunks, const Chunk& first, int count) {
    if (LEAST == F::EIGHTS || count <= 8 * LEAST)
        mma_chunks<F, 8 * LEAST>(d, smem, stage, chunks, first);
    else if constexpr (LEAST < F::EIGHTS)
        mma_tile<F, LEAST + 1>(d, smem, stage, chunks, first, count);
}

}  // namespace mxfp4
