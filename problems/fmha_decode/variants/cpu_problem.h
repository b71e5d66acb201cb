// What the CPU variants work on: the tensors of a call, and the entries that its lists name.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace fmha {

constexpr int64_t kDim = 512;      // values of an entry, of a query and of an output
constexpr int64_t kNope = 448;     // of an entry's in e4m3, the first
constexpr int64_t kGroup = 64;     // e4m3 that share a scale
constexpr int64_t kPayload = 576;  // bytes of an entry: kNope codes, then bf16
constexpr int64_t kScales = 8;     // bytes of an entry, behind all payloads of a page

// One paged cache with the lists that name its entries, as in task.Data.
struct Cache {
    const uint8_t* pages;
    const int32_t* index;   // (rows, width)
    const int32_t* length;  // (batch,)
    int64_t width, page_entries, page_count;
};

struct Problem {
    const uint16_t* q;  // bf16 (rows, heads, kDim)
    Cache caches[2];    // window, compressed
    const float* sink;  // (heads,)
    uint16_t* out;      // bf16 (rows, heads, kDim)
    float* lse;         // (rows, heads)
    int64_t batch, queries, heads;

    // A launcher's arguments: the tensors of task.Data in order; the numbers of task.Sizes in order, then how many
    // pages either cache has.
    Problem(void* const* tensors, const int64_t* sizes)
        : q(static_cast<const uint16_t*>(tensors[0])),
          caches{cache(tensors + 1, sizes[3], sizes[5], sizes[7]), cache(tensors + 4, sizes[4], sizes[6], sizes[8])},
          sink(static_cast<const float*>(tensors[7])),
          out(static_cast<uint16_t*>(tensors[8])),
          lse(static_cast<float*>(tensors[9])),
          batch(sizes[0]),
          queries(sizes[1]),
          heads(sizes[2]) {}

    int64_t rows() const { return batch * queries; }
    int64_t most_entries() const { return caches[0].width + caches[1].width; }

  private:
    static Cache cache(void* const* t, int64_t width, int64_t page_entries, int64_t page_count) {
        return {static_cast<const uint8_t*>(t[0]),
                static_cast<const int32_t*>(t[1]),
                static_cast<const int32_t*>(t[2]),
                width,
                page_entries,
                page_count};
    }
};

// Where an entry lies.
struct Entry {
    const uint8_t *payload, *scales;
};

// The entries of a row in the order of its lists, holes left out.
struct List {
    std::vector<Entry> entries;  // as many as there may be, of which the first `count` hold
    int64_t count = 0;

    // Whether every index that counts is -1 or inside the pages.
    bool fill(const Problem& p, int64_t row) {
        Entry* to = entries.data();
        bool good = true;
        for (const Cache& cache : p.caches) {
            const int64_t per_page = cache.page_entries, shift = __builtin_ctzll(per_page);
            const int64_t stride = (per_page * (kPayload + kScales) + kPayload - 1) / kPayload * kPayload;
            const int32_t* index = cache.index + row * cache.width;
            const int64_t length = std::clamp<int64_t>(cache.length[row / p.queries], 0, cache.width);
            for (int64_t i = 0; i < length; i++) {
                const int64_t at = index[i], slot = at & (per_page - 1);
                if (at < 0 || at >= cache.page_count << shift) {
                    good = good && at == -1;
                    continue;
                }
                const uint8_t* page = cache.pages + (at >> shift) * stride;
                *to++ = {page + slot * kPayload, page + per_page * kPayload + slot * kScales};
            }
        }
        count = to - entries.data();
        return good;
    }
};

// Tiles of a list: as few as `most` entries a tile allow, equal but for the last, multiples of `step`.
struct Tiles {
    int64_t count = 0, size = 0;

    Tiles(int64_t entries, int64_t most, int64_t step) {
        if (!entries) return;
        const int64_t least = (entries + most - 1) / most;
        size = ((entries + least - 1) / least + step - 1) / step * step;
        count = (entries + size - 1) / size;
    }
};

}  // namespace fmha
