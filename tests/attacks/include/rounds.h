// The work of the problem rounds (tests/support/problems/rounds).  x, y: int64 (n,), as bits.
#pragma once
#include <cstdint>

constexpr int ROUNDS = 1000;

// y = x after ROUNDS rounds, of the elements [first, last).
inline void work(const uint64_t* x, uint64_t* y, int64_t first, int64_t last) {
    constexpr int AT_ONCE = 8;  // chains in flight, since each round waits for the one before
    for (int64_t i = first; i < last; i += AT_ONCE) {
        uint64_t v[AT_ONCE];
        const int count = last - i < AT_ONCE ? int(last - i) : AT_ONCE;
        for (int k = 0; k < AT_ONCE; ++k) v[k] = k < count ? x[i + k] : 0;
        for (int r = 0; r < ROUNDS; ++r)
            for (int k = 0; k < AT_ONCE; ++k) {
                v[k] = v[k] * 6364136223846793005u + 1442695040888963407u;
                v[k] ^= v[k] << 13;
            }
        for (int k = 0; k < count; ++k) y[i + k] = v[k];
    }
}
