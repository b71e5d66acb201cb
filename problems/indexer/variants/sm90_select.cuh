// The k highest of a row's scores, of which each block of a cluster holds a slice in shared memory as ordered integers.
//
// One histogram usually does: BINS of equal width between the row's least and largest score leave a handful of scores in
// the bin of the k-th. Each block adds up a part of the bins over all blocks and tells all; all find the bin, exchange the
// scores in it, and rank them. Where too many share that bin (equal scores, outliers), further histograms of their bits
// follow, 11 bits each, until few are left or all are equal. Blocks write to each other's shared memory and read it only
// between cluster barriers, and nothing depends on the order in which they do. Slices ascend with the rank of the block,
// so that of equal scores the first ones win.
#pragma once

#include <cstdint>

#include "ptx.cuh"
#include "sm90_score.cuh"
#include "warp.cuh"

#ifndef SEARCH_UNROLL
#define SEARCH_UNROLL 1
#endif

namespace indexer {

constexpr int UNROLL = SEARCH_UNROLL;
constexpr int BINS = 2048;
constexpr int FEW = 128;      // scores of a bin that are ranked one by one
constexpr int MOST_BLOCKS = 16;  // of a cluster

// Of a block, beside its slice.
struct Search {
    uint32_t bins[BINS];                 // of this slice; other blocks read it
    uint32_t total[BINS];                // of the row; other blocks write it
    uint32_t range[MOST_BLOCKS][2];      // least and largest score of each slice; other blocks write it
    uint32_t counts[MOST_BLOCKS][2];     // of each slice, scores above the bin and in it; likewise
    uint32_t few[MOST_BLOCKS][FEW];      // the scores in the bin of each slice; likewise
    uint32_t mine[FEW];                  // of this slice
    uint32_t all[FEW];
    uint32_t sums[2][WARP];              // by warp
    uint32_t least, largest, above, inside;  // of this slice
    uint32_t bin, over, in_bin;          // found: the bin, how many scores are above it and in it
    uint32_t last, base, quota;          // the k-th score; this slice's first place, and how many equals it may choose
    uint64_t arrived;                    // where one block gets all scores: a barrier that counts their bytes
};

// Store to another block's shared memory, and count the bytes at a barrier there.
__device__ __forceinline__ void store_counted(uint32_t to, uint32_t v, uint32_t barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to), "r"(v),
                 "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void store_cluster(uint32_t to, uint32_t v) {
    asm volatile("st.shared::cluster.b32 [%0], %1;" ::"r"(to), "r"(v) : "memory");
}

// This block's part in the cluster.
struct Cluster {
    int rank, size;

    __device__ __forceinline__ void sync() const {
        if (size == 1) __syncthreads();
        else ptx::cluster_sync();
    }
    // Between the two all blocks have begun, so that their shared memory may be written.
    __device__ __forceinline__ void say_begun() const {
        if (size > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    }
    __device__ __forceinline__ void wait_begun() const {
        if (size > 1) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    }
    // `at` of this block's shared memory, in that of block `rank`.
    __device__ __forceinline__ uint32_t in(int rank, const void* at) const {
        return ptx::in_block(rank, ptx::smem_address(at));
    }
};

// Which bin a score of [low, high] falls into, in the order of the scores: by value, or by bits.
struct Bins {
    uint32_t low, high;
    float origin, scale;  // scale 0: by bits
    int shift;

    __device__ __forceinline__ bool has(uint32_t key) const { return key >= low && key <= high; }
    __device__ __forceinline__ uint32_t of(uint32_t key) const {
        if (scale == 0.0f) return (key - low) >> shift;
        // Subtraction, multiplication and rounding down keep the order.
        return min(static_cast<uint32_t>((score_of(key) - origin) * scale), BINS - 1u);
    }
    __device__ __forceinline__ static Bins by_bits(uint32_t low, uint32_t high) {
        return {low, high, 0.0f, 0.0f, max(0, 32 - __clz(static_cast<int>(high - low)) - 11)};
    }
    __device__ __forceinline__ static Bins by_value(uint32_t low, uint32_t high) {
        const float origin = score_of(low), width = score_of(high) - origin;
        if (!(width > 0x1p-100f && width < 0x1p100f)) return by_bits(low, high);
        return {low, high, origin, __fdividef(BINS, width), 0};
    }
};

template <int THREADS>
__device__ __forceinline__ void clear(Search& s) {
#pragma unroll
    for (int i = 0; i < BINS; i += THREADS) s.bins[i + threadIdx.x] = 0;
}

// Clear what a search counts in. All threads; a block barrier must follow.
template <int THREADS>
__device__ __forceinline__ void begin(Search& s) {
    clear<THREADS>(s);
    if (threadIdx.x == 0) s.least = ~0u, s.largest = 0, s.above = 0, s.inside = 0;
}

// Exchange the slices' least and largest scores, of which each thread knows some. -> bins between those of the row.
__device__ __forceinline__ Bins whole_range(Search& s, const Range& range, Cluster cluster) {
    uint32_t least = __reduce_min_sync(~0u, range.least), largest = __reduce_max_sync(~0u, range.largest);
    if (threadIdx.x % WARP == 0) atomicMin(&s.least, least), atomicMax(&s.largest, largest);
    __syncthreads();
    if (cluster.size == 1) return Bins::by_value(s.least, s.largest);
    cluster.wait_begun();
    if (threadIdx.x < cluster.size) {
        store_cluster(cluster.in(threadIdx.x, &s.range[cluster.rank][0]), s.least);
        store_cluster(cluster.in(threadIdx.x, &s.range[cluster.rank][1]), s.largest);
    }
    cluster.sync();
#pragma unroll 1
    for (int r = 0; r < cluster.size; ++r) least = min(least, s.range[r][0]), largest = max(largest, s.range[r][1]);
    return Bins::by_value(least, largest);
}

// Count this slice's scores by bin, then add up over the cluster into `total` of every block, and clear the bins again.
// By a block that is alone, `bins` keeps the counts.
template <int THREADS, class Keys>
__device__ __forceinline__ void histogram(Search& s, const Keys& keys, int count, const Bins& bins,
                                          Cluster cluster) {
#pragma unroll UNROLL
    for (int i = threadIdx.x; i < count; i += THREADS) {
        const uint32_t key = keys[i];
        if (bins.has(key)) atomicAdd(&s.bins[bins.of(key)], 1);
    }
    cluster.sync();
    if (cluster.size == 1) return;
    const int part = BINS / cluster.size;
#pragma unroll 1
    for (int i = cluster.rank * part + threadIdx.x; i < (cluster.rank + 1) * part; i += THREADS) {
        uint32_t of[MOST_BLOCKS], sum = 0;
#pragma unroll
        for (int r = 0; r < MOST_BLOCKS; ++r)  // all under way at once
            of[r] = r < cluster.size ? ptx::load_cluster(cluster.in(r, &s.bins[i])) : 0;
#pragma unroll
        for (int r = 0; r < MOST_BLOCKS; ++r) sum += of[r];
#pragma unroll
        for (int r = 0; r < MOST_BLOCKS; ++r)
            if (r < cluster.size) store_cluster(cluster.in(r, &s.total[i]), sum);
    }
    cluster.sync();
    clear<THREADS>(s);
}

// The sum of `value` over this thread and all before it, and over all threads; `sums` is overwritten.
template <int THREADS>
__device__ __forceinline__ uint32_t sum_before(uint32_t value, uint32_t (&sums)[WARP]) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const uint32_t upto = warps::sum_up_to(value, lane);
    if (lane == WARP - 1) sums[warp] = upto;
    __syncthreads();
    return upto - value + __reduce_add_sync(~0u, lane < warp ? sums[lane] : 0);
}

// Find the bin with the `need`-th score from above: s.bin, s.over and s.in_bin.
template <int THREADS>
__device__ __forceinline__ void find_bin(Search& s, const uint32_t* total, uint32_t need) {
    constexpr int EACH = BINS / THREADS;
    const int top = BINS - 1 - threadIdx.x * EACH;
    uint32_t sum = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) sum += total[top - i];
    uint32_t over = sum_before<THREADS>(sum, s.sums[0]);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const uint32_t here = total[top - i];
        if (over < need && over + here >= need) s.bin = top - i, s.over = over, s.in_bin = here;
        over += here;
    }
    __syncthreads();
}

// Find the bin of the `need`-th score, in ever smaller bins, until few scores share it, or equal ones only. count(bins)
// adds up the scores in `bins` over the row, all threads, and ends with a barrier. bins, need: those that were found.
// -> whether few share it. The counts are s.over and s.in_bin.
template <int THREADS, class Count>
__device__ __forceinline__ bool narrow(Search& s, Bins& bins, uint32_t& need, bool alone, const Count& count) {
#pragma unroll 1
    while (true) {
        count(bins);
        find_bin<THREADS>(s, alone ? s.bins : s.total, need);
        const bool few = s.in_bin <= FEW;
        if (few || (bins.scale == 0.0f && bins.shift == 0)) return few;
        if (bins.scale != 0.0f) {
            bins = Bins::by_bits(bins.low, bins.high);
        } else {
            need -= s.over;
            const uint32_t low = bins.low + (s.bin << bins.shift), width = (1u << bins.shift) - 1;
            bins = Bins::by_bits(low, min(bins.high, low + width));
        }
        if (alone) clear<THREADS>(s);
        __syncthreads();  // the bins are clear, and s.bin was read by all
    }
}

// Tell all blocks how many scores of this slice are above the bin and in it, and which, if `ranked`.
template <int THREADS, class Keys>
__device__ __forceinline__ void exchange(Search& s, const Keys& keys, int count, const Bins& bins, bool ranked,
                                         Cluster cluster) {
    uint32_t above = 0, inside = 0;
#pragma unroll UNROLL
    for (int i = threadIdx.x; i < count; i += THREADS) {
        const uint32_t key = keys[i], bin = bins.has(key) ? bins.of(key) : 0;
        above += key > bins.high || (key >= bins.low && bin > s.bin);
        if (bins.has(key) && bin == s.bin) {
            if (ranked) s.mine[atomicAdd(&s.inside, 1)] = key;
            else inside++;
        }
    }
    above = __reduce_add_sync(~0u, above), inside = __reduce_add_sync(~0u, inside);
    if (threadIdx.x % WARP == 0) {
        atomicAdd(&s.above, above);
        if (!ranked) atomicAdd(&s.inside, inside);
    }
    __syncthreads();
    if (cluster.size == 1) return;
    if (threadIdx.x < cluster.size) {
        store_cluster(cluster.in(threadIdx.x, &s.counts[cluster.rank][0]), s.above);
        store_cluster(cluster.in(threadIdx.x, &s.counts[cluster.rank][1]), s.inside);
    }
    const int words = ranked ? s.inside * cluster.size : 0;
    for (int i = threadIdx.x; i < words; i += THREADS) {
        const int r = i % cluster.size, j = i / cluster.size;
        store_cluster(cluster.in(r, &s.few[cluster.rank][j]), s.mine[j]);
    }
    cluster.sync();
}

// The `need`-th largest of `many` scores, by one warp.
__device__ __forceinline__ uint32_t ranked_score(const uint32_t* scores, uint32_t many, uint32_t need) {
    uint32_t last = 0;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < many; i += WARP) {
        const uint32_t key = scores[i];
        uint32_t above = 0, least = 0;
#pragma unroll UNROLL
        for (uint32_t j = 0; j < many; ++j) above += scores[j] > key, least += scores[j] >= key;
        if (above < need && least >= need) last = key;
    }
    return __reduce_max_sync(~0u, last);
}

// By the first warp: the k-th score, where this slice's places begin, and how many of its scores equal to the k-th are
// chosen. `need`: of the scores in the bin, how many are chosen. equal: the score of the bin, if all in it are the same.
__device__ __forceinline__ void rank(Search& s, uint32_t need, bool ranked, uint32_t equal, uint32_t topk,
                                     Cluster cluster) {
    const int lane = threadIdx.x;
    const uint32_t held = lane < cluster.size ? s.counts[lane][1] : 0;
    uint32_t over = lane < cluster.size ? s.counts[lane][0] : 0, same = held, last = equal;
    if (ranked) {
        const uint32_t start = warps::sum_up_to(held, lane) - held, many = __shfl_sync(~0u, start + held, WARP - 1);
#pragma unroll 1
        for (uint32_t j = 0; j < held; ++j) s.all[start + j] = s.few[lane][j];
        __syncwarp();
        last = ranked_score(s.all, many, need);
        same = 0;
#pragma unroll 1
        for (uint32_t j = 0; j < held; ++j) over += s.few[lane][j] > last, same += s.few[lane][j] == last;
    }
    const uint32_t left = topk - __reduce_add_sync(~0u, over);  // equals that are chosen
    const uint32_t over_before = warps::sum_up_to(over, lane) - over, same_before = warps::sum_up_to(same, lane) - same;
    if (lane == cluster.rank) {
        s.last = last;
        s.base = over_before + min(left, same_before);
        s.quota = left - min(left, same_before);
    }
}

// The same for a block that is alone.
__device__ __forceinline__ void rank_alone(Search& s, uint32_t need, bool ranked, uint32_t equal, uint32_t topk) {
    const uint32_t many = s.inside, last = ranked ? ranked_score(s.mine, many, need) : equal;
    uint32_t over = 0;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; ranked && i < many; i += WARP) over += s.mine[i] > last;
    over = __reduce_add_sync(~0u, over);
    if (threadIdx.x == 0) s.last = last, s.base = 0, s.quota = topk - s.above - over;
}

// put(i, place) for each chosen score i of this slice, in their order; place: in the row's output.
template <int THREADS, class Keys, class Put>
__device__ __forceinline__ void compact(Search& s, const Keys& keys, int count, const Put& put) {
    constexpr int WARPS = THREADS / WARP;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int each = (count + WARPS * WARP - 1) / (WARPS * WARP) * WARP;  // scores of a warp, in one piece
    const int first = min(warp * each, count), end = min(first + each, count);
    const uint32_t last = s.last, quota = s.quota, before = (1u << lane) - 1;
    uint32_t over = 0, same = 0;
#pragma unroll UNROLL
    for (int i = first + lane; i < end; i += WARP) over += keys[i] > last, same += keys[i] == last;
    over = __reduce_add_sync(~0u, over), same = __reduce_add_sync(~0u, same);
    if (lane == 0) s.sums[0][warp] = over, s.sums[1][warp] = same;
    __syncthreads();
    over = __reduce_add_sync(~0u, lane < warp ? s.sums[0][lane] : 0);
    same = __reduce_add_sync(~0u, lane < warp ? s.sums[1][lane] : 0);
#pragma unroll UNROLL
    for (int i = first; i < end; i += WARP) {
        const bool inside = i + lane < end;
        const uint32_t key = inside ? keys[i + lane] : 0;
        const bool is_over = inside && key > last, is_same = inside && key == last;
        const uint32_t overs = __ballot_sync(~0u, is_over), sames = __ballot_sync(~0u, is_same);
        const uint32_t equals = same + __popc(sames & before);
        if (is_over || (is_same && equals < quota)) put(i + lane, s.base + over + __popc(overs & before) + min(equals, quota));
        over += __popc(overs), same += __popc(sames);
    }
}

// Choose the topk highest of the cluster's scores; there are more. begin() was called and the slices are written, by
// threads of which each knows a range of what it wrote, all together that of the slice; cluster.say_begun() was called,
// but where the block is alone. put: as compact's.
template <int THREADS, class Keys, class Put>
__device__ __forceinline__ void select(Search& s, const Keys& keys, int count, uint32_t topk, const Range& range,
                                       Cluster cluster, const Put& put) {
    Bins bins = whole_range(s, range, cluster);
    uint32_t need = topk;
    const bool ranked = narrow<THREADS>(s, bins, need, cluster.size == 1, [&](const Bins& bins) {
        histogram<THREADS>(s, keys, count, bins, cluster);
    });
    need -= s.over;
    const uint32_t equal = bins.low + s.bin;
    exchange<THREADS>(s, keys, count, bins, ranked, cluster);
    if (threadIdx.x < WARP) {
        if (cluster.size == 1) rank_alone(s, need, ranked, equal, topk);
        else rank(s, need, ranked, equal, topk, cluster);
    }
    __syncthreads();
    compact<THREADS>(s, keys, count, put);
}

}  // namespace indexer
