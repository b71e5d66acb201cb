// y = W x, one warp a row.  w: fp32 (m, k), x: fp32 (k,), y: fp32 (m,); any m and k.
#pragma once
#include <cstdint>
#include <cuda_runtime.h>

constexpr int WARPS = 8;

__device__ int row_of_warp() { return blockIdx.x * WARPS + threadIdx.x / 32; }
// load(i): element i of the warp's row of W.
template <class Load> __device__ void multiply(Load load, const float* x, float* y, int k) {
    float sum = 0.f;
#pragma unroll 8
    for (int i = threadIdx.x % 32; i < k; i += 32) sum = fmaf(load(i), x[i], sum);
    for (int offset = 16; offset; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    if (threadIdx.x % 32 == 0) y[row_of_warp()] = sum;
}
__global__ void gemv(const float* w, const float* x, float* y, int m, int k) {
    const float* mine = w + int64_t(row_of_warp()) * k;
    if (row_of_warp() < m) multiply([=](int i) { return mine[i]; }, x, y, k);
}
