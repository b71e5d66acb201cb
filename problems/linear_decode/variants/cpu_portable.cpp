// Links of matrices in plain C++ and GCC's vector types, for any CPU: vectors of four, tables for e2m1 and e4m3.
#include <cmath>
#include <cstdint>

#define WIDE

#include "cpu_linear.h"

namespace {

struct Tables {
    float e4m3[256], e2m1[256][2];  // of a byte, times kE4m3 and kE2m1

    Tables() {
        const float sizes[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
        for (int byte = 0; byte < 256; byte++) {
            const int exponent = byte >> 3 & 15, mantissa = byte & 7;
            const float size = std::ldexp(exponent ? 8.0f + mantissa : mantissa, std::max(exponent, 1) - 10);
            e4m3[byte] = linear::kE4m3 * (byte & 0x80 ? -size : size);
            for (int i = 0; i < 2; i++) {
                const int code = byte >> 4 * i & 15;
                e2m1[byte][i] = linear::kE2m1 * (code & 8 ? -sizes[code & 7] : sizes[code]);
            }
        }
    }
};

const Tables kTables;

struct Portable {
    static constexpr int kLanes = 4, kTokens = 2;
    using F = cpu::Vectors<kLanes>::F;

    static ALWAYS F fma(F a, F b, F c) { return a * b + c; }  // may round twice

    static ALWAYS void e4m3(const uint8_t* from, F (&to)[4]) {
        for (int i = 0; i < 16; i++) to[i / 4][i % 4] = kTables.e4m3[from[i]];
    }

    static ALWAYS void e2m1(const uint8_t* from, F (&to)[4]) {
        for (int i = 0; i < 16; i++) to[i / 4][i % 4] = kTables.e2m1[from[i / 2]][i % 2];
    }
};

}  // namespace

extern "C" int launch(void* const* tensors, const int64_t* numbers) {
    return linear::on_all_cores<Portable>(linear::Problem(tensors, numbers));
}
