// The instructions of sm_90a that sm90_prefill needs, one function each. Shared-memory addresses are 32-bit.
#pragma once

#include <cstdint>
#include <cstdio>

namespace prefill {

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
// Arrives, and the phase also needs `bytes` more from bulk copies.
__device__ __forceinline__ void arrive_expecting(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// One arrival for the warp, behind all that its lanes did before.
__device__ __forceinline__ void warp_arrive(uint32_t barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(barrier);
}
// Returns once the phase of this parity is over; of a fresh barrier the phase of parity 1 is.
__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
#ifdef MOE_DEBUG
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
#ifdef MOE_DEBUG  // a hang becomes a report and a wrong result; a trap would lose what was printed
        if (++tries == 1u << 16) {
            if (threadIdx.x % 32 == 0)
                printf("block %d warp %d waits in vain: barrier at byte %u of shared memory, parity %u\n", blockIdx.x,
                       threadIdx.x / 32, barrier, parity);
            return;
        }
#endif
    }
}
// 128 threads meet at the block's barrier of that number.
__device__ __forceinline__ void meet(int number) { asm volatile("bar.sync %0, 128;" ::"r"(number) : "memory"); }

// What this thread wrote, or knows from a barrier that others wrote, may be read by wgmma and by bulk copies after
// this, or after a barrier that follows; and the reverse.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

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

__device__ __forceinline__ uint4 load_shared16(uint32_t from) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from)
                 : "memory");
    return v;
}
__device__ __forceinline__ float2 load_shared_pair(uint32_t from) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(from) : "memory");
    return v;
}
__device__ __forceinline__ uint32_t load_shared(uint32_t from) {
    uint32_t v;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
    return v;
}
__device__ __forceinline__ void store_shared(uint32_t to, uint32_t v) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(v) : "memory");
}
__device__ __forceinline__ void store_shared16(uint32_t to, int a, int b, int c, int d) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
// Four 8x8 matrices of 16-bit values as a warp holds them in an accumulator, each stored transposed: lane i gives the
// address of what becomes row i % 8 of matrix i / 8.
__device__ __forceinline__ void store_transposed(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}

// 16 or 4 bytes from global to shared memory, without registers.
__device__ __forceinline__ void copy16(uint32_t to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy4(uint32_t to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
// Until all that this thread has asked for is there.
__device__ __forceinline__ void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Arrives for this thread at the barrier once the copies that it has asked for are there.
__device__ __forceinline__ void copies_arrive(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// How long L2 is to keep a line: for data that nobody needs again, and for all else.
__device__ __forceinline__ uint64_t keep_short() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ uint64_t keep() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
// `bytes`, a multiple of 16, from global to shared memory; the barrier is told of each.
__device__ __forceinline__ void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier,
                                          uint64_t policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}
__device__ __forceinline__ void bulk_store(void* to, uint32_t from, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;" ::"l"(to),
                 "r"(from), "r"(bytes)
                 : "memory");
}
// Until what this thread has stored with bulk_store is written.
__device__ __forceinline__ void bulk_stores_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// One more at *counter, behind all that this thread knows to be written; a count that makes that known.
__device__ __forceinline__ void count_up(int* counter) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ __forceinline__ int count_of(const int* counter) {
    int v;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(counter) : "memory");
    return v;
}

// ---- arithmetic

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ uint32_t bf16_pair(float low, float high) {
    uint32_t v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    return v;
}

// ---- wgmma

// A matrix in shared memory with rows of 128 bytes, swizzled: 16-byte chunk c of row r stands at chunk c ^ r % 8. Eight
// rows are 1024 bytes on.
// The lower half of its descriptor, in which 16 bytes on are 1 more; and the descriptor.
__device__ __forceinline__ uint32_t matrix_at(uint32_t at) { return 1 << 16 | (at & 0x3FFFF) / 16; }
__device__ __forceinline__ uint64_t matrix(uint32_t lower) {
    return uint64_t(1 << 30 | 1024 / 16) << 32 | lower;
}
__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits for all committed wgmmas of this warp but those of the last COUNT commits.
template <int COUNT>
__device__ __forceinline__ void wgmma_end_but() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(COUNT) : "memory");
}

// d (64, N) += a (64, 16) b (N, 16)^T, a in registers, b K-major. Lane l = 4 g + c of warp w has rows 16 w + g and 8
// on: of d columns 8 i + 2 c and one on as d[4 i], d[4 i + 1], and in the lower row d[4 i + 2], d[4 i + 3]; of a
// columns 2 c and one on in both rows as a[0], a[1], columns 2 c + 8 and one on as a[2], a[3]. d beyond N / 2 stays.
template <int N>
__device__ __forceinline__ void wgmma(float* d, const uint32_t (&a)[4], uint64_t b);

#define FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define PRODUCT(N, D, A0, A1, A2, A3, B, ...)                                                                   \
    template <>                                                                                                 \
    __device__ __forceinline__ void wgmma<N>(float* d, const uint32_t (&a)[4], uint64_t b) {                    \
        asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #N            \
                     "k16.f32.bf16.bf16 {" D "}, {" A0 ", " A1 ", " A2 ", " A3 "}, " B ", p, 1, 1, 0;\n}\n"     \
                     : __VA_ARGS__                                                                              \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                     \
    }
#define D8 "%0, %1, %2, %3"
#define D16 D8 ", %4, %5, %6, %7"
#define D24 D16 ", %8, %9, %10, %11"
#define D32 D24 ", %12, %13, %14, %15"
#define D40 D32 ", %16, %17, %18, %19"
#define D48 D40 ", %20, %21, %22, %23"
#define D56 D48 ", %24, %25, %26, %27"
#define D64 D56 ", %28, %29, %30, %31"
#define D72 D64 ", %32, %33, %34, %35"
#define D80 D72 ", %36, %37, %38, %39"
#define D88 D80 ", %40, %41, %42, %43"
#define D96 D88 ", %44, %45, %46, %47"
#define D104 D96 ", %48, %49, %50, %51"
#define D112 D104 ", %52, %53, %54, %55"
#define D120 D112 ", %56, %57, %58, %59"
#define D128 D120 ", %60, %61, %62, %63"
#define F8 FOUR(0)
#define F16 F8, FOUR(4)
#define F24 F16, FOUR(8)
#define F32 F24, FOUR(12)
#define F40 F32, FOUR(16)
#define F48 F40, FOUR(20)
#define F56 F48, FOUR(24)
#define F64 F56, FOUR(28)
#define F72 F64, FOUR(32)
#define F80 F72, FOUR(36)
#define F88 F80, FOUR(40)
#define F96 F88, FOUR(44)
#define F104 F96, FOUR(48)
#define F112 F104, FOUR(52)
#define F120 F112, FOUR(56)
#define F128 F120, FOUR(60)
PRODUCT(8, D8, "%4", "%5", "%6", "%7", "%8", F8)
PRODUCT(16, D16, "%8", "%9", "%10", "%11", "%12", F16)
PRODUCT(24, D24, "%12", "%13", "%14", "%15", "%16", F24)
PRODUCT(32, D32, "%16", "%17", "%18", "%19", "%20", F32)
PRODUCT(40, D40, "%20", "%21", "%22", "%23", "%24", F40)
PRODUCT(48, D48, "%24", "%25", "%26", "%27", "%28", F48)
PRODUCT(56, D56, "%28", "%29", "%30", "%31", "%32", F56)
PRODUCT(64, D64, "%32", "%33", "%34", "%35", "%36", F64)
PRODUCT(72, D72, "%36", "%37", "%38", "%39", "%40", F72)
PRODUCT(80, D80, "%40", "%41", "%42", "%43", "%44", F80)
PRODUCT(88, D88, "%44", "%45", "%46", "%47", "%48", F88)
PRODUCT(96, D96, "%48", "%49", "%50", "%51", "%52", F96)
PRODUCT(104, D104, "%52", "%53", "%54", "%55", "%56", F104)
PRODUCT(112, D112, "%56", "%57", "%58", "%59", "%60", F112)
PRODUCT(120, D120, "%60", "%61", "%62", "%63", "%64", F120)
PRODUCT(128, D128, "%64", "%65", "%66", "%67", "%68", F128)
#undef PRODUCT
#undef FOUR
#undef D8
#undef D16
#undef D24
#undef D32
#undef D40
#undef D48
#undef D56
#undef D64
#undef D72
#undef D80
#undef D88
#undef D96
#undef D104
#undef D112
#undef D120
#undef D128
#undef F8
#undef F16
#undef F24
#undef F32
#undef F40
#undef F48
#undef F56
#undef F64
#undef F72
#undef F80
#undef F88
#undef F96
#undef F104
#undef F112
#undef F120
#undef F128

}  // namespace prefill
