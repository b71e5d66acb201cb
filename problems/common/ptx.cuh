// Instructions of sm_90a that C++ has no word for, one function each, for all kernels to take from. The products of
// wgmma, one for each shape, and what is a single kernel's way of doing things stand with the kernels.
//
// Addresses in shared memory are 32-bit, see shared_address. A number at the end of a name is bytes; without one, 4.
// -DKERNEL_DEBUG: a wait in vain ends, with a report.
#pragma once

#include <cstdint>
#include <cstdio>

namespace ptx {

// ---- barriers in shared memory, 8 bytes each

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
__device__ __forceinline__ void arrive_and_expect_tx(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// One arrival for the warp, behind all that its lanes did before.
__device__ __forceinline__ void warp_arrive(uint32_t barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(barrier);
}
// Returns once the phase of this parity is over; of a fresh barrier the phase of parity 1 is.
__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
#ifdef KERNEL_DEBUG
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
#ifdef KERNEL_DEBUG  // a hang becomes a report and a wrong result; a trap would lose what was printed
        if (++tries == 1u << 16) {
            if (threadIdx.x % 32 == 0)
                printf("block (%d, %d) warp %d waits in vain: barrier at byte %u of shared memory, parity %u\n",
                       blockIdx.x, blockIdx.y, threadIdx.x / 32, barrier, parity);
            return;
        }
#endif
    }
}

// As wait, at a barrier where other blocks of the cluster arrive or send: what they wrote before is visible.
__device__ __forceinline__ void wait_cluster(uint32_t barrier, uint32_t parity) {
    uint32_t over;
    do {
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}\n"
            : "=r"(over)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!over);
}

// ---- the block's numbered barriers, 0 to 15, of which __syncthreads has 0

// Wait until THREADS threads have arrived or wait here.
template <int THREADS>
__device__ __forceinline__ void named_barrier_sync(int number) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(THREADS) : "memory");
}
// Arrive without waiting.
template <int THREADS>
__device__ __forceinline__ void named_barrier_arrive(int number) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "n"(THREADS) : "memory");
}

// ---- clusters of blocks

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// `at` as the cluster's blocks know it, in the block of that rank.
__device__ __forceinline__ uint32_t in_block(uint32_t rank, uint32_t at) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    return there;
}
// The two halves of a barrier of the cluster, behind which only barriers are known that were published before it.
__device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// Wait for all threads of the cluster. What they wrote before is visible, in shared memory too. One warp says so for its
// block, behind the block's own barrier: such a release waits for all that the warp has under way, up to global memory,
// and the releases of 16 warps queue.
__device__ __forceinline__ void cluster_sync() {
    __syncthreads();
    if (threadIdx.x < 32)
        asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    else
        cluster_arrive_relaxed();
    cluster_wait();
}
// To another block's shared memory, at an address from in_block; its barrier, from there too, counts the bytes. So no
// fence is needed, which would wait for all that the warp has under way, up to global memory.
__device__ __forceinline__ void st_async(uint32_t to, uint32_t v, uint32_t barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to), "r"(v),
                 "r"(barrier)
                 : "memory");
}
__device__ __forceinline__ void st_async8(uint32_t to, uint2 v, uint32_t barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(to),
                 "r"(v.x), "r"(v.y), "r"(barrier)
                 : "memory");
}
__device__ __forceinline__ void st_async16(uint32_t to, uint4 v, uint32_t barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
        "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier)
        : "memory");
}
// Of another block's shared memory, at an address from in_block.
__device__ __forceinline__ uint32_t load_cluster(uint32_t from) {
    uint32_t v;
    asm volatile("ld.shared::cluster.b32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
    return v;
}

__device__ __forceinline__ uint4 load_cluster16(uint32_t from) {
    uint4 v;
    asm volatile("ld.shared::cluster.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from)
                 : "memory");
    return v;
}

// ---- fences

// What this thread wrote, or knows from a barrier that others wrote, may be read by wgmma and by bulk copies after
// this, or after a barrier that follows; and the reverse. In all memory; in shared memory only; in global memory only.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
__device__ __forceinline__ void fence_proxy_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ---- registers

// What the compiler would work out again for each use, it keeps from here on.
template <class T>
__device__ __forceinline__ void keep_in_register(T& v) {
    static_assert(sizeof(T) == 4);
    asm volatile("" : "+r"(v));
}
// threadIdx.x and blockIdx.x read here, so that what follows from them is worked out again, and not kept in registers.
__device__ __forceinline__ int thread_index() {
    int index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
}
__device__ __forceinline__ int block_index() {
    int index;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
    return index;
}

// Of a warpgroup: all its warps run this.

template <int COUNT>
__device__ __forceinline__ void warpgroup_reg_dealloc() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void warpgroup_reg_alloc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// ---- shared memory

__device__ __forceinline__ uint32_t smem_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ uint32_t load_shared(uint32_t from) {
    uint32_t v;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
    return v;
}
__device__ __forceinline__ uint32_t load_shared2(uint32_t from) {
    uint16_t v;
    asm volatile("ld.shared.b16 %0, [%1];" : "=h"(v) : "r"(from) : "memory");
    return v;
}
__device__ __forceinline__ uint2 load_shared8(uint32_t from) {
    uint2 v;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from) : "memory");
    return v;
}
__device__ __forceinline__ float2 load_shared_pair(uint32_t from) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(from) : "memory");
    return v;
}
__device__ __forceinline__ uint4 load_shared16(uint32_t from) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from)
                 : "memory");
    return v;
}
__device__ __forceinline__ void store_shared1(uint32_t to, uint32_t v) {
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(to), "r"(v) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t to, uint32_t v) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(v) : "memory");
}
__device__ __forceinline__ void store_shared16(uint32_t to, uint4 v) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
// Four 8x8 matrices of 16-bit values, as a warp holds them in a factor or an accumulator; lane i gives the address of
// row i % 8 of matrix i / 8.
__device__ __forceinline__ uint4 ldmatrix_x4(uint32_t from) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from)
                 : "memory");
    return v;
}
__device__ __forceinline__ void stmatrix_x4(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}
// The same, each transposed on its way: the rows are those in shared memory.
__device__ __forceinline__ uint4 ldmatrix_x4_trans(uint32_t from) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from)
                 : "memory");
    return v;
}
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}

// ---- copies from global to shared memory, without registers

__device__ __forceinline__ void cp_async4(uint32_t to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void cp_async16(uint32_t to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// Zeros if not `really`: then nothing is read.
__device__ __forceinline__ void cp_async8(uint32_t to, const void* from, bool really) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(really ? 8 : 0) : "memory");
}
__device__ __forceinline__ void cp_async16(uint32_t to, const void* from, bool really) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(really ? 16 : 0) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all but the last COUNT groups that this thread has committed are there.
template <int COUNT>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(COUNT) : "memory");
}
// Until all that this thread has asked for is there.
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Arrives for this thread at the barrier once the copies that it has asked for are there.
__device__ __forceinline__ void cp_async_mbarrier_arrive(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// ---- bulk copies

// How long L2 is to keep a line: for data that is not needed again, and for all else.
__device__ __forceinline__ uint64_t l2_evict_first() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ uint64_t l2_evict_normal() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
// Into L2, the line of 128 bytes that this lies in; or `bytes`, a multiple of 16. Both return at once.
__device__ __forceinline__ void prefetch_l2(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }
__device__ __forceinline__ void prefetch_l2(const void* from, uint32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
// `bytes`, a multiple of 16, from global to shared memory; the barrier is told of each.
__device__ __forceinline__ void tma_load_1d(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier,
                                          uint64_t policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}
// The box at (x, y, z), innermost first, of the tensor that `map` describes; the barrier is told of all its bytes.
__device__ __forceinline__ void tma_load_3d(uint32_t to, const void* map, int x, int y, int z, uint32_t barrier,
                                            uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "l"(policy)
        : "memory");
}
__device__ __forceinline__ void tma_store_1d(void* to, uint32_t from, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;" ::"l"(to),
                 "r"(from), "r"(bytes)
                 : "memory");
}
// Until what this thread has stored with tma_store_1d is written.
__device__ __forceinline__ void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// ---- counters in global memory, between blocks

// One more at *counter, or `more`, behind all that this thread knows to be written; a count that makes that known.
__device__ __forceinline__ void red_add_release(int* counter) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ __forceinline__ void red_add_release(uint32_t* counter, uint32_t more) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(more) : "memory");
}
// Of a counter, or a value with its tag, in whole; nothing else is known by it.
template <class T>
__device__ __forceinline__ T load_relaxed(const T* from) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8);
    T v;
    if constexpr (sizeof(T) == 4)
        asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    else
        asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
    return v;
}
__device__ __forceinline__ int ld_acquire(const int* counter) {
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
__device__ __forceinline__ uint32_t pack_bf16x2(float low, float high) {
    uint32_t v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    return v;
}
__device__ __forceinline__ uint32_t pack_f16x2(float low, float high) {
    uint32_t v;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    return v;
}
// To the nearest e4m3 each, at most 448.
__device__ __forceinline__ uint16_t pack_e4m3x2(float low, float high) {
    uint16_t v;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(v) : "f"(high), "f"(low));
    return v;
}
// Each of the low four nibbles of `selectors` picks a byte of the eight; with bit 3 set, the byte's sign bit, eight
// times. (__byte_perm clears that bit first.)
__device__ __forceinline__ uint32_t prmt(uint32_t low, uint32_t high, uint32_t selectors) {
    uint32_t v;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(v) : "r"(low), "r"(high), "r"(selectors));
    return v;
}
// sum + the products of four bytes each.
__device__ __forceinline__ int dp4a(uint32_t unsigned_bytes, uint32_t signed_bytes, int sum) {
    int v;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(v) : "r"(unsigned_bytes), "r"(signed_bytes), "r"(sum));
    return v;
}
// d (16, 8) += a (16, 16) b (8, 16)^T. Lane l = 4 g + c has of d rows g and g + 8, columns 2 c and one on; of a columns
// 2 c and one on in both rows as a0, a1, columns 2 c + 8 and one on as a2, a3; of b the same of row g.
__device__ __forceinline__ void mma_bf16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                         uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    mma_bf16(d, a[0], a[1], a[2], a[3], b[0], b[1]);
}
// Of two bf16 pairs. Both factors and the product may be subnormal: nothing is flushed.
__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
    uint32_t c;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

// ---- wgmma

// The descriptor of a matrix in shared memory, in which 16 bytes on are 1 more. Rows have 128 bytes and are swizzled:
// 16-byte chunk c of row r is at chunk c ^ r % 8. Eight rows are 1024 bytes on. Read with the row as contraction
// (transposed), 64 columns on are `group` bytes on.
__device__ __forceinline__ uint64_t make_smem_desc(uint32_t at, uint32_t group = 16) {
    return uint64_t(1) << 62 | uint64_t(1024 / 16) << 32 | uint64_t(group / 16) << 16 | (at & 0x3FFFF) / 16;
}
// The half of make_smem_desc(at) that depends on `at`, for who keeps it or has it from another lane; and all of it.
__device__ __forceinline__ uint32_t smem_desc_low(uint32_t at) { return 1 << 16 | (at & 0x3FFFF) / 16; }
__device__ __forceinline__ uint64_t smem_desc_of(uint32_t half) { return uint64_t(1 << 30 | 1024 / 16) << 32 | half; }

__device__ __forceinline__ void warpgroup_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void warpgroup_commit_batch() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits for all committed wgmmas of this warp but those of the last COUNT commits; or for all.
template <int COUNT>
__device__ __forceinline__ void warpgroup_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(COUNT) : "memory");
}
// Keeps uses of d on their side of the line: sums are what wgmma made of them only behind its end.
template <int N>
__device__ __forceinline__ void warpgroup_fence_operand(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

}  // namespace ptx
