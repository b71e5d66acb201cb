// wgmma with the left factor in registers, for 8 to 128 columns: what prefill and dense multiply with.
#pragma once

#include "ptx.cuh"

namespace ptx {

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

// Keeps a fragment where it is up to here: wgmma reads it long after it is issued.
__device__ __forceinline__ void hold(const uint32_t (&a)[4]) {
    asm volatile("" ::"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]) : "memory");
}

}  // namespace ptx
