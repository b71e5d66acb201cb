// A block of sm90_dense: what lies in its shared memory, its part of a tile, how blocks wait for each other, and what
// comes from global memory.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "ptx.cuh"
#include "nvfp4_units.cuh"

namespace dense {

using namespace ptx;
using bf16 = __nv_bfloat16;

constexpr float LIMIT = 10.f;
constexpr int ROWS = 10, SPLITS = 8;  // a tile's unit rows; blocks of a cluster, which split the columns
constexpr int NUM_THREADS = 64 * ROWS, WARPS = 2 * ROWS;  // a warp has 16 rows
constexpr int CHUNKS = 8, SECOND_CHUNKS = 4;  // of 64 columns, that a block has at a time, of either product
constexpr int PAIRS = CHUNKS / 2;             // a copy has two
constexpr int MOST_TOKENS = 64;               // of a tile
static_assert(ROWS % 2 == 0 && MOST_TOKENS <= NUM_THREADS);  // two are a warpgroup's

// Shared memory in bytes from a multiple of 1024, with 8 EIGHTS tokens. Sums come to where the first product's x and
// weights were. The second's x, which is v, begins behind them: it may come while they are read.
template <int EIGHTS_>
struct Form {
    static constexpr int EIGHTS = EIGHTS_, TOKENS = 8 * EIGHTS;
    static constexpr uint32_t IMAGE = TOKENS * 128;  // a chunk of x
    static constexpr uint32_t WEIGHTS = CHUNKS * IMAGE, SECOND_WEIGHTS = WEIGHTS + ROWS * CHUNKS * units::BYTES;
    static constexpr uint32_t FULL_BARRIERS = SECOND_WEIGHTS + ROWS * SECOND_CHUNKS * units::BYTES;
    static constexpr uint32_t SECOND_FULL_BARRIERS = FULL_BARRIERS + 8 * PAIRS,
                              V_FULL_BARRIERS = SECOND_FULL_BARRIERS + 4 * SECOND_CHUNKS;
    static constexpr uint32_t SENT_BARRIER = V_FULL_BARRIERS + 8 * SECOND_CHUNKS, SCALES = SENT_BARRIER + 8,
                              BEFORE = SCALES + 8;
    static constexpr uint32_t LIST = BEFORE + 8, BYTES = LIST + TOKENS * 8;  // of tokens: routing weight, if it is one

    // Sums, four of a thread: those of a warp for an eighth of the tokens go to one block, which gets every SPLITSth.
    static constexpr int SHARE = EIGHTS * WARPS / SPLITS * 32;
    static constexpr uint32_t V = SPLITS * SHARE * 16;
    static_assert(EIGHTS * WARPS % SPLITS == 0 && SHARE <= NUM_THREADS);
    static_assert(V % 1024 == 0 && V + SECOND_CHUNKS * IMAGE <= SECOND_WEIGHTS);
    static_assert(BYTES + 1024 <= 227 * 1024);
};

struct Product {
    const uint8_t* units;  // [rows][columns]
    const float* scale;
    const bf16* x;         // of the first product (tokens, 64 columns); of the second v, as the first leaves it
    bf16* out;             // (tokens, 32 rows); of the first product v, [16 rows / 64][padded][64]
    int rows, columns;     // in units
    int row_tiles, tiles;  // tiles: times those of tokens
};
struct Problem {
    Product product[2];
    const int* ids;
    const float* routing;
    int* met;            // any content that launches have left; see grid_arrive
    int tokens, padded;  // padded: to whole tiles
};

// All threads of the cluster meet. What they wrote before need not be known after.
__device__ __forceinline__ void cluster_sync_relaxed() { cluster_arrive_relaxed(), cluster_wait(); }

// All blocks of the launch meet. The counter's top bit turns over once a launch: block 0 adds what the others leave.
__device__ __forceinline__ void grid_arrive(int* met) {
    const uint32_t more = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1;
    red_add_release(reinterpret_cast<uint32_t*>(met), more);
}
__device__ __forceinline__ void grid_wait(const int* met, int before) {
    while ((ld_acquire(met) ^ before) >= 0) continue;
}

// What a block has to do of a tile of one of the products, and where.
template <class F>
struct Part {
    bool second;
    int row, rows;      // in units
    int chunk, chunks;  // all of its columns
    int token;          // its first
    int at_once;        // chunks
    uint32_t weights, full, x;
    __device__ __forceinline__ Part(const Product& p, bool second_, uint32_t rank, int tile) {
        second = second_;
        row = tile % p.row_tiles * ROWS, rows = min(p.rows - row, ROWS);
        chunk = p.columns * rank / SPLITS, chunks = p.columns * (rank + 1) / SPLITS - chunk;
        token = tile / p.row_tiles * F::TOKENS;
        at_once = second ? SECOND_CHUNKS : CHUNKS;
        weights = second ? F::SECOND_WEIGHTS : F::WEIGHTS, full = second ? F::SECOND_FULL_BARRIERS : F::FULL_BARRIERS;
        x = second ? F::V : 0;
    }
};

// ---- what comes

// Weights of the next up to at_once chunks from number `done` of the block's on. Each warp asks for a row's.
template <class F>
__device__ __forceinline__ void load_weights(const Problem& problem, const Part<F>& part, uint32_t smem, int done) {
    const Product& p = problem.product[part.second];
    const int count = part.chunks - done, row = threadIdx.x / 32 % ROWS;
    if (threadIdx.x % 32 != 0) return;
    // Nobody but this block wants them, unless there are more tokens.
    const uint64_t policy = problem.tokens > F::TOKENS ? l2_evict_normal() : l2_evict_first();
    const uint8_t* from = p.units + (int64_t(part.row + row) * p.columns + part.chunk + done) * units::BYTES;
    const uint32_t to = smem + part.weights + row * part.at_once * units::BYTES;
#pragma unroll 1
    for (int pair = threadIdx.x / 32 / ROWS; 2 * pair < part.at_once; pair += 2) {
        const uint32_t bytes = max(min(count - 2 * pair, 2), 0) * units::BYTES, full = smem + part.full + 8 * pair;
        if (row == 0) arrive_and_expect_tx(full, part.rows * bytes);  // if only 0: all barriers have the same phases
        if (row < part.rows && bytes)
            tma_load_1d(to + 2 * pair * units::BYTES, from + 2 * pair * units::BYTES, bytes, full, policy);
    }
}

// x of up to CHUNKS chunks, into wgmma's order: 16 c + 2 p and one on of a chunk's columns go to 8 p + 2 c. A thread
// has 16 bytes of a row and chunk, four p. The threads of a warp have four rows, which the swizzle keeps on other
// banks.
template <int AT_ONCE, class F>
__device__ __forceinline__ void load_x(const Problem& problem, const Part<F>& part, uint32_t smem, int done) {
    const Product& p = problem.product[0];
    const int count = min(part.chunks - done, CHUNKS), row = thread_index() / 8, piece = thread_index() % 8;
    const int c = piece / 2, first = piece % 2 * 4;
    if (row < F::TOKENS) {
        const bool real = part.token + row < problem.tokens;
        const uint4* from = reinterpret_cast<const uint4*>(p.x + int64_t(part.token + row) * p.columns * 64) +
                            (part.chunk + done) * 8 + piece;
        const uint32_t to = smem + row * 128 + 4 * c;
#pragma unroll 1
        for (int chunk = 0; chunk < count; chunk += AT_ONCE) {
            uint4 v[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                v[i] = make_uint4(0, 0, 0, 0);
                if (real && chunk + i < count) v[i] = __ldg(from + 8 * (chunk + i));
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                if (chunk + i >= count) break;
                const uint32_t image = to + (chunk + i) * F::IMAGE;
                store_shared(image + ((first + 0) ^ row % 8) * 16, v[i].x);
                store_shared(image + ((first + 1) ^ row % 8) * 16, v[i].y);
                store_shared(image + ((first + 2) ^ row % 8) * 16, v[i].z);
                store_shared(image + ((first + 3) ^ row % 8) * 16, v[i].w);
            }
        }
    }
    fence_proxy_async_shared();
}

// What a tile's end needs, by threads that have no x to load.
template <class F>
__device__ __forceinline__ void load_rest(const Problem& problem, int first_token, uint32_t smem) {
    constexpr int FROM = MOST_TOKENS * 8, THEN = FROM + MOST_TOKENS;
    static_assert(THEN < NUM_THREADS && THEN % 32 == 0);
    const int i = threadIdx.x - FROM, token = first_token + i;
    if (i >= 0 && i < F::TOKENS) {
        const bool real = token < problem.tokens;
        const int id = real ? __ldg(problem.ids + token) : -1;
        const float routing = real ? __ldg(problem.routing + token) : 0.f;
        store_shared(smem + F::LIST + 8 * i, __float_as_uint(routing));
        store_shared(smem + F::LIST + 8 * i + 4, id == 0);
    } else if (threadIdx.x == THEN) {
        const float first = __ldg(problem.product[0].scale), second = __ldg(problem.product[1].scale);
        const int before = load_relaxed(problem.met);
        store_shared(smem + F::SCALES, __float_as_uint(first * units::REST));
        store_shared(smem + F::SCALES + 4, __float_as_uint(second * units::REST));
        store_shared(smem + F::BEFORE, before);
    }
}

// The second product's x: v of up to SECOND_CHUNKS chunks. One thread, which knows that it is written.
template <class F>
__device__ __forceinline__ void load_v(const Problem& problem, const Part<F>& part, uint32_t smem, int done) {
    fence_proxy_async_global();
    const bf16* from = problem.product[1].x + (int64_t(part.chunk + done) * problem.padded + part.token) * 64;
#pragma unroll 1
    for (int i = 0; i < SECOND_CHUNKS; ++i) {
        const bool some = i < part.chunks - done;
        const uint32_t full = smem + F::V_FULL_BARRIERS + 8 * i;
        arrive_and_expect_tx(full, some ? F::IMAGE : 0);
        if (some)
            tma_load_1d(smem + F::V + i * F::IMAGE, from + int64_t(i) * problem.padded * 64, F::IMAGE, full,
                        l2_evict_normal());
    }
}

}  // namespace dense
