// What blocks tell each other of a group of tokens: sums of each block's columns, and from all of them the weights of u, new_post
// and new_comb.
#pragma once

#include <cstdint>

#include "sm90_columns_exchange.cuh"
#include "sm90_columns_mix.cuh"
#include "sm90_columns_problem.cuh"
#include "sm90_columns_tile.cuh"

namespace columns {

// The tokens of this block's group, and where its sums and weights lie between blocks.
struct Group {
    int first, count, tiles;
    uint64_t *sums, *u_weights;  // (RING, TILE, slices, SLOTS), (RING, TILE, COPIES)
    uint32_t first_tag;

    __device__ uint32_t tag(int tile) const { return first_tag + 1 + tile; }
};

template <class S>
__device__ __forceinline__ Group group_of(const Problem& p, uint32_t first_tag) {
    const int each = (p.tokens + gridDim.y - 1) / gridDim.y;
    Group g;
    g.first = min(p.tokens, each * static_cast<int>(blockIdx.y));
    g.count = min(each, p.tokens - g.first);
    g.tiles = (g.count + S::TILE - 1) / S::TILE;
    const int64_t all = int64_t(RING_TILES) * S::TILE * gridDim.x * SLOTS;
    g.sums = p.exchange + blockIdx.y * all;
    g.u_weights = p.exchange + gridDim.y * all + int64_t(blockIdx.y) * RING_TILES * S::TILE * COPIES;
    g.first_tag = first_tag;
    return g;
}

// The sums of a token over the slices part, part + parts, ..., in that order; all slots, or what u needs only.
template <class S>
__device__ __forceinline__ Sums sum_slices(const Group& g, int tile, int token, int part, int parts, bool all, int lane) {
    const int slices = gridDim.x;
    const uint64_t* from = g.sums + (int64_t(tile % RING_TILES) * S::TILE + token) * slices * SLOTS;
    const bool low = all ? is_used(lane) : lane < U_SLOTS;
    Sums sums = {0.0f, 0.0f};
    constexpr int BATCH = 8, BATCH_HIGH = 2;
    for (int s = part; s < slices; s += BATCH * parts) {
        float value[BATCH];
        const int real = low ? (slices - s + parts - 1) / parts : 0;
        receive(from + int64_t(s) * SLOTS + lane, parts * SLOTS, real, g.tag(tile), value);
#pragma unroll
        for (int i = 0; i < BATCH; ++i) sums.low += value[i];
    }
    if (!all) return sums;
    const int step = 8 * parts;  // eight slices at a time, four lanes each
    for (int s = part + lane / 4 * parts; s - lane / 4 * parts < slices; s += BATCH_HIGH * step) {
        float value[BATCH_HIGH];
        const int real = s < slices ? (slices - s + step - 1) / step : 0;
        receive(from + int64_t(s) * SLOTS + 32 + lane % 4, step * SLOTS, real, g.tag(tile), value);
#pragma unroll
        for (int i = 0; i < BATCH_HIGH; ++i) sums.high += value[i];
    }
#pragma unroll
    for (int apart = 4; apart < 32; apart *= 2) sums.high += __shfl_xor_sync(ALL, sums.high, apart);
    return sums;
}

// The sums that lie in rows first, first + apart, ... of `part`, added up in that order.
__device__ __forceinline__ Sums sum_partials(const float (*part)[SLOTS], int first, int apart, int parts, int lane) {
    Sums sums = {0.0f, 0.0f};
    for (int i = 0; i < parts; ++i) {
        sums.low += part[first + i * apart][lane];
        sums.high += part[first + i * apart][32 + lane % 4];
    }
    return sums;
}

// A lane's part of the sums of slots that lie `slot` words from `from`, over the slices part, part + parts, ....
template <int BATCH>
__device__ __forceinline__ float sum_slot(const uint64_t* from, int slot, int part, int parts, int slices,
                                          uint32_t tag) {
    float sum = 0.0f;
    for (int s = part; s - part < slices; s += BATCH * parts) {  // as often for all lanes with the same parts
        float value[BATCH];
        receive(from + int64_t(s) * SLOTS + slot, parts * SLOTS, (slices - s + parts - 1) / parts, tag, value);
#pragma unroll
        for (int i = 0; i < BATCH; ++i) sum += value[i];
    }
    return sum;
}

// The mixers, two warps for a token of the block: the first makes the weights of u for every block, the second post and
// comb. The weights say that all of the token's sums have been read, so the first waits until the second has.
template <class S>
__device__ __forceinline__ void mixer(const Problem& p, const Group& g, typename S::Shared& shared, int mixer, int lane) {
    constexpr int PAIRS = MIXER_WARPS / 2, BATCH = 16, BATCH_HIGH = 4, HIGH = HIGH_SLOTS, HIGH_PARTS = 32 / HIGH;
    const int pair = mixer % PAIRS, slices = gridDim.x;
    const bool of_u = mixer < PAIRS;
    int turn = 0;
    for (int t = blockIdx.x + pair * slices; t < g.count; t += PAIRS * slices, turn ^= 1) {
        const int tile = t / S::TILE;
        const uint64_t* from = g.sums + (int64_t(tile % RING_TILES) * S::TILE + t % S::TILE) * slices * SLOTS;
        float* const inverse = &shared.partials[pair][turn];  // of one token while the second still reads the one ahead
        // Sixteen slots, each in two lanes.
        const int slot = lane % 16;
        Sums sums = {0.0f, 0.0f};
        if (!of_u || slot < U_SLOTS)
            sums.low = sum_slot<BATCH>(from + (of_u ? 0 : POST_SLOT), slot, lane / 16, 2, slices, g.tag(tile));
        sums.low += __shfl_xor_sync(ALL, sums.low, 16);
        if (of_u) {
            const float found = inverse_rms_of_copies(sums, p.hidden);
            const float weight = u_weight_of_sums(sums, found, p.base, p.scale, p.hidden, lane);
            if (lane == 0) *inverse = found;
            ptx::named_barrier_sync<64>(MIXER_BARRIER + pair);
            if (lane < COPIES)
                publish(g.u_weights + (tile % RING_TILES * S::TILE + t % S::TILE) * COPIES + lane, weight, g.tag(tile));
        } else {
            sums.high = sum_slot<BATCH_HIGH>(from + 32, lane % HIGH, lane / HIGH, HIGH_PARTS, slices, g.tag(tile));
#pragma unroll
            for (int apart = HIGH; apart < 32; apart *= 2) sums.high += __shfl_xor_sync(ALL, sums.high, apart);
            ptx::named_barrier_sync<64>(MIXER_BARRIER + pair);
            const int64_t token = g.first + t;
            write_mixing(sums, *inverse, p.base, p.scale, p.new_post + token * COPIES,
                         p.new_comb + token * COPIES * COPIES, lane);
        }
    }
}

// Of the group's one tile: all warps add up, each a part of the slices of one token; then one warp a token makes its
// weights, and where the token is this block's, post and comb, while the others go on to out.
template <class S>
__device__ __forceinline__ void mix_in_block(const Problem& p, const Group& g, typename S::Shared& shared, int column,
                                         int thread) {
    const int warp = thread / 32, lane = thread % 32;
    const uint4 norm = load_norm<S>(p, column, thread);
    int wide = 1;
    while (wide < g.count) wide *= 2;
    const int token = warp % wide, parts = WARPS / wide;
    if (token < g.count) {
        const bool all = token % gridDim.x == blockIdx.x;
        const Sums sums = sum_slices<S>(g, 0, token, warp / wide, parts, all, lane);
        shared.partials[warp][lane] = sums.low;
        if (lane < SLOTS - 32) shared.partials[warp][32 + lane] = sums.high;
    }
    ptx::named_barrier_sync<NUM_THREADS>(BOTH_BARRIER);
    const int mine = WARPS - 1 - warp;  // spreaders, the first warps, make out
    Sums sums = {0.0f, 0.0f};
    float inverse = 0.0f;
    if (mine < g.count) {
        sums = sum_partials(shared.partials, mine, wide, parts, lane);
        inverse = inverse_rms_of_copies(sums, p.hidden);
        const float weight = u_weight_of_sums(sums, inverse, p.base, p.scale, p.hidden, lane);
        if (lane < COPIES) shared.u_weights[0][mine][lane] = weight;
    }
    ptx::named_barrier_sync<NUM_THREADS>(BOTH_BARRIER);
    if (mine < g.count && mine % gridDim.x == blockIdx.x) {
        const int64_t at = g.first + mine;
        write_mixing(sums, inverse, p.base, p.scale, p.new_post + at * COPIES, p.new_comb + at * COPIES * COPIES, lane);
    }
    if (thread < ROLE_THREADS) write_out<S>(p, norm, g.first, g.count, 0, column, shared, thread);
}

// The block's sums of a tile, for whoever adds them up. Four rows of a token, or a product, a thread.
template <class S>
__device__ __forceinline__ void publish_sums(const Group& g, const typename S::Shared& shared, int tile, int thread) {
    const int count = min(S::TILE, g.count - tile * S::TILE);
    const int apart = gridDim.x * SLOTS;
    uint64_t* to = g.sums + (int64_t(tile % RING_TILES) * S::TILE * gridDim.x + blockIdx.x) * SLOTS;
    for (int i = thread; i < count * (ROWS / 4); i += ROLE_THREADS) {
        const int token = i / (ROWS / 4), quad = i % (ROWS / 4);
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int warp = 0; warp < ROLE_WARPS; ++warp) {
            const float4 part = shared.dots[warp][token][quad];
            sum = make_float4(sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w);
        }
        uint64_t* const at = to + token * apart + slot_of_row(4 * quad);
        publish_pair(at, sum.x, sum.y, g.tag(tile));
        publish_pair(at + 2, sum.z, sum.w, g.tag(tile));
    }
    for (int i = thread; i < count * PRODUCTS; i += ROLE_THREADS) {
        const int token = i / PRODUCTS, product = i % PRODUCTS;
        float sum = 0.0f;
#pragma unroll
        for (int part = 0; part < S::PARTS; ++part) sum += shared.products[part][token][product];
        publish(to + token * apart + PRODUCT_SLOT + product, sum, g.tag(tile));
    }
}

// The tile's weights from the mixers.
template <class S>
__device__ __forceinline__ void receive_weights(const Group& g, typename S::Shared& shared, int tile, int thread) {
    const int count = min(S::TILE, g.count - tile * S::TILE);
    if (thread < count * COPIES) {
        float weight[1];
        receive(g.u_weights + tile % RING_TILES * S::TILE * COPIES + thread, 1, 1, g.tag(tile), weight);
        shared.u_weights[tile % 2][thread / COPIES][thread % COPIES] = weight[0];
    }
}

}  // namespace columns
