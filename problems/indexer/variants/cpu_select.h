// The k highest of a row's scores, of equal ones those of the lower entries: a radix search for the k-th, 11, 11 and 10
// bits of scores that are mapped to integers of the same order.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu_problem.h"

namespace indexer {

// Integers that order as the scores do; -0 as 0.
inline uint32_t ordered(float score) {
    uint32_t bits;
    score += 0.0f;
    std::memcpy(&bits, &score, sizeof bits);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Replaces the scores of the entries that query `row` sees, more than k, by what they are ordered by, and writes the
// chosen places in the order of the entries.
inline void select(const Problem& p, int64_t row, float* scores) {
    const int64_t n = p.seen(row), b = row / p.queries;
    uint32_t* keys = reinterpret_cast<uint32_t*>(scores);
    for (int64_t i = 0; i < n; i++) {
        const uint32_t key = ordered(scores[i]);
        std::memcpy(scores + i, &key, sizeof key);
    }
    uint32_t prefix = 0, known = 0;  // the upper bits of the k-th key, and which they are
    int64_t left = p.topk;           // of the keys with this prefix, how many are chosen
    for (const int shift : {21, 10, 0}) {
        const uint32_t digits = shift == 0 ? 1024 : 2048;
        uint32_t count[2048] = {};
        for (int64_t i = 0; i < n; i++) {
            uint32_t key;
            std::memcpy(&key, keys + i, sizeof key);
            if ((key & known) == prefix) count[key >> shift & (digits - 1)]++;
        }
        uint32_t digit = digits - 1;
        for (; count[digit] < left; digit--) left -= count[digit];
        prefix |= digit << shift, known |= (digits - 1) << shift;
    }
    int32_t* to = p.out + row * p.topk;
    for (int64_t i = 0; i < n; i++) {
        uint32_t key;
        std::memcpy(&key, keys + i, sizeof key);
        if (key > prefix || (key == prefix && left-- > 0)) *to++ = static_cast<int32_t>(p.place(b, i));
    }
}

// The same for a query that sees at most k entries. Whether the table names pages for all.
inline bool take_all(const Problem& p, int64_t row) {
    const int64_t n = p.seen(row);
    int32_t* to = p.out + row * p.topk;
    bool good = true;
    for (int64_t i = 0; i < p.topk; i++) {
        const int64_t place = i < n ? p.place(row / p.queries, i) : -1;
        good = good && (i >= n || place >= 0);
        to[i] = static_cast<int32_t>(place);
    }
    return good;
}

}  // namespace indexer
