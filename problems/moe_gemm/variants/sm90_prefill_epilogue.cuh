// sm90_prefill's results: of the first product to the second's activations, of the second to each slot's row.
#pragma once

#include "sm90_prefill_form.cuh"

namespace prefill {

// silu(gate) * up, both clamped, times the routing weight.
__device__ __forceinline__ float activate(float gate, float up, float weight) {
    gate = fminf(gate, LIMIT), up = fminf(fmaxf(up, -LIMIT), LIMIT);
    return gate * reciprocal_fast(1.f + exp2_fast(-LOG2E * gate)) * up * weight;
}

// Where a lane leaves results of the first product: rows of `inner` in staging, 128 bytes of a slot. unit: of the
// team's four, and part of it, which the warp has first.
template <int PARTS>
struct InnerRows {
    uint32_t to[PARTS], both;

    __device__ __forceinline__ InnerRows(uint32_t staging, int unit, int part) {
        const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
        // Lanes g and g ^ 1 have neighbouring channels of slots 2 c and 2 c + 1 of each eight: each takes one slot of
        // both.
        const int mine = 2 * c + g % 2;
        both = g % 2 ? 0x3276 : 0x5410;
        // Channel 16 unit + 8 part + g has position 16 (2 part + g / 4) + 8 (g / 2 % 2) + 2 unit + g % 2.
        const uint32_t row = staging + mine * 128 + 4 * unit;
#pragma unroll
        for (int q = 0; q < PARTS; ++q) to[q] = row + ((4 * (part + q) + g / 2) ^ mine) * 16;
    }
    // own: of the slots 2 c and 2 c + 1 of eight `i`.
    __device__ __forceinline__ void leave(int i, int q, uint32_t own) const {
        const uint32_t other = __shfl_xor_sync(~0u, own, 4);
        store_shared(to[q] + i * 1024, __byte_perm(own, other, both));
    }
};

// What all values of a block share, out of the largest magnitudes that this warp has of it: a scale, or for FP8 the
// least normal value. Warps that share a block meet by sync(), all of the team; largest: in shared memory, for them.
template <class F, class Sync>
__device__ __forceinline__ void share_blocks(uint32_t (&block)[F::LARGEST_WORDS], const decode::InputScale& by,
                                             uint32_t largest, Sync sync) {
    const auto scale = [&](uint32_t most) { return decode::block_scale(by.divide<true>(__uint_as_float(most))); };
    const int warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32;
    const auto at = [&](int warp, int k) { return largest + warp * F::LARGEST_BYTES + 128 * k + 4 * lane; };
#pragma unroll
    for (int k = 0; k < F::LARGEST_WORDS && F::WARPS > 1; ++k) store_shared(at(warp, k), block[k]);
    if (F::WARPS > 1) sync();
#pragma unroll 1
    for (int w = 0; w < F::WARPS && F::WARPS > 1; ++w)
#pragma unroll
        for (int k = 0; k < F::LARGEST_WORDS; ++k)
            block[k] = decode::larger(block[k], load_shared(at(warp / F::WARPS * F::WARPS + w, k)));
#pragma unroll
    for (int k = 0; k < F::LARGEST_WORDS; ++k)
        block[k] = F::ACTIVATION == FP8
                       ? __byte_perm(decode::least_normal(block[k]), decode::least_normal(block[k] >> 16), 0x5410)
                       : pack_bf16x2(scale(block[k] << 16 & 0x7FFF0000u), scale(block[k] & 0x7FFF0000u));
}

// silu(gate) * up * weight as a pair of bf16, of the two slots, 2 c and 2 c + 1, that lane 4 g + c has of eight `i`.
template <int SUMS>
__device__ __forceinline__ uint32_t activated(const float (&d)[SUMS], int i, float factor, float2 weight) {
    return pack_bf16x2(activate(d[4 * i] * factor, d[4 * i + 2] * factor, weight.x),
                       activate(d[4 * i + 1] * factor, d[4 * i + 3] * factor, weight.y));
}

// The same of all sums, to d[q][4 i]. most: of slots 2 c and 2 c + 1 of the eights g, g + 8, ..., the largest
// magnitudes that this warp has.
template <int PARTS, int SUMS, int LARGEST_WORDS>
__device__ __forceinline__ void activate_all(float (&d)[PARTS][SUMS], uint32_t (&most)[LARGEST_WORDS], int count,
                                             float factor, uint32_t weights, int g, int c) {
#pragma unroll
    for (int i = 0; i < SUMS / 4; ++i) {
        if (8 * i >= count) break;
        const float2 weight = load_shared_pair(weights + 4 * (8 * i + 2 * c));
        uint32_t larger = 0;
#pragma unroll
        for (int q = 0; q < PARTS; ++q) {
            const uint32_t own = activated(d[q], i, factor, weight);
            d[q][4 * i] = __uint_as_float(own), larger = decode::larger(larger, own);
        }
        larger = largest_of_eight<4>(larger, ~0u);
        if (g == i % 8) most[i / 8] = larger;
    }
}

// d of the first product -> rows of `inner` in staging, or into d as bf16 pairs and then there, quantised. weights: of
// the item's slots, in shared memory. in_scale: of NVFP4. For the others see InnerRows and share_blocks.
template <class F, int PARTS, int SUMS, class Sync>
__device__ __forceinline__ void stage_inner(float (&d)[PARTS][SUMS], int count, float factor, uint32_t weights,
                                            uint32_t staging, int unit, int part, float in_scale, uint32_t largest,
                                            Sync sync) {
    const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    const InnerRows<PARTS> rows(staging, unit, part);
    if constexpr (F::ACTIVATION == BF16) {
#pragma unroll
        for (int i = 0; i < SUMS / 4; ++i) {
            if (8 * i >= count) break;
            const float2 weight = load_shared_pair(weights + 4 * (8 * i + 2 * c));
#pragma unroll
            for (int q = 0; q < PARTS; ++q) rows.leave(i, q, activated(d[q], i, factor, weight));
        }
    } else {
        uint32_t block[F::LARGEST_WORDS] = {};
        activate_all(d, block, count, factor, weights, g, c);
        const decode::InputScale by(in_scale);
        share_blocks<F>(block, by, largest, sync);
#pragma unroll
        for (int i = 0; i < SUMS / 4; ++i) {
            if (8 * i >= count) break;
            const uint32_t shared = __shfl_sync(~0u, block[i / 8], i % 8 * 4 + c);
#pragma unroll
            for (int q = 0; q < PARTS; ++q) {
                const uint32_t own = __float_as_uint(d[q][4 * i]);
                rows.leave(i, q, F::ACTIVATION == FP8 ? decode::nearest_e4m3(own, shared)
                                                      : decode::quantise_pair(own, shared, by));
            }
        }
    }
}

// d of the second product, 64 PARTS features -> parts, by way of staging, half of the tokens at a time. slots: of the
// item, in shared memory. features: that exist, of this warpgroup's, from `first` on.
template <class P, int PARTS, int SUMS>
__device__ __forceinline__ void write_parts(const P& p, const float (&d)[PARTS][SUMS], int count, float factor,
                                            int first, int features, uint32_t slots, uint32_t staging, int barrier) {
    // At once a warp stores 16 PARTS features of AT_ONCE tokens, and 128 threads read as many tokens' features.
    constexpr int AT_ONCE = 16 / PARTS, HALF = SUMS, ROW = 128 * PARTS;  // tokens, tokens, bytes
    static_assert(HALF % AT_ONCE == 0, "a warp stores whole groups of AT_ONCE tokens");
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, thread = threadIdx.x % 128;
    // Chunk c, 16 bytes, of row r is at c ^ r % 8.
    const int matrix = PARTS == 2 ? lane / 8 : lane / 8 % 2, below = PARTS == 2 ? 0 : lane / 16 * 8;
    const uint32_t to = staging + (below + lane % 8) * ROW + ((2 * PARTS * warp + matrix) ^ lane % 8) * 16;
    const int chunk = thread % (8 * PARTS), row = thread / (8 * PARTS);
    const uint32_t from = staging + row * ROW + (chunk ^ row % 8) * 16;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int before = HALF * half;
        if (before >= count) break;
#pragma unroll
        for (int i = 0; i < HALF / AT_ONCE; ++i) {
            if (before + AT_ONCE * i >= count) break;
            const auto pair = [&](int m) {  // of matrix m of the four
                const int q = PARTS == 2 ? m / 2 : 0, eighth = before / 8 + (PARTS == 2 ? i : 2 * i + m / 2);
                const int at = 4 * eighth + 2 * (m % 2);
                return pack_bf16x2(d[q][at] * factor, d[q][at + 1] * factor);
            };
            stmatrix_x4_trans(to + i * 2048, pair(0), pair(1), pair(2), pair(3));
        }
        named_barrier_sync<128>(barrier);
#pragma unroll
        for (int i = 0; i < HALF / AT_ONCE; ++i) {
            const int token = before + AT_ONCE * i + row;
            if (token >= count || 8 * chunk >= features) break;
            const uint4 v = load_shared16(from + i * 2048);
            const int64_t slot = load_shared(slots + 4 * token);
            *reinterpret_cast<uint4*>(p.parts + slot * p.hidden + first + 8 * chunk) = v;
        }
        named_barrier_sync<128>(barrier);  // staging and slots are read
    }
}

}  // namespace prefill
