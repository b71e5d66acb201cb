// wgmma with the left factor in registers: what prefill, dense and mxfp4 multiply with.
#pragma once

#include "ptx.cuh"

namespace ptx {

// d (64, N) += a (64, 16) b (N, 16)^T, a in registers, b K-major. Lane l = 4 g + c of warp w has rows 16 w + g and 8
// on: of d columns 8 i + 2 c and one on as d[4 i], d[4 i + 1], and in the lower row d[4 i + 2], d[4 i + 3]; of a
// columns 2 c and one on in both rows as a[0], a[1], columns 2 c + 8 and one on as a[2], a[3]. d beyond N / 2 stays.
template <int N>
__device__ __forceinline__ void wgmma(float* d, const uint32_t (&a)[4], uint64_t b);

// d (64, N) = a (64, 32) b (N, 32)^T in e4m3, or with ADDS +=. As wgmma, but that lane l has of a columns 4 c to
// 4 c + 3 in a[0] and a[1], columns 4 c + 16 and on in a[2] and a[3].
template <int N, bool ADDS>
__device__ __forceinline__ void wgmma_e4m3(float* d, const uint32_t (&a)[4], uint64_t b);

// REST: of the operands. Behind these, the function's name.
#define WGMMA_ONE(N, KIND, ADDS, REST, A0, A1, A2, A3, B, ...)                                                  \
    template <>                                                                                                 \
    __device__ __forceinline__ void __VA_ARGS__(float* d, const uint32_t (&a)[4], uint64_t b) {                 \
        asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, " ADDS ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N KIND \
                     " {" WGMMA_D##N "}, {" A0 ", " A1 ", " A2 ", " A3 "}, " B ", p, " REST ";\n}\n"             \
                     : WGMMA_F##N                                                                               \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                     \
    }
#define WGMMA(N, ...)                                                                                           \
    WGMMA_ONE(N, "k16.f32.bf16.bf16", "1", "1, 1, 0", __VA_ARGS__, wgmma<N>)                                    \
    WGMMA_ONE(N, "k32.f32.e4m3.e4m3", "0", "1, 1", __VA_ARGS__, wgmma_e4m3<N, false>)                           \
    WGMMA_ONE(N, "k32.f32.e4m3.e4m3", "1", "1, 1", __VA_ARGS__, wgmma_e4m3<N, true>)
#define WGMMA_FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_D8 "%0, %1, %2, %3"
#define WGMMA_D16 WGMMA_D8 ", %4, %5, %6, %7"
#define WGMMA_D24 WGMMA_D16 ", %8, %9, %10, %11"
#define WGMMA_D32 WGMMA_D24 ", %12, %13, %14, %15"
#define WGMMA_D40 WGMMA_D32 ", %16, %17, %18, %19"
#define WGMMA_D48 WGMMA_D40 ", %20, %21, %22, %23"
#define WGMMA_D56 WGMMA_D48 ", %24, %25, %26, %27"
#define WGMMA_D64 WGMMA_D56 ", %28, %29, %30, %31"
#define WGMMA_D72 WGMMA_D64 ", %32, %33, %34, %35"
#define WGMMA_D80 WGMMA_D72 ", %36, %37, %38, %39"
#define WGMMA_D88 WGMMA_D80 ", %40, %41, %42, %43"
#define WGMMA_D96 WGMMA_D88 ", %44, %45, %46, %47"
#define WGMMA_D104 WGMMA_D96 ", %48, %49, %50, %51"
#define WGMMA_D112 WGMMA_D104 ", %52, %53, %54, %55"
#define WGMMA_D120 WGMMA_D112 ", %56, %57, %58, %59"
#define WGMMA_D128 WGMMA_D120 ", %60, %61, %62, %63"
#define WGMMA_F8 WGMMA_FOUR(0)
#define WGMMA_F16 WGMMA_F8, WGMMA_FOUR(4)
#define WGMMA_F24 WGMMA_F16, WGMMA_FOUR(8)
#define WGMMA_F32 WGMMA_F24, WGMMA_FOUR(12)
#define WGMMA_F40 WGMMA_F32, WGMMA_FOUR(16)
#define WGMMA_F48 WGMMA_F40, WGMMA_FOUR(20)
#define WGMMA_F56 WGMMA_F48, WGMMA_FOUR(24)
#define WGMMA_F64 WGMMA_F56, WGMMA_FOUR(28)
#define WGMMA_F72 WGMMA_F64, WGMMA_FOUR(32)
#define WGMMA_F80 WGMMA_F72, WGMMA_FOUR(36)
#define WGMMA_F88 WGMMA_F80, WGMMA_FOUR(40)
#define WGMMA_F96 WGMMA_F88, WGMMA_FOUR(44)
#define WGMMA_F104 WGMMA_F96, WGMMA_FOUR(48)
#define WGMMA_F112 WGMMA_F104, WGMMA_FOUR(52)
#define WGMMA_F120 WGMMA_F112, WGMMA_FOUR(56)
#define WGMMA_F128 WGMMA_F120, WGMMA_FOUR(60)
WGMMA(8, "%4", "%5", "%6", "%7", "%8")
WGMMA(16, "%8", "%9", "%10", "%11", "%12")
WGMMA(24, "%12", "%13", "%14", "%15", "%16")
WGMMA(32, "%16", "%17", "%18", "%19", "%20")
WGMMA(40, "%20", "%21", "%22", "%23", "%24")
WGMMA(48, "%24", "%25", "%26", "%27", "%28")
WGMMA(56, "%28", "%29", "%30", "%31", "%32")
WGMMA(64, "%32", "%33", "%34", "%35", "%36")
WGMMA(72, "%36", "%37", "%38", "%39", "%40")
WGMMA(80, "%40", "%41", "%42", "%43", "%44")
WGMMA(88, "%44", "%45", "%46", "%47", "%48")
WGMMA(96, "%48", "%49", "%50", "%51", "%52")
WGMMA(104, "%52", "%53", "%54", "%55", "%56")
WGMMA(112, "%56", "%57", "%58", "%59", "%60")
WGMMA(120, "%60", "%61", "%62", "%63", "%64")
WGMMA(128, "%64", "%65", "%66", "%67", "%68")

// Keeps a fragment where it is up to here: wgmma reads it long after it is issued.
__device__ __forceinline__ void hold(const uint32_t (&a)[4]) {
    asm volatile("" ::"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]) : "memory");
}

}  // namespace ptx
