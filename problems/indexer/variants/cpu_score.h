// Scores of a tile of keys, in GCC's vector types: keys as fp32 with the entries along the lanes, so that heads add up
// without exchanging lanes.
//
// Before this is included, WIDE is the attribute that lets a function use the instructions of `Isa`, a struct with
//   kLanes                fp32 of a vector
//   kHeads, kVectors      heads, and vectors of entries, of a block of products
//   all(x), fma(a, b, c)  a vector of x; a * b + c
//   decode(codes, scales, fp8, to)  kTogether keys, side by side, to columns of a tile: value d of key i to[d * kTile + i]
#pragma once

#include <cstring>

#include "cpu_problem.h"
#include "cpu_vectors.h"

namespace indexer {

constexpr int64_t kTile = 64;  // entries of a tile: 32 KiB, for the first-level cache

// 2^(byte - 127); a group of zeros may have byte 0, where anything finite does.
inline float scale_of(uint8_t byte) {
    const uint32_t bits = static_cast<uint32_t>(byte) << 23;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

template <class Isa>
class Scorer : cpu::Arithmetic<Isa> {
  public:
    static constexpr int64_t kStep = Isa::kVectors * Isa::kLanes;  // entries of a block of products
    static_assert(kTile % kStep == 0);

    // `count` entries of sequence b from `first` on, to tile_. Whether the table names pages for all.
    WIDE bool load(const Problem& p, int64_t b, int64_t first, int64_t count) {
        for (int64_t i = 0; i < count; i += kTogether) {
            const int64_t place = p.place(b, first + i);
            if (place < 0) return false;
            Isa::decode(p.codes(place), p.scales(place), p.fp8, tile_ + i);
        }
        return true;
    }

    // Scores of the tile's entries for query `row`, to[0] to to[kTile - 1]; those behind the ones loaded mean nothing.
    WIDE void score(const Problem& p, int64_t row, float* to) {
        if (row != row_) load_query(p, row);
        const float* weights = p.weights + row * p.heads;
        for (int64_t at = 0; at < kTile; at += kStep) {
            F total[Isa::kVectors] = {};
            for (int64_t head = 0; head < p.heads; head += Isa::kHeads) {
                F dot[Isa::kHeads][Isa::kVectors] = {};
                const float* q = query_ + head * kDim;
                for (int64_t d = 0; d < kDim; d++)
                    for (int64_t h = 0; h < Isa::kHeads; h++)
                        for (int64_t v = 0; v < Isa::kVectors; v++)
                            dot[h][v] = Isa::fma(Isa::all(q[h * kDim + d]),
                                                 get(tile_ + d * kTile + at + v * Isa::kLanes), dot[h][v]);
                for (int64_t h = 0; h < Isa::kHeads; h++)
                    for (int64_t v = 0; v < Isa::kVectors; v++) {
                        const F zero = {}, relu = dot[h][v] > zero ? dot[h][v] : zero;
                        total[v] = Isa::fma(Isa::all(weights[head + h]), relu, total[v]);
                    }
            }
            for (int64_t v = 0; v < Isa::kVectors; v++) put(to + at + v * Isa::kLanes, total[v]);
        }
    }

    // Of another call's problem.
    void forget_query() { row_ = -1; }

  private:
    using A = cpu::Arithmetic<Isa>;
    using typename A::F;
    using A::get;
    using A::put;

    WIDE void load_query(const Problem& p, int64_t row) {
        const uint16_t* q = p.q + row * p.heads * kDim;
        for (int64_t i = 0; i < p.heads * kDim; i++) {
            const uint32_t bits = static_cast<uint32_t>(q[i]) << 16;
            std::memcpy(query_ + i, &bits, sizeof bits);
        }
        row_ = row;
    }

    static constexpr int64_t kMostHeads = 64;
    alignas(64) float tile_[kDim * kTile] = {};
    alignas(64) float query_[kMostHeads * kDim];
    int64_t row_ = -1;
};

}  // namespace indexer
