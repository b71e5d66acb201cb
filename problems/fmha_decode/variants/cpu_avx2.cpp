// Attention with AVX2 and FMA: 12 registers of sums for scores, 8 for results.
#include <immintrin.h>

#define WIDE __attribute__((target("avx2,fma,f16c")))

#include "cpu_cores.h"

namespace {

struct Avx2 {
    static constexpr int kLanes = 8, kEntries = 6, kHeads = 4, kVectors = 2;

    WIDE static ALWAYS __m256 all(float x) { return _mm256_set1_ps(x); }
    WIDE static ALWAYS __m256 fma(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }

    // 16 codes: their fields fall on those of fp16, whose bias is 8 more: 2^-8 of the value, subnormal ones too.
    WIDE static ALWAYS void e4m3(const uint8_t* from, uint8_t scale, float* low, float* high) {
        const __m256 factor = _mm256_castsi256_ps(_mm256_set1_epi32((scale + 8) << 23));
        const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
        const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);
        const __m256i halves = _mm256_and_si256(words, _mm256_set1_epi16(static_cast<int16_t>(0xBFFF)));
        _mm256_storeu_ps(low, _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), factor));
        _mm256_storeu_ps(high, _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)), factor));
    }

    WIDE static ALWAYS void bf16(const uint8_t* from, float* to) {
        const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
        const __m256i words = _mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
        _mm256_storeu_ps(to, _mm256_castsi256_ps(words));
    }
};

}  // namespace

extern "C" int launch(void* const* tensors, const int64_t* sizes) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c"))
        return cpu::kNoInstructions;
    return fmha::on_all_cores<Avx2>(fmha::Problem(tensors, sizes));
}
