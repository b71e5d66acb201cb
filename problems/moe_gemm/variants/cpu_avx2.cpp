// The experts with AVX2 and FMA: a block's weights in 8 registers, or read where they have been decoded to.
#include <immintrin.h>

#define WIDE __attribute__((target("avx2,fma,f16c")))

#include "cpu_cores.h"

namespace {

struct Avx2 {
    static constexpr int kLanes = 8, kTokens = 8, kTogether = 2;
    using Value = int16_t;

    // Pairs of k: 0 4, 1 5, 2 6, 3 7, then those 8 higher.
    struct Weights {
        __m256i pairs[8];
    };

    WIDE static ALWAYS __m256 all(float x) { return _mm256_set1_ps(x); }
    WIDE static ALWAYS __m256 fma(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }

    WIDE static ALWAYS void store(const __m256 (&v)[2], int16_t* to) {
        const __m256i mixed = _mm256_packs_epi32(_mm256_cvtps_epi32(v[0]), _mm256_cvtps_epi32(v[1]));
        const __m256i words = _mm256_permute4x64_epi64(mixed, 0b11011000);  // packing had worked in halves
        const __m256i order = _mm256_broadcastsi128_si256(
            _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_shuffle_epi8(words, order));
    }

    // A code moves into the lower half of the upper byte of its 16 bits, and is looked up there.
    WIDE static ALWAYS Weights decode(const uint8_t* codes, int part) {
        Weights w;
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const uint8_t* from = codes + 64 * half + 32 * part;
            const __m256i eight = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
            w.pairs[4 * half] = doubled(_mm256_slli_epi16(eight, 8));
            w.pairs[4 * half + 1] = doubled(_mm256_slli_epi16(eight, 4));
            w.pairs[4 * half + 2] = doubled(eight);
            w.pairs[4 * half + 3] = doubled(_mm256_srli_epi16(eight, 4));
        }
        return w;
    }

    WIDE static ALWAYS __m256 scales(const uint8_t* bytes) {
        const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes));
        return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(codes), 7));
    }

    template <int N>
    WIDE static ALWAYS void dot(const Weights& w, const int16_t* x, __m256 (&to)[N]) {
        __m256i sum[N];
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            for (int n = 0; n < N; n++) {
                int32_t pair;
                __builtin_memcpy(&pair, x + n * moe::kBlock + 2 * i, sizeof pair);
                const __m256i products = _mm256_madd_epi16(w.pairs[i], _mm256_set1_epi32(pair));
                sum[n] = i == 0 ? products : _mm256_add_epi32(sum[n], products);
            }
        }
        for (int n = 0; n < N; n++) to[n] = _mm256_cvtepi32_ps(sum[n]);
    }

  private:
    WIDE static ALWAYS __m256i doubled(__m256i codes) {
        const __m256i table = _mm256_broadcastsi128_si256(
            _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
        return _mm256_shuffle_epi8(table, _mm256_and_si256(codes, _mm256_set1_epi16(0x0F00)));
    }
};

}  // namespace

extern "C" int launch(void* const* tensors, const int64_t* sizes) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c"))
        return cpu::kNoInstructions;
    return moe::on_all_cores<Avx2>(moe::Problem(tensors, sizes));
}
