// The k highest of a row's scores, by one block that holds them in registers.
//
// One histogram usually does: BINS of equal width between a lower bound of the k-th score and the largest one leave a
// handful in the bin of the k-th, and these are ranked. Where too many share that bin (equal scores, outliers), further
// histograms of their bits follow, 11 bits each, until few are left or all are equal. Of equal scores the first win.
//
// A block with 16 warps is bound by the instructions that it issues, 4 cycles for each instruction of all warps. So a
// thread loads and compares runs of scores that lie side by side: a run has one address, not one a score.
#pragma once

#include <cstdint>

#include "ptx.cuh"
#include "sm90_score.cuh"
#include "warp.cuh"

namespace indexer {

constexpr int BINS = 2048;
constexpr int FEW = WARP;  // scores of a bin that are ranked one by one, each by a lane
constexpr int RUN = 8;     // scores that lie side by side
constexpr int NO_BIN = 0x4B000000;  // the bits of 2^23: bin i is this plus i

struct Search {
    uint32_t unused[WARP];  // bins -32 to -1
    uint32_t bins[BINS];
    uint64_t few[FEW];                  // the scores in the bin: ordered score, then the complement of the number
    uint2 ranges[WARP];                 // by warp: the least and the largest ordered score
    uint32_t sums[WARP], equals[WARP];  // by warp
    // Found: the bin, how many scores are above it and in it. One load of 16 bytes reads them, and no other word.
    alignas(16) uint32_t bin;
    uint32_t over, in_bin;
    alignas(16) uint32_t inside;  // scores in `few`
    uint32_t place;               // of this block among those of its row that are done
};

// Ordered scores between which the k-th is; largest is that of all.
struct Range {
    uint32_t least, largest;
};

// Scores of a thread: run r of lane l in warp w has the number (w * used + r) * 32 + l. RUNS, 1, 2 or 4, is the most of
// a thread, and no more than needed: code for others takes time even where it is skipped.
template <int RUNS>
struct Runs {
    float score[RUNS][RUN];  // -inf: none
    int first[RUNS];         // where the run begins in memory
    int used;                // runs of a thread in this search
    __device__ __forceinline__ static int number(int r, int used) {
        return (threadIdx.x / WARP * used + r) * WARP + threadIdx.x % WARP;
    }
};

// Load `count` runs of scores; run i begins at first_of(i).
template <int THREADS, int RUNS, class First>
__device__ __forceinline__ void load_runs(Runs<RUNS>& runs, const float* scores, int count,
                                          const First& first_of) {
    runs.used = RUNS == 1 ? 1 : (count + THREADS - 1) / THREADS;
    const float none = -__int_as_float(0x7F800000);
#pragma unroll
    for (int r = 0; r < RUNS; ++r) {
        const int number = Runs<RUNS>::number(r, runs.used);
        const bool really = r < runs.used && number < count;
        const int first = really ? first_of(number) : 0;
        runs.first[r] = first;
#pragma unroll
        for (int i = 0; i < RUN; i += 4) {
            float4 four = make_float4(none, none, none, none);
            if (really) four = *reinterpret_cast<const float4*>(scores + first + i);
            runs.score[r][i] = four.x, runs.score[r][i + 1] = four.y;
            runs.score[r][i + 2] = four.z, runs.score[r][i + 3] = four.w;
        }
    }
}

// One more in a bin. `bin`: its address in shared memory. No branch around it: for a score that does not count a lane
// has a word of `unused`.
__device__ __forceinline__ void count_in(uint32_t bin) {
    asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(bin) : "memory");
}

template <int THREADS>
__device__ __forceinline__ void clear(Search& s) {
#pragma unroll
    for (int i = 0; i < BINS / 4; i += THREADS)
        if (i + threadIdx.x < BINS / 4) reinterpret_cast<uint4*>(s.bins)[i + threadIdx.x] = make_uint4(0, 0, 0, 0);
    if (threadIdx.x == 0) s.inside = 0;
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
    if (over < need && over + sum >= need) {
#pragma unroll
        for (int i = EACH - 1; i >= 0; --i) {
            if (over < need && over + here[i] >= need) s.bin = first + i, s.over = over, s.in_bin = here[i];
            over += here[i];
        }
    }
    __syncthreads();
}

// The least and the largest of the block's pairs. Has a barrier inside.
template <int THREADS>
__device__ __forceinline__ Range range_of_block(Search& s, uint32_t least, uint32_t largest) {
    const int lane = threadIdx.x % WARP;
    least = __reduce_min_sync(~0u, least), largest = __reduce_max_sync(~0u, largest);
    if (lane == 0) s.ranges[threadIdx.x / WARP] = make_uint2(least, largest);
    __syncthreads();
    const uint2 pair = lane < THREADS / WARP ? s.ranges[lane] : make_uint2(~0u, 0);
    return {__reduce_min_sync(~0u, pair.x), __reduce_max_sync(~0u, pair.y)};
}

// A lower bound of the k-th score, and the largest score. Has a barrier inside.
template <int THREADS, int RUNS>
__device__ __forceinline__ Range range_of(Search& s, const Runs<RUNS>& runs, int count, uint32_t topk) {
    const float infinity = __int_as_float(0x7F800000);
    float largest = -infinity, least = infinity;
#pragma unroll
    for (int r = 0; r < RUNS; ++r) {
        if (r < runs.used) {
            float of_run = runs.score[r][0];
#pragma unroll
            for (int i = 1; i < RUN; ++i) of_run = fmaxf(of_run, runs.score[r][i]);
            largest = fmaxf(largest, of_run);
            least = fminf(least, of_run > -infinity ? of_run : infinity);
        }
    }
    // The largest scores of k threads, or of k runs, are k scores, so the least of them bounds the k-th.
    if ((count + runs.used - 1) / runs.used >= static_cast<int>(topk)) {
        least = largest > -infinity ? largest : infinity;
    } else if (count < static_cast<int>(topk)) {
#pragma unroll
        for (int r = 0; r < RUNS; ++r) {
            if (r < runs.used) {
#pragma unroll
                for (int i = 0; i < RUN; ++i)
                    least = fminf(least, runs.score[r][i] > -infinity ? runs.score[r][i] : infinity);
            }
        }
    }
    return range_of_block<THREADS>(s, ordered(least), ordered(largest));
}

// Narrow [low, high], ordered scores with the `need`-th from above among them, by their bits, until few are in it or
// all are equal. -> how many are in it. need: becomes the number wanted of them. Ends with a barrier.
template <int THREADS, int RUNS>
__device__ __forceinline__ uint32_t narrow(Search& s, const Runs<RUNS>& runs, uint32_t& low, uint32_t& high,
                                           uint32_t& need) {
    const uint32_t bins = ptx::smem_address(s.bins);
    const int unused = -1 - static_cast<int>(threadIdx.x % WARP);
    int shift = 32 - __clz(static_cast<int>(high - low));  // bits in which they differ
#pragma unroll 1
    do {
        shift = max(0, shift - 11);
        clear<THREADS>(s);
        __syncthreads();
#pragma unroll
        for (int r = 0; r < RUNS; ++r) {
            if (r < runs.used) {
#pragma unroll
                for (int i = 0; i < RUN; ++i) {
                    const uint32_t above = ordered(runs.score[r][i]) - low;
                    count_in(bins + (above <= high - low ? static_cast<int>(above >> shift) : unused) * 4);
                }
            }
        }
        __syncthreads();
        find_bin<THREADS>(s, need);
        need -= s.over;
        low += s.bin << shift, high = min(high, low + (1u << shift) - 1);
    } while (s.in_bin > FEW && shift > 0);
    return s.in_bin;
}

// What a thread chose of its runs, bit 8 r + i for score i of run r, and how many the warps before it chose.
struct Chosen {
    uint32_t bits, before;
};

// How many of a thread's `bits` the lanes before it have, by run, and the whole warp: two numbers a word.
template <int RUNS>
struct Ranks {
    static constexpr int PAIRS = (RUNS + 1) / 2;
    uint32_t before[PAIRS], all[PAIRS];
    __device__ __forceinline__ Ranks(uint32_t bits, int used) {
#pragma unroll
        for (int p = 0; p < PAIRS; ++p) {
            before[p] = all[p] = 0;
            if (2 * p < used) {
                const uint32_t mine = __popc(bits >> 16 * p & 0xFF) | __popc(bits >> 16 * p & 0xFF00) << 16;
                const uint32_t upto = warps::sum_up_to(mine, static_cast<int>(threadIdx.x % WARP));
                before[p] = upto - mine, all[p] = __shfl_sync(~0u, upto, WARP - 1);
            }
        }
    }
    // Call f(r, i, how many of the warp come before) for each bit.
    template <class F>
    __device__ __forceinline__ void each(uint32_t bits, int used, const F& f) const {
        uint32_t sum = 0;
#pragma unroll
        for (int r = 0; r < RUNS; ++r) {
            if (r < used) {
                uint32_t at = sum + (before[r / 2] >> r % 2 * 16 & 0xFFFF);
#pragma unroll
                for (int i = 0; i < RUN; ++i)
                    if (bits >> (RUN * r + i) & 1) f(r, i, at++);
                sum += all[r / 2] >> r % 2 * 16 & 0xFFFF;
            }
        }
    }
};

// Of each warp's `mine`, the sum over the warps before. Has a barrier inside.
__device__ __forceinline__ uint32_t sum_before(uint32_t* by_warp, uint32_t mine) {
    const uint32_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, sum = __reduce_add_sync(~0u, mine);
    if (lane == 0) by_warp[warp] = sum;
    __syncthreads();
    return __reduce_add_sync(~0u, lane < warp ? by_warp[lane] : 0);
}

// Choose the topk highest of `count` runs of scores; there are at least as many. known: range is, with at least topk
// scores in it. range.least becomes the topk-th score. All threads of the block call it.
template <int THREADS, int RUNS>
__device__ __forceinline__ Chosen select(Search& s, const Runs<RUNS>& runs, int count, uint32_t topk, bool known,
                                         Range& range) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, used = runs.used;
    const uint32_t counters = ptx::smem_address(s.bins) - (static_cast<uint32_t>(NO_BIN) << 2);
    clear<THREADS>(s);
    if (known)
        __syncthreads();
    else
        range = range_of<THREADS>(s, runs, count, topk);
    STAMP(10);
    uint32_t need = topk, low = range.least, high = range.largest, in_bin = ~0u;
    const float origin = score_of(low), width = score_of(high) - origin;
    const float scale = __fdividef(BINS - 1, width);
    int which[RUNS][RUN], bin = 0;  // a score is above the k-th's bin if `which` is larger than `bin`
    if (width > 0x1p-100f && width < 0x1p100f) {
#pragma unroll
        for (int r = 0; r < RUNS; ++r) {
            if (r < used) {
#pragma unroll
                for (int i = 0; i < RUN; ++i) {
                    // Each step keeps the order, and rounds to a whole number that is in the low bits. Scores below the
                    // range get the number of an unused bin.
                    const int number = __float_as_int(fmaf(runs.score[r][i] - origin, scale, 0x1p23f));
                    which[r][i] = max(number, NO_BIN - 1 - lane);
                    count_in(counters + static_cast<uint32_t>(which[r][i]) * 4);
                }
            }
        }
        __syncthreads();
        STAMP(11);
        find_bin<THREADS>(s, need);
        in_bin = s.in_bin, need -= s.over, bin = NO_BIN + s.bin;
        if (in_bin > FEW) {
            low = ~0u, high = 0;
#pragma unroll
            for (int r = 0; r < RUNS; ++r) {
                if (r < used) {
#pragma unroll
                    for (int i = 0; i < RUN; ++i)
                        if (which[r][i] == bin)
                            low = min(low, ordered(runs.score[r][i])), high = max(high, ordered(runs.score[r][i]));
                }
            }
            const Range narrower = range_of_block<THREADS>(s, low, high);
            low = narrower.least, high = narrower.largest;
        }
    }
    STAMP(12);
    if (in_bin > FEW) {
        in_bin = narrow<THREADS>(s, runs, low, high, need);
        bin = 1;
#pragma unroll
        for (int r = 0; r < RUNS; ++r) {
            if (r < used) {
#pragma unroll
                for (int i = 0; i < RUN; ++i) {
                    const uint32_t key = ordered(runs.score[r][i]);
                    which[r][i] = key > high ? 2 : key >= low ? 1 : 0;
                }
            }
        }
    }
    uint32_t over = 0, same = 0;
#pragma unroll
    for (int r = 0; r < RUNS; ++r) {
        if (r < used) {
#pragma unroll
            for (int i = 0; i < RUN; ++i) {
                over |= which[r][i] > bin ? 1u << (RUN * r + i) : 0;
                same |= which[r][i] == bin ? 1u << (RUN * r + i) : 0;
            }
        }
    }
    Chosen chosen{over, 0};
    if (in_bin > FEW) {  // all in the bin are equal
        chosen.before = sum_before(s.sums, __popc(over));
        const uint32_t equals = sum_before(s.equals, __popc(same));
        Ranks<RUNS>(same, used).each(same, used, [&](int r, int i, uint32_t at) {
            if (equals + at < need) chosen.bits |= 1u << (RUN * r + i);
        });
        chosen.before += min(equals, need);
        range.least = low;
        return chosen;
    }
    const int numbers = warp * used * WARP * RUN;  // the warp's first score; score 8 j + i is number i of run j
#pragma unroll 1
    for (uint32_t left = same; left; left &= left - 1) {
        const int which_one = __ffs(left) - 1;
        float score = 0.0f;
#pragma unroll
        for (int j = 0; j < RUNS * RUN; ++j) score = j == which_one ? runs.score[j / RUN][j % RUN] : score;
        const uint32_t number = numbers + which_one / RUN * (WARP * RUN) + lane * RUN + which_one % RUN;
        s.few[atomicAdd(&s.inside, 1)] = static_cast<uint64_t>(ordered(score)) << 32 | ~number;
    }
    chosen.before = sum_before(s.sums, __popc(over));
    STAMP(13);
    const uint64_t mine = lane < static_cast<int>(in_bin) ? s.few[lane] : 0;
    uint32_t better = 0;
#pragma unroll 1
    for (uint32_t j = 0; j < in_bin; ++j) better += s.few[j] > mine;
    const bool wins = lane < static_cast<int>(in_bin) && better < need;
    const int last = __ffs(__ballot_sync(~0u, wins && better == need - 1)) - 1;
    range.least = __shfl_sync(~0u, static_cast<uint32_t>(mine >> 32), last);
    const int number = static_cast<int>(~static_cast<uint32_t>(mine)) - numbers;  // from the warp's first score on
    chosen.before += __popc(__ballot_sync(~0u, wins && number < 0));
    uint32_t here = __ballot_sync(~0u, wins && number >= 0 && number < used * WARP * RUN);
#pragma unroll 1
    for (; here; here &= here - 1) {
        const int one_of = __shfl_sync(~0u, number, __ffs(here) - 1);
        if (one_of / RUN % WARP == lane) chosen.bits |= 1u << (one_of / (WARP * RUN) * RUN + one_of % RUN);
    }
    return chosen;
}

}  // namespace indexer
