// Attention with AVX-512: 16 registers of sums for scores, and for results.
#pragma GCC diagnostic ignored "-Wuninitialized"  // g++ 12's own AVX-512 header, wherever it means "any value"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#define WIDE __attribute__((target("avx512f,avx512bw,avx512vl,f16c,fma")))

#include "cpu_cores.h"

namespace {

struct Avx512 {
    static constexpr int kLanes = 16, kEntries = 8, kHeads = 8, kVectors = 2;

    WIDE static ALWAYS __m512 all(float x) { return _mm512_set1_ps(x); }
    WIDE static ALWAYS __m512 fma(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }

    // 32 codes: their fields fall on those of fp16, whose bias is 8 more: 2^-8 of the value, subnormal ones too.
    WIDE static ALWAYS void e4m3(const uint8_t* from, uint8_t scale, float* low, float* high) {
        const __m512 factor = _mm512_castsi512_ps(_mm512_set1_epi32((scale + 8) << 23));
        const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        const __m512i words = _mm512_slli_epi16(_mm512_cvtepi8_epi16(codes), 7);
        const __m512i halves = _mm512_and_si512(words, _mm512_set1_epi16(static_cast<int16_t>(0xBFFF)));
        _mm512_storeu_ps(low, _mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(halves)), factor));
        _mm512_storeu_ps(high, _mm512_mul_ps(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)), factor));
    }

    WIDE static ALWAYS void bf16(const uint8_t* from, float* to) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        _mm512_storeu_si512(to, _mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    }
};

}  // namespace

extern "C" int launch(void* const* tensors, const int64_t* sizes) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl")) return cpu::kNoInstructions;
    return fmha::on_all_cores<Avx512>(fmha::Problem(tensors, sizes));
}
