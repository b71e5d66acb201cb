// moe_gemm for many tokens: both products with wgmma, weights decoded into registers, in a persistent kernel.
//
//   route    sorts slots by expert into two lists of items (sm90_routing.cuh)
//   gather   x's rows, quantised, in the order of the slots, their columns in wgmma's, as the second product has them
//   experts  weights (units, nvfp4_units.cuh) times an item's slots, of w13 and then of w2; once for each list
//   combine  adds the k rows of each token (sm90_prefill_run.cuh, as the launches)
//
// A block of `experts` takes tile after tile from a counter: some 64 rows of weights for each of four warpgroups. A
// fifth asks for weights and rows of activations, for chunks of 64 columns, into a ring of stages. A warp of the others
// decodes its rows of a chunk into registers, issues the chunk's products, and waits for them before it decodes again:
// meanwhile those of the other warpgroups run. N is the item's count, rounded up to eights. The first product's
// epilogue leaves silu(gate) * up * weight in the order and the swizzle in which the second product wants its rows in
// shared memory, so that these take one bulk copy a chunk. The second product's tiles come behind all of the first's,
// and wait for those of their item by a counter: blocks take tiles in order, so whatever a tile waits for is being
// worked on.
//
// Two forms, one for each list. With few slots decoding is most of the work, so a warp has 32 rows, for experts of up
// to Few::BLOCK_N slots; with many, registers for sums are the limit: 16 rows, for items of up to Many::BLOCK_N. Two
// items of the first would decode an expert's weights twice, and take longer than one of the second.
//
// Sums have a fixed order: results repeat bit by bit.
//
// sm90_prefill_form.cuh has the forms and what lies in shared memory, _produce.cuh the thread that asks for data,
// _multiply.cuh what warps do of a tile, _epilogue.cuh what becomes of its sums.
#pragma once

#include "launch.cuh"
#include "sm90_prefill_epilogue.cuh"
#include "sm90_prefill_multiply.cuh"
#include "sm90_prefill_produce.cuh"

namespace prefill {

// ---- consumers: warpgroups

// The thread that stores: wait until its last bulk copy is written, and count that for the item.
template <class P>
__device__ __forceinline__ void finish_store(const P& p, uint32_t stored) {
    const int item = int(load_shared(stored)) - 1;
    if (item < 0) return;
    tma_store_wait();
    fence_proxy_async();
    red_add_release(p.list.ready + item);
    store_shared(stored, 0);
}

// What the epilogue needs of a tile comes while the products run, and takes no registers.
template <class F, class P>
__device__ __forceinline__ void load_list(const P& p, const Tile& tile, uint32_t scale, uint32_t list) {
    const int thread = threadIdx.x % 128;
    const void* const of = tile.product == FIRST ? static_cast<const void*>(p.tables.weight) : p.tables.slot;
    if (thread < tile.count) cp_async4(list + 4 * thread, static_cast<const int*>(of) + tile.first + thread);
    if (thread == 0) cp_async4(scale, p.product[tile.product].scale + tile.expert);
    if constexpr (F::ACTIVATION == NVFP4)
        if (thread < 2)
            cp_async4(scale + IN_SCALES + 4 * thread, p.product[thread ? SECOND : tile.product].in_scale + tile.expert);
}

template <class F>
__device__ __forceinline__ void consumer(const Problem& p, uint32_t smem) {
    constexpr int PARTS = F::PARTS, SUMS = F::SUMS;
    const int group = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, lane = thread % 32;
    const int team = group / F::TEAM, barrier = 1 + F::GROUPS / F::TEAM + group;
    const bool stores = thread == 0 && group % F::TEAM == 0;  // one thread of each team
    const int part = PARTS == 2 ? 0 : thread / 32 % 2;  // of a unit, this warp's first
    const int unit = F::SHARE * group + thread / 32 * PARTS / 2;  // of a tile's
    const uint32_t weights = smem + F::SMEM_A + unit * units::BYTES;
    const uint32_t team_staging = smem + F::SMEM_D + team * (F::TEAM * F::D_BYTES);
    const uint32_t staging = smem + F::SMEM_D + group * F::D_BYTES;
    const uint32_t scale = smem + F::LISTS + group * F::LIST, list = scale + sizeof(Scales);
    const auto team_sync = [&] { named_barrier_sync<128 * F::TEAM * F::TEAMS>(1 + team / F::TEAMS); };
    float d[PARTS][SUMS];
    const uint32_t stored = scale + STORED;
    if (stores) store_shared(stored, 0);
    PipelineState<2> turn;
    PipelineState<F::NUM_STAGES> stage;
#pragma unroll 1
    while (true) {
        {
            const Tile tile = read_tile<F>(smem, turn);
            if (tile.product != FIRST && stores) finish_store(p, stored);  // this tile may wait for it
            if (tile.product == END) return;
            load_list<F>(p, tile, scale, list);
#pragma unroll
            for (int i = 0; i < PARTS * SUMS; ++i) d[i / SUMS][i % SUMS] = 0;
            mma_tile<F>(d, smem, stage, p.product[tile.product].chunks, weights + 512 * part + 16 * lane,
                        weights + units::SCALES + 4 * lane + 2 * part, unsigned(tile.count - 1) / 8);
        }
        // Again, instead of in registers.
        const Tile tile = read_tile<F>(smem, turn);
        release_tile<F>(smem, turn);
        const Product& product = p.product[tile.product];
        if (stores) finish_store(p, stored);  // long done: staging is free again
        cp_async_wait_all();
        team_sync();
        // In a bf16 team whose chunk does not exist nothing meets before the next tile's scale is asked for, by another
        // warp: a race that racecheck reports, harmless, as that team does not use its factor. To read it where it is
        // used adds up to five instructions.
        float factor = __uint_as_float(load_shared(scale));
        if (F::ACTIVATION == NVFP4) factor *= __uint_as_float(load_shared(scale + IN_SCALES));
        factor *= units::REST;
        const int begin = F::UNITS * tile.block + F::SHARE * group;  // units of rows, this warpgroup's first
        if (tile.product == FIRST) {
            const int chunk = (F::UNITS * tile.block) / TEAM_UNITS + team;  // of the second product's columns
            const bool exists = TEAM_UNITS * chunk < product.rows;
            if (exists || F::ACTIVATION != BF16) {  // with FP8 two teams meet
                const float in_scale =
                    F::ACTIVATION == NVFP4 ? __uint_as_float(load_shared(scale + SECOND_IN_SCALE)) : 0;
                stage_inner<F>(d, tile.count, factor, list, team_staging, unit % TEAM_UNITS, part, in_scale,
                               smem + F::LARGEST, team_sync);
                fence_proxy_async_shared();
                team_sync();
                if (stores && exists) {
                    bf16* const to = p.inner + (int64_t(chunk) * p.slots + tile.first) * 64;
                    tma_store_1d(to, team_staging, tile.count * 128);
                    store_shared(stored, tile.item + 1);
                }
            }
        } else {
            write_parts(p, d, tile.count, factor, begin * units::ROWS, (product.rows - begin) * units::ROWS, list,
                        staging, barrier);
        }
    }
}

// ---- kernels

// Of a block that starts: the barriers of its stages and tiles.
template <class F>
__device__ __forceinline__ void init_barriers(uint32_t smem) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < F::NUM_STAGES; ++i) {
            barrier_init(smem + F::FULL_BARRIERS + 8 * i, 1);
            barrier_init(smem + F::EMPTY_BARRIERS + 8 * i, 4 * F::GROUPS);  // warps that multiply
        }
        for (int i = 0; i < 2; ++i) {
            barrier_init(smem + F::TILE_FULL_BARRIERS + 8 * i, 1);
            barrier_init(smem + F::TILE_EMPTY_BARRIERS + 8 * i, 4 * F::GROUPS);
        }
        barrier_publish();
    }
}

// What a block writes to shared memory at its start besides barriers: nothing here.
template <class F>
__device__ __forceinline__ void init_tables(const Problem&, uint32_t) {}

// init_tables, producer and consumer are those of P's namespace: this one, or mxfp4.
template <class F, class P>
__global__ void __launch_bounds__(F::NUM_THREADS, 1) experts(const __grid_constant__ P p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // only Hopper has wgmma
    extern __shared__ uint8_t raw[];
    // From lane 0, or else it would be computed again for each use.
    const uint32_t smem = __shfl_sync(~0u, (uint32_t(__cvta_generic_to_shared(raw)) + 1023) / 1024 * 1024, 0);
    init_barriers<F>(smem);
    init_tables<F>(p, smem);
    programmatic::trigger();
    __syncthreads();
    programmatic::wait();
    if (threadIdx.x < 128) {
        warpgroup_reg_dealloc<F::PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) producer<F>(p, smem);
    } else {
        warpgroup_reg_alloc<F::CONSUMER_REGISTERS>();
        consumer<F>(p, smem);
    }
#endif
}

}  // namespace prefill
