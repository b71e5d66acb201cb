// The site on a CPU, for an Isa of cpu_vectors.h with kRows and kTokens besides: how many sums are held at once.
//
// Two steps, each of tasks for all cores: of a few tokens and kChunk columns, x' and the sums over these columns; then
// of a token, what needs all columns. How tokens and columns are cut does not depend on the threads, and no sum on the
// tokens beside it.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu_threads.h"
#include "cpu_vectors.h"

namespace site {

constexpr int kCopies = 4, kRows = 24, kIterations = 20;
constexpr float kHcEps = 1e-6f, kNormEps = 1e-6f;
constexpr int64_t kTile = 8;                         // tokens of a task; their x' in fp32 is 32 KiB, of a first-level cache
constexpr int64_t kChunk = 256;                      // columns of a task
constexpr int64_t kSums = kRows + 1;                 // of a token and a chunk: fn x', and the sum of squares
constexpr int64_t kThreadBytes = 512 << 10;          // at 12 GB/s 44 us, three times what starting a thread costs

// The tensors of task.Data.
struct Problem {
    const void *y, *second;
    const uint16_t* copies;
    const float *post, *comb, *fn, *base, *scale;
    const uint16_t* norm;
    uint16_t *new_copies, *out;
    float *new_post, *new_comb;
    int64_t tokens, hidden, y_bytes, second_bytes;  // the last two: of a value, 2 or 4; second 0: there is none

    int64_t chunks() const { return (hidden + kChunk - 1) / kChunk; }
    int64_t tiles() const { return (tokens + kTile - 1) / kTile; }
    int64_t bytes() const { return 20 * tokens * hidden + 4 * kRows * kCopies * hidden; }
};

// Tasks [0, count). run returns when all are done, by whichever thread.
class Step {
  public:
    explicit Step(int64_t count) : count_(count) {}

    template <class Work>
    void run(const Work& work) {
        for (int64_t task; (task = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) {
            work(task);
            done_.fetch_add(1, std::memory_order_release);
        }
        while (done_.load(std::memory_order_acquire) < count_) std::this_thread::yield();
    }

  private:
    const int64_t count_;
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<int64_t> done_{0};
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

template <class Isa>
class Site {
    using A = cpu::Arithmetic<Isa>;
    using F = typename A::F;
    using U = typename A::U;
    using H = typename A::H;
    static constexpr int64_t kLanes = Isa::kLanes;

  public:
    // partial: kSums of each token and chunk.
    Site(const Problem& p, float* partial) : p_(p), partial_(partial) {}

    // Task of the first step: x' of a tile's tokens and a chunk's columns, and the sums over them.
    WIDE void spread(int64_t task) const {
        const int64_t first = task / p_.chunks() * kTile, chunk = task % p_.chunks();
        const int64_t count = std::min(kTile, p_.tokens - first), from = chunk * kChunk;
        const int64_t columns = std::min(kChunk, p_.hidden - from);
        alignas(64) float x[kTile][kCopies * kChunk];
        for (int64_t i = 0; i < count; i++) token(first + i, from, columns, x[i], sums(first + i, chunk));
        int64_t i = 0;
        for (; i + Isa::kTokens <= count; i += Isa::kTokens) multiply<Isa::kTokens>(x + i, from, columns, first + i);
        for (; i < count; i++) multiply<1>(x + i, from, columns, first + i);
    }

    // Task of the second step: a token's mixing weights, u and its norm.
    WIDE void read(int64_t token) const {
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
    WIDE float* sums(int64_t token, int64_t chunk) const { return partial_ + (token * p_.chunks() + chunk) * kSums; }

    WIDE static ALWAYS F widen(const uint16_t* from) {
        H v;
        __builtin_memcpy(&v, from, sizeof v);
        return (F)(__builtin_convertvector(v, U) << 16);
    }
    // Store rounded bits, as A::bf16 gives them.
    WIDE static ALWAYS void narrow(uint16_t* to, U bits) {
        const H v = __builtin_convertvector(bits, H);
        __builtin_memcpy(to, &v, sizeof v);
    }
    WIDE static ALWAYS float total(F v) {
        float lanes[kLanes], sum = 0;
        A::put(lanes, v);
        for (int64_t i = 0; i < kLanes; i++) sum += lanes[i];
        return sum;
    }

    WIDE static ALWAYS F addend(const void* from, int64_t bytes, int64_t at) {
        return bytes == 4 ? A::get(static_cast<const float*>(from) + at)
                          : widen(static_cast<const uint16_t*>(from) + at);
    }
    // What the sublayer ahead returned, rounded to bf16.
    WIDE ALWAYS F output(int64_t at) const {
        F sum = addend(p_.y, p_.y_bytes, at);
        if (p_.second_bytes) sum = sum + addend(p_.second, p_.second_bytes, at);
        return (F)(A::bf16(sum) << 16);
    }
    // x[k * kChunk + i]: x' as rounded, of one token; written to new_copies too.
    WIDE void token(int64_t token, int64_t from, int64_t columns, float* x, float* to) const {
        constexpr int n = kCopies;
        const uint16_t* old = p_.copies + n * token * p_.hidden + from;
        uint16_t* made = p_.new_copies + n * token * p_.hidden + from;
        F post[n], comb[n][n], square{};
        for (int k = 0; k < n; k++) post[k] = Isa::all(p_.post[n * token + k]);
        for (int j = 0; j < n; j++)
            for (int k = 0; k < n; k++) comb[j][k] = Isa::all(p_.comb[n * n * token + n * j + k]);
        for (int64_t i = 0; i < columns; i += kLanes) {
            const F value = output(token * p_.hidden + from + i);
            F copy[n];
            for (int j = 0; j < n; j++) copy[j] = widen(old + j * p_.hidden + i);
            for (int k = 0; k < n; k++) {
                F sum = post[k] * value;
                for (int j = 0; j < n; j++) sum = Isa::fma(comb[j][k], copy[j], sum);
                const U bits = A::bf16(sum);
                narrow(made + k * p_.hidden + i, bits);
                const F rounded = (F)(bits << 16);
                A::put(x + k * kChunk + i, rounded);
                square = Isa::fma(rounded, rounded, square);
            }
        }
        to[kRows] = total(square);
    }

    // fn x' over a chunk's columns, for N tokens from `token` on.
    template <int N>
    WIDE void multiply(const float (*x)[kCopies * kChunk], int64_t from, int64_t columns, int64_t token) const {
        for (int64_t row = 0; row < kRows; row += Isa::kRows) {
            F sum[Isa::kRows][N] = {};
            for (int64_t copy = 0; copy < kCopies; copy++) {
                const float* fn = p_.fn + (row * kCopies + copy) * p_.hidden + from;
                for (int64_t i = 0; i < columns; i += kLanes) {
                    F value[N];
                    for (int t = 0; t < N; t++) value[t] = A::get(x[t] + copy * kChunk + i);
                    for (int r = 0; r < Isa::kRows; r++) {
                        const F weight = A::get(fn + r * kCopies * p_.hidden + i);
                        for (int t = 0; t < N; t++) sum[r][t] = Isa::fma(weight, value[t], sum[r][t]);
                    }
                }
            }
            for (int r = 0; r < Isa::kRows; r++)
                for (int t = 0; t < N; t++) sums(token + t, from / kChunk)[row + r] = total(sum[r][t]);
        }
    }

    WIDE void norm(int64_t token, const float* pre) const {
        const uint16_t* x = p_.new_copies + kCopies * token * p_.hidden;
        F square{};
        auto u = [&](int64_t i) WIDE {
            F sum = Isa::all(pre[0]) * widen(x + i);
            for (int j = 1; j < kCopies; j++) sum = Isa::fma(Isa::all(pre[j]), widen(x + j * p_.hidden + i), sum);
            return sum;
        };
        for (int64_t i = 0; i < p_.hidden; i += kLanes) {
            const F value = u(i);
            square = Isa::fma(value, value, square);
        }
        const float mean = total(square) / static_cast<float>(p_.hidden);
        const F inverse = Isa::all(1.0f / std::sqrt(mean + kNormEps));
        for (int64_t i = 0; i < p_.hidden; i += kLanes)
            narrow(p_.out + token * p_.hidden + i, A::bf16(u(i) * inverse * widen(p_.norm + i)));
    }

    const Problem p_;
    float* const partial_;
};

template <class Isa>
int on_all_cores(const Problem& p) noexcept {
    static cpu::Scratch<float> scratch;
    try {
        const Site<Isa> site(p, scratch.take(p.tokens * p.chunks() * kSums));
        Step spread(p.tiles() * p.chunks()), read(p.tokens);
        auto work = [&](int64_t) {
            spread.run([&](int64_t task) { site.spread(task); });
            read.run([&](int64_t token) { site.read(token); });
        };
        const int64_t useful = std::max<int64_t>(1, p.bytes() / kThreadBytes);
        return cpu::on_threads(std::min({useful, p.tiles() * p.chunks(), cpu::cores()}), work);
    } catch (const std::bad_alloc&) {
        return cpu::kNoMemory;
    }
}

inline Problem problem(void* const* t, int64_t tokens, int64_t hidden, int64_t y_bytes, int64_t second_bytes) {
    auto u16 = [&](int i) { return static_cast<uint16_t*>(t[i]); };
    auto f32 = [&](int i) { return static_cast<float*>(t[i]); };
    return {t[0],    t[1],   u16(2), f32(3), f32(4),  f32(5),  f32(6), f32(7), u16(8),
            u16(9), u16(10), f32(11), f32(12), tokens, hidden, y_bytes, second_bytes};
}

}  // namespace site
