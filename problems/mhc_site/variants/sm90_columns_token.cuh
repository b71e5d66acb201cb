// Few tokens: a cluster of blocks has one or two, each block its columns of all four copies, and sums go from block to
// block through shared memory. All of fn is read by each cluster, every value of it straight into the register of one
// thread, before which little may stand: a block's 16 warps take a microsecond for 450 instructions.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "launch_clusters.cuh"
#include "ptx.cuh"
#include "sm90_columns_mix.cuh"
#include "sm90_columns_tile.cuh"

namespace columns {

constexpr int CLUSTER = 16;  // blocks; hidden is a multiple of 64, so that each has whole quads
constexpr int QUAD = 4;      // columns of a copy that a thread has, for half of the rows of fn
constexpr int HALF_ROWS = ROWS / 2;
constexpr int QUADS = 64;    // threads of a half and a copy; quads beyond them come in further passes
constexpr int TOKEN_THREADS = 2 * COPIES * QUADS, TOKEN_WARPS = TOKEN_THREADS / 32;
constexpr int MAKERS = QUADS / 32;     // warps that make out of a token
constexpr int VALUES = 16;   // that a thread sums up for a token: rows, two products x'_j x'_k, two of nothing
constexpr int SENT = ROWS + PRODUCTS;  // of SLOTS

template <int PASSES, int TOKENS>
struct TokenShared {
    uint2 x[TOKENS][PASSES][COPIES][QUADS];  // x', four bf16 each
    float part[TOKENS][TOKEN_WARPS][VALUES];
    float from[TOKENS][CLUSTER][SLOTS];  // the sums of each block of the cluster
    uint64_t arrived;
};

__device__ __forceinline__ float4 load_once(const float* from) {
    float4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(from));
    return v;
}
__device__ __forceinline__ void send(uint32_t to, float value, uint32_t barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
                 "r"(__float_as_uint(value)), "r"(barrier)
                 : "memory");
}
__device__ __forceinline__ float4 widen(uint2 v) {
    return make_float4(low_bf16(v.x), high_bf16(v.x), low_bf16(v.y), high_bf16(v.y));
}
__device__ __forceinline__ uint2 narrow(float4 v) {
    return make_uint2(ptx::pack_bf16x2(v.x, v.y), ptx::pack_bf16x2(v.z, v.w));
}
__device__ __forceinline__ float4 add_scaled(float by, float4 v, float4 to) {
    return make_float4(fmaf(by, v.x, to.x), fmaf(by, v.y, to.y), fmaf(by, v.z, to.z), fmaf(by, v.w, to.w));
}
__device__ __forceinline__ float add_dot(float4 a, float4 b, float to) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, to))));
}
// Four columns of an addend as they lie in memory: fp32, or bf16 in the first half. Loaded without branches, so that what
// is loaded behind them need not wait for their values.
struct Raw {
    uint2 half[2];
};
struct Addends {
    Raw y, second;
};
__device__ __forceinline__ Raw load_quad(const void* from, int bytes, int64_t at) {
    const auto* quad = reinterpret_cast<const uint2*>(static_cast<const uint8_t*>(from) + at * bytes);
    const uint2 none = make_uint2(0, 0);
    return {{bytes ? quad[0] : none, bytes == 4 ? quad[1] : none}};
}
__device__ __forceinline__ float4 value_of(const Raw& raw, int bytes) {
    if (bytes != 4) return widen(raw.half[0]);
    return make_float4(__uint_as_float(raw.half[0].x), __uint_as_float(raw.half[0].y), __uint_as_float(raw.half[1].x),
                       __uint_as_float(raw.half[1].y));
}
// Four columns of what the sublayer ahead returned, rounded.
__device__ __forceinline__ float4 sum_of(const Problem& p, const Addends& addends) {
    return widen(narrow(add_scaled(1.0f, value_of(addends.second, p.second_bytes), value_of(addends.y, p.y_bytes))));
}

// Where the parts of a slot lie: warps from `first` on, and which of their values.
struct Source {
    int first, warps, value;
};
// Of x'_j x'_k: by the threads of which half and copy, and whether it is their second product. Half 0 has x'_c x'_c of its
// copies c, and of the first two x'_c x'_(c + 2); half 1 has x'_c x'_(c + 1).
struct ProductSource {
    int half, copy, second;
};
constexpr ProductSource PRODUCT_SOURCES[PRODUCTS] = {
    {0, 0, 0}, {1, 0, 0}, {0, 0, 1}, {1, 3, 0},  // 00 01 02 03
    {0, 1, 0}, {1, 1, 0}, {0, 1, 1},             // 11 12 13
    {0, 2, 0}, {1, 2, 0},                        // 22 23
    {0, 3, 0},                                   // 33
};
__host__ __device__ constexpr uint64_t packed_sources() {
    int values[PRODUCTS] = {};
    for (int i = 0; i < PRODUCTS; ++i)
        values[i] = PRODUCT_SOURCES[i].half * COPIES + PRODUCT_SOURCES[i].copy + 8 * PRODUCT_SOURCES[i].second;
    return pack_nibbles<uint64_t>(values);
}
__device__ __forceinline__ Source source_of(int slot) {
    if (slot < PRODUCT_SLOT || slot >= POST_SLOT) {
        const int row = slot < PRODUCT_SLOT ? slot : slot - POST_SLOT + COPIES;
        return {row / HALF_ROWS * TOKEN_WARPS / 2, TOKEN_WARPS / 2, row % HALF_ROWS};
    }
    constexpr uint64_t SOURCES = packed_sources();
    const int source = SOURCES >> 4 * (slot - PRODUCT_SLOT) & 15;
    return {source % 8 * 2, 2, HALF_ROWS + source / 8};
}

// The block's sum of a slot. from: in shared memory, the part of the first of its warps.
__device__ __forceinline__ float sum_of(uint32_t from, int warps) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < TOKEN_WARPS / 2; ++i)
        if (i < warps) sum += __uint_as_float(ptx::load_shared(from + i * VALUES * sizeof(float)));
    return sum;
}

// Add up WIDTH values over a warp: with 16 of them, lanes 2 i and 2 i + 1 get the sum of the i-th.
template <int WIDTH>
__device__ __forceinline__ float fold(const float (&v)[WIDTH], int lane) {
    if constexpr (WIDTH == 1) {
        return v[0] + __shfl_xor_sync(ALL, v[0], 1);
    } else {
        constexpr int LEFT = WIDTH / 2;
        float kept[LEFT];
#pragma unroll
        for (int i = 0; i < LEFT; ++i) {
            const float a = v[i], b = v[i + LEFT];
            kept[i] = (lane & WIDTH ? b : a) + __shfl_xor_sync(ALL, lane & WIDTH ? a : b, WIDTH);
        }
        return fold(kept, lane);
    }
}

// A quad of x' of one copy, from the token's inputs: by[0] is the weight of the output, by[1 + j] of copy j.
struct Inputs {
    uint2 x[COPIES];
    Addends y;
};
__device__ __forceinline__ uint2 spread_quad(const Problem& p, const Inputs& in, const float (&by)[1 + COPIES]) {
    const float4 y = sum_of(p, in.y);
    float4 v = make_float4(by[0] * y.x, by[0] * y.y, by[0] * y.z, by[0] * y.w);
#pragma unroll
    for (int j = 0; j < COPIES; ++j) v = add_scaled(by[1 + j], widen(in.x[j]), v);
    return narrow(v);
}

// What a warp does when the sums of its block are there, for a token of the cluster.
enum Kind { SENDS, MAKES, COMBINES, POSTS, NOTHING };
struct Role {
    Kind kind;
    int t, thread;  // thread: of those that do the same for the token
};

// Two warps a token send its sums to all blocks, and MAKERS make out. In one of the blocks a warp makes new_comb, which
// takes longest, and another new_post.
template <int TOKENS>
__device__ __forceinline__ Role role_of(int warp, int lane, uint32_t rank) {
    constexpr int MADE = 2 * TOKENS, COMBINED = MADE + MAKERS * TOKENS, POSTED = COMBINED + TOKENS;
    static_assert(POSTED + TOKENS <= TOKEN_WARPS);
    if (warp < MADE) return {SENDS, warp / 2, warp % 2 * 32 + lane};
    if (warp < COMBINED) return {MAKES, (warp - MADE) / MAKERS, (warp - MADE) % MAKERS * 32 + lane};
    const int t = (warp - COMBINED) % TOKENS;
    if (warp >= POSTED + TOKENS || rank != CLUSTER - 1 - t) return {NOTHING, t, lane};
    return {warp < POSTED ? COMBINES : POSTS, t, lane};
}

// What the role reads of weights, ahead of the wait. first_quad, quads: of the block.
template <int PASSES>
struct RoleWeights {
    float base, scale;
    uint2 norm[PASSES];

    __device__ __forceinline__ RoleWeights(const Problem& p, const Role& role, int first_quad, int quads, int lane) {
        base = scale = 0.0f;
        if (role.kind == NOTHING || role.kind == SENDS) return;
        const int row = role.kind == MAKES ? lane % COPIES
                      : role.kind == POSTS ? COPIES + lane % COPIES : 2 * COPIES + lane % (COPIES * COPIES);
        base = __ldg(p.base + row), scale = __ldg(p.scale + (role.kind == MAKES ? 0 : role.kind == POSTS ? 1 : 2));
        if (role.kind != MAKES) return;
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            const int quad = min(role.thread + pass * QUADS, quads - 1);
            norm[pass] = __ldg(reinterpret_cast<const uint2*>(p.norm + (first_quad + quad) * QUAD));
        }
    }
};

// A slot's sum over the blocks of the cluster.
template <int PASSES, int TOKENS>
__device__ __forceinline__ float sum_of_blocks(const TokenShared<PASSES, TOKENS>& shared, int t, int slot) {
    float sum = 0.0f;
#pragma unroll
    for (int block = 0; block < CLUSTER; ++block) sum += shared.from[t][block][slot];
    return sum;
}

// A warp: its quads of out.
template <int PASSES, int TOKENS>
__device__ __forceinline__ void make_out(const Problem& p, const TokenShared<PASSES, TOKENS>& shared, const Role& role,
                                         const RoleWeights<PASSES>& weights, int token, int first_quad, int quads,
                                         int lane) {
    uint2 x[PASSES][COPIES];  // ahead of the wait, as all that does not depend on the sums
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass)
#pragma unroll
        for (int j = 0; j < COPIES; ++j) x[pass][j] = shared.x[role.t][pass][j][role.thread];
    const float by_width = ptx::reciprocal_fast(COPIES * p.hidden), by_hidden = ptx::reciprocal_fast(p.hidden);
    ptx::wait(ptx::smem_address(&shared.arrived), 0);
    const float sum = sum_of_blocks(shared, role.t, min(lane, U_SLOTS - 1));
    float products[PRODUCTS];
#pragma unroll
    for (int i = 0; i < PRODUCTS; ++i) products[i] = broadcast(sum, PRODUCT_SLOT + i);
    const float inverse = inverse_rms_of_square(products[product_of(0, 0)] + products[product_of(1, 1)] + products[product_of(2, 2)] +
                                            products[product_of(3, 3)], by_width);
    const float pre = sigmoid(sum * inverse * weights.scale + weights.base) + HC_EPS;
    const float weight = u_weight(pre, products, by_hidden);
    float by[COPIES];
#pragma unroll
    for (int j = 0; j < COPIES; ++j) by[j] = broadcast(weight, j);
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        const int quad = role.thread + pass * QUADS;
        if (quad >= quads) return;
        float4 u = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int j = 0; j < COPIES; ++j) u = add_scaled(by[j], widen(x[pass][j]), u);
        const float4 n = widen(weights.norm[pass]);
        *reinterpret_cast<uint2*>(p.out + token * p.hidden + (first_quad + quad) * QUAD) =
            narrow(make_float4(u.x * n.x, u.y * n.y, u.z * n.z, u.w * n.w));
    }
}

// A warp: new_comb or new_post of a token. A lane has the sum of one slot: of an element, or from lane 16 on of a square.
template <int PASSES, int TOKENS>
__device__ __forceinline__ void make_mixing(const Problem& p, const TokenShared<PASSES, TOKENS>& shared,
                                            const Role& role, const RoleWeights<PASSES>& weights, int token, int lane) {
    constexpr uint32_t SQUARE_SLOTS = pack_nibbles<uint32_t>(
        {PRODUCT_SLOT + product_of(0, 0), PRODUCT_SLOT + product_of(1, 1), PRODUCT_SLOT + product_of(2, 2),
         PRODUCT_SLOT + product_of(3, 3)});
    const int slot = lane >= 16 ? SQUARE_SLOTS >> 4 * (lane % COPIES) & 15
                     : role.kind == COMBINES ? COMB_SLOT + lane : POST_SLOT + lane % COPIES;
    const float by_width = ptx::reciprocal_fast(COPIES * p.hidden);
    ptx::wait(ptx::smem_address(&shared.arrived), 0);
    const float sum = sum_of_blocks(shared, role.t, slot);
    const float square = broadcast(sum, 16) + broadcast(sum, 17) + broadcast(sum, 18) + broadcast(sum, 19);
    const float logit = sum * inverse_rms_of_square(square, by_width) * weights.scale + weights.base;
    if (role.kind == COMBINES) {
        const float balanced = sinkhorn(logit, lane);
        if (lane < COPIES * COPIES) p.new_comb[token * COPIES * COPIES + lane] = balanced;
    } else if (lane < COPIES) {
        p.new_post[token * COPIES + lane] = 2.0f * sigmoid(logit);
    }
}

// Grid (CLUSTER, ceil(tokens / TOKENS)). PASSES: quads of a thread.
template <int PASSES, int TOKENS>
__global__ void __launch_bounds__(TOKEN_THREADS, 1) token_kernel(const __grid_constant__ Problem p) {
    __shared__ TokenShared<PASSES, TOKENS> shared;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int half = thread / (COPIES * QUADS), copy = thread / QUADS % COPIES, place = thread % QUADS;
    const int quads = p.hidden / (CLUSTER * QUAD), rank = ptx::cluster_rank(), first_quad = rank * quads;
    const int first_token = blockIdx.y * TOKENS;
    const uint32_t arrived = ptx::smem_address(&shared.arrived);
    // Threads without a quad in a pass read another's, and leave it out.
    int column[PASSES];
    bool real[PASSES];
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        const int quad = place + pass * QUADS;
        real[pass] = quad < quads, column[pass] = (first_quad + min(quad, quads - 1)) * QUAD;
    }
    float4 fn[HALF_ROWS];
    const int apart = COPIES * p.hidden;  // from row to row
    const float* const weights = p.fn + (half * HALF_ROWS * COPIES + copy) * p.hidden;
#pragma unroll
    for (int row = 0; row < HALF_ROWS; ++row) fn[row] = load_once(weights + column[0] + row * apart);
    if (PASSES > 1 && lane % 8 == 0) {
#pragma unroll
        for (int pass = 1; pass < PASSES; ++pass)
#pragma unroll
            for (int row = 0; row < HALF_ROWS; ++row) prefetch_line(weights + column[pass] + row * apart);
    }
    // Behind the loads of fn, and not by a warp that makes x' of one token: publishing takes its warp more than a thousand
    // cycles.
    if (thread == TOKEN_THREADS - 32) {
        ptx::barrier_init(arrived, 1);
        ptx::barrier_publish();
    }
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");  // only the barrier, which is published
    const Role role = role_of<TOKENS>(warp, lane, rank);
    const RoleWeights<PASSES> of_role(p, role, first_quad, quads, lane);
    // Of a sender's slot: where its parts lie, of how many warps, and where its sum goes.
    const int slot = role.thread;
    const bool sends = role.kind == SENDS && slot < SLOTS && (slot >= 32 || is_used(slot));
    const Source source = source_of(slot);
    const uint32_t parts = ptx::smem_address(&shared.part[role.t][source.first][source.value]);
    const uint32_t to = ptx::smem_address(&shared.from[role.t][rank][slot]);
    // x' of a quad of this thread's copy: of the half's token, or with one token by the first half only.
    const int mine = TOKENS == 2 ? half : 0, token = first_token + mine;
    const bool spreads = (TOKENS == 2 || half == 0) && token < p.tokens;
    programmatic::wait();  // what is loaded above, no kernel of a step writes
    Inputs in[PASSES];
    float by[1 + COPIES];
    if (spreads) {
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            const __nv_bfloat16* from = p.copies + int64_t(token) * COPIES * p.hidden + column[pass];
#pragma unroll
            for (int j = 0; j < COPIES; ++j) in[pass].x[j] = *reinterpret_cast<const uint2*>(from + j * p.hidden);
            const int64_t at = int64_t(token) * p.hidden + column[pass];
            in[pass].y = {load_quad(p.y, p.y_bytes, at), load_quad(p.second, p.second_bytes, at)};
        }
        by[0] = p.post[token * COPIES + copy];
#pragma unroll
        for (int j = 0; j < COPIES; ++j) by[1 + j] = p.comb[(token * COPIES + j) * COPIES + copy];
    }
    programmatic::trigger();  // what the next kernel loads comes behind what is asked for here
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // the barriers of all blocks are ready
    // Not where the barrier is made: racecheck takes every thread for the one that does that. Sums may come earlier.
    if (thread == TOKEN_THREADS - 32)
        ptx::arrive_and_expect_tx(arrived, TOKENS * CLUSTER * SENT * sizeof(float));

    if (TOKENS == 2 || half == 0) {
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass)
            shared.x[mine][pass][copy][place] = spreads && real[pass] ? spread_quad(p, in[pass], by) : make_uint2(0, 0);
    }
    __syncthreads();
    float v[TOKENS][VALUES] = {};
#pragma unroll 1  // two at once spill
    for (int pass = 0; pass < PASSES; ++pass) {
        const float* next = weights + (first_quad + min(place + (pass + 1) * QUADS, quads - 1)) * QUAD;
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            const auto* const x = shared.x[t][pass];
            const float4 wide = widen(x[copy][place]);
            const float4 with = half ? widen(x[(copy + 1) % COPIES][place]) : wide;
            v[t][HALF_ROWS] = add_dot(wide, with, v[t][HALF_ROWS]);
            if (half == 0 && copy < 2)
                v[t][HALF_ROWS + 1] = add_dot(wide, widen(x[copy + 2][place]), v[t][HALF_ROWS + 1]);
#pragma unroll
            for (int row = 0; row < HALF_ROWS; ++row) {
                v[t][row] = add_dot(fn[row], wide, v[t][row]);
                if (pass + 1 < PASSES && t + 1 == TOKENS) {
                    fn[row] = load_once(next);
                    next += apart;
                }
            }
        }
    }
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        const float sum = fold(v[t], lane);
        if (lane % 2 == 0) shared.part[t][warp][lane / 2] = sum;
    }
    __syncthreads();
    if (sends) {
        const float sum = sum_of(parts, source.warps);
#pragma unroll
        for (int block = 0; block < CLUSTER; ++block)
            send(ptx::in_block(block, to), sum, ptx::in_block(block, arrived));
    }
    // While sums are under way: nothing waits for the copies but the end.
    if (spreads) {
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass)
            if (real[pass])
                *reinterpret_cast<uint2*>(p.new_copies + (int64_t(token) * COPIES + copy) * p.hidden + column[pass]) =
                    shared.x[mine][pass][copy][place];
    }
    const int out_token = first_token + role.t;
    if (role.kind == SENDS || role.kind == NOTHING || out_token >= p.tokens) return;
    if (role.kind == MAKES)
        make_out(p, shared, role, of_role, out_token, first_quad, quads, lane);
    else
        make_mixing(p, shared, role, of_role, out_token, lane);
}

}  // namespace columns
