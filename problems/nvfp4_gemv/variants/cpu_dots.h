// c = A b in whole vectors: 16 kLanes weights a step, every 16-block an exact integer dot product.
//
// Doubled and moved up by 12, a code of A is an unsigned byte 0..24; a doubled code of b is a signed byte -12..12; so
// products of such bytes add up exactly. What the move added, 12 * sum(b), is taken out of each block's sum.
#pragma once

#include "cpu_rows.h"
#include "cpu_vectors.h"

namespace gemv {

using namespace cpu;

constexpr int64_t kStep = 16 * kLanes;  // weights a step: two vectors of codes, a scale for each lane
constexpr int64_t kAhead = 2048;  // bytes of codes to fetch ahead: the hardware's own fetching stops at each page's end
constexpr int kTogether = 2;      // runs of rows side by side: two sequences of misses in flight, one read of b

// Codes of A and b are both doubled, and of the scales of both there is kE4m3.
constexpr float kUnit = 1 / (4 * kE4m3 * kE4m3);

// What a step needs of b: 24 KiB in all at k = 16384, to stay in a first-level cache of 32. Lanes are blocks, in the
// order of block_sums.
struct Chunk {
    B even[2], odd[2];  // doubled codes of the low and the high nibbles
    I start;            // -12 * the sum of the lane's block
    F scale;            // scale of the lane's block, times kUnit
};

// Of the products of a vector of codes: sums of a half of a block, added up later to a block's. a: unsigned bytes.
#ifdef __AVX512VNNI__
typedef I Sums;
ALWAYS Sums sums(B a_low, B a_high, B even, B odd) {
    const __m512i sums = _mm512_dpbusd_epi32(__m512i{}, (__m512i)a_low, (__m512i)even);
    return (Sums)_mm512_dpbusd_epi32(sums, (__m512i)a_high, (__m512i)odd);
}
ALWAYS I wide(Sums sums) { return sums; }
#else
typedef W Sums;
ALWAYS Sums sums(B a_low, B a_high, B even, B odd) {
    const __m256i lows = _mm256_maddubs_epi16((__m256i)a_low, (__m256i)even);
    return (Sums)lows + (Sums)_mm256_maddubs_epi16((__m256i)a_high, (__m256i)odd);
}
ALWAYS I wide(Sums sums) { return dot(I{}, sums, W{} + 1); }
#endif

// The sums of the blocks of two vectors. Each four lanes have two blocks of the first, then two of the second.
template <int... i>
ALWAYS I block_sums(Sums first, Sums second, std::integer_sequence<int, i...>) {
    // g++ knows the shuffle within four lanes of fp32 only.
    const F even = __builtin_shuffle((F)first, (F)second, I{(i & ~3) + (i & 1) * 2 + (i & 2 ? kLanes : 0)...});
    const F odd = __builtin_shuffle((F)first, (F)second, I{(i & ~3) + (i & 1) * 2 + (i & 2 ? kLanes : 0) + 1 ...});
    return wide((Sums)even + (Sums)odd);
}

// kLanes e4m3, none of them negative, in the order of block_sums; times kE4m3.
template <int... i>
ALWAYS F scales_of(const uint8_t* codes, std::integer_sequence<int, i...>) {
    const H order = {(0xFF00 | ((i & ~3) / 2 + (i & 1) + (i & 2 ? kLanes / 2 : 0)))...};  // of bytes; 0xFF makes a zero
#ifdef __AVX512VNNI__
    const H words = (H)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load<__m128i>(codes)), (__m256i)order);
#else
    const H words = (H)_mm_shuffle_epi8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)), (__m128i)order);
#endif
    return from_fp16(words << 7);
}

ALWAYS B low_nibbles(B codes) { return codes & 15; }
ALWAYS B high_nibbles(B codes) { return (B)((W)codes >> 4) & 15; }

ALWAYS F step(F sum, const uint8_t* codes, const uint8_t* scales, const Chunk& b) {
    const __m128i raised = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
    Sums found[2];
    for (int i = 0; i < 2; i++) {
        const B pairs = load<B>(codes + i * sizeof(B));
        found[i] = sums(lookup(low_nibbles(pairs), raised), lookup(high_nibbles(pairs), raised), b.even[i], b.odd[i]);
    }
    const I dots = block_sums(found[0], found[1], Lanes()) + b.start;
    const F scale = scales_of(scales, Lanes()) * b.scale;  // exact: 8 significant bits
    return fma(__builtin_convertvector(dots, F), scale, sum);
}

// The part of a step that ends a row where kStep does not divide k, with zeros behind it.
struct Tail {
    uint8_t codes[kStep / 2] = {}, scales[kStep / 16] = {};

    Tail(const uint8_t* from_codes, const uint8_t* from_scales, int64_t weights) {
        std::memcpy(codes, from_codes, weights / 2);
        std::memcpy(scales, from_scales, weights / 16);
    }
};

class Worker {
  public:
    explicit Worker(const Problem& p) : p_(p), chunks_((p.k + kStep - 1) / kStep) {}

    // Decode this batch's vector.
    void batch(int64_t i) {
        const uint8_t *codes = p_.vector(i), *scales = p_.vector_scales(i);
        const int64_t full = p_.k / kStep;
        for (int64_t at = 0; at < full; at++) decode(chunks_[at], codes + at * kStep / 2, scales + at * kStep / 16);
        if (p_.k % kStep) {
            const Tail tail(codes + full * kStep / 2, scales + full * kStep / 16, p_.k % kStep);
            decode(chunks_[full], tail.codes, tail.scales);
        }
    }

    // The rows go in kTogether runs side by side, each from its start to its end in memory order.
    void rows(const Rows& r) {
        const int64_t run = r.count / kTogether;
        for (int64_t i = 0; i < run; i++) some_rows<kTogether>(r, i, run);
        for (int64_t i = run * kTogether; i < r.count; i++) some_rows<1>(r, i, 0);
    }

  private:
    static void decode(Chunk& chunk, const uint8_t* codes, const uint8_t* scales) {
        const __m128i doubled = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
        const B twelve = B{} + 12;
        Sums raised[2];
        for (int half = 0; half < 2; half++) {
            const B pairs = load<B>(codes + half * sizeof(B));
            chunk.even[half] = lookup(low_nibbles(pairs), doubled);
            chunk.odd[half] = lookup(high_nibbles(pairs), doubled);
            raised[half] = sums(twelve, twelve, chunk.even[half], chunk.odd[half]);
        }
        chunk.start = -block_sums(raised[0], raised[1], Lanes());
        chunk.scale = scales_of(scales, Lanes()) * kUnit;
    }

    // Rows first, first + apart, ...: N of them.
    template <int N>
    void some_rows(const Rows& r, int64_t first, int64_t apart) {
        const uint8_t *codes[N], *scales[N];
        F sum[N] = {};
        for (int n = 0; n < N; n++) {
            codes[n] = r.codes + (first + n * apart) * (r.k / 2);
            scales[n] = r.scales + (first + n * apart) * (r.k / 16);
        }
        const Chunk *chunk = chunks_.data(), *end = chunk + r.k / kStep;
#pragma GCC unroll 2
        for (; chunk != end; chunk++) {
            for (int n = 0; n < N; n++) {
                for (int64_t at = 0; at < kStep / 2; at += 64) __builtin_prefetch(codes[n] + kAhead + at);
                __builtin_prefetch(scales[n] + kAhead / 8);
                sum[n] = step(sum[n], codes[n], scales[n], *chunk);
                codes[n] += kStep / 2, scales[n] += kStep / 16;
            }
        }
        for (int n = 0; n < N; n++) {
            if (r.k % kStep) {
                const Tail tail(codes[n], scales[n], r.k % kStep);
                sum[n] = step(sum[n], tail.codes, tail.scales, *chunk);
            }
            r.c[first + n * apart] = _cvtss_sh(total(sum[n]), _MM_FROUND_TO_NEAREST_INT);
        }
    }

    const Problem& p_;
    std::vector<Chunk> chunks_;
};

}  // namespace gemv

extern "C" int launch(void* const* tensors, const int64_t* sizes) {
    return gemv::on_all_cores<gemv::Worker>(gemv::Problem(tensors, sizes));
}
