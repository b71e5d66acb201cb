// Scores of entries by FP8 tensor cores: keys are the left operand, which wgmma takes from registers.
//
// Each warp copies its own 16 keys of a tile into a ring in shared memory, several tiles ahead, by cp.async: a group of
// copies is waited for by its number. (Loads into registers do not stay apart: the machine code had one scoreboard for all
// of a ring's loads, so that each tile waited for the load that had just begun.)
//
// A warpgroup takes tiles of 64 entries. The rows of wgmma's A are keys and the columns of B the heads of the query.
// The order in which a product runs over the 128 dims is free as long as A and B agree: here step s, half h, quad lane t
// and byte i stand for dim 32 t + 8 s + 4 h + i. So what a lane holds of a key are 32 dims that lie side by side: 16
// bytes of e2m1, which share a scale, or 32 bytes of e4m3. q is brought into that order once.
//
// e2m1 * 2^d is an e4m3 for d of -8 to 6. A key's largest group gets d = 6, the others less, by a table; the key's score
// is multiplied by the largest scale in the end. A head of q is brought to e4m3's upper end in the same way.
#pragma once

#include <cuda_bf16.h>

#include <cfloat>
#include <cstdint>

#include "ptx.cuh"

namespace indexer {

constexpr int DIM = 128;
constexpr int HEADS = 64;  // columns of the products; those beyond a query's have weight 0
constexpr int TILE = 64;   // entries of a warpgroup's product
constexpr int SHIFTS = 15;  // 2^-8 to 2^6
constexpr int WARP = 32;

struct Sizes {
    int queries, heads, topk, blocks, page_shift, rows;
    int64_t stride;  // bytes of a page
};

// The tensors of task.Data.
struct Tensors {
    const __nv_bfloat16* q;
    const float* weights;
    const uint8_t* keys;
    const int* table;
    const int* visible;
    int* out;
};

// What a block keeps of a query while it scores.
struct __align__(1024) Query {
    uint8_t q[HEADS * DIM];  // e4m3, rows of 128 bytes in the order above, swizzled as make_smem_desc says
    float weights[HEADS];    // times half the heads' scales
    uint2 table[SHIFTS + 1];  // e4m3 of the magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6 times 2^(i - 8)
};

// Integers that order as the scores do, and back; -0 as 0.
__device__ __forceinline__ uint32_t ordered(float score) {
    const uint32_t bits = __float_as_uint(score + 0.0f);
    return bits ^ (static_cast<uint32_t>(static_cast<int>(bits) >> 31) | 0x80000000u);
}
__device__ __forceinline__ float score_of(uint32_t key) {
    return __uint_as_float(key >> 31 ? key ^ 0x80000000u : ~key);
}

__device__ __forceinline__ uint32_t pack_e4m3x4(float a, float b, float c, float d) {
    const uint16_t low = ptx::pack_e4m3x2(a, b), high = ptx::pack_e4m3x2(c, d);
    return static_cast<uint32_t>(high) << 16 | low;
}

// The sum or the like over 8 lanes side by side.
__device__ __forceinline__ uint32_t most_of_8(uint32_t v) {
#pragma unroll
    for (int apart = 1; apart < 8; apart *= 2) v = max(v, __shfl_xor_sync(~0u, v, apart));
    return v;
}

// A thread's part of a query, 16 dims of a head, on the way to shared memory: eight threads a head.
template <int THREADS>
struct QueryParts {
    static constexpr int COUNT = (HEADS * 8 + THREADS - 1) / THREADS;  // some threads may have none
    uint4 raw[COUNT][2];
    float weight[COUNT];

    // Begin to load.
    __device__ __forceinline__ void load(const Tensors& data, const Sizes& sizes, int row) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int part = threadIdx.x + i * THREADS, head = part / 8;
            raw[i][0] = raw[i][1] = make_uint4(0, 0, 0, 0), weight[i] = 0.0f;
            if (head < sizes.heads) {
                const int64_t at = static_cast<int64_t>(row) * sizes.heads + head;
                const uint4* from = reinterpret_cast<const uint4*>(data.q + at * DIM + part % 8 * 16);
                raw[i][0] = __ldg(from), raw[i][1] = __ldg(from + 1);
                weight[i] = __ldg(data.weights + at);
            }
        }
    }
    // Write e4m3. All threads of the block call it; what is stored may be read after fence and block barrier.
    __device__ __forceinline__ void store(Query& query) const {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int part = threadIdx.x + i * THREADS, head = part / 8, first = part % 8 * 16;
            const uint32_t words[8] = {raw[i][0].x, raw[i][0].y, raw[i][0].z, raw[i][0].w,
                                       raw[i][1].x, raw[i][1].y, raw[i][1].z, raw[i][1].w};
            uint32_t most = 0;  // magnitudes of bf16 order as their bits do
#pragma unroll
            for (int j = 0; j < 8; ++j) most = max(most, max(words[j] & 0x7FFF, words[j] >> 16 & 0x7FFF));
            most = most_of_8(most);
            // The power of two under which the largest is at most 448 = 1.75 * 2^8: one more where it is above 1.75.
            const uint32_t exponent = max((most + 0x1F) >> 7, 40u);
            const float up = __uint_as_float((127 + 8 + 127 - exponent) << 23);
            const float down = __uint_as_float((exponent - 8) << 23);
            if (head >= HEADS) break;
#pragma unroll
            for (int j = 0; j < 4; ++j) {  // 4 dims each: first + 4 j on
                const uint32_t a = words[2 * j], b = words[2 * j + 1];
                const uint32_t packed =
                    pack_e4m3x4(__uint_as_float(a << 16) * up, __uint_as_float(a & 0xFFFF0000) * up,
                                __uint_as_float(b << 16) * up, __uint_as_float(b & 0xFFFF0000) * up);
                const int dim = first + 4 * j, step = dim % 32 / 8, half = dim % 8 / 4, lane = dim / 32;
                const int at_byte = 32 * step + 16 * half + 4 * lane, chunk = at_byte / 16 ^ head % 8;
                *reinterpret_cast<uint32_t*>(query.q + head * DIM + chunk * 16 + at_byte % 16) = packed;
            }
            if (part % 8 == 0) query.weights[head] = weight[i] * (0.5f * down);
        }
        if (threadIdx.x < SHIFTS) {
            const float unit = __uint_as_float((127 - 8 + threadIdx.x) << 23);
            query.table[threadIdx.x] = make_uint2(pack_e4m3x4(0, .5f * unit, unit, 1.5f * unit),
                                                  pack_e4m3x4(2 * unit, 3 * unit, 4 * unit, 6 * unit));
        }
    }
};

// What a lane multiplies of two keys of a tile, 8 apart: its 32 dims and the scales.
template <bool FP8>
struct Loaded {
    uint4 codes[2][FP8 ? 2 : 1];
    uint32_t scales[2];
};

// Entries [first, first + count) of a sequence, first a multiple of TILE, and where their pages are.
struct Slice {
    int first, count;
    const int* pages;  // in shared memory, of the slice's blocks of entries
};

// A warp's ring of tiles: its 16 keys of each, codes and then scales, as they lie in a page.
template <bool FP8>
struct Ring {
    static constexpr int CODES = FP8 ? DIM : DIM / 2;      // bytes of a key
    static constexpr int KEYS = 16, STAGE = KEYS * (CODES + 4);  // bytes of a stage
    static constexpr int DEPTH = FP8 ? 3 : 4;
    static constexpr int BYTES = DEPTH * STAGE;

    // Begin to copy the warp's keys of a tile to stage `to`, if the slice has them. 16 entries from a multiple of 16 on
    // are of one page. All lanes; another group of copies.
    __device__ __forceinline__ static void begin(const Tensors& data, const Sizes& sizes, const Slice& slice, int tile,
                                                 uint32_t to) {
        const int lane = threadIdx.x % WARP, entry = tile * TILE + threadIdx.x / WARP % 4 * KEYS;
        if (entry < slice.count) {
            const uint32_t at = slice.first + entry, slot = at & (1u << sizes.page_shift) - 1;
            const uint32_t page = slice.pages[(at >> sizes.page_shift) - (slice.first >> sizes.page_shift)];
            const uint8_t* base = data.keys + static_cast<uint64_t>(page) * static_cast<uint32_t>(sizes.stride);
            const uint8_t* codes = base + (slot * CODES + lane * (CODES / 4));
            const uint32_t mine = to + lane * (CODES / 4);
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int j = 0; j < CODES / 4; j += 16)
                    ptx::cp_async16(mine + i * 8 * CODES + j, codes + i * 8 * CODES + j);
            if (lane < KEYS)
                ptx::cp_async4(to + KEYS * CODES + lane * 4, base + ((CODES << sizes.page_shift) + (slot + lane) * 4));
        }
        ptx::cp_async_commit();
    }
    // Wait until all but the last DEPTH - 1 groups of copies are there, of all lanes.
    __device__ __forceinline__ static void wait() {
        ptx::cp_async_wait<DEPTH - 1>();
        __syncwarp();
    }
    __device__ __forceinline__ static void read(const uint8_t* stage, Loaded<FP8>& to) {
        const int lane = threadIdx.x % WARP;
        const uint8_t* mine = stage + lane * (CODES / 4);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int j = 0; j < CODES / 64; ++j)
                to.codes[i][j] = *reinterpret_cast<const uint4*>(mine + i * 8 * CODES + 16 * j);
            to.scales[i] = *reinterpret_cast<const uint32_t*>(stage + KEYS * CODES + (lane / 4 + 8 * i) * 4);
        }
    }
};

// Eight e2m1 codes to the two words of e4m3 that a lane multiplies in one step; table: magnitudes under the group's d.
__device__ __forceinline__ uint2 decode(uint32_t codes, uint2 table) {
    const uint32_t sizes = codes & 0x77777777, shifted = codes << 4;
    // Selector 8 + i: the sign of byte i, eight times. Low nibbles have theirs in `shifted`, high ones in `codes`.
    return make_uint2(ptx::prmt(table.x, table.y, sizes) | ptx::prmt(shifted, codes, 0xD9C8) & 0x80808080,
                      ptx::prmt(table.x, table.y, sizes >> 16) | ptx::prmt(shifted, codes, 0xFBEA) & 0x80808080);
}

__device__ __forceinline__ uint32_t word(const uint4& v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// The A operands of the four steps, from what was loaded, and what the scores of either key are to be multiplied by.
template <bool FP8>
__device__ __forceinline__ void operands(const Loaded<FP8>& from, const Query& query, uint32_t (&a)[4][4],
                                         float (&scale)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if constexpr (FP8) {
#pragma unroll
            for (int s = 0; s < 4; ++s) {
                a[s][i] = word(from.codes[i][s / 2], s % 2 * 2);
                a[s][i + 2] = word(from.codes[i][s / 2], s % 2 * 2 + 1);
            }
            scale[i] = __uint_as_float(from.scales[i]);
        } else {
            const uint32_t all = from.scales[i];
            const uint32_t most = max(max(all & 255, all >> 8 & 255), max(all >> 16 & 255, all >> 24));
            const uint32_t mine = all >> threadIdx.x % 4 * 8 & 255;
            const uint2 table = query.table[max(static_cast<int>(mine - most) + SHIFTS - 1, 0)];
#pragma unroll
            for (int s = 0; s < 4; ++s) {
                const uint2 two = decode(word(from.codes[i][0], s), table);
                a[s][i] = two.x, a[s][i + 2] = two.y;
            }
            scale[i] = __uint_as_float(max(static_cast<int>(most) - 6, 0) << 23);
        }
    }
}

// d (64 x 64) = or += a (64 x 32, from registers) times b (64 x 32, rows of 128 bytes in shared memory).
__device__ __forceinline__ void multiply(float (&d)[32], const uint32_t (&a)[4], uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
        "%23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p, 1, 1;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
          "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
          "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}

// sum_h 2 w_h max(0, d_h) of a lane's two keys over its 16 heads, then over the quad; d + |d| instead of a maximum, which
// takes turns with the decoding's integers. -> in lanes 0 and 2 of a quad that of
// the first key, in 1 and 3 of the second.
__device__ __forceinline__ float add_heads(const float (&d)[32], const float (&weights)[16]) {
    float one = 0, two = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            one = fmaf(weights[2 * j + e], d[4 * j + e] + fabsf(d[4 * j + e]), one);
            two = fmaf(weights[2 * j + e], d[4 * j + 2 + e] + fabsf(d[4 * j + 2 + e]), two);
        }
    }
    const bool odd = threadIdx.x % 2;
    const float sum = (odd ? two : one) + __shfl_xor_sync(~0u, odd ? one : two, 1);
    return sum + __shfl_xor_sync(~0u, sum, 2);
}

// Begin to copy the slice's first keys. ring: of all warps, Ring::BYTES each; the slice's pages must be there.
template <bool FP8, int WARPGROUPS>
__device__ __forceinline__ void begin_scores(const Tensors& data, const Sizes& sizes, const Slice& slice, uint8_t* ring) {
    using R = Ring<FP8>;
    const uint32_t mine = ptx::smem_address(ring) + threadIdx.x / WARP * R::BYTES;
#pragma unroll 1
    for (int i = 0; i < R::DEPTH; ++i)
        R::begin(data, sizes, slice, threadIdx.x / (4 * WARP) + i * WARPGROUPS, mine + i * R::STAGE);
}

// Score a slice: put(i, the score of entry i, or -inf if the slice has none) for all entries of its tiles, by all lanes
// of a warp: lanes t and t + 2 of a quad have the same entry, quad 0 entries 0 and 8 of 16, quad 1 entries 1 and 9, and so
// on. q must be in `query`, and begin_scores was called.
template <bool FP8, int WARPGROUPS, class Put>
__device__ __forceinline__ void score(const Tensors& data, const Sizes& sizes, const Slice& slice, const Query& query,
                                       const uint8_t* ring, const Put& put) {
    using R = Ring<FP8>;
    const int lane = threadIdx.x % WARP, group = threadIdx.x / (4 * WARP), warp = threadIdx.x / WARP % 4;
    const int tiles = (slice.count + TILE - 1) / TILE;
    const uint8_t* mine = ring + threadIdx.x / WARP * R::BYTES;
    float weights[16];
#pragma unroll
    for (int j = 0; j < 16; ++j) weights[j] = query.weights[8 * (j / 2) + 2 * (lane % 4) + j % 2];
    const uint64_t b = ptx::make_smem_desc(ptx::smem_address(query.q));
    int stage = 0;
#pragma unroll 1
    for (int tile = group; tile < tiles; tile += WARPGROUPS) {
        uint32_t a[4][4];
        float d[32], scale[2];
        Loaded<FP8> loaded;
        R::wait();
        R::read(mine + stage * R::STAGE, loaded);
        operands(loaded, query, a, scale);
        ptx::warpgroup_arrive();
#pragma unroll
        for (int s = 0; s < 4; ++s) multiply(d, a[s], b + 2 * s, s > 0);  // 32 bytes on
        ptx::warpgroup_commit_batch();
        __syncwarp();  // all lanes have read the stage
        R::begin(data, sizes, slice, tile + R::DEPTH * WARPGROUPS, ptx::smem_address(mine + stage * R::STAGE));
        stage = stage + 1 < R::DEPTH ? stage + 1 : 0;
        ptx::warpgroup_wait<0>();
        ptx::warpgroup_fence_operand(d);
        const float sum = add_heads(d, weights) * (lane % 2 ? scale[1] : scale[0]);
        const int entry = tile * TILE + warp * 16 + lane % 2 * 8 + lane / 4;
        const float infinity = __int_as_float(0x7F800000);  // which no search sees of an entry, nor NaN; -0 becomes 0
        put(entry, entry < slice.count ? fmaxf(sum + 0.0f, -FLT_MAX) : -infinity);
    }
}

}  // namespace indexer
