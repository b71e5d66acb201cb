// Activations of sm90_decode as FP8 holds them: e4m3 times a power of two for each 128 values of a token, as
// problems/common/fp8.py has it. A bf16 holds such a value exactly, so a product is that of bf16.
//
// A scale is the least power of two 2^s with 448 * 2^s >= the largest magnitude, s >= -22 (1e-4 / 448 rounded up). Values
// become multiples of a step: 2^(e - 3) for a value between 2^e and 2^(e + 1), and no less than 2^(s - 9). To add a number
// whose last place is that step and to subtract it again rounds to nearest, ties to even; the code is never made.
// Values of 2^124 and more, infinities and NaN do not come out finite.
#pragma once

#include <cstdint>

#include "sm90_decode_groups.cuh"

namespace decode {

// Pairs of bf16: the larger magnitudes, with signs that mean nothing; sums; differences.
__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
    uint32_t c;
    asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}
__device__ __forceinline__ uint32_t add_bf16x2(uint32_t a, uint32_t b) {
    uint32_t c;
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}
__device__ __forceinline__ uint32_t sub_bf16x2(uint32_t a, uint32_t b) {
    uint32_t c;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

// Of eight pairs.
__device__ __forceinline__ uint32_t largest(const uint32_t (&pairs)[8]) {
    uint32_t most = larger(pairs[0], pairs[1]);
#pragma unroll
    for (int i = 2; i < 8; ++i) most = larger(most, pairs[i]);
    return most;
}

// The largest magnitude of a group, in the low half -> both halves 2^(s - 6), the least value that e4m3 holds to four
// bits. 448 is 1.75 * 2^8: a mantissa above 0x60 makes s one more.
__device__ __forceinline__ uint32_t least_normal(uint32_t most) {
    constexpr int BELOW = (8 + 6) << 7, LEAST = (127 - 22 - 6) << 7;
    const int scale = ((most & 0x7FFF) + 0x1F & 0x7F80) - BELOW;
    return max(scale, LEAST) * 0x10001u;
}

__device__ __forceinline__ uint32_t nearest_e4m3(uint32_t pair, uint32_t least) {
    // 1.5 * 2^(e + 4), whose last place is 2^(e - 3).
    const uint32_t large = larger(pair & 0x7F807F80u, least) + 0x02400240u;
    return sub_bf16x2(add_bf16x2(pair, large), large);
}

// A warp's unit c of a unit row. In twos, so that it has whole groups of 128 columns; a copy has 2 WARPS units.
template <bool IN_TWOS>
__device__ __forceinline__ int unit_of(int c, int warp) {
    return IN_TWOS ? c / 2 * (2 * WARPS) + c % 2 + 2 * warp : c * WARPS + warp;
}
// How many of a unit row's `all` units are a warp's.
template <bool IN_TWOS>
__device__ __forceinline__ int units_of_warp(int all, int warp) {
    if (!IN_TWOS) return (all - warp + WARPS - 1) / WARPS;
    return all / (2 * WARPS) * 2 + min(max(all % (2 * WARPS) - 2 * warp, 0), 2);
}

}  // namespace decode
