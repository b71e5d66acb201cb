// What a block does with a tile of tokens and its columns: producers load, make x' and out, multipliers multiply.
#pragma once

#include <cuda_bf16.h>

#include "ptx.cuh"
#include "sm90_columns_mix.cuh"

namespace columns {

constexpr int ROLE_WARPS = 8;  // producers, and as many multipliers
constexpr int WARPS = 2 * ROLE_WARPS;
constexpr int ROLE_THREADS = 32 * ROLE_WARPS, NUM_THREADS = 32 * WARPS;
constexpr int MIXER_WARPS = 4;  // besides, in pairs
// Numbered barriers: of all warps; of producers; of multipliers; of both; of a pair of mixers, and the next pair's.
constexpr int BLOCK_BARRIER = 0, PRODUCE_BARRIER = 1, MULTIPLY_BARRIER = 2, BOTH_BARRIER = 3, MIXER_BARRIER = 4;
// Of a thread. A launch of 20 warps has 96 for each; what mixers leave, the others take.
constexpr int MIXER_REGISTERS = 64, ROLE_REGISTERS = 104;
static_assert(ROLE_REGISTERS % 8 == 0 && MIXER_REGISTERS % 8 == 0 && MIXER_WARPS % 4 == 0 &&
                  WARPS * ROLE_REGISTERS + MIXER_WARPS * MIXER_REGISTERS <=
                      65536 / 32 / (WARPS + MIXER_WARPS) / 8 * 8 * (WARPS + MIXER_WARPS),
              "setmaxnreg takes eights, for four warps, and waits until the launch has as many");
constexpr int AHEAD = 3;       // tiles from asking for one to its x'
constexpr int RING_TILES = 8;  // tiles between blocks: who writes the ninth has had the weights of the first
constexpr int TILE_TOKENS = 16;
constexpr int VECTOR = 8;      // bf16 of a 16-byte access

// The tensors of task.Data, and how the launch is cut.
struct Problem {
    const void *y, *second;
    const __nv_bfloat16* copies;
    const float *post, *comb, *fn, *base, *scale;
    const __nv_bfloat16* norm;
    __nv_bfloat16 *new_copies, *out;
    float *new_post, *new_comb;
    tagged::State* state;
    uint64_t* exchange;
    int tokens, hidden;
    int y_bytes, second_bytes;  // of a value, 2 of bf16 or 4 of fp32; second 0: there is none
    uint32_t group_tiles;       // tiles of a group of tokens
    int early;                  // whether blocks may begin before the preceding kernel has ended
    uint64_t residual_policy;   // of L2, for copies and new_copies
};

constexpr int STATE_WORDS = 16;  // of 8 bytes, in front of the exchange
// As createpolicy makes them. What one call reads and writes of many tokens would push the exchange out of L2.
constexpr uint64_t EVICT_FIRST = 0x12f0000000000000, EVICT_NORMAL = 0x16f0000000000000;
constexpr int64_t MANY_VALUES = 512 * 4096;  // of a copy

inline Problem problem(void* const* t, uint64_t* exchange, int tokens, int hidden, int y_bytes, int second_bytes,
                       bool early) {
    auto bf16 = [&](int i) { return static_cast<__nv_bfloat16*>(t[i]); };
    auto fp32 = [&](int i) { return static_cast<float*>(t[i]); };
    return {t[0], t[1], bf16(2), fp32(3), fp32(4), fp32(5), fp32(6), fp32(7), bf16(8), bf16(9), bf16(10), fp32(11),
            fp32(12), reinterpret_cast<tagged::State*>(exchange), exchange + STATE_WORDS, tokens, hidden, y_bytes,
            second_bytes, 0, early, int64_t(tokens) * hidden < MANY_VALUES ? EVICT_NORMAL : EVICT_FIRST};
}

// COLUMNS_ columns of each copy. UNITS_: of 16 bytes, that eight columns of both addends take at most: half of y_bytes
// + second_bytes. LAG_: tiles from the sums to out, 0 where a group is one tile.
template <int COLUMNS_, int UNITS_, int LAG_>
struct Shape {
    static constexpr int COLUMNS = COLUMNS_, UNITS = UNITS_, LAG = LAG_, TILE = TILE_TOKENS;
    static constexpr int UNIT = 16 * TILE * (COLUMNS / VECTOR);  // bytes from one to the next
    static constexpr int LANES = COLUMNS / VECTOR;           // threads of a token, eight columns each
    static constexpr int ITEMS = TILE * LANES;               // of a tile, one a producer
    static constexpr int K_STEPS = COPIES * COLUMNS / 16;    // of the product, 16 columns of a copy each
    static constexpr int STEPS = K_STEPS / ROLE_WARPS;       // of a multiplier
    // Bytes of a copy and of a token. What they are above a multiple of 128 keeps ldmatrix free of conflicts, for eight
    // tokens of one copy and for all copies of two tokens, four apart.
    static constexpr int COPY = COLUMNS * 2 + 16, ROW = COPIES * COPY + 48;
    static constexpr int NUM_X_STAGES = AHEAD + LAG, NUM_Y_STAGES = AHEAD;
    static constexpr int NUM_MIXING_STAGES = AHEAD + 1;      // a tile's is still read when tile + AHEAD's is asked for
    static constexpr int GROUPS = TILE / 4;                  // of four tokens whose products are made at a time
    static constexpr int PARTS = ROLE_WARPS / GROUPS;        // of the columns, for which products are summed apart
    static_assert(K_STEPS % ROLE_WARPS == 0, "multipliers have as many columns each, in steps of 16");
    static_assert(LAG <= RING_TILES, "sums go where those of RING_TILES before lay, whose weights have come");
    static_assert(ITEMS % 32 == 0, "a warp of producers has items in all lanes, or in none");
    static_assert(LANES <= 32 && ITEMS <= ROLE_THREADS && TILE * (1 + COPIES) <= ROLE_THREADS, "at most one each");
    static_assert(TILE % 16 == 0, "rows of a product");
    static_assert(PARTS >= 1, "tokens are four for each multiplier at most");
    static_assert(COLUMNS / 16 % PARTS == 0, "products are of as many columns in each part, in steps of 16");

    struct Shared {
        uint8_t x[NUM_X_STAGES][TILE][ROW];  // the copies, then x' in their place
        uint4 y[NUM_Y_STAGES][UNITS][TILE][LANES];      // of the first addend, then of the second
        float4 mixing[NUM_MIXING_STAGES][TILE][1 + COPIES];  // post, then the rows of comb
        float4 dots[ROLE_WARPS][TILE][ROWS / 4];
        float products[PARTS][TILE][PRODUCTS];
        float u_weights[2][TILE][COPIES];  // pre_j / the root mean square of u; of one tile while the next one's come
        float partials[WARPS][SLOTS];
        // Of a stage of x: producers have made a tile's x', multipliers have read it. A phase a tile.
        uint64_t full_barriers[NUM_X_STAGES], empty_barriers[NUM_X_STAGES];
        uint32_t first_tag;
    };
    static __device__ __forceinline__ uint32_t barrier(const uint64_t* barriers, int tile) {
        return ptx::smem_address(&barriers[tile % NUM_X_STAGES]);
    }
    static __device__ __forceinline__ uint32_t parity(int tile) { return tile / NUM_X_STAGES % 2; }
};

__device__ __forceinline__ float low_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// Ask for eight columns of an addend, `offset` values after `from`: a unit of bf16 or two of fp32.
template <class S>
__device__ __forceinline__ void load_addend(uint32_t to, const uint8_t* from, int bytes, int offset, bool valid) {
    ptx::cp_async16(to, from + offset * bytes, valid);
    if (bytes == 4) ptx::cp_async16(to + S::UNIT, from + offset * bytes + 16, valid);
}

// Ask for 16 bytes of copies, zeros if not `really`.
__device__ __forceinline__ void load_residual(uint32_t to, const void* from, bool really, uint64_t policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from),
                 "r"(really ? 16 : 0), "l"(policy)
                 : "memory");
}

// Ask for a tile's copies, y, post and comb. Zeros beyond the group's tokens and the copies' columns. Later each
// producer uses the columns that it asked for, and all of post and comb. The copies of one call are waited for as one.
template <class S>
__device__ __forceinline__ void load_tile(const Problem& p, int first, int tokens, int tile, int column,
                                          typename S::Shared& shared, int thread) {
    const int count = tokens - tile * S::TILE;
    const int64_t first_row = first + tile * S::TILE;
    if (count > 0) {
        const int y_units = p.y_bytes / 2;
        const auto* const y = static_cast<const uint8_t*>(p.y) + first_row * p.hidden * p.y_bytes;
        const auto* const second = static_cast<const uint8_t*>(p.second) + first_row * p.hidden * p.second_bytes;
        const __nv_bfloat16* const copies = p.copies + first_row * COPIES * p.hidden;
        if (thread < S::ITEMS) {
            const int token = thread / S::LANES, lane = thread % S::LANES, first_column = column + lane * VECTOR;
            const bool valid = token < count && first_column < p.hidden;
            const int offset = token * p.hidden + first_column;  // from the tile's first
            const uint32_t unit = ptx::smem_address(&shared.y[tile % S::NUM_Y_STAGES][0][token][lane]);
            load_addend<S>(unit, y, p.y_bytes, offset, valid);
            if (p.second_bytes) load_addend<S>(unit + y_units * S::UNIT, second, p.second_bytes, offset, valid);
            const __nv_bfloat16* from = copies + (offset + (COPIES - 1) * token * p.hidden);
            const uint32_t to = ptx::smem_address(shared.x[tile % S::NUM_X_STAGES][token]) + 2 * VECTOR * lane;
#pragma unroll
            for (int j = 0; j < COPIES; ++j, from += p.hidden)
                load_residual(to + j * S::COPY, from, valid, p.residual_policy);
        }
        if (thread < S::TILE * (1 + COPIES)) {
            const int token = thread / (1 + COPIES), part = thread % (1 + COPIES);
            const float* from = part ? p.comb + ((first_row + token) * COPIES + part - 1) * COPIES
                                     : p.post + (first_row + token) * COPIES;
            const uint32_t to = ptx::smem_address(&shared.mixing[tile % S::NUM_MIXING_STAGES][token][part]);
            ptx::cp_async16(to, from, token < count);
        }
    }
    ptx::cp_async_commit();
}

// Add eight columns of an addend, in one unit of bf16 or two of fp32, from `from` on, TILE * LANES apart.
template <class S>
__device__ __forceinline__ void add_addend(const uint4* from, int bytes, float (&sum)[VECTOR]) {
    const uint4 a = *from, b = bytes == 4 ? from[S::TILE * S::LANES] : a;
    const uint32_t words[VECTOR] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
        const float narrow = i % 2 ? high_bf16(words[i / 2]) : low_bf16(words[i / 2]);
        sum[i] += bytes == 4 ? __uint_as_float(words[i]) : narrow;
    }
}

// Eight columns of the sublayer's output, rounded.
template <class S>
__device__ __forceinline__ uint4 sublayer_output(const Problem& p, const typename S::Shared& shared, int tile,
                                                 int token, int lane) {
    const uint4* const units = &shared.y[tile % S::NUM_Y_STAGES][0][token][lane];
    if (p.y_bytes == 2 && !p.second_bytes) return *units;
    float sum[VECTOR] = {};
    add_addend<S>(units, p.y_bytes, sum);
    if (p.second_bytes) add_addend<S>(units + p.y_bytes / 2 * S::TILE * S::LANES, p.second_bytes, sum);
    return make_uint4(ptx::pack_bf16x2(sum[0], sum[1]), ptx::pack_bf16x2(sum[2], sum[3]),
                      ptx::pack_bf16x2(sum[4], sum[5]), ptx::pack_bf16x2(sum[6], sum[7]));
}

__device__ __forceinline__ void store_residual(void* to, uint4 v, uint64_t policy) {
    asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w), "l"(policy)
                 : "memory");
}

// x' of eight columns, into shared memory and new_copies.
template <class S>
__device__ __forceinline__ void make_copies(const Problem& p, int first, int count, int tile, int column,
                                            typename S::Shared& shared, int thread) {
    if (thread < S::ITEMS) {
        const int token = thread / S::LANES, lane = thread % S::LANES, first_column = lane * VECTOR;
        uint8_t* const row = shared.x[tile % S::NUM_X_STAGES][token] + 2 * first_column;
        const float4* mixing = shared.mixing[tile % S::NUM_MIXING_STAGES][token];
        const float4 post = mixing[0];
        float4 comb[COPIES];
        uint4 x[COPIES];
#pragma unroll
        for (int j = 0; j < COPIES; ++j) {
            comb[j] = mixing[1 + j];
            x[j] = *reinterpret_cast<const uint4*>(row + j * S::COPY);
        }
        const uint4 y = sublayer_output<S>(p, shared, tile, token, lane);
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            auto pair_of = [pair](uint4& v) -> uint32_t& {
                return pair < 2 ? (pair ? v.y : v.x) : (pair == 2 ? v.z : v.w);
            };
            uint4 output = y;
            const float y0 = low_bf16(pair_of(output)), y1 = high_bf16(pair_of(output));
            float sums[COPIES][2];
#pragma unroll
            for (int k = 0; k < COPIES; ++k) {
                auto element = [k](const float4& v) { return k < 2 ? (k ? v.y : v.x) : (k == 2 ? v.z : v.w); };
                sums[k][0] = element(post) * y0, sums[k][1] = element(post) * y1;
#pragma unroll
                for (int j = 0; j < COPIES; ++j) {
                    sums[k][0] = fmaf(element(comb[j]), low_bf16(pair_of(x[j])), sums[k][0]);
                    sums[k][1] = fmaf(element(comb[j]), high_bf16(pair_of(x[j])), sums[k][1]);
                }
            }
#pragma unroll
            for (int k = 0; k < COPIES; ++k) pair_of(x[k]) = ptx::pack_bf16x2(sums[k][0], sums[k][1]);
        }
        const bool valid = token < count && column + first_column < p.hidden;
        __nv_bfloat16* to = p.new_copies + int64_t(first + tile * S::TILE) * COPIES * p.hidden +
                            (token * COPIES * p.hidden + column + first_column);
#pragma unroll
        for (int k = 0; k < COPIES; ++k, to += p.hidden) {
            *reinterpret_cast<uint4*>(row + k * S::COPY) = x[k];
            if (valid) store_residual(to, x[k], p.residual_policy);
        }
    }
}

// A warp's columns of fn, each value as the sum of two bf16, which is off by 2^-17 of it at most: the second factor of
// mma.m16n8k16, three times eight rows of fn.
template <class S>
struct FnFragments {
    static constexpr int ROW_TILES = ROWS / 8;
    uint32_t high[S::STEPS][ROW_TILES][2], low[S::STEPS][ROW_TILES][2];

    __device__ __forceinline__ void load(const float* fn, int hidden, int column, int warp, int lane) {
        static_assert(sizeof(FnFragments) / 4 <= ROLE_REGISTERS / 2, "over half of a thread's registers: it spills");
#pragma unroll
        for (int s = 0; s < S::STEPS; ++s) {
            const int k = 16 * (warp * S::STEPS + s), copy = k / S::COLUMNS, first_column = column + k % S::COLUMNS;
            float2 value[ROW_TILES][2];
#pragma unroll
            for (int tile = 0; tile < ROW_TILES; ++tile) {
                const float* from = fn + (int64_t(8 * tile + lane / 4) * COPIES + copy) * hidden + first_column +
                                    lane % 4 * 2;
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    value[tile][half] = first_column < hidden ? *reinterpret_cast<const float2*>(from + 8 * half)
                                                    : make_float2(0.0f, 0.0f);
            }
#pragma unroll
            for (int tile = 0; tile < ROW_TILES; ++tile) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float2 v = value[tile][half];
                    const uint32_t h = ptx::pack_bf16x2(v.x, v.y);
                    high[s][tile][half] = h;
                    low[s][tile][half] = ptx::pack_bf16x2(v.x - low_bf16(h), v.y - high_bf16(h));
                }
            }
        }
    }
};

// The tile's tokens times this warp's columns of fn.
template <class S>
__device__ __forceinline__ void multiply_by_fn(const FnFragments<S>& fn, int count, int tile,
                                               typename S::Shared& shared, int warp, int lane) {
    constexpr int ROW_TILES = FnFragments<S>::ROW_TILES, IN_COPY = S::COLUMNS / 16;
#pragma unroll
    for (int from = 0; from < S::TILE; from += 16) {
        if (from >= count) return;
        float sum[ROW_TILES][4] = {};
        const uint32_t row = ptx::smem_address(shared.x[tile % S::NUM_X_STAGES][from + lane % 16]) + lane / 16 * 16;
#pragma unroll
        for (int s = 0; s < S::STEPS; ++s) {
            const int k = warp * S::STEPS + s;
            const uint4 v = ptx::ldmatrix_x4(row + k / IN_COPY * S::COPY + k % IN_COPY * 32);
            const uint32_t a[] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int t = 0; t < ROW_TILES; ++t) ptx::mma_bf16(sum[t], a, fn.low[s][t]);
#pragma unroll
            for (int t = 0; t < ROW_TILES; ++t) ptx::mma_bf16(sum[t], a, fn.high[s][t]);
        }
#pragma unroll
        for (int t = 0; t < ROW_TILES; ++t) {
            float* to = reinterpret_cast<float*>(shared.dots[warp][from + lane / 4]) + 8 * t + lane % 4 * 2;
            *reinterpret_cast<float2*>(to) = make_float2(sum[t][0], sum[t][1]);
            *reinterpret_cast<float2*>(to + 8 * ROWS) = make_float2(sum[t][2], sum[t][3]);
        }
    }
}

// The products x'_j x'_k of four tokens over a part of the columns: the sixteen copies times themselves, of which the
// blocks on the diagonal are kept. Rows of a fragment are columns of the other factor's as they lie.
template <class S>
__device__ __forceinline__ void multiply_copies(int tile, typename S::Shared& shared, int warp, int lane) {
    constexpr int STEPS = S::COLUMNS / 16 / S::PARTS, TOKEN_STRIDE = 4;
    const int group = warp % S::GROUPS, part = warp / S::GROUPS;
    const int first = group / TOKEN_STRIDE * 16 + group % TOKEN_STRIDE;
    const int row_token = first + lane % 16 / COPIES * TOKEN_STRIDE;
    const uint32_t row = ptx::smem_address(shared.x[tile % S::NUM_X_STAGES][row_token]) +
                         lane % COPIES * S::COPY + lane / 16 * 16 + 32 * STEPS * part;
    float low[4] = {}, high[4] = {};  // of the first two tokens, of the others
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        const uint4 a = ptx::ldmatrix_x4(row + 32 * s);
        ptx::mma_bf16(low, a.x, a.y, a.z, a.w, a.x, a.z);
        ptx::mma_bf16(high, a.x, a.y, a.z, a.w, a.y, a.w);
    }
    // Element (r, c) of a block of eight: lane 4 r + c / 2. Copy j of token r / 4 times copy k of token c / 4.
    const int r = lane / 4, c = lane % 4 * 2, j = r % COPIES;
    if (r / COPIES != c / COPIES) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int k = c % COPIES + i, token = first + r / COPIES * TOKEN_STRIDE;
        if (k < j) continue;
        shared.products[part][token][product_of(j, k)] = low[i];
        shared.products[part][token + 2 * TOKEN_STRIDE][product_of(j, k)] = high[2 + i];
    }
}

// The norm's weight for a producer's eight columns.
template <class S>
__device__ __forceinline__ uint4 load_norm(const Problem& p, int column, int thread) {
    const int first_column = column + thread % S::LANES * VECTOR;
    return first_column < p.hidden ? *reinterpret_cast<const uint4*>(p.norm + first_column) : make_uint4(0, 0, 0, 0);
}

// out of eight columns, of the tile's x' and weights of u.
template <class S>
__device__ __forceinline__ void write_out(const Problem& p, uint4 norm, int first, int count, int tile, int column,
                                          const typename S::Shared& shared, int thread) {
    const int first_column = column + thread % S::LANES * VECTOR, token = thread / S::LANES;
    if (first_column >= p.hidden || token >= count) return;
    __nv_bfloat16* const to = p.out + int64_t(first + tile * S::TILE) * p.hidden + first_column;
    const uint32_t norms[4] = {norm.x, norm.y, norm.z, norm.w};
    const uint8_t* const row = shared.x[tile % S::NUM_X_STAGES][token] + 2 * VECTOR * (thread % S::LANES);
    float u[VECTOR] = {};
#pragma unroll
    for (int j = 0; j < COPIES; ++j) {
        const float weight = shared.u_weights[tile % 2][token][j];
        const uint4 x = *reinterpret_cast<const uint4*>(row + j * S::COPY);
        const uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u[2 * i] = fmaf(weight, low_bf16(pairs[i]), u[2 * i]);
            u[2 * i + 1] = fmaf(weight, high_bf16(pairs[i]), u[2 * i + 1]);
        }
    }
    uint32_t out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        out[i] = ptx::pack_bf16x2(u[2 * i] * low_bf16(norms[i]), u[2 * i + 1] * high_bf16(norms[i]));
    *reinterpret_cast<uint4*>(to + token * p.hidden) = make_uint4(out[0], out[1], out[2], out[3]);
}

}  // namespace columns
