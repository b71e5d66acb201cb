// sm90_few_heads' block: the problem, its tile, what lies in its shared memory, and what it works on.
#pragma once

#include <cuda_bf16.h>

#include <cstddef>

#include "combine.cuh"
#include "ptx.cuh"
#include "sm90_gather.cuh"

namespace fmha::few {

// The only legal tile: BLOCK_M heads, since mma.sync has 16 rows, by BLOCK_N entries, ENTRIES of each warp.
constexpr int BLOCK_M = 16;               // heads of a block
constexpr int WARPS = 4;                  // 8 would have all of a multiprocessor's registers; of 4, two blocks fit
constexpr int NUM_THREADS = 32 * WARPS;
constexpr int BLOCKS_PER_MULTIPROCESSOR = 8 / WARPS;
constexpr int ENTRIES = 8;                // of a tile, a warp's: columns of mma.sync
constexpr int BLOCK_N = ENTRIES * WARPS;  // entries of a tile
constexpr int DIMS = HEAD_DIM / WARPS;    // of values, a warp's
constexpr int NUM_STAGES = 2;             // tiles asked for ahead
constexpr int MOST_BLOCKS = 16;           // of a cluster; more than 8 are not portable
constexpr int ROW_UNITS = HEAD_DIM / 8, UNITS = BLOCK_M * ROW_UNITS;  // of 8 dims, 16 bytes of fp16: a block's sums
static_assert(BLOCK_M == 16 && ENTRIES == 8 && BLOCK_N % 16 == 0 && DIMS % 64 == 0, "of mma.sync and of sub-tiles");
static_assert(UNITS % NUM_THREADS == 0 && NUM_THREADS % BLOCK_M == 0, "threads share these evenly");

struct Problem {
    const __nv_bfloat16* q;
    Cache window, compressed;
    const int *window_index, *window_length, *compressed_index, *compressed_length;
    const float* sink;
    Turn turn;
    __nv_bfloat16* out;
    float* lse;
    int heads, nw, nc;
    Divisor queries, tiles, blocks;  // S; tiles of BLOCK_M heads; blocks of a cluster
};

// What a warp has asked for of a tile.
struct alignas(16) StagedGroup {
    uint8_t payload[ENTRIES][PAYLOAD];
    uint2 scales[32];  // of each lane's entry
};
// What the blocks of a cluster send to the one that joins a part of the outputs; and what it makes of their stats.
struct Received {
    uint4 sums[UNITS + MOST_BLOCKS];     // see Pieces
    float4 stats[MOST_BLOCKS][BLOCK_M];  // running maximum, sum of p, sum of p in bf16, nothing
    float scales[MOST_BLOCKS][WARPS][BLOCK_M];
    float weights[BLOCK_M][MOST_BLOCKS];
};
// A tile's values, in sub-tiles of 64 dims; in the end what they make room for. The last tile has the second place, so
// other blocks may send to the first while it is added.
union Values {
    uint8_t tile[TILES][BLOCK_N][128];
    Received received;                     // the first place
    uint16_t sums[BLOCK_M][HEAD_DIM + 8];  // the second: fp16; 8 more, so that 8 rows take 32 banks
};
struct SharedMemory {  // from a multiple of 128 bytes
    Values values[2];
    float scores[2][BLOCK_M][BLOCK_N + 8];  // 8 more, so that 4 rows take 32 banks
    StagedGroup staging[NUM_STAGES][WARPS];
    uint4 queries[4][32];  // see Queries
    uint64_t received_barrier, free_barrier;
};
static_assert(sizeof(Values) == TILES * BLOCK_N * 128, "the end has room in the place of values");

// Its parts in bytes: sizes, and offsets.
constexpr uint32_t TILE = BLOCK_N * 128, VALUES = sizeof(Values);
constexpr uint32_t SCORE_ROW = (BLOCK_N + 8) * 4, SCORES = BLOCK_M * SCORE_ROW;
constexpr uint32_t SUM_ROW = (HEAD_DIM + 8) * 2, STATS = sizeof(float4), SCALE_ROW = BLOCK_M * 4;
constexpr uint32_t STAGED_SCALES = offsetof(StagedGroup, scales), STAGED_GROUP = sizeof(StagedGroup);
constexpr uint32_t SMEM_VALUES = offsetof(SharedMemory, values), SMEM_SCORES = offsetof(SharedMemory, scores);
constexpr uint32_t SMEM_STAGING = offsetof(SharedMemory, staging), SMEM_QUERIES = offsetof(SharedMemory, queries);
constexpr uint32_t SMEM_RECEIVED = SMEM_VALUES, SMEM_SUMS = SMEM_VALUES + VALUES;
constexpr uint32_t SMEM_STATS = SMEM_RECEIVED + offsetof(Received, stats);
constexpr uint32_t SMEM_SCALES = SMEM_RECEIVED + offsetof(Received, scales);
constexpr uint32_t SMEM_WEIGHTS = SMEM_RECEIVED + offsetof(Received, weights);
constexpr uint32_t RECEIVED_BARRIER = offsetof(SharedMemory, received_barrier);
constexpr uint32_t FREE_BARRIER = offsetof(SharedMemory, free_barrier);
constexpr int SHARED = sizeof(SharedMemory) + 128;  // with room to align the start
static_assert(BLOCKS_PER_MULTIPROCESSOR * (SHARED + 1024) <= 228 * 1024, "of a multiprocessor; 1024 of each are taken");

// What a block works on.
struct Item {
    int query, head, heads, batch, rank;  // query: of B S; heads: of the block that exist, from `head` on
    __device__ __forceinline__ explicit Item(const Problem& p) : rank(cluster_rank()) {
        int const cluster = p.blocks(blockIdx.x);
        query = p.tiles(cluster), head = (cluster - query * p.tiles.by) * BLOCK_M;
        heads = min(BLOCK_M, p.heads - head), batch = p.queries(query);
    }
};

// The list positions that a block walks: from `first` to `last`, of which those below `window` are the window's.
struct Share {
    int window, first, last, count;  // count: tiles
    __device__ __forceinline__ Share(int window, int compressed, int rank, Divisor blocks) : window(window) {
        int const total = window + compressed, groups = (total + ENTRIES - 1) / ENTRIES;
        first = blocks(groups * rank) * ENTRIES, last = min(int(blocks(groups * (rank + 1))) * ENTRIES, total);
        count = (max(last - first, 0) + BLOCK_N - 1) / BLOCK_N;
    }
};

}  // namespace fmha::few
