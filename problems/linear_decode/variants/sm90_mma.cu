// linear_decode on Hopper: every weight is read once and meets up to 32 tokens in mma.sync, in registers.
//
// A block of 16 warps holds its tokens' input in shared memory. A warp multiplies a tile of 32 rows by a chunk of k,
// its weights coming through its ring with bulk copies, so a warp waits for no other. 16 / chunks tiles are
// under way in a block at once; then the chunks' sums are added in the order of k, whatever the number of tokens, so a
// token's bits do not depend on the others. With many tokens several blocks share a tile's chunks, so that a block
// holds a part of the input only: a cluster of two, which read each other's sums, or more, which are no cluster and
// tell each other sums through memory, since clusters of 4 do not fill the GPU.
//
// Weights lie in units of 32 rows by 64 columns, [rows / 32][k / 64], each a stage of the ring or two. Lane l = 4 g + c
// owns columns 16 c .. 16 c + 15 of rows g, g + 8, g + 16 and g + 24, and step j of a unit takes columns 4 j .. 4 j + 3
// of these: k = 2 c, 2 c + 1, 2 c + 8, 2 c + 9 of the instruction. So inputs lie in their natural order.
//   fp8    2048 bytes: 512 r + 16 l .. + 15 are the lane's 16 codes of row g + 8 r
//   nvfp4  1152 bytes, as nvfp4_units.cuh describes them
//   bf16   4096 bytes: 2048 h + 512 r + 16 l .. + 15 are columns 8 h .. 8 h + 7 of the lane's 16 of row g + 8 r
//
// fp8: codes become fp16, exactly, and so do the input's codes; sums of 64 columns are multiplied by both scales in
// fp32. Where the input is not quantised it is divided by a power of two for each token and block of 128, such that the
// largest is 2^14 to 2^15: fp16 then holds all its bits down to 2^-29 of that, and an error of 2^-40 below.
//
// nvfp4: a quantised input is code * scale, which is exact in bf16; its input scale is in the factor of the sums.
//
// A chain of up to 8 tokens in nvfp4 is one launch: a ring goes on from a link's last tile to the next one's first, so
// that weights come while blocks meet between links. Otherwise it is a launch a link.
//
// Each block brings its input into that form itself, or, with more tokens, the input is taken ahead: quantise_kernel
// writes the same bits to memory once, and blocks copy them. In a chain of nvfp4 the epilogue of the link ahead does.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cassert>
#include <cstdint>

#include "launch_clusters.cuh"
#include "launch_cooperative.cuh"
#include "nvfp4_units.cuh"
#include "ptx.cuh"
#include "tagged_words.cuh"

namespace {

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

// ---- device helpers

// Keeps a value in a register, where it would be computed again and again.
__device__ __forceinline__ void hold(uint32_t& value) { asm volatile("" : "+r"(value)); }

__device__ __forceinline__ uint32_t half2_of_e4m3(uint32_t bytes) {
    uint32_t pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(bytes)));
    return pair;
}

__device__ __forceinline__ uint16_t e4m3_pair(float low, float high) {
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

// In its place behind the wait for the kernel ahead, which may have written this.
__device__ __forceinline__ uint4 load_input(const void* at) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}

// Weights, which are read once: code and small tensors stay in L2. (ptx::tma_load_1d holds the policy in two registers.)
__device__ __forceinline__ void load_weights(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
    asm volatile(
        "{\n"
        ".reg .b64 first;\n"
        "createpolicy.fractional.L2::evict_first.b64 first, 1.0;\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], first;\n"
        "}" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

// True in one lane of a whole warp, any one. The compiler knows: of `lane == 0` it makes a loop over lanes that issue.
// It takes registers, which are few with more than 8 tokens.
template <int NT>
__device__ __forceinline__ bool elected(int lane) {
    if (NT > 1) return lane == 0;
    uint32_t one;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}\n" : "=r"(one));
    return one;
}

template <int FORMAT>
__device__ __forceinline__ void mma(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1) {
    if constexpr (FORMAT == FP8)
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The power of two that a group of 128 is divided by, and its inverse; most: the largest magnitude.
__device__ __forceinline__ float2 group_scale(float most, bool quantise) {
    if (quantise) {  // the least one with 448 * scale >= most, which counts as 1e-4 or more: fp8.ue8m0_scale
        // 448 is 1.75 * 2^8: 2^23 more than the bits of 1.75, less one, carry where the mantissa is larger than that.
        const int exponent = (__float_as_uint(fmaxf(most, 1e-4f)) + 0x1FFFFF >> 23) - 8;
        return make_float2(__uint_as_float(exponent << 23), __uint_as_float(254 - exponent << 23));
    }
    const int exponent = min(max(static_cast<int>(__float_as_uint(most) >> 23), 28), 254) - 14;
    return make_float2(__uint_as_float(exponent << 23), __uint_as_float(254 - exponent << 23));
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

// ---- a piece of the input as the products take it; the same bits wherever it is done

// 16 / PIECES lanes have a group of 128. -> fp16, in place; scale: of the group.
template <int PIECES>
__device__ __forceinline__ void fp8_pieces(uint4 (&pieces)[PIECES], bool quantise, float& scale) {
    uint32_t words[PIECES][4];
    float most = 0;
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        words[i][0] = pieces[i].x, words[i][1] = pieces[i].y, words[i][2] = pieces[i].z, words[i][3] = pieces[i].w;
#pragma unroll
        for (int w = 0; w < 4; ++w)
            most = fmaxf(most, fmaxf(fabsf(__uint_as_float(words[i][w] << 16)),
                                     fabsf(__uint_as_float(words[i][w] & 0xFFFF0000u))));
    }
#pragma unroll
    for (int apart = 8 / PIECES; apart; apart /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, apart));
    const float2 both = group_scale(most, quantise);
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const float low = __uint_as_float(words[i][w] << 16) * both.y;
            const float high = __uint_as_float(words[i][w] & 0xFFFF0000u) * both.y;
            words[i][w] = quantise ? half2_of_e4m3(e4m3_pair(low, high)) : ptx::pack_f16x2(low, high);
        }
        pieces[i] = make_uint4(words[i][0], words[i][1], words[i][2], words[i][3]);
    }
    scale = both.x;
}

__device__ __forceinline__ uint4 fp8_piece(uint4 raw, bool quantise, float& scale) {
    uint4 one[1] = {raw};
    fp8_pieces(one, quantise, scale);
    return one[0];
}

// a / b to nearest, inverse being 1 / b to nearest, for finite a, b and quotients that are no subnormal numbers: of 8
// bits by 24 all mantissas were tried.
__device__ __forceinline__ float quotient(float a, float b, float inverse) {
    const float near = a * inverse;
    return fmaf(fmaf(-near, b, a), inverse, near);
}

// nvfp4.encode, bit for bit, in three steps: a value by the input scale, the scale of a group, code times scale.
__device__ __forceinline__ float nvfp4_divided(float v, float input_scale, float inverse) {
    const float limit = 8192.f * input_scale;  // what is beyond 448 * 6 is all the same
    return quotient(fminf(fmaxf(v, -limit), limit), input_scale, inverse);
}

__device__ __forceinline__ float nvfp4_scale(float most) {
    constexpr float HIGH = 1 / 6.f, LOW = static_cast<float>(1 / 6. - HIGH);  // together 1 / 6, see Inverse
    const float wanted = fminf(fmaf(most, HIGH, most * LOW), 448.f);
    const uint32_t half2 = half2_of_e4m3(e4m3_pair(wanted, 0.f));
    return __half2float(__ushort_as_half(static_cast<uint16_t>(half2)));
}

// 2^22 / scale, or 0 for a scale of 0, and then all codes are 0; in two parts, together right to 2^-43. Scales have 4
// bits, so a quotient of 24 bits by one is further than that from the middle between two floats, and two products and a
// sum give it to nearest: tried for all mantissas. Of 8 bits by 24 eleven would be wrong, so the input scale has none.
struct Inverse {
    float high, low;

    __device__ __forceinline__ explicit Inverse(float scale) {
        float near;
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(scale));
        if (!(scale > 0)) near = 0;
        high = 0x1p22f * near, low = fmaf(-scale, near, 1.f) * high;
    }
};

// What the code stands for, not times the scale yet. BELOW_7: codes before they are rounded are.
template <bool BELOW_7 = false>
__device__ __forceinline__ float nvfp4_code(float divided, const Inverse& by) {
    const float code = fmaf(divided, by.high, divided * by.low);  // times 2^22
    // The power of two at or below it, at least 1: codes are half of it apart. 1.5 * 2^23 of these halves more, and the
    // sum's last bit is worth one of them.
    const float far = __uint_as_float(__float_as_uint(fmaxf(fabsf(code), 0x1p22f)) & 0x7F800000u | 0x00400000u);
    const float rounded = __fsub_rn(fmaf(code, 0x1p-22f, far), far);
    return BELOW_7 ? rounded : fminf(fmaxf(rounded, -6.f), 6.f);
}

// Two codes times their scale, exactly.
__device__ __forceinline__ uint32_t nvfp4_values(float low, float high, float scale) {
    return ptx::mul_bf16x2(ptx::pack_bf16x2(low, high), ptx::pack_bf16x2(scale, scale));
}

// Two lanes have a group of 16. -> bf16.
__device__ __forceinline__ uint4 nvfp4_piece(uint4 raw, float input_scale, float inverse) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
    float value[PIECE], most = 0;
#pragma unroll
    for (int e = 0; e < PIECE; ++e) {
        value[e] = __uint_as_float(e & 1 ? words[e / 2] & 0xFFFF0000u : words[e / 2] << 16);
        most = fmaxf(most, fabsf(value[e]));
    }
    // The quotient of the largest is the largest quotient.
    most = nvfp4_divided(fmaxf(most, __shfl_xor_sync(~0u, most, 1)), input_scale, inverse);
    const float scale = nvfp4_scale(most);
    const Inverse by(scale);
    if (most < 6.9f * scale)  // but for the smallest scales and the largest inputs: no need of limits
#pragma unroll
        for (int e = 0; e < PIECE; ++e)
            value[e] = nvfp4_code<true>(quotient(value[e], input_scale, inverse), by);
    else
#pragma unroll
        for (int e = 0; e < PIECE; ++e) value[e] = nvfp4_code(nvfp4_divided(value[e], input_scale, inverse), by);
    return make_uint4(nvfp4_values(value[0], value[1], scale), nvfp4_values(value[2], value[3], scale),
                      nvfp4_values(value[4], value[5], scale), nvfp4_values(value[6], value[7], scale));
}

// A lane has four values of a token, bf16, from column `column` of the link behind on, and four lanes a group: writes
// them where that takes them, if `inside`. held: lane i has input scale i. All lanes call this.
__device__ __forceinline__ void write_behind(const Next& next, bool inside, int token, int column, uint2 words,
                                             float held) {
    const int k = next.k_units * COLUMNS;
    const float v[4] = {__uint_as_float(words.x << 16), __uint_as_float(words.x & 0xFFFF0000u),
                        __uint_as_float(words.y << 16), __uint_as_float(words.y & 0xFFFF0000u)};
#pragma unroll 1
    for (int copy = 0; copy < next.taken_columns; copy += next.x_columns) {  // one for each input scale of the column
        const int group = min((copy + column) / k, (next.taken_columns - 1) / k);
        float input_scale = __shfl_sync(~0u, held, group & 31);
        if (group > 31) input_scale = next.input_scales[group];
        const float inverse = __frcp_rn(input_scale);
        float divided[4], most = 0;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            divided[e] = nvfp4_divided(v[e], input_scale, inverse);
            most = fmaxf(most, fabsf(divided[e]));
        }
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        const float scale = nvfp4_scale(most);
        const Inverse by(scale);
#pragma unroll
        for (int e = 0; e < 4; ++e) divided[e] = nvfp4_code(divided[e], by);
        if (inside)
            *reinterpret_cast<uint2*>(next.taken + static_cast<int64_t>(token) * next.taken_columns + copy + column) =
                make_uint2(nvfp4_values(divided[0], divided[1], scale), nvfp4_values(divided[2], divided[3], scale));
    }
}

// A lane a piece: 16 lanes have 128 columns of a group of a token, less at its end.
template <int FORMAT>
__global__ void __launch_bounds__(QUANTISERS) quantise_kernel(const __grid_constant__ Link p) {
    programmatic::trigger();  // blocks of the link may begin to copy their weights
    programmatic::wait();     // until the link ahead has written the input, and has read what is written here
    const int k = p.k_units * COLUMNS, blocks = (k + BLOCK - 1) / BLOCK, groups = p.groups();
    const int index = blockIdx.x * QUANTISERS + threadIdx.x, part = index % (BLOCK / PIECE);
    const int block = index / (BLOCK / PIECE) % blocks, row = index / (BLOCK / PIECE) / blocks;
    const int token = row / groups, group = row % groups, column = block * BLOCK + PIECE * part;
    const bool inside = token < p.tokens && column < k;
    uint4 piece = make_uint4(0, 0, 0, 0);
    if (inside) piece = load_input(p.x + static_cast<int64_t>(token) * p.x_columns + group * p.group_columns + column);
    float scale = 0;
    if constexpr (FORMAT == FP8) {
        piece = fp8_piece(piece, p.quantise, scale);
    } else {
        const float input_scale = p.input_scales[group];
        piece = nvfp4_piece(piece, input_scale, __frcp_rn(input_scale));
    }
    if (!inside) return;
    *reinterpret_cast<uint4*>(p.taken + static_cast<int64_t>(row) * k + column) = piece;
    if (FORMAT == FP8 && part == 0) p.taken_scales[row * blocks + block] = scale;
}

// Read where they are needed: what follows from them is then worked out again, and not kept in registers.
__device__ __forceinline__ int block_index() {
    int index;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
    return index;
}
__device__ __forceinline__ int thread_index() {
    int index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
}

// What a warp has of a link.
struct Share {
    int rank, first_pass;     // of the block in the cluster; of the cluster
    int place, begin, slice;  // the tile's place among those under way; units where the chunk and the block's begin
    int count;                // columns of the block
    uint32_t length;          // units of the chunk

    __device__ __forceinline__ Share(const Link& p, const Geometry& at, int granule) {
        const int block = block_index(), warp = thread_index() / 32;
        rank = block & p.cluster - 1, first_pass = block >> at.cluster_shift;
        const int local = 1 << at.local_shift, chunk = (rank << at.local_shift) + (warp & local - 1);
        const Cut cut = {p.k_units, at.chunk_shift, granule};
        place = warp >> at.local_shift, begin = cut.begin(chunk), length = cut.begin(chunk + 1) - begin;
        slice = cut.begin(rank << at.local_shift);
        count = (cut.begin(rank + 1 << at.local_shift) - slice) * COLUMNS;
    }
};

// ---- the input to shared memory: columns from first_unit on, of one group of the link

// One thread asks for all rows. What the block read there before must be behind a barrier.
__device__ __forceinline__ void copy_input(const Link& p, const Geometry& at, uint8_t* smem, const __nv_bfloat16* x,
                                           int first, int count) {
    const uint32_t barrier = ptx::smem_address(smem + at.x - BARRIER);
    const uint64_t policy = ptx::l2_evict_normal();
    ptx::fence_proxy_async_shared();
    ptx::arrive_and_expect_tx(barrier, p.tokens * count * 2);
#pragma unroll 1
    for (int token = 0; token < p.tokens; ++token)
        ptx::tma_load_1d(barrier + BARRIER + token * at.row_bytes,
                         x + static_cast<int64_t>(token) * p.x_columns + first, 2 * count, barrier, policy);
}

// How a block's threads share the input that they convert, up to 8 tokens: a piece each, then the next THREADS.
template <int FORMAT>
struct Pieces {
    Divisor of_token;
    int count, all, whole;  // columns of the block; pieces; these up to whole warps, whose lanes meet in them

    __device__ __forceinline__ Pieces(const Link& p, int count)
        : of_token(FORMAT == FP8 ? (count + BLOCK - 1) / BLOCK * (BLOCK / PIECE) : count / PIECE, p.tokens > 1),
          count(count),
          all(p.tokens * of_token.by),
          whole((all + 31) / 32 * 32) {}

    struct Place {
        int token, piece;
        bool inside;
    };
    __device__ __forceinline__ Place place(int i) const {
        const int token = of_token.quotient(i), piece = i - token * of_token.by;
        return {token, piece, i < all && (FORMAT != FP8 || PIECE * piece < count)};
    }
};

// One of them, from bf16 to what the products take, to where that is kept.
template <int FORMAT>
__device__ __forceinline__ void convert_piece(const Link& p, const Geometry& at, uint8_t* smem,
                                              const typename Pieces<FORMAT>::Place& place, uint4 v, float input_scale,
                                              float inverse) {
    if constexpr (FORMAT == FP8) {
        float scale;
        v = fp8_piece(v, p.quantise, scale);
        if (place.inside && place.piece % (BLOCK / PIECE) == 0)
            reinterpret_cast<float*>(smem + at.x_scales)[place.piece / (BLOCK / PIECE) * 8 + place.token] = scale;
    } else {
        v = nvfp4_piece(v, input_scale, inverse);
    }
    const uint32_t to = ptx::smem_address(smem + at.x) + place.token * at.row_bytes + 2 * PIECE * place.piece;
    if (place.inside) ptx::store_shared16(to, v);
}

// RMSNorm of the input in registers, rounded to bf16; weights: of the same pieces; sums: of warps, 32 floats. Each warp
// has pieces of one token. Values and the order of sums are those of dsv4_forward's rms_norm (kernels/fused.cu).
template <int FORMAT>
__device__ __forceinline__ void norm_pieces(const Link& p, const Pieces<FORMAT>& pieces, float* sums,
                                            uint4 (&raw)[DIRECT], const uint4 (&weights)[DIRECT]) {
    const int of_token = pieces.of_token.by / 32;  // warps
#pragma unroll
    for (int j = 0; j < DIRECT; ++j) {
        const int i = threadIdx.x + j * THREADS;
        if (i >= pieces.all) continue;
        const uint32_t words[4] = {raw[j].x, raw[j].y, raw[j].z, raw[j].w};
        float square = 0;
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const float low = __uint_as_float(words[w] << 16), high = __uint_as_float(words[w] & 0xFFFF0000u);
            square += fmaf(low, low, high * high);
        }
#pragma unroll
        for (int apart = 16; apart; apart /= 2) square += __shfl_xor_sync(~0u, square, apart);
        if (i % 32 == 0) sums[i / 32] = square;
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < DIRECT; ++j) {
        const int i = threadIdx.x + j * THREADS;
        if (i >= pieces.all) continue;
        float total = 0;
        const float* mine = sums + pieces.place(i).token * of_token;
#pragma unroll 1
        for (int w = 0; w < of_token; ++w) total += mine[w];
        const float inverse = rsqrtf(total / pieces.count + p.eps);
        uint32_t words[4] = {raw[j].x, raw[j].y, raw[j].z, raw[j].w};
        const uint32_t factors[4] = {weights[j].x, weights[j].y, weights[j].z, weights[j].w};
#pragma unroll
        for (int w = 0; w < 4; ++w)
            words[w] = ptx::pack_bf16x2(
                __uint_as_float(words[w] << 16) * inverse * __uint_as_float(factors[w] << 16),
                __uint_as_float(words[w] & 0xFFFF0000u) * inverse * __uint_as_float(factors[w] & 0xFFFF0000u));
        raw[j] = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// All in place, of fp8: a lane takes two pieces of a group at a time, eight lanes a group.
template <bool QUANTISE, int NT>
__device__ __forceinline__ void convert_fp8_input(const Link& p, const Geometry& at, uint8_t* smem, int count,
                                                  int thread) {
    constexpr int LANES = BLOCK / PIECE / 2;
    const Divisor of_token((count + BLOCK - 1) / BLOCK * LANES);
    const int all = p.tokens * of_token.by;
#pragma unroll 1
    for (int i = thread; i < (all + 31) / 32 * 32; i += THREADS) {  // lanes meet in whole warps
        const int token = of_token.quotient(i), rest = i - token * of_token.by, group = rest / LANES;
        const int first = BLOCK * group + PIECE * (rest % LANES), second = first + BLOCK / 2;  // columns
        const bool inside[2] = {i < all, i < all && second < count};
        const uint32_t here = ptx::smem_address(smem + at.x) + token * at.row_bytes + 2 * first;
        uint4 pieces[2] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (inside[half]) pieces[half] = ptx::load_shared16(here + BLOCK * half);
        float scale;
        fp8_pieces(pieces, QUANTISE, scale);
        if (inside[0] && rest % LANES == 0)
            reinterpret_cast<float*>(smem + at.x_scales)[group * NT * 8 + token] = scale;
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (inside[half]) ptx::store_shared16(here + BLOCK * half, pieces[half]);
    }
}

// All in place, of nvfp4.
__device__ __forceinline__ void convert_nvfp4_input(const Link& p, const Geometry& at, uint8_t* smem,
                                                    const Pieces<NVFP4>& pieces, float input_scale, int thread) {
    const float inverse = __frcp_rn(input_scale);
#pragma unroll 1
    for (int i = thread; i < pieces.whole; i += THREADS) {
        const auto place = pieces.place(i);
        const uint32_t here = ptx::smem_address(smem + at.x) + place.token * at.row_bytes + 2 * PIECE * place.piece;
        const uint4 v = place.inside ? ptx::load_shared16(here) : make_uint4(0, 0, 0, 0);
        convert_piece<NVFP4>(p, at, smem, place, v, input_scale, inverse);
    }
}

// Scales of an input taken ahead.
template <int NT>
__device__ __forceinline__ void take_scales(const Link& p, const Geometry& at, uint8_t* smem, int group,
                                            const Share& own) {
    const int of_k = (p.k_units * COLUMNS + BLOCK - 1) / BLOCK, first = own.slice * COLUMNS / BLOCK;
    const Divisor blocks((own.count + BLOCK - 1) / BLOCK);
    float* scales = reinterpret_cast<float*>(smem + at.x_scales);
#pragma unroll 1
    for (int i = threadIdx.x; i < p.tokens * blocks.by; i += THREADS) {
        const int token = blocks.quotient(i), block = i - token * blocks.by;
        scales[block * NT * 8 + token] = p.taken_scales[(token * p.groups() + group) * of_k + first + block];
    }
}

// ---- products of one part of a stage: from: this lane's bytes in the ring; input[t]: its row of the input at the
// unit. Where a word that the lane loaded last is returned, see fill in the kernel.

// b0 and b1 of two steps.
template <int NT>
__device__ __forceinline__ void load_steps(uint4 (&b)[NT], const uint32_t (&input)[NT], int at) {
#pragma unroll
    for (int t = 0; t < NT; ++t) b[t] = ptx::load_shared16(input[t] + at);
}

// Q: 2 for all 32 rows, or 1 for the 16 at `from`.
template <int Q, int NT>
__device__ __forceinline__ uint32_t multiply_fp8(float (&sum)[Q][NT][4], uint32_t from,
                                                 const uint32_t (&input)[NT]) {
    uint4 row[2 * Q];
#pragma unroll
    for (int r = 0; r < 2 * Q; ++r) row[r] = ptx::load_shared16(from + 512 * r);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint4 b[NT];
        load_steps(b, input, 16 * half);
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int q = 0; q < Q; ++q) {
                const uint4 &upper = row[2 * q], &lower = row[2 * q + 1];
                const uint32_t up = half ? (j ? upper.w : upper.z) : (j ? upper.y : upper.x);
                const uint32_t low = half ? (j ? lower.w : lower.z) : (j ? lower.y : lower.x);
                const uint32_t a0 = half2_of_e4m3(up), a2 = half2_of_e4m3(up >> 16);
                const uint32_t a1 = half2_of_e4m3(low), a3 = half2_of_e4m3(low >> 16);
#pragma unroll
                for (int t = 0; t < NT; ++t)
                    mma<FP8>(sum[q][t], a0, a1, a2, a3, j ? b[t].z : b[t].x, j ? b[t].w : b[t].y);
            }
    }
    uint32_t last = row[2 * Q - 1].w;
    if (NT != 2)  // there registers are few
#pragma unroll
        for (int r = 0; r < 2 * Q - 1; ++r) last ^= row[r].w;
    return last;
}

// A lane's share of a unit.
struct Words {
    uint4 word[2];
    uint32_t scales;

    __device__ __forceinline__ Words(uint32_t from, uint32_t to_scales)
        : word{ptx::load_shared16(from), ptx::load_shared16(from + 512)},
          scales(ptx::load_shared(from + to_scales)) {}
    // Depends on all of them: the compiler chooses their order.
    __device__ __forceinline__ uint32_t last() const { return word[0].w ^ word[1].w ^ scales; }
};

template <int NT>
__device__ __forceinline__ void multiply_nvfp4(float (&sum)[2][NT][4], const Words& unit,
                                               const uint32_t (&input)[NT]) {
    const uint4(&word)[2] = unit.word;
    const uint32_t scales = unit.scales;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint4 b[NT];
        load_steps(b, input, 16 * half);
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            uint32_t upper[4], lower[4];
            units::decode(half ? word[q].z : word[q].x, q ? units::scale<2>(scales) : units::scale<0>(scales), upper);
            units::decode(half ? word[q].w : word[q].y, q ? units::scale<3>(scales) : units::scale<1>(scales), lower);
#pragma unroll
            for (int j = 0; j < 2; ++j)
#pragma unroll
                for (int t = 0; t < NT; ++t)
                    mma<NVFP4>(sum[q][t], upper[2 * j], lower[2 * j], upper[2 * j + 1], lower[2 * j + 1],
                               j ? b[t].z : b[t].x, j ? b[t].w : b[t].y);
        }
    }
}

// One half of a unit.
template <int NT>
__device__ __forceinline__ uint32_t multiply_bf16(float (&sum)[2][NT][4], uint32_t from, const uint32_t (&input)[NT],
                                                  int half) {
    uint4 row[4], b[NT];
#pragma unroll
    for (int r = 0; r < 4; ++r) row[r] = ptx::load_shared16(from + 512 * r);
    load_steps(b, input, 16 * half);
#pragma unroll
    for (int q = 0; q < 2; ++q)
#pragma unroll
        for (int t = 0; t < NT; ++t) {
            const uint4 &upper = row[2 * q], &lower = row[2 * q + 1];
            mma<BF16>(sum[q][t], upper.x, lower.x, upper.y, lower.y, b[t].x, b[t].y);
            mma<BF16>(sum[q][t], upper.z, lower.z, upper.w, lower.w, b[t].z, b[t].w);
        }
    return row[0].w ^ row[1].w ^ row[2].w ^ row[3].w;
}

// ---- kernel

// The bytes of the link behind that come after those which its own blocks copy before they wait: of each chunk of a
// tile the first p.ahead lines behind STAGES stages. A warp does it for one of them, which then is read from L2.
template <int FORMAT, int NT, int STAGES>
__device__ __forceinline__ void fetch_ahead(const Next& next, int ahead, int warp, int lane) {
    using Ring = Stage<FORMAT, NT>;
    constexpr int UNIT_BYTES = Ring::PART_BYTES * Ring::OF_UNIT;
    const int chunk = warp & (1 << next.chunk_shift) - 1, tile = warp >> next.chunk_shift;
    const Cut cut = {next.k_units, next.chunk_shift, Ring::UNITS};
    const int begin = cut.begin(chunk), length = (cut.begin(chunk + 1) - begin) * UNIT_BYTES;
    if (tile >= next.tiles) return;
    const uint8_t* from = next.units + (static_cast<int64_t>(tile) * next.k_units + begin) * UNIT_BYTES;
    for (int line = lane; line < ahead; line += 32) {
        const int at = STAGES * Ring::BYTES + 128 * line;
        if (at < length) asm volatile("prefetch.global.L2 [%0];" ::"l"(from + at));
    }
}

// ptx::cluster_sync, with this warp as the one that releases.
template <int WARP>
__device__ __forceinline__ void cluster_sync() {
    __syncthreads();
    if (threadIdx.x / 32 == WARP)
        asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    else
        asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ uint32_t load_relaxed(const uint32_t* from) {
    uint32_t v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}

// Of a counter, before this block has arrived.
__device__ __forceinline__ uint32_t first_bit(const uint32_t* met) { return load_relaxed(met) & 0x80000000u; }

// Between links of a chain. `phase` is the first bit of *met, which changes when the last of all blocks arrives.
__device__ __forceinline__ void meet_grid(uint32_t* met, uint32_t& phase) {
    const uint32_t add = blockIdx.x ? 1 : 0x80000000u - (gridDim.x - 1);
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(met), "r"(add) : "memory");
    while ((ptx::ld_acquire(reinterpret_cast<const int*>(met)) & 0x80000000u) == phase);
    phase ^= 0x80000000u;
}

// ---- sums of four rows of a chunk

__device__ __forceinline__ float4 as_floats(const uint4& v) {
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}
template <bool CLUSTER>
__device__ __forceinline__ float4 load_sums(uint32_t from) {
    return as_floats(CLUSTER ? ptx::load_cluster16(from) : ptx::load_shared16(from));
}

// ---- sums by way of memory

// What blocks that are no cluster tell each other by tagged_words.cuh: at first two words of 8 bytes with the state; then
// sums of sections, [pass][block of those that share][tile at once][token][row], with the launch's tag. A graph may
// replay the launch.
struct Exchange {
    uint64_t* words;

    __device__ __forceinline__ tagged::State* state() const { return reinterpret_cast<tagged::State*>(words); }
    // From a block's word to the next block's.
    __device__ __forceinline__ int apart(const Link& p, const Geometry& at) const {
        return p.tokens * TILE << at.tile_shift;
    }
    // The first block's, of the first row; place: of the tile among those at once.
    __device__ __forceinline__ uint64_t* line(const Link& p, const Geometry& at, int pass, int place, int token) const {
        return words + 2 + static_cast<int64_t>(pass << at.cluster_shift) * apart(p, at) +
               (place * p.tokens + token) * TILE;
    }
};

__device__ __forceinline__ void tell(uint64_t* to, const float4& sum, uint32_t tag) {
    tagged::publish_pair(to, sum.x, sum.y, tag);
    tagged::publish_pair(to + 2, sum.z, sum.w, tag);
}

__device__ __forceinline__ void add(float4& to, const float4& v) { to.x += v.x, to.y += v.y, to.z += v.z, to.w += v.w; }

// The sums of `count` times four words at from, from + apart, ..., in this order. HEARD times are asked for at once, and
// again until they have the tag.
__device__ __forceinline__ float4 hear(const uint64_t* from, int apart, int count, uint32_t tag) {
    float4 total = make_float4(-0.f, -0.f, -0.f, -0.f);  // changes no sum
    int tries = 0;
#pragma unroll 1
    for (int begin = 0; begin < count;) {
        uint64_t word[HEARD][4];
        bool all = true;
#pragma unroll
        for (int i = 0; i < HEARD; ++i)
            if (begin + i < count)
#pragma unroll
                for (int two = 0; two < 4; two += 2)
                    asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];"
                                 : "=l"(word[i][two]), "=l"(word[i][two + 1])
                                 : "l"(from + (begin + i) * apart + two)
                                 : "memory");
#pragma unroll
        for (int i = 0; i < HEARD; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) all &= begin + i >= count || static_cast<uint32_t>(word[i][e] >> 32) == tag;
        if (all) {
            const auto low = [](uint64_t one) { return __uint_as_float(static_cast<uint32_t>(one)); };
#pragma unroll
            for (int i = 0; i < HEARD; ++i)
                if (begin + i < count)
                    add(total, make_float4(low(word[i][0]), low(word[i][1]), low(word[i][2]), low(word[i][3])));
            begin += HEARD;
        } else if (++tries == tagged::MOST_TRIES) {  // ends the launch with cudaErrorAssert and this line
            assert(!"linear_decode: time-out, a block waited for the sums of another that never came");
            __trap();
        }
    }
    return total;
}

// The sums of `local` chunks, the first at from(block) and each SUMS floats behind the one before, of blocks 0 to
// blocks - 1. Every `section` chunks are added up by themselves first. TOGETHER of them are loaded before the first is
// added. All counts are powers of two. -0 changes no sum. CLUSTER: of blocks of a cluster, from ptx::in_block.
template <int TOGETHER, bool CLUSTER, class From>
__device__ __forceinline__ float4 add_up(int blocks, int local, int section, const From& from) {
    const int batch = min(min(TOGETHER, section), local);
    float4 total = make_float4(-0.f, -0.f, -0.f, -0.f), sum = total;
    int added = 0;
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
        uint32_t at = from(block);
#pragma unroll 1
        for (int i = 0; i < local; i += batch) {
            float4 some[TOGETHER];
#pragma unroll
            for (int j = 0; j < TOGETHER; ++j)
                if (j < batch) some[j] = load_sums<CLUSTER>(at + j * SUMS * 4);
#pragma unroll
            for (int j = 0; j < TOGETHER; ++j)
                if (j < batch) add(sum, some[j]);
            at += batch * SUMS * 4, added += batch;
            if (added & section - 1) continue;
            add(total, sum);
            sum = make_float4(-0.f, -0.f, -0.f, -0.f);
        }
    }
    return total;
}

// NT: tiles of 8 tokens; STAGES: of a warp's ring. Grid: clusters of p.cluster blocks. CHAIN: all links in one launch,
// so that rings are full of the next link's weights when its input is ready. A warp more then asks for inputs, waits
// for the other blocks and releases at the cluster's barrier: a release waits for all copies that the warp has under
// way, and it has none.
template <int FORMAT, int NT, int STAGES, bool CHAIN>
__global__ void __launch_bounds__(THREADS + 32 * CHAIN, 1)
    link_kernel(const __grid_constant__ Jobs<CHAIN ? MOST_LINKS : 1> jobs) {
    extern __shared__ __align__(128) uint8_t smem[];
    using Ring = Stage<FORMAT, NT>;
    constexpr int Q = NT < 4 ? 2 : 1;             // of fp8: halves of a tile's rows at once, since registers are few
    constexpr int TOGETHER = NT == 4 ? 2 : 4;     // sums that are loaded at once: as registers allow
    constexpr int MESSENGER = CHAIN ? WARPS : 0;  // the warp that asks and releases
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, c = lane & 3;
    const bool works = !CHAIN || warp < WARPS, asks = threadIdx.x == 32 * MESSENGER;
    // Offsets up to the input are those of all links.
    const uint32_t barrier = ptx::smem_address(smem + jobs.job[0].at.x - BARRIER);
    uint32_t phase = 0;
    uint32_t ring = ptx::smem_address(smem) + warp * STAGES * Ring::BYTES + 16 * lane;  // what the lane reads first
    const uint32_t fulls = ptx::smem_address(smem) + WARPS * STAGES * Ring::BYTES + warp * STAGES * 8;
    if (STAGES != 2) hold(ring);
    if (elected<NT>(lane)) {
        if (works)  // a barrier for each stage of the warp
            for (int i = 0; i < STAGES; ++i) ptx::barrier_init(fulls + 8 * i, 1);
        if (warp == MESSENGER) ptx::barrier_init(barrier, 1), ptx::store_shared(barrier + PARITY, 0);
        ptx::barrier_publish();
    }
    // A warp's barriers are its own, and that of the input is known once it has been asked for. With four tiles of
    // tokens, of fp8, racecheck takes each warp for the one that makes the latter.
    if (CHAIN || NT == 4)
        __syncthreads();
    else
        __syncwarp();
    const auto job_of = [&](int link) -> const Job& { return jobs.job[CHAIN ? link : 0]; };
    const Share first_share(job_of(0).p, job_of(0).at, Ring::UNITS);
    // Up to 8 tokens there are registers to keep it.
    const auto share_of = [&](int link) {
        return CHAIN || NT > 1 ? Share(job_of(link).p, job_of(link).at, Ring::UNITS) : first_share;
    };
    const auto group_of = [](const Geometry& at, int pass) {
        return static_cast<int>(at.group_passes.quotient(pass));
    };
    const auto tile_of = [](const Geometry& at, int place, int pass, int group) {  // of the group
        return (pass - group * static_cast<int>(at.group_passes.by) << at.tile_shift) + place;
    };

    // ---- copies, in the order of use, from one link to the next
    int fill_link = 0, ahead = works ? first_share.first_pass : 1 << 30;  // the link and pass after that which is
    uint32_t left = 0, from = 0;  // being copied; of this, parts that are left, and the next one among the link's
    // A bulk copy may overtake loads of the same place that the warp has issued before: so its address depends on a
    // word that was loaded last, `used`, though by 0 only.
    const uint32_t at_zero = jobs.job[0].at.zero;
    const auto next_tile = [&] {
        while (!left) {
            const Job& job = job_of(fill_link);
            if (ahead >= job.at.passes) {
                if (!CHAIN || !works || fill_link + 1 >= jobs.count) return;
                ahead = blockIdx.x >> job_of(++fill_link).at.cluster_shift;
                continue;
            }
            const Share own = share_of(fill_link);
            const int group = group_of(job.at, ahead), tile = tile_of(job.at, own.place, ahead, group);
            if (tile < job.p.group_tiles) {
                const uint32_t unit = (group * job.p.group_tiles + tile) * job.p.k_units + own.begin;  // of the link
                from = unit * Ring::OF_UNIT;
                left = own.length * Ring::OF_UNIT;
            }
            ahead += job.at.clusters;
        }
    };
    next_tile();
    // Asks for what is left of a tile, in up to `stages` stages from this one on; -> how many it takes.
    const auto fill = [&](uint32_t to, uint32_t full, uint32_t used, int stages) -> int {
        const uint32_t parts = min(left, static_cast<uint32_t>(stages * Ring::PARTS));
        if (!parts) return 0;
        if (elected<NT>(lane)) {
            const uint8_t* units = job_of(fill_link).p.units + static_cast<uint64_t>(from) * Ring::PART_BYTES;
            uint32_t i = 0;
#pragma unroll 1
            do {
                const uint32_t bytes = min(parts - i, static_cast<uint32_t>(Ring::PARTS)) * Ring::PART_BYTES;
                ptx::arrive_and_expect_tx(full, bytes);
                load_weights(to + (used & at_zero), units, bytes, full);
                to += Ring::BYTES, full += 8, units += Ring::BYTES, i += Ring::PARTS;
            } while (stages > 1 && i < parts);
        }
        from += parts, left -= parts;
        next_tile();
        return (parts + Ring::PARTS - 1) / Ring::PARTS;
    };
    uint32_t stage = ring, full = fulls, stage_parity = 0;  // stage, full: of the one to be used next
    const auto fill_first = [&](int i, int end) {  // stages, before any is used
#pragma unroll 1
        while (i < end && left) i += fill(stage + i * Ring::BYTES, full + i * 8, 0, end - i);
    };
#pragma unroll 1
    for (int link = 0; link < (CHAIN ? jobs.count : 1); ++link) {
        const Link& p = job_of(link).p;
        const Next& next = job_of(link).next;
        const Geometry& at = job_of(link).at;
        const Share own = CHAIN ? share_of(link) : first_share;
        const int begin = own.begin, first = own.slice * COLUMNS;
        uint32_t length = own.length;
        hold(length);
        const int local = 1 << at.local_shift;
        const auto ask_for = [&](int group, const Share& own) {
            copy_input(p, at, smem, p.x + group * p.group_columns, own.slice * COLUMNS, own.count);
        };
        // What a warp needs of a tile besides its units. fp8: lane i the scale of the chunk's block i;
        // nvfp4: the factor.
        const auto scale_of = [&](const Share& own, int group, int pass) -> uint32_t {
            const int tile = tile_of(at, own.place, pass, group);
            const uint32_t row = group * p.group_tiles + tile, block = own.begin / 2 + lane;
            if (FORMAT == BF16 || tile >= p.group_tiles || !works) return 0;
            if (FORMAT == NVFP4) return __float_as_uint(p.factors[row]);
            const uint32_t blocks = (p.k_units + 1) / 2;
            return block < blocks ? p.scales[row * blocks + block] : 0;
        };
        const bool converts = CONVERTS<FORMAT, NT> && !p.taken && (FORMAT == FP8 || p.quantise);
        const auto input_scale_of = [&](int group) {
            return FORMAT == NVFP4 && converts ? p.input_scales[group] : 1.f;
        };
        uint32_t mine = 0;  // both are asked for before the input is waited for
        float input_scale = 1;
        const bool has_passes = !CHAIN || own.first_pass < at.passes;
        const int first_group = group_of(at, own.first_pass);
        // A short input that the block converts comes to registers, sooner than by a copy that all wait for.
        const Pieces<FORMAT> pieces(p, own.count);
        const bool direct =
            link == 0 && NT == 1 && converts && has_passes && pieces.whole <= DIRECT * THREADS;
        uint4 norm_weights[DIRECT] = {};
        const auto ask_scales = [&] {
            if (!has_passes) return;
            mine = scale_of(own, first_group, own.first_pass);
            input_scale = input_scale_of(first_group);
            if (!CHAIN && p.norm && direct)
#pragma unroll
                for (int j = 0; j < DIRECT; ++j)
                    if (const auto place = pieces.place(threadIdx.x + j * THREADS); place.inside)
                        norm_weights[j] = reinterpret_cast<const uint4*>(p.norm)[place.piece];  // no kernel writes them
        };
        uint4 raw[DIRECT] = {};
        const auto take_input = [&] {
            if (!direct) {
                if (asks && has_passes) ask_for(first_group, own);
                if (!CHAIN) __syncthreads();  // all know the barrier
                return;
            }
#pragma unroll
            for (int j = 0; j < DIRECT; ++j) {
                const auto place = pieces.place(threadIdx.x + j * THREADS);
                if (works && place.inside)  // the messenger's would be pieces of warp 0
                    raw[j] = load_input(p.x + (place.token * p.x_columns + first_group * p.group_columns + first +
                                               PIECE * place.piece));
            }
        };
        // Memory is idle while a link of a chain waits; of a single link more copies would delay the input.
        const int asked = at.early || direct ? STAGES : Ring::BEFORE;
        if (link == 0) {
            // The input first where no kernel ahead is to be waited for, else the weights.
            if (!at.early) take_input();
            fill_first(0, asked);
            ask_scales();
            programmatic::trigger();  // the next link may begin to copy its weights
            if (at.early) {
                programmatic::wait();  // until the link ahead has written the input
                take_input();
            }
            if (CHAIN && asks) phase = first_bit(jobs.met);
        } else {
            ask_scales();
            if (asks) {
                meet_grid(jobs.met, phase);
                ptx::fence_proxy_async();
                if (has_passes) ask_for(first_group, own);
            }
        }

        float behind_scale = 0;  // lane i has that of group i of the link behind
        if (FORMAT == NVFP4 && next.taken && lane * next.k_units * COLUMNS < next.taken_columns)
            behind_scale = next.input_scales[lane];
        uint32_t input[NT];  // its rows, at the lane's first columns of the next unit
#pragma unroll
        for (int t = 0; t < NT; ++t)  // columns without a token take the last one's
            input[t] = ptx::smem_address(smem + at.x) + min(8 * t + g, p.tokens - 1) * at.row_bytes + 32 * c +
                      (begin - own.slice) * COLUMNS * 2;
        uint32_t x_scales = ptx::smem_address(smem + at.x_scales) + 8 * c + (begin - own.slice) / 2 * NT * 32;
        if (NT == 1) hold(input[0]);
        if (FORMAT == FP8) hold(x_scales);
        uint32_t to_scales = units::SCALES - 12 * lane;  // nvfp4: of a unit, from what the lane reads first
        if (FORMAT == NVFP4) hold(to_scales);

        const Exchange exchange = {p.exchange};
        // A lane has the sums of four rows of a tile of the link, of one token, and their gates'; eight lanes have all
        // rows. All lanes call this.
        const auto put = [&](bool inside, int of_link, int token, const float4& gates, float4 total) {
            if (p.gated) {
                const auto gated = [&](float gate, float v) {
                    gate = fminf(gate, p.limit);
                    return gate / (1 + __expf(-gate)) * fminf(fmaxf(v, -p.limit), p.limit);
                };
                total = make_float4(gated(gates.x, total.x), gated(gates.y, total.y), gated(gates.z, total.z),
                                    gated(gates.w, total.w));
            }
            int part = 0;
#pragma unroll
            for (int i = 1; i < MOST_PARTS; ++i) part += i < p.parts && of_link >= p.part[i].tile;
            const int column = (of_link - p.part[part].tile >> p.gated) * TILE + 4 * (lane & 7);
            const uint2 rounded = {ptx::pack_bf16x2(total.x, total.y), ptx::pack_bf16x2(total.z, total.w)};
            if (inside)
                *reinterpret_cast<uint2*>(p.part[part].out + static_cast<int64_t>(token) * p.part[part].columns +
                                          column) = rounded;
            if (FORMAT == NVFP4 && next.taken)
                write_behind(next, inside && part == 0, token, column, rounded, behind_scale);
        };

        if (!CHAIN && p.exchange && threadIdx.x == 0)
            ptx::store_shared(barrier + TAG, load_relaxed(&exchange.state()->tag) + 1);
        // Behind all that can be worked out while the input is under way.
        if constexpr (CONVERTS<FORMAT, NT>)
            if (direct) {
                if (!CHAIN && p.norm)
                    norm_pieces(p, pieces, reinterpret_cast<float*>(smem + at.sums), raw, norm_weights);
                const float inverse = __frcp_rn(input_scale);
#pragma unroll
                for (int j = 0; j < DIRECT; ++j)
                    if (const int i = threadIdx.x + j * THREADS; works && i < pieces.whole)
                        convert_piece<FORMAT>(p, at, smem, pieces.place(i), raw[j], input_scale, inverse);
            }

#pragma unroll 1
        for (int pass = own.first_pass; pass < at.passes; pass += at.clusters) {
            const int group = group_of(at, pass), tile = tile_of(at, share_of(link).place, pass, group);
            const bool begins = pass < at.clusters;
            // Whether the input in shared memory is not this group's.
            if (begins || pass - at.clusters < group * static_cast<int>(at.group_passes.by)) {
                const Share again = share_of(link);
                uint32_t parity = 1;
                if (!begins) {
                    if (asks) ask_for(group, again);
                    input_scale = input_scale_of(group);
                }
                if (FORMAT == FP8 && p.taken) take_scales<NT>(p, at, smem, group, again);
                if (!direct || !begins) {
                    parity = ptx::load_shared(barrier + PARITY);
                    ptx::wait(barrier, parity);
                    if (link == 0 && begins) fill_first(asked, STAGES);  // not before: the input would come behind them
                }
                if constexpr (CONVERTS<FORMAT, NT>) {
                    if (converts && works && !(direct && begins)) {
                        if constexpr (FORMAT == NVFP4)
                            convert_nvfp4_input(p, at, smem, pieces, input_scale, threadIdx.x);
                        else if (p.quantise)
                            convert_fp8_input<true, NT>(p, at, smem, again.count, threadIdx.x);
                        else
                            convert_fp8_input<false, NT>(p, at, smem, again.count, threadIdx.x);
                    }
                }
                __syncthreads();
                if (asks && !(direct && begins)) ptx::store_shared(barrier + PARITY, parity ^ 1);
            }
            float sum[2][NT][4] = {};
            if (tile < p.group_tiles && works) {
                if (FORMAT != BF16 && !begins) mine = scale_of(share_of(link), group, pass);
#pragma unroll 1
                for (uint32_t unit = 0; unit < length; unit += Ring::PARTS) {  // of the chunk
                    const uint32_t block = unit / 2;
#pragma unroll
                    for (int half = 0; half < Ring::OF_UNIT; ++half) {
                        ptx::wait(full, stage_parity);
                        uint32_t used = 0;
                        if constexpr (FORMAT == FP8) {
                            const float of_weights = __uint_as_float(__shfl_sync(~0u, mine, block) << 23);
                            const uint32_t scales_at = x_scales + block * NT * 32;
                            float both[NT][2];
#pragma unroll
                            for (int t = 0; t < NT; ++t) {
                                const float2 of_input = ptx::load_shared_pair(scales_at + t * 32);
                                both[t][0] = of_weights * of_input.x, both[t][1] = of_weights * of_input.y;
                            }
#pragma unroll
                            for (int part = 0; part < Ring::PARTS; ++part) {
                                if (part && unit + 1 == length) break;
                                uint32_t columns[NT];
#pragma unroll
                                for (int t = 0; t < NT; ++t) columns[t] = input[t] + part * COLUMNS * 2;
#pragma unroll
                                for (int q = 0; q < 2; q += Q) {
                                    float of_unit[Q][NT][4] = {};
                                    used = multiply_fp8(of_unit, stage + part * Ring::PART_BYTES + 1024 * q, columns);
#pragma unroll
                                    for (int t = 0; t < NT; ++t)
#pragma unroll
                                        for (int r = 0; r < Q; ++r)
#pragma unroll
                                            for (int i = 0; i < 4; ++i)
                                                sum[q + r][t][i] =
                                                    fmaf(of_unit[r][t][i], both[t][i & 1], sum[q + r][t][i]);
                                }
                            }
                        }
                        if constexpr (FORMAT == NVFP4) {
                            const Words one(stage, to_scales);
                            if (unit + 1 < length) {  // both loaded before the first is multiplied
                                const Words two(stage + Ring::PART_BYTES, to_scales);
                                uint32_t behind[NT];
#pragma unroll
                                for (int t = 0; t < NT; ++t) behind[t] = input[t] + COLUMNS * 2;
                                multiply_nvfp4(sum, one, input);
                                multiply_nvfp4(sum, two, behind);
                                used = two.last();
                            } else {
                                multiply_nvfp4(sum, one, input);
                                used = one.last();
                            }
                        }
                        if constexpr (FORMAT == BF16) {
                            used = multiply_bf16(sum, stage, input, half);
                        }
                        __syncwarp();  // all lanes have read
                        fill(stage, full, used, 1);
                        // Two barriers lie at a multiple of 16; otherwise the ring's place is kept.
                        const bool last = STAGES == 2 ? full & 8 : stage == ring + (STAGES - 1) * Ring::BYTES;
                        stage += last ? -(STAGES - 1) * Ring::BYTES : Ring::BYTES, full += last ? -8 * (STAGES - 1) : 8;
                        stage_parity ^= last;
                    }
#pragma unroll
                    for (int t = 0; t < NT; ++t) input[t] += Ring::PARTS * COLUMNS * 2;
                }
#pragma unroll
                for (int t = 0; t < NT; ++t)
                    input[t] -= (length + Ring::PARTS - 1) / Ring::PARTS * Ring::PARTS * COLUMNS * 2;
            }

            if (!CHAIN && next.units && pass + at.clusters >= at.passes)
                fetch_ahead<FORMAT, NT, STAGES>(next, p.ahead, block_index() * WARPS + warp, lane);

            // ---- the chunks' sums, in the order of k
            const int held_shift = NT == 1 ? 0 : at.held_shift;
#pragma unroll 1
            for (int t = 0; t < NT; t += 1 << held_shift) {
                const uint32_t sums = ptx::smem_address(smem + at.sums);
                const float factor = FORMAT == NVFP4 ? __uint_as_float(mine) : 1;
#pragma unroll
                for (int u = 0; u < NT; ++u)
                    if (u >> held_shift == t >> held_shift)
#pragma unroll
                        for (int odd = 0; odd < 2; ++odd) {
                            const int token = 2 * c + odd;
                            if (8 * u + token >= p.tokens || !works) continue;
                            const uint32_t to = sums + 4 * (((u - t) * WARPS + warp) * SUMS + token * PAD + g);
#pragma unroll
                            for (int r = 0; r < 4; ++r) {  // row g + 8 r
                                const float v = sum[r / 2][u][odd + r % 2 * 2];
                                ptx::store_shared(to + 32 * r, __float_as_uint(v * factor));
                            }
                        }
                const auto sum_at = [&](int slot, int token) {  // of a chunk of this block; token: of those held
                    return sums + 4 * ((token / 8 * WARPS + slot) * SUMS + token % 8 * PAD + 4 * (lane & 7));
                };
                const int of_round = min(8 << held_shift, p.tokens - 8 * t);  // tokens
                const int rank = share_of(link).rank;
                if (!CHAIN && p.exchange) {
                    __syncthreads();
                    const uint32_t tag = ptx::load_shared(barrier + TAG);
#pragma unroll 1
                    for (int line = 4 * warp + lane / 8; line < of_round << at.tile_shift; line += 4 * WARPS) {
                        const int token = line >> at.tile_shift, place = line & (1 << at.tile_shift) - 1;
                        const uint32_t from = sum_at(place << at.local_shift, token);
                        const float4 total = add_up<TOGETHER, false>(1, local, local, [&](int) { return from; });
                        uint64_t* to = exchange.line(p, at, pass, place, 8 * t + token);
                        tell(to + rank * exchange.apart(p, at) + 4 * (lane & 7), total, tag);
                    }
                    __syncthreads();  // all have read
                    continue;
                }
                const auto meet = [&] {
                    if (p.cluster > 1)
                        cluster_sync<MESSENGER>();
                    else
                        __syncthreads();
                };
                meet();
                const int first_shift = at.tile_shift - p.gated;  // tiles, or pairs of them
                const int lines = works ? of_round << first_shift : 0;
#pragma unroll 1
                for (int four = 4 * (warp * p.cluster + rank); four < lines; four += 4 * p.cluster * WARPS) {
                    const int line = min(four + lane / 8, lines - 1), token = line >> first_shift;
                    const int first = (line & (1 << first_shift) - 1) << p.gated;
                    const int of_group = tile_of(at, first, pass, group);
                    float4 total = {}, gate = {};
#pragma unroll 1
                    for (int which = first; which <= first + p.gated; ++which) {
                        gate = total;
                        const uint32_t here = sum_at(which << at.local_shift, token);
                        if (p.cluster == 1)
                            total = add_up<TOGETHER, false>(1, local, p.section, [&](int) { return here; });
                        else
                            total = add_up<TOGETHER, true>(p.cluster, local, p.section,
                                                           [&](int block) { return ptx::in_block(block, here); });
                    }
                    const bool inside = four + lane / 8 < lines && of_group < p.group_tiles;
                    put(inside, group * p.group_tiles + of_group, 8 * t + token, gate, total);
                }
                // All have read, where they are written again or another block reads.
                if (CHAIN || NT > 1 || p.cluster > 1 || pass + at.clusters < at.passes) meet();
            }
        }

        if (!CHAIN && p.exchange) {  // ---- the sections' sums, in the order of k; of all passes, so blocks wait once
            const uint32_t tag = ptx::load_shared(barrier + TAG);
            if (threadIdx.x == 0) tagged::leave(exchange.state(), tag);
            const int first_shift = at.tile_shift - p.gated;
            const Share own = share_of(link);
#pragma unroll 1
            for (int pass = own.first_pass; pass < at.passes; pass += at.clusters) {
                const int group = group_of(at, pass);
#pragma unroll 1
                for (int four = 4 * (warp * p.cluster + own.rank); four < p.tokens << first_shift;
                     four += 4 * p.cluster * WARPS) {
                    const int lines = p.tokens << first_shift;
                    const int line = min(four + lane / 8, lines - 1), token = line >> first_shift;
                    const int first = (line & (1 << first_shift) - 1) << p.gated;
                    const int of_group = tile_of(at, first, pass, group);
                    float4 total = {}, gate = {};
#pragma unroll 1
                    for (int which = first; which <= first + p.gated; ++which) {
                        const uint64_t* from = exchange.line(p, at, pass, which, token) + 4 * (lane & 7);
                        gate = total, total = hear(from, exchange.apart(p, at), p.cluster, tag);
                    }
                    const bool inside = four + lane / 8 < lines && of_group < p.group_tiles;
                    put(inside, group * p.group_tiles + of_group, token, gate, total);
                }
            }
        }
        if (CHAIN && link == 0 && !has_passes) fill_first(asked, STAGES);
    }
}

// ---- launcher

cudaError_t multiprocessors(int* count) { return cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, 0); }

constexpr int DEPTH = 2;  // stages of a ring

template <int FORMAT, int NT, int STAGES>
constexpr int RING = WARPS * STAGES * (Stage<FORMAT, NT>::BYTES + 8);  // with barriers

// With rings of the first of these depths that there is room for.
template <int FORMAT, int NT, int STAGES, int... FEWER>
cudaError_t run(const Link& p, const Next& next, bool behind) {
    int sms = 0;
    if (cudaError_t error = multiprocessors(&sms)) return error;
    const Geometry at(p, FORMAT, NT, RING<FORMAT, NT, STAGES>, Stage<FORMAT, NT>::UNITS, sms, behind);
    if constexpr (sizeof...(FEWER))
        if (at.bytes > MOST_SHARED) return run<FORMAT, NT, FEWER...>(p, next, behind);
    const auto kernel = link_kernel<FORMAT, NT, STAGES, false>;
    if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, at.bytes))
        return error;
    const Jobs<1> jobs = {{{at, p, next}}, 1, nullptr};
    const dim3 grid(at.clusters * p.cluster);
    if (p.exchange)
        return behind ? programmatic::launch_resident(kernel, grid, THREADS, at.bytes, jobs)
                      : programmatic::launch_cooperative(kernel, grid, THREADS, at.bytes, jobs);
    return programmatic::launch_clusters(kernel, grid, THREADS, at.bytes, p.cluster, behind, jobs);
}

template <int FORMAT, int STAGES, int... FEWER>
cudaError_t run_chain(Jobs<MOST_LINKS>& jobs) {
    int sms = 0, cluster = 1, blocks = 0, bytes = 0;
    if (cudaError_t error = multiprocessors(&sms)) return error;
    for (int i = 0; i < jobs.count; ++i) {
        const Link& p = jobs.job[i].p;
        const Geometry& at = jobs.job[i].at =
            Geometry(p, FORMAT, 1, RING<FORMAT, 1, STAGES>, Stage<FORMAT, 1>::UNITS, sms, false);
        cluster = max(cluster, p.cluster), blocks = max(blocks, at.clusters * p.cluster), bytes = max(bytes, at.bytes);
    }
    if constexpr (sizeof...(FEWER))
        if (bytes > MOST_SHARED) return run_chain<FORMAT, FEWER...>(jobs);
    const auto kernel = link_kernel<FORMAT, 1, STAGES, true>;
    if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
        return error;
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = cluster, attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeCooperative;  // blocks wait for each other, so all have to run at once
    attributes[1].val.cooperative = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = (blocks + cluster - 1) / cluster * cluster, config.blockDim = THREADS + 32;
    config.dynamicSmemBytes = bytes, config.attrs = attributes, config.numAttrs = 2;
    return cudaLaunchKernelEx(&config, kernel, jobs);
}

template <int FORMAT>
cudaError_t quantise(const Link& p, bool behind) {
    const int lanes = p.tokens * p.groups() * ((p.k_units * COLUMNS + BLOCK - 1) / BLOCK) * (BLOCK / PIECE);
    const dim3 grid((lanes + QUANTISERS - 1) / QUANTISERS);
    return programmatic::launch_clusters(quantise_kernel<FORMAT>, grid, QUANTISERS, 0, 1, behind, p);
}

template <int FORMAT, int NT, int STAGES>
bool has_room(const Link& p) {
    const int sms = p.cluster;  // of no meaning here
    return Geometry(p, FORMAT, NT, RING<FORMAT, NT, STAGES>, Stage<FORMAT, NT>::UNITS, sms, false).bytes <= MOST_SHARED;
}

// Whether a launch has the link; together: in one of a chain. sm90_mma.py sends nothing else, and a test holds it to
// this. What norms its input is of one group, which each block has whole, in registers.
template <int FORMAT>
bool admits(const Link& p, bool together) {
    const int k = p.k_units * COLUMNS;
    const bool converts = FORMAT == FP8 || p.quantise;
    if (p.tokens < 1 || p.tokens > (together ? 8 : 32)) return false;
    if (converts && p.tokens > (FORMAT == FP8 ? 16 : 8) && !p.taken) return false;  // more are taken ahead
    const Cut cut = {p.k_units, log2_of(p.chunks), Stage<FORMAT, 1>::UNITS};
    if (FORMAT == FP8 && cut.longest(1) * COLUMNS > 32 * BLOCK) return false;  // a lane has a scale of the chunk
    if (p.exchange ? together || p.cluster * p.section != p.chunks || p.cluster > MOST_SECTIONS || p.section > MOST_TOLD
                   : p.cluster > MOST_CLUSTER)
        return false;
    if (p.norm && (together || !converts || p.taken || p.tokens > 8 || p.cluster > 1 || p.groups() > 1 ||
                   k % (32 * PIECE) || p.tokens * k > DIRECT * THREADS * PIECE))
        return false;
    if (together) return FORMAT == NVFP4 && has_room<FORMAT, 1, 2>(p);
    return p.tokens > 16  ? has_room<FORMAT, 4, DEPTH>(p)
           : p.tokens > 8 ? has_room<FORMAT, 2, DEPTH>(p)
                          : has_room<FORMAT, 1, 1>(p);
}

// DEEP: of a link whose ring is filled while it waits.
template <int FORMAT, int DEEP>
cudaError_t choose(const Link& p, const Next& next, bool behind, bool deep) {
    if (!admits<FORMAT>(p, false)) return cudaErrorInvalidValue;
    if (p.tokens > 16) return run<FORMAT, 4, DEPTH>(p, next, behind);
    if (p.tokens > 8) return run<FORMAT, 2, FORMAT == FP8 ? 3 : DEPTH, DEPTH>(p, next, behind);
    return deep ? run<FORMAT, 1, DEEP, DEPTH, 1>(p, next, behind) : run<FORMAT, 1, DEPTH, 1>(p, next, behind);
}

}  // namespace

extern "C" {

// given: `count` Links. ahead: of the first so many of them a kernel takes the input; the others' `taken` is written
// by the link ahead. format: as in Format. met: null for a launch a link, each behind the first dependent on the one
// ahead; else all, nvfp4 of at most 8 tokens, are one launch, and it is a word of zero that the launch leaves so, but
// for its first bit. early: whether the first launch may begin before the kernel ahead has ended; nothing that it
// reads before it waits may be written by kernels that are under way then: units, scales, factors, input scales, norm.
// One launch of all links is never early. -> a cudaError_t.
int launch(const void* given, int count, int ahead, int format, uint32_t* met, int early) {
    const Link* links = static_cast<const Link*>(given);  // a type of this file, which would hide the function
    if (met && (format != NVFP4 || count > MOST_LINKS || ahead)) return cudaErrorInvalidValue;
    Jobs<MOST_LINKS> jobs = {};
    jobs.count = count, jobs.met = met;
    for (int i = 0; i < count; ++i) {
        Link link = links[i];
        if (i < ahead)
            if (cudaError_t error = (format == FP8 ? quantise<FP8> : quantise<NVFP4>)(link, i > 0 || early)) return error;
        if (link.taken) {
            link.x = reinterpret_cast<const __nv_bfloat16*>(link.taken);
            link.group_columns = link.k_units * COLUMNS, link.x_columns = link.groups() * link.group_columns;
        }
        Next next = {};
        if (i + 1 < count) {
            const Link& behind = links[i + 1];
            next = {behind.units, behind.tiles, behind.k_units, log2_of(behind.chunks)};
            next.input_scales = behind.input_scales, next.x_columns = behind.x_columns;
            next.taken_columns = behind.groups() * behind.k_units * COLUMNS;
            if (i + 1 >= ahead) next.taken = behind.taken;
        }
        if (met) {
            if (!admits<NVFP4>(link, true)) return cudaErrorInvalidValue;
            jobs.job[i].p = link, jobs.job[i].next = next;
            continue;
        }
        const bool behind = i > 0 || ahead > 0 || early, deep = count > 1 || early;
        const cudaError_t error = format == FP8     ? choose<FP8, 3>(link, next, behind, deep)
                                  : format == NVFP4 ? choose<NVFP4, 3>(link, next, behind, deep)
                                                    : choose<BF16, 4>(link, next, behind, deep);
        if (error) return error;
    }
    if (!met) return cudaSuccess;
    return run_chain<NVFP4, 4, 3, 2>(jobs);
}

// -> 1 if `launch` has the Link `given`, 0 where it returns an error; together: in one launch of a chain. Needs no GPU.
int takes(const void* given, int format, int together) {
    const Link& p = *static_cast<const Link*>(given);
    return format == FP8     ? admits<FP8>(p, together)
           : format == NVFP4 ? admits<NVFP4>(p, together)
                             : admits<BF16>(p, together);
}

// NVFP4 codes (matrices, rows, columns / 2) and scales (matrices, rows, columns / 16) -> units. -> a cudaError_t.
int repack_nvfp4(const uint8_t* codes, const uint8_t* scales, uint8_t* to, int matrices, int rows, int columns) {
    return units::repack(codes, scales, to, matrices, rows, columns, false);
}

}  // extern "C"
