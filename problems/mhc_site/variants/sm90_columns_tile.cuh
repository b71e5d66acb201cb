// What a block does with a tile of tokens and its columns: load, add the sublayer's output, multiply by fn, make out.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "ptx.cuh"
#include "sm90_columns_mix.cuh"

namespace columns {

constexpr int WARPS = 16;  // that own columns
constexpr int NUM_THREADS = 32 * WARPS;
constexpr int MIXERS = 4;            // warps besides, in pairs, which mix tokens while the others are ahead
// Of all warps; of those that own columns; of a pair of mixers, and the next of the other pair.
constexpr int BLOCK_BARRIER = 0, COLUMN_BARRIER = 1, MIXER_BARRIER = 2;
// Of a thread. A launch of 20 warps has 96 for each; what mixers leave, the others take.
constexpr int MIXER_REGISTERS = 64, COLUMN_REGISTERS = 104;
constexpr int LAG = 2;              // tiles from the sums to out
constexpr int RING = 4;             // tiles between blocks: who writes the fifth has had the weights of the first
constexpr int MOST_TILE = 32;       // tokens
constexpr int STATE_WORDS = 16;     // of 8 bytes, ahead of the exchange
constexpr int EIGHT = 8;            // bf16 of a 16-byte access

// The tensors of task.Data, and how the launch is cut.
struct Problem {
    const void *y, *second;
    const __nv_bfloat16* copies;
    const float *post, *comb, *fn, *base, *scale;
    const __nv_bfloat16* norm;
    __nv_bfloat16 *new_copies, *out;
    float *new_post, *new_comb;
    State* state;
    uint64_t* exchange;
    int tokens, hidden;
    int y_bytes, second_bytes;  // of a value, 2 of bf16 or 4 of fp32; second 0: there is none
    uint32_t turns;             // tiles of a group
};

inline Problem problem(void* const* t, uint64_t* exchange, int tokens, int hidden, int y_bytes, int second_bytes) {
    auto bf16 = [&](int i) { return static_cast<__nv_bfloat16*>(t[i]); };
    auto fp32 = [&](int i) { return static_cast<float*>(t[i]); };
    return {t[0], t[1], bf16(2), fp32(3), fp32(4), fp32(5), fp32(6), fp32(7), bf16(8), bf16(9), bf16(10), fp32(11),
            fp32(12), reinterpret_cast<State*>(exchange), exchange + STATE_WORDS, tokens, hidden, y_bytes,
            second_bytes, 0};
}

// TILE_ tokens and COLUMNS_ columns of each copy. UNITS_: of 16 bytes, that eight columns of both addends take at most.
template <int COLUMNS_, int TILE_, int UNITS_>
struct Shape {
    static constexpr int UNITS = UNITS_;
    static constexpr int COLUMNS = COLUMNS_, TILE = TILE_;
    static constexpr int LANES = COLUMNS / EIGHT;            // threads of a token, eight columns each
    static constexpr int ITEMS = TILE * LANES;               // threads of a tile
    static constexpr int K_STEPS = COPIES * COLUMNS / 16;    // of the product, 16 columns of a copy each
    static constexpr int STEPS = K_STEPS < WARPS ? 1 : K_STEPS / WARPS;  // of a warp
    static constexpr int MMA_WARPS = K_STEPS / STEPS;
    static constexpr int ROW = COPIES * COLUMNS * 2 + 16;    // bytes of a token: 16 more, so that ldmatrix has no conflicts
    static constexpr int X_STAGES = LAG + 2, Y_STAGES = 2;
    static_assert(ITEMS <= NUM_THREADS && ITEMS % 32 == 0 && LANES <= 32 && TILE % 16 == 0);

    struct Shared {
        uint8_t x[X_STAGES][TILE][ROW];  // the copies, then x' in their place
        uint4 y[Y_STAGES][UNITS][TILE][LANES];  // of the first addend, then of the second
        float4 mixing[Y_STAGES][TILE][1 + COPIES];  // post, then the rows of comb
        float dots[MMA_WARPS][TILE][ROWS];
        float products[TILE][PRODUCTS];
        float weights[2][TILE][COPIES];  // pre_j / the root mean square of u; of one tile while the next one's come
        float part[WARPS][SLOTS];
        uint32_t first_tag;
    };
};

template <int LEFT>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
__device__ __forceinline__ float low_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// Ask for a tile's copies, y, post and comb. Zeros beyond the group's tokens and the copies' columns. Each thread later
// uses the columns that it asked for, post and comb all threads. The copies of one call wait as one.
template <class S>
__device__ __forceinline__ void load_tile(const Problem& p, int first, int tokens, int tile, int column,
                                          typename S::Shared& shared, int thread) {
    const int token = thread / S::LANES, at = thread % S::LANES * EIGHT;
    if (tile * S::TILE < tokens) {
        if (thread < S::ITEMS) {
            const bool real = tile * S::TILE + token < tokens && column + at < p.hidden;
            const int64_t row = real ? first + tile * S::TILE + token : 0, from = real ? column + at : 0;
            auto* const units = shared.y[tile % S::Y_STAGES];
            const int of_y = p.y_bytes / 2, all = of_y + p.second_bytes / 2;
#pragma unroll
            for (int unit = 0; unit < S::UNITS; ++unit) {
                if (unit >= all) break;
                const bool second = unit >= of_y;
                const auto* start = static_cast<const uint8_t*>(second ? p.second : p.y);
                const int64_t at = (row * p.hidden + from) * (second ? p.second_bytes : p.y_bytes);
                ptx::cp_async16(ptx::smem_address(&units[unit][token][thread % S::LANES]),
                                start + at + 16 * (second ? unit - of_y : unit), real);
            }
#pragma unroll
            for (int j = 0; j < COPIES; ++j)
                ptx::cp_async16(
                    ptx::smem_address(&shared.x[tile % S::X_STAGES][token][2 * (j * S::COLUMNS + at)]),
                    p.copies + (row * COPIES + j) * p.hidden + from, real);
        }
        if (thread < S::TILE * (1 + COPIES)) {
            const int of = thread / (1 + COPIES), part = thread % (1 + COPIES);
            const bool real = tile * S::TILE + of < tokens;
            const int64_t row = real ? first + tile * S::TILE + of : 0;
            const float* from = part ? p.comb + (row * COPIES + part - 1) * COPIES : p.post + row * COPIES;
            ptx::cp_async16(ptx::smem_address(&shared.mixing[tile % S::Y_STAGES][of][part]), from, real);
        }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Add eight columns of an addend, in one unit of bf16 or two of fp32, the first of them unit `from`, TILE * LANES apart.
template <class S>
__device__ __forceinline__ void add_units(const uint4* from, int bytes, float (&sum)[EIGHT]) {
    const uint4 a = *from, b = bytes == 4 ? from[S::TILE * S::LANES] : a;
    const uint32_t words[EIGHT] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < EIGHT; ++i) {
        const float narrow = i % 2 ? high_bf16(words[i / 2]) : low_bf16(words[i / 2]);
        sum[i] += bytes == 4 ? __uint_as_float(words[i]) : narrow;
    }
}

// What the sublayer ahead returned, eight columns of it, rounded.
template <class S>
__device__ __forceinline__ uint4 output_of(const Problem& p, const typename S::Shared& shared, int tile, int token,
                                           int lane) {
    const uint4* const units = &shared.y[tile % S::Y_STAGES][0][token][lane];
    if (p.y_bytes == 2 && !p.second_bytes) return *units;
    float sum[EIGHT] = {};
    add_units<S>(units, p.y_bytes, sum);
    if (p.second_bytes) add_units<S>(units + p.y_bytes / 2 * S::TILE * S::LANES, p.second_bytes, sum);
    return make_uint4(ptx::pack_bf16x2(sum[0], sum[1]), ptx::pack_bf16x2(sum[2], sum[3]),
                      ptx::pack_bf16x2(sum[4], sum[5]), ptx::pack_bf16x2(sum[6], sum[7]));
}

// x' of eight columns a thread, into shared memory and new_copies; the products x'_j x'_k of each token.
template <class S>
__device__ __forceinline__ void spread(const Problem& p, int first, int count, int tile, int column,
                                       typename S::Shared& shared, int thread) {
    if (thread >= S::ITEMS) return;
    const int token = thread / S::LANES, lane = thread % S::LANES, at = lane * EIGHT;
    uint8_t* const row = shared.x[tile % S::X_STAGES][token];
    const float4* mixing = shared.mixing[tile % S::Y_STAGES][token];
    const float4 post = mixing[0];
    float4 comb[COPIES];
    uint4 x[COPIES];
#pragma unroll
    for (int j = 0; j < COPIES; ++j) {
        comb[j] = mixing[1 + j];
        x[j] = *reinterpret_cast<const uint4*>(row + 2 * (j * S::COLUMNS + at));
    }
    const uint4 y = output_of<S>(p, shared, tile, token, lane);
    float products[PRODUCTS] = {};
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
        auto of = [pair](uint4& v) -> uint32_t& { return pair < 2 ? (pair ? v.y : v.x) : (pair == 2 ? v.z : v.w); };
        uint4 all = y;
        const float y0 = low_bf16(of(all)), y1 = high_bf16(of(all));
        float made[COPIES][2];
#pragma unroll
        for (int k = 0; k < COPIES; ++k) {
            auto element = [k](const float4& v) { return k < 2 ? (k ? v.y : v.x) : (k == 2 ? v.z : v.w); };
            made[k][0] = element(post) * y0, made[k][1] = element(post) * y1;
#pragma unroll
            for (int j = 0; j < COPIES; ++j) {
                made[k][0] = fmaf(element(comb[j]), low_bf16(of(x[j])), made[k][0]);
                made[k][1] = fmaf(element(comb[j]), high_bf16(of(x[j])), made[k][1]);
            }
        }
#pragma unroll
        for (int k = 0; k < COPIES; ++k) {
            const uint32_t rounded = ptx::pack_bf16x2(made[k][0], made[k][1]);
            of(x[k]) = rounded;
            made[k][0] = low_bf16(rounded), made[k][1] = high_bf16(rounded);
        }
        int product = 0;
#pragma unroll
        for (int j = 0; j < COPIES; ++j) {
#pragma unroll
            for (int k = j; k < COPIES; ++k, ++product)
                products[product] = fmaf(made[j][1], made[k][1], fmaf(made[j][0], made[k][0], products[product]));
        }
    }
    const bool real = token < count && column + at < p.hidden;
    const int64_t to = (first + tile * S::TILE + token) * int64_t(COPIES);
#pragma unroll
    for (int k = 0; k < COPIES; ++k) {
        *reinterpret_cast<uint4*>(row + 2 * (k * S::COLUMNS + at)) = x[k];
        if (real) *reinterpret_cast<uint4*>(p.new_copies + (to + k) * p.hidden + column + at) = x[k];
    }
#pragma unroll
    for (int i = 0; i < PRODUCTS; ++i) {
#pragma unroll
        for (int apart = S::LANES / 2; apart; apart /= 2) products[i] += __shfl_xor_sync(ALL, products[i], apart);
        if (lane == 0) shared.products[token][i] = products[i];
    }
}

// A warp's columns of fn, each value as the sum of two bf16, which is off by 2^-17 of it at most: the second factor of
// mma.m16n8k16, three times eight rows of fn.
template <class S>
struct Weights {
    static constexpr int ROW_TILES = ROWS / 8;
    uint32_t high[S::STEPS][ROW_TILES][2], low[S::STEPS][ROW_TILES][2];

    __device__ __forceinline__ void load(const float* fn, int hidden, int column, int warp, int lane) {
#pragma unroll
        for (int s = 0; s < S::STEPS; ++s) {
            const int k = 16 * (warp * S::STEPS + s), copy = k / S::COLUMNS, at = column + k % S::COLUMNS;
            float2 value[ROW_TILES][2];
#pragma unroll
            for (int tile = 0; tile < ROW_TILES; ++tile) {
                const float* from = fn + (int64_t(8 * tile + lane / 4) * COPIES + copy) * hidden + at + lane % 4 * 2;
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    value[tile][half] = at < hidden ? *reinterpret_cast<const float2*>(from + 8 * half)
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

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&a)[4], uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(from)
                 : "memory");
}
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The tile's tokens times this warp's columns of fn.
template <class S>
__device__ __forceinline__ void multiply(const Weights<S>& fn, int count, int tile, typename S::Shared& shared,
                                         int warp, int lane) {
    constexpr int ROW_TILES = Weights<S>::ROW_TILES;
#pragma unroll
    for (int from = 0; from < S::TILE; from += 16) {
        if (from >= count) return;
        float sum[ROW_TILES][4] = {};
        const uint32_t row = ptx::smem_address(shared.x[tile % S::X_STAGES][from + lane % 16]) + lane / 16 * 16;
#pragma unroll
        for (int s = 0; s < S::STEPS; ++s) {
            uint32_t a[4];
            ldmatrix_x4(a, row + 32 * (warp * S::STEPS + s));
#pragma unroll
            for (int t = 0; t < ROW_TILES; ++t) mma(sum[t], a, fn.low[s][t]);
#pragma unroll
            for (int t = 0; t < ROW_TILES; ++t) mma(sum[t], a, fn.high[s][t]);
        }
#pragma unroll
        for (int t = 0; t < ROW_TILES; ++t) {
            float* to = &shared.dots[warp][from + lane / 4][8 * t + lane % 4 * 2];
            *reinterpret_cast<float2*>(to) = make_float2(sum[t][0], sum[t][1]);
            *reinterpret_cast<float2*>(to + 8 * ROWS) = make_float2(sum[t][2], sum[t][3]);
        }
    }
}

// The norm's weight for a thread's eight columns.
template <class S>
__device__ __forceinline__ uint4 norm_of(const Problem& p, int column, int thread) {
    const int at = column + thread % S::LANES * EIGHT;
    return at < p.hidden ? *reinterpret_cast<const uint4*>(p.norm + at) : make_uint4(0, 0, 0, 0);
}

// out of eight columns a thread, of the tile's x' and weights.
template <class S>
__device__ __forceinline__ void write_out(const Problem& p, uint4 norm, int first, int count, int tile, int column,
                                          const typename S::Shared& shared, int thread) {
    const int token = thread / S::LANES, at = thread % S::LANES * EIGHT;
    if (thread >= S::ITEMS || token >= count || column + at >= p.hidden) return;
    const uint8_t* const row = shared.x[tile % S::X_STAGES][token];
    float u[EIGHT] = {};
#pragma unroll
    for (int j = 0; j < COPIES; ++j) {
        const float weight = shared.weights[tile % 2][token][j];
        const uint4 x = *reinterpret_cast<const uint4*>(row + 2 * (j * S::COLUMNS + at));
        const uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u[2 * i] = fmaf(weight, low_bf16(pairs[i]), u[2 * i]);
            u[2 * i + 1] = fmaf(weight, high_bf16(pairs[i]), u[2 * i + 1]);
        }
    }
    const uint32_t by[4] = {norm.x, norm.y, norm.z, norm.w};
    uint32_t made[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        made[i] = ptx::pack_bf16x2(u[2 * i] * low_bf16(by[i]), u[2 * i + 1] * high_bf16(by[i]));
    const int64_t to = (first + tile * S::TILE + token) * int64_t(p.hidden) + column + at;
    *reinterpret_cast<uint4*>(p.out + to) = make_uint4(made[0], made[1], made[2], made[3]);
}

}  // namespace columns
