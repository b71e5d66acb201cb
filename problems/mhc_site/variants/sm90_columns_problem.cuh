// The sizes and tensors of mhc_site, and the slots of a token's sums, for both forms of sm90_columns.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "tagged_words.cuh"

namespace columns {

constexpr int COPIES = 4;
constexpr int ROWS = 24;      // of fn: 4 of pre, 4 of post, 16 of comb
constexpr int PRODUCTS = 10;  // x'_j x'_k for j <= k, row by row
constexpr int ITERATIONS = 20;
constexpr float HC_EPS = 1e-6f, NORM_EPS = 1e-6f;

// The sums of a token over a block's columns:
//   slot   0-3            4-13        14, 15   16-19           20-35
//   sum    rows of pre    x'_j x'_k   none     rows of post    rows of comb
constexpr int PRODUCT_SLOT = COPIES, POST_SLOT = 16, COMB_SLOT = POST_SLOT + COPIES;
constexpr int SLOTS = COMB_SLOT + COPIES * COPIES;
constexpr int U_SLOTS = PRODUCT_SLOT + PRODUCTS;  // the first ones, all that u needs
constexpr int LANE_SLOTS = 32, HIGH_SLOTS = SLOTS - LANE_SLOTS;  // one a lane of a warp, and the others
static_assert(U_SLOTS <= POST_SLOT && HIGH_SLOTS == 4 && 32 % HIGH_SLOTS == 0, "see Sums");

__host__ __device__ constexpr int product_of(int j, int k) { return j * COPIES - j * (j - 1) / 2 + k - j; }
static_assert(product_of(COPIES - 1, COPIES - 1) == PRODUCTS - 1, "products lie row by row");
__device__ __forceinline__ int slot_of_row(int row) { return row < COPIES ? row : row + POST_SLOT - COPIES; }
__device__ __forceinline__ bool is_used(int slot) { return slot < U_SLOTS || slot >= POST_SLOT; }

// A table of up to 16 numbers below 16 as one word: a lookup, TABLE >> 4 * i & 15, waits for no memory.
template <class Word, int N>
__host__ __device__ constexpr Word pack_nibbles(const int (&values)[N]) {
    static_assert(4 * N <= 8 * sizeof(Word), "a nibble each");
    Word word = 0;
    for (int i = 0; i < N; ++i) word |= Word(values[i]) << 4 * i;
    return word;
}

// The tensors of task.Data, and how the launch is cut.
struct Problem {
    const void *y, *second;
    const __nv_bfloat16* copies;
    const float *post, *comb, *fn, *base, *scale;
    const __nv_bfloat16* norm;
    __nv_bfloat16 *new_copies, *out;
    float *new_post, *new_comb;
    tagged::State* state;
    uint64_t* exchange;
    int tokens, hidden;
    int y_bytes, second_bytes;  // of a value, 2 of bf16 or 4 of fp32; second 0: there is none
    uint32_t group_tiles;       // tiles of a group of tokens
    int early;                  // whether blocks may begin before the preceding kernel has ended
};

constexpr int STATE_WORDS = 16;  // of 8 bytes, in front of the exchange

inline Problem problem(void* const* t, uint64_t* exchange, int tokens, int hidden, int y_bytes, int second_bytes,
                       bool early) {
    auto bf16 = [&](int i) { return static_cast<__nv_bfloat16*>(t[i]); };
    auto fp32 = [&](int i) { return static_cast<float*>(t[i]); };
    return {t[0], t[1], bf16(2), fp32(3), fp32(4), fp32(5), fp32(6), fp32(7), bf16(8), bf16(9), bf16(10), fp32(11),
            fp32(12), reinterpret_cast<tagged::State*>(exchange), exchange + STATE_WORDS, tokens, hidden, y_bytes,
            second_bytes, 0, early};
}

}  // namespace columns
