// The warps of a block of sm90_decode that add up what the others multiply, and the thread that tells other blocks.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "sm90_decode_block.cuh"
#include "sm90_decode_tokens.cuh"

namespace decode {

// Tells the other blocks of which batches this one has written its v, and this block's threads which all have.
// `written` and `ready` are barriers, one a batch. One thread.
__device__ __forceinline__ void watch(const Problem& p, uint32_t written, uint32_t ready, int batches) {
    unsigned long long all = 0;  // of each counter when all have told: they grow together, by gridDim.x a launch
    int told = 0, seen = 0;
    while (seen < batches) {
        if (told < batches && is_over(written + 8 * told)) {
            if (told == 0) {
                unsigned long long before;
                asm volatile("atom.add.acq_rel.gpu.global.u64 %0, [%1], 1;"
                             : "=l"(before) : "l"(p.arrived) : "memory");
                all = before - before % gridDim.x + gridDim.x;
                for (int i = batches; i < BATCHES; ++i)  // of batches that there are none of
                    asm volatile("red.relaxed.gpu.global.add.u64 [%0], 1;" ::"l"(p.arrived + i * COUNTER_APART)
                                 : "memory");
            } else {
                asm volatile("red.release.gpu.global.add.u64 [%0], 1;" ::"l"(p.arrived + told * COUNTER_APART)
                             : "memory");
            }
            ++told;
        }
        if (seen < told) {
            unsigned long long now;
            asm volatile("ld.acquire.gpu.global.u64 %0, [%1];"
                         : "=l"(now) : "l"(p.arrived + seen * COUNTER_APART) : "memory");
            if (now >= all) arrive(ready + 8 * seen++);
        }
    }
}

// The warps' sums of each unit row, added up and taken on: to v, or into the sum over experts. Thread (q, lane) has
// group of rows q, and of each tile what that lane has in its registers: rows g and g + 8, tokens 2 c and 2 c + 1.
// A unit row of v is 16 values of each token, which is a block of NVFP4.
template <int NT, int FIRST>
__device__ __forceinline__ void epilogue(const Problem& p, const Layout& at, uint8_t* smem, int q, int lane,
                                       int count) {
    const Group* groups = reinterpret_cast<const Group*>(smem + at.groups);
    const float* routing = reinterpret_cast<const float*>(smem + at.routing);
    const uint16_t* slots = reinterpret_cast<const uint16_t*>(smem + at.slots);
    const Part* parts = reinterpret_cast<const Part*>(smem + at.parts);
    const uint32_t read = smem_address(smem + at.barriers) + 16 * p.stages, written = read + 24;
    const int rows1 = p.inner / 16, rows2 = p.hidden / units::ROWS;
    int buffer = 0;
    auto added = [&](int tile) {
        const float* from = reinterpret_cast<const float*>(smem + at.sums) + buffer * WARPS * NT * 256 +
                            (tile * 2 + q) * 128 + 4 * lane;
        float4 all = {};
#pragma unroll 4
        for (int w = 0; w < WARPS; ++w) {
            const float4 one = *reinterpret_cast<const float4*>(from + w * NT * 256);
            all.x += one.x, all.y += one.y, all.z += one.z, all.w += one.w;
        }
        return all;
    };
    const int batches = batches_of<BATCHED<NT>>(count);
    // What the sums of the two products have to be multiplied by. Here, so that no copy waits for it.
    float2* factors = reinterpret_cast<float2*>(smem + at.factors);
    float* largest = reinterpret_cast<float*>(smem + at.largest);
    int turn = 0;
#pragma unroll 1
    for (int i = 32 * q + lane; i < count; i += EPILOGUE_THREADS) {
        const int e = groups[i].expert;
        factors[i].x = p.g13[e] * (p.quantised ? p.in13[e] : 1.f) * units::REST;
        factors[i].y = p.g2[e] * (p.quantised ? p.in2[e] : 1.f) * units::REST;
    }
    epilogue_sync();
    if (lane < batches) {  // a first look at either takes its time
        prefetch_l2(p.arrived + lane * COUNTER_APART);
        prefetch_l2(p.v);
    }
    for (int part = FIRST; part < batches + int(batches > 0); ++part) {
        int group = parts[part].group, row = parts[part].row;
        const int items = parts[part].items;
        for (int i = 0; i < items; ++i) {
            const Group g = groups[group];
            const float factor = factors[group].x;
            float input_scale = 1;  // before the sums have come, where there are registers
            if (NT == 1 && p.quantised) input_scale = p.in2[g.expert];
            sums_sync(buffer);
            for (int tile = 0; 8 * tile < g.count(); ++tile) {
                const float4 all = added(tile);
                const float gates[2] = {all.x, all.y}, ups[2] = {all.z, all.w};
                const int first = 8 * tile + 2 * (lane & 3);
                float values[2] = {}, most[2];
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    if (first + j >= g.count()) continue;
                    const float gate = fminf(gates[j] * factor, 10.f);
                    const float up = fminf(fmaxf(ups[j] * factor, -10.f), 10.f);
                    const float v = gate / (1.f + __expf(-gate)) * up * routing[g.start() + first + j];
                    values[j] = __bfloat162float(__float2bfloat16_rn(v));
                }
                if (p.quantised) {
                    float* mine = largest + turn * 16 + q * 8 + 2 * (lane & 3);
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        most[j] = fabsf(values[j]);
#pragma unroll
                        for (int apart = 4; apart < 32; apart *= 2)
                            most[j] = fmaxf(most[j], __shfl_xor_sync(~0u, most[j], apart));
                        if (lane < 4) mine[j] = most[j];
                    }
                    epilogue_sync();
                    const InputScale by(NT == 1 ? input_scale : p.in2[g.expert]);
                    const float* other = largest + turn * 16 + (1 - q) * 8 + 2 * (lane & 3);
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const float scale = block_scale(by.divide<true>(fmaxf(most[j], other[j])));
                        values[j] = code_of<true>(by.divide<true>(values[j]), BlockInverse(scale)) * scale;
                    }
                    turn ^= 1;
                }
#pragma unroll
                for (int j = 0; j < 2; ++j)
                    if (first + j < g.count())
                        p.v[static_cast<int64_t>(slots[g.start() + first + j]) * p.inner + row * 16 + q * 8 + lane / 4] =
                            __float2bfloat16_rn(values[j]);
            }
            arrive(read + 8 * buffer);
            buffer ^= 1;
            if (++row == rows1) row = 0, ++group;
        }
        if (part) arrive(written + 8 * (part - 1));  // with the first batch the shared expert's v is there too
    }
    float* total = reinterpret_cast<float*>(smem + at.total) + q * 16 + lane / 4;
    const bool single = FIRST == 0 && p.tokens == 1;  // then the sum over experts is in registers, and goes out from there
    for (int row = blockIdx.x; row < rows2; row += gridDim.x) {
        float2 sum = {};
        for (int i = 0; i < count; ++i) {
            const Group g = groups[i];
            const float factor = factors[i].y;
            sums_sync(buffer);
            for (int tile = 0; 8 * tile < g.count(); ++tile) {
                const float4 all = added(tile);
                const float above[2] = {all.x, all.y}, below[2] = {all.z, all.w};
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int member = 8 * tile + 2 * (lane & 3) + j;
                    if (member >= g.count()) continue;
                    if (single) {
                        sum.x += above[j] * factor, sum.y += below[j] * factor;
                        continue;
                    }
                    float* to = total + slots[g.start() + member] / p.topk * MARGIN;
                    to[0] += above[j] * factor, to[8] += below[j] * factor;
                }
            }
            arrive(read + 8 * buffer);
            buffer ^= 1;
            __syncwarp();  // the next group may have the same token elsewhere
        }
        if (!single) {
            arrive(read + 16);
        } else if (lane % 4 == 0) {
            __nv_bfloat16* to = p.out + row * units::ROWS + q * 16 + lane / 4;
            to[0] = __float2bfloat16_rn(sum.x), to[8] = __float2bfloat16_rn(sum.y);
        }
    }
}

}  // namespace decode
