// Scores and top k in one launch: blocks all over the GPU score parts of the rows, and the block of a row that ends
// last chooses.
//
// So that it need not read all scores, it knows the largest of each unit of 8 or 16 entries that lie side by side. An
// entry among the k highest is in one of the k units with the highest of these. It finds these units first, then the k
// highest of the entries in them.
#include <cuda_runtime.h>

#include <algorithm>

#include "sm90_score.cuh"
#include "sm90_select.cuh"

namespace indexer {

// How rows are shared out; what depends on the call's shape only.
struct Plan {
    int parts;         // blocks of a row, at most
    int entries;       // that a row has, at most; a multiple of TILE
    int log_unit;      // 3 or 4, of the entries of a unit
    bool held;         // one block a row, which keeps the scores in shared memory
    uint32_t* scores;  // else ordered scores, `words()` a row

    __host__ __device__ __forceinline__ int words() const { return entries + (entries >> log_unit); }
};

// Shared memory of a block; behind it come the row's scores if they are held, and the warps' rings of keys and the
// pages, or, when these are done with, what was found and the row's pages.
struct __align__(1024) Shared {
    Query query;
    Search search;
    int seen, parts;  // of the row: here, since the score loop leaves no registers for them
};

constexpr int AT_HAND = 1024;  // pages of a row up to which all are in shared memory when places are written

// Blocks of a row that are done. The last one sets it back, so that every launch begins with zeros.
constexpr int MOST_SHARED = 132;  // rows of several blocks
__device__ uint32_t done[MOST_SHARED];

#ifdef STAMPS  // cycles at the end of each phase, for measurements
__device__ long long stamps[1024][16];
#define STAMP(i) do { if (threadIdx.x == 0) { long long t; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)); \
    stamps[(blockIdx.x * gridDim.y + blockIdx.y) % 1024][i] = (i) == 0 ? t : clock64(); } } while (0)
#else
#define STAMP(i)
#endif

// Of this block, anew each time: a row and its addresses are not kept in registers through the score loop.
__device__ __forceinline__ int row_of_block() {
    int row;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(row));
    return row;
}
__device__ __forceinline__ const int* table_of(const Tensors& data, const Sizes& sizes, int row) {
    return data.table + static_cast<int64_t>(row / sizes.queries) * sizes.blocks;
}
__device__ __forceinline__ int* out_of(const Tensors& data, const Sizes& sizes, int row) {
    return data.out + static_cast<int64_t>(row) * sizes.topk;
}

__device__ __forceinline__ int clamped(int seen, const Sizes& sizes) {
    return max(0, min(seen, sizes.blocks << sizes.page_shift));
}

// Bring the row of the table to L2 before it is known what of it is needed.
template <int THREADS>
__device__ __forceinline__ void prefetch_table(const int* table, int blocks) {
    constexpr int LINE = 32;  // numbers
#pragma unroll 1
    for (int i = threadIdx.x * LINE; i < blocks; i += THREADS * LINE)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(table + i));
}

__device__ __forceinline__ int place(const Sizes& sizes, int page, int entry) {
    return page << sizes.page_shift | entry & (1 << sizes.page_shift) - 1;
}

// A row of which all entries are chosen.
template <int THREADS>
__device__ __forceinline__ void take_all(const Sizes& sizes, const int* table, int seen, int part, int parts,
                                         int* out) {
    for (int i = part * THREADS + threadIdx.x; i < sizes.topk; i += parts * THREADS)
        out[i] = i < seen ? place(sizes, __ldg(table + (i >> sizes.page_shift)), i) : -1;
}

// Whether this block is the last of a row's `parts` to come here. It may read what the others wrote before.
__device__ __forceinline__ bool is_last(Search& s, int row, int parts) {
    __syncthreads();
    if (parts == 1) return true;
    if (threadIdx.x == 0) {
        __threadfence();
        s.inside = atomicInc(&done[row], parts - 1);
        __threadfence();
    }
    __syncthreads();
    return s.inside == parts - 1;
}

// What a block that chooses keeps in shared memory, behind the scores that are held. Sizes: see `words`.
struct Lists {
    int *units, *found, *other, *picked, *pages;

    __host__ __device__ __forceinline__ static int words(const Sizes& sizes) {
        return 4 * sizes.topk + (sizes.blocks <= AT_HAND ? sizes.blocks : 0);
    }
    __device__ __forceinline__ Lists(int* at, const Sizes& sizes)
        : units(at), found(at + sizes.topk), other(found + sizes.topk), picked(other + sizes.topk),
          pages(sizes.blocks <= AT_HAND ? picked + sizes.topk : nullptr) {}
};

// Write to lists.found the numbers of the topk highest of `count` scores, ascending. score_of(number): a score, 0 where
// there is none. Each turn takes as many as threads have room for, those that were best until then among them. range: if
// it is known, with at least topk scores in it; else its largest is 0. Becomes the range of the topk.
template <int THREADS, class Score>
__device__ __forceinline__ void best_of(Search& s, Lists& lists, int count, int topk, Range& range,
                                        const Score& score_of) {
    const bool known = range.largest && count <= KEYS * THREADS;
    int have = 0;
#pragma unroll 1
    for (int next = 0; next < count;) {
        const int many = min(have + count - next, KEYS * THREADS);
        const auto number = [&](int i) { return i < have ? lists.found[i] : next + i - have; };
        uint32_t keys[KEYS];
#pragma unroll
        for (int j = 0; j < KEYS; ++j) {
            const int i = j * THREADS + threadIdx.x;
            keys[j] = i < many ? score_of(number(i)) : 0;
        }
        if (!known) range = range_of<THREADS>(s, keys);
        range.least = select<THREADS>(s, keys, topk, range, lists.picked);
        for (int i = threadIdx.x; i < topk; i += THREADS) lists.other[i] = number(lists.picked[i]);
        __syncthreads();
        int* const found = lists.other;
        lists.other = lists.found, lists.found = found;
        next += many - have, have = topk;
    }
}

// Choose from the row's scores, and write the places. held: the scores, if they are held.
template <int THREADS>
__device__ __forceinline__ void choose(Search& s, const Tensors& data, const Sizes& sizes, const Plan& plan,
                                       const uint32_t* held, int seen, Lists lists) {
    const int row = row_of_block();
    const int* table = table_of(data, sizes, row);
    const uint32_t* scores = held ? held : plan.scores + static_cast<int64_t>(row) * plan.words();
    const int topk = sizes.topk, log_unit = plan.log_unit, units = (seen - 1 >> log_unit) + 1;
    // Not only the entries of the best units.
    const bool all = plan.held || units <= topk || seen <= KEYS * THREADS;
    if (lists.pages)
        for (int i = threadIdx.x; i <= seen - 1 >> sizes.page_shift; i += THREADS) lists.pages[i] = __ldg(table + i);
    const auto entry_of = [&](int i) {
        return all ? i : lists.units[i >> log_unit] << log_unit | i & (1 << log_unit) - 1;
    };
    Range range{0, 0};
#pragma unroll 1
    for (int stage = all; stage < 2; ++stage) {
        const int count = stage == 0 ? units : all ? seen : topk << log_unit;
        best_of<THREADS>(s, lists, count, topk, range, [&](int i) {
            const int at = stage == 0 ? plan.entries + i : entry_of(i);
            return stage == 0 || at < seen ? scores[at] : 0;
        });
        if (stage == 0) {
            int* const units = lists.found;
            lists.found = lists.units, lists.units = units;
        }
        STAMP(7 + stage);
    }
    int* out = out_of(data, sizes, row_of_block());
    for (int i = threadIdx.x; i < topk; i += THREADS) {
        const int entry = entry_of(lists.found[i]), page = entry >> sizes.page_shift;
        out[i] = place(sizes, lists.pages ? lists.pages[page] : __ldg(table + page), entry);
    }
    STAMP(9);
}

// Block (row, part).
template <bool FP8, int WARPGROUPS>
__global__ void __launch_bounds__(WARPGROUPS * 128, WARPGROUPS == 2 ? 2 : 1)
    score_and_choose(const Tensors data, const Sizes sizes, const Plan plan) {
    constexpr int THREADS = WARPGROUPS * 128;
    extern __shared__ __align__(1024) unsigned char raw[];
    STAMP(0);
    STAMP(1);
    Shared& shared = *reinterpret_cast<Shared*>(raw);
    uint32_t* held = reinterpret_cast<uint32_t*>(raw + sizeof(Shared));
    uint8_t* ring = reinterpret_cast<uint8_t*>(held + (plan.held ? plan.entries : 0));
    int* pages = reinterpret_cast<int*>(ring + WARPGROUPS * 4 * Ring<FP8>::BYTES);
    const int row = row_of_block(), part = blockIdx.y;
    const int* table = table_of(data, sizes, row);
    const int seen = clamped(__ldg(data.visible + row), sizes);
    const bool early = sizes.blocks <= 2 * THREADS;  // the pages of the row are read before its length is known
    int page[2] = {};
    if (early) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (threadIdx.x + i * THREADS < sizes.blocks) page[i] = __ldg(table + threadIdx.x + i * THREADS);
    } else {
        prefetch_table<THREADS>(table, sizes.blocks);
    }
    QueryParts<THREADS> query;
    query.load(data, sizes, row);
    if (seen <= sizes.topk) {
        take_all<THREADS>(sizes, table, seen, part, plan.parts, out_of(data, sizes, row));
        return;
    }
    const int tiles = (seen + TILE - 1) / TILE, each = (tiles + plan.parts - 1) / plan.parts * TILE;
    const int parts = (tiles * TILE + each - 1) / each;  // that have entries
    if (part >= parts) return;
    if (threadIdx.x == 0) shared.seen = seen, shared.parts = parts;
    const Slice slice{part * each, min(each, seen - part * each), pages};
    STAMP(2);
    const int from = slice.first >> sizes.page_shift, upto = slice.first + slice.count - 1 >> sizes.page_shift;
    if (early) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int at = threadIdx.x + i * THREADS;
            if (at >= from && at <= upto) pages[at - from] = page[i];
        }
    } else {
#pragma unroll 1
        for (int i = from + threadIdx.x; i <= upto; i += THREADS) pages[i - from] = __ldg(table + i);
    }
    __syncthreads();
    begin_scores<FP8, WARPGROUPS>(data, sizes, slice, ring);
    query.store(shared.query);  // while the keys are on their way
    ptx::fence_proxy_async_shared();
    __syncthreads();
    STAMP(3);
    uint32_t* scores = plan.scores + static_cast<int64_t>(row) * plan.words();
    score<FP8, WARPGROUPS>(data, sizes, slice, shared.query, ring, [&](int i, bool inside, uint32_t key) {
        const int lane = threadIdx.x % WARP;
        if (plan.held) {
            if (lane % 4 < 2 && inside) held[i] = key;
            return;
        }
        if (lane % 4 < 2 && inside) scores[slice.first + i] = key;
        uint32_t most = inside ? key : 0;
#pragma unroll
        for (int apart = 4; apart < WARP; apart *= 2) most = max(most, __shfl_xor_sync(~0u, most, apart));
        if (plan.log_unit == 4) most = max(most, __shfl_xor_sync(~0u, most, 1));
        if (lane < 16 >> plan.log_unit && inside) scores[plan.entries + (slice.first + i >> plan.log_unit)] = most;
    });
    STAMP(4);
    const bool last = is_last(shared.search, row_of_block(), shared.parts);
    STAMP(5);
    if (!last) return;
    STAMP(6);
    const Lists lists(reinterpret_cast<int*>(ring), sizes);
    choose<THREADS>(shared.search, data, sizes, plan, plan.held ? held : nullptr, shared.seen, lists);
}

template <bool FP8, int WARPGROUPS>
cudaError_t run(const Tensors& data, const Sizes& sizes, const Plan& plan) {
    if (plan.parts > 1 && sizes.rows > MOST_SHARED) return cudaErrorInvalidValue;
    const int part = (plan.entries / TILE + plan.parts - 1) / plan.parts * TILE;  // entries of a block, at most
    const size_t scoring = WARPGROUPS * 4 * Ring<FP8>::BYTES + ((part >> sizes.page_shift) + 2) * 4;
    const size_t choosing = Lists::words(sizes) * 4;
    const size_t bytes = sizeof(Shared) + (plan.held ? plan.entries * 4 : 0) + std::max(scoring, choosing);
    const auto kernel = score_and_choose<FP8, WARPGROUPS>;
    if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
        return error;
    kernel<<<dim3(sizes.rows, plan.parts), WARPGROUPS * 128, bytes>>>(data, sizes, plan);
    return cudaGetLastError();
}

}  // namespace indexer

#ifdef STAMPS
extern "C" int read_stamps(long long* to) {
    return cudaMemcpyFromSymbol(to, indexer::stamps, sizeof(indexer::stamps));
}
#endif

// tensors: those of task.Data, in order. sizes: queries, heads, topk, blocks, log2 of P, rows, bytes of a page, 1 for
// fp8. plan: blocks of a row, at most 132 rows if there are several; entries of a row; log2 of the entries of a unit; 1 if
// scores are held in shared memory; warpgroups of a block, 2 or 4. scores: the workspace, Plan::words() a row, null if
// they are held. -> a cudaError_t.
extern "C" int launch(void* const* tensors, const int64_t* sizes, const int* plan, uint32_t* scores) {
    using namespace indexer;
    const Tensors data{static_cast<const __nv_bfloat16*>(tensors[0]), static_cast<const float*>(tensors[1]),
                       static_cast<const uint8_t*>(tensors[2]),       static_cast<const int*>(tensors[3]),
                       static_cast<const int*>(tensors[4]),           static_cast<int*>(tensors[5])};
    const Sizes s{static_cast<int>(sizes[0]), static_cast<int>(sizes[1]), static_cast<int>(sizes[2]),
                  static_cast<int>(sizes[3]), static_cast<int>(sizes[4]), static_cast<int>(sizes[5]),
                  sizes[6]};
    const Plan p{plan[0], plan[1], plan[2], plan[3] != 0, scores};
    if (sizes[7]) return plan[4] == 2 ? run<true, 2>(data, s, p) : run<true, 4>(data, s, p);
    return plan[4] == 2 ? run<false, 2>(data, s, p) : run<false, 4>(data, s, p);
}
