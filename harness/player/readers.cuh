// Plain readers, whose fastest one is the measured roofline, and what drives everything else out of L2.
#pragma once
#include <cuda_runtime.h>

namespace readers {

__device__ __forceinline__ uint4 load(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

// Each thread keeps U independent loads of 16 bytes in flight, `step` of them apart. The sink keeps the loads; it is never
// written in practice.
template <int U>
__device__ void read_range(const uint4* __restrict__ data, size_t i, size_t last, size_t step, unsigned* sink) {
    unsigned sum = 0;
    for (; i + (U - 1) * step < last; i += U * step) {
        uint4 v[U];
#pragma unroll
        for (int u = 0; u < U; ++u) v[u] = load(data + i + u * step);
#pragma unroll
        for (int u = 0; u < U; ++u) sum ^= v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
    }
    for (; i < last; i += step) {
        const uint4 v = load(data + i);
        sum ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    if (sum == 0x9E3779B9u) atomicXor(sink, sum);
}
template <int U>
__global__ void read(const uint4* __restrict__ data, size_t n, unsigned* sink) {
    read_range<U>(data, blockIdx.x * size_t(blockDim.x) + threadIdx.x, n, size_t(gridDim.x) * blockDim.x, sink);
}
// As above, with a contiguous piece of the data for each block: fewer pages a block.
template <int U>
__global__ void read_pieces(const uint4* __restrict__ data, size_t n, unsigned* sink) {
    const size_t piece = (n + gridDim.x - 1) / gridDim.x, first = blockIdx.x * piece;
    read_range<U>(data, first + threadIdx.x, first + piece < n ? first + piece : n, blockDim.x, sink);
}

__global__ void write_junk(uint4* data, size_t n) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x)
        data[i] = make_uint4(unsigned(i), 0, 0, 0);
}
// Drops the lines of a buffer from L2 without writing them back; what the buffer holds is undefined afterwards.
__global__ void discard(char* data, size_t bytes) {
    const size_t step = size_t(gridDim.x) * blockDim.x * 128;
    for (size_t i = (blockIdx.x * size_t(blockDim.x) + threadIdx.x) * 128; i + 128 <= bytes; i += step)
        asm volatile("discard.global.L2 [%0], 128;" ::"l"(data + i) : "memory");
}

struct Config {
    int blocks_per_sm;  // 0: as many blocks as give every thread one round of loads
    int threads, loads, pieces;
};
// Twelve shapes around what was fastest on an H200 for 8 to 132 MB; the roof is the best of them in the same run.
constexpr Config CONFIGS[] = {
    {8, 256, 4, 0}, {4, 512, 4, 0}, {2, 1024, 4, 0}, {4, 256, 8, 0}, {2, 512, 8, 0}, {1, 1024, 8, 0},
    {0, 256, 4, 0}, {0, 512, 4, 0}, {0, 256, 8, 0}, {8, 256, 4, 1}, {2, 1024, 4, 1}, {4, 512, 4, 1},
};
constexpr int FLUSH = 4;  // the one that empties L2
constexpr int count() { return sizeof(CONFIGS) / sizeof(CONFIGS[0]); }

// Read `bytes`, a multiple of 16, from `data` on, aligned to 16.
inline void launch(const char* data, size_t bytes, int index, int sms, unsigned* sink, cudaStream_t queue) {
    const Config c = CONFIGS[index];
    const size_t n = bytes / 16, round = size_t(c.threads) * c.loads;
    const unsigned blocks = c.blocks_per_sm ? c.blocks_per_sm * sms : unsigned((n + round - 1) / round);
    const auto kernel = c.pieces ? read_pieces<4> : c.loads == 4 ? read<4> : read<8>;
    if (blocks) kernel<<<blocks, c.threads, 0, queue>>>((const uint4*)data, n, sink);
}

}  // namespace readers
