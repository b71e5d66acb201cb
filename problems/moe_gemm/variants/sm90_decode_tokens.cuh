// Tokens of sm90_decode as operands: in registers, in NVFP4 where a case says so.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "sm90_decode_block.cuh"

namespace decode {

// In its place among barriers: what other blocks have written before one. (__ldcg may be moved before it.)
__device__ __forceinline__ uint4 load_global(const void* at) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
    return v;
}

// 16 values in eight bf16x2, as NVFP4 with this input scale has them, without the input scale: nvfp4.encode.
__device__ __forceinline__ void quantise(uint32_t* pairs, float input_scale) {
    float most = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float2 two = __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(pairs + i));
        most = fmaxf(most, fmaxf(fabsf(two.x), fabsf(two.y)));
    }
    most = __fdiv_rn(most, input_scale);  // the largest quotient: rounding keeps the order
    __nv_fp8_e4m3 byte;
    byte.__x = __nv_cvt_float_to_fp8(fminf(__fdiv_rn(most, 6.f), 448.f), __NV_SATFINITE, __NV_E4M3);
    const float scale = float(byte);
    auto value = [&](float x) {
        if (scale == 0) return 0.f;
        // The power of two at or below the value, at least 1: codes are half of it apart, even ones a whole of it.
        x = fminf(fmaxf(__fdiv_rn(__fdiv_rn(x, input_scale), scale), -6.f), 6.f);
        const float power = __uint_as_float(__float_as_uint(fmaxf(fabsf(x), 1.f)) & 0x7F800000u);
        return rintf(__fdiv_rn(x * 2, power)) * power * 0.5f * scale;
    };
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float2 two = __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(pairs + i));
        const __nv_bfloat162 done = __floats2bfloat162_rn(value(two.x), value(two.y));
        pairs[i] = *reinterpret_cast<const uint32_t*>(&done);
    }
}

// B fragments of a group's tokens over the warp's own columns, units c WARPS + warp: pairs[..][c][2 j] and the one
// behind for step j. Where a group has fewer tokens its last one is used: no thread reads those sums.
template <int C, int NT>
struct Tokens {
    uint32_t pairs[NT][C][8];
    const __nv_bfloat16* from[NT];  // where this lane's part of unit 0 begins, of the group that is taken next

    // rows: of `width` values, by slot / divisor.
    __device__ __forceinline__ void aim(const __nv_bfloat16* rows, int width, int divisor, int warp, const Group& group,
                                        const uint16_t* slots, int lane) {
#pragma unroll
        for (int t = 0; t < NT; ++t) {
            const int slot = slots[group.start() + min(8 * t + lane / 4, group.count() - 1)];
            from[t] = rows + static_cast<int64_t>(slot / divisor) * width + warp * units::COLUMNS + 16 * (lane & 3);
        }
    }

    // Unit c of the first tile, or of all.
    __device__ __forceinline__ void take(int c, bool both) {
#pragma unroll
        for (int t = 0; t < NT; ++t)
            if (t == 0 || both) {
                const uint4* at = reinterpret_cast<const uint4*>(from[t] + c * WARPS * units::COLUMNS);
                const uint4 a = load_global(at), b = load_global(at + 1);
                pairs[t][c][0] = a.x, pairs[t][c][1] = a.y, pairs[t][c][2] = a.z, pairs[t][c][3] = a.w;
                pairs[t][c][4] = b.x, pairs[t][c][5] = b.y, pairs[t][c][6] = b.z, pairs[t][c][7] = b.w;
            }
    }

    __device__ __forceinline__ void quantised(int units_here, bool both, float input_scale) {
#pragma unroll
        for (int t = 0; t < NT; ++t)
#pragma unroll
            for (int c = 0; c < C; ++c) {
                if (c >= units_here || (t && !both)) continue;
                uint32_t eight[8];
#pragma unroll
                for (int i = 0; i < 8; ++i) eight[i] = pairs[t][c][i];
                quantise(eight, input_scale);
#pragma unroll
                for (int i = 0; i < 8; ++i) pairs[t][c][i] = eight[i];
            }
    }
};

}  // namespace decode
