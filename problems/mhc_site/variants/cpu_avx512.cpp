// The site with AVX-512: 24 sums of 16 columns in registers.
#pragma GCC diagnostic ignored "-Wuninitialized"  // g++ 12's own AVX-512 header, wherever it means "any value"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#define WIDE __attribute__((target("avx512f,avx512bw,avx512vl,fma")))

#include "cpu_site.h"

namespace {

struct Avx512 {
    static constexpr int kLanes = 16, kRows = 6, kTokens = 4;

    WIDE static ALWAYS __m512 all(float x) { return _mm512_set1_ps(x); }
    WIDE static ALWAYS __m512 fma(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
};

}  // namespace

extern "C" int launch(void* const* tensors, int64_t tokens, int64_t hidden, int64_t y_bytes,
                      int64_t second_bytes) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl")) return cpu::kNoInstructions;
    return site::on_all_cores<Avx512>(site::problem(tensors, tokens, hidden, y_bytes, second_bytes));
}
