// Links of matrices with AVX-512: 16 columns a vector, codes to fp32 through fp16.
#pragma GCC diagnostic ignored "-Wuninitialized"  // g++ 12's own AVX-512 header, wherever it means "any value"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#define WIDE __attribute__((target("avx512f,avx512bw,avx512vl,f16c,fma")))

#include "cpu_linear.h"

namespace {

struct Avx512 {
    static constexpr int kLanes = 16, kTokens = 8;

    WIDE static ALWAYS __m512 fma(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }

    WIDE static ALWAYS void e4m3(const uint8_t* from, __m512 (&to)[1]) {
        const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
        const __m256i size = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x7F)), 7);
        const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)), 8);
        to[0] = _mm512_cvtph_ps(_mm256_or_si256(size, sign));
    }

    WIDE static ALWAYS void e2m1(const uint8_t* from, __m512 (&to)[1]) {
        const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
        const __m128i both = _mm_unpacklo_epi8(bytes, _mm_srli_epi16(bytes, 4));  // low nibbles hold the codes, in order
        const __m256i wide = _mm256_cvtepu8_epi16(both);
        const __m256i size = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x7)), 9);
        const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x8)), 12);
        to[0] = _mm512_cvtph_ps(_mm256_or_si256(size, sign));
    }
};

}  // namespace

extern "C" int launch(void* const* tensors, const int64_t* numbers) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl")) return cpu::kNoInstructions;
    return linear::on_all_cores<Avx512>(linear::Problem(tensors, numbers));
}
