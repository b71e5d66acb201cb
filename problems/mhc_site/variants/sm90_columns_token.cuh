// Few tokens: a cluster of blocks has a token, each block its columns of all four copies, and sums go from block to block
// through shared memory. All of fn is read by each cluster, every value of it straight into the register of one thread.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "ptx.cuh"
#include "sm90_columns_mix.cuh"
#include "sm90_columns_tile.cuh"

namespace columns {

constexpr int CLUSTER = 16;  // blocks of a token; hidden is a multiple of 64, so that each has whole quads
constexpr int QUAD = 4;      // columns of a copy that a thread has, for half of the rows of fn
constexpr int HALF_ROWS = ROWS / 2;
constexpr int QUADS = 64;    // threads of a half and a copy; quads beyond them come in further passes
constexpr int TOKEN_THREADS = 2 * COPIES * QUADS, TOKEN_WARPS = TOKEN_THREADS / 32;
constexpr int VALUES = 16;   // that a thread sums up: rows, two products x'_j x'_k, two of nothing
constexpr int SENT = ROWS + PRODUCTS;  // of SLOTS
static_assert(TOKEN_WARPS == CLUSTER, "each warp sends to one block");

// A quad of each copy: two words of two bf16.
struct Quad {
    uint2 copy[COPIES];
};

template <int PASSES>
struct TokenShared {
    Quad kept[PASSES][QUADS];  // x', of the threads that make out
    float part[TOKEN_WARPS][VALUES];
    float from[CLUSTER][SLOTS];  // the sums of each block of the cluster
    float base[ROWS], scale[3];
    uint64_t arrived;
};

__device__ __forceinline__ float4 load_once(const float* from) {
    float4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(from));
    return v;
}
__device__ __forceinline__ void prefetch_line(const void* from) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}
__device__ __forceinline__ void send(uint32_t to, float value, uint32_t barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
                 "r"(__float_as_uint(value)), "r"(barrier)
                 : "memory");
}
// As ptx::wait, for what other blocks of the cluster sent.
__device__ __forceinline__ void wait_for_cluster(uint32_t barrier) {
    uint32_t over;
    do {
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n"
                     "selp.u32 %0, 1, 0, p;\n}\n"
                     : "=r"(over)
                     : "r"(barrier)
                     : "memory");
    } while (!over);
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
__device__ __forceinline__ uint2 choose(const Quad& q, int copy) {
    const uint2 low = copy & 1 ? q.copy[1] : q.copy[0], high = copy & 1 ? q.copy[3] : q.copy[2];
    return copy & 2 ? high : low;
}
__device__ __forceinline__ float element(float4 v, int k) { return k < 2 ? (k ? v.y : v.x) : (k == 2 ? v.z : v.w); }

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

// x' of a quad from the copies in `q`.
__device__ __forceinline__ Quad spread_quad(const Quad& q, float4 y, float4 post, const float4 (&comb)[COPIES]) {
    Quad made;
#pragma unroll
    for (int k = 0; k < COPIES; ++k) {
        const float by = element(post, k);
        float4 v = make_float4(by * y.x, by * y.y, by * y.z, by * y.w);
#pragma unroll
        for (int j = 0; j < COPIES; ++j) v = add_scaled(element(comb[j], k), widen(q.copy[j]), v);
        made.copy[k] = narrow(v);
    }
    return made;
}

// Where the parts of a slot lie: warps from `first` on, and which of their values.
struct Source {
    int first, warps, value;
};
__device__ __forceinline__ Source source_of(int slot) {
    if (slot < COPIES || slot >= POST) {
        const int row = slot < COPIES ? slot : slot - POST + COPIES;
        return {row / HALF_ROWS * TOKEN_WARPS / 2, TOKEN_WARPS / 2, row % HALF_ROWS};
    }
    // x'_j x'_k of 00 01 02 03 11 12 13 22 23 33: its pair of warps, and 8 for the second product.
    const int at = 0x3629517840ull >> 4 * (slot - COPIES) & 15;
    return {at % 8 * 2, 2, HALF_ROWS + at / 8};
}

// The block's sum of a slot.
template <int PASSES>
__device__ __forceinline__ float sum_of(const TokenShared<PASSES>& shared, Source of) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < TOKEN_WARPS / 2; ++i)
        if (i < of.warps) sum += shared.part[of.first + i][of.value];
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

// Grid (CLUSTER, tokens). PASSES: quads of a thread.
template <int PASSES>
__global__ void __launch_bounds__(TOKEN_THREADS, 1) token_kernel(const __grid_constant__ Problem p) {
    __shared__ TokenShared<PASSES> shared;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int half = thread / (COPIES * QUADS), copy = thread / QUADS % COPIES;
    const int quads = p.hidden / (CLUSTER * QUAD), rank = ptx::cluster_rank();
    const int64_t token = blockIdx.y, column = (int64_t(rank) * quads + thread % QUADS) * QUAD;
    const uint32_t arrived = ptx::smem_address(&shared.arrived);
    if (thread == 0) {
        ptx::barrier_init(arrived, 1);
        ptx::barrier_publish();
        ptx::arrive_and_expect_tx(arrived, CLUSTER * SENT * sizeof(float));
    }
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");

    auto real = [&](int pass) { return thread % QUADS + pass * QUADS < quads; };
    auto fn_at = [&](int row, int pass) {
        return p.fn + (int64_t(half * HALF_ROWS + row) * COPIES + copy) * p.hidden + column + pass * QUADS * QUAD;
    };
    constexpr int EARLY = PASSES == 1 ? HALF_ROWS : 0;  // rows of fn that are asked for ahead of x': more would spill
    const float4 none = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const bool last = half == 0 && copy == 0;  // makes out
    Quad x[PASSES];
    float4 fn[HALF_ROWS], comb[COPIES];
    Addends y[PASSES];
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        const int64_t at = column + pass * QUADS * QUAD;
#pragma unroll
        for (int j = 0; j < COPIES; ++j)
            x[pass].copy[j] = real(pass) ? *reinterpret_cast<const uint2*>(p.copies + (token * COPIES + j) * p.hidden + at)
                                         : make_uint2(0, 0);
        y[pass] = {load_quad(p.y, real(pass) ? p.y_bytes : 0, token * p.hidden + at),
                   load_quad(p.second, real(pass) ? p.second_bytes : 0, token * p.hidden + at)};
        if (last && real(pass)) prefetch_line(p.norm + at);
    }
    const float4 post = *reinterpret_cast<const float4*>(p.post + token * COPIES);
#pragma unroll
    for (int j = 0; j < COPIES; ++j)
        comb[j] = *reinterpret_cast<const float4*>(p.comb + (token * COPIES + j) * COPIES);
#pragma unroll
    for (int row = 0; row < EARLY; ++row) fn[row] = real(0) ? load_once(fn_at(row, 0)) : none;
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass)
#pragma unroll
        for (int row = pass ? 0 : EARLY; row < HALF_ROWS; ++row)
            if (lane % 8 == 0 && real(pass)) prefetch_line(fn_at(row, pass));
    if (thread < ROWS) shared.base[thread] = p.base[thread];
    if (thread >= 32 && thread < 35) shared.scale[thread - 32] = p.scale[thread - 32];

#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) x[pass] = spread_quad(x[pass], sum_of(p, y[pass]), post, comb);
#pragma unroll
    for (int row = EARLY; row < HALF_ROWS; ++row) fn[row] = real(0) ? load_once(fn_at(row, 0)) : none;
    float v[VALUES] = {};
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        const uint2 mine = choose(x[pass], copy);
        if (half == 0 && real(pass))
            *reinterpret_cast<uint2*>(p.new_copies + (token * COPIES + copy) * p.hidden + column +
                                      pass * QUADS * QUAD) = mine;
        if (last) shared.kept[pass][thread] = x[pass];
        const float4 wide = widen(mine);
        const float4 with = half ? widen(choose(x[pass], (copy + 1) % COPIES)) : wide;
        v[HALF_ROWS] = add_dot(wide, with, v[HALF_ROWS]);
        if (half == 0 && copy < 2) v[HALF_ROWS + 1] = add_dot(wide, widen(choose(x[pass], copy + 2)), v[HALF_ROWS + 1]);
#pragma unroll
        for (int row = 0; row < HALF_ROWS; ++row) {
            v[row] = add_dot(fn[row], wide, v[row]);
            if (pass + 1 < PASSES) fn[row] = real(pass + 1) ? load_once(fn_at(row, pass + 1)) : none;
        }
    }
    const float sum = fold(v, lane);
    if (lane % 2 == 0) shared.part[warp][lane / 2] = sum;
    __syncthreads();
    // Every warp adds up the block's sums, and sends them to one block.
    const float low = has_slot(lane) ? sum_of(shared, source_of(lane)) : 0.0f;
    const float high = sum_of(shared, source_of(32 + lane % (SLOTS - 32)));
    const uint32_t to = ptx::in_block(warp, ptx::smem_address(shared.from[rank])), there = ptx::in_block(warp, arrived);
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // the barriers of all blocks are ready
    if (has_slot(lane)) send(to + lane * 4, low, there);
    if (lane < SLOTS - 32) send(to + (32 + lane) * 4, high, there);

    const bool mixes = rank == CLUSTER - 1 && warp == TOKEN_WARPS - 1;
    if (!last && !mixes) return;
    uint2 norm[PASSES];
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass)
        norm[pass] = last && real(pass) ? *reinterpret_cast<const uint2*>(p.norm + column + pass * QUADS * QUAD)
                                        : make_uint2(0, 0);
    wait_for_cluster(arrived);
    Sums sums = {0.0f, 0.0f};
#pragma unroll
    for (int block = 0; block < CLUSTER; ++block) {
        sums.low += has_slot(lane) ? shared.from[block][lane] : 0.0f;
        sums.high += shared.from[block][32 + lane % (SLOTS - 32)];
    }
    const float inverse = inverse_of_copies(sums, p.hidden);
    if (mixes) {
        write_mixing(sums, inverse, shared.base, shared.scale, p.new_post + token * COPIES,
                     p.new_comb + token * COPIES * COPIES, lane);
        return;
    }
    const float weight = weights_of_u(sums, inverse, shared.base, shared.scale, p.hidden, lane);
    float by[COPIES];
#pragma unroll
    for (int j = 0; j < COPIES; ++j) by[j] = broadcast(weight, j);
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        if (!real(pass)) continue;
        float4 u = none;
#pragma unroll
        for (int j = 0; j < COPIES; ++j) u = add_scaled(by[j], widen(shared.kept[pass][thread].copy[j]), u);
        const float4 n = widen(norm[pass]);
        *reinterpret_cast<uint2*>(p.out + token * p.hidden + column + pass * QUADS * QUAD) =
            narrow(make_float4(u.x * n.x, u.y * n.y, u.z * n.z, u.w * n.w));
    }
}

// ---------------------------------------------------------------- launch

constexpr int MOST_PASSES = 2;

// How many tokens at most get a cluster each: as many as run at once.
inline cudaError_t launch_tokens(const Problem& p, bool* served) {
    constexpr int FEW_TOKENS = 8;
    *served = p.tokens <= FEW_TOKENS && p.hidden <= CLUSTER * QUAD * QUADS * MOST_PASSES;
    if (!*served) return cudaSuccess;
    const auto kernel = p.hidden <= CLUSTER * QUAD * QUADS ? token_kernel<1> : token_kernel<MOST_PASSES>;
    if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1))
        return error;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = CLUSTER, attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(CLUSTER, p.tokens), config.blockDim = TOKEN_THREADS;
    config.attrs = &attribute, config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace columns
