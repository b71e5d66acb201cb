// A row of values that a block holds in shared memory: norm, rotation, Hadamard, and the formats of the cache's pages.
//
// A row is `width` floats; its values are rounded to T, bf16 or fp32, where the chain of ops would store them. All
// functions are called by all THREADS of a block, and end with the row readable by every thread.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace rows {

constexpr int THREADS = 256;
constexpr unsigned ALL = 0xffffffffu;
constexpr int ENTRY_GROUP = 64;        // e4m3 values that share a scale (problems/common/kv_pages.py)
constexpr int ENTRY_SCALES = 8;        // bytes of an entry's scales
constexpr int KEY_GROUP = 32;          // e2m1 values that share a scale (weights/formats.py)
constexpr float E4M3_MAX = 448.0f, E2M1_MAX = 6.0f;
constexpr float ENTRY_FLOOR = 1e-4f;   // least amax of a group (problems/common/fp8.py)
constexpr float KEY_FLOOR = 6.0f * 0x1p-126f;
constexpr uint32_t INFINITY_BITS = 0x7F800000;

enum Kind { PLAIN_FP32, PLAIN_BF16, ENTRY, INDEX };  // as kernels/arguments.py numbers them

struct Pages {
    uint8_t* data;
    long long page_bytes;
    int kind, per_page, width, rope;
};

__device__ inline float load(const float* p) { return *p; }
__device__ inline float load(const __nv_bfloat16* p) { return __bfloat162float(*p); }
__device__ inline void store(float* p, float value) { *p = value; }
__device__ inline void store(__nv_bfloat16* p, float value) { *p = __float2bfloat16_rn(value); }

template <typename T>
__device__ float rounded(float value);
template <>
__device__ inline float rounded<float>(float value) { return value; }
template <>
__device__ inline float rounded<__nv_bfloat16>(float value) { return __bfloat162float(__float2bfloat16_rn(value)); }

// The sum over a block, in every thread; the same order each time.
__device__ inline float block_sum(float value) {
    __shared__ float part[THREADS / 32];
    for (int step = 16; step; step /= 2) value += __shfl_xor_sync(ALL, value, step);
    __syncthreads();  // an earlier sum may still be read
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = value;
    __syncthreads();
    float total = 0.0f;
    for (int i = 0; i < THREADS / 32; i++) total += part[i];
    return total;
}

template <typename T>
__device__ void load_row(const T* x, float* row, int width) {
    for (int i = threadIdx.x; i < width; i += THREADS) row[i] = load(x + i);
    __syncthreads();
}

template <typename T>
__device__ void store_row(const float* row, T* out, int width) {
    for (int i = threadIdx.x; i < width; i += THREADS) store(out + i, row[i]);
}

// RMSNorm, as torch_ops/norm.py; weight may be null.
template <typename T>
__device__ void norm(float* row, const T* weight, int width, float eps) {
    float square = 0.0f;
    for (int i = threadIdx.x; i < width; i += THREADS) square += row[i] * row[i];
    const float inverse = rsqrtf(block_sum(square) / width + eps);
    for (int i = threadIdx.x; i < width; i += THREADS) {
        const float scaled = row[i] * inverse;
        row[i] = rounded<T>(weight ? scaled * load(weight + i) : scaled);
    }
    __syncthreads();
}

// Rotate pair `i` of the last 2 * half values, as torch_ops/rope.py.
template <typename T>
__device__ void rotate_pair(float* row, int width, int half, int i, float cosine, float sine) {
    float* p = row + width - 2 * half + 2 * i;
    const float a = p[0], b = p[1];
    p[0] = rounded<T>(a * cosine - b * sine);
    p[1] = rounded<T>(a * sine + b * cosine);
}

// The product with the Sylvester matrix over sqrt(width), width a power of two, as formats.hadamard.
template <typename T>
__device__ void hadamard(float* row, int width) {
    for (int apart = 1; apart < width; apart *= 2) {
        for (int i = threadIdx.x; i < width / 2; i += THREADS) {
            float* p = row + i / apart * 2 * apart + i % apart;
            const float a = p[0], b = p[apart];
            p[0] = a + b, p[apart] = a - b;
        }
        __syncthreads();
    }
    const float scale = __fsqrt_rn(1.0f / width);  // of a power of two: rounded once
    for (int i = threadIdx.x; i < width; i += THREADS) row[i] = rounded<T>(row[i] * scale);
    __syncthreads();
}

// The largest magnitude of a warp's values, NaN if there is one: positive floats order as their bits do.
__device__ inline uint32_t warp_amax(uint32_t bits) {
    for (int step = 16; step; step /= 2) bits = max(bits, __shfl_xor_sync(ALL, bits, step));
    return bits;
}

__device__ inline uint32_t magnitude(float value) { return __float_as_uint(value) & 0x7FFFFFFF; }

// The least byte with largest * 2^(byte - 127) >= max(amax, floor); 255 for NaN and infinity. As fp8.ue8m0_scale.
__device__ inline uint32_t ue8m0(uint32_t amax, float largest, float floor) {
    const float wanted = __fdiv_rn(__uint_as_float(max(amax, __float_as_uint(floor))), largest);
    return (min(magnitude(wanted), INFINITY_BITS) + 0x7FFFFF) >> 23;
}

__device__ inline float ue8m0_value(uint32_t byte) { return __uint_as_float(byte == 255 ? 0x7FC00000 : byte << 23); }

// The nearest e2m1 code, ties to the even code, saturating; NaN becomes a 6.
__device__ inline uint32_t e2m1_code(float x) {
    const float size = fabsf(x);
    const uint32_t code = !(size <= 0.25f) + !(size < 0.75f) + !(size <= 1.25f) + !(size < 1.75f) + !(size <= 2.5f) +
                          !(size < 3.5f) + !(size <= 5.0f);
    return code | (__float_as_uint(x) >> 28 & 8);
}

// e4m3 values under a scale a 64, then bf16 ones. A warp a group, two values a lane.
__device__ inline void write_entry(const float* row, const Pages& pages, uint8_t* page, int slot) {
    const int nope = pages.width - pages.rope, payload = nope + 2 * pages.rope;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint8_t* to = page + static_cast<long long>(slot) * payload;
    uint8_t* scales = page + static_cast<long long>(pages.per_page) * payload + slot * ENTRY_SCALES;
    for (int group = warp; group < nope / ENTRY_GROUP; group += THREADS / 32) {
        const int at = group * ENTRY_GROUP + 2 * lane;
        const uint32_t amax = warp_amax(max(magnitude(row[at]), magnitude(row[at + 1])));
        const uint32_t byte = ue8m0(amax, E4M3_MAX, ENTRY_FLOOR);
        for (int i = 0; i < 2; i++)
            to[at + i] = __nv_cvt_float_to_fp8(__fdiv_rn(row[at + i], ue8m0_value(byte)), __NV_SATFINITE, __NV_E4M3);
        if (lane == 0) scales[group] = static_cast<uint8_t>(byte);
    }
    __nv_bfloat16* rest = reinterpret_cast<__nv_bfloat16*>(to + nope);
    for (int i = threadIdx.x; i < pages.rope; i += THREADS) store(rest + i, row[nope + i]);
}

// MXFP4: all codes of a page, then all scales. A warp a group, a value a lane.
__device__ inline void write_key(const float* row, const Pages& pages, uint8_t* page, int slot) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, groups = pages.width / KEY_GROUP;
    uint8_t* codes = page + static_cast<long long>(slot) * pages.width / 2;
    uint8_t* scales = page + static_cast<long long>(pages.per_page) * pages.width / 2 + slot * groups;
    for (int group = warp; group < groups; group += THREADS / 32) {
        const float value = row[group * KEY_GROUP + lane];
        const uint32_t byte = ue8m0(warp_amax(magnitude(value)), E2M1_MAX, KEY_FLOOR);
        const uint32_t code = e2m1_code(__fdiv_rn(value, ue8m0_value(byte)));
        const uint32_t next = __shfl_down_sync(ALL, code, 1);
        if (lane % 2 == 0) codes[(group * KEY_GROUP + lane) / 2] = static_cast<uint8_t>(code | next << 4);
        if (lane == 0) scales[group] = static_cast<uint8_t>(byte);
    }
}

// Row `index` of the pages, in their format.
__device__ inline void write(const float* row, const Pages& pages, long long index) {
    uint8_t* page = pages.data + index / pages.per_page * pages.page_bytes;
    const int slot = static_cast<int>(index % pages.per_page);
    const long long at = static_cast<long long>(slot) * pages.width;
    if (pages.kind == PLAIN_FP32) store_row(row, reinterpret_cast<float*>(page) + at, pages.width);
    if (pages.kind == PLAIN_BF16) store_row(row, reinterpret_cast<__nv_bfloat16*>(page) + at, pages.width);
    if (pages.kind == ENTRY) write_entry(row, pages, page, slot);
    if (pages.kind == INDEX) write_key(row, pages, page, slot);
}

}  // namespace rows
