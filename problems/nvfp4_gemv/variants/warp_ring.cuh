// nvfp4_gemv with x in registers and the weights in a short private ring of each warp; the arithmetic is a parameter.
//
// a    e2m1, two a byte, (l, m, k / 2) bytes, low nibble first       sfa  e4m3, (l, m, k / 16)
// b    e2m1, (l, 128, k / 2) bytes, only row 0 of the 128 counts     sfb  e4m3, (l, 128, k / 16), likewise
// c    fp16 (l, m)
// k is a multiple of 64, so a row of codes is 32-byte aligned and a row of scales only 4-byte aligned.
//
// A CTA owns neighbouring rows of one batch, a warp one slice of 1024 values along k, whose part of x it decodes
// itself: no barrier stands before the first product. A lane meets the same 32 values of x in all rows. The sums of a
// row's slices meet in shared memory and are added in a fixed order.
//
// About 74 KB under way an SM is best on an H200: 110 KB or more delays the first rows and costs 5 % and over.
// Shares in whole groups of ROWS: one that ends within a group costs 4 %, more than equal shares gain.
#pragma once

#include <cstdint>
#include <cuda_fp16.h>

#include "ptx.cuh"

namespace warp_ring {

constexpr int SLICE = 1024;               // values of a row that a warp takes: 32 a lane, two blocks, 16 B of codes
constexpr int SLICE_CODES = SLICE / 2;    // bytes
constexpr int SLICE_SCALES = SLICE / 16;  // bytes
constexpr int ROW_BYTES = SLICE_CODES + SLICE_SCALES;
constexpr int MAX_PARTIALS = 8192;        // slices times rows of a CTA: bounds the partial sums to 32 KiB

// ---- device helpers

__device__ __forceinline__ uint4 load16(uint32_t from) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from));
    return v;
}
__device__ __forceinline__ uint16_t load2(uint32_t from) {
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(from));
    return v;
}

// Sums of N rows over the warp: lane i gets row i / (32 / N). Half of the rows change hands at each of the first steps.
template <int N>
__device__ __forceinline__ float reduce(float (&sums)[N], int lane) {
    int bit = 16;
#pragma unroll
    for (int n = N; n > 1; n /= 2, bit /= 2) {
        bool const upper = lane & bit;
#pragma unroll
        for (int i = 0; i < n / 2; ++i) {
            float const keep = upper ? sums[i + n / 2] : sums[i], give = upper ? sums[i] : sums[i + n / 2];
            sums[i] = keep + __shfl_xor_sync(~0u, give, bit);
        }
    }
#pragma unroll
    for (; bit; bit /= 2) sums[0] += __shfl_xor_sync(~0u, sums[0], bit);
    return sums[0];
}

// ---- kernel

// X: what a lane keeps of x. X(codes, scales, inside) takes 32 values, zeros unless inside; x.row_sum(codes, scales) is
// 1 / X::UNIT times the sum of two blocks of a row against it.
// ROWS: of a step of a warp, a power of two; NUM_STAGES: steps under way in its ring; LONG_K: more slices than WARPS.
// Grid (CTAs of a batch, l), block (32 * slices along k, groups of rows); most_rows: of a CTA, a multiple of ROWS.
template <class X, int ROWS, int NUM_STAGES, int WARPS, int CTAS_PER_SM, bool LONG_K>
__global__ void __launch_bounds__(32 * WARPS, CTAS_PER_SM)
    gemv(const uint8_t* __restrict__ a, const uint8_t* __restrict__ b, const uint8_t* __restrict__ sfa,
         const uint8_t* __restrict__ sfb, __half* __restrict__ c, int m, int k, int most_rows) {
    static_assert(ROWS % 2 == 0 && 32 % ROWS == 0, "one copy brings the scales of two rows; a lane reports one row");
    constexpr int STAGE_BYTES = ROWS * ROW_BYTES;
    constexpr int ROW_LANES = 32 / ROWS;  // lanes that hold the same row's sum
    extern __shared__ __align__(128) uint8_t shared[];
    int const lane = threadIdx.x % 32, slice = threadIdx.x / 32, slices = blockDim.x / 32;
    int const group = threadIdx.y, groups = blockDim.y, batch = blockIdx.y;
    int const begin = blockIdx.x * most_rows, rows = min(most_rows, m - begin), step = groups * ROWS;
    int64_t const first_row = int64_t(batch) * m + begin;
    uint32_t const code_row = k / 2, scale_row = k / 16;  // bytes
    uint32_t const ring =
        uint32_t(__cvta_generic_to_shared(shared)) + (group * slices + slice) * (NUM_STAGES * STAGE_BYTES);
    float* const partial =
        reinterpret_cast<float*>(shared + groups * slices * (NUM_STAGES * STAGE_BYTES));  // [slices of k][rows]

    int at = slice;  // of k
    do {
        int const value = at * SLICE + 32 * lane;
        // Lanes past the end of a row copy its start, against an x of zeros.
        bool const inside = value < k;
        int const code = inside ? value / 2 : 0, word = at * SLICE_SCALES + lane % 16 * 4;
        uint4 const x_codes = __ldg(reinterpret_cast<const uint4*>(b + int64_t(batch) * 64 * k + code));
        uint16_t const x_scales = __ldg(reinterpret_cast<const uint16_t*>(sfb + int64_t(batch) * 8 * k + code / 8));

        // The next rows to ask for. A scale row of a slice is 16 words: half a warp copies it.
        int ahead = group * ROWS;
        const uint8_t* codes = a + (first_row + ahead) * code_row + code;
        const uint8_t* scales = sfa + (first_row + ahead + lane / 16) * scale_row + (word < int(scale_row) ? word : 0);
        // to: this lane's codes in the stage; its words of scales lie from_codes further on.
        uint32_t const from_codes = ROWS * SLICE_CODES - 12 * lane;
        auto const fill = [&](uint32_t to) {
            if (ahead + ROWS <= rows) {
#pragma unroll
                for (int i = 0; i < ROWS; ++i) ptx::cp_async16(to + i * SLICE_CODES, codes + i * code_row);
#pragma unroll
                for (int i = 0; i < ROWS; i += 2)
                    ptx::cp_async4(to + from_codes + i * SLICE_SCALES, scales + i * scale_row);
            } else {
#pragma unroll 1
                for (int i = 0; i < rows - ahead; ++i) {
                    ptx::cp_async16(to + i * SLICE_CODES, codes + i * code_row);
                    if (lane < 16) ptx::cp_async4(to + from_codes + i * SLICE_SCALES, scales + i * scale_row);
                }
            }
            ptx::cp_async_commit();
            ahead += step, codes += step * code_row, scales += step * scale_row;
        };
        uint32_t stage = ring + 16 * lane;
        uint32_t const last = stage + (NUM_STAGES - 1) * STAGE_BYTES;
#pragma unroll 1
        for (int i = 0; i < NUM_STAGES; ++i) fill(stage + i * STAGE_BYTES);

        X const x(x_codes, x_scales, inside);
        float* to = partial + at * rows + group * ROWS + lane / ROW_LANES;
        int left = rows - group * ROWS - lane / ROW_LANES;  // rows from this lane's on
#pragma unroll 1
        for (int row = group * ROWS; row < rows; row += step) {
            ptx::cp_async_wait<NUM_STAGES - 1>();
            __syncwarp();
            uint4 w[ROWS];
            uint16_t s[ROWS];
#pragma unroll
            for (int i = 0; i < ROWS; ++i) w[i] = load16(stage + i * SLICE_CODES);
#pragma unroll
            for (int i = 0; i < ROWS; ++i) s[i] = load2(stage + from_codes - 2 * lane + i * SLICE_SCALES);
            __syncwarp();  // all have read: the stage may be filled again
            fill(stage);
            stage = stage == last ? last - (NUM_STAGES - 1) * STAGE_BYTES : stage + STAGE_BYTES;
            float sums[ROWS];
#pragma unroll
            for (int i = 0; i < ROWS; ++i) sums[i] = x.row_sum(w[i], s[i]);  // of rows past the end: whatever lay there
            float const sum = reduce(sums, lane);
            if (lane % ROW_LANES == 0 && left > 0) *to = sum;
            to += step, left -= step;
        }
        if (LONG_K) ptx::cp_async_wait_all();
        at += slices;
    } while (LONG_K && at * SLICE < k);

    __syncthreads();
    for (int row = group * blockDim.x + threadIdx.x; row < rows; row += groups * blockDim.x) {
        float sum = partial[row];
        for (int i = 1; i * SLICE < k; ++i) sum += partial[i * rows + row];
        c[first_row + row] = __float2half_rn(X::UNIT * sum);
    }
}

// ---- launcher

// One wave of CTAs with equal shares of rows; more waves where a share would pass MAX_PARTIALS. l is at most 65535.
template <class X, int ROWS, int NUM_STAGES, int WARPS, int CTAS_PER_SM>
cudaError_t run(const uint8_t* a, const uint8_t* b, const uint8_t* sfa, const uint8_t* sfb, __half* c, int m, int k,
                int l) {
    int sms = 0;
    if (cudaError_t error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0)) return error;
    int const all_slices = (k + SLICE - 1) / SLICE, slices = min(all_slices, WARPS), groups = WARPS / slices;
    int const step = groups * ROWS, limit = max(MAX_PARTIALS / all_slices / ROWS, 1) * ROWS;
    int const share = max(min(sms * CTAS_PER_SM / l, (m + step - 1) / step), 1);  // CTAs a batch in one wave
    int const rows = min(((m + share - 1) / share + ROWS - 1) / ROWS * ROWS, limit);
    int const bytes = slices * groups * NUM_STAGES * ROWS * ROW_BYTES + all_slices * rows * 4;
    auto const kernel = all_slices > slices ? gemv<X, ROWS, NUM_STAGES, WARPS, CTAS_PER_SM, true>
                                            : gemv<X, ROWS, NUM_STAGES, WARPS, CTAS_PER_SM, false>;
    if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) {
        return error;
    }
    kernel<<<dim3((m + rows - 1) / rows, l), dim3(32 * slices, groups), bytes>>>(a, b, sfa, sfb, c, m, k, rows);
    return cudaGetLastError();
}

}  // namespace warp_ring
