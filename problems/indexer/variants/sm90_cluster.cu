// Scores and top k in one launch: a cluster of blocks a row, each with a slice of the entries, whose scores never leave
// shared memory. Of rows that fit one block's shared memory the cluster's first block gets all scores and chooses by
// itself; of longer ones all blocks choose together. In two launches where rows are so few and long that their clusters would leave most of the GPU idle:
// then blocks all over it score, and clusters search what they wrote.
#include <cuda_runtime.h>

#include <algorithm>

#include "sm90_score.cuh"
#include "sm90_select.cuh"

namespace indexer {

// How a row's entries are shared out; what depends on the call's shape only.
struct Plan {
    int cluster;        // blocks of a cluster
    int slice;          // entries that a block of a cluster has, at most; a multiple of TILE
    int room;           // scores that a block has room for: of its slice, or of the row where one block chooses
    int chunk, chunks;  // two launches: entries that a block scores, and such blocks a row
    uint32_t* scores;   // two launches: ordered scores, `slice * cluster` a row
};

// Shared memory of a block; behind it come the scores, the warps' rings of keys, and the pages.
struct __align__(1024) Shared {
    Query query;
    Search search;
};
static_assert(sizeof(Shared) == 35 * 1024, "ROOM of the launcher");
static_assert(Ring<false>::BYTES == 4352 && Ring<true>::BYTES == 6336, "RING of the launcher");

__device__ __forceinline__ int clamped(int seen, const Sizes& sizes) {
    return max(0, min(seen, sizes.blocks << sizes.page_shift));
}

// Bring the row of the table to L2 before it is known what of it is needed.
template <int THREADS>
__device__ __forceinline__ void prefetch_table(const Tensors& data, const Sizes& sizes, int row) {
    constexpr int LINE = 32;  // numbers
    const int* table = data.table + static_cast<int64_t>(row / sizes.queries) * sizes.blocks;
#pragma unroll 1
    for (int i = threadIdx.x * LINE; i < sizes.blocks; i += THREADS * LINE)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(table + i));
}

// The pages of entries on their way to shared memory: one a thread first, the others when it is stored.
template <int THREADS>
struct Pages {
    const int* from;
    int pages, mine;

    __device__ __forceinline__ void load(const Tensors& data, const Sizes& sizes, int row, int first, int count) {
        from = data.table + static_cast<int64_t>(row / sizes.queries) * sizes.blocks + (first >> sizes.page_shift);
        const int last = first + count - 1;
        pages = count > 0 ? (last >> sizes.page_shift) - (first >> sizes.page_shift) + 1 : 0;
        mine = threadIdx.x < pages ? __ldg(from + threadIdx.x) : 0;
    }
    // All threads; a block barrier must follow.
    __device__ __forceinline__ void store(int* to) const {
        if (threadIdx.x < pages) to[threadIdx.x] = mine;
#pragma unroll 1
        for (int i = THREADS + threadIdx.x; i < pages; i += THREADS) to[i] = __ldg(from + i);
    }
};

__device__ __forceinline__ int place(const Sizes& sizes, const Slice& slice, int i) {
    const int at = slice.first + i;
    const int page = slice.pages[(at >> sizes.page_shift) - (slice.first >> sizes.page_shift)];
    return page << sizes.page_shift | at & (1 << sizes.page_shift) - 1;
}

// A row of which all entries are chosen.
template <int THREADS>
__device__ __forceinline__ void take_all(const Tensors& data, const Sizes& sizes, int row, int seen, Cluster cluster) {
    const int* table = data.table + static_cast<int64_t>(row / sizes.queries) * sizes.blocks;
    const int mask = (1 << sizes.page_shift) - 1;
    for (int i = cluster.rank * THREADS + threadIdx.x; i < sizes.topk; i += cluster.size * THREADS)
        data.out[static_cast<int64_t>(row) * sizes.topk + i] =
            i < seen ? __ldg(table + (i >> sizes.page_shift)) << sizes.page_shift | i & mask : -1;
}

// The slice of this block: equal ones but for the last, whole tiles.
__device__ __forceinline__ void cut(int seen, Cluster cluster, int& first, int& count) {
    const int tiles = (seen + TILE - 1) / TILE, each = (tiles + cluster.size - 1) / cluster.size * TILE;
    first = min(cluster.rank * each, seen / TILE * TILE), count = max(0, min(seen - cluster.rank * each, each));
}

// One launch, a cluster a row. SCORED: another launch has written the scores already.
template <bool FP8, int WARPGROUPS, bool SCORED>
__global__ void __launch_bounds__(WARPGROUPS * 128, WARPGROUPS == 2 ? 2 : 1)
    search(const Tensors data, const Sizes sizes, const Plan plan) {
    constexpr int THREADS = WARPGROUPS * 128;
    extern __shared__ __align__(1024) unsigned char raw[];
    Shared& shared = *reinterpret_cast<Shared*>(raw);
    uint32_t* keys = reinterpret_cast<uint32_t*>(raw + sizeof(Shared));
    uint8_t* ring = reinterpret_cast<uint8_t*>(keys + plan.room);
    int* pages = reinterpret_cast<int*>(ring + (SCORED ? 0 : WARPGROUPS * 4 * Ring<FP8>::BYTES));
    const int row = blockIdx.x / plan.cluster;
    Cluster cluster{static_cast<int>(blockIdx.x) % plan.cluster, plan.cluster};
    const bool gathers = plan.room > plan.slice;  // the first block gets all scores
    const bool early = gathers && sizes.blocks <= THREADS;  // the pages of the row are read before its length is known
    const int seen = clamped(__ldg(data.visible + row), sizes);
    Pages<THREADS> load;
    if (early) load.load(data, sizes, row, 0, sizes.blocks << sizes.page_shift);
    QueryParts<THREADS> query;
    if constexpr (!SCORED) {
        prefetch_table<THREADS>(data, sizes, row);
        query.load(data, sizes, row);
    }
    begin<THREADS>(shared.search);
    if (seen <= sizes.topk) {  // alike in all blocks of the cluster
        take_all<THREADS>(data, sizes, row, seen, cluster);
        return;
    }
    const uint32_t arrived = ptx::smem_address(&shared.search.arrived);
    if (gathers && cluster.rank == 0 && threadIdx.x == 0) {
        ptx::barrier_init(arrived, 1);
        ptx::barrier_publish();
        ptx::arrive_and_expect_tx(arrived, seen * 4);
    }
    cluster.say_begun();
    Slice slice{0, 0, pages};
    cut(seen, cluster, slice.first, slice.count);
    if (early) slice.pages += slice.first >> sizes.page_shift;
    else load.load(data, sizes, row, slice.first, gathers && cluster.rank == 0 ? seen : slice.count);
    Range range;
    if constexpr (SCORED) {
        const uint32_t* from = plan.scores + static_cast<int64_t>(row) * plan.slice * plan.cluster + slice.first;
        load.store(pages);
        for (int i = threadIdx.x; i < slice.count; i += THREADS) keys[i] = __ldcg(from + i), range.take(keys[i]);
        __syncthreads();
    } else {
        query.store(shared.query);
        load.store(pages);
        ptx::fence_proxy_async_shared();
        __syncthreads();
        begin_scores<FP8, WARPGROUPS>(data, sizes, slice, ring);
        if (gathers) cluster.wait_begun();
        const uint32_t to = cluster.in(0, keys + slice.first), told = cluster.in(0, &shared.search.arrived);
        range = score<FP8, WARPGROUPS>(data, sizes, slice, shared.query, ring, [&](int i, bool inside, uint32_t key) {
            if (!inside || threadIdx.x % 4 > 1) return;
            if (gathers) store_counted(to + 4 * i, key, told);
            else keys[i] = key;
        });
        if (gathers) {
            if (cluster.rank != 0) return;
            ptx::wait(arrived, 0);
            slice.count = seen, cluster.size = 1;
#pragma unroll 4
            for (int i = threadIdx.x; i < seen; i += THREADS) range.take(keys[i]);
        }
    }
    int* out = data.out + static_cast<int64_t>(row) * sizes.topk;
    select<THREADS>(shared.search, keys, slice.count, sizes.topk, range, cluster,
                    [&](int i, int to) { out[to] = place(sizes, slice, i); });
}

// The first of two launches: block (chunk, row) scores a chunk of the row's entries.
template <bool FP8, int WARPGROUPS>
__global__ void __launch_bounds__(WARPGROUPS * 128, 1)
    score_all(const Tensors data, const Sizes sizes, const Plan plan) {
    constexpr int THREADS = WARPGROUPS * 128;
    extern __shared__ __align__(1024) unsigned char raw[];
    Query& query = *reinterpret_cast<Query*>(raw);
    uint8_t* ring = raw + sizeof(Query);
    int* pages = reinterpret_cast<int*>(ring + WARPGROUPS * 4 * Ring<FP8>::BYTES);
    const int row = blockIdx.y, seen = clamped(__ldg(data.visible + row), sizes);
    QueryParts<THREADS> parts;
    parts.load(data, sizes, row);
    Slice slice{static_cast<int>(blockIdx.x) * plan.chunk, 0, pages};
    slice.count = max(0, min(seen - slice.first, plan.chunk));
    if (seen <= sizes.topk || slice.count == 0) return;
    Pages<THREADS> load;
    load.load(data, sizes, row, slice.first, slice.count);
    parts.store(query);
    load.store(pages);
    ptx::fence_proxy_async_shared();
    __syncthreads();
    uint32_t* to = plan.scores + static_cast<int64_t>(row) * plan.slice * plan.cluster + slice.first;
    begin_scores<FP8, WARPGROUPS>(data, sizes, slice, ring);
    score<FP8, WARPGROUPS>(data, sizes, slice, query, ring, [&](int i, bool inside, uint32_t key) {
        if (inside && threadIdx.x % 4 < 2) to[i] = key;
    });
}

#ifdef STAMPS
__device__ long long stamps[1024][16];
#define STAMP(i) do { if (threadIdx.x == 0) { long long t; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)); \
    stamps[(blockIdx.y * gridDim.x + blockIdx.x) % 1024][i] = (i) == 0 ? t : clock64(); } } while (0)
#else
#define STAMP(i)
#endif

// Blocks of a row that are done. The last one sets it back, so that every launch begins with zeros.
constexpr int MOST_JOINED = 264;  // rows
__device__ uint32_t done[MOST_JOINED];

// One launch without clusters: block (part, row) scores a part of the row's entries, and the last of a row to end
// chooses. It knows the largest score of each unit of 8 or 16 entries. An entry among the k highest is in one of the k
// units with the highest of these, so it finds these units first, and then the entries in them.
//
// plan.scores: for each row its scores, and behind them its units' largest ones; plan.slice entries, a multiple of 64.
template <bool FP8, int WARPGROUPS>
__global__ void __launch_bounds__(WARPGROUPS * 128, 1)
    score_and_join(const Tensors data, const Sizes sizes, const Plan plan) {
    constexpr int THREADS = WARPGROUPS * 128;
    extern __shared__ __align__(1024) unsigned char raw[];
    STAMP(0);
    STAMP(1);
#ifdef PREFETCH_CODE
    {
        uint64_t code = reinterpret_cast<uint64_t>(&score_and_join<FP8, WARPGROUPS>);
        asm volatile("" : "+l"(code));
        if (threadIdx.x * 128 < PREFETCH_CODE) asm volatile("prefetch.global.L2 [%0];" ::"l"(code + threadIdx.x * 128));
    }
#endif
    Shared& shared = *reinterpret_cast<Shared*>(raw);
    uint8_t* ring = raw + sizeof(Shared);
    int* pages = reinterpret_cast<int*>(ring + WARPGROUPS * 4 * Ring<FP8>::BYTES);
    const int row = blockIdx.y, part = blockIdx.x;
    const int* table = data.table + static_cast<int64_t>(row / sizes.queries) * sizes.blocks;
    const int seen = clamped(__ldg(data.visible + row), sizes);
    const bool early = sizes.blocks <= 2 * THREADS;  // the pages of the row are read before its length is known
    int page[2] = {};
    if (early) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (threadIdx.x + i * THREADS < sizes.blocks) page[i] = __ldg(table + threadIdx.x + i * THREADS);
    } else {
        prefetch_table<THREADS>(data, sizes, row);
    }
    QueryParts<THREADS> query;
    query.load(data, sizes, row);
    if (seen <= sizes.topk) {
        take_all<THREADS>(data, sizes, row, seen, {part, plan.chunks});
        return;
    }
    const int tiles = (seen + TILE - 1) / TILE, each = (tiles + plan.chunks - 1) / plan.chunks * TILE;
    const int parts = (tiles * TILE + each - 1) / each;  // that have entries
    if (part >= parts) return;
    const Slice slice{part * each, min(each, seen - part * each), pages};
    STAMP(2);
    if (early) {
        const int from = slice.first >> sizes.page_shift, upto = slice.first + slice.count - 1 >> sizes.page_shift;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int at = threadIdx.x + i * THREADS;
            if (at >= from && at <= upto) pages[at - from] = page[i];
        }
    } else {
        Pages<THREADS> load;
        load.load(data, sizes, row, slice.first, slice.count);
        load.store(pages);
    }
    __syncthreads();
    begin_scores<FP8, WARPGROUPS>(data, sizes, slice, ring);
    query.store(shared.query);  // while the keys are on their way
    ptx::fence_proxy_async_shared();
    __syncthreads();
    STAMP(3);
    const int log_unit = plan.room, unit = 1 << log_unit;
    uint32_t* scores = plan.scores + static_cast<int64_t>(row) * (plan.slice + (plan.slice >> log_unit));
    uint32_t* largest = scores + plan.slice;
#ifdef DRY
    if (threadIdx.x == 0) shared.search.in_bin = shared.search.bin = shared.search.over = 0;
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
    if (pass == 1) {
#else
    constexpr int pass = 1;
#endif
    score<FP8, WARPGROUPS>(data, sizes, slice, shared.query, ring, [&](int i, bool inside, uint32_t key) {
        const int lane = threadIdx.x % WARP;
        if (lane % 4 < 2 && inside) scores[slice.first + i] = key;
        uint32_t most = inside ? key : 0;
#pragma unroll
        for (int apart = 4; apart < WARP; apart *= 2) most = max(most, __shfl_xor_sync(~0u, most, apart));
        if (unit == 16) most = max(most, __shfl_xor_sync(~0u, most, 1));
        if (lane < 16 >> log_unit && inside) largest[slice.first + i >> log_unit] = most;
    });
    STAMP(4);
    Search& search = shared.search;
    __syncthreads();
    STAMP(5);
    if (parts > 1) {
        if (threadIdx.x == 0) {
            __threadfence();
            search.bin = atomicInc(&done[row], parts - 1);
            __threadfence();
        }
        __syncthreads();
        if (search.bin != parts - 1) return;
    }
    STAMP(6);
#ifdef DRY
    }
    Search& search = shared.search;
#endif
    const int units = (seen - 1 >> log_unit) + 1, chosen = min(units, sizes.topk);
    uint32_t* keys = reinterpret_cast<uint32_t*>(ring);  // the ring and the pages are done with
    int* list = reinterpret_cast<int*>(keys + max(plan.slice >> log_unit, sizes.topk << log_unit));
    int* at_hand = list + sizes.topk;  // the row's pages, if they are few
    int* out = data.out + static_cast<int64_t>(row) * sizes.topk;
    int count = pass ? units : 0;
    if (early && pass)
        for (int i = threadIdx.x; i <= seen - 1 >> sizes.page_shift; i += THREADS) at_hand[i] = __ldg(table + i);
    uint32_t least = 0;
#pragma unroll 1
    for (int stage = 1 - pass; stage < 2; ++stage) {
        Range range;
        begin<THREADS>(search);
        if (stage == 0) {
#pragma unroll UNROLL
            for (int i = threadIdx.x; i < count; i += THREADS) keys[i] = __ldcg(largest + i), range.take(keys[i]);
        } else {
            count = pass ? chosen << log_unit : 0;
#pragma unroll UNROLL
            for (int i = threadIdx.x; i < count; i += THREADS) {
                const int entry = list[i >> log_unit] << log_unit | i & unit - 1;
                const uint32_t key = entry < seen ? __ldcg(scores + entry) : 0;
                keys[i] = key;
                if (key >= least) range.take(key);
            }
        }
        __syncthreads();
        if (stage == 0 && units <= sizes.topk) {
            for (int i = threadIdx.x; i < units; i += THREADS) list[i] = i;
            least = 1;
            __syncthreads();
        } else {
            select<THREADS>(search, keys, count, sizes.topk, range, Cluster{0, 1}, [&](int i, int to) {
                if (stage == 0) {
                    list[to] = i;
                    return;
                }
                const int entry = list[i >> log_unit] << log_unit | i & unit - 1, in_page = entry & (1 << sizes.page_shift) - 1;
                const int at = entry >> sizes.page_shift;
                out[to] = (early ? at_hand[at] : __ldg(table + at)) << sizes.page_shift | in_page;
            });
            least = search.last;
            __syncthreads();
        }
        STAMP(7 + stage);
    }
#ifdef DRY
    }
#endif
}

// Launch `kernel` in clusters. -> a cudaError_t.
template <class Kernel>
cudaError_t launch_clusters(Kernel kernel, int rows, int threads, size_t bytes, const Tensors& data,
                            const Sizes& sizes, const Plan& plan) {
    if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
        return error;
    if (plan.cluster > 8)
        if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1))
            return error;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = plan.cluster, attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = rows * plan.cluster, config.blockDim = threads, config.dynamicSmemBytes = bytes;
    config.attrs = &attribute, config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, data, sizes, plan);
}

template <bool FP8>
cudaError_t run(const Tensors& data, const Sizes& sizes, const Plan& plan, int warpgroups) {
    const auto pages = [&](int entries) { return ((entries >> sizes.page_shift) + 2) * 4; };
    if (!plan.cluster) {
        const size_t part = (plan.slice / TILE + plan.chunks - 1) / plan.chunks * TILE;  // entries of a block, at most
        const size_t found = 4 * (std::max(plan.slice >> plan.room, sizes.topk << plan.room) + sizes.topk + std::min(sizes.blocks, 1024));
        const size_t bytes = sizeof(Shared) + std::max<size_t>(16 * Ring<FP8>::BYTES + pages(part), found);
        const auto kernel = score_and_join<FP8, 4>;
        if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
            return error;
        kernel<<<dim3(plan.chunks, sizes.rows), 512, bytes>>>(data, sizes, plan);
        return cudaGetLastError();
    }
    const size_t scores = sizeof(Shared) + plan.room * 4 + pages(plan.room), ring = warpgroups * 4 * Ring<FP8>::BYTES;
    if (!plan.chunk) {
        if (warpgroups == 2)
            return launch_clusters(search<FP8, 2, false>, sizes.rows, 256, scores + ring, data, sizes, plan);
        return launch_clusters(search<FP8, 4, false>, sizes.rows, 512, scores + ring, data, sizes, plan);
    }
    const size_t chunk = sizeof(Query) + ring + pages(plan.chunk);
    if (const cudaError_t error =
            cudaFuncSetAttribute(score_all<FP8, 4>, cudaFuncAttributeMaxDynamicSharedMemorySize, chunk))
        return error;
    score_all<FP8, 4><<<dim3(plan.chunks, sizes.rows), 512, chunk>>>(data, sizes, plan);
    if (const cudaError_t error = cudaGetLastError()) return error;
    return launch_clusters(search<FP8, 4, true>, sizes.rows, 512, scores, data, sizes, plan);
}

}  // namespace indexer

#ifdef STAMPS
extern "C" int read_stamps(long long* to) {
    return cudaMemcpyFromSymbol(to, indexer::stamps, sizeof(indexer::stamps));
}
#endif

// tensors: those of task.Data, in order. sizes: queries, heads, topk, blocks, log2 of P, rows, bytes of a page, 1 for fp8.
// plan: blocks of a cluster, entries of its slices, room, entries of a chunk (0: one launch), chunks, warpgroups. scores: the
// workspace of two launches, else null. -> a cudaError_t.
extern "C" int launch(void* const* tensors, const int64_t* sizes, const int* plan, uint32_t* scores) {
    using namespace indexer;
    const Tensors data{static_cast<const __nv_bfloat16*>(tensors[0]), static_cast<const float*>(tensors[1]),
                       static_cast<const uint8_t*>(tensors[2]),       static_cast<const int*>(tensors[3]),
                       static_cast<const int*>(tensors[4]),           static_cast<int*>(tensors[5])};
    const Sizes s{static_cast<int>(sizes[0]), static_cast<int>(sizes[1]), static_cast<int>(sizes[2]),
                  static_cast<int>(sizes[3]), static_cast<int>(sizes[4]), static_cast<int>(sizes[5]),
                  sizes[6]};
    const Plan p{plan[0], plan[1], plan[2], plan[3], plan[4], scores};
    return sizes[7] ? run<true>(data, s, p, plan[5]) : run<false>(data, s, p, plan[5]);
}
