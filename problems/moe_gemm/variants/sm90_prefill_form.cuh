// sm90_prefill's forms: their tiles, what lies in shared memory, what there is to do.
#pragma once

#include <cstddef>

#include "nvfp4_units.cuh"
#include "ptx.cuh"
#include "sm90_routing.cuh"
#include "tma.cuh"

namespace prefill {

using namespace ptx;
using bf16 = __nv_bfloat16;

constexpr float LIMIT = 10.f, LOG2E = 1.4426950408889634f;
constexpr int BOX = 8;                   // unit rows that one copy brings
constexpr int WORDS = units::BYTES / 8;  // elements of a unit in the tensor map
constexpr int TEAM_UNITS = 4;    // of a team's share of a tile: 64 channels of the first product
constexpr int CLAIM_BEFORE = 3;  // chunks before its last a block claims its next tile: the answer takes 1 or 2

// What a warpgroup needs of a tile besides its units: the scales of the weights, and of the activations of this product
// and of the second. stored, of who stores: an item whose bulk copy may still be on its way, plus one; or 0.
struct Scales {
    float scale;
    int stored;
    float in_scale, second_in_scale;
};
constexpr uint32_t STORED = offsetof(Scales, stored), IN_SCALES = offsetof(Scales, in_scale);
constexpr uint32_t SECOND_IN_SCALE = offsetof(Scales, second_in_scale), TILE_BYTES = 32;  // a Tile, and nothing

// Whether GROUPS warpgroups that multiply and one that loads get their registers, of a thread: a text says why not.
template <int GROUPS, int PRODUCER, int CONSUMER, int LAUNCH>
constexpr bool registers_fit() {
    static_assert(PRODUCER % 8 == 0 && CONSUMER % 8 == 0 && PRODUCER >= 24 && CONSUMER <= 256,
                  "setmaxnreg takes multiples of 8 from 24 to 256");
    static_assert(LAUNCH == 512 / (1 + GROUPS) / 8 * 8, "launch bounds give 168 with two groups, 96 with four");
    static_assert(PRODUCER <= LAUNCH && LAUNCH <= CONSUMER, "those that load give registers, who multiply get them");
    static_assert(PRODUCER + GROUPS * CONSUMER <= (1 + GROUPS) * LAUNCH,
                  "more than the launch has, and setmaxnreg would wait forever: fewer for those that multiply");
    return true;
}

// GROUPS warpgroups multiply, a warp 16 PARTS rows, for items of at most BLOCK_N slots. Registers are a thread's, of
// those that load, of those that multiply, and at the launch. v leaves as ACTIVATION has it: WARPS warps have a block,
// or group of FP8, of its channels; with FP8 two teams meet where else each meets by itself.
template <int ACTIVATION_, int PARTS_, int BLOCK_N_, int NUM_STAGES_>
struct Form {
    static constexpr int GROUPS = 4, PARTS = PARTS_, BLOCK_N = BLOCK_N_, NUM_STAGES = NUM_STAGES_;
    static constexpr int ACTIVATION = ACTIVATION_, WARPS = (ACTIVATION == FP8 ? 16 : 2) / PARTS,
                         TEAMS = ACTIVATION == FP8 ? 2 : 1;
    static constexpr int PRODUCER_REGISTERS = 32, CONSUMER_REGISTERS = 112, LAUNCH_REGISTERS = 96;
    static constexpr int NUM_THREADS = 128 * (1 + GROUPS);
    static constexpr int SHARE = 2 * PARTS, UNITS = SHARE * GROUPS;  // of a warpgroup, of a tile
    static_assert(UNITS % BOX == 0, "a tile's units come in whole boxes");
    static_assert(NUM_STAGES >= 2, "a stage is freed when the next unit has come");
    static constexpr int TEAM = TEAM_UNITS / SHARE;                                                // warpgroups
    static constexpr int EIGHTS = BLOCK_N / 8, SUMS = BLOCK_N / 2;  // sums of a thread, for each 16 of its warp's rows
    static_assert(registers_fit<GROUPS, PRODUCER_REGISTERS, CONSUMER_REGISTERS, LAUNCH_REGISTERS>());
    static_assert(PARTS * (SUMS + 16) <= CONSUMER_REGISTERS - 32, "sums and fragments leave less than 32: it spills");
    static_assert(PARTS == 1 || PARTS == 2, "a unit has two");
    static_assert(BLOCK_N % 32 == 0 || PARTS == 2 && BLOCK_N % 16 == 0, "results leave in two halves");

    // Shared memory in bytes from a multiple of 1024.
    // In a stage: B, rows of activations; A, units of weights. D: results of each warpgroup. List: Scales, and the
    // item's slots or their weights.
    static constexpr uint32_t SMEM_B = 0, SMEM_A = BLOCK_N * 128, STAGE_BYTES = SMEM_A + UNITS * units::BYTES;
    static constexpr uint32_t SMEM_D = NUM_STAGES * STAGE_BYTES, D_BYTES = BLOCK_N * 64 * PARTS;
    static constexpr uint32_t LISTS = SMEM_D + GROUPS * D_BYTES, LIST = sizeof(Scales) + BLOCK_N * 4;
    // Largest magnitudes of v, of each warp, where several have a block: a word a pair of slots.
    static constexpr uint32_t LARGEST = LISTS + GROUPS * LIST, LARGEST_WORDS = (EIGHTS + 7) / 8,
                              LARGEST_BYTES = ACTIVATION != BF16 && WARPS > 1 ? LARGEST_WORDS * 128 : 0;
    static constexpr uint32_t TILES = LARGEST + GROUPS * 4 * LARGEST_BYTES;  // Tile [2]
    static constexpr uint32_t FULL_BARRIERS = TILES + 2 * TILE_BYTES, EMPTY_BARRIERS = FULL_BARRIERS + 8 * NUM_STAGES,
                              TILE_FULL_BARRIERS = EMPTY_BARRIERS + 8 * NUM_STAGES;
    static constexpr uint32_t TILE_EMPTY_BARRIERS = TILE_FULL_BARRIERS + 8 * 2, BYTES = TILE_EMPTY_BARRIERS + 8 * 2;
    static_assert(STAGE_BYTES % 1024 == 0 && SMEM_D % 1024 == 0 && D_BYTES % 1024 == 0,
                  "a swizzle repeats every 1024 bytes");
    static_assert(BYTES + 1024 <= 227 * 1024, "over 227 KB of shared memory, 1 KB of it to align the start");
};
// The tiles in use: warps of 32 rows by few slots, and of 16 by many.
template <int ACTIVATION = BF16>
using Few = Form<ACTIVATION, 2, 48, 8>;
template <int ACTIVATION = BF16>
using Many = Form<ACTIVATION, 1, 128, 7>;
static_assert(Few<>::BLOCK_N <= Many<>::BLOCK_N, "Few has the experts with few slots");

enum { FIRST, SECOND, END };  // which product

struct Product {
    CUtensorMap units;   // [experts][rows][chunks units], in boxes of BOX rows by one unit
    const float *scale, *in_scale;  // [experts]; in_scale: of NVFP4, of the activations
    int rows, chunks;    // of an expert, in units
    int blocks;          // of Form::UNITS rows
};

struct Problem {
    Product product[2];
    const bf16* x;  // gathered, [H / 64] and then like `inner`
    bf16* inner;    // [I / 64][slots in their order][64], permuted, and swizzled from each item's first slot on
    bf16* parts;    // [slots][H]
    Tables tables;
    List list;      // whose items this launch has
    int slots, hidden;
};

struct Tile {
    int product, expert, first, count, block, item, alone;  // first: position in the order; alone: item of its expert
};

// Position in a ring of COUNT stages. With a power of two one number tells all.
template <int COUNT>
struct PipelineState {
    static constexpr bool POWER = (COUNT & (COUNT - 1)) == 0;
    uint32_t turns = 0, rounds = 0;
    __device__ __forceinline__ uint32_t index() const { return POWER ? turns % COUNT : turns; }
    __device__ __forceinline__ uint32_t phase() const { return POWER ? turns / COUNT % 2 : rounds; }
    __device__ __forceinline__ void advance() {
        ++turns;
        if (!POWER && turns == COUNT) turns = 0, rounds ^= 1;
    }
};

}  // namespace prefill
