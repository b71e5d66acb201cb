// What the attention kernel's warpgroups share: the problem, tiles, shared memory; and the one that loads entries.
#pragma once

#include <cuda.h>

#include "ptx.cuh"
#include "sm90_stage.cuh"

namespace fmha {

using namespace ptx;

constexpr int TILES = HEAD_DIM / 64;  // sub-tiles of 64 dims: rows of 128 bytes, swizzled as wgmma wants it
constexpr int PARTS = 2;              // of a tile, each with separate barriers: sub-tiles 0 1 4 5, and 2 3 6 7
constexpr int SHARED_LIMIT = 227 * 1024;

// Sub-tile i of a part. The first part has the first half of both halves of the dims, which are what the two warpgroups
// of values have.
__device__ __forceinline__ constexpr int subtile(int part, int i) { return i / 2 * 4 + part * 2 + i % 2; }

// BLOCK_M heads of a query by tiles of BLOCK_N entries, NUM_STAGES of them in shared memory. CHOSEN: compressed entries
// are gathered by index, else they are contiguous rows.
template <int BLOCK_M_, int BLOCK_N_, int NUM_STAGES_, bool CHOSEN_>
struct Form {
    static constexpr int BLOCK_M = BLOCK_M_, BLOCK_N = BLOCK_N_, NUM_STAGES = NUM_STAGES_;
    static constexpr bool CHOSEN = CHOSEN_;
    static_assert(BLOCK_M == 64, "rows of wgmma; two consumers share the columns of O, which fill their registers");
    static_assert(BLOCK_N == 64, "16 rows for each warp that loads, and two tiles of window");
    static constexpr int WINDOW_TILES = WINDOW / BLOCK_N;
    static_assert(WINDOW_TILES >= 2, "FACTOR is free again when the second tile of an item is scored");

    // Warpgroups: one loads, one scores, two sum values, in this order. Registers of a thread of each.
    static constexpr int NUM_THREADS = 512, PRODUCER_REGISTERS = 40, SCORE_REGISTERS = 112, VALUE_REGISTERS = 176;
    static constexpr int LAUNCH_REGISTERS = 65536 / NUM_THREADS;
    static_assert(PRODUCER_REGISTERS + SCORE_REGISTERS + 2 * VALUE_REGISTERS <= 4 * LAUNCH_REGISTERS);

    // Arrivals at the barrier of a part: of threads that load, and at the second part's of warps that say which rows
    // count.
    static constexpr int LOADERS = CHOSEN ? 128 : 1, MASKERS = 4;
    static constexpr uint32_t Q_TILE = BLOCK_M * 128, TILE = BLOCK_N * 128, STAGE_BYTES = TILES * TILE;
    static constexpr uint32_t OUT_BYTES = 2048;  // of a warp: 16 rows of 64 columns
    static __device__ __forceinline__ int tiles(int length) { return WINDOW_TILES + (length + BLOCK_N - 1) / BLOCK_N; }
};

// Shared memory, from a multiple of 1024 bytes on.
template <class F>
struct alignas(1024) SharedStorage {
    uint8_t q[TILES * F::Q_TILE], k[F::NUM_STAGES][F::STAGE_BYTES];
    uint4 p[4][F::BLOCK_N / 16][32];  // of the warps of rows: fragments of 16 columns, a lane's
    uint8_t out[8][F::OUT_BYTES];     // of warps that sum values
    float alpha[F::BLOCK_M], factor[F::BLOCK_M];  // of rows of O: at this tile, and at the end
    uint32_t masks[F::NUM_STAGES][4];             // bit i: row 16 j + i of the tile counts
    uint64_t full[F::NUM_STAGES][PARTS], empty[F::NUM_STAGES][PARTS];
    uint64_t q_full, p_full, p_empty, scored;
};

struct Problem {
    CUtensorMap q, window, compressed;  // boxes of 64 dims by 64 rows
    const __nv_bfloat16* compressed_rows;
    const Seen* seen;
    Lists lists;
    const float* sink;
    __nv_bfloat16* out;
    float* lse;
    int64_t token_stride, head_stride;  // of out, in elements
    int tokens, heads, head_tiles, items;
    bool heads_outer;  // q's memory order, and so the order of its map's axes
};

// What a block works on at a time. Later tokens see more, so they come first: the end is even.
template <class F>
struct Item {
    int token, head, heads;  // heads: of the block that exist, from `head` on
    __device__ __forceinline__ Item(const Problem& p, int number)
        : token(p.tokens - 1 - number / p.head_tiles), head(number % p.head_tiles * F::BLOCK_M),
          heads(min(F::BLOCK_M, p.heads - head)) {}
};
template <class F>
__device__ __forceinline__ int tiles_of(const Problem& p, int number) {
    if (number >= p.items) return 0;
    const int length = __ldg(p.lists.length + Item<F>(p, number).token);
    return F::tiles(min(max(length, 0), p.lists.nc));
}

// Position in a ring of stages.
template <int NUM_STAGES>
struct PipelineState {
    uint32_t index = 0, phase = 0;
    __device__ __forceinline__ void advance() {
        if (++index == NUM_STAGES) index = 0, phase ^= 1;
    }
};

// ---- producer: the first warpgroup

template <class F>
struct Producer {
    const Problem& p;
    SharedStorage<F>& shared;
    int thread, warp, lane;

    // The index of the entry at this lane's row of a tile, -1: none. A warp has 16 rows.
    __device__ __forceinline__ int index(const Seen& seen, int tile) const {
        const int place = tile * F::BLOCK_N + 16 * warp + lane % 16, behind = place - WINDOW;
        if (behind < 0) return __ldg(p.lists.window + seen.index + place);
        return behind < seen.length ? __ldg(p.lists.compressed + int64_t(seen.list) * p.lists.nc + behind) : -1;
    }

    // A part of a tile of contiguous rows, by one thread.
    __device__ __forceinline__ void load_rows(const CUtensorMap& map, int row, int stage, int part) const {
        const uint32_t full = smem_address(&shared.full[stage][part]);
        if (thread != 0) {
            if (F::LOADERS > 1) arrive(full);
            return;
        }
        arrive_and_expect_tx(full, TILES / PARTS * F::TILE);
        const uint64_t policy = l2_evict_normal();
#pragma unroll
        for (int i = 0; i < TILES / PARTS; ++i) {
            const int t = subtile(part, i);
            tma_load_3d(smem_address(shared.k[stage]) + t * F::TILE, &map, 64 * t, row, 0, full, policy);
        }
    }
    // A part of a tile of rows by index: eight lanes a row, of each sub-tile 16 bytes.
    __device__ __forceinline__ void gather(int index, int stage, int part) const {
        const int chunk = lane % 8;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int of = 4 * i + lane / 8, row = 16 * warp + of, entry = __shfl_sync(~0u, index, of);
            const __nv_bfloat16* const from = p.compressed_rows + int64_t(max(entry, 0)) * HEAD_DIM + 8 * chunk;
            const uint32_t to = smem_address(shared.k[stage]) + row * 128 + (chunk ^ row % 8) * 16;
#pragma unroll
            for (int j = 0; j < TILES / PARTS; ++j) {
                const int t = subtile(part, j);
                cp_async16(to + t * F::TILE, from + 64 * t, entry >= 0);
            }
        }
        cp_async_mbarrier_arrive(smem_address(&shared.full[stage][part]));
    }

    __device__ __forceinline__ void run() const {
        PipelineState<F::NUM_STAGES> pipe;
        Seen seen = p.seen[Item<F>(p, blockIdx.x).token];
        int next = index(seen, 0);  // asked for a tile ahead
#pragma unroll 1
        for (int number = blockIdx.x; number < p.items; number += gridDim.x) {
            const int following = number + gridDim.x < p.items ? number + gridDim.x : number;
            const Seen after = p.seen[Item<F>(p, following).token];
            const int count = F::tiles(seen.length);
#pragma unroll 1
            for (int tile = 0; tile < count; ++tile, pipe.advance()) {
                const int mine = next;
                next = tile + 1 < count ? index(seen, tile + 1) : index(after, 0);
                const bool in_window = tile < F::WINDOW_TILES;
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                    wait(smem_address(&shared.empty[pipe.index][part]), pipe.phase ^ 1);
                    if (in_window)
                        load_rows(p.window, seen.window + tile * F::BLOCK_N, pipe.index, part);
                    else if (F::CHOSEN)
                        gather(mine, pipe.index, part);
                    else
                        load_rows(p.compressed, seen.list * p.lists.nc + (tile - F::WINDOW_TILES) * F::BLOCK_N,
                                  pipe.index, part);
                }
                const uint32_t counts = __ballot_sync(~0u, mine >= 0) & 0xFFFF;
                if (lane == 0) {
                    store_shared(smem_address(&shared.masks[pipe.index][warp]), counts);
                    arrive(smem_address(&shared.full[pipe.index][PARTS - 1]));
                }
            }
            seen = after;
        }
        if (F::CHOSEN) cp_async_wait_all();  // none may land after the block has ended
    }
};

}  // namespace fmha
