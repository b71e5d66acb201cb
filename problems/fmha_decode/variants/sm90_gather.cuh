// Entries out of two paged FP8 caches into swizzled bf16 tiles in shared memory: what sm90_wgmma's producers do.
//
// A tile is BLOCK_N entries of 512 dims: 8 sub-tiles of 64 dims, each BLOCK_N rows of 128 bytes, swizzled as wgmma
// wants it (16-byte chunk c of row r is at chunk c ^ r % 8).
//
// Some warps ask for entries, two tiles ahead, by cp.async into staging places in shared memory, where entries stand
// side by side as they are in their pages. Others decode, a warp 8 entries of a tile: lane l takes 16 bytes of every
// 64, of entry l / 4 the quarter l % 4. So a group of eight lanes that share a turn at the banks has two neighbouring
// entries, which lie half a round of banks apart, and the chunks 0 2 4 6 ^ r and 0 2 4 6 ^ (r + 1) that they store to
// are all eight.
#pragma once

#include <cstdint>

#include "ptx.cuh"

namespace fmha {

__device__ __forceinline__ uint4 load_global16(const void* from) {
    uint4 v;
    asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
}

using namespace ptx;

constexpr int HEAD_DIM = 512;       // of an entry
constexpr int FP8_TILES = 7;        // sub-tiles of 64 dims that come as e4m3 with a scale; the eighth is bf16
constexpr int TILES = 8;
constexpr int NOPE = 448;           // dims of an entry, and bytes, that come as e4m3
constexpr int PAYLOAD = 576;        // bytes of an entry without its scales: 448 e4m3 and 64 bf16
constexpr int PARTS = 2;            // of a tile, each with separate barriers: sub-tiles 0 1 4 5, and 2 3 6 7

constexpr float LOG2E = 1.4426950408889634f;
constexpr float TO_LOG2 = 0.04419417382415922f * LOG2E;  // 512^-0.5, for scores in powers of two
// P may reach 2^8: sums stay far inside fp32, and bf16 is as fine there as below 1.
constexpr float RESCALE_THRESHOLD = 8.f;

struct Cache {
    const uint8_t* pages;
    uint32_t stride;  // bytes from page to page
    uint32_t shift;   // log2 of the entries of a page
};

// The list positions that a block of threads walks: `window` from the one list, then the other up to `total`.
struct Span {
    int window, total;  // entries
    int first, count;   // tiles
};

// Division of x < 2^32 / by, by a multiplication: what the compiler makes of one is 20 instructions of cold code.
struct Divisor {
    uint32_t by, inverse;
    __host__ explicit Divisor(uint32_t by) : by(by), inverse(uint32_t((uint64_t(1) << 32) / by) + 1) {}
    __device__ __forceinline__ uint32_t operator()(uint32_t x) const { return by == 1 ? x : __umulhi(x, inverse); }
};

// Without splits a block has a tile at least, if one without entries: its sums are zeros then.
template <int BLOCK_N, bool SPLIT>
__device__ __forceinline__ Span share(int window, int compressed, int split, Divisor splits) {
    int const total = window + compressed, tiles = (total + BLOCK_N - 1) / BLOCK_N;
    if (!SPLIT) return {window, total, 0, max(tiles, 1)};
    int const first = splits(tiles * split), last = splits(tiles * (split + 1));
    return {window, total, first, last - first};
}

// ---- device helpers

// Scale byte s -> 2^(s - 127 + 120) as a bf16 pair. Finite and normal for 3 <= s <= 134.
__host__ __device__ __forceinline__ uint32_t scale_pair(uint32_t s) { return s * 0x00800080u + 120u * 0x00800080u; }

// Bits of MASK from a, the others from b.
template <uint32_t MASK>
__device__ __forceinline__ uint32_t either(uint32_t a, uint32_t b) {
    uint32_t c;
    asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(c) : "r"(a), "r"(b), "n"(MASK));
    return c;
}
// Four e4m3 codes -> two bf16 pairs, times the scale. Bits 6:0 of a code go to 10:4 of a bf16, where they are exponent
// and mantissa, of value * 2^-120; e4m3's subnormals become bf16's. Few instructions on the pipe of logic and shifts,
// which is the narrow one.
__device__ __forceinline__ uint2 decode4(uint32_t codes, uint32_t scale) {
    constexpr uint32_t MAGNITUDES = 0x07F007F0;
    uint32_t const order = __byte_perm(codes, 0, 0x3120);  // codes 0 2 1 3
    uint32_t signs;  // opaque, or else the compiler shifts first and masks twice
    asm("and.b32 %0, %1, 0x80808080;" : "=r"(signs) : "r"(order));
    uint32_t const first = either<MAGNITUDES>(order << 4, signs << 8);
    uint32_t const second = either<MAGNITUDES>(order >> 4, signs);
    return make_uint2(mul_bf16x2(first, scale), mul_bf16x2(second, scale));
}
__device__ __forceinline__ uint4 decode8(uint32_t a, uint32_t b, uint32_t scale) {
    uint2 const low = decode4(a, scale), high = decode4(b, scale);
    return make_uint4(low.x, low.y, high.x, high.y);
}

// *from, or `other` without touching memory.
__device__ __forceinline__ int load_if(const int* from, bool really, int other) {
    int v = other;
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p ld.global.nc.b32 %0, [%1];\n}\n"
                 : "+r"(v)
                 : "l"(from), "r"(int(really)));
    return v;
}

// The two lists of a query and where their entries lie.
struct Lists {
    Cache const &window, &compressed;
    const int *window_index, *compressed_index;

    // -1 past the end of the span's tiles.
    __device__ __forceinline__ int index(Span const& span, int tile, int at) const {
        bool const inside = tile < span.count && at < span.total;
        return load_if(at < span.window ? window_index + at : compressed_index + (at - span.window), inside, -1);
    }
    __device__ __forceinline__ void locate(int index, bool in_window, const uint8_t*& payload,
                                           const uint8_t*& scale) const {
        uint32_t const shift = in_window ? window.shift : compressed.shift;
        uint32_t const stride = in_window ? window.stride : compressed.stride;
        uint32_t const page = uint32_t(index) >> shift, slot = uint32_t(index) & ((1u << shift) - 1);
        const uint8_t* const at = (in_window ? window.pages : compressed.pages) + uint64_t(page) * stride;
        payload = at + slot * PAYLOAD, scale = at + (uint32_t(PAYLOAD) << shift) + slot * 8;
    }
};

// How a tile of BLOCK_N entries is shared out among the eight warps of the producers, and how many tiles are in shared
// memory. Where a block has but one tile, which is when they are small, as many ask as decode.
template <int BLOCK_N>
struct Shape {
    static constexpr int ENTRIES = 8, GROUPS = BLOCK_N / ENTRIES;  // of a group: what a warp decodes
    static constexpr int LOAD_WARPS = BLOCK_N == 48 ? 2 : 4, EACH = GROUPS / LOAD_WARPS;
    static constexpr int NUM_STAGES = BLOCK_N == 48 ? 2 : 1;
    static_assert(GROUPS + LOAD_WARPS <= 8 && EACH * LOAD_WARPS == GROUPS);
};
// Position in a ring of stages.
template <int NUM_STAGES>
struct PipelineState {
    uint32_t index = 0, phase = 0;
    __device__ __forceinline__ void advance() {
        if (++index == NUM_STAGES) index = 0, phase ^= 1;
    }
};

// ---- the producers: two warpgroups

// Shared addresses. staging: (NUM_STAGING_STAGES, GROUPS, STAGED); masks[4][8]: of tile modulo 4, a byte for a group,
// bit i set if its row i is an entry. Barriers, 8 bytes each: staging_full_barriers, staging_empty_barriers
// [NUM_STAGING_STAGES] of the staging places, full_barriers, empty_barriers [NUM_STAGES][PARTS] of the tiles.
struct Gathered {
    uint32_t tiles, staging, masks, staging_full_barriers, staging_empty_barriers, full_barriers, empty_barriers;
};
constexpr int NUM_STAGING_STAGES = 2;                                 // tiles in staging places
constexpr uint32_t SCALES = 8 * PAYLOAD, STAGED = 8 * (PAYLOAD + 8);  // of a group: offset and size

template <int BLOCK_N, bool SPLIT>
struct Producer {
    static constexpr int GROUPS = Shape<BLOCK_N>::GROUPS, ENTRIES = Shape<BLOCK_N>::ENTRIES;
    static constexpr uint32_t TILE = BLOCK_N * 128, BUFFER = TILES * TILE;

    Gathered to;
    int lane;

    __device__ __forceinline__ uint32_t staged(uint32_t stage, int group) const {
        return to.staging + (stage * GROUPS + group) * STAGED;
    }

    // `load_warp` 0 to LOAD_WARPS - 1. begin: the block's barrier behind which its mbarriers exist.
    template <class Lengths, class Begin>
    __device__ __forceinline__ void load(Lists const& lists, Lengths lengths, int nw, int nc, int split, Divisor splits,
                                        int load_warp, Begin begin) const {
        constexpr int EACH = Shape<BLOCK_N>::EACH;
        // Lists are nearly always full: their first indices are asked for together with the lengths, not after them.
        int2 const length = lengths();
        int2 guess = make_int2(nw, nc);
        Span span{};
        int next[EACH];
        auto const position = [&](int tile, int i) {
            return (span.first + tile) * BLOCK_N + (load_warp * EACH + i) * ENTRIES + lane / 4;
        };
        auto const look = [&](int tile) {
#pragma unroll
            for (int i = 0; i < EACH; ++i) next[i] = lists.index(span, tile, position(tile, i));
        };
#pragma unroll 1
        while (true) {
            span = share<BLOCK_N, SPLIT>(guess.x, guess.y, split, splits);
            look(0);
            if (guess.x == length.x && guess.y == length.y) break;
            guess = length;
        }
        begin();
        PipelineState<NUM_STAGING_STAGES> pipe;
#pragma unroll 1
        for (int tile = 0; tile < span.count; ++tile, pipe.advance()) {
            wait(to.staging_empty_barriers + 8 * pipe.index, pipe.phase ^ 1);
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const uint8_t *payload, *scale;
                lists.locate(next[i], position(tile, i) < span.window, payload, scale);
                bool const entry = next[i] >= 0;
                if (!entry) payload = scale = lists.window.pages;  // not read: zeros come
                uint32_t const at = staged(pipe.index, load_warp * EACH + i), chunk = lane % 4 * 16;
#pragma unroll
                for (int j = 0; j < PAYLOAD / 64; ++j)
                    cp_async16(at + lane / 4 * PAYLOAD + chunk + 64 * j, payload + chunk + 64 * j, entry);
                if (lane % 4 == 0) cp_async8(at + SCALES + 2 * lane, scale, entry);
                uint32_t bits = __ballot_sync(~0u, entry) & 0x11111111;  // of every fourth lane: to one byte
                bits |= bits >> 3, bits &= 0x03030303, bits |= bits >> 6, bits &= 0x000F000F, bits |= bits >> 12;
                if (lane == 0) store_shared1(to.masks + 8 * (tile & 3) + load_warp * EACH + i, bits);
            }
            cp_async_mbarrier_arrive(to.staging_full_barriers + 8 * pipe.index);
            warp_arrive(to.staging_full_barriers + 8 * pipe.index);  // for the masks
            look(tile + 1);
        }
        cp_async_wait_all();  // none may land after the block has ended
    }

    __device__ __forceinline__ void store(uint4 codes, uint32_t scale_byte, uint32_t at) const {
        uint32_t const scale = scale_pair(scale_byte), low = at + (2 * (lane % 4) ^ lane / 4) * 16;
        store_shared16(low, decode8(codes.x, codes.y, scale));
        store_shared16(low ^ 16, decode8(codes.z, codes.w, scale));
    }
    __device__ __forceinline__ void decode(int count, int group) const {
        uint32_t const row = lane / 4, quarter = lane % 4;
        PipelineState<NUM_STAGING_STAGES> staging_pipe;
        PipelineState<Shape<BLOCK_N>::NUM_STAGES> pipe;
#pragma unroll 1
        for (int tile = 0; tile < count; ++tile, pipe.advance(), staging_pipe.advance()) {
            uint32_t const base = to.tiles + pipe.index * BUFFER + (group * ENTRIES + row) * 128;
            uint32_t const at = staged(staging_pipe.index, group), from = at + row * PAYLOAD + 16 * quarter;
            wait(to.staging_full_barriers + 8 * staging_pipe.index, staging_pipe.phase);
            uint2 const scales = load_shared8(at + SCALES + 8 * row);
            uint4 codes[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) codes[i] = load_shared16(from + 64 * (i < 2 ? i : 2 + i));
            wait(to.empty_barriers + 8 * (PARTS * pipe.index), pipe.phase ^ 1);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                store(codes[i], (i < 2 ? scales.x : scales.y) >> 8 * (i % 2) & 0xFF, base + (i < 2 ? i : 2 + i) * TILE);
            warp_arrive(to.full_barriers + 8 * (PARTS * pipe.index));
#pragma unroll
            for (int i = 0; i < 3; ++i) codes[i] = load_shared16(from + 64 * (i < 2 ? 2 + i : 6));
            uint4 const low = load_shared16(from + NOPE), high = load_shared16(from + NOPE + 64);
            warp_arrive(to.staging_empty_barriers + 8 * staging_pipe.index);
            wait(to.empty_barriers + 8 * (PARTS * pipe.index + 1), pipe.phase ^ 1);
#pragma unroll
            for (int i = 0; i < 3; ++i)
                store(codes[i], (i < 2 ? scales.x >> 16 + 8 * i : scales.y >> 16) & 0xFF,
                      base + (i < 2 ? 2 + i : 6) * TILE);
            store_shared16(base + FP8_TILES * TILE + (quarter ^ row) * 16, low);
            store_shared16(base + FP8_TILES * TILE + ((4 + quarter) ^ row) * 16, high);
            warp_arrive(to.full_barriers + 8 * (PARTS * pipe.index + 1));
        }
    }
};

}  // namespace fmha
