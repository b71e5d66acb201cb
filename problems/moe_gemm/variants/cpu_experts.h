// The vector code of the CPU variants: both products of some slots of an expert.
//
// Activations become integers of 16 bits, a unit for each block of 16, so that a weight has to be decoded to an integer
// alone: its scale and the activations' unit are factors of a block's sum, which is exact. A bf16 keeps all its bits
// down to 2^-7 of its block's largest; below that it is off by at most 2^-15 of the largest, 1e-5 of a row in all. What
// is quantised to e2m1 keeps every bit. Lanes are rows of weights, so sums need no exchange of lanes, and a block's
// sums are added up in the order of the blocks, whatever else is in the panel.
#pragma once

#include "cpu_problem.h"
#include "cpu_vectors.h"

namespace moe {

using namespace cpu;

constexpr float kWeight = 512.0f;               // what e2m1_words makes of 1
constexpr float kUnit = 1 / (kWeight * kE4m3);  // of stored units, so that a block's sum needs no other factor

constexpr int kParts = kRows / kLanes;
// Slots of a panel at most, and of those whose sums are added together, since each addition waits for the one before.
constexpr int kTokens = by_width(16, 8, 16), kTogether = by_width(2, 2, 4);

constexpr int kBias = 127, kMantissa = 23;  // of fp32
constexpr uint32_t kExponent = 0xFFu << kMantissa;

// Activations of all panels. A panel of n slots has for each block n times 16 values, and n units.
struct Activations {
    int16_t* values;
    float* units;
    int64_t blocks;

    int16_t* value(const Panel& panel, int64_t block, int64_t slot) const {
        return values + (panel.first * blocks + block * panel.count + slot) * kBlock;
    }
    float* unit(const Panel& panel, int64_t block, int64_t slot) const {
        return units + panel.first * blocks + block * panel.count + slot;
    }
};

class Expert {
  public:
    static_assert(kRows == kBlock, "a group's results are a block of the next product's activations");

    // A panel's rows of x to `to`.
    static void take_x(const Problem& p, const Routing& r, const Panel& panel, const Activations& to) {
        for (int64_t m = 0; m < panel.count; m++) {
            const uint16_t* x = p.x + r.order[panel.first + m] / p.topk * p.hidden;
            for (int64_t b = 0; b < to.blocks; b++) {
                F v[kParts];
                for (int i = 0; i < kParts; i++) v[i] = from_bf16(x + b * kBlock + i * kLanes);
                take(p.quantised, v, p.w13.in_factor[panel.expert], to.value(panel, b, m), to.unit(panel, b, m));
            }
        }
    }

    // 16 inner values of a band, v of task.Data, from x to `to`.
    static void swiglu(const Problem& p, const Routing& r, const Band& band, int64_t block, const Activations& x,
                       const Activations& to) {
        alignas(64) float gate[kTokens * kRows], up[kTokens * kRows];
        for (int64_t n = band.first; n < band.last; n++) {
            const Panel& panel = r.panels[n];
            const int64_t e = panel.expert;
            product(p.w13, panel, 2 * block, x, gate);
            product(p.w13, panel, 2 * block + 1, x, up);
            const F in = all(p.quantised ? p.w13.in_factor[e] : 1.0f), factor = all(p.w13.factor[e]);
            for (int64_t m = 0; m < panel.count; m++) {
                const F routing = all(p.routing[r.order[panel.first + m]]);
                F v[kParts];
                for (int i = 0; i < kParts; i++) {
                    const int64_t at = m * kRows + i * kLanes;
                    const F high = all(kLimit), low = -high;
                    const F g = load<F>(gate + at) * in * factor, u = load<F>(up + at) * in * factor;
                    const F both = silu(g < high ? g : high) * (u < low ? low : u > high ? high : u);
                    v[i] = round_bf16(both * routing);
                }
                take(p.quantised, v, p.w2.in_factor[e], to.value(panel, block, m), to.unit(panel, block, m));
            }
        }
    }

    // 16 hidden values of all tokens. parts: fp32 (slots, kRows), of no use afterwards.
    static void combine(const Problem& p, const Routing& r, int64_t group, const Activations& v, float* parts) {
        alignas(64) float sums[kTokens * kRows];
        for (int64_t m = r.routed; m < p.slots(); m++) std::fill_n(parts + r.order[m] * kRows, kRows, 0.0f);
        for (const Panel& panel : r.panels) {
            product(p.w2, panel, group, v, sums);
            const F in = all(p.quantised ? p.w2.in_factor[panel.expert] : 1.0f);
            const F factor = all(p.w2.factor[panel.expert]);
            for (int64_t m = 0; m < panel.count; m++) {
                float* to = parts + r.order[panel.first + m] * kRows;
                for (int64_t i = 0; i < kRows; i += kLanes) store(to + i, load<F>(sums + m * kRows + i) * in * factor);
            }
        }
        for (int64_t t = 0; t < p.tokens; t++) {
            const float* from = parts + t * p.topk * kRows;
            for (int64_t i = 0; i < kRows; i += kLanes) {
                F sum = load<F>(from + i);
                for (int64_t j = 1; j < p.topk; j++) sum += load<F>(from + j * kRows + i);
                store_bf16(p.out + t * p.hidden + group * kRows + i, sum);
            }
        }
    }

  private:
    static constexpr int64_t kAhead = 32;  // blocks to fetch ahead: the hardware's own fetching stops at a page's end

    static ALWAYS F magnitude(F x) { return (F)((U)x & 0x7FFFFFFFu); }

    // The power of two at or below x, which is positive.
    static ALWAYS F power(F x) { return (F)((U)x & kExponent); }

    // x >= 0 to the nearest multiple of step, a power of two, ties to even; x is below 2^22 steps.
    static ALWAYS F nearest(F x, F step) {
        const F big = step * all(12582912.0f);  // 1.5 * 2^23: its last bit is worth a step
        return (x + big) - big;
    }

    // x / (1 + exp(-x)) for x <= kLimit.
    static ALWAYS F silu(F x) {
        const F wanted = x * all(-1.44269504f), most = all(126.0f);
        const F y = cpu::exp2(at_most(wanted, most));
        return wanted < most ? x / (y + 1.0f) : F{};
    }

    // The largest of a block's values, in every lane.
    static ALWAYS F most(const F (&v)[kParts]) {
        F found = v[0];
        for (int i = 1; i < kParts; i++) found = at_least(v[i], found);
        return largest(found);
    }

    // A block of activations to integers and their unit.
    static ALWAYS void take(bool quantised, F (&v)[kParts], float in_factor, int16_t* values, float* unit) {
        F a[kParts], found;
        if (quantised) {
            for (int i = 0; i < kParts; i++) v[i] /= all(in_factor);
            for (int i = 0; i < kParts; i++) a[i] = magnitude(v[i]);
            const F wanted = at_most(most(a) / 6.0f, all(448.0f));  // a scale in e4m3, with steps of 2^-9 below
            const F scale = nearest(wanted, power(at_least(wanted, all(1 / 64.0f))) / 8.0f);
            const F divisor = scale > 0.0f ? scale : all(__builtin_inff());
            for (int i = 0; i < kParts; i++) {
                const F size = at_most(a[i] / divisor, all(6.0f));
                const F code = nearest(size, power(at_least(size, all(1.0f))) / 2.0f);
                v[i] = (F)((U)(code * 2.0f) | ((U)v[i] & 0x80000000u));
            }
            found = scale * (kUnit / 2);
        } else {
            for (int i = 0; i < kParts; i++) a[i] = magnitude(v[i]);
            // At least 2^-111: a unit that is no subnormal, and a factor that is finite.
            const U exponent = (U)at_least(power(most(a)), all(0x1p-111f));
            const F factor = (F)(((2 * kBias + 14u) << kMantissa) - exponent);  // of the largest makes 2^14 to 2^15
            for (int i = 0; i < kParts; i++) v[i] *= factor;
            found = (F)(exponent - (14u << kMantissa)) * kUnit;
        }
        store_rounded(v, values, Lanes());
        *unit = found[0];
    }

    // To integers, each eight in the order in which multiply() takes them: 0 4 1 5 2 6 3 7.
    template <int... i>
    static ALWAYS void store_rounded(const F (&v)[kParts], int16_t* to, std::integer_sequence<int, i...>) {
        const F round = all(12582912.0f);  // 1.5 * 2^23: its last bit is worth 1
        U part[kParts];
        for (int p = 0; p < kParts; p++) part[p] = (U)(v[p] + round) - (U)round;
        if constexpr (kLanes == 4) {
            for (int p = 0; p < kParts; p += 2, to += 8) {
                store(to, narrow(__builtin_shuffle(part[p], part[p + 1], U{0, 4, 1, 5})));
                store(to + 4, narrow(__builtin_shuffle(part[p], part[p + 1], U{2, 6, 3, 7})));
            }
        } else {
            for (int p = 0; p < kParts; p++, to += kLanes)
                store(to, __builtin_shuffle(narrow(part[p]), H{((i & ~7) | (i & 1) << 2 | (i & 7) >> 1)...}));
        }
    }

    // kLanes rows of a block: pairs of k, 0 4, 1 5, 2 6, 3 7, then those 8 higher.
    struct Weights {
        W pairs[8];
    };

    // Rows kLanes * part and on of a block, kWeight times the codes' values.
    static ALWAYS Weights decode(const uint8_t* codes, int part) {
        Weights w;
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const W eight = load<W>(codes + 64 * half + 4 * kLanes * part);
            w.pairs[4 * half] = e2m1_words(eight << 8);
            w.pairs[4 * half + 1] = e2m1_words(eight << 4);
            w.pairs[4 * half + 2] = e2m1_words(eight);
            w.pairs[4 * half + 3] = e2m1_words(eight >> 4);
        }
        return w;
    }

    // The rows' exact sums of products with a block of each of N slots.
    template <int N>
    static ALWAYS void multiply(const Weights& w, const int16_t* x, F (&to)[N]) {
        I sum[N] = {};
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++)
            for (int n = 0; n < N; n++)
                sum[n] = dot(sum[n], w.pairs[i], (W)(I{} + load<int32_t>(x + n * kBlock + 2 * i)));
        for (int n = 0; n < N; n++) to[n] = __builtin_convertvector(sum[n], F);
    }

    // A panel's products with a group of rows to `sums` (slots, kRows).
    static void product(const Matrix& w, const Panel& panel, int64_t group, const Activations& x, float* sums) {
        const uint8_t *codes = w.group_codes(panel.expert, group), *scales = w.group_scales(panel.expert, group);
        by_count<kTokens>(panel.count, codes, scales, x.value(panel, 0, 0), x.unit(panel, 0, 0), x.blocks, sums);
    }

    template <int N>
    static ALWAYS void by_count(int64_t count, const uint8_t* codes, const uint8_t* scales, const int16_t* x,
                                const float* units, int64_t blocks, float* sums) {
        if (count == N) return rows<N>(codes, scales, x, units, blocks, sums);
        if constexpr (N > 1) by_count<N - 1>(count, codes, scales, x, units, blocks, sums);
    }

    template <int N>
    static ALWAYS void add(const Weights& weights, F scale, const int16_t* v, const float* u, F* sum) {
        if constexpr (N > 0) {
            F dots[N];
            multiply<N>(weights, v, dots);
            for (int n = 0; n < N; n++) sum[n] = fma(dots[n], scale * all(u[n]), sum[n]);
        }
    }

    template <int N>
    __attribute__((noinline)) static void rows(const uint8_t* codes, const uint8_t* scales, const int16_t* x,
                                               const float* units, int64_t blocks, float* sums) {
        constexpr int kWhole = N / kTogether * kTogether;
        for (int part = 0; part < kParts; part++) {
            F sum[N] = {};
            const uint8_t *c = codes, *s = scales + part * kLanes;
            const int16_t* v = x;
            const float* u = units;
            for (int64_t b = 0; b < blocks; b++, c += kBlockBytes, s += kRows, v += N * kBlock, u += N) {
                __builtin_prefetch(c + kAhead * kBlockBytes);
                __builtin_prefetch(c + kAhead * kBlockBytes + 64);
                __builtin_prefetch(s + kAhead * kRows);
                const Weights weights = decode(c, part);
                const F scale = e4m3(s);
#pragma GCC unroll 16
                for (int n = 0; n + kTogether <= N; n += kTogether)
                    add<kTogether>(weights, scale, v + n * kBlock, u + n, sum + n);
                add<N % kTogether>(weights, scale, v + kWhole * kBlock, u + kWhole, sum + kWhole);
            }
#pragma GCC unroll 16
            for (int n = 0; n < N; n++) store(sums + n * kRows + part * kLanes, sum[n]);
        }
    }
};

}  // namespace moe
