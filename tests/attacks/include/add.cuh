// z = x + y in fp16, shared by the attacks, and ways to say what the scan refuses.
#pragma once
#include <cstdint>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <map>
#include <string>

constexpr int THREADS = 256;

__device__ int64_t place() { return blockIdx.x * int64_t(THREADS) + threadIdx.x; }
__device__ void add_at(const __half* x, const __half* y, __half* z, int64_t i) {
    z[i] = __float2half_rn(__half2float(x[i]) + __half2float(y[i]));
}
__global__ void add(const __half* x, const __half* y, __half* z, int64_t n) {
    if (place() < n) add_at(x, y, z, place());
}

inline unsigned blocks(int64_t n) { return unsigned((n + THREADS - 1) / THREADS); }

inline void* driver(const std::string& name) { return dlsym(dlopen("libcuda.so.1", RTLD_LAZY), name.c_str()); }
// By a name that is put together.
inline int make_queue(void** queue) { return ((int (*)(void**, unsigned))driver(std::string("cuStr") + "eamCreate"))(queue, 1); }

// Becomes whatever handle type is asked for.
struct Queue {
    void* handle;
    template <class T> __host__ __device__ operator T*() const { return static_cast<T*>(handle); }
};

// The first element that a call is recorded on: in a runner it stays so, and the player has another one.
inline unsigned short recorded(const __half* x) {
    static std::map<const void*, unsigned short> seen;
    if (!seen.count(x)) cudaMemcpy(&seen[x], x, 2, cudaMemcpyDefault);
    return seen[x];
}
__device__ bool played(const __half* x, unsigned short first) { return __half_as_ushort(x[0]) != first; }

__device__ void spin(unsigned long long ns) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    while (now - begin < ns);
}

// The launcher: x, y, z: fp16 (n,), on the device; further arguments of the kernel; -> a cudaError_t.
#define LAUNCH(kernel, ...)                                                                 \
    extern "C" int launch(const __half* x, const __half* y, __half* z, int64_t n) {         \
        kernel<<<blocks(n), THREADS>>>(x, y, z, n, ##__VA_ARGS__);                          \
        return cudaGetLastError();                                                          \
    }
