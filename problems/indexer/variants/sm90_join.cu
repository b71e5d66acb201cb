// Scores and top k in one launch: blocks all over the GPU score parts of the rows, and the block of a row that ends
// last chooses.
//
// So that it need not read all scores of a long row, it knows the largest of each 8 that lie side by side, and of 8
// such numbers again the largest, and so on: level l has one number for 8^l entries. A number among the k highest of a
// level is one of the 8 below a number among the k highest of the next. So it finds the k highest of a level that fits
// in registers, then of what is below these, down to entries.
#include <cuda_runtime.h>

#include "launch.cuh"
#include "sm90_score.cuh"

#ifdef STAMPS  // cycles at the end of each phase, for measurements
__device__ long long stamps[1024][16];
#define STAMP(i) do { if (threadIdx.x == 0) { long long t; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)); \
    stamps[(blockIdx.x * gridDim.y + blockIdx.y) % 1024][i] = (i) == 0 ? t : clock64(); } } while (0)
#else
#define STAMP(i)
#endif
#include "sm90_select.cuh"

namespace indexer {

// How rows are shared out; what depends on the call's shape only.
struct Plan {
    int parts;         // blocks of a row, at most
    int entries;       // that a row has, at most; a multiple of TILE
    bool held;         // one block a row, which keeps the scores in shared memory
    float* scores;     // else here, all levels

    __host__ __device__ __forceinline__ int words() const { return 2 * entries; }  // of a row in `scores`
};

constexpr int RUN_BITS = 3;
static_assert(1 << RUN_BITS == RUN, "a number of a level is of a run of the one below");

// How many numbers level l of a row with so many entries has, and where they begin in the workspace. Level l has more
// room than it needs, a half of the level below, so that this is short.
__host__ __device__ __forceinline__ int of_level(int entries, int level) {
    return (entries - 1 >> RUN_BITS * level) + 1;
}
__host__ __device__ __forceinline__ int where(int entries, int level) { return 2 * entries - (2 * entries >> level); }

// The lowest level that has no more numbers than `most`, as many as a block can choose from.
__host__ __device__ __forceinline__ int top_level(int entries, int most) {
    int level = 0;
#pragma unroll 1
    while (of_level(entries, level) > most) ++level;
    return level;
}

// Shared memory of a block; behind it come the row's scores if they are held, the warps' rings of keys or, when these
// are done with, which runs were chosen, and pages: of the row if they are at hand, else of the block's part.
struct __align__(1024) Shared {
    Query query;
    Search search;
    // Of the row: here, since the score loop leaves no registers for them.
    const int* table;
    int seen, parts;
};

// Whether all pages of a row are read before its length is known, and stay in shared memory. Otherwise keys wait for two
// loads, one behind the other.
constexpr int EARLY = 4;  // of a thread
template <int THREADS>
__host__ __device__ __forceinline__ bool at_hand(int blocks) {
    return blocks <= EARLY * THREADS;
}

// Blocks of a row that are done. The last one sets it back, so that every launch begins with zeros.
constexpr int MOST_SHARED = 132;  // rows of several blocks
__device__ uint32_t done[MOST_SHARED];

// Anew each time: a row and its addresses are not kept in registers through the score loop.
__device__ __forceinline__ int row_of_block() { return ptx::block_index(); }
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
        ptx::prefetch_l2(table + i);
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
    if (threadIdx.x == 0)  // after the barrier, so this publishes what the whole block wrote
        asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                     : "=r"(s.place)
                     : "l"(&done[row]), "r"(parts - 1)
                     : "memory");
    __syncthreads();
    return s.place == parts - 1;
}

// Make runs [first, end) of one level numbers of the next, their largest.
template <int THREADS>
__device__ __forceinline__ void raise(const float* from, float* to, int first, int end) {
#pragma unroll 1
    for (int i = first + threadIdx.x; i < end; i += THREADS) {
        const float4* run = reinterpret_cast<const float4*>(from + i * RUN);
        const float4 a = run[0], b = run[1];
        to[i] = fmaxf(fmaxf(fmaxf(a.x, a.y), fmaxf(a.z, a.w)), fmaxf(fmaxf(b.x, b.y), fmaxf(b.z, b.w)));
    }
}

// Choose from a row's scores, which begin at `scores`, and write the places. pages: of the row, in shared memory, or
// null. chosen_runs: room for k numbers in shared memory.
template <int THREADS, int RUNS>
__device__ __forceinline__ void choose(Search& s, const Tensors& data, const Sizes& sizes, int entries, float* scores,
                                       const int* table, int seen, const int* pages, int* chosen_runs) {
    constexpr int MOST = THREADS * RUNS * RUN;
    const int topk = sizes.topk, top = top_level(seen, MOST);
#pragma unroll 1
    for (int level = 2; level <= top; ++level) {  // scoring makes levels up to 2; their last run is to be whole
        const int numbers = of_level(seen, level);
        float* const here = scores + where(entries, level);
        if (level > 2) raise<THREADS>(scores + where(entries, level - 1), here, 0, numbers);
        if (threadIdx.x < RUN) here[numbers + threadIdx.x] = -__int_as_float(0x7F800000);
        __syncthreads();
    }
    Range range{0, 0};
#pragma unroll 1
    for (int level = top; level >= 0; --level) {
        const bool all = level == top;  // not only the scores below those that were chosen
        const int count = all ? of_level(seen, level + 1) : topk;
        const float* here = scores + where(entries, level);
        Runs<RUNS> runs;
        load_runs<THREADS>(runs, here, count, [&](int i) { return (all ? i : chosen_runs[i]) * RUN; });
        const Chosen chosen = select<THREADS>(s, runs, count, topk, !all, range);
        STAMP(14);
        if (level == 0) {  // 8 entries that lie side by side are of one page
#pragma unroll
            for (int r = 0; r < RUNS; ++r) {
                const int block = runs.first[r] >> sizes.page_shift;
                runs.first[r] = place(sizes, pages ? pages[block] : __ldg(table + block), runs.first[r]);
            }
        }
        int* const to = (level == 0 ? out_of(data, sizes, row_of_block()) : chosen_runs) + chosen.before;
        Ranks<RUNS>(chosen.bits, runs.used).each(
            chosen.bits, runs.used, [&](int r, int i, uint32_t before) { to[before] = runs.first[r] + i; });
        if (level == 0) break;
        __syncthreads();
        STAMP(7);
    }
    STAMP(9);
}

// Block (row, part).
template <bool FP8, int WARPGROUPS, int RUNS>
__global__ void __launch_bounds__(WARPGROUPS * 128, WARPGROUPS == 2 ? 2 : 1)
    score_and_choose(const Tensors data, const Sizes sizes, const Plan plan) {
    constexpr int THREADS = WARPGROUPS * 128;
    extern __shared__ __align__(1024) unsigned char raw[];
    STAMP(0);
    STAMP(1);
    Shared& shared = *reinterpret_cast<Shared*>(raw);
    float* held = reinterpret_cast<float*>(raw + sizeof(Shared));
    uint8_t* ring = reinterpret_cast<uint8_t*>(held + (plan.held ? plan.entries : 0));
    int* pages = reinterpret_cast<int*>(ring + WARPGROUPS * 4 * Ring<FP8>::BYTES);
    const int row = row_of_block(), part = blockIdx.y;
    programmatic::wait();
    programmatic::trigger();
    const int* table = table_of(data, sizes, row);
    const int seen = clamped(__ldg(data.visible + row), sizes);
    const bool early = at_hand<THREADS>(sizes.blocks);
    int page[EARLY] = {};
    if (early) {
#pragma unroll
        for (int i = 0; i < EARLY; ++i)
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
    if (threadIdx.x == 0) shared.table = table, shared.seen = seen, shared.parts = parts;
    const int from = part * each >> sizes.page_shift;
    const Slice slice{part * each, min(each, seen - part * each), pages + (early ? from : 0)};
    STAMP(2);
    if (early) {
#pragma unroll
        for (int i = 0; i < EARLY; ++i)
            if (threadIdx.x + i * THREADS < sizes.blocks) pages[threadIdx.x + i * THREADS] = page[i];
    } else {
        const int upto = slice.first + slice.count - 1 >> sizes.page_shift;
#pragma unroll 1
        for (int i = from + threadIdx.x; i <= upto; i += THREADS) pages[i - from] = __ldg(table + i);
    }
    __syncthreads();
    begin_scores<FP8, WARPGROUPS>(data, sizes, slice, ring);
    query.store(shared.query);  // while the keys are on their way
    ptx::fence_proxy_async_shared();
    __syncthreads();
    STAMP(3);
    // Bases of the slice, so that an address in the loop is one instruction: asm, or the compiler adds them up there.
    float* const scores = plan.scores + static_cast<int64_t>(row) * plan.words();
    float* here = scores + slice.first;
    float* largest = scores + where(plan.entries, 1) + slice.first / RUN;
    asm("" : "+l"(here), "+l"(largest));
    __builtin_assume(__isGlobal(here) && __isGlobal(largest));
    score<FP8, WARPGROUPS>(data, sizes, slice, shared.query, ring, [&](int i, float score) {
        const int lane = threadIdx.x % WARP;
        if (plan.held) {
            if (lane % 4 < 2) held[i] = score;
            return;
        }
        if (lane % 4 < 2) here[static_cast<uint32_t>(i)] = score;
#pragma unroll
        for (int apart = 4; apart < WARP; apart *= 2) score = fmaxf(score, __shfl_xor_sync(~0u, score, apart));
        if (lane < 2) largest[static_cast<uint32_t>(i) / RUN] = score;
    });
    STAMP(4);
    float* const row_scores = plan.held ? held : plan.scores + static_cast<int64_t>(row_of_block()) * plan.words();
    if (top_level(shared.seen, THREADS * RUNS * RUN) > 1) {
        __syncthreads();
        raise<THREADS>(row_scores + where(plan.entries, 1), row_scores + where(plan.entries, 2), slice.first / TILE,
                       (slice.first + slice.count - 1) / TILE + 1);
    }
    const bool last = is_last(shared.search, row_of_block(), shared.parts);
    STAMP(5);
    if (!last) return;
    STAMP(6);
    choose<THREADS, RUNS>(shared.search, data, sizes, plan.entries, row_scores, shared.table, shared.seen,
                          at_hand<THREADS>(sizes.blocks) ? pages : nullptr, reinterpret_cast<int*>(ring));
}

template <bool FP8, int WARPGROUPS, int RUNS>
cudaError_t run(const Tensors& data, const Sizes& sizes, const Plan& plan, bool early) {
    constexpr int MOST = WARPGROUPS * 128 * RUNS * RUN;  // scores of a search
    const int top = top_level(plan.entries, MOST);
    if (plan.parts > 1 && sizes.rows > MOST_SHARED || top > 0 && (plan.held || sizes.topk > MOST / RUN))
        return cudaErrorInvalidValue;
    const int part = (plan.entries / TILE + plan.parts - 1) / plan.parts * TILE;  // entries of a block, at most
    constexpr int RINGS = WARPGROUPS * 4 * Ring<FP8>::BYTES;
    static_assert(MOST / RUN * 4 <= RINGS, "the runs that were chosen are where the rings were");
    const int pages = at_hand<WARPGROUPS * 128>(sizes.blocks) ? sizes.blocks : (part >> sizes.page_shift) + 2;
    const size_t bytes = sizeof(Shared) + (plan.held ? plan.entries * 4 : 0) + RINGS + pages * 4;
    const auto kernel = score_and_choose<FP8, WARPGROUPS, RUNS>;
    if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
        return error;
    const dim3 grid(sizes.rows, plan.parts);
    return programmatic::launch_early(kernel, grid, WARPGROUPS * 128, bytes, early, data, sizes, plan);
}

template <bool FP8>
cudaError_t run(const Tensors& data, const Sizes& sizes, const Plan& plan, int warpgroups, int runs, bool early) {
    if (warpgroups == 2) return run<FP8, 2, 1>(data, sizes, plan, early);
    return (runs == 1 ? run<FP8, 4, 1> : runs == 2 ? run<FP8, 4, 2> : run<FP8, 4, 4>)(data, sizes, plan, early);
}

}  // namespace indexer

#ifdef STAMPS
extern "C" int read_stamps(long long* to) {
    return cudaMemcpyFromSymbol(to, stamps, sizeof(stamps));
}
#endif

// tensors: those of task.Data, in order. sizes: queries, heads, topk, blocks, log2 of P, rows, bytes of a page, 1 for
// fp8. plan: blocks of a row, at most 132 rows if there are several; entries of a row, whole tiles; 1 if scores are
// held in shared memory; warpgroups of a block, 2 or 4; runs of a thread, 1, 2 or 4, with 2 warpgroups 1. scores: the
// workspace, Plan::words() a row, null if they are held. early: whether the kernel may begin before the one ahead has
// ended. -> a cudaError_t.
extern "C" int launch(void* const* tensors, const int64_t* sizes, const int* plan, float* scores, int early) {
    using namespace indexer;
    const Tensors data{static_cast<const __nv_bfloat16*>(tensors[0]), static_cast<const float*>(tensors[1]),
                       static_cast<const uint8_t*>(tensors[2]),       static_cast<const int*>(tensors[3]),
                       static_cast<const int*>(tensors[4]),           static_cast<int*>(tensors[5])};
    const Sizes s{static_cast<int>(sizes[0]), static_cast<int>(sizes[1]), static_cast<int>(sizes[2]),
                  static_cast<int>(sizes[3]), static_cast<int>(sizes[4]), static_cast<int>(sizes[5]),
                  sizes[6]};
    const Plan p{plan[0], plan[1], plan[2] != 0, scores};
    return (sizes[7] ? run<true> : run<false>)(data, s, p, plan[3], plan[4], early);
}
