// sm90_prefill's thread that asks for both factors, stage by stage, as room becomes free in both blocks of the cluster.
#pragma once

#include "sm90_prefill_form.cuh"

namespace linear_prefill {

// As tma_load_3d, to the same place in the shared memory of each block of `blocks`, bits by rank; each one's barrier is
// told.
__device__ __forceinline__ void tma_load_3d_multicast(uint32_t to, const void* map, int x, int y, int z,
                                                      uint32_t barrier, uint16_t blocks, uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.L2::"
        "cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6, %7;" ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier),
        "h"(blocks), "l"(policy)
        : "memory");
}

template <class F>
__device__ __forceinline__ void producer(const Problem& p, SharedStorage<F>& shared, int rank) {
    constexpr int SHARE = F::BLOCK_N / CLUSTER;  // rows of weights that this block asks for
    constexpr uint16_t ALL = (1 << CLUSTER) - 1;
    const uint64_t policy = l2_evict_normal();
    PipelineState<F> stage;
#pragma unroll 1
    for (int index = blockIdx.x / CLUSTER; index < p.num_tiles; index += gridDim.x / CLUSTER) {
        const Tile tile = tile_of<F>(p, index, rank);
        const float* scales = p.token_scales + int64_t(tile.group) * p.k_blocks * p.scale_stride + tile.token;
#pragma unroll 1
        for (int block = 0; block < p.k_blocks; ++block, stage.advance()) {
            const uint32_t full = smem_address(&shared.full[stage.index]);
            wait_cluster(smem_address(&shared.empty[stage.index]), stage.phase ^ 1);
            arrive_and_expect_tx(full, F::STAGE_BYTES);  // values beyond the ends come as zeros, and count
            tma_load_3d_multicast(smem_address(shared.weights[stage.index] + rank * SHARE * ROW_BYTES), &p.weights,
                                  block * F::BLOCK_K, tile.row + rank * SHARE, tile.group, full, ALL, policy);
            tma_load_3d(smem_address(shared.tokens[stage.index]), &p.tokens, block * F::BLOCK_K, tile.group, tile.token,
                        full, policy);
            if (F::SCALES)
                tma_load_1d(smem_address(shared.scales[stage.index]), scales + int64_t(block) * p.scale_stride,
                            4 * F::SCALES, full, policy);
        }
    }
    // Until the other block has taken all: it still arrives here.
    for (int i = 0; i < F::NUM_STAGES; ++i, stage.advance())
        wait_cluster(smem_address(&shared.empty[stage.index]), stage.phase ^ 1);
}

}  // namespace linear_prefill
