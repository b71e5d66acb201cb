// Few tokens an expert: each weight is read once, at the rate of memory, and meets 8 or 16 tokens in mma.sync as they
// lie in registers. Both products in one launch of a block of threads a multiprocessor.
//
// A block works on one unit row (32 rows of weights) at a time, its 16 warps on every sixteenth unit of it, so that 16
// neighbouring units, one for each warp, are one bulk copy. Another thread does nothing but copy, as far ahead as the
// ring in shared memory has room: the next unit row, the next expert, and, while the blocks wait for each other between
// the two products, the second product's weights. Two more warps add the sixteen sums of a unit row and take them on.
//
// First product: unit rows of all groups (up to 8 NT tokens of an expert), one after another, shared out evenly.
// Second: a block has 32 rows of out and takes all groups in turn, so the sum over experts stays in shared memory and
// in one order. Every block sorts the tokens by itself; that is quicker than a launch for it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "sm90_units.cuh"

namespace decode {

constexpr int WARPS = 16, THREADS = 32 * WARPS;  // that multiply
constexpr int ONCE = 4, TWICE = 5;               // what a unit row costs, by tiles of the group
constexpr int ADDING = 64;                       // threads that add the warps' sums up
constexpr int LAUNCHED = THREADS + 128;          // with one that copies, and these; registers go by four warps
constexpr int EACH = 2, STAGE = EACH * WARPS * units::BYTES;  // units for each warp, and bytes, of a place in the ring
constexpr int GROUP_BYTES = 16, MARGIN = 33;  // floats from a token to the next in the sum
constexpr int SHARED = 227 * 1024;

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

// Byte offsets in shared memory. The ring comes first; while nothing is in it, it holds what sorting needs.
struct Layout {
    int sums, total, groups, slots, routing, words, barriers, bytes;
    __host__ __device__ Layout(const Problem& p, int tiles) {
        const int n = p.tokens * p.topk;
        sums = p.stages * STAGE;
        total = sums + 2 * WARPS * 2 * tiles * 512;
        groups = total + (p.tokens * MARGIN * 4 + 15) / 16 * 16;
        routing = groups + p.groups * GROUP_BYTES;
        slots = routing + n * 4;
        words = (slots + n * 2 + 15) / 16 * 16;
        barriers = words + 64 * 4;
        bytes = barriers + p.stages * 16 + 24;
    }
};

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void copy(uint32_t to, const uint8_t* from, uint32_t bytes, uint32_t barrier,
                                     uint64_t policy) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}

__device__ __forceinline__ uint4 load4(uint32_t at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}

// In its place among barriers: what other blocks have written before one. (__ldcg may be moved before it.)
__device__ __forceinline__ uint4 load_global(const void* at) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
    return v;
}

__device__ __forceinline__ uint32_t load1(uint32_t at) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}

__device__ __forceinline__ void multiply(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                         uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// 16 values in eight bf16x2, as NVFP4 with this input scale has them, without the input scale: nvfp4.encode.
__device__ __noinline__ void quantise(uint32_t* pairs, float input_scale) {
    float values[16], most = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float2 two = __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(pairs + i));
        values[2 * i] = __fdiv_rn(two.x, input_scale), values[2 * i + 1] = __fdiv_rn(two.y, input_scale);
        most = fmaxf(most, fmaxf(fabsf(values[2 * i]), fabsf(values[2 * i + 1])));
    }
    __nv_fp8_e4m3 byte;
    byte.__x = __nv_cvt_float_to_fp8(fminf(__fdiv_rn(most, 6.f), 448.f), __NV_SATFINITE, __NV_E4M3);
    const float scale = float(byte);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        if (scale == 0) {
            values[i] = 0;
            continue;
        }
        // The power of two at or below the value, at least 1: codes are half of it apart, even ones a whole of it.
        const float value = fminf(fmaxf(__fdiv_rn(values[i], scale), -6.f), 6.f);
        const float power = __uint_as_float(__float_as_uint(fmaxf(fabsf(value), 1.f)) & 0x7F800000u);
        values[i] = rintf(__fdiv_rn(value * 2, power)) * power * 0.5f * scale;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const __nv_bfloat162 two = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
        pairs[i] = *reinterpret_cast<const uint32_t*>(&two);
    }
}

// Barriers: 1 of those that multiply, 2 and 3 for a buffer of sums, 4 of those that add.
__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }
__device__ __forceinline__ void meet_adding() { asm volatile("bar.sync 4, %0;" ::"n"(ADDING) : "memory"); }
__device__ __forceinline__ void sums_written(int buffer) {
    asm volatile("bar.arrive %0, %1;" ::"r"(2 + buffer), "n"(THREADS + ADDING) : "memory");
}
__device__ __forceinline__ void wait_for_sums(int buffer) {
    asm volatile("bar.sync %0, %1;" ::"r"(2 + buffer), "n"(THREADS + ADDING) : "memory");
}
__device__ __forceinline__ void arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// ---- sorting: groups, and slots by expert in their own order, with their routing weights; words[32]: how many groups
// ----

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
    meet();
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
    meet();
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
        meet();
        uint32_t before = carry;
        for (int w = 0; w < WARPS; ++w) {
            if (w < warp) before += words[w];
            carry += words[w];
        }
        before += sum - mine;
        meet();
        if (e < p.experts) {
            const int start = before & 0xFFFF;
            for (int w = 0; w < WARPS; ++w) seen[w * p.experts + e] += start;
            if (parts) put_groups<QUANTISED>(p, groups + (before >> 16), e, start, tokens, parts);
        }
    }
    if (threadIdx.x == 0) words[32] = carry >> 16;
    meet();
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

// B fragments of a group's tokens over the warp's own columns, units c WARPS + warp: pairs[..][c][2 j] and the one
// behind for step j. Where a group has fewer tokens its last one stands in: nobody reads those sums.
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

// The warps' sums of each unit row, added up and taken on: to v, or into the sum over experts. Thread (q, lane) has
// group of rows q, and of each tile what that lane has in its registers: rows g and g + 8, tokens 2 c and 2 c + 1.
template <int NT>
__device__ __forceinline__ void add_up(const Problem& p, const Layout& at, uint8_t* shared, int q, int lane, int count,
                                       int first, int items) {
    const Group* groups = reinterpret_cast<const Group*>(shared + at.groups);
    const float* routing = reinterpret_cast<const float*>(shared + at.routing);
    const uint16_t* slots = reinterpret_cast<const uint16_t*>(shared + at.slots);
    const uint32_t read = shared_address(shared + at.barriers) + 16 * p.stages;
    const int rows1 = p.inner / 16, rows2 = p.hidden / units::ROWS;
    int buffer = 0;
    auto added = [&](int tile) {
        const float* from = reinterpret_cast<const float*>(shared + at.sums) + buffer * WARPS * NT * 256 +
                            (tile * 2 + q) * 128 + 4 * lane;
        float4 all = {};
#pragma unroll 4
        for (int w = 0; w < WARPS; ++w) {
            const float4 one = *reinterpret_cast<const float4*>(from + w * NT * 256);
            all.x += one.x, all.y += one.y, all.z += one.z, all.w += one.w;
        }
        return all;
    };
    int group = first / rows1, row = first % rows1;
    if (lane == 0 && !p.linear) {  // a first look at either takes its time
        asm volatile("prefetch.global.L2 [%0];" ::"l"(p.arrived));
        asm volatile("prefetch.global.L2 [%0];" ::"l"(p.v));
    }
    for (int i = 0; i < items; ++i) {
        const Group g = groups[group];
        wait_for_sums(buffer);
        for (int tile = 0; 8 * tile < g.count(); ++tile) {
            const float4 all = added(tile);
            const float gates[2] = {all.x, all.y}, ups[2] = {all.z, all.w};
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int member = 8 * tile + 2 * (lane & 3) + j;
                if (member >= g.count()) continue;
                const float gate = fminf(gates[j] * g.first, 10.f), up = fminf(fmaxf(ups[j] * g.first, -10.f), 10.f);
                const float v = gate / (1.f + __expf(-gate)) * up * routing[g.start() + member];
                p.v[static_cast<int64_t>(slots[g.start() + member]) * p.inner + row * 16 + q * 8 + lane / 4] =
                    __float2bfloat16_rn(v);
            }
        }
        arrive(read + 8 * buffer);
        buffer ^= 1;
        if (++row == rows1) row = 0, ++group;
    }
    if (!p.linear) {  // until all blocks have written their part of v
        meet_adding();
        if (q == 0 && lane == 0) {
            // It only grows, by gridDim.x a launch.
            unsigned long long before, now;
            asm volatile("atom.add.acq_rel.gpu.global.u64 %0, [%1], 1;" : "=l"(before) : "l"(p.arrived) : "memory");
            const unsigned long long all = before - before % gridDim.x + gridDim.x;
            do {
                asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(now) : "l"(p.arrived) : "memory");
            } while (now < all);
        }
        arrive(read + 16);
    }
    float* total = reinterpret_cast<float*>(shared + at.total) + q * 16 + lane / 4;
    for (int row = blockIdx.x; row < rows2; row += gridDim.x) {
        for (int i = 0; i < count; ++i) {
            const Group g = groups[i];
            wait_for_sums(buffer);
            for (int tile = 0; 8 * tile < g.count(); ++tile) {
                const float4 all = added(tile);
                const float above[2] = {all.x, all.y}, below[2] = {all.z, all.w};
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int member = 8 * tile + 2 * (lane & 3) + j;
                    if (member >= g.count()) continue;
                    float* to = total + slots[g.start() + member] / p.topk * MARGIN;
                    to[0] += above[j] * g.second, to[8] += below[j] * g.second;
                }
            }
            arrive(read + 8 * buffer);
            buffer ^= 1;
            __syncwarp();  // the next group may have the same token elsewhere
        }
        arrive(read + 16);
    }
}

template <int C1, int C2, int NT, bool QUANTISED>
__global__ void __launch_bounds__(LAUNCHED, 1) experts(const Problem p) {
    extern __shared__ __align__(128) uint8_t shared[];
    const Layout at(p, NT);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, n = p.tokens * p.topk;
    Group* groups = reinterpret_cast<Group*>(shared + at.groups);
    float* total = reinterpret_cast<float*>(shared + at.total);
    float* routing = reinterpret_cast<float*>(shared + at.routing);
    uint16_t* slots = reinterpret_cast<uint16_t*>(shared + at.slots);
    uint32_t* words = reinterpret_cast<uint32_t*>(shared + at.words);

    const uint32_t full = shared_address(shared + at.barriers), empty = full + 8 * p.stages;
    const uint32_t read = empty + 8 * p.stages;
    const uint32_t ring = shared_address(shared);
    if (threadIdx.x == THREADS) {
        for (int i = 0; i < p.stages; ++i) init(full + 8 * i, 1), init(empty + 8 * i, THREADS);
        init(read, ADDING), init(read + 8, ADDING), init(read + 16, ADDING);
    }
    if (n <= 32) {
        if (warp == 0) sort_few<NT, QUANTISED>(p, groups, slots, routing, words, lane);
        __syncwarp();
    } else if (warp < WARPS) {
        sort<NT, QUANTISED>(p, shared, groups, slots, routing, words, warp, lane);
    }
    if (warp == 0) share_out<NT>(groups, words, p.linear ? 0 : p.inner / 16, lane);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // copies will write where sorting has written
    __syncthreads();
    const int count = words[32];

    const int units1 = p.hidden / units::COLUMNS, units2 = p.inner / units::COLUMNS;  // of a unit row
    const int rows1 = p.inner / 16, rows2 = p.hidden / units::ROWS;                   // unit rows of an expert
    const int first = words[33], items = words[34];
    int stage = 0, parity = 0;

    constexpr int HELPING = C1 <= 4 ? 64 : 32, MULTIPLYING = C1 <= 4 ? 104 : 112;  // registers
    if (warp >= WARPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(HELPING));
        if (warp > WARPS && warp <= WARPS + ADDING / 32)
            add_up<NT>(p, at, shared, warp - WARPS - 1, lane, count, first, items);
        if (threadIdx.x != THREADS) return;
        // The thread that copies.
        uint64_t policy;
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
        auto send = [&](const uint8_t* from, int all) {
            for (int i = 0; i < all; i += EACH * WARPS) {
                const int bytes = min(all - i, EACH * WARPS) * units::BYTES;
                wait(empty + 8 * stage, parity ^ 1);
                copy(ring + stage * STAGE, from, bytes, full + 8 * stage, policy);
                from += bytes;
                if (++stage == p.stages) stage = 0, parity ^= 1;
            }
        };
        int group = first / rows1, row = first % rows1;
        for (int i = 0; i < items; ++i) {
            send(p.w13 + (static_cast<int64_t>(groups[group].expert) * rows1 + row) * units1 * units::BYTES, units1);
            if (++row == rows1) row = 0, ++group;
        }
        for (int row = blockIdx.x; row < rows2; row += gridDim.x)
            for (int i = 0; i < count; ++i)
                send(p.w2 + (static_cast<int64_t>(groups[i].expert) * rows2 + row) * units2 * units::BYTES, units2);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MULTIPLYING));

    constexpr std::integral_constant<int, NT> ALL_TILES = {};
    constexpr std::integral_constant<int, 1> ONE_TILE = {};
    float sum[2][NT][4];
    // Adds the warp's part of a unit row, of `all` units, to sum; calls then(c) when the tokens of unit c are done
    // with.
    auto multiply_row = [&](auto& tokens, const int all, auto tiles, auto most, auto then) {
#pragma unroll
        for (int c = 0; c < decltype(most)::value; ++c) {
            if (c * WARPS >= all) break;
            if (c % EACH == 0) wait(full + 8 * stage, parity);
            const uint32_t from = ring + stage * STAGE + (c % EACH * WARPS + warp) * units::BYTES;
            const uint4 word[2] = {load4(from + 16 * lane), load4(from + 512 + 16 * lane)};
            const uint32_t scales = load1(from + units::SCALES + 4 * lane);
            if (c % EACH == EACH - 1 || (c + 1) * WARPS >= all) {
                // What has been loaded must be here before it may be overwritten. Loads are only known to have ended
                // when their results are used: a copy once overtook loads that were waiting behind loads of global
                // memory. Those of the units before have been used: they are in the sums, or ended in order.
                arrive(empty + 8 * stage + ((word[0].x ^ word[1].x ^ scales) & p.nothing));
                if (++stage == p.stages) stage = 0, parity ^= 1;
            }
            if (c * WARPS + warp >= all) break;
#pragma unroll
            for (int q = 0; q < 2; ++q) {
                const uint32_t above = q ? units::scale<2>(scales) : units::scale<0>(scales);
                const uint32_t below = q ? units::scale<3>(scales) : units::scale<1>(scales);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    uint32_t a[4], b[4];
                    units::decode(half ? word[q].z : word[q].x, above, a);
                    units::decode(half ? word[q].w : word[q].y, below, b);
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const int step = 2 * (2 * half + j);
#pragma unroll
                        for (int t = 0; t < decltype(tiles)::value; ++t)
                            multiply(sum[q][t], a[2 * j], b[2 * j], a[2 * j + 1], b[2 * j + 1],
                                     tokens.pairs[t][c][step], tokens.pairs[t][c][step + 1]);
                    }
                }
            }
            then(c);
        }
    };
    auto clear = [&] {
#pragma unroll
        for (int q = 0; q < 2; ++q)
#pragma unroll
            for (int t = 0; t < NT; ++t)
#pragma unroll
                for (int i = 0; i < 4; ++i) sum[q][t][i] = 0;
    };
    // Hands the sums to those who add them up.
    int buffer = 0, turn = 1;
    auto hand_over = [&](bool both) {
        float* sums = reinterpret_cast<float*>(shared + at.sums) + buffer * WARPS * NT * 256;
        wait(read + 8 * buffer, turn);
#pragma unroll
        for (int t = 0; t < NT; ++t)
            if (t == 0 || both)
#pragma unroll
                for (int q = 0; q < 2; ++q)
                    *reinterpret_cast<float4*>(sums + (warp * NT * 2 + t * 2 + q) * 128 + 4 * lane) =
                        make_float4(sum[q][t][0], sum[q][t][1], sum[q][t][2], sum[q][t][3]);
        sums_written(buffer);
        turn ^= buffer, buffer ^= 1;
    };
    const int mine1 = (units1 - warp + WARPS - 1) / WARPS, mine2 = (units2 - warp + WARPS - 1) / WARPS;  // of the warp

    // ---- first product ----
    if (items) {
        Tokens<C1, NT> tokens;
        int group = first / rows1, row = first % rows1;
        for (int i = 0; i < items; ++i) {
            const Group g = groups[group];
            const bool both = NT > 1 && g.count() > 8;
            if (i == 0 || row == 0) {
                tokens.aim(p.x, p.hidden, p.topk, warp, g, slots, lane);
#pragma unroll
                for (int c = 0; c < C1; ++c)
                    if (c < mine1) tokens.take(c, both);
                if (QUANTISED) tokens.quantised(mine1, both, p.in13[g.expert]);
            }
            clear();
            const auto then = [](int) {};
            if (both)
                multiply_row(tokens, units1, ALL_TILES, std::integral_constant<int, C1>(), then);
            else
                multiply_row(tokens, units1, ONE_TILE, std::integral_constant<int, C1>(), then);
            hand_over(both);
            if (++row == rows1) row = 0, ++group;
        }
    }
    int ended = 0;  // what those who add have last waited for: all blocks, then their part of a unit row of out
    if (!p.linear) wait(read + 16, ended), ended ^= 1;

    // ---- second product ----
    const __nv_bfloat16* rows = p.linear ? p.x : p.v;
    for (int row = blockIdx.x; row < rows2; row += gridDim.x) {
        // Nobody adds to it before all have handed over sums.
        for (int i = threadIdx.x; i < p.tokens * MARGIN; i += THREADS) total[i] = 0;
        Tokens<C2, NT> tokens;
        if (count) {
            const Group g = groups[0];
            tokens.aim(rows, p.inner, 1, warp, g, slots, lane);
#pragma unroll
            for (int c = 0; c < C2; ++c)
                if (c < mine2) tokens.take(c, NT > 1 && g.count() > 8);
        }
        for (int i = 0; i < count; ++i) {
            const Group g = groups[i], coming = groups[min(i + 1, count - 1)];
            const bool both = NT > 1 && g.count() > 8, coming_both = NT > 1 && coming.count() > 8;
            if (QUANTISED) tokens.quantised(mine2, both, p.in2[g.expert]);
            tokens.aim(rows, p.inner, 1, warp, coming, slots, lane);
            clear();
            const auto then = [&](int c) { tokens.take(c, coming_both); };  // for the last group once too often
            if (both)
                multiply_row(tokens, units2, ALL_TILES, std::integral_constant<int, C2>(), then);
            else
                multiply_row(tokens, units2, ONE_TILE, std::integral_constant<int, C2>(), then);
            hand_over(both);
        }
        if (!count) meet();
        wait(read + 16, ended), ended ^= 1;
        for (int i = threadIdx.x; i < p.tokens * 16; i += THREADS) {
            const int token = i >> 4, pair = i & 15;
            const float *from = total + token * MARGIN + 2 * pair;
            *reinterpret_cast<__nv_bfloat162*>(p.out + static_cast<int64_t>(token) * p.hidden + row * 32 + 2 * pair) =
                __floats2bfloat162_rn(from[0], from[1]);
        }
        meet();
    }
}

template <int C1, int C2, int NT, bool QUANTISED>
cudaError_t launch_for(const Problem& p, int blocks, int bytes) {
    cudaError_t code =
        cudaFuncSetAttribute(experts<C1, C2, NT, QUANTISED>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (code != cudaSuccess) return code;
    // Cooperative: blocks wait for each other, so all have to run at once.
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = blocks, config.blockDim = LAUNCHED, config.dynamicSmemBytes = bytes;
    config.attrs = &attribute, config.numAttrs = p.linear ? 0 : 1;
    return cudaLaunchKernelEx(&config, experts<C1, C2, NT, QUANTISED>, p);
}

template <int C1, int C2, int NT>
cudaError_t launch(const Problem& p, int blocks, int bytes) {
    return p.quantised ? launch_for<C1, C2, NT, true>(p, blocks, bytes)
                       : launch_for<C1, C2, NT, false>(p, blocks, bytes);
}

// tiles: 8 tokens each, of a group; 1 or 2. -> a cudaError_t; cudaErrorInvalidValue for what does not fit.
inline cudaError_t run(Problem p, int tiles, int blocks) {
    const int n = p.tokens * p.topk;
    if (n > 0xFFFF || p.hidden % 64 || p.inner % 64 || tiles < 1 || tiles > 2) return cudaErrorInvalidValue;
    p.groups = n < p.experts + n / (8 * tiles) ? n : p.experts + n / (8 * tiles);
    p.stages = 0;
    const int room = SHARED - Layout(p, tiles).bytes;
    p.stages = room / (STAGE + 16);
    if (p.stages > 6) p.stages = 6;
    if (p.stages < 2 || WARPS * p.experts * 2 + n * 2 > p.stages * STAGE) return cudaErrorInvalidValue;
    const int bytes = Layout(p, tiles).bytes;
    const int first = p.linear ? 1 : (p.hidden + 64 * WARPS - 1) / (64 * WARPS);
    const int second = (p.inner + 64 * WARPS - 1) / (64 * WARPS);
    if (first <= 4 && second <= 2)
        return tiles == 1 ? launch<4, 2, 1>(p, blocks, bytes) : launch<4, 2, 2>(p, blocks, bytes);
    if (tiles == 1 && first <= 8 && second <= 4) return launch<8, 4, 1>(p, blocks, bytes);
    if (tiles == 1 && first <= 8 && second <= 8) return launch<8, 8, 1>(p, blocks, bytes);
    return cudaErrorInvalidValue;
}

}  // namespace decode
