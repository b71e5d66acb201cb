// Attention in plain C++ and GCC's vector types, for any CPU: vectors of four, a table for e4m3.
#include <cmath>
#include <cstdint>
#include <cstring>

#define WIDE

#include "cpu_cores.h"

namespace {

struct Table {
    float value[256];

    Table() {
        for (int code = 0; code < 256; code++) {
            const int exponent = code >> 3 & 15, mantissa = code & 7;
            const float size = std::ldexp(exponent ? 8 + mantissa : mantissa, std::max(exponent, 1) - 10);
            value[code] = code & 128 ? -size : size;
        }
    }
};

const Table kE4m3;

struct Portable {
    static constexpr int kLanes = 4, kEntries = 6, kHeads = 2, kVectors = 4;
    using F = cpu::Vectors<4>::F;

    static ALWAYS F all(float x) { return F{x, x, x, x}; }
    static ALWAYS F fma(F a, F b, F c) { return a * b + c; }  // may round twice

    static ALWAYS void e4m3(const uint8_t* from, uint8_t scale, float* low, float* high) {
        const uint32_t bits = static_cast<uint32_t>(scale) << 23;
        float factor;
        std::memcpy(&factor, &bits, sizeof factor);
        for (int i = 0; i < kLanes; i++) low[i] = kE4m3.value[from[i]] * factor;
        for (int i = 0; i < kLanes; i++) high[i] = kE4m3.value[from[kLanes + i]] * factor;
    }

    static ALWAYS void bf16(const uint8_t* from, float* to) {
        for (int i = 0; i < kLanes; i++) {
            uint16_t bits;
            std::memcpy(&bits, from + 2 * i, sizeof bits);
            const uint32_t word = static_cast<uint32_t>(bits) << 16;
            std::memcpy(to + i, &word, sizeof word);
        }
    }
};

}  // namespace

extern "C" int launch(void* const* tensors, const int64_t* sizes) {
    return fmha::on_all_cores<Portable>(fmha::Problem(tensors, sizes));
}
