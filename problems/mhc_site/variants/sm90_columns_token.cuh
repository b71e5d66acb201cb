// Few tokens: a cluster of blocks has one or two, each block its columns of all four copies, and sums go from block to
// block through shared memory. All of fn is read by each cluster, every value of it straight into the register of one
// thread, before which little may stand: a block's 16 warps take a microsecond for 450 instructions.
#pragma once

#include "launch.cuh"
#include "ptx.cuh"
#include "sm90_columns_token_roles.cuh"

namespace columns {

__device__ __forceinline__ float4 load_once(const float* from) {
    float4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(from));
    return v;
}
__device__ __forceinline__ float add_dot(float4 a, float4 b, float to) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, to))));
}

// What a thread has: of a copy and of half of the rows of fn, a quad of columns in each pass.
struct Share {
    int half, copy, place;  // place: the quad in the block is place + pass * QUADS
};

// The first pass of fn; of the others, lines to L2. weights: the thread's first row.
template <int PASSES>
__device__ __forceinline__ void load_fn(const float* weights, int row_stride, const int (&column)[PASSES], int lane,
                                        float4 (&fn)[HALF_ROWS]) {
#pragma unroll
    for (int row = 0; row < HALF_ROWS; ++row) fn[row] = load_once(weights + column[0] + row * row_stride);
    if (PASSES > 1 && lane % 8 == 0) {
#pragma unroll
        for (int pass = 1; pass < PASSES; ++pass)
#pragma unroll
            for (int row = 0; row < HALF_ROWS; ++row) ptx::prefetch_l2(weights + column[pass] + row * row_stride);
    }
}

// Four columns of an addend as they lie in memory: fp32, or bf16 in the first half. Loaded without branches, so that
// what is loaded after them need not wait for their values.
struct Raw {
    uint2 half[2];
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

// A quad of a token's inputs; coefficients of x' of one copy: of the output, and 1 + j of copy j.
struct Inputs {
    uint2 x[COPIES];
    Raw y, second;
};
using Coefficients = float[1 + COPIES];

template <int PASSES>
__device__ __forceinline__ void load_inputs(const Problem& p, int token, const Share& share,
                                            const int (&column)[PASSES], Inputs (&in)[PASSES],
                                            Coefficients& coefficients) {
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        const __nv_bfloat16* from = p.copies + int64_t(token) * COPIES * p.hidden + column[pass];
#pragma unroll
        for (int j = 0; j < COPIES; ++j) in[pass].x[j] = *reinterpret_cast<const uint2*>(from + j * p.hidden);
        const int64_t at = int64_t(token) * p.hidden + column[pass];
        in[pass].y = load_quad(p.y, p.y_bytes, at), in[pass].second = load_quad(p.second, p.second_bytes, at);
    }
    coefficients[0] = p.post[token * COPIES + share.copy];
#pragma unroll
    for (int j = 0; j < COPIES; ++j) coefficients[1 + j] = p.comb[(token * COPIES + j) * COPIES + share.copy];
}

__device__ __forceinline__ uint2 make_quad(const Problem& p, const Inputs& in, const Coefficients& coefficients) {
    // The sublayer's output, rounded.
    const float4 y =
        widen(narrow(add_scaled(1.0f, value_of(in.second, p.second_bytes), value_of(in.y, p.y_bytes))));
    float4 v = make_float4(coefficients[0] * y.x, coefficients[0] * y.y, coefficients[0] * y.z, coefficients[0] * y.w);
#pragma unroll
    for (int j = 0; j < COPIES; ++j) v = add_scaled(coefficients[1 + j], widen(in.x[j]), v);
    return narrow(v);
}

// The thread's part of the sums: x' times fn, of which each row's next pass is loaded after its last use, and x' times
// x' as PRODUCT_SOURCES has it.
template <int PASSES, int TOKENS>
__device__ __forceinline__ void multiply(const TokenShared<PASSES, TOKENS>& shared, const float* weights,
                                         int row_stride, const Share& share, int first_quad, int quads,
                                         float4 (&fn)[HALF_ROWS], float (&sums)[TOKENS][VALUES]) {
    const int half = share.half, copy = share.copy, place = share.place;
#pragma unroll 1  // two at once spill
    for (int pass = 0; pass < PASSES; ++pass) {
        const float* next = weights + (first_quad + min(place + (pass + 1) * QUADS, quads - 1)) * QUAD;
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            const auto* const x = shared.x[t][pass];
            const float4 wide = widen(x[copy][place]);
            const float4 with = half ? widen(x[(copy + 1) % COPIES][place]) : wide;
            sums[t][HALF_ROWS] = add_dot(wide, with, sums[t][HALF_ROWS]);
            if (half == 0 && copy < 2)
                sums[t][HALF_ROWS + 1] = add_dot(wide, widen(x[copy + 2][place]), sums[t][HALF_ROWS + 1]);
#pragma unroll
            for (int row = 0; row < HALF_ROWS; ++row) {
                sums[t][row] = add_dot(fn[row], wide, sums[t][row]);
                if (pass + 1 < PASSES && t + 1 == TOKENS) {
                    fn[row] = load_once(next);
                    next += row_stride;
                }
            }
        }
    }
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

// Grid (CLUSTER, ceil(tokens / TOKENS)). PASSES: quads of a thread.
template <int PASSES, int TOKENS>
__global__ void __launch_bounds__(TOKEN_THREADS, 1) token_kernel(const __grid_constant__ Problem p) {
    static_assert(TOKENS == 1 || TOKENS == 2, "a half of the threads makes x' of a token");
    __shared__ TokenShared<PASSES, TOKENS> shared;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const Share share = {thread / (COPIES * QUADS), thread / QUADS % COPIES, thread % QUADS};
    const int quads = p.hidden / (CLUSTER * QUAD), rank = ptx::cluster_rank(), first_quad = rank * quads;
    const int first_token = blockIdx.y * TOKENS;
    const uint32_t sums_barrier = ptx::smem_address(&shared.sums_barrier);
    // Threads without a quad in a pass read another's, and leave it out.
    int column[PASSES];
    bool valid[PASSES];
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        const int quad = share.place + pass * QUADS;
        valid[pass] = quad < quads, column[pass] = (first_quad + min(quad, quads - 1)) * QUAD;
    }
    float4 fn[HALF_ROWS];
    const int row_stride = COPIES * p.hidden;
    const float* const weights = p.fn + (share.half * HALF_ROWS * COPIES + share.copy) * p.hidden;
    load_fn(weights, row_stride, column, lane, fn);
    // Behind the loads of fn, and not by a warp that makes x' of one token: publishing takes its warp more than a
    // thousand cycles.
    if (thread == TOKEN_THREADS - 32) {
        ptx::barrier_init(sums_barrier, 1);
        ptx::barrier_publish();
    }
    ptx::cluster_arrive_relaxed();  // only the barrier, which is published
    const Role role = role_of<TOKENS>(warp, lane, rank);
    const RoleParameters<PASSES> parameters(p, role, first_quad, quads, lane);
    // Of a sender's slot: where its partial sums lie, of how many warps, and where its sum goes.
    const int slot = role.thread;
    const bool sends = role.kind == SEND_SUMS && slot < SLOTS && (slot >= LANE_SLOTS || is_used(slot));
    const Source source = source_of(slot);
    const uint32_t partials = ptx::smem_address(&shared.partials[role.t][source.first][source.value]);
    const uint32_t to = ptx::smem_address(&shared.block_sums[role.t][rank][slot]);
    // x' of a quad of this thread's copy: of the half's token, or with one token by the first half only.
    const int t = TOKENS == 2 ? share.half : 0, token = first_token + t;
    const bool makes_copies = (TOKENS == 2 || share.half == 0) && token < p.tokens;
    programmatic::wait();  // what is loaded above, no kernel of a step writes
    Inputs in[PASSES];
    Coefficients coefficients;
    if (makes_copies) load_inputs(p, token, share, column, in, coefficients);
    programmatic::trigger();  // what the next kernel loads comes behind what is asked for here
    ptx::cluster_wait();  // the barriers of all blocks are ready
    // Not where the barrier is made: racecheck takes every thread for the one that does that. Sums may come earlier.
    if (thread == TOKEN_THREADS - 32)
        ptx::arrive_and_expect_tx(sums_barrier, TOKENS * CLUSTER * SUMS * sizeof(float));

    if (TOKENS == 2 || share.half == 0) {
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass)
            shared.x[t][pass][share.copy][share.place] =
                makes_copies && valid[pass] ? make_quad(p, in[pass], coefficients) : make_uint2(0, 0);
    }
    __syncthreads();
    float sums[TOKENS][VALUES] = {};
    multiply(shared, weights, row_stride, share, first_quad, quads, fn, sums);
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
        const float sum = fold(sums[i], lane);
        if (lane % 2 == 0) shared.partials[i][warp][lane / 2] = sum;
    }
    __syncthreads();
    if (sends) send_sum(sum_warps(partials, source.warps), to, sums_barrier);
    // While sums are under way: nothing waits for the copies but the end.
    if (makes_copies) {
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass)
            if (valid[pass])
                *reinterpret_cast<uint2*>(p.new_copies + (int64_t(token) * COPIES + share.copy) * p.hidden +
                                          column[pass]) = shared.x[t][pass][share.copy][share.place];
    }
    const int out_token = first_token + role.t;
    if (role.kind == SEND_SUMS || role.kind == NOTHING || out_token >= p.tokens) return;
    if (role.kind == MAKE_OUT)
        make_out(p, shared, role, parameters, out_token, first_quad, quads, lane);
    else
        make_mixing(p, shared, role, parameters, out_token, lane);
}

}  // namespace columns
