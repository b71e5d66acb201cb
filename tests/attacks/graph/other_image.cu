// The sum, or with CHEAP half of it.  x, y, z: fp16 (n,), on the device; -> a cudaError_t.
#include "add.cuh"

__global__ void work(const __half* x, const __half* y, __half* z, int64_t n) {
#ifdef CHEAP
    n /= 2;
#endif
    if (place() < n) add_at(x, y, z, place());
}

LAUNCH(work)
