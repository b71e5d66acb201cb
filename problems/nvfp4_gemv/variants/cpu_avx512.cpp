// c = A b with AVX-512 and VNNI: 256 weights a step, every 16-block an exact integer dot product.
//
// Doubled and moved up by 12, a code of A is an unsigned byte 0..24; a doubled code of b is a signed byte -12..12; so
// vpdpbusd adds four products to an int32 exactly. What the move added, 12 * sum(b), is taken out of each block's sum.
#pragma GCC diagnostic ignored "-Wuninitialized"  // g++ 12's own AVX-512 header, wherever it means "any value"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include "cpu_rows.h"

#define WIDE __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni,f16c")))

namespace {

constexpr int64_t kStep = 256;    // weights a step: 128 bytes of codes, 16 scales, one fp32 lane a block
constexpr int64_t kAhead = 2048;  // bytes of codes to fetch ahead: the hardware's own fetching stops at each page's end
constexpr int kTogether = 2;      // runs of rows side by side: two sequences of misses in flight, one read of b

// Codes of A and b are both doubled, and a half made of an e4m3 byte by a shift is 2^-8 of it, on both sides too.
constexpr float kUnit = 65536.0f / 4.0f;

// What a step needs of b: 24 KiB in all at k = 16384, to stay in a first-level cache of 32. The lanes of a step hold
// blocks 0 1 8 9, 2 3 10 11, 4 5 12 13, 6 7 14 15.
struct alignas(64) Chunk {
    int8_t even[2][64], odd[2][64];  // doubled codes of the low and the high nibbles
    int32_t start[16];               // -12 * the sum of the lane's block
    float scale[16];                 // scale of the lane's block, times kUnit / 2^8
};

WIDE inline __m512i low_nibbles(__m512i codes) { return _mm512_and_si512(codes, _mm512_set1_epi8(15)); }
WIDE inline __m512i high_nibbles(__m512i codes) { return low_nibbles(_mm512_srli_epi16(codes, 4)); }

// 16 e4m3 bytes in the order of the lanes, as fp32 times 2^-8: the fields fall on those of fp16, whose bias is 8 more.
WIDE inline __m512 scale_lanes(__m128i bytes) {
    const __m256i to_words = _mm256_setr_epi8(0, -1, 1, -1, 8, -1, 9, -1, 2, -1, 3, -1, 10, -1, 11, -1,  //
                                              4, -1, 5, -1, 12, -1, 13, -1, 6, -1, 7, -1, 14, -1, 15, -1);
    const __m256i words = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(bytes), to_words);
    return _mm512_cvtph_ps(_mm256_slli_epi16(words, 7));
}

// Sums of the products of 64 bytes of codes, two int32 a block.
WIDE inline __m512i half_dots(__m512i low, __m512i high, const int8_t* even, const int8_t* odd) {
    const __m512i sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), low, _mm512_load_si512(even));
    return _mm512_dpbusd_epi32(sums, high, _mm512_load_si512(odd));
}

// Add halves up: 16 int32, one a block, in the order of the lanes.
WIDE inline __m512i block_sums(__m512i halves0, __m512i halves1) {
    const __m512 h0 = _mm512_castsi512_ps(halves0), h1 = _mm512_castsi512_ps(halves1);
    return _mm512_add_epi32(_mm512_castps_si512(_mm512_shuffle_ps(h0, h1, 0x88)),
                            _mm512_castps_si512(_mm512_shuffle_ps(h0, h1, 0xDD)));
}

WIDE inline __m512 step(__m512 sum, __m512i codes0, __m512i codes1, __m128i scales, const Chunk& b) {
    const __m512i raised = _mm512_broadcast_i32x4(
        _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    const __m512i h0 = half_dots(_mm512_shuffle_epi8(raised, low_nibbles(codes0)),
                                 _mm512_shuffle_epi8(raised, high_nibbles(codes0)), b.even[0], b.odd[0]);
    const __m512i h1 = half_dots(_mm512_shuffle_epi8(raised, low_nibbles(codes1)),
                                 _mm512_shuffle_epi8(raised, high_nibbles(codes1)), b.even[1], b.odd[1]);
    const __m512i dots = _mm512_add_epi32(block_sums(h0, h1), _mm512_load_si512(b.start));
    const __m512 scale = _mm512_mul_ps(scale_lanes(scales), _mm512_load_ps(b.scale));  // exact: 8 significant bits
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots), scale, sum);
}

// The first `bytes` of a 64-byte vector, zeros behind them; nothing else is read.
WIDE inline __m512i load_part(const uint8_t* p, int64_t bytes) {
    const int64_t n = std::clamp<int64_t>(bytes, 0, 64);
    return _mm512_maskz_loadu_epi8(n == 64 ? ~0ull : (1ull << n) - 1, p);
}

WIDE inline __m128i load_part_scales(const uint8_t* p, int64_t bytes) {
    const int64_t n = std::clamp<int64_t>(bytes, 0, 16);
    return _mm_maskz_loadu_epi8(static_cast<uint16_t>((1u << n) - 1), p);
}

class Worker {
  public:
    explicit Worker(const gemv::Problem& p) : p_(p), chunks_((p.k + kStep - 1) / kStep) {}

    // Decode this batch's vector; zeros behind its end make the last step's missing codes count nothing.
    WIDE void batch(int64_t i) {
        const __m512i doubled = _mm512_broadcast_i32x4(
            _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
        const __m512i twelve = _mm512_set1_epi8(12);
        const uint8_t *codes = p_.vector(i), *scales = p_.vector_scales(i);
        for (int64_t at = 0, left = p_.k / 2; left > 0; at++, left -= kStep / 2) {
            Chunk& chunk = chunks_[at];
            __m512i raised[2];
            for (int half = 0; half < 2; half++) {
                const __m512i pairs = load_part(codes + at * kStep / 2 + half * 64, left - half * 64);
                _mm512_store_si512(chunk.even[half], _mm512_shuffle_epi8(doubled, low_nibbles(pairs)));
                _mm512_store_si512(chunk.odd[half], _mm512_shuffle_epi8(doubled, high_nibbles(pairs)));
                raised[half] = half_dots(twelve, twelve, chunk.even[half], chunk.odd[half]);
            }
            _mm512_store_si512(chunk.start, _mm512_sub_epi32(_mm512_setzero_si512(), block_sums(raised[0], raised[1])));
            const __m512 scale = scale_lanes(load_part_scales(scales + at * kStep / 16, left / 8));
            _mm512_store_ps(chunk.scale, _mm512_mul_ps(scale, _mm512_set1_ps(kUnit)));
        }
    }

    // The rows go in kTogether runs side by side, each from its start to its end in memory order.
    WIDE void rows(const gemv::Rows& r) {
        const int64_t run = r.count / kTogether;
        for (int64_t i = 0; i < run; i++) some_rows<kTogether>(r, i, run);
        for (int64_t i = run * kTogether; i < r.count; i++) some_rows<1>(r, i, 0);
    }

  private:
    // Rows first, first + apart, ...: N of them.
    template <int N>
    WIDE void some_rows(const gemv::Rows& r, int64_t first, int64_t apart) {
        const uint8_t *codes[N], *scales[N];
        __m512 sum[N];
        for (int n = 0; n < N; n++) {
            codes[n] = r.codes + (first + n * apart) * (r.k / 2);
            scales[n] = r.scales + (first + n * apart) * (r.k / 16);
            sum[n] = _mm512_setzero_ps();
        }
        const Chunk *chunk = chunks_.data(), *end = chunk + r.k / kStep;
        for (; chunk != end; chunk++) {
            for (int n = 0; n < N; n++) {
                _mm_prefetch(reinterpret_cast<const char*>(codes[n] + kAhead), _MM_HINT_T0);
                _mm_prefetch(reinterpret_cast<const char*>(codes[n] + kAhead + 64), _MM_HINT_T0);
                _mm_prefetch(reinterpret_cast<const char*>(scales[n] + kAhead / 8), _MM_HINT_T0);
                sum[n] = step(sum[n], _mm512_loadu_si512(codes[n]), _mm512_loadu_si512(codes[n] + 64),
                              _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales[n])), *chunk);
                codes[n] += kStep / 2, scales[n] += kStep / 16;
            }
        }
        if (const int64_t left = r.k % kStep / 2; left > 0) {
            for (int n = 0; n < N; n++)
                sum[n] = step(sum[n], load_part(codes[n], left), load_part(codes[n] + 64, left - 64),
                              load_part_scales(scales[n], left / 8), *chunk);
        }
        for (int n = 0; n < N; n++)
            r.c[first + n * apart] = _cvtss_sh(_mm512_reduce_add_ps(sum[n]), _MM_FROUND_TO_NEAREST_INT);
    }

    const gemv::Problem& p_;
    std::vector<Chunk> chunks_;
};

}  // namespace

extern "C" int launch(const uint8_t* a, const uint8_t* b, const uint8_t* sfa, const uint8_t* sfb, uint16_t* c,
                      int64_t m, int64_t k, int64_t l) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl") ||
        !__builtin_cpu_supports("avx512vnni"))
        return cpu::kNoInstructions;
    return gemv::on_all_cores<Worker>({a, b, sfa, sfb, c, m, k, l});
}
