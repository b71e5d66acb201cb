// The vector code of the CPU variants, in GCC's vector types: both products of some slots of an expert.
//
// Before this is included, WIDE is the attribute that lets a function use the instructions of `Isa`, a struct with
//   kLanes                     fp32 of a vector; rows of weights that are decoded together
//   kTokens, kTogether         slots of a panel at most, and of those that dot() takes
//   Value                      what holds an integer of 16 bits
//   Weights                    kLanes rows of a block
//   all(x), fma(a, b, c)       a vector of x; a * b + c
//   store(v, to)               a block of fp32, rounded to integers, to Values in the order in which dot() takes them
//   decode(codes, part)        rows kLanes * part and on of a block -> Weights: kWeight times the codes' values
//   scales(bytes)              kLanes e4m3 to fp32, times kScale
//   dot<N>(weights, from, to)  the rows' exact sums of products with a block of Values, as fp32, for each of N slots:
//                              together, since each addition waits for the one before it
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

constexpr float kWeight = 512.0f;     // doubled codes are integers; they are made in the upper byte of 16 bits
constexpr float kScale = 1 / 256.0f;  // an e4m3's fields fall on those of fp16, whose bias is 8 more
constexpr float kUnit = 1 / (kWeight * kScale);  // of stored units, so that a block's sum needs no other factor

constexpr int kBias = 127, kMantissa = 23;           // of fp32
constexpr uint32_t kExponent = 0xFFu << kMantissa;

// Activations of all panels. A panel of n slots has for each block n times 16 values, and n units.
template <class Value>
struct Activations {
    Value* values;
    float* units;
    int64_t blocks;

    Value* value(const Panel& panel, int64_t block, int64_t slot) const {
        return values + (panel.first * blocks + block * panel.count + slot) * kBlock;
    }
    float* unit(const Panel& panel, int64_t block, int64_t slot) const {
        return units + panel.first * blocks + block * panel.count + slot;
    }
};

template <class Isa>
class Expert : cpu::Arithmetic<Isa> {
  public:
    static constexpr int kLanes = Isa::kLanes, kParts = kRows / kLanes, kTokens = Isa::kTokens;
    using Value = typename Isa::Value;
    static_assert(kRows == kBlock, "a group's results are a block of the next product's activations");

    // A panel's rows of x to `to`.
    WIDE static void take_x(const Problem& p, const Routing& r, const Panel& panel, const Activations<Value>& to) {
        for (int64_t m = 0; m < panel.count; m++) {
            const uint16_t* x = p.x + r.order[panel.first + m] / p.topk * p.hidden;
            for (int64_t b = 0; b < to.blocks; b++) {
                F v[kParts];
                for (int i = 0; i < kParts; i++) {
                    H bits;
                    __builtin_memcpy(&bits, x + b * kBlock + i * kLanes, sizeof bits);
                    v[i] = (F)(__builtin_convertvector(bits, U) << 16);
                }
                take(p.quantised, v, p.w13.in_factor[panel.expert], to.value(panel, b, m), to.unit(panel, b, m));
            }
        }
    }

    // 16 inner values of a band, v of task.Data, from x to `to`.
    WIDE static void swiglu(const Problem& p, const Routing& r, const Band& band, int64_t block,
                            const Activations<Value>& x, const Activations<Value>& to) {
        alignas(64) float gate[kTokens * kRows], up[kTokens * kRows];
        for (int64_t n = band.first; n < band.last; n++) {
            const Panel& panel = r.panels[n];
            const int64_t e = panel.expert;
            product(p.w13, panel, 2 * block, x, gate);
            product(p.w13, panel, 2 * block + 1, x, up);
            const F in = Isa::all(p.quantised ? p.w13.in_factor[e] : 1.0f), factor = Isa::all(p.w13.factor[e]);
            for (int64_t m = 0; m < panel.count; m++) {
                const F routing = Isa::all(p.routing[r.order[panel.first + m]]);
                F v[kParts];
                for (int i = 0; i < kParts; i++) {
                    const int64_t at = m * kRows + i * kLanes;
                    const F high = Isa::all(kLimit), low = -high;
                    const F g = get(gate + at) * in * factor, u = get(up + at) * in * factor;
                    const F both = silu(g < high ? g : high) * (u < low ? low : u > high ? high : u);
                    v[i] = (F)(bf16(both * routing) << 16);
                }
                take(p.quantised, v, p.w2.in_factor[e], to.value(panel, block, m), to.unit(panel, block, m));
            }
        }
    }

    // 16 hidden values of all tokens. parts: fp32 (slots, kRows), of no use afterwards.
    WIDE static void combine(const Problem& p, const Routing& r, int64_t group, const Activations<Value>& v,
                             float* parts) {
        alignas(64) float sums[kTokens * kRows];
        for (const Panel& panel : r.panels) {
            product(p.w2, panel, group, v, sums);
            const F in = Isa::all(p.quantised ? p.w2.in_factor[panel.expert] : 1.0f);
            const F factor = Isa::all(p.w2.factor[panel.expert]);
            for (int64_t m = 0; m < panel.count; m++) {
                float* to = parts + r.order[panel.first + m] * kRows;
                for (int64_t i = 0; i < kRows; i += kLanes) put(to + i, get(sums + m * kRows + i) * in * factor);
            }
        }
        for (int64_t t = 0; t < p.tokens; t++) {
            const float* from = parts + t * p.topk * kRows;
            for (int64_t i = 0; i < kRows; i += kLanes) {
                F sum = get(from + i);
                for (int64_t j = 1; j < p.topk; j++) sum += get(from + j * kRows + i);
                const H half = __builtin_convertvector(bf16(sum), H);
                __builtin_memcpy(p.out + t * p.hidden + group * kRows + i, &half, sizeof half);
            }
        }
    }

  private:
    using A = cpu::Arithmetic<Isa>;
    using typename A::F;
    using typename A::I;
    using typename A::U;
    using typename A::H;
    using A::bf16;
    using A::get;
    using A::put;

    static constexpr int64_t kAhead = 32;  // blocks to fetch ahead: the hardware's own fetching stops at a page's end

    WIDE static ALWAYS F magnitude(F x) { return (F)((U)x & 0x7FFFFFFFu); }
    WIDE static ALWAYS F at_most(F x, F most) { return x < most ? x : most; }
    WIDE static ALWAYS F at_least(F x, F least) { return x > least ? x : least; }

    // The power of two at or below x, which is positive.
    WIDE static ALWAYS F power(F x) { return (F)((U)x & kExponent); }

    // x >= 0 to the nearest multiple of step, a power of two, ties to even; x is below 2^22 steps.
    WIDE static ALWAYS F nearest(F x, F step) {
        const F big = step * Isa::all(12582912.0f);  // 1.5 * 2^23: its last bit is worth a step
        return (x + big) - big;
    }

    // x / (1 + exp(-x)) for x <= kLimit.
    WIDE static ALWAYS F silu(F x) {
        const F wanted = x * Isa::all(-1.44269504f), most = Isa::all(126.0f);
        const F y = A::exp2(at_most(wanted, most));
        return wanted < most ? x / (y + 1.0f) : F{};
    }

    // The largest of kParts vectors, in every lane.
    WIDE static ALWAYS F largest(const F (&v)[kParts]) {
        F most = v[0];
        for (int i = 1; i < kParts; i++) most = at_least(v[i], most);
#pragma GCC unroll 4
        for (int s = 1; s < kLanes; s *= 2) {
            I other{};
            for (int i = 0; i < kLanes; i++) other[i] = i ^ s;
            most = at_least(__builtin_shuffle(most, other), most);
        }
        return most;
    }

    // A block of activations to Values and their unit.
    WIDE static ALWAYS void take(bool quantised, F (&v)[kParts], float in_factor, Value* values, float* unit) {
        F a[kParts], found;
        if (quantised) {
            for (int i = 0; i < kParts; i++) v[i] /= Isa::all(in_factor);
            for (int i = 0; i < kParts; i++) a[i] = magnitude(v[i]);
            const F wanted = at_most(largest(a) / 6.0f, Isa::all(448.0f));  // a scale in e4m3, with steps of 2^-9 below
            const F scale = nearest(wanted, power(at_least(wanted, Isa::all(1 / 64.0f))) / 8.0f);
            const F divisor = scale > 0.0f ? scale : Isa::all(__builtin_inff());
            for (int i = 0; i < kParts; i++) {
                const F size = at_most(a[i] / divisor, Isa::all(6.0f));
                const F code = nearest(size, power(at_least(size, Isa::all(1.0f))) / 2.0f);
                v[i] = (F)((U)(code * 2.0f) | ((U)v[i] & 0x80000000u));
            }
            found = scale * (kUnit / 2);
        } else {
            for (int i = 0; i < kParts; i++) a[i] = magnitude(v[i]);
            // At least 2^-111: a unit that is no subnormal, and a factor that is finite.
            const U exponent = (U)at_least(power(largest(a)), Isa::all(0x1p-111f));
            const F factor = (F)(((2 * kBias + 14u) << kMantissa) - exponent);  // of the largest makes 2^14 to 2^15
            for (int i = 0; i < kParts; i++) v[i] *= factor;
            found = (F)(exponent - (14u << kMantissa)) * kUnit;
        }
        Isa::store(v, values);
        *unit = found[0];
    }

    // A panel's products with a group of rows to `sums` (slots, kRows).
    WIDE static void product(const Matrix& w, const Panel& panel, int64_t group, const Activations<Value>& x,
                             float* sums) {
        const uint8_t *codes = w.group_codes(panel.expert, group), *scales = w.group_scales(panel.expert, group);
        by_count<kTokens>(panel.count, codes, scales, x.value(panel, 0, 0), x.unit(panel, 0, 0), x.blocks, sums);
    }

    template <int N>
    WIDE static ALWAYS void by_count(int64_t count, const uint8_t* codes, const uint8_t* scales, const Value* x,
                                     const float* units, int64_t blocks, float* sums) {
        if (count == N) return rows<N>(codes, scales, x, units, blocks, sums);
        if constexpr (N > 1) by_count<N - 1>(count, codes, scales, x, units, blocks, sums);
    }

    template <int N>
    WIDE static ALWAYS void add(const typename Isa::Weights& weights, F scale, const Value* v, const float* u, F* sum) {
        if constexpr (N > 0) {
            F dots[N];
            Isa::template dot<N>(weights, v, dots);
            for (int n = 0; n < N; n++) sum[n] = Isa::fma(dots[n], scale * Isa::all(u[n]), sum[n]);
        }
    }

    template <int N>
    WIDE __attribute__((noinline)) static void rows(const uint8_t* codes, const uint8_t* scales, const Value* x,
                                                    const float* units, int64_t blocks, float* sums) {
        constexpr int kTogether = Isa::kTogether, kWhole = N / kTogether * kTogether;
        for (int part = 0; part < kParts; part++) {
            F sum[N] = {};
            const uint8_t *c = codes, *s = scales + part * kLanes;
            const Value* v = x;
            const float* u = units;
            for (int64_t b = 0; b < blocks; b++, c += kBlockBytes, s += kRows, v += N * kBlock, u += N) {
                __builtin_prefetch(c + kAhead * kBlockBytes);
                __builtin_prefetch(c + kAhead * kBlockBytes + 64);
                __builtin_prefetch(s + kAhead * kRows);
                const typename Isa::Weights weights = Isa::decode(c, part);
                const F scale = Isa::scales(s);
#pragma GCC unroll 16
                for (int n = 0; n + kTogether <= N; n += kTogether)
                    add<kTogether>(weights, scale, v + n * kBlock, u + n, sum + n);
                add<N % kTogether>(weights, scale, v + kWhole * kBlock, u + kWhole, sum + kWhole);
            }
#pragma GCC unroll 16
            for (int n = 0; n < N; n++) put(sums + n * kRows + part * kLanes, sum[n]);
        }
    }
};

}  // namespace moe
