// Scores of a tile of keys: fp32 with the entries along the lanes, so that heads add up without exchanging lanes.
#pragma once

#include "cpu_problem.h"
#include "cpu_vectors.h"

namespace indexer {

using namespace cpu;

constexpr int64_t kTile = 64;  // entries of a tile: 32 KiB, for the first-level cache
constexpr int kHeads = 4, kVectors = by_width(2, 4, 4);  // heads, and vectors of entries, of a block of products

class Scorer {
  public:
    static constexpr int64_t kStep = kVectors * kLanes;  // entries of a block of products
    static_assert(kTile % kStep == 0);

    // `count` entries of sequence b from `first` on, to tile_. Whether the table names pages for all.
    bool take(const Problem& p, int64_t b, int64_t first, int64_t count) {
        for (int64_t i = 0; i < count; i += kTogether) {
            const int64_t place = p.place(b, first + i);
            if (place < 0) return false;
            for (int64_t at = 0; at < kTogether; at += kLanes) {
                const uint8_t *codes = p.codes(place + at), *scales = p.scales(place + at);
                p.fp8 ? decode_e4m3(codes, scales, tile_ + i + at) : decode_e2m1(codes, scales, tile_ + i + at);
            }
        }
        return true;
    }

    // Scores of the tile's entries for query `row`, to[0] to to[kTile - 1]; those behind the ones loaded mean nothing.
    void score(const Problem& p, int64_t row, float* to) {
        if (row != row_) load_query(p, row);
        const float* weights = p.weights + row * p.heads;
        for (int64_t at = 0; at < kTile; at += kStep) {
            F total[kVectors] = {};
            for (int64_t head = 0; head < p.heads; head += kHeads) {
                F dot[kHeads][kVectors] = {};
                const float* q = query_ + head * kDim;
                for (int64_t d = 0; d < kDim; d++)
                    for (int64_t h = 0; h < kHeads; h++)
                        for (int64_t v = 0; v < kVectors; v++) {
                            const F keys = load<F>(tile_ + d * kTile + at + v * kLanes);
                            dot[h][v] = fma(all(q[h * kDim + d]), keys, dot[h][v]);
                        }
                for (int64_t h = 0; h < kHeads; h++)
                    for (int64_t v = 0; v < kVectors; v++)
                        total[v] = fma(all(weights[head + h]), at_least(dot[h][v], F{}), total[v]);
            }
            for (int64_t v = 0; v < kVectors; v++) store(to + at + v * kLanes, total[v]);
        }
    }

    // Of another call's problem.
    void forget_query() { row_ = -1; }

  private:
    // A word of each of kLanes keys that lie `bytes` apart.
    template <int... i>
    static ALWAYS U words(const uint8_t* first, int bytes, std::integer_sequence<int, i...>) {
#ifdef __AVX512F__
        return (U)_mm512_i32gather_epi32((__m512i)(U{i...} * bytes), first, 1);
#else
        return (U)F{load<float>(first + i * bytes)...};  // of fp32, or g++ goes through memory
#endif
    }

    // kLanes keys, side by side, to columns of the tile: value d of key i to to[d * kTile + i].
    static ALWAYS void decode_e2m1(const uint8_t* codes, const uint8_t* scales, float* to) {
        for (int64_t j = 0; j < kDim / 8; j++) {
            const U byte = load<U>(scales) >> 8 * (j / 4) & 255;  // 2^(byte - 127); a group of zeros may have 0
            U word = words(codes + 4 * j, kDim / 2, Lanes());
            for (int64_t d = 8 * j; d < 8 * j + 8; d++, word >>= 4) store(to + d * kTile, e2m1(word) * (F)(byte << 23));
        }
    }
    static ALWAYS void decode_e4m3(const uint8_t* codes, const uint8_t* scales, float* to) {
        const F scale = load<F>(scales) * (1 / kE4m3);
        for (int64_t j = 0; j < kDim / 4; j++) {
            U word = words(codes + 4 * j, kDim, Lanes());
            for (int64_t d = 4 * j; d < 4 * j + 4; d++, word >>= 8) store(to + d * kTile, e4m3(word) * scale);
        }
    }

    void load_query(const Problem& p, int64_t row) {
        const uint16_t* q = p.q + row * p.heads * kDim;
        for (int64_t i = 0; i < p.heads * kDim; i += kLanes) store(query_ + i, from_bf16(q + i));
        row_ = row;
    }

    static constexpr int64_t kMostHeads = 64;
    alignas(64) float tile_[kDim * kTile] = {};
    alignas(64) float query_[kMostHeads * kDim];
    int64_t row_ = -1;
};

}  // namespace indexer
