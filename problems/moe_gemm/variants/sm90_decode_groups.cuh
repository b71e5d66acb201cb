// What sm90_decode works on: the slots t k + j of all tokens, sorted by expert into groups of up to 8 NT, and a block's
// part of the work. Each block finds that for itself, in its shared memory. An expert's slots stay in their own order,
// so that results repeat. Slots whose id is no expert are left out.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "ptx.cuh"
#include "sm90_units.cuh"

namespace decode {

constexpr int WARPS = 16, THREADS = 32 * WARPS;  // that sort, and then multiply
constexpr int ONCE = 4, TWICE = 5;               // what a unit row costs, by tiles of the group

struct Problem {
    const uint8_t *w13, *w2;  // units
    const float *g13, *g2, *in13, *in2;
    const __nv_bfloat16* x;   // (T, H)
    const int* ids;           // (T, k)
    const float* routing;     // (T, k)
    __nv_bfloat16 *out, *v;   // (T, H), (T k, I)
    unsigned long long* arrived;  // how many blocks have ended the first product, in all launches
    int tokens, topk, experts, hidden, inner;
    int stages, groups;       // of the ring; room for groups
    bool quantised, linear;   // linear: the second product alone, of x (T, I) by w2
    uint32_t nothing;         // 0, which the compiler does not know
};

struct Group {
    int expert;
    uint32_t tokens;  // where they start in the sorted slots, and 16 bits higher how many
    float first, second;  // what the sums of the two products have to be multiplied by
    __device__ int start() const { return tokens & 0xFFFF; }
    __device__ int count() const { return tokens >> 16; }
};

__device__ __forceinline__ void meet_multiplying() { ptx::meet<THREADS>(1); }

// ---- sorting: groups, slots and routing; words[32]: how many groups

template <bool QUANTISED>
__device__ __forceinline__ void put_groups(const Problem& p, Group* groups, int e, int start, int tokens, int parts) {
    const float first = p.linear ? 0 : p.g13[e] * (QUANTISED ? p.in13[e] : 1.f) * units::REST;
    const float second = p.g2[e] * (QUANTISED ? p.in2[e] : 1.f) * units::REST;
    for (int i = 0; i < parts; ++i) {  // as even as may be
        const int from = tokens * i / parts, to = tokens * (i + 1) / parts;
        groups[i] = {e, static_cast<uint32_t>(start + from | to - from << 16), first, second};
    }
}

__device__ __forceinline__ int expert_of(const Problem& p, int slot) {  // or one that sorts last and is none
    const int e = p.linear ? 0 : p.ids[slot];
    return e < 0 || e >= p.experts ? 0x7FFFFFFF : e;
}

// Up to 32 slots: one warp, a slot a lane.
template <int NT, bool QUANTISED>
__device__ __forceinline__ void sort_few(const Problem& p, Group* groups, uint16_t* slots, float* routing,
                                         uint32_t* words, int lane) {
    const int n = p.tokens * p.topk;
    const int e = lane < n ? expert_of(p, lane) : 0x7FFFFFFF;
    const float mine = lane < n && !p.linear ? p.routing[lane] : 1.f;
    const unsigned same = __match_any_sync(~0u, e);
    const bool leads = e != 0x7FFFFFFF && lane == __ffs(same) - 1;
    const int tokens = __popc(same), parts = leads ? (tokens + 8 * NT - 1) / (8 * NT) : 0;
    int place = 0, group = 0;
    for (int i = 0; i < n; ++i) {
        const int other = __shfl_sync(~0u, e, i), others = __shfl_sync(~0u, parts, i);
        place += other < e || (other == e && i < lane);
        group += other < e ? others : 0;
    }
    if (e != 0x7FFFFFFF) slots[place] = lane, routing[place] = mine;
    if (leads) put_groups<QUANTISED>(p, groups + group, e, place, tokens, parts);
    const int all = __reduce_add_sync(~0u, parts);
    if (lane == 0) words[32] = all;
}

// Any number: each warp counts a part of the slots. scratch: what WARPS times p.experts counts and n ranks take.
template <int NT, bool QUANTISED>
__device__ __forceinline__ void sort(const Problem& p, uint8_t* scratch, Group* groups, uint16_t* slots, float* routing,
                                     uint32_t* words, int warp, int lane) {
    const int n = p.tokens * p.topk, part = (n + THREADS - 1) / THREADS * 32;
    uint16_t* seen = reinterpret_cast<uint16_t*>(scratch);  // [WARPS][experts], then where they start
    uint16_t* rank = seen + WARPS * p.experts;              // [n], among its expert's in the same warp's part
    for (int i = threadIdx.x; i < WARPS * p.experts; i += THREADS) seen[i] = 0;
    meet_multiplying();
    for (int base = warp * part; base < min(n, (warp + 1) * part); base += 32) {
        const int slot = base + lane, e = slot < n ? expert_of(p, slot) : 0x7FFFFFFF;
        const unsigned same = __match_any_sync(~0u, e);
        const bool some = e != 0x7FFFFFFF;
        const int before = some ? seen[warp * p.experts + e] : 0;
        __syncwarp();
        if (slot < n) rank[slot] = before + __popc(same & (1u << lane) - 1);
        if (some && lane == __ffs(same) - 1) seen[warp * p.experts + e] = before + __popc(same);
        __syncwarp();
    }
    meet_multiplying();
    uint32_t carry = 0;  // tokens, and 16 bits higher groups, of the experts before
    for (int base = 0; base < p.experts; base += THREADS) {
        const int e = base + threadIdx.x;
        int tokens = 0;
        if (e < p.experts)
            for (int w = 0; w < WARPS; ++w) {
                const int more = seen[w * p.experts + e];
                seen[w * p.experts + e] = tokens, tokens += more;
            }
        const int parts = (tokens + 8 * NT - 1) / (8 * NT);
        const uint32_t mine = tokens | parts << 16;
        uint32_t sum = mine;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const uint32_t left = __shfl_up_sync(~0u, sum, d);
            if (lane >= d) sum += left;
        }
        if (lane == 31) words[warp] = sum;
        meet_multiplying();
        uint32_t before = carry;
        for (int w = 0; w < WARPS; ++w) {
            if (w < warp) before += words[w];
            carry += words[w];
        }
        before += sum - mine;
        meet_multiplying();
        if (e < p.experts) {
            const int start = before & 0xFFFF;
            for (int w = 0; w < WARPS; ++w) seen[w * p.experts + e] += start;
            if (parts) put_groups<QUANTISED>(p, groups + (before >> 16), e, start, tokens, parts);
        }
    }
    if (threadIdx.x == 0) words[32] = carry >> 16;
    meet_multiplying();
    for (int base = warp * part; base < min(n, (warp + 1) * part); base += 32) {
        const int slot = base + lane, e = slot < n ? expert_of(p, slot) : 0x7FFFFFFF;
        if (e != 0x7FFFFFFF) {
            const int to = seen[warp * p.experts + e] + rank[slot];
            slots[to] = slot;
            routing[to] = p.linear ? 1.f : p.routing[slot];
        }
    }
}

// The block's part of the first product's unit rows: words[33], the first of all groups' rows one after another, and
// words[34], how many. A group of two tiles takes TWICE / ONCE as long as one of one. One warp.
template <int NT>
__device__ __forceinline__ void share_out(const Group* groups, uint32_t* words, int rows, int lane) {
    const int count = words[32];
    auto weight = [&](int g) { return g >= count ? 0 : NT > 1 && groups[g].count() > 8 ? TWICE : ONCE; };
    uint32_t all = 0, before = 0;
    for (int base = 0; base < count; base += 32) all += __reduce_add_sync(~0u, weight(base + lane));
    const uint64_t work = static_cast<uint64_t>(all) * rows;
    const uint32_t from = work * blockIdx.x / gridDim.x, to = work * (blockIdx.x + 1) / gridDim.x;
    if (lane == 0) words[33] = words[34] = count * rows;  // where `to` is the end
    __syncwarp();
    for (int base = 0; base < count; base += 32) {
        const int g = base + lane, mine = weight(g);
        uint32_t sum = mine;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const uint32_t left = __shfl_up_sync(~0u, sum, d);
            if (lane >= d) sum += left;
        }
        const uint32_t low = (before + sum - mine) * rows, high = low + mine * rows;
        if (low <= from && from < high) words[33] = g * rows + (from - low) / mine;
        if (low <= to && to < high) words[34] = g * rows + (to - low) / mine;
        before += __shfl_sync(~0u, sum, 31);
    }
    __syncwarp();
    if (lane == 0) words[34] -= words[33];
}

}  // namespace decode
