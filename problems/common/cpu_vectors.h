// GCC's vector types, and arithmetic on them for an Isa, which has kLanes fp32 of a vector, all(x), a vector of x, and
// fma(a, b, c), a * b + c. Before this is included, WIDE is the attribute that lets a function use its instructions.
#pragma once

#include <cstdint>

#define ALWAYS inline __attribute__((always_inline))

namespace cpu {

// Vectors of N fp32, int32, uint32 and uint16; g++ takes no size that depends on a template's argument.
template <int N>
struct Vectors;
#define CPU_VECTORS(N)                                          \
    template <>                                                 \
    struct Vectors<N> {                                         \
        typedef float F __attribute__((vector_size(4 * N)));    \
        typedef int32_t I __attribute__((vector_size(4 * N)));  \
        typedef uint32_t U __attribute__((vector_size(4 * N))); \
        typedef uint16_t H __attribute__((vector_size(2 * N))); \
    };
CPU_VECTORS(4)
CPU_VECTORS(8)
CPU_VECTORS(16)

template <class Isa>
struct Arithmetic {
    using F = typename Vectors<Isa::kLanes>::F;
    using I = typename Vectors<Isa::kLanes>::I;
    using U = typename Vectors<Isa::kLanes>::U;
    using H = typename Vectors<Isa::kLanes>::H;

    WIDE static ALWAYS F get(const float* p) {
        F v;
        __builtin_memcpy(&v, p, sizeof v);
        return v;
    }
    WIDE static ALWAYS void put(float* p, F v) { __builtin_memcpy(p, &v, sizeof v); }

    // The upper 16 bits of x as bf16, ties to even.
    WIDE static ALWAYS U bf16(F x) {
        const U bits = (U)x;
        return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    }

    // 2^t for -126 < t < 127.
    WIDE static ALWAYS F exp2(F t) {
        const F round = Isa::all(12582912.0f);  // 1.5 * 2^23: its last bit is worth 1
        const F whole = t + round, f = t - (whole - round);
        F y = Isa::all(1.5403530e-4f);  // ln(2)^k / k! from k = 6 on down: 1.2e-7 for |f| <= 0.5
        y = Isa::fma(y, f, Isa::all(1.3333558e-3f));
        y = Isa::fma(y, f, Isa::all(9.6181291e-3f));
        y = Isa::fma(y, f, Isa::all(5.5504109e-2f));
        y = Isa::fma(y, f, Isa::all(2.4022651e-1f));
        y = Isa::fma(y, f, Isa::all(6.9314718e-1f));
        y = Isa::fma(y, f, Isa::all(1.0f));
        return (F)((I)y + (((I)whole - (I)round) << 23));
    }
};

}  // namespace cpu
