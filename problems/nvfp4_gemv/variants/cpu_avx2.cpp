// c = A b with AVX2: 128 weights a step, every 16-block an exact integer dot product.
//
// Doubled and moved up by 12, a code of A is an unsigned byte 0..24; a doubled code of b is a signed byte -12..12; so
// vpmaddubsw adds two products to an int16 exactly, and a block's 16 stay under 2^13. What the move added, 12 * sum(b),
// is taken out of each block's sum.
#include <immintrin.h>

#include <cstring>

#include "cpu_rows.h"

#define WIDE __attribute__((target("avx2,fma,f16c")))

namespace {

constexpr int64_t kStep = 128;    // weights a step: 64 bytes of codes, 8 scales, one fp32 lane a block
constexpr int64_t kAhead = 2048;  // bytes of codes to fetch ahead: the hardware's own fetching stops at each page's end
constexpr int kTogether = 2;      // runs of rows side by side: two sequences of misses in flight, one read of b

// Codes of A and b are both doubled, and a half made of an e4m3 byte by a shift is 2^-8 of it, on both sides too.
constexpr float kUnit = 65536.0f / 4.0f;

// What a step needs of b: 24 KiB in all at k = 16384, to stay in a first-level cache of 32. The lanes of a step hold
// blocks 0 1 4 5, 2 3 6 7.
struct alignas(32) Chunk {
    int8_t even[2][32], odd[2][32];  // doubled codes of the low and the high nibbles
    int32_t start[8];                // -12 * the sum of the lane's block
    float scale[8];                  // scale of the lane's block, times kUnit / 2^8
};

WIDE inline __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
WIDE inline void store(void* p, __m256i v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
WIDE inline __m256i low_nibbles(__m256i codes) { return _mm256_and_si256(codes, _mm256_set1_epi8(15)); }
WIDE inline __m256i high_nibbles(__m256i codes) { return low_nibbles(_mm256_srli_epi16(codes, 4)); }

// 8 e4m3 bytes in the order of the lanes, as fp32 times 2^-8: the fields fall on those of fp16, whose bias is 8 more.
WIDE inline __m256 scale_lanes(const uint8_t* p) {
    const __m128i to_words = _mm_setr_epi8(0, -1, 1, -1, 4, -1, 5, -1, 2, -1, 3, -1, 6, -1, 7, -1);
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return _mm256_cvtph_ps(_mm_slli_epi16(_mm_shuffle_epi8(bytes, to_words), 7));
}

// Sums of the products of 32 bytes of codes, four int16 a block.
WIDE inline __m256i quarter_dots(__m256i low, __m256i high, const int8_t* even, const int8_t* odd) {
    return _mm256_add_epi16(_mm256_maddubs_epi16(low, load(even)), _mm256_maddubs_epi16(high, load(odd)));
}

// Add quarters up: 8 int32, one a block, in the order of the lanes.
WIDE inline __m256i block_sums(__m256i quarters0, __m256i quarters1) {
    return _mm256_madd_epi16(_mm256_hadd_epi16(quarters0, quarters1), _mm256_set1_epi16(1));
}

WIDE inline __m256 step(__m256 sum, const uint8_t* codes, const uint8_t* scales, const Chunk& b) {
    const __m256i raised = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    const __m256i codes0 = load(codes), codes1 = load(codes + 32);
    const __m256i q0 = quarter_dots(_mm256_shuffle_epi8(raised, low_nibbles(codes0)),
                                    _mm256_shuffle_epi8(raised, high_nibbles(codes0)), b.even[0], b.odd[0]);
    const __m256i q1 = quarter_dots(_mm256_shuffle_epi8(raised, low_nibbles(codes1)),
                                    _mm256_shuffle_epi8(raised, high_nibbles(codes1)), b.even[1], b.odd[1]);
    const __m256i dots = _mm256_add_epi32(block_sums(q0, q1), load(b.start));
    const __m256 scale = _mm256_mul_ps(scale_lanes(scales), _mm256_loadu_ps(b.scale));  // exact: 8 significant bits
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots), scale, sum);
}

WIDE inline float total(__m256 v) {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

// The half step that ends a row where k is an odd multiple of 64, with zeros behind it.
struct Tail {
    uint8_t codes[kStep / 2] = {}, scales[kStep / 16] = {};

    Tail(const uint8_t* from_codes, const uint8_t* from_scales) {
        std::memcpy(codes, from_codes, kStep / 4);
        std::memcpy(scales, from_scales, kStep / 32);
    }
};

class Worker {
  public:
    explicit Worker(const gemv::Problem& p) : p_(p), chunks_((p.k + kStep - 1) / kStep) {}

    // Decode this batch's vector.
    void batch(int64_t i) {
        const uint8_t *codes = p_.vector(i), *scales = p_.vector_scales(i);
        const int64_t full = p_.k / kStep;
        for (int64_t at = 0; at < full; at++) decode(chunks_[at], codes + at * kStep / 2, scales + at * kStep / 16);
        if (p_.k % kStep) {
            const Tail tail(codes + full * kStep / 2, scales + full * kStep / 16);
            decode(chunks_[full], tail.codes, tail.scales);
        }
    }

    // The rows go in kTogether runs side by side, each from its start to its end in memory order.
    void rows(const gemv::Rows& r) {
        const int64_t run = r.count / kTogether;
        for (int64_t i = 0; i < run; i++) some_rows<kTogether>(r, i, run);
        for (int64_t i = run * kTogether; i < r.count; i++) some_rows<1>(r, i, 0);
    }

  private:
    WIDE static void decode(Chunk& chunk, const uint8_t* codes, const uint8_t* scales) {
        const __m256i doubled = _mm256_broadcastsi128_si256(
            _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
        const __m256i twelve = _mm256_set1_epi8(12);
        __m256i raised[2];
        for (int half = 0; half < 2; half++) {
            const __m256i pairs = load(codes + half * 32);
            store(chunk.even[half], _mm256_shuffle_epi8(doubled, low_nibbles(pairs)));
            store(chunk.odd[half], _mm256_shuffle_epi8(doubled, high_nibbles(pairs)));
            raised[half] = quarter_dots(twelve, twelve, chunk.even[half], chunk.odd[half]);
        }
        store(chunk.start, _mm256_sub_epi32(_mm256_setzero_si256(), block_sums(raised[0], raised[1])));
        _mm256_storeu_ps(chunk.scale, _mm256_mul_ps(scale_lanes(scales), _mm256_set1_ps(kUnit)));
    }

    // Rows first, first + apart, ...: N of them.
    template <int N>
    WIDE void some_rows(const gemv::Rows& r, int64_t first, int64_t apart) {
        const uint8_t *codes[N], *scales[N];
        __m256 sum[N];
        for (int n = 0; n < N; n++) {
            codes[n] = r.codes + (first + n * apart) * (r.k / 2);
            scales[n] = r.scales + (first + n * apart) * (r.k / 16);
            sum[n] = _mm256_setzero_ps();
        }
        const Chunk *chunk = chunks_.data(), *end = chunk + r.k / kStep;
#pragma GCC unroll 2
        for (; chunk != end; chunk++) {
            for (int n = 0; n < N; n++) {
                _mm_prefetch(reinterpret_cast<const char*>(codes[n] + kAhead), _MM_HINT_T0);
                _mm_prefetch(reinterpret_cast<const char*>(scales[n] + kAhead / 8), _MM_HINT_T0);
                sum[n] = step(sum[n], codes[n], scales[n], *chunk);
                codes[n] += kStep / 2, scales[n] += kStep / 16;
            }
        }
        for (int n = 0; n < N; n++) {
            if (r.k % kStep) {
                const Tail tail(codes[n], scales[n]);
                sum[n] = step(sum[n], tail.codes, tail.scales, *chunk);
            }
            r.c[first + n * apart] = _cvtss_sh(total(sum[n]), _MM_FROUND_TO_NEAREST_INT);
        }
    }

    const gemv::Problem& p_;
    std::vector<Chunk> chunks_;
};

}  // namespace

extern "C" int launch(const uint8_t* a, const uint8_t* b, const uint8_t* sfa, const uint8_t* sfb, uint16_t* c,
                      int64_t m, int64_t k, int64_t l) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c"))
        return cpu::kNoInstructions;
    return gemv::on_all_cores<Worker>({a, b, sfa, sfb, c, m, k, l});
}
