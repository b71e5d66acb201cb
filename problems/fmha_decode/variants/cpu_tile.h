// The vector code of the CPU variants: a group of heads of one row, tile by tile.
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

using namespace cpu;

// Entries of a tile at most, but for rounding up. A panel's probabilities and a slab, at most 10 KiB each, stay in the
// first-level cache with room for the results that pass by; fewer entries would let results pass more often.
constexpr int64_t kTile = 80;
constexpr int64_t kBlock = 128;  // dims of a block of scores: at most 16 KiB of queries stay in the first-level cache

// Of a block of scores, which has two vectors of heads: entries. Of a block of results: heads, and vectors of dims.
constexpr int kEntries = by_width(6, 6, 8), kHeads = by_width(2, 4, 8), kVectors = by_width(4, 2, 2);

constexpr float kUnit = 0.04419417382415922f * 1.4426950408889634f;  // 512^-0.5 / ln 2: scores are powers of two
constexpr double kLn2 = 0.6931471805599453;

class Worker {
  public:
    static constexpr int64_t kPanel = 2 * kLanes;                                   // heads of a panel
    static constexpr int64_t kMost = (kTile + kEntries - 1) / kEntries * kEntries;  // entries of a tile
    static constexpr int64_t kSlab = kVectors * kLanes;                             // dims of a slab
    static constexpr int64_t kQuery = kPanel * kDim, kPart = kPanel * (kDim + 2);  // floats of queries, of a Part
    static constexpr int64_t kSlabFloats = (kMost + 1) * kSlab;                    // +1: lest they meet in a cache
    static constexpr int64_t kTileFloats = kDim / kSlab * kSlabFloats;
    static_assert(kPanel % kHeads == 0 && kBlock % kSlab == 0);

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

    static Tiles tiles(const List& list) { return Tiles(list.count, kMost, kEntries); }

    // Panels [first, last) of a row, from its entries to its outputs.
    void group(int64_t row, int64_t first, int64_t last, const List& list) {
        const Tiles cut = tiles(list);
        for (int64_t n = 0; n < last - first && cut.count; n++) load_queries(row, first + n, query(n));
        for (int64_t k = 0; k < cut.count; k++) {
            const int64_t rows = decode(list, cut, k);
            ahead_ = Ahead(list, cut, k + 1, (last - first) * (kDim / kBlock) * (rows / kEntries));
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
    void one_tile(int64_t row, int64_t panel, int64_t k, const List& list, Part part) {
        const int64_t rows = decode(list, tiles(list), k);
        load_queries(row, panel, query(0));
        ahead_ = Ahead();
        score(query(0), heads_of(panel), rows);
        probabilities(heads_of(panel), part.most, part.sum);
        values<false>(heads_of(panel), part.out);
    }

    // Parts of all tiles of a row and panel, one behind the other, to its outputs; what group() does, bit by bit.
    void merge(int64_t row, int64_t panel, float* parts, int64_t count) {
        const Part whole(parts);
        const int64_t heads = heads_of(panel);
        for (int64_t k = 1; k < count; k++) {
            const Part part(parts + k * kPart);
            advance(heads, whole, part.most, part.sum);
            for (int64_t h = 0; h < heads; h++)
                for (int64_t d = 0; d < kDim; d += kLanes) {
                    float* to = whole.out + place(h, d);
                    store(to, merged(load<F>(to), load<F>(part.out + place(h, d)), h));
                }
        }
        finish(row, panel, whole, count);
    }

  private:
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
    static ALWAYS F exp2(F x) {
        const F least = all(-125.0f);
        return x > least ? cpu::exp2(x > least ? x : least) : F{};
    }

    // The count_ entries of tile k to tile_, and zeros up to a multiple of kEntries, which it returns.
    int64_t decode(const List& list, const Tiles& cut, int64_t k) {
        const int64_t first = k * cut.size;
        count_ = std::min(cut.size, list.count - first);
        const int64_t rows = (count_ + kEntries - 1) / kEntries * kEntries;
        for (int64_t j = 0; j < count_; j++) decode(list.entries[first + j], tile_ + j * kSlab);
        for (int64_t j = count_; j < rows; j++)
            for (int64_t d = 0; d < kDim; d += kSlab) std::fill_n(tile_ + place(d) + j * kSlab, kSlab, 0.0f);
        return rows;
    }

    static ALWAYS void decode(const Entry& entry, float* row) {
        for (int64_t group = 0; group < kNope; group += kGroup) {
            const F factor = (F)(U{} + ((entry.scales[group / kGroup] + 8u) << 23));  // 2^8 times the scale
            for (int64_t d = group; d < group + kGroup; d += kLanes)
                store(row + place(d), e4m3(entry.payload + d) * factor);
        }
        for (int64_t d = kNope; d < kDim; d += kLanes)
            store(row + place(d), from_bf16(reinterpret_cast<const uint16_t*>(entry.payload + kNope) + d - kNope));
    }

    // A panel's queries times kUnit to `to` (kDim, kPanel), zeros for heads that are missing.
    void load_queries(int64_t row, int64_t panel, float* to) const {
        const uint16_t* q = p_.q + (row * p_.heads + panel * kPanel) * kDim;
        for (int64_t h = 0; h < kPanel; h += kLanes) {
            for (int64_t d = 0; d < kDim; d += kLanes) {
                F v[kLanes];
                for (int64_t i = 0; i < kLanes; i++) {
                    v[i] = h + i < heads_of(panel) ? from_bf16(q + (h + i) * kDim + d) * all(kUnit) : F{};
                }
                transpose(v);
                for (int64_t i = 0; i < kLanes; i++) store(to + (d + i) * kPanel + h, v[i]);
            }
        }
    }

    // Scores of the tile's rows to scores_ (rows, kPanel).
    void score(const float* q, int64_t heads, int64_t rows) {
        for (int64_t d = 0; d < kDim; d += kBlock) {
            for (int64_t j = 0; j < rows; j += kEntries) {
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
    static ALWAYS void score_block(const float* q, const float* c, float* s, bool first) {
        constexpr int N = kEntries;
        F sum[N][V];
        for (int n = 0; n < N; n++)
            for (int v = 0; v < V; v++) sum[n][v] = first ? F{} : load<F>(s + n * kPanel + v * kLanes);
        for (int64_t slab = 0; slab < kBlock / kSlab; slab++, c += kSlabFloats) {
#pragma GCC unroll 2
            for (int64_t d = 0; d < kSlab; d++, q += kPanel) {
                F heads[V];
                for (int v = 0; v < V; v++) heads[v] = load<F>(q + v * kLanes);
                for (int n = 0; n < N; n++) {
                    const F value = all(c[n * kSlab + d]);
                    for (int v = 0; v < V; v++) sum[n][v] = fma(value, heads[v], sum[n][v]);
                }
            }
        }
        for (int n = 0; n < N; n++)
            for (int v = 0; v < V; v++) store(s + n * kPanel + v * kLanes, sum[n][v]);
    }

    // Scores to 2^(score - most) in place, with the tile's maxima and sums.
    void probabilities(int64_t heads, float* most, float* sum) {
        for (int64_t h = 0; h < heads; h += kLanes) {
            F m = load<F>(scores_ + h), l{};
            for (int64_t j = 1; j < count_; j++) {
                const F x = load<F>(scores_ + j * kPanel + h);
                m = x > m ? x : m;
            }
            for (int64_t j = 0; j < count_; j++) {
                const F y = exp2(load<F>(scores_ + j * kPanel + h) - m);
                l += y;
                store(scores_ + j * kPanel + h, y);
            }
            store(most + h, m), store(sum + h, l);
        }
    }

    // Merge a tile's maxima and sums; old_ and new_ get the factors of the results so far and of the tile's.
    void advance(int64_t heads, Part whole, const float* most, const float* sum) {
        for (int64_t h = 0; h < heads; h += kLanes) {
            const F before = load<F>(whole.most + h), now = load<F>(most + h), both = before > now ? before : now;
            const F a = exp2(before - both), b = exp2(now - both);
            store(old_ + h, a), store(new_ + h, b), store(whole.most + h, both);
            store(whole.sum + h, fma(load<F>(sum + h), b, load<F>(whole.sum + h) * a));
        }
    }

    ALWAYS F merged(F before, F now, int64_t head) const {
        return fma(now, all(new_[head]), before * all(old_[head]));
    }

    // The tile's results, probabilities times entries, put to `out` of a Part or merged into it.
    template <bool kMerge>
    void values(int64_t heads, float* out) const {
        for (int64_t d = 0; d < kDim; d += kSlab)
            for (int64_t h = 0; h < heads; h += kHeads) value_block<kMerge>(h, d, out);
    }

    template <bool kMerge>
    ALWAYS void value_block(int64_t head, int64_t dim, float* out) const {
        constexpr int N = kHeads, D = kVectors;
        F sum[N][D] = {};
        const float *p = scores_ + head, *c = tile_ + place(dim);
        float* to = out + place(head, dim);
        if (kMerge)
            for (int64_t i = 0; i < N * kSlab; i += 16) __builtin_prefetch(to + i, 1, 3);
#pragma GCC unroll 2
        for (int64_t j = 0; j < count_; j++, p += kPanel, c += kSlab) {
            F entry[D];
            for (int v = 0; v < D; v++) entry[v] = load<F>(c + v * kLanes);
            for (int n = 0; n < N; n++) {
                const F factor = all(p[n]);
                for (int v = 0; v < D; v++) sum[n][v] = fma(factor, entry[v], sum[n][v]);
            }
        }
        for (int n = 0; n < N; n++)
            for (int v = 0; v < D; v++, to += kLanes)
                store(to, kMerge ? merged(load<F>(to), sum[n][v], head + n) : sum[n][v]);
    }

    // A panel's outputs from its results, or for a row without entries. A factor may be far below the least fp32 where
    // a sink is far above the scores: it goes in two steps.
    void finish(int64_t row, int64_t panel, Part part, bool any) const {
        for (int64_t h = 0; h < heads_of(panel); h++) {
            const int64_t head = panel * kPanel + h, at = row * p_.heads + head;
            const double most = any ? part.most[h] : 0, sum = any ? part.sum[h] : 1;
            const double factor = 1 / (sum + std::exp2(p_.sink[head] / kLn2 - most));
            p_.lse[at] = any ? (most + std::log2(sum)) * kLn2 : std::numeric_limits<float>::infinity();
            const F up = all(static_cast<float>(factor * 0x1p32)), down = all(0x1p-32f);
            for (int64_t d = 0; d < kDim; d += kLanes) {
                const F value = any ? load<F>(part.out + place(h, d)) * up * down : F{};
                store_bf16(p_.out + at * kDim + d, value);
            }
        }
    }

    const Problem& p_;
    float *tile_, *scores_, *most_, *sum_, *old_, *new_, *panels_;
    int64_t count_ = 0;
    Ahead ahead_;
};

}  // namespace fmha
