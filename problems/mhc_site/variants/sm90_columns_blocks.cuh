// Many tokens: BLOCKS

#pragma once

#include <cstdint>

#include "launch.cuh"
#include "ptx.cuh"
#include "sm90_columns_reduce.cuh"
#include "sm90_columns_tile.cuh"

namespace columns {

// The spreaders, of a block that tells others sums: ahead of all that kernels ahead write, and of the tag, which the launch
// before may still raise. The other warps, which load fn meanwhile, meet them at the block's barrier.
__device__ __forceinline__ void begin(const Problem& p, uint32_t& first_tag, int thread) {
    programmatic::wait();
    programmatic::trigger();
    if (thread == 0) first_tag = *reinterpret_cast<const volatile uint32_t*>(&p.state->tag);
}

// FEW: one tile at most, and every block adds up for itself; then there are no mixers.
template <bool FEW>
constexpr int BLOCK_THREADS = FEW ? NUM_THREADS : NUM_THREADS + 32 * MIXERS;

// A spreader's part of a tile, up to where the multipliers can begin.
template <class S>
__device__ __forceinline__ void begin_tile(const Problem& p, const Group& g, int tile, int column,
                                           typename S::Shared& shared, int thread) {
    cp_async_wait<1>();  // all but the next tile's
    ptx::named_barrier_sync<ROLE_THREADS>(SPREAD_BARRIER);
    spread<S>(p, g.first, min(S::TILE, g.count - tile * S::TILE), tile, column, shared, thread);
    ptx::arrive(S::at(shared.ready, tile));
}

// A multiplier's part of a tile.
template <class S, bool FEW>
__device__ __forceinline__ void sum_tile(const Group& g, const Weights<S>& fn, int tile, typename S::Shared& shared,
                                         int thread) {
    asm volatile("" : "+r"(thread));  // addresses are made anew for each tile: kept in registers they spill
    const int warp = thread / 32, lane = thread % 32;
    ptx::wait(S::at(shared.ready, tile), S::phase(tile));
    if constexpr (!FEW) ptx::named_barrier_sync<ROLE_THREADS>(MULTIPLY_BARRIER);  // the sums of the tile ahead are told
    multiply_copies<S>(tile, shared, warp, lane);
    multiply<S>(fn, min(S::TILE, g.count - tile * S::TILE), tile, shared, warp, lane);
    if constexpr (!FEW) ptx::arrive(S::at(shared.read, tile));
    ptx::named_barrier_sync<ROLE_THREADS>(MULTIPLY_BARRIER);
    publish_sums<S>(g, shared, tile, thread);
}

template <int COLUMNS, int TILE, int UNITS, bool FEW>
__global__ void __launch_bounds__(BLOCK_THREADS<FEW>, 1) site_kernel(const __grid_constant__ Problem p) {
    using S = Shape<COLUMNS, TILE, UNITS>;
    extern __shared__ __align__(128) uint8_t memory[];
    typename S::Shared& shared = *reinterpret_cast<typename S::Shared*>(memory);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int column = blockIdx.x * COLUMNS;

    if (thread == 32 * ROLE_WARPS) {
        prefetch_line(p.base), prefetch_line(p.scale);  // read when all wait for them
        for (int i = 0; i < S::X_STAGES; ++i)
            ptx::barrier_init(ptx::smem_address(&shared.ready[i]), ROLE_THREADS),
                ptx::barrier_init(ptx::smem_address(&shared.read[i]), ROLE_THREADS);
    }
    const Group early = group_of<S>(p, 0);
    if (!FEW && warp >= WARPS) {
        ptx::named_barrier_sync<BLOCK_THREADS<FEW>>(BLOCK_BARRIER);
        ptx::warpgroup_reg_dealloc<MIXER_REGISTERS>();
        mix<S>(p, group_of<S>(p, shared.first_tag), shared, warp - WARPS, lane);
        return;
    }
    if (warp < ROLE_WARPS) {
        begin(p, shared.first_tag, thread);
        load_tile<S>(p, early.first, early.count, 0, column, shared, thread);
        load_tile<S>(p, early.first, early.count, 1, column, shared, thread);
        ptx::named_barrier_sync<BLOCK_THREADS<FEW>>(BLOCK_BARRIER);
        if constexpr (!FEW) ptx::warpgroup_reg_alloc<COLUMN_REGISTERS>();
        const Group g = group_of<S>(p, shared.first_tag);
        if (FEW && g.tiles) begin_tile<S>(p, g, 0, column, shared, thread);
        if constexpr (!FEW) {
            const uint4 norm = norm_of<S>(p, column, thread);
            for (int tile = 0; tile < g.tiles + LAG; ++tile) {
                if (tile < g.tiles) begin_tile<S>(p, g, tile, column, shared, thread);
                const int ready = tile - LAG;
                if (ready >= 0) receive_weights<S>(g, shared, ready, thread);
                ptx::named_barrier_sync<ROLE_THREADS>(SPREAD_BARRIER);
                if (ready >= 0) {
                    write_out<S>(p, norm, g.first, min(TILE, g.count - ready * TILE), ready, column, shared, thread);
                    // The weights say so too, but by way of global memory, without an order that others could rely on.
                    ptx::wait(S::at(shared.read, ready), S::phase(ready));
                }
                load_tile<S>(p, g.first, g.count, tile + 2, column, shared, thread);
            }
        }
    } else {
        Weights<S> fn;
        fn.load(p.fn, p.hidden, column, warp - ROLE_WARPS, lane);
        ptx::named_barrier_sync<BLOCK_THREADS<FEW>>(BLOCK_BARRIER);
        if constexpr (!FEW) ptx::warpgroup_reg_alloc<COLUMN_REGISTERS>();
        const Group g = group_of<S>(p, shared.first_tag);
        for (int tile = 0; tile < (FEW ? min(g.tiles, 1) : g.tiles); ++tile)
            sum_tile<S, FEW>(g, fn, tile, shared, thread - ROLE_THREADS);
    }
    if (FEW && early.tiles) mix_here<S>(p, group_of<S>(p, shared.first_tag), shared, column, thread);
    if (thread == 0) tagged::leave(p.state, shared.first_tag + p.group_tiles);
}

}  // namespace columns
