// What the attention kernel's warpgroups share: the problem, tiles, shared memory; and the one that loads entries.
#pragma once

#include <cuda.h>

#include "ptx.cuh"
#include "sm90_stage.cuh"

namespace fmha {

using namespace ptx;

constexpr int TILES = HEAD_DIM / 64;  // sub-tiles of 64 dims: rows of 128 bytes, swizzled as wgmma wants it
constexpr int PARTS = 4;              // of a tile, each with separate barriers
constexpr int Q_PARTS = PARTS;        // of the queries, the same dims, each loaded by one warp
static_assert(PARTS == 4, "two sub-tiles a part; multiply waits for four, o has four, four warps load Q");

// Sub-tiles 0 and 1 of a part: one of each half of the dims, as the two warpgroups of values have them.
__device__ __forceinline__ constexpr int subtile(int part, int i) { return i * PARTS + part; }

// BLOCK_M heads of a token by tiles of BLOCK_N entries, NUM_STAGES of them in shared memory. The code is written for
// <64, 64, 2> and nothing else compiles. Free are the shares of registers, within their asserts; see the README.
template <int BLOCK_M_, int BLOCK_N_, int NUM_STAGES_>
struct Form {
    static constexpr int BLOCK_M = BLOCK_M_, BLOCK_N = BLOCK_N_, NUM_STAGES = NUM_STAGES_;
    static_assert(BLOCK_M == 64, "rows of wgmma; two consumers share the columns of O, which fill their registers");
    static_assert(BLOCK_N == 64, "16 rows for each warp that loads");
    static constexpr int WINDOW_TILES = WINDOW / BLOCK_N;
    static_assert(WINDOW_TILES >= 2, "SharedStorage::top is free again when an item's second tile is scored");
    static_assert(NUM_STAGES == 2, "see Producer::start");

    // Warpgroups: one loads, one scores, two sum values, in this order. Registers of a thread of each.
    static constexpr int NUM_THREADS = 512, PRODUCER_REGISTERS = 56, SCORE_REGISTERS = 104, VALUE_REGISTERS = 176;
    static constexpr int LAUNCH_REGISTERS = 65536 / NUM_THREADS;  // of each thread, until setmaxnreg
    static_assert(PRODUCER_REGISTERS + SCORE_REGISTERS + 2 * VALUE_REGISTERS <= NUM_THREADS / 128 * LAUNCH_REGISTERS,
                  "more than the block has, and values wait for registers without end");
    static_assert(PRODUCER_REGISTERS <= LAUNCH_REGISTERS && SCORE_REGISTERS <= LAUNCH_REGISTERS &&
                      LAUNCH_REGISTERS <= VALUE_REGISTERS, "setmaxnreg.dec only goes down, setmaxnreg.inc only up");
    static_assert((PRODUCER_REGISTERS | SCORE_REGISTERS | VALUE_REGISTERS) % 8 == 0, "setmaxnreg counts in eights");
    static_assert(PRODUCER_REGISTERS >= 24 && SCORE_REGISTERS >= 24 && VALUE_REGISTERS <= 256, "setmaxnreg's limits");

    static constexpr uint32_t Q_TILE = BLOCK_M * 128, TILE = BLOCK_N * 128, STAGE_BYTES = TILES * TILE;
    static constexpr uint32_t OUT_BYTES = 2048;  // of a warp: 16 rows of 64 columns
    static_assert(OUT_BYTES == 16 * 64 * sizeof(__nv_bfloat16), "with less, warps write over each other's");
    static __device__ __forceinline__ int tiles(int length) { return WINDOW_TILES + (length + BLOCK_N - 1) / BLOCK_N; }
};

// Shared memory, from a multiple of 1024 bytes on.
template <class F>
struct alignas(1024) SharedStorage {
    uint8_t q[TILES * F::Q_TILE], k[F::NUM_STAGES][F::STAGE_BYTES];
    uint4 p[4][F::BLOCK_N / 16][32];  // of the warps of rows: fragments of 16 columns, a lane's
    uint8_t out[8][F::OUT_BYTES];     // of warps that sum values
    float alpha[F::BLOCK_M], top[F::BLOCK_M];  // of rows: what O is to be multiplied by; at the end the maximum
    uint32_t masks[F::NUM_STAGES][4];             // bit i: row 16 j + i of the tile counts
    uint64_t full[F::NUM_STAGES][PARTS], empty[F::NUM_STAGES][PARTS], q_full[Q_PARTS], q_empty[Q_PARTS];
    uint64_t p_full, p_empty, scored;
};

struct Problem {
    CUtensorMap q;  // boxes of 64 dims by 64 heads of a token
    const __nv_bfloat16* rows;  // staged: of the window, and from first_compressed on the others
    const Seen* seen;
    Lists lists;
    const float* sink;
    const float *cosine, *sine;  // (T, 32): the last 64 dims of out are turned back, rounded before; or null
    __nv_bfloat16* out;
    float* lse;
    int64_t token_stride, head_stride;  // of out, in elements
    int first_compressed, tokens, heads, head_tiles, run, units;
    bool by_list;      // compressed rows are places of lists
    bool heads_outer;  // q's memory order, and so the order of its map's axes
};

// What a block works on at a time: BLOCK_M heads of a token. A unit is `run` tokens in falling order: their tiles are
// alike. Later tokens see more, so they come first, and blocks take units in turns that alternate: the end is even.
template <class F>
struct Item {
    int round, within, token, head;  // token: -1, it does not exist
    // The first of the block's unit of this round.
    static __device__ __forceinline__ Item first(const Problem& p, int round = 0) {
        const unsigned at = round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
        const unsigned unit = round * gridDim.x + at, group = unit / p.head_tiles;
        const int token = unit < unsigned(p.units) ? p.tokens - 1 - int(group) * p.run : -1;
        return {round, 0, token, int(unit - group * p.head_tiles) * F::BLOCK_M};
    }
    __device__ __forceinline__ Item next(const Problem& p) const {
        if (within + 1 == p.run || token == 0) return first(p, round + 1);
        return {round, within + 1, token - 1, head};
    }
    __device__ __forceinline__ bool exists() const { return token >= 0; }
    // Asks for its list's length, and what that makes tiles. Apart, so that nobody waits in between; and by one lane: a
    // value that all lanes alike load goes into a uniform register as soon as it is asked for, which waits.
    __device__ __forceinline__ int length(const Problem& p) const {
        return exists() && threadIdx.x % 32 == 0 ? __ldg(p.lists.length + token) : 0;
    }
    static __device__ __forceinline__ int count(const Problem& p, int length) {
        return F::tiles(min(__reduce_max_sync(~0u, length), p.lists.nc));
    }
};

// Producer, the first warpgroup. What a stage has: a tile of the window at row `key`, or of list `key` up to `length`.
struct Held { int tile = -1, key, length; };

template <class F>
struct Producer {
    const Problem& p;
    SharedStorage<F>& shared;
    int warp, lane;
    static constexpr int ABSENT = -1, NONE = WINDOW;  // rows to load of a tile: all, none

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

    // What a lane loads of a tile: of four rows that eight lanes share, 16 bytes of each sub-tile.
    struct Pieces {
        const __nv_bfloat16* from[4];
        bool wanted[4], exists[4];  // whether to load, and if so whether not zeros
    };
    // row: staged, of the warp's row lane % 16, -1: zeros. only: as `missing` says.
    __device__ __forceinline__ Pieces pieces(int row, int only) const {
        Pieces pieces;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int of = 4 * i + lane / 8, entry = __shfl_sync(~0u, row, of);
            pieces.from[i] = p.rows + int64_t(max(entry, 0)) * HEAD_DIM + 8 * (lane % 8);
            pieces.wanted[i] = only == ABSENT || only == 16 * warp + of;
            pieces.exists[i] = entry >= 0;
        }
        return pieces;
    }
    __device__ __forceinline__ void gather(const Pieces& pieces, int stage, int part) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = 16 * warp + 4 * i + lane / 8;
            const uint32_t to = smem_address(shared.k[stage]) + row * 128 + (lane % 8 ^ row % 8) * 16;
#pragma unroll
            for (int j = 0; j < TILES / PARTS; ++j) {
                const int t = subtile(part, j);
                if (pieces.wanted[i]) cp_async16(to + t * F::TILE, pieces.from[i] + 64 * t, pieces.exists[i]);
            }
        }
        cp_async_mbarrier_arrive(smem_address(&shared.full[stage][part]));
    }

    // This warp's part of the item's queries into L2, so that they come as soon as there is room. By one lane.
    __device__ __forceinline__ void prefetch_queries(const Item<F>& item) const {
        const int y = p.heads_outer ? item.token : item.head, z = p.heads_outer ? item.head : item.token;
#pragma unroll
        for (int i = 0; i < TILES / Q_PARTS; ++i)
            asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(&p.q),
                         "r"(64 * subtile(warp, i)), "r"(y), "r"(z));
    }
    // And into shared memory, as soon as the scores of the item before are done with these dims. Heads that do not
    // exist come as zeros.
    __device__ __forceinline__ void load_queries(const Item<F>& item, uint32_t item_turn) const {
        const int y = p.heads_outer ? item.token : item.head, z = p.heads_outer ? item.head : item.token;
        const uint32_t full = smem_address(&shared.q_full[warp]);
        const uint64_t policy = l2_evict_first();
        wait(smem_address(&shared.q_empty[warp]), item_turn & 1 ^ 1);
        arrive_and_expect_tx(full, TILES / Q_PARTS * F::Q_TILE);
#pragma unroll
        for (int i = 0; i < TILES / Q_PARTS; ++i) {
            const int t = subtile(warp, i);
            tma_load_3d(smem_address(shared.q) + t * F::Q_TILE, &p.q, 64 * t, y, z, full, policy);
        }
    }

    // Which row of a tile has to be loaded, where the stage holds the others.
    __device__ __forceinline__ int missing(Held& held, const Seen& seen, int tile) const {
        const bool window = tile < F::WINDOW_TILES;
        const int key = window ? seen.window : seen.list, row = (key & (WINDOW - 1)) - tile * F::BLOCK_N;
        // Tokens come in falling order.
        const bool same = window ? held.key == key + 1 : held.key == key && seen.length <= held.length;
        const bool holds = held.tile == tile && same;
        held = {tile, key, holds ? held.length : seen.length};
        return !holds ? ABSENT : window && row >= 0 ? row : NONE;
    }

    // The order of an item's tiles goes round from one on. Stages take turns, so an item begins with the two tiles that
    // the one before ended with; where tokens choose, that is the window for every other item.
    __device__ __forceinline__ int start(const Item<F>& item, int before, int count_before, int count) const {
        int tile = before + count_before - 2;
        if (tile >= count_before) tile -= count_before;
        if (p.lists.each && p.lists.nc > 0) tile = item.within % 2 ? 0 : 2;
        return tile < count ? tile : 0;
    }

    // What the item's token sees: asked for, a value by each of four lanes, and told. No value is negative.
    __device__ __forceinline__ int ask(const Item<F>& item) const {
        static_assert(sizeof(Seen) == 16);
        return item.exists() && lane < 4 ? reinterpret_cast<const int*>(p.seen + item.token)[lane] : 0;
    }
    __device__ __forceinline__ Seen told(int asked) const {
        const auto of = [&](int i) { return __reduce_max_sync(~0u, lane == i ? asked : 0); };
        return {of(0), of(1), of(2), of(3)};
    }

    __device__ __forceinline__ void run() const {
        Held held[F::NUM_STAGES];
        Item<F> item = Item<F>::first(p);
        Seen seen = p.seen[item.token];
        uint32_t turn = 0, item_turn = 0;  // tiles and items so far
        int count = F::tiles(seen.length), tile = start(item, 0, count, count);
        int next = index(seen, tile);  // asked for a tile ahead
#pragma unroll 1
        for (; item.exists(); ++item_turn) {
            const Item<F> following = item.next(p);
            int asked = ask(following), next_count = 0;
            const int begin = tile;
            Seen after = seen;
#pragma unroll 1
            for (int i = 0; i < count; ++i, ++turn) {
                const int stage = turn % F::NUM_STAGES, phase = turn / F::NUM_STAGES % 2, mine = next;
                const int only = stage ? missing(held[1], seen, tile) : missing(held[0], seen, tile);
                const Pieces loads = pieces(mine >= 0 ? row(seen, tile, mine) : -1, only);
                if (++tile == count) tile = 0;
                if (i + 1 == count) {
                    keep_in_register(asked);
                    if (following.exists()) after = told(asked);
                    next_count = F::tiles(after.length), tile = start(following, begin, count, next_count);
                }
                next = i + 1 < count ? index(seen, tile) : index(after, tile);
                if (i == 0 && lane == 0) load_queries(item, item_turn);
                __syncwarp();
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                    wait(smem_address(&shared.empty[stage][part]), phase ^ 1);
                    gather(loads, stage, part);
                }
                const uint32_t counts = __ballot_sync(~0u, mine >= 0) & 0xFFFF;
                if (lane == 0) {
                    store_shared(smem_address(&shared.masks[stage][warp]), counts);
                    arrive(smem_address(&shared.full[stage][PARTS - 1]));
                }
                if (i == 0 && lane == 0 && following.exists()) prefetch_queries(following);
            }
            item = following, seen = after, count = next_count;
        }
        cp_async_wait_all();  // none may land after the block has ended
    }
};

}  // namespace fmha
