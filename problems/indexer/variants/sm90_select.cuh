// The k highest of a row's scores, by one block that holds them in registers, as ordered integers.
//
// One histogram usually does: BINS of equal width between the least and the largest score leave a handful in the bin of
// the k-th, and these are ranked. Where too many share that bin (equal scores, outliers), further histograms of their
// bits follow, 11 bits each, until few are left or all are equal. Of equal scores the first ones win.
//
// Scores are in registers since passes over them in shared memory were slow: behind each atomic operation the next load
// waits, and a pass of eight scores a thread took 1000 cycles and more.
#pragma once

#include <cstdint>

#include "ptx.cuh"
#include "sm90_score.cuh"
#include "warp.cuh"

namespace indexer {

constexpr int BINS = 2048;
constexpr int FEW = WARP;      // scores of a bin that are ranked one by one, each by a lane
constexpr int KEYS = 8;    // scores of a thread
constexpr int MOST_WARPS = 16;

struct Search {
    uint32_t bins[BINS];
    uint32_t counts[KEYS * MOST_WARPS];  // scores above the k-th and, times 2^16, equal to it, by key and by warp
    uint32_t few[FEW];                        // the scores in the bin
    uint32_t sums[WARP];                      // by warp
    uint32_t least, largest, inside;
    uint32_t bin, over, in_bin;  // found: the bin, how many scores are above it and in it
};

// Which bin a score of [low, high] falls into, in the order of the scores: by value, or by bits.
struct Bins {
    uint32_t low, high;
    float origin, scale;  // scale 0: by bits
    int shift;

    __device__ __forceinline__ bool has(uint32_t key) const { return key - low <= high - low; }
    // Of a score outside of the range: any number. Subtraction, multiplication and rounding down keep the order.
    __device__ __forceinline__ uint32_t of(uint32_t key) const {
        const uint32_t value = min(static_cast<uint32_t>((score_of(key) - origin) * scale), BINS - 1u);
        return scale == 0.0f ? (key - low) >> shift : value;
    }
    __device__ __forceinline__ static Bins of_bits(uint32_t low, uint32_t high) {
        return {low, high, 0.0f, 0.0f, max(0, 32 - __clz(static_cast<int>(high - low)) - 11)};
    }
    __device__ __forceinline__ static Bins of_values(uint32_t low, uint32_t high) {
        const float origin = score_of(low), width = score_of(high) - origin;
        if (!(width > 0x1p-100f && width < 0x1p100f)) return of_bits(low, high);
        return {low, high, origin, __fdividef(BINS, width), 0};
    }
};

// If `really`: one more at `counter`; and `key` at `to`, as many words on as `counter` was. Addresses in shared memory.
// Written so that no branch lies between two of them, and all are under way at once.
__device__ __forceinline__ void count_if(bool really, uint32_t counter) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n@p red.shared.add.u32 [%0], 1;\n}\n" ::"r"(counter),
                 "r"(static_cast<int>(really))
                 : "memory");
}
__device__ __forceinline__ void append_if(bool really, uint32_t key, uint32_t to, uint32_t counter) {
    asm volatile(
        "{\n.reg .pred p;\n.reg .b32 at;\nsetp.ne.b32 p, %3, 0;\n@p atom.shared.add.u32 at, [%0], 1;\n"
        "@p mad.lo.u32 at, at, 4, %1;\n@p st.shared.b32 [at], %2;\n}\n" ::"r"(counter),
        "r"(to), "r"(key), "r"(static_cast<int>(really))
        : "memory");
}

template <int THREADS>
__device__ __forceinline__ void clear(Search& s) {
    #pragma unroll
    for (int i = 0; i < BINS / 4; i += THREADS)
        if (i + threadIdx.x < BINS / 4) reinterpret_cast<uint4*>(s.bins)[i + threadIdx.x] = make_uint4(0, 0, 0, 0);
}

// Find the bin with the `need`-th score from above: s.bin, s.over and s.in_bin. Ends with a barrier.
template <int THREADS>
__device__ __forceinline__ void find_bin(Search& s, uint32_t need) {
    constexpr int EACH = THREADS < BINS / 4 ? BINS / THREADS : 4;
    static_assert(EACH * THREADS >= BINS && EACH % 4 == 0, "whole threads");
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, first = BINS - EACH * (threadIdx.x + 1);
    uint32_t here[EACH], sum = 0;
#pragma unroll
    for (int i = 0; i < EACH; i += 4) {
        const uint4 four = first < 0 ? make_uint4(0, 0, 0, 0) : *reinterpret_cast<const uint4*>(s.bins + first + i);
        here[i] = four.x, here[i + 1] = four.y, here[i + 2] = four.z, here[i + 3] = four.w;
        sum += four.x + four.y + four.z + four.w;
    }
    const uint32_t upto = warps::sum_up_to(sum, lane);
    if (lane == WARP - 1) s.sums[warp] = upto;
    __syncthreads();
    uint32_t over = upto - sum + __reduce_add_sync(~0u, lane < warp ? s.sums[lane] : 0);
#pragma unroll
    for (int i = EACH - 1; i >= 0; --i) {
        if (over < need && over + here[i] >= need) s.bin = first + i, s.over = over, s.in_bin = here[i];
        over += here[i];
    }
    __syncthreads();
}

// The `need`-th largest of `many` scores, at most FEW, and how many are larger: by a warp, for all its lanes.
__device__ __forceinline__ uint32_t ranked(const uint32_t* scores, uint32_t many, uint32_t need, uint32_t& larger) {
    const uint32_t lane = threadIdx.x % WARP, key = lane < many ? scores[lane] : 0;
    uint32_t above = 0, least = 0;
#pragma unroll 4
    for (uint32_t j = 0; j < many; ++j) above += scores[j] > key, least += scores[j] >= key;
    const uint32_t last = __reduce_max_sync(~0u, above < need && least >= need ? key : 0);
    larger = __popc(__ballot_sync(~0u, key > last));
    return last;
}

// The range of scores that a search looks at: all others are left out.
struct Range {
    uint32_t least, largest;
};

// The range of the block's scores, those that are 0 left out.
template <int THREADS>
__device__ __forceinline__ Range range_of(Search& s, const uint32_t (&keys)[KEYS]) {
    uint32_t least = ~0u, largest = 0;
#pragma unroll
    for (int j = 0; j < KEYS; ++j) {
        largest = max(largest, keys[j]);
        least = min(least, keys[j] - 1);  // 0 becomes the largest number
    }
    if (threadIdx.x == 0) s.least = ~0u, s.largest = 0;
    __syncthreads();
    least = __reduce_min_sync(~0u, least), largest = __reduce_max_sync(~0u, largest);
    if (threadIdx.x % WARP == 0) atomicMin(&s.least, least), atomicMax(&s.largest, largest);
    __syncthreads();
    return {s.least + 1, s.largest};
}

// Choose the topk highest scores of a range; it has at least as many. Key j of thread t is score j * THREADS + t; 0
// where there is none. found: the numbers of the chosen scores, ascending. -> the topk-th score. All threads of the
// block call it; it ends with a barrier.
template <int THREADS>
__device__ __forceinline__ uint32_t select(Search& s, const uint32_t (&keys)[KEYS], uint32_t topk, const Range& range,
                                           int* found) {
    constexpr int WARPS = THREADS / WARP;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const uint32_t counts = ptx::smem_address(s.bins);
    Bins bins = Bins::of_values(range.least, range.largest);
    uint32_t need = topk;
    if (threadIdx.x == 0) s.inside = 0;
    bool few;
#pragma unroll 1
    while (true) {
        clear<THREADS>(s);
        __syncthreads();
#pragma unroll
        for (int j = 0; j < KEYS; ++j) count_if(bins.has(keys[j]), counts + bins.of(keys[j]) % BINS * 4);
        __syncthreads();
        find_bin<THREADS>(s, need);
        few = s.in_bin <= FEW;
        if (few || (bins.scale == 0.0f && bins.shift == 0)) break;
        if (bins.scale != 0.0f) {
            bins = Bins::of_bits(bins.low, bins.high);
        } else {
            need -= s.over;
            const uint32_t low = bins.low + (s.bin << bins.shift), width = (1u << bins.shift) - 1;
            bins = Bins::of_bits(low, min(bins.high, low + width));
        }
    }
    need -= s.over;
    uint32_t last = bins.low + s.bin, quota = need;  // of equal scores
    if (few) {
        const uint32_t bin = s.bin, to = ptx::smem_address(s.few), inside = ptx::smem_address(&s.inside);
#pragma unroll
        for (int j = 0; j < KEYS; ++j)
            append_if(bins.has(keys[j]) & (bins.of(keys[j]) == bin), keys[j], to, inside);
        __syncthreads();
        uint32_t larger;
        last = ranked(s.few, s.in_bin, need, larger);
        quota = need - larger;
    }
#pragma unroll
    for (int j = 0; j < KEYS; ++j) {
        const uint32_t over = __ballot_sync(~0u, keys[j] > last), same = __ballot_sync(~0u, keys[j] == last);
        if (lane == 0) s.counts[j * WARPS + warp] = __popc(over) | __popc(same) << 16;
    }
    __syncthreads();
    if (warp == 0) {  // what is before, instead of what is there
        constexpr int EACH = KEYS * WARPS / WARP;
        uint32_t sum = 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) sum += s.counts[lane * EACH + i];
        uint32_t before = warps::sum_up_to(sum, lane) - sum;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const uint32_t here = s.counts[lane * EACH + i];
            s.counts[lane * EACH + i] = before;
            before += here;
        }
    }
    __syncthreads();
    const uint32_t before = (1u << lane) - 1;
#pragma unroll
    for (int j = 0; j < KEYS; ++j) {
        const bool is_over = keys[j] > last, is_same = keys[j] == last;
        const uint32_t overs = __ballot_sync(~0u, is_over), sames = __ballot_sync(~0u, is_same);
        const uint32_t at = s.counts[j * WARPS + warp];
        const uint32_t equals = (at >> 16) + __popc(sames & before);
        if (is_over || (is_same && equals < quota))
            found[(at & 0xFFFF) + __popc(overs & before) + min(equals, quota)] = j * THREADS + threadIdx.x;
    }
    __syncthreads();
    return last;
}

}  // namespace indexer
