// sm90_prefill's products: wgmma with tokens in registers and weights in shared memory, and what becomes of the sums.
#pragma once

#include "sm90_prefill_form.cuh"

namespace linear_prefill {

#define FOUR(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SIXTEEN(d, i) FOUR(d, i), FOUR(d, i + 4), FOUR(d, i + 8), FOUR(d, i + 12)

// d (64, PART_N) = tokens (64, 32 bytes) weights (PART_N, 32 bytes)^T + (add ? d : 0). Lane l of warp w holds tokens
// 16 w + l / 4 and 8 on: in d columns 8 i + 2 (l % 4) and one on as d[4 i], d[4 i + 1], of the later token d[4 i + 2],
// d[4 i + 3]; in a bytes 4 (l % 4) to 3 on of both as x and y, 16 bytes on as z and w.
__device__ __forceinline__ void wgmma(float (&d)[PART], const uint4& a, uint64_t weights, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3"
        " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, "
        "p, 1, 1;\n}\n"
        : SIXTEEN(d, 0), SIXTEEN(d, 16)
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(weights), "r"(int(add)));
}
// The same on bf16, of HALF_N columns.
__device__ __forceinline__ void wgmma(float (&d)[SUMS], const uint4& a, uint64_t weights, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"
        " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, "
        "p, 1, 1, 0;\n}\n"
        : SIXTEEN(d, 0), SIXTEEN(d, 16), SIXTEEN(d, 32), SIXTEEN(d, 48)
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(weights), "r"(int(add)));
}
#undef SIXTEEN
#undef FOUR

// Keeps a factor in its registers up to here: wgmma reads it long after it is issued.
__device__ __forceinline__ void hold(const uint4& a) {
    asm volatile("" ::"r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w) : "memory");
}

// One more at the barrier in the shared memory of a block of the cluster, at an address from in_block. Said to release
// for the cluster, it would be a fence up to global memory; what went before are reads that have ended.
__device__ __forceinline__ void arrive_cluster(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// As one store, without a branch: of an assignment the compiler makes four stores at some places.
__device__ __forceinline__ void store_line(bf16* to, const uint4& v, bool inside) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p st.global.v4.u32 [%0], {%1, %2, %3, %4};\n}\n" ::"l"(to),
                 "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(int(inside))
                 : "memory");
}

constexpr int STEPS = ROW_BYTES / STEP_BYTES;  // of a stage

template <class F>
struct Consumer {
    const Problem& p;
    SharedStorage<F>& shared;
    const int group, warp, lane;
    const int token;         // of a tile, the first of this lane
    const uint32_t weights;  // smem_desc_low of the first stage, from lane 0: the same for all, as wgmma wants
    PipelineState<F> stage;
    int turn;  // stages to release until the other warpgroup begins

    __device__ __forceinline__ Consumer(const Problem& p, SharedStorage<F>& shared, int group, int warp)
        : p(p), shared(shared), group(group), warp(warp), lane(threadIdx.x % 32),
          token(64 * group + 16 * warp + lane / 4),
          weights(__shfl_sync(~0u, smem_desc_low(smem_address(shared.weights[0])), 0)),
          turn(min(F::LEAD, p.k_blocks)) {}

    // The stage is read, by this warp: both blocks may be told of other values for it.
    __device__ __forceinline__ void release(uint32_t index) const {
        __syncwarp();
        if (lane < CLUSTER) arrive_cluster(in_block(lane, smem_address(&shared.empty[index])));
    }

    // This warp's 16 tokens of the stage, swizzled as it is.
    __device__ __forceinline__ void load(uint4 (&a)[STEPS]) const {
        const uint32_t row = smem_address(shared.tokens[stage.index]) + (64 * group + 16 * warp + lane % 16) * ROW_BYTES;
        const uint32_t chunk = row + (lane / 16 ^ lane % 8) * 16;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) a[step] = ldmatrix_x4(chunk ^ 2 * step * 16);
    }

    // d += or = these tokens times rows of weights in the stage, of as many as d has columns; commits.
    template <int COUNT>
    __device__ __forceinline__ void issue(float (&d)[COUNT], const uint4 (&a)[STEPS], int row, bool add) const {
        const uint32_t b = weights + (stage.index * F::BLOCK_N + row) * ROW_BYTES / 16;
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
            wgmma(d, a[step], smem_desc_of(b + step * STEP_BYTES / 16), add || step > 0);
        warpgroup_commit_batch();
    }

    // The first of two warpgroups is LEAD stages ahead, so that its tile's end meets products of the other one.
    __device__ __forceinline__ void give_turn() {
        if (--turn == 0 && group == 0) named_barrier_arrive<128 * GROUPS>(1);
    }

    // Sums of 128 columns, which tensor cores cut to some 13 bits, times both scales, are added up in fp32: of PART_N
    // rows while the next ones are multiplied, of a stage's last rows behind the first products of the next stage.
    __device__ __forceinline__ Tile multiply_e4m3(float (&sums)[F::HALVES][SUMS]) {
        constexpr int PARTS = F::BLOCK_N / PART_N;
        float parts[2][PART], by[F::HALVES][2], of_tokens[2], of_weights[F::HALVES];
        uint4 a[STEPS];
        const auto begin = [&] {
            wait(smem_address(&shared.full[stage.index]), stage.phase);
            load(a);
            warpgroup_arrive();
            issue(parts[0], a, 0, false);
            const uint32_t scales = smem_address(shared.scales[stage.index]);
#pragma unroll
            for (int i = 0; i < 2; ++i) of_tokens[i] = __uint_as_float(load_shared(scales + 4 * (token + 8 * i)));
#pragma unroll
            for (int i = 0; i < F::HALVES; ++i)
                of_weights[i] = __uint_as_float(load_shared(scales + 4 * (WEIGHTS_SCALES + i)));
        };
        const auto add_up = [&](int part) {
            const int half = part * PART_N / HALF_N, from = part * PART % SUMS;
#pragma unroll
            for (int i = 0; i < PART; ++i) sums[half][from + i] += by[half][i / 2 % 2] * parts[part % 2][i];
        };
        begin();
#pragma unroll 1
        for (int left = p.k_blocks;; add_up(PARTS - 1)) {
#pragma unroll
            for (int half = 0; half < F::HALVES; ++half) {
                by[half][0] = of_tokens[0] * of_weights[half], by[half][1] = of_tokens[1] * of_weights[half];
                warpgroup_fence_operand(by[half]);  // what was loaded is used before the stage is released
            }
#pragma unroll
            for (int part = 1; part < PARTS; ++part) {
                warpgroup_arrive();
                issue(parts[part % 2], a, part * PART_N, false);
                warpgroup_wait<1>();
                warpgroup_fence_operand(parts[(part + 1) % 2]);
                add_up(part - 1);
            }
            const uint4 tile = load_shared16(smem_address(&shared.scales[stage.index][TILE]));  // used in the last stage
            warpgroup_wait<0>();
            warpgroup_fence_operand(parts[1]);
            for (const uint4& step : a) hold(step);
            release(stage.index), give_turn();
            stage.advance();
            if (--left == 0) {
                add_up(PARTS - 1);
                return {int(tile.x), int(tile.y), int(tile.z)};
            }
            begin();
        }
    }

    __device__ __forceinline__ void multiply_bf16(float (&sums)[F::HALVES][SUMS]) {
#pragma unroll 1
        for (int block = 0; block < p.k_blocks; ++block, stage.advance()) {
            uint4 a[STEPS];
            wait(smem_address(&shared.full[stage.index]), stage.phase);
            load(a);
            warpgroup_arrive();
#pragma unroll
            for (int half = 0; half < F::HALVES; ++half) issue(sums[half], a, half * HALF_N, true);
            warpgroup_wait<0>();
            for (const uint4& step : a) hold(step);
            release(stage.index), give_turn();
        }
#pragma unroll
        for (int half = 0; half < F::HALVES; ++half) warpgroup_fence_operand(sums[half]);
    }

    // Sums -> out, by way of staging: a warp's 16 tokens by STORE_COLUMNS at a time. row: the first of this half.
    __device__ __forceinline__ void store(const float (&d)[SUMS], const Tile& tile, int row, float factor) const {
        const uint32_t staging = smem_address(shared.staging[4 * group + warp]);
        const int matrix = lane / 8, mine = lane % 16;  // of a store: its row
        const int64_t stride = int64_t(p.groups) * p.n;
        const int first = tile.token + 64 * group + 16 * warp + lane / 8;
#pragma unroll
        for (int column = 0; column < HALF_N; column += STORE_COLUMNS) {
            if (row + column >= p.n) break;
#pragma unroll
            for (int i = 0; i < STORE_COLUMNS / 16; ++i) {
                const auto pair = [&](int at) {
                    at += column / 2 + 8 * i;
                    return pack_bf16x2(d[at] * factor, d[at + 1] * factor);
                };
                stmatrix_x4(staging + mine * ROW_BYTES + ((2 * i + matrix / 2) ^ (lane % 8)) * 16, pair(0), pair(2),
                            pair(4), pair(6));
            }
            __syncwarp();
            bf16* to = p.out + first * stride + int64_t(tile.group) * p.n + row + column + lane % 8 * 8;
            uint4 lines[4];  // all before the first is stored
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = 4 * i + lane / 8;
                lines[i] = load_shared16(staging + at * ROW_BYTES + (lane % 8 ^ at % 8) * 16);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i, to += 4 * stride) store_line(to, lines[i], first + 4 * i < p.num_tokens);
            __syncwarp();
        }
    }

    __device__ __forceinline__ void run() {
        if (group == 1) named_barrier_sync<128 * GROUPS>(1);
#pragma unroll 1
        for (int index = blockIdx.x / CLUSTER; index < p.num_tiles; index += gridDim.x / CLUSTER) {
            float sums[F::HALVES][SUMS] = {}, factor = 1;
            Tile tile;
            if constexpr (F::VALUES == E4M3) {
                tile = multiply_e4m3(sums);
            } else {
                multiply_bf16(sums);
                tile = tile_of<F>(p, index, cluster_rank());
                if (p.factors) factor = __ldg(p.factors + tile.group);
                if (p.input_scales) factor *= __ldg(p.input_scales + tile.group);
            }
#pragma unroll
            for (int half = 0; half < F::HALVES; ++half)
                store(sums[half], tile, tile.row + half * HALF_N, factor);
        }
    }
};

}  // namespace linear_prefill
