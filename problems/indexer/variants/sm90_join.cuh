// The k highest of a row's scores, by one block that reads them from memory, where blocks all over the GPU wrote them.
//
// Each thread takes EACH entries that lie side by side, in registers, and knows the largest of each quarter of them. At
// least k entries are as high as the k-th of these maxima, and not many more: with 4 k maxima about 1.2 k. So the maxima
// are counted in bins, not the scores, and what is at least the k-th is gathered in shared memory and searched there.
#pragma once

#include <cstdint>

#include "sm90_score.cuh"
#include "sm90_select.cuh"

namespace indexer {

constexpr int ROOM = 8192;  // scores that are gathered; where more are left, the search reads memory
constexpr int QUARTERS = 4;

// Where the score of entry i is: words that threads read together lie side by side. log_each: of EACH.
template <int THREADS>
__device__ __forceinline__ int stored_at(int i, int log_each) {
    const int within = i & (1 << log_each) - 1;
    return ((within >> 2) * THREADS + (i >> log_each)) * 4 + (within & 3);
}

// How many entries a thread takes, as a power of two: 8 to 64.
template <int THREADS>
__device__ __forceinline__ int log_each_of(int seen) {
    int log_each = 3;
    while (THREADS << log_each < seen) ++log_each;
    return log_each;
}

// The scores of a row in memory, in the order of the entries.
template <int THREADS>
struct Stored {
    const uint32_t* from;
    int log_each;

    __device__ __forceinline__ uint32_t operator[](int i) const { return __ldcg(from + stored_at<THREADS>(i, log_each)); }
};

// What was gathered of a row, in the order of the entries.
struct Gathered {
    uint32_t keys[ROOM];
    uint16_t entries[ROOM];
};

// Gather the scores that may be among the topk highest of `seen`, of which there are more. -> how many, which may be
// more than there was room for. begin() was called, s.lowest is ~0, and a barrier of the block followed.
template <int THREADS, int LOG_EACH>
__device__ __forceinline__ int gather(Search& s, Gathered& to, const uint32_t* scores, int seen, int topk) {
    constexpr int EACH = 1 << LOG_EACH, QUARTER = EACH / QUARTERS;
    const Cluster alone{0, 1};
    const int first = threadIdx.x << LOG_EACH;
    uint32_t keys[EACH], most[QUARTERS];
#pragma unroll
    for (int i = 0; i < EACH; i += 4) {
        const uint4 four = first + i < seen
                               ? __ldcg(reinterpret_cast<const uint4*>(scores) + i / 4 * THREADS + threadIdx.x)
                               : make_uint4(0, 0, 0, 0);
        keys[i] = four.x, keys[i + 1] = four.y, keys[i + 2] = four.z, keys[i + 3] = four.w;
    }
    if (first + EACH > seen) {
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (first + i >= seen) keys[i] = 0;  // below every score
    }
    Range range;
#pragma unroll
    for (int q = 0; q < QUARTERS; ++q) {
        most[q] = 0;
#pragma unroll
        for (int i = q * QUARTER; i < (q + 1) * QUARTER; ++i) most[q] = max(most[q], keys[i]);
        if (most[q]) range.take(most[q]);
    }
    uint32_t least = 1;
    if ((seen + QUARTER - 1) / QUARTER >= topk) {  // as many maxima as are to be chosen
        Bins bins = whole_range(s, range, alone);
        uint32_t need = topk;
        narrow<THREADS>(s, bins, need, true, [&](const Bins& bins) {
#pragma unroll
            for (int q = 0; q < QUARTERS; ++q)
                if (bins.has(most[q])) atomicAdd(&s.bins[bins.of(most[q])], 1);
            __syncthreads();
        });
        uint32_t lowest = ~0u;  // of the maxima in the bin and above
#pragma unroll
        for (int q = 0; q < QUARTERS; ++q)
            if (most[q] > bins.high || (bins.has(most[q]) && bins.of(most[q]) >= s.bin)) lowest = min(lowest, most[q]);
        lowest = __reduce_min_sync(~0u, lowest);
        if (threadIdx.x % WARP == 0) atomicMin(&s.lowest, lowest);
        __syncthreads();
        least = s.lowest;
        begin<THREADS>(s);  // for the next search; sum_before has a barrier
    }
    int count = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) count += keys[i] >= least;
    int at = sum_before<THREADS>(count, s.sums[0]);
    if (threadIdx.x == THREADS - 1) s.gathered = at + count;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        if (keys[i] >= least) {
            if (at < ROOM) to.keys[at] = keys[i], to.entries[at] = first + i;
            ++at;
        }
    }
    __syncthreads();
    return s.gathered;
}

}  // namespace indexer
