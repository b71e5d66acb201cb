// sm90_mma's weights: a warp's ring of them, the copies that fill it, and the products of a tile.
//
// from: this lane's bytes in the ring; input[t]: its row of the input at the unit. Products return a word that the lane
// loaded last, see WeightCopies::fill.
#pragma once

#include "sm90_mma_input.cuh"

namespace linear_mma {

// ---- device helpers

// Weights, which are read once, so code and small tensors stay in L2. (ptx::tma_load_1d holds the policy in registers.)
__device__ __forceinline__ void load_weights(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
    asm volatile(
        "{\n"
        ".reg .b64 first;\n"
        "createpolicy.fractional.L2::evict_first.b64 first, 1.0;\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], first;\n"
        "}" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

// True in one lane of a whole warp, any one. The compiler knows: of `lane == 0` it makes a loop over lanes that issue.
// It takes registers, which are few with more than 8 tokens.
template <int BLOCK_M>
__device__ __forceinline__ bool elected(int lane) {
    if (BLOCK_M > 8) return lane == 0;
    uint32_t one;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}\n" : "=r"(one));
    return one;
}

// ptx::mma_bf16 of fp16.
__device__ __forceinline__ void mma_f16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                        uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// ---- products of one part of a stage

// b0 and b1 of two steps.
template <int TOKEN_TILES>
__device__ __forceinline__ void load_steps(uint4 (&b)[TOKEN_TILES], const uint32_t (&input)[TOKEN_TILES], int offset) {
#pragma unroll
    for (int t = 0; t < TOKEN_TILES; ++t) b[t] = ptx::load_shared16(input[t] + offset);
}

// FRAGMENTS: 2 for all 32 rows, or 1 for the 16 at `from`.
template <int FRAGMENTS, int TOKEN_TILES>
__device__ __forceinline__ uint32_t multiply_fp8(float (&sum)[FRAGMENTS][TOKEN_TILES][4], uint32_t from,
                                                 const uint32_t (&input)[TOKEN_TILES]) {
    uint4 row[2 * FRAGMENTS];
#pragma unroll
    for (int r = 0; r < 2 * FRAGMENTS; ++r) row[r] = ptx::load_shared16(from + 512 * r);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint4 b[TOKEN_TILES];
        load_steps(b, input, 16 * half);
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int q = 0; q < FRAGMENTS; ++q) {
                const uint4 &upper = row[2 * q], &lower = row[2 * q + 1];
                const uint32_t up = half ? (j ? upper.w : upper.z) : (j ? upper.y : upper.x);
                const uint32_t low = half ? (j ? lower.w : lower.z) : (j ? lower.y : lower.x);
                const uint2 above = half4_of_e4m3(up), below = half4_of_e4m3(low);
#pragma unroll
                for (int t = 0; t < TOKEN_TILES; ++t)
                    mma_f16(sum[q][t], above.x, below.x, above.y, below.y, j ? b[t].z : b[t].x,
                            j ? b[t].w : b[t].y);
            }
    }
    uint32_t last = row[2 * FRAGMENTS - 1].w;
    if (TOKEN_TILES != 2)  // there registers are few
#pragma unroll
        for (int r = 0; r < 2 * FRAGMENTS - 1; ++r) last ^= row[r].w;
    return last;
}

// A lane's part of a unit of nvfp4.
struct UnitWords {
    uint4 word[2];
    uint32_t scales;

    __device__ __forceinline__ UnitWords(uint32_t from, uint32_t to_scales)
        : word{ptx::load_shared16(from), ptx::load_shared16(from + 512)},
          scales(ptx::load_shared(from + to_scales)) {}
    // Depends on all of them: the compiler chooses their order.
    __device__ __forceinline__ uint32_t last() const { return word[0].w ^ word[1].w ^ scales; }
};

template <int TOKEN_TILES>
__device__ __forceinline__ void multiply_nvfp4(float (&sum)[2][TOKEN_TILES][4], const UnitWords& unit,
                                               const uint32_t (&input)[TOKEN_TILES]) {
    const uint4(&word)[2] = unit.word;
    const uint32_t scales = unit.scales;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint4 b[TOKEN_TILES];
        load_steps(b, input, 16 * half);
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            uint32_t upper[4], lower[4];
            units::decode(half ? word[q].z : word[q].x, q ? units::scale<2>(scales) : units::scale<0>(scales), upper);
            units::decode(half ? word[q].w : word[q].y, q ? units::scale<3>(scales) : units::scale<1>(scales), lower);
#pragma unroll
            for (int j = 0; j < 2; ++j)
#pragma unroll
                for (int t = 0; t < TOKEN_TILES; ++t)
                    ptx::mma_bf16(sum[q][t], upper[2 * j], lower[2 * j], upper[2 * j + 1], lower[2 * j + 1],
                                  j ? b[t].z : b[t].x, j ? b[t].w : b[t].y);
        }
    }
}

// One half of a unit.
template <int TOKEN_TILES>
__device__ __forceinline__ uint32_t multiply_bf16(float (&sum)[2][TOKEN_TILES][4], uint32_t from,
                                                  const uint32_t (&input)[TOKEN_TILES], int half) {
    uint4 row[4], b[TOKEN_TILES];
#pragma unroll
    for (int r = 0; r < 4; ++r) row[r] = ptx::load_shared16(from + 512 * r);
    load_steps(b, input, 16 * half);
#pragma unroll
    for (int q = 0; q < 2; ++q)
#pragma unroll
        for (int t = 0; t < TOKEN_TILES; ++t) {
            const uint4 &upper = row[2 * q], &lower = row[2 * q + 1];
            ptx::mma_bf16(sum[q][t], upper.x, lower.x, upper.y, lower.y, b[t].x, b[t].y);
            ptx::mma_bf16(sum[q][t], upper.z, lower.z, upper.w, lower.w, b[t].z, b[t].w);
        }
    return row[0].w ^ row[1].w ^ row[2].w ^ row[3].w;
}

// ---- a warp's ring

// The warp's copies, in the order of use, from one link to the next. A warp fills its own ring, so there are no empty
// barriers: it asks for a stage again when its lanes have read it.
template <class C>
struct WeightCopies {
    const JobsOf<C>& jobs;
    const WorkOf<C>& work_of;
    const int lane;
    const bool is_math_warp;
    int link_index = 0, next_pass;      // the link and pass after that which is being copied;
    uint32_t parts_left = 0, part = 0;  // of this, parts that are left, and the next one among the link's
    const uint32_t opaque_zero;

    __device__ __forceinline__ WeightCopies(const WorkOf<C>& work_of, int lane, bool is_math_warp)
        : jobs(work_of.jobs), work_of(work_of), lane(lane), is_math_warp(is_math_warp),
          next_pass(is_math_warp ? work_of.first.first_pass : 1 << 30), opaque_zero(jobs.job[0].geo.opaque_zero) {}

    __device__ __forceinline__ const Job& job() const { return jobs.job[C::CHAIN ? link_index : 0]; }

    __device__ __forceinline__ void next_tile() {
        while (!parts_left) {
            const Job& job = this->job();
            if (next_pass >= job.geo.passes) {
                if (!C::CHAIN || !is_math_warp || link_index + 1 >= jobs.count) return;
                ++link_index;
                next_pass = blockIdx.x >> this->job().geo.split_shift;
                continue;
            }
            const WarpWork work = work_of(link_index);
            const int group = job.geo.group_of(next_pass), tile = job.geo.tile_of(work.slot, next_pass, group);
            if (tile < job.link.group_tiles) {
                const uint32_t unit = (group * job.link.group_tiles + tile) * job.link.k_units + work.chunk_begin;
                part = unit * C::UNIT_PARTS;
                parts_left = work.chunk_units * C::UNIT_PARTS;
            }
            next_pass += job.geo.teams;
        }
    }

    // Start to load the rest of a tile, into up to `stages` stages from this one; -> how many it takes. A bulk copy may
    // overtake loads of the same place that the warp has issued before: so its address depends on the word that was
    // loaded last, though by 0 only.
    __device__ __forceinline__ int fill(uint32_t stage, uint32_t full_barrier, uint32_t last_word, int stages) {
        const uint32_t parts = min(parts_left, static_cast<uint32_t>(stages * C::STAGE_PARTS));
        if (!parts) return 0;
        if (elected<C::BLOCK_M>(lane)) {
            const uint8_t* units = job().link.units + static_cast<uint64_t>(part) * C::PART_BYTES;
            uint32_t i = 0;
#pragma unroll 1
            do {
                const uint32_t bytes = min(parts - i, static_cast<uint32_t>(C::STAGE_PARTS)) * C::PART_BYTES;
                ptx::arrive_and_expect_tx(full_barrier, bytes);
                load_weights(stage + (last_word & opaque_zero), units, bytes, full_barrier);
                stage += C::STAGE_BYTES, full_barrier += 8, units += C::STAGE_BYTES, i += C::STAGE_PARTS;
            } while (stages > 1 && i < parts);
        }
        part += parts, parts_left -= parts;
        next_tile();
        return (parts + C::STAGE_PARTS - 1) / C::STAGE_PARTS;
    }

    // Stages [i, end) of a ring of which none is used yet.
    __device__ __forceinline__ void fill_first(uint32_t stage, uint32_t full_barrier, int i, int end) {
#pragma unroll 1
        while (i < end && parts_left) i += fill(stage + i * C::STAGE_BYTES, full_barrier + i * 8, 0, end - i);
    }
};

// ---- products of a stage, whose first unit is `unit` of the chunk

// tile_scale: of the weights' block of SCALE_K; input_scales: where those of the lane's first tokens are.
template <class C>
__device__ __forceinline__ uint32_t multiply_fp8_stage(float (&sum)[2][C::TOKEN_TILES][4], uint32_t stage,
                                                       const uint32_t (&input)[C::TOKEN_TILES], float tile_scale,
                                                       uint32_t input_scales, uint32_t unit, uint32_t chunk_units) {
    constexpr int TOKEN_TILES = C::TOKEN_TILES, FRAGMENTS = C::FRAGMENTS;
    uint32_t last_word = 0;
    float scale[TOKEN_TILES][2];
#pragma unroll
    for (int t = 0; t < TOKEN_TILES; ++t) {
        const float2 input_scale = ptx::load_shared_pair(input_scales + t * MMA_M * 4);
        scale[t][0] = tile_scale * input_scale.x, scale[t][1] = tile_scale * input_scale.y;
    }
#pragma unroll
    for (int part = 0; part < C::STAGE_PARTS; ++part) {
        if (part && unit + 1 == chunk_units) break;
        uint32_t columns[TOKEN_TILES];
#pragma unroll
        for (int t = 0; t < TOKEN_TILES; ++t) columns[t] = input[t] + part * BLOCK_K * 2;
#pragma unroll
        for (int q = 0; q < 2; q += FRAGMENTS) {
            float unit_sum[FRAGMENTS][TOKEN_TILES][4] = {};
            last_word = multiply_fp8(unit_sum, stage + part * C::PART_BYTES + 1024 * q, columns);
#pragma unroll
            for (int t = 0; t < TOKEN_TILES; ++t)
#pragma unroll
                for (int r = 0; r < FRAGMENTS; ++r)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        sum[q + r][t][i] = fmaf(unit_sum[r][t][i], scale[t][i & 1], sum[q + r][t][i]);
        }
    }
    return last_word;
}

template <class C>
__device__ __forceinline__ uint32_t multiply_nvfp4_stage(float (&sum)[2][C::TOKEN_TILES][4], uint32_t stage,
                                                         const uint32_t (&input)[C::TOKEN_TILES], uint32_t to_scales,
                                                         uint32_t unit, uint32_t chunk_units) {
    const UnitWords first(stage, to_scales);
    if (unit + 1 < chunk_units) {  // both loaded before the first is multiplied
        const UnitWords second(stage + C::PART_BYTES, to_scales);
        uint32_t second_input[C::TOKEN_TILES];
#pragma unroll
        for (int t = 0; t < C::TOKEN_TILES; ++t) second_input[t] = input[t] + BLOCK_K * 2;
        multiply_nvfp4(sum, first, input);
        multiply_nvfp4(sum, second, second_input);
        return second.last();
    }
    multiply_nvfp4(sum, first, input);
    return first.last();
}

}  // namespace linear_mma
