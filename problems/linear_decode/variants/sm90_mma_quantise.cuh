// sm90_mma: a piece of the input as the products take it; the same bits wherever it is done.
#pragma once

#include <cuda_fp16.h>

#include "launch.cuh"
#include "sm90_mma_formats.cuh"

namespace linear_mma {

__device__ __forceinline__ uint32_t half2_of_e4m3(uint32_t bytes) {
    uint32_t pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(bytes)));
    return pair;
}

__device__ __forceinline__ uint16_t e4m3_pair(float low, float high) {
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

// In its place behind the wait for the kernel ahead, which may have written this.
__device__ __forceinline__ uint4 load_input(const void* at) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}

// The power of two that a group of 128 is divided by, and its inverse; most: the largest magnitude.
__device__ __forceinline__ float2 group_scale(float most, bool quantise) {
    if (quantise) {  // the least one with 448 * scale >= most, which counts as 1e-4 or more: fp8.ue8m0_scale
        // 448 is 1.75 * 2^8: 2^23 more than the bits of 1.75, less one, carry where the mantissa is larger than that.
        const int exponent = (__float_as_uint(fmaxf(most, 1e-4f)) + 0x1FFFFF >> 23) - 8;
        return make_float2(__uint_as_float(exponent << 23), __uint_as_float(254 - exponent << 23));
    }
    const int exponent = min(max(static_cast<int>(__float_as_uint(most) >> 23), 28), 254) - 14;
    return make_float2(__uint_as_float(exponent << 23), __uint_as_float(254 - exponent << 23));
}

// 16 / PIECES lanes have a group of 128. -> fp16, in place; scale: of the group.
template <int PIECES>
__device__ __forceinline__ void fp8_pieces(uint4 (&pieces)[PIECES], bool quantise, float& scale) {
    uint32_t words[PIECES][4];
    float most = 0;
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        words[i][0] = pieces[i].x, words[i][1] = pieces[i].y, words[i][2] = pieces[i].z, words[i][3] = pieces[i].w;
#pragma unroll
        for (int w = 0; w < 4; ++w)
            most = fmaxf(most, fmaxf(fabsf(__uint_as_float(words[i][w] << 16)),
                                     fabsf(__uint_as_float(words[i][w] & 0xFFFF0000u))));
    }
#pragma unroll
    for (int apart = 8 / PIECES; apart; apart /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, apart));
    const float2 both = group_scale(most, quantise);
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const float low = __uint_as_float(words[i][w] << 16) * both.y;
            const float high = __uint_as_float(words[i][w] & 0xFFFF0000u) * both.y;
            words[i][w] = quantise ? half2_of_e4m3(e4m3_pair(low, high)) : ptx::pack_f16x2(low, high);
        }
        pieces[i] = make_uint4(words[i][0], words[i][1], words[i][2], words[i][3]);
    }
    scale = both.x;
}

__device__ __forceinline__ uint4 fp8_piece(uint4 raw, bool quantise, float& scale) {
    uint4 one[1] = {raw};
    fp8_pieces(one, quantise, scale);
    return one[0];
}

// a / b to nearest, inverse being 1 / b to nearest, for finite a, b and quotients that are no subnormal numbers: of 8
// bits by 24 all mantissas were tried.
__device__ __forceinline__ float quotient(float a, float b, float inverse) {
    const float near = a * inverse;
    return fmaf(fmaf(-near, b, a), inverse, near);
}

// nvfp4.encode, bit for bit, in three steps: a value by the input scale, the scale of a group, code times scale.
__device__ __forceinline__ float nvfp4_divided(float v, float input_scale, float inverse) {
    const float limit = 8192.f * input_scale;  // what is beyond 448 * 6 is all the same
    return quotient(fminf(fmaxf(v, -limit), limit), input_scale, inverse);
}

__device__ __forceinline__ float nvfp4_scale(float most) {
    constexpr float HIGH = 1 / 6.f, LOW = static_cast<float>(1 / 6. - HIGH);  // together 1 / 6, see Inverse
    const float wanted = fminf(fmaf(most, HIGH, most * LOW), 448.f);
    const uint32_t half2 = half2_of_e4m3(e4m3_pair(wanted, 0.f));
    return __half2float(__ushort_as_half(static_cast<uint16_t>(half2)));
}

// 2^22 / scale, or 0 for a scale of 0, and then all codes are 0; in two parts, together right to 2^-43. Scales have 4
// bits, so a quotient of 24 bits by one is further than that from the middle between two floats, and two products and a
// sum give it to nearest: tried for all mantissas. Of 8 bits by 24 eleven would be wrong, so the input scale has none.
struct Inverse {
    float high, low;

    __device__ __forceinline__ explicit Inverse(float scale) {
        float near;
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(scale));
        if (!(scale > 0)) near = 0;
        high = 0x1p22f * near, low = fmaf(-scale, near, 1.f) * high;
    }
};

// What the code stands for, not times the scale yet. BELOW_7: codes before they are rounded are.
template <bool BELOW_7 = false>
__device__ __forceinline__ float nvfp4_code(float divided, const Inverse& by) {
    const float code = fmaf(divided, by.high, divided * by.low);  // times 2^22
    // The power of two at or below it, at least 1: codes are half of it apart. 1.5 * 2^23 of these halves more, and the
    // sum's last bit is worth one of them.
    const float far = __uint_as_float(__float_as_uint(fmaxf(fabsf(code), 0x1p22f)) & 0x7F800000u | 0x00400000u);
    const float rounded = __fsub_rn(fmaf(code, 0x1p-22f, far), far);
    return BELOW_7 ? rounded : fminf(fmaxf(rounded, -6.f), 6.f);
}

// Two codes times their scale, exactly.
__device__ __forceinline__ uint32_t nvfp4_values(float low, float high, float scale) {
    return ptx::mul_bf16x2(ptx::pack_bf16x2(low, high), ptx::pack_bf16x2(scale, scale));
}

// Two lanes have a group of 16. -> bf16.
__device__ __forceinline__ uint4 nvfp4_piece(uint4 raw, float input_scale, float inverse) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
    float value[PIECE], most = 0;
#pragma unroll
    for (int e = 0; e < PIECE; ++e) {
        value[e] = __uint_as_float(e & 1 ? words[e / 2] & 0xFFFF0000u : words[e / 2] << 16);
        most = fmaxf(most, fabsf(value[e]));
    }
    // The quotient of the largest is the largest quotient.
    most = nvfp4_divided(fmaxf(most, __shfl_xor_sync(~0u, most, 1)), input_scale, inverse);
    const float scale = nvfp4_scale(most);
    const Inverse by(scale);
    if (most < 6.9f * scale)  // but for the smallest scales and the largest inputs: no need of limits
#pragma unroll
        for (int e = 0; e < PIECE; ++e)
            value[e] = nvfp4_code<true>(quotient(value[e], input_scale, inverse), by);
    else
#pragma unroll
        for (int e = 0; e < PIECE; ++e) value[e] = nvfp4_code(nvfp4_divided(value[e], input_scale, inverse), by);
    return make_uint4(nvfp4_values(value[0], value[1], scale), nvfp4_values(value[2], value[3], scale),
                      nvfp4_values(value[4], value[5], scale), nvfp4_values(value[6], value[7], scale));
}

// A lane has four values of a token, bf16, from column `column` of the link behind on, and four lanes a group: writes
// them where that takes them, if `inside`. held: lane i has input scale i. All lanes call this.
__device__ __forceinline__ void write_behind(const Next& next, bool inside, int token, int column, uint2 words,
                                             float held) {
    const int k = next.k_units * COLUMNS;
    const float v[4] = {__uint_as_float(words.x << 16), __uint_as_float(words.x & 0xFFFF0000u),
                        __uint_as_float(words.y << 16), __uint_as_float(words.y & 0xFFFF0000u)};
#pragma unroll 1
    for (int copy = 0; copy < next.taken_columns; copy += next.x_columns) {  // one for each input scale of the column
        const int group = min((copy + column) / k, (next.taken_columns - 1) / k);
        float input_scale = __shfl_sync(~0u, held, group & 31);
        if (group > 31) input_scale = next.input_scales[group];
        const float inverse = __frcp_rn(input_scale);
        float divided[4], most = 0;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            divided[e] = nvfp4_divided(v[e], input_scale, inverse);
            most = fmaxf(most, fabsf(divided[e]));
        }
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        const float scale = nvfp4_scale(most);
        const Inverse by(scale);
#pragma unroll
        for (int e = 0; e < 4; ++e) divided[e] = nvfp4_code(divided[e], by);
        if (inside)
            *reinterpret_cast<uint2*>(next.taken + static_cast<int64_t>(token) * next.taken_columns + copy + column) =
                make_uint2(nvfp4_values(divided[0], divided[1], scale), nvfp4_values(divided[2], divided[3], scale));
    }
}

// A lane a piece: 16 lanes have 128 columns of a group of a token, less at its end.
template <int FORMAT>
__global__ void __launch_bounds__(QUANTISERS) quantise_kernel(const __grid_constant__ Link p) {
    programmatic::trigger();  // blocks of the link may begin to copy their weights
    programmatic::wait();     // until the link ahead has written the input, and has read what is written here
    const int k = p.k_units * COLUMNS, blocks = (k + BLOCK - 1) / BLOCK, groups = p.groups();
    const int index = blockIdx.x * QUANTISERS + threadIdx.x, part = index % (BLOCK / PIECE);
    const int block = index / (BLOCK / PIECE) % blocks, row = index / (BLOCK / PIECE) / blocks;
    const int token = row / groups, group = row % groups, column = block * BLOCK + PIECE * part;
    const bool inside = token < p.tokens && column < k;
    uint4 piece = make_uint4(0, 0, 0, 0);
    if (inside) piece = load_input(p.x + static_cast<int64_t>(token) * p.x_columns + group * p.group_columns + column);
    float scale = 0;
    if constexpr (FORMAT == FP8) {
        piece = fp8_piece(piece, p.quantise, scale);
    } else {
        const float input_scale = p.input_scales[group];
        piece = nvfp4_piece(piece, input_scale, __frcp_rn(input_scale));
    }
    if (!inside) return;
    *reinterpret_cast<uint4*>(p.taken + static_cast<int64_t>(row) * k + column) = piece;
    if (FORMAT == FP8 && part == 0) p.taken_scales[row * blocks + block] = scale;
}

}  // namespace linear_mma
