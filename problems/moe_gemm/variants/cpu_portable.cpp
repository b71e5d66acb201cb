// The experts in plain C++ and GCC's vector types, for any CPU: vectors of four, tables for e2m1 and e4m3.
#include <cmath>
#include <cstdint>

#define WIDE

#include "cpu_cores.h"

namespace {

// Integers are held as fp32, in which their products and sums are exact: an odd factor is less than 2^24.
struct Tables {
    float pair[256][2], scale[256];  // of a byte of codes, times kWeight; of a scale, times kScale

    Tables() {
        const float sizes[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
        for (int byte = 0; byte < 256; byte++) {
            for (int i = 0; i < 2; i++) {
                const int code = byte >> 4 * i & 15;
                pair[byte][i] = moe::kWeight * (code & 8 ? -sizes[code & 7] : sizes[code]);
            }
            const int exponent = byte >> 3 & 15, mantissa = byte & 7;
            scale[byte] = moe::kScale * std::ldexp(exponent ? 8 + mantissa : mantissa, std::max(exponent, 1) - 10);
        }
    }
};

const Tables kTables;

struct Portable {
    static constexpr int kLanes = 4, kTokens = 16, kTogether = 2;
    using Value = float;
    using F = cpu::Vectors<kLanes>::F;

    struct Weights {
        F k[16];
    };

    static ALWAYS F all(float x) { return F{} + x; }
    static ALWAYS F fma(F a, F b, F c) { return a * b + c; }  // may round twice

    static ALWAYS void store(const F (&v)[moe::kBlock / kLanes], float* to) {
        for (int i = 0; i < moe::kBlock / kLanes; i++) {
            const F rounded = (v[i] + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23: its last bit is worth 1
            __builtin_memcpy(to + kLanes * i, &rounded, sizeof rounded);
        }
    }

    static ALWAYS Weights decode(const uint8_t* codes, int part) {
        Weights w;
        for (int half = 0; half < 2; half++) {
            const uint8_t* from = codes + 64 * half + 4 * kLanes * part;
            for (int j = 0; j < 4; j++)
                for (int row = 0; row < kLanes; row++)
                    for (int i = 0; i < 2; i++) w.k[8 * half + 2 * j + i][row] = kTables.pair[from[4 * row + j]][i];
        }
        return w;
    }

    static ALWAYS F scales(const uint8_t* s) {
        F found;
        for (int row = 0; row < kLanes; row++) found[row] = kTables.scale[s[row]];
        return found;
    }

    template <int N>
    static ALWAYS void dot(const Weights& w, const float* x, F (&to)[N]) {
        for (int n = 0; n < N; n++) to[n] = w.k[0] * x[n * moe::kBlock];
#pragma GCC unroll 15
        for (int i = 1; i < 16; i++)
            for (int n = 0; n < N; n++) to[n] += w.k[i] * x[n * moe::kBlock + i];
    }
};

}  // namespace

extern "C" int launch(void* const* tensors, const int64_t* sizes) {
    return moe::on_all_cores<Portable>(moe::Problem(tensors, sizes));
}
