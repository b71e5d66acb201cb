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

// BLOCK_M heads of a token by tiles of BLOCK_N entries, NUM_STAGES of them in shared memory.
template <int BLOCK_M_, int BLOCK_N_, int NUM_STAGES_>
struct Form {
    static constexpr int BLOCK_M = BLOCK_M_, BLOCK_N = BLOCK_N_, NUM_STAGES = NUM_STAGES_;
    static_assert(BLOCK_M == 64, "rows of wgmma; two consumers share the columns of O, which fill their registers");
    static_assert(BLOCK_N == 64, "16 rows for each warp that loads");
    static constexpr int WINDOW_TILES = WINDOW / BLOCK_N;
    static_assert(WINDOW_TILES >= 2, "SharedStorage::factor is free again when an item's second tile is scored");
    static_assert(NUM_STAGES == 2, "neighbours in an item's order of tiles lie in separate stages");

    // Warpgroups: one loads, one scores, two sum values, in this order. Registers of a thread of each.
    static constexpr int NUM_THREADS = 512, PRODUCER_REGISTERS = 48, SCORE_REGISTERS = 112, VALUE_REGISTERS = 176;
    static constexpr int LAUNCH_REGISTERS = 65536 / NUM_THREADS;
    static_assert(PRODUCER_REGISTERS + SCORE_REGISTERS + 2 * VALUE_REGISTERS <= 4 * LAUNCH_REGISTERS);

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
    uint64_t full[F::NUM_STAGES][PARTS], empty[F::NUM_STAGES][PARTS], q_full[PARTS];
    uint64_t p_full, p_empty, scored;
};

struct Problem {
    CUtensorMap q;  // boxes of 64 dims by 64 heads of a token
    const __nv_bfloat16* rows;  // staged: of the window, and from first_compressed on the others
    const Seen* seen;
    Lists lists;
    const float* sink;
    __nv_bfloat16* out;
    float* lse;
    int64_t token_stride, head_stride;  // of out, in elements
    int first_compressed, tokens, heads, head_tiles, run, units;
    bool by_list;      // compressed rows are places of lists
    bool heads_outer;  // q's memory order, and so the order of its map's axes
};

// What a block works on at a time: BLOCK_M heads of a token. A unit is `run` tokens in a row, whose tiles are much the
// same. Later tokens see more, so they come first, and blocks take units in turns that alternate: the end is even.
//
// Every other item has its tiles from the last on, so that it begins with those that the one before ended with. Tile i
// is always in stage i % NUM_STAGES, and need not be loaded where it is there already.
template <class F>
struct Item {
    int round = 0, within = 0;
    bool reverse = true;  // the first: the window is what two tokens with chosen entries share
    __device__ __forceinline__ int unit() const {
        return round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    }
    __device__ __forceinline__ bool exists(const Problem& p) const { return unit() < p.units; }
    __device__ __forceinline__ int token(const Problem& p) const {
        return p.tokens - 1 - unit() / p.head_tiles * p.run - within;
    }
    __device__ __forceinline__ int head(const Problem& p) const { return unit() % p.head_tiles * F::BLOCK_M; }
    __device__ __forceinline__ Item next(const Problem& p) const {
        Item item{round, within + 1, !reverse};
        if (item.within == p.run || item.token(p) < 0) ++item.round, item.within = 0;
        return item;
    }
    // Tiles, 0 if it does not exist; the one at a place of the order.
    __device__ __forceinline__ int count(const Problem& p) const {
        return exists(p) ? F::tiles(min(max(__ldg(p.lists.length + token(p)), 0), p.lists.nc)) : 0;
    }
    __device__ __forceinline__ int tile(int place, int count) const { return reverse ? count - 1 - place : place; }
};

// The parities of barriers of stages, each of which turns whenever its stage is used.
struct Phases {
    uint32_t bits = 0;
    __device__ __forceinline__ uint32_t take(uint32_t stage) {
        const uint32_t phase = bits >> stage & 1;
        bits ^= 1u << stage;
        return phase;
    }
};

// ---- producer: the first warpgroup

// What a stage holds: a tile, of the window at row `key` or of list `key` up to `length`.
struct Held {
    int tile = -1, key, length;
};

template <class F>
struct Producer {
    const Problem& p;
    SharedStorage<F>& shared;
    int warp, lane;

    // This lane's row of a tile, by its place in a token's window or list. Position modulo WINDOW decides where in the
    // window's tiles a row lies, so that a neighbour's window differs in a single row.
    __device__ __forceinline__ int place(const Seen& seen, int tile) const {
        const int slot = tile * F::BLOCK_N + 16 * warp + lane % 16;
        return tile < F::WINDOW_TILES ? (slot - seen.window) & (WINDOW - 1) : slot - WINDOW;
    }
    // The index there, -1: no entry.
    __device__ __forceinline__ int index(const Seen& seen, int tile) const {
        const int at = place(seen, tile);
        if (tile < F::WINDOW_TILES) return __ldg(p.lists.window + seen.index + at);
        return at < seen.length ? __ldg(p.lists.compressed + int64_t(seen.list) * p.lists.nc + at) : -1;
    }
    // The staged row of it.
    __device__ __forceinline__ int row(const Seen& seen, int tile, int index) const {
        const int at = place(seen, tile);
        if (tile < F::WINDOW_TILES) return seen.window + at;
        return p.first_compressed + (p.by_list ? seen.list * p.lists.nc + at : index);
    }

    // A part of a tile, or row `only` of it, if that is not -1: eight lanes a row, of each sub-tile 16 bytes. row: of
    // the warp's row lane % 16, -1: zeros.
    __device__ __forceinline__ void gather(int row, int only, int stage, int part) const {
        const int chunk = lane % 8;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int of = 4 * i + lane / 8, at = 16 * warp + of, entry = __shfl_sync(~0u, row, of);
            if (only >= 0 && only != at) continue;
            const __nv_bfloat16* const from = p.rows + int64_t(max(entry, 0)) * HEAD_DIM + 8 * chunk;
            const uint32_t to = smem_address(shared.k[stage]) + at * 128 + (chunk ^ at % 8) * 16;
#pragma unroll
            for (int j = 0; j < TILES / PARTS; ++j) {
                const int t = subtile(part, j);
                cp_async16(to + t * F::TILE, from + 64 * t, entry >= 0);
            }
        }
        cp_async_mbarrier_arrive(smem_address(&shared.full[stage][part]));
    }

    // Which row of a tile has to be loaded, if the stage holds the others: ABSENT: the whole tile; NONE: no row is it.
    static constexpr int ABSENT = -1, NONE = WINDOW;
    __device__ __forceinline__ int missing(Held& held, const Seen& seen, int tile) const {
        const bool window = tile < F::WINDOW_TILES;
        const int key = window ? seen.window : seen.list;
        // Tokens come in falling order.
        const bool same = window ? held.key == key + 1 : held.key == key && seen.length <= held.length;
        if (held.tile != tile || !same) {
            held = {tile, key, seen.length};
            return ABSENT;
        }
        held.key = key;
        const int row = (key & (WINDOW - 1)) - tile * F::BLOCK_N;
        return window && row >= 0 ? row : NONE;
    }

    __device__ __forceinline__ void run() const {
        Phases phases;
        Held held[F::NUM_STAGES];
        Item<F> item;
        Seen seen = p.seen[item.token(p)];
        int next = index(seen, item.tile(0, F::tiles(seen.length)));  // asked for a tile ahead
#pragma unroll 1
        while (item.exists(p)) {
            const Item<F> following = item.next(p);
            const Seen after = following.exists(p) ? p.seen[following.token(p)] : seen;
            const int count = F::tiles(seen.length);
#pragma unroll 1
            for (int i = 0; i < count; ++i) {
                const int tile = item.tile(i, count), stage = tile % F::NUM_STAGES, mine = next;
                next = i + 1 < count ? index(seen, item.tile(i + 1, count))
                                     : index(after, following.tile(0, F::tiles(after.length)));
                const int only = stage ? missing(held[1], seen, tile) : missing(held[0], seen, tile);
                const uint32_t phase = phases.take(stage);
                const int from = mine >= 0 ? row(seen, tile, mine) : -1;
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                    wait(smem_address(&shared.empty[stage][part]), phase ^ 1);
                    gather(from, only, stage, part);
                }
                const uint32_t counts = __ballot_sync(~0u, mine >= 0) & 0xFFFF;
                if (lane == 0) {
                    store_shared(smem_address(&shared.masks[stage][warp]), counts);
                    arrive(smem_address(&shared.full[stage][PARTS - 1]));
                }
            }
            item = following, seen = after;
        }
        cp_async_wait_all();  // none may land after the block has ended
    }
};

}  // namespace fmha
