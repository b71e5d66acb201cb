// Tokens of sm90_decode as operands, in registers; and their values in NVFP4 or FP8, where a case says so.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "launch.cuh"
#include "sm90_decode_block.cuh"
#include "sm90_decode_fp8.cuh"

namespace decode {

// In its place among barriers: what other blocks have written before one. (__ldcg may be moved before it.)
__device__ __forceinline__ uint4 load_global(const void* at) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
    return v;
}

// NVFP4 as nvfp4.encode has it: the scale of 16 values whose largest magnitude is `most`, and a value's, without the
// input scale. A bf16 holds that exactly.
__device__ __forceinline__ float block_scale(float most, float input_scale) {
    most = __fdiv_rn(most, input_scale);  // the largest quotient: rounding keeps the order
    __nv_fp8_e4m3 byte;
    byte.__x = __nv_cvt_float_to_fp8(fminf(__fdiv_rn(most, 6.f), 448.f), __NV_SATFINITE, __NV_E4M3);
    return float(byte);
}
__device__ __forceinline__ float quantised(float x, float input_scale, float scale) {
    if (scale == 0) return 0.f;
    // The power of two at or below the value, at least 1: codes are half of it apart, even ones a whole of it.
    x = fminf(fmaxf(__fdiv_rn(__fdiv_rn(x, input_scale), scale), -6.f), 6.f);
    const uint32_t power = __float_as_uint(fmaxf(fabsf(x), 1.f)) & 0x7F800000u;
    const float inverse = __uint_as_float(0x7F000000u - power);
    return rintf(x * 2 * inverse) * __uint_as_float(power) * 0.5f * scale;
}

// p.x (T, width) -> to (T k, width): each slot's row as its expert's input scale quantises it; zeros for an id that is
// no expert. Every thread makes 16 values.
__global__ void quantise_rows(const Problem p, __nv_bfloat16* to, int width) {
    programmatic::trigger();
    programmatic::wait();
    const int i = blockIdx.x * blockDim.x + threadIdx.x, blocks = width / 16;
    if (i >= p.tokens * p.topk * blocks) return;
    const int slot = i / blocks, block = i % blocks, e = expert_of(p, slot);
    uint4 word[2] = {};
    if (e < p.experts) {
        const uint4* from =
            reinterpret_cast<const uint4*>(p.x + static_cast<int64_t>(slot / p.topk) * width) + 2 * block;
        word[0] = from[0], word[1] = from[1];
        __nv_bfloat162* two = reinterpret_cast<__nv_bfloat162*>(word);
        float most = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float2 values = __bfloat1622float2(two[j]);
            most = fmaxf(most, fmaxf(fabsf(values.x), fabsf(values.y)));
        }
        const float input_scale = (p.linear ? p.in2 : p.in13)[e], scale = block_scale(most, input_scale);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float2 values = __bfloat1622float2(two[j]);
            two[j] = __floats2bfloat162_rn(quantised(values.x, input_scale, scale),
                                           quantised(values.y, input_scale, scale));
        }
    }
    uint4* out = reinterpret_cast<uint4*>(to + static_cast<int64_t>(slot) * width) + 2 * block;
    out[0] = word[0], out[1] = word[1];
}

// What a lane has of a call's one token, of up to 4 units a warp: 8 neighbouring values, half a block of NVFP4.
__device__ __forceinline__ uint4 load_half(const __nv_bfloat16* x, int units, int warp, int lane) {
    const int unit = lane / 8 * WARPS + warp;
    return unit < units ? load_global(x + unit * units::COLUMNS + 8 * (lane & 7)) : make_uint4(0, 0, 0, 0);
}

// B fragments of a group's tokens over the warp's own columns, units c WARPS + warp: pairs[..][c][2 j] and the one
// behind for step j. Where a group has fewer tokens its last one is used: no thread reads those sums.
// FP8: the warp's own columns are units that neighbour in twos, see unit_of.
template <int C, int NT, bool FP8 = false>
struct Tokens {
    uint32_t pairs[NT][C][8];
    const __nv_bfloat16* from[NT];  // where this lane's part of unit 0 begins, of the group that is taken next

    // rows: of `width` values, by slot / divisor.
    __device__ __forceinline__ void aim(const __nv_bfloat16* rows, int width, int divisor, int warp, const Group& group,
                                        const uint16_t* slots, int lane) {
#pragma unroll
        for (int t = 0; t < NT; ++t) {
            const int slot = slots[group.start() + min(8 * t + lane / 4, group.count() - 1)];
            from[t] = rows + static_cast<int64_t>(slot / divisor) * width + unit_of<FP8>(0, warp) * units::COLUMNS +
                      16 * (lane & 3);
        }
    }

    // All units of a call's one token, as an input scale quantises it. half: what load_half returned.
    __device__ __forceinline__ void quantise(const uint4& half, float input_scale, int lane) {
        static_assert(C == 4 && NT == 1);
        uint32_t words[4] = {half.x, half.y, half.z, half.w};
        __nv_bfloat162* two = reinterpret_cast<__nv_bfloat162*>(words);
        float most = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float2 values = __bfloat1622float2(two[j]);
            most = fmaxf(most, fmaxf(fabsf(values.x), fabsf(values.y)));
        }
        const float scale = block_scale(fmaxf(most, __shfl_xor_sync(~0u, most, 1)), input_scale);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float2 values = __bfloat1622float2(two[j]);
            two[j] = __floats2bfloat162_rn(quantised(values.x, input_scale, scale),
                                           quantised(values.y, input_scale, scale));
        }
#pragma unroll
        for (int c = 0; c < 4; ++c)
#pragma unroll
            for (int j = 0; j < 8; ++j)
                pairs[0][c][j] = __shfl_sync(~0u, words[j % 4], 8 * c + 2 * (lane & 3) + j / 4);
    }

    // Unit c of the first tile, or of all.
    __device__ __forceinline__ void take(int c, bool both) {
#pragma unroll
        for (int t = 0; t < NT; ++t)
            if (t == 0 || both) {
                const uint4* at = reinterpret_cast<const uint4*>(from[t] + unit_of<FP8>(c, 0) * units::COLUMNS);
                const uint4 a = load_global(at), b = load_global(at + 1);
                pairs[t][c][0] = a.x, pairs[t][c][1] = a.y, pairs[t][c][2] = a.z, pairs[t][c][3] = a.w;
                pairs[t][c][4] = b.x, pairs[t][c][5] = b.y, pairs[t][c][6] = b.z, pairs[t][c][7] = b.w;
            }
    }

    // All units that have been taken, of a row of `all`, as FP8 holds them. A last group of 64 columns is one unit.
    __device__ __forceinline__ void round(int all, int warp, bool both) {
        static_assert(C % 2 == 0);
#pragma unroll
        for (int t = 0; t < NT; ++t)
            if (t == 0 || both)
#pragma unroll
                for (int c = 0; c < C; c += 2) {
                    if (unit_of<true>(c, warp) >= all) break;
                    uint32_t most = largest(pairs[t][c]);
                    if (unit_of<true>(c + 1, warp) < all) most = larger(most, largest(pairs[t][c + 1]));
                    most = larger(most, most >> 16);
                    most = larger(most, __shfl_xor_sync(~0u, most, 1));
                    most = larger(most, __shfl_xor_sync(~0u, most, 2));
                    const uint32_t least = least_normal(most);
#pragma unroll
                    for (int i = 0; i < 16; ++i)
                        pairs[t][c + i / 8][i % 8] = nearest_e4m3(pairs[t][c + i / 8][i % 8], least);
                }
    }
};

}  // namespace decode
