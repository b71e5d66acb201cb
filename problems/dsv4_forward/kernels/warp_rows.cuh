// A row of bf16 values that a warp holds in registers: norm, rotation, Hadamard, and the formats of the cache's pages.
//
// What rows.cuh does in a block's shared memory, without a barrier, for rows of 128 to 512 values. A lane has VALUES
// values one behind the other of each chunk. All 32 lanes call every function.
#pragma once

#include <type_traits>

#include "rows.cuh"

namespace warp_rows {

using rows::ALL;
using rows::Pages;

// Both lie at multiples of 16 bytes, and so does every page and, but for keys of the indexer, every row.
inline bool aligned(const Pages& pages) {
    const int row = pages.kind == rows::INDEX ? 16 : pages.kind == rows::ENTRY ? pages.width + pages.rope : pages.width;
    return (reinterpret_cast<uintptr_t>(pages.data) | pages.page_bytes | row) % 16 == 0;
}

// The value of the e2m1 code in the low four bits: exponent and fraction where a small float has them.
__device__ __forceinline__ float e2m1(uint32_t code) {
    const float size = __uint_as_float((code & 7) << 22) * 0x1p126f;
    return code & 8 ? -size : size;
}

template <int WIDTH>
struct Row {
    static constexpr int VALUES = WIDTH >= 256 ? 8 : WIDTH / 32, CHUNKS = WIDTH / 32 / VALUES;
    using Word = std::conditional_t<VALUES == 8, uint4, uint2>;
    static_assert(WIDTH % 256 == 0 || WIDTH == 128);

    float at[CHUNKS][VALUES];

    // Weights of a norm, or a row, as they lie in memory.
    struct Words {
        Word each[CHUNKS];

        __device__ __forceinline__ void load(const __nv_bfloat16* from) {
#pragma unroll
            for (int k = 0; k < CHUNKS; k++) each[k] = *reinterpret_cast<const Word*>(from + first(k));
        }
    };

    // Cosine and sine of the pairs that are rotated: of the last 2 * half values.
    struct Turn {
        float cosine[CHUNKS][VALUES / 2], sine[CHUNKS][VALUES / 2];

        __device__ __forceinline__ void load(const float* cosines, const float* sines, int half) {
#pragma unroll
            for (int k = 0; k < CHUNKS; k++)
#pragma unroll
                for (int j = 0; j < VALUES / 2; j++) {
                    const int pair = first(k) / 2 + j - (WIDTH / 2 - half);
                    cosine[k][j] = pair < 0 ? 1.0f : cosines[pair];
                    sine[k][j] = pair < 0 ? 0.0f : sines[pair];
                }
        }
    };

    // Of this lane's values of a chunk.
    __device__ __forceinline__ static int first(int chunk) { return (chunk * 32 + threadIdx.x % 32) * VALUES; }

    __device__ __forceinline__ void take(const Words& words) {
#pragma unroll
        for (int k = 0; k < CHUNKS; k++)
#pragma unroll
            for (int j = 0; j < VALUES / 2; j++) {
                const float2 two = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162*>(words.each + k)[j]);
                at[k][2 * j] = two.x, at[k][2 * j + 1] = two.y;
            }
    }

    __device__ __forceinline__ void take(const float* row) {
#pragma unroll
        for (int k = 0; k < CHUNKS; k++)
#pragma unroll
            for (int j = 0; j < VALUES; j++) at[k][j] = row[first(k) + j];
    }

    __device__ __forceinline__ void store(__nv_bfloat16* out, int chunk) const {
        Word word;
#pragma unroll
        for (int j = 0; j < VALUES / 2; j++)
            reinterpret_cast<__nv_bfloat162*>(&word)[j] = __floats2bfloat162_rn(at[chunk][2 * j], at[chunk][2 * j + 1]);
        *reinterpret_cast<Word*>(out) = word;
    }

    __device__ __forceinline__ void store(__nv_bfloat16* out) const {
#pragma unroll
        for (int k = 0; k < CHUNKS; k++) store(out + first(k), k);
    }

    // RMSNorm, as torch_ops/norm.py. weighted: else without weights.
    __device__ __forceinline__ void norm(const Words& weights, bool weighted, float eps) {
        float square = 0.0f;
#pragma unroll
        for (int k = 0; k < CHUNKS; k++)
#pragma unroll
            for (int j = 0; j < VALUES; j++) square += at[k][j] * at[k][j];
#pragma unroll
        for (int step = 16; step; step /= 2) square += __shfl_xor_sync(ALL, square, step);
        const float inverse = rsqrtf(square / WIDTH + eps);
#pragma unroll
        for (int k = 0; k < CHUNKS; k++)
#pragma unroll
            for (int j = 0; j < VALUES; j++) {
                const float scaled = at[k][j] * inverse;
                const float factor = __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(weights.each + k)[j]);
                at[k][j] = rows::rounded<__nv_bfloat16>(weighted ? scaled * factor : scaled);
            }
    }

    // As torch_ops/rope.py.
    __device__ __forceinline__ void rotate(const Turn& turn, int half) {
#pragma unroll
        for (int k = 0; k < CHUNKS; k++)
#pragma unroll
            for (int j = 0; j < VALUES / 2; j++) {
                if (first(k) / 2 + j < WIDTH / 2 - half) continue;
                const float a = at[k][2 * j], b = at[k][2 * j + 1], c = turn.cosine[k][j], s = turn.sine[k][j];
                at[k][2 * j] = rows::rounded<__nv_bfloat16>(a * c - b * s);
                at[k][2 * j + 1] = rows::rounded<__nv_bfloat16>(a * s + b * c);
            }
    }

    // As rows::hadamard, in the same order.
    __device__ __forceinline__ void hadamard() {
        static_assert(CHUNKS == 1);
#pragma unroll
        for (int apart = 1; apart < VALUES; apart *= 2)
#pragma unroll
            for (int j = 0; j < VALUES; j++) {
                if (j & apart) continue;
                const float a = at[0][j], b = at[0][j + apart];
                at[0][j] = a + b, at[0][j + apart] = a - b;
            }
#pragma unroll
        for (int apart = 1; apart < 32; apart *= 2)
#pragma unroll
            for (int j = 0; j < VALUES; j++) {
                const float other = __shfl_xor_sync(ALL, at[0][j], apart);
                at[0][j] = threadIdx.x & apart ? other - at[0][j] : at[0][j] + other;
            }
        const float scale = __fsqrt_rn(1.0f / WIDTH);
#pragma unroll
        for (int j = 0; j < VALUES; j++) at[0][j] = rows::rounded<__nv_bfloat16>(at[0][j] * scale);
    }

    // The scale's byte of the `group` values that this lane's values of a chunk are among.
    __device__ __forceinline__ uint32_t scale_of(int chunk, int group, float largest, float floor) const {
        uint32_t amax = 0;
#pragma unroll
        for (int j = 0; j < VALUES; j++) amax = max(amax, rows::magnitude(at[chunk][j]));
#pragma unroll
        for (int step = 1; step < 64 / VALUES; step *= 2) {
            const uint32_t other = __shfl_xor_sync(ALL, amax, step);
            if (step * VALUES < group) amax = max(amax, other);
        }
        return rows::ue8m0(amax, largest, floor);
    }

    // 1 / 2^(byte - 127), exactly: floors keep a scale's byte below 254 unless it is the one of NaN.
    __device__ __forceinline__ static float inverse_of(uint32_t byte) {
        return __uint_as_float(byte == 255 ? 0x7FC00000 : (254 - byte) << 23);
    }

    // What a key of MXFP4, of one chunk, holds of the values.
    __device__ __forceinline__ void quantise_key() {
        const uint32_t byte = scale_of(0, rows::KEY_GROUP, rows::E2M1_MAX, rows::KEY_FLOOR);
#pragma unroll
        for (int j = 0; j < VALUES; j++)
            at[0][j] = e2m1(rows::e2m1_code(at[0][j] * inverse_of(byte))) * rows::ue8m0_value(byte);
    }

    __device__ __forceinline__ void write_entry(const Pages& pages, uint8_t* page, int slot) const {
        const int nope = pages.width - pages.rope, payload = nope + 2 * pages.rope;
        uint8_t* to = page + slot * payload;
        uint8_t* scales = page + pages.per_page * payload + slot * rows::ENTRY_SCALES;
#pragma unroll
        for (int k = 0; k < CHUNKS; k++) {
            const int mine = first(k);
            const uint32_t byte = scale_of(k, rows::ENTRY_GROUP, rows::E4M3_MAX, rows::ENTRY_FLOOR);
            if (mine >= nope) {
                store(reinterpret_cast<__nv_bfloat16*>(to + nope) + mine - nope, k);
                continue;
            }
            const float inverse = inverse_of(byte);
            uint32_t codes[VALUES / 4];
#pragma unroll
            for (int j = 0; j < VALUES; j += 4) {
                const float2 low = make_float2(at[k][j] * inverse, at[k][j + 1] * inverse);
                const float2 high = make_float2(at[k][j + 2] * inverse, at[k][j + 3] * inverse);
                codes[j / 4] = __nv_cvt_float2_to_fp8x2(low, __NV_SATFINITE, __NV_E4M3) |
                               static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(high, __NV_SATFINITE, __NV_E4M3)) << 16;
            }
#pragma unroll
            for (int j = 0; j < VALUES / 4; j++) reinterpret_cast<uint32_t*>(to + mine)[j] = codes[j];
            if (mine % rows::ENTRY_GROUP == 0) scales[mine / rows::ENTRY_GROUP] = static_cast<uint8_t>(byte);
        }
    }

    __device__ __forceinline__ void write_key(const Pages& pages, uint8_t* page, int slot) const {
        const uint32_t byte = scale_of(0, rows::KEY_GROUP, rows::E2M1_MAX, rows::KEY_FLOOR);
        uint32_t codes = 0;  // low nibble first
#pragma unroll
        for (int j = 0; j < VALUES; j++) codes |= rows::e2m1_code(at[0][j] * inverse_of(byte)) << 4 * j;
        uint8_t* scales = page + pages.per_page * (WIDTH / 2) + slot * (WIDTH / rows::KEY_GROUP);
        *reinterpret_cast<uint16_t*>(page + slot * (WIDTH / 2) + first(0) / 2) = static_cast<uint16_t>(codes);
        if (first(0) % rows::KEY_GROUP == 0) scales[first(0) / rows::KEY_GROUP] = static_cast<uint8_t>(byte);
    }

    // To row `index` of the pages, in their format; keys of the indexer: of one chunk.
    __device__ __forceinline__ void write(const Pages& pages, long long index) const {
        uint8_t* page = pages.data + index / pages.per_page * pages.page_bytes;
        const int slot = static_cast<int>(index % pages.per_page);
        if (pages.kind == rows::PLAIN_BF16) store(reinterpret_cast<__nv_bfloat16*>(page) + slot * WIDTH);
        if (pages.kind == rows::ENTRY) write_entry(pages, page, slot);
        if constexpr (CHUNKS == 1)
            if (pages.kind == rows::INDEX) write_key(pages, page, slot);
        if (pages.kind != rows::PLAIN_FP32) return;
#pragma unroll
        for (int k = 0; k < CHUNKS; k++)
#pragma unroll
            for (int j = 0; j < VALUES; j++) reinterpret_cast<float*>(page)[slot * WIDTH + first(k) + j] = at[k][j];
    }
};

}  // namespace warp_rows
