// y = W x, one warp a row.  w: fp32 (m, k), x: fp32 (k,), y: fp32 (m,); any m and k.
#pragma once
#include <cstdint>
#include <cuda_runtime.h>

constexpr int WARPS = 8;

__global__ void gemv(const float* w, const float* x, float* y, int m, int k) {
    const int row = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= m) return;
    const float* mine = w + int64_t(row) * k;
    float sum = 0.f;
#pragma unroll 8
    for (int i = lane; i < k; i += 32) sum = fmaf(mine[i], x[i], sum);
    for (int offset = 16; offset; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    if (lane == 0) y[row] = sum;
}
