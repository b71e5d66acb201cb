// sm90_prefill's products: wgmma with both factors in shared memory, and what becomes of a tile's sums.
#pragma once

#include "sm90_prefill_form.cuh"

namespace linear_prefill {

#define FOUR(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SIXTEEN(d, i) FOUR(d, i), FOUR(d, i + 4), FOUR(d, i + 8), FOUR(d, i + 12)
#define WGMMA_64(SHAPE, END)                                                                                      \
    asm volatile(                                                                                                 \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned." SHAPE                           \
        " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                        \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                        \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p" END ";\n}\n" \
        : SIXTEEN(d, 0), SIXTEEN(d, 16), SIXTEEN(d, 32), SIXTEEN(d, 48)                                           \
        : "l"(tokens), "l"(weights), "r"(int(add)))

// d (64, 128) = tokens (64, 32 bytes) weights (128, 32 bytes)^T + (add ? d : 0). Lane l of warp w holds tokens
// 16 w + l / 4 and 8 on in columns 8 i + 2 (l % 4) and one on: d[4 i], d[4 i + 1], and of the later token d[4 i + 2],
// d[4 i + 3].
template <Values VALUES>
__device__ __forceinline__ void wgmma(float (&d)[SUMS], uint64_t tokens, uint64_t weights, bool add) {
    if constexpr (VALUES == E4M3)
        WGMMA_64("m64n128k32.f32.e4m3.e4m3", ", 1, 1");
    else
        WGMMA_64("m64n128k16.f32.bf16.bf16", ", 1, 1, 0, 0");
}
#undef WGMMA_64
#undef SIXTEEN
#undef FOUR

// One more at the barrier in the shared memory of a block of the cluster, at an address from in_block. Said to release
// for the cluster, it would be a fence up to global memory; what went before are reads that have ended.
__device__ __forceinline__ void arrive_cluster(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

constexpr int HALF_BYTES = 64 * ROW_BYTES;  // of 64 tokens in a stage

template <class F>
struct Consumer {
    const Problem& p;
    SharedStorage<F>& shared;
    const int group, warp, lane, rank;
    const uint32_t tokens, weights;  // smem_desc_low of the first stage, from lane 0: the same for all, as wgmma wants
    PipelineState<F> stage;

    __device__ __forceinline__ Consumer(const Problem& p, SharedStorage<F>& shared, int group, int warp, int rank)
        : p(p), shared(shared), group(group), warp(warp), lane(threadIdx.x % 32), rank(rank),
          tokens(__shfl_sync(~0u, smem_desc_low(smem_address(shared.tokens[0]) + group * F::HALVES * HALF_BYTES), 0)),
          weights(__shfl_sync(~0u, smem_desc_low(smem_address(shared.weights[0])), 0)) {}

    // The stage is read, by this warp: both blocks may be told of other values for it.
    __device__ __forceinline__ void release(uint32_t index) const {
        __syncwarp();
        if (lane < CLUSTER) arrive_cluster(in_block(lane, smem_address(&shared.empty[index])));
    }

    // d += or = this warpgroup's half of the tokens in the stage, times the weights in it; commits.
    __device__ __forceinline__ void issue(float (&d)[SUMS], int half, bool add) const {
        const uint32_t a = tokens + (stage.index * F::BLOCK_M * ROW_BYTES + half * HALF_BYTES) / 16;
        const uint32_t b = weights + stage.index * BLOCK_N * ROW_BYTES / 16;
#pragma unroll
        for (int step = 0; step < ROW_BYTES / STEP_BYTES; ++step)
            wgmma<F::VALUES>(d, smem_desc_of(a + step * STEP_BYTES / 16), smem_desc_of(b + step * STEP_BYTES / 16),
                             add || step > 0);
        warpgroup_commit_batch();
    }

    // The first of two warpgroups is a stage ahead, so that its tile's end meets products of the other one.
    __device__ __forceinline__ void await_turn(bool first) const {
        if (first && group == 1) named_barrier_sync<128 * GROUPS>(1);
    }
    __device__ __forceinline__ void give_turn(bool first) const {
        if (first && group == 0) named_barrier_arrive<128 * GROUPS>(1);
    }

    // Sums of 128 columns, which the tensor core cuts to some 13 bits, times both scales, are added up in fp32.
    __device__ __forceinline__ void multiply_e4m3(float (&sums)[F::HALVES][SUMS], const Tile& tile, bool first) {
        const int blocks = (p.n + BLOCK_N - 1) / BLOCK_N, row = min(tile.row / BLOCK_N, blocks - 1);
        const uint8_t* const of_weights = p.weight_scales + (int64_t(tile.group) * blocks + row) * p.k_blocks;
        const int token = 64 * F::HALVES * group + 16 * warp + lane / 4;
        uint32_t next = __ldg(of_weights);
#pragma unroll 1
        for (int block = 0; block < p.k_blocks; ++block, stage.advance()) {
            const float by = __uint_as_float(next << 23);
            next = __ldg(of_weights + min(block + 1, p.k_blocks - 1));
            wait(smem_address(&shared.full[stage.index]), stage.phase);
#pragma unroll
            for (int half = 0; half < F::HALVES; ++half) {
                float part[SUMS];
                warpgroup_arrive();
                issue(part, half, false);
                const uint32_t scale = smem_address(&shared.scales[stage.index][token + 64 * half]);
                const float upper = __uint_as_float(load_shared(scale)) * by;
                const float lower = __uint_as_float(load_shared(scale + 8 * 4)) * by;
                warpgroup_wait<0>();
                warpgroup_fence_operand(part);
                if (half == F::HALVES - 1) release(stage.index), give_turn(first && block == 0);
#pragma unroll
                for (int i = 0; i < SUMS; ++i) sums[half][i] += (i & 2 ? lower : upper) * part[i];
            }
        }
    }

    // Products of a stage are issued before those of the one before have ended.
    __device__ __forceinline__ void multiply_bf16(float (&sums)[F::HALVES][SUMS], bool first) {
        uint32_t before = 0;
#pragma unroll 1
        for (int block = 0; block < p.k_blocks; ++block, stage.advance()) {
            wait(smem_address(&shared.full[stage.index]), stage.phase);
            warpgroup_arrive();
#pragma unroll
            for (int half = 0; half < F::HALVES; ++half) issue(sums[half], half, true);
            warpgroup_wait<F::HALVES>();
            if (block > 0) release(before), give_turn(first && block == 1);
            before = stage.index;
        }
        warpgroup_wait<0>();
#pragma unroll
        for (int half = 0; half < F::HALVES; ++half) warpgroup_fence_operand(sums[half]);
        release(before), give_turn(first && p.k_blocks == 1);
    }

    // 64 tokens' sums -> out, by way of staging: a warp's 16 tokens by STORE_COLUMNS at a time.
    __device__ __forceinline__ void store(const float (&d)[SUMS], const Tile& tile, int token, float factor) const {
        const uint32_t staging = smem_address(shared.staging[4 * group + warp]);
        const int matrix = lane / 8, mine = lane % 8 + 8 * (matrix % 2);  // of a store: its row
        const int64_t stride = int64_t(p.groups) * p.n;
        token += 16 * warp;
#pragma unroll
        for (int first = 0; first < BLOCK_N; first += STORE_COLUMNS) {
            if (tile.row + first >= p.n) break;
#pragma unroll
            for (int i = 0; i < STORE_COLUMNS / 16; ++i) {
                const auto pair = [&](int at) {
                    at += SUMS * first / BLOCK_N + 8 * i;
                    return pack_bf16x2(d[at] * factor, d[at + 1] * factor);
                };
                stmatrix_x4(staging + mine * ROW_BYTES + ((2 * i + matrix / 2) ^ (lane % 8)) * 16, pair(0), pair(2),
                            pair(4), pair(6));
            }
            __syncwarp();
            bf16* const to = p.out + int64_t(tile.group) * p.n + tile.row + first + lane % 8 * 8;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = 4 * i + lane / 8;
                if (token + row >= p.num_tokens) break;
                *reinterpret_cast<uint4*>(to + (token + row) * stride) =
                    load_shared16(staging + row * ROW_BYTES + (lane % 8 ^ row % 8) * 16);
            }
            __syncwarp();
        }
    }

    __device__ __forceinline__ void run() {
        const int step = gridDim.x / CLUSTER;
        int index = blockIdx.x / CLUSTER;
        bool first = index + step < p.num_tiles;  // of several tiles
        await_turn(first);
#pragma unroll 1
        for (; index < p.num_tiles; index += step, first = false) {
            const Tile tile = tile_of<F>(p, index, rank);
            float sums[F::HALVES][SUMS] = {}, factor = 1;
            if constexpr (F::VALUES == E4M3) {
                multiply_e4m3(sums, tile, first);
            } else {
                multiply_bf16(sums, first);
                if (p.factors) factor = __ldg(p.factors + tile.group);
                if (p.input_scales) factor *= __ldg(p.input_scales + tile.group);
            }
#pragma unroll
            for (int half = 0; half < F::HALVES; ++half)
                store(sums[half], tile, tile.token + 64 * (F::HALVES * group + half), factor);
        }
    }
};

}  // namespace linear_prefill
