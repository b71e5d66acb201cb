// sm90_mma: constants, what the host fills in, how a launch is laid out.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "nvfp4_units.cuh"

namespace linear_mma {

constexpr int WARPS = 16, THREADS = 32 * WARPS;
constexpr int TILE = 32, COLUMNS = 64;  // rows and columns of a unit
constexpr int BLOCK = 128;              // values that share a scale in fp8
constexpr int MOST_PARTS = 4;           // matrices of a link
constexpr int MOST_CLUSTER = 2;         // blocks of a cluster
constexpr int MOST_SECTIONS = 8;        // of k, a block each
constexpr int MOST_TOLD = 8;            // chunks whose sums a block adds up before it tells another one
constexpr int HEARD = 4;                // sections that a thread asks for at once
constexpr int PAD = 36;                 // floats from a token to the next in a warp's sums: no conflicts of banks
constexpr int SUMS = 8 * PAD;           // floats of a warp: 32 rows of 8 tokens
constexpr int MOST_SHARED = 227 << 10;  // bytes of shared memory that a block can have
constexpr int BARRIER = 16;             // bytes before the input, with the barrier that it arrives at,
constexpr int PARITY = 8, TAG = 12;     // that to be waited for, and this launch's tag
constexpr int ROW_PAD = 16;             // bytes between rows of the input: eight lanes then read all banks
constexpr int PIECE = 8;                // values of the input that a lane takes: 16 bytes
constexpr int DIRECT = 2;               // pieces of the first input that a thread may take straight to registers
constexpr int QUANTISERS = 128;         // threads of a block of quantise_kernel
constexpr int MOST_LINKS = 4;           // of a chain in one launch
enum Format { FP8, NVFP4, BF16 };

// ---- what the host fills in (sm90_mma.py, Link)

struct Part {
    __nv_bfloat16* out;  // (tokens, columns)
    int columns, tile;   // tile: of the link, the matrix' first one
};

struct Link {
    const uint8_t* units;
    const uint8_t* scales;      // fp8: (tiles, blocks of k), ue8m0
    const float* factors;       // nvfp4: (tiles,)
    const float* input_scales;  // nvfp4 that quantises: (groups,)
    const __nv_bfloat16* x;     // (tokens, x_columns)
    // The input taken ahead, null where blocks take x themselves: (tokens, groups, k) of bf16, or for fp8 of fp16, and
    // for fp8 the scales (tokens, groups, blocks of k).
    uint16_t* taken;
    float* taken_scales;
    const __nv_bfloat16* norm;  // (k,): x goes through RMSNorm with these weights first; null: it does not
    // Where blocks that share chunks tell each other sums, see Exchange; null: they are a cluster.
    uint64_t* exchange;
    int tokens, quantise;
    int x_columns, group_columns;     // group_columns: from a group's input to the next one's; 0: all have the same
    int tiles, group_tiles, k_units;  // group_tiles: of one group, tiles where there are none
    int chunks, cluster;              // chunks: of k, a power of two; cluster: blocks that share them
    int section;                      // chunks whose sums are added up by themselves first, a power of two
    int ahead;                        // lines of 128 bytes that each warp asks for to L2, of the link behind
    int gated;                        // 1: tiles 2 i are gates and 2 i + 1 their ups, and the output is their SwiGLU
    float limit;                      // of gates, from above, and of ups, where gated
    float eps;                        // of the norm
    int parts;
    Part part[MOST_PARTS];

    __host__ __device__ int groups() const { return tiles / group_tiles; }
};

// What a kernel knows of the link behind; units: null if there is none, or if it is in the same launch; taken: null if
// it is not written here.
struct Next {
    const uint8_t* units;
    int tiles, k_units, chunk_shift;
    uint16_t* taken;
    const float* input_scales;
    int x_columns, taken_columns;
};

// ---- the formats

// Of a warp's ring; it comes with one bulk copy.
template <int FORMAT, int NT>
struct Stage {
    // Units, or halves of bf16's: two, to share what a stage costs, but in fp8 one where tokens need the room.
    static constexpr int PARTS = FORMAT == NVFP4 || (FORMAT == FP8 && NT == 1) ? 2 : 1;
    static constexpr int OF_UNIT = FORMAT == BF16 ? 2 : 1;  // parts of a unit
    static constexpr int PART_BYTES = FORMAT == NVFP4 ? units::BYTES : 2048, BYTES = PARTS * PART_BYTES;
    static constexpr int UNITS = FORMAT == FP8 ? BLOCK / COLUMNS : 1;  // chunks of k begin at multiples of this
    static constexpr int BEFORE = 1;                                   // stages asked for before the input has come
};

// Whether blocks of so many tokens may convert their input themselves.
template <int FORMAT, int NT>
constexpr bool CONVERTS = FORMAT == FP8 ? NT <= 2 : FORMAT == NVFP4 && NT == 1;

// How k is cut: chunk i of 2^shift is units [begin(i), begin(i + 1)).
struct Cut {
    int k_units, shift, granule;

    __host__ __device__ int granules() const { return (k_units + granule - 1) / granule; }
    __host__ __device__ int begin(int chunk) const {
        const int at = (chunk * granules() >> shift) * granule;
        return at < k_units ? at : k_units;
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

// What the host works out for all blocks, so that the kernel has it in constant memory and not in registers.
struct Geometry {
    int local_shift, chunk_shift;     // chunks of a block and of k, as powers of two
    int cluster_shift, tile_shift;    // blocks of a cluster and tiles at once, as powers of two
    Divisor group_passes;             // times that a block's tiles are taken, of one group
    int passes;                       // and of all
    int sums, x, x_scales, row_bytes; // offsets in shared memory, and from a token's input to the next
    int bytes;                        // of shared memory
    int clusters;                     // of the grid
    int held_shift;                   // sums of 8 tokens that a warp has there at once, as a power of two
    int early;                        // 1: the kernel ahead may still be under way
    uint32_t zero;                    // 0, which the compiler does not know

    Geometry() = default;
    // ring: bytes of all stages; granule: units that chunks begin at multiples of
    Geometry(const Link& p, int format, int nt, int ring, int granule, int sms, bool early)
        : group_passes((p.group_tiles + WARPS * p.cluster / p.chunks - 1) / (WARPS * p.cluster / p.chunks)),
          early(early),
          zero(0) {
        const int local = p.chunks / p.cluster;
        local_shift = log2_of(local), chunk_shift = log2_of(p.chunks), cluster_shift = log2_of(p.cluster);
        tile_shift = log2_of(WARPS / local);
        passes = p.tiles / p.group_tiles * group_passes.by;
        const int slice = Cut{p.k_units, chunk_shift, granule}.longest(local) * COLUMNS;  // of a block, at most
        row_bytes = 2 * slice + ROW_PAD;
        x = ring + BARRIER;
        x_scales = x + (p.tokens * row_bytes + 15) / 16 * 16;
        sums = x_scales + (format == FP8 ? (slice + BLOCK - 1) / BLOCK * nt * 8 * 4 : 0);
        const int of_eight = WARPS * SUMS * 4;
        for (held_shift = 0; 2 << held_shift <= nt && sums + (of_eight << held_shift + 1) <= MOST_SHARED;) ++held_shift;
        bytes = sums + (of_eight << held_shift);
        clusters = min(passes, sms / p.cluster);
    }
};

struct Job {
    Geometry at;  // first, next to what is read first of the link: each line of constant memory has to be fetched
    Link p;
    Next next;
};

// One link, or a chain. met: what blocks of a chain count at, its last 31 bits 0 between launches.
template <int COUNT>
struct Jobs {
    Job job[COUNT];
    int count;
    uint32_t* met;
};

}  // namespace linear_mma
