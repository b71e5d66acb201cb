// Many tokens: blocks own columns up to the sums, and whole tokens behind them.
//
// A block multiplies its columns of a tile by its columns of fn, and writes x' and its sums to memory; a flag of the tile
// and the block follows both. Another warp of each block waits for the flags of all blocks of a tile, some tiles behind,
// adds up the sums of the tokens that are the block's, reads their x' again, which L2 still holds, and makes out. So sums
// cross once, nothing comes back, and up to DISTANCE tiles lie between the two.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "ptx.cuh"
#include "sm90_columns_exchange.cuh"
#include "sm90_columns_mix.cuh"
#include "sm90_columns_tile.cuh"

namespace columns {

constexpr int DISTANCE = 4;  // tiles from the sums of a block to the mixing of its tokens, at most
// Tiles in memory. Who writes the sums of tile t has mixed tile t - DISTANCE, so it has seen the flags of all blocks of
// that tile, and these had mixed tile t - 2 DISTANCE.
constexpr int SUM_RING = 2 * DISTANCE;
constexpr int SUM_ROW = 40;  // floats from one block's sums of a token to the next one's: whole sectors of memory
constexpr int FINISHERS = 4, OUT_WARPS = 2;  // warps behind the sums: out; weights of u; post and comb
constexpr int OUT_THREADS = 32 * OUT_WARPS;
constexpr int MANY_THREADS = NUM_THREADS + 32 * FINISHERS;
// Columns of the four copies that are read again at once, and places for them.
constexpr int CHUNK = 1024, NUM_CHUNKS = 6;
// Numbered barriers: x' of a tile is made; multipliers are through with it. Each by turns.
constexpr int MADE_BARRIER = 4, FREE_BARRIER = 6;

template <class S>
struct ManyShared {
    typename S::Shared tile;
    alignas(128) __nv_bfloat16 chunk[NUM_CHUNKS][COPIES * CHUNK];
    float weights[NUM_CHUNKS][COPIES];  // of u, of the token whose first chunk lies there
    uint64_t full[NUM_CHUNKS], empty[NUM_CHUNKS], mixed[DISTANCE];
};

// The tokens of this block's group, and where its sums and flags lie.
struct Stretch {
    int first, count, tiles, slices;
    float* sums;      // (SUM_RING, TILE, slices, SUM_ROW)
    uint32_t* flags;  // (SUM_RING, slices)
    uint32_t first_tag;

    __device__ uint32_t tag(int tile) const { return first_tag + 1 + tile; }
};

template <class S>
__device__ __forceinline__ Stretch stretch_of(const Problem& p, uint32_t first_tag) {
    const int each = (p.tokens + gridDim.y - 1) / gridDim.y;
    Stretch g;
    g.first = min(p.tokens, each * static_cast<int>(blockIdx.y));
    g.count = min(each, p.tokens - g.first);
    g.tiles = (g.count + S::TILE - 1) / S::TILE;
    g.slices = gridDim.x;
    g.sums = p.sums + int64_t(blockIdx.y) * SUM_RING * S::TILE * g.slices * SUM_ROW;
    g.flags = p.flags + blockIdx.y * SUM_RING * g.slices;
    g.first_tag = first_tag;
    return g;
}

__device__ __forceinline__ void store_release(uint32_t* to, uint32_t value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* from) {
    uint32_t v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}

// ---------------------------------------------------------------- up to the sums

// The block's sums of a tile. Four rows of a token, or a product, a thread.
template <class S>
__device__ __forceinline__ void write_sums(const Stretch& g, const typename S::Shared& shared, int tile, int thread) {
    const int count = min(S::TILE, g.count - tile * S::TILE);
    const int apart = g.slices * SUM_ROW;
    float* const to = g.sums + (int64_t(tile % SUM_RING * S::TILE) * g.slices + blockIdx.x) * SUM_ROW;
    for (int i = thread; i < count * (ROWS / 4); i += ROLE_THREADS) {
        const int token = i / (ROWS / 4), quad = i % (ROWS / 4);
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int warp = 0; warp < ROLE_WARPS; ++warp) {
            const float4 part = shared.dots[warp][token][quad];
            sum = make_float4(sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w);
        }
        __stcg(reinterpret_cast<float4*>(to + token * apart + slot_of_row(4 * quad)), sum);
    }
    for (int i = thread; i < count * PRODUCTS; i += ROLE_THREADS) {
        const int token = i / PRODUCTS, product = i % PRODUCTS;
        float sum = 0.0f;
#pragma unroll
        for (int part = 0; part < S::PARTS; ++part) sum += shared.products[part][token][product];
        __stcg(to + token * apart + COPIES + product, sum);
    }
}

template <class S>
__device__ __forceinline__ void multiply_tiles(const Stretch& g, const Weights<S>& fn, ManyShared<S>& shared,
                                               int thread) {
    for (int tile = 0; tile < g.tiles; ++tile) {
        asm volatile("" : "+r"(thread));  // addresses are made anew for each tile: kept in registers they spill
        const int warp = thread / 32, lane = thread % 32;
        ptx::named_barrier_sync<NUM_THREADS>(MADE_BARRIER + tile % 2);  // and the sums ahead are written
        multiply_copies<S>(tile, shared.tile, warp, lane);
        multiply<S>(fn, min(S::TILE, g.count - tile * S::TILE), tile, shared.tile, warp, lane);
        ptx::named_barrier_arrive<NUM_THREADS>(FREE_BARRIER + tile % 2);
        ptx::named_barrier_sync<ROLE_THREADS>(MULTIPLY_BARRIER);
        if (tile >= DISTANCE)
            ptx::wait(ptx::smem_address(&shared.mixed[tile % DISTANCE]), (tile / DISTANCE - 1) % 2);
        write_sums<S>(g, shared.tile, tile, thread);
        // The flag is behind the sums of all multipliers, and behind x', of which the first barrier told them.
        if (warp) {
            ptx::named_barrier_arrive<ROLE_THREADS>(MULTIPLY_BARRIER);
        } else {
            ptx::named_barrier_sync<ROLE_THREADS>(MULTIPLY_BARRIER);
            if (lane == 0) store_release(g.flags + tile % SUM_RING * g.slices + blockIdx.x, g.tag(tile));
        }
    }
}

template <class S>
__device__ __forceinline__ void spread_tiles(const Problem& p, const Stretch& g, ManyShared<S>& shared, int column,
                                             int thread) {
    for (int tile = 0; tile < g.tiles; ++tile) {
        cp_async_wait<1>();  // all but the next tile's
        ptx::named_barrier_sync<ROLE_THREADS>(SPREAD_BARRIER);
        spread<S>(p, g.first, min(S::TILE, g.count - tile * S::TILE), tile, column, shared.tile, thread);
        ptx::named_barrier_arrive<NUM_THREADS>(MADE_BARRIER + tile % 2);
        if (tile)  // its place is that of the tile asked for next
            ptx::named_barrier_sync<NUM_THREADS>(FREE_BARRIER + (tile - 1) % 2);
        else
            ptx::named_barrier_sync<ROLE_THREADS>(SPREAD_BARRIER);
        load_tile<S>(p, g.first, g.count, tile + 2, column, shared.tile, thread);
    }
    if (g.tiles) ptx::named_barrier_sync<NUM_THREADS>(FREE_BARRIER + (g.tiles - 1) % 2);
}

// ---------------------------------------------------------------- behind the sums

// Until all blocks of the group have written their sums and x' of a tile.
__device__ __forceinline__ void wait_for_tile(const Stretch& g, int tile, int lane) {
    const uint32_t* const flags = g.flags + tile % SUM_RING * g.slices;
    for (int slice = lane; slice < g.slices; slice += 32) {
        int tries = 0;
        while (load_acquire(flags + slice) != g.tag(tile)) count_try(tries);
    }
    __syncwarp();
}

// Calls f(token of the group, its sums) for each token of a tile that is this block's.
template <class S, class F>
__device__ __forceinline__ void for_own_tokens(const Stretch& g, int tile, F&& f) {
    const int begin = tile * S::TILE, end = min(begin + S::TILE, g.count);
    const int place = blockIdx.x, ahead = begin % g.slices;
    for (int t = begin + (place < ahead ? place + g.slices - ahead : place - ahead); t < end; t += g.slices)
        f(t, g.sums + int64_t(tile % SUM_RING * S::TILE + t - begin) * g.slices * SUM_ROW);
}

// The sum of a slot over the slices part, part + parts, ..., in that order.
template <int BATCH>
__device__ __forceinline__ float add_slices(const float* from, int slot, int part, int parts, int slices) {
    float sum = 0.0f;
    for (int s = part; s < slices; s += BATCH * parts) {
        float value[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int slice = s + i * parts;
            value[i] = slice < slices ? __ldcg(from + slice * SUM_ROW + slot) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) sum += value[i];
    }
    return sum;
}
template <int FROM>
__device__ __forceinline__ float add_lanes(float sum) {
#pragma unroll
    for (int apart = FROM; apart < 32; apart *= 2) sum += __shfl_xor_sync(ALL, sum, apart);
    return sum;
}

// One warp: asks for x' of the block's tokens, and makes their weights of u.
template <class S>
__device__ __forceinline__ void weigh_tokens(const Problem& p, const Stretch& g, ManyShared<S>& shared, int lane) {
    const int chunks = (p.hidden + CHUNK - 1) / CHUNK;
    int next = 0;  // chunk of all
    auto ask = [&](int token, int from, int to) {
        if (lane) return;
        for (int c = from; c < to; ++c) {
            const int stage = (next + c) % NUM_CHUNKS, width = min(CHUNK, p.hidden - c * CHUNK);
            const uint32_t full = ptx::smem_address(&shared.full[stage]);
            ptx::wait(ptx::smem_address(&shared.empty[stage]), (next + c) / NUM_CHUNKS % 2 ^ 1);
            ptx::arrive_and_expect_tx(full, COPIES * width * 2);
            const __nv_bfloat16* const x = p.new_copies + int64_t(token) * COPIES * p.hidden + c * CHUNK;
            for (int j = 0; j < COPIES; ++j)
                ptx::tma_load_1d(ptx::smem_address(shared.chunk[stage] + j * width), x + j * p.hidden, width * 2, full,
                                 ptx::l2_evict_first());
            if (c) ptx::arrive(full);  // of the first one, when the weights are there
        }
    };
    for (int tile = 0; tile < g.tiles; ++tile) {
        wait_for_tile(g, tile, lane);
        ptx::fence_proxy_async_global();  // x' is read by bulk copies
        for_own_tokens<S>(g, tile, [&](int t, const float* sums_of_token) {
            const int ahead = min(chunks, NUM_CHUNKS);  // more would wait for who waits for the weights
            ask(g.first + t, 0, ahead);
            __syncwarp();
            const int slot = lane % 16;
            const float sum = add_slices<16>(sums_of_token, slot, lane / 16, 2, slot < FOR_U ? g.slices : 0);
            const Sums sums = {add_lanes<16>(sum), 0.0f};
            const float inverse = inverse_of_copies(sums, p.hidden);
            const float weight = weights_of_u(sums, inverse, p.base, p.scale, p.hidden, lane);
            const int stage = next % NUM_CHUNKS;
            if (lane < COPIES) shared.weights[stage][lane] = weight;
            __syncwarp();
            if (lane == 0) ptx::arrive(ptx::smem_address(&shared.full[stage]));
            ask(g.first + t, ahead, chunks);
            next += chunks;
        });
        ptx::warp_arrive(ptx::smem_address(&shared.mixed[tile % DISTANCE]));
    }
}

// One warp: post and comb of the block's tokens.
template <class S>
__device__ __forceinline__ void combine_tokens(const Problem& p, const Stretch& g, ManyShared<S>& shared, int lane) {
    constexpr int HIGH = SLOTS - 32, SQUARES = 0xDB84;  // slots of x'_j x'_j, four bits each
    for (int tile = 0; tile < g.tiles; ++tile) {
        wait_for_tile(g, tile, lane);
        for_own_tokens<S>(g, tile, [&](int t, const float* from) {
            const int square = SQUARES >> lane % COPIES * 4 & 15;
            float low = add_slices<16>(from, POST + lane % 16, lane / 16, 2, g.slices);
            float high = add_slices<4>(from, 32 + lane % HIGH, lane / HIGH, 32 / HIGH, g.slices);
            float squares = add_slices<4>(from, square, lane / COPIES, 32 / COPIES, g.slices);
            low = add_lanes<16>(low), high = add_lanes<HIGH>(high), squares = add_lanes<1>(squares);
            const float inverse = inverse_of_square(squares, p.hidden);
            const int64_t token = g.first + t;
            // Lanes 16 to 31 have slots 16 to 31, as write_mixing takes them.
            write_mixing({low, high}, inverse, p.base, p.scale, p.new_post + token * COPIES,
                         p.new_comb + token * COPIES * COPIES, lane);
        });
        ptx::warp_arrive(ptx::smem_address(&shared.mixed[tile % DISTANCE]));
    }
}

// The other warps: out of the block's tokens, chunk by chunk.
template <class S>
__device__ __forceinline__ void finish_tokens(const Problem& p, const Stretch& g, ManyShared<S>& shared, int thread) {
    const int chunks = (p.hidden + CHUNK - 1) / CHUNK;
    int next = 0;
    for (int t = blockIdx.x; t < g.count; t += g.slices) {
        float by[COPIES];
        __nv_bfloat16* const out = p.out + int64_t(g.first + t) * p.hidden;
        for (int c = 0; c < chunks; ++c, ++next) {
            const int stage = next % NUM_CHUNKS, units = min(CHUNK, p.hidden - c * CHUNK) / EIGHT;
            constexpr int EACH = CHUNK / EIGHT / OUT_THREADS;
            const uint4* const all_norm = reinterpret_cast<const uint4*>(p.norm + c * CHUNK);
            uint4 norm[EACH];
#pragma unroll
            for (int i = 0; i < EACH; ++i) norm[i] = __ldg(all_norm + min(thread + i * OUT_THREADS, units - 1));
            ptx::wait(ptx::smem_address(&shared.full[stage]), next / NUM_CHUNKS % 2);
            if (c == 0) {
#pragma unroll
                for (int j = 0; j < COPIES; ++j) by[j] = shared.weights[stage][j];
            }
            const uint4* const x = reinterpret_cast<const uint4*>(shared.chunk[stage]);
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const int unit = thread + i * OUT_THREADS;
                if (unit >= units) break;
                float u[EIGHT] = {};
#pragma unroll
                for (int j = 0; j < COPIES; ++j) {
                    const uint4 v = x[j * units + unit];
                    const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        u[2 * k] = fmaf(by[j], low_bf16(pairs[k]), u[2 * k]);
                        u[2 * k + 1] = fmaf(by[j], high_bf16(pairs[k]), u[2 * k + 1]);
                    }
                }
                const uint32_t n[4] = {norm[i].x, norm[i].y, norm[i].z, norm[i].w};
                uint32_t made[4];
#pragma unroll
                for (int k = 0; k < 4; ++k)
                    made[k] = ptx::pack_bf16x2(u[2 * k] * low_bf16(n[k]), u[2 * k + 1] * high_bf16(n[k]));
                __stcs(reinterpret_cast<uint4*>(out + c * CHUNK) + unit, make_uint4(made[0], made[1], made[2], made[3]));
            }
            ptx::warp_arrive(ptx::smem_address(&shared.empty[stage]));
        }
    }
}

// ---------------------------------------------------------------- kernel

template <int COLUMNS, int TILE, int UNITS>
__global__ void __launch_bounds__(MANY_THREADS, 1) many_kernel(const __grid_constant__ Problem p) {
    using S = Shape<COLUMNS, TILE, UNITS>;
    extern __shared__ __align__(128) uint8_t memory[];
    ManyShared<S>& shared = *reinterpret_cast<ManyShared<S>*>(memory);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int column = blockIdx.x * COLUMNS;
    if (warp < ROLE_WARPS) {
        const Stretch early = stretch_of<S>(p, 0);
        begin(p, shared.tile.first_tag, thread);
        load_tile<S>(p, early.first, early.count, 0, column, shared.tile, thread);
        load_tile<S>(p, early.first, early.count, 1, column, shared.tile, thread);
        ptx::named_barrier_sync<MANY_THREADS>(BLOCK_BARRIER);
        ptx::warpgroup_reg_alloc<COLUMN_REGISTERS>();
        spread_tiles<S>(p, early, shared, column, thread);
        if (thread == 0) end_turns(p.state, shared.tile.first_tag, p.turns);
    } else if (warp < WARPS) {
        Weights<S> fn;
        fn.load(p.fn, p.hidden, column, warp - ROLE_WARPS, lane);
        begin(p, shared.tile.first_tag, thread);
        ptx::named_barrier_sync<MANY_THREADS>(BLOCK_BARRIER);
        ptx::warpgroup_reg_alloc<COLUMN_REGISTERS>();
        multiply_tiles<S>(stretch_of<S>(p, shared.tile.first_tag), fn, shared, thread - ROLE_THREADS);
    } else {
        const int finisher = warp - WARPS;
        if (finisher == 0 && lane == 0) {
            for (int i = 0; i < NUM_CHUNKS; ++i) {
                ptx::barrier_init(ptx::smem_address(&shared.full[i]), 2);
                ptx::barrier_init(ptx::smem_address(&shared.empty[i]), OUT_WARPS);
            }
            for (int i = 0; i < DISTANCE; ++i) ptx::barrier_init(ptx::smem_address(&shared.mixed[i]), 2);
            ptx::barrier_publish();
        }
        begin(p, shared.tile.first_tag, thread);
        ptx::named_barrier_sync<MANY_THREADS>(BLOCK_BARRIER);
        ptx::warpgroup_reg_dealloc<MIXER_REGISTERS>();
        const Stretch g = stretch_of<S>(p, shared.tile.first_tag);
        if (finisher < OUT_WARPS)
            finish_tokens<S>(p, g, shared, thread - NUM_THREADS);
        else if (finisher == OUT_WARPS)
            weigh_tokens<S>(p, g, shared, lane);
        else
            combine_tokens<S>(p, g, shared, lane);
    }
}

}  // namespace columns
