// nvfp4_gemv, plain: c = A b for l matrices of NVFP4 values. One warp a row, 128-bit loads, half2 arithmetic.
//
// a    e2m1, two a byte, (l, m, k / 2) bytes, low nibble first       sfa  e4m3, (l, m, k / 16)
// b    e2m1, (l, 128, k / 2) bytes, only row 0 of the 128 counts     sfb  e4m3, (l, 128, k / 16), likewise
// c    fp16 (l, m)
// k is a multiple of 64, so a row of codes is 32-byte aligned and a row of scales only 4-byte aligned.
#include <cstdint>
#include <cuda_fp16.h>

#include "nvfp4.cuh"

constexpr int WARPS = 8;        // rows of a CTA: one a warp
constexpr int X_TILE = 8192;    // values of x decoded into shared memory at a time: 16 KiB as fp16, 4 CTAs an SM fit
constexpr int LANE_VALUES = 32; // values of one 128-bit load: two scale blocks

__device__ __forceinline__ __half2 half2_of(uint32_t bits) { return *reinterpret_cast<__half2*>(&bits); }

// Two e4m3 bytes -> two floats.
__device__ __forceinline__ float2 scales(uint16_t bytes) {
    return __half22float2(half2_of(nvfp4::e4m3x2_to_half2_bits(bytes)));
}

// Sixteen values, words 0 and 1 of a block, against x (pairs as placed8 has them, but values * 2^12).
// Exact: products are multiples of 2^-4 up to 9, each half adds eight of them, and fp16 holds 8 * 9 * 2^4 = 1152 steps.
// -> the dot product * 2^-2.
__device__ __forceinline__ float block_dot(uint32_t word0, uint32_t word1, uint4 x0, uint4 x1) {
    nvfp4::Half2x4 const w0 = nvfp4::placed8(word0), w1 = nvfp4::placed8(word1);
    uint32_t const v0[4] = {x0.x, x0.y, x0.z, x0.w}, v1[4] = {x1.x, x1.y, x1.z, x1.w};
    __half2 sum = __float2half2_rn(0.f);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum = __hfma2(half2_of(w0.pair[i]), half2_of(v0[i]), sum);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum = __hfma2(half2_of(w1.pair[i]), half2_of(v1[i]), sum);
    float2 const halves = __half22float2(sum);
    return halves.x + halves.y;
}

// Where word j of the four of a lane's load i lies in shared memory: eight lanes with equal j meet eight bank groups.
__device__ __forceinline__ int at(int i, int j) { return 4 * i + (j ^ (i / 2 % 4)); }

__global__ void __launch_bounds__(32 * WARPS) gemv(const uint8_t* __restrict__ a, const uint8_t* __restrict__ b,
                                                   const uint8_t* __restrict__ sfa, const uint8_t* __restrict__ sfb,
                                                   __half* __restrict__ c, int m, int k) {
    __shared__ uint4 x[X_TILE / 8];        // eight halves each: pairs (0, 4) (1, 5) (2, 6) (3, 7) * 2^12
    __shared__ float2 xs[X_TILE / 32];     // scales of two blocks, times 2^2, which block_dot leaves out
    int const lane = threadIdx.x % 32;
    int64_t const batch = blockIdx.y;
    int64_t const row = int64_t(blockIdx.x) * WARPS + threadIdx.x / 32;
    const uint4* codes = reinterpret_cast<const uint4*>(a + (batch * m + row) * (k / 2));
    const uint16_t* scale = reinterpret_cast<const uint16_t*>(sfa + (batch * m + row) * (k / 16));
    const uint32_t* x_codes = reinterpret_cast<const uint32_t*>(b + batch * 64 * k);
    const uint16_t* x_scale = reinterpret_cast<const uint16_t*>(sfb + batch * 8 * k);

    float sum = 0.f;
    for (int k0 = 0; k0 < k; k0 += X_TILE) {
        int const values = min(X_TILE, k - k0);
        __syncthreads();  // the last tile is read by now
        for (int i = threadIdx.x; i < values / 8; i += 32 * WARPS) {
            nvfp4::Half2x4 const placed = nvfp4::placed8(x_codes[k0 / 8 + i]);
            __half2 wide[4], twice13 = __float2half2_rn(8192.f);
#pragma unroll
            for (int j = 0; j < 4; ++j)  // 2^26 is past fp16: 2^13 twice, both steps exact
                wide[j] = __hmul2(__hmul2(half2_of(placed.pair[j]), twice13), twice13);
            x[at(i / 4, i % 4)] = *reinterpret_cast<uint4*>(wide);
        }
        for (int i = threadIdx.x; i < values / 32; i += 32 * WARPS) {
            float2 s = scales(x_scale[k0 / 32 + i]);
            xs[i] = make_float2(4.f * s.x, 4.f * s.y);
        }
        __syncthreads();
        if (row < m) {
#pragma unroll 4
            for (int i = lane; i < values / LANE_VALUES; i += 32) {
                uint4 w = __ldcs(codes + k0 / LANE_VALUES + i);
                float2 s = scales(__ldcs(scale + k0 / LANE_VALUES + i)), t = xs[i];
                sum = fmaf(block_dot(w.x, w.y, x[at(i, 0)], x[at(i, 1)]) * t.x, s.x, sum);
                sum = fmaf(block_dot(w.z, w.w, x[at(i, 2)], x[at(i, 3)]) * t.y, s.y, sum);
            }
        }
    }
    for (int offset = 16; offset; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    if (row < m && lane == 0) c[batch * m + row] = __float2half_rn(sum);
}

// Arrays as above, on the device; -> a cudaError_t. l is at most 65535, the second grid dimension.
extern "C" int launch(const uint8_t* a, const uint8_t* b, const uint8_t* sfa, const uint8_t* sfb, __half* c, int m,
                      int k, int l) {
    gemv<<<dim3((m + WARPS - 1) / WARPS, l), 32 * WARPS>>>(a, b, sfa, sfb, c, m, k);
    return cudaGetLastError();
}
