// sm90_prefill's thread that asks for both factors, stage by stage, as room becomes free in both blocks of the cluster.
#pragma once

#include "launch.cuh"
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
    const int first = blockIdx.x / CLUSTER, blocks = (p.n + HALF_N - 1) / HALF_N;
    const auto ask_for_weights = [&](const Tile& tile, int block, uint32_t index) {
        tma_load_3d_multicast(smem_address(shared.weights[index] + rank * SHARE * ROW_BYTES), &p.weights,
                              block * F::BLOCK_K, tile.row + rank * SHARE, tile.group,
                              smem_address(&shared.full[index]), ALL, policy);
    };
    int asked = min(F::NUM_STAGES, p.k_blocks);  // of the first stages, before the tokens' values are there
#pragma unroll 1
    for (int block = 0; block < asked; ++block) ask_for_weights(tile_of<F>(p, first, rank), block, block);
    programmatic::wait();
    PipelineState<F> stage;
#pragma unroll 1
    for (int index = first; index < p.num_tiles; index += gridDim.x / CLUSTER) {
        const Tile tile = tile_of<F>(p, index, rank);
        const int row = tile.row / HALF_N, apart = row + 1 < blocks ? p.k_blocks : 0;  // to the other half's
        const uint8_t* of_weights = p.weight_scales + (int64_t(tile.group) * blocks + row) * p.k_blocks;
        const float* scales = p.token_scales + int64_t(tile.group) * p.k_blocks * p.scale_stride + tile.token;
#pragma unroll 1
        for (int block = 0; block < p.k_blocks; ++block, stage.advance()) {
            const uint32_t full = smem_address(&shared.full[stage.index]);
            uint32_t exponents[F::HALVES] = {};
            if (F::SCALES)
#pragma unroll
                for (int half = 0; half < F::HALVES; ++half) exponents[half] = __ldg(of_weights + block + half * apart);
            wait_cluster(smem_address(&shared.empty[stage.index]), stage.phase ^ 1);
            if (--asked < 0) ask_for_weights(tile, block, stage.index);
            tma_load_3d(smem_address(shared.tokens[stage.index]), &p.tokens, block * F::BLOCK_K, tile.group, tile.token,
                        full, policy);
            if (F::SCALES) {
                const uint32_t beside = smem_address(shared.scales[stage.index]);
                tma_load_1d(beside, scales + int64_t(block) * p.scale_stride, 4 * F::SCALES, full, policy);
#pragma unroll
                for (int half = 0; half < F::HALVES; ++half)
                    store_shared(beside + 4 * (WEIGHTS_SCALES + half), exponents[half] << 23);
                store_shared16(beside + 4 * TILE, make_uint4(tile.token, tile.group, tile.row, 0));
            }
            arrive_and_expect_tx(full, F::STAGE_BYTES);  // values beyond the ends come as zeros, and count
        }
    }
    // Until the other block has taken all: it still arrives here.
    for (int i = 0; i < F::NUM_STAGES; ++i, stage.advance())
        wait_cluster(smem_address(&shared.empty[stage.index]), stage.phase ^ 1);
}

}  // namespace linear_prefill
