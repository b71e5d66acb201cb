// How sm90_mma's input becomes what the products take, a piece at a time; the same bits wherever it is done: in each
// block (sm90_mma_input.cuh), in quantise_kernel, or in the epilogue of the previous link (write_next).
#pragma once

#include <cuda_fp16.h>

#include "launch.cuh"
#include "nvfp4.cuh"
#include "sm90_mma_formats.cuh"

namespace linear_mma {

// Four e4m3 codes. ptxas reads the upper half of a register in place, but not of one that C++ has shifted.
__device__ __forceinline__ uint2 half4_of_e4m3(uint32_t codes) {
    uint2 pairs;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}\n"
        : "=r"(pairs.x), "=r"(pairs.y)
        : "r"(codes));
    return pairs;
}

// Stays behind the wait for the previous kernel, which may have written this.
__device__ __forceinline__ uint4 load_input(const void* at) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}

// The power of two that a group of 128 is divided by, and its inverse; amax: the largest magnitude.
__device__ __forceinline__ float2 group_scale(float amax, bool quantise) {
    if (quantise) {  // the least one with 448 * scale >= amax, which counts as 1e-4 or more: fp8.ue8m0_scale
        // 448 is 1.75 * 2^8: 2^23 more than the bits of 1.75, less one, carry where the mantissa is larger than that.
        const int exponent = (__float_as_uint(fmaxf(amax, 1e-4f)) + 0x1FFFFF >> 23) - 8;
        return make_float2(__uint_as_float(exponent << 23), __uint_as_float(254 - exponent << 23));
    }
    const int exponent = min(max(static_cast<int>(__float_as_uint(amax) >> 23), 28), 254) - 14;
    return make_float2(__uint_as_float(exponent << 23), __uint_as_float(254 - exponent << 23));
}

// bf16 -> fp16, in place; 16 / PIECES lanes share the scale of SCALE_K values.
template <int PIECES>
__device__ __forceinline__ void fp8_pieces(uint4 (&pieces)[PIECES], bool quantise, float& scale) {
    uint32_t words[PIECES][4];
    float amax = 0;
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        words[i][0] = pieces[i].x, words[i][1] = pieces[i].y, words[i][2] = pieces[i].z, words[i][3] = pieces[i].w;
#pragma unroll
        for (int w = 0; w < 4; ++w)
            amax = fmaxf(amax, fmaxf(fabsf(__uint_as_float(words[i][w] << 16)),
                                     fabsf(__uint_as_float(words[i][w] & 0xFFFF0000u))));
    }
#pragma unroll
    for (int distance = 8 / PIECES; distance; distance /= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, distance));
    const float2 both = group_scale(amax, quantise);
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const float low = __uint_as_float(words[i][w] << 16) * both.y;
            const float high = __uint_as_float(words[i][w] & 0xFFFF0000u) * both.y;
            words[i][w] = quantise ? nvfp4::e4m3x2_to_half2_bits(ptx::pack_e4m3x2(low, high)) : ptx::pack_f16x2(low, high);
        }
        pieces[i] = make_uint4(words[i][0], words[i][1], words[i][2], words[i][3]);
    }
    scale = both.x;
}

__device__ __forceinline__ uint4 fp8_piece(uint4 raw, bool quantise, float& scale) {
    uint4 pieces[1] = {raw};
    fp8_pieces(pieces, quantise, scale);
    return pieces[0];
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

__device__ __forceinline__ float nvfp4_scale(float amax) {
    constexpr float HIGH = 1 / 6.f, LOW = static_cast<float>(1 / 6. - HIGH);  // together 1 / 6, see Inverse
    const float wanted = fminf(fmaf(amax, HIGH, amax * LOW), 448.f);
    const uint32_t half2 = nvfp4::e4m3x2_to_half2_bits(ptx::pack_e4m3x2(wanted, 0.f));
    return __half2float(__ushort_as_half(static_cast<uint16_t>(half2)));
}

// 2^22 / scale, or 0 for a scale of 0, and then all codes are 0; in two parts, together right to 2^-43. Scales have 4
// bits, so a quotient of 24 bits by one is further than that from the middle between two floats, and two products and a
// sum give it to nearest: tried for all mantissas. Of 8 bits by 24 eleven would be wrong, so the input scale has none.
struct Inverse {
    float high, low;

    __device__ __forceinline__ explicit Inverse(float scale) {
        float near = ptx::reciprocal_fast(scale);
        if (!(scale > 0)) near = 0;
        high = 0x1p22f * near, low = fmaf(-scale, near, 1.f) * high;
    }
};

// What the code stands for, not times the scale yet. BELOW_7: whether all are below 7 before rounding.
template <bool BELOW_7 = false>
__device__ __forceinline__ float nvfp4_code(float divided, const Inverse& by) {
    const float code = fmaf(divided, by.high, divided * by.low);  // times 2^22
    // The power of two at or below it, at least 1: codes are half of it apart. 1.5 * 2^23 of these halves more, and the
    // sum's last bit is worth one of them.
    const float half_steps = __uint_as_float(__float_as_uint(fmaxf(fabsf(code), 0x1p22f)) & 0x7F800000u | 0x00400000u);
    const float rounded = __fsub_rn(fmaf(code, 0x1p-22f, half_steps), half_steps);
    return BELOW_7 ? rounded : fminf(fmaxf(rounded, -6.f), 6.f);
}

// Two codes times their scale, exactly.
__device__ __forceinline__ uint32_t nvfp4_values(float low, float high, float scale) {
    return ptx::mul_bf16x2(ptx::pack_bf16x2(low, high), ptx::pack_bf16x2(scale, scale));
}

// Two lanes have a group of 16. -> bf16.
__device__ __forceinline__ uint4 nvfp4_piece(uint4 raw, float input_scale, float inverse) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
    float value[PIECE], amax = 0;
#pragma unroll
    for (int e = 0; e < PIECE; ++e) {
        value[e] = __uint_as_float(e & 1 ? words[e / 2] & 0xFFFF0000u : words[e / 2] << 16);
        amax = fmaxf(amax, fabsf(value[e]));
    }
    // The quotient of the largest is the largest quotient.
    amax = nvfp4_divided(fmaxf(amax, __shfl_xor_sync(~0u, amax, 1)), input_scale, inverse);
    const float scale = nvfp4_scale(amax);
    const Inverse by(scale);
    if (amax < 6.9f * scale)  // but for the smallest scales and the largest inputs: no need of limits
#pragma unroll
        for (int e = 0; e < PIECE; ++e)
            value[e] = nvfp4_code<true>(quotient(value[e], input_scale, inverse), by);
    else
#pragma unroll
        for (int e = 0; e < PIECE; ++e) value[e] = nvfp4_code(nvfp4_divided(value[e], input_scale, inverse), by);
    return make_uint4(nvfp4_values(value[0], value[1], scale), nvfp4_values(value[2], value[3], scale),
                      nvfp4_values(value[4], value[5], scale), nvfp4_values(value[6], value[7], scale));
}

// Quantises four values of a token, bf16, from column `column` of the next link on; four lanes share a scale. Writes
// them if `inside`. lane_scale: lane i has input scale i. All lanes call this.
__device__ __forceinline__ void write_next(const Next& next, bool inside, int token, int column, uint2 words,
                                           float lane_scale) {
    const int k = next.k_units * BLOCK_K;
    const float v[4] = {__uint_as_float(words.x << 16), __uint_as_float(words.x & 0xFFFF0000u),
                        __uint_as_float(words.y << 16), __uint_as_float(words.y & 0xFFFF0000u)};
#pragma unroll 1
    for (int copy = 0; copy < next.quantised_stride; copy += next.x_stride) {  // one for each input scale of the column
        const int group = min((copy + column) / k, (next.quantised_stride - 1) / k);
        float input_scale = __shfl_sync(~0u, lane_scale, group & 31);
        if (group > 31) input_scale = next.input_scales[group];
        const float inverse = __frcp_rn(input_scale);
        float divided[4], amax = 0;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            divided[e] = nvfp4_divided(v[e], input_scale, inverse);
            amax = fmaxf(amax, fabsf(divided[e]));
        }
        amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 1));
        amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 2));
        const float scale = nvfp4_scale(amax);
        const Inverse by(scale);
#pragma unroll
        for (int e = 0; e < 4; ++e) divided[e] = nvfp4_code(divided[e], by);
        if (inside)
            *reinterpret_cast<uint2*>(next.quantised + static_cast<int64_t>(token) * next.quantised_stride + copy +
                                      column) =
                make_uint2(nvfp4_values(divided[0], divided[1], scale), nvfp4_values(divided[2], divided[3], scale));
    }
}

// Quantises the input of a link once for all its blocks: a lane a piece, 16 lanes SCALE_K columns of a group of a
// token, fewer at its end.
template <Format FORMAT>
__global__ void __launch_bounds__(QUANTISE_THREADS) quantise_kernel(const __grid_constant__ Link link) {
    programmatic::trigger();  // blocks of the link may begin to copy their weights
    programmatic::wait();     // until the previous link has written the input, and has read what is written here
    const int k = link.k_units * BLOCK_K, scales = (k + SCALE_K - 1) / SCALE_K, groups = link.groups();
    const int index = blockIdx.x * QUANTISE_THREADS + threadIdx.x, part = index % (SCALE_K / PIECE);
    const int scale_column = index / (SCALE_K / PIECE) % scales, row = index / (SCALE_K / PIECE) / scales;
    const int token = row / groups, group = row % groups, column = scale_column * SCALE_K + PIECE * part;
    const bool inside = token < link.tokens && column < k;
    uint4 piece = make_uint4(0, 0, 0, 0);
    const int64_t first = static_cast<int64_t>(token) * link.x_stride;
    if (inside) piece = load_input(link.x + first + group * link.group_stride + column);
    float scale = 0;
    if constexpr (FORMAT == FP8) {
        piece = fp8_piece(piece, link.quantise, scale);
    } else {
        const float input_scale = link.input_scales[group];
        piece = nvfp4_piece(piece, input_scale, __frcp_rn(input_scale));
    }
    if (!inside) return;
    *reinterpret_cast<uint4*>(link.quantised + static_cast<int64_t>(row) * k + column) = piece;
    if (FORMAT == FP8 && part == 0) link.quantised_scales[row * scales + scale_column] = scale;
}

}  // namespace linear_mma
