// x for sm90_mxfp4: each slot's row in FP8, as the products read it. Rounding is fp8.quantise_groups of problems/common.
#pragma once

#include "sm90_mxfp4_form.cuh"

namespace mxfp4 {

constexpr int GATHER_THREADS = 256, GATHER_CHUNKS = 4;

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
    const uint32_t most = prefill::largest_of_eight<1>(decode::largest(pairs), eight);
    const uint32_t least = decode::least_normal(decode::larger(most, most >> 16));
    const float inverse = inverse_of(least);
    uint32_t words[4];
#pragma unroll
    for (int c = 0; c < 4; ++c)
        words[c] = codes_of(v[c].x, inverse, inverse) | codes_of(v[c].y, inverse, inverse) << 16;
    scale = scale_of(least);
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// Of item blockIdx.x, those of `many` first, GATHER_CHUNKS chunks of 128 columns: x's rows -> codes and scales as Product
// has them.
__global__ void __launch_bounds__(GATHER_THREADS)
    gather(const bf16* x, uint8_t* codes, float* scales, prefill::Tables tables, int slots, int all_scales, int hidden) {
    programmatic::trigger();
    programmatic::wait();
    const int many = __ldcg(tables.many.head), both = many + __ldcg(tables.few.head), index = blockIdx.x;
    if (index >= both) return;
    const int4 item = __ldcg(index < many ? tables.many.items + index : tables.few.items + index - many);
    const int piece = threadIdx.x % 8, first = blockIdx.y * GATHER_CHUNKS;
    const int left = (hidden + COLUMNS - 1) / COLUMNS - first;
    const uint32_t eight = 0xFFu << threadIdx.x % 32 / 8 * 8;
#pragma unroll 1
    for (int row = threadIdx.x / 8; row < item.z; row += GATHER_THREADS / 8) {
        const bf16* const from = x + int64_t(__ldcg(tables.token + item.y + row)) * hidden + first * COLUMNS;
        uint2 v[GATHER_CHUNKS][4];
#pragma unroll
        for (int i = 0; i < GATHER_CHUNKS; ++i)
            load_piece(v[i], from + i * COLUMNS, hidden - (first + i) * COLUMNS, piece);
#pragma unroll
        for (int i = 0; i < GATHER_CHUNKS; ++i) {
            if (i >= left) break;
            float scale;
            const uint4 made = quantise_piece(v[i], eight, scale);
            const int64_t chunk = first + i;
            reinterpret_cast<uint4*>(codes)[(chunk * slots + item.y + row) * 8 + (piece ^ row % 8)] = made;
            if (piece == 0) scales[chunk * all_scales + scale_slot(item.x, item.y) + scale_at(row)] = scale;
        }
    }
}

}  // namespace mxfp4
