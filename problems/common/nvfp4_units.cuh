// NVFP4 weights as Hopper's tensor cores take them: units of 32 rows by 64 columns, 1152 bytes, no larger than the
// weights as they came. The kernels of moe_gemm and linear_decode read them.
//
// A unit holds two groups of 16 rows. Lane l = 4 g + c of a warp owns, in rows g and g + 8 of a group, the 16 columns
// 16 c .. 16 c + 15 of the unit: a whole block, so it needs one scale a row.
//   bytes 512 q + 16 l .. + 15   group q: four words, of columns 0-7 of row g, of row g + 8, columns 8-15 of both
//   bytes 1024 + 4 l .. + 3      scales of rows g, g + 8 of group 0, then of group 1
// A word holds eight codes, in each half (bits 15:0 and 31:16) four: pair p, columns 2 p and 2 p + 1 of the eight, has
// its even column in the low half. bf16 has its sign at bit 15, the last two bits of the exponent and the first of the
// mantissa at 8:6; sign and magnitude of a code are kept where few rotations and masks bring them there:
//   pair 0: 15; 8:6    pair 1: 9; 2:0    pair 2: 3; 12:10, magnitudes in the other half    pair 3: 13; 14, 5:4
// So read, a code is its value times 2^-126, subnormal ones too, and one bf16 product with the scale times 2^118 makes
// code * scale * 2^-8, exactly: 6 significant bits. What is left is 2^8, which goes into the expert's fp32 scale.
// A scale byte is that scale's exponent and mantissa without e4m3's subnormals: 5 and 3 bits, such that the byte times
// 16 plus 0x7580 is bf16(scale * 2^118). Where a scale is zero its codes are made zero instead.
//
// Products of 16 columns a step: in step j of a unit, k = 2 c, 2 c + 1, 2 c + 8, 2 c + 9 of the instruction are columns
// 16 c + 4 j .. + 3 of the unit. The other operand has its columns in the same order.
//
// Units of a matrix lie row by row: [rows / 32][columns / 64]. Interleaved, with gate rows above as many up rows: group
// q of unit u has gate rows 16 u + 8 q + 0 .. 7 as its rows 0 to 7, and the same rows of up as 8 to 15, so that a
// thread's sums of rows g and g + 8 meet in one product.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "ptx.cuh"

namespace units {

constexpr int ROWS = 32, COLUMNS = 64, BYTES = 1152, SCALES = 1024;  // SCALES: where they begin
constexpr float REST = 256.f;                                        // a product of units is this much too small

template <int TABLE>
__device__ __forceinline__ uint32_t lop3(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(d) : "r"(a), "r"(b), "r"(c), "n"(TABLE));
    return d;
}

// Both halves bf16(scale i * 2^118), i = 0 .. 3 of a lane's four.
template <int I>
__device__ __forceinline__ uint32_t scale(uint32_t four) {
    return __byte_perm(four, 0, I | 0x40 | I << 8 | 0x4000) * 16 + 0x75807580u;
}

// The same in half the instructions, and up to two registers more: scales 0 and 2, or 1 and 3, are made together, and a
// product takes either half of a register as both.
template <int I>
__device__ __forceinline__ uint32_t half_of_two_scales(uint32_t four) {
    const uint32_t two = __byte_perm(four, 0, I % 2 | 0x40 | I % 2 + 2 << 8 | 0x4000) * 16 + 0x75807580u;
    uint32_t both;
    if (I / 2)
        asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {high, high};\n}" : "=r"(both) : "r"(two));
    else
        asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {low, low};\n}" : "=r"(both) : "r"(two));
    return both;
}

// A word and its scale -> pairs 0 to 3 as bf16x2, times 2^-8.
__device__ __forceinline__ void decode(uint32_t word, uint32_t scale, uint32_t (&pair)[4]) {
    constexpr int AND_OR = 0xEA;  // (a & b) | c
    const uint32_t mask = 0x81C081C0u;
    pair[0] = ptx::mul_bf16x2(word & mask, scale);
    pair[1] = ptx::mul_bf16x2(word << 6 & mask, scale);
    pair[2] = ptx::mul_bf16x2(__funnelshift_l(word, word, 12) & mask, scale);
    const uint32_t first = word >> 6 & 0x01000100u;
    pair[3] = ptx::mul_bf16x2(lop3<AND_OR>(word << 2, 0x80C080C0u, first), scale);
}

// A word of eight codes, first column in the low nibble, -> as units have it.
__device__ __forceinline__ uint32_t encode(uint32_t codes) {
    uint32_t word = 0;
    for (int i = 0; i < 8; ++i) {
        const uint32_t code = codes >> 4 * i & 15, sign = code >> 3, size = code & 7;
        const int half = 16 * (i & 1), other = 16 - half;
        switch (i >> 1) {
            case 0: word |= (sign << 15 | size << 6) << half; break;
            case 1: word |= (sign << 9 | size) << half; break;
            case 2: word |= sign << 3 + half | size << 10 + other; break;
            default: word |= (sign << 13 | size >> 2 << 14 | (size & 3) << 4) << half;
        }
    }
    return word;
}

// An e4m3 scale, positive or zero, -> a scale byte; for zero the smallest.
__device__ __forceinline__ uint32_t scale_byte(uint32_t e4m3) {
    const uint32_t exponent = e4m3 >> 3 & 15, mantissa = e4m3 & 7;
    if (exponent) return exponent + 3 << 3 | mantissa;
    if (mantissa >= 4) return 3 << 3 | (mantissa - 4) << 1;
    if (mantissa >= 2) return 2 << 3 | (mantissa - 2) << 2;
    return 1 << 3;  // 2^-9
}

// A thread makes a lane's share of one unit.
static __global__ void repack_kernel(const uint8_t* packed, const uint8_t* scales, uint8_t* to, int64_t lanes, int rows,
                                     int columns, bool interleaved) {
    const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
    if (i >= lanes) return;
    const int lane = i & 31, unit_columns = columns / COLUMNS, unit_rows = rows / ROWS;
    const int64_t unit = i >> 5;
    const int column = unit % unit_columns, unit_row = unit / unit_columns % unit_rows;
    const int64_t expert = unit / unit_columns / unit_rows;
    uint8_t* unit_at = to + unit * BYTES;
    uint32_t scale_word = 0;
    for (int q = 0; q < 2; ++q) {
        uint32_t words[4];
        for (int half = 0; half < 2; ++half) {
            const int g = lane >> 2;
            const int row = interleaved ? unit_row * 16 + q * 8 + g + half * (rows / 2)
                                        : unit_row * 32 + q * 16 + half * 8 + g;
            const int64_t block = (expert * rows + row) * (columns / 16) + column * 4 + (lane & 3);
            const uint2 codes = *reinterpret_cast<const uint2*>(packed + block * 8);
            const uint32_t scale = scales[block];
            words[half] = scale ? encode(codes.x) : 0, words[half + 2] = scale ? encode(codes.y) : 0;
            scale_word |= scale_byte(scale) << 8 * (2 * q + half);
        }
        *reinterpret_cast<uint4*>(unit_at + 512 * q + 16 * lane) = make_uint4(words[0], words[1], words[2], words[3]);
    }
    *reinterpret_cast<uint32_t*>(unit_at + SCALES + 4 * lane) = scale_word;
}

// packed (matrices, rows, columns / 2), scales (matrices, rows, columns / 16) -> units. -> a cudaError_t.
inline cudaError_t repack(const uint8_t* packed, const uint8_t* scales, uint8_t* to, int matrices, int rows,
                          int columns, bool interleaved) {
    const int64_t lanes = static_cast<int64_t>(matrices) * (rows / 32) * (columns / 64) * 32;
    repack_kernel<<<static_cast<unsigned>((lanes + 255) / 256), 256>>>(packed, scales, to, lanes, rows, columns,
                                                                       interleaved);
    return cudaGetLastError();
}

}  // namespace units
