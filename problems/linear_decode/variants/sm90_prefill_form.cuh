// sm90_prefill's tiles, what lies in shared memory, what there is to do, and in which order.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "ptx.cuh"
#include "tma.cuh"

namespace linear_prefill {

using namespace ptx;
using bf16 = __nv_bfloat16;

enum Values { E4M3, BF16_VALUES };  // of both factors

constexpr int ROW_BYTES = 128;  // of a stage: what a swizzle has, and e4m3 values that share a scale
constexpr int STEP_BYTES = 32;  // of a row, that one wgmma takes
constexpr int GROUPS = 2;       // warpgroups that multiply
constexpr int BLOCK_M = 64 * GROUPS;  // tokens of a tile
constexpr int HALF_N = 128;           // rows of weights that share a scale; columns of a wgmma on bf16
constexpr int PART_N = 64;            // columns of a wgmma on e4m3, whose sums are promoted during the next one
constexpr int CLUSTER = 2;            // blocks with the same weights: each asks for half of them, for both
constexpr int PANEL = 8;           // clusters' tokens whose weights are read from L2 once they are there
constexpr int WEIGHTS_SCALES = BLOCK_M, TILE = BLOCK_M + 4;  // in what comes with a stage
constexpr int SUMS = HALF_N / 2, PART = PART_N / 2;  // of a thread
constexpr int STORE_COLUMNS = 64;  // that a warp stores at once: n is a multiple of it

// A tile has HALF_N HALVES rows of weights. Registers are a thread's: of the warpgroup that loads, of those that
// multiply, and at the launch.
template <Values VALUES_, int HALVES_, int NUM_STAGES_>
struct Form {
    static constexpr Values VALUES = VALUES_;
    static constexpr int HALVES = HALVES_, NUM_STAGES = NUM_STAGES_;
    static constexpr int BLOCK_N = HALF_N * HALVES, BLOCK_K = ROW_BYTES / (VALUES == E4M3 ? 1 : 2);
    static constexpr int NUM_THREADS = 128 * (1 + GROUPS);
    static constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232, LAUNCH_REGISTERS = 168;
    static constexpr int SCALES = VALUES == E4M3 ? BLOCK_M : 0;  // of a stage
    static constexpr uint32_t STAGE_BYTES = (BLOCK_M + BLOCK_N) * ROW_BYTES + 4 * SCALES;
    static constexpr int LEAD = VALUES == E4M3 ? 2 : 1;  // stages that the first warpgroup is ahead of the second one
    static_assert(HALVES == 1 || HALVES == 2, "sums take all registers");
    static_assert(LEAD >= 1 && LEAD < NUM_STAGES, "no lead never gives the turn, one of all stages waits for itself");
    static_assert(BLOCK_N / CLUSTER <= 256, "rows of a box");
    static_assert(PRODUCER_REGISTERS + GROUPS * CONSUMER_REGISTERS <= (1 + GROUPS) * LAUNCH_REGISTERS);
};
// The legal tiles: for many rows, and for few.
template <Values VALUES>
using Large = Form<VALUES, 2, 4>;
template <Values VALUES>
using Small = Form<VALUES, 1, 6>;

template <class F>
struct SharedStorage {
    alignas(1024) uint8_t tokens[F::NUM_STAGES][BLOCK_M * ROW_BYTES];
    uint8_t weights[F::NUM_STAGES][F::BLOCK_N * ROW_BYTES];
    uint8_t staging[4 * GROUPS][16 * STORE_COLUMNS * 2];  // of each warp: 16 tokens, swizzled as the stages are
    float scales[F::NUM_STAGES][F::SCALES + 8];  // of tokens, from WEIGHTS_SCALES on of HALF_N rows; at TILE the Tile
    uint64_t full[F::NUM_STAGES], empty[F::NUM_STAGES];
};

struct Problem {
    CUtensorMap tokens, weights;  // (k, groups, tokens), (k, n, groups) in boxes of BLOCK_N / CLUSTER rows
    const float* token_scales;    // E4M3: [groups][k_blocks][scale_stride]
    const uint8_t* weight_scales;  // E4M3: [groups][n / 128 rounded up][k_blocks], exponents plus 127
    const float *factors, *input_scales;  // [groups], of sums; or null
    bf16* out;                            // (tokens, groups n)
    int num_tokens, groups, n, k_blocks, scale_stride;
    int token_tiles, row_tiles, num_tiles;  // of CLUSTER BLOCK_M tokens; of a group, of BLOCK_N rows; of clusters
};

// token: the first; beyond the last one in the second block of an odd last tile. row: of weights of the group, the first.
struct Tile {
    int token, group, row;
};

// Blocks that run at once have PANEL tiles of tokens, so that both factors are read from memory few times.
template <class F>
__device__ __forceinline__ Tile tile_of(const Problem& p, int index, int rank) {
    const int columns = p.groups * p.row_tiles, panel = index / (PANEL * columns);
    const int tokens = min(PANEL, p.token_tiles - PANEL * panel), within = index - panel * PANEL * columns;
    const int column = within / tokens;
    return {((PANEL * panel + within % tokens) * CLUSTER + rank) * BLOCK_M, column / p.row_tiles,
            column % p.row_tiles * F::BLOCK_N};
}

// Position in the ring of stages.
template <class F>
struct PipelineState {
    uint32_t index = 0, phase = 0;
    __device__ __forceinline__ void advance() {
        if (++index == F::NUM_STAGES) index = 0, phase ^= 1;
    }
};

}  // namespace linear_prefill
