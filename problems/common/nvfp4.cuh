// NVFP4 for kernels: e2m1 codes, e4m3 block scales, their bit tricks. The device twin of nvfp4.py.
//
// Plain g++ compiles it too, so that CPU tests cover every code and scale; where a GPU has an instruction, the host
// does the same in plain C++ beside it. "Half" below is fp16 as its 16 bits, "half2" two of them, the first one low.
// Element 2j of a row is the low nibble of byte j, element 2j + 1 the high one: in a little-endian word of 8 codes,
// element i is bits 4i to 4i + 3.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define NVFP4_FN __host__ __device__ __forceinline__
#else
#define NVFP4_FN inline
#endif

namespace nvfp4 {

// ---- bits ----

NVFP4_FN float float_from_bits(uint32_t bits) {
#ifdef __CUDA_ARCH__
    return __uint_as_float(bits);
#else
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
#endif
}

NVFP4_FN uint32_t bits_from_float(float value) {
#ifdef __CUDA_ARCH__
    return __float_as_uint(value);
#else
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
#endif
}

// Byte i of the result is byte (selector >> 4i & 7) of the eight bytes y:x, x the low four. One prmt.
NVFP4_FN uint32_t byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
#ifdef __CUDA_ARCH__
    return __byte_perm(x, y, selector & 0x7777);
#else
    const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
    uint32_t result = 0;
    for (int i = 0; i < 4; i++) result |= static_cast<uint32_t>(bytes >> (selector >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
    return result;
#endif
}

// Nearest half, ties to even; what is too large becomes infinity, NaN stays NaN (the canonical 0x7FFF, as the GPU's).
NVFP4_FN uint16_t float_to_half_bits(float value) {
#ifdef __CUDA_ARCH__
    uint16_t half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
#else
    const uint32_t bits = bits_from_float(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
    if (magnitude > 0x7F800000) return 0x7FFF;
    if (magnitude >= 0x47800000) return static_cast<uint16_t>(sign | 0x7C00);  // 2^16 and over
    if (magnitude < 0x38800000) {                                              // below 2^-14: steps of 2^-24
        // Adding 0.5 puts a step of 2^-24 into the last bit of a float, and the addition rounds as wanted.
        const float sum = float_from_bits(magnitude) + 0.5f;
        return static_cast<uint16_t>(sign | (bits_from_float(sum) - 0x3F000000));
    }
    // 13 bits go; adding just under half of the last kept bit, and that bit, rounds ties to even and carries upwards.
    return static_cast<uint16_t>(sign | (magnitude - 0x38000000 + 0xFFF + (magnitude >> 13 & 1)) >> 13);
#endif
}

// ---- one element ----

NVFP4_FN uint32_t low_code(uint32_t byte) { return byte & 15; }
NVFP4_FN uint32_t high_code(uint32_t byte) { return byte >> 4 & 15; }

// Twice the value of a code, an integer in -12..12; both zeros give 0.
NVFP4_FN int e2m1_doubled(uint32_t code) {
    const int index = static_cast<int>(code & 7);  // 0 1 2 3 4 5 6 7 -> 0 1 2 3 4 6 8 12
    const int magnitude = index + (index > 4 ? index - 4 : 0) + (index > 6 ? 2 : 0);
    return (code & 8) != 0 ? -magnitude : magnitude;
}

// Value of a code; -0 for code 8.
NVFP4_FN float e2m1_to_float(uint32_t code) {
    const float magnitude = 0.5f * static_cast<float>(e2m1_doubled(code & 7));
    return float_from_bits(bits_from_float(magnitude) | (code & 8) << 28);
}

// Value of an e4m3 byte, exact. NaN for 0x7F and 0xFF; negative from 0x80 (-0) to 0xFE.
NVFP4_FN float e4m3_to_float(uint32_t byte) {
    const uint32_t sign = (byte & 0x80) << 24, exponent = byte >> 3 & 15, mantissa = byte & 7;
    if ((byte & 0x7F) == 0x7F) return float_from_bits(sign | 0x7FC00000);
    if (exponent == 0) return float_from_bits(sign | bits_from_float(static_cast<float>(mantissa) * 0x1p-9f));
    return float_from_bits(sign | (exponent + 120) << 23 | mantissa << 20);  // bias 7 becomes 127
}

// Byte offset of the scale of (row, block) in one batch of the 128x4 layout of nvfp4.permute_scales, the same for A and
// b; rest_k = ceil(k / 64). Blocks of 512 bytes, 4 neighbouring scales of a row in one aligned word.
NVFP4_FN int64_t permuted_scale_offset(int64_t row, int64_t block, int64_t rest_k) {
    return (row / 128 * rest_k + block / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4;
}

// ---- several at once ----

struct Half2x4 {
    uint32_t pair[4];
};

constexpr float kPlacedE2m1 = 0x1p14f;  // value = half * this, for placed8

// 8 codes as half2 of their value * 2^-14, exact: the fields of a code fall on those of fp16, whose bias is 14 more.
// pair[i] holds elements i and i + 4. 0.5 becomes the subnormal 2^-15, which fp16 arithmetic keeps.
NVFP4_FN Half2x4 placed8(uint32_t codes) {
    Half2x4 result;
    for (int i = 0; i < 4; i++) {
        const uint32_t nibbles = codes >> 4 * i;  // bits 0 to 3 of each 16 are the codes
        result.pair[i] = (nibbles << 12 & 0x80008000) | (nibbles << 9 & 0x0E000E00);
    }
    return result;
}

// The half of a code's value, exact. Its high byte alone is not zero.
NVFP4_FN uint16_t e2m1_to_half_bits(uint32_t code) {
    const uint32_t magnitude = byte_perm(0x3E3C3800, 0x46444240, code & 7) & 0xFF;
    return static_cast<uint16_t>((code & 8) << 12 | magnitude << 8);
}

// One byte, two codes, as a half2 of their values, exact. One cvt on sm_100a.
NVFP4_FN uint32_t e2m1x2_to_half2_bits(uint32_t byte) {
#if defined(__CUDA_ARCH_FEAT_SM100_ALL)
    uint32_t pair;
    asm("{ .reg .b8 codes, none;\n  mov.b16 {codes, none}, %1;\n  cvt.rn.f16x2.e2m1x2 %0, codes; }"
        : "=r"(pair)
        : "h"(static_cast<uint16_t>(byte)));
    return pair;
#else
    return e2m1_to_half_bits(low_code(byte)) | static_cast<uint32_t>(e2m1_to_half_bits(high_code(byte))) << 16;
#endif
}

// Two e4m3 bytes, bits 0 to 15 of `bytes`, as a half2 of their values, exact; NaN stays NaN. One cvt from sm_89 on.
NVFP4_FN uint32_t e4m3x2_to_half2_bits(uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint32_t pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(bytes)));
    return pair;
#else
    const uint32_t first = float_to_half_bits(e4m3_to_float(bytes));
    return first | static_cast<uint32_t>(float_to_half_bits(e4m3_to_float(bytes >> 8))) << 16;
#endif
}

}  // namespace nvfp4
