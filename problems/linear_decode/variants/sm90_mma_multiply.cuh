// sm90_mma: products of one part of a stage.
#pragma once

#include "ptx.cuh"
#include "sm90_mma_quantise.cuh"

namespace linear_mma {

// ---- device helpers

// Keeps a value in a register, where it would be computed again and again.
__device__ __forceinline__ void hold(uint32_t& value) { asm volatile("" : "+r"(value)); }

// Weights, which are read once: code and small tensors stay in L2. (ptx::tma_load_1d holds the policy in two registers.)
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
template <int NT>
__device__ __forceinline__ bool elected(int lane) {
    if (NT > 1) return lane == 0;
    uint32_t one;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}\n" : "=r"(one));
    return one;
}

template <int FORMAT>
__device__ __forceinline__ void mma(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1) {
    if constexpr (FORMAT == FP8)
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// ---- products of one part of a stage: from: this lane's bytes in the ring; input[t]: its row of the input at the
// unit. Where a word that the lane loaded last is returned, see fill in the kernel.

// b0 and b1 of two steps.
template <int NT>
__device__ __forceinline__ void load_steps(uint4 (&b)[NT], const uint32_t (&input)[NT], int at) {
#pragma unroll
    for (int t = 0; t < NT; ++t) b[t] = ptx::load_shared16(input[t] + at);
}

// Q: 2 for all 32 rows, or 1 for the 16 at `from`.
template <int Q, int NT>
__device__ __forceinline__ uint32_t multiply_fp8(float (&sum)[Q][NT][4], uint32_t from,
                                                 const uint32_t (&input)[NT]) {
    uint4 row[2 * Q];
#pragma unroll
    for (int r = 0; r < 2 * Q; ++r) row[r] = ptx::load_shared16(from + 512 * r);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint4 b[NT];
        load_steps(b, input, 16 * half);
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int q = 0; q < Q; ++q) {
                const uint4 &upper = row[2 * q], &lower = row[2 * q + 1];
                const uint32_t up = half ? (j ? upper.w : upper.z) : (j ? upper.y : upper.x);
                const uint32_t low = half ? (j ? lower.w : lower.z) : (j ? lower.y : lower.x);
                const uint32_t a0 = half2_of_e4m3(up), a2 = half2_of_e4m3(up >> 16);
                const uint32_t a1 = half2_of_e4m3(low), a3 = half2_of_e4m3(low >> 16);
#pragma unroll
                for (int t = 0; t < NT; ++t)
                    mma<FP8>(sum[q][t], a0, a1, a2, a3, j ? b[t].z : b[t].x, j ? b[t].w : b[t].y);
            }
    }
    uint32_t last = row[2 * Q - 1].w;
    if (NT != 2)  // there registers are few
#pragma unroll
        for (int r = 0; r < 2 * Q - 1; ++r) last ^= row[r].w;
    return last;
}

// A lane's share of a unit.
struct Words {
    uint4 word[2];
    uint32_t scales;

    __device__ __forceinline__ Words(uint32_t from, uint32_t to_scales)
        : word{ptx::load_shared16(from), ptx::load_shared16(from + 512)},
          scales(ptx::load_shared(from + to_scales)) {}
    // Depends on all of them: the compiler chooses their order.
    __device__ __forceinline__ uint32_t last() const { return word[0].w ^ word[1].w ^ scales; }
};

template <int NT>
__device__ __forceinline__ void multiply_nvfp4(float (&sum)[2][NT][4], const Words& unit,
                                               const uint32_t (&input)[NT]) {
    const uint4(&word)[2] = unit.word;
    const uint32_t scales = unit.scales;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint4 b[NT];
        load_steps(b, input, 16 * half);
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            uint32_t upper[4], lower[4];
            units::decode(half ? word[q].z : word[q].x, q ? units::scale<2>(scales) : units::scale<0>(scales), upper);
            units::decode(half ? word[q].w : word[q].y, q ? units::scale<3>(scales) : units::scale<1>(scales), lower);
#pragma unroll
            for (int j = 0; j < 2; ++j)
#pragma unroll
                for (int t = 0; t < NT; ++t)
                    mma<NVFP4>(sum[q][t], upper[2 * j], lower[2 * j], upper[2 * j + 1], lower[2 * j + 1],
                               j ? b[t].z : b[t].x, j ? b[t].w : b[t].y);
        }
    }
}

// One half of a unit.
template <int NT>
__device__ __forceinline__ uint32_t multiply_bf16(float (&sum)[2][NT][4], uint32_t from, const uint32_t (&input)[NT],
                                                  int half) {
    uint4 row[4], b[NT];
#pragma unroll
    for (int r = 0; r < 4; ++r) row[r] = ptx::load_shared16(from + 512 * r);
    load_steps(b, input, 16 * half);
#pragma unroll
    for (int q = 0; q < 2; ++q)
#pragma unroll
        for (int t = 0; t < NT; ++t) {
            const uint4 &upper = row[2 * q], &lower = row[2 * q + 1];
            mma<BF16>(sum[q][t], upper.x, lower.x, upper.y, lower.y, b[t].x, b[t].y);
            mma<BF16>(sum[q][t], upper.z, lower.z, upper.w, lower.w, b[t].z, b[t].w);
        }
    return row[0].w ^ row[1].w ^ row[2].w ^ row[3].w;
}

}  // namespace linear_mma
