// A token's mixing weights from the sums over all of its columns, by one warp: what is between fn x' and u.
#pragma once

#include <cstdint>

#include "ptx.cuh"
#include "sm90_columns_exchange.cuh"

namespace columns {

constexpr int COPIES = 4;
constexpr int ROWS = 24;      // of fn
constexpr int PRODUCTS = 10;  // x'_j x'_k for j <= k, row by row
constexpr int ITERATIONS = 20;
constexpr float HC_EPS = 1e-6f, NORM_EPS = 1e-6f;

// The sums of a token over a block's columns, in this order: 4 rows of pre, 10 products, 2 places of nothing, 4 rows of
// post, 16 of the combination.
constexpr int SLOTS = 36, POST = 16, COMB = 20;
constexpr int FOR_U = COPIES + PRODUCTS;  // the first ones, all that u needs
__device__ __forceinline__ int slot_of_row(int row) { return row < COPIES ? row : row + POST - COPIES; }
__device__ __forceinline__ bool has_slot(int lane) { return lane < FOR_U || lane >= POST; }

// Sums of a token in a warp's lanes: low is slot `lane`, high slot 32 + lane % 4.
struct Sums {
    float low, high;
};

__device__ __forceinline__ float sigmoid(float x) { return ptx::reciprocal_fast(1.0f + __expf(-x)); }
__device__ __forceinline__ float broadcast(float v, int lane) { return __shfl_sync(ALL, v, lane); }

// 1 / the root mean square of the token's copies: the squares are the products of each copy with itself.
__device__ __forceinline__ float inverse_of_copies(Sums sums, int hidden) {
    const float square = broadcast(sums.low, 4) + broadcast(sums.low, 8) + broadcast(sums.low, 11) +
                         broadcast(sums.low, 13);
    return rsqrtf(square * ptx::reciprocal_fast(COPIES * hidden) + NORM_EPS);
}

// Lanes 0 to 3: pre_j / the root mean square of u. |u|^2 is the sum of pre_j pre_k x'_j x'_k, so that u need not be
// there.
__device__ __forceinline__ float weights_of_u(Sums sums, float inverse, const float* base, const float* scale,
                                              int hidden, int lane) {
    const float pre = sigmoid(sums.low * inverse * scale[0] + base[lane % COPIES]) + HC_EPS;
    float square = 0.0f;
    int slot = COPIES;
#pragma unroll
    for (int j = 0; j < COPIES; ++j) {
#pragma unroll
        for (int k = j; k < COPIES; ++k, ++slot)
            square += (j == k ? 1.0f : 2.0f) * broadcast(pre, j) * broadcast(pre, k) * broadcast(sums.low, slot);
    }
    return pre * rsqrtf(fmaxf(square, 0.0f) * ptx::reciprocal_fast(hidden) + NORM_EPS);
}

// Lanes e and e + 16: element e of the balanced combination, from its logit. Rows and columns have divisors a and b,
// m_jk / (a_j b_k), so that a step is a product with m and four reciprocals. Every lane does all of it: to ask others
// takes longer.
__device__ __forceinline__ float sinkhorn(float logit, int lane) {
    float most = fmaxf(logit, __shfl_xor_sync(ALL, logit, 1));
    most = fmaxf(most, __shfl_xor_sync(ALL, most, 2));
    const float power = __expf(logit - most);
    float sum = power + __shfl_xor_sync(ALL, power, 1);
    sum += __shfl_xor_sync(ALL, sum, 2);
    const float mine = power * ptx::reciprocal_fast(sum) + HC_EPS;
    float m[COPIES][COPIES], a[COPIES], b[COPIES], by_a[COPIES], by_b[COPIES];
#pragma unroll
    for (int e = 0; e < COPIES * COPIES; ++e) m[e / COPIES][e % COPIES] = broadcast(mine, e);
#pragma unroll
    for (int i = 0; i < COPIES; ++i) a[i] = b[i] = by_a[i] = 1.0f;
    for (int turn = 0; turn < ITERATIONS; ++turn) {
        if (turn) {
#pragma unroll
            for (int j = 0; j < COPIES; ++j) {
                a[j] *= HC_EPS;
#pragma unroll
                for (int k = 0; k < COPIES; ++k) a[j] = fmaf(m[j][k], by_b[k], a[j]);
                by_a[j] = ptx::reciprocal_fast(a[j]);
            }
        }
#pragma unroll
        for (int k = 0; k < COPIES; ++k) {
            b[k] *= HC_EPS;
#pragma unroll
            for (int j = 0; j < COPIES; ++j) b[k] = fmaf(m[j][k], by_a[j], b[k]);
            by_b[k] = ptx::reciprocal_fast(b[k]);
        }
    }
    float divisor = 0.0f;
#pragma unroll
    for (int e = 0; e < COPIES * COPIES; ++e)
        if (lane % (COPIES * COPIES) == e) divisor = by_a[e / COPIES] * by_b[e % COPIES];
    return mine * divisor;
}

// Write new_post (4) and new_comb (16) of a token.
__device__ __forceinline__ void write_mixing(Sums sums, float inverse, const float* base, const float* scale,
                                             float* post, float* comb, int lane) {
    if (lane >= POST && lane < COMB) {
        const int k = lane - POST;
        post[k] = 2.0f * sigmoid(sums.low * inverse * scale[1] + base[COPIES + k]);
    }
    const int e = lane % (COPIES * COPIES), low = 32 - COMB;  // elements that lie in the low slots
    const float of_low = broadcast(sums.low, COMB + e % low), of_high = broadcast(sums.high, e % COPIES);
    const float z = e < low ? of_low : of_high;
    const float balanced = sinkhorn(z * inverse * scale[2] + base[2 * COPIES + e], lane);
    if (lane < COPIES * COPIES) comb[e] = balanced;
}

}  // namespace columns
