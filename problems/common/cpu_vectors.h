// The vectors of the CPU variants, and what GCC's arithmetic on vectors has no words for.
//
// A vector is as wide as the compiler may make it, which problems/common/cpu.py tells it by the variant's CPU_FLAGS:
// 16 fp32 with AVX-512 (F, BW, VL), 8 with AVX2 (and FMA, F16C), else 4. So one source serves a problem's variants.
#pragma once
#pragma GCC diagnostic ignored "-Wuninitialized"  // g++ 12's own AVX-512 header, wherever it means "any value"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wpsabi"  // of how vectors are passed: they are not, since all is inlined

#include <cstdint>
#include <cstring>
#include <utility>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#define ALWAYS inline __attribute__((always_inline))

namespace cpu {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

// One value a lane: fp32, int32, uint32; 16 bits, as of bf16. And signed words and bytes, two and four a lane.
typedef float F __attribute__((vector_size(4 * kLanes)));
typedef int32_t I __attribute__((vector_size(4 * kLanes)));
typedef uint32_t U __attribute__((vector_size(4 * kLanes)));
typedef uint16_t H __attribute__((vector_size(2 * kLanes)));
typedef int16_t W __attribute__((vector_size(4 * kLanes)));
typedef int8_t B __attribute__((vector_size(4 * kLanes)));

// What is best with vectors of 4, of 8 and of 16.
constexpr int by_width(int four, int eight, int sixteen) {
    return kLanes == 4 ? four : kLanes == 8 ? eight : sixteen;
}

template <class V>
ALWAYS V load(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}
template <class V>
ALWAYS void store(void* to, V v) {
    std::memcpy(to, &v, sizeof v);
}

ALWAYS F all(float x) { return x - F{}; }
ALWAYS F at_most(F x, F most) { return x < most ? x : most; }
ALWAYS F at_least(F x, F least) { return x > least ? x : least; }

// ---------------------------------------------------------------- by width

// fma(a, b, c)     a * b + c
// widen, narrow    16 bits a lane to 32, and back
// e4m3(codes)      kE4m3 times the values of kLanes codes, or of the lowest 8 bits of each lane
// e2m1(codes)      the values of kLanes codes, the lower half of a byte first, or of the lowest 4 bits of each lane
// e2m1_words(w)    512 times the values of the codes in bits 8 to 11 of words
// dot(sum, a, b)   sum + the products of each lane's two words
// and from AVX2 on
// from_fp16(v)     fp32
// lookup(i, table) the bytes of a table of 16
constexpr float kE4m3 = 1 / 256.0f;  // the fields of an e4m3 fall on those of fp16, whose bias is 8 more

#if defined(__AVX512F__)

ALWAYS F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
ALWAYS U widen(H v) { return (U)_mm512_cvtepu16_epi32((__m256i)v); }
ALWAYS H narrow(U v) { return (H)_mm512_cvtepi32_epi16((__m512i)v); }

ALWAYS F from_fp16(H v) { return _mm512_cvtph_ps((__m256i)v); }
ALWAYS F e4m3(const uint8_t* codes) {
    const H wide = (H)_mm256_cvtepi8_epi16(load<__m128i>(codes));  // the sign is in all upper bits
    return from_fp16((wide << 7) & 0xBFFF);
}
ALWAYS F e4m3(U codes) { return from_fp16(narrow((codes & 0x80) << 8 | (codes & 0x7F) << 7)); }

ALWAYS F e2m1(U codes) {
    const F values = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};
    return _mm512_permutexvar_ps((__m512i)codes, values);
}
ALWAYS F e2m1(const uint8_t* codes) {
    const __m128i pairs = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
    return e2m1((U)_mm512_cvtepu8_epi32(_mm_unpacklo_epi8(pairs, _mm_srli_epi16(pairs, 4))));
}

ALWAYS B lookup(B indices, __m128i table) {
    return (B)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), (__m512i)indices);
}
ALWAYS W e2m1_words(W codes) {
    const __m128i doubled = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    return (W)lookup((B)(codes & 0x0F00), doubled);
}
ALWAYS I dot(I sum, W a, W b) {
#ifdef __AVX512VNNI__
    return (I)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#else
    return sum + (I)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#endif
}

#elif defined(__AVX2__)

ALWAYS F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
ALWAYS U widen(H v) { return (U)_mm256_cvtepu16_epi32((__m128i)v); }
ALWAYS H narrow(U v) { return __builtin_convertvector(v, H); }

ALWAYS F from_fp16(H v) { return _mm256_cvtph_ps((__m128i)v); }
ALWAYS F e4m3(const uint8_t* codes) {
    const H wide = (H)_mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
    return from_fp16((wide << 7) & 0xBFFF);
}
ALWAYS F e4m3(U codes) { return from_fp16(narrow((codes & 0x80) << 8 | (codes & 0x7F) << 7)); }

ALWAYS F e2m1(U codes) {
    const F size = _mm256_permutevar8x32_ps(F{0, .5f, 1, 1.5f, 2, 3, 4, 6}, (__m256i)codes);
    return (F)((U)size | (codes << 28 & 0x80000000u));
}
ALWAYS F e2m1(const uint8_t* codes) {
    const __m128i pairs = _mm_cvtsi32_si128(load<int32_t>(codes));
    return e2m1((U)_mm256_cvtepu8_epi32(_mm_unpacklo_epi8(pairs, _mm_srli_epi16(pairs, 4))));
}

ALWAYS B lookup(B indices, __m128i table) {
    return (B)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)indices);
}
ALWAYS W e2m1_words(W codes) {
    const __m128i doubled = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    return (W)lookup((B)(codes & 0x0F00), doubled);
}
ALWAYS I dot(I sum, W a, W b) { return sum + (I)_mm256_madd_epi16((__m256i)a, (__m256i)b); }

#else

struct Formats {
    float e4m3[256], e2m1[256][2];  // of a byte

    constexpr Formats() : e4m3(), e2m1() {
        for (int code = 0; code < 256; code++) {
            const int exponent = code >> 3 & 15, fraction = code & 7;
            const float size = exponent ? (8 + fraction) << exponent : fraction << 1;
            e4m3[code] = kE4m3 / 1024 * (code & 128 ? -size : size);
        }
        const float sizes[8] = {0, .5f, 1, 1.5f, 2, 3, 4, 6};
        for (int i = 0; i < 512; i++) {
            const int code = i >> 1 >> 4 * (i & 1) & 15;
            e2m1[i >> 1][i & 1] = code & 8 ? -sizes[code & 7] : sizes[code];
        }
    }
};
constexpr Formats kFormats;

ALWAYS F fma(F a, F b, F c) { return a * b + c; }  // rounds twice
ALWAYS U widen(H v) { return __builtin_convertvector(v, U); }
ALWAYS H narrow(U v) { return __builtin_convertvector(v, H); }

ALWAYS F e4m3(const uint8_t* c) {
    return F{kFormats.e4m3[c[0]], kFormats.e4m3[c[1]], kFormats.e4m3[c[2]], kFormats.e4m3[c[3]]};
}
ALWAYS F e4m3(U codes) {
    const U c = codes & 255;
    return F{kFormats.e4m3[c[0]], kFormats.e4m3[c[1]], kFormats.e4m3[c[2]], kFormats.e4m3[c[3]]};
}

ALWAYS F e2m1(U codes) {
    const U c = codes & 15;
    return F{kFormats.e2m1[c[0]][0], kFormats.e2m1[c[1]][0], kFormats.e2m1[c[2]][0], kFormats.e2m1[c[3]][0]};
}
ALWAYS F e2m1(const uint8_t* c) {
    const float *first = kFormats.e2m1[c[0]], *second = kFormats.e2m1[c[1]];
    return F{first[0], first[1], second[0], second[1]};
}

ALWAYS W e2m1_words(W codes) {
    const W size = codes & 0x0700, sign = codes << 4 >> 15;
    // 0 1 2 3 4 5 6 7 become 0 1 2 3 4 6 8 12; a comparison that holds is -1.
    const W doubled = size - ((size > 0x0400) << 8) - ((size > 0x0500) << 8) + ((size > 0x0600) & 0x0300);
    return (doubled ^ sign) - sign;
}
ALWAYS I dot(I sum, W a, W b) {
#ifdef __SSE2__
    return sum + (I)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    return sum + ((I)a << 16 >> 16) * ((I)b << 16 >> 16) + ((I)a >> 16) * ((I)b >> 16);
#endif
}

#endif
// ---------------------------------------------------------------- for any width

ALWAYS F from_bf16(const uint16_t* from) { return (F)(widen(load<H>(from)) << 16); }

// x as bf16, ties to even, in the upper half of each lane's bits; the lower half means nothing.
ALWAYS U bf16_bits(F x) { return (U)x + 0x7FFF + ((U)x >> 16 & 1); }
ALWAYS F round_bf16(F x) { return (F)(bf16_bits(x) & 0xFFFF0000u); }
ALWAYS void store_bf16(uint16_t* to, F x) { store(to, narrow(bf16_bits(x) >> 16)); }

// 2^t for -126 < t < 127.
ALWAYS F exp2(F t) {
    const F round = all(12582912.0f);  // 1.5 * 2^23: its last bit is worth 1
    const F whole = t + round, f = t - (whole - round);
    F y = all(1.5403530e-4f);  // ln(2)^k / k! from k = 6 on down: 1.2e-7 for |f| <= 0.5
    y = fma(y, f, all(1.3333558e-3f));
    y = fma(y, f, all(9.6181291e-3f));
    y = fma(y, f, all(5.5504109e-2f));
    y = fma(y, f, all(2.4022651e-1f));
    y = fma(y, f, all(6.9314718e-1f));
    y = fma(y, f, all(1.0f));
    return (F)((I)y + (((I)whole - (I)round) << 23));
}

using Lanes = std::make_integer_sequence<int, kLanes>;

template <int APART, int... i>
ALWAYS F exchange(F v, std::integer_sequence<int, i...>) {
    return __builtin_shuffle(v, I{(i ^ APART)...});
}
// The sum of all lanes: of both halves, of their halves and so on.
template <int APART = kLanes / 2>
ALWAYS float total(F v) {
    if constexpr (APART == 0) return v[0];
    else return total<APART / 2>(v + exchange<APART>(v, Lanes()));
}
// The largest of all lanes, in every lane.
template <int APART = kLanes / 2>
ALWAYS F largest(F v) {
    if constexpr (APART == 0) return v;
    else return largest<APART / 2>(at_least(exchange<APART>(v, Lanes()), v));
}

template <int APART, int... i>
ALWAYS void exchange_squares(F& upper, F& lower, std::integer_sequence<int, i...>) {
    const F both = __builtin_shuffle(upper, lower, I{(i & APART ? kLanes + i - APART : i)...});
    lower = __builtin_shuffle(upper, lower, I{(i & APART ? kLanes + i : i + APART)...});
    upper = both;
}
// kLanes vectors as a square: exchange ever larger squares off the diagonal.
template <int APART = 1>
ALWAYS void transpose(F (&v)[kLanes]) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++)
        if (!(i & APART)) exchange_squares<APART>(v[i], v[i + APART], Lanes());
    if constexpr (2 * APART < kLanes) transpose<2 * APART>(v);
}

}  // namespace cpu
