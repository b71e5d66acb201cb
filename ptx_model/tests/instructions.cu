// Small kernels whose results test_instructions.py computes again with numpy. One block of 64 threads; o and a are
// arrays of 32-bit words.
#include <cstdint>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#define KERNEL(name) extern "C" __global__ void name(uint32_t* o, const uint32_t* a)
#define T int const t = threadIdx.x

struct Big {
    int v[20];
};
__device__ __noinline__ Big shifted(Big b, int by) {
    if (by & 1) return b;  // threads leave at different places
    for (int i = 0; i < 20; ++i) b.v[i] += by * i;
    return b;
}
__device__ __noinline__ int sum(int count, const uint32_t* a) {
    int total = 0;
    for (int i = 0; i < count; ++i) total += a[i];
    return total;
}
__device__ uint32_t launches;
__constant__ uint32_t table[4] = {3, 1, 4, 1};

KERNEL(calls) {
    T;
    Big b;
    for (int i = 0; i < 20; ++i) b.v[i] = a[i];
    b = shifted(b, t);
    o[t] = b.v[t % 20] + sum(t % 5, a + t) + sum(3, a);
}
KERNEL(says) {
    T;
    if (a[t] == 0xFFFFFFFF) printf("never %d\n", t);
    if (t == 0) printf("said %d\n", t);
    o[t] = t;
}
KERNEL(jumps) {
    T;
    asm volatile(
        "{\n.reg .u32 r;\nl: .branchtargets A, B, C;\nbrx.idx %1, l;\n"
        "A: mov.u32 r, 10; bra D;\nB: mov.u32 r, 20; bra D;\nC: mov.u32 r, 30;\nD: st.global.u32 [%0], r;\n}\n" ::"l"(
            o + t),
        "r"(t % 3)
        : "memory");
}
KERNEL(counts) {
    T;
    o[t] = __syncthreads_count(a[t] & 1) + 100 * __syncthreads_and(a[t] < 0x80000000u) + 1000 * __syncthreads_or(a[t] == 1);
}
KERNEL(masks) {
    T;
    uint32_t lt, le, eq, ge, gt;
    asm("mov.u32 %0, %lanemask_lt; mov.u32 %1, %lanemask_le; mov.u32 %2, %lanemask_eq;" : "=r"(lt), "=r"(le), "=r"(eq));
    asm("mov.u32 %0, %lanemask_ge; mov.u32 %1, %lanemask_gt;" : "=r"(ge), "=r"(gt));
    int all;
    uint32_t const same = __match_all_sync(~0u, t / 32, &all);
    o[t] = (lt + 3 * le + 5 * eq + 7 * ge + 11 * gt) ^ same ^ all;
}
KERNEL(spaces) {
    T;
    __shared__ uint32_t s[64];
    s[t] = a[t];
    __syncthreads();
    uint32_t const* p = t & 1 ? s : a;
    o[t] = p[t] + __isShared(p) + 2 * __isGlobal(p) + table[t % 4];
}
KERNEL(downwards) {
    T;
    atomicDec(o, 40);
    if (t == 0) launches += 1, o[1] = launches;
}
KERNEL(bytes) {
    T;
    uint32_t const x = a[t], y = a[t + 64];
    uint32_t v = __dp2a_lo(int(x), int(y), 5) + __dp2a_hi(x, y, 1u) + __sad(int(x), int(y), 7u) + __vabsdiffu4(x, y);
    v += __umul24(x, y) + __clzll(uint64_t(x) << 7) + __ffsll(uint64_t(y) << 20) + uint32_t(__brevll(x) >> 32);
    unsigned __int128 const wide = (unsigned __int128)(uint64_t(x) << 32 | y) * (uint64_t(y) << 32 | x) - x;
    o[t] = v + uint32_t(wide >> 96) + uint32_t(wide >> 64) + uint32_t(wide);
}
KERNEL(rounded) {
    T;
    float const x = __uint_as_float(a[t]), y = __uint_as_float(a[t + 64]);
    float* const f = reinterpret_cast<float*>(o) + t;
    f[0] = __fdiv_rz(x, y), f[64] = __frcp_ru(y), f[128] = __fsqrt_rd(fabsf(x));
    f[192] = __ll2float_rz(int64_t(a[t]) << 20 | 1), f[256] = __double2float_ru(double(x) + 1e-12 * y);
    f[320] = float(__dadd_rz(x, 1e-20) - x);
}
KERNEL(narrow) {
    T;
    float2 const x = make_float2(__uint_as_float(a[t]), __uint_as_float(a[t + 64]));
    o[t] = __nv_cvt_float2_to_fp8x2(x, __NV_SATFINITE, __NV_E5M2) << 16 |
           __nv_cvt_halfraw2_to_fp8x2(__floats2half2_rn(x.x, x.y), __NV_SATFINITE, __NV_E4M3);
}

// Products of a warp: A in four registers, B in two, sums from 1 on. The words of a are the registers.
#define PRODUCT(name, shape, type, letter)                                                                         \
    KERNEL(name) {                                                                                                 \
        T;                                                                                                         \
        type c[4] = {1, 2, 3, 4};                                                                                  \
        asm volatile("mma.sync.aligned." shape " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"            \
                     : "+" letter(c[0]), "+" letter(c[1]), "+" letter(c[2]), "+" letter(c[3])                      \
                     : "r"(a[t]), "r"(a[t + 32]), "r"(a[t + 64]), "r"(a[t + 96]), "r"(a[t + 128]), "r"(a[t + 160])); \
        for (int i = 0; i < 4; ++i) reinterpret_cast<type*>(o)[4 * t + i] = c[i];                                  \
    }
PRODUCT(product_s8, "m16n8k32.row.col.s32.s8.u8.s32", int, "r")
PRODUCT(product_e4m3, "m16n8k32.row.col.f32.e4m3.e5m2.f32", float, "f")
PRODUCT(product_tf32, "m16n8k8.row.col.f32.tf32.tf32.f32", float, "f")
KERNEL(product_f16) {
    T;
    uint32_t c[2] = {};
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3}, {%4}, {%0,%1};"
                 : "+r"(c[0]), "+r"(c[1])
                 : "r"(a[t]), "r"(a[t + 32]), "r"(a[t + 128]));
    o[2 * t] = c[0], o[2 * t + 1] = c[1];
}
