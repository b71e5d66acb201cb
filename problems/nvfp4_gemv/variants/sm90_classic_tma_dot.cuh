// The arithmetic of sm90_classic_tma: doubled e2m1 values are the integers -12 to 12, so the dot of a block of 16 is an
// exact integer (dp4a).
#pragma once

#include <cstdint>

#include <cuda_fp16.h>

#include "nvfp4.cuh"

namespace classic {

// |2w| of the e2m1 codes 0 to 7, a byte each.
constexpr uint32_t TABLE_LOW = 0x03020100u, TABLE_HIGH = 0x0C080604u;
constexpr uint32_t SIGNS = 0x88888888u;  // of eight codes

// Four codes, the low 16 bits of `codes`, to bytes: |2w| where the code is positive, else 0. prmt's selector bit 3 asks
// for the sign of the table's byte, replicated, and no byte of the table has one. With signs flipped: the negatives.
// Not __byte_perm, which clears that bit first.
__device__ __forceinline__ uint32_t positive_bytes(uint32_t codes) {
    uint32_t bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(TABLE_LOW), "r"(TABLE_HIGH), "r"(codes));
    return bytes;
}

__device__ __forceinline__ int dp4a(uint32_t unsigned_bytes, uint32_t signed_bytes, int sum) {
    int result;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(unsigned_bytes), "r"(signed_bytes), "r"(sum));
    return result;
}

// Sum of 16 products (2 w)(2 x), exact: |sum| <= 2304. codes: 16 e2m1, low nibble first; x: 16 doubled values as bytes.
__device__ __forceinline__ float block_dot(uint32_t codes0, uint32_t codes1, uint4 x) {
    // 12582912 = 1.5 * 2^23: as a float's bits plus a small integer it reads as the float plus that integer.
    int plus = 0x4B400000, minus = 0;
    const uint32_t flipped0 = codes0 ^ SIGNS, flipped1 = codes1 ^ SIGNS;
    plus = dp4a(positive_bytes(codes0), x.x, plus);
    minus = dp4a(positive_bytes(flipped0), x.x, minus);
    plus = dp4a(positive_bytes(codes0 >> 16), x.y, plus);
    minus = dp4a(positive_bytes(flipped0 >> 16), x.y, minus);
    plus = dp4a(positive_bytes(codes1), x.z, plus);
    minus = dp4a(positive_bytes(flipped1), x.z, minus);
    plus = dp4a(positive_bytes(codes1 >> 16), x.w, plus);
    minus = dp4a(positive_bytes(flipped1 >> 16), x.w, minus);
    return __int_as_float(plus - minus) - 12582912.0f;
}

// Eight codes to eight signed bytes of 2x.
__device__ __forceinline__ uint2 doubled_bytes(uint32_t codes) {
    const uint32_t flipped = codes ^ SIGNS;
    return make_uint2(__vsub4(positive_bytes(codes), positive_bytes(flipped)),
                      __vsub4(positive_bytes(codes >> 16), positive_bytes(flipped >> 16)));
}

// Two e4m3 scales, low byte first. Exact.
__device__ __forceinline__ float2 scale_pair(uint32_t two_bytes) {
    const uint32_t halves = nvfp4::e4m3x2_to_half2_bits(two_bytes);
    return __half22float2(*reinterpret_cast<const __half2*>(&halves));
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int offset = 16; offset; offset /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, offset);
    return v;
}

}  // namespace classic
