// The place of the largest logit of each row, in one launch: a cluster of blocks a row. And what a step does beside: the
// rows' sequences become longer.
#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int BLOCKS = 8, THREADS = 1024, WARPS = THREADS / 32;  // of a row; of a block
constexpr unsigned ALL = 0xffffffffu;

// Larger for a larger value, a NaN above all; of equal values for the lower place. 0 and -0 are equal.
__device__ uint64_t key(float value, uint32_t place) {
    const uint32_t bits = __float_as_uint(value + 0.0f);
    const uint32_t order = isnan(value) ? ALL : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return static_cast<uint64_t>(order) << 32 | ~place;
}

__device__ uint64_t warp_max(uint64_t best) {
    for (int step = 16; step; step /= 2) {
        const uint64_t other = __shfl_xor_sync(ALL, best, step);
        best = other > best ? other : best;
    }
    return best;
}

// length[sequences[r]] += advance[r] for row r; length null: nothing.
struct Longer {
    long long* length;
    const long long *sequences, *advance;
};

__global__ void __cluster_dims__(BLOCKS) __launch_bounds__(THREADS) argmax_kernel(const float* logits, long long* out,
                                                                                 int width, const Longer longer) {
    __shared__ uint64_t of_warps[WARPS], of_blocks[BLOCKS];
    const auto cluster = cooperative_groups::this_cluster();
    const int part = cluster.block_rank(), row = blockIdx.x / BLOCKS, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float* x = logits + static_cast<long long>(row) * width;
    const int begin = part * THREADS + threadIdx.x;
    uint64_t best = 0;
    if (width % 4 == 0) {
        for (int i = begin; i < width / 4; i += BLOCKS * THREADS) {
            const float4 four = reinterpret_cast<const float4*>(x)[i];
            const float values[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const uint64_t other = key(values[j], 4 * i + j);
                best = other > best ? other : best;
            }
        }
    } else {
        for (int i = begin; i < width; i += BLOCKS * THREADS) {
            const uint64_t other = key(x[i], i);
            best = other > best ? other : best;
        }
    }
    best = warp_max(best);
    if (lane == 0) of_warps[warp] = best;
    __syncthreads();
    if (warp == 0) {
        best = warp_max(lane < WARPS ? of_warps[lane] : 0);
        if (lane == 0) *cluster.map_shared_rank(of_blocks + part, 0) = best;
    }
    cluster.sync();
    if (part == 0 && warp == 0) {
        best = warp_max(lane < BLOCKS ? of_blocks[lane] : 0);
        if (lane == 0) out[row] = static_cast<long long>(~static_cast<uint32_t>(best));
        if (lane == 0 && longer.length) longer.length[longer.sequences[row]] += longer.advance[row];
    }
}

}  // namespace

// logits (rows, width), rows at a multiple of 16 bytes where width is one of 4 -> out (rows). length: null, or of
// sequences, no two of which are the same.
extern "C" int launch_argmax(const float* logits, long long* out, int rows, int width, long long* length,
                             const long long* sequences, const long long* advance) {
    argmax_kernel<<<rows * BLOCKS, THREADS>>>(logits, out, width, Longer{length, sequences, advance});
    return cudaGetLastError();
}
