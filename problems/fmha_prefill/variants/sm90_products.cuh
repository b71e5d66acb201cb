// wgmma of the two shapes that sm90_wgmma needs: scores with both factors in shared memory, values with P in registers.
#pragma once

#include "ptx.cuh"

namespace ptx {

// Keeps fragments in their registers up to here: wgmma reads them long after it is issued.
template <int N>
__device__ __forceinline__ void hold(const uint4 (&a)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" ::"r"(a[i].x), "r"(a[i].y), "r"(a[i].z), "r"(a[i].w) : "memory");
}

#define FOUR(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SIXTEEN(d, i) FOUR(d, i), FOUR(d, i + 4), FOUR(d, i + 8), FOUR(d, i + 12)

// d (64, 64) = a (64, 16) b (64, 16)^T + (add ? d : 0), both K-major. Lane l of warp w holds rows 16 w + l / 4 and 8 on
// in columns 8 i + 2 (l % 4) and one on: d[4 i], d[4 i + 1], and in the lower row d[4 i + 2], d[4 i + 3].
__device__ __forceinline__ void wgmma(float (&d)[32], uint64_t a, uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, p, 1, 1, 0, 0;\n}\n"
        : SIXTEEN(d, 0), SIXTEEN(d, 16)
        : "l"(a), "l"(b), "r"(int(add)));
}
// d (64, 64) = a (64, 16) b (16, 64) + (add ? d : 0): rows of b are the contraction. a in registers: columns 2 (l % 4)
// and one on of both rows as x and y, 8 columns on as z and w.
__device__ __forceinline__ void wgmma_rows(float (&d)[32], const uint4& a, uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}\n"
        : SIXTEEN(d, 0), SIXTEEN(d, 16)
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(int(add)));
}

#undef SIXTEEN
#undef FOUR

}  // namespace ptx
