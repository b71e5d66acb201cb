// The place of the largest logit of each row, in one launch: a cluster of blocks a row. And what a step does beside: the
// rows' sequences become longer.
#include <cuda_runtime.h>

#include <cstdint>

#include "launch_clusters.cuh"
#include "ptx.cuh"

namespace {

constexpr int BLOCKS = 16, THREADS = 512, WARPS = THREADS / 32;  // of a row; of a block
constexpr int QUADS = 4;  // of logits, that a thread has under way: all of a row of 131,072
constexpr unsigned ALL = 0xffffffffu;

// order: larger for a larger value, a NaN above all; never 0. 0 and -0 are equal.
struct Best {
    uint32_t order, place;
};

__device__ __forceinline__ uint32_t order_of(float value) {
    const uint32_t bits = __float_as_uint(value + 0.0f);
    return isnan(value) ? ALL : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// `later` lies behind `best`.
__device__ __forceinline__ Best better(Best best, Best later) { return later.order > best.order ? later : best; }

// Of equal ones the lowest place.
__device__ __forceinline__ Best warp_best(Best mine) {
    const uint32_t order = __reduce_max_sync(ALL, mine.order);
    return {order, __reduce_min_sync(ALL, mine.order == order ? mine.place : ALL)};
}

__device__ __forceinline__ float larger(float a, float b) {  // NaN where one is
    float most;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
    return most;
}

// Of QUADS quads, the first and every THREADS * BLOCKS-th behind it. What would lie behind the last one is the last one
// again, so that all loads are under way at once. (Three instructions a value: comparing keys takes a dozen.)
__device__ __forceinline__ Best best_of_quads(const float4* x, int first, int count) {
    float values[4 * QUADS], most;
    uint32_t quads[QUADS];
#pragma unroll
    for (int q = 0; q < QUADS; q++) {
        quads[q] = min(first + q * THREADS * BLOCKS, count - 1);
        const float4 four = x[quads[q]];
        values[4 * q] = four.x, values[4 * q + 1] = four.y, values[4 * q + 2] = four.z, values[4 * q + 3] = four.w;
    }
    most = values[0];
#pragma unroll
    for (int i = 1; i < 4 * QUADS; i++) most = larger(most, values[i]);
    uint32_t place = 0;
    if (isnan(most)) {
#pragma unroll
        for (int i = 4 * QUADS - 1; i >= 0; i--) place = isnan(values[i]) ? 4 * quads[i / 4] + i % 4 : place;
    } else {
#pragma unroll
        for (int i = 4 * QUADS - 1; i >= 0; i--) place = values[i] == most ? 4 * quads[i / 4] + i % 4 : place;
    }
    return {order_of(most), place};
}

// length[sequences[r]] += advance[r] for row r; length null: nothing.
struct Longer {
    long long* length;
    const long long *sequences, *advance;
};

__global__ void __launch_bounds__(THREADS) argmax_kernel(const float* logits, long long* out, int width,
                                                         const Longer longer) {
    __shared__ __align__(8) Best of_warps[WARPS], of_blocks[BLOCKS];
    __shared__ uint64_t told;
    const int part = ptx::cluster_rank(), row = blockIdx.x / BLOCKS, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float* x = logits + static_cast<long long>(row) * width;
    const int begin = part * THREADS + threadIdx.x;
    if (threadIdx.x == 0) {
        ptx::barrier_init(ptx::smem_address(&told), 1);
        ptx::barrier_publish();
        if (part == 0) ptx::arrive_and_expect_tx(ptx::smem_address(&told), BLOCKS * sizeof(Best));
    }
    ptx::cluster_arrive_relaxed(), ptx::cluster_wait();  // only the barrier, which is published
    programmatic::wait();
    programmatic::trigger();
    // By the last warp of another block than the one that all wait for.
    const bool lengthens = longer.length && part == BLOCKS - 1 && threadIdx.x == THREADS - 32;
    long long sequence = 0, length = 0;
    if (lengthens) sequence = longer.sequences[row];
    Best best = {0, 0};
    if (width % 4 == 0) {
        const int count = width / 4;
        for (int i = begin; i < count; i += QUADS * BLOCKS * THREADS)
            best = better(best, best_of_quads(reinterpret_cast<const float4*>(x), i, count));
    } else {
        for (int i = begin; i < width; i += BLOCKS * THREADS)
            best = better(best, Best{order_of(x[i]), static_cast<uint32_t>(i)});
    }
    if (lengthens) length = longer.length[sequence] + longer.advance[row];
    best = warp_best(best);
    if (lane == 0) of_warps[warp] = best;
    __syncthreads();
    if (lengthens) longer.length[sequence] = length;
    if (warp) return;
    best = warp_best(of_warps[lane % WARPS]);
    if (lane == 0)
        ptx::st_async8(ptx::in_block(0, ptx::smem_address(of_blocks + part)), make_uint2(best.order, best.place),
                       ptx::in_block(0, ptx::smem_address(&told)));
    if (part) return;
    ptx::wait(ptx::smem_address(&told), 0);
    best = warp_best(of_blocks[lane % BLOCKS]);
    if (lane == 0) out[row] = best.place;
}

}  // namespace

// logits (rows, width), rows at a multiple of 16 bytes where width is one of 4 -> out (rows). length: null, or of
// sequences, no two of which are the same. It may begin before the kernel ahead has ended, and waits for that.
extern "C" int launch_argmax(const float* logits, long long* out, int rows, int width, long long* length,
                             const long long* sequences, const long long* advance) {
    if (const cudaError_t error =
            cudaFuncSetAttribute(argmax_kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1))
        return error;
    return programmatic::launch_clusters(argmax_kernel, dim3(rows * BLOCKS), dim3(THREADS), 0, BLOCKS, true, logits, out,
                                         width, Longer{length, sequences, advance});
}
