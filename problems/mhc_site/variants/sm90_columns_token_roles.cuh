// Few tokens: a block's shared memory, where the sums of a token come from and go to, and what warps make of them.
#pragma once

#include "ptx.cuh"
#include "sm90_columns_tile.cuh"

namespace columns {

constexpr int CLUSTER = 16;  // blocks; hidden is a multiple of 64, so that each has whole quads
constexpr int QUAD = 4;      // columns of a copy that a thread has, for half of the rows of fn
constexpr int HALF_ROWS = ROWS / 2;
constexpr int QUADS = 64;    // threads of a half and a copy; quads beyond them come in further passes
constexpr int TOKEN_THREADS = 2 * COPIES * QUADS, TOKEN_WARPS = TOKEN_THREADS / 32;
constexpr int OUT_WARPS = QUADS / 32;  // of a token, which make out
constexpr int VALUES = 16;             // of a thread for a token: rows, two products x'_j x'_k, two of nothing
constexpr int SUMS = ROWS + PRODUCTS;  // of SLOTS
static_assert(QUAD == 4 && CLUSTER <= 16 && 64 % (CLUSTER * QUAD) == 0, "a quad is a float4, a cluster 16 blocks at most");
static_assert(HALF_ROWS + 2 <= VALUES && QUADS % 32 == 0 && TOKEN_THREADS <= 1024, "whole warps of a block");

template <int PASSES, int TOKENS>
struct TokenShared {
    uint2 x[TOKENS][PASSES][COPIES][QUADS];  // x', four bf16 each
    float partials[TOKENS][TOKEN_WARPS][VALUES];
    float block_sums[TOKENS][CLUSTER][SLOTS];  // of each block of the cluster
    uint64_t sums_barrier;                     // all blocks' sums have arrived
};

__device__ __forceinline__ float4 widen(uint2 v) {
    return make_float4(low_bf16(v.x), high_bf16(v.x), low_bf16(v.y), high_bf16(v.y));
}
__device__ __forceinline__ uint2 narrow(float4 v) {
    return make_uint2(ptx::pack_bf16x2(v.x, v.y), ptx::pack_bf16x2(v.z, v.w));
}
__device__ __forceinline__ float4 add_scaled(float by, float4 v, float4 to) {
    return make_float4(fmaf(by, v.x, to.x), fmaf(by, v.y, to.y), fmaf(by, v.z, to.z), fmaf(by, v.w, to.w));
}

// Where the partial sums of a slot lie: warps from `first` on, and which of their values.
struct Source {
    int first, warps, value;
};
// Which threads sum up x'_j x'_k: those of copy c in half 0 have x'_c x'_c, and as their second product, for c < 2,
// x'_c x'_(c + 2); in half 1 x'_c x'_(c + 1).
constexpr int SQUARE_OF = 0, NEXT_OF = COPIES, SECOND_OF = 2 * COPIES;  // and c
constexpr uint64_t PRODUCT_SOURCES = pack_nibbles<uint64_t>({
    SQUARE_OF + 0, NEXT_OF + 0, SECOND_OF + 0, NEXT_OF + 3,   // 00 01 02 03
    SQUARE_OF + 1, NEXT_OF + 1, SECOND_OF + 1,                // 11 12 13
    SQUARE_OF + 2, NEXT_OF + 2, SQUARE_OF + 3,                // 22 23 33
});
__device__ __forceinline__ Source source_of(int slot) {
    constexpr int GROUP_WARPS = QUADS / 32;  // of a half and a copy
    if (slot < PRODUCT_SLOT || slot >= POST_SLOT) {
        const int row = slot < PRODUCT_SLOT ? slot : slot - POST_SLOT + COPIES;
        return {row / HALF_ROWS * TOKEN_WARPS / 2, TOKEN_WARPS / 2, row % HALF_ROWS};
    }
    const int source = PRODUCT_SOURCES >> 4 * (slot - PRODUCT_SLOT) & 15;
    return {source % SECOND_OF * GROUP_WARPS, GROUP_WARPS, HALF_ROWS + source / SECOND_OF};
}

// What a warp does when the sums of its block are there, for a token of the cluster.
enum Kind { SEND_SUMS, MAKE_OUT, MAKE_COMB, MAKE_POST, NOTHING };
struct Role {
    Kind kind;
    int t, thread;  // thread: of those that do the same for the token
};

// Two warps a token send its sums to all blocks, and OUT_WARPS make out. In one of the blocks a warp makes new_comb,
// which takes longest, and another new_post.
template <int TOKENS>
__device__ __forceinline__ Role role_of(int warp, int lane, uint32_t rank) {
    constexpr int FIRST_OUT = 2 * TOKENS, FIRST_COMB = FIRST_OUT + OUT_WARPS * TOKENS, FIRST_POST = FIRST_COMB + TOKENS;
    static_assert(SLOTS <= 2 * 32 && FIRST_POST + TOKENS <= TOKEN_WARPS, "a warp for each role");
    if (warp < FIRST_OUT) return {SEND_SUMS, warp / 2, warp % 2 * 32 + lane};
    if (warp < FIRST_COMB)
        return {MAKE_OUT, (warp - FIRST_OUT) / OUT_WARPS, (warp - FIRST_OUT) % OUT_WARPS * 32 + lane};
    const int t = (warp - FIRST_COMB) % TOKENS;
    if (warp >= FIRST_POST + TOKENS || rank != CLUSTER - 1 - t) return {NOTHING, t, lane};
    return {warp < FIRST_POST ? MAKE_COMB : MAKE_POST, t, lane};
}

// What the role reads of base, scale and norm, before the wait for the sums. first_quad, quads: of the block.
template <int PASSES>
struct RoleParameters {
    float base, scale;
    uint2 norm[PASSES];

    __device__ __forceinline__ RoleParameters(const Problem& p, const Role& role, int first_quad, int quads, int lane) {
        base = scale = 0.0f;
        if (role.kind == NOTHING || role.kind == SEND_SUMS) return;
        const int row = role.kind == MAKE_OUT ? lane % COPIES
                      : role.kind == MAKE_POST ? COPIES + lane % COPIES : 2 * COPIES + lane % (COPIES * COPIES);
        base = __ldg(p.base + row);
        scale = __ldg(p.scale + (role.kind == MAKE_OUT ? 0 : role.kind == MAKE_POST ? 1 : 2));
        if (role.kind != MAKE_OUT) return;
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            const int quad = min(role.thread + pass * QUADS, quads - 1);
            norm[pass] = __ldg(reinterpret_cast<const uint2*>(p.norm + (first_quad + quad) * QUAD));
        }
    }
};

// The block's sum of a slot. from: in shared memory, the partial sum of the first of its warps.
__device__ __forceinline__ float sum_warps(uint32_t from, int warps) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < TOKEN_WARPS / 2; ++i)
        if (i < warps) sum += __uint_as_float(ptx::load_shared(from + i * VALUES * sizeof(float)));
    return sum;
}

// To the same place in all blocks of the cluster, counting on the barrier of each.
__device__ __forceinline__ void send_sum(float sum, uint32_t to, uint32_t barrier) {
#pragma unroll
    for (int block = 0; block < CLUSTER; ++block)
        ptx::st_async(ptx::in_block(block, to), __float_as_uint(sum), ptx::in_block(block, barrier));
}

// A slot's sum over the blocks of the cluster.
template <int PASSES, int TOKENS>
__device__ __forceinline__ float sum_blocks(const TokenShared<PASSES, TOKENS>& shared, int t, int slot) {
    float sum = 0.0f;
#pragma unroll
    for (int block = 0; block < CLUSTER; ++block) sum += shared.block_sums[t][block][slot];
    return sum;
}

// A warp: its quads of out.
template <int PASSES, int TOKENS>
__device__ __forceinline__ void make_out(const Problem& p, const TokenShared<PASSES, TOKENS>& shared, const Role& role,
                                         const RoleParameters<PASSES>& parameters, int token, int first_quad, int quads,
                                         int lane) {
    uint2 x[PASSES][COPIES];  // before the wait, as all that does not depend on the sums
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass)
#pragma unroll
        for (int j = 0; j < COPIES; ++j) x[pass][j] = shared.x[role.t][pass][j][role.thread];
    const float by_width = ptx::reciprocal_fast(COPIES * p.hidden), by_hidden = ptx::reciprocal_fast(p.hidden);
    ptx::wait(ptx::smem_address(&shared.sums_barrier), 0);
    const float sum = sum_blocks(shared, role.t, min(lane, U_SLOTS - 1));
    float products[PRODUCTS];
#pragma unroll
    for (int i = 0; i < PRODUCTS; ++i) products[i] = broadcast(sum, PRODUCT_SLOT + i);
    const float square = products[product_of(0, 0)] + products[product_of(1, 1)] + products[product_of(2, 2)] +
                         products[product_of(3, 3)];
    const float inverse = inverse_rms_of_square(square, by_width);
    const float pre = sigmoid(sum * inverse * parameters.scale + parameters.base) + HC_EPS;
    const float weight = u_weight(pre, products, by_hidden);
    float weights[COPIES];
#pragma unroll
    for (int j = 0; j < COPIES; ++j) weights[j] = broadcast(weight, j);
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        const int quad = role.thread + pass * QUADS;
        if (quad >= quads) return;
        float4 u = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int j = 0; j < COPIES; ++j) u = add_scaled(weights[j], widen(x[pass][j]), u);
        const float4 n = widen(parameters.norm[pass]);
        *reinterpret_cast<uint2*>(p.out + token * p.hidden + (first_quad + quad) * QUAD) =
            narrow(make_float4(u.x * n.x, u.y * n.y, u.z * n.z, u.w * n.w));
    }
}

// A warp: new_comb or new_post of a token. A lane has one slot's sum: of an element, or from lane 16 on of a square.
template <int PASSES, int TOKENS>
__device__ __forceinline__ void make_mixing(const Problem& p, const TokenShared<PASSES, TOKENS>& shared,
                                            const Role& role, const RoleParameters<PASSES>& parameters, int token,
                                            int lane) {
    constexpr uint32_t SQUARE_SLOTS = pack_nibbles<uint32_t>(
        {PRODUCT_SLOT + product_of(0, 0), PRODUCT_SLOT + product_of(1, 1), PRODUCT_SLOT + product_of(2, 2),
         PRODUCT_SLOT + product_of(3, 3)});
    const int slot = lane >= 16 ? SQUARE_SLOTS >> 4 * (lane % COPIES) & 15
                     : role.kind == MAKE_COMB ? COMB_SLOT + lane : POST_SLOT + lane % COPIES;
    const float by_width = ptx::reciprocal_fast(COPIES * p.hidden);
    ptx::wait(ptx::smem_address(&shared.sums_barrier), 0);
    const float sum = sum_blocks(shared, role.t, slot);
    const float square = broadcast(sum, 16) + broadcast(sum, 17) + broadcast(sum, 18) + broadcast(sum, 19);
    const float logit = sum * inverse_rms_of_square(square, by_width) * parameters.scale + parameters.base;
    if (role.kind == MAKE_COMB) {
        const float balanced = sinkhorn(logit, lane);
        if (lane < COPIES * COPIES) p.new_comb[token * COPIES * COPIES + lane] = balanced;
    } else if (lane < COPIES) {
        p.new_post[token * COPIES + lane] = 2.0f * sigmoid(logit);
    }
}

}  // namespace columns
