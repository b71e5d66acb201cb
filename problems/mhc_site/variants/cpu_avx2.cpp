// The site with AVX2 and FMA: twelve sums of eight columns in registers.
#include <immintrin.h>

#define WIDE __attribute__((target("avx2,fma")))

#include "cpu_site.h"

namespace {

struct Avx2 {
    static constexpr int kLanes = 8, kRows = 3, kTokens = 4;

    WIDE static ALWAYS __m256 all(float x) { return _mm256_set1_ps(x); }
    WIDE static ALWAYS __m256 fma(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
};

}  // namespace

extern "C" int launch(void* const* tensors, int64_t tokens, int64_t hidden, int64_t y_bytes,
                      int64_t second_bytes) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return cpu::kNoInstructions;
    return site::on_all_cores<Avx2>(site::problem(tensors, tokens, hidden, y_bytes, second_bytes));
}
