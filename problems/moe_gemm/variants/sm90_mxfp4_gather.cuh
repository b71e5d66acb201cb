// x for sm90_mxfp4: in FP8, once for each token, while slots are sorted; then each slot's row, as the products read it.
// Rounding is fp8.quantise_groups of problems/common.
#pragma once

#include "sm90_mxfp4_form.cuh"

namespace mxfp4 {

using prefill::GATHER_CHUNKS, prefill::GATHER_THREADS;
static_assert(GATHER_CHUNKS <= 8, "each of a row's eight lanes copies the scale of one chunk");
constexpr int QUANTISE_AT_ONCE = 2, QUANTISE_CLUSTERS = 12;  // groups of a thread; at most, as all are to fit at once

// A pair of bf16 times 2^-s as e4m3, in the low half.
__device__ __forceinline__ uint32_t codes_of(uint32_t pair, float low_inverse, float high_inverse) {
    return pack_e4m3x2(__uint_as_float(pair << 16) * low_inverse, __uint_as_float(pair & 0xFFFF0000u) * high_inverse);
}

// Of a row's chunk, eight threads have 16 columns each, of which piece `piece` of the 128 bytes is made: columns
// 32 c + 4 piece .. + 3 for c = 0 .. 3.
__device__ __forceinline__ void load_piece(uint2 (&v)[4], const bf16* chunk, int columns, int piece) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        v[c] = make_uint2(0, 0);
        if (32 * c < columns) v[c] = __ldg(reinterpret_cast<const uint2*>(chunk + 32 * c + 4 * piece));
    }
}

// -> the piece; scale: of the group. eight: lanes of the row.
__device__ __forceinline__ uint4 quantise_piece(const uint2 (&v)[4], uint32_t eight, float& scale) {
    const uint32_t pairs[8] = {v[0].x, v[0].y, v[1].x, v[1].y, v[2].x, v[2].y, v[3].x, v[3].y};
    const uint32_t least = prefill::least_of_eight(pairs, eight);
    const float inverse = inverse_of(least);
    uint32_t words[4];
#pragma unroll
    for (int c = 0; c < 4; ++c)
        words[c] = codes_of(v[c].x, inverse, inverse) | codes_of(v[c].y, inverse, inverse) << 16;
    scale = scale_of(least);
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// Groups of 128 columns of all tokens -> [T][chunks] of codes, 128 bytes, and of scales. Eight threads have a group.
__device__ __forceinline__ void quantise(const bf16* x, uint8_t* codes, float* scales, int groups, int hidden,
                                         int block, int blocks) {
    const int piece = threadIdx.x % 8, chunks = chunks_of(hidden);
    const int apart = blocks * (prefill::ROUTE_THREADS / 8);
    const uint32_t eight = 0xFFu << threadIdx.x % 32 / 8 * 8;
#pragma unroll 1
    for (int first = (block * prefill::ROUTE_THREADS + threadIdx.x) / 8; first < groups;
         first += QUANTISE_AT_ONCE * apart) {
        uint2 v[QUANTISE_AT_ONCE][4];
#pragma unroll
        for (int i = 0; i < QUANTISE_AT_ONCE; ++i) {
            const int group = min(first + i * apart, groups - 1), token = group / chunks, chunk = group % chunks;
            load_piece(v[i], x + int64_t(token) * hidden + chunk * COLUMNS, hidden - chunk * COLUMNS, piece);
        }
#pragma unroll
        for (int i = 0; i < QUANTISE_AT_ONCE; ++i) {
            const int group = first + i * apart;
            if (group >= groups) break;
            float scale;
            reinterpret_cast<uint4*>(codes)[int64_t(group) * 8 + piece] = quantise_piece(v[i], eight, scale);
            if (piece == 0) scales[group] = scale;
        }
    }
}

// The first cluster sorts, the others quantise.
__global__ void __cluster_dims__(prefill::ROUTE_BLOCKS, 1, 1) __launch_bounds__(prefill::ROUTE_THREADS)
    route(const int* ids, const float* weights, prefill::Tables tables, int slots, int topk, int experts, int few,
          int many, const bf16* x, uint8_t* codes, float* scales, int groups, int hidden) {
    programmatic::trigger();
    if (blockIdx.x < prefill::ROUTE_BLOCKS)
        prefill::sort(ids, weights, tables, slots, topk, experts, few, many);
    else
        quantise(x, codes, scales, groups, hidden, blockIdx.x - prefill::ROUTE_BLOCKS,
                 gridDim.x - prefill::ROUTE_BLOCKS);
}

// Of item blockIdx.x, those of `many` first, GATHER_CHUNKS chunks of 128 columns: tokens' codes and scales -> those of
// slots, as Product has them.
__global__ void __launch_bounds__(GATHER_THREADS)
    gather(const uint8_t* token_codes, const float* token_scales, uint8_t* codes, float* scales, prefill::Tables tables,
           int slots, int all_scales, int chunks) {
    programmatic::trigger();
    programmatic::wait();
    const int many = __ldcg(tables.many.head), both = many + __ldcg(tables.few.head), index = blockIdx.x;
    if (index >= both) return;
    const int4 item = __ldcg(index < many ? tables.many.items + index : tables.few.items + index - many);
    const int piece = threadIdx.x % 8, first = blockIdx.y * GATHER_CHUNKS, left = chunks - first;
    float* const scales_to = scales + int64_t(first + piece) * all_scales + scale_slot(item.x, item.y);
#pragma unroll 1
    for (int row = threadIdx.x / 8; row < item.z; row += GATHER_THREADS / 8) {
        const int64_t from = int64_t(__ldcg(tables.token + item.y + row)) * chunks + first;
        uint4 v[GATHER_CHUNKS];
        float scale = 0;
#pragma unroll
        for (int i = 0; i < GATHER_CHUNKS; ++i)
            if (i < left) v[i] = __ldcg(reinterpret_cast<const uint4*>(token_codes) + (from + i) * 8 + piece);
        if (piece < left) scale = __ldcg(token_scales + from + piece);
#pragma unroll
        for (int i = 0; i < GATHER_CHUNKS; ++i)
            if (i < left)
                reinterpret_cast<uint4*>(codes)[(int64_t(first + i) * slots + item.y + row) * 8 + (piece ^ row % 8)] =
                    v[i];
        if (piece < left) scales_to[scale_at(row)] = scale;
    }
}

}  // namespace mxfp4
