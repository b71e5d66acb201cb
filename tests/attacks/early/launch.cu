// The first kernel of a call may begin before the kernel before it has ended, and does not wait for it.
// Stopped by: a plain kernel of the judge stands between its start event and the call: gains nothing.
// VERDICT = "PASSED"
// HONEST = "honest_cuda"
#include <cstring>

#include "add.cuh"

constexpr int ALLOWED = 1;

extern "C" int launch(const __half* x, const __half* y, __half* z, int64_t n) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeID(6);  // programmatic: its name holds the forbidden word
    memcpy(&attribute.val, &ALLOWED, sizeof ALLOWED);
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks(n)), config.blockDim = dim3(THREADS);
    config.attrs = &attribute, config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, add, x, y, z, n);
}
