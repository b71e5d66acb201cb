// sm90_mxfp4's forms: their tiles, what lies in shared memory, what there is to do.
#pragma once

#include "ptx.cuh"
#include "sm90_mxfp4_units.cuh"
#include "sm90_prefill_form.cuh"
#include "sm90_routing.cuh"

namespace mxfp4 {

using namespace ptx;
using prefill::bf16, prefill::END, prefill::FIRST, prefill::PipelineState, prefill::SECOND, prefill::Tile;

// GROUPS warpgroups multiply, a warp 16 PARTS rows of the tile's 256, for items of at most BLOCK_N slots. All of them have
// a group of 128 channels of v. Registers are a thread's, of those that load, of those that multiply, and at the launch.
template <int GROUPS_, int BLOCK_N_, int NUM_STAGES_, int CONSUMER_REGISTERS_, int LAUNCH_REGISTERS_>
struct Form {
    static constexpr int GROUPS = GROUPS_, PARTS = 4 / GROUPS, BLOCK_N = BLOCK_N_, NUM_STAGES = NUM_STAGES_;
    static constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = CONSUMER_REGISTERS_,
                         LAUNCH_REGISTERS = LAUNCH_REGISTERS_;
    static constexpr int CONSUMERS = 128 * GROUPS, NUM_THREADS = 128 + CONSUMERS;
    static constexpr int UNITS = BLOCK_UNITS;  // of a tile
    static constexpr int EIGHTS = BLOCK_N / 8, SUMS = BLOCK_N / 2;  // sums of a thread, for each 16 of its warp's rows
    // Fewest eights of an item: Many cuts what is more than Few's 64 into items of up to BLOCK_N, as even as eights allow.
    static constexpr int LEAST_EIGHTS = PARTS == 1 ? 1 : (EIGHTS + 1) / 2;
    static constexpr int ACTIVATION = prefill::FP8, WARPS = 4 * GROUPS;  // for prefill::share_blocks
    static_assert(GROUPS * PARTS == 4 && (PARTS == 1 || PARTS == 2), "a block of units has 16 times 16 rows");
    static_assert(NUM_STAGES >= 2, "a stage is freed when the next chunk has come: one would be waited for forever");
    static_assert(BLOCK_N % 16 == 0, "scales of slots lie in sixteens");
    static_assert(BLOCK_N % 32 == 0 || PARTS == 2, "four groups write results in two halves of sixteens");
    static_assert((PARTS + 1) * SUMS + 24 * PARTS + 16 <= CONSUMER_REGISTERS,
                  "sums, a part's products and weights: it spills with more slots than 112 of two groups, 64 of four");
    static_assert(prefill::registers_fit<GROUPS, PRODUCER_REGISTERS, CONSUMER_REGISTERS, LAUNCH_REGISTERS>());

    // Shared memory in bytes from a multiple of 1024.
    // In a stage: B, rows of activations; A, units of weights; S, the rows' scales. D: results of each warpgroup, or v of
    // all. V: its scales. List: Scales, and the item's slots or their weights.
    static constexpr uint32_t SMEM_B = 0, SMEM_A = BLOCK_N * 128, SMEM_S = SMEM_A + BLOCK_BYTES,
                              STAGE_BYTES = (SMEM_S + BLOCK_N * 4 + 1023) / 1024 * 1024;
    static constexpr uint32_t SMEM_D = NUM_STAGES * STAGE_BYTES, D_BYTES = BLOCK_N * 64 * PARTS;
    static constexpr uint32_t SMEM_V = SMEM_D + GROUPS * D_BYTES, LISTS = SMEM_V + (BLOCK_N + 63) / 64 * 256,
                              LIST = sizeof(prefill::Scales) + BLOCK_N * 4;
    // Largest magnitudes of v, of each warp: a word a pair of slots.
    static constexpr uint32_t LARGEST = LISTS + GROUPS * LIST, LARGEST_WORDS = (EIGHTS + 7) / 8,
                              LARGEST_BYTES = LARGEST_WORDS * 128;
    static constexpr uint32_t TABLE = LARGEST + WARPS * LARGEST_BYTES;
    static constexpr uint32_t TILES = TABLE + (TABLES + 15) / 16 * 16;  // Tile [2]
    static constexpr uint32_t FULL_BARRIERS = TILES + 2 * prefill::TILE_BYTES,
                              EMPTY_BARRIERS = FULL_BARRIERS + 8 * NUM_STAGES,
                              TILE_FULL_BARRIERS = EMPTY_BARRIERS + 8 * NUM_STAGES;
    static constexpr uint32_t TILE_EMPTY_BARRIERS = TILE_FULL_BARRIERS + 8 * 2, BYTES = TILE_EMPTY_BARRIERS + 8 * 2;
    static_assert(GROUPS * D_BYTES >= BLOCK_N * 128, "v of all fits");
    static_assert(SMEM_A % 1024 == 0 && D_BYTES % 1024 == 0, "a swizzle repeats every 1024 bytes");
    static_assert(BYTES + 1024 <= 227 * 1024,
                  "over 227 KB of shared memory, 1 KB of it to align the start: take fewer stages or slots");
};
// The tiles in use. Few: 16 warps of 16 rows by up to 64 slots; Many: 8 of 32 by up to 112. Slots, stages and registers
// may be changed as far as the assertions let; these registers are the most that fit.
using Few = Form<4, 64, 7, 104, 96>;
using Many = Form<2, 112, 6, 232, 168>;
static_assert(Few::EIGHTS + 1 >= Many::LEAST_EIGHTS,
              "Many multiplies items of one slot more than Few's by more eights than they have: more slots for Few");

struct Product {
    const uint8_t* units;  // [experts][blocks][chunks] blocks of units
    const float* scale;    // [experts]
    int rows, chunks;      // of an expert, in units
    int blocks;            // of 256 rows
    const uint8_t* codes;  // [chunks][slots in their order][128], permuted, and swizzled from each item's first slot on
    const float* scales;   // [chunks][scale_slots], of item i from scale_slot(i) on
};

struct Problem {
    Product product[2];
    bf16* parts;  // [slots][H]
    prefill::Tables tables;
    prefill::List list;  // whose items this launch has
    int slots, scale_slots, hidden;
};

// Where scales of the slots of an item begin, with room for twice as many: a multiple of 16, since bulk copies want 16
// bytes. Items of an expert begin eights of slots apart, and those of the next one behind all of its. An item has whole
// sixteens, each in the order of their readers: slot 8 b + 2 c + d of one is at 4 c + 2 b + d.
__device__ __forceinline__ int scale_slot(int expert, int first) { return 2 * ((first + 8 * expert) & ~7); }
__device__ __forceinline__ int scales_of(int count) { return (count + 15) / 16 * 16; }
__device__ __forceinline__ int scale_at(int slot) { return slot & ~15 | slot % 8 / 2 * 4 | slot / 8 % 2 * 2 | slot % 2; }
__host__ __device__ inline int scale_slots(int slots, int experts) { return 2 * ((slots + 8 * experts + 15) / 8 * 8); }

// From what decode::least_normal gives of a group, in the high half of a word: its scale 2^s, and 2^-s.
__device__ __forceinline__ float scale_of(uint32_t least) { return __uint_as_float((least & 0x7F800000u) + (6u << 23)); }
__device__ __forceinline__ float inverse_of(uint32_t least) {
    return __uint_as_float((248u << 23) - (least & 0x7F800000u));
}

}  // namespace mxfp4
