// What a warp of sm90_decode that multiplies does of a unit, and where sums go.
#pragma once

#include <cuda_bf16.h>

#include "nvfp4_units.cuh"
#include "sm90_decode_block.cuh"
#include "sm90_decode_tokens.cuh"

namespace decode {

// Scale I of a lane's four; with two tiles there are no registers for two at once.
template <int I, int NT>
__device__ __forceinline__ uint32_t scale_of(uint32_t four) {
    return NT == 1 ? units::half_of_two_scales<I>(four) : units::scale<I>(four);
}

// sum[q][t] += rows 16 q to 16 q + 15 of a unit times tile t of the tokens, of which it is unit c. word, scales: the
// lane's of the unit.
template <int TILES, int NT, class T>
__device__ __forceinline__ void multiply_unit(float (&sum)[2][NT][4], const uint4 (&word)[2], uint32_t scales,
                                              const T& tokens, int c) {
#pragma unroll
    for (int q = 0; q < 2; ++q) {
        const uint32_t above = q ? scale_of<2, NT>(scales) : scale_of<0, NT>(scales);
        const uint32_t below = q ? scale_of<3, NT>(scales) : scale_of<1, NT>(scales);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t a[4], b[4];
            units::decode(half ? word[q].z : word[q].x, above, a);
            units::decode(half ? word[q].w : word[q].y, below, b);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int step = 2 * (2 * half + j);
#pragma unroll
                for (int t = 0; t < TILES; ++t)
                    mma_bf16(sum[q][t], a[2 * j], b[2 * j], a[2 * j + 1], b[2 * j + 1], tokens.pairs[t][c][step],
                             tokens.pairs[t][c][step + 1]);
            }
        }
    }
}

template <int NT>
__device__ __forceinline__ void clear_sums(float (&sum)[2][NT][4]) {
#pragma unroll
    for (int i = 0; i < 8 * NT; ++i) sum[i / (4 * NT)][i / 4 % NT][i % 4] = 0;
}

// The warp's sums, of the first tile or of both, to where epilogue adds them up.
template <int NT>
__device__ __forceinline__ void store_sums(const float (&sum)[2][NT][4], float* to, bool both, int warp, int lane) {
#pragma unroll
    for (int t = 0; t < NT; ++t)
        if (t == 0 || both)
#pragma unroll
            for (int q = 0; q < 2; ++q)
                *reinterpret_cast<float4*>(to + (warp * NT * 2 + t * 2 + q) * 128 + 4 * lane) =
                    make_float4(sum[q][t][0], sum[q][t][1], sum[q][t][2], sum[q][t][3]);
}

// A unit row of out. total: the sums over experts, of each token MARGIN floats on.
__device__ __forceinline__ void write_out(const Problem& p, const float* total, int row) {
    for (int i = threadIdx.x; i < p.tokens * 16; i += CONSUMER_THREADS) {
        const int token = i >> 4, pair = i & 15;
        const float *from = total + token * MARGIN + 2 * pair;
        *reinterpret_cast<__nv_bfloat162*>(p.out + static_cast<int64_t>(token) * p.hidden + row * 32 + 2 * pair) =
            __floats2bfloat162_rn(from[0], from[1]);
    }
}

}  // namespace decode
