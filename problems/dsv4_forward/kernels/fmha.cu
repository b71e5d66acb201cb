// Attention to plain pages, for few queries, in two launches: each ENTRIES entries of a query's lists by themselves, then
// their join, which rotates the outputs back.
//
// Formulas are those of torch_ops/fmha.py and rope.py; all arithmetic is fp32. T is the dtype of queries and outputs, E
// that of the pages, each bf16 or fp32. Sums are in an order that depends on an entry's place in its list only, so a
// query's bits depend neither on the others nor on holes behind its list. The launcher returns the CUDA error of its
// launches.
#include "launch.cuh"
#include "rows.cuh"

namespace attention {  // not nameless, since the launcher's parameter is of its type

using rows::ALL;

constexpr int ENTRIES = 32;                // of a chunk: one a lane
constexpr int HEADS = 8;                   // of a block: one a warp in the softmax
constexpr int THREADS = 32 * HEADS;
constexpr int EACH = ENTRIES / HEADS;      // entries that a warp scores: with all heads a sum for each lane
constexpr int MOST_WIDTH = 2 * THREADS;    // two values of an output a thread
constexpr float NONE = -__builtin_huge_valf();  // the largest score of a chunk of holes

// A list a query, and the rows that it names; -1 is a hole. data may be null where length is 0.
struct List {
    const void* data;
    const int* index;  // (queries, length)
    int length;
};

// q: (queries, heads, width), as out is. parts: (queries, heads, chunks, width), of each chunk sum_j exp(a_j - largest)
// c_j; totals: (queries, heads, chunks), the largest score and sum_j exp(a_j - largest). cosine, sine: (queries, half).
struct Attention {
    const void* q;
    List window, cache;
    const float *sink, *cosine, *sine;
    float* parts;
    float2* totals;
    void* out;
    float* lse;
    int heads, width, half, windows, chunks;  // windows: chunks of the window
    float scale;
};

__device__ __forceinline__ float4 load_four(const float* p) { return *reinterpret_cast<const float4*>(p); }
__device__ __forceinline__ float4 load_four(const __nv_bfloat16* p) {
    const uint2 word = *reinterpret_cast<const uint2*>(p);
    const float2 low = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(word.x));
    const float2 high = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(word.y));
    return make_float4(low.x, low.y, high.x, high.y);
}
__device__ __forceinline__ float2 load_two(const float* p) { return *reinterpret_cast<const float2*>(p); }
__device__ __forceinline__ float2 load_two(const __nv_bfloat16* p) {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(p));
}

// NaN if one is.
__device__ __forceinline__ float larger(float a, float b) { return b > a || b != b ? b : a; }

// Sums over the lanes: a lane keeps the half of its sums whose numbers have its bit, until it has the one of its number.
template <int STEP>
__device__ __forceinline__ void halve(float (&sum)[HEADS * EACH]) {
    const bool upper = threadIdx.x & STEP;
#pragma unroll
    for (int i = 0; i < STEP; i++) {
        const float low = sum[i], high = sum[i + STEP];
        sum[i] = (upper ? high : low) + __shfl_xor_sync(ALL, upper ? low : high, STEP);
    }
    if constexpr (STEP > 1) halve<STEP / 2>(sum);
}

// The scores of EACH entries of a warp with all heads: lane h * EACH + e has that of head h and entry e.
template <typename E>
__device__ __forceinline__ float scores(const E* const (&entry)[EACH], const float* q, int width) {
    const int lane = threadIdx.x % 32;
    float sum[HEADS * EACH] = {};
    for (int at = 4 * lane; at < width; at += 128) {
        float4 key[EACH];
#pragma unroll
        for (int e = 0; e < EACH; e++) key[e] = entry[e] ? load_four(entry[e] + at) : make_float4(0, 0, 0, 0);
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            const float4 query = load_four(q + h * width + at);
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                float& mine = sum[h * EACH + e];
                mine = fmaf(query.x, key[e].x, mine), mine = fmaf(query.y, key[e].y, mine);
                mine = fmaf(query.z, key[e].z, mine), mine = fmaf(query.w, key[e].w, mine);
            }
        }
    }
    halve<16>(sum);
    return sum[0];
}

// Grid (chunks, groups of HEADS heads, queries).
template <typename T, typename E>
__global__ void __launch_bounds__(THREADS, 2) chunk_kernel(const Attention of) {
    __shared__ __align__(16) float smem_q[HEADS * MOST_WIDTH];
    __shared__ __align__(16) float smem_weights[ENTRIES][HEADS];
    __shared__ float smem_scores[HEADS][ENTRIES];
    __shared__ const E* smem_entries[ENTRIES];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, width = of.width;
    const int head0 = blockIdx.y * HEADS, heads = min(HEADS, of.heads - head0);
    const long long query = blockIdx.z;
    programmatic::wait();
    programmatic::trigger();
    const bool first = static_cast<int>(blockIdx.x) < of.windows;
    const List& list = first ? of.window : of.cache;
    const int place = (blockIdx.x - (first ? 0 : of.windows)) * ENTRIES + lane;
    const int id = place < list.length ? list.index[query * list.length + place] : -1;
    const E* mine = id < 0 ? nullptr : static_cast<const E*>(list.data) + static_cast<long long>(id) * width;
    const long long head = query * of.heads + head0;
    if (!__any_sync(ALL, id >= 0)) {  // in all warps
        if (threadIdx.x < heads) of.totals[(head + threadIdx.x) * of.chunks + blockIdx.x] = make_float2(NONE, 0.0f);
        return;
    }
    if (warp == 0) smem_entries[lane] = mine;
    const T* q = static_cast<const T*>(of.q) + head * width;
    for (int i = threadIdx.x; i < HEADS * width; i += THREADS)
        smem_q[i] = i < heads * width ? rows::load(q + i) * of.scale : 0.0f;
    __syncthreads();
    const E* entry[EACH];
#pragma unroll
    for (int e = 0; e < EACH; e++) entry[e] = smem_entries[warp * EACH + e];
    smem_scores[lane / EACH][warp * EACH + lane % EACH] = scores(entry, smem_q, width);
    __syncthreads();
    const float score = id < 0 ? NONE : smem_scores[warp][lane];
    float top = score;
    for (int step = 16; step; step /= 2) top = larger(top, __shfl_xor_sync(ALL, top, step));
    const float weight = id < 0 ? 0.0f : expf(score - top);
    float total = weight;
    for (int step = 16; step; step /= 2) total += __shfl_xor_sync(ALL, total, step);
    if (lane == 0 && warp < heads) of.totals[(head + warp) * of.chunks + blockIdx.x] = make_float2(top, total);
    smem_weights[lane][warp] = weight;
    __syncthreads();
    const int at = 2 * threadIdx.x;
    if (at >= width) return;
    float2 sum[HEADS] = {};
#pragma unroll 8
    for (int e = 0; e < ENTRIES; e++) {
        const E* from = smem_entries[e];
        const float2 value = from ? load_two(from + at) : make_float2(0, 0);
        const float4 low = load_four(smem_weights[e]), high = load_four(smem_weights[e] + 4);
        const float factor[HEADS] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int h = 0; h < HEADS; h++)
            sum[h].x = fmaf(factor[h], value.x, sum[h].x), sum[h].y = fmaf(factor[h], value.y, sum[h].y);
    }
#pragma unroll
    for (int h = 0; h < HEADS; h++)
        if (h < heads)
            *reinterpret_cast<float2*>(of.parts + ((head + h) * of.chunks + blockIdx.x) * width + at) = sum[h];
}

// Block v: head v of all queries' heads. Chunks of holes have no parts.
template <typename T>
__global__ void __launch_bounds__(THREADS) join_kernel(const Attention of) {
    const long long vector = blockIdx.x, query = vector / of.heads;
    const float sink = of.sink[vector % of.heads];
    programmatic::wait();
    programmatic::trigger();
    const float2* totals = of.totals + vector * of.chunks;
    float top = NONE;
    for (int i = 0; i < of.chunks; i++) top = larger(top, totals[i].x);
    const int at = 2 * threadIdx.x;
    const float* part = of.parts + vector * of.chunks * of.width + at;
    float total = 0.0f;
    float2 sum = make_float2(0, 0);
    for (int i = 0; i < of.chunks; i++) {
        const float2 mine = totals[i];
        if (mine.x == NONE) continue;
        const float factor = expf(mine.x - top);
        total = fmaf(factor, mine.y, total);
        if (at >= of.width) continue;
        const float2 value = load_two(part + static_cast<long long>(i) * of.width);
        sum.x = fmaf(factor, value.x, sum.x), sum.y = fmaf(factor, value.y, sum.y);
    }
    if (threadIdx.x == 0) of.lse[vector] = top == NONE ? -NONE : logf(total) + top;
    if (at >= of.width) return;
    const float whole = total + expf(sink - top);
    float a = top == NONE ? 0.0f : sum.x / whole, b = top == NONE ? 0.0f : sum.y / whole;
    const int pair = threadIdx.x - (of.width / 2 - of.half);
    if (pair >= 0) {
        a = rows::rounded<T>(a), b = rows::rounded<T>(b);
        const float c = of.cosine[query * of.half + pair], s = of.sine[query * of.half + pair], before = a;
        a = before * c + b * s, b = b * c - before * s;
    }
    T* out = static_cast<T*>(of.out) + vector * of.width + at;
    rows::store(out, a), rows::store(out + 1, b);
}

int chunks_of(int length) { return (length + ENTRIES - 1) / ENTRIES; }

template <typename T>
int attend(const Attention& of, int queries, int entries_bf16) {
    const dim3 grid(of.chunks, (of.heads + HEADS - 1) / HEADS, queries);
    if (of.chunks) {
        const auto kernel = entries_bf16 ? chunk_kernel<T, __nv_bfloat16> : chunk_kernel<T, float>;
        if (const int code = programmatic::launch(kernel, grid, dim3(THREADS), 0, of)) return code;
    }
    return programmatic::launch(join_kernel<T>, dim3(queries * of.heads), dim3(THREADS), 0, of);
}

}  // namespace attention

// of: but for totals, windows and chunks. parts: for each query, head and chunk of either list width + 2 floats. width: a
// multiple of 4, at most MOST_WIDTH. Pages begin at multiples of 16 bytes.
extern "C" int launch_fmha(const attention::Attention* given, int queries, int q_bf16, int entries_bf16) {
    attention::Attention of = *given;
    of.windows = attention::chunks_of(of.window.length);
    of.chunks = of.windows + attention::chunks_of(of.cache.length);
    of.totals = reinterpret_cast<float2*>(of.parts + static_cast<long long>(queries) * of.heads * of.chunks * of.width);
    const auto run = q_bf16 ? attention::attend<__nv_bfloat16> : attention::attend<float>;
    return run(of, queries, entries_bf16);
}
