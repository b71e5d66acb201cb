// The sums of a token, and its mixing weights from them, by one warp: what is between fn x' and u.
#pragma once

#include <cstdint>

#include "ptx.cuh"
#include "sm90_columns_exchange.cuh"

namespace columns {

constexpr int COPIES = 4;
constexpr int ROWS = 24;      // of fn: 4 of pre, 4 of post, 16 of comb
constexpr int PRODUCTS = 10;  // x'_j x'_k for j <= k, row by row
constexpr int ITERATIONS = 20;
constexpr float HC_EPS = 1e-6f, NORM_EPS = 1e-6f;

// The sums of a token over a block's columns:
//   slot   0-3            4-13        14, 15   16-19           20-35
//   sum    rows of pre    x'_j x'_k   none     rows of post    rows of comb
constexpr int PRODUCT_SLOT = COPIES, POST_SLOT = 16, COMB_SLOT = POST_SLOT + COPIES;
constexpr int SLOTS = COMB_SLOT + COPIES * COPIES;
constexpr int U_SLOTS = PRODUCT_SLOT + PRODUCTS;  // the first ones, all that u needs
constexpr int LANE_SLOTS = 32, HIGH_SLOTS = SLOTS - LANE_SLOTS;  // one a lane of a warp, and the others
static_assert(U_SLOTS <= POST_SLOT && HIGH_SLOTS == 4 && 32 % HIGH_SLOTS == 0, "see Sums");

__host__ __device__ constexpr int product_of(int j, int k) { return j * COPIES - j * (j - 1) / 2 + k - j; }
static_assert(product_of(COPIES - 1, COPIES - 1) == PRODUCTS - 1, "products lie row by row");
__device__ __forceinline__ int slot_of_row(int row) { return row < COPIES ? row : row + POST_SLOT - COPIES; }
__device__ __forceinline__ bool is_used(int slot) { return slot < U_SLOTS || slot >= POST_SLOT; }

// A table of up to 16 numbers below 16 as one word: a lookup, TABLE >> 4 * i & 15, waits for no memory.
template <class Word, int N>
__host__ __device__ constexpr Word pack_nibbles(const int (&values)[N]) {
    static_assert(4 * N <= 8 * sizeof(Word), "a nibble each");
    Word word = 0;
    for (int i = 0; i < N; ++i) word |= Word(values[i]) << 4 * i;
    return word;
}

// Sums of a token in a warp's lanes: low is slot `lane`, high slot 32 + lane % 4.
struct Sums {
    float low, high;
};

__device__ __forceinline__ float sigmoid(float x) { return ptx::reciprocal_fast(1.0f + __expf(-x)); }
__device__ __forceinline__ float broadcast(float v, int lane) { return __shfl_sync(ALL, v, lane); }

// 1 / the root mean square of a token's copies, from the sum of their squares. by_width: 1 / (COPIES * hidden).
__device__ __forceinline__ float inverse_rms_of_square(float square, float by_width) {
    return rsqrtf(square * by_width + NORM_EPS);
}

// The squares are the products of each copy with itself.
__device__ __forceinline__ float inverse_rms_of_copies(Sums sums, int hidden) {
    auto square = [&](int j) { return broadcast(sums.low, PRODUCT_SLOT + product_of(j, j)); };
    return inverse_rms_of_square(square(0) + square(1) + square(2) + square(3), ptx::reciprocal_fast(COPIES * hidden));
}

// pre_j / the root mean square of u, in the lanes that have pre_j. |u|^2 is the sum of pre_j pre_k x'_j x'_k, so that u
// need not be there. products: x'_j x'_k; by_hidden: 1 / hidden.
__device__ __forceinline__ float u_weight(float pre, const float (&products)[PRODUCTS], float by_hidden) {
    float each[COPIES], square = 0.0f;
#pragma unroll
    for (int j = 0; j < COPIES; ++j) each[j] = broadcast(pre, j);
    int product = 0;
#pragma unroll
    for (int j = 0; j < COPIES; ++j) {
#pragma unroll
        for (int k = j; k < COPIES; ++k, ++product)
            square += (j == k ? 1.0f : 2.0f) * each[j] * each[k] * products[product];
    }
    return pre * rsqrtf(fmaxf(square, 0.0f) * by_hidden + NORM_EPS);
}

// Lanes 0 to 3: pre_j / the root mean square of u.
__device__ __forceinline__ float u_weight_of_sums(Sums sums, float inverse, const float* base, const float* scale,
                                              int hidden, int lane) {
    const float pre = sigmoid(sums.low * inverse * scale[0] + base[lane % COPIES]) + HC_EPS;
    float products[PRODUCTS];
#pragma unroll
    for (int i = 0; i < PRODUCTS; ++i) products[i] = broadcast(sums.low, PRODUCT_SLOT + i);
    return u_weight(pre, products, ptx::reciprocal_fast(hidden));
}

// One half of a round of Sinkhorn, on divisors a_j and b_k of rows and columns: a_j = HC_EPS a_j + sum over k of
// m_jk / b_k, or the same of b. The divisors themselves are not needed, only m_jk / (a_j b_k), so they are kept times
// powers of two and products of the others: 1 / b_0 is b_1 b_2 b_3 / P, and 1 / P is left out. Half the time of
// four reciprocals. v = s times the divisors; f: P between 1 and 2; inverse_f: 1 / that of the half before.
struct Divisors {
    float v[COPIES], s;
};
// -> what the products of both kinds of divisors are too large by.
template <bool ROWWISE>
__device__ __forceinline__ float divide_out(const float (&m)[COPIES][COPIES], const Divisors& others,
                                            Divisors& divisors, float& inverse_f) {
    constexpr uint32_t EXPONENT = 0x7f800000, ONE = 0x3f800000;
    const float(&o)[COPIES] = others.v;
    const float low = o[0] * o[1], high = o[2] * o[3], product = low * high;
    const float without[COPIES] = {o[1] * high, o[0] * high, o[3] * low, o[2] * low};
    const uint32_t bits = __float_as_uint(product), s_exponent = __float_as_uint(divisors.s) & EXPONENT;
    const float f = __uint_as_float((bits & ~EXPONENT) | ONE);
    const float shrink = __uint_as_float(3 * ONE - (bits & EXPONENT) - s_exponent);  // 1 / P / s, as a power of two
    const float joint = f * __uint_as_float(2 * ONE - s_exponent), ratio = joint * inverse_f;
    divisors.s *= ratio;
    inverse_f = ptx::reciprocal_fast(f);
#pragma unroll
    for (int i = 0; i < COPIES; ++i) {
        auto of = [&](int j) { return ROWWISE ? m[i][j] : m[j][i]; };
        const float sum =
            fmaf(of(3), without[3], fmaf(of(2), without[2], fmaf(of(1), without[1], of(0) * without[0])));
        divisors.v[i] = fmaf(sum, shrink, HC_EPS * ratio * divisors.v[i]);
    }
    return joint;
}

// Lanes e and e + 16: element e of the balanced combination, from its logit. Every lane does all of it: to ask others
// takes longer.
__device__ __forceinline__ float sinkhorn(float logit, int lane) {
    float maximum = fmaxf(logit, __shfl_xor_sync(ALL, logit, 1));
    maximum = fmaxf(maximum, __shfl_xor_sync(ALL, maximum, 2));
    const float power = __expf(logit - maximum);
    float sum = power + __shfl_xor_sync(ALL, power, 1);
    sum += __shfl_xor_sync(ALL, sum, 2);
    const float start = power * ptx::reciprocal_fast(sum) + HC_EPS;
    float m[COPIES][COPIES];
#pragma unroll
    for (int e = 0; e < COPIES * COPIES; ++e) m[e / COPIES][e % COPIES] = broadcast(start, e);
    Divisors a, b;
    a.s = b.s = 1.0f;
#pragma unroll
    for (int i = 0; i < COPIES; ++i) a.v[i] = 1.0f, b.v[i] = m[0][i] + m[1][i] + (m[2][i] + m[3][i]) + HC_EPS;
    float inverse_f = 1.0f, joint = 1.0f;
#pragma unroll 1
    for (int round = 1; round < ITERATIONS; ++round) {
        divide_out<true>(m, b, a, inverse_f);
        joint = divide_out<false>(m, a, b, inverse_f);
    }
    auto element = [](const float (&v)[COPIES], int i) { return i < 2 ? (i ? v[1] : v[0]) : (i == 2 ? v[2] : v[3]); };
    const int e = lane % (COPIES * COPIES);
    return start * joint * ptx::reciprocal_fast(element(a.v, e / COPIES) * element(b.v, e % COPIES));
}

// Write new_post (4) and new_comb (16) of a token.
__device__ __forceinline__ void write_mixing(Sums sums, float inverse, const float* base, const float* scale,
                                             float* post, float* comb, int lane) {
    if (lane >= POST_SLOT && lane < COMB_SLOT) {
        const int k = lane - POST_SLOT;
        post[k] = 2.0f * sigmoid(sums.low * inverse * scale[1] + base[COPIES + k]);
    }
    const int e = lane % (COPIES * COPIES), low = LANE_SLOTS - COMB_SLOT;  // elements that lie in the low slots
    const float from_low = broadcast(sums.low, COMB_SLOT + e % low), from_high = broadcast(sums.high, e % COPIES);
    const float z = e < low ? from_low : from_high;
    const float balanced = sinkhorn(z * inverse * scale[2] + base[2 * COPIES + e], lane);
    if (lane < COPIES * COPIES) comb[e] = balanced;
}

}  // namespace columns
