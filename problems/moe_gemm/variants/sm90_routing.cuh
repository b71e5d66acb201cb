// Which tokens each expert has, found on the device, and their rows in that order, as wgmma wants them.
//
// The slots t k + j of all tokens are sorted by expert, stably, by a cluster of blocks: each warp counts, by expert, a
// piece of the slots; sums of these say where its own begin; and a second pass counts again and writes. No atomics:
// results repeat. An expert with few slots is one item of a list for such experts; the slots of another are cut into
// items of a second list, of at most so many, as even as eights allow.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "launch.cuh"
#include "ptx.cuh"
#include "sm90_decode_tokens.cuh"
#include "warp.cuh"

namespace prefill {

enum { BF16, NVFP4, FP8 };  // forms of activations: decode_experts' numbers

constexpr int ROUTE_BLOCKS = 8;       // the cluster that sorts
constexpr int ROUTE_THREADS = 1024;   // of a block
constexpr int COUNTERS = 48 * 1024;   // of the warps' histograms, in shared memory: 4 bytes each
constexpr int ROUTE_EXPERTS = 4096;   // at most: twice as many more words, see sort
constexpr int AT_ONCE = 8;            // loads in flight, of a thread

// One word has sums of slots and, from these bits on, of the items of either list.
constexpr int FEW_AT = 28, MANY_AT = 41;
constexpr int64_t ROUTE_SLOTS = int64_t(1) << FEW_AT;  // there must be less
static_assert(ROUTE_EXPERTS < 1 << (MANY_AT - FEW_AT), "each can be an item of `few`");
__device__ __forceinline__ int slots_of(uint64_t sums) { return int(sums & (1u << FEW_AT) - 1); }
__device__ __forceinline__ int few_of(uint64_t sums) { return int(sums >> FEW_AT & (1u << (MANY_AT - FEW_AT)) - 1); }
__device__ __forceinline__ int many_of(uint64_t sums) { return int(sums >> MANY_AT); }

struct List {
    int4* items;  // expert, first position in the order, slots, items of this expert
    int* ready;   // a counter for each item, zero
    int* head;    // [2] items there are, zero
};

// What routing finds. Slots whose id is no expert are in none of it.
struct Tables {
    int* slot;       // [T k] slots t k + j, sorted by expert
    int* token;      // [T k] their t
    float* weight;   // [T k] their routing weights
    List few, many;  // of experts with few slots, and of the others
};

// Items there can be in both lists together, if those of `many` have at most `most` slots.
__host__ __device__ inline int64_t most_items(int64_t slots, int experts, int most) {
    return slots / most + (experts < slots ? experts : slots);
}

// Warps of a block that count: each needs a counter for each expert.
__host__ __device__ inline int counting_warps(int experts) {
    const int most = COUNTERS / experts;
    return most < ROUTE_THREADS / 32 ? most : ROUTE_THREADS / 32;
}
inline size_t route_shared_bytes(int experts) { return size_t(4) * experts * (counting_warps(experts) + 2); }

// f(slot, expert, place, weight) for the slots from `from` to `to` whose id is an expert, by a warp. place: how many
// that expert had before, by `counters`, which go on counting.
template <bool WEIGHTS, class F>
__device__ __forceinline__ void count(const int* ids, const float* weights, int from, int to, int experts,
                                      int* counters, F f) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int first = from + lane; first - lane < to; first += 32 * AT_ONCE) {
        int id[AT_ONCE];
        float weight[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int slot = first + 32 * i;
            id[i] = slot < to ? __ldg(ids + slot) : -1;
            weight[i] = WEIGHTS && slot < to ? __ldg(weights + slot) : 0;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const bool real = unsigned(id[i]) < unsigned(experts);
            const uint32_t same = __match_any_sync(~0u, real ? id[i] : -1);
            const int before = __popc(same & (1u << lane) - 1), had = real ? counters[id[i]] : 0;
            __syncwarp();
            if (real && before == 0) counters[id[i]] = had + __popc(same);
            __syncwarp();
            if (real) f(first + 32 * i, id[i], had + before, weight[i]);
        }
    }
}

// few: slots up to which an expert is one item of that list. many: the most of an item of the other.
__device__ __forceinline__ void sort(const int* ids, const float* weights, const Tables& tables, int slots, int topk,
                                     int experts, int few, int many) {
    // [warps][experts], then [experts] how many slots the block has, then [experts] where these begin.
    extern __shared__ int counters[];
    __shared__ uint64_t sums[ROUTE_THREADS / 32];
    const int warps = counting_warps(experts), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int rank = int(ptx::cluster_rank()), all_warps = ROUTE_BLOCKS * warps;
    int* const total = counters + warps * experts;
    int* const begin = total + experts;
    for (int i = threadIdx.x; i < warps * experts; i += ROUTE_THREADS) counters[i] = 0;
    if (rank == 0)
        for (int i = threadIdx.x; i < most_items(slots, experts, many); i += ROUTE_THREADS)
            tables.few.ready[i] = tables.many.ready[i] = 0;
    const int piece = (slots + all_warps * 32 - 1) / (all_warps * 32) * 32;
    const int from = min(piece * (rank * warps + warp), slots), to = min(from + piece, slots);
    __syncthreads();
    if (warp < warps)
        count<false>(ids, weights, from, to, experts, counters + warp * experts, [](int, int, int, float) {});
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += ROUTE_THREADS) {
        int mine = 0;
        for (int w = 0; w < warps; ++w) {
            const int more = counters[w * experts + e];
            counters[w * experts + e] = mine;
            mine += more;
        }
        total[e] = mine;
    }
    ptx::cluster_sync();

    uint64_t before = 0;  // slots and items of the experts below
#pragma unroll 1
    for (int first = 0; first < experts; first += ROUTE_THREADS) {
        const int e = first + threadIdx.x;
        int mine = 0, of_lower_blocks = 0;  // slots of all blocks
        for (int r = 0; r < ROUTE_BLOCKS && e < experts; ++r) {
            if (r == rank) of_lower_blocks = mine;
            mine += ptx::load_cluster(ptx::in_block(r, ptx::smem_address(total + e)));
        }
        const bool is_few = mine <= few;
        const int items = is_few ? mine > 0 : (mine + many - 1) / many;
        const uint64_t value = uint64_t(items) << (is_few ? FEW_AT : MANY_AT) | uint32_t(mine);
        uint64_t sum = warps::sum_up_to(value, lane);
        if (lane == 31) sums[warp] = sum;
        __syncthreads();
        uint64_t all = 0;
#pragma unroll 8
        for (int w = 0; w < ROUTE_THREADS / 32; ++w) {
            if (w == warp) sum += all;
            all += sums[w];
        }
        __syncthreads();
        sum += before - value;
        before += all;
        if (e >= experts) continue;
        const int position = slots_of(sum);
        begin[e] = position + of_lower_blocks;
        if (rank != 0 || !items) continue;
        int4* const to = is_few ? tables.few.items + few_of(sum) : tables.many.items + many_of(sum);
        const int eights = (mine + 7) / 8, each = eights / items, longer = eights % items;
        for (int i = 0; i < items; ++i) {
            const int at = 8 * (i * each + min(i, longer)), end = 8 * ((i + 1) * each + min(i + 1, longer));
            to[i] = make_int4(e, position + at, min(end, mine) - at, items);
        }
    }
    if (rank == 0 && threadIdx.x == 0) {
        tables.few.head[0] = few_of(before), tables.few.head[1] = 0;
        tables.many.head[0] = many_of(before), tables.many.head[1] = 0;
    }
    ptx::cluster_sync();  // all have read the totals; and the block knows where slots begin
    if (warp < warps)
        count<true>(ids, weights, from, to, experts, counters + warp * experts,
                    [&](int slot, int expert, int place, float weight) {
                        const int at = begin[expert] + place;
                        tables.slot[at] = slot;
                        tables.token[at] = slot / topk;
                        tables.weight[at] = weight;
                    });
}

__global__ void __cluster_dims__(ROUTE_BLOCKS, 1, 1) __launch_bounds__(ROUTE_THREADS)
    route(const int* ids, const float* weights, Tables tables, int slots, int topk, int experts, int few, int many) {
    programmatic::trigger();
    sort(ids, weights, tables, slots, topk, experts, few, many);
}

constexpr int GATHER_THREADS = 256, GATHER_CHUNKS = 8;

// Of a pair, over those of `lanes` that differ in the three bits from APART up, the larger magnitudes of either half.
template <int APART>
__device__ __forceinline__ uint32_t largest_of_eight(uint32_t pair, uint32_t lanes) {
#pragma unroll
    for (int apart = APART; apart < 8 * APART; apart *= 2)
        pair = decode::larger(pair, __shfl_xor_sync(lanes, pair, apart));
    return pair;
}

// Of a group of 128 values, which these lanes have as eight pairs each, decode::least_normal.
__device__ __forceinline__ uint32_t least_of_eight(const uint32_t (&pairs)[8], uint32_t lanes) {
    const uint32_t most = largest_of_eight<1>(decode::largest(pairs), lanes);
    return decode::least_normal(decode::larger(most, most >> 16));
}

// Of item blockIdx.x, those of `many` first, GATHER_CHUNKS chunks of 64 columns: x's rows -> [chunks][slots in their
// order][64]. Of 64 columns position 16 j + 8 s + 2 c + h gets column 16 c + 4 j + 2 s + h: pairs of columns are the
// words of a matrix 4 by 8, transposed. 16-byte piece c of the item's row r is at c ^ r % 8, as in shared memory.
// Values are as ACTIVATION has them, of NVFP4 with the expert's in_scale, and without it. For NVFP4 a thread loads half
// a block, and eight threads turn their words in shared memory.
template <int ACTIVATION>
__global__ void __launch_bounds__(GATHER_THREADS)
    gather(const __nv_bfloat16* x, const float* in_scale, __nv_bfloat16* gathered, Tables tables, int slots,
           int hidden) {
    __shared__ uint4 turned[GATHER_THREADS];
    programmatic::trigger();
    programmatic::wait();
    const int many = __ldcg(tables.many.head), both = many + __ldcg(tables.few.head), index = blockIdx.x;
    if (index >= both) return;
    const int4 item = __ldcg(index < many ? tables.many.items + index : tables.few.items + index - many);
    const int piece = threadIdx.x % 8, first = blockIdx.y * GATHER_CHUNKS, left = hidden / 64 - first;
    const decode::InputScale by(ACTIVATION == NVFP4 ? __ldg(in_scale + item.x) : 1.f);
    const uint32_t eight = 0xFFu << threadIdx.x % 32 / 8 * 8;  // lanes of a row
#pragma unroll 1
    for (int row = threadIdx.x / 8; row < item.z; row += GATHER_THREADS / 8) {
        const int64_t token = __ldcg(tables.token + item.y + row);
        const uint32_t* const from = reinterpret_cast<const uint32_t*>(x + token * hidden) + first * 32 + piece;
        uint4* const to = reinterpret_cast<uint4*>(gathered) + (int64_t(first) * slots + item.y + row) * 8 +
                          (piece ^ row % 8);
        uint4 v[GATHER_CHUNKS];
#pragma unroll
        for (int i = 0; i < GATHER_CHUNKS; ++i) {
            if (ACTIVATION == FP8) v[i] = make_uint4(0, 0, 0, 0);
            if (i >= left) break;
            const uint32_t* const at = from + i * 32;
            if (ACTIVATION == NVFP4)
                v[i] = __ldg(reinterpret_cast<const uint4*>(at - piece) + piece);
            else
                v[i] = make_uint4(__ldg(at), __ldg(at + 8), __ldg(at + 16), __ldg(at + 24));
        }
#pragma unroll
        for (int i = 0; i < GATHER_CHUNKS && ACTIVATION == NVFP4; ++i) {
            if (i >= left) break;
            uint32_t words[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
            const float most = decode::largest_of(words);
            decode::quantise_words(words, fmaxf(most, __shfl_xor_sync(eight, most, 1)), by);
            const auto word = reinterpret_cast<uint32_t(*)[4]>(turned + threadIdx.x / 8 * 8);
#pragma unroll
            for (int j = 0; j < 4; ++j) word[4 * (piece % 2) + j ^ row % 8][piece / 2] = words[j];
            __syncwarp(eight);
            v[i] = turned[threadIdx.x ^ row % 8];
            __syncwarp(eight);
        }
#pragma unroll
        for (int i = 0; i < GATHER_CHUNKS && ACTIVATION == FP8; i += 2) {
            uint32_t pairs[8] = {v[i].x, v[i].y, v[i].z, v[i].w, v[i + 1].x, v[i + 1].y, v[i + 1].z, v[i + 1].w};
            const uint32_t least = least_of_eight(pairs, eight);
#pragma unroll
            for (uint32_t& pair : pairs) pair = decode::nearest_e4m3(pair, least);
            v[i] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
            v[i + 1] = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
        }
#pragma unroll
        for (int i = 0; i < GATHER_CHUNKS; ++i)
            if (i < left) to[int64_t(i) * slots * 8] = v[i];
    }
}

}  // namespace prefill
