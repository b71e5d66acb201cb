// Joins what the splits of a query's entries left: rows of fp16 with a scale each half, and denominators.
//
// partial  fp16 (splits, rows, 512)   the split's result, without the sink, times a power of two for each 256 dims
// stats    fp32 (splits, rows, 4)     log2 of the split's sum of exp(score), -inf if it had no entry (then nothing else
//                                     of it was written); what dims 0-255 and 256-511 are to be multiplied by; nothing
// rows: B S H. out: bf16 (rows, 512); lse: fp32 (rows,), natural; sink: fp32 (heads,).
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "launch.cuh"

namespace fmha {

// The angles by which the last 64 dims of a query's outputs are turned back, in pairs of neighbours: fp32 (B S, 32), or
// null, and outputs stay as they are. (The model rotates keys that are values too.)
struct Turn {
    const float *cosine, *sine;
};

// Those of 8 dims. No launch just ahead may write them: they are read before it has ended.
struct Angles {
    bool some;
    float4 c, s;
    __device__ __forceinline__ Angles(const Turn& turn, int query, int dim) : some(turn.cosine && dim >= 448) {
        if (!some) return;
        int64_t const at = int64_t(query) * 32 + (dim - 448) / 2;
        c = *reinterpret_cast<const float4*>(turn.cosine + at), s = *reinterpret_cast<const float4*>(turn.sine + at);
    }
    static __device__ __forceinline__ uint32_t turned(uint32_t pair, float c, float s) {
        float2 const v = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
        __nv_bfloat162 const to = __floats2bfloat162_rn(v.x * c + v.y * s, v.y * c - v.x * s);
        return *reinterpret_cast<const uint32_t*>(&to);
    }
    // 8 outputs, rounded to bf16 before as well as after.
    __device__ __forceinline__ uint4 operator()(uint4 v) const {
        if (!some) return v;
        return make_uint4(turned(v.x, c.x, s.x), turned(v.y, c.y, s.y), turned(v.z, c.z, s.z), turned(v.w, c.w, s.w));
    }
};

constexpr int COMBINE_BATCH = 8;  // rows that a thread has under way: four groups join 32 splits in one pass, and one 8

// A block ROWS rows; GROUPS groups of 64 threads share a row's splits, a thread has 8 dims. At most 32 splits a group:
// each lane of a warp has one split's stats, and hands its factor to the others.
template <int GROUPS, int ROWS>
__global__ void __launch_bounds__(64 * GROUPS * ROWS) combine(const __half* partial, const float4* stats,
                                                              const float* sink, Turn turn, __nv_bfloat16* out,
                                                              float* lse, int rows, int heads, int splits) {
    static_assert(GROUPS == 1 || ROWS == 1, "groups meet at the block's barrier");
    constexpr float LOG2E = 1.4426950408889634f;
    int const row = blockIdx.x * ROWS + threadIdx.x / (64 * GROUPS), group = threadIdx.x / 64 % GROUPS;
    int const thread = threadIdx.x % 64, lane = threadIdx.x % 32;
    if (ROWS > 1 && row >= rows) return;
    int const mine = (splits - group + GROUPS - 1) / GROUPS;  // splits group, group + GROUPS, ...
    uint4 const* const from = reinterpret_cast<const uint4*>(partial + (int64_t(group) * rows + row) * 512) + thread;
    int64_t const step = int64_t(GROUPS) * rows * (512 / 8);
    float const sink2 = sink[row % heads] * LOG2E;  // by a load that stays ahead of the wait
    Angles const angles(turn, row / heads, thread * 8);
    // Up to 8 splits are in each eight lanes, so that three turns add them up.
    int const split = mine > 8 ? lane : lane % 8;
    float4 stat = make_float4(-INFINITY, 0, 0, 0);
    programmatic::wait();
    // First, since all else waits for it; ahead of the trigger, past which the compiler moves no load.
    if (split < mine) stat = __ldcg(stats + int64_t(group + split * GROUPS) * rows + row);
    programmatic::trigger();

    uint4 raw[COMBINE_BATCH];
    auto const load = [&](int first) {
        uint4 const* at = from + first * step;
#pragma unroll
        for (int i = 0; i < COMBINE_BATCH; ++i, at += step)
            if (first + i < mine) raw[i] = __ldcg(at);
    };
    load(0);
    auto const joined = [mine](float v, auto join) {
        if (mine > 8) {
            v = join(v, __shfl_xor_sync(~0u, v, 16));
            v = join(v, __shfl_xor_sync(~0u, v, 8));
        }
#pragma unroll
        for (int i = 4; i; i /= 2) v = join(v, __shfl_xor_sync(~0u, v, i));
        return v;
    };
    float top = joined(stat.x, [](float a, float b) { return fmaxf(a, b); });
    float const weight = stat.x > -INFINITY ? exp2f(stat.x - top) : 0.f;
    float total = joined(weight, [](float a, float b) { return a + b; });
    float const factor = weight > 0 ? weight * (thread < 32 ? stat.y : stat.z) : 0.f;

    float sum[8] = {};
#pragma unroll 1
    for (int first = 0; first < mine; first += COMBINE_BATCH) {
        if (first) load(first);
        float factors[COMBINE_BATCH];  // asked for at once
#pragma unroll
        for (int i = 0; i < COMBINE_BATCH; ++i) factors[i] = __shfl_sync(~0u, factor, (first + i) % 32);
#pragma unroll
        for (int i = 0; i < COMBINE_BATCH; ++i) {
            if (first + i >= mine) break;
            float const f = factors[i];
            if (f == 0) continue;  // of an empty split the memory may hold NaN
            uint32_t const words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float2 const v = __half22float2(*reinterpret_cast<const __half2*>(&words[j]));
                sum[2 * j] = fmaf(f, v.x, sum[2 * j]), sum[2 * j + 1] = fmaf(f, v.y, sum[2 * j + 1]);
            }
        }
    }

    if constexpr (GROUPS > 1) {
        __shared__ float sums[GROUPS][8][64], tops[GROUPS], totals[GROUPS];
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[group][i][thread] = sum[i];
        if (thread == 0) tops[group] = top, totals[group] = total;
        __syncthreads();
        if (group) return;
        for (int g = 1; g < GROUPS; ++g) top = fmaxf(top, tops[g]);
        total = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] = 0;
        for (int g = 0; g < GROUPS; ++g) {
            float const f = tops[g] > -INFINITY ? exp2f(tops[g] - top) : 0.f;
            total = fmaf(f, totals[g], total);
#pragma unroll
            for (int i = 0; i < 8; ++i) sum[i] = fmaf(f, sums[g][i][thread], sum[i]);
        }
    }

    bool const any = top > -INFINITY;
    float const inverse = any ? 1.f / (total + exp2f(sink2 - top)) : 0.f;  // 0 if the sink drowns all else
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        __nv_bfloat162 const pair = __floats2bfloat162_rn(sum[2 * j] * inverse, sum[2 * j + 1] * inverse);
        words[j] = *reinterpret_cast<const uint32_t*>(&pair);
    }
    reinterpret_cast<uint4*>(out + int64_t(row) * 512)[thread] =
        angles(make_uint4(words[0], words[1], words[2], words[3]));
    if (thread == 0) lse[row] = any ? (top + log2f(total)) / LOG2E : INFINITY;
}

}  // namespace fmha
