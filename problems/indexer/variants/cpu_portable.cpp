// Scores and top k in plain C++ and GCC's vector types, for any CPU: vectors of four, tables for both formats.
#include <cmath>

#define WIDE

#include "cpu_cores.h"

namespace {

struct Tables {
    float e2m1[16], e4m3[256];

    Tables() {
        const float size[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
        for (int code = 0; code < 16; code++) e2m1[code] = code & 8 ? -size[code & 7] : size[code];
        for (int code = 0; code < 256; code++) {
            const int exponent = code >> 3 & 15, mantissa = code & 7;
            const float value = std::ldexp(exponent ? 8 + mantissa : mantissa, std::max(exponent, 1) - 10);
            e4m3[code] = code & 128 ? -value : value;
        }
    }
};

const Tables kTables;

struct Portable {
    static constexpr int kLanes = 4, kHeads = 4, kVectors = 2;
    using F = cpu::Vectors<4>::F;

    static ALWAYS F all(float x) { return F{x, x, x, x}; }
    static ALWAYS F fma(F a, F b, F c) { return a * b + c; }  // may round twice

    static void decode(const uint8_t* codes, const uint8_t* scales, bool fp8, float* to) {
        using namespace indexer;
        for (int64_t i = 0; i < kTogether; i++, scales += kScales) {
            if (fp8) {
                float scale;
                std::memcpy(&scale, scales, sizeof scale);
                for (int64_t d = 0; d < kDim; d++) to[d * kTile + i] = kTables.e4m3[*codes++] * scale;
            } else {
                for (int64_t d = 0; d < kDim; d += 2, codes++) {
                    const float scale = scale_of(scales[d / kGroup]);
                    to[d * kTile + i] = kTables.e2m1[*codes & 15] * scale;
                    to[(d + 1) * kTile + i] = kTables.e2m1[*codes >> 4] * scale;
                }
            }
        }
    }
};

}  // namespace

extern "C" int launch(void* const* tensors, const int64_t* sizes) {
    return indexer::on_all_cores<Portable>(indexer::Problem(tensors, sizes));
}
