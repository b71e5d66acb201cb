// Scores and top k with AVX-512: 16 keys are decoded at a time, a lane each, by a permutation that is the table of e2m1.
#include <immintrin.h>

#define WIDE __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))

#include "cpu_cores.h"

namespace {

struct Avx512 {
    static constexpr int kLanes = 16, kHeads = 4, kVectors = 4;

    WIDE static ALWAYS __m512 all(float x) { return _mm512_set1_ps(x); }
    WIDE static ALWAYS __m512 fma(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }

    WIDE static ALWAYS void decode(const uint8_t* codes, const uint8_t* scales, bool fp8, float* to) {
        if (fp8) e4m3(codes, scales, to);
        else e2m1(codes, scales, to);
    }

  private:
    // Word j of 16 keys that lie `bytes` apart.
    WIDE static ALWAYS __m512i words(const uint8_t* codes, int bytes, int64_t j) {
        const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        return _mm512_i32gather_epi32(_mm512_mullo_epi32(lane, _mm512_set1_epi32(bytes)), codes + 4 * j, 1);
    }

    WIDE static ALWAYS void e2m1(const uint8_t* codes, const uint8_t* scales, float* to) {
        using namespace indexer;
        const __m512 table = _mm512_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6);
        const __m512i bytes = _mm512_loadu_si512(scales);
        for (int64_t j = 0; j < kDim / 8; j++) {
            const __m512i byte = _mm512_srl_epi32(bytes, _mm_cvtsi64_si128(8 * (j / 4)));
            const __m512i exponent = _mm512_slli_epi32(_mm512_and_si512(byte, _mm512_set1_epi32(255)), 23);
            const __m512 scale = _mm512_castsi512_ps(exponent);
            __m512i word = words(codes, kDim / 2, j);
            for (int64_t d = 8 * j; d < 8 * j + 8; d++, word = _mm512_srli_epi32(word, 4))
                _mm512_storeu_ps(to + d * kTile, _mm512_mul_ps(_mm512_permutexvar_ps(word, table), scale));
        }
    }

    // The fields of a code fall on those of fp16, whose bias is 8 more: 2^-8 of the value, subnormal ones too.
    WIDE static ALWAYS void e4m3(const uint8_t* codes, const uint8_t* scales, float* to) {
        using namespace indexer;
        const __m512 scale = _mm512_mul_ps(_mm512_loadu_ps(scales), _mm512_set1_ps(256));
        for (int64_t j = 0; j < kDim / 4; j++) {
            __m512i word = words(codes, kDim, j);
            for (int64_t d = 4 * j; d < 4 * j + 4; d++, word = _mm512_srli_epi32(word, 8)) {
                const __m512i sign = _mm512_slli_epi32(_mm512_and_si512(word, _mm512_set1_epi32(0x80)), 8);
                const __m512i size = _mm512_slli_epi32(_mm512_and_si512(word, _mm512_set1_epi32(0x7F)), 7);
                const __m256i half = _mm512_cvtepi32_epi16(_mm512_or_si512(sign, size));
                _mm512_storeu_ps(to + d * kTile, _mm512_mul_ps(_mm512_cvtph_ps(half), scale));
            }
        }
    }
};

}  // namespace

extern "C" int launch(void* const* tensors, const int64_t* sizes) {
    __builtin_cpu_init();
    for (const bool has : {__builtin_cpu_supports("avx512f"), __builtin_cpu_supports("avx512bw"),
                           __builtin_cpu_supports("avx512vl"), __builtin_cpu_supports("avx512dq")})
        if (!has) return cpu::kNoInstructions;
    return indexer::on_all_cores<Avx512>(indexer::Problem(tensors, sizes));
}
