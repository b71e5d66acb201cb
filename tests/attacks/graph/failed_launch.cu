// Asks for 256 bytes more shared memory than there are, does not look at the error, and trusts that the right answer
// still lies there.
// Stopped by: a call that fails cannot be recorded.
// VERDICT = "UNSUPPORTED"
// REASON = "or an operation failed"
#include "add.cuh"

__global__ void never(const __half* x, const __half* y, __half* z, int64_t n) {
    extern __shared__ __half tile[];
    const int64_t i = blockIdx.x * int64_t(THREADS) + threadIdx.x;
    if (i < n) tile[threadIdx.x] = x[i], z[i] = __hadd(tile[threadIdx.x], y[i]);
}

extern "C" int launch(const __half* x, const __half* y, __half* z, int64_t n) {
    int most = 0;
    cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0);
    cudaFuncSetAttribute(never, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
    never<<<blocks(n), THREADS, most + 256>>>(x, y, z, n);
    cudaGetLastError();
    return 0;
}
