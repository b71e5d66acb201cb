// Links of matrices with AVX2: 8 columns a vector, codes to fp32 through fp16.
#include <immintrin.h>

#define WIDE __attribute__((target("avx2,f16c,fma")))

#include "cpu_linear.h"

namespace {

struct Avx2 {
    static constexpr int kLanes = 8, kTokens = 4;

    WIDE static ALWAYS __m256 fma(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }

    WIDE static ALWAYS void e4m3(const uint8_t* from, __m256 (&to)[2]) {
        place<0x7F, 0x80, 7, 8>(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)), to);
    }

    WIDE static ALWAYS void e2m1(const uint8_t* from, __m256 (&to)[2]) {
        const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
        // The low nibbles of each pair hold a byte's codes, in order.
        place<0x7, 0x8, 9, 12>(_mm_unpacklo_epi8(bytes, _mm_srli_epi16(bytes, 4)), to);
    }

  private:
    // 16 codes, a byte each, to the fields of fp16: sizes by UP bits, signs by SIGN_UP.
    template <int SIZE, int SIGN, int UP, int SIGN_UP>
    WIDE static ALWAYS void place(__m128i codes, __m256 (&to)[2]) {
        const __m256i wide = _mm256_cvtepu8_epi16(codes);
        const __m256i size = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(SIZE)), UP);
        const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(SIGN)), SIGN_UP);
        const __m256i half = _mm256_or_si256(size, sign);
        to[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(half));
        to[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
    }
};

}  // namespace

extern "C" int launch(void* const* tensors, const int64_t* numbers) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c"))
        return cpu::kNoInstructions;
    return linear::on_all_cores<Avx2>(linear::Problem(tensors, numbers));
}
