// Scores and top k in one launch: a cluster of blocks a row, each with a slice of the entries, whose scores never leave
// shared memory. In two launches where rows are so few and long that their clusters would leave most of the GPU idle:
// then blocks all over it score, and clusters search what they wrote.
#include <cuda_runtime.h>

#include "sm90_score.cuh"
#include "sm90_select.cuh"

namespace indexer {

// How a row's entries are shared out; what depends on the call's shape only.
struct Plan {
    int cluster;        // blocks of a cluster
    int slice;          // entries that a block of a cluster has room for, a multiple of TILE
    int chunk, chunks;  // two launches: entries that a block scores, and such blocks a row
    uint32_t* scores;   // two launches: ordered scores, `slice * cluster` a row
};

// Shared memory of a block behind its Query and Search: the slice's scores, then its pages.
struct __align__(1024) Shared {
    Query query;
    Search search;
};
static_assert(sizeof(Shared) == 35 * 1024, "SHARED of the launcher");

__device__ __forceinline__ int clamped(int seen, const Sizes& sizes) {
    return max(0, min(seen, sizes.blocks << sizes.page_shift));
}

// Bring the row of the table to L2 before it is known what of it is needed.
template <int THREADS>
__device__ __forceinline__ void prefetch_table(const Tensors& data, const Sizes& sizes, int row) {
    constexpr int LINE = 32;  // numbers
    const int* table = data.table + static_cast<int64_t>(row / sizes.queries) * sizes.blocks;
    for (int i = threadIdx.x * LINE; i < sizes.blocks; i += THREADS * LINE)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(table + i));
}

// The pages of a slice to shared memory. All threads; a block barrier must follow.
template <int THREADS>
__device__ __forceinline__ void load_pages(const Tensors& data, const Sizes& sizes, int row, int first, int count,
                                           int* to) {
    const int64_t block = static_cast<int64_t>(row / sizes.queries) * sizes.blocks + (first >> sizes.page_shift);
    const int last = first + count - 1, pages = count > 0 ? (last >> sizes.page_shift) - (first >> sizes.page_shift) + 1 : 0;
    for (int i = threadIdx.x; i < pages; i += THREADS) to[i] = __ldg(data.table + block + i);
}

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
    int* pages = reinterpret_cast<int*>(keys + plan.slice);
    const int row = blockIdx.x / plan.cluster;
    const Cluster cluster{static_cast<int>(blockIdx.x) % plan.cluster, plan.cluster};
    if constexpr (!SCORED) {
        prefetch_table<THREADS>(data, sizes, row);
        load_query<THREADS>(data, sizes, row, shared.query);
    }
    begin<THREADS>(shared.search);
    const int seen = clamped(__ldg(data.visible + row), sizes);
    if (seen <= sizes.topk) {  // alike in all blocks of the cluster
        take_all<THREADS>(data, sizes, row, seen, cluster);
        return;
    }
    cluster.say_begun();
    Slice slice{0, 0, pages};
    cut(seen, cluster, slice.first, slice.count);
    load_pages<THREADS>(data, sizes, row, slice.first, slice.count, pages);
    if constexpr (SCORED) {
        const uint32_t* from = plan.scores + static_cast<int64_t>(row) * plan.slice * plan.cluster + slice.first;
        for (int i = threadIdx.x; i < slice.count; i += THREADS) keys[i] = __ldcg(from + i);
    } else {
        ptx::fence_proxy_async_shared();
        __syncthreads();
        score<FP8, WARPGROUPS>(data, sizes, slice, shared.query, [&](int i, uint32_t key) { keys[i] = key; });
    }
    __syncthreads();
    int* out = data.out + static_cast<int64_t>(row) * sizes.topk;
    select<THREADS>(shared.search, keys, slice.count, sizes.topk, cluster,
                    [&](int i, int to) { out[to] = place(sizes, slice, i); });
}

// The first of two launches: block (chunk, row) scores a chunk of the row's entries.
template <bool FP8, int WARPGROUPS>
__global__ void __launch_bounds__(WARPGROUPS * 128, 1)
    score_all(const Tensors data, const Sizes sizes, const Plan plan) {
    constexpr int THREADS = WARPGROUPS * 128;
    extern __shared__ __align__(1024) unsigned char raw[];
    Query& query = *reinterpret_cast<Query*>(raw);
    int* pages = reinterpret_cast<int*>(raw + sizeof(Query));
    const int row = blockIdx.y, seen = clamped(__ldg(data.visible + row), sizes);
    Slice slice{static_cast<int>(blockIdx.x) * plan.chunk, 0, pages};
    slice.count = max(0, min(seen - slice.first, plan.chunk));
    if (seen <= sizes.topk || slice.count == 0) return;
    load_query<THREADS>(data, sizes, row, query);
    load_pages<THREADS>(data, sizes, row, slice.first, slice.count, pages);
    ptx::fence_proxy_async_shared();
    __syncthreads();
    uint32_t* to = plan.scores + static_cast<int64_t>(row) * plan.slice * plan.cluster + slice.first;
    score<FP8, WARPGROUPS>(data, sizes, slice, query, [&](int i, uint32_t key) { to[i] = key; });
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
    const int room = plan.slice * 4 + ((plan.slice >> sizes.page_shift) + 2) * 4;
    const size_t bytes = sizeof(Shared) + room;
    if (!plan.chunk) {
        if (warpgroups == 2)
            return launch_clusters(search<FP8, 2, false>, sizes.rows, 256, bytes, data, sizes, plan);
        return launch_clusters(search<FP8, 4, false>, sizes.rows, 512, bytes, data, sizes, plan);
    }
    const size_t chunk = sizeof(Query) + ((plan.chunk >> sizes.page_shift) + 2) * 4;
    score_all<FP8, 4><<<dim3(plan.chunks, sizes.rows), 512, chunk>>>(data, sizes, plan);
    if (const cudaError_t error = cudaGetLastError()) return error;
    return launch_clusters(search<FP8, 4, true>, sizes.rows, 512, bytes, data, sizes, plan);
}

}  // namespace indexer

// tensors: those of task.Data, in order. sizes: queries, heads, topk, blocks, log2 of P, rows, bytes of a page, 1 for fp8.
// plan: blocks of a cluster, entries of its slices, entries of a chunk (0: one launch), chunks, warpgroups. scores: the
// workspace of two launches, else null. -> a cudaError_t.
extern "C" int launch(void* const* tensors, const int64_t* sizes, const int* plan, uint32_t* scores) {
    using namespace indexer;
    const Tensors data{static_cast<const __nv_bfloat16*>(tensors[0]), static_cast<const float*>(tensors[1]),
                       static_cast<const uint8_t*>(tensors[2]),       static_cast<const int*>(tensors[3]),
                       static_cast<const int*>(tensors[4]),           static_cast<int*>(tensors[5])};
    const Sizes s{static_cast<int>(sizes[0]), static_cast<int>(sizes[1]), static_cast<int>(sizes[2]),
                  static_cast<int>(sizes[3]), static_cast<int>(sizes[4]), static_cast<int>(sizes[5]),
                  sizes[6]};
    const Plan p{plan[0], plan[1], plan[2], plan[3], scores};
    return sizes[7] ? run<true>(data, s, p, plan[4]) : run<false>(data, s, p, plan[4]);
}
