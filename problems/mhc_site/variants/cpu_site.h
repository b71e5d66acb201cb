// The site on a CPU, in the vectors of cpu_vectors.h.
//
// Two steps, each of tasks for all cores: of a few tokens and kChunk columns, x' and the sums over these columns; then
// of a token, what needs all columns. How tokens and columns are cut does not depend on the threads, and no sum on the
// tokens beside it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu_threads.h"
#include "cpu_vectors.h"

namespace site {

using namespace cpu;

constexpr int kCopies = 4, kRows = 24, kIterations = 20;
constexpr int kSumRows = by_width(2, 3, 6), kSumTokens = 4;  // sums that are held at once
constexpr float kHcEps = 1e-6f, kNormEps = 1e-6f;
constexpr int64_t kTile = 8;         // tokens of a task; their x' in fp32 is 32 KiB, of a first-level cache
constexpr int64_t kChunk = 256;      // columns of a task
constexpr int64_t kSums = kRows + 1;  // of a token and a chunk: fn x', and the sum of squares
constexpr int64_t kThreadBytes = 512 << 10;  // at 12 GB/s 44 us, three times what starting a thread costs

// The tensors of task.Data.
struct Problem {
    const void *y, *second;
    const uint16_t* copies;
    const float *post, *comb, *fn, *base, *scale;
    const uint16_t* norm;
    uint16_t *new_copies, *out;
    float *new_post, *new_comb;
    int64_t tokens, hidden, y_bytes, second_bytes;  // the last two: of a value, 2 or 4; second 0: there is none

    Problem(void* const* t, const int64_t* sizes)
        : y(t[0]), second(t[1]), copies(u16(t[2])), post(f32(t[3])), comb(f32(t[4])), fn(f32(t[5])), base(f32(t[6])),
          scale(f32(t[7])), norm(u16(t[8])), new_copies(u16(t[9])), out(u16(t[10])), new_post(f32(t[11])),
          new_comb(f32(t[12])), tokens(sizes[0]), hidden(sizes[1]), y_bytes(sizes[2]), second_bytes(sizes[3]) {}

    int64_t chunks() const { return (hidden + kChunk - 1) / kChunk; }
    int64_t tiles() const { return (tokens + kTile - 1) / kTile; }
    int64_t bytes() const { return 20 * tokens * hidden + 4 * kRows * kCopies * hidden; }

  private:
    static uint16_t* u16(void* p) { return static_cast<uint16_t*>(p); }
    static float* f32(void* p) { return static_cast<float*>(p); }
};

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// to[4 * j + k]: softmax of the logits over k, then columns and rows in turn.
inline void sinkhorn(const float* logits, float* to) {
    constexpr int n = kCopies;
    float m[n][n];
    for (int j = 0; j < n; j++) {
        const float* row = logits + n * j;
        const float most = std::max(std::max(row[0], row[1]), std::max(row[2], row[3]));
        float sum = 0;
        for (int k = 0; k < n; k++) sum += m[j][k] = std::exp(row[k] - most);
        for (int k = 0; k < n; k++) m[j][k] = m[j][k] / sum + kHcEps;
    }
    for (int turn = 0; turn < kIterations; turn++) {
        for (int j = 0; turn && j < n; j++) {
            const float sum = m[j][0] + m[j][1] + m[j][2] + m[j][3] + kHcEps;
            for (int k = 0; k < n; k++) m[j][k] /= sum;
        }
        for (int k = 0; k < n; k++) {
            const float sum = m[0][k] + m[1][k] + m[2][k] + m[3][k] + kHcEps;
            for (int j = 0; j < n; j++) m[j][k] /= sum;
        }
    }
    std::memcpy(to, m, sizeof m);
}

class Site {
  public:
    // partial: kSums of each token and chunk.
    Site(const Problem& p, float* partial) : p_(p), partial_(partial) {}

    // Task of the first step: x' of a tile's tokens and a chunk's columns, and the sums over them.
    void spread(int64_t task) const {
        const int64_t first = task / p_.chunks() * kTile, chunk = task % p_.chunks();
        const int64_t count = std::min(kTile, p_.tokens - first), from = chunk * kChunk;
        const int64_t columns = std::min(kChunk, p_.hidden - from);
        alignas(64) float x[kTile][kCopies * kChunk];
        for (int64_t i = 0; i < count; i++) token(first + i, from, columns, x[i], sums(first + i, chunk));
        int64_t i = 0;
        for (; i + kSumTokens <= count; i += kSumTokens) multiply<kSumTokens>(x + i, from, columns, first + i);
        for (; i < count; i++) multiply<1>(x + i, from, columns, first + i);
    }

    // Task of the second step: a token's mixing weights, u and its norm.
    void read(int64_t token) const {
        constexpr int n = kCopies;
        float z[kSums] = {}, logit[kRows], pre[n];
        for (int64_t chunk = 0; chunk < p_.chunks(); chunk++)
            for (int64_t row = 0; row < kSums; row++) z[row] += sums(token, chunk)[row];
        const float inverse = 1.0f / std::sqrt(z[kRows] / static_cast<float>(n * p_.hidden) + kNormEps);
        for (int row = 0; row < kRows; row++) {
            const float scale = p_.scale[row < n ? 0 : row < 2 * n ? 1 : 2];
            logit[row] = z[row] * inverse * scale + p_.base[row];
        }
        for (int j = 0; j < n; j++) pre[j] = sigmoid(logit[j]) + kHcEps;
        for (int k = 0; k < n; k++) p_.new_post[n * token + k] = 2 * sigmoid(logit[n + k]);
        sinkhorn(logit + 2 * n, p_.new_comb + n * n * token);
        norm(token, pre);
    }

  private:
    float* sums(int64_t token, int64_t chunk) const { return partial_ + (token * p_.chunks() + chunk) * kSums; }

    static ALWAYS F addend(const void* from, int64_t bytes, int64_t at) {
        return bytes == 4 ? load<F>(static_cast<const float*>(from) + at)
                          : from_bf16(static_cast<const uint16_t*>(from) + at);
    }
    // What the sublayer ahead returned, rounded to bf16.
    ALWAYS F output(int64_t at) const {
        F sum = addend(p_.y, p_.y_bytes, at);
        if (p_.second_bytes) sum = sum + addend(p_.second, p_.second_bytes, at);
        return round_bf16(sum);
    }
    // x[k * kChunk + i]: x' as rounded, of one token; written to new_copies too.
    void token(int64_t token, int64_t from, int64_t columns, float* x, float* to) const {
        constexpr int n = kCopies;
        const uint16_t* old = p_.copies + n * token * p_.hidden + from;
        uint16_t* made = p_.new_copies + n * token * p_.hidden + from;
        F post[n], comb[n][n], square{};
        for (int k = 0; k < n; k++) post[k] = all(p_.post[n * token + k]);
        for (int j = 0; j < n; j++)
            for (int k = 0; k < n; k++) comb[j][k] = all(p_.comb[n * n * token + n * j + k]);
        for (int64_t i = 0; i < columns; i += kLanes) {
            const F value = output(token * p_.hidden + from + i);
            F copy[n];
            for (int j = 0; j < n; j++) copy[j] = from_bf16(old + j * p_.hidden + i);
            for (int k = 0; k < n; k++) {
                F sum = post[k] * value;
                for (int j = 0; j < n; j++) sum = fma(comb[j][k], copy[j], sum);
                const F rounded = round_bf16(sum);
                store_bf16(made + k * p_.hidden + i, sum);
                store(x + k * kChunk + i, rounded);
                square = fma(rounded, rounded, square);
            }
        }
        to[kRows] = total(square);
    }

    // fn x' over a chunk's columns, for N tokens from `token` on.
    template <int N>
    void multiply(const float (*x)[kCopies * kChunk], int64_t from, int64_t columns, int64_t token) const {
        for (int64_t row = 0; row < kRows; row += kSumRows) {
            F sum[kSumRows][N] = {};
            for (int64_t copy = 0; copy < kCopies; copy++) {
                const float* fn = p_.fn + (row * kCopies + copy) * p_.hidden + from;
                for (int64_t i = 0; i < columns; i += kLanes) {
                    F value[N];
                    for (int t = 0; t < N; t++) value[t] = load<F>(x[t] + copy * kChunk + i);
                    for (int r = 0; r < kSumRows; r++) {
                        const F weight = load<F>(fn + r * kCopies * p_.hidden + i);
                        for (int t = 0; t < N; t++) sum[r][t] = fma(weight, value[t], sum[r][t]);
                    }
                }
            }
            for (int r = 0; r < kSumRows; r++)
                for (int t = 0; t < N; t++) sums(token + t, from / kChunk)[row + r] = total(sum[r][t]);
        }
    }

    void norm(int64_t token, const float* pre) const {
        const uint16_t* x = p_.new_copies + kCopies * token * p_.hidden;
        F square{};
        auto u = [&](int64_t i) {
            F sum = all(pre[0]) * from_bf16(x + i);
            for (int j = 1; j < kCopies; j++) sum = fma(all(pre[j]), from_bf16(x + j * p_.hidden + i), sum);
            return sum;
        };
        for (int64_t i = 0; i < p_.hidden; i += kLanes) {
            const F value = u(i);
            square = fma(value, value, square);
        }
        const float mean = total(square) / static_cast<float>(p_.hidden);
        const F inverse = all(1.0f / std::sqrt(mean + kNormEps));
        for (int64_t i = 0; i < p_.hidden; i += kLanes)
            store_bf16(p_.out + token * p_.hidden + i, u(i) * inverse * from_bf16(p_.norm + i));
    }

    const Problem p_;
    float* const partial_;
};

static int on_all_cores(const Problem& p) noexcept {
    static Scratch<float> scratch;
    try {
        const Site site(p, scratch.take(p.tokens * p.chunks() * kSums));
        Step spread(p.tiles() * p.chunks(), 1), read(p.tokens, 1);
        auto work = [&](int64_t) {
            spread.run([&](int64_t task) { site.spread(task); });
            read.run([&](int64_t token) { site.read(token); });
        };
        const int64_t useful = std::max<int64_t>(1, p.bytes() / kThreadBytes);
        return on_threads(std::min({useful, p.tiles() * p.chunks(), cores()}), work);
    } catch (const std::bad_alloc&) {
        return kNoMemory;
    }
}

}  // namespace site

extern "C" int launch(void* const* tensors, const int64_t* sizes) {
    return site::on_all_cores(site::Problem(tensors, sizes));
}
