// The vector code of the CPU variants, in GCC's vector types: a group of heads of one row, tile by tile.
//
// Before this is included, WIDE is the attribute that lets a function use the instructions of `Isa`, a struct with
//   kLanes                          fp32 of a vector
//   kEntries                        entries of a block of scores, which has two vectors of heads
//   kHeads, kVectors                heads, and vectors of dims, of a block of results; kHeads divides 2 * kLanes
//   all(x), fma(a, b, c)            a vector of x; a * b + c
//   e4m3(from, scale, low, high)    2 * kLanes codes under one scale byte to two vectors of fp32
//   bf16(from, to)                  kLanes bf16 to fp32
//
// Scores have their lanes along heads: queries are transposed once, entries are broadcast value by value, and maxima
// and sums need no exchange of lanes. Results have their lanes along dims, and probabilities are broadcast. So both
// products read one tile of entries, which lies in slabs: some dims of all its entries, then the next dims.
#pragma once

#include <cmath>
#include <limits>

#include "cpu_problem.h"
#include "cpu_vectors.h"

namespace fmha {

// Entries of a tile at most, but for rounding up. A panel's probabilities and a slab, at most 10 KiB each, stay in the
// first-level cache with room for the results that pass by; fewer entries would let results pass more often.
constexpr int64_t kTile = 80;
constexpr int64_t kBlock = 128;  // dims of a block of scores: at most 16 KiB of queries stay in the first-level cache

constexpr float kUnit = 0.04419417382415922f * 1.4426950408889634f;  // 512^-0.5 / ln 2: scores are powers of two
constexpr double kLn2 = 0.6931471805599453;

template <class Isa>
class Worker : cpu::Arithmetic<Isa> {
  public:
    static constexpr int64_t kLanes = Isa::kLanes;
    static constexpr int64_t kPanel = 2 * kLanes;                                                  // heads of a panel
    static constexpr int64_t kMost = (kTile + Isa::kEntries - 1) / Isa::kEntries * Isa::kEntries;  // entries of a tile
    static constexpr int64_t kSlab = Isa::kVectors * kLanes;                                       // dims of a slab
    static constexpr int64_t kQuery = kPanel * kDim, kPart = kPanel * (kDim + 2);  // floats of queries, of a Part
    static constexpr int64_t kSlabFloats = (kMost + 1) * kSlab;                    // +1: lest they meet in a cache
    static constexpr int64_t kTileFloats = kDim / kSlab * kSlabFloats;
    static_assert(kPanel % Isa::kHeads == 0 && kBlock % kSlab == 0);

    // What a panel's heads have so far, or of one tile: with p = 2^(score - most), the sums of p * entry and of p.
    struct Part {
        float *out, *most, *sum;  // (kDim / kSlab, kPanel, kSlab), (kPanel,), (kPanel,)

        explicit Part(float* p) : out(p), most(p + kPanel * kDim), sum(most + kPanel) {}
    };

    // Floats of memory that a worker takes which gets as many panels at a time.
    static int64_t floats(int64_t panels) { return kTileFloats + (kMost + 4) * kPanel + panels * (kPart + kQuery); }

    Worker(const Problem& p, float* memory) : p_(p), tile_(memory), scores_(tile_ + kTileFloats) {
        most_ = scores_ + kMost * kPanel, sum_ = most_ + kPanel, old_ = sum_ + kPanel, new_ = old_ + kPanel;
        panels_ = new_ + kPanel;
    }

    static Tiles tiles(const List& list) { return Tiles(list.count, kMost, Isa::kEntries); }

    // Panels [first, last) of a row, from its entries to its outputs.
    WIDE void group(int64_t row, int64_t first, int64_t last, const List& list) {
        const Tiles cut = tiles(list);
        for (int64_t n = 0; n < last - first && cut.count; n++) load_queries(row, first + n, query(n));
        for (int64_t k = 0; k < cut.count; k++) {
            const int64_t rows = decode(list, cut, k);
            ahead_ = Ahead(list, cut, k + 1, (last - first) * (kDim / kBlock) * (rows / Isa::kEntries));
            for (int64_t n = 0; n < last - first; n++) {
                const Part part(result(n));
                const int64_t heads = heads_of(first + n);
                score(query(n), heads, rows);
                if (k == 0) {
                    probabilities(heads, part.most, part.sum);
                    values<false>(heads, part.out);
                } else {
                    probabilities(heads, most_, sum_);
                    advance(heads, part, most_, sum_);
                    values<true>(heads, part.out);
                }
            }
        }
        for (int64_t n = 0; n < last - first; n++) finish(row, first + n, Part(result(n)), cut.count);
    }

    // Tile k of a row for one panel, into `part`.
    WIDE void one_tile(int64_t row, int64_t panel, int64_t k, const List& list, Part part) {
        const int64_t rows = decode(list, tiles(list), k);
        load_queries(row, panel, query(0));
        ahead_ = Ahead();
        score(query(0), heads_of(panel), rows);
        probabilities(heads_of(panel), part.most, part.sum);
        values<false>(heads_of(panel), part.out);
    }

    // Parts of all tiles of a row and panel, one behind the other, to its outputs; what group() does, bit by bit.
    WIDE void merge(int64_t row, int64_t panel, float* parts, int64_t count) {
        const Part whole(parts);
        const int64_t heads = heads_of(panel);
        for (int64_t k = 1; k < count; k++) {
            const Part part(parts + k * kPart);
            advance(heads, whole, part.most, part.sum);
            for (int64_t h = 0; h < heads; h++)
                for (int64_t d = 0; d < kDim; d += kLanes) {
                    float* to = whole.out + place(h, d);
                    put(to, merged(get(to), get(part.out + place(h, d)), h));
                }
        }
        finish(row, panel, whole, count);
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

    // Entries of the next tile, fetched a few at a time while this one's scores are computed.
    struct Ahead {
        const Entry *next = nullptr, *end = nullptr;
        int64_t each = 0;

        Ahead() = default;
        Ahead(const List& list, const Tiles& cut, int64_t k, int64_t steps) {
            next = list.entries.data() + std::min(list.count, k * cut.size);
            end = list.entries.data() + std::min(list.count, (k + 1) * cut.size);
            each = (end - next + steps - 1) / steps;
        }

        ALWAYS void step() {
            for (int64_t i = 0; i < each && next != end; i++, next++) {
                for (int64_t at = 0; at < kPayload; at += 64) __builtin_prefetch(next->payload + at, 0, 2);
                __builtin_prefetch(next->scales, 0, 2);
            }
        }
    };

    static constexpr int64_t place(int64_t dim) { return dim / kSlab * kSlabFloats + dim % kSlab; }  // in tile_
    static constexpr int64_t place(int64_t head, int64_t dim) {  // in Part::out
        return (dim / kSlab * kPanel + head) * kSlab + dim % kSlab;
    }
    float* query(int64_t n) const { return panels_ + n * (kPart + kQuery); }
    float* result(int64_t n) const { return query(n) + kQuery; }
    int64_t heads_of(int64_t panel) const { return std::min(kPanel, p_.heads - panel * kPanel); }

    // 2^x for x <= 0, with 0 below 2^-125.
    WIDE static ALWAYS F exp2(F x) {
        const F least = Isa::all(-125.0f);
        return x > least ? A::exp2(x > least ? x : least) : F{};
    }

    // The count_ entries of tile k to tile_, and zeros up to a multiple of kEntries, which it returns.
    WIDE int64_t decode(const List& list, const Tiles& cut, int64_t k) {
        const int64_t first = k * cut.size;
        count_ = std::min(cut.size, list.count - first);
        const int64_t rows = (count_ + Isa::kEntries - 1) / Isa::kEntries * Isa::kEntries;
        for (int64_t j = 0; j < count_; j++) decode(list.entries[first + j], tile_ + j * kSlab);
        for (int64_t j = count_; j < rows; j++)
            for (int64_t d = 0; d < kDim; d += kSlab) std::fill_n(tile_ + place(d) + j * kSlab, kSlab, 0.0f);
        return rows;
    }

    WIDE static ALWAYS void decode(const Entry& entry, float* row) {
        for (int64_t group = 0; group < kNope; group += kGroup)
            for (int64_t d = group; d < group + kGroup; d += 2 * kLanes)
                Isa::e4m3(entry.payload + d, entry.scales[group / kGroup], row + place(d), row + place(d + kLanes));
        for (int64_t d = kNope; d < kDim; d += kLanes)
            Isa::bf16(entry.payload + kNope + 2 * (d - kNope), row + place(d));
    }

    // A panel's queries times kUnit to `to` (kDim, kPanel), zeros for heads that are missing.
    WIDE void load_queries(int64_t row, int64_t panel, float* to) const {
        const uint16_t* q = p_.q + (row * p_.heads + panel * kPanel) * kDim;
        for (int64_t h = 0; h < kPanel; h += kLanes) {
            for (int64_t d = 0; d < kDim; d += kLanes) {
                F v[kLanes];
                for (int64_t i = 0; i < kLanes; i++) {
                    H bits{};
                    if (h + i < heads_of(panel)) __builtin_memcpy(&bits, q + (h + i) * kDim + d, sizeof bits);
                    v[i] = (F)(__builtin_convertvector(bits, U) << 16) * Isa::all(kUnit);
                }
                transpose(v);
                for (int64_t i = 0; i < kLanes; i++) put(to + (d + i) * kPanel + h, v[i]);
            }
        }
    }

    // kLanes vectors as a square: exchange ever larger squares off the diagonal.
    WIDE static ALWAYS void transpose(F (&v)[kLanes]) {
#pragma GCC unroll 4
        for (int s = 1; s < kLanes; s *= 2) {
            I low{}, high{};
            for (int i = 0; i < kLanes; i++) {
                low[i] = i & s ? kLanes + i - s : i;
                high[i] = i & s ? kLanes + i : i + s;
            }
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; i++) {
                if (i & s) continue;
                const F a = v[i], b = v[i + s];
                v[i] = __builtin_shuffle(a, b, low), v[i + s] = __builtin_shuffle(a, b, high);
            }
        }
    }

    // Scores of the tile's rows to scores_ (rows, kPanel).
    WIDE void score(const float* q, int64_t heads, int64_t rows) {
        for (int64_t d = 0; d < kDim; d += kBlock) {
            for (int64_t j = 0; j < rows; j += Isa::kEntries) {
                ahead_.step();
                const float *from = q + d * kPanel, *c = tile_ + place(d) + j * kSlab;
                if (heads > kLanes)
                    score_block<2>(from, c, scores_ + j * kPanel, d == 0);
                else
                    score_block<1>(from, c, scores_ + j * kPanel, d == 0);
            }
        }
    }

    // kBlock dims of kEntries entries with V vectors of heads, added to `s` or, at first, put there.
    template <int V>
    WIDE static ALWAYS void score_block(const float* q, const float* c, float* s, bool first) {
        constexpr int N = Isa::kEntries;
        F sum[N][V];
        for (int n = 0; n < N; n++)
            for (int v = 0; v < V; v++) sum[n][v] = first ? F{} : get(s + n * kPanel + v * kLanes);
        for (int64_t slab = 0; slab < kBlock / kSlab; slab++, c += kSlabFloats) {
#pragma GCC unroll 2
            for (int64_t d = 0; d < kSlab; d++, q += kPanel) {
                F heads[V];
                for (int v = 0; v < V; v++) heads[v] = get(q + v * kLanes);
                for (int n = 0; n < N; n++) {
                    const F value = Isa::all(c[n * kSlab + d]);
                    for (int v = 0; v < V; v++) sum[n][v] = Isa::fma(value, heads[v], sum[n][v]);
                }
            }
        }
        for (int n = 0; n < N; n++)
            for (int v = 0; v < V; v++) put(s + n * kPanel + v * kLanes, sum[n][v]);
    }

    // Scores to 2^(score - most) in place, with the tile's maxima and sums.
    WIDE void probabilities(int64_t heads, float* most, float* sum) {
        for (int64_t h = 0; h < heads; h += kLanes) {
            F m = get(scores_ + h), l{};
            for (int64_t j = 1; j < count_; j++) {
                const F x = get(scores_ + j * kPanel + h);
                m = x > m ? x : m;
            }
            for (int64_t j = 0; j < count_; j++) {
                const F y = exp2(get(scores_ + j * kPanel + h) - m);
                l += y;
                put(scores_ + j * kPanel + h, y);
            }
            put(most + h, m), put(sum + h, l);
        }
    }

    // Merge a tile's maxima and sums; old_ and new_ get the factors of the results so far and of the tile's.
    WIDE void advance(int64_t heads, Part whole, const float* most, const float* sum) {
        for (int64_t h = 0; h < heads; h += kLanes) {
            const F before = get(whole.most + h), now = get(most + h), both = before > now ? before : now;
            const F a = exp2(before - both), b = exp2(now - both);
            put(old_ + h, a), put(new_ + h, b), put(whole.most + h, both);
            put(whole.sum + h, Isa::fma(get(sum + h), b, get(whole.sum + h) * a));
        }
    }

    WIDE ALWAYS F merged(F before, F now, int64_t head) const {
        return Isa::fma(now, Isa::all(new_[head]), before * Isa::all(old_[head]));
    }

    // The tile's results, probabilities times entries, put to `out` of a Part or merged into it.
    template <bool kMerge>
    WIDE void values(int64_t heads, float* out) const {
        for (int64_t d = 0; d < kDim; d += kSlab)
            for (int64_t h = 0; h < heads; h += Isa::kHeads) value_block<kMerge>(h, d, out);
    }

    template <bool kMerge>
    WIDE ALWAYS void value_block(int64_t head, int64_t dim, float* out) const {
        constexpr int N = Isa::kHeads, D = Isa::kVectors;
        F sum[N][D] = {};
        const float *p = scores_ + head, *c = tile_ + place(dim);
        float* to = out + place(head, dim);
        if (kMerge)
            for (int64_t i = 0; i < N * kSlab; i += 16) __builtin_prefetch(to + i, 1, 3);
#pragma GCC unroll 2
        for (int64_t j = 0; j < count_; j++, p += kPanel, c += kSlab) {
            F entry[D];
            for (int v = 0; v < D; v++) entry[v] = get(c + v * kLanes);
            for (int n = 0; n < N; n++) {
                const F factor = Isa::all(p[n]);
                for (int v = 0; v < D; v++) sum[n][v] = Isa::fma(factor, entry[v], sum[n][v]);
            }
        }
        for (int n = 0; n < N; n++)
            for (int v = 0; v < D; v++, to += kLanes)
                put(to, kMerge ? merged(get(to), sum[n][v], head + n) : sum[n][v]);
    }

    // A panel's outputs from its results, or for a row without entries. A factor may be far below the least fp32 where
    // a sink is far above the scores: it goes in two steps.
    WIDE void finish(int64_t row, int64_t panel, Part part, bool any) const {
        for (int64_t h = 0; h < heads_of(panel); h++) {
            const int64_t head = panel * kPanel + h, at = row * p_.heads + head;
            const double most = any ? part.most[h] : 0, sum = any ? part.sum[h] : 1;
            const double factor = 1 / (sum + std::exp2(p_.sink[head] / kLn2 - most));
            p_.lse[at] = any ? (most + std::log2(sum)) * kLn2 : std::numeric_limits<float>::infinity();
            const F up = Isa::all(static_cast<float>(factor * 0x1p32)), down = Isa::all(0x1p-32f);
            for (int64_t d = 0; d < kDim; d += kLanes) {
                const F value = any ? get(part.out + place(h, d)) * up * down : F{};
                const H half = __builtin_convertvector(bf16(value), H);
                __builtin_memcpy(p_.out + at * kDim + d, &half, sizeof half);
            }
        }
    }

    const Problem& p_;
    float *tile_, *scores_, *most_, *sum_, *old_, *new_, *panels_;
    int64_t count_ = 0;
    Ahead ahead_;
};

}  // namespace fmha
