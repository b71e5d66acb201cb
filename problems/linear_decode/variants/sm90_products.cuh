// Products of codes in e4m3 by wgmma, weights from registers: what sm90_mma.cu does with matrices whose input is
// quantised to FP8.
//
// A unit of weights is 16 rows by 128 columns. Lane l = 4 g + c has in step s the 16 bytes 512 s + 16 l .. + 15: of row
// g, of row g + 8, columns 32 s + 4 c .. + 3, then of both columns 32 s + 16 + 4 c .. + 3: A of one wgmma of k = 32.
//
// The input lies in slices of 16 columns: 16 bytes of each token, up to 8 tokens, then the next slice. wgmma takes 8
// columns of B and reads 8 times 16 bytes; with fewer tokens it reads into the next slices, and makes sums that are not
// used.
//
// The four warps of a group have one B, of 16 columns: 8 for its first two warps, which take 32 rows by a chunk of k, 8
// for the other two, which may take another chunk, whose input lies a fixed way on. Each uses half of its sums. Without
// that a group would have 64 rows, and half as many chunks of k would fit a block.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ptx.cuh"

namespace products {

constexpr int ROWS = 16, COLUMNS = 128, STEPS = 4;  // of a unit
constexpr int SLICE = 16;                           // columns
constexpr int UNIT_SLICES = COLUMNS / SLICE;

// Where the four warps' input is: at: address of the first two warps' slice, of which a cluster's block number is no
// part; pitch: bytes to the next slice; apart: bytes to the other warps' slice. All the same in the four warps.
struct Input {
    uint32_t low, high;

    __device__ __forceinline__ Input(uint32_t at, uint32_t pitch, uint32_t apart)
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
        : low(pitch / 16 << 16 | (at & 0x3FFFF) / 16), high(apart / 16) {}
#else  // addresses are whole
        : low(at / 16), high(pitch / 16 << 16 | apart / 16) {}
#endif
    __device__ __forceinline__ Input(uint32_t low, uint32_t high, int) : low(low), high(high) {}
    // The same in registers that a warp shares, which descriptors must be in.
    __device__ __forceinline__ Input uniform() const {
        return Input(__reduce_max_sync(~0u, low), __reduce_max_sync(~0u, high), 0);
    }
    __device__ __forceinline__ Input moved(uint32_t bytes) const { return Input(low + bytes / 16, high, 0); }
};

// Sums of one product, of 16 rows of a warp: for each of both inputs row g, columns 2 c, 2 c + 1, then row g + 8.
struct Sums {
    float of[2][4];

    // Of the warp's own input. upper: 1 in the third and fourth warp.
    __device__ __forceinline__ float own(int i, int upper) const {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
        return upper ? of[1][i] : of[0][i];
#else
        return of[0][i];
#endif
    }
};

// sums = a * input, or with ADD that much more. 32 columns.
template <bool ADD>
__device__ __forceinline__ void multiply(Sums& sums, const uint4& a, const Input& input, int upper) {
    float(&d)[4] = sums.of[0];
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    float(&e)[4] = sums.of[1];
    const uint64_t b = static_cast<uint64_t>(input.high) << 32 | input.low;
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, "
        "%12, p, 1, 1;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(e[0]), "+f"(e[1]), "+f"(e[2]), "+f"(e[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "n"(ADD));
#else  // elsewhere by a warp, which needs its part of the input only
    const int lane = threadIdx.x % 32;
    const uint32_t pitch = (input.high >> 16) * 16, apart = (input.high & 0xFFFF) * 16;
    const uint32_t at = input.low * 16 + upper * apart + lane / 4 * 16 + lane % 4 * 4;
    const uint32_t b0 = ptx::load_shared(at), b1 = ptx::load_shared(at + pitch);
    if (!ADD) d[0] = d[1] = d[2] = d[3] = 0;
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
#endif
}

// Around products: before the first, behind the last, and until sums are there.
__device__ __forceinline__ void begin() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    ptx::warpgroup_arrive();
#endif
}
__device__ __forceinline__ void commit() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    ptx::warpgroup_commit_batch();
#endif
}
template <int COUNT>
__device__ __forceinline__ void wait(Sums (&sums)[COUNT]) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    ptx::warpgroup_wait<0>();
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        ptx::warpgroup_fence_operand(sums[i].of[0]), ptx::warpgroup_fence_operand(sums[i].of[1]);
#endif
}

}  // namespace products
