// Tokens of sm90_decode as operands, in registers; and their values in NVFP4 or FP8, where a case says so.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "launch.cuh"
#include "ptx.cuh"
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

// NVFP4 as nvfp4.encode has it, bit for bit, without a division: a value by the input scale, the scale of 16 values, a
// code. As problems/linear_decode/variants/sm90_mma.cu does it, where all mantissas were tried.

// What values are divided by: an input scale.
struct InputScale {
    float scale, inverse, limit;  // what is beyond 448 * 6 is all the same

    __device__ __forceinline__ explicit InputScale(float scale) : scale(scale) {
        inverse = __frcp_rn(scale), limit = 8192.f * scale;
    }
    // To nearest, of a bf16; unless LIMITED, of one below the limit.
    template <bool LIMITED>
    __device__ __forceinline__ float divide(float value) const {
        if (LIMITED) value = fminf(fmaxf(value, -limit), limit);
        const float near = value * inverse;
        return fmaf(fmaf(-near, scale, value), inverse, near);
    }
};

// The scale of 16 values, the largest of which, divided, is `most`.
__device__ __forceinline__ float block_scale(float most) {
    constexpr float HIGH = 1 / 6.f, LOW = static_cast<float>(1 / 6. - HIGH);  // together 1 / 6, as BlockInverse is
    __nv_fp8_e4m3 byte;
    byte.__x = __nv_cvt_float_to_fp8(fminf(fmaf(most, HIGH, most * LOW), 448.f), __NV_SATFINITE, __NV_E4M3);
    return float(byte);
}

// 2^22 / scale, or 0 for a scale of 0, and then all codes are 0; in two parts, together right to 2^-43. Scales have 4
// bits, so that two products and a sum give a quotient of 24 bits by one to nearest. The input scale has more.
struct BlockInverse {
    float high, low;

    __device__ __forceinline__ explicit BlockInverse(float scale) {
        const float near = scale > 0 ? ptx::reciprocal_fast(scale) : 0.f;
        high = 0x1p22f * near, low = fmaf(-scale, near, 1.f) * high;
    }
};

// What the code of a divided value stands for, not times the scale yet. LIMITED: it may be beyond 6.
template <bool LIMITED>
__device__ __forceinline__ float code_of(float divided, const BlockInverse& by) {
    const float code = fmaf(divided, by.high, divided * by.low);  // times 2^22
    // The power of two at or below it, at least 1: codes are half of it apart. 1.5 * 2^23 of these halves more, and the
    // sum's last bit is worth one of them.
    const float far = __uint_as_float(__float_as_uint(fmaxf(fabsf(code), 0x1p22f)) & 0x7F800000u | 0x00400000u);
    const float rounded = __fsub_rn(fmaf(code, 0x1p-22f, far), far);
    return LIMITED ? fminf(fmaxf(rounded, -6.f), 6.f) : rounded;
}

// Eight bf16 values, half of a block whose largest magnitude is `most`: each as NVFP4 has it, without the input scale.
// A bf16 holds that exactly.
__device__ __forceinline__ void quantise_words(uint32_t (&words)[4], float most, const InputScale& by) {
    most = by.divide<true>(most);  // the largest quotient: rounding keeps the order
    const float scale = block_scale(most);
    const BlockInverse inverse(scale);
    const uint32_t scales = ptx::pack_bf16x2(scale, scale);
    const auto all = [&](auto limited) {
        constexpr bool LIMITED = decltype(limited)::value;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float low = by.divide<LIMITED>(__uint_as_float(words[j] << 16));
            const float high = by.divide<LIMITED>(__uint_as_float(words[j] & 0xFFFF0000u));
            words[j] = ptx::mul_bf16x2(
                ptx::pack_bf16x2(code_of<LIMITED>(low, inverse), code_of<LIMITED>(high, inverse)), scales);
        }
    };
    if (most < 6.9f * scale)  // but for the smallest scales and the largest inputs
        all(std::false_type());
    else
        all(std::true_type());
}
// Two bf16 values of blocks whose scales are the halves of `scales`: likewise.
__device__ __forceinline__ uint32_t quantise_pair(uint32_t pair, uint32_t scales, const InputScale& by) {
    const auto code = [&](uint32_t value, uint32_t scale) {
        return code_of<true>(by.divide<true>(__uint_as_float(value)), BlockInverse(__uint_as_float(scale)));
    };
    return ptx::mul_bf16x2(ptx::pack_bf16x2(code(pair << 16, scales << 16),
                                            code(pair & 0xFFFF0000u, scales & 0xFFFF0000u)), scales);
}
__device__ __forceinline__ float largest_of(const uint32_t (&words)[4]) {
    float most = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j)
        most = fmaxf(most, fmaxf(fabsf(__uint_as_float(words[j] << 16)), fabsf(__uint_as_float(words[j] & 0xFFFF0000u))));
    return most;
}

// p.x (T, H) -> to (T k, H): each slot's row as its expert's input scale quantises it; zeros for an id that is
// no expert. Every thread makes 16 values.
__global__ void quantise_rows(const Problem p, __nv_bfloat16* to) {
    const int width = p.hidden;
    programmatic::trigger();
    programmatic::wait();
    const int i = blockIdx.x * blockDim.x + threadIdx.x, blocks = width / 16;
    if (i >= p.tokens * p.topk * blocks) return;
    const int slot = i / blocks, block = i % blocks, e = expert_of(p, slot);
    uint32_t words[2][4] = {};
    if (e < p.experts) {
        const uint4* from =
            reinterpret_cast<const uint4*>(p.x + static_cast<int64_t>(slot / p.topk) * width) + 2 * block;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 v = from[half];
            words[half][0] = v.x, words[half][1] = v.y, words[half][2] = v.z, words[half][3] = v.w;
        }
        const float most = fmaxf(largest_of(words[0]), largest_of(words[1]));
        const InputScale by(p.in13[e]);
        quantise_words(words[0], most, by), quantise_words(words[1], most, by);
    }
    uint4* out = reinterpret_cast<uint4*>(to + static_cast<int64_t>(slot) * width) + 2 * block;
#pragma unroll
    for (int half = 0; half < 2; ++half)
        out[half] = make_uint4(words[half][0], words[half][1], words[half][2], words[half][3]);
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
        const float most = largest_of(words);
        quantise_words(words, fmaxf(most, __shfl_xor_sync(~0u, most, 1)), InputScale(input_scale));
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
