// What kernels with a block of 64 heads have in common: the problem, what of it a block works on, queries, output.
#pragma once

#include "combine.cuh"
#include "launch.cuh"
#include "ptx.cuh"
#include "sm90_gather.cuh"

namespace fmha {

constexpr int BLOCK_M = 64;  // heads of a block
constexpr int SHARED_LIMIT = 227 * 1024;

struct Problem {
    const __nv_bfloat16* q;
    Cache window, compressed;
    const int *window_index, *window_length, *compressed_index, *compressed_length;
    const float* sink;
    Turn turn;
    __nv_bfloat16* out;
    float* lse;
    __half* partial;  // of splits: (splits, B S H, 512)
    float4* stats;    // of splits: (splits, B S H), see combine.cuh
    int rows, heads, nw, nc;        // rows: B S H
    Divisor queries, tiles, splits;  // S; tiles of BLOCK_M heads
    bool alike;  // the order in which sums of splits are added does not depend on how many there are
};

// What a block works on.
struct Item {
    // query: of B S; heads: of the block that exist, from `head` on; slice: of dims, see attend
    int query, head, heads, split, slice, batch;
    __device__ __forceinline__ Item(const Problem& p)
        : query(p.tiles(blockIdx.x)), head((blockIdx.x - query * p.tiles.by) * BLOCK_M),
          heads(min(BLOCK_M, p.heads - head)), split(blockIdx.y), slice(blockIdx.z), batch(p.queries(query)) {}
};

// ---- device helpers

__device__ __forceinline__ int2 lengths(const Problem& p, int batch) {
    return make_int2(min(max(__ldg(p.window_length + batch), 0), p.nw),
                     min(max(__ldg(p.compressed_length + batch), 0), p.nc));
}

__device__ __forceinline__ void store16(void* to, uint4 v) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

// The block's queries into shared memory, zeros for heads that do not exist. THREADS that follow a multiple of THREADS;
// cp_async_wait_all waits for them.
template <int THREADS = 128>
__device__ __forceinline__ void load_queries(const Problem& p, const Item& item, uint32_t to) {
    const __nv_bfloat16* const q = p.q + (int64_t(item.query) * p.heads + item.head) * HEAD_DIM;
    int const thread = threadIdx.x % THREADS, given = item.heads * (HEAD_DIM / 8);
#pragma unroll 4
    for (int at = thread; at < BLOCK_M * HEAD_DIM / 8; at += THREADS) {
        int const row = at / 64, tile = at / 8 % 8, c = at % 8;
        cp_async16(to + tile * (BLOCK_M * 128) + row * 128 + (c ^ row % 8) * 16, q + (at < given ? at * 8 : 0),
                   at < given);
    }
}

// ---- output

// O of this lane's two rows, of 128 CHUNKS dims from `dim` on, times the rows' factors, as 16-bit values, into `to`,
// (heads, 512), by way of the place of the queries. turn: of results, whose query `query` is.
template <bool SPLIT, int CHUNKS>
__device__ __forceinline__ void write_rows(const float (&o)[CHUNKS][64], float upper, float lower, int dim, int heads,
                                           uint32_t staging, uint16_t* to, const Turn& turn, int query) {
    int const warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, matrix_row = 16 * warp + lane % 16;
    auto const pair = [&](int i, float factor) {
        float const a = o[i / 64][i % 64] * factor, b = o[i / 64][i % 64 + 1] * factor;
        return SPLIT ? pack_f16x2(a, b) : pack_bf16x2(a, b);
    };
    staging += dim / 64 * (BLOCK_M * 128);
#pragma unroll
    for (int i = 0; i < 16 * CHUNKS; i += 2)
        stmatrix_x4(staging + i / 8 * (BLOCK_M * 128) + matrix_row * 128 + ((i % 8 + lane / 16) ^ matrix_row % 8) * 16,
                       pair(4 * i, upper), pair(4 * i + 2, lower), pair(4 * i + 4, upper), pair(4 * i + 6, lower));
    __syncwarp();
    constexpr int LANES = 16 * CHUNKS;  // of a row: a warp writes 256 dims at a time
    int const tile = lane % LANES / 8, c = lane % 8;
    Angles const angles(turn, query, SPLIT ? 0 : dim + lane % LANES * 8);
#pragma unroll 4
    for (int row = 16 * warp + lane / LANES; row < min(heads, 16 * warp + 16); row += 32 / LANES) {
        uint4 const v = load_shared16(staging + tile * (BLOCK_M * 128) + row * 128 + (c ^ row % 8) * 16);
        store16(to + row * HEAD_DIM + dim + lane % LANES * 8, angles(v));
    }
}

// O as result or as a split's part of it: of a half of the dims, or with one chunk of the quarter that `group` says.
// staging: where the queries were. factors: float [BLOCK_M] in shared memory, of the rows.
template <bool SPLIT, int CHUNKS>
__device__ __forceinline__ void write_result(const Problem& p, const Item& item, const float (&o)[CHUNKS][64], int half,
                                             int group, uint32_t staging, uint32_t factors) {
    int const warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, row = 16 * warp + lane / 4;
    float upper = __uint_as_float(load_shared(factors + 4 * row));
    float lower = __uint_as_float(load_shared(factors + 4 * row + 32));
    int64_t const at = int64_t(item.query) * p.heads + item.head;
    int const dim = half * (HEAD_DIM / 2) + (CHUNKS == 1 ? 128 * group : 0);
    if (SPLIT) {
        // Largest magnitude of a row's half to [2^14, 2^15), where fp16 has 11 bits down to 2^-28 of it.
        float largest[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < 64 * CHUNKS; ++i) largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], fabsf(o[i / 64][i % 64]));
        int64_t const place = int64_t(item.split) * p.rows + at;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            largest[h] = fmaxf(largest[h], __shfl_xor_sync(~0u, largest[h], 1));
            largest[h] = fmaxf(largest[h], __shfl_xor_sync(~0u, largest[h], 2));
        }
        if constexpr (CHUNKS == 1) {
            // The scale is of both groups' dims, as without slices: the same bits. By way of the other half's place.
            uint32_t const mine = staging + (half ^ 1) * (TILES / 2) * (BLOCK_M * 128) + 8 * (BLOCK_M * group + row);
            uint32_t const other = mine + 8 * BLOCK_M * (1 - 2 * group);
            if (lane % 4 == 0)
                store_shared(mine, __float_as_uint(largest[0])), store_shared(mine + 4, __float_as_uint(largest[1]));
            named_barrier_sync<256>(3);
            if (gridDim.z == 4 && group != item.slice % 2) return;  // another block's dims
            largest[0] = fmaxf(largest[0], __uint_as_float(load_shared(other)));
            largest[1] = fmaxf(largest[1], __uint_as_float(load_shared(other + 4)));
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float& factor = h ? lower : upper;
            largest[h] *= factor;
            // Exponents of 15 to 254: both powers are normal, and factor, at most 1 or so, times the first is finite.
            uint32_t const exponent = max(__float_as_uint(largest[h]) >> 23, 15u);
            factor *= __uint_as_float((268 - exponent) << 23);
            if (lane % 4 == 0 && row + 8 * h < item.heads && (CHUNKS > 1 || group == 0))
                (&p.stats[place + row + 8 * h].y)[half] = __uint_as_float((exponent - 14) << 23);
        }
        auto const to = reinterpret_cast<uint16_t*>(p.partial) + place * HEAD_DIM;
        write_rows<true>(o, upper, lower, dim, item.heads, staging, to, p.turn, item.query);
    } else {
        auto const to = reinterpret_cast<uint16_t*>(p.out) + at * HEAD_DIM;
        write_rows<false>(o, upper, lower, dim, item.heads, staging, to, p.turn, item.query);
    }
}

// ---- launcher

// Join what the splits of a query's entries left, as soon as they have.
inline cudaError_t join(const Problem& p) {
    int const splits = p.splits.by;
    bool const many = splits > COMBINE_BATCH || p.alike;  // more than one group has under way at once
    auto const combine = many ? fmha::combine<4, 1> : fmha::combine<1, 4>;
    return programmatic::launch(combine, dim3(many ? p.rows : (p.rows + 3) / 4), dim3(256), 0, p.partial, p.stats,
                                p.sink, p.turn, p.out, p.lse, p.rows, p.heads, splits);
}

}  // namespace fmha
