// What the CPU variants work on: the tensors of a call, and where a sequence's keys lie.
#pragma once

#include <algorithm>
#include <cstdint>

namespace indexer {

constexpr int64_t kDim = 128;    // values of a key and of a query's head
constexpr int64_t kGroup = 32;   // values of an mxfp4 key that share a scale
constexpr int64_t kScales = 4;   // bytes of a key's scales
constexpr int64_t kTogether = 16;  // keys that lie side by side in a page, from a multiple of it on

struct Problem {
    const uint16_t* q;     // bf16 (batch, queries, heads, kDim)
    const float* weights;  // (batch, queries, heads)
    const uint8_t* keys;   // (pages, stride)
    const int32_t *table, *visible;
    int32_t* out;  // (batch, queries, topk)
    int64_t batch, queries, heads, topk, blocks, per_page, pages;
    bool fp8;

    // A launcher's arguments: the tensors of task.Data in order; the numbers of task.Sizes in order, 1 for fp8 as the
    // kind, then how many pages there are.
    Problem(void* const* tensors, const int64_t* sizes)
        : q(static_cast<const uint16_t*>(tensors[0])),
          weights(static_cast<const float*>(tensors[1])),
          keys(static_cast<const uint8_t*>(tensors[2])),
          table(static_cast<const int32_t*>(tensors[3])),
          visible(static_cast<const int32_t*>(tensors[4])),
          out(static_cast<int32_t*>(tensors[5])),
          batch(sizes[0]),
          queries(sizes[1]),
          heads(sizes[2]),
          topk(sizes[3]),
          blocks(sizes[4]),
          per_page(sizes[5]),
          pages(sizes[7]),
          fp8(sizes[6] != 0) {}

    int64_t rows() const { return batch * queries; }
    int64_t code_bytes() const { return fp8 ? kDim : kDim / 2; }
    // Entries that query `row` sees.
    int64_t seen(int64_t row) const { return std::clamp<int64_t>(visible[row], 0, blocks * per_page); }
    // Entries that have to be scored for it: none where all are chosen.
    int64_t scored(int64_t row) const { return seen(row) > topk ? seen(row) : 0; }

    // The place of entry i of sequence b; negative if the table names no page.
    int64_t place(int64_t b, int64_t i) const {
        const int64_t page = table[b * blocks + i / per_page];
        return page < 0 || page >= pages ? -1 : page * per_page + i % per_page;
    }
    const uint8_t* page_of(int64_t place) const {
        return keys + place / per_page * per_page * (code_bytes() + kScales);
    }
    const uint8_t* codes(int64_t place) const { return page_of(place) + place % per_page * code_bytes(); }
    const uint8_t* scales(int64_t place) const {
        return page_of(place) + per_page * code_bytes() + place % per_page * kScales;
    }
};

}  // namespace indexer
