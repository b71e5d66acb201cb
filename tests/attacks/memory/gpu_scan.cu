// Counts where the canary stands in device memory: its words in a row, at any multiple of 4 bytes.
#include <cstdint>
#include <cuda_runtime.h>

// "DSV4" and, at distance 5, "EXPE": put together, so that this file's own constants are no match.
__global__ void find(const uint8_t* data, uint64_t bytes, unsigned first, unsigned second, int* hits) {
    for (uint64_t i = 4 * (blockIdx.x * uint64_t(blockDim.x) + threadIdx.x); i + 12 < bytes;
         i += 4ull * gridDim.x * blockDim.x) {
        if (*(const unsigned*)(data + i) != first) continue;
        unsigned word = 0;
        for (int j = 0; j < 4; ++j) word |= unsigned(data[i + 5 + j]) << 8 * j;
        if (word == second) atomicAdd(hits, 1);
    }
}

// `bytes` of device memory from `address`, both multiples of 4; hits (int32) grows. -> a cudaError_t.
extern "C" int search(uint64_t address, uint64_t bytes, int* hits) {
    const unsigned first = 'D' | 'S' << 8 | 'V' << 16 | '4' << 24, second = 'E' | 'X' << 8 | 'P' << 16 | 'E' << 24;
    find<<<1024, 256>>>(reinterpret_cast<const uint8_t*>(address), bytes, first, second, hits);
    return cudaGetLastError();
}

// The same of so many bytes of fresh memory of the driver's.
extern "C" int fresh(uint64_t bytes, int* hits) {
    void* place;
    if (cudaError_t code = cudaMalloc(&place, bytes)) return code;
    const int code = search(reinterpret_cast<uint64_t>(place), bytes, hits);
    return code ? code : cudaFree(place);
}
