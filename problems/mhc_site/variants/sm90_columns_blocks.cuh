// Blocks that own columns of all four copies, for every token of their group: post is local to a column. fn is read
// once, into registers. Of a tile of tokens, which stays in shared memory:
//
//   role         warps   steps
//   producers    8       load, AHEAD tiles early; make x' and write it; LAG tiles later, with the weights of u, out
//   multipliers  8       x' times fn, x' times x'; publish the sums
//   mixers       4       of the block's own tokens: add up the sums of all blocks; new_post, new_comb, the weights of u
//
// Full barriers say that producers have made x' of a tile, empty barriers that multipliers have read it.
#pragma once

#include "launch.cuh"
#include "ptx.cuh"
#include "sm90_columns_reduce.cuh"

namespace columns {

// ONE_TILE: the group is one tile at most, and every block adds up for itself; then there are no mixers.
template <bool ONE_TILE>
constexpr int BLOCK_THREADS = ONE_TILE ? NUM_THREADS : NUM_THREADS + 32 * MIXER_WARPS;

// Producers wait for the preceding kernel before they touch what kernels write, and the tag, which the launch before
// may still raise. The other warps, which load fn meanwhile, wait for them at the block's barrier.
__device__ __forceinline__ void begin_launch(const Problem& p, uint32_t& first_tag, int thread) {
    programmatic::wait();
    programmatic::trigger();
    if (thread == 0) first_tag = *reinterpret_cast<const volatile uint32_t*>(&p.state->tag);
}

// Producers wait until a tile's inputs are there, and what they know of the one before is known to all of them.
__device__ __forceinline__ void begin_tile() {
    ptx::cp_async_wait<AHEAD - 1>();  // all but the next tiles'
    ptx::named_barrier_sync<ROLE_THREADS>(PRODUCE_BARRIER);
}

// A producer's part of a tile, up to where the multipliers can begin.
template <class S>
__device__ __forceinline__ void produce_tile(const Problem& p, const Group& g, int tile, int column,
                                             typename S::Shared& shared, int thread) {
    make_copies<S>(p, g.first, min(S::TILE, g.count - tile * S::TILE), tile, column, shared, thread);
    ptx::arrive(S::barrier(shared.full_barriers, tile));
}

// A multiplier's part of a tile.
template <class S, bool ONE_TILE>
__device__ __forceinline__ void multiply_tile(const Group& g, const FnFragments<S>& fn, int tile,
                                              typename S::Shared& shared, int thread) {
    ptx::keep_in_register(thread);  // addresses are made anew for each tile: kept in registers they spill
    const int warp = thread / 32, lane = thread % 32;
    ptx::wait(S::barrier(shared.full_barriers, tile), S::parity(tile));
    // The sums of the tile before are published.
    if constexpr (!ONE_TILE) ptx::named_barrier_sync<ROLE_THREADS>(MULTIPLY_BARRIER);
    multiply_copies<S>(tile, shared, warp, lane);
    multiply_by_fn<S>(fn, min(S::TILE, g.count - tile * S::TILE), tile, shared, warp, lane);
    if constexpr (!ONE_TILE) ptx::arrive(S::barrier(shared.empty_barriers, tile));
    ptx::named_barrier_sync<ROLE_THREADS>(MULTIPLY_BARRIER);
    publish_sums<S>(g, shared, tile, thread);
}

// The producers' tiles, where there are mixers. Weights of u are asked for while a tile is made, for the next turn: one
// that has come long ago takes as long to read as x' of a tile to make.
template <class S>
__device__ __forceinline__ void producer(const Problem& p, const Group& g, int column, typename S::Shared& shared,
                                         int thread) {
    const uint4 norm = load_norm<S>(p, column, thread);
    const int lag = min(S::LAG, g.tiles);
    for (int tile = 0; tile < g.tiles + lag; ++tile) {
        const int out_tile = tile - lag, next_out = out_tile + 1;
        begin_tile();
        Weight<S> weight(g, next_out, thread);
        if (tile < g.tiles) produce_tile<S>(p, g, tile, column, shared, thread);
        if (out_tile >= 0) {
            const int count = min(S::TILE, g.count - out_tile * S::TILE);
            write_out<S>(p, norm, g.first, count, out_tile, column, shared, thread);
            // The weights say so too, but by way of global memory, without an order that others could rely on.
            ptx::wait(S::barrier(shared.empty_barriers, out_tile), S::parity(out_tile));
        }
        load_tile<S>(p, g.first, g.count, tile + AHEAD, column, shared, thread);
        weight.receive(shared, next_out, g.tag(next_out), thread);
    }
}

// Grid (slices of COLUMNS columns, groups of tokens), dynamic shared memory Shape::Shared.
template <int COLUMNS, int UNITS, int LAG>
__global__ void __launch_bounds__(BLOCK_THREADS<LAG == 0>, 1) site_kernel(const __grid_constant__ Problem p) {
    using S = Shape<COLUMNS, UNITS, LAG>;
    constexpr bool ONE_TILE = LAG == 0;
    extern __shared__ __align__(128) uint8_t memory[];
    typename S::Shared& shared = *reinterpret_cast<typename S::Shared*>(memory);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int column = blockIdx.x * COLUMNS;

    if (thread == 32 * ROLE_WARPS) {
        ptx::prefetch_l2(p.base), ptx::prefetch_l2(p.scale);  // read when all wait for them
        for (int i = 0; i < S::NUM_X_STAGES; ++i)
            ptx::barrier_init(ptx::smem_address(&shared.full_barriers[i]), ROLE_THREADS),
                ptx::barrier_init(ptx::smem_address(&shared.empty_barriers[i]), ROLE_THREADS);
    }
    const Group untagged = group_of<S>(p, 0);
    if (!ONE_TILE && warp >= WARPS) {
        ptx::named_barrier_sync<BLOCK_THREADS<ONE_TILE>>(BLOCK_BARRIER);
        ptx::warpgroup_reg_dealloc<MIXER_REGISTERS>();
        mixer<S>(p, group_of<S>(p, shared.first_tag), shared, warp - WARPS, lane);
        return;
    }
    if (warp < ROLE_WARPS) {
        begin_launch(p, shared.first_tag, thread);
        static_assert(AHEAD == 3, "tiles are asked for one by one here: a loop becomes other machine code");
        load_tile<S>(p, untagged.first, untagged.count, 0, column, shared, thread);
        load_tile<S>(p, untagged.first, untagged.count, 1, column, shared, thread);
        load_tile<S>(p, untagged.first, untagged.count, 2, column, shared, thread);
        ptx::named_barrier_sync<BLOCK_THREADS<ONE_TILE>>(BLOCK_BARRIER);
        if constexpr (!ONE_TILE) ptx::warpgroup_reg_alloc<ROLE_REGISTERS>();
        const Group g = group_of<S>(p, shared.first_tag);
        if (ONE_TILE && g.tiles) begin_tile(), produce_tile<S>(p, g, 0, column, shared, thread);
        if constexpr (!ONE_TILE) producer<S>(p, g, column, shared, thread);
    } else {
        FnFragments<S> fn;
        fn.load(p.fn, p.hidden, column, warp - ROLE_WARPS, lane);
        ptx::named_barrier_sync<BLOCK_THREADS<ONE_TILE>>(BLOCK_BARRIER);
        if constexpr (!ONE_TILE) ptx::warpgroup_reg_alloc<ROLE_REGISTERS>();
        const Group g = group_of<S>(p, shared.first_tag);
        for (int tile = 0; tile < (ONE_TILE ? min(g.tiles, 1) : g.tiles); ++tile)
            multiply_tile<S, ONE_TILE>(g, fn, tile, shared, thread - ROLE_THREADS);
    }
    if (ONE_TILE && untagged.tiles) mix_in_block<S>(p, group_of<S>(p, shared.first_tag), shared, column, thread);
    if (thread == 0) tagged::leave(p.state, shared.first_tag + p.group_tiles);
}

}  // namespace columns
