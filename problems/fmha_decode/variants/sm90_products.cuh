// wgmma with both factors in shared memory, of the shapes that sm90_wgmma needs.
#pragma once

#include "ptx.cuh"

namespace ptx {

// Says that d is about to be overwritten: any content will do, and none is put there.
template <int N>
__device__ __forceinline__ void undefined(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "=f"(d[i]));
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
          FOUR(d, 32), FOUR(d, 36), FOUR(d, 40), FOUR(d, 44), FOUR(d, 48), FOUR(d, 52), FOUR(d, 56),
          FOUR(d, 60)
        : "l"(a), "l"(b), "r"(int(add)));
}

#undef FOUR

}  // namespace ptx
