// A kernel launches the work from the device: half of it to run beside itself, half to run at its end.
// Stopped by: a kernel has not ended before its children: gains nothing.
// VERDICT = ("PASSED", "UNSUPPORTED", "RUNTIME_ERROR")
// HONEST = "honest_cuda"
// FLAGS = ("-rdc=true", "-lcudadevrt")
#include "add.cuh"

// Of launches that are fired and forgotten, and of those at the parent's end: their names hold the forbidden word.
__device__ Queue beside() { return {(void*)4}; }
__device__ Queue behind() { return {(void*)3}; }

__global__ void parent(const __half* x, const __half* y, __half* z, int64_t n) {
    const int64_t half = n / 2;
    if (half) add<<<(half + THREADS - 1) / THREADS, THREADS, 0, beside()>>>(x, y, z, half);
    add<<<(n - half + THREADS - 1) / THREADS, THREADS, 0, behind()>>>(x + half, y + half, z + half, n - half);
}

extern "C" int launch(const __half* x, const __half* y, __half* z, int64_t n) {
    parent<<<1, 1>>>(x, y, z, n);
    return cudaGetLastError();
}
