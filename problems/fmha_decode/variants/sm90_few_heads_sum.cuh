// sm90_few_heads' sums: softmax along the list with a running maximum, and O += P V.
#pragma once

#include "sm90_few_heads_block.cuh"

namespace fmha::few {

// Of a lane's two rows, lane / 4 and 8 below. Every warp of the block has the same.
struct Softmax {
    float top[2] = {-INFINITY, -INFINITY};  // running maximum, up to RESCALE_THRESHOLD too small; -inf: no entry so far
    float sum[2] = {0, 0}, rounded[2] = {0, 0};  // of this lane's columns: of p, for lse; of p in bf16, which P V has
};

// This lane's scores of a tile, and the largest of each row, in powers of two.
__device__ __forceinline__ void load_scores(uint32_t scores, float (&s)[2][BLOCK_N / 4], float (&largest)[2]) {
    int const lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        uint32_t const from = scores + (lane / 4 + 8 * h) * SCORE_ROW + lane % 4 * 8;
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
}

// Moves the running maxima that have grown by more than RESCALE_THRESHOLD; the sums so far are rescaled.
__device__ __forceinline__ void move_maximum(Softmax& softmax, float (&o)[DIMS / 8][4], const float (&largest)[2]) {
    bool const moves[2] = {largest[0] > softmax.top[0] + RESCALE_THRESHOLD,
                           largest[1] > softmax.top[1] + RESCALE_THRESHOLD};
    if (!__any_sync(~0u, moves[0] || moves[1])) return;
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

// The A fragments of a tile's P out of its scores.
__device__ __forceinline__ void probabilities(Softmax& softmax, const float (&s)[2][BLOCK_N / 4],
                                              uint32_t (&pairs)[BLOCK_N / 16][4]) {
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
        uint32_t const row = values + (16 * k + lane % 16) * 128 + warp * (DIMS / 64) * TILE;
#pragma unroll
        for (int n = 0; n < DIMS / 8; n += 2) {
            uint4 const v =
                ldmatrix_x4_trans(row + n / 8 * TILE + ((n % 8 + lane / 16) ^ lane % 8) * 16);
            mma_bf16(o[n], pairs[k][0], pairs[k][1], pairs[k][2], pairs[k][3], v.x, v.y);
            mma_bf16(o[n + 1], pairs[k][0], pairs[k][1], pairs[k][2], pairs[k][3], v.z, v.w);
        }
    }
}

// O += P V of a tile.
__device__ __forceinline__ void sum_tile(Softmax& softmax, float (&o)[DIMS / 8][4], uint32_t scores, uint32_t values) {
    float s[2][BLOCK_N / 4], largest[2];
    load_scores(scores, s, largest);
    move_maximum(softmax, o, largest);
    uint32_t pairs[BLOCK_N / 16][4];
    probabilities(softmax, s, pairs);
    add_values(o, pairs, values);
}

}  // namespace fmha::few
