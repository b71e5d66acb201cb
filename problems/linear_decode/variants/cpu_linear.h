// Links of matrices for the CPU variants: tokens in fp32, weights decoded once for up to eight of them.
//
// An input is quantised to values of e4m3 in fp32, exactly, and a weight with its scale is exact in fp32 too. Lanes are
// columns; a row's sum for a token does not depend on the other tokens, nor on the threads.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <vector>

#include "cpu_threads.h"
#include "cpu_vectors.h"

namespace linear {

using namespace cpu;

constexpr int64_t kPart = 16;     // columns that are decoded together; of nvfp4 they share a scale
constexpr int64_t kBlock = 128;   // columns, and rows, of a scale of fp8
constexpr int64_t kRows = 2;      // of weights at a time: each load of an input serves both
constexpr int64_t kTask = 16;     // rows that a thread takes
constexpr int kTokens = by_width(2, 4, 8);  // that meet a decoded weight, so that sums stay in registers
constexpr int kVectors = kPart / kLanes;
constexpr int64_t kThreadWork = 1 << 18;  // weights that are worth a thread

enum Format { kFp8, kNvfp4, kBf16 };

// A matrix of G groups, and where its (tokens, G n) go.
struct Matrix {
    const uint8_t* codes;
    const uint8_t* scales;
    const float* factor;
    const float* input_scale;  // null where an nvfp4 input stays bf16
    uint16_t* out;
    int64_t groups, n, k, quantise;
    int64_t gate;  // 0, or the bits of the limit of a SwiGLU: the first n / 2 rows are gates, the others their ups

    int64_t apart() const { return gate ? n / 2 : 1; }     // of two rows that are computed together
    int64_t columns() const { return gate ? n / 2 : n; }  // of a group's output
};

// The matrices [first, last) have the same input.
struct Link {
    int64_t first, last;
};

struct Problem {
    int64_t format, tokens;
    const uint16_t* x;
    std::vector<Matrix> matrices;
    std::vector<Link> links;

    // tensors: x, then codes, scales, factor, input scale and output of each matrix. numbers: format, tokens, links,
    // then of each link its matrices, then of each matrix G, n, k, quantise and gate.
    Problem(void* const* tensors, const int64_t* numbers)
        : format(numbers[0]), tokens(numbers[1]), x(static_cast<const uint16_t*>(tensors[0])) {
        const int64_t* sizes = numbers + 3 + numbers[2];
        void* const* t = tensors + 1;
        for (int64_t i = 0; i < numbers[2]; i++) {
            const int64_t first = static_cast<int64_t>(matrices.size()), count = numbers[3 + i];
            for (int64_t j = 0; j < count; j++, t += 5, sizes += 5)
                matrices.push_back({static_cast<const uint8_t*>(t[0]), static_cast<const uint8_t*>(t[1]),
                                    static_cast<const float*>(t[2]), static_cast<const float*>(t[3]),
                                    static_cast<uint16_t*>(t[4]), sizes[0], sizes[1], sizes[2], sizes[3],
                                    sizes[4]});
            links.push_back({first, first + count});
        }
    }

    int64_t columns(const Link& link) const { return matrices[link.first].groups * matrices[link.first].k; }
    // Inputs of a link: each nvfp4 matrix quantises its own.
    int64_t inputs(const Link& link) const { return matrices[link.first].input_scale ? link.last - link.first : 1; }
};

inline float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline uint16_t bf16(float value) {
    const uint32_t bits = to_bits(value);
    return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// Up to kBlock values of a token, bf16 -> fp32, through e4m3 if so: fp8.round_trip.
inline void take(const uint16_t* from, float* to, int64_t count, bool quantise) {
    float most = 1e-4f;
    for (int64_t i = 0; i < count; i++) {
        to[i] = from_bits(static_cast<uint32_t>(from[i]) << 16);
        most = std::max(most, std::fabs(to[i]));
    }
    if (!quantise) return;
    const uint32_t exponent = (to_bits(most / 448.0f) + 0x7FFFFF) >> 23;
    const float scale = from_bits(exponent << 23), inverse = from_bits((254 - exponent) << 23);
    for (int64_t i = 0; i < count; i++) {
        // The power of two at or below the value, at least 2^-6: codes are an eighth of it apart.
        const float value = to[i] * inverse;
        const float power = from_bits(to_bits(std::max(std::fabs(value), 0.015625f)) & 0x7F800000);
        const float eighths = value / power * 8.0f;
        to[i] = (eighths + 12582912.0f - 12582912.0f) * power * 0.125f * scale;  // 1.5 * 2^23: its last bit is worth 1
    }
}

// The nearest e4m3, ties to even, of 0 to 448.
inline float nearest_e4m3(float value) {
    const float eighth = from_bits(to_bits(std::max(value, 0.015625f)) & 0x7F800000) * 0.125f;
    return (value / eighth + 12582912.0f - 12582912.0f) * eighth;
}

// kPart values of a token, bf16 -> fp32 code * scale, without the input scale: nvfp4.encode.
inline void take_nvfp4(const uint16_t* from, float* to, float input_scale) {
    float most = 0;
    for (int64_t i = 0; i < kPart; i++) {
        to[i] = from_bits(static_cast<uint32_t>(from[i]) << 16) / input_scale;
        most = std::max(most, std::fabs(to[i]));
    }
    const float scale = nearest_e4m3(std::min(most / 6.0f, 448.0f));
    for (int64_t i = 0; i < kPart; i++) {
        // The power of two at or below the value, at least 1: codes are a half of it apart.
        const float value = scale != 0 ? std::clamp(to[i] / scale, -6.0f, 6.0f) : 0.0f;
        const float half = from_bits(to_bits(std::max(std::fabs(value), 1.0f)) & 0x7F800000) * 0.5f;
        to[i] = (value / half + 12582912.0f - 12582912.0f) * half * scale;
    }
}

class Rows {
  public:
    // Rows [begin, end) of one group of a matrix for all tokens. x: fp32 (tokens, apart), at the group's columns.
    static void run(const Problem& p, const Matrix& m, int64_t group, int64_t begin, int64_t end, const float* x,
                    int64_t apart) {
        for (int64_t row = begin; row < end; row += m.gate ? 1 : kRows)
            for (int64_t token = 0; token < p.tokens; token += kTokens) {
                const int64_t count = std::min<int64_t>(p.tokens - token, kTokens);
                uint16_t* out = m.out + (token * m.groups + group) * m.columns() + row;
                with_tokens<1>(count, p.format, m, group, row, x + token * apart, apart, out);
            }
    }

  private:
    template <int N>
    static void with_tokens(int64_t count, int64_t format, const Matrix& m, int64_t group, int64_t row,
                            const float* x, int64_t apart, uint16_t* out) {
        if (count == N)
            format == kFp8     ? tile<kFp8, N>(m, group, row, x, apart, out)
            : format == kNvfp4 ? tile<kNvfp4, N>(m, group, row, x, apart, out)
                               : tile<kBf16, N>(m, group, row, x, apart, out);
        else if constexpr (N < kTokens)
            with_tokens<N + 1>(count, format, m, group, row, x, apart, out);
    }

    template <int FORMAT, int N>
    static void tile(const Matrix& m, int64_t group, int64_t row, const float* x, int64_t apart, uint16_t* out) {
        F sum[kRows][N] = {};
        for (int64_t k = 0; k < m.k; k += kPart) {
            F w[kRows][kVectors];
            for (int r = 0; r < kRows; r++) decode<FORMAT>(m, group, row + r * m.apart(), k, w[r]);
            for (int v = 0; v < kVectors; v++)
                for (int t = 0; t < N; t++) {
                    const F in = load<F>(x + t * apart + k + v * kLanes);
                    for (int r = 0; r < kRows; r++) sum[r][t] = fma(w[r][v], in, sum[r][t]);
                }
        }
        const float factor = FORMAT != kNvfp4   ? 1.0f
                             : !m.input_scale ? m.factor[group]
                                              : m.factor[group] * m.input_scale[group];
        for (int t = 0; t < N; t++) {
            float product[kRows];
            for (int r = 0; r < kRows; r++) {
                product[r] = total(sum[r][t]) * factor;
                if (!m.gate) out[t * m.groups * m.n + r] = bf16(product[r]);
            }
            if (!m.gate) continue;
            const float limit = from_bits(static_cast<uint32_t>(m.gate)), gate = std::min(product[0], limit);
            out[t * m.columns()] = bf16(gate / (1 + std::exp(-gate)) * std::clamp(product[1], -limit, limit));
        }
    }

    // 16 columns of a row with their scale.
    template <int FORMAT>
    static ALWAYS void decode(const Matrix& m, int64_t group, int64_t row, int64_t k, F (&w)[kVectors]) {
        const int64_t at = (group * m.n + row) * m.k + k;
        if constexpr (FORMAT == kBf16) {
            for (int v = 0; v < kVectors; v++)
                w[v] = from_bf16(reinterpret_cast<const uint16_t*>(m.codes) + at + v * kLanes);
        } else if constexpr (FORMAT == kFp8) {
            const int64_t across = (m.k + kBlock - 1) / kBlock, down = (m.n + kBlock - 1) / kBlock;
            const uint32_t byte = m.scales[(group * down + row / kBlock) * across + k / kBlock];
            const float scale = from_bits(byte << 23) / kE4m3;
            for (int v = 0; v < kVectors; v++) w[v] = e4m3(m.codes + at + v * kLanes) * scale;
        } else {
            const uint32_t byte = m.scales[at / kPart];
            const float scale = byte >> 3 ? from_bits((byte << 20) + (120u << 23)) : static_cast<float>(byte) / 512.0f;
            for (int v = 0; v < kVectors; v++) w[v] = e2m1(m.codes + (at + v * kLanes) / 2) * scale;
        }
    }
};

// Compute all links, each in two steps: its input, its rows. Calls of several threads follow each other: they share the
// memory that is kept.
static int on_all_cores(const Problem& p, int64_t cores = cpu::cores()) noexcept try {
    static std::mutex mutex;
    static Scratch<float> scratch;
    const std::lock_guard lock(mutex);
    int64_t most = 0, work = 0;
    for (const Link& link : p.links) most = std::max(most, p.inputs(link) * p.columns(link));
    for (const Matrix& m : p.matrices) work += m.groups * m.n * m.k * (3 + p.tokens) / 4;
    float* const x = scratch.take(p.tokens * most);

    std::vector<std::unique_ptr<Step>> steps;  // of each link, taking then rows
    for (const Link& link : p.links) {
        int64_t rows = 0;
        for (int64_t i = link.first; i < link.last; i++)
            rows += p.matrices[i].groups * (p.matrices[i].columns() / kTask);
        const int64_t blocks = (p.columns(link) + kBlock - 1) / kBlock;
        steps.push_back(std::make_unique<Step>(p.inputs(link) * p.tokens * blocks, 4));
        steps.push_back(std::make_unique<Step>(rows, 1));
    }
    return on_threads(std::clamp<int64_t>(work / kThreadWork, 1, cores), [&](int64_t) {
        const uint16_t* in = p.x;
        for (size_t i = 0; i < p.links.size(); i++) {
            const Link& link = p.links[i];
            const Matrix& first = p.matrices[link.first];
            const int64_t columns = p.columns(link), blocks = (columns + kBlock - 1) / kBlock;
            steps[2 * i]->run([&](int64_t task) {  // a block of k of a token, for an input
                const int64_t at = task / blocks * columns + task % blocks * kBlock, token = task / blocks % p.tokens;
                const uint16_t* from = in + token * columns + task % blocks * kBlock;
                const int64_t count = std::min(kBlock, columns - task % blocks * kBlock);
                const Matrix& m = p.matrices[link.first + task / blocks / p.tokens];
                if (!m.input_scale) return take(from, x + at, count, m.quantise);
                for (int64_t j = 0; j < count; j += kPart)  // a group may end within
                    take_nvfp4(from + j, x + at + j, m.input_scale[(task % blocks * kBlock + j) / m.k]);
            });
            steps[2 * i + 1]->run([&](int64_t task) {
                int64_t which = link.first;
                for (;; which++) {
                    const int64_t tasks = p.matrices[which].groups * (p.matrices[which].columns() / kTask);
                    if (task < tasks) break;
                    task -= tasks;
                }
                const Matrix& m = p.matrices[which];
                const int64_t of_group = m.columns() / kTask, group = task / of_group, row = task % of_group * kTask;
                const float* mine = x + (m.input_scale ? which - link.first : 0) * p.tokens * columns;
                Rows::run(p, m, group, row, row + kTask, mine + group * m.k, columns);
            });
            in = first.out;
        }
    });
} catch (const std::bad_alloc&) {
    return kNoMemory;
}

}  // namespace linear

extern "C" int launch(void* const* tensors, const int64_t* numbers) {
    return linear::on_all_cores(linear::Problem(tensors, numbers));
}
