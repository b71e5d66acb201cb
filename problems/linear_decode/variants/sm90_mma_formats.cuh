// sm90_mma's tile sizes and the table of legal ones, the structs that the host fills in (sm90_mma.py), and how k, tiles
// and shared memory are divided among blocks and warps.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "nvfp4_units.cuh"

namespace linear_mma {

enum Format { FP8, NVFP4, BF16 };  // in the order of task.FORMATS

constexpr int WARPS = 16, MATH_THREADS = 32 * WARPS;  // that multiply
constexpr int BLOCK_N = 32, BLOCK_K = 64;  // rows and columns of a unit of weights: a warp's tile, a step along k
constexpr int MMA_M = 8;                   // tokens of an instruction, so BLOCK_M is a multiple
constexpr int SCALE_K = 128;               // values that share a scale in fp8
constexpr int MAX_OUTPUTS = 4;             // matrices of a link
constexpr int MAX_LINKS = 4;               // of a chain in one launch
constexpr int MAX_CLUSTER = 2;             // blocks; more that share a tile exchange sums through global memory
constexpr int MAX_SECTIONS = 8;            // of k, a block each
constexpr int MAX_SECTION_CHUNKS = 8;      // whose sums a block adds up before it publishes them
constexpr int SECTIONS_AT_ONCE = 4;        // whose sums a thread loads at once
constexpr int MAX_SMEM = 227 << 10;        // bytes of shared memory that a block can have
constexpr int SUM_STRIDE = 36;             // floats from a token to the next in a warp's sums: no conflicts of banks
constexpr int WARP_SUMS = MMA_M * SUM_STRIDE;  // floats of a warp: BLOCK_N rows of MMA_M tokens
constexpr int INPUT_PAD = 16;              // bytes between rows of the input: eight lanes then read all banks
constexpr int PIECE = 8;                   // values of the input that a lane converts: 16 bytes
constexpr int MAX_DIRECT = 2;              // pieces of the first input that a thread may load straight to registers
constexpr int QUANTISE_THREADS = 128;      // of a block of quantise_kernel

static_assert(WARPS == 16 && MAX_OUTPUTS == 4 && MAX_LINKS == 4 && MAX_CLUSTER == 2 && MAX_SECTIONS == 8,
              "sm90_mma.py divides work by the same numbers");
static_assert(INPUT_PAD % 16 == 0, "rows of the input are copied and loaded by 16 bytes");
static_assert(BLOCK_N == units::ROWS && BLOCK_K == units::COLUMNS, "a tile is a row of units");
static_assert(BLOCK_N == 2 * 16 && BLOCK_K == 4 * 16, "two fragments of m16n8k16 below each other, four in a row");
static_assert(SCALE_K == 2 * BLOCK_K, "a scale of fp8 belongs to two units");
static_assert(SUM_STRIDE % 4 == 0 && SUM_STRIDE >= BLOCK_N && SUM_STRIDE % 32 == 4, "16-byte loads, no conflicts");
static_assert(PIECE * sizeof(__nv_bfloat16) == 16 && SCALE_K % PIECE == 0, "a piece is one load of a lane");

// ---- legal tiles: one row a tile, with its depths of a warp's ring in stages, deepest first

struct TileRow {
    Format format;
    int block_m;        // tokens of a block
    bool chain;         // all links in one launch
    int num_stages[3];  // the launcher takes the first that shared memory has room for; 0: no more
};
constexpr TileRow TILES[] = {
    {FP8, 8, false, {3, 2, 1}},   {FP8, 16, false, {3, 2}},   {FP8, 32, false, {2}},
    {NVFP4, 8, false, {3, 2, 1}}, {NVFP4, 16, false, {2}},    {NVFP4, 32, false, {2}},
    {BF16, 8, false, {4, 2, 1}},  {BF16, 16, false, {2}},     {BF16, 32, false, {2}},
    {NVFP4, 8, true, {4, 3, 2}},
};
constexpr int SHALLOW = 2;  // stages at most of a single link up to 8 tokens that no kernel is launched before

constexpr TileRow tile_row(Format format, int block_m, bool chain) {
    for (const TileRow& row : TILES)
        if (row.format == format && row.block_m == block_m && row.chain == chain) return row;
    return {};
}
constexpr bool is_legal(Format format, int block_m, int num_stages, bool chain) {
    const TileRow row = tile_row(format, block_m, chain);
    for (const int legal : row.num_stages)
        if (num_stages && legal == num_stages) return true;
    return false;
}

// A warp's ring holds NUM_STAGES stages; each comes with one bulk copy and is one unit or two, or a half of bf16's.
template <Format FORMAT_, int BLOCK_M_, int NUM_STAGES_, bool CHAIN_>
struct Config {
    static constexpr Format FORMAT = FORMAT_;
    static constexpr int BLOCK_M = BLOCK_M_, NUM_STAGES = NUM_STAGES_;
    static constexpr bool CHAIN = CHAIN_;
    static_assert(is_legal(FORMAT, BLOCK_M, NUM_STAGES, CHAIN), "not in TILES");

    static constexpr int TOKEN_TILES = BLOCK_M / MMA_M;
    static constexpr int UNIT_PARTS = FORMAT == BF16 ? 2 : 1;
    static constexpr int PART_BYTES = FORMAT == NVFP4 ? units::BYTES : 2048;
    // Two parts, to share what a stage costs, but in fp8 one where tokens need the room.
    static constexpr int STAGE_PARTS = FORMAT == NVFP4 || (FORMAT == FP8 && BLOCK_M == 8) ? 2 : 1;
    static constexpr int STAGE_BYTES = STAGE_PARTS * PART_BYTES;
    static constexpr int STAGES_BEFORE_INPUT = 1;  // that are asked for before the input has come
    static constexpr int CHUNK_UNITS = FORMAT == FP8 ? SCALE_K / BLOCK_K : 1;  // chunks of k begin at multiples of this
    static constexpr bool CONVERTS = FORMAT != BF16 && BLOCK_M <= (FORMAT == FP8 ? 16 : 8);  // blocks may, themselves
    static constexpr int FRAGMENTS = BLOCK_M < 32 ? 2 : 1;  // of fp8: 16 rows each at once, since registers are few
    static constexpr int SUMS_AT_ONCE = BLOCK_M == 32 ? 2 : 4;  // that a lane loads: as registers allow
    // A chain has one warp more, which copies inputs, waits for the other blocks and releases at the cluster's barrier:
    // a release waits for all copies that the warp has under way, and this one has none.
    static constexpr int THREADS = MATH_THREADS + 32 * CHAIN, CONTROL_WARP = CHAIN ? WARPS : 0;

    static_assert(STAGE_PARTS == (FORMAT == NVFP4 ? 2 : 1) || (FORMAT == FP8 && STAGE_PARTS == 2), "as products read them");
    static_assert(STAGES_BEFORE_INPUT <= NUM_STAGES, "more than the ring has");
    static_assert(FRAGMENTS == 1 || FRAGMENTS == 2, "a unit has two fragments below each other");
    static_assert(SUMS_AT_ONCE > 0 && (SUMS_AT_ONCE & SUMS_AT_ONCE - 1) == 0, "it has to divide a block's chunks");
    static_assert(BLOCK_M % MMA_M == 0 && (TOKEN_TILES & TOKEN_TILES - 1) == 0, "sums are kept by powers of two");
    static_assert(STAGE_BYTES % 128 == 0, "stages are copied in whole lines");
};

// The beginning of shared memory. Behind it, with sizes that the launch decides (Geometry): the input, [tokens] rows;
// its scales in fp8, [blocks of SCALE_K][BLOCK_M] floats; the warps' sums, [token tiles][WARPS][WARP_SUMS] floats.
struct InputState {
    uint64_t barrier;  // that the copy of the input arrives at
    uint32_t parity;   // to be waited for
    uint32_t tag;      // of this launch, see Exchange
};
constexpr int INPUT_STATE = sizeof(InputState);
constexpr int PARITY = offsetof(InputState, parity), TAG = offsetof(InputState, tag);
static_assert(offsetof(InputState, barrier) == 0 && INPUT_STATE == 16, "the input behind it is copied by 16 bytes");
template <class C>
struct SharedMemory {
    uint8_t stages[WARPS][C::NUM_STAGES][C::STAGE_BYTES];
    uint64_t full_barriers[WARPS][C::NUM_STAGES];
    InputState input_state;  // all configurations find it just before the input
};

// ---- what the host fills in (sm90_mma.py, _Link)

struct Output {
    __nv_bfloat16* out;       // (tokens, columns)
    int columns, first_tile;  // first_tile: the matrix' first one among the link's
};

struct Link {
    const uint8_t* units;
    const uint8_t* scales;      // fp8: (tiles, blocks of SCALE_K), ue8m0
    const float* factors;       // nvfp4: (tiles,)
    const float* input_scales;  // nvfp4 that quantises: (groups,)
    const __nv_bfloat16* x;     // (tokens, x_stride)
    // The input quantised before this kernel, null where blocks convert x themselves: (tokens, groups, k) of bf16, or
    // for fp8 of fp16, and for fp8 the scales (tokens, groups, blocks of SCALE_K).
    uint16_t* quantised;
    float* quantised_scales;
    const __nv_bfloat16* norm_weights;  // (k,): x goes through RMSNorm with these weights first; null: it does not
    uint64_t* exchange;                 // where blocks that share a tile exchange sums; null: they are a cluster
    int tokens, quantise;
    int x_stride, group_stride;       // of a token; from a group's input to the next one's, 0: all have the same
    int tiles, group_tiles, k_units;  // group_tiles: of one group, tiles where there are none
    int num_chunks, num_splits;       // of k, a power of two; blocks that share a tile's chunks
    int section_chunks;               // whose sums are added up by themselves first, a power of two
    int prefetch_lines;               // of 128 bytes of the next link, that each warp asks for to L2
    int gated;                        // 1: tiles 2 i are gates and 2 i + 1 their ups, and the output is their SwiGLU
    float limit;                      // of gates, from above, and of ups, where gated
    float eps;                        // of the norm
    int num_outputs;
    Output outputs[MAX_OUTPUTS];

    __host__ __device__ int groups() const { return tiles / group_tiles; }
};
static_assert(sizeof(Link) == 9 * 8 + 16 * 4 + MAX_OUTPUTS * 16, "must match sm90_mma.py: _Link");

// What a kernel knows of the next link; units: null if there is none or it is in the same launch; quantised: null if it
// is not written here.
struct Next {
    const uint8_t* units;
    int tiles, k_units, chunk_shift;
    uint16_t* quantised;
    const float* input_scales;
    int x_stride, quantised_stride;
};

// ---- how work is divided

// How k is divided: chunk i of 2^shift is units [begin(i), begin(i + 1)), multiples of `granule` but for the last end.
struct Chunks {
    int k_units, shift, granule;

    __host__ __device__ int granules() const { return (k_units + granule - 1) / granule; }
    __host__ __device__ int begin(int chunk) const {
        const int unit = (chunk * granules() >> shift) * granule;
        return unit < k_units ? unit : k_units;
    }
    // Units that `count` chunks one after another have at most, to whole granules.
    __host__ __device__ int longest(int count) const {
        return (count * granules() + (1 << shift) - 1 >> shift) * granule;
    }
};

// Quotients by the same number, 1 or more, of numbers that times it are below 2^32.
struct Divisor {
    uint32_t by = 1, inverse = 0;

    Divisor() = default;
    __host__ __device__ explicit Divisor(uint32_t by) : by(by), inverse(0xFFFFFFFFu / by + 1) {}
    // some: whether there are numbers of `by` or more; else quotients are 0, without a division to begin with.
    __device__ __forceinline__ Divisor(uint32_t by, bool some) : by(by) {
        if (some) inverse = 0xFFFFFFFFu / by + 1;
    }
    __device__ __forceinline__ uint32_t quotient(uint32_t of) const { return by == 1 ? of : __umulhi(of, inverse); }
};

constexpr int log2_of(int power) {
    int log = 0;
    while (1 << log < power) ++log;
    return log;
}

// What the host works out for all blocks, so that the kernel has it in constant memory and not in registers. A team is
// the blocks that share tiles: a cluster, or more, which exchange sums. In each pass a team has 2^tile_shift tiles of
// one group.
struct Geometry {
    int block_chunk_shift, chunk_shift;  // chunks of a block and of k, as powers of two
    int split_shift, tile_shift;         // blocks of a team and its tiles of a pass, as powers of two
    Divisor group_passes;                // passes of one group
    int passes;                          // and of all
    int smem_sums, smem_input, smem_input_scales, input_row_bytes;  // offsets in shared memory; a token to the next
    int smem_bytes;
    int teams;                           // of the grid
    int token_tile_shift;                // token tiles whose sums are in shared memory at once, as a power of two
    int early;                           // 1: the previous kernel may still be under way
    uint32_t opaque_zero;                // 0, which the compiler does not know

    Geometry() = default;
    template <class C>
    Geometry(C, const Link& link, int multiprocessors, bool early)
        : group_passes((link.group_tiles + WARPS * link.num_splits / link.num_chunks - 1) /
                       (WARPS * link.num_splits / link.num_chunks)),
          early(early),
          opaque_zero(0) {
        const int block_chunks = link.num_chunks / link.num_splits;
        block_chunk_shift = log2_of(block_chunks), chunk_shift = log2_of(link.num_chunks);
        split_shift = log2_of(link.num_splits), tile_shift = log2_of(WARPS / block_chunks);
        passes = link.groups() * group_passes.by;
        const Chunks chunks = {link.k_units, chunk_shift, C::CHUNK_UNITS};
        const int columns = chunks.longest(block_chunks) * BLOCK_K;  // of a block, at most
        input_row_bytes = 2 * columns + INPUT_PAD;
        smem_input = sizeof(SharedMemory<C>);
        smem_input_scales = smem_input + (link.tokens * input_row_bytes + 15) / 16 * 16;
        smem_sums = smem_input_scales + (C::FORMAT == FP8 ? (columns + SCALE_K - 1) / SCALE_K * C::BLOCK_M * 4 : 0);
        const int token_tile_bytes = WARPS * WARP_SUMS * 4;
        for (token_tile_shift = 0; 2 << token_tile_shift <= C::TOKEN_TILES &&
                                   smem_sums + (token_tile_bytes << token_tile_shift + 1) <= MAX_SMEM;)
            ++token_tile_shift;
        smem_bytes = smem_sums + (token_tile_bytes << token_tile_shift);
        teams = min(passes, multiprocessors / link.num_splits);
    }

    __device__ __forceinline__ int group_of(int pass) const { return static_cast<int>(group_passes.quotient(pass)); }
    // Of the group; slot: of the tile among those of the pass.
    __device__ __forceinline__ int tile_of(int slot, int pass, int group) const {
        return (pass - group * static_cast<int>(group_passes.by) << tile_shift) + slot;
    }
};

struct Job {
    Geometry geo;  // first, next to what is read first of the link: each line of constant memory has to be fetched
    Link link;
    Next next;
};

// One link, or a chain. grid_counter: what blocks of a chain count at, its last 31 bits 0 between launches.
template <int COUNT>
struct Jobs {
    Job job[COUNT];
    int count;
    uint32_t* grid_counter;
};
template <class C>
using JobsOf = Jobs<C::CHAIN ? MAX_LINKS : 1>;

}  // namespace linear_mma
