// An honest CUDA kernel for linear, one warp a row. Nothing to stop.
// PROBLEM = "linear"
// VERDICT = "PASSED"
#include "gemv.cuh"

extern "C" int launch(const float* w, const float* x, float* y, int m, int k) {
    gemv<<<(m + WARPS - 1) / WARPS, 32 * WARPS>>>(w, x, y, m, k);
    return cudaGetLastError();
}
