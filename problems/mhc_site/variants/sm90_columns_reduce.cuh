// Sums over all columns, from those that each block publishes for its group; and from them the weights of u, new_post
// and new_comb.
#pragma once

#include "sm90_columns_tile.cuh"

namespace columns {

// The tokens of this block's group, and where in global memory its sums and weights of u cross between blocks.
struct Group {
    int first, count, tiles;
    uint64_t *sums, *u_weights;  // (RING_TILES, TILE, slices, SLOTS), (RING_TILES, TILE, COPIES)
    uint32_t first_tag;

    __device__ uint32_t tag(int tile) const { return first_tag + 1 + tile; }
};

template <class S>
__device__ __forceinline__ Group group_of(const Problem& p, uint32_t first_tag) {
    const int group_tokens = (p.tokens + gridDim.y - 1) / gridDim.y;
    Group g;
    g.first = min(p.tokens, group_tokens * static_cast<int>(blockIdx.y));
    g.count = min(group_tokens, p.tokens - g.first);
    g.tiles = (g.count + S::TILE - 1) / S::TILE;
    const int64_t words = int64_t(RING_TILES) * S::TILE * gridDim.x * SLOTS;
    g.sums = p.exchange + blockIdx.y * words;
    g.u_weights = p.exchange + gridDim.y * words + int64_t(blockIdx.y) * RING_TILES * S::TILE * COPIES;
    g.first_tag = first_tag;
    return g;
}

// The block's sums of a tile: a thread has four rows of a token, or a product.
template <class S>
__device__ __forceinline__ void publish_sums(const Group& g, const typename S::Shared& shared, int tile, int thread) {
    const int count = min(S::TILE, g.count - tile * S::TILE);
    const int stride = gridDim.x * SLOTS;
    uint64_t* to = g.sums + (int64_t(tile % RING_TILES) * S::TILE * gridDim.x + blockIdx.x) * SLOTS;
    constexpr int QUADS = ROWS / 4, QUAD_THREADS = S::TILE * QUADS;
    static_assert(QUAD_THREADS + S::TILE * PRODUCTS == ROLE_THREADS, "a thread for each");
    if (thread < QUAD_THREADS) {
        const int token = thread / QUADS, quad = thread % QUADS;
        if (token >= count) return;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int warp = 0; warp < ROLE_WARPS; ++warp) {
            const float4 partial = shared.dots[warp][token][quad];
            sum = make_float4(sum.x + partial.x, sum.y + partial.y, sum.z + partial.z, sum.w + partial.w);
        }
        uint64_t* const slot = to + token * stride + slot_of_row(4 * quad);
        publish_pair(slot, sum.x, sum.y, g.tag(tile));
        publish_pair(slot + 2, sum.z, sum.w, g.tag(tile));
    } else {
        const int token = (thread - QUAD_THREADS) / PRODUCTS, product = (thread - QUAD_THREADS) % PRODUCTS;
        if (token >= count) return;
        float sum = 0.0f;
#pragma unroll
        for (int part = 0; part < S::PARTS; ++part) sum += shared.products[part][token][product];
        publish(to + token * stride + PRODUCT_SLOT + product, sum, g.tag(tile));
    }
}

// A lane's part of the sums over all slices: of slot `lane` % 16 from `low` on, and with HIGH of slot `lane` %
// HIGH_SLOTS from `high` on. Both are asked for at once.
template <bool HIGH>
__device__ __forceinline__ Sums sum_slots(const uint64_t* low, const uint64_t* high, int lane, int slices,
                                          uint32_t tag) {
    constexpr int LOW_STEP = 2, LOW_BATCH = 16, HIGH_STEP = 32 / HIGH_SLOTS, SLICES = LOW_STEP * LOW_BATCH;
    constexpr int HIGH_BATCH = HIGH ? SLICES / HIGH_STEP : 0;
    const int first_low = lane / 16, first_high = lane / HIGH_SLOTS;
    low += first_low * SLOTS + lane % 16;
    high += first_high * SLOTS + lane % HIGH_SLOTS;
    Sums sums = {0.0f, 0.0f};
    for (; slices > 0; slices -= SLICES, low += SLICES * SLOTS, high += SLICES * SLOTS) {
        float value[LOW_BATCH + HIGH_BATCH];
        receive(tag, value, [&](int i, uint64_t absent) {
            const bool is_low = i < LOW_BATCH;
            const int slice = is_low ? LOW_STEP * i : HIGH_STEP * (i - LOW_BATCH);
            const bool valid = slice < slices - (is_low ? first_low : first_high);
            return valid ? load_relaxed((is_low ? low : high) + slice * SLOTS) : absent;
        });
#pragma unroll
        for (int i = 0; i < LOW_BATCH; ++i) sums.low += value[i];
#pragma unroll
        for (int i = LOW_BATCH; i < LOW_BATCH + HIGH_BATCH; ++i) sums.high += value[i];
    }
    return sums;
}

// The mixers, two warps for a token of the block: the first makes the weights of u for every block, the second post and
// comb. The weights say that all of the token's sums have been read, so the first waits until the second has.
template <class S>
__device__ __forceinline__ void mixer(const Problem& p, const Group& g, typename S::Shared& shared, int mixer,
                                      int lane) {
    constexpr int PAIRS = MIXER_WARPS / 2;
    static_assert(U_SLOTS <= 16 && LANE_SLOTS - POST_SLOT == 16, "sixteen slots a warp, each in two lanes");
    const int pair = mixer % PAIRS, slices = gridDim.x;
    const bool is_first = mixer < PAIRS;
    int parity = 0;
    for (int t = blockIdx.x + pair * slices; t < g.count; t += PAIRS * slices, parity ^= 1) {
        const int tile = t / S::TILE;
        const uint64_t* from = g.sums + (int64_t(tile % RING_TILES) * S::TILE + t % S::TILE) * slices * SLOTS;
        // Of one token while the second warp still reads that of the one before.
        float* const inverse_rms = &shared.partials[pair][parity];
        Sums sums = {0.0f, 0.0f};
        if (is_first) {
            if (lane % 16 < U_SLOTS) sums = sum_slots<false>(from, from, lane, slices, g.tag(tile));
            sums.low += __shfl_xor_sync(ALL, sums.low, 16);
            const float inverse = inverse_rms_of_copies(sums, p.hidden);
            const float weight = u_weight_of_sums(sums, inverse, p.base, p.scale, p.hidden, lane);
            if (lane == 0) *inverse_rms = inverse;
            ptx::named_barrier_sync<64>(MIXER_BARRIER + pair);
            if (lane < COPIES)
                publish(g.u_weights + (tile % RING_TILES * S::TILE + t % S::TILE) * COPIES + lane, weight, g.tag(tile));
        } else {
            sums = sum_slots<true>(from + POST_SLOT, from + LANE_SLOTS, lane, slices, g.tag(tile));
            sums.low += __shfl_xor_sync(ALL, sums.low, 16);
#pragma unroll
            for (int offset = HIGH_SLOTS; offset < 32; offset *= 2)
                sums.high += __shfl_xor_sync(ALL, sums.high, offset);
            ptx::named_barrier_sync<64>(MIXER_BARRIER + pair);
            const int64_t token = g.first + t;
            write_mixing(sums, *inverse_rms, p.base, p.scale, p.new_post + token * COPIES,
                         p.new_comb + token * COPIES * COPIES, lane);
        }
    }
}

// A thread's weight of u in a tile, from a mixer of some block: asked for, and later waited for, if there is one.
template <class S>
struct Weight {
    const uint64_t* from = nullptr;
    uint64_t word;

    __device__ __forceinline__ Weight(const Group& g, int tile, int thread) {
        if (tile < 0 || thread >= COPIES * min(S::TILE, g.count - tile * S::TILE)) return;
        from = g.u_weights + tile % RING_TILES * S::TILE * COPIES + thread;
        word = load_relaxed(from);
    }
    __device__ __forceinline__ void receive(typename S::Shared& shared, int tile, uint32_t tag, int thread) {
        if (!from) return;
        for (int tries = 0; static_cast<uint32_t>(word >> 32) != tag; count_try(tries)) word = load_relaxed(from);
        shared.u_weights[tile % 2][thread / COPIES][thread % COPIES] = __uint_as_float(static_cast<uint32_t>(word));
    }
};

// The sums of a token over the slices first, first + step, ..., in that order; all slots, or what u needs only.
template <class S>
__device__ __forceinline__ Sums sum_slices(const Group& g, int tile, int token, int first, int step, bool all_slots,
                                           int lane) {
    const int slices = gridDim.x;
    const uint64_t* from = g.sums + (int64_t(tile % RING_TILES) * S::TILE + token) * slices * SLOTS;
    const bool has_low = all_slots ? is_used(lane) : lane < U_SLOTS;
    Sums sums = {0.0f, 0.0f};
    constexpr int BATCH = 8, BATCH_HIGH = 2;
    for (int s = first; s < slices; s += BATCH * step) {
        float value[BATCH];
        const int valid = has_low ? (slices - s + step - 1) / step : 0;
        receive(g.tag(tile), value, [&](int i, uint64_t absent) {
            return i < valid ? load_relaxed(from + int64_t(s) * SLOTS + lane + i * step * SLOTS) : absent;
        });
#pragma unroll
        for (int i = 0; i < BATCH; ++i) sums.low += value[i];
    }
    if (!all_slots) return sums;
    const int high_step = 32 / HIGH_SLOTS * step;  // eight slices at a time, four lanes each
    for (int s = first + lane / HIGH_SLOTS * step; s - lane / HIGH_SLOTS * step < slices; s += BATCH_HIGH * high_step) {
        float value[BATCH_HIGH];
        const int valid = s < slices ? (slices - s + high_step - 1) / high_step : 0;
        const uint64_t* const high = from + int64_t(s) * SLOTS + LANE_SLOTS + lane % HIGH_SLOTS;
        receive(g.tag(tile), value, [&](int i, uint64_t absent) {
            return i < valid ? load_relaxed(high + i * high_step * SLOTS) : absent;
        });
#pragma unroll
        for (int i = 0; i < BATCH_HIGH; ++i) sums.high += value[i];
    }
#pragma unroll
    for (int offset = HIGH_SLOTS; offset < 32; offset *= 2) sums.high += __shfl_xor_sync(ALL, sums.high, offset);
    return sums;
}

// `count` partial sums of a token, of the warps first, first + step, ..., added up in that order.
__device__ __forceinline__ Sums sum_partials(const float (*partials)[SLOTS], int first, int step, int count, int lane) {
    Sums sums = {0.0f, 0.0f};
    for (int i = 0; i < count; ++i) {
        sums.low += partials[first + i * step][lane];
        sums.high += partials[first + i * step][LANE_SLOTS + lane % HIGH_SLOTS];
    }
    return sums;
}

// Of a group's one tile: all warps add up, each a part of the slices of one token; then one warp a token makes weights
// of u, and where the token is this block's, post and comb, while the producers go on to out.
template <class S>
__device__ __forceinline__ void mix_in_block(const Problem& p, const Group& g, typename S::Shared& shared, int column,
                                             int thread) {
    const int warp = thread / 32, lane = thread % 32;
    const uint4 norm = load_norm<S>(p, column, thread);
    int warp_stride = 1;  // between the warps of a token
    while (warp_stride < g.count) warp_stride *= 2;
    const int summed = warp % warp_stride, parts = WARPS / warp_stride;
    if (summed < g.count) {
        const bool all_slots = summed % gridDim.x == blockIdx.x;
        const Sums sums = sum_slices<S>(g, 0, summed, warp / warp_stride, parts, all_slots, lane);
        shared.partials[warp][lane] = sums.low;
        if (lane < HIGH_SLOTS) shared.partials[warp][LANE_SLOTS + lane] = sums.high;
    }
    ptx::named_barrier_sync<NUM_THREADS>(BOTH_BARRIER);
    const int mixed = WARPS - 1 - warp;  // producers, the first warps, make out
    Sums sums = {0.0f, 0.0f};
    float inverse = 0.0f;
    if (mixed < g.count) {
        sums = sum_partials(shared.partials, mixed, warp_stride, parts, lane);
        inverse = inverse_rms_of_copies(sums, p.hidden);
        const float weight = u_weight_of_sums(sums, inverse, p.base, p.scale, p.hidden, lane);
        if (lane < COPIES) shared.u_weights[0][mixed][lane] = weight;
    }
    ptx::named_barrier_sync<NUM_THREADS>(BOTH_BARRIER);
    if (mixed < g.count && mixed % gridDim.x == blockIdx.x) {
        const int64_t token = g.first + mixed;
        write_mixing(sums, inverse, p.base, p.scale, p.new_post + token * COPIES, p.new_comb + token * COPIES * COPIES,
                     lane);
    }
    if (thread < ROLE_THREADS) write_out<S>(p, norm, g.first, g.count, 0, column, shared, thread);
}

}  // namespace columns
