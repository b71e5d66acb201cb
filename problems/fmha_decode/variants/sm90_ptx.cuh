// The instructions of sm_90a that sm90_wgmma needs, one function each. Shared-memory addresses are 32-bit.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace fmha {

// ---- barriers

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes barriers that this thread initialised known to the others, once these have met it at a block barrier.
__device__ __forceinline__ void barrier_publish() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// One arrival for the warp, behind all that its lanes did before.
__device__ __forceinline__ void warp_arrive(uint32_t barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(barrier);
}
// Returns once the phase of this parity is over; of a fresh barrier the phase of parity 1 is.
__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
#ifdef FMHA_DEBUG
    uint32_t tries = 0;
#endif
    while (true) {
        uint32_t over;
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
            : "=r"(over)
            : "r"(barrier), "r"(parity)
            : "memory");
        if (over) return;
#ifdef FMHA_DEBUG  // a hang becomes a report and a wrong result; a trap would lose what was printed
        if (++tries == 1u << 16) {
            if (threadIdx.x % 32 == 0)
                printf("block (%d, %d) warp %d waits in vain: barrier at byte %u of shared memory, parity %u\n",
                       blockIdx.x, blockIdx.y, threadIdx.x / 32, barrier, parity);
            return;
        }
#endif
    }
}
// Threads meet at one of the block's numbered barriers; `threads` of them in all.
template <int NUMBER, int THREADS>
__device__ __forceinline__ void meet() {
    asm volatile("bar.sync %0, %1;" ::"n"(NUMBER), "n"(THREADS) : "memory");
}
template <int NUMBER, int THREADS>
__device__ __forceinline__ void show_up() {  // counts as one of those who meet, and goes on
    asm volatile("bar.arrive %0, %1;" ::"n"(NUMBER), "n"(THREADS) : "memory");
}
// What this thread wrote to shared memory, or knows from a barrier that others did, may be read by wgmma after this, or
// after a barrier that follows.
__device__ __forceinline__ void fence_for_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- registers of a warpgroup: all its warps run this

template <int COUNT>
__device__ __forceinline__ void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// ---- memory

// *from, or `other` without touching memory.
__device__ __forceinline__ int load_if(const int* from, bool really, int other) {
    int v = other;
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p ld.global.nc.b32 %0, [%1];\n}\n"
                 : "+r"(v)
                 : "l"(from), "r"(int(really)));
    return v;
}
__device__ __forceinline__ void store16(void* to, uint4 v) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
// 16 bytes from global to shared memory, without registers; zeros if not `really`. copies_done waits for this thread's.
__device__ __forceinline__ void copy16(uint32_t to, const void* from, bool really = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(really ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy8(uint32_t to, const void* from, bool really) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(really ? 8 : 0) : "memory");
}
// Arrives for this thread at the barrier once the copies that it has asked for are there.
__device__ __forceinline__ void copies_arrive(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }
__device__ __forceinline__ void store_shared(uint32_t to, uint4 v) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t to, uint32_t v) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(v) : "memory");
}
__device__ __forceinline__ uint4 load_shared16(uint32_t from) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from)
                 : "memory");
    return v;
}
__device__ __forceinline__ void store_shared8(uint32_t to, uint32_t v) {
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(to), "r"(v) : "memory");
}
__device__ __forceinline__ uint2 load_shared8(uint32_t from) {
    uint2 v;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from) : "memory");
    return v;
}
__device__ __forceinline__ uint32_t load_shared(uint32_t from) {
    uint32_t v;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
    return v;
}
// Four 8x8 matrices of 16-bit values, as a warp holds them in an accumulator; lane i gives the address of row i % 8 of
// matrix i / 8.
__device__ __forceinline__ void store_matrices(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}

// ---- arithmetic

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ uint32_t bf16_pair(float low, float high) {
    uint32_t v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    return v;
}
__device__ __forceinline__ uint32_t half_pair(float low, float high) {
    uint32_t v;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    return v;
}

// ---- wgmma

// A matrix in shared memory with rows of 128 bytes, swizzled: 16-byte chunk c of row r stands at chunk c ^ r % 8. Eight
// rows are 1024 bytes on. Read with the row as contraction (transposed), 64 columns on are `group` bytes on.
__device__ __forceinline__ uint64_t matrix(uint32_t at, uint32_t group) {
    return uint64_t(1) << 62 | uint64_t(1024 / 16) << 32 | uint64_t(group / 16) << 16 | (at & 0x3FFFF) / 16;
}
// Says that d is about to be overwritten: any content will do, and none is put there.
template <int N>
__device__ __forceinline__ void undefined(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "=f"(d[i]));
}
__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits for all committed wgmmas of this warp; for all but those of the last COUNT commits.
template <int COUNT>
__device__ __forceinline__ void wgmma_end_but() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(COUNT) : "memory");
}
__device__ __forceinline__ void wgmma_end() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
// Keeps uses of d on their side of the line.
template <int N>
__device__ __forceinline__ void pin(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#define FOUR(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])

// d (64, N) = a (64, 16) b (N, 16)^T + (add ? d : 0), both K-major. Lane l of warp w holds rows 16 w + l / 4 and 8 on
// in columns 8 i + 2 (l % 4) and one on: d[4 i], d[4 i + 1], and in the lower row d[4 i + 2], d[4 i + 3].
__device__ __forceinline__ void wgmma(float (&d)[16], uint64_t a, uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "%16, %17, p, 1, 1, 0, 0;\n}\n"
        : FOUR(d, 0), FOUR(d, 4), FOUR(d, 8), FOUR(d, 12)
        : "l"(a), "l"(b), "r"(int(add)));
}
__device__ __forceinline__ void wgmma(float (&d)[24], uint64_t a, uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %26, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23}, "
        "%24, %25, p, 1, 1, 0, 0;\n}\n"
        : FOUR(d, 0), FOUR(d, 4), FOUR(d, 8), FOUR(d, 12), FOUR(d, 16), FOUR(d, 20)
        : "l"(a), "l"(b), "r"(int(add)));
}
// d (64, 128) = a (64, 16) b (16, 128) + (add ? d : 0): rows of b are the contraction.
__device__ __forceinline__ void wgmma_rows(float (&d)[64], uint64_t a, uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, p, 1, 1, 0, 1;\n}\n"
        : FOUR(d, 0), FOUR(d, 4), FOUR(d, 8), FOUR(d, 12), FOUR(d, 16), FOUR(d, 20), FOUR(d, 24), FOUR(d, 28),
          FOUR(d, 32), FOUR(d, 36), FOUR(d, 40), FOUR(d, 44), FOUR(d, 48), FOUR(d, 52), FOUR(d, 56), FOUR(d,
          60)
        : "l"(a), "l"(b), "r"(int(add)));
}

#undef FOUR

}  // namespace fmha
