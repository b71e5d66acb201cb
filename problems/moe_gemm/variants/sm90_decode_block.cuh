// A block of sm90_decode: what lies in its shared memory, and how its threads wait for each other.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ptx.cuh"
#include "sm90_decode_groups.cuh"
#include "nvfp4_units.cuh"

namespace decode {

using namespace ptx;

constexpr int EPILOGUE_THREADS = 64;       // threads that add the warps' sums up
constexpr int NUM_THREADS = 32 * SORTING;  // with one that copies, and these; registers go by four warps
constexpr int EACH = 2;  // units for each warp in a stage of the ring
constexpr int STAGE_BYTES = EACH * WARPS * units::BYTES;
constexpr int LARGEST_BYTES = 2 * 2 * 8 * 4;  // in turns, of each warp of the epilogue, of 8 tokens
constexpr int GROUP_BYTES = sizeof(Group) + sizeof(float2), MARGIN = 33;  // floats from a token to the next in the sum
// Copies of a block under way, at most. Memory needs 1.2 to be busy. What waits behind more of them, tokens and
// counters, comes microseconds later. With many tokens bandwidth wins.
constexpr int UNDER_WAY = 2;
constexpr int SHARED = 227 * 1024;

// What sort takes as scratch.
__host__ __device__ __forceinline__ int sorting_bytes(const Problem& p) {
    return (SORTING * p.experts * 2 + p.tokens * p.topk * 2 + 15) / 16 * 16;
}

// Byte offsets in shared memory. The ring comes first; its end holds what sorting needs, while nothing else is there.
struct Layout {
    int sums, total, groups, factors, slots, routing, words, parts, largest, barriers, bytes;
    __host__ __device__ Layout(const Problem& p, int tiles) {
        const int n = p.tokens * p.topk;
        sums = p.stages * STAGE_BYTES;
        total = sums + 2 * WARPS * 2 * tiles * 512;
        groups = total + (p.tokens * MARGIN * 4 + 15) / 16 * 16;
        factors = groups + p.groups * int(sizeof(Group));
        routing = groups + p.groups * GROUP_BYTES;
        slots = routing + n * 4;
        words = (slots + n * 2 + 15) / 16 * 16;
        parts = words + 36 * 4;
        largest = parts + (1 + BATCHES) * int(sizeof(Part));
        barriers = (largest + LARGEST_BYTES + 7) / 8 * 8;
        bytes = barriers + p.stages * 16 + 24 + BATCHES * 16;
    }
};

// Shared addresses of the ring, and of the barriers of its stages: units have come, and are done with.
struct Ring {
    uint32_t at, full_barriers, empty_barriers;
};

// As ptx::wait, with its loop out of the compiler's sight: around one that it sees it unrolls no other.
__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(barrier), "r"(parity) : "memory");
}

// Whether the first phase of a barrier is over.
__device__ __forceinline__ bool is_over(uint32_t barrier) {
    uint32_t over;
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], 0;\nselp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(over) : "r"(barrier) : "memory");
    return over;
}

// Named barriers: 1 of the consumers, 2 and 3 for a buffer of sums, 4 of the epilogue's threads, 5 of the warps that do
// not multiply, 6 at which these tell the others.
__device__ __forceinline__ void consumer_sync() { named_barrier_sync<CONSUMER_THREADS>(1); }
__device__ __forceinline__ void epilogue_sync() { named_barrier_sync<EPILOGUE_THREADS>(4); }
// What one of the last warps has sorted is known to all behind this. Copies do not wait for those who multiply.
__device__ __forceinline__ void sorted_sync(int warp) {
    constexpr int OTHERS = NUM_THREADS - CONSUMER_THREADS;
    if (warp < WARPS) return named_barrier_sync<NUM_THREADS>(6);
    named_barrier_sync<OTHERS>(5);
    named_barrier_arrive<NUM_THREADS>(6);
}
__device__ __forceinline__ void sums_arrive(int buffer) {
    named_barrier_arrive<CONSUMER_THREADS + EPILOGUE_THREADS>(2 + buffer);
}
__device__ __forceinline__ void sums_sync(int buffer) {
    named_barrier_sync<CONSUMER_THREADS + EPILOGUE_THREADS>(2 + buffer);
}

}  // namespace decode
