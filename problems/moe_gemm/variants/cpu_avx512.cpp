// The experts with AVX-512 and VNNI: a panel's 16 sums and a block's weights in registers.
#pragma GCC diagnostic ignored "-Wuninitialized"  // g++ 12's own AVX-512 header, wherever it means "any value"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#define WIDE __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni,f16c,fma")))

#include "cpu_cores.h"

namespace {

struct Avx512 {
    static constexpr int kLanes = 16, kTokens = 16, kTogether = 4;
    using Value = int16_t;

    // Pairs of k: 0 4, 1 5, 2 6, 3 7, then those 8 higher.
    struct Weights {
        __m512i pairs[8];
    };

    WIDE static ALWAYS __m512 all(float x) { return _mm512_set1_ps(x); }
    WIDE static ALWAYS __m512 fma(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }

    WIDE static ALWAYS void store(const __m512 (&v)[1], int16_t* to) {
        const __m256i words = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(v[0]));
        const __m256i order = _mm256_broadcastsi128_si256(
            _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_shuffle_epi8(words, order));
    }

    // A code moves into the lower half of the upper byte of its 16 bits, and is looked up there.
    WIDE static ALWAYS Weights decode(const uint8_t* codes, int) {
        Weights w;
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const __m512i eight = _mm512_loadu_si512(codes + 64 * half);
            w.pairs[4 * half] = doubled(_mm512_slli_epi16(eight, 8));
            w.pairs[4 * half + 1] = doubled(_mm512_slli_epi16(eight, 4));
            w.pairs[4 * half + 2] = doubled(eight);
            w.pairs[4 * half + 3] = doubled(_mm512_srli_epi16(eight, 4));
        }
        return w;
    }

    WIDE static ALWAYS __m512 scales(const uint8_t* bytes) {
        const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
        return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 7));
    }

    template <int N>
    WIDE static ALWAYS void dot(const Weights& w, const int16_t* x, __m512 (&to)[N]) {
        __m512i sum[N];
        for (int n = 0; n < N; n++) sum[n] = _mm512_setzero_si512();
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            for (int n = 0; n < N; n++) {
                int32_t pair;
                __builtin_memcpy(&pair, x + n * moe::kBlock + 2 * i, sizeof pair);
                sum[n] = _mm512_dpwssd_epi32(sum[n], w.pairs[i], _mm512_set1_epi32(pair));
            }
        }
        for (int n = 0; n < N; n++) to[n] = _mm512_cvtepi32_ps(sum[n]);
    }

  private:
    WIDE static ALWAYS __m512i doubled(__m512i codes) {
        const __m512i table = _mm512_broadcast_i32x4(
            _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
        return _mm512_shuffle_epi8(table, _mm512_and_si512(codes, _mm512_set1_epi16(0x0F00)));
    }
};

}  // namespace

extern "C" int launch(void* const* tensors, const int64_t* sizes) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl") ||
        !__builtin_cpu_supports("avx512vnni"))
        return cpu::kNoInstructions;
    return moe::on_all_cores<Avx512>(moe::Problem(tensors, sizes));
}
